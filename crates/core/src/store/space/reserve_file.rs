//! The reserve file, which is removed when the disk is full.
//!
//! To end a session, to delete a sandbox or to record a failed start, a few records must be written. On a disk
//! that is full to the last block this would fail, and users could not free space. So the data directory has
//! a file without content that takes [`SIZE`]. It is removed when a record that must be written does not fit,
//! or when a store is opened on a full disk. It is created again when there is enough free space.

use std::fs::{self, File};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::FallocateFlags;

use crate::store::{Store, io_error};

const NAME: &str = "ballast";
/// The size of the file.
const SIZE: u64 = 2 << 20;
/// With less free space than this, the file is removed when a store is opened.
const LITTLE: u64 = 1 << 20;

/// Removes the file if the filesystem of `data` is full.
pub(in crate::store) fn release_if_full(data: &Path) {
    let free = rustix::fs::statvfs(data).map(|stat| stat.f_bavail * stat.f_frsize);
    if free.is_ok_and(|free| free < LITTLE) && release(data) {
        tracing::warn!("the disk is full; removed the reserve file");
    }
}

fn release(data: &Path) -> bool {
    let removed = fs::remove_file(data.join(NAME)).is_ok();
    if removed && let Ok(dir) = File::open(data) {
        // The room is free when the removal is on the disk.
        let _ = rustix::fs::syncfs(&dir);
    }
    removed
}

impl Store {
    /// Removes the file; `false` if it does not exist.
    pub async fn release_reserve_file(&self) -> bool {
        let data = self.inner.data.clone();
        tokio::task::spawn_blocking(move || release(&data)).await.unwrap_or(false)
    }

    /// Creates the file if it does not exist and there is enough free space.
    pub fn restore_reserve_file(&self) {
        let path = self.inner.data.join(NAME);
        if path.exists() || !self.free_space().is_ok_and(|(free, _)| free > 16 * SIZE) {
            return;
        }
        let made = File::options().write(true).create(true).truncate(false).mode(0o600).open(&path);
        let made = made.map_err(io_error("create", &path)).and_then(|file| {
            rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, SIZE)
                .map_err(|error| io_error("allocate", &path)(error.into()))
        });
        if let Err(error) = made {
            let _ = fs::remove_file(&path);
            tracing::debug!(%error, "could not create the reserve file");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use crate::store::Store;

    #[tokio::test]
    async fn it_takes_up_room_until_it_is_given_up() {
        let dir = tempfile::tempdir().expect("a directory");
        let store = Store::open(dir.path()).expect("opened");
        let path = dir.path().join("ballast");
        store.restore_reserve_file();
        let Ok(there) = path.metadata() else {
            // Without room, or where the filesystem cannot set any aside, there is none.
            return;
        };
        assert!(there.blocks() * 512 >= 2 << 20);
        assert!(store.release_reserve_file().await && !path.exists());
        assert!(!store.release_reserve_file().await);
    }
}
