//! Free disk space, and which operations are refused when it runs out.
//!
//! New work may not use the last part of the filesystem, the *reserve*. A seal may: the reserve
//! exists to keep what a session wrote. Before work is refused, the engine may free space (see
//! [`Store::set_space_reclaimer`]). On a disk that is full to the last block, a file without
//! content is given up so that a session can still be ended ([`reserve_file`]).

pub(super) mod reserve_file;

use std::pin::Pin;
use std::sync::OnceLock;
use std::time::Duration;

use super::{Result, Store, StoreError, blocking, io_error, layer};

/// What is free on the filesystem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FreeSpace {
    /// What new work may use.
    pub usable: u64,
    /// All that is free.
    pub free: u64,
    /// What new work may not touch.
    pub reserve: u64,
}

/// Frees some space, and says whether it could.
pub type SpaceReclaimer = Box<dyn Fn() -> Pin<Box<dyn Future<Output = bool> + Send>> + Send + Sync>;

/// Who frees space when there is none.
#[derive(Default)]
pub(super) struct ReclaimerSlot(OnceLock<SpaceReclaimer>);

impl std::fmt::Debug for ReclaimerSlot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ReclaimerSlot").field(&self.0.get().is_some()).finish()
    }
}

impl Store {
    /// Sets what frees space before new work is refused for lack of it. Only the first call counts.
    pub fn set_space_reclaimer(&self, reclaimer: SpaceReclaimer) {
        let _ = self.inner.reclaimer.0.set(reclaimer);
    }

    async fn reclaim_space(&self) -> bool {
        match self.inner.reclaimer.0.get() {
            Some(reclaimer) => reclaimer().await,
            None => false,
        }
    }

    /// Refuses when `need` bytes would not fit and leave the reserve free, and nothing in the trash can go for it.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::NoRoom`], which says how much is free.
    pub async fn check_room(&self, need: u64) -> Result<()> {
        loop {
            let store = self.clone();
            let checked = blocking(move || {
                let (free, total) = store.free_space()?;
                store.refuse_beyond(free.saturating_sub(store.reserve(total)), need)
            });
            match checked.await {
                Err(StoreError::NoRoom { .. }) if self.reclaim_space().await => {}
                checked => return checked,
            }
        }
    }

    /// Whether so much of the disk is used that new work is refused.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`] when the filesystem cannot be asked.
    pub fn is_short_of_room(&self) -> Result<bool> {
        let (free, total) = self.free_space()?;
        Ok(free <= self.reserve(total))
    }

    fn reserve(&self, total: u64) -> u64 {
        self.inner.reserve.of(total)
    }

    /// Refuses when a seal, which writes no more than manifests, would not fit. It may use the
    /// reserve: keeping what a session wrote is what the reserve is for.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::NoRoom`], which says how much is free.
    pub fn check_room_to_seal(&self) -> Result<()> {
        self.refuse_beyond(self.free_space()?.0, layer::SEAL_NEEDS)
    }

    /// How much the files of a machine's disk may take when they become a layer. They may be many
    /// times the reserve, which is for all sandboxes: of that they get at most a fourth, so that a
    /// small session can be kept on a full disk.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`] when the filesystem cannot be asked.
    pub fn room_to_import(&self) -> Result<u64> {
        let FreeSpace { usable, free, reserve } = self.usable()?;
        let of_reserve = (reserve / 4).min(free.saturating_sub(layer::SEAL_NEEDS));
        Ok(if reserve == 0 { free } else { usable.max(of_reserve) })
    }

    /// Refuses when a machine's files, which take `bytes` on its disk, would not fit.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::NoRoom`], which says how much may be used.
    pub async fn check_room_to_import(&self, bytes: u64) -> Result<()> {
        for _ in 0..3 {
            if bytes <= self.room_to_import()? || !self.reclaim_space().await {
                break;
            }
            self.sync().await?;
        }
        self.refuse_beyond(self.room_to_import()?, bytes)
    }

    /// As [`check_room_to_seal`](Self::check_room_to_seal), for who can wait a moment: what was removed just now may still be on its way to the
    /// disk, and its room comes free when it got there.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::NoRoom`] when there is none after that either.
    pub async fn wait_for_room_to_seal(&self) -> Result<()> {
        for _ in 0..10 {
            if self.check_room_to_seal().is_ok() {
                return Ok(());
            }
            self.reclaim_space().await;
            self.sync().await?;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        self.check_room_to_seal()
    }

    /// Refuses, after a moment, when a session could not write anything, or what it writes could not be sealed.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::NoRoom`], which says how much is free.
    pub async fn wait_for_room_to_start(&self) -> Result<()> {
        let need = layer::START_NEEDS + layer::SEAL_NEEDS;
        let check = || self.refuse_beyond(self.free_space()?.0, need);
        for _ in 0..4 {
            if check().is_ok() {
                return Ok(());
            }
            self.sync().await?;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        check()
    }

    /// Free and total bytes of the filesystem.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`] when the filesystem cannot be asked.
    pub fn free_space(&self) -> Result<(u64, u64)> {
        let stat = rustix::fs::fstatvfs(&self.inner.dir)
            .map_err(|error| io_error("measure", &self.inner.data)(error.into()))?;
        Ok((stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize))
    }

    /// What is free, and what of that new work may use.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`] when the filesystem cannot be asked.
    pub fn usable(&self) -> Result<FreeSpace> {
        let (free, total) = self.free_space()?;
        let reserve = self.reserve(total);
        Ok(FreeSpace { usable: free.saturating_sub(reserve), free, reserve })
    }

    /// Free inodes of the filesystem; those without a number of them have many.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`] when the filesystem cannot be asked.
    pub fn free_inodes(&self) -> Result<u64> {
        let stat = rustix::fs::fstatvfs(&self.inner.dir)
            .map_err(|error| io_error("measure", &self.inner.data)(error.into()))?;
        Ok(if stat.f_files == 0 { u64::MAX } else { stat.f_favail })
    }

    pub(super) fn refuse_beyond(&self, free: u64, need: u64) -> Result<()> {
        if need <= free {
            return Ok(());
        }
        let hint = format!(
            "delete sandboxes or snapshots, or make the filesystem of `{}` larger",
            self.inner.data.display()
        );
        Err(StoreError::NoRoom { free, need, hint })
    }
}
