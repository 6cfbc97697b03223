//! Memory layers: sealed whole or not at all, checked before they are used, and removed when
//! nothing holds them.

use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::store_world::{World, project, sandbox};
use sandkeep_core::model::{
    Change, FORMAT, Fingerprint, LayerId, MemoryId, MemoryLayer, OpenSession, PAGE, PageIndex,
    PageRun, Size, Template, Timestamp, now,
};
use sandkeep_core::store::search::Needles;
use sandkeep_core::store::{DigestVerdict, Durability, NewMemory, Problem, Store, StoreError};
use zeroize::Zeroizing;

fn new(roots: &[&str]) -> NewMemory {
    let fingerprint = Fingerprint {
        driver: "microvm".to_owned(),
        hypervisor: "qemu 1".to_owned(),
        accelerator: "tcg".to_owned(),
        cpu: "max".to_owned(),
        kernel: "k".to_owned(),
        memory: Size(1 << 20),
        cpus: 1,
        disk: Size(1 << 30),
    };
    let roots = roots.iter().map(|root| (*root).to_owned()).collect();
    NewMemory { fingerprint, ram: Size(1 << 20), roots, disk: Some("disk.img".to_owned()) }
}

/// Writes what a capture writes.
fn capture(dir: &std::path::Path) {
    let run = PageRun { first: 3, count: 2, at: Some(0) };
    let index = PageIndex { whole: true, ram: 256, runs: vec![run] };
    fs::write(dir.join("index"), index.encode()).expect("an index");
    fs::write(dir.join("pages"), vec![7; 2 * PAGE as usize]).expect("pages");
    fs::write(dir.join("devices"), "the devices").expect("devices");
    fs::write(dir.join("disk.img"), vec![1; 9000]).expect("a disk");
}

async fn sealed(store: &Store, roots: &[&str]) -> MemoryLayer {
    let (id, dir) = store.begin_memory().await.expect("begun");
    capture(&dir);
    store.seal_memory(&id, new(roots)).await.expect("sealed")
}

fn reason(outcome: Result<Vec<std::path::PathBuf>, StoreError>, layer: &MemoryId) -> String {
    match outcome {
        Err(StoreError::BadMemory { id, reason }) if id == *layer => reason,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_layer_is_sealed_whole_and_checked_before_use() {
    let world = World::new();
    let store = &world.store;
    let (id, dir) = store.begin_memory().await.expect("begun");
    assert_eq!(dir, store.memory_dir(&id));
    assert!(matches!(store.seal_memory(&id, new(&[])).await, Err(StoreError::BadMemory { .. })));
    assert!(
        reason(store.check_memory(std::slice::from_ref(&id)).await, &id).contains("never finished")
    );
    capture(&dir);
    let layer = store.seal_memory(&id, new(&["a.erofs"])).await.expect("sealed");
    assert_eq!(layer.sizes["pages"], 2 * PAGE);
    assert_eq!(layer.digests.keys().collect::<Vec<_>>(), ["devices", "index"]);
    assert!(layer.bytes >= 2 * PAGE + 9000);
    assert_eq!(store.seal_memory(&id, new(&[])).await.expect("sealed before"), layer);
    store.discard_memory(&id).await.expect("a sealed one is left alone");
    let below = sealed(store, &["b.erofs"]).await.id;
    let chain = [id.clone(), below.clone()];
    let dirs = store.check_memory(&chain).await.expect("a good chain");
    assert_eq!(dirs, [store.memory_dir(&id), store.memory_dir(&below)]);
    let lower = store.read::<MemoryLayer>(&below).await.expect("it is on record");
    assert_eq!(
        (layer.roots, lower.roots),
        (vec!["a.erofs".to_owned()], vec!["b.erofs".to_owned()])
    );

    let gone = MemoryId::fresh();
    assert!(
        reason(store.check_memory(&[id.clone(), gone.clone()]).await, &gone).contains("not there")
    );
    let lower = store.memory_dir(&below);
    for (file, at, told) in
        [("devices", 3, "not what was sealed"), ("index", 20, "not what was sealed")]
    {
        let file = File::options().read(true).write(true).open(lower.join(file)).expect("a file");
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).expect("a byte");
        file.write_all_at(&[byte[0] ^ 1], at).expect("damage");
        assert!(reason(store.check_memory(&chain).await, &below).contains(told));
        file.write_all_at(&byte, at).expect("mended");
        store.check_memory(&chain).await.expect("it is good again");
    }
    for file in ["pages", "disk.img"] {
        let path = lower.join(file);
        let content = fs::read(&path).expect("a file");
        fs::write(&path, &content[1..]).expect("a shorter file");
        assert!(reason(store.check_memory(&chain).await, &below).contains("bytes and had"));
        fs::remove_file(&path).expect("removed");
        assert!(reason(store.check_memory(&chain).await, &below).contains("missing"));
        fs::write(&path, &content).expect("mended");
    }
    fs::write(lower.join("memory.json"), "{").expect("damage");
    assert!(reason(store.check_memory(&chain).await, &below).contains("damaged"));
}

#[tokio::test]
async fn what_nobody_holds_is_collected_and_what_is_being_written_is_not() {
    let world = World::new();
    let store = &world.store;
    let kept = sealed(store, &[]).await.id;
    let unheld = sealed(store, &[]).await.id;
    let (writing, dir) = store.begin_memory().await.expect("begun");
    let (failed, _) = store.begin_memory().await.expect("begun");
    store.discard_memory(&failed).await.expect("discarded");
    store.discard_memory(&failed).await.expect("twice is as good");
    let old = Timestamp::UNIX_EPOCH;
    let month = now().checked_sub(jiff::SignedDuration::from_hours(31 * 24)).expect("a time");
    let mut templates = Vec::new();
    for (key, used_at) in [("fresh", now()), ("stale", month), ("stale-and-held", old)] {
        let memory = sealed(store, &[]).await.id;
        let template = Template { format: FORMAT, key: key.to_owned(), memory, used_at };
        store.write(&template, Durability::Synced).await.expect("written");
        templates.push(template);
    }
    fs::write(world.data().join("templates/broken.json"), "").expect("a damaged one");
    let live = HashSet::from([kept.clone(), templates[2].memory.clone()]);
    let undecided = store.collect_memory(&live, Timestamp::MAX).await.expect("collected");
    assert_eq!(undecided.layers, [], "nobody knows what the damaged one holds");
    fs::remove_file(world.data().join("templates/broken.json")).expect("removed");
    let before = store.collect_memory(&live, old).await.expect("collected");
    assert_eq!(before.layers, [], "all are younger than that");
    assert_eq!(undecided.templates, ["stale-and-held", "stale"]);
    assert_eq!(before.kept, templates[..1]);
    let collected = store.collect_memory(&live, Timestamp::MAX).await.expect("collected");
    assert_eq!(
        collected.layers.iter().collect::<HashSet<_>>(),
        HashSet::from([&unheld, &templates[1].memory])
    );
    assert!(collected.bytes > 2 * 9000);
    let all = [&kept, &templates[0].memory, &templates[2].memory];
    assert!(all.into_iter().all(|id| store.memory_dir(id).is_dir()));
    assert!(dir.is_dir(), "it is being written");
    capture(&dir);
    store.seal_memory(&writing, new(&[])).await.expect("sealed");
    let collected = store.collect_memory(&live, Timestamp::MAX).await.expect("collected");
    assert_eq!(collected.layers, [writing]);

    // A daemon that died while it captured leaves a layer that nothing continues with.
    let (left, dir) = store.begin_memory().await.expect("begun");
    let data = world.data();
    let _home = world.closed();
    let store = Store::open(&data).expect("opened again");
    let collected = store.collect_memory(&live, Timestamp::MAX).await.expect("collected");
    assert_eq!(collected.layers, [left]);
    assert!(!dir.exists());
}

#[tokio::test]
async fn fsck_and_verify_see_what_is_wrong() {
    let world = World::new();
    let store = &world.store;
    let [held, unheld] = [sealed(store, &[]).await.id, sealed(store, &[]).await.id];
    let of_template = sealed(store, &[]).await.id;
    let (abandoned, _) = store.begin_memory().await.expect("begun");
    let gone = MemoryId::fresh();
    let mut session = sandbox(&[]);
    let mut open = OpenSession::new(LayerId::fresh(), Vec::new());
    open.memory = vec![held.clone(), gone.clone()];
    session.transition(Change::Start(open)).expect("it can be started");
    store.write(&project("p"), Durability::Synced).await.expect("written");
    store.write(&session, Durability::Synced).await.expect("written");
    for (key, memory) in [("good", of_template.clone()), ("bad", gone.clone())] {
        let template = Template { format: FORMAT, key: key.to_owned(), memory, used_at: now() };
        store.write(&template, Durability::Synced).await.expect("written");
    }
    fs::create_dir(world.data().join("memory/what")).expect("a directory");
    let report = store.fsck().await.expect("checked");
    assert_eq!(report.memory, 3);
    let needed_by = format!("sandbox {}", session.id);
    let bytes = store.read::<MemoryLayer>(&unheld).await.expect("read").bytes;
    let mut expected = vec![
        Problem::MissingMemory { needed_by, memory: gone },
        Problem::Stray { path: world.data().join("templates/bad.json") },
        Problem::UnheldMemory { memory: unheld.clone(), bytes },
        Problem::AbandonedMemory { memory: abandoned },
        Problem::Stray { path: world.data().join("memory/what") },
    ];
    let sort = |problems: &mut Vec<Problem>| problems.sort_by_key(|one| format!("{one:?}"));
    let mut found = report.problems.clone();
    sort(&mut found);
    sort(&mut expected);
    assert_eq!(found, expected);
    assert!(report.is_broken());

    assert_eq!(store.verify_memory(&held).await.expect("read"), DigestVerdict::Unknown);
    store.record_memory_digests(&held).await.expect("read");
    assert_eq!(store.verify_memory(&held).await.expect("read"), DigestVerdict::Intact);
    let file = File::options().write(true).open(store.memory_dir(&held).join("pages"));
    file.expect("pages").write_all_at(b"x", 5000).expect("damage");
    let DigestVerdict::Damaged(told) = store.verify_memory(&held).await.expect("read") else {
        panic!("damage is seen")
    };
    assert_eq!(told[0].to_string(), "`pages` is not what was sealed");
    store
        .check_memory(std::slice::from_ref(&held))
        .await
        .expect("large files are not read each time");
    let file = File::options().write(true).open(store.memory_dir(&held).join("devices"));
    file.expect("devices").write_all_at(b"x", 0).expect("damage");
    let report = store.fsck().await.expect("checked");
    let reason = "`devices` is not what was sealed".to_owned();
    assert!(report.problems.contains(&Problem::DamagedMemory { memory: held, reason }));
}

#[tokio::test]
async fn values_are_found_in_pages_and_on_the_disk() {
    let world = World::new();
    let store = &world.store;
    let (id, dir) = store.begin_memory().await.expect("begun");
    capture(&dir);
    let page = PAGE as usize;
    // In RAM: pages 3, 4, then 9. In the file: page 9, then 4, then 3, and a page of nothing.
    let runs = [(3, 2), (4, 1), (9, 0)].map(|(first, place)| PageRun {
        first,
        count: 1,
        at: Some(place * PAGE),
    });
    let index = PageIndex { whole: true, ram: 256, runs: runs.to_vec() };
    fs::write(dir.join("index"), index.encode()).expect("an index");
    let mut pages = vec![b'.'; 3 * page];
    let mut put = |at: usize, text: &[u8]| pages[at..at + text.len()].copy_from_slice(text);
    // Over the end of page 3 into page 4, which are far apart in the file.
    put(3 * page - 10, b"sekrit-one");
    put(page, b"-and-its-rest");
    // Over the end of page 9 into page 4: beside each other in the file alone.
    put(page - 9, b"chance-of");
    fs::write(dir.join("pages"), &pages).expect("pages");
    let mut disk = vec![0; 300_000];
    disk[200_001..200_018].copy_from_slice(b"written-to-a-file");
    fs::write(dir.join("disk.img"), &disk).expect("a disk");
    let secrets = [
        ("RAM", "sekrit-one-and-its-rest"),
        ("APART", "chance-of-and-its-rest"),
        ("DISK", "written-to-a-file"),
        ("ABSENT", "nobody-wrote-this"),
    ];
    let secrets = secrets.map(|(name, value)| (name.to_owned(), Zeroizing::new(value.to_owned())));
    let needles = Arc::new(Needles::new(&secrets));
    let found = store.search_memory(&id, &needles).await.expect("searched");
    let told: Vec<_> =
        found.iter().map(|one| (one.name.as_str(), one.file.as_str(), one.offset)).collect();
    assert_eq!(told, [("RAM", "pages", 4 * PAGE - 10), ("DISK", "disk.img", 200_001)]);
}
