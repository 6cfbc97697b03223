//! The digest of a layer: which changes it finds, in both of its formats, and that it stays small.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};

use crate::store_world::World;
use rustix::fs::{Mode, OFlags};
use sandkeep_core::model::LayerId;
use sandkeep_core::store::{DigestVerdict, NameDifference, ReadThrottle, SealOptions, StoreError};
use sha2::{Digest, Sha256};

/// A tree with names whose order in a directory is not that of their paths.
fn tree(root: &Path) {
    for dir in ["a", "a/b", "a.d", "a-"] {
        fs::create_dir(root.join(dir)).unwrap();
    }
    for file in ["a/one", "a/b/two", "a.d/three", "a-/four", "a%", "a\n", "z"] {
        fs::write(root.join(file), file).unwrap();
    }
    symlink("z", root.join("link")).unwrap();
    fs::hard_link(root.join("a/one"), root.join("a.d/same")).unwrap();
    fs::hard_link(root.join("a/one"), root.join("same")).unwrap();
    fs::hard_link(root.join("z"), root.join("a/z")).unwrap();
    for file in ["a/twin", "twin"] {
        fs::write(root.join(file), "twin").unwrap();
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        fs::File::options().append(true).open(root.join(file)).unwrap().set_modified(time).unwrap();
    }
}

/// What [`change`] changes. Of names of the same file, the first is not reported.
fn changes() -> Vec<NameDifference> {
    let mut changes: Vec<_> = ["a-/four", "same", "twin", "z"]
        .map(|path| NameDifference::Changed(path.to_owned()))
        .into();
    changes.push(NameDifference::Missing("a/b/two".to_owned()));
    changes.push(NameDifference::Extra("a.d/new".to_owned()));
    changes
}

/// Changes names and leaves the times of their directories.
fn change(root: &Path) {
    let dirs = ["", "a", "a/b", "a.d", "a-"].map(|dir| root.join(dir));
    let times = dirs.clone().map(|dir| fs::metadata(dir).unwrap().modified().unwrap());
    fs::write(root.join("a-/four"), "a-/FOUR").unwrap();
    fs::remove_file(root.join("a/b/two")).unwrap();
    fs::write(root.join("a.d/new"), "").unwrap();
    // Other files with the same content, and two files that become one.
    for path in ["same", "a/z"] {
        let path = root.join(path);
        let content = fs::read(&path).unwrap();
        let (before, time) = (inode(&path), fs::metadata(&path).unwrap().modified().unwrap());
        fs::write(root.join("other"), content).unwrap();
        fs::rename(root.join("other"), &path).unwrap();
        fs::File::options().append(true).open(&path).unwrap().set_modified(time).unwrap();
        assert_ne!(inode(&path), before);
    }
    fs::remove_file(root.join("twin")).unwrap();
    fs::hard_link(root.join("a/twin"), root.join("twin")).unwrap();
    for (dir, time) in dirs.iter().zip(times) {
        fs::File::open(dir).unwrap().set_modified(time).unwrap();
    }
}

fn inode(path: &Path) -> u64 {
    fs::symlink_metadata(path).unwrap().ino()
}

fn digest_of(world: &World, layer: &LayerId) -> PathBuf {
    world.data().join(format!("layers/{layer}/digest.jsonl"))
}

async fn damage(world: &World, layer: &LayerId) -> Vec<NameDifference> {
    match world.store.verify(layer, None).await.unwrap() {
        DigestVerdict::Damaged(differences) => differences,
        verdict => panic!("{verdict:?}"),
    }
}

fn assert_changes(found: &[NameDifference]) {
    for expected in changes() {
        assert!(found.contains(&expected), "{expected:?} in {found:?}");
    }
    assert_eq!(found.len(), changes().len(), "{found:?}");
}

#[tokio::test]
async fn every_sort_of_change_is_found() {
    let world = World::new();
    let layer = world.image(tree).await;
    assert_eq!(world.store.record_digest(&layer, None).await.unwrap(), DigestVerdict::Intact);
    assert_eq!(world.store.verify(&layer, None).await.unwrap(), DigestVerdict::Intact);
    change(&world.store.diff_dir(&layer));
    assert_changes(&damage(&world, &layer).await);
    assert_eq!(fs::read_dir(world.data().join("tmp")).unwrap().count(), 0);
}

#[tokio::test]
async fn a_stop_ends_it_at_the_next_name_also_before_files_are_read() {
    let world = World::new();
    let layer = world.image(tree).await;
    // A look at all names finds this.
    change(&world.store.diff_dir(&layer));
    let stop = Arc::new(AtomicBool::new(true));
    let throttle = ReadThrottle { rate: u64::MAX, bypass_cache: false, stop };
    let ended = world.store.record_digest(&layer, Some(&throttle)).await;
    assert!(matches!(ended, Err(StoreError::ShuttingDown)), "{ended:?}");
    let ended = world.store.verify(&layer, Some(&throttle)).await;
    assert!(matches!(ended, Err(StoreError::ShuttingDown)), "{ended:?}");
}

#[tokio::test]
async fn digests_of_earlier_versions_are_compared() {
    for format in [4, 5] {
        let world = World::new();
        let layer = world.image(tree).await;
        let path = digest_of(&world, &layer).with_extension("json");
        let document = earlier_document(&world.store.diff_dir(&layer), format);
        fs::write(&path, &document).unwrap();
        assert_eq!(
            world.store.verify(&layer, None).await.unwrap(),
            DigestVerdict::Intact,
            "{document}"
        );
        assert_eq!(world.store.record_digest(&layer, None).await.unwrap(), DigestVerdict::Intact);
        assert!(!digest_of(&world, &layer).exists(), "the first digest stays");
        let long_ago = SystemTime::now() - Duration::from_secs(1000);
        fs::File::options().append(true).open(&path).unwrap().set_modified(long_ago).unwrap();
        assert!(world.store.verified_at(&layer).unwrap() < long_ago + Duration::from_secs(1));
        world.store.verify(&layer, None).await.unwrap();
        assert!(world.store.verified_at(&layer).unwrap() > long_ago + Duration::from_secs(900));
        change(&world.store.diff_dir(&layer));
        assert_changes(&damage(&world, &layer).await);
        // What is accepted gets a digest of today.
        world.store.accept_layer(&layer).await.unwrap();
        assert!(!path.exists() && digest_of(&world, &layer).exists());
        assert_eq!(world.store.verify(&layer, None).await.unwrap(), DigestVerdict::Intact);
    }
}

#[tokio::test]
async fn of_two_digests_the_newer_one_counts() {
    let world = World::new();
    let layer = world.image(tree).await;
    world.store.record_digest(&layer, None).await.unwrap();
    change(&world.store.diff_dir(&layer));
    // An earlier version accepted the layer, and did not know of the other file.
    let path = digest_of(&world, &layer).with_extension("json");
    fs::write(&path, earlier_document(&world.store.diff_dir(&layer), 5)).unwrap();
    let soon = SystemTime::now() + Duration::from_secs(10);
    fs::File::options().append(true).open(&path).unwrap().set_modified(soon).unwrap();
    assert_eq!(world.store.verify(&layer, None).await.unwrap(), DigestVerdict::Intact);
}

#[tokio::test]
async fn a_damaged_digest_is_not_taken_for_a_damaged_layer() {
    let world = World::new();
    let layer = world.image(tree).await;
    world.store.record_digest(&layer, None).await.unwrap();
    let path = digest_of(&world, &layer);
    let good = fs::read(&path).unwrap();
    let entries = good.iter().position(|byte| *byte == b'[').unwrap();
    for at in (0..good.len()).step_by(7).chain(0..entries) {
        let mut flipped = good.clone();
        flipped[at] ^= 1;
        for bytes in [&flipped, &good[..at].to_vec()] {
            fs::write(&path, bytes).unwrap();
            let verified = world.store.verify(&layer, None).await;
            let refused =
                matches!(verified, Err(StoreError::Damaged { .. } | StoreError::TooNew { .. }));
            assert!(refused, "byte {at}: {verified:?}");
            assert!(world.store.record_digest(&layer, None).await.is_err(), "byte {at}");
        }
    }
    fs::write(&path, good).unwrap();
    assert_eq!(world.store.verify(&layer, None).await.unwrap(), DigestVerdict::Intact);
}

#[tokio::test]
async fn the_digest_of_a_deep_tree_is_not_longer_than_its_names() {
    let world = World::new();
    let open = world.store.begin(&[]).await.unwrap();
    let diff = world.store.diff_dir(&open);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let mut dir = rustix::fs::open(&diff, flags, Mode::empty()).unwrap();
    let (name, depth) = ("d".repeat(50), 1500);
    for _ in 0..depth {
        for name in [name.as_str(), "zz"] {
            rustix::fs::mkdirat(&dir, name, Mode::RWXU).unwrap();
        }
        dir = rustix::fs::openat(&dir, name.as_str(), flags, Mode::empty()).unwrap();
    }
    let options = SealOptions::default();
    let layer = world.store.seal(&open, &options).await.unwrap().unwrap().id;
    world.store.record_digest(&layer, None).await.unwrap();
    let bytes = fs::metadata(digest_of(&world, &layer)).unwrap().len();
    assert!(bytes < 2 * depth * 200, "{bytes} bytes for {depth} levels");
    assert_eq!(world.store.verify(&layer, None).await.unwrap(), DigestVerdict::Intact);
    rustix::fs::mkdirat(&dir, "new", Mode::RWXU).unwrap();
    let found = damage(&world, &layer).await;
    let deepest = vec![name; 1500].join("/");
    assert!(found.contains(&NameDifference::Extra(format!("{deepest}/new"))));
    assert!(found.contains(&NameDifference::Changed(deepest)));
}

#[tokio::test]
async fn a_large_directory_is_compared_by_name_and_the_list_of_differences_ends() {
    let world = World::new();
    let count = 70_000;
    let fill = |root: &Path| {
        fs::create_dir(root.join("many")).unwrap();
        for number in 0..count {
            symlink("to", root.join(format!("many/{number}"))).unwrap();
        }
    };
    let layer = world.image(fill).await;
    world.store.record_digest(&layer, None).await.unwrap();
    assert_eq!(world.store.verify(&layer, None).await.unwrap(), DigestVerdict::Intact);
    let many = world.store.diff_dir(&layer).join("many");
    fs::remove_file(many.join("69999")).unwrap();
    let found = damage(&world, &layer).await;
    assert!(found.contains(&NameDifference::Missing("many/69999".to_owned())), "{found:?}");
    assert_eq!(found.len(), 2, "and its directory: {found:?}");
    fs::remove_dir_all(&many).unwrap();
    let found = damage(&world, &layer).await;
    assert_eq!(found.len(), 10_001);
    // With the directory and the root, which lost a name.
    let more = format!("{} more names differ", count + 2 - 10_000);
    assert_eq!(found.last(), Some(&NameDifference::Other(more)));
}

/// What earlier versions wrote as `digest.json`.
fn earlier_document(root: &Path, format: u32) -> String {
    let (mut entries, mut names) = (BTreeMap::new(), BTreeMap::new());
    describe(root, root, &mut entries, &mut names);
    for mut group in names.into_values() {
        group.sort();
        for path in &group[1..] {
            let hash: &mut String = entries.get_mut(path).unwrap();
            *hash = format!("{hash} = {}", group[0]);
        }
    }
    let entries = serde_json::to_string_pretty(&entries).unwrap();
    let text = |checksum: &str| {
        format!(
            "{{\n  \"format\": {format},{checksum}\n  \"digest\": \"sha256:00\",\n  \"entries\": {entries}\n}}\n"
        )
    };
    if format < 5 {
        return text("");
    }
    let with = |digits: &str| text(&format!("\n  \"checksum\": \"{digits}\","));
    with(&hex::encode(Sha256::digest(with(&"0".repeat(64)))))
}

fn describe(
    root: &Path,
    path: &Path,
    entries: &mut BTreeMap<String, String>,
    names: &mut BTreeMap<u64, Vec<String>>,
) {
    let text = path.strip_prefix(root).unwrap().to_str().unwrap();
    let text = text.replace('%', "%25").replace('\n', "%0A");
    let stat = fs::symlink_metadata(path).unwrap();
    let size = if stat.is_dir() { 0 } else { stat.size() };
    let mut hash = Sha256::new();
    hash.update(format!(
        "{:o} {} {} {size} {}.{} 0:0\n\n",
        stat.mode(),
        stat.uid(),
        stat.gid(),
        stat.mtime(),
        stat.mtime_nsec()
    ));
    if stat.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            describe(root, &entry.unwrap().path(), entries, names);
        }
    } else if stat.is_symlink() {
        hash.update(fs::read_link(path).unwrap().as_os_str().as_encoded_bytes());
    } else {
        hash.update(fs::read(path).unwrap());
        names.entry(stat.ino()).or_default().push(text.clone());
    }
    entries.insert(text, hex::encode(hash.finalize()));
}
