//! The layer of a customized image as a tar archive: it is unpacked like any other layer, by the same rules.

use std::fs::{self, File, Metadata};
use std::io::{self, PipeReader, Read, Write};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use tar::{EntryType, Header};

use super::super::attributes::keeps_xattr;

/// One thing in it.
#[derive(Debug)]
pub(in crate::store::image) enum TarPart {
    Directory {
        path: PathBuf,
        mode: u32,
        owner: (u32, u32),
    },
    File {
        path: PathBuf,
        mode: u32,
        owner: (u32, u32),
        content: Vec<u8>,
    },
    /// One thing of the host as it is, but for its owner and mode: of a directory, not what is in it.
    Taken {
        from: PathBuf,
        to: PathBuf,
        mode: u32,
        owner: (u32, u32),
    },
    /// A directory of the host with all that is in it, as root's.
    Tree {
        from: PathBuf,
        to: PathBuf,
    },
}

/// An archive that is written while it is read.
#[derive(Debug)]
pub(in crate::store::image) struct CustomizationTar {
    pipe: PipeReader,
    writer: Option<JoinHandle<io::Result<()>>>,
}

impl CustomizationTar {
    /// Starts writing. `time` is that of everything that has none of its own.
    pub(in crate::store::image) fn of(parts: Vec<TarPart>, time: u64) -> io::Result<Self> {
        let (pipe, into) = io::pipe()?;
        let writer = std::thread::spawn(move || write(parts, time, into));
        Ok(Self { pipe, writer: Some(writer) })
    }
}

impl Read for CustomizationTar {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.pipe.read(into)?;
        if read == 0
            && !into.is_empty()
            && let Some(writer) = self.writer.take()
        {
            // The end of the pipe is the archive's only if its writer reports so.
            writer.join().unwrap_or_else(|_| Err(io::Error::other("its writer broke off")))?;
        }
        Ok(read)
    }
}

fn write(parts: Vec<TarPart>, time: u64, into: impl Write) -> io::Result<()> {
    let mut builder = tar::Builder::new(io::BufWriter::with_capacity(64 << 10, into));
    for part in parts {
        match part {
            TarPart::Directory { path, mode, owner } => {
                let mut header = header(EntryType::Directory, mode, 0, owner, time);
                builder.append_data(&mut header, path, io::empty())?;
            }
            TarPart::File { path, mode, owner, content } => {
                let mut header =
                    header(EntryType::Regular, mode, content.len() as u64, owner, time);
                builder.append_data(&mut header, path, content.as_slice())?;
            }
            TarPart::Taken { from, to, mode, owner } => {
                taken(&mut builder, &from, &to, mode, owner)
                    .map_err(|error| named(&from, &error))?;
            }
            TarPart::Tree { from, to } => tree(&mut builder, &from, &to)?,
        }
    }
    builder.into_inner()?.flush()
}

fn header(kind: EntryType, mode: u32, size: u64, owner: (u32, u32), time: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_uid(owner.0.into());
    header.set_gid(owner.1.into());
    header.set_mtime(time);
    header
}

fn taken<W: Write>(
    builder: &mut tar::Builder<W>,
    from: &Path,
    to: &Path,
    mode: u32,
    owner: (u32, u32),
) -> io::Result<()> {
    let found = fs::symlink_metadata(from)?;
    let kind = found.file_type();
    if kind.is_file() || kind.is_dir() {
        let kept = kept_xattrs(from)?;
        let named: Vec<(String, &[u8])> =
            kept.iter().map(|(name, value)| (format!("SCHILY.xattr.{name}"), &value[..])).collect();
        if !named.is_empty() {
            builder
                .append_pax_extensions(named.iter().map(|(name, value)| (name.as_str(), *value)))?;
        }
    }
    let time = u64::try_from(found.mtime()).unwrap_or(0);
    if kind.is_dir() {
        let mut header = header(EntryType::Directory, mode, 0, owner, time);
        builder.append_data(&mut header, to, io::empty())
    } else if kind.is_symlink() {
        let mut header = header(EntryType::Symlink, 0o777, 0, owner, time);
        builder.append_link(&mut header, to, fs::read_link(from)?)
    } else if kind.is_file() {
        let mut header = header(EntryType::Regular, mode, found.len(), owner, time);
        builder.append_data(&mut header, to, &mut File::open(from)?.take(found.len()))
    } else if kind.is_fifo() {
        let mut header = header(EntryType::Fifo, mode, 0, owner, time);
        builder.append_data(&mut header, to, io::empty())
    } else {
        Ok(())
    }
}

/// The extended attributes of a file that a layer may hold.
pub(in crate::store::image) fn kept_xattrs(path: &Path) -> io::Result<Vec<(String, Vec<u8>)>> {
    let names = match xattr::list(path) {
        Ok(names) => names,
        Err(error) if error.kind() == io::ErrorKind::Unsupported => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut kept = Vec::new();
    for name in names.filter_map(|name| name.into_string().ok()).filter(|name| keeps_xattr(name)) {
        if let Some(value) = xattr::get(path, &name)? {
            kept.push((name, value));
        }
    }
    kept.sort();
    Ok(kept)
}

/// Appends a directory and what is in it, in the order of names.
fn tree<W: Write>(builder: &mut tar::Builder<W>, from: &Path, to: &Path) -> io::Result<()> {
    // What is named may itself be a link; the links inside stay links.
    let from = fs::canonicalize(from).map_err(|error| named(from, &error))?;
    let mut todo = vec![(from, to.to_owned())];
    while let Some((from, to)) = todo.pop() {
        let found = fs::symlink_metadata(&from).map_err(|error| named(&from, &error))?;
        append(builder, &from, &to, &found).map_err(|error| named(&from, &error))?;
        if found.is_dir() {
            let entries = fs::read_dir(&from).and_then(Iterator::collect::<io::Result<Vec<_>>>);
            let mut names: Vec<_> = entries
                .map_err(|error| named(&from, &error))?
                .into_iter()
                .map(|entry| entry.file_name())
                .collect();
            names.sort_unstable_by(|a, b| b.cmp(a));
            todo.extend(names.iter().map(|name| (from.join(name), to.join(name))));
        }
    }
    Ok(())
}

fn append<W: Write>(
    builder: &mut tar::Builder<W>,
    from: &Path,
    to: &Path,
    found: &Metadata,
) -> io::Result<()> {
    if to.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b".wh.")) {
        return Err(io::Error::other("a name that begins with `.wh.` means removal in a layer"));
    }
    let kind = found.file_type();
    // What runs as its owner was trusted as that owner, and everything becomes root's.
    let mode = if found.uid() == 0 { found.mode() & 0o7777 } else { found.mode() & 0o777 };
    let time = u64::try_from(found.mtime()).unwrap_or(0);
    if kind.is_dir() {
        let mut header = header(EntryType::Directory, mode, 0, (0, 0), time);
        builder.append_data(&mut header, to, io::empty())
    } else if kind.is_symlink() {
        let mut header = header(EntryType::Symlink, 0o777, 0, (0, 0), time);
        builder.append_link(&mut header, to, fs::read_link(from)?)
    } else if kind.is_file() {
        let file = File::open(from)?;
        let length = file.metadata()?.len();
        let mut header = header(EntryType::Regular, mode, length, (0, 0), time);
        // A file that grows meanwhile is taken as long as it was; one that shrinks breaks the archive.
        let mut content = file.take(length);
        builder.append_data(&mut header, to, &mut content)?;
        if content.limit() > 0 {
            return Err(io::Error::other("it became shorter while it was read"));
        }
        Ok(())
    } else {
        // Sockets, pipes and devices mean something to a running host only.
        Ok(())
    }
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
