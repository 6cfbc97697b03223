//! The index over the manifests on disk.
//!
//! The disk is the truth; a database only makes it quick to find things. So its interface is small:
//! documents are put, found, listed and removed, and whatever is in it can be made again from the
//! disk. Two things it decides, atomically: who gets a name ([`Db::claim`], [`Db::claim_drive`]), and whether a snapshot that
//! is to go has anybody standing on it ([`Db::remove_snapshot`]).
//!
//! Lists are paged, newest first. A page's cursor tells where it ended and is nobody else's business.

mod drives;
mod sqlite;

use std::fmt;

use async_trait::async_trait;

use crate::engine::lifecycle::Phase;
use crate::model::{
    Class, Command, CommandId, Drive, DriveId, Name, Project, Sandbox, SandboxId, Session,
    SessionId, Snapshot, SnapshotId, Tags, Timestamp,
};

pub use sqlite::SqliteDb;

/// What a database answers.
pub type DbResult<T> = Result<T, DbError>;

/// Why the index could not answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DbError {
    /// The database said no.
    #[error("the index could not {action}")]
    Query {
        /// What was being done, as a verb phrase.
        action: &'static str,
        /// What it said.
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
}

/// Which sandboxes are wanted. All that is given must fit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// Tags it must carry, all of them.
    pub tags: Tags,
    /// Its phase.
    pub phase: Option<Phase>,
    /// How its name begins.
    pub name_prefix: Option<String>,
    /// Its class.
    pub class: Option<Class>,
}

/// Which drives are wanted, and in what order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DriveQuery {
    /// How its name begins.
    pub name_prefix: Option<String>,
    /// What they are sorted by.
    pub order: DriveOrder,
    /// From the lowest up, and not from the highest down.
    pub ascending: bool,
}

/// What drives are sorted by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DriveOrder {
    /// When they were made.
    #[default]
    Created,
    /// When they were last changed.
    Updated,
    /// Their names.
    Name,
}

/// Which part of a list is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// How many at the most.
    pub limit: u32,
    /// Where the page before ended.
    pub cursor: Option<String>,
}

impl Default for Page {
    fn default() -> Self {
        Self { limit: 100, cursor: None }
    }
}

impl Page {
    /// Everything there is.
    #[must_use]
    pub fn all() -> Self {
        Self { limit: u32::MAX - 1, cursor: None }
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

    /// Adds or replaces a command.
    async fn put_command(&self, command: &Command) -> DbResult<()>;
    /// Finds a command.
    async fn command(&self, id: &CommandId) -> DbResult<Option<Command>>;
    /// Forgets a command.
    async fn remove_command(&self, id: &CommandId) -> DbResult<()>;
    /// Lists a sandbox's commands.
    async fn commands(&self, sandbox: &SandboxId, page: &Page) -> DbResult<Paged<Command>>;

    /// Adds or replaces a snapshot.
    async fn put_snapshot(&self, snapshot: &Snapshot) -> DbResult<()>;
    /// Finds a snapshot.
    async fn snapshot(&self, id: &SnapshotId) -> DbResult<Option<Snapshot>>;
    /// Lists snapshots: of a sandbox, of a project, or all.
    async fn snapshots(
        &self,
        project: Option<&Name>,
        sandbox: Option<&SandboxId>,
        page: &Page,
    ) -> DbResult<Paged<Snapshot>>;
    /// Forgets a snapshot, unless a sandbox other than `holder` stands on it: then nothing changes and
    /// the answer is false. Atomic with [`claim`](Self::claim) and [`put_sandbox`](Self::put_sandbox).
    async fn remove_snapshot(&self, id: &SnapshotId, holder: Option<&SandboxId>) -> DbResult<bool>;

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
        query: &DriveQuery,
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
