//! Ports by name: who may, what wakes, what waits; services; plain streams.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use sandkeep_client::Client;
use sandkeep_client::types::{PublishPort, ServiceState, ServiceStatus};
use sandkeep_core::engine::{Create, Stop};
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_core::model::{Access, Patch, Port, Restart, Scope, Service, Span};
use sandkeep_testkit::house::name;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::fixture::{Answer, Served, key, pieces, read};
use crate::gateway::{SERVER, get, with_ports};

const HOST: &str = "3000-box.keep.test";

fn port(number: u16, access: Access) -> Port {
    Port { number, access, wake: true }
}

fn web(argv: &[&str], port: u16) -> Service {
    Service {
        name: name("web"),
        argv: argv.iter().map(|&arg| arg.to_owned()).collect(),
        env: Default::default(),
        cwd: None,
        user: None,
        port: Some(port),
        restart: Restart::Always,
        start: true,
    }
}

/// A sandbox `box` with the usual server as a service on port 3000, asleep.
async fn sandbox(served: &Served, change: Patch) {
    let patch = Patch {
        image: Some("small".to_owned()),
        services: Some(vec![web(&["perl", "-e", SERVER, "3000"], 3000)]),
        ..change
    };
    let create = Create { name: Some(name("box")), patch, ..Create::default() };
    served.engine.create(&name("main"), create, None).await.unwrap();
}

fn published(ports: &[Port]) -> Patch {
    Patch { ports: Some(ports.to_vec()), ..Patch::default() }
}

fn told(answer: &Answer) -> (u16, String) {
    let body = answer.json();
    (answer.status.as_u16(), body["error"]["code"].as_str().unwrap_or_default().to_owned())
}

async fn with_header(served: &Served, host: &str, path: &str, header: (&str, &str)) -> Answer {
    let request = Request::get(path).header("host", host).header(header.0, header.1);
    read(served.send(request.body(Full::new(Bytes::new())).unwrap()).await).await
}

async fn sessions(served: &Served) -> usize {
    let all = served.get("/v1/sandboxes/box/sessions", &served.read).await.json();
    all["items"].as_array().unwrap().len()
}

#[tokio::test]
async fn a_request_wakes_a_sandbox_once_and_finds_its_service() {
    let Some(served) = with_ports("a_request_wakes_a_sandbox_once").await else { return };
    let idle = Patch {
        idle_timeout: Some(Some(Span::seconds(2))),
        ..published(&[port(3000, Access::Public)])
    };
    sandbox(&served, idle).await;
    let served = std::sync::Arc::new(served);
    let asked: Vec<_> = (0..50)
        .map(|n| {
            let served = std::sync::Arc::clone(&served);
            // By every name it has.
            let (host, path) = match n % 3 {
                0 => (HOST, "/echo"),
                1 => ("localhost", "/_port/main/box/3000/echo"),
                _ => ("3000-BOX.localhost:80", "/echo"),
            };
            tokio::spawn(async move { get(&served, host, path).await })
        })
        .collect();
    for answer in asked {
        let answer = answer.await.unwrap();
        assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
        assert_eq!(answer.headers["x-path"], "/echo");
    }
    assert_eq!(sessions(&served).await, 1);

    // The service alone keeps nothing awake; the next request has both there again.
    let phase =
        async || served.engine.get(&name("main"), &name("box")).await.unwrap().sandbox.phase();
    let asleep = async {
        while phase().await != Phase::Stopped {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(40), asleep).await.expect("nobody holds it");
    let all = served.get("/v1/sandboxes/box/services", &served.read).await.json();
    assert_eq!(all["items"][0]["state"], "stopped");
    assert_eq!(get(&served, HOST, "/echo").await.status, StatusCode::OK);
    assert_eq!(sessions(&served).await, 2);
}

#[tokio::test]
async fn an_open_stream_holds_a_sandbox_awake() {
    let Some(served) = with_ports("an_open_stream_holds_a_sandbox_awake").await else { return };
    let idle = Patch {
        idle_timeout: Some(Some(Span::seconds(1))),
        ..published(&[port(3000, Access::Public)])
    };
    sandbox(&served, idle).await;
    let request = Request::get("/stream").header("host", HOST).body(Full::new(Bytes::new()));
    let mut response = served.send(request.unwrap()).await;
    assert_eq!(response.frame().await.unwrap().unwrap().into_data().unwrap(), "data: one\n\n");
    tokio::time::sleep(Duration::from_secs(4)).await;
    let opened = served.engine.get(&name("main"), &name("box")).await.unwrap();
    assert_eq!(opened.sandbox.phase(), Phase::Running, "somebody listens");
}

#[tokio::test]
async fn places_and_cookies_are_put_right_under_a_path() {
    let Some(served) = with_ports("places_and_cookies_are_put_right").await else { return };
    sandbox(&served, published(&[port(3000, Access::Public)])).await;
    let under = get(&served, "localhost", "/_port/main/box/3000/move").await;
    assert_eq!(under.headers["location"], "/_port/main/box/3000/there");
    assert_eq!(under.headers["set-cookie"], "a=b; Path=/_port/main/box/3000");
    let whole = get(&served, HOST, "/move").await;
    assert_eq!(whole.headers["location"], "/there");
    assert_eq!(whole.headers["set-cookie"], "a=b; Path=/");

    // 200 MB without a length: more than any buffer on the way.
    let piece = Bytes::from(vec![7u8; 1 << 20]);
    let post = Request::post("/echo").header("host", HOST);
    let post = post.body(pieces(std::iter::repeat_n(piece, 200))).unwrap();
    let answer = read(served.send(post).await).await;
    assert!(answer.body.starts_with(b"209715200\n"), "{:?}", &answer.body[..20]);
}

#[tokio::test]
async fn a_private_port_opens_to_keys_and_tokens_and_tells_nobody_else() {
    let Some(served) = with_ports("a_private_port_opens_to_keys").await else { return };
    sandbox(&served, published(&[port(3000, Access::Private), port(4000, Access::Private)])).await;
    let path = "/_port/main/box/3000/echo";

    // The same to the byte as what is not there.
    let without = get(&served, "localhost", path).await;
    let nothing = get(&served, "localhost", "/_port/main/bax/3000/echo").await;
    assert_eq!((told(&without), &without.body), ((404, "NOT_FOUND".into()), &nothing.body));
    assert_eq!(without.headers.len(), nothing.headers.len());
    let bearer = |secret: &str| format!("Bearer {secret}");
    for refused in [&served.read, &served.foreign, &"skp_nonsense".to_owned()] {
        let answer =
            with_header(&served, "localhost", path, ("authorization", &bearer(refused))).await;
        assert_eq!(told(&answer).0, 404);
    }
    assert_eq!(sessions(&served).await, 0, "nobody woke it");
    for opens in [&served.write, &served.admin] {
        let answer =
            with_header(&served, "localhost", path, ("authorization", &bearer(opens))).await;
        assert_eq!(answer.status, StatusCode::OK);
        let head = String::from_utf8_lossy(&answer.body).to_lowercase();
        assert!(!head.contains("authorization") && !head.contains(opens.as_str()), "{head}");
    }

    // Whatever form our key comes in, it stays outside; what is the server's own goes through.
    let basic = "Basic dXNlcjpwYXNz";
    let ours = bearer(&served.write);
    let encoded = STANDARD.encode(format!("user:{}", served.write));
    let parameter = format!("{path}?key={}&other=1", served.write);
    for (path, headers, keeps) in [
        (path, vec![("authorization", ours.clone()), ("authorization", basic.to_owned())], true),
        (path, vec![("authorization", basic.to_owned()), ("authorization", ours.clone())], true),
        (path, vec![("authorization", format!("{basic}, {ours}"))], false),
        (path, vec![("authorization", format!("{ours}, {basic}"))], false),
        (path, vec![("authorization", ours.clone()), ("x-api-key", served.write.clone())], false),
        (path, vec![("authorization", ours.clone()), ("proxy-authorization", ours.clone())], false),
        (
            path,
            vec![("authorization", ours.clone()), ("cookie", format!("a=1; k={}", served.write))],
            false,
        ),
        (path, vec![("authorization", format!("Basic {encoded}"))], false),
        (path, vec![("authorization", format!("Bearer{}", served.write))], false),
        (
            path,
            vec![
                ("authorization", ours.clone()),
                ("sec-websocket-protocol", format!("bearer.{}", served.write)),
                ("x-a", format!("foo{}.bar", served.write)),
            ],
            false,
        ),
        (parameter.as_str(), vec![("authorization", ours.clone())], false),
    ] {
        let mut request = Request::get(path).header("host", "localhost");
        for (name, value) in &headers {
            request = request.header(*name, value);
        }
        let answer = read(served.send(request.body(Full::new(Bytes::new())).unwrap()).await).await;
        assert_eq!(answer.status, StatusCode::OK, "{headers:?}");
        let head = String::from_utf8_lossy(&answer.body).into_owned();
        for secret in [served.write.as_str(), encoded.as_str()] {
            assert!(!head.contains(secret), "{headers:?}: {head}");
        }
        assert_eq!(
            head.to_lowercase().contains("authorization: basic"),
            keeps,
            "{headers:?}: {head}"
        );
    }

    let token = async |port: u16, body: &str| {
        let path = format!("/v1/sandboxes/box/ports/{port}/token");
        served.post(&path, &served.write, body).await.json()
    };
    let made = token(3000, "{}").await;
    let secret = made["token"].as_str().unwrap();
    assert_eq!(made["url"], format!("http://{HOST}/?keep_token={secret}"));
    let other = token(4000, "{}").await;
    let answer = with_header(&served, "localhost", path, ("x-sandkeep-token", secret)).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert!(!String::from_utf8_lossy(&answer.body).contains(secret), "it does not go inside");
    let wrong = other["token"].as_str().unwrap();
    let answer = with_header(&served, "localhost", path, ("x-sandkeep-token", wrong)).await;
    assert_eq!(told(&answer).0, 404, "a token for another port");

    // In the query it becomes a cookie and goes out of the address.
    let visited = get(&served, "localhost", &format!("{path}?a=1&keep_token={secret}&b")).await;
    assert_eq!(visited.status, StatusCode::SEE_OTHER);
    assert_eq!(visited.headers["location"], format!("{path}?a=1&b"));
    let cookie = visited.headers["set-cookie"].to_str().unwrap();
    for part in ["Path=/_port/main/box/3000;", "HttpOnly", "SameSite=Lax", "Max-Age="] {
        assert!(cookie.contains(part), "{part} in {cookie}");
    }
    let pair = format!("mine=1; {}", cookie.split(';').next().unwrap());
    let request = Request::get(path)
        .header("host", "localhost")
        .header("cookie", &pair)
        .header("authorization", "Basic dXNlcjpwYXNz");
    let answer = read(served.send(request.body(Full::new(Bytes::new())).unwrap()).await).await;
    let head = String::from_utf8_lossy(&answer.body).to_lowercase();
    assert!(head.contains("cookie: mine=1\r\n"), "{head}");
    assert!(head.contains("authorization: basic"), "what is the server's own goes through: {head}");
    let host = get(&served, HOST, &format!("/?keep_token={secret}")).await;
    assert!(host.headers["set-cookie"].to_str().unwrap().contains("Path=/;"));

    // Tokens end, and with the key they were made with.
    let short = token(3000, r#"{"expires":"1s"}"#).await;
    let brief = key(&served.engine, &name("main"), Scope::Write, Some(Span::seconds(3))).await;
    let lent = served.post("/v1/sandboxes/box/ports/3000/token", &brief, "").await.json();
    let lent = lent["token"].as_str().unwrap();
    let answer = with_header(&served, "localhost", path, ("x-sandkeep-token", lent)).await;
    assert_eq!(answer.status, StatusCode::OK);
    tokio::time::sleep(Duration::from_secs(4)).await;
    for ended in [short["token"].as_str().unwrap(), lent] {
        let answer = with_header(&served, "localhost", path, ("x-sandkeep-token", ended)).await;
        assert_eq!(told(&answer), (401, "TOKEN_EXPIRED".to_owned()));
    }
    // And are no keys.
    assert_eq!(served.get("/v1/whoami", secret).await.status, StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn whoever_does_not_get_there_is_told_why() {
    let Some(served) = with_ports("whoever_does_not_get_there").await else { return };
    let quiet = Port { number: 4000, access: Access::Public, wake: false };
    sandbox(&served, published(&[port(3000, Access::Public), quiet, port(5000, Access::Public)]))
        .await;
    let at = |port: u16| format!("/_port/main/box/{port}/");
    assert_eq!(told(&get(&served, "x", &at(4000)).await), (503, "SANDBOX_ASLEEP".to_owned()));
    let never = r#"{"wake_on_request":false}"#;
    served.json(Method::PATCH, "/v1/sandboxes/box", &served.write, never).await;
    assert_eq!(told(&get(&served, "x", &at(3000)).await), (503, "SANDBOX_ASLEEP".to_owned()));
    let again = r#"{"wake_on_request":true}"#;
    served.json(Method::PATCH, "/v1/sandboxes/box", &served.write, again).await;

    // Nothing will ever listen there, which cannot be known of a session so young.
    let slow = get(&served, "x", &at(5000)).await;
    assert_eq!(told(&slow), (504, "SANDBOX_PORT_TIMEOUT".to_owned()));
    assert_eq!(slow.headers["retry-after"], "5");
    assert_eq!(
        told(&get(&served, "x", &at(4000)).await),
        (502, "SANDBOX_NOT_LISTENING".to_owned())
    );
    let off = r#"{"access":"off"}"#;
    let changed =
        served.json(Method::PUT, "/v1/sandboxes/box/ports/5000", &served.write, off).await;
    assert_eq!(changed.json()["access"], "off");
    assert_eq!(told(&get(&served, "x", &at(5000)).await).0, 404);
    let page = with_header(&served, "x", &at(4000), ("accept", "text/html")).await;
    let text = String::from_utf8_lossy(&page.body).into_owned();
    assert!(text.starts_with("<!doctype html>") && !text.contains("http://"), "{text}");
}

#[tokio::test]
async fn a_sandbox_that_does_not_start_is_tried_once_for_all_who_wait() {
    let served = std::sync::Arc::new(Served::without_machines().await);
    let create = Create {
        name: Some(name("box")),
        patch: Patch {
            image: Some("small".to_owned()),
            ..published(&[port(3000, Access::Public)])
        },
        ..Create::default()
    };
    served.engine.create(&name("main"), create, None).await.unwrap();
    let asked: Vec<_> = (0..20)
        .map(|_| {
            let served = std::sync::Arc::clone(&served);
            tokio::spawn(async move { get(&served, HOST, "/").await })
        })
        .collect();
    for answer in asked {
        let answer = answer.await.unwrap();
        assert_eq!(told(&answer), (503, "SANDBOX_FAILED".to_owned()));
        assert!(
            !String::from_utf8_lossy(&answer.body).contains("no machines"),
            "the owner's to know"
        );
    }
    let tried = sessions(&served).await;
    assert!(tried <= 2, "{tried} attempts");
}

#[tokio::test]
async fn http2_comes_in_and_grpc_goes_through() {
    let Some(served) = with_ports("http2_comes_in_and_grpc_goes_through").await else { return };
    sandbox(&served, published(&[port(3000, Access::Public), port(5000, Access::Public)])).await;
    let grpc = Service { name: name("grpc"), ..web(&["perl", "-e", GRPC, "5000"], 5000) };
    served.engine.set_service(&name("main"), &name("box"), grpc).await.unwrap();
    let stream = TcpStream::connect(served.address).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .unwrap();
    tokio::spawn(connection);

    let request =
        Request::post(format!("http://{HOST}/echo")).body(Full::new(Bytes::from("12345")));
    let answer = read(sender.send_request(request.unwrap()).await.unwrap()).await;
    let text = String::from_utf8_lossy(&answer.body).into_owned();
    assert!(
        text.starts_with("5\n") && text.to_lowercase().contains(&format!("host: {HOST}\r\n")),
        "{text}"
    );

    let request = Request::post("http://5000-box.keep.test/pkg.Echo/Say")
        .header("content-type", "application/grpc+proto")
        .header("te", "trailers")
        .body(Full::new(Bytes::from_static(b"\0\0\0\0\x02hi")))
        .unwrap();
    let answer = sender.send_request(request).await.unwrap();
    assert_eq!(answer.headers()["content-type"], "application/grpc");
    let whole = answer.into_body().collect().await.unwrap();
    assert_eq!(whole.trailers().unwrap()["grpc-status"], "0");
    assert_eq!(whole.to_bytes(), Bytes::from_static(b"\0\0\0\0\x02hi"));
}

/// As much of HTTP/2 as one gRPC call takes.
const GRPC: &str = r##"
$SIG{CHLD} = 'IGNORE'; binmode STDOUT;
sub frame { my ($type, $flags, $stream, $body) = @_; pack('Cn CC N', length($body) >> 16, length($body) & 65535, $type, $flags, $stream) . $body }
sub text { my ($name, $value) = @_; "\0" . chr(length $name) . $name . chr(length $value) . $value }
sub take { my ($n) = @_; my $b = ''; while (length $b < $n) { sysread(C, $b, $n - length $b, length $b) or exit } $b }
socket(L, 2, 1, 0); setsockopt(L, 1, 2, 1); bind(L, pack('S n a4 x8', 2, $ARGV[0], "\0\0\0\0")) or die; listen(L, 50);
while (1) {
  accept(C, L) or next; if (fork) { close C; next; }
  select(C); $| = 1; binmode C; take(24); print frame(4, 0, 0, ''); my $said = '';
  while (1) {
    my ($high, $low, $type, $flags, $stream) = unpack('Cn CC N', take(9)); my $body = take($high << 16 | $low);
    print frame(4, 1, 0, '') if $type == 4 && !($flags & 1);
    print frame(6, 1, 0, $body) if $type == 6 && !($flags & 1);
    $said .= $body if $type == 0;
    print frame(1, 4, $stream, "\x88" . text('content-type', 'application/grpc')) . frame(0, 0, $stream, $said)
      . frame(1, 5, $stream, text('grpc-status', '0')) if $type < 2 && $flags & 1;
  }
}
"##;

/// Answers in capitals to what it received, when it has received all.
const UPPER: &str = r##"
$SIG{CHLD} = 'IGNORE'; socket(L, 2, 1, 0); setsockopt(L, 1, 2, 1);
bind(L, pack('S n a4 x8', 2, $ARGV[0], "\0\0\0\0")) or die; listen(L, 50);
while (1) { accept(C, L) or next; if (fork) { close C; next; } my $all = ''; $all .= $b while sysread(C, $b, 65536);
  syswrite(C, uc $all); exit; }
"##;

#[tokio::test]
async fn plain_streams_reach_any_port_and_end_half_by_half() {
    let Some(served) = with_ports("plain_streams_reach_any_port").await else { return };
    sandbox(&served, Patch::default()).await;
    let upper = Service { name: name("upper"), ..web(&["perl", "-e", UPPER, "7000"], 7000) };
    served.engine.set_service(&name("main"), &name("box"), upper).await.unwrap();
    let client = |key: &str| {
        Client::new(format!("http://{}", served.address).parse().unwrap(), Some(key)).unwrap()
    };
    let writer = client(&served.write);
    let mut open = Vec::new();
    for n in 0..20 {
        open.push((n, writer.connect_port("box", 7000).await.unwrap()));
    }
    for (n, mut stream) in open {
        let said = format!("hello {n} ").repeat(5000);
        stream.write_all(said.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut heard = String::new();
        let all = stream.read_to_string(&mut heard);
        tokio::time::timeout(Duration::from_secs(30), all).await.unwrap().unwrap();
        assert_eq!(heard, said.to_uppercase());
    }
    assert!(client(&served.read).connect_port("box", 7000).await.is_err(), "it may only look");
    assert!(client(&served.foreign).connect_port("box", 7000).await.is_err());
    let plain = served.get("/v1/sandboxes/box/ports/7000/connect", &served.write).await;
    assert_eq!(plain.status, StatusCode::UPGRADE_REQUIRED);
}

#[tokio::test]
async fn services_are_started_again_stopped_and_changed() {
    let Some(served) = with_ports("services_are_started_again").await else { return };
    let patch = Patch { image: Some("small".to_owned()), ..Patch::default() };
    let create = Create { name: Some(name("box")), patch, start: true, ..Create::default() };
    served.engine.create(&name("main"), create, None).await.unwrap();
    let put = async |service: &str, body: Value| {
        let path = format!("/v1/sandboxes/box/services/{service}");
        served.json(Method::PUT, &path, &served.write, &body.to_string()).await
    };
    let look = async |service: &str| -> ServiceStatus {
        let all = served.get("/v1/sandboxes/box/services", &served.read).await;
        let all: Vec<ServiceStatus> = serde_json::from_value(all.json()["items"].clone()).unwrap();
        all.into_iter().find(|one| one.service.name == service).unwrap()
    };
    let until = async |service: &str, wanted: &dyn Fn(&ServiceStatus) -> bool| {
        for _ in 0..400 {
            let status = look(service).await;
            if wanted(&status) {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("{:?}", look(service).await);
    };
    put("fails", json!({ "argv": ["sh", "-c", "echo no; exit 3"], "restart": "on-failure" })).await;
    put("once", json!({ "argv": ["sh", "-c", "exit 3"], "restart": "never" })).await;
    put("gone", json!({ "argv": ["no-such-program"] })).await;
    put("stays", json!({ "argv": ["sleep", "1000"], "restart": "always" })).await;
    put("later", json!({ "argv": ["sleep", "1000"], "start": false })).await;
    let failing = until("fails", &|status| status.failures >= 2).await;
    assert!(failing.problem.is_none() || failing.problem.unwrap().contains("ended with 3"));
    let once = until("once", &|status| status.state == ServiceState::Exited).await;
    assert_eq!((once.exit_code, once.failures), (Some(3), 0));
    let gone = until("gone", &|status| status.failures >= 1).await;
    assert!(gone.state == ServiceState::Restarting || gone.state == ServiceState::Starting);
    let first = until("stays", &|status| status.state == ServiceState::Running).await.command;
    assert_eq!(look("later").await.state, ServiceState::Stopped);

    // Changed, it is another command; as it was, the same.
    put("stays", json!({ "argv": ["sleep", "1000"], "restart": "always" })).await;
    assert_eq!(look("stays").await.command, first);
    put("stays", json!({ "argv": ["sleep", "2000"], "restart": "always" })).await;
    let running =
        |status: &ServiceStatus| status.state == ServiceState::Running && status.command != first;
    until("stays", &running).await;
    let act = async |service: &str, what: &str| {
        let path = format!("/v1/sandboxes/box/services/{service}/{what}");
        served.post(&path, &served.write, "").await
    };
    assert_eq!(act("stays", "stop").await.json()["state"], "stopped");
    act("later", "start").await;
    until("later", &|status| status.state == ServiceState::Running).await;
    let gone = served.call(Method::DELETE, "/v1/sandboxes/box/services/later", &served.write).await;
    assert_eq!(gone.status, StatusCode::NO_CONTENT);
    let ran = served.get("/v1/sandboxes/box/commands?limit=1000", &served.read).await.json();
    let alive: Vec<&Value> = ran["items"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|one| one["state"] == "running" && one["argv"][0] == "sleep")
        .collect();
    assert!(alive.is_empty(), "{alive:?}");

    // What is stopped by hand is for this session.
    served.engine.stop(&name("main"), &name("box"), Stop::default(), None).await.unwrap();
    served.engine.start(&name("main"), &name("box"), None).await.unwrap();
    until("stays", &|status| status.state == ServiceState::Running).await;

    for (body, field) in [
        (json!({ "argv": [] }), "argv"),
        (json!({ "argv": ["a"], "port": 0 }), "port"),
        (json!({ "argv": ["a"], "cwd": "x" }), "cwd"),
        (json!({ "argv": ["a"], "restart": "often" }), "restart"),
        (json!({ "argv": ["a"], "prot": 1 }), "prot"),
    ] {
        let answer = put("bad", body.clone()).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{body}");
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(field), "{field} in {message}");
    }
    assert_eq!(act("bad", "start").await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn hostile_requests_get_a_refusal_and_hinder_nobody() {
    let Some(served) = with_ports("hostile_requests_get_a_refusal").await else { return };
    sandbox(&served, published(&[port(3000, Access::Public)])).await;
    // Many that never finish what they say.
    let mut slow = Vec::new();
    for _ in 0..200 {
        let mut stream = TcpStream::connect(served.address).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: 3000-box.keep.test\r\nX-Slow: ").await.unwrap();
        slow.push(stream);
    }
    let giant =
        format!("GET /echo HTTP/1.1\r\nHost: {HOST}\r\nX-Big: {}\r\n\r\n", "x".repeat(1 << 20));
    let many = format!(
        "GET /echo HTTP/1.1\r\nHost: {HOST}\r\n{}\r\n",
        (0..1000).map(|n| format!("X-{n}: 1\r\n")).collect::<String>()
    );
    let two = format!(
        "GET /echo HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    );
    for (request, allowed) in [
        (giant.as_str(), &[400, 431][..]),
        (&many, &[400, 431]),
        (&two, &[200, 400]),
        ("GET /../../etc HTTP/1.1\r\nHost: 3000-..%2f..%2fx.keep.test\r\n\r\n", &[400, 404]),
        ("GET / HTTP/1.1\r\nHost: 3000-\u{e9}.keep.test\r\n\r\n", &[400, 401, 404]),
        ("GET /_port/main/../box/3000/ HTTP/1.1\r\nHost: x\r\n\r\n", &[404]),
        ("CONNECT 3000-box.keep.test:80 HTTP/1.1\r\nHost: 3000-box.keep.test\r\n\r\n", &[404]),
        ("GET / HTTP/1.1\r\n\r\n", &[400, 404]),
    ] {
        let mut stream = TcpStream::connect(served.address).await.unwrap();
        let _ = stream.write_all(request.as_bytes()).await;
        let mut head = vec![0; 12];
        let heard = tokio::time::timeout(Duration::from_secs(30), stream.read_exact(&mut head));
        heard.await.expect("an answer").expect("a whole status");
        let status: u16 = String::from_utf8_lossy(&head[9..12]).parse().unwrap();
        let shown: String = request.chars().take(60).collect();
        assert!(allowed.contains(&status), "{status} for {shown}");
    }
    assert_eq!(get(&served, HOST, "/echo").await.status, StatusCode::OK);
    drop(slow);
}

#[tokio::test]
async fn ports_are_listed_and_changed_by_those_who_may() {
    let served = Served::without_machines().await;
    let body = r#"{"name":"box","image":"small","start":false,"ports":[{"port":3000},{"port":4000,"access":"private","wake":false}]}"#;
    let made = served.post("/v1/sandboxes", &served.write, body).await;
    assert_eq!(made.status, StatusCode::CREATED, "{made:?}");
    let all = served.get("/v1/sandboxes/box/ports", &served.read).await.json();
    assert_eq!(all["items"][0]["access"], "public");
    assert_eq!(all["items"][1]["wake"], false);
    let url = all["items"][0]["url"].as_str().unwrap();
    assert!(url.starts_with("http://3000-box.keep.test"), "{url}");
    let private = serde_json::to_string(&PublishPort {
        access: sandkeep_client::types::Access::Private,
        wake: true,
    });
    let path = "/v1/sandboxes/box/ports/3000";
    let changed = served.json(Method::PUT, path, &served.write, &private.unwrap()).await;
    assert_eq!(changed.json()["access"], "private");
    let refused = served.json(Method::PUT, path, &served.read, r#"{"access":"public"}"#).await;
    assert_eq!(refused.status, StatusCode::FORBIDDEN);
    for (path, body, field) in [
        (path, r#"{"access":"shared"}"#, "access"),
        (path, r#"{}"#, "access"),
        ("/v1/sandboxes/box/ports/0", r#"{"access":"public"}"#, "ports"),
        ("/v1/sandboxes/box/ports/70000", r#"{"access":"public"}"#, "70000"),
    ] {
        let answer = served.json(Method::PUT, path, &served.write, body).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{path} {body}");
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(field), "{field} in {message}");
    }
    let token = served.post("/v1/sandboxes/box/ports/5000/token", &served.write, "").await;
    assert_eq!(token.status, StatusCode::NOT_FOUND);
    let token = served.post("/v1/sandboxes/box/ports/4000/token", &served.read, "").await;
    assert_eq!(token.status, StatusCode::FORBIDDEN);
}
