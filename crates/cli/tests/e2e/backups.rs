//! Backups made beside a running server, and servers started on what was restored.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use sandkeep_testkit::daemon::{Daemon, SMALL, skipped, unfit};
use serde_json::Value;

fn daemon(test: &str) -> Option<Daemon> {
    if let Some(why) = unfit() {
        skipped(test, why);
        return None;
    }
    Some(Daemon::with_small_image(env!("CARGO_BIN_EXE_keep")))
}

/// Makes files of all kinds, and prints everything about them that can be seen from inside.
const FILL: &str = "mkdir -p /work/deep/er && cd /work && echo content > file && ln file second && ln -s file link \
    && ln -s /nowhere dangling && head -c 300000 /dev/urandom > random && truncate -s 5M sparse && echo x >> sparse \
    && mkfifo pipe && chmod 4751 file && chown 1234:4321 random && touch -d '2001-02-03 04:05:06.789' deep/er \
    && printf 'name\\nwith\\tall' > 'odd name' && chmod 0700 deep && rm -f /etc/hostname-of-test";
const TELL: &str = "cd /work && find . | sort | while read -r name; do stat -c '%n %F %a %u %g %h %s %Y %N' \"$name\"; done; \
    cat file second random sparse 'odd name' | cksum; readlink link dangling";

fn tell(daemon: &Daemon, name: &str) -> String {
    daemon.sh(name, TELL)
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap().flatten() {
        match entry.file_type().unwrap().is_dir() {
            true => found.extend(files(&entry.path())),
            false => found.push(entry.path()),
        }
    }
    found
}

/// The largest archive of a layer.
fn archive(backups: &Path) -> PathBuf {
    let archives = files(&backups.join("layers"));
    let archives =
        archives.into_iter().filter(|path| path.extension().is_some_and(|end| end == "zst"));
    archives.max_by_key(|path| path.metadata().unwrap().len()).unwrap()
}

#[test]
fn what_was_backed_up_beside_a_running_server_starts_again() {
    let Some(keep) = daemon("what_was_backed_up_beside_a_running_server_starts_again") else {
        return;
    };
    let home = tempfile::TempDir::with_prefix("keep-backup-").unwrap();
    let (backups, restored) = (home.path().join("backups"), home.path().join("restored"));
    let at = backups.to_str().unwrap();
    keep.ok(["create", "stopped", "--image", SMALL]);
    keep.sh("stopped", FILL);
    keep.ok(["stop", "stopped"]);
    keep.ok(["create", "running", "--image", SMALL]);
    keep.sh("running", &format!("{FILL} && echo kept > /work/kept"));
    keep.ok(["checkpoint", "running"]);
    keep.ok([
        "exec",
        "--detach",
        "running",
        "--",
        "sh",
        "-c",
        "while :; do date >> /work/later; done",
    ]);
    keep.ok(["fork", "stopped", "fork"]);
    let mut secret = keep.command(["secret", "set", "TOKEN", "--host", "api.example.com"]);
    let mut secret = secret.stdin(Stdio::piped()).spawn().unwrap();
    secret.stdin.take().unwrap().write_all(b"hunter2-of-the-test").unwrap();
    assert!(secret.wait().unwrap().success());

    let first = keep.json(["backup", "create", at]);
    assert_eq!(
        (&first["sandboxes"], first["missing"].as_array().map(Vec::len)),
        (&3.into(), Some(0)),
        "{first}"
    );
    assert_eq!(first["secrets_key"]["included"], false);
    let print = first["secrets_key"]["fingerprint"].as_str().unwrap().to_owned();
    let text = keep.ok(["backup", "create", at]);
    assert!(text.contains("secrets.key") && text.contains(&print), "{text}");
    let again = keep.json(["backup", "create", at]);
    let (size, new) = (again["bytes"].as_u64().unwrap(), again["written"].as_u64().unwrap());
    assert!(size > 300_000 && new < size / 4, "only what is new: {again}");
    assert_eq!(keep.json(["backup", "ls", at]).as_array().unwrap().len(), 3);
    for path in files(&backups) {
        let bytes = fs::read(&path).unwrap();
        let secret = b"hunter2-of-the-test";
        assert!(!bytes.windows(secret.len()).any(|part| part == secret), "{}", path.display());
    }
    assert!(keep.ok(["backup", "verify", at, "--all"]).contains("good"));
    let (_, refused) = keep.fails(["backup", "restore", at]);
    assert!(refused.contains("not empty"), "{refused}");

    // One byte of one archive, then one file.
    let archive = archive(&backups);
    let whole = fs::read(&archive).unwrap();
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    fs::write(&archive, &flipped).unwrap();
    let restore = |id: &str| {
        let target = restored.to_str().unwrap();
        keep.keep(["--data", target, "backup", "restore", at, id])
    };
    let told = keep.keep(["backup", "verify", at]);
    let said = String::from_utf8_lossy(&told.stdout).into_owned();
    assert!(!told.status.success() && said.contains("was changed"), "{said}");
    assert!(said.contains(archive.file_name().unwrap().to_str().unwrap()), "{said}");
    let id = again["id"].as_str().unwrap();
    assert!(!restore(id).status.success(), "nothing damaged is restored");
    assert!(!restored.exists());
    fs::write(&archive, &whole).unwrap();
    let object = files(&backups.join("objects")).pop().unwrap();
    let content = fs::read(&object).unwrap();
    fs::remove_file(&object).unwrap();
    let told = keep.keep(["backup", "verify", at, "--all"]);
    assert!(!told.status.success());
    assert!(String::from_utf8_lossy(&told.stdout).contains("is missing"));
    fs::write(&object, content).unwrap();

    let done = restore(id);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(said.contains("secrets.key") && said.contains(&print), "{said}");
    assert!(!restored.join("secrets.key").exists(), "keys are kept apart");
    for key in ["secrets.key", "token.key", "audit.key"] {
        // Tokens are made when one is asked for.
        if keep.data().join(key).exists() {
            fs::copy(keep.data().join(key), restored.join(key)).unwrap();
        }
    }
    let before = tell(&keep, "stopped");
    let other = Daemon::start_at(env!("CARGO_BIN_EXE_keep"), &restored, &[]);
    let names = |daemon: &Daemon| {
        let listed = daemon.json(["ls"]);
        let listed = listed
            .as_array()
            .cloned()
            .unwrap_or_else(|| listed["items"].as_array().unwrap().clone());
        let mut names: Vec<String> =
            listed.iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&other), ["fork", "running", "stopped"]);
    assert_eq!(other.json(["show", "running"])["state"], "stopped");
    assert_eq!(tell(&other, "stopped"), before, "byte for byte");
    assert_eq!(tell(&other, "fork"), before);
    assert_eq!(
        other.sh("running", "cat /work/kept; ls /work/later 2>&1 | grep -c 'No such'"),
        "kept\n1\n"
    );
    assert!(other.ok(["secret", "ls"]).contains("TOKEN"));
    let damage = other.json(["doctor"]);
    let damaged =
        damage["findings"].as_array().unwrap().iter().find(|one| one["name"] == "data").cloned();
    assert_eq!(damaged.map(|one| one["verdict"].clone()), Some(Value::from("ok")), "{damage}");
    drop(other);
    keep.ok(["rm", "stopped", "running", "fork"]);
}

#[test]
fn a_backup_that_is_killed_leaves_the_earlier_ones_good() {
    let Some(keep) = daemon("a_backup_that_is_killed_leaves_the_earlier_ones_good") else { return };
    let home = tempfile::TempDir::with_prefix("keep-backup-").unwrap();
    let backups = home.path().join("backups");
    let at = backups.to_str().unwrap();
    keep.ok(["create", "box", "--image", SMALL]);
    keep.sh("box", FILL);
    keep.ok(["stop", "box"]);
    let first = keep.json(["backup", "create", at]);
    let first = first["id"].as_str().unwrap();
    let mut killed = 0;
    for round in 0..8_u64 {
        keep.sh("box", &format!("head -c 3000000 /dev/urandom > /work/round-{round}"));
        keep.ok(["stop", "box"]);
        let mut child =
            keep.command(["backup", "create", at]).stdout(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(3 + 9 * round));
        child.kill().unwrap();
        killed += u32::from(!child.wait().unwrap().success());
        assert!(keep.ok(["backup", "verify", at, first]).contains("good"), "round {round}");
        assert!(keep.ok(["backup", "verify", at, "--all"]).contains("good"), "round {round}");
    }
    assert!(killed > 0, "at least one was killed in the middle");
    let last = keep.json(["backup", "create", at]);
    assert_eq!(last["missing"].as_array().map(Vec::len), Some(0), "{last}");
    assert!(keep.ok(["backup", "verify", at]).contains("good"));
    keep.ok(["rm", "box"]);
}

#[test]
fn mistakes_are_told_with_advice() {
    let Some(keep) = daemon("mistakes_are_told_with_advice") else { return };
    let home = tempfile::TempDir::with_prefix("keep-backup-").unwrap();
    let nowhere = home.path().join("nothing");
    let nowhere = nowhere.to_str().unwrap();
    for (args, told) in [
        (vec!["backup", "verify", nowhere], "there is no backup"),
        (vec!["backup", "ls", nowhere], "there is no backup"),
        (vec!["backup", "restore", nowhere], "there is no backup"),
        (vec!["--data", nowhere, "backup", "create", nowhere], "inside the data directory"),
    ] {
        let (_, error) = keep.fails(&args);
        assert!(error.contains(told) && error.contains("hint:"), "{args:?}: {error}");
    }
    let inside = keep.data().join("backups");
    let (_, error) = keep.fails(["backup", "create", inside.to_str().unwrap()]);
    assert!(error.contains("inside the data directory"), "{error}");
}

#[test]
fn old_backups_are_pruned_with_what_only_they_used() {
    let Some(keep) = daemon("old_backups_are_pruned_with_what_only_they_used") else { return };
    let home = tempfile::TempDir::with_prefix("keep-backup-").unwrap();
    let backups = home.path().join("backups");
    let at = backups.to_str().unwrap();
    for name in ["old", "new"] {
        keep.ok(["create", name, "--image", SMALL]);
        keep.sh(name, &format!("{FILL}; head -c 2000000 /dev/urandom > /work/of-{name}"));
        keep.ok(["stop", name]);
    }
    keep.ok(["backup", "create", at]);
    keep.ok(["rm", "old"]);
    keep.ok(["trash", "empty"]);
    let last = keep.json(["backup", "create", at])["id"].as_str().unwrap().to_owned();
    let count = files(&backups).len();
    let unchanged = keep.json(["backup", "prune", at, "--keep", "2"]);
    assert_eq!((&unchanged["freed"], &unchanged["kept"]), (&0.into(), &2.into()), "{unchanged}");
    assert_eq!(files(&backups).len(), count);
    let pruned = keep.json(["backup", "prune", at, "--keep", "1"]);
    assert_eq!(pruned["removed"].as_array().unwrap().len(), 1, "{pruned}");
    assert!(pruned["freed"].as_u64().unwrap() > 2_000_000, "{pruned}");
    assert!(files(&backups).len() < count);
    assert!(keep.ok(["backup", "verify", at, "--all"]).contains("good"));
    assert_eq!(keep.json(["backup", "ls", at])[0]["id"], last.as_str());
    let restored = home.path().join("restored");
    keep.ok(["--data", restored.to_str().unwrap(), "backup", "restore", at]);
    assert_eq!(keep.fails(["backup", "prune", at, "--keep", "0"]).0, 2);

    // What a damaged manifest needs is not known, so nothing goes.
    keep.ok(["backup", "create", at]);
    fs::write(backups.join("backups").join(format!("{last}.json")), "{}").unwrap();
    let count = files(&backups).len();
    let (_, told) = keep.fails(["backup", "prune", at, "--keep", "2"]);
    assert!(told.contains(&last), "{told}");
    assert_eq!(files(&backups).len(), count);
    keep.ok(["backup", "prune", at, "--keep", "1"]);
    assert!(keep.ok(["backup", "verify", at, "--all"]).contains("good"));
}

#[test]
fn verification_reads_only_files_of_the_backup() {
    let Some(keep) = daemon("verification_reads_only_files_of_the_backup") else { return };
    let home = tempfile::TempDir::with_prefix("keep-backup-").unwrap();
    let backups = home.path().join("backups");
    let at = backups.to_str().unwrap();
    keep.ok(["create", "box", "--image", SMALL]);
    keep.ok(["stop", "box"]);
    // A link to the data directory is seen through.
    let link = home.path().join("link");
    std::os::unix::fs::symlink(keep.data(), &link).unwrap();
    let inside = link.join("backups");
    let (_, told) = keep.fails(["backup", "create", inside.to_str().unwrap()]);
    assert!(told.contains("inside the data directory"), "{told}");
    keep.ok(["backup", "create", at]);
    let object = files(&backups.join("objects")).pop().unwrap();
    let archive = archive(&backups);
    for path in [&object, &archive] {
        fs::remove_file(path).unwrap();
        // It never ends.
        std::os::unix::fs::symlink("/dev/zero", path).unwrap();
    }
    let told = keep.keep(["backup", "verify", at]);
    let said = String::from_utf8_lossy(&told.stdout).into_owned();
    assert_eq!(told.status.code(), Some(1), "{said}");
    assert!(said.contains("DAMAGED, 2 problems"), "{said}");
    let restored = home.path().join("restored");
    keep.fails(["--data", restored.to_str().unwrap(), "backup", "restore", at]);
    assert!(!restored.exists());
}
