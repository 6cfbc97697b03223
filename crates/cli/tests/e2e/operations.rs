//! What operators do: HTTPS, logs, figures, load.

use std::process::Command;
use std::time::{Duration, Instant};

use sandkeep_testkit::daemon::{Daemon, SMALL, skipped, unfit};
use serde_json::Value;

fn keep() -> &'static str {
    env!("CARGO_BIN_EXE_keep")
}

/// Runs `keep` as on another machine: it has only the address and key that it is given.
fn elsewhere(args: &[&str]) -> (bool, String, String) {
    let mut command = Command::new(keep());
    command.args(args).env("SANDKEEP_DATA", "/nowhere").env("NO_COLOR", "1");
    for name in ["SANDKEEP_URL", "SANDKEEP_KEY", "SANDKEEP_CA"] {
        command.env_remove(name);
    }
    let output = command.output().expect("keep starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn https_from_its_certificate_to_a_shell_command() {
    if let Some(why) = unfit() {
        return skipped("https_from_its_certificate_to_a_shell_command", why);
    }
    let home = tempfile::TempDir::with_prefix("keep-tls-").unwrap();
    let at = |name: &str| home.path().join("tls").join(name).display().to_string();
    let init = || {
        let folder = home.path().join("tls").display().to_string();
        let (ok, said, error) = elsewhere(&["tls", "init", "keep.test", "--dir", &folder]);
        assert!(ok, "{error}");
        said
    };
    let said = init();
    for told in [&at("ca.pem"), "keep.test", "--ca", "[tls]", "expires in 397 days"] {
        assert!(said.contains(told), "{told} in {said}");
    }
    let settings = home.path().join("keep.toml");
    let text =
        format!("[tls]\ncertificate = '{}'\nkey = '{}'\n", at("server.pem"), at("server.key"));
    std::fs::write(&settings, text).unwrap();
    let settings = settings.display().to_string();
    let daemon = Daemon::start_with(keep(), &[("SANDKEEP_CONFIG", &settings)]);
    daemon.import_small();
    let (url, key) = daemon.url_and_key();
    assert!(url.starts_with("https://127.0.0.1:"), "{url}");

    // On this machine the address is enough.
    daemon.ok(["--url", &url, "create", "my-app", "--image", SMALL]);
    let ca = at("ca.pem");
    let there = |rest: &[&str]| {
        let args = [&["--url", &url, "--key", &key, "--ca", &ca], rest].concat();
        elsewhere(&args)
    };
    let (ok, out, error) = there(&["exec", "my-app", "--", "sh", "-c", "echo over TLS"]);
    assert_eq!((ok, out.as_str()), (true, "over TLS\n"), "{error}");
    // A command with a terminal's standard input goes over a WebSocket.
    let (ok, out, error) = there(&["exec", "-i", "my-app", "--", "sh", "-c", "cat; echo done"]);
    assert_eq!((ok, out.as_str()), (true, "done\n"), "{error}");
    let (ok, _, error) = elsewhere(&["--url", &url, "--key", &key, "ls"]);
    assert!(!ok && error.contains("--ca"), "{error}");
    let plain = url.replace("https://", "http://");
    let (ok, _, error) = elsewhere(&["--url", &plain, "--key", &key, "ls"]);
    assert!(!ok && error.contains("use https://"), "{error}");

    // Its ports say that they are reached by TLS.
    daemon.ok(["update", "my-app", "--publish", "3000"]);
    let ports = daemon.json(["ports", "my-app"]);
    assert!(ports.to_string().contains("https://"), "{ports}");

    // A bad certificate: the former one stays, and doctor says so.
    std::fs::write(at("server.pem"), "garbage").unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while !daemon.log().contains("cannot use the new TLS certificate") {
        assert!(Instant::now() < deadline, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(there(&["ls"]).0, "it is served with the former one");
    let doctor = daemon.json(["doctor"]);
    let findings = doctor["findings"].as_array().unwrap();
    let tls = findings.iter().find(|finding| finding["name"] == "server: tls").expect("a finding");
    assert_eq!(tls["verdict"], "weak");
    // A good one is taken; clients need nothing new.
    init();
    let deadline = Instant::now() + Duration::from_secs(20);
    while !daemon.log().contains("loaded the new TLS certificate") {
        assert!(Instant::now() < deadline, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(there(&["ls"]).0);
    daemon.ok(["rm", "my-app"]);
}

/// An answer of the API, with its request id.
fn ask(daemon: &Daemon, method: &str, path: &str, id: Option<&str>) -> (String, String) {
    use std::io::{Read as _, Write as _};
    let (url, key) = daemon.url_and_key();
    let address = url.strip_prefix("http://").unwrap();
    let mut socket = std::net::TcpStream::connect(address).unwrap();
    let id = id.map(|id| format!("x-request-id: {id}\r\n")).unwrap_or_default();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {key}\r\n{id}connection: close\r\n\r\n"
    );
    socket.write_all(request.as_bytes()).unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), body.to_owned())
}

#[test]
fn logs_are_json_with_the_id_of_the_request_and_a_line_per_event() {
    if let Some(why) = unfit() {
        return skipped("logs_are_json_with_the_id_of_the_request_and_a_line_per_event", why);
    }
    let daemon = Daemon::start_with(keep(), &[("SANDKEEP_LOG_FORMAT", "json")]);
    daemon.import_small();
    daemon.ok(["create", "my-app", "--image", SMALL, "--no-start"]);
    let (head, _) = ask(&daemon, "POST", "/v1/sandboxes/my-app/start", Some("mine-42"));
    assert!(head.starts_with("HTTP/1.1 200") && head.contains("x-request-id: mine-42"), "{head}");
    let (head, body) = ask(&daemon, "GET", "/v1/sandboxes/none", Some("bad id, with spaces"));
    let made = head.lines().find_map(|line| line.strip_prefix("x-request-id: ")).unwrap();
    assert!(made.starts_with("req-"), "{head}");
    assert!(body.contains(made), "{body}");
    daemon.ok(["stop", "my-app"]);
    daemon.ok(["rm", "my-app"]);
    let log = daemon.log();
    // The greeting is for people, on standard output.
    let lines: Vec<Value> =
        log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    assert!(log.lines().filter(|line| line.starts_with('{')).count() == lines.len(), "{log}");
    for line in &lines {
        for field in ["time", "level", "target", "message"] {
            assert!(line[field].is_string(), "{field} in {line}");
        }
    }
    let of = |kind: &str| {
        let found: Vec<&Value> = lines.iter().filter(|line| line["kind"] == kind).collect();
        assert_eq!(found.len(), 1, "{kind}: {log}");
        found[0].clone()
    };
    let running = of("sandbox.running");
    assert_eq!(running["request_id"], "mine-42", "{running}");
    assert_eq!((&running["sandbox"], &running["level"]), (&"my-app".into(), &"info".into()));
    for kind in ["sandbox.created", "sandbox.stopped", "snapshot.created", "sandbox.deleted"] {
        assert!(of(kind)["request_id"].is_string(), "{kind}");
    }
}

#[test]
fn load_is_shown_and_nothing_is_woken_for_it() {
    if let Some(why) = unfit() {
        return skipped("load_is_shown_and_nothing_is_woken_for_it", why);
    }
    let daemon = Daemon::with_small_image(keep());
    daemon.ok(["create", "busy", "--image", SMALL]);
    daemon.ok(["create", "asleep", "--image", SMALL, "--no-start"]);
    daemon.sh(
        "busy",
        "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; head -c 3000000 /dev/zero > /file",
    );
    daemon.ok(["exec", "--detach", "busy", "--", "sh", "-c", "while :; do :; done"]);

    let one = daemon.json(["stats", "busy"]);
    let usage = &one["usage"];
    let number = |name: &str| usage[name].as_u64().unwrap_or_else(|| panic!("{name} in {one}"));
    assert!(one["cpu_percent"].as_f64().is_some_and(|percent| percent > 5.0), "{one}");
    assert!(number("cpu_ms") > 0 && number("memory_bytes") > 0 && number("wall_ms") > 0, "{one}");
    assert!(number("processes") >= 2 && number("commands") == 1, "{one}");
    assert!(number("disk_bytes") >= 3_000_000, "{one}");
    // What sessions under way used is in their list, too.
    let sessions = daemon.json(["sessions", "busy"]);
    let session = if sessions.is_array() { &sessions[0] } else { &sessions["items"][0] };
    assert!(session["usage"]["active_cpu_ms"].as_u64().unwrap() > 0, "{sessions}");
    assert!(session["usage"]["memory_peak_bytes"].as_u64().unwrap() > 0, "{sessions}");

    let all = daemon.json(["stats"]);
    let names: Vec<&str> =
        all.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["busy"], "only what runs");
    let sleeping = daemon.json(["stats", "asleep"]);
    assert_eq!(sleeping["state"], "stopped");
    assert!(sleeping.get("usage").is_none(), "{sleeping}");
    let text = daemon.ok(["stats", "busy", "asleep"]);
    assert!(text.contains("CPU") && text.contains("busy") && text.contains("asleep"), "{text}");
    assert_eq!(daemon.json(["show", "asleep"])["state"], "stopped");
    let (code, error) = daemon.fails(["stats", "none"]);
    assert_eq!(code, 4, "{error}");
    let (_, error) = daemon.fails(["top"]);
    assert!(error.contains("needs a terminal") && error.contains("stats --follow"), "{error}");

    let (head, metrics) = ask(&daemon, "GET", "/metrics", None);
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    for wanted in [
        "sandkeep_operation_seconds_count{operation=\"create\",driver=\"container\",outcome=\"ok\"} 2",
        "sandkeep_operation_seconds_count{operation=\"start\",driver=\"container\",outcome=\"ok\"} 1",
        "sandkeep_operation_seconds_count{operation=\"exec\",driver=\"container\",outcome=\"ok\"} 2",
        "sandkeep_http_errors_total{code=\"sandbox_not_found\"} 1",
        "sandkeep_warm_pool{pool=\"container\"}",
        "sandkeep_connections{listener=\"tcp\"}",
    ] {
        assert!(metrics.contains(wanted), "{wanted} in {metrics}");
    }
    daemon.ok(["rm", "busy", "asleep"]);
}
