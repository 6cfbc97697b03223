//! Owners, modes, times and extended attributes, and copies that keep them.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid, XattrFlags};
use rustix::io::Errno;

/// What a file has besides its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Attributes {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) mode: u32,
    /// Seconds and nanoseconds.
    pub(super) mtime: (i64, i64),
}

impl Attributes {
    /// Those of a directory without an entry.
    pub(super) const DIRECTORY: Self = Self { uid: 0, gid: 0, mode: 0o755, mtime: (0, 0) };

    pub(super) fn of(stat: &Stat) -> Self {
        Self {
            uid: stat.st_uid,
            gid: stat.st_gid,
            mode: stat.st_mode & 0o7777,
            mtime: (stat.st_mtime, i64::try_from(stat.st_mtime_nsec).unwrap_or(0)),
        }
    }

    /// Gives them to an open file or directory. The owner comes first, because a change of owner
    /// takes the setuid bit away.
    pub(super) fn give(&self, file: impl AsFd) -> io::Result<()> {
        let file = file.as_fd();
        rustix::fs::fchown(file, Some(Uid::from_raw(self.uid)), Some(Gid::from_raw(self.gid)))?;
        rustix::fs::fchmod(file, Mode::from_raw_mode(self.mode))?;
        rustix::fs::futimens(file, &self.times())?;
        Ok(())
    }

    /// Gives owner and time to a symlink or special file, and its mode to the latter.
    pub(super) fn give_at(&self, dir: BorrowedFd<'_>, name: &[u8], link: bool) -> io::Result<()> {
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        rustix::fs::chownat(dir, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
        if !link {
            rustix::fs::chmodat(dir, name, Mode::from_raw_mode(self.mode), AtFlags::empty())?;
        }
        rustix::fs::utimensat(dir, name, &self.times(), AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(())
    }

    fn times(&self) -> Timestamps {
        let time = Timespec { tv_sec: self.mtime.0, tv_nsec: self.mtime.1 };
        Timestamps { last_access: time, last_modification: time }
    }
}

/// Opens a directory in `parent` without following a symlink.
pub(super) fn open_dir(parent: BorrowedFd<'_>, name: &[u8]) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(parent, name, flags, Mode::empty())
}

/// Makes a new file in `parent`, which must not have one of that name.
pub(super) fn create_file(parent: BorrowedFd<'_>, name: &[u8]) -> Result<File, Errno> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(parent, name, flags, Mode::from_raw_mode(0o600)).map(File::from)
}

/// Copies a regular file with its attributes: by reflink where the filesystem can, else byte by byte.
pub(super) fn copy_file(
    from: BorrowedFd<'_>,
    from_name: &[u8],
    to: BorrowedFd<'_>,
    to_name: &[u8],
) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mut source = File::from(rustix::fs::openat(from, from_name, flags, Mode::empty())?);
    let stat = rustix::fs::fstat(&source)?;
    let mut target = create_file(to, to_name)?;
    if rustix::fs::ioctl_ficlone(&target, &source).is_err() {
        io::copy(&mut source, &mut target)?;
    }
    copy_xattrs(&source, &target)?;
    Attributes::of(&stat).give(&target)
}

fn copy_xattrs(from: &File, to: &File) -> io::Result<()> {
    use xattr::FileExt as _;
    let names = match from.list_xattr() {
        Ok(names) => names,
        Err(error) if error.kind() == io::ErrorKind::Unsupported => return Ok(()),
        Err(error) => return Err(error),
    };
    for name in names {
        let Some(text) = name.to_str().filter(|name| keeps_xattr(name)) else { continue };
        if let Some(value) = from.get_xattr(&name)? {
            rustix::fs::fsetxattr(to, text, &value, XattrFlags::empty())?;
        }
    }
    Ok(())
}

/// An access list, which names users as the file's owner does.
const ACCESS_LISTS: [&str; 2] = ["system.posix_acl_access", "system.posix_acl_default"];
/// How long a file capability is that is meant for root of any machine (revision 2). A longer one names a user id of the host.
const CAPABILITY_LENGTH: usize = 20;
/// What overlayfs shows to programs as `user.overlay.`: data of theirs.
const ESCAPED: &str = "user.overlay.overlay.";

/// What an entry of a machine's export is, as far as its attributes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Carrier {
    Directory,
    EmptyFile,
    Other,
}

/// Whether a layer may hold an extended attribute that a machine exported. Root in the machine can
/// have written any: below its own overlay, or into the stream. So this is a list of what is
/// allowed, not of what is not:
///
/// - `user.*`, which means nothing to a kernel;
/// - access lists, whose ids are the sandbox's own, as owners are;
/// - `security.capability` in the form without a user id: packages set it (`ping`), images keep it too, and it counts in the
///   sandbox's own user namespace only;
/// - of overlayfs's own marks those that say that a name is deleted, on what they belong on. The others name files of lower layers.
///
/// `trusted.*` and the rest of `security.*` are the host's own to say: labels, integrity, other overlays.
pub(super) fn keeps_exported_xattr(name: &str, value: &[u8], carrier: Carrier) -> bool {
    match name {
        "security.capability" => value.len() == CAPABILITY_LENGTH,
        "user.overlay.opaque" => carrier == Carrier::Directory && matches!(value, b"y" | b"x"),
        "user.overlay.whiteout" => carrier == Carrier::EmptyFile,
        _ if ACCESS_LISTS.contains(&name) => true,
        _ if name.starts_with(ESCAPED) => true,
        _ => name.starts_with("user.") && !name.starts_with("user.overlay."),
    }
}

/// Whether a layer may hold an extended attribute: what programs put there themselves, and file
/// capabilities. Labels and access lists speak of the machine they were made on, and
/// `user.overlay.` is how overlayfs itself speaks, which no archive may do.
pub(super) fn keeps_xattr(name: &str) -> bool {
    name == "security.capability"
        || (name.starts_with("user.") && !name.starts_with("user.overlay."))
}

#[cfg(test)]
mod tests {
    use super::{Carrier, keeps_exported_xattr};

    #[test]
    fn an_export_brings_what_is_listed_and_nothing_else() {
        let kept = |name: &str, value: &[u8]| keeps_exported_xattr(name, value, Carrier::Other);
        for name in ["user.note", "system.posix_acl_access", "user.overlay.overlay.redirect"] {
            assert!(kept(name, b"x"), "{name}");
        }
        assert!(kept("security.capability", &[0; 20]));
        assert!(!kept("security.capability", &[0; 24]), "it names a user of the host");
        for name in [
            "security.selinux",
            "security.ima",
            "security.evm",
            "security.apparmor",
            "trusted.overlay.redirect",
            "trusted.mark",
            "system.nfs4_acl",
            "user.overlay.redirect",
            "user.overlay.metacopy",
            "user.overlay.origin",
            "user.overlay.opaque",
            "user.overlay.whiteout",
            "user.overlay.",
            "made.up",
            "",
        ] {
            assert!(!kept(name, b"y"), "{name}");
        }
        let opaque =
            |value: &[u8], carrier| keeps_exported_xattr("user.overlay.opaque", value, carrier);
        assert!(opaque(b"y", Carrier::Directory) && opaque(b"x", Carrier::Directory));
        assert!(!opaque(b"z", Carrier::Directory) && !opaque(b"y", Carrier::EmptyFile));
        assert!(keeps_exported_xattr("user.overlay.whiteout", b"y", Carrier::EmptyFile));
    }
}
