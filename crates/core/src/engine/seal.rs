//! Ending a session and keeping what it wrote.
//!
//! ```text
//! room?  ── no ──> the session goes on, the caller is told
//!   │ yes
//! record "stopping"  →  processes end  →  machine gone  →  layer sealed and synced
//!                                         →  snapshot manifest  →  sandbox manifest  →  answer
//! ```
//!
//! The sandbox's manifest is the commit point. A daemon that dies before it finds `stopping` and the
//! open layer, and comes this way again: sealing a sealed layer changes nothing, and the snapshot's
//! id follows from the layer's, so there is no second one.

use std::sync::Arc;
use std::time::Duration;

use super::boot::chain_of;
use super::lifecycle::{self, Effect, Phase, Report};
use super::live::Live;
use super::slot::{Slot, lock};
use super::{Error, Inner, Result, later};
use crate::driver::MachineUsage;
use crate::failpoint;
use crate::model::{
    FORMAT, LayerId, LayerKind, MachineKey, Sandbox, Session, SessionEnd, Snapshot, SnapshotId,
    SnapshotKind, now,
};
use crate::store::{Durability, SealOptions};

impl Inner {
    /// Ends the session under way, or what is left of one, in the sandbox's turn.
    ///
    /// Answers with the snapshot the sandbox now stands on.
    pub(super) async fn settle(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        sandbox: &mut Sandbox,
        kind: SnapshotKind,
        end: SessionEnd,
    ) -> Result<Option<Snapshot>> {
        let live = slot.live();
        let keep = sandbox.config.persistent || kind == SnapshotKind::BeforeRollback;
        if keep && live.is_some() && end != SessionEnd::Interrupted {
            // Before anything is touched: is there room for what sealing writes?
            self.store.check_room_to_seal()?;
        }
        if let Some(live) = &live {
            sandbox.validated = self.validate_before_stop(live).await.or(sandbox.validated.take());
        }
        // Whoever is touching the root gets to the end of it; nobody new comes in until it is down.
        let gate = match &live {
            Some(live) => tokio::time::timeout(self.settings.grace, live.gate.write()).await.ok(),
            None => None,
        };
        if end == SessionEnd::Idle && live.as_ref().is_some_and(|live| live.quiet_for().is_none()) {
            return Err(Error::SessionOver);
        }
        sandbox.phase = Phase::Stopping;
        sandbox.debt = Some(Effect::Seal);
        sandbox.used_at = now();
        self.record(sandbox, Durability::Soon).await?;
        failpoint::pass("seal.recorded");
        if let Some(live) = &live {
            live.close();
        }
        slot.set_live(None);
        let usage = self.power_down(live.as_deref(), sandbox).await;
        drop(gate);
        failpoint::pass("seal.down");
        let sealed = match usage {
            Ok(usage) => {
                self.seal_session(sandbox, keep, kind).await.map(|snapshot| (snapshot, usage))
            }
            Err(error) => Err(error),
        };
        match sealed {
            Ok((snapshot, usage)) => {
                self.session_over(live.as_deref(), sandbox, end, snapshot.as_ref(), usage).await?;
                failpoint::pass("seal.done");
                Ok(snapshot)
            }
            Err(error) => {
                (sandbox.phase, _) = lifecycle::report(Phase::Stopping, Report::Broke);
                sandbox.debt = None;
                sandbox.failure = Some(chain_of(&error));
                if let Err(error) = self.record(sandbox, Durability::Soon).await {
                    tracing::error!(sandbox = %sandbox.name, error = chain_of(&error), "a failed stop is not on record");
                }
                Err(error)
            }
        }
    }

    /// Ends all processes, politely first, and frees what the machine held.
    async fn power_down(&self, live: Option<&Live>, sandbox: &Sandbox) -> Result<MachineUsage> {
        if let Some(live) = live
            && let Ok(guest) = live.guest().await
            && guest.quiesce(self.settings.grace).await.is_ok()
        {
            live.commands_settled(Duration::from_secs(1)).await;
        }
        let driver = self.driver(&sandbox.config.driver)?;
        Ok(driver.stop(&MachineKey::from(&sandbox.id)).await?)
    }

    /// Seals and commits. Until that has succeeded `sandbox` still names its open layers, so that a
    /// failure on the way leaves them to be sealed again.
    async fn seal_session(
        &self,
        sandbox: &mut Sandbox,
        keep: bool,
        kind: SnapshotKind,
    ) -> Result<Option<Snapshot>> {
        let mut after = sandbox.clone();
        self.close_session(&mut after);
        let Some(open) = sandbox.open_layer.clone() else {
            self.record(&mut after, Durability::Synced).await?;
            *sandbox = after;
            return self.current_snapshot(sandbox).await;
        };
        let _space = self.space.read().await;
        let snapshot = if keep {
            self.keep_layers(sandbox, &mut after, &open, kind).await?
        } else {
            self.record(&mut after, Durability::Synced).await?;
            for layer in [Some(&open), sandbox.unsealed.as_ref()].into_iter().flatten() {
                self.store.discard(layer).await?;
            }
            self.current_snapshot(&after).await?
        };
        self.give_uids(sandbox.uids);
        *sandbox = after;
        Ok(snapshot)
    }

    async fn keep_layers(
        &self,
        sandbox: &Sandbox,
        after: &mut Sandbox,
        open: &LayerId,
        kind: SnapshotKind,
    ) -> Result<Option<Snapshot>> {
        let mut layers = sandbox.open_chain.clone();
        if let Some(under) = &sandbox.unsealed
            && self.seal_layer(under, sandbox).await?.is_none()
        {
            layers.retain(|layer| layer != under);
        }
        if let Some(layer) = self.seal_layer(open, sandbox).await? {
            layers.insert(0, layer);
        }
        failpoint::pass("seal.sealed");
        if let Some(current) = self.current_snapshot(after).await?
            && current.layers == layers
        {
            // Nothing was written: what it stood on is still what it stands on.
            self.record(after, Durability::Synced).await?;
            return Ok(Some(current));
        }
        let snapshot = self.new_snapshot(after, SnapshotId::of_layer(open), layers, kind, None);
        self.commit(after, &snapshot).await?;
        Ok(Some(snapshot))
    }

    async fn seal_layer(&self, layer: &LayerId, sandbox: &Sandbox) -> Result<Option<LayerId>> {
        let options = SealOptions {
            exclude: sandbox.config.exclude.clone(),
            kind: LayerKind::Session,
            ..SealOptions::default()
        };
        let sealed = self.store.seal(layer, &options).await?;
        if let Some(layer) = &sealed {
            self.book(layer);
        }
        Ok(sealed.map(|layer| layer.id))
    }

    /// The sandbox has no session any more, as far as its record goes.
    fn close_session(&self, sandbox: &mut Sandbox) {
        (sandbox.phase, _) = lifecycle::report(Phase::Stopping, Report::Down);
        sandbox.debt = None;
        sandbox.failure = None;
        sandbox.open_layer = None;
        sandbox.open_chain.clear();
        sandbox.unsealed = None;
        sandbox.uids = None;
        sandbox.used_at = now();
    }

    pub(super) fn new_snapshot(
        &self,
        sandbox: &Sandbox,
        id: SnapshotId,
        layers: Vec<LayerId>,
        kind: SnapshotKind,
        label: Option<String>,
    ) -> Snapshot {
        Snapshot {
            format: FORMAT,
            id,
            project: sandbox.project.clone(),
            sandbox: sandbox.id.clone(),
            sandbox_name: sandbox.name.clone(),
            session: sandbox.session.clone().unwrap_or_else(crate::model::SessionId::fresh),
            generation: sandbox.generation + 1,
            parent: sandbox.current.clone(),
            kind,
            label,
            layers,
            created_at: now(),
            expires_at: sandbox.config.retention.expires.and_then(later),
            image_config: sandbox.image_config.clone(),
        }
    }

    /// Acknowledges a snapshot: its manifest, then the sandbox's, both on stable storage.
    pub(super) async fn commit(&self, sandbox: &mut Sandbox, snapshot: &Snapshot) -> Result<()> {
        self.store.write(snapshot, Durability::Synced).await?;
        failpoint::pass("commit.snapshot");
        self.db.put_snapshot(snapshot).await?;
        self.books().hold_snapshot(snapshot);
        sandbox.current = Some(snapshot.id.clone());
        sandbox.generation = snapshot.generation;
        self.record(sandbox, Durability::Synced).await?;
        failpoint::pass("commit.sandbox");
        Ok(())
    }

    pub(super) async fn current_snapshot(&self, sandbox: &Sandbox) -> Result<Option<Snapshot>> {
        match &sandbox.current {
            Some(id) => Ok(self.db.snapshot(id).await?),
            None => Ok(None),
        }
    }

    async fn session_over(
        &self,
        live: Option<&Live>,
        sandbox: &Sandbox,
        end: SessionEnd,
        snapshot: Option<&Snapshot>,
        usage: MachineUsage,
    ) -> Result<()> {
        let recorded: Option<Session> = match (live, &sandbox.session) {
            (Some(live), _) => Some(live.session()),
            (None, Some(id)) => self.db.session(id).await?,
            (None, None) => None,
        };
        let Some(mut session) = recorded.filter(|session| session.ended_at.is_none()) else {
            return Ok(());
        };
        let ended = now();
        session.ended_at = Some(ended);
        session.end = Some(end);
        session.snapshot = snapshot.map(|snapshot| snapshot.id.clone());
        session.usage.active_cpu_ms = u64::try_from(usage.cpu.as_millis()).unwrap_or(u64::MAX);
        session.usage.memory_peak = usage.memory_peak;
        session.usage.wall_ms =
            u64::try_from(ended.as_millisecond() - session.started_at.as_millisecond())
                .unwrap_or(0);
        self.keep_session(&session).await?;
        if live.is_none() {
            self.commands_lost(&sandbox.id, &session.id).await?;
        }
        Ok(())
    }
}

impl Live {
    /// Waits until the outcome of every command is on record, but not for long.
    pub(super) async fn commands_settled(&self, patience: Duration) {
        let settled = async {
            loop {
                let Some(tracked) = lock(&self.commands).values().next().cloned() else { return };
                tracked.ended().await;
                // Its caller hears before the disk does: a moment more.
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let _ = tokio::time::timeout(patience, settled).await;
    }
}
