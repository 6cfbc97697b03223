//! Replaces the root of a running sandbox.
//!
//! The new stack is built in a mount namespace of this process's own, so that the layers' directory
//! is never visible inside the sandbox, not even for a moment. Only the finished overlay is carried
//! over. `/proc`, `/sys`, `/dev`, `/run` and the drives are *copied* onto it (same filesystems, so what
//! is in `/run` and `/dev/shm` stays), which leaves the old tree whole until `pivot_root`: a failure before
//! that has changed nothing.
//!
//! `pivot_root` moves the root and working directory of every process that stands exactly in the old
//! root; the agent does. The driver has made sure there is no other process.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags};
use rustix::thread::LinkNameSpaceType;
use sandkeep_proto::cage::{Outcome, Swap, VERSION, start_time};

use super::{
    Step, StepError, answer, drives, inside, lock, network, read_plan, root, sys, wrong_version,
};

/// Swaps the root as described on standard input.
pub(crate) fn swap_root() -> ExitCode {
    let swapped = read_plan().and_then(|swap: Swap| {
        if swap.version != VERSION {
            return Err(wrong_version(swap.version));
        }
        carry_out(&swap).map(|old_root| (swap.machine, old_root))
    });
    match swapped {
        Ok((machine, old_root)) => {
            let code = answer(&Outcome::Done(machine));
            // The last reference to it: the kernel unmounts it now, while the driver continues.
            let _ = rustix::process::setpriority_process(None, 10);
            drop(old_root);
            code
        }
        Err(trouble) => answer(&trouble.into()),
    }
}

/// Returns a hold on the root that was there before.
fn carry_out(swap: &Swap) -> Result<OwnedFd, StepError> {
    let _lock = lock(&swap.run_dir)?;
    let (user_ns, mount_ns) = namespaces(swap)?;
    let drives::Inside { drives, cover } = drives::places(swap.machine.pid)?;
    root::make_base(&swap.root, &swap.machine.hostname)?;
    let mounts = root::Mounts::copy(&swap.root)?;
    mounts.shift(user_ns.as_fd())?;

    rustix::thread::move_into_link_name_space(user_ns.as_fd(), Some(LinkNameSpaceType::User))
        .step("enter the user namespace")?;
    inside::become_root()?;
    sys::unshare(libc::CLONE_NEWNS).step("make a mount namespace to build in")?;
    root::stack(&swap.root, &mounts)?;
    inside::check_mount_points()?;
    rustix::process::umask(Mode::from_raw_mode(0o022));
    for place in &drives {
        drives::place(place)?;
    }
    let new_root = copy(Path::new("."), false)?;

    rustix::thread::move_into_link_name_space(mount_ns.as_fd(), Some(LinkNameSpaceType::Mount))
        .step("enter the mount namespace")?;
    let old_root = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .step("hold the old root")?;
    let own = root::MOUNT_POINTS.map(Path::new);
    let names: Vec<&Path> = own.into_iter().chain(drives.iter().map(PathBuf::as_path)).collect();
    let kept: Vec<_> = names.iter().map(|name| copy(&Path::new("/").join(name), true)).collect();
    let cover = cover.map(|place| copy(&Path::new("/").join(place), false)).transpose()?;
    // Anywhere will do: the pivot takes it away again.
    attach(&new_root, Path::new("/run"))?;
    let moved = std::env::set_current_dir("/run").step("enter the new root").and_then(|()| {
        for (name, mount) in names.into_iter().zip(kept) {
            attach(&mount?, name)?;
        }
        if let Some(cover) = &cover {
            network::cover_again(cover)?;
        }
        inside::pivot()
    });
    if moved.is_err() {
        let _ = std::env::set_current_dir("/");
        let _ = rustix::mount::unmount("/run", UnmountFlags::DETACH);
    }
    moved.map(|()| old_root)
}

/// Opens the machine's namespaces, if it is still the machine that is meant.
fn namespaces(swap: &Swap) -> Result<(File, File), StepError> {
    let proc = Path::new("/proc").join(swap.machine.pid.to_string());
    let open = |name: &str| File::open(proc.join(name)).step("open the machine's namespaces");
    let found = (open("ns/user")?, open("ns/mnt")?);
    // After opening: the number may have been reused until now, but the files stay what they are.
    let stat = std::fs::read_to_string(proc.join("stat")).step("find the machine")?;
    if start_time(&stat) != Some(swap.machine.started) {
        return Err(StepError::new("find the machine", "it has ended"));
    }
    Ok(found)
}

fn copy(path: &Path, with_children: bool) -> Result<OwnedFd, StepError> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    if with_children {
        flags |= OpenTreeFlags::AT_RECURSIVE;
    }
    rustix::mount::open_tree(CWD, path, flags)
        .step(&format!("copy the mount of {}", path.display()))
}

fn attach(mount: &OwnedFd, path: &Path) -> Result<(), StepError> {
    rustix::mount::move_mount(mount, "", CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
        .step(&format!("attach {} to the new root", path.display()))
}
