//! The command line in daily use: what runs, logs, names in short, completion, hooks, browsers.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use sandkeep_testkit::daemon::{Daemon, SMALL, skipped, unfit};

/// A daemon with a sandbox `my-app`, or nothing if this host cannot run sandboxes.
fn daemon(test: &str) -> Option<Daemon> {
    if let Some(why) = unfit() {
        skipped(test, why);
        return None;
    }
    let keep = Daemon::with_small_image(env!("CARGO_BIN_EXE_keep"));
    keep.ok(["create", "my-app", "--image", SMALL]);
    Some(keep)
}

fn until(what: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn ps_shows_what_runs() {
    let Some(keep) = daemon("ps_shows_what_runs") else { return };
    keep.ok(["create", "other", "--image", SMALL]);
    let start = |name: &str| keep.ok(["exec", "-d", name, "--", "sleep", "1000"]).trim().to_owned();
    let (here, there) = (start("my-app"), start("other"));
    keep.sh("my-app", "echo over");
    let running = keep.ok(["ps", "my-app"]);
    assert!(running.contains(&here) && !running.contains("echo over"), "{running}");
    let all = keep.ok(["ps", "my-app", "-a"]);
    assert!(all.contains(&here) && all.contains("echo over"), "{all}");
    let newest = keep.json(["ps", "my-app", "-a", "-n", "1"]);
    assert_eq!(newest.as_array().unwrap().len(), 1);
    assert_eq!(newest[0]["argv"][2], "echo over");
    let everywhere = keep.ok(["ps"]);
    for told in [&here, &there, "my-app", "other"] {
        assert!(everywhere.contains(told), "{told} in {everywhere}");
    }
    assert_eq!(keep.json(["ps", "-n", "1"])[0]["id"], there.as_str(), "the newest");
    keep.ok(["kill", "my-app", "--last", "-s", "KILL"]);
    until("it ends", || keep.json(["ps", "my-app"]) == serde_json::json!([]));
    let none = keep.ok(["ps", "my-app"]);
    assert!(none.contains("keep ps my-app -a"), "{none}");
    let (code, told) = keep.fails(["kill", "my-app", "--last"]);
    assert!(code == 1 && told.contains("no command runs"), "{told}");
    assert_eq!(keep.fails(["ps", "-a"]).0, 2, "of which sandbox?");
    keep.ok(["stop", "my-app"]);
    keep.ok(["ps", "my-app"]);
    assert_eq!(keep.json(["show", "my-app"])["state"], "stopped", "nothing is woken");
}

#[test]
fn logs_are_cut_and_stamped() {
    let Some(keep) = daemon("logs_are_cut_and_stamped") else { return };
    let script =
        "for i in 1 2 3; do echo out $i; echo err $i >&2; done; sleep 2; printf 'late\\nend'";
    assert!(keep.keep(["exec", "my-app", "--", "sh", "-c", script]).status.success());
    assert_eq!(keep.ok(["logs", "my-app", "--tail", "2"]), "late\nend");
    assert_eq!(keep.ok(["logs", "my-app", "--tail", "0"]), "");
    assert_eq!(keep.ok(["logs", "my-app", "--last", "--tail", "100"]).lines().count(), 5);
    let ended = keep.json(["ps", "my-app", "-a"])[0]["ended_at"].as_str().unwrap().to_owned();
    let ended: jiff::Timestamp = ended.parse().unwrap();
    let before = (ended - jiff::SignedDuration::from_secs(1)).to_string();
    assert_eq!(keep.ok(["logs", "my-app", "--since", &before]), "late\nend");
    assert_eq!(keep.ok(["logs", "my-app", "--since", "1h"]).lines().count(), 5);
    assert_eq!(keep.ok(["logs", "my-app", "--since", "1h", "--tail", "1"]), "end");
    let stamped = keep.ok(["logs", "my-app", "-t"]);
    for (line, text) in stamped.lines().zip(["out 1", "out 2", "out 3", "late", "end"]) {
        let (time, rest) = line.split_once(' ').unwrap();
        let time: jiff::Timestamp = time.parse().unwrap_or_else(|_| panic!("{line}"));
        assert!(rest == text && (ended - time).get_hours() < 1, "{line}");
    }
    assert_eq!(stamped.lines().count(), 5);
    let events = keep.ok(["logs", "my-app", "--json", "--timestamps", "--tail", "1"]);
    let first: serde_json::Value = serde_json::from_str(events.lines().next().unwrap()).unwrap();
    assert_eq!((&first["data"], first["at"].is_string()), (&"end".into(), true), "{first}");
    let id = keep.ok(["exec", "-d", "my-app", "--", "sh", "-c", "echo a; echo b; sleep 1; echo c"]);
    until("it has begun", || keep.ok(["logs", "my-app"]).ends_with("b\n"));
    assert_eq!(keep.ok(["logs", "-f", "--tail", "1", "my-app", id.trim()]), "b\nc\n");
    assert_eq!(keep.fails(["logs", "my-app", "--since", "yesterday"]).0, 2);
}

#[test]
fn things_are_named_in_short() {
    let Some(keep) = daemon("things_are_named_in_short") else { return };
    keep.sh("my-app", "echo one > /work/file");
    let green = keep.json(["checkpoint", "my-app", "--label", "green"]);
    let green = green["id"].as_str().unwrap();
    keep.sh("my-app", "echo two > /work/file");
    let last = keep.json(["checkpoint", "my-app"])["id"].as_str().unwrap().to_owned();
    let end = &green[green.len() - 6..];
    for name in [green, end, "green", "my-app@green"] {
        assert_eq!(keep.json(["snapshot", "show", name])["id"], green, "{name}");
    }
    assert_eq!(keep.json(["snapshot", "show", "--last"])["id"], last.as_str());
    keep.ok(["rollback", "my-app", "green"]);
    assert_eq!(keep.sh("my-app", "cat /work/file"), "one\n");
    keep.ok(["create", "copy", "--from", &last[last.len() - 6..]]);
    assert_eq!(keep.sh("copy", "cat /work/file"), "two\n");
    keep.ok(["fork", "my-app", "fork", "--from", "green"]);
    assert_eq!(keep.sh("fork", "cat /work/file"), "one\n");
    keep.ok(["rollback", "my-app", &last]);
    keep.sh("my-app", "true");
    keep.ok(["checkpoint", "my-app"]);
    keep.sh("my-app", "echo three > /work/file");
    keep.ok(["rollback", "my-app", "--last"]);
    assert_eq!(keep.sh("my-app", "cat /work/file"), "two\n");
    let (code, told) = keep.fails(["rollback", "my-app", "snp-0"]);
    assert!(code == 1 && told.contains("fits") && told.contains("hint: "), "{told}");
    let (code, told) = keep.fails(["rollback", "my-app", "red"]);
    assert!(code == 4 && told.contains("no snapshot `red`"), "{told}");
    keep.sh("my-app", "echo hello");
    let id = keep.json(["ps", "my-app", "-a"])[0]["id"].as_str().unwrap().to_owned();
    assert_eq!(keep.ok(["logs", "my-app", &id[id.len() - 5..]]), "hello\n");
    assert_eq!(keep.ok(["logs", "my-app", &id[..id.len() - 1]]), "hello\n");
    let made = keep.json(["key", "create", "ci"]);
    keep.ok(["key", "revoke", "ci"]);
    let secret = made["secret"].as_str().unwrap();
    let output = keep.command(["ls"]).env("SANDKEEP_KEY", secret).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "it is revoked");
}

#[test]
fn a_creation_whose_hook_fails_fails() {
    let Some(keep) = daemon("a_creation_whose_hook_fails_fails") else { return };
    let hook = "echo installing; exit 3";
    let (code, told) = keep.fails(["create", "a", "--image", SMALL, "--on-create", hook]);
    assert_eq!(code, 1, "{told}");
    for part in ["ended with 3", "keep logs a cmd-", "on_create hook", "keep rm a"] {
        assert!(told.contains(part), "{part} in {told}");
    }
    assert_eq!(keep.json(["show", "a"])["state"], "running", "it can be looked at");
    let run = ["run", "--name", "b", "--image", SMALL, "--on-create", "false", "--", "echo", "no"];
    let output = keep.keep(run);
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(125), &b""[..]));
    let told = keep.ok(["create", "c", "--image", SMALL, "--on-create", "touch /work/made"]);
    assert!(told.contains("created"), "{told}");
    keep.sh("c", "test -e /work/made");
}

#[test]
fn run_says_what_it_leaves_behind() {
    let Some(keep) = daemon("run_says_what_it_leaves_behind") else { return };
    let output = keep.keep(["run", "--image", SMALL, "--", "echo", "hi"]);
    let told = String::from_utf8(output.stderr).unwrap();
    let names = keep.ok(["ls", "-q", "--class", "ephemeral"]);
    let name = names.trim();
    for part in [
        format!("sandbox {name} runs on"),
        "stops after 15m".to_owned(),
        "deleted in".to_owned(),
        format!("keep rm {name}"),
        "--rm".to_owned(),
    ] {
        assert!(told.contains(&part), "{part} in {told}");
    }
    let quiet = keep.keep(["run", "--rm", "--image", SMALL, "--", "true"]);
    assert_eq!(quiet.stderr, b"");
}

#[test]
fn create_starts_here_as_over_the_api() {
    let Some(keep) = daemon("create_starts_here_as_over_the_api") else { return };
    let (url, key) = keep.url_and_key();
    let created = |body: &str| -> serde_json::Value {
        let output = Command::new("curl")
            .args(["-sS", "-H", &format!("Authorization: Bearer {key}")])
            .args(["-H", "Content-Type: application/json", "-d", body])
            .arg(format!("{url}/v1/sandboxes"))
            .output()
            .unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    };
    assert_eq!(keep.json(["show", "my-app"])["state"], "running");
    let body = format!(r#"{{"name":"api","image":"{SMALL}"}}"#);
    assert_eq!(created(&body)["sandbox"]["state"], "running");
    let body = format!(r#"{{"name":"lazy","image":"{SMALL}","start":false}}"#);
    assert_eq!(created(&body)["sandbox"]["state"], "stopped");
    keep.ok(["create", "idle", "--image", SMALL, "--no-start"]);
    assert_eq!(keep.json(["show", "idle"])["state"], "stopped");
}

#[test]
fn open_opens_a_browser() {
    let Some(keep) = daemon("open_opens_a_browser") else { return };
    let opened = keep.scratch().join("opened");
    let browser = keep.scratch().join("browser");
    let script = format!("#!/bin/sh\necho \"$1\" >> {}\n", opened.display());
    fs::write(&browser, script).unwrap();
    fs::set_permissions(&browser, fs::Permissions::from_mode(0o755)).unwrap();
    let open = |args: &[&str], browser: &str| {
        let mut command = keep.command(["open", "my-app"]);
        command.args(args).env("BROWSER", browser).env_remove("DISPLAY");
        let output = command.env_remove("WAYLAND_DISPLAY").output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let browser = browser.to_str().unwrap();
    let (code, url, told) = open(&["3000"], browser);
    assert_eq!(code, Some(0), "{told}");
    assert!(told.contains("port 3000 of my-app is now published (private)"), "{told}");
    assert!(told.contains("keep ports my-app 3000 off"), "{told}");
    assert_eq!(fs::read_to_string(&opened).unwrap(), url);
    let (_, printed, told) = open(&["3000", "--print"], browser);
    assert!(printed.starts_with("http") && told.is_empty(), "published before: {told}");
    assert_eq!(fs::read_to_string(&opened).unwrap().lines().count(), 1, "nothing was opened");
    let (code, url, told) = open(&["3000"], "");
    assert!(code == Some(0) && url.starts_with("http") && told.contains("no browser"), "{told}");
    let (code, url, told) = open(&["3000"], "/no/such/browser");
    assert!(code == Some(1) && url.starts_with("http") && told.contains("hint: "), "{told}");
}

/// What bash completes at the end of a line.
fn completed(keep: &Daemon, words: &[&str]) -> Vec<String> {
    let script = r#"
        source <("$0" completions bash)
        COMP_WORDS=("$0" "$@"); COMP_CWORD=$#
        _keep_names "$0" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
        printf '%s\n' "${COMPREPLY[@]}"
    "#;
    let mut command = Command::new("bash");
    command.args(["-c", script, env!("CARGO_BIN_EXE_keep")]).args(words);
    let output = command
        .env("SANDKEEP_DATA", keep.data())
        .env_remove("SANDKEEP_URL")
        .env_remove("SANDKEEP_KEY")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert_eq!(output.stderr, b"", "it is quiet");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn completion_knows_the_names() {
    let Some(mut keep) = daemon("completion_knows_the_names") else { return };
    keep.ok(["create", "my-other", "--image", SMALL, "--no-start"]);
    keep.sh("my-app", "true");
    let snapshot = keep.json(["checkpoint", "my-app"])["id"].as_str().unwrap().to_owned();
    let command = keep.json(["ps", "my-app", "-a"])[0]["id"].as_str().unwrap().to_owned();
    // A host that does other things may be slower than a shell waits.
    let knows = |words: &[&str], wanted: &[&str]| {
        until(&format!("{words:?} completes {wanted:?}"), || {
            let mut found = completed(&keep, words);
            found.sort_unstable();
            found == wanted
        });
    };
    knows(&["exec", "my-"], &["my-app", "my-other"]);
    knows(&["stop", "my-app", "my-o"], &["my-other"]);
    knows(&["rollback", "my-app", "snp-"], &[&snapshot]);
    knows(&["create", "--from", ""], &[&snapshot]);
    knows(&["logs", "my-app", "cmd-"], &[&command]);
    let commands = completed(&keep, &["ex"]);
    assert_eq!(commands, ["exec"], "commands of keep come from the script");
    assert!(completed(&keep, &["create", "--me"]).contains(&"--memory".to_owned()));
    keep.terminate();
    let begun = Instant::now();
    let found = completed(&keep, &["exec", "my-"]);
    assert!(!found.contains(&"my-app".to_owned()), "{found:?}");
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

#[test]
fn completion_without_a_server_says_nothing() {
    let nowhere = tempfile::tempdir().unwrap();
    for words in [&["keep", "exec", "my"][..], &["keep", "logs", "a", ""], &["keep"], &[]] {
        for url in [None, Some("http://127.0.0.1:1"), Some("nonsense")] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_keep"));
            command.arg("__complete").args(words).env("SANDKEEP_DATA", nowhere.path());
            match url {
                Some(url) => command.env("SANDKEEP_URL", url),
                None => command.env_remove("SANDKEEP_URL"),
            };
            let output = command.output().unwrap();
            assert!(output.status.success(), "{words:?}");
            assert!(output.stdout.is_empty() && output.stderr.is_empty(), "{words:?} {output:?}");
        }
    }
}
