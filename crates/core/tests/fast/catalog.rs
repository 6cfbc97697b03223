//! Catalogs keep their contract; the one on disk also when its daemon dies between manifest and index.

use std::path::Path;
use std::sync::Arc;

use sandkeep_core::catalog::{Catalog as _, DiskCatalog};
use sandkeep_core::db::{Index, MirroredDb};
use sandkeep_core::model::{Revision, Sandbox};
use sandkeep_core::store::{Durability, Store};
use sandkeep_testkit::catalog::{MemoryCatalog, Records, catalog_contract};
use sandkeep_testkit::db::{sandbox, session};

async fn on_disk(data: &Path) -> (DiskCatalog, Store) {
    let store = Store::open(data).expect("a data directory");
    let index = Index::open(&data.join("index.sqlite"), store.clone()).await.expect("an index");
    let index = MirroredDb::new(Arc::new(index)).await.expect("an index in memory");
    (DiskCatalog::new(store.clone(), Arc::new(index)), store)
}

/// A directory of which nothing has to be synced to a disk, where there is one.
fn scratch() -> tempfile::TempDir {
    let dir = tempfile::TempDir::with_prefix_in("keep-catalog-", "/dev/shm");
    dir.or_else(|_| tempfile::tempdir()).expect("a directory")
}

#[tokio::test]
async fn a_catalog_on_disk_keeps_the_contract() {
    let dir = scratch();
    catalog_contract(async || on_disk(&dir.path().join("data")).await).await;
}

#[tokio::test]
async fn a_catalog_in_memory_keeps_the_contract() {
    let dir = scratch();
    let records = Records::default();
    let open = async || {
        let store = Store::open(&dir.path().join("data")).expect("a data directory");
        (MemoryCatalog::new(store.clone(), records.clone()).await, store)
    };
    catalog_contract(open).await;
}

/// One sandbox on record, and the catalog closed.
async fn one_sandbox(data: &Path) -> Sandbox {
    let (catalog, _store) = on_disk(data).await;
    catalog.open().await.expect("it opens");
    let mut made = sandbox("default", "app");
    assert!(catalog.claim(&made).await.expect("an answer"));
    catalog.save(&mut made, Durability::Synced).await.expect("it is saved");
    catalog.close().await;
    made
}

#[tokio::test]
async fn a_manifest_that_the_index_did_not_see_is_found() {
    let dir = scratch();
    let data = dir.path().join("data");
    let mut made = one_sandbox(&data).await;
    {
        // The daemon dies right after the manifest is written.
        let store = Store::open(&data).expect("a data directory");
        made.revision = made.revision.next();
        made.config.tags.insert("late".to_owned(), "yes".to_owned());
        store.write(&made, Durability::Soon).await.expect("it is written");
    }
    let (catalog, _store) = on_disk(&data).await;
    let contents = catalog.open().await.expect("it opens");
    assert_eq!(contents.sandboxes, [made.clone()]);
    let read = catalog.reader().sandbox_by_id(&made.id).await.expect("an answer");
    assert_eq!(read, Some(made.clone()), "the index follows the manifest");
    catalog.save(&mut made, Durability::Soon).await.expect("and it goes on from there");
}

#[tokio::test]
async fn a_sandbox_that_only_the_index_knows_is_kept_aside() {
    let dir = scratch();
    let data = dir.path().join("data");
    let mut made = one_sandbox(&data).await;
    {
        let (catalog, _store) = on_disk(&data).await;
        catalog.open().await.expect("it opens");
        made.session = Some(session(&made).id);
        catalog.save(&mut made, Durability::Synced).await.expect("it is saved");
        catalog.close().await;
    }
    std::fs::remove_file(data.join(format!("sandboxes/{}/sandbox.json", made.id))).unwrap();
    let (catalog, store) = on_disk(&data).await;
    let contents = catalog.open().await.expect("it opens");
    assert_eq!(contents.sandboxes, []);
    assert_eq!(contents.missing, [""; 0], "what the index knew was kept");
    let read = catalog.reader().sandbox_by_id(&made.id).await.expect("an answer");
    assert_eq!(read, None, "it is not shown as if it were there");
    let remembered = store.disk_listing().await.expect("a list").remembered;
    assert_eq!(remembered, [format!("sandboxes/{}/sandbox.json", made.id)]);
}

#[tokio::test]
async fn records_of_daemons_without_revisions_are_read_and_counted() {
    let dir = scratch();
    let data = dir.path().join("data");
    let mut made = one_sandbox(&data).await;
    {
        let store = Store::open(&data).expect("a data directory");
        made.revision = Revision::NEW;
        store.write(&made, Durability::Synced).await.expect("it is written");
    }
    let file = data.join(format!("sandboxes/{}/sandbox.json", made.id));
    let document: serde_json::Value =
        serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    for field in ["revision", "owner"] {
        assert_eq!(document.get(field), None, "as a daemon of before wrote it");
    }
    let (catalog, _store) = on_disk(&data).await;
    let contents = catalog.open().await.expect("it opens");
    let [mut old] = <[Sandbox; 1]>::try_from(contents.sandboxes).expect("one sandbox");
    assert_eq!(old.revision, Revision::NEW);
    catalog.save(&mut old, Durability::Synced).await.expect("it is saved");
    assert_eq!(old.revision, Revision::NEW.next());
}
