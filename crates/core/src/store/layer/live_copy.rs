//! Copying a layer that goes on being written to.
//!
//! A checkpoint of a busy sandbox cannot seal the layer under its processes. They are frozen, the
//! layer is copied into a new sealed one, and they go on. The first copy of a session is whole. Each
//! later one holds only what changed since the one before and stands on top of it, so that
//!
//! ```text
//!   chain + copy 1 + copy 2 + … + copy n   shows what   chain + open layer   showed at copy n.
//! ```
//!
//! To know what changed, a copy remembers inode, change time, size and kind of every name. Three
//! things could deceive it, and are dealt with:
//!
//! - A write in the same tick of the clock as the copy leaves the change time equal. Files changed in
//!   the last moments before a copy are therefore copied again by the next.
//! - A write through a memory mapping only moves the change time when the page was clean. Every copy
//!   ends with a sync while all is frozen, after which all pages are clean.
//! - A hard link made or broken shows in the change time of all its names; a directory moved as a
//!   whole does not. Names that were skipped are linked in the end when their file was copied.
//!
//! A first copy may be large, and nobody likes to be frozen for seconds. So it can be made *ahead*,
//! while the writers go on ([`Store::copy_ahead`]). Such a copy may be torn, which does no harm: it
//! begins with a sync, and whatever changed since before that sync is copied again by the copy that
//! is made on top of it with the writers frozen.
//!
//! What vanished from the layer leaves a whiteout in the copy. That is right because overlayfs leaves
//! a whiteout itself where a lower layer has the name. The one case that has no such answer, a
//! whiteout that vanished, makes the copy a whole one.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use rustix::fs::{FileType, Statx};
use serde::{Deserialize, Serialize};

use crate::failpoint;
use crate::model::{FORMAT, Layer, LayerId, LayerKind, Timestamp};
use crate::store::background::background;
use crate::store::manifest::{parse, to_json};
use crate::store::path_text::{path_bytes, path_text};
use crate::store::tree::{Dir, OPAQUE, Opaque, Place, file_type, join};
use crate::store::walk::{measure, measure_moving, visit};
use crate::store::{Result, Store, StoreError, blocking};

/// How long before a copy a change may lie and still be in doubt: twice the slowest kernel tick.
const TICK_NANOS: i128 = 20_000_000;

/// How many bytes of names are remembered. A tree made to exceed it is copied whole each time.
const MOST_REMEMBERED: usize = 256 << 20;

/// How much there must be to copy for it to be worth another layer to begin ahead.
const WORTH_AHEAD: u64 = 4 << 20;
/// How much is copied between two looks at the free space.
const LOOK_EVERY: u64 = 8 << 20;

/// Whether somebody may change the layer while it is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LayerWriters {
    Frozen,
    /// What changed after `since` is not to be believed.
    Busy {
        since: Timestamp,
    },
}

/// What was copied of an open layer so far.
#[derive(Debug, Clone)]
pub struct LiveCopy {
    layers: Vec<LayerId>,
    seen: Option<Arc<CopiedNames>>,
}

impl LiveCopy {
    /// The layers that together show what the open layer and the chain it stands on showed, topmost first.
    #[must_use]
    pub fn layers(&self) -> &[LayerId] {
        &self.layers
    }

    /// Names other layers that show the same: some of those it had were made one.
    pub fn set_layers(&mut self, layers: Vec<LayerId>) {
        self.layers = layers;
    }
}

/// Everything that was in the layer when it was copied.
#[derive(Debug, Default, PartialEq, Eq)]
struct CopiedNames {
    /// When, in seconds and nanoseconds.
    taken: (i64, u32),
    /// The root itself.
    root: Option<EntryState>,
    /// What each directory held.
    dirs: HashMap<Vec<u8>, HashMap<Vec<u8>, EntryState>>,
}

/// What must stay equal for a name to be unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct EntryState {
    inode: u64,
    changed: (i64, u32),
    size: u64,
    kind: EntryKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum EntryKind {
    File,
    Whiteout,
    Dir,
    OpaqueDir,
}

impl EntryKind {
    fn is_dir(self) -> bool {
        matches!(self, Self::Dir | Self::OpaqueDir)
    }
}

impl Store {
    /// Copies an open layer that stands on `chain`, and whose writers the caller has frozen, into a new sealed one.
    /// With `base`, the copy made before in the same session, only what changed since is copied; without a
    /// change there is no layer.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::NoRoom`] or another error that [`is_no_room`](StoreError::is_no_room);
    /// nothing is left of the copy then.
    pub async fn copy_live(
        &self,
        open: &LayerId,
        chain: &[LayerId],
        base: Option<&LiveCopy>,
    ) -> Result<(Option<Layer>, LiveCopy)> {
        let (store, id, chain, base) = (self.clone(), open.clone(), chain.to_vec(), base.cloned());
        let (layer, copy) = blocking(move || store.copy_now(&id, &chain, base.as_ref())).await?;
        let (path, temporary) =
            (self.layer_dir(open).join("copies.json"), self.fresh_tmp("copies"));
        let kept = copy.clone();
        // The caller's sandbox is frozen: remembering can wait until it is not.
        self.inner.deletion_threads.run(Box::new(move || remember(&path, &temporary, &kept)));
        Ok((layer, copy))
    }

    /// Makes a first copy of an open layer while it is being written to, for
    /// [`copy_live`](Self::copy_live) to stand on. `None` when there is too little to be worth it.
    ///
    /// # Errors
    ///
    /// As [`copy_live`](Self::copy_live).
    pub async fn copy_ahead(
        &self,
        open: &LayerId,
        chain: &[LayerId],
    ) -> Result<Option<(Layer, LiveCopy)>> {
        let (store, diff, id) = (self.clone(), self.diff_dir(open), open.clone());
        let chain = chain.to_vec();
        background(move || {
            let bytes = measure_moving(&diff)?.bytes;
            if bytes < WORTH_AHEAD {
                return Ok(None);
            }
            store.refuse_beyond(store.usable()?.usable, bytes)?;
            let taken = Timestamp::now();
            store.sync_now()?;
            let copied = store.copy_tree(&diff, None, LayerWriters::Busy { since: taken })?;
            let Some((Some(layer), seen)) = copied else { return Ok(None) };
            store.refuse_doubt_now(&id)?;
            let layers = std::iter::once(layer.id.clone()).chain(chain).collect();
            Ok(Some((layer, LiveCopy { layers, seen })))
        })
        .await
    }

    /// What an earlier daemon copied of an open layer. When there is nothing to be found, the next
    /// copy is a whole one.
    pub async fn live_copy(&self, open: &LayerId, chain: &[LayerId]) -> Option<LiveCopy> {
        let (path, chain) = (self.layer_dir(open).join("copies.json"), chain.to_vec());
        blocking(move || Ok(recall(&path, &chain))).await.ok().flatten()
    }

    fn copy_now(
        &self,
        open: &LayerId,
        chain: &[LayerId],
        base: Option<&LiveCopy>,
    ) -> Result<(Option<Layer>, LiveCopy)> {
        let copied = self.copy_changes(open, chain, base)?;
        // Everything was synced by now. What was read of a file in doubt may not be what was written.
        self.refuse_doubt_now(open)?;
        Ok(copied)
    }

    fn copy_changes(
        &self,
        open: &LayerId,
        chain: &[LayerId],
        base: Option<&LiveCopy>,
    ) -> Result<(Option<Layer>, LiveCopy)> {
        let diff = self.diff_dir(open);
        let usable = base.filter(|base| base.layers.iter().all(|id| self.sealed(id).is_ok()));
        if let Some(base) = usable
            && let Some(seen) = &base.seen
            && let Some((layer, seen)) = self.copy_tree(&diff, Some(seen), LayerWriters::Frozen)?
        {
            let newest = layer.iter().map(|layer| layer.id.clone());
            let layers = newest.chain(base.layers.iter().cloned()).collect();
            return Ok((layer, LiveCopy { layers, seen }));
        }
        if self.is_untouched_now(open)? {
            self.sync_now()?;
            return Ok((None, LiveCopy { layers: chain.to_vec(), seen: None }));
        }
        // A copy is new work: the session goes on without it.
        self.refuse_beyond(self.usable()?.usable, measure(&diff)?.bytes)?;
        let (layer, seen) = self.copy_tree(&diff, None, LayerWriters::Frozen)?.unwrap_or_default();
        let copied = layer.iter().map(|layer| layer.id.clone());
        let layers = copied.chain(chain.iter().cloned()).collect();
        Ok((layer, LiveCopy { layers, seen }))
    }

    /// Copies what is not as it was in `old`, and answers with what it saw; `None` when only a whole
    /// copy will do.
    fn copy_tree(
        &self,
        diff: &Path,
        old: Option<&CopiedNames>,
        writers: LayerWriters,
    ) -> Result<Option<Stored>> {
        let (id, staging) = self.stage()?;
        let outcome = copy_into(self, diff, &staging.join("diff"), old, writers);
        failpoint::pass("store.copy_live.copied");
        let layer = match &outcome {
            Ok(Some((true, _))) => self.publish(&id, &staging, LayerKind::Checkpoint).map(Some),
            _ => Ok(None),
        };
        if !matches!(layer, Ok(Some(_))) {
            self.discard_dir(&staging, id.as_str())?;
        }
        let layer = layer?;
        if layer.is_none() {
            // Nothing new to store, but the pages must be clean for the next copy to be believed.
            self.sync_now()?;
        }
        Ok(outcome?.map(|(_, seen)| (layer, seen)))
    }
}

/// What came of a copy: the layer, if there was anything to copy, and what was seen.
type Stored = (Option<Layer>, Option<Arc<CopiedNames>>);

/// What was copied: whether there was anything, and what was seen.
type Copied = (bool, Option<Arc<CopiedNames>>);

/// Copies the tree `from`, or what of it is not as in `old`. `None` when only a whole copy will do.
fn copy_into(
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
        source: Place::root(from)?,
        target: Place::root(to)?,
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
    source: Place,
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
    source: Place,
    target: Place,
    seen: Mutex<CopiedNames>,
    /// Bytes of names in `seen`.
    remembered: AtomicUsize,
    whole_needed: AtomicBool,
    /// Directories of the copy by path.
    made: Mutex<HashMap<Vec<u8>, (Place, Compare)>>,
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

    /// Makes a directory of the copy, with those above it, unless it is there.
    fn ensure(&self, path: &[u8], mode: Compare) -> Result<Place> {
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

/// [`LiveCopy`] as a file beside the open layer: a convenience that may be lost at any time.
#[derive(Debug, Serialize, Deserialize)]
struct CopiesFile {
    format: u32,
    layers: Vec<LayerId>,
    /// Whether `layers` are all there are. Those of an older version are the copies alone, without the chain.
    #[serde(default)]
    whole: bool,
    taken: (i64, u32),
    root: Option<EntryState>,
    /// Paths and names as printable text.
    dirs: BTreeMap<String, BTreeMap<String, EntryState>>,
}

impl CopiesFile {
    fn new(layers: &[LayerId], seen: &CopiedNames) -> Self {
        let text = |names: &HashMap<Vec<u8>, EntryState>| {
            names.iter().map(|(name, mark)| (path_text(name), *mark)).collect()
        };
        let dirs = seen.dirs.iter().map(|(path, names)| (path_text(path), text(names))).collect();
        let (taken, root) = (seen.taken, seen.root);
        Self { format: FORMAT, layers: layers.to_vec(), whole: true, taken, root, dirs }
    }

    fn into_copy(self, chain: &[LayerId]) -> Option<LiveCopy> {
        let bytes = |names: BTreeMap<String, EntryState>| -> Option<HashMap<Vec<u8>, EntryState>> {
            names.into_iter().map(|(name, mark)| Some((path_bytes(&name)?, mark))).collect()
        };
        let dirs: Option<HashMap<_, _>> = self
            .dirs
            .into_iter()
            .map(|(path, names)| Some((path_bytes(&path)?, bytes(names)?)))
            .collect();
        let seen = CopiedNames { taken: self.taken, root: self.root, dirs: dirs? };
        let mut layers = self.layers;
        if !self.whole {
            layers.extend_from_slice(chain);
        }
        Some(LiveCopy { layers, seen: Some(Arc::new(seen)) })
    }
}

/// Writes a copy's record, unless the layer was sealed or discarded meanwhile. Without a record the
/// first copy after a restart is a whole one.
fn remember(path: &Path, temporary: &Path, copy: &LiveCopy) {
    let Some(seen) = &copy.seen else { return };
    let Ok(bytes) = to_json(&CopiesFile::new(&copy.layers, seen), path) else { return };
    let written = fs::write(temporary, bytes).and_then(|()| fs::rename(temporary, path));
    if let Err(error) = written {
        tracing::debug!(path = %path.display(), %error, "could not record a copy; the next one will be complete");
        let _ = fs::remove_file(temporary);
    }
}

fn recall(path: &Path, chain: &[LayerId]) -> Option<LiveCopy> {
    let bytes = fs::read(path).ok()?;
    parse::<CopiesFile>(path, &bytes).ok()?.into_copy(chain)
}
