//! Files inside a sandbox.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What an [`Entry`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A pipe, socket or device.
    Other,
}

/// What is at a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Entry {
    /// The name (in a listing) or the path that was asked about. Bytes that are not UTF-8 are shown as
    /// U+FFFD here and exactly in `raw_name`.
    pub name: String,
    /// The exact name, base64, where `name` could not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub raw_name: Option<String>,
    /// What it is.
    pub kind: EntryKind,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Permission bits, set-user-id and its like included.
    pub mode: u32,
    /// Owner, as a number inside the sandbox.
    pub uid: u32,
    /// Group, as a number inside the sandbox.
    pub gid: u32,
    /// Last modification.
    #[schema(format = DateTime)]
    pub modified_at: String,
    /// Where a symlink points.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
}

/// What a directory holds, sorted by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Listing {
    /// What is in it.
    pub items: Vec<Entry>,
    /// Pass this as `cursor` for the rest; null if this is all.
    pub next: Option<String>,
}

/// A directory to make.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MakeDir {
    /// Where.
    pub path: String,
    /// Permission bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// Whether missing parents are made, and an existing directory is fine.
    #[serde(default)]
    pub parents: bool,
    /// As whom; the sandbox's user if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// Something to rename.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Move {
    /// From where.
    pub from: String,
    /// To where.
    pub to: String,
    /// As whom; the sandbox's user if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// The answer to an upload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Moved {
    /// How many bytes were written.
    pub bytes: u64,
    /// How many files.
    pub files: u64,
}
