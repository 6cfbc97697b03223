//! The yardsticks: what others take for the same on this machine.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::Outcome;
use super::stats::Table;

const PODMAN: [&str; 4] = ["--runtime", "runc", "--cgroup-manager=cgroupfs", "--log-level=error"];
const RUN: [&str; 6] =
    ["--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"];

/// Measures bubblewrap and podman.
pub(crate) fn run(
    table: &mut Table,
    bare: &Bare,
    scratch: &Path,
    tree: &Path,
    rounds: usize,
) -> Outcome<()> {
    bubblewrap(table, &bare.lower, rounds)?;
    podman(table, &scratch.join("yardstick.tar"), tree, scratch, rounds)
}

/// The bare yardstick. It is measured all through the run, between the rounds of what is compared with it: a machine that is busy for a
/// while is so for both.
#[derive(Debug)]
pub(crate) struct Bare {
    program: PathBuf,
    lower: PathBuf,
    room: PathBuf,
    times: Mutex<Vec<Duration>>,
}

impl Bare {
    /// Unpacks what it runs.
    pub(crate) fn new(program: PathBuf, scratch: &Path) -> Outcome<Self> {
        let (lower, tar) = (scratch.join("yardstick-root"), scratch.join("yardstick.tar"));
        std::fs::create_dir_all(&lower)?;
        sandkeep_testkit::root::small_root_tar(&tar)?;
        quiet(Command::new("tar").arg("-xf").arg(&tar).arg("-C").arg(&lower))?;
        Ok(Self { program, lower, room: scratch.join("bare"), times: Mutex::default() })
    }

    /// Measures it once.
    pub(crate) fn measure(&self) -> Outcome<()> {
        let mut yardstick = Command::new(&self.program);
        let output = yardstick.arg(&self.lower).arg(&self.room).arg("/bin/true").output()?;
        let micros: u64 = String::from_utf8_lossy(&output.stdout)
            .trim()
            .parse()
            .map_err(|_| format!("yardstick: {}", String::from_utf8_lossy(&output.stderr)))?;
        std::fs::remove_dir_all(&self.room)?;
        let mut times = self.times.lock();
        times.push(Duration::from_micros(micros));
        Ok(())
    }

    /// All that was measured.
    pub(crate) fn times(&self) -> Vec<Duration> {
        self.times.lock().clone()
    }

    /// What was measured since there were `count`.
    pub(crate) fn since(&self, count: usize) -> Vec<Duration> {
        self.times().split_off(count.min(self.times().len()))
    }
}

fn bubblewrap(table: &mut Table, lower: &Path, rounds: usize) -> Outcome<()> {
    if !installed("bwrap") {
        table.note("bubblewrap is not installed: left out");
        return Ok(());
    }
    let times = repeat(rounds, || {
        let mut bwrap = Command::new("bwrap");
        bwrap.args(["--unshare-all", "--die-with-parent", "--ro-bind"]).arg(lower).args([
            "/",
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "/bin/true",
        ]);
        bwrap
    })?;
    table.add("(bubblewrap) run", &times);
    Ok(())
}

fn podman(
    table: &mut Table,
    tar: &Path,
    tree: &Path,
    scratch: &Path,
    rounds: usize,
) -> Outcome<()> {
    if !installed("podman") || !installed("runc") {
        table.note("podman or runc is not installed: left out");
        return Ok(());
    }
    let store = scratch.join("podman");
    let run_root = scratch.join("podman-run");
    let podman = |args: &[&str]| {
        let mut command = Command::new("podman");
        command.args(PODMAN).arg("--root").arg(&store).arg("--runroot").arg(&run_root).args(args);
        command
    };
    let tar = tar.to_string_lossy();
    quiet(&mut podman(&["import", &tar, "bench-small"]))?;
    let with_run = |more: &[&str]| {
        let mut args = vec!["run"];
        args.extend(RUN);
        args.extend(more);
        podman(&args)
    };
    let rounds = rounds.min(15);
    table.add("(podman) run", &repeat(rounds, || with_run(&["--rm", "bench-small", "/bin/true"]))?);
    quiet(&mut with_run(&["-d", "--name", "bench-box", "bench-small", "/bin/sleep", "1000"]))?;
    table.add("(podman) exec", &repeat(rounds, || podman(&["exec", "bench-box", "/bin/true"]))?);
    let tree = tree.to_string_lossy();
    let mut unpack = podman(&["cp", "-", "bench-box:/work"]);
    quiet(unpack.stdin(std::fs::File::open(&*tree)?))?;
    let began = Instant::now();
    quiet(&mut podman(&["commit", "-q", "bench-box", "bench-large"]))?;
    table.add("(podman) commit, 30,000 new files", &[began.elapsed()]);
    table.add(
        "(podman) run from that commit",
        &repeat(rounds, || with_run(&["--rm", "bench-large", "/bin/true"]))?,
    );
    quiet(&mut podman(&["rm", "-f", "-t", "0", "bench-box"]))?;
    quiet(&mut podman(&["rmi", "-f", "bench-large", "bench-small"]))?;
    quiet(&mut podman(&["system", "reset", "-f"]))?;
    Ok(())
}

fn installed(program: &str) -> bool {
    Command::new(program)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok()
}

fn repeat(rounds: usize, mut make: impl FnMut() -> Command) -> Outcome<Vec<Duration>> {
    let mut times = Vec::new();
    for _ in 0..rounds {
        let mut command = make();
        let began = Instant::now();
        quiet(&mut command)?;
        times.push(began.elapsed());
    }
    Ok(times)
}

fn quiet(command: &mut Command) -> Outcome<()> {
    let output = command.stdout(Stdio::piped()).stderr(Stdio::piped()).output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{:?}: {}", command.get_program(), String::from_utf8_lossy(&output.stderr)).into())
}
