//! Searches what a session wrote for secret values before it is sealed.
//!
//! All of an open layer is searched: names, contents, what links say, attributes, and what is inside
//! archives ([`inside`]). The tree is untrusted: it is walked like every other (`tree`), no link is
//! followed, special files are not opened, and while the session still runs anything may vanish or
//! change under the search.
//!
//! A search of a running session can be made use of by the one after its end: [`SearchedFiles`] remembers which
//! files were searched, by inode and change time, as copies of a live layer do (`live`), and for the same
//! reasons only those that had not changed since before a sync with which the search began.

mod inside;
mod mask;
mod memory;
mod needles;
mod scan;

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::ffi::CString;
use std::io::{self, Read};
use std::os::fd::OwnedFd;

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use rustix::fs::{FileType, SeekFrom, Statx};
use rustix::io::Errno;

use self::inside::{Container, FileSearch, HEAD};
use self::scan::NeedleScan;
use super::background::{Effort, with_effort};
use super::tree::{Dir, TreeDir, file_type, stat_of, xattrs_of};
use super::walk::{vanished, visit};
use super::{Result, Store};
use crate::model::{Encoding, LayerId, Place, Timestamp};

pub(super) use mask::parent;
pub use memory::InMemory;
pub use needles::Needles;

/// How long before a sync a change may lie and still be in doubt: twice the slowest kernel tick.
const TICK: i64 = 20_000_000;
/// How many files one thread takes at a time.
const BATCH: usize = 64;

/// What a search came to.
#[derive(Debug, Default)]
pub struct Searched {
    /// What was found, sorted by path.
    pub finds: Vec<Match>,
    /// How many files were read.
    pub files: u64,
    /// How much was read of them.
    pub bytes: u64,
    /// What need not be searched again.
    pub seen: SearchedFiles,
}

/// Something in one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    /// The path from the layer's root, without a leading slash.
    pub path: Vec<u8>,
    /// How large the file is.
    pub size: u64,
    /// When it last changed.
    pub changed: Timestamp,
    /// What it is.
    pub what: MatchKind,
}

/// What was found in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MatchKind {
    /// A value.
    Secret {
        /// The secret's name.
        name: String,
        /// Where.
        place: Place,
        /// How it is written.
        encoding: Encoding,
        /// How far into the contents or the member.
        offset: Option<u64>,
        /// The attribute, or the archive's member.
        within: Option<Vec<u8>>,
        /// Whether it can be overwritten where it is.
        maskable: bool,
    },
    /// It was not searched to its end.
    Unsearched {
        /// The archive's member, if it is one.
        within: Option<Vec<u8>>,
        /// Why.
        reason: String,
    },
}

/// What was searched, by inode: the change time it had.
#[derive(Debug, Default)]
pub struct SearchedFiles(HashMap<u64, (i64, u32)>);

/// Whether the session still runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writers {
    /// Nothing writes: an unreadable file is an error.
    None,
    /// What vanishes meanwhile is passed over.
    Busy,
}

impl Store {
    /// Searches an open layer. What `before` has seen, and has not changed since, is not read again.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`](super::StoreError::Io) when something cannot be read: what was not searched must not pass
    /// for clean.
    pub async fn search(
        &self,
        open: &LayerId,
        needles: &std::sync::Arc<Needles>,
        writers: Writers,
        effort: Effort,
        before: SearchedFiles,
    ) -> Result<Searched> {
        let (store, diff, needles) =
            (self.clone(), self.diff_dir(open), std::sync::Arc::clone(needles));
        with_effort(effort, move || {
            let trusted = match writers {
                Writers::Busy => {
                    let began = Timestamp::now();
                    store.sync_now()?;
                    Some(began)
                }
                Writers::None => None,
            };
            search_tree(&diff, &needles, writers, &before, trusted)
        })
        .await
    }
}

enum SearchItem {
    Dir(TreeDir),
    Files(Dir, Vec<CString>),
}

struct Walk<'a> {
    needles: &'a Needles,
    writers: Writers,
    before: &'a SearchedFiles,
    /// Files that changed before this may be remembered.
    trusted: Option<Timestamp>,
    finds: Mutex<Vec<Match>>,
    /// Inodes something was found in: they are looked at again, whatever was decided about them.
    stained: Mutex<HashSet<u64>>,
    seen: Mutex<SearchedFiles>,
    files: AtomicU64,
    bytes: AtomicU64,
    /// Buffers that no thread is using.
    scans: Mutex<Vec<NeedleScan<'a>>>,
}

/// Searches the tree under `root`.
fn search_tree(
    root: &std::path::Path,
    needles: &Needles,
    writers: Writers,
    before: &SearchedFiles,
    trusted: Option<Timestamp>,
) -> Result<Searched> {
    let walk = Walk {
        needles,
        writers,
        before,
        trusted,
        finds: Mutex::default(),
        stained: Mutex::default(),
        seen: Mutex::default(),
        files: AtomicU64::new(0),
        bytes: AtomicU64::new(0),
        scans: Mutex::default(),
    };
    visit(SearchItem::Dir(TreeDir::root(root)?), |item, more| match item {
        SearchItem::Dir(place) => walk.forgive(walk.dir(&place, more)),
        SearchItem::Files(dir, names) => {
            let mut scan = walk.scans.lock().pop().unwrap_or_else(|| NeedleScan::new(needles));
            for name in &names {
                walk.forgive(walk.file(&dir, name, &mut scan))?;
            }
            walk.scans.lock().push(scan);
            Ok(())
        }
    })?;
    let mut finds = walk.finds.into_inner();
    finds.sort_by(|a, b| a.path.cmp(&b.path));
    let mut seen = walk.seen.into_inner();
    for inode in walk.stained.lock().iter() {
        seen.0.remove(inode);
    }
    Ok(Searched { finds, files: walk.files.into_inner(), bytes: walk.bytes.into_inner(), seen })
}

impl Walk<'_> {
    /// What vanished under a session that runs is no error: its next name is listed, or it is gone.
    fn forgive(&self, outcome: Result<()>) -> Result<()> {
        match outcome {
            Err(error) if self.writers == Writers::Busy && vanished(&error) => Ok(()),
            outcome => outcome,
        }
    }

    fn dir(&self, place: &TreeDir, more: &mut Vec<SearchItem>) -> Result<()> {
        let dir = place.open()?;
        let stat = dir.own_stat()?;
        if !self.is_known(&stat) {
            let found = Finder { walk: self, path: place.path(), stat: &stat, container: false };
            found.in_attributes(dir.own_xattrs()?);
            self.remember(&stat);
        }
        let opaque = dir.opaque()?;
        let mut batch = Vec::new();
        for entry in dir.entries()? {
            let path = dir.path_of(&entry.name);
            self.name(&dir, &entry.name, &path, opaque)?;
            match entry.kind {
                FileType::Directory => more.push(SearchItem::Dir(dir.child(&entry.name))),
                FileType::RegularFile | FileType::Symlink | FileType::Unknown => {
                    batch.push(entry.name);
                }
                _ => {}
            }
            if batch.len() == BATCH {
                more.push(SearchItem::Files(dir.clone(), std::mem::take(&mut batch)));
            }
        }
        if !batch.is_empty() {
            more.push(SearchItem::Files(dir, batch));
        }
        Ok(())
    }

    /// Searches a name. A value may stretch over several names of a path; it counts where it ends.
    fn name(
        &self,
        dir: &Dir,
        name: &CString,
        path: &[u8],
        opaque: super::tree::Opaque,
    ) -> Result<()> {
        let last = path.len() - name.as_bytes().len();
        let mut hits = Vec::new();
        self.needles.find(path, 0..path.len(), |hit| {
            if hit.runs.last().is_some_and(|run| run.end > last) {
                hits.push(hit);
            }
        });
        if hits.is_empty() {
            return Ok(());
        }
        let stat = dir.stat(name)?;
        // What was deleted has its name in the layer, and is not what the session wrote.
        if dir.is_whiteout(name, &stat, opaque)? {
            return Ok(());
        }
        let found = Finder { walk: self, path: path.to_vec(), stat: &stat, container: false };
        for hit in hits {
            found.add(hit.secret, hit.encoding, Place::Name, None, None);
        }
        Ok(())
    }

    fn file(&self, dir: &Dir, name: &CString, scan: &mut NeedleScan<'_>) -> Result<()> {
        let listed = dir.stat(name)?;
        if self.is_known(&listed) {
            return Ok(());
        }
        let path = dir.path_of(name);
        match file_type(&listed) {
            FileType::Symlink => {
                let target = dir.link_target(name)?;
                let found = Finder { walk: self, path, stat: &listed, container: false };
                let text = target.as_bytes();
                self.needles.find(text, 0..text.len(), |hit| {
                    found.add(hit.secret, hit.encoding, Place::Link, None, None);
                });
                self.remember(&listed);
                Ok(())
            }
            FileType::RegularFile => {
                let file = dir.open_file(name)?;
                let failed = |error| dir.failure("search", name, error);
                let stat = stat_of(&file).map_err(failed)?;
                // It may have become something else since it was listed.
                if file_type(&stat) != FileType::RegularFile {
                    return Ok(());
                }
                let container = self
                    .contents(&file, &stat, &path, scan)
                    .map_err(|error| failed(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
                let found = Finder { walk: self, path, stat: &stat, container };
                found.in_attributes(xattrs_of(&file).map_err(failed)?);
                self.remember(&stat);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Searches a file, and what is inside it; returns whether it is an archive.
    fn contents(
        &self,
        file: &OwnedFd,
        stat: &Statx,
        path: &[u8],
        scan: &mut NeedleScan<'_>,
    ) -> io::Result<bool> {
        self.files.fetch_add(1, Ordering::Relaxed);
        let mut head = [0; HEAD];
        let got = rustix::io::pread(file, &mut head, 0)?;
        if got == 0 {
            return Ok(false);
        }
        let kind = Container::of(&head[..got]);
        let found = Finder { walk: self, path: path.to_vec(), stat, container: kind.is_some() };
        let mut first: Vec<usize> = Vec::new();
        let mut keep = |one: scan::ScanMatch| {
            // One place of it in a file is enough for a report.
            if !first.contains(&one.hit.secret) {
                first.push(one.hit.secret);
                let offset = Some(one.offset());
                found.add(one.hit.secret, one.hit.encoding, Place::Contents, offset, None);
            }
            first.len() == self.needles.count()
        };
        let bytes = scan_file(file, stat, scan, &mut keep)?;
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        if let Some(kind) = kind {
            let mut look = FileSearch::new(self.needles, stat.stx_size);
            look.open(kind, &mut FromStart { file, at: 0 })?;
            for one in look.found {
                let (offset, within) = (Some(one.offset), Some(one.member));
                found.add(one.secret, one.encoding, Place::Member, offset, within);
            }
            for (member, reason) in look.missed {
                let within = Some(member).filter(|member| !member.is_empty());
                found.push(MatchKind::Unsearched { within, reason });
            }
        }
        Ok(kind.is_some())
    }

    fn is_known(&self, stat: &Statx) -> bool {
        self.before.0.get(&stat.stx_ino) == Some(&changed(stat))
    }

    fn remember(&self, stat: &Statx) {
        let Some(trusted) = self.trusted else { return };
        let (seconds, nanos) = changed(stat);
        let Ok(at) = Timestamp::new(seconds, i32::try_from(nanos).unwrap_or(0)) else { return };
        if at.as_nanosecond() + i128::from(TICK) < trusted.as_nanosecond() {
            self.seen.lock().0.insert(stat.stx_ino, (seconds, nanos));
        }
    }
}

/// Searches what is not a hole of a file, until `keep` has had enough. Returns how much was read.
fn scan_file(
    file: &OwnedFd,
    stat: &Statx,
    scan: &mut NeedleScan<'_>,
    keep: &mut dyn FnMut(scan::ScanMatch) -> bool,
) -> io::Result<u64> {
    let sparse = stat.stx_blocks * 512 < stat.stx_size;
    let (mut at, mut bytes) = (0, 0);
    let enough = Cell::new(false);
    let mut found = |one| enough.set(enough.get() | keep(one));
    while !enough.get() {
        let mut end = u64::MAX;
        if sparse {
            at = match rustix::fs::seek(file, SeekFrom::Data(at)) {
                Ok(data) => data,
                // Nothing but a hole is left.
                Err(Errno::NXIO) => break,
                Err(error) => return Err(error.into()),
            };
            end = rustix::fs::seek(file, SeekFrom::Hole(at))?;
        }
        scan.restart(at);
        while at < end && !enough.get() {
            let most = usize::try_from(end - at).unwrap_or(usize::MAX);
            let read = |room: &mut [u8]| {
                let most = most.min(room.len());
                Ok(rustix::io::pread(file, &mut room[..most], at)?)
            };
            let got = scan.fill(read, &mut found)? as u64;
            (at, bytes) = (at + got, bytes + got);
            if got == 0 {
                break;
            }
        }
        scan.finish(&mut found);
        if !sparse {
            break;
        }
    }
    Ok(bytes)
}

/// A file read from its beginning, whatever others do with its position.
struct FromStart<'a> {
    file: &'a OwnedFd,
    at: u64,
}

impl Read for FromStart<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = rustix::io::pread(self.file, buffer, self.at)?;
        self.at += got as u64;
        Ok(got)
    }
}

/// Puts what is found in one file on the list.
struct Finder<'a, 'w> {
    walk: &'a Walk<'w>,
    path: Vec<u8>,
    stat: &'a Statx,
    container: bool,
}

impl Finder<'_, '_> {
    fn in_attributes(&self, attributes: super::tree::Xattrs) {
        for (key, value) in attributes {
            for text in [key.as_bytes(), &value] {
                self.walk.needles.find(text, 0..text.len(), |hit| {
                    let within = Some(self.walk.needles.mask(key.as_bytes()));
                    self.add(hit.secret, hit.encoding, Place::Attribute, None, within);
                });
            }
        }
    }

    fn add(
        &self,
        secret: usize,
        encoding: Encoding,
        place: Place,
        offset: Option<u64>,
        within: Option<Vec<u8>>,
    ) {
        let name = self.walk.needles.name(secret).to_owned();
        let maskable = place != Place::Member && !(self.container && place == Place::Contents);
        self.push(MatchKind::Secret { name, place, encoding, offset, within, maskable });
    }

    fn push(&self, what: MatchKind) {
        let (seconds, nanos) = changed(self.stat);
        let changed = Timestamp::new(seconds, i32::try_from(nanos).unwrap_or(0));
        let find = Match {
            path: self.path.clone(),
            size: self.stat.stx_size,
            changed: changed.unwrap_or(Timestamp::UNIX_EPOCH),
            what,
        };
        self.walk.stained.lock().insert(self.stat.stx_ino);
        let mut finds = self.walk.finds.lock();
        // A value that is found by several pieces of a form is one find.
        if !finds.iter().rev().take(16).any(|known| *known == find) {
            finds.push(find);
        }
    }
}

fn changed(stat: &Statx) -> (i64, u32) {
    (stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec)
}

#[cfg(test)]
mod tests;
