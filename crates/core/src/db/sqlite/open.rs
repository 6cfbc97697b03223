//! Opening the file, and knowing whether it can be used.
//!
//! One connection: SQLite has one writer anyway, and every statement takes microseconds. It is not
//! synced at every commit, because what it says can be found again in the manifests, which are synced
//! before anything is acknowledged.
//!
//! For the same reason it has no migrations: a file of another [`VERSION`] is emptied, and
//! [`Db::is_fresh`](crate::db::Db::is_fresh) reports that it has to be filled from the manifests.

use std::path::Path;
use std::time::Duration;

use sqlx::AssertSqlSafe;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};

use super::{SqliteDb, failed};
use crate::db::DbResult;

/// The version of the tables in `tables.sql`.
const VERSION: i64 = 8;

/// Files up to this size are checked when they are opened.
const CHECKED_UP_TO: u64 = 64 << 20;

impl SqliteDb {
    /// Opens the file, making it if it is not there.
    ///
    /// # Errors
    ///
    /// Returns [`DbError::Query`] when the file is not a database of ours.
    pub async fn open(file: &Path) -> DbResult<Self> {
        let options = SqliteConnectOptions::new()
            .filename(file)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Off);
        Self::connect(options).await
    }

    /// Makes an index that is gone with this process.
    ///
    /// # Errors
    ///
    /// Returns [`DbError::Query`] when there is no memory for it.
    pub async fn in_memory() -> DbResult<Self> {
        Self::connect(SqliteConnectOptions::new().in_memory(true)).await
    }

    async fn connect(options: SqliteConnectOptions) -> DbResult<Self> {
        let opened = SqlitePoolOptions::new()
            .max_connections(1)
            .min_connections(1)
            // One that is in memory is gone with its connection.
            .idle_timeout(None)
            .max_lifetime(None)
            // A file does not hang up; asking costs as much as a statement.
            .test_before_acquire(false)
            .connect_with(options.foreign_keys(true).pragma("cache_size", "-4096"))
            .await;
        let pool = opened.map_err(failed("open its file"))?;
        let version: i64 = sqlx::query_scalar("PRAGMA user_version")
            .fetch_one(&pool)
            .await
            .map_err(failed("tell its version"))?;
        let fresh = version != VERSION;
        if fresh {
            let tables: Vec<String> =
                sqlx::query_scalar("SELECT name FROM sqlite_schema WHERE type = 'table'")
                    .fetch_all(&pool)
                    .await
                    .map_err(failed("list its tables"))?;
            sqlx::raw_sql("PRAGMA foreign_keys = OFF")
                .execute(&pool)
                .await
                .map_err(failed("drop tables"))?;
            for table in tables {
                let sql = AssertSqlSafe(format!("DROP TABLE \"{table}\""));
                sqlx::raw_sql(sql).execute(&pool).await.map_err(failed("drop an old table"))?;
            }
            let sql = AssertSqlSafe(format!(
                "{}; PRAGMA user_version = {VERSION}; PRAGMA foreign_keys = ON",
                include_str!("tables.sql")
            ));
            sqlx::raw_sql(sql).execute(&pool).await.map_err(failed("make its tables"))?;
        }
        Ok(Self { pool, fresh })
    }

    /// Whether the file is whole and has the tables it should have. The pages of a large one are not
    /// read: that would delay every start, and damage that shows later is repaired then.
    pub(in crate::db) async fn check(&self, file: &Path) -> DbResult<()> {
        let expected = Self::in_memory().await?;
        if self.schema().await? != expected.schema().await? {
            return Err(failed("be used")(std::io::Error::other("it has other tables")));
        }
        if std::fs::metadata(file).is_ok_and(|found| found.len() <= CHECKED_UP_TO) {
            let told: String = sqlx::query_scalar("PRAGMA quick_check(1)")
                .fetch_one(&self.pool)
                .await
                .map_err(failed("be checked"))?;
            if told != "ok" {
                return Err(failed("be used")(std::io::Error::other(told)));
            }
        }
        Ok(())
    }

    async fn schema(&self) -> DbResult<Vec<String>> {
        let sql = "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY type, name";
        let rows = sqlx::query_scalar(sql).fetch_all(&self.pool).await;
        rows.map_err(failed("list its tables"))
    }

    /// What was last [set](Self::set_epoch).
    pub(in crate::db) async fn epoch(&self) -> DbResult<Option<String>> {
        let sql = "SELECT value FROM meta WHERE key = 'epoch'";
        let found = sqlx::query_scalar(sql).fetch_optional(&self.pool).await;
        found.map_err(failed("tell its epoch"))
    }

    /// Marks it as filled in this epoch.
    pub(in crate::db) async fn set_epoch(&self, epoch: &str) -> DbResult<()> {
        let sql = "INSERT OR REPLACE INTO meta (key, value) VALUES ('epoch', ?)";
        let done = sqlx::query(sql).bind(epoch).execute(&self.pool).await;
        done.map(drop).map_err(failed("keep its epoch"))
    }

    /// Brings everything into the file itself and closes it.
    pub(in crate::db) async fn close(&self) -> DbResult<()> {
        let done = sqlx::raw_sql("PRAGMA wal_checkpoint(TRUNCATE)").execute(&self.pool).await;
        self.hang_up().await;
        done.map(drop).map_err(failed("be closed"))
    }

    /// Closes it, whatever state it is in.
    pub(in crate::db) async fn hang_up(&self) {
        let _ = tokio::time::timeout(Duration::from_secs(5), self.pool.close()).await;
    }
}
