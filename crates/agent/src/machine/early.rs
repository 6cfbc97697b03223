//! The boot of a machine of its own, from `/init` until the agent link is open: mounts, modules, devices, limits.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::mount::MountFlags;
use rustix::process::{DumpableBehavior, Resource, Rlimit};
use sandkeep_proto::machine::PORT;

use super::{Machine, MachineState, sys};
use crate::cage::inside::CORE_SIZE;
use crate::cage::{Step, StepError, set_oom_score};

/// Where everything is until the machine is assigned: in memory, and gone when the root is mounted.
const STAGE: &str = "/stage";
const MODULES: &str = "/modules";
/// How long devices may take to appear.
const PATIENCE: Duration = Duration::from_secs(30);

/// Makes the machine ready for its link.
pub(super) fn prepare() -> Result<Machine, StepError> {
    let inert = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("devtmpfs", "/dev", MountFlags::NOSUID)?;
    open_stdio()?;
    mount("proc", "/proc", inert)?;
    mount("sysfs", "/sys", inert)?;
    load_modules()?;
    let port = open_port()?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let proc = rustix::fs::open("/proc", flags, Mode::empty()).step("open /proc")?;
    let score = rustix::fs::open(
        "/proc/self/oom_score_adj",
        OFlags::WRONLY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    set_oom_score(score.step("open the agent's standing for times without memory")?);
    let many = Some(1 << 20);
    let limit = Rlimit { current: Some(65_536), maximum: many };
    rustix::process::setrlimit(Resource::Nofile, limit).step("set the resource limits")?;
    // Against accidents: root of its own kernel can raise it.
    let core = Rlimit { current: Some(CORE_SIZE), maximum: Some(CORE_SIZE) };
    rustix::process::setrlimit(Resource::Core, core).step("set the resource limits")?;
    let none = Rlimit { current: None, maximum: None };
    rustix::process::setrlimit(Resource::Nproc, none).step("set the resource limits")?;
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .step("close the agent's memory to others")?;
    let random = rustix::fs::open("/dev/random", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
        .step("open the kernel's randomness")?;
    leave_initramfs()?;
    Ok(Machine {
        port,
        proc,
        random,
        state: Mutex::new(MachineState::Waiting),
        jobs: OnceLock::new(),
    })
}

fn mount(kind: &str, at: &str, flags: MountFlags) -> Result<(), StepError> {
    let step = format!("mount {at}");
    match fs::create_dir(at) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            return Err(StepError::new(step, error));
        }
        _ => {}
    }
    match rustix::mount::mount(kind, at, kind, flags, None) {
        // The kernel may have done it.
        Ok(()) | Err(rustix::io::Errno::BUSY) => Ok(()),
        Err(error) => Err(StepError::new(step, error)),
    }
}

/// Makes sure that 0, 1 and 2 are open: the console where there is one.
fn open_stdio() -> Result<(), StepError> {
    loop {
        let open = |path| rustix::fs::open(path, OFlags::RDWR | OFlags::NOCTTY, Mode::empty());
        let file = open("/dev/console").or_else(|_| open("/dev/null")).step("open the console")?;
        if file.as_raw_fd() > 2 {
            return Ok(());
        }
        // It stays open for good.
        std::mem::forget(file);
    }
}

/// Loads what the initramfs brings, in its order.
fn load_modules() -> Result<(), StepError> {
    let step = "read which modules are needed";
    let order = fs::read_to_string(Path::new(MODULES).join("order")).step(step)?;
    for name in order.lines() {
        let step = format!("load the module `{name}`");
        let path = Path::new(MODULES).join(name);
        let file = rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        match rustix::system::finit_module(file.step(&step)?, c"", 0) {
            // Built in.
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(StepError::new(step, error)),
        }
    }
    Ok(())
}

/// Opens the port of the link, as soon as it exists.
fn open_port() -> Result<OwnedFd, StepError> {
    let start = Instant::now();
    loop {
        if let Some(name) = find_port() {
            let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
            let path = Path::new("/dev").join(name);
            if let Ok(port) = rustix::fs::open(&path, flags, Mode::empty()) {
                return Ok(port);
            }
        }
        if start.elapsed() > PATIENCE {
            return Err(StepError::new("find the port of the link", "it did not appear"));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn find_port() -> Option<std::ffi::OsString> {
    let ports = fs::read_dir("/sys/class/virtio-ports").ok()?;
    ports.flatten().find_map(|port| {
        let name = fs::read_to_string(port.path().join("name")).ok()?;
        (name.trim_end() == PORT).then(|| port.file_name())
    })
}

/// Goes to a root in memory with nothing in it, and gives the initramfs's memory back. The kernel's very first root cannot be left
/// by `pivot_root`, which is how the sandbox's own is entered later.
fn leave_initramfs() -> Result<(), StepError> {
    mount("tmpfs", STAGE, MountFlags::NOSUID | MountFlags::NODEV)?;
    for name in ["dev", "proc", "sys"] {
        let to = Path::new(STAGE).join(name);
        fs::create_dir(&to).step("set up the stage")?;
        rustix::mount::mount_move(Path::new("/").join(name), &to).step("set up the stage")?;
    }
    fs::remove_dir_all(MODULES).step("clear the initramfs")?;
    fs::remove_file("/init").step("clear the initramfs")?;
    std::env::set_current_dir(STAGE).step("enter the stage")?;
    rustix::mount::mount_move(".", "/").step("enter the stage")?;
    rustix::process::chroot(".").step("enter the stage")?;
    std::env::set_current_dir("/").step("enter the stage")?;
    sys::raise_loopback().step("raise the loopback interface")
}
