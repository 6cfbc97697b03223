//! Many callers at once, and what a failure or a deletion must not leave behind.

use std::time::Duration;

use sandkeep_core::db::Page;
use sandkeep_core::engine::{Checkpoint, Delete, Error, Exec, Fork, Stop};
use sandkeep_core::model::{CommandState, Span};
use sandkeep_testkit::house;
use sandkeep_testkit::house::{labelled, name, of, project, sh, small, until};

#[tokio::test(flavor = "multi_thread")]
async fn commands_that_race_with_stops_wake_the_sandbox_again() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let runners: Vec<_> = (0..4)
        .map(|runner| {
            let engine = engine.clone();
            tokio::spawn(async move {
                for round in 0..15 {
                    let line = format!("echo {round} >> /work/log-{runner}");
                    let argv = ["sh", "-c", &line].map(str::to_owned).to_vec();
                    let started = engine
                        .exec(&project(), &name("app"), Exec { argv, ..Exec::default() })
                        .await;
                    let mut events = started.expect("a stop is waited for, not failed on").events;
                    while events.next().await.is_some() {}
                }
            })
        })
        .collect();
    for _ in 0..8 {
        engine.stop(&project(), &name("app"), Stop::default(), None).await.unwrap();
        tokio::time::sleep(Duration::from_millis(40)).await;
    }
    for runner in runners {
        runner.await.unwrap();
    }
    let alive = sh(&engine, "app", "echo alive").await;
    assert_eq!(alive.out, "alive\n");
    engine.delete(&project(), &name("app"), Delete::default(), None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_is_not_there_is_on_no_record() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    let missing = Exec { argv: vec!["no-such".to_owned()], ..Exec::default() };
    engine.exec(&project(), &name("app"), missing).await.expect_err("there is no such program");
    assert_eq!(
        engine.commands(&project(), &name("app"), &Page::default()).await.unwrap().items,
        []
    );

    // Deleting it under a running command leaves nothing of either.
    let long = Exec {
        argv: ["sleep", "1000"].map(str::to_owned).to_vec(),
        detach: true,
        ..Exec::default()
    };
    let running = engine.exec(&project(), &name("app"), long).await.unwrap().command;
    assert_eq!(running.state, CommandState::Running);
    engine.delete(&project(), &name("app"), Delete::default(), None).await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let left: Vec<_> = std::fs::read_dir(house.data().join("sandboxes")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_newest_snapshots_are_the_ones_that_are_kept() {
    let house = house!();
    let engine = house.open().await;
    let mut request = small("app");
    request.patch.keep_last = Some(Some(2));
    engine.create(&project(), request, None).await.unwrap();
    // A process alive makes checkpoints copies, whose layers are younger than the session's own.
    let argv = ["sleep", "1000"].map(str::to_owned).to_vec();
    engine
        .exec(&project(), &name("app"), Exec { argv, detach: true, ..Exec::default() })
        .await
        .unwrap();
    let mut last = Vec::new();
    for round in 0..3 {
        sh(&engine, "app", &format!("echo {round} > /work/round")).await;
        last.push(
            engine
                .checkpoint(&project(), &name("app"), Checkpoint::default())
                .await
                .unwrap()
                .item
                .id,
        );
    }
    sh(&engine, "app", "echo end > /work/round").await;
    last.push(
        engine
            .stop(&project(), &name("app"), Stop::default(), None)
            .await
            .unwrap()
            .snapshot
            .unwrap()
            .item
            .id,
    );
    let kept = until("at most 2 snapshots", async || {
        let page = engine.snapshots(&project(), of("app"), &Page::default()).await.unwrap();
        (page.items.len() <= 2)
            .then(|| page.items.into_iter().map(|sized| sized.item.id).collect::<Vec<_>>())
    })
    .await;
    assert_eq!(kept, [last[3].clone(), last[2].clone()], "newest first");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_a_fork_stands_on_outlives_its_sandbox() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    sh(&engine, "app", "echo kept > /work/file").await;
    let fork = Fork { name: Some(name("fork")), ..Fork::default() };
    engine.fork(&project(), &name("app"), fork, None).await.unwrap();
    let kept = engine
        .delete(&project(), &name("app"), Delete::default(), None)
        .await
        .unwrap()
        .snapshots_kept;
    assert_eq!(kept.len(), 1);
    assert!(matches!(
        engine.delete_snapshot(&project(), &kept[0], false).await,
        Err(Error::SnapshotInUse { .. })
    ));
    assert_eq!(sh(&engine, "fork", "cat /work/file").await.out, "kept\n");
    // A label on it is the fork's own, on the same files.
    engine.stop(&project(), &name("fork"), Stop::default(), None).await.unwrap();
    let mine = engine.checkpoint(&project(), &name("fork"), labelled("mine")).await.unwrap().item;
    assert_eq!(mine.sandbox_name, name("fork"));
    assert_eq!(engine.snapshot(&project(), &kept[0]).await.unwrap().item.label, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_without_a_limit_is_not_shortened_by_extending_it() {
    let house = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    assert_eq!(
        engine.extend(&project(), &name("app"), Span::seconds(60), None).await.unwrap().deadline,
        None
    );
}
