//! What passes the proxy, and in which form.

use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use hyper::client::conn::{http1, http2};
use hyper::{HeaderMap, Request};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::server::{PIECE, PIECES, Server};
use super::{Answered, NAME, Sandbox, get, over_http2, with};
use crate::model::{Protocol, Verdict};

#[tokio::test]
async fn requests_pass_over_both_versions_on_both_sides() {
    let sandbox = Sandbox::allow_all(Vec::new());
    for (protocols, version) in [(&["http/1.1"][..], "HTTP/1.1"), (&["h2", "http/1.1"], "HTTP/2.0")]
    {
        let server = Server::start(&sandbox.authorities, protocols).await;
        let mut first = sandbox.http1(&server).await;
        for path in ["/a?x=1", "/b"] {
            let answer = Answered::read(first.send_request(get(path)).await.unwrap()).await;
            assert_eq!(answer.status, 200);
            assert_eq!(answer.sent()["version"], version);
            assert!(answer.sent()["uri"].as_str().unwrap().ends_with(path));
            for hop in ["alt-svc", "keep-alive"] {
                assert!(!answer.headers.contains_key(hop), "{hop}");
            }
        }
        assert_eq!(server.connections(), 1, "the connection outward is used again");
        let mut second = sandbox.http2(&server).await;
        let request = over_http2(&server, "/c", "body");
        let answer = Answered::read(second.send_request(request).await.unwrap()).await;
        assert_eq!(answer.sent()["body"], "body");
        assert_eq!(answer.sent()["version"], version);
        assert_eq!(answer.sent()["method"], "POST");
    }
    let lines = sandbox.requests(6).await;
    assert_eq!(lines[0].detail.as_deref(), Some("GET /a 200"));
    assert_eq!(lines[0].name.as_deref(), Some(NAME));
    assert_eq!((lines[0].verdict, lines[0].rule.as_str()), (Verdict::Allowed, "allow-all"));
    let connections = sandbox.lines(4, Protocol::Tcp).await;
    assert!(connections.iter().all(|line| line.bytes_in > 0 && line.bytes_out > 0));
}

#[tokio::test]
async fn plain_http_passes_too() {
    let sandbox = Sandbox::allow_all(Vec::new());
    let server = Server::start(&sandbox.authorities, &[]).await;
    let (inside, _) = sandbox.dial(server.address, false);
    let (mut client, connection) = http1::handshake(TokioIo::new(inside)).await.unwrap();
    tokio::spawn(connection);
    let answer = Answered::read(client.send_request(get("/plain")).await.unwrap()).await;
    assert_eq!(answer.sent()["uri"], "/plain");
    assert_eq!(answer.sent()["headers"]["host"], format!("{NAME}:{}", server.address.port()));
}

#[tokio::test]
async fn a_forwarded_request_does_not_escape_the_bound() {
    let sandbox = Sandbox::new(json!({"mode": "allow-all"}), Vec::new());
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    let plain = Server::start(&sandbox.authorities, &[]).await;
    let url = format!("http://other.example:{}/base", plain.address.port());
    let forward = json!({"mode": "allow-all",
        "requests": [{"domain": NAME, "action": {"forward": {"url": url}}}]});
    let bound = json!({"mode": "allow-all", "requests": [
        {"domain": "other.example", "match": {"path": {"prefix": "/base/admin"}}, "action": "deny"}]});
    sandbox.rules.send_replace(super::bounded(forward.clone(), Some(bound), Vec::new()));
    let mut client = sandbox.http1(&server).await;
    let mut fetch =
        async |request| Answered::read(client.send_request(request).await.unwrap()).await;
    assert_eq!(fetch(get("/fine")).await.sent()["uri"], "/base/fine");
    let denied = fetch(get("/admin")).await;
    assert_eq!(denied.status, 403);
    let rule = "project bound: requests[0]: deny other.example";
    assert!(denied.body.contains(rule), "{}", denied.body);
    assert_eq!(plain.seen().len(), 1);

    // What the bound itself sends there goes there.
    let own = json!({"mode": "allow-all"});
    let mut bound = forward;
    bound["requests"][0]["domain"] = "*.example".into();
    sandbox.rules.send_replace(super::bounded(own, Some(bound), Vec::new()));
    let mut client = sandbox.http1(&server).await;
    let answer = Answered::read(client.send_request(get("/admin")).await.unwrap()).await;
    assert_eq!(answer.sent()["uri"], "/base/admin");
}

#[tokio::test]
async fn rules_deny_answer_forward_and_set() {
    let other = "https://other.example";
    let sandbox = Sandbox::new(json!({"mode": "allow-all"}), Vec::new());
    let server = Server::start(&sandbox.authorities, &["h2", "http/1.1"]).await;
    let plain = Server::start(&sandbox.authorities, &[]).await;
    let policy = json!({"mode": "allow-all", "requests": [
        {"domain": NAME, "match": {"path": {"exact": "/secret"}}, "action": "deny"},
        {"domain": NAME, "match": {"path": {"exact": "/teapot"}},
         "action": {"answer": {"status": 418, "headers": {"x-tea": "green"}, "body": "short and stout"}}},
        {"domain": NAME, "match": {"path": {"prefix": "/else"}},
         "action": {"forward": {"url": format!("http://other.example:{}/base", plain.address.port())}}},
        {"domain": NAME, "match": {"path": {"exact": "/lost"}}, "action": {"forward": {"url": other}}},
        {"domain": NAME, "match": {"path": {"exact": "/metadata"}},
         "action": {"forward": {"url": "http://169.254.169.254"}}},
        {"domain": NAME, "action": {"headers": {"authorization": "Bearer of-the-rule", "accept": "text/plain"}}},
    ]});
    sandbox.rules.send_replace(super::rules(policy, Vec::new()));
    let mut client = sandbox.http1(&server).await;
    let mut fetch =
        async |request| Answered::read(client.send_request(request).await.unwrap()).await;

    let denied = fetch(get("/secret")).await;
    assert_eq!(denied.status, 403);
    assert!(denied.body.contains("requests[0]: deny api.example"), "{}", denied.body);
    let denied = fetch(with("/%73ecret", "", &[("accept", "application/json")])).await;
    assert_eq!((denied.status, denied.sent()["error"]["code"].clone()), (403, "forbidden".into()));

    let teapot = fetch(get("/teapot")).await;
    assert_eq!((teapot.status, teapot.body.as_str()), (418, "short and stout"));
    assert_eq!(teapot.headers["x-tea"], "green");

    let forwarded = fetch(with("/else/where?a=b", "", &[("x-forwarded-host", "forged")])).await;
    assert_eq!(forwarded.sent()["uri"], "/base/else/where?a=b");
    assert_eq!(forwarded.sent()["headers"]["x-forwarded-host"], NAME);
    assert_eq!(forwarded.sent()["headers"]["x-forwarded-proto"], "https");
    assert_eq!(plain.seen().len(), 1);

    let lost = fetch(get("/lost")).await;
    assert_eq!(lost.status, 502, "{}", lost.body);
    let metadata = fetch(get("/metadata")).await;
    assert_eq!(metadata.status, 403);
    assert!(metadata.body.contains("always refused: metadata"), "{}", metadata.body);

    let set = fetch(with("/", "", &[("authorization", "Bearer of-the-sandbox")])).await;
    assert_eq!(set.status, 200);
    assert_eq!(set.sent()["headers"]["accept"], "text/plain");
    // The server answers with what it was sent; the sandbox does not see it.
    assert!(server.seen().last().unwrap().contains("Bearer of-the-rule"));
    assert!(!set.body.contains("of-the-rule") && !set.body.contains("of-the-sandbox"));

    let lines = sandbox.requests(7).await;
    let told: Vec<_> =
        lines.iter().map(|line| (line.verdict, line.detail.as_deref().unwrap())).collect();
    assert_eq!(told[0], (Verdict::Denied, "GET /secret 403"));
    assert_eq!(told[2], (Verdict::Allowed, "GET /teapot 418"));
    assert_eq!(told[3], (Verdict::Allowed, "GET /else/where 200"));
    assert_eq!(told[4].0, Verdict::Failed);
    assert_eq!(told[5].0, Verdict::Denied);
    assert!(lines[5].rule.contains("always refused: metadata"));
    assert_eq!(told[6], (Verdict::Allowed, "GET / 200"));
}

#[tokio::test]
async fn other_protocols_take_over_a_connection() {
    let sandbox = Sandbox::allow_all(Vec::new());
    let server = Server::start(&sandbox.authorities, &["h2", "http/1.1"]).await;
    let mut client = sandbox.http1(&server).await;
    let headers = [("upgrade", "websocket"), ("connection", "Upgrade"), ("sec-websocket-key", "x")];
    let mut answer = client.send_request(with("/chat", "", &headers)).await.unwrap();
    assert_eq!(answer.status(), 101);
    assert_eq!(answer.headers()["upgrade"], "websocket");
    let mut stream = TokioIo::new(hyper::upgrade::on(&mut answer).await.unwrap());
    for text in ["first", "second"] {
        stream.write_all(text.as_bytes()).await.unwrap();
        let mut echo = vec![0; text.len()];
        stream.read_exact(&mut echo).await.unwrap();
        assert_eq!(echo, text.as_bytes());
    }
    // A rule that is now against it ends it.
    let deny = json!({"mode": "allow-all", "requests": [{"domain": NAME, "action": "deny"}]});
    sandbox.rules.send_replace(super::rules(deny, Vec::new()));
    let ended = tokio::time::timeout(Duration::from_secs(5), stream.read_u8()).await.unwrap();
    assert!(ended.is_err());
    let lines = sandbox.requests(1).await;
    assert_eq!(lines[0].verdict, Verdict::Cut);
    assert_eq!(lines[0].detail.as_deref(), Some("GET /chat 101"));
    assert!(lines[0].rule.contains("deny"), "{}", lines[0].rule);
}

#[tokio::test]
async fn another_form_of_http_does_not_take_over() {
    let sandbox = Sandbox::allow_all(Vec::new());
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    let headers =
        [("upgrade", "h2c"), ("connection", "Upgrade, HTTP2-Settings"), ("http2-settings", "x")];
    let answer = sandbox.fetch(&server, with("/", "", &headers)).await;
    assert_eq!(answer.status, 200);
    for hop in ["upgrade", "http2-settings"] {
        assert!(answer.sent()["headers"][hop].is_null());
    }
}

#[tokio::test]
async fn events_arrive_one_by_one_and_are_cut_when_the_rules_change() {
    let sandbox = Sandbox::allow_all(Vec::new());
    let server = Server::start(&sandbox.authorities, &["h2", "http/1.1"]).await;
    let mut client = sandbox.http2(&server).await;
    let answer = client.send_request(over_http2(&server, "/events", "")).await.unwrap();
    let mut body = answer.into_body();
    for index in 0..3 {
        server.send_more(1);
        let frame = tokio::time::timeout(Duration::from_secs(5), body.frame()).await.unwrap();
        assert_eq!(frame.unwrap().unwrap().into_data().unwrap(), format!("data: {index}\n\n"));
    }
    let same = json!({"mode": "allow-all", "deny": ["192.0.2.0/24"]});
    sandbox.rules.send_replace(super::rules(same, Vec::new()));
    server.send_more(1);
    let frame = tokio::time::timeout(Duration::from_secs(5), body.frame()).await.unwrap();
    assert!(frame.unwrap().is_ok(), "what still fits goes on");
    let deny = json!({"mode": "allow-all", "requests": [{"domain": NAME, "action": "deny"}]});
    sandbox.rules.send_replace(super::rules(deny, Vec::new()));
    let frame = tokio::time::timeout(Duration::from_secs(5), body.frame()).await.unwrap();
    assert!(frame.is_none_or(|frame| frame.is_err()));
    assert_eq!(sandbox.requests(1).await[0].verdict, Verdict::Cut);
}

#[tokio::test]
async fn large_bodies_stream_and_a_slow_reader_slows_the_sender() {
    let sandbox = Sandbox::allow_all(Vec::new());
    for protocols in [&["http/1.1"][..], &["h2"]] {
        let server = Server::start(&sandbox.authorities, protocols).await;
        let mut client = sandbox.http1(&server).await;
        let mut body = client.send_request(get("/download")).await.unwrap().into_body();
        let mut length = body.frame().await.unwrap().unwrap().into_data().unwrap().len();
        tokio::time::sleep(Duration::from_millis(300)).await;
        let made = server.made();
        assert!(made < PIECES / 2, "{made} pieces were made for one that was read");
        while let Some(frame) = body.frame().await {
            length += frame.unwrap().into_data().unwrap().len();
        }
        assert_eq!(length, PIECE * PIECES);
    }
}

#[tokio::test]
async fn large_bodies_go_out_and_trailers_come_back() {
    let sandbox = Sandbox::allow_all(Vec::new());
    let server = Server::start(&sandbox.authorities, &["h2", "http/1.1"]).await;
    let answer = sandbox.fetch(&server, with("/", &"x".repeat(20 << 20), &[])).await;
    assert_eq!(answer.sent()["length"], 20 << 20);

    let stream = TokioIo::new(Box::pin(sandbox.open(&server, "h2").await));
    let (mut client, connection) = http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    let trailers = HeaderMap::from_iter([("x-sum".parse().unwrap(), "42".parse().unwrap())]);
    let frames = [Frame::data(Bytes::from_static(b"call")), Frame::trailers(trailers)];
    let body = StreamBody::new(stream::iter(frames.map(Ok::<_, std::io::Error>)));
    let uri = format!("https://{NAME}:{}/trailers", server.address.port());
    let request = Request::post(uri).header("te", "trailers").body(body).unwrap();
    let answer = client.send_request(request).await.unwrap().into_body().collect().await.unwrap();
    assert_eq!(answer.trailers().unwrap()["x-sum"], "42");
    assert_eq!(answer.to_bytes(), "call");
}

#[tokio::test]
async fn a_client_that_asks_first_is_told_to_go_on() {
    let sandbox = Sandbox::allow_all(Vec::new());
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    let mut stream = Box::pin(sandbox.open(&server, "http/1.1").await);
    let head = format!(
        "POST / HTTP/1.1\r\nhost: {NAME}\r\ncontent-length: 4\r\nexpect: 100-continue\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut told = vec![0; 25];
    tokio::time::timeout(Duration::from_secs(5), stream.read_exact(&mut told))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(told, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(b"body").await.unwrap();
    let mut answer = vec![0; 15];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(answer, b"HTTP/1.1 200 OK");
}

#[tokio::test]
async fn many_requests_at_once_share_one_connection_outward() {
    let sandbox = Sandbox::allow_all(Vec::new());
    let server = Server::start(&sandbox.authorities, &["h2"]).await;
    let client = sandbox.http2(&server).await;
    let requests = (0..60).map(|index| {
        let mut client = client.clone();
        let request: Request<Full<Bytes>> = over_http2(&server, &format!("/{index}"), "body");
        async move { Answered::read(client.send_request(request).await.unwrap()).await.status }
    });
    let answers = futures_util::future::join_all(requests).await;
    assert!(answers.iter().all(|status| *status == 200));
    assert!(server.connections() <= 2, "{}", server.connections());
}
