//! Mounts a machine's root and drives, and `/proc`, `/sys` and `/dev` in the root, and enters it.
//!
//! Every part is the same: erofs images below, a directory of an ext4 disk on top, stacked by overlayfs. The stack is built in memory
//! that is released with everything on it once the root is entered. What the overlays stand on is
//! then mounted nowhere.
//!
//! Below the lowest image of the root lies a directory `base`, beside the upper one on its disk, as in a cage: the directories
//! things are mounted on, and a few files for images that lack them. On the disk it is beside
//! `upper`, not in it.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{ErrorKind, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, XattrFlags};
use rustix::mount::{MountFlags, MoveMountFlags};
use rustix::process::{Resource, Rlimit};
use sandkeep_proto::link::{Assemble, AssembleMount};
use sandkeep_proto::machine::{self as names, UPPER, WORK};

use super::disks::Disks;
use super::look::Looks;
use super::{Part, Whole, identity, sys};
use crate::cage::{Step as _, StepError, drives, inside, network, root};
use crate::overlay::{Overlay, Writable};

/// Where the stacks are built.
const PARTS: &str = "/parts";
const BASE: &str = "base";

/// The machine's block devices, by their serials.
struct Devices(HashMap<String, PathBuf>);

impl Devices {
    fn find() -> Result<Self, StepError> {
        let step = "find the machine's disks";
        let mut found = HashMap::new();
        for device in fs::read_dir("/sys/block").step(step)? {
            let device = device.step(step)?;
            if let Ok(serial) = fs::read_to_string(device.path().join("serial")) {
                let path = Path::new("/dev").join(device.file_name());
                found.insert(serial.trim_end().to_owned(), path);
            }
        }
        Ok(Self(found))
    }

    /// A device as it is now: one that was looked at before the machine was captured may show something else since.
    fn fresh(&self, serial: &str) -> Result<&Path, StepError> {
        let step = format!("use the disk `{serial}`");
        let Some(path) = self.0.get(serial) else {
            return Err(StepError::new(step, "the machine has none"));
        };
        let device = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        sys::forget_cached(&device.step(&step)?).step(&step)?;
        Ok(path)
    }

    fn mount(
        &self,
        serial: &str,
        at: &Path,
        kind: &str,
        flags: MountFlags,
    ) -> Result<(), StepError> {
        let step = format!("mount the disk `{serial}`");
        DirBuilder::new().mode(0o700).create(at).step(&step)?;
        // The disk was all zeros when it was made: its tables need not be written over with zeros again.
        let options = (kind == "ext4").then_some(c"noinit_itable");
        rustix::mount::mount(self.fresh(serial)?, at, kind, flags, options).step(&step)
    }
}

/// What a part is made of, by the serials of its devices.
struct Stack {
    lower: Vec<String>,
    /// Absent where nothing is written.
    disk: Option<String>,
}

impl Stack {
    fn of_root(plan: &Assemble) -> Self {
        let lower = (0..plan.lower).map(names::lower).collect();
        Self { lower, disk: Some(names::DISK.to_owned()) }
    }

    fn of_mount(number: u32, mount: &AssembleMount) -> Self {
        let lower = mount.lower.then(|| names::mount_lower(number)).into_iter().collect();
        Self { lower, disk: (!mount.read_only).then(|| names::mount_disk(number)) }
    }
}

/// A part that is mounted.
struct Stacked {
    /// Where.
    at: PathBuf,
    upper: Option<OwnedFd>,
    disk: Option<OwnedFd>,
    base: OwnedFd,
    /// What lies below the upper directory, topmost first.
    lower: Vec<OwnedFd>,
}

/// Makes this machine what the plan says. The link is the only thing that was there before.
pub(super) fn assemble(plan: &Assemble) -> Result<Whole, StepError> {
    check(plan)?;
    let devices = Devices::find()?;
    DirBuilder::new().mode(0o700).create(PARTS).step("set up the stage")?;
    let make_base = |base: &Path| root::make_base_layer(base, &plan.identity.hostname);
    let whole = stack(&devices, 0, &Stack::of_root(plan), MountFlags::empty(), make_base)?;
    std::env::set_current_dir(&whole.at).step("enter the root")?;
    inside::check_mount_points()?;
    rustix::process::umask(Mode::from_raw_mode(0o022));
    let mut stacks = vec![whole];
    for (number, mount) in (0..).zip(&plan.mounts) {
        stacks.push(mount_drive(&devices, number, mount)?);
    }
    mount_kernels_own()?;
    inside::mount_run()?;
    network::cover_resolv_conf()?;
    let boot_id = cover_boot_id()?;
    inside::pivot()?;
    finish_root(plan)?;
    Ok(keep(stacks, Some(boot_id)))
}

/// Mounts the disks alone.
pub(super) fn rescue(plan: &Assemble) -> Result<Whole, StepError> {
    check(plan)?;
    let devices = Devices::find()?;
    DirBuilder::new().mode(0o700).create(PARTS).step("set up the stage")?;
    let drives = (0..).zip(&plan.mounts).map(|(number, mount)| Stack::of_mount(number, mount));
    let mut parts = Vec::new();
    let mut disks = Vec::new();
    for (number, stack) in std::iter::once(Stack::of_root(plan)).chain(drives).enumerate() {
        let Some(serial) = stack.disk else {
            parts.push(Part { upper: None, lower: Vec::new() });
            continue;
        };
        let at = Path::new(PARTS).join(number.to_string());
        mount_any(&devices, &serial, &at)?;
        // One that was never assembled has none, and nothing was written.
        match DirBuilder::new().mode(0o755).create(at.join(UPPER)) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(StepError::new(format!("look at the disk `{serial}`"), error));
            }
            _ => {}
        }
        parts.push(Part { upper: Some(open_directory(&at.join(UPPER))?), lower: Vec::new() });
        disks.push(open_directory(&at)?);
    }
    let looks = Looks::default();
    Ok(Whole { parts, base: None, boot_id: None, disks: Disks::new(disks), looks })
}

/// Mounts a disk that was left in whatever state. The kernel goes by its journal; where that cannot be read, without it.
fn mount_any(devices: &Devices, serial: &str, at: &Path) -> Result<(), StepError> {
    let Err(trouble) = devices.mount(serial, at, "ext4", MountFlags::NOATIME) else {
        return Ok(());
    };
    let flags = MountFlags::NOATIME | MountFlags::RDONLY;
    match rustix::mount::mount(devices.fresh(serial)?, at, "ext4", flags, c"noload") {
        Ok(()) => Ok(()),
        Err(_) => Err(trouble),
    }
}

fn check(plan: &Assemble) -> Result<(), StepError> {
    let mounts = u32::try_from(plan.mounts.len()).unwrap_or(u32::MAX);
    if plan.lower > names::LOWER_SLOTS || mounts > names::MOUNT_SLOTS {
        let reason = format!("{} layers and {mounts} drives are more than it has", plan.lower);
        return Err(StepError::new("use the machine's disks", reason));
    }
    Ok(())
}

fn keep(stacks: Vec<Stacked>, boot_id: Option<File>) -> Whole {
    let (mut parts, mut disks, mut base) = (Vec::new(), Vec::new(), None);
    for stacked in stacks {
        // The root's is the first.
        base.get_or_insert(stacked.base);
        parts.push(Part { upper: stacked.upper, lower: stacked.lower });
        disks.extend(stacked.disk);
    }
    let looks = Looks::default();
    looks.begin(&parts);
    Whole { parts, base, boot_id, disks: Disks::new(disks), looks }
}

/// Mounts a part's devices and stacks them.
fn stack(
    devices: &Devices,
    number: usize,
    stack: &Stack,
    flags: MountFlags,
    make_base: impl Fn(&Path) -> Result<(), StepError>,
) -> Result<Stacked, StepError> {
    let here = Path::new(PARTS).join(number.to_string());
    let step = "stack the layers";
    DirBuilder::new().mode(0o755).create(&here).step(step)?;
    let mut lower = Vec::new();
    for serial in &stack.lower {
        let at = here.join(serial);
        devices.mount(serial, &at, "erofs", MountFlags::RDONLY | MountFlags::NOATIME)?;
        lower.push(at);
    }
    let writable = here.join("disk");
    match &stack.disk {
        Some(serial) => devices.mount(serial, &writable, "ext4", MountFlags::NOATIME)?,
        None => DirBuilder::new().mode(0o755).create(&writable).step(step)?,
    }
    let base = writable.join(BASE);
    make_base(&base)?;
    lower.push(base.clone());
    if stack.disk.is_none() {
        // Where nothing is written there must be two at least.
        let empty = writable.join("empty");
        make(&empty)?;
        lower.push(empty);
    }
    let mut upper = None;
    let (place, work) = (writable.join(UPPER), writable.join(WORK));
    if stack.disk.is_some() {
        let top = lower.first().map_or(base.as_path(), PathBuf::as_path);
        make_upper(&place, top)?;
        make(&work)?;
        upper = Some(open_directory(&place)?);
    }
    let at = here.join("root");
    make(&at)?;
    let named = |path: &Path| path.display().to_string();
    let names: Vec<String> = lower.iter().map(|path| named(path)).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let (place, work) = (named(&place), named(&work));
    Overlay {
        options: &["userxattr", "index=off", "xino=auto"],
        lower: &names,
        writable: stack.disk.is_some().then_some(Writable { upper: &place, work: &work }),
        flags,
    }
    .mount(&at)?;
    let disk = stack.disk.is_some().then(|| open_directory(&writable)).transpose()?;
    let lower = lower.iter().map(|path| open_directory(path)).collect::<Result<_, _>>()?;
    Ok(Stacked { at, upper, disk, base: open_directory(&base)?, lower })
}

fn make(path: &Path) -> Result<(), StepError> {
    match DirBuilder::new().mode(0o755).create(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            Err(StepError::new("stack the layers", error))
        }
        _ => Ok(()),
    }
}

/// Makes the upper directory of a new disk. The root of the stack is what it is, so it is like that of the topmost layer.
fn make_upper(upper: &Path, top: &Path) -> Result<(), StepError> {
    let step = "make the upper directory";
    match DirBuilder::new().mode(0o755).create(upper) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::AlreadyExists => return Ok(()),
        Err(error) => return Err(StepError::new(step, error)),
    }
    let like = fs::symlink_metadata(top).step(step)?;
    std::os::unix::fs::chown(upper, Some(like.uid()), Some(like.gid())).step(step)?;
    fs::set_permissions(upper, Permissions::from_mode(like.mode() & 0o7777)).step(step)?;
    for name in ["system.posix_acl_access", "system.posix_acl_default"] {
        let mut value = vec![0; 64 << 10];
        if let Ok(length) = rustix::fs::lgetxattr(top, name, &mut value) {
            value.truncate(length);
            rustix::fs::lsetxattr(upper, name, &value, XattrFlags::empty()).step(step)?;
        }
    }
    Ok(())
}

fn open_directory(path: &Path) -> Result<OwnedFd, StepError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    rustix::fs::open(path, flags, Mode::empty()).step("hold a disk's directory")
}

/// Mounts a drive below the current directory, which is the root to be.
fn mount_drive(
    devices: &Devices,
    number: u32,
    mount: &AssembleMount,
) -> Result<Stacked, StepError> {
    let target = Path::new(&mount.target);
    let place = drives::place(target)?;
    let mut flags = MountFlags::NODEV | MountFlags::NOSUID;
    if mount.read_only {
        flags |= MountFlags::RDONLY;
    }
    let parts = Stack::of_mount(number, mount);
    let stacked = stack(devices, number as usize + 1, &parts, flags, make)?;
    let empty_path = MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    rustix::mount::move_mount(CWD, &stacked.at, &place, "", empty_path)
        .step(&format!("mount a drive at `{}`", target.display()))?;
    Ok(stacked)
}

/// Mounts the kernel's own filesystems, below the current directory.
fn mount_kernels_own() -> Result<(), StepError> {
    let inert = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let mount = |kind: &str, at: &str, flags, options: Option<&std::ffi::CStr>| {
        rustix::mount::mount(kind, at, kind, flags, options).step(&format!("mount /{at}"))
    };
    mount("proc", "proc", inert, None)?;
    mount("sysfs", "sys", inert, None)?;
    // Not every kernel has control groups of this kind; nothing here needs them.
    let _ = mount("cgroup2", "sys/fs/cgroup", inert, Some(c"nsdelegate"));
    mount("devtmpfs", "dev", MountFlags::NOSUID | MountFlags::NOEXEC, None)?;
    inside::link_dev()?;
    inside::mount_in_dev()
}

/// Shows another boot id than the kernel's, which all machines have that were restored from the same memory.
fn cover_boot_id() -> Result<File, StepError> {
    let step = "cover the boot id";
    // Beside the cover of `/etc/resolv.conf`.
    let path = "run/sandkeep/boot_id";
    let mut file = File::create_new(path).step(step)?;
    file.write_all(identity::uuid()?.as_bytes()).step(step)?;
    file.set_permissions(Permissions::from_mode(0o444)).step(step)?;
    rustix::mount::mount_bind(path, "proc/sys/kernel/random/boot_id").step(step)?;
    Ok(file)
}

/// What is left to do in the root.
fn finish_root(plan: &Assemble) -> Result<(), StepError> {
    for mount in plan.mounts.iter().filter(|mount| !mount.read_only) {
        if let Some(owner) = &mount.owner {
            drives::give(Path::new(&mount.target), owner)?;
        }
    }
    identity::take_on(&plan.identity)?;
    network::raise_ethernet(identity::DEVICE)?;
    network::relax();
    limit(plan)?;
    inside::let_go_of_stdio()
}

fn limit(plan: &Assemble) -> Result<(), StepError> {
    let size = Some(plan.file_size);
    let step = "set the resource limits";
    let limit = Rlimit { current: size, maximum: size };
    rustix::process::setrlimit(Resource::Fsize, limit).step(step)?;
    let limit = Rlimit { current: Some(0), maximum: None };
    rustix::process::setrlimit(Resource::Core, limit).step(step)?;
    // The kernel counts its own, too.
    let own = fs::read_to_string("/proc/loadavg").ok().and_then(|text| threads(&text));
    let most = u64::from(plan.pids) + own.unwrap_or(100);
    let numbers = (most + 1024).clamp(32_768, 1 << 22);
    fs::write("/proc/sys/kernel/pid_max", numbers.to_string()).step(step)?;
    fs::write("/proc/sys/kernel/threads-max", most.to_string()).step(step)
}

/// How many threads there are, as `/proc/loadavg` says.
fn threads(loadavg: &str) -> Option<u64> {
    loadavg.split_whitespace().nth(3)?.split_once('/')?.1.parse().ok()
}

/// Writes what the machine calls itself to the files of its lowest layer.
pub(super) fn name_in(base: BorrowedFd<'_>, hostname: &str) -> Result<(), StepError> {
    let step = "name the machine in its files";
    for (path, text) in root::named_files(hostname) {
        let flags = OFlags::WRONLY | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(base.as_fd(), path, flags, Mode::empty()).step(step)?;
        File::from(file).write_all(text.as_bytes()).step(step)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::threads;

    #[test]
    fn threads_are_counted() {
        assert_eq!(threads("0.00 0.01 0.05 1/85 123\n"), Some(85));
        assert_eq!(threads(""), None);
    }
}
