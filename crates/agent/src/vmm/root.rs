//! The root a hypervisor lives in: what its program needs, and nothing of the host's besides.

use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, chown, symlink};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use sandkeep_proto::machine::{NET_DIR, RAM_FILE, RAM_SO, Vmm, VmmShown};

use super::sys;
use crate::cage::{Step, StepError};

/// Where it is built: a directory every host has, and which is not needed any more.
pub(crate) const STAGE: &str = "/proc";
/// Where programs, libraries and firmware are. What is a link on the host is one here.
const SYSTEM: [&str; 6] = ["usr", "bin", "sbin", "lib", "lib64", "lib32"];
/// What the program loader reads, where it exists.
const LOADER: [&str; 2] = ["etc/ld.so.cache", "etc/alternatives"];
/// Devices that do no harm in anyone's hands.
pub(crate) const DEVICES: [&str; 3] = ["/dev/null", "/dev/zero", "/dev/urandom"];

pub(crate) const INERT: MountFlags =
    MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// Builds it and makes it this process's root. There is no way back.
pub(super) fn enter(vmm: &Vmm) -> Result<(), StepError> {
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private).step("keep mounts to itself")?;
    // All that is ever written here is directories: the memory's file is never more than a name.
    rustix::mount::mount("machine", STAGE, "tmpfs", INERT, c"mode=755,size=1m,nr_inodes=128")
        .step("mount the root")?;
    std::env::set_current_dir(STAGE).step("enter the root")?;
    show_system().step("show the host's programs")?;
    make_dev(vmm)?;
    for VmmShown { path, at } in &vmm.shown {
        show(path, inside(at)).step(&format!("show `{}`", path.display()))?;
    }
    show(&vmm.ram_so, inside(Path::new(RAM_SO))).step("show the memory's library")?;
    let net = Path::new(NET_DIR);
    bind(&vmm.run_dir.join(NET_DIR), net).step("show the sockets' directory")?;
    rustix::mount::mount_remount(net, MountFlags::BIND | INERT, c"")
        .step("show the sockets' directory")?;
    make_ram(vmm).step("make the memory's file")?;
    pivot()
}

/// Shows the host's programs, and what their loader reads, in the current directory.
pub(crate) fn show_system() -> io::Result<()> {
    for name in SYSTEM {
        let host = Path::new("/").join(name);
        match fs::symlink_metadata(&host) {
            Ok(about) if about.is_symlink() => symlink(fs::read_link(&host)?, name)?,
            Ok(_) => show(&host, Path::new(name))?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    for name in LOADER {
        let host = Path::new("/").join(name);
        if host.exists() {
            show(&host, Path::new(name))?;
        }
    }
    Ok(())
}

/// Nodes of its own: who may open the host's is the host's affair.
fn make_dev(vmm: &Vmm) -> Result<(), StepError> {
    let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
    fs::create_dir("dev").step("mount /dev")?;
    rustix::mount::mount("machine", "dev", "tmpfs", flags, c"mode=755,size=64k,nr_inodes=32")
        .step("mount /dev")?;
    let devices = DEVICES.iter().map(Path::new).chain(vmm.devices.iter().map(AsRef::as_ref));
    for device in devices {
        let made = rustix::fs::stat(device).map_err(io::Error::from).and_then(|about| {
            let (kind, mode) = (FileType::CharacterDevice, Mode::from_raw_mode(0o600));
            rustix::fs::mknodat(CWD, inside(device), kind, mode, about.st_rdev)?;
            chown(inside(device), Some(vmm.uid), Some(vmm.gid))
        });
        made.step(&format!("make `{}`", device.display()))?;
    }
    rustix::mount::mount_remount("dev", flags | MountFlags::RDONLY, c"").step("close /dev")
}

/// Shows a file or a directory of the host's, with all that is mounted below, to be read.
fn show(host: &Path, here: &Path) -> io::Result<()> {
    bind(host, here)?;
    sys::lock_mounts(here)
}

fn bind(host: &Path, here: &Path) -> io::Result<()> {
    if let Some(parent) = here.parent() {
        DirBuilder::new().recursive(true).create(parent)?;
    }
    if host.is_dir() {
        DirBuilder::new().recursive(true).create(here)?;
    } else {
        OpenOptions::new().write(true).create(true).truncate(false).mode(0o444).open(here)?;
    }
    rustix::mount::mount_bind_recursive(host, here)?;
    Ok(())
}

fn make_ram(vmm: &Vmm) -> io::Result<()> {
    let path = inside(Path::new(RAM_FILE));
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    chown(path, Some(vmm.uid), Some(vmm.gid))?;
    // Whatever the umask was: the root can be entered and not written.
    fs::set_permissions(".", Permissions::from_mode(0o755))
}

fn inside(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

/// Makes the current directory the root. There is no way back.
pub(crate) fn pivot() -> Result<(), StepError> {
    // Old and new root in one place: the old one ends up on top of the new, where `.` still is it.
    rustix::process::pivot_root(".", ".").step("change the root")?;
    rustix::mount::unmount(".", UnmountFlags::DETACH).step("let go of the old root")?;
    std::env::set_current_dir("/").step("enter the new root")
}
