//! What was deleted and can be had back.
//!
//! A deleted sandbox lies in the trash for a grace period ([`Settings::trash_grace`](super::Settings)), with copies of the manifests of
//! the snapshots that went with it, and can be restored whole. It holds all layers those name. Its name is free at once. Layers that nobody
//! names any more lie there as long.
//!
//! *When something goes for good.* When this daemon itself has seen it lie in the trash for the whole grace period, on the monotonic clock.
//! So neither a wall clock that jumps nor a restart shortens it. Earlier only if new work would be refused for want of space: then the oldest
//! goes first.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::boot::chain_of;
use super::slot::lock;
use super::{Engine, Error, Inner, Result};
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
    /// Whether it expired, and nobody asked for it.
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
pub(super) struct Trash {
    /// Since when this daemon has seen things lie there, on the monotonic clock.
    seen: Mutex<HashMap<PathBuf, Duration>>,
    sandboxes: Mutex<HashMap<PathBuf, (Trashed, TrashedSandbox)>>,
    /// One at a time changes what is there.
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

impl Engine {
    /// Lists the sandboxes in the trash, the latest first; of every project if none is named.
    #[must_use]
    pub fn trash(&self, project: Option<&Name>) -> Vec<TrashItem> {
        let inner = &self.inner;
        let mut items: Vec<TrashItem> = lock(&inner.trash.sandboxes)
            .values()
            .filter(|(_, kept)| project.is_none_or(|project| kept.sandbox.project == *project))
            .map(|(trashed, kept)| TrashItem {
                id: kept.sandbox.id.clone(),
                project: kept.sandbox.project.clone(),
                name: kept.sandbox.name.clone(),
                deleted_at: trashed.at,
                expired: expired(&kept.sandbox),
                snapshots: kept.snapshots.len(),
                bytes: inner.books().freed_by_trashed(&kept.sandbox.id),
                stays_for: inner.stays_for(trashed),
            })
            .collect();
        items.sort_by(|a, b| (b.deleted_at, &b.id).cmp(&(a.deleted_at, &a.id)));
        items
    }

    /// Brings a sandbox back from the trash, by its id or its name; of several of one name, the one that was deleted last. It is at rest
    /// then, and has the snapshots it had. It is called `name` if that is given.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NotInTrash`], or [`Error::NameTaken`] when there is a sandbox of that name by now.
    pub async fn restore(
        &self,
        project: &Name,
        which: &str,
        name: Option<Name>,
    ) -> Result<Sandbox> {
        let item = self.trash(Some(project)).into_iter();
        let item =
            item.into_iter().find(|item| item.id.as_str() == which || item.name.as_str() == which);
        let id = item.ok_or_else(|| Error::NotInTrash(which.to_owned()))?.id;
        let which = which.to_owned();
        let work = self.inner.turn(id.clone(), move |inner, _slot| async move {
            let _change = inner.trash.change.lock().await;
            let found = lock(&inner.trash.sandboxes)
                .values()
                .find(|(_, kept)| kept.sandbox.id == id)
                .cloned();
            let (trashed, kept) = found.ok_or(Error::NotInTrash(which))?;
            inner.restore_sandbox(&trashed, kept, name).await
        });
        work.await
    }

    /// Deletes everything in the trash for good, of one project or of all. Layers that nobody names are nobody's in particular and go with
    /// all. Says how many sandboxes that were; the space is free a little later.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when something could not be deleted.
    pub async fn empty_trash(&self, project: Option<&Name>) -> Result<usize> {
        let inner = &self.inner;
        let _change = inner.trash.change.lock().await;
        let mut count = 0;
        for trashed in inner.store.trash().await? {
            let owner = lock(&inner.trash.sandboxes)
                .get(&trashed.path)
                .map(|(_, kept)| kept.sandbox.project.clone());
            if project.is_some_and(|project| owner.as_ref() != Some(project)) {
                continue;
            }
            count += usize::from(trashed.sandbox().is_some());
            inner.delete_for_good(&trashed).await?;
        }
        Ok(count)
    }
}

impl Inner {
    fn stays_for(&self, trashed: &Trashed) -> Duration {
        let now = self.settings.clock.monotonic();
        let seen = lock(&self.trash.seen).get(&trashed.path).copied().unwrap_or(now);
        self.settings.trash_grace.saturating_sub(now.saturating_sub(seen))
    }

    /// Reads the trash: sandboxes in it hold what they name.
    pub(super) async fn read_trash(&self) -> Result<()> {
        let _change = self.trash.change.lock().await;
        for trashed in self.store.trash().await? {
            self.enter_trashed(&trashed).await;
        }
        Ok(())
    }

    async fn enter_trashed(&self, trashed: &Trashed) {
        let monotonic = self.settings.clock.monotonic();
        lock(&self.trash.seen).entry(trashed.path.clone()).or_insert(monotonic);
        if trashed.sandbox().is_none() {
            self.weigh_trashed(trashed).await;
            return;
        }
        if lock(&self.trash.sandboxes).contains_key(&trashed.path) {
            return;
        }
        match self.store.trashed_sandbox(trashed).await {
            Ok(kept) => {
                self.hold_trashed(&kept.sandbox, &kept.snapshots);
                let entry = (trashed.clone(), kept);
                lock(&self.trash.sandboxes).insert(trashed.path.clone(), entry);
            }
            Err(error) => {
                tracing::warn!(path = %trashed.path.display(), error = chain_of(&error), "cannot be restored from the trash");
            }
        }
    }

    /// Enters what a layer in the trash weighs.
    async fn weigh_trashed(&self, trashed: &Trashed) {
        let known = trashed.layer().is_some_and(|id| self.books().knows(&id));
        if !known && let Ok((layer, memory)) = self.store.layer_in_trash(trashed).await {
            layer.iter().for_each(|layer| self.book(layer));
            memory.iter().for_each(|layer| self.book_memory(layer));
        }
        self.books().set_trashed(&trashed.id, true);
    }

    /// Notes that a sandbox was put in the trash; or deletes it for good, if it is not to lie there.
    pub(super) async fn put_in_trash(&self, id: &SandboxId, at_once: bool) {
        let _change = self.trash.change.lock().await;
        let outcome = async {
            let all = self.store.trash().await?;
            let Some(trashed) = all.into_iter().rev().find(|one| one.id == id.as_str()) else {
                self.books().drop_trashed(id);
                return Ok(());
            };
            self.enter_trashed(&trashed).await;
            match at_once || self.settings.trash_grace.is_zero() {
                true => self.delete_for_good(&trashed).await,
                false => Ok(()),
            }
        };
        if let Err(error) = outcome.await {
            tracing::warn!(sandbox = %id, error = chain_of(&error), "is left in the trash");
        }
    }

    /// Holds what a sandbox needs that is in the trash, or about to be.
    pub(super) fn hold_trashed(&self, sandbox: &Sandbox, snapshots: &[crate::model::Snapshot]) {
        let mut layers: Vec<LayerId> = sandbox.image_layers.clone();
        let mut memory: Vec<MemoryId> = Vec::new();
        for snapshot in snapshots {
            layers.extend(snapshot.layers.iter().cloned());
            memory.extend(snapshot.memory.iter().cloned());
        }
        self.books().hold_trashed(&sandbox.id, &layers, &memory);
    }

    /// Which sandbox of that name was deleted last.
    pub(super) fn in_trash(&self, project: &Name, name: &Name) -> Option<InTrash> {
        let sandboxes = lock(&self.trash.sandboxes);
        let fits = sandboxes
            .values()
            .filter(|(_, kept)| kept.sandbox.project == *project && kept.sandbox.name == *name);
        let latest = fits.max_by_key(|(trashed, _)| trashed.at)?;
        Some(InTrash { at: latest.0.at, expired: expired(&latest.1.sandbox) })
    }

    async fn restore_sandbox(
        self: &Arc<Self>,
        trashed: &Trashed,
        kept: TrashedSandbox,
        name: Option<Name>,
    ) -> Result<Sandbox> {
        let TrashedSandbox { mut sandbox, snapshots } = kept;
        self.tenants
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
        if let Some(lost) = self.lost_names.get(&sandbox.project, &sandbox.name) {
            return Err(Error::Lost(lost));
        }
        if !self.db.claim(&sandbox).await? {
            return Err(Error::NameTaken(sandbox.name));
        }
        let restored = async {
            // First what it stands on, then the sandbox. A daemon that dies in between finds snapshots of a sandbox that is in the trash,
            // and drops them again.
            for snapshot in &snapshots {
                let _record = self.snapshot_locks.lock(&snapshot.id).await;
                let snapshot = crate::model::Snapshot {
                    outlives: false,
                    sandbox_deleted_at: None,
                    used_at: Some(now()),
                    ..snapshot.clone()
                };
                self.store.write(&snapshot, Durability::Synced).await?;
                self.db.put_snapshot(&snapshot).await?;
                self.books().hold_snapshot(&snapshot);
            }
            if let Some(current) = &sandbox.current
                && self.db.snapshot(current).await?.is_none()
            {
                sandbox.lose_ground();
            }
            self.store.restore_sandbox(trashed, &sandbox).await?;
            Ok::<_, Error>(())
        };
        if let Err(error) = restored.await {
            self.db.remove_sandbox(&sandbox.id).await?;
            return Err(error);
        }
        self.db.put_sandbox(&sandbox).await?;
        self.events.restored(&sandbox);
        {
            let mut books = self.books();
            books.hold_sandbox(&sandbox);
            books.drop_trashed(&sandbox.id);
        }
        self.forget_trashed(trashed);
        self.reindex_history(&sandbox.id).await?;
        self.store.forget_kept(&sandbox.id).await?;
        Ok(sandbox)
    }

    fn forget_trashed(&self, trashed: &Trashed) {
        lock(&self.trash.seen).remove(&trashed.path);
        lock(&self.trash.sandboxes).remove(&trashed.path);
    }

    /// Deletes what has been in the trash for the grace period, and the oldest before that while the disk is
    /// short of room.
    pub(super) async fn sweep_trash(&self) -> Result<()> {
        let _change = self.trash.change.lock().await;
        let all = self.store.trash().await?;
        lock(&self.trash.seen).retain(|path, _| all.iter().any(|trashed| trashed.path == *path));
        for trashed in all {
            self.enter_trashed(&trashed).await;
            if !self.stays_for(&trashed).is_zero() && !self.store.is_short_of_room()? {
                continue;
            }
            if let Err(error) = self.delete_for_good(&trashed).await {
                tracing::error!(id = trashed.id, error = chain_of(&error), "is left in the trash");
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
        if self.unsynced_tombstones.swap(false, Ordering::SeqCst)
            && let Err(error) = self.store.sync().await
        {
            // After a power cut a tombstone may be a snapshot again, and must not be one without its layers.
            self.unsynced_tombstones.store(true, Ordering::SeqCst);
            return Err(error.into());
        }
        let Some(id) = trashed.sandbox() else {
            if self.books().names(&trashed.id) {
                return self.untrash(vec![trashed.id.clone()]).await;
            }
            self.store.purge(trashed).await?;
            self.forget_trashed(trashed);
            self.strike_out(&trashed.id);
            return Ok(());
        };
        self.drop_quarantines(&id).await?;
        self.store.purge(trashed).await?;
        self.forget_trashed(trashed);
        let (layers, memory) = self.books().drop_trashed(&id);
        let ids = layers.iter().map(LayerId::as_str).chain(memory.iter().map(MemoryId::as_str));
        let ids: Vec<String> = ids.map(str::to_owned).collect();
        // They were in the trash with it, so they do not lie there once more.
        for gone in self.discard_layers(ids).await? {
            self.store.purge(&gone).await?;
            self.strike_out(&gone.id);
        }
        tracing::info!(sandbox = %id, "deleted from the trash");
        Ok(())
    }

    fn strike_out(&self, id: &str) {
        let mut books = self.books();
        if let Ok(id) = id.parse::<LayerId>() {
            books.remove(&[id]);
        } else if let Ok(id) = id.parse::<MemoryId>() {
            books.remove_memory(&[id]);
        }
    }

    /// Frees the oldest thing in the trash for who needs space now. False when there is nothing.
    pub(super) async fn free_some(&self) -> bool {
        if self.has_unnamed() && self.sync_and_discard().await.is_ok() {
            return tokio::time::timeout(FREED_WITHIN, self.store.deletions_done()).await.is_ok();
        }
        let Ok(_change) = tokio::time::timeout(FREED_WITHIN, self.trash.change.lock()).await else {
            return false;
        };
        let oldest = match self.store.trash().await {
            Ok(all) => all.into_iter().next(),
            Err(_) => None,
        };
        let Some(oldest) = oldest else { return false };
        tracing::warn!(id = oldest.id, "space is needed: it is deleted from the trash early");
        if let Err(error) = self.delete_for_good(&oldest).await {
            tracing::error!(id = oldest.id, error = chain_of(&error), "is left in the trash");
            return false;
        }
        tokio::time::timeout(FREED_WITHIN, self.store.deletions_done()).await.is_ok()
    }
}

/// Whether it was deleted because it expired.
fn expired(sandbox: &Sandbox) -> bool {
    sandbox.deletion().is_some_and(|deletion| deletion.expired)
}
