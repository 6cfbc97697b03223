//! The index over the manifests on disk.
//!
//! The disk is the truth; a database only makes it quick to find things. So its interface is small:
//! documents are put, found, listed and removed, and whatever is in it can be made again from the
//! disk. The engine reads through it; only the catalog writes to it.
//!
//! Two things it decides, atomically: who gets a name ([`Db::claim`], [`Db::claim_drive`]), and
//! whether a sandbox stands on a snapshot that is to be dropped ([`Db::put_tombstone`]).
//!
//! A deleted snapshot is a *tombstone* for a while. Only callers that ask for tombstones see them.
//!
//! Lists are sorted and paged. A page's cursor encodes where the page ended and is opaque to
//! callers; it is valid for the same list, in the same order and with the same filter.

mod cursor;
mod index;
mod list;
mod mirror;
mod sqlite;
mod stamp;

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;

use crate::model::{
    Class, Command, CommandId, Drive, DriveId, Name, Phase, Project, Sandbox, SandboxId, Session,
    SessionId, Snapshot, SnapshotId, Tags, Timestamp,
};

pub use index::{Index, ManifestResult, Manifests};
pub use mirror::MirroredDb;
pub use sqlite::SqliteDb;

/// What a database answers.
pub type DbResult<T> = Result<T, DbError>;

/// Why the index could not answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DbError {
    /// The database returned an error.
    #[error("the index could not {action}")]
    Query {
        /// What was being done, as a verb phrase.
        action: &'static str,
        /// The database's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A document in it does not read.
    #[error(
        "a {kind} in the index does not read; `keep fsck --rebuild` makes the index again from the disk"
    )]
    Damaged {
        /// What it should be.
        kind: &'static str,
        /// Why not.
        source: serde_json::Error,
    },
    /// It is being built again from the disk, and that takes long.
    #[error("the index is being built again from the disk; try again in a minute")]
    Rebuilding,
    /// The daemon is ending.
    #[error("the index is closed")]
    Closed,
    /// The disk did not answer.
    #[error("the disk has not answered the index for {} s", waited.as_secs())]
    Slow {
        /// How long it was waited for.
        waited: Duration,
    },
    /// The disk is full.
    #[error("the disk is full, and the index could not {action}")]
    Full {
        /// What was being done, as a verb phrase.
        action: &'static str,
    },
    /// A cursor did not come from this list, this order and this filter.
    #[error("this cursor is not one of this list, in this order and with this filter")]
    Cursor,
    /// A list cannot be sorted that way.
    #[error("this list cannot be sorted like that")]
    Order,
}

/// Selects sandboxes. All given conditions must match.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// Tags it must carry, all of them.
    pub tags: Tags,
    /// Tags it must carry, all of them, each as `key:value`, where either may have colons too.
    pub tag_texts: Vec<String>,
    /// Its phase, one of these; any if there are none.
    pub phases: Vec<Phase>,
    /// How its name begins.
    pub name_prefix: Option<String>,
    /// Its class.
    pub class: Option<Class>,
}

/// Selects snapshots by their owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner<'a> {
    /// Everybody's.
    Anybody,
    /// A project's.
    Project(&'a Name),
    /// Those of all sandboxes that ever had a name in a project.
    Name(&'a Name, &'a Name),
    /// A sandbox's.
    Sandbox(&'a SandboxId),
}

/// Whether tombstones are listed too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tombstones {
    /// They are not.
    Without,
    /// They are.
    With,
}

/// Who may stand on a snapshot that is to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unless<'a> {
    /// No sandbox; and no fork may have begun there.
    Held,
    /// No sandbox but this one, which gives it up.
    HeldByOther(&'a SandboxId),
    /// Any sandbox.
    Never,
}

/// What a list is sorted by. Sandboxes can be sorted by all of these, drives by what they have of it,
/// everything else by [`Created`](Self::Created) alone.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum By {
    /// When it was made.
    #[default]
    Created,
    /// Its name.
    Name,
    /// When its phase last changed.
    PhaseChanged,
    /// The snapshot it stands on; those that stand on none come before all others.
    Snapshot,
    /// When its record last changed.
    Updated,
}

/// Which end of a list comes first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Direction {
    /// The smallest, or oldest.
    Ascending,
    /// The greatest, or newest.
    #[default]
    Descending,
}

/// How a list is sorted. What is equal is sorted by id, in the same direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Order {
    /// By what.
    pub by: By,
    /// Which end first.
    pub direction: Direction,
}

/// Selects a part of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// The largest number of items.
    pub limit: u32,
    /// Where the page before ended.
    pub cursor: Option<String>,
    /// How the list is sorted.
    pub order: Order,
}

impl Default for Page {
    fn default() -> Self {
        Self { limit: 100, cursor: None, order: Order::default() }
    }
}

impl Page {
    /// Everything there is.
    #[must_use]
    pub fn all() -> Self {
        Self { limit: u32::MAX - 1, ..Self::default() }
    }
}

/// Part of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paged<T> {
    /// The part.
    pub items: Vec<T>,
    /// Where the next begins, if there is more.
    pub next: Option<String>,
}

impl<T> Paged<T> {
    /// The same part of another list.
    pub fn map<U>(self, each: impl FnMut(T) -> U) -> Paged<U> {
        Paged { items: self.items.into_iter().map(each).collect(), next: self.next }
    }
}

/// An answer that was given under an idempotency key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remembered {
    /// What was asked, so that the same key with another request is noticed.
    pub request: String,
    /// What was answered, as JSON.
    pub answer: String,
}

/// An index over the manifests on disk. `testkit::db_contract` says what every one must do.
#[async_trait]
pub trait Db: fmt::Debug + Send + Sync {
    /// Whether it was empty, or of another version, when it was opened, and must be filled from the disk.
    fn is_fresh(&self) -> bool;
    /// Why it was damaged and had to be made again, if it was.
    fn damage(&self) -> Option<String> {
        None
    }
    /// Records that everything on disk is in the database now, so that the next daemon need not
    /// fill it.
    async fn filled(&self) {}
    /// Closes it, for the next daemon to use as it is. No method may be called afterwards.
    async fn close(&self) {}

    /// Adds a sandbox, unless its project has one of that name: then nothing changes and the answer is false.
    async fn claim(&self, sandbox: &Sandbox) -> DbResult<bool>;
    /// Adds or replaces a sandbox.
    async fn put_sandbox(&self, sandbox: &Sandbox) -> DbResult<()>;
    /// Finds a sandbox by name.
    async fn sandbox(&self, project: &Name, name: &Name) -> DbResult<Option<Sandbox>>;
    /// Finds a sandbox by id.
    async fn sandbox_by_id(&self, id: &SandboxId) -> DbResult<Option<Sandbox>>;
    /// Lists sandboxes, of every project if none is named.
    async fn sandboxes(
        &self,
        project: Option<&Name>,
        filter: &Filter,
        page: &Page,
    ) -> DbResult<Paged<Sandbox>>;
    /// Lists sandboxes whose current snapshot is `snapshot`.
    async fn sandboxes_on(&self, snapshot: &SnapshotId) -> DbResult<Vec<Sandbox>>;
    /// Lists sandboxes that were forked from `snapshot`, or that merged it last into another one.
    async fn sandboxes_based_on(&self, snapshot: &SnapshotId) -> DbResult<Vec<Sandbox>>;
    /// Reserves another name for a sandbox that is about to be saved with it, unless its project has a sandbox of
    /// that name: then nothing changes and the answer is false.
    async fn rename(&self, id: &SandboxId, name: &Name) -> DbResult<bool>;
    /// Finds the sandbox that was created under an idempotency key.
    async fn sandbox_created_with(&self, project: &Name, key: &str) -> DbResult<Option<Sandbox>>;
    /// Lists sandboxes whose time is up.
    async fn expired(&self, now: Timestamp) -> DbResult<Vec<Sandbox>>;
    /// Forgets a sandbox with its sessions and commands; its snapshots stay.
    async fn remove_sandbox(&self, id: &SandboxId) -> DbResult<()>;

    /// Adds or replaces a session.
    async fn put_session(&self, session: &Session) -> DbResult<()>;
    /// Finds a session.
    async fn session(&self, id: &SessionId) -> DbResult<Option<Session>>;
    /// Lists a sandbox's sessions.
    async fn sessions(&self, sandbox: &SandboxId, page: &Page) -> DbResult<Paged<Session>>;
    /// Lists the sessions of all sandboxes of a project that are not deleted.
    async fn project_sessions(&self, project: &Name, page: &Page) -> DbResult<Paged<Session>>;

    /// Adds or replaces a command.
    async fn put_command(&self, command: &Command) -> DbResult<()>;
    /// Finds a command.
    async fn command(&self, id: &CommandId) -> DbResult<Option<Command>>;
    /// Forgets a command.
    async fn remove_command(&self, id: &CommandId) -> DbResult<()>;
    /// Lists a sandbox's commands.
    async fn commands(&self, sandbox: &SandboxId, page: &Page) -> DbResult<Paged<Command>>;
    /// Lists a session's commands.
    async fn session_commands(&self, session: &SessionId, page: &Page) -> DbResult<Paged<Command>>;

    /// Adds or replaces a snapshot, or a tombstone.
    async fn put_snapshot(&self, snapshot: &Snapshot) -> DbResult<()>;
    /// Finds a snapshot that is no tombstone.
    async fn snapshot(&self, id: &SnapshotId) -> DbResult<Option<Snapshot>>;
    /// Finds a snapshot or a tombstone.
    async fn snapshot_record(&self, id: &SnapshotId) -> DbResult<Option<Snapshot>>;
    /// Lists snapshots.
    async fn snapshots(
        &self,
        owner: Owner<'_>,
        tombstones: Tombstones,
        page: &Page,
    ) -> DbResult<Paged<Snapshot>>;
    /// Lists expired snapshots, also those that sandboxes stand on.
    async fn expired_snapshots(&self, now: Timestamp) -> DbResult<Vec<Snapshot>>;
    /// Lists expired snapshots of one sandbox, also those that sandboxes stand on.
    async fn expired_snapshots_of(
        &self,
        sandbox: &SandboxId,
        now: Timestamp,
    ) -> DbResult<Vec<Snapshot>>;
    /// Lists snapshots of one sandbox by generation, the newest first, without the first `skip`. It takes as long with ten snapshots
    /// as with ten thousand, if `skip` and `limit` are small.
    async fn newest_snapshots(
        &self,
        sandbox: &SandboxId,
        skip: u32,
        limit: u32,
    ) -> DbResult<Vec<Snapshot>>;
    /// Lists tombstones from before `before`, and all but the newest `most`.
    async fn old_tombstones(&self, before: Timestamp, most: u32) -> DbResult<Vec<SnapshotId>>;
    /// Puts a tombstone in the place of its snapshot, `unless` somebody stands on it or it is one
    /// already: then nothing changes and the answer is false. Atomic with [`claim`](Self::claim) and
    /// [`put_sandbox`](Self::put_sandbox).
    async fn put_tombstone(&self, tombstone: &Snapshot, unless: Unless<'_>) -> DbResult<bool>;
    /// Removes the record of a snapshot or a tombstone that no sandbox stands on.
    async fn remove_snapshot(&self, id: &SnapshotId) -> DbResult<()>;

    /// Adds a drive, unless its project has one of that name: then nothing changes and the answer is false.
    async fn claim_drive(&self, drive: &Drive) -> DbResult<bool>;
    /// Adds or replaces a drive.
    async fn put_drive(&self, drive: &Drive) -> DbResult<()>;
    /// Finds a drive by name.
    async fn drive(&self, project: &Name, name: &Name) -> DbResult<Option<Drive>>;
    /// Finds a drive by id.
    async fn drive_by_id(&self, id: &DriveId) -> DbResult<Option<Drive>>;
    /// Lists drives, of every project if none is named.
    async fn drives(
        &self,
        project: Option<&Name>,
        name_prefix: Option<&str>,
        page: &Page,
    ) -> DbResult<Paged<Drive>>;
    /// Forgets a drive.
    async fn remove_drive(&self, id: &DriveId) -> DbResult<()>;

    /// Adds or replaces a project.
    async fn put_project(&self, project: &Project) -> DbResult<()>;
    /// Lists projects.
    async fn projects(&self) -> DbResult<Vec<Project>>;
    /// Forgets a project, and what was answered to it.
    async fn remove_project(&self, name: &Name) -> DbResult<()>;

    /// What was answered under a key, if the key is known.
    async fn recall(&self, project: &Name, key: &str) -> DbResult<Option<Remembered>>;
    /// Keeps an answer under a key.
    async fn remember(&self, project: &Name, key: &str, answer: &Remembered) -> DbResult<()>;
    /// Drops answers that were kept before `before`.
    async fn forget_answers(&self, before: Timestamp) -> DbResult<()>;

    /// Empties the index, to be filled again from the disk.
    async fn clear(&self) -> DbResult<()>;
}
