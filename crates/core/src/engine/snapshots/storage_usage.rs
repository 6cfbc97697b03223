//! Disk usage of the host and of projects.
//!
//! Sums over sealed layers come from memory. What sessions under way have written has to be measured by walking their
//! files, which can be millions, and what is in quarantine by reading the records of all projects;
//! so a measurement is used again for [`AGAIN`] times as long as it took, and callers meanwhile
//! wait for the one in progress. However many callers there are, a layer is walked for a tenth of
//! the time.
//!
//! A project's usage covers its own sandboxes, drives and snapshots only. Sums over all projects and the free space of the disk
//! are visible to operators of the host only.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::db::{Owner, Page, Tombstones};
use crate::engine::Result;
use crate::engine::snapshots::StorageUsage;
use crate::model::{LayerId, MemoryId, Name, Quarantine, Sandbox};

/// For how many times as long as it took a measurement is used.
const AGAIN: u32 = 10;

/// What takes space: of one project, or of all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpaceReport {
    /// What is known of the host; absent for a project.
    pub host: Option<HostSpace>,
    /// Sealed layers of sandboxes.
    pub snapshots: u64,
    /// Sealed layers of drives.
    pub drives: u64,
    /// Memory of machines: of snapshots that have it, and of all projects together of templates.
    pub memory: u64,
    /// What is kept aside by the guard.
    pub quarantine: u64,
    /// What sessions under way have written so far.
    pub open: u64,
    /// Records and logs of commands.
    pub commands: u64,
    /// What lies in the trash, and is free when its grace period is over or space is needed. It is in no other sum.
    pub trash: u64,
}

/// What all projects share.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostSpace {
    /// The size of the filesystem.
    pub total: u64,
    /// What is free on it.
    pub free: u64,
    /// Layers of images.
    pub images: u64,
}

/// What was measured last.
#[derive(Debug, Default)]
pub(in crate::engine) struct Measurements {
    /// What open layers took.
    open: Mutex<HashMap<LayerId, Arc<tokio::sync::Mutex<Option<Measured>>>>>,
    /// What each project has in quarantine, read from the records of all.
    quarantined: tokio::sync::Mutex<Option<(Measured, HashMap<Name, u64>)>>,
}

#[derive(Debug, Clone, Copy)]
struct Measured {
    bytes: u64,
    at: Instant,
    took: Duration,
}

impl Measured {
    fn is_fresh(&self) -> bool {
        self.at.elapsed() < self.took * AGAIN
    }
}

impl StorageUsage {
    pub(in crate::engine) fn sealed_of_all(&self) -> Result<SpaceReport> {
        let (free, total) = self.store.free_space()?;
        let totals = self.references.counts().totals();
        Ok(SpaceReport {
            host: Some(HostSpace { total, free, images: totals.images }),
            snapshots: totals.bytes.saturating_sub(totals.images + totals.drives),
            drives: totals.drives,
            memory: totals.memory,
            trash: totals.trash,
            ..SpaceReport::default()
        })
    }

    pub(in crate::engine) async fn sealed_of(&self, project: &Name) -> Result<SpaceReport> {
        let owner = Owner::Project(project);
        let snapshots = self.db.snapshots(owner, Tombstones::Without, &Page::all()).await?.items;
        let drives = self.db.drives(Some(project), None, &Page::all()).await?.items;
        let of_drives: HashSet<&LayerId> = drives.iter().flat_map(|drive| &drive.layers).collect();
        let layers: HashSet<&LayerId> = snapshots.iter().flat_map(|one| &one.layers).collect();
        let memory: HashSet<&MemoryId> = snapshots.iter().flat_map(|one| &one.memory).collect();
        let counts = self.references.counts();
        Ok(SpaceReport {
            snapshots: counts.own_bytes(layers.difference(&of_drives).copied()),
            drives: counts.own_bytes(of_drives.iter().copied()),
            memory: counts.own_memory(memory.into_iter()),
            ..SpaceReport::default()
        })
    }

    /// What is in quarantine: of a project, or of all.
    pub(in crate::engine) async fn quarantined(&self, project: Option<&Name>) -> Result<u64> {
        let mut last = self.measured.quarantined.lock().await;
        let fresh = last.as_ref().is_some_and(|(measured, _)| measured.is_fresh());
        if !fresh {
            let at = Instant::now();
            let mut of = HashMap::<Name, u64>::new();
            for one in self.store.scan::<Quarantine>().await?.good {
                *of.entry(one.project.clone()).or_default() += one.bytes();
            }
            let measured =
                Measured { bytes: of.values().sum(), at: Instant::now(), took: at.elapsed() };
            *last = Some((measured, of));
        }
        Ok(last.as_ref().map_or(0, |(all, of)| match project {
            Some(project) => of.get(project).copied().unwrap_or(0),
            None => all.bytes,
        }))
    }

    /// What the sessions under way have written.
    pub(in crate::engine) async fn open_bytes(&self, ours: impl Fn(&Name) -> bool) -> Result<u64> {
        let (mut bytes, mut alive) = (0, HashSet::new());
        for live in self.turns.all_live() {
            let sandbox = live.sandbox();
            let drives = sandbox.mounted().iter().map(|mounted| &mounted.layer);
            for open in sandbox.open_layer().into_iter().chain(drives) {
                alive.insert(open.clone());
                if ours(&sandbox.project) {
                    bytes += self.measure_open(open).await?;
                }
            }
        }
        self.measured.open.lock().retain(|layer, _| alive.contains(layer));
        Ok(bytes)
    }

    /// What the session of a sandbox has written, if that is found out within `patience`. The
    /// measurement continues otherwise, and the next caller gets its result.
    pub(in crate::engine) async fn open_bytes_of(
        &self,
        sandbox: &Sandbox,
        patience: Duration,
    ) -> Option<u64> {
        let open = sandbox.open_layer()?;
        tokio::time::timeout(patience, self.measure_open(open)).await.ok()?.ok()
    }

    async fn measure_open(&self, open: &LayerId) -> Result<u64> {
        let last = Arc::clone(self.measured.open.lock().entry(open.clone()).or_default());
        let mut last = last.lock().await;
        if let Some(measured) = last.filter(Measured::is_fresh) {
            return Ok(measured.bytes);
        }
        let at = Instant::now();
        let bytes = self.store.usage_of_open(open).await?.bytes;
        *last = Some(Measured { bytes, at: Instant::now(), took: at.elapsed() });
        Ok(bytes)
    }
}
