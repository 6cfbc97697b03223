//! What a sandbox may reach, from the command line, against a server on this host's loopback.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::thread;

use sandkeep_testkit::daemon::{Daemon, SMALL, skipped, unfit};

/// A server that sends back what it gets, for as long as the test lasts.
fn echo() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        while let Ok((mut stream, _)) = listener.accept() {
            thread::spawn(move || {
                let mut buffer = [0; 4096];
                while let Ok(read @ 1..) = stream.read(&mut buffer) {
                    if stream.write_all(&buffer[..read]).is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

fn reaches(keep: &Daemon, sandbox: &str, port: u16) -> bool {
    let script = format!(
        "bash -c 'exec 3<>/dev/tcp/100.97.0.1/{port} && echo hello >&3 && read -t 5 line <&3 && echo $line' 2>/dev/null; true"
    );
    keep.sh(sandbox, &script) == "hello\n"
}

#[test]
fn policies_are_set_shown_changed_and_kept_to() {
    if let Some(why) = unfit() {
        return skipped("policies_are_set_shown_changed_and_kept_to", why);
    }
    let port = echo().port();
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("keep.toml");
    fs::write(&config, format!("[network]\nexcept = ['127.0.0.1:{port}']\n")).unwrap();
    let environment = [("SANDKEEP_CONFIG", config.to_str().unwrap())];
    let keep = Daemon::start_with(env!("CARGO_BIN_EXE_keep"), &environment);
    keep.import_small();

    keep.ok(["create", "app", "--image", SMALL, "--allow-cidr", "100.97.0.1"]);
    assert!(keep.ok(["network", "app"]).contains("100.97.0.1/32"));
    assert!(reaches(&keep, "app", port));
    keep.ok(["network", "app", "--remove", "--allow-cidr", "100.97.0.1"]);
    assert!(!reaches(&keep, "app", port), "a change holds at once");
    keep.ok(["network", "app", "--add", "--allow-cidr", "100.97.0.0/16"]);
    assert!(reaches(&keep, "app", port));
    keep.ok(["network", "app", "--default"]);
    assert!(keep.ok(["network", "app"]).contains("the project's default"));
    assert!(reaches(&keep, "app", port));

    let bound = dir.path().join("bound.json");
    fs::write(&bound, r#"{"mode":"custom","allow":["10.0.0.0/8"]}"#).unwrap();
    let bound = bound.to_str().unwrap();
    let told = keep.ok(["project", "network", "default", "--bound-file", bound]);
    assert!(told.contains("10.0.0.0/8"), "{told}");
    assert!(!reaches(&keep, "app", port), "no sandbox gets beyond its project's bound");
    keep.ok(["project", "network", "default", "--no-bound"]);

    let listed = keep.json(["net", "app"]);
    let verdicts: Vec<&str> =
        listed.as_array().unwrap().iter().map(|one| one["verdict"].as_str().unwrap()).collect();
    assert_eq!(verdicts.iter().filter(|it| **it == "allowed").count(), 3, "{listed}");
    let denied = keep.ok(["net", "app", "--denied"]);
    assert!(denied.contains("bound") && !denied.contains("allowed"), "{denied}");
    let summary = keep.json(["net", "app", "--summary"]);
    assert_eq!(
        (&summary["bytes_in"], &summary["bytes_out"]),
        (&18.into(), &18.into()),
        "{summary}"
    );
    let stopped = keep.ok(["stop", "app"]);
    assert!(stopped.contains("18 B in, 18 B out"), "{stopped}");

    let (code, told) = keep.fails(["network", "app", "--add", "--allow-domain", "a.com"]);
    assert!(code == 1 && told.contains("already allows everything"), "{code} {told}");
    fs::write(dir.path().join("bad.json"), r#"{"mode":"custom","requests":[{"domain":"a.com","match":{"path":{"regex":"("}},"action":"deny"}]}"#).unwrap();
    let bad = dir.path().join("bad.json");
    let (code, told) = keep.fails(["update", "app", "--network-file", bad.to_str().unwrap()]);
    assert!(code == 1 && told.contains("network.requests[0].match.path"), "{code} {told}");
}
