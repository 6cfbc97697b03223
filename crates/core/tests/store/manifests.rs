//! Manifests are whole or not there; what is damaged or too new is named and left alone.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use crate::store_world::{World, name, project, sandbox};
use sandkeep_core::model::{
    Attachment, Change, Drive, FORMAT, Image, ImageConfig, LayerId, Method, OpenSession, Project,
    Sandbox, SandboxId, SessionId, Snapshot, SnapshotId, SnapshotKind, Timestamp, now,
};
use sandkeep_core::store::{Durability, Problem, SealOptions, Store, StoreError, StoreOptions};
use sandkeep_testkit::db::drive;
use sandkeep_testkit::tree::{SmallDisk, nasty};
use tempfile::TempDir;

fn snapshot(layers: &[LayerId]) -> Snapshot {
    Snapshot {
        format: FORMAT,
        id: SnapshotId::fresh(),
        project: name("p"),
        sandbox: SandboxId::fresh(),
        sandbox_name: name("box"),
        session: SessionId::fresh(),
        generation: 1,
        parent: None,
        merged: None,
        kind: SnapshotKind::Stop,
        label: None,
        layers: layers.to_vec(),
        memory: Vec::new(),
        image: None,
        commands: Vec::new(),
        secrets: Vec::new(),
        identity_of: None,
        created_at: now(),
        method: Method::Automatic,
        used_at: None,
        expires_after: None,
        expiry_given: false,
        kept: None,
        expires_on: None,
        outlives: false,
        sandbox_deleted_at: None,
        deleted_at: None,
        findings: Vec::new(),
        image_config: ImageConfig::default(),
    }
}

#[tokio::test]
async fn documents_come_back_as_they_were_written() {
    let world = World::new();
    let image = Image {
        format: FORMAT,
        name: "registry.example/a/b:1@x ../..".to_owned(),
        digest: "sha256:0".to_owned(),
        layers: Vec::new(),
        config: ImageConfig::default(),
        created_at: now(),
        source: "somewhere".to_owned(),
        customized: None,
        step: None,
    };
    let (project, sandbox, snapshot) = (project("p"), sandbox(&[]), snapshot(&[]));
    let drive = drive("p", "data");
    for durability in [Durability::Soon, Durability::Synced] {
        world.store.write(&project, durability).await.expect("written");
        world.store.write(&sandbox, durability).await.expect("written");
        world.store.write(&snapshot, durability).await.expect("written");
        world.store.write(&image, durability).await.expect("written");
        world.store.write(&drive, durability).await.expect("written");
    }
    assert_eq!(world.store.read::<Project>(&project.name).await.expect("read"), project);
    assert_eq!(world.store.read::<Image>(&image.name).await.expect("read"), image);
    assert_eq!(world.store.scan::<Drive>().await.expect("read").good, [drive]);
    assert_eq!(
        world.store.scan::<Sandbox>().await.expect("read").good,
        std::slice::from_ref(&sandbox)
    );
    assert_eq!(
        world.store.scan::<Snapshot>().await.expect("read").good,
        std::slice::from_ref(&snapshot)
    );
    assert_eq!(fs::read_dir(world.data().join("tmp")).expect("tmp").count(), 0);
    let parts = fs::read_dir(world.data().join("sandboxes").join(sandbox.id.as_str()));
    assert_eq!(parts.expect("the sandbox").count(), 1, "no older version is left");

    for _ in 0..2 {
        world.store.remove::<Snapshot>(&snapshot.id).await.expect("removed");
        world.store.remove_sandbox_dir(&sandbox.id).await.expect("removed");
    }
    let gone = world.store.read::<Snapshot>(&snapshot.id).await.expect_err("gone");
    assert!(gone.is_not_found());
    assert_eq!(gone.to_string(), format!("there is no snapshot {} in the store", snapshot.id));
    assert!(world.store.scan::<Sandbox>().await.expect("read").good.is_empty());
    world.store.collect(&HashSet::new(), Timestamp::MAX).await.expect("nothing to collect");
}

#[tokio::test]
async fn the_last_synced_sandbox_outlives_a_torn_write() {
    let world = World::new();
    let mut sandbox = sandbox(&[]);
    sandbox.generation = 1;
    world.store.write(&sandbox, Durability::Synced).await.expect("written");
    let acknowledged = sandbox.clone();
    for generation in 2..4 {
        sandbox.generation = generation;
        world.store.write(&sandbox, Durability::Soon).await.expect("written");
    }
    assert_eq!(world.store.read::<Sandbox>(&sandbox.id).await.expect("read"), sandbox);
    let file = world.data().join(format!("sandboxes/{}/sandbox.json", sandbox.id));
    let next = file.with_extension("json.next");
    fs::write(&next, "").expect("what a power cut may leave");
    assert_eq!(world.store.read::<Sandbox>(&sandbox.id).await.expect("read"), acknowledged);
    assert_eq!(world.store.scan::<Sandbox>().await.expect("read").good, [acknowledged]);
    world.store.write(&sandbox, Durability::Synced).await.expect("written");
    assert!(!next.exists(), "nothing older is left beside it");
    fs::write(&file, "").expect("damage");
    let error = world.store.read::<Sandbox>(&sandbox.id).await.expect_err("no older version");
    assert!(matches!(error, StoreError::Damaged { .. }), "{error}");
}

#[tokio::test]
async fn a_late_write_does_not_bring_a_sandbox_back() {
    let world = World::new();
    let sandbox = sandbox(&[]);
    let session = sandkeep_testkit::db::session(&sandbox);
    let command = sandkeep_testkit::db::command(&session);
    let dir = world.data().join(format!("sandboxes/{}", sandbox.id));
    for round in 0..2 {
        for late in [
            world.store.write(&session, Durability::Soon).await,
            world.store.write(&command, Durability::Synced).await,
        ] {
            let error = late.expect_err("there is no such sandbox");
            assert!(error.is_not_found(), "{error}");
        }
        assert!(!dir.exists(), "round {round}");
        world.store.write(&sandbox, Durability::Soon).await.expect("written");
        world.store.write(&session, Durability::Soon).await.expect("written");
        world.store.write(&command, Durability::Soon).await.expect("written");
        world.store.remove_sandbox_dir(&sandbox.id).await.expect("removed");
    }
}

/// What a power cut leaves of a create that was never reported to anybody.
#[tokio::test]
async fn an_empty_directory_is_no_sandbox_and_goes() {
    let dir = TempDir::with_prefix("keep").expect("a temporary directory");
    let data = dir.path().join("data");
    let store = Store::open(&data).expect("a store");
    store.write(&project("p"), Durability::Synced).await.expect("written");
    store.write(&sandbox(&[]), Durability::Synced).await.expect("written");
    drop(store);
    let (empty, full) = (data.join("sandboxes/sbx_empty"), data.join("sandboxes/sbx_full"));
    fs::create_dir(&empty).expect("our own");
    fs::create_dir_all(full.join("sessions")).expect("our own");
    let store = Store::open(&data).expect("a store");
    assert!(!empty.exists());
    assert!(full.exists(), "what has something in it may be all that is left of a sandbox");
    assert_eq!(store.scan::<Sandbox>().await.expect("read").good.len(), 1);
    fs::remove_dir_all(&full).expect("our own");
    let report = store.fsck().await.expect("checked");
    assert!(report.problems.is_empty(), "{report:?}");
}

#[tokio::test]
async fn a_sync_puts_what_was_not_synced_in_its_place() {
    let world = World::new();
    let mut sandbox = sandbox(&[]);
    world.store.write(&sandbox, Durability::Synced).await.expect("written");
    let file = world.data().join(format!("sandboxes/{}/sandbox.json", sandbox.id));
    let next = file.with_extension("json.next");
    sandbox.generation = 7;
    world.store.write(&sandbox, Durability::Soon).await.expect("written");
    assert!(next.exists() && world.store.has_unsynced());
    world.store.sync().await.expect("synced");
    assert!(!next.exists() && !world.store.has_unsynced());
    assert_eq!(world.store.read::<Sandbox>(&sandbox.id).await.expect("read"), sandbox);
    world.store.write(&sandbox, Durability::Soon).await.expect("written");
    world.store.remove::<Sandbox>(&sandbox.id).await.expect("removed");
    assert!(!next.exists() && !file.exists());
}

#[tokio::test]
async fn versions_that_an_earlier_daemon_left_beside_a_document_are_tidied_up() {
    let world = World::new();
    let mut all = Vec::new();
    for generation in 1..5 {
        let mut sandbox = sandbox(&[]);
        world.store.write(&sandbox, Durability::Synced).await.expect("written");
        let file = world.data().join(format!("sandboxes/{}/sandbox.json", sandbox.id));
        let old = fs::read(&file).expect("written");
        sandbox.generation = generation;
        world.store.write(&sandbox, Durability::Soon).await.expect("written");
        all.push((sandbox, file, old));
    }
    let suffixed = |file: &Path, suffix: &str| file.with_extension(format!("json.{suffix}"));
    // As earlier versions left it; torn; with a stale copy beside the one that is good; and of a later version.
    let (_, file, old) = &all[1];
    fs::rename(suffixed(file, "next"), file).expect("a file");
    fs::write(suffixed(file, "last"), old).expect("room");
    fs::write(suffixed(&all[2].1, "next"), "").expect("room");
    fs::write(suffixed(&all[3].1, "next"), "{\"format\": 99}").expect("room");
    let data = world.data();
    let _world = world.closed();
    let store = Store::open(&data).expect("it opens");
    store.tidy_documents().await.expect("tidied");
    for (number, (sandbox, file, _)) in all.iter().enumerate() {
        let newer = number == 3;
        assert_eq!(suffixed(file, "next").exists(), newer, "{number}: nothing newer is removed");
        assert!(!suffixed(file, "last").exists(), "{number}");
        let found = store.read::<Sandbox>(&sandbox.id).await;
        match number {
            0 | 1 => assert_eq!(found.expect("the newest"), *sandbox, "{number}"),
            2 => assert_eq!(found.expect("the synced one").generation, 0),
            _ => assert!(matches!(found, Err(StoreError::TooNew { .. })), "{found:?}"),
        }
    }
}

#[tokio::test]
async fn one_daemon_at_a_time() {
    let world = World::new();
    let error = Store::open(&world.data()).expect_err("it is open");
    let text = error.to_string();
    assert!(text.contains(&std::process::id().to_string()), "{text}");
    fs::write(world.data().join("tmp/left"), "over").expect("a file");
    fs::create_dir_all(world.data().join("tmp/tree/deep")).expect("a directory");
    let data = world.data();
    let _world = world.closed();
    let store = Store::open(&data).expect("free again");
    store.collect(&HashSet::new(), Timestamp::MIN).await.expect("nothing");
    while fs::read_dir(data.join("tmp")).expect("tmp").count() > 0 {
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn damaged_and_newer_documents_are_named_and_kept() {
    let world = World::new();
    world.store.write(&project("good"), Durability::Synced).await.expect("written");
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/store");
    let projects = world.data().join("projects");
    for fixture in ["cut-off", "empty", "newer", "not-json", "other-name"] {
        let file = format!("{fixture}.json");
        fs::copy(fixtures.join(&file), projects.join(&file)).expect("a fixture");
    }
    let scan = world.store.scan::<Project>().await.expect("scanned");
    assert_eq!(scan.good.len(), 1);
    let mut found: Vec<String> = scan
        .damaged
        .iter()
        .map(|damaged| {
            let file = damaged.path.file_name().expect("a name").to_string_lossy();
            format!(
                "{file} {}: {}",
                damaged.too_new,
                damaged.reason.replace(&*world.data().to_string_lossy(), "DATA")
            )
        })
        .collect();
    found.sort();
    insta::assert_snapshot!(found.join("\n"), @r#"
    cut-off.json false: EOF while parsing a string at line 1 column 34
    empty.json false: it is empty
    newer.json true: `DATA/projects/newer.json` has format 99, and this keep knows formats up to 5; use a newer keep
    not-json.json false: expected value at line 1 column 1
    other-name.json false: it is about Name("someone")
    "#);

    let newer = world.store.read::<Project>(&name("newer")).await.expect_err("too new");
    assert!(matches!(newer, StoreError::TooNew { found: 99, known: FORMAT, .. }), "{newer}");
    let report = world.store.fsck().await.expect("checked");
    assert!(report.is_broken());
    assert_eq!(report.problems.len(), 5);
    let bad = projects.join("not-json.json");
    let before = fs::read(&bad).expect("still there");
    let kept = world.store.quarantine(&bad).await.expect("moved");
    assert_eq!(fs::read(&kept).expect("kept"), before);
    fs::write(&bad, "again").expect("a file");
    assert_ne!(world.store.quarantine(&bad).await.expect("moved"), kept);

    let data = world.data();
    let _world = world.closed();
    let newer = format!("{{\"format\":{}}}", FORMAT + 1);
    fs::write(data.join("format.json"), newer).expect("a file");
    assert!(matches!(Store::open(&data), Err(StoreError::TooNew { .. })));
    // One of before is taken over, and from then on not its daemons' any more.
    fs::write(data.join("format.json"), "{\"format\":1}").expect("a file");
    drop(Store::open(&data).expect("it opens"));
    let raised = fs::read_to_string(data.join("format.json")).expect("a file");
    assert!(raised.starts_with(&format!("{{\"format\":{FORMAT},\"identity\":\"")), "{raised}");
}

#[tokio::test]
async fn fsck_tells_what_is_missing_and_what_is_left_over() {
    let world = World::new();
    let image = world.image(nasty).await;
    let lost = LayerId::fresh();
    let kept = |snapshot: Snapshot| Snapshot { outlives: true, ..snapshot };
    let good = kept(snapshot(std::slice::from_ref(&image)));
    let bad = kept(snapshot(&[lost.clone(), image.clone()]));
    world.store.write(&project("p"), Durability::Synced).await.expect("written");
    let mut sleeping = sandbox(std::slice::from_ref(&image));
    let missing = SnapshotId::fresh();
    sleeping.current = Some(missing.clone());
    let mut running = sandbox(&[]);
    let open = world.store.begin(&[]).await.expect("begun");
    let open = OpenSession::new(open, Vec::new());
    running.transition(Change::Start(open)).expect("it can be started");
    let abandoned = world.store.begin(&[]).await.expect("begun");
    let unheld = world.image(nasty).await;
    let (held, written) = (world.image(nasty).await, world.store.begin(&[]).await.expect("begun"));
    let torn = LayerId::fresh();
    let attached = Attachment {
        sandbox: running.id.clone(),
        name: running.name.clone(),
        session: SessionId::fresh(),
        layer: written,
    };
    let layers = vec![torn.clone(), held];
    let drive = Drive { layers, attached: Some(attached), ..drive("p", "data") };
    world.store.write(&drive, Durability::Synced).await.expect("written");
    for snapshot in [&good, &bad] {
        world.store.write(snapshot, Durability::Synced).await.expect("written");
    }
    for sandbox in [&sleeping, &running] {
        world.store.write(sandbox, Durability::Synced).await.expect("written");
    }
    let half = world.data().join("sandboxes").join(SandboxId::fresh().as_str());
    fs::create_dir(&half).expect("a directory");

    let report = world.store.fsck().await.expect("checked");
    let bytes = world.store.layer(&unheld).await.expect("sealed").bytes;
    let expected = [
        Problem::MissingSnapshot { sandbox: sleeping.id, snapshot: missing },
        Problem::MissingLayer { needed_by: format!("snapshot {}", bad.id), layer: lost },
        Problem::MissingLayer { needed_by: format!("drive {}", drive.id), layer: torn },
        Problem::AbandonedLayer { layer: abandoned },
        Problem::UnheldLayer { layer: unheld, bytes },
        Problem::NotASandbox { path: half },
    ];
    for problem in &expected {
        assert!(report.problems.contains(problem), "{problem:?} in {report:?}");
    }
    assert_eq!(report.problems.len(), expected.len(), "{report:?}");
    assert_eq!((report.snapshots, report.sandboxes, report.layers), (2, 2, 3));
    assert_eq!(report.drives, 1);
}

#[tokio::test]
async fn a_collection_spares_the_living_and_the_young() {
    let world = World::new();
    let held = world.image(nasty).await;
    let dead = world.image(nasty).await;
    let open = world.store.begin(&[]).await.expect("begun");
    let abandoned = world.store.begin(&[]).await.expect("begun");
    let live: HashSet<LayerId> = [held.clone(), open.clone()].into();
    let early = world.store.collect(&live, Timestamp::MIN).await.expect("collected");
    assert!(early.layers.is_empty(), "all are younger");
    let freed = world.store.layer(&dead).await.expect("sealed").bytes;
    let collected = world.store.collect(&live, Timestamp::MAX).await.expect("collected");
    assert_eq!(collected.layers, [dead.clone(), abandoned]);
    assert_eq!(collected.bytes, freed);
    assert!(world.store.layer(&held).await.is_ok());
    assert!(matches!(world.store.layer(&open).await, Err(StoreError::NotSealed { .. })));
    assert!(world.store.layer(&dead).await.expect_err("gone").is_not_found());
    world.store.discard(&open).await.expect("discarded");
    world.store.discard(&open).await.expect("twice is harmless");
    world.store.discard(&held).await.expect("ignored");
    assert!(world.store.layer(&held).await.is_ok(), "a sealed layer is not discarded");
}

#[tokio::test]
async fn a_full_disk_refuses_and_recovers() {
    let dir = TempDir::with_prefix("keep").expect("a temporary directory");
    let disk = match SmallDisk::mount(&dir.path().join("disk"), 16 << 20) {
        Ok(disk) => disk,
        Err(error) => {
            println!("SKIPPED a_full_disk_refuses_and_recovers: cannot mount: {error}");
            return;
        }
    };
    let options = StoreOptions { reserve: Some(4 << 20), ..StoreOptions::default() };
    let store = Store::open_with(&disk.path().join("data"), options).expect("a store");
    store.check_room(8 << 20).await.expect("there is room");
    let error = store.check_room(14 << 20).await.expect_err("within the reserve");
    assert!(error.is_no_room() && error.to_string().contains("delete sandboxes"), "{error}");

    let open = store.begin(&[]).await.expect("begun");
    fs::write(store.diff_dir(&open).join("work"), vec![1; 10 << 20]).expect("room");
    let error = store.copy_live(&open, &[], None).await.expect_err("twice 10 of 16");
    assert!(matches!(error, StoreError::NoRoom { .. }), "{error}");
    let mut sandbox = sandbox(&[]);
    store.write(&sandbox, Durability::Synced).await.expect("written");
    let filler = disk.path().join("filler");
    fs::write(&filler, vec![1; 32 << 20]).expect_err("the disk is full");

    let error = store.seal(&open, &SealOptions::default()).await.expect_err("full");
    assert!(matches!(error, StoreError::NoRoom { .. }), "{error}");
    assert!(store.diff_dir(&open).join("../work").exists(), "nothing was touched");
    sandbox.generation = 9;
    sandbox.config.purpose = "x".repeat(100_000);
    let error = store.write(&sandbox, Durability::Synced).await.expect_err("full");
    assert!(error.is_no_room(), "{error:?}");
    let kept = store.read::<Sandbox>(&sandbox.id).await.expect("the old one");
    assert_eq!(kept.generation, 0);
    assert_eq!(fs::read_dir(disk.path().join("data/tmp")).expect("tmp").count(), 0);

    fs::remove_file(&filler).expect("a file");
    store.seal(&open, &SealOptions::default()).await.expect("sealed").expect("not empty");
    store.write(&sandbox, Durability::Synced).await.expect("written");
    drop(store);
}

#[tokio::test]
async fn usage_of_what_is_being_written() {
    let world = World::new();
    let open = world.store.begin(&[]).await.expect("begun");
    let before = world.store.usage_of_open(&open).await.expect("measured").bytes;
    let file = world.store.diff_dir(&open).join("a");
    fs::write(&file, vec![1; 1 << 20]).expect("room");
    fs::hard_link(&file, file.with_extension("b")).expect("a link");
    world.store.sync().await.expect("synced");
    let after = world.store.usage_of_open(&open).await.expect("measured").bytes;
    assert!((1 << 20..1 << 21).contains(&(after - before)), "{before} {after}");
}
