//! Paths that changed, and how a long list of them becomes a short one.

use std::collections::BTreeMap;

use crate::index::compare;

/// What happened to a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ChangeKind {
    /// It was not there before.
    Created,
    /// It is another version: its content, its mode, its owner or its times.
    Modified,
    /// It is not there any more.
    Deleted,
}

/// A path that changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The path from the root of the sandbox, without a leading slash. Bytes: names need not be text.
    pub path: Vec<u8>,
    /// What happened to it.
    pub kind: ChangeKind,
    /// Whether it is, or was, a directory.
    pub dir: bool,
    /// What it takes on the disk; 0 for what was deleted.
    pub bytes: u64,
}

/// How many paths changed below a directory, of those that are not listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Under {
    /// The directory.
    pub path: Vec<u8>,
    /// How many were created.
    pub created: u64,
    /// How many were modified.
    pub modified: u64,
    /// How many were deleted.
    pub deleted: u64,
}

/// What changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// How many paths were created.
    pub created: u64,
    /// How many paths were modified.
    pub modified: u64,
    /// How many paths were deleted.
    pub deleted: u64,
    /// What the created and modified ones take on the disk.
    pub bytes: u64,
    /// The paths, or some of them.
    pub list: ChangeList,
}

impl Changes {
    /// Whether nothing changed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.created + self.modified + self.deleted == 0
    }

    pub(crate) fn add(&mut self, path: &[u8], kind: ChangeKind, dir: bool, bytes: u64) {
        match kind {
            ChangeKind::Created => self.created += 1,
            ChangeKind::Modified => self.modified += 1,
            ChangeKind::Deleted => self.deleted += 1,
        }
        self.bytes = self.bytes.saturating_add(bytes);
        self.list.add(path, kind, dir, bytes);
    }
}

/// How many paths are held while changes are collected, and how long they are together. Later ones are only counted by
/// directory.
const HELD: usize = 20_000;
const HELD_BYTES: usize = 4 << 20;
/// How many directories the rest is counted by.
const COUNTED: usize = 512;

/// Paths that changed: all of them, or some of them and how many more there are in which directories.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChangeList {
    /// Paths that are listed, sorted.
    pub paths: Vec<Change>,
    /// Where the others are, sorted.
    pub more: Vec<Under>,
    /// How long the paths were together when they were added.
    bytes: usize,
}

impl ChangeList {
    /// A list of these paths, and of where the others are.
    #[must_use]
    pub fn new(paths: Vec<Change>, more: Vec<Under>) -> Self {
        let bytes = paths.iter().map(|one| one.path.len()).sum();
        Self { paths, more, bytes }
    }

    /// How long the paths are together, those of the directories included.
    #[must_use]
    pub fn size(&self) -> usize {
        let paths = self.paths.iter().map(|one| one.path.len());
        paths.chain(self.more.iter().map(|one| one.path.len())).sum()
    }

    fn add(&mut self, path: &[u8], kind: ChangeKind, dir: bool, bytes: u64) {
        // Once one does not fit, none is held any more.
        let is_room = self.more.is_empty() && self.paths.len() < HELD;
        if is_room && self.bytes + path.len() <= HELD_BYTES {
            self.bytes += path.len();
            self.paths.push(Change { path: path.to_vec(), kind, dir, bytes });
            return;
        }
        // The directory, as deep as there is room for.
        let mut depth = 3;
        loop {
            let at = ancestor(path, depth);
            let room = self.more.len() < COUNTED || depth == 0;
            match self.more.iter_mut().rev().find(|under| under.path == at) {
                Some(under) => return under.count(kind, 1),
                None if room => {
                    let mut under = Under::new(at);
                    under.count(kind, 1);
                    return self.more.push(under);
                }
                None => depth -= 1,
            }
        }
    }

    /// Makes the list at most `most` paths long, with at most `bytes` bytes of text. Large directories are cut to a few paths
    /// each, so that a thousand files of one do not hide a single file of another.
    pub fn truncate_to(&mut self, most: usize, bytes: usize) {
        let mut most = most;
        self.truncate_paths(most);
        while self.size() > bytes && most > 0 {
            most /= 2;
            self.truncate_paths(most);
        }
        if self.size() > bytes {
            // Only directories are left, and they are nested deeply: those near the root stand for them.
            let all = std::mem::take(&mut self.more);
            for under in all {
                let mut depth = 3;
                let place = loop {
                    let at = ancestor(&under.path, depth);
                    match self.more.iter().position(|known| known.path == at) {
                        Some(place) => break place,
                        None if self.more.len() < COUNTED || depth == 0 => {
                            self.more.push(Under::new(at));
                            break self.more.len() - 1;
                        }
                        None => depth -= 1,
                    }
                };
                let known = &mut self.more[place];
                known.created += under.created;
                known.modified += under.modified;
                known.deleted += under.deleted;
            }
            self.more.sort_by(|one, two| compare(&one.path, &two.path));
        }
        self.bytes = self.paths.iter().map(|one| one.path.len()).sum();
    }

    fn truncate_paths(&mut self, most: usize) {
        self.paths.sort_by(|one, two| compare(&one.path, &two.path));
        let mut more: BTreeMap<Vec<u8>, Under> = BTreeMap::new();
        for under in self.more.drain(..) {
            more.insert(under.path.clone(), under);
        }
        if self.paths.len() > most {
            let paths = std::mem::take(&mut self.paths);
            let mut shortening = Shortening { kept: Vec::with_capacity(most), more };
            shortening.keep(&paths, 0, most);
            (self.paths, more) = (shortening.kept, shortening.more);
        }
        self.more = more.into_values().collect();
        self.more.sort_by(|one, two| compare(&one.path, &two.path));
    }
}

impl Under {
    fn new(path: &[u8]) -> Self {
        Self { path: path.to_vec(), created: 0, modified: 0, deleted: 0 }
    }

    fn count(&mut self, kind: ChangeKind, number: u64) {
        match kind {
            ChangeKind::Created => self.created += number,
            ChangeKind::Modified => self.modified += number,
            ChangeKind::Deleted => self.deleted += number,
        }
    }
}

struct Shortening {
    kept: Vec<Change>,
    more: BTreeMap<Vec<u8>, Under>,
}

impl Shortening {
    /// Keeps at most `room` of these sorted paths, which all are below the same directory, whose path has `prefix` bytes.
    fn keep(&mut self, paths: &[Change], prefix: usize, room: usize) {
        if paths.len() <= room {
            self.kept.extend_from_slice(paths);
            return;
        }
        let groups: Vec<&[Change]> = paths
            .chunk_by(|one, two| child(&one.path, prefix) == child(&two.path, prefix))
            .collect();
        // One directory and nothing beside it: what counts is inside.
        if let [only] = groups[..]
            && let Some(inner) = inner(only, prefix)
            && room > 0
        {
            let head = only.iter().take_while(|one| one.path.len() < inner).count();
            self.kept.extend_from_slice(&only[..head.min(room)]);
            return self.keep(&only[head..], inner, room.saturating_sub(head));
        }
        // The smallest first: each gets an equal share of what is left.
        let mut order: Vec<usize> = (0..groups.len()).collect();
        order.sort_by_key(|number| groups[*number].len());
        let mut shares = vec![0; groups.len()];
        let (mut left, mut waiting) = (room, groups.len());
        for number in order {
            let share = groups[number].len().min(left / waiting.max(1));
            shares[number] = share;
            left -= share;
            waiting -= 1;
        }
        for (group, share) in groups.into_iter().zip(shares) {
            match inner(group, prefix) {
                _ if group.len() <= share => self.kept.extend_from_slice(group),
                Some(inner) if share > 0 => {
                    // The directory itself, then what is in it.
                    let head = group.iter().take_while(|one| one.path.len() < inner).count();
                    self.kept.extend_from_slice(&group[..head.min(share)]);
                    self.keep(&group[head..], inner, share.saturating_sub(head));
                }
                _ => self.count(group, prefix),
            }
        }
    }

    /// Counts what is not listed, by the directory that the paths are below.
    fn count(&mut self, paths: &[Change], prefix: usize) {
        let place = |change: &Change| prefix.saturating_sub(1).min(change.path.len());
        for same in paths.chunk_by(|one, two| one.path[..place(one)] == two.path[..place(two)]) {
            let Some(first) = same.first() else { continue };
            let at = &first.path[..place(first)];
            let under = self.more.entry(at.to_vec()).or_insert_with(|| Under::new(at));
            same.iter().for_each(|change| under.count(change.kind, 1));
        }
    }
}

/// The name of a path below a directory whose path has `prefix` bytes, with the slash.
fn child(path: &[u8], prefix: usize) -> &[u8] {
    let rest = path.get(prefix..).unwrap_or_default();
    let end = rest.iter().position(|byte| *byte == b'/').unwrap_or(rest.len());
    &rest[..end]
}

/// How many bytes the common directory of a group has, with the slash; `None` if the group is one name.
fn inner(group: &[Change], prefix: usize) -> Option<usize> {
    let last = group.last()?;
    let name = child(&last.path, prefix).len();
    (last.path.len() > prefix + name).then_some(prefix + name + 1)
}

/// The first components of a path's directory.
fn ancestor(path: &[u8], depth: usize) -> &[u8] {
    let slashes = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
    slashes.take(depth).last().map_or(&path[..0], |at| &path[..at])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changes(paths: impl IntoIterator<Item = String>) -> Changes {
        let mut changes = Changes::default();
        for path in paths {
            changes.add(path.as_bytes(), ChangeKind::Created, false, 1);
        }
        changes
    }

    fn shown(list: &ChangeList) -> Vec<String> {
        let text = |path: &[u8]| String::from_utf8_lossy(path).into_owned();
        let paths = list.paths.iter().map(|change| text(&change.path));
        let more = list
            .more
            .iter()
            .map(|under| format!("{} more under {}/", under.created, text(&under.path)));
        paths.chain(more).collect()
    }

    fn total(list: &ChangeList) -> u64 {
        list.paths.len() as u64
            + list.more.iter().map(|one| one.created + one.modified + one.deleted).sum::<u64>()
    }

    #[test]
    fn a_large_directory_does_not_hide_a_small_one() {
        let many = (0..500).map(|n| format!("node_modules/p{}/f{n}.js", n % 7));
        let few = ["package.json", "src/main.ts"].map(str::to_owned);
        let mut changes = changes(many.chain(few));
        changes.list.truncate_to(12, 10_000);
        let shown = shown(&changes.list);
        assert!(changes.list.paths.len() <= 12, "{shown:?}");
        assert!(
            shown.contains(&"package.json".to_owned()) && shown.contains(&"src/main.ts".to_owned()),
            "{shown:?}"
        );
        assert_eq!(total(&changes.list), 502, "{shown:?}");
        assert!(
            shown.iter().any(|line| line.ends_with("more under node_modules/p3/")),
            "{shown:?}"
        );
    }

    #[test]
    fn nothing_is_counted_twice_and_nothing_gets_lost_however_many_there_are() {
        for (count, most) in [(0, 5), (3, 5), (5, 5), (40_000, 1000), (25_000, 1), (25_000, 0)] {
            let names = (0..count).map(|n| format!("a{}/b{}/c{}/d{n}", n % 3, n % 5, n % 7));
            let mut changes = changes(names);
            changes.list.truncate_to(most, 1 << 20);
            assert!(changes.list.paths.len() <= most);
            assert_eq!(total(&changes.list), count, "{count} in {most}");
            assert_eq!(changes.created, count);
            assert!(changes.list.more.len() <= COUNTED + most + 8);
        }
    }

    #[test]
    fn long_paths_take_a_bounded_amount_of_memory() {
        let deep =
            |n: usize| format!("{}/{n}/{}", "d".repeat(200), format!("{n:0200}/").repeat(100));
        let mut changes = changes((0..2_000).map(deep));
        assert!(changes.list.size() <= HELD_BYTES + COUNTED * 1_000, "{}", changes.list.size());
        assert_eq!(total(&changes.list), 2_000);
        changes.list.truncate_to(1_000, 100_000);
        assert!(changes.list.size() <= 100_000 + COUNTED * 1_000, "{}", changes.list.size());
        assert_eq!(total(&changes.list), 2_000, "none is lost");
        changes.list.truncate_to(1_000, 500);
        assert_eq!(total(&changes.list), 2_000);
    }

    #[test]
    fn a_directory_is_listed_before_what_is_in_it() {
        let mut changes = changes((0..30).map(|n| match n {
            0 => "new".to_owned(),
            n => format!("new/{n:02}"),
        }));
        changes.list.truncate_to(5, 1_000);
        assert_eq!(shown(&changes.list)[0], "new");
        assert_eq!(total(&changes.list), 30);
    }
}
