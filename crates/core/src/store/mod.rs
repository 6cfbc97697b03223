//! The data directory: manifests, layers and images on disk. They are authoritative.
//!
//! The data directory (drawn in `docs/formats/data-directory.md`) holds two sorts of things:
//! *manifests*, small JSON documents that are replaced whole ([`manifest`]), and *layers*,
//! directories of file changes that are written by one session and then sealed ([`layer`]). The
//! database is an index over the manifests and can be deleted.
//!
//! What the store promises:
//!
//! - A manifest exists whole or not at all: written to a temporary name, synced, renamed, and its
//!   directory synced. A manifest from a newer version is refused and not touched; a damaged one is
//!   an error that names the file, and is never deleted.
//! - A layer with a `layer.json` never changes again. Its data was on stable storage before that
//!   file appeared.
//! - Killed at any point, the store is as it was before the call or as it is after it. Leftovers
//!   are in `tmp/`, which is emptied when the store is opened, or are unsealed layers without
//!   references, which [`Store::collect`] removes.
//! - Nothing in a layer is ever trusted: names are bytes, links are not followed, depth is unbounded.
//!
//! Where to look:
//!
//! | question | module |
//! |---|---|
//! | how a manifest is written, and survives a power cut | [`manifest`] |
//! | how a layer is sealed, merged, copied, hashed, exported | [`layer`] |
//! | how two chains of layers are compared and merged | [`diff`] |
//! | how a VM's memory is kept | [`memory`] |
//! | what may be deleted, and how it is | [`gc`] |
//! | what happens after a failed sync | [`sync`] |
//! | what happens on a full disk | [`space`] |
//! | what is damaged, and how it is repaired | [`fsck`] |
//! | who did what, and whether that was changed | [`audit`] |
//! | where images come from | [`image`] |
//! | how secrets are found in layers | [`search`] |
//! | how untrusted trees are walked and copied | [`tree`], [`walk`] |
//!
//! The store does no locking between callers: the engine's task for a sandbox is the only one that
//! writes that sandbox's things. Two daemons on one directory are kept apart by `keep.lock`.

mod audit;
mod background;
mod backup;
mod blocking;
mod diff;
mod error;
mod event_journal;
mod fsck;
mod gc;
mod identity;
pub mod image;
mod layer;
mod manifest;
mod memory;
mod path_text;
pub mod search;
mod space;
mod sync;
mod tree;
mod walk;

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::FlockOperation;

use self::blocking::blocking;
use self::error::io_error;
use crate::model::{LayerId, MemoryId, Reserve};

pub use audit::{
    AuditFinding, AuditHead, AuditKey, AuditPage, AuditPosition, AuditReport, AuditResumed,
    AuditWriter, audit_chains, last_audit_entry, read_audit, verify_audit,
};
pub use background::Effort;
pub use backup::{
    BackupError, BackupKey, BackupManifest, BackupOptions, BackupProblem, BackupProgress,
    BackupSummary, PrunedBackups, RestoredBackup, Verified, backup_summary, backups, create_backup,
    prune_backups, restore_backup, verify_backup,
};
pub use diff::{
    DiffOptions, MergeChains, MergeOptions, MergeOutcome, OntoChains, OntoOptions, PatchOptions,
    PreparedPatch, TreeDiff,
};
pub use error::{Result, StoreError};
pub use event_journal::{
    EventChunk, EventPosition, EventSource, EventWriter, event_sources, last_event, read_events,
};
pub use fsck::problem::Problem;
pub use fsck::repair::Repair;
pub use fsck::unreadable::UnreadableSandbox;
pub use fsck::{Report, missing_parts};
pub use gc::disk_listing::DiskListing;
pub use gc::holds::LayerHold;
pub use gc::trash::{Trashed, TrashedSandbox};
pub use gc::{accounting, known_manifests};
pub use layer::changes::ListedChanges;
pub use layer::compact::Linked;
pub use layer::digest::{DigestVerdict, NameDifference, ReadThrottle};
pub use layer::disk_import::{ImportedDisk, export_limit};
pub use layer::exclude::Globs;
pub use layer::export::{Exported, LeftOut};
pub use layer::junk::{Junk, JunkRules};
pub use layer::live_copy::LiveCopy;
pub use layer::quarantine::FileToQuarantine;
pub(crate) use layer::quota::BYTES_PER_INODE;
pub use layer::quota::{Enforcement, enforcement, inodes_for};
pub use layer::{Collected, LayerUsage, MeasuredLayer, SealOptions, Sealing, Unheld};
pub use manifest::command_files::CommandFiles;
pub use manifest::{Damaged, Durability, Manifest, Scan};
pub use memory::{CollectedMemory, NewMemory};
pub use space::{FreeSpace, SpaceReclaimer};
pub use sync::DoubtfulFile;

/// The directories that hold what cannot be made again. All of them exist from the first start on.
pub(crate) const PARTS: [&str; 10] = [
    "projects",
    "sandboxes",
    "snapshots",
    "drives",
    "secrets",
    "layers",
    "memory",
    "templates",
    "images",
    "aside",
];
/// The directories that are made whenever they are missing: nothing is referenced from or kept in them alone.
const SCRATCH: [&str; 3] = ["bin", "trash", "tmp"];
/// From this format on, a directory of [`PARTS`] that is missing is damage.
pub const ALL_PARTS: u32 = 5;

/// Everything on disk, seen through one open data directory. Clones are the same store.
#[derive(Debug, Clone)]
pub struct Store {
    inner: Arc<StoreInner>,
}

#[derive(Debug)]
struct StoreInner {
    data: PathBuf,
    /// The data directory itself, for `syncfs` and `fstatvfs`.
    dir: File,
    reserve: Reserve,
    base_owner: (u32, u32),
    /// How the filesystem holds sandboxes to their disk.
    enforcement: Enforcement,
    /// Which directory this is.
    identity: Mutex<String>,
    deletion_threads: gc::remove::DeletionThreads,
    syncs: sync::Syncs,
    unsynced: Mutex<manifest::unsynced::UnsyncedDocuments>,
    /// The format the directory had when it was opened; `None` for a new one.
    found_format: Option<u32>,
    holds: Arc<gc::holds::Holds>,
    reclaimer: space::ReclaimerSlot,
    /// Memory layers that are being written.
    capturing: Mutex<HashSet<MemoryId>>,
    /// Held for its lock, and given up last.
    _lock: File,
}

/// How a store is opened.
#[derive(Debug, Clone, Copy, Default)]
pub struct StoreOptions {
    /// Free space that new work may not touch; 1 % of the filesystem, but at least 256 MiB, if absent.
    pub reserve: Option<u64>,
    /// Who owns the root directory of a layer that stands on no other; the host's root if absent. For a
    /// store that is not the host's root's.
    pub base_owner: Option<(u32, u32)>,
    /// How long a single write may take, for what a failed sync puts in doubt; 30 seconds if absent.
    pub sync_slack: Option<Duration>,
}

impl Store {
    /// Opens `data`, which is made if it is not there.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Locked`] when a daemon has it open, and [`StoreError::TooNew`] when a
    /// later version wrote it.
    pub fn open(data: &Path) -> Result<Self> {
        Self::open_with(data, StoreOptions::default())
    }

    /// Opens `data` with other than the usual options.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    pub fn open_with(data: &Path, options: StoreOptions) -> Result<Self> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(data)
            .map_err(io_error("create", data))?;
        let data = data.canonicalize().map_err(io_error("resolve", data))?;
        fs::set_permissions(&data, fs::Permissions::from_mode(0o700))
            .map_err(io_error("restrict", &data))?;
        let lock = take_lock(&data.join("keep.lock"))?;
        space::reserve_file::release_if_full(&data);
        let found_format = manifest::check_directory_format(&data)?;
        if found_format.is_some_and(|format| format >= ALL_PARTS) {
            // A new one in its place would be empty, and everything it held would look unreferenced.
            let missing = PARTS.into_iter().find(|part| !data.join(part).is_dir());
            if let Some(part) = missing {
                return Err(StoreError::MissingPart { path: data.join(part) });
            }
        }
        let identity = identity::find(&data)?;
        for part in PARTS.into_iter().chain(SCRATCH) {
            let path = data.join(part);
            match fs::create_dir(&path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(io_error("create", &path)(error));
                }
                _ => {}
            }
        }
        identity::keep(&data, &identity)?;
        let dir = File::open(&data).map_err(io_error("open", &data))?;
        dir.sync_all().map_err(io_error("sync", &data))?;
        let enforcement = enforcement(&data).map_err(io_error("look at", &data))?;
        let deletion_threads =
            gc::remove::DeletionThreads::start().map_err(io_error("start a thread for", &data))?;
        let inner = StoreInner {
            data,
            dir,
            _lock: lock,
            reserve: Reserve { bytes: options.reserve },
            base_owner: options.base_owner.unwrap_or((0, 0)),
            enforcement,
            identity: Mutex::new(identity.text),
            deletion_threads,
            syncs: sync::Syncs::new(options.sync_slack.unwrap_or(sync::SLACK)),
            unsynced: Mutex::default(),
            found_format,
            holds: Arc::default(),
            reclaimer: space::ReclaimerSlot::default(),
            capturing: Mutex::default(),
        };
        let store = Self { inner: Arc::new(inner) };
        store.empty_tmp()?;
        store.remove_empty_sandboxes()?;
        store.recall_windows();
        store.restore_reserve_file();
        Ok(store)
    }

    /// The format the data directory had when it was opened; `None` if this opening made it.
    #[must_use]
    pub fn found_format(&self) -> Option<u32> {
        self.inner.found_format
    }

    /// The data directory.
    #[must_use]
    pub fn data_dir(&self) -> &Path {
        &self.inner.data
    }

    /// A path as it is below the data directory, for people to read.
    #[must_use]
    pub fn below(&self, path: &Path) -> String {
        path.strip_prefix(&self.inner.data).unwrap_or(path).display().to_string()
    }

    /// Brings everything written so far to stable storage.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`] when the filesystem could not write something back.
    pub async fn sync(&self) -> Result<()> {
        let store = self.clone();
        blocking(move || store.sync_now()).await
    }

    fn layers_dir(&self) -> PathBuf {
        self.inner.data.join("layers")
    }

    fn tmp_dir(&self) -> PathBuf {
        self.inner.data.join("tmp")
    }

    fn layer_dir(&self, id: &LayerId) -> PathBuf {
        self.layers_dir().join(id.as_str())
    }
}

fn take_lock(path: &Path) -> Result<File> {
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(io_error("open", path))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let mut holder = String::new();
            // The process id is a courtesy; the lock is what counts.
            let _ = file.read_to_string(&mut holder);
            return Err(StoreError::Locked { path: path.to_owned(), holder });
        }
        Err(error) => return Err(io_error("lock", path)(error.into())),
    }
    let id = std::process::id().to_string();
    // Written over existing blocks, which needs no room where there is none.
    let written = file
        .rewind()
        .and_then(|()| file.write_all(id.as_bytes()))
        .and_then(|()| file.set_len(id.len() as u64));
    match written.map_err(io_error("write", path)) {
        Err(error) if !error.is_no_room() => Err(error),
        _ => Ok(file),
    }
}
