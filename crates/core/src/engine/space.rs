//! Who holds which layers, what that costs, and what goes when nobody does.
//!
//! The store's [`Books`] are kept in memory, filled at start-up and changed with every manifest. The
//! collector takes the space lock for writing, and
//! whoever comes to hold a layer takes it for reading from before the layer is sealed until the
//! manifest that names it is written, so that nothing is collected in between.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};

use serde::{Deserialize, Serialize};

use super::boot::chain_of;
use super::damage::DamageKind;
use super::slot::lock;
use super::{Engine, Inner, Result};
use crate::model::{Image, Layer, LayerId, MemoryLayer, Quarantine, Snapshot, Timestamp, now};
use crate::store::CollectedMemory;
use crate::store::accounting::{Books, Sizes};

/// Something that takes up room.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sized<T> {
    /// The thing.
    pub item: T,
    /// What it added to the snapshot before it.
    pub own: u64,
    /// What it stands on, which others may stand on too.
    pub shared: u64,
    /// What the disk would have back if it were deleted now.
    pub freed_if_deleted: u64,
    /// What of all that is memory, whoever else stands on it.
    pub memory: u64,
}

/// What takes up room on this host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpaceReport {
    /// The size of the filesystem.
    pub total: u64,
    /// What is free on it.
    pub free: u64,
    /// Sealed layers of sandboxes.
    pub snapshots: u64,
    /// Layers of images.
    pub images: u64,
    /// Sealed layers of drives.
    pub drives: u64,
    /// Memory of machines: of snapshots that have it, and of templates.
    pub memory: u64,
    /// What is kept aside by the guard.
    pub quarantine: u64,
    /// What sessions under way have written so far.
    pub open: u64,
}

impl Engine {
    /// The disk space an image's layers take.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when one of them cannot be read.
    pub async fn image_size(&self, image: &Image) -> Result<u64> {
        self.inner.learn(&image.layers).await?;
        Ok(self.inner.books().bytes_of(&image.layers))
    }

    /// What takes up room.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when the filesystem cannot be asked.
    pub async fn usage(&self) -> Result<SpaceReport> {
        let (free, total) = self.inner.store.free_space()?;
        let mut report = SpaceReport { total, free, ..SpaceReport::default() };
        let totals = self.inner.books().totals();
        report.images = totals.images;
        report.drives = totals.drives;
        report.memory = totals.memory;
        report.snapshots = totals.bytes.saturating_sub(totals.images + totals.drives);
        let aside = self.inner.store.scan::<Quarantine>().await?.good;
        report.quarantine = aside.iter().map(Quarantine::bytes).sum();
        for live in self.inner.all_live() {
            let sandbox = live.sandbox();
            let drives = sandbox.mounted.iter().map(|mounted| &mounted.layer);
            for open in sandbox.open_layer.iter().chain(drives) {
                report.open += self.inner.store.usage_of_open(open).await?;
            }
        }
        Ok(report)
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
    }

    /// Enters a memory layer that was sealed.
    pub(super) fn book_memory(&self, layer: &MemoryLayer) {
        self.books().add_memory(layer);
    }

    pub(super) fn sized(&self, snapshot: Snapshot) -> Sized<Snapshot> {
        let books = self.books();
        let Sizes { own, shared, freed } = books.sizes(&snapshot.id).unwrap_or_default();
        let memory = books.memory_of(&snapshot.id);
        Sized { item: snapshot, own, shared, freed_if_deleted: freed, memory }
    }

    pub(super) fn collect_soon(self: &Arc<Self>) {
        let inner = Arc::clone(self);
        tokio::spawn(async move {
            if let Err(error) = inner.collect().await {
                tracing::warn!(
                    error = chain_of(&error),
                    "layers that nobody holds were not collected"
                );
            }
        });
    }

    /// Enters layers that came about outside the engine: those of images.
    pub(super) async fn learn(&self, layers: &[LayerId]) -> Result<()> {
        for id in layers {
            if self.books().knows(id) {
                continue;
            }
            match self.store.layer(id).await {
                Ok(layer) => {
                    self.damage.clear(DamageKind::Missing, &format!("layers/{id}"));
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

    /// Removes the layers that nobody holds.
    pub(super) async fn collect(&self) -> Result<()> {
        if self.is_recovering() {
            // What a session that broke off wrote is being sealed. Recovery collects at its end.
            return Ok(());
        }
        if self.uncertain.load(Ordering::SeqCst) {
            tracing::warn!(
                "nothing is collected while manifests do not read; `keep fsck` names them"
            );
            return Ok(());
        }
        let _space = self.space.write().await;
        if self.unsynced_tombstones.swap(false, Ordering::SeqCst) {
            // After a power cut none of those may be a snapshot again, without its layers.
            self.store.sync().await?;
        }
        // Asked before the list is read: a pull that ends in between is in one or the other.
        let in_use = self.images.in_use();
        let images = self.images.list().await?;
        for image in &images {
            self.learn(&image.layers).await?;
        }
        let mut live = {
            let mut books = self.books();
            books.hold_images(&images);
            books.held()
        };
        live.extend(in_use);
        // What is being written just now is younger than this and not on record yet.
        let grace = jiff::SignedDuration::from_secs(30);
        let begun_before = now().checked_sub(grace).unwrap_or_else(|_| now());
        let collected = self.store.collect(&live, begun_before).await?;
        if !collected.layers.is_empty() {
            tracing::info!(layers = collected.layers.len(), bytes = collected.bytes, "collected");
        }
        self.books().remove(&collected.layers);
        self.collect_memory(begun_before).await
    }

    /// Removes the memory layers that nobody holds, and templates that nobody used for long.
    async fn collect_memory(&self, begun_before: Timestamp) -> Result<()> {
        let live = self.books().held_memory();
        let collected = self.store.collect_memory(&live, begun_before).await?;
        let CollectedMemory { layers, bytes, templates, kept } = collected;
        if !layers.is_empty() || !templates.is_empty() {
            let (layers, templates) = (layers.len(), templates.len());
            tracing::info!(layers, bytes, templates, "collected memory");
        }
        let mut books = self.books();
        books.remove_memory(&layers);
        books.hold_templates(&kept);
        Ok(())
    }
}
