//! Directories as streams of tar, made and unpacked on a thread of their own while they travel.

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Component, Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use indicatif::ProgressBar;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::mpsc;

/// How many pieces may wait for the other side.
const WAITING: usize = 8;
const PIECE: usize = 256 << 10;

/// Packs what is in `directory`. The archive names no owner: its files belong to the user who
/// unpacks it.
pub(super) fn pack(directory: PathBuf, bar: ProgressBar) -> mpsc::Receiver<io::Result<Bytes>> {
    pack_chosen(directory, bar, |_, _| true, Vec::new())
}

/// Packs what `choose` takes of what is in `directory`, and files besides. It is asked for each path, relative to the
/// directory, and whether that is a directory; what is in one that it does not take is not packed either.
pub(super) fn pack_chosen(
    directory: PathBuf,
    bar: ProgressBar,
    mut choose: impl FnMut(&Path, bool) -> bool + Send + 'static,
    besides: Vec<(String, Vec<u8>)>,
) -> mpsc::Receiver<io::Result<Bytes>> {
    let (sender, receiver) = mpsc::channel(WAITING);
    tokio::task::spawn_blocking(move || {
        let pipe = io::BufWriter::with_capacity(PIECE, Pipe { sender: sender.clone(), bar });
        if let Err(error) = pack_all(&directory, pipe, &mut choose, &besides) {
            // If nobody receives any more, there is nobody to tell.
            let _ = sender.blocking_send(Err(error));
        }
    });
    receiver
}

fn pack_all(
    directory: &Path,
    pipe: impl Write,
    choose: &mut dyn FnMut(&Path, bool) -> bool,
    besides: &[(String, Vec<u8>)],
) -> io::Result<()> {
    let mut builder = tar::Builder::new(pipe);
    builder.follow_symlinks(false);
    let mut left = vec![PathBuf::new()];
    while let Some(inner) = left.pop() {
        let outer = directory.join(&inner);
        let named = |error: io::Error| {
            io::Error::new(error.kind(), format!("`{}`: {error}", outer.display()))
        };
        for entry in fs::read_dir(&outer).map_err(named)? {
            let entry = entry.map_err(named)?;
            let (inner, outer) = (inner.join(entry.file_name()), entry.path());
            let named = |error: io::Error| {
                io::Error::new(error.kind(), format!("`{}`: {error}", outer.display()))
            };
            let metadata = fs::symlink_metadata(&outer).map_err(named)?;
            let kind = metadata.file_type();
            if !choose(&inner, kind.is_dir()) {
                continue;
            }
            if kind.is_dir() {
                builder.append_data(
                    &mut owned_header(&metadata, 0),
                    with_slash(&inner),
                    io::empty(),
                )?;
                left.push(inner);
            } else if kind.is_symlink() {
                let target = fs::read_link(&outer).map_err(named)?;
                let mut header = owned_header(&metadata, 0);
                builder.append_link(&mut header, &inner, target)?;
            } else if kind.is_file() {
                let file = fs::File::open(&outer).map_err(named)?;
                // A file that grows meanwhile must not spill into the next entry.
                let size = metadata.len();
                builder.append_data(
                    &mut owned_header(&metadata, size),
                    &inner,
                    Exactly::new(file, size),
                )?;
            }
            // Sockets, pipes and devices have no content to copy.
        }
    }
    for (name, content) in besides {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o644);
        header.set_size(content.len() as u64);
        builder.append_data(&mut header, name, content.as_slice())?;
    }
    builder.into_inner()?.flush()
}

fn with_slash(path: &Path) -> PathBuf {
    path.join("")
}

fn owned_header(metadata: &fs::Metadata, size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_metadata(metadata);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(size);
    header
}

/// Yields exactly as many bytes as announced, with zeros for what has gone.
struct Exactly<R> {
    reader: R,
    left: u64,
}

impl<R> Exactly<R> {
    fn new(reader: R, left: u64) -> Self {
        Self { reader, left }
    }
}

impl<R: Read> Read for Exactly<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        if most == 0 {
            return Ok(0);
        }
        let mut read = self.reader.read(&mut buffer[..most])?;
        if read == 0 {
            buffer[..most].fill(0);
            read = most;
        }
        self.left -= read as u64;
        Ok(read)
    }
}

/// The writing end of a channel.
struct Pipe {
    sender: mpsc::Sender<io::Result<Bytes>>,
    bar: ProgressBar,
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let gone = |_| io::Error::from(io::ErrorKind::BrokenPipe);
        self.sender.blocking_send(Ok(Bytes::copy_from_slice(bytes))).map_err(gone)?;
        self.bar.inc(bytes.len() as u64);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What was in an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unpacked {
    pub(super) files: u64,
    /// The content of files, without what the archive needs for itself.
    pub(super) bytes: u64,
}

/// Unpacks an archive whose names all begin with `top` so that `top` becomes `destination`.
/// Ownership is not restored, links out of `destination` are refused, and so is everything else
/// that is not below `top`: the archive comes from a sandbox, which is not to be trusted.
pub(super) fn unpack(
    source: mpsc::Receiver<io::Result<Bytes>>,
    top: Option<String>,
    destination: &Path,
) -> io::Result<Unpacked> {
    fs::create_dir_all(destination)?;
    let mut archive = tar::Archive::new(Source::new(source));
    let mut directories = Vec::new();
    let (mut files, mut bytes) = (0, 0);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let name = entry.path()?.into_owned();
        let Some(inner) = below(&name, top.as_deref()) else {
            let name = name.display();
            return Err(io::Error::other(format!(
                "the archive names `{name}`, which is outside it"
            )));
        };
        if inner.as_os_str().is_empty() {
            continue;
        }
        match entry.header().entry_type() {
            // Modes last, or a read-only directory could not be filled.
            tar::EntryType::Directory => {
                make_inside(destination, &inner)?;
                directories.push((inner, entry.header().mode()?));
            }
            tar::EntryType::Regular | tar::EntryType::Continuous | tar::EntryType::GNUSparse => {
                let at = fresh_place(destination, &inner)?;
                entry.unpack(&at)?;
                files += 1;
                bytes += entry.size();
            }
            tar::EntryType::Symlink => {
                let at = fresh_place(destination, &inner)?;
                let target = entry.link_name()?.unwrap_or_default().into_owned();
                std::os::unix::fs::symlink(target, at)?;
                files += 1;
            }
            tar::EntryType::Link => {
                let target = entry.link_name()?.unwrap_or_default().into_owned();
                let target = below(&target, top.as_deref())
                    .ok_or_else(|| io::Error::other("the archive links to a file outside it"))?;
                let from = existing_place(destination, &target)?;
                fs::hard_link(from, fresh_place(destination, &inner)?)?;
                files += 1;
            }
            // Devices and pipes of a sandbox are of no use here.
            _ => {}
        }
    }
    for (inner, mode) in directories.into_iter().rev() {
        use std::os::unix::fs::PermissionsExt as _;
        let at = existing_place(destination, &inner)?;
        fs::set_permissions(at, fs::Permissions::from_mode(mode & 0o777))?;
    }
    Ok(Unpacked { files, bytes })
}

/// The same archive, with names that do not begin with `top`. The entry of `top` itself is left out.
pub(super) fn without_top(
    source: mpsc::Receiver<io::Result<Bytes>>,
    top: Option<String>,
) -> mpsc::Receiver<io::Result<Bytes>> {
    let (sender, receiver) = mpsc::channel(WAITING);
    tokio::task::spawn_blocking(move || {
        let pipe = Pipe { sender: sender.clone(), bar: ProgressBar::hidden() };
        let pipe = io::BufWriter::with_capacity(PIECE, pipe);
        if let Err(error) = renamed(source, top.as_deref(), pipe) {
            // Without a receiver there is nobody to notify.
            let _ = sender.blocking_send(Err(error));
        }
    });
    receiver
}

fn renamed(
    source: mpsc::Receiver<io::Result<Bytes>>,
    top: Option<&str>,
    pipe: impl Write,
) -> io::Result<()> {
    let mut archive = tar::Archive::new(Source::new(source));
    let mut builder = tar::Builder::new(pipe);
    let inside = |name: &Path| {
        below(name, top).ok_or_else(|| {
            io::Error::other(format!("the archive names `{}`, which is outside it", name.display()))
        })
    };
    for entry in archive.entries()? {
        let mut entry = entry?;
        let inner = inside(&entry.path()?)?;
        if inner.as_os_str().is_empty() {
            continue;
        }
        let mut attributes = Vec::new();
        for extension in entry.pax_extensions()?.into_iter().flatten() {
            let extension = extension?;
            // Names, sizes and times are in the header and what follows it.
            if extension.key_bytes().starts_with(b"SCHILY.xattr.") {
                let key = extension.key().map_err(io::Error::other)?.to_owned();
                attributes.push((key, extension.value_bytes().to_vec()));
            }
        }
        if !attributes.is_empty() {
            builder.append_pax_extensions(
                attributes.iter().map(|(key, value)| (key.as_str(), value.as_slice())),
            )?;
        }
        let mut header = entry.header().clone();
        match header.entry_type() {
            tar::EntryType::Symlink => {
                let target = entry.link_name()?.unwrap_or_default().into_owned();
                builder.append_link(&mut header, &inner, target)?;
            }
            tar::EntryType::Link => {
                let target = inside(&entry.link_name()?.unwrap_or_default())?;
                builder.append_link(&mut header, &inner, target)?;
            }
            tar::EntryType::Directory => {
                builder.append_data(&mut header, with_slash(&inner), io::empty())?;
            }
            _ => {
                header.set_size(entry.size());
                builder.append_data(&mut header, &inner, entry)?;
            }
        }
    }
    builder.into_inner()?.flush()
}

/// The part of `name` below `top`; nothing if it is not below.
pub(super) fn below(name: &Path, top: Option<&str>) -> Option<PathBuf> {
    let mut parts = Vec::new();
    for part in name.components() {
        match part {
            Component::Normal(part) => parts.push(part),
            Component::CurDir => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    match top {
        Some(top) if parts.first().is_some_and(|first| *first == top) => {
            Some(parts[1..].iter().collect())
        }
        Some(_) if parts.is_empty() => Some(PathBuf::new()),
        Some(_) => None,
        None => Some(parts.iter().collect()),
    }
}

/// Makes the directories of `inner`, and never walks through a symlink to do so.
pub(super) fn make_inside(destination: &Path, inner: &Path) -> io::Result<PathBuf> {
    let mut at = destination.to_path_buf();
    for part in inner.components() {
        at.push(part);
        match fs::symlink_metadata(&at) {
            Ok(metadata) if metadata.is_dir() => {}
            Ok(_) => {
                let at = at.display();
                return Err(io::Error::other(format!("`{at}` is in the way of a directory")));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => fs::create_dir(&at)?,
            Err(error) => return Err(error),
        }
    }
    Ok(at)
}

pub(super) fn existing_place(destination: &Path, inner: &Path) -> io::Result<PathBuf> {
    let parent = make_inside(destination, inner.parent().unwrap_or(Path::new("")))?;
    Ok(parent.join(inner.file_name().unwrap_or_default()))
}

/// A place where nothing is, so that nothing is written through what was there.
pub(super) fn fresh_place(destination: &Path, inner: &Path) -> io::Result<PathBuf> {
    let at = existing_place(destination, inner)?;
    match fs::remove_file(&at) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(at),
    }
}

/// The reading end of a channel.
pub(super) struct Source {
    channel: mpsc::Receiver<io::Result<Bytes>>,
    rest: Bytes,
}

impl Source {
    pub(super) fn new(channel: mpsc::Receiver<io::Result<Bytes>>) -> Self {
        Self { channel, rest: Bytes::new() }
    }
}

impl Read for Source {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.rest.is_empty() {
            match self.channel.blocking_recv() {
                Some(piece) => self.rest = piece?,
                None => return Ok(0),
            }
        }
        let count = self.rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&self.rest.split_to(count));
        Ok(count)
    }
}

/// Reads, and moves a bar.
#[derive(Debug)]
pub(super) struct Counted<R> {
    reader: R,
    bar: ProgressBar,
}

impl<R> Counted<R> {
    pub(super) fn new(reader: R, bar: ProgressBar) -> Self {
        Self { reader, bar }
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for Counted<R> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        ready!(Pin::new(&mut this.reader).poll_read(cx, buffer))?;
        this.bar.inc((buffer.filled().len() - before) as u64);
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io;
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::path::Path;

    use bytes::Bytes;
    use indicatif::ProgressBar;
    use tokio::sync::mpsc;

    use super::{Unpacked, pack, unpack};

    fn unpack_bytes(archive: Vec<u8>, top: &str, into: &Path) -> io::Result<Unpacked> {
        let (sender, receiver) = mpsc::channel(1);
        sender.try_send(Ok(Bytes::from(archive))).unwrap();
        drop(sender);
        unpack(receiver, Some(top.to_owned()), into)
    }

    /// An archive with one entry. Names are written raw: the library would refuse the bad ones.
    fn archive(name: &str, kind: tar::EntryType, link: &str, content: &[u8]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        append(&mut builder, name, kind, link, content);
        builder.into_inner().unwrap()
    }

    fn append(
        builder: &mut tar::Builder<Vec<u8>>,
        name: &str,
        kind: tar::EntryType,
        link: &str,
        content: &[u8],
    ) {
        let mut header = tar::Header::new_gnu();
        let raw = header.as_gnu_mut().unwrap();
        raw.name[..name.len()].copy_from_slice(name.as_bytes());
        raw.linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(0o644);
        header.set_size(content.len() as u64);
        header.set_cksum();
        builder.append(&header, content).unwrap();
    }

    #[test]
    fn what_is_packed_is_unpacked_the_same() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let long = "n".repeat(200);
        fs::create_dir_all(from.path().join("a/empty")).unwrap();
        fs::write(from.path().join("a").join(&long), vec![9; 700_000]).unwrap();
        fs::write(from.path().join("run"), "#!").unwrap();
        fs::set_permissions(from.path().join("run"), fs::Permissions::from_mode(0o755)).unwrap();
        symlink("../nowhere", from.path().join("a/link")).unwrap();
        let unpacked = runtime.block_on(async {
            let pieces = pack(from.path().to_path_buf(), ProgressBar::hidden());
            let to = to.path().to_path_buf();
            tokio::task::spawn_blocking(move || unpack(pieces, None, &to)).await.unwrap().unwrap()
        });
        assert_eq!(unpacked, Unpacked { files: 3, bytes: 700_002 });
        assert_eq!(fs::read(to.path().join("a").join(&long)).unwrap(), vec![9; 700_000]);
        assert_eq!(fs::read_link(to.path().join("a/link")).unwrap(), Path::new("../nowhere"));
        assert!(to.path().join("a/empty").is_dir());
        let mode = to.path().join("run").metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o755);
    }

    #[test]
    fn an_archive_cannot_leave_its_directory() {
        let outer = tempfile::tempdir().unwrap();
        let into = outer.path().join("into");
        let regular = tar::EntryType::Regular;
        for name in ["../out", "/out", "top/../../out", "other/out"] {
            let refused = unpack_bytes(archive(name, regular, "", b"x"), "top", &into);
            assert!(refused.is_err(), "{name}");
        }
        let link = archive("top/l", tar::EntryType::Link, "/etc/passwd", b"");
        assert!(unpack_bytes(link, "top", &into).is_err());
        let mut through = tar::Builder::new(Vec::new());
        append(&mut through, "top/l", tar::EntryType::Symlink, "..", b"");
        append(&mut through, "top/l/out", regular, "", b"x");
        assert!(unpack_bytes(through.into_inner().unwrap(), "top", &into).is_err());
        assert!(!outer.path().join("out").exists());
    }

    #[test]
    fn a_symlink_that_is_in_the_way_is_replaced_and_not_followed() {
        let outer = tempfile::tempdir().unwrap();
        let (into, victim) = (outer.path().join("into"), outer.path().join("victim"));
        fs::create_dir(&into).unwrap();
        fs::write(&victim, "safe").unwrap();
        symlink(&victim, into.join("file")).unwrap();
        let sent = archive("top/file", tar::EntryType::Regular, "", b"new");
        unpack_bytes(sent, "top", &into).unwrap();
        assert_eq!(fs::read(&victim).unwrap(), b"safe");
        assert_eq!(fs::read(into.join("file")).unwrap(), b"new");
    }

    #[test]
    fn setuid_bits_and_devices_stay_behind() {
        let into = tempfile::tempdir().unwrap();
        let mut builder = tar::Builder::new(Vec::new());
        append(&mut builder, "top/null", tar::EntryType::Char, "", b"");
        append(&mut builder, "top/pipe", tar::EntryType::Fifo, "", b"");
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o4755);
        header.set_size(1);
        builder.append_data(&mut header, "top/root", &b"x"[..]).unwrap();
        unpack_bytes(builder.into_inner().unwrap(), "top", into.path()).unwrap();
        let names: Vec<_> =
            into.path().read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["root"]);
        let mode = into.path().join("root").metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o755);
    }
}
