//! Keeping the memory of a running machine: pauses, checkpoints and live forks.
//!
//! ```text
//! room? secrets? ── no ──> it runs on, the caller is told
//!   │
//! "captured" on record  →  filesystems frozen, output held  →  captured  →  searched  →  sealed  →  snapshot manifest
//!                                                                 │
//!   checkpoint, fork:                                   goes on at once        →  sandbox manifest, `running`  →  answer
//!   pause:                                              held                   →  sandbox manifest, `paused`   →  machine gone  →  answer
//! ```
//!
//! The sandbox's manifest is the commit point. Before it the sandbox runs, whatever happens: a held
//! machine is resumed, by this daemon or by the next. After it the machine only has to be ended.
//!
//! *What a capture took of the disk stays taken*, also when its pages were refused for a secret, or a daemon died over
//! it. So the layer's id is on record (`OpenSession::captured`) before the capture begins, and of one that came to nothing the disk
//! alone is sealed and stays part of the chain.
//!
//! Drives are part of no memory image: a sandbox that has some is not captured.

use std::sync::Arc;
use std::time::Duration;

use crate::db::Unless;
use crate::driver::{Captured, Then};
use crate::engine::error::error_chain;
use crate::engine::lifecycle::Lifecycle;
use crate::engine::lifecycle::stop::SnapshotOptions;
use crate::engine::machine::capabilities::{Pausing, no_memory, pausing};
use crate::engine::machine::description::image_layers;
use crate::engine::observe::meters::Operation;
use crate::engine::running::freeze_guard::{
    SuspendedMachine, freeze_filesystems, thaw_filesystems,
};
use crate::engine::running::live::RunningSandbox;
use crate::engine::running::turns::Slot;
use crate::engine::snapshots::compaction::memory::DEEPEST_DISKS;
use crate::engine::{Error, Result};
use crate::failpoint;
use crate::model::{
    Change, Command, Ending, Finding, MemoryId, OnIdle, Sandbox, SessionEnd, Snapshot, SnapshotId,
    SnapshotKind, now,
};
use crate::store::{Durability, NewMemory};

/// How many it may stand on after a pause, which makes sure that there are fewer when it is woken.
const DEEPEST_PAUSED: usize = DEEPEST_DISKS + 16;
/// How long a checkpoint waits for those who are touching the root.
const GATE_WITHIN: Duration = Duration::from_millis(200);

/// What was captured and is not kept yet.
struct Capture {
    id: MemoryId,
    captured: Captured,
    /// The file in it that is the machine's disk.
    disk: &'static str,
    /// What was alive in it.
    commands: Vec<Command>,
}

impl Capture {
    fn layer(&self) -> NewMemory {
        let Captured { fingerprint, ram, roots, .. } = self.captured.clone();
        NewMemory { fingerprint, ram, roots, disk: Some(self.disk.to_owned()) }
    }
}

impl Lifecycle {
    /// What happens to an idle sandbox: its own setting, or the best that its driver can do.
    pub(in crate::engine) fn on_idle(&self, sandbox: &Sandbox) -> OnIdle {
        let keeps = || {
            let driver = self.context.driver(&sandbox.config.driver);
            let keeps = driver.is_ok_and(|driver| pausing(&*driver).is_some());
            let deep = sandbox.captured().len() + sandbox.open_memory().len() >= DEEPEST_PAUSED;
            keeps && !deep && sandbox.config.persistent && sandbox.mounted().is_empty()
        };
        let best = || if keeps() { OnIdle::Pause } else { OnIdle::Stop };
        sandbox.config.on_idle.unwrap_or_else(best)
    }

    /// Pauses a running sandbox in its turn.
    pub(in crate::engine) async fn pause_session(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        sandbox: &mut Sandbox,
        end: SessionEnd,
    ) -> Result<Snapshot> {
        let live = slot.live().ok_or_else(|| Error::NotRunning(sandbox.name.clone()))?;
        let timing = self.context.meters.time(Operation::Pause, &sandbox.config.driver);
        let driver = Arc::clone(&live.driver);
        let failures = self.store.sync_failures();
        let powers = self.can_capture(&live, sandbox, DEEPEST_PAUSED).await?;
        *sandbox = (*live.sandbox()).clone();
        let before = self.sessions.validate_before_stop(&live).await;
        sandbox.validated = before.validated.or(sandbox.validated.take());
        // Operations that use the root run to completion; no new one starts until it is away, or
        // the machine resumes.
        let gate = tokio::time::timeout(self.context.settings.grace, live.gate.write()).await.ok();
        if end == SessionEnd::Idle && live.quiet_for().is_none() {
            return Err(Error::SessionOver);
        }
        let still = live.still.write().await;
        let held = SuspendedMachine::new(&self.context, &live);
        let taken = match self.capture(&live, powers, sandbox, Then::Hold).await {
            Ok(taken) => taken,
            Err(error) => {
                held.release().await;
                return Err(error);
            }
        };
        failpoint::pass("pause.held");
        let before;
        let snapshot = match self.commit_pause(&live, sandbox, taken, end, failures).await {
            Ok((after, snapshot)) => {
                held.keep();
                before = std::mem::replace(sandbox, after);
                self.detach_paused(slot, &live, sandbox, &before);
                snapshot
            }
            Err(error) => {
                held.release().await;
                return Err(error);
            }
        };
        drop((still, gate));
        let mut session = live.session();
        self.network.disconnect_session(&live, Some(&mut session)).await;
        session.requested_stop_at.get_or_insert(sandbox.used_at);
        session.close(sandbox.used_at, end);
        match driver.stop(&live.key).await {
            Ok(usage) => {
                self.machines.release_uids(before.uids());
                self.note_usage(Some(&mut session), usage).await;
            }
            // The machine only uses memory of the host: the next start ends it first, and so does the next daemon.
            Err(error) => {
                tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "the machine of a paused sandbox was not removed");
            }
        }
        failpoint::pass("pause.down");
        self.session_over(sandbox, session, true, Some(&live)).await?;
        timing.ok();
        self.storage.snapshots.try_to_retain(sandbox).await;
        self.storage.compaction.after_pause(sandbox, &snapshot).await;
        Ok(snapshot)
    }

    /// Puts a pause on record. Until that has succeeded the sandbox runs.
    async fn commit_pause(
        &self,
        live: &Arc<RunningSandbox>,
        sandbox: &mut Sandbox,
        taken: Capture,
        end: SessionEnd,
        failures: u64,
    ) -> Result<(Sandbox, Snapshot)> {
        let findings = self.seal_capture(live, sandbox, &taken).await?;
        self.integrity.syncs.refuse_capture_in_doubt(sandbox, failures).await?;
        let wanted = SnapshotOptions { findings, ..SnapshotOptions::default() };
        let snapshot = self.memory_snapshot(live, sandbox, &taken, SnapshotKind::Pause, wanted);
        self.store.check_disks(&snapshot.memory).await?;
        let mut after = sandbox.clone();
        after.transition(Change::Captured(Ending::by_itself(SnapshotKind::Pause, end)))?;
        after.used_at = now();
        let mut session = live.session();
        if let Ok(usage) = live.driver.usage(&live.key).await {
            self.note_usage(Some(&mut session), usage).await;
            live.change_session(|kept| kept.usage = session.usage);
        }
        session.close(after.used_at, end);
        after.totals.add(session.usage);
        failpoint::pass("pause.sealed");
        if let Err(error) = self.commit(&mut after, &snapshot).await {
            // Whatever of it is on record must be removed: the machine continues from here.
            if let Err(error) = self.records.record(sandbox, Durability::Synced).await {
                tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "a pause failed and the sandbox runs, but its manifest may say paused");
            }
            live.set_sandbox(sandbox.clone());
            let _ = self
                .storage
                .snapshots
                .delete_record(&snapshot.id, Unless::Held, Durability::Soon)
                .await;
            return Err(error);
        }
        failpoint::pass("pause.committed");
        Ok((after, snapshot))
    }

    /// From here on the sandbox has no machine for all callers.
    fn detach_paused(
        self: &Arc<Self>,
        slot: &Slot,
        live: &Arc<RunningSandbox>,
        after: &Sandbox,
        before: &Sandbox,
    ) {
        for tracked in live.commands.lock().values() {
            self.sessions.sleeping.put(tracked);
            tracked.stdin.sleep();
        }
        live.close_paused();
        live.set_sandbox(after.clone());
        slot.set_live(None);
        let (this, open) = (Arc::clone(self), before.open_layer().cloned());
        let (driver, key) = (Arc::clone(&live.driver), live.key.clone());
        self.context.tasks.spawn_until_shutdown(async move {
            // Its disk is in the image; what is left of it goes when nothing has it open.
            driver.died(&key).await;
            if let Some(open) = open {
                this.references.try_to_discard(&open).await;
            }
        });
    }

    /// Takes a snapshot, memory included, of a machine that continues.
    pub(in crate::engine) async fn checkpoint_memory(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        sandbox: &mut Sandbox,
        kind: SnapshotKind,
        wanted: SnapshotOptions,
    ) -> Result<Snapshot> {
        let failures = self.store.sync_failures();
        let powers = self.can_capture(live, sandbox, DEEPEST_DISKS).await?;
        let taken = {
            // One that is being started meanwhile would be in memory and on no record.
            let _gate = tokio::time::timeout(GATE_WITHIN, live.gate.write()).await.ok();
            let _still = live.still.write().await;
            self.capture(live, powers, sandbox, Then::Continue).await?
        };
        let findings = self.seal_capture(live, sandbox, &taken).await?;
        self.integrity.syncs.refuse_capture_in_doubt(sandbox, failures).await?;
        let wanted = SnapshotOptions { findings, ..wanted };
        let snapshot = self.memory_snapshot(live, sandbox, &taken, kind, wanted);
        self.store.check_disks(&snapshot.memory).await?;
        self.commit(sandbox, &snapshot).await?;
        live.set_sandbox(sandbox.clone());
        Ok(snapshot)
    }

    /// Whether a machine's memory can be kept, and there is room for it.
    async fn can_capture<'a>(
        &self,
        live: &'a RunningSandbox,
        sandbox: &Sandbox,
        deepest: usize,
    ) -> Result<Pausing<'a>> {
        let powers = pausing(&*live.driver).ok_or_else(|| no_memory(sandbox))?;
        if !sandbox.mounted().is_empty() {
            return Err(Error::HasDrives(sandbox.name.clone()));
        }
        if sandbox.captured().len() + sandbox.open_memory().len() >= deepest {
            return Err(Error::MemoryTooDeep(sandbox.name.clone()));
        }
        self.integrity.syncs.refuse_doubt(sandbox, true, false).await?;
        self.store.check_room(1).await?;
        Ok(powers)
    }

    /// Captures a machine. Whatever becomes of that, it is on record what was taken of its disk.
    async fn capture(
        &self,
        live: &Arc<RunningSandbox>,
        powers: Pausing<'_>,
        sandbox: &mut Sandbox,
        then: Then,
    ) -> Result<Capture> {
        self.repair_captures(live, powers, sandbox).await?;
        let (id, dir) = self.store.begin_memory().await?;
        let below: Vec<_> =
            sandbox.captured().iter().chain(sandbox.open_memory()).cloned().collect();
        let below = self.references.memory_dirs(&below);
        if let Some(open) = sandbox.open_session_mut() {
            open.captured.insert(0, id.clone());
        }
        if let Err(error) = self.records.record(sandbox, Durability::Soon).await {
            sandbox.forget_capture(&id);
            self.store.discard_memory(&id).await?;
            return Err(error);
        }
        live.set_sandbox(sandbox.clone());
        failpoint::pass("capture.recorded");
        let frozen = freeze_filesystems(live, sandbox).await;
        let commands = live.running();
        let outcome = powers.memory.capture(&live.key, &dir, &below, then).await;
        failpoint::pass("capture.taken");
        if frozen && (then == Then::Continue || outcome.is_err()) {
            thaw_filesystems(live).await;
        }
        match outcome {
            Ok(captured) => {
                tracing::debug!(sandbox = %sandbox.name, pages = captured.pages, stood = ?captured.stood, "captured");
                Ok(Capture { id, captured, disk: powers.disk.disk_file(), commands })
            }
            Err(error) => {
                // All or nothing: nothing was taken.
                sandbox.forget_capture(&id);
                live.set_sandbox(sandbox.clone());
                self.store.discard_memory(&id).await?;
                self.records.record(sandbox, Durability::Soon).await?;
                live.set_sandbox(sandbox.clone());
                Err(error.into())
            }
        }
    }

    /// Searches what was captured and seals it. After an error the disk alone is kept.
    async fn seal_capture(
        &self,
        live: &Arc<RunningSandbox>,
        sandbox: &mut Sandbox,
        taken: &Capture,
    ) -> Result<Vec<Finding>> {
        let kept = async {
            let findings = self.storage.guard.guard_memory(live, sandbox, &taken.id).await?;
            let layer = self.store.seal_memory(&taken.id, taken.layer()).await?;
            self.references.count_memory_layer(&layer);
            Ok(findings)
        };
        let kept = kept.await;
        if kept.is_err() {
            self.seal_disk_only(sandbox, &taken.id, taken.layer()).await?;
            live.set_sandbox(sandbox.clone());
        }
        kept
    }

    async fn seal_disk_only(
        &self,
        sandbox: &mut Sandbox,
        id: &MemoryId,
        layer: NewMemory,
    ) -> Result<()> {
        if !self.store.seal_disk_alone(id, layer).await? {
            sandbox.forget_capture(id);
            self.records.record(sandbox, Durability::Soon).await?;
        }
        Ok(())
    }

    /// Completes what earlier captures of this session left unfinished, for example for want of
    /// room: nothing may stand on those.
    async fn repair_captures(
        &self,
        live: &RunningSandbox,
        powers: Pausing<'_>,
        sandbox: &mut Sandbox,
    ) -> Result<()> {
        if self.store.check_disks(sandbox.captured()).await.is_err() {
            self.finish_captures(powers, sandbox).await?;
            live.set_sandbox(sandbox.clone());
        }
        Ok(())
    }

    /// Finishes a capture during which a daemon died, of a machine that is alive and continues.
    pub(in crate::engine) async fn finish_captures(
        &self,
        powers: Pausing<'_>,
        sandbox: &mut Sandbox,
    ) -> Result<()> {
        let machine = self.machines.machine(sandbox)?;
        for id in sandbox.captured().to_vec() {
            let snapshot = SnapshotId::of_memory(&id);
            let written = self.db.snapshot(&snapshot).await?;
            if written.is_some_and(|written| written.generation > sandbox.generation) {
                // It was never reported to anybody, and the next one has its number.
                self.storage
                    .snapshots
                    .delete_record(&snapshot, Unless::Held, Durability::Soon)
                    .await?;
            }
            if self.store.check_disks(std::slice::from_ref(&id)).await.is_err() {
                let fingerprint = powers.memory.fingerprint(&machine).await?;
                let ram = fingerprint.memory;
                let disk = Some(powers.disk.disk_file().to_owned());
                let layer = NewMemory { fingerprint, ram, roots: Vec::new(), disk };
                self.seal_disk_only(sandbox, &id, layer).await?;
            }
        }
        Ok(())
    }

    fn memory_snapshot(
        &self,
        live: &RunningSandbox,
        sandbox: &Sandbox,
        taken: &Capture,
        kind: SnapshotKind,
        wanted: SnapshotOptions,
    ) -> Snapshot {
        let id = SnapshotId::of_memory(&taken.id);
        let layers = sandbox.open_chain().to_vec();
        let mut snapshot = self.new_snapshot(sandbox, id, layers, kind, wanted);
        snapshot.memory = sandbox.captured().iter().chain(sandbox.open_memory()).cloned().collect();
        snapshot.commands.clone_from(&taken.commands);
        snapshot.image = Some(image_layers(sandbox));
        snapshot.secrets = live.session().secrets;
        snapshot
    }
}

impl Sandbox {
    /// Nothing was taken of the disk after all.
    fn forget_capture(&mut self, id: &MemoryId) {
        if let Some(open) = self.open_session_mut() {
            open.captured.retain(|taken| taken != id);
        }
    }
}
