//! Opening files of a backup, whose manifest may be damaged or made up.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};

/// Opens a regular file below `root` for reading. Whatever else has that name, a device, a pipe or a link, is refused.
pub(super) fn open_below(root: &Path, path: &Path) -> io::Result<File> {
    let below = path.strip_prefix(root).map_err(|_| refused("lies outside the backup"))?;
    let dir = rustix::fs::openat(CWD, root, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    // A pipe would wait for its other end.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file: File = rustix::fs::openat2(&dir, below, flags, Mode::empty(), resolve)?.into();
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(refused("is no regular file")),
    }
}

/// Whether a digest of a manifest can name an object.
pub(super) fn is_digest(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Whether an id of a manifest can name an archive.
pub(super) fn is_archive_id(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    (1..=100).contains(&text.len()) && text.bytes().all(plain)
}

fn refused(reason: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, reason)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::{is_archive_id, is_digest, open_below};

    #[test]
    fn only_regular_files_of_the_backup_are_opened() {
        let home = tempfile::tempdir().unwrap();
        let root = home.path().join("backup");
        std::fs::create_dir_all(root.join("objects/aa")).unwrap();
        std::fs::write(root.join("objects/aa/file"), "x").unwrap();
        std::fs::write(home.path().join("outside"), "x").unwrap();
        symlink("file", root.join("objects/aa/link")).unwrap();
        symlink("../../..", root.join("objects/up")).unwrap();
        let pipe = root.join("objects/aa/pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
        assert!(open_below(&root, &root.join("objects/aa/file")).is_ok());
        for bad in
            ["objects/aa/link", "objects/up/outside", "../outside", "objects/aa", "objects/aa/pipe"]
        {
            assert!(open_below(&root, &root.join(bad)).is_err(), "{bad}");
        }
        assert!(open_below(&root, "/dev/zero".as_ref()).is_err());
    }

    #[test]
    fn names_in_manifests_are_checked() {
        assert!(is_digest(&"0a".repeat(32)));
        for bad in ["", "../../etc/passwd", &"0A".repeat(32), &"0a".repeat(33)] {
            assert!(!is_digest(bad), "{bad}");
        }
        assert!(is_archive_id("lay-01j8z3k5m6n7p8q9r0s1t2v3w4"));
        for bad in ["", "/dev/zero", "..", "a/b", "a.b"] {
            assert!(!is_archive_id(bad), "{bad}");
        }
    }
}
