//! Syncs the filesystem, and remembers every sync that failed.
//!
//! The kernel reports data that it could not write back once per open file, and then drops it: the
//! next sync succeeds, and the data is gone. So
//!
//! - All syncs go through one descriptor, one at a time ([`Store::sync_now`]). Callers that ask
//!   while one runs wait for the next; its outcome is the outcome of all who waited for it.
//! - A sync that fails leaves a *window*: from the beginning of the last sync that succeeded until now.
//!   Whatever was written in it may be lost; what is older was synced, what is younger is not concerned. Windows
//!   are kept in memory and in `sync-errors.json`.
//! - A file is *in doubt* when it may have been written in a window: it changed after the window began, and
//!   was made before the window ended. A layer with such files is not sealed, copied or filled
//!   ([`StoreError::InDoubt`]). A file that is replaced by a new one, or removed, is not in doubt any more.
//! - A layer that is built (image, compaction, copy) is given up when a sync failed since it was begun.
//!
//! Whether a file in doubt is whole cannot be proven. What a process wrote is still in the page cache after a
//! failed write, and differs from what is on the disk; but once the kernel needs the memory, it is read again from
//! the disk and nothing differs. So somebody has to decide. When files in doubt are accepted
//! ([`Store::accept_doubt`]), whatever of them in the cache is not what is on the disk is written again, past the
//! cache, and compared, before the layer is sealed: what can be read then is what will be read later. A file that
//! was changed in its place stays in doubt: on ext4 a block whose first write failed is lost for good
//! however often it is written through the cache.
//!
//! Times are those of the filesystem's inodes, which follow the wall clock. A window during which the clock
//! was set has no beginning. A single `write` moves the change time once, when it begins; so windows begin
//! [`SLACK`] earlier.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::{Advice, AtFlags, FileType, Mode, OFlags, Statx, StatxFlags, StatxTimestamp};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::manifest::{self, Durability};
use super::path_text::{as_path, path_text};
use super::tree::{TreeDir, file_type, times};
use super::walk::{vanished, visit};
use super::{Result, Store, StoreError, blocking, io_error};
use crate::model::{FORMAT, LayerId, Timestamp};

/// How long one `write` may take.
pub(super) const SLACK: Duration = Duration::from_secs(30);
/// How far the wall clock may be from the monotonic one between two syncs before it counts as set.
const STEADY: Duration = Duration::from_secs(1);
/// How many windows are kept; two that are neighbours become one when there are more.
const MOST_WINDOWS: usize = 64;
/// How many files are named in an error.
const NAMED: usize = 100;
/// How much is compared at a time. A multiple of every block size.
const CHUNK: usize = 1 << 20;
/// How memory and offsets are aligned for reads past the page cache.
const ALIGNED: usize = 4096;
/// Where windows are kept.
const PLACE: &str = "sync-errors.json";

/// A file that may not be on stable storage as it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DoubtfulFile {
    /// The path from the layer's root, without a leading slash.
    pub path: Vec<u8>,
    /// Its length.
    pub size: u64,
}

/// What is known about syncs.
#[derive(Debug)]
pub(super) struct Syncs {
    /// Counts who asked for one.
    asked: AtomicU64,
    /// Held over a sync.
    round: Mutex<SyncRound>,
    known: Mutex<SyncHistory>,
    slack: Duration,
}

#[derive(Debug, Default)]
struct SyncRound {
    /// Who asked so far has an outcome.
    covered: u64,
    failed: Option<Errno>,
}

#[derive(Debug, Default)]
struct SyncHistory {
    /// When the last sync began that succeeded.
    last_good: Option<SyncTime>,
    windows: Vec<FailureWindow>,
    /// Counts failed syncs.
    epoch: u64,
    /// The windows on disk are not these.
    unsaved: bool,
    /// Layers whose files in doubt were accepted, and the epoch then.
    accepted: HashMap<LayerId, u64>,
    /// Layers that are being built, and the epoch when they were begun.
    building: HashMap<LayerId, u64>,
}

#[derive(Debug, Clone, Copy)]
struct SyncTime {
    wall: Timestamp,
    steady: Instant,
}

/// A time in which writes may have been lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct FailureWindow {
    /// Absent: any time before.
    from: Option<Timestamp>,
    to: Timestamp,
    /// The last sync that failed in it.
    #[serde(skip)]
    epoch: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct SyncErrorsFile {
    format: u32,
    windows: Vec<FailureWindow>,
}

impl Syncs {
    pub(super) fn new(slack: Duration) -> Self {
        Self { asked: AtomicU64::new(0), round: Mutex::default(), known: Mutex::default(), slack }
    }
}

impl SyncTime {
    fn now() -> Self {
        Self { wall: Timestamp::now(), steady: Instant::now() }
    }

    /// Whether the wall clock was not set between the two.
    fn is_steady_until(self, later: Self) -> bool {
        let wall = later.wall.duration_since(self.wall);
        let steady = later.steady.saturating_duration_since(self.steady);
        let Ok(wall) = Duration::try_from(wall) else { return false };
        wall.abs_diff(steady) < STEADY
    }
}

impl Store {
    /// Brings everything written so far to stable storage.
    pub(super) fn sync_now(&self) -> Result<()> {
        let syncs = &self.inner.syncs;
        let ticket = syncs.asked.fetch_add(1, Ordering::SeqCst) + 1;
        let mut round = syncs.round.lock();
        if round.covered < ticket {
            round.covered = syncs.asked.load(Ordering::SeqCst);
            round.failed = self.sync_round().err();
        }
        match round.failed {
            None => Ok(()),
            Some(error) => Err(io_error("sync", &self.inner.data)(error.into())),
        }
    }

    /// The same, for callers that look at what was in doubt afterwards: what was lost is lost by
    /// now, and a second sync brings the rest to stable storage.
    pub(super) fn sync_now_or_again(&self) -> Result<()> {
        self.sync_now().or_else(|_| self.sync_now())
    }

    fn sync_round(&self) -> Result<(), Errno> {
        let syncs = &self.inner.syncs;
        let begun = SyncTime::now();
        let outcome =
            self.write_doubtful_again().map_err(|error| errno_of(&error)).and_then(|until| {
                rustix::fs::syncfs(&self.inner.dir)?;
                Ok(until)
            });
        match outcome {
            Ok(until) => {
                syncs.known.lock().last_good = Some(begun);
                self.now_synced(until);
            }
            Err(_) => {
                self.sync_failed_for_all();
                syncs.known.lock().fail(SyncTime::now(), syncs.slack);
            }
        }
        if let Err(error) = self.save_windows() {
            tracing::error!(%error, "could not record a failed sync; a restarted daemon would not know of it");
        }
        outcome.map(drop)
    }

    /// Reads what an earlier daemon knew. What cannot be read is in doubt from then on.
    pub(super) fn recall_windows(&self) {
        let path = self.data_dir().join(PLACE);
        let saved = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            read => read.map_err(io_error("read", &path)),
        };
        let saved = saved.and_then(|bytes| manifest::parse::<SyncErrorsFile>(&path, &bytes));
        let mut known = self.inner.syncs.known.lock();
        known.epoch = 1;
        known.windows = match saved {
            Ok(saved) => saved.windows,
            Err(error) => {
                tracing::error!(%error, "could not read which syncs failed earlier; every open layer is in doubt");
                vec![FailureWindow { from: None, to: Timestamp::now(), epoch: 1 }]
            }
        };
        known.windows.iter_mut().for_each(|window| window.epoch = 1);
    }

    fn save_windows(&self) -> Result<()> {
        let known = &self.inner.syncs.known;
        let (windows, epoch) = {
            let known = known.lock();
            if !known.unsaved {
                return Ok(());
            }
            (known.windows.clone(), known.epoch)
        };
        let place = Path::new(PLACE);
        let bytes = manifest::to_json(&SyncErrorsFile { format: FORMAT, windows }, place)?;
        self.put(place, &bytes, Durability::Synced, false)?;
        let mut known = known.lock();
        known.unsaved &= known.epoch != epoch;
        Ok(())
    }

    /// Counts syncs that failed.
    #[must_use]
    pub fn sync_failures(&self) -> u64 {
        self.inner.syncs.known.lock().epoch
    }

    /// Drops windows that no open layer is old enough for.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn forget_sync_failures(&self) -> Result<()> {
        let store = self.clone();
        blocking(move || {
            if store.inner.syncs.known.lock().windows.is_empty() {
                return Ok(());
            }
            let mut oldest = Timestamp::MAX;
            for dir in manifest::list(&store.layers_dir())? {
                let open = matches!(dir.join("layer.json").try_exists(), Ok(false) | Err(_));
                if open && let Ok(id) = manifest::id_of(&dir).parse::<LayerId>() {
                    oldest = oldest.min(super::layer::time_of(id.as_str()));
                }
            }
            {
                let mut known = store.inner.syncs.known.lock();
                let before = known.windows.len();
                known.windows.retain(|window| window.to >= oldest);
                known.unsaved |= known.windows.len() != before;
            }
            store.save_windows()
        })
        .await
    }

    /// The files of an open layer that may not be on stable storage as they were written.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`]. What vanishes meanwhile is no error.
    pub async fn doubtful(&self, open: &LayerId) -> Result<Vec<DoubtfulFile>> {
        if self.inner.syncs.known.lock().windows.is_empty() {
            return Ok(Vec::new());
        }
        let (store, open) = (self.clone(), open.clone());
        blocking(move || store.doubtful_now(&open)).await
    }

    /// Refuses a layer that has files in doubt, unless they were accepted.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::InDoubt`], which names files, or [`StoreError::Io`].
    pub async fn refuse_doubt(&self, open: &LayerId) -> Result<()> {
        in_doubt(open, &self.doubtful(open).await?)
    }

    /// Somebody wants the files of a layer that are in doubt as they can be read now. That holds for what is
    /// known by now, and as long as this daemon lives.
    pub fn accept_doubt(&self, open: &LayerId) {
        let mut known = self.inner.syncs.known.lock();
        let epoch = known.epoch;
        known.accepted.insert(open.clone(), epoch);
    }

    /// A layer is gone, or sealed.
    pub(super) fn forget_doubt(&self, id: &LayerId) {
        let mut known = self.inner.syncs.known.lock();
        known.accepted.remove(id);
        known.building.remove(id);
    }

    /// A layer is begun that is built by the store itself.
    pub(super) fn build_begins(&self, id: &LayerId) {
        let mut known = self.inner.syncs.known.lock();
        let epoch = known.epoch;
        known.building.insert(id.clone(), epoch);
    }

    /// Refuses a layer that the store built when a sync failed since it was begun.
    pub(super) fn refuse_doubtful_build(&self, id: &LayerId) -> Result<()> {
        let known = self.inner.syncs.known.lock();
        match known.building.get(id) {
            Some(epoch) if *epoch != known.epoch => {
                Err(StoreError::InDoubt { id: id.clone(), files: Vec::new(), total: 0 })
            }
            _ => Ok(()),
        }
    }

    /// Brings a layer's files to stable storage again where they are in doubt and accepted, and refuses the
    /// layer where they are not accepted. Everything was synced before.
    pub(super) fn resolve_doubt(&self, id: &LayerId) -> Result<()> {
        in_doubt(id, &self.doubtful_now(id)?)?;
        let accepted = self.files_in(id, &self.windows_of(id, true))?;
        let diff = self.diff_dir(id);
        for file in &accepted {
            store_again(&diff, file)?;
        }
        Ok(())
    }

    pub(super) fn refuse_doubt_now(&self, id: &LayerId) -> Result<()> {
        in_doubt(id, &self.doubtful_now(id)?)
    }

    fn doubtful_now(&self, id: &LayerId) -> Result<Vec<DoubtfulFile>> {
        self.files_in(id, &self.windows_of(id, false))
    }

    /// The windows that count for a layer: those that were accepted, or those that were not.
    fn windows_of(&self, id: &LayerId, accepted: bool) -> Vec<FailureWindow> {
        let known = self.inner.syncs.known.lock();
        let until = known.accepted.get(id).copied().unwrap_or(0);
        known.windows.iter().filter(|window| (window.epoch <= until) == accepted).copied().collect()
    }

    fn files_in(&self, id: &LayerId, windows: &[FailureWindow]) -> Result<Vec<DoubtfulFile>> {
        if windows.is_empty() {
            return Ok(Vec::new());
        }
        // A machine's disk, where there is one, is the truth.
        let part = if self.has_disk(id)? { "disk" } else { "diff" };
        files_in(&self.layer_dir(id).join(part), windows)
    }
}

impl SyncHistory {
    /// A sync has failed by `now`.
    fn fail(&mut self, now: SyncTime, slack: Duration) {
        self.epoch += 1;
        self.unsaved = true;
        let from = self
            .last_good
            .filter(|good| good.is_steady_until(now))
            .and_then(|good| good.wall.checked_sub(slack).ok());
        let epoch = self.epoch;
        match self.windows.last_mut() {
            // Nothing was synced since the one before.
            Some(last) if from.is_none_or(|from| from <= last.to) => {
                last.from = last.from.and_then(|known| from.map(|from| known.min(from)));
                last.to = last.to.max(now.wall);
                last.epoch = epoch;
            }
            _ => self.windows.push(FailureWindow { from, to: now.wall, epoch }),
        }
        if self.windows.len() > MOST_WINDOWS {
            let first = self.windows.remove(0);
            self.windows[0].from = first.from;
        }
    }
}

impl FailureWindow {
    /// Whether a file may have been written in it.
    fn concerns(&self, stat: &Statx) -> bool {
        let changed = time(stat.stx_ctime);
        let has_birth = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME);
        let born = has_birth.then(|| time(stat.stx_btime));
        self.from.is_none_or(|from| changed >= from) && born.is_none_or(|born| born <= self.to)
    }
}

fn time(time: StatxTimestamp) -> Timestamp {
    let nanoseconds = i32::try_from(time.tv_nsec).unwrap_or(0);
    Timestamp::new(time.tv_sec, nanoseconds).unwrap_or(Timestamp::MAX)
}

/// The files with content under `root` that one of the windows concerns, sorted.
fn files_in(root: &Path, windows: &[FailureWindow]) -> Result<Vec<DoubtfulFile>> {
    let found = Mutex::new(Vec::new());
    visit(TreeDir::root(root)?, |place, more| {
        let dir = match place.open() {
            Err(error) if vanished(&error) => return Ok(()),
            opened => opened?,
        };
        let listed = dir.for_each(|name, _| {
            let mask = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
            let stat = match rustix::fs::statx(dir.fd(), name, AtFlags::SYMLINK_NOFOLLOW, mask) {
                Err(Errno::NOENT) => return Ok(()),
                found => found.map_err(|error| dir.failure("stat", name, error))?,
            };
            match file_type(&stat) {
                FileType::Directory => more.push(dir.child(name)),
                FileType::RegularFile | FileType::Symlink
                    if stat.stx_size > 0 && windows.iter().any(|one| one.concerns(&stat)) =>
                {
                    let path = dir.path_of(name);
                    found.lock().push(DoubtfulFile { path, size: stat.stx_size });
                }
                _ => {}
            }
            Ok(())
        });
        match listed {
            Err(error) if vanished(&error) => Ok(()),
            listed => listed,
        }
    })?;
    let mut found = found.into_inner();
    found.sort_by(|a: &DoubtfulFile, b| a.path.cmp(&b.path));
    Ok(found)
}

fn in_doubt(id: &LayerId, files: &[DoubtfulFile]) -> Result<()> {
    if files.is_empty() {
        return Ok(());
    }
    let named = files.iter().take(NAMED).map(|file| format!("/{}", path_text(&file.path)));
    Err(StoreError::InDoubt { id: id.clone(), files: named.collect(), total: files.len() })
}

/// Writes again what of a file is in the page cache and not on the disk.
fn store_again(root: &Path, doubtful: &DoubtfulFile) -> Result<()> {
    let whole = root.join(as_path(&doubtful.path));
    let (parent, name) = match doubtful.path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (&doubtful.path[..at], &doubtful.path[at + 1..]),
        None => (&[][..], &doubtful.path[..]),
    };
    let mut place = TreeDir::root(root)?;
    if !parent.is_empty() {
        place = place.descend(parent)?;
    }
    let dir = place.open()?;
    let name = std::ffi::CString::new(name)
        .map_err(|error| io_error("open", &whole)(io::Error::other(error)))?;
    let mask = StatxFlags::BASIC_STATS;
    let stat = rustix::fs::statx(dir.fd(), &name, AtFlags::SYMLINK_NOFOLLOW, mask)
        .map_err(|error| dir.failure("stat", &name, error))?;
    // What a link says is not in a page of its own: the journal has it.
    if file_type(&stat) != FileType::RegularFile {
        return Ok(());
    }
    let file = File::from(dir.open_to_change(&name)?);
    let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let direct = rustix::fs::openat(dir.fd(), &name, flags, Mode::empty()).ok().map(File::from);
    // Collects an error of earlier writes, so that the next sync reports only what is written now.
    let _ = file.sync_all();
    copy_again(&file, direct.as_ref(), stat.stx_size).map_err(io_error("store again", &whole))?;
    rustix::fs::futimens(&file, &times(&stat))
        .map_err(|error| io_error("set the times of", &whole)(error.into()))?;
    file.sync_all().map_err(io_error("sync", &whole))
}

fn copy_again(file: &File, direct: Option<&File>, size: u64) -> io::Result<()> {
    let (mut cached, mut stored) = (vec![0; CHUNK + ALIGNED], vec![0; CHUNK + ALIGNED]);
    let (cached, stored) = (aligned(&mut cached), aligned(&mut stored));
    let mut at = 0;
    while at < size {
        let length = read_full(file, cached, at)?;
        if length == 0 {
            break;
        }
        let cached = &cached[..length];
        let mut is_stored = |direct| {
            read_full(direct, stored, at)
                .is_ok_and(|read| read >= length && stored[..length] == *cached)
        };
        if !direct.is_some_and(&mut is_stored) {
            write_again(file, direct, cached, at)?;
            if !direct.is_none_or(is_stored) {
                return Err(io::Error::other("the disk does not have what was written to it"));
            }
        }
        at += length as u64;
    }
    Ok(())
}

/// Writes what is in the page cache, but not through it: ext4 takes a block whose first write failed for
/// written, writes to it again, and never says in its metadata that there is something in it.
fn write_again(file: &File, direct: Option<&File>, bytes: &[u8], at: u64) -> io::Result<()> {
    let whole = match direct {
        Some(direct) => {
            let whole = bytes.len() - bytes.len() % ALIGNED;
            direct.write_all_at(&bytes[..whole], at)?;
            whole
        }
        None => 0,
    };
    let (rest, at) = (&bytes[whole..], at + whole as u64);
    if !rest.is_empty() {
        rustix::fs::fadvise(file, at, None, Advice::DontNeed)?;
        file.write_all_at(rest, at)?;
    }
    file.sync_data()
}

fn aligned(buffer: &mut [u8]) -> &mut [u8] {
    let start = buffer.as_ptr().align_offset(ALIGNED);
    &mut buffer[start..start + CHUNK]
}

fn read_full(file: &File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    let mut length = 0;
    while length < buffer.len() {
        match file.read_at(&mut buffer[length..], at + length as u64) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // Past the end, what is not a whole block is refused.
            Err(_) if length % ALIGNED != 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}

fn errno_of(error: &StoreError) -> Errno {
    match error {
        StoreError::Io { source, .. } => Errno::from_io_error(source).unwrap_or(Errno::IO),
        _ => Errno::IO,
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::{MOST_WINDOWS, SyncHistory, SyncTime};
    use crate::model::Timestamp;

    fn at(second: i64, steady: Instant) -> SyncTime {
        SyncTime { wall: Timestamp::from_second(second).unwrap(), steady }
    }

    #[test]
    fn a_window_begins_with_the_last_good_sync_and_grows_while_none_is() {
        let zero = Instant::now();
        let after = |seconds| zero + Duration::from_secs(seconds);
        let mut known = SyncHistory::default();
        known.fail(at(1_000, zero), Duration::ZERO);
        assert_eq!(known.windows[0].from, None, "nothing is known of before");
        known.last_good = Some(at(1_010, after(10)));
        known.fail(at(1_020, after(20)), Duration::ZERO);
        known.fail(at(1_030, after(30)), Duration::ZERO);
        assert_eq!(known.windows.len(), 2);
        assert_eq!(known.windows[1].from, Some(at(1_010, zero).wall));
        assert_eq!(known.windows[1].to, at(1_030, zero).wall);
        assert_eq!((known.windows[1].epoch, known.epoch), (3, 3));
    }

    #[test]
    fn a_clock_that_was_set_leaves_a_window_without_a_beginning() {
        let zero = Instant::now();
        for wall in [900, 1_100] {
            let mut known =
                SyncHistory { last_good: Some(at(1_000, zero)), ..SyncHistory::default() };
            known.fail(at(wall, zero + Duration::from_secs(3)), Duration::ZERO);
            assert_eq!(known.windows[0].from, None, "{wall}");
        }
    }

    #[test]
    fn windows_are_bounded_and_none_is_lost() {
        let zero = Instant::now();
        let mut known = SyncHistory::default();
        for number in 0..200 {
            let steady = zero + Duration::from_secs(number);
            let second = 1_000 + i64::try_from(number).unwrap();
            known.last_good = Some(at(second, steady));
            known.fail(at(second, steady), Duration::ZERO);
        }
        assert!(known.windows.len() <= MOST_WINDOWS);
        assert_eq!(known.windows[0].from, Some(at(1_000, zero).wall));
        assert_eq!(known.windows.last().unwrap().to, at(1_199, zero).wall);
    }
}
