//! Drives: volumes that outlive sandboxes are created, found, listed, forked, deleted.
//!
//! A drive is a name and a chain of sealed layers, so all of this costs the same however much it
//! holds. `mounts.rs` attaches them to sessions.

mod mounts;

use std::collections::BTreeMap;

use crate::catalog::{CatalogError, Record, RecordKey};
use crate::engine::snapshots::Drives;
use crate::engine::{Error, Result};
use crate::failpoint;
use crate::model::{DRIVE_SIZE, Drive, DriveId, FORMAT, Mounts, Name, Size, check_drive_name, now};
use crate::store::Durability;

/// The largest a drive can be asked to be.
pub(in crate::engine) const LARGEST: Size = Size(1 << 50);

/// A request to make a drive, or to get the existing one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateDrive {
    /// Its name.
    pub name: Name,
    /// What it may hold; 1 TiB if absent.
    pub max_size: Option<Size>,
    /// What a front keeps with it.
    pub notes: BTreeMap<String, String>,
}

impl Drive {
    /// Why it has no content yet.
    pub(in crate::engine) fn not_initialised(self) -> Error {
        let writer = self.attached.map(|attached| attached.name);
        Error::DriveNotInitialised { drive: self.name, writer }
    }
}

impl Drives {
    pub(in crate::engine) async fn find_drive(&self, project: &Name, name: &Name) -> Result<Drive> {
        let found = self.db.drive(project, name).await?;
        found.ok_or_else(|| Error::NoDrive(name.to_string()))
    }

    /// Refuses mounts of drives that there are not.
    pub(in crate::engine) async fn check_drives(
        &self,
        project: &Name,
        mounts: &Mounts,
    ) -> Result<()> {
        for mount in mounts.values() {
            self.find_drive(project, &mount.drive).await?;
        }
        Ok(())
    }

    /// Brings a new drive into being. The index decides who gets the name.
    /// Makes a drive, or hands out the one of that name; the second answer tells whether it was made.
    pub(in crate::engine) async fn create(
        &self,
        project: &Name,
        request: &CreateDrive,
    ) -> Result<(Drive, bool)> {
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
            generation: 0,
            attached: None,
            parent: None,
            root: None,
            notes: request.notes.clone(),
            created_at: now(),
            updated_at: now(),
        };
        let _drives = self.changes.lock().await;
        if let Some(found) = self.context.db.drive(project, &request.name).await? {
            same(&found, request)?;
            return Ok((found, false));
        }
        Ok((self.found_drive(drive).await?, true))
    }

    pub(in crate::engine) async fn found_drive(&self, mut drive: Drive) -> Result<Drive> {
        if !self.context.catalog.claim_drive(&drive).await? {
            return Err(Error::DriveTaken(drive.name));
        }
        failpoint::pass("drive.claimed");
        if let Err(error) = self.keep_drive(&mut drive, Durability::Synced).await {
            self.context.catalog.delete(RecordKey::Drive(&drive.id)).await?;
            return Err(error);
        }
        Ok(drive)
    }

    /// Saves the record of a drive. The caller holds the drives' lock.
    pub(in crate::engine) async fn keep_drive(
        &self,
        drive: &mut Drive,
        durability: Durability,
    ) -> Result<()> {
        drive.updated_at = now();
        let saved = self.context.catalog.put(Record::Drive(drive), durability).await;
        if saved.is_ok() || matches!(saved, Err(CatalogError::Index(_))) {
            self.references.counts().hold_drive(drive);
        }
        Ok(saved?)
    }
}

pub(in crate::engine) fn same(found: &Drive, asked: &CreateDrive) -> Result<()> {
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
