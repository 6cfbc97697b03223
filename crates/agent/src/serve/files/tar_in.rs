//! Unpacks a tar stream below a directory.
//!
//! Archives come from anywhere, so nothing in them is believed. Every entry is resolved from the
//! directory's own descriptor, one component at a time and never through a symlink, so neither `..`,
//! nor an absolute name, nor a link that an earlier entry (or somebody else, meanwhile) put there
//! leads outside. What stands where an entry goes is removed, not written through. Devices are
//! refused. A refused entry ends the work; entries before it stay.
//!
//! On request it does go through links, and refuses to put a file where a directory stands, as
//! writing files one by one would; it never gets further than its user.
//!
//! Root keeps the archive's owners, as far as the sandbox has them; everybody else owns what they
//! unpack.

use std::cell::Cell;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Seek as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt as _;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags, chownat, fchmod,
    fchown, fsetxattr, futimens, linkat, mkdirat, mknodat, openat, statat, symlinkat, unlinkat,
    utimensat,
};
use rustix::io::Errno;
use sandkeep_proto::link::{Done, Failure, Reply};
use sandkeep_proto::sparse::{PaxSparse, SparseMap};
use tar::{Archive, Entry, EntryType};

use crate::serve::error::RequestError;
use crate::serve::files::make_parents;
use crate::serve::files::worker::{FileTarget, FileTask};

/// How much an entry's headers may take; long names and attributes are in there.
const HEADERS: u64 = 2 << 20;
/// How many directories get their modes and times at the very end, when nothing is put into them
/// any more. Those beyond get them at once.
const LATER: usize = 1 << 16;
/// The prefix under which archives carry extended attributes.
pub(crate) const XATTR: &str = "SCHILY.xattr.";

/// Unpacks what the host sends below `target`, which is made if absent.
pub(crate) fn unpack(
    target: FileTarget,
    task: &mut FileTask,
    through_links: bool,
) -> Result<Done, RequestError> {
    let root = open_root(&target.path)?;
    task.reply(Reply::Ok)?;
    let owners = target.identity.uid == 0;
    let mut unpacking = Unpacking { root, owners, through_links, last: None, later: Vec::new() };
    let (mut files, mut bytes) = (0, 0);
    let left = Cell::new(None);
    let start = not_compressed(task)?;
    let metered = Metered { task: &mut *task, left: &left };
    let mut archive = Archive::new(io::Cursor::new(start).chain(metered));
    let mut entries = archive.entries().map_err(|error| unreadable(&error))?;
    loop {
        left.set(Some(HEADERS));
        let Some(entry) = entries.next() else { break };
        let mut entry = entry.map_err(|error| unreadable(&error))?;
        left.set(None);
        if let Some(content) = unpacking.entry(&mut entry)? {
            files += 1;
            bytes += content;
        }
        // What is left of it is not part of the next one's headers.
        io::copy(&mut entry, &mut io::sink()).map_err(|error| unreadable(&error))?;
    }
    unpacking.finish_directories();
    // Padding behind the archive is still the host's to send.
    io::copy(task, &mut io::sink()).map_err(|error| unreadable(&error))?;
    Ok(Done::Moved { bytes, files })
}

/// Takes the first bytes of an archive. One that is compressed is refused by name: as a header it
/// makes no sense.
fn not_compressed(task: &mut FileTask) -> Result<Vec<u8>, RequestError> {
    let mut start = Vec::new();
    task.by_ref().take(6).read_to_end(&mut start).map_err(|error| unreadable(&error))?;
    let known: [(&[u8], &str, &str); 4] = [
        (b"\x1f\x8b", "gzip", "gunzip"),
        (b"BZh", "bzip2", "bunzip2"),
        (b"\xfd7zXZ\0", "xz", "unxz"),
        (b"\x28\xb5\x2f\xfd", "zstd", "unzstd"),
    ];
    match known.iter().find(|(magic, ..)| start.starts_with(magic)) {
        Some((_, format, program)) => Err(RequestError::new(
            Failure::Invalid,
            format!(
                "the tar stream is compressed with {format}; send it through `{program}` first"
            ),
        )),
        None => Ok(start),
    }
}

fn open_root(path: &Path) -> Result<OwnedFd, RequestError> {
    let problem = |error: io::Error| RequestError::io("unpack into", path, &error);
    make_parents(path)?;
    match std::fs::create_dir(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(problem(error)),
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| problem(errno.into()))
}

fn unreadable(error: &io::Error) -> RequestError {
    let kind = match error.kind() {
        io::ErrorKind::ConnectionAborted => Failure::Fault,
        _ => Failure::Invalid,
    };
    // The parser quotes what it cannot read, which may be anything.
    let why: String = error.to_string().chars().take(200).collect();
    let why = why.replace(|c: char| c.is_control() || c == char::REPLACEMENT_CHARACTER, "?");
    RequestError::new(kind, format!("the tar stream cannot be read: {why}"))
}

fn refused(name: &Path, why: &str) -> RequestError {
    RequestError::new(Failure::Invalid, format!("the tar entry `{}` {why}", name.display()))
}

/// Reads the archive and stops headers that never end; the parser keeps them in memory.
struct Metered<'a> {
    task: &'a mut FileTask,
    left: &'a Cell<Option<u64>>,
}

impl Read for Metered<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.task.read(buffer)?;
        if let Some(left) = self.left.get() {
            let left = left.checked_sub(count as u64).ok_or_else(|| {
                io::Error::new(io::ErrorKind::InvalidData, "an entry's headers are too long")
            })?;
            self.left.set(Some(left));
        }
        Ok(count)
    }
}

/// The metadata of an entry.
#[derive(Debug, Clone)]
struct Traits {
    mode: Mode,
    owner: Option<(Uid, Gid)>,
    modified: i64,
}

impl Traits {
    fn times(&self) -> Timestamps {
        let time = Timespec { tv_sec: self.modified, tv_nsec: 0 };
        Timestamps { last_access: time, last_modification: time }
    }
}

struct Unpacking {
    root: OwnedFd,
    /// Whether the archive's owners are kept.
    owners: bool,
    /// Whether directories above an entry may be links.
    through_links: bool,
    /// The directory the last entry went to, which the next one probably goes to as well.
    last: Option<(PathBuf, OwnedFd)>,
    later: Vec<(PathBuf, Traits)>,
}

impl Unpacking {
    /// Unpacks one entry. Returns how many bytes its content has; nothing if it is no file:
    /// directories are not counted.
    fn entry<R: Read>(&mut self, entry: &mut Entry<'_, R>) -> Result<Option<u64>, RequestError> {
        if entry.header().entry_type() == EntryType::XGlobalHeader {
            return Ok(None);
        }
        let sparse = sparse(entry)?;
        let raw = match sparse.name() {
            Some(name) => name.to_owned(),
            None => entry.path_bytes().into_owned(),
        };
        let mut content = 0;
        let kind = match entry.header().entry_type() {
            // Old archives mark directories by the name alone.
            EntryType::Regular if raw.ends_with(b"/") => EntryType::Directory,
            kind => kind,
        };
        let name = inside(Path::new(OsStr::from_bytes(&raw)))?;
        let Some(leaf) = name.file_name() else {
            // The directory itself, which exists.
            return match kind {
                EntryType::Directory => Ok(None),
                _ => Err(refused(&name, "is a directory")),
            };
        };
        let above = name.parent().unwrap_or(Path::new(""));
        let traits = self.traits(entry);
        let problem = |errno: Errno| RequestError::io("unpack", &name, &errno.into());
        match kind {
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                content = self.file(&name, entry, sparse, &traits)?;
            }
            EntryType::Directory => {
                self.directory(&name, traits)?;
                return Ok(None);
            }
            EntryType::Symlink => {
                let target = link_target(&name, entry)?;
                let parent = self.parent(above, &name)?;
                self.make(&parent, leaf, |parent| symlinkat(&target, parent, leaf))
                    .map_err(problem)?;
                if let Some((uid, gid)) = traits.owner {
                    let flags = AtFlags::SYMLINK_NOFOLLOW;
                    let _ = chownat(&parent, leaf, Some(uid), Some(gid), flags);
                }
                let _ = utimensat(&parent, leaf, &traits.times(), AtFlags::SYMLINK_NOFOLLOW);
            }
            EntryType::Link => {
                let target = inside(&link_target(&name, entry)?)?;
                self.hard_link(&name, &target)?;
            }
            EntryType::Fifo => {
                let parent = self.parent(above, &name)?;
                self.make(&parent, leaf, |parent| {
                    mknodat(parent, leaf, FileType::Fifo, traits.mode, 0)
                })
                .map_err(problem)?;
            }
            EntryType::Char | EntryType::Block => {
                return Err(refused(&name, "is a device"));
            }
            _ => return Err(refused(&name, "is of a kind that is not known")),
        }
        Ok(Some(content))
    }

    fn traits<R: Read>(&self, entry: &Entry<'_, R>) -> Traits {
        let header = entry.header();
        let id = |value: io::Result<u64>| value.ok().and_then(|id| u32::try_from(id).ok());
        let owner = match (id(header.uid()), id(header.gid())) {
            (Some(uid), Some(gid)) if uid != u32::MAX && gid != u32::MAX => {
                Some((Uid::from_raw(uid), Gid::from_raw(gid)))
            }
            _ => None,
        };
        let mtime = header.mtime().ok().and_then(|time| i64::try_from(time).ok());
        Traits {
            mode: Mode::from_raw_mode(header.mode().unwrap_or(0o644) & 0o7777),
            owner: owner.filter(|_| self.owners),
            modified: mtime.unwrap_or(0),
        }
    }

    fn file<R: Read>(
        &mut self,
        name: &Path,
        entry: &mut Entry<'_, R>,
        sparse: PaxSparse,
        traits: &Traits,
    ) -> Result<u64, RequestError> {
        let (above, leaf) = split(name);
        let problem = |error: io::Error| RequestError::io("unpack", name, &error);
        let is_sparse = sparse.is_sparse();
        let map = if is_sparse { Some(sparse_map(name, entry, sparse)?) } else { None };
        let length = map.as_ref().map_or(entry.size(), |map| map.size);
        let parent = self.parent(above, name)?;
        let there = if self.through_links { existing(&parent, leaf) } else { None };
        let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
        let private = Mode::from_raw_mode(0o600);
        let fd = match there {
            Some(FileType::Directory) => Err(Errno::ISDIR),
            Some(FileType::Symlink) => {
                let flags = flags | OFlags::TRUNC | OFlags::NONBLOCK;
                openat(&parent, leaf, flags, Mode::from_raw_mode(0o644))
            }
            _ => {
                let flags = flags | OFlags::EXCL;
                self.make(&parent, leaf, |parent| openat(parent, leaf, flags, private))
            }
        };
        let mut file = File::from(fd.map_err(|errno| problem(errno.into()))?);
        if let Some(map) = map {
            copy_pieces(entry.by_ref(), &mut file, &map).map_err(problem)?;
        } else if entry.header().entry_type() == EntryType::GNUSparse {
            copy_with_holes(entry.by_ref(), &file, length).map_err(problem)?;
        } else {
            io::copy(entry, &mut file).map_err(problem)?;
        }
        if let Ok(Some(extensions)) = entry.pax_extensions() {
            for extension in extensions.flatten() {
                let Ok(key) = extension.key() else { continue };
                let Some(attribute) = key.strip_prefix(XATTR) else { continue };
                if attribute.starts_with("user.") || attribute == "security.capability" {
                    // Not every filesystem has them, nor every user the right.
                    let _ =
                        fsetxattr(&file, attribute, extension.value_bytes(), XattrFlags::empty());
                }
            }
        }
        match set_attributes(&file, traits) {
            // The target of a link may belong to another user, who lets others write it but not
            // change its owner.
            Err(Errno::PERM) if there == Some(FileType::Symlink) => Ok(length),
            set => set.map(|()| length).map_err(|errno| problem(errno.into())),
        }
    }

    fn directory(&mut self, name: &Path, traits: Traits) -> Result<(), RequestError> {
        let (above, leaf) = split(name);
        let problem = |errno: Errno| RequestError::io("unpack", name, &errno.into());
        let parent = self.parent(above, name)?;
        let there = match existing(&parent, leaf) {
            Some(FileType::Symlink) if self.through_links => {
                statat(&parent, leaf, AtFlags::empty())
                    .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
            }
            kind => kind == Some(FileType::Directory),
        };
        if !there {
            self.make(&parent, leaf, |parent| mkdirat(parent, leaf, Mode::RWXU))
                .map_err(problem)?;
        }
        if self.later.len() < LATER {
            self.later.push((name.to_owned(), traits));
        } else {
            self.finish_directory(name, &traits);
        }
        Ok(())
    }

    fn hard_link(&mut self, name: &Path, target: &Path) -> Result<(), RequestError> {
        if name == target {
            return Ok(());
        }
        let (above, leaf) = split(name);
        let (target_above, target_leaf) = split(target);
        let from = self.parent(target_above, name)?;
        let to = self.parent(above, name)?;
        self.make(&to, leaf, |to| linkat(&from, target_leaf, to, leaf, AtFlags::empty()))
            .map_err(|errno| RequestError::io("unpack", name, &errno.into()))
    }

    /// Makes something under a name of `parent`, replacing an entry of that name.
    fn make<T>(
        &mut self,
        parent: &OwnedFd,
        leaf: &OsStr,
        mut make: impl FnMut(&OwnedFd) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        match make(parent) {
            Err(Errno::EXIST) => {}
            other => return other,
        }
        match unlinkat(parent, leaf, AtFlags::empty()) {
            Err(Errno::ISDIR) => {
                // The directory to remove may be the remembered one.
                self.last = None;
                unlinkat(parent, leaf, AtFlags::REMOVEDIR)?;
            }
            other => other?,
        }
        make(parent)
    }

    /// Opens the directory an entry goes to, making what is missing and following no link.
    fn parent(&mut self, above: &Path, name: &Path) -> Result<OwnedFd, RequestError> {
        let problem = |errno: Errno| RequestError::io("unpack", name, &errno.into());
        if let Some((path, fd)) = &self.last
            && path == above
        {
            return fd.try_clone().map_err(|error| RequestError::io("unpack", name, &error));
        }
        let mut flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        flags.set(OFlags::NOFOLLOW, !self.through_links);
        let mut dir =
            self.root.try_clone().map_err(|error| RequestError::io("unpack", name, &error))?;
        for step in above.components() {
            let step = step.as_os_str();
            let mut next = openat(&dir, step, flags, Mode::empty());
            if matches!(next, Err(Errno::NOENT)) {
                match mkdirat(&dir, step, Mode::from_raw_mode(0o755)) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(errno) => return Err(problem(errno)),
                }
                next = openat(&dir, step, flags, Mode::empty());
            }
            dir = match next {
                Ok(next) => next,
                Err(Errno::NOTDIR | Errno::LOOP) => {
                    return Err(refused(name, "passes through a link or a file"));
                }
                Err(errno) => return Err(problem(errno)),
            };
        }
        let copy = dir.try_clone().map_err(|error| RequestError::io("unpack", name, &error))?;
        self.last = Some((above.to_owned(), copy));
        Ok(dir)
    }

    /// Gives directories their modes, owners and times, the innermost first.
    fn finish_directories(&mut self) {
        while let Some((name, traits)) = self.later.pop() {
            self.finish_directory(&name, &traits);
        }
    }

    /// What another entry has replaced meanwhile, or may not be changed, stays as it is.
    fn finish_directory(&mut self, name: &Path, traits: &Traits) {
        let (above, leaf) = split(name);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(parent) = self.parent(above, name) else { return };
        if let Ok(dir) = openat(&parent, leaf, flags, Mode::empty()) {
            let _ = set_attributes(&File::from(dir), traits);
        }
    }
}

/// What exists under a name, a link itself and not where it leads.
fn existing(parent: &OwnedFd, leaf: &OsStr) -> Option<FileType> {
    let stat = statat(parent, leaf, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    Some(FileType::from_raw_mode(stat.st_mode))
}

/// Sets owner, mode and times, in this order: giving a file away clears its set-user-id bit.
fn set_attributes(file: &File, traits: &Traits) -> Result<(), Errno> {
    if let Some((uid, gid)) = traits.owner {
        match fchown(file, Some(uid), Some(gid)) {
            // An owner this sandbox cannot have: the file stays root's.
            Ok(()) | Err(Errno::INVAL | Errno::PERM) => {}
            Err(errno) => return Err(errno),
        }
    }
    fchmod(file, traits.mode)?;
    futimens(file, &traits.times())
}

/// A name as plain components, or why it is none.
fn inside(name: &Path) -> Result<PathBuf, RequestError> {
    let mut plain = PathBuf::new();
    for component in name.components() {
        match component {
            Component::CurDir => {}
            Component::Normal(part) if part.as_bytes().contains(&0) => {
                return Err(refused(name, "has a zero byte in its name"));
            }
            Component::Normal(part) => plain.push(part),
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                return Err(refused(name, "would leave the directory"));
            }
        }
    }
    Ok(plain)
}

/// Writes a file that the archive says has holes, as long as it is to be, and leaves blocks of zeros out. A few bytes
/// of an archive can stand for terabytes: whether the file may be that long is asked first.
fn copy_with_holes(mut from: impl Read, file: &File, length: u64) -> io::Result<()> {
    const BLOCK: usize = 4096;
    file.set_len(length)?;
    let mut buffer = vec![0; 16 * BLOCK];
    let mut at = 0;
    loop {
        let mut filled = 0;
        while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match from.read(rest) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if filled == 0 {
            return Ok(());
        }
        for block in buffer.get(..filled).unwrap_or_default().chunks(BLOCK) {
            if block.iter().any(|byte| *byte != 0) {
                file.write_all_at(block, at)?;
            }
            at += block.len() as u64;
        }
    }
}

/// What the extended headers of an entry say about holes.
fn sparse<R: Read>(entry: &mut Entry<'_, R>) -> Result<PaxSparse, RequestError> {
    let mut sparse = PaxSparse::default();
    let name = entry.path_bytes().into_owned();
    let wrong = |error: &io::Error| {
        refused(Path::new(OsStr::from_bytes(&name)), &format!("is damaged: {error}"))
    };
    if let Some(extensions) = entry.pax_extensions().map_err(|error| unreadable(&error))? {
        for extension in extensions.flatten() {
            let Ok(key) = extension.key() else { continue };
            sparse.record(key, extension.value_bytes()).map_err(|error| wrong(&error))?;
        }
    }
    Ok(sparse)
}

fn sparse_map<R: Read>(
    name: &Path,
    entry: &mut Entry<'_, R>,
    sparse: PaxSparse,
) -> Result<SparseMap, RequestError> {
    let stored = entry.size();
    sparse.map(stored, entry).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData => refused(name, &format!("is damaged: {error}")),
        _ => unreadable(&error),
    })
}

/// Writes the pieces of a sparse file where they belong. Whether it may be as long as it is to be
/// is asked first.
fn copy_pieces(mut from: impl Read, file: &mut File, map: &SparseMap) -> io::Result<()> {
    file.set_len(map.size)?;
    for (offset, length) in &map.pieces {
        file.seek(io::SeekFrom::Start(*offset))?;
        if io::copy(&mut from.by_ref().take(*length), file)? != *length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(())
}

fn split(name: &Path) -> (&Path, &OsStr) {
    (name.parent().unwrap_or(Path::new("")), name.file_name().unwrap_or_default())
}

fn link_target<R: Read>(name: &Path, entry: &Entry<'_, R>) -> Result<PathBuf, RequestError> {
    match entry.link_name_bytes() {
        Some(target) if !target.is_empty() && !target.contains(&0) => {
            Ok(PathBuf::from(OsStr::from_bytes(&target)))
        }
        _ => Err(refused(name, "is a link to nowhere")),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::inside;

    #[test]
    fn names_stay_inside_or_are_refused() {
        assert_eq!(inside(Path::new("./a//b/./c/")).expect("plain"), Path::new("a/b/c"));
        assert_eq!(inside(Path::new(".")).expect("the directory itself"), Path::new(""));
        for bad in ["/etc/passwd", "../x", "a/../../x", "a/..", "/"] {
            assert!(inside(Path::new(bad)).is_err(), "{bad}");
        }
    }
}
