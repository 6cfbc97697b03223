//! Machines with memory as people use them: the real binary, a real daemon, real machines.
//!
//! The first machine of a size boots, which takes long where guests are emulated: so there are few daemons here, and
//! each test covers a whole sequence.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use sandkeep_testkit::daemon::{Daemon, skipped};
use sandkeep_testkit::machine::test_kernel;
use sandkeep_testkit::root::small_root_with;
use serde_json::Value;

const KEEP: &str = env!("CARGO_BIN_EXE_keep");
const IMAGE: &str = "small";

/// Answers every request with how many it has had, and its process id.
const SERVER: &str = r#"#!/bin/perl
socket(my $server, 2, 1, 0) or die; setsockopt($server, 1, 2, pack('l', 1));
bind($server, pack('SnC4x8', 2, 8080, 127, 0, 0, 1)) or die; listen($server, 10) or die;
while (accept(my $peer, $server)) {
    while (<$peer>) { last if /^\r?\n$/ }
    $count++;
    my $body = "$count $$\n";
    syswrite $peer, "HTTP/1.0 200 OK\r\nContent-Length: " . length($body) . "\r\n\r\n$body";
    close $peer;
}
"#;

/// Counts in memory, and nowhere else; prints the count on a signal.
const COUNTER: &str = r#"my $i = 0; my $tell = 0; $SIG{USR1} = sub { $tell = 1 };
open my $p, '>', '/run/counter.pid'; print $p $$; close $p;
while (1) {
    $i++;
    if ($tell) { $tell = 0; open my $f, '>', '/run/count.new'; print $f $i; close $f; rename '/run/count.new', '/run/count' }
    select undef, undef, undef, 0.05;
}"#;

/// What the counter has come to.
const COUNT: &str = "rm -f /run/count; kill -USR1 $(cat /run/counter.pid); \
    for i in $(seq 200); do [ -s /run/count ] && break; sleep 0.05; done; cat /run/count";

/// A daemon with machines and an image, or nothing where this host cannot have them.
fn daemon(test: &str) -> Option<Daemon> {
    let kernel = match test_kernel() {
        Ok(kernel) => kernel,
        Err(why) => {
            skipped(test, &why);
            return None;
        }
    };
    let daemon = Daemon::with_machines(KEEP, &kernel, &[]);
    let tar = daemon.scratch().join("root.tar");
    small_root_with(&tar, &["curl"]).unwrap();
    daemon.ok(["image", "import", IMAGE, tar.to_str().unwrap()]);
    Some(daemon)
}

fn create(keep: &Daemon, name: &str) {
    keep.ok(["create", name, "--driver", "microvm", "--image", IMAGE, "-C", "/work"]);
}

fn state(keep: &Daemon, name: &str) -> String {
    keep.json(["show", name])["state"].as_str().unwrap().to_owned()
}

fn count(keep: &Daemon, name: &str) -> u64 {
    keep.sh(name, COUNT).trim().parse().unwrap()
}

fn counting(keep: &Daemon, name: &str) {
    keep.ok(["exec", "--detach", name, "--", "perl", "-e", COUNTER]);
    let deadline = Instant::now() + Duration::from_secs(60);
    while keep.sh(name, "cat /run/counter.pid 2>/dev/null || true").trim().is_empty() {
        assert!(Instant::now() < deadline, "the counter does not come up");
        sleep(Duration::from_millis(200));
    }
}

/// How many hypervisors have a disk of a sandbox of this daemon open. Those that wait for one have none.
fn hypervisors(keep: &Daemon) -> usize {
    let layers = keep.data().canonicalize().unwrap().join("layers");
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let ours = |process: &std::fs::DirEntry| {
        let comm = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
        let Ok(open) = std::fs::read_dir(process.path().join("fd")) else { return false };
        let mut targets = open.flatten().filter_map(|fd| std::fs::read_link(fd.path()).ok());
        comm.starts_with("qemu") && targets.any(|target| target.starts_with(&layers))
    };
    processes.filter(ours).count()
}

/// What the server in a sandbox answers: its count, and which process it is.
fn asked(keep: &Daemon, name: &str) -> (u64, String) {
    let answer = keep.ok(["exec", name, "--", "curl", "-s", "localhost:8080"]);
    let (count, pid) = answer.trim().split_once(' ').unwrap();
    (count.parse().unwrap(), pid.to_owned())
}

#[test]
fn a_machine_is_paused_woken_and_forked_live() {
    const TEST: &str = "a_machine_is_paused_woken_and_forked_live";
    let Some(keep) = daemon(TEST) else { return };
    create(&keep, "m");
    let server = keep.scratch().join("server");
    std::fs::write(&server, SERVER).unwrap();
    keep.ok(["cp", "-q", server.to_str().unwrap(), "m:/work/server"]);
    keep.sh("m", "chmod +x /work/server && uname -r > /work/kernel");
    let host = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert_ne!(keep.sh("m", "uname -r").trim(), host.trim(), "a kernel of its own");

    keep.ok(["exec", "--detach", "m", "--", "./server"]);
    let deadline = Instant::now() + Duration::from_secs(60);
    while !keep.keep(["exec", "m", "--", "curl", "-s", "localhost:8080"]).status.success() {
        assert!(Instant::now() < deadline, "the server does not come up");
        sleep(Duration::from_millis(200));
    }
    let (before, pid) = asked(&keep, "m");
    let told = keep.ok(["why", "m"]);
    assert!(told.contains("running"), "{told}");

    let told = keep.ok(["pause", "m"]);
    assert!(told.contains("paused") && told.contains("snp-"), "{told}");
    assert_eq!(state(&keep, "m"), "paused");
    assert_eq!(hypervisors(&keep), 0, "nothing of it is left on the host");
    assert!(keep.ok(["ls", "--state", "paused"]).contains("m "));
    let told = keep.ok(["why", "m"]);
    assert!(told.contains("paused") && told.contains("woken by"), "{told}");
    // Again changes nothing, and looking does not wake it.
    keep.ok(["pause", "m"]);
    let shown = keep.ok(["snapshot", "ls", "m"]);
    assert!(shown.contains("pause"), "{shown}");
    assert_eq!(state(&keep, "m"), "paused");

    let (after, same) = asked(&keep, "m");
    assert_eq!((after, same), (before + 1, pid.clone()), "it went on where it was");

    keep.ok(["fork", "m", "try-a", "--start"]);
    assert_eq!(asked(&keep, "try-a"), (after + 1, pid.clone()), "live, processes included");
    assert_eq!(asked(&keep, "m"), (after + 1, pid.clone()), "and the source goes on by itself");
    assert_eq!(asked(&keep, "m").0, after + 2);
    assert_eq!(asked(&keep, "try-a").0, after + 2);

    let told = keep.ok(["fork", "m", "try", "--count", "3"]);
    for name in ["try-1", "try-2", "try-3"] {
        assert!(told.contains(name), "{told}");
        assert_eq!(asked(&keep, name), (after + 3, pid.clone()), "{name}");
    }
    who_they_are(&keep, &["m", "try-1", "try-2", "try-3"]);
    vercels_clients(&keep, "try-1", after + 3);
    refused(&keep);
}

/// To Vercel's clients a paused sandbox is a stopped one, which they wake as they wake any; only
/// that its processes exist.
fn vercels_clients(keep: &Daemon, name: &str, requests: u64) {
    let status = |answer: &Value| answer["sandbox"]["status"].as_str().unwrap().to_owned();
    let path = format!("/api/v2/sandboxes/{name}");
    assert_eq!(status(&vercel(keep, "GET", &path, "")), "running");
    keep.ok(["pause", name]);
    let paused = vercel(keep, "GET", &path, "");
    assert_eq!(status(&paused), "stopped", "{paused}");
    let listed = vercel(keep, "GET", "/api/v2/sandboxes?status=stopped", "");
    assert!(listed["sandboxes"].as_array().unwrap().iter().any(|one| one["name"] == name));
    let woken = vercel(keep, "GET", &format!("{path}?resume=true"), "");
    assert_eq!(status(&woken), "running", "{woken}");
    assert_eq!(asked(keep, name).0, requests + 1, "it went on where it was");
    let session =
        format!("/api/v2/sandboxes/sessions/{}", woken["session"]["id"].as_str().unwrap());
    let run = r#"{"command":"cat","args":["/proc/loadavg"]}"#;
    let ran = vercel(keep, "POST", &format!("{session}/cmd"), run);
    assert!(ran["command"]["id"].is_string(), "{ran}");
    let kept = vercel(keep, "POST", &format!("{session}/snapshot?keepRunning=true"), "{}");
    assert_eq!(kept["snapshot"]["status"], "created", "{kept}");
    let stopped = vercel(keep, "POST", &format!("{session}/stop"), "{}");
    assert_eq!(status(&stopped), "stopped", "{stopped}");
    assert_eq!(state(keep, name), "stopped", "their stop keeps files, as they say");
}

/// One request as Vercel's clients make it, and the answer, which must be a good one.
fn vercel(keep: &Daemon, method: &str, path: &str, body: &str) -> Value {
    let (url, key) = keep.url_and_key();
    let host = url.trim_start_matches("http://").to_owned();
    let mut stream = TcpStream::connect(&host).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let head = format!(
        "{method} {path} HTTP/1.0\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.contains(" 200 ") || head.contains(" 201 "), "{method} {path}: {answer}");
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {answer}"))
}

/// Forks are others than their source, and than each other.
fn who_they_are(keep: &Daemon, names: &[&str]) {
    const WHO: [&str; 4] = [
        "cat /proc/sys/kernel/random/boot_id",
        "head -c 16 /dev/urandom | od -An -tx1",
        "hostname",
        "cat /sys/class/net/eth0/address",
    ];
    for script in WHO {
        let told: BTreeSet<String> = names.iter().map(|name| keep.sh(name, script)).collect();
        assert_eq!(told.len(), names.len(), "`{script}` says the same in two: {told:?}");
    }
    let now = Duration::from_secs(keep.sh(names[0], "date +%s").trim().parse().unwrap());
    let here = std::time::UNIX_EPOCH.elapsed().unwrap();
    assert!(here.abs_diff(now) < Duration::from_secs(5), "its clock is right: {now:?}, {here:?}");
}

/// Invalid requests are refused, and change nothing.
fn refused(keep: &Daemon) {
    for (args, told) in [
        (&["update", "m", "--driver", "container"][..], "stop"),
        (&["update", "try-1", "--driver", "warp"], "warp"),
        (&["fork", "m", "try", "--count", "0"], "count"),
        (&["pause", "nobody"], "nobody"),
        (&["pause", "m", "--expect-generation", "999"], "999"),
        (&["why", "nobody"], "nobody"),
        (&["create", "tiny", "--driver", "microvm", "--image", IMAGE, "--memory", "1M"], "memory"),
    ] {
        let (code, said) = keep.fails(args);
        assert!(said.contains(told), "{args:?}: {code} {said}");
    }
    assert_eq!(state(keep, "m"), "running");
    keep.ok(["create", "box", "--image", IMAGE]);
    let (code, said) = keep.fails(["pause", "box"]);
    assert_eq!(code, 5, "{said}");
    assert!(said.contains("keeps no memory") && said.contains("hint:"), "{said}");
}

#[test]
fn memory_outlives_the_daemon_and_where_it_does_not_that_is_told() {
    const TEST: &str = "memory_outlives_the_daemon_and_where_it_does_not_that_is_told";
    let Some(mut keep) = daemon(TEST) else { return };
    create(&keep, "m");
    counting(&keep, "m");
    let first = count(&keep, "m");

    keep.kill();
    keep.launch();
    assert_eq!(state(&keep, "m"), "running");
    let second = count(&keep, "m");
    assert!(second > first, "it went on without a daemon: {first}, {second}");

    keep.sh("m", "echo kept > /work/file");
    keep.ok(["pause", "m"]);
    let generation = keep.json(["show", "m"])["generation"].as_u64().unwrap();
    keep.kill();
    keep.launch();
    assert_eq!(state(&keep, "m"), "paused");
    let third = count(&keep, "m");
    assert!(third > second, "it went on where it was: {second}, {third}");
    assert_eq!(keep.sh("m", "cat /work/file"), "kept\n");
    assert_eq!(keep.json(["show", "m"])["generation"].as_u64(), Some(generation));

    // A stop keeps files, and says goodbye to the rest.
    keep.ok(["stop", "m"]);
    assert_eq!(hypervisors(&keep), 0);
    assert_eq!(keep.sh("m", "cat /work/file; cat /run/counter.pid 2>/dev/null || true"), "kept\n");

    // Killed in the middle of a pause: it runs or it is paused, and lost is nothing.
    counting(&keep, "m");
    let before = count(&keep, "m");
    let mut pause = keep.command(["pause", "m"]).spawn().unwrap();
    sleep(Duration::from_millis(30));
    keep.kill();
    let _ = pause.wait();
    keep.launch();
    let there = state(&keep, "m");
    assert!(["running", "paused"].contains(&there.as_str()), "{there}");
    assert!(count(&keep, "m") >= before, "{before}");
    keep.ok(["rm", "m"]);
    assert_eq!(hypervisors(&keep), 0);

    is_not_used(&keep);
    is_not_kept(&keep);
}

/// Makes the memory of a snapshot one of another host's.
fn spoil(keep: &Daemon, snapshot: &str) {
    let read = |path: &std::path::Path| -> Value {
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    };
    let record = read(&keep.data().join(format!("snapshots/{snapshot}.json")));
    let layer = record["memory"][0].as_str().unwrap();
    let path = keep.data().join(format!("memory/{layer}/memory.json"));
    let mut layer = read(&path);
    layer["fingerprint"]["hypervisor"] = "another hypervisor".into();
    // Without a checksum it is a document of an older format.
    layer["format"] = 4.into();
    layer.as_object_mut().unwrap().remove("checksum");
    std::fs::write(&path, layer.to_string()).unwrap();
}

/// Memory that cannot be used is reported as lost wherever somebody may look, and files are those
/// of that very moment.
fn is_not_used(keep: &Daemon) {
    create(keep, "m");
    keep.sh("m", "echo old > /work/file");
    keep.ok(["checkpoint", "m"]);
    keep.sh("m", "echo new > /work/file; echo ram > /dev/shm/file");
    keep.ok(["exec", "--detach", "m", "--", "sleep", "1000"]);
    keep.ok(["pause", "m"]);
    let before = keep.json(["show", "m"]);
    assert!(before["fallback"].is_null(), "{before}");
    spoil(keep, before["current_snapshot"].as_str().unwrap());

    let woken = keep.keep(["exec", "m", "--", "sh", "-c", "cat /work/file; ls /dev/shm"]);
    let (out, said) =
        (String::from_utf8(woken.stdout).unwrap(), String::from_utf8(woken.stderr).unwrap());
    assert!(woken.status.success() && out == "new\n", "{out} {said}");
    let generation = before["generation"].as_u64().unwrap();
    let loud = format!("warning: m started from its files at generation {generation}");
    assert!(said.contains(&loud) && said.contains("another hypervisor"), "{said}");
    let shown = keep.json(["show", "m"]);
    assert_eq!(shown["generation"], before["generation"]);
    assert!(shown["fallback"].as_str().unwrap().contains("another hypervisor"), "{shown}");
    for command in ["show", "why"] {
        let told = keep.ok([command, "m"]);
        assert!(
            told.contains("could not be used") && told.contains("another hypervisor"),
            "{told}"
        );
    }
    assert!(keep.log().contains("the memory of a sandbox cannot be used"), "{}", keep.log());
    assert!(keep.ok(["ps", "m", "-a"]).contains("lost"), "what ran is not said to have ended well");
    let again = keep.keep(["exec", "m", "--", "cat", "/work/file"]);
    assert!(
        again.status.success() && again.stderr.is_empty(),
        "it is told to whoever woke it: {again:?}"
    );
}

/// What a process was given is in its machine's memory: that is not kept, by whatever name it is asked for.
fn is_not_kept(keep: &Daemon) {
    const VALUE: &str = "s3cr3t-0123456789-in-memory";
    let mut set = keep.command(["secret", "set", "TOKEN"]);
    let mut set = set.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    set.stdin.take().unwrap().write_all(VALUE.as_bytes()).unwrap();
    assert!(set.wait().unwrap().success());
    let hold = ["exec", "--detach", "m", "--inject", "TOKEN", "--", "sleep", "1000"];
    keep.ok(hold);
    let snapshots = || keep.json(["snapshot", "ls", "m"]);
    let before = snapshots();
    for args in [
        &["pause", "m"][..],
        &["checkpoint", "m"],
        &["fork", "m", "f", "--start"],
        &["fork", "m", "f", "--count", "2"],
    ] {
        let (code, said) = keep.fails(args);
        assert_eq!(code, 5, "{args:?}: {said}");
        assert!(said.contains("TOKEN") && said.contains("memory"), "{args:?}: {said}");
        assert!(said.contains("hint:") && !said.contains(VALUE), "{args:?}: {said}");
        assert_eq!(state(keep, "m"), "running", "{args:?}");
        assert_eq!(snapshots(), before, "{args:?}");
        assert_eq!(keep.ok(["ls", "-q"]), "m\n", "{args:?}");
        assert_eq!(holding(keep, VALUE), "", "{args:?}");
    }
    assert_eq!(keep.sh("m", "cat /work/file"), "new\n", "it goes on");
    // A user who accepts it gets a warning.
    keep.ok(["update", "m", "--guard", "warn"]);
    let told = keep.ok(["pause", "m"]);
    assert!(told.contains("TOKEN"), "{told}");
    assert_eq!(keep.sh("m", "cat /work/file"), "new\n");
    assert_ne!(holding(keep, VALUE), "", "it is where it was to be looked for");
    keep.ok(["rm", "m"]);
}

/// The files of sandboxes, their disks and memory that hold a text.
fn holding(keep: &Daemon, text: &str) -> String {
    let kept = ["index.sqlite", "layers", "memory", "sandboxes", "snapshots"];
    let kept = kept.map(|name| keep.data().join(name));
    let found = Command::new("grep").args(["-rlaF", "--", text]).args(kept).output().unwrap();
    String::from_utf8(found.stdout).unwrap()
}

#[test]
fn files_move_between_drivers_and_idle_machines_are_paused() {
    const TEST: &str = "files_move_between_drivers_and_idle_machines_are_paused";
    /// Things that are hard to carry.
    const TREE: &str = r#"mkdir -p /work/kept/dir && cd /work/kept && echo hello > a && ln a dir/hard && ln -s /etc/passwd link &&
        dd if=/dev/zero of=sparse bs=1 count=1 seek=1000000 2>/dev/null && chmod 4755 a && chown 1000:1000 dir &&
        printf x > "$(printf 'new\nline')" && setfattr -n user.note -v carried a && mkfifo pipe && rm -r /home/user && rm /etc/group"#;
    // Sizes and link counts of directories are each filesystem's own.
    const DIGEST: &str = r"cd / && { find work/kept home etc ! -type d ! -name 'host*' ! -name 'resolv*' -printf '%p %y %m %n %U %G %l %s %T@\n';
        find work/kept -type d -printf '%p %m %U %G %T@\n'; getfattr -n user.note --only-values work/kept/a; echo;
        find work/kept home etc ! -name 'host*' ! -name 'resolv*' -type f -exec sha256sum {} +; } | sort";
    let Some(keep) = daemon(TEST) else { return };
    keep.ok(["create", "app", "--image", IMAGE]);
    keep.sh("app", TREE);
    keep.ok(["stop", "app"]);
    let digest = keep.sh("app", DIGEST);
    let (_, said) = keep.fails(["update", "app", "--driver", "microvm"]);
    assert!(said.contains("stop"), "one that runs is to be stopped first: {said}");
    keep.ok(["stop", "app"]);
    keep.ok(["update", "app", "--driver", "microvm", "--memory", "1G"]);
    assert_eq!(keep.sh("app", DIGEST), digest, "in a machine");
    keep.sh("app", "echo more > /work/kept/more && setfattr -n user.note -v again /work/kept/a");
    let digest = keep.sh("app", DIGEST);
    keep.ok(["stop", "app"]);
    keep.ok(["update", "app", "--driver", "container"]);
    assert_eq!(keep.sh("app", DIGEST), digest, "and back");
    keep.ok(["stop", "app"]);
    keep.ok(["update", "app", "--driver", "microvm", "--idle-timeout", "1s"]);

    // Nobody uses it: it is paused by itself, and its files stay what they are.
    assert_eq!(keep.sh("app", DIGEST), digest);
    let deadline = Instant::now() + Duration::from_secs(60);
    while state(&keep, "app") != "paused" {
        assert!(Instant::now() < deadline, "it is not paused: {}", keep.ok(["why", "app"]));
        sleep(Duration::from_millis(200));
    }
    loop {
        let told = keep.ok(["why", "app"]);
        if told.contains("nobody had used it") {
            break;
        }
        // Why its session ended is written down right after.
        assert!(told.contains("has just ended") && Instant::now() < deadline, "{told}");
        sleep(Duration::from_millis(100));
    }
    keep.ok(["update", "app", "--on-idle", "stop"]);
    assert_eq!(keep.json(["show", "app"])["on_idle"], "stop");
    assert_eq!(keep.sh("app", DIGEST), digest);
    let deadline = Instant::now() + Duration::from_secs(60);
    while state(&keep, "app") != "stopped" {
        assert!(Instant::now() < deadline, "it is not stopped: {}", keep.ok(["why", "app"]));
        sleep(Duration::from_millis(200));
    }
}

#[test]
fn a_host_that_is_not_prepared_says_what_is_missing() {
    const TEST: &str = "a_host_that_is_not_prepared_says_what_is_missing";
    if let Some(why) = sandkeep_testkit::daemon::unfit() {
        return skipped(TEST, why);
    }
    let keep = Daemon::with_small_image(KEEP);
    let (code, said) = keep.fails(["create", "m", "--driver", "microvm", "--image", IMAGE]);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("microvm") && said.contains("keep microvm setup"), "{said}");
    assert!(!keep.ok(["ls", "-q"]).contains('m'));
    let told = keep.ok(["doctor", "--data", keep.data().to_str().unwrap()]);
    assert!(told.contains("microvm: kernel"), "{told}");
    for (args, what) in [
        (&["--kernel", "/no/such"][..], "--modules"),
        (&["--kernel", "/no/such", "--modules", "/lib"], "no kernel"),
        (&["--kernel", "/bin/true", "--modules", "/no/such"], "no modules"),
    ] {
        let (code, said) = keep.fails(["microvm", "setup"].iter().chain(args));
        assert!(said.contains(what), "{args:?}: {code} {said}");
    }
    let Ok(kernel) = test_kernel() else {
        return skipped(
            TEST,
            "there is no kernel: that a running server takes one up is not tested",
        );
    };
    // The server that refused continues, and needs no restart.
    let setup = ["microvm", "setup", "--kernel"].map(Into::into);
    let setup = setup.into_iter().chain([kernel.vmlinuz.into_os_string(), "--modules".into()]);
    keep.ok(setup.chain([kernel.modules.into_os_string()]));
    keep.ok(["create", "m", "--driver", "microvm", "--image", IMAGE]);
    assert_eq!(keep.ok(["exec", "m", "--", "echo", "booted"]), "booted\n");
    keep.ok(["rm", "m"]);
}
