//! Damage to one thing costs that thing alone, and damage to the index costs nothing.

use std::fs;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use sandkeep_core::db::{Filter, Page};
use sandkeep_core::engine::{Damage, DamageKind, Engine, Error, SetSecret, SnapshotFilter, Stop};
use sandkeep_core::model::{LayerId, Mode, Name, Policy, ProjectNetwork, Scope, SecretName};
use sandkeep_testkit::house;
use sandkeep_testkit::house::{House, name, ok, project, small, until};
use sqlx::{Connection as _, SqliteConnection};
use zeroize::Zeroizing;

fn found(engine: &Engine, kind: DamageKind, subject: &str) -> Option<Damage> {
    engine.damage().into_iter().find(|one| one.kind == kind && one.subject == subject)
}

async fn stop(engine: &Engine, sandbox: &str) {
    engine.stop(&project(), &name(sandbox), Stop::default(), None).await.unwrap();
}

async fn rows(engine: &Engine, sandbox: &str) -> (usize, usize) {
    let all = Page::all();
    let sessions = engine.sessions(&project(), &name(sandbox), &all).await.unwrap().items.len();
    let commands = engine.commands(&project(), &name(sandbox), &all).await.unwrap().items.len();
    (sessions, commands)
}

async fn sql(index: &Path, statement: &'static str) {
    let url = format!("sqlite://{}", index.display());
    let mut raw = SqliteConnection::connect(&url).await.unwrap();
    sqlx::raw_sql(statement).execute(&mut raw).await.unwrap();
    raw.close().await.unwrap();
}

fn beside(index: &Path, suffix: &str) -> PathBuf {
    PathBuf::from(format!("{}{suffix}", index.display()))
}

/// Overwrites the part of a file between two fractions of its length, in percent.
fn spoil(path: &Path, from: u64, to: u64) {
    let file = fs::File::options().write(true).open(path).unwrap();
    let length = file.metadata().unwrap().len();
    let (from, to) = (length * from / 100, length * to / 100);
    file.write_all_at(&vec![0xa5; usize::try_from(to - from).unwrap()], from).unwrap();
}

/// Does something bad to an index that no daemon has open.
async fn damage(what: &str, index: &Path, older: &Path) {
    match what {
        "missing" => fs::remove_file(index).unwrap(),
        "empty" => fs::write(index, "").unwrap(),
        "garbage" => fs::write(index, "rubbish".repeat(10_000)).unwrap(),
        "truncated" => {
            let file = fs::File::options().write(true).open(index).unwrap();
            file.set_len(file.metadata().unwrap().len() / 2).unwrap();
        }
        "the header is garbage" => spoil(index, 0, 1),
        "the middle is garbage" => spoil(index, 30, 70),
        "a directory" => {
            fs::remove_file(index).unwrap();
            fs::create_dir_all(index.join("with/something")).unwrap();
        }
        "a garbage log" => fs::write(beside(index, "-wal"), "x".repeat(100_000)).unwrap(),
        "directories beside it" => {
            fs::create_dir(beside(index, "-wal")).unwrap();
            fs::create_dir(beside(index, "-shm")).unwrap();
        }
        "no permissions" => {
            fs::set_permissions(index, fs::Permissions::from_mode(0o000)).unwrap();
        }
        "no tables" => sql(index, "PRAGMA foreign_keys = OFF; DROP TABLE commands").await,
        "documents that do not parse" => {
            sql(index, "UPDATE commands SET doc = '{'; UPDATE sessions SET doc = '{'").await;
        }
        "a dangling link" => {
            fs::remove_file(index).unwrap();
            std::os::unix::fs::symlink("/nowhere/at/all", index).unwrap();
        }
        "an older one" => {
            fs::copy(older, index).unwrap();
        }
        "without a stamp" => fs::remove_file(index.with_extension("stamp")).unwrap(),
        other => panic!("{other}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_state_of_the_index_hides_anything_or_stops_anyone() {
    let house = house!();
    let index = house.data().join("index.sqlite");
    let older = house.path().join("older");
    let mut engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    stop(&engine, "app").await;
    house.close(engine).await;
    fs::copy(&index, &older).unwrap();
    engine = house.open().await;
    ok(&engine, "app", "echo kept > /work/file").await;
    stop(&engine, "app").await;
    let mut commands = 1;
    #[allow(clippy::explicit_counter_loop)] // it counts commands, which other rounds may add to
    for what in [
        "missing",
        "empty",
        "garbage",
        "truncated",
        "the header is garbage",
        "the middle is garbage",
        "a directory",
        "a garbage log",
        "directories beside it",
        "no permissions",
        "no tables",
        "documents that do not parse",
        "a dangling link",
        "an older one",
        "without a stamp",
    ] {
        let before = rows(&engine, "app").await;
        assert_eq!(before.1, commands, "{what}");
        house.close(engine).await;
        damage(what, &index, &older).await;
        engine = house.open().await;
        let listed = engine.list(&project(), &Filter::default(), &Page::all()).await.unwrap();
        assert_eq!(listed.items.len(), 1, "{what}");
        assert_eq!(rows(&engine, "app").await, before, "{what}");
        assert_eq!(ok(&engine, "app", "cat /work/file").await, "kept\n", "{what}");
        commands += 1;
        stop(&engine, "app").await;
    }
    house.close(engine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_index_that_breaks_under_a_daemon_is_built_again() {
    let house = house!();
    let index = house.data().join("index.sqlite");
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    ok(&engine, "app", "echo kept > /work/file").await;
    let before = rows(&engine, "app").await;
    // Behind the daemon's back, and twice: the second time it is built in memory.
    for _ in 0..2 {
        let _ = fs::metadata(&index).map(|_| ());
        sql(&index, "PRAGMA foreign_keys = OFF; DROP TABLE IF EXISTS sessions; DROP TABLE IF EXISTS commands").await;
        assert_eq!(rows(&engine, "app").await.0, before.0);
    }
    assert_eq!(rows(&engine, "app").await, before);
    assert_eq!(ok(&engine, "app", "cat /work/file").await, "kept\n");
    assert!(found(&engine, DamageKind::IndexRebuilt, "index.sqlite").is_some());
    assert!(engine.create(&project(), small("app"), None).await.is_err(), "its name is taken");
    let engine = house.reopen(engine).await;
    assert_eq!(rows(&engine, "app").await, (before.0, before.1 + 1));
    house.close(engine).await;
}

async fn second(engine: &Engine) -> (Name, String) {
    let other = name("other");
    engine.create_project(other.clone()).await.unwrap();
    let (_, key) = engine.create_key(&other, "theirs".into(), Scope::Write, None).await.unwrap();
    (other, key)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_project_without_its_manifest_is_locked_and_the_others_go_on() {
    let house = house!();
    let manifest = house.data().join("projects/default.json");
    let mut engine = house.open().await;
    let (other, theirs) = second(&engine).await;
    let deny = Policy { mode: Mode::DenyAll, ..Policy::default() };
    let bound = ProjectNetwork { bound: Some(deny), ..ProjectNetwork::default() };
    engine.set_project_network(&project(), bound.clone()).await.unwrap();
    let (_, ours) = engine.create_key(&project(), "ours".into(), Scope::Write, None).await.unwrap();
    engine.create(&project(), small("app"), None).await.unwrap();
    ok(&engine, "app", "echo kept > /work/file").await;
    stop(&engine, "app").await;
    house.close(engine).await;
    let good = fs::read_to_string(&manifest).unwrap();
    let later = good.replacen("\"format\": 5", "\"format\": 99", 1);
    let cases: [(&str, Option<String>); 5] = [
        ("missing", None),
        ("empty", Some(String::new())),
        ("garbage", Some("{".to_owned())),
        ("edited", Some(good.replace("deny-all", "allow-all"))),
        ("newer", Some(later)),
    ];
    for (what, text) in cases {
        match &text {
            Some(text) => fs::write(&manifest, text).unwrap(),
            None => fs::remove_file(&manifest).unwrap(),
        }
        engine = house.open().await;
        assert!(engine.locked_projects().contains_key(&project()), "{what}");
        let told = found(&engine, DamageKind::SecurityConfig, "projects/default.json").unwrap();
        assert!(told.consequence.contains("--reset-project default"), "{told:?}");
        assert!(matches!(engine.authenticate(&ours), Err(Error::BadKey)), "{what}");
        let refused = engine.start(&project(), &name("app"), None).await;
        assert!(matches!(refused, Err(Error::ProjectLocked { .. })), "{what}: {refused:?}");
        let refused = engine.create_project(project()).await;
        assert!(matches!(refused, Err(Error::ProjectLocked { .. })), "{what}: {refused:?}");
        let refused = engine.create(&project(), small("new"), None).await;
        assert!(matches!(refused, Err(Error::ProjectLocked { .. })), "{what}: {refused:?}");
        assert!(engine.authenticate(&theirs).is_ok(), "{what}");
        engine.create(&other, small("theirs"), None).await.unwrap();
        engine
            .delete(&other, &name("theirs"), sandkeep_core::engine::Delete::default(), None)
            .await
            .unwrap();
        house.close(engine).await;
        assert_eq!(fs::read_to_string(&manifest).ok(), text, "{what}: nothing is put in its place");
        fs::write(&manifest, &good).unwrap();
    }
    engine = house.open().await;
    assert!(engine.authenticate(&ours).is_ok());
    assert_eq!(engine.project_network(&project()).unwrap(), bound);
    assert_eq!(ok(&engine, "app", "cat /work/file").await, "kept\n");
    house.close(engine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_key_for_secrets_is_not_replaced() {
    let house = house!();
    let key = house.data().join("secrets.key");
    let engine = house.open().await;
    let secret: SecretName = "TOKEN".parse().unwrap();
    let set = || SetSecret {
        value: Zeroizing::new("hunter2hunter2".to_owned()),
        hosts: None,
        places: None,
        tags: None,
    };
    engine.set_secret(&project(), secret.clone(), set()).await.unwrap();
    house.close(engine).await;
    let good = fs::read(&key).unwrap();
    let write = |text: &[u8]| {
        fs::write(&key, text).unwrap();
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    };
    for text in [None, Some("")] {
        match text {
            Some(text) => write(text.as_bytes()),
            None => fs::remove_file(&key).unwrap(),
        }
        let engine = house.open().await;
        assert!(found(&engine, DamageKind::SecurityConfig, "secrets.key").is_some());
        assert!(engine.set_secret(&project(), "NEW".parse().unwrap(), set()).await.is_err());
        engine.create(&project(), small("app"), None).await.unwrap();
        let delete = sandkeep_core::engine::Delete::default();
        engine.delete(&project(), &name("app"), delete, None).await.unwrap();
        house.close(engine).await;
        assert_eq!(fs::read_to_string(&key).ok().as_deref(), text, "none was made");
    }
    write(&good);
    fs::write(house.data().join("token.key"), "short").unwrap();
    let engine = house.open().await;
    assert!(found(&engine, DamageKind::SecurityConfig, "secrets.key").is_none());
    assert!(found(&engine, DamageKind::SecurityConfig, "token.key").is_some());
    engine.set_secret(&project(), "NEW".parse().unwrap(), set()).await.unwrap();
    house.close(engine).await;
}

/// Changes one byte of a file and none of its metadata.
fn flip(path: &Path) {
    let modified = fs::metadata(path).unwrap().modified().unwrap();
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, 0).unwrap();
    file.write_all_at(&[byte[0] ^ 1], 0).unwrap();
    file.set_modified(modified).unwrap();
}

/// The layer that the current snapshot of a sandbox has on top.
async fn top(engine: &Engine, sandbox: &str) -> LayerId {
    let of = SnapshotFilter { sandbox: Some(name(sandbox)), deleted: false };
    let found = engine.snapshots(&project(), of, &Page::all()).await.unwrap();
    found.items[0].item.layers[0].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_changed_is_found_and_nothing_starts_on_it() {
    let mut house = house!();
    house.settings.scrub.digest_rate = 1 << 30;
    let engine = house.open().await;
    for sandbox in ["app", "other"] {
        engine.create(&project(), small(sandbox), None).await.unwrap();
        ok(&engine, sandbox, "echo first > /work/file").await;
        stop(&engine, sandbox).await;
    }
    ok(&engine, "app", "echo second > /work/other").await;
    stop(&engine, "app").await;
    let layer = top(&engine, "app").await;
    let dir = house.data().join(format!("layers/{layer}"));
    let subject = format!("layers/{layer}");
    until("a digest", async || dir.join("digest.jsonl").exists().then_some(())).await;
    assert!(engine.scrub_now().await.unwrap().is_empty());
    let file = dir.join("diff/work/other");
    flip(&file);
    assert!(!engine.fsck().await.unwrap().is_broken(), "only reading it tells");
    let wrong = engine.scrub_now().await.unwrap();
    assert_eq!(wrong.len(), 1);
    assert_eq!(wrong[0].0, layer);
    let told = found(&engine, DamageKind::LayerChanged, &subject).unwrap();
    assert!(told.detail.contains("work/other"), "{told:?}");
    let refused = engine.start(&project(), &name("app"), None).await;
    let Err(Error::Unresumable { reason, offers, .. }) = &refused else { panic!("{refused:?}") };
    assert!(reason.contains("work/other"), "{reason}");
    assert_eq!(offers.len(), 1, "the snapshot before it is whole");
    assert_eq!(ok(&engine, "other", "cat /work/file").await, "first\n");
    stop(&engine, "other").await;
    // It is what was sealed again.
    flip(&file);
    assert!(engine.scrub_now().await.unwrap().is_empty());
    assert_eq!(ok(&engine, "app", "cat /work/other").await, "second\n");
    stop(&engine, "app").await;
    // Before there is a digest, the record of the seal decides.
    house.close(engine).await;
    house.settings.scrub.digest_rate = 0;
    let engine = house.open().await;
    ok(&engine, "app", "echo third > /work/third").await;
    stop(&engine, "app").await;
    let layer = top(&engine, "app").await;
    fs::remove_file(house.data().join(format!("layers/{layer}/diff/work/third"))).unwrap();
    assert!(engine.fsck().await.unwrap().is_broken());
    assert_eq!(engine.scrub_now().await.unwrap().len(), 1);
    let refused = engine.start(&project(), &name("app"), None).await;
    assert!(matches!(refused, Err(Error::Unresumable { .. })), "{refused:?}");
    house.close(engine).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_layer_of_an_image_costs_that_image_alone() {
    let house: House = house!();
    let engine = house.open().await;
    engine.create(&project(), small("app"), None).await.unwrap();
    ok(&engine, "app", "echo kept > /work/file").await;
    stop(&engine, "app").await;
    let tar = house.path().join("small.tar");
    let another = house.path().join("another.tar");
    fs::copy(&tar, &another).unwrap();
    let append = ["-C", "/etc", "-rf", another.to_str().unwrap(), "hostname"];
    assert!(std::process::Command::new("tar").args(append).status().unwrap().success());
    let silent = sandkeep_core::store::image::Reporter::silent();
    let image = engine.images().import("second", &another, &silent).await.unwrap();
    house.close(engine).await;
    let layer = &image.layers[0];
    let small = {
        let text = fs::read(house.data().join("images/small.json")).unwrap();
        let image: serde_json::Value = serde_json::from_slice(&text).unwrap();
        image["layers"][0].as_str().unwrap().to_owned()
    };
    assert_ne!(small, layer.as_str(), "images share no layers here");
    fs::rename(house.data().join(format!("layers/{layer}")), house.path().join("layer")).unwrap();
    let engine = house.open().await;
    let subject = format!("layers/{layer}");
    until("the damage", async || found(&engine, DamageKind::Missing, &subject)).await;
    assert_eq!(ok(&engine, "app", "cat /work/file").await, "kept\n");
    house.close(engine).await;
}
