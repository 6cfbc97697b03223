//! Garbage collection: layers that are not referenced any more are moved to the trash.
//!
//! [`References`](crate::engine::references::References) knows who references a layer.
//!
//! A collection takes a layer when all of this is true, and moves it to the trash:
//!
//! - no manifest in memory references it, and nothing holds it;
//! - it is older than 30 seconds;
//! - everything that could name it was read, see `evidence`;
//! - no manifest on disk has its id in its text, whatever memory says.

use std::sync::Arc;

use crate::engine::Result;
use crate::engine::context::damage::DamageKind;
use crate::engine::error::error_chain;
use crate::engine::snapshots::Collector;
use crate::model::{LayerId, MemoryId, Template, now};
use crate::store::Unheld;

/// What is being written just now is younger than this and may not be on record yet.
const YOUNG: jiff::SignedDuration = jiff::SignedDuration::from_secs(30);
/// Collections that were asked for within this time are one.
const SOON: std::time::Duration = std::time::Duration::from_millis(200);
/// How long a collection that was asked for waits after the last one: this many times as long as that one took, but at most
/// [`LONGEST_REST`]. Housekeeping collects independently of it.
const REST: u32 = 20;
const LONGEST_REST: std::time::Duration = std::time::Duration::from_secs(30);

impl Collector {
    /// How long to wait before a collection that is asked for now: it reads what every manifest on disk names, and must not do that
    /// all the time.
    fn until_next_collection(&self) -> std::time::Duration {
        let Some((ended, took)) = *self.last_collection.lock() else { return SOON };
        let rest = took.saturating_mul(REST).min(LONGEST_REST);
        rest.saturating_sub(ended.elapsed()).max(SOON)
    }

    /// Collects a moment later, once for all who ask meanwhile.
    pub(in crate::engine) fn collect_soon(self: &Arc<Self>) {
        if self.collect_asked.swap(true, std::sync::atomic::Ordering::SeqCst) {
            return;
        }
        let this = Arc::clone(self);
        self.context.tasks.spawn(async move {
            if !this.context.tasks.sleep(this.until_next_collection()).await {
                return;
            }
            this.collect_asked.store(false, std::sync::atomic::Ordering::SeqCst);
            if let Err(error) = this.collect().await {
                tracing::warn!(error = error_chain(&error), "garbage collection failed");
            }
        });
    }

    /// Moves the layers that nothing holds to the trash, and deletes those that have been in it
    /// long enough.
    pub(in crate::engine) async fn collect(self: &Arc<Self>) -> Result<()> {
        if self.context.is_recovering() {
            // What a session that broke off wrote is being sealed. Recovery collects at its end.
            return Ok(());
        }
        let _one = self.collecting.lock().await;
        let began = std::time::Instant::now();
        // Asked before anything is read: a pull that ends in between is in this or in what is read.
        let pending = self.store.pending();
        self.survey().await?;
        let begun_before = now().checked_sub(YOUNG).unwrap_or_else(|_| now());
        let (held, held_memory) = {
            let counts = self.references.counts();
            (counts.held(), counts.held_memory())
        };
        self.store.named(held.iter().map(LayerId::as_str));
        self.store.named(held_memory.iter().map(MemoryId::as_str));
        let unheld = self.store.unheld(&held, begun_before).await?;
        let mut going: Vec<String> =
            unheld.into_iter().map(|Unheld { id, .. }| id.to_string()).collect();
        if self.drop_stale_templates().await? {
            let held = self.references.counts().held_memory();
            let memory = self.store.unheld_memory(&held, begun_before).await?;
            going.extend(memory.into_iter().map(|(id, _)| id.to_string()));
        }
        going.retain(|id| !pending.contains(id));
        let gone = self.references.discard_layers(going).await?;
        if !gone.is_empty() {
            tracing::info!(layers = gone.len(), "unreferenced layers were moved to the trash");
        }
        let swept = self.trash.sweep_trash().await;
        *self.last_collection.lock() = Some((std::time::Instant::now(), began.elapsed()));
        swept
    }

    /// Drops the records of templates that were unused for long, and enters the others. False when
    /// one cannot be read: then it is unknown which memory templates hold.
    async fn drop_stale_templates(&self) -> Result<bool> {
        let kept;
        let damaged = if self.context.expiry_time().is_some() {
            let (collected, damaged) = self.store.drop_stale_templates().await?;
            kept = collected.kept;
            damaged
        } else {
            let scan = self.store.scan::<Template>().await?;
            kept = scan.good;
            scan.damaged
        };
        let known = damaged.is_empty();
        for one in damaged {
            self.context.report_damage(
                DamageKind::UnreadableManifest,
                self.store.below(&one.path),
                one.reason,
                "memory layers are not collected until it reads; removing it loses only a little speed",
            );
        }
        if known {
            self.references.counts().hold_templates(&kept);
        }
        Ok(known)
    }
}
