//! Documents in rows, and SQLite's errors for those that it refuses.

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::sqlite::SqliteRow;
use sqlx::{AssertSqlSafe, Row};

use super::SqliteDb;
use crate::db::{DbError, DbResult};

impl SqliteDb {
    pub(super) async fn put(
        &self,
        table: &str,
        columns: &[(&str, &str)],
        doc: &impl Serialize,
    ) -> DbResult<()> {
        let text = write(doc)?;
        let mut names = String::from("doc");
        let mut marks = String::from("?");
        for (name, _) in columns {
            names = format!("{names}, {name}");
            marks.push_str(", ?");
        }
        let sql =
            AssertSqlSafe(format!("INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})"));
        let mut query = sqlx::query(sql).bind(text);
        for (_, value) in columns {
            query = query.bind(*value);
        }
        query.execute(&self.pool).await.map_err(failed("keep a document"))?;
        Ok(())
    }

    pub(super) async fn find<T: DeserializeOwned>(
        &self,
        table: &'static str,
        id: &str,
    ) -> DbResult<Option<T>> {
        let sql = AssertSqlSafe(format!("SELECT doc FROM {table} WHERE id = ?"));
        let row = sqlx::query(sql)
            .bind(id)
            .fetch_optional(&self.pool)
            .await
            .map_err(failed("find a document"))?;
        row.map(|row| read(&row)).transpose()
    }

    pub(super) async fn run(
        &self,
        action: &'static str,
        sql: &'static str,
        binds: &[&str],
    ) -> DbResult<()> {
        let mut query = sqlx::query(sql);
        for bind in binds {
            query = query.bind(*bind);
        }
        query.execute(&self.pool).await.map_err(failed(action))?;
        Ok(())
    }

    pub(super) async fn all<T: DeserializeOwned>(
        &self,
        sql: &'static str,
        bind: Option<&str>,
    ) -> DbResult<Vec<T>> {
        let mut query = sqlx::query(sql);
        if let Some(bind) = bind {
            query = query.bind(bind);
        }
        let rows = query.fetch_all(&self.pool).await.map_err(failed("list documents"))?;
        rows.iter().map(read).collect()
    }
}

pub(in crate::db) fn failed<E>(action: &'static str) -> impl FnOnce(E) -> DbError
where
    E: std::error::Error + Send + Sync + 'static,
{
    move |source| match is_full(&source) {
        true => DbError::Full { action },
        false => DbError::Query { action, source: Box::new(source) },
    }
}

/// Whether SQLite found no room on the disk (`SQLITE_FULL`).
fn is_full(error: &dyn std::any::Any) -> bool {
    let Some(sqlx::Error::Database(database)) = error.downcast_ref::<sqlx::Error>() else {
        return false;
    };
    database.code().and_then(|code| code.parse::<u32>().ok()).is_some_and(|code| code & 0xff == 13)
}

pub(in crate::db) fn read<T: DeserializeOwned>(row: &SqliteRow) -> DbResult<T> {
    let text: &str = row.try_get("doc").map_err(failed("read a document"))?;
    serde_json::from_str(text).map_err(|source| DbError::Damaged { kind: kind::<T>(), source })
}

pub(super) fn write<T: Serialize>(doc: &T) -> DbResult<String> {
    serde_json::to_string(doc).map_err(|source| DbError::Damaged { kind: kind::<T>(), source })
}

fn kind<T>() -> &'static str {
    let name = std::any::type_name::<T>();
    name.rsplit("::").next().unwrap_or(name)
}

/// The word a unit variant is written as.
pub(super) fn word<T: Serialize>(value: &T) -> DbResult<String> {
    Ok(write(value)?.trim_matches('"').to_owned())
}
