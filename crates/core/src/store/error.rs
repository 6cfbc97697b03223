//! Why the store could not do what it was asked.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::image;
use crate::model::{LayerId, MemoryId, Size};

/// The result of a call to the store.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

pub(super) fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::Io { action, path, source }
}

/// Why the store could not do what it was asked.
///
/// Messages name what failed and never repeat `source`: the code that reports the error prints the
/// whole chain.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Another daemon has the data directory open.
    #[error("`{path}` is held by another keep, process {holder}", path = path.display())]
    Locked {
        /// The lock.
        path: PathBuf,
        /// The process id its holder wrote into it.
        holder: String,
    },
    /// A later version of Sandkeep wrote it.
    #[error("`{path}` has format {found}, and this keep knows formats up to {known}; use a newer keep", path = path.display())]
    TooNew {
        /// The document.
        path: PathBuf,
        /// Its format.
        found: u32,
        /// The highest this version can read.
        known: u32,
    },
    /// A document cannot be read as what it should be.
    #[error("`{path}` is damaged: {reason}", path = path.display())]
    Damaged {
        /// The document.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A directory of the layout is missing.
    #[error(
        "`{path}` is missing: something is not mounted, or a restore was partial; bring it back and start again. \
         Nothing was changed. If what it held is lost for good, make an empty directory in its place by hand",
        path = path.display()
    )]
    MissingPart {
        /// The directory.
        path: PathBuf,
    },
    /// It was never written, or it has been removed.
    #[error("there is no {kind} {key} in the store")]
    NotFound {
        /// What was looked for.
        kind: &'static str,
        /// Its key.
        key: String,
    },
    /// Two points differ in too much to be compared.
    #[error("the comparison is too large: {why}")]
    DiffTooLarge {
        /// Which limit it is beyond.
        why: String,
    },
    /// A layer is more than one export may be.
    #[error("the snapshot is too large to be exported: {why}")]
    ExportTooLarge {
        /// Which limit it is beyond.
        why: String,
    },
    /// So much is being compared already that nothing more is begun.
    #[error("too much is being compared already: {why}")]
    Busy {
        /// What is at its bound.
        why: String,
    },
    /// One session may not write as much.
    #[error("{need} would be written, and the disk limit is {limit}", need = Size(*need), limit = Size(*limit))]
    OverLimit {
        /// How much it is.
        need: u64,
        /// How much it may be.
        limit: u64,
    },
    /// The requester of a patch does not read it.
    #[error("the patch was not taken: {why}")]
    NotTaken {
        /// What was waited for.
        why: String,
    },
    /// The layer is still being written to.
    #[error("layer {id} is not sealed")]
    NotSealed {
        /// The layer.
        id: LayerId,
    },
    /// A memory image cannot be used.
    #[error("memory layer {id} cannot be used: {reason}")]
    BadMemory {
        /// The layer.
        id: MemoryId,
        /// What is wrong with it.
        reason: String,
    },
    /// What was written to the layer is on a machine's disk, and was not exported yet.
    #[error("what was written to layer {id} is still on its disk")]
    OnDisk {
        /// The layer.
        id: LayerId,
    },
    /// Somebody may still be writing to the layer.
    #[error(
        "layer {id} is still mounted on this host; it is not sealed while something may write to it"
    )]
    StillMounted {
        /// The layer.
        id: LayerId,
    },
    /// What a machine exported cannot be taken over.
    #[error("what was exported for layer {id} is refused")]
    BadExport {
        /// The layer.
        id: LayerId,
        /// What is wrong with it.
        source: Box<image::ImageError>,
    },
    /// A machine's export broke off: the machine or its agent died, or sent nothing any more.
    #[error("the machine did not export all that it wrote to layer {id}")]
    ExportLost {
        /// The layer, whose disk is kept.
        id: LayerId,
        /// What happened to the connection.
        source: io::Error,
    },
    /// The disk failed while it was written, and may have lost some of it.
    #[error("the disk failed to store data while layer {id} was written, and may have lost {what}", what = doubtful_files(files, *total))]
    InDoubt {
        /// The layer.
        id: LayerId,
        /// The first of the files that are in doubt, as the layer has them; none if all are.
        files: Vec<String>,
        /// How many are.
        total: usize,
    },
    /// The filesystem has not enough space left.
    #[error("{need} are needed and {free} are free: {hint}", need = Size(*need), free = Size(*free))]
    NoRoom {
        /// What may be used.
        free: u64,
        /// What would be used.
        need: u64,
        /// What to do about it.
        hint: String,
    },
    /// An exclusion is not a glob.
    #[error("`{glob}` is not a pattern")]
    BadGlob {
        /// The text.
        glob: String,
        /// What is wrong with it.
        source: globset::Error,
    },
    /// So much waits for the disk already that nothing more is begun.
    #[error("the disk under the data directory has not answered for {} s", waited.as_secs())]
    Slow {
        /// How long it was waited for.
        waited: Duration,
    },
    /// The daemon is ending.
    #[error("the daemon is shutting down")]
    ShuttingDown,
    /// A system call failed.
    #[error("could not {action} `{path}`", path = path.display())]
    Io {
        /// What was being done, as a verb phrase.
        action: &'static str,
        /// What it was being done to.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

fn doubtful_files(files: &[String], total: usize) -> String {
    const TOLD: usize = 5;
    if files.is_empty() {
        return "some of it".to_owned();
    }
    let named: Vec<&str> = files.iter().take(TOLD).map(String::as_str).collect();
    let more = total.saturating_sub(named.len());
    let and = if more == 0 { String::new() } else { format!(" and {more} more") };
    format!("{}{and}", named.join(", "))
}

impl StoreError {
    /// Whether freeing space would help.
    #[must_use]
    pub fn is_no_room(&self) -> bool {
        match self {
            Self::NoRoom { .. } => true,
            Self::Io { source, .. } => {
                matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
            }
            _ => false,
        }
    }

    /// Whether the filesystem takes no writes.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::ReadOnlyFilesystem)
    }

    /// Whether the thing asked for is simply not there.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::NotFound { .. })
    }
}
