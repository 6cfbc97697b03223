//! What drivers have in common on a host: machines' directories, their records, their control groups, and the launcher.
//!
//! *Who may touch a machine's directory.* Whoever builds or changes a machine, and the builders it runs, hold a
//! shared lock on it; whatever judges or clears it (`stop`, `survivors`, a `start` that finds one)
//! takes an exclusive one. A builder keeps its lock when the daemon dies, so the next daemon waits
//! for its outcome instead of pulling the directory from under it.
//!
//! *Who is alive.* Process numbers are reused, so a record counts only if the process has the start
//! time it names. From then on the process is held by a pidfd, which cannot mean another.
//!
//! *Whose control group.* A machine's own, by its key; but a process that was started before it was any machine's (a *spare*), or a
//! machine before it was anybody's (*ready*), brings the group it was started in, and its record names it.

use std::fs::{self, DirBuilder, File};
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::FlockOperation;
use rustix::net::sockopt::Timeout;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, Signal};
use sandkeep_proto::cage::{self, Outcome, RECORD, Record, start_time};
use serde::Serialize;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::cgroup::Groups;
use super::{DriverError, DriverResult, MachineUsage};
use crate::model::MachineKey;

/// How long a killed machine may take to be gone. Only a process stuck in the kernel takes long.
const DEATH: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };

/// What the keys begin with of what was started and is no machine's yet.
pub(super) const SPARE: &str = "spare-";

/// What the keys of machines begin with that are nobody's yet.
pub const READY: &str = "ready-";

/// A driver's part of this host.
#[derive(Debug)]
pub(super) struct Host {
    /// The `keep-agent` program.
    agent: PathBuf,
    /// Where running machines have their directories.
    run_dir: PathBuf,
    pub(super) groups: Groups,
    /// The host's memory, in bytes.
    pub(super) memory: u64,
}

impl Host {
    /// Prepares this host for `driver`.
    pub(super) fn prepare(
        driver: &'static str,
        agent: PathBuf,
        run_dir: PathBuf,
        cgroup_parent: &str,
    ) -> DriverResult<Self> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&run_dir)
            .map_err(failed("create", &run_dir))?;
        let groups = Groups::find(driver, cgroup_parent)?;
        let about = rustix::system::sysinfo();
        let memory = u64::from(about.mem_unit).saturating_mul(about.totalram);
        Ok(Self { agent, run_dir, groups, memory })
    }

    /// Where running machines have their directories.
    pub(super) fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    /// Where a machine has its sockets and its record.
    pub(super) fn directory(&self, key: &MachineKey) -> PathBuf {
        self.run_dir.join(key.as_str())
    }

    /// Makes the machine's directory and takes the shared lock on it.
    pub(super) fn claim(&self, key: &MachineKey) -> DriverResult<File> {
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

    /// Kills the first process, and with it, by the rules of pid namespaces, all others. The kernel
    /// lets it end only after them, so when it is gone nobody is left to write anything.
    pub(super) fn kill(&self, key: &MachineKey, process: &OwnedFd) -> DriverResult<()> {
        let directory = self.directory(key);
        match rustix::process::pidfd_send_signal(process, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => return Err(failed("kill the machine of", &directory)(error.into())),
        }
        self.groups.kill(&self.group(key))?;
        if ended(process, Some(&DEATH)) {
            return Ok(());
        }
        Err(failed("wait for the end of the machine of", &directory)(
            io::ErrorKind::TimedOut.into(),
        ))
    }

    /// Everything that is alive; what the dead have left is cleared away.
    pub(super) fn survivors(&self) -> DriverResult<Vec<MachineKey>> {
        let run_dir = &self.run_dir;
        // Before directories, so that none is taken for nobody's whose machine was started meanwhile.
        let groups = self.groups.keys();
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
                alive.push(key);
            } else {
                self.clear(&key)?;
            }
        }
        // A directory is made before its group and removed after it, so a group without one belongs
        // to nobody, unless a machine has brought it along.
        let brought: Vec<_> =
            self.records().into_iter().filter_map(|record| record.group).collect();
        for key in groups {
            let is_brought = brought.iter().any(|group| group == key.as_str());
            if !self.directory(&key).exists() && !is_brought {
                // The runtime directory was removed under a machine, perhaps: it cannot be reached any more.
                self.groups.end(&key)?;
                self.groups.remove(&key)?;
            }
        }
        Ok(alive)
    }

    /// The key by which a machine's control group is known.
    fn group(&self, key: &MachineKey) -> MachineKey {
        let brought = self.record(key).and_then(|record| MachineKey::parse(&record.group?));
        brought.unwrap_or_else(|| key.clone())
    }

    /// What a machine has used.
    pub(super) fn usage(&self, key: &MachineKey) -> MachineUsage {
        self.groups.usage(&self.group(key))
    }

    /// What is on record of everything that has a directory here.
    pub(super) fn records(&self) -> Vec<Record> {
        let listed = fs::read_dir(&self.run_dir).into_iter().flatten().flatten();
        let keys =
            listed.filter_map(|entry| MachineKey::parse(entry.file_name().to_str().unwrap_or("")));
        keys.filter_map(|key| self.record(&key)).collect()
    }

    fn record(&self, key: &MachineKey) -> Option<Record> {
        let text = fs::read(self.directory(key).join(RECORD)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Starts `keep-agent`, which waits for what to build.
    pub(super) fn builder(&self, mode: &[&str]) -> DriverResult<Builder> {
        let agent = &self.agent;
        let process = Command::new(agent)
            .args(mode)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Signals to the daemon's group are not meant for it.
            .process_group(0)
            .spawn()
            .map_err(failed("run", agent))?;
        Ok(Builder { process: Some(process), agent: agent.clone() })
    }

    /// Runs `keep-agent`, gives it what `plan` makes, and hears what came of it.
    pub(super) fn agent<T: Serialize>(
        &self,
        mode: &str,
        plan: impl FnOnce() -> DriverResult<T>,
    ) -> DriverResult<Record> {
        self.builder(&[mode])?.build(plan)
    }

    /// The machine's record and a hold on its first process, if it lives.
    pub(super) fn alive(&self, key: &MachineKey) -> Option<(Record, OwnedFd)> {
        let record = self.record(key)?;
        let process = process_of(&record)?;
        Some((record, process))
    }

    pub(super) fn demand(&self, key: &MachineKey) -> DriverResult<(Record, OwnedFd)> {
        self.alive(key).ok_or_else(|| DriverError::Absent { key: key.clone() })
    }

    /// Removes what a machine that is not alive has left.
    pub(super) fn clear(&self, key: &MachineKey) -> DriverResult<()> {
        let directory = self.directory(key);
        let was_for_others = [SPARE, READY].iter().any(|mark| key.as_str().starts_with(mark));
        // What such a one had may be another's by now, if it has no record.
        if !was_for_others || directory.join(RECORD).exists() {
            let group = self.group(key);
            self.groups.end(&group)?;
            self.groups.remove(&group)?;
        }
        match fs::remove_dir_all(&directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(failed("remove", &directory)(error))
            }
            _ => Ok(()),
        }
    }
}

/// A `keep-agent` that waits for what to build. One that is dropped ends, and with it what it has begun.
#[derive(Debug)]
pub(super) struct Builder {
    process: Option<Child>,
    agent: PathBuf,
}

impl Builder {
    /// Whether it still waits.
    pub(super) fn is_waiting(&mut self) -> bool {
        self.process.as_mut().is_some_and(|process| matches!(process.try_wait(), Ok(None)))
    }

    /// Gives it what `plan` makes, and hears what came of it.
    pub(super) fn build<T: Serialize>(
        mut self,
        plan: impl FnOnce() -> DriverResult<T>,
    ) -> DriverResult<Record> {
        let agent = std::mem::take(&mut self.agent);
        let Some(mut builder) = self.process.take() else {
            return Err(broken("build the machine", &"its builder has ended"));
        };
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
        let status = builder.wait().map_err(failed("wait for", &agent))?;
        text?;
        heard.map_err(failed("hear from", &agent))?;
        match answer {
            Ok(Outcome::Done(record)) => Ok(record),
            Ok(Outcome::Failed { step, reason }) if step == cage::MOUNT_POINT => {
                Err(DriverError::MountPoint { reason })
            }
            Ok(Outcome::Failed { step, reason }) if step == cage::NO_ROOM => {
                Err(DriverError::NoRoom { reason })
            }
            Ok(Outcome::Failed { step, reason }) => Err(DriverError::Build { step, reason }),
            Err(_) => {
                told.map_err(failed("talk to", &agent))?;
                Err(broken("build the machine", &format!("the builder ended with {status}")))
            }
        }
    }
}

impl Drop for Builder {
    fn drop(&mut self) {
        let Some(mut process) = self.process.take() else { return };
        // It ends when there is nothing to read any more, a moment later: what it has begun goes first.
        drop((process.stdin.take(), process.stdout.take()));
        let reap = thread::Builder::new().name("builder".to_owned());
        let _ = reap.spawn(move || process.wait());
    }
}

/// Connects to a socket file. Whoever listens there may have been stopped, and with enough connections waiting for it the
/// kernel lets the next wait too: no longer than `patience`.
pub(super) fn connect(path: &str, patience: Duration) -> io::Result<UnixStream> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::net::sockopt::set_socket_timeout(&socket, Timeout::Send, Some(patience))?;
    match rustix::net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Ok(()) => {}
        Err(rustix::io::Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
        Err(error) => return Err(error.into()),
    }
    rustix::net::sockopt::set_socket_timeout(&socket, Timeout::Send, None)?;
    Ok(UnixStream::from(socket))
}

/// Does something with a host on a thread where it may block.
pub(super) async fn on_thread<H: Send + Sync + 'static, T: Send + 'static>(
    host: &Arc<H>,
    run_dir: &Path,
    work: impl FnOnce(&H) -> DriverResult<T> + Send + 'static,
) -> DriverResult<T> {
    let host = Arc::clone(host);
    match tokio::task::spawn_blocking(move || work(&host)).await {
        Ok(done) => done,
        Err(failure) => match failure.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(failed("go on using", run_dir)(io::ErrorKind::Interrupted.into())),
        },
    }
}

/// Waits until a machine is no longer alive.
pub(super) async fn died(host: &Arc<Host>, key: &MachineKey) {
    // The directory appears before the record does, so this waits for a builder's outcome.
    let found = key.clone();
    let process = on_thread(host, host.run_dir(), move |host: &Host| {
        let _lock = lock(&host.directory(&found), FlockOperation::LockExclusive)?;
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
pub(super) fn lock(directory: &Path, how: FlockOperation) -> DriverResult<Option<File>> {
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

pub(super) fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> DriverError {
    let path = path.to_owned();
    move |source| DriverError::Io { action, path, source }
}

pub(super) fn broken(step: &str, reason: &impl ToString) -> DriverError {
    DriverError::Build { step: step.to_owned(), reason: reason.to_string() }
}

/// A hold on the first process of a machine, if it lives.
fn process_of(record: &Record) -> Option<OwnedFd> {
    let pid = i32::try_from(record.pid).ok().and_then(Pid::from_raw)?;
    let process = rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK).ok()?;
    // Read after opening: if the times agree now, the descriptor is that process.
    let stat = fs::read_to_string(format!("/proc/{}/stat", record.pid)).ok()?;
    let same = start_time(&stat) == Some(record.started);
    (same && !ended(&process, Some(&Timespec::default()))).then_some(process)
}

/// Whether a machine that has its directory in `run_dir` is alive, or being built.
#[must_use]
pub fn any_alive(run_dir: &Path) -> bool {
    let Ok(entries) = fs::read_dir(run_dir) else { return false };
    entries.flatten().any(|entry| {
        let directory = entry.path();
        let record = fs::read(directory.join(RECORD)).ok();
        let record = record.and_then(|bytes| serde_json::from_slice::<Record>(&bytes).ok());
        match record {
            Some(record) => process_of(&record).is_some(),
            // Whoever builds a machine holds a lock on its directory.
            None => File::open(&directory).is_ok_and(|held| {
                rustix::fs::flock(&held, FlockOperation::NonBlockingLockExclusive)
                    == Err(rustix::io::Errno::WOULDBLOCK)
            }),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::time::Duration;

    #[test]
    fn a_listener_that_never_accepts_is_not_waited_for_without_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let _listener = UnixListener::bind(&path).unwrap();
        let path = path.to_str().unwrap();
        let mut held = Vec::new();
        // More than the kernel lets wait for a listener.
        let refused =
            (0..10_000).find_map(|_| match super::connect(path, Duration::from_millis(50)) {
                Ok(socket) => {
                    held.push(socket);
                    None
                }
                Err(error) => Some(error),
            });
        assert_eq!(refused.map(|error| error.kind()), Some(std::io::ErrorKind::TimedOut));
    }
}
