//! Snapshots: find, list, delete, export.

use crate::db::{Owner, Page, Paged, Tombstones, Unless};
use crate::engine::references::Sized;
use crate::engine::{Engine, Error, Result, SnapshotExport, SnapshotFilter};
use crate::failpoint;
use crate::model::{Name, Snapshot, SnapshotId};
use crate::store::Durability;

impl Engine {
    /// Finds a snapshot.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSnapshot`] when the project has none of that id, or not any more.
    pub async fn snapshot(&self, project: &Name, id: &SnapshotId) -> Result<Sized<Snapshot>> {
        let found = self.snapshot_record(project, id).await?;
        if found.item.deleted_at.is_some() {
            return Err(Error::NoSnapshot(id.clone()));
        }
        Ok(found)
    }

    /// Finds a snapshot, or the tombstone of one.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSnapshot`] when the project never had one of that id, or long ago.
    pub async fn snapshot_record(
        &self,
        project: &Name,
        id: &SnapshotId,
    ) -> Result<Sized<Snapshot>> {
        let found = self.parts.context.db.snapshot_record(id).await?;
        let found = found.filter(|snapshot| snapshot.project == *project);
        Ok(self.parts.references.sized(found.ok_or_else(|| Error::NoSnapshot(id.clone()))?))
    }

    /// Lists snapshots, newest first by default.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when the index cannot be read, or for a cursor that is not one of this list.
    pub async fn snapshots(
        &self,
        project: &Name,
        filter: SnapshotFilter,
        page: &Page,
    ) -> Result<Paged<Sized<Snapshot>>> {
        let owner = match &filter.sandbox {
            Some(name) => Owner::Name(project, name),
            None => Owner::Project(project),
        };
        let tombstones = if filter.deleted { Tombstones::With } else { Tombstones::Without };
        let found = self.parts.context.db.snapshots(owner, tombstones, page).await?;
        Ok(found.map(|snapshot| self.parts.references.sized(snapshot)))
    }

    /// Deletes a snapshot, and returns how many bytes that freed. With `force` also one that
    /// sandboxes stand on: stopped and paused ones cannot be started until they are rolled back to
    /// another snapshot, running ones continue and leave a new snapshot when they stop.
    ///
    /// # Errors
    ///
    /// Returns [`Error::SnapshotInUse`] while a sandbox stands on it, without `force`.
    pub async fn delete_snapshot(
        &self,
        project: &Name,
        id: &SnapshotId,
        force: bool,
    ) -> Result<u64> {
        let found = self.snapshot(project, id).await?;
        let (freed, sandbox) = (found.freed_if_deleted, found.item.sandbox);
        let unless = if force { Unless::Never } else { Unless::Held };
        if !self.parts.storage.snapshots.delete_record(id, unless, Durability::Synced).await? {
            let mut holders = self.parts.context.db.sandboxes_on(id).await?;
            holders.extend(self.parts.context.db.sandboxes_based_on(id).await?);
            holders.dedup_by(|one, other| one.id == other.id);
            if holders.is_empty() {
                // Another call was faster.
                return Err(Error::NoSnapshot(id.clone()));
            }
            let holders = holders.iter().map(|sandbox| format!("`{}`", sandbox.name)).collect();
            return Err(Error::SnapshotInUse { snapshot: id.clone(), holders });
        }
        failpoint::pass("snapshot_delete.tombstone");
        self.parts.storage.snapshots.retained.forget(&sandbox);
        for holder in self.parts.context.db.sandboxes_on(id).await? {
            self.parts.storage.snapshots.tell_snapshot_deleted(holder, id).await?;
            failpoint::pass("snapshot_delete.sandbox");
        }
        self.parts.storage.collector.collect_soon();
        Ok(freed)
    }

    /// Gets a snapshot ready to be sent as an OCI layout in a tar stream: reads all of it once. Ends when the caller does not
    /// wait for it any more.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSnapshot`], [`Error::TooManyExports`], or [`StoreError`](crate::store::StoreError) when a layer cannot be
    /// read or is too large.
    pub async fn prepare_export(&self, project: &Name, id: &SnapshotId) -> Result<SnapshotExport> {
        self.parts.storage.snapshots.find_snapshot(project, id).await?;
        // Deleted meanwhile, it is sent all the same.
        let (hold, snapshot) = self.parts.references.hold_snapshot(id).await?;
        let snapshot = snapshot.ok_or_else(|| Error::SnapshotDeleted(id.clone()))?;
        SnapshotExport::prepare(&self.parts.context.store, &snapshot, hold).await
    }
}
