//! The event feed, over the real binary and a real daemon.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::sync::mpsc;
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

fn events(keep: &Daemon, args: &[&str]) -> Vec<Value> {
    let all = [&["events", "--json"], args].concat();
    let text = keep.ok(all);
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn kinds(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["kind"].as_str().unwrap()).collect()
}

/// `keep events --follow`, read line by line.
struct Follower {
    child: Child,
    lines: mpsc::Receiver<Value>,
}

impl Follower {
    fn start(keep: &Daemon, args: &[&str]) -> Self {
        let all = [&["events", "--follow", "--json"], args].concat();
        let mut child = keep.command(all).stdout(Stdio::piped()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                if sender.send(serde_json::from_str(&line).unwrap()).is_err() {
                    return;
                }
            }
        });
        Self { child, lines }
    }

    /// Reads until an event of a kind comes, and returns all up to it.
    fn until(&self, kind: &str) -> Vec<Value> {
        let mut seen = Vec::new();
        loop {
            let event = self.lines.recv_timeout(Duration::from_secs(30));
            let event = event.unwrap_or_else(|_| panic!("no {kind} after {:?}", kinds(&seen)));
            let is_it = event["kind"] == kind;
            seen.push(event);
            if is_it {
                return seen;
            }
        }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn what_happens_is_told_in_order_and_can_be_filtered() {
    let Some(keep) = daemon("what_happens_is_told_in_order_and_can_be_filtered") else { return };
    keep.ok(["create", "app", "--image", SMALL, "--tag", "team=a"]);
    keep.ok(["create", "other", "--image", SMALL]);
    keep.sh("app", "echo one > /work/file; exit 0");
    let code = keep.keep(["exec", "app", "--", "sh", "-c", "exit 3"]).status.code();
    assert_eq!(code, Some(3));
    keep.ok(["checkpoint", "app", "--label", "good"]);
    keep.ok(["ports", "app", "8080", "public"]);
    keep.ok(["stop", "app"]);
    keep.ok(["fork", "app", "try"]);
    keep.ok(["rm", "try"]);
    keep.ok(["trash", "restore", "try"]);

    let all = events(&keep, &[]);
    let ids: Vec<u64> = all.iter().map(|e| e["id"].as_str().unwrap().parse().unwrap()).collect();
    assert!(ids.windows(2).all(|pair| pair[0] < pair[1]), "{ids:?}");
    let of_app: Vec<Value> = events(&keep, &["app"]);
    let told = kinds(&of_app);
    let mut rest = told.iter();
    for wanted in [
        "sandbox.created",
        "sandbox.starting",
        "sandbox.running",
        "command.started",
        "command.ended",
        "command.started",
        "command.ended",
        "snapshot.created",
        "sandbox.updated",
        "port.published",
        "sandbox.stopping",
        "sandbox.stopped",
        "session.ended",
    ] {
        assert!(rest.any(|kind| *kind == wanted), "{wanted} in its place in {told:?}");
    }
    let find = |kind: &str| of_app.iter().find(|event| event["kind"] == kind).unwrap();
    assert_eq!(find("sandbox.created")["sandbox"]["tags"]["team"], "a");
    assert_eq!(find("snapshot.created")["data"]["label"], "good");
    assert_eq!(find("snapshot.created")["data"]["cause"], "checkpoint");
    assert_eq!(find("port.published")["data"]["port"], 8080);
    assert_eq!(find("session.ended")["data"]["end"], "stopped");
    let ended: Vec<i64> = events(&keep, &["app", "--kind", "command.ended"])
        .iter()
        .map(|event| event["data"]["exit_code"].as_i64().unwrap())
        .collect();
    assert_eq!(ended, [0, 3]);

    let forked = events(&keep, &["try"]);
    assert_eq!(forked[0]["data"]["forked_from"]["name"], "app");
    let told = kinds(&forked);
    assert!(told.contains(&"sandbox.deleted") && told.contains(&"sandbox.restored"), "{told:?}");
    let tagged = events(&keep, &["--tag", "team=a", "--kind", "sandbox.created"]);
    let names: Vec<_> = tagged.iter().map(|e| e["sandbox"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["app", "try"], "a fork has its source's tags");
    let after = of_app[3]["id"].as_str().unwrap();
    assert_eq!(kinds(&events(&keep, &["app", "--after", after])), kinds(&of_app[4..]));

    let text = keep.ok(["events", "app", "--kind", "sandbox.stopped"]);
    assert!(text.contains("sandbox.stopped") && text.contains("app"), "{text}");
    assert_eq!(text.lines().count(), 1);
}

#[test]
fn a_follower_misses_nothing_over_a_restart_and_a_kill() {
    let Some(mut keep) = daemon("a_follower_misses_nothing_over_a_restart_and_a_kill") else {
        return;
    };
    keep.keep_address();
    keep.ok(["create", "app", "--image", SMALL, "--no-start"]);
    let follower = Follower::start(&keep, &["app"]);
    // The follower attaches at some later moment, so the commands are repeated.
    let mut seen = Vec::new();
    for round in 0..3 {
        keep.sh("app", "true");
        keep.ok(["stop", "app"]);
        seen.extend(follower.until("session.ended"));
        match round {
            0 => keep.terminate(),
            1 => keep.kill(),
            _ => break,
        }
        keep.launch();
    }
    let told = kinds(&seen);
    for kind in ["sandbox.running", "command.started", "command.ended", "sandbox.stopped"] {
        let count = told.iter().filter(|told| **told == kind).count();
        assert_eq!(count, 3, "{kind} in {told:?}");
    }
    let ids: Vec<&str> = seen.iter().map(|event| event["id"].as_str().unwrap()).collect();
    assert!(ids.windows(2).all(|pair| pair[0] < pair[1]), "{ids:?}");
}

#[test]
fn damage_is_an_event_and_a_metric() {
    let Some(mut keep) = daemon("damage_is_an_event_and_a_metric") else { return };
    keep.ok(["create", "app", "--image", SMALL]);
    keep.sh("app", "echo one > /work/file");
    keep.ok(["stop", "app"]);
    assert!(events(&keep, &["--kind", "damage"]).is_empty());
    keep.terminate();
    let current = fs::read_dir(keep.data().join("snapshots")).unwrap().next().unwrap().unwrap();
    fs::write(current.path(), "not a manifest").unwrap();
    keep.launch();
    let found = events(&keep, &["--kind", "damage.found"]);
    let told = found.iter().any(|event| event["data"]["damage"] == "unreadable_manifest");
    assert!(told, "{found:?}");

    let (status, page) = get(&keep, "/metrics", true);
    assert!(status.contains("200"), "{status}");
    let line = "sandkeep_damage{kind=\"unreadable_manifest\"} 1";
    assert!(page.lines().any(|one| one == line), "{page}");
    assert!(page.lines().any(|one| one.starts_with("sandkeep_sandboxes{state=")), "{page}");
    let (status, _) = get(&keep, "/metrics", false);
    assert!(status.contains("401"), "{status}");
}

#[test]
fn mistakes_are_told_and_a_project_sees_its_own_events_alone() {
    let Some(keep) = daemon("mistakes_are_told_and_a_project_sees_its_own_events_alone") else {
        return;
    };
    for (args, wanted) in [
        (&["--kind", "sandbox.exploded"][..], "there is no kind `sandbox.exploded`"),
        (&["--since", "yesterday"][..], "neither a time"),
        (&["--after", "x"][..], "not the id of an event"),
        (&["--after", "99999999999999999"][..], "later than every event"),
        (&["--tag", "team"][..], "is not `key=value`"),
        (&["Not A Name"][..], "sandbox"),
    ] {
        let (code, told) = keep.fails([&["events"], args].concat());
        assert_eq!(code, 1, "{told}");
        assert!(told.contains(wanted), "{wanted} in {told}");
    }

    keep.ok(["create", "app", "--image", SMALL, "--no-start"]);
    keep.ok(["project", "create", "guest"]);
    let made = keep.json(["--project", "guest", "key", "create", "them"]);
    let key = made["secret"].as_str().or(made["key"].as_str()).unwrap().to_owned();
    let theirs = keep.ok(["--key", &key, "events", "--json", "--since", "1d"]);
    assert_eq!(theirs, "", "nothing of another project");
    let (code, told) = keep.fails(["--key", &key, "events", "--all-projects"]);
    assert_eq!(code, 1);
    assert!(told.contains("scope `admin`"), "{told}");
    let all = events(&keep, &["--all-projects"]);
    assert!(all.iter().any(|event| event["project"] == "default"), "{all:?}");
    // A project that goes takes its events along.
    keep.ok(["project", "rm", "guest"]);
}

#[test]
fn a_browser_resumes_by_the_last_id_it_saw() {
    let Some(keep) = daemon("a_browser_resumes_by_the_last_id_it_saw") else { return };
    keep.ok(["create", "app", "--image", SMALL, "--no-start"]);
    keep.ok(["update", "app", "--tag", "a=b"]);
    let created = events(&keep, &["--kind", "sandbox.created"]).remove(0);
    let id = created["id"].as_str().unwrap();
    let (url, key) = keep.url_and_key();
    let address = url.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let request = format!(
        "GET /v1/events HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {key}\r\nLast-Event-ID: {id}\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).unwrap();
    let mut lines = BufReader::new(stream).lines();
    let mut told = Vec::new();
    while !told.iter().any(|line: &String| line == "event: sandbox.updated") {
        told.push(lines.next().unwrap().unwrap());
    }
    assert!(told.iter().any(|line| line == "content-type: text/event-stream"), "{told:?}");
    assert!(told.iter().any(|line| line == "event: stream.opened"), "{told:?}");
    assert!(!told.iter().any(|line| line == "event: sandbox.created"), "{told:?}");
}

/// A plain GET, and the body of the answer.
fn get(keep: &Daemon, path: &str, with_key: bool) -> (String, String) {
    let (url, key) = keep.url_and_key();
    let address = url.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let key = if with_key { format!("Authorization: Bearer {key}\r\n") } else { String::new() };
    let request =
        format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n{key}Connection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.lines().next().unwrap().to_owned(), body.to_owned())
}
