//! Backups of a data directory, made while a daemon uses it. `docs/formats/backup.md` is normative.
//!
//! A backup needs nothing of the daemon. What it copies either never changes once it exists (sealed
//! layers, memory), or is a document that is replaced as a whole, or a file that only grows. What
//! the daemon deletes meanwhile lies in the trash for its grace period, under its own id, and is
//! found there.
//!
//! ```text
//! sandboxes, drives ──> as they would be without the session under way ──┐
//! their snapshots, and all others up to the same generation ─────────────┤
//!                                                                        ├──> objects, archives ──sync──> manifest
//! layers and memory that these name, if the backup has none of that id ──┘
//! ```
//!
//! - *Consistent* per sandbox: its record and its current snapshot are read until they agree. Both were acknowledged.
//! - *Incremental:* an archive is written once for each id, an object once for each content.
//! - *Whole or absent:* the manifest is written last. Whatever ends a backup early leaves files that nothing names, and the next
//!   backup uses those that are complete.
//! - *Restored* into a directory beside the final one, which is renamed when everything is in it.

mod archive;
mod collect;
mod manifest;
mod open;
mod prune;
mod restore;
mod verify;

use std::path::{Path, PathBuf};

pub use self::collect::{BackupOptions, create_backup};
pub use self::manifest::{BackupKey, BackupManifest, BackupSummary, backup_summary, backups};
pub use self::prune::{PrunedBackups, prune_backups};
pub use self::restore::{RestoredBackup, restore_backup};
pub use self::verify::{BackupProblem, Verified, verify_backup};
use crate::store::StoreError;

/// Why there is no backup, or nothing was restored.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackupError {
    /// The filesystem returned an error, or a document is damaged.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// It is no data directory of a format that can be backed up.
    #[error("`{path}` is not a data directory", path = path.display())]
    NoData {
        /// Which.
        path: PathBuf,
    },
    /// There are no backups, or none of that id.
    #[error("there is no backup{} in `{path}`", id.as_ref().map(|id| format!(" `{id}`")).unwrap_or_default(), path = path.display())]
    NoBackup {
        /// Where.
        path: PathBuf,
        /// Which.
        id: Option<String>,
    },
    /// Another process writes a backup there.
    #[error("another backup is being written to `{path}`", path = path.display())]
    Busy {
        /// Where.
        path: PathBuf,
    },
    /// The directory to restore into is not empty.
    #[error("`{path}` is not empty", path = path.display())]
    NotEmpty {
        /// Which.
        path: PathBuf,
    },
    /// Part of the backup is missing or damaged.
    #[error("the backup is damaged: {problem}")]
    Damaged {
        /// What.
        problem: BackupProblem,
    },
}

/// What is being done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackupProgress {
    /// How many layers and memory images are done.
    pub done: usize,
    /// Of how many.
    pub all: usize,
}

type Result<T, E = BackupError> = std::result::Result<T, E>;

/// Where the archive of a layer or memory image is.
fn archive_path(root: &Path, kind: &str, id: &str) -> PathBuf {
    root.join(kind).join(format!("{id}.zst"))
}

/// Where a file of this content is.
fn object_path(root: &Path, sha256: &str) -> PathBuf {
    root.join("objects").join(sha256.get(..2).unwrap_or("00")).join(sha256)
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> BackupError {
    let failed = crate::store::io_error(action, path);
    move |error| failed(error).into()
}
