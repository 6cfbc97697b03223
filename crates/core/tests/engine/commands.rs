//! Commands in one session and no other, and their input.

use std::time::Duration;

use bytes::Bytes;
use sandkeep_core::db::Page;
use sandkeep_core::engine::{
    CommandOutput, Engine, Error, Exec, OutputStream, Started, Stop, WakeMode,
};
use sandkeep_core::model::{Command, CommandId, CommandState, SessionId, Size, Span};
use sandkeep_testkit::house;
use sandkeep_testkit::house::{House, name, project, sh, small};
use tokio::runtime::Runtime;

fn shell(line: &str) -> Exec {
    Exec { argv: ["sh", "-c", line].map(str::to_owned).to_vec(), ..Exec::default() }
}

async fn start(engine: &Engine, exec: Exec) -> Result<Started, Error> {
    engine.exec(&project(), &name("app"), exec).await
}

/// All it prints to standard output, and its exit code.
async fn heard(mut started: Started) -> (String, Option<i32>) {
    let mut out = Vec::new();
    while let Some(event) = started.events.next().await {
        match event {
            CommandOutput::Stdout(bytes) => out.extend_from_slice(&bytes),
            CommandOutput::Stderr(_) => {}
            CommandOutput::Gap(bytes) => panic!("{bytes} bytes are missing"),
            CommandOutput::Exited(command) => {
                return (String::from_utf8_lossy(&out).into_owned(), command.exit_code);
            }
        }
    }
    panic!("a command whose end was not told");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_is_asked_for_and_no_other_will_do() {
    let house = house!();
    let engine = house.open().await;
    let opened = engine.create(&project(), small("app"), None).await.unwrap();
    let first = opened.session.unwrap().id;
    let inside = |id: &SessionId| WakeMode::Session(id.clone());
    let ran = start(&engine, Exec { wake: inside(&first), ..shell("echo hi") }).await.unwrap();
    let id = ran.command.id.clone();
    assert_eq!(heard(ran).await, ("hi\n".to_owned(), Some(0)));
    engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();

    let ended = |error: Error| match error {
        Error::SessionEnded { session } => assert_eq!(session, first),
        other => panic!("{other:?}"),
    };
    ended(start(&engine, Exec { wake: inside(&first), ..shell("true") }).await.unwrap_err());
    ended(engine.files(&project(), &name("app"), inside(&first)).await.unwrap_err());
    let again = engine.start(&project(), &name("app"), None).await.unwrap();
    let second = again.session.unwrap().id;
    ended(start(&engine, Exec { wake: inside(&first), ..shell("true") }).await.unwrap_err());
    ended(engine.connect_port(&project(), &name("app"), 1, inside(&first)).await.unwrap_err());
    sh(&engine, "app", "true").await;

    // What ran is on record with its session, and its log stays.
    let listed = engine.session_commands(&project(), &first, &Page::all()).await.unwrap().items;
    assert_eq!(listed.iter().map(|command| &command.id).collect::<Vec<_>>(), [&id]);
    assert_eq!((listed[0].exit_code, listed[0].state), (Some(0), CommandState::Exited));
    assert_eq!(
        engine.session_commands(&project(), &second, &Page::all()).await.unwrap().items.len(),
        1
    );
    let mut log = engine.logs(&project(), &name("app"), &id, true).await.unwrap();
    assert_eq!(log.next().await, Some(CommandOutput::Stdout(Bytes::from_static(b"hi\n"))));
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_comes_while_a_session_ends_is_told_so() {
    let house = house!();
    let engine = house.open().await;
    let opened = engine.create(&project(), small("app"), None).await.unwrap();
    let wake = WakeMode::Session(opened.session.unwrap().id);
    // It takes its time to end: it is asked politely for two seconds.
    let slow = shell("trap '' TERM; echo up; while :; do sleep 0.1; done");
    let mut running = start(&engine, Exec { detach: true, ..slow }).await.unwrap();
    assert!(matches!(running.events.next().await, Some(CommandOutput::Stdout(_))));
    let stopping = tokio::spawn({
        let engine = engine.clone();
        async move { engine.stop(&project(), &name("app"), Stop::default(), None).await }
    });
    let mut outcomes = Vec::new();
    while !stopping.is_finished() {
        match start(&engine, Exec { wake: wake.clone(), ..shell("true") }).await {
            Ok(_) => outcomes.push("ran"),
            Err(Error::SessionEnded { .. }) => outcomes.push("ended"),
            Err(error) => panic!("{error:?}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    stopping.await.unwrap().unwrap();
    outcomes.dedup();
    assert!(outcomes == ["ended"] || outcomes == ["ran", "ended"], "{outcomes:?}");
}

/// How long a test waits where it must see that nothing happens.
const SHORT: Duration = Duration::from_millis(200);

async fn to_one_that_does_not_read(house: &House, bytes: &Bytes) -> CommandId {
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let line = "while [ ! -e /work/go ]; do sleep 0.02; done; cat | wc -c";
    let reader = Exec { detach: true, stdin: true, ..shell(line) };
    let started = start(&engine, reader).await.unwrap();
    let stdin = started.stdin.unwrap();
    assert_eq!(stdin.written().await.unwrap(), 0);
    let gap = stdin.send_at(Some(7), Bytes::from_static(b"late"), SHORT).await.unwrap_err();
    assert!(matches!(gap, Error::StdinGap { taken: 0, offset: 7, .. }), "{gap:?}");
    for _ in 0..3 {
        let slow = stdin.send_at(Some(0), bytes.clone(), SHORT).await.unwrap();
        assert_eq!((slow.written, slow.complete), (64 << 10, false), "what its pipe holds");
        assert_eq!(stdin.written().await.unwrap(), 64 << 10);
    }
    started.command.id
}

async fn to_one_that_reads_again(house: &House, bytes: &Bytes, id: &CommandId) {
    let engine = house.open().await;
    let stdin = engine.stdin(&project(), &name("app"), id).await.unwrap();
    assert_eq!(stdin.written().await.unwrap(), 64 << 10, "as the daemon before knew");
    sh(&engine, "app", "touch /work/go").await;
    let patience = Duration::from_secs(20);
    for _ in 0..2 {
        let all = stdin.send_at(Some(0), bytes.clone(), patience).await.unwrap();
        assert_eq!((all.written, all.complete), (500_000, true));
    }
    stdin.close().await.unwrap();
    stdin.close().await.unwrap();
    let ended = engine.wait(&project(), &name("app"), id).await.unwrap();
    assert_eq!(ended.exit_code, Some(0));
    let mut log = engine.logs(&project(), &name("app"), id, true).await.unwrap();
    assert_eq!(log.next().await, Some(CommandOutput::Stdout(Bytes::from_static(b"500000\n"))));
    let late = stdin.send_at(None, Bytes::from_static(b"x"), SHORT).await.unwrap_err();
    assert!(matches!(late, Error::CommandEnded(_)), "{late:?}");
}

/// With a runtime for each of two daemons: the first goes down in the middle, with all its tasks.
#[test]
fn input_is_taken_once_however_often_it_is_sent() {
    let house = house!();
    let bytes = Bytes::from(vec![b'x'; 500_000]);
    let daemon = Runtime::new().unwrap();
    let id = daemon.block_on(to_one_that_does_not_read(&house, &bytes));
    drop(daemon);
    Runtime::new().unwrap().block_on(to_one_that_reads_again(&house, &bytes, &id));
}

#[tokio::test(flavor = "multi_thread")]
async fn input_nobody_reads_is_refused() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let deaf = shell("exec <&-; echo closed; while [ ! -e /work/go ]; do sleep 0.02; done");
    let mut started = start(&engine, Exec { stdin: true, detach: true, ..deaf }).await.unwrap();
    assert!(matches!(started.events.next().await, Some(CommandOutput::Stdout(_))));
    let stdin = started.stdin.unwrap();
    let refused = stdin.send_at(None, Bytes::from_static(b"x"), Duration::from_secs(20)).await;
    assert!(matches!(refused, Err(Error::StdinClosed(_))), "{refused:?}");
    assert!(matches!(stdin.written().await, Err(Error::StdinClosed(_))));
    let none = start(&engine, Exec { detach: true, ..shell("sleep 1000") }).await.unwrap();
    let refused = engine.stdin(&project(), &name("app"), &none.command.id).await.unwrap_err();
    assert!(matches!(refused, Error::NoStdin(_)), "{refused:?}");
}

/// Prints more than all that lies between it and a caller who does not read.
const MUCH: &str = "head -c 8000000 /dev/zero; sleep 1000";

/// Waits until a command is on record as ended.
async fn recorded(engine: &Engine, id: &CommandId) -> Command {
    let ended = async {
        loop {
            let command = engine.command(&project(), &name("app"), id).await.unwrap();
            if command.state != CommandState::Running {
                return command;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), ended).await.expect("an end on record")
}

/// All bytes that come, how many of what was printed do not, and how it ended.
async fn all(mut events: OutputStream) -> (u64, Vec<u64>, Command) {
    let (mut bytes, mut gaps) = (0, Vec::new());
    while let Some(event) = events.next().await {
        match event {
            CommandOutput::Stdout(more) | CommandOutput::Stderr(more) => bytes += more.len() as u64,
            CommandOutput::Gap(missing) => gaps.push(missing),
            CommandOutput::Exited(command) => {
                assert_eq!(events.next().await, None, "nothing after the end");
                return (bytes, gaps, command);
            }
        }
    }
    panic!("a command whose end was not told");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timeout_does_not_wait_for_whoever_does_not_read() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let exec = Exec { timeout: Some(Span(1000)), ..shell(MUCH) };
    let started = start(&engine, exec).await.unwrap();
    let ended = recorded(&engine, &started.command.id).await;
    assert_eq!((ended.state, ended.exit_code), (CommandState::Exited, Some(137)));
    let (bytes, gaps, told) = all(started.events).await;
    assert_eq!((bytes, gaps), (ended.output_bytes, Vec::new()), "the rest is in the log");
    assert_eq!(told.exit_code, Some(137));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_ends_whoever_does_not_read() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let started = start(&engine, shell(MUCH)).await.unwrap();
    let id = started.command.id.clone();
    // Until it is stuck: nothing more comes to its log.
    let mut before = 0;
    loop {
        let mut log = engine.logs(&project(), &name("app"), &id, false).await.unwrap();
        let mut bytes = 0;
        while let Some(CommandOutput::Stdout(more)) = log.next().await {
            bytes += more.len();
        }
        if bytes > 0 && bytes == before {
            break;
        }
        before = bytes;
        tokio::time::sleep(SHORT).await;
    }
    engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
    let ended = recorded(&engine, &id).await;
    let (bytes, gaps, _) = all(started.events).await;
    assert_eq!((bytes, gaps), (ended.output_bytes, Vec::new()));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_log_does_not_keep_is_told_where_it_is_missing() {
    let mut house = house!();
    house.settings.log_limit = Size(256 << 10);
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let line = "head -c 3000000 /dev/zero";
    let attached = start(&engine, shell(line)).await.unwrap();
    let (bytes, gaps, _) = all(attached.events).await;
    assert_eq!((bytes, gaps), (3_000_000, Vec::new()), "a caller who is waited for gets it all");
    let started = start(&engine, Exec { detach: true, ..shell(line) }).await.unwrap();
    let id = started.command.id;
    engine.wait(&project(), &name("app"), &id).await.unwrap();
    let log = engine.logs(&project(), &name("app"), &id, true).await.unwrap();
    let (bytes, gaps, command) = all(log).await;
    assert!(bytes <= 256 << 10 && command.truncated, "{bytes} {command:?}");
    assert_eq!(gaps, [3_000_000 - bytes]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_run_is_told_apart() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    sh(&engine, "app", "echo > /work/plain").await;
    let argv = |program: &str| Exec { argv: vec![program.to_owned()], ..Exec::default() };
    for (exec, code) in [
        (argv("no-such"), "executable_not_found"),
        (argv("/no/such"), "executable_not_found"),
        (argv("/work/plain"), "not_executable"),
        (Exec { cwd: Some("/no/such".to_owned()), ..shell("true") }, "cwd_not_found"),
        (Exec { user: Some("no-such".to_owned()), ..shell("true") }, "user_not_found"),
    ] {
        let error = start(&engine, exec.clone()).await.unwrap_err();
        assert_eq!(error.code(), code, "{exec:?}: {error}");
        assert_eq!(error.kind(), sandkeep_core::engine::ErrorKind::Invalid, "{exec:?}");
    }
    let sudo = Exec { sudo: true, user: Some("1234".to_owned()), ..shell("echo $SUDO_UID; id -u") };
    let started = start(&engine, sudo).await.unwrap();
    assert_eq!(started.command.argv, ["sh", "-c", "echo $SUDO_UID; id -u"]);
    assert_eq!(heard(started).await, ("1234\n0\n".to_owned(), Some(0)));
    let late = Exec { timeout: Some(Span(100)), ..shell("sleep 1000") };
    assert_eq!(heard(start(&engine, late).await.unwrap()).await.1, Some(137));
}
