//! The data directory is moved, copied, or loses its runtime directory, while sandboxes run.
//!
//! No process writes to a layer once it is sealed: a running machine is found and adopted, or ended
//! first.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use sandkeep_testkit::daemon::{Daemon, SMALL, skipped, unfit};

/// Appends numbers to a file, for ever.
const WRITER: &str = "i=0; while :; do i=$((i+1)); echo $i >> /work/numbers; sleep 0.02; done";

fn daemon(test: &str) -> Option<Daemon> {
    if let Some(why) = unfit() {
        skipped(test, why);
        return None;
    }
    let daemon = Daemon::with_small_image(env!("CARGO_BIN_EXE_keep"));
    daemon.ok(["create", "app", "--image", SMALL]);
    daemon.ok(["exec", "--detach", "app", "--", "sh", "-c", WRITER]);
    Some(daemon)
}

fn mark(data: &Path) -> String {
    let text = fs::read(data.join("format.json")).unwrap();
    let format: serde_json::Value = serde_json::from_slice(&text).unwrap();
    format["identity"].as_str().unwrap()[..12].to_owned()
}

fn run_dir(data: &Path) -> PathBuf {
    Path::new("/run/sandkeep").join(mark(data))
}

/// What is in all sealed layers.
fn sealed(data: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for layer in fs::read_dir(data.join("layers")).unwrap().flatten() {
        let numbers = layer.path().join("diff/work/numbers");
        if layer.path().join("layer.json").exists() && numbers.exists() {
            found.insert(numbers.clone(), fs::read(numbers).unwrap());
        }
    }
    found
}

/// Waits until the sandbox has come to a state: recovery continues after the daemon answers.
fn state(daemon: &Daemon, wanted: &str) {
    for _ in 0..300 {
        if daemon.json(["show", "app"])["state"] == wanted {
            return;
        }
        sleep(Duration::from_millis(100));
    }
    panic!("it is not {wanted}:\n{}", daemon.log());
}

fn lines(daemon: &Daemon) -> usize {
    daemon.sh("app", "wc -l < /work/numbers").trim().parse().unwrap()
}

/// Every number exists, in order: nothing of what was written is missing.
fn whole(text: &[u8]) -> usize {
    let text = String::from_utf8_lossy(text).into_owned();
    let count = text.lines().count();
    for (n, line) in (1..).zip(text.lines()) {
        assert_eq!(line, n.to_string());
    }
    count
}

#[test]
fn sandboxes_are_found_where_the_data_directory_was_moved_to() {
    let Some(mut daemon) = daemon("sandboxes_are_found_where_the_data_directory_was_moved_to")
    else {
        return;
    };
    let before = run_dir(&daemon.data());
    daemon.kill();
    daemon.move_data("elsewhere");
    daemon.launch();
    assert_eq!(run_dir(&daemon.data()), before);
    state(&daemon, "running");
    let first = lines(&daemon);
    sleep(Duration::from_millis(300));
    assert!(lines(&daemon) > first, "it goes on writing");
    // A checkpoint and a fork use the new paths.
    daemon.ok(["checkpoint", "app"]);
    daemon.ok(["stop", "app"]);
    let kept = sealed(&daemon.data());
    assert!(!kept.is_empty());
    sleep(Duration::from_millis(300));
    assert_eq!(sealed(&daemon.data()), kept, "nobody writes to a sealed layer");
    let text = daemon.sh("app", "cat /work/numbers");
    assert!(whole(text.as_bytes()) > first);
}

#[test]
fn a_machine_whose_runtime_directory_is_gone_is_ended_before_its_layer_is_sealed() {
    let test = "a_machine_whose_runtime_directory_is_gone_is_ended_before_its_layer_is_sealed";
    let Some(mut daemon) = daemon(test) else { return };
    let first = lines(&daemon);
    for named in [true, false] {
        daemon.kill();
        fs::remove_dir_all(run_dir(&daemon.data())).unwrap();
        if !named {
            // Nor can its control group be recognized: the identity is another one, as after an
            // upgrade and a move.
            let format = daemon.data().join("format.json");
            let text = fs::read_to_string(&format).unwrap();
            let renamed = text.replace(&mark(&daemon.data()), "0123456789ab");
            let _ = fs::remove_file(run_dir(&daemon.data()).with_extension("owner"));
            fs::write(&format, renamed).unwrap();
        }
        daemon.launch();
        state(&daemon, "stopped");
        let kept = sealed(&daemon.data());
        assert!(!kept.is_empty());
        sleep(Duration::from_millis(300));
        assert_eq!(sealed(&daemon.data()), kept, "nobody writes to a sealed layer");
        let text = daemon.sh("app", "cat /work/numbers");
        assert!(whole(text.as_bytes()) >= first, "what it wrote is kept");
        if named {
            daemon.sh("app", "rm /work/numbers");
            daemon.ok(["exec", "--detach", "app", "--", "sh", "-c", WRITER]);
            sleep(Duration::from_millis(300));
        }
    }
}

#[test]
fn a_copy_leaves_the_sandboxes_of_the_original_alone() {
    let Some(daemon) = daemon("a_copy_leaves_the_sandboxes_of_the_original_alone") else { return };
    let copy = daemon.scratch().join("copy");
    let copied = Command::new("cp").arg("-a").arg(daemon.data()).arg(&copy).status().unwrap();
    assert!(copied.success());
    let _ = fs::remove_file(copy.join("keep.sock"));
    let other = Daemon::start_at(env!("CARGO_BIN_EXE_keep"), &copy, &[]);
    assert_ne!(mark(&copy), mark(&daemon.data()));
    assert!(other.log().contains("is a copy of"), "{}", other.log());
    // What the copy had of the session is kept there, and the session itself continues.
    state(&other, "stopped");
    other.sh("app", "test -s /work/numbers");
    other.ok(["rm", "app"]);
    state(&daemon, "running");
    let first = lines(&daemon);
    sleep(Duration::from_millis(300));
    assert!(lines(&daemon) > first);
}
