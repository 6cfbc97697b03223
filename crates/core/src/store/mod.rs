//! Layers, snapshots, images and every other manifest on disk, which are the truth.
//!
//! The data directory (drawn in `docs/formats/data-directory.md`) holds two sorts of things:
//! *manifests*, small JSON documents that are replaced whole ([`manifest`]), and *layers*,
//! directories of file changes that are written by one session and then sealed for ever
//! ([`layer`]). The database is an index over the manifests and can be thrown away.
//!
//! What the store promises:
//!
//! - A manifest is there whole or not at all: written to a temporary name, synced, renamed, and its
//!   directory synced. A manifest from a newer version is refused and not touched; a damaged one is
//!   an error that names the file, and is never deleted.
//! - A layer with a `layer.json` never changes again. Its data was on stable storage before that
//!   file appeared.
//! - Killed at any point, the store is as it was before the call or as it is after it. What may be
//!   left over lies in `tmp/`, which is emptied when the store is opened, or is an unsealed layer
//!   that nobody names, which [`Store::collect`] removes.
//! - Nothing in a layer is ever trusted: names are bytes, links are not followed, depth is unbounded.
//!
//! The store does no locking between callers: the engine's task for a sandbox is the only one that
//! writes that sandbox's things. Two daemons on one directory are kept apart by `keep.lock`.

pub mod accounting;
mod background;
mod ballast;
mod commands;
mod commit;
mod compact;
mod digest;
mod disks;
mod document;
mod events;
mod exclude;
mod export;
mod fill;
mod fsck;
mod holds;
mod identity;
pub mod image;
mod junk;
mod layer;
mod ledger;
mod listing;
mod live;
mod manifest;
mod memory;
mod mounted;
mod problem;
mod quarantine;
mod quota;
mod remains;
mod remove;
mod repair;
pub mod roster;
pub mod search;
mod soon;
mod sync;
mod text;
mod trash;
mod tree;
mod walk;

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use rustix::fs::FlockOperation;
use tokio::sync::Semaphore;

use crate::model::{LayerId, MemoryId, Size};

pub use background::Effort;
pub use commands::CommandFiles;
pub use compact::Linked;
pub use digest::{Difference, Gently, Verdict};
pub use events::{
    EventChunk, EventPosition, EventSource, EventWriter, event_sources, last_event, read_events,
};
pub use exclude::Globs;
pub use export::Exported;
pub use fill::{Filled, most_from};
pub use fsck::{Report, missing_parts};
pub use holds::Hold;
pub use junk::{Junk, JunkRules};
pub use layer::{Collected, SealOptions, Sealing, Unheld, Usage};
pub use listing::Listing;
pub use live::LiveCopy;
pub use manifest::{Damaged, Durability, Manifest, Scan};
pub use memory::{CollectedMemory, NewMemory};
pub use problem::Problem;
pub use quarantine::Leaving;
pub use quota::{Enforcement, enforcement, inodes_for};
pub use remains::Remains;
pub use repair::Repair;
pub use sync::Doubtful;
pub use trash::{Trashed, TrashedSandbox};

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

/// What the store answers.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

/// Everything on disk, seen through one open data directory. Clones are the same store.
#[derive(Debug, Clone)]
pub struct Store {
    inner: Arc<Inner>,
}

/// Frees some space, and says whether it could.
pub type Relief = Box<dyn Fn() -> Pin<Box<dyn Future<Output = bool> + Send>> + Send + Sync>;

/// Who frees space when there is none.
#[derive(Default)]
struct Relieved(OnceLock<Relief>);

impl std::fmt::Debug for Relieved {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Relieved").field(&self.0.get().is_some()).finish()
    }
}

#[derive(Debug)]
struct Inner {
    data: PathBuf,
    /// The data directory itself, for `syncfs` and `fstatvfs`.
    dir: File,
    reserve: Option<u64>,
    /// How the filesystem holds sandboxes to their disk.
    enforcement: Enforcement,
    /// Which directory this is.
    identity: Mutex<String>,
    chores: remove::Chores,
    syncs: sync::Syncs,
    soon: Mutex<soon::Soon>,
    /// The format the directory had when it was opened; `None` for a new one.
    found_format: Option<u32>,
    holds: Arc<holds::Holds>,
    relief: Relieved,
    /// Memory layers that are being written.
    capturing: Mutex<HashSet<MemoryId>>,
    /// Held for its lock, and given up last.
    _lock: File,
}

/// What is free on the filesystem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spare {
    /// What new work may use.
    pub spare: u64,
    /// All that is free.
    pub free: u64,
    /// What new work may not touch.
    pub reserve: u64,
}

/// How a store is opened.
#[derive(Debug, Clone, Copy, Default)]
pub struct StoreOptions {
    /// Free space that new work may not touch; 1 % of the filesystem, but at least 256 MiB, if absent.
    pub reserve: Option<u64>,
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
        ballast::release_if_full(&data);
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
        let chores = remove::Chores::start().map_err(io_error("start a thread for", &data))?;
        let inner = Inner {
            data,
            dir,
            _lock: lock,
            reserve: options.reserve,
            enforcement,
            identity: Mutex::new(identity.text),
            chores,
            syncs: sync::Syncs::new(options.sync_slack.unwrap_or(sync::SLACK)),
            soon: Mutex::default(),
            found_format,
            holds: Arc::default(),
            relief: Relieved::default(),
            capturing: Mutex::default(),
        };
        let store = Self { inner: Arc::new(inner) };
        store.empty_tmp()?;
        store.remove_empty_sandboxes()?;
        store.recall_windows();
        store.restore_ballast();
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

    /// Says who frees space, before new work is refused for want of it. Only the first to say so counts.
    pub fn relieved_by(&self, relief: Relief) {
        let _ = self.inner.relief.0.set(relief);
    }

    async fn relieve(&self) -> bool {
        match self.inner.relief.0.get() {
            Some(relief) => relief().await,
            None => false,
        }
    }

    /// Refuses when `need` bytes would not fit and leave the reserve free, and nothing in the trash can go for it.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::NoRoom`], which says how much is free.
    pub async fn check_room(&self, need: u64) -> Result<()> {
        loop {
            let store = self.clone();
            let checked = blocking(move || {
                let (free, total) = store.free_space()?;
                store.refuse_beyond(free.saturating_sub(store.reserve(total)), need)
            });
            match checked.await {
                Err(StoreError::NoRoom { .. }) if self.relieve().await => {}
                checked => return checked,
            }
        }
    }

    /// Whether so much of the disk is used that new work is refused.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`] when the filesystem cannot be asked.
    pub fn is_short_of_room(&self) -> Result<bool> {
        let (free, total) = self.free_space()?;
        Ok(free <= self.reserve(total))
    }

    fn reserve(&self, total: u64) -> u64 {
        self.inner.reserve.unwrap_or((256 << 20).max(total / 100))
    }

    /// Refuses when a seal, which writes no more than manifests, would not fit. It may use the
    /// reserve: keeping what a session wrote is what the reserve is for.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::NoRoom`], which says how much is free.
    pub fn check_room_to_seal(&self) -> Result<()> {
        self.refuse_beyond(self.free_space()?.0, layer::SEAL_NEEDS)
    }

    /// The same, for who can wait a moment: what was removed just now may still be on its way to the
    /// disk, and its room comes free when it got there.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::NoRoom`] when there is none after that either.
    pub async fn wait_for_room_to_seal(&self) -> Result<()> {
        for _ in 0..10 {
            if self.check_room_to_seal().is_ok() {
                return Ok(());
            }
            self.relieve().await;
            self.sync().await?;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        self.check_room_to_seal()
    }

    /// Refuses, after a moment, when a session could not write anything, or what it writes could not be sealed.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::NoRoom`], which says how much is free.
    pub async fn wait_for_room_to_start(&self) -> Result<()> {
        let need = layer::START_NEEDS + layer::SEAL_NEEDS;
        let check = || self.refuse_beyond(self.free_space()?.0, need);
        for _ in 0..4 {
            if check().is_ok() {
                return Ok(());
            }
            self.sync().await?;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        check()
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

    /// Free and total bytes of the filesystem.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`] when the filesystem cannot be asked.
    pub fn free_space(&self) -> Result<(u64, u64)> {
        let stat = rustix::fs::fstatvfs(&self.inner.dir)
            .map_err(|error| io_error("measure", &self.inner.data)(error.into()))?;
        Ok((stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize))
    }

    /// What is free, and what of that new work may use.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`] when the filesystem cannot be asked.
    pub fn spare(&self) -> Result<Spare> {
        let (free, total) = self.free_space()?;
        let reserve = self.reserve(total);
        Ok(Spare { spare: free.saturating_sub(reserve), free, reserve })
    }

    /// Free inodes of the filesystem; those without a number of them have many.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`] when the filesystem cannot be asked.
    pub fn free_inodes(&self) -> Result<u64> {
        let stat = rustix::fs::fstatvfs(&self.inner.dir)
            .map_err(|error| io_error("measure", &self.inner.data)(error.into()))?;
        Ok(if stat.f_files == 0 { u64::MAX } else { stat.f_favail })
    }

    fn refuse_beyond(&self, free: u64, need: u64) -> Result<()> {
        if need <= free {
            return Ok(());
        }
        let hint = format!(
            "delete sandboxes or snapshots, or make the filesystem of `{}` larger",
            self.inner.data.display()
        );
        Err(StoreError::NoRoom { free, need, hint })
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
    // Written over what is there, which needs no room where there is none.
    let written = file
        .rewind()
        .and_then(|()| file.write_all(id.as_bytes()))
        .and_then(|()| file.set_len(id.len() as u64));
    match written.map_err(io_error("write", path)) {
        Err(error) if !error.is_no_room() => Err(error),
        _ => Ok(file),
    }
}

/// How much may wait for the disk at a time. A disk that hangs must not take the threads that everything
/// else needs; tokio has 512.
static AT_ONCE: Semaphore = Semaphore::const_new(256);

/// How long to wait for one of those before the answer is that the disk does not respond.
const PATIENCE: Duration = Duration::from_secs(30);

/// Runs `work` where it may block.
async fn blocking<T, F>(work: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    let Ok(Ok(turn)) = tokio::time::timeout(PATIENCE, AT_ONCE.acquire()).await else {
        return Err(StoreError::Slow { waited: PATIENCE });
    };
    // Held by the work itself: it goes on when whoever asked for it does not wait any more.
    let work = move || {
        let _turn = turn;
        work()
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(_) => Err(StoreError::ShuttingDown),
    }
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
    let path = path.to_owned();
    move |source| StoreError::Io { action, path, source }
}

/// Why the store could not do what it was asked.
///
/// Messages name what failed and never repeat `source`: whoever reports the error prints the whole
/// chain.
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
        /// What the system said.
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
