//! Seals a layer: leaves out what is excluded, syncs, visits every name, and writes the manifest.
//!
//! [`Store::prepare_seal`] does all but the manifest, which [`Store::commit`] writes together with those of the snapshot and the
//! sandbox. A layer that the store builds itself (an image, a copy, a merge) is built in a staging directory, and
//! published: sealed and renamed into place.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;

use crate::failpoint;
use crate::model::{FORMAT, Layer, LayerId, LayerKind, now};
use crate::store::background::background_after;
use crate::store::layer::exclude::Globs;
use crate::store::layer::junk::{Junk, JunkRules};
use crate::store::manifest::{self, Durability, Manifest};
use crate::store::walk::{Measure, Measuring, measure_looking};
use crate::store::{Result, Store, StoreError, blocking, io_error};

/// What a seal writes besides what the session wrote: manifests, and the journal's part in them.
pub(in crate::store) const SEAL_NEEDS: u64 = 1 << 20;

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
    /// Its manifest exists too.
    Sealed(Layer),
    /// Its manifest is still to be written, by [`Store::commit`].
    Ready(Layer),
}

impl Store {
    /// Seals a layer that nothing writes to any more. An empty one makes no layer, however often it is
    /// asked for, and is left to be [discarded](Self::discard) when no record references it any
    /// more. Sealing a sealed layer returns that layer.
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
    /// returns what is in the layer that may not be meant to be.
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

    /// Visits every name of an open layer that nothing writes to, with the lowest priority, so that
    /// its seal need not. `None` if nothing was written to it. Ends with an error once `stop` is
    /// true.
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
                // The daemon that sealed it may have died, or failed, before that was on stable
                // storage.
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

    /// Makes a place to build a layer in that is not visible before it is whole.
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
}
