//! The life of a layer: begun, written by a session, sealed, collected.
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
//! This file is the lifecycle. Before a seal, [`exclude`] removes excluded names, [`junk`] finds large and
//! temporary files, [`quarantine`] takes files out, and [`mounted`] makes sure that nobody writes any more.
//! [`digest`] tells whether a sealed layer was damaged, [`compact`] merges layers, [`live_copy`] copies an
//! open layer for a checkpoint, [`disk_import`] takes over a VM's disk, [`export`] writes an OCI layer, and
//! [`quota`] limits the size of an open layer, and [`unheld`] collects layers that nobody holds.

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
pub(super) mod unheld;

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;

use sandkeep_quota::Amount;
use serde::{Deserialize, Serialize};

use crate::failpoint;
use crate::model::{FORMAT, Layer, LayerId, LayerKind, RootFs, now};
use crate::store::background::background_after;
use crate::store::layer::exclude::Globs;
use crate::store::layer::junk::{Junk, JunkRules};
use crate::store::manifest::{self, Durability, Manifest};
use crate::store::walk::{Measure, Measuring, measure_looking};
use crate::store::{Result, Store, StoreError, blocking, io_error};

pub(in crate::store) use self::unheld::time_of;
pub use self::unheld::{Collected, Unheld};

/// What a seal writes besides what the session wrote: manifests, and the journal's part in them.
pub(in crate::store) const SEAL_NEEDS: u64 = 1 << 20;

/// What must be free for a session to start: its directories, its records, and something to write to.
pub(in crate::store) const START_NEEDS: u64 = 3 << 20;

/// How many names of an open layer are visited ahead of its seal before the thread that does so is slowed down.
const MEASURED_UNPACED: u32 = 50_000;

/// How a layer is sealed.
#[derive(Debug, Clone)]
pub struct SealOptions {
    /// What is left out: globs, see `docs/formats/layer.md`.
    pub exclude: Vec<String>,
    /// What the layer was made from.
    pub kind: LayerKind,
    /// The digest of the OCI layer it was unpacked from.
    pub diff_id: Option<String>,
    /// Space of its files that is not its own, because they are links to files outside the store.
    pub foreign: u64,
    /// The names of the layer as they are, if they were visited since the last write to it. The seal then does not visit them again.
    pub measured: Option<MeasuredLayer>,
}

impl Default for SealOptions {
    fn default() -> Self {
        Self {
            exclude: Vec::new(),
            kind: LayerKind::Session,
            diff_id: None,
            foreign: 0,
            measured: None,
        }
    }
}

/// What a visit to every name of an open layer found. It is worth something as long as nothing writes to the layer.
#[derive(Debug, Clone)]
pub struct MeasuredLayer {
    measure: Measure,
    junk: Vec<Junk>,
}

impl From<Measuring<'_>> for MeasuredLayer {
    fn from(measuring: Measuring<'_>) -> Self {
        let (measure, junk) = measuring.finish();
        Self { measure, junk }
    }
}

impl MeasuredLayer {
    /// Whether every name is still as it was. Blocks are left out: a sync may allocate them.
    fn is_still(&self, diff: &Path) -> bool {
        let now = measure_looking(diff, false, None);
        now.is_ok_and(|(now, _)| {
            (now.files, now.summary) == (self.measure.files, self.measure.summary)
        })
    }
}

/// A layer whose files are on stable storage, and that nothing writes to any more.
#[derive(Debug, Clone)]
#[must_use = "a layer that is ready is still open until it is committed"]
pub enum Sealing {
    /// Its manifest is there too.
    Sealed(Layer),
    /// Its manifest is still to be written, by [`Store::commit`].
    Ready(Layer),
}

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

    /// Seals a layer that nothing writes to any more. An empty one makes no layer, however often it is
    /// asked for, and is left to be [discarded](Self::discard) when no record names it any more.
    /// Sealing a sealed layer answers with what it is.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::NoRoom`] or [`StoreError::OnDisk`] before anything is touched; after any other error the layer is
    /// still open and can be sealed again.
    pub async fn seal(&self, open: &LayerId, options: &SealOptions) -> Result<Option<Layer>> {
        let (store, id, options) = (self.clone(), open.clone(), options.clone());
        blocking(move || {
            Ok(match store.prepare_now(&id, &options, None)?.0 {
                Some(Sealing::Ready(layer)) => {
                    let place = Layer::place(&id);
                    let bytes = manifest::to_json(&layer, &place)?;
                    store.put(&place, &bytes, Durability::Synced, false)?;
                    store.is_sealed(&id);
                    Some(layer)
                }
                Some(Sealing::Sealed(layer)) => Some(layer),
                None => None,
            })
        })
        .await
    }

    /// Does all that [`seal`](Self::seal) does but write the manifest, which is left to [`commit`](Self::commit), and
    /// tells what is in the layer that may not be meant to be.
    ///
    /// # Errors
    ///
    /// As [`seal`](Self::seal).
    pub async fn prepare_seal(
        &self,
        open: &LayerId,
        options: &SealOptions,
        rules: Option<JunkRules>,
    ) -> Result<(Option<Sealing>, Vec<Junk>)> {
        let (store, id, options) = (self.clone(), open.clone(), options.clone());
        blocking(move || store.prepare_now(&id, &options, rules.as_ref())).await
    }

    /// What is in an open layer that may not be meant to be. It may be written to meanwhile.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`].
    pub async fn junk_in(&self, open: &LayerId, rules: JunkRules) -> Result<Vec<Junk>> {
        let diff = self.diff_dir(open);
        blocking(move || Ok(measure_looking(&diff, true, Some(&rules))?.1)).await
    }

    /// Visits every name of an open layer that nobody writes to, with the lowest priority, so that its seal need not. `None`
    /// if nothing was written to it. Ends with an error once `stop` is true.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::Io`], also when somebody does write to it.
    pub async fn measure_open(
        &self,
        open: &LayerId,
        rules: Option<JunkRules>,
        stop: Arc<AtomicBool>,
    ) -> Result<Option<MeasuredLayer>> {
        let (store, id) = (self.clone(), open.clone());
        background_after(MEASURED_UNPACED, stop, move || {
            if store.is_untouched_now(&id)? {
                return Ok(None);
            }
            let (measure, junk) = measure_looking(&store.diff_dir(&id), false, rules.as_ref())?;
            Ok(Some(MeasuredLayer { measure, junk }))
        })
        .await
    }

    /// Takes out of an open layer all that matches; the sandbox has the layer at `prefix`.
    ///
    /// # Errors
    ///
    /// Returns [`StoreError::BadGlob`] or [`StoreError::Io`].
    pub async fn exclude(&self, open: &LayerId, globs: &[String], prefix: &[u8]) -> Result<()> {
        let (diff, globs, prefix) = (self.diff_dir(open), Globs::parse(globs)?, prefix.to_vec());
        blocking(move || globs.apply(&diff, &prefix)).await
    }

    fn prepare_now(
        &self,
        id: &LayerId,
        options: &SealOptions,
        rules: Option<&JunkRules>,
    ) -> Result<(Option<Sealing>, Vec<Junk>)> {
        match self.get::<Layer>(id) {
            Ok(sealed) => {
                // Whoever sealed it may have died, or failed, before that was on stable storage.
                self.sync_now()?;
                return Ok((Some(Sealing::Sealed(sealed)), Vec::new()));
            }
            Err(StoreError::NotFound { .. }) => {}
            Err(error) => return Err(error),
        }
        let dir = self.layer_dir(id);
        let diff = dir.join("diff");
        if !diff.is_dir() {
            return Err(StoreError::NotFound { kind: Layer::KIND, key: id.to_string() });
        }
        if self.has_disk(id)? {
            return Err(StoreError::OnDisk { id: id.clone() });
        }
        // The reserve is kept by `check_room` for just this moment, so only real fullness refuses.
        self.check_room_to_seal()?;
        let exclusions = Globs::parse(&options.exclude)?;
        failpoint::pass("store.seal.admitted");
        exclusions.apply(&diff, &[])?;
        failpoint::pass("store.seal.excluded");
        if self.is_untouched_now(id)? {
            return Ok((None, Vec::new()));
        }
        // The kernel's room, and the mount points a driver may have put there for the session.
        for scratch in ["work", "base", "filling"] {
            self.discard_dir(&dir.join(scratch), scratch)?;
        }
        failpoint::pass("store.seal.before_sync");
        let (Measure { bytes, files, summary }, junk) = match &options.measured {
            Some(known) if options.exclude.is_empty() => {
                failpoint::pass("store.seal.measured_ahead");
                self.sync_now_or_again()?;
                debug_assert!(
                    known.is_still(&diff),
                    "layer {id} was written to after it was measured"
                );
                (known.measure, known.junk.clone())
            }
            _ => self.sync_and_look(&diff, rules)?,
        };
        failpoint::step("store.seal.synced");
        match options.kind {
            LayerKind::Session => self.resolve_doubt(id)?,
            _ => self.refuse_doubtful_build(id)?,
        }
        let layer = Layer {
            format: FORMAT,
            id: id.clone(),
            kind: options.kind,
            bytes: bytes.saturating_sub(options.foreign),
            foreign_bytes: options.foreign,
            files,
            sealed_at: now(),
            summary: Some(hex::encode(summary)),
            diff_id: options.diff_id.clone(),
        };
        failpoint::pass("store.seal.before_manifest");
        Ok((Some(Sealing::Ready(layer)), junk))
    }

    /// A layer's manifest is on stable storage.
    pub(in crate::store) fn is_sealed(&self, id: &LayerId) {
        failpoint::pass("store.seal.sealed");
        self.forget_doubt(id);
        let dir = self.layer_dir(id);
        for leftover in ["open.json", "copies.json"] {
            let _ = fs::remove_file(dir.join(leftover));
        }
    }

    /// Whether nothing was written to an open layer. Nobody knows what is on a machine's disk.
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

    /// Makes a place to build a layer in that nobody sees before it is whole.
    pub(in crate::store) fn stage(&self) -> Result<(LayerId, PathBuf)> {
        let id = LayerId::fresh();
        self.build_begins(&id);
        self.inner.holds.protect_new(id.as_str());
        let staging = self.tmp_dir().join(id.as_str());
        for path in [&staging, &staging.join("diff")] {
            fs::create_dir(path).map_err(io_error("create", path))?;
        }
        Ok((id, staging))
    }

    /// Seals what was built in `staging` and moves it among the layers.
    pub(in crate::store) fn publish(
        &self,
        id: &LayerId,
        staging: &Path,
        kind: LayerKind,
    ) -> Result<Layer> {
        let Measure { bytes, files, summary } = self.sync_and_measure(&staging.join("diff"))?;
        self.refuse_doubtful_build(id)?;
        let layer = Layer {
            format: FORMAT,
            id: id.clone(),
            kind,
            bytes,
            foreign_bytes: 0,
            files,
            sealed_at: now(),
            summary: Some(hex::encode(summary)),
            diff_id: None,
        };
        failpoint::pass("store.publish.before_manifest");
        let place = PathBuf::from(format!("tmp/{id}/layer.json"));
        self.put(&place, &manifest::to_json(&layer, &place)?, Durability::Synced, false)?;
        failpoint::pass("store.publish.before_rename");
        let dir = self.layer_dir(id);
        fs::rename(staging, &dir).map_err(io_error("publish", &dir))?;
        failpoint::pass("store.publish.before_sync");
        manifest::sync_parent(&dir)?;
        self.forget_doubt(id);
        Ok(layer)
    }

    /// Brings everything to stable storage and measures `tree` meanwhile.
    pub(in crate::store) fn sync_and_measure(&self, tree: &Path) -> Result<Measure> {
        Ok(self.sync_and_look(tree, None)?.0)
    }

    fn sync_and_look(
        &self,
        tree: &Path,
        rules: Option<&JunkRules>,
    ) -> Result<(Measure, Vec<Junk>)> {
        thread::scope(|scope| {
            let syncing = scope.spawn(|| self.sync_now_or_again());
            let measured = measure_looking(tree, false, rules);
            match syncing.join() {
                Ok(synced) => synced.and(measured),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
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

    /// Whether all of these are sealed and their files are there.
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
