//! Builds the isolated environment (the cage) that a sandbox runs in.
//!
//! ```text
//! builder (host root)                       first process (root of the sandbox, PID 1)
//!
//!  1 lock the runtime directory
//!  2 listen on agent.sock and net.sock
//!  3 copy the directories' mounts
//!  4 clone with new namespaces  ----------->  5 join the control groups,
//!  6 lay out the base layer                     raise the loopback, make the network device,
//!  7 write the user and group maps              write the system call filter
//!  8 shift the copies' owners
//!  9 write machine.json, open the gate ----> 10 become root of the namespace
//!                                            11 stack the layers and the drives',
//!                                               mount /proc, /sys, /dev, /run,
//!                                               show the sandbox's own limits
//!                                            12 pivot, let go of the host's tree
//!                                            13 limits, system call filter, capabilities
//! 15 answer the driver, exit  <------------- 14 say "up"
//!                                            16 serve the link, for ever
//! ```
//!
//! What each side can rely on:
//!
//! - Host root is not mapped into the user namespace. A process that gets out of the other
//!   namespaces is still nobody on the host.
//! - The user namespace belongs to a user of its own, not to host root, so that no sandbox can use up what the kernel allows the owner
//!   of namespaces ([`owner`]).
//! - Until the gate opens, a builder that dies takes the first process with it (its end of the gate
//!   closes). From then on `machine.json` names the process, so a later daemon finds it.
//! - PID 1 is not dumpable and its memory belongs to the host's user namespace: root inside can
//!   neither trace it nor look at `/proc/1/{fd,mem,exe,root}`.
//!
//! Steps 4 and 5 can be done before it is known what to build: see [`prebuild`].
//!
//! Nothing here runs in more than one thread: `clone3` without a thread library's knowledge is only
//! sound that way. [`crate::serve`] starts its runtime after the cage is built.

pub(crate) mod drives;
pub(crate) mod filter;
pub(crate) mod inside;
pub(crate) mod network;
mod owner;
mod prebuild;
pub(crate) mod root;
mod swap;
pub(crate) mod sys;
mod view;

use std::cell::RefCell;
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::OnceLock;

use rustix::fs::FlockOperation;
use rustix::pipe::PipeFlags;
use sandkeep_proto::cage::{
    Cage, Cgroup, Ids, NO_ROOM, Outcome, RECORD, Record, SOCKET, VERSION, start_time,
};
use serde::de::DeserializeOwned;

pub(crate) use inside::{Groups, wait_for};
pub(crate) use network::hand_over;
pub(crate) use root::plain;
pub(crate) use swap::swap_root;
pub(crate) use sys::{Side, leave, split};
pub(crate) use view::View;

/// A step that failed, for the driver.
#[derive(Debug)]
pub(crate) struct StepError {
    pub(crate) step: String,
    pub(crate) reason: String,
}

impl StepError {
    pub(crate) fn new(step: impl Into<String>, reason: impl Display) -> Self {
        Self { step: step.into(), reason: reason.to_string() }
    }
}

impl From<StepError> for Outcome {
    fn from(StepError { step, reason }: StepError) -> Self {
        // What the system says when the disk, or what may be used of it, is full: ENOSPC and EDQUOT.
        let full = ["(os error 28)", "(os error 122)"].iter().any(|code| reason.ends_with(code));
        if full && step != NO_ROOM {
            return Self::Failed { step: NO_ROOM.to_owned(), reason: format!("{step}: {reason}") };
        }
        Self::Failed { step, reason }
    }
}

/// Says which step an error belongs to.
pub(crate) trait Step<T> {
    fn step(self, step: &str) -> Result<T, StepError>;
}

impl<T, E: Display> Step<T> for Result<T, E> {
    fn step(self, step: &str) -> Result<T, StepError> {
        self.map_err(|reason| StepError::new(step, reason))
    }
}

/// The process that returns from [`build`].
pub(crate) enum Built {
    /// The builder, which has answered the driver and should exit.
    Builder(ExitCode),
    /// The sandbox's first process, which should serve this.
    First(Endpoints),
}

/// What the first process serves until it ends.
pub(crate) struct Endpoints {
    /// Where the link is dialled.
    pub(crate) link: UnixListener,
    /// The network device and where it is handed over; absent without a cage.
    pub(crate) network: Option<(UnixListener, OwnedFd)>,
    /// What the sandbox sees of its limits; absent without a cage.
    pub(crate) view: Option<Rc<RefCell<View>>>,
}

/// Builds the cage described on standard input. Returns twice, once on each side.
pub(crate) fn build() -> Built {
    built(checked_plan().and_then(|cage| raise(&cage)))
}

/// The same, and begins before there is something on standard input.
pub(crate) fn prebuild() -> Built {
    built(prebuild::raise())
}

fn checked_plan() -> Result<Cage, StepError> {
    let cage: Cage = read_plan()?;
    if cage.version == VERSION { Ok(cage) } else { Err(wrong_version(cage.version)) }
}

fn built(raised: Result<Raised, StepError>) -> Built {
    let outcome = match raised {
        Ok(Raised::Inside(endpoints)) => return Built::First(endpoints),
        Ok(Raised::Outside(record)) => Outcome::Done(record),
        Err(trouble) => trouble.into(),
    };
    Built::Builder(answer(&outcome))
}

/// While one of these is alive, processes this one starts are the kernel's first choice when memory
/// runs short. Children inherit the mark for good; the agent itself drops it with this value.
pub(crate) struct Expendable(());

/// Where the mark is written. Opened while the cage was built: later, the file belongs to the host's
/// root, like all of `/proc/1`.
static OOM_SCORE: OnceLock<OwnedFd> = OnceLock::new();

impl Expendable {
    /// Sets the mark, to be held while a command is started.
    pub(crate) fn mark() -> Self {
        score(b"300");
        Self(())
    }
}

impl Drop for Expendable {
    fn drop(&mut self) {
        score(b"0");
    }
}

/// Takes what the mark is written to.
pub(crate) fn set_oom_score(file: OwnedFd) {
    // Once: the first is as good as any other.
    let _ = OOM_SCORE.set(file);
}

fn score(value: &[u8]) {
    if let Some(file) = OOM_SCORE.get() {
        // Without the mark a command is only judged by its size.
        let _ = rustix::io::write(file, value);
    }
}

enum Raised {
    Outside(Record),
    Inside(Endpoints),
}

/// Takes the lock on the runtime directory. Held until the builder exits, so that a daemon started meanwhile waits for the
/// outcome before it judges the directory. The first process closes its copy.
fn claim(cage: &Cage) -> Result<File, StepError> {
    let lock = lock(&cage.run_dir)?;
    if cage.run_dir.join(RECORD).exists() {
        return Err(StepError::new("claim the runtime directory", "a machine was started in it"));
    }
    Ok(lock)
}

fn raise(cage: &Cage) -> Result<Raised, StepError> {
    let lock = claim(cage)?;
    let listeners = (listen(&cage.run_dir)?, network::listen()?);
    let mounts = root::Mounts::copy(&cage.root)?;
    let drives = drives::Drives::copy(&cage.mounts)?;
    let groups = inside::Groups::open(&cage.cgroup)?;
    let (gate, gate_key) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).step("make a pipe")?;
    let (news, teller) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).step("make a pipe")?;

    let into = match &cage.cgroup {
        Cgroup::V1(_) => None,
        Cgroup::V2(_) => groups.directory(),
    };
    view::begin_time();
    match owner::split_as_owner(sys::NAMESPACES, into).step("make the namespaces")? {
        sys::Side::Child => {
            drop((lock, gate_key, news));
            let prepared = inside::Prepared { cage, mounts, drives, groups };
            Ok(Raised::Inside(inside::enter(prepared, gate, teller, listeners)))
        }
        sys::Side::Parent { child } => {
            drop((gate, teller, groups));
            let admit = || {
                let record = grant(cage, child, (&mounts, &drives))?;
                File::from(gate_key).write_all(b"g").step(OPEN_THE_GATE)?;
                Ok(record)
            };
            let outcome = finish(admit, || hear(news));
            if outcome.is_err() {
                abandon(Some(&cage.run_dir), child);
            }
            outcome.map(Raised::Outside)
        }
    }
}

pub(crate) const OPEN_THE_GATE: &str = "open the gate";

/// Resumes the waiting child, and reads its result.
fn finish(
    admit: impl FnOnce() -> Result<Record, StepError>,
    hear: impl FnOnce() -> Result<(), StepError>,
) -> Result<Record, StepError> {
    let admitted = admit();
    // The result is read in any case: without an open gate the child ends soon, and if it ended
    // before the gate was opened, its message has the cause.
    match (admitted, hear()) {
        (Ok(record), Ok(())) => Ok(record),
        (Ok(_), Err(trouble)) => Err(trouble),
        (Err(StepError { step, .. }), Err(trouble)) if step == OPEN_THE_GATE => Err(trouble),
        (Err(trouble), _) => Err(trouble),
    }
}

/// Does for the waiting child what only the host's root can do.
fn grant(
    cage: &Cage,
    child: u32,
    (mounts, drives): (&root::Mounts, &drives::Drives),
) -> Result<Record, StepError> {
    let proc = Path::new("/proc").join(child.to_string());
    root::make_base(&cage.root, &cage.hostname)?;
    drives::make_base(&cage.mounts)?;
    map_ids(&proc, cage.ids)?;
    let user_ns = File::open(proc.join("ns/user")).step("open the user namespace")?;
    mounts.shift(user_ns.as_fd())?;
    drives.shift(user_ns.as_fd())?;
    let record = record(&proc, child, &cage.hostname)?;
    save(&cage.run_dir, &record)?;
    Ok(record)
}

/// Maps `0..count` inside to the sandbox's own range, and nothing else.
fn map_ids(proc: &Path, ids: Ids) -> Result<(), StepError> {
    let map = format!("0 {} {}\n", ids.base, ids.count);
    for name in ["uid_map", "gid_map"] {
        // The kernel takes a map in one write, once.
        let mut file = fs::OpenOptions::new()
            .write(true)
            .open(proc.join(name))
            .step("open the namespace's id maps")?;
        file.write_all(map.as_bytes()).step("write the namespace's id maps")?;
    }
    Ok(())
}

pub(crate) fn record(proc: &Path, pid: u32, hostname: &str) -> Result<Record, StepError> {
    let stat = fs::read_to_string(proc.join("stat")).step("read the first process's start time")?;
    let started = start_time(&stat)
        .ok_or_else(|| StepError::new("read the first process's start time", "it has none"))?;
    let hostname = hostname.to_owned();
    Ok(Record { version: VERSION, pid, started, hostname, group: None, uid: None })
}

/// Writes `machine.json`. The runtime directory does not outlive a reboot, so nothing is synced.
pub(crate) fn save(run_dir: &Path, record: &Record) -> Result<(), StepError> {
    let text = serde_json::to_vec(record).step("write the machine's record")?;
    let draft = run_dir.join("machine.json.new");
    fs::write(&draft, text).step("write the machine's record")?;
    fs::rename(&draft, run_dir.join(RECORD)).step("write the machine's record")
}

/// Waits for the first process to say that it is up, or what went wrong.
fn hear(news: OwnedFd) -> Result<(), StepError> {
    let mut said = String::new();
    File::from(news).read_to_string(&mut said).step("hear from the first process")?;
    match said.split_once('\n') {
        Some(("up", _)) => Ok(()),
        Some((step, reason)) => Err(StepError::new(step, reason)),
        None => Err(StepError::new("build the cage", "the first process died")),
    }
}

/// Ends a first process that never came up, and takes back its record if it may have one.
pub(crate) fn abandon(run_dir: Option<&Path>, child: u32) {
    if let Some(pid) = i32::try_from(child).ok().and_then(rustix::process::Pid::from_raw) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
    }
    if let Some(run_dir) = run_dir {
        let _ = fs::remove_file(run_dir.join(RECORD));
    }
}

pub(crate) fn lock(run_dir: &Path) -> Result<File, StepError> {
    let directory = File::open(run_dir).step("open the runtime directory")?;
    rustix::fs::flock(&directory, FlockOperation::LockShared).step("lock the runtime directory")?;
    Ok(directory)
}

/// Listens where only the host's root can connect: the runtime directory is closed to all others,
/// and the sandbox has no path to it.
fn listen(run_dir: &Path) -> Result<UnixListener, StepError> {
    // A socket's address holds 107 bytes, a path may be longer: go through the directory.
    std::env::set_current_dir(run_dir).step("enter the runtime directory")?;
    UnixListener::bind(SOCKET).step("listen on the agent's socket")
}

pub(crate) fn read_plan<T: DeserializeOwned>() -> Result<T, StepError> {
    let mut text = Vec::new();
    io::stdin().lock().read_to_end(&mut text).step("read what to build")?;
    serde_json::from_slice(&text).step("read what to build")
}

pub(crate) fn wrong_version(version: u32) -> StepError {
    let reason = format!("the driver speaks version {version}, this agent {VERSION}");
    StepError::new("read what to build", reason)
}

/// Reports to the driver, in one line.
pub(crate) fn answer(outcome: &Outcome) -> ExitCode {
    let mut line = serde_json::to_vec(outcome).unwrap_or_default();
    line.push(b'\n');
    match io::stdout().lock().write_all(&line) {
        Ok(()) if matches!(outcome, Outcome::Done(_)) => ExitCode::SUCCESS,
        Ok(()) | Err(_) => ExitCode::FAILURE,
    }
}
