//! The documents: every command of every page runs, and prints what the page shows. `conformance/docs` runs them, and
//! lists the commands that no test can run.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use sandkeep_testkit::daemon::{Daemon, skipped, unfit};
use sandkeep_testkit::machine::test_kernel;
use sandkeep_testkit::root::small_root_tar;
use tempfile::TempDir;

use crate::conformance::finish;

const KEEP: &str = env!("CARGO_BIN_EXE_keep");

fn program(name: &str) -> Command {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let mut command = Command::new("python3");
    command.arg("-B").arg(root.join("conformance/docs").join(name));
    // Pages say `keep`.
    let path = std::env::var("PATH").unwrap_or_default();
    let beside = Path::new(KEEP).parent().unwrap().display();
    command.env("PATH", format!("{beside}:{path}"));
    command.env_remove("SANDKEEP_URL").env_remove("SANDKEEP_KEY").env_remove("SANDKEEP_DATA");
    command
}

/// What stands for the internet.
struct Internet {
    process: Child,
    place: TempDir,
}

impl Internet {
    fn new() -> Self {
        let place = TempDir::with_prefix("keep-e2e-").unwrap();
        let mut command = program("outside.py");
        command.arg(place.path()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().expect("there is python3");
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Self { process, place }
    }
}

impl Drop for Internet {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Pages make projects, too: their sandboxes do not outlive the test, however it ends.
struct Pages(Daemon);

impl Drop for Pages {
    fn drop(&mut self) {
        let _ = self.0.keep(["stop", "--all-projects"]);
    }
}

fn do_what_they_say(test: &str, group: &str) {
    if let Some(why) = unfit() {
        return skipped(test, why);
    }
    let internet = Internet::new();
    let settings = internet.place.path().join("keep.toml");
    let settings = [("SANDKEEP_CONFIG", settings.to_str().unwrap())];
    let mut command = program("pages.py");
    let daemon = match test_kernel() {
        Ok(kernel) if group == "reference" => {
            command.env("TEST_MACHINES", "yes");
            Daemon::with_machines(KEEP, &kernel, &settings)
        }
        _ => Daemon::start_with(KEEP, &settings),
    };
    let pages = Pages(daemon);
    let small = pages.0.scratch().join("small.tar");
    small_root_tar(&small).unwrap();
    command.arg("run").arg(pages.0.scratch().join("pages")).arg(group);
    command.env("SANDKEEP_DATA", pages.0.data()).env("SMALL_ROOT", small);
    command.env("TEST_URL", pages.0.url_and_key().0);
    let output = pages.0.scratch().join("output");
    finish(command, &output).unwrap_or_else(|said| panic!("{said}"));
    eprint!("{}", fs::read_to_string(output).unwrap());
}

#[test]
fn docs_follow_the_rules_and_every_exception_has_a_reason() {
    let scratch = TempDir::with_prefix("keep-e2e-").unwrap();
    let mut command = program("pages.py");
    command.arg("check");
    finish(command, &scratch.path().join("output")).unwrap_or_else(|said| panic!("{said}"));
}

#[test]
fn docs_guides_and_the_tutorial_do_what_they_say() {
    do_what_they_say("docs_guides_and_the_tutorial_do_what_they_say", "guides");
}

#[test]
fn docs_of_operations_do_what_they_say() {
    do_what_they_say("docs_of_operations_do_what_they_say", "operations");
}

#[test]
fn docs_reference_pages_and_the_readme_do_what_they_say() {
    do_what_they_say("docs_reference_pages_and_the_readme_do_what_they_say", "reference");
}
