//! Limits the size of an open layer by project quotas, where the filesystem has them.
//!
//! The filesystem enforces the quota: it counts blocks and inodes, those of files that were removed
//! and are still open included, and a write beyond it fails while its process continues. An open
//! layer's `diff/` and `work/` are put into a *project* of the layer's own, which all that
//! overlayfs makes in them inherits.
//!
//! *Whose number.* A project's number follows from the layer's id and is in a range of our own; the first that nothing is in and
//! nothing limits is taken. Nothing is on record: what is in a sealed layer stays in its project,
//! which no other layer takes for as long as one file of it exists, and whose limit has no effect,
//! because nothing writes to it.
//!
//! *Why not on btrfs.* Its quotas (qgroups) are those of subvolumes, so every layer would have to be one. Inodes are numbered
//! for each subvolume, and overlayfs shows the numbers of layers on one filesystem as they are: two files would have one number. And
//! no file can be linked from one subvolume into another, which compaction does. Layers there are counted, as on any filesystem without
//! project quotas (`engine/integrity/disk_limits.rs`).
//!
//! Not used for layers that are built (images, compaction): what is linked into a project's directory must be of that project.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;

use sandkeep_quota::{self as quota, Amount};
use sha2::{Digest as _, Sha256};

use crate::model::LayerId;
use crate::store::{Result, Store, blocking, io_error};

/// The numbers of our projects: from here to twice this.
const FIRST: u32 = 1 << 30;
/// How many numbers are tried.
const TRIED: u32 = 64;

/// The number of bytes of a disk limit per inode, as on a machine's own disk.
pub(crate) const BYTES_PER_INODE: u64 = 8 << 10;
/// The least of them.
const INODES_AT_LEAST: u64 = 4096;

/// How many inodes go with a disk limit.
#[must_use]
pub fn inodes_for(limit: u64) -> u64 {
    (limit / BYTES_PER_INODE).max(INODES_AT_LEAST)
}

/// How a data directory's filesystem holds sandboxes to their disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Enforcement {
    /// By project quotas: a write beyond the limit fails.
    Projects,
    /// It does not: what sandboxes write is counted now and then.
    Counted {
        /// Why.
        reason: String,
        /// What to do about it, if there is something.
        fix: Option<String>,
    },
}

/// Finds out how the filesystem of a directory can hold sandboxes to their disk.
///
/// # Errors
///
/// Returns the system's error when there is no such directory.
pub fn enforcement(directory: &Path) -> io::Result<Enforcement> {
    let on = File::open(directory)?;
    let kind = rustix::fs::fstatfs(&on)?.f_type as u64;
    // From `linux/magic.h`.
    let (name, fix) = match kind {
        0xef53 => (
            "ext4",
            "`umount` it, `tune2fs -O project,quota -Q prjquota DEVICE`, mount it with `-o prjquota`",
        ),
        0x5846_5342 => ("xfs", "mount it with `-o pquota`"),
        0x9123_683e => {
            let reason = "btrfs has quotas of subvolumes, which layers cannot be".to_owned();
            return Ok(Enforcement::Counted { reason, fix: None });
        }
        _ => {
            let reason = "the filesystem has no project quotas".to_owned();
            let fix = Some("put the data directory on ext4 or xfs".to_owned());
            return Ok(Enforcement::Counted { reason, fix });
        }
    };
    let reason = match quota::is_enforced(on.as_fd()) {
        Ok(true) => match quota::look_up(on.as_fd(), FIRST) {
            Ok(_) => return Ok(Enforcement::Projects),
            Err(error) => format!("project quotas of this {name} cannot be used: {error}"),
        },
        Ok(false) => format!("project quotas are off on this {name}"),
        Err(error) => format!("project quotas are off on this {name} ({error})"),
    };
    Ok(Enforcement::Counted { reason, fix: Some(fix.to_owned()) })
}

impl Store {
    /// How the filesystem holds sandboxes to their disk.
    #[must_use]
    pub fn enforcement(&self) -> &Enforcement {
        &self.inner.enforcement
    }

    /// Holds what is written to an open layer to `limit` bytes, and to as many inodes as go with it, from now on; again, with another limit, at
    /// any time. `false` when the filesystem does not do that for this layer.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`](crate::store::StoreError::Io) when there is no such layer.
    pub async fn limit_open(&self, open: &LayerId, limit: u64, inodes: u64) -> Result<bool> {
        if self.inner.enforcement != Enforcement::Projects {
            return Ok(false);
        }
        let (store, open) = (self.clone(), open.clone());
        blocking(move || {
            let limit = Amount { bytes: limit, inodes };
            match store.project_of(&open)? {
                Some(project) => Ok(store.set_limit(&open, project, limit)),
                None => store.give_project(&open, limit),
            }
        })
        .await
    }

    /// What the filesystem says an open layer takes; `None` where it does not count for this layer.
    pub(in crate::store) fn counted(&self, open: &LayerId) -> Result<Option<Amount>> {
        if self.inner.enforcement != Enforcement::Projects {
            return Ok(None);
        }
        let Some(project) = self.project_of(open)? else { return Ok(None) };
        Ok(quota::look_up(self.inner.dir.as_fd(), project).ok().map(|found| found.used))
    }

    fn project_of(&self, open: &LayerId) -> Result<Option<u32>> {
        let diff = self.diff_dir(open);
        let directory = File::open(&diff).map_err(io_error("open", &diff))?;
        let found = quota::project_of(directory.as_fd()).ok().flatten();
        Ok(found.filter(|project| (FIRST..FIRST * 2).contains(project)))
    }

    /// Gives an empty layer a project. A layer that was written to without one is left alone: its
    /// existing files would not count.
    fn give_project(&self, open: &LayerId, limit: Amount) -> Result<bool> {
        let parts = [self.diff_dir(open), self.layer_dir(open).join("work")];
        for part in &parts {
            let mut entries = fs::read_dir(part).map_err(io_error("list", part))?;
            if entries.next().is_some() {
                return Ok(false);
            }
        }
        let on = self.inner.dir.as_fd();
        let Some(project) = free_project(on, open) else {
            tracing::warn!(layer = %open, "no free project id for a quota; usage is measured instead");
            return Ok(false);
        };
        if !self.set_limit(open, project, limit) {
            return Ok(false);
        }
        for part in &parts {
            let directory = File::open(part).map_err(io_error("open", part))?;
            if let Err(error) = quota::set_project(directory.as_fd(), project) {
                tracing::warn!(layer = %open, %error, "could not set a project id; usage is measured instead");
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn set_limit(&self, open: &LayerId, project: u32, limit: Amount) -> bool {
        let set = quota::set_limit(self.inner.dir.as_fd(), project, limit);
        if let Err(error) = &set {
            tracing::warn!(layer = %open, project, %error, "could not set a quota");
        }
        set.is_ok()
    }
}

/// A number that no file has and no limit uses.
fn free_project(on: BorrowedFd<'_>, layer: &LayerId) -> Option<u32> {
    let digest = Sha256::digest(layer.as_str());
    let begin = u32::from_le_bytes([digest[0], digest[1], digest[2], digest[3]]);
    (0..TRIED).map(|step| FIRST + begin.wrapping_add(step) % FIRST).find(|project| {
        // The limit of one whose last file is gone is as good as none.
        quota::look_up(on, *project).is_ok_and(|found| found.used == Amount::default())
    })
}

#[cfg(test)]
mod tests {
    use super::{Enforcement, enforcement, inodes_for};

    #[test]
    fn inodes_go_with_bytes() {
        assert_eq!(inodes_for(1 << 20), 4096);
        assert_eq!(inodes_for(32 << 30), 4 << 20);
    }

    #[test]
    fn a_filesystem_without_quotas_says_so() {
        let found = enforcement(std::path::Path::new("/proc")).expect("it is there");
        assert!(
            matches!(found, Enforcement::Counted { reason, .. } if reason.contains("no project quotas"))
        );
        assert!(enforcement(std::path::Path::new("/no/such/place")).is_err());
    }
}
