//! What was deleted can be had back for a while, and a clock that jumps deletes nothing.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use sandkeep_core::engine::{
    Clock, Create, DamageKind, Delete, Engine, Error, Fork, SnapshotOnStop, Stop,
};
use sandkeep_core::model::{Patch, Span, Timestamp, now};
use sandkeep_testkit::house;
use sandkeep_testkit::house::{name, of, project, sh, small};

/// A clock that stands where it is put.
#[derive(Debug)]
struct TestClock(Mutex<(Timestamp, Duration)>);

impl TestClock {
    fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new((now(), Duration::ZERO))))
    }

    /// Lets time pass, and the wall clock jump besides.
    fn pass(&self, time: Duration, jump: jiff::SignedDuration) {
        let mut at = self.0.lock().unwrap();
        let passed = jiff::SignedDuration::try_from(time).unwrap();
        *at = (at.0.checked_add(passed).unwrap().checked_add(jump).unwrap(), at.1 + time);
    }
}

impl Clock for TestClock {
    fn wall(&self) -> Timestamp {
        self.0.lock().unwrap().0
    }

    fn monotonic(&self) -> Duration {
        self.0.lock().unwrap().1
    }
}

const HOUR: Duration = Duration::from_secs(3600);
const NO_JUMP: jiff::SignedDuration = jiff::SignedDuration::ZERO;

async fn stop(engine: &Engine, sandbox: &str) {
    let stop = Stop { snapshot: SnapshotOnStop::Always, ..Stop::default() };
    engine.stop(&project(), &name(sandbox), stop, None).await.unwrap();
}

/// Some rounds of housekeeping.
async fn rounds() {
    tokio::time::sleep(Duration::from_millis(600)).await;
}

async fn exists(engine: &Engine, sandbox: &str) -> bool {
    engine.get(&project(), &name(sandbox)).await.is_ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_that_jumps_ahead_deletes_nothing() {
    let mut house = house!();
    let clock = TestClock::new();
    house.settings.clock = clock.clone();
    house.settings.housekeeping = Duration::from_millis(50);
    house.settings.trash_grace = HOUR;
    house.settings.clock_settle = HOUR / 4;
    let engine = house.open().await;
    let patch = Patch {
        expires: Some(Span::days(30)),
        snapshot_expires: Some(Some(Span::days(7))),
        ..small("app").patch
    };
    engine.create(&project(), Create { patch, ..small("app") }, None).await.unwrap();
    for round in 0..2 {
        sh(&engine, "app", &format!("echo {round} > /work/file")).await;
        stop(&engine, "app").await;
    }
    clock.pass(HOUR, NO_JUMP);
    rounds().await;

    let days = jiff::SignedDuration::from_hours(90 * 24);
    clock.pass(Duration::from_secs(35), days);
    rounds().await;
    assert!(exists(&engine, "app").await);
    let jumped = |engine: &Engine| {
        engine.damage().iter().any(|damage| damage.kind == DamageKind::ClockJumped)
    };
    assert!(jumped(&engine), "it is reported");
    clock.pass(Duration::from_secs(60), -days);
    rounds().await;
    assert!(exists(&engine, "app").await);
    clock.pass(HOUR, NO_JUMP);
    rounds().await;
    assert!(!jumped(&engine), "it is over");
    assert!(exists(&engine, "app").await);
    let snapshots = engine.snapshots(&project(), of("app"), &Default::default()).await.unwrap();
    assert_eq!(snapshots.items.len(), 2, "no snapshot expired either");

    // A clock that is wrong for good is believed in the end, and what expires by it can be had back.
    clock.pass(Duration::from_secs(1), days);
    rounds().await;
    assert!(exists(&engine, "app").await);
    clock.pass(HOUR / 2, NO_JUMP);
    for _ in 0..100 {
        if !exists(&engine, "app").await {
            break;
        }
        rounds().await;
    }
    let refused = engine.get(&project(), &name("app")).await.unwrap_err();
    assert!(matches!(&refused, Error::NoSandbox(gone) if gone.trashed.is_some()), "{refused}");
    assert!(refused.to_string().contains("expired"), "{refused}");
    // The wall clock says that the grace period is over; this daemon has not seen it pass.
    clock.pass(HOUR / 2, days);
    rounds().await;
    let items = engine.trash(Some(&project()));
    assert!(items.len() == 1 && items[0].expired, "{items:?}");
    engine.restore(&project(), "app", None).await.unwrap();
    assert_eq!(sh(&engine, "app", "cat /work/file").await.out, "1\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_sandbox_comes_back_whole() {
    let mut house = house!();
    let clock = TestClock::new();
    house.settings.clock = clock.clone();
    house.settings.housekeeping = Duration::from_millis(50);
    house.settings.trash_grace = HOUR;
    house.settings.clock_settle = HOUR / 4;
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    for round in 0..2 {
        sh(&engine, "app", &format!("echo {round} > /work/file")).await;
        stop(&engine, "app").await;
    }
    let before = engine.snapshots(&project(), of("app"), &Default::default()).await.unwrap().items;
    let forked = Fork { name: Some(name("fork")), ..Fork::default() };
    engine.fork(&project(), &name("app"), forked, None).await.unwrap();
    engine.delete(&project(), &name("app"), Delete::default(), None).await.unwrap();
    // Its name is free, and somebody takes it.
    engine.create(&project(), small("app"), None).await.unwrap();
    let taken = engine.restore(&project(), "app", None).await.unwrap_err();
    assert!(matches!(taken, Error::NameTaken(_)), "{taken}");

    let engine = house.reopen(engine).await;
    rounds().await;
    let back = engine.restore(&project(), "app", Some(name("back"))).await.unwrap();
    assert_eq!(sh(&engine, "back", "cat /work/file").await.out, "1\n");
    assert!(engine.trash(None).is_empty());
    for snapshot in &before {
        let found = engine.snapshot(&project(), &snapshot.item.id).await.unwrap().item;
        assert_eq!((found.layers, found.sandbox), (snapshot.item.layers.clone(), back.id.clone()));
        assert!(found.sandbox_deleted_at.is_none());
    }
    assert_eq!(sh(&engine, "fork", "cat /work/file").await.out, "1\n");
    let engine = house.reopen(engine).await;
    rounds().await;
    assert!(engine.damage().is_empty(), "{:?}", engine.damage());

    // And then it goes for good, when this daemon has seen the grace period pass.
    engine.delete(&project(), &name("back"), Delete::default(), None).await.unwrap();
    clock.pass(HOUR / 2, NO_JUMP);
    rounds().await;
    assert_eq!(engine.trash(None).len(), 1);
    clock.pass(HOUR, NO_JUMP);
    for _ in 0..50 {
        if engine.trash(None).is_empty() {
            break;
        }
        rounds().await;
    }
    assert!(engine.trash(None).is_empty());
    assert_eq!(sh(&engine, "fork", "cat /work/file").await.out, "1\n", "what it stands on stays");
    let gone = engine.restore(&project(), "back", None).await.unwrap_err();
    assert!(matches!(gone, Error::NotInTrash(_)), "{gone}");
}
