//! Which layers are referenced, by whom, and how much space that takes. Pure: layers and holders in, sums out.
//!
//! The engine keeps one [`ReferenceCounts`] in memory, filled at start-up and updated with every manifest. A
//! layer without references may be collected.
//!
//! A layer is referenced by every snapshot, image, drive and sandbox whose chain contains it. For each
//! snapshot there are three numbers:
//!
//! - *own*: what it added to its parent, or to its image if it has no parent. It never changes.
//! - *shared*: all the rest of its chain.
//! - *freed*: what its deletion would free now: layers that nothing else refers to.
//!
//! Compacted layers share inodes with the layers they were made from ([`Linked`]). Shared bytes are counted
//! once in totals, and count as freed only with the last layer that may refer to them. If a layer shares with
//! several others at once, it is not known which bytes with which; then the sums are too low rather than too
//! high.
//!
//! Memory layers count in the same way and in the same numbers. A template refers to its own, so memory that
//! VMs of a kind have in common is not any snapshot's own.

use std::collections::{HashMap, HashSet};

use crate::model::{
    Drive, DriveId, Image, Layer, LayerId, LayerKind, MemoryId, MemoryLayer, Sandbox, SandboxId,
    Snapshot, SnapshotId, Template,
};
use crate::store::gc::known_manifests::KnownManifests;
use crate::store::gc::references::HoldersByKey;
use crate::store::{Linked, Result, Store};

/// What a layer weighs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerSize {
    /// Disk space it takes, what it shares included.
    pub bytes: u64,
    /// Disk space of files that it shares with the host.
    pub foreign: u64,
    /// Whether it is part of an image.
    pub image: bool,
    /// What of it other layers keep as well.
    pub linked: Vec<Linked>,
}

/// What a snapshot takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sizes {
    /// What it added to its parent.
    pub own: u64,
    /// What it has in common with its parent or image.
    pub shared: u64,
    /// What deleting it would free.
    pub freed: u64,
}

/// The space everything takes together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// All sealed layers.
    pub bytes: u64,
    /// Of these, layers of images.
    pub images: u64,
    /// Of these, layers of drives.
    pub drives: u64,
    /// Memory layers, which are not part of `bytes`.
    pub memory: u64,
    /// Layers of both sorts that nothing holds, which a collection would move to the trash.
    pub unheld: u64,
    /// Layers of both sorts that are in the trash: what deleting them would free. They are in no other sum.
    pub trash: u64,
}

/// All layers and who holds them.
#[derive(Debug, Default)]
pub struct ReferenceCounts {
    layer_sizes: HashMap<LayerId, LayerSize>,
    chains: HashMap<SnapshotId, SnapshotChain>,
    layers: HoldersByKey<Holder, LayerId>,
    /// The size of each memory layer.
    memory_sizes: HashMap<MemoryId, u64>,
    memory: HoldersByKey<Holder, MemoryId>,
    /// Bytes that several layers keep, by the layer that was made of the others, and for each layer by which
    /// others it is named.
    extents: HashMap<LayerId, Vec<SharedExtent>>,
    named_by: HashMap<LayerId, HashSet<LayerId>>,
    /// Templates and their memory.
    templates: HashMap<String, MemoryId>,
    /// Which manifests there are.
    pub known_manifests: KnownManifests,
    /// Layers of both sorts that are in the trash, by their ids. They keep their size until they are deleted.
    trashed: HashSet<LayerId>,
    trashed_memory: HashSet<MemoryId>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Holder {
    Snapshot(SnapshotId),
    Image(String),
    Sandbox(SandboxId),
    Drive(DriveId),
    Template(String),
    /// A sandbox in the trash, with the snapshots that were deleted with it.
    Trash(SandboxId),
}

#[derive(Debug, Default)]
struct SnapshotChain {
    parent: Option<SnapshotId>,
    layers: Vec<LayerId>,
    memory: Vec<MemoryId>,
}

/// Bytes of a layer that any of several others keeps as well. Some of those may be gone.
#[derive(Debug)]
struct SharedExtent {
    bytes: u64,
    others: HashSet<LayerId>,
}

impl ReferenceCounts {
    /// Opens the counts on all sealed layers.
    #[must_use]
    pub fn new(layer_sizes: HashMap<LayerId, LayerSize>) -> Self {
        let mut counts = Self::default();
        layer_sizes.into_iter().for_each(|(id, size)| counts.add(id, size));
        counts
    }

    /// Enters a sealed layer.
    pub fn add(&mut self, id: LayerId, size: LayerSize) {
        self.forget_extents(&id);
        let mut extents = Vec::new();
        for linked in &size.linked {
            let others: HashSet<LayerId> =
                linked.layers.iter().filter(|other| **other != id).cloned().collect();
            for other in &others {
                self.named_by.entry(other.clone()).or_default().insert(id.clone());
            }
            extents.push(SharedExtent { bytes: linked.bytes, others });
        }
        if !extents.is_empty() {
            self.extents.insert(id.clone(), extents);
        }
        self.layer_sizes.insert(id, size);
    }

    fn forget_extents(&mut self, id: &LayerId) {
        for extent in self.extents.remove(id).into_iter().flatten() {
            for other in extent.others {
                if let Some(names) = self.named_by.get_mut(&other) {
                    names.remove(id);
                    if names.is_empty() {
                        self.named_by.remove(&other);
                    }
                }
            }
        }
    }

    /// Enters a sealed memory layer.
    pub fn add_memory(&mut self, layer: &MemoryLayer) {
        self.memory_sizes.insert(layer.id.clone(), layer.bytes);
    }

    /// Whether a layer was entered.
    #[must_use]
    pub fn knows(&self, id: &LayerId) -> bool {
        self.layer_sizes.contains_key(id)
    }

    /// The total size of these layers, whatever else holds them.
    #[must_use]
    pub fn bytes_of(&self, layers: &[LayerId]) -> u64 {
        layers.iter().filter_map(|layer| self.layer_sizes.get(layer)).map(|size| size.bytes).sum()
    }

    /// Disk space of the files that these layers share with the host, which `bytes_of` leaves out.
    #[must_use]
    pub fn foreign_of(&self, layers: &[LayerId]) -> u64 {
        layers.iter().filter_map(|layer| self.layer_sizes.get(layer)).map(|size| size.foreign).sum()
    }

    /// The total size of those that belong to no image, each counted once.
    #[must_use]
    pub fn own_bytes<'a>(&self, layers: impl Iterator<Item = &'a LayerId>) -> u64 {
        let is_own = |layer: &&LayerId| self.layer_sizes.get(layer).is_some_and(|one| !one.image);
        self.total_size(&layers.filter(is_own).collect())
    }

    /// The total size of the memory layers that belong to no template, each counted once.
    #[must_use]
    pub fn own_memory<'a>(&self, layers: impl Iterator<Item = &'a MemoryId>) -> u64 {
        let of_templates: HashSet<&MemoryId> = self.templates.values().collect();
        let own: HashSet<&MemoryId> =
            layers.filter(|layer| !of_templates.contains(layer)).collect();
        own.into_iter().filter_map(|layer| self.memory_sizes.get(layer)).sum()
    }

    /// Enters a snapshot, or what has become of it.
    pub fn hold_snapshot(&mut self, snapshot: &Snapshot) {
        let holder = Holder::Snapshot(snapshot.id.clone());
        self.layers.hold(holder.clone(), &snapshot.layers);
        self.memory.hold(holder, &snapshot.memory);
        self.known_manifests.add_snapshot(snapshot);
        let (layers, memory) = (snapshot.layers.clone(), snapshot.memory.clone());
        let chain = SnapshotChain { parent: snapshot.parent.clone(), layers, memory };
        self.chains.insert(snapshot.id.clone(), chain);
    }

    /// Strikes out a snapshot.
    pub fn drop_snapshot(&mut self, id: &SnapshotId) {
        self.layers.hold(Holder::Snapshot(id.clone()), []);
        self.memory.hold(Holder::Snapshot(id.clone()), []);
        self.chains.remove(id);
        self.known_manifests.remove_snapshot(id);
    }

    /// Enters a sandbox that is in the trash, or about to be, with what its snapshots name.
    pub fn hold_trashed(&mut self, id: &SandboxId, layers: &[LayerId], memory: &[MemoryId]) {
        self.layers.hold(Holder::Trash(id.clone()), layers);
        self.memory.hold(Holder::Trash(id.clone()), memory);
    }

    /// Removes a sandbox that is no longer in the trash. Returns the layers that nothing else
    /// holds.
    pub fn drop_trashed(&mut self, id: &SandboxId) -> (Vec<LayerId>, Vec<MemoryId>) {
        let holder = Holder::Trash(id.clone());
        let layers = self.layers.held_by_one(&holder);
        let memory = self.memory.held_by_one(&holder);
        self.layers.hold(holder.clone(), []);
        self.memory.hold(holder, []);
        let layers = layers.into_iter().filter(|id| !self.layers.is_held(id)).collect();
        let memory = memory.into_iter().filter(|id| !self.memory.is_held(id)).collect();
        (layers, memory)
    }

    /// What deleting a sandbox in the trash would free.
    #[must_use]
    pub fn freed_by_trashed(&self, id: &SandboxId) -> u64 {
        let holder = Holder::Trash(id.clone());
        let layers = self.layers.held_by_one(&holder);
        let layers = layers.iter().filter(|id| self.layers.is_held_once(id)).collect();
        let memory = self.memory.held_by_one(&holder);
        let memory = memory.iter().filter(|id| self.memory.is_held_once(id));
        let memory: u64 = memory.filter_map(|id| self.memory_sizes.get(id)).sum();
        self.total_size(&layers) + memory
    }

    /// What deleting a sandbox and these snapshots of it would free.
    #[must_use]
    pub fn freed_with(&self, sandbox: &SandboxId, snapshots: &[SnapshotId]) -> u64 {
        let own = std::iter::once(Holder::Sandbox(sandbox.clone()));
        let holders: Vec<Holder> =
            own.chain(snapshots.iter().cloned().map(Holder::Snapshot)).collect();
        let mut layers: HashMap<LayerId, usize> = HashMap::new();
        let mut memory: HashMap<MemoryId, usize> = HashMap::new();
        for holder in &holders {
            for layer in self.layers.held_by_one(holder) {
                *layers.entry(layer).or_default() += 1;
            }
            for layer in self.memory.held_by_one(holder) {
                *memory.entry(layer).or_default() += 1;
            }
        }
        let alone = layers.iter().filter(|(id, count)| self.layers.is_held_by(id, **count));
        let alone = alone.map(|(id, _)| id).collect();
        let memory = memory.iter().filter(|(id, count)| self.memory.is_held_by(id, **count));
        let memory: u64 = memory.filter_map(|(id, _)| self.memory_sizes.get(id)).sum();
        self.total_size(&alone) + memory
    }

    /// Whether some manifest names a layer of either sort.
    #[must_use]
    pub fn names(&self, id: &str) -> bool {
        id.parse().is_ok_and(|id: LayerId| self.layers.is_held(&id))
            || id.parse().is_ok_and(|id: MemoryId| self.memory.is_held(&id))
    }

    /// Notes that a layer of either sort is in the trash, or is back.
    pub fn set_trashed(&mut self, id: &str, trashed: bool) {
        if let Ok(id) = id.parse::<LayerId>() {
            if trashed {
                self.trashed.insert(id)
            } else {
                self.trashed.remove(&id)
            };
        } else if let Ok(id) = id.parse::<MemoryId>() {
            if trashed {
                self.trashed_memory.insert(id)
            } else {
                self.trashed_memory.remove(&id)
            };
        }
    }

    /// Enters all images there are, in place of those there were.
    pub fn hold_images(&mut self, images: &[Image]) {
        let now = |image: &Image| Holder::Image(image.name.clone());
        let images = images.iter().map(|image| (now(image), &image.layers[..])).collect();
        self.layers.hold_only(|holder| matches!(holder, Holder::Image(_)), images);
    }

    /// Enters all templates there are, in place of those there were.
    pub fn hold_templates(&mut self, templates: &[Template]) {
        let now = |template: &Template| Holder::Template(template.key.clone());
        let held = templates.iter().map(|one| (now(one), std::slice::from_ref(&one.memory)));
        let held = held.collect();
        self.memory.hold_only(|holder| matches!(holder, Holder::Template(_)), held);
        self.templates =
            templates.iter().map(|one| (one.key.clone(), one.memory.clone())).collect();
    }

    /// Enters a template.
    pub fn hold_template(&mut self, template: &Template) {
        self.memory.hold(Holder::Template(template.key.clone()), [&template.memory]);
        self.templates.insert(template.key.clone(), template.memory.clone());
    }

    /// Enters an image.
    pub fn hold_image(&mut self, image: &Image) {
        self.layers.hold(Holder::Image(image.name.clone()), &image.layers);
    }

    /// Enters a sandbox: it holds its image's layers even when the image is gone, and what its session
    /// writes to and stands on, drives and memory included.
    pub fn hold_sandbox(&mut self, sandbox: &Sandbox) {
        let written = sandbox.open_layer().into_iter().chain(sandbox.unsealed());
        let session = written.chain(sandbox.open_chain());
        let drives = sandbox.mounted().iter().flat_map(|mounted| mounted.chain.iter());
        let open = sandbox.mounted().iter().map(|mounted| &mounted.layer);
        let layers = session.chain(&sandbox.image_layers).chain(drives).chain(open);
        let holder = Holder::Sandbox(sandbox.id.clone());
        self.layers.hold(holder.clone(), layers);
        self.known_manifests.add_sandbox(sandbox);
        self.memory.hold(holder, sandbox.open_memory().iter().chain(sandbox.captured()));
    }

    /// Strikes out a sandbox.
    pub fn drop_sandbox(&mut self, id: &SandboxId) {
        self.layers.hold(Holder::Sandbox(id.clone()), []);
        self.memory.hold(Holder::Sandbox(id.clone()), []);
        self.known_manifests.remove_sandbox(id);
    }

    /// Enters a drive, or what has become of it.
    pub fn hold_drive(&mut self, drive: &Drive) {
        let open = drive.attached.as_ref().map(|attached| &attached.layer);
        self.layers.hold(Holder::Drive(drive.id.clone()), drive.layers.iter().chain(open));
        self.known_manifests.add_drive(drive);
    }

    /// Strikes out a drive.
    pub fn drop_drive(&mut self, id: &DriveId) {
        self.layers.hold(Holder::Drive(id.clone()), []);
        self.known_manifests.remove_drive(id);
    }

    /// All layers that somebody holds, sealed or not.
    #[must_use]
    pub fn held(&self) -> HashSet<LayerId> {
        self.layers.held()
    }

    /// All memory layers that somebody holds.
    #[must_use]
    pub fn held_memory(&self) -> HashSet<MemoryId> {
        self.memory.held()
    }

    /// Strikes out memory layers that were removed.
    pub fn remove_memory(&mut self, layers: &[MemoryId]) {
        for layer in layers {
            self.memory_sizes.remove(layer);
            self.trashed_memory.remove(layer);
        }
    }

    /// Strikes out layers that were removed.
    pub fn remove(&mut self, layers: &[LayerId]) {
        for layer in layers {
            self.layer_sizes.remove(layer);
            self.forget_extents(layer);
            self.trashed.remove(layer);
        }
    }

    /// What a snapshot takes; `None` for one that was not entered.
    #[must_use]
    pub fn sizes(&self, snapshot: &SnapshotId) -> Option<Sizes> {
        let chain = self.chains.get(snapshot)?;
        let parent = chain.parent.as_ref().and_then(|parent| self.chains.get(parent));
        let below: HashSet<&LayerId> =
            parent.map(|parent| parent.layers.iter().collect()).unwrap_or_default();
        let (mut own, mut all) = (0, 0);
        for layer in chain.layers.iter().collect::<HashSet<_>>() {
            let Some(size) = self.layer_sizes.get(layer) else { continue };
            all += size.bytes;
            if !size.image && !below.contains(layer) {
                own += size.bytes;
            }
        }
        let alone = chain.layers.iter().filter(|layer| self.layers.is_held_once(layer));
        let freed = self.total_size(&alone.collect());
        let memory = self.sizes_of_memory(chain, parent);
        let shared = all - own + memory.shared;
        Some(Sizes { own: own + memory.own, shared, freed: freed + memory.freed })
    }

    /// What the memory of a snapshot takes on the disk, whatever else stands on it.
    #[must_use]
    pub fn memory_of(&self, snapshot: &SnapshotId) -> u64 {
        let layers =
            self.chains.get(snapshot).map(|chain| chain.memory.as_slice()).unwrap_or_default();
        layers.iter().filter_map(|layer| self.memory_sizes.get(layer)).sum()
    }

    fn sizes_of_memory(&self, chain: &SnapshotChain, parent: Option<&SnapshotChain>) -> Sizes {
        let mut sizes = Sizes::default();
        if chain.memory.is_empty() {
            return sizes;
        }
        let of_templates: HashSet<&MemoryId> = self.templates.values().collect();
        for layer in chain.memory.iter().collect::<HashSet<_>>() {
            let Some(bytes) = self.memory_sizes.get(layer) else { continue };
            let below = parent.is_some_and(|parent| parent.memory.contains(layer));
            if below || of_templates.contains(layer) {
                sizes.shared += bytes;
            } else {
                sizes.own += bytes;
            }
            if self.memory.is_held_once(layer) {
                sizes.freed += bytes;
            }
        }
        sizes
    }

    /// The space everything takes together.
    #[must_use]
    pub fn totals(&self) -> Totals {
        let of = |keep: &dyn Fn(&LayerId, &LayerSize) -> bool| {
            let chosen = self.layer_sizes.iter().filter(|(id, size)| keep(id, size));
            chosen.map(|(id, _)| id).collect::<HashSet<_>>()
        };
        let of_drives = self.layers.held_by(|holder| matches!(holder, Holder::Drive(_)));
        let (gone, kept): (Vec<_>, Vec<_>) =
            self.memory_sizes.iter().partition(|(id, _)| self.trashed_memory.contains(id));
        let free: u64 =
            kept.iter().filter(|(id, _)| !self.memory.is_held(id)).map(|(_, bytes)| *bytes).sum();
        let gone: u64 = gone.iter().map(|(_, bytes)| *bytes).sum();
        let there = |id: &LayerId| !self.trashed.contains(id);
        let all = self.total_size(&of(&|_, _| true));
        let trash = self.total_size(&of(&|id, _| !there(id)));
        Totals {
            // Not the sum over the existing ones: what both keep would be in neither.
            bytes: all.saturating_sub(trash),
            images: self.total_size(&of(&|id, size| size.image && there(id))),
            drives: self.total_size(&of(&|id, _| of_drives.contains(id))),
            memory: kept.iter().map(|(_, bytes)| *bytes).sum(),
            unheld: free + self.total_size(&of(&|id, _| !self.layers.is_held(id) && there(id))),
            trash: trash + gone,
        }
    }

    /// What removing exactly these layers would free.
    ///
    /// Bytes that a layer which stays keeps are not freed, and bytes that several of these have count once. Where
    /// it is not known which bytes two layers share, it is assumed that all of those in question are the same.
    fn total_size(&self, layers: &HashSet<&LayerId>) -> u64 {
        let there = |layer: &LayerId| self.layer_sizes.contains_key(layer);
        let stays = |layer: &LayerId| there(layer) && !layers.contains(layer);
        let mut sum: u64 = 0;
        for layer in layers {
            let Some(size) = self.layer_sizes.get(*layer) else { continue };
            let mut kept: u64 = 0;
            for extent in self.extents.get(*layer).into_iter().flatten() {
                if extent.others.iter().any(there) {
                    kept += extent.bytes;
                }
            }
            for owner in self.named_by.get(*layer).into_iter().flatten() {
                let extents = self.extents.get(owner).into_iter().flatten();
                for extent in extents.filter(|extent| extent.others.contains(*layer)) {
                    if stays(owner) || extent.others.iter().any(stays) {
                        kept += extent.bytes;
                    }
                }
            }
            sum += size.bytes.saturating_sub(kept);
        }
        sum
    }
}

impl Store {
    /// Reads the sizes of all sealed layers. Damaged ones are left out; `fsck` names them.
    ///
    /// # Errors
    ///
    /// Returns an error when the layers cannot be listed.
    pub async fn layer_sizes(&self) -> Result<HashMap<LayerId, LayerSize>> {
        let layers = self.scan::<Layer>().await?.good;
        let store = self.clone();
        crate::store::blocking(move || {
            let total_size = |layer: Layer| (layer.id.clone(), store.layer_size(&layer));
            Ok(layers.into_iter().map(total_size).collect())
        })
        .await
    }

    /// The size of a sealed layer.
    #[must_use]
    pub fn layer_size(&self, layer: &Layer) -> LayerSize {
        let linked = match layer.kind {
            LayerKind::Compacted => self.linked(&layer.id),
            LayerKind::Image | LayerKind::Session | LayerKind::Checkpoint => Vec::new(),
        };
        let image = layer.kind == LayerKind::Image;
        LayerSize { bytes: layer.bytes, foreign: layer.foreign_bytes, image, linked }
    }
}

#[cfg(test)]
mod tests;
