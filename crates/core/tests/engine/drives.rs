//! Drives on the real driver: what outlives a sandbox, who may write, and what is never lost.

use std::collections::BTreeMap;
use std::time::Duration;

use sandkeep_core::db::{By, Direction, Order, Page};
use sandkeep_core::driver::Driver as _;
use sandkeep_core::engine::{
    Checkpoint, Create, CreateDrive, Delete, Engine, Error, ErrorKind, Exec, Fork, Stop,
};
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_core::model::{
    Class, MachineKey, Mount, MountMode, Mounts, Patch, SessionEnd, Size, SnapshotKind,
};
use sandkeep_testkit::house;
use sandkeep_testkit::house::{House, name, project, sh, small};

const RW: MountMode = MountMode::ReadWrite;
const SNAPSHOT: MountMode = MountMode::Snapshot;

fn wish(text: &str) -> CreateDrive {
    CreateDrive { name: name(text), max_size: None, notes: BTreeMap::new() }
}

async fn make(engine: &Engine, text: &str) {
    let (drive, made) = engine.create_drive(&project(), wish(text)).await.unwrap();
    assert!(made && !drive.is_initialised() && drive.attached.is_none());
}

fn mounts(of: &[(&str, &str, MountMode)]) -> Mounts {
    let mount = |drive: &str, mode| Mount { drive: name(drive), mode };
    of.iter().map(|(path, drive, mode)| ((*path).to_owned(), mount(drive, *mode))).collect()
}

fn with(sandbox: &str, of: &[(&str, &str, MountMode)]) -> Create {
    let mut request = small(sandbox);
    request.patch.mounts = Some(mounts(of));
    request
}

async fn run(engine: &Engine, sandbox: &str, of: &[(&str, &str, MountMode)]) {
    engine.create(&project(), with(sandbox, of), None).await.unwrap();
}

async fn stop(engine: &Engine, sandbox: &str) {
    engine.stop(&project(), &name(sandbox), Stop::default(), None).await.unwrap();
}

async fn refusal(engine: &Engine, request: Create) -> Error {
    let error = engine.create(&project(), request.clone(), None).await;
    let error = error.map(drop).expect_err(&format!("{request:?}"));
    let gone = engine.get(&project(), &request.name.unwrap()).await;
    assert!(matches!(gone, Err(Error::NoSandbox(_))), "nothing is left");
    error
}

async fn fsck(house: &House) {
    let report = house.free().await.fsck().await.unwrap();
    assert!(!report.is_broken(), "{report:?}");
}

async fn reopen(house: &House, engine: Engine) -> Engine {
    drop(engine);
    fsck(house).await;
    house.open().await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_to_a_drive_outlives_the_sandbox() {
    let house = house!();
    let engine = house.open().await;
    make(&engine, "data").await;
    run(&engine, "one", &[("/data", "data", RW)]).await;
    sh(&engine, "one", "echo first > /data/file; mkdir /data/dir; echo own > /work/own").await;
    let drive = engine.drive(&project(), &name("data")).await.unwrap();
    let attached = drive.attached.unwrap();
    assert_eq!(attached.name, name("one"));
    let session = engine.get(&project(), &name("one")).await.unwrap().session.unwrap();
    assert_eq!(attached.session, session.id);
    // A snapshot of the sandbox holds nothing of the drive, taken in either way.
    let idle = engine.checkpoint(&project(), &name("one"), Checkpoint::default()).await.unwrap();
    assert_eq!(
        sh(&engine, "one", "cat /data/file; echo second >> /data/file").await.out,
        "first\n"
    );
    stop(&engine, "one").await;
    let drive = engine.drive(&project(), &name("data")).await.unwrap();
    assert_eq!((drive.layers.len(), drive.attached), (1, None));
    assert!(!idle.item.layers.contains(&drive.layers[0]));
    let bare = Create { from: Some(idle.item.id), ..small("bare") };
    engine.create(&project(), bare, None).await.unwrap();
    assert_eq!(sh(&engine, "bare", "ls /data; cat /work/own").await.out, "own\n");

    // It exists again when the same sandbox wakes, and is gone with it to another one.
    assert_eq!(sh(&engine, "one", "cat /data/file").await.out, "first\nsecond\n");
    engine.delete(&project(), &name("one"), Delete::default(), None).await.unwrap();
    let ephemeral = Create {
        patch: Patch { class: Some(Class::Ephemeral), ..with("two", &[("/d", "data", RW)]).patch },
        ..small("two")
    };
    engine.create(&project(), ephemeral, None).await.unwrap();
    assert_eq!(
        sh(&engine, "two", "cat /d/file; rmdir /d/dir; echo third > /d/new").await.out,
        "first\nsecond\n"
    );
    stop(&engine, "two").await;
    let engine = reopen(&house, engine).await;
    run(&engine, "three", &[("/x/y", "data", RW)]).await;
    assert_eq!(sh(&engine, "three", "cd /x/y; ls; cat new").await.out, "file\nnew\nthird\n");
    assert!(engine.usage(None).await.unwrap().drives > 0);
    engine.delete(&project(), &name("three"), Delete::default(), None).await.unwrap();
    engine.shutdown().await;
    drop(engine);
    fsck(&house).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_writes_and_many_read() {
    let house = house!();
    let engine = house.open().await;
    make(&engine, "data").await;
    let refused = refusal(&engine, with("early", &[("/d", "data", SNAPSHOT)])).await;
    assert!(matches!(refused, Error::DriveNotInitialised { .. }), "{refused}");
    assert_eq!(refused.to_string(), "nothing was ever written to drive `data`");
    run(&engine, "writer", &[("/data", "data", RW)]).await;
    let refused = refusal(&engine, with("early", &[("/d", "data", SNAPSHOT)])).await;
    assert_eq!(refused.code(), "drive_not_initialized");
    let told = refused.to_string();
    assert!(told.contains("sandbox `writer` is the first to write to it"), "{told}");
    let refused = refusal(&engine, with("second", &[("/data", "data", RW)])).await;
    assert!(matches!(&refused, Error::DriveAttached { sandbox, .. } if *sandbox == name("writer")));
    assert_eq!((refused.kind(), refused.code()), (ErrorKind::Conflict, "drive_attached"));
    sh(&engine, "writer", "echo one > /data/file").await;
    stop(&engine, "writer").await;

    run(&engine, "both", &[("/data", "data", RW), ("/then", "data", SNAPSHOT)]).await;
    run(&engine, "reader", &[("/data", "data", SNAPSHOT)]).await;
    sh(&engine, "both", "echo two > /data/file; touch /data/new").await;
    assert_eq!(sh(&engine, "both", "cat /data/file /then/file").await.out, "two\none\n");
    let tried = sh(&engine, "reader", "cat /data/file; echo x > /data/file").await;
    assert_eq!(tried.out, "one\n");
    assert!(tried.err.contains("Read-only"), "{tried:?}");
    // Waking it waits for nothing, but a sandbox that wants to write has to wait.
    let refused = engine.start(&project(), &name("writer"), None).await.map(drop).unwrap_err();
    assert!(matches!(refused, Error::DriveAttached { .. }), "{refused}");
    let writer = engine.get(&project(), &name("writer")).await.unwrap().sandbox;
    assert_eq!(writer.phase(), Phase::Stopped, "it is no worse for having been refused");
    stop(&engine, "both").await;
    assert_eq!(sh(&engine, "reader", "cat /data/file").await.out, "one\n", "as it was");
    stop(&engine, "reader").await;
    assert_eq!(sh(&engine, "reader", "cat /data/file; ls /data").await.out, "two\nfile\nnew\n");
    assert_eq!(sh(&engine, "writer", "cat /data/file").await.out, "two\n");

    let refused = engine.delete_drive(&project(), &name("data")).await.map(drop).unwrap_err();
    assert!(matches!(refused, Error::DriveAttached { .. }), "{refused}");
    stop(&engine, "writer").await;
    engine.delete_drive(&project(), &name("data")).await.unwrap();
    assert_eq!(sh(&engine, "reader", "cat /data/file").await.out, "two\n", "to its session's end");
    stop(&engine, "reader").await;
    let gone = engine.start(&project(), &name("reader"), None).await.map(drop).unwrap_err();
    assert!(matches!(gone, Error::NoDrive(_)), "{gone}");
    let none = Patch { mounts: Some(Mounts::new()), ..Patch::default() };
    engine.update(&project(), &name("reader"), none).await.unwrap();
    assert_eq!(sh(&engine, "reader", "ls /data").await.out, "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_of_a_drive_goes_its_own_way() {
    let house = house!();
    let engine = house.open().await;
    make(&engine, "base").await;
    let fork = |from: &'static str, to: &'static str| {
        let engine = engine.clone();
        async move { engine.fork_drive(&project(), &name(from), name(to)).await }
    };
    assert!(matches!(fork("base", "w1").await, Err(Error::DriveNotInitialised { .. })));
    assert!(matches!(fork("none", "w1").await, Err(Error::NoDrive(_))));
    run(&engine, "a", &[("/d", "base", RW)]).await;
    sh(&engine, "a", "echo base > /d/file").await;
    stop(&engine, "a").await;
    let base = engine.drive(&project(), &name("base")).await.unwrap();
    let one = fork("base", "w1").await.unwrap();
    assert_eq!((one.parent.as_ref(), one.root.as_ref()), (Some(&base.id), Some(&base.id)));
    assert_eq!((one.max_size, &one.layers), (base.max_size, &base.layers));
    assert!(matches!(fork("base", "w1").await, Err(Error::DriveTaken(_))));
    let second = fork("w1", "w2").await.unwrap();
    assert_eq!((second.parent, second.root), (Some(one.id), Some(base.id)));
    // All three at once, in one sandbox.
    run(&engine, "b", &[("/0", "base", RW), ("/1", "w1", RW), ("/2", "w2", RW)]).await;
    sh(&engine, "b", "for n in 0 1 2; do echo $n >> /$n/file; done").await;
    stop(&engine, "b").await;
    engine.delete_drive(&project(), &name("base")).await.unwrap();
    run(&engine, "c", &[("/1", "w1", SNAPSHOT), ("/2", "w2", SNAPSHOT)]).await;
    assert_eq!(sh(&engine, "c", "cat /1/file /2/file").await.out, "base\n1\nbase\n2\n");

    // A fork of a sandbox does not get its drives, unless they are given to it.
    let bare = Fork { name: Some(name("d")), start: true, ..Fork::default() };
    let forked = engine.fork(&project(), &name("c"), bare, None).await.unwrap();
    assert_eq!(forked.sandbox.config.mounts, Mounts::new());
    let patch = Patch { mounts: Some(mounts(&[("/1", "w1", RW)])), ..Patch::default() };
    let given = Fork { name: Some(name("e")), start: true, patch, ..Fork::default() };
    engine.fork(&project(), &name("c"), given, None).await.unwrap();
    assert_eq!(sh(&engine, "e", "cat /1/file").await.out, "base\n1\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn drives_are_made_once_and_listed() {
    let house = house!();
    let engine = house.open().await;
    let region = |value: &str| BTreeMap::from([("region".to_owned(), value.to_owned())]);
    let asked = CreateDrive { max_size: Some(Size(1 << 30)), notes: region("here"), ..wish("a") };
    let (made, fresh) = engine.create_drive(&project(), asked.clone()).await.unwrap();
    assert!(fresh);
    for same in [asked.clone(), wish("a")] {
        assert_eq!(engine.create_drive(&project(), same).await.unwrap(), (made.clone(), false));
    }
    for other in [
        CreateDrive { max_size: Some(Size(1 << 31)), ..wish("a") },
        CreateDrive { notes: region("there"), ..wish("a") },
    ] {
        let refused = engine.create_drive(&project(), other).await.map(drop).unwrap_err();
        assert!(matches!(refused, Error::DriveDiffers { .. }), "{refused}");
    }
    for bad in [
        CreateDrive { max_size: Some(Size(0)), ..wish("b") },
        CreateDrive { max_size: Some(Size(u64::MAX)), ..wish("b") },
        wish(&"x".repeat(65)),
    ] {
        let refused = engine.create_drive(&project(), bad).await.map(drop).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
    }
    // Many at once who ask for the same get the same.
    let tasks = (0..8).map(|_| {
        let engine = engine.clone();
        tokio::spawn(async move { engine.create_drive(&project(), wish("b")).await.unwrap() })
    });
    let mut news = 0;
    for task in tasks.collect::<Vec<_>>() {
        news += u32::from(task.await.unwrap().1);
    }
    assert_eq!(news, 1);
    assert_eq!(engine.drive_by_id(&project(), &made.id).await.unwrap(), made);
    let order = Order { by: By::Name, direction: Direction::Ascending };
    let page = Page { order, ..Page::all() };
    let list = engine.drives(&project(), None, &page).await.unwrap().items;
    assert_eq!(list.iter().map(|drive| drive.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    let in_use = engine.delete_project(&project()).await.unwrap_err();
    assert!(matches!(in_use, Error::ProjectInUse { drives: 2, .. }), "{in_use}");
    let engine = reopen(&house, engine).await;
    assert_eq!(engine.drive(&project(), &name("a")).await.unwrap(), made);
    for drive in ["a", "b"] {
        engine.delete_drive(&project(), &name(drive)).await.unwrap();
    }
    let gone = engine.delete_drive(&project(), &name("a")).await.map(drop).unwrap_err();
    assert!(matches!(gone, Error::NoDrive(_)), "{gone}");
    engine.delete_project(&project()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_written_is_kept_however_the_session_ends() {
    let house = house!();
    let engine = house.open().await;
    make(&engine, "data").await;
    run(&engine, "app", &[("/data", "data", RW)]).await;
    sh(&engine, "app", "echo 1 >> /data/log").await;

    // The daemon is gone and comes back: the machine is adopted, drives and all.
    let engine = reopen(&house, engine).await;
    assert_eq!(sh(&engine, "app", "echo 2 >> /data/log; cat /data/log").await.out, "1\n2\n");
    let refused = refusal(&engine, with("other", &[("/data", "data", RW)])).await;
    assert!(matches!(refused, Error::DriveAttached { .. }), "{refused}");

    // The machine dies under the daemon.
    let id = engine.get(&project(), &name("app")).await.unwrap().sandbox.id;
    house.driver().stop(&MachineKey::from(&id)).await.unwrap();
    for _ in 0..500 {
        if engine.drive(&project(), &name("data")).await.unwrap().attached.is_none() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    run(&engine, "other", &[("/data", "data", RW)]).await;
    assert_eq!(sh(&engine, "other", "cat /data/log; echo 3 >> /data/log").await.out, "1\n2\n");

    // The machine dies while no daemon runs: a reboot.
    let id = engine.get(&project(), &name("other")).await.unwrap().sandbox.id;
    engine.shutdown().await;
    drop(engine);
    house.driver().stop(&MachineKey::from(&id)).await.unwrap();
    fsck(&house).await;
    let engine = house.open().await;
    let other = engine.get(&project(), &name("other")).await.unwrap();
    assert_eq!(other.session.unwrap().end, Some(SessionEnd::Interrupted));
    assert_eq!(engine.drive(&project(), &name("data")).await.unwrap().attached, None);
    assert_eq!(sh(&engine, "app", "cat /data/log; echo 4 >> /data/log").await.out, "1\n2\n3\n");

    // Deleted while it runs; rolled back while it runs.
    engine.delete(&project(), &name("app"), Delete::default(), None).await.unwrap();
    assert_eq!(
        sh(&engine, "other", "cat /data/log; echo 5 >> /data/log").await.out,
        "1\n2\n3\n4\n"
    );
    let first =
        engine.checkpoint(&project(), &name("other"), Checkpoint::default()).await.unwrap().item;
    sh(&engine, "other", "echo x > /work/x; echo 6 >> /data/log").await;
    let back = engine.rollback(&project(), &name("other"), &first.id, None).await.unwrap();
    assert_eq!(back.before.unwrap().kind, SnapshotKind::BeforeRollback);
    let log = sh(&engine, "other", "cat /data/log; ls /work").await.out;
    assert_eq!(log, "1\n2\n3\n4\n5\n6\n", "the sandbox went back, the drive did not");
}

#[tokio::test(flavor = "multi_thread")]
async fn long_chains_of_a_drive_become_one() {
    let mut house = house!();
    house.settings.chain_limit = 3;
    let engine = house.open().await;
    make(&engine, "data").await;
    engine
        .create(&project(), Create { start: false, ..with("app", &[("/d", "data", RW)]) }, None)
        .await
        .unwrap();
    let mut expected = String::new();
    for round in 0..12 {
        let line = format!("rm -f /d/last; echo {round} >> /d/log; echo > /d/last; cat /d/log");
        expected.push_str(&format!("{round}\n"));
        assert_eq!(sh(&engine, "app", &line).await.out, expected);
        stop(&engine, "app").await;
    }
    let mut length = usize::MAX;
    for _ in 0..500 {
        length = engine.drive(&project(), &name("data")).await.unwrap().layers.len();
        if length <= 4 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(length <= 4, "{length} layers");
    assert_eq!(sh(&engine, "app", "cat /d/log; ls /d").await.out, format!("{expected}last\nlog\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_mounts_are_refused_and_leave_nothing() {
    let house = house!();
    let engine = house.open().await;
    for drive in ["a", "b"] {
        make(&engine, drive).await;
    }
    for bad in [
        vec![("relative", "a", RW)],
        vec![("/", "a", RW)],
        vec![("/proc", "a", RW)],
        vec![("/work/../etc", "a", RW)],
        vec![("/x", "a", RW), ("/x/y", "b", RW)],
        vec![("/x", "a", RW), ("/y", "a", RW)],
        vec![
            ("/1", "a", RW),
            ("/2", "b", RW),
            ("/3", "b", SNAPSHOT),
            ("/4", "b", SNAPSHOT),
            ("/5", "b", SNAPSHOT),
        ],
    ] {
        let refused = refusal(&engine, with("bad", &bad)).await;
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{bad:?}: {refused}");
    }
    let refused = refusal(&engine, with("bad", &[("/x", "none", RW)])).await;
    assert!(matches!(refused, Error::NoDrive(_)), "{refused}");
    // What the sandbox itself holds is in the way: known only when it starts.
    let refused = refusal(&engine, with("bad", &[("/a", "a", RW), ("/etc/passwd", "b", RW)])).await;
    assert_eq!(
        (refused.kind(), refused.code()),
        (ErrorKind::Invalid, "bad_mount_point"),
        "{refused}"
    );
    // The second of two is taken: the first is not left attached.
    run(&engine, "holder", &[("/b", "b", RW)]).await;
    let refused = refusal(&engine, with("bad", &[("/1", "a", RW), ("/2", "b", RW)])).await;
    assert!(matches!(refused, Error::DriveAttached { .. }), "{refused}");
    assert_eq!(engine.drive(&project(), &name("a")).await.unwrap().attached, None);

    // Somebody who has the sandbox cannot lead the next mount elsewhere.
    run(&engine, "sly", &[("/data/deep", "a", RW)]).await;
    sh(&engine, "sly", "echo safe > /data/deep/file; mv /data /moved; ln -s /etc /data").await;
    stop(&engine, "sly").await;
    let refused = engine.start(&project(), &name("sly"), None).await.map(drop).unwrap_err();
    assert_eq!(refused.code(), "bad_mount_point", "{refused}");
    assert_eq!(engine.drive(&project(), &name("a")).await.unwrap().attached, None);
    let moved = Patch { mounts: Some(mounts(&[("/moved/deep", "a", RW)])), ..Patch::default() };
    engine.update(&project(), &name("sly"), moved).await.unwrap();
    assert_eq!(sh(&engine, "sly", "cat /moved/deep/file").await.out, "safe\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drive_over_its_size_ends_what_fills_it() {
    let house = house!();
    let engine = house.open().await;
    let small = CreateDrive { max_size: Some(Size(40 << 20)), ..wish("data") };
    engine.create_drive(&project(), small).await.unwrap();
    run(&engine, "app", &[("/data", "data", RW)]).await;
    let fill =
        "n=0; while :; do head -c 16777216 /dev/zero > /data/$n; n=$((n+1)); sync; sleep 0.1; done";
    let argv = ["sh", "-c", fill].map(str::to_owned).to_vec();
    let exec = Exec { argv, detach: true, ..Exec::default() };
    let filling = engine.exec(&project(), &name("app"), exec).await.unwrap().command;
    let mut ended = None;
    for _ in 0..600 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let now = engine.command(&project(), &name("app"), &filling.id).await.unwrap();
        ended = now.ended_at;
        if ended.is_some() {
            break;
        }
    }
    assert!(ended.is_some(), "it was ended");
    let left = sh(&engine, "app", "ls /data | wc -l; rm /data/*; echo room > /data/note").await;
    assert_eq!(
        left.command.exit_code,
        Some(0),
        "what it wrote is there to be looked at and removed"
    );
    stop(&engine, "app").await;
    assert_eq!(sh(&engine, "app", "cat /data/note").await.out, "room\n");
}
