//! Campaigns of faults against a real daemon, driven over HTTP and judged by a model.
//!
//! A campaign has a data directory on a [`FaultDisk`] and several clients, each with sandboxes of its own. In every
//! round the clients ask for random things at the same time, until something goes wrong: the daemon is
//! killed, the power is cut, writes fail or hang, the disk is full. Then the daemon is started again and
//! everything that was ever acknowledged is looked at (`check.rs`), against what the model (`model.rs`)
//! knows to have been acknowledged.
//!
//! What counts as a loss:
//!
//! - a sandbox or snapshot that was acknowledged is gone, or does not start;
//! - a generation is lower than one that was returned before;
//! - a file of an acknowledged snapshot is not what it was, byte for byte;
//! - after the end of the daemon alone: a file that an acknowledged command wrote is not what it was;
//! - something whose deletion was acknowledged exists again.
//!
//! A request that failed, or had no answer, may have been done or not. Errors of the server in quiet times, and
//! verdicts of `keep fsck` that are wrong, are findings, but no losses.
//!
//! The seed decides what clients ask for, the faults and what a cut leaves on the disk. Requests of several
//! clients interleave as they please, so the same seed gives a similar run, not the same.

mod check;
mod model;
mod report;
mod worker;

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use sandkeep_client::{Client, ListSandboxes};
use tokio::runtime::Runtime;

pub use model::MARK;
pub use report::{FaultKind, Operation, Report, Violation};

use crate::daemon::Daemon;
use crate::fault_disk::{Fault, FaultDisk, Filesystem};
use crate::machine::TestKernel;
use crate::random::Random;
use check::{Depth, Finding};
use worker::{Phase, Worker};

/// How long reads of the API may take while writes hang.
const READ_WHILE_HANGING: Duration = Duration::from_secs(3);

/// What a campaign is like.
#[derive(Debug, Clone)]
pub struct Campaign {
    /// The program, usually `env!("CARGO_BIN_EXE_keep")`.
    pub keep: PathBuf,
    /// The filesystem of the data directory.
    pub filesystem: Filesystem,
    /// The kernel of machines, for sandboxes of the `microvm` driver; containers without.
    pub kernel: Option<TestKernel>,
    /// Where randomness comes from.
    pub seed: u64,
    /// Faults to choose from.
    pub faults: Vec<FaultKind>,
    /// How many clients there are.
    pub clients: usize,
    /// No more rounds than these.
    pub rounds: u64,
    /// No new round after this long.
    pub time: Duration,
    /// How many older snapshots of a client are resumed after every fault.
    pub snapshots: usize,
}

impl Campaign {
    /// A campaign with containers and all faults.
    #[must_use]
    pub fn new(keep: impl Into<PathBuf>, filesystem: Filesystem, seed: u64) -> Self {
        Self {
            keep: keep.into(),
            filesystem,
            kernel: None,
            seed,
            faults: FaultKind::ALL.to_vec(),
            clients: 4,
            rounds: u64::MAX,
            time: Duration::from_secs(60),
            snapshots: 3,
        }
    }

    /// Runs it.
    ///
    /// # Panics
    ///
    /// Panics when the campaign itself cannot continue: no disk, no daemon on an empty directory.
    #[must_use]
    pub fn run(&self) -> Report {
        let mut running = CampaignRun::start(self);
        let began = Instant::now();
        let mut rounds = 0;
        while rounds < self.rounds && began.elapsed() < self.time {
            rounds += 1;
            if !running.round(rounds) {
                break;
            }
        }
        running.finish(rounds);
        let driver = self.driver();
        let (filesystem, seed) = (self.filesystem.name(), self.seed);
        let took = began.elapsed().as_secs();
        let line = format!("{driver} on {filesystem}, seed {seed}: {rounds} rounds in {took} s");
        running.report.campaigns.push(line);
        std::mem::take(&mut running.report)
    }

    const fn driver(&self) -> &'static str {
        match self.kernel {
            Some(_) => "microvm",
            None => "container",
        }
    }

    /// How long one request may take.
    const fn patience(&self) -> Duration {
        match self.kernel {
            // Without hardware support a machine takes long to boot.
            Some(_) => Duration::from_secs(180),
            None => Duration::from_secs(30),
        }
    }
}

/// Says something in a campaign's log.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "chaos: {text}");
}

/// What `keep fsck` says is broken.
fn problems(said: &str) -> impl Iterator<Item = &str> {
    said.lines().filter_map(|line| line.strip_prefix("PROBLEM")).map(str::trim)
}

/// How a round ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Terminate,
    Kill,
    Cut,
    CutTwice,
}

struct CampaignRun<'a> {
    campaign: &'a Campaign,
    runtime: Runtime,
    random: Random,
    workers: Vec<Worker>,
    report: Report,
    /// Problems that `keep fsck` reported.
    told: BTreeSet<String>,
    // Before the disk it is on.
    daemon: Daemon,
    disk: FaultDisk,
}

impl<'a> CampaignRun<'a> {
    fn start(campaign: &'a Campaign) -> Self {
        let mut random = Random::new(campaign.seed);
        say(&format!(
            "{} on {}, seed {}",
            campaign.driver(),
            campaign.filesystem.name(),
            campaign.seed
        ));
        let size = if campaign.kernel.is_some() { 4 << 30 } else { 1 << 30 };
        let disk = FaultDisk::with_size(campaign.filesystem, size);
        let data = disk.path().join("data");
        let daemon = match &campaign.kernel {
            Some(kernel) => Daemon::with_machines_at(&campaign.keep, data, kernel, &[]),
            None => Daemon::start_at(&campaign.keep, data, &[]),
        };
        daemon.import_small();
        let worker =
            |index| Worker::new(index, random.next(), campaign.driver(), campaign.patience());
        let workers = (0..campaign.clients).map(worker).collect();
        let runtime = Runtime::new().expect("a runtime");
        let (report, told) = (Report::default(), BTreeSet::new());
        Self { campaign, runtime, random, workers, report, told, daemon, disk }
    }

    fn client(&self) -> Client {
        let (url, key) = self.daemon.url_and_key();
        Client::new(url.parse().expect("an address"), Some(&key)).expect("a key")
    }

    fn pause(&mut self, from: u64, to: u64) {
        let slower = if self.campaign.kernel.is_some() { 20 } else { 1 };
        let time = from + self.random.below(to - from);
        sleep(Duration::from_millis(time * slower));
    }

    /// One fault. Returns whether the campaign can continue.
    fn round(&mut self, round: u64) -> bool {
        let fault = *self.random.pick(&self.campaign.faults);
        self.report.round(fault);
        let phase = Arc::new(Phase::default());
        let client = self.client();
        let tasks: Vec<_> = std::mem::take(&mut self.workers)
            .into_iter()
            .map(|worker| self.runtime.spawn(worker.work(client.clone(), Arc::clone(&phase))))
            .collect();
        self.pause(300, 2000);
        let mut findings = Vec::new();
        let end = self.disturb(fault, &client, &phase, &mut findings);
        phase.set(Phase::FAULTY);
        let lossy = matches!(end, End::Cut | End::CutTwice);
        self.take_down(end, &phase);
        phase.set(Phase::OVER);
        for task in tasks {
            let patience = self.campaign.patience() * 2;
            let joined =
                self.runtime.block_on(async { tokio::time::timeout(patience, task).await });
            self.workers.push(joined.expect("requests have an end").expect("no panic"));
        }
        for worker in &mut self.workers {
            for (operation, acknowledged) in worker.asked.drain(..) {
                self.report.count(fault, operation, acknowledged);
            }
            for (operation, what) in worker.surprises.drain(..) {
                let what = format!("client {} in quiet times: {what}", worker.index);
                findings.push(Finding { lost: false, operation, what });
            }
        }
        if lossy && self.random.percent(50) {
            self.fsck("right after the cut", &[], &mut findings);
        }
        let up = self.come_up(fault, &mut findings);
        if up {
            self.check(lossy, &mut findings);
            if self.random.percent(40) {
                self.daemon.terminate();
                self.fsck("after the daemon had recovered", &["--verify"], &mut findings);
                if let Err(error) = self.daemon.try_launch() {
                    let what = format!("the daemon does not start again: {error}");
                    findings.push(Finding { lost: true, operation: Operation::Start, what });
                    self.note(round, fault, findings);
                    return false;
                }
            }
        }
        self.note(round, fault, findings);
        up
    }

    /// Lets the fault happen, up to the way the daemon goes down.
    fn disturb(
        &mut self,
        fault: FaultKind,
        client: &Client,
        phase: &Phase,
        findings: &mut Vec<Finding>,
    ) -> End {
        let late = if self.random.percent(50) { End::Kill } else { End::Cut };
        match fault {
            FaultKind::Restart => return End::Terminate,
            FaultKind::Kill => return End::Kill,
            FaultKind::Cut => return End::Cut,
            FaultKind::CutTwice => return End::CutTwice,
            FaultKind::DataErrors | FaultKind::WriteErrors => {
                phase.set(Phase::FAULTY);
                let what = match fault {
                    FaultKind::DataErrors => Fault::writes().containing(MARK),
                    _ => Fault::writes(),
                };
                self.disk.inject(what);
                self.pause(300, 3000);
                self.disk.heal_all();
                self.pause(200, 2000);
                return End::Cut;
            }
            FaultKind::Hang => {
                phase.set(Phase::FAULTY);
                self.disk.inject(Fault::writes().hang());
                self.pause(200, 800);
                let began = Instant::now();
                let listed = self.runtime.block_on(async {
                    let list = client.sandboxes(&ListSandboxes::default()).collect(None);
                    tokio::time::timeout(READ_WHILE_HANGING, list).await
                });
                if !matches!(listed, Ok(Ok(_))) {
                    let time = began.elapsed().as_millis();
                    let what = format!("while writes hang, no list of sandboxes in {time} ms");
                    findings.push(Finding { lost: false, operation: Operation::Read, what });
                }
                self.pause(200, 2000);
                self.disk.heal_all();
                self.pause(100, 1000);
            }
            FaultKind::Full => {
                phase.set(Phase::FAULTY);
                let free = self.random.below(80) * 4096;
                if let Err(error) = self.disk.fill(free) {
                    say(&format!("the disk cannot be filled: {error}"));
                }
                self.pause(300, 2000);
                if let Err(error) = self.disk.empty() {
                    say(&format!("the disk cannot be emptied: {error}"));
                }
                self.pause(200, 1500);
            }
        }
        late
    }

    fn take_down(&mut self, end: End, phase: &Phase) {
        match end {
            End::Terminate => self.daemon.terminate(),
            End::Kill => self.daemon.kill(),
            End::Cut | End::CutTwice => {
                self.cut();
                // No answer comes any more.
                phase.set(Phase::OVER);
                if end == End::CutTwice {
                    self.daemon.spawn();
                    self.pause(0, 600);
                    self.cut();
                }
            }
        }
    }

    /// A power cut: nothing is acknowledged after the instant at which the disk stops.
    fn cut(&mut self) {
        let pid = self.daemon.pid().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        if let Some(pid) = pid {
            let _ = kill_process(pid, Signal::STOP);
        }
        self.disk.cut(self.random.next());
        self.daemon.kill();
        self.disk.kill_users();
        self.disk.power_on();
    }

    /// Starts the daemon. If that fails, tries what an operator would: a restart of the host, a new index.
    fn come_up(&mut self, fault: FaultKind, findings: &mut Vec<Finding>) -> bool {
        let began = Instant::now();
        let Err(error) = self.daemon.try_launch() else {
            self.report.recovered(fault, began.elapsed());
            return true;
        };
        let last = error.lines().last().unwrap_or_default();
        let what = format!("the daemon does not start: {last}");
        findings.push(Finding { lost: true, operation: Operation::Start, what });
        self.cut();
        if self.daemon.try_launch().is_ok() {
            say("it does after a restart of the host");
            return true;
        }
        self.daemon.kill();
        let rebuilt = self.daemon.keep(["fsck", "--rebuild"]);
        let said = String::from_utf8_lossy(&rebuilt.stdout);
        say(&format!("fsck --rebuild says {} problems", problems(&said).count()));
        self.daemon.try_launch().is_ok()
    }

    fn check(&mut self, lossy: bool, findings: &mut Vec<Finding>) {
        let client = self.client();
        let depth = Depth {
            lossy,
            snapshots: self.campaign.snapshots,
            patience: self.campaign.patience(),
            driver: self.campaign.driver(),
        };
        for worker in &mut self.workers {
            let mut random = self.random.fork();
            let checked = check::client(&client, worker, depth, &mut random, findings);
            self.report.snapshots_compared += self.runtime.block_on(checked);
        }
    }

    /// Runs `keep fsck` while no daemon has the directory.
    fn fsck(&mut self, when: &str, options: &[&str], findings: &mut Vec<Finding>) {
        let output = self.daemon.keep(["fsck"].iter().chain(options));
        if output.status.success() {
            return;
        }
        let said = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        let first = errors.lines().next().unwrap_or_default();
        let all: Vec<&str> = problems(&said).collect();
        if all.is_empty() {
            let what = format!("fsck {options:?} {when}: {first}");
            findings.push(Finding { lost: false, operation: Operation::Read, what });
            return;
        }
        // Each problem once in a campaign: most stay there.
        let new: Vec<&str> =
            all.into_iter().filter(|problem| self.told.insert((*problem).to_owned())).collect();
        if new.is_empty() {
            return;
        }
        let shown: Vec<&str> = new.iter().copied().take(4).collect();
        let (count, shown) = (new.len(), shown.join("; "));
        let what = format!("fsck {options:?} {when}: {count} new problems: {shown}");
        findings.push(Finding { lost: false, operation: Operation::Read, what });
    }

    fn note(&mut self, round: u64, fault: FaultKind, findings: Vec<Finding>) {
        for Finding { lost, operation, what } in findings {
            let kind = if lost { "LOST" } else { "WRONG" };
            let (operation_name, fault_name) = (operation.name(), fault.name());
            say(&format!("round {round}, {fault_name}: {kind} ({operation_name}) {what}"));
            self.report.violation(Violation { lost, operation, round, fault, what });
        }
    }

    /// Looks at every snapshot there is, then deletes everything.
    fn finish(&mut self, round: u64) {
        let mut findings = Vec::new();
        let fault = FaultKind::Restart;
        if self.daemon.is_alive() {
            let client = self.client();
            self.runtime.block_on(check::delete_all(&client, &mut findings));
            self.daemon.terminate();
            self.fsck("after everything was deleted", &["--verify"], &mut findings);
            if let Err(error) = self.daemon.try_launch() {
                let what = format!("the daemon does not start when all is over: {error}");
                findings.push(Finding { lost: false, operation: Operation::Start, what });
            }
        }
        if !findings.is_empty() || !self.report.violations.is_empty() {
            self.keep_log();
        }
        self.note(round, fault, findings);
    }

    /// Keeps the daemon's log of a campaign that found something.
    fn keep_log(&self) {
        let Ok(tests) = std::env::current_exe() else { return };
        let Some(target) = tests.ancestors().find(|place| place.ends_with("target")) else {
            return;
        };
        let (filesystem, seed) = (self.campaign.filesystem.name(), self.campaign.seed);
        let place = target.join("chaos");
        let file = place.join(format!("{}-{filesystem}-{seed}.log", self.campaign.driver()));
        let _ = std::fs::create_dir_all(&place);
        match std::fs::write(&file, self.daemon.log()) {
            Ok(()) => say(&format!("the daemon's log: {}", file.display())),
            Err(error) => say(&format!("the daemon's log cannot be kept: {error}")),
        }
    }
}
