//! The layers below an upper directory.

use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::io::Errno;

use crate::index::Kind;
use crate::walk::mark;

/// Marks a directory that hides what lies below it.
pub(crate) const OPAQUE: &CStr = c"user.overlay.opaque";
/// Marks an empty file that stands for a deletion.
const WHITEOUT: &CStr = c"user.overlay.whiteout";

/// The layers below an upper directory, topmost first.
#[derive(Debug)]
pub struct Lower {
    layers: Vec<OwnedFd>,
}

/// The layers that have a directory at some path, topmost first. Empty where nothing lies below.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Below(Vec<u16>);

impl Below {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// What lies below at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    Nothing,
    /// A directory, with its mode and owner.
    Dir(u64),
    Other,
}

impl Lower {
    /// Opens the layers at these paths.
    ///
    /// # Errors
    ///
    /// Returns the error of the first one that cannot be opened.
    pub fn open<P: AsRef<Path>>(layers: &[P]) -> Result<Self, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = |layer: &P| rustix::fs::openat(CWD, layer.as_ref(), flags, Mode::empty());
        Ok(Self { layers: layers.iter().map(open).collect::<Result<_, _>>()? })
    }

    /// Takes over layers that are open.
    #[must_use]
    pub fn new(layers: Vec<OwnedFd>) -> Self {
        Self { layers }
    }

    /// All layers: what lies below the root.
    pub(crate) fn root(&self) -> Below {
        Below((0..self.layers.len()).filter_map(|number| u16::try_from(number).ok()).collect())
    }

    /// What lies below `path`, whose directory has `below`.
    pub(crate) fn find(&self, below: &Below, path: &[u8]) -> Found {
        for number in &below.0 {
            match self.kind(*number, path) {
                None => {}
                Some(Layered::Whiteout) => return Found::Nothing,
                Some(Layered::Dir(mark)) => return Found::Dir(mark),
                Some(Layered::Other) => return Found::Other,
            }
        }
        Found::Nothing
    }

    /// The layers that have a directory at `path`, whose own directory has `below`.
    pub(crate) fn descend(&self, below: &Below, path: &[u8]) -> Below {
        let mut here = Vec::new();
        for number in &below.0 {
            match self.kind(*number, path) {
                None => {}
                Some(Layered::Dir(_)) => {
                    here.push(*number);
                    if self.open_dir(*number, path).is_some_and(|dir| is_opaque(&dir)) {
                        break;
                    }
                }
                Some(Layered::Whiteout | Layered::Other) => break,
            }
        }
        Below(here)
    }

    /// The names below a directory as they look from above, sorted, each with whether it is a directory. `most` bounds their number.
    pub(crate) fn names(&self, below: &Below, path: &[u8], most: usize) -> Vec<(Vec<u8>, bool)> {
        let mut names: std::collections::BTreeMap<Vec<u8>, Option<bool>> = Default::default();
        for number in &below.0 {
            let Some(dir) = self.open_dir(*number, path) else { continue };
            let Ok(listing) = rustix::fs::Dir::read_from(&dir) else { continue };
            for entry in listing.flatten() {
                let name = entry.file_name().to_bytes();
                if matches!(name, b"." | b"..") || names.contains_key(name) {
                    continue;
                }
                if names.len() >= most {
                    break;
                }
                let shown = match entry.file_type() {
                    FileType::Directory => Some(true),
                    FileType::Symlink => Some(false),
                    _ => match self.kind(*number, &join(path, name)) {
                        Some(Layered::Dir(_)) => Some(true),
                        Some(Layered::Other) => Some(false),
                        Some(Layered::Whiteout) | None => None,
                    },
                };
                names.insert(name.to_vec(), shown);
            }
        }
        names.into_iter().filter_map(|(name, shown)| Some((name, shown?))).collect()
    }

    fn kind(&self, number: u16, path: &[u8]) -> Option<Layered> {
        let layer = self.layers.get(usize::from(number))?;
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
        let stat = rustix::fs::statx(layer, path, flags, StatxFlags::BASIC_STATS).ok()?;
        Some(match FileType::from_raw_mode(stat.stx_mode.into()) {
            FileType::Directory => Layered::Dir(mark(&stat, Kind::Dir)),
            FileType::CharacterDevice if (stat.stx_rdev_major, stat.stx_rdev_minor) == (0, 0) => {
                Layered::Whiteout
            }
            FileType::RegularFile
                if stat.stx_size == 0
                    && self.is_marked(layer, path)
                    && self.has_marked(layer, path) =>
            {
                Layered::Whiteout
            }
            _ => Layered::Other,
        })
    }

    fn is_marked(&self, layer: &OwnedFd, path: &[u8]) -> bool {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::openat(layer, path, flags, Mode::empty());
        file.is_ok_and(|file| rustix::fs::fgetxattr(file, WHITEOUT, &mut [0u8; 8][..]).is_ok())
    }

    /// Whether the directory of a path says that it has files which stand for deletions. A mark elsewhere means nothing.
    fn has_marked(&self, layer: &OwnedFd, path: &[u8]) -> bool {
        let end = path.iter().rposition(|byte| *byte == b'/');
        let dir = end.map_or(&b"."[..], |end| &path[..end]);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut value = [0u8; 8];
        rustix::fs::openat(layer, dir, flags, Mode::empty()).is_ok_and(|dir| {
            matches!(rustix::fs::fgetxattr(dir, OPAQUE, &mut value[..]), Ok(1) if value[0] == b'x')
        })
    }

    fn open_dir(&self, number: u16, path: &[u8]) -> Option<OwnedFd> {
        let layer = self.layers.get(usize::from(number))?;
        let path = if path.is_empty() { &b"."[..] } else { path };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        rustix::fs::openat2(layer, path, flags, Mode::empty(), resolve).ok()
    }
}

enum Layered {
    Whiteout,
    Dir(u64),
    Other,
}

pub(crate) fn is_opaque(dir: &OwnedFd) -> bool {
    let mut value = [0u8; 8];
    matches!(rustix::fs::fgetxattr(dir, OPAQUE, &mut value[..]), Ok(1) if value[0] == b'y')
}

pub(crate) fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let mut path = Vec::with_capacity(dir.len() + 1 + name.len());
    path.extend_from_slice(dir);
    if !dir.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    path
}
