//! Limits on how fast and how long.

use std::io::Read as _;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{Method, StatusCode};
use hyper_util::rt::TokioIo;
use sandkeep_core::model::{LayerId, SnapshotId};
use sandkeep_server::Limits;
use sandkeep_testkit::daemon::skipped;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::fixture::{Served, read};

#[tokio::test]
async fn too_many_requests_are_told_when_to_come_back() {
    let limits = Limits { requests_per_second: 0.1, burst: 3.0, ..Limits::default() };
    let served = Served::limited(limits).await;
    for _ in 0..3 {
        assert_eq!(served.get("/v1/whoami", &served.read).await.status, StatusCode::OK);
    }
    let answer = served.get("/v1/whoami", &served.read).await;
    assert_eq!(answer.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(answer.error().code, "rate_limited");
    let seconds: u64 = answer.headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=10).contains(&seconds), "{seconds}");
    assert_eq!(served.get("/v1/whoami", &served.write).await.status, StatusCode::OK);
}

/// A connection with a request under way: its body is waited for.
async fn busy(served: &Served) -> TcpStream {
    let mut stream = TcpStream::connect(served.address).await.unwrap();
    let head = format!(
        "POST /v1/sandboxes HTTP/1.1\r\nhost: sandkeep\r\nauthorization: Bearer {}\r\n\
         content-type: application/json\r\ncontent-length: 10\r\n\r\n{{",
        served.write
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

/// Reads what is sent until the other side closes.
async fn last_words(mut stream: TcpStream) -> String {
    let mut text = Vec::new();
    let said = stream.read_to_end(&mut text);
    // It may be reset under what was sent before.
    let _ = tokio::time::timeout(Duration::from_secs(30), said).await.expect("it is closed");
    String::from_utf8_lossy(&text).into_owned()
}

#[tokio::test]
async fn a_full_server_says_so_and_idle_connections_make_room() {
    let limits = Limits { connections_per_address: 3, ..Limits::default() };
    let served = Served::limited(limits).await;
    let idle = TcpStream::connect(served.address).await.unwrap();
    let mut all = vec![busy(&served).await, busy(&served).await];
    // Until its head was read a connection is idle, too.
    tokio::time::sleep(Duration::from_millis(300)).await;
    all.push(busy(&served).await);
    assert_eq!(last_words(idle).await, "", "the idle one made room");
    tokio::time::sleep(Duration::from_millis(300)).await;
    let refused = TcpStream::connect(served.address).await.unwrap();
    let said = last_words(refused).await;
    assert!(said.starts_with("HTTP/1.1 503 "), "{said}");
    assert!(said.contains("retry-after: 1\r\n") && said.contains("too_many_connections"), "{said}");
    let body = said.split_once("\r\n\r\n").unwrap().1;
    assert_eq!(
        serde_json::from_str::<Value>(body).unwrap()["error"]["code"],
        "too_many_connections"
    );
    // The Unix socket has room of its own.
    let stream = tokio::net::UnixStream::connect(&served.socket).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let request =
        served.request(Method::GET, "/healthz", "").body(Full::new(Bytes::new())).unwrap();
    assert_eq!(sender.send_request(request).await.unwrap().status(), StatusCode::OK);
    drop(all);
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        // What is closed is noticed soon.
        let mut stream = TcpStream::connect(served.address).await.unwrap();
        stream.write_all(b"GET /healthz HTTP/1.0\r\nhost: x\r\n\r\n").await.unwrap();
        if last_words(stream).await.starts_with("HTTP/1.0 200") {
            break;
        }
        assert!(Instant::now() < deadline, "room again");
    }
}

#[tokio::test]
async fn who_says_nothing_is_not_waited_for() {
    let limits = Limits { first_request: Duration::from_millis(200), ..Limits::default() };
    let served = Served::limited(limits).await;
    for first in [&b""[..], b"G", b"GET / HTTP/1.1\r\nhost: x\r\n", b"PRI * HTTP/2.0\r\n\r\n"] {
        let mut stream = TcpStream::connect(served.address).await.unwrap();
        stream.write_all(first).await.unwrap();
        let said = last_words(stream).await;
        assert!(said.is_empty() || said.starts_with("HTTP/1.1 408"), "{said}");
    }
}

#[tokio::test]
async fn a_key_has_so_many_connections() {
    let limits = Limits { connections_per_key: 2, ..Limits::default() };
    let served = Served::limited(limits).await;
    let mut kept = Vec::new();
    let mut ask = async |key: &str| {
        let stream = TcpStream::connect(served.address).await.unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let request = served.request(Method::GET, "/v1/whoami", key);
        let answer = sender.send_request(request.body(Full::new(Bytes::new())).unwrap()).await;
        kept.push(sender);
        read(answer.unwrap()).await
    };
    for _ in 0..2 {
        assert_eq!(ask(&served.read).await.status, StatusCode::OK);
    }
    let refused = ask(&served.read).await;
    assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refused.error().code, "too_many_connections");
    assert_eq!(refused.headers["retry-after"], "1");
    assert_eq!(ask(&served.write).await.status, StatusCode::OK, "another key is not held up");
}

/// How long it takes to run a command, the best of a few.
async fn exec_takes(served: &Served) -> Duration {
    let mut best = Duration::MAX;
    for _ in 0..5 {
        let begun = Instant::now();
        let answer = served.post("/v1/sandboxes/box/exec", &served.write, r#"{"argv":["true"]}"#);
        let answer = tokio::time::timeout(Duration::from_secs(60), answer).await.expect("in time");
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
        let last = answer.body.split(|b| *b == b'\n').rfind(|line| !line.is_empty()).unwrap();
        assert_eq!(serde_json::from_slice::<Value>(last).unwrap()["exit_code"], 0);
        best = best.min(begun.elapsed());
    }
    best
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_of_silent_connections_does_not_hold_up_a_command() {
    const CROWD: usize = 2_500;
    let test = "a_crowd_of_silent_connections_does_not_hold_up_a_command";
    let limit = {
        use rustix::process::{Resource, getrlimit, setrlimit};
        let mut limit = getrlimit(Resource::Nofile);
        limit.current = limit.maximum;
        let _ = setrlimit(Resource::Nofile, limit);
        getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
    };
    if limit < 4 * CROWD as u64 {
        return skipped(test, "this process may not have enough open files");
    }
    let limits = Limits { connections: 1_000, connections_per_address: 500, ..Limits::default() };
    let Some(served) = Served::with_machines_and(test, limits).await else { return };
    served.create("box").await;
    let quiet = exec_takes(&served).await;
    let mut crowd = Vec::with_capacity(CROWD);
    for _ in 0..CROWD {
        let mut stream = TcpStream::connect(served.address).await.unwrap();
        let _ = stream.write_all(b"G").await;
        crowd.push(stream);
    }
    let crowded = exec_takes(&served).await;
    assert!(
        crowded < quiet * 50 + Duration::from_secs(2),
        "{crowded:?}, and {quiet:?} when it is quiet"
    );
    // All but a few of them were closed again.
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count();
    assert!(open < CROWD + 1_500, "{open}");
    let closed = crowd.into_iter().map(|stream| stream.into_std().unwrap()).filter(|stream| {
        let mut stream = stream;
        matches!(stream.read(&mut [0; 512]), Ok(0) | Err(_))
            && stream
                .peek(&mut [0; 1])
                .map_or_else(|error| error.kind() != std::io::ErrorKind::WouldBlock, |_| true)
    });
    assert!(closed.count() >= CROWD - 600);
}

#[tokio::test]
async fn usage_is_told_of_the_own_project() {
    let served = Served::without_machines().await;
    served.create("mine").await;
    let all = served.get("/v1/usage", &served.admin).await.json();
    assert!(all["images_bytes"].as_u64().unwrap() > 0 && all["project"].is_null(), "{all}");
    for (key, project) in
        [(&served.read, "main"), (&served.write, "main"), (&served.foreign, "other")]
    {
        let own = served.get("/v1/usage", key).await.json();
        assert_eq!(own["project"], project, "{own}");
        for host in ["total_bytes", "free_bytes", "images_bytes"] {
            assert!(own[host].is_null(), "{own}");
        }
        assert_eq!(own["snapshots_bytes"], 0, "{own}");
    }
    let chosen = served.request(Method::GET, "/v1/usage", &served.admin);
    let chosen = chosen.header("sandkeep-project", "other").body(Full::new(Bytes::new())).unwrap();
    assert_eq!(read(served.send(chosen).await).await.json()["project"], "other");
}

#[tokio::test]
async fn measurements_are_bounded_per_key() {
    let served = Served::limited(Limits { measurements_per_key: 0, ..Limits::default() }).await;
    let refused = served.get("/v1/usage", &served.read).await;
    assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(refused.error().code, "too_many_concurrent_requests");
    assert_eq!(refused.headers["retry-after"], "1");
}

#[tokio::test]
async fn a_project_is_told_of_its_own_snapshots_only() {
    let Some(served) = Served::with_machines("a_project_is_told_of_its_own_snapshots_only").await
    else {
        return;
    };
    served.create("box").await;
    let write = r#"{"argv":["sh","-c","head -c 3000000 /dev/urandom > /work/file"]}"#;
    let ran = served.post("/v1/sandboxes/box/exec", &served.write, write).await;
    assert_eq!(ran.status, StatusCode::OK);
    let usage = async |key: &str| served.get("/v1/usage", key).await.json();
    let open = usage(&served.read).await;
    assert!(open["open_bytes"].as_u64().unwrap() >= 3_000_000, "{open}");
    assert_eq!(usage(&served.foreign).await["open_bytes"], 0);
    let stopped = served.post("/v1/sandboxes/box/stop", &served.write, "").await;
    assert_eq!(stopped.status, StatusCode::OK, "{stopped:?}");
    let (mine, all) = (usage(&served.read).await, usage(&served.admin).await);
    assert!(mine["snapshots_bytes"].as_u64().unwrap() >= 3_000_000, "{mine}");
    assert_eq!(mine["snapshots_bytes"], all["snapshots_bytes"]);
    assert_eq!(usage(&served.foreign).await["snapshots_bytes"], 0);
}

#[tokio::test]
async fn exports_are_bounded_per_key_and_comparisons_per_project() {
    let limits = Limits { exports_per_key: 0, comparisons_per_project: 0, ..Limits::default() };
    let served = Served::limited(limits).await;
    let id = SnapshotId::of_layer(&LayerId::fresh());
    for (path, key) in [
        (format!("/v1/snapshots/{id}/export"), &served.read),
        ("/v1/diff?from=box&to=box@base".to_owned(), &served.read),
    ] {
        let refused = served.get(&path, key).await;
        assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS, "{path}: {refused:?}");
        assert_eq!(refused.error().code, "too_many_concurrent_requests");
        assert_eq!(refused.headers["retry-after"], "1");
    }
    let refused = served.post("/v1/sandboxes/box/merge", &served.write, "{}").await;
    assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS, "{refused:?}");
}
