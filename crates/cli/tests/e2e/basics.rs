//! What a person can do, done with the real binary against a real daemon.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcgetattr, tcsetwinsize};
use sandkeep_testkit::daemon::{Daemon, SMALL, skipped, unfit};

/// A daemon with a small image, or nothing if this host cannot run sandboxes.
fn daemon(test: &str) -> Option<Daemon> {
    if let Some(why) = unfit() {
        skipped(test, why);
        return None;
    }
    Some(Daemon::with_small_image(env!("CARGO_BIN_EXE_keep")))
}

fn create(daemon: &Daemon, name: &str) {
    daemon.ok(["create", name, "--image", SMALL]);
}

#[test]
fn a_sandbox_lives_sleeps_wakes_forks_and_goes_back() {
    let Some(keep) = daemon("a_sandbox_lives_sleeps_wakes_forks_and_goes_back") else { return };
    let created = keep.json([
        "create",
        "my-app",
        "--image",
        SMALL,
        "--tag",
        "customer=acme",
        "--tag",
        "agent=42",
        "--purpose",
        "refactor auth",
        "--class",
        "workspace",
        "--expires",
        "30d",
    ]);
    assert_eq!(created["created"], true);
    assert_eq!(created["sandbox"]["purpose"], "refactor auth");
    keep.sh("my-app", "echo one > /work/file");

    let stopped = keep.ok(["stop", "my-app"]);
    for told in ["snp-", "active CPU", "network", "wall time", "generation 1"] {
        assert!(stopped.contains(told), "{told} in {stopped}");
    }
    assert_eq!(keep.json(["show", "my-app"])["state"], "stopped");
    assert_eq!(keep.sh("my-app", "cat /work/file"), "one\n", "it wakes by itself");

    keep.ok(["fork", "my-app", "try-a"]);
    let fork = keep.json(["fork", "my-app", "try-b", "--tag", "attempt=b"]);
    assert_eq!(fork["sandbox"]["tags"]["customer"], "acme", "the source's tags stay");
    assert_eq!(fork["sandbox"]["tags"]["attempt"], "b");
    keep.sh("try-a", "echo two > /work/file");
    assert_eq!(keep.sh("try-b", "cat /work/file"), "one\n");
    assert_eq!(keep.sh("my-app", "cat /work/file"), "one\n");

    let green = keep.json(["checkpoint", "my-app", "--label", "tests green"]);
    assert_eq!(keep.json(["show", "my-app"])["state"], "running");
    keep.sh("my-app", "echo broken > /work/file");
    let id = green["id"].as_str().expect("an id");
    let back = keep.json(["rollback", "my-app", id]);
    assert_eq!(keep.sh("my-app", "cat /work/file"), "one\n");
    let before = back["before"]["id"].as_str().expect("what was before is kept");
    keep.ok(["rollback", "my-app", before]);
    assert_eq!(keep.sh("my-app", "cat /work/file"), "broken\n", "a rollback can be undone");

    let listed = keep.ok(["ls", "--tag", "customer=acme", "-q"]);
    let mut names: Vec<&str> = listed.lines().collect();
    names.sort_unstable();
    assert_eq!(names, ["my-app", "try-a", "try-b"]);
    assert_eq!(keep.ok(["ls", "--tag", "customer=acme", "--tag", "attempt=b", "-q"]), "try-b\n");
    assert!(keep.ok(["show", "my-app"]).contains("refactor auth"));
    let tree = keep.ok(["tree", "my-app"]);
    for told in ["my-app", "try-a", "try-b", "tests green"] {
        assert!(tree.contains(told), "{told} in\n{tree}");
    }
    assert!(keep.ok(["sessions", "my-app"]).contains("ses-"));
    assert!(keep.ok(["snapshot", "ls", "my-app"]).contains("tests green"));
    keep.ok(["rm", "my-app", "try-a", "try-b"]);
    assert_eq!(keep.ok(["ls", "-q"]), "");
}

#[test]
fn exec_is_as_if_it_ran_here() {
    let Some(keep) = daemon("exec_is_as_if_it_ran_here") else { return };
    create(&keep, "box");
    let output = keep.keep(["exec", "box", "--", "sh", "-c", "echo out; echo err >&2; exit 7"]);
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(output.stdout, b"out\n");
    assert_eq!(output.stderr, b"err\n");
    let killed = keep.keep(["exec", "box", "--", "sh", "-c", "kill -9 $$"]);
    assert_eq!(killed.status.code(), Some(137));
    assert_eq!(killed.stderr, b"end: signalled: signal 9 ended the command\n");
    let late = keep.keep(["exec", "--timeout", "300ms", "box", "--", "sleep", "1000"]);
    assert_eq!(late.status.code(), Some(124));
    let told = String::from_utf8_lossy(&late.stderr).into_owned();
    assert!(told.starts_with("end: timed_out: "), "{told}");
    let listed = keep.ok(["--json", "commands", "box", "-a"]);
    assert!(
        listed.contains("\"end\": \"timed_out\"") || listed.contains("\"end\":\"timed_out\""),
        "{listed}"
    );
    let (code, told) = keep.fails(["exec", "box", "--", "no-such-program"]);
    assert_eq!(code, 127, "{told}");
    assert!(told.starts_with("error: "), "{told}");
    let (code, told) = keep.fails(["exec", "box", "--", "/etc/passwd"]);
    assert_eq!(code, 126, "{told}");
    let (code, told) = keep.fails(["exec", "nobody", "--", "true"]);
    assert_eq!(code, 125, "{told}");
    assert!(told.contains("hint: "), "{told}");
    let said = keep.ok([
        "exec",
        "-e",
        "X=1",
        "-C",
        "/tmp",
        "-u",
        "user",
        "box",
        "--",
        "sh",
        "-c",
        "echo $X $(pwd) $(id -un)",
    ]);
    assert_eq!(said, "1 /tmp user\n");
    let events = keep.ok(["--json", "exec", "box", "--", "echo", "hi"]);
    let kinds: Vec<String> = events
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["type"].to_string())
        .collect();
    assert_eq!(kinds, ["\"started\"", "\"stdout\"", "\"exited\""]);
    keep.ok(["stop", "box"]);
    assert_eq!(keep.fails(["exec", "--if-running", "box", "--", "true"]).0, 125);
    assert_eq!(keep.json(["show", "box"])["state"], "stopped", "it was not woken");
}

#[test]
fn standard_input_passes_whole_in_both_directions() {
    let Some(keep) = daemon("standard_input_passes_whole_in_both_directions") else { return };
    create(&keep, "box");
    // More than all buffers on the way hold together: a `cat` that waits for us while we wait for it
    // would never end.
    let sent: Vec<u8> =
        (0..8_000_000u32).map(|i| i.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    let mut child = keep
        .command(["exec", "-i", "box", "--", "cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let copy = sent.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&copy));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(output.status.success());
    assert!(output.stdout == sent, "{} bytes came back", output.stdout.len());
}

#[test]
fn signals_are_passed_on() {
    let Some(keep) = daemon("signals_are_passed_on") else { return };
    create(&keep, "box");
    let script = "trap 'echo got it; exit 9' INT; echo ready; while :; do sleep 0.02; done";
    let mut child = keep
        .command(["exec", "box", "--", "sh", "-c", script])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut ready = [0; 6];
    stdout.read_exact(&mut ready).unwrap();
    assert_eq!(&ready, b"ready\n");
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "got it\n");
    assert_eq!(child.wait().unwrap().code(), Some(9));
}

/// A terminal, its two ends.
fn terminal() -> (OwnedFd, fs::File) {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let slave = fs::File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    (master, slave)
}

#[test]
fn a_shell_has_a_terminal_and_gives_ours_back() {
    let Some(keep) = daemon("a_shell_has_a_terminal_and_gives_ours_back") else { return };
    create(&keep, "box");
    let (master, slave) = terminal();
    let size = Winsize { ws_row: 33, ws_col: 101, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(&slave, size).unwrap();
    let before = tcgetattr(&slave).unwrap();
    let mut child = keep
        .command(["sh", "box"])
        .stdin(slave.try_clone().unwrap())
        .stdout(slave.try_clone().unwrap())
        .stderr(slave.try_clone().unwrap())
        .spawn()
        .unwrap();
    let mut master = fs::File::from(master);
    master.write_all(b"stty size; tty\n").unwrap();
    let said = read_until(&mut master, "/dev/pts/");
    assert!(said.contains("33 101"), "{said}");
    tcsetwinsize(&slave, Winsize { ws_row: 44, ..size }).unwrap();
    // The terminal is nobody's controlling one, so the kernel signals nobody.
    kill_process(Pid::from_child(&child), Signal::WINCH).unwrap();
    master.write_all(b"while [ \"$(stty size)\" != '44 101' ]; do sleep 0.02; done; echo res''ized; exit 5\n").unwrap();
    read_until(&mut master, "resized");
    let ended = wait_for(Duration::from_secs(60), || child.try_wait().unwrap());
    assert_eq!(ended.code(), Some(5));
    let after = tcgetattr(&slave).unwrap();
    assert_eq!(after.local_modes, before.local_modes, "the terminal is as it was");
    assert_eq!(after.input_modes, before.input_modes);
}

fn read_until(terminal: &mut fs::File, wanted: &str) -> String {
    let mut said = String::new();
    let mut piece = [0; 4096];
    while !said.contains(wanted) {
        let count = terminal.read(&mut piece).unwrap();
        assert_ne!(count, 0, "{wanted} in {said}");
        said.push_str(&String::from_utf8_lossy(&piece[..count]));
    }
    said
}

fn wait_for<T>(patience: Duration, mut ready: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited too long");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn snapshots_can_be_kept_and_taken_from_under_a_sandbox() {
    let Some(keep) = daemon("snapshots_can_be_kept_and_taken_from_under_a_sandbox") else { return };
    create(&keep, "app");
    keep.sh("app", "echo kept > /work/file");
    let stopped = keep.json(["stop", "app"]);
    let id = stopped["snapshot"]["id"].as_str().unwrap_or_else(|| panic!("{stopped}")).to_owned();
    assert!(keep.ok(["rm", "--keep-snapshots", "app"]).contains("1 snapshot stays"));
    keep.ok(["create", "again", "--from", &id]);
    assert_eq!(keep.sh("again", "cat /work/file"), "kept\n");
    keep.ok(["stop", "again"]);
    let (code, said) = keep.fails(["snapshot", "rm", &id]);
    assert!(code != 0 && said.contains("again"), "it stands on it: {said}");
    keep.ok(["snapshot", "rm", "--force", &id]);
    let (code, said) = keep.fails(["start", "again"]);
    assert_eq!(code, 4, "{said}");
    assert!(said.contains("rollback"), "{said}");
}

#[test]
fn a_one_shot_run_leaves_nothing() {
    let Some(keep) = daemon("a_one_shot_run_leaves_nothing") else { return };
    let output =
        keep.keep(["run", "--rm", "--image", SMALL, "--", "sh", "-c", "echo $((1+1)); exit 3"]);
    assert_eq!(output.stdout, b"2\n");
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(keep.ok(["ls", "-q"]), "");
    assert_eq!(keep.json(["snapshot", "ls"]), serde_json::json!([]));
    let (code, _) = keep.fails(["run", "--rm", "--image", SMALL, "--", "no-such-program"]);
    assert_eq!(code, 127);
    assert_eq!(keep.ok(["ls", "-q"]), "");
}

#[test]
fn the_host_image_is_made_when_it_is_first_wanted() {
    let test = "the_host_image_is_made_when_it_is_first_wanted";
    if let Some(why) = unfit() {
        return skipped(test, why);
    }
    let keep = Daemon::start(env!("CARGO_BIN_EXE_keep"));
    assert_eq!(keep.ok(["run", "--rm", "--", "sh", "-c", "echo $((40+2))"]), "42\n");
    assert!(keep.ok(["image", "ls"]).contains("host"));
}

#[test]
fn files_are_copied_in_and_out() {
    let Some(keep) = daemon("files_are_copied_in_and_out") else { return };
    create(&keep, "box");
    let source = keep.scratch().join("src");
    fs::create_dir_all(source.join("deep/er")).unwrap();
    fs::write(source.join("a.txt"), "a").unwrap();
    fs::write(source.join("deep/er/big"), vec![7u8; 3 << 20]).unwrap();
    std::os::unix::fs::symlink("a.txt", source.join("link")).unwrap();
    let text = |path: &Path| path.to_str().unwrap().to_owned();

    let (code, told) = keep.fails(["cp", &text(&source), "box:/work/src"]);
    assert_eq!((code, told.contains("cp -r")), (1, true), "{told}");
    keep.ok(["cp", "-r", &text(&source), "box:/work/src"]);
    assert_eq!(
        keep.sh("box", "cd /work/src; cat a.txt; readlink link; stat -c %s deep/er/big"),
        "aa.txt\n3145728\n"
    );
    keep.ok(["cp", "-r", &text(&source), "box:/work"]);
    keep.sh("box", "test -e /work/src/a.txt && test ! -e /work/src/src");

    keep.ok(["cp", &text(&source.join("a.txt")), "box:/tmp/"]);
    assert_eq!(keep.sh("box", "cat /tmp/a.txt"), "a");
    let back = keep.scratch().join("back");
    keep.ok(["cp", "-r", "box:/work/src", &text(&back)]);
    assert_eq!(fs::read(back.join("deep/er/big")).unwrap(), vec![7u8; 3 << 20]);
    assert_eq!(fs::read_link(back.join("link")).unwrap(), Path::new("a.txt"));
    let single = keep.scratch().join("single");
    keep.sh("box", "chmod 640 /work/src/a.txt");
    keep.ok(["cp", "box:/work/src/a.txt", &text(&single)]);
    assert_eq!(fs::read(&single).unwrap(), b"a");
    assert_eq!(keep.ok(["cp", "box:/work/src/a.txt", "-"]), "a");
    let (code, told) = keep.fails(["cp", "box:/no/such/file", &text(&single)]);
    assert_eq!(code, 4, "{told}");
}

#[test]
fn detached_commands_are_listed_signalled_and_remembered() {
    let Some(keep) = daemon("detached_commands_are_listed_signalled_and_remembered") else {
        return;
    };
    create(&keep, "box");
    let id = keep.ok(["exec", "--detach", "box", "--", "sh", "-c", "echo hello; exec sleep 1000"]);
    let id = id.trim();
    assert!(keep.ok(["ps", "box"]).contains("running"));
    wait_for(Duration::from_secs(60), || (keep.ok(["logs", "box", id]) == "hello\n").then_some(()));
    keep.ok(["kill", "box", id, "-s", "KILL"]);
    assert_eq!(keep.ok(["logs", "-f", "box", id]), "hello\n");
    let ended = keep.json(["ps", "box", "-a"]);
    assert_eq!(ended[0]["exit_code"], 137);
    keep.ok(["stop", "box"]);
    assert_eq!(keep.ok(["logs", "box", id]), "hello\n", "logs outlive the session");
    assert_eq!(keep.json(["show", "box"])["state"], "stopped", "reading logs wakes nothing");
}

#[test]
fn errors_say_what_to_do() {
    let Some(keep) = daemon("errors_say_what_to_do") else { return };
    create(&keep, "box");
    for (args, code, told) in [
        (&["create", "box", "--image", SMALL][..], 5, "--get"),
        (&["show", "nobody"], 4, "keep ls"),
        (&["create", "x", "--image", "no-such-image"], 4, "keep image"),
        (&["create", "bad name"], 1, "letters"),
        (&["start", "box", "--expect-generation", "9"], 5, "generation"),
        (&["rollback", "box", "snp-00000000000000000000000000"], 4, "keep snapshot ls"),
        (&["rm", "nobody"], 4, "nobody"),
    ] {
        let (found, said) = keep.fails(args);
        assert_eq!(found, code, "{args:?}: {said}");
        assert!(said.starts_with("error: ") && said.contains(told), "{args:?}: {said}");
    }
    let mut foreign = keep.command(["ls"]);
    let output = foreign.env("SANDKEEP_KEY", "skp_wrong").output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("hint: "), "{said}");
    let empty = tempfile::tempdir().unwrap();
    let output = keep.command(["ls"]).env("SANDKEEP_DATA", empty.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("keep serve"), "{said}");
}

#[test]
fn sandboxes_run_on_while_the_daemon_is_away() {
    let Some(mut keep) = daemon("sandboxes_run_on_while_the_daemon_is_away") else { return };
    create(&keep, "box");
    let script = "while :; do date +%s%N > /work/tick; sleep 0.02; done";
    keep.ok(["exec", "--detach", "box", "--", "sh", "-c", script]);
    for crash in [false, true] {
        match crash {
            true => keep.kill(),
            false => keep.terminate(),
        }
        keep.launch();
        assert_eq!(keep.json(["show", "box"])["state"], "running", "crash: {crash}");
        let first = keep.sh("box", "cat /work/tick");
        wait_for(Duration::from_secs(60), || {
            (keep.sh("box", "cat /work/tick") != first).then_some(())
        });
    }
}

#[test]
fn the_index_can_be_made_again() {
    let Some(mut keep) = daemon("the_index_can_be_made_again") else { return };
    create(&keep, "box");
    keep.sh("box", "echo kept > /work/file");
    keep.ok(["stop", "box"]);
    let told = keep.ok(["fsck"]);
    assert!(told.contains("everything that was acknowledged is there"), "by the server: {told}");
    let (code, told) = keep.fails(["fsck", "--rebuild"]);
    assert_eq!(code, 1, "a server works there: {told}");
    keep.terminate();
    fs::write(keep.data().join("index.sqlite"), "rubbish").unwrap();
    let told = keep.ok(["fsck", "--rebuild"]);
    assert!(told.contains("everything that was acknowledged is there"), "{told}");
    keep.launch();
    assert_eq!(keep.sh("box", "cat /work/file"), "kept\n");
}

#[test]
fn keys_reach_as_far_as_their_scope() {
    let Some(keep) = daemon("keys_reach_as_far_as_their_scope") else { return };
    create(&keep, "box");
    let made = keep.json(["key", "create", "looker", "--scope", "read"]);
    let secret = made["secret"].as_str().unwrap();
    let with_key = |args: &[&str]| keep.command(args).env("SANDKEEP_KEY", secret).output().unwrap();
    assert!(with_key(&["ls"]).status.success());
    assert!(!with_key(&["rm", "box"]).status.success());
    assert!(!with_key(&["key", "ls"]).status.success());
    keep.ok(["project", "create", "other"]);
    let other = keep.json(["key", "create", "theirs", "--project", "other"]);
    let theirs = other["secret"].as_str().unwrap();
    let output = keep.command(["ls", "-q"]).env("SANDKEEP_KEY", theirs).output().unwrap();
    assert_eq!(output.stdout, b"", "another project's sandboxes are not seen");
    keep.ok(["--project", "other", "create", "box", "--image", SMALL, "--no-start"]);
    assert_eq!(keep.json(["--project", "other", "show", "box"])["project"], "other");
    keep.ok(["--project", "other", "rm", "box"]);
    assert_eq!(keep.ok(["ls", "-q"]), "box\n", "only theirs is gone");
    let id = made["key"]["id"].as_str().unwrap();
    keep.ok(["key", "revoke", id]);
    assert_eq!(with_key(&["ls"]).status.code(), Some(1));
    keep.ok(["usage"]);
    keep.ok(["version"]);
}

#[test]
fn failures_are_json_where_answers_are() {
    let Some(keep) = daemon("failures_are_json_where_answers_are") else { return };
    let told = |args: &[&str]| -> (i32, serde_json::Value) {
        let (code, said) = keep.fails(args);
        assert_eq!(said.lines().count(), 1, "{said}");
        (code, serde_json::from_str::<serde_json::Value>(&said).unwrap()["error"].clone())
    };
    let (code, error) = told(&["--json", "show", "nobody"]);
    assert_eq!((code, error["code"].as_str()), (4, Some("sandbox_not_found")), "{error}");
    assert!(error["message"].as_str().unwrap().contains("`nobody`"), "{error}");
    let (code, error) = told(&["exec", "--json", "nobody", "--", "true"]);
    assert_eq!((code, &error["exit_code"]), (125, &125.into()), "{error}");
    let (code, error) = told(&["--json", "show"]);
    assert_eq!((code, error["code"].as_str()), (2, Some("usage")), "{error}");
    // What the environment has set does not have to be given.
    let (code, said) = keep.fails(["show"]);
    assert_eq!(code, 2);
    assert!(said.contains("Usage: keep show") && !said.contains("--data"), "{said}");
}

#[test]
fn what_is_told_of_a_running_sandbox_is_true() {
    let Some(keep) = daemon("what_is_told_of_a_running_sandbox_is_true") else { return };
    create(&keep, "box");
    keep.sh("box", "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done");
    let session = keep.json(["sessions", "box"])[0].clone();
    for name in ["active_cpu_ms", "memory_peak_bytes", "wall_ms"] {
        assert!(session["usage"][name].as_u64().unwrap() > 0, "{name}: {session}");
    }
    let first = keep.ok(["exec", "--json", "box", "--", "true"]);
    let first: serde_json::Value = serde_json::from_str(first.lines().next().unwrap()).unwrap();
    assert!(first["session"]["usage"]["active_cpu_ms"].as_u64().unwrap() > 0, "{first}");
    let used = |name: &str| keep.json(["show", name])["used_at"].as_str().unwrap().to_owned();
    let before = used("box");
    std::thread::sleep(Duration::from_millis(20));
    keep.sh("box", "true");
    assert!(used("box") > before, "a command is a use: {before}");
    let expires = keep.json(["ls"])[0]["expires_at"].as_str().unwrap().to_owned();
    std::thread::sleep(Duration::from_millis(20));
    keep.sh("box", "true");
    assert!(keep.json(["ls"])[0]["expires_at"].as_str().unwrap() > expires.as_str());
}

#[test]
fn copies_count_files_and_refusals_say_why() {
    let Some(keep) = daemon("copies_count_files_and_refusals_say_why") else { return };
    create(&keep, "box");
    let tree = keep.scratch().join("tree");
    fs::create_dir_all(tree.join("a/b")).unwrap();
    fs::write(tree.join("one"), "1").unwrap();
    fs::write(tree.join("a/b/two"), "2").unwrap();
    let path = tree.to_str().unwrap();
    let sent = keep.ok(["cp", "-r", path, "box:/work/tree"]);
    // Of contents; what the archive needs for itself is not the user's.
    assert_eq!(sent, "2 files, 2 B\n");
    let back =
        keep.ok(["cp", "-r", "box:/work/tree", keep.scratch().join("back").to_str().unwrap()]);
    assert_eq!(back, "2 files, 2 B\n");
    let over = keep.ok(["cp", "-r", "box:/work/tree", "box:/work/copy"]);
    assert_eq!(over, "2 files, 2 B\n");
    // Far more than is read before it is refused.
    let large = keep.scratch().join("large");
    fs::File::create(&large).unwrap().set_len(64 << 20).unwrap();
    for round in 0..10 {
        let (code, said) = keep.fails(["cp", large.to_str().unwrap(), "box:/no/such/place"]);
        assert_eq!(code, 4, "{round}: {said}");
        assert!(said.contains("/no/such"), "{round}: {said}");
    }
    // Where an upload lies for a moment is the server's own business.
    let (_, said) = keep.fails(["image", "import", "broken", large.to_str().unwrap()]);
    assert!(said.contains("the upload"), "{said}");
    assert!(!said.contains("upload-") && !said.contains(keep.data().to_str().unwrap()), "{said}");
}

/// The processes that run the agent of this daemon's data directory, sandboxes' own among them.
fn agents(daemon: &Daemon) -> usize {
    let data = fs::canonicalize(daemon.data()).unwrap();
    let listed = fs::read_dir("/proc").unwrap().flatten();
    listed
        .filter_map(|entry| fs::read_link(entry.path().join("exe")).ok())
        .filter(|exe| exe.starts_with(&data))
        .filter(|exe| exe.file_name().is_some_and(|name| is_agent(&name.to_string_lossy())))
        .count()
}

/// The program's name says which version it is of.
fn is_agent(name: &str) -> bool {
    name.starts_with("keep-agent")
}

fn wait_for_agents(daemon: &Daemon, what: &str, enough: impl Fn(usize) -> bool) {
    let begun = Instant::now();
    while !enough(agents(daemon)) {
        assert!(begun.elapsed().as_secs() < 30, "{what}: {}", agents(daemon));
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn cages_that_were_begun_ahead_end_with_their_daemon() {
    let Some(mut keep) = daemon("cages_that_were_begun_ahead_end_with_their_daemon") else {
        return;
    };
    assert_eq!(agents(&keep), 0, "none before the first start");
    create(&keep, "one");
    keep.ok(["rm", "one"]);
    wait_for_agents(&keep, "two are begun, two processes each", |count| count == 4);
    keep.kill();
    wait_for_agents(&keep, "they end with a daemon that is killed", |count| count == 0);
    keep.launch();
    create(&keep, "one");
    keep.ok(["rm", "one"]);
    wait_for_agents(&keep, "two are begun again", |count| count == 4);
    std::thread::sleep(Duration::from_secs(3));
    let begun = Instant::now();
    create(&keep, "two");
    let uptime = keep.sh("two", "cut -d. -f1 /proc/uptime");
    let (uptime, most) = (uptime.trim().parse::<u64>().unwrap(), begun.elapsed().as_secs() + 1);
    assert!(uptime <= most, "the session's time is not that of what waited: {uptime}, {most}");
    wait_for_agents(&keep, "one sandbox, and two that are begun", |count| count == 5);
    keep.terminate();
    wait_for_agents(&keep, "the sandbox goes on alone", |count| count == 1);
    keep.launch();
    assert_eq!(keep.sh("two", "echo here"), "here\n");
}

#[test]
fn history_tells_who_changed_what() {
    let Some(keep) = daemon("history_tells_who_changed_what") else { return };
    create(&keep, "my-app");
    // Asking for the history waits until the files were looked at, so that the next command is alone also on a busy host.
    let sh = |line: &str| {
        keep.sh("my-app", line);
        keep.ok(["history", "my-app"]);
    };
    sh("mkdir /work/d; head -c 5000 /dev/zero > /work/d/a");
    let shown = keep.ok(["show", "my-app"]);
    assert!(shown.contains("never; 1 file (4.8 KiB) changed since"), "{shown}");
    sh("cat /work/d/a > /dev/null");
    sh("rm /work/d/a");
    keep.ok(["stop", "my-app"]);
    // Read without waking it.
    let all = keep.json(["history", "my-app"]);
    let counts: Vec<String> = all
        .as_array()
        .unwrap()
        .iter()
        .map(|one| {
            assert!(one["by"].as_str().unwrap().starts_with("key-"), "{one}");
            let changes = &one["changes"];
            assert_eq!(
                (&changes["exact"], &changes["complete"]),
                (&true.into(), &true.into()),
                "{one}"
            );
            format!("+{} ~{} -{}", changes["created"], changes["modified"], changes["deleted"])
        })
        .collect();
    assert_eq!(counts, ["+0 ~0 -1", "+0 ~0 -0", "+2 ~0 -0"]);
    let text = keep.ok(["history", "my-app", "--changed"]);
    assert!(text.contains("+2, 4.8 KiB") && !text.contains("nothing"), "{text}");
    assert_eq!(keep.json(["show", "my-app"])["state"], "stopped");
    let (code, missing) = keep.fails(["history", "my-ap"]);
    assert!(code == 4 && missing.contains("my-ap"), "{missing}");
}
