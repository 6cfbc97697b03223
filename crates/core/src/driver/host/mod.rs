//! What drivers share on a host: decides which machine owns a directory, a control group or a uid, and whether it is alive.
//!
//! | file | decides |
//! |---|---|
//! | this file | machine directories (`<run_dir>/<key>/`), their locks, which machines are alive |
//! | `builder` | how `keep-agent` is run to build a machine |
//! | `process` | whether the first process of a machine is alive |
//! | `cgroup` | limits and usage, for control groups of both versions |
//! | `uid_claims` | which uids a daemon may use, between all daemons of the host |
//! | `helper` | how programs of the host (`mkfs.erofs`, ...) run on untrusted data |
//! | `orphans` | processes of a sandbox that no driver knows about |
//!
//! *Locks on a machine's directory.* Code that builds or changes a machine, its builders included,
//! holds a shared lock. Code that decides whether it is alive or removes it (`stop`, `survivors`, a
//! `start` that finds one) takes an exclusive lock. A builder keeps its lock when the daemon dies,
//! so the next daemon waits for the outcome instead of removing the directory.
//!
//! *Liveness.* Process ids are reused, so a record counts only if the process has the start time that the record names. From then
//! on a pidfd refers to the process, and to no other.
//!
//! *Control groups.* A machine has the group named by its key. Exceptions are warm hypervisors (`spare-...`) and unassigned machines
//! (`ready-...`): a machine that adopts one also takes the group that it was started in, which its
//! record names.

mod builder;
pub(super) mod cgroup;
pub(super) mod helper;
pub(super) mod orphans;
mod process;
mod socket;
pub(super) mod uid_claims;

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::event::Timespec;
use rustix::fs::FlockOperation;
use rustix::process::Signal;
use sandkeep_proto::cage::{RECORD, Record};

pub(super) use self::builder::Builder;
use self::cgroup::Cgroups;
pub(super) use self::process::died;
use self::process::{ended, process_of};
pub(super) use self::socket::connect;
use super::{DriverError, DriverResult, MachineLoad, MachineUsage};
use crate::model::{MachineKey, Reserve};

/// How long a killed machine may take to be gone. Only a process stuck in the kernel takes long.
const DEATH: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };

/// What the keys begin with of what was started and is no machine's yet.
pub(super) const WARM_HYPERVISOR: &str = "spare-";

/// How the keys of machines begin that are not assigned to a sandbox yet.
pub const WARM_VM: &str = "ready-";

/// A driver's part of this host.
#[derive(Debug)]
pub(super) struct Host {
    /// The `keep-agent` program.
    agent: PathBuf,
    /// Where running machines have their directories.
    run_dir: PathBuf,
    pub(super) groups: Cgroups,
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
        let groups = Cgroups::find(driver, cgroup_parent)?;
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
    /// lets it end only after them, so when it is gone no process is left to write anything.
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
        // Before directories, so that the directory of a machine that is started meanwhile does not look like a leftover.
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
        // A directory is made before its group and removed after it, so a group without one has no
        // owner, unless a machine has brought it along.
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

    /// What a machine uses at this moment.
    pub(super) fn load(&self, key: &MachineKey) -> MachineLoad {
        self.groups.load(&self.group(key))
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
        let was_for_others =
            [WARM_HYPERVISOR, WARM_VM].iter().any(|mark| key.as_str().starts_with(mark));
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

/// How much new work may use of the filesystem that a file is on.
pub(super) fn usable(on: impl AsFd, reserve: Reserve) -> io::Result<u64> {
    let stat = rustix::fs::fstatvfs(on)?;
    let (free, total) = (stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize);
    Ok(free.saturating_sub(reserve.of(total)))
}

pub(super) fn broken(step: &str, reason: &impl ToString) -> DriverError {
    DriverError::Build { step: step.to_owned(), reason: reason.to_string() }
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
            // The builder of a machine holds a lock on its directory.
            None => File::open(&directory).is_ok_and(|held| {
                rustix::fs::flock(&held, FlockOperation::NonBlockingLockExclusive)
                    == Err(rustix::io::Errno::WOULDBLOCK)
            }),
        }
    })
}
