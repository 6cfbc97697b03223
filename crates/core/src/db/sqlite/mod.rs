//! The index in a SQLite file beside the manifests.
//!
//! `open` opens the file and checks it, `document` reads and writes rows, `tables.sql` has the tables.
//! The statements are here.

mod document;
mod open;

use async_trait::async_trait;
use sqlx::sqlite::SqlitePool;
use sqlx::{AssertSqlSafe, Row};

use super::{
    By, Db, DbError, DbResult, Filter, Owner, Page, Paged, Remembered, Tombstones, Unless, list,
};
pub(super) use document::{failed, read};
use document::{word, write};

use crate::model::{
    Command, CommandId, Drive, DriveId, Name, Project, Sandbox, SandboxId, Session, SessionId,
    Snapshot, SnapshotId, Timestamp,
};

/// Snapshots of a sandbox that have expired.
const EXPIRED_OF: &str = "SELECT doc FROM snapshots INDEXED BY snapshots_to_expire \
                          WHERE sandbox = ? AND deleted_ms IS NULL AND expires_ms <= ?";
/// Snapshots of a sandbox, the newest first.
const NEWEST: &str = "SELECT doc FROM snapshots INDEXED BY snapshots_by_generation \
                      WHERE sandbox = ? AND deleted_ms IS NULL \
                      ORDER BY generation DESC, created_ms DESC LIMIT ? OFFSET ?";

/// [`Db`] in a SQLite file.
#[derive(Debug)]
pub struct SqliteDb {
    pool: SqlitePool,
    fresh: bool,
}

impl SqliteDb {
    async fn store_sandbox(&self, verb: &str, sandbox: &Sandbox) -> DbResult<bool> {
        let sql = AssertSqlSafe(format!(
            "INSERT INTO sandboxes (id, project, name, phase, class, current, created_with, created_ms, \
             phase_ms, updated_ms, expires_ms, doc) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT {verb}"
        ));
        let done = sqlx::query(sql)
            .bind(sandbox.id.as_str())
            .bind(sandbox.project.as_str())
            .bind(sandbox.name.as_str())
            .bind(word(&sandbox.phase())?)
            .bind(word(&sandbox.config.class)?)
            .bind(sandbox.current.as_ref().map(SnapshotId::as_str))
            .bind(sandbox.created_with.as_deref())
            .bind(sandbox.created_at.as_millisecond())
            .bind(sandbox.phase_at.as_millisecond())
            .bind(sandbox.updated_at.as_millisecond())
            .bind(sandbox.expires_at().as_millisecond())
            .bind(write(sandbox)?)
            .execute(&self.pool)
            .await
            .map_err(failed("keep a sandbox"))?;
        Ok(done.rows_affected() > 0)
    }

    /// Leaves of a sandbox's sessions the newest.
    pub(super) async fn forget_older_sessions(&self, sandbox: &SandboxId) -> DbResult<()> {
        let sql = "DELETE FROM sessions WHERE sandbox = ? AND id <> \
                   (SELECT max(id) FROM sessions WHERE sandbox = ?)";
        self.run("forget older sessions", sql, &[sandbox.as_str(), sandbox.as_str()]).await
    }

    async fn store_drive(&self, verb: &str, drive: &Drive) -> DbResult<bool> {
        let sql = AssertSqlSafe(format!(
            "INSERT INTO drives (id, project, name, created_ms, updated_ms, doc) \
             VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT {verb}"
        ));
        let done = sqlx::query(sql)
            .bind(drive.id.as_str())
            .bind(drive.project.as_str())
            .bind(drive.name.as_str())
            .bind(drive.created_at.as_millisecond())
            .bind(drive.updated_at.as_millisecond())
            .bind(write(drive)?)
            .execute(&self.pool)
            .await
            .map_err(failed("keep a drive"))?;
        Ok(done.rows_affected() > 0)
    }
}

#[async_trait]
impl Db for SqliteDb {
    fn is_fresh(&self) -> bool {
        self.fresh
    }

    async fn claim(&self, sandbox: &Sandbox) -> DbResult<bool> {
        self.store_sandbox("DO NOTHING", sandbox).await
    }

    async fn put_sandbox(&self, sandbox: &Sandbox) -> DbResult<()> {
        let replace = "(id) DO UPDATE SET project = excluded.project, name = excluded.name, phase = excluded.phase, \
                       class = excluded.class, current = excluded.current, phase_ms = excluded.phase_ms, \
                       updated_ms = excluded.updated_ms, expires_ms = excluded.expires_ms, doc = excluded.doc";
        self.store_sandbox(replace, sandbox).await.map(|_| ())
    }

    async fn sandbox(&self, project: &Name, name: &Name) -> DbResult<Option<Sandbox>> {
        let query = sqlx::query("SELECT doc FROM sandboxes WHERE project = ? AND name = ?");
        let row = query.bind(project.as_str()).bind(name.as_str()).fetch_optional(&self.pool).await;
        row.map_err(failed("find a sandbox"))?.map(|row| read(&row)).transpose()
    }

    async fn sandbox_by_id(&self, id: &SandboxId) -> DbResult<Option<Sandbox>> {
        self.find("sandboxes", id.as_str()).await
    }

    async fn sandboxes(
        &self,
        project: Option<&Name>,
        filter: &Filter,
        page: &Page,
    ) -> DbResult<Paged<Sandbox>> {
        let column = match page.order.by {
            By::Created => "created_ms",
            By::Name => "name",
            By::PhaseChanged => "phase_ms",
            By::Snapshot => "coalesce(current, '')",
            By::Updated => "updated_ms",
        };
        let mut query = list::listing("sandboxes", column);
        if let Some(project) = project {
            query.push(" AND project = ").push_bind(project.to_string());
        }
        if !filter.phases.is_empty() {
            query.push(" AND phase IN (");
            let mut among = query.separated(", ");
            for phase in &filter.phases {
                among.push_bind(word(phase)?);
            }
            query.push(")");
        }
        if let Some(class) = &filter.class {
            query.push(" AND class = ").push_bind(word(class)?);
        }
        if let Some(prefix) = &filter.name_prefix {
            list::begins_with(&mut query, prefix);
        }
        for (key, value) in &filter.tags {
            query.push(
                " AND EXISTS (SELECT 1 FROM tags WHERE tags.sandbox = sandboxes.id AND tags.key = ",
            );
            query
                .push_bind(key.clone())
                .push(" AND tags.value = ")
                .push_bind(value.clone())
                .push(")");
        }
        for text in &filter.tag_texts {
            query
                .push(" AND EXISTS (SELECT 1 FROM tags WHERE tags.sandbox = sandboxes.id")
                .push(" AND tags.key || ':' || tags.value = ")
                .push_bind(text.clone())
                .push(")");
        }
        list::page(&self.pool, query, page, &format!("sandboxes {project:?} {filter:?}"), column)
            .await
    }

    async fn sandboxes_on(&self, snapshot: &SnapshotId) -> DbResult<Vec<Sandbox>> {
        self.all("SELECT doc FROM sandboxes WHERE current = ?", Some(snapshot.as_str())).await
    }

    async fn sandboxes_based_on(&self, snapshot: &SnapshotId) -> DbResult<Vec<Sandbox>> {
        let sql =
            "SELECT doc FROM sandboxes WHERE id IN (SELECT sandbox FROM bases WHERE snapshot = ?)";
        self.all(sql, Some(snapshot.as_str())).await
    }

    async fn rename(&self, id: &SandboxId, name: &Name) -> DbResult<bool> {
        let query = sqlx::query("UPDATE OR IGNORE sandboxes SET name = ? WHERE id = ?");
        let done = query.bind(name.as_str()).bind(id.as_str()).execute(&self.pool).await;
        Ok(done.map_err(failed("rename a sandbox"))?.rows_affected() > 0)
    }

    async fn sandbox_created_with(&self, project: &Name, key: &str) -> DbResult<Option<Sandbox>> {
        let query = sqlx::query("SELECT doc FROM sandboxes WHERE project = ? AND created_with = ?");
        let row = query.bind(project.as_str()).bind(key).fetch_optional(&self.pool).await;
        row.map_err(failed("find a sandbox"))?.map(|row| read(&row)).transpose()
    }

    async fn expired(&self, now: Timestamp) -> DbResult<Vec<Sandbox>> {
        let query = sqlx::query("SELECT doc FROM sandboxes WHERE expires_ms <= ?")
            .bind(now.as_millisecond());
        let rows = query.fetch_all(&self.pool).await.map_err(failed("list what has expired"))?;
        rows.iter().map(read).collect()
    }

    async fn remove_sandbox(&self, id: &SandboxId) -> DbResult<()> {
        self.run("forget commands", "DELETE FROM commands WHERE sandbox = ?", &[id.as_str()])
            .await?;
        self.run("forget sessions", "DELETE FROM sessions WHERE sandbox = ?", &[id.as_str()])
            .await?;
        self.run("forget a sandbox", "DELETE FROM sandboxes WHERE id = ?", &[id.as_str()]).await
    }

    async fn put_session(&self, session: &Session) -> DbResult<()> {
        let columns = [("id", session.id.as_str()), ("sandbox", session.sandbox.as_str())];
        self.put("sessions", &columns, session).await
    }

    async fn session(&self, id: &SessionId) -> DbResult<Option<Session>> {
        self.find("sessions", id.as_str()).await
    }

    async fn sessions(&self, sandbox: &SandboxId, page: &Page) -> DbResult<Paged<Session>> {
        let mut query = list::listing("sessions", list::by_id(page)?);
        query.push(" AND sandbox = ").push_bind(sandbox.to_string());
        list::page(&self.pool, query, page, &format!("sessions {sandbox}"), "id").await
    }

    async fn project_sessions(&self, project: &Name, page: &Page) -> DbResult<Paged<Session>> {
        let mut query = list::listing("sessions", list::by_id(page)?);
        query
            .push(
                " AND sandbox IN (SELECT id FROM sandboxes WHERE phase <> 'deleted' AND project = ",
            )
            .push_bind(project.to_string())
            .push(")");
        list::page(&self.pool, query, page, &format!("sessions of {project}"), "id").await
    }

    async fn put_command(&self, command: &Command) -> DbResult<()> {
        let columns = [
            ("id", command.id.as_str()),
            ("sandbox", command.sandbox.as_str()),
            ("session", command.session.as_str()),
        ];
        self.put("commands", &columns, command).await
    }

    async fn command(&self, id: &CommandId) -> DbResult<Option<Command>> {
        self.find("commands", id.as_str()).await
    }

    async fn remove_command(&self, id: &CommandId) -> DbResult<()> {
        self.run("forget a command", "DELETE FROM commands WHERE id = ?", &[id.as_str()]).await
    }

    async fn commands(&self, sandbox: &SandboxId, page: &Page) -> DbResult<Paged<Command>> {
        let mut query = list::listing("commands", list::by_id(page)?);
        query.push(" AND sandbox = ").push_bind(sandbox.to_string());
        list::page(&self.pool, query, page, &format!("commands {sandbox}"), "id").await
    }

    async fn session_commands(&self, session: &SessionId, page: &Page) -> DbResult<Paged<Command>> {
        let mut query = list::listing("commands", list::by_id(page)?);
        query.push(" AND session = ").push_bind(session.to_string());
        list::page(&self.pool, query, page, &format!("commands {session}"), "id").await
    }

    async fn put_snapshot(&self, snapshot: &Snapshot) -> DbResult<()> {
        let sql = "INSERT OR REPLACE INTO snapshots \
                   (id, project, sandbox, name, generation, created_ms, expires_ms, deleted_ms, doc) \
                   VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)";
        let query = sqlx::query(sql)
            .bind(snapshot.id.as_str())
            .bind(snapshot.project.as_str())
            .bind(snapshot.sandbox.as_str())
            .bind(snapshot.sandbox_name.as_str())
            .bind(i64::try_from(snapshot.generation).unwrap_or(i64::MAX))
            .bind(snapshot.created_at.as_millisecond())
            .bind(snapshot.expires_at().map(Timestamp::as_millisecond))
            .bind(snapshot.deleted_at.map(Timestamp::as_millisecond))
            .bind(write(snapshot)?);
        query.execute(&self.pool).await.map_err(failed("keep a snapshot"))?;
        Ok(())
    }

    async fn snapshot(&self, id: &SnapshotId) -> DbResult<Option<Snapshot>> {
        let found = self.snapshot_record(id).await?;
        Ok(found.filter(|snapshot| snapshot.deleted_at.is_none()))
    }

    async fn snapshot_record(&self, id: &SnapshotId) -> DbResult<Option<Snapshot>> {
        self.find("snapshots", id.as_str()).await
    }

    async fn snapshots(
        &self,
        owner: Owner<'_>,
        tombstones: Tombstones,
        page: &Page,
    ) -> DbResult<Paged<Snapshot>> {
        list::by_id(page)?;
        let mut query = list::listing("snapshots", "created_ms");
        if tombstones == Tombstones::Without {
            query.push(" AND deleted_ms IS NULL");
        }
        match owner {
            Owner::Anybody => &mut query,
            Owner::Project(project) => query.push(" AND project = ").push_bind(project.to_string()),
            Owner::Name(project, name) => query
                .push(" AND project = ")
                .push_bind(project.to_string())
                .push(" AND (name = ")
                .push_bind(name.to_string())
                // Those that a sandbox took before it was renamed have its former name.
                .push(" OR sandbox = (SELECT id FROM sandboxes WHERE project = ")
                .push_bind(project.to_string())
                .push(" AND name = ")
                .push_bind(name.to_string())
                .push("))"),
            Owner::Sandbox(sandbox) => query.push(" AND sandbox = ").push_bind(sandbox.to_string()),
        };
        let list = format!("snapshots {owner:?} {tombstones:?}");
        list::page(&self.pool, query, page, &list, "created_ms").await
    }

    async fn expired_snapshots(&self, now: Timestamp) -> DbResult<Vec<Snapshot>> {
        let query =
            sqlx::query("SELECT doc FROM snapshots WHERE deleted_ms IS NULL AND expires_ms <= ?")
                .bind(now.as_millisecond());
        let rows = query.fetch_all(&self.pool).await.map_err(failed("list what has expired"))?;
        rows.iter().map(read).collect()
    }

    async fn expired_snapshots_of(
        &self,
        sandbox: &SandboxId,
        now: Timestamp,
    ) -> DbResult<Vec<Snapshot>> {
        let query = sqlx::query(EXPIRED_OF).bind(sandbox.as_str()).bind(now.as_millisecond());
        let rows = query.fetch_all(&self.pool).await.map_err(failed("list what has expired"))?;
        rows.iter().map(read).collect()
    }

    async fn newest_snapshots(
        &self,
        sandbox: &SandboxId,
        skip: u32,
        limit: u32,
    ) -> DbResult<Vec<Snapshot>> {
        let query = sqlx::query(NEWEST).bind(sandbox.as_str()).bind(limit).bind(skip);
        let rows = query.fetch_all(&self.pool).await.map_err(failed("list snapshots"))?;
        rows.iter().map(read).collect()
    }

    async fn old_tombstones(&self, before: Timestamp, most: u32) -> DbResult<Vec<SnapshotId>> {
        let sql = "SELECT doc FROM snapshots WHERE deleted_ms < ? OR id IN \
                   (SELECT id FROM snapshots WHERE deleted_ms IS NOT NULL \
                   ORDER BY deleted_ms DESC, id DESC LIMIT -1 OFFSET ?)";
        let query = sqlx::query(sql).bind(before.as_millisecond()).bind(i64::from(most));
        let rows = query.fetch_all(&self.pool).await.map_err(failed("list tombstones"))?;
        rows.iter().map(|row| read::<Snapshot>(row).map(|tombstone| tombstone.id)).collect()
    }

    async fn put_tombstone(&self, tombstone: &Snapshot, unless: Unless<'_>) -> DbResult<bool> {
        let free = match unless {
            Unless::Never => "",
            Unless::Held | Unless::HeldByOther(_) => {
                " AND NOT EXISTS (SELECT 1 FROM sandboxes WHERE current = snapshots.id AND id <> ?1) \
                 AND NOT EXISTS (SELECT 1 FROM bases WHERE snapshot = snapshots.id AND sandbox <> ?1)"
            }
        };
        let sql = AssertSqlSafe(format!(
            "UPDATE snapshots SET deleted_ms = ?2, doc = ?3 WHERE id = ?4 AND deleted_ms IS NULL{free}"
        ));
        let but = match unless {
            Unless::Never | Unless::Held => "",
            Unless::HeldByOther(holder) => holder.as_str(),
        };
        let query = sqlx::query(sql)
            .bind(but)
            .bind(tombstone.deleted_at.map(Timestamp::as_millisecond))
            .bind(write(tombstone)?)
            .bind(tombstone.id.as_str());
        let done = query.execute(&self.pool).await.map_err(failed("bury a snapshot"))?;
        Ok(done.rows_affected() > 0)
    }

    async fn remove_snapshot(&self, id: &SnapshotId) -> DbResult<()> {
        let sql = "DELETE FROM snapshots WHERE id = ? \
                   AND NOT EXISTS (SELECT 1 FROM sandboxes WHERE current = snapshots.id)";
        self.run("forget a snapshot", sql, &[id.as_str()]).await
    }

    async fn claim_drive(&self, drive: &Drive) -> DbResult<bool> {
        self.store_drive("DO NOTHING", drive).await
    }

    async fn put_drive(&self, drive: &Drive) -> DbResult<()> {
        let replace = "(id) DO UPDATE SET updated_ms = excluded.updated_ms, doc = excluded.doc";
        self.store_drive(replace, drive).await.map(|_| ())
    }

    async fn drive(&self, project: &Name, name: &Name) -> DbResult<Option<Drive>> {
        let query = sqlx::query("SELECT doc FROM drives WHERE project = ? AND name = ?");
        let row = query.bind(project.as_str()).bind(name.as_str()).fetch_optional(&self.pool).await;
        row.map_err(failed("find a drive"))?.map(|row| read(&row)).transpose()
    }

    async fn drive_by_id(&self, id: &DriveId) -> DbResult<Option<Drive>> {
        self.find("drives", id.as_str()).await
    }

    async fn drives(
        &self,
        project: Option<&Name>,
        name_prefix: Option<&str>,
        page: &Page,
    ) -> DbResult<Paged<Drive>> {
        let column = match page.order.by {
            By::Created => "created_ms",
            By::Name => "name",
            By::Updated => "updated_ms",
            By::PhaseChanged | By::Snapshot => return Err(DbError::Order),
        };
        let mut query = list::listing("drives", column);
        if let Some(project) = project {
            query.push(" AND project = ").push_bind(project.to_string());
        }
        if let Some(prefix) = name_prefix {
            list::begins_with(&mut query, prefix);
        }
        list::page(&self.pool, query, page, &format!("drives {project:?} {name_prefix:?}"), column)
            .await
    }

    async fn remove_drive(&self, id: &DriveId) -> DbResult<()> {
        self.run("forget a drive", "DELETE FROM drives WHERE id = ?", &[id.as_str()]).await
    }

    async fn put_project(&self, project: &Project) -> DbResult<()> {
        self.put("projects", &[("name", project.name.as_str())], project).await
    }

    async fn projects(&self) -> DbResult<Vec<Project>> {
        self.all("SELECT doc FROM projects ORDER BY name", None).await
    }

    async fn remove_project(&self, name: &Name) -> DbResult<()> {
        self.run("forget answers", "DELETE FROM idempotency WHERE project = ?", &[name.as_str()])
            .await?;
        self.run("forget a project", "DELETE FROM projects WHERE name = ?", &[name.as_str()]).await
    }

    async fn recall(&self, project: &Name, key: &str) -> DbResult<Option<Remembered>> {
        let query =
            sqlx::query("SELECT request, answer FROM idempotency WHERE project = ? AND key = ?");
        let row = query.bind(project.as_str()).bind(key).fetch_optional(&self.pool).await;
        let row = row.map_err(failed("recall an answer"))?;
        Ok(row.map(|row| Remembered { request: row.get(0), answer: row.get(1) }))
    }

    async fn remember(&self, project: &Name, key: &str, answer: &Remembered) -> DbResult<()> {
        let sql = "INSERT OR REPLACE INTO idempotency (project, key, request, answer, at_ms) VALUES (?, ?, ?, ?, ?)";
        let query = sqlx::query(sql)
            .bind(project.as_str())
            .bind(key)
            .bind(&answer.request)
            .bind(&answer.answer);
        let query = query.bind(Timestamp::now().as_millisecond());
        query.execute(&self.pool).await.map_err(failed("keep an answer"))?;
        Ok(())
    }

    async fn forget_answers(&self, before: Timestamp) -> DbResult<()> {
        let query =
            sqlx::query("DELETE FROM idempotency WHERE at_ms < ?").bind(before.as_millisecond());
        query.execute(&self.pool).await.map_err(failed("drop old answers"))?;
        Ok(())
    }

    async fn clear(&self) -> DbResult<()> {
        for sql in [
            "DELETE FROM tags",
            "DELETE FROM sandboxes",
            "DELETE FROM sessions",
            "DELETE FROM commands",
            "DELETE FROM snapshots",
            "DELETE FROM drives",
            "DELETE FROM projects",
        ] {
            self.run("empty a table", sql, &[]).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use sqlx::Row as _;

    use super::{AssertSqlSafe, EXPIRED_OF, NEWEST, SqliteDb};

    /// Retention asks these at every checkpoint. They read what they answer with, however many snapshots there are: an index gives
    /// both the rows and their order.
    #[tokio::test]
    async fn retention_reads_no_more_than_it_needs() {
        let dir = tempfile::tempdir().unwrap();
        let db = SqliteDb::open(&dir.path().join("index.sqlite")).await.unwrap();
        for (sql, wanted) in [
            (NEWEST, "USING INDEX snapshots_by_generation (sandbox=?)"),
            (EXPIRED_OF, "USING INDEX snapshots_to_expire (sandbox=? AND expires_ms<?)"),
        ] {
            let explain = AssertSqlSafe(format!("EXPLAIN QUERY PLAN {sql}"));
            let plan = sqlx::query(explain).fetch_all(&db.pool).await.unwrap();
            let plan: Vec<String> = plan.iter().map(|row| row.get("detail")).collect();
            assert!(plan.len() == 1 && plan[0].contains(wanted), "{plan:?}");
        }
    }
}
