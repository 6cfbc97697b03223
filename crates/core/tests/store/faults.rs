//! The store on a disk that loses power and returns errors.
//!
//! What was acknowledged exists after a power cut, on filesystems that keep no order among what is
//! not synced. What a failing disk may have lost is never acknowledged, whichever sync got the
//! error first and however often it is tried again.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use sandkeep_core::model::{LayerId, Sandbox};
use sandkeep_core::store::{Durability, SealOptions, Store, StoreError, StoreOptions};
use sandkeep_testkit::daemon::skipped;
use sandkeep_testkit::fault_disk::{Fault, FaultDisk, Filesystem, unfit};

/// What the disk refuses to store.
const MARK: &[u8] = b"the disk does not like these words";

fn fit(test: &str) -> bool {
    match unfit() {
        Some(why) => {
            skipped(test, &why);
            false
        }
        None => true,
    }
}

/// A store on a disk, without slack: what is older than the last good sync is not in doubt.
struct Place {
    store: Store,
    disk: FaultDisk,
}

impl Place {
    fn new(filesystem: Filesystem) -> Self {
        let disk = match filesystem {
            Filesystem::Xfs => FaultDisk::with_size(filesystem, 320 << 20),
            _ => FaultDisk::new(filesystem),
        };
        let store = open(&disk);
        Self { store, disk }
    }

    fn file(&self, layer: &LayerId, name: &str) -> PathBuf {
        self.store.diff_dir(layer).join(name)
    }

    /// The disk refuses what holds [`MARK`] until a sync has failed; then it is well again.
    async fn lose_what_is_marked(&self) {
        let fault = self.disk.inject(Fault::writes().containing(MARK.to_vec()));
        self.store.sync().await.expect_err("the disk refuses");
        self.disk.heal(fault);
        self.store.sync().await.expect("the kernel told once");
    }

    async fn seal(&self, layer: &LayerId) -> Result<LayerId, StoreError> {
        let sealed = self.store.seal(layer, &SealOptions::default()).await?;
        Ok(sealed.expect("it is not empty").id)
    }

    async fn refused(&self, layer: &LayerId) -> Vec<String> {
        match self.seal(layer).await {
            Err(StoreError::InDoubt { id, files, total }) => {
                assert_eq!((&id, files.len()), (layer, total));
                files
            }
            other => panic!("it should be in doubt: {other:?}"),
        }
    }
}

fn open(disk: &FaultDisk) -> Store {
    let options = StoreOptions {
        sync_slack: Some(Duration::ZERO),
        reserve: Some(0),
        ..StoreOptions::default()
    };
    Store::open_with(&disk.path().join("data"), options).expect("a store")
}

/// Content that fills several pages.
fn marked() -> Vec<u8> {
    MARK.repeat(1000)
}

/// Long enough for the next change to have another time.
async fn tick() {
    tokio::time::sleep(Duration::from_millis(30)).await;
}

async fn two_power_cuts(filesystem: Filesystem) {
    let disk = match filesystem {
        Filesystem::Xfs => FaultDisk::with_size(filesystem, 320 << 20),
        _ => FaultDisk::with_size(filesystem, 128 << 20),
    };
    let mut sandbox: Sandbox = crate::store_world::sandbox(&[]);
    let mut generation = 0;
    for round in 0..10_u64 {
        let store = open(&disk);
        if round > 0 {
            let found = store.read::<Sandbox>(&sandbox.id).await.expect("it was acknowledged");
            assert!(
                found.generation >= generation,
                "round {round}: rolled back to {}",
                found.generation
            );
        }
        // As in the life of a sandbox: starting, running, stopped, and that again.
        for _ in 0..2 {
            for phase in ["starting", "running"] {
                sandbox.config.purpose = phase.to_owned();
                store.write(&sandbox, Durability::Soon).await.expect("written");
            }
            generation += 1;
            sandbox.generation = generation;
            store.write(&sandbox, Durability::Synced).await.expect("acknowledged");
        }
        if round % 2 == 1 {
            // What is not synced when the power goes.
            store.write(&sandbox, Durability::Soon).await.expect("written");
        }
        disk.power_cut(round);
        drop(store);
        let found = open(&disk).read::<Sandbox>(&sandbox.id).await.expect("it was acknowledged");
        assert_eq!(found.generation, generation, "round {round}, first cut");
        let store = open(&disk);
        sandbox.config.purpose = "starting".to_owned();
        store.write(&sandbox, Durability::Soon).await.expect("written");
        disk.power_cut(round + 1000);
        drop(store);
        let found = open(&disk).read::<Sandbox>(&sandbox.id).await.expect("it was acknowledged");
        assert_eq!(found.generation, generation, "round {round}, second cut");
    }
}

#[tokio::test]
async fn two_power_cuts_without_rename_flush_roll_nothing_back() {
    if fit("two_power_cuts_without_rename_flush_roll_nothing_back") {
        two_power_cuts(Filesystem::Ext4NoAutoDaAlloc).await;
    }
}

#[tokio::test]
async fn two_power_cuts_roll_nothing_back_on_xfs() {
    if fit("two_power_cuts_roll_nothing_back_on_xfs") {
        two_power_cuts(Filesystem::Xfs).await;
    }
}

/// An error that the background write-back got must not be forgotten at the seal.
async fn a_lost_write_is_never_sealed(filesystem: Filesystem) {
    let place = Place::new(filesystem);
    let layer = place.store.begin(&[]).await.expect("begun");
    fs::write(place.file(&layer, "before"), "synced").expect("room");
    place.store.sync().await.expect("the disk is well");
    tick().await;
    fs::write(place.file(&layer, "lost"), marked()).expect("into the page cache");
    place.lose_what_is_marked().await;
    for _ in 0..3 {
        assert_eq!(place.refused(&layer).await, ["/lost"], "{filesystem:?}");
    }
    let error = place.store.copy_live(&layer, &[], None).await.expect_err("a copy would be as bad");
    assert!(matches!(error, StoreError::InDoubt { .. }), "{error}");
    let file = place.file(&layer, "lost");
    let Place { store, disk } = place;
    drop(store);
    let store = open(&disk);
    let place = Place { store, disk };
    assert_eq!(place.refused(&layer).await, ["/lost"], "the next daemon knows too");
    place.store.accept_doubt(&layer);
    place.seal(&layer).await.expect("somebody decided");
    let Place { store, disk } = place;
    drop(store);
    disk.power_cut(7);
    assert_eq!(fs::read(&file).expect("sealed"), marked(), "what could be read was stored");
}

#[tokio::test]
async fn a_lost_write_is_never_sealed_on_ext4() {
    if fit("a_lost_write_is_never_sealed_on_ext4") {
        a_lost_write_is_never_sealed(Filesystem::Ext4).await;
    }
}

#[tokio::test]
async fn a_lost_write_is_never_sealed_on_xfs() {
    if fit("a_lost_write_is_never_sealed_on_xfs") {
        a_lost_write_is_never_sealed(Filesystem::Xfs).await;
    }
}

#[tokio::test]
async fn a_seal_that_failed_does_not_succeed_when_it_is_asked_again() {
    if !fit("a_seal_that_failed_does_not_succeed_when_it_is_asked_again") {
        return;
    }
    let place = Place::new(Filesystem::Ext4);
    let layer = place.store.begin(&[]).await.expect("begun");
    place.store.sync().await.expect("the disk is well");
    tick().await;
    fs::write(place.file(&layer, "lost"), marked()).expect("into the page cache");
    let fault = place.disk.inject(Fault::writes().containing(MARK.to_vec()));
    place.seal(&layer).await.expect_err("the disk refuses");
    place.disk.heal(fault);
    assert_eq!(place.refused(&layer).await, ["/lost"]);
}

#[tokio::test]
async fn what_was_not_written_in_the_window_is_sealed() {
    if !fit("what_was_not_written_in_the_window_is_sealed") {
        return;
    }
    let place = Place::new(Filesystem::Ext4);
    let (other, layer) = (
        place.store.begin(&[]).await.expect("begun"),
        place.store.begin(&[]).await.expect("begun"),
    );
    fs::write(place.file(&other, "older"), "synced before").expect("room");
    tick().await;
    place.store.sync().await.expect("the disk is well");
    tick().await;
    for name in ["kept", "removed", "replaced", "moved"] {
        fs::write(place.file(&layer, name), marked()).expect("into the page cache");
    }
    place.lose_what_is_marked().await;
    place.seal(&other).await.expect("nothing of it was lost");
    tick().await;
    fs::write(place.file(&layer, "younger"), "after").expect("room");
    assert_eq!(place.refused(&layer).await, ["/kept", "/moved", "/removed", "/replaced"]);
    fs::remove_file(place.file(&layer, "removed")).expect("a file");
    fs::write(place.file(&layer, "new"), "again").expect("room");
    fs::rename(place.file(&layer, "new"), place.file(&layer, "replaced")).expect("a file");
    fs::rename(place.file(&layer, "moved"), place.file(&layer, "elsewhere")).expect("a file");
    assert_eq!(place.refused(&layer).await, ["/elsewhere", "/kept"]);
    for name in ["elsewhere", "kept"] {
        let copy = place.file(&layer, "copy");
        fs::copy(place.file(&layer, name), &copy).expect("room");
        fs::rename(copy, place.file(&layer, name)).expect("a file");
    }
    let files = ["elsewhere", "kept"].map(|name| place.file(&layer, name));
    place.seal(&layer).await.expect("nothing is in doubt any more");
    let Place { store, disk } = place;
    drop(store);
    disk.power_cut(3);
    for file in files {
        assert_eq!(fs::read(file).expect("sealed"), marked());
    }
}

#[tokio::test]
async fn documents_that_a_failed_sync_may_have_lost_are_written_again() {
    if !fit("documents_that_a_failed_sync_may_have_lost_are_written_again") {
        return;
    }
    let place = Place::new(Filesystem::Ext4NoAutoDaAlloc);
    let mut sandbox = crate::store_world::sandbox(&[]);
    place.store.write(&sandbox, Durability::Synced).await.expect("written");
    sandbox.config.purpose = String::from_utf8(MARK.to_vec()).expect("text");
    place.store.write(&sandbox, Durability::Soon).await.expect("into the page cache");
    place.lose_what_is_marked().await;
    assert!(!place.store.has_unsynced());
    let Place { store, disk } = place;
    drop(store);
    disk.power_cut(5);
    let found = open(&disk).read::<Sandbox>(&sandbox.id).await.expect("it was synced");
    assert_eq!(found.config.purpose, sandbox.config.purpose);
}
