//! Sessions: the waking periods of sandboxes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::SecretGiven;

/// What a session used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Usage {
    /// CPU time really used.
    pub active_cpu_ms: u64,
    /// Wall time.
    pub wall_ms: u64,
    /// The most memory at one time.
    pub memory_peak_bytes: u64,
    /// Bytes received from outside.
    pub network_in_bytes: u64,
    /// Bytes sent outside.
    pub network_out_bytes: u64,
    /// Processes that the kernel killed because the sandbox was out of memory. Known of containers; those inside a microVM
    /// show in the `end` of their commands.
    #[serde(default)]
    pub oom_kills: u64,
}

/// Why a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SessionEnd {
    /// Somebody asked.
    Stopped,
    /// Somebody asked, and memory was kept: processes go on in the next session.
    Paused,
    /// Nothing was alive in it for the idle timeout.
    Idle,
    /// Its time was up.
    Timeout,
    /// A rollback replaced what it stood on.
    RolledBack,
    /// The sandbox was deleted.
    Deleted,
    /// Its machine died, or the host went down. What it had written was kept.
    Interrupted,
    /// Its machine was killed because the memory it may use was used up. What it had written was kept.
    OutOfMemory,
    /// It was over its disk limit, and its processes could not be ended otherwise. What it had written was kept.
    OutOfDisk,
    /// It never came up.
    StartFailed,
}

/// What a hook did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HookRun {
    /// `on_create`, `on_resume` or `validate`.
    pub hook: String,
    /// What was run.
    pub argv: Vec<String>,
    /// The command, whose log can be read; absent if it could not be started.
    pub command: Option<String>,
    /// Its exit code; absent if it could not be started.
    pub exit_code: Option<i32>,
    /// What went wrong, for people.
    pub problem: Option<String>,
}

/// What was changed in the root filesystem of a sandbox during a session: by commands, services and uploads. What every look at its
/// files found is added up, so a file that is created and deleted later counts as both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SessionChanges {
    /// How many paths were created.
    pub created: u64,
    /// How many paths were modified: content, mode, owner or times.
    pub modified: u64,
    /// How many paths were deleted.
    pub deleted: u64,
    /// What the created and modified files took on the disk.
    pub bytes: u64,
    /// Whether all changes were seen. Otherwise there were at least so many.
    pub complete: bool,
}

impl Default for SessionChanges {
    fn default() -> Self {
        Self { created: 0, modified: 0, deleted: 0, bytes: 0, complete: true }
    }
}

/// One waking period of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Session {
    /// Its id.
    pub id: String,
    /// Whose it is.
    pub sandbox_id: String,
    /// The snapshot it started from; the image if absent.
    pub from: Option<String>,
    /// The generation it started from.
    pub generation: u64,
    /// When it began.
    #[schema(format = DateTime)]
    pub started_at: String,
    /// When it ended.
    #[schema(format = DateTime)]
    pub ended_at: Option<String>,
    /// Why it ended.
    pub end: Option<SessionEnd>,
    /// The snapshot made at its end.
    pub snapshot: Option<String>,
    /// What it used.
    pub usage: Usage,
    /// What was changed during it, as of the last look; absent in records of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changes: Option<SessionChanges>,
    /// When it will be ended, unless extended.
    #[schema(format = DateTime)]
    pub deadline: Option<String>,
    /// What the hooks did.
    pub hooks: Vec<HookRun>,
    /// Whether `validate` found things as they were; absent without such a hook.
    pub valid: Option<bool>,
    /// The secrets it was given.
    #[serde(default)]
    pub secrets: Vec<SecretGiven>,
    /// Why it started from files although memory was kept: files are as of the same generation, processes are gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<String>,
}
