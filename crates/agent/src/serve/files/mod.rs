//! Single files and directories, as the user the thread has become.
//!
//! Paths are resolved by the kernel, from the sandbox's own root: there is nothing else they could
//! lead to.

mod list;
mod rename;
pub(crate) mod tar_in;
pub(crate) mod tar_out;
pub(crate) mod worker;
mod write;

use std::fs::{self, DirBuilder, File, Metadata};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use rustix::io::Errno;
use sandkeep_proto::frame::CHUNK;
use sandkeep_proto::link::{Done, Entry, EntryKind, Failure, Reply};

use crate::serve::error::RequestError;
use crate::serve::files::worker::{FileTarget, FileTask};

pub(crate) use list::list;
pub(crate) use rename::rename;
pub(crate) use write::write;

/// Reads a plain file.
pub(crate) fn read(
    target: FileTarget,
    task: &mut FileTask,
    offset: u64,
    limit: Option<u64>,
) -> Result<Done, RequestError> {
    let path = &target.path;
    let problem = |error: io::Error| RequestError::io("read", path, &error);
    let mut options = File::options();
    // Not to wait for the other side of a pipe, nor to be given a terminal.
    options.read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    let mut file = options.open(path).map_err(problem)?;
    let meta = file.metadata().map_err(problem)?;
    if !meta.is_file() {
        let what = if meta.is_dir() { "a directory" } else { "not a plain file" };
        let message = format!("could not read `{}`: it is {what}", path.display());
        return Err(RequestError::new(Failure::Invalid, message));
    }
    if offset > 0 {
        file.seek(SeekFrom::Start(offset)).map_err(problem)?;
    }
    task.reply(Reply::Stat { entry: entry(path, path.as_os_str().as_bytes(), &meta) })?;
    let mut rest = file.take(limit.unwrap_or(u64::MAX));
    let mut buffer = vec![0; CHUNK];
    loop {
        let count = match rest.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(problem(error)),
        };
        task.write_all(buffer.get(..count).unwrap_or_default()).map_err(problem)?;
    }
    Ok(Done::Moved { bytes: task.sent, files: 1 })
}

/// Makes a directory.
pub(crate) fn make_dir(
    target: FileTarget,
    mode: Option<u32>,
    parents: bool,
) -> Result<Reply, RequestError> {
    let path = &target.path;
    if parents {
        make_parents(path)?;
    }
    match DirBuilder::new().mode(mode.unwrap_or(0o755) & 0o7777).create(path) {
        Ok(()) => {}
        Err(error)
            if parents && Errno::from_io_error(&error) == Some(Errno::EXIST) && path.is_dir() =>
        {
            return Ok(Reply::Ok);
        }
        Err(error) => return Err(RequestError::io("make the directory", path, &error)),
    }
    if let Some(mode) = mode {
        // Past the umask, which is for those who do not say.
        fs::set_permissions(path, fs::Permissions::from_mode(mode & 0o7777))
            .map_err(|error| RequestError::io("set the mode of", path, &error))?;
    }
    Ok(Reply::Ok)
}

/// Makes the directories a path needs above it.
pub(crate) fn make_parents(path: &Path) -> Result<(), RequestError> {
    match path.parent() {
        Some(parent) => DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(parent)
            .map_err(|error| RequestError::io("make the directory", parent, &error)),
        None => Ok(()),
    }
}

/// Returns the metadata of a path, without following a final symlink.
pub(crate) fn stat(target: FileTarget) -> Result<Reply, RequestError> {
    let path = &target.path;
    let meta =
        fs::symlink_metadata(path).map_err(|error| RequestError::io("look at", path, &error))?;
    Ok(Reply::Stat { entry: entry(path, path.as_os_str().as_bytes(), &meta) })
}

/// Removes a file, or a directory, with all it holds if asked. Symlinks are removed, not followed.
pub(crate) fn remove(
    target: FileTarget,
    recursive: bool,
    missing_ok: bool,
) -> Result<Reply, RequestError> {
    let path = &target.path;
    let problem = |error: io::Error| RequestError::io("remove", path, &error);
    let meta = match fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(error) if error.kind() == io::ErrorKind::NotFound && missing_ok => {
            return Ok(Reply::Ok);
        }
        Err(error) => return Err(problem(error)),
    };
    let outcome = match (meta.is_dir(), recursive) {
        (false, _) => fs::remove_file(path),
        (true, false) => fs::remove_dir(path),
        (true, true) => fs::remove_dir_all(path),
    };
    match outcome {
        Ok(()) => Ok(Reply::Ok),
        // Somebody was faster.
        Err(error) if error.kind() == io::ErrorKind::NotFound && missing_ok => Ok(Reply::Ok),
        Err(error) => Err(problem(error)),
    }
}

/// Describes what is at `path`, under the name it is asked for.
pub(crate) fn entry(path: &Path, name: &[u8], meta: &Metadata) -> Entry {
    let kind = match meta.file_type() {
        kind if kind.is_file() => EntryKind::File,
        kind if kind.is_dir() => EntryKind::Directory,
        kind if kind.is_symlink() => EntryKind::Symlink,
        _ => EntryKind::Other,
    };
    let target = match kind {
        EntryKind::Symlink => fs::read_link(path).ok(),
        EntryKind::File | EntryKind::Directory | EntryKind::Other => None,
    };
    Entry {
        name: String::from_utf8_lossy(name).into_owned(),
        raw_name: std::str::from_utf8(name).is_err().then(|| base64(name)),
        kind,
        size: meta.len(),
        mode: meta.mode() & 0o7777,
        uid: meta.uid(),
        gid: meta.gid(),
        modified_ms: meta
            .mtime()
            .saturating_mul(1000)
            .saturating_add(meta.mtime_nsec() / 1_000_000),
        target: target.map(|target| target.to_string_lossy().into_owned()),
    }
}

/// Base64, as RFC 4648 has it.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: [char; 64] = [
        'A', 'B', 'C', 'D', 'E', 'F', 'G', 'H', 'I', 'J', 'K', 'L', 'M', 'N', 'O', 'P', 'Q', 'R',
        'S', 'T', 'U', 'V', 'W', 'X', 'Y', 'Z', 'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i', 'j',
        'k', 'l', 'm', 'n', 'o', 'p', 'q', 'r', 's', 't', 'u', 'v', 'w', 'x', 'y', 'z', '0', '1',
        '2', '3', '4', '5', '6', '7', '8', '9', '+', '/',
    ];
    let mut out = String::new();
    for group in bytes.chunks(3) {
        let byte = |at: usize| u32::from(group.get(at).copied().unwrap_or(0));
        let word = byte(0) << 16 | byte(1) << 8 | byte(2);
        for digit in 0..4 {
            // A group of n bytes has n + 1 digits.
            let index = (word >> (18 - 6 * digit)) & 63;
            let shown = DIGITS.get(index as usize).filter(|_| digit <= group.len());
            out.push(shown.copied().unwrap_or('='));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::base64;

    #[test]
    fn base64_is_as_everywhere() {
        for (plain, coded) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(plain.as_bytes()), coded);
        }
        assert_eq!(base64(&[0xff, 0xfe, 0xfd]), "//79");
    }
}
