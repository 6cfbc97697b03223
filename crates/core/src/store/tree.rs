//! Walks and copies untrusted trees.
//!
//! A sandbox's root may give its files any name, make links to anywhere, and nest directories until a
//! path no longer fits a system call or a recursion the stack. So names are bytes, every call is
//! relative to an open directory, no link is followed, and walks keep their own stack. A [`TreeDir`] is
//! a directory that is not open: a path below an open *base*, which is renewed before the path grows
//! too long, so that neither depth nor width costs descriptors.

use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, RawDir, ResolveFlags, SeekFrom, Statx, StatxFlags,
    Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;
use rustix::path::Arg;

use super::path_text::as_path;
use super::{Result, StoreError};

/// How long the path below a base may grow: what fits a system call.
pub(super) const LONGEST: usize = 4000;

/// Marks a directory that hides what lies below it.
pub(super) const OPAQUE: &CStr = c"user.overlay.opaque";
/// Marks a file that stands for a deletion, in a directory whose [`OPAQUE`] is `x`.
const WHITEOUT: &CStr = c"user.overlay.whiteout";

/// A directory somewhere in a tree.
#[derive(Debug, Clone)]
pub(super) struct TreeDir {
    base: Arc<Base>,
    /// The path from the base; empty for the base itself.
    below: Vec<u8>,
}

#[derive(Debug)]
struct Base {
    fd: OwnedFd,
    /// The root of the tree on the host, for messages.
    root: PathBuf,
    /// The path from the root.
    path: Vec<u8>,
}

/// An open directory.
#[derive(Debug, Clone)]
pub(super) struct Dir {
    base: Arc<Base>,
    place: TreeDir,
}

/// What a directory lists.
#[derive(Debug, Clone)]
pub(super) struct DirEntry {
    pub(super) name: CString,
    pub(super) kind: FileType,
}

/// What a directory says about what lies below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Opaque {
    /// Nothing: it is merged with it.
    No,
    /// It is merged, and some of its files may be whiteouts.
    Whiteouts,
    /// It hides it.
    Yes,
}

/// Extended attributes, sorted by name.
pub(super) type Xattrs = Vec<(CString, Vec<u8>)>;

impl TreeDir {
    /// The root of a tree.
    pub(super) fn root(dir: &Path) -> Result<Self> {
        let fd = rustix::fs::open(dir, dir_flags(), Mode::empty())
            .map_err(|error| failure("open", dir.to_owned(), error))?;
        let base = Base { fd, root: dir.to_owned(), path: Vec::new() };
        Ok(Self { base: Arc::new(base), below: Vec::new() })
    }

    /// The directory this one is in; the root is in itself.
    pub(super) fn parent(&self) -> Self {
        let end = self.below.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
        Self { base: Arc::clone(&self.base), below: self.below[..end].to_vec() }
    }

    /// The path from the root, without a leading slash.
    pub(super) fn path(&self) -> Vec<u8> {
        join(&self.base.path, &self.below)
    }

    /// The directory at `path` below this one.
    pub(super) fn descend(&self, path: &[u8]) -> Result<Self> {
        if self.below.len() + path.len() < LONGEST {
            let below = join(&self.below, path);
            return Ok(Self { base: Arc::clone(&self.base), below });
        }
        let mut place = self.clone();
        for name in path.split(|byte| *byte == b'/') {
            let below = join(&place.below, name);
            place = if below.len() <= LONGEST {
                Self { below, ..place }
            } else {
                Self { base: place.open()?.base, below: name.to_vec() }
            };
        }
        Ok(place)
    }

    /// Opens the directory.
    pub(super) fn open(&self) -> Result<Dir> {
        let below = if self.below.is_empty() { &b"."[..] } else { &self.below };
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let fd =
            rustix::fs::openat2(&self.base.fd, as_path(below), dir_flags(), Mode::empty(), resolve)
                .map_err(|error| self.failure("open", error))?;
        let base = Base { fd, root: self.base.root.clone(), path: self.path() };
        Ok(Dir { base: Arc::new(base), place: self.clone() })
    }

    /// Removes the directory, which must be empty and not the root.
    pub(super) fn remove(&self) -> Result<()> {
        rustix::fs::unlinkat(&self.base.fd, as_path(&self.below), AtFlags::REMOVEDIR)
            .map_err(|error| self.failure("remove", error))
    }

    pub(super) fn failure(&self, action: &'static str, error: Errno) -> StoreError {
        failure(action, self.base.root.join(as_path(&self.path())), error)
    }
}

impl Dir {
    /// The directory `name` in this one.
    pub(super) fn child(&self, name: &CStr) -> TreeDir {
        let below = join(&self.place.below, name.to_bytes());
        if below.len() <= LONGEST {
            return TreeDir { base: Arc::clone(&self.place.base), below };
        }
        TreeDir { base: Arc::clone(&self.base), below: name.to_bytes().to_vec() }
    }

    /// The path from the root of the tree to this directory.
    pub(super) fn path(&self) -> &[u8] {
        &self.base.path
    }

    /// The path from the root of the tree to `name` in this directory.
    pub(super) fn path_of(&self, name: &CStr) -> Vec<u8> {
        join(&self.base.path, name.to_bytes())
    }

    pub(super) fn fd(&self) -> &OwnedFd {
        &self.base.fd
    }

    /// Where it is.
    pub(super) fn place(&self) -> &TreeDir {
        &self.place
    }

    /// Calls `each` with every name but `.` and `..`.
    pub(super) fn for_each(
        &self,
        mut each: impl FnMut(&CStr, FileType) -> Result<()>,
    ) -> Result<()> {
        let mut buffer = [MaybeUninit::<u8>::uninit(); 32 << 10];
        let mut listing = RawDir::new(self.fd(), &mut buffer);
        while let Some(entry) = listing.next() {
            let entry = entry.map_err(|error| self.place.failure("list", error))?;
            let name = entry.file_name();
            if !matches!(name.to_bytes(), b"." | b"..") {
                each(name, entry.file_type())?;
            }
        }
        Ok(())
    }

    /// What is in it, sorted by name.
    pub(super) fn entries(&self) -> Result<Vec<DirEntry>> {
        let mut entries = Vec::new();
        self.for_each(|name, kind| {
            entries.push(DirEntry { name: name.to_owned(), kind });
            Ok(())
        })?;
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// What `name` is; links are not followed.
    pub(super) fn stat(&self, name: &CStr) -> Result<Statx> {
        super::background::step();
        super::background::check()?;
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
        rustix::fs::statx(self.fd(), name, flags, StatxFlags::BASIC_STATS)
            .map_err(|error| self.failure("stat", name, error))
    }

    /// What `name` is, if it exists; links are not followed.
    pub(super) fn stat_if_there(&self, name: &CStr) -> Result<Option<Statx>> {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
        match rustix::fs::statx(self.fd(), name, flags, StatxFlags::BASIC_STATS) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(self.failure("stat", name, error)),
        }
    }

    /// What the directory itself is.
    pub(super) fn own_stat(&self) -> Result<Statx> {
        rustix::fs::statx(self.fd(), c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
            .map_err(|error| self.place.failure("stat", error))
    }

    /// Whether it hides what lies below it.
    pub(super) fn opaque(&self) -> Result<Opaque> {
        let mut value = [0u8; 8];
        match rustix::fs::fgetxattr(self.fd(), OPAQUE, &mut value[..]) {
            Ok(1) if value[0] == b'y' => Ok(Opaque::Yes),
            Ok(1) if value[0] == b'x' => Ok(Opaque::Whiteouts),
            Ok(_) | Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::RANGE) => Ok(Opaque::No),
            Err(error) => Err(self.place.failure("read the attributes of", error)),
        }
    }

    /// Whether `name` stands for a deletion.
    pub(super) fn is_whiteout(&self, name: &CStr, stat: &Statx, opaque: Opaque) -> Result<bool> {
        match file_type(stat) {
            FileType::CharacterDevice => Ok(stat.stx_rdev_major == 0 && stat.stx_rdev_minor == 0),
            FileType::RegularFile if opaque == Opaque::Whiteouts && stat.stx_size == 0 => {
                let xattrs = self.xattrs(name)?;
                Ok(xattrs.iter().any(|(key, _)| key.as_c_str() == WHITEOUT))
            }
            _ => Ok(false),
        }
    }

    /// The extended attributes of `name`, sorted; links are not followed.
    pub(super) fn xattrs(&self, name: &CStr) -> Result<Xattrs> {
        read_xattrs(&self.proc_path(name))
            .map_err(|error| self.failure("read the attributes of", name, error))
    }

    /// The directory's own extended attributes, sorted.
    pub(super) fn own_xattrs(&self) -> Result<Xattrs> {
        read_xattrs(&self.proc_path(c"."))
            .map_err(|error| self.place.failure("read the attributes of", error))
    }

    /// A path to `name` for the calls that have no variant relative to a directory.
    fn proc_path(&self, name: &CStr) -> CString {
        let mut path = format!("/proc/self/fd/{}/", self.fd().as_raw_fd()).into_bytes();
        path.extend_from_slice(name.to_bytes());
        // A name from a directory has no NUL byte, and the prefix has none.
        CString::new(path).unwrap_or_default()
    }

    pub(super) fn failure(&self, action: &'static str, name: &CStr, error: Errno) -> StoreError {
        failure(action, self.base.root.join(as_path(&self.path_of(name))), error)
    }

    /// What a symbolic link says.
    pub(super) fn link_target(&self, name: &CStr) -> Result<CString> {
        rustix::fs::readlinkat(self.fd(), name, Vec::new())
            .map_err(|error| self.failure("read the link", name, error))
    }

    /// Opens a regular file for reading.
    pub(super) fn open_file(&self, name: &CStr) -> Result<OwnedFd> {
        open_file(self.fd().as_fd(), name).map_err(|error| self.failure("open", name, error))
    }

    /// Opens a regular file to change its contents.
    pub(super) fn open_to_change(&self, name: &CStr) -> Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        rustix::fs::openat(self.fd(), name, flags, Mode::empty())
            .map_err(|error| self.failure("open", name, error))
    }

    /// Gives `name` the place `new` in `to`, where nothing may be.
    pub(super) fn move_to(&self, name: &CStr, to: &Dir, new: &CStr) -> Result<()> {
        let flags = rustix::fs::RenameFlags::NOREPLACE;
        rustix::fs::renameat_with(self.fd(), name, to.fd(), new, flags)
            .map_err(|error| self.failure("move", name, error))
    }

    /// Sets or, without a value, removes an attribute.
    pub(super) fn set_xattr(&self, name: &CStr, key: &CStr, value: Option<&[u8]>) -> Result<()> {
        let path = self.proc_path(name);
        match value {
            Some(value) => rustix::fs::lsetxattr(&path, key, value, XattrFlags::empty()),
            None => rustix::fs::lremovexattr(&path, key),
        }
        .map_err(|error| self.failure("change the attributes of", name, error))
    }

    /// Makes the link `name` say something else, and leaves all else of it.
    pub(super) fn relink(&self, name: &CStr, target: &[u8]) -> Result<()> {
        let (stat, xattrs) = (self.stat(name)?, self.xattrs(name)?);
        self.remove_name(name)?;
        rustix::fs::symlinkat(target, self.fd(), name)
            .map_err(|error| self.failure("create the link", name, error))?;
        self.set_attributes(name, &stat, &xattrs)
    }

    /// Makes a directory to be filled; [`Dir::finish`] gives it its attributes.
    pub(super) fn make_dir(&self, name: &CStr) -> Result<TreeDir> {
        rustix::fs::mkdirat(self.fd(), name, Mode::RWXU)
            .map_err(|error| self.failure("create", name, error))?;
        Ok(self.child(name))
    }

    /// Makes a whiteout.
    pub(super) fn make_whiteout(&self, name: &CStr) -> Result<()> {
        rustix::fs::mknodat(self.fd(), name, FileType::CharacterDevice, Mode::empty(), 0)
            .map_err(|error| self.failure("create the whiteout", name, error))
    }

    /// Removes a name that is not a directory's, if it exists.
    pub(super) fn remove_name(&self, name: &CStr) -> Result<()> {
        match rustix::fs::unlinkat(self.fd(), name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(self.failure("remove", name, error)),
        }
    }

    /// Makes `name` another name of the file `from` has under `old`.
    pub(super) fn link_from(&self, name: &CStr, from: &Dir, old: &CStr) -> Result<(), Errno> {
        rustix::fs::linkat(from.fd(), old, self.fd(), name, AtFlags::empty())
    }

    /// Copies anything but a directory, with all that can be copied.
    pub(super) fn copy_from(&self, name: &CStr, from: &Dir, stat: &Statx) -> Result<()> {
        let xattrs = from.xattrs(name)?;
        self.copy_data(name, from, name, stat)?;
        self.set_attributes(name, stat, &xattrs)
    }

    /// Copies the content of anything but a directory, and none of its attributes.
    pub(super) fn copy_data(
        &self,
        name: &CStr,
        from: &Dir,
        old: &CStr,
        stat: &Statx,
    ) -> Result<()> {
        let failed = |action| move |error| self.failure(action, name, error);
        match file_type(stat) {
            FileType::RegularFile => {
                let source = from.open_file(old)?;
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let target = rustix::fs::openat(self.fd(), name, flags, Mode::RUSR | Mode::WUSR)
                    .map_err(failed("create"))?;
                copy_content(&source, &target, stat).map_err(failed("copy"))
            }
            FileType::Symlink => {
                let target = from.link_target(old)?;
                rustix::fs::symlinkat(target.as_c_str(), self.fd(), name)
                    .map_err(failed("create the link"))
            }
            kind => {
                let device = rustix::fs::makedev(stat.stx_rdev_major, stat.stx_rdev_minor);
                rustix::fs::mknodat(self.fd(), name, kind, Mode::empty(), device)
                    .map_err(failed("create"))
            }
        }
    }

    /// Gives `name` owner, mode, attributes and times. The order matters: a change of owner clears
    /// the setuid bit and capabilities, and any change moves the times.
    pub(super) fn set_attributes(&self, name: &CStr, stat: &Statx, xattrs: &Xattrs) -> Result<()> {
        let failed = |action| move |error| self.failure(action, name, error);
        let (uid, gid) = (Uid::from_raw(stat.stx_uid), Gid::from_raw(stat.stx_gid));
        rustix::fs::chownat(self.fd(), name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(failed("change the owner of"))?;
        if file_type(stat) != FileType::Symlink {
            rustix::fs::chmodat(self.fd(), name, mode(stat), AtFlags::empty())
                .map_err(failed("change the mode of"))?;
        }
        if !xattrs.is_empty() {
            write_xattrs(&self.proc_path(name), xattrs).map_err(failed("set the attributes of"))?;
        }
        rustix::fs::utimensat(self.fd(), name, &times(stat), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(failed("set the times of"))
    }

    /// Gives this directory its attributes, after it was filled.
    pub(super) fn finish(&self, stat: &Statx, xattrs: &Xattrs) -> Result<()> {
        let failed = |action| move |error| self.place.failure(action, error);
        let (uid, gid) = (Uid::from_raw(stat.stx_uid), Gid::from_raw(stat.stx_gid));
        rustix::fs::fchown(self.fd(), Some(uid), Some(gid))
            .map_err(failed("change the owner of"))?;
        rustix::fs::fchmod(self.fd(), mode(stat)).map_err(failed("change the mode of"))?;
        for (key, value) in xattrs {
            rustix::fs::fsetxattr(self.fd(), key.as_c_str(), value, XattrFlags::empty())
                .map_err(failed("set the attributes of"))?;
        }
        rustix::fs::futimens(self.fd(), &times(stat)).map_err(failed("set the times of"))
    }
}

/// Opens a regular file to read it.
pub(super) fn open_file(dir: BorrowedFd<'_>, name: impl Arg + Copy) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    match rustix::fs::openat(dir, name, flags | OFlags::NOATIME, Mode::empty()) {
        Err(Errno::PERM) => rustix::fs::openat(dir, name, flags, Mode::empty()),
        opened => opened,
    }
}

pub(super) fn file_type(stat: &Statx) -> FileType {
    FileType::from_raw_mode(u32::from(stat.stx_mode))
}

fn mode(stat: &Statx) -> Mode {
    Mode::from_raw_mode(u32::from(stat.stx_mode) & 0o7777)
}

pub(super) fn times(stat: &Statx) -> Timestamps {
    let (accessed, modified) = (stat.stx_atime, stat.stx_mtime);
    Timestamps {
        last_access: Timespec { tv_sec: accessed.tv_sec, tv_nsec: i64::from(accessed.tv_nsec) },
        last_modification: Timespec {
            tv_sec: modified.tv_sec,
            tv_nsec: i64::from(modified.tv_nsec),
        },
    }
}

fn dir_flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

fn failure(action: &'static str, path: PathBuf, error: Errno) -> StoreError {
    // A path of a deep tree would fill the log.
    let path = if path.as_os_str().len() > 4096 {
        let bytes = path.as_os_str().as_bytes();
        as_path(&bytes[..4096]).join("...")
    } else {
        path
    };
    StoreError::Io { action, path, source: error.into() }
}

pub(super) fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let mut path = Vec::with_capacity(dir.len() + 1 + name.len());
    path.extend_from_slice(dir);
    if !dir.is_empty() && !name.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    path
}

fn read_xattrs(path: &CStr) -> Result<Xattrs, Errno> {
    gather_xattrs(
        |buffer| rustix::fs::llistxattr(path, buffer),
        |name, buffer| rustix::fs::lgetxattr(path, name, buffer),
    )
}

/// The extended attributes of an open file, sorted.
pub(super) fn xattrs_of(file: &OwnedFd) -> Result<Xattrs, Errno> {
    gather_xattrs(
        |buffer| rustix::fs::flistxattr(file, buffer),
        |name, buffer| rustix::fs::fgetxattr(file, name, buffer),
    )
}

/// What an open file is.
pub(super) fn stat_of(file: &OwnedFd) -> Result<Statx, Errno> {
    rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
}

fn gather_xattrs(
    list: impl FnMut(&mut [u8]) -> Result<usize, Errno>,
    get: impl Fn(&CStr, &mut [u8]) -> Result<usize, Errno>,
) -> Result<Xattrs, Errno> {
    let names = match grow(list) {
        Ok(names) => names,
        Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut xattrs = Xattrs::new();
    for name in names.split_inclusive(|byte| *byte == 0) {
        let Ok(name) = CStr::from_bytes_with_nul(name) else { continue };
        match grow(|buffer| get(name, buffer)) {
            Ok(value) => xattrs.push((name.to_owned(), value)),
            // Listed, but not for us to see.
            Err(Errno::NODATA) => {}
            Err(error) => return Err(error),
        }
    }
    xattrs.sort();
    Ok(xattrs)
}

fn grow(mut read: impl FnMut(&mut [u8]) -> Result<usize, Errno>) -> Result<Vec<u8>, Errno> {
    let mut small = [0u8; 256];
    match read(&mut small) {
        Ok(length) => return Ok(small[..length].to_vec()),
        Err(Errno::RANGE) => {}
        Err(error) => return Err(error),
    }
    // The kernel's bound for names and for values.
    let mut large = vec![0u8; 64 << 10];
    let length = read(&mut large)?;
    large.truncate(length);
    Ok(large)
}

fn write_xattrs(path: &CStr, xattrs: &Xattrs) -> Result<(), Errno> {
    for (key, value) in xattrs {
        rustix::fs::lsetxattr(path, key.as_c_str(), value, XattrFlags::empty())?;
    }
    Ok(())
}

/// Copies a file's content by the cheapest means there is, and leaves its holes as holes.
fn copy_content(source: &OwnedFd, target: &OwnedFd, stat: &Statx) -> Result<(), Errno> {
    let size = stat.stx_size;
    if size == 0 {
        return Ok(());
    }
    if rustix::fs::ioctl_ficlone(target, source).is_ok() {
        return Ok(());
    }
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(source, SeekFrom::Data(at)) {
            Ok(start) => start,
            // Nothing but a hole is left.
            Err(Errno::NXIO) => break,
            Err(Errno::INVAL) => at,
            Err(error) => return Err(error),
        };
        let end = rustix::fs::seek(source, SeekFrom::Hole(start)).unwrap_or(size).min(size);
        copy_range(source, target, start, end)?;
        // Somebody may be punching holes meanwhile.
        at = end.max(at + 1);
    }
    rustix::fs::ftruncate(target, size)
}

/// How much is copied at a time.
const CHUNK: usize = 4 << 20;

fn copy_range(source: &OwnedFd, target: &OwnedFd, start: u64, end: u64) -> Result<(), Errno> {
    let (mut read_at, mut write_at) = (start, start);
    while read_at < end {
        let length = usize::try_from(end - read_at).unwrap_or(usize::MAX).min(CHUNK);
        super::background::step();
        let (from, to) = (Some(&mut read_at), Some(&mut write_at));
        match rustix::fs::copy_file_range(source, from, target, to, length) {
            Ok(0) | Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                return copy_by_hand(source, target, read_at, end);
            }
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn copy_by_hand(source: &OwnedFd, target: &OwnedFd, start: u64, end: u64) -> Result<(), Errno> {
    let mut buffer = vec![0u8; 128 << 10];
    let mut at = start;
    while at < end {
        let want = buffer.len().min(usize::try_from(end - at).unwrap_or(usize::MAX));
        let got = rustix::io::pread(source, &mut buffer[..want], at)?;
        if got == 0 {
            break;
        }
        let mut done = 0;
        while done < got {
            done += rustix::io::pwrite(target, &buffer[done..got], at + done as u64)?;
        }
        at += got as u64;
    }
    Ok(())
}
