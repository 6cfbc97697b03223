//! Peers that break the rules, on both sides.

use std::time::Duration;

use bytes::Bytes;
use proptest::prelude::{any, prop};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use sandkeep_core::guest::{Deadlines, Guest, GuestError};
use sandkeep_proto::frame::{FrameKind, HEADER, Header, MAX_PAYLOAD, WINDOW};
use sandkeep_proto::link::{
    Assemble, Done, Entry, EntryKind, Exit, Hidden, Identity, Moment, Renew, Reply, TermSize,
    VERSION,
};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

use crate::guest::machine::{Machine, PATIENCE, at, run, shell, spawn};

fn frame(stream: u32, kind: FrameKind, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Header { length: payload.len(), stream, kind }.encode().to_vec();
    bytes.extend_from_slice(payload);
    bytes
}

fn reply(stream: u32, reply: &Reply) -> Vec<u8> {
    frame(stream, FrameKind::Reply, &serde_json::to_vec(reply).expect("plain"))
}

fn done(stream: u32, done: &Done) -> Vec<u8> {
    frame(stream, FrameKind::Done, &serde_json::to_vec(done).expect("plain"))
}

/// Reads one frame.
async fn take(socket: &mut UnixStream) -> Option<(Header, Vec<u8>)> {
    let mut header = [0; HEADER];
    socket.read_exact(&mut header).await.ok()?;
    let header = Header::decode(&header).expect("our own side keeps the rules");
    let mut payload = vec![0; header.length];
    socket.read_exact(&mut payload).await.ok()?;
    Some((header, payload))
}

/// An agent that greets well, then sends `lies` when the next request comes, and listens on.
struct Liar {
    dir: TempDir,
}

impl Liar {
    fn start(greeting: Vec<u8>, lies: Vec<u8>) -> Self {
        let dir = TempDir::new().expect("a temporary directory");
        let listener = UnixListener::bind(dir.path().join("link")).expect("our own directory");
        tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                let _hello = take(&mut socket).await;
                let _ = socket.write_all(&greeting).await;
                let _request = take(&mut socket).await;
                let _ = socket.write_all(&lies).await;
                while take(&mut socket).await.is_some() {}
            }
        });
        Self { dir }
    }

    /// One that greets and then does not even read.
    fn deaf() -> Self {
        let dir = TempDir::new().expect("a temporary directory");
        let listener = UnixListener::bind(dir.path().join("link")).expect("our own directory");
        tokio::spawn(async move {
            let mut held = Vec::new();
            while let Ok((mut socket, _)) = listener.accept().await {
                let _hello = take(&mut socket).await;
                let _ = socket.write_all(&hello()).await;
                held.push(socket);
            }
        });
        Self { dir }
    }

    async fn connect(&self) -> Result<Guest, GuestError> {
        Guest::connect(&self.dir.path().join("link"), Duration::from_secs(2)).await
    }
}

fn hello() -> Vec<u8> {
    reply(1, &Reply::Hello { version: VERSION, generation: "g".to_owned() })
}

fn spawned() -> Vec<u8> {
    reply(2, &Reply::Spawned { pid: 7, stdin_taken: 0, stdin_written: 0 })
}

#[tokio::test]
async fn an_agent_that_breaks_a_rule_loses_the_connection() {
    let data = |bytes: usize| frame(2, FrameKind::Data, &vec![0; bytes]);
    let exited = done(2, &Done::Exited(Exit::with_code(0)));
    let mut long = frame(2, FrameKind::Data, &[]);
    long[..4].copy_from_slice(&u32::try_from(MAX_PAYLOAD + 1).expect("small").to_le_bytes());
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("garbage", vec![0xab; 500]),
        ("an oversize frame", long),
        ("a stream nobody opened", frame(99, FrameKind::Data, b"x")),
        ("the link itself", frame(0, FrameKind::Data, b"x")),
        ("data before the answer", data(1)),
        ("an answer that is none", frame(2, FrameKind::Reply, b"{\"reply\":\"maybe\"}")),
        ("two answers", [spawned(), spawned()].concat()),
        ("a request", [spawned(), frame(2, FrameKind::Open, b"{}")].concat()),
        ("data without credit", [spawned(), data(WINDOW), data(1)].concat()),
        ("data after the end", [spawned(), frame(2, FrameKind::End, b""), data(1)].concat()),
        ("data after the outcome", [spawned(), exited.clone(), data(1)].concat()),
        ("two outcomes", [spawned(), exited.clone(), exited].concat()),
        ("half a credit", [spawned(), frame(2, FrameKind::Credit, b"x")].concat()),
        ("an outcome that is none", [spawned(), frame(2, FrameKind::Done, b"[]")].concat()),
    ];
    for (case, lies) in cases {
        let liar = Liar::start(hello(), lies);
        let guest = liar.connect().await.expect(case);
        let process = guest.spawn(spawn("a", &["x"])).await;
        tokio::time::timeout(PATIENCE, guest.lost()).await.expect(case);
        let error = guest.commands().await.expect_err(case);
        assert!(matches!(error, GuestError::Protocol { .. }), "{case}: {error:?}");
        drop(process);
    }
}

#[tokio::test]
async fn an_agent_that_says_the_wrong_thing_is_not_believed() {
    let cases =
        [reply(2, &Reply::Ok), [spawned(), done(2, &Done::Moved { bytes: 1, files: 1 })].concat()];
    for lies in cases {
        let guest_end = Liar::start(hello(), lies);
        let guest = guest_end.connect().await.expect("it greets");
        let outcome = match guest.spawn(spawn("a", &["x"])).await {
            Ok(mut process) => process.output.next().await.map(drop),
            Err(error) => Err(error),
        };
        assert!(matches!(outcome, Err(GuestError::Protocol { .. })), "{outcome:?}");
    }
}

#[tokio::test]
async fn an_agent_of_another_version_is_named() {
    let other = reply(1, &Reply::Hello { version: 77, generation: "g".to_owned() });
    let error = Liar::start(other, vec![]).connect().await.expect_err("it is another version");
    assert!(matches!(error, GuestError::Version { theirs: 77, .. }), "{error:?}");
    let error = Liar::start(reply(1, &Reply::Ok), vec![]).connect().await.expect_err("no greeting");
    assert!(matches!(error, GuestError::Protocol { .. }), "{error:?}");
    let error = Liar::start(vec![], vec![]).connect().await.expect_err("silence");
    assert!(matches!(error, GuestError::Timeout), "{error:?}");
    let nowhere = TempDir::new().expect("a temporary directory");
    let missing = nowhere.path().join("link");
    let error = Guest::connect(&missing, Duration::from_millis(20)).await.expect_err("nobody");
    assert!(matches!(error, GuestError::Timeout), "{error:?}");
}

#[tokio::test]
async fn an_agent_that_gives_no_credit_is_sent_a_window_and_no_more() {
    let liar = Liar::start(hello(), reply(2, &Reply::Ok));
    let guest = liar.connect().await.expect("it greets");
    let write = guest.write_file(at(std::path::Path::new("/x")), None, false, false);
    let mut outgoing = write.await.expect("it says so");
    let flood = outgoing.send(Bytes::from(vec![0; 4 * WINDOW]));
    let held = tokio::time::timeout(Duration::from_millis(100), flood).await;
    assert!(held.is_err(), "it waits for credit that never comes");
    assert!(!guest.is_lost());
}

/// Short deadlines: what they bound in these tests is silence.
const SHORT: Deadlines =
    Deadlines { reply: Duration::from_millis(100), progress: Duration::from_millis(300) };

/// Fails unless the call ends with a timeout of its own.
async fn times_out<T>(what: &str, call: impl Future<Output = Result<T, GuestError>>) {
    let outcome =
        tokio::time::timeout(PATIENCE, call).await.unwrap_or_else(|_| panic!("{what} waits on"));
    match outcome {
        Err(GuestError::Timeout) => {}
        Err(error) => panic!("{what}: {error:?}"),
        Ok(_) => panic!("{what} was answered"),
    }
}

#[tokio::test]
async fn no_request_waits_for_an_agent_that_says_nothing() {
    let liar = Liar::start(hello(), vec![]);
    let guest = liar.connect().await.expect("it greets").with_deadlines(SHORT);
    let here = || at(std::path::Path::new("/x"));
    let size = TermSize { cols: 80, rows: 24 };
    let moment = || Moment { unix_ns: 0, entropy: Hidden::new("") };
    let identity = || Identity { hostname: "x".to_owned(), mac: [2, 0, 0, 0, 0, 1] };
    let assemble = Assemble {
        lower: 1,
        mounts: vec![],
        identity: identity(),
        now: moment(),
        file_size: 1,
        pids: 1,
        rescue: false,
    };
    let renew = Renew { now: moment(), identity: None, machine_id: false };
    times_out("spawn", guest.spawn(spawn("a", &["x"]))).await;
    times_out("attach", guest.attach("a", 0, 0)).await;
    times_out("commands", guest.commands()).await;
    times_out("forget", guest.forget("a")).await;
    times_out("signal", guest.signal("a", 9)).await;
    times_out("resize", guest.resize("a", size)).await;
    times_out("quiesce", guest.quiesce(Duration::from_millis(10))).await;
    times_out("read_file", guest.read_file(here(), 0, None)).await;
    times_out("write_file", guest.write_file(here(), None, false, false)).await;
    times_out("make_dir", guest.make_dir(here(), None, false)).await;
    times_out("list_dir", guest.list_dir(here(), None)).await;
    times_out("stat", guest.stat(here())).await;
    times_out("rename", guest.rename(here(), "/y".to_owned())).await;
    times_out("remove", guest.remove(here(), true, false)).await;
    times_out("tar_in", guest.tar_in(here(), false)).await;
    times_out("tar_out", guest.tar_out(here())).await;
    times_out("assemble", guest.assemble(assemble)).await;
    times_out("renew", guest.renew(renew)).await;
    times_out("freeze", guest.freeze()).await;
    times_out("thaw", guest.thaw()).await;
    times_out("export", guest.export(0)).await;
    times_out("connect_port", guest.connect_port(80)).await;
    assert!(!guest.is_lost(), "a timeout costs the call, not the connection");
}

#[tokio::test]
async fn no_request_waits_for_an_agent_that_reads_nothing() {
    let liar = Liar::deaf();
    let guest = liar.connect().await.expect("it greets").with_deadlines(SHORT);
    // Until neither the socket nor our own queue takes any more.
    let long = "x".repeat(MAX_PAYLOAD / 2);
    for _ in 0..24 {
        times_out("spawn", guest.spawn(spawn("a", &["echo", &long]))).await;
    }
}

fn entry() -> Vec<u8> {
    let entry = Entry {
        name: "x".to_owned(),
        raw_name: None,
        kind: EntryKind::File,
        size: 0,
        mode: 0o644,
        uid: 0,
        gid: 0,
        modified_ms: 0,
        target: None,
    };
    reply(2, &Reply::Stat { entry })
}

#[tokio::test]
async fn a_transfer_that_stands_still_ends() {
    let here = || at(std::path::Path::new("/x"));
    let liar = Liar::start(hello(), [entry(), frame(2, FrameKind::Data, b"abc")].concat());
    let guest = liar.connect().await.expect("it greets").with_deadlines(SHORT);
    let (_, mut file) = guest.read_file(here(), 0, None).await.expect("it is there");
    assert_eq!(file.next().await.expect("some bytes").as_deref(), Some(&b"abc"[..]));
    times_out("read", file.next()).await;

    let liar = Liar::start(hello(), reply(2, &Reply::Ok));
    let guest = liar.connect().await.expect("it greets").with_deadlines(SHORT);
    let mut write = guest.write_file(here(), None, false, false).await.expect("it says so");
    times_out("send", write.send(Bytes::from(vec![0; 2 * WINDOW]))).await;
    times_out("finish", write.finish()).await;
    assert!(!guest.is_lost());
}

#[tokio::test]
async fn a_slow_transfer_has_all_the_time_it_takes() {
    let dir = TempDir::new().expect("a temporary directory");
    let link = dir.path().join("link");
    let listener = UnixListener::bind(&link).expect("our own directory");
    tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.expect("a daemon");
        take(&mut socket).await.expect("a greeting");
        socket.write_all(&hello()).await.expect("it listens");
        take(&mut socket).await.expect("a request");
        socket.write_all(&entry()).await.expect("it listens");
        for _ in 0..8 {
            tokio::time::sleep(SHORT.progress / 3).await;
            socket.write_all(&frame(2, FrameKind::Data, b"x")).await.expect("it listens");
        }
        let moved = done(2, &Done::Moved { bytes: 8, files: 1 });
        socket.write_all(&moved).await.expect("it listens");
        while take(&mut socket).await.is_some() {}
    });
    let guest = Guest::connect(&link, PATIENCE).await.expect("it greets").with_deadlines(SHORT);
    let here = at(std::path::Path::new("/x"));
    let (_, mut file) = guest.read_file(here, 0, None).await.expect("it is there");
    let (mut bytes, mut pieces) = (0, 0);
    while let Some(more) = file.next().await.expect("it goes on") {
        bytes += more.len();
        pieces += 1;
        if pieces == 1 {
            // A reader may be as slow as it likes.
            tokio::time::sleep(2 * SHORT.progress).await;
        }
    }
    assert_eq!(bytes, 8);
}

#[tokio::test]
async fn any_bytes_from_an_agent_are_survived() {
    let mut runner = TestRunner::deterministic();
    // Frames that are nearly right find more than noise does.
    let piece = prop::collection::vec(
        (0..4_u32, 0..10_u8, prop::collection::vec(any::<u8>(), 0..40)),
        0..20,
    );
    for _ in 0..200 {
        let pieces = piece.new_tree(&mut runner).expect("a value").current();
        let mut lies = Vec::new();
        for (stream, kind, payload) in pieces {
            let mut bytes = frame(stream, FrameKind::Data, &payload);
            bytes[8] = kind;
            lies.extend(bytes);
        }
        lies.extend([0xff; HEADER]);
        let liar = Liar::start(hello(), lies);
        let guest = liar.connect().await.expect("it greets");
        let answer = tokio::time::timeout(PATIENCE, guest.spawn(spawn("a", &["x"]))).await;
        drop(answer.expect("an answer of some kind"));
        tokio::time::timeout(PATIENCE, guest.lost()).await.expect("the last frame is none");
    }
}

#[tokio::test]
async fn any_bytes_from_a_daemon_are_survived() {
    let machine = Machine::start();
    let good = machine.connect().await;
    let mut runner = TestRunner::deterministic();
    let piece = prop::collection::vec(
        (0..4_u32, 0..10_u8, prop::collection::vec(any::<u8>(), 0..40)),
        0..20,
    );
    for round in 0..200 {
        let pieces = piece.new_tree(&mut runner).expect("a value").current();
        let mut socket = UnixStream::connect(machine.link()).await.expect("it listens");
        if round % 2 == 0 {
            let greeting = format!("{{\"op\":\"hello\",\"version\":{VERSION}}}");
            socket
                .write_all(&frame(1, FrameKind::Open, greeting.as_bytes()))
                .await
                .expect("it reads");
        }
        for (stream, kind, payload) in pieces {
            let mut bytes = frame(stream, FrameKind::Data, &payload);
            bytes[8] = kind;
            // It may have hung up on us already, and rightly.
            let _ = socket.write_all(&bytes).await;
        }
        let _ = socket.write_all(&[0xff; HEADER]).await;
        let mut rest = Vec::new();
        let _ = tokio::time::timeout(PATIENCE, socket.read_to_end(&mut rest))
            .await
            .expect("it hangs up");
    }
    drop(good);
    let guest = machine.connect().await;
    assert_eq!(run(&guest, shell("a", "echo well")).await.text(), "well\n");
}

/// A daemon's socket, greeted by hand.
async fn raw(machine: &Machine) -> UnixStream {
    drop(machine.connect().await);
    let mut socket = UnixStream::connect(machine.link()).await.expect("it listens");
    let greeting = format!("{{\"op\":\"hello\",\"version\":{VERSION}}}");
    socket.write_all(&frame(1, FrameKind::Open, greeting.as_bytes())).await.expect("it reads");
    take(&mut socket).await.expect("it answers");
    socket
}

#[tokio::test]
async fn the_agent_holds_a_daemon_to_its_window() {
    let machine = Machine::start();
    let mut socket = raw(&machine).await;
    let cat = "{\"op\":\"spawn\",\"command\":\"a\",\"argv\":[\"sleep\",\"1000\"],\"env\":{},\"stdin\":true}";
    socket.write_all(&frame(2, FrameKind::Open, cat.as_bytes())).await.expect("it reads");
    let (header, payload) = take(&mut socket).await.expect("it answers");
    assert_eq!(header.kind, FrameKind::Reply, "{}", String::from_utf8_lossy(&payload));
    for _ in 0..8 {
        let _ = socket.write_all(&frame(2, FrameKind::Data, &vec![0; WINDOW / 2])).await;
    }
    let closed = async { while take(&mut socket).await.is_some() {} };
    tokio::time::timeout(PATIENCE, closed).await.expect("the connection is closed");
    let guest = machine.connect().await;
    assert_eq!(guest.commands().await.expect("a list").len(), 1, "the command lives on");
}

#[tokio::test]
async fn unreadable_requests_are_answered() {
    let machine = Machine::start();
    let mut socket = raw(&machine).await;
    let requests = ["", "{}", "{\"op\":\"dance\"}", "{\"op\":\"stat\",\"x\":1}", "[1,2"];
    for (stream, request) in (2..).zip(requests) {
        socket
            .write_all(&frame(stream, FrameKind::Open, request.as_bytes()))
            .await
            .expect("it reads");
        let (header, payload) = take(&mut socket).await.expect("it answers");
        assert_eq!((header.stream, header.kind), (stream, FrameKind::Reply));
        let reply: Reply = serde_json::from_slice(&payload).expect("an answer");
        assert!(matches!(reply, Reply::Error { .. }), "{request}: {reply:?}");
    }
}

#[tokio::test]
async fn a_request_too_long_for_a_frame_is_refused_here() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let long = "x".repeat(MAX_PAYLOAD);
    let error = guest.spawn(spawn("a", &["echo", &long])).await.expect_err("too long");
    assert!(matches!(error, GuestError::Refused { .. }), "{error:?}");
    assert!(!guest.is_lost());
}

#[tokio::test]
async fn too_many_streams_are_refused_one_by_one() {
    let machine = Machine::start();
    let guest = machine.connect().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("it has one").port();
    tokio::spawn(async move {
        let mut held = Vec::new();
        while let Ok((socket, _)) = listener.accept().await {
            held.push(socket);
        }
    });
    let mut open = Vec::new();
    let refused = loop {
        match guest.connect_port(port).await {
            Ok(streams) => open.push(streams),
            Err(error) => break error,
        }
        assert!(open.len() <= 1024, "there is an end");
    };
    assert!(matches!(refused, GuestError::Refused { .. }), "{refused:?}");
    assert!(!guest.is_lost());
    drop(open);
    guest.connect_port(port).await.expect("there is room again");
}
