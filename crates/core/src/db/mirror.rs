//! An index that answers from memory while the disk hangs.
//!
//! Projects, sandboxes, drives, snapshots and the newest session of each sandbox are in a second
//! index in memory. Reads of those never touch the disk, and memory is what decides who gets a name.
//! History (older sessions, commands, answers under idempotency keys) is on disk alone: there is too
//! much of it. A reader of it does not wait for the disk longer than [`PATIENCE`].
//!
//! Writes go to memory, and to the file behind the caller's back, in the same order ([`Follower`]). A file that does not follow
//! costs nothing: at every start all that is in memory is read from the manifests again. History is not, so its writes are
//! waited for, as those of its manifests are.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use tokio::sync::{Mutex, mpsc, oneshot};

use super::{
    Db, DbError, DbResult, Filter, Owner, Page, Paged, Remembered, SqliteDb, Tombstones, Unless,
};
use crate::model::{
    Command, CommandId, Drive, DriveId, Name, Project, Sandbox, SandboxId, Session, SessionId,
    Snapshot, SnapshotId, Timestamp,
};

/// How long the disk may take for a statement.
const PATIENCE: Duration = Duration::from_secs(10);
/// How many writes may wait for the disk. Further writers wait until there is room.
const BEHIND: usize = 1024;

/// Another [`Db`], with what is asked for most in memory.
#[derive(Debug)]
pub struct MirroredDb {
    disk: Arc<dyn Db>,
    memory: SqliteDb,
    /// Held over a write to memory and its place in the queue to the disk, so that they come in the same order.
    order: Mutex<()>,
    follower: Follower,
}

/// A task that repeats in the file what was done in memory. It ends when its queue is empty and no
/// sender is left.
#[derive(Debug)]
struct Follower(mpsc::Sender<BoxFuture<'static, ()>>);

impl Follower {
    fn start() -> Self {
        let (sender, mut queue) = mpsc::channel::<BoxFuture<'static, ()>>(BEHIND);
        tokio::spawn(async move {
            while let Some(work) = queue.recv().await {
                work.await;
            }
        });
        Self(sender)
    }

    /// Adds to the queue.
    async fn push(&self, work: impl Future<Output = DbResult<()>> + Send + 'static) {
        let work = Box::pin(async move {
            if let Err(error) = in_time(work).await {
                behind(&error);
            }
        });
        if tokio::time::timeout(PATIENCE, self.0.send(work)).await.is_err() {
            behind(&DbError::Slow { waited: PATIENCE });
        }
    }

    /// Does something after all that was asked for before, and waits for it.
    async fn then<T: Send + 'static>(
        &self,
        work: impl Future<Output = DbResult<T>> + Send + 'static,
    ) -> DbResult<T> {
        let (done, outcome) = oneshot::channel();
        let work = Box::pin(async move { drop(done.send(work.await)) });
        let asked = async {
            self.0.send(work).await.map_err(|_| DbError::Closed)?;
            outcome.await.map_err(|_| DbError::Closed)?
        };
        asked.await
    }

    /// Waits until all that was asked for is done, but not for long.
    async fn catch_up(&self) {
        if let Err(error) = in_time(self.then(async { Ok(()) })).await {
            behind(&error);
        }
    }
}

fn behind(error: &DbError) {
    let error: &dyn std::error::Error = error;
    tracing::warn!(error, "the index on disk is behind; the next start brings it up to date");
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
        Ok(Self { disk, memory, order: Mutex::default(), follower: Follower::start() })
    }

    async fn sandbox_follows(&self, sandbox: &Sandbox) {
        let (disk, sandbox) = (Arc::clone(&self.disk), sandbox.clone());
        self.follower.push(async move { disk.put_sandbox(&sandbox).await }).await;
    }

    async fn snapshot_follows(&self, snapshot: &Snapshot) {
        let (disk, snapshot) = (Arc::clone(&self.disk), snapshot.clone());
        self.follower.push(async move { disk.put_snapshot(&snapshot).await }).await;
    }

    async fn drive_follows(&self, drive: &Drive) {
        let (disk, drive) = (Arc::clone(&self.disk), drive.clone());
        self.follower.push(async move { disk.put_drive(&drive).await }).await;
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
        self.follower.catch_up().await;
        self.disk.filled().await;
    }

    async fn close(&self) {
        self.follower.catch_up().await;
        self.disk.close().await;
    }

    async fn claim(&self, sandbox: &Sandbox) -> DbResult<bool> {
        let _order = self.order.lock().await;
        let claimed = self.memory.claim(sandbox).await?;
        if claimed {
            self.sandbox_follows(sandbox).await;
        }
        Ok(claimed)
    }

    async fn put_sandbox(&self, sandbox: &Sandbox) -> DbResult<()> {
        let _order = self.order.lock().await;
        self.memory.put_sandbox(sandbox).await?;
        self.sandbox_follows(sandbox).await;
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

    async fn sandboxes_based_on(&self, snapshot: &SnapshotId) -> DbResult<Vec<Sandbox>> {
        self.memory.sandboxes_based_on(snapshot).await
    }

    async fn rename(&self, id: &SandboxId, name: &Name) -> DbResult<bool> {
        let _order = self.order.lock().await;
        let renamed = self.memory.rename(id, name).await?;
        if renamed {
            let (disk, id, name) = (Arc::clone(&self.disk), id.clone(), name.clone());
            self.follower.push(async move { disk.rename(&id, &name).await.map(drop) }).await;
        }
        Ok(renamed)
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
        let (disk, id) = (Arc::clone(&self.disk), id.clone());
        self.follower.then(async move { disk.remove_sandbox(&id).await }).await
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
        // It is the sandboxes on disk that say which project a session is of.
        self.follower.catch_up().await;
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
        self.snapshot_follows(snapshot).await;
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

    async fn put_tombstone(&self, tombstone: &Snapshot, unless: Unless<'_>) -> DbResult<bool> {
        let _order = self.order.lock().await;
        let buried = self.memory.put_tombstone(tombstone, unless).await?;
        if buried {
            self.snapshot_follows(tombstone).await;
        }
        Ok(buried)
    }

    async fn remove_snapshot(&self, id: &SnapshotId) -> DbResult<()> {
        let _order = self.order.lock().await;
        self.memory.remove_snapshot(id).await?;
        let (disk, id) = (Arc::clone(&self.disk), id.clone());
        self.follower.push(async move { disk.remove_snapshot(&id).await }).await;
        Ok(())
    }

    async fn claim_drive(&self, drive: &Drive) -> DbResult<bool> {
        let _order = self.order.lock().await;
        let claimed = self.memory.claim_drive(drive).await?;
        if claimed {
            self.drive_follows(drive).await;
        }
        Ok(claimed)
    }

    async fn put_drive(&self, drive: &Drive) -> DbResult<()> {
        let _order = self.order.lock().await;
        self.memory.put_drive(drive).await?;
        self.drive_follows(drive).await;
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
        let (disk, id) = (Arc::clone(&self.disk), id.clone());
        self.follower.push(async move { disk.remove_drive(&id).await }).await;
        Ok(())
    }

    async fn put_project(&self, project: &Project) -> DbResult<()> {
        let _order = self.order.lock().await;
        self.memory.put_project(project).await?;
        let (disk, project) = (Arc::clone(&self.disk), project.clone());
        self.follower.push(async move { disk.put_project(&project).await }).await;
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
        let (disk, name) = (Arc::clone(&self.disk), name.clone());
        self.follower.then(async move { disk.remove_project(&name).await }).await
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
        let disk = Arc::clone(&self.disk);
        self.follower.then(async move { disk.clear().await }).await
    }
}
