//! Drives in SQLite: the one list that is sorted as the caller likes.
//!
//! Whatever a list is sorted by, the id decides between equals, so that pages join without a gap. A
//! cursor is the last drive's value and id; names and times have no colon in them.

use sqlx::sqlite::SqlitePool;
use sqlx::{AssertSqlSafe, QueryBuilder, Sqlite};

use super::sqlite::{failed, read, write};
use super::{DbResult, DriveOrder, DriveQuery, Page, Paged};
use crate::model::{Drive, Name, Timestamp};

pub(super) async fn keep(pool: &SqlitePool, drive: &Drive, conflict: &str) -> DbResult<bool> {
    let sql = AssertSqlSafe(format!(
        "INSERT INTO drives (id, project, name, created, updated, doc) \
         VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT {conflict}"
    ));
    let done = sqlx::query(sql)
        .bind(drive.id.as_str())
        .bind(drive.project.as_str())
        .bind(drive.name.as_str())
        .bind(sortable(drive.created_at))
        .bind(sortable(drive.updated_at))
        .bind(write(drive)?)
        .execute(pool)
        .await
        .map_err(failed("keep a drive"))?;
    Ok(done.rows_affected() > 0)
}

pub(super) async fn list(
    pool: &SqlitePool,
    project: Option<&Name>,
    query: &DriveQuery,
    page: &Page,
) -> DbResult<Paged<Drive>> {
    let column = match query.order {
        DriveOrder::Created => "created",
        DriveOrder::Updated => "updated",
        DriveOrder::Name => "name",
    };
    let (after, direction) = if query.ascending { (">", "ASC") } else { ("<", "DESC") };
    let mut sql = QueryBuilder::<Sqlite>::new("SELECT doc FROM drives WHERE 1 = 1");
    if let Some(project) = project {
        sql.push(" AND project = ").push_bind(project.to_string());
    }
    if let Some(prefix) = &query.name_prefix {
        let length = i64::try_from(prefix.chars().count()).unwrap_or(i64::MAX);
        sql.push(" AND substr(name, 1, ").push_bind(length).push(") = ").push_bind(prefix.clone());
    }
    if let Some(cursor) = &page.cursor {
        let (value, id) = cursor.rsplit_once(':').unwrap_or((cursor, ""));
        sql.push(format!(" AND ({column}, id) {after} ("))
            .push_bind(value.to_owned())
            .push(", ")
            .push_bind(id.to_owned())
            .push(")");
    }
    sql.push(format!(" ORDER BY {column} {direction}, id {direction} LIMIT "))
        .push_bind(i64::from(page.limit) + 1);
    let rows = sql.build().fetch_all(pool).await.map_err(failed("list drives"))?;
    let more = rows.len() > page.limit as usize;
    let items =
        rows.iter().take(page.limit as usize).map(read).collect::<DbResult<Vec<Drive>>>()?;
    let next = items.last().filter(|_| more).map(|drive| {
        let value = match query.order {
            DriveOrder::Created => sortable(drive.created_at),
            DriveOrder::Updated => sortable(drive.updated_at),
            DriveOrder::Name => drive.name.to_string(),
        };
        format!("{value}:{}", drive.id)
    });
    Ok(Paged { items, next })
}

fn sortable(at: Timestamp) -> String {
    format!("{:016}", at.as_millisecond().max(0))
}
