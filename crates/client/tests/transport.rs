//! How the client behaves on the wire, against a server with the answers that a test gives it.

#![allow(clippy::unwrap_used)] // helpers of tests may panic as tests may

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use sandkeep_client::{Client, Error, Place, Upload};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixListener};

/// Reads one request, head and body, and returns its head.
async fn read_request(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).unwrap();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    stream.read_exact(&mut body).await.ok()?;
    Some(head)
}

fn answer(status: &str, kind: &str, body: &str) -> String {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n{body}")
}

const HEALTH: &str = r#"{"status":"ok","version":"1"}"#;

/// A server that gives every request on every connection to `reply`, and counts connections.
async fn server(reply: fn(&str) -> String) -> (Client, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let connections = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&connections);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            count.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(async move {
                while let Some(head) = read_request(&mut stream).await {
                    stream.write_all(reply(&head).as_bytes()).await.unwrap();
                }
            });
        }
    });
    (Client::new(url.parse().unwrap(), Some("skp_secret")).unwrap(), connections)
}

#[tokio::test]
async fn calls_one_after_another_share_a_connection() {
    let (client, connections) = server(|head| {
        assert!(head.contains("authorization: Bearer skp_secret"), "{head}");
        answer("200 OK", "application/json", HEALTH)
    })
    .await;
    for _ in 0..5 {
        assert_eq!(client.health().await.unwrap().version, "1");
    }
    assert_eq!(connections.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn errors_keep_the_connection_and_say_what_the_server_said() {
    let (client, connections) = server(|_| {
        let body = r#"{"error":{"code":"sandbox_not_found","message":"no","hint":"keep ls"}}"#;
        answer("404 Not Found", "application/json", body)
    })
    .await;
    for _ in 0..2 {
        let error = client.sandbox("x").await.unwrap_err();
        assert!(matches!(error, Error::Api { status: 404, .. }), "{error:?}");
        assert_eq!(error.hint(), Some("keep ls"));
    }
    assert_eq!(connections.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_connection_the_server_closed_is_replaced() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            read_request(&mut stream).await;
            let text = answer("200 OK", "application/json", HEALTH);
            stream.write_all(text.as_bytes()).await.unwrap();
        }
    });
    let client = Client::new(url.parse().unwrap(), None).unwrap();
    for _ in 0..3 {
        client.health().await.unwrap();
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn lines_are_put_together_wherever_they_were_cut() {
    let (client, _) = server(|_| {
        let first = r#"{"type":"stdout","encoding":"utf8","data":"h"#;
        let second = "i\"}\n\n{\"type\":\"stderr\",\"encoding\":\"base64\",\"data\":\"/w==\"}\n{\"type\":\"more\"}";
        let chunk = |text: &str| format!("{:x}\r\n{text}\r\n", text.len());
        format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n{}{}0\r\n\r\n",
            chunk(first),
            chunk(second)
        )
    })
    .await;
    let mut log = client.logs("box", "cmd-1", false).await.unwrap();
    let mut said = Vec::new();
    while let Some(output) = log.next().await.unwrap() {
        said.push(format!("{output:?}"));
    }
    assert_eq!(said, [r#"Stdout(b"hi")"#, r#"Stderr(b"\xff")"#, "More"]);
}

#[tokio::test]
async fn a_body_that_breaks_off_is_an_error() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        read_request(&mut stream).await;
        let text = "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf";
        stream.write_all(text.as_bytes()).await.unwrap();
    });
    let client = Client::new(url.parse().unwrap(), None).unwrap();
    let download = client.read_file(Place::new("box", "/x")).await.unwrap();
    assert_eq!(download.length(), Some(100));
    let error = download.collect().await.unwrap_err();
    assert!(matches!(error, Error::Broken { .. }), "{error:?}");
}

#[tokio::test]
async fn a_unix_socket_is_as_good() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keep.sock");
    let listener = UnixListener::bind(&path).unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        while read_request(&mut stream).await.is_some() {
            let text = answer("200 OK", "application/json", HEALTH);
            stream.write_all(text.as_bytes()).await.unwrap();
        }
    });
    let url = format!("unix://{}", path.display());
    let client = Client::new(url.parse().unwrap(), None).unwrap();
    client.health().await.unwrap();
    client.health().await.unwrap();
}

#[tokio::test]
async fn nobody_there_is_told_with_a_hint() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let client = Client::new(url.parse().unwrap(), None).unwrap();
    let error = client.health().await.unwrap_err();
    assert!(matches!(&error, Error::Connect { .. }), "{error:?}");
    assert!(error.hint().is_some_and(|hint| hint.contains("keep serve")), "{error:?}");
}

#[tokio::test]
async fn an_upload_that_fails_here_is_not_taken_for_whole() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let seen = tokio::spawn(async move {
        let (mut stream, _): (TcpStream, _) = listener.accept().await.unwrap();
        let mut all = Vec::new();
        let _ = stream.read_to_end(&mut all).await;
        all
    });
    let client = Client::new(url.parse().unwrap(), None).unwrap();
    let (sender, receiver) = tokio::sync::mpsc::channel(2);
    sender.send(Ok("begun".into())).await.unwrap();
    sender.send(Err(std::io::Error::other("the disk broke"))).await.unwrap();
    drop(sender);
    let upload = Upload::channel(receiver);
    let failed = client.tar_in(Place::new("box", "/x"), upload).await;
    assert!(matches!(failed, Err(Error::Broken { .. })), "{failed:?}");
    let seen = String::from_utf8(seen.await.unwrap()).unwrap();
    assert!(!seen.ends_with("0\r\n\r\n"), "the body must not look finished: {seen}");
}

#[tokio::test]
async fn a_refused_upload_says_why_though_the_server_hung_up() {
    const REFUSAL: &str = r#"{"error":{"code":"path_not_found","message":"no such directory"}}"#;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sock");
    let listener = UnixListener::bind(&path).unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = [0; 64];
            stream.read_exact(&mut head).await.unwrap();
            let answer = answer("404 Not Found", "application/json", REFUSAL);
            stream.write_all(answer.as_bytes()).await.unwrap();
            // Dropped with most of the request unread.
        }
    });
    let url = format!("unix://{}", path.display());
    let client = Client::new(url.parse().unwrap(), None).unwrap();
    for round in 0..50 {
        let upload = Upload::reader(tokio::io::repeat(7).take(64 << 20));
        let refused = client.tar_in(Place::new("box", "/x"), upload).await.unwrap_err();
        assert_eq!(refused.code(), Some("path_not_found"), "round {round}: {refused:?}");
    }
}
