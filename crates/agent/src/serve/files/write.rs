//! Writing a file: all of it, or nothing.
//!
//! Bytes go to a temporary name beside the file, which is then renamed over it, so a reader sees the
//! old file or the new one. A symlink is written through, like a shell would. An existing file
//! keeps its owner and, by default, its mode. Where nothing can be put beside it (a directory the
//! user may not write to, a file that is a mount) the file is overwritten in place.

use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::Access;
use rustix::io::Errno;
use sandkeep_proto::link::{Done, Failure, Reply};

use super::make_parents;
use crate::serve::error::RequestError;
use crate::serve::files::worker::{FileTarget, FileTask};

/// As many links as the kernel itself would follow.
const LINKS: usize = 40;

/// Writes a file from what the host sends.
pub(crate) fn write(
    target: FileTarget,
    task: &mut FileTask,
    mode: Option<u32>,
    parents: bool,
    append: bool,
) -> Result<Done, RequestError> {
    let path = follow(&target.path)?;
    if parents {
        make_parents(&path)?;
    }
    let existing = existing(&path)?;
    if append {
        add(&path, task, mode, existing.is_some())?;
    } else {
        replace(&path, task, mode, existing.as_ref())?;
    }
    Ok(Done::Moved { bytes: task.received, files: 1 })
}

/// Where writing to `path` would end up: itself, or where a final symlink leads, there or not.
fn follow(path: &Path) -> Result<PathBuf, RequestError> {
    let mut path = path.to_owned();
    for _ in 0..LINKS {
        match fs::read_link(&path) {
            Ok(target) => {
                let parent = path.parent().unwrap_or(Path::new("/")).to_owned();
                path = parent.join(target);
            }
            Err(_) => return Ok(path),
        }
    }
    Err(RequestError::io("write", &path, &Errno::LOOP.into()))
}

/// What exists, if it is something that can be written.
fn existing(path: &Path) -> Result<Option<Metadata>, RequestError> {
    let problem = |error: io::Error| RequestError::io("write", path, &error);
    let invalid = |what: &str| {
        let message = format!("could not write `{}`: it is {what}", path.display());
        RequestError::new(Failure::Invalid, message)
    };
    if path.as_os_str().as_encoded_bytes().ends_with(b"/") {
        return Err(invalid("the name of a directory"));
    }
    let meta = match fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(problem(error)),
    };
    if meta.is_dir() {
        return Err(invalid("a directory"));
    }
    if !meta.is_file() {
        return Err(invalid("not a plain file"));
    }
    // A rename asks only the directory; the file has a say too.
    let flags = rustix::fs::AtFlags::EACCESS;
    rustix::fs::accessat(rustix::fs::CWD, path, Access::WRITE_OK, flags)
        .map_err(|errno| problem(errno.into()))?;
    Ok(Some(meta))
}

fn add(
    path: &Path,
    task: &mut FileTask,
    mode: Option<u32>,
    existed: bool,
) -> Result<(), RequestError> {
    let problem = |error: io::Error| RequestError::io("write", path, &error);
    let mut options = File::options();
    options.append(true).create(true).mode(0o644).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let mut file = options.open(path).map_err(problem)?;
    if let Some(mode) = mode.filter(|_| !existed) {
        file.set_permissions(Permissions::from_mode(mode & 0o7777)).map_err(problem)?;
    }
    task.reply(Reply::Ok)?;
    io::copy(task, &mut file).map(drop).map_err(problem)
}

fn replace(
    path: &Path,
    task: &mut FileTask,
    mode: Option<u32>,
    existing: Option<&Metadata>,
) -> Result<(), RequestError> {
    let problem = |error: io::Error| RequestError::io("write", path, &error);
    let (mut file, temporary) = match Temporary::beside(path) {
        Ok(made) => made,
        Err(error) if existing.is_some() && is_forbidden(&error) => {
            return overwrite(path, task, mode);
        }
        Err(error) => return Err(problem(error)),
    };
    task.reply(Reply::Ok)?;
    io::copy(task, &mut file).map_err(problem)?;
    if let Some(meta) = existing {
        let own = file.metadata().map_err(problem)?;
        if (own.uid(), own.gid()) != (meta.uid(), meta.gid()) {
            // Only root can, and only root needs to: others made the file anew as their own.
            let _ = fchown(&file, Some(meta.uid()), Some(meta.gid()));
        }
    }
    let mode = mode.or_else(|| existing.map(MetadataExt::mode)).unwrap_or(0o644) & 0o7777;
    file.set_permissions(Permissions::from_mode(mode)).map_err(problem)?;
    match fs::rename(&temporary.0, path) {
        Ok(()) => {
            // The name is gone; there is nothing left to remove.
            std::mem::forget(temporary);
            Ok(())
        }
        Err(error) if Errno::from_io_error(&error) == Some(Errno::BUSY) => {
            let mut source = File::open(&temporary.0).map_err(problem)?;
            let mut file = open_in_place(path).map_err(problem)?;
            io::copy(&mut source, &mut file).map(drop).map_err(problem)
        }
        Err(error) => Err(problem(error)),
    }
}

fn is_forbidden(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::ACCESS | Errno::PERM | Errno::ROFS))
}

fn open_in_place(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.write(true).truncate(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    options.open(path)
}

fn overwrite(path: &Path, task: &mut FileTask, mode: Option<u32>) -> Result<(), RequestError> {
    let problem = |error: io::Error| RequestError::io("write", path, &error);
    let mut file = open_in_place(path).map_err(problem)?;
    task.reply(Reply::Ok)?;
    io::copy(task, &mut file).map_err(problem)?;
    file.flush().map_err(problem)?;
    if let Some(mode) = mode {
        file.set_permissions(Permissions::from_mode(mode & 0o7777)).map_err(problem)?;
    }
    Ok(())
}

/// A name that goes away unless the file got its real one.
pub(crate) struct Temporary(pub(in crate::serve) PathBuf);

impl Temporary {
    /// An unused name beside `path`.
    pub(crate) fn name(path: &Path) -> PathBuf {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let clock = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |since| since.as_nanos());
        path.with_file_name(format!(".keep-{clock:x}-{count:x}"))
    }

    fn beside(path: &Path) -> io::Result<(File, Self)> {
        let temporary = Self::name(path);
        let mut options = File::options();
        // No other user reads it before it is whole.
        options.write(true).read(true).create_new(true).mode(0o600);
        let file = options.open(&temporary)?;
        Ok((file, Self(temporary)))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}
