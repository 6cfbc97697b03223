//! Drives with the real binary against a real daemon: what a person does with them, and what is left
//! when the daemon dies at every step of attaching, sealing and letting go.

use sandkeep_testkit::daemon::{Daemon, SMALL, skipped, unfit};

fn daemon(test: &str) -> Option<Daemon> {
    if let Some(why) = unfit() {
        skipped(test, why);
        return None;
    }
    Some(Daemon::with_small_image(env!("CARGO_BIN_EXE_keep")))
}

#[test]
fn a_drive_goes_from_sandbox_to_sandbox() {
    let Some(keep) = daemon("a_drive_goes_from_sandbox_to_sandbox") else { return };
    assert_eq!(keep.ok(["drive", "create", "data", "--max-size", "1G"]), "data  ready\n");
    let (code, told) = keep.fails(["drive", "create", "data"]);
    assert!(code == 5 && told.contains("there is a drive `data` already"), "{code} {told}");
    keep.ok(["drive", "create", "data", "--get"]);
    keep.ok(["create", "one", "--image", SMALL, "--mount", "data:/data"]);
    keep.sh("one", "echo hello > /data/file");
    let shown = keep.json(["drive", "show", "data"]);
    assert_eq!(shown["attached"]["sandbox"], "one");
    assert!(keep.ok(["drive", "ls"]).contains("one"));
    assert!(keep.ok(["show", "one"]).contains("data:/data:read-write"));
    let (code, told) = keep.fails(["create", "two", "--image", SMALL, "--mount", "data:/data"]);
    assert!(code == 5 && told.contains("attached to sandbox `one`"), "{code} {told}");
    let (code, told) = keep.fails(["drive", "rm", "data"]);
    assert!(code == 5 && told.contains("attached"), "{code} {told}");
    keep.ok(["stop", "one"]);

    keep.ok(["create", "two", "--image", SMALL, "--mount", "data:/here:snapshot"]);
    assert_eq!(keep.sh("two", "cat /here/file"), "hello\n");
    assert!(!keep.keep(["exec", "two", "--", "sh", "-c", "echo x > /here/x"]).status.success());
    assert!(keep.ok(["drive", "fork", "data", "copy"]).contains("copy  forked from data"));
    keep.ok(["update", "two", "--mount", "copy:/here"]);
    keep.ok(["stop", "two"]);
    keep.sh("two", "echo more >> /here/file");
    keep.ok(["update", "two", "--no-mounts"]);
    keep.ok(["stop", "two"]);
    assert_eq!(keep.sh("two", "ls /here"), "");
    assert_eq!(keep.sh("one", "cat /data/file"), "hello\n", "the fork went its own way");
    assert!(keep.ok(["usage"]).contains("drives"));

    keep.ok(["rm", "one"]);
    keep.ok(["drive", "rm", "data", "copy"]);
    let (code, _) = keep.fails(["drive", "get", "data"]);
    assert_eq!(code, 4);
    let (code, told) = keep.fails(["create", "x", "--image", SMALL, "--mount", "data:/data"]);
    assert!(code == 4 && told.contains("no drive `data`"), "{code} {told}");
    let (code, told) = keep.fails(["create", "x", "--image", SMALL, "--mount", "data:/proc"]);
    assert!(code == 1 && told.contains("mounts"), "{code} {told}");
}

#[cfg(feature = "failpoints")]
mod crash {
    use super::{Daemon, SMALL, daemon};

    /// A drive that `app` writes to, `other` reads, and whose every line was acknowledged.
    struct Case {
        daemon: Daemon,
        lines: String,
        round: usize,
    }

    impl Case {
        fn new(test: &str) -> Option<Self> {
            let daemon = daemon(test)?;
            daemon.ok(["drive", "create", "data"]);
            daemon.ok(["create", "app", "--image", SMALL, "--mount", "data:/data"]);
            Some(Self { daemon, lines: String::new(), round: 0 })
        }

        /// Writes a line without ending the session, so that it is not acknowledged.
        fn write(&mut self) {
            self.round += 1;
            let line = format!("line {}", self.round);
            self.daemon.sh("app", &format!("echo {line} >> /data/log"));
            self.lines.push_str(&format!("{line}\n"));
        }

        /// Dies at `point` while doing `what`, and comes back.
        fn cut(&mut self, point: &str, what: &[&str]) {
            self.restart(&[("SANDKEEP_FAILPOINT", point)]);
            let _ = self.daemon.keep(what);
            self.daemon.wait_for_death();
            self.restart(&[]);
        }

        fn restart(&mut self, environment: &[(&str, &str)]) {
            if self.daemon.is_alive() {
                self.daemon.kill();
            }
            self.daemon.set_environment(environment);
            self.daemon.launch();
        }

        /// All lines are in the drive, in any sandbox that has it next, and it can be had.
        fn check(&self, point: &str) {
            let _ = self.daemon.keep(["stop", "app"]);
            let drive = self.daemon.json(["drive", "show", "data"]);
            assert!(drive["attached"].is_null(), "{point}: {drive}");
            self.daemon.ok(["create", "next", "--image", SMALL, "--mount", "data:/d"]);
            assert_eq!(self.daemon.sh("next", "cat /d/log"), self.lines, "{point}");
            self.daemon.ok(["rm", "next"]);
        }
    }

    #[test]
    fn while_a_drive_is_let_go() {
        let Some(mut case) = Case::new("while_a_drive_is_let_go") else { return };
        for point in [
            "seal.recorded",
            "seal.down",
            "store.seal.before_sync",
            "store.seal.before_manifest",
            "store.seal.sealed",
            "drive.sealed",
            "drive.detached",
            "seal.sealed",
            "seal.done",
        ] {
            case.write();
            case.cut(point, &["stop", "app"]);
            case.check(point);
        }
    }

    #[test]
    fn while_a_drive_is_attached() {
        let Some(mut case) = Case::new("while_a_drive_is_attached") else { return };
        for point in
            ["store.begin.done:2", "drive.attached", "boot.recorded", "boot.started", "boot.up"]
        {
            case.write();
            case.daemon.ok(["stop", "app"]);
            case.cut(point, &["start", "app"]);
            case.check(point);
        }
        // Killed with the machine alive: the next daemon adopts both.
        case.write();
        case.restart(&[]);
        let drive = case.daemon.json(["drive", "show", "data"]);
        assert_eq!(drive["attached"]["sandbox"], "app");
        case.write();
        case.check("adopted");
    }

    #[test]
    fn while_its_sandbox_is_deleted_or_another_made() {
        let Some(mut case) = Case::new("while_its_sandbox_is_deleted_or_another_made") else {
            return;
        };
        for point in
            ["erase.recorded", "erase.down", "drive.sealed", "drive.detached", "erase.done"]
        {
            case.write();
            case.cut(point, &["rm", "app"]);
            case.check(point);
            case.daemon.ok(["create", "app", "--image", SMALL, "--mount", "data:/data"]);
        }
        for point in ["drive.claimed", "store.write.renamed"] {
            case.cut(point, &["drive", "create", "more"]);
            // Not acknowledged, so it may be there or not; either way the name can be used.
            case.daemon.ok(["drive", "create", "more", "--get"]);
            case.daemon.ok(["drive", "rm", "more"]);
        }
        case.check("the end");
    }
}
