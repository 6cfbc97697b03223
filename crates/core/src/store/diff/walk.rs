//! Compares two stacks of layers, directory by directory.
//!
//! A directory that consists of the same directories of the same layers in both stacks is the same and is not
//! opened. Of others, only names are looked at that a layer has which is not part of both.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString};

use rustix::fs::{FileType, Statx};

use super::budget::Budget;
use super::content::{same_content, same_target, shown_xattrs};
use super::merged::{Found, LayerDir, MergedDir};
use super::{MOST_IN_DIR, TreeDiff};
use crate::model::{DiffAspect, DiffCounts, DiffEntry, DiffKind, DiffSide, EntryKind, LayerId};
use crate::store::layer::exclude::Globs;
use crate::store::path_text::path_text;
use crate::store::tree::{LONGEST, TreeDir, Xattrs, file_type, join};
use crate::store::walk::vanished;
use crate::store::{Result, Store, StoreError};

/// What one point has at a path, and where to read it.
#[derive(Debug, Clone)]
pub(in crate::store) struct Side {
    /// The directory of the layer that has the name; of a directory, its topmost one.
    pub(in crate::store) dir: TreeDir,
    /// The name there; empty for the root, which is `dir` itself.
    pub(in crate::store) name: CString,
    pub(in crate::store) kind: FileType,
    pub(in crate::store) mode: u32,
    pub(in crate::store) uid: u32,
    pub(in crate::store) gid: u32,
    pub(in crate::store) size: u64,
    pub(in crate::store) inode: (u32, u32, u64),
    pub(in crate::store) links: u32,
}

impl Side {
    pub(super) fn new(dir: TreeDir, name: &CStr, stat: &Statx) -> Self {
        let kind = file_type(stat);
        Self {
            dir,
            name: name.to_owned(),
            kind,
            mode: u32::from(stat.stx_mode) & 0o7777,
            uid: stat.stx_uid,
            gid: stat.stx_gid,
            size: if kind == FileType::Directory { 0 } else { stat.stx_size },
            inode: (stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino),
            links: stat.stx_nlink,
        }
    }

    pub(in crate::store) fn is_dir(&self) -> bool {
        self.kind == FileType::Directory
    }

    pub(in crate::store) fn is_file(&self) -> bool {
        self.kind == FileType::RegularFile
    }

    fn shown(&self) -> DiffSide {
        let kind = match self.kind {
            FileType::RegularFile => EntryKind::File,
            FileType::Directory => EntryKind::Directory,
            FileType::Symlink => EntryKind::Symlink,
            _ => EntryKind::Other,
        };
        DiffSide { kind, mode: self.mode, uid: self.uid, gid: self.gid, size_bytes: self.size }
    }
}

/// A path that differs.
#[derive(Debug, Clone)]
pub(in crate::store) struct PathDiff {
    /// From the root, without a leading slash. Empty for the root itself.
    pub(in crate::store) path: Vec<u8>,
    pub(in crate::store) from: Option<Side>,
    pub(in crate::store) to: Option<Side>,
    pub(in crate::store) what: Vec<DiffAspect>,
    pub(in crate::store) old_path: Option<Vec<u8>>,
}

impl PathDiff {
    /// What it takes in memory: each side has its path too.
    fn bytes(&self) -> usize {
        self.path.len() * (1 + usize::from(self.from.is_some()) + usize::from(self.to.is_some()))
            + 256
    }

    pub(in crate::store) fn kind(&self) -> DiffKind {
        match (&self.from, &self.to) {
            _ if self.old_path.is_some() => DiffKind::Renamed,
            (None, _) => DiffKind::Added,
            (_, None) => DiffKind::Removed,
            _ => DiffKind::Modified,
        }
    }

    pub(in crate::store) fn entry(&self) -> DiffEntry {
        let rooted = |path: &[u8]| format!("/{}", path_text(path));
        DiffEntry {
            path: rooted(&self.path),
            change: self.kind(),
            old_path: self.old_path.as_deref().map(rooted),
            what: self.what.clone(),
            from: self.from.as_ref().map(Side::shown),
            to: self.to.as_ref().map(Side::shown),
        }
    }
}

/// The last name of a path.
pub(in crate::store) fn name_of(path: &[u8]) -> CString {
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    // Names come from directories and have no NUL byte.
    CString::new(name).unwrap_or_default()
}

/// Where the names of a path end, the last one included; nowhere in that of the root.
pub(super) fn ends(path: &[u8]) -> impl Iterator<Item = usize> {
    let inner = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
    inner.chain((!path.is_empty()).then_some(path.len()))
}

/// Which paths are compared.
#[derive(Debug, Clone, Default)]
pub(super) struct Selection<'a> {
    /// These, and what is below them; all if `None`.
    pub(super) only: Option<&'a Globs>,
    /// These directories too, with what is below them.
    pub(super) also: BTreeSet<Vec<u8>>,
    /// Whether what is on the way there is listed, too.
    pub(super) parents: bool,
}

impl Selection<'_> {
    fn lists(&self, path: &[u8]) -> bool {
        let Some(globs) = self.only else { return true };
        globs.covers(path)
            || !self.also.is_empty() && ends(path).any(|end| self.also.contains(&path[..end]))
            || self.parents && self.is_on_the_way(globs, path)
    }

    /// Whether something below a directory may be listed.
    fn visits(&self, dir: &[u8]) -> bool {
        let Some(globs) = self.only else { return true };
        self.is_on_the_way(globs, dir) || self.lists(dir)
    }

    fn is_on_the_way(&self, globs: &Globs, dir: &[u8]) -> bool {
        let below = [dir, b"/"].concat();
        globs.leads_to(dir)
            || self.also.range(below.clone()..).next().is_some_and(|to| to.starts_with(&below))
    }
}

/// What a comparison is for.
#[derive(Debug)]
pub(super) struct Wanted<'a> {
    pub(super) paths: Selection<'a>,
    /// How many are listed. The others are counted.
    pub(super) limit: usize,
    /// Whether it ends at the first difference.
    pub(super) first: bool,
}

/// A directory that one of the stacks has, or both, and that may differ.
struct DirectoryPair {
    path: Vec<u8>,
    from: Option<Vec<LayerDir>>,
    to: Option<Vec<LayerDir>>,
}

impl DirectoryPair {
    /// What it takes in memory.
    fn bytes(&self) -> usize {
        let parts = |parts: &Option<Vec<LayerDir>>| parts.as_ref().map_or(0, Vec::len);
        // Each part has its path.
        (self.path.len() + 64) * (1 + parts(&self.from) + parts(&self.to))
    }
}

/// Compares two stacks.
pub(super) fn compare<'c>(
    store: &Store,
    from: &'c [LayerId],
    to: &'c [LayerId],
    wanted: &Wanted<'_>,
    budget: &mut Budget,
) -> Result<TreeDiff> {
    let mut known: Vec<&LayerId> = Vec::new();
    let mut roots = |chain: &'c [LayerId]| -> Result<Vec<LayerDir>> {
        let mut dirs = Vec::with_capacity(chain.len());
        for id in chain {
            let layer = known.iter().position(|known| *known == id).unwrap_or_else(|| {
                known.push(id);
                known.len() - 1
            });
            dirs.push(LayerDir { layer, place: TreeDir::root(&store.diff_dir(id))? });
        }
        Ok(dirs)
    };
    let (from_roots, to_roots) = (roots(from)?, roots(to)?);
    let mut comparison = Comparison { wanted, budget, diff: TreeDiff::default() };
    comparison.root(&from_roots, &to_roots)?;
    let mut pairs =
        vec![DirectoryPair { path: Vec::new(), from: Some(from_roots), to: Some(to_roots) }];
    while let Some(pair) = pairs.pop() {
        if comparison.is_enough() {
            break;
        }
        comparison.budget.release(pair.bytes());
        comparison.directory(pair, &mut pairs)?;
    }
    let mut diff = comparison.diff;
    diff.paths.sort_by(|one, other| one.path.cmp(&other.path));
    Ok(diff)
}

struct Comparison<'a> {
    wanted: &'a Wanted<'a>,
    budget: &'a mut Budget,
    diff: TreeDiff,
}

impl Comparison<'_> {
    /// The root itself has no name; its mode and owner may differ all the same.
    fn root(&mut self, from: &[LayerDir], to: &[LayerDir]) -> Result<()> {
        let top = |parts: &[LayerDir]| -> Result<Option<(usize, Side, Xattrs)>> {
            let Some(top) = parts.first() else { return Ok(None) };
            let dir = top.place.open()?;
            let side = Side::new(top.place.clone(), c"", &dir.own_stat()?);
            Ok(Some((top.layer, side, shown_xattrs(dir.own_xattrs()?))))
        };
        let (Some(from), Some(to)) = (top(from)?, top(to)?) else { return Ok(()) };
        if from.0 == to.0 {
            return Ok(());
        }
        let mut what = metadata(&from.1, &to.1);
        if from.2 != to.2 {
            what.push(DiffAspect::Xattrs);
        }
        self.report(Vec::new(), Some(from.1), Some(to.1), what)
    }

    /// Whether one difference is enough and was found.
    fn is_enough(&self) -> bool {
        self.wanted.first && !self.diff.is_empty()
    }

    fn directory(&mut self, pair: DirectoryPair, pairs: &mut Vec<DirectoryPair>) -> Result<()> {
        let same = |one: &[LayerDir], other: &[LayerDir]| {
            one.len() == other.len() && one.iter().zip(other).all(|(a, b)| a.layer == b.layer)
        };
        if let (Some(from), Some(to)) = (&pair.from, &pair.to)
            && same(from, to)
        {
            return Ok(());
        }
        let open = |parts: Option<&[LayerDir]>| MergedDir::open(parts.unwrap_or_default());
        let (from, to) = (open(pair.from.as_deref())?, open(pair.to.as_deref())?);
        let common = from.common(&to);
        let mut names: BTreeSet<CString> = BTreeSet::new();
        for stack in [&from, &to] {
            for part in &stack.parts[..stack.parts.len() - common] {
                let listed = part.dir.for_each(|name, _| {
                    names.insert(name.to_owned());
                    match names.len() > MOST_IN_DIR {
                        true => Err(too_many(&pair.path)),
                        false => Ok(()),
                    }
                });
                match listed {
                    Err(error) if vanished(&error) => {}
                    listed => listed?,
                }
            }
        }
        self.budget.names(names.len())?;
        for name in names {
            if self.is_enough() {
                break;
            }
            self.budget.time()?;
            let path = join(&pair.path, name.to_bytes());
            let paths = &self.wanted.paths;
            if !paths.lists(&path) && !paths.visits(&path) {
                continue;
            }
            if path.len() > LONGEST {
                return Err(too_long(&path));
            }
            self.name(path, &name, from.find(&name)?, to.find(&name)?, pairs)?;
        }
        Ok(())
    }

    fn name(
        &mut self,
        path: Vec<u8>,
        name: &CStr,
        from: Found,
        to: Found,
        pairs: &mut Vec<DirectoryPair>,
    ) -> Result<()> {
        let (from, from_parts, from_layer) = split(name, from);
        let (to, to_parts, to_layer) = split(name, to);
        let same_leaf = from_parts.is_none() && to_parts.is_none() && from_layer == to_layer;
        if self.wanted.paths.lists(&path) && !same_leaf {
            match (&from, &to) {
                (None, None) => {}
                (Some(one), Some(other)) => {
                    let what = match from_layer == to_layer {
                        true => Vec::new(),
                        false => differences(one, other, || self.budget.time())?,
                    };
                    if !what.is_empty() {
                        self.report(path.clone(), from.clone(), to.clone(), what)?;
                    }
                }
                _ => self.report(path.clone(), from.clone(), to.clone(), Vec::new())?,
            }
        }
        if (from_parts.is_some() || to_parts.is_some()) && self.wanted.paths.visits(&path) {
            let pair = DirectoryPair { path, from: from_parts, to: to_parts };
            self.budget.hold(pair.bytes())?;
            pairs.push(pair);
        }
        Ok(())
    }

    fn report(
        &mut self,
        path: Vec<u8>,
        from: Option<Side>,
        to: Option<Side>,
        what: Vec<DiffAspect>,
    ) -> Result<()> {
        let counts: &mut DiffCounts = &mut self.diff.counts;
        match (&from, &to) {
            (None, _) => counts.added += 1,
            (_, None) => counts.removed += 1,
            _ if what.is_empty() => return Ok(()),
            _ => counts.modified += 1,
        }
        let is_written = from.is_none() || what.contains(&DiffAspect::Content);
        if let Some(to) = to.as_ref().filter(|to| to.is_file() && is_written) {
            counts.bytes += to.size;
        }
        if self.diff.paths.len() >= self.wanted.limit {
            self.diff.truncated = true;
            return Ok(());
        }
        let one = PathDiff { path, from, to, what, old_path: None };
        self.budget.hold(one.bytes())?;
        self.diff.paths.push(one);
        Ok(())
    }
}

/// What differs between what two layers have under the same name, or the same path elsewhere. `step` is called now and then and
/// can end it.
pub(super) fn differences(
    from: &Side,
    to: &Side,
    step: impl Fn() -> Result<()>,
) -> Result<Vec<DiffAspect>> {
    if from.inode == to.inode {
        return Ok(Vec::new());
    }
    let name = from.name.as_c_str();
    let mut what = metadata(from, to);
    if from.kind != to.kind {
        what.push(DiffAspect::Type);
        return Ok(what);
    }
    let (one, other) = match (from.dir.open(), to.dir.open()) {
        (Err(error), _) | (_, Err(error)) if vanished(&error) => return Ok(what),
        (one, other) => (one?, other?),
    };
    let is_same = match from.kind {
        FileType::RegularFile if from.size != to.size => Ok(false),
        FileType::RegularFile => {
            let (one, other) = (one.open_file(name), other.open_file(name));
            same_content(one, other, step)
        }
        FileType::Symlink => same_target(&one, &other, name),
        FileType::CharacterDevice | FileType::BlockDevice => {
            let device = |stat: Statx| (stat.stx_rdev_major, stat.stx_rdev_minor);
            Ok(device(one.stat(name)?) == device(other.stat(name)?))
        }
        _ => Ok(true),
    };
    let is_same = match is_same {
        // It was removed or replaced while it was read.
        Err(error) if vanished(&error) => false,
        is_same => is_same?,
    };
    if !is_same {
        what.push(DiffAspect::Content);
    }
    let xattrs = |found: Result<Xattrs>| match found {
        Err(error) if vanished(&error) => Ok(Xattrs::new()),
        found => found.map(shown_xattrs),
    };
    if xattrs(one.xattrs(name))? != xattrs(other.xattrs(name))? {
        what.push(DiffAspect::Xattrs);
    }
    what.sort();
    Ok(what)
}

/// What of mode and owner differs.
fn metadata(from: &Side, to: &Side) -> Vec<DiffAspect> {
    let mut what = Vec::new();
    // A symbolic link has no mode of its own.
    let linked = from.kind == FileType::Symlink || to.kind == FileType::Symlink;
    if from.mode != to.mode && !linked {
        what.push(DiffAspect::Mode);
    }
    if (from.uid, from.gid) != (to.uid, to.gid) {
        what.push(DiffAspect::Owner);
    }
    what
}

pub(super) fn split(
    name: &CStr,
    found: Found,
) -> (Option<Side>, Option<Vec<LayerDir>>, Option<usize>) {
    match found {
        Found::Nothing => (None, None, None),
        Found::Leaf { layer, dir, stat } => (Some(Side::new(dir, name, &stat)), None, Some(layer)),
        Found::Dir { parts, stat } => {
            let top = parts.first().map(|part| part.layer);
            let parent = parts.first().map(|part| part.place.parent());
            let side = parent.map(|parent| Side::new(parent, name, &stat));
            (side, Some(parts), top)
        }
    }
}

pub(super) fn too_long(path: &[u8]) -> StoreError {
    let start = path_text(&path[..64]);
    StoreError::DiffTooLarge {
        why: format!("a path below `/{start}...` has more than {LONGEST} bytes"),
    }
}

pub(super) fn too_many(path: &[u8]) -> StoreError {
    StoreError::DiffTooLarge {
        why: format!("`/{}` has more than {MOST_IN_DIR} names", path_text(path)),
    }
}
