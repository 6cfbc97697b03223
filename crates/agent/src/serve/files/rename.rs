//! Moving files and directories.
//!
//! A rename where the kernel can. It cannot across filesystems, nor for a directory that a lower
//! layer of an overlay holds; then the tree is copied to a temporary name beside its new name,
//! renamed there, and the old one removed, like `mv` does.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps};
use rustix::io::Errno;
use sandkeep_proto::link::Reply;

use super::write::Temporary;
use crate::serve::error::RequestError;
use crate::serve::files::worker::FileTarget;

/// Renames `target` to `to`.
pub(crate) fn rename(target: FileTarget, to: &str) -> Result<Reply, RequestError> {
    let from = &target.path;
    let to = target.beside(to);
    match fs::rename(from, &to) {
        Ok(()) => Ok(Reply::Ok),
        Err(error) if Errno::from_io_error(&error) == Some(Errno::XDEV) => {
            across(from, &to).map(|()| Reply::Ok)
        }
        Err(error) => {
            // Which of the two was the trouble is not in what the system says.
            let what = format!("move to `{}`", to.display());
            Err(RequestError::io(&what, from, &error))
        }
    }
}

fn across(from: &Path, to: &Path) -> Result<(), RequestError> {
    let temporary = Temporary::name(to);
    let moved = copy(from, &temporary, &mut HashMap::new()).and_then(|()| {
        fs::rename(&temporary, to).map_err(|error| RequestError::io("move into place", to, &error))
    });
    if let Err(problem) = moved {
        let _ = remove(&temporary);
        return Err(problem);
    }
    remove(from).map_err(|error| RequestError::io("remove", from, &error))
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path)?.is_dir() {
        true => fs::remove_dir_all(path),
        false => fs::remove_file(path),
    }
}

/// Copies a tree as it is: modes, times, owners where allowed, links among its own files.
fn copy(
    from: &Path,
    to: &Path,
    links: &mut HashMap<(u64, u64), PathBuf>,
) -> Result<(), RequestError> {
    let problem = |error: io::Error| RequestError::io("copy", from, &error);
    let meta = fs::symlink_metadata(from).map_err(problem)?;
    let linked = meta.nlink() > 1 && !meta.is_dir();
    if linked && let Some(first) = links.get(&(meta.dev(), meta.ino())) {
        return fs::hard_link(first, to).map_err(problem);
    }
    if meta.is_dir() {
        fs::create_dir(to).map_err(problem)?;
        for child in fs::read_dir(from).map_err(problem)? {
            let name = child.map_err(problem)?.file_name();
            copy(&from.join(&name), &to.join(&name), links)?;
        }
    } else if meta.is_symlink() {
        std::os::unix::fs::symlink(fs::read_link(from).map_err(problem)?, to).map_err(problem)?;
    } else if meta.is_file() {
        let mut source = File::open(from).map_err(problem)?;
        let mut target = File::create_new(to).map_err(problem)?;
        io::copy(&mut source, &mut target).map_err(problem)?;
    } else {
        let kind = FileType::from_raw_mode(meta.mode());
        rustix::fs::mknodat(CWD, to, kind, Mode::from_raw_mode(meta.mode()), meta.rdev())
            .map_err(|errno| problem(errno.into()))?;
    }
    if linked {
        links.insert((meta.dev(), meta.ino()), to.to_owned());
    }
    // Who may not give files away keeps them, as with `mv`.
    let _ = lchown(to, Some(meta.uid()), Some(meta.gid()));
    if !meta.is_symlink() {
        fs::set_permissions(to, fs::Permissions::from_mode(meta.mode() & 0o7777))
            .map_err(problem)?;
    }
    let time = |seconds, nanos| Timespec { tv_sec: seconds, tv_nsec: nanos };
    let times = Timestamps {
        last_access: time(meta.atime(), meta.atime_nsec()),
        last_modification: time(meta.mtime(), meta.mtime_nsec()),
    };
    let _ = rustix::fs::utimensat(CWD, to, &times, AtFlags::SYMLINK_NOFOLLOW);
    Ok(())
}
