//! An index that answers from memory what must be answered while the disk does not.
//!
//! Projects, sandboxes, drives, snapshots and the newest session of each sandbox are in a second
//! index in memory. Reads of those never touch the disk, and memory is what decides who gets a name.
//! History (older sessions, commands, answers under idempotency keys) is on disk alone: there is too
//! much of it. Whoever reads it does not wait for the disk longer than [`PATIENCE`].
//!
//! Writes go to memory first and then to the file. A file that does not follow costs nothing: at every
//! start all that is in memory is read from the manifests again. History is not, so its writes are
//! waited for, as those of its manifests are.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::Mutex;

use super::{
    Db, DbError, DbResult, Filter, Owner, Page, Paged, Remembered, SqliteDb, Tombstones, Unless,
};
use crate::model::{
    Command, CommandId, Drive, DriveId, Name, Project, Sandbox, SandboxId, Session, SessionId,
    Snapshot, SnapshotId, Timestamp,
};

/// How long the disk may take for a statement.
const PATIENCE: Duration = Duration::from_secs(10);

/// Another [`Db`], with what is asked for most in memory.
#[derive(Debug)]
pub struct MirroredDb {
    disk: Arc<dyn Db>,
    memory: SqliteDb,
    /// Held over a write to both, so that they come in the same order.
    order: Mutex<()>,
}

impl MirroredDb {
    /// Puts memory in front of an index.
    ///
    /// # Errors
    ///
    /// Returns [`DbError`] when what is in it cannot be read.
    pub async fn new(disk: Arc<dyn Db>) -> DbResult<Self> {
        let memory = SqliteDb::in_memory().await?;
        for project in disk.projects().await? {
            memory.put_project(&project).await?;
        }
        let all = Page::all();
        for snapshot in disk.snapshots(Owner::Anybody, Tombstones::With, &all).await?.items {
            memory.put_snapshot(&snapshot).await?;
        }
        for drive in disk.drives(None, None, &all).await?.items {
            memory.put_drive(&drive).await?;
        }
        for sandbox in disk.sandboxes(None, &Filter::default(), &all).await?.items {
            memory.put_sandbox(&sandbox).await?;
            if let Some(id) = &sandbox.session
                && let Some(session) = disk.session(id).await?
            {
                memory.put_session(&session).await?;
            }
        }
        Ok(Self { disk, memory, order: Mutex::default() })
    }

    /// Has the file follow what is in memory already.
    async fn follow<T>(&self, work: impl Future<Output = DbResult<T>>) {
        if let Err(error) = in_time(work).await {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(
                error,
                "the index on disk is behind; the next start brings it up to date"
            );
        }
    }
}

async fn in_time<T>(work: impl Future<Output = DbResult<T>>) -> DbResult<T> {
    tokio::time::timeout(PATIENCE, work).await.unwrap_or(Err(DbError::Slow { waited: PATIENCE }))
}

#[async_trait]
impl Db for MirroredDb {
    fn is_fresh(&self) -> bool {
        self.disk.is_fresh()
    }

    fn damage(&self) -> Option<String> {
        self.disk.damage()
    }

    async fn filled(&self) {
        self.disk.filled().await;
    }

    async fn close(&self) {
        self.disk.close().await;
    }

    async fn claim(&self, sandbox: &Sandbox) -> DbResult<bool> {
        let _order = self.order.lock().await;
        let claimed = self.memory.claim(sandbox).await?;
        if claimed {
            self.follow(self.disk.put_sandbox(sandbox)).await;
        }
        Ok(claimed)
    }

    async fn put_sandbox(&self, sandbox: &Sandbox) -> DbResult<()> {
        let _order = self.order.lock().await;
        self.memory.put_sandbox(sandbox).await?;
        self.follow(self.disk.put_sandbox(sandbox)).await;
        Ok(())
    }

    async fn sandbox(&self, project: &Name, name: &Name) -> DbResult<Option<Sandbox>> {
        self.memory.sandbox(project, name).await
    }

    async fn sandbox_by_id(&self, id: &SandboxId) -> DbResult<Option<Sandbox>> {
        self.memory.sandbox_by_id(id).await
    }

    async fn sandboxes(
        &self,
        project: Option<&Name>,
        filter: &Filter,
        page: &Page,
    ) -> DbResult<Paged<Sandbox>> {
        self.memory.sandboxes(project, filter, page).await
    }

    async fn sandboxes_on(&self, snapshot: &SnapshotId) -> DbResult<Vec<Sandbox>> {
        self.memory.sandboxes_on(snapshot).await
    }

    async fn sandbox_created_with(&self, project: &Name, key: &str) -> DbResult<Option<Sandbox>> {
        self.memory.sandbox_created_with(project, key).await
    }

    async fn expired(&self, now: Timestamp) -> DbResult<Vec<Sandbox>> {
        self.memory.expired(now).await
    }

    async fn remove_sandbox(&self, id: &SandboxId) -> DbResult<()> {
        {
            let _order = self.order.lock().await;
            self.memory.remove_sandbox(id).await?;
        }
        self.disk.remove_sandbox(id).await
    }

    async fn put_session(&self, session: &Session) -> DbResult<()> {
        {
            let _order = self.order.lock().await;
            self.memory.put_session(session).await?;
            self.memory.forget_older_sessions(&session.sandbox).await?;
        }
        self.disk.put_session(session).await
    }

    async fn session(&self, id: &SessionId) -> DbResult<Option<Session>> {
        match self.memory.session(id).await? {
            Some(session) => Ok(Some(session)),
            None => in_time(self.disk.session(id)).await,
        }
    }

    async fn sessions(&self, sandbox: &SandboxId, page: &Page) -> DbResult<Paged<Session>> {
        in_time(self.disk.sessions(sandbox, page)).await
    }

    async fn project_sessions(&self, project: &Name, page: &Page) -> DbResult<Paged<Session>> {
        in_time(self.disk.project_sessions(project, page)).await
    }

    async fn put_command(&self, command: &Command) -> DbResult<()> {
        self.disk.put_command(command).await
    }

    async fn command(&self, id: &CommandId) -> DbResult<Option<Command>> {
        in_time(self.disk.command(id)).await
    }

    async fn remove_command(&self, id: &CommandId) -> DbResult<()> {
        self.disk.remove_command(id).await
    }

    async fn commands(&self, sandbox: &SandboxId, page: &Page) -> DbResult<Paged<Command>> {
        in_time(self.disk.commands(sandbox, page)).await
    }

    async fn session_commands(&self, session: &SessionId, page: &Page) -> DbResult<Paged<Command>> {
        in_time(self.disk.session_commands(session, page)).await
    }

    async fn put_snapshot(&self, snapshot: &Snapshot) -> DbResult<()> {
        let _order = self.order.lock().await;
        self.memory.put_snapshot(snapshot).await?;
        self.follow(self.disk.put_snapshot(snapshot)).await;
        Ok(())
    }

    async fn snapshot(&self, id: &SnapshotId) -> DbResult<Option<Snapshot>> {
        self.memory.snapshot(id).await
    }

    async fn snapshot_record(&self, id: &SnapshotId) -> DbResult<Option<Snapshot>> {
        self.memory.snapshot_record(id).await
    }

    async fn snapshots(
        &self,
        owner: Owner<'_>,
        tombstones: Tombstones,
        page: &Page,
    ) -> DbResult<Paged<Snapshot>> {
        self.memory.snapshots(owner, tombstones, page).await
    }

    async fn expired_snapshots(&self, now: Timestamp) -> DbResult<Vec<Snapshot>> {
        self.memory.expired_snapshots(now).await
    }

    async fn expired_snapshots_of(
        &self,
        sandbox: &SandboxId,
        now: Timestamp,
    ) -> DbResult<Vec<Snapshot>> {
        self.memory.expired_snapshots_of(sandbox, now).await
    }

    async fn newest_snapshots(
        &self,
        sandbox: &SandboxId,
        skip: u32,
        limit: u32,
    ) -> DbResult<Vec<Snapshot>> {
        self.memory.newest_snapshots(sandbox, skip, limit).await
    }

    async fn old_tombstones(&self, before: Timestamp, most: u32) -> DbResult<Vec<SnapshotId>> {
        self.memory.old_tombstones(before, most).await
    }

    async fn bury_snapshot(&self, tombstone: &Snapshot, unless: Unless<'_>) -> DbResult<bool> {
        let _order = self.order.lock().await;
        let buried = self.memory.bury_snapshot(tombstone, unless).await?;
        if buried {
            self.follow(self.disk.put_snapshot(tombstone)).await;
        }
        Ok(buried)
    }

    async fn remove_snapshot(&self, id: &SnapshotId) -> DbResult<()> {
        let _order = self.order.lock().await;
        self.memory.remove_snapshot(id).await?;
        self.follow(self.disk.remove_snapshot(id)).await;
        Ok(())
    }

    async fn claim_drive(&self, drive: &Drive) -> DbResult<bool> {
        let _order = self.order.lock().await;
        let claimed = self.memory.claim_drive(drive).await?;
        if claimed {
            self.follow(self.disk.put_drive(drive)).await;
        }
        Ok(claimed)
    }

    async fn put_drive(&self, drive: &Drive) -> DbResult<()> {
        let _order = self.order.lock().await;
        self.memory.put_drive(drive).await?;
        self.follow(self.disk.put_drive(drive)).await;
        Ok(())
    }

    async fn drive(&self, project: &Name, name: &Name) -> DbResult<Option<Drive>> {
        self.memory.drive(project, name).await
    }

    async fn drive_by_id(&self, id: &DriveId) -> DbResult<Option<Drive>> {
        self.memory.drive_by_id(id).await
    }

    async fn drives(
        &self,
        project: Option<&Name>,
        name_prefix: Option<&str>,
        page: &Page,
    ) -> DbResult<Paged<Drive>> {
        self.memory.drives(project, name_prefix, page).await
    }

    async fn remove_drive(&self, id: &DriveId) -> DbResult<()> {
        let _order = self.order.lock().await;
        self.memory.remove_drive(id).await?;
        self.follow(self.disk.remove_drive(id)).await;
        Ok(())
    }

    async fn put_project(&self, project: &Project) -> DbResult<()> {
        let _order = self.order.lock().await;
        self.memory.put_project(project).await?;
        self.follow(self.disk.put_project(project)).await;
        Ok(())
    }

    async fn projects(&self) -> DbResult<Vec<Project>> {
        self.memory.projects().await
    }

    async fn remove_project(&self, name: &Name) -> DbResult<()> {
        {
            let _order = self.order.lock().await;
            self.memory.remove_project(name).await?;
        }
        self.disk.remove_project(name).await
    }

    async fn recall(&self, project: &Name, key: &str) -> DbResult<Option<Remembered>> {
        in_time(self.disk.recall(project, key)).await
    }

    async fn remember(&self, project: &Name, key: &str, answer: &Remembered) -> DbResult<()> {
        self.disk.remember(project, key, answer).await
    }

    async fn forget_answers(&self, before: Timestamp) -> DbResult<()> {
        self.disk.forget_answers(before).await
    }

    async fn clear(&self) -> DbResult<()> {
        let _order = self.order.lock().await;
        self.memory.clear().await?;
        self.disk.clear().await
    }
}
