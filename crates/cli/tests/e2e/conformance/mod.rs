//! How a suite of another language is run: its programs, its daemon, its results.

mod control;
mod table;

use std::fs;
use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use sandkeep_testkit::daemon::{Daemon, skipped, unfit};
use serde_json::Value;

pub(crate) use control::Control;
use table::Row;

/// Far longer than any suite takes.
const PATIENCE: Duration = Duration::from_secs(900);

/// A suite of one client at one version.
#[derive(Debug)]
pub(crate) struct Suite {
    language: Language,
    /// Its folder in `conformance/vercel`.
    folder: &'static str,
    /// The folder its package is installed in.
    installed: &'static str,
    /// The package it is about; empty if it is about none.
    package: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Language {
    Node,
    Python { surface: &'static str },
}

impl Suite {
    pub(crate) fn node(
        folder: &'static str,
        installed: &'static str,
        package: &'static str,
    ) -> Self {
        Self { language: Language::Node, folder, installed, package }
    }

    pub(crate) fn python(surface: &'static str) -> Self {
        let language = Language::Python { surface };
        Self { language, folder: "python", installed: "python", package: "vercel-sandbox" }
    }

    /// Runs all of it: what can share a daemon first, then what kills it.
    pub(crate) fn run(&self, test: &str) {
        let Some(packages) = packages(test) else { return };
        let outside = Outside::new();
        let settings = [("SANDKEEP_CONFIG", outside.settings.to_str().unwrap())];
        let mut daemon = Daemon::start_with(env!("CARGO_BIN_EXE_keep"), &settings);
        daemon.keep_address();
        let scratch = daemon.scratch().to_path_buf();
        let environment = environment(&daemon);
        let daemon = Arc::new(Mutex::new(daemon));
        let control = Control::open(&scratch.join("control.sock"), Arc::clone(&daemon));
        let (crash, together): (Vec<_>, Vec<_>) =
            self.files().into_iter().partition(|file| file.contains("crash"));
        let (mut problems, mut results) = (Vec::new(), String::new());
        for files in [together, crash].iter().filter(|files| !files.is_empty()) {
            let told = scratch.join("results");
            let mut command = self.command(&packages, files, &told);
            command.envs(environment.iter().cloned());
            command.env("CONFORMANCE_PACKAGES", &packages);
            command.env("TMPDIR", &scratch);
            command.env("CONFORMANCE_OUTSIDE", outside.port.to_string());
            command.env("CONFORMANCE_CONTROL", &control.path);
            problems.extend(finish(command, &scratch.join("output")).err());
            results += &fs::read_to_string(&told).unwrap_or_default();
            let _ = fs::remove_file(told);
        }
        drop(control);
        let log = daemon.lock().unwrap().log();
        assert!(
            problems.is_empty(),
            "{}\n--- the end of the daemon's log\n{}",
            problems.join("\n"),
            end_of(&log, 8000)
        );
        self.row(&results).check();
    }

    /// The files with tests in them.
    fn files(&self) -> Vec<String> {
        let place = sources().join(self.folder);
        let names = fs::read_dir(&place).unwrap().map(|entry| entry.unwrap().file_name());
        let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
        names.retain(|name| match self.language {
            Language::Node => name.ends_with(".test.mjs"),
            Language::Python { .. } => name.starts_with("test_") && name.ends_with(".py"),
        });
        names.sort();
        assert!(!names.is_empty(), "no tests in {}", place.display());
        names
    }

    fn command(&self, packages: &Path, files: &[String], results: &Path) -> Command {
        let place = sources().join(self.folder);
        match self.language {
            Language::Node => {
                let mut command = Command::new(node(packages));
                let report = sources().join("report.mjs");
                // Two files at a time: what they wait for is the daemon, not each other.
                command.args(["--test", "--test-concurrency=2"]);
                command.args(["--test-reporter=spec", "--test-reporter-destination=stdout"]);
                command.arg(format!("--test-reporter={}", report.display()));
                command.arg(format!("--test-reporter-destination={}", results.display()));
                command.args(files.iter().map(|file| place.join(file)));
                command.env("CONFORMANCE_SDK", self.installed);
                command.env("CONFORMANCE_PACKAGE", self.package_version(packages));
                command
            }
            Language::Python { surface } => {
                let mut command = Command::new(packages.join("python/bin/python"));
                command.arg("-B").arg(place.join("run.py"));
                command.args(files.iter().map(|file| file.trim_end_matches(".py")));
                command.env("CONFORMANCE_SURFACE", surface);
                command.env("CONFORMANCE_RESULTS", results);
                command
            }
        }
    }

    fn package_version(&self, packages: &Path) -> String {
        if self.package.is_empty() {
            return String::new();
        }
        let manifest = packages.join(self.installed).join("node_modules").join(self.package);
        let text = fs::read(manifest.join("package.json")).unwrap();
        let manifest: Value = serde_json::from_slice(&text).unwrap();
        format!("{} {}", self.package, manifest["version"].as_str().unwrap())
    }

    fn row(&self, results: &str) -> Row {
        let package = self.package;
        let what = match (self.language, self.installed) {
            (Language::Python { surface }, _) => format!("`{package}`, {surface}"),
            (Language::Node, "sdk-2") => format!("`{package}` 2.x"),
            (Language::Node, "sdk-3") => format!("`{package}` 3.x"),
            (Language::Node, _) if package.is_empty() => "plain HTTP requests".to_owned(),
            (Language::Node, _) => format!("`{package}`, the command line"),
        };
        Row::of(what, results)
    }
}

/// A port of this host's loopback that sandboxes may reach, for a server of the suite's own.
struct Outside {
    port: u16,
    settings: PathBuf,
    _dir: tempfile::TempDir,
}

impl Outside {
    fn new() -> Self {
        let port = port_for_later();
        let dir = tempfile::TempDir::with_prefix("keep-e2e-").unwrap();
        let settings = dir.path().join("keep.toml");
        fs::write(&settings, format!("[network]\nexcept = [\"127.0.0.1:{port}\"]\n")).unwrap();
        Self { port, settings, _dir: dir }
    }
}

/// A port of the loopback that is free and stays so until a suite listens on it: below those the kernel
/// assigns to programs that ask for any, and apart from what suites in other processes begin with.
fn port_for_later() -> u16 {
    let first = std::process::id() % 10_000;
    let mut ports = (0..10_000).map(|step| 20_000 + ((first + step) % 10_000) as u16);
    ports.find(|port| TcpListener::bind(("0.0.0.0", *port)).is_ok()).unwrap()
}

/// Where the suites are.
fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../conformance/vercel").canonicalize().unwrap()
}

/// Where the packages are installed, or nothing if this test cannot run here.
fn packages(test: &str) -> Option<PathBuf> {
    if let Some(why) = unfit() {
        skipped(test, why);
        return None;
    }
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("conformance/vercel");
    if place.join("stamp").exists() {
        return Some(place);
    }
    let why = format!(
        "the published packages are not installed; `./dev test` does it, or `conformance/vercel/install {}`",
        place.display()
    );
    // A host with these installed must run these tests.
    assert!(std::env::var_os("SANDKEEP_CONFORMANCE").is_none(), "{why}");
    skipped(test, &why);
    None
}

pub(crate) fn node(packages: &Path) -> PathBuf {
    let place = fs::read_to_string(packages.join("node-path")).unwrap();
    Path::new(place.trim()).join("node")
}

/// What `keep env vercel` prints, and a home where nobody is logged in.
fn environment(daemon: &Daemon) -> Vec<(String, String)> {
    let home = daemon.scratch().join("home");
    fs::create_dir(&home).unwrap();
    let output = daemon
        .command(["--json", "env", "vercel"])
        .env("HOME", &home)
        .env_remove("XDG_DATA_HOME")
        .env_remove("NODE_OPTIONS")
        .env_remove("PYTHONPATH")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let mut variables: Vec<(String, String)> = printed
        .as_object()
        .unwrap()
        .iter()
        .map(|(name, value)| (name.clone(), text(value)))
        .collect();
    // Node has WebSocket by itself from 22 on, and 20 behind a flag; so every Node runs the same cases.
    for (_, options) in variables.iter_mut().filter(|(name, _)| name == "NODE_OPTIONS") {
        options.push_str(" --experimental-websocket");
    }
    variables.push(("HOME".to_owned(), home.display().to_string()));
    variables.push(("SANDKEEP_KEY".to_owned(), daemon.url_and_key().1));
    variables
}

/// Runs a program to its end; its output if it failed.
pub(crate) fn finish(mut command: Command, output: &Path) -> Result<(), String> {
    let file = fs::File::create(output).unwrap();
    command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
    // In a group of its own, so that what it started goes with it.
    let mut group = Group(command.process_group(0).spawn().unwrap());
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        match group.0.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if Instant::now() > deadline => break None,
            None => sleep(Duration::from_millis(50)),
        }
    };
    drop(group);
    let said = fs::read_to_string(output).unwrap_or_default();
    match status {
        Some(status) if status.success() => Ok(()),
        Some(status) => Err(format!("the suite failed: {status}\n{said}")),
        None => Err(format!("the suite did not come to an end\n{said}")),
    }
}

/// A program and all it started.
#[derive(Debug)]
struct Group(Child);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.0.wait();
    }
}

fn end_of(text: &str, bytes: usize) -> &str {
    let from = text.len().saturating_sub(bytes);
    &text[(from..text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len())..]
}

/// The unit tests of `sdk/vercel-preload`.
pub(crate) fn preload(test: &str) {
    let Some(packages) = packages(test) else { return };
    let home = tempfile::TempDir::with_prefix("keep-e2e-").unwrap();
    let mut command = Command::new(node(&packages));
    command.args(["--test", "test/preload.test.mjs"]);
    command.current_dir(sources().join("../../sdk/vercel-preload"));
    finish(command, &home.path().join("output")).unwrap_or_else(|said| panic!("{said}"));
}

/// The unit tests of `sdk/vercel-python`.
pub(crate) fn python_helper(test: &str) {
    let Some(packages) = packages(test) else { return };
    let home = tempfile::TempDir::with_prefix("keep-e2e-").unwrap();
    let mut command = Command::new(packages.join("python/bin/python"));
    command.args(["-B", "-m", "unittest", "-v", "test_sandkeep_vercel"]);
    command.current_dir(sources().join("../../sdk/vercel-python"));
    finish(command, &home.path().join("output")).unwrap_or_else(|said| panic!("{said}"));
}
