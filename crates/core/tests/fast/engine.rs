//! What happens to sandboxes, on a fake host: no root, no machines, milliseconds.
//!
//! The driver here is stricter than the real ones (`testkit::fake`), and records are in memory unless a
//! test says otherwise, so that nothing of the engine can rely on manifests. What a kernel does is not
//! tested here: the other `engine_*` tests do that.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sandkeep_core::engine::{
    Checkpoint, Clock, Create, Delete, Engine, ErrorKind, Exec, Fork, ForkFrom, HostClock,
    IfExists, Stop,
};
use sandkeep_core::model::{
    CommandState, MachineKey, Patch, Phase, SessionEnd, SnapshotKind, Span, Tags, Timestamp,
};
use sandkeep_testkit::fake::{FakeHouse, Script, machine_of, ok, run, small};
use sandkeep_testkit::house::{name, of, project};

/// The clocks of this host, which can be put forward.
#[derive(Debug, Default)]
pub(super) struct FastClock {
    host: HostClock,
    forward: Mutex<Duration>,
}

impl FastClock {
    pub(super) fn forward(&self, by: Duration) {
        *self.forward.lock().expect("nobody panicked") += by;
    }
}

impl Clock for FastClock {
    fn wall(&self) -> Timestamp {
        self.host.wall() + *self.forward.lock().expect("nobody panicked")
    }

    fn monotonic(&self) -> Duration {
        self.host.monotonic() + *self.forward.lock().expect("nobody panicked")
    }
}

/// Asks until there is an answer.
pub(super) async fn until<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(20) {
        if let Some(answer) = ask().await {
            return answer;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{what} did not come about");
}

async fn phase(engine: &Engine, sandbox: &str) -> Phase {
    engine.get(&project(), &name(sandbox)).await.expect("it is there").sandbox.phase()
}

pub(super) async fn stop(engine: &Engine, sandbox: &str) -> sandkeep_core::engine::Stopped {
    let stopped = engine.stop(&project(), &name(sandbox), Stop::default(), None).await;
    stopped.expect("it stops")
}

fn tagged(value: &str) -> Patch {
    Patch { tags: Some(Tags::from([("is".to_owned(), value.to_owned())])), ..Patch::default() }
}

#[tokio::test]
async fn a_sandbox_is_made_and_found() {
    let house = FakeHouse::new();
    let engine = house.open().await;
    let made = engine.create(&project(), small("app"), None).await.expect("it is made");
    assert!(made.created && made.sandbox.phase() == Phase::Running);
    let found = engine.get(&project(), &name("app")).await.expect("it is there");
    assert_eq!(found.sandbox.id, made.sandbox.id);
    assert_eq!(found.sandbox.revision, made.sandbox.revision);
    assert_eq!(found.sandbox.state(), made.sandbox.state());
    let again = engine.create(&project(), small("app"), None).await.expect_err("it is taken");
    assert_eq!(again.code(), "name_taken");
    let get = sandkeep_core::engine::Create { if_exists: IfExists::Get, ..small("app") };
    let got = engine.create(&project(), get, None).await.expect("it is handed out");
    assert!(!got.created && got.sandbox.id == made.sandbox.id);
    assert_eq!(house.alive(), [machine_of(&made.sandbox.id)]);
    house.end(engine).await;
}

#[tokio::test]
async fn commands_print_and_end_as_they_do() {
    let house = FakeHouse::new();
    let script =
        Script { out: "ok\n".into(), err: "2 warnings\n".into(), code: Some(3), writes: vec![] };
    house.script("npm test", script);
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.expect("it is made");
    let ran = run(&engine, "app", "npm test").await;
    assert_eq!((ran.out.as_str(), ran.err.as_str()), ("ok\n", "2 warnings\n"));
    assert_eq!((ran.command.exit_code, ran.command.state), (Some(3), CommandState::Exited));
    assert_eq!(ok(&engine, "app", "echo a b").await, "a b\n");
    assert_eq!(ok(&engine, "app", "cat /etc/image").await, "small");
    let exec = Exec { argv: vec!["nothing".to_owned()], ..Exec::default() };
    let refused = engine.exec(&project(), &name("app"), exec).await.expect_err("no program");
    assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused:?}");
    house.end(engine).await;
}

#[tokio::test]
async fn every_answer_about_a_session_has_what_it_used_so_far() {
    let house = FakeHouse::new();
    let engine = house.open().await;
    let (project, app) = (project(), name("app"));
    engine.create(&project, small("app"), None).await.expect("it is made");
    ok(&engine, "app", "echo a").await;
    tokio::time::sleep(Duration::from_millis(2)).await;
    let again = Create { if_exists: IfExists::Get, ..small("app") };
    let exec = || Exec { argv: vec!["echo".to_owned()], ..Exec::default() };
    let by = Span(1000);
    let fork = Fork { name: Some(name("fork")), start: true, ..Fork::default() };
    for (what, session) in [
        ("create", engine.create(&project, again, None).await.expect("it exists").session),
        ("start", engine.start(&project, &app, None).await.expect("it runs").session),
        ("resume", engine.resume(&project, &app).await.expect("it runs").session),
        ("exec", Some(engine.exec(&project, &app, exec()).await.expect("it starts").session)),
        ("extend", Some(engine.extend(&project, &app, by, None).await.expect("it runs"))),
        ("fork", engine.fork(&project, &app, fork, None).await.expect("it is made").session),
    ] {
        let usage = session.expect("it runs").usage;
        assert!(usage.active_cpu_ms > 0, "{what}: {usage:?}");
        // A fork has hardly begun.
        assert!(usage.wall_ms > 0 || what == "fork", "{what}: {usage:?}");
        assert!(usage.memory_peak.0 > 0, "{what}: {usage:?}");
    }
    let key = || "once".to_owned();
    for what in ["exec once", "exec once more"] {
        let started = engine.exec_once(&project, &app, key(), exec()).await.expect("it starts");
        assert!(started.session.usage.active_cpu_ms > 0, "{what}");
    }
    house.end(engine).await;
}

#[tokio::test]
async fn a_stop_keeps_what_was_written_and_a_start_goes_on_from_it() {
    for house in [FakeHouse::new(), FakeHouse::on_disk()] {
        let engine = house.open().await;
        engine.create(&project(), small("app"), None).await.expect("it is made");
        ok(&engine, "app", "write /work/a one").await;
        let stopped = stop(&engine, "app").await;
        assert_eq!(stopped.sandbox.phase(), Phase::Stopped);
        let kept = stopped.snapshot.expect("a snapshot");
        assert_eq!((kept.item.kind, kept.item.generation), (SnapshotKind::Stop, 1));
        assert_eq!(house.alive(), []);
        // An exec wakes it.
        assert_eq!(ok(&engine, "app", "cat /work/a").await, "one");
        assert_eq!(phase(&engine, "app").await, Phase::Running);
        let resumed = engine.get(&project(), &name("app")).await.expect("it is there");
        assert_eq!(resumed.session.expect("a session").from, Some(kept.item.id.clone()));
        let again = stop(&engine, "app").await;
        assert_eq!(again.snapshot.expect("the same").item.id, kept.item.id, "nothing was written");
        assert_eq!(house.started(), 2);
        house.end(engine).await;
    }
}

#[tokio::test]
async fn a_fork_starts_where_its_source_is_and_goes_its_own_way() {
    let house = FakeHouse::new();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.expect("it is made");
    ok(&engine, "app", "write /a one").await;
    let fork = Fork { name: Some(name("copy")), start: true, ..Fork::default() };
    let forked = engine.fork(&project(), &name("app"), fork, None).await.expect("it is forked");
    assert_eq!(ok(&engine, "copy", "cat /a").await, "one");
    ok(&engine, "copy", "write /a two").await;
    assert_eq!(ok(&engine, "app", "cat /a").await, "one");
    assert_eq!(forked.sandbox.forked_from.expect("a lineage").sandbox.as_str().len(), 30);
    let kept = Fork { name: Some(name("third")), from: ForkFrom::Kept, ..Fork::default() };
    let third = engine.fork(&project(), &name("app"), kept, None).await.expect("it is forked");
    assert_eq!(third.sandbox.phase(), Phase::Stopped);
    house.end(engine).await;
}

#[tokio::test]
async fn checkpoints_are_taken_of_idle_and_busy_sandboxes_and_rolled_back_to() {
    let house = FakeHouse::new();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.expect("it is made");
    let checkpoint = async || {
        let taken = engine.checkpoint(&project(), &name("app"), Checkpoint::default()).await;
        taken.expect("a checkpoint").item
    };
    ok(&engine, "app", "write /a idle").await;
    let idle = checkpoint().await;
    let exec = Exec { argv: vec!["sleep".to_owned()], detach: true, ..Exec::default() };
    let busy_with = engine.exec(&project(), &name("app"), exec).await.expect("it starts").command;
    ok(&engine, "app", "write /a busy").await;
    let busy = checkpoint().await;
    assert_eq!((idle.generation, busy.generation), (1, 2));
    ok(&engine, "app", "write /a later").await;
    let back = engine.rollback(&project(), &name("app"), &idle.id, Some(2)).await;
    let back = back.expect("it is rolled back");
    assert_eq!(back.before.expect("what it was").kind, SnapshotKind::BeforeRollback);
    assert_eq!(back.sandbox.current, Some(idle.id.clone()));
    assert_eq!(ok(&engine, "app", "cat /a").await, "idle");
    let ended = engine.command(&project(), &name("app"), &busy_with.id).await.expect("its record");
    assert_ne!(ended.state, CommandState::Running);
    engine.rollback(&project(), &name("app"), &busy.id, None).await.expect("and forward");
    assert_eq!(ok(&engine, "app", "cat /a").await, "busy");
    let stale = engine.rollback(&project(), &name("app"), &idle.id, Some(1)).await;
    assert_eq!(stale.expect_err("another generation").code(), "generation_mismatch");
    house.end(engine).await;
}

#[tokio::test]
async fn what_was_deleted_can_be_restored_from_the_trash() {
    for house in [FakeHouse::new(), FakeHouse::on_disk()] {
        let engine = house.open().await;
        let made = engine.create(&project(), small("app"), None).await.expect("it is made");
        ok(&engine, "app", "write /a one").await;
        stop(&engine, "app").await;
        let before = engine.get(&project(), &name("app")).await.expect("it is there").sandbox;
        let deleted = engine.delete(&project(), &name("app"), Delete::default(), None).await;
        assert_eq!(deleted.expect("it is deleted").snapshots_kept, []);
        let gone = engine.get(&project(), &name("app")).await.expect_err("it is gone");
        assert_eq!(gone.code(), "sandbox_not_found");
        let restored = engine.restore(&project(), "app", None).await.expect("it is restored");
        assert_eq!(restored.id, made.sandbox.id);
        assert!(restored.revision > before.revision, "a restore is a save");
        assert_eq!(ok(&engine, "app", "cat /a").await, "one");
        let sessions = engine.sessions(&project(), &name("app"), &Default::default()).await;
        assert_eq!(sessions.expect("a list").items.len(), 2, "with its history");
        house.end(engine).await;
    }
}

#[tokio::test]
async fn what_has_expired_goes() {
    let mut house = FakeHouse::new();
    house.settings.housekeeping = Duration::from_millis(10);
    house.settings.reap = Duration::from_millis(10);
    let clock = Arc::new(FastClock::default());
    house.settings.clock = Arc::clone(&clock) as Arc<dyn Clock>;
    let engine = house.open().await;
    let mut short = small("short");
    short.patch.expires = Some(Span(60_000));
    short.start = false;
    engine.create(&project(), short, None).await.expect("it is made");
    engine.create(&project(), small("long"), None).await.expect("it is made");
    clock.forward(Duration::from_secs(61));
    until("an expired sandbox is gone", async || {
        engine.get(&project(), &name("short")).await.is_err().then_some(())
    })
    .await;
    assert_eq!(phase(&engine, "long").await, Phase::Running);
    house.end(engine).await;
}

#[tokio::test]
async fn a_retry_with_the_same_key_gets_the_same_answer() {
    let house = FakeHouse::new();
    let engine = house.open().await;
    let key = || Some("once".to_owned());
    let first = engine.create(&project(), small("app"), key()).await.expect("it is made");
    let again = engine.create(&project(), small("app"), key()).await.expect("the same answer");
    assert_eq!(again.sandbox.id, first.sandbox.id);
    assert_eq!(house.started(), 1, "it is done once");
    let other =
        engine.create(&project(), small("other"), key()).await.expect_err("another request");
    assert_eq!(other.code(), "idempotency_key_reused");
    house.end(engine).await;
}

#[tokio::test]
async fn a_failed_start_leaves_no_new_sandbox_and_an_old_one_as_it_was() {
    let house = FakeHouse::new();
    let engine = house.open().await;
    house.fail_start("no cgroup");
    let failed = engine.create(&project(), small("app"), None).await.expect_err("it fails");
    assert_eq!(failed.code(), "start_failed");
    assert!(failed.to_string().contains("no cgroup"), "{failed}");
    assert!(engine.get(&project(), &name("app")).await.is_err(), "the name is free");
    engine.create(&project(), small("app"), None).await.expect("it is made");
    ok(&engine, "app", "write /a one").await;
    stop(&engine, "app").await;
    house.fail_start("no cgroup");
    engine.start(&project(), &name("app"), None).await.expect_err("it fails");
    let found = engine.get(&project(), &name("app")).await.expect("it is there").sandbox;
    assert_eq!(found.phase(), Phase::Failed);
    assert!(found.failure().expect("a reason").contains("no cgroup"));
    assert_eq!(ok(&engine, "app", "cat /a").await, "one", "the next start goes on from there");
    house.end(engine).await;
}

#[tokio::test]
async fn machines_and_commands_outlive_a_killed_daemon() {
    for house in [FakeHouse::new(), FakeHouse::on_disk()] {
        let engine = house.open_apart().await;
        let (made, slow) = engine
            .run(|engine| async move {
                let made = engine.create(&project(), small("app"), None).await.expect("it is made");
                ok(&engine, "app", "write /a one").await;
                let exec = Exec { argv: vec!["sleep".to_owned()], detach: true, ..Exec::default() };
                let slow = engine.exec(&project(), &name("app"), exec).await.expect("it starts");
                (made.sandbox, slow.command.id)
            })
            .await;
        engine.kill();
        assert_eq!(house.alive(), [machine_of(&made.id)], "machines go on");
        let engine = house.open().await;
        assert_eq!(phase(&engine, "app").await, Phase::Running);
        assert_eq!(house.started(), 1, "it was adopted");
        assert_eq!(ok(&engine, "app", "cat /a").await, "one");
        let command = engine.command(&project(), &name("app"), &slow).await.expect("its record");
        assert_eq!(command.state, CommandState::Running);
        engine.signal(&project(), &name("app"), &slow, 9).await.expect("it takes signals");
        let ended = until("it ends", async || {
            let command = engine.command(&project(), &name("app"), &slow).await.expect("a record");
            (command.state != CommandState::Running).then_some(command)
        })
        .await;
        assert_eq!(ended.exit_code, Some(137));
        house.end(engine).await;
    }
}

#[tokio::test]
async fn a_machine_whose_record_does_not_read_goes_on() {
    for (house, is_on_disk) in [(FakeHouse::new(), false), (FakeHouse::on_disk(), true)] {
        let engine = house.open_apart().await;
        let made = engine
            .run(|engine| async move {
                let made = engine.create(&project(), small("app"), None).await.expect("it is made");
                ok(&engine, "app", "write /a one").await;
                made.sandbox
            })
            .await;
        engine.kill();
        let dir = house.data().join("sandboxes").join(made.id.as_str());
        let mut kept = Vec::new();
        if is_on_disk {
            for entry in std::fs::read_dir(&dir).expect("its directory").flatten() {
                if entry.file_name().to_string_lossy().starts_with("sandbox.json") {
                    kept.push((entry.path(), std::fs::read(entry.path()).expect("a manifest")));
                    std::fs::write(entry.path(), "{").expect("it is damaged");
                }
            }
            assert!(!kept.is_empty());
        } else {
            house.records().set_damaged(&made.id, true);
        }
        let engine = house.open().await;
        assert!(engine.get(&project(), &name("app")).await.is_err(), "it cannot be used");
        assert_eq!(house.alive(), [machine_of(&made.id)], "what it wrote is nowhere else");
        engine.shutdown().await;
        drop(engine);
        for (path, manifest) in kept {
            std::fs::write(path, manifest).expect("it is repaired");
        }
        if !is_on_disk {
            house.records().set_damaged(&made.id, false);
        }
        let engine = house.open().await;
        assert_eq!(ok(&engine, "app", "cat /a").await, "one", "it was adopted");
        assert_eq!(house.started(), 1);
        house.end(engine).await;
    }
}

#[tokio::test]
async fn after_a_power_cut_what_was_written_is_kept() {
    for house in [FakeHouse::new(), FakeHouse::on_disk()] {
        let engine = house.open_apart().await;
        engine
            .run(|engine| async move {
                engine.create(&project(), small("app"), None).await.expect("it is made");
                ok(&engine, "app", "write /a one").await;
            })
            .await;
        engine.kill();
        house.lose_power();
        let engine = house.open().await;
        let found = engine.get(&project(), &name("app")).await.expect("it is there");
        assert_eq!(found.sandbox.phase(), Phase::Stopped);
        assert_eq!(found.session.expect("a session").end, Some(SessionEnd::Interrupted));
        let kept = engine.snapshots(&project(), of("app"), &Default::default()).await;
        assert_eq!(kept.expect("a list").items[0].item.kind, SnapshotKind::Recovered);
        assert_eq!(ok(&engine, "app", "cat /a").await, "one");
        house.end(engine).await;
    }
}

#[tokio::test]
async fn of_two_callers_one_makes_it_and_one_starts_it() {
    let house = FakeHouse::new();
    let engine = house.open().await;
    let project = project();
    let (first, second) = tokio::join!(
        engine.create(&project, small("app"), None),
        engine.create(&project, small("app"), None)
    );
    let made = [&first, &second].into_iter().filter(|outcome| outcome.is_ok()).count();
    assert_eq!(made, 1, "{first:?} {second:?}");
    stop(&engine, "app").await;
    let name = name("app");
    let (first, second) =
        tokio::join!(engine.start(&project, &name, None), engine.start(&project, &name, None));
    let resumed = [first.expect("it runs").resumed, second.expect("it runs").resumed];
    assert_eq!(resumed.into_iter().filter(|resumed| *resumed).count(), 1);
    assert_eq!(house.started(), 2, "once made, once resumed");
    let (stopped, ran) = tokio::join!(
        engine.stop(&project, &name, Stop::default(), None),
        run(&engine, "app", "echo hello")
    );
    stopped.expect("it stops");
    assert_eq!(ran.out, "hello\n", "whoever comes while it stops wakes it again");
    house.end(engine).await;
}

#[tokio::test]
async fn a_save_that_lost_a_race_is_an_error_and_can_be_tried_again() {
    let house = FakeHouse::new();
    let engine = house.open().await;
    let made = engine.create(&project(), small("app"), None).await.expect("it is made").sandbox;
    house.records().overtake(1);
    let update = async |value| engine.update(&project(), &name("app"), tagged(value)).await;
    let lost = update("first").await.expect_err("another node was faster");
    assert_eq!((lost.kind(), lost.code()), (ErrorKind::Conflict, "record_changed"));
    let found = engine.get(&project(), &name("app")).await.expect("it is there").sandbox;
    assert_eq!(found.config.tags, made.config.tags, "nothing was overwritten");
    assert_eq!(found.revision, made.revision.next(), "it is what the other one saved");
    let updated = update("second").await.expect("the next attempt begins with that");
    assert_eq!(updated.config.tags["is"], "second");
    ok(&engine, "app", "write /a one").await;
    // A stop that loses is not acknowledged, and keeps all there is.
    house.records().overtake(1);
    let lost = engine.stop(&project(), &name("app"), Stop::default(), None).await;
    assert_eq!(lost.expect_err("another node was faster").code(), "record_changed");
    stop(&engine, "app").await;
    assert_eq!(ok(&engine, "app", "cat /a").await, "one");
    house.end(engine).await;
}

#[tokio::test]
async fn a_save_that_failed_changes_nothing_and_can_be_tried_again() {
    let house = FakeHouse::new();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.expect("it is made");
    house.records().fail(1);
    let failed = engine.update(&project(), &name("app"), tagged("first")).await;
    assert_eq!(failed.expect_err("the disk").code(), "storage_failed");
    let updated = engine.update(&project(), &name("app"), tagged("second")).await;
    assert_eq!(updated.expect("it is saved").config.tags["is"], "second");
    ok(&engine, "app", "write /a one").await;
    house.records().fail(1);
    let failed = engine.stop(&project(), &name("app"), Stop::default(), None).await;
    failed.expect_err("that it stops cannot be saved");
    assert_eq!(ok(&engine, "app", "cat /a").await, "one", "it runs on");
    stop(&engine, "app").await;
    house.end(engine).await;
}

#[tokio::test]
async fn a_machine_that_dies_by_itself_is_sealed() {
    let house = FakeHouse::new();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.expect("it is made");
    ok(&engine, "app", "write /a one").await;
    house.lose_power();
    until("its session is sealed", async || {
        (phase(&engine, "app").await == Phase::Stopped).then_some(())
    })
    .await;
    assert_eq!(ok(&engine, "app", "cat /a").await, "one");
    assert_eq!(house.alive().len(), 1);
    let keys: Vec<MachineKey> = house.alive();
    assert_eq!(keys.len(), 1);
    house.end(engine).await;
}

#[tokio::test]
async fn a_command_whose_caller_leaves_while_it_is_started_is_followed_and_ended() {
    let house = FakeHouse::new();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.expect("it is made");
    ok(&engine, "app", "echo up").await;
    let argv = vec!["sleep".to_owned()];
    // The caller leaves at any moment of the start.
    for number in 0..60 {
        let exec = Exec { argv: argv.clone(), ..Exec::default() };
        let start = async { engine.exec(&project(), &name("app"), exec).await };
        let within = Duration::from_micros(number * 40);
        if let Ok(started) = tokio::time::timeout(within, start).await {
            let id = started.expect("it starts").command.id;
            engine.signal(&project(), &name("app"), &id, 9).await.expect("it is alive");
        }
    }
    let begun = Instant::now();
    loop {
        let page = sandkeep_core::db::Page::all();
        let all = engine.commands(&project(), &name("app"), &page).await.expect("a list").items;
        let alive = all.iter().filter(|one| one.state == CommandState::Running).count();
        if alive == 0 && all.len() > 1 {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{alive} are left of {}", all.len());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    house.end(engine).await;
}
