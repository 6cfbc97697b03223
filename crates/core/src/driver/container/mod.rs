//! The `container` driver: Linux namespaces, a user range of its own, control groups.
//!
//! The daemon does nothing privileged itself. It makes a machine's runtime directory and control
//! groups, then runs `keep-agent cage`, which builds the cage and leaves its first process behind
//! (see `crates/agent/src/cage/mod.rs`). That process is not a child of the daemon, which may die
//! and be restarted without it noticing.
//!
//! ```text
//! <run_dir>/<key>/            0700, made by start, gone after stop
//!   agent.sock                where the agent listens
//!   net.sock                  where the agent hands over the network device
//!   machine.json              who the first process is: proto::cage::Record
//! <cgroup>/<parent>/<key>     its limits and accounts
//! ```
//!
//! Who may touch a machine's directory, and who is alive: see `driver/host/mod.rs`.
//!
//! *What is left to the background.* Taking an overlay down means forgetting every file that was
//! looked at through it, and a sync of the whole filesystem: up to a hundred milliseconds in which
//! nothing can be written any more and no caller needs to wait. So `stop` holds the mounts until
//! the processes are gone and the layer is sealed ([`release`]), and a builder that has swapped a
//! root is not waited for.
//!
//! *Prebuilt containers.* See [`prebuilt`].
//!
//! Calls are plain blocking code on the runtime's blocking threads: each is a few milliseconds of
//! system calls, and one that was begun is finished even if its caller goes away.

mod deleted_files;
mod prebuilt;
mod probe;

use std::fs::{self, File};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use async_trait::async_trait;
use rustix::fs::FlockOperation;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use sandkeep_proto::cage::{
    self, Cage, Ids, MOST_MOUNTS_AHEAD, NETWORK_SOCKET, SOCKET, Swap, VERSION,
};
use tokio::io::Interest;
use tokio::sync::Semaphore;

use self::prebuilt::Builders;
pub use self::probe::probe;
use super::host::{Builder, Host, broken, died, failed, lock, on_thread};
use super::{
    Device, Driver, DriverError, DriverResult, EndedProcesses, Link, Machine, MachineLoad,
    MachineMount, MachineUsage, Relayer, Unnamed,
};
use crate::failpoint::step;
use crate::model::{MachineKey, RootFs};
use crate::release;
use crate::warm_pool::WarmPool;

const NAME: &str = "container";
/// How long the agent may take to hand over the network device.
const HAND_OVER: Duration = Duration::from_secs(10);
/// How many machines are started at the same time, for each processor. More of them would not be up sooner, and all would
/// be up last: they work in the kernel, and wait for the same locks there.
const AT_ONCE: usize = 2;
/// How long a machine waits for its turn. Others may be held up by what cannot be helped, and it should not be with them.
const TURN: Duration = Duration::from_secs(1);

/// Where the driver keeps things on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerConfig {
    /// The `keep-agent` program on disk, which only root may write.
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
    /// Prebuilt containers.
    prebuilt: Arc<Builders>,
    /// Held while a machine is started.
    turns: Arc<Semaphore>,
}

impl ContainerDriver {
    /// Prepares this host.
    ///
    /// # Errors
    ///
    /// Returns [`DriverError::Unsupported`] when the host lacks control groups, and
    /// [`DriverError::Io`] when a directory cannot be made.
    pub fn new(config: ContainerConfig) -> DriverResult<Self> {
        let ContainerConfig { agent, run_dir, cgroup_parent } = config;
        let host = Host::prepare(NAME, agent, run_dir, &cgroup_parent)?;
        let at_once = AT_ONCE * thread::available_parallelism().map_or(2, usize::from);
        let turns = Arc::new(Semaphore::new(at_once));
        Ok(Self { host: Arc::new(host), prebuilt: WarmPool::new(prebuilt::limits(0)), turns })
    }

    /// Keeps up to `most` prebuilt containers for the next starts.
    #[must_use]
    pub fn with_prebuilt(self, most: usize) -> Self {
        Self { prebuilt: WarmPool::new(prebuilt::limits(most)), ..self }
    }

    /// How many prebuilt containers there are.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.prebuilt.waiting()
    }

    /// Removes the runtime directory, if no machine is left in it. Control groups go with the last
    /// machine by themselves.
    pub fn retire(self) {
        drop(self.prebuilt.close_within(Duration::ZERO));
        let _ = fs::remove_dir(self.host.run_dir());
    }

    /// Does something with the host on a thread where it may block.
    async fn with_host<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Host) -> DriverResult<T> + Send + 'static,
    ) -> DriverResult<T> {
        on_thread(&self.host, self.host.run_dir(), work).await
    }
}

#[async_trait]
impl Driver for ContainerDriver {
    fn name(&self) -> &'static str {
        NAME
    }

    async fn start(&self, machine: &Machine) -> DriverResult<Link> {
        let (machine, pool) = (machine.clone(), Arc::clone(&self.prebuilt));
        let started = {
            let _under_way = self.prebuilt.starting();
            let _turn = tokio::time::timeout(TURN, self.turns.acquire()).await;
            self.with_host(move |host| start(host, &machine, prebuilt::take(&pool))).await
        };
        self.prebuilt.restock(&self.host, &());
        started
    }

    async fn stop(&self, key: &MachineKey) -> DriverResult<MachineUsage> {
        let key = key.clone();
        self.with_host(move |host| stop(host, &key)).await
    }

    async fn usage(&self, key: &MachineKey) -> DriverResult<MachineUsage> {
        let key = key.clone();
        self.with_host(move |host| Ok(host.groups.usage(&key))).await
    }

    async fn load(&self, key: &MachineKey) -> DriverResult<MachineLoad> {
        let key = key.clone();
        self.with_host(move |host| Ok(host.groups.load(&key))).await
    }

    fn warm(&self) -> Option<(&'static str, usize)> {
        Some(("container", self.prebuilt.waiting()))
    }

    fn oom_kills(&self, key: &MachineKey) -> u64 {
        self.host.groups.oom_kills(key)
    }

    async fn survivors(&self) -> DriverResult<Vec<(MachineKey, Link)>> {
        self.with_host(|host| {
            let alive = host.survivors()?;
            Ok(alive.into_iter().map(|key| (key.clone(), link(host, &key))).collect())
        })
        .await
    }

    async fn died(&self, key: &MachineKey) {
        died(&self.host, key).await;
    }

    async fn network(&self, key: &MachineKey) -> DriverResult<Device> {
        let path = self.host.directory(key).join(NETWORK_SOCKET);
        let key = key.clone();
        let (pid, directory) = self
            .with_host(move |host| {
                let (record, _process) = host.demand(&key)?;
                let path = host.directory(&key);
                Ok((record.pid, File::open(&path).map_err(failed("open", &path))?))
            })
            .await?;
        // Not on a thread: an agent that its sandbox keeps from running would hold it for as long as it is waited for.
        let device = tokio::time::timeout(HAND_OVER, hand_over(&directory)).await;
        let device = device.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        match device.map_err(failed("be handed a device by", &path))? {
            Some(device) => Ok(Device::Tun(device)),
            None => {
                Err(broken("be handed the network device", &format!("process {pid} sent none")))
            }
        }
    }

    async fn unnamed(&self, key: &MachineKey) -> DriverResult<Vec<Unnamed>> {
        let key = key.clone();
        self.with_host(move |host| deleted_files::unnamed(host, &key)).await
    }

    async fn end_writers(&self, key: &MachineKey) -> DriverResult<EndedProcesses> {
        let key = key.clone();
        self.with_host(move |host| deleted_files::end_writers(host, &key)).await
    }

    async fn end_all(&self, key: &MachineKey) -> DriverResult<EndedProcesses> {
        let key = key.clone();
        self.with_host(move |host| deleted_files::end_all(host, &key)).await
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
        self.with_host(move |host| swap_root(host, &key, &root)).await
    }
}

fn link(host: &Host, key: &MachineKey) -> Link {
    Link::Unix(host.directory(key).join(SOCKET))
}

fn start(host: &Host, machine: &Machine, prebuilt: Option<Builder>) -> DriverResult<Link> {
    step("start.begun");
    // A prebuilt container cannot take more mounts.
    let prebuilt = prebuilt.filter(|_| machine.mounts.len() <= MOST_MOUNTS_AHEAD);
    let Some(prebuilt) = prebuilt else { return build(host, machine, host.builder(&["cage"])?) };
    match build(host, machine, prebuilt) {
        Err(error @ (DriverError::Build { .. } | DriverError::Io { .. })) => {
            // The prebuilt container may be at fault.
            tracing::warn!(machine = %machine.key, %error, "a prebuilt container failed; building another");
            build(host, machine, host.builder(&["cage"])?)
        }
        built => built,
    }
}

fn build(host: &Host, machine: &Machine, builder: Builder) -> DriverResult<Link> {
    let key = &machine.key;
    let lock = host.claim(key)?;
    step("start.claimed");
    // Described while the builder's process starts, which takes about as long.
    let built = builder.build(|| {
        Ok(Cage {
            version: VERSION,
            run_dir: host.directory(key),
            hostname: machine.hostname.clone(),
            root: root(&machine.root),
            ids: Ids { base: machine.uids.base, count: machine.uids.count },
            cgroup: host.groups.create(key, &machine.limits)?,
            file_size: machine.limits.file_size.0,
            memory: machine.limits.memory.0.min(host.memory),
            cpus: machine.limits.millicpus.div_ceil(1000),
            mounts: machine.mounts.iter().map(mount).collect(),
        })
    });
    match built {
        Ok(_) => {
            step("start.built");
            Ok(link(host, key))
        }
        Err(error) => {
            // The caller needs the cause of the failure; the next start, stop or survivors clears
            // any leftovers of this one.
            let _ = host.clear(key);
            drop(lock);
            Err(error)
        }
    }
}

fn stop(host: &Host, key: &MachineKey) -> DriverResult<MachineUsage> {
    step("stop.begun");
    let _lock = lock(&host.directory(key), FlockOperation::LockExclusive)?;
    step("stop.locked");
    if let Some((machine, process)) = host.alive(key) {
        let mounts = File::open(format!("/proc/{}/ns/mnt", machine.pid));
        // The frozen cannot die under version 1.
        host.groups.thaw(key)?;
        host.kill(key, &process)?;
        step("stop.killed");
        mounts.into_iter().for_each(release::close_later);
    }
    let usage = host.groups.usage(key);
    step("stop.used");
    host.clear(key)?;
    step("stop.cleared");
    Ok(usage)
}

/// Asks the agent for the network device.
async fn hand_over(directory: &File) -> io::Result<Option<OwnedFd>> {
    // Not by the path itself: it may be longer than a socket's address can be.
    let short = format!("/proc/self/fd/{}/{NETWORK_SOCKET}", directory.as_raw_fd());
    let socket = loop {
        match tokio::net::UnixStream::connect(&short).await {
            // As many wait for the agent as can.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            connected => break connected?,
        }
    };
    loop {
        socket.readable().await?;
        match socket.try_io(Interest::READABLE, || receive(&socket)) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            received => return received,
        }
    }
}

/// Thaws a machine when it is dropped, for whatever reason.
struct Thaw<'a> {
    host: &'a Host,
    key: &'a MachineKey,
}

impl Thaw<'_> {
    fn now(self) -> DriverResult<()> {
        self.host.groups.thaw(self.key)
    }
}

impl Drop for Thaw<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.host.groups.thaw(self.key) {
            tracing::error!(machine = %self.key, %error, "a frozen container was not thawed");
        }
    }
}

fn swap_root(host: &Host, key: &MachineKey, new: &RootFs) -> DriverResult<()> {
    let _lock = lock(&host.directory(key), FlockOperation::LockShared)?;
    let (machine, _process) = host.demand(key)?;
    // Also when something panics on the way: a frozen machine would stay so until the next daemon comes.
    let thaw = Thaw { host, key };
    let swapped = host.agent("swap-root", || {
        // Frozen, so that nothing is started between the look and the leap.
        host.groups.freeze(key)?;
        if host.groups.processes(key)? != [machine.pid] {
            return Err(DriverError::NotAlone { key: key.clone() });
        }
        let run_dir = host.directory(key);
        Ok(Swap { version: VERSION, run_dir, machine, root: root(new) })
    });
    thaw.now()?;
    swapped.map(drop)
}

/// Takes a descriptor that is sent with the next byte.
fn receive(socket: impl AsFd) -> io::Result<Option<OwnedFd>> {
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
