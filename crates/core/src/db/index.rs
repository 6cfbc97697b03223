//! The index with recovery: a damaged file is replaced by a new one and filled from the manifests.
//!
//! Everything in it can be read again from the manifests, so a file that does not open, is not whole,
//! is of another version or of another time ([`Stamp`]) is removed and a new one is made. Damage that
//! shows later, in the answer to any statement, has the same effect: other statements wait, the index
//! is built again from the disk, and the statement is repeated. Where no file can be written the index
//! is kept in memory.
//!
//! What is lost with an index are the answers that were kept under idempotency keys. A create finds
//! its sandbox by its key all the same, because that is part of the sandbox's manifest.

mod file;
mod fill;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use parking_lot::Mutex;
use sandkeep_types::error_chain;
use tokio::sync::{RwLock, RwLockReadGuard};
use tokio_util::task::TaskTracker;

use self::file::{UnusableIndex, begin, clear_away, make, usable};
use self::fill::fill;
use super::stamp::Stamp;
use super::{
    Db, DbError, DbResult, Filter, Owner, Page, Paged, Remembered, SqliteDb, Tombstones, Unless,
};
use crate::model::{
    Command, CommandId, Drive, DriveId, Name, Project, Sandbox, SandboxId, Session, SessionId,
    Snapshot, SnapshotId, Timestamp,
};

/// What a read of manifests answers.
pub type ManifestResult<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// The manifests on disk, which an index is filled from. Those that do not read are left out.
#[async_trait]
pub trait Manifests: std::fmt::Debug + Send + Sync {
    /// Bytes that are free on the disk, if that is known.
    fn free_space(&self) -> Option<u64>;

    /// All projects.
    async fn projects(&self) -> ManifestResult<Vec<Project>>;

    /// All snapshots, tombstones included.
    async fn snapshots(&self) -> ManifestResult<Vec<Snapshot>>;

    /// All drives.
    async fn drives(&self) -> ManifestResult<Vec<Drive>>;

    /// All sandboxes.
    async fn sandboxes(&self) -> ManifestResult<Vec<Sandbox>>;

    /// The sessions of a sandbox.
    async fn sessions(&self, sandbox: &SandboxId) -> ManifestResult<Vec<Session>>;

    /// The commands of a sandbox.
    async fn commands(&self, sandbox: &SandboxId) -> ManifestResult<Vec<Command>>;
}

/// How long a statement waits for an index that is being built again.
const PATIENCE: Duration = Duration::from_secs(60);

/// An index that breaks again within this time is built in memory.
const AGAIN: Duration = Duration::from_secs(60);

/// With less than this free on the disk it is kept in memory: it could not grow, and its file is better given up.
const ROOM: u64 = 8 << 20;

/// [`Db`] in a file that is made again whenever it cannot be used.
#[derive(Debug, Clone)]
pub struct Index {
    inner: Arc<IndexInner>,
}

#[derive(Debug)]
struct IndexInner {
    file: PathBuf,
    manifests: Box<dyn Manifests>,
    fresh: bool,
    current: RwLock<Current>,
    /// Why it was built again, if it was damaged.
    damage: Mutex<Option<String>>,
    /// Rebuilds that are under way.
    rebuilds: TaskTracker,
}

#[derive(Debug)]
struct Current {
    db: SqliteDb,
    /// Absent if it is in memory.
    stamp: Option<Stamp>,
    filled: bool,
    generation: u64,
    rebuilt: Option<Instant>,
    closed: bool,
}

impl Index {
    /// Opens the index over these manifests, or makes a new one.
    ///
    /// # Errors
    ///
    /// Returns [`DbError`] when not even an index in memory can be made.
    pub async fn open(file: &Path, manifests: impl Manifests + 'static) -> DbResult<Self> {
        let mut damage = None;
        let full = manifests.free_space().is_some_and(|free| free < ROOM);
        let found = match fs::symlink_metadata(file) {
            _ if full => None,
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            _ => match usable(file).await {
                Ok(db) => Some(db),
                Err(UnusableIndex::Stale(reason)) => {
                    tracing::info!(reason, "the index is being rebuilt from the data directory");
                    None
                }
                Err(UnusableIndex::Damaged(reason)) => {
                    tracing::warn!(
                        reason,
                        "the index is damaged; it is being rebuilt from the data directory"
                    );
                    damage = Some(reason);
                    None
                }
            },
        };
        let (db, stamp, fresh) = match found {
            None if full => {
                tracing::warn!("the disk is full; the index is kept in memory");
                if let Err(error) = clear_away(file) {
                    tracing::warn!(%error, "the files of the old index were not removed");
                }
                (SqliteDb::in_memory().await?, None, true)
            }
            Some(db) => match begin(file, &db).await {
                Ok(stamp) => (db, Some(stamp), false),
                Err(error) => {
                    tracing::warn!(%error, "the index cannot be written; it is kept in memory");
                    (SqliteDb::in_memory().await?, None, true)
                }
            },
            None => {
                let (db, stamp) = make(file).await?;
                (db, stamp, true)
            }
        };
        let current =
            Current { db, stamp, filled: !fresh, generation: 0, rebuilt: None, closed: false };
        let inner = IndexInner {
            file: file.to_owned(),
            manifests: Box::new(manifests),
            fresh,
            current: RwLock::new(current),
            damage: Mutex::new(damage),
            rebuilds: TaskTracker::new(),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    async fn current(&self) -> DbResult<RwLockReadGuard<'_, Current>> {
        let waited = tokio::time::timeout(PATIENCE, self.inner.current.read()).await;
        waited.map_err(|_| DbError::Rebuilding)
    }

    /// Builds the index again, unless that has happened since `generation`.
    async fn rebuild(&self, generation: u64, error: &DbError) -> DbResult<()> {
        let (inner, reason) = (Arc::clone(&self.inner), error_chain(error));
        // A caller that goes away must not leave it half done.
        let rebuilds = inner.rebuilds.clone();
        let task = rebuilds.spawn(async move { inner.rebuild(generation, reason).await });
        match tokio::time::timeout(PATIENCE, task).await {
            Ok(Ok(done)) => done,
            Ok(Err(_)) | Err(_) => Err(DbError::Rebuilding),
        }
    }
}

impl IndexInner {
    async fn rebuild(&self, generation: u64, reason: String) -> DbResult<()> {
        let mut current = self.current.write().await;
        if current.generation != generation {
            return Ok(());
        }
        if current.closed {
            return Err(DbError::Closed);
        }
        tracing::error!(
            reason,
            "the index is damaged; it is being rebuilt from the data directory"
        );
        let begun = Instant::now();
        current.db.hang_up().await;
        let again = current.rebuilt.is_some_and(|at| at.elapsed() < AGAIN);
        let (db, stamp) = match again {
            true => (SqliteDb::in_memory().await?, None),
            false => make(&self.file).await?,
        };
        fill(&db, &*self.manifests).await?;
        let generation = generation + 1;
        let rebuilt = Some(Instant::now());
        *current = Current { db, stamp, filled: false, generation, rebuilt, closed: false };
        current.finish().await;
        *self.damage.lock() = Some(reason);
        tracing::info!(took = ?begun.elapsed(), "the index was rebuilt");
        Ok(())
    }
}

impl Current {
    /// Marks it as filled. An index that cannot be marked is filled again by the next daemon.
    async fn finish(&mut self) {
        self.filled = true;
        if let Some(stamp) = &self.stamp
            && let Err(error) = self.db.set_epoch(&stamp.epoch).await
        {
            tracing::warn!(
                error = error_chain(&error),
                "the index was not marked as complete; the next daemon rebuilds it"
            );
        }
    }

    async fn close(&mut self, file: &Path) {
        self.closed = true;
        let Some(stamp) = self.stamp.take() else { return };
        let closed = self.db.close().await.map_err(|error| error_chain(&error));
        if !self.filled {
            return;
        }
        let synced = closed.and_then(|()| {
            let sync = || fs::File::open(file)?.sync_all();
            sync().and_then(|()| stamp.closed().write(file)).map_err(|error| error.to_string())
        });
        if let Err(error) = synced {
            tracing::warn!(
                error,
                "the index was not closed properly; the next daemon may rebuild it"
            );
        }
    }
}

/// Whether an error says that the index itself cannot be used.
fn is_unusable(error: &DbError) -> bool {
    match error {
        DbError::Damaged { .. } => true,
        DbError::Query { source, .. } => match source.downcast_ref::<sqlx::Error>() {
            Some(sqlx::Error::Database(database)) => {
                let code = database.code().and_then(|code| code.parse::<u32>().ok());
                // ERROR (no such table), READONLY, IOERR, CORRUPT, CANTOPEN, NOTADB; the upper
                // bits say which sort.
                code.is_some_and(|code| [1, 8, 10, 11, 14, 26].contains(&(code & 0xff)))
            }
            Some(
                sqlx::Error::Io(_)
                | sqlx::Error::ColumnDecode { .. }
                | sqlx::Error::Decode(_)
                | sqlx::Error::ColumnNotFound(_)
                | sqlx::Error::WorkerCrashed
                | sqlx::Error::PoolClosed,
            ) => true,
            _ => false,
        },
        _ => false,
    }
}

/// Asks the index, and once more after it was built again.
macro_rules! ask {
    ($self:ident . $method:ident ( $($argument:expr),* )) => {{
        let current = $self.current().await?;
        let outcome = current.db.$method($($argument),*).await;
        match outcome {
            Err(error) if is_unusable(&error) => {
                let generation = current.generation;
                drop(current);
                $self.rebuild(generation, &error).await?;
                $self.current().await?.db.$method($($argument),*).await
            }
            outcome => outcome,
        }
    }};
}

#[async_trait]
impl Db for Index {
    fn is_fresh(&self) -> bool {
        self.inner.fresh
    }

    fn damage(&self) -> Option<String> {
        self.inner.damage.lock().clone()
    }

    async fn filled(&self) {
        self.inner.current.write().await.finish().await;
    }

    async fn close(&self) {
        // A call that never returns must not keep the daemon from ending.
        let closing = async {
            self.inner.current.write().await.close(&self.inner.file).await;
            // One that waited for this finds the index closed, and ends.
            self.inner.rebuilds.close();
            self.inner.rebuilds.wait().await;
        };
        if tokio::time::timeout(Duration::from_secs(10), closing).await.is_err() {
            tracing::warn!("the index was not closed properly; the next daemon may rebuild it");
        }
    }

    async fn claim(&self, sandbox: &Sandbox) -> DbResult<bool> {
        ask!(self.claim(sandbox))
    }

    async fn put_sandbox(&self, sandbox: &Sandbox) -> DbResult<()> {
        ask!(self.put_sandbox(sandbox))
    }

    async fn sandbox(&self, project: &Name, name: &Name) -> DbResult<Option<Sandbox>> {
        ask!(self.sandbox(project, name))
    }

    async fn sandbox_by_id(&self, id: &SandboxId) -> DbResult<Option<Sandbox>> {
        ask!(self.sandbox_by_id(id))
    }

    async fn sandboxes(
        &self,
        project: Option<&Name>,
        filter: &Filter,
        page: &Page,
    ) -> DbResult<Paged<Sandbox>> {
        ask!(self.sandboxes(project, filter, page))
    }

    async fn sandboxes_on(&self, snapshot: &SnapshotId) -> DbResult<Vec<Sandbox>> {
        ask!(self.sandboxes_on(snapshot))
    }

    async fn sandboxes_based_on(&self, snapshot: &SnapshotId) -> DbResult<Vec<Sandbox>> {
        ask!(self.sandboxes_based_on(snapshot))
    }

    async fn rename(&self, id: &SandboxId, name: &Name) -> DbResult<bool> {
        ask!(self.rename(id, name))
    }

    async fn sandbox_created_with(&self, project: &Name, key: &str) -> DbResult<Option<Sandbox>> {
        ask!(self.sandbox_created_with(project, key))
    }

    async fn expired(&self, now: Timestamp) -> DbResult<Vec<Sandbox>> {
        ask!(self.expired(now))
    }

    async fn remove_sandbox(&self, id: &SandboxId) -> DbResult<()> {
        ask!(self.remove_sandbox(id))
    }

    async fn put_session(&self, session: &Session) -> DbResult<()> {
        ask!(self.put_session(session))
    }

    async fn session(&self, id: &SessionId) -> DbResult<Option<Session>> {
        ask!(self.session(id))
    }

    async fn sessions(&self, sandbox: &SandboxId, page: &Page) -> DbResult<Paged<Session>> {
        ask!(self.sessions(sandbox, page))
    }

    async fn project_sessions(&self, project: &Name, page: &Page) -> DbResult<Paged<Session>> {
        ask!(self.project_sessions(project, page))
    }

    async fn put_command(&self, command: &Command) -> DbResult<()> {
        ask!(self.put_command(command))
    }

    async fn command(&self, id: &CommandId) -> DbResult<Option<Command>> {
        ask!(self.command(id))
    }

    async fn remove_command(&self, id: &CommandId) -> DbResult<()> {
        ask!(self.remove_command(id))
    }

    async fn commands(&self, sandbox: &SandboxId, page: &Page) -> DbResult<Paged<Command>> {
        ask!(self.commands(sandbox, page))
    }

    async fn session_commands(&self, session: &SessionId, page: &Page) -> DbResult<Paged<Command>> {
        ask!(self.session_commands(session, page))
    }

    async fn put_snapshot(&self, snapshot: &Snapshot) -> DbResult<()> {
        ask!(self.put_snapshot(snapshot))
    }

    async fn snapshot(&self, id: &SnapshotId) -> DbResult<Option<Snapshot>> {
        ask!(self.snapshot(id))
    }

    async fn snapshot_record(&self, id: &SnapshotId) -> DbResult<Option<Snapshot>> {
        ask!(self.snapshot_record(id))
    }

    async fn snapshots(
        &self,
        owner: Owner<'_>,
        tombstones: Tombstones,
        page: &Page,
    ) -> DbResult<Paged<Snapshot>> {
        ask!(self.snapshots(owner, tombstones, page))
    }

    async fn expired_snapshots(&self, now: Timestamp) -> DbResult<Vec<Snapshot>> {
        ask!(self.expired_snapshots(now))
    }

    async fn expired_snapshots_of(
        &self,
        sandbox: &SandboxId,
        now: Timestamp,
    ) -> DbResult<Vec<Snapshot>> {
        ask!(self.expired_snapshots_of(sandbox, now))
    }

    async fn newest_snapshots(
        &self,
        sandbox: &SandboxId,
        skip: u32,
        limit: u32,
    ) -> DbResult<Vec<Snapshot>> {
        ask!(self.newest_snapshots(sandbox, skip, limit))
    }

    async fn old_tombstones(&self, before: Timestamp, most: u32) -> DbResult<Vec<SnapshotId>> {
        ask!(self.old_tombstones(before, most))
    }

    async fn put_tombstone(&self, tombstone: &Snapshot, unless: Unless<'_>) -> DbResult<bool> {
        ask!(self.put_tombstone(tombstone, unless))
    }

    async fn remove_snapshot(&self, id: &SnapshotId) -> DbResult<()> {
        ask!(self.remove_snapshot(id))
    }

    async fn claim_drive(&self, drive: &Drive) -> DbResult<bool> {
        ask!(self.claim_drive(drive))
    }

    async fn put_drive(&self, drive: &Drive) -> DbResult<()> {
        ask!(self.put_drive(drive))
    }

    async fn drive(&self, project: &Name, name: &Name) -> DbResult<Option<Drive>> {
        ask!(self.drive(project, name))
    }

    async fn drive_by_id(&self, id: &DriveId) -> DbResult<Option<Drive>> {
        ask!(self.drive_by_id(id))
    }

    async fn drives(
        &self,
        project: Option<&Name>,
        name_prefix: Option<&str>,
        page: &Page,
    ) -> DbResult<Paged<Drive>> {
        ask!(self.drives(project, name_prefix, page))
    }

    async fn remove_drive(&self, id: &DriveId) -> DbResult<()> {
        ask!(self.remove_drive(id))
    }

    async fn put_project(&self, project: &Project) -> DbResult<()> {
        ask!(self.put_project(project))
    }

    async fn projects(&self) -> DbResult<Vec<Project>> {
        ask!(self.projects())
    }

    async fn remove_project(&self, name: &Name) -> DbResult<()> {
        ask!(self.remove_project(name))
    }

    async fn recall(&self, project: &Name, key: &str) -> DbResult<Option<Remembered>> {
        ask!(self.recall(project, key))
    }

    async fn remember(&self, project: &Name, key: &str, answer: &Remembered) -> DbResult<()> {
        ask!(self.remember(project, key, answer))
    }

    async fn forget_answers(&self, before: Timestamp) -> DbResult<()> {
        ask!(self.forget_answers(before))
    }

    async fn clear(&self) -> DbResult<()> {
        ask!(self.clear())
    }
}
