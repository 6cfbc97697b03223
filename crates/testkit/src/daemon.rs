//! A real `keep serve` for end-to-end tests, and the real `keep` to talk to it.
//!
//! Every daemon has a data directory of its own, so tests run side by side. Whatever happens in a
//! test, dropping the [`Daemon`] deletes every sandbox, ends the daemon, and leaves no process, mount
//! or directory.

use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::machine::TestKernel;
use crate::root::small_root_tar;

/// How long a daemon may take to come up or go down. Far longer than it takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// The name of the image made by [`Daemon::with_small_image`].
pub const SMALL: &str = "small";

/// Why tests that start sandboxes cannot run here, if they cannot. Say so with [`skipped`].
#[must_use]
pub fn unfit() -> Option<&'static str> {
    match rustix::process::geteuid().is_root() {
        true => None,
        false => Some("sandboxes need root"),
    }
}

/// Says that a test cannot run on this host.
pub fn skipped(test: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {why}");
}

/// A running daemon.
#[derive(Debug)]
pub struct Daemon {
    keep: PathBuf,
    child: Option<Child>,
    listen: String,
    /// Its data directory, in `home` or elsewhere.
    data: PathBuf,
    // Goes when everything in it is over.
    home: TempDir,
    environment: Vec<(String, String)>,
}

impl Daemon {
    /// Starts `keep`, which is usually `env!("CARGO_BIN_EXE_keep")`, on an empty data directory.
    #[must_use]
    pub fn start(keep: impl AsRef<Path>) -> Self {
        Self::start_with(keep, &[])
    }

    /// Starts it with more variables in its environment.
    #[must_use]
    pub fn start_with(keep: impl AsRef<Path>, environment: &[(&str, &str)]) -> Self {
        let mut daemon = Self::not_yet(keep, environment);
        daemon.launch();
        daemon
    }

    fn not_yet(keep: impl AsRef<Path>, environment: &[(&str, &str)]) -> Self {
        let home = TempDir::with_prefix("keep-e2e-").expect("a temporary directory");
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        Self {
            keep: keep.as_ref().to_path_buf(),
            child: None,
            listen: "127.0.0.1:0".to_owned(),
            data: home.path().join("data"),
            home,
            environment: environment.iter().map(own).collect(),
        }
    }

    /// Starts it on a data directory that lies elsewhere, as on a [`FaultDisk`](crate::fault_disk::FaultDisk). Its log
    /// does not lie there.
    #[must_use]
    pub fn start_at(
        keep: impl AsRef<Path>,
        data: impl Into<PathBuf>,
        environment: &[(&str, &str)],
    ) -> Self {
        let mut daemon = Self::not_yet(keep, environment);
        daemon.data = data.into();
        daemon.launch();
        daemon
    }

    /// Starts it on a host that was prepared for machines of their own, with `kernel`.
    #[must_use]
    pub fn with_machines(
        keep: impl AsRef<Path>,
        kernel: &TestKernel,
        environment: &[(&str, &str)],
    ) -> Self {
        let daemon = Self::not_yet(keep, environment);
        daemon.launch_with_machines(kernel)
    }

    /// The same on a data directory that lies elsewhere, as for [`start_at`](Self::start_at).
    #[must_use]
    pub fn with_machines_at(
        keep: impl AsRef<Path>,
        data: impl Into<PathBuf>,
        kernel: &TestKernel,
        environment: &[(&str, &str)],
    ) -> Self {
        let mut daemon = Self::not_yet(keep, environment);
        daemon.data = data.into();
        daemon.launch_with_machines(kernel)
    }

    fn launch_with_machines(mut self, kernel: &TestKernel) -> Self {
        let mut setup = self.command(["microvm", "setup", "--kernel"]);
        setup.arg(&kernel.vmlinuz).arg("--modules").arg(&kernel.modules);
        let done = setup.output().expect("keep starts");
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "a kernel for machines: {said}");
        self.launch();
        self
    }

    /// Starts it and imports a small root as the image [`SMALL`].
    #[must_use]
    pub fn with_small_image(keep: impl AsRef<Path>) -> Self {
        let daemon = Self::start(keep);
        daemon.import_small();
        daemon
    }

    /// Imports a small root as the image [`SMALL`].
    pub fn import_small(&self) {
        let tar = self.home.path().join("small.tar");
        small_root_tar(&tar).expect("a root from this host's programs");
        self.ok(["image", "import", SMALL, tar.to_str().expect("a plain path")]);
        fs::remove_file(tar).expect("our own file");
    }

    /// Makes later launches listen where this one does, for clients that do not ask again.
    pub fn keep_address(&mut self) {
        let (url, _) = self.url_and_key();
        self.listen = url.trim_start_matches("http://").to_owned();
    }

    /// Sets variables for the next [`launch`](Self::launch).
    pub fn set_environment(&mut self, environment: &[(&str, &str)]) {
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        self.environment = environment.iter().map(own).collect();
    }

    /// Starts the daemon again after [`terminate`](Self::terminate) or [`kill`](Self::kill), and
    /// waits until it answers and has recovered what the one before it left.
    ///
    /// # Panics
    ///
    /// Panics when it does not come up.
    pub fn launch(&mut self) {
        if let Err(error) = self.try_launch() {
            panic!("{error}");
        }
    }

    /// The same, for tests that continue without it.
    ///
    /// # Errors
    ///
    /// Says why it did not come up, with the end of its log.
    pub fn try_launch(&mut self) -> Result<(), String> {
        self.spawn();
        let deadline = Instant::now() + PATIENCE;
        self.wait_until(deadline, Self::answers)?;
        self.wait_until(deadline, |daemon| daemon.recovering() == Some(0))
    }

    /// Starts the daemon again and waits until it answers. It may still be recovering.
    ///
    /// # Panics
    ///
    /// Panics when it does not come up.
    pub fn launch_early(&mut self) {
        self.spawn();
        if let Err(error) = self.wait_until(Instant::now() + PATIENCE, Self::answers) {
            panic!("{error}");
        }
    }

    fn wait_until(
        &mut self,
        deadline: Instant,
        condition: impl Fn(&Self) -> bool,
    ) -> Result<(), String> {
        while !condition(self) {
            if !self.is_alive() {
                self.child = None;
                return Err(format!("the daemon ended at its start:\n{}", self.last_words()));
            }
            if Instant::now() > deadline {
                return Err(format!("the daemon does not come up:\n{}", self.last_words()));
            }
            sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// How many sandboxes the daemon still has to recover, if it answers.
    #[must_use]
    pub fn recovering(&self) -> Option<u64> {
        let (url, _) = self.try_url_and_key()?;
        let text = match url.strip_prefix("http://") {
            Some(address) => {
                let socket = std::net::TcpStream::connect(address).ok()?;
                socket.set_read_timeout(Some(PATIENCE)).ok()?;
                health(socket)?
            }
            // With TLS, the socket file is the way without.
            None => {
                let socket = UnixStream::connect(self.data().join("keep.sock")).ok()?;
                socket.set_read_timeout(Some(PATIENCE)).ok()?;
                health(socket)?
            }
        };
        let (_, body) = text.split_once("\r\n\r\n")?;
        serde_json::from_str::<Value>(body).ok()?["recovering"].as_u64()
    }

    /// Starts the daemon again, and does not wait for it.
    pub fn spawn(&mut self) {
        assert!(self.child.is_none(), "the daemon runs already");
        // What an earlier one wrote must not be taken for this one's.
        let _ = fs::remove_file(self.data().join("keep.sock"));
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.log_path())
            .expect("a log in our own directory");
        let child = Command::new(&self.keep)
            .args(["serve", "--listen", &self.listen, "--no-host-image", "--data"])
            .arg(self.data())
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .env_remove("SANDKEEP_URL")
            .env_remove("SANDKEEP_KEY")
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a second handle"))
            .stderr(log)
            .spawn()
            .expect("keep starts");
        self.child = Some(child);
    }

    fn answers(&self) -> bool {
        self.data().join("keep.sock").exists() && self.keep(["usage", "--json"]).status.success()
    }

    /// Whether the daemon runs.
    pub fn is_alive(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Ends the daemon gracefully; sandboxes keep running.
    pub fn terminate(&mut self) {
        self.end(Signal::TERM);
    }

    /// Ends the daemon as a crash would; sandboxes keep running.
    pub fn kill(&mut self) {
        self.end(Signal::KILL);
    }

    fn end(&mut self, signal: Signal) {
        let Some(mut child) = self.child.take() else { return };
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let _ = pid.map(|pid| kill_process(pid, signal));
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Ok(Some(_)) = child.try_wait() {
                return;
            }
            sleep(Duration::from_millis(10));
        }
        let _ = child.kill();
        let _ = child.wait();
    }

    /// Waits until the daemon ends by itself, as it does at a fail point.
    pub fn wait_for_death(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while self.is_alive() {
            assert!(Instant::now() < deadline, "the daemon lives on:\n{}", self.log());
            sleep(Duration::from_millis(5));
        }
        self.child = None;
    }

    /// The daemon's process id.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Its data directory.
    #[must_use]
    pub fn data(&self) -> PathBuf {
        self.data.clone()
    }

    /// The agent of a running sandbox of the container driver, by the sandbox's id.
    ///
    /// # Panics
    ///
    /// When it does not run.
    #[must_use]
    pub fn agent_of(&self, sandbox: &str) -> Pid {
        // The directory between is the server's; ids of sandboxes are unique.
        let servers = fs::read_dir("/run/sandkeep").into_iter().flatten().flatten();
        let records = servers.map(|server| server.path().join(sandbox).join("machine.json"));
        let record = records.filter_map(|path| fs::read(path).ok()).next().expect("it runs");
        let record: Value = serde_json::from_slice(&record).expect("JSON");
        let pid = record["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
        pid.and_then(Pid::from_raw).expect("a process")
    }

    /// Moves the data directory of a daemon that does not run, and has the next one work there.
    pub fn move_data(&mut self, name: &str) {
        assert!(self.child.is_none(), "the daemon runs");
        let there = self.home.path().join(name);
        fs::rename(&self.data, &there).expect("on the same filesystem");
        self.data = there;
    }

    /// A directory beside it, for a test's own files.
    #[must_use]
    pub fn scratch(&self) -> &Path {
        self.home.path()
    }

    fn log_path(&self) -> PathBuf {
        self.home.path().join("daemon.log")
    }

    /// What the daemon has printed so far.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// The end of that.
    fn last_words(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    /// Its HTTP address and a key that may do everything.
    #[must_use]
    pub fn url_and_key(&self) -> (String, String) {
        self.try_url_and_key().expect("the daemon wrote it")
    }

    fn try_url_and_key(&self) -> Option<(String, String)> {
        let text = fs::read(self.data().join("client.json")).ok()?;
        let file: Value = serde_json::from_slice(&text).ok()?;
        Some((file["url"].as_str()?.to_owned(), file["key"].as_str()?.to_owned()))
    }

    /// `keep` with these arguments, as a client of this daemon.
    #[must_use]
    pub fn command<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(&self.keep);
        command.args(args).env("SANDKEEP_DATA", self.data()).env("NO_COLOR", "1");
        command.env_remove("SANDKEEP_URL").env_remove("SANDKEEP_KEY").stdin(Stdio::null());
        command
    }

    /// Runs `keep` to its end.
    #[must_use]
    pub fn keep<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Output {
        self.command(args).output().expect("keep starts")
    }

    /// Runs `keep`, which must succeed, and returns what it printed.
    pub fn ok<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> String {
        let output = self.keep(args);
        assert!(
            output.status.success(),
            "keep failed with {:?}: {}\n--- daemon log\n{}",
            output.status.code().or(output.status.signal()),
            String::from_utf8_lossy(&output.stderr),
            self.log()
        );
        String::from_utf8(output.stdout).expect("text")
    }

    /// Runs `keep … --json`, which must succeed, and returns its answer.
    pub fn json<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Value {
        let text = self.ok(std::iter::once("--json").chain(args));
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}"))
    }

    /// Runs `keep`, which must fail, and returns its exit code and its output.
    pub fn fails<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> (i32, String) {
        let output = self.keep(args);
        let code = output.status.code().expect("an exit code");
        assert_ne!(code, 0, "keep should have failed");
        (code, String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// Runs a shell command in a sandbox, which must succeed, and returns what it printed.
    pub fn sh(&self, sandbox: &str, script: &str) -> String {
        self.ok(["exec", sandbox, "--", "sh", "-c", script])
    }

    fn clean_up(&mut self) {
        if !self.is_alive() {
            self.child = None;
            // Only a daemon can take its sandboxes down. One that cannot start has none that run.
            self.environment.clear();
            if self.try_launch().is_err() {
                self.end(Signal::KILL);
                return;
            }
        }
        let names = self.keep(["ls", "-q"]).stdout;
        let names = String::from_utf8_lossy(&names).into_owned();
        if !names.trim().is_empty() {
            let _ = self.keep(["rm"].into_iter().chain(names.lines()));
        }
        self.end(Signal::TERM);
    }
}

/// What `/healthz` answers.
fn health(mut socket: impl Read + Write) -> Option<String> {
    socket.write_all(b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n").ok()?;
    let mut text = String::new();
    socket.read_to_string(&mut text).ok()?;
    Some(text)
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = writeln!(std::io::stderr(), "--- daemon log\n{}", self.log());
        }
        self.clean_up();
        unmount_below(self.home.path());
    }
}

/// Takes away mounts that would keep a directory from being removed; the deepest first.
fn unmount_below(place: &Path) {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = table.lines().filter_map(|line| line.split(' ').nth(4)).map(Path::new);
    let mut points: Vec<&Path> = points.filter(|point| point.starts_with(place)).collect();
    points.sort_unstable();
    for point in points.into_iter().rev() {
        let _ = rustix::mount::unmount(point, rustix::mount::UnmountFlags::DETACH);
    }
}
