//! Malicious sandboxes and servers.

use std::time::Duration;

use http_body_util::BodyExt;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsConnector;

use super::server::{Proof, Server};
use super::{Answered, NAME, Sandbox, Timeouts, get, over_http2};
use crate::model::{Protocol, Verdict};

async fn raw(sandbox: &Sandbox, server: &Server, text: &str) -> String {
    let mut stream = Box::pin(sandbox.open(server, "http/1.1").await);
    // It may be refused before it was sent whole.
    let _ = stream.write_all(text.as_bytes()).await;
    let _ = stream.flush().await;
    let mut answer = Vec::new();
    let mut piece = [0; 4096];
    // Until the head and what came with it has arrived.
    while !answer.windows(4).any(|end| end == b"\r\n\r\n") {
        let read = tokio::time::timeout(Duration::from_secs(10), stream.read(&mut piece)).await;
        match read.expect("an answer, or an end") {
            Ok(length @ 1..) => answer.extend_from_slice(&piece[..length]),
            _ => break,
        }
    }
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn a_request_for_another_host_is_refused() {
    let sandbox = Sandbox::allow_all(Vec::new());
    let server = Server::start(&sandbox.authorities, &["h2", "http/1.1"]).await;
    for request in [
        "GET / HTTP/1.1\r\nhost: evil.example\r\n\r\n".to_owned(),
        format!("GET http://evil.example/ HTTP/1.1\r\nhost: {NAME}\r\n\r\n"),
    ] {
        let answer = raw(&sandbox, &server, &request).await;
        assert!(answer.starts_with("HTTP/1.1 421 "), "{answer}");
    }
    let mut client = sandbox.http2(&server).await;
    let mut request = over_http2(&server, "/", "");
    *request.uri_mut() = "https://evil.example/".parse().unwrap();
    let answer = Answered::read(client.send_request(request).await.unwrap()).await;
    assert_eq!(answer.status, 421);
    assert!(answer.body.contains("evil.example"));
    let lines = sandbox.requests(3).await;
    assert!(lines.iter().all(|line| line.verdict == Verdict::Denied));
    assert_eq!(server.connections(), 0);
}

#[tokio::test]
async fn requests_that_can_be_read_in_two_ways_are_refused() {
    let sandbox = Sandbox::allow_all(Vec::new());
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    for (what, request) in [
        (
            "two lengths",
            format!(
                "POST / HTTP/1.1\r\nhost: {NAME}\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx"
            ),
        ),
        ("two hosts", format!("GET / HTTP/1.1\r\nhost: {NAME}\r\nhost: {NAME}\r\n\r\n")),
        ("space before colon", format!("GET / HTTP/1.1\r\nhost: {NAME}\r\nx : y\r\n\r\n")),
        ("no host", "GET / HTTP/1.1\r\n\r\n".to_owned()),
        ("folded header", format!("GET / HTTP/1.1\r\nhost: {NAME}\r\nx: a\r\n b\r\n\r\n")),
    ] {
        let answer = raw(&sandbox, &server, &request).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400 "), "{what}: {answer}");
    }
    // Of a length and chunks only the chunks count, here and outside, and nothing follows on that connection.
    let both = "content-length: 4\r\ntransfer-encoding: chunked\r\nconnection: content-length";
    let request = format!("POST / HTTP/1.1\r\nhost: {NAME}\r\n{both}\r\n\r\n0\r\n\r\n");
    let answer = raw(&sandbox, &server, &request).await;
    assert!(answer.contains("connection: close"), "{answer}");
    assert!(!server.seen()[0].contains("content-length"), "{:?}", server.seen());
    for method in ["TRACE", "CONNECT"] {
        let target = if method == "CONNECT" { NAME } else { "/" };
        let answer =
            raw(&sandbox, &server, &format!("{method} {target} HTTP/1.1\r\nhost: {NAME}\r\n\r\n"))
                .await;
        assert!(answer.starts_with("HTTP/1.1 405 "), "{method}: {answer}");
    }
    assert_eq!(server.seen().len(), 1);
}

#[tokio::test]
async fn giant_heads_are_refused() {
    let sandbox = Sandbox::allow_all(Vec::new());
    let server = Server::start(&sandbox.authorities, &["h2", "http/1.1"]).await;
    let giant = "x".repeat(100 << 10);
    let answer =
        raw(&sandbox, &server, &format!("GET / HTTP/1.1\r\nhost: {NAME}\r\nx: {giant}\r\n\r\n"))
            .await;
    assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    let many = "a: b\r\n".repeat(500);
    let answer =
        raw(&sandbox, &server, &format!("GET / HTTP/1.1\r\nhost: {NAME}\r\n{many}\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    let mut client = sandbox.http2(&server).await;
    let mut request = over_http2(&server, "/", "");
    for index in 0..100 {
        let name: hyper::header::HeaderName = format!("x-{index}").parse().unwrap();
        request.headers_mut().insert(name, "y".repeat(1000).parse().unwrap());
    }
    // Refused by either side's own count.
    match client.send_request(request).await {
        Ok(answer) => assert_eq!(answer.status(), 431),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    assert_eq!(server.connections(), 0);
}

#[tokio::test]
async fn who_dawdles_is_left() {
    let mut sandbox = Sandbox::allow_all(Vec::new());
    let short = Duration::from_millis(200);
    sandbox.patience = Timeouts { handshake: short, head: short, ..sandbox.patience };
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    let within = Duration::from_secs(5);

    // A handshake that never comes.
    let (_inside, task) = sandbox.dial(server.address, true);
    tokio::time::timeout(within, task).await.unwrap().unwrap();
    // A head that never ends.
    let (mut inside, task) = sandbox.dial(server.address, false);
    inside.write_all(b"GET / HTTP/1.1\r\nhost: ").await.unwrap();
    let dribble = tokio::spawn(async move {
        while inside.write_all(b"x").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    tokio::time::timeout(within, task).await.unwrap().unwrap();
    tokio::time::timeout(within, dribble).await.unwrap().unwrap();
    let lines = sandbox.lines(2, Protocol::Tcp).await;
    assert!(lines[0].detail.as_deref().unwrap().contains("TLS handshake"));
}

#[tokio::test]
async fn who_opens_too_many_waits() {
    let sandbox = Sandbox::allow_all(Vec::new());
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    let all = u32::try_from(sandbox.authority.places.available_permits()).unwrap();
    let taken = sandbox.authority.places.acquire_many(all).await.unwrap();
    let mut fetch = std::pin::pin!(sandbox.fetch(&server, get("/")));
    let early = tokio::time::timeout(Duration::from_millis(300), fetch.as_mut()).await;
    assert!(early.is_err(), "there was no room for it");
    drop(taken);
    let late = tokio::time::timeout(Duration::from_secs(5), fetch).await.unwrap();
    assert_eq!(late.status, 200);
}

#[tokio::test]
async fn servers_that_do_not_prove_their_name_are_refused() {
    let sandbox = Sandbox::allow_all(Vec::new());
    for proof in [Proof::Expired, Proof::SelfSigned, Proof::OtherName] {
        let server = Server::proving(&sandbox.authorities, &["http/1.1"], proof).await;
        let answer = sandbox.fetch(&server, get("/")).await;
        assert_eq!(answer.status, 502, "{proof:?}");
        assert!(answer.body.contains("is not trusted over TLS"), "{proof:?}: {}", answer.body);
        assert!(server.seen().is_empty());
    }
    let lines = sandbox.requests(3).await;
    assert!(lines.iter().all(|line| line.verdict == Verdict::Failed));
    assert!(lines[0].detail.as_deref().unwrap().contains("expired"), "{:?}", lines[0].detail);
}

#[tokio::test]
async fn nobody_there_is_told() {
    let sandbox = Sandbox::allow_all(Vec::new());
    let gone = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    let address = gone.address;
    drop(gone);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let (inside, _) = sandbox.dial(address, false);
    let (mut client, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(inside)).await.unwrap();
    tokio::spawn(connection);
    let answer = Answered::read(client.send_request(get("/")).await.unwrap()).await;
    assert_eq!(answer.status, 502);
    assert!(answer.body.contains("cannot be reached"), "{}", answer.body);
    assert_eq!(sandbox.requests(1).await[0].verdict, Verdict::Failed);
}

#[tokio::test]
async fn a_program_that_does_not_know_the_authority_is_on_record() {
    let sandbox = Sandbox::allow_all(Vec::new());
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    let stranger = Sandbox::allow_all(Vec::new());
    let (inside, _) = sandbox.dial(server.address, true);
    let connector = TlsConnector::from(Arc::new(stranger.tls("http/1.1")));
    let name = ServerName::try_from(NAME).unwrap();
    assert!(connector.connect(name, inside).await.is_err());
    let line = sandbox.lines(1, Protocol::Tcp).await.remove(0);
    assert_eq!(line.verdict, Verdict::Failed);
    assert!(line.detail.unwrap().contains("did not take our certificate"));
}

#[tokio::test]
async fn a_cut_ends_everything_on_a_connection() {
    let sandbox = Sandbox::allow_all(Vec::new());
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    let mut client = sandbox.http1(&server).await;
    server.send_more(1);
    let mut body = client.send_request(get("/events")).await.unwrap().into_body();
    body.frame().await.unwrap().unwrap();
    for open in sandbox.log.open() {
        open.cut("the test".to_owned());
    }
    let end = tokio::time::timeout(Duration::from_secs(5), body.frame()).await.unwrap();
    assert!(end.is_none_or(|frame| frame.is_err()));
    let line = sandbox.lines(1, Protocol::Tcp).await.remove(0);
    assert_eq!((line.verdict, line.rule.as_str()), (Verdict::Cut, "the test"));
}
