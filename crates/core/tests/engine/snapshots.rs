//! How long snapshots are kept, what outlives what, and what is left of those that went.

use std::time::Duration;

use sandkeep_core::db::Page;
use sandkeep_core::engine::{
    Create, Delete, Engine, Error, ErrorKind, Fork, ForkFrom, OnDelete, SnapshotFilter,
    SnapshotOnStop, Stop,
};
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_core::model::{Patch, Snapshot, SnapshotId, Span, Timestamp};
use sandkeep_core::store::{Durability, Store};
use sandkeep_testkit::house;
use sandkeep_testkit::house::{House, labelled, name, of, project, sh, small, until};

async fn stop(engine: &Engine, sandbox: &str) -> Snapshot {
    let stop = Stop { snapshot: SnapshotOnStop::Always, ..Stop::default() };
    let stopped = engine.stop(&project(), &name(sandbox), stop, None).await.unwrap();
    stopped.snapshot.unwrap().item
}

/// Writes something and stops, so often.
async fn rounds(engine: &Engine, sandbox: &str, count: usize) -> Vec<SnapshotId> {
    let mut ids = Vec::new();
    for round in 0..count {
        sh(engine, sandbox, &format!("echo {round} > /work/round")).await;
        ids.push(stop(engine, sandbox).await.id);
    }
    ids
}

/// Ends an engine, and waits until its data directory is free.
async fn shut(house: &House, engine: Engine) {
    engine.shutdown().await;
    drop(engine);
    for _ in 0..200 {
        if Store::open(&house.data()).is_ok() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("an engine that was shut down still holds its data directory");
}

fn two_days_before(at: Timestamp) -> Timestamp {
    Timestamp::from_millisecond(at.as_millisecond() - 48 * 3_600_000).unwrap()
}

async fn listed(engine: &Engine, filter: SnapshotFilter) -> Vec<Snapshot> {
    let found = engine.snapshots(&project(), filter, &Page::all()).await.unwrap();
    found.items.into_iter().map(|sized| sized.item).collect()
}

fn ids(snapshots: &[Snapshot]) -> Vec<SnapshotId> {
    snapshots.iter().map(|snapshot| snapshot.id.clone()).collect()
}

fn with_deleted(sandbox: &str) -> SnapshotFilter {
    SnapshotFilter { deleted: true, ..of(sandbox) }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_retention_evicts_is_gone_with_the_stop_and_leaves_a_tombstone() {
    let house = house!();
    let engine = house.open().await;
    let day = Span::days(1);
    let patch = Patch {
        keep_last: Some(Some(2)),
        kept_expires: Some(Some(Span::days(9))),
        snapshot_expires: Some(Some(day)),
        ..small("app").patch
    };
    engine.create(&project(), Create { patch, ..small("app") }, None).await.unwrap();
    let made = rounds(&engine, "app", 4).await;
    let kept = listed(&engine, of("app")).await;
    assert_eq!(ids(&kept), [made[3].clone(), made[2].clone()], "at once, newest first");
    assert!(kept.iter().all(|snapshot| snapshot.kept == Some(Span::days(9))));
    let all = listed(&engine, with_deleted("app")).await;
    assert_eq!(all.len(), 4);
    assert!(all[2..].iter().all(|dead| dead.deleted_at.is_some() && dead.layers.is_empty()));
    assert!(matches!(engine.snapshot(&project(), &made[0]).await, Err(Error::NoSnapshot(_))));
    assert!(engine.snapshot_record(&project(), &made[0]).await.unwrap().item.deleted_at.is_some());
    let from = Create { from: Some(made[0].clone()), ..small("late") };
    let refused = engine.create(&project(), from, None).await.unwrap_err();
    assert!(matches!(refused, Error::SnapshotDeleted(_)), "{refused}");
    assert_eq!(refused.kind(), ErrorKind::Gone);
    let from = Create { from: Some(SnapshotId::fresh()), ..small("late") };
    let never = engine.create(&project(), from, None).await.unwrap_err();
    assert!(matches!(never, Error::NoSnapshot(_)), "{never}");

    // Those that are not deleted at once go when they would have gone anyway.
    let patch = Patch { delete_evicted: Some(false), ..Patch::default() };
    engine.update(&project(), &name("app"), patch).await.unwrap();
    rounds(&engine, "app", 1).await;
    let kept = listed(&engine, of("app")).await;
    assert_eq!(kept.len(), 3);
    assert_eq!((kept[1].kept, kept[2].kept), (Some(Span::days(9)), None));
    let expires = kept[2].expires_at().unwrap().as_millisecond();
    let used = kept[2].used_at.unwrap_or(kept[2].created_at).as_millisecond();
    assert_eq!(expires - used, i64::try_from(day.0).unwrap());
    // And with another configuration at once.
    let patch = Patch { delete_evicted: Some(true), keep_last: Some(Some(1)), ..Patch::default() };
    engine.update(&project(), &name("app"), patch).await.unwrap();
    assert_eq!(ids(&listed(&engine, of("app")).await), [kept[0].id.clone()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn expiry_counts_from_the_last_use_and_strands_nobody() {
    let mut house = house!();
    house.settings.housekeeping = Duration::from_millis(50);
    let engine = house.open().await;
    let patch = Patch { snapshot_expires: Some(Some(Span::days(1))), ..small("app").patch };
    engine.create(&project(), Create { patch, ..small("app") }, None).await.unwrap();
    let made = rounds(&engine, "app", 3).await;
    assert!(engine.snapshot(&project(), &made[1]).await.unwrap().item.used_at.is_some());
    let forked = Fork {
        name: Some(name("fork")),
        from: ForkFrom::Snapshot(made[1].clone()),
        ..Fork::default()
    };
    engine.fork(&project(), &name("app"), forked, None).await.unwrap();
    engine.shutdown().await;
    drop(engine);

    // Two days pass.
    let store = house.free().await;
    for id in &made {
        let mut snapshot: Snapshot = store.read(id).await.unwrap();
        snapshot.created_at = two_days_before(snapshot.created_at);
        snapshot.used_at = snapshot.used_at.map(two_days_before);
        store.write(&snapshot, Durability::Synced).await.unwrap();
    }
    drop(store);
    let engine = house.open().await;
    let left = until("fewer than 3 snapshots", async || {
        let left = ids(&listed(&engine, of("app")).await);
        (left.len() < 3).then_some(left)
    })
    .await;
    assert_eq!(left, [made[2].clone(), made[1].clone()], "but for those sandboxes stand on");
    assert_eq!(sh(&engine, "fork", "cat /work/round").await.out, "1\n");
    stop(&engine, "fork").await;
    // No sandbox stands on it any more, and it has been used just now.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let used = engine.snapshot(&project(), &made[1]).await.unwrap().item;
    assert!(used.expires_at().unwrap() > Timestamp::now(), "counted anew");
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshots_outlive_their_sandbox_if_that_is_asked_for() {
    let mut house = house!();
    house.settings.housekeeping = Duration::from_millis(50);
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let made = rounds(&engine, "app", 2).await;
    let keep = Delete { snapshots: OnDelete::Keep, ..Delete::default() };
    let kept = engine.delete(&project(), &name("app"), keep, None).await.unwrap().snapshots_kept;
    assert_eq!(kept.len(), 2);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(ids(&listed(&engine, of("app")).await), [made[1].clone(), made[0].clone()]);
    let sized = engine.snapshot(&project(), &made[1]).await.unwrap();
    assert!(sized.own > 0 && sized.freed_if_deleted > 0, "still accounted for: {sized:?}");

    // Another one may have the name; its snapshots are found by it too, and go with it as ever.
    let from = Create { from: Some(made[0].clone()), ..small("app") };
    engine.create(&project(), from, None).await.unwrap();
    assert_eq!(sh(&engine, "app", "cat /work/round").await.out, "0\n");
    let refused = engine.delete_snapshot(&project(), &made[0], false).await;
    assert!(matches!(refused, Err(Error::SnapshotInUse { .. })), "{refused:?}");
    rounds(&engine, "app", 1).await;
    assert_eq!(listed(&engine, of("app")).await.len(), 3);
    engine.delete(&project(), &name("app"), Delete::default(), None).await.unwrap();
    assert_eq!(ids(&listed(&engine, of("app")).await), [made[1].clone(), made[0].clone()]);
    assert_eq!(listed(&engine, with_deleted("app")).await.len(), 3);
    for id in made.iter().rev() {
        let freed = engine.delete_snapshot(&project(), id, false).await.unwrap();
        assert!(freed > 0, "nobody else holds what it added");
    }
    assert_eq!(listed(&engine, of("app")).await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_whose_snapshot_was_deleted_never_starts_from_something_else() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let made = rounds(&engine, "app", 2).await;
    let fork = Fork { name: Some(name("fork")), start: true, ..Fork::default() };
    engine.fork(&project(), &name("app"), fork, None).await.unwrap();
    let refused = engine.delete_snapshot(&project(), &made[1], false).await;
    assert!(matches!(refused, Err(Error::SnapshotInUse { .. })), "{refused:?}");
    engine.delete_snapshot(&project(), &made[1], true).await.unwrap();
    let sandbox = engine.get(&project(), &name("app")).await.unwrap().sandbox;
    assert_eq!((sandbox.current, sandbox.missing), (None, Some(made[1].clone())));
    let gone = |error: &Error| {
        matches!(error, Error::SnapshotGone { snapshot, .. } if *snapshot == made[1])
            && error.kind() == ErrorKind::Gone
    };
    let started = engine.start(&project(), &name("app"), None).await.unwrap_err();
    assert!(gone(&started), "{started}");
    let again = Create { if_exists: sandkeep_core::engine::IfExists::Get, ..small("app") };
    let opened = engine.create(&project(), again, None).await.unwrap_err();
    assert!(gone(&opened), "{opened}");
    let forked = engine.fork(&project(), &name("app"), Fork::default(), None).await.unwrap_err();
    assert!(gone(&forked), "{forked}");
    let named = engine.checkpoint(&project(), &name("app"), labelled("x")).await.unwrap_err();
    assert!(gone(&named), "{named}");
    assert_eq!(engine.get(&project(), &name("app")).await.unwrap().sandbox.phase(), Phase::Stopped);

    // A session that runs on it continues, and leaves a snapshot of its own.
    assert_eq!(sh(&engine, "fork", "cat /work/round").await.out, "1\n");
    let own = stop(&engine, "fork").await;
    assert_eq!(sh(&engine, "fork", "cat /work/round").await.out, "1\n", "and starts from that");
    let sandbox = engine.get(&project(), &name("fork")).await.unwrap().sandbox;
    assert_eq!((sandbox.current, sandbox.missing), (Some(own.id), None));

    engine.rollback(&project(), &name("app"), &made[0], None).await.unwrap();
    assert_eq!(sh(&engine, "app", "cat /work/round").await.out, "0\n");
    let refused = engine.rollback(&project(), &name("app"), &made[1], None).await.unwrap_err();
    assert!(matches!(refused, Error::SnapshotDeleted(_)), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_whose_files_are_lost_is_not_taken_for_one_that_wrote_nothing() {
    use sandkeep_core::driver::Driver as _;
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let made = rounds(&engine, "app", 1).await;
    sh(&engine, "app", "echo lost > /work/round").await;
    let running = engine.get(&project(), &name("app")).await.unwrap().sandbox;
    let open = running.open_layer().cloned().unwrap();
    engine.shutdown().await;
    drop(engine);
    drop(house.free().await);
    for (key, _) in house.driver().survivors().await.unwrap() {
        house.driver().stop(&key).await.unwrap();
    }
    std::fs::remove_dir_all(house.data().join("layers").join(open.as_str())).unwrap();
    let engine = house.open().await;
    let sandbox = engine.get(&project(), &name("app")).await.unwrap().sandbox;
    assert_eq!(sandbox.phase(), Phase::Failed);
    engine.start(&project(), &name("app"), None).await.expect_err("not from something older");
    engine.rollback(&project(), &name("app"), &made[0], None).await.unwrap();
    assert_eq!(sh(&engine, "app", "cat /work/round").await.out, "0\n", "unless that is asked for");
}

#[tokio::test(flavor = "multi_thread")]
async fn starts_that_race_with_a_deletion_run_whole_or_are_refused() {
    let house = house!();
    let engine = house.open().await;
    for round in 0..6 {
        engine.create(&project(), small("app"), None).await.unwrap();
        let id = rounds(&engine, "app", 1).await.remove(0);
        let starter = engine.clone();
        let start = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(round * 2)).await;
            starter.start(&project(), &name("app"), None).await
        });
        engine.delete_snapshot(&project(), &id, true).await.unwrap();
        match start.await.unwrap() {
            Ok(_) => assert_eq!(sh(&engine, "app", "cat /work/round").await.out, "0\n"),
            Err(error) => assert!(matches!(error, Error::SnapshotGone { .. }), "{error}"),
        }
        engine.delete(&project(), &name("app"), Delete::default(), None).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_goes_while_a_manifest_does_not_read() {
    let mut house = house!();
    house.settings.housekeeping = Duration::from_millis(50);
    let engine = house.open().await;
    let opened = engine.create(&project(), small("app"), None).await.unwrap();
    let made = rounds(&engine, "app", 2).await;
    shut(&house, engine).await;
    // Its manifest is not lost, it cannot be read just now.
    let place = house.data().join("sandboxes").join(opened.sandbox.id.as_str());
    let mut hidden = Vec::new();
    for entry in std::fs::read_dir(&place).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            hidden.push((path.clone(), std::fs::read(&path).unwrap()));
            std::fs::write(&path, b"\0\0\0").unwrap();
        }
    }
    assert!(!hidden.is_empty());
    let engine = house.open().await;
    // Long enough for what looks after the house to come by.
    tokio::time::sleep(Duration::from_secs(1)).await;
    for id in &made {
        let kept = engine.snapshot_record(&project(), id).await.unwrap().item;
        assert!(kept.deleted_at.is_none() && !kept.layers.is_empty(), "{kept:?}");
    }
    shut(&house, engine).await;
    for (path, content) in hidden {
        std::fs::write(path, content).unwrap();
    }
    let engine = house.open().await;
    assert_eq!(sh(&engine, "app", "cat /work/round").await.out, "1\n");
}

/// One that keeps nothing by itself, or has never run, is its image. That can be kept as well as anything else.
#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_of_a_sandbox_that_kept_nothing_is_its_image() {
    let house = house!();
    let engine = house.open().await;
    let patch = Patch { persistent: Some(false), ..small("x").patch };
    for (sandbox, start) in [("ran", true), ("never", false)] {
        let request = Create { patch: patch.clone(), start, ..small(sandbox) };
        let made = engine.create(&project(), request, None).await.unwrap().sandbox;
        if start {
            sh(&engine, sandbox, "echo gone > /work/file").await;
            let stopped =
                engine.stop(&project(), &name(sandbox), Stop::default(), None).await.unwrap();
            assert!(stopped.snapshot.is_none(), "it keeps nothing");
        }
        let taken = engine.checkpoint(&project(), &name(sandbox), labelled("first")).await.unwrap();
        let snapshot = taken.item;
        assert_eq!(snapshot.layers, made.image_layers);
        assert_eq!(snapshot.label.as_deref(), Some("first"));
        assert_eq!(snapshot.generation, made.generation + 1);
        // The same again is the same snapshot.
        let again = engine.checkpoint(&project(), &name(sandbox), labelled("first")).await.unwrap();
        assert_eq!(again.item.id, snapshot.id);
        let from = ForkFrom::Snapshot(snapshot.id);
        let fork = Fork { name: Some(name(&format!("{sandbox}-fork"))), from, ..Fork::default() };
        engine.fork(&project(), &name(sandbox), fork, None).await.unwrap();
        let there = sh(&engine, &format!("{sandbox}-fork"), "test -e /work/file").await;
        assert_eq!(there.command.exit_code, Some(1));
        assert_eq!(sh(&engine, sandbox, "true").await.command.exit_code, Some(0));
    }
}
