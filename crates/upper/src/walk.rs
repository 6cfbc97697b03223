//! Walking an upper directory, and comparing it with an index on the way.

use std::cmp::Ordering::{Equal, Greater, Less};
use std::collections::HashMap;
use std::ffi::CStr;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags, Statx, StatxFlags};
use rustix::io::Errno;

use crate::changes::{ChangeKind, Changes};
use crate::index::{Entry, Index, Kind, Reader, compare};
use crate::lower::{Below, Found, Lower, is_opaque, join};

/// How many directories may be nested.
pub const MAX_DEPTH: usize = 200;
/// How many names of lower layers are counted at most when a directory was deleted.
const LOWER_NAMES: usize = 100_000;
/// How long the paths are together that are held to find out what was deleted.
const HELD_BYTES: usize = 32 << 20;
/// After how many names it checks whether to continue.
const ASK: u64 = 64;

/// What a look may cost.
pub struct Limits<'a> {
    /// How many names it visits at most.
    pub names: u64,
    /// Asked now and then. It may wait, to let others go first; false ends the look.
    pub go_on: &'a dyn Fn() -> bool,
}

/// A name that a look visits.
pub struct Visited<'a> {
    /// The directory it is in.
    pub dir: BorrowedFd<'a>,
    /// Its path from the upper directory, without a leading slash.
    pub path: &'a [u8],
    /// What it is; links are not followed.
    pub stat: &'a Statx,
}

/// What a look found.
#[derive(Debug)]
pub struct Look {
    /// The names, for the next look. Absent if there are too many.
    pub index: Option<Index>,
    /// What changed since the index before.
    pub changes: Changes,
    /// Whether everything was visited. Otherwise `changes` has the part that was.
    pub complete: bool,
    /// Whether a name vanished, or could not be read, before it was visited.
    pub skipped: bool,
}

/// Compares an upper directory with the index of the last look; with an empty one if it was empty then. `visitor` gets every
/// name on the way, a directory before what is in it.
///
/// Returns `None` if it was stopped.
///
/// # Errors
///
/// Returns the error of the upper directory itself. Below it, what cannot be read is skipped.
pub fn look(
    upper: BorrowedFd<'_>,
    lower: &Lower,
    before: &Index,
    limits: &Limits<'_>,
    visitor: &mut dyn FnMut(&Visited<'_>),
) -> Result<Option<Look>, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(upper, ".", flags, Mode::empty())?;
    let mut walk = Walk {
        upper,
        lower,
        old: Reader::new(before),
        index: Index::default(),
        changes: Changes::default(),
        complete: true,
        skipped: false,
        too_many: false,
        lower_names: 0,
    };
    walk.old.advance();
    let done = walk.all(root, limits, visitor)?;
    if !done {
        return Ok(None);
    }
    let Walk { mut index, changes, complete, skipped, too_many, .. } = walk;
    index.finish();
    let complete = complete && !too_many;
    Ok(Some(Look { index: (!too_many).then_some(index), changes, complete, skipped }))
}

struct Walk<'a> {
    upper: BorrowedFd<'a>,
    lower: &'a Lower,
    old: Reader<'a>,
    index: Index,
    changes: Changes,
    complete: bool,
    skipped: bool,
    too_many: bool,
    lower_names: usize,
}

/// A directory that is being visited.
struct Frame {
    dir: OwnedFd,
    path: Vec<u8>,
    names: DirNames,
    /// What it was at the last look; `None` if it was not in the upper directory.
    was: Option<Kind>,
    /// What lay below it at the last look, once somebody asked.
    below: Option<Below>,
}

/// Names of a directory that are still to be visited. All are in one piece of memory: there are very many.
struct DirNames {
    text: Vec<u8>,
    /// Where each name is, the next one last. It is followed by a zero.
    places: Vec<Range<u32>>,
}

impl DirNames {
    /// The next name, with the zero.
    fn next(&mut self) -> Option<Range<usize>> {
        let place = self.places.pop()?;
        Some(place.start as usize..place.end as usize + 1)
    }

    /// The name at a place that [`next`](Self::next) told.
    fn at(&self, place: Range<usize>) -> &CStr {
        CStr::from_bytes_with_nul(&self.text[place]).unwrap_or_default()
    }

    fn len(&self) -> usize {
        self.places.len()
    }
}

impl Walk<'_> {
    /// Visits everything. False if it was stopped.
    fn all(
        &mut self,
        root: OwnedFd,
        limits: &Limits<'_>,
        visitor: &mut dyn FnMut(&Visited<'_>),
    ) -> Result<bool, Errno> {
        let mut frames = vec![Frame::new(root, Vec::new(), Some(Kind::Dir), limits.names)?];
        frames[0].below = Some(self.lower.root());
        let mut visited = 0u64;
        let mut path = Vec::new();
        while let Some(frame) = frames.last_mut() {
            let Some(place) = frame.names.next() else {
                frames.pop();
                continue;
            };
            let name = frame.names.at(place);
            visited += 1;
            if visited.is_multiple_of(ASK) && !(limits.go_on)() {
                return Ok(false);
            }
            if visited > limits.names {
                self.too_many = true;
                return Ok(true);
            }
            let Some((stat, kind, dir)) = examine(&frame.dir, name) else {
                self.skipped = true;
                continue;
            };
            path.clear();
            path.extend_from_slice(&frame.path);
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(name.to_bytes());
            visitor(&Visited { dir: frame.dir.as_fd(), path: &path, stat: &stat });
            let was = self.meet(&mut frames, &path, &stat, kind);
            let Some(dir) = dir else { continue };
            if frames.len() > MAX_DEPTH {
                self.complete = false;
                continue;
            }
            // The names still to visit in the directories around it count, too.
            let waiting: usize = frames.iter().map(|frame| frame.names.len()).sum();
            let most = (limits.names + 1).saturating_sub(visited + waiting as u64);
            match Frame::new(dir, path.clone(), was, most) {
                Ok(frame) => frames.push(frame),
                Err(_) => self.complete = false,
            }
        }
        while self.old.entry().is_some() {
            self.vanished();
        }
        Ok(true)
    }

    /// Comes to a name and compares it with what it was, which is the answer.
    fn meet(
        &mut self,
        frames: &mut [Frame],
        path: &[u8],
        stat: &Statx,
        kind: Kind,
    ) -> Option<Kind> {
        let was = loop {
            let Some(old) = self.old.entry() else { break None };
            match compare(old.path, path) {
                Less => self.vanished(),
                Equal => {
                    let was = (old.kind, old.mark);
                    self.old.advance();
                    break Some(was);
                }
                Greater => break None,
            }
        };
        let bytes = if kind.is_dir() || kind == Kind::Whiteout { 0 } else { taken(stat) };
        let mark = mark(stat, kind);
        self.index.push(Entry { path, kind, mark, bytes });
        match was {
            None => self.appeared(frames, path, kind, mark, bytes),
            Some((old, before)) if old == kind => {
                if before != mark && kind != Kind::Whiteout {
                    self.changes.add(path, ChangeKind::Modified, kind.is_dir(), bytes);
                }
            }
            Some((old, before)) => {
                let change = match (old, kind) {
                    (_, Kind::Whiteout) => Some(ChangeKind::Deleted),
                    (Kind::Whiteout, _) => Some(ChangeKind::Created),
                    // Removed and made again.
                    (Kind::Dir, Kind::OpaqueDir) if before == mark => None,
                    _ => Some(ChangeKind::Modified),
                };
                if let Some(change) = change {
                    let is_dir = if kind == Kind::Whiteout { old } else { kind }.is_dir();
                    self.changes.add(path, change, is_dir, bytes);
                }
                if old == Kind::Dir {
                    let below = self.lower.descend(&below_parent(self.lower, frames), path);
                    self.lower_deleted(&below, path, kind.is_dir());
                }
            }
        }
        was.map(|(old, _)| old)
    }

    /// A name that was not in the upper directory at the last look.
    fn appeared(&mut self, frames: &mut [Frame], path: &[u8], kind: Kind, mark: u64, bytes: u64) {
        let below = below_parent(self.lower, frames);
        let found = self.lower.find(&below, path);
        let change = match (found, kind) {
            // Copied up to hold what changed in it, or removed and made again.
            (Found::Nothing, Kind::Whiteout) => None,
            (Found::Dir(lower), Kind::Dir | Kind::OpaqueDir) if lower == mark => None,
            (_, Kind::Whiteout) => Some(ChangeKind::Deleted),
            (Found::Nothing, _) => Some(ChangeKind::Created),
            _ => Some(ChangeKind::Modified),
        };
        if let Some(change) = change {
            let is_dir = match kind {
                Kind::Whiteout => matches!(found, Found::Dir(_)),
                kind => kind.is_dir(),
            };
            self.changes.add(path, change, is_dir, bytes);
        }
        if matches!(found, Found::Dir(_)) && kind != Kind::Dir {
            let below = self.lower.descend(&below, path);
            self.lower_deleted(&below, path, kind.is_dir());
        }
    }

    /// What lay below a directory is hidden now. It was deleted, but for what the upper directory has instead, and for what was
    /// hidden or copied up before. `is_dir`: there is a directory in its place.
    fn lower_deleted(&mut self, below: &Below, path: &[u8], is_dir: bool) {
        let Some(known) = self.below_in_old(path) else {
            self.complete = false;
            return;
        };
        let mut held = 0;
        let mut waiting = vec![(path.to_vec(), below.clone(), is_dir)];
        while let Some((at, below, is_dir)) = waiting.pop() {
            held -= at.len().min(held);
            let room = LOWER_NAMES.saturating_sub(self.lower_names);
            if room == 0 || held > HELD_BYTES {
                self.complete = false;
                return;
            }
            let names = self.lower.names(&below, &at, room);
            self.lower_names += names.len().max(1);
            for (name, lower_is_dir) in names {
                let path = join(&at, &name);
                let now = if is_dir { self.is_there(&path) } else { None };
                match known.get(&path) {
                    // Counted where it vanishes from the index. What lay below it is not in the index.
                    Some(Kind::Dir) => {}
                    Some(_) => continue,
                    None if now.is_none() => {
                        self.changes.add(&path, ChangeKind::Deleted, lower_is_dir, 0);
                    }
                    None => {}
                }
                if lower_is_dir {
                    let below = self.lower.descend(&below, &path);
                    held += path.len();
                    waiting.push((path, below, now == Some(FileType::Directory)));
                }
            }
        }
    }

    /// The names below `path` at the last look; `None` if there are too many. The walk has just come to `path`.
    fn below_in_old(&self, path: &[u8]) -> Option<HashMap<Vec<u8>, Kind>> {
        let mut reader = self.old.clone();
        let (mut known, mut held) = (HashMap::new(), 0);
        while let Some(entry) = reader.entry() {
            let below =
                entry.path.strip_prefix(path).is_some_and(|rest| rest.first() == Some(&b'/'));
            if !below {
                break;
            }
            held += entry.path.len() + 32;
            if held > HELD_BYTES {
                return None;
            }
            known.insert(entry.path.to_vec(), entry.kind);
            reader.advance();
        }
        Some(known)
    }

    /// What a path is in the upper directory now; `None` if it is not there.
    fn is_there(&self, path: &[u8]) -> Option<FileType> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let (dir, name) = match path.iter().rposition(|byte| *byte == b'/') {
            Some(at) => (&path[..at], &path[at + 1..]),
            None => (&b"."[..], path),
        };
        let dir = rustix::fs::openat2(self.upper, dir, flags, Mode::empty(), resolve).ok()?;
        let stat = stat(&dir, name)?;
        (!is_whiteout(&stat)).then(|| file_type(&stat))
    }

    /// The old index has a name that is not there any more.
    fn vanished(&mut self) {
        let Some(old) = self.old.entry() else { return };
        if old.kind != Kind::Whiteout {
            self.changes.add(old.path, ChangeKind::Deleted, old.kind.is_dir(), 0);
        }
        self.old.advance();
    }
}

/// What lay below the innermost directory at the last look.
fn below_parent(lower: &Lower, frames: &mut [Frame]) -> Below {
    let Some((frame, outer)) = frames.split_last_mut() else { return Below::default() };
    if let Some(known) = &frame.below {
        return known.clone();
    }
    let below = match frame.was {
        None | Some(Kind::Dir) => {
            let outer = below_parent(lower, outer);
            if outer.is_empty() { outer } else { lower.descend(&outer, &frame.path) }
        }
        Some(_) => Below::default(),
    };
    frame.below = Some(below.clone());
    below
}

impl Frame {
    fn new(dir: OwnedFd, path: Vec<u8>, was: Option<Kind>, most: u64) -> Result<Self, Errno> {
        let (mut text, mut places) = (Vec::new(), Vec::new());
        let mut buffer = [MaybeUninit::<u8>::uninit(); 32 << 10];
        let mut listing = RawDir::new(dir.as_fd(), &mut buffer);
        while let Some(entry) = listing.next() {
            let entry = entry?;
            let name = entry.file_name();
            if !matches!(name.to_bytes(), b"." | b"..") {
                let start = text.len();
                text.extend_from_slice(name.to_bytes_with_nul());
                let place = |at: usize| u32::try_from(at).map_err(|_| Errno::NOBUFS);
                places.push(place(start)?..place(text.len() - 1)?);
            }
            // More would not be visited anyway.
            if places.len() as u64 > most {
                break;
            }
        }
        let name = |place: &Range<u32>| &text[place.start as usize..place.end as usize];
        places.sort_unstable_by(|one, two| name(two).cmp(name(one)));
        let names = DirNames { text, places };
        Ok(Self { dir, path, names, was, below: None })
    }
}

/// What a name is, and the directory if it is one; `None` if it is gone.
fn examine(dir: &OwnedFd, name: &CStr) -> Option<(Statx, Kind, Option<OwnedFd>)> {
    let stat = stat(dir, name)?;
    Some(match file_type(&stat) {
        FileType::Directory => {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let inner = rustix::fs::openat(dir, name, flags, Mode::empty()).ok()?;
            let kind = if is_opaque(&inner) { Kind::OpaqueDir } else { Kind::Dir };
            (stat, kind, Some(inner))
        }
        FileType::RegularFile => (stat, Kind::File, None),
        FileType::Symlink => (stat, Kind::Symlink, None),
        _ if is_whiteout(&stat) => (stat, Kind::Whiteout, None),
        _ => (stat, Kind::Special, None),
    })
}

fn stat<P: rustix::path::Arg>(dir: &OwnedFd, name: P) -> Option<Statx> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(dir, name, flags, StatxFlags::BASIC_STATS).ok()
}

fn file_type(stat: &Statx) -> FileType {
    FileType::from_raw_mode(stat.stx_mode.into())
}

fn is_whiteout(stat: &Statx) -> bool {
    file_type(stat) == FileType::CharacterDevice
        && (stat.stx_rdev_major, stat.stx_rdev_minor) == (0, 0)
}

/// What a file takes: its size, or less if it has holes.
fn taken(stat: &Statx) -> u64 {
    stat.stx_size.min(stat.stx_blocks.saturating_mul(512))
}

/// What distinguishes one version of a name from another.
pub(crate) fn mark(stat: &Statx, kind: Kind) -> u64 {
    let mut hash = DefaultHasher::new();
    (stat.stx_mode, stat.stx_uid, stat.stx_gid).hash(&mut hash);
    // The times of a directory change with its contents, and overlayfs changes them too.
    if !kind.is_dir() {
        let changed = (stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec);
        (stat.stx_ino, changed, stat.stx_size).hash(&mut hash);
    }
    hash.finish()
}
