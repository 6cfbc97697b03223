//! The daemon dies in the middle of its work, at every step of it, and comes back.
//!
//! Each case arms one fail point (`docs/CRASH-MATRIX.md` lists them), asks for something, and the
//! daemon dies there as abruptly as by kill -9. Then another daemon opens the same directory, and:
//!
//! - what was acknowledged before exists, byte for byte;
//! - what the session had written without an acknowledgement exists too, because its machine or its
//!   layer outlived the daemon;
//! - no sandbox is stuck between two phases, and every one can be used and deleted.

use sandkeep_testkit::daemon::{Daemon, SMALL, skipped, unfit};

/// Things that are hard to keep.
const TREE: &str = r#"mkdir -p /work/kept/dir && cd /work/kept && echo hello > a && ln a dir/hard && ln -s /etc/passwd link &&
    dd if=/dev/zero of=sparse bs=1 count=1 seek=1000000 2>/dev/null && chmod 4755 a && printf x > "$(printf 'new\nline')" &&
    printf y > "$(printf 'bad\377utf8')" && rm -r /home/user && echo file > /home/user && rm /etc/group"#;

/// What can be seen of it.
const DIGEST: &str = r"cd / && { find work/kept home etc ! -name 'host*' -printf '%p %y %m %n %U %G %l %s\n'; find work/kept home etc ! -name 'host*' -type f -exec sha256sum {} +; } | sort | sha256sum";

/// Where a stop can be cut short.
const STOP: [&str; 14] = [
    "seal.recorded",
    "seal.down",
    "store.seal.admitted",
    "store.seal.before_sync",
    "store.seal.before_manifest",
    "store.seal.sealed",
    "seal.sealed",
    "store.commit.before",
    "store.commit.written",
    "commit.snapshot",
    "commit.sandbox",
    "seal.done",
    "store.write.renamed:2",
    "store.write.before_rename:3",
];

struct Case {
    daemon: Daemon,
    digest: String,
    round: usize,
}

impl Case {
    fn new(test: &str) -> Option<Self> {
        if let Some(why) = unfit() {
            skipped(test, why);
            return None;
        }
        let daemon = Daemon::with_small_image(env!("CARGO_BIN_EXE_keep"));
        daemon.ok(["create", "app", "--image", SMALL, "--keep-last", "1000"]);
        daemon.sh("app", TREE);
        daemon.ok(["stop", "app"]);
        let digest = daemon.sh("app", DIGEST);
        Some(Self { daemon, digest, round: 0 })
    }

    /// Dies at `point` while doing `what`, comes back, and looks.
    fn cut(&mut self, point: &str, what: &[&str]) {
        self.round += 1;
        let pending = format!("/work/pending-{}", self.round);
        self.daemon.sh("app", &format!("echo pending > {pending}"));
        self.restart(&[("SANDKEEP_FAILPOINT", point)]);
        let _ = self.daemon.keep(what);
        self.daemon.wait_for_death();
        self.restart(&[]);
        let phases = self.phases();
        assert!(
            phases.iter().all(|phase| phase == "running" || phase == "stopped"),
            "{point}: {phases:?}"
        );
        assert_eq!(self.daemon.sh("app", DIGEST), self.digest, "{point}: what was acknowledged");
        assert_eq!(
            self.daemon.sh("app", &format!("cat {pending}")),
            "pending\n",
            "{point}: what was written"
        );
    }

    fn restart(&mut self, environment: &[(&str, &str)]) {
        if self.daemon.is_alive() {
            self.daemon.kill();
        }
        self.daemon.set_environment(environment);
        self.daemon.launch();
    }

    fn phases(&self) -> Vec<String> {
        let list = self.daemon.json(["ls"]);
        let items = list["items"].as_array().unwrap_or_else(|| list.as_array().unwrap());
        items.iter().map(|sandbox| sandbox["state"].as_str().unwrap().to_owned()).collect()
    }

    fn exists(&self, name: &str) -> bool {
        self.daemon.keep(["show", name]).status.success()
    }
}

#[test]
fn while_stopping() {
    let Some(mut case) = Case::new("while_stopping") else { return };
    for point in STOP {
        case.cut(point, &["stop", "app"]);
    }
}

#[test]
fn while_checkpointing_with_nothing_alive() {
    let Some(mut case) = Case::new("while_checkpointing_with_nothing_alive") else { return };
    for point in [
        "checkpoint.recorded",
        "checkpoint.swapped",
        "store.seal.sealed",
        "checkpoint.sealed",
        "commit.snapshot",
        "commit.sandbox",
    ] {
        case.cut(point, &["checkpoint", "app"]);
    }
}

#[test]
fn while_checkpointing_with_a_process_alive() {
    let Some(mut case) = Case::new("while_checkpointing_with_a_process_alive") else { return };
    for point in [
        "store.copy_live.copied",
        "store.publish.before_sync",
        "store.publish.before_rename",
        "checkpoint.copied",
        "commit.snapshot",
        "commit.sandbox",
    ] {
        let started = case.daemon.json([
            "exec",
            "--detach",
            "app",
            "--",
            "sh",
            "-c",
            "i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done",
        ]);
        let id = started["id"].as_str().unwrap_or_else(|| panic!("{started}")).to_owned();
        case.cut(point, &["checkpoint", "app"]);
        let log = case.daemon.ok(["logs", "app", &id]);
        let expected: String = (1..=log.lines().count()).map(|line| format!("{line}\n")).collect();
        assert_eq!(log, expected, "{point}: nothing lost, nothing doubled");
        assert!(log.lines().count() > 2, "{point}: it counted on");
        case.daemon.ok(["kill", "app", &id]);
    }
}

#[test]
fn while_waking_and_running_a_command() {
    let Some(mut case) = Case::new("while_waking_and_running_a_command") else { return };
    for point in [
        "boot.recorded",
        "boot.started",
        "boot.up",
        "boot.done",
        "store.begin.done",
        "exec.recorded",
        "exec.spawned",
    ] {
        case.daemon.ok(["stop", "app"]);
        // Put to sleep again by what `cut` does first, so that the command wakes it.
        case.round += 1;
        case.restart(&[("SANDKEEP_FAILPOINT", point)]);
        let _ = case.daemon.keep(["exec", "app", "--", "sh", "-c", "true"]);
        case.daemon.wait_for_death();
        case.restart(&[]);
        assert_eq!(case.daemon.sh("app", DIGEST), case.digest, "{point}");
    }
    for point in ["exec.recorded", "exec.spawned"] {
        case.cut(point, &["exec", "app", "--", "sh", "-c", "echo ran > /work/ran"]);
    }
}

#[test]
fn while_creating() {
    let Some(mut case) = Case::new("while_creating") else { return };
    for point in [
        "create.claimed",
        "store.found.before_rename",
        "create.recorded",
        "boot.recorded",
        "boot.started",
        "boot.up",
        "boot.done",
    ] {
        case.cut(point, &["create", "new", "--image", SMALL]);
        // Not acknowledged, so it may be there or not; either way the name can be used.
        case.daemon.ok(["create", "new", "--image", SMALL, "--get"]);
        assert_eq!(case.daemon.sh("new", "echo usable"), "usable\n", "{point}");
        case.daemon.ok(["rm", "new"]);
    }
}

/// Not by the daemon's death: a bug may panic while processes are frozen, and they resume.
#[test]
fn a_panic_in_a_checkpoint_leaves_nothing_frozen() {
    let Some(mut case) = Case::new("a_panic_in_a_checkpoint_leaves_nothing_frozen") else { return };
    let line = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done";
    let started = case.daemon.json(["exec", "--detach", "app", "--", "sh", "-c", line]);
    let id = started["id"].as_str().unwrap_or_else(|| panic!("{started}")).to_owned();
    // Something to copy; without it nothing has to be frozen.
    case.daemon.sh("app", "echo written > /work/written");
    case.restart(&[("SANDKEEP_FAILPOINT", "panic=checkpoint.frozen")]);
    case.daemon.fails(["checkpoint", "app"]);
    let lines = |daemon: &Daemon| daemon.ok(["logs", "app", &id]).lines().count();
    let before = lines(&case.daemon);
    assert_eq!(case.daemon.sh("app", "echo thawed"), "thawed\n");
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while lines(&case.daemon) < before + 5 {
        assert!(std::time::Instant::now() < deadline, "it does not go on");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    // And the next checkpoint works.
    case.daemon.ok(["checkpoint", "app"]);
    case.daemon.ok(["kill", "app", &id]);
}

/// One sandbox of several has an agent that does not answer when the next daemon comes.
#[test]
fn a_stopped_agent_does_not_hold_up_the_next_daemon() {
    let Some(mut case) = Case::new("a_stopped_agent_does_not_hold_up_the_next_daemon") else {
        return;
    };
    for sandbox in ["hung", "one", "two"] {
        case.daemon.ok(["create", sandbox, "--image", SMALL]);
        case.daemon.sh(sandbox, "echo kept > /work/file");
    }
    let restarted = |daemon: &mut Daemon| {
        let began = std::time::Instant::now();
        daemon.launch_early();
        for sandbox in ["one", "two"] {
            assert_eq!(daemon.sh(sandbox, "cat /work/file"), "kept\n");
        }
        began.elapsed()
    };
    case.daemon.kill();
    let undisturbed = restarted(&mut case.daemon);
    let id = case.daemon.json(["show", "hung"])["id"].as_str().unwrap().to_owned();
    case.daemon.kill();
    let agent = case.daemon.agent_of(&id);
    rustix::process::kill_process(agent, rustix::process::Signal::STOP).unwrap();
    let disturbed = restarted(&mut case.daemon);
    assert_ne!(case.daemon.recovering(), Some(0), "the stopped agent is still being waited for");
    let generous = undisturbed * 10 + std::time::Duration::from_secs(2);
    assert!(disturbed < generous, "{disturbed:?}, and {undisturbed:?} undisturbed");
    assert_eq!(case.daemon.json(["show", "hung"])["state"], "running", "its machine is alive");
    case.daemon.ok(["stop", "hung"]);
    assert_eq!(case.daemon.sh("hung", "cat /work/file"), "kept\n");
    let agent = case.daemon.agent_of(&id);
    rustix::process::kill_process(agent, rustix::process::Signal::STOP).unwrap();
    case.daemon.ok(["rm", "hung"]);
}

#[test]
fn while_forking() {
    let Some(mut case) = Case::new("while_forking") else { return };
    for point in [
        "checkpoint.swapped",
        "commit.snapshot",
        "fork.snapshot",
        "create.claimed",
        "create.recorded",
    ] {
        case.cut(point, &["fork", "app", "try"]);
        if !case.exists("try") {
            case.daemon.ok(["fork", "app", "try"]);
        }
        assert_eq!(
            case.daemon.sh("try", DIGEST),
            case.digest,
            "{point}: a fork is what its source was"
        );
        case.daemon.ok(["rm", "try"]);
    }
}

#[test]
fn while_rolling_back() {
    let Some(mut case) = Case::new("while_rolling_back") else { return };
    let good = case.daemon.json(["checkpoint", "app"])["id"].as_str().unwrap().to_owned();
    for point in ["seal.down", "commit.snapshot", "rollback.kept", "rollback.done"] {
        case.round += 1;
        case.daemon.sh("app", "rm -rf /work/kept");
        case.restart(&[("SANDKEEP_FAILPOINT", point)]);
        let _ = case.daemon.keep(["rollback", "app", &good]);
        case.daemon.wait_for_death();
        case.restart(&[]);
        // Before the commit point it is where it was; after it, where it was to go. Never in between.
        let there = case.daemon.sh("app", "ls /work").contains("kept");
        assert_eq!(there, point == "rollback.done", "{point}");
        case.daemon.ok(["rollback", "app", &good]);
        assert_eq!(case.daemon.sh("app", DIGEST), case.digest, "{point}");
    }
}

#[test]
fn while_deleting() {
    let Some(mut case) = Case::new("while_deleting") else { return };
    for point in [
        "erase.recorded",
        "erase.down",
        "erase.snapshots",
        "store.remove_sandbox.before",
        "store.remove_sandbox.before_sync",
        "erase.done",
    ] {
        case.daemon.ok(["fork", "app", "doomed"]);
        case.daemon.sh("doomed", "echo x > /work/x");
        case.daemon.ok(["stop", "doomed"]);
        case.daemon.sh("doomed", "echo y > /work/y");
        case.cut(point, &["rm", "doomed"]);
        assert!(!case.exists("doomed"), "{point}: begun is finished");
    }
}

/// A power cut may take every record that was not synced, and leave what was removed since. The sandbox is what it was
/// before the delete then, and all that its older record names must be there.
#[test]
fn while_deleting_and_the_power_goes() {
    let Some(mut case) = Case::new("while_deleting_and_the_power_goes") else { return };
    for point in ["erase.recorded", "erase.down", "erase.kept", "erase.snapshots"] {
        case.daemon.ok(["fork", "app", "doomed"]);
        case.daemon.sh("doomed", "echo kept > /work/kept-file");
        case.daemon.ok(["checkpoint", "doomed"]);
        case.daemon.sh("doomed", "echo more > /work/more");
        case.restart(&[("SANDKEEP_FAILPOINT", point)]);
        let _ = case.daemon.keep(["rm", "doomed"]);
        case.daemon.wait_for_death();
        lose_unsynced(&case.daemon.data());
        case.restart(&[]);
        let found = case.daemon.sh("doomed", "cat /work/kept-file");
        assert_eq!(found, "kept\n", "{point}: what was acknowledged");
        case.daemon.ok(["rm", "doomed"]);
    }
}

/// The same after a create or a fork that was answered: the record that was synced is of the start, and names the layer that the
/// session writes to.
#[test]
fn after_creating_and_the_power_goes() {
    let Some(mut case) = Case::new("after_creating_and_the_power_goes") else { return };
    let made: [&[&str]; 2] =
        [&["create", "new", "--image", SMALL], &["fork", "app", "new", "--start"]];
    for how in made {
        case.daemon.ok(how);
        case.daemon.sh("new", "echo kept > /work/kept-file");
        case.daemon.kill();
        lose_unsynced(&case.daemon.data());
        case.restart(&[]);
        assert_eq!(case.daemon.sh("new", "cat /work/kept-file"), "kept\n", "{how:?}");
        case.daemon.ok(["rm", "new"]);
    }
}

/// Removes every version of a document that was not synced.
fn lose_unsynced(dir: &std::path::Path) {
    for entry in std::fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if entry.file_type().unwrap().is_dir() {
            // Layers hold no documents of that kind, and may be large.
            if entry.file_name() != "diff" {
                lose_unsynced(&path);
            }
        } else if path.extension().is_some_and(|extension| extension == "next") {
            std::fs::remove_file(path).unwrap();
        }
    }
}
