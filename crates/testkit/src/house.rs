//! An engine with a data directory, a driver and a small image of its own, for tests below HTTP.

mod commands;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use sandkeep_core::catalog::DiskCatalog;
use sandkeep_core::db::Index;
use sandkeep_core::driver::Driver;
use sandkeep_core::driver::container::{ContainerConfig, ContainerDriver};
use sandkeep_core::driver::microvm::{Accelerator, MicrovmConfig, MicrovmDriver, kernel};
use sandkeep_core::embedded::AGENT;
use sandkeep_core::engine::{
    Checkpoint, Create, Engine, Parts, Settings, SnapshotFilter, agent_answers,
};
use sandkeep_core::model::{MachineKey, Name, Patch, Reserve, SandboxId, Size};
use sandkeep_core::store::image::{ImageSettings, Images, Reporter};
use sandkeep_core::store::{Store, StoreOptions};
use tempfile::TempDir;

pub use self::commands::{Ran, detached, ok, printed, sh};
use crate::root::small_root_tar;

/// A data directory, and what is needed to open an engine on it as often as a test likes.
///
/// Dropping it ends whatever machine is still alive and removes everything.
pub struct House {
    dir: PathBuf,
    /// Absent in a process that another one lent its house to.
    owned: Option<TempDir>,
    data: PathBuf,
    config: ContainerConfig,
    /// How engines opened here behave.
    pub settings: Settings,
    /// Free space that sandboxes may not touch, if not the usual.
    pub reserve: Option<u64>,
    machines: Option<MicrovmConfig>,
}

/// A [`House`] for the test that asks, which ends here, and says so by name, where there can be none.
#[macro_export]
macro_rules! house {
    () => {
        match $crate::house::House::new() {
            Ok(house) => house,
            Err(why) => return eprintln!("SKIPPED {}: {why}", module_path!()),
        }
    };
}

/// The name of the test `victim` of the calling module, as the test program knows it: the process that a test starts to have it
/// killed.
#[macro_export]
macro_rules! victim {
    () => {{
        let path = concat!(module_path!(), "::victim");
        path.split_once("::").map_or(path, |(_crate, test)| test)
    }};
}

impl House {
    /// Sets one up, or says why this machine cannot.
    ///
    /// # Errors
    ///
    /// Returns the reason, to be printed as `SKIPPED`.
    pub fn new() -> Result<Self, String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        if !rustix::process::geteuid().is_root() {
            return Err("sandboxes need root".to_owned());
        }
        let dir = TempDir::with_prefix("keep-house-").map_err(|error| error.to_string())?;
        let agent = dir.path().join("keep-agent");
        fs::write(&agent, AGENT.bytes()).map_err(|error| error.to_string())?;
        fs::set_permissions(&agent, fs::Permissions::from_mode(0o755))
            .map_err(|error| error.to_string())?;
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let id = std::process::id();
        let config = ContainerConfig {
            agent,
            run_dir: dir.path().join("run"),
            cgroup_parent: format!("sandkeep-test-{id}-h{count}"),
        };
        ContainerDriver::new(config.clone()).map_err(|error| error.to_string())?;
        // Tests run side by side, in one process or in many: each takes uids of its own.
        let uid_base = 0x7000_0000 + (id.wrapping_add(count * 61) % 0x400) * 0x20_0000;
        // Tests that are not about the trash want space back at once, and believe the clock.
        let (trash_grace, clock_settle) = (Duration::ZERO, Duration::ZERO);
        let settings =
            Settings { uid_base, uid_ranges: 31, trash_grace, clock_settle, ..Settings::default() };
        let data = dir.path().join("data");
        Ok(Self {
            dir: dir.path().to_owned(),
            owned: Some(dir),
            data,
            config,
            settings,
            reserve: None,
            machines: None,
        })
    }

    /// Gives it machines of their own, emulated, or says why this host has none.
    ///
    /// # Errors
    ///
    /// Returns the reason, to be printed as `SKIPPED`.
    pub fn with_machines(mut self) -> Result<Self, String> {
        let found = crate::machine::test_kernel()?;
        let cache_dir = self.data.join("microvm");
        let into = cache_dir.join("kernel");
        kernel::prepare(&found.vmlinuz, &found.modules, &AGENT.bytes(), &into)
            .map_err(|error| error.to_string())?;
        self.machines = Some(MicrovmConfig {
            agent: self.config.agent.clone(),
            run_dir: self.dir.join("machines"),
            cgroup_parent: format!("{}-m", self.config.cgroup_parent),
            cache_dir,
            qemu: "/usr/bin/qemu-system-x86_64".into(),
            warm_hypervisors: 0,
            warm_uids: self.settings.uid_base + self.settings.uid_ranges * 0x1_0000,
            reserve: Reserve::default(),
        });
        // Boots are emulated, and the host is busy with other tests.
        self.settings.patience = Duration::from_secs(60);
        Ok(self)
    }

    fn machine_driver(&self) -> Option<MicrovmDriver> {
        let reserve = Reserve { bytes: self.reserve };
        let config = MicrovmConfig { reserve, ..self.machines.clone()? };
        let driver = MicrovmDriver::new(config, agent_answers);
        let driver = driver.expect("the host took a driver before");
        Some(driver.accelerated_by(Accelerator::Tcg))
    }

    /// The machines of their own that are alive.
    ///
    /// # Panics
    ///
    /// When there can be none.
    pub async fn machines_alive(&self) -> Vec<MachineKey> {
        let driver = self.machine_driver().expect("a house with machines");
        let alive = driver.survivors().await.expect("machines are found");
        alive.into_iter().map(|(key, _)| key).collect()
    }

    /// Kills every hypervisor, as a host that runs out of memory would.
    ///
    /// # Panics
    ///
    /// When one cannot be found.
    pub async fn kill_machines(&self) {
        let run_dir = self.machines.clone().expect("a house with machines").run_dir;
        for key in self.machines_alive().await {
            let path = run_dir.join(key.as_str()).join("machine.json");
            send(&path, rustix::process::Signal::KILL);
        }
    }

    /// Kills the agent of every sandbox of the container driver, and all that runs in it.
    ///
    /// # Panics
    ///
    /// When one cannot be found.
    pub async fn kill_agents(&self) {
        for (key, _) in self.driver().survivors().await.expect("sandboxes are found") {
            self.signal_agent(key.as_str(), rustix::process::Signal::KILL);
        }
    }

    /// Stops the agent of every sandbox of the container driver where it stands: it lives and does not answer.
    ///
    /// # Panics
    ///
    /// When one cannot be found.
    pub async fn hang_agents(&self) {
        for (key, _) in self.driver().survivors().await.expect("sandboxes are found") {
            self.signal_agent(key.as_str(), rustix::process::Signal::STOP);
        }
    }

    /// Stops the agent of one sandbox of the container driver where it stands.
    ///
    /// # Panics
    ///
    /// When it cannot be found.
    pub fn hang_agent(&self, sandbox: &SandboxId) {
        self.signal_agent(sandbox.as_str(), rustix::process::Signal::STOP);
    }

    /// Resumes an agent that was stopped.
    ///
    /// # Panics
    ///
    /// When it cannot be found.
    pub fn wake_agent(&self, sandbox: &SandboxId) {
        self.signal_agent(sandbox.as_str(), rustix::process::Signal::CONT);
    }

    /// The socket at which the agent of a sandbox of the container driver listens.
    #[must_use]
    pub fn agent_socket(&self, sandbox: &SandboxId) -> PathBuf {
        self.config.run_dir.join(sandbox.as_str()).join("agent.sock")
    }

    fn signal_agent(&self, key: &str, signal: rustix::process::Signal) {
        send(&self.config.run_dir.join(key).join("machine.json"), signal);
    }

    /// What a process is to have in its environment so that [`lent`](Self::lent) is this house.
    #[must_use]
    pub fn lend(&self) -> [(&'static str, String); 3] {
        [
            ("SANDKEEP_HOUSE", self.dir.display().to_string()),
            ("SANDKEEP_HOUSE_CGROUP", self.config.cgroup_parent.clone()),
            ("SANDKEEP_HOUSE_UIDS", self.settings.uid_base.to_string()),
        ]
    }

    /// The house that another process lent to this one. It stays when this process is gone.
    ///
    /// # Panics
    ///
    /// When the environment was not set by this test kit.
    #[must_use]
    pub fn lent() -> Option<Self> {
        let dir = PathBuf::from(std::env::var_os("SANDKEEP_HOUSE")?);
        let of = |name: &str| std::env::var(name).expect("set with the house");
        let config = ContainerConfig {
            agent: dir.join("keep-agent"),
            run_dir: dir.join("run"),
            cgroup_parent: of("SANDKEEP_HOUSE_CGROUP"),
        };
        let uid_base = of("SANDKEEP_HOUSE_UIDS").parse().expect("a number");
        let (trash_grace, clock_settle) = (Duration::ZERO, Duration::ZERO);
        let settings =
            Settings { uid_base, uid_ranges: 31, trash_grace, clock_settle, ..Settings::default() };
        let data = dir.join("data");
        Some(Self { data, dir, owned: None, config, settings, reserve: None, machines: None })
    }

    /// The data directory.
    #[must_use]
    pub fn data(&self) -> PathBuf {
        self.data.clone()
    }

    /// Puts the data directory somewhere else.
    #[must_use]
    pub fn with_data(mut self, data: PathBuf) -> Self {
        self.data = data;
        self
    }

    /// The directory everything of the test is in.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// A driver as the engine has it.
    ///
    /// # Panics
    ///
    /// When the host, which had a driver before, no longer takes one.
    #[must_use]
    pub fn driver(&self) -> ContainerDriver {
        ContainerDriver::new(self.config.clone()).expect("the host took a driver before")
    }

    /// Lets an engine end and opens the next on the same data: a daemon that was restarted.
    ///
    /// # Panics
    ///
    /// When it does not open.
    pub async fn reopen(&self, engine: Engine) -> Engine {
        self.close(engine).await;
        self.open().await
    }

    /// Lets an engine end, and waits until the data directory is free.
    ///
    /// # Panics
    ///
    /// When it does not become free.
    pub async fn close(&self, engine: Engine) {
        engine.shutdown().await;
        drop(engine);
        self.free().await;
    }

    /// Opens an engine as soon as one before it is gone.
    ///
    /// # Panics
    ///
    /// When it does not open.
    pub async fn open_when_free(&self) -> Engine {
        self.free().await;
        self.open().await
    }

    /// The same, of an engine that may still be recovering.
    ///
    /// # Panics
    ///
    /// When it does not open.
    pub async fn open_when_free_early(&self) -> Engine {
        self.free().await;
        self.open_early().await
    }

    /// Waits until an engine that was shut down has released the data directory: its last tasks do
    /// so when they have seen the end. Returns the store in it.
    ///
    /// # Panics
    ///
    /// When they do not.
    pub async fn free(&self) -> Store {
        for _ in 0..500 {
            if let Ok(store) = Store::open(&self.data()) {
                return store;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("the data directory is still held: a task of the engine has not ended");
    }

    /// Hands the house to a process that dies at `point` while doing `deed`, and opens it again. That process is the test
    /// `victim` of the same program, which finds its house with [`lent`](Self::lent) and its deed in `SANDKEEP_TEST_DEED`.
    ///
    /// # Panics
    ///
    /// When it comes to its end, or panics.
    pub async fn cut(&self, engine: Engine, victim: &str, deed: &str, point: &str) -> Engine {
        self.die(engine, victim, deed, point).await;
        self.open().await
    }

    /// The same, and opens no engine.
    ///
    /// # Panics
    ///
    /// When it comes to its end, or panics.
    pub async fn die(&self, engine: Engine, victim: &str, deed: &str, point: &str) {
        engine.shutdown().await;
        drop(engine);
        self.free().await;
        let output = std::process::Command::new(std::env::current_exe().expect("a program"))
            .args(["--exact", victim, "--nocapture"])
            .envs(self.lend())
            .env("SANDKEEP_TEST_DEED", deed)
            .env("SANDKEEP_FAILPOINT", point)
            .output()
            .expect("it runs");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{point} is never passed: {text}");
        assert!(!text.contains("panicked"), "{point}: {text}");
    }

    /// Opens an engine, with the image `small` and the project `default`, and waits until it has recovered all that an earlier
    /// one left.
    ///
    /// # Panics
    ///
    /// When it does not open.
    pub async fn open(&self) -> Engine {
        let engine = self.open_early().await;
        engine.recovered().await;
        engine
    }

    /// Opens an engine that does not have the driver for machines of their own, and waits until it has recovered what it can.
    ///
    /// # Panics
    ///
    /// When it does not open.
    pub async fn open_without_machines(&self) -> Engine {
        let engine = self.open_with(Vec::new()).await;
        engine.recovered().await;
        engine
    }

    /// Opens an engine that may still be recovering what an earlier one left.
    ///
    /// # Panics
    ///
    /// When it does not open.
    pub async fn open_early(&self) -> Engine {
        let machines = self.machine_driver().map(|driver| Arc::new(driver) as Arc<dyn Driver>);
        self.open_with(machines.into_iter().collect()).await
    }

    async fn open_with(&self, more: Vec<Arc<dyn Driver>>) -> Engine {
        let options = StoreOptions { reserve: self.reserve, ..StoreOptions::default() };
        let store = Store::open_with(&self.data(), options).expect("the data directory opens");
        let file = self.data().join("index.sqlite");
        let db = Index::open(&file, store.clone()).await.expect("the index opens");
        let images = Images::new(store.clone(), ImageSettings::default());
        let mut drivers: Vec<Arc<dyn Driver>> = vec![Arc::new(self.driver())];
        drivers.extend(more);
        let catalog = Arc::new(DiskCatalog::new(store.clone(), Arc::new(db)));
        let parts = Parts { store, images, catalog, drivers, settings: self.settings.clone() };
        let engine = Engine::open(parts).await.expect("the engine opens");
        if engine.images().get("small").await.is_err() {
            let tar = self.dir.join("small.tar");
            small_root_tar(&tar).expect("a small root");
            engine
                .images()
                .import("small", &tar, &Reporter::silent())
                .await
                .expect("the small root imports");
        }
        if engine.projects().is_empty() && engine.locked_projects().is_empty() {
            engine.create_project(project()).await.expect("a first project");
        }
        engine
    }
}

impl Drop for House {
    fn drop(&mut self) {
        if self.owned.is_none() {
            return;
        }
        let driver = self.driver();
        let mut drivers: Vec<Arc<dyn Driver>> = vec![Arc::new(driver.clone())];
        let machines = self.machine_driver();
        drivers.extend(machines.clone().map(|driver| Arc::new(driver) as Arc<dyn Driver>));
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
            return;
        };
        // A runtime cannot be entered from within another one: a thread of its own can.
        std::thread::scope(|scope| {
            scope.spawn(move || {
                runtime.block_on(async {
                    // Asked until the answer is "nobody": a start that was under way may just have ended.
                    for driver in drivers {
                        for _ in 0..10 {
                            let alive = driver.survivors().await;
                            if alive.as_ref().is_ok_and(Vec::is_empty) {
                                break;
                            }
                            for (key, _) in alive.unwrap_or_default() {
                                let _ = driver.stop(&key).await;
                            }
                            tokio::time::sleep(Duration::from_millis(20)).await;
                        }
                    }
                });
                driver.retire();
                if let Some(machines) = machines {
                    machines.retire();
                }
            });
        });
        // Tasks of an engine that was dropped with machines alive may still be sealing what those
        // wrote: the directory is gone for good when it is gone twice.
        let mut gone = 0;
        for _ in 0..100 {
            let _ = fs::remove_dir_all(&self.dir);
            gone = if self.dir.exists() { 0 } else { gone + 1 };
            if gone == 2 {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Sends a signal to the process of a machine that is on record.
fn send(record: &Path, signal: rustix::process::Signal) {
    let text = fs::read(record).expect("a record of the machine");
    let record: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    let pid = record["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
    let pid = pid.and_then(rustix::process::Pid::from_raw).expect("a process");
    rustix::process::kill_process(pid, signal).expect("it is there");
}

/// The project tests work in.
///
/// # Panics
///
/// Never: the name is fine.
#[must_use]
pub fn project() -> Name {
    name("default")
}

/// A name.
///
/// # Panics
///
/// When it cannot be one.
#[must_use]
pub fn name(text: &str) -> Name {
    text.parse().expect("a name fit for tests")
}

/// A sandbox on the small image, to be started at once.
#[must_use]
pub fn small(text: &str) -> Create {
    let patch = Patch { image: Some("small".to_owned()), ..Patch::default() };
    Create { name: Some(name(text)), patch, start: true, ..Create::default() }
}

/// The same as a small machine of its own.
#[must_use]
pub fn machine(text: &str) -> Create {
    let mut request = small(text);
    request.patch.driver = Some("microvm".to_owned());
    request.patch.memory = Some(Size(256 << 20));
    request.patch.millicpus = Some(1000);
    request.patch.disk = Some(Size(1 << 30));
    request
}

/// A checkpoint with a label.
#[must_use]
pub fn labelled(label: &str) -> Checkpoint {
    Checkpoint { label: Some(label.to_owned()), ..Checkpoint::default() }
}

/// The snapshots of the sandboxes of a name.
#[must_use]
pub fn of(text: &str) -> SnapshotFilter {
    SnapshotFilter { sandbox: Some(name(text)), deleted: false }
}

/// Asks until there is an answer, for three minutes or so: background work is slow on a busy host.
///
/// # Panics
///
/// When there is none by then.
pub async fn until<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    for _ in 0..1800 {
        if let Some(answer) = ask().await {
            return answer;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("{what} did not come about");
}

/// The files under a directory that hold `text`.
#[must_use]
pub fn holding(dir: &Path, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => found.extend(holding(&path, text)),
            Ok(kind) if kind.is_file() => {
                let bytes = fs::read(&path).unwrap_or_default();
                if bytes.windows(text.len()).any(|part| part == text.as_bytes()) {
                    found.push(path.display().to_string());
                }
            }
            _ => {}
        }
    }
    found
}
