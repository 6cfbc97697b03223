//! The root a helper lives in: the host's programs, what it reads, and the one file it writes.

use std::fs::{self, Permissions};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags};
use sandkeep_proto::helper::{Helper, INPUT, Input, OUTPUT};

use crate::cage::{Step, StepError, plain, sys};
use crate::overlay::Overlay;
use crate::vmm::root::{DEVICES, INERT, STAGE, pivot, show_system};
use crate::vmm::sys::lock_mounts;

/// Where layers are while they are stacked, out of the helper's sight later: what is mounted over them.
const LAYERS: &str = "layers";

/// Unattached copies of mounts, made by host root: the helper's user could not reach what they show.
pub(super) struct DetachedMounts {
    /// Of the directory with all layers.
    layers: Option<OwnedFd>,
    /// Of a file to be read.
    file: Option<OwnedFd>,
    /// Of the file to be written.
    output: Option<OwnedFd>,
}

impl DetachedMounts {
    pub(super) fn copy(helper: &Helper) -> Result<Self, StepError> {
        let copy = |path: &Path| {
            let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
            rustix::mount::open_tree(CWD, path, flags)
                .step(&format!("copy the mount of `{}`", path.display()))
        };
        let (layers, file) = match &helper.input {
            Input::Nothing => (None, None),
            Input::File(path) => (None, Some(copy(path)?)),
            // One alone is shown as it is, marks of overlayfs included, and no other is.
            Input::Layers { directory, lower } => match lower.as_slice() {
                [only] => (Some(copy(&directory.join(plain(only)?))?), None),
                _ => (Some(copy(directory)?), None),
            },
        };
        let output = helper.output.as_deref().map(copy).transpose()?;
        Ok(Self { layers, file, output })
    }

    /// Shifts owners to the ids of `user_ns`. Possible as long as nothing is attached.
    pub(super) fn shift(&self, user_ns: BorrowedFd<'_>) -> Result<(), StepError> {
        for (mount, read_only) in [(&self.layers, true), (&self.output, false)] {
            if let Some(mount) = mount {
                sys::shift_owners(mount.as_fd(), user_ns, read_only).step("shift owners")?;
            }
        }
        Ok(())
    }
}

/// Builds the root and makes it this process's. There is no way back.
pub(super) fn enter(helper: &Helper, mounts: DetachedMounts) -> Result<(), StepError> {
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private).step("keep mounts to itself")?;
    rustix::mount::mount("helper", STAGE, "tmpfs", INERT, c"mode=755,size=16m,nr_inodes=256")
        .step("mount the root")?;
    std::env::set_current_dir(STAGE).step("enter the root")?;
    show_system().step("show the host's programs")?;
    fs::create_dir("dev").step("make /dev")?;
    for device in DEVICES {
        let place = device.trim_start_matches('/');
        make_file(place).step("make room for a device")?;
        // No namespace may make devices: each is the host's own, shown here.
        rustix::mount::mount_bind(device, place).step(&format!("mount {device}"))?;
    }
    fs::create_dir("tmp").step("make /tmp")?;
    let (input, output) = (inside(INPUT), inside(OUTPUT));
    if let Some(file) = mounts.file {
        make_file(input).step("make room for the input")?;
        attach(&file, input)?;
        // Users who may read it on the host may read it here.
        lock_mounts(Path::new(input)).step("close the input")?;
    }
    if let (Some(layers), Input::Layers { lower, .. }) = (mounts.layers, &helper.input) {
        show_layers(&layers, lower, input)?;
    }
    if let Some(file) = mounts.output {
        make_file(output).step("make room for the output")?;
        attach(&file, output)?;
    }
    // Whatever the umask was: the root can be entered and not written, but for `tmp`.
    fs::set_permissions(".", Permissions::from_mode(0o755)).step("close the root")?;
    pivot()
}

fn show_layers(
    layers: &OwnedFd,
    lower: &[std::path::PathBuf],
    input: &str,
) -> Result<(), StepError> {
    fs::create_dir(input).step("make room for the input")?;
    if let [_] = lower {
        return attach(layers, input);
    }
    let names = lower.iter().map(|path| plain(path)).collect::<Result<Vec<_>, _>>()?;
    fs::create_dir(LAYERS).step("make room for the layers")?;
    attach(layers, LAYERS)?;
    // Relative names are a fifth of absolute ones, and older kernels have a page for all of them.
    std::env::set_current_dir(LAYERS).step("enter the layers")?;
    let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let stack = Overlay { options: &["userxattr"], lower: &names, writable: None, flags };
    stack.mount(&Path::new("..").join(input))?;
    std::env::set_current_dir("..").step("enter the root")?;
    // The stack holds what it is made of; by name there is nothing left.
    rustix::mount::unmount(LAYERS, rustix::mount::UnmountFlags::DETACH).step("hide the layers")
}

fn attach(mount: &OwnedFd, at: &str) -> Result<(), StepError> {
    let empty_path = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(mount, "", CWD, at, empty_path).step(&format!("attach `/{at}`"))
}

fn make_file(at: &str) -> rustix::io::Result<()> {
    rustix::fs::open(at, OFlags::CREATE | OFlags::CLOEXEC, Mode::from_raw_mode(0o444)).map(drop)
}

fn inside(path: &str) -> &str {
    path.trim_start_matches('/')
}
