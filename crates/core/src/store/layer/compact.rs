//! Merges several layers into one.
//!
//! Overlayfs looks a name up in every layer of the chain, so long chains are slow and end at the
//! kernel's bound. Compacting a *run* of adjacent layers makes one that shows the same over the same
//! lower layers:
//!
//! - A name is what the topmost layer that has it says: a file, or a whiteout, which stays one.
//! - Directories of the same name are merged from the top down, until one is opaque, or a layer says
//!   the name is something else or nothing. The merged directory is then opaque itself, since what is
//!   below the run was hidden.
//!
//! Nothing is copied: files get one more name, in the new layer. Both layers are immutable, so it does
//! not matter that they share inodes, but it does for what a layer's deletion frees; `linked.json` in
//! the new layer says which bytes it shares with which others (see [`crate::store::gc::accounting`]).

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ffi::{CStr, CString};
use std::fs;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use rustix::fs::{FileType, Statx};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::failpoint;
use crate::model::{FORMAT, Layer, LayerId, LayerKind};
use crate::store::background::{Effort, with_effort};
use crate::store::manifest::{self, Durability, parse};
use crate::store::tree::{Dir, OPAQUE, Opaque, TreeDir, Xattrs, file_type};
use crate::store::walk::visit;
use crate::store::{Result, Store};

/// How many layers are merged at a time: a directory of each is open.
const AT_A_TIME: usize = 100;

/// Marks a directory some of whose names were copied up; makes the kernel look at inode numbers.
const IMPURE: &CStr = c"user.overlay.impure";

/// Space of a layer that other layers keep as well.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Linked {
    /// How much.
    pub bytes: u64,
    /// Who may keep it.
    pub layers: Vec<LayerId>,
}

#[derive(Debug, Serialize, Deserialize)]
struct LinkedFile {
    format: u32,
    linked: Vec<Linked>,
}

impl Store {
    /// Merges adjacent sealed layers, topmost first, into a new one that shows the same.
    ///
    /// # Errors
    ///
    /// Returns `NotFound` or `NotSealed` for a layer that cannot be part
    /// of it, or that was removed meanwhile. After any error nothing is left of the new layer.
    pub async fn compact(&self, run: &[LayerId], effort: Effort) -> Result<Layer> {
        let (store, run) = (self.clone(), run.to_vec());
        with_effort(effort, move || {
            let mut rest = run;
            let mut between: Option<LayerId> = None;
            // From the bottom up, so that what is merged stays the lowest.
            let merged = loop {
                let from = rest.len().saturating_sub(AT_A_TIME);
                let merged = store.compact_now(&rest[from..]);
                if let Some(used) = between.take() {
                    store.discard_dir(&store.layer_dir(&used), used.as_str())?;
                }
                let merged = merged?;
                if from == 0 {
                    break merged;
                }
                rest.truncate(from);
                rest.push(merged.id.clone());
                between = Some(merged.id);
            };
            Ok(merged)
        })
        .await
    }

    fn compact_now(&self, run: &[LayerId]) -> Result<Layer> {
        for id in run {
            self.sealed(id)?;
        }
        let (id, staging) = self.stage()?;
        let outcome = self.merge(run, &id, &staging);
        if outcome.is_err() {
            self.discard_dir(&staging, id.as_str())?;
        }
        outcome
    }

    fn merge(&self, run: &[LayerId], id: &LayerId, staging: &Path) -> Result<Layer> {
        let mut parts = Vec::new();
        for (rank, layer) in run.iter().enumerate() {
            parts.push(CompactedPart { rank, place: TreeDir::root(&self.diff_dir(layer))? });
        }
        let merger = Merger {
            links: run.iter().map(|_| Mutex::default()).collect(),
            dirs: Mutex::default(),
        };
        let target = TreeDir::root(&staging.join("diff"))?;
        visit(CompactedDir { parts, target, closed: false }, |group, more| {
            merger.merge(group, more)
        })?;
        failpoint::pass("store.compact.linked");
        merger.finish_dirs()?;
        // A layer is renamed before anything in it is deleted. Those that exist now existed all the
        // time; of one that does not, some of the names may have been missed.
        for layer in run {
            self.sealed(layer)?;
        }
        let linked = self.linked_with(run, merger.links);
        let place = PathBuf::from(format!("tmp/{id}/linked.json"));
        let json = manifest::to_json(&LinkedFile { format: FORMAT, linked }, &place)?;
        self.put(&place, &json, Durability::Soon, false)?;
        self.publish(id, staging, LayerKind::Compacted)
    }

    /// Records who keeps the bytes that were linked: the layer they came from, and those that share
    /// with it, since it is unknown which of its files those are.
    fn linked_with(&self, run: &[LayerId], links: Vec<Mutex<LinkedBytes>>) -> Vec<Linked> {
        let mut linked = Vec::new();
        for (layer, links) in run.iter().zip(links) {
            let bytes = links.into_inner().bytes;
            if bytes == 0 {
                continue;
            }
            let further = self.linked(layer).into_iter().flat_map(|linked| linked.layers);
            // Those that are gone keep nothing.
            let further: BTreeSet<_> = further.filter(|id| self.layer_dir(id).exists()).collect();
            let layers = std::iter::once(layer.clone()).chain(further).collect();
            linked.push(Linked { bytes, layers });
        }
        linked
    }

    /// What a layer shares with others.
    pub(in crate::store) fn linked(&self, id: &LayerId) -> Vec<Linked> {
        let path = self.layer_dir(id).join("linked.json");
        let found = fs::read(&path).ok().and_then(|bytes| parse::<LinkedFile>(&path, &bytes).ok());
        found.map(|file| file.linked).unwrap_or_default()
    }
}

/// One layer's part in a merged directory.
#[derive(Debug, Clone)]
struct CompactedPart {
    /// Which layer of the run.
    rank: usize,
    place: TreeDir,
}

/// A directory of the new layer and what it is merged from, topmost first.
struct CompactedDir {
    parts: Vec<CompactedPart>,
    target: TreeDir,
    /// Whether what is below the run was hidden.
    closed: bool,
}

/// Bytes linked from one layer.
#[derive(Debug, Default)]
struct LinkedBytes {
    bytes: u64,
    /// Files with several names, which count once.
    seen: HashSet<u64>,
}

struct Merger {
    links: Vec<Mutex<LinkedBytes>>,
    /// Directories to be given their attributes in the end.
    dirs: Mutex<Vec<(TreeDir, Statx, Xattrs)>>,
}

/// What a name turns out to be.
enum MergedEntry {
    Whiteout,
    /// Something to be linked, from the part with this index.
    Leaf(usize, Box<Statx>),
    /// Directories to be merged; `true` when no lower one can join.
    Dirs(Vec<CompactedPart>, bool),
}

impl Merger {
    fn merge(&self, group: CompactedDir, more: &mut Vec<CompactedDir>) -> Result<()> {
        let mut dirs = Vec::new();
        let mut closed = group.closed;
        for part in &group.parts {
            let dir = part.place.open()?;
            let opaque = dir.opaque()?;
            dirs.push((part.rank, dir, opaque));
            if opaque == Opaque::Yes {
                closed = true;
                break;
            }
        }
        let mut names: BTreeMap<CString, MergedEntry> = BTreeMap::new();
        for (index, (rank, dir, opaque)) in dirs.iter().enumerate() {
            collect(&mut names, index, *rank, dir, *opaque)?;
        }
        let target = group.target.open()?;
        for (name, found) in names {
            match found {
                // Nothing is below a closed directory that would have to be hidden.
                MergedEntry::Whiteout if closed => {}
                MergedEntry::Whiteout => target.make_whiteout(&name)?,
                MergedEntry::Leaf(index, stat) => {
                    let (rank, from, _) = &dirs[index];
                    self.link(&target, &name, *rank, from, &stat)?;
                }
                MergedEntry::Dirs(parts, stopped) => {
                    let closed = closed || stopped;
                    more.push(CompactedDir { parts, target: target.make_dir(&name)?, closed });
                }
            }
        }
        self.note_dir(group.target, &dirs, closed)
    }

    /// Remembers what a merged directory is to look like: as the topmost, but for the kernel's marks.
    fn note_dir(&self, target: TreeDir, dirs: &[(usize, Dir, Opaque)], closed: bool) -> Result<()> {
        let Some((_, top, _)) = dirs.first() else { return Ok(()) };
        let mut xattrs = top.own_xattrs()?;
        xattrs.retain(|(key, _)| key.as_c_str() != OPAQUE);
        if closed {
            xattrs.push((OPAQUE.to_owned(), b"y".to_vec()));
        }
        if !xattrs.iter().any(|(key, _)| key.as_c_str() == IMPURE) {
            for (_, dir, _) in &dirs[1..] {
                if let Some(impure) =
                    dir.own_xattrs()?.into_iter().find(|(key, _)| key.as_c_str() == IMPURE)
                {
                    xattrs.push(impure);
                    break;
                }
            }
        }
        self.dirs.lock().push((target, top.own_stat()?, xattrs));
        Ok(())
    }

    fn link(&self, to: &Dir, name: &CStr, rank: usize, from: &Dir, stat: &Statx) -> Result<()> {
        match to.link_from(name, from, name) {
            Ok(()) => {
                let mut links = self.links[rank].lock();
                if stat.stx_nlink == 1 || links.seen.insert(stat.stx_ino) {
                    links.bytes += stat.stx_blocks * 512;
                }
                Ok(())
            }
            // The file has as many names as the filesystem allows.
            Err(Errno::MLINK) => to.copy_from(name, from, stat),
            Err(error) => Err(to.failure("link", name, error)),
        }
    }

    fn finish_dirs(&self) -> Result<()> {
        for (place, stat, xattrs) in self.dirs.lock().iter() {
            place.open()?.finish(stat, xattrs)?;
        }
        Ok(())
    }
}

/// Adds what one more layer, below those before it, says about the names in a directory.
fn collect(
    names: &mut BTreeMap<CString, MergedEntry>,
    index: usize,
    rank: usize,
    dir: &Dir,
    opaque: Opaque,
) -> Result<()> {
    for entry in dir.entries()? {
        let stat = dir.stat(&entry.name)?;
        let whiteout = dir.is_whiteout(&entry.name, &stat, opaque)?;
        let is_dir = file_type(&stat) == FileType::Directory;
        match names.get_mut(&entry.name) {
            Some(MergedEntry::Dirs(_, true) | MergedEntry::Leaf(..) | MergedEntry::Whiteout) => {}
            Some(MergedEntry::Dirs(_, stopped)) if whiteout || !is_dir => *stopped = true,
            Some(MergedEntry::Dirs(parts, stopped)) => {
                let place = dir.child(&entry.name);
                *stopped = place.open()?.opaque()? == Opaque::Yes;
                parts.push(CompactedPart { rank, place });
            }
            None if whiteout => {
                names.insert(entry.name, MergedEntry::Whiteout);
            }
            None if is_dir => {
                let place = dir.child(&entry.name);
                let stopped = place.open()?.opaque()? == Opaque::Yes;
                names.insert(
                    entry.name,
                    MergedEntry::Dirs(vec![CompactedPart { rank, place }], stopped),
                );
            }
            None => {
                names.insert(entry.name, MergedEntry::Leaf(index, Box::new(stat)));
            }
        }
    }
    Ok(())
}
