//! A daemon on a disk that fails for a while, hangs, or becomes read-only.
//!
//! - What the disk may have lost is never acknowledged, whichever sync got the error first; the
//!   user sees which files are in doubt, can still get them out, and decides.
//! - While the disk hangs the API answers what it can from memory, and `/readyz` reports it.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::thread::sleep;
use std::time::{Duration, Instant};

use sandkeep_testkit::daemon::{Daemon, SMALL, skipped};
use sandkeep_testkit::fault_disk::{Fault, FaultDisk, Filesystem, unfit};
use serde_json::Value;

/// What the disk refuses to store.
const MARK: &str = "the disk does not like these words";

/// A daemon on a disk. The daemon goes first.
struct Case {
    daemon: Daemon,
    disk: FaultDisk,
}

impl Case {
    fn new(test: &str) -> Option<Self> {
        if let Some(why) = unfit() {
            skipped(test, &why);
            return None;
        }
        let disk = FaultDisk::new(Filesystem::Ext4);
        let data = disk.path().join("data");
        let daemon = Daemon::start_at(env!("CARGO_BIN_EXE_keep"), data, &[]);
        daemon.import_small();
        Some(Self { daemon, disk })
    }

    fn create(&self, name: &str) {
        self.daemon.ok(["create", name, "--image", SMALL]);
        self.daemon.sh(name, "mkdir -p /work && cd /work && echo before > before && sync");
    }

    /// Writes a file of which the disk stores nothing, and waits until the daemon has noticed.
    fn lose(&self, name: &str) {
        let fault = self.disk.inject(Fault::writes().containing(MARK));
        self.daemon.sh(name, &format!("for i in $(seq 500); do echo '{MARK}'; done > /work/lost"));
        self.damaged("sync_failed");
        self.disk.heal(fault);
    }

    fn damaged(&self, kind: &str) -> Value {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let (_, found) = http(&self.daemon, "/v1/damage");
            let items = found["items"].as_array().cloned().unwrap_or_default();
            if let Some(found) = items.into_iter().find(|damage| damage["kind"] == kind) {
                return found;
            }
            assert!(Instant::now() < deadline, "no {kind} in {found}");
            sleep(Duration::from_millis(50));
        }
    }

    fn refused(&self, args: &[&str]) -> String {
        let (_, said) = self.daemon.fails(args);
        assert!(said.contains("/work/lost"), "{args:?}: {said}");
        said
    }

    /// The power goes, and everything that was not stored.
    fn power_cut(&mut self) {
        self.disk.cut(1);
        self.daemon.kill();
        self.disk.kill_users();
        self.disk.power_on();
        self.daemon.launch();
    }

    fn lines(&self, name: &str) -> String {
        self.daemon
            .sh(name, &format!("grep -c '{MARK}' /work/lost; wc -l < /work/lost; cat /work/before"))
    }
}

impl Drop for Case {
    fn drop(&mut self) {
        // The daemon goes next, and wants to delete its sandboxes.
        self.disk.heal_all();
    }
}

/// Asks over HTTP, and does not wait for ever.
fn http(daemon: &Daemon, path: &str) -> (u16, Value) {
    let (url, key) = daemon.url_and_key();
    ask(&url, &key, "GET", path).unwrap()
}

fn ask(url: &str, key: &str, method: &str, path: &str) -> Result<(u16, Value), String> {
    ask_with(url, key, method, path, "{}", Duration::from_secs(15))
}

fn ask_with(
    url: &str,
    key: &str,
    method: &str,
    path: &str,
    body: &str,
    within: Duration,
) -> Result<(u16, Value), String> {
    let host = url.trim_start_matches("http://");
    let mut stream = TcpStream::connect(host).map_err(|error| error.to_string())?;
    stream.set_read_timeout(Some(within)).unwrap();
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
    .map_err(|error| error.to_string())?;
    let mut text = String::new();
    stream.read_to_string(&mut text).map_err(|error| format!("{path}: {error}"))?;
    let status = text.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or(0);
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let (begin, end) = (body.find('{').unwrap_or(0), body.rfind('}').map_or(0, |at| at + 1));
    Ok((status, serde_json::from_str(&body[begin..end]).unwrap_or(Value::Null)))
}

#[test]
fn what_a_failing_disk_lost_is_not_acknowledged_and_can_be_replaced() {
    let Some(mut case) =
        Case::new("what_a_failing_disk_lost_is_not_acknowledged_and_can_be_replaced")
    else {
        return;
    };
    case.create("app");
    case.daemon.ok(["create", "other", "--image", SMALL]);
    case.lose("app");
    let told = case.damaged("layer_in_doubt");
    assert!(told["detail"].as_str().unwrap().contains("app"), "{told}");
    // Another session's sync gets no error any more.
    let _ = case.daemon.keep(["stop", "other"]);
    for _ in 0..2 {
        let said = case.refused(&["stop", "app"]);
        assert!(said.contains("--accept-doubtful"), "{said}");
        case.refused(&["checkpoint", "app"]);
        case.refused(&["fork", "app", "copy"]);
    }
    assert_eq!(http(&case.daemon, "/v1/sandboxes/app").1["state"], "running");
    // They can be had; and files that are new are not in doubt.
    case.daemon.sh("app", "cd /work && for f in *; do cp -a $f .new && mv .new $f || exit 1; done");
    case.daemon.ok(["stop", "app"]);
    case.power_cut();
    assert_eq!(case.lines("app"), "500\n500\nbefore\n");
}

#[test]
fn a_session_that_breaks_off_leaves_what_is_in_doubt_to_be_decided() {
    let Some(mut case) =
        Case::new("a_session_that_breaks_off_leaves_what_is_in_doubt_to_be_decided")
    else {
        return;
    };
    case.create("app");
    case.lose("app");
    case.damaged("layer_in_doubt");
    // The daemon and all machines end; the disk has had no power cut.
    case.daemon.kill();
    case.disk.kill_users();
    case.daemon.launch();
    case.refused(&["start", "app"]);
    case.refused(&["stop", "app"]);
    case.damaged("layer_in_doubt");
    let stopped = case.daemon.json(["stop", "app", "--accept-doubtful"]);
    let findings = stopped["findings"].as_array().unwrap();
    assert!(
        findings.iter().any(|found| found["kind"] == "doubtful" && found["path"] == "/work/lost"),
        "{stopped}"
    );
    case.power_cut();
    assert_eq!(case.lines("app"), "500\n500\nbefore\n");
}

#[test]
fn a_stop_that_the_disk_refused_is_refused_again() {
    let Some(mut case) = Case::new("a_stop_that_the_disk_refused_is_refused_again") else { return };
    case.create("app");
    case.daemon.ok(["stop", "app"]);
    case.daemon.sh("app", "echo two > /work/before");
    let fault = case.disk.inject(Fault::writes().containing(MARK));
    case.daemon.sh("app", &format!("for i in $(seq 500); do echo '{MARK}'; done > /work/lost"));
    case.daemon.fails(["stop", "app"]);
    case.disk.heal(fault);
    case.refused(&["stop", "app"]);
    case.refused(&["stop", "app"]);
    // What it was before exists all the same.
    case.daemon.ok(["stop", "app", "--discard"]);
    case.power_cut();
    assert_eq!(case.daemon.sh("app", "ls /work; cat /work/before"), "before\nbefore\n");
}

#[test]
fn while_the_disk_hangs_reads_go_on_and_health_tells_the_truth() {
    let Some(case) = Case::new("while_the_disk_hangs_reads_go_on_and_health_tells_the_truth")
    else {
        return;
    };
    case.create("app");
    case.daemon.ok(["create", "asleep", "--image", SMALL]);
    case.daemon.sh("asleep", "echo x > /work-x");
    case.daemon.ok(["stop", "asleep"]);
    let (url, key) = case.daemon.url_and_key();
    let get = |path: &str| ask(&url, &key, "GET", path);
    assert_eq!(get("/readyz").unwrap().0, 200);
    let fault = case.disk.inject(Fault::writes_and_flushes().hang());
    // Much that wants to write, and waits.
    let waiting: Vec<_> = (0..40)
        .map(|number| {
            let (url, key) = (url.clone(), key.clone());
            std::thread::spawn(move || {
                let _ = match number % 2 {
                    0 => ask(&url, &key, "POST", "/v1/sandboxes/app/checkpoint"),
                    _ => ask(&url, &key, "POST", "/v1/sandboxes/asleep/start"),
                };
            })
        })
        .collect();
    let begun = Instant::now();
    let mut unwell = None;
    while begun.elapsed() < Duration::from_secs(60) && unwell.is_none() {
        for path in ["/v1/sandboxes", "/v1/sandboxes/app", "/v1/sandboxes/asleep", "/v1/snapshots"]
        {
            let (status, body) = get(path).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(status, 200, "{path}: {body}");
        }
        let (status, body) = get("/readyz").unwrap();
        unwell = (status == 503).then_some(body);
        sleep(Duration::from_millis(200));
    }
    let unwell = unwell.expect("health tells the truth");
    assert_eq!(unwell["error"]["code"], "storage_not_responding", "{unwell}");
    case.disk.heal(fault);
    waiting.into_iter().for_each(|one| one.join().unwrap());
    let deadline = Instant::now() + Duration::from_secs(60);
    while get("/readyz").unwrap().0 != 200 {
        assert!(Instant::now() < deadline, "it is well again");
        sleep(Duration::from_millis(100));
    }
    assert_eq!(case.daemon.sh("app", "cat /work/before"), "before\n");
}

#[test]
fn while_the_disk_hangs_no_call_waits_for_ever_and_nothing_is_lost() {
    let Some(mut case) =
        Case::new("while_the_disk_hangs_no_call_waits_for_ever_and_nothing_is_lost")
    else {
        return;
    };
    case.create("app");
    case.create("asleep");
    case.create("leaving");
    case.daemon.ok(["stop", "asleep"]);
    case.daemon.ok(["stop", "leaving"]);
    case.daemon.sh("app", "echo kept > /work/kept");
    case.daemon.ok(["checkpoint", "app"]);
    let (url, key) = case.daemon.url_and_key();
    let fault = case.disk.inject(Fault::writes_and_flushes().hang());
    let create = format!(r#"{{"name": "new", "image": "{SMALL}"}}"#);
    let calls = [
        ("POST", "/v1/sandboxes", create.as_str()),
        ("POST", "/v1/sandboxes/app/checkpoint", "{}"),
        ("POST", "/v1/sandboxes/app/stop", "{}"),
        ("POST", "/v1/sandboxes/asleep/start", "{}"),
        ("POST", "/v1/sandboxes/asleep/fork", r#"{"name": "copy"}"#),
        ("DELETE", "/v1/sandboxes/leaving", "{}"),
        ("POST", "/v1/projects", r#"{"name": "second"}"#),
        ("PUT", "/v1/secrets/SECRET", r#"{"value": "a long enough value"}"#),
    ];
    // The probe has to wait for ten seconds, the call for twenty.
    let within = Duration::from_secs(60);
    let answers: Vec<_> = std::thread::scope(|scope| {
        let asked = calls.map(|(method, path, body)| {
            let (url, key) = (&url, &key);
            scope.spawn(move || ask_with(url, key, method, path, body, within))
        });
        asked.into_iter().map(|one| one.join().expect("it was asked")).collect()
    });
    let mut refused = 0;
    for ((method, path, _), answer) in calls.iter().zip(&answers) {
        let (status, body) = answer.as_ref().unwrap_or_else(|why| panic!("{method} {path}: {why}"));
        match status {
            503 => {
                assert_eq!(body["error"]["code"], "storage_not_responding", "{path}: {body}");
                assert!(body["error"]["hint"].is_string(), "{path}: {body}");
                refused += 1;
            }
            200..300 | 409 => {}
            _ => panic!("{method} {path}: {status} {body}"),
        }
    }
    assert!(refused >= 5, "{answers:?}");
    let (status, health) = ask(&url, &key, "GET", "/readyz").unwrap();
    assert_eq!((status, &health["error"]["code"]), (503, &"storage_not_responding".into()));
    // Reads, in between and all the time.
    for path in ["/v1/sandboxes", "/v1/sandboxes/app", "/v1/snapshots", "/v1/drives"] {
        assert_eq!(ask(&url, &key, "GET", path).unwrap().0, 200, "{path}");
    }

    case.disk.heal(fault);
    let deadline = Instant::now() + Duration::from_secs(60);
    while ask(&url, &key, "GET", "/readyz").unwrap().0 != 200 {
        assert!(Instant::now() < deadline, "it is well again");
        sleep(Duration::from_millis(100));
    }
    // What was begun came to its end, and works.
    assert_eq!(case.daemon.sh("app", "cat /work/kept /work/before"), "kept\nbefore\n");
    assert_eq!(case.daemon.sh("asleep", "cat /work/before"), "before\n");
    case.daemon.ok(["stop", "app"]);
    case.power_cut();
    assert_eq!(case.daemon.sh("app", "cat /work/kept /work/before"), "kept\nbefore\n");
    assert_eq!(case.daemon.sh("asleep", "cat /work/before"), "before\n");
}

#[test]
fn a_disk_that_became_read_only_is_named() {
    let Some(case) = Case::new("a_disk_that_became_read_only_is_named") else { return };
    case.create("app");
    case.daemon.ok(["stop", "app"]);
    let (url, key) = case.daemon.url_and_key();
    // The kernel gives a filesystem up when it cannot write its journal.
    case.disk.inject(Fault::writes_and_flushes());
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let (status, body) = ask(&url, &key, "GET", "/readyz").unwrap();
        if status == 503 && body["error"]["code"] == "read_only_filesystem" {
            break;
        }
        assert!(Instant::now() < deadline, "health tells the truth: {status} {body}");
        sleep(Duration::from_millis(100));
    }
    let (status, body) = ask(&url, &key, "POST", "/v1/sandboxes/app/start").unwrap();
    let error = &body["error"];
    assert_eq!((status, &error["code"]), (503, &Value::from("read_only_filesystem")), "{body}");
    assert!(error["message"].as_str().unwrap().contains("Read-only file system"), "{body}");
    assert_eq!(ask(&url, &key, "GET", "/v1/sandboxes/app").unwrap().0, 200);
}
