//! The first process's part: it mounts what a root needs, locks the cage, and stays.
//!
//! Everything is mounted while the host's tree is still there to take devices from, and because the
//! kernel lets a user namespace mount `/proc` and `/sys` only where they can be seen already. Then the
//! host's tree goes, and with it every way back to it.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ffi::CStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::rc::Rc;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::process::{DumpableBehavior, Resource, Rlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, Gid, Uid};
use sandkeep_proto::cage::{Cage, Cgroup};

use super::view::{self, View};
use super::{Endpoints, OOM_SCORE, Step, StepError, drives, filter, network, prebuild, root, sys};

/// The agent's saved user id, on all its threads: one that nothing else inside has. `prlimit` on another process takes the same user
/// id in all three places, or a capability that no process inside has. So root inside cannot set a
/// limit of processor time or open files that ends the agent.
pub(crate) const SAVED_UID: u32 = 65_533;

/// The limit of a core file's size. Not 0: with 0 a program of the host (`core_pattern` with `|`)
/// still gets the dump, with 1 none does.
pub(crate) const CORE_SIZE: u64 = 1;

/// Capabilities, over what is the sandbox's own, that its root keeps: what installing packages,
/// running servers and `sudo` take. Everything else, above all `SYS_ADMIN`, is dropped for good.
const KEPT: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::NET_BIND_SERVICE)
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::SYS_CHROOT)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::AUDIT_WRITE)
    .union(CapabilitySet::SETFCAP);

/// Files of `/proc` and `/sys` that reveal the host or reach into it: an empty one is seen instead.
const MASKED_FILES: [&str; 13] = [
    "proc/kcore",
    "proc/keys",
    "proc/key-users",
    "proc/kmsg",
    "proc/kallsyms",
    "proc/kpagecount",
    "proc/kpageflags",
    "proc/kpagecgroup",
    "proc/latency_stats",
    "proc/sched_debug",
    "proc/sysrq-trigger",
    "proc/timer_list",
    "proc/timer_stats",
];

/// The same for directories.
const MASKED_DIRS: [&str; 9] = [
    "proc/acpi",
    "proc/asound",
    "proc/scsi",
    "sys/firmware",
    "sys/kernel",
    "sys/module",
    "sys/power",
    "sys/devices/virtual/dmi",
    "sys/devices/virtual/powercap",
];

/// Directories of `/proc` that can be read and not written.
const READ_ONLY_DIRS: [&str; 4] = ["proc/sys", "proc/irq", "proc/bus", "proc/fs"];

/// The host's devices that do no harm in anyone's hands.
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];

const DEV_LINKS: [(&str, &str); 4] = [
    ("/proc/self/fd", "dev/fd"),
    ("/proc/self/fd/0", "dev/stdin"),
    ("/proc/self/fd/1", "dev/stdout"),
    ("/proc/self/fd/2", "dev/stderr"),
];

/// The control groups to join, opened by host root: the kernel asks who opened the file, not who
/// writes to it.
pub(crate) enum Groups {
    /// The `tasks` files.
    V1(Vec<OwnedFd>),
    /// The directory; joined by being born there.
    V2(OwnedFd),
}

impl Groups {
    pub(crate) fn open(cgroup: &Cgroup) -> Result<Self, StepError> {
        let open = |path: &std::path::Path, flags| {
            rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())
                .step(&format!("open the control group `{}`", path.display()))
        };
        Ok(match cgroup {
            Cgroup::V1(directories) => {
                // Controllers that are mounted together have one directory.
                let directories: BTreeSet<&PathBuf> = directories.values().collect();
                let open = |dir: &PathBuf| open(&dir.join("tasks"), OFlags::WRONLY);
                Self::V1(directories.into_iter().map(open).collect::<Result<_, _>>()?)
            }
            Cgroup::V2(directory) => Self::V2(open(directory, OFlags::RDONLY | OFlags::DIRECTORY)?),
        })
    }

    /// The directory to be born in, where there is one.
    pub(crate) fn directory(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::V1(_) => None,
            Self::V2(directory) => Some(directory.as_fd()),
        }
    }

    pub(crate) fn join(self) -> Result<(), StepError> {
        if let Self::V1(tasks) = self {
            for file in tasks {
                // Zero into `tasks` moves one thread, the writer. A number, or `cgroup.procs`, takes
                // a lock all forks of the host wait on, and milliseconds.
                File::from(file).write_all(b"0").step("join the control groups")?;
            }
        }
        // What is seen of the control groups from now on begins here.
        sys::unshare(libc::CLONE_NEWCGROUP).step("make the control group namespace")
    }
}

/// What the builder made ready.
pub(super) struct Prepared<'a> {
    pub(super) cage: &'a Cage,
    pub(super) mounts: root::Mounts,
    pub(super) drives: drives::Drives,
    pub(super) groups: Groups,
}

/// Sets up the cage from inside and notifies the builder. On an error it reports that, and does not
/// return.
pub(super) fn enter(
    prepared: Prepared<'_>,
    gate: OwnedFd,
    teller: OwnedFd,
    (link, network): (UnixListener, UnixListener),
) -> Endpoints {
    tell(teller, |teller| {
        let begun = begin(Some(prepared.groups))?;
        wait_for(gate)?;
        let Prepared { cage, mounts, drives, .. } = prepared;
        complete(teller, begun, cage, (mounts, drives), (link, network))
    })
}

/// The same for a cage that is begun before it is known what it will be.
pub(super) fn enter_prebuilt(gate: UnixStream, teller: OwnedFd) -> Endpoints {
    tell(teller, |teller| {
        // The driver's ends are not this process's: it would hold them open after the builder.
        let_go_of_stdio()?;
        let begun = begin(None)?;
        let prebuild::Opened { cage, listeners, mounts, drives, groups } = prebuild::wait(gate)?;
        sys::unshare(libc::CLONE_NEWNS).step("make the mount namespace")?;
        groups.join()?;
        // Not before: it is the session's time, and this has waited.
        view::begin_time();
        complete(teller, begun, &cage, (mounts, drives), listeners)
    })
}

/// Reports an error to the builder, and does not return then.
fn tell(teller: OwnedFd, work: impl FnOnce(&mut File) -> Result<Kept, StepError>) -> Endpoints {
    let mut teller = File::from(teller);
    match work(&mut teller) {
        Ok(([link, score, network, device, meminfo, stat, loadavg], facts)) => {
            // The descriptor's number is closed already.
            std::mem::forget(teller);
            let _ = OOM_SCORE.set(score);
            let view = View::new([meminfo, stat, loadavg], facts);
            let view = Some(Rc::new(RefCell::new(view)));
            Endpoints { link: link.into(), network: Some((network.into(), device)), view }
        }
        Err(trouble) => {
            let _ = write!(teller, "{}\n{}", trouble.step, trouble.reason);
            sys::leave(1)
        }
    }
}

/// The descriptors that the first process keeps: the link, its standing for times without memory, where the network
/// device is handed over, that device, and what it writes the sandbox's limits to. And what those are.
type Kept = ([OwnedFd; 7], view::Facts);

/// What a cage has before it is known what it will be.
struct Begun {
    score: OwnedFd,
    device: OwnedFd,
    filter: seccompiler::BpfProgram,
}

/// Makes what is the same in every cage.
fn begin(groups: Option<Groups>) -> Result<Begun, StepError> {
    no_core_dumps()?;
    let score = own_score()?;
    // A session of its own: no terminal of the host's, no signal meant for the daemon's group.
    rustix::process::setsid().step("start a session")?;
    groups.map_or(Ok(()), Groups::join)?;
    sys::raise_loopback().step("raise the loopback interface")?;
    Ok(Begun { score, device: network::make_device()?, filter: filter::compile()? })
}

/// Completes the cage as described, and reports it.
fn complete(
    teller: &mut File,
    Begun { score, device, filter }: Begun,
    cage: &Cage,
    (mounts, drives): (root::Mounts, drives::Drives),
    (link, network): (UnixListener, UnixListener),
) -> Result<Kept, StepError> {
    let ([meminfo, stat, loadavg], facts) = set_up(cage, mounts, drives, &filter)?;
    // The last message, but before the descriptor goes with the others.
    teller.write_all(b"up\n").step("tell the builder")?;
    let kept = [link.into(), score, network.into(), device, meminfo, stat, loadavg];
    Ok((sys::keep_only(kept).step("close what was inherited")?, facts))
}

/// Opens what [`super::Expendable`] writes to, while this process still has host root's number.
fn own_score() -> Result<OwnedFd, StepError> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    rustix::fs::open("/proc/self/oom_score_adj", flags, Mode::empty())
        .step("open the agent's standing for times without memory")
}

/// Leaves all memory out of core dumps, for whatever is started in the sandbox. The limit of their size does not hold for a program
/// of the host that receives them (`core_pattern` with `|`), and memory holds secrets.
fn no_core_dumps() -> Result<(), StepError> {
    match std::fs::write("/proc/self/coredump_filter", "0") {
        // A kernel that writes no core dumps.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        done => done.step("leave memory out of core dumps"),
    }
}

/// Answers with what the sandbox's limits are written to.
fn set_up(
    cage: &Cage,
    mounts: root::Mounts,
    drives: drives::Drives,
    filter: &seccompiler::BpfProgram,
) -> Result<(view::Files, view::Facts), StepError> {
    become_root()?;
    network::relax();
    rustix::system::sethostname(cage.hostname.as_bytes()).step("set the host name")?;

    root::stack(&cage.root, &mounts)?;
    drop(mounts);
    check_mount_points()?;
    rustix::process::umask(Mode::from_raw_mode(0o022));
    drives.mount(&cage.mounts)?;
    mount_proc_and_sys()?;
    let (files, facts) = view::mount(cage)?;
    mount_dev()?;
    mount_run()?;
    network::cover_resolv_conf()?;
    pivot()?;
    drives::hand_over(&cage.mounts)?;

    let_go_of_stdio()?;
    limit(cage.file_size)?;
    // Last of what touches this: a change of ids sets it to what the host prefers.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .step("close the agent's memory to others")?;
    // The filter first: installing it takes a capability the next step drops.
    sys::install_filter(filter).step("install the system call filter")?;
    drop_capabilities()?;
    Ok((files, facts))
}

/// Puts `/dev/null` in place of standard input, output and error.
pub(crate) fn let_go_of_stdio() -> Result<(), StepError> {
    let null = rustix::fs::open("/dev/null", OFlags::RDWR, Mode::empty()).step("open /dev/null")?;
    rustix::stdio::dup2_stdin(&null).step("let go of standard input")?;
    rustix::stdio::dup2_stdout(&null).step("let go of standard output")?;
    rustix::stdio::dup2_stderr(&null).step("let go of standard error")
}

/// Waits until the maps are written. When the builder dies before that, so does this process.
pub(crate) fn wait_for(gate: OwnedFd) -> Result<(), StepError> {
    let mut byte = [0];
    File::from(gate).read_exact(&mut byte).step("wait for the builder")
}

/// Takes on the sandbox's own ids; until now this process had host root's number, which the
/// namespace does not know.
pub(crate) fn become_root() -> Result<(), StepError> {
    rustix::thread::set_thread_groups(&[]).step("leave the host's groups")?;
    let (uid, gid) = (Uid::ROOT, Gid::ROOT);
    rustix::thread::set_thread_res_gid(gid, gid, gid).step("become the sandbox's root group")?;
    let saved = Uid::from_raw(SAVED_UID);
    rustix::thread::set_thread_res_uid(uid, uid, saved).step("become the sandbox's root")
}

/// Makes sure that mounts go where they should. The layers were written by earlier users of the
/// sandbox: a link in place of `/proc` would lead the mount, by its absolute name, into the host's
/// tree.
pub(crate) fn check_mount_points() -> Result<(), StepError> {
    for name in root::MOUNT_POINTS {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::DIRECTORY | OFlags::CLOEXEC;
        if let Err(error) = rustix::fs::open(name, flags, Mode::empty()) {
            let step = format!("use the image's `/{name}`, which must be a directory");
            return Err(StepError::new(step, error));
        }
    }
    Ok(())
}

pub(super) const INERT: MountFlags =
    MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

fn mount_proc_and_sys() -> Result<(), StepError> {
    rustix::mount::mount("proc", "proc", "proc", INERT, None).step("mount /proc")?;
    rustix::mount::mount("sysfs", "sys", "sysfs", INERT | MountFlags::RDONLY, None)
        .step("mount /sys")?;
    for path in READ_ONLY_DIRS {
        // A mount of its own, which can then be read-only while the rest of /proc is not.
        if present(rustix::mount::mount_bind(path, path), path)? {
            let flags = MountFlags::BIND | MountFlags::RDONLY | INERT;
            rustix::mount::mount_remount(path, flags, c"").step("make parts of /proc read-only")?;
        }
    }
    for path in MASKED_FILES {
        present(rustix::mount::mount_bind("/dev/null", path), path)?;
    }
    // One empty filesystem, shown in all places.
    let mut empty: Option<&str> = None;
    for path in MASKED_DIRS {
        let masked = match empty {
            None => rustix::mount::mount(
                "empty",
                path,
                "tmpfs",
                INERT | MountFlags::RDONLY,
                c"mode=555,size=4k",
            ),
            Some(first) => rustix::mount::mount_bind(first, path),
        };
        if present(masked, path)? {
            empty.get_or_insert(path);
        }
    }
    Ok(())
}

/// Sorts out what this kernel does not have.
fn present(mounted: rustix::io::Result<()>, path: &str) -> Result<bool, StepError> {
    match mounted {
        Ok(()) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        Err(error) => Err(StepError::new(format!("mask /{path}"), error)),
    }
}

fn mount_dev() -> Result<(), StepError> {
    let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
    mount_tmpfs("dev", flags, c"mode=755,size=64k")?;
    for name in DEVICES {
        let place = format!("dev/{name}");
        let flags = OFlags::CREATE | OFlags::CLOEXEC;
        rustix::fs::open(&place, flags, Mode::empty()).step("make room for a device")?;
        // No namespace may make devices: each is the host's own, shown here.
        rustix::mount::mount_bind(format!("/dev/{name}"), &place)
            .step(&format!("mount /dev/{name}"))?;
    }
    rustix::fs::symlink("pts/ptmx", "dev/ptmx").step("make the links in /dev")?;
    link_dev()?;
    mount_in_dev()
}

fn mount_tmpfs(path: &str, flags: MountFlags, options: &CStr) -> Result<(), StepError> {
    rustix::mount::mount("tmpfs", path, "tmpfs", flags, options).step(&format!("mount /{path}"))
}

/// Makes the links that every `/dev` has.
pub(crate) fn link_dev() -> Result<(), StepError> {
    for (target, link) in DEV_LINKS {
        rustix::fs::symlink(target, link).step("make the links in /dev")?;
    }
    Ok(())
}

/// Mounts what is mounted in every `/dev`.
pub(crate) fn mount_in_dev() -> Result<(), StepError> {
    rustix::fs::mkdir("dev/shm", Mode::RWXU).step("make /dev/shm")?;
    mount_tmpfs("dev/shm", MountFlags::NOSUID | MountFlags::NODEV, c"mode=1777")?;
    rustix::fs::mkdir("dev/pts", Mode::RWXU).step("make /dev/pts")?;
    // Group 5 is `tty` everywhere.
    rustix::mount::mount(
        "devpts",
        "dev/pts",
        "devpts",
        MountFlags::NOSUID | MountFlags::NOEXEC,
        c"newinstance,ptmxmode=0666,mode=0620,gid=5",
    )
    .step("mount /dev/pts")
}

/// Mounts an empty `/run`.
pub(crate) fn mount_run() -> Result<(), StepError> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount("tmpfs", "run", "tmpfs", flags, c"mode=755").step("mount /run")?;
    rustix::fs::mkdir("run/lock", Mode::RWXU).step("make /run/lock")?;
    rustix::fs::chmod("run/lock", Mode::from_raw_mode(0o1777)).step("make /run/lock")
}

/// Makes the current directory the root and lets go of the old one, with everything on it.
pub(crate) fn pivot() -> Result<(), StepError> {
    // Old and new root in one place: the old one ends up on top of the new, where `.` still is it.
    rustix::process::pivot_root(".", ".").step("change the root")?;
    // Detached and not just unmounted: this process stands in it.
    rustix::mount::unmount(".", UnmountFlags::DETACH).step("let go of the old root")?;
    std::env::set_current_dir("/").step("enter the new root")
}

fn limit(file_size: u64) -> Result<(), StepError> {
    let set = |resource, current: u64, maximum: Option<u64>| {
        let maximum = maximum.or(rustix::process::getrlimit(resource).maximum);
        let current = Some(maximum.map_or(current, |maximum| current.min(maximum)));
        rustix::process::setrlimit(resource, Rlimit { current, maximum })
            .step("set the resource limits")
    };
    // The host may allow less than we are asked for, and cannot be made to allow more.
    let most = rustix::process::getrlimit(Resource::Fsize).maximum;
    let file_size = most.map_or(file_size, |most| file_size.min(most));
    set(Resource::Fsize, file_size, Some(file_size))?;
    set(Resource::Nofile, 65_536, None)?;
    // Also as the most that can be asked for: what was injected into a process would be in its core file.
    let most = rustix::process::getrlimit(Resource::Core).maximum;
    set(Resource::Core, CORE_SIZE, Some(most.map_or(CORE_SIZE, |most| most.min(CORE_SIZE))))
}

/// Drops capabilities from the bounding set, so that no program gets them back by being executed,
/// and from this process.
fn drop_capabilities() -> Result<(), StepError> {
    for number in 0..64 {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        if KEPT.contains(capability) {
            continue;
        }
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            Ok(()) => {}
            // The first number this kernel has no capability for.
            Err(Errno::INVAL) => break,
            Err(error) => return Err(StepError::new("drop capabilities", error)),
        }
    }
    let sets =
        CapabilitySets { effective: KEPT, permitted: KEPT, inheritable: CapabilitySet::empty() };
    rustix::thread::set_capabilities(None, sets).step("drop capabilities")
}
