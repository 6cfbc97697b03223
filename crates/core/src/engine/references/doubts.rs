//! Files that could reference layers and could not be read, and the layers that stay because of
//! them (`snapshots/evidence.rs` looks for them).

use std::collections::{BTreeMap, BTreeSet, HashSet};

use parking_lot::Mutex;

use crate::engine::context::damage::DamageKind;
use crate::model::{DriveId, SandboxId, SnapshotId};

/// The files that could not be read.
#[derive(Debug, Default)]
pub(in crate::engine) struct Doubts(pub(in crate::engine) Mutex<DoubtState>);

#[derive(Debug, Default)]
pub(in crate::engine) struct DoubtState {
    /// Manifests that did not read, as paths below the data directory, and why.
    pub(in crate::engine) unread: BTreeMap<String, String>,
    /// Layers of both sorts that were there when the daemon started.
    pub(in crate::engine) at_start: HashSet<String>,
    /// Images that were there.
    pub(in crate::engine) images: HashSet<String>,
    pub(in crate::engine) reported: BTreeSet<(DamageKind, String)>,
    /// What must stay according to the last survey; `None` before the first.
    pub(in crate::engine) protected: Option<HashSet<String>>,
}

impl Doubts {
    /// Notes manifests that do not read.
    pub(in crate::engine) fn unread(&self, path: String, reason: String) {
        self.0.lock().unread.insert(path, reason);
    }

    /// Sandboxes whose manifest does not read.
    pub(in crate::engine) fn unread_sandboxes(&self) -> Vec<SandboxId> {
        let state = self.0.lock();
        let named = state.unread.keys().filter_map(|path| UncertainRecord::parse(path));
        named
            .filter_map(|named| match named {
                UncertainRecord::Sandbox(id) => Some(id),
                _ => None,
            })
            .collect()
    }

    /// Whether a layer of either sort must stay although nothing references it, as far as the last
    /// survey knows.
    pub(in crate::engine) fn protects(&self, id: &str) -> bool {
        let state = self.0.lock();
        state.protected.as_ref().unwrap_or(&state.at_start).contains(id)
    }

    /// Notes what was there before this daemon made anything.
    pub(in crate::engine) fn started_with(&self, layers: HashSet<String>) {
        self.0.lock().at_start = layers;
    }
}

/// What a manifest is about.
pub(in crate::engine) enum UncertainRecord {
    Sandbox(SandboxId),
    Snapshot(SnapshotId),
    Drive(DriveId),
}

impl UncertainRecord {
    pub(in crate::engine) fn parse(path: &str) -> Option<Self> {
        let (part, rest) = path.split_once('/')?;
        match part {
            "sandboxes" => rest.strip_suffix("/sandbox.json")?.parse().ok().map(Self::Sandbox),
            "snapshots" => rest.strip_suffix(".json")?.parse().ok().map(Self::Snapshot),
            "drives" => rest.strip_suffix(".json")?.parse().ok().map(Self::Drive),
            _ => None,
        }
    }
}
