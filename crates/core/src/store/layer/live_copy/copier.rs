//! The copying: a walk of several threads over the layer, which compares each name with what was seen before.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use rustix::fs::{FileType, Statx};

use super::{Copied, CopiedNames, EntryKind, EntryState, LayerWriters};
use crate::model::Timestamp;
use crate::store::tree::{Dir, OPAQUE, Opaque, TreeDir, file_type, join};
use crate::store::walk::visit;
use crate::store::{Result, Store, StoreError};

/// How long before a copy a change may lie and still be in doubt: twice the slowest kernel tick.
const TICK_NANOS: i128 = 20_000_000;

/// How many bytes of names are remembered. A tree made to exceed it is copied whole each time.
const MOST_REMEMBERED: usize = 256 << 20;

/// How much is copied between two looks at the free space.
const LOOK_EVERY: u64 = 8 << 20;

/// Copies the tree `from`, or what of it is not as in `old`. `None` when only a whole copy will do.
pub(super) fn copy_into(
    store: &Store,
    from: &Path,
    to: &Path,
    old: Option<&CopiedNames>,
    writers: LayerWriters,
) -> Result<Option<Copied>> {
    let now = match writers {
        LayerWriters::Frozen => Timestamp::now(),
        LayerWriters::Busy { since } => since,
    };
    let taken = (now.as_second(), u32::try_from(now.subsec_nanosecond()).unwrap_or(0));
    let copier = Copier {
        store,
        to_look: AtomicU64::new(0),
        old,
        busy: writers != LayerWriters::Frozen,
        source: TreeDir::root(from)?,
        target: TreeDir::root(to)?,
        seen: Mutex::new(CopiedNames { taken, root: None, dirs: HashMap::new() }),
        remembered: AtomicUsize::new(0),
        whole_needed: AtomicBool::new(false),
        made: Mutex::new(HashMap::new()),
        copied: Mutex::new(HashMap::new()),
        skipped: Mutex::new(Vec::new()),
    };
    let mode = if old.is_some() { Compare::Yes } else { Compare::No };
    let root = mark(&copier.source.open()?.own_stat()?, EntryKind::Dir);
    copier.seen.lock().root = Some(root);
    if old.is_none_or(|old| old.root != Some(root)) {
        copier.ensure(&[], mode)?;
    }
    let first = CopyItem { source: copier.source.clone(), path: Vec::new(), mode };
    visit(first, |item, more| copier.copy_dir(item, more))?;
    if copier.whole_needed.load(Ordering::Relaxed) {
        return Ok(None);
    }
    copier.link_skipped()?;
    copier.finish_dirs()?;
    let anything = !copier.made.lock().is_empty();
    let whole = copier.remembered.into_inner() <= MOST_REMEMBERED;
    let seen = copier.seen.into_inner();
    Ok(Some((anything, whole.then(|| Arc::new(seen)))))
}

/// Whether a directory is compared with what was seen there before, or copied whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compare {
    Yes,
    No,
    /// Copied whole, to hide the one in the copy before.
    Hide,
}

/// A directory to be looked at.
struct CopyItem {
    source: TreeDir,
    path: Vec<u8>,
    mode: Compare,
}

/// What the threads that copy share.
struct Copier<'a> {
    store: &'a Store,
    /// Bytes copied since free space was looked at.
    to_look: AtomicU64,
    old: Option<&'a CopiedNames>,
    /// Whether names may vanish meanwhile. They are then as if never seen.
    busy: bool,
    source: TreeDir,
    target: TreeDir,
    seen: Mutex<CopiedNames>,
    /// Bytes of names in `seen`.
    remembered: AtomicUsize,
    whole_needed: AtomicBool,
    /// Directories of the copy by path.
    made: Mutex<HashMap<Vec<u8>, (TreeDir, Compare)>>,
    /// Where the first name of a file with several went, by inode.
    copied: Mutex<HashMap<u64, (Vec<u8>, CString)>>,
    /// Unchanged names of files with several.
    skipped: Mutex<Vec<(u64, Vec<u8>, CString)>>,
}

impl Copier<'_> {
    fn copy_dir(&self, item: CopyItem, more: &mut Vec<CopyItem>) -> Result<()> {
        let Some(dir) = self.there(item.source.open())? else { return Ok(()) };
        let Some(entries) = self.there(dir.entries())? else { return Ok(()) };
        let (before, mut target) = match item.mode {
            Compare::Yes => (self.old.and_then(|old| old.dirs.get(&item.path)), None),
            mode => (None, Some(self.ensure(&item.path, mode)?.open()?)),
        };
        let mut here = HashMap::new();
        for entry in entries {
            let Some(stat) = self.there(dir.stat(&entry.name))? else { continue };
            let Some(kind) = self.there(kind_of(&dir, &entry.name, &stat))? else { continue };
            let now = mark(&stat, kind);
            let old = before.and_then(|before| before.get(entry.name.to_bytes())).copied();
            here.insert(entry.name.to_bytes().to_vec(), now);
            if now.kind.is_dir() {
                more.push(self.enter(&dir, &item, &entry.name, old, now)?);
            } else if old == Some(now) && self.is_settled(&now) {
                if stat.stx_nlink > 1 {
                    let skipped = (stat.stx_ino, item.path.clone(), entry.name);
                    self.skipped.lock().push(skipped);
                }
            } else {
                let target = self.target_of(&mut target, &item)?;
                let copied = self.copy_name(&dir, target, &item.path, &entry.name, &stat);
                if self.there(copied)?.is_none() {
                    target.remove_name(&entry.name)?;
                    here.remove(entry.name.to_bytes());
                }
            }
        }
        for (name, old) in before.into_iter().flatten() {
            if here.contains_key(name) {
                continue;
            }
            if old.kind == EntryKind::Whiteout {
                self.whole_needed.store(true, Ordering::Relaxed);
                return Ok(());
            }
            let name = CString::new(name.as_slice()).unwrap_or_default();
            self.target_of(&mut target, &item)?.make_whiteout(&name)?;
        }
        self.remember(item.path, here);
        Ok(())
    }

    /// What was read, or `None` when it could not be because somebody was changing it.
    fn there<T>(&self, outcome: Result<T>) -> Result<Option<T>> {
        match outcome {
            Err(error) if self.busy && !error.is_no_room() => {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "a file changed while it was copied"
                );
                Ok(None)
            }
            outcome => outcome.map(Some),
        }
    }

    /// Decides how a directory below is looked at.
    fn enter(
        &self,
        dir: &Dir,
        item: &CopyItem,
        name: &CStr,
        old: Option<EntryState>,
        now: EntryState,
    ) -> Result<CopyItem> {
        let next = |mode| {
            let path = join(&item.path, name.to_bytes());
            CopyItem { source: dir.child(name), path, mode }
        };
        if item.mode != Compare::Yes {
            return Ok(next(Compare::No));
        }
        match (old.map(|old| old.kind), now.kind) {
            (Some(EntryKind::Dir), EntryKind::Dir)
            | (Some(EntryKind::OpaqueDir), EntryKind::OpaqueDir) => {
                let next = next(Compare::Yes);
                if old != Some(now) || !self.is_settled(&now) {
                    self.ensure(&next.path, Compare::Yes)?;
                }
                Ok(next)
            }
            // Another directory, of a name that no lower layer has, or it would be opaque too.
            (Some(EntryKind::OpaqueDir), EntryKind::Dir) => Ok(next(Compare::Hide)),
            _ => Ok(next(Compare::No)),
        }
    }

    fn target_of<'t>(&self, target: &'t mut Option<Dir>, item: &CopyItem) -> Result<&'t Dir> {
        if target.is_none() {
            *target = Some(self.ensure(&item.path, item.mode)?.open()?);
        }
        target.as_ref().ok_or(StoreError::ShuttingDown)
    }

    fn copy_name(
        &self,
        from: &Dir,
        to: &Dir,
        path: &[u8],
        name: &CStr,
        stat: &Statx,
    ) -> Result<()> {
        self.check_room(stat)?;
        if stat.stx_nlink == 1 {
            return to.copy_from(name, from, stat);
        }
        // Held while copying, so that no other name of the file is copied as well.
        let mut copied = self.copied.lock();
        if let Some((first_path, first)) = copied.get(&stat.stx_ino) {
            let first_dir = self.target.descend(first_path)?.open()?;
            return to
                .link_from(name, &first_dir, first)
                .map_err(|error| to.failure("link", name, error));
        }
        to.copy_from(name, from, stat)?;
        copied.insert(stat.stx_ino, (path.to_vec(), name.to_owned()));
        Ok(())
    }

    /// Refuses when a file would use the host's reserve: what was to be copied may have grown, and others write too.
    fn check_room(&self, stat: &Statx) -> Result<()> {
        let need = stat.stx_blocks.saturating_mul(512);
        let copied = self.to_look.fetch_add(need, Ordering::Relaxed).saturating_add(need);
        if copied < LOOK_EVERY {
            return Ok(());
        }
        self.to_look.store(0, Ordering::Relaxed);
        self.store.refuse_beyond(self.store.usable()?.usable, need)
    }

    /// Gives files that were copied under one name their unchanged names too.
    fn link_skipped(&self) -> Result<()> {
        let copied = self.copied.lock();
        for (inode, path, name) in self.skipped.lock().drain(..) {
            let Some((first_path, first)) = copied.get(&inode) else { continue };
            let first_dir = self.target.descend(first_path)?.open()?;
            let dir = self.ensure(&path, Compare::Yes)?.open()?;
            dir.link_from(&name, &first_dir, first)
                .map_err(|error| dir.failure("link", &name, error))?;
        }
        Ok(())
    }

    /// Makes a directory of the copy, with those above it, unless it exists.
    fn ensure(&self, path: &[u8], mode: Compare) -> Result<TreeDir> {
        let mut made = self.made.lock();
        if let Some((place, _)) = made.get(path) {
            return Ok(place.clone());
        }
        made.entry(Vec::new()).or_insert_with(|| (self.target.clone(), mode));
        let there = (0..path.len())
            .rev()
            .filter(|end| path[*end] == b'/')
            .find(|end| made.contains_key(&path[..*end]))
            .unwrap_or(0);
        let mut place = made.get(&path[..there]).map_or(&self.target, |(place, _)| place).clone();
        for end in ends(path).filter(|end| *end > there) {
            let above = &path[..end];
            let name = above.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
            let name = CString::new(name).unwrap_or_default();
            place = place.open()?.make_dir(&name)?;
            let mode = if end == path.len() { mode } else { Compare::Yes };
            self.account(above.len())?;
            made.insert(above.to_vec(), (place.clone(), mode));
        }
        Ok(place)
    }

    fn finish_dirs(&self) -> Result<()> {
        for (path, (place, mode)) in self.made.lock().iter() {
            let source = self.source.descend(path).and_then(|place| place.open());
            let Some(source) = self.there(source)? else { continue };
            let Some(mut xattrs) = self.there(source.own_xattrs())? else { continue };
            if *mode != Compare::No {
                // It is merged with the copy before, which has the mark if there is one.
                xattrs.retain(|(key, _)| key.as_c_str() != OPAQUE);
            }
            if *mode == Compare::Hide {
                xattrs.push((OPAQUE.to_owned(), b"y".to_vec()));
            }
            place.open()?.finish(&source.own_stat()?, &xattrs)?;
        }
        Ok(())
    }

    fn remember(&self, path: Vec<u8>, names: HashMap<Vec<u8>, EntryState>) {
        let bytes = path.len() + names.keys().map(|name| name.len() + 64).sum::<usize>();
        if self.remembered.fetch_add(bytes, Ordering::Relaxed) + bytes <= MOST_REMEMBERED {
            self.seen.lock().dirs.insert(path, names);
        }
    }

    /// Keeps a tree that was nested to exhaust memory from doing so.
    fn account(&self, bytes: usize) -> Result<()> {
        if self.remembered.fetch_add(bytes, Ordering::Relaxed) > 2 * MOST_REMEMBERED {
            return Err(self.source.failure("copy the deep tree", rustix::io::Errno::NAMETOOLONG));
        }
        Ok(())
    }

    /// Whether a change after the last copy would have shown.
    fn is_settled(&self, now: &EntryState) -> bool {
        let nanos =
            |(seconds, nanos): (i64, u32)| i128::from(seconds) * 1_000_000_000 + i128::from(nanos);
        self.old.is_some_and(|old| nanos(now.changed) + TICK_NANOS < nanos(old.taken))
    }
}

/// Where the names in a path end.
fn ends(path: &[u8]) -> impl Iterator<Item = usize> {
    let slashes = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
    let last = (!path.is_empty()).then_some(path.len());
    slashes.chain(last)
}

fn mark(stat: &Statx, kind: EntryKind) -> EntryState {
    let changed = (stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec);
    EntryState { inode: stat.stx_ino, changed, size: stat.stx_size, kind }
}

fn kind_of(dir: &Dir, name: &CStr, stat: &Statx) -> Result<EntryKind> {
    match file_type(stat) {
        FileType::Directory => match dir.child(name).open()?.opaque()? {
            Opaque::Yes => Ok(EntryKind::OpaqueDir),
            Opaque::No | Opaque::Whiteouts => Ok(EntryKind::Dir),
        },
        _ if dir.is_whiteout(name, stat, Opaque::No)? => Ok(EntryKind::Whiteout),
        _ => Ok(EntryKind::File),
    }
}
