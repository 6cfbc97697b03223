//! Which layers are referenced or held, what they cost, and whether one may be discarded.
//!
//! The reference counts are kept in memory, filled at start-up and changed with every manifest.
//! Code that is about to reference a layer has a [`LayerHold`](crate::store::LayerHold) on it from
//! before it reads the chain until the manifest that names it is written. No lock is held over any
//! of that, so no operation waits for a copy, a compaction or a deletion of another sandbox.

pub(in crate::engine) mod digest_queue;
pub(in crate::engine) mod doubts;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

use crate::db::Db;
use crate::engine::Result;
use crate::engine::context::Context;
use crate::engine::context::damage::DamageKind;
use crate::engine::error::error_chain;
use crate::engine::references::digest_queue::DigestQueue;
use crate::engine::references::doubts::Doubts;
use crate::model::{Layer, LayerId, MemoryId, MemoryLayer, Sandbox, Snapshot, SnapshotId};
use crate::store::accounting::{ReferenceCounts, Sizes};
use crate::store::{LayerHold, Store, Trashed};

/// The reference counts of layers.
pub(in crate::engine) struct References {
    store: Store,
    db: Arc<dyn Db>,
    context: Arc<Context>,
    counts: Arc<Mutex<ReferenceCounts>>,
    /// Layers that were sealed and have no digest yet.
    pub(in crate::engine) digests: DigestQueue,
    /// Layers that no record names any more. They are removed after the next sync.
    unsynced: Mutex<Vec<LayerId>>,
    /// What could name layers and was not read.
    pub(in crate::engine) doubts: Doubts,
}

impl References {
    pub(in crate::engine) fn new(context: &Arc<Context>) -> Arc<Self> {
        Arc::new(Self {
            store: context.store.clone(),
            db: Arc::clone(&context.db),
            context: Arc::clone(context),
            counts: Arc::default(),
            digests: DigestQueue::default(),
            unsynced: Mutex::default(),
            doubts: Doubts::default(),
        })
    }
}

/// Something that takes space.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sized<T> {
    /// The thing.
    pub item: T,
    /// What it added to the snapshot before it.
    pub own: u64,
    /// What it stands on, which others may stand on too.
    pub shared: u64,
    /// What the disk would have back if it were deleted: when the grace period of the trash is over, or sooner if space is needed.
    pub freed_if_deleted: u64,
    /// The part of it that is memory, whatever else stands on it.
    pub memory: u64,
    /// About how much an export writes: all layers, with the files they share with the host.
    pub export: u64,
}

impl References {
    pub(in crate::engine) fn counts(&self) -> MutexGuard<'_, ReferenceCounts> {
        self.counts.lock()
    }

    /// Enters a layer that was just sealed.
    pub(in crate::engine) fn count_layer(&self, layer: &Layer) {
        let weight = self.store.layer_size(layer);
        self.counts().add(layer.id.clone(), weight);
        if self.store.verified_at(&layer.id).is_none() {
            self.digests.add(layer.id.clone());
        }
    }

    /// Enters a memory layer that was sealed.
    pub(in crate::engine) fn count_memory_layer(&self, layer: &MemoryLayer) {
        self.counts().add_memory(layer);
    }

    pub(in crate::engine) fn sized(&self, snapshot: Snapshot) -> Sized<Snapshot> {
        let counts = self.counts();
        let Sizes { own, shared, freed } = counts.sizes(&snapshot.id).unwrap_or_default();
        let memory = counts.memory_of(&snapshot.id);
        let export = counts.bytes_of(&snapshot.layers) + counts.foreign_of(&snapshot.layers);
        Sized { item: snapshot, own, shared, freed_if_deleted: freed, memory, export }
    }

    /// Removes layers when the records that no longer name them are synced. An unsynced record may
    /// be lost in a power cut, and the older one that reappears names these layers: without them
    /// the sandbox would not start.
    ///
    /// Those of a daemon that dies first are collected by the next one.
    pub(in crate::engine) fn discard_when_synced(&self, layers: impl IntoIterator<Item = LayerId>) {
        self.unsynced.lock().extend(layers);
    }

    /// Whether layers wait for a sync to be removed.
    pub(in crate::engine) fn has_unnamed(&self) -> bool {
        !self.unsynced.lock().is_empty()
    }

    /// Syncs everything, and removes the layers that waited for it.
    pub(in crate::engine) async fn sync_and_discard(&self) -> Result<()> {
        let unnamed = std::mem::take(&mut *self.unsynced.lock());
        if let Err(error) = self.store.sync().await {
            self.discard_when_synced(unnamed);
            return Err(error.into());
        }
        for layer in &unnamed {
            self.try_to_discard(layer).await;
        }
        Ok(())
    }

    /// Reads a snapshot, and holds what it names for as long as the answer lives.
    pub(in crate::engine) async fn hold_snapshot(
        &self,
        id: &SnapshotId,
    ) -> Result<(LayerHold, Option<Snapshot>)> {
        let hold = self.store.hold();
        let mut found = self.db.snapshot(id).await?;
        while let Some(snapshot) = &found {
            hold.layers(&snapshot.layers).await;
            hold.memory(&snapshot.memory).await;
            // Read again: what is on record after the hold began is named or held from then on.
            let again = self.db.snapshot(id).await?;
            let same = again.as_ref().is_some_and(|again| {
                again.layers == snapshot.layers && again.memory == snapshot.memory
            });
            if same {
                break;
            }
            found = again;
        }
        Ok((hold, found))
    }

    /// The same for what a sandbox stands on.
    pub(in crate::engine) async fn hold_current(
        &self,
        sandbox: &Sandbox,
    ) -> Result<(LayerHold, Option<Snapshot>)> {
        match &sandbox.current {
            Some(id) => self.hold_snapshot(id).await,
            None => Ok((self.store.hold(), None)),
        }
    }

    /// Enters layers that came about outside the engine: those of images.
    pub(in crate::engine) async fn count_image_layers(&self, layers: &[LayerId]) -> Result<()> {
        for id in layers {
            if self.counts().knows(id) {
                continue;
            }
            match self.store.layer(id).await {
                Ok(layer) => {
                    self.context.clear_damage(DamageKind::Missing, &format!("layers/{id}"));
                    self.count_layer(&layer);
                }
                // The damage costs what stands on it, and nothing else.
                Err(error) => self.context.report_damage(
                    DamageKind::Missing,
                    format!("layers/{id}"),
                    error_chain(&error),
                    "an image needs it: sandboxes of that image do not start; pull or import the image again",
                ),
            }
        }
        Ok(())
    }

    /// Moves layers of either sort to the trash, unless something names or holds them, or might.
    pub(in crate::engine) async fn discard_layers(
        &self,
        mut ids: Vec<String>,
    ) -> Result<Vec<Trashed>> {
        ids.retain(|id| !self.doubts.protects(id));
        let named = self.store.named_on_disk(&ids).await?;
        let mut gone = HashSet::new();
        for id in ids {
            if let Some(path) = named.get(&id) {
                let path = self.store.below(path);
                tracing::warn!(
                    layer = id,
                    path,
                    "a layer without a reference in memory is kept: a manifest names it"
                );
                continue;
            }
            let (counts, asked) = (Arc::clone(&self.counts), id.clone());
            if self.store.discard_unheld(&id, move || counts.lock().names(&asked)).await? {
                self.counts().set_trashed(&id, true);
                gone.insert(id);
            }
        }
        if gone.is_empty() {
            return Ok(Vec::new());
        }
        let trash = self.store.trash().await?;
        Ok(trash.into_iter().filter(|trashed| gone.contains(&trashed.id)).collect())
    }

    /// Puts layers back from the trash, and into the accounts.
    pub(in crate::engine) async fn restore_from_trash(&self, ids: Vec<String>) -> Result<()> {
        for id in self.store.untrash(ids).await? {
            tracing::warn!(layer = id, "a layer in the trash is still referenced; it was restored");
            self.counts().set_trashed(&id, false);
            if let Ok(layer) = id.parse() {
                let sealed = self.store.layer(&layer).await;
                sealed.iter().for_each(|layer| self.count_layer(layer));
            } else if let Ok(layer) = id.parse() {
                let sealed = self.store.read::<crate::model::MemoryLayer>(&layer).await;
                sealed.iter().for_each(|layer| self.count_memory_layer(layer));
            }
        }
        Ok(())
    }

    /// Where the layers of an image lie.
    pub(in crate::engine) fn memory_dirs(&self, memory: &[MemoryId]) -> Vec<PathBuf> {
        memory.iter().map(|id| self.store.memory_dir(id)).collect()
    }

    pub(in crate::engine) async fn missing_layer(&self, layers: &[LayerId]) -> Option<String> {
        if self.store.has_layers(layers).await {
            return layers.iter().find_map(|layer| self.changed_layer(layer));
        }
        for layer in layers {
            let mut found = self.store.layer(layer).await;
            if found.as_ref().is_err_and(crate::store::StoreError::is_not_found) {
                // It may be in the trash, by mistake or by hand.
                if let Err(error) = self.restore_from_trash(vec![layer.to_string()]).await {
                    tracing::error!(%layer, error = error_chain(&error), "a layer was not restored from the trash");
                }
                found = self.store.layer(layer).await;
            }
            if let Err(error) = found {
                return Some(error.to_string());
            }
            if !self.store.diff_dir(layer).is_dir() {
                return Some(format!("the files of layer {layer} are gone"));
            }
            if let Some(changed) = self.changed_layer(layer) {
                return Some(changed);
            }
        }
        None
    }

    fn changed_layer(&self, layer: &LayerId) -> Option<String> {
        let changed =
            self.context.damage.detail(DamageKind::LayerChanged, &format!("layers/{layer}"))?;
        Some(format!("layer {layer} is not what was sealed: {changed}"))
    }

    /// Removes a layer that no record names any more.
    pub(in crate::engine) async fn try_to_discard(&self, layer: &LayerId) {
        if let Err(error) = self.store.discard(layer).await {
            tracing::warn!(%layer, error = error_chain(&error), "an unused layer was not removed; garbage collection will");
        }
    }
}
