//! Killed at any place, memory layers are sealed or were never there, and what a machine wrote is in its layer or on its disk.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use sandkeep_core::model::{Fingerprint, LayerId, MemoryId, MemoryLayer, Size, Timestamp};
use sandkeep_core::store::{NewMemory, Store};
use sandkeep_testkit::victim;
use tempfile::TempDir;

/// As much as the disk could hold.
const AMPLE: u64 = 1 << 30;

const STEPS: [&str; 10] = [
    "store.begin_memory.done",
    "store.seal_memory.before_manifest",
    "store.seal_memory.sealed",
    "store.discard_memory.before",
    "store.collect_memory.before",
    "store.fill.begun",
    "store.fill.unpacked",
    "store.fill.synced",
    "store.fill.replaced",
    "store.fill.done",
];

fn new() -> NewMemory {
    let text = || "x".to_owned();
    let (driver, hypervisor, accelerator, cpu, kernel) = (text(), text(), text(), text(), text());
    let (memory, disk) = (Size(1), Size(1));
    let fingerprint =
        Fingerprint { driver, hypervisor, accelerator, cpu, kernel, memory, cpus: 1, disk };
    NewMemory { fingerprint, ram: Size(4096), roots: Vec::new(), disk: Some("disk.img".to_owned()) }
}

async fn sealed(store: &Store) -> MemoryId {
    let (id, dir) = store.begin_memory().await.expect("begun");
    for name in ["devices", "index", "pages", "disk.img"] {
        fs::write(dir.join(name), name.repeat(1000)).expect("a file");
    }
    store.seal_memory(&id, new()).await.expect("sealed").id
}

/// What the machine exports.
fn export() -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for (path, kind, content) in
        [("./", tar::EntryType::Directory, &b""[..]), ("./new", tar::EntryType::Regular, b"new")]
    {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(content.len() as u64);
        header.set_mode(0o700);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1);
        header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
        header.set_cksum();
        archive.append(&header, content).expect("an entry");
    }
    archive.into_inner().expect("an archive")
}

/// What the process that dies does. Without a directory it is not that process and does nothing.
#[tokio::test]
async fn victim() {
    let Some(data) = std::env::var_os("SANDKEEP_TEST_DATA") else { return };
    let data = Path::new(&data);
    let store = Store::open(data).expect("a store");
    let noted = |name: &str| fs::read_to_string(data.join("bin").join(name)).expect("noted");
    let open: LayerId = noted("open").parse().expect("an id");
    let held: MemoryId = noted("held").parse().expect("an id");
    sealed(&store).await;
    let (useless, _) = store.begin_memory().await.expect("begun");
    store.discard_memory(&useless).await.expect("discarded");
    store.collect_memory(&HashSet::from([held]), Timestamp::MAX).await.expect("collected");
    store.import_disk(&open, &export()[..], AMPLE).await.expect("filled");
}

#[tokio::test]
async fn killed_at_every_step() {
    for step in STEPS {
        let dir = TempDir::with_prefix("keep").expect("a temporary directory");
        let data = dir.path().join("data");
        let store = Store::open(&data).expect("a store");
        let held = sealed(&store).await;
        let open = store.begin(&[]).await.expect("begun");
        let disk = store.diff_dir(&open).with_file_name("disk");
        fs::create_dir(&disk).expect("a directory");
        fs::write(disk.join("0.img"), "the truth").expect("a disk");
        fs::write(store.diff_dir(&open).join("old"), "old").expect("a file");
        fs::write(data.join("bin/open"), open.as_str()).expect("noted");
        fs::write(data.join("bin/held"), held.as_str()).expect("noted");
        store.sync().await.expect("synced");
        drop(store);

        let output = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", victim!(), "--nocapture"])
            .env("SANDKEEP_TEST_DATA", &data)
            .env("SANDKEEP_FAILPOINT", step)
            .output()
            .expect("it starts");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && !text.contains("panicked"), "{step}: {text}");

        let store = Store::open(&data).expect("it opens again");
        store.check_memory(std::slice::from_ref(&held)).await.expect("what was held is good");
        for layer in store.scan::<MemoryLayer>().await.expect("scanned").good {
            store.check_memory(&[layer.id]).await.expect("what is sealed is whole");
        }
        let live = HashSet::from([held.clone()]);
        store.collect_memory(&live, Timestamp::MAX).await.expect("collected");
        let left = fs::read_dir(data.join("memory")).expect("memory").count();
        assert_eq!(left, 1, "{step}: nothing is left over");

        let diff = store.diff_dir(&open);
        let (old, new) = (diff.join("old").exists(), diff.join("new").exists());
        if store.has_disk(&open).expect("looked") {
            let truth = fs::read_to_string(disk.join("0.img")).expect("the disk is whole");
            assert_eq!(truth, "the truth", "{step}");
            assert_ne!(old, new, "{step}: one or the other");
            store.import_disk(&open, &export()[..], AMPLE).await.expect("filled now");
        } else {
            assert!(new && !old, "{step}: the disk goes after it was taken over");
        }
        assert_eq!(fs::read_to_string(diff.join("new")).expect("new"), "new", "{step}");
        assert!(!diff.join("old").exists() && !disk.exists(), "{step}");
    }
}
