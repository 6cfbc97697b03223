//! Packs a file or a directory as a tar stream.
//!
//! Names, links, modes, owners, times and extended attributes go in as they are; sockets do not.
//! A file that vanishes while the tree is walked is left out, one that changes its length is cut or
//! filled with zeros to the length it had: the stream is always well formed.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata};
use std::io::{self, BufWriter, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use sandkeep_proto::frame::CHUNK;
use sandkeep_proto::link::{Done, Reply};
use tar::{Builder, EntryType, Header};

use crate::serve::error::RequestError;
use crate::serve::files::entry;
use crate::serve::files::tar_in::XATTR;
use crate::serve::files::worker::{FileTarget, FileTask};

/// The longest link target that fits an entry's own header.
const LINK: usize = 100;

/// Packs what is at `target`, names relative to its parent.
pub(crate) fn pack(target: FileTarget, task: &mut FileTask) -> Result<Done, RequestError> {
    let path = &target.path;
    let problem = |error: io::Error| RequestError::io("pack", path, &error);
    let meta = fs::symlink_metadata(path).map_err(problem)?;
    task.reply(Reply::Stat { entry: entry(path, path.as_os_str().as_bytes(), &meta) })?;
    let name = match path.file_name() {
        Some(name) => PathBuf::from(name),
        None => PathBuf::new(),
    };
    let builder = Builder::new(BufWriter::with_capacity(CHUNK, &mut *task));
    let mut packing = Packing { builder, links: HashMap::new(), files: 0 };
    packing.tree(path, &name)?;
    let Packing { builder, files, .. } = packing;
    let buffer = builder.into_inner().map_err(problem)?;
    let task = buffer.into_inner().map_err(|error| problem(error.into_error()))?;
    Ok(Done::Moved { bytes: task.sent, files })
}

struct Packing<'a> {
    builder: Builder<BufWriter<&'a mut FileTask>>,
    /// Under which name a file with several names was packed first.
    links: HashMap<(u64, u64), PathBuf>,
    files: u64,
}

impl Packing<'_> {
    fn tree(&mut self, path: &Path, name: &Path) -> Result<(), RequestError> {
        let problem = |error: io::Error| RequestError::io("pack", path, &error);
        let Some(meta) = found(fs::symlink_metadata(path)).map_err(problem)? else {
            return Ok(());
        };
        if !meta.is_dir() {
            return self.leaf(path, name, &meta).map_err(problem);
        }
        // A root directory has no name to pack it under; what it holds does.
        if !name.as_os_str().is_empty() {
            self.attributes(path).map_err(problem)?;
            let mut header = header(&meta, EntryType::Directory);
            self.builder.append_data(&mut header, name, io::empty()).map_err(problem)?;
            self.files += 1;
        }
        for child in names(path).map_err(problem)? {
            self.tree(&path.join(&child), &name.join(&child))?;
        }
        Ok(())
    }

    fn leaf(&mut self, path: &Path, name: &Path, meta: &Metadata) -> io::Result<()> {
        let kind = meta.file_type();
        if kind.is_socket() {
            return Ok(());
        }
        if meta.nlink() > 1 {
            let key = (meta.dev(), meta.ino());
            if let Some(first) = self.links.get(&key) {
                let first = first.clone();
                return self.link(name, meta, EntryType::Link, first.as_os_str());
            }
            self.links.insert(key, name.to_owned());
        }
        if kind.is_symlink() {
            let Some(target) = found(fs::read_link(path))? else { return Ok(()) };
            return self.link(name, meta, EntryType::Symlink, target.as_os_str());
        }
        if kind.is_file() {
            return self.file(path, name);
        }
        let kind = match () {
            () if kind.is_fifo() => EntryType::Fifo,
            () if kind.is_block_device() => EntryType::Block,
            () => EntryType::Char,
        };
        let mut header = header(meta, kind);
        header.set_device_major(rustix::fs::major(meta.rdev()))?;
        header.set_device_minor(rustix::fs::minor(meta.rdev()))?;
        self.files += 1;
        self.builder.append_data(&mut header, name, io::empty())
    }

    fn file(&mut self, path: &Path, name: &Path) -> io::Result<()> {
        let mut options = File::options();
        options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY);
        let Some(file) = found(options.open(path))? else { return Ok(()) };
        let meta = file.metadata()?;
        if !meta.is_file() {
            return Ok(());
        }
        self.attributes(path)?;
        let mut header = header(&meta, EntryType::Regular);
        header.set_size(meta.len());
        self.files += 1;
        let contents = file.chain(io::repeat(0)).take(meta.len());
        self.builder.append_data(&mut header, name, contents)
    }

    fn link(
        &mut self,
        name: &Path,
        meta: &Metadata,
        kind: EntryType,
        target: &OsStr,
    ) -> io::Result<()> {
        let target = target.as_bytes();
        let mut header = header(meta, kind);
        match target.get(..LINK) {
            Some(cut) if target.len() > LINK => {
                let mut long = Header::new_gnu();
                let length = target.len() as u64 + 1;
                long.set_entry_type(EntryType::GNULongLink);
                long.set_size(length);
                long.set_mode(0o644);
                long.as_old_mut()
                    .name
                    .iter_mut()
                    .zip(b"././@LongLink")
                    .for_each(|(to, from)| *to = *from);
                long.set_cksum();
                self.builder.append(&long, target.chain(io::repeat(0)).take(length))?;
                header.set_link_name_literal(cut)?;
            }
            _ => header.set_link_name_literal(target)?,
        }
        self.files += 1;
        self.builder.append_data(&mut header, name, io::empty())
    }

    /// Puts extended attributes before the entry they belong to.
    fn attributes(&mut self, path: &Path) -> io::Result<()> {
        let mut held = Vec::new();
        for attribute in attributes_of(path) {
            let key = format!("{XATTR}{attribute}");
            if let Some(value) = attribute_value(path, &attribute) {
                held.push((key, value));
            }
        }
        if held.is_empty() {
            return Ok(());
        }
        let pairs = held.iter().map(|(key, value)| (key.as_str(), value.as_slice()));
        self.builder.append_pax_extensions(pairs)
    }
}

/// The result; nothing if the file has vanished.
fn found<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(thing) => Ok(Some(thing)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn names(path: &Path) -> io::Result<Vec<OsString>> {
    let Some(listed) = found(fs::read_dir(path))? else { return Ok(Vec::new()) };
    let mut names =
        listed.map(|child| child.map(|child| child.file_name())).collect::<io::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

fn header(meta: &Metadata, kind: EntryType) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(meta.mode() & 0o7777);
    header.set_uid(meta.uid().into());
    header.set_gid(meta.gid().into());
    // Before 1970 there were no files worth the trouble.
    header.set_mtime(u64::try_from(meta.mtime()).unwrap_or(0));
    header.set_size(0);
    header
}

/// The names of the attributes worth carrying.
fn attributes_of(path: &Path) -> Vec<String> {
    let mut buffer = vec![0; 4096];
    let length = match rustix::fs::llistxattr(path, &mut buffer) {
        Ok(length) => length,
        Err(rustix::io::Errno::RANGE) => {
            buffer = vec![0; 64 << 10];
            rustix::fs::llistxattr(path, &mut buffer).unwrap_or(0)
        }
        Err(_) => 0,
    };
    let names = buffer.get(..length).unwrap_or_default().split(|byte| *byte == 0);
    names
        .filter_map(|name| std::str::from_utf8(name).ok())
        .filter(|name| name.starts_with("user.") || *name == "security.capability")
        .map(ToOwned::to_owned)
        .collect()
}

fn attribute_value(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut buffer = vec![0; 64 << 10];
    let length = rustix::fs::lgetxattr(path, name, &mut buffer).ok()?;
    buffer.truncate(length);
    Some(buffer)
}
