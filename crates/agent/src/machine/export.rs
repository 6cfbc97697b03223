//! Packs an upper directory as a tar stream, so that what unpacks it has the same layer.
//!
//! `docs/MICROVM.md` says what is carried. Files with holes are packed as such, in GNU's old form. Every directory is
//! entered by its own descriptor and looked at by single names, so that no path is too long and no link is followed.
//!
//! Memory is bounded by the names of the directories, not by their paths: the path is kept once, for the directory that is being
//! packed, and where a file with several names was first is kept as a chain of names ([`Places`]). A machine with little memory
//! can have directories nested ten thousand deep.
//!
//! Of the overlay's own marks those are left out that name files of a lower layer by the numbers they had in this machine: on
//! another stack they would name others.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata};
use std::io::{self, BufWriter, Read, Seek as _, SeekFrom};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use sandkeep_proto::frame::CHUNK;
use sandkeep_proto::link::{Done, Failure, Reply};
use tar::{Builder, EntryType, GnuExtSparseHeader, GnuSparseHeader, Header};

use super::sys;
use crate::serve::{FileTask, RequestError};

/// What attributes are carried under.
const XATTR: &str = "SCHILY.xattr.";
/// The longest name or target that fits an entry's own header.
const NAME: usize = 100;
/// Marks that mean something on the stack they were made on alone.
const OF_THIS_STACK: [&str; 2] = ["user.overlay.origin", "user.overlay.impure"];

/// Packs a directory. To be called on a thread of its own, whose current directory is changed.
pub(super) fn pack(upper: BorrowedFd<'_>, task: &mut FileTask) -> Result<Done, RequestError> {
    let problem = |error: io::Error| {
        RequestError::new(Failure::Fault, format!("could not pack what was written: {error}"))
    };
    sys::own_directory().map_err(problem)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let top = rustix::fs::openat(upper, ".", flags, Mode::empty());
    let top = top.map_err(|error| problem(error.into()))?;
    rustix::process::fchdir(&top).map_err(|error| problem(error.into()))?;
    task.reply(Reply::Ok)?;
    let builder = Builder::new(BufWriter::with_capacity(CHUNK, &mut *task));
    let mut packing = ExportPacking {
        builder,
        path: Vec::new(),
        places: Places::default(),
        links: HashMap::new(),
        files: 0,
    };
    packing.all(top).map_err(problem)?;
    let ExportPacking { builder, files, .. } = packing;
    let buffer = builder.into_inner().map_err(problem)?;
    let task = buffer.into_inner().map_err(|error| problem(error.into_error()))?;
    Ok(Done::Moved { bytes: task.sent(), files })
}

struct ExportPacking<'a> {
    builder: Builder<BufWriter<&'a mut FileTask>>,
    /// The path of the directory that is being packed, with a slash at its end.
    path: Vec<u8>,
    places: Places,
    /// Where a file with several names was packed first: its directory, and its name in it.
    links: HashMap<u64, (usize, OsString)>,
    files: u64,
}

/// Directories in which files with several names were packed, each as a name and the one it is in. The top is 0, without
/// being there.
#[derive(Default)]
struct Places(Vec<(usize, OsString)>);

impl Places {
    fn add(&mut self, parent: usize, name: &OsStr) -> usize {
        self.0.push((parent, name.to_owned()));
        self.0.len()
    }

    /// The path of a name in one of them.
    fn path(&self, mut place: usize, name: &OsStr) -> Vec<u8> {
        let mut parts = vec![name];
        while let Some((parent, name)) = place.checked_sub(1).and_then(|at| self.0.get(at)) {
            parts.push(name);
            place = *parent;
        }
        parts.reverse();
        let parts: Vec<&[u8]> = parts.into_iter().map(|part| part.as_bytes()).collect();
        parts.join(&b'/')
    }
}

/// A directory that is being packed.
struct Open {
    directory: OwnedFd,
    name: OsString,
    /// Where it is among the [`Places`], once it has to be.
    place: Option<usize>,
    /// What is left of it, in reverse.
    names: Vec<OsString>,
}

impl Open {
    fn new(directory: OwnedFd, name: OsString, place: Option<usize>) -> io::Result<Self> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&directory)? {
            let name = entry?.file_name().to_bytes().to_vec();
            if name != b"." && name != b".." {
                names.push(OsString::from_vec(name));
            }
        }
        names.sort_by(|one, two| two.cmp(one));
        // Most of a deep tree is directories with one name in them.
        names.shrink_to_fit();
        Ok(Self { directory, name, place, names })
    }
}

impl ExportPacking<'_> {
    fn all(&mut self, top: OwnedFd) -> io::Result<()> {
        let meta = fs::symlink_metadata(".")?;
        self.put(b"./", Path::new("."), header(&meta, EntryType::Directory), &meta, io::empty())?;
        let mut open = vec![Open::new(top, OsString::new(), Some(0))?];
        while let Some(here) = open.last_mut() {
            let Some(name) = here.names.pop() else {
                let above = self.path.len().saturating_sub(here.name.len() + 1);
                self.path.truncate(above);
                open.pop();
                if let Some(above) = open.last() {
                    rustix::process::fchdir(&above.directory)?;
                }
                continue;
            };
            let meta = fs::symlink_metadata(&name)?;
            if !meta.is_dir() {
                self.leaf(&mut open, &name, &meta)?;
                continue;
            }
            let path = [&self.path, name.as_bytes()].concat();
            let head = header(&meta, EntryType::Directory);
            self.put(&path, Path::new(&name), head, &meta, io::empty())?;
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let inner = rustix::fs::openat(here.directory.as_fd(), &name, flags, Mode::empty())?;
            rustix::process::fchdir(&inner)?;
            self.path = path;
            self.path.push(b'/');
            open.push(Open::new(inner, name, None)?);
        }
        Ok(())
    }

    /// Where the innermost of these directories is among the places.
    fn place(&mut self, open: &mut [Open]) -> usize {
        let mut at = 0;
        for one in open {
            at = *one.place.get_or_insert_with(|| self.places.add(at, &one.name));
        }
        at
    }

    fn leaf(&mut self, open: &mut [Open], name: &OsStr, meta: &Metadata) -> io::Result<()> {
        let kind = meta.file_type();
        let path = [&self.path, name.as_bytes()].concat();
        let (bytes, file) = (path.as_slice(), Path::new(name));
        // The kernel gives all that is deleted one inode.
        let deleted = kind.is_char_device() && meta.rdev() == 0;
        if kind.is_socket() {
            // A tar stream cannot say it, and nothing listens on it any more.
            return Ok(());
        }
        if meta.nlink() > 1 && !deleted {
            if let Some((place, first)) = self.links.get(&meta.ino()) {
                let first = self.places.path(*place, first);
                let mut head = header(meta, EntryType::Link);
                self.target(&mut head, &first)?;
                return self.entry(bytes, head, io::empty());
            }
            let place = self.place(open);
            self.links.insert(meta.ino(), (place, name.to_owned()));
        }
        let name = file;
        if kind.is_symlink() {
            let target = fs::read_link(name)?;
            let mut head = header(meta, EntryType::Symlink);
            self.marks(name, meta)?;
            self.target(&mut head, target.as_os_str().as_bytes())?;
            return self.entry(bytes, head, io::empty());
        }
        if kind.is_file() {
            return self.file(bytes, name);
        }
        let kind = match () {
            () if kind.is_fifo() => EntryType::Fifo,
            () if kind.is_block_device() => EntryType::Block,
            () => EntryType::Char,
        };
        let mut head = header(meta, kind);
        head.set_device_major(rustix::fs::major(meta.rdev()))?;
        head.set_device_minor(rustix::fs::minor(meta.rdev()))?;
        self.put(bytes, name, head, meta, io::empty())
    }

    fn file(&mut self, path: &[u8], name: &Path) -> io::Result<()> {
        let mut options = File::options();
        options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY);
        let mut file = options.open(name)?;
        let meta = file.metadata()?;
        let mut head = header(&meta, EntryType::Regular);
        head.set_size(meta.len());
        let Some(pieces) = pieces(&file, &meta)? else {
            let contents = file.chain(io::repeat(0)).take(meta.len());
            return self.put(path, name, head, &meta, contents);
        };
        let maps = sparse(&mut head, &pieces, meta.len());
        let contents = Pieces { file: &mut file, pieces: pieces.into_iter(), left: 0 };
        self.put(path, name, head, &meta, maps.as_slice().chain(contents))
    }

    /// Packs what has attributes of its own.
    fn put(
        &mut self,
        path: &[u8],
        name: &Path,
        head: Header,
        meta: &Metadata,
        contents: impl Read,
    ) -> io::Result<()> {
        self.marks(name, meta)?;
        self.entry(path, head, contents)
    }

    /// Puts before an entry what its own header has no room for.
    fn marks(&mut self, name: &Path, meta: &Metadata) -> io::Result<()> {
        let mut held = Vec::new();
        if meta.mtime_nsec() != 0 || meta.mtime() < 0 {
            held.push(("mtime".to_owned(), time(meta.mtime(), meta.mtime_nsec()).into_bytes()));
        }
        for attribute in attributes_of(name)? {
            let value = value_of(name, &attribute)?;
            held.push((format!("{XATTR}{attribute}"), value));
        }
        if held.is_empty() {
            return Ok(());
        }
        let pairs = held.iter().map(|(key, value)| (key.as_str(), value.as_slice()));
        self.builder.append_pax_extensions(pairs)
    }

    fn target(&mut self, head: &mut Header, target: &[u8]) -> io::Result<()> {
        if target.len() > NAME {
            self.long(EntryType::GNULongLink, target)?;
        }
        head.set_link_name_literal(target.get(..NAME).unwrap_or(target))
    }

    fn entry(&mut self, path: &[u8], mut head: Header, contents: impl Read) -> io::Result<()> {
        if path.len() > NAME {
            self.long(EntryType::GNULongName, path)?;
        }
        head.as_old_mut().name.iter_mut().zip(path).for_each(|(to, from)| *to = *from);
        head.set_cksum();
        self.files += 1;
        self.builder.append(&head, contents)
    }

    /// A name that is too long for a header, before the entry it belongs to.
    fn long(&mut self, kind: EntryType, text: &[u8]) -> io::Result<()> {
        let mut head = Header::new_gnu();
        let length = text.len() as u64 + 1;
        head.set_entry_type(kind);
        head.set_size(length);
        head.set_mode(0o644);
        let name = b"././@LongLink";
        head.as_old_mut().name.iter_mut().zip(name).for_each(|(to, from)| *to = *from);
        head.set_cksum();
        self.builder.append(&head, text.chain(io::repeat(0)).take(length))
    }
}

fn header(meta: &Metadata, kind: EntryType) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(meta.mode() & 0o7777);
    header.set_uid(meta.uid().into());
    header.set_gid(meta.gid().into());
    header.set_mtime(u64::try_from(meta.mtime()).unwrap_or(0));
    header.set_size(0);
    header
}

/// Seconds since 1970, before it too, with their fraction.
fn time(seconds: i64, nanos: i64) -> String {
    if seconds >= 0 {
        return format!("{seconds}.{nanos:09}");
    }
    // The fraction counts forward from the second, the written number away from zero.
    let (whole, part) =
        if nanos == 0 { (seconds, 0) } else { (seconds + 1, 1_000_000_000 - nanos) };
    format!("-{}.{part:09}", whole.unsigned_abs())
}

/// Where a file has bytes, if it has holes: offset and length, in order.
fn pieces(file: &File, meta: &Metadata) -> io::Result<Option<Vec<(u64, u64)>>> {
    let size = meta.len();
    if size == 0 || meta.blocks() * 512 >= size {
        return Ok(None);
    }
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(start))?.min(size);
        if end <= start {
            break;
        }
        pieces.push((start, end - start));
        at = end;
    }
    (&*file).seek(SeekFrom::Start(0))?;
    Ok((pieces != [(0, size)]).then_some(pieces))
}

/// Makes a header that of a file with holes, and gives the rest of its map.
fn sparse(head: &mut Header, pieces: &[(u64, u64)], size: u64) -> Vec<u8> {
    head.set_entry_type(EntryType::GNUSparse);
    head.set_size(pieces.iter().map(|(_, length)| length).sum());
    // The end, so that a hole there is seen.
    let all: Vec<(u64, u64)> = pieces.iter().copied().chain([(size, 0)]).collect();
    let Some(gnu) = head.as_gnu_mut() else { return Vec::new() };
    gnu.set_real_size(size);
    let room = gnu.sparse.len();
    fill(&mut gnu.sparse, &all);
    gnu.set_is_extended(all.len() > room);
    let mut maps = Vec::new();
    let mut rest = all.get(room..).unwrap_or_default();
    while !rest.is_empty() {
        let mut more = GnuExtSparseHeader::new();
        let room = more.sparse.len();
        fill(&mut more.sparse, rest);
        rest = rest.get(room..).unwrap_or_default();
        more.set_is_extended(!rest.is_empty());
        maps.extend_from_slice(more.as_bytes());
    }
    maps
}

fn fill(places: &mut [GnuSparseHeader], pieces: &[(u64, u64)]) {
    for (place, (offset, length)) in places.iter_mut().zip(pieces) {
        place.set_offset(*offset);
        place.set_length(*length);
    }
}

/// A file's bytes without its holes, as many as were announced.
struct Pieces<'a> {
    file: &'a mut File,
    pieces: std::vec::IntoIter<(u64, u64)>,
    left: u64,
}

impl Read for Pieces<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            let Some((offset, length)) = self.pieces.next() else { return Ok(0) };
            self.file.seek(SeekFrom::Start(offset))?;
            self.left = length;
        }
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(into.len());
        let into = into.get_mut(..most).unwrap_or_default();
        let mut read = self.file.read(into)?;
        if read == 0 {
            // It has become shorter: filled up, so that what follows is in its place.
            into.fill(0);
            read = into.len();
        }
        self.left -= read as u64;
        Ok(read)
    }
}

/// The names of the attributes worth carrying.
fn attributes_of(name: &Path) -> io::Result<Vec<String>> {
    let mut buffer = vec![0; 64 << 10];
    let length = match rustix::fs::llistxattr(name, &mut buffer) {
        Ok(length) => length,
        Err(Errno::OPNOTSUPP) => 0,
        Err(error) => return Err(error.into()),
    };
    let names = buffer.get(..length).unwrap_or_default().split(|byte| *byte == 0);
    // The daemon has a list of its own, and does not depend on this one.
    let carried = ["user.", "security.capability", "system.posix_acl_"];
    Ok(names
        .filter_map(|name| std::str::from_utf8(name).ok())
        .filter(|name| carried.iter().any(|prefix| name.starts_with(prefix)))
        .filter(|name| !OF_THIS_STACK.contains(name))
        .map(ToOwned::to_owned)
        .collect())
}

fn value_of(name: &Path, attribute: &str) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; 64 << 10];
    let length = rustix::fs::lgetxattr(name, attribute, &mut buffer)?;
    buffer.truncate(length);
    Ok(buffer)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::{Places, time};

    #[test]
    fn a_place_deep_down_is_found_by_its_names() {
        let mut places = Places::default();
        let mut at = 0;
        for _ in 0..3 {
            at = places.add(at, OsStr::new("d"));
        }
        let beside = places.add(1, OsStr::new("e"));
        let path = |place, name: &str| places.path(place, OsStr::new(name));
        assert_eq!(path(0, "top"), b"top");
        assert_eq!(path(at, "file"), b"d/d/d/file");
        assert_eq!(path(beside, "file"), b"d/e/file");
    }

    #[test]
    fn times_are_written_on_both_sides_of_1970() {
        assert_eq!(time(5, 6), "5.000000006");
        assert_eq!(time(-1, 0), "-1.000000000");
        assert_eq!(time(-2, 250_000_000), "-1.750000000");
        assert_eq!(time(-1, 999_999_999), "-0.000000001");
    }
}
