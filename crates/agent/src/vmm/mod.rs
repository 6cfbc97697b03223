//! Confines a hypervisor, and becomes it.
//!
//! ```text
//! launcher (host root)                      the hypervisor-to-be
//!
//!  1 lock the runtime directory
//!  2 open files, bind sockets
//!  3 clone with new namespaces  ----------->  4 join the control groups
//!  5 write machine.json, open the gate ---->  6 build a root of a few read-only directories, enter it
//!                                             7 descriptors to their numbers, all others closed
//!                                             8 limits, user, capabilities, no new privileges
//! 10 answer the driver, exit  <-------------- 9 exec: the news pipe closes without a word
//! ```
//!
//! What a hypervisor that was taken over by its guest finds: itself, as a user that owns nothing else; the host's
//! `/usr`, which everyone may read; the machine's own files, open; two sockets that speak for the machine anyway; no process
//! but itself, no network, no way to gain a privilege. Its own filter of system calls comes on top.
//!
//! It is the first process of its pid namespace and not a child of the daemon, which may die and be
//! restarted.

pub(crate) mod root;
pub(crate) mod sys;

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::ExitCode;

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use rustix::process::{Resource, Rlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, Gid, Uid};
use sandkeep_proto::cage::{Cgroup, Outcome, RECORD, Record};
use sandkeep_proto::machine::{NET_DIR, VERSION, Vmm, VmmFile, VmmSocket};

use crate::cage::inside::CORE_SIZE;
use crate::cage::{
    self, Groups, OPEN_THE_GATE, Side, Step, StepError, abandon, answer, lock, read_plan, record,
    save, wait_for, wrong_version,
};

/// How many files a hypervisor may have open: its disks, the pages of its memory, its sockets.
const FILES: u64 = 4096;

/// What the hypervisor has of its own.
const NAMESPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS;

/// Starts the hypervisor described on standard input. The hypervisor itself never returns from
/// this.
pub(crate) fn launch() -> ExitCode {
    let plan = read_plan().and_then(|vmm: Vmm| {
        if vmm.version == VERSION { Ok(vmm) } else { Err(wrong_version(vmm.version)) }
    });
    let outcome = match plan.and_then(|vmm| raise(&vmm)) {
        Ok(record) => Outcome::Done(record),
        Err(trouble) => trouble.into(),
    };
    answer(&outcome)
}

fn raise(vmm: &Vmm) -> Result<Record, StepError> {
    // Held until the launcher exits, so that a daemon started meanwhile waits for the outcome before it judges the
    // directory. It is closed on exec.
    let lock = lock(&vmm.run_dir)?;
    if vmm.run_dir.join(RECORD).exists() {
        return Err(StepError::new("claim the runtime directory", "a machine was started in it"));
    }
    make_net(vmm)?;
    let given = open_all(vmm)?;
    let command = sys::Program::new(&vmm.program, &vmm.argv, &vmm.env)?;
    let groups = Groups::open(&vmm.cgroup)?;
    let (gate, gate_key) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).step("make a pipe")?;
    let (news, teller) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).step("make a pipe")?;
    let into = match &vmm.cgroup {
        Cgroup::V1(_) => None,
        Cgroup::V2(_) => groups.directory(),
    };
    match cage::split(NAMESPACES, into).step("make the namespaces")? {
        Side::Child => {
            drop((lock, gate_key, news));
            let trouble = match confine(vmm, gate, groups) {
                Ok(()) => become_it(&command, given, teller),
                Err(trouble) => (File::from(teller), trouble),
            };
            let (mut teller, StepError { step, reason }) = trouble;
            let _ = write!(teller, "{step}\n{reason}");
            cage::leave(1)
        }
        Side::Parent { child } => {
            drop((gate, teller, groups, given));
            let outcome = match (admit(vmm, child, gate_key), hear(news)) {
                (Ok(record), Ok(())) => Ok(record),
                (Ok(_), Err(trouble)) => Err(trouble),
                (Err(StepError { step, .. }), Err(trouble)) if step == OPEN_THE_GATE => {
                    Err(trouble)
                }
                (Err(trouble), _) => Err(trouble),
            };
            if outcome.is_err() {
                abandon(Some(&vmm.run_dir), child);
            }
            outcome
        }
    }
}

/// Makes the one directory in which the hypervisor may make something: the socket of its network card. The driver takes
/// it back before the machine runs.
fn make_net(vmm: &Vmm) -> Result<(), StepError> {
    let path = vmm.run_dir.join(NET_DIR);
    fs::DirBuilder::new().mode(0o700).create(&path).step("make the sockets' directory")?;
    std::os::unix::fs::chown(&path, Some(vmm.uid), Some(vmm.gid))
        .step("hand over the sockets' directory")
}

/// Everything the hypervisor is given, and at which number.
fn open_all(vmm: &Vmm) -> Result<Vec<(RawFd, OwnedFd)>, StepError> {
    let number = |fd: u32| RawFd::try_from(fd).step("number the descriptors");
    let mut given = Vec::with_capacity(vmm.files.len() + vmm.sockets.len());
    for VmmFile { fd, path, write } in &vmm.files {
        let pipe = fs::metadata(path).is_ok_and(|about| about.file_type().is_fifo());
        let flags = if pipe { OFlags::NONBLOCK } else { OFlags::empty() };
        let opened = OpenOptions::new()
            .read(true)
            .write(*write)
            .create(*write)
            .mode(0o600)
            .custom_flags(flags.bits() as i32)
            .open(path)
            .step(&format!("open `{}`", path.display()))?;
        given.push((number(*fd)?, opened.into()));
    }
    for VmmSocket { fd, path } in &vmm.sockets {
        let bound = listen(path).step(&format!("listen on `{}`", path.display()))?;
        given.push((number(*fd)?, bound.into()));
    }
    for VmmSocket { fd, path } in &vmm.calls {
        let connected = call(path).step(&format!("connect to `{}`", path.display()))?;
        given.push((number(*fd)?, connected.into()));
    }
    Ok(given)
}

fn listen(path: &Path) -> std::io::Result<UnixListener> {
    in_its_directory(path, |name| {
        match fs::remove_file(name) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(name)?;
        fs::set_permissions(name, Permissions::from_mode(0o600))?;
        Ok(listener)
    })
}

fn call(path: &Path) -> std::io::Result<UnixStream> {
    in_its_directory(path, |name| UnixStream::connect(name))
}

/// A socket's address holds 107 bytes, a path may be longer: goes through the directory.
fn in_its_directory<T>(
    path: &Path,
    work: impl FnOnce(&Path) -> std::io::Result<T>,
) -> std::io::Result<T> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(std::io::ErrorKind::InvalidInput.into());
    };
    std::env::set_current_dir(parent)?;
    let done = work(Path::new(name))?;
    std::env::set_current_dir("/")?;
    Ok(done)
}

/// Puts the child on record, then resumes it.
fn admit(vmm: &Vmm, child: u32, gate: OwnedFd) -> Result<Record, StepError> {
    let proc = Path::new("/proc").join(child.to_string());
    let mut record = record(&proc, child, &vmm.hostname)?;
    if vmm.group.is_some() {
        record.group.clone_from(&vmm.group);
        record.uid = Some(vmm.uid);
    }
    save(&vmm.run_dir, &record)?;
    File::from(gate).write_all(b"g").step(OPEN_THE_GATE)?;
    Ok(record)
}

/// Waits until the child has become the hypervisor, or says what went wrong.
fn hear(news: OwnedFd) -> Result<(), StepError> {
    let mut said = String::new();
    File::from(news).read_to_string(&mut said).step("hear from the hypervisor")?;
    match said.strip_prefix(READY).unwrap_or(&said).split_once('\n') {
        Some((step, reason)) => Err(StepError::new(step, reason)),
        None if said == READY => Ok(()),
        None => Err(StepError::new("confine the hypervisor", "its process died")),
    }
}

/// Printed right before the program is run; what is printed after that is why it could not be.
const READY: &str = "ready\n";

fn confine(vmm: &Vmm, gate: OwnedFd, groups: Groups) -> Result<(), StepError> {
    // A session of its own: no terminal of the host's, no signal meant for the daemon's group.
    rustix::process::setsid().step("start a session")?;
    groups.join()?;
    // When the host is short of memory, machines go before what runs them.
    fs::write("/proc/self/oom_score_adj", "300")
        .step("set its standing for times without memory")?;
    wait_for(gate)?;
    rustix::system::sethostname(b"machine").step("set the host name")?;
    root::enter(vmm)?;
    limit(vmm)?;
    drop_capabilities()?;
    become_user(vmm)?;
    rustix::thread::set_no_new_privs(true).step("forgo new privileges")
}

/// Returns only if the program cannot be run.
fn become_it(
    command: &sys::Program,
    given: Vec<(RawFd, OwnedFd)>,
    teller: OwnedFd,
) -> (File, StepError) {
    let mut teller = File::from(teller);
    let above = given.iter().map(|(at, _)| at + 1).max().unwrap_or(0).max(3);
    let placed = sys::out_of_the_way(teller.as_fd(), above).and_then(|moved| {
        teller = moved.into();
        let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
        sys::place(null.into(), given, above)
    });
    if let Err(error) = placed {
        return (teller, StepError::new("number the descriptors", error));
    }
    if let Err(error) = teller.write_all(READY.as_bytes()) {
        return (teller, StepError::new("tell the launcher", error));
    }
    let error = command.exec();
    (teller, StepError::new("run the hypervisor", error))
}

/// Bounds what is not bounded by control groups. Its guest decides how much it writes, and a fault in its disks' format must not
/// make a file that fills the host.
fn limit(vmm: &Vmm) -> Result<(), StepError> {
    // A process at its limit gets an error from the write, and is not ended by a signal.
    sys::ignore_too_large_files().step("set the resource limits")?;
    let limits =
        [(Resource::Nofile, FILES), (Resource::Core, CORE_SIZE), (Resource::Fsize, vmm.file_size)];
    for (resource, most) in limits {
        let most = rustix::process::getrlimit(resource).maximum.map_or(most, |host| most.min(host));
        let limit = Rlimit { current: Some(most), maximum: Some(most) };
        rustix::process::setrlimit(resource, limit).step("set the resource limits")?;
    }
    Ok(())
}

/// Drops every capability from the bounding set and from what could be inherited. Those in force go with the user.
fn drop_capabilities() -> Result<(), StepError> {
    for number in 0..64 {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            Ok(()) => {}
            // The first number this kernel has no capability for.
            Err(Errno::INVAL) => break,
            Err(error) => return Err(StepError::new("drop capabilities", error)),
        }
    }
    rustix::thread::clear_ambient_capability_set().step("drop capabilities")
}

/// Takes on the machine's own user.
fn become_user(vmm: &Vmm) -> Result<(), StepError> {
    let (uid, gid) = (Uid::from_raw(vmm.uid), Gid::from_raw(vmm.gid));
    rustix::thread::set_thread_groups(&[]).step("leave the host's groups")?;
    rustix::thread::set_thread_res_gid(gid, gid, gid).step("become the machine's group")?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).step("become the machine's user")?;
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    rustix::thread::set_capabilities(None, sets).step("drop capabilities")
}
