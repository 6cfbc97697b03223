//! The `microvm` driver: a virtual machine with its own kernel per sandbox, in QEMU's `microvm` machine type.
//!
//! `docs/MICROVM.md` is the design. Where to look:
//!
//! | where | decides |
//! |---|---|
//! | `lifecycle` | how a machine is started, stopped and found again |
//! | `capture`, `merge` | what a capture consists of, and how layers of captures are merged |
//! | `adopt` | how an unassigned machine becomes a sandbox's |
//! | `writes` | how fast a machine may write to its disks |
//! | `probe` | whether this host can run machines, with KVM or emulated |
//! | `qemu/` | QEMU's command line, its control socket, and the pool of warm hypervisors |
//! | `disk/` | which files are behind a block device |
//! | [`memory`] | which pages a capture writes, and how RAM is mapped again |
//! | [`kernel`] | the guest kernel and its initramfs |
//!
//! ```text
//! <run_dir>/<key>/            0700, made by start, gone after stop
//!   agent.sock                the machine's serial port: the agent link
//!   qmp.sock                  the hypervisor's control socket
//!   net/nic.sock, host.sock   Ethernet frames, in and out
//!   log                       a pipe: the hypervisor's standard error
//!   ram.at, ram.map           the address of its RAM, and what is mapped there
//!   ram.sock                  of a warm hypervisor: where it receives its RAM
//!   machine.json              the hypervisor's process: proto::cage::Record
//!   plan.json                 what it runs: `MachinePlan`
//! <cgroup>/<parent>/<key>     its limits and usage
//! <cache>/kernel, blank, roots, probe.json
//! ```
//!
//! *Machine directories and liveness* are as in the container driver, see `driver/host/mod.rs`. A machine that was launched but
//! never resumed has no `plan.json`; every call that finds one ends it.
//!
//! *A machine is paused until the driver has checked it*, whether it boots (`-S`) or is restored (`-incoming defer`). By then the
//! hypervisor has bound its network socket, and the driver has taken the directory of that socket away from it. So it never
//! runs guest code while it can write to a directory.
//!
//! *A guest cannot fill the host's disk*: its serial port goes to a ring of 64 KiB in the hypervisor, the hypervisor's messages go
//! to a pipe that drops what does not fit, and its disks have a maximum size. When the host runs short of space, the engine has
//! the hypervisor hold writes back (`writes`).
//!
//! *The hypervisor's locks on disk files are off*: forks share the lower files, and the driver ensures that only one machine writes
//! to the topmost (`disk/`).
//!
//! *KVM counts as available once a machine has booted with it* (`probe`), not when `/dev/kvm` opens.
//!
//! *A machine that is restored uses a warm hypervisor*, if there is one (`qemu/warm_hypervisors.rs`).
//!
//! Calls are plain blocking code on the runtime's blocking threads, as in the container driver.

mod adopt;
mod capture;
mod disk;
pub mod kernel;
mod lifecycle;
pub mod memory;
mod merge;
mod probe;
mod qemu;
mod writes;

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use self::disk::packed_layers::PackedLayers;
use self::lifecycle::Start;
use self::probe::HostFacts;
pub use self::qemu::Accelerator;
use self::qemu::Shape;
use self::qemu::warm_hypervisors::{self, HypervisorKind, HypervisorPool};
use super::host::helper::Helpers;
use super::host::uid_claims::UidClaims;
use super::host::{Host, broken, died, failed, lock, on_thread};
use super::{
    Captured, Device, Driver, DriverError, DriverResult, KeepsMemory, Link, Machine, MachineLoad,
    MachineUsage, OwnDisk, Restored, Then, WriteLimit,
};
use crate::embedded::RAM_SO;
use crate::model::{Fingerprint, Limits, MachineKey, Reserve, RootFs, Size};

pub(super) const NAME: &str = "microvm";
/// The least RAM that a kernel boots in.
const LEAST_RAM: u64 = 128 << 20;
/// The most processors a machine has. More would only wait for each other.
const MOST_CPUS: u32 = 4;
/// Threads of a hypervisor: processors, and those that wait for its disks.
const THREADS: u32 = 256;
/// What a machine's directory has the description of what runs in.
const PLAN: &str = "plan.json";

/// Where the driver keeps things on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MicrovmConfig {
    /// The `keep-agent` program on disk, which only root may write.
    pub agent: PathBuf,
    /// Where running machines have their directories. Made if absent, closed to all but root.
    pub run_dir: PathBuf,
    /// The control group all machines are in.
    pub cgroup_parent: String,
    /// Where the kernel, packed layers and blank disks are: `<data>/microvm`.
    pub cache_dir: PathBuf,
    /// The hypervisor, below `/usr`.
    pub qemu: PathBuf,
    /// How many hypervisors wait for the next machine, of each kind that was restored lately.
    pub warm_hypervisors: usize,
    /// The first of 65,536 uids for those, which are no machine's yet.
    pub warm_uids: u32,
    /// Free space of the cache directory's filesystem that captures and packed layers leave alone: the store's.
    pub reserve: Reserve,
}

/// Waits until the agent behind a link answers, for as long as the caller says. A driver does not
/// talk to agents, so its constructor takes this: `engine::agent_answers`.
pub type Answers = fn(Link, Duration) -> Pin<Box<dyn Future<Output = Result<(), String>> + Send>>;

/// Runs machines with a kernel of their own. Cheap to clone.
#[derive(Debug, Clone)]
pub struct MicrovmDriver {
    inner: Arc<Microvm>,
}

#[derive(Debug)]
struct Microvm {
    config: MicrovmConfig,
    host: Arc<Host>,
    layers: PackedLayers,
    /// Runs the host's programs.
    helpers: Arc<Helpers>,
    facts: HostFacts,
    /// `ram.so`, where hypervisors can be shown it.
    ram_so: PathBuf,
    warm: HypervisorPool,
    /// Uids of hypervisors that are no machine's yet.
    uids: UidClaims,
    answers: Answers,
}

/// What a machine is, for the driver that finds it running.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct MachinePlan {
    fingerprint: Fingerprint,
    /// How many devices make its root.
    lower: u32,
    /// The marks of the packed layers its root is mounted from.
    roots: Vec<String>,
    /// Where the session's disks are.
    disk_dir: PathBuf,
    /// How many layers the image had that it was started from.
    image: usize,
    /// Whether it began with the image's memory, or only with its disk.
    restored: bool,
    /// CPU time it used before it was assigned to a sandbox.
    #[serde(default)]
    used_before: Duration,
}

impl MicrovmDriver {
    /// Prepares this host. With `answers` it finds out whether a machine that was booted to try the host out runs.
    ///
    /// # Errors
    ///
    /// Returns [`DriverError::Unsupported`] when the host lacks control groups or a hypervisor, and [`DriverError::Io`] when a
    /// directory cannot be made.
    pub fn new(config: MicrovmConfig, answers: Answers) -> DriverResult<Self> {
        if !config.qemu.is_file() {
            let reason = format!(
                "there is no hypervisor at `{}`; install qemu-system-x86",
                config.qemu.display()
            );
            return Err(DriverError::Unsupported { driver: NAME, reason });
        }
        let (agent, run_dir) = (config.agent.clone(), config.run_dir.clone());
        let host = Host::prepare(NAME, agent.clone(), run_dir, &config.cgroup_parent)?;
        let cache = &config.cache_dir;
        fs::create_dir_all(cache).map_err(failed("create", cache))?;
        let ram_so = cache.join("ram.so");
        install(&RAM_SO.bytes(), &ram_so)?;
        let helpers = Arc::new(Helpers::new(agent, cache));
        let inner = Microvm {
            host: Arc::new(host),
            layers: PackedLayers::new(Arc::clone(&helpers), cache, config.reserve),
            helpers,
            facts: HostFacts::new(cache),
            ram_so,
            warm: HypervisorPool::new(config.warm_hypervisors),
            uids: UidClaims::of(cache, warm_hypervisors::CLAIMED_UIDS),
            answers,
            config,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Has machines run by this from now on, whatever the host could do. For tests, and for those who know better.
    #[must_use]
    pub fn accelerated_by(self, accelerator: Accelerator) -> Self {
        self.inner.facts.force(accelerator);
        self
    }

    /// Ends the hypervisors that wait for a machine, and removes the runtime directory, if no machine is left in it. Control
    /// groups go with the last machine by themselves.
    pub fn retire(self) {
        self.inner.close_warm_pool();
        let _ = fs::remove_dir(self.inner.host.run_dir());
    }

    /// Does something with the host on a thread where it may block.
    async fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Microvm) -> DriverResult<T> + Send + 'static,
    ) -> DriverResult<T> {
        on_thread(&self.inner, self.inner.host.run_dir(), work).await
    }

    async fn launch(
        &self,
        machine: &Machine,
        image: &[PathBuf],
        how: Start,
        first: &[u8],
    ) -> DriverResult<Restored> {
        let accelerator = self.accelerator().await?;
        let (machine, image) = (machine.clone(), image.to_vec());
        let first = Zeroizing::new(first.to_vec());
        let limits = machine.limits;
        let started = {
            let _under_way = self.inner.warm.pool.starting();
            self.with(move |microvm| microvm.start(&machine, &image, &first, how, accelerator))
                .await
        };
        if how == Start::Restore && started.is_ok() && self.inner.config.warm_hypervisors > 0 {
            let here = self.with(move |microvm| microvm.fingerprint(&limits, accelerator)).await;
            if let Ok(here) = here {
                let kind = HypervisorKind::of(&limits, accelerator, &here);
                self.inner.warm.pool.restock(&self.inner, &kind);
            }
        }
        started
    }
}

#[async_trait]
impl Driver for MicrovmDriver {
    fn name(&self) -> &'static str {
        NAME
    }

    async fn start(&self, machine: &Machine) -> DriverResult<Link> {
        Ok(self.launch(machine, &[], Start::Boot, &[]).await?.link)
    }

    async fn stop(&self, key: &MachineKey) -> DriverResult<MachineUsage> {
        let key = key.clone();
        self.with(move |microvm| microvm.stop(&key)).await
    }

    async fn usage(&self, key: &MachineKey) -> DriverResult<MachineUsage> {
        let key = key.clone();
        self.with(move |microvm| Ok(microvm.usage(&key))).await
    }

    async fn load(&self, key: &MachineKey) -> DriverResult<MachineLoad> {
        let key = key.clone();
        self.with(move |microvm| Ok(microvm.load(&key))).await
    }

    fn warm(&self) -> Option<(&'static str, usize)> {
        Some(("hypervisor", self.inner.warm.pool.waiting()))
    }

    async fn survivors(&self) -> DriverResult<Vec<(MachineKey, Link)>> {
        self.with(Microvm::survivors).await
    }

    async fn died(&self, key: &MachineKey) {
        died(&self.inner.host, key).await;
    }

    async fn network(&self, key: &MachineKey) -> DriverResult<Device> {
        let key = key.clone();
        self.with(move |microvm| microvm.network(&key)).await
    }

    fn memory(&self) -> Option<&dyn KeepsMemory> {
        Some(self)
    }

    fn disk(&self) -> Option<&dyn OwnDisk> {
        Some(self)
    }
}

#[async_trait]
impl KeepsMemory for MicrovmDriver {
    async fn fingerprint(&self, machine: &Machine) -> DriverResult<Fingerprint> {
        let accelerator = self.accelerator().await?;
        let limits = machine.limits;
        self.with(move |microvm| microvm.fingerprint(&limits, accelerator)).await
    }

    async fn restore(
        &self,
        machine: &Machine,
        image: &[PathBuf],
        first: &[u8],
    ) -> DriverResult<Restored> {
        self.launch(machine, image, Start::Restore, first).await
    }

    async fn capture(
        &self,
        key: &MachineKey,
        into: &Path,
        below: &[PathBuf],
        then: Then,
    ) -> DriverResult<Captured> {
        let (key, into, below) = (key.clone(), into.to_owned(), below.to_vec());
        self.with(move |microvm| microvm.capture(&key, &into, &below, then)).await
    }

    async fn hold(&self, key: &MachineKey) -> DriverResult<()> {
        let key = key.clone();
        self.with(move |microvm| microvm.hold(&key)).await
    }

    async fn adopt(&self, from: &MachineKey, to: &Machine) -> DriverResult<Link> {
        let (from, to) = (from.clone(), to.clone());
        self.with(move |microvm| microvm.adopt(&from, &to)).await
    }

    async fn merge(&self, run: &[PathBuf], into: &Path) -> DriverResult<()> {
        let (run, into) = (run.to_vec(), into.to_owned());
        let merged = move || merge::merge(&run, &into);
        self.with(move |_| merged().map_err(|error| broken("merge an image's layers", &error)))
            .await
    }

    async fn go_on(&self, key: &MachineKey) -> DriverResult<()> {
        let key = key.clone();
        self.with(move |microvm| {
            let _lock = lock(&microvm.host.directory(&key), FlockOperation::LockShared)?;
            microvm.demand(&key)?;
            microvm.go_on(&key)
        })
        .await
    }
}

#[async_trait]
impl OwnDisk for MicrovmDriver {
    fn disk_file(&self) -> &'static str {
        disk::LAYER_DISK
    }

    async fn roots(&self, root: &RootFs) -> DriverResult<Vec<String>> {
        let root = root.clone();
        self.with(move |microvm| {
            microvm.layers.of_root(&root)?.iter().map(|path| PackedLayers::mark(path)).collect()
        })
        .await
    }

    async fn boot(&self, machine: &Machine, image: &[PathBuf]) -> DriverResult<Link> {
        Ok(self.launch(machine, image, Start::Boot, &[]).await?.link)
    }

    async fn lower(&self, key: &MachineKey) -> DriverResult<u32> {
        let key = key.clone();
        self.with(move |microvm| Ok(microvm.demand(&key)?.1.lower)).await
    }

    async fn limit_writes(&self, key: &MachineKey, limit: WriteLimit) -> DriverResult<()> {
        let key = key.clone();
        self.with(move |microvm| microvm.limit_writes(&key, limit)).await
    }

    fn holds_writes(&self, key: &MachineKey) -> bool {
        self.inner.holds_writes(key)
    }
}

impl Microvm {
    /// What a machine with these limits is like.
    fn shape(limits: &Limits, accelerator: Accelerator) -> Shape {
        let ram = limits.memory.0.max(LEAST_RAM).next_multiple_of(1 << 20);
        Shape { accelerator, cpus: limits.millicpus.div_ceil(1000).clamp(1, MOST_CPUS), ram }
    }

    /// What the hypervisor may use: the machine's RAM, and what it takes to run it.
    fn limits(limits: &Limits, shape: &Shape) -> Limits {
        let memory = Size(shape.ram + shape.ram / 4 + (192 << 20));
        Limits { memory, pids: THREADS, ..*limits }
    }

    fn disk_size(limits: &Limits) -> u64 {
        // The least that an ext4 with a journal goes into, with room for something.
        limits.file_size.0.max(16 << 20).next_multiple_of(1 << 20)
    }

    fn fingerprint(&self, limits: &Limits, accelerator: Accelerator) -> DriverResult<Fingerprint> {
        let shape = Self::shape(limits, accelerator);
        Ok(Fingerprint {
            driver: NAME.to_owned(),
            hypervisor: format!("{}, layout {}", self.hypervisor()?, qemu::LAYOUT),
            accelerator: accelerator.name().to_owned(),
            cpu: probe::processor(accelerator),
            kernel: self.kernel()?.digest,
            memory: Size(shape.ram),
            cpus: shape.cpus,
            disk: Size(Self::disk_size(limits)),
        })
    }
}

/// Puts a program's part on disk, unless it exists.
fn install(bytes: &[u8], path: &Path) -> DriverResult<()> {
    if fs::read(path).is_ok_and(|there| there == bytes) {
        return Ok(());
    }
    let directory = path.parent().unwrap_or(path);
    let installed = tempfile::NamedTempFile::new_in(directory).and_then(|draft| {
        fs::write(draft.path(), bytes)?;
        fs::set_permissions(draft.path(), Permissions::from_mode(0o755))?;
        draft.persist(path).map_err(|error| error.error)
    });
    installed.map(drop).map_err(failed("write", path))
}
