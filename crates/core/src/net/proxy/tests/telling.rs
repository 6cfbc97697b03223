//! Who is sent a secret, and who is not.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt, StreamBody};
use hyper::Request;
use hyper::body::Frame;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::super::super::testing::TestGate;
use super::super::body::HELD_BACK;
use super::server::Server;
use super::{
    Answered, NAME, PLACEHOLDER, SHORT, Sandbox, VALUE, get, in_headers, over_http2, secret, with,
};

#[tokio::test]
async fn the_host_hears_the_value_and_the_sandbox_does_not() {
    for (value, host) in [(VALUE, NAME), (SHORT, "*.example")] {
        let sandbox = Sandbox::allow_all(vec![secret("KEY", value, host)]);
        let server = Server::start(&sandbox.authorities, &["h2", "http/1.1"]).await;
        let basic = STANDARD.encode(format!("me:{PLACEHOLDER}"));
        let request = with(
            &format!("/?key={PLACEHOLDER}"),
            &json!({"key": PLACEHOLDER}).to_string(),
            &[
                ("x-api-key", PLACEHOLDER),
                ("authorization", &format!("Basic {basic}")),
                ("content-type", "application/json"),
                ("accept-encoding", "gzip, br"),
            ],
        );
        let answer = sandbox.fetch(&server, request).await;
        let seen: serde_json::Value = serde_json::from_str(&server.seen()[0]).unwrap();
        assert_eq!(seen["headers"]["x-api-key"], value);
        assert_eq!(
            seen["headers"]["authorization"],
            format!("Basic {}", STANDARD.encode(format!("me:{value}")))
        );
        assert_eq!(seen["headers"]["accept-encoding"], "identity");
        assert_eq!(seen["body"], json!({"key": value}).to_string());
        let body = seen["body"].as_str().unwrap().len();
        assert_eq!(seen["headers"]["content-length"], body.to_string());
        assert!(!seen.to_string().contains(PLACEHOLDER));

        assert_eq!(answer.status, 200);
        assert_eq!(answer.headers["x-echo"], PLACEHOLDER);
        let told = answer.sent();
        assert_eq!(told["headers"]["x-api-key"], PLACEHOLDER);
        assert_eq!(told["headers"]["authorization"], format!("Basic {basic}"));
        assert!(told["uri"].as_str().unwrap().ends_with(&format!("?key={PLACEHOLDER}")));
        assert!(!answer.body.contains(value), "{}", answer.body);
        let lines = sandbox.requests(1).await;
        assert!(!format!("{lines:?}").contains(value));
        assert_eq!(lines[0].detail.as_deref(), Some("POST / 200"));
    }
}

#[tokio::test]
async fn a_placeholder_in_pieces_is_found() {
    for value in [VALUE, SHORT] {
        let sandbox = Sandbox::allow_all(vec![secret("KEY", value, NAME)]);
        let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
        let stream = TokioIo::new(Box::pin(sandbox.open(&server, "http/1.1").await));
        let (mut client, connection) = http1::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        let text = format!("before {PLACEHOLDER} after");
        let pieces: Vec<_> = text.as_bytes().chunks(7).map(Bytes::copy_from_slice).collect();
        let frames = pieces.into_iter().map(|piece| Ok::<_, std::io::Error>(Frame::data(piece)));
        let body = StreamBody::new(stream::iter(frames));
        let request = Request::post("/").header("host", NAME).body(body).unwrap();
        let answer = Answered::read(client.send_request(request).await.unwrap()).await;
        let seen: serde_json::Value = serde_json::from_str(&server.seen()[0]).unwrap();
        assert_eq!(seen["body"], format!("before {value} after"));
        assert_eq!(answer.sent()["body"], text);
    }
}

#[tokio::test]
async fn a_long_body_that_changes_its_length_goes_without_one() {
    let sandbox = Sandbox::allow_all(vec![secret("KEY", SHORT, NAME)]);
    for protocol in ["http/1.1", "h2"] {
        let server = Server::start(&sandbox.authorities, &[protocol]).await;
        let body = format!("{}{PLACEHOLDER}", "x".repeat(2 << 20));
        let answer = sandbox.fetch(&server, with("/", &body, &[])).await;
        assert_eq!(answer.sent()["length"], (2 << 20) + SHORT.len());
        assert!(answer.sent()["headers"]["content-length"].is_null());
    }
}

#[tokio::test]
async fn compressed_and_untouched_bodies_stay_as_they_are() {
    let sandbox = Sandbox::allow_all(vec![secret("KEY", VALUE, NAME)]);
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    let body = format!("not really gzip {PLACEHOLDER}");
    let answer = sandbox.fetch(&server, with("/", &body, &[("content-encoding", "gzip")])).await;
    assert_eq!(answer.sent()["body"], body);
    let answer = sandbox.fetch(&server, with("/", "", &[("accept-encoding", "gzip")])).await;
    assert_eq!(answer.sent()["headers"]["accept-encoding"], "identity", "whatever was put in");
}

#[tokio::test]
async fn other_hosts_hear_the_placeholder() {
    let sandbox = Sandbox::allow_all(vec![secret("KEY", VALUE, "only.example")]);
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    let request = with("/", "", &[("x-api-key", PLACEHOLDER)]);
    assert_eq!(sandbox.fetch(&server, request).await.sent()["headers"]["x-api-key"], PLACEHOLDER);
    let request = with("/", &format!("body with {PLACEHOLDER}"), &[]);
    sandbox.fetch(&server, request).await;
    assert!(!server.seen().concat().contains(VALUE));
    for line in sandbox.requests(2).await {
        let detail = line.detail.unwrap();
        assert!(detail.ends_with("200; placeholder of KEY left as it is"), "{detail}");
    }
}

#[tokio::test]
async fn a_forwarded_request_has_the_secrets_of_where_it_goes() {
    let sandbox = Sandbox::allow_all(Vec::new());
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    let other = Server::start(&sandbox.authorities, &[]).await;
    let url = format!("http://other.example:{}", other.address.port());
    let policy = json!({"mode": "allow-all", "requests": [
        {"domain": NAME, "action": {"forward": {"url": url}}},
    ]});
    for (host, hears) in [(NAME, PLACEHOLDER), ("other.example", VALUE)] {
        sandbox.rules.send_replace(super::rules(policy.clone(), vec![secret("KEY", VALUE, host)]));
        sandbox.fetch(&server, with("/", "", &[("x-api-key", PLACEHOLDER)])).await;
        assert!(other.seen().last().unwrap().contains(hears), "{host}");
    }
}

#[tokio::test]
async fn in_the_clear_a_name_proves_nothing() {
    let policy = json!({"mode": "allow-all", "requests": [
        {"domain": NAME, "action": {"headers": {"authorization": "Bearer of-the-rule"}}},
    ]});
    for given in [true, false] {
        let mut sandbox = Sandbox::new(policy.clone(), vec![secret("KEY", VALUE, NAME)]);
        sandbox.given = given;
        let server = Server::start(&sandbox.authorities, &[]).await;
        let (inside, _) = sandbox.dial(server.address, false);
        let (mut client, connection) = http1::handshake(TokioIo::new(inside)).await.unwrap();
        tokio::spawn(connection);
        let request = with("/", "", &[("x-api-key", PLACEHOLDER)]);
        Answered::read(client.send_request(request).await.unwrap()).await;
        let seen = server.seen().concat();
        assert_eq!(seen.contains(VALUE), given);
        assert_eq!(seen.contains("of-the-rule"), given);
        let detail = sandbox.requests(1).await.remove(0).detail.unwrap();
        assert_eq!(detail.contains("headers not set: this is not TLS"), !given, "{detail}");
    }
}

#[tokio::test]
async fn a_value_once_told_is_masked_in_later_answers_of_the_connection() {
    let sandbox = Sandbox::allow_all(vec![secret("KEY", VALUE, NAME)]);
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    let mut client = sandbox.http1(&server).await;
    let request = with("/", "", &[("x-api-key", PLACEHOLDER)]);
    Answered::read(client.send_request(request).await.unwrap()).await;
    // The server repeats the URL, and somebody who knows the value can ask about it.
    let later = get(&format!("/{VALUE}"));
    let answer = Answered::read(client.send_request(later).await.unwrap()).await;
    assert_eq!(answer.sent()["uri"], format!("/{PLACEHOLDER}"));
}

#[tokio::test]
async fn trailers_do_not_tell_the_value_either() {
    let sandbox = Sandbox::allow_all(vec![secret("KEY", VALUE, NAME)]);
    let server = Server::start(&sandbox.authorities, &["h2"]).await;
    let mut client = sandbox.http2(&server).await;
    let mut request = over_http2(&server, "/trailers", "");
    request.headers_mut().insert("x-api-key", PLACEHOLDER.parse().unwrap());
    let answer = client.send_request(request).await.unwrap().into_body().collect().await.unwrap();
    assert_eq!(answer.trailers().unwrap()["x-sum"], PLACEHOLDER);
}

#[tokio::test]
async fn basic_credentials_of_each_request_are_masked_in_its_own_answer() {
    let sandbox = Sandbox::allow_all(vec![secret("KEY", VALUE, NAME)]);
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    let mut client = sandbox.http1(&server).await;
    let basic = |user: u32, key: &str| STANDARD.encode(format!("user{user}:{key}"));
    for user in 0..3 {
        let sent = format!("Basic {}", basic(user, PLACEHOLDER));
        let request = with("/", "", &[("authorization", &sent)]);
        let answer = Answered::read(client.send_request(request).await.unwrap()).await;
        assert_eq!(answer.sent()["headers"]["authorization"], sent);
        assert!(server.seen().last().unwrap().contains(&basic(user, VALUE)));
    }
    // What was kept for the first is gone; the value in it is found all the same.
    let later = get(&format!("/{}", basic(0, VALUE)));
    let answer = Answered::read(client.send_request(later).await.unwrap()).await;
    let told = answer.sent()["uri"].as_str().unwrap().to_owned();
    assert!(told.contains("****") && !told.contains(&basic(0, VALUE)[12..]), "{told}");
}

#[tokio::test]
async fn without_being_asked_a_body_and_a_query_keep_their_placeholders() {
    let sandbox = Sandbox::allow_all(vec![in_headers("KEY", VALUE, NAME)]);
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    for (path, body) in [(format!("/?k={PLACEHOLDER}"), ""), ("/".to_owned(), PLACEHOLDER)] {
        let answer = sandbox.fetch(&server, with(&path, body, &[("x-api-key", PLACEHOLDER)])).await;
        assert_eq!(answer.status, 200);
        let seen: serde_json::Value = serde_json::from_str(server.seen().last().unwrap()).unwrap();
        assert_eq!(seen["headers"]["x-api-key"], VALUE);
        assert_eq!(seen["body"], body);
        assert!(seen["uri"].as_str().unwrap().ends_with(&path), "{seen}");
    }
    let notes: Vec<String> =
        sandbox.requests(2).await.into_iter().filter_map(|line| line.detail).collect();
    assert!(notes[0].contains("KEY left in the query"), "{notes:?}");
    assert!(notes[1].contains("KEY left in the body"), "{notes:?}");
}

/// A server may show what it was sent to anybody: in any type, in part, packed, on another
/// connection.
#[tokio::test]
async fn what_a_host_was_told_is_masked_on_every_connection_and_in_every_type() {
    for value in [VALUE, SHORT] {
        let sandbox = Sandbox::allow_all(vec![in_headers("KEY", value, NAME)]);
        for protocol in ["http/1.1", "h2"] {
            let server = Server::start(&sandbox.authorities, &[protocol]).await;
            let store = with("/store", "", &[("x-api-key", PLACEHOLDER)]);
            assert_eq!(sandbox.fetch(&server, store).await.status, 200);
            for kind in ["text/plain", "application/octet-stream", "image/png", "application/grpc"]
            {
                let range = ("range", "bytes=7-12");
                let packing = ("accept-encoding", "gzip");
                let asked = with("/show", "", &[("x-kind", kind), range, packing]);
                let answer = sandbox.fetch(&server, asked).await;
                assert_eq!(
                    (answer.status, answer.headers["content-type"].as_bytes()),
                    (200, kind.as_bytes())
                );
                assert!(!answer.body.contains(value), "{kind}: {}", answer.body);
                let masked =
                    if kind.starts_with("text") { PLACEHOLDER } else { &"*".repeat(value.len()) };
                assert_eq!(answer.body, format!("stored {masked} here"), "{kind}");
            }
            let heard = server.seen().concat();
            assert!(!heard.contains("bytes=7-12"), "{heard}");
        }
    }
}

#[tokio::test]
async fn an_answer_that_is_compressed_all_the_same_is_refused() {
    let sandbox = Sandbox::allow_all(vec![in_headers("KEY", VALUE, NAME)]);
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    let store = with("/store", "", &[("x-api-key", PLACEHOLDER)]);
    sandbox.fetch(&server, store).await;
    let answer = sandbox.fetch(&server, with("/show", "", &[("x-packed", "gzip")])).await;
    assert_eq!(answer.status, 502, "{}", answer.body);
    assert!(answer.body.contains("compressed"), "{}", answer.body);
    // Hosts that have no secret compress as they like.
    let other = Sandbox::allow_all(vec![in_headers("KEY", VALUE, "only.example")]);
    let server = Server::start(&other.authorities, &["http/1.1"]).await;
    let answer = other.fetch(&server, with("/show", "", &[("x-packed", "gzip")])).await;
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn nothing_is_held_back_for_long_from_who_waits_for_it() {
    // Each event ends as the value begins.
    let sandbox = Sandbox::allow_all(vec![in_headers("KEY", "\n\n-value", NAME)]);
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    let mut client = sandbox.http1(&server).await;
    let mut body = client.send_request(get("/events")).await.unwrap().into_body();
    for index in 0..3 {
        server.send_more(1);
        let mut event = Vec::new();
        while !event.ends_with(b"\n\n") {
            let frame = tokio::time::timeout(std::time::Duration::from_secs(20), body.frame());
            let frame = frame.await.expect("it is let go").unwrap().unwrap();
            event.extend_from_slice(&frame.into_data().unwrap());
        }
        assert_eq!(event, format!("data: {index}\n\n").into_bytes());
    }
}

#[tokio::test]
async fn a_value_in_two_halves_with_a_pause_between_them_is_masked() {
    let sandbox = Sandbox::allow_all(vec![in_headers("KEY", VALUE, NAME)]);
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    let store = with("/store", "", &[("x-api-key", PLACEHOLDER)]);
    sandbox.fetch(&server, store).await;
    let mut client = sandbox.http1(&server).await;
    let mut body = client.send_request(get("/halves")).await.unwrap().into_body();
    // Longer than anything is held back for somebody who waits.
    let early = tokio::time::timeout(HELD_BACK * 4, body.frame()).await;
    assert!(early.is_err(), "{early:?}");
    server.send_more(1);
    assert_eq!(body.collect().await.unwrap().to_bytes(), PLACEHOLDER);
}

#[tokio::test]
async fn an_answer_that_ends_as_a_value_begins_is_whole() {
    // As long as what covers it, so that the answer has a length.
    let sandbox = Sandbox::allow_all(vec![in_headers("KEY", "here-it-is", NAME)]);
    for protocol in ["http/1.1", "h2"] {
        let server = Server::start(&sandbox.authorities, &[protocol]).await;
        for kind in ["text/plain", "image/png"] {
            let answer = sandbox.fetch(&server, with("/show", "", &[("x-kind", kind)])).await;
            assert_eq!(answer.body, "stored  here", "{protocol} {kind}");
        }
    }
}

#[tokio::test]
async fn what_a_host_was_told_is_masked_where_nothing_is_told() {
    let mut sandbox = Sandbox::allow_all(vec![in_headers("KEY", VALUE, NAME)]);
    let server = Server::start(&sandbox.authorities, &[]).await;
    let store = with("/store", "", &[("x-api-key", PLACEHOLDER)]);
    let mut client = sandbox.plain(server.address).await;
    Answered::read(client.send_request(store).await.unwrap()).await;
    // In the clear, to an address that was not given out for that name: as to a public host.
    sandbox.given = false;
    let mut client = sandbox.plain(server.address).await;
    let shown = Answered::read(client.send_request(get("/show")).await.unwrap()).await;
    assert_eq!(shown.body, format!("stored {PLACEHOLDER} here"));
}

#[tokio::test]
async fn a_header_of_a_rule_is_masked_on_every_connection() {
    let policy = json!({"mode": "allow-all", "requests": [
        {"domain": NAME, "match": {"path": {"exact": "/store"}},
         "action": {"headers": {"x-api-key": "the-key-of-the-rule"}}},
    ]});
    let sandbox = Sandbox::new(policy, Vec::new());
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    sandbox.fetch(&server, get("/store")).await;
    let shown = sandbox.fetch(&server, get("/show")).await;
    assert_eq!(shown.body, format!("stored {} here", "*".repeat(19)));
}

#[tokio::test]
async fn neither_a_status_line_nor_a_part_tells_the_value() {
    let sandbox = Sandbox::allow_all(vec![in_headers("KEY", VALUE, NAME)]);
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    let store = with("/store", "", &[("x-api-key", PLACEHOLDER)]);
    sandbox.fetch(&server, store).await;
    let partial = sandbox.fetch(&server, with("/show", "", &[("x-partial", "1")])).await;
    assert_eq!(partial.status, 502, "{}", partial.body);
    assert!(partial.body.contains("it is partial"), "{}", partial.body);
    let mut client = sandbox.http1(&server).await;
    let shown = client.send_request(with("/show", "", &[("x-reason", "1")])).await.unwrap();
    assert_eq!(shown.status(), 200);
    let reason = shown.extensions().get::<hyper::ext::ReasonPhrase>();
    assert!(reason.is_none(), "{reason:?}");
}

#[tokio::test]
async fn websockets_and_other_protocols_do_not_tell_the_value() {
    let sandbox = Sandbox::allow_all(vec![in_headers("KEY", VALUE, NAME)]);
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    let length = u8::try_from(VALUE.len()).unwrap();
    let frame = |payload: &str| [&[0x81, length], payload.as_bytes()].concat();
    for (protocol, sent, wanted) in [
        ("websocket", frame(VALUE), frame(PLACEHOLDER)),
        ("stream", VALUE.into(), "*".repeat(VALUE.len()).into()),
    ] {
        let mut client = sandbox.http1(&server).await;
        let headers = [
            ("upgrade", protocol),
            ("connection", "Upgrade"),
            ("sec-websocket-extensions", "permessage-deflate"),
        ];
        let mut answer = client.send_request(with("/chat", "", &headers)).await.unwrap();
        assert_eq!(answer.status(), 101);
        assert!(!answer.headers().contains_key("sec-websocket-extensions"), "nor is it offered");
        let mut stream = TokioIo::new(hyper::upgrade::on(&mut answer).await.unwrap());
        // What the server sends is what it is sent: a frame without a mask.
        for piece in sent.chunks(10) {
            stream.write_all(piece).await.unwrap();
            tokio::time::sleep(HELD_BACK * 2).await;
        }
        let mut heard = Vec::new();
        while heard.len() < wanted.len() {
            let read = stream.read_buf(&mut heard);
            let read = tokio::time::timeout(std::time::Duration::from_secs(20), read).await;
            assert_ne!(read.expect("all of it comes").unwrap(), 0);
        }
        let (heard, wanted) = (String::from_utf8_lossy(&heard), String::from_utf8_lossy(&wanted));
        assert_eq!(heard, wanted, "{protocol}");
    }
}

#[tokio::test]
async fn a_secret_waits_until_its_use_is_approved_and_http_is_told_why_not() {
    let mut sandbox = Sandbox::allow_all(vec![in_headers("KEY", VALUE, NAME)]);
    let gate = std::sync::Arc::<TestGate>::default();
    sandbox.gate = gate.clone();
    let server = Server::start(&sandbox.authorities, &["http/1.1"]).await;
    let keyed = || with("/", "", &[("x-api-key", PLACEHOLDER)]);
    // Requests without it go.
    assert_eq!(sandbox.fetch(&server, with("/", "", &[])).await.status, 200);
    assert_eq!(gate.asked(), [""; 0]);
    let target = format!("KEY at {NAME}");
    let held = sandbox.fetch(&server, keyed());
    let approve = async {
        gate.is_asked(&target).await;
        assert_eq!(server.seen().len(), 1, "the server heard it");
        gate.answer(&target, Ok(()));
    };
    let (answer, ()) = tokio::join!(held, approve);
    assert_eq!(answer.status, 200);
    let seen: serde_json::Value = serde_json::from_str(&server.seen()[1]).unwrap();
    assert_eq!(seen["headers"]["x-api-key"], VALUE);
    // Nothing more can be held, and need not be.
    sandbox.held.close();
    assert_eq!(sandbox.fetch(&server, keyed()).await.status, 200);
    gate.answer(&target, Err("it was denied: no".to_owned()));
    let refused = sandbox.fetch(&server, keyed()).await;
    assert_eq!(refused.status, 403);
    assert!(
        refused.body.contains("KEY") && refused.body.contains("denied: no"),
        "{}",
        refused.body
    );
    assert_eq!(server.seen().len(), 3);
    assert_eq!(gate.asked(), [target]);
}
