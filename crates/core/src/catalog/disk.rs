//! Manifests in the data directory, and an index over them.
//!
//! Every save writes the manifest first and the index after it. A daemon that dies in between leaves an
//! index that is behind, and the next [`open`](Catalog::open) brings it up to date. Revisions are part of
//! the manifests and compared in memory: the data directory is locked, so no other process writes
//! to it.

use std::sync::{Arc, Weak};

use async_trait::async_trait;

use super::load::{self, Contents};
use super::versions::{Next, Versions};
use super::{
    Catalog, CatalogResult, CatalogWatcher, CatalogWatchers, Record, RecordKey, SnapshotDrop,
    UnreadKey,
};
use crate::db::{Db, Unless};
use crate::model::{
    Command, CommandId, Drive, DriveId, Layer, Name, Project, Revision, Sandbox, SandboxId,
    Snapshot, SnapshotId,
};
use crate::store::{DiskListing, Durability, Store, Trashed};

/// [`Catalog`] in a data directory.
#[derive(Debug)]
pub struct DiskCatalog {
    store: Store,
    index: Arc<dyn Db>,
    versions: Versions,
    watchers: CatalogWatchers,
}

impl DiskCatalog {
    /// The catalog of a data directory, with an index that may be empty or behind.
    #[must_use]
    pub fn new(store: Store, index: Arc<dyn Db>) -> Self {
        let watchers = CatalogWatchers::default();
        Self { store, index, versions: Versions::default(), watchers }
    }

    /// Ends a save that readers have: the next version counts, and watchers are notified before the
    /// one after it can be saved.
    fn saved(&self, sandbox: &Sandbox, snapshot: Option<&Snapshot>, next: Next) {
        self.watchers.saved(sandbox, snapshot);
        next.saved();
    }

    async fn write(&self, sandbox: &Sandbox, durability: Durability) -> CatalogResult<()> {
        self.store.write(sandbox, durability).await?;
        self.index.put_sandbox(sandbox).await?;
        Ok(())
    }

    async fn write_all(
        &self,
        layers: &[Layer],
        snapshot: Option<&Snapshot>,
        sandbox: &Sandbox,
    ) -> CatalogResult<()> {
        let committed = self.store.commit(layers, snapshot, sandbox).await;
        if let Some(snapshot) = snapshot {
            // It may exist all the same, and the sandbox's record not.
            if committed.is_ok() || self.store.read::<Snapshot>(&snapshot.id).await.is_ok() {
                self.index.put_snapshot(snapshot).await?;
            }
        }
        committed?;
        self.index.put_sandbox(sandbox).await?;
        Ok(())
    }
}

/// Gives a sandbox the revision that it is saved with, and takes it back if it was not saved.
async fn as_next<T>(
    sandbox: &mut Sandbox,
    revision: Revision,
    save: impl AsyncFnOnce(&Sandbox) -> CatalogResult<T>,
) -> CatalogResult<T> {
    let expected = std::mem::replace(&mut sandbox.revision, revision);
    let saved = save(sandbox).await;
    if saved.is_err() {
        sandbox.revision = expected;
    }
    saved
}

#[async_trait]
impl Catalog for DiskCatalog {
    fn reader(&self) -> Arc<dyn Db> {
        Arc::clone(&self.index)
    }

    async fn open(&self) -> CatalogResult<Contents> {
        let contents = load::all(&self.store, &*self.index).await?;
        contents.sandboxes.iter().for_each(|sandbox| self.versions.enter(sandbox));
        Ok(contents)
    }

    async fn close(&self) {
        self.index.close().await;
    }

    async fn load(&self, id: &SandboxId) -> CatalogResult<Option<Sandbox>> {
        match self.store.read::<Sandbox>(id).await {
            Ok(sandbox) => Ok(Some(sandbox)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    async fn claim(&self, sandbox: &Sandbox) -> CatalogResult<bool> {
        let claimed = self.index.claim(sandbox).await?;
        if claimed {
            self.versions.enter(sandbox);
        }
        Ok(claimed)
    }

    async fn release(&self, id: &SandboxId) -> CatalogResult<()> {
        self.versions.strike(id);
        Ok(self.index.remove_sandbox(id).await?)
    }

    async fn rename(&self, id: &SandboxId, name: &Name) -> CatalogResult<bool> {
        Ok(self.index.rename(id, name).await?)
    }

    async fn save(&self, sandbox: &mut Sandbox, durability: Durability) -> CatalogResult<()> {
        let next = self.versions.next(sandbox).await?;
        as_next(sandbox, next.revision(), async |sandbox| self.write(sandbox, durability).await)
            .await?;
        self.saved(sandbox, None, next);
        Ok(())
    }

    async fn sync_new(&self, sandbox: &Sandbox) -> CatalogResult<()> {
        let _same = self.versions.next(sandbox).await?;
        Ok(self.store.write_founded(sandbox).await?)
    }

    async fn commit(
        &self,
        layers: &[Layer],
        snapshot: Option<&Snapshot>,
        sandbox: &mut Sandbox,
    ) -> CatalogResult<()> {
        let next = self.versions.next(sandbox).await?;
        as_next(sandbox, next.revision(), async |sandbox| {
            self.write_all(layers, snapshot, sandbox).await
        })
        .await?;
        self.saved(sandbox, snapshot, next);
        Ok(())
    }

    async fn show(&self, sandbox: &Sandbox) -> CatalogResult<()> {
        Ok(self.index.put_sandbox(sandbox).await?)
    }

    async fn remove(&self, sandbox: &Sandbox) -> CatalogResult<()> {
        let last = self.versions.next(sandbox).await?;
        self.store.remove_sandbox_dir(&sandbox.id).await?;
        self.versions.strike(&sandbox.id);
        drop(last);
        self.index.remove_sandbox(&sandbox.id).await?;
        self.watchers.removed(sandbox);
        Ok(())
    }

    async fn keep_for_trash(&self, id: &SandboxId, snapshot: &Snapshot) -> CatalogResult<()> {
        Ok(self.store.keep_for_trash(id, &snapshot.id).await?)
    }

    async fn restore(&self, trashed: &Trashed, sandbox: &mut Sandbox) -> CatalogResult<()> {
        let next = self.versions.next(sandbox).await?;
        as_next(sandbox, next.revision(), async |sandbox| {
            Ok(self.store.restore_sandbox(trashed, sandbox).await?)
        })
        .await?;
        next.saved();
        self.index.put_sandbox(sandbox).await?;
        self.watchers.saved(sandbox, None);
        load::history(&self.store, &*self.index, &sandbox.id).await
    }

    async fn put(&self, record: Record<'_>, durability: Durability) -> CatalogResult<()> {
        match record {
            Record::Session(session) => {
                self.store.write(session, durability).await?;
                self.index.put_session(session).await?;
            }
            Record::Command(command) => {
                self.store.write(command, durability).await?;
                self.index.put_command(command).await?;
            }
            Record::Snapshot(snapshot) => {
                self.store.write(snapshot, durability).await?;
                self.index.put_snapshot(snapshot).await?;
            }
            Record::Drive(drive) => {
                self.store.write(drive, durability).await?;
                self.index.put_drive(drive).await?;
            }
            Record::Project(project) => {
                self.store.write(project, durability).await?;
                self.index.put_project(project).await?;
            }
        }
        Ok(())
    }

    async fn delete(&self, key: RecordKey<'_>) -> CatalogResult<()> {
        match key {
            RecordKey::Command(sandbox, command) => {
                self.index.remove_command(command).await?;
                self.store.remove::<Command>(&(sandbox.clone(), command.clone())).await?;
            }
            RecordKey::Snapshot(snapshot) => {
                // The index first: a snapshot that it remembers and the disk does not have counts as missing.
                self.index.remove_snapshot(snapshot).await?;
                self.store.remove::<Snapshot>(snapshot).await?;
            }
            RecordKey::Drive(drive) => {
                self.store.remove::<Drive>(drive).await?;
                self.index.remove_drive(drive).await?;
            }
            RecordKey::Project(project) => {
                self.store.remove::<Project>(project).await?;
                self.index.remove_project(project).await?;
            }
        }
        Ok(())
    }

    async fn remove_commands(&self, id: &SandboxId, commands: &[CommandId]) -> CatalogResult<()> {
        // From the index first: what it lists has a record, and a daemon that dies in between reads the rest again.
        for command in commands {
            self.index.remove_command(command).await?;
        }
        Ok(self.store.remove_commands(id, commands).await?)
    }

    async fn claim_drive(&self, drive: &Drive) -> CatalogResult<bool> {
        Ok(self.index.claim_drive(drive).await?)
    }

    async fn replace_by_tombstone(
        &self,
        snapshot: &Snapshot,
        tombstone: &Snapshot,
        unless: Unless<'_>,
        durability: Durability,
    ) -> CatalogResult<SnapshotDrop> {
        if !self.index.put_tombstone(tombstone, unless).await? {
            return Ok(SnapshotDrop::Not);
        }
        match self.store.write(tombstone, durability).await {
            Ok(()) => Ok(SnapshotDrop::Tombstone),
            Err(error) if error.is_no_room() => {
                // Making room must not need room: it goes without a tombstone.
                self.store.remove::<Snapshot>(&snapshot.id).await?;
                self.index.remove_snapshot(&snapshot.id).await?;
                Ok(SnapshotDrop::Removed)
            }
            Err(error) => {
                self.index.put_snapshot(snapshot).await?;
                Err(error.into())
            }
        }
    }

    async fn verify(&self, key: UnreadKey<'_>) -> CatalogResult<()> {
        match key {
            UnreadKey::Sandbox(id) => self.store.read::<Sandbox>(id).await.map(drop)?,
            UnreadKey::Snapshot(id) => self.store.read::<Snapshot>(id).await.map(drop)?,
            UnreadKey::Drive(id) => self.store.read::<Drive>(id).await.map(drop)?,
        }
        Ok(())
    }

    async fn adopt_sandbox(&self, sandbox: &Sandbox) -> CatalogResult<bool> {
        if !self.claim(sandbox).await? {
            return Ok(false);
        }
        load::history(&self.store, &*self.index, &sandbox.id).await?;
        Ok(true)
    }

    async fn adopt_snapshot(&self, id: &SnapshotId) -> CatalogResult<Snapshot> {
        let snapshot = self.store.read::<Snapshot>(id).await?;
        self.index.put_snapshot(&snapshot).await?;
        Ok(snapshot)
    }

    async fn adopt_drive(&self, id: &DriveId) -> CatalogResult<(Drive, bool)> {
        let drive = self.store.read::<Drive>(id).await?;
        let claimed = self.index.claim_drive(&drive).await?;
        Ok((drive, claimed))
    }

    async fn listing(&self) -> CatalogResult<DiskListing> {
        Ok(self.store.disk_listing().await?)
    }

    fn watch(&self, watcher: Weak<dyn CatalogWatcher>) {
        self.watchers.add(watcher);
    }
}
