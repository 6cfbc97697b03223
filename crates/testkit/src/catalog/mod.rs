//! The contract every catalog is held to, and a catalog in memory.

mod memory;

use std::sync::Arc;

use parking_lot::Mutex;
use sandkeep_core::catalog::{
    Catalog, CatalogError, CatalogWatcher, Record, RecordKey, SnapshotDrop,
};
use sandkeep_core::db::{Filter, Owner, Page, Tombstones, Unless};
use sandkeep_core::model::{Ownership, Revision, Sandbox, SandboxId, Snapshot, SnapshotId, now};
use sandkeep_core::store::{Durability, Store};

pub use memory::{MemoryCatalog, Records};

use crate::db::{sandbox, session, snapshot};

/// Holds catalogs to what [`Catalog`] promises. `open` gives a catalog of the same records each time, as
/// daemons that follow each other have, with the store of their node; the one before is gone by then.
///
/// # Panics
///
/// When a promise is broken.
pub async fn catalog_contract<C: Catalog>(open: impl AsyncFn() -> (C, Store)) {
    let (catalog, store) = open().await;
    let contents = catalog.open().await.expect("it opens");
    assert!(contents.sandboxes.is_empty(), "the suite wants an empty one");
    a_save_counts_and_is_read(&catalog).await;
    a_stale_save_changes_nothing(&catalog).await;
    of_two_writers_one_wins(&catalog).await;
    names_are_claimed_once(&catalog).await;
    a_commit_has_all_or_nothing(&catalog).await;
    what_is_shown_is_not_saved(&catalog).await;
    snapshots_go_when_nobody_stands_on_them(&catalog).await;
    watchers_are_told_every_save_in_order(&catalog).await;
    a_removed_sandbox_stays_removed(&catalog, &store).await;
    let left = saved(&catalog).await;
    catalog.close().await;
    drop((catalog, store));
    // The daemon ends; another comes.
    let (catalog, _store) = open().await;
    let mut contents = catalog.open().await.expect("it opens again");
    contents.sandboxes.sort_by(|a, b| a.id.cmp(&b.id));
    assert_eq!(contents.sandboxes, left, "what was saved is there, with its revision");
    assert!(contents.unusable.is_empty() && contents.missing.is_empty());
    for mut sandbox in contents.sandboxes {
        let revision = sandbox.revision;
        catalog.save(&mut sandbox, Durability::Soon).await.expect("it goes on from there");
        assert_eq!(sandbox.revision, revision.next());
    }
    catalog.close().await;
}

async fn saved(catalog: &dyn Catalog) -> Vec<Sandbox> {
    let reader = catalog.reader();
    let shown = reader.sandboxes(None, &Filter::default(), &Page::all()).await.expect("a list");
    let mut saved = Vec::new();
    for sandbox in shown.items {
        saved.extend(catalog.load(&sandbox.id).await.expect("it is loaded"));
    }
    saved.sort_by(|a, b| a.id.cmp(&b.id));
    saved
}

/// A sandbox that is on record.
async fn on_record(catalog: &dyn Catalog, name: &str) -> Sandbox {
    let mut made = sandbox("contract", name);
    assert!(catalog.claim(&made).await.expect("an answer"), "`{name}` is free");
    assert_eq!(catalog.load(&made.id).await.expect("an answer"), None, "a claim is no record");
    catalog.save(&mut made, Durability::Synced).await.expect("it is saved");
    made
}

fn conflict(outcome: Result<(), CatalogError>) -> (Revision, Revision) {
    match outcome {
        Err(CatalogError::Conflict { expected, found, .. }) => (expected, found),
        other => panic!("not a conflict: {other:?}"),
    }
}

async fn a_save_counts_and_is_read(catalog: &dyn Catalog) {
    let mut made = on_record(catalog, "saved").await;
    assert_eq!(made.revision, Revision::NEW.next());
    for durability in [Durability::Soon, Durability::Synced, Durability::Soon] {
        let before = made.revision;
        made.config.tags.insert("saved".to_owned(), before.to_string());
        catalog.save(&mut made, durability).await.expect("it is saved");
        assert_eq!(made.revision, before.next());
        let loaded = catalog.load(&made.id).await.expect("an answer");
        assert_eq!(loaded.as_ref(), Some(&made), "a load after a save sees it");
        let read = catalog.reader().sandbox(&made.project, &made.name).await.expect("an answer");
        assert_eq!(read.as_ref(), Some(&made), "and so do readers");
    }
    let before = made.clone();
    catalog.sync_new(&made).await.expect("it is synced");
    assert_eq!(catalog.load(&made.id).await.expect("an answer"), Some(before), "the same version");
    let session = session(&made);
    catalog.put(Record::Session(&session), Durability::Soon).await.expect("it is kept");
    let read = catalog.reader().session(&session.id).await.expect("an answer");
    assert_eq!(read, Some(session));
}

async fn a_stale_save_changes_nothing(catalog: &dyn Catalog) {
    let mut made = on_record(catalog, "stale").await;
    let mut stale = made.clone();
    catalog.save(&mut made, Durability::Soon).await.expect("it is saved");
    stale.config.tags.insert("late".to_owned(), String::new());
    let (expected, found) = conflict(catalog.save(&mut stale, Durability::Soon).await);
    assert_eq!((expected, found), (stale.revision, made.revision));
    assert_eq!(stale.revision, expected, "the caller's copy is as it was");
    conflict(catalog.commit(&[], None, &mut stale).await);
    conflict(catalog.sync_new(&stale).await);
    conflict(catalog.remove(&stale).await);
    assert_eq!(catalog.load(&made.id).await.expect("an answer"), Some(made.clone()));
    let read = catalog.reader().sandbox_by_id(&made.id).await.expect("an answer");
    assert_eq!(read.as_ref(), Some(&made));
    stale.revision = made.revision.next();
    conflict(catalog.save(&mut stale, Durability::Soon).await);
    // A node that takes the sandbox over saves that it has it, so the one before cannot save it any more.
    let mut before = made.clone();
    made.owner = Some(Ownership { node: "n2".parse().expect("a name"), epoch: 7 });
    catalog.save(&mut made, Durability::Synced).await.expect("it is taken over");
    conflict(catalog.save(&mut before, Durability::Soon).await);
    let loaded = catalog.load(&made.id).await.expect("an answer").expect("it is there");
    assert_eq!(loaded.owner, made.owner);
    made.config.tags.insert("after".to_owned(), String::new());
    catalog.save(&mut made, Durability::Soon).await.expect("the newest can be saved");
}

async fn of_two_writers_one_wins(catalog: &dyn Catalog) {
    let mut made = on_record(catalog, "raced").await;
    for round in 0..50 {
        let writer = |name: &str| {
            let mut copy = made.clone();
            copy.config.tags.insert("writer".to_owned(), format!("{name} {round}"));
            copy
        };
        let (mut one, mut other) = (writer("one"), writer("other"));
        let (first, second) = tokio::join!(
            catalog.save(&mut one, Durability::Soon),
            catalog.save(&mut other, Durability::Soon)
        );
        let winner = match (first, second) {
            (Ok(()), Err(CatalogError::Conflict { .. })) => one,
            (Err(CatalogError::Conflict { .. }), Ok(())) => other,
            outcome => panic!("exactly one wins: {outcome:?}"),
        };
        assert_eq!(catalog.load(&made.id).await.expect("an answer"), Some(winner.clone()));
        made = winner;
    }
}

async fn names_are_claimed_once(catalog: &dyn Catalog) {
    let first = sandbox("contract", "claimed");
    let second = sandbox("contract", "claimed");
    assert!(catalog.claim(&first).await.expect("an answer"));
    assert!(!catalog.claim(&second).await.expect("an answer"), "the name is taken");
    let unclaimed = catalog.save(&mut second.clone(), Durability::Soon).await;
    assert!(matches!(unclaimed, Err(CatalogError::NotFound { .. })), "{unclaimed:?}");
    catalog.release(&first.id).await.expect("an answer");
    assert!(catalog.claim(&second).await.expect("an answer"), "the name is free again");
    catalog.release(&second.id).await.expect("an answer");
    assert!(catalog.load(&second.id).await.expect("an answer").is_none());
}

async fn a_commit_has_all_or_nothing(catalog: &dyn Catalog) {
    let mut made = on_record(catalog, "committed").await;
    let kept = snapshot(&made, 1);
    made.current = Some(kept.id.clone());
    made.generation = 1;
    let before = made.revision;
    catalog.commit(&[], Some(&kept), &mut made).await.expect("it is committed");
    assert_eq!(made.revision, before.next(), "a commit is a save");
    assert_eq!(catalog.load(&made.id).await.expect("an answer"), Some(made.clone()));
    let read = catalog.reader().snapshot(&kept.id).await.expect("an answer");
    assert_eq!(read, Some(kept.clone()));
    catalog.commit(&[], None, &mut made).await.expect("without a snapshot, too");
    let mut stale = made.clone();
    stale.revision = before;
    let never = snapshot(&made, 2);
    conflict(catalog.commit(&[], Some(&never), &mut stale).await);
    let read = catalog.reader().snapshot_record(&never.id).await.expect("an answer");
    assert_eq!(read, None, "nothing of a commit that lost is on record");
}

async fn what_is_shown_is_not_saved(catalog: &dyn Catalog) {
    let mut made = on_record(catalog, "shown").await;
    let mut shown = made.clone();
    shown.config.tags.insert("shown".to_owned(), String::new());
    catalog.show(&shown).await.expect("it is shown");
    let read = catalog.reader().sandbox_by_id(&made.id).await.expect("an answer");
    assert_eq!(read, Some(shown.clone()), "readers see it");
    assert_eq!(
        catalog.load(&made.id).await.expect("an answer"),
        Some(made.clone()),
        "a load does not"
    );
    catalog
        .save(&mut made, Durability::Soon)
        .await
        .expect("it does not stand in the way of a save");
    let read = catalog.reader().sandbox_by_id(&made.id).await.expect("an answer");
    assert_eq!(read, Some(made));
}

async fn snapshots_go_when_nobody_stands_on_them(catalog: &dyn Catalog) {
    let mut made = on_record(catalog, "stands").await;
    let kept = snapshot(&made, 1);
    made.current = Some(kept.id.clone());
    catalog.commit(&[], Some(&kept), &mut made).await.expect("it is committed");
    let grave = Snapshot { layers: Vec::new(), deleted_at: Some(now()), ..kept.clone() };
    let bury = async || {
        let buried =
            catalog.replace_by_tombstone(&kept, &grave, Unless::Held, Durability::Synced).await;
        buried.expect("an answer")
    };
    assert_eq!(bury().await, SnapshotDrop::Not, "a sandbox stands on it");
    made.current = None;
    catalog.save(&mut made, Durability::Soon).await.expect("it is saved");
    assert_eq!(bury().await, SnapshotDrop::Tombstone);
    assert_eq!(bury().await, SnapshotDrop::Not, "it is buried already");
    let reader = catalog.reader();
    assert_eq!(reader.snapshot(&kept.id).await.expect("an answer"), None);
    assert_eq!(reader.snapshot_record(&kept.id).await.expect("an answer"), Some(grave.clone()));
    catalog.delete(RecordKey::Snapshot(&kept.id)).await.expect("its tombstone goes");
    let owner = Owner::Sandbox(&made.id);
    let left = reader.snapshots(owner, Tombstones::With, &Page::all()).await.expect("a list");
    assert_eq!(left.items, []);
    catalog.delete(RecordKey::Snapshot(&SnapshotId::fresh())).await.expect("one that never was");
}

/// A change of a sandbox: the revision it is at, the snapshot of a commit, and whether it was removed.
type Change = (SandboxId, Revision, Option<SnapshotId>, bool);

/// The notifications that a watcher got.
#[derive(Debug, Default)]
struct Told(Mutex<Vec<Change>>);

impl CatalogWatcher for Told {
    fn saved(&self, sandbox: &Sandbox, snapshot: Option<&Snapshot>) {
        let snapshot = snapshot.map(|snapshot| snapshot.id.clone());
        self.0.lock().push((sandbox.id.clone(), sandbox.revision, snapshot, false));
    }

    fn removed(&self, sandbox: &Sandbox) {
        self.0.lock().push((sandbox.id.clone(), sandbox.revision, None, true));
    }
}

/// A watcher of a catalog.
fn watching(catalog: &dyn Catalog) -> Arc<Told> {
    let told = Arc::new(Told::default());
    let weak = Arc::downgrade(&told);
    catalog.watch(weak);
    told
}

async fn watchers_are_told_every_save_in_order(catalog: &dyn Catalog) {
    let mut made = on_record(catalog, "watched").await;
    let (first, second, gone) = (watching(catalog), watching(catalog), watching(catalog));
    let left = Arc::downgrade(&gone);
    drop(gone);
    let mut expected = Vec::new();
    for durability in [Durability::Soon, Durability::Synced, Durability::Soon] {
        let mut stale = made.clone();
        catalog.save(&mut made, durability).await.expect("it is saved");
        expected.push((made.id.clone(), made.revision, None, false));
        conflict(catalog.save(&mut stale, durability).await);
        catalog.show(&made).await.expect("it is shown");
        assert_eq!(*first.0.lock(), expected, "told when the save returns, and no failed save");
    }
    let taken = snapshot(&made, 1);
    catalog.commit(&[], Some(&taken), &mut made).await.expect("it is committed");
    expected.push((made.id.clone(), made.revision, Some(taken.id.clone()), false));
    catalog.remove(&made).await.expect("it is removed");
    expected.push((made.id.clone(), made.revision, None, true));
    catalog.delete(RecordKey::Snapshot(&taken.id)).await.expect("it goes");
    for watcher in [first, second] {
        assert_eq!(*watcher.0.lock(), expected);
    }
    assert!(left.upgrade().is_none(), "a watcher ends when it is dropped");
}

async fn a_removed_sandbox_stays_removed(catalog: &dyn Catalog, store: &Store) {
    let made = on_record(catalog, "removed").await;
    let session = session(&made);
    catalog.put(Record::Session(&session), Durability::Soon).await.expect("it is kept");
    catalog.remove(&made).await.expect("it is removed");
    assert_eq!(catalog.load(&made.id).await.expect("an answer"), None);
    assert_eq!(catalog.reader().sandbox_by_id(&made.id).await.expect("an answer"), None);
    let late = catalog.save(&mut made.clone(), Durability::Soon).await;
    assert!(matches!(late, Err(CatalogError::NotFound { .. })), "it comes back: {late:?}");
    let late = catalog.put(Record::Session(&session), Durability::Soon).await;
    assert!(late.is_err(), "nor does a late session bring it back");
    let trash = store.trash().await.expect("a list");
    let trashed = trash.iter().rev().find(|one| one.sandbox().as_ref() == Some(&made.id));
    let trashed = trashed.expect("it is in the trash");
    let kept = store.trashed_sandbox(trashed).await.expect("it reads").sandbox;
    assert_eq!(kept, made);
    let mut back = kept;
    assert!(catalog.claim(&back).await.expect("an answer"), "its name is free");
    catalog.restore(trashed, &mut back).await.expect("it is restored");
    assert_eq!(back.revision, made.revision.next(), "a restore is a save");
    assert_eq!(catalog.load(&made.id).await.expect("an answer"), Some(back));
    let read = catalog.reader().session(&session.id).await.expect("an answer");
    assert_eq!(read, Some(session), "with its history");
}
