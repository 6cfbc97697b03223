//! The manifests that the daemon has read or written.
//!
//! The collector compares them with the manifests on disk: a manifest that is not known could refer to any
//! layer. Pure: updated with every manifest that is written or removed.

use std::collections::{HashMap, HashSet};

use crate::model::{Drive, DriveId, LayerId, MemoryId, Sandbox, SandboxId, Snapshot, SnapshotId};

/// Sandboxes, snapshots and drives that are on record.
#[derive(Debug, Default)]
pub struct KnownManifests {
    sandboxes: HashMap<SandboxId, SandboxReferences>,
    snapshots: HashMap<SnapshotId, SnapshotReferences>,
    tombstones: HashSet<SnapshotId>,
    drives: HashMap<DriveId, Vec<LayerId>>,
}

/// What a sandbox must be able to find.
#[derive(Debug, Clone, Default)]
struct SandboxReferences {
    current: Option<SnapshotId>,
    layers: Vec<LayerId>,
    memory: Vec<MemoryId>,
}

/// What a snapshot names.
#[derive(Debug, Clone)]
struct SnapshotReferences {
    sandbox: SandboxId,
    /// Whether it says itself that its sandbox was deleted.
    outlives: bool,
    /// Whether it only stays because somebody stands on it.
    left_behind: bool,
    layers: Vec<LayerId>,
    memory: Vec<MemoryId>,
}

/// Something that is named and not there.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Dangling {
    /// What is missing, as a path below the data directory.
    pub missing: String,
    /// The file that references it, as a path below the data directory.
    pub named_by: String,
}

impl KnownManifests {
    pub(in crate::store) fn add_sandbox(&mut self, sandbox: &Sandbox) {
        let drives = sandbox.mounted().iter().flat_map(|mounted| mounted.chain.iter());
        // Layers that are being written may be discarded before that is recorded: an empty one is.
        // They are not listed.
        let open = |id: &&LayerId| Some(*id) != sandbox.unsealed();
        let layers =
            sandbox.image_layers.iter().chain(sandbox.open_chain()).chain(drives).filter(open);
        let stand = SandboxReferences {
            current: sandbox.current.clone(),
            layers: layers.cloned().collect(),
            memory: sandbox.open_memory().to_vec(),
        };
        self.sandboxes.insert(sandbox.id.clone(), stand);
    }

    pub(in crate::store) fn remove_sandbox(&mut self, id: &SandboxId) {
        self.sandboxes.remove(id);
    }

    pub(in crate::store) fn add_snapshot(&mut self, snapshot: &Snapshot) {
        let kept = SnapshotReferences {
            sandbox: snapshot.sandbox.clone(),
            outlives: snapshot.outlives || snapshot.sandbox_deleted_at.is_some(),
            left_behind: snapshot.sandbox_deleted_at.is_some() && !snapshot.outlives,
            layers: snapshot.layers.clone(),
            memory: snapshot.memory.clone(),
        };
        self.tombstones.remove(&snapshot.id);
        self.snapshots.insert(snapshot.id.clone(), kept);
    }

    /// Notes that a snapshot's record is a tombstone.
    pub fn mark_snapshot_deleted(&mut self, id: &SnapshotId) {
        self.snapshots.remove(id);
        self.tombstones.insert(id.clone());
    }

    /// Notes that a snapshot has no record any more.
    pub fn remove_snapshot(&mut self, id: &SnapshotId) {
        self.snapshots.remove(id);
        self.tombstones.remove(id);
    }

    pub(in crate::store) fn add_drive(&mut self, drive: &Drive) {
        self.drives.insert(drive.id.clone(), drive.layers.clone());
    }

    pub(in crate::store) fn remove_drive(&mut self, id: &DriveId) {
        self.drives.remove(id);
    }

    /// Whether a sandbox is on record.
    #[must_use]
    pub fn has_sandbox(&self, id: &SandboxId) -> bool {
        self.sandboxes.contains_key(id)
    }

    /// Whether a snapshot, or its tombstone, is on record.
    #[must_use]
    pub fn has_snapshot(&self, id: &SnapshotId) -> bool {
        self.snapshots.contains_key(id) || self.tombstones.contains(id)
    }

    /// Whether a drive is on record.
    #[must_use]
    pub fn has_drive(&self, id: &DriveId) -> bool {
        self.drives.contains_key(id)
    }

    /// The manifests there should be, as paths below the data directory.
    #[must_use]
    pub fn manifests(&self) -> HashSet<String> {
        let sandboxes = self.sandboxes.keys().map(|id| format!("sandboxes/{id}/sandbox.json"));
        let snapshots = self.snapshots.keys().chain(&self.tombstones);
        let snapshots = snapshots.map(|id| format!("snapshots/{id}.json"));
        let drives = self.drives.keys().map(|id| format!("drives/{id}.json"));
        sandboxes.chain(snapshots).chain(drives).collect()
    }

    /// Snapshots whose sandbox is not on record, though nothing says that it was deleted.
    #[must_use]
    pub fn orphans(&self) -> Vec<(SnapshotId, SandboxId)> {
        let lost = self
            .snapshots
            .iter()
            .filter(|(_, kept)| !kept.outlives && !self.sandboxes.contains_key(&kept.sandbox));
        let mut lost: Vec<_> = lost.map(|(id, kept)| (id.clone(), kept.sandbox.clone())).collect();
        lost.sort();
        lost
    }

    /// Snapshots of deleted sandboxes that only stay while somebody stands on them.
    #[must_use]
    pub fn left_behind(&self) -> Vec<SnapshotId> {
        let left = self.snapshots.iter().filter(|(_, kept)| kept.left_behind);
        left.map(|(id, _)| id.clone()).collect()
    }

    /// What is named and not among `there`, the names of the layers of both sorts that exist. Sandboxes that stand on
    /// a snapshot without any record are part of it.
    #[must_use]
    pub fn dangling(&self, there: &HashSet<String>) -> Vec<Dangling> {
        let mut dangling = Vec::new();
        let mut look = |named_by: String, layers: &[LayerId], memory: &[MemoryId]| {
            let layers = layers.iter().map(|id| ("layers", id.as_str()));
            for (part, id) in layers.chain(memory.iter().map(|id| ("memory", id.as_str()))) {
                if !there.contains(id) {
                    let missing = format!("{part}/{id}");
                    dangling.push(Dangling { missing, named_by: named_by.clone() });
                }
            }
        };
        for (id, kept) in &self.snapshots {
            look(format!("snapshots/{id}.json"), &kept.layers, &kept.memory);
        }
        for (id, stand) in &self.sandboxes {
            look(format!("sandboxes/{id}/sandbox.json"), &stand.layers, &stand.memory);
        }
        for (id, layers) in &self.drives {
            look(format!("drives/{id}.json"), layers, &[]);
        }
        for (id, stand) in &self.sandboxes {
            if let Some(current) = &stand.current
                && !self.has_snapshot(current)
            {
                dangling.push(Dangling {
                    missing: format!("snapshots/{current}.json"),
                    named_by: format!("sandboxes/{id}/sandbox.json"),
                });
            }
        }
        dangling.sort();
        dangling.dedup();
        dangling
    }
}
