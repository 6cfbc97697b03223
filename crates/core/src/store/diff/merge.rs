//! Decides about every path of a three-way merge.
//!
//! What *theirs* changed since the base is taken over into *ours*. A path that changed on one side only is taken as it
//! is; content, mode, owner and attributes of a path that changed on both sides are decided one by one.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use rustix::fs::FileType;
use similar::{TextDiff, TextMerge};

use super::budget::Budget;
use super::content::{is_text, read_whole, shown_xattrs};
use super::lookup::Lookup;
use super::walk::{self, PathDiff, Selection, Side, Wanted, ends};
use super::{MergeChains, MergeOptions, TreeDiff};
use crate::model::DiffAspect;
use crate::store::path_text::path_text;
use crate::store::tree::Xattrs;
use crate::store::{Result, Store, StoreError};

/// How many paths each side may have changed.
pub(super) const MOST_CHANGES: usize = 200_000;
/// The largest file that is merged by lines, and the most lines it has.
const LARGEST_TEXT: usize = 1 << 20;
const MOST_LINES: usize = 50_000;
/// How long each side is compared with the base for that. Files that take longer differ in nearly everything.
const LONGEST_COMPARISON: Duration = Duration::from_secs(2);

/// The attributes of a path in the result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PathAttributes {
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) xattrs: Xattrs,
}

/// Where the content of a path in the result comes from.
#[derive(Debug, Clone)]
pub(super) enum PathContent {
    /// As a side has it. Of a directory: none.
    Side(Side),
    /// Merged by lines; the times are those of the side.
    Text(Vec<u8>, Side),
}

/// What happens to a path.
#[derive(Debug, Clone)]
pub(super) enum PathAction {
    Remove,
    Write { content: PathContent, attributes: PathAttributes },
}

impl PathAction {
    /// Writes what a side has.
    pub(super) fn write(side: &Side) -> Result<Self> {
        let attributes = attributes_of(side)?;
        Ok(Self::Write { content: PathContent::Side(side.clone()), attributes })
    }

    /// Whether there is a directory then.
    pub(super) fn makes_dir(&self) -> bool {
        matches!(self, Self::Write { content: PathContent::Side(side), .. } if side.is_dir())
    }
}

/// A path that changed on both sides in ways that do not go together.
#[derive(Debug, Clone)]
pub(super) struct Conflict {
    /// From the root, without a leading slash.
    pub(super) path: Vec<u8>,
    /// Why.
    pub(super) reason: &'static str,
    /// The other side's version, if it has one.
    pub(super) theirs: Option<Side>,
}

impl Conflict {
    /// The path, for people.
    #[must_use]
    pub(super) fn path(&self) -> String {
        format!("/{}", path_text(&self.path))
    }
}

/// What a merge is to do.
#[derive(Debug, Default)]
pub(super) struct MergePlan {
    pub(super) actions: BTreeMap<Vec<u8>, PathAction>,
    /// What theirs changed of these paths.
    pub(super) taken: Vec<PathDiff>,
    /// Paths that were merged by lines.
    pub(super) merged: BTreeSet<Vec<u8>>,
    /// Paths that cannot be merged.
    pub(super) conflicts: Vec<Conflict>,
}

impl MergePlan {
    /// Whether there is nothing to do.
    #[must_use]
    pub(super) fn is_empty(&self) -> bool {
        self.actions.is_empty()
    }
}

/// What differs between the base and a side, by path.
struct Changes {
    by_path: BTreeMap<Vec<u8>, PathDiff>,
}

impl Changes {
    fn new(diff: TreeDiff) -> Result<Self> {
        if diff.truncated {
            let why = format!("more than {MOST_CHANGES} paths changed since the common ancestor");
            return Err(StoreError::DiffTooLarge { why });
        }
        Ok(Self { by_path: diff.paths.into_iter().map(|one| (one.path.clone(), one)).collect() })
    }

    fn below<'a>(&'a self, dir: &'a [u8]) -> impl Iterator<Item = &'a PathDiff> {
        let start = [dir, b"/"].concat();
        let all = self.by_path.range(start.clone()..);
        all.take_while(move |(path, _)| path.starts_with(&start)).map(|(_, one)| one)
    }

    /// Whether a directory that a path is in is not there any more as one.
    fn lost_parent(&self, path: &[u8]) -> bool {
        ancestors(path).any(|parent| {
            self.by_path.get(parent).is_some_and(|one| !one.to.as_ref().is_some_and(Side::is_dir))
        })
    }
}

/// The directories a path is in, without the root.
pub(super) fn ancestors(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    ends(path).filter(|end| *end < path.len()).map(|end| &path[..end])
}

/// The path of the Git repository's directory that a path is in, or is.
fn git_dir(path: &[u8]) -> Option<&[u8]> {
    let ends = ancestors(path).chain([path]);
    let mut ends = ends.filter(|part| part.rsplit(|byte| *byte == b'/').next() == Some(b".git"));
    ends.next()
}

impl Store {
    /// Decides what a merge has to do, and reads what it needs to know for that.
    pub(super) fn plan_merge(
        &self,
        chains: &MergeChains,
        options: &MergeOptions,
        mut budget: Budget,
    ) -> Result<MergePlan> {
        let MergeChains { base, ours, theirs } = chains;
        let only = options.only.as_ref();
        let mut changes = |chain, paths| {
            budget.next();
            let wanted = Wanted { paths, limit: MOST_CHANGES, first: false };
            Changes::new(walk::compare(self, base, chain, &wanted, &mut budget)?)
        };
        let their_changes = changes(theirs, Selection { only, ..Selection::default() })?;
        let repositories: BTreeSet<Vec<u8>> = their_changes
            .by_path
            .keys()
            .filter_map(|path| git_dir(path))
            .map(<[u8]>::to_vec)
            .collect();
        // Of ours, also what decides whether a chosen path has a place, and all of the repositories.
        let also = repositories.clone();
        let our_changes = changes(ours, Selection { only, also, parents: true })?;
        let in_both = |git: &Vec<u8>| {
            our_changes.by_path.contains_key(git) || our_changes.below(git).next().is_some()
        };
        let repositories: BTreeSet<Vec<u8>> = repositories.into_iter().filter(in_both).collect();
        let left_out =
            |path: &[u8]| options.exclude.as_ref().is_some_and(|globs| globs.covers(path));
        let mut plan = MergePlan::default();
        for (path, their) in &their_changes.by_path {
            budget.time()?;
            let is_git = git_dir(path).is_some_and(|git| repositories.contains(git));
            if !is_git && !left_out(path) {
                plan.decide(path, their, &our_changes, &mut budget)?;
            }
        }
        for git in repositories.into_iter().filter(|git| !left_out(git)) {
            let reason =
                "the Git repository changed on both sides: exchange a branch or a patch instead";
            plan.conflicts.push(Conflict { path: git, reason, theirs: None });
        }
        plan.conflicts.sort_by(|one, other| one.path.cmp(&other.path));
        let (mut ours, mut theirs) = (Lookup::new(self, ours)?, Lookup::new(self, theirs)?);
        if only.is_some() || options.exclude.is_some() {
            plan.add_parents(&mut ours, &mut theirs, &budget)?;
        }
        if let Some(source) = &options.keep_both {
            plan.keep_both(source, &mut ours, &mut theirs, &budget)?;
        }
        plan.taken.sort_by(|one, other| one.path.cmp(&other.path));
        Ok(plan)
    }
}

impl MergePlan {
    /// Makes sure that every chosen path has a parent directory. Where the target has none, the
    /// source's is taken; where it has something else, that is a conflict.
    fn add_parents(
        &mut self,
        ours: &mut Lookup,
        theirs: &mut Lookup,
        budget: &Budget,
    ) -> Result<()> {
        let is_written = |action: &PathAction| matches!(action, PathAction::Write { .. });
        let written: Vec<Vec<u8>> = self
            .actions
            .iter()
            .filter(|(_, action)| is_written(action))
            .map(|(path, _)| path.clone())
            .collect();
        let (mut there, mut dropped) = (BTreeSet::new(), BTreeSet::new());
        for path in written {
            budget.time()?;
            for parent in ancestors(&path) {
                if there.contains(parent)
                    || self.actions.get(parent).is_some_and(PathAction::makes_dir)
                {
                    continue;
                }
                let reason = match (ours.find(parent)?, theirs.find(parent)?) {
                    (Some(ours), _) if ours.is_dir() => {
                        there.insert(parent.to_vec());
                        continue;
                    }
                    (None, Some(theirs)) if theirs.is_dir() => {
                        self.add(parent.to_vec(), theirs)?;
                        continue;
                    }
                    (Some(_), _) => "the target has something else than the directory it is in",
                    (None, _) => "the directory it is in was removed meanwhile",
                };
                self.merged.remove(&path);
                let theirs = match self.actions.remove(&path) {
                    Some(PathAction::Write { content: PathContent::Side(side), .. })
                    | Some(PathAction::Write { content: PathContent::Text(_, side), .. }) => {
                        Some(side)
                    }
                    Some(PathAction::Remove) | None => None,
                };
                self.conflict(&path, reason, theirs.as_ref());
                dropped.insert(path.clone());
                break;
            }
        }
        self.taken.retain(|one| !dropped.contains(&one.path));
        self.conflicts.sort_by(|one, other| one.path.cmp(&other.path));
        Ok(())
    }

    /// Writes what a side has to a path where nothing is.
    pub(super) fn add(&mut self, path: Vec<u8>, side: Side) -> Result<()> {
        self.actions.insert(path.clone(), PathAction::write(&side)?);
        let (to, what) = (Some(side), Vec::new());
        self.taken.push(PathDiff { path, from: None, to, what, old_path: None });
        Ok(())
    }

    fn conflict(&mut self, path: &[u8], reason: &'static str, theirs: Option<&Side>) {
        self.conflicts.push(Conflict { path: path.to_vec(), reason, theirs: theirs.cloned() });
    }

    fn act(&mut self, their: &PathDiff, action: PathAction) {
        self.actions.insert(their.path.clone(), action);
        self.taken.push(their.clone());
    }

    fn decide(
        &mut self,
        path: &[u8],
        their: &PathDiff,
        ours: &Changes,
        budget: &mut Budget,
    ) -> Result<()> {
        let Some(our) = ours.by_path.get(path) else {
            return self.take(path, their, ours);
        };
        match (&our.to, &their.to) {
            (None, None) => Ok(()),
            (None, Some(to)) => {
                self.conflict(path, "removed in the target, changed in the source", Some(to));
                Ok(())
            }
            (Some(_), None) => {
                self.conflict(path, "changed in the target, removed in the source", None);
                Ok(())
            }
            (Some(_), Some(_)) => self.both(path, our, their, budget),
        }
    }

    /// A path that only theirs changed.
    fn take(&mut self, path: &[u8], their: &PathDiff, ours: &Changes) -> Result<()> {
        let Some(to) = &their.to else {
            let is_used = |one: &PathDiff| one.to.is_some();
            if ours.below(path).any(is_used) {
                let reason = "the source removed the directory, the target changed something in it";
                self.conflict(path, reason, None);
            } else if !ours.lost_parent(path) {
                self.act(their, PathAction::Remove);
            }
            return Ok(());
        };
        if ours.lost_parent(path) {
            self.conflict(path, "the target removed the directory it is in", Some(to));
            return Ok(());
        }
        let is_replaced = their.from.as_ref().is_some_and(Side::is_dir) && !to.is_dir();
        if is_replaced && ours.below(path).any(|one| one.to.is_some()) {
            let reason = "the source replaced the directory, the target changed something in it";
            self.conflict(path, reason, Some(to));
            return Ok(());
        }
        self.act(their, PathAction::write(to)?);
        Ok(())
    }

    /// A path that both sides changed and both have.
    fn both(
        &mut self,
        path: &[u8],
        our: &PathDiff,
        their: &PathDiff,
        budget: &mut Budget,
    ) -> Result<()> {
        let (Some(ours), Some(theirs)) = (&our.to, &their.to) else { return Ok(()) };
        if ours.kind != theirs.kind {
            self.conflict(path, "it has another file type on each side", Some(theirs));
            return Ok(());
        }
        let base = their.from.as_ref().filter(|base| base.kind == theirs.kind);
        let Some(attributes) = merge_attributes(base, ours, theirs)? else {
            self.conflict(path, "mode, owner or attributes changed on both sides", Some(theirs));
            return Ok(());
        };
        let changed = |one: &PathDiff| base.is_none() || one.what.contains(&DiffAspect::Content);
        let content = match (changed(our), changed(their)) {
            _ if theirs.kind == FileType::Directory => Some(PathContent::Side(ours.clone())),
            (_, false) => Some(PathContent::Side(ours.clone())),
            (false, true) => Some(PathContent::Side(theirs.clone())),
            (true, true) => merge_content(base, ours, theirs, budget)?,
        };
        let Some(content) = content else {
            self.conflict(path, "the content changed on both sides", Some(theirs));
            return Ok(());
        };
        let is_as_ours = matches!(&content, PathContent::Side(side) if side.inode == ours.inode);
        let now = attributes_of(ours)?;
        let same = (attributes.mode, attributes.uid, attributes.gid)
            == (now.mode, now.uid, now.gid)
            && attributes.xattrs == now.xattrs;
        if is_as_ours && same {
            return Ok(());
        }
        if let PathContent::Text(bytes, _) = &content {
            budget.hold(bytes.len())?;
            self.merged.insert(path.to_vec());
        }
        self.act(their, PathAction::Write { content, attributes });
        Ok(())
    }
}

fn attributes_of(side: &Side) -> Result<PathAttributes> {
    let dir = side.dir.open()?;
    let xattrs = if side.name.is_empty() { dir.own_xattrs()? } else { dir.xattrs(&side.name)? };
    Ok(PathAttributes {
        mode: side.mode,
        uid: side.uid,
        gid: side.gid,
        xattrs: shown_xattrs(xattrs),
    })
}

/// What each attribute becomes; `None` if one changed on both sides to different values.
fn merge_attributes(
    base: Option<&Side>,
    ours: &Side,
    theirs: &Side,
) -> Result<Option<PathAttributes>> {
    let base = base.map(attributes_of).transpose()?;
    let (ours, theirs) = (attributes_of(ours)?, attributes_of(theirs)?);
    let of = |get: &dyn Fn(&PathAttributes) -> u32| {
        pick(base.as_ref().map(get), get(&ours), get(&theirs))
    };
    let mode = of(&|one| one.mode);
    let (uid, gid) = (of(&|one| one.uid), of(&|one| one.gid));
    let xattrs = pick(base.map(|base| base.xattrs), ours.xattrs, theirs.xattrs);
    Ok(match (mode, uid, gid, xattrs) {
        (Some(mode), Some(uid), Some(gid), Some(xattrs)) => {
            Some(PathAttributes { mode, uid, gid, xattrs })
        }
        _ => None,
    })
}

/// The value that changed, or that both sides have.
fn pick<T: PartialEq>(base: Option<T>, ours: T, theirs: T) -> Option<T> {
    if ours == theirs || base.as_ref() == Some(&theirs) {
        return Some(ours);
    }
    (base.as_ref() == Some(&ours)).then_some(theirs)
}

/// Whether the lines of two texts can be compared in a short time: a merge has no deadline of its own.
fn is_soon_compared(base: &[u8], side: &[u8]) -> bool {
    let begun = Instant::now();
    TextDiff::configure().timeout(LONGEST_COMPARISON).diff_lines(base, side);
    begun.elapsed() < LONGEST_COMPARISON
}

/// The content of a path that both sides changed; `None` for a conflict.
fn merge_content(
    base: Option<&Side>,
    ours: &Side,
    theirs: &Side,
    budget: &Budget,
) -> Result<Option<PathContent>> {
    let name = &ours.name;
    let (our_dir, their_dir) = (ours.dir.open()?, theirs.dir.open()?);
    match ours.kind {
        FileType::Symlink => {
            let same = our_dir.link_target(name)? == their_dir.link_target(name)?;
            return Ok(same.then(|| PathContent::Side(ours.clone())));
        }
        FileType::RegularFile => {}
        FileType::CharacterDevice | FileType::BlockDevice => {
            let (one, other) = (our_dir.stat(name)?, their_dir.stat(name)?);
            let same = (one.stx_rdev_major, one.stx_rdev_minor)
                == (other.stx_rdev_major, other.stx_rdev_minor);
            return Ok(same.then(|| PathContent::Side(ours.clone())));
        }
        _ => return Ok(Some(PathContent::Side(ours.clone()))),
    }
    if ours.size == theirs.size {
        let (one, other) = (our_dir.open_file(name), their_dir.open_file(name));
        if super::content::same_content(one, other, || budget.time())? {
            return Ok(Some(PathContent::Side(ours.clone())));
        }
    }
    let Some(base) = base else { return Ok(None) };
    let read = |side: &Side| -> Result<Option<Vec<u8>>> {
        let bytes = read_whole(&side.dir.open()?.open_file(name)?, LARGEST_TEXT)?;
        let lines = |bytes: &[u8]| bytes.iter().filter(|byte| **byte == b'\n').count();
        Ok(bytes.filter(|bytes| is_text(bytes) && lines(bytes) <= MOST_LINES))
    };
    let (Some(base), Some(one), Some(other)) = (read(base)?, read(ours)?, read(theirs)?) else {
        return Ok(None);
    };
    if !is_soon_compared(&base, &one) || !is_soon_compared(&base, &other) {
        return Ok(None);
    }
    let merge = TextMerge::from_lines(&base[..], &one[..], &other[..]);
    if merge.is_conflicted() {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    merge.to_writer(&mut bytes).map_err(|source| StoreError::Io {
        action: "merge",
        path: "the lines of a file".into(),
        source,
    })?;
    Ok(Some(PathContent::Text(bytes, theirs.clone())))
}
