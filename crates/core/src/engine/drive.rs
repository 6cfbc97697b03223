//! Volumes that outlive sandboxes: made, found, listed, forked, deleted.
//!
//! A drive is a name and a chain of sealed layers, so all of this costs the same however much it
//! holds. How a session comes to have one is `attach`'s business.

use std::collections::BTreeMap;

use super::{Engine, Error, Inner, Result};
use crate::db::{Page, Paged};
use crate::failpoint;
use crate::model::{DRIVE_SIZE, Drive, DriveId, FORMAT, Mounts, Name, Size, check_drive_name, now};
use crate::store::Durability;

/// The largest a drive can be asked to be.
const LARGEST: Size = Size(1 << 50);

/// A drive to be made, or got if it is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateDrive {
    /// Its name.
    pub name: Name,
    /// What it may hold; 1 TiB if absent.
    pub max_size: Option<Size>,
    /// What a front keeps with it.
    pub notes: BTreeMap<String, String>,
}

impl Engine {
    /// Makes a drive, or hands out the one of that name; the second answer tells whether it was made.
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
        self.inner.require_project(project)?;
        check_drive_name(&request.name)?;
        if request.max_size.is_some_and(|size| size.0 == 0 || size > LARGEST) {
            return Err(Error::invalid("max_size", "between 1 byte and 1024T"));
        }
        let drive = Drive {
            format: FORMAT,
            id: DriveId::fresh(),
            project: project.clone(),
            name: request.name.clone(),
            max_size: request.max_size.unwrap_or(DRIVE_SIZE),
            layers: Vec::new(),
            attached: None,
            parent: None,
            root: None,
            notes: request.notes.clone(),
            created_at: now(),
            updated_at: now(),
        };
        let _drives = self.inner.drives.lock().await;
        if let Some(found) = self.inner.db.drive(project, &request.name).await? {
            same(&found, &request)?;
            return Ok((found, false));
        }
        Ok((self.inner.found_drive(drive).await?, true))
    }

    /// Finds a drive.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoDrive`] when the project has none of that name.
    pub async fn drive(&self, project: &Name, name: &Name) -> Result<Drive> {
        self.inner.find_drive(project, name).await
    }

    /// Finds a drive by its id.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoDrive`] when the project has none of that id.
    pub async fn drive_by_id(&self, project: &Name, id: &DriveId) -> Result<Drive> {
        let found = self.inner.db.drive_by_id(id).await?.filter(|drive| drive.project == *project);
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
        Ok(self.inner.db.drives(Some(project), name_prefix, page).await?)
    }

    /// What a drive's layers take on the disk.
    #[must_use]
    pub fn drive_size(&self, drive: &Drive) -> u64 {
        self.inner.books().bytes_of(&drive.layers)
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
        let _drives = self.inner.drives.lock().await;
        let source = self.inner.find_drive(project, source).await?;
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
        self.inner.found_drive(fork).await
    }

    /// Deletes a drive with all that is in it, and tells what it was. Sessions that have a snapshot
    /// of it keep that until they end.
    ///
    /// # Errors
    ///
    /// Returns [`Error::DriveAttached`] while a session writes to it.
    pub async fn delete_drive(&self, project: &Name, name: &Name) -> Result<Drive> {
        let inner = &self.inner;
        let drives = inner.drives.lock().await;
        let mut drive = inner.find_drive(project, name).await?;
        inner.free_if_stale(&mut drive).await?;
        if let Some(attached) = drive.attached {
            return Err(Error::DriveAttached { drive: drive.name, sandbox: attached.name });
        }
        inner.store.remove::<Drive>(&drive.id).await?;
        inner.db.remove_drive(&drive.id).await?;
        inner.books().drop_drive(&drive.id);
        drop(drives);
        inner.collect_soon();
        Ok(drive)
    }
}

impl Drive {
    /// Why nothing can be had of it yet.
    pub(super) fn not_initialised(self) -> Error {
        let writer = self.attached.map(|attached| attached.name);
        Error::DriveNotInitialised { drive: self.name, writer }
    }
}

impl Inner {
    pub(super) async fn find_drive(&self, project: &Name, name: &Name) -> Result<Drive> {
        let found = self.db.drive(project, name).await?;
        found.ok_or_else(|| Error::NoDrive(name.to_string()))
    }

    /// Refuses mounts of drives that there are not.
    pub(super) async fn check_drives(&self, project: &Name, mounts: &Mounts) -> Result<()> {
        for mount in mounts.values() {
            self.find_drive(project, &mount.drive).await?;
        }
        Ok(())
    }

    /// Brings a new drive into being. The index decides who gets the name.
    async fn found_drive(&self, mut drive: Drive) -> Result<Drive> {
        if !self.db.claim_drive(&drive).await? {
            return Err(Error::DriveTaken(drive.name));
        }
        failpoint::pass("drive.claimed");
        if let Err(error) = self.keep_drive(&mut drive, Durability::Synced).await {
            self.db.remove_drive(&drive.id).await?;
            return Err(error);
        }
        Ok(drive)
    }

    /// Writes a drive down: disk first, then the index. Whoever calls this has the drives' lock.
    pub(super) async fn keep_drive(&self, drive: &mut Drive, durability: Durability) -> Result<()> {
        drive.updated_at = now();
        self.store.write(drive, durability).await?;
        self.books().hold_drive(drive);
        self.db.put_drive(drive).await?;
        Ok(())
    }
}

fn same(found: &Drive, asked: &CreateDrive) -> Result<()> {
    let differs = |what: String| Err(Error::DriveDiffers { drive: found.name.clone(), what });
    if let Some(size) = asked.max_size.filter(|size| *size != found.max_size) {
        return differs(format!("its size is {}, not {size}", found.max_size));
    }
    for (key, value) in &asked.notes {
        match found.notes.get(key) {
            Some(kept) if kept == value => {}
            Some(kept) => return differs(format!("its {key} is `{kept}`, not `{value}`")),
            None => return differs(format!("it has no {key}")),
        }
    }
    Ok(())
}
