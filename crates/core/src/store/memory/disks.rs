//! Disks of machines of their own, apart from the memory that goes with them.
//!
//! An image whose pages are of no use still has its disks, and a capture that was refused has taken part of a session's disk
//! all the same.

use std::fs;
use std::path::PathBuf;

use crate::model::{LayerId, MemoryId, MemoryLayer, PAGE, PageIndex};
use crate::store::{NewMemory, Result, Store, StoreError, blocking, io_error};

impl Store {
    /// Checks that the disks of an image, whose first layer is the topmost, are all there, and
    /// returns where its layers lie. Its pages are not checked.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::BadMemory`], which names the layer and what is wrong with its disk.
    pub async fn check_disks(&self, chain: &[MemoryId]) -> Result<Vec<PathBuf>> {
        let mut dirs = Vec::new();
        for id in chain {
            let bad = |reason: String| StoreError::BadMemory { id: id.clone(), reason };
            let layer = match self.read::<MemoryLayer>(id).await {
                Ok(layer) => layer,
                Err(error) => return Err(bad(error.to_string())),
            };
            let dir = self.memory_dir(id);
            let Some((disk, size)) = layer.disk() else {
                return Err(bad("it has no disk on record".to_owned()));
            };
            if fs::metadata(dir.join(disk)).ok().map(|found| found.len()) != Some(size) {
                return Err(bad("its disk is missing, or of another size".to_owned()));
            }
            dirs.push(dir);
        }
        Ok(dirs)
    }

    /// Seals what a capture took of a disk, and drops the memory that went with it. The result is
    /// whether there was a disk: without one nothing was taken, and nothing is left.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn seal_disk_alone(&self, id: &MemoryId, new: NewMemory) -> Result<bool> {
        let (dir, pages) = (self.memory_dir(id), new.ram.0 / PAGE);
        if !new.disk.as_ref().is_some_and(|disk| dir.join(disk).exists()) {
            self.discard_memory(id).await?;
            return Ok(false);
        }
        if !dir.join("memory.json").exists() {
            blocking(move || {
                let index = PageIndex { whole: false, ram: pages, runs: Vec::new() }.encode();
                for (name, bytes) in [("index", &index[..]), ("pages", &[]), ("devices", &[])] {
                    let path = dir.join(name);
                    fs::write(&path, bytes).map_err(io_error("write", &path))?;
                }
                Ok(())
            })
            .await?;
        }
        self.seal_memory(id, NewMemory { roots: Vec::new(), ..new }).await?;
        Ok(true)
    }

    /// Removes the disk of an open layer, and with it all that was written to it.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn clear_disk(&self, open: &LayerId) -> Result<()> {
        let disk = self.layer_dir(open).join("disk");
        blocking(move || match fs::remove_dir_all(&disk) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(io_error("remove", &disk)(error))
            }
            _ => Ok(()),
        })
        .await
    }
}
