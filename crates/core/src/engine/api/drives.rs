//! Drives: create, find, list, fork, delete.

use crate::catalog::RecordKey;
use crate::db::{Page, Paged};
use crate::engine::snapshots::drives::CreateDrive;
use crate::engine::{Engine, Error, PromoteIntoDrive, PromotedIntoDrive, Result};
use crate::model::{Drive, DriveId, Name, check_drive_name, now};

impl Engine {
    /// Makes a drive, or returns the one of that name; the second value is whether it was made.
    ///
    /// # Errors
    ///
    /// Returns [`Error::DriveDiffers`] when there is one and it is not as asked for. What is not asked
    /// for may be anything.
    pub async fn create_drive(
        &self,
        project: &Name,
        request: CreateDrive,
    ) -> Result<(Drive, bool)> {
        self.parts.tenancy.require_project(project)?;
        self.parts.storage.drives.create(project, &request).await
    }

    /// Finds a drive.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoDrive`] when the project has none of that name.
    pub async fn drive(&self, project: &Name, name: &Name) -> Result<Drive> {
        self.parts.storage.drives.find_drive(project, name).await
    }

    /// Finds a drive by its id.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoDrive`] when the project has none of that id.
    pub async fn drive_by_id(&self, project: &Name, id: &DriveId) -> Result<Drive> {
        let found =
            self.parts.context.db.drive_by_id(id).await?.filter(|drive| drive.project == *project);
        found.ok_or_else(|| Error::NoDrive(id.to_string()))
    }

    /// Lists drives whose names begin as given.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when the index cannot be read.
    pub async fn drives(
        &self,
        project: &Name,
        name_prefix: Option<&str>,
        page: &Page,
    ) -> Result<Paged<Drive>> {
        Ok(self.parts.context.db.drives(Some(project), name_prefix, page).await?)
    }

    /// What a drive's layers take on the disk.
    #[must_use]
    pub fn drive_size(&self, drive: &Drive) -> u64 {
        self.parts.references.counts().bytes_of(&drive.layers)
    }

    /// Makes a new drive that holds what another one held when it was last detached.
    ///
    /// # Errors
    ///
    /// Returns [`Error::DriveNotInitialised`] when nothing was ever written to it, and
    /// [`Error::DriveTaken`] when there is one of the new name.
    pub async fn fork_drive(&self, project: &Name, source: &Name, name: Name) -> Result<Drive> {
        check_drive_name(&name)?;
        // Until the fork's record names them, the source's does: no drive's record changes under this lock.
        let _drives = self.parts.storage.drives.changes.lock().await;
        let source = self.parts.storage.drives.find_drive(project, source).await?;
        if !source.is_initialised() {
            return Err(source.not_initialised());
        }
        let fork = Drive {
            id: DriveId::fresh(),
            name,
            attached: None,
            root: source.root.clone().or_else(|| Some(source.id.clone())),
            parent: Some(source.id.clone()),
            created_at: now(),
            updated_at: now(),
            ..source
        };
        self.parts.storage.drives.found_drive(fork).await
    }

    /// Puts chosen files that a sandbox made, changed or deleted since it was forked into a drive.
    ///
    /// # Errors
    ///
    /// Returns [`Error::DriveAttached`] while a session writes to the drive, [`Error::DriveConflicts`] where files and directories
    /// are in each other's place, and [`Error::DriveGeneration`]. Nothing is changed then.
    pub async fn promote_into_drive(
        &self,
        project: &Name,
        name: &Name,
        request: PromoteIntoDrive,
    ) -> Result<PromotedIntoDrive> {
        self.parts.lifecycle.promote_into_drive(project, name, request).await
    }

    /// Deletes a drive with all that is in it, and returns its last record. Sessions that have a
    /// snapshot of it keep that until they end.
    ///
    /// # Errors
    ///
    /// Returns [`Error::DriveAttached`] while a session writes to it.
    pub async fn delete_drive(&self, project: &Name, name: &Name) -> Result<Drive> {
        let lifecycle = &self.parts.lifecycle;
        let drives = lifecycle.storage.drives.changes.lock().await;
        let mut drive = lifecycle.storage.drives.find_drive(project, name).await?;
        lifecycle.storage.drives.free_if_stale(&mut drive).await?;
        if let Some(attached) = drive.attached {
            return Err(Error::DriveAttached { drive: drive.name, sandbox: attached.name });
        }
        lifecycle.context.catalog.delete(RecordKey::Drive(&drive.id)).await?;
        lifecycle.references.counts().drop_drive(&drive.id);
        drop(drives);
        lifecycle.storage.collector.collect_soon();
        Ok(drive)
    }
}
