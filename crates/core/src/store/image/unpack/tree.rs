//! Writes into a directory without ever following a link out of it.
//!
//! Every name from an archive is walked one component at a time from the directory's own descriptor,
//! never following a link by itself. A symlink on the way is read and walked the same way, with the
//! directory as its root: `/etc` means the tree's own `etc`, and `..` ends at the top. So neither
//! `..`, nor absolute names, nor links planted by earlier entries reach anything outside.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::rc::Rc;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat, XattrFlags};
use rustix::io::Errno;

use super::super::attributes::{Attributes, open_dir};
use super::OPAQUE;

const MOST_LINKS: usize = 40;

/// A path from the top of the tree, with no links, dots or empty parts in it. One string and not a list of names: a tree can be
/// ten thousand directories deep, and every place has its path.
pub(super) type Resolved = Vec<u8>;

/// The tree.
pub(super) struct LayerTree {
    root: Rc<OwnedFd>,
    /// The last directory walked to: archives list a directory's files one after another.
    last: Option<(Vec<u8>, Rc<OwnedFd>, Resolved)>,
    /// Whether symlinks lead somewhere. Where they do not, no depth is too deep.
    links: bool,
}

/// A directory of the tree, open.
pub(super) struct ParentDir {
    pub(super) dir: Rc<OwnedFd>,
    pub(super) path: Resolved,
}

impl ParentDir {
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }
}

/// Decides what a directory looks like that must be made on the way.
pub(super) type Missing<'a> = &'a mut dyn FnMut(&[u8]) -> Attributes;

impl LayerTree {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(path, flags, Mode::empty())?;
        Ok(Self { root: Rc::new(root), last: None, links: true })
    }

    /// The same for an archive whose names lead through no link.
    pub(super) fn open_plain(path: &Path) -> io::Result<Self> {
        Ok(Self { links: false, ..Self::open(path)? })
    }

    /// The top.
    pub(super) fn top(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    /// Must be called when a directory or link was removed or made: what was walked may have moved.
    pub(super) fn forget(&mut self) {
        self.last = None;
    }

    /// Opens a directory, making what is missing on the way.
    pub(super) fn enter(&mut self, path: &[u8], missing: Missing<'_>) -> io::Result<ParentDir> {
        if let Some((last, dir, resolved)) = &self.last
            && last == path
        {
            return Ok(ParentDir { dir: Rc::clone(dir), path: resolved.clone() });
        }
        let place = self
            .walk(path, Some(missing))?
            .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?;
        self.last = Some((path.to_owned(), Rc::clone(&place.dir), place.path.clone()));
        Ok(place)
    }

    /// Opens a directory if it exists.
    pub(super) fn find(&mut self, path: &[u8]) -> io::Result<Option<ParentDir>> {
        let found = self.walk(path, None)?;
        if let Some(place) = found.as_ref().filter(|_| !self.links) {
            self.last = Some((path.to_owned(), Rc::clone(&place.dir), place.path.clone()));
        }
        Ok(found)
    }

    /// Where a walk begins, and what is left to walk: at the last directory where that is near and nothing leads elsewhere, so
    /// that a tree is walked in time that does not grow with the square of its depth.
    fn begin<'a>(&self, path: &'a [u8]) -> io::Result<(Rc<OwnedFd>, Resolved, &'a [u8])> {
        let top = || (Rc::clone(&self.root), Resolved::new(), path);
        let Some((_, dir, last)) = self.last.as_ref().filter(|_| !self.links) else {
            return Ok(top());
        };
        let same = common(last, path);
        let count =
            |path: &[u8]| path.split(|b| *b == b'/').filter(|part| !part.is_empty()).count();
        let (up, down) = (count(&last[same..]), count(&path[..same]));
        if up >= down {
            return Ok(top());
        }
        let mut at = Rc::clone(dir);
        for _ in 0..up {
            // No link leads here, and nothing else moves what is in the tree.
            at = Rc::new(open_dir(at.as_fd(), b"..")?);
        }
        Ok((at, path[..same].to_vec(), &path[same..]))
    }

    fn walk(&self, path: &[u8], mut missing: Option<Missing<'_>>) -> io::Result<Option<ParentDir>> {
        let (begin, mut resolved, path) = self.begin(path)?;
        let mut dirs = vec![begin];
        let mut todo: Vec<Vec<u8>> = parts(path);
        let mut links = 0;
        while let Some(name) = todo.pop() {
            if name == b".." {
                if dirs.len() > 1 {
                    dirs.pop();
                    let end = resolved.iter().rposition(|b| *b == b'/').unwrap_or(0);
                    resolved.truncate(end);
                }
                continue;
            }
            let here = Rc::clone(dirs.last().unwrap_or(&self.root));
            let opened = match open_dir(here.as_fd(), &name) {
                Ok(dir) => dir,
                Err(Errno::NOENT) => {
                    let Some(missing) = &mut missing else { return Ok(None) };
                    make_dir(here.as_fd(), &name, &missing(&joined(&resolved, &name)))?
                }
                Err(error @ (Errno::NOTDIR | Errno::LOOP)) if !self.links => {
                    return Err(error.into());
                }
                Err(Errno::NOTDIR | Errno::LOOP) => match read_link(here.as_fd(), &name)? {
                    Some(target) => {
                        links += 1;
                        if links > MOST_LINKS {
                            return Err(Errno::LOOP.into());
                        }
                        if target.starts_with(b"/") {
                            dirs.truncate(1);
                            resolved.clear();
                        }
                        todo.extend(parts(&target));
                        continue;
                    }
                    None if missing.is_none() => return Ok(None),
                    // What an earlier entry made is replaced by what this one needs.
                    None => self.replace_by_dir(here.as_fd(), &name)?,
                },
                Err(error) => return Err(error.into()),
            };
            if !self.links {
                // Nothing leads up again: no descriptor is needed but the last.
                dirs.clear();
            }
            dirs.push(Rc::new(opened));
            if !resolved.is_empty() {
                resolved.push(b'/');
            }
            resolved.extend_from_slice(&name);
        }
        Ok(dirs.pop().map(|dir| ParentDir { dir, path: resolved }))
    }

    /// Turns a file into a directory. If it was a whiteout, the directory hides what it hid.
    fn replace_by_dir(&self, parent: BorrowedFd<'_>, name: &[u8]) -> io::Result<OwnedFd> {
        let stat = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)?;
        rustix::fs::unlinkat(parent, name, AtFlags::empty())?;
        let dir = make_dir(parent, name, &Attributes::DIRECTORY)?;
        if is_whiteout(&stat) {
            hide_below(&dir)?;
        }
        Ok(dir)
    }
}

/// A name in a directory, as a path.
pub(super) fn joined(path: &[u8], name: &[u8]) -> Resolved {
    let mut all = Vec::with_capacity(path.len() + 1 + name.len());
    all.extend_from_slice(path);
    if !path.is_empty() {
        all.push(b'/');
    }
    all.extend_from_slice(name);
    all
}

/// How many bytes two paths begin with that are the same directories.
pub(super) fn common(a: &[u8], b: &[u8]) -> usize {
    let same = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let ends = |path: &[u8]| path.get(same).is_none_or(|next| *next == b'/');
    if ends(a) && ends(b) {
        return same;
    }
    a[..same].iter().rposition(|byte| *byte == b'/').unwrap_or(0)
}

/// What has this name in a directory.
pub(super) fn stat(dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<Option<Stat>> {
    match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Whether this is how overlayfs marks a name that is no more.
pub(super) fn is_whiteout(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode).is_char_device() && stat.st_rdev == 0
}

/// Marks a name as being no more.
pub(super) fn make_whiteout(dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<()> {
    Ok(rustix::fs::mknodat(dir, name, FileType::CharacterDevice, Mode::empty(), 0)?)
}

/// Marks a directory as hiding what is below it.
pub(super) fn hide_below(dir: &OwnedFd) -> io::Result<()> {
    Ok(rustix::fs::fsetxattr(dir, OPAQUE, b"y", XattrFlags::empty())?)
}

/// Makes and opens a directory.
pub(super) fn make_dir(
    parent: BorrowedFd<'_>,
    name: &[u8],
    attributes: &Attributes,
) -> io::Result<OwnedFd> {
    rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o700))?;
    let dir = open_dir(parent, name)?;
    attributes.give(&dir)?;
    Ok(dir)
}

/// Removes whatever has this name, with all that is in it.
pub(super) fn remove(parent: BorrowedFd<'_>, name: &[u8]) -> io::Result<()> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(error) => return Err(error.into()),
    }
    empty_out(open_dir(parent, name)?)?;
    Ok(rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR)?)
}

/// Removes what is in a directory. Level by level on a list of our own, because an archive can nest
/// deeper than the stack of a thread.
fn empty_out(dir: OwnedFd) -> io::Result<()> {
    let mut levels: Vec<(OwnedFd, Vec<u8>)> = vec![(dir, Vec::new())];
    while let Some((dir, _)) = levels.last() {
        let mut deeper = None;
        for entry in Dir::read_from(dir)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
                Ok(()) => {}
                Err(Errno::ISDIR | Errno::PERM) => {
                    deeper = Some((open_dir(dir.as_fd(), name)?, name.to_owned()));
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
        if let Some(level) = deeper {
            levels.push(level);
        } else if let Some((_, name)) = levels.pop()
            && let Some((parent, _)) = levels.last()
        {
            rustix::fs::unlinkat(parent, &name, AtFlags::REMOVEDIR)?;
        }
    }
    Ok(())
}

fn read_link(dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<Option<Vec<u8>>> {
    match rustix::fs::readlinkat(dir, name, Vec::new()) {
        Ok(target) => Ok(Some(target.into_bytes())),
        Err(Errno::INVAL) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The parts of a path that lead somewhere, the last first.
fn parts(path: &[u8]) -> Vec<Vec<u8>> {
    let leads = |part: &&[u8]| !part.is_empty() && *part != b".";
    path.split(|b| *b == b'/').filter(leads).rev().map(<[u8]>::to_vec).collect()
}
