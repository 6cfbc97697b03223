//! Sandboxes in the trash.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A sandbox in the trash.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TrashItem {
    /// Its id.
    pub id: String,
    /// What it was called. The name is free.
    pub name: String,
    /// When it was deleted.
    pub deleted_at: String,
    /// Whether it expired, and nobody asked for it.
    pub expired: bool,
    /// How many snapshots went with it.
    pub snapshots: u64,
    /// What deleting it for good frees.
    pub freed_if_deleted_bytes: u64,
    /// How long it stays at least, unless space is needed.
    pub stays_for_ms: u64,
}

/// A restore from the trash.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Restore {
    /// Its name; the one it had if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// The deleted sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TrashEmptied {
    /// How many sandboxes.
    pub sandboxes: u64,
}
