//! Ends a session and seals what it wrote.
//!
//! ```text
//! room?  ── no ──> the session goes on, the caller is told
//!   │ yes
//! found something? ── yes ──> the same (`snapshots/seal_guard.rs`)
//!   │ no
//! record "stopping"  →  processes end  →  machine gone  →  inspected once more  →  drives detached
//!                                         →  layer sealed and synced  →  snapshot manifest  →  sandbox manifest  →  answer
//! ```
//!
//! The sandbox's manifest is the commit point. A daemon that dies before it finds `stopping` and the
//! open layer, and comes this way again: sealing a sealed layer changes nothing, and the snapshot's
//! id follows from the layer's, so there is no second one. How it was to end ([`Ending`]) is on record
//! with `stopping`; what the machine used is on record before anything is sealed, and enters the
//! sandbox's totals with the commit, so that it counts once.

mod ending;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

pub(in crate::engine) use self::ending::SnapshotOptions;
use crate::driver::{MachineUsage, kill_orphans};
use crate::engine::error::error_chain;
use crate::engine::lifecycle::Lifecycle;
use crate::engine::machine::capabilities::pausing;
use crate::engine::observe::meters::Operation;
use crate::engine::running::freeze_guard::freeze_filesystems;
use crate::engine::running::live::RunningSandbox;
use crate::engine::running::measured::junk_warned_of;
use crate::engine::running::turns::Slot;
use crate::engine::snapshots::seal_guard::{GuardScan, junk_finding};
use crate::engine::{Error, Result};
use crate::failpoint;
use crate::failpoint::step;
use crate::guest::GuestError;
use crate::model::lifecycle::{Effect, Phase};
use crate::model::{
    Change, CommandEnd, Ending, Expiry, FORMAT, Finding, Layer, LayerId, LayerKind, MachineKey,
    MountMode, Mounted, Sandbox, Session, SessionEnd, SessionId, Snapshot, SnapshotId,
    SnapshotKind, now,
};
use crate::store::{Durability, MeasuredLayer, SealOptions, Sealing, StoreError};

/// After how many checks for a mounted layer processes are looked for that have it.
const STRAY_AFTER: u32 = 20;
/// How long a layer of a machine that is gone may stay mounted.
const STRAY_WITHIN: Duration = Duration::from_secs(15);

impl Lifecycle {
    /// Ends the session under way, or what is left of one, in the sandbox's turn.
    ///
    /// Answers with the snapshot the sandbox now stands on.
    pub(in crate::engine) async fn end_session(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        sandbox: &mut Sandbox,
        mut ending: Ending,
    ) -> Result<Option<Snapshot>> {
        step("seal.begun");
        let live = slot.live();
        let _seal = live.as_ref().map(|live| live.seal.begin());
        if live.is_none() && self.never_began(sandbox).await? {
            return self.roll_back_start(sandbox).await;
        }
        // The end of a session that broke off is not timed: no caller waits for it.
        let timing = live
            .is_some()
            .then(|| self.context.meters.time(Operation::Stop, &sandbox.config.driver));
        ending.always |= sandbox.config.snapshot_always && sandbox.config.persistent;
        let keep = ending.keeps(sandbox);
        let writes = |mounted: &Mounted| mounted.mode == MountMode::ReadWrite;
        let seals = keep || sandbox.mounted().iter().any(writes);
        if seals && live.is_some() && ending.end != SessionEnd::Interrupted {
            // Checks, before anything is touched, that there is room for what sealing writes.
            self.store.wait_for_room_to_seal().await?;
            self.check_room_to_export(sandbox, keep).await?;
        }
        // There is no caller to decide when a session broke off or its time is up: then the layer
        // is left open.
        let can_go_on = live.is_some() && (ending.is_asked_for() || ending.end == SessionEnd::Idle);
        let mut doubtful = Vec::new();
        if sandbox.decision().accept_doubtful {
            doubtful = self.integrity.syncs.accept_doubt(sandbox, keep).await?;
        } else if can_go_on && !sandbox.decision().discard {
            self.integrity.syncs.refuse_doubt(sandbox, keep, true).await?;
        }
        let mut looked = match &live {
            Some(live) if seals && ending.is_asked_for() => {
                self.storage.guard.inspect_running(live, sandbox, keep).await?
            }
            _ => GuardScan::default(),
        };
        step("seal.looked");
        looked.doubtful = doubtful;
        let mut answers = true;
        if let Some(live) = &live {
            let before = self.sessions.validate_before_stop(live).await;
            sandbox.validated = before.validated.or(sandbox.validated.take());
            answers = before.answers;
        }
        // Operations that use the root run to completion; no new one starts until it is down.
        let gate = match &live {
            Some(live) => {
                tokio::time::timeout(self.context.settings.grace, live.gate.write()).await.ok()
            }
            None => None,
        };
        if ending.end == SessionEnd::Idle
            && live.as_ref().is_some_and(|live| live.quiet_for().is_none())
        {
            return Err(Error::SessionOver);
        }
        // From here on only the engine sends requests to the agent, and that only to end processes.
        looked.measured = live.as_ref().and_then(|live| live.measured_ahead(sandbox));
        step("seal.gated");
        sandbox.transition(Change::End(ending))?;
        sandbox.used_at = now();
        self.records.record(sandbox, Durability::Soon).await?;
        if let Some(live) = &live {
            live.saved(sandbox.revision);
        }
        step("seal.stopping");
        let mut session = self.session_to_end(live.as_deref(), sandbox).await?;
        failpoint::pass("seal.recorded");
        if let Some(live) = &live {
            live.close();
            if ending.end != SessionEnd::Interrupted {
                live.session_ends();
            }
        }
        slot.set_live(None);
        let down = self.stop_machine(live.as_ref(), sandbox, keep, answers).await;
        step("seal.powered_down");
        if let Some(live) = &live {
            self.network.disconnect_session(live, session.as_mut()).await;
        }
        drop(gate);
        step("seal.offline");
        let sealed = match down {
            Ok(usage) => {
                self.note_usage(session.as_mut(), usage).await;
                ending.end = self.why_it_broke(live.as_deref(), sandbox, ending.end, usage);
                failpoint::pass("seal.down");
                let free = match live.is_some() {
                    // The driver has just ended it.
                    true => Ok(()),
                    false => self.end_strays(sandbox).await,
                };
                let rescued = match free {
                    Ok(()) => self.machines.export_by_rescue_boot(sandbox, keep).await,
                    Err(error) => Err(error),
                };
                match rescued {
                    Ok(()) => {
                        self.seal_what_it_wrote(sandbox, session.as_mut(), keep, ending, looked)
                            .await
                    }
                    Err(error) => Err(error),
                }
            }
            Err(error) => Err(error),
        };
        match sealed {
            Ok(snapshot) => {
                if let Some(session) = session {
                    self.session_over(sandbox, session, keep, live.as_ref()).await?;
                }
                failpoint::pass("seal.done");
                step("seal.told");
                if ending.kind != SnapshotKind::BeforeRollback {
                    // Before a rollback, retention might remove the snapshot that is its target.
                    self.storage.snapshots.try_to_retain(sandbox).await;
                }
                if let Some(timing) = timing {
                    timing.ok();
                }
                Ok(snapshot)
            }
            Err(error) => {
                let guarded = match &error {
                    Error::Guarded { findings, .. } => findings.clone(),
                    _ => Vec::new(),
                };
                let broke = Change::Broke { why: error_chain(&error), guarded };
                if let Err(refused) = sandbox.transition(broke) {
                    tracing::error!(sandbox = %sandbox.name, error = %refused, "the failure of a stop was not recorded");
                }
                self.record_outcome(sandbox, None).await;
                Err(error)
            }
        }
    }

    /// Refuses when the files on a machine's disks would not fit on the host beside those disks, as
    /// far as is known before they are exported: then the session continues.
    async fn check_room_to_export(&self, sandbox: &Sandbox, keep: bool) -> Result<()> {
        let mut bytes = 0;
        for (_, layer) in self.machines.on_disks(sandbox, keep)? {
            bytes += self.store.size_of_disk(&layer).await?;
        }
        match bytes {
            0 => Ok(()),
            bytes => Ok(self.store.check_room_to_import(bytes).await?),
        }
    }

    /// Whether what is left is of a start that did not come to its end, of a sandbox that resumes
    /// from memory. Its open layer is nothing then but a way to that memory: sealed, it would stand
    /// for files that it does not have.
    async fn never_began(&self, sandbox: &Sandbox) -> Result<bool> {
        let begun =
            sandbox.pending_effect() == Some(Effect::Boot) && sandbox.open_session().is_some();
        if !begun || pausing(&*self.context.driver(&sandbox.config.driver)?).is_none() {
            return Ok(false);
        }
        let current = self.records.current_snapshot(sandbox).await?;
        Ok(current.is_some_and(|current| current.has_memory()))
    }

    /// Undoes such a start: nothing in it was reported to anybody.
    async fn roll_back_start(self: &Arc<Self>, sandbox: &mut Sandbox) -> Result<Option<Snapshot>> {
        let driver = self.context.driver(&sandbox.config.driver)?;
        driver.stop(&MachineKey::from(&sandbox.id)).await?;
        let mut session = self.session_to_end(None, sandbox).await?;
        let held = sandbox.clone();
        let current = self.records.current_snapshot(sandbox).await?;
        let paused = current.as_ref().is_some_and(|current| {
            current.sandbox == sandbox.id && current.kind == SnapshotKind::Pause
        });
        sandbox.transition(Change::Undone { paused })?;
        count_session(sandbox, session.as_mut(), SessionEnd::StartFailed);
        self.records.record(sandbox, Durability::Synced).await?;
        tracing::warn!(sandbox = %sandbox.name, "an interrupted start was rolled back");
        if let Some(session) = session {
            self.try_to_save_session(&session).await;
        }
        self.release_start(&held).await;
        Ok(current)
    }

    /// The session that is to end, with the time it began to: `None` when it never began, or has ended.
    async fn session_to_end(
        &self,
        live: Option<&RunningSandbox>,
        sandbox: &Sandbox,
    ) -> Result<Option<Session>> {
        let session = match (live, &sandbox.session) {
            (Some(live), _) => Some(live.change_session(|session| {
                session.requested_stop_at.get_or_insert_with(now);
            })),
            (None, Some(id)) => self.db.session(id).await?,
            (None, None) => None,
        };
        let Some(mut session) = session.filter(|session| session.ended_at.is_none()) else {
            return Ok(None);
        };
        session.requested_stop_at.get_or_insert_with(now);
        self.try_to_save_session(&session).await;
        Ok(Some(session))
    }

    /// Records the machine's usage; usage of before a daemon died is recorded already.
    pub(in crate::engine) async fn note_usage(
        &self,
        session: Option<&mut Session>,
        usage: MachineUsage,
    ) {
        let Some(session) = session else { return };
        session.count_machine(usage);
        self.try_to_save_session(session).await;
    }

    /// Why a session broke off, as far as that is known.
    fn why_it_broke(
        &self,
        live: Option<&RunningSandbox>,
        sandbox: &Sandbox,
        end: SessionEnd,
        usage: MachineUsage,
    ) -> SessionEnd {
        let broke = end == SessionEnd::Interrupted;
        if broke && live.is_some_and(|live| live.clearing.load(Ordering::SeqCst)) {
            return SessionEnd::OutOfDisk;
        }
        // Of a machine with a kernel of its own only the machine itself is in the control group.
        let alone =
            self.context.driver(&sandbox.config.driver).is_ok_and(|one| one.disk().is_some());
        if broke && alone && usage.oom_kills > 0 {
            return SessionEnd::OutOfMemory;
        }
        end
    }

    /// Saves a session's record. On a full disk that fails, and the end of the session continues
    /// all the same: there must be a way to free the room.
    async fn try_to_save_session(&self, session: &Session) {
        if let Err(error) = self.records.keep_session(session).await {
            tracing::warn!(session = %session.id, error = error_chain(&error), "the end of a session is not written to disk yet");
        }
    }

    /// Ends all processes and frees what the machine held: politely first, unless the agent is known not to answer.
    async fn stop_machine(
        &self,
        live: Option<&Arc<RunningSandbox>>,
        sandbox: &Sandbox,
        keep: bool,
        answers: bool,
    ) -> Result<MachineUsage> {
        if let Some(live) = live {
            self.integrity.limits.drain_writes(live, true).await;
            let handed = async {
                if !answers {
                    return Err(GuestError::Timeout.into());
                }
                live.guest().await?.quiesce(self.context.settings.grace).await?;
                self.integrity.limits.drain_writes(live, false).await;
                step("seal.quiet");
                live.commands_recorded(Duration::from_secs(1)).await;
                self.sessions.look_before_end(live).await;
                step("seal.last_look");
                self.machines.hand_over(live, sandbox, keep).await
            };
            if let Err(error) = handed.await {
                tracing::warn!(sandbox = %sandbox.name, error = error_chain(&error), "a machine did not end on request, or did not export its files; it is killed");
                if live.driver.disk().is_some() {
                    self.integrity.limits.drain_writes(live, false).await;
                    // What is in its cache and not on its disk would be lost.
                    freeze_filesystems(live, sandbox).await;
                }
            }
        }
        let driver = self.context.driver(&sandbox.config.driver)?;
        Ok(driver.stop(&MachineKey::from(&sandbox.id)).await?)
    }

    /// Makes sure that nothing writes to the layers of a machine that this daemon did not end
    /// itself, and refuses to continue while something may.
    async fn end_strays(&self, sandbox: &Sandbox) -> Result<()> {
        let writes = |mounted: &&Mounted| mounted.mode == MountMode::ReadWrite;
        let drives = sandbox.mounted().iter().filter(writes).map(|mounted| &mounted.layer);
        let key = MachineKey::from(&sandbox.id);
        for layer in sandbox.open_layer().into_iter().chain(sandbox.unsealed()).chain(drives) {
            let begun = Instant::now();
            let mut asked = 0;
            while self.store.is_mounted(layer).await? {
                // The mount of a machine that has ended goes a moment after it.
                if asked == STRAY_AFTER {
                    let ended = tokio::task::spawn_blocking({
                        let key = key.clone();
                        move || kill_orphans(&key)
                    });
                    let processes = ended.await.unwrap_or_default();
                    tracing::warn!(sandbox = %sandbox.name, %layer, ?processes, "processes of an unknown machine still have the layer mounted; they are killed");
                }
                if begun.elapsed() > STRAY_WITHIN {
                    return Err(StoreError::StillMounted { id: layer.clone() }.into());
                }
                asked += 1;
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        Ok(())
    }

    /// What comes after the machine is gone: a last look, then drives, then the sandbox's own layer.
    async fn seal_what_it_wrote(
        self: &Arc<Self>,
        sandbox: &mut Sandbox,
        session: Option<&mut Session>,
        keep: bool,
        ending: Ending,
        mut looked: GuardScan,
    ) -> Result<Option<Snapshot>> {
        let (doubtful, measured) = (looked.doubtful.clone(), looked.measured.take());
        let mut findings = self.storage.guard.guard(sandbox, keep, looked).await?;
        // What was found may have been masked or set aside.
        let measured = measured.filter(|_| findings.is_empty());
        findings.extend(doubtful);
        step("seal.guarded");
        self.storage.drives.detach(sandbox).await?;
        self.seal_session(sandbox, session, keep, ending, findings, measured).await
    }

    /// Seals and commits. Until that has succeeded `sandbox` still names its open layers, so that a
    /// failure on the way leaves them to be sealed again.
    async fn seal_session(
        &self,
        sandbox: &mut Sandbox,
        session: Option<&mut Session>,
        keep: bool,
        ending: Ending,
        findings: Vec<Finding>,
        measured: Option<MeasuredLayer>,
    ) -> Result<Option<Snapshot>> {
        let mut after = sandbox.clone();
        after.transition(Change::Down)?;
        count_session(&mut after, session, ending.end);
        let Some(open) = sandbox.open_layer().cloned() else {
            self.records.record(&mut after, Durability::Synced).await?;
            let current = self.records.current_snapshot(&after).await?;
            *sandbox = after;
            return Ok(current);
        };
        let snapshot = if keep {
            self.keep_layers(sandbox, &mut after, &open, ending, findings, measured).await?
        } else {
            self.records.record(&mut after, Durability::Synced).await?;
            for layer in [Some(&open), sandbox.unsealed()].into_iter().flatten() {
                self.references.try_to_discard(layer).await;
            }
            self.records.current_snapshot(&after).await?
        };
        self.machines.release_uids(sandbox.uids());
        self.storage.compaction.chains.forget(&sandbox.id);
        *sandbox = after;
        Ok(snapshot)
    }

    async fn keep_layers(
        &self,
        sandbox: &Sandbox,
        after: &mut Sandbox,
        open: &LayerId,
        ending: Ending,
        mut findings: Vec<Finding>,
        measured: Option<MeasuredLayer>,
    ) -> Result<Option<Snapshot>> {
        let hold = self.store.hold();
        let mut layers =
            self.storage.compaction.compacted_chain(&hold, &sandbox.id, sandbox.open_chain()).await;
        let (mut empty, mut ready) = (Vec::new(), Vec::new());
        if let Some(under) = sandbox.unsealed()
            && !self.seal_layer(under, sandbox, &mut findings, &mut ready, None).await?
        {
            layers.retain(|layer| layer != under);
            empty.push(under);
        }
        match self.seal_layer(open, sandbox, &mut findings, &mut ready, measured).await? {
            true => layers.insert(0, open.clone()),
            false => empty.push(open),
        }
        failpoint::pass("seal.sealed");
        let current = self.records.current_snapshot(after).await?;
        // One with memory is more than these files: nothing is to be restored after a stop.
        let same = |current: &Snapshot| current.layers == layers && !current.has_memory();
        let snapshot = match current.filter(|current| same(current) && !ending.always) {
            Some(current) => {
                // Nothing was written: what it stood on is still what it stands on.
                self.commit_all(after, None, &ready).await?;
                current
            }
            None => {
                let id = SnapshotId::of_layer(open);
                let wanted = SnapshotOptions { findings, ..ending.into() };
                let snapshot = self.new_snapshot(after, id, layers, ending.kind, wanted);
                self.commit_all(after, Some(&snapshot), &ready).await?;
                snapshot
            }
        };
        for layer in empty {
            self.references.try_to_discard(layer).await;
        }
        Ok(Some(snapshot))
    }

    /// Makes a layer ready to be sealed with the commit. Answers whether there is anything in it.
    async fn seal_layer(
        &self,
        layer: &LayerId,
        sandbox: &Sandbox,
        findings: &mut Vec<Finding>,
        ready: &mut Vec<Layer>,
        measured: Option<MeasuredLayer>,
    ) -> Result<bool> {
        let options = SealOptions {
            measured,
            exclude: sandbox.config.exclude.clone(),
            kind: LayerKind::Session,
            ..SealOptions::default()
        };
        // A missing layer is data loss; never treat it as empty: an empty one stays until no record
        // references it.
        let rules = junk_warned_of(sandbox)?;
        let (sealing, junk) = self.store.prepare_seal(layer, &options, rules).await?;
        findings.extend(junk.iter().take(20).map(|junk| junk_finding(junk, None)));
        match sealing {
            None => return Ok(false),
            Some(Sealing::Sealed(layer)) => self.references.count_layer(&layer),
            Some(Sealing::Ready(layer)) => {
                self.references.count_layer(&layer);
                ready.push(layer);
            }
        }
        Ok(true)
    }

    pub(in crate::engine) fn new_snapshot(
        &self,
        sandbox: &Sandbox,
        id: SnapshotId,
        layers: Vec<LayerId>,
        kind: SnapshotKind,
        wanted: SnapshotOptions,
    ) -> Snapshot {
        let retention = sandbox.config.retention;
        Snapshot {
            format: FORMAT,
            id,
            project: sandbox.project.clone(),
            sandbox: sandbox.id.clone(),
            sandbox_name: sandbox.name.clone(),
            session: sandbox.session.clone().unwrap_or_else(SessionId::fresh),
            generation: sandbox.generation + 1,
            parent: sandbox.current.clone().or_else(|| sandbox.missing.clone()),
            merged: None,
            kind,
            label: wanted.label,
            layers,
            memory: Vec::new(),
            image: None,
            commands: Vec::new(),
            secrets: Vec::new(),
            identity_of: None,
            created_at: now(),
            method: wanted.method,
            used_at: None,
            expires_after: match wanted.expiry {
                Expiry::Retention => retention.expires,
                Expiry::Never => None,
                Expiry::After(span) => Some(span),
            },
            expiry_given: wanted.expiry != Expiry::Retention,
            // It is the newest.
            kept: retention.kept_expires.filter(|_| retention.keep_last.is_some()),
            expires_on: None,
            outlives: false,
            sandbox_deleted_at: None,
            deleted_at: None,
            findings: wanted.findings,
            image_config: sandbox.image_config.clone(),
        }
    }

    /// Acknowledges a snapshot: its manifest, then the sandbox's, both on stable storage.
    pub(in crate::engine) async fn commit(
        &self,
        sandbox: &mut Sandbox,
        snapshot: &Snapshot,
    ) -> Result<()> {
        self.commit_all(sandbox, Some(snapshot), &[]).await
    }

    /// The same with layers that are to be sealed, and perhaps without a new snapshot.
    async fn commit_all(
        &self,
        sandbox: &mut Sandbox,
        snapshot: Option<&Snapshot>,
        ready: &[Layer],
    ) -> Result<()> {
        let Some(snapshot) = snapshot else {
            sandbox.updated_at = now();
            self.context.catalog.commit(ready, None, sandbox).await?;
            self.records.recorded(sandbox);
            return Ok(());
        };
        // No other call deletes it in between, when no sandbox stands on it yet.
        let _record = self.storage.snapshots.snapshot_locks.lock(&snapshot.id).await;
        let mut after = sandbox.clone();
        after.current = Some(snapshot.id.clone());
        after.missing = None;
        after.generation = snapshot.generation;
        after.updated_at = now();
        let committed = self.context.catalog.commit(ready, Some(snapshot), &mut after).await;
        // It may exist all the same, and the sandbox's record not.
        if committed.is_ok() || self.db.snapshot_record(&snapshot.id).await?.is_some() {
            self.references.counts().hold_snapshot(snapshot);
        }
        committed?;
        *sandbox = after;
        self.records.recorded(sandbox);
        failpoint::pass("commit.sandbox");
        Ok(())
    }

    /// Writes down how a session ended, after the sandbox's own record says that it has.
    pub(in crate::engine) async fn session_over(
        &self,
        sandbox: &Sandbox,
        mut session: Session,
        kept: bool,
        live: Option<&Arc<RunningSandbox>>,
    ) -> Result<()> {
        session.snapshot = sandbox.current.clone().filter(|_| kept);
        let paused = sandbox.phase() == Phase::Paused;
        let session = self.sessions.end_on_record(live, session, kept && !paused).await?;
        self.context.events.session_ended(sandbox, &session);
        if live.is_none() && !paused {
            // What its processes came to was not seen.
            self.sessions.commands_lost(&sandbox.id, CommandEnd::Lost).await?;
        }
        Ok(())
    }
}

/// Adds a session that is over to what its sandbox used.
fn count_session(sandbox: &mut Sandbox, session: Option<&mut Session>, end: SessionEnd) {
    sandbox.used_at = now();
    if let Some(session) = session {
        session.close(sandbox.used_at, end);
        sandbox.totals.add(session.usage);
    }
}

impl RunningSandbox {
    /// Waits until the outcome of every command is on record, but not for long.
    pub(in crate::engine) async fn commands_recorded(&self, patience: Duration) {
        let settled = async {
            loop {
                let Some(tracked) = self.commands.lock().values().next().cloned() else { return };
                tracked.ended().await;
                // Its caller gets the answer before the disk does: a moment more.
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let _ = tokio::time::timeout(patience, settled).await;
    }
}
