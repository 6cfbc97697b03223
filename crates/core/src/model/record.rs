//! What is on record: the documents that are written to disk as manifests and indexed by the database.
//!
//! `docs/formats/data-directory.md` shows where each lies. Every document begins with `format`; a
//! daemon that finds a higher number than [`FORMAT`] refuses to touch it.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{
    BroughtBack, CommandChanges, CommandEnd, CommandId, Expiry, GroupId, KeyId, LayerId, Method,
    Name, OnAccept, ProjectNetwork, ProjectRuns, SandboxId, SecretGiven, SecretName,
    SessionChanges, SessionId, Size, SnapshotId, SnapshotKind, Span, Timestamp,
};

/// The version of all documents, and of the data directory. 2: drives, tombstones of snapshots. 3: network policies,
/// secrets, guards, services. 4: memory images. 5: checksums.
pub const FORMAT: u32 = 5;

/// A tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Project {
    /// [`FORMAT`].
    pub format: u32,
    /// Its name, which is its identity.
    pub name: Name,
    /// When it was made.
    pub created_at: Timestamp,
    /// Who may act for it.
    pub keys: Vec<Key>,
    /// What its sandboxes may reach.
    #[serde(default)]
    pub network: ProjectNetwork,
    /// What it allows its runs.
    #[serde(default)]
    pub runs: ProjectRuns,
}

/// What a key may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Look at sandboxes, never wake or change one.
    Read,
    /// Everything inside the project, but for its keys.
    Write,
    /// Everything, in every project: images, projects and keys included.
    Admin,
}

/// An API key. The secret itself is not kept, only its hash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key {
    /// Its id, which is no secret.
    pub id: KeyId,
    /// What people call it.
    pub label: String,
    /// SHA-256 of the secret, in hex. Secrets are 256 random bits, so a plain hash is enough.
    pub hash: String,
    /// What it may do.
    pub scope: Scope,
    /// Whether it may approve, and accept runs; an admin key may anyway.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub approve: bool,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it stops working.
    pub expires_at: Option<Timestamp>,
}

pub(super) fn after(at: Timestamp, span: Span) -> Timestamp {
    let span = jiff::SignedDuration::from_millis(i64::try_from(span.0).unwrap_or(i64::MAX));
    at.checked_add(span).unwrap_or(Timestamp::MAX)
}

/// What becomes of a sandbox's snapshots when it is deleted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnDelete {
    /// They go too, but for those that another sandbox stands on.
    #[default]
    Drop,
    /// They stay until they are deleted or expire.
    Keep,
}

impl OnDelete {
    #[allow(clippy::trivially_copy_pass_by_ref)] // serde asks for it
    pub(super) fn is_drop(&self) -> bool {
        *self == Self::Drop
    }
}

/// How a session is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ending {
    /// Why.
    pub end: SessionEnd,
    /// The kind of the snapshot.
    pub kind: SnapshotKind,
    /// Whether there is a snapshot whatever the configuration says, and even of nothing new.
    pub always: bool,
    /// Who wants the snapshot.
    pub method: Method,
    /// How long it is kept.
    pub expiry: Expiry,
}

/// Where a fork came from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lineage {
    /// The source's id.
    pub sandbox: SandboxId,
    /// The source's name at the time.
    pub name: Name,
    /// The snapshot; absent when the source had none and both stand on the image.
    pub snapshot: Option<SnapshotId>,
    /// The source's generation.
    pub generation: u64,
    /// The forks that were made together with it, by the name they begin with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<Name>,
    /// The same forks: other ones may be made under that name later. Older records lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_id: Option<GroupId>,
    /// What becomes of the fork once it is accepted.
    #[serde(default, skip_serializing_if = "OnAccept::is_keep")]
    pub on_accept: OnAccept,
}

/// A merge of a sandbox into another one. The next merge of the two begins here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MergePoint {
    /// The sandbox that got the changes.
    pub into: SandboxId,
    /// The snapshot whose changes it got.
    pub snapshot: SnapshotId,
    /// What the other sandbox was then. If it is not what that one comes from now, it was rolled back, and the merge counts no
    /// more. Older records lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<SnapshotId>,
    /// The other sandbox's generation then.
    #[serde(default)]
    pub generation: u64,
    /// When.
    #[serde(default)]
    pub at: Timestamp,
}

/// Whose changes a snapshot has got in a merge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MergeSource {
    /// The sandbox.
    pub sandbox: SandboxId,
    /// Its snapshot.
    pub snapshot: SnapshotId,
}

/// The outcome of a fork's work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkOutcome {
    /// How it was brought back.
    pub how: BroughtBack,
    /// Into which sandbox: its name at the time.
    pub into: Name,
    /// Its id. Older records lack it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub into_id: Option<SandboxId>,
    /// That sandbox's generation with it.
    pub generation: u64,
    /// When.
    pub at: Timestamp,
    /// The forks that it was made together with and promoted from among, so that those can still be deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group_id: Option<GroupId>,
}

/// One waking period of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Session {
    /// [`FORMAT`].
    pub format: u32,
    /// Its id.
    pub id: SessionId,
    /// Whose it is.
    pub sandbox: SandboxId,
    /// What it started from; the image if absent.
    pub from: Option<SnapshotId>,
    /// The generation it started from.
    pub generation: u64,
    /// When it began.
    pub started_at: Timestamp,
    /// When it began to end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requested_stop_at: Option<Timestamp>,
    /// When it ended.
    pub ended_at: Option<Timestamp>,
    /// Why it ended.
    pub end: Option<SessionEnd>,
    /// The snapshot made at its end.
    pub snapshot: Option<SnapshotId>,
    /// What it used.
    pub usage: Usage,
    /// What was changed during it. Absent while it runs, and in records of before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changes: Option<SessionChanges>,
    /// When it will be ended, unless extended.
    pub deadline: Option<Timestamp>,
    /// What the hooks did.
    pub hooks: Vec<HookRun>,
    /// Whether `validate` found things as they were; absent without such a hook.
    pub valid: Option<bool>,
    /// Services that somebody started or stopped by hand, and which of the two.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub services: BTreeMap<Name, bool>,
    /// The secrets it was given.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<SecretGiven>,
    /// Why the memory that was kept could not be used, so that the session began with the files of the same snapshot alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<String>,
}

/// Why a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionEnd {
    /// Somebody asked.
    Stopped,
    /// A caller paused it, and memory was kept: processes resume in the next one.
    Paused,
    /// Nothing was alive in it for the idle timeout. The phase shows whether it was paused or
    /// stopped for that.
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

/// What a session used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// CPU time really used.
    pub active_cpu_ms: u64,
    /// Wall time.
    pub wall_ms: u64,
    /// The most memory at one time.
    pub memory_peak: Size,
    /// Bytes received from outside.
    pub network_in: u64,
    /// Bytes sent outside.
    pub network_out: u64,
    /// Processes that the kernel killed out of memory.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub oom_kills: u64,
}

impl Usage {
    /// Adds what another session used.
    pub fn add(&mut self, other: Self) {
        self.active_cpu_ms = self.active_cpu_ms.saturating_add(other.active_cpu_ms);
        self.wall_ms = self.wall_ms.saturating_add(other.wall_ms);
        self.memory_peak = self.memory_peak.max(other.memory_peak);
        self.network_in = self.network_in.saturating_add(other.network_in);
        self.network_out = self.network_out.saturating_add(other.network_out);
        self.oom_kills = self.oom_kills.saturating_add(other.oom_kills);
    }
}

/// What a hook did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookRun {
    /// `on_create`, `on_resume` or `validate`.
    pub hook: String,
    /// What was run.
    pub argv: Vec<String>,
    /// The command, whose log can be read; absent if it could not be started.
    pub command: Option<CommandId>,
    /// Its exit code; absent if it could not be started.
    pub exit_code: Option<i32>,
    /// What went wrong, for people.
    pub problem: Option<String>,
}

/// What a `validate` hook printed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Validation {
    /// Its exit code.
    pub exit_code: i32,
    /// SHA-256 of its output, in hex.
    pub output_hash: String,
    /// The beginning of its output, for people.
    pub excerpt: String,
}

/// One process started in a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    /// [`FORMAT`].
    pub format: u32,
    /// Its id.
    pub id: CommandId,
    /// Whose it is.
    pub sandbox: SandboxId,
    /// The session it ran in.
    pub session: SessionId,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Where it ran.
    pub cwd: Option<String>,
    /// As whom.
    pub user: Option<String>,
    /// Names of the variables it was given; values are not kept.
    pub env_names: Vec<String>,
    /// Whether it has a terminal.
    pub tty: bool,
    /// Whether it continues when the caller leaves.
    pub detached: bool,
    /// How long it may take before it is killed.
    pub timeout: Option<Span>,
    /// How it stands.
    pub state: CommandState,
    /// Its exit code; 128 + signal when a signal ended it.
    pub exit_code: Option<i32>,
    /// Why it ended. Absent while it runs, and in records of before: see [`ended_by`](Self::ended_by).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<CommandEnd>,
    /// The limit that ended it: bytes of memory or disk, milliseconds of a timeout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// The most that was used of it, if that is known: bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak: Option<u64>,
    /// How many processes of its session the kernel had killed out of memory when it was started.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub oom_kills_before: u64,
    /// When it began.
    pub started_at: Timestamp,
    /// When it ended.
    pub ended_at: Option<Timestamp>,
    /// How much it printed.
    pub output_bytes: u64,
    /// Whether the log has less than it printed.
    pub truncated: bool,
    /// The service it is of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<Name>,
    /// The secrets it was given.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<SecretName>,
    /// For how long its machine was paused, or lay in a snapshot, while it was alive.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub slept_ms: u64,
    /// The command it was before its memory became this sandbox's, or was rolled back to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub carried: Option<Carried>,
    /// Who started it: the id of an API key, or `service`, `hook`. Absent in records of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// What it changed. Absent while it runs, and until that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changes: Option<CommandChanges>,
}

impl Command {
    /// What the agent knows it by.
    #[must_use]
    pub fn inside(&self) -> &str {
        self.carried.as_ref().map_or(self.id.as_str(), |carried| carried.inside.as_str())
    }

    /// How much it had printed before this record's log begins.
    #[must_use]
    pub fn printed_before(&self) -> u64 {
        self.carried.as_ref().map_or(0, |carried| carried.printed)
    }
}

/// Where a command comes from that was alive in memory that was captured elsewhere or before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Carried {
    /// The command it was when its memory was captured.
    pub from: CommandId,
    /// What the agent knows it by: its first id.
    pub inside: CommandId,
    /// How much it had printed by then, all of which is in that command's log.
    pub printed: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde asks for it
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// How a command stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CommandState {
    /// It runs.
    Running,
    /// It ended by itself or by a signal.
    Exited,
    /// Its session ended under it.
    Lost,
}

/// An immutable set of file changes on top of others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// [`FORMAT`].
    pub format: u32,
    /// Its id.
    pub id: LayerId,
    /// What it was made from.
    pub kind: LayerKind,
    /// Disk space it takes: blocks, hard links counted once.
    pub bytes: u64,
    /// Disk space of files that it shares with the host by hard links. Not part of `bytes`; 0 in records of before.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub foreign_bytes: u64,
    /// How many files, directories and links it holds.
    pub files: u64,
    /// When it was sealed.
    pub sealed_at: Timestamp,
    /// A hash over the names, types, modes, owners, sizes and times of all files, taken at the seal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<String>,
    /// The digest of the uncompressed OCI layer it was unpacked from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff_id: Option<String>,
}

/// What a layer was made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerKind {
    /// Part of an image.
    Image,
    /// What a session wrote.
    Session,
    /// Copied out of a session that went on.
    Checkpoint,
    /// Several layers made one.
    Compacted,
}

/// What a sandbox can start from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// [`FORMAT`].
    pub format: u32,
    /// What it is called: `host`, `debian:12`, a name given at import.
    pub name: String,
    /// SHA-256 of its manifest or archive, as `sha256:…`.
    pub digest: String,
    /// Its layers; the first is the topmost.
    pub layers: Vec<LayerId>,
    /// What it says about commands.
    pub config: ImageConfig,
    /// When it was made here.
    pub created_at: Timestamp,
    /// Where it came from: `host`, a path, a registry reference.
    pub source: String,
    /// What it was customized from, if it was.
    #[serde(default, rename = "dressed", skip_serializing_if = "Option::is_none")]
    pub customized: Option<Customized>,
    /// Set if it is no image for sandboxes but what a build has after one of its steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<BuildStep>,
}

/// What is known of a step of a build.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildStep {
    /// The project that built it. No other one gets it.
    pub project: Name,
    /// When a build last needed it, to the day.
    pub used_at: Timestamp,
}

/// How a customized image came about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Customized {
    /// The image below.
    pub base: String,
    /// SHA-256 over all that went into it, as `sha256:…`.
    pub recipe: String,
}

/// What an image says about the commands run in it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageConfig {
    /// The user.
    pub user: Option<String>,
    /// The working directory.
    pub cwd: Option<String>,
    /// The environment.
    pub env: BTreeMap<String, String>,
    /// The program, for those who ask: commands of sandboxes are given by their callers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<String>,
    /// Its arguments, or the whole command where there is no program.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cmd: Vec<String>,
    /// The shell of builds; `/bin/sh -c` if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shell: Vec<String>,
    /// Labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Ports that its programs listen on, like `80/tcp`.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub exposed_ports: BTreeSet<String>,
}

#[cfg(test)]
mod tests {
    use super::Usage;
    use crate::model::{Config, Sandbox, Timestamp};

    #[test]
    fn a_sandbox_of_before_still_reads() {
        let mut config = serde_json::to_value(Config::default()).unwrap();
        let fields = config.as_object_mut().unwrap();
        for new in ["snapshot_always", "ports", "notes"] {
            fields.remove(new).unwrap();
        }
        fields["retention"] = serde_json::json!({"keep_last": 3});
        let text = serde_json::json!({
            "format": 1, "id": "sbx-01k00000000000000000000000", "project": "p", "name": "app",
            "config": config, "phase": "stopped", "debt": null, "generation": 0, "current": null,
            "image_layers": [], "image_config": {"user": null, "cwd": null, "env": {}},
            "forked_from": null, "session": null, "open_layer": null, "open_chain": [],
            "unsealed": null, "uids": null, "created_at": "2026-01-01T00:00:00Z",
            "updated_at": "2026-01-01T00:00:00Z", "used_at": "2026-01-01T00:00:00Z",
            "failure": null, "validated": null
        });
        let sandbox: Sandbox = serde_json::from_value(text).unwrap();
        assert!(sandbox.config.retention.delete_evicted, "as it was");
        assert_eq!((sandbox.deletion(), sandbox.totals), (None, Usage::default()));
        assert_eq!(sandbox.phase_at, Timestamp::UNIX_EPOCH);
    }
}
