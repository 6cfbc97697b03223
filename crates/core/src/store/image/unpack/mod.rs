//! Turns a layer's archive into a directory for overlayfs.
//!
//! An OCI layer says what is gone by names: `.wh.x` for `x`, `.wh..wh..opq` for all that the layers
//! below have in a directory. On disk these become what overlayfs reads in a user namespace: a
//! character device 0:0, and the attribute `user.overlay.opaque`. Owners, modes, times, hard links,
//! symlinks, pipes, file capabilities and `user.` attributes are kept as the archive has them.
//!
//! Rules for what archives leave open, or try:
//!
//! - Of several entries with one name, the last counts. A directory gives way to a file, and a file
//!   to a directory.
//! - A whiteout speaks of the layers below only: next to an entry of its own layer it hides just them.
//! - A directory that is needed and not described looks as it does below, else is root's, 0755.
//! - A hard link to a file below copies that file up first, as overlayfs would.
//! - Names with `..` are refused; names that begin with `/` begin at the top of the image. Links
//!   are kept as they are: they are followed in the sandbox, where the image's top is the top, and
//!   while unpacking by [`tree`], where it is too.
//! - Device nodes are left out, and counted: a sandbox has its own /dev, and could not open others.
//! - What does not fit the room it is given stops the unpacking.
//!
//! A failed unpacking leaves a directory that is of no use; the caller removes it.

mod below;
mod compression;
mod listing;
mod stream;
mod tree;

use std::io::{self, Read, Seek as _, Write as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, XattrFlags};
use sha2::{Digest as _, Sha256};

use self::stream::{Entry, Kind, TarStream};
use self::tree::{Place, Resolved, Tree};
use super::attributes::{Attributes, copy_file, create_file, keeps_xattr};
use super::error::{ImageError, ImageResult};
use crate::model::Size;

pub(super) use self::below::{Below, Names};
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
/// Each directory on the way to a file takes a descriptor while it is walked.
const DEEPEST: usize = 256;
const COPY_BUFFER: usize = 128 << 10;
const HOLE: usize = 4096;

/// How much may be unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Bytes.
    pub bytes: u64,
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
}

/// Unpacks `archive`, compressed or not, into the empty directory `diff`, which will lie on top of
/// `below` (the first is the topmost). `what` names it in errors.
///
/// # Errors
///
/// Returns an error that tells a damaged archive from a hostile one and from trouble on this host.
pub fn unpack_layer(
    what: &str,
    archive: impl Read,
    form: Form,
    diff: &Path,
    below: &[PathBuf],
    room: Room,
) -> ImageResult<Unpacked> {
    let plain = compression::open(what, archive)?;
    let too_large =
        || ImageError::TooLarge { what: what.to_owned(), limit: Size(room.bytes), why: room.why };
    let top = below.first().and_then(|top| std::fs::metadata(top).ok());
    let top = top.map_or(Attributes::DIRECTORY, |metadata| attributes_of(&metadata));
    let mut stream = TarStream::new(Hashed::new(plain, &room));
    let mut unpacker = Unpacker {
        tree: Tree::open(diff).map_err(ImageError::io("open", diff))?,
        below: Below(below),
        diff,
        form,
        left: room.bytes,
        dirs: vec![(Vec::new(), top)],
        borrowed: false,
        files: 0,
        bytes: 0,
        devices: 0,
    };
    let damaged = |source: io::Error| match source.kind() {
        io::ErrorKind::FileTooLarge => too_large(),
        _ => ImageError::Damaged { what: what.to_owned(), source },
    };
    while let Some(entry) = stream.next().map_err(damaged)? {
        unpacker.left = unpacker
            .left
            .checked_sub(entry.size.saturating_add(ENTRY_COST))
            .ok_or_else(too_large)?;
        unpacker.take(entry, &mut stream).map_err(|trouble| trouble.told(diff, damaged))?;
    }
    if form == Form::Root && !stream.ended() {
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
            Self::Host { entry, source } => {
                let path = diff.join(text(&entry).trim_start_matches('/'));
                ImageError::Io { action: "unpack", path, source }
            }
        }
    }
}

struct Unpacker<'a> {
    tree: Tree,
    below: Below<'a>,
    diff: &'a Path,
    form: Form,
    /// Room left.
    left: u64,
    /// Directories that were described, whose times are set when nothing is made in them any more.
    dirs: Vec<(Resolved, Attributes)>,
    borrowed: bool,
    files: u64,
    bytes: u64,
    devices: u64,
}

impl Unpacker<'_> {
    fn take(&mut self, entry: Entry, content: &mut impl Read) -> Result<(), Trouble> {
        let refused = |reason| Trouble::Refused { entry: entry.path.clone(), reason };
        if entry.path.contains(&0) || entry.link.contains(&0) {
            return Err(refused("its name has a NUL byte"));
        }
        let climbs = |path: &[u8]| path.split(|b| *b == b'/').any(|part| part == b"..");
        let deep = entry.path.split(|b| *b == b'/').count() > DEEPEST;
        if deep || entry.path.len() > LONGEST_PATH {
            return Err(refused("its name is too long"));
        }
        if climbs(&entry.path) {
            return Err(refused("its name has `..` in it"));
        }
        if entry.kind == Kind::HardLink && climbs(&entry.link) {
            return Err(refused("it is a hard link with `..` in it"));
        }
        let (parent, name) = split(&entry.path);
        let host = |source| Trouble::Host { entry: entry.path.clone(), source };
        if name.is_empty() {
            if entry.kind != Kind::Directory {
                return Err(refused("it would replace the top of the image"));
            }
            self.dirs.push((Vec::new(), entry.attributes));
            return Ok(());
        }
        if entry.kind == Kind::Device {
            self.devices += 1;
            return Ok(());
        }
        let place = self.enter(&parent).map_err(host)?;
        self.files += 1;
        if self.form == Form::Layer && name.starts_with(WHITEOUT) {
            return self.whiteout(&place, &name).map_err(host)?.map_err(refused);
        }
        match entry.kind {
            Kind::File => self.file(&place, &name, &entry, content),
            Kind::Directory => self.directory(&place, &name, &entry).map_err(host),
            Kind::Symlink => self.symlink(&place, &name, &entry).map_err(host),
            Kind::Fifo => self.fifo(&place, &name, &entry).map_err(host),
            Kind::HardLink => self.hard_link(&place, &name, &entry).map_err(host)?.map_err(refused),
            Kind::Device | Kind::Unknown => Err(refused("it is of no kind that is known")),
        }
    }

    fn enter(&mut self, path: &[u8]) -> io::Result<Place> {
        let (below, borrowed) = (&self.below, &mut self.borrowed);
        let mut missing = |path: &[Vec<u8>]| match below.find(path) {
            Some(found) if found.metadata.is_dir() => {
                *borrowed = true;
                attributes_of(&found.metadata)
            }
            _ => Attributes::DIRECTORY,
        };
        self.tree.enter(path, &mut missing)
    }

    fn whiteout(&mut self, place: &Place, name: &[u8]) -> io::Result<Result<(), &'static str>> {
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
        place: &Place,
        name: &[u8],
        entry: &Entry,
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
                write_with_holes(&mut file, &buffer[..read]).map_err(host)?;
                left -= read as u64;
            }
        }
        file.set_len(entry.size).map_err(host)?;
        self.bytes += entry.size;
        entry.attributes.give(&file).map_err(host)?;
        give_xattrs(&file, entry).map_err(host)
    }

    fn directory(&mut self, place: &Place, name: &[u8], entry: &Entry) -> io::Result<()> {
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
        give_xattrs(&dir, entry)?;
        let mut path = place.path.clone();
        path.push(name.to_vec());
        self.dirs.push((path, entry.attributes));
        Ok(())
    }

    fn symlink(&mut self, place: &Place, name: &[u8], entry: &Entry) -> io::Result<()> {
        self.clear(place, name)?;
        rustix::fs::symlinkat(entry.link.as_slice(), place.fd(), name)?;
        entry.attributes.give_at(place.fd(), name, true)
    }

    fn fifo(&mut self, place: &Place, name: &[u8], entry: &Entry) -> io::Result<()> {
        self.clear(place, name)?;
        rustix::fs::mkfifoat(place.fd(), name, Mode::from_raw_mode(0o600))?;
        entry.attributes.give_at(place.fd(), name, false)
    }

    fn hard_link(
        &mut self,
        place: &Place,
        name: &[u8],
        entry: &Entry,
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
                if tree::is_whiteout(&stat) || FileType::from_raw_mode(stat.st_mode).is_dir() {
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
    fn copy_up(&mut self, parent: &[u8], name: &[u8]) -> io::Result<Option<Place>> {
        let mut path: Vec<Vec<u8>> =
            parent.split(|b| *b == b'/').filter(|p| !p.is_empty()).map(<[u8]>::to_vec).collect();
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
    fn clear(&mut self, place: &Place, name: &[u8]) -> io::Result<()> {
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
            for (path, attributes) in self.dirs.drain(..) {
                let found = self.tree.find(&path.join(&b'/'))?;
                // A later entry may have put a link in its place, which leads elsewhere.
                if let Some(place) = found.filter(|place| place.path == path) {
                    attributes.give(place.fd())?;
                }
            }
            Ok(())
        };
        all().map_err(trouble)
    }
}

/// Parent and last part of a name, which may begin with `/` or `./` and end with `/`.
fn split(path: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let leads = |part: &&[u8]| !part.is_empty() && *part != b".";
    let mut parts: Vec<&[u8]> = path.split(|b| *b == b'/').filter(leads).collect();
    let name = parts.pop().unwrap_or_default().to_vec();
    (parts.join(&b'/'), name)
}

/// Writes bytes, but passes over blocks of zeros: they become holes.
fn write_with_holes(file: &mut std::fs::File, bytes: &[u8]) -> io::Result<()> {
    for block in bytes.chunks(HOLE) {
        if block.iter().all(|b| *b == 0) {
            file.seek(io::SeekFrom::Current(i64::try_from(block.len()).unwrap_or(0)))?;
        } else {
            file.write_all(block)?;
        }
    }
    Ok(())
}

fn give_xattrs(file: &impl std::os::fd::AsFd, entry: &Entry) -> io::Result<()> {
    for (name, value) in entry.xattrs.iter().filter(|(name, _)| keeps_xattr(name)) {
        rustix::fs::fsetxattr(file, name.as_str(), value, XattrFlags::empty())?;
    }
    Ok(())
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

/// Computes the digest of what is read through it, and bounds it.
struct Hashed<R> {
    inner: R,
    hash: Sha256,
    left: u64,
}

impl<R: Read> Hashed<R> {
    fn new(inner: R, room: &Room) -> Self {
        // Headers and padding come on top of what is unpacked; an archive has few bytes behind its
        // end, a bomb has many.
        let left = room.bytes.saturating_mul(2).saturating_add(64 << 20);
        Self { inner, hash: Sha256::new(), left }
    }

    fn digest(self) -> String {
        super::digest::text(&self.hash.finalize())
    }
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(into)?;
        self.left = self
            .left
            .checked_sub(read as u64)
            .ok_or_else(|| io::Error::from(io::ErrorKind::FileTooLarge))?;
        self.hash.update(&into[..read]);
        Ok(read)
    }
}
