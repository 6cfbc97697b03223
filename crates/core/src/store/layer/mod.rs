//! The lifecycle of a layer: begun, written by a session, sealed, collected.
//!
//! ```text
//!   begin ----> open ----> sealed ----> gone
//!                 |   seal         collect
//!                 +-- discard ------> gone
//! ```
//!
//! An open layer is `layers/<id>/` with `diff/`, where the session writes through overlayfs, `work/`,
//! the kernel's own, and `open.json`, which remembers what `diff/` itself looked like at first. Sealing
//! copies nothing: it syncs what is dirty and then writes `layer.json`. That file is the seal.
//!
//! | file | does |
//! |---|---|
//! | this one | begins, measures and discards open layers |
//! | [`quota`] | limits the size of an open layer |
//! | [`changes`] | finds what changed since the last look |
//! | [`live_copy`] | copies an open layer for a checkpoint |
//! | [`disk_import`] | imports a VM's disk into its open layer |
//! | [`exclude`], [`junk`], [`quarantine`], [`mounted`] | before a seal: remove excluded names, find large and temporary files, take files out, make sure that nobody writes any more |
//! | [`seal`] | seals |
//! | [`digest`] | tells whether a sealed layer was damaged |
//! | [`compact`] | merges layers |
//! | [`export`] | writes an OCI layer |
//! | [`unheld`] | collects layers that nothing holds |

pub(super) mod changes;
pub(super) mod compact;
pub(super) mod digest;
pub(super) mod disk_import;
pub(super) mod exclude;
pub(super) mod export;
pub(super) mod junk;
pub(super) mod live_copy;
mod mounted;
pub(super) mod quarantine;
pub(super) mod quota;
pub(super) mod seal;
pub(super) mod unheld;

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use sandkeep_quota::Amount;
use serde::{Deserialize, Serialize};

use crate::failpoint;
use crate::model::{FORMAT, Layer, LayerId, RootFs};
use crate::store::manifest;
use crate::store::walk::Measure;
use crate::store::{Result, Store, StoreError, blocking, io_error};

pub(in crate::store) use self::seal::SEAL_NEEDS;
pub use self::seal::{MeasuredLayer, SealOptions, Sealing};
pub(in crate::store) use self::unheld::time_of;
pub use self::unheld::{Collected, Unheld};

/// What must be free for a session to start: its directories, its records, and something to write to.
pub(in crate::store) const START_NEEDS: u64 = 3 << 20;

/// What an open layer takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LayerUsage {
    /// Disk space: blocks, each inode once.
    pub bytes: u64,
    /// Inodes; where the filesystem does not count for us, names.
    pub inodes: u64,
    /// Whether the filesystem counts what is written to it, and holds it to a limit.
    pub enforced: bool,
}

/// What `diff/` itself was like when the layer was begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Open {
    format: u32,
    mode: u32,
    uid: u32,
    gid: u32,
}

impl Default for Open {
    fn default() -> Self {
        Self { format: FORMAT, mode: 0o755, uid: 0, gid: 0 }
    }
}

impl Store {
    /// Begins a layer to be written on top of `chain`, whose first is the topmost. Its root directory
    /// looks like the topmost's.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn begin(&self, chain: &[LayerId]) -> Result<LayerId> {
        let below = chain.first().map(|id| self.diff_dir(id));
        let store = self.clone();
        blocking(move || {
            let id = LayerId::fresh();
            store.build_begins(&id);
            store.inner.holds.protect_new(id.as_str());
            let dir = store.layer_dir(&id);
            let root = match below {
                Some(below) => root_of(&below)?,
                None => {
                    let (uid, gid) = store.inner.base_owner;
                    Open { uid, gid, ..Open::default() }
                }
            };
            for path in [&dir, &dir.join("diff"), &dir.join("work")] {
                fs::create_dir(path).map_err(io_error("create", path))?;
            }
            let diff = dir.join("diff");
            chown(&diff, Some(root.uid), Some(root.gid))
                .and_then(|()| fs::set_permissions(&diff, fs::Permissions::from_mode(root.mode)))
                .map_err(io_error("set up", &diff))?;
            let note = dir.join("open.json");
            fs::write(&note, manifest::to_json(&root, &note)?).map_err(io_error("write", &note))?;
            failpoint::pass("store.begin.done");
            Ok(id)
        })
        .await
    }

    /// Describes a root filesystem: `open` on top of `chain`, whose first is the topmost.
    #[must_use]
    pub fn root(&self, open: &LayerId, chain: &[LayerId]) -> RootFs {
        RootFs {
            layers_dir: self.layers_dir(),
            lower: chain.iter().map(|id| PathBuf::from(format!("{id}/diff"))).collect(),
            writable_dir: self.layer_dir(open),
            upper: PathBuf::from("diff"),
            work: PathBuf::from("work"),
            image: 0,
        }
    }

    /// Where a layer's files lie.
    #[must_use]
    pub fn diff_dir(&self, id: &LayerId) -> PathBuf {
        self.layer_dir(id).join("diff")
    }

    /// Whether nothing was written to an open layer. The content of a machine's disk is unknown.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`] when it cannot be looked at.
    pub async fn is_untouched(&self, open: &LayerId) -> Result<bool> {
        let (store, open) = (self.clone(), open.clone());
        blocking(move || store.is_untouched_now(&open)).await
    }

    /// The same. Listing a directory may change its access time, which waits for a journal that hangs.
    pub(in crate::store) fn is_untouched_now(&self, open: &LayerId) -> Result<bool> {
        if self.has_disk(open)? {
            return Ok(false);
        }
        let (dir, diff) = (self.layer_dir(open), self.diff_dir(open));
        Ok(is_empty(&diff)? && root_of(&diff)? == begun_as(&dir))
    }

    /// Throws an open layer away. One that is not there is no error; a sealed one is left alone.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn discard(&self, open: &LayerId) -> Result<()> {
        let (store, id) = (self.clone(), open.clone());
        blocking(move || {
            let dir = store.layer_dir(&id);
            if dir.join("layer.json").exists() {
                return Ok(());
            }
            failpoint::pass("store.discard.before");
            store.forget_doubt(&id);
            store.discard_dir(&dir, id.as_str())?;
            store.inner.holds.unprotect(id.as_str());
            Ok(())
        })
        .await
    }

    /// What a sealed layer is.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::NotSealed`] for an open layer, else as [`read`](Self::read).
    pub async fn layer(&self, id: &LayerId) -> Result<Layer> {
        let (store, id) = (self.clone(), id.clone());
        blocking(move || store.sealed(&id)).await
    }

    /// Whether all of these are sealed and their files exist.
    pub async fn has_layers(&self, ids: &[LayerId]) -> bool {
        let (store, ids) = (self.clone(), ids.to_vec());
        let there = move || {
            Ok(ids.iter().all(|id| store.sealed(id).is_ok() && store.diff_dir(id).is_dir()))
        };
        blocking(there).await.unwrap_or(false)
    }

    pub(in crate::store) fn sealed(&self, id: &LayerId) -> Result<Layer> {
        match self.get(id) {
            Err(StoreError::NotFound { .. }) if self.diff_dir(id).is_dir() => {
                Err(StoreError::NotSealed { id: id.clone() })
            }
            outcome => outcome,
        }
    }

    /// What an open layer takes by now: by the filesystem's own count where it holds the layer to a limit.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`]. What the sandbox removes during the count is no error.
    pub async fn usage_of_open(&self, open: &LayerId) -> Result<LayerUsage> {
        let (store, open) = (self.clone(), open.clone());
        blocking(move || {
            if let Some(Amount { bytes, inodes }) = store.counted(&open)? {
                return Ok(LayerUsage { bytes, inodes, enforced: true });
            }
            let Measure { bytes, files, .. } =
                crate::store::walk::measure_moving(&store.diff_dir(&open))?;
            let bytes = bytes + store.usage_of_disk(&open)?;
            Ok(LayerUsage { bytes, inodes: files, enforced: false })
        })
        .await
    }
}

fn root_of(diff: &Path) -> Result<Open> {
    let found = fs::symlink_metadata(diff).map_err(io_error("stat", diff))?;
    let (mode, uid, gid) = (found.mode() & 0o7777, found.uid(), found.gid());
    Ok(Open { format: FORMAT, mode, uid, gid })
}

/// What the root was like at first. The note is not synced; without it, assume the usual.
fn begun_as(dir: &Path) -> Open {
    let note = dir.join("open.json");
    fs::read(&note).ok().and_then(|bytes| manifest::parse(&note, &bytes).ok()).unwrap_or_default()
}

fn is_empty(diff: &Path) -> Result<bool> {
    let mut entries = fs::read_dir(diff).map_err(io_error("list", diff))?;
    match entries.next() {
        None => Ok(true),
        Some(Ok(_)) => Ok(false),
        Some(Err(error)) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        Some(Err(error)) => Err(io_error("list", diff)(error)),
    }
}
