//! Isolation backends: decides how a root filesystem becomes running processes, kept apart from the host and from each other.
//!
//! | where | decides |
//! |---|---|
//! | this file | the [`Driver`] trait: what every backend promises |
//! | `keeps_memory`, `own_disk` | the optional powers [`KeepsMemory`] and [`OwnDisk`] |
//! | `host/` | what backends share on a host: machine directories, control groups, uid claims, helper programs |
//! | [`container`] | namespaces and control groups on the host's kernel |
//! | [`microvm`] | a virtual machine with its own kernel, in QEMU |

pub mod container;
mod host;
mod keeps_memory;
pub mod microvm;
mod own_disk;

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use rustix::event::{PollFd, PollFlags, Timespec};
use serde::{Deserialize, Serialize};

pub(crate) use self::host::orphans::kill_orphans;
pub(crate) use self::host::uid_claims::{CLAIMS_DIR, UidClaims};
pub use self::host::{WARM_VM, any_alive};
pub use self::keeps_memory::{Captured, KeepsMemory, Restored, Then};
pub use self::own_disk::{OwnDisk, WriteLimit};
pub use crate::model::Device;
use crate::model::{Limits, MachineKey, RootFs, Size, UidRange};

/// Keeps sandboxes apart from the host and from each other.
///
/// A driver turns a root filesystem into running processes and back. It knows nothing of users,
/// names, quotas, snapshots or the database; those belong to the engine, which is its only caller.
/// It does not talk to the agent either: it says where the agent can be reached, and the engine
/// does the talking.
///
/// # Terms
///
/// - `key`: the engine's name for one machine, unique on this host, safe as a file name. Drivers
///   use it for cgroups, sockets and directories.
/// - `root`: the machine's root filesystem, *described* by the store and mounted by the driver,
///   where no other sandbox can see it.
/// - *mounts*: further stacks of directories, described in the same way, seen at a place below the
///   root. A target that leads through a link or to what is no directory is refused with
///   [`DriverError::MountPoint`]: a root was written by earlier users of the sandbox.
/// - *link*: where the agent inside listens.
///
/// # Lifecycle
///
/// ```text
///            start
///   absent --------> alive
///      ^               |
///      +----- stop ----+
/// ```
///
/// # What every driver promises
///
/// - `start` is all or nothing: when it fails, nothing of `key` is left.
/// - `start` of a key that is alive fails with [`DriverError::Alive`] and leaves it alone.
/// - When `stop` returns, no process of `key` is left and nothing can write to its root any more.
/// - `stop` of something absent succeeds. Cleaning up twice is normal.
/// - A call for one machine never waits for another machine.
/// - Machines outlive the daemon. A driver keeps nothing in memory it could not find again: after
///   the daemon restarts, [`survivors`](Self::survivors) names everything still alive.
///
/// # Optional powers
///
/// Not every isolation backend can do the same. What only some can do is a trait of its own, reached through an `Option`: a
/// driver has the whole power or none of it, and no method answers "unsupported". The powers do not depend on each other.
///
/// | power | accessor | container | microvm |
/// |---|---|---|---|
/// | [`Relayer`]: change the layers of a live machine | [`relayer`](Self::relayer) | yes | no |
/// | [`KeepsMemory`]: capture and restore memory | [`memory`](Self::memory) | no | yes |
/// | [`OwnDisk`]: a kernel and a disk per machine | [`disk`](Self::disk) | no | yes |
///
/// `testkit::driver_contract` holds a driver to these as far as a test can see them; a new driver
/// is done when it passes.
#[async_trait]
pub trait Driver: fmt::Debug + Send + Sync {
    /// A short fixed name, as written in configuration and on record.
    fn name(&self) -> &'static str;

    /// Boots a machine. The agent may not be listening yet when this returns; the engine waits for it.
    async fn start(&self, machine: &Machine) -> DriverResult<Link>;

    /// Ends every process of `key` by force, frees all the machine held, and returns its usage. A
    /// graceful stop is the agent's task and comes before.
    async fn stop(&self, key: &MachineKey) -> DriverResult<MachineUsage>;

    /// What a machine has used so far; zeros when it is absent.
    async fn usage(&self, key: &MachineKey) -> DriverResult<MachineUsage>;

    /// What a machine uses at this moment; zeros when it is absent.
    async fn load(&self, key: &MachineKey) -> DriverResult<MachineLoad>;

    /// How many of a machine's processes the kernel has killed out of memory, where the host can
    /// know: 0 for a machine with a kernel of its own, whose agent reports it. Reads one file that
    /// never waits for a disk.
    fn oom_kills(&self, _key: &MachineKey) -> u64 {
        0
    }

    /// Everything that is alive now, in no particular order. Remains of machines that are not (a
    /// cgroup, a socket of a dead agent) are cleared away by this.
    async fn survivors(&self) -> DriverResult<Vec<(MachineKey, Link)>>;

    /// Waits until the machine is no longer alive; returns at once if it is not.
    async fn died(&self, key: &MachineKey);

    /// Where the machine's packets come from and go to. Can be asked again, after the daemon has restarted; the
    /// device is the same then, and its holder alone gets the packets.
    async fn network(&self, key: &MachineKey) -> DriverResult<Device>;

    /// The deleted files that take space on the host's disk: files that were removed and that
    /// processes of a machine still have open. None for a machine that has a disk of its own.
    async fn unnamed(&self, _key: &MachineKey) -> DriverResult<Vec<Unnamed>> {
        Ok(Vec::new())
    }

    /// Ends the processes of a machine that fill the host's disk, and returns them: none if it does
    /// not know which they are.
    async fn end_writers(&self, _key: &MachineKey) -> DriverResult<EndedProcesses> {
        Ok(EndedProcesses::default())
    }

    /// Ends all processes of a machine but its agent, without asking the agent, and returns them: none
    /// if the host does not know them. If the machine is frozen, they end when it is thawed.
    async fn end_all(&self, _key: &MachineKey) -> DriverResult<EndedProcesses> {
        Ok(EndedProcesses::default())
    }

    /// The driver's warm pool: its name and how many machines are in it, if it has one.
    fn warm(&self) -> Option<(&'static str, usize)> {
        None
    }

    /// The power to change a live machine's layers, if this driver has it.
    fn relayer(&self) -> Option<&dyn Relayer> {
        None
    }

    /// The power to keep a machine's memory, if this driver has it.
    fn memory(&self) -> Option<&dyn KeepsMemory> {
        None
    }

    /// The power to give machines a kernel and a disk of their own, if this driver has it.
    fn disk(&self) -> Option<&dyn OwnDisk> {
        None
    }
}

/// One thing a host must be able to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// What it is.
    pub name: &'static str,
    /// Whether this host can do it.
    pub ok: bool,
    /// What was found.
    pub detail: String,
    /// What to do about it.
    pub fix: Option<String>,
}

/// The address of a machine's network device, which follows from its key.
#[must_use]
pub fn mac_of(key: &MachineKey) -> [u8; 6] {
    use sha2::Digest as _;
    let digest = sha2::Sha256::digest(key.as_str());
    // Locally administered, for one receiver.
    [0x02, digest[0], digest[1], digest[2], digest[3], digest[4]]
}

/// Lets the engine take a filesystem snapshot of a machine without ending it.
#[async_trait]
pub trait Relayer: Send + Sync {
    /// Whether no process but the agent is alive.
    async fn alone(&self, key: &MachineKey) -> DriverResult<bool>;

    /// Stops all processes where they are, and returns when none runs any more.
    async fn freeze(&self, key: &MachineKey) -> DriverResult<()>;

    /// Resumes them. Does nothing to a machine that is not frozen.
    async fn thaw(&self, key: &MachineKey) -> DriverResult<()>;

    /// Puts another root under a machine in which only the agent is alive; nothing writes to the
    /// old one when this returns. Mounts inside the root (`/proc`, `/dev`, `/run`, those of
    /// [`Machine::mounts`]) are kept.
    /// All or nothing: after an error the machine stands on the old root.
    async fn swap_root(&self, key: &MachineKey, root: &RootFs) -> DriverResult<()>;
}

/// A machine to be booted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// Its name on this host.
    pub key: MachineKey,
    /// What it calls itself.
    pub hostname: String,
    /// Its root filesystem.
    pub root: RootFs,
    /// The host's ids that are its own.
    pub uids: UidRange,
    /// What it may use.
    pub limits: Limits,
    /// What else is mounted in it.
    pub mounts: Vec<MachineMount>,
}

/// A stack of directories that is seen at a place below a machine's root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineMount {
    /// Where: an absolute path in the machine. The directory is made in its root if it is missing;
    /// links are not followed.
    pub target: PathBuf,
    /// What.
    pub root: RootFs,
    /// Whether nothing can be written to it.
    pub read_only: bool,
    /// Who is given its topmost directory, which is then open to all, by a name or number that the
    /// machine knows. For what is new; who is not known leaves it to the machine's root.
    pub owner: Option<String>,
}

/// Where the agent inside a machine listens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Link {
    /// A socket file on the host.
    Unix(PathBuf),
    /// A socket file on the host that leads to a machine's serial port: see `docs/formats/agent-link.md`.
    Serial(PathBuf),
}

/// Files of a machine that have no name any more.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unnamed {
    /// Where in the machine the stack of layers is mounted that they are in.
    pub mount: PathBuf,
    /// What they take.
    pub bytes: u64,
    /// How many there are.
    pub files: u64,
}

/// Processes that were killed, and may not be gone yet: what they held is freed first.
#[derive(Debug, Default)]
pub struct EndedProcesses(Vec<OwnedFd>);

impl EndedProcesses {
    /// Those with these process descriptors.
    #[must_use]
    pub fn new(processes: Vec<OwnedFd>) -> Self {
        Self(processes)
    }

    /// How many were killed.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Whether none of them is left.
    #[must_use]
    pub fn are_gone(&self) -> bool {
        self.0.iter().all(|process| {
            let mut ends = [PollFd::new(process, PollFlags::IN)];
            // One that cannot be asked is not waited for.
            !matches!(rustix::event::poll(&mut ends, Some(&Timespec::default())), Ok(0))
        })
    }
}

/// What a machine has used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MachineUsage {
    /// CPU time.
    pub cpu: Duration,
    /// The most memory at one time.
    pub memory_peak: Size,
    /// How often the kernel killed one of its processes out of memory.
    pub oom_kills: u64,
}

/// What a machine uses at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MachineLoad {
    /// What it has used so far.
    pub used: MachineUsage,
    /// Memory in use.
    pub memory: Size,
    /// Processes and threads, where the host knows them: it does not for a machine with a kernel of
    /// its own.
    pub processes: Option<u64>,
}

/// What a driver answers.
pub type DriverResult<T> = Result<T, DriverError>;

/// Why a driver could not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// A machine with this key is alive.
    #[error("machine {key} is alive already")]
    Alive {
        /// The key.
        key: MachineKey,
    },
    /// No machine with this key is alive.
    #[error("machine {key} is not alive")]
    Absent {
        /// The key.
        key: MachineKey,
    },
    /// Other processes than the agent are alive in it.
    #[error("processes are alive in machine {key}")]
    NotAlone {
        /// The key.
        key: MachineKey,
    },
    /// This host lacks something the driver needs.
    #[error("this host cannot run the {driver} driver: {reason}")]
    Unsupported {
        /// The driver.
        driver: &'static str,
        /// What is missing and how to get it.
        reason: String,
    },
    /// What is in the machine's root is in the way of a mount; another target may do.
    #[error("a drive cannot be mounted there: {reason}")]
    MountPoint {
        /// The target, and what is in the way.
        reason: String,
    },
    /// What a sandbox wrote cannot be packed for a machine. It is as it was, for another driver.
    #[error("its files cannot be packed for a machine of its own: {reason}")]
    Unpackable {
        /// Which, and why.
        reason: String,
    },
    /// The disk is too full for a machine to write to its root.
    #[error("there is no room on the disk for what a machine writes: {reason}")]
    NoRoom {
        /// What could not be done.
        reason: String,
    },
    /// Building the machine failed at a step.
    #[error("could not {step}: {reason}")]
    Build {
        /// What was being done, as a verb phrase.
        step: String,
        /// The system's error.
        reason: String,
    },
    /// A system call on the host failed.
    #[error("could not {action} `{path}`", path = path.display())]
    Io {
        /// What was being done, as a verb phrase.
        action: &'static str,
        /// What it was being done to.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}
