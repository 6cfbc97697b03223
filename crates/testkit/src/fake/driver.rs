//! A strict driver whose machines are tasks.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::{Mutex, MutexGuard};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use sandkeep_core::driver::{
    Driver, DriverError, DriverResult, Link, Machine, MachineLoad, MachineUsage, Relayer,
};
use sandkeep_core::model::{Device, MachineKey, RootFs, Size};
use sandkeep_proto::ask::{AskLine, InsideAnswer};
use sandkeep_proto::link::InsideQuestion;
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::agent::{Agent, Script};

/// A host that has machines. They keep running while no daemon runs.
///
/// Dropping it panics if a machine is alive: a test that is done with a sandbox stops or deletes
/// it, or declares a loss of power.
#[derive(Debug)]
pub struct FakeHost {
    dir: PathBuf,
    /// Where agents run: they outlive engines.
    runtime: Handle,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    machines: BTreeMap<MachineKey, FakeMachine>,
    scripts: BTreeMap<String, Script>,
    /// Why the next starts fail, the first first.
    failures: Vec<String>,
    /// How many machines were started so far.
    started: usize,
    /// What machines used, where a test says so.
    cpu: BTreeMap<MachineKey, Duration>,
}

#[derive(Debug)]
struct FakeMachine {
    machine: Machine,
    root: Arc<Mutex<RootFs>>,
    frozen: bool,
    agent: Agent,
    socket: PathBuf,
    /// The machine's end of its network: nothing is ever sent.
    _network: OwnedFd,
    device: OwnedFd,
    alive: watch::Sender<bool>,
}

impl FakeHost {
    /// A host that keeps sockets below `dir`. Agents run where this is called.
    #[must_use]
    pub fn new(dir: &Path) -> Arc<Self> {
        let state = Mutex::default();
        Arc::new(Self { dir: dir.to_owned(), runtime: Handle::current(), state })
    }

    /// The driver that a daemon on this host has.
    #[must_use]
    pub fn driver(self: &Arc<Self>) -> FakeDriver {
        FakeDriver { host: Arc::clone(self) }
    }

    /// Says what a command does, by its words with a space between them.
    pub fn script(&self, command: &str, script: Script) {
        self.state().scripts.insert(command.to_owned(), script);
    }

    /// Has the next start fail.
    pub fn fail_start(&self, why: &str) {
        self.state().failures.push(why.to_owned());
    }

    /// The machines that are alive.
    #[must_use]
    pub fn alive(&self) -> Vec<MachineKey> {
        self.state().machines.keys().cloned().collect()
    }

    /// How many machines were started so far.
    #[must_use]
    pub fn started(&self) -> usize {
        self.state().started
    }

    /// Says how much CPU time a machine has used.
    pub fn use_cpu(&self, key: &MachineKey, cpu: Duration) {
        self.state().cpu.insert(key.clone(), cpu);
    }

    /// Whether the processes of a machine are frozen.
    #[must_use]
    pub fn is_frozen(&self, key: &MachineKey) -> bool {
        self.state().machines.get(key).is_some_and(|machine| machine.frozen)
    }

    /// A program in a machine asks something, under this number.
    ///
    /// # Panics
    ///
    /// When the machine does not run.
    pub fn ask(&self, key: &MachineKey, id: &str, asked: AskLine) {
        let state = self.state();
        let machine = state.machines.get(key).expect("it runs");
        machine.agent.ask(InsideQuestion { id: id.to_owned(), user: 0, asked });
    }

    /// The program that asked in a machine is gone.
    ///
    /// # Panics
    ///
    /// When the machine does not run.
    pub fn withdraw(&self, key: &MachineKey, id: &str) {
        self.state().machines.get(key).expect("it runs").agent.withdraw(id);
    }

    /// What programs in a machine were answered: number, answer and comment.
    #[must_use]
    pub fn answers(&self, key: &MachineKey) -> Vec<(String, InsideAnswer, String)> {
        self.state().machines.get(key).map(|machine| machine.agent.answers()).unwrap_or_default()
    }

    /// Ends every machine at once, as a power cut does.
    pub fn lose_power(&self) {
        let machines = std::mem::take(&mut self.state().machines);
        for machine in machines.into_values() {
            machine.alive.send_replace(false);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl Drop for FakeHost {
    fn drop(&mut self) {
        let left: Vec<MachineKey> = self.state().machines.keys().cloned().collect();
        let problems: Vec<String> =
            self.state().machines.values().flat_map(|one| one.agent.problems()).collect();
        if !std::thread::panicking() {
            assert_eq!(problems, [""; 0], "agents were asked for what they do not do");
            assert_eq!(left, [], "machines are left");
        }
    }
}

/// A driver that takes no nonsense.
///
/// It panics when a machine is started that is alive, on files that are not there, that another one
/// writes to, or with user ids that another one has; and when a machine is frozen twice, or its root is
/// exchanged while it is frozen.
#[derive(Debug, Clone)]
pub struct FakeDriver {
    host: Arc<FakeHost>,
}

impl FakeDriver {
    fn check(state: &State, machine: &Machine) {
        let key = &machine.key;
        assert!(!state.machines.contains_key(key), "{key} is alive, and is started again");
        check_root(&machine.root);
        for (other, alive) in &state.machines {
            let root = alive.root.lock();
            assert_ne!(
                root.writable_dir, machine.root.writable_dir,
                "{other} writes to the layer that {key} is to write to"
            );
            let (one, two) = (alive.machine.uids, machine.uids);
            let apart = one.base + one.count <= two.base || two.base + two.count <= one.base;
            assert!(apart, "{other} has user ids that {key} is to have");
        }
        for mount in &machine.mounts {
            assert!(mount.target.is_absolute(), "{key}: {} is no place", mount.target.display());
            check_root(&mount.root);
        }
    }
}

fn check_root(root: &RootFs) {
    for lower in &root.lower {
        let dir = root.layers_dir.join(lower);
        assert!(dir.is_dir(), "{} is not there", dir.display());
    }
    for dir in [&root.upper, &root.work] {
        let dir = root.writable_dir.join(dir);
        assert!(dir.is_dir(), "{} is not there", dir.display());
    }
    let sealed = root.writable_dir.join("layer.json");
    assert!(!sealed.exists(), "{} is sealed, and is to be written", root.writable_dir.display());
}

fn absent(key: &MachineKey) -> DriverError {
    DriverError::Absent { key: key.clone() }
}

#[async_trait]
impl Driver for FakeDriver {
    fn name(&self) -> &'static str {
        "fake"
    }

    async fn start(&self, machine: &Machine) -> DriverResult<Link> {
        let mut state = self.host.state();
        Self::check(&state, machine);
        if !state.failures.is_empty() {
            let (step, reason) = ("start a machine".to_owned(), state.failures.remove(0));
            return Err(DriverError::Build { step, reason });
        }
        state.started += 1;
        let socket = self.host.dir.join(format!("{}.sock", state.started));
        let root = Arc::new(Mutex::new(machine.root.clone()));
        let agent = Agent::start(
            &self.host.runtime,
            &socket,
            Arc::clone(&root),
            state.scripts.clone(),
            state.started,
        );
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let ends = socketpair(AddressFamily::UNIX, SocketType::DGRAM, flags, None);
        let (device, network) = ends.expect("a pair of sockets");
        let alive = FakeMachine {
            machine: machine.clone(),
            root,
            frozen: false,
            agent,
            socket: socket.clone(),
            _network: network,
            device,
            alive: watch::Sender::new(true),
        };
        state.machines.insert(machine.key.clone(), alive);
        Ok(Link::Unix(socket))
    }

    async fn stop(&self, key: &MachineKey) -> DriverResult<MachineUsage> {
        let Some(machine) = self.host.state().machines.remove(key) else {
            return Ok(MachineUsage::default());
        };
        let problems = machine.agent.problems();
        assert_eq!(problems, [""; 0], "{key} was asked for what it does not do");
        machine.agent.end().await;
        machine.alive.send_replace(false);
        Ok(used())
    }

    async fn usage(&self, key: &MachineKey) -> DriverResult<MachineUsage> {
        let state = self.host.state();
        if !state.machines.contains_key(key) {
            return Ok(MachineUsage::default());
        }
        let cpu = state.cpu.get(key).copied();
        Ok(MachineUsage { cpu: cpu.unwrap_or(used().cpu), ..used() })
    }

    async fn load(&self, key: &MachineKey) -> DriverResult<MachineLoad> {
        let used = self.usage(key).await?;
        Ok(MachineLoad { used, memory: used.memory_peak, processes: Some(1) })
    }

    async fn survivors(&self) -> DriverResult<Vec<(MachineKey, Link)>> {
        let state = self.host.state();
        let link =
            |(key, one): (&MachineKey, &FakeMachine)| (key.clone(), Link::Unix(one.socket.clone()));
        Ok(state.machines.iter().map(link).collect())
    }

    async fn died(&self, key: &MachineKey) {
        let alive = self.host.state().machines.get(key).map(|one| one.alive.subscribe());
        if let Some(mut alive) = alive {
            let _ = alive.wait_for(|alive| !alive).await;
        }
    }

    async fn network(&self, key: &MachineKey) -> DriverResult<Device> {
        let state = self.host.state();
        let machine = state.machines.get(key).ok_or_else(|| absent(key))?;
        let device = machine.device.try_clone().expect("another descriptor");
        Ok(Device::Tun(device))
    }

    fn relayer(&self) -> Option<&dyn Relayer> {
        Some(self)
    }
}

#[async_trait]
impl Relayer for FakeDriver {
    async fn alone(&self, key: &MachineKey) -> DriverResult<bool> {
        let state = self.host.state();
        let machine = state.machines.get(key).ok_or_else(|| absent(key))?;
        Ok(!machine.agent.is_busy())
    }

    async fn freeze(&self, key: &MachineKey) -> DriverResult<()> {
        let mut state = self.host.state();
        let machine = state.machines.get_mut(key).ok_or_else(|| absent(key))?;
        assert!(!machine.frozen, "{key} is frozen twice");
        machine.frozen = true;
        Ok(())
    }

    async fn thaw(&self, key: &MachineKey) -> DriverResult<()> {
        let mut state = self.host.state();
        let machine = state.machines.get_mut(key).ok_or_else(|| absent(key))?;
        machine.frozen = false;
        Ok(())
    }

    async fn swap_root(&self, key: &MachineKey, root: &RootFs) -> DriverResult<()> {
        let state = self.host.state();
        let machine = state.machines.get(key).ok_or_else(|| absent(key))?;
        assert!(!machine.frozen, "the root of {key} is exchanged while it is frozen");
        if machine.agent.is_busy() {
            return Err(DriverError::NotAlone { key: key.clone() });
        }
        check_root(root);
        let mut current = machine.root.lock();
        assert_ne!(current.writable_dir, root.writable_dir, "{key} stands on that root already");
        *current = root.clone();
        Ok(())
    }
}

fn used() -> MachineUsage {
    MachineUsage { cpu: Duration::from_millis(1), memory_peak: Size(1 << 20), oom_kills: 0 }
}
