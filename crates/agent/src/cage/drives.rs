//! Drives: further stacks of layers, mounted at places below the root.
//!
//! A place is looked up one name at a time, from the root down, and no name may be a link: the layers
//! were written by earlier users of the sandbox, and a link could lead a mount into the host's
//! tree, over `/proc`, or into another drive. What is missing is made, in the sandbox's own layer.
//!
//! Like the root, a drive needs a directory under its lowest layer, because there may be none: an
//! empty `base` beside its writable directory.

use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{CWD, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MoveMountFlags};
use sandkeep_proto::cage::{MOUNT_POINT, Mount};

use super::root::{self, MOUNT_POINTS, Mounts};
use super::{Step, StepError, network};

/// Unattached copies of the mounts the drives' layers are on, one for each [`Mount`].
pub(super) struct Drives(Vec<Mounts>);

impl Drives {
    /// Copies the mounts of all directories, as the host sees them.
    pub(super) fn copy(mounts: &[Mount]) -> Result<Self, StepError> {
        mounts.iter().map(|mount| Mounts::copy(&mount.root)).collect::<Result<_, _>>().map(Self)
    }

    /// As they are sent to another process.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().flat_map(Mounts::descriptors)
    }

    /// Shifts owners to the ids of `user_ns`. Possible as long as nothing is attached.
    pub(super) fn shift(&self, user_ns: BorrowedFd<'_>) -> Result<(), StepError> {
        self.0.iter().try_for_each(|mounts| mounts.shift(user_ns))
    }

    /// Mounts all drives below the current directory, which is the sandbox's root on the stage.
    pub(super) fn mount(self, mounts: &[Mount]) -> Result<(), StepError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(".", flags, Mode::empty()).step("hold the root")?;
        for (number, (mount, copies)) in mounts.iter().zip(&self.0).enumerate() {
            let place = place(&mount.target)?;
            let stage = format!("../drive-{number}");
            rustix::fs::mkdir(&stage, Mode::RWXU).step("set up the stage")?;
            std::env::set_current_dir(&stage).step("set up the stage")?;
            let mut flags = MountFlags::NODEV | MountFlags::NOSUID;
            if mount.read_only {
                flags |= MountFlags::RDONLY;
            }
            root::assemble(&mount.root, copies, flags)?;
            let flags = MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
            rustix::mount::move_mount(CWD, "../root", &place, "", flags)
                .step(&format!("mount a drive at `{}`", mount.target.display()))?;
            rustix::process::fchdir(&root).step("enter the root")?;
        }
        Ok(())
    }
}

impl From<Vec<Mounts>> for Drives {
    fn from(each: Vec<Mounts>) -> Self {
        Self(each)
    }
}

/// Lays out what the overlays need, as host root.
pub(super) fn make_base(mounts: &[Mount]) -> Result<(), StepError> {
    for mount in mounts {
        match DirBuilder::new().mode(0o755).create(mount.root.writable_dir.join("base")) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(StepError::new("make a drive's base layer", error));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Gives drives that are new to whom they are for.
pub(super) fn hand_over(mounts: &[Mount]) -> Result<(), StepError> {
    for mount in mounts.iter().filter(|mount| !mount.read_only) {
        if let Some(owner) = &mount.owner {
            give(&mount.target, owner)?;
        }
    }
    Ok(())
}

/// Gives a drive to someone. Expects to be in the sandbox's root, because its own `/etc/passwd` says who that is.
pub(crate) fn give(target: &Path, owner: &str) -> Result<(), StepError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let place = rustix::fs::open(target, flags, Mode::empty()).step("hand over a drive")?;
    if let Some((uid, gid)) = crate::serve::ids_of(owner) {
        let ids = (Uid::from_raw(uid), Gid::from_raw(gid));
        match rustix::fs::fchown(&place, Some(ids.0), Some(ids.1)) {
            // A number outside of the range of the sandbox belongs to no user there.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(error) => return Err(StepError::new("hand over a drive", error)),
        }
    }
    // The next sandbox's user may have another number.
    rustix::fs::fchmod(&place, Mode::from_raw_mode(0o777)).step("hand over a drive")
}

/// Finds a place below the current directory, making directories that are missing.
pub(crate) fn place(target: &Path) -> Result<OwnedFd, StepError> {
    let refuse = |reason: &str| {
        StepError::new(MOUNT_POINT, format!("`{}` {reason}", Path::new("/").join(target).display()))
    };
    let names: Vec<&std::ffi::OsStr> = target
        .components()
        .filter(|part| !matches!(part, Component::RootDir))
        .map(|part| match part {
            Component::Normal(name) => Ok(name),
            _ => Err(refuse("is not a plain path")),
        })
        .collect::<Result<_, _>>()?;
    match names.first() {
        None => return Err(refuse("is the root itself")),
        Some(first) if MOUNT_POINTS.iter().any(|own| first == own) => {
            return Err(refuse("is the machine's own"));
        }
        Some(_) => {}
    }
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut here = rustix::fs::open(".", flags, Mode::empty()).step("hold the root")?;
    for name in names {
        let mut found = rustix::fs::openat(here.as_fd(), name, flags, Mode::empty());
        if matches!(found, Err(Errno::NOENT)) {
            rustix::fs::mkdirat(here.as_fd(), name, Mode::from_raw_mode(0o755))
                .step("make a mount point")?;
            found = rustix::fs::openat(here.as_fd(), name, flags, Mode::empty());
        }
        here = match found {
            Err(Errno::NOTDIR | Errno::LOOP) => {
                let shown = name.to_string_lossy();
                return Err(refuse(&format!(
                    "leads through `{shown}`, which is no directory or a link"
                )));
            }
            found => found.step("find a mount point")?,
        };
    }
    Ok(here)
}

/// What is mounted in a machine's root beside what every machine has; paths are relative to it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Inside {
    pub(super) drives: Vec<PathBuf>,
    /// Where `/etc/resolv.conf` is covered.
    pub(super) cover: Option<PathBuf>,
}

/// Where a machine's drives are now, relative to its root, as the kernel says: a directory above one
/// may have been renamed. Whatever is mounted in the root, but for what every machine has, is a drive.
pub(super) fn places(pid: u32) -> Result<Inside, StepError> {
    let step = "find the machine's drives";
    let table = fs::read(format!("/proc/{pid}/mountinfo")).step(step)?;
    drives_in(&table).ok_or_else(|| StepError::new(step, "its mounts do not read"))
}

fn drives_in(table: &[u8]) -> Option<Inside> {
    let mut rows = Vec::new();
    for line in table.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
        let path = PathBuf::from(OsString::from_vec(unescape(fields.get(4)?)));
        let cover = network::is_cover(&unescape(fields.get(3)?));
        rows.push((*fields.first()?, *fields.get(1)?, path, cover));
    }
    let (root, ..) = rows.iter().rfind(|(_, _, path, _)| path == Path::new("/"))?;
    let mut found = Inside::default();
    for (id, parent, path, cover) in &rows {
        let place = path.strip_prefix("/").ok()?.to_owned();
        if parent != root || id == root || MOUNT_POINTS.iter().any(|own| place == Path::new(own)) {
            continue;
        }
        if *cover {
            found.cover = Some(place);
        } else {
            found.drives.push(place);
        }
    }
    Some(found)
}

/// Undoes the kernel's `\040` for a space and the like.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [byte, tail @ ..] = rest {
        let code = tail.get(..3).filter(|_| *byte == b'\\').and_then(|digits| {
            digits.iter().try_fold(0u32, |sum, digit| {
                (b'0'..=b'7').contains(digit).then(|| sum * 8 + u32::from(digit - b'0'))
            })
        });
        match code.and_then(|code| u8::try_from(code).ok()) {
            Some(code) => {
                text.push(code);
                rest = &tail[3..];
            }
            None => {
                text.push(*byte);
                rest = tail;
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::{Inside, drives_in};

    #[test]
    fn drives_are_told_from_what_every_machine_has() {
        let table = br"500 400 0:50 / / rw,nodev - overlay overlay rw,lowerdir=a
501 500 0:51 / /proc rw - proc proc rw
502 501 0:51 /sys /proc/sys ro - proc proc rw
503 500 0:52 / /dev rw - tmpfs tmpfs rw
504 503 0:53 / /dev/shm rw - tmpfs tmpfs rw
505 500 0:54 / /run rw - tmpfs tmpfs rw
506 500 0:55 / /data rw - overlay overlay rw
507 500 0:56 / /a\040b/\134c\011 ro - overlay overlay ro
508 500 0:57 / /sys ro - sysfs sysfs ro
509 500 0:54 /sandkeep/resolv.conf /etc/resolv.conf rw - tmpfs tmpfs rw
";
        let expected = Inside {
            drives: vec![PathBuf::from("data"), PathBuf::from("a b/\\c\t")],
            cover: Some(PathBuf::from("etc/resolv.conf")),
        };
        assert_eq!(drives_in(table), Some(expected));
        assert_eq!(drives_in(b""), None);
        assert_eq!(drives_in(b"1 2 3"), None);
    }
}
