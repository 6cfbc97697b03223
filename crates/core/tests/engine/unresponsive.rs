//! Agents that do not answer: stopped where they stand, hostile, or out of reach for a while.
//!
//! They delay neither the start of the daemon, nor its end, nor any other sandbox, and theirs can always be
//! stopped and deleted. Nothing here is measured against a clock: what must not wait is done while the agent
//! is still being waited for.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sandkeep_core::engine::{Delete, Engine, Error, Exec, Stop, WakeMode};
use sandkeep_core::guest::{Deadlines, GuestError};
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_core::model::{CommandId, CommandState, Hook, Hooks, SandboxId, SnapshotKind, Span};
use sandkeep_proto::frame::{FrameKind, HEADER, Header};
use sandkeep_proto::link::{Reply, VERSION};
use sandkeep_testkit::house;
use sandkeep_testkit::house::{detached, name, ok, printed, project, sh, small, until};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinHandle;

/// Longer than anything here takes that does not wait for an agent.
const LONG: Duration = Duration::from_secs(120);
const SHORT: Deadlines =
    Deadlines { reply: Duration::from_millis(700), progress: Duration::from_secs(2) };

async fn created(engine: &Engine, sandbox: &str) -> SandboxId {
    let made = engine.create(&project(), small(sandbox), None).await.unwrap().sandbox;
    ok(engine, sandbox, "echo kept > /work/file").await;
    made.id
}

/// What must end, ends.
async fn bounded<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(LONG, work).await.unwrap_or_else(|_| panic!("{what} has no end"))
}

async fn shut(engine: Engine) {
    bounded("the shutdown", engine.shutdown()).await;
}

/// A sandbox whose agent hung is ended when it is given up, and has all it wrote.
async fn is_recovered(engine: &Engine, sandbox: &str) {
    bounded("the recovery", engine.recovered()).await;
    let now = engine.get(&project(), &name(sandbox)).await.unwrap().sandbox;
    assert_eq!(now.phase(), Phase::Stopped);
    let snapshot = engine.snapshot(&project(), &now.current.unwrap()).await.unwrap().item;
    assert_eq!(snapshot.kind, SnapshotKind::Recovered);
    assert_eq!(ok(engine, sandbox, "cat /work/file").await, "kept\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_agent_delays_neither_start_nor_end_nor_other_sandboxes() {
    let mut house = house!();
    house.settings.patience = LONG;
    let engine = house.open().await;
    let hung = created(&engine, "hung").await;
    for other in ["one", "two"] {
        created(&engine, other).await;
    }
    let counting = detached(&engine, "one", &["sleep", "1000"]).await;
    engine.stop(&project(), &name("two"), Stop::default(), None).await.unwrap();
    shut(engine).await;
    house.hang_agent(&hung);

    let engine = house.open_when_free_early().await;
    let listed = engine.get(&project(), &name("hung")).await.unwrap().sandbox;
    assert_eq!(listed.phase(), Phase::Running, "its machine is alive");
    for other in ["one", "two"] {
        assert_eq!(ok(&engine, other, "cat /work/file").await, "kept\n");
    }
    let record = engine.command(&project(), &name("one"), &counting).await.unwrap();
    assert_eq!(record.state, CommandState::Running);
    engine.signal(&project(), &name("one"), &counting, 9).await.unwrap();
    created(&engine, "three").await;
    engine.delete(&project(), &name("two"), Delete::default(), None).await.unwrap();
    assert!(engine.recovering() > 0, "the stopped agent is still being waited for");
    shut(engine).await;

    house.settings.patience = Duration::from_secs(1);
    let engine = house.open_when_free().await;
    is_recovered(&engine, "hung").await;
    engine.delete(&project(), &name("hung"), Delete::default(), None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_wants_a_sandbox_that_is_being_recovered_waits_for_it_or_is_told() {
    let mut house = house!();
    let engine = house.open().await;
    let hung = created(&engine, "hung").await;
    let sleeping = detached(&engine, "hung", &["sleep", "1000"]).await;
    shut(engine).await;
    house.hang_agent(&hung);

    house.settings.patience = LONG;
    house.settings.recovery = Duration::from_millis(300);
    let engine = house.open_when_free_early().await;
    let exec = || Exec { argv: vec!["true".to_owned()], ..Exec::default() };
    let told = engine.exec(&project(), &name("hung"), exec()).await.err();
    assert!(matches!(told, Some(Error::Recovering)), "{told:?}");
    let told = engine.stop(&project(), &name("hung"), Stop::default(), None).await.err();
    assert!(matches!(told, Some(Error::Recovering)), "{told:?}");
    // Its session is not over, and no caller gets such an answer.
    let if_running = Exec { wake: WakeMode::IfRunning, ..exec() };
    let told = engine.exec(&project(), &name("hung"), if_running).await.err();
    assert!(matches!(told, Some(Error::Recovering)), "{told:?}");
    let told = engine.wait(&project(), &name("hung"), &sleeping).await.err();
    assert!(matches!(told, Some(Error::Recovering)), "{told:?}");
    // An agent that answers late is adopted all the same.
    house.wake_agent(&hung);
    bounded("the recovery", engine.recovered()).await;
    let now = engine.get(&project(), &name("hung")).await.unwrap().sandbox;
    assert_eq!(now.phase(), Phase::Running);
    let record = engine.command(&project(), &name("hung"), &sleeping).await.unwrap();
    assert_eq!(record.state, CommandState::Running);
    assert_eq!(ok(&engine, "hung", "cat /work/file").await, "kept\n");
}

fn frame(stream: u32, kind: FrameKind, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Header { length: payload.len(), stream, kind }.encode().to_vec();
    bytes.extend_from_slice(payload);
    bytes
}

/// Takes the place of a sandbox's agent: greets, and says nothing more.
fn impostor(socket: &Path) -> JoinHandle<()> {
    std::fs::remove_file(socket).unwrap();
    let listener = UnixListener::bind(socket).unwrap();
    tokio::spawn(async move {
        let mut held = Vec::new();
        while let Ok((mut daemon, _)) = listener.accept().await {
            let mut header = [0; HEADER];
            if daemon.read_exact(&mut header).await.is_err() {
                continue;
            }
            let length = Header::decode(&header).unwrap().length;
            daemon.read_exact(&mut vec![0; length]).await.unwrap();
            let hello = Reply::Hello { version: VERSION, generation: "g".to_owned() };
            let hello = serde_json::to_vec(&hello).unwrap();
            let _ = daemon.write_all(&frame(1, FrameKind::Reply, &hello)).await;
            held.push(daemon);
        }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_greets_and_says_nothing_more_delays_nobody() {
    let mut house = house!();
    house.settings.guest = Deadlines { reply: LONG, ..SHORT };
    let engine = house.open().await;
    let hostile = created(&engine, "hostile").await;
    created(&engine, "other").await;
    shut(engine).await;
    let agent = impostor(&house.agent_socket(&hostile));

    let engine = house.open_when_free_early().await;
    assert_eq!(ok(&engine, "other", "cat /work/file").await, "kept\n");
    assert!(engine.recovering() > 0, "its commands are still being waited for");
    shut(engine).await;

    house.settings.guest = SHORT;
    let engine = house.open_when_free().await;
    is_recovered(&engine, "hostile").await;
    agent.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_whose_agent_hangs_can_be_stopped_and_deleted() {
    let mut house = house!();
    house.settings.guest = SHORT;
    let engine = house.open().await;
    let hook = Hook { argv: vec!["true".to_owned()], timeout: Some(Span::seconds(1)) };
    let hooks = Hooks { validate: Some(hook), ..Hooks::default() };
    let mut request = small("app");
    request.patch.hooks = Some(hooks);
    let id = engine.create(&project(), request, None).await.unwrap().sandbox.id;
    ok(&engine, "app", "echo kept > /work/file").await;
    house.hang_agent(&id);
    let (project, app) = (project(), name("app"));
    let stop = engine.stop(&project, &app, Stop::default(), None);
    let stopped = bounded("the stop", stop).await.unwrap();
    assert_eq!(stopped.sandbox.phase(), Phase::Stopped);
    assert_eq!(ok(&engine, "app", "cat /work/file").await, "kept\n");
    house.hang_agent(&id);
    let files = engine.files(&project, &app, WakeMode::Wake).await.unwrap();
    let read = bounded("a read", files.read("/work/file", 0, None)).await;
    assert!(matches!(read, Err(GuestError::Timeout)), "{read:?}");
    drop(files);
    let delete = engine.delete(&project, &app, Delete::default(), None);
    bounded("the delete", delete).await.unwrap();
}

async fn record_of_only(engine: &Engine, sandbox: &str) -> (CommandId, CommandState, Option<i32>) {
    let page = sandkeep_core::db::Page::all();
    let newest = engine.commands(&project(), &name(sandbox), &page).await.unwrap().items.remove(0);
    (newest.id, newest.state, newest.exit_code)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_whose_start_was_not_answered_is_found_again() {
    let mut house = house!();
    house.settings.guest = SHORT;
    let engine = house.open().await;
    let id = created(&engine, "app").await;
    house.hang_agent(&id);
    let line = "echo late > /work/late";
    let exec = Exec { argv: ["sh", "-c", line].map(str::to_owned).to_vec(), ..Exec::default() };
    let outcome = bounded("the start", engine.exec(&project(), &name("app"), exec)).await;
    assert!(matches!(outcome, Err(Error::Guest(GuestError::Timeout))), "{outcome:?}");
    let (command, state, _) = record_of_only(&engine, "app").await;
    assert_eq!(state, CommandState::Running, "nobody knows better");
    house.wake_agent(&id);
    until("its end", async || {
        let record = engine.command(&project(), &name("app"), &command).await.unwrap();
        (record.state != CommandState::Running).then_some(record)
    })
    .await;
    // It was requested before any caller gave up, and so it ran.
    let record = engine.command(&project(), &name("app"), &command).await.unwrap();
    assert_eq!((record.state, record.exit_code), (CommandState::Exited, Some(0)));
    assert_eq!(ok(&engine, "app", "cat /work/late").await, "late\n");
}

/// Stands between a daemon and an agent, and can be taken away.
struct Between {
    socket: PathBuf,
    real: PathBuf,
    tasks: Arc<std::sync::Mutex<Vec<JoinHandle<()>>>>,
    listening: Option<JoinHandle<()>>,
}

impl Between {
    fn new(socket: PathBuf) -> Self {
        let real = socket.with_file_name("agent.real");
        std::fs::rename(&socket, &real).unwrap();
        let mut between = Self { socket, real, tasks: Arc::default(), listening: None };
        between.connect();
        between
    }

    fn connect(&mut self) {
        let listener = UnixListener::bind(&self.socket).unwrap();
        let (real, tasks) = (self.real.clone(), Arc::clone(&self.tasks));
        self.listening = Some(tokio::spawn(async move {
            while let Ok((mut daemon, _)) = listener.accept().await {
                let mut agent = UnixStream::connect(&real).await.unwrap();
                let task = tokio::spawn(async move {
                    let _ = tokio::io::copy_bidirectional(&mut daemon, &mut agent).await;
                });
                tasks.lock().unwrap().push(task);
            }
        }));
    }

    fn cut(&mut self) {
        std::fs::remove_file(&self.socket).unwrap();
        self.listening.take().unwrap().abort();
        self.tasks.lock().unwrap().drain(..).for_each(|task| task.abort());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_is_not_lost_with_the_connection() {
    let house = house!();
    let engine = house.open().await;
    let id = created(&engine, "app").await;
    shut(engine).await;
    let mut between = Between::new(house.agent_socket(&id));
    let engine = house.open_when_free().await;
    let line = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.1; done";
    let command = detached(&engine, "app", &["sh", "-c", line]).await;
    let lines = async |engine: &Engine| printed(engine, "app", &command).await.len();
    until("its first lines", async || (lines(&engine).await > 10).then_some(())).await;
    between.cut();
    // Several attempts to connect again fail.
    tokio::time::sleep(Duration::from_secs(5)).await;
    let record = engine.command(&project(), &name("app"), &command).await.unwrap();
    assert_eq!(record.state, CommandState::Running, "it lives, and nobody can say otherwise");
    let before = lines(&engine).await;
    between.connect();
    until("more lines", async || (lines(&engine).await > before + 50).then_some(())).await;
    engine.signal(&project(), &name("app"), &command, 15).await.unwrap();
    let ended = bounded("its end", engine.wait(&project(), &name("app"), &command)).await.unwrap();
    assert_eq!(ended.state, CommandState::Exited);
    let log = String::from_utf8(printed(&engine, "app", &command).await).unwrap();
    let expected: String = (1..=log.lines().count()).map(|line| format!("{line}\n")).collect();
    assert_eq!(log, expected, "nothing lost, nothing doubled");
    assert!(sh(&engine, "app", "true").await.command.exit_code == Some(0));
}
