//! Secrets with the real binary against a real daemon: values reach whom they are for, and are found nowhere else.

use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;
use std::thread::sleep;
use std::time::{Duration, Instant};

use sandkeep_testkit::daemon::{Daemon, SMALL, skipped, unfit};

const VALUE: &str = "s3cr3t/Value+with%signs";
/// The middle of its base64, wherever it begins.
const ENCODED: &str = "czNjcjN0L1ZhbHVlK3dpdGglc2lnbn";

fn daemon(test: &str) -> Option<Daemon> {
    if let Some(why) = unfit() {
        skipped(test, why);
        return None;
    }
    Some(Daemon::with_small_image(env!("CARGO_BIN_EXE_keep")))
}

/// Runs `keep` with something on its standard input; returns whether it succeeded, and its two
/// outputs.
fn with_input(keep: &Daemon, args: &[&str], input: &str) -> (bool, String) {
    let mut child = keep
        .command(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}

fn set(keep: &Daemon, name: &str, value: &str) {
    let (done, said) = with_input(keep, &["secret", "set", name], value);
    assert!(done, "{said}");
    assert!(!said.contains(value.trim()), "{said}");
}

/// Files below `dir` that hold the value, as it is or encoded.
fn holders(dir: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let kind = std::fs::symlink_metadata(&path).unwrap().file_type();
        if kind.is_dir() {
            holders(&path, found);
        } else if kind.is_file() {
            let bytes = std::fs::read(&path).unwrap_or_default();
            let holds = |text: &str| bytes.windows(text.len()).any(|part| part == text.as_bytes());
            if holds(VALUE) || holds(ENCODED) {
                found.push(path.display().to_string());
            }
        }
    }
}

fn nowhere(keep: &Daemon) {
    let mut found = Vec::new();
    holders(&keep.data(), &mut found);
    assert!(found.is_empty(), "the value lies in {found:?}");
    assert!(!keep.log().contains(VALUE));
}

fn until(what: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < deadline, "{what}");
        sleep(Duration::from_millis(50));
    }
}

#[test]
fn secrets_are_set_and_never_told() {
    let Some(keep) = daemon("secrets_are_set_and_never_told") else { return };
    set(&keep, "TOKEN", &format!("{VALUE}\n"));
    let (done, said) = with_input(
        &keep,
        &["secret", "set", "TOKEN", "--host", "*.example.com", "--tag", "team=a"],
        VALUE,
    );
    assert!(done && said.contains("TOKEN  set, version 2"), "{said}");
    let shown = keep.json(["secret", "show", "TOKEN"]);
    assert_eq!((&shown["version"], &shown["hosts"][0]), (&2.into(), &"*.example.com".into()));
    assert_eq!(shown["versions"].as_array().unwrap().len(), 2);
    for round in 3..8 {
        set(&keep, "TOKEN", &format!("{VALUE}{round}"));
    }
    let shown = keep.json(["secret", "show", "TOKEN"]);
    assert_eq!((&shown["version"], &shown["tags"]["team"]), (&7.into(), &"a".into()), "as before");
    assert_eq!(shown["versions"].as_array().unwrap().len(), 3, "old values go");
    assert!(keep.ok(["secret", "ls"]).contains("team=a"));

    let bad = |args: &[&str], input: &str, what: &str| {
        let (done, said) = with_input(&keep, args, input);
        assert!(!done && said.contains(what), "{args:?}: {said}");
    };
    bad(&["secret", "set", "NO-NAME"], VALUE, "cannot name a secret");
    bad(&["secret", "set", "1ST"], VALUE, "cannot name a secret");
    bad(&["secret", "set", "SHORT"], "12345\n", "value: under 6 bytes");
    bad(&["secret", "set", "EMPTY"], "\n", "the value is empty");
    bad(&["secret", "set", "LONG"], &"x".repeat((64 << 10) + 1), "value: at most 64 KiB");
    bad(&["secret", "set", "NUL"], "abc\0def", "value: no environment can hold a NUL");
    bad(&["secret", "set", "HOST", "--host", "http://x"], VALUE, "hosts[0]");
    let (code, _) = keep.fails(["secret", "show", "OTHER"]);
    assert_eq!(code, 4);

    let (code, told) = keep.fails(["create", "x", "--image", SMALL, "--secret", "TOKEN"]);
    assert!(code == 5 && told.contains("only for sandboxes with the tags team=a"), "{told}");
    let (code, told) = keep.fails(["create", "x", "--image", SMALL, "--secret", "OTHER"]);
    assert!(code == 4 && told.contains("no secret `OTHER`"), "{told}");
    keep.ok(["create", "x", "--image", SMALL, "--secret", "TOKEN=MINE", "--tag", "team=a"]);
    let placeholder = keep.sh("x", "printf %s $MINE");
    assert!(placeholder.len() >= 32 && placeholder.starts_with("skp"), "{placeholder}");
    keep.ok(["stop", "x"]);
    assert_eq!(keep.sh("x", "printf %s $MINE"), placeholder, "the same in every session");
    keep.ok(["fork", "x", "y"]);
    assert_ne!(keep.sh("y", "printf %s $MINE"), placeholder, "another in a fork");
    let sessions = keep.json(["sessions", "x"]);
    let given = &sessions[0]["secrets"][0];
    assert_eq!((&given["name"], &given["how"]), (&"TOKEN".into(), &"brokered".into()));
    keep.ok(["secret", "rm", "TOKEN"]);
    assert!(!keep.ok(["secret", "ls"]).contains("TOKEN"));
    keep.ok(["stop", "x"]);
    let (code, told) = keep.fails(["start", "x"]);
    assert!(code == 4 && told.contains("no secret `TOKEN`"), "{told}");
    keep.ok(["update", "x", "--no-secrets"]);
    keep.ok(["start", "x"]);
    nowhere(&keep);
}

#[test]
fn what_is_injected_is_for_one_command_and_masked() {
    let Some(keep) = daemon("what_is_injected_is_for_one_command_and_masked") else { return };
    set(&keep, "TOKEN", VALUE);
    keep.ok(["create", "x", "--image", SMALL]);
    // In two parts: what is run is on record.
    let script = "a=s3cr3t/Val; b=ue+with%signs; test \"$TOKEN\" = $a$b && echo same; echo $TOKEN; \
        printf %s $a; sleep 0.05; echo $b; echo $TOKEN >&2; ulimit -c";
    let stars = "*".repeat(VALUE.len());
    let output = keep.keep(["exec", "x", "--inject", "TOKEN", "--", "sh", "-c", script]);
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(printed.starts_with(&format!("same\n{stars}\n{stars}\n0\n")), "{printed}"); // and no core dumps
    assert_eq!(String::from_utf8(output.stderr).unwrap(), format!("{stars}\n"));
    assert_eq!(keep.sh("x", "echo ${TOKEN-none}"), "none\n", "the next one has it no more");

    let place = "TOKEN=/run/secrets/deep/token";
    let script = "stat -c '%a %u' /run/secrets/deep/token; cat /run/secrets/deep/token";
    let printed = keep.ok(["exec", "x", "--inject-file", place, "--", "sh", "-c", script]);
    assert_eq!(printed, format!("400 0\n{stars}"));
    assert_eq!(keep.sh("x", "ls /run/secrets/deep"), "", "gone with the command");
    for bad in ["/tmp/token", "/run/../etc/x", "/runs/x", "/run/"] {
        let into = format!("TOKEN={bad}");
        let (_, told) = keep.fails(["exec", "x", "--inject-file", &into, "--", "true"]);
        assert!(told.contains("below /run or /dev/shm"), "{bad}: {told}");
    }
    keep.sh("x", "ln -s /tmp /run/link");
    let (_, told) = keep.fails(["exec", "x", "--inject-file", "TOKEN=/run/link/t", "--", "true"]);
    assert!(told.contains("a link or another filesystem"), "{told}");
    let (_, told) = keep.fails(["exec", "x", "--inject", "NONE", "--", "true"]);
    assert!(told.contains("no secret `NONE`"), "{told}");

    let commands = keep.ok(["--json", "ps", "x", "-a"]);
    let sessions = keep.ok(["--json", "sessions", "x"]);
    let shown = keep.ok(["--json", "show", "x"]);
    assert!(commands.contains("TOKEN") && sessions.contains("\"env\""), "by name");
    for answer in [commands, sessions, shown] {
        assert!(!answer.contains(VALUE), "{answer}");
    }
    keep.ok(["stop", "x"]);
    nowhere(&keep);
}

#[test]
fn a_daemon_that_is_killed_leaves_no_value_behind() {
    let Some(mut keep) = daemon("a_daemon_that_is_killed_leaves_no_value_behind") else { return };
    set(&keep, "TOKEN", VALUE);
    keep.ok(["create", "x", "--image", SMALL]);
    // A beginning that is too short to be held back is printed, then the daemon dies, then comes the rest.
    let script = "f=/run/secrets/t; v=$(cat $f); printf '%.3s' \"$v\"; until test -e /tmp/go; do sleep 0.05; done; \
        printf '%s\\n' \"${v#???}\"; echo czNjcjN0L1Zh''bHVlK3dpdGglc2lnbnM=; echo done";
    let id = keep.ok([
        "exec",
        "-d",
        "x",
        "--inject-file",
        "TOKEN=/run/secrets/t",
        "--",
        "sh",
        "-c",
        script,
    ]);
    let id = id.trim();
    until("the beginning is printed", || keep.ok(["logs", "x", id]) == VALUE[..3]);
    keep.kill();
    keep.launch();
    set(&keep, "TOKEN", "quite another value");
    keep.ok(["secret", "rm", "TOKEN"]);
    keep.sh("x", "touch /tmp/go");
    until("it ended", || keep.ok(["logs", "x", id]).ends_with("done\n"));
    let printed = keep.ok(["logs", "x", id]);
    let rest = "*".repeat(VALUE.len() - 3);
    assert!(printed.starts_with(&format!("{}{rest}\n****", &VALUE[..3])), "{printed}");
    assert_eq!(keep.sh("x", "ls /run/secrets"), "", "gone with the command");
    keep.ok(["stop", "x"]);
    nowhere(&keep);

    // With another key it says so.
    keep.terminate();
    let wrong = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";
    keep.set_environment(&[("SANDKEEP_SECRETS_KEY", wrong)]);
    keep.launch();
    set(&keep, "OTHER", VALUE);
    keep.terminate();
    keep.set_environment(&[]);
    keep.launch();
    let (code, told) = keep.fails(["exec", "x", "--inject", "OTHER", "--", "true"]);
    assert!(code != 0 && told.contains("sealed with another key"), "{told}");
}
