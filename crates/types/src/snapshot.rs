//! Snapshots: how they came about, what they hold, how long they are kept.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Finding;

/// How a snapshot came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotKind {
    /// At a stop.
    Stop,
    /// While the session went on, because somebody asked.
    Checkpoint,
    /// While the session went on, before a fork.
    Fork,
    /// Before a rollback, so that it can be undone.
    BeforeRollback,
    /// From what a session that broke off had written.
    Recovered,
    /// At a pause: with memory.
    Pause,
    /// From a merge of another sandbox's changes.
    Merge,
}

/// What a snapshot takes on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotSize {
    /// What was written since its parent.
    pub own_bytes: u64,
    /// What it has in common with others.
    pub shared_bytes: u64,
    /// What deleting it would free.
    pub freed_if_deleted_bytes: u64,
    /// About how much an export writes: the disk space of all its layers, those of its image included. Holes of sparse files
    /// are not counted here and are zeros in an export, whose `Content-Length` is exact.
    #[serde(default)]
    pub export_bytes: u64,
}

/// Memory of a machine, as part of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotMemory {
    /// How many captures it stands on, its own included.
    pub layers: u64,
    /// What of its size is memory: pages, devices and disks, those of captures it stands on included.
    pub bytes: Option<u64>,
}

/// A point a sandbox can be resumed or forked from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Snapshot {
    /// Its id.
    pub id: String,
    /// The name of the sandbox it was made of. It may be gone by now.
    pub sandbox: String,
    /// That sandbox's id.
    pub sandbox_id: String,
    /// The session it was made in.
    pub session: String,
    /// That sandbox's generation with this snapshot.
    pub generation: u64,
    /// The snapshot before it.
    pub parent: Option<String>,
    /// How it came about.
    pub kind: SnapshotKind,
    /// A label, for people.
    pub label: Option<String>,
    /// How many layers it stands on, the image's included.
    pub layers: u64,
    /// What it takes on the disk; absent where that was not worked out (lineage, rollback).
    pub size: Option<SnapshotSize>,
    /// The memory that is part of it; absent if it has files only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<SnapshotMemory>,
    /// What the guard found in it and let pass, or took out of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<Finding>,
    /// When it was made.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// When it goes away, unless it is some sandbox's current one.
    #[schema(format = DateTime)]
    pub expires_at: Option<String>,
}

/// The answer to deleting a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotDeleted {
    /// What it freed.
    pub freed_bytes: u64,
}
