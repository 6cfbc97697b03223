//! The trash: deleted sandboxes that can be restored.
//!
//! A deleted sandbox lies in the trash for a grace period ([`Settings::trash_grace`](crate::engine::Settings)), with copies of the manifests of
//! the snapshots that went with it, and can be restored whole. It holds all layers that those
//! reference. Its name is free at once. Unreferenced layers stay there as long.
//!
//! *When something is deleted for good.* When this daemon itself has seen it in the trash for the
//! whole grace period, on the monotonic clock. So neither a wall clock that jumps nor a restart
//! shortens it. Earlier only if new work would be refused for lack of space: then the oldest is
//! deleted first.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;

use crate::catalog::Record;
use crate::engine::error::error_chain;
use crate::engine::snapshots::Trash;
use crate::engine::{Error, Result};
use crate::model::{Change, Deletion, LayerId, MemoryId, Name, Sandbox, SandboxId, Timestamp, now};
use crate::store::{Durability, Trashed, TrashedSandbox};

/// How long somebody who needs space waits for the deletion of one thing.
const FREED_WITHIN: Duration = Duration::from_secs(20);

/// A sandbox in the trash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrashItem {
    /// Its id.
    pub id: SandboxId,
    /// The project it belonged to.
    pub project: Name,
    /// What it was called.
    pub name: Name,
    /// When it was deleted.
    pub deleted_at: Timestamp,
    /// Whether it expired, without a request.
    pub expired: bool,
    /// How many snapshots went with it.
    pub snapshots: usize,
    /// What deleting it for good would free.
    pub bytes: u64,
    /// How long it stays at least, unless space is needed.
    pub stays_for: Duration,
}

/// What is known of the trash.
#[derive(Debug, Default)]
pub(in crate::engine) struct TrashContents {
    /// Since when this daemon has seen things lie there, on the monotonic clock.
    seen: Mutex<HashMap<PathBuf, Duration>>,
    sandboxes: Mutex<HashMap<PathBuf, (Trashed, TrashedSandbox)>>,
    /// Serializes changes of the trash.
    change: tokio::sync::Mutex<()>,
}

/// Which sandbox in the trash somebody means who asked for one that is not there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InTrash {
    /// When it was deleted.
    pub at: Timestamp,
    /// Whether it expired.
    pub expired: bool,
}

impl Trash {
    /// The sandboxes in the trash, the latest first; of every project if none is named.
    pub(in crate::engine) fn items(&self, project: Option<&Name>) -> Vec<TrashItem> {
        let mut items: Vec<TrashItem> = self
            .contents
            .sandboxes
            .lock()
            .values()
            .filter(|(_, kept)| project.is_none_or(|project| kept.sandbox.project == *project))
            .map(|(trashed, kept)| TrashItem {
                id: kept.sandbox.id.clone(),
                project: kept.sandbox.project.clone(),
                name: kept.sandbox.name.clone(),
                deleted_at: trashed.at,
                expired: expired(&kept.sandbox),
                snapshots: kept.snapshots.len(),
                bytes: self.references.counts().freed_by_trashed(&kept.sandbox.id),
                stays_for: self.stays_for(trashed),
            })
            .collect();
        items.sort_by(|a, b| (b.deleted_at, &b.id).cmp(&(a.deleted_at, &a.id)));
        items
    }

    /// The records of a project's forks in the trash, each with whether it expired.
    pub(in crate::engine) fn forks(&self, project: &Name) -> Vec<(Sandbox, bool)> {
        let sandboxes = self.contents.sandboxes.lock();
        let kept = sandboxes.values().map(|(_, kept)| &kept.sandbox);
        let forks = kept.filter(|one| one.project == *project && one.forked_from.is_some());
        forks.map(|one| (one.clone(), expired(one))).collect()
    }

    /// Restores a sandbox, in its turn. `which` is what the caller asked for.
    pub(in crate::engine) async fn restore(
        &self,
        id: &SandboxId,
        which: String,
        name: Option<Name>,
    ) -> Result<Sandbox> {
        let _change = self.contents.change.lock().await;
        let found = {
            let sandboxes = self.contents.sandboxes.lock();
            sandboxes.values().find(|(_, kept)| kept.sandbox.id == *id).cloned()
        };
        let (trashed, kept) = found.ok_or(Error::NotInTrash(which))?;
        self.restore_sandbox(&trashed, kept, name).await
    }

    /// Deletes everything in the trash for good, of one project or of all. Answers with the number of sandboxes.
    pub(in crate::engine) async fn empty(&self, project: Option<&Name>) -> Result<usize> {
        let _change = self.contents.change.lock().await;
        let mut count = 0;
        for trashed in self.store.trash().await? {
            let owner = {
                let sandboxes = self.contents.sandboxes.lock();
                sandboxes.get(&trashed.path).map(|(_, kept)| kept.sandbox.project.clone())
            };
            if project.is_some_and(|project| owner.as_ref() != Some(project)) {
                continue;
            }
            count += usize::from(trashed.sandbox().is_some());
            self.delete_for_good(&trashed).await?;
        }
        Ok(count)
    }

    fn stays_for(&self, trashed: &Trashed) -> Duration {
        let now = self.context.settings.clock.monotonic();
        let seen = self.contents.seen.lock().get(&trashed.path).copied().unwrap_or(now);
        self.context.settings.trash_grace.saturating_sub(now.saturating_sub(seen))
    }

    /// Reads the trash: sandboxes in it hold what they name.
    pub(in crate::engine) async fn read_trash(&self) -> Result<()> {
        let _change = self.contents.change.lock().await;
        for trashed in self.store.trash().await? {
            self.enter_trashed(&trashed).await;
        }
        Ok(())
    }

    async fn enter_trashed(&self, trashed: &Trashed) {
        let monotonic = self.context.settings.clock.monotonic();
        self.contents.seen.lock().entry(trashed.path.clone()).or_insert(monotonic);
        if trashed.sandbox().is_none() {
            self.count_trashed(trashed).await;
            return;
        }
        if self.contents.sandboxes.lock().contains_key(&trashed.path) {
            return;
        }
        match self.store.trashed_sandbox(trashed).await {
            Ok(kept) => {
                self.hold_trashed(&kept.sandbox, &kept.snapshots);
                let entry = (trashed.clone(), kept);
                self.contents.sandboxes.lock().insert(trashed.path.clone(), entry);
            }
            Err(error) => {
                tracing::warn!(path = %trashed.path.display(), error = error_chain(&error), "a sandbox in the trash cannot be restored");
            }
        }
    }

    /// Enters what a layer in the trash weighs.
    async fn count_trashed(&self, trashed: &Trashed) {
        let known = trashed.layer().is_some_and(|id| self.references.counts().knows(&id));
        if !known && let Ok((layer, memory)) = self.store.layer_in_trash(trashed).await {
            layer.iter().for_each(|layer| self.references.count_layer(layer));
            memory.iter().for_each(|layer| self.references.count_memory_layer(layer));
        }
        self.references.counts().set_trashed(&trashed.id, true);
    }

    /// Notes that a sandbox was put in the trash; or deletes it for good, if it is not to lie there.
    pub(in crate::engine) async fn put_in_trash(&self, id: &SandboxId, at_once: bool) {
        let _change = self.contents.change.lock().await;
        let outcome = async {
            let all = self.store.trash().await?;
            let Some(trashed) = all.into_iter().rev().find(|one| one.id == id.as_str()) else {
                self.references.counts().drop_trashed(id);
                return Ok(());
            };
            self.enter_trashed(&trashed).await;
            match at_once || self.context.settings.trash_grace.is_zero() {
                true => self.delete_for_good(&trashed).await,
                false => Ok(()),
            }
        };
        if let Err(error) = outcome.await {
            tracing::warn!(sandbox = %id, error = error_chain(&error), "an item in the trash was not deleted");
        }
    }

    /// Holds what a sandbox needs that is in the trash, or about to be.
    pub(in crate::engine) fn hold_trashed(
        &self,
        sandbox: &Sandbox,
        snapshots: &[crate::model::Snapshot],
    ) {
        let mut layers: Vec<LayerId> = sandbox.image_layers.clone();
        let mut memory: Vec<MemoryId> = Vec::new();
        for snapshot in snapshots {
            layers.extend(snapshot.layers.iter().cloned());
            memory.extend(snapshot.memory.iter().cloned());
        }
        self.references.counts().hold_trashed(&sandbox.id, &layers, &memory);
    }

    /// Which sandbox of that name was deleted last.
    pub(in crate::engine) fn in_trash(&self, project: &Name, name: &Name) -> Option<InTrash> {
        let sandboxes = self.contents.sandboxes.lock();
        let fits = sandboxes
            .values()
            .filter(|(_, kept)| kept.sandbox.project == *project && kept.sandbox.name == *name);
        let latest = fits.max_by_key(|(trashed, _)| trashed.at)?;
        Some(InTrash { at: latest.0.at, expired: expired(&latest.1.sandbox) })
    }

    async fn restore_sandbox(
        &self,
        trashed: &Trashed,
        kept: TrashedSandbox,
        name: Option<Name>,
    ) -> Result<Sandbox> {
        let TrashedSandbox { mut sandbox, snapshots } = kept;
        self.tenancy
            .projects
            .get(&sandbox.project)
            .ok_or_else(|| Error::NoProject(sandbox.project.clone()))?;
        sandbox.name = name.unwrap_or(sandbox.name);
        sandbox.used_at = now();
        sandbox.updated_at = now();
        let memory = snapshots
            .iter()
            .any(|one| Some(&one.id) == sandbox.current.as_ref() && one.has_memory());
        // A power cut may have taken the record that it was deleted, but not that it is in the trash.
        sandbox.transition(Change::Delete(Deletion::default()))?;
        sandbox.transition(Change::Restored { memory })?;
        if let Some(lost) = self.records.lost_names.get(&sandbox.project, &sandbox.name) {
            return Err(Error::Lost(lost));
        }
        if !self.context.catalog.claim(&sandbox).await? {
            return Err(Error::NameTaken(sandbox.name));
        }
        let restored = async {
            // First what it stands on, then the sandbox. A daemon that dies in between finds snapshots of a sandbox that is in the trash,
            // and drops them again.
            for snapshot in &snapshots {
                let _record = self.snapshots.snapshot_locks.lock(&snapshot.id).await;
                let snapshot = crate::model::Snapshot {
                    outlives: false,
                    sandbox_deleted_at: None,
                    used_at: Some(now()),
                    ..snapshot.clone()
                };
                self.context.catalog.put(Record::Snapshot(&snapshot), Durability::Synced).await?;
                self.references.counts().hold_snapshot(&snapshot);
            }
            if let Some(current) = &sandbox.current
                && self.db.snapshot(current).await?.is_none()
            {
                sandbox.lose_snapshot();
            }
            self.context.catalog.restore(trashed, &mut sandbox).await?;
            Ok::<_, Error>(())
        };
        if let Err(error) = restored.await {
            self.context.catalog.release(&sandbox.id).await?;
            return Err(error);
        }
        self.context.events.restored(&sandbox);
        {
            let mut counts = self.references.counts();
            counts.hold_sandbox(&sandbox);
            counts.drop_trashed(&sandbox.id);
        }
        self.forget_trashed(trashed);
        self.store.forget_kept(&sandbox.id).await?;
        Ok(sandbox)
    }

    fn forget_trashed(&self, trashed: &Trashed) {
        self.contents.seen.lock().remove(&trashed.path);
        self.contents.sandboxes.lock().remove(&trashed.path);
    }

    /// Deletes what has been in the trash for the grace period, and the oldest before that while the disk is
    /// short of room.
    pub(in crate::engine) async fn sweep_trash(&self) -> Result<()> {
        let _change = self.contents.change.lock().await;
        let all = self.store.trash().await?;
        self.contents.seen.lock().retain(|path, _| all.iter().any(|trashed| trashed.path == *path));
        for trashed in all {
            self.enter_trashed(&trashed).await;
            if !self.stays_for(&trashed).is_zero() && !self.store.is_short_of_room()? {
                continue;
            }
            if let Err(error) = self.delete_for_good(&trashed).await {
                tracing::error!(
                    id = trashed.id,
                    error = error_chain(&error),
                    "an item in the trash was not deleted"
                );
            }
            if self.store.is_short_of_room()? {
                // Whether the next must go as well shows when this one is gone.
                let _ = tokio::time::timeout(FREED_WITHIN, self.store.deletions_done()).await;
            }
        }
        Ok(())
    }

    /// Deletes something in the trash, and the layers that only it named.
    async fn delete_for_good(&self, trashed: &Trashed) -> Result<()> {
        if self.snapshots.unsynced_tombstones.swap(false, Ordering::SeqCst)
            && let Err(error) = self.store.sync().await
        {
            // After a power cut a tombstone may be a snapshot again, and must not be one without its layers.
            self.snapshots.unsynced_tombstones.store(true, Ordering::SeqCst);
            return Err(error.into());
        }
        let Some(id) = trashed.sandbox() else {
            if self.references.counts().names(&trashed.id) {
                return self.references.restore_from_trash(vec![trashed.id.clone()]).await;
            }
            self.store.purge(trashed).await?;
            self.forget_trashed(trashed);
            self.forget_layer(&trashed.id);
            return Ok(());
        };
        self.guard.drop_quarantines(&id).await?;
        self.store.purge(trashed).await?;
        self.forget_trashed(trashed);
        let (layers, memory) = self.references.counts().drop_trashed(&id);
        let ids = layers.iter().map(LayerId::as_str).chain(memory.iter().map(MemoryId::as_str));
        let ids: Vec<String> = ids.map(str::to_owned).collect();
        // They were in the trash with it, so they do not lie there once more.
        for gone in self.references.discard_layers(ids).await? {
            self.store.purge(&gone).await?;
            self.forget_layer(&gone.id);
        }
        tracing::info!(sandbox = %id, "a sandbox was deleted from the trash for good");
        Ok(())
    }

    fn forget_layer(&self, id: &str) {
        let mut counts = self.references.counts();
        if let Ok(id) = id.parse::<LayerId>() {
            counts.remove(&[id]);
        } else if let Ok(id) = id.parse::<MemoryId>() {
            counts.remove_memory(&[id]);
        }
    }

    /// Frees the oldest thing in the trash for who needs space now. False when there is nothing.
    pub(in crate::engine) async fn free_space_early(&self) -> bool {
        if self.references.has_unnamed() && self.references.sync_and_discard().await.is_ok() {
            return tokio::time::timeout(FREED_WITHIN, self.store.deletions_done()).await.is_ok();
        }
        let Ok(_change) = tokio::time::timeout(FREED_WITHIN, self.contents.change.lock()).await
        else {
            return false;
        };
        let oldest = match self.store.trash().await {
            Ok(all) => all.into_iter().next(),
            Err(_) => None,
        };
        let Some(oldest) = oldest else { return false };
        tracing::warn!(
            id = oldest.id,
            "an item in the trash is deleted early: its space is needed"
        );
        if let Err(error) = self.delete_for_good(&oldest).await {
            tracing::error!(
                id = oldest.id,
                error = error_chain(&error),
                "an item in the trash was not deleted"
            );
            return false;
        }
        tokio::time::timeout(FREED_WITHIN, self.store.deletions_done()).await.is_ok()
    }
}

/// Whether it was deleted because it expired.
fn expired(sandbox: &Sandbox) -> bool {
    sandbox.deletion().is_some_and(|deletion| deletion.expired)
}
