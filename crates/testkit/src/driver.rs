//! The contract every driver is held to, and a host of its own for each test.

use std::fs;
use std::ops::Deref;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sandkeep_core::driver::container::{ContainerConfig, ContainerDriver};
use sandkeep_core::driver::microvm::{Accelerator, MicrovmConfig, MicrovmDriver, kernel};
use sandkeep_core::driver::{
    Device, Driver, DriverError, Link, Machine, MachineMount, MachineUsage, Relayer, mac_of,
};
use sandkeep_core::embedded::AGENT;
use sandkeep_core::engine::agent_answers;
use sandkeep_core::guest::Guest;
use sandkeep_core::model::{Limits, MachineKey, Reserve, RootFs, Size, UidRange};
use sandkeep_proto::link::{Assemble, AssembleMount, At, Hidden, Identity, Moment};
use tempfile::TempDir;

use crate::machine::test_kernel;

/// Limits no test should reach by accident.
pub const AMPLE: Limits =
    Limits { millicpus: 2000, memory: Size(256 << 20), pids: 200, file_size: Size(64 << 20) };

/// How long a machine may take for anything: it may be emulated, on a busy host.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A directory for the machines of one test, and what they are described with.
pub struct Ground {
    dir: TempDir,
    agent: PathBuf,
    /// Unique on this host, for control groups.
    name: String,
}

impl Ground {
    fn new() -> Result<Self, String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        if !rustix::process::geteuid().is_root() {
            return Err("machines need root".to_owned());
        }
        let dir = TempDir::with_prefix("keep-host-").map_err(|e| e.to_string())?;
        let agent = dir.path().join("keep-agent");
        fs::write(&agent, AGENT.bytes()).map_err(|e| e.to_string())?;
        fs::set_permissions(&agent, fs::Permissions::from_mode(0o755))
            .map_err(|e| e.to_string())?;
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("sandkeep-test-{}-{count}", std::process::id());
        Ok(Self { dir, agent, name })
    }

    /// The directory everything of the test is in.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Makes an empty layer and returns its directory, to be filled.
    ///
    /// # Panics
    ///
    /// When the directory cannot be made.
    #[must_use]
    pub fn layer(&self, name: &str) -> PathBuf {
        let path = self.dir.path().join("layers").join(name);
        fs::create_dir_all(&path).expect("a directory in our own directory");
        path
    }

    /// Describes a root of the named layers, topmost first, with a fresh writable directory.
    ///
    /// # Panics
    ///
    /// When directories cannot be made.
    #[must_use]
    pub fn root(&self, writable: &str, layers: &[&str]) -> RootFs {
        let writable_dir = self.dir.path().join("writable").join(writable);
        for part in ["upper", "work"] {
            fs::create_dir_all(writable_dir.join(part)).expect("a directory in our own directory");
        }
        for layer in layers {
            let _ = self.layer(layer);
        }
        RootFs {
            layers_dir: self.dir.path().join("layers"),
            lower: layers.iter().map(PathBuf::from).collect(),
            writable_dir,
            upper: PathBuf::from("upper"),
            work: PathBuf::from("work"),
            image: 0,
        }
    }

    /// Describes a machine on one empty layer.
    #[must_use]
    pub fn machine(&self, name: &str) -> Machine {
        self.machine_on(name, self.root(name, &["empty"]))
    }

    /// Describes a machine on a given root. Each has a range of ids of its own.
    #[must_use]
    pub fn machine_on(&self, name: &str, root: RootFs) -> Machine {
        static RANGES: AtomicU32 = AtomicU32::new(0);
        let range = RANGES.fetch_add(1, Ordering::Relaxed) % 1000;
        Machine {
            key: key(name),
            hostname: name.to_owned(),
            root,
            uids: UidRange { base: 1_000_000_000 + range * 65_536, count: 65_536 },
            limits: AMPLE,
            mounts: Vec::new(),
        }
    }
}

/// A part of this machine for one test: directories and control groups that go away with it, and
/// whatever machine the test left running, also when it failed.
pub struct ContainerHost {
    ground: Ground,
    config: ContainerConfig,
}

impl ContainerHost {
    /// Sets one up, or says why this machine cannot.
    ///
    /// # Errors
    ///
    /// Returns the reason, to be printed as `SKIPPED`.
    pub fn new() -> Result<Self, String> {
        let ground = Ground::new()?;
        let config = ContainerConfig {
            agent: ground.agent.clone(),
            run_dir: ground.path().join("run"),
            cgroup_parent: ground.name.clone(),
        };
        ContainerDriver::new(config.clone()).map_err(|e| e.to_string())?;
        Ok(Self { ground, config })
    }

    /// A driver for this host; another one is what a restarted daemon would have.
    ///
    /// # Panics
    ///
    /// When the host, which had a driver before, no longer takes one.
    #[must_use]
    pub fn driver(&self) -> ContainerDriver {
        ContainerDriver::new(self.config.clone()).expect("the host took a driver before")
    }

    /// Where the driver keeps things.
    #[must_use]
    pub fn config(&self) -> &ContainerConfig {
        &self.config
    }
}

impl Deref for ContainerHost {
    type Target = Ground;

    fn deref(&self) -> &Ground {
        &self.ground
    }
}

impl Drop for ContainerHost {
    fn drop(&mut self) {
        end_all(self.driver());
    }
}

/// The same for machines with a kernel of their own. They are emulated: what tests find does not depend on the host.
pub struct MicrovmHost {
    ground: Ground,
    config: MicrovmConfig,
}

impl MicrovmHost {
    /// Sets one up, or says why this machine cannot.
    ///
    /// # Errors
    ///
    /// Returns the reason, to be printed as `SKIPPED`.
    pub fn new() -> Result<Self, String> {
        let found = test_kernel()?;
        let ground = Ground::new()?;
        let config = MicrovmConfig {
            agent: ground.agent.clone(),
            run_dir: ground.path().join("run"),
            cgroup_parent: ground.name.clone(),
            cache_dir: ground.path().join("microvm"),
            qemu: PathBuf::from("/usr/bin/qemu-system-x86_64"),
            warm_hypervisors: 0,
            warm_uids: 0xE000_0000,
            reserve: Reserve::default(),
        };
        MicrovmDriver::new(config.clone(), agent_answers).map_err(|e| e.to_string())?;
        let into = config.cache_dir.join("kernel");
        kernel::prepare(&found.vmlinuz, &found.modules, &AGENT.bytes(), &into)
            .map_err(|e| e.to_string())?;
        Ok(Self { ground, config })
    }

    /// A driver for this host; another one is what a restarted daemon would have.
    ///
    /// # Panics
    ///
    /// When the host, which had a driver before, no longer takes one.
    #[must_use]
    pub fn driver(&self) -> MicrovmDriver {
        self.any_driver().accelerated_by(Accelerator::Tcg)
    }

    /// A driver that finds out by itself what machines are run by.
    ///
    /// # Panics
    ///
    /// When the host, which had a driver before, no longer takes one.
    #[must_use]
    pub fn any_driver(&self) -> MicrovmDriver {
        MicrovmDriver::new(self.config.clone(), agent_answers)
            .expect("the host took a driver before")
    }

    /// Where the driver keeps things.
    #[must_use]
    pub fn config(&self) -> &MicrovmConfig {
        &self.config
    }
}

impl Deref for MicrovmHost {
    type Target = Ground;

    fn deref(&self) -> &Ground {
        &self.ground
    }
}

impl Drop for MicrovmHost {
    fn drop(&mut self) {
        end_all(self.driver());
    }
}

/// Ends what a test left running.
fn end_all(driver: impl Driver + 'static) {
    // A thread of its own: a runtime cannot be started inside the test's.
    let cleaned = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let Ok(runtime) = runtime else { return };
        runtime.block_on(async {
            for (key, _) in driver.survivors().await.unwrap_or_default() {
                let _ = driver.stop(&key).await;
            }
        });
    });
    let _ = cleaned.join();
}

/// Reaches the agent of a machine.
///
/// # Panics
///
/// When it does not answer.
pub async fn reach(link: &Link) -> Guest {
    let guest = match link {
        Link::Unix(socket) => Guest::connect(socket, PATIENCE).await,
        Link::Serial(socket) => Guest::connect_serial(socket, PATIENCE).await,
    };
    guest.expect("the agent answers")
}

/// Starts a machine and makes it the sandbox's, as the engine does.
///
/// # Panics
///
/// When that does not work.
pub async fn bring_up(driver: &dyn Driver, machine: &Machine) -> Guest {
    let link = driver.start(machine).await.expect("it starts");
    let guest = reach(&link).await;
    if driver.disk().is_some() {
        guest.assemble(assembly(driver, machine).await).await.expect("it is assembled");
    }
    guest
}

/// Makes sure that what was written outlives the machine, as the engine does before it ends one.
///
/// # Panics
///
/// When that does not work.
pub async fn wait_until_quiet(driver: &dyn Driver, guest: &Guest) {
    guest.quiesce(Duration::ZERO).await.expect("commands end");
    if driver.disk().is_some() {
        guest.freeze().await.expect("all is on the disk");
    }
}

/// The description that a machine with a kernel of its own gets.
///
/// # Panics
///
/// When the driver does not know it.
pub async fn assembly(driver: &dyn Driver, machine: &Machine) -> Assemble {
    let disk = driver.disk().expect("its machines have kernels of their own");
    let mounts = machine.mounts.iter().map(|mount| AssembleMount {
        target: mount.target.to_string_lossy().into_owned(),
        lower: !mount.root.lower.is_empty(),
        read_only: mount.read_only,
        owner: mount.owner.clone(),
    });
    Assemble {
        lower: disk.lower(&machine.key).await.expect("it was started"),
        mounts: mounts.collect(),
        identity: Identity { hostname: machine.hostname.clone(), mac: mac_of(&machine.key) },
        now: moment(),
        file_size: machine.limits.file_size.0,
        pids: machine.limits.pids,
        rescue: false,
    }
}

/// The time, and what must do as randomness in a test.
///
/// # Panics
///
/// When this host's clock is before 1970.
#[must_use]
pub fn moment() -> Moment {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    let unix_ns = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
    Moment { unix_ns, entropy: Hidden::new(&"QUJD".repeat(22)) }
}

/// A machine's key out of a text that is fit to be one.
///
/// # Panics
///
/// When it is not.
#[must_use]
pub fn key(text: &str) -> MachineKey {
    MachineKey::parse(text).expect("a key fit for tests")
}

/// Holds a driver to the promises in [`Driver`]'s documentation. `make` gives a driver for the same
/// host each time, as daemons that follow each other would have; `machine` describes a machine that
/// starts, `broken` one whose root is not there, `volume` an empty stack that can be mounted in one.
///
/// # Panics
///
/// When a promise is broken.
pub async fn driver_contract<D: Driver>(
    make: impl Fn() -> D,
    machine: impl Fn(&str) -> Machine,
    broken: impl Fn(&str) -> Machine,
    volume: impl Fn(&str) -> RootFs,
) {
    let driver = make();
    assert_eq!(alive(&driver).await, [""; 0], "a fresh host is empty");

    let (one, two) = (machine("one"), machine("two"));
    let inside = bring_up(&driver, &one).await;
    write(&inside, "/kept", "by one").await;
    driver.start(&two).await.expect("two starts");
    assert_eq!(alive(&driver).await, ["one", "two"]);

    let again = driver.start(&one).await;
    assert!(matches!(again, Err(DriverError::Alive { .. })), "one is alive already: {again:?}");
    let failed = driver.start(&broken("three")).await;
    assert!(failed.is_err(), "a root that is not there: {failed:?}");
    assert_eq!(alive(&driver).await, ["one", "two"], "a failed start leaves nothing");
    driver.start(&machine("three")).await.expect("and its name can be used again");
    driver.stop(&key("three")).await.expect("three stops");

    network_contract(&driver, &one.key).await;
    // The daemon dies; another comes.
    drop((driver, inside));
    let driver = make();
    assert_eq!(alive(&driver).await, ["one", "two"], "machines outlive the daemon");
    network_contract(&driver, &one.key).await;
    let link = survivor(&driver, &one.key).await;
    let inside = reach(&link).await;
    assert_eq!(read(&inside, "/kept").await, "by one", "and their agents are where they were");
    wait_until_quiet(&driver, &inside).await;
    drop(inside);

    let (died, stopped) = tokio::join!(
        tokio::time::timeout(Duration::from_secs(60), driver.died(&one.key)),
        driver.stop(&one.key)
    );
    assert!(died.is_ok(), "its death is noticed");
    let usage = stopped.expect("one stops");
    assert!(usage.cpu > Duration::ZERO && usage.memory_peak.0 > 0, "it used something: {usage:?}");
    let usage = driver.stop(&key("one")).await.expect("stopping twice is fine");
    assert_eq!(usage, MachineUsage::default(), "and the second time there was nothing");
    driver.died(&key("one")).await;
    assert_eq!(alive(&driver).await, ["two"], "stopping one leaves two alone");
    assert_eq!(driver.usage(&key("one")).await.expect("zeros"), MachineUsage::default());
    assert!(driver.usage(&key("two")).await.expect("accounts").cpu > Duration::ZERO);

    let inside = bring_up(&driver, &one).await;
    assert_eq!(read(&inside, "/kept").await, "by one", "it stands on what it wrote before");
    drop(inside);
    if let Some(relayer) = driver.relayer() {
        relayer_contract(relayer, &one.key, &machine("other").root).await;
    }
    for name in ["one", "two"] {
        driver.stop(&key(name)).await.expect("it stops");
    }
    mounts_contract(&driver, &machine, &volume).await;
    many_at_once(&driver, &machine).await;
    assert_eq!(alive(&driver).await, [""; 0], "nothing is left");
}

/// An echo request that arrives from outside is answered by the machine's own kernel.
///
/// # Panics
///
/// When it is not.
pub async fn network_contract<D: Driver>(driver: &D, live: &MachineKey) {
    let absent = driver.network(&key("absent")).await;
    assert!(matches!(absent, Err(DriverError::Absent { .. })), "{absent:?}");
    let (device, header) = match driver.network(live).await.expect("it has a network") {
        Device::Tun(device) => (device, Vec::new()),
        // To the card, from any sender, with IPv4 in it.
        Device::Ethernet { socket, mac } => {
            (socket, [&mac[..], &[2, 0, 0, 0, 0, 1, 8, 0]].concat())
        }
    };
    let echo = [&header[..], &ECHO].concat();
    let mut packet = vec![0; 65_536];
    let answered = (0..400).any(|_| {
        // One that has no room for more has the first ones.
        let _ = rustix::io::write(&device, &echo);
        std::thread::sleep(Duration::from_millis(10));
        std::iter::from_fn(|| {
            let read = rustix::io::read(&device, &mut packet[..]).ok()?;
            Some(packet[..read].get(header.len()..).unwrap_or_default().to_vec())
        })
        // IPv4, ICMP, an echo's answer, with what was sent along.
        .any(|packet| {
            packet.len() == ECHO.len()
                && packet[9] == 1
                && packet[20] == 0
                && packet[24..] == ECHO[24..]
        })
    });
    assert!(answered, "the machine answers at its address");
}

/// An echo request from the gateway to the machine, with its checksums.
const ECHO: [u8; 32] = [
    0x45, 0, 0, 32, 0, 1, 0, 0, 64, 1, 0xb2, 0x19, 100, 96, 0, 1, 100, 96, 0, 2, // IPv4
    8, 0, 0x27, 0x22, 0, 7, 0, 1, b'k', b'e', b'e', b'p', // ICMP
];

async fn relayer_contract(relayer: &dyn Relayer, live: &MachineKey, other: &RootFs) {
    let absent = key("absent");
    assert!(relayer.alone(live).await.expect("it lives"), "nothing was started in it");
    relayer.thaw(live).await.expect("thawing what is not frozen does nothing");
    for _ in 0..2 {
        relayer.freeze(live).await.expect("it freezes, also when it is frozen");
    }
    relayer.thaw(live).await.expect("it thaws");
    relayer.swap_root(live, other).await.expect("the agent is alone, so the root can go");
    assert!(relayer.alone(live).await.expect("it lives on"));
    let refused = relayer.swap_root(&absent, other).await;
    assert!(matches!(refused, Err(DriverError::Absent { .. })), "{refused:?}");
    assert!(matches!(relayer.alone(&absent).await, Err(DriverError::Absent { .. })));
    let gone = RootFs { layers_dir: PathBuf::from("/no/such/layers"), ..other.clone() };
    assert!(relayer.swap_root(live, &gone).await.is_err(), "a root that is not there");
    assert!(relayer.alone(live).await.expect("a failed swap changes nothing"));
    // Frozen machines can be stopped; the contract's caller does.
    relayer.freeze(live).await.expect("it freezes");
}

/// What is asked for is mounted or the machine does not start; a swapped root has it as well.
async fn mounts_contract<D: Driver>(
    driver: &D,
    machine: &impl Fn(&str) -> Machine,
    volume: &impl Fn(&str) -> RootFs,
) {
    let mount = |target: &str, name: &str| MachineMount {
        target: PathBuf::from(target),
        root: volume(name),
        read_only: false,
        owner: None,
    };
    for target in ["/", "/a/../b", "/proc/x", "/dev/shm"] {
        let odd = Machine { mounts: vec![mount(target, "odd")], ..machine("odd") };
        let refused = driver.start(&odd).await;
        assert!(matches!(refused, Err(DriverError::MountPoint { .. })), "{target}: {refused:?}");
        assert_eq!(alive(driver).await, [""; 0], "and nothing is left");
    }
    let mounts = vec![mount("/data", "data"), mount("/some/where", "where")];
    let with = Machine { mounts, ..machine("with") };
    let inside = bring_up(driver, &with).await;
    write(&inside, "/some/where/file", "on a drive").await;
    assert_eq!(read(&inside, "/some/where/file").await, "on a drive");
    drop(inside);
    if let Some(relayer) = driver.relayer() {
        relayer.swap_root(&with.key, &machine("after").root).await.expect("they come along");
        assert!(relayer.alone(&with.key).await.expect("it lives on"));
    }
    driver.stop(&with.key).await.expect("it stops");
}

/// Machines that come and go at the same time do not get in each other's way.
async fn many_at_once<D: Driver>(driver: &D, machine: &impl Fn(&str) -> Machine) {
    let machines: Vec<Machine> = (0..8).map(|n| machine(&format!("many-{n}"))).collect();
    let starts = machines.iter().map(|machine| driver.start(machine));
    for started in join_all(starts).await {
        started.expect("it starts among others");
    }
    assert_eq!(alive(driver).await.len(), machines.len());
    let stops = machines.iter().map(|machine| driver.stop(&machine.key));
    for stopped in join_all(stops).await {
        stopped.expect("it stops among others");
    }
}

/// Drives all futures to their end, on this task.
async fn join_all<T>(futures: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut pending: Vec<_> = futures.map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(|context| {
        let mut waiting = false;
        for (future, outcome) in &mut pending {
            if outcome.is_none() {
                match future.as_mut().poll(context) {
                    std::task::Poll::Ready(value) => *outcome = Some(value),
                    std::task::Poll::Pending => waiting = true,
                }
            }
        }
        if waiting { std::task::Poll::Pending } else { std::task::Poll::Ready(()) }
    })
    .await;
    pending.into_iter().filter_map(|(_, outcome)| outcome).collect()
}

async fn survivor(driver: &impl Driver, key: &MachineKey) -> Link {
    let survivors = driver.survivors().await.expect("survivors are listed");
    survivors.into_iter().find(|(found, _)| found == key).expect("it is one").1
}

fn at(path: &str) -> At {
    At { path: path.to_owned(), cwd: None, user: None }
}

async fn write(guest: &Guest, path: &str, text: &str) {
    let mut file = guest.write_file(at(path), None, true, false).await.expect("it is opened");
    file.send(text.to_owned().into()).await.expect("it is taken");
    file.finish().await.expect("it is written");
}

async fn read(guest: &Guest, path: &str) -> String {
    let (_, mut file) = guest.read_file(at(path), 0, None).await.expect("it is there");
    let mut bytes = Vec::new();
    while let Some(part) = file.next().await.expect("it is read") {
        bytes.extend_from_slice(&part);
    }
    String::from_utf8(bytes).expect("text")
}

async fn alive(driver: &impl Driver) -> Vec<String> {
    let survivors = driver.survivors().await.expect("survivors are listed");
    let mut keys: Vec<String> = survivors.iter().map(|(key, _)| key.as_str().to_owned()).collect();
    keys.sort();
    keys
}
