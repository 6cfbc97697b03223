//! Finds what this host can and cannot do, by doing it.
//!
//! `/dev/kvm` that opens says little: on many hosts no guest ever runs under it. So a machine is booted, once for each
//! combination of what could matter, and remembered in `<cache>/probe.json`.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::kernel::{self, Kernel};
use super::lifecycle::Start;
use super::qemu::Accelerator;
use super::{Microvm, MicrovmDriver, NAME};
use crate::driver::host::helper::{self, DEFAULT_LIMITS, HelperTask, INPUT, Input};
use crate::driver::host::{broken, failed};
use crate::driver::{Check, Driver, DriverError, DriverResult, Machine};
use crate::embedded::AGENT;
use crate::model::{Limits, MachineKey, RootFs, Size, UidRange};

/// How long a guest may take to boot: by the processor, and translated.
const FAST: Duration = Duration::from_secs(15);
const SLOW: Duration = Duration::from_secs(120);
const SETUP: &str = "run `keep microvm setup`";

/// What was found out about this host.
#[derive(Debug)]
pub(super) struct HostFacts {
    path: PathBuf,
    forced: Mutex<Option<Accelerator>>,
    /// Held while it is being found out, so that it is done once.
    finding: tokio::sync::Mutex<Option<ProbeResult>>,
    version: Mutex<Option<(PathBuf, std::time::SystemTime, String)>>,
    kernel: Mutex<Option<(std::time::SystemTime, Kernel)>>,
    tsc_khz: OnceLock<Option<u64>>,
}

/// `probe.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ProbeResult {
    /// What it holds for: the host's kernel, its processor, the hypervisor, the guest's kernel.
    holds_for: [String; 4],
    accelerator: Accelerator,
    /// Why that one.
    because: String,
}

impl HostFacts {
    pub(super) fn new(cache: &Path) -> Self {
        Self {
            path: cache.join("probe.json"),
            forced: Mutex::default(),
            finding: tokio::sync::Mutex::default(),
            version: Mutex::default(),
            kernel: Mutex::default(),
            tsc_khz: OnceLock::new(),
        }
    }

    pub(super) fn force(&self, accelerator: Accelerator) {
        *self.forced.lock() = Some(accelerator);
    }
}

impl MicrovmDriver {
    /// What machines are run by on this host.
    pub(super) async fn accelerator(&self) -> DriverResult<Accelerator> {
        let forced = *self.inner.facts.forced.lock();
        match forced {
            Some(forced) => Ok(forced),
            None => self.find_out().await.map(|found| found.accelerator),
        }
    }

    async fn find_out(&self) -> DriverResult<ProbeResult> {
        let facts = &self.inner.facts;
        let holds_for = self.with(Microvm::circumstances).await?;
        let mut known = facts.finding.lock().await;
        if known.is_none() {
            *known = fs::read(&facts.path).ok().and_then(|text| serde_json::from_slice(&text).ok());
        }
        if let Some(found) = known.as_ref().filter(|found| found.holds_for == holds_for) {
            return Ok(found.clone());
        }
        let (accelerator, because) = match self.try_kvm().await {
            Ok(()) => (Accelerator::Kvm, "a machine booted under KVM".to_owned()),
            Err(reason) => (Accelerator::Tcg, reason),
        };
        let found = ProbeResult { holds_for, accelerator, because };
        let text = serde_json::to_vec(&found).map_err(|error| broken("remember", &error))?;
        fs::write(&facts.path, text).map_err(failed("write", &facts.path))?;
        *known = Some(found.clone());
        Ok(found)
    }

    async fn try_kvm(&self) -> Result<(), String> {
        fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .map_err(|error| format!("/dev/kvm: {error}"))?;
        self.try_machine(Accelerator::Kvm, FAST)
            .await
            .map_err(|error| format!("/dev/kvm opens, but no machine boots under it: {error}"))
    }

    /// Boots a small machine and waits for its agent.
    async fn try_machine(&self, by: Accelerator, patience: Duration) -> Result<(), String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("probe-{}-{count}", std::process::id());
        let scratch = self.inner.config.cache_dir.join(format!(".{name}"));
        let Some(key) = MachineKey::parse(&name) else { return Err("a bad name".to_owned()) };
        let machine = small(key.clone(), &scratch);
        let tried = async {
            let started = self
                .with(move |microvm| microvm.start(&machine, &[], &[], Start::Boot, by))
                .await
                .map(|started| started.link)
                .map_err(|error| error.to_string())?;
            (self.inner.answers)(started, patience)
                .await
                .map_err(|error| format!("its agent does not answer: {error}"))
        };
        let tried = tried.await;
        let stopped = self.stop(&key).await.map_err(|error| error.to_string());
        let _ = fs::remove_dir_all(&scratch);
        tried.and(stopped.map(drop))
    }

    /// Whether this host can run machines, with what, and why not otherwise. Boots one to find out.
    pub async fn probe(&self) -> Vec<Check> {
        let mut checks = self.inner.tools();
        let kernel = self.with(Microvm::kernel).await;
        checks.push(match &kernel {
            Ok(kernel) => good("guest kernel", format!("{}…", &kernel.digest[..12])),
            Err(error) => bad("guest kernel", error.to_string(), SETUP),
        });
        if checks.iter().any(|check| !check.ok) {
            return checks;
        }
        match self.find_out().await {
            Ok(ProbeResult { accelerator: Accelerator::Kvm, because, .. }) => {
                checks.push(good("acceleration", because));
            }
            Ok(ProbeResult { because, .. }) => checks.push(Check {
                name: "acceleration",
                // Slower, and all of it works.
                ok: true,
                detail: format!("machines are emulated in software: {because}"),
                fix: Some(
                    "use a host with KVM, or nested virtualisation, to make them fast".into(),
                ),
            }),
            Err(error) => checks.push(bad("acceleration", error.to_string(), SETUP)),
        }
        let by = self.accelerator().await.unwrap_or(Accelerator::Tcg);
        checks.push(match self.try_machine(by, SLOW).await {
            Ok(()) => good("booting a machine", format!("works, by {}", by.name())),
            Err(error) => bad("booting a machine", error, "see what the daemon logs"),
        });
        checks
    }
}

/// The process that tries a machine out, if it is one of those.
pub(super) fn prober(key: &MachineKey) -> Option<&str> {
    key.as_str().strip_prefix("probe-")?.split('-').next()
}

impl Microvm {
    /// The kernel for machines.
    pub(super) fn kernel(&self) -> DriverResult<Kernel> {
        let directory = self.config.cache_dir.join("kernel");
        let changed = fs::metadata(directory.join("kernel.json")).and_then(|at| at.modified());
        let Ok(changed) = changed else {
            let reason = format!("no kernel was prepared for machines; {SETUP}");
            return Err(DriverError::Unsupported { driver: NAME, reason });
        };
        let mut known = self.facts.kernel.lock();
        if let Some((_, kernel)) = known.as_ref().filter(|(at, _)| *at == changed) {
            return Ok(kernel.clone());
        }
        let kernel = kernel::open(&directory, &AGENT.bytes())
            .map_err(failed("open the kernel", &directory))?;
        let changed = fs::metadata(directory.join("kernel.json")).and_then(|at| at.modified());
        *known = changed.ok().map(|at| (at, kernel.clone()));
        Ok(kernel)
    }

    /// The hypervisor's name and version, as it says itself.
    pub(super) fn hypervisor(&self) -> DriverResult<String> {
        let qemu = &self.config.qemu;
        let changed =
            fs::metadata(qemu).and_then(|at| at.modified()).map_err(failed("open", qemu))?;
        let mut known = self.facts.version.lock();
        if let Some((_, _, version)) = known.as_ref().filter(|(_, at, _)| *at == changed) {
            return Ok(version.clone());
        }
        let told = self.helpers.run(&HelperTask {
            program: &qemu.to_string_lossy(),
            args: &["--version"],
            env: &[],
            input: Input::Nothing,
            output: None,
            limits: DEFAULT_LIMITS,
        })?;
        let version = told.lines().next().unwrap_or_default().trim().to_owned();
        if version.is_empty() {
            return Err(broken("ask the hypervisor for its version", &"it says nothing"));
        }
        *known = Some((qemu.clone(), changed, version.clone()));
        Ok(version)
    }

    /// How fast this host's time stamp counter runs, as the agent measures it.
    pub(super) fn tsc_khz(&self) -> Option<u64> {
        *self.facts.tsc_khz.get_or_init(|| {
            let told = self.helpers.run(&HelperTask {
                program: INPUT,
                args: &["tsc"],
                env: &[],
                input: Input::File(self.config.agent.clone()),
                output: None,
                limits: DEFAULT_LIMITS,
            });
            told.ok()?.trim().parse().ok()
        })
    }

    fn circumstances(&self) -> DriverResult<[String; 4]> {
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        Ok([release, processor(Accelerator::Kvm), self.hypervisor()?, self.kernel()?.digest])
    }

    /// What must be installed.
    fn tools(&self) -> Vec<Check> {
        let mut checks = vec![good("control groups", self.host.groups.describe())];
        checks.push(match self.hypervisor() {
            Ok(version) => good("hypervisor", version),
            Err(error) => bad("hypervisor", error.to_string(), "install qemu-system-x86"),
        });
        for (name, program, package) in [
            ("packing layers", "mkfs.erofs", "install erofs-utils"),
            ("making disks", "mkfs.ext4", "install e2fsprogs"),
        ] {
            checks.push(match helper::find(program) {
                Some(path) => good(name, path.display().to_string()),
                None => bad(name, format!("there is no `{program}`"), package),
            });
        }
        checks
    }
}

/// The processor that guests see.
pub(super) fn processor(accelerator: Accelerator) -> String {
    use sha2::Digest as _;
    if accelerator == Accelerator::Tcg {
        return "max".to_owned();
    }
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line =
            text.lines().find(|line| line.split(':').next().is_some_and(|at| at.trim() == name));
        line.and_then(|line| Some(line.split_once(':')?.1.trim())).unwrap_or_default()
    };
    let flags = sha2::Sha256::digest(field("flags"));
    let flags = hex::encode(&flags[..4]);
    format!("{} ({flags})", field("model name"))
}

fn small(key: MachineKey, scratch: &Path) -> Machine {
    Machine {
        key,
        hostname: "probe".to_owned(),
        root: RootFs {
            layers_dir: scratch.join("layers"),
            lower: Vec::new(),
            writable_dir: scratch.join("writable"),
            upper: "upper".into(),
            work: "work".into(),
            image: 0,
        },
        uids: UidRange { base: 2_000_000_000, count: 65_536 },
        limits: Limits {
            millicpus: 1000,
            memory: Size(128 << 20),
            pids: 32,
            file_size: Size(32 << 20),
        },
        mounts: Vec::new(),
    }
}

fn good(name: &'static str, detail: String) -> Check {
    Check { name, ok: true, detail, fix: None }
}

fn bad(name: &'static str, detail: String, fix: &str) -> Check {
    Check { name, ok: false, detail, fix: Some(fix.to_owned()) }
}
