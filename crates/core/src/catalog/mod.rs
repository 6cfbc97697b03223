//! The records of all sandboxes, with what belongs to them: the seam in front of manifests and index.
//!
//! The engine saves every record through a [`Catalog`] and reads through [`Catalog::reader`]. Where the
//! records are is the catalog's business. [`DiskCatalog`] keeps them as manifests in the data
//! directory with a SQLite index over them; a database that several nodes share fits behind the same
//! seam. So no code outside of this module may assume that the local disk has the records of all
//! sandboxes, that the index can be thrown away and filled again, or that no other process writes.

mod disk;
mod load;
mod manifests;
mod versions;
mod watch;

use std::fmt;
use std::sync::{Arc, Weak};

use async_trait::async_trait;

use crate::db::{Db, DbError, Unless};
use crate::model::{
    Command, CommandId, Drive, DriveId, Layer, Name, Project, Revision, Sandbox, SandboxId,
    Session, Snapshot, SnapshotId,
};
use crate::store::{DiskListing, Durability, StoreError, Trashed};

pub use disk::DiskCatalog;
pub use load::{Contents, DamagedRecords, Unusable};
pub use versions::{Next, Versions};
pub use watch::{CatalogWatcher, CatalogWatchers};

/// What a catalog answers.
pub type CatalogResult<T> = Result<T, CatalogError>;

/// Why a catalog could not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CatalogError {
    /// Another caller saved the record since this one read it. Nothing was changed.
    #[error("the record of {sandbox} is at revision {found} by now, not at {expected}")]
    Conflict {
        /// The sandbox.
        sandbox: SandboxId,
        /// The revision that the caller began with.
        expected: Revision,
        /// The revision that is on record.
        found: Revision,
    },
    /// There is no such record, or no longer.
    #[error("there is no {kind} {key}")]
    NotFound {
        /// What it would be.
        kind: &'static str,
        /// Its id or name.
        key: String,
    },
    /// The record could not be written or read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The record is on stable storage as far as was asked for, and readers do not see it.
    #[error(transparent)]
    Index(#[from] DbError),
}

impl CatalogError {
    /// Whether there was no room on the disk.
    #[must_use]
    pub fn is_no_room(&self) -> bool {
        matches!(self, Self::Store(error) if error.is_no_room())
    }
}

/// A record without revisions: its writers exclude each other by locks of the engine.
#[derive(Debug, Clone, Copy)]
pub enum Record<'a> {
    /// A session of a sandbox.
    Session(&'a Session),
    /// A command of a sandbox.
    Command(&'a Command),
    /// A snapshot, or what is left of one.
    Snapshot(&'a Snapshot),
    /// A drive.
    Drive(&'a Drive),
    /// A project.
    Project(&'a Project),
}

/// Identifies a [`Record`] that is to be deleted.
#[derive(Debug, Clone, Copy)]
pub enum RecordKey<'a> {
    /// A command that never ran. Its log is not touched.
    Command(&'a SandboxId, &'a CommandId),
    /// A snapshot, or what is left of one.
    Snapshot(&'a SnapshotId),
    /// A drive.
    Drive(&'a DriveId),
    /// A project.
    Project(&'a Name),
}

/// What names a record that did not read when the catalog was opened.
#[derive(Debug, Clone, Copy)]
pub enum UnreadKey<'a> {
    /// A sandbox.
    Sandbox(&'a SandboxId),
    /// A snapshot.
    Snapshot(&'a SnapshotId),
    /// A drive.
    Drive(&'a DriveId),
}

/// The outcome of dropping a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotDrop {
    /// A sandbox stands on it, or it is dropped already: nothing was changed.
    Not,
    /// Its tombstone is on record.
    Tombstone,
    /// There was no room for a tombstone, and no record of it is left.
    Removed,
}

/// The records of all sandboxes.
///
/// # Terms
///
/// - *Record*: the document of a sandbox, a session, a command, a snapshot, a drive or a project.
/// - *Revision* ([`Sandbox::revision`]): counts the saved versions of a sandbox's record. Only the
///   catalog writes it. Records of other kinds have none.
/// - *Owner* ([`Sandbox::owner`]): the node that runs the sandbox, with an *epoch* that grows each time
///   the sandbox changes hands. Absent in a catalog that belongs to one node. The *lease* of a node,
///   which says until when it may act as an owner, is kept once per node, not in records.
/// - *Reader*: the index. It answers from memory and never waits for a save.
///
/// # Saving
///
/// ```text
/// let mut sandbox = catalog.load(&id).await?;       // revision 6
/// sandbox.config.tags.insert(..);
/// catalog.save(&mut sandbox, Durability::Soon)      // expects 6; the record and `sandbox` are at 7
/// ```
///
/// The revision that the caller's copy carries is the expected one. If the record is at another
/// revision, the save fails with [`CatalogError::Conflict`] and changes nothing: the caller has to load
/// the record and decide again. Of two writers that expect the same revision exactly one succeeds. A
/// change of the owner is a save as well, so a node that lost a sandbox cannot save it any more.
///
/// After any other error the caller's copy still carries the expected revision, and the same save can
/// be tried again. The record may have been written all the same; a daemon that starts finds one of
/// the two versions.
///
/// # What is durable
///
/// - When a save with [`Durability::Synced`], a [`commit`](Self::commit), a [`remove`](Self::remove)
///   or a [`restore`](Self::restore) returns, it survives a power cut.
/// - A save with [`Durability::Soon`] survives the end of this process, and a power cut after the next
///   sync of the store. Until then the last synced version stays readable.
/// - [`commit`](Self::commit) makes layers, snapshot and sandbox true together, the sandbox last.
/// - A record is in the reader when the save returns: a later read returns it or a newer one.
/// - What is only [shown](Self::show) is not durable at all.
///
/// # Watching
///
/// A [`watch`](Self::watch)er is notified of every version of a sandbox that is saved or restored
/// through this catalog from then on, with the snapshot of a commit, and of every removal: after
/// readers can see it, before the save returns, and in the order of revisions per sandbox. It
/// misses none, so it must not block. It is not notified of a failed save, of a record that is only
/// [shown](Self::show), or of a record that another node saved: each node reports its own saves, so
/// that each save is reported once.
///
/// The event feed watches: the saved record gives the phases and snapshots in `GET /v1/events`.
/// Events that no record holds (which command ended, which snapshot a rollback returned to) are
/// added by the component that knows them.
///
/// # One node
///
/// Names are unique per project, and [`claim`](Self::claim) decides who gets one. A catalog for one node
/// may keep revisions in memory, because a lock on the data directory keeps other processes out. One for
/// several nodes compares them where the records are.
///
/// `testkit::catalog_contract` holds a catalog to this.
#[async_trait]
pub trait Catalog: fmt::Debug + Send + Sync {
    /// The index: where all records are read, and where idempotency keys are kept.
    fn reader(&self) -> Arc<dyn Db>;

    /// Reads everything on record, and brings the reader up to date. Called once, before anything else.
    async fn open(&self) -> CatalogResult<Contents>;

    /// Leaves the catalog in order for the next daemon. No method may be called afterwards.
    async fn close(&self);

    /// Reads the record of a sandbox as it was saved last. `None` if there is none.
    async fn load(&self, id: &SandboxId) -> CatalogResult<Option<Sandbox>>;

    /// Reserves the name and the current snapshot of a sandbox that is to be saved, atomically with
    /// [`replace_by_tombstone`](Self::replace_by_tombstone). False if its project has a sandbox of that name.
    async fn claim(&self, sandbox: &Sandbox) -> CatalogResult<bool>;

    /// Takes back a claim of a sandbox that was not saved after all.
    async fn release(&self, id: &SandboxId) -> CatalogResult<()>;

    /// Reserves another name for a sandbox that is about to be saved with it. False if its project has a sandbox of
    /// that name. If the save fails, the former name has to be reserved again.
    async fn rename(&self, id: &SandboxId, name: &Name) -> CatalogResult<bool>;

    /// Saves a sandbox that was claimed, as the version after the one that it carries.
    async fn save(&self, sandbox: &mut Sandbox, durability: Durability) -> CatalogResult<()>;

    /// Brings the version of a new sandbox that was saved with [`Durability::Soon`] to stable storage.
    /// It stays the same version.
    async fn sync_new(&self, sandbox: &Sandbox) -> CatalogResult<()>;

    /// Seals layers, records the snapshot if there is a new one and, last of all, saves the sandbox. All of
    /// it is synced. After an error the snapshot may be on record, which the reader knows; the sandbox is
    /// what it was.
    async fn commit(
        &self,
        layers: &[Layer],
        snapshot: Option<&Snapshot>,
        sandbox: &mut Sandbox,
    ) -> CatalogResult<()>;

    /// Has readers see a version that is not saved, until the next save. For outcomes that there is no
    /// room to save.
    async fn show(&self, sandbox: &Sandbox) -> CatalogResult<()>;

    /// Moves all that is on record about a sandbox to the trash of this node: its record, sessions,
    /// commands and logs. Its snapshots stay.
    async fn remove(&self, sandbox: &Sandbox) -> CatalogResult<()>;

    /// Keeps a copy of a snapshot with the sandbox that it is about to be deleted with, for the trash.
    async fn keep_for_trash(&self, id: &SandboxId, snapshot: &Snapshot) -> CatalogResult<()>;

    /// Takes a sandbox that was claimed out of the trash, and saves it as the next version.
    async fn restore(&self, trashed: &Trashed, sandbox: &mut Sandbox) -> CatalogResult<()>;

    /// Saves a record of another kind, in place of the one before.
    async fn put(&self, record: Record<'_>, durability: Durability) -> CatalogResult<()>;

    /// Deletes a record of another kind. One that is not there is no error.
    async fn delete(&self, key: RecordKey<'_>) -> CatalogResult<()>;

    /// Deletes commands that have ended, with their logs.
    async fn remove_commands(&self, id: &SandboxId, commands: &[CommandId]) -> CatalogResult<()>;

    /// Reserves the name of a drive that is to be put. False if its project has a drive of that name.
    async fn claim_drive(&self, drive: &Drive) -> CatalogResult<bool>;

    /// Puts a tombstone in the place of a snapshot, `unless` a sandbox stands on it. Atomic with
    /// [`claim`](Self::claim) and [`save`](Self::save).
    async fn replace_by_tombstone(
        &self,
        snapshot: &Snapshot,
        tombstone: &Snapshot,
        unless: Unless<'_>,
        durability: Durability,
    ) -> CatalogResult<SnapshotDrop>;

    /// Reads a record again that could not be read before, to see whether it can be read now.
    /// Watchers are not notified.
    async fn verify(&self, key: UnreadKey<'_>) -> CatalogResult<()>;

    /// Adopts a sandbox whose record was not made by this catalog, for example one from a backup.
    /// False if another one has its name.
    async fn adopt_sandbox(&self, sandbox: &Sandbox) -> CatalogResult<bool>;

    /// Reads a snapshot whose record came to be without this catalog, and shows it to readers.
    async fn adopt_snapshot(&self, id: &SnapshotId) -> CatalogResult<Snapshot>;

    /// Reads a drive whose record came to be without this catalog. False if another one has its name.
    async fn adopt_drive(&self, id: &DriveId) -> CatalogResult<(Drive, bool)>;

    /// The names of everything on record, and of the layers that this node has. For the collector, which
    /// compares it with what it knows before it deletes anything.
    async fn listing(&self) -> CatalogResult<DiskListing>;

    /// Notifies `watcher` of every save, restore and removal from now on, until it is dropped.
    fn watch(&self, watcher: Weak<dyn CatalogWatcher>);
}
