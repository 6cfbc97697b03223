//! The sandbox's root filesystem: layers stacked by overlayfs, owners shifted on the way.
//!
//! On disk, files belong to the ids the sandbox knows (root is 0). Two id-mapped copies of mounts, one
//! of the directory with all layers and one of the writable directory, shift them to the sandbox's
//! range. Host root makes the copies; the overlay itself must be mounted by the sandbox's own root,
//! because the kernel acts on the layers with the credentials of the process that mounted it.
//!
//! Options of the overlay:
//!
//! - `userxattr`: the only kind of bookkeeping a user namespace may write.
//! - `index=off`: an upper directory becomes a layer under other uppers later; an index would tie it
//!   to the stack it was first mounted in.
//! - `uuid=off`: for the same reason, no mark of this mount on the upper.
//! - not `volatile`: `fsync` inside must mean what it says.
//!
//! Under the lowest layer lies one more, `base`, beside the writable directory: the directories
//! that are mount points, an `/etc/hosts` and an `/etc/resolv.conf`, for images that lack them. So
//! an empty session leaves an empty upper, and an edited `/etc/hosts` is an ordinary change that
//! stays. It is on the disk and not in memory because overlayfs keeps device and inode numbers
//! steady only within one filesystem.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{CWD, Mode};
use rustix::mount::{MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags};
use sandkeep_proto::cage::Root;

use super::{Step, StepError, network, sys};
use crate::overlay::{Overlay, Writable};

/// Directories something is mounted on.
pub(super) const MOUNT_POINTS: [&str; 4] = ["proc", "sys", "dev", "run"];

/// Where the stack is built, out of sight: a directory every host has and every user can enter, which
/// the sandbox's root, being nobody on the host, cannot say of most.
const STAGE: &str = "/proc";

/// See the top of this file.
const OPTIONS: [&str; 3] = ["userxattr", "index=off", "uuid=off"];

/// Unattached copies of the mounts the layers are on.
pub(super) struct Mounts {
    layers: OwnedFd,
    writable: OwnedFd,
}

impl Mounts {
    /// Copies the mounts of both directories, as the host sees them.
    pub(super) fn copy(root: &Root) -> Result<Self, StepError> {
        let copy = |path: &Path| {
            let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
            rustix::mount::open_tree(CWD, path, flags)
                .step(&format!("copy the mount of `{}`", path.display()))
        };
        Ok(Self { layers: copy(&root.layers_dir)?, writable: copy(&root.writable_dir)? })
    }

    /// As they are sent to another process.
    pub(super) fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.layers.as_fd(), self.writable.as_fd()]
    }

    /// Shifts owners to the ids of `user_ns`. Possible as long as nothing is attached.
    pub(super) fn shift(&self, user_ns: BorrowedFd<'_>) -> Result<(), StepError> {
        sys::shift_owners(self.layers.as_fd(), user_ns, true).step("shift the layers' owners")?;
        sys::shift_owners(self.writable.as_fd(), user_ns, false)
            .step("shift the writable directory's owners")
    }
}

impl From<[OwnedFd; 2]> for Mounts {
    fn from([layers, writable]: [OwnedFd; 2]) -> Self {
        Self { layers, writable }
    }
}

/// Lays out `base`, as host root.
pub(super) fn make_base(root: &Root, hostname: &str) -> Result<(), StepError> {
    make_base_layer(&root.writable_dir.join("base"), hostname)
}

/// Lays out the lowest layer of a root.
pub(crate) fn make_base_layer(base: &Path, hostname: &str) -> Result<(), StepError> {
    let make = |name: &str, mode: u32| match DirBuilder::new().mode(mode).create(base.join(name)) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made,
    };
    make("", 0o755).step("make the base layer")?;
    for name in MOUNT_POINTS.into_iter().chain(["etc", "tmp"]) {
        make(name, 0o755).step("make the base layer")?;
    }
    fs::set_permissions(base.join("tmp"), Permissions::from_mode(0o1777))
        .step("make the base layer")?;
    fs::write(base.join("etc/resolv.conf"), network::RESOLV).step("make the base layer")?;
    for (path, text) in named_files(hostname) {
        fs::write(base.join(path), text).step("make the base layer")?;
    }
    Ok(())
}

/// The files of the lowest layer that hold the machine's name.
pub(crate) fn named_files(hostname: &str) -> [(&'static str, String); 2] {
    let hosts = format!(
        "127.0.0.1\tlocalhost {hostname}\n::1\tlocalhost ip6-localhost ip6-loopback {hostname}\n"
    );
    [("etc/hosts", hosts), ("etc/hostname", format!("{hostname}\n"))]
}

/// Stacks the layers and makes the result the current directory.
///
/// Expects to be root of the sandbox's user namespace in a mount namespace that belongs to it and
/// that no other process is in.
pub(super) fn stack(root: &Root, mounts: &Mounts) -> Result<(), StepError> {
    // Mounts made by the host from now on must not appear in here.
    rustix::mount::mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)
        .step("keep the host's mounts out")?;
    // A place that is ours to make directories in.
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    rustix::mount::mount("stage", STAGE, "tmpfs", flags, c"mode=700").step("mount the stage")?;
    std::env::set_current_dir(STAGE).step("enter the stage")?;
    assemble(root, mounts, MountFlags::NODEV)?;
    std::env::set_current_dir("../root").step("enter the root")
}

/// Stacks the layers at `root` in the current directory, which is the stage or a directory of it, and
/// enters `layers` beside it.
pub(super) fn assemble(root: &Root, mounts: &Mounts, flags: MountFlags) -> Result<(), StepError> {
    for (name, mount) in [("layers", &mounts.layers), ("writable", &mounts.writable)] {
        rustix::fs::mkdir(name, Mode::RWXU).step("set up the stage")?;
        // Attached, because older kernels refuse to stack directories of unattached mounts.
        let empty_path = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        rustix::mount::move_mount(mount, "", CWD, name, empty_path)
            .step("attach the layers to the stage")?;
    }
    rustix::fs::mkdir("root", Mode::RWXU).step("set up the stage")?;
    // Relative names are a fifth of absolute ones, and older kernels have a page for all of them.
    std::env::set_current_dir("layers").step("enter the layers")?;
    let mut lower = root.lower.iter().map(|path| plain(path)).collect::<Result<Vec<_>, _>>()?;
    lower.push("../writable/base");
    let upper = format!("../writable/{}", plain(&root.upper)?);
    let work = format!("../writable/{}", plain(&root.work)?);
    let writable = Some(Writable { upper: &upper, work: &work });
    let overlay = Overlay { options: &OPTIONS, lower: &lower, writable, flags };
    overlay.mount(Path::new("../root"))
}

/// Refuses names the kernel would read as something else than one path below the directory.
pub(crate) fn plain(path: &Path) -> Result<&str, StepError> {
    let fine = |b: &u8| b.is_ascii_alphanumeric() || b"-_./".contains(b);
    let ordinary = path.components().all(|part| matches!(part, std::path::Component::Normal(_)));
    match path.to_str() {
        Some(text) if ordinary && !text.is_empty() && text.as_bytes().iter().all(fine) => Ok(text),
        _ => {
            let shown = String::from_utf8_lossy(path.as_os_str().as_bytes()).into_owned();
            Err(StepError::new("name the layers", format!("`{shown}` is no name for a layer")))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::plain;

    #[test]
    fn names_that_mean_something_else_are_refused() {
        for name in ["", "/etc", "..", "a/../b", "a:b", "a,b", "a\\b", "a b", "a\nb", "é"] {
            assert!(plain(&PathBuf::from(name)).is_err(), "{name}");
        }
        assert!(plain(&PathBuf::from("lay-01/files")).is_ok());
    }
}
