//! Who holds which layers, what that costs, and what goes when nobody does.
//!
//! The store's [`Books`] are kept in memory, filled at start-up and changed with every manifest. Whoever comes to name a layer
//! has a [`Hold`](crate::store::Hold) on it from before it reads the chain until the manifest that names it is written. No lock is
//! held over any of that, so nobody waits for a copy, a compaction or a deletion of another sandbox.
//!
//! A collection takes a layer when all of this is true, and moves it to the trash:
//!
//! - no manifest that memory knows names it, and nobody holds it;
//! - it is older than 30 seconds;
//! - everything that could name it was read, see `evidence`;
//! - no manifest on disk has its id in its text, whatever memory says.

use std::collections::HashSet;
use std::sync::{Arc, MutexGuard};

use serde::{Deserialize, Serialize};

use super::boot::chain_of;
use super::damage::DamageKind;
use super::slot::lock;
use super::{Engine, Inner, Result};
use crate::model::{
    Image, Layer, LayerId, MemoryId, MemoryLayer, Sandbox, Snapshot, SnapshotId, Template, now,
};
use crate::store::accounting::{Books, Sizes};
use crate::store::{Hold, Trashed, Unheld};

/// What is being written just now is younger than this and may not be on record yet.
const YOUNG: jiff::SignedDuration = jiff::SignedDuration::from_secs(30);
/// Collections that were asked for within this time are one.
const SOON: std::time::Duration = std::time::Duration::from_millis(200);
/// How long a collection that was asked for waits after the last one: this many times as long as that one took, but at most
/// [`LONGEST_REST`]. Housekeeping collects independently of it.
const REST: u32 = 20;
const LONGEST_REST: std::time::Duration = std::time::Duration::from_secs(30);

/// Something that takes up room.
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
    /// What of all that is memory, whoever else stands on it.
    pub memory: u64,
    /// About how much an export writes: all layers, with the files they share with the host.
    pub export: u64,
}

impl Engine {
    /// The disk space that an image's layers take, and the space of the files they share with the host.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when one of them cannot be read.
    pub async fn image_size(&self, image: &Image) -> Result<(u64, u64)> {
        self.inner.learn(&image.layers).await?;
        let books = self.inner.books();
        Ok((books.bytes_of(&image.layers), books.foreign_of(&image.layers)))
    }
}

impl Inner {
    pub(super) fn books(&self) -> MutexGuard<'_, Books> {
        lock(&self.books)
    }

    /// Enters a layer that was just sealed.
    pub(super) fn book(&self, layer: &Layer) {
        let weight = self.store.weight(layer);
        self.books().add(layer.id.clone(), weight);
        if self.store.verified_at(&layer.id).is_none() {
            self.scrub.add(layer.id.clone());
        }
    }

    /// Enters a memory layer that was sealed.
    pub(super) fn book_memory(&self, layer: &MemoryLayer) {
        self.books().add_memory(layer);
    }

    pub(super) fn sized(&self, snapshot: Snapshot) -> Sized<Snapshot> {
        let books = self.books();
        let Sizes { own, shared, freed } = books.sizes(&snapshot.id).unwrap_or_default();
        let memory = books.memory_of(&snapshot.id);
        let export = books.bytes_of(&snapshot.layers) + books.foreign_of(&snapshot.layers);
        Sized { item: snapshot, own, shared, freed_if_deleted: freed, memory, export }
    }

    /// How long to wait before a collection that is asked for now: it reads what every manifest on disk names, and must not do that
    /// all the time.
    fn until_next_collection(&self) -> std::time::Duration {
        let Some((ended, took)) = *lock(&self.last_collection) else { return SOON };
        let rest = took.saturating_mul(REST).min(LONGEST_REST);
        rest.saturating_sub(ended.elapsed()).max(SOON)
    }

    /// Removes layers when the records that no longer name them are synced. A record that is not may be lost in a power cut,
    /// and the older one that is there again names these layers: without them the sandbox would not start.
    ///
    /// Those of a daemon that dies first are collected by the next one.
    pub(super) fn discard_when_synced(&self, layers: impl IntoIterator<Item = LayerId>) {
        lock(&self.unnamed).extend(layers);
    }

    /// Whether layers wait for a sync to be removed.
    pub(super) fn has_unnamed(&self) -> bool {
        !lock(&self.unnamed).is_empty()
    }

    /// Syncs everything, and removes the layers that waited for it.
    pub(super) async fn sync_and_discard(&self) -> Result<()> {
        let unnamed = std::mem::take(&mut *lock(&self.unnamed));
        if let Err(error) = self.store.sync().await {
            self.discard_when_synced(unnamed);
            return Err(error.into());
        }
        for layer in &unnamed {
            self.try_to_discard(layer).await;
        }
        Ok(())
    }

    /// Collects a moment later, once for all who ask meanwhile.
    pub(super) fn collect_soon(self: &Arc<Self>) {
        if self.collect_asked.swap(true, std::sync::atomic::Ordering::SeqCst) {
            return;
        }
        let inner = Arc::clone(self);
        tokio::spawn(async move {
            tokio::time::sleep(inner.until_next_collection()).await;
            inner.collect_asked.store(false, std::sync::atomic::Ordering::SeqCst);
            if let Err(error) = inner.collect().await {
                tracing::warn!(
                    error = chain_of(&error),
                    "layers that nobody holds were not collected"
                );
            }
        });
    }

    /// Reads a snapshot, and holds what it names for as long as the answer lives.
    pub(super) async fn hold_snapshot(&self, id: &SnapshotId) -> Result<(Hold, Option<Snapshot>)> {
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
    pub(super) async fn hold_current(&self, sandbox: &Sandbox) -> Result<(Hold, Option<Snapshot>)> {
        match &sandbox.current {
            Some(id) => self.hold_snapshot(id).await,
            None => Ok((self.store.hold(), None)),
        }
    }

    /// Enters layers that came about outside the engine: those of images.
    pub(super) async fn learn(&self, layers: &[LayerId]) -> Result<()> {
        for id in layers {
            if self.books().knows(id) {
                continue;
            }
            match self.store.layer(id).await {
                Ok(layer) => {
                    self.clear_damage(DamageKind::Missing, &format!("layers/{id}"));
                    self.book(&layer);
                }
                // It costs what stands on it, and nothing else.
                Err(error) => self.report_damage(
                    DamageKind::Missing,
                    format!("layers/{id}"),
                    chain_of(&error),
                    "an image needs it: sandboxes of that image do not start; pull or import the image again",
                ),
            }
        }
        Ok(())
    }

    /// Moves the layers that nobody holds to the trash, and deletes what has been there long enough.
    pub(super) async fn collect(self: &Arc<Self>) -> Result<()> {
        if self.is_recovering() {
            // What a session that broke off wrote is being sealed. Recovery collects at its end.
            return Ok(());
        }
        let _one = self.collecting.lock().await;
        let began = std::time::Instant::now();
        // Asked before anything is read: a pull that ends in between is in this or in what is read.
        let pending = self.store.pending();
        self.survey().await?;
        let begun_before = now().checked_sub(YOUNG).unwrap_or_else(|_| now());
        let (held, held_memory) = {
            let books = self.books();
            (books.held(), books.held_memory())
        };
        self.store.named(held.iter().map(LayerId::as_str));
        self.store.named(held_memory.iter().map(MemoryId::as_str));
        let unheld = self.store.unheld(&held, begun_before).await?;
        let mut going: Vec<String> =
            unheld.into_iter().map(|Unheld { id, .. }| id.to_string()).collect();
        if self.drop_stale_templates().await? {
            let held = self.books().held_memory();
            let memory = self.store.unheld_memory(&held, begun_before).await?;
            going.extend(memory.into_iter().map(|(id, _)| id.to_string()));
        }
        going.retain(|id| !pending.contains(id));
        let gone = self.discard_layers(going).await?;
        if !gone.is_empty() {
            tracing::info!(layers = gone.len(), "layers that nobody names were moved to the trash");
        }
        let swept = self.sweep_trash().await;
        *lock(&self.last_collection) = Some((std::time::Instant::now(), began.elapsed()));
        swept
    }

    /// Moves layers of either sort to the trash, unless something names or holds them, or might.
    pub(super) async fn discard_layers(&self, mut ids: Vec<String>) -> Result<Vec<Trashed>> {
        ids.retain(|id| !self.doubts.protects(id));
        let named = self.store.named_on_disk(&ids).await?;
        let mut gone = HashSet::new();
        for id in ids {
            if let Some(path) = named.get(&id) {
                let path = self.store.below(path);
                tracing::warn!(
                    layer = id,
                    path,
                    "nobody in memory names it, but a manifest does; it stays"
                );
                continue;
            }
            let (books, asked) = (Arc::clone(&self.books), id.clone());
            if self.store.discard_unheld(&id, move || lock(&books).names(&asked)).await? {
                self.books().set_trashed(&id, true);
                gone.insert(id);
            }
        }
        if gone.is_empty() {
            return Ok(Vec::new());
        }
        let trash = self.store.trash().await?;
        Ok(trash.into_iter().filter(|trashed| gone.contains(&trashed.id)).collect())
    }

    /// Drops the records of templates that nobody used for long, and enters the others. False when one does not read: nobody
    /// knows then which memory templates hold.
    async fn drop_stale_templates(&self) -> Result<bool> {
        let kept;
        let damaged = if self.expiry_time().is_some() {
            let (collected, damaged) = self.store.drop_stale_templates().await?;
            kept = collected.kept;
            damaged
        } else {
            let scan = self.store.scan::<Template>().await?;
            kept = scan.good;
            scan.damaged
        };
        let known = damaged.is_empty();
        for one in damaged {
            self.report_damage(
                DamageKind::UnreadableManifest,
                self.store.below(&one.path),
                one.reason,
                "memory layers are not collected until it reads; removing it loses only a little speed",
            );
        }
        if known {
            self.books().hold_templates(&kept);
        }
        Ok(known)
    }
}
