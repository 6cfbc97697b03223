//! The daemon dies in the middle of an end that was asked for in a special way, and the next one
//! finishes it in that way.
//!
//! Each place is tried in a process of its own: this test starts itself again with the place armed
//! and its own house, lets it die there, and looks at what it left. The ordinary ways are gone through
//! with a real daemon, in the tests of `keep`.

use std::time::Duration;

use sandkeep_core::db::Page;
use sandkeep_core::engine::{
    Create, Delete, Engine, Error, Exec, Fork, Method, OnDelete, SetSecret, SnapshotFilter,
    SnapshotOnStop, Stop,
};
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_core::model::{
    Decision, GuardPatch, Inject, InjectInto, OnSecret, Patch, SecretName, SessionEnd, Snapshot,
    SnapshotId, Span,
};
use sandkeep_testkit::house;
use sandkeep_testkit::house::{House, holding, name, of, project, sh, small};
use sandkeep_testkit::victim;
use zeroize::Zeroizing;

/// What the process that dies does. Without a house it is not that process and does nothing.
#[tokio::test(flavor = "multi_thread")]
async fn victim() {
    let Some(house) = House::lent() else { return };
    let engine = house.open().await;
    let app = name("app");
    match std::env::var("SANDKEEP_TEST_DEED").unwrap().as_str() {
        "stop" => {
            let stop = Stop {
                snapshot: SnapshotOnStop::Always,
                method: Method::Manual,
                expires: Some(Some(Span::days(3))),
                ..Stop::default()
            };
            engine.stop(&project(), &app, stop, None).await.unwrap();
        }
        "stop as usual" => {
            engine.stop(&project(), &app, Stop::default(), None).await.unwrap();
        }
        "stop after a while" => {
            tokio::time::sleep(Duration::from_secs(4)).await;
            engine.stop(&project(), &app, Stop::default(), None).await.unwrap();
        }
        "stop after a command" => {
            let out = sh(&engine, "app", "echo two > /work/d/second").await;
            // The look after the command is over, and the sandbox was not idle for as long as a visit of its own waits.
            engine.command_changes(&project(), &app, &out.command.id).await.unwrap();
            engine.stop(&project(), &app, Stop::default(), None).await.unwrap();
        }
        "redact" => {
            let decision = Decision { redact: true, ..Decision::default() };
            let stop = Stop { decision, ..Stop::default() };
            engine.stop(&project(), &app, stop, None).await.unwrap();
        }
        "delete" => {
            let delete = Delete { snapshots: OnDelete::Keep, ..Delete::default() };
            engine.delete(&project(), &app, delete, None).await.unwrap();
        }
        force => {
            let id: SnapshotId = force.parse().unwrap();
            engine.delete_snapshot(&project(), &id, true).await.unwrap();
        }
    }
    engine.shutdown().await;
}

async fn snapshots(engine: &Engine) -> Vec<Snapshot> {
    let found = engine.snapshots(&project(), of("app"), &Page::all()).await.unwrap();
    found.items.into_iter().map(|sized| sized.item).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_ends_the_way_it_was_asked_for_and_is_counted_once() {
    let house = house!();
    let mut engine = house.open().await;
    let patch = Patch { persistent: Some(false), ..small("app").patch };
    engine.create(&project(), Create { patch, ..small("app") }, None).await.unwrap();
    let mut made = 0;
    for point in [
        "seal.recorded",
        "seal.down",
        "seal.sealed",
        "commit.snapshot",
        "commit.sandbox",
        "seal.done",
    ] {
        let session = engine.start(&project(), &name("app"), None).await.unwrap().session.unwrap();
        sh(&engine, "app", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done").await;
        engine = house.cut(engine, victim!(), "stop", point).await;
        made += 1;
        let all = snapshots(&engine).await;
        assert_eq!(all.len(), made, "{point}: one snapshot for one stop");
        let snapshot = &all[0];
        assert_eq!(snapshot.method, Method::Manual, "{point}");
        assert_eq!(snapshot.expires_after, Some(Span::days(3)), "{point}");
        assert_eq!(snapshot.session, session.id, "{point}");
        let (sandbox, ended) = engine.session(&project(), &session.id).await.unwrap();
        assert_eq!(sandbox.phase(), Phase::Stopped, "{point}");
        assert_eq!(sandbox.current.as_ref(), Some(&snapshot.id), "{point}");
        assert_eq!(ended.end, Some(SessionEnd::Stopped), "{point}");
        assert_eq!(ended.snapshot.as_ref(), Some(&snapshot.id), "{point}");
        assert!(ended.requested_stop_at.is_some() && ended.ended_at.is_some(), "{point}");
        if point != "seal.recorded" {
            assert!(ended.usage.active_cpu_ms > 0, "{point}: what it used is not lost");
        }
        let sessions = engine.sessions(&project(), &name("app"), &Page::all()).await.unwrap();
        let wall: u64 = sessions.items.iter().map(|session| session.usage.wall_ms).sum();
        let cpu: u64 = sessions.items.iter().map(|session| session.usage.active_cpu_ms).sum();
        assert_eq!((sandbox.totals.wall_ms, sandbox.totals.active_cpu_ms), (wall, cpu), "{point}");
    }
    engine.delete(&project(), &name("app"), Delete::default(), None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshots_that_were_to_be_kept_are_kept() {
    let mut house = house!();
    house.settings.housekeeping = Duration::from_millis(100);
    let mut engine = house.open().await;
    for point in [
        "erase.recorded",
        "erase.down",
        "erase.snapshot",
        "erase.snapshot:2",
        "erase.snapshots",
        "store.remove_sandbox.before",
        "store.remove_sandbox.before_sync",
        "erase.done",
    ] {
        engine.create(&project(), small("app"), None).await.unwrap();
        for round in ["one", "two"] {
            sh(&engine, "app", &format!("echo {round} > /work/round")).await;
            engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
        }
        engine.start(&project(), &name("app"), None).await.unwrap();
        engine = house.cut(engine, victim!(), "delete", point).await;
        assert!(engine.get(&project(), &name("app")).await.is_err(), "{point}: begun is finished");
        // Long enough for what goes by itself to have gone.
        tokio::time::sleep(Duration::from_millis(400)).await;
        let kept = snapshots(&engine).await;
        assert_eq!(kept.len(), 2, "{point}");
        assert!(kept.iter().all(|snapshot| snapshot.outlives), "{point}");
        let from = Create { from: Some(kept[0].id.clone()), ..small("again") };
        engine.create(&project(), from, None).await.unwrap();
        assert_eq!(sh(&engine, "again", "cat /work/round").await.out, "two\n", "{point}");
        engine.delete(&project(), &name("again"), Delete::default(), None).await.unwrap();
        for snapshot in kept {
            engine.delete_snapshot(&project(), &snapshot.id, false).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_is_deleted_under_sandboxes_is_gone_for_all_of_them() {
    let house = house!();
    let mut engine = house.open().await;
    for (point, gone) in [
        ("store.write.before_rename", false),
        ("store.write.done", true),
        ("snapshot_delete.tombstone", true),
        ("snapshot_delete.sandbox", true),
        ("snapshot_delete.sandbox:2", true),
    ] {
        engine.create(&project(), small("app"), None).await.unwrap();
        sh(&engine, "app", "echo kept > /work/file").await;
        let stopped = engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
        let id = stopped.snapshot.unwrap().item.id;
        let fork = Fork { name: Some(name("fork")), ..Fork::default() };
        engine.fork(&project(), &name("app"), fork, None).await.unwrap();
        engine = house.cut(engine, victim!(), id.as_str(), point).await;
        for sandbox in ["app", "fork"] {
            let started = engine.start(&project(), &name(sandbox), None).await;
            if gone {
                assert!(
                    matches!(&started, Err(Error::SnapshotGone { snapshot, .. }) if *snapshot == id),
                    "{point}: {started:?}"
                );
                let known = engine.get(&project(), &name(sandbox)).await.unwrap().sandbox;
                assert_eq!((known.current, known.missing), (None, Some(id.clone())), "{point}");
            } else {
                started.unwrap();
                assert_eq!(sh(&engine, sandbox, "cat /work/file").await.out, "kept\n", "{point}");
            }
            engine.delete(&project(), &name(sandbox), Delete::default(), None).await.unwrap();
        }
        let filter = SnapshotFilter { deleted: true, ..of("app") };
        let all = engine.snapshots(&project(), filter, &Page::all()).await.unwrap().items;
        let record = all.into_iter().find(|sized| sized.item.id == id).unwrap().item;
        assert!(record.deleted_at.is_some() || !gone, "{point}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_guard_began_with_a_layer_is_finished() {
    const VALUE: &str = "tok_1234567890abcdef-XYZ";
    let house = house!();
    let mut engine = house.open().await;
    let secret: SecretName = "TOKEN".parse().unwrap();
    let set = SetSecret {
        value: Zeroizing::new(VALUE.to_owned()),
        hosts: None,
        places: None,
        tags: None,
    };
    engine.set_secret(&project(), secret.clone(), set).await.unwrap();
    let aside = [
        "guard.recorded",
        "guard.moved",
        "guard.moved:2",
        "guard.aside",
        "guard.done",
        "seal.sealed",
        "commit.snapshot",
    ];
    let masked = ["seal.recorded", "guard.masked", "guard.redacted", "guard.done", "seal.sealed"];
    let cases = aside.map(|point| (point, OnSecret::Quarantine, "stop as usual")).into_iter();
    for (point, policy, deed) in cases.chain(masked.map(|point| (point, OnSecret::Block, "redact")))
    {
        let guard = GuardPatch { secrets: Some(policy), ..GuardPatch::default() };
        let patch = Patch { guard, ..small("app").patch };
        engine.create(&project(), Create { patch, ..small("app") }, None).await.unwrap();
        sh(&engine, "app", "echo old > /work/a").await;
        engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
        let script = "echo $TOKEN > /work/a; echo $TOKEN > /work/b; echo new > /work/c";
        let into = InjectInto::Env("TOKEN".to_owned());
        let exec = Exec {
            argv: ["sh", "-c", script].map(str::to_owned).to_vec(),
            inject: vec![Inject { secret: secret.clone(), into }],
            ..Exec::default()
        };
        let mut started = engine.exec(&project(), &name("app"), exec).await.unwrap();
        while started.events.next().await.is_some() {}
        engine = house.cut(engine, victim!(), deed, point).await;
        let sandbox = engine.get(&project(), &name("app")).await.unwrap().sandbox;
        let (phase, generation) = (sandbox.phase(), sandbox.generation);
        assert_eq!((phase, generation), (Phase::Stopped, 2), "{point}: {:?}", sandbox.failure());
        let leaks = holding(&house.data().join("layers"), VALUE);
        assert!(leaks.is_empty(), "{point}: {leaks:?}");
        let kept = engine.quarantines().await.unwrap();
        let seen = sh(&engine, "app", "cd /work; ls; cat c").await.out;
        if policy == OnSecret::Quarantine {
            assert_eq!(seen, "c\nnew\n", "{point}: neither the value nor what was there before");
            assert_eq!((kept.len(), kept[0].files.len()), (1, 2), "{point}");
            let files = holding(&house.data().join("aside"), VALUE);
            assert_eq!(files.len(), 2, "{point}: {files:?}");
            assert_eq!(snapshots(&engine).await[0].findings.len(), 2, "{point}: on record");
        } else {
            assert_eq!(seen, "a\nb\nc\nnew\n", "{point}");
            assert!(kept.is_empty(), "{point}");
        }
        engine.delete(&project(), &name("app"), Delete::default(), None).await.unwrap();
        assert!(engine.quarantines().await.unwrap().is_empty(), "{point}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stop_of_an_idle_sandbox_need_not_visit_its_files() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    sh(&engine, "app", "mkdir /work/d; echo one > /work/d/file; ln /work/d/file /work/other").await;
    // It dies where the seal takes what was measured while the sandbox was idle, so it comes there.
    let engine =
        house.cut(engine, victim!(), "stop after a while", "store.seal.measured_ahead").await;
    let all = snapshots(&engine).await;
    assert_eq!(all.len(), 1);
    assert_eq!(sh(&engine, "app", "cat /work/d/file /work/other").await.out, "one\none\n");
    engine.delete(&project(), &name("app"), Delete::default(), None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stop_after_a_command_need_not_visit_its_files() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    sh(&engine, "app", "mkdir /work/d; echo one > /work/d/file; ln /work/d/file /work/other").await;
    // It dies where the seal takes what the look after a command measured.
    let engine =
        house.cut(engine, victim!(), "stop after a command", "store.seal.measured_ahead").await;
    assert_eq!(snapshots(&engine).await.len(), 1);
    assert_eq!(sh(&engine, "app", "cat /work/d/file /work/d/second").await.out, "one\ntwo\n");
    engine.delete(&project(), &name("app"), Delete::default(), None).await.unwrap();
}
