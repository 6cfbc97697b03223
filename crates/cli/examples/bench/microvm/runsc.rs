//! runsc, gVisor's runtime: a kernel in user space that can checkpoint and restore what runs on it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Outcome, Table};

pub(super) fn run(table: &mut Table, scratch: &Path, rounds: usize) -> Outcome<()> {
    if Command::new("runsc").arg("--version").output().is_err() {
        table.note("runsc is not installed: left out");
        return Ok(());
    }
    let runsc = Runsc { scratch: scratch.join("runsc") };
    runsc.prepare()?;
    let (mut runs, mut execs) = (Vec::new(), Vec::new());
    let (mut checkpoints, mut restores) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let (id, again) = (format!("a{round}"), format!("b{round}"));
        let image = runsc.scratch.join(format!("image-{round}"));
        let image = image.to_str().ok_or("a plain path")?;
        let began = Instant::now();
        runsc.detached(&["run", "-detach", "-bundle"], &id)?;
        runsc.ok(&["exec", &id, "/bin/true"])?;
        runs.push(began.elapsed());
        execs.push(runsc.timed(&["exec", &id, "/bin/true"])?);
        checkpoints.push(runsc.timed(&["checkpoint", "-image-path", image, &id])?);
        runsc.ok(&["delete", "-force", &id])?;
        let began = Instant::now();
        runsc.detached(&["restore", "-detach", "-image-path", image, "-bundle"], &again)?;
        runsc.ok(&["exec", &again, "/bin/true"])?;
        restores.push(began.elapsed());
        runsc.ok(&["kill", &again, "KILL"])?;
        runsc.ok(&["delete", "-force", &again])?;
        fs::remove_dir_all(image)?;
    }
    table.add("(runsc) run → first command", &runs);
    table.add("(runsc) command in a running sandbox", &execs);
    table.add("(runsc) checkpoint", &checkpoints);
    table.add("(runsc) restore → first command", &restores);
    Ok(())
}

struct Runsc {
    scratch: PathBuf,
}

impl Runsc {
    fn bundle(&self) -> PathBuf {
        self.scratch.join("bundle")
    }

    fn prepare(&self) -> Outcome<()> {
        let root = self.bundle().join("rootfs");
        fs::create_dir_all(&root)?;
        let tar = self.scratch.join("root.tar");
        sandkeep_testkit::root::small_root_tar(&tar)?;
        succeed(Command::new("tar").arg("-xf").arg(&tar).arg("-C").arg(&root))?;
        succeed(
            Command::new("runsc")
                .args(["spec", "--", "/bin/sleep", "100000"])
                .current_dir(self.bundle()),
        )?;
        let path = self.bundle().join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path)?)?;
        config["process"]["terminal"] = json!(false);
        fs::write(&path, config.to_string())?;
        Ok(())
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("runsc");
        command.arg("--root").arg(self.scratch.join("state"));
        command.args(["--platform=ptrace", "--ignore-cgroups", "--network=none"]).args(args);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    }

    fn ok(&self, args: &[&str]) -> Outcome<()> {
        succeed(&mut self.command(args))
    }

    fn timed(&self, args: &[&str]) -> Outcome<Duration> {
        let began = Instant::now();
        self.ok(args)?;
        Ok(began.elapsed())
    }

    /// One that leaves a sandbox behind, which holds what it was given as output.
    fn detached(&self, args: &[&str], id: &str) -> Outcome<()> {
        let mut command = self.command(args);
        let done = command.arg(self.bundle()).arg(id).stderr(Stdio::null()).status()?;
        if done.success() { Ok(()) } else { Err(format!("runsc {args:?}: {done}").into()) }
    }
}

fn succeed(command: &mut Command) -> Outcome<()> {
    let done = command.stderr(Stdio::piped()).output()?;
    if done.status.success() {
        return Ok(());
    }
    Err(format!("{command:?}: {}", String::from_utf8_lossy(&done.stderr)).into())
}
