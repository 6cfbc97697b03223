//! Why a command ended: each reason on a real machine, in the record, in the stream and in what `wait` answers.

use std::time::Duration;

use sandkeep_core::db::Page;
use sandkeep_core::engine::{CommandOutput, Delete, Engine, Exec, Stop};
use sandkeep_core::model::{Command, CommandEnd, CommandId, SessionEnd, Size, Span};
use sandkeep_testkit::daemon::skipped;
use sandkeep_testkit::house;
use sandkeep_testkit::house::{House, detached, machine, name, ok, printed, project, small, until};

/// Takes memory until it is killed.
const HOG: &str = "my @all; push @all, 'x' x 1_000_000 while 1;";

/// Runs a command and returns its record from its stream, from `wait` and from the record, which
/// must agree.
async fn ran(engine: &Engine, sandbox: &str, exec: Exec) -> Command {
    let mut started =
        engine.exec(&project(), &name(sandbox), exec).await.expect("the command starts");
    let mut told = None;
    while let Some(event) = started.events.next().await {
        if let CommandOutput::Exited(command) = event {
            told = Some(command);
        }
    }
    let told = told.expect("its end is told");
    let waited = waited(engine, sandbox, &told.id).await;
    assert_eq!(how_it_ended(waited), told);
    told
}

/// The record without what the command changed, which is found out after its end is reported.
fn how_it_ended(command: Command) -> Command {
    Command { changes: None, ..command }
}

async fn waited(engine: &Engine, sandbox: &str, id: &CommandId) -> Command {
    let (project, name) = (project(), name(sandbox));
    let wait = engine.wait(&project, &name, id);
    tokio::time::timeout(Duration::from_secs(60), wait).await.expect("in time").expect("a record")
}

fn program(argv: &[&str]) -> Exec {
    Exec { argv: argv.iter().map(|arg| (*arg).to_owned()).collect(), ..Exec::default() }
}

fn shell(line: &str) -> Exec {
    program(&["sh", "-c", line])
}

fn said(command: &Command) -> (Option<CommandEnd>, Option<i32>) {
    (command.end, command.exit_code)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exit_a_signal_a_kill_and_a_timeout_are_told_apart() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.expect("a sandbox");
    let exited = ran(&engine, "app", shell("exit 137")).await;
    assert_eq!(said(&exited), (Some(CommandEnd::Exited), Some(137)));
    let signalled = ran(&engine, "app", shell("kill -9 $$")).await;
    assert_eq!(said(&signalled), (Some(CommandEnd::Signalled), Some(137)));
    let timeout = Exec { timeout: Some(Span(300)), ..shell("sleep 1000") };
    let timed_out = ran(&engine, "app", timeout).await;
    assert_eq!(said(&timed_out), (Some(CommandEnd::TimedOut), Some(137)));
    assert_eq!((timed_out.limit, timed_out.peak), (Some(300), None));
    let id = detached(&engine, "app", &["sleep", "1000"]).await;
    engine.signal(&project(), &name("app"), &id, 9).await.expect("it is sent");
    let killed = waited(&engine, "app", &id).await;
    assert_eq!(said(&killed), (Some(CommandEnd::Killed), Some(137)));
    house.close(engine).await;
    let engine = house.open_when_free().await;
    for command in [exited, signalled, timed_out, killed] {
        let again = engine.command(&project(), &name("app"), &command.id).await.expect("a record");
        assert_eq!(how_it_ended(again), how_it_ended(command), "on disk it is the same");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timeout_that_passed_while_no_daemon_ran_is_a_timeout() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.expect("a sandbox");
    let exec = Exec { timeout: Some(Span(500)), detach: true, ..shell("sleep 1000") };
    let started = engine.exec(&project(), &name("app"), exec).await.expect("it starts");
    house.close(engine).await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    let engine = house.open_when_free().await;
    let command = waited(&engine, "app", &started.command.id).await;
    assert_eq!(
        (said(&command), command.limit),
        ((Some(CommandEnd::TimedOut), Some(137)), Some(500))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn out_of_memory_is_told_with_limit_and_peak() {
    let house = house!();
    let engine = house.open().await;
    let mut create = small("app");
    create.patch.memory = Some(Size(64 << 20));
    engine.create(&project(), create, None).await.expect("a sandbox");
    let killed = ran(&engine, "app", program(&["perl", "-e", HOG])).await;
    assert_eq!(said(&killed), (Some(CommandEnd::OutOfMemory), Some(137)));
    assert_eq!(killed.limit, Some(64 << 20));
    let peak = killed.peak.expect("a peak");
    assert!((32 << 20..=64 << 20).contains(&peak), "{peak}");
    // A shell whose program was killed ends with 137 by itself.
    let waits = ran(&engine, "app", shell(&format!("perl -e \"{HOG}\"; exit $?"))).await;
    assert_eq!(said(&waits), (Some(CommandEnd::OutOfMemory), Some(137)));
    // A kill before it started is not its own.
    let after = ran(&engine, "app", shell("kill -9 $$")).await;
    assert_eq!(said(&after), (Some(CommandEnd::Signalled), Some(137)));
    let stopped = engine.stop(&project(), &name("app"), Stop::default(), None).await;
    let session = stopped.expect("it stops").session.expect("a session");
    assert_eq!(session.end, Some(SessionEnd::Stopped));
    assert!(session.usage.oom_kills >= 2, "{:?}", session.usage);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_the_session_and_of_the_machine_are_told_apart() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.expect("a sandbox");
    let stopped = detached(&engine, "app", &["sleep", "1000"]).await;
    engine.stop(&project(), &name("app"), Stop::default(), None).await.expect("it stops");
    let stopped = waited(&engine, "app", &stopped).await;
    assert_eq!(stopped.end, Some(CommandEnd::SessionEnded), "{stopped:?}");
    engine.start(&project(), &name("app"), None).await.expect("it starts");
    let lost = detached(&engine, "app", &["sleep", "1000"]).await;
    house.kill_agents().await;
    let lost = waited(&engine, "app", &lost).await;
    assert_eq!(said(&lost), (Some(CommandEnd::Lost), None), "{lost:?}");
    let sessions = engine.sessions(&project(), &name("app"), &Page::all()).await;
    let ends: Vec<_> =
        sessions.expect("sessions").items.iter().map(|session| session.end).collect();
    assert!(ends.contains(&Some(SessionEnd::Stopped)), "{ends:?}");
    engine.delete(&project(), &name("app"), Delete::default(), None).await.expect("it goes");
}

/// Where the filesystem holds the limit the write fails; elsewhere those who write are ended, and their commands say so.
#[tokio::test(flavor = "multi_thread")]
async fn out_of_disk_is_told_with_limit_and_use() {
    let house = house!();
    let engine = house.open().await;
    let mut create = small("app");
    create.patch.disk = Some(Size(48 << 20));
    engine.create(&project(), create, None).await.expect("a sandbox");
    // One process: where limits are counted it is those who write that are ended, and not the shell that started them.
    let fill = r#"exec perl -e '$| = 1; sub full { print $!; exit 28 } for $n (1..40) { open(F, ">", "/fill.$n") or full();
        for (1..8) { defined syswrite(F, "x" x (1 << 20)) or full() } select(undef, undef, undef, 0.1) } sleep 60'"#;
    let command = ran(&engine, "app", shell(fill)).await;
    let out = String::from_utf8_lossy(&printed(&engine, "app", &command.id).await).into_owned();
    if command.exit_code == Some(28) {
        assert!(out.contains("No space left") || out.contains("quota exceeded"), "{out}");
        return;
    }
    assert_eq!(said(&command), (Some(CommandEnd::OutOfDisk), Some(137)), "{out}");
    assert_eq!(command.limit, Some(48 << 20));
    assert!(command.peak.is_some_and(|peak| peak > 48 << 20), "{command:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn out_of_memory_inside_a_machine_of_its_own_is_told() {
    let test = "out_of_memory_inside_a_machine_of_its_own_is_told";
    let house = House::new().and_then(House::with_machines);
    let Ok(house) = house.map_err(|why| skipped(test, &why)) else { return };
    let engine = house.open().await;
    engine.create(&project(), machine("m"), None).await.expect("a machine");
    let killed = ran(&engine, "m", program(&["perl", "-e", HOG])).await;
    assert_eq!(said(&killed), (Some(CommandEnd::OutOfMemory), Some(137)));
    assert_eq!((killed.limit, killed.peak), (Some(256 << 20), None));
    let signalled = ran(&engine, "m", shell("kill -9 $$")).await;
    assert_eq!(said(&signalled), (Some(CommandEnd::Signalled), Some(137)));
    assert_eq!(ok(&engine, "m", "echo here").await, "here\n");
    until("the session is over", async || {
        engine.stop(&project(), &name("m"), Stop::default(), None).await.ok()
    })
    .await;
}
