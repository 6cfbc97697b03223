//! Garbage collection when manifests are missing or damaged: nothing is removed, it is reported,
//! and it continues when they are back.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sandkeep_core::engine::{Create, DamageKind, Delete, Engine, Fork, SnapshotOnStop, Stop};
use sandkeep_core::model::{Layer, Patch, Snapshot, Timestamp};
use sandkeep_core::store::{Store, StoreError};
use sandkeep_testkit::house::{House, name, project, sh, small};

/// Names in a directory of the data directory.
fn names(house: &House, part: &str) -> BTreeSet<String> {
    let entries = fs::read_dir(house.data().join(part)).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

async fn stop(engine: &Engine, sandbox: &str) -> Snapshot {
    let stop = Stop { snapshot: SnapshotOnStop::Always, ..Stop::default() };
    engine.stop(&project(), &name(sandbox), stop, None).await.unwrap().snapshot.unwrap().item
}

/// Two sandboxes, one with two snapshots, all of whose layers are old enough to be collected.
async fn house_with_snapshots() -> Option<(House, Snapshot)> {
    let mut house = match House::new() {
        Ok(house) => house,
        Err(why) => {
            eprintln!("SKIPPED engine_evidence: {why}");
            return None;
        }
    };
    house.settings.housekeeping = Duration::from_millis(100);
    let engine = house.open().await;
    for sandbox in ["app", "other"] {
        let patch = Patch { keep_last: Some(Some(10)), ..small(sandbox).patch };
        let create = Create { patch, ..small(sandbox) };
        engine.create(&project(), create, None).await.unwrap();
        sh(&engine, sandbox, "echo one > /work/one").await;
        stop(&engine, sandbox).await;
    }
    sh(&engine, "app", "echo two > /work/two").await;
    let snapshot = stop(&engine, "app").await;
    close(&house, engine).await;
    Some((house, snapshot))
}

/// Ends an engine and makes all layers old.
async fn close(house: &House, engine: Engine) {
    engine.shutdown().await;
    drop(engine);
    let store = house.free().await;
    for mut layer in store.scan::<Layer>().await.unwrap().good {
        layer.sealed_at = Timestamp::UNIX_EPOCH;
        store.write(&layer, sandkeep_core::store::Durability::Synced).await.unwrap();
    }
}

/// Waits until something is true, and says what if it never is.
async fn until(what: &str, mut done: impl FnMut() -> bool) {
    for _ in 0..400 {
        if done() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("never: {what}");
}

fn reports(engine: &Engine, subject: &str) -> bool {
    engine.damage().iter().any(|damage| damage.subject == subject)
}

fn stopped(engine: &Engine) -> bool {
    engine.damage().iter().any(|damage| damage.kind == DamageKind::CollectionStopped)
}

/// Opens the house with something missing, and checks that nothing goes; puts it back, and checks that all is as before.
async fn survives(house: &House, take: &Path, subject: &str) {
    let (layers, snapshots) = (names(house, "layers"), names(house, "snapshots"));
    let aside = house.path().join("taken-away");
    fs::rename(take, &aside).unwrap();
    // A layer that really is unreferenced: it stays too, since that is not known.
    let engine = house.open().await;
    until(&format!("{subject} is reported"), || reports(&engine, subject) && stopped(&engine))
        .await;
    // Some more rounds of housekeeping.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(names(house, "layers"), layers, "{subject}: no layer went");
    assert_eq!(names(house, "trash"), BTreeSet::new(), "{subject}: nothing is in the trash");
    let left: BTreeSet<_> = names(house, "snapshots");
    for manifest in &left {
        let text = fs::read_to_string(house.data().join("snapshots").join(manifest)).unwrap();
        assert!(!text.contains("deleted_at"), "{subject}: {manifest} was buried");
    }
    // Put back while the daemon runs, or at the next start: both do.
    fs::rename(&aside, take).unwrap();
    until(&format!("{subject} is cleared"), || !reports(&engine, subject) && !stopped(&engine))
        .await;
    assert_eq!(names(house, "snapshots"), snapshots);
    let engine = house.reopen(engine).await;
    assert!(!stopped(&engine), "{:?}", engine.damage());
    assert_eq!(sh(&engine, "app", "cat /work/one /work/two").await.out, "one\ntwo\n");
    assert_eq!(sh(&engine, "other", "cat /work/one").await.out, "one\n");
}

fn sandbox_dir(house: &House, snapshot: &Snapshot) -> PathBuf {
    house.data().join("sandboxes").join(snapshot.sandbox.as_str())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandboxs_manifest_is_missing() {
    let Some((house, snapshot)) = house_with_snapshots().await else { return };
    let subject = format!("sandboxes/{}/sandbox.json", snapshot.sandbox);
    survives(&house, &sandbox_dir(&house, &snapshot).join("sandbox.json"), &subject).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandboxs_directory_is_missing_and_the_index_too() {
    let Some((house, snapshot)) = house_with_snapshots().await else { return };
    fs::remove_file(house.data().join("index.sqlite")).unwrap();
    let subject = format!("sandboxes/{}/sandbox.json", snapshot.sandbox);
    survives(&house, &sandbox_dir(&house, &snapshot), &subject).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshots_manifest_is_missing() {
    let Some((house, snapshot)) = house_with_snapshots().await else { return };
    fs::remove_file(house.data().join("index.sqlite")).unwrap();
    let subject = format!("snapshots/{}.json", snapshot.id);
    survives(&house, &house.data().join(&subject), &subject).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshots_manifest_is_missing_that_only_the_index_remembers() {
    let Some((house, snapshot)) = house_with_snapshots().await else { return };
    let parent = snapshot.parent.clone().unwrap();
    let subject = format!("snapshots/{parent}.json");
    // Its last synced version would do: it would be read instead.
    let _ = fs::remove_file(house.data().join(format!("{subject}.last")));
    survives(&house, &house.data().join(&subject), &subject).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_id_in_a_manifest_is_damaged() {
    let Some((house, snapshot)) = house_with_snapshots().await else { return };
    let path = house.data().join(format!("snapshots/{}.json", snapshot.id));
    let good = fs::read_to_string(&path).unwrap();
    let top = snapshot.layers[0].to_string();
    let (start, last) = top.split_at(top.len() - 1);
    let other = if last == "0" { "1" } else { "0" };
    fs::write(&path, good.replace(&top, &format!("{start}{other}"))).unwrap();
    let layers = names(&house, "layers");
    let engine = house.open().await;
    until("it is reported", || stopped(&engine)).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(names(&house, "layers"), layers, "no layer went");
    assert_eq!(names(&house, "trash"), BTreeSet::new());
    fs::write(&path, good).unwrap();
    let engine = house.reopen(engine).await;
    assert_eq!(sh(&engine, "app", "cat /work/two").await.out, "two\n");
    until("all is well", || !stopped(&engine)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_id_in_a_manifest_without_a_checksum_is_damaged() {
    let Some((house, snapshot)) = house_with_snapshots().await else { return };
    let path = house.data().join(format!("snapshots/{}.json", snapshot.id));
    let good = fs::read_to_string(&path).unwrap();
    let top = snapshot.layers[0].to_string();
    let (start, last) = top.split_at(top.len() - 1);
    let other = format!("{start}{}", if last == "0" { "1" } else { "0" });
    let mut document: serde_json::Value =
        serde_json::from_str(&good.replace(&top, &other)).unwrap();
    let fields = document.as_object_mut().unwrap();
    fields.remove("checksum");
    fields.insert("format".to_owned(), 4.into());
    fs::write(&path, document.to_string()).unwrap();
    let layers = names(&house, "layers");
    let engine = house.open().await;
    let subject = format!("layers/{other}");
    until("it is reported", || reports(&engine, &subject) && stopped(&engine)).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(names(&house, "layers"), layers, "no layer went");
    fs::write(&path, good).unwrap();
    let engine = house.reopen(engine).await;
    assert_eq!(sh(&engine, "app", "cat /work/two").await.out, "two\n");
    until("all is well", || !stopped(&engine)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manifest_vanishes_while_the_daemon_runs() {
    let Some((house, snapshot)) = house_with_snapshots().await else { return };
    let engine = house.open().await;
    let sandboxes = house.data().join("sandboxes");
    let away = house.path().join("sandboxes-away");
    let layers = names(&house, "layers");
    fs::rename(&sandboxes, &away).unwrap();
    let subject = format!("sandboxes/{}/sandbox.json", snapshot.sandbox);
    until("it is reported", || reports(&engine, &subject) && stopped(&engine)).await;
    assert_eq!(names(&house, "layers"), layers);
    assert_eq!(names(&house, "trash"), BTreeSet::new());
    fs::rename(&away, &sandboxes).unwrap();
    until("it is cleared", || !stopped(&engine)).await;
    assert_eq!(sh(&engine, "app", "cat /work/one /work/two").await.out, "one\ntwo\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_of_the_directory_is_missing() {
    let Some((house, _)) = house_with_snapshots().await else { return };
    for part in ["sandboxes", "snapshots", "layers", "images", "projects"] {
        let (place, away) = (house.data().join(part), house.path().join("away"));
        fs::rename(&place, &away).unwrap();
        let refused = Store::open(&house.data()).unwrap_err();
        assert!(
            matches!(&refused, StoreError::MissingPart { path } if path.ends_with(part)),
            "{refused}"
        );
        assert!(refused.to_string().contains(part), "{refused}");
        assert!(!place.exists(), "{part} was not made");
        fs::rename(&away, &place).unwrap();
    }
    // What holds nothing that cannot be made again is made.
    fs::remove_dir_all(house.data().join("tmp")).unwrap();
    let engine = house.open().await;
    assert_eq!(sh(&engine, "app", "cat /work/two").await.out, "two\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_referenced_goes_to_the_trash_and_comes_back_when_it_is() {
    let Some((mut house, snapshot)) = house_with_snapshots().await else { return };
    house.settings.trash_grace = Duration::from_secs(3600);
    let engine = house.open().await;
    let top = snapshot.layers[0].clone();
    engine.delete(&project(), &name("other"), Delete::default(), None).await.unwrap();
    let trashed = names(&house, "trash");
    assert_eq!(trashed.len(), 1, "the sandbox: {trashed:?}");
    assert!(engine.usage(None).await.unwrap().trash > 0);
    close(&house, engine).await;

    // By mistake, or by hand.
    let place = house.data().join("layers").join(top.as_str());
    fs::rename(&place, house.data().join("trash").join(format!("{top}.1"))).unwrap();
    let engine = house.open().await;
    until("it is back", || place.exists()).await;
    assert_eq!(sh(&engine, "app", "cat /work/two").await.out, "two\n");
    assert!(!stopped(&engine), "{:?}", engine.damage());
    // What a force-deleted snapshot named is in the trash, and counted there.
    let forked = Fork { name: Some(name("fork")), ..Fork::default() };
    engine.fork(&project(), &name("app"), forked, None).await.unwrap();
    stop(&engine, "app").await;
    assert_eq!(engine.trash(Some(&project())).len(), 1);
    assert_eq!(engine.empty_trash(None).await.unwrap(), 1);
    assert_eq!(names(&house, "trash"), BTreeSet::new());
}

/// The name of a sandbox whose manifest is missing or damaged is not given to another one.
#[tokio::test(flavor = "multi_thread")]
async fn the_name_of_a_lost_sandbox_stays_its_own() {
    let Some((house, snapshot)) = house_with_snapshots().await else { return };
    let path = sandbox_dir(&house, &snapshot).join("sandbox.json");
    let whole = fs::read(&path).unwrap();
    let text = String::from_utf8(whole.clone()).unwrap();
    let edited = text.replacen("\"generation\": 2", "\"generation\": 1", 1);
    assert_ne!(edited, text);
    for (case, bytes) in [("missing", None), ("empty", Some("")), ("edited", Some(edited.as_str()))]
    {
        match bytes {
            Some(bytes) => fs::write(&path, bytes).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        }
        let engine = house.open().await;
        let outcomes = [
            engine.create(&project(), small("app"), None).await.map(drop),
            engine.get(&project(), &name("app")).await.map(drop),
            engine.delete(&project(), &name("app"), Delete::default(), None).await.map(drop),
        ];
        for outcome in outcomes {
            let refused = outcome.expect_err(case);
            assert_eq!(refused.code(), "sandbox_damaged", "{case}: {refused}");
            assert!(refused.hint().is_some());
        }
        // Another name is free, and so are the files: its snapshots can be forked.
        let fork = Create { from: Some(snapshot.id.clone()), ..small(&format!("from-{case}")) };
        engine.create(&project(), fork, None).await.unwrap();
        let forked = sh(&engine, &format!("from-{case}"), "cat /work/one /work/two").await;
        assert_eq!(forked.out, "one\ntwo\n", "{case}");
        fs::write(&path, &whole).unwrap();
        close(&house, engine).await;
        let engine = house.open().await;
        assert_eq!(engine.get(&project(), &name("app")).await.unwrap().sandbox.generation, 2);
        close(&house, engine).await;
    }
}
