//! Ports and services as people use them: the real binary, a real daemon, real servers inside.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use sandkeep_testkit::daemon::{Daemon, skipped, unfit};

const KEEP: &str = env!("CARGO_BIN_EXE_keep");

/// A daemon, or nothing if this host cannot run sandboxes or lacks a program.
fn daemon(test: &str, programs: &[&str]) -> Option<Daemon> {
    let missing = programs.iter().find(|program| !Path::new("/usr/bin").join(program).exists());
    let why = unfit()
        .map(str::to_owned)
        .or_else(|| missing.map(|missing| format!("there is no {missing}")));
    if let Some(why) = why {
        skipped(test, &why);
        return None;
    }
    Some(Daemon::start(KEEP))
}

fn address(keep: &Daemon) -> String {
    keep.url_and_key().0.trim_start_matches("http://").to_owned()
}

/// One request on a connection of its own; the whole answer.
fn ask(keep: &Daemon, host: &str, path: &str, more: &str) -> String {
    let mut stream = TcpStream::connect(address(keep)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{more}\r\n")
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn a_dev_server_is_there_again_after_every_resume() {
    let Some(mut keep) = daemon("a_dev_server_is_there_again", &["python3"]) else { return };
    keep.ok(["create", "my-app", "--publish", "3000"]);
    keep.sh("my-app", "mkdir -p /work/site && echo it works > /work/site/index.html");
    keep.ok([
        "service",
        "set",
        "my-app",
        "web",
        "--port",
        "3000",
        "--restart",
        "always",
        "-C",
        "/work/site",
        "--",
        "python3",
        "-m",
        "http.server",
        "3000",
    ]);
    let path = "/_port/default/my-app/3000/";
    assert!(ask(&keep, "localhost", path, "").contains("it works"));
    assert!(ask(&keep, "3000-my-app.localhost", "/", "").contains("it works"));

    // What goes through a port is part of what the session has sent and received.
    let usage = keep.json(["sessions", "my-app"])[0]["usage"].clone();
    let counted = |usage: &serde_json::Value, name: &str| usage[name].as_u64().unwrap();
    let (received, sent) =
        (counted(&usage, "network_in_bytes"), counted(&usage, "network_out_bytes"));
    assert!(received > 50 && sent > 50, "{usage}");
    keep.ok(["stop", "my-app"]);
    let kept = keep.json(["sessions", "my-app"])[0]["usage"].clone();
    assert!(counted(&kept, "network_in_bytes") >= received, "{kept}");
    assert_eq!(keep.json(["service", "ls", "my-app"])[0]["state"], "stopped");
    let begun = Instant::now();
    let answer = ask(&keep, "localhost", path, "");
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("it works"), "{answer}");
    println!("from asleep to answered: {:?}", begun.elapsed());

    // A daemon that comes back takes it up, and starts no second one.
    let before = keep.json(["service", "ls", "my-app"])[0]["command"].clone();
    keep.keep_address();
    keep.kill();
    keep.launch();
    let after = keep.json(["service", "ls", "my-app"]);
    assert_eq!((&after[0]["state"], &after[0]["command"]), (&"running".into(), &before));
    assert!(ask(&keep, "localhost", path, "").contains("it works"));
    let commands = keep.json(["ps", "my-app"]);
    let alive = commands.as_array().unwrap().iter().filter(|one| one["state"] == "running");
    assert_eq!(alive.count(), 1);

    // It is supervised still.
    keep.ok(["kill", "my-app", before.as_str().unwrap(), "-s", "KILL"]);
    // Until it is seen to be gone, a request may still reach the one that is dying.
    let ended = |keep: &Daemon| keep.json(["service", "ls", "my-app"])[0]["command"] != before;
    let patience = Instant::now();
    while !ended(&keep) && patience.elapsed() < Duration::from_secs(30) {
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(
        ask(&keep, "localhost", path, "").contains("it works"),
        "the request waits for the next"
    );
    let log = keep.keep(["service", "logs", "my-app", "web"]).stderr;
    let log = String::from_utf8_lossy(&log);
    assert!(log.contains("GET / HTTP/1.1"), "{log}");
    keep.ok(["service", "stop", "my-app", "web"]);
    assert_eq!(keep.json(["service", "ls", "my-app"])[0]["state"], "stopped");
    keep.ok(["service", "rm", "my-app", "web"]);
    assert_eq!(keep.json(["service", "ls", "my-app"]), serde_json::json!([]));
}

/// Answers in capitals to what it receives on a WebSocket.
const SOCKET: &str = r#"
const server = require('http').createServer((q, r) => r.end('plain\n'));
server.on('upgrade', (request, socket) => {
  const accept = require('crypto').createHash('sha1')
    .update(request.headers['sec-websocket-key'] + '258EAFA5-E914-47DA-95CA-C5AB0DC85B11').digest('base64');
  socket.write(`HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: ${accept}\r\n\r\n`);
  socket.on('data', (frame) => {
    const text = Buffer.from(frame.subarray(6).map((b, i) => b ^ frame[2 + i % 4])).toString().toUpperCase();
    socket.write(Buffer.concat([Buffer.from([0x81, text.length]), Buffer.from(text)]));
  });
});
server.listen(4000);
"#;

#[test]
fn a_private_port_is_opened_with_a_link_and_carries_a_web_socket() {
    let Some(keep) = daemon("a_private_port_is_opened_with_a_link", &["node"]) else { return };
    keep.ok(["create", "app"]);
    keep.ok(["service", "set", "app", "ws", "--port", "4000", "--", "node", "-e", SOCKET]);
    let path = "/_port/default/app/4000/";
    assert!(ask(&keep, "localhost", path, "").starts_with("HTTP/1.1 404"));
    let url = keep.ok(["open", "app", "4000", "--print"]).trim().to_owned();
    let (_, query) = url.split_once('?').unwrap();
    assert!(url.contains(path) && query.starts_with("keep_token="), "{url}");
    assert!(ask(&keep, "localhost", path, "").starts_with("HTTP/1.1 404"), "it is private");
    let visited = ask(&keep, "localhost", &format!("{path}?{query}"), "").to_lowercase();
    assert!(
        visited.starts_with("http/1.1 303") && visited.contains(&format!("location: {path}\r\n")),
        "{visited}"
    );
    let token = query.strip_prefix("keep_token=").unwrap();
    let cookie = format!("Cookie: sandkeep_port={token}\r\n");
    assert!(ask(&keep, "localhost", path, &cookie).contains("plain"));

    let mut socket = TcpStream::connect(address(&keep)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    write!(
        socket,
        "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n{cookie}\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    .unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        socket.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    assert!(
        head.starts_with("HTTP/1.1 101") && head.contains("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="),
        "{head}"
    );
    for word in ["hello", "again"] {
        let mut frame = vec![0x81, 0x85, 1, 2, 3, 4];
        frame.extend(word.bytes().enumerate().map(|(n, byte)| byte ^ [1, 2, 3, 4][n % 4]));
        socket.write_all(&frame).unwrap();
        let mut back = [0; 7];
        socket.read_exact(&mut back).unwrap();
        assert_eq!(&back[2..], word.to_uppercase().as_bytes());
    }

    let public = keep.ok(["open", "app", "4000", "--public", "--print"]);
    assert!(!public.contains("keep_token"), "{public}");
    assert!(ask(&keep, "localhost", path, "").contains("plain"));
    keep.ok(["ports", "app", "4000", "off"]);
    assert!(ask(&keep, "localhost", path, "").starts_with("HTTP/1.1 404"));
}

/// Answers in capitals to what it received, when it has received all.
const UPPER: &str = "import socket,threading
s=socket.create_server(('127.0.0.1',5432))
def serve(c):
    b=b''
    while True:
        d=c.recv(65536)
        if not d: break
        b+=d
    c.sendall(b.upper()); c.close()
while True: threading.Thread(target=serve,args=(s.accept()[0],)).start()";

#[test]
fn any_port_is_forwarded_until_somebody_ends_it() {
    let Some(keep) = daemon("any_port_is_forwarded", &["python3"]) else { return };
    keep.ok(["create", "db", "--no-start"]);
    keep.ok(["service", "set", "db", "upper", "--port", "5432", "--", "python3", "-c", UPPER]);
    let mut forward = Command::new(KEEP)
        .args(["forward", "db", "5432", "--local", "0", "--data"])
        .arg(keep.data())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut told = String::new();
    BufReader::new(forward.stdout.take().unwrap()).read_line(&mut told).unwrap();
    let at = told.split(' ').next().unwrap().to_owned();

    // Many at once, and each is ended half by half. The first wakes the sandbox.
    let open: Vec<_> = (0..20)
        .map(|n| {
            let at = at.clone();
            std::thread::spawn(move || {
                let mut stream = TcpStream::connect(at).unwrap();
                stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
                let said = format!("row {n} ").repeat(20_000);
                stream.write_all(said.as_bytes()).unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
                let mut heard = String::new();
                stream.read_to_string(&mut heard).unwrap();
                assert_eq!(heard, said.to_uppercase());
            })
        })
        .collect();
    for one in open {
        one.join().unwrap();
    }
    let sessions = keep.json(["sessions", "db"]);
    assert_eq!(sessions.as_array().unwrap().len(), 1);
    let pid = Pid::from_raw(i32::try_from(forward.id()).unwrap()).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    assert_eq!(forward.wait().unwrap().code(), Some(0));
}
