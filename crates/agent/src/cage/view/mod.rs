//! What a sandbox sees of its own limits.
//!
//! `/proc` shows the host's memory and processors, and programs size themselves by them. So inside:
//!
//! - `/sys/fs/cgroup` has the sandbox's own control groups, read-only. Node, the JVM and Go read their limits there.
//! - `/proc/meminfo`, `/proc/stat` and `/proc/loadavg` are covered by files in memory that describe the sandbox alone. [`View`] keeps
//!   them current.
//! - Commands run on as many processors as the CPU limit, rounded up. `nproc` counts those. Which processors follows from the
//!   range of user ids, so that sandboxes are spread. The agent runs on any. `/proc/cpuinfo` and `/sys/devices/system/cpu/online` list the same processors,
//!   by the numbers that `sched_getcpu` and `sched_getaffinity` give.
//! - `/proc/uptime` counts from the start of the session, in a time namespace.
//!
//! *Why plain files, and not a FUSE filesystem that computes each answer* (as lxcfs does): a process that waits for such an answer
//! cannot be frozen while the agent is, and checkpoints freeze both. It would also cost a mount and a handshake at every start.
//!
//! *Nobody inside can change any of it.* The mounts are read-only and no process inside may mount or unmount. The agent writes through
//! descriptors that it opened before the mounts became read-only.

mod current;
mod text;

use std::fs::{self, File};
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rustix::fs::{Mode, OFlags};
use rustix::mount::MountFlags;
use rustix::thread::CpuSet;
use sandkeep_proto::cage::{Cage, Cgroup};

pub(crate) use current::View;

use super::inside::INERT;
use super::{Step, StepError, sys};

/// The files that [`View`] writes, by their names in `/proc`.
const CURRENT: [&str; 3] = ["meminfo", "stat", "loadavg"];
/// The controllers of version 1 that programs look for.
const CONTROLLERS: [&str; 5] = ["cpu", "cpuacct", "cpuset", "memory", "pids"];
/// A time namespace for the children of this process, from `linux/sched.h`.
const CLONE_NEWTIME: i32 = 0x80;
/// Where the files are made: a directory of the stage, beside the sandbox's root. It is out of reach after the pivot.
const MADE: &str = "../view";
/// The same directory, read-only.
const SHOWN: &str = "../view-read-only";
const ONLINE: &str = "sys/devices/system/cpu/online";

/// Descriptors of [`CURRENT`], in their order.
pub(super) type Files = [OwnedFd; CURRENT.len()];

/// What the files describe.
#[derive(Debug)]
pub(super) struct Facts {
    memory: u64,
    cpus: Vec<usize>,
    /// The same, if they are not all there are.
    affinity: Option<CpuSet>,
    v2: bool,
}

/// Gives the next child of this process a clock that starts now. Without time namespaces `/proc/uptime` stays the host's.
pub(super) fn begin_time() {
    let uptime = fs::read_to_string("/proc/uptime").unwrap_or_default();
    let Some((seconds, _)) = uptime.split_once('.') else { return };
    if sys::unshare(CLONE_NEWTIME).is_ok() {
        let _ = fs::write("/proc/self/timens_offsets", format!("boottime -{seconds} 0"));
    }
}

/// The version 1 directories to be seen, each with the controllers that are mounted there.
fn together(cgroup: &Cgroup) -> Vec<(Vec<&str>, &PathBuf)> {
    let mut found: Vec<(Vec<&str>, &PathBuf)> = Vec::new();
    let Cgroup::V1(directories) = cgroup else { return found };
    for (name, path) in directories {
        match found.iter_mut().find(|(_, other)| *other == path) {
            Some((names, _)) => names.push(name),
            None => found.push((vec![name], path)),
        }
    }
    found.retain(|(names, _)| names.iter().any(|name| CONTROLLERS.contains(name)));
    found
}

/// Makes the files and mounts everything. Expects the sandbox's root as the current directory, in the stage, with `proc` and `sys`
/// mounted, and the host's tree still there to take the control groups from.
pub(super) fn mount(cage: &Cage) -> Result<(Files, Facts), StepError> {
    const STEP: &str = "show the sandbox's limits";
    let turn = cage.ids.base / cage.ids.count.max(1);
    let (cpus, affinity) = choose(cage.cpus, turn).step(STEP)?;
    for directory in ["", "fs", "fs/cgroup"] {
        make_dir(directory)?;
    }
    let mut groups: Vec<(String, &PathBuf)> = Vec::new();
    if let Cgroup::V2(group) = &cage.cgroup {
        groups.push(("sys/fs/cgroup".to_owned(), group));
    }
    for (names, group) in together(&cage.cgroup) {
        let name = names.join(",");
        groups.push((format!("sys/fs/cgroup/{name}"), group));
        make_dir(&format!("fs/cgroup/{name}"))?;
        for part in names.iter().filter(|part| **part != name) {
            rustix::fs::symlink(&name, format!("{MADE}/fs/cgroup/{part}")).step(STEP)?;
        }
    }
    let files: Result<Vec<OwnedFd>, StepError> =
        CURRENT.iter().map(|name| make_file(name).map(OwnedFd::from)).collect();
    let mut covers: Vec<(&str, String)> =
        CURRENT.iter().map(|name| (*name, format!("proc/{name}"))).collect();
    let online = text::list(&cpus);
    if fs::read_to_string(ONLINE).is_ok_and(|all| all.trim() != online) {
        fs::write(format!("{MADE}/online"), format!("{online}\n")).step(STEP)?;
        covers.push(("online", ONLINE.to_owned()));
        if let Some(info) = first_processor() {
            fs::write(format!("{MADE}/cpuinfo"), text::cpuinfo(&info, &cpus)).step(STEP)?;
            covers.push(("cpuinfo", "proc/cpuinfo".to_owned()));
        }
    }
    rustix::fs::mkdir(SHOWN, Mode::RWXU).step(STEP)?;
    rustix::mount::mount_bind(MADE, SHOWN).step(STEP)?;
    let flags = MountFlags::BIND | MountFlags::RDONLY | INERT;
    rustix::mount::mount_remount(SHOWN, flags, c"").step(STEP)?;
    // What is mounted from here on is read-only too.
    rustix::mount::mount_bind(format!("{SHOWN}/fs"), "sys/fs").step(STEP)?;
    for (place, group) in groups {
        // Only this directory is in the copy: nothing above it can be reached.
        rustix::mount::mount_bind(group, &place).step("show the control groups")?;
        rustix::mount::mount_remount(&place, flags, c"")
            .step("show the control groups read-only")?;
    }
    for (name, over) in covers {
        rustix::mount::mount_bind(format!("{SHOWN}/{name}"), &over)
            .step(&format!("show the sandbox's own /{over}"))?;
    }
    let files = files?.try_into().map_err(|_| StepError::new(STEP, "a file is missing"))?;
    let v2 = matches!(cage.cgroup, Cgroup::V2(_));
    Ok((files, Facts { memory: cage.memory, cpus, affinity, v2 }))
}

fn make_dir(name: &str) -> Result<(), StepError> {
    let path = format!("{MADE}/{name}");
    rustix::fs::mkdir(path, Mode::from_raw_mode(0o755)).step("show the sandbox's limits")
}

fn make_file(name: &str) -> Result<File, StepError> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(0o444);
    rustix::fs::open(format!("{MADE}/{name}"), flags, mode)
        .map(File::from)
        .step("show the sandbox's limits")
}

/// Chooses the processors that commands run on, if they are to run on fewer than all.
fn choose(wanted: u32, turn: u32) -> rustix::io::Result<(Vec<usize>, Option<CpuSet>)> {
    let all = rustix::thread::sched_getaffinity(None)?;
    let all: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).collect();
    let own = text::share(&all, wanted as usize, turn as usize);
    let affinity = (own.len() < all.len()).then(|| {
        let mut set = CpuSet::new();
        own.iter().for_each(|cpu| set.set(*cpu));
        set
    });
    Ok((own, affinity))
}

/// What `/proc/cpuinfo` says of the first processor. Not more is read: on a large host all of it takes the kernel a while.
fn first_processor() -> Option<String> {
    const MOST: usize = 64 << 10;
    let mut file = File::open("proc/cpuinfo").ok()?;
    let (mut bytes, mut chunk) = (Vec::new(), [0; 4096]);
    loop {
        let count = file.read(&mut chunk).ok()?;
        bytes.extend_from_slice(&chunk[..count]);
        if let Some(end) = bytes.windows(2).position(|pair| pair == b"\n\n") {
            bytes.truncate(end + 1);
            return String::from_utf8(bytes).ok();
        }
        if count == 0 || bytes.len() > MOST {
            return None;
        }
    }
}
