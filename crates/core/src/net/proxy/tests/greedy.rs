//! Sandboxes that want more than their share, and requests that outlive the rules they were let through by.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use http_body_util::BodyExt;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::server::Server;
use super::{
    Answered, NAME, PLACEHOLDER, SHORT, Sandbox, Timeouts, VALUE, get, rules, secret, with,
};
use crate::model::{Protocol, Verdict};

const SOON: Duration = Duration::from_secs(5);

fn forwarding(url: &str, deny: &[&str]) -> serde_json::Value {
    json!({"mode": "allow-all", "deny": deny, "requests": [
        {"domain": NAME, "action": {"forward": {"url": url}}},
    ]})
}

/// Another address than that of the servers, where nothing need listen.
fn elsewhere(port: u16) -> SocketAddr {
    (Ipv4Addr::new(127, 0, 0, 2), port).into()
}

#[tokio::test]
async fn connections_outward_are_bounded() {
    let mut sandbox = Sandbox::allow_all(Vec::new());
    let short = Duration::from_millis(500);
    sandbox.patience = Timeouts { head: SOON, outward: short, ..sandbox.patience };
    let room = sandbox.authority.outward.clone();
    room.forget_permits(room.available_permits() - 1);
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    let mut first = sandbox.http1(&server).await;
    server.send_more(1);
    let mut body = first.send_request(get("/events")).await.unwrap().into_body();
    body.frame().await.unwrap().unwrap();
    assert_eq!(room.available_permits(), 0);
    let answer = sandbox.fetch(&server, get("/")).await;
    assert_eq!(answer.status, 502);
    assert!(answer.body.contains("too many connections outward"), "{}", answer.body);
    drop((first, body));
    let permit = tokio::time::timeout(SOON, room.acquire()).await;
    drop(permit.expect("the connection outward ends with the sandbox's"));
    assert_eq!(sandbox.fetch(&server, get("/")).await.status, 200);
}

#[tokio::test]
async fn a_body_that_is_read_whole_must_come() {
    let mut sandbox = Sandbox::allow_all(vec![secret("KEY", SHORT, NAME)]);
    sandbox.patience =
        Timeouts { head: SOON, body: Duration::from_millis(200), ..sandbox.patience };
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    let before = sandbox.authority.read_whole.available_permits();
    let mut stream = Box::pin(sandbox.open(&server, "http/1.1").await);
    let head = format!("POST / HTTP/1.1\r\nhost: {NAME}\r\ncontent-length: 10\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = [0; 13];
    tokio::time::timeout(SOON, stream.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(&answer, b"HTTP/1.1 408 ");
    assert_eq!(sandbox.authority.read_whole.available_permits(), before);
    assert_eq!(sandbox.requests(1).await[0].verdict, Verdict::Failed);
}

#[tokio::test]
async fn a_request_whose_body_is_waited_for_can_be_cut() {
    let sandbox = Sandbox::allow_all(vec![secret("KEY", SHORT, NAME)]);
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    let mut stream = Box::pin(sandbox.open(&server, "http/1.1").await);
    let head = format!("POST / HTTP/1.1\r\nhost: {NAME}\r\ncontent-length: 10\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let is_open = || sandbox.log.open().iter().any(|open| open.record().protocol == Protocol::Http);
    for _ in 0..500 {
        if is_open() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let deny = json!({"mode": "allow-all", "requests": [{"domain": NAME, "action": "deny"}]});
    sandbox.rules.send_replace(rules(deny, vec![secret("KEY", SHORT, NAME)]));
    let mut answer = [0; 13];
    tokio::time::timeout(SOON, stream.read_exact(&mut answer)).await.unwrap().unwrap();
    assert_eq!(&answer, b"HTTP/1.1 403 ");
    assert_eq!(sandbox.requests(1).await[0].verdict, Verdict::Cut);
}

#[tokio::test]
async fn a_rule_that_forwards_to_the_same_place_does_not_go_where_the_sandbox_dialled() {
    let sandbox = Sandbox::allow_all(Vec::new());
    let server = Server::start(&sandbox.authorities, &[]).await;
    let port = server.address.port();
    let own = tokio::net::TcpListener::bind(elsewhere(port)).await.unwrap();
    let policy = forwarding(&format!("http://{NAME}:{port}/base"), &[]);
    sandbox.rules.send_replace(rules(policy, vec![secret("KEY", VALUE, NAME)]));
    let mut client = sandbox.plain(elsewhere(port)).await;
    let request = with("/x", "", &[("x-api-key", PLACEHOLDER)]);
    let answer = Answered::read(client.send_request(request).await.unwrap()).await;
    assert_eq!(answer.sent()["uri"], "/base/x");
    assert!(server.seen()[0].contains(VALUE));
    let dialled = tokio::time::timeout(Duration::from_millis(100), own.accept()).await;
    assert!(dialled.is_err(), "nobody came where the sandbox wanted it");
}

#[tokio::test]
async fn what_is_forwarded_in_the_clear_to_who_may_be_far_has_no_secrets() {
    let sandbox = Sandbox::allow_all(Vec::new());
    let server = Server::start(&sandbox.authorities, &[]).await;
    for (host, hears) in [("mixed.example", PLACEHOLDER), ("other.example", VALUE)] {
        let policy = forwarding(&format!("http://{host}:{}", server.address.port()), &[]);
        sandbox.rules.send_replace(rules(policy, vec![secret("KEY", VALUE, host)]));
        let mut client = sandbox.plain(elsewhere(80)).await;
        let request = with("/", "", &[("x-api-key", PLACEHOLDER)]);
        let answer = Answered::read(client.send_request(request).await.unwrap()).await;
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert!(server.seen().last().unwrap().contains(hears), "{host}");
    }
}

#[tokio::test]
async fn a_forwarded_request_is_cut_when_it_would_now_go_elsewhere_or_nowhere() {
    for elsewhere_now in [true, false] {
        let sandbox = Sandbox::allow_all(Vec::new());
        let server = Server::start(&sandbox.authorities, &[]).await;
        let url = format!("http://other.example:{}", server.address.port());
        sandbox.rules.send_replace(rules(forwarding(&url, &[]), Vec::new()));
        let mut client = sandbox.plain(elsewhere(80)).await;
        server.send_more(1);
        let mut body = client.send_request(get("/events")).await.unwrap().into_body();
        body.frame().await.unwrap().unwrap();
        sandbox.rules.send_replace(rules(forwarding(&url, &["192.0.2.0/24"]), Vec::new()));
        server.send_more(1);
        let frame = tokio::time::timeout(SOON, body.frame()).await.unwrap();
        assert!(frame.unwrap().is_ok(), "what still fits goes on");
        let policy = if elsewhere_now {
            forwarding(&format!("{url}/base"), &[])
        } else {
            forwarding(&url, &["127.0.0.1"])
        };
        sandbox.rules.send_replace(rules(policy, Vec::new()));
        let frame = tokio::time::timeout(SOON, body.frame()).await.unwrap();
        assert!(frame.is_none_or(|frame| frame.is_err()));
        assert_eq!(sandbox.requests(1).await[0].verdict, Verdict::Cut);
    }
}

#[tokio::test]
async fn a_loop_of_requests_does_not_fill_the_journal() {
    let deny = json!({"mode": "allow-all", "requests": [
        {"domain": NAME, "match": {"path": {"prefix": "/no"}}, "action": "deny"},
        {"domain": NAME, "action": {"answer": {"status": 204}}},
    ]});
    let sandbox = Sandbox::new(deny, Vec::new());
    let mut client = sandbox.plain(elsewhere(80)).await;
    for index in 0..600 {
        let path = if index % 2 == 0 { format!("/no/{index}") } else { format!("/{index}") };
        Answered::read(client.send_request(get(&path)).await.unwrap()).await;
    }
    drop(client);
    sandbox.lines(1, Protocol::Tcp).await;
    sandbox.log.flush();
    let lines = sandbox.requests(2).await;
    assert!(lines.len() < 300, "{}", lines.len());
    for verdict in [Verdict::Allowed, Verdict::Denied] {
        let told: u64 = lines.iter().filter(|line| line.verdict == verdict).map(count).sum();
        assert_eq!(told, 300, "each is told or counted");
    }
}

/// How many requests a line stands for.
fn count(line: &crate::model::Connection) -> u64 {
    let detail = line.detail.as_deref().unwrap_or_default();
    let more = detail.split_once("; ").and_then(|(_, rest)| rest.split(' ').next()?.parse().ok());
    1 + more.unwrap_or(0)
}
