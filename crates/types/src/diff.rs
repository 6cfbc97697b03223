//! Differences between two points of the history of sandboxes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Drive, EntryKind, ForkFailed, Sandbox};

/// How a path differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DiffKind {
    /// Only the second point has it.
    Added,
    /// Only the first point has it.
    Removed,
    /// Both have it, and it is not the same.
    Modified,
    /// The first point has the same content at `old_path`.
    Renamed,
}

/// What of a path differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DiffAspect {
    /// The bytes of a file, the target of a symbolic link, the number of a device.
    Content,
    /// Permission bits.
    Mode,
    /// User or group.
    Owner,
    /// Extended attributes.
    Xattrs,
    /// File, directory, symbolic link, ...
    Type,
}

/// What a point has at a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiffSide {
    /// What it is.
    pub kind: EntryKind,
    /// Permission bits, set-user-id and its like included.
    pub mode: u32,
    /// Owner, as a number inside the sandbox.
    pub uid: u32,
    /// Group, as a number inside the sandbox.
    pub gid: u32,
    /// Size in bytes; of a directory 0.
    pub size_bytes: u64,
}

/// One path that differs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiffEntry {
    /// The path. Bytes that are not printable UTF-8, and `%`, are written `%XX`.
    pub path: String,
    /// How it differs.
    pub change: DiffKind,
    /// Of a renamed file: its path at the first point.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub old_path: Option<String>,
    /// Of a modified or renamed path: what differs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub what: Vec<DiffAspect>,
    /// What the first point has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<DiffSide>,
    /// What the second point has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<DiffSide>,
}

/// How many paths differ.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiffCounts {
    /// Paths that only the second point has.
    pub added: u64,
    /// Paths that only the first point has.
    pub removed: u64,
    /// Paths that both have and that differ.
    pub modified: u64,
    /// Files that have another path.
    pub renamed: u64,
    /// Sizes of added and modified files at the second point.
    pub bytes: u64,
}

/// How a fork's work was brought back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BroughtBack {
    /// The other sandbox became what the fork was.
    Promoted,
    /// The fork's changes were merged into the other sandbox.
    Merged,
}

/// What becomes of a fork once it is accepted: promoted, or all of it merged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnAccept {
    /// It stays.
    #[default]
    Keep,
    /// It is deleted, and goes to the trash.
    Delete,
}

impl OnAccept {
    /// Whether it stays.
    #[must_use]
    #[allow(clippy::trivially_copy_pass_by_ref)] // serde asks for it
    pub fn is_keep(&self) -> bool {
        *self == Self::Keep
    }
}

/// What has become of a fork.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ForkFate {
    /// It is there, and nothing was decided.
    Alive,
    /// Its origin became what it was.
    Promoted,
    /// Its changes were merged into another sandbox.
    Merged,
    /// It was deleted, and nothing of it was brought back.
    Rejected,
    /// The same, because its time was up.
    Expired,
}

/// A fork in a lineage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TreeFork {
    /// Its id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// The name of its origin.
    pub origin: String,
    /// What has become of it.
    pub fate: ForkFate,
    /// What deleting it for good would free.
    pub freed_if_deleted_bytes: u64,
    /// Whether it is in the trash.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_trash: bool,
}

/// What became of a fork's work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ForkOutcome {
    /// How it was brought back.
    pub how: BroughtBack,
    /// The sandbox it was brought back into.
    pub into: String,
    /// That sandbox's generation with it.
    pub generation: u64,
    /// When.
    pub at: String,
}

/// A point as it was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiffPoint {
    /// As it was asked for.
    pub point: String,
    /// The snapshot; absent for an image, and for a running sandbox, whose files are read as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Whether it runs, so that files may change during the comparison.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub live: bool,
}

/// The differences between two points.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Diff {
    /// The first point.
    pub from: DiffPoint,
    /// The second point.
    pub to: DiffPoint,
    /// How many paths differ, listed or not.
    pub counts: DiffCounts,
    /// The paths, sorted.
    pub changes: Vec<DiffEntry>,
    /// Whether there are more than are listed.
    pub truncated: bool,
}

/// Gives the origin of a fork the fork's state.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Promote {
    /// The generation the origin must have; that of the fork's beginning if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expect_generation: Option<u64>,
    /// Deletes the fork afterwards. It goes to the trash.
    #[serde(default)]
    pub delete_fork: bool,
    /// Deletes the other forks of its group too: those that were made together with it.
    #[serde(default)]
    pub delete_group: bool,
}

/// A fork that was promoted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Promoted {
    /// The origin, which is now what the fork is.
    pub sandbox: Sandbox,
    /// The snapshot it has now.
    pub snapshot: String,
    /// The snapshot it had before, for a rollback; absent if it was its image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
    /// Forks that were deleted afterwards.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deleted: Vec<String>,
    /// Forks that were to be deleted and are still there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed: Vec<ForkFailed>,
}

/// Puts chosen files that a sandbox made, changed or deleted since it was forked into a drive that no session writes to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PromoteIntoDrive {
    /// The sandbox.
    pub from: String,
    /// Globs of the paths.
    pub only: Vec<String>,
    /// The directory in the drive, below which files keep their whole path; its root if absent.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// The generation the drive must have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expect_generation: Option<u64>,
    /// Says what would be done, and does nothing.
    #[serde(default)]
    pub dry_run: bool,
}

/// Takes chosen files that a sandbox made or changed since it was forked.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TakeArtifacts {
    /// Globs of the paths; `/` is everything.
    pub only: Vec<String>,
}

/// What was put into a drive, or would be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PromotedIntoDrive {
    /// The drive.
    pub drive: Drive,
    /// The snapshot of the sandbox that the files are from; absent for its image, and for a running one that was looked at only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// How many paths were added, replaced and removed. All 0 if the drive had them already.
    pub counts: MergeCounts,
    /// Paths where a file and a directory are in each other's place; with `dry_run` only. At most 1,000 are listed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conflicts: Vec<MergeConflict>,
    /// Paths in the drive that are, or would be, changed; at most 1,000 are listed.
    pub changes: Vec<DiffEntry>,
    /// Whether there are more changes or conflicts than are listed.
    pub truncated: bool,
}

/// Gives a sandbox another name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rename {
    /// The new name.
    pub name: String,
}

/// What to do with paths that changed on both sides.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum OnConflict {
    /// Change nothing and list them.
    #[default]
    Refuse,
    /// Keep the target's version and write the other one beside it.
    Keep,
}

/// Brings the changes of a sandbox into another one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Merge {
    /// The sandbox that gets the changes; the origin if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub into: Option<String>,
    /// Says what would be done, and does nothing.
    #[serde(default)]
    pub dry_run: bool,
    /// What to do with conflicts.
    #[serde(default)]
    pub conflicts: OnConflict,
    /// Globs of the paths to take; all if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub only: Vec<String>,
    /// The generation the target must have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expect_generation: Option<u64>,
}

/// A path that cannot be merged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MergeConflict {
    /// The path.
    pub path: String,
    /// Why, as a sentence.
    pub reason: String,
}

/// What a merge did, or would do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Merged {
    /// The sandbox that got the changes.
    pub sandbox: String,
    /// Its generation now.
    pub generation: u64,
    /// The snapshot with the result; absent if nothing was changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// How many paths were taken over, and how many of them were merged by lines.
    pub counts: MergeCounts,
    /// Paths that changed on both sides; at most 1,000 are listed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conflicts: Vec<MergeConflict>,
    /// Paths that are, or would be, changed; at most 1,000 are listed.
    pub changes: Vec<DiffEntry>,
    /// Whether there are more changes or conflicts than are listed.
    pub truncated: bool,
    /// The fork, if it was to be deleted once it was accepted and is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deleted: Vec<String>,
    /// The fork, if it was to be deleted and is still there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed: Vec<ForkFailed>,
}

/// How many paths a merge changes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MergeCounts {
    /// Added.
    pub added: u64,
    /// Removed.
    pub removed: u64,
    /// Replaced by the other side's.
    pub modified: u64,
    /// Merged by lines.
    pub merged: u64,
    /// In conflict.
    pub conflicts: u64,
}
