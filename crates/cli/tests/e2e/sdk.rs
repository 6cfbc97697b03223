//! The SDKs, the examples and the OpenAPI file, as their users have them: `conformance/sdk` has the suites.
//!
//! What they run is installed by `./dev test`. Without it these tests say that they cannot run, except for those that need
//! nothing but Python.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use sandkeep_testkit::daemon::{Daemon, SMALL, skipped, unfit};

use crate::conformance::{Control, finish, node};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn suites() -> PathBuf {
    root().join("conformance/sdk")
}

/// Where the tools are installed, or nothing if this test cannot run here.
fn tools(test: &str) -> Option<PathBuf> {
    if let Some(why) = unfit() {
        skipped(test, why);
        return None;
    }
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("conformance/sdk");
    if place.join("stamp").exists() {
        return Some(place);
    }
    let why = format!(
        "its tools are not installed; `./dev test` does it, or `conformance/sdk/install {}`",
        place.display()
    );
    // A host with these installed must run these tests.
    assert!(std::env::var_os("SANDKEEP_CONFORMANCE").is_none(), "{why}");
    skipped(test, &why);
    None
}

/// A daemon that suites can kill, with what they need to find it.
struct Served {
    control: Option<Control>,
    daemon: Arc<Mutex<Daemon>>,
    scratch: PathBuf,
    tools: PathBuf,
}

impl Served {
    fn new(tools: PathBuf) -> Self {
        let mut daemon = Daemon::with_small_image(env!("CARGO_BIN_EXE_keep"));
        daemon.keep_address();
        let scratch = daemon.scratch().to_path_buf();
        let daemon = Arc::new(Mutex::new(daemon));
        let control = Control::open(&scratch.join("control.sock"), Arc::clone(&daemon));
        Self { control: Some(control), daemon, scratch, tools }
    }

    fn python(&self) -> Command {
        let mut command = Command::new(self.tools.join("python/bin/python"));
        command.arg("-B").env("PYTHONPATH", root().join("sdk/python/src"));
        command
    }

    fn run(&self, mut command: Command) -> String {
        let (url, key) = self.daemon.lock().unwrap().url_and_key();
        let control = &self.control.as_ref().unwrap().path;
        command.env("SANDKEEP_URL", url).env("SANDKEEP_KEY", key).env_remove("SANDKEEP_DATA");
        command.env("SANDKEEP_SDK_IMAGE", SMALL).env("SANDKEEP_SDK_CONTROL", control);
        command.env("TMPDIR", &self.scratch).env("PYTHONDONTWRITEBYTECODE", "1");
        let output = self.scratch.join("output");
        if let Err(said) = finish(command, &output) {
            let log = self.daemon.lock().unwrap().log();
            let log: String = log.lines().rev().take(40).collect::<Vec<_>>().join("\n");
            panic!("{said}\n--- the end of the daemon's log, backwards\n{log}");
        }
        fs::read_to_string(output).unwrap()
    }

    /// The package as it is published, in a `node_modules` of its own.
    fn node_package(&self) -> PathBuf {
        let package = self.scratch.join("node_modules/sandkeep");
        fs::create_dir_all(&package).unwrap();
        let sources = root().join("sdk/typescript");
        fs::copy(sources.join("package.json"), package.join("package.json")).unwrap();
        let dist = package.join("dist");
        self.run(self.tsc(&["-p", sources.to_str().unwrap(), "--outDir", dist.to_str().unwrap()]));
        package
    }

    fn tsc(&self, args: &[&str]) -> Command {
        let mut command = Command::new(node(&self.tools));
        let modules = self.tools.join("node/node_modules");
        command.arg(modules.join("typescript/bin/tsc")).args(args);
        command.arg("--typeRoots").arg(modules.join("@types"));
        command
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.control = None;
    }
}

#[test]
fn sdk_sources_are_as_generated_and_know_every_operation_and_error() {
    if Command::new("python3").arg("--version").output().is_err() {
        return skipped("sdk_sources_are_as_generated", "there is no python3");
    }
    let scratch = tempfile::TempDir::with_prefix("keep-e2e-").unwrap();
    let mut command = Command::new("python3");
    command.arg("-B").arg(suites().join("python/test_sources.py"));
    finish(command, &scratch.path().join("output")).unwrap_or_else(|said| panic!("{said}"));
}

#[test]
fn sdk_python_live() {
    let Some(tools) = tools("sdk_python_live") else { return };
    let served = Served::new(tools);
    let mut command = served.python();
    command.arg(suites().join("python/test_live.py"));
    served.run(command);
}

#[test]
fn sdk_python_streams_survive_a_killed_server() {
    let Some(tools) = tools("sdk_python_streams_survive_a_killed_server") else { return };
    let served = Served::new(tools);
    let mut command = served.python();
    command.arg(suites().join("python/test_restart.py"));
    served.run(command);
}

#[test]
fn sdk_python_is_strictly_typed() {
    let Some(tools) = tools("sdk_python_is_strictly_typed") else { return };
    let scratch = tempfile::TempDir::with_prefix("keep-e2e-").unwrap();
    let examples = root().join("examples");
    let mut command = Command::new(tools.join("python/bin/python"));
    command.args(["-B", "-m", "mypy", "--strict", "--cache-dir"]).arg(scratch.path().join("cache"));
    command.arg(root().join("sdk/python/src/sandkeep")).current_dir(root().join("sdk/python"));
    let programs = fs::read_dir(&examples).unwrap().map(|entry| entry.unwrap().path());
    command.args(programs.filter(|path| path.extension().is_some_and(|kind| kind == "py")));
    finish(command, &scratch.path().join("output")).unwrap_or_else(|said| panic!("{said}"));
}

#[test]
fn sdk_typescript_live() {
    let Some(tools) = tools("sdk_typescript_live") else { return };
    let served = Served::new(tools);
    let package = served.node_package();
    let mut command = Command::new(node(&served.tools));
    // Node has WebSocket by itself from 22 on, and 20 behind a flag.
    command.args(["--experimental-websocket", "--test", "--test-reporter=spec"]);
    command.arg(suites().join("js/live.test.mjs"));
    command.env("SANDKEEP_SDK_DIST", package.join("dist"));
    served.run(command);
}

#[test]
fn sdk_examples_do_what_they_say() {
    let Some(tools) = tools("sdk_examples_do_what_they_say") else { return };
    let served = Served::new(tools);
    let examples = root().join("examples");
    let said = |name: &str| {
        let mut command = served.python();
        command.arg(examples.join(name)).env("PYTHONUNBUFFERED", "1");
        served.run(command)
    };
    let attempts = said("agent_loop.py");
    assert!(attempts.contains("concat: failed; changed "), "{attempts}");
    assert!(attempts.contains("promoted: add() { echo $(($1 + $2)); }"), "{attempts}");
    let interpreted = said("code_interpreter.py");
    assert!(interpreted.contains("\n30\n"), "{interpreted}");
    assert!(interpreted.contains("ZeroDivisionError"), "{interpreted}");
    assert!(interpreted.contains("[exited, exit code 1]"), "{interpreted}");
    let built = said("ci_runner.py");
    assert!(built.contains("[test] 3 tests passed"), "{built}");
    for step in ["lint", "test", "build"] {
        assert!(built.contains(&format!("{step}: ok")), "{built}");
    }
    assert!(served.scratch.join("sandkeep-ci-out/app.tar").exists());
    let customers = said("per_customer.py");
    assert!(customers.contains("acme has 2 notes\n"), "{customers}");
    assert!(customers.contains("globex: stopped, generation 1"), "{customers}");
    assert!(customers.contains("acme has 3 notes"), "{customers}");

    served.node_package();
    for name in ["agent-loop.ts", "preview-server.ts", "tsconfig.json"] {
        fs::copy(examples.join(name), served.scratch.join(name)).unwrap();
    }
    fs::write(served.scratch.join("package.json"), r#"{"type": "module"}"#).unwrap();
    let settings = served.scratch.join("tsconfig.json");
    let text = fs::read_to_string(&settings).unwrap();
    let base = root().join("sdk/typescript/tsconfig.json");
    fs::write(&settings, text.replace("../sdk/typescript/tsconfig.json", base.to_str().unwrap()))
        .unwrap();
    let out = served.scratch.join("made");
    let project = served.scratch.to_str().unwrap();
    served.run(served.tsc(&["-p", project, "--outDir", out.to_str().unwrap()]));
    let said = |name: &str| {
        let mut command = Command::new(node(&served.tools));
        command.arg(out.join(name));
        served.run(command)
    };
    let attempts = said("agent-loop.js");
    assert!(attempts.contains("promoted: add() { echo $(($1 + $2)); }"), "{attempts}");
    let pages = said("preview-server.js");
    assert_eq!(pages, "<h1>Version 1</h1>\n<h1>Version 2</h1>\nrunning\n");
}

#[test]
fn openapi_passes_a_strict_linter() {
    let Some(tools) = tools("openapi_passes_a_strict_linter") else { return };
    let scratch = tempfile::TempDir::with_prefix("keep-e2e-").unwrap();
    let mut command = Command::new(node(&tools));
    command.arg(tools.join("node/node_modules/@redocly/cli/bin/cli.js")).arg("lint");
    command.arg(root().join("openapi/v1.json"));
    command.arg("--config").arg(suites().join("redocly.yaml"));
    command.env("REDOCLY_TELEMETRY", "off").env("REDOCLY_SUPPRESS_UPDATE_NOTICE", "true");
    finish(command, &scratch.path().join("output")).unwrap_or_else(|said| panic!("{said}"));
}

#[test]
fn openapi_is_taken_by_public_generators() {
    let Some(tools) = tools("openapi_is_taken_by_public_generators") else { return };
    let scratch = tempfile::TempDir::with_prefix("keep-e2e-").unwrap();
    let mut command = Command::new(tools.join("python/bin/python"));
    command.arg("-B").arg(suites().join("python/openapi.py"));
    command.arg(scratch.path()).arg(tools.join("node/node_modules"));
    finish(command, &scratch.path().join("output")).unwrap_or_else(|said| panic!("{said}"));
}
