//! Retention, expiry and deletion of snapshots.
//!
//! - A snapshot that goes leaves a *tombstone*: its record without layers, for lists to show for
//!   [`REMEMBERED`]. The index decides whether it may be dropped, in one statement, so that no
//!   sandbox comes to stand on it meanwhile; then the tombstone is written over the manifest.
//! - *Retention* never drops what some sandbox stands on: an expired snapshot strands no sandbox.
//!   Only [`Engine::delete_snapshot`](crate::engine::Engine::delete_snapshot) with `force` does.
//!   The tombstone comes first, then every sandbox that stood on it is marked in its turn
//!   (`missing`); after a crash in between, the next daemon marks the rest. A start that read the
//!   snapshot before holds its layers by then, and any later one is refused.
//! - Every change of an existing record (its use, its label, its layers' number, its end) holds the
//!   record's lock, so that none of them brings back a deleted one.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use crate::catalog::{Record, RecordKey, SnapshotDrop};
use crate::db::Unless;
use crate::engine::error::error_chain;
use crate::engine::snapshots::Snapshots;
use crate::engine::{Error, Result};
use crate::model::{
    AuditRecord, Expiry, Name, Retention, Sandbox, SandboxId, Snapshot, SnapshotId, Span,
    Timestamp, now,
};
use crate::store::Durability;

/// How long a tombstone stays.
const REMEMBERED: jiff::SignedDuration = jiff::SignedDuration::from_hours(30 * 24);
/// How many stay: a sandbox that stops every minute must not make starting the daemon slow.
const MOST: u32 = 10_000;
/// How many snapshots next to the boundary are looked at. A checkpoint moves it by one.
const NEXT: u32 = 8;

/// Where a snapshot is among those of its sandbox.
type SnapshotOrder = (u64, Timestamp);

fn place(snapshot: &Snapshot) -> SnapshotOrder {
    (snapshot.generation, snapshot.created_at)
}

/// Sandboxes all of whose snapshots were looked at, and under which retention. It is in memory: the next daemon looks once more.
#[derive(Debug, Default)]
pub(in crate::engine) struct Retained(
    parking_lot::Mutex<HashMap<SandboxId, Retention>>,
    /// Sandboxes with snapshots that are kept for a review, which are to be checked again.
    parking_lot::Mutex<HashSet<SandboxId>>,
);

/// The users of snapshots that would otherwise expire. The runs are above this layer.
pub(in crate::engine) trait PinsSnapshots: Send + Sync {
    /// Whether a snapshot is needed.
    fn is_pinned(&self, snapshot: &SnapshotId) -> bool;
}

impl Retained {
    fn is(&self, id: &SandboxId, retention: Retention) -> bool {
        !self.1.lock().remove(id) && self.0.lock().get(id) == Some(&retention)
    }

    fn look_again(&self, id: &SandboxId) {
        self.1.lock().insert(id.clone());
    }

    fn note(&self, id: &SandboxId, retention: Retention) {
        self.0.lock().insert(id.clone(), retention);
    }

    /// Has all of them looked at the next time.
    pub(in crate::engine) fn forget(&self, id: &SandboxId) {
        self.0.lock().remove(id);
    }
}

impl Snapshots {
    /// A snapshot to start from.
    pub(in crate::engine) async fn find_snapshot(
        &self,
        project: &Name,
        id: &SnapshotId,
    ) -> Result<Snapshot> {
        let found = self.db.snapshot_record(id).await?;
        let found = found.filter(|snapshot| snapshot.project == *project);
        let found = found.ok_or_else(|| Error::NoSnapshot(id.clone()))?;
        if found.deleted_at.is_some() {
            return Err(Error::SnapshotDeleted(id.clone()));
        }
        Ok(found)
    }

    /// Drops a snapshot; the result is whether it was removed. What is not synced here is synced
    /// before its layers are collected.
    pub(in crate::engine) async fn delete_record(
        &self,
        id: &SnapshotId,
        unless: Unless<'_>,
        durability: Durability,
    ) -> Result<bool> {
        let _record = self.snapshot_locks.lock(id).await;
        let Some(snapshot) = self.db.snapshot(id).await? else { return Ok(false) };
        let tombstone = Snapshot {
            layers: Vec::new(),
            memory: Vec::new(),
            commands: Vec::new(),
            deleted_at: Some(now()),
            ..snapshot.clone()
        };
        match self
            .context
            .catalog
            .replace_by_tombstone(&snapshot, &tombstone, unless, durability)
            .await?
        {
            SnapshotDrop::Not => return Ok(false),
            SnapshotDrop::Tombstone => {}
            SnapshotDrop::Removed => {
                self.references.counts().drop_snapshot(id);
                self.context.events.snapshot_deleted(&snapshot);
                return Ok(true);
            }
        }
        if durability == Durability::Soon {
            self.unsynced_tombstones.store(true, Ordering::SeqCst);
        }
        {
            let mut counts = self.references.counts();
            counts.drop_snapshot(id);
            counts.known_manifests.mark_snapshot_deleted(id);
        }
        self.context.events.snapshot_deleted(&snapshot);
        Ok(true)
    }

    /// Changes the record of a snapshot, unless it was buried; the answer is what it is now.
    pub(in crate::engine) async fn change_snapshot(
        &self,
        id: &SnapshotId,
        durability: Durability,
        change: impl FnOnce(&mut Snapshot),
    ) -> Result<Option<Snapshot>> {
        let _record = self.snapshot_locks.lock(id).await;
        let Some(before) = self.db.snapshot(id).await? else { return Ok(None) };
        let mut after = before.clone();
        change(&mut after);
        if after != before {
            self.context.catalog.put(Record::Snapshot(&after), durability).await?;
            let left = |one: &Snapshot| (one.outlives, one.sandbox_deleted_at);
            if after.layers != before.layers
                || after.memory != before.memory
                || left(&after) != left(&before)
            {
                self.references.counts().hold_snapshot(&after);
            }
        }
        Ok(Some(after))
    }

    /// Notes that something starts from a snapshot, from when its expiry is counted. A failure to
    /// write the note does not stop the start.
    pub(in crate::engine) async fn note_use(&self, id: Option<&SnapshotId>) {
        let Some(id) = id else { return };
        let noted = self.change_snapshot(id, Durability::Soon, |snapshot| {
            snapshot.used_at = Some(now());
        });
        if let Err(error) = noted.await {
            tracing::warn!(snapshot = %id, error = error_chain(&error), "the use of a snapshot was not recorded; it may expire earlier");
        }
    }

    /// Marks a sandbox, in its turn, whose snapshot was deleted.
    pub(in crate::engine) async fn tell_snapshot_deleted(
        self: &Arc<Self>,
        holder: Sandbox,
        gone: &SnapshotId,
    ) -> Result<()> {
        let (id, gone) = (holder.id, gone.clone());
        let this = Arc::clone(self);
        self.turns
            .turn(id.clone(), move |slot| async move {
                let Some(mut sandbox) = this.db.sandbox_by_id(&id).await? else { return Ok(()) };
                if sandbox.current.as_ref() != Some(&gone) {
                    return Ok(());
                }
                sandbox.lose_snapshot();
                this.records.record(&mut sandbox, Durability::Synced).await?;
                if let Some(live) = slot.live() {
                    live.set_sandbox(sandbox);
                }
                Ok(())
            })
            .await
    }

    /// [`retain`](Self::retain) where it is an afterthought.
    pub(in crate::engine) async fn try_to_retain(&self, sandbox: &Sandbox) {
        if let Err(error) = self.retain(sandbox).await {
            tracing::warn!(sandbox = %sandbox.name, error = error_chain(&error), "the snapshot retention of a sandbox was not applied");
        }
    }

    /// Drops a snapshot whose time is up, or that is not among those that are kept.
    async fn expire_record(&self, snapshot: &Snapshot) -> Result<bool> {
        let pins = self.pins.get().and_then(Weak::upgrade);
        if pins.is_some_and(|pins| pins.is_pinned(&snapshot.id)) {
            self.retained.look_again(&snapshot.sandbox);
            return Ok(false);
        }
        let gone = self.delete_record(&snapshot.id, Unless::Held, Durability::Soon).await?;
        if gone {
            let target = Some(format!("snapshot/{}", snapshot.id));
            let record = AuditRecord::by_system(Some(&snapshot.project), "snapshot.expire", target);
            self.context.audit.note(record.with("sandbox", snapshot.sandbox_name.as_str()));
        }
        Ok(gone)
    }

    /// Applies a sandbox's retention to its snapshots, in its turn.
    ///
    /// Once all were checked, only those are checked again that can have changed since: the few next to the boundary between kept and
    /// not kept, and those that have expired. So it takes as long with ten snapshots as with ten thousand.
    pub(in crate::engine) async fn retain(&self, sandbox: &Sandbox) -> Result<()> {
        let retention = sandbox.config.retention;
        let keep = retention.keep_last.map(|count| count as usize);
        let known = self.retained.is(&sandbox.id, retention);
        let boundary = match keep {
            Some(keep) if known => {
                self.retain_beyond(sandbox, keep, keep.saturating_sub(1), NEXT).await?
            }
            Some(keep) => {
                self.retained.forget(&sandbox.id);
                self.retain_beyond(sandbox, keep, 0, u32::MAX).await?
            }
            None if known => None,
            None => {
                // What an earlier retention kept is kept no more.
                self.retained.forget(&sandbox.id);
                self.retain_beyond(sandbox, usize::MAX, 0, u32::MAX).await?;
                None
            }
        };
        self.retained.note(&sandbox.id, retention);
        let Some(time) = self.context.expiry_time() else { return Ok(()) };
        for snapshot in self.db.expired_snapshots_of(&sandbox.id, time).await? {
            let buried = self.expire_record(&snapshot).await?;
            let evicted = boundary.is_some_and(|boundary| place(&snapshot) < boundary);
            if buried && keep.is_some() && !evicted {
                // Those behind it move up.
                self.retained.forget(&sandbox.id);
            }
        }
        Ok(())
    }

    /// Applies retention to as many as `limit` snapshots, from place `first` on, where the newest has place 0. Answers with the last that
    /// is kept, if it was among them.
    async fn retain_beyond(
        &self,
        sandbox: &Sandbox,
        keep: usize,
        first: usize,
        limit: u32,
    ) -> Result<Option<SnapshotOrder>> {
        let retention = sandbox.config.retention;
        let from = u32::try_from(first).unwrap_or(u32::MAX);
        let snapshots = self.db.newest_snapshots(&sandbox.id, from, limit).await?;
        let mut boundary = None;
        for (index, snapshot) in snapshots.iter().enumerate() {
            let evicted = first + index >= keep;
            if !evicted {
                boundary = Some(place(snapshot));
            }
            let kept = retention.kept_expires.filter(|_| retention.keep_last.is_some() && !evicted);
            if snapshot.kept != kept {
                self.change_snapshot(&snapshot.id, Durability::Soon, |snapshot| {
                    snapshot.kept = kept;
                })
                .await?;
            }
            if evicted && retention.delete_evicted {
                self.expire_record(snapshot).await?;
            }
        }
        Ok(boundary)
    }

    /// Drops expired snapshots and those of deleted sandboxes that no sandbox stands on any more,
    /// and expired tombstones.
    pub(in crate::engine) async fn retain_all(&self) -> Result<()> {
        let time = self.context.expiry_time();
        if let Some(time) = time {
            for snapshot in self.db.expired_snapshots(time).await? {
                if self.expire_record(&snapshot).await? {
                    self.retained.forget(&snapshot.sandbox);
                }
            }
        }
        let left = self.references.counts().known_manifests.left_behind();
        for id in left {
            self.delete_record(&id, Unless::Held, Durability::Soon).await?;
        }
        let before = time.and_then(|time| time.checked_sub(REMEMBERED).ok());
        let before = before.unwrap_or(Timestamp::UNIX_EPOCH);
        for id in self.db.old_tombstones(before, MOST).await? {
            self.context.catalog.delete(RecordKey::Snapshot(&id)).await?;
            self.references.counts().known_manifests.remove_snapshot(&id);
        }
        Ok(())
    }

    /// Whether a sandbox still names a snapshot that was deleted, and is not marked yet.
    pub(in crate::engine) async fn lost_snapshot(&self, sandbox: &Sandbox) -> Result<bool> {
        let Some(current) = &sandbox.current else { return Ok(false) };
        let record = self.db.snapshot_record(current).await?;
        Ok(record.is_some_and(|snapshot| snapshot.deleted_at.is_some()))
    }

    /// Refuses a sandbox whose snapshot was deleted under it.
    pub(in crate::engine) async fn require_snapshot(&self, sandbox: &Sandbox) -> Result<()> {
        let gone = match (&sandbox.missing, &sandbox.current) {
            (Some(missing), None) => missing,
            (_, Some(current)) if self.lost_snapshot(sandbox).await? => current,
            _ => return Ok(()),
        };
        Err(Error::SnapshotGone { name: sandbox.name.clone(), snapshot: gone.clone() })
    }
}

impl Sandbox {
    /// What it stands on was deleted.
    pub(in crate::engine) fn lose_snapshot(&mut self) {
        self.missing = self.current.take();
    }
}

/// Checks the expiry in a request for a snapshot.
pub(in crate::engine) fn checked_expiry(given: Option<Option<Span>>) -> Result<Expiry> {
    if given.flatten().is_some_and(|span| span < Span::seconds(60)) {
        return Err(Error::invalid("expires", "at least 60s"));
    }
    Ok(given.into())
}
