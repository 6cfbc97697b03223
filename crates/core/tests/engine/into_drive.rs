//! Chosen files of a fork get into a drive.

use std::collections::BTreeMap;

use sandkeep_core::engine::{
    Create, CreateDrive, Delete, Engine, Error, Fork, PromoteIntoDrive, PromotedIntoDrive, Stop,
};
use sandkeep_core::model::{Drive, GuardPatch, Mount, MountMode, Mounts, OnJunk, Patch, Size};
use sandkeep_testkit::house;
use sandkeep_testkit::house::{name, ok, project, small};

async fn make(engine: &Engine, drive: &str, max_size: Option<Size>) {
    let request = CreateDrive { name: name(drive), max_size, notes: BTreeMap::new() };
    engine.create_drive(&project(), request).await.unwrap();
}

async fn drive(engine: &Engine, drive: &str) -> Drive {
    engine.drive(&project(), &name(drive)).await.unwrap()
}

async fn stop(engine: &Engine, sandbox: &str) {
    engine.stop(&project(), &name(sandbox), Stop::default(), None).await.unwrap();
}

async fn fork(engine: &Engine, source: &str, fork: &str) {
    let request = Fork { name: Some(name(fork)), ..Fork::default() };
    engine.fork(&project(), &name(source), request, None).await.unwrap();
}

/// A sandbox with a fork that runs and changed something.
async fn app_and_try(engine: &Engine) {
    engine.create(&project(), small("app"), None).await.unwrap();
    ok(engine, "app", "mkdir -p /srv/out; echo old > /srv/out/old; echo base > /srv/base").await;
    stop(engine, "app").await;
    fork(engine, "app", "try").await;
    let line = "cd /srv/out; echo new > a.whl; ln a.whl b.whl; rm old; echo log > log; echo more >> /srv/base";
    ok(engine, "try", line).await;
}

fn wish(drive: &str, only: &[&str]) -> PromoteIntoDrive {
    PromoteIntoDrive {
        drive: name(drive),
        path: String::new(),
        only: only.iter().map(|glob| (*glob).to_owned()).collect(),
        expect_generation: None,
        dry_run: false,
    }
}

async fn put(
    engine: &Engine,
    sandbox: &str,
    request: PromoteIntoDrive,
) -> Result<PromotedIntoDrive, Error> {
    engine.promote_into_drive(&project(), &name(sandbox), request).await
}

async fn refusal(engine: &Engine, sandbox: &str, request: PromoteIntoDrive) -> String {
    put(engine, sandbox, request).await.map(drop).unwrap_err().code().to_owned()
}

/// A sandbox that has the drive at `/d`.
async fn reader(engine: &Engine, sandbox: &str, drive: &str, mode: MountMode) {
    let mount = Mount { drive: name(drive), mode };
    let mut request: Create = small(sandbox);
    request.patch.mounts = Some(Mounts::from([("/d".to_owned(), mount)]));
    engine.create(&project(), request, None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn chosen_files_get_into_a_drive() {
    let house = house!();
    let engine = house.open().await;
    app_and_try(&engine).await;
    make(&engine, "wheels", None).await;
    let dry = PromoteIntoDrive { dry_run: true, ..wish("wheels", &["*.whl"]) };
    let dry = put(&engine, "try", dry).await.unwrap();
    assert_eq!((dry.outcome.counts.added, dry.drive.generation), (4, 0), "two with directories");
    assert!(!drive(&engine, "wheels").await.is_initialised());

    let done = put(&engine, "try", wish("wheels", &["*.whl"])).await.unwrap();
    assert_eq!((done.outcome.counts.added, done.drive.generation), (4, 1));
    assert!(done.snapshot.is_some(), "what it was is a snapshot");
    let again = put(&engine, "try", wish("wheels", &["*.whl"])).await.unwrap();
    assert_eq!((again.outcome.counts.added, again.drive.generation), (0, 1), "once is enough");
    // Neither the fork nor its origin are other ones for it.
    assert_eq!(ok(&engine, "try", "ls /srv/out").await, "a.whl\nb.whl\nlog\n");
    assert_eq!(ok(&engine, "app", "cat /srv/out/old").await, "old\n");

    // Below a directory, and with what was removed.
    let below = PromoteIntoDrive { path: "/by/try/".to_owned(), ..wish("wheels", &["/srv"]) };
    let done = put(&engine, "try", below).await.unwrap();
    assert_eq!((done.outcome.counts.added, done.outcome.counts.removed), (8, 0));
    reader(&engine, "user", "wheels", MountMode::ReadWrite).await;
    let seen = "cd /d; find . | sort; cat srv/out/a.whl; stat -c %h srv/out/a.whl; stat -c %a .";
    assert_eq!(
        ok(&engine, "user", seen).await,
        ".\n./by\n./by/try\n./by/try/srv\n./by/try/srv/base\n./by/try/srv/out\n\
         ./by/try/srv/out/a.whl\n./by/try/srv/out/b.whl\n./by/try/srv/out/log\n./srv\n./srv/out\n\
         ./srv/out/a.whl\n./srv/out/b.whl\nnew\n2\n777\n"
    );
    // A session that writes to it is not written over.
    ok(&engine, "user", "echo own > /d/srv/out/old; rm -r /d/by").await;
    assert_eq!(refusal(&engine, "try", wish("wheels", &["/srv"])).await, "drive_attached");
    stop(&engine, "user").await;
    assert_eq!(drive(&engine, "wheels").await.generation, 3);
    let done = put(&engine, "try", wish("wheels", &["/srv/out"])).await.unwrap();
    assert_eq!((done.outcome.counts.added, done.outcome.counts.removed), (1, 1));
    // A session that only reads it keeps what it began with, and blocks nothing.
    reader(&engine, "watcher", "wheels", MountMode::Snapshot).await;
    assert_eq!(ok(&engine, "watcher", "ls /d/srv/out").await, "a.whl\nb.whl\nlog\n");
    ok(&engine, "try", "echo newer > /srv/out/a.whl").await;
    put(&engine, "try", wish("wheels", &["*.whl"])).await.unwrap();
    assert_eq!(ok(&engine, "watcher", "cat /d/srv/out/a.whl").await, "new\n");
    stop(&engine, "watcher").await;
    assert_eq!(ok(&engine, "watcher", "cat /d/srv/out/a.whl").await, "newer\n");
    let engine = house.reopen(engine).await;
    assert_eq!(drive(&engine, "wheels").await.generation, 5);
    drop(engine);
    let report = house.free().await.fsck().await.unwrap();
    assert!(!report.is_broken(), "{report:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_must_not_get_into_a_drive_is_refused_and_changes_nothing() {
    let house = house!();
    let engine = house.open().await;
    app_and_try(&engine).await;
    make(&engine, "data", Some(Size(4 << 20))).await;
    let expect = |generation| PromoteIntoDrive {
        expect_generation: Some(generation),
        ..wish("data", &["*.whl"])
    };
    assert_eq!(refusal(&engine, "try", expect(1)).await, "generation_mismatch");
    assert_eq!(put(&engine, "try", expect(0)).await.unwrap().drive.generation, 1);
    // A caller that got no answer asks again.
    assert_eq!(put(&engine, "try", expect(0)).await.unwrap().drive.generation, 1);
    ok(&engine, "try", "echo other > /srv/out/a.whl").await;
    assert_eq!(refusal(&engine, "try", expect(0)).await, "generation_mismatch");

    for (bad, code) in [
        (wish("data", &[]), "invalid"),
        (wish("data", &[""]), "invalid"),
        (wish("none", &["/srv"]), "drive_not_found"),
        (PromoteIntoDrive { path: "a/../..".to_owned(), ..wish("data", &["/srv"]) }, "invalid"),
        (PromoteIntoDrive { path: "x".repeat(300), ..wish("data", &["/srv"]) }, "invalid"),
    ] {
        let told = refusal(&engine, "try", bad.clone()).await;
        assert_eq!(told, code, "{bad:?}");
    }
    ok(&engine, "try", "head -c 5000000 /dev/urandom > /srv/big").await;
    assert_eq!(refusal(&engine, "try", wish("data", &["/srv/big"])).await, "disk_limit");

    // Where a directory of others would have to make way.
    reader(&engine, "user", "data", MountMode::ReadWrite).await;
    ok(&engine, "user", "cd /d/srv/out; mkdir log; echo own > log/own").await;
    stop(&engine, "user").await;
    let refused = put(&engine, "try", wish("data", &["/srv/out"])).await.map(drop).unwrap_err();
    assert_eq!(refused.code(), "merge_conflicts");
    assert!(
        refused.to_string().contains("/srv/out/log (the drive has a directory there)"),
        "{refused}"
    );
    assert_eq!(drive(&engine, "data").await.generation, 2);

    // The guard of the fork decides. What is large may go into a drive, which is for that.
    let guard = GuardPatch {
        junk: Some(OnJunk::PromoteOrDrop),
        large: Some(Size(1 << 20)),
        ..GuardPatch::default()
    };
    ok(&engine, "try", "rm /srv/big; head -c 1500000 /dev/urandom > /srv/large").await;
    stop(&engine, "try").await;
    engine.update(&project(), &name("try"), Patch { guard, ..Patch::default() }).await.unwrap();
    put(&engine, "try", wish("data", &["/srv/large"])).await.unwrap();

    // Nothing is made of a sandbox or a drive that is gone.
    engine.delete_drive(&project(), &name("data")).await.unwrap();
    assert_eq!(refusal(&engine, "try", wish("data", &["/srv"])).await, "drive_not_found");
    engine.delete(&project(), &name("try"), Delete::default(), None).await.unwrap();
    make(&engine, "data", None).await;
    assert_eq!(refusal(&engine, "try", wish("data", &["/srv"])).await, "sandbox_not_found");
    engine.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_at_once_both_get_there() {
    let house = house!();
    let engine = house.open().await;
    app_and_try(&engine).await;
    stop(&engine, "try").await;
    fork(&engine, "app", "other").await;
    ok(&engine, "other", "echo other > /srv/out/c.whl").await;
    stop(&engine, "other").await;
    make(&engine, "wheels", None).await;
    let (one, two) = tokio::join!(
        put(&engine, "try", wish("wheels", &["*.whl"])),
        put(&engine, "other", wish("wheels", &["*.whl"]))
    );
    let generations = [one.unwrap().drive.generation, two.unwrap().drive.generation];
    assert!(generations == [1, 2] || generations == [2, 1], "{generations:?}");
    reader(&engine, "user", "wheels", MountMode::Snapshot).await;
    assert_eq!(ok(&engine, "user", "ls /d/srv/out").await, "a.whl\nb.whl\nc.whl\n");
    // With a generation that both expect, one wins.
    for sandbox in ["try", "other"] {
        ok(&engine, sandbox, "date +%N > /srv/out/d.whl").await;
        stop(&engine, sandbox).await;
    }
    let second = || PromoteIntoDrive { expect_generation: Some(2), ..wish("wheels", &["*.whl"]) };
    let (one, two) = tokio::join!(put(&engine, "try", second()), put(&engine, "other", second()));
    let codes = [one, two].map(|done| done.map(drop).map_err(|error| error.code().to_owned()));
    let lost = codes.iter().filter(|code| code.as_ref().is_err()).count();
    assert_eq!(lost, 1, "{codes:?}");
    assert!(codes.contains(&Err("generation_mismatch".to_owned())), "{codes:?}");
    engine.shutdown().await;
}

#[cfg(feature = "failpoints")]
mod crash {
    use sandkeep_testkit::house::House;
    use sandkeep_testkit::victim;

    use super::*;

    /// What the process that dies does. Without a house it is not that process and does nothing.
    #[tokio::test(flavor = "multi_thread")]
    async fn victim() {
        let Some(house) = House::lent() else { return };
        let engine = house.open().await;
        put(&engine, "try", wish("wheels", &["*.whl"])).await.unwrap();
        engine.shutdown().await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_promotion_that_died_is_completed_by_asking_again() {
        let house = house!();
        let mut engine = house.open().await;
        app_and_try(&engine).await;
        stop(&engine, "try").await;
        make(&engine, "wheels", None).await;
        for (point, made) in
            [("drive_promote.captured", 0), ("drive_promote.built", 0), ("drive_promote.kept", 1)]
        {
            engine = house.cut(engine, victim!(), "promote", point).await;
            assert_eq!(drive(&engine, "wheels").await.generation, made, "{point}");
        }
        let done = put(&engine, "try", wish("wheels", &["*.whl"])).await.unwrap();
        assert_eq!(done.drive.generation, 1);
        reader(&engine, "user", "wheels", MountMode::ReadWrite).await;
        assert_eq!(ok(&engine, "user", "cat /d/srv/out/b.whl").await, "new\n");
        engine.shutdown().await;
    }
}
