//! The daemon dies in the middle of a capture, a pause, a resume or an export of a real machine,
//! and the next one continues as if it had not begun, or had ended.
//!
//! Each place is tried in a process of its own, as in `crash.rs`.

use std::time::Duration;

use sandkeep_core::engine::{Checkpoint, CommandOutput, Create, CreateDrive, Engine, Exec, Stop};
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_core::model::{CommandId, CommandState, Mount, MountMode, Size};
use sandkeep_testkit::daemon::skipped;
use sandkeep_testkit::house::{House, name, project, sh, small};
use sandkeep_testkit::victim;

/// What the process that dies does. Without a house it is not that process and does nothing.
#[tokio::test(flavor = "multi_thread")]
async fn victim() {
    let Some(house) = House::lent() else { return };
    let mut house = house.with_machines().unwrap();
    let deed = std::env::var("SANDKEEP_TEST_DEED").unwrap();
    if deed == "shorten" {
        house.settings.memory_limit = 4;
    }
    let engine = house.open().await;
    let app = name("app");
    match deed.as_str() {
        "shorten" => {
            engine.pause(&project(), &app, None).await.unwrap();
            tokio::time::sleep(Duration::from_secs(60)).await;
        }
        "pause" => drop(engine.pause(&project(), &app, None).await.unwrap()),
        "checkpoint" => {
            drop(engine.checkpoint(&project(), &app, Checkpoint::default()).await.unwrap());
        }
        "start" => drop(engine.start(&project(), &app, None).await.unwrap()),
        "stop" => drop(engine.stop(&project(), &app, Stop::default(), None).await.unwrap()),
        other => panic!("{other}"),
    }
    engine.shutdown().await;
}

async fn told(engine: &Engine, command: &CommandId) -> Vec<u64> {
    let mut events = engine.logs(&project(), &name("app"), command, false).await.unwrap();
    let mut text = Vec::new();
    while let Some(event) = events.next().await {
        if let CommandOutput::Stdout(bytes) = event {
            text.extend_from_slice(&bytes);
        }
    }
    let text = String::from_utf8_lossy(&text).into_owned();
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole).to_owned();
    whole.lines().map(|line| line.parse().unwrap()).collect()
}

/// Sees that it counts on, with no number missing or doubled.
async fn goes_on(engine: &Engine, counter: &CommandId, point: &str) {
    assert_eq!(sh(engine, "app", "cat /root/file").await.out, "kept\n", "{point}");
    let now = engine.get_settled(&project(), &name("app")).await.unwrap();
    assert_eq!(now.session.and_then(|session| session.fallback), None, "{point}");
    let before = told(engine, counter).await.len();
    for _ in 0..300 {
        if told(engine, counter).await.len() > before + 2 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let all = told(engine, counter).await;
    assert!(all.len() > before + 2, "{point}: it stands still at {before}");
    let expected: Vec<u64> = (1..=all.len() as u64).collect();
    assert_eq!(all, expected, "{point}");
    let record = engine.command(&project(), &name("app"), counter).await.unwrap();
    assert_eq!(record.state, CommandState::Running, "{point}");
}

fn machine() -> Create {
    let mut request = small("app");
    request.patch.driver = Some("microvm".to_owned());
    request.patch.memory = Some(Size(256 << 20));
    request.patch.disk = Some(Size(1 << 30));
    request
}

/// The root was handed over and the drive was not: the machine is booted once more for the drive alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_that_breaks_off_between_root_and_drive_keeps_both() {
    let house = match House::new().and_then(House::with_machines) {
        Ok(house) => house,
        Err(why) => {
            return skipped("a_stop_that_breaks_off_between_root_and_drive_keeps_both", &why);
        }
    };
    let mut engine = house.open().await;
    let drive = CreateDrive { name: name("data"), max_size: None, notes: Default::default() };
    engine.create_drive(&project(), drive).await.unwrap();
    let mut request = machine();
    let mount = Mount { drive: name("data"), mode: MountMode::ReadWrite };
    request.patch.mounts = Some([("/data".to_owned(), mount)].into());
    engine.create(&project(), request, None).await.unwrap();
    for (point, told) in [("export.filled", "one"), ("seal.recorded", "two"), ("", "three")] {
        let write = format!("echo {told} > /root/file; echo {told} > /data/file; sync");
        assert_eq!(sh(&engine, "app", &write).await.command.exit_code, Some(0), "{point}");
        if point.is_empty() {
            engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
        } else {
            engine = house.cut(engine, victim!(), "stop", point).await;
        }
        let now = engine.get_settled(&project(), &name("app")).await.unwrap();
        let (phase, failure) = (now.sandbox.phase(), now.sandbox.failure());
        assert_eq!((phase, failure), (Phase::Stopped, None), "{point}");
        let seen = sh(&engine, "app", "cat /root/file /data/file").await.out;
        assert_eq!(seen, format!("{told}\n{told}\n"), "{point}");
    }
    // What was written to the drive outlives the sandbox, also when its machine is gone before it.
    sh(&engine, "app", "echo last > /data/file; sync").await;
    house.kill_machines().await;
    engine.delete(&project(), &name("app"), Default::default(), None).await.unwrap();
    let mut reader = small("reader");
    let mount = Mount { drive: name("data"), mode: MountMode::ReadWrite };
    reader.patch.mounts = Some([("/data".to_owned(), mount)].into());
    engine.create(&project(), reader, None).await.unwrap();
    assert_eq!(sh(&engine, "reader", "cat /data/file").await.out, "last\n");
}

/// A start broke off, and the daemon that comes back cannot undo it: its driver is missing. The
/// next daemon still resumes the memory that the sandbox was paused with, whatever requests the one
/// in between got.
#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_cannot_be_undone_yet_is_undone_later() {
    let house = match House::new().and_then(House::with_machines) {
        Ok(house) => house,
        Err(why) => {
            return skipped("a_start_that_cannot_be_undone_yet_is_undone_later", &why);
        }
    };
    let engine = house.open().await;
    engine.create(&project(), machine(), None).await.unwrap();
    sh(&engine, "app", "echo kept > /root/file").await;
    let line = "n=0; while :; do n=$((n+1)); echo $n; sleep 0.1; done";
    let argv = ["sh", "-c", line].map(str::to_owned).to_vec();
    let exec = Exec { argv, detach: true, ..Exec::default() };
    let counter = engine.exec(&project(), &name("app"), exec).await.unwrap().command.id;
    engine.pause(&project(), &name("app"), None).await.unwrap();
    house.die(engine, victim!(), "start", "boot.recorded").await;

    let engine = house.open_without_machines().await;
    for _ in 0..2 {
        engine.start(&project(), &name("app"), None).await.unwrap_err();
        engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap_err();
    }
    engine.shutdown().await;
    drop(engine);
    house.free().await;

    let engine = house.open().await;
    let now = engine.get_settled(&project(), &name("app")).await.unwrap();
    assert_eq!(now.sandbox.phase(), Phase::Paused);
    goes_on(&engine, &counter, "undone later").await;
    engine.delete(&project(), &name("app"), Default::default(), None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_breaks_off_costs_nothing() {
    let house = match House::new().and_then(House::with_machines) {
        Ok(house) => house,
        Err(why) => {
            skipped("what_breaks_off_costs_nothing", &why);
            return;
        }
    };
    let mut engine = house.open().await;
    engine.create(&project(), machine(), None).await.unwrap();
    sh(&engine, "app", "echo kept > /root/file").await;
    let line = "n=0; while :; do n=$((n+1)); echo $n; sleep 0.1; done";
    let argv = ["sh", "-c", line].map(str::to_owned).to_vec();
    let exec = Exec { argv, detach: true, ..Exec::default() };
    let counter = engine.exec(&project(), &name("app"), exec).await.unwrap().command.id;
    for (deed, point) in [
        ("checkpoint", "capture.recorded"),
        ("checkpoint", "capture.taken"),
        ("checkpoint", "commit.snapshot"),
        ("pause", "capture.recorded"),
        ("pause", "capture.taken"),
        ("pause", "pause.held"),
        ("pause", "pause.sealed"),
        ("pause", "commit.snapshot"),
        ("pause", "pause.committed"),
        ("pause", "pause.down"),
        ("shorten", "memory_compaction.sealed"),
        ("shorten", "memory_compaction.done"),
    ] {
        engine = house.cut(engine, victim!(), deed, point).await;
        goes_on(&engine, &counter, &format!("{deed}, {point}")).await;
    }
    // A start that breaks off is taken back: what it would have gone on from is still there.
    for point in ["boot.recorded", "boot.restored", "boot.up"] {
        engine.pause(&project(), &name("app"), None).await.unwrap();
        engine = house.cut(engine, victim!(), "start", point).await;
        let now = engine.get_settled(&project(), &name("app")).await.unwrap();
        assert_eq!(now.sandbox.phase(), Phase::Paused, "{point}");
        goes_on(&engine, &counter, &format!("start, {point}")).await;
    }
    // One that dies over an export is booted once more, or not, as need be.
    for point in ["export.filled", "seal.recorded"] {
        sh(&engine, "app", &format!("echo {point} > /root/point; sync")).await;
        engine = house.cut(engine, victim!(), "stop", point).await;
        let now = engine.get_settled(&project(), &name("app")).await.unwrap();
        assert_eq!(now.sandbox.phase(), Phase::Stopped, "{point}");
        let seen = sh(&engine, "app", "cat /root/file /root/point").await.out;
        assert_eq!(seen, format!("kept\n{point}\n"), "{point}");
    }
    engine.delete(&project(), &name("app"), Default::default(), None).await.unwrap();
}
