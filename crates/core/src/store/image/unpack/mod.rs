//! Turns a layer's archive into a directory for overlayfs.
//!
//! An OCI layer says what is gone by names: `.wh.x` for `x`, `.wh..wh..opq` for all that the layers
//! below have in a directory. On disk these become what overlayfs reads in a user namespace: a
//! character device 0:0, and the attribute `user.overlay.opaque`. Owners, modes, times, hard links,
//! symlinks, pipes, file capabilities and `user.` attributes are kept as the archive has them.
//!
//! Rules for what archives leave open, or try:
//!
//! - Of several entries with one name, the last counts. A file replaces a directory, and a
//!   directory a file.
//! - A whiteout speaks of the layers below only: next to an entry of its own layer it hides just them.
//! - A directory that is needed and not described looks as it does below, else is root's, 0755.
//! - A hard link to a file below copies that file up first, as overlayfs would.
//! - Names with `..` are refused; names that begin with `/` begin at the top of the image. Links
//!   are kept as they are: they are followed in the sandbox, where the image's top is the top, and
//!   while unpacking by [`tree`], where it is too.
//! - Device nodes are left out, and counted: a sandbox has its own /dev, and could not open others.
//! - What a machine exports of its own upper directory is kept as it is ([`Form::Upper`]). Its names lead through no link.
//! - What does not fit the room it is given stops the unpacking, and so does a name that is nested too deep.
//!
//! Memory is bounded by the names of the directories, not by their paths: a chain of directories takes memory in proportion
//! to its length ([`dirs`]).
//!
//! A failed unpacking leaves a directory that is of no use; the caller removes it.

mod below;
mod compression;
mod dirs;
mod hashed;
mod listing;
mod stream;
mod tree;
mod xattrs;

use std::io::{self, Read, Seek as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, XattrFlags};
use rustix::io::Errno;

use self::dirs::Dirs;
use self::hashed::Hashed;
pub(super) use self::stream::is_header;
use self::stream::{ArchiveEntry, TarKind, TarStream};
use self::tree::{LayerTree, ParentDir};
use self::xattrs::{give_xattrs, taken, unwanted, wanted};
use super::attributes::{Attributes, copy_file, create_file};
use super::error::{ImageError, ImageResult};
use crate::model::Size;

pub(super) use self::below::{Below, Names, Shown};
pub(super) use self::compression::{Packing, open, packing};
pub(super) use self::listing::{index, names};

/// How overlayfs marks a directory that hides what is below it.
pub(super) const OPAQUE: &str = "user.overlay.opaque";

const WHITEOUT: &[u8] = b".wh.";
const RESERVED: &[u8] = b".wh..wh.";
const OPAQUE_MARK: &[u8] = b".wh..wh..opq";

/// What one entry costs besides its bytes.
const ENTRY_COST: u64 = 512;
const LONGEST_PATH: usize = 4096;
/// What Linux has room for in one name, and in what a symlink leads to.
const LONGEST_NAME: usize = 255;
const LONGEST_TARGET: usize = 4095;
/// Each directory on the way to a file takes a descriptor while it is walked.
const DEEPEST: usize = 256;
/// The same for what a machine wrote, which is walked without. Far deeper than any path can name at once.
const DEEPEST_UPPER: usize = 16_384;
const COPY_BUFFER: usize = 128 << 10;
const HOLE: usize = 4096;

/// How much may be unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnpackRoom {
    /// Bytes.
    pub bytes: u64,
    /// Files, directories, links and whiteouts: each takes one of the host's, however small.
    pub entries: u64,
    /// Where the number comes from, as the end of an error message.
    pub why: &'static str,
}

/// How an archive is to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// As an OCI layer, in which some names are whiteouts.
    Layer,
    /// As a whole root filesystem: all names are just names, and the archive must have an end.
    Root,
    /// As an upper directory of overlayfs: devices 0:0 are whiteouts, attributes are kept that a machine may export, the first entry is the
    /// directory itself, and the archive must have an end. What counts against the room is what is not a hole.
    Upper,
}

/// What was unpacked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unpacked {
    /// How many files, directories, links and whiteouts were made.
    pub files: u64,
    /// How many bytes their contents have.
    pub bytes: u64,
    /// SHA-256 of the archive as it is uncompressed, as `sha256:…`.
    pub diff_id: String,
    /// Whether anything was taken from the layers below, so that on others it would look different.
    pub borrowed: bool,
    /// How many device nodes were left out.
    pub devices: u64,
    /// How many extended attributes were: this host does not have their like, or they are not for a machine to set.
    pub attributes: u64,
}

/// Unpacks `archive`, compressed or not, into the empty directory `diff`, which will lie on top of
/// `below` (the first is the topmost). `what` names it in errors.
///
/// # Errors
///
/// Returns different errors for a damaged archive, a hostile one and trouble on this host.
pub fn unpack_layer(
    what: &str,
    archive: impl Read,
    form: Form,
    diff: &Path,
    below: &[PathBuf],
    room: UnpackRoom,
) -> ImageResult<Unpacked> {
    let plain: Box<dyn Read + '_> = match form {
        Form::Upper => Box::new(archive),
        Form::Layer | Form::Root => Box::new(compression::open(what, archive)?),
    };
    let too_large =
        || ImageError::TooLarge { what: what.to_owned(), limit: Size(room.bytes), why: room.why };
    let top = below.first().and_then(|top| std::fs::metadata(top).ok());
    let top = top.map_or(Attributes::DIRECTORY, |metadata| attributes_of(&metadata));
    let mut stream = TarStream::new(Hashed::new(plain, &room, form));
    let tree = match form {
        Form::Upper => LayerTree::open_plain(diff),
        Form::Layer | Form::Root => LayerTree::open(diff),
    };
    let mut unpacker = Unpacker {
        tree: tree.map_err(ImageError::io("open", diff))?,
        below: Below(below),
        diff,
        form,
        left: room.bytes,
        entries: room.entries,
        dirs: Dirs::new(top),
        borrowed: false,
        files: 0,
        bytes: 0,
        devices: 0,
        attributes: 0,
        first: true,
    };
    let damaged = |source: io::Error| match source.kind() {
        io::ErrorKind::FileTooLarge => too_large(),
        _ => ImageError::Damaged { what: what.to_owned(), source },
    };
    while let Some(entry) = stream.next().map_err(damaged)? {
        let size = if form == Form::Upper { 0 } else { entry.size };
        let left = unpacker.left.checked_sub(size.saturating_add(ENTRY_COST));
        unpacker.left = left.ok_or_else(too_large)?;
        unpacker.entries = unpacker.entries.checked_sub(1).ok_or_else(too_large)?;
        if form == Form::Upper {
            unpacker.attributes += unwanted(&entry, form);
        }
        unpacker.take(entry, &mut stream).map_err(|trouble| trouble.told(diff, damaged))?;
    }
    if form != Form::Layer && !stream.ended() {
        return Err(damaged(stream::cut_short()));
    }
    let mut rest = stream.into_inner();
    io::copy(&mut rest, &mut io::sink()).map_err(damaged)?;
    unpacker.finish()?;
    Ok(Unpacked {
        files: unpacker.files,
        bytes: unpacker.bytes,
        diff_id: rest.digest(),
        borrowed: unpacker.borrowed,
        devices: unpacker.devices,
        attributes: unpacker.attributes,
    })
}

/// What can stop an entry: its content, its own fault, or this host.
enum Trouble {
    Content(io::Error),
    Refused { entry: Vec<u8>, reason: &'static str },
    Host { entry: Vec<u8>, source: io::Error },
}

impl Trouble {
    fn told(self, diff: &Path, damaged: impl Fn(io::Error) -> ImageError) -> ImageError {
        let text = |name: &[u8]| {
            let text: String = String::from_utf8_lossy(name).chars().take(256).collect();
            text
        };
        match self {
            Self::Content(source) => damaged(source),
            Self::Refused { entry, reason } => ImageError::Refused { entry: text(&entry), reason },
            // The name comes from the author of the archive.
            Self::Host { entry, source }
                if source.raw_os_error() == Some(Errno::NAMETOOLONG.raw_os_error()) =>
            {
                let reason = "its name, or what it links to, is longer than the filesystem of this host allows";
                ImageError::Refused { entry: text(&entry), reason }
            }
            Self::Host { entry, source } => {
                let path = diff.join(text(&entry).trim_start_matches('/'));
                ImageError::Io { action: "unpack", path, source }
            }
        }
    }
}

struct Unpacker<'a> {
    tree: LayerTree,
    below: Below<'a>,
    diff: &'a Path,
    form: Form,
    /// Room left.
    left: u64,
    entries: u64,
    /// Directories that were described, whose times are set when nothing is made in them any more.
    dirs: Dirs,
    borrowed: bool,
    files: u64,
    bytes: u64,
    devices: u64,
    attributes: u64,
    /// Whether no entry was taken yet.
    first: bool,
}

impl Unpacker<'_> {
    fn take(&mut self, entry: ArchiveEntry, content: &mut impl Read) -> Result<(), Trouble> {
        let refused = |reason| Trouble::Refused { entry: entry.path.clone(), reason };
        if entry.path.contains(&0) || entry.link.contains(&0) {
            return Err(refused("its name has a NUL byte"));
        }
        let climbs = |path: &[u8]| path.split(|b| *b == b'/').any(|part| part == b"..");
        let depth = entry.path.split(|b| *b == b'/').filter(|part| !part.is_empty()).count();
        if self.form == Form::Upper && depth > DEEPEST_UPPER {
            return Err(refused("it is nested deeper than 16,384 directories"));
        }
        let long = depth > DEEPEST || entry.path.len() > LONGEST_PATH;
        if self.form != Form::Upper && long {
            return Err(refused("its name is too long"));
        }
        if has_long_name(&entry.path) {
            return Err(refused("a part of its name is longer than 255 bytes"));
        }
        if let Some(reason) = bad_link(&entry) {
            return Err(refused(reason));
        }
        if climbs(&entry.path) {
            return Err(refused("its name has `..` in it"));
        }
        if entry.kind == TarKind::HardLink && climbs(&entry.link) {
            return Err(refused("it is a hard link with `..` in it"));
        }
        let (parent, name) = split(&entry.path);
        let host = |source| Trouble::Host { entry: entry.path.clone(), source };
        if name.is_empty() {
            if entry.kind != TarKind::Directory {
                return Err(refused("it would replace the top of the image"));
            }
            self.first = false;
            self.dirs.push(&[], entry.attributes).map_err(refused)?;
            if self.form == Form::Upper {
                let xattrs = wanted(&entry, self.form);
                self.attributes += give_xattrs(self.tree.top(), xattrs).map_err(host)?;
            }
            return Ok(());
        }
        if self.first && self.form == Form::Upper {
            return Err(refused("it comes before the directory it is in"));
        }
        self.first = false;
        let is_whiteout = entry.kind == TarKind::Whiteout && self.form == Form::Upper;
        if matches!(entry.kind, TarKind::Device | TarKind::Whiteout) && !is_whiteout {
            self.devices += 1;
            return Ok(());
        }
        let place = self.enter(&parent).map_err(host)?;
        self.files += 1;
        if self.form == Form::Layer && name.starts_with(WHITEOUT) {
            return self.whiteout(&place, &name).map_err(host)?.map_err(refused);
        }
        match entry.kind {
            TarKind::File => self.file(&place, &name, &entry, content),
            TarKind::Directory => {
                self.directory(&place, &name, &entry).map_err(host)?.map_err(refused)
            }
            TarKind::Symlink => self.symlink(&place, &name, &entry).map_err(host),
            TarKind::Fifo => self.fifo(&place, &name, &entry).map_err(host),
            TarKind::HardLink => {
                self.hard_link(&place, &name, &entry).map_err(host)?.map_err(refused)
            }
            TarKind::Whiteout => self.hidden(&place, &name, &entry).map_err(host),
            TarKind::Device | TarKind::Unknown => Err(refused("it is of no kind that is known")),
        }
    }

    fn enter(&mut self, path: &[u8]) -> io::Result<ParentDir> {
        let (below, borrowed) = (&self.below, &mut self.borrowed);
        let mut missing = |path: &[u8]| match below.find(&names_of(path)) {
            Some(found) if found.metadata.is_dir() => {
                *borrowed = true;
                attributes_of(&found.metadata)
            }
            _ => Attributes::DIRECTORY,
        };
        self.tree.enter(path, &mut missing)
    }

    fn whiteout(&mut self, place: &ParentDir, name: &[u8]) -> io::Result<Result<(), &'static str>> {
        if name == OPAQUE_MARK {
            tree::hide_below(&place.dir)?;
            return Ok(Ok(()));
        }
        if name.starts_with(RESERVED) {
            return Ok(Ok(()));
        }
        let hidden = &name[WHITEOUT.len()..];
        if hidden.is_empty() || hidden == b"." || hidden == b".." {
            return Ok(Err("it marks nothing as removed"));
        }
        match tree::stat(place.fd(), hidden)? {
            None => tree::make_whiteout(place.fd(), hidden)?,
            Some(stat) if FileType::from_raw_mode(stat.st_mode).is_dir() => {
                let dir = super::attributes::open_dir(place.fd(), hidden)?;
                tree::hide_below(&dir)?;
            }
            // A file of this layer hides what is below by being there.
            Some(_) => {}
        }
        Ok(Ok(()))
    }

    fn file(
        &mut self,
        place: &ParentDir,
        name: &[u8],
        entry: &ArchiveEntry,
        content: &mut impl Read,
    ) -> Result<(), Trouble> {
        let host = |source: io::Error| Trouble::Host { entry: entry.path.clone(), source };
        self.clear(place, name).map_err(host)?;
        let mut file = create_file(place.fd(), name).map_err(|error| host(error.into()))?;
        let mut buffer = vec![0; COPY_BUFFER];
        for (offset, length) in &entry.pieces {
            file.seek(io::SeekFrom::Start(*offset)).map_err(host)?;
            let mut left = *length;
            while left > 0 {
                let most = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                let read = content.read(&mut buffer[..most]).map_err(Trouble::Content)?;
                if read == 0 {
                    return Err(Trouble::Content(stream::cut_short()));
                }
                let written = write_with_holes(&mut file, &buffer[..read]).map_err(host)?;
                left -= read as u64;
                if self.form == Form::Upper {
                    let full = || Trouble::Content(io::ErrorKind::FileTooLarge.into());
                    self.left = self.left.checked_sub(written).ok_or_else(full)?;
                }
            }
        }
        file.set_len(entry.size).map_err(host)?;
        self.bytes += entry.size;
        entry.attributes.give(&file).map_err(host)?;
        let xattrs = wanted(entry, self.form);
        self.attributes += give_xattrs(file.as_fd(), xattrs).map_err(host)?;
        Ok(())
    }

    fn directory(
        &mut self,
        place: &ParentDir,
        name: &[u8],
        entry: &ArchiveEntry,
    ) -> io::Result<Result<(), &'static str>> {
        let mut hides = false;
        let dir = match tree::stat(place.fd(), name)? {
            Some(stat) if FileType::from_raw_mode(stat.st_mode).is_dir() => {
                super::attributes::open_dir(place.fd(), name)?
            }
            other => {
                hides = other.is_some_and(|stat| tree::is_whiteout(&stat));
                self.clear(place, name)?;
                tree::make_dir(place.fd(), name, &entry.attributes)?
            }
        };
        if hides {
            tree::hide_below(&dir)?;
        }
        entry.attributes.give(&dir)?;
        self.attributes += give_xattrs(dir.as_fd(), wanted(entry, self.form))?;
        Ok(self.dirs.push(&tree::joined(&place.path, name), entry.attributes))
    }

    fn symlink(&mut self, place: &ParentDir, name: &[u8], entry: &ArchiveEntry) -> io::Result<()> {
        self.clear(place, name)?;
        rustix::fs::symlinkat(entry.link.as_slice(), place.fd(), name)?;
        self.special(place, name, entry)
    }

    /// A name that is no more, as overlayfs wrote it.
    fn hidden(&mut self, place: &ParentDir, name: &[u8], entry: &ArchiveEntry) -> io::Result<()> {
        self.clear(place, name)?;
        tree::make_whiteout(place.fd(), name)?;
        self.special(place, name, entry)
    }

    /// Gives its attributes to what cannot be opened.
    fn special(&mut self, place: &ParentDir, name: &[u8], entry: &ArchiveEntry) -> io::Result<()> {
        entry.attributes.give_at(place.fd(), name, entry.kind == TarKind::Symlink)?;
        if self.form != Form::Upper || entry.xattrs.is_empty() {
            return Ok(());
        }
        let dir = format!("/proc/self/fd/{}/", place.fd().as_raw_fd());
        let path = [dir.as_bytes(), name].concat();
        for (key, value) in wanted(entry, self.form) {
            let outcome =
                rustix::fs::lsetxattr(path.as_slice(), key.as_str(), value, XattrFlags::empty());
            self.attributes += u64::from(!taken(outcome)?);
        }
        Ok(())
    }

    fn fifo(&mut self, place: &ParentDir, name: &[u8], entry: &ArchiveEntry) -> io::Result<()> {
        self.clear(place, name)?;
        rustix::fs::mkfifoat(place.fd(), name, Mode::from_raw_mode(0o600))?;
        self.special(place, name, entry)
    }

    fn hard_link(
        &mut self,
        place: &ParentDir,
        name: &[u8],
        entry: &ArchiveEntry,
    ) -> io::Result<Result<(), &'static str>> {
        let (parent, target) = split(&entry.link);
        if target.is_empty() {
            return Ok(Err("it is a hard link to the top of the image"));
        }
        let here = self.tree.find(&parent)?;
        let found = match &here {
            Some(at) => tree::stat(at.fd(), &target)?,
            None => None,
        };
        let source = match (here, found) {
            (Some(at), Some(stat)) => {
                // The kernel makes many whiteouts of one.
                let hidden = tree::is_whiteout(&stat) && self.form != Form::Upper;
                if hidden || FileType::from_raw_mode(stat.st_mode).is_dir() {
                    return Ok(Err("it is a hard link to something that is no file"));
                }
                at
            }
            _ => match self.copy_up(&parent, &target)? {
                Some(at) => at,
                None => return Ok(Err("it is a hard link to something that is not there")),
            },
        };
        if source.path == place.path && target == name {
            return Ok(Ok(()));
        }
        self.clear(place, name)?;
        rustix::fs::linkat(source.fd(), &target, place.fd(), name, AtFlags::empty())?;
        Ok(Ok(()))
    }

    /// Copies a file from the layers below into this one.
    fn copy_up(&mut self, parent: &[u8], name: &[u8]) -> io::Result<Option<ParentDir>> {
        let mut path = names_of(parent);
        path.push(name.to_vec());
        let Some(found) = self.below.find(&path).filter(|found| found.metadata.is_file()) else {
            return Ok(None);
        };
        self.borrowed = true;
        let from = found.path.parent().unwrap_or(self.diff);
        let from = std::fs::File::open(from)?;
        let Some(from_name) = found.path.file_name() else { return Ok(None) };
        let place = self.enter(parent)?;
        copy_file(
            from.as_fd(),
            std::os::unix::ffi::OsStrExt::as_bytes(from_name),
            place.fd(),
            name,
        )?;
        Ok(Some(place))
    }

    /// Makes way for an entry.
    fn clear(&mut self, place: &ParentDir, name: &[u8]) -> io::Result<()> {
        let Some(stat) = tree::stat(place.fd(), name)? else { return Ok(()) };
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind.is_dir() || kind.is_symlink() {
            self.tree.forget();
        }
        tree::remove(place.fd(), name)
    }

    /// Sets the times of directories, which making their entries has changed.
    fn finish(&mut self) -> ImageResult<()> {
        let trouble = ImageError::io("finish", self.diff);
        let mut all = || -> io::Result<()> {
            std::mem::take(&mut self.dirs).each(|path, attributes| {
                let found = self.tree.find(path)?;
                // A later entry may have put a link in its place, which leads elsewhere.
                if let Some(place) = found.filter(|place| place.path == path) {
                    attributes.give(place.fd())?;
                }
                Ok(())
            })
        };
        all().map_err(trouble)
    }
}

fn has_long_name(path: &[u8]) -> bool {
    path.split(|byte| *byte == b'/').any(|name| name.len() > LONGEST_NAME)
}

/// What is wrong with where a link leads, as far as the archive alone shows.
fn bad_link(entry: &ArchiveEntry) -> Option<&'static str> {
    match entry.kind {
        TarKind::Symlink if entry.link.is_empty() => Some("it is a symlink to nothing"),
        TarKind::Symlink if entry.link.len() > LONGEST_TARGET => {
            Some("it is a symlink to a path of more than 4,095 bytes")
        }
        TarKind::HardLink if has_long_name(&entry.link) => {
            Some("it is a hard link to a name of more than 255 bytes")
        }
        _ => None,
    }
}

/// The names that a path is made of.
fn names_of(path: &[u8]) -> Names {
    path.split(|b| *b == b'/').filter(|part| !part.is_empty()).map(<[u8]>::to_vec).collect()
}

/// Parent and last part of a name, which may begin with `/` or `./` and end with `/`.
fn split(path: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let leads = |part: &&[u8]| !part.is_empty() && *part != b".";
    let mut parts: Vec<&[u8]> = path.split(|b| *b == b'/').filter(leads).collect();
    let name = parts.pop().unwrap_or_default().to_vec();
    (parts.join(&b'/'), name)
}

/// Writes bytes, but passes over blocks of zeros: they become holes. Returns how many were written.
fn write_with_holes(file: &mut std::fs::File, bytes: &[u8]) -> io::Result<u64> {
    let mut written = 0;
    for block in bytes.chunks(HOLE) {
        if block.iter().all(|b| *b == 0) {
            file.seek(io::SeekFrom::Current(i64::try_from(block.len()).unwrap_or(0)))?;
        } else {
            file.write_all(block)?;
            written += block.len() as u64;
        }
    }
    Ok(written)
}

fn attributes_of(metadata: &std::fs::Metadata) -> Attributes {
    use std::os::unix::fs::MetadataExt as _;
    Attributes {
        uid: metadata.uid(),
        gid: metadata.gid(),
        mode: metadata.mode() & 0o7777,
        mtime: (metadata.mtime(), metadata.mtime_nsec()),
    }
}
