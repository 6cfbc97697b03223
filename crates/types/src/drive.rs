//! Drives, and where sandboxes mount them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{IfExists, Size};

/// A volume that outlives sandboxes and is mounted into them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Drive {
    /// Its name, unique in the project.
    pub name: String,
    /// Its id.
    pub id: String,
    /// The project it belongs to.
    pub project: String,
    /// Its maximum size.
    pub max_size_bytes: u64,
    /// What it takes on the disk, what it shares with its forks included. What a session under way
    /// writes is counted when that ends.
    pub size_bytes: u64,
    /// Whether something was ever written to it, so that it can be mounted as a snapshot, or forked.
    pub initialized: bool,
    /// How often what it holds was changed: by a session that wrote to it, or by a promotion.
    #[serde(default)]
    pub generation: u64,
    /// The session that writes to it now.
    pub attached: Option<Attached>,
    /// The id of the drive it was forked from.
    pub parent: Option<String>,
    /// When it was made.
    #[schema(format = DateTime)]
    pub created_at: String,
    /// When it was last changed, attached or detached.
    #[schema(format = DateTime)]
    pub updated_at: String,
}

/// A session that writes to a drive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Attached {
    /// The sandbox's name.
    pub sandbox: String,
    /// The session's id.
    pub session: String,
}

/// A drive to create, or to get.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateDrive {
    /// Its name: 1 to 64 letters, digits, `-` and `_`.
    pub name: String,
    /// Maximum size; 1T if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_size: Option<Size>,
    /// The action if the name is taken. A drive of another size is never returned.
    #[serde(default)]
    pub if_exists: IfExists,
}

/// A fork: a new drive that holds what another one held when it was last detached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ForkDrive {
    /// The new drive's name.
    pub name: String,
}

/// A drive that a sandbox mounts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Mount {
    /// The drive's name.
    pub drive: String,
    /// How; `read-write` if absent.
    #[serde(default)]
    pub mode: MountMode,
}

/// How a drive is mounted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MountMode {
    /// To be read and written, by one session at a time.
    #[default]
    ReadWrite,
    /// Read-only, as it was when the session started.
    Snapshot,
}
