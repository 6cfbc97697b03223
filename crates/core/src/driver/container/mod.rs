//! The `container` driver: Linux namespaces, a user range of its own, control groups.
//!
//! The daemon does nothing privileged itself. It makes a machine's runtime directory and control
//! groups, then runs `keep-agent cage`, which builds the cage and leaves its first process behind
//! (see `crates/agent/src/cage/mod.rs`). That process is nobody's child of ours: the daemon may die
//! and come back without it noticing.
//!
//! ```text
//! <run_dir>/<key>/            0700, made by start, gone after stop
//!   agent.sock                where the agent listens
//!   net.sock                  where the agent hands over the network device
//!   machine.json              who the first process is: proto::cage::Record
//! <cgroup>/<parent>/<key>     its limits and accounts
//! ```
//!
//! *Who may touch a machine's directory.* `start` and `swap_root`, and the builders they run, hold a
//! shared lock on it; whatever judges or clears it (`stop`, `survivors`, a `start` that finds one)
//! takes an exclusive one. A builder keeps its lock when the daemon dies, so the next daemon waits
//! for its outcome instead of pulling the directory from under it.
//!
//! *Who is alive.* Process numbers are reused, so a record counts only if the process has the start
//! time it names. From then on the process is held by a pidfd, which cannot mean another.
//!
//! *What is left to the background.* Taking an overlay down means forgetting every file that was
//! looked at through it, and a sync of the whole filesystem: up to a hundred milliseconds in which
//! nothing can be written any more and nobody needs to wait. So `stop` holds the mounts until the
//! processes are gone, and a builder that has swapped a root is not waited for.
//!
//! Calls are plain blocking code on the runtime's blocking threads: each is a few milliseconds of
//! system calls, and one that was begun is finished even if its caller goes away.

mod cgroup;
mod probe;

use std::fs::{self, DirBuilder, File};
use std::io::{self, BufRead, BufReader, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use async_trait::async_trait;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::FlockOperation;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use rustix::process::{Pid, PidfdFlags, Signal};
use sandkeep_proto::cage::{
    self, Cage, Ids, NETWORK_SOCKET, Outcome, RECORD, Record, SOCKET, Swap, VERSION, start_time,
};
use serde::Serialize;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use self::cgroup::Groups;
pub use self::probe::probe;
use super::{
    Device, Driver, DriverError, DriverResult, Link, Machine, MachineMount, MachineUsage, Relayer,
};
use crate::model::{MachineKey, RootFs};

const NAME: &str = "container";
/// How long a killed machine may take to be gone. Only a process stuck in the kernel takes long.
const DEATH: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };
/// How long the agent may take to hand over the network device.
const HAND_OVER: Duration = Duration::from_secs(10);

/// Where the driver keeps things on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerConfig {
    /// The `keep-agent` program on disk, written by nobody but root.
    pub agent: PathBuf,
    /// Where running machines have their directories. Made if absent, closed to all but root.
    pub run_dir: PathBuf,
    /// The control group all machines are in.
    pub cgroup_parent: String,
}

/// Runs machines as containers. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ContainerDriver {
    host: Arc<Host>,
}

impl ContainerDriver {
    /// Prepares this host.
    ///
    /// # Errors
    ///
    /// Returns [`DriverError::Unsupported`] when the host lacks control groups, and
    /// [`DriverError::Io`] when a directory cannot be made.
    pub fn new(config: ContainerConfig) -> DriverResult<Self> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&config.run_dir)
            .map_err(failed("create", &config.run_dir))?;
        let groups = Groups::find(&config.cgroup_parent)?;
        Ok(Self { host: Arc::new(Host { config, groups }) })
    }

    /// Removes the runtime directory, if no machine is left in it. Control groups go with the last
    /// machine by themselves.
    pub fn retire(self) {
        let _ = fs::remove_dir(&self.host.config.run_dir);
    }

    /// Does something with the host on a thread where it may block.
    async fn with_host<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Host) -> DriverResult<T> + Send + 'static,
    ) -> DriverResult<T> {
        let host = Arc::clone(&self.host);
        match tokio::task::spawn_blocking(move || work(&host)).await {
            Ok(done) => done,
            Err(failure) => match failure.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => {
                    let path = self.host.config.run_dir.clone();
                    let source = io::ErrorKind::Interrupted.into();
                    Err(DriverError::Io { action: "go on using", path, source })
                }
            },
        }
    }
}

#[async_trait]
impl Driver for ContainerDriver {
    fn name(&self) -> &'static str {
        NAME
    }

    async fn start(&self, machine: &Machine) -> DriverResult<Link> {
        let machine = machine.clone();
        self.with_host(move |host| host.start(&machine)).await
    }

    async fn stop(&self, key: &MachineKey) -> DriverResult<MachineUsage> {
        let key = key.clone();
        self.with_host(move |host| host.stop(&key)).await
    }

    async fn usage(&self, key: &MachineKey) -> DriverResult<MachineUsage> {
        let key = key.clone();
        self.with_host(move |host| Ok(host.groups.usage(&key))).await
    }

    async fn survivors(&self) -> DriverResult<Vec<(MachineKey, Link)>> {
        self.with_host(Host::survivors).await
    }

    async fn died(&self, key: &MachineKey) {
        // The directory appears before the record does, so this waits for a builder's outcome.
        let (directory, found) = (self.host.directory(key), key.clone());
        let process = self
            .with_host(move |host| {
                let _lock = lock(&directory, FlockOperation::LockExclusive)?;
                Ok(host.alive(&found).map(|(_, process)| process))
            })
            .await;
        if let Ok(Some(process)) = process
            && let Ok(process) = watch(process)
        {
            // Readable means ended; an error would mean the runtime is going down.
            let _ = process.readable().await;
        }
    }

    async fn network(&self, key: &MachineKey) -> DriverResult<Device> {
        let key = key.clone();
        self.with_host(move |host| host.network(&key)).await
    }

    fn relayer(&self) -> Option<&dyn Relayer> {
        Some(self)
    }
}

#[async_trait]
impl Relayer for ContainerDriver {
    async fn alone(&self, key: &MachineKey) -> DriverResult<bool> {
        let key = key.clone();
        self.with_host(move |host| {
            let (record, _) = host.demand(&key)?;
            Ok(host.groups.processes(&key)? == [record.pid])
        })
        .await
    }

    async fn freeze(&self, key: &MachineKey) -> DriverResult<()> {
        let key = key.clone();
        self.with_host(move |host| {
            host.demand(&key)?;
            host.groups.freeze(&key)
        })
        .await
    }

    async fn thaw(&self, key: &MachineKey) -> DriverResult<()> {
        let key = key.clone();
        self.with_host(move |host| host.groups.thaw(&key)).await
    }

    async fn swap_root(&self, key: &MachineKey, root: &RootFs) -> DriverResult<()> {
        let (key, root) = (key.clone(), root.clone());
        self.with_host(move |host| host.swap_root(&key, &root)).await
    }
}

#[derive(Debug)]
struct Host {
    config: ContainerConfig,
    groups: Groups,
}

impl Host {
    fn directory(&self, key: &MachineKey) -> PathBuf {
        self.config.run_dir.join(key.as_str())
    }

    fn link(&self, key: &MachineKey) -> Link {
        Link::Unix(self.directory(key).join(SOCKET))
    }

    fn start(&self, machine: &Machine) -> DriverResult<Link> {
        let key = &machine.key;
        let lock = self.claim(key)?;
        // Described while the builder's process starts, which takes about as long.
        let built = self.agent("cage", || {
            Ok(Cage {
                version: VERSION,
                run_dir: self.directory(key),
                hostname: machine.hostname.clone(),
                root: root(&machine.root),
                ids: Ids { base: machine.uids.base, count: machine.uids.count },
                cgroup: self.groups.create(key, &machine.limits)?,
                file_size: machine.limits.file_size.0,
                mounts: machine.mounts.iter().map(mount).collect(),
            })
        });
        match built {
            Ok(_) => Ok(self.link(key)),
            Err(error) => {
                // The cause is what the caller needs to hear; what is left over now, if anything,
                // is cleared by the next start, stop or survivors.
                let _ = self.clear(key);
                drop(lock);
                Err(error)
            }
        }
    }

    /// Makes the machine's directory and takes the shared lock on it.
    fn claim(&self, key: &MachineKey) -> DriverResult<File> {
        let directory = self.directory(key);
        loop {
            match DirBuilder::new().mode(0o700).create(&directory) {
                Ok(()) => {
                    // Someone may have cleared it before it was locked: then make it again.
                    if let Some(lock) = lock(&directory, FlockOperation::LockShared)? {
                        return Ok(lock);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    if let Some(_lock) = lock(&directory, FlockOperation::LockExclusive)? {
                        if self.alive(key).is_some() {
                            return Err(DriverError::Alive { key: key.clone() });
                        }
                        self.clear(key)?;
                    }
                }
                Err(error) => return Err(failed("create", &directory)(error)),
            }
        }
    }

    fn stop(&self, key: &MachineKey) -> DriverResult<MachineUsage> {
        let _lock = lock(&self.directory(key), FlockOperation::LockExclusive)?;
        if let Some((machine, process)) = self.alive(key) {
            let mounts = File::open(format!("/proc/{}/ns/mnt", machine.pid));
            // The frozen cannot die under version 1.
            self.groups.thaw(key)?;
            self.kill(key, &process)?;
            release(mounts.ok());
        }
        let usage = self.groups.usage(key);
        self.clear(key)?;
        Ok(usage)
    }

    /// Kills the first process, and with it, by the rules of pid namespaces, all others. The kernel
    /// lets it end only after them, so when it is gone nobody is left to write anything.
    fn kill(&self, key: &MachineKey, process: &OwnedFd) -> DriverResult<()> {
        let directory = self.directory(key);
        match rustix::process::pidfd_send_signal(process, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => return Err(failed("kill the machine of", &directory)(error.into())),
        }
        self.groups.kill(key)?;
        if ended(process, Some(&DEATH)) {
            return Ok(());
        }
        Err(failed("wait for the end of the machine of", &directory)(
            io::ErrorKind::TimedOut.into(),
        ))
    }

    fn survivors(&self) -> DriverResult<Vec<(MachineKey, Link)>> {
        let run_dir = &self.config.run_dir;
        let listed = fs::read_dir(run_dir)
            .and_then(Iterator::collect::<Result<Vec<_>, _>>)
            .map_err(failed("list", run_dir))?;
        let mut alive = Vec::new();
        for name in listed.iter().map(fs::DirEntry::file_name) {
            let Some(key) = name.to_str().and_then(MachineKey::parse) else { continue };
            let Some(_lock) = lock(&self.directory(&key), FlockOperation::LockExclusive)? else {
                continue;
            };
            if self.alive(&key).is_some() {
                let link = self.link(&key);
                alive.push((key, link));
            } else {
                self.clear(&key)?;
            }
        }
        // A directory is made before its group and removed after it, so a group without one belongs
        // to nobody.
        for key in self.groups.keys() {
            if !self.directory(&key).exists() {
                self.groups.remove(&key)?;
            }
        }
        Ok(alive)
    }

    fn network(&self, key: &MachineKey) -> DriverResult<Device> {
        let (record, _process) = self.demand(key)?;
        let path = self.directory(key).join(NETWORK_SOCKET);
        // Not by the path itself: it may be longer than a socket's address can be.
        let directory = File::open(self.directory(key)).map_err(failed("open", &path))?;
        let short = format!("/proc/self/fd/{}/{NETWORK_SOCKET}", directory.as_raw_fd());
        let socket = UnixStream::connect(short).map_err(failed("connect to", &path))?;
        // The agent answers at once, unless its sandbox keeps it from running.
        socket.set_read_timeout(Some(HAND_OVER)).map_err(failed("connect to", &path))?;
        let device = receive(&socket).map_err(failed("be handed a device by", &path))?;
        match device {
            Some(device) => Ok(Device::Tun(device)),
            None => Err(broken(
                "be handed the network device",
                &format!("process {} sent none", record.pid),
            )),
        }
    }

    fn swap_root(&self, key: &MachineKey, new: &RootFs) -> DriverResult<()> {
        let _lock = lock(&self.directory(key), FlockOperation::LockShared)?;
        let (machine, _process) = self.demand(key)?;
        let swapped = self.agent("swap-root", || {
            // Frozen, so that nothing is started between the look and the leap.
            self.groups.freeze(key)?;
            if self.groups.processes(key)? != [machine.pid] {
                return Err(DriverError::NotAlone { key: key.clone() });
            }
            let run_dir = self.directory(key);
            Ok(Swap { version: VERSION, run_dir, machine, root: root(new) })
        });
        self.groups.thaw(key)?;
        swapped.map(drop)
    }

    /// Runs `keep-agent`, gives it what `plan` makes, and hears what came of it.
    fn agent<T: Serialize>(
        &self,
        mode: &str,
        plan: impl FnOnce() -> DriverResult<T>,
    ) -> DriverResult<Record> {
        let agent = &self.config.agent;
        let mut builder = Command::new(agent)
            .arg(mode)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Signals to the daemon's group are not meant for it.
            .process_group(0)
            .spawn()
            .map_err(failed("run", agent))?;
        let text = plan().and_then(|plan| {
            serde_json::to_vec(&plan).map_err(|e| broken("describe the machine", &e))
        });
        // Without a description the builder reads an empty one, and ends.
        let told = match (builder.stdin.take(), &text) {
            (Some(mut stdin), Ok(text)) => stdin.write_all(text),
            _ => Ok(()),
        };
        let mut line = String::new();
        let heard = builder
            .stdout
            .take()
            .map_or(Ok(0), |stdout| BufReader::new(stdout).read_line(&mut line));
        let answer = serde_json::from_str(&line);
        if let Ok(Outcome::Done(record)) = answer {
            tokio::task::spawn_blocking(move || builder.wait());
            return Ok(record);
        }
        let status = builder.wait().map_err(failed("wait for", agent))?;
        text?;
        heard.map_err(failed("hear from", agent))?;
        match answer {
            Ok(Outcome::Done(record)) => Ok(record),
            Ok(Outcome::Failed { step, reason }) if step == cage::MOUNT_POINT => {
                Err(DriverError::MountPoint { reason })
            }
            Ok(Outcome::Failed { step, reason }) => Err(DriverError::Build { step, reason }),
            Err(_) => {
                told.map_err(failed("talk to", agent))?;
                Err(broken("build the machine", &format!("the builder ended with {status}")))
            }
        }
    }

    /// The machine's record and a hold on its first process, if it lives.
    fn alive(&self, key: &MachineKey) -> Option<(Record, OwnedFd)> {
        let text = fs::read(self.directory(key).join(RECORD)).ok()?;
        let record: Record = serde_json::from_slice(&text).ok()?;
        let pid = i32::try_from(record.pid).ok().and_then(Pid::from_raw)?;
        let process = rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK).ok()?;
        // Read after opening: if the times agree now, the descriptor is that process.
        let stat = fs::read_to_string(format!("/proc/{}/stat", record.pid)).ok()?;
        let same = start_time(&stat) == Some(record.started);
        (same && !ended(&process, Some(&Timespec::default()))).then_some((record, process))
    }

    fn demand(&self, key: &MachineKey) -> DriverResult<(Record, OwnedFd)> {
        self.alive(key).ok_or_else(|| DriverError::Absent { key: key.clone() })
    }

    /// Removes what a machine that is not alive has left.
    fn clear(&self, key: &MachineKey) -> DriverResult<()> {
        self.groups.remove(key)?;
        let directory = self.directory(key);
        match fs::remove_dir_all(&directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(failed("remove", &directory)(error))
            }
            _ => Ok(()),
        }
    }
}

/// Takes a descriptor that is sent with the next byte.
fn receive(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut into = [IoSliceMut::new(&mut byte)];
    rustix::net::recvmsg(socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut sent = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Ok(sent.next().and_then(|mut descriptors| descriptors.next()))
}

/// Lets go of a dead machine's mounts, on a thread that stays behind whatever is waited for.
fn release(mounts: Option<File>) {
    let Some(mounts) = mounts else { return };
    // Where there is no thread to be had, the closure is dropped, and with it the mounts.
    let _ = thread::Builder::new().name("release".to_owned()).spawn(move || {
        // Not the very last: it holds locks of the kernel's for a moment.
        let _ = rustix::process::setpriority_process(None, 10);
        drop(mounts);
    });
}

#[expect(
    deprecated,
    reason = "its successor is unsafe, for types that may change their descriptor"
)]
fn watch(process: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(process, Interest::READABLE)
}

/// Waits for a process to end. A process that is only waiting to be reaped has ended.
fn ended(process: &OwnedFd, patience: Option<&Timespec>) -> bool {
    loop {
        let mut watched = [PollFd::new(process, PollFlags::IN)];
        match rustix::event::poll(&mut watched, patience) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(ready) => return ready > 0,
            Err(_) => return false,
        }
    }
}

/// Locks a directory; `None` when it is not there.
fn lock(directory: &Path, how: FlockOperation) -> DriverResult<Option<File>> {
    loop {
        let open = match File::open(directory) {
            Ok(open) => open,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed("open", directory)(error)),
        };
        rustix::fs::flock(&open, how).map_err(|e| failed("lock", directory)(e.into()))?;
        // While waiting, it may have been removed, and another made by the same name.
        let (held, there) = (open.metadata(), fs::metadata(directory));
        match (held, there) {
            (Ok(held), Ok(there)) if held.ino() == there.ino() => return Ok(Some(open)),
            _ => {}
        }
    }
}

fn root(described: &RootFs) -> cage::Root {
    cage::Root {
        layers_dir: described.layers_dir.clone(),
        lower: described.lower.clone(),
        writable_dir: described.writable_dir.clone(),
        upper: described.upper.clone(),
        work: described.work.clone(),
    }
}

fn mount(described: &MachineMount) -> cage::Mount {
    cage::Mount {
        target: described.target.clone(),
        root: root(&described.root),
        read_only: described.read_only,
        owner: described.owner.clone(),
    }
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DriverError {
    let path = path.to_owned();
    move |source| DriverError::Io { action, path, source }
}

fn broken(step: &str, reason: &impl ToString) -> DriverError {
    DriverError::Build { step: step.to_owned(), reason: reason.to_string() }
}
