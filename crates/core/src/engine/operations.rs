//! Requests and answers about whole sandboxes: create, stop, checkpoint, fork, merge and the like.
//!
//! Requests about one subject only (commands, ports, secrets and so on) are beside the component that answers them.

use serde::{Deserialize, Serialize};

use crate::engine::{Error, Result, Sized};
use crate::model::{
    Decision, Drive, Finding, ForkFate, Method, Name, OnAccept, OnDelete, Patch, Point, Sandbox,
    SandboxId, Session, SessionId, Snapshot, SnapshotId, Span, Timestamp,
};
use crate::store::{MergeOutcome, TreeDiff};

/// A sandbox to create, or to get if it exists.
#[derive(Debug, Clone, Default)]
pub struct Create {
    /// Its name. If absent, a readable one is generated.
    pub name: Option<Name>,
    /// Its settings, where they differ from the defaults.
    pub patch: Patch,
    /// What to do if there is one of that name.
    pub if_exists: IfExists,
    /// Whether to start it at once.
    pub start: bool,
    /// A snapshot to start from instead of the image.
    pub from: Option<SnapshotId>,
}

/// What to do if a name is taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum IfExists {
    /// Fail with [`Error::NameTaken`].
    #[default]
    Fail,
    /// Return the existing one.
    Get,
}

/// Whether a sleeping sandbox may be woken.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum WakeMode {
    /// It is woken.
    #[default]
    Wake,
    /// It stays asleep, and the call fails with [`Error::NotRunning`].
    IfRunning,
    /// Only this session may be used. If it has ended, or is ending, the call fails with [`Error::SessionEnded`], also when another one
    /// runs.
    Session(SessionId),
}

impl WakeMode {
    /// A session that ended before it was asked is no failure where the next one is as good.
    pub(in crate::engine) fn may_try_again(&self, error: Error) -> Result<()> {
        match (self, error) {
            (Self::Session(id), Error::SessionOver) => {
                Err(Error::SessionEnded { session: id.clone() })
            }
            (Self::Wake | Self::IfRunning, Error::SessionOver) => Ok(()),
            (_, error) => Err(error),
        }
    }
}

/// A sandbox that was made, got, started or forked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    /// The sandbox.
    pub sandbox: Sandbox,
    /// Its session, if it has had one.
    pub session: Option<Session>,
    /// Whether this call created it.
    pub created: bool,
    /// Whether this call woke it.
    pub resumed: bool,
}

/// How a session is to be ended.
#[derive(Debug, Clone, Default)]
pub struct Stop {
    /// The session that is meant. If it is over, its record is the answer and nothing is touched.
    pub session: Option<SessionId>,
    /// Whether there is to be a snapshot.
    pub snapshot: SnapshotOnStop,
    /// Who wants it.
    pub method: Method,
    /// How long after its last use that snapshot goes, `Some(None)` for never; as the sandbox's retention
    /// says if absent.
    pub expires: Option<Option<Span>>,
    /// What was decided about what the guard finds.
    pub decision: Decision,
}

/// Whether the end of a session makes a snapshot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SnapshotOnStop {
    /// As the sandbox is configured, and if something was written.
    #[default]
    Configured,
    /// Whatever its configuration says, and even if nothing was written.
    Always,
}

/// A checkpoint to be taken.
#[derive(Debug, Clone, Default)]
pub struct Checkpoint {
    /// A label, for people.
    pub label: Option<String>,
    /// Whether a caller asked for it, or the engine takes it by itself.
    pub method: Method,
    /// How long after its last use the snapshot expires, `Some(None)` for never. If absent, the sandbox's retention decides.
    pub expires: Option<Option<Span>>,
    /// The session to take it of. If absent, the current one.
    pub session: Option<SessionId>,
}

/// How a sandbox is to be deleted.
#[derive(Debug, Clone, Default)]
pub struct Delete {
    /// What happens to its snapshots.
    pub snapshots: OnDelete,
    /// Whether it is deleted even if its writes to drives cannot be recovered from its disks and are lost.
    pub force: bool,
    /// Whether it skips the trash.
    pub at_once: bool,
    /// Whether it is deleted because it expired, not because somebody asked for it.
    pub expired: bool,
    /// Refused if it runs, or was used after this.
    pub unused_since: Option<Timestamp>,
    /// Refused if this is not the sandbox that has the name.
    pub only: Option<SandboxId>,
    /// Refused if it has more than this snapshot.
    pub only_at: Option<SnapshotId>,
}

/// Filters a list of snapshots.
#[derive(Debug, Clone, Default)]
pub struct SnapshotFilter {
    /// Of sandboxes of this name, deleted ones included.
    pub sandbox: Option<Name>,
    /// Whether to include those that were deleted or have expired.
    pub deleted: bool,
}

/// A sandbox that was stopped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stopped {
    /// The sandbox.
    pub sandbox: Sandbox,
    /// The session that ended, or the last one.
    pub session: Option<Session>,
    /// What it is resumed from.
    pub snapshot: Option<Sized<Snapshot>>,
    /// What the guard found and let pass, or kept aside.
    #[serde(default)]
    pub findings: Vec<Finding>,
}

/// A sandbox that was deleted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deleted {
    /// Snapshots of it that were kept: those others stand on, or all if that was asked for.
    pub snapshots_kept: Vec<SnapshotId>,
    /// Drives of which what its last session wrote is lost, because the delete was forced.
    #[serde(default)]
    pub drives_lost: Vec<Name>,
}

/// A fork to be made.
#[derive(Debug, Clone, Default)]
pub struct Fork {
    /// The new sandbox's name; a readable one is made up if absent.
    pub name: Option<Name>,
    /// What is to be different from the source.
    pub patch: Patch,
    /// What of the source it is to start from.
    pub from: ForkFrom,
    /// The generation the source must be at.
    pub expect_generation: Option<u64>,
    /// Whether to start it at once.
    pub start: bool,
    /// How many, for [`Engine::fork_many`](crate::engine::Engine::fork_many): they are called `<name>-1` and so on.
    pub count: Option<u32>,
    /// What becomes of the fork once it is accepted.
    pub on_accept: OnAccept,
}

/// Forks that were made from one capture.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forks {
    /// The forks that were made, in order.
    pub made: Vec<Opened>,
    /// Those that are not, and why.
    pub failed: Vec<ForkFailed>,
}

/// A fork that was not made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkFailed {
    /// What it was to be called.
    pub name: Name,
    /// [`Error::code`].
    pub code: String,
    /// Why not, for people.
    pub reason: String,
}

/// A sandbox that was paused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Paused {
    /// The sandbox.
    pub sandbox: Sandbox,
    /// The session that ended, or the last one.
    pub session: Option<Session>,
    /// What it wakes from.
    pub snapshot: Option<Sized<Snapshot>>,
}

/// A fork whose state its origin is to get.
#[derive(Debug, Clone, Copy, Default)]
pub struct Promote {
    /// The generation the origin must be at; the one it was forked at if absent.
    pub expect_generation: Option<u64>,
}

/// An origin that got the state of a fork.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Promoted {
    /// The origin.
    pub sandbox: Sandbox,
    /// What it stands on now.
    pub snapshot: Snapshot,
    /// What it stood on before; its image if absent.
    pub before: Option<Snapshot>,
}

/// Changes to be brought into another sandbox.
#[derive(Debug, Clone, Default)]
pub struct MergeRequest {
    /// The sandbox that gets them; the origin if absent.
    pub into: Option<Name>,
    /// Globs of the paths to take; all if empty.
    pub only: Vec<String>,
    /// Whether both versions of a conflict are kept, side by side.
    pub keep_both: bool,
    /// Whether nothing is to be changed.
    pub dry_run: bool,
    /// The generation the target must be at.
    pub expect_generation: Option<u64>,
}

/// What a merge did, or would do.
#[derive(Debug, Clone)]
pub struct Merged {
    /// Paths and conflicts.
    pub outcome: MergeOutcome,
    /// The target.
    pub sandbox: Sandbox,
    /// The snapshot with the result, if something was changed.
    pub snapshot: Option<Snapshot>,
    /// Whether all paths were considered.
    pub all: bool,
}

/// Chosen files of a sandbox to be put into a drive.
#[derive(Debug, Clone)]
pub struct PromoteIntoDrive {
    /// The drive.
    pub drive: Name,
    /// The directory in it; empty for its root.
    pub path: String,
    /// Globs of the paths.
    pub only: Vec<String>,
    /// The generation the drive must be at.
    pub expect_generation: Option<u64>,
    /// Whether nothing is to be changed.
    pub dry_run: bool,
}

/// What was put into a drive, or would be.
#[derive(Debug, Clone)]
pub struct PromotedIntoDrive {
    /// The drive.
    pub drive: Drive,
    /// Paths, as they are in the drive.
    pub outcome: MergeOutcome,
    /// What the sandbox was; absent if it was looked at as it runs, or is its image.
    pub snapshot: Option<SnapshotId>,
}

/// Selects differences of two points.
#[derive(Debug, Clone)]
pub struct DiffRequest {
    /// The first point.
    pub from: Point,
    /// The second point.
    pub to: Point,
    /// Paths or globs; all if empty. Without a leading slash they are below the working directory.
    pub paths: Vec<String>,
    /// How many paths are listed.
    pub limit: usize,
}

/// What differs between two points.
#[derive(Debug)]
pub struct Difference {
    /// The snapshots that were compared, where they are some, and whether files may change meanwhile.
    pub from: (Option<SnapshotId>, bool),
    /// The same of the second point.
    pub to: (Option<SnapshotId>, bool),
    /// The differences.
    pub tree: TreeDiff,
}

/// What of its source a fork starts from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ForkFrom {
    /// What the source is now; one that runs is checkpointed for it.
    #[default]
    Now,
    /// The snapshot the source stands on, or its image if it has none: what a running session has
    /// done since is left out, and the session is not touched.
    Kept,
    /// A snapshot.
    Snapshot(SnapshotId),
}

/// A sandbox that was rolled back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolledBack {
    /// The sandbox, which now continues from the chosen snapshot.
    pub sandbox: Sandbox,
    /// The snapshot of its former state, if a session had to be ended.
    pub before: Option<Snapshot>,
}

/// A sandbox's relatives: all sandboxes that are connected with it by forks, and their snapshots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tree {
    /// The sandboxes, oldest first.
    pub sandboxes: Vec<Sandbox>,
    /// The snapshots, oldest first.
    pub snapshots: Vec<Snapshot>,
    /// What has become of each fork, by name: `try-2` before `try-10`.
    pub forks: Vec<ForkInTree>,
}

/// A fork of one of the sandboxes of a lineage. It may be in the trash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkInTree {
    /// Its id.
    pub id: SandboxId,
    /// Its name.
    pub name: Name,
    /// The name of its origin.
    pub origin: Name,
    /// What has become of it.
    pub fate: ForkFate,
    /// What deleting it for good would free.
    pub freed: u64,
    /// Whether it is in the trash.
    pub in_trash: bool,
}
