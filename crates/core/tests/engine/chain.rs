//! A session with a checkpoint at every step: every one of them can be started, however many there are.
//!
//! `SANDKEEP_CHECKPOINTS=10000` makes it a long run; it prints what a checkpoint took early and late.

use std::time::{Duration, Instant};

use sandkeep_core::db::Page;
use sandkeep_core::engine::{Checkpoint, Create, Delete, Engine, Fork, ForkFrom, Stop};
use sandkeep_core::model::{FORMAT, LayerId, Patch, Snapshot, SnapshotId};
use sandkeep_core::store::{Durability, SealOptions};
use sandkeep_testkit::house;
use sandkeep_testkit::house::{detached, name, of, ok, project, small, until};
use sandkeep_testkit::victim;

/// What Linux before 6.8 can mount.
const OLD_KERNEL: usize = 110;
/// How many files there are at a time.
const WINDOW: usize = 50;

fn count(usual: usize) -> usize {
    std::env::var("SANDKEEP_CHECKPOINTS").ok().map_or(usual, |count| count.parse().unwrap())
}

/// One step: a file that is written over, one that is new, and one that goes.
async fn step(engine: &Engine, n: usize) {
    let mut line = format!("echo {n} > /work/n; mkdir -p /work/log; echo {n} > /work/log/{n}");
    if n >= WINDOW {
        line.push_str(&format!("; rm -f /work/log/{}", n - WINDOW));
    }
    ok(engine, "app", &line).await;
}

/// Starts a fork from a snapshot and looks at what is in it.
async fn resume(engine: &Engine, snapshot: &SnapshotId, n: usize) {
    let fork = Fork {
        name: Some(name("fork")),
        from: ForkFrom::Snapshot(snapshot.clone()),
        start: true,
        ..Fork::default()
    };
    engine.fork(&project(), &name("app"), fork, None).await.unwrap();
    let seen = ok(engine, "fork", "cat /work/n; ls /work/log | sort -n | tr '\\n' ' '").await;
    let first = (n + 1).saturating_sub(WINDOW);
    let names: Vec<String> = (first..=n).map(|n| n.to_string()).collect();
    assert_eq!(seen.trim(), format!("{n}\n{}", names.join(" ")), "snapshot {n}");
    engine.delete(&project(), &name("fork"), Delete::default(), None).await.unwrap();
}

/// The same for one of which it is not known how far it got: what is in it fits together.
#[cfg(feature = "failpoints")]
async fn resume_any(engine: &Engine, snapshot: &SnapshotId, what: &str) {
    let fork = Fork {
        name: Some(name("fork")),
        from: ForkFrom::Snapshot(snapshot.clone()),
        start: true,
        ..Fork::default()
    };
    engine.fork(&project(), &name("app"), fork, None).await.unwrap();
    let seen =
        ok(engine, "fork", "cat /work/n /work/log/$(cat /work/n); ls /work/log | wc -l").await;
    let words: Vec<&str> = seen.split_whitespace().collect();
    assert_eq!(words[0], words[1], "{what}: {seen}");
    let (n, count): (usize, usize) = (words[0].parse().unwrap(), words[2].parse().unwrap());
    assert!(count <= WINDOW && (n < WINDOW || count >= WINDOW - 4), "{what}: {seen}");
    engine.delete(&project(), &name("fork"), Delete::default(), None).await.unwrap();
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

/// Takes `count` checkpoints, and resumes each tenth.
async fn checkpoints(engine: &Engine, count: usize, what: &str) {
    let mut times = Vec::new();
    let mut longest = 0;
    for n in 0..count {
        step(engine, n).await;
        let begun = Instant::now();
        let taken = engine.checkpoint(&project(), &name("app"), Checkpoint::default()).await;
        let snapshot = taken.unwrap_or_else(|error| panic!("checkpoint {n}: {error}")).item;
        times.push(begun.elapsed());
        longest = longest.max(snapshot.layers.len());
        if n % 10 == 9 {
            resume(engine, &snapshot.id, n).await;
        }
    }
    assert!(longest < OLD_KERNEL, "{what}: {longest} layers");
    let part = (count / 5).max(1);
    let (early, late) = (times[..part].to_vec(), times[count - part..].to_vec());
    eprintln!(
        "{count} checkpoints, {what}: p50 {:?} early, {:?} late; at most {longest} layers",
        median(early),
        median(late),
    );
    // Old ones, whose layers were merged for others since, are what they were.
    let all = engine.snapshots(&project(), of("app"), &Page::all()).await.unwrap().items;
    assert_eq!(all.len(), count);
    for n in [0, count / 3, count / 2] {
        let old = &all[count - 1 - n].item;
        resume(engine, &old.id, n).await;
    }
}

fn app() -> Create {
    let patch = Patch { keep_last: Some(None), ..small("app").patch };
    Create { patch, ..small("app") }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_checkpoint_of_an_idle_session_can_be_started() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), app(), None).await.unwrap();
    let count = count(240);
    checkpoints(&engine, count, "idle").await;
    // The session itself continues, across a restart and a stop.
    let engine = house.reopen(engine).await;
    step(&engine, count).await;
    let stopped = engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
    resume(&engine, &stopped.snapshot.unwrap().item.id, count).await;
    assert_eq!(ok(&engine, "app", "cat /work/n").await.trim(), count.to_string());
    engine.shutdown().await;
}

/// A snapshot that is taken while layers of the one before are merged is merged afterwards, without
/// another request.
#[tokio::test(flavor = "multi_thread")]
async fn a_chain_that_grew_during_a_merge_is_merged_too() {
    let mut house = house!();
    house.settings.chain_limit = 4;
    let engine = house.open().await;
    engine.create(&project(), app(), None).await.unwrap();
    let stop = async || engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
    for n in 0..5 {
        // Enough names that their merge is slowed down.
        let line = format!("mkdir /work/{n}; cd /work/{n}; for i in $(seq 3000); do : > $i; done");
        ok(&engine, "app", &line).await;
        stop().await;
    }
    for n in 5..20 {
        ok(&engine, "app", &format!("echo {n} > /work/{n}")).await;
        stop().await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    until("a chain of at most 4 layers", async || {
        let newest = Page { limit: 1, ..Page::default() };
        let newest = engine.snapshots(&project(), of("app"), &newest).await.unwrap();
        // Those of the chain and the image's.
        (newest.items[0].item.layers.len() <= 5).then_some(())
    })
    .await;
    assert_eq!(ok(&engine, "app", "ls /work | wc -l; ls /work/3 | wc -l").await, "20\n3000\n");
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_checkpoint_of_a_busy_session_can_be_started() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), app(), None).await.unwrap();
    detached(&engine, "app", &["sleep", "1000000"]).await;
    let count = count(160);
    checkpoints(&engine, count, "busy").await;
    let engine = house.reopen(engine).await;
    step(&engine, count).await;
    let taken = engine.checkpoint(&project(), &name("app"), Checkpoint::default()).await.unwrap();
    resume(&engine, &taken.item.id, count).await;
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_checkpoint_waits_for_a_chain_that_is_too_long() {
    let mut house = house!();
    // Nothing is merged in the background: only the bound is left.
    house.settings.chain_limit = 8;
    house.settings.chain_bound = 10;
    let engine = house.open().await;
    engine.create(&project(), app(), None).await.unwrap();
    for busy in [false, true] {
        if busy {
            detached(&engine, "app", &["sleep", "1000000"]).await;
        }
        for n in 0..30 {
            step(&engine, n).await;
            let taken = engine.checkpoint(&project(), &name("app"), Checkpoint::default()).await;
            let snapshot = taken.unwrap().item;
            assert!(snapshot.layers.len() <= 12, "{} layers", snapshot.layers.len());
            if n % 10 == 9 {
                resume(&engine, &snapshot.id, n).await;
            }
        }
        ok(&engine, "app", "rm -r /work/log").await;
    }
    engine.shutdown().await;
}

/// What the process that dies does. Without a house it is not that process and does nothing.
#[cfg(feature = "failpoints")]
#[tokio::test(flavor = "multi_thread")]
async fn victim() {
    let Some(house) = sandkeep_testkit::house::House::lent() else { return };
    let engine = house.open().await;
    let from: usize = std::env::var("SANDKEEP_TEST_DEED").unwrap().parse().unwrap();
    for n in from..from + 100 {
        step(&engine, n).await;
        let _ = engine.checkpoint(&project(), &name("app"), Checkpoint::default()).await.unwrap();
    }
    engine.shutdown().await;
}

#[cfg(feature = "failpoints")]
#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_dies_over_a_merge_loses_no_checkpoint() {
    let house = house!();
    let mut engine = house.open().await;
    engine.create(&project(), app(), None).await.unwrap();
    let mut from = 0;
    for point in ["store.compact.linked", "compaction.merged", "compaction.done"] {
        engine = house.cut(engine, victim!(), &from.to_string(), point).await;
        // A step may have been made that no checkpoint was taken of.
        from = ok(&engine, "app", "cat /work/n").await.trim().parse::<usize>().unwrap();
        let all = engine.snapshots(&project(), of("app"), &Page::all()).await.unwrap().items;
        assert!(all.len() > 20, "{point}: {} snapshots", all.len());
        for old in all.iter().step_by(7) {
            resume_any(&engine, &old.item.id, point).await;
        }
        // Taken again: the next ones continue from what a file says.
        from += 1;
        step(&engine, from).await;
        engine.checkpoint(&project(), &name("app"), Checkpoint::default()).await.unwrap();
        from += 1;
    }
    engine.shutdown().await;
}

/// Chains of an earlier version, which were acknowledged and could not be started.
#[tokio::test(flavor = "multi_thread")]
async fn a_chain_longer_than_the_kernel_can_stack_starts() {
    let mut house = house!();
    let engine = house.open().await;
    engine.create(&project(), app(), None).await.unwrap();
    step(&engine, 0).await;
    let stopped = engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
    let snapshot = stopped.snapshot.unwrap().item;
    engine.shutdown().await;
    drop(engine);
    for (layers, merged) in [(620, true), (130, false)] {
        let long = lengthen(&house, &snapshot, layers).await;
        // As many as the kernel takes are mounted as they are.
        (house.settings.chain_limit, house.settings.chain_bound) =
            if merged { (24, 64) } else { (1000, 1000) };
        let engine = house.open_when_free().await;
        let fork = Fork {
            name: Some(name("fork")),
            from: ForkFrom::Snapshot(long.clone()),
            start: true,
            ..Fork::default()
        };
        engine.fork(&project(), &name("app"), fork, None).await.unwrap();
        let seen = ok(&engine, "fork", "cat /work/n /work/top; ls /work/deep | wc -l").await;
        assert_eq!(
            seen.split_whitespace().collect::<Vec<_>>(),
            ["0", &format!("{}", layers - 1), &layers.to_string()]
        );
        let all = engine.snapshots(&project(), of("app"), &Page::all()).await.unwrap().items;
        let now = all.into_iter().find(|sized| sized.item.id == long).unwrap().item;
        assert_eq!(now.layers.len() < OLD_KERNEL, merged, "{} layers", now.layers.len());
        engine.delete(&project(), &name("fork"), Delete::default(), None).await.unwrap();
        engine.shutdown().await;
        drop(engine);
    }
}

/// Adds a number of layers to a snapshot, as a snapshot of its own.
async fn lengthen(
    house: &sandkeep_testkit::house::House,
    of: &Snapshot,
    count: usize,
) -> SnapshotId {
    let store = house.free().await;
    let mut layers: Vec<LayerId> = of.layers.clone();
    for n in 0..count {
        let open = store.begin(&layers[..1]).await.unwrap();
        let work = store.diff_dir(&open).join("work");
        std::fs::create_dir_all(work.join("deep")).unwrap();
        std::fs::write(work.join("top"), format!("{n}\n")).unwrap();
        std::fs::write(work.join("deep").join(n.to_string()), "").unwrap();
        store.seal(&open, &SealOptions::default()).await.unwrap();
        layers.insert(0, open);
    }
    let id = SnapshotId::of_layer(&layers[0]);
    let long = Snapshot { format: FORMAT, id: id.clone(), layers, ..of.clone() };
    store.write(&long, Durability::Synced).await.unwrap();
    id
}
