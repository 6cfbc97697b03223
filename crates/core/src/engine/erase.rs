//! Deleting a sandbox, from whatever state it is in.
//!
//! The manifest says `deleted` first, so that a daemon that dies on the way finishes it. Snapshots
//! that another sandbox stands on stay; the rest go with it.

use std::sync::Arc;
use std::time::Duration;

use super::lifecycle::{Effect, Phase};
use super::slot::Slot;
use super::{Deleted, Inner, Result};
use crate::db::Page;
use crate::failpoint;
use crate::model::{MachineKey, Sandbox, SnapshotId};
use crate::store::Durability;

impl Inner {
    /// Removes the sandbox in its turn.
    pub(super) async fn erase(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        mut sandbox: Sandbox,
    ) -> Result<Deleted> {
        sandbox.phase = Phase::Deleted;
        sandbox.debt = Some(Effect::Erase);
        self.record(&mut sandbox, Durability::Soon).await?;
        failpoint::pass("erase.recorded");
        let live = slot.live();
        if let Some(live) = &live {
            live.close();
        }
        slot.set_live(None);
        // A driver this host does not have any more has nothing running here either.
        if let Ok(driver) = self.driver(&sandbox.config.driver) {
            driver.stop(&MachineKey::from(&sandbox.id)).await?;
        }
        failpoint::pass("erase.down");
        if let Some(live) = live {
            // What becomes of its commands is written before its directory goes, not after.
            live.commands_settled(Duration::from_secs(2)).await;
        }
        for layer in [sandbox.open_layer.take(), sandbox.unsealed.take()].into_iter().flatten() {
            self.store.discard(&layer).await?;
        }
        self.give_uids(sandbox.uids.take());
        let snapshots_kept = self.drop_snapshots_of(&sandbox).await?;
        failpoint::pass("erase.snapshots");
        self.store.remove_sandbox_dir(&sandbox.id).await?;
        self.db.remove_sandbox(&sandbox.id).await?;
        self.books().drop_sandbox(&sandbox.id);
        failpoint::pass("erase.done");
        Ok(Deleted { snapshots_kept })
    }

    async fn drop_snapshots_of(&self, sandbox: &Sandbox) -> Result<Vec<SnapshotId>> {
        let mut kept = Vec::new();
        for snapshot in self.db.snapshots(None, Some(&sandbox.id), &Page::all()).await?.items {
            if !self.forget_snapshot(&snapshot.id, Some(&sandbox.id)).await? {
                kept.push(snapshot.id);
            }
        }
        Ok(kept)
    }
}
