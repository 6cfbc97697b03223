//! Checkpoints: a snapshot of a session that continues.
//!
//! Two ways. When no process but the agent is alive, the root is *exchanged*: a fresh layer is put
//! on top, the one written so far is sealed under it, and nothing is copied however much it holds.
//! When processes are alive they may have files open for writing, so they are frozen, what changed
//! since the last checkpoint is *copied*, and they resume.
//!
//! Of a machine that keeps its memory it is neither: memory and disk are captured together (`pause`).
//!
//! While the root is exchanged the manifest names both layers: the new one as `open_layer`, the one
//! under it as `unsealed`. A daemon that dies in between need not know how far it got: sealing both,
//! in that order, is right either way, because the new one is empty until the exchange.

use std::sync::Arc;
use std::time::Duration;

use crate::driver::{DriverError, Relayer};
use crate::engine::lifecycle::Lifecycle;
use crate::engine::lifecycle::stop::SnapshotOptions;
use crate::engine::machine::capabilities::pausing;
use crate::engine::running::freeze_guard::FrozenProcesses;
use crate::engine::running::live::RunningSandbox;
use crate::engine::snapshots::seal_guard::GuardScan;
use crate::engine::{Error, Result};
use crate::failpoint;
use crate::model::{LayerId, Sandbox, Snapshot, SnapshotId, SnapshotKind};
use crate::store::search::Writers;
use crate::store::{Durability, MeasuredLayer};

impl Lifecycle {
    /// Takes a snapshot of a running sandbox in its turn.
    pub(in crate::engine) async fn take_checkpoint(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        sandbox: &mut Sandbox,
        kind: SnapshotKind,
        wanted: SnapshotOptions,
    ) -> Result<Snapshot> {
        let open =
            sandbox.open_layer().cloned().ok_or_else(|| Error::NotRunning(sandbox.name.clone()))?;
        if pausing(&*live.driver).is_some() {
            let snapshot = self.checkpoint_memory(live, sandbox, kind, wanted).await?;
            self.sessions.saved_in_guest(live);
            return Ok(snapshot);
        }
        self.integrity.syncs.refuse_doubt(sandbox, true, false).await?;
        self.store.wait_for_room_to_seal().await?;
        let relayer = live.driver.relayer().ok_or_else(|| {
            Error::invalid(
                "driver",
                format!("{} cannot take a snapshot of a running sandbox", live.driver.name()),
            )
        })?;
        let copied = live.copied.lock().await.as_ref().map(|copy| copy.layers().to_vec());
        self.storage.compaction.bound_session(sandbox, copied.as_deref()).await?;
        let snapshot = self.checkpoint_layers(live, relayer, sandbox, &open, kind, wanted).await?;
        self.storage.compaction.after_snapshot(sandbox, &snapshot);
        Ok(snapshot)
    }

    /// Takes a snapshot of what is in the layers of a session.
    async fn checkpoint_layers(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        relayer: &dyn Relayer,
        sandbox: &mut Sandbox,
        open: &LayerId,
        kind: SnapshotKind,
        mut wanted: SnapshotOptions,
    ) -> Result<Snapshot> {
        if self.store.is_untouched(open).await? {
            let hold = self.store.hold();
            let layers = self
                .storage
                .compaction
                .compacted_chain(&hold, &sandbox.id, sandbox.open_chain())
                .await;
            return self
                .acknowledge(
                    live,
                    sandbox,
                    SnapshotId::of_layer(&LayerId::fresh()),
                    layers,
                    kind,
                    wanted,
                )
                .await;
        }
        let _seal = live.seal.begin();
        let mut looked = GuardScan::default();
        wanted.findings =
            self.storage.guard.guard_checkpoint(live, sandbox, Writers::Busy, &mut looked).await?;
        let exchanged =
            self.exchange(live, relayer, sandbox, kind, wanted.clone(), &mut looked).await?;
        if let Some(snapshot) = exchanged {
            return Ok(snapshot);
        }
        self.copy(live, sandbox, kind, wanted, looked).await
    }

    /// Exchanges the root; `None` when processes are alive.
    async fn exchange(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        relayer: &dyn Relayer,
        sandbox: &mut Sandbox,
        kind: SnapshotKind,
        mut wanted: SnapshotOptions,
        looked: &mut GuardScan,
    ) -> Result<Option<Snapshot>> {
        let Some(open) = sandbox.open_layer().cloned() else { return Ok(None) };
        let open = &open;
        let Ok(_gate) = tokio::time::timeout(Duration::from_millis(200), live.gate.write()).await
        else {
            return Ok(None);
        };
        live.rouse().await;
        if !relayer.alone(&live.key).await? {
            return Ok(None);
        }
        let measured = live.measured_ahead(sandbox);
        wanted.findings.extend(
            self.storage.guard.guard_checkpoint(live, sandbox, Writers::None, looked).await?,
        );
        let before = sandbox.clone();
        // The new root need not stand on layers that were made one since the last was mounted.
        let hold = self.store.hold();
        let below =
            self.storage.compaction.compacted_chain(&hold, &sandbox.id, sandbox.open_chain()).await;
        let chain: Vec<LayerId> = std::iter::once(open.clone()).chain(below).collect();
        let fresh = self.store.begin(&chain).await?;
        self.integrity.limits.limit_layer(&fresh, sandbox.config.resources.disk.0).await;
        if let Some(session) = sandbox.open_session_mut() {
            session.layer = fresh.clone();
            session.chain = chain.clone();
            session.unsealed = Some(open.clone());
        }
        self.records.record(sandbox, Durability::Soon).await?;
        failpoint::pass("checkpoint.recorded");
        if let Err(error) = relayer.swap_root(&live.key, &self.store.root(&fresh, &chain)).await {
            if !matches!(error, DriverError::NotAlone { .. } | DriverError::NoRoom { .. }) {
                // It may or may not stand on the new root. The record names both layers, which is right
                // either way; the caller ends the session on it.
                live.set_sandbox(sandbox.clone());
                return Err(error.into());
            }
            // Nothing was changed.
            sandbox.revert_to(before);
            self.records.record(sandbox, Durability::Soon).await?;
            live.set_sandbox(sandbox.clone());
            self.references.discard_when_synced([fresh]);
            return match error {
                DriverError::NotAlone { .. } => Ok(None),
                error => Err(error.into()),
            };
        }
        live.set_sandbox(sandbox.clone());
        live.changes.leave_layer(before.open_chain());
        live.changes.begin_layer(&fresh, false);
        if live.changes.wants_look() {
            self.sessions.look_soon(live);
        }
        failpoint::pass("checkpoint.swapped");
        *live.copied.lock().await = None;
        let measured = measured.filter(|_| wanted.findings.is_empty());
        self.seal_under(sandbox, open, measured).await?;
        if let Some(session) = sandbox.open_session_mut() {
            session.unsealed = None;
        }
        failpoint::pass("checkpoint.sealed");
        let snapshot = self
            .acknowledge(live, sandbox, SnapshotId::of_layer(open), chain, kind, wanted)
            .await?;
        Ok(Some(snapshot))
    }

    async fn copy(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        sandbox: &mut Sandbox,
        kind: SnapshotKind,
        mut wanted: SnapshotOptions,
        mut looked: GuardScan,
    ) -> Result<Snapshot> {
        let open = &sandbox
            .open_layer()
            .cloned()
            .ok_or_else(|| Error::NotRunning(sandbox.name.clone()))?;
        let mut copied = live.copied.lock().await;
        if copied.is_none() {
            // A checkpoint of an earlier daemon is as good as one of ours.
            *copied = self.store.live_copy(open, sandbox.open_chain()).await;
        }
        // Snapshots that named earlier copies may be gone: existing copies are held from here on.
        let hold = self.store.hold();
        if let Some(copy) = copied.as_mut() {
            let short =
                self.storage.compaction.compacted_chain(&hold, &sandbox.id, copy.layers()).await;
            copy.set_layers(short);
        }
        if let Some(copied) = copied.as_ref() {
            hold.layers(copied.layers()).await;
        }
        let first = copied.is_none();
        let below =
            self.storage.compaction.compacted_chain(&hold, &sandbox.id, sandbox.open_chain()).await;
        if first && let Some((layer, ahead)) = self.store.copy_ahead(open, &below).await? {
            self.references.count_layer(&layer);
            *copied = Some(ahead);
        }
        live.rouse().await;
        let frozen = FrozenProcesses::freeze(&self.context, live).await?;
        failpoint::pass("checkpoint.frozen");
        let outcome = match self
            .storage
            .guard
            .guard_checkpoint(live, sandbox, Writers::None, &mut looked)
            .await
        {
            Ok(findings) => {
                wanted.findings.extend(findings);
                self.store.copy_live(open, &below, copied.as_ref()).await.map_err(Error::from)
            }
            Err(error) => Err(error),
        };
        frozen.thaw().await?;
        failpoint::pass("checkpoint.copied");
        if first && outcome.is_err() {
            // What was copied ahead may hold what was found since. Nothing is to stand on it.
            *copied = None;
        }
        let (layer, copy) = outcome?;
        let id = layer.as_ref().map_or_else(LayerId::fresh, |layer| layer.id.clone());
        if let Some(layer) = &layer {
            self.references.count_layer(layer);
        }
        let layers = copy.layers().to_vec();
        *copied = Some(copy);
        drop(copied);
        live.changes.saved();
        self.acknowledge(live, sandbox, SnapshotId::of_layer(&id), layers, kind, wanted).await
    }

    /// Puts the snapshot on record, unless the sandbox stands on the very same files already.
    async fn acknowledge(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        sandbox: &mut Sandbox,
        id: SnapshotId,
        layers: Vec<LayerId>,
        kind: SnapshotKind,
        wanted: SnapshotOptions,
    ) -> Result<Snapshot> {
        let current = self
            .records
            .current_snapshot(sandbox)
            .await?
            .filter(|current| current.layers == layers);
        let snapshot = match current {
            Some(current) if wanted.fits(&current) => {
                self.records.record(sandbox, Durability::Synced).await?;
                current
            }
            _ => {
                let snapshot = self.new_snapshot(sandbox, id, layers, kind, wanted);
                self.commit(sandbox, &snapshot).await?;
                snapshot
            }
        };
        live.set_sandbox(sandbox.clone());
        Ok(snapshot)
    }

    async fn seal_under(
        &self,
        sandbox: &Sandbox,
        open: &LayerId,
        measured: Option<MeasuredLayer>,
    ) -> Result<()> {
        // Excluded paths stay in this layer: the continuing session still sees them.
        let options = crate::store::SealOptions {
            exclude: Vec::new(),
            measured,
            ..crate::store::SealOptions::default()
        };
        match self.store.seal(open, &options).await? {
            Some(layer) => self.references.count_layer(&layer),
            None => {
                tracing::error!(sandbox = %sandbox.name, layer = %open, "a sealed layer is empty although it had changes");
            }
        }
        Ok(())
    }
}
