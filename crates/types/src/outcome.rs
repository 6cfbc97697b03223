//! The outcomes of requests about a sandbox.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Finding, Sandbox, Session, Snapshot, State, TreeFork, Usage};

/// The answer to create, start and fork.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Opened {
    /// The sandbox.
    pub sandbox: Sandbox,
    /// The session under way, with what its hooks did and whether `validate` was content.
    pub session: Option<Session>,
    /// Whether this call created the sandbox.
    pub created: bool,
    /// Whether this call woke it.
    pub resumed: bool,
}

/// The answer to a fork.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum Forked {
    /// Of one with a `count`.
    Many(Forks),
    /// Of one without.
    One(Box<Opened>),
}

/// Forks from one snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Forks {
    /// Those that are there, in the order of their numbers.
    pub made: Vec<Opened>,
    /// Those that are not, and why.
    pub failed: Vec<ForkFailed>,
}

/// A fork that was not made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ForkFailed {
    /// What it was to be called.
    pub name: String,
    /// What kind of failure, as in errors.
    pub code: String,
    /// Former names of the code, as in errors.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// Why not, for people.
    pub reason: String,
}

/// The answer to a pause.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Paused {
    /// The sandbox.
    pub sandbox: Sandbox,
    /// The session that ended by it, or before.
    pub session: Option<Session>,
    /// What it wakes from.
    pub snapshot: Option<Snapshot>,
}

/// Why a sandbox is in its state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Why {
    /// Where it is.
    pub state: State,
    /// Since when.
    #[schema(format = DateTime)]
    pub since: String,
    /// How it came into this state, as text for people; the following fields, too.
    pub reason: String,
    /// What would wake it, or, while it runs, what would put it to sleep and when.
    pub waking: Vec<String>,
    /// What keeps it awake now.
    pub holding: Vec<String>,
    /// Other notices: memory that could not be used, a pause that was refused, a failure.
    pub notices: Vec<String>,
}

/// The answer to a stop.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Stopped {
    /// The sandbox.
    pub sandbox: Sandbox,
    /// The session that ended; absent if none was under way.
    pub session: Option<Session>,
    /// What was kept; absent if the sandbox is not persistent or nothing was written.
    pub snapshot: Option<Snapshot>,
    /// What the session used; absent if none was under way.
    pub usage: Option<Usage>,
    /// What the guard found and let pass, or kept aside.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<Finding>,
}

/// The answer to a delete.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Deleted {
    /// Snapshots that stay because others stand on them.
    pub snapshots_kept: Vec<String>,
    /// Drives of which what its last session wrote is lost, because the delete was forced.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drives_lost: Vec<String>,
}

/// How a sandbox is to be deleted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Delete {
    /// Whether its snapshots stay, until they are deleted or expire.
    pub keep_snapshots: bool,
    /// Whether it goes even if what it wrote to drives cannot be had from its disks, and is lost.
    pub force: bool,
}

/// The answer to a rollback.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RolledBack {
    /// The sandbox.
    pub sandbox: Sandbox,
    /// A snapshot of how things were, to undo the rollback; absent if nothing would have been lost.
    pub before: Option<Snapshot>,
}

/// Everything connected with a sandbox by forks and snapshots.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Tree {
    /// Sandboxes.
    pub sandboxes: Vec<Sandbox>,
    /// Snapshots.
    pub snapshots: Vec<Snapshot>,
    /// What has become of each fork. Those that were deleted are listed while they are in the trash.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forks: Vec<TreeFork>,
}
