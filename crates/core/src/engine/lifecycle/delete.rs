//! Deletes a sandbox in any state.
//!
//! The manifest says `deleted` first, and what is to become of its snapshots, so that a daemon that
//! dies on the way finishes it as it was begun. Snapshots that another sandbox stands on stay; the
//! rest go with it, or all stay if that was asked for: each then says so itself before the sandbox
//! goes. Drives are detached and keep what was written to them. Its directory goes to the trash, with copies of the
//! manifests of its snapshots, and can be restored from there (`trash`).
//!
//! *What was written to a drive is not the sandbox's to lose.* On a machine with disks of its own it has to be taken out of
//! them first: by the machine while it lives, by another boot when it does not (`export_by_rescue_boot`). If neither works the
//! sandbox is not deleted. It is `failed`, with the reason, keeps all it had, and the caller gets
//! an error: the delete can be tried again, or forced, which gives up what could not be had and
//! says which drives that is true of. For want of room alone it stays `deleted`, and is tried again
//! by housekeeping: room is made sooner or later. That it was forced is on record with `deleted`,
//! as all about it is.

use std::sync::Arc;
use std::time::Duration;

use crate::db::{Owner, Page, Tombstones, Unless};
use crate::engine::error::error_chain;
use crate::engine::lifecycle::Lifecycle;
use crate::engine::running::freeze_guard::freeze_filesystems;
use crate::engine::running::live::RunningSandbox;
use crate::engine::running::turns::Slot;
use crate::engine::{Delete, Deleted, Error, ErrorKind, Result};
use crate::failpoint;
use crate::model::{
    Change, CommandEnd, Deletion, MachineKey, MountMode, Name, OnDelete, Sandbox, SnapshotId, now,
};
use crate::store::Durability;

impl Lifecycle {
    /// Removes the sandbox in its turn.
    pub(in crate::engine) async fn delete_sandbox(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        mut sandbox: Sandbox,
        wish: Delete,
    ) -> Result<Deleted> {
        let Delete { snapshots: on_delete, force: forced, expired, .. } = wish;
        sandbox.transition(Change::Delete(Deletion { on_delete, forced, expired }))?;
        self.records.record(&mut sandbox, Durability::Soon).await?;
        failpoint::pass("erase.recorded");
        let live = slot.live();
        if let Some(live) = &live {
            live.close();
            live.session_ends();
        }
        slot.set_live(None);
        self.save_drives(live.as_deref(), &sandbox).await;
        // A driver this host does not have any more has nothing running here either.
        if let Ok(driver) = self.context.driver(&sandbox.config.driver) {
            driver.stop(&MachineKey::from(&sandbox.id)).await?;
        }
        failpoint::pass("erase.down");
        if let Some(live) = live {
            // What becomes of its commands is written before its directory goes, not after.
            live.commands_recorded(Duration::from_secs(2)).await;
        }
        let drives_lost = self.rescue_drives(&mut sandbox).await?;
        if let Err(error) = self.sessions.commands_lost(&sandbox.id, CommandEnd::SessionEnded).await
        {
            tracing::warn!(sandbox = %sandbox.name, error = error_chain(&error), "commands of a deleted sandbox were not marked as ended; callers may wait for them");
        }
        // What was written to drives is theirs. One that cannot be freed now is freed when the sandbox is
        // gone, by housekeeping or by the next who comes for it.
        match self.guard_drives(&sandbox).await {
            // The values to look for are no longer known, and a sandbox must be deletable all the
            // same.
            Err(error @ (Error::NoSecret(_) | Error::Sealed { .. })) => {
                tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "what a deleted sandbox wrote to drives is kept without a search for secrets");
            }
            looked => looked?,
        }
        if let Err(error) = self.storage.drives.detach(&sandbox).await {
            tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "drives of a deleted sandbox are not detached yet; housekeeping will retry");
        }
        let written = [sandbox.open_layer(), sandbox.unsealed()].into_iter().flatten().cloned();
        self.references.discard_when_synced(written);
        self.machines.release_uids(sandbox.uids());
        let snapshots_kept = self.release_snapshots(&sandbox).await?;
        failpoint::pass("erase.snapshots");
        self.context.catalog.remove(&sandbox).await?;
        self.references.counts().drop_sandbox(&sandbox.id);
        self.storage.compaction.chains.forget(&sandbox.id);
        failpoint::pass("erase.done");
        self.storage.trash.put_in_trash(&sandbox.id, wish.at_once).await;
        Ok(Deleted { snapshots_kept, drives_lost })
    }

    /// Whether all that a sandbox has is in a snapshot.
    pub(in crate::engine) async fn has_only(
        &self,
        slot: &Slot,
        sandbox: &Sandbox,
        snapshot: &SnapshotId,
    ) -> Result<bool> {
        if sandbox.current.as_ref() != Some(snapshot) {
            return Ok(false);
        }
        match slot.live() {
            None => Ok(sandbox.open_layer().is_none()),
            // Only a stop shows what a machine wrote to its disk.
            Some(live) if live.driver.disk().is_some() => Ok(false),
            Some(live) => match live.sandbox().open_layer() {
                Some(open) => Ok(self.store.is_untouched(open).await?),
                None => Ok(true),
            },
        }
    }

    /// Has a machine that lives hand over what it wrote to drives.
    async fn save_drives(&self, live: Option<&RunningSandbox>, sandbox: &Sandbox) {
        let Some(live) = live.filter(|live| live.driver.disk().is_some()) else { return };
        if sandbox.mounted().is_empty() {
            return;
        }
        let handed_over = async {
            live.guest().await?.quiesce(self.context.settings.grace).await?;
            self.machines.hand_over(live, sandbox, false).await
        };
        if let Err(error) = handed_over.await {
            tracing::warn!(sandbox = %sandbox.name, error = error_chain(&error), "a VM did not export what it wrote to drives");
            // What is in its cache and not on its disks would be lost.
            freeze_filesystems(live, sandbox).await;
        }
    }

    /// Takes what was written to drives out of the disks of a machine that is gone. Answers with the drives of which that was
    /// given up, if the delete is forced; otherwise the sandbox is not deleted.
    async fn rescue_drives(&self, sandbox: &mut Sandbox) -> Result<Vec<Name>> {
        let Err(error) = self.machines.export_by_rescue_boot(sandbox, false).await else {
            return Ok(Vec::new());
        };
        let mut lost = Vec::new();
        let mut layers = Vec::new();
        // What was taken out before the rest failed is not lost.
        for (part, layer) in self.machines.on_disks(sandbox, false)? {
            let mounted = usize::try_from(part).ok().and_then(|n| sandbox.mounted().get(n - 1));
            if let Some(mounted) = mounted
                && let Some(drive) = self.db.drive_by_id(&mounted.drive).await?
            {
                lost.push(drive.name);
            }
            layers.push(layer);
        }
        // Temporary reasons: nothing is given up for them, even with force.
        let passes = matches!(
            error,
            Error::ShuttingDown | Error::Store(crate::store::StoreError::ShuttingDown)
        );
        if passes || error.kind() == ErrorKind::Exhausted {
            return Err(error);
        }
        if sandbox.deletion().is_some_and(|deletion| deletion.forced) {
            tracing::error!(sandbox = %sandbox.name, drives = ?lost, error = error_chain(&error), "a sandbox was deleted by force: what it wrote to drives is lost");
            for layer in layers {
                self.store.clear_disk(&layer).await?;
            }
            return Ok(lost);
        }
        let reason = error_chain(&error);
        let error = Error::DrivesUnsaved { name: sandbox.name.clone(), drives: lost, reason };
        tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "a sandbox was not deleted");
        sandbox.transition(Change::Broke { why: error_chain(&error), guarded: Vec::new() })?;
        self.records.record(sandbox, Durability::Synced).await?;
        Err(error)
    }

    /// Looks at what the last session wrote to drives: their files outlive the sandbox.
    async fn guard_drives(&self, sandbox: &Sandbox) -> Result<()> {
        let session = match &sandbox.session {
            Some(id) if !sandbox.mounted().is_empty() => self.db.session(id).await?,
            _ => return Ok(()),
        };
        for mounted in sandbox.mounted().iter().filter(|one| one.mode == MountMode::ReadWrite) {
            self.storage.guard.guard_drive(sandbox, session.clone(), mounted).await?;
        }
        Ok(())
    }

    async fn release_snapshots(&self, sandbox: &Sandbox) -> Result<Vec<SnapshotId>> {
        let mut kept = Vec::new();
        let (owner, page) = (Owner::Sandbox(&sandbox.id), Page::all());
        let snapshots = self.db.snapshots(owner, Tombstones::Without, &page).await?.items;
        // From before the first of them goes, what they name stays for the trash.
        let mut held = self.store.kept_for_trash(&sandbox.id).await?;
        held.extend(snapshots.iter().cloned());
        self.storage.trash.hold_trashed(sandbox, &held);
        let on_delete = sandbox.deletion().unwrap_or_default().on_delete;
        for snapshot in snapshots {
            match self.context.catalog.keep_for_trash(&sandbox.id, &snapshot).await {
                // Making room must not need room: it goes, and cannot be restored.
                Err(error) if !error.is_no_room() => return Err(error.into()),
                _ => {}
            }
            failpoint::pass("erase.kept");
            let stays = match on_delete {
                OnDelete::Drop => {
                    let unless = Unless::HeldByOther(&sandbox.id);
                    if self
                        .storage
                        .snapshots
                        .delete_record(&snapshot.id, unless, Durability::Soon)
                        .await?
                    {
                        false
                    } else {
                        // It says itself that its sandbox was deleted: without that, it would be a sign of a lost one.
                        let mark = self.storage.snapshots.change_snapshot(
                            &snapshot.id,
                            Durability::Synced,
                            |snapshot| {
                                snapshot.sandbox_deleted_at = Some(now());
                            },
                        );
                        mark.await?.is_some()
                    }
                }
                OnDelete::Keep => {
                    let mark = self.storage.snapshots.change_snapshot(
                        &snapshot.id,
                        Durability::Synced,
                        |snapshot| {
                            snapshot.outlives = true;
                        },
                    );
                    mark.await?.is_some()
                }
            };
            failpoint::pass("erase.snapshot");
            if stays {
                kept.push(snapshot.id);
            }
        }
        Ok(kept)
    }
}
