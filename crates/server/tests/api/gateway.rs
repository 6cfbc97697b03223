//! Ports inside sandboxes, as everybody reaches them.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use sandkeep_core::engine::{Create, Delete, Opened, Stop};
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_core::model::{Patch, Port, Span};
use sandkeep_testkit::daemon::skipped;
use sandkeep_testkit::house::name;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::fixture::{Answer, Served, pieces, read};

/// A small HTTP server. `/echo` gives back the request's head and how long its body was, `/stream`
/// says a line and waits for a file before it says another, `/raw` upgrades to an echo, `/silent`
/// hangs up, `/move` sends elsewhere with a cookie, `/hang` says nothing any more, and `/stuck` neither, after the beginning of an answer or an
/// upgrade.
pub(crate) const SERVER: &str = r##"
$SIG{CHLD} = 'IGNORE';
socket(L, 2, 1, 0); setsockopt(L, 1, 2, 1); bind(L, pack('S n a4 x8', 2, $ARGV[0], "\0\0\0\0")) or die;
listen(L, 50); $| = 1; print "up\n";
while (1) {
  accept(C, L) or next; if (fork) { close C; next; }
  select(C); $| = 1; my $head = '';
  while ($head !~ /\r\n\r\n/s) { sysread(C, $head, 1, length $head) or exit; }
  my ($path) = $head =~ /^\S+ (\S+)/; my ($length) = $head =~ /^content-length: (\d+)/im;
  my ($chunked) = $head =~ /^transfer-encoding: chunked/im; my $got = 0;
  if ($chunked) { while (1) { my $line = ''; while ($line !~ /\n/) { sysread(C, $line, 1, length $line) or exit; }
      my $size = hex($line); my $left = $size + 2; while ($left > 0) { my $n = sysread(C, my $b, $left) or exit; $left -= $n; }
      $got += $size; last unless $size; } }
  elsif ($length) { while ($got < $length) { my $n = sysread(C, my $b, 65536) or exit; $got += $n; } }
  if ($path =~ m{^/stream}) {
    print "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\nX-Hop: 1\r\n\r\ndata: one\n\n";
    select(undef, undef, undef, 0.02) until -e '/work/go'; print "data: two\n\n"; exit; }
  if ($path =~ m{^/raw}) {
    print "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: raw\r\n\r\n";
    while (sysread(C, my $b, 4096)) { print uc $b; } exit; }
  if ($path =~ m{^/move}) { print "HTTP/1.1 302 Found\r\nLocation: /there\r\nSet-Cookie: a=b; Path=/\r\nContent-Length: 0\r\n\r\n"; exit; }
  exit if $path =~ m{^/silent};
  if ($path =~ m{^/hang}) { sleep 1000; exit; }
  if ($path =~ m{^/stuck}) {
    print $head =~ /^upgrade:/im ? "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: raw\r\n\r\n"
      : "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nbegun"; sleep 1000; exit; }
  my $body = "$got\n$head";
  print "HTTP/1.1 200 OK\r\nContent-Length: ", length $body, "\r\nKeep-Alive: 9\r\nX-Path: $path\r\n\r\n$body"; exit;
}
"##;

/// A server with machines in which something can listen.
pub(crate) async fn with_ports(test: &str) -> Option<Served> {
    let perl = ["/usr/bin/perl", "/bin/perl"];
    if !perl.iter().any(|path| std::path::Path::new(path).exists()) {
        skipped(test, "there is no perl to listen on a port with");
        return None;
    }
    Served::with_machines(test).await
}

async fn serve(served: &Served, sandbox: &str, ports: &[u16]) -> Opened {
    let patch = Patch {
        image: Some("small".to_owned()),
        ports: Some(ports.iter().copied().map(Port::from).collect()),
        ..Patch::default()
    };
    let create = Create { name: Some(name(sandbox)), patch, start: true, ..Create::default() };
    let opened = served.engine.create(&name("main"), create, None).await.unwrap();
    listen(served, sandbox).await;
    opened
}

async fn listen(served: &Served, sandbox: &str) {
    use sandkeep_core::engine::Exec;
    let argv = ["perl", "-e", SERVER, "3000"].map(str::to_owned).to_vec();
    let exec = Exec { argv, detach: true, ..Exec::default() };
    let mut started = served.engine.exec(&name("main"), &name(sandbox), exec).await.unwrap();
    assert!(started.events.next().await.is_some(), "it listens");
}

fn sub(opened: &Opened, port: u16) -> String {
    format!("sb-{}-{port}", &opened.sandbox.id.as_str()[4..])
}

pub(crate) async fn get(served: &Served, host: &str, path: &str) -> Answer {
    let request = Request::get(path).header("host", host).body(Full::new(Bytes::new())).unwrap();
    read(served.send(request).await).await
}

#[tokio::test]
async fn a_published_port_is_reached_by_host_and_by_path() {
    let Some(served) = with_ports("a_published_port_is_reached").await else { return };
    let opened = serve(&served, "box", &[3000, 4000]).await;
    let sub_3000 = sub(&opened, 3000);
    let host = format!("{sub_3000}.vercel.run");
    let prefix = format!("/_route/{sub_3000}");

    // Paths are the port's own, also where this server has such a route, and are not touched.
    let path = "/v1/sandboxes/%2e%2e//x?q=%20&r";
    let answer = get(&served, &host, path).await;
    assert_eq!((answer.status.as_u16(), answer.headers["x-path"].to_str().unwrap()), (200, path));
    assert!(!answer.headers.contains_key("keep-alive"));
    let answer = get(&served, "localhost", &format!("{prefix}{path}")).await;
    assert_eq!(answer.headers["x-path"].to_str().unwrap(), path);
    assert_eq!(get(&served, "localhost", &prefix).await.headers["x-path"], "/");
    let head = String::from_utf8_lossy(&answer.body).to_lowercase();
    for line in [
        "x-forwarded-for: 127.0.0.1\r\n",
        "x-forwarded-proto: http\r\n",
        "x-forwarded-host: localhost\r\n",
        "host: localhost\r\n",
    ] {
        assert!(head.contains(line), "{line:?} in {head}");
    }

    // Bodies of known and unknown length, larger than every buffer on the way.
    let big = Bytes::from(vec![b'x'; 70_000]);
    let post = Request::post(format!("{prefix}/echo"))
        .header("host", "localhost")
        .header("connection", "x-secret, close")
        .header("x-secret", "1");
    let answer = read(served.send(post.body(pieces(vec![big.clone(); 50])).unwrap()).await).await;
    let text = String::from_utf8_lossy(&answer.body).to_lowercase();
    assert!(text.starts_with("3500000\n") && !text.contains("x-secret"), "{text}");
    let post = Request::post("/echo").header("host", &host).header("expect", "100-continue");
    let answer = read(served.send(post.body(Full::new(big)).unwrap()).await).await;
    assert!(answer.body.starts_with(b"70000\n"));
}

#[tokio::test]
async fn answers_stream_and_connections_are_upgraded() {
    let Some(served) = with_ports("answers_stream_and_connections").await else {
        return;
    };
    let opened = serve(&served, "box", &[3000]).await;
    let host = format!("{}.example.com", sub(&opened, 3000));
    let request =
        Request::get("/stream").header("host", &host).body(Full::new(Bytes::new())).unwrap();
    let mut response = served.send(request).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let first = response.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(first, "data: one\n\n", "before the second was said");
    sandkeep_in(&served, "touch /work/go").await;
    assert_eq!(read(response).await.body, "data: two\n\n");

    let stream = TcpStream::connect(served.address).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection.with_upgrades());
    let request = Request::get("/raw")
        .header("host", &host)
        .header("connection", "keep-alive, Upgrade")
        .header("upgrade", "raw");
    let response =
        sender.send_request(request.body(Full::new(Bytes::new())).unwrap()).await.unwrap();
    assert_eq!(
        (response.status().as_u16(), response.headers()["upgrade"].to_str().unwrap()),
        (101, "raw")
    );
    let mut pipe = TokioIo::new(hyper::upgrade::on(response).await.unwrap());
    for word in ["hello", "again"] {
        pipe.write_all(word.as_bytes()).await.unwrap();
        let mut back = [0; 5];
        tokio::time::timeout(Duration::from_secs(20), pipe.read_exact(&mut back))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(back, word.to_uppercase().as_bytes());
    }
}

/// Nobody who came through the gateway keeps a sandbox awake after leaving, whatever the process inside
/// does. It keeps running on its own, so that nothing but those connections is held.
#[tokio::test]
async fn whoever_leaves_is_gone_also_where_the_process_hangs() {
    let Some(served) = with_ports("whoever_leaves_is_gone").await else { return };
    let patch = Patch {
        image: Some("small".to_owned()),
        ports: Some(vec![3000.into()]),
        idle_timeout: Some(Some(Span::seconds(5))),
        ..Patch::default()
    };
    let create = Create { name: Some(name("box")), patch, start: true, ..Create::default() };
    let opened = served.engine.create(&name("main"), create, None).await.unwrap();
    let script = format!(
        "cat > /work/server <<'END'\n{SERVER}\nEND\nperl /work/server 3000 </dev/null >/work/up 2>&1 & \
         until [ -s /work/up ]; do sleep 0.02; done"
    );
    sandkeep_in(&served, &script).await;

    let host = format!("{}.example.com", sub(&opened, 3000));
    let asked = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n");
    let upgrade = "Connection: upgrade\r\nUpgrade: raw\r\n";
    let mut open = Vec::new();
    for (request, heard) in [
        (asked("/hang"), ""),
        (asked("/stuck"), "begun"),
        (asked("/stuck") + upgrade, "101 Switching Protocols"),
    ] {
        let mut stream = TcpStream::connect(served.address).await.unwrap();
        stream.write_all(format!("{request}\r\n").as_bytes()).await.unwrap();
        let mut seen = Vec::new();
        while !String::from_utf8_lossy(&seen).contains(heard) {
            let read = tokio::time::timeout(Duration::from_secs(20), stream.read_buf(&mut seen));
            assert!(read.await.unwrap().unwrap() > 0, "{}", String::from_utf8_lossy(&seen));
        }
        open.push(stream);
    }
    let phase =
        async || served.engine.get(&name("main"), &name("box")).await.unwrap().sandbox.phase();
    assert_eq!(phase().await, Phase::Running);
    drop(open);
    let asleep = async {
        while phase().await != Phase::Stopped {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(40), asleep).await.expect("nobody holds it");
}

async fn sandkeep_in(served: &Served, script: &str) {
    use sandkeep_core::engine::Exec;
    let argv = ["sh", "-c", script].map(str::to_owned).to_vec();
    let exec = Exec { argv, ..Exec::default() };
    let mut started = served.engine.exec(&name("main"), &name("box"), exec).await.unwrap();
    while started.events.next().await.is_some() {}
}

#[tokio::test]
async fn ports_that_are_not_there_say_why() {
    let Some(served) = with_ports("ports_that_are_not_there_say_why").await else {
        return;
    };
    let opened = serve(&served, "box", &[3000, 4000]).await;
    let error = |answer: &Answer| {
        let body: Value = serde_json::from_slice(&answer.body).unwrap();
        (answer.status.as_u16(), body["error"]["code"].as_str().unwrap().to_owned())
    };
    let at = |port: u16| format!("/_route/{}/", sub(&opened, port));
    let quiet = get(&served, "x", &at(4000)).await;
    assert_eq!(error(&quiet), (502, "SANDBOX_NOT_LISTENING".to_owned()));
    let silent = get(&served, "x", &format!("{}silent", at(3000))).await;
    assert_eq!(error(&silent), (502, "SANDBOX_NO_RESPONSE".to_owned()));
    for unknown in [
        at(3001),
        "/_route/x/".to_owned(),
        "/_route/sb-01k00000000000000000000000-3000/".to_owned(),
    ] {
        assert_eq!(
            error(&get(&served, "x", &unknown).await),
            (404, "NOT_FOUND".to_owned()),
            "{unknown}"
        );
    }
    let request = Request::builder()
        .method(Method::GET)
        .uri(at(4000))
        .header("host", "x")
        .header("accept", "text/html,*/*;q=0.8");
    let page = read(served.send(request.body(Full::new(Bytes::new())).unwrap()).await).await;
    assert!(page.headers["content-type"].to_str().unwrap().starts_with("text/html"));
    assert!(String::from_utf8_lossy(&page.body).contains("SANDBOX_NOT_LISTENING"));

    // The name outlives the session; a fork has another.
    served.engine.stop(&name("main"), &name("box"), Stop::default(), None).await.unwrap();
    assert_eq!(error(&get(&served, "x", &at(3000)).await), (410, "SANDBOX_STOPPED".to_owned()));
    served.engine.start(&name("main"), &name("box"), None).await.unwrap();
    assert_eq!(error(&get(&served, "x", &at(3000)).await).0, 502);
    listen(&served, "box").await;
    assert_eq!(get(&served, "x", &at(3000)).await.status, 200);
    served.engine.delete(&name("main"), &name("box"), Delete::default(), None).await.unwrap();
    assert_eq!(error(&get(&served, "x", &at(3000)).await).0, 404);
}
