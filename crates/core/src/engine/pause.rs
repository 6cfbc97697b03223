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
//! The sandbox's manifest is the commit point. Before it the sandbox runs, whatever happens: a machine that is held is let go, by
//! this daemon or by the next. After it the machine is only in the way.
//!
//! *What a capture took of the disk stays taken*, also when its pages were refused for a secret, or a daemon died over
//! it. So the layer's id is on record (`OpenSession::captured`) before the capture begins, and of one that came to nothing the disk
//! alone is sealed and stays part of the chain.
//!
//! Drives are part of no memory image: a sandbox that has some is not captured.

use std::sync::Arc;
use std::time::Duration;

use super::boot::{chain_of, image_layers};
use super::lifecycle::{self, Command as Asked};
use super::live::Live;
use super::machine::{Pausing, no_memory, pausing};
use super::sandbox::expect_generation;
use super::seal::Wanted;
use super::slot::{Slot, lock};
use super::standstill::Held;
use super::{Engine, Error, Inner, Paused, Result};
use crate::db::Unless;
use crate::driver::{Captured, Then};
use crate::failpoint;
use crate::model::{
    Change, Command, Ending, Finding, MemoryId, Name, OnIdle, Sandbox, SessionEnd, Snapshot,
    SnapshotId, SnapshotKind, now,
};
use crate::store::{Durability, NewMemory};

/// How long filesystems may take to be frozen. One that does not answer is captured all the same: its kernel keeps a journal.
const FREEZE_WITHIN: Duration = Duration::from_secs(2);
/// How many captures a disk may stand on. Each is a file that every later machine has open. Pauses merge them (`shorten`), a stop makes
/// them one; what is captured of a machine that runs on is not merged under it.
pub(super) const DEEPEST_DISKS: usize = 64;
/// How many it may stand on after a pause, which sees to it that there are fewer when it is woken.
const DEEPEST_PAUSED: usize = DEEPEST_DISKS + 16;
/// How long a checkpoint waits for those who are touching the root.
const GATE_WITHIN: Duration = Duration::from_millis(200);

/// What was captured and is not kept yet.
struct Taken {
    id: MemoryId,
    captured: Captured,
    /// The file in it that is the machine's disk.
    disk: &'static str,
    /// What was alive in it.
    commands: Vec<Command>,
}

impl Taken {
    fn layer(&self) -> NewMemory {
        let Captured { fingerprint, ram, roots, .. } = self.captured.clone();
        NewMemory { fingerprint, ram, roots, disk: Some(self.disk.to_owned()) }
    }
}

impl Engine {
    /// Keeps a sandbox's memory, processes and files, and takes it off the host. The next call that needs it wakes it where it
    /// was. Of a paused one: tells what it wakes from.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoMemory`] for one whose driver keeps none, [`Error::NotRunning`] for one that has none, and
    /// [`Error::Guarded`] when a secret is in it. It runs on then, as it does after any other error.
    pub async fn pause(&self, project: &Name, name: &Name, expect: Option<u64>) -> Result<Paused> {
        let id = self.inner.find(project, name).await?.id;
        let name = name.clone();
        let work = self.inner.turn(id.clone(), move |inner, slot| async move {
            let mut sandbox = inner.reread(&slot, &id, &name).await?;
            expect_generation(&sandbox, expect)?;
            if pausing(&*inner.driver(&sandbox.config.driver)?).is_none() {
                return Err(no_memory(&sandbox));
            }
            let refused = |refused| match refused {
                lifecycle::Refused::Gone => Error::Gone(name.clone()),
                _ => Error::NotRunning(name.clone()),
            };
            let (_, effect) = lifecycle::command(sandbox.phase(), Asked::Pause).map_err(refused)?;
            let snapshot = match effect {
                Some(_) => {
                    let snapshot = inner.put_away(&slot, &mut sandbox, SessionEnd::Paused).await?;
                    inner.collect_soon();
                    Some(snapshot)
                }
                None => inner.current_snapshot(&sandbox).await?,
            };
            let session = inner.session_of(&sandbox).await?;
            let snapshot = snapshot.map(|snapshot| inner.sized(snapshot));
            Ok(Paused { sandbox, session, snapshot })
        });
        work.await
    }
}

impl Inner {
    /// What becomes of a sandbox that nobody uses: what it says, or what its driver is best at.
    pub(super) fn on_idle(&self, sandbox: &Sandbox) -> OnIdle {
        let keeps = || {
            let driver = self.driver(&sandbox.config.driver);
            let keeps = driver.is_ok_and(|driver| pausing(&*driver).is_some());
            let deep = sandbox.captured().len() + sandbox.open_memory().len() >= DEEPEST_PAUSED;
            keeps && !deep && sandbox.config.persistent && sandbox.mounted().is_empty()
        };
        let best = || if keeps() { OnIdle::Pause } else { OnIdle::Stop };
        sandbox.config.on_idle.unwrap_or_else(best)
    }

    /// Pauses a running sandbox in its turn.
    pub(super) async fn put_away(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        sandbox: &mut Sandbox,
        end: SessionEnd,
    ) -> Result<Snapshot> {
        let live = slot.live().ok_or_else(|| Error::NotRunning(sandbox.name.clone()))?;
        let driver = Arc::clone(&live.driver);
        let failures = self.store.sync_failures();
        let powers = self.can_capture(&live, sandbox, DEEPEST_PAUSED).await?;
        *sandbox = (*live.sandbox()).clone();
        let before = self.validate_before_stop(&live).await;
        sandbox.validated = before.validated.or(sandbox.validated.take());
        // Whoever is touching the root gets to the end of it; nobody new comes in until it is away, or goes on.
        let gate = tokio::time::timeout(self.settings.grace, live.gate.write()).await.ok();
        if end == SessionEnd::Idle && live.quiet_for().is_none() {
            return Err(Error::SessionOver);
        }
        let still = live.still.write().await;
        let held = Held::new(self, &live);
        let taken = match self.take(&live, powers, sandbox, Then::Hold).await {
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
                self.away(slot, &live, sandbox, &before);
                snapshot
            }
            Err(error) => {
                held.release().await;
                return Err(error);
            }
        };
        drop((still, gate));
        let mut session = live.session();
        self.go_offline(&live, Some(&mut session)).await;
        session.requested_stop_at.get_or_insert(sandbox.used_at);
        session.close(sandbox.used_at, end);
        match driver.stop(&live.key).await {
            Ok(usage) => {
                self.give_uids(before.uids());
                self.note_usage(Some(&mut session), usage).await;
            }
            // What it holds is in nobody's way but the host's: the next start ends it first, and so does the next daemon.
            Err(error) => {
                tracing::error!(sandbox = %sandbox.name, error = chain_of(&error), "a machine that was paused is not gone");
            }
        }
        failpoint::pass("pause.down");
        self.session_over(sandbox, session, true, false).await?;
        self.try_to_retain(sandbox).await;
        self.after_pause(sandbox, &snapshot).await;
        Ok(snapshot)
    }

    /// Puts a pause on record. Until that has succeeded the sandbox runs.
    async fn commit_pause(
        &self,
        live: &Arc<Live>,
        sandbox: &mut Sandbox,
        taken: Taken,
        end: SessionEnd,
        failures: u64,
    ) -> Result<(Sandbox, Snapshot)> {
        let findings = self.keep(live, sandbox, &taken).await?;
        self.refuse_capture_in_doubt(sandbox, failures).await?;
        let wanted = Wanted { findings, ..Wanted::default() };
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
            // Whatever of it is on record must not be: the machine goes on from here.
            if let Err(error) = self.record(sandbox, Durability::Synced).await {
                tracing::error!(sandbox = %sandbox.name, error = chain_of(&error), "runs, and may be on record as paused");
            }
            let _ = self.bury_snapshot(&snapshot.id, Unless::Held, Durability::Soon).await;
            return Err(error);
        }
        failpoint::pass("pause.committed");
        Ok((after, snapshot))
    }

    /// The sandbox has no machine any more, as far as anybody can see.
    fn away(self: &Arc<Self>, slot: &Slot, live: &Arc<Live>, after: &Sandbox, before: &Sandbox) {
        for tracked in lock(&live.commands).values() {
            self.asleep.put(tracked);
            tracked.stdin.sleep();
        }
        live.close_paused();
        live.set_sandbox(after.clone());
        slot.set_live(None);
        let (inner, open) = (Arc::clone(self), before.open_layer().cloned());
        let (driver, key) = (Arc::clone(&live.driver), live.key.clone());
        tokio::spawn(async move {
            // Its disk is in the image; what is left of it goes when nothing has it open.
            driver.died(&key).await;
            if let Some(open) = open {
                inner.try_to_discard(&open).await;
            }
        });
    }

    /// Takes a snapshot, memory included, of a machine that goes on.
    pub(super) async fn snap_memory(
        self: &Arc<Self>,
        live: &Arc<Live>,
        sandbox: &mut Sandbox,
        kind: SnapshotKind,
        wanted: Wanted,
    ) -> Result<Snapshot> {
        let failures = self.store.sync_failures();
        let powers = self.can_capture(live, sandbox, DEEPEST_DISKS).await?;
        let taken = {
            // One that is being started meanwhile would be in memory and on no record.
            let _gate = tokio::time::timeout(GATE_WITHIN, live.gate.write()).await.ok();
            let _still = live.still.write().await;
            self.take(live, powers, sandbox, Then::Continue).await?
        };
        let findings = self.keep(live, sandbox, &taken).await?;
        self.refuse_capture_in_doubt(sandbox, failures).await?;
        let wanted = Wanted { findings, ..wanted };
        let snapshot = self.memory_snapshot(live, sandbox, &taken, kind, wanted);
        self.store.check_disks(&snapshot.memory).await?;
        self.commit(sandbox, &snapshot).await?;
        live.set_sandbox(sandbox.clone());
        Ok(snapshot)
    }

    /// Whether a machine's memory can be kept, and there is room for it.
    async fn can_capture<'a>(
        &self,
        live: &'a Live,
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
        self.refuse_doubt(sandbox, true, false).await?;
        self.store.check_room(1).await?;
        Ok(powers)
    }

    /// Captures a machine. Whatever becomes of that, it is on record what was taken of its disk.
    async fn take(
        &self,
        live: &Arc<Live>,
        powers: Pausing<'_>,
        sandbox: &mut Sandbox,
        then: Then,
    ) -> Result<Taken> {
        self.see_to_captures(live, powers, sandbox).await?;
        let (id, dir) = self.store.begin_memory().await?;
        let below: Vec<_> =
            sandbox.captured().iter().chain(sandbox.open_memory()).cloned().collect();
        let below = self.dirs(&below);
        if let Some(open) = sandbox.open_session_mut() {
            open.captured.insert(0, id.clone());
        }
        if let Err(error) = self.record(sandbox, Durability::Soon).await {
            sandbox.forget_capture(&id);
            self.store.discard_memory(&id).await?;
            return Err(error);
        }
        live.set_sandbox(sandbox.clone());
        failpoint::pass("capture.recorded");
        let frozen = self.freeze(live, sandbox).await;
        let commands = live.running();
        let outcome = powers.memory.capture(&live.key, &dir, &below, then).await;
        failpoint::pass("capture.taken");
        if frozen && (then == Then::Continue || outcome.is_err()) {
            self.thaw(live).await;
        }
        match outcome {
            Ok(captured) => {
                tracing::debug!(sandbox = %sandbox.name, pages = captured.pages, stood = ?captured.stood, "captured");
                Ok(Taken { id, captured, disk: powers.disk.disk_file(), commands })
            }
            Err(error) => {
                // All or nothing: nothing was taken.
                sandbox.forget_capture(&id);
                live.set_sandbox(sandbox.clone());
                self.store.discard_memory(&id).await?;
                self.record(sandbox, Durability::Soon).await?;
                Err(error.into())
            }
        }
    }

    pub(super) async fn freeze(&self, live: &Live, sandbox: &Sandbox) -> bool {
        let frozen = async { live.guest().await?.freeze().await.map_err(Error::from) };
        let problem = match tokio::time::timeout(FREEZE_WITHIN, frozen).await {
            Ok(Ok(())) => return true,
            Ok(Err(error)) => chain_of(&error),
            Err(_) => "its agent does not answer".to_owned(),
        };
        tracing::warn!(sandbox = %sandbox.name, problem, "its filesystems were not frozen; it is captured all the same");
        // It may come to it yet.
        true
    }

    async fn thaw(&self, live: &Live) {
        let thawed = async { live.guest().await?.thaw().await.map_err(Error::from) };
        if !matches!(tokio::time::timeout(FREEZE_WITHIN, thawed).await, Ok(Ok(()))) {
            // The agent thaws by itself after a while.
            tracing::warn!(machine = %live.key, "was not thawed");
        }
    }

    /// Lets a machine go on that was held.
    pub(super) async fn let_go_on(&self, live: &Live) {
        if let Some(memory) = live.driver.memory()
            && let Err(error) = memory.go_on(&live.key).await
        {
            tracing::error!(machine = %live.key, error = chain_of(&error), "a machine that was held does not go on");
        }
        self.thaw(live).await;
    }

    /// Searches what was captured and seals it. After an error the disk alone is kept.
    async fn keep(
        &self,
        live: &Arc<Live>,
        sandbox: &mut Sandbox,
        taken: &Taken,
    ) -> Result<Vec<Finding>> {
        let kept = async {
            let findings = self.guard_memory(live, sandbox, &taken.id).await?;
            let layer = self.store.seal_memory(&taken.id, taken.layer()).await?;
            self.book_memory(&layer);
            Ok(findings)
        };
        let kept = kept.await;
        if kept.is_err() {
            self.keep_disk_alone(sandbox, &taken.id, taken.layer()).await?;
            live.set_sandbox(sandbox.clone());
        }
        kept
    }

    async fn keep_disk_alone(
        &self,
        sandbox: &mut Sandbox,
        id: &MemoryId,
        layer: NewMemory,
    ) -> Result<()> {
        if !self.store.seal_disk_alone(id, layer).await? {
            sandbox.forget_capture(id);
            self.record(sandbox, Durability::Soon).await?;
        }
        Ok(())
    }

    /// Sees to what earlier captures of this session left unfinished, for want of room say: nothing may stand on those.
    async fn see_to_captures(
        &self,
        live: &Live,
        powers: Pausing<'_>,
        sandbox: &mut Sandbox,
    ) -> Result<()> {
        if self.store.check_disks(sandbox.captured()).await.is_err() {
            self.finish_captures(powers, sandbox).await?;
            live.set_sandbox(sandbox.clone());
        }
        Ok(())
    }

    /// Sees to a capture that a daemon died over, of a machine that is alive and goes on.
    pub(super) async fn finish_captures(
        &self,
        powers: Pausing<'_>,
        sandbox: &mut Sandbox,
    ) -> Result<()> {
        let machine = self.machine(sandbox)?;
        for id in sandbox.captured().to_vec() {
            let snapshot = SnapshotId::of_memory(&id);
            let written = self.db.snapshot(&snapshot).await?;
            if written.is_some_and(|written| written.generation > sandbox.generation) {
                // Nobody was told of it, and the next one has its number.
                self.bury_snapshot(&snapshot, Unless::Held, Durability::Soon).await?;
            }
            if self.store.check_disks(std::slice::from_ref(&id)).await.is_err() {
                let fingerprint = powers.memory.fingerprint(&machine).await?;
                let ram = fingerprint.memory;
                let disk = Some(powers.disk.disk_file().to_owned());
                let layer = NewMemory { fingerprint, ram, roots: Vec::new(), disk };
                self.keep_disk_alone(sandbox, &id, layer).await?;
            }
        }
        Ok(())
    }

    fn memory_snapshot(
        &self,
        live: &Live,
        sandbox: &Sandbox,
        taken: &Taken,
        kind: SnapshotKind,
        wanted: Wanted,
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
