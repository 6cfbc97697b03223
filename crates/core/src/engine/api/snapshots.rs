//! Snapshots: find, list, delete, export.

use std::io::{Seek as _, SeekFrom};

use bytes::Bytes;
use tokio::sync::mpsc;

use crate::db::{Owner, Page, Paged, Tombstones, Unless};
use crate::engine::references::Sized;
use crate::engine::snapshots::export::{Blob, pack};
use crate::engine::{Engine, Error, Result, SnapshotFilter};
use crate::failpoint;
use crate::model::{Name, Snapshot, SnapshotId};
use crate::store::{Durability, StoreError};

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

    /// Lists snapshots, newest first unless told otherwise.
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

    /// Deletes a snapshot, and tells how many bytes that freed. With `force` also one that sandboxes
    /// stand on: those that sleep cannot be started until they are rolled back to another one, those
    /// that run go on and leave a new one when they stop.
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
                // Somebody else was quicker.
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

    /// Sends a snapshot as an OCI layout in a tar stream. A receiver that goes away ends it.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSnapshot`], or [`Error::Store`] when there is no room to prepare it.
    pub async fn export_snapshot(
        &self,
        project: &Name,
        id: &SnapshotId,
        into: mpsc::Sender<Bytes>,
    ) -> Result<()> {
        self.parts.storage.snapshots.find_snapshot(project, id).await?;
        // Deleted meanwhile, it is sent all the same.
        let (_hold, snapshot) = self.parts.references.hold_snapshot(id).await?;
        let snapshot = snapshot.ok_or_else(|| Error::SnapshotDeleted(id.clone()))?;
        let sized = self.parts.references.sized(snapshot);
        self.parts.context.store.check_room(sized.export).await?;
        let snapshot = sized.item;
        let tmp = self.parts.context.store.data_dir().join("tmp");
        let mut blobs = Vec::new();
        // OCI lists layers from the bottom.
        for layer in snapshot.layers.iter().rev() {
            let failed =
                |source| StoreError::Io { action: "make a file in", path: tmp.clone(), source };
            let file = tempfile::tempfile_in(&tmp).map_err(failed)?;
            let (mut file, exported) = self.parts.context.store.export(layer, file).await?;
            file.seek(SeekFrom::Start(0)).map_err(failed)?;
            blobs.push(Blob { digest: exported.diff_id, bytes: exported.bytes, file });
        }
        let packed = tokio::task::spawn_blocking(move || pack(&snapshot, blobs, into));
        match packed.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(source)) => {
                Err(StoreError::Io { action: "send an archive from", path: tmp, source }.into())
            }
            Err(_) => Err(Error::ShuttingDown),
        }
    }
}
