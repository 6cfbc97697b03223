//! Requests about a sandbox as a whole: create, get, list, start, stop, update, delete, fork,
//! checkpoint, roll back.

use std::sync::Arc;

use tokio::sync::OwnedRwLockReadGuard;

use crate::engine::error::NoSuch;
use crate::engine::lifecycle::Lifecycle;
use crate::engine::running::live::{Hold, RunningSandbox};
use crate::engine::running::turns::Slot;
use crate::engine::snapshots::snapshot_records::checked_expiry;
use crate::engine::{Error, Result, SnapshotOnStop, Stop, Stopped, WakeMode, after};
use crate::model::lifecycle::{LifecycleCommand, Phase};
use crate::model::{
    Change, Config, Ending, Expiry, Name, Patch, Sandbox, SandboxId, Session, SessionEnd,
    SessionId, SnapshotKind, lifecycle,
};
use crate::store::Durability;

/// What a sandbox that is woken may stand on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum WakeFrom {
    /// What it kept, or its image if that is nothing.
    Any,
    /// What it kept.
    Kept,
}

impl Lifecycle {
    pub(in crate::engine) async fn find(&self, project: &Name, name: &Name) -> Result<Sandbox> {
        let found = self.db.sandbox(project, name).await?;
        found
            .map(|sandbox| self.records.as_known(sandbox))
            .filter(|sandbox| sandbox.phase() != Phase::Deleted && !sandbox.internal)
            .ok_or_else(|| self.no_such(project, name))
    }

    /// Why a sandbox is not there.
    pub(in crate::engine) fn no_such(&self, project: &Name, name: &Name) -> Error {
        if let Some(lost) = self.records.lost_names.get(project, name) {
            return Error::Lost(lost);
        }
        Error::NoSandbox(NoSuch {
            name: name.clone(),
            trashed: self.storage.trash.in_trash(project, name),
        })
    }

    /// The sandbox as it is now, in its turn.
    ///
    /// In a turn no other operation is in progress, so a record with one but without a machine is
    /// left from a failure that could not be recorded: it is `failed`, and continues from there.
    pub(in crate::engine) async fn reread(
        &self,
        slot: &Slot,
        id: &SandboxId,
        name: &Name,
    ) -> Result<Sandbox> {
        let found = self.db.sandbox_by_id(id).await?;
        let mut sandbox = found
            .map(|sandbox| self.records.as_known(sandbox))
            .filter(|sandbox| sandbox.phase() != Phase::Deleted)
            .ok_or_else(|| Error::NoSandbox(name.clone().into()))?;
        let under_way = [Phase::Starting, Phase::Running, Phase::Stopping];
        if slot.live().is_none() && under_way.contains(&sandbox.phase()) {
            sandbox.transition(Change::Lost)?;
        }
        Ok(sandbox)
    }

    pub(in crate::engine) async fn session_of(&self, sandbox: &Sandbox) -> Result<Option<Session>> {
        if let Some(live) = self.turns.live(&sandbox.id) {
            return Ok(Some(live.session()));
        }
        match &sandbox.session {
            Some(id) => Ok(self.db.session(id).await?),
            None => Ok(None),
        }
    }

    /// A running sandbox, woken if need be and allowed.
    pub(in crate::engine) async fn awake(
        self: &Arc<Self>,
        project: &Name,
        name: &Name,
        wake: &WakeMode,
    ) -> Result<(Arc<RunningSandbox>, bool)> {
        let sandbox = self.find(project, name).await?;
        self.turns.recovered(&sandbox.id).await?;
        match (self.turns.live(&sandbox.id), wake) {
            (Some(live), WakeMode::Session(id)) if live.session().id != *id => {
                Err(Error::SessionEnded { session: id.clone() })
            }
            (Some(live), _) => Ok((live, false)),
            (None, WakeMode::Wake) => self.wake(&sandbox.id, name, None, WakeFrom::Any).await,
            (None, WakeMode::IfRunning) => Err(Error::NotRunning(name.clone())),
            (None, WakeMode::Session(id)) => Err(Error::SessionEnded { session: id.clone() }),
        }
    }

    /// A sandbox with the time of its last use. Its record only knows when its session began.
    pub(in crate::engine) fn last_used(&self, mut sandbox: Sandbox) -> Sandbox {
        if let Some(live) = self.turns.live(&sandbox.id) {
            sandbox.used_at = sandbox.used_at.max(live.used_at());
        }
        sandbox
    }

    /// A running sandbox whose root stays still while the answer lives, woken if need be and allowed.
    pub(in crate::engine) async fn enter(
        self: &Arc<Self>,
        project: &Name,
        name: &Name,
        wake: &WakeMode,
    ) -> Result<(Arc<RunningSandbox>, (Hold, OwnedRwLockReadGuard<()>))> {
        for _ in 0..5 {
            let (live, _) = self.awake(project, name, wake).await?;
            match live.enter().await {
                Ok(inside) => return Ok((live, inside)),
                Err(error) => wake.may_try_again(error)?,
            }
        }
        Err(Error::SessionOver)
    }

    /// Starts a sandbox in its turn; the second value is whether this call did it.
    pub(in crate::engine) async fn wake(
        self: &Arc<Self>,
        id: &SandboxId,
        name: &Name,
        expect: Option<u64>,
        from: WakeFrom,
    ) -> Result<(Arc<RunningSandbox>, bool)> {
        let (id, name) = (id.clone(), name.clone());
        self.turn(id.clone(), move |this, slot| async move {
            let sandbox = this.reread(&slot, &id, &name).await?;
            expect_generation(&sandbox, expect)?;
            if let Some(live) = slot.live() {
                return Ok((live, false));
            }
            // Asked in its turn: a stop that was under way has kept, or not, by now.
            let nothing = !sandbox.config.persistent && sandbox.current.is_none();
            if from == WakeFrom::Kept
                && nothing
                && sandbox.missing.is_none()
                && sandbox.open_layer().is_none()
                && sandbox.session.is_some()
            {
                return Err(Error::NothingKept(name));
            }
            Ok((this.start_session(&slot, sandbox, false).await?, true))
        })
        .await
    }

    pub(in crate::engine) async fn stop(
        self: &Arc<Self>,
        project: &Name,
        name: &Name,
        request: Stop,
    ) -> Result<Stopped> {
        let expiry = checked_expiry(request.expires)?;
        request.decision.check()?;
        let id = self.find(project, name).await?.id;
        self.stop_found(id, name.clone(), request, expiry).await
    }

    /// The same for a sandbox that was found.
    pub(in crate::engine) async fn stop_found(
        self: &Arc<Self>,
        id: SandboxId,
        name: Name,
        request: Stop,
        expiry: Expiry,
    ) -> Result<Stopped> {
        self.turn(id.clone(), move |this, slot| async move {
            let mut sandbox = this.reread(&slot, &id, &name).await?;
            if let Some(meant) = &request.session
                && let Some(over) = this.ended_session(&sandbox, meant).await?
            {
                let snapshot = match &over.snapshot {
                    Some(id) => this.db.snapshot_record(id).await?,
                    None => None,
                };
                let snapshot = snapshot.map(|snapshot| this.references.sized(snapshot));
                return Ok(Stopped {
                    sandbox,
                    session: Some(over),
                    snapshot,
                    findings: Vec::new(),
                });
            }
            let wish = lifecycle::command(sandbox.phase(), LifecycleCommand::Stop)
                .map_err(|_| Error::Gone(name.clone()))?;
            let before = sandbox.current.clone();
            if sandbox.phase() == Phase::Paused {
                // Its files are on a disk that only its own kernel reads, and its processes may want to end well.
                let live = this.start_session(&slot, sandbox, false).await?;
                sandbox = (*live.sandbox()).clone();
            }
            let snapshot = if wish.1.is_some() {
                if let Some(open) = sandbox.open_session_mut() {
                    open.decision = request.decision;
                }
                let broken = sandbox.phase() == Phase::Failed;
                let (kind, end) = if broken {
                    (SnapshotKind::Recovered, SessionEnd::Interrupted)
                } else {
                    (SnapshotKind::Stop, SessionEnd::Stopped)
                };
                let always = request.snapshot == SnapshotOnStop::Always;
                let ending = Ending { end, kind, always, method: request.method, expiry };
                let snapshot = this.end_session(&slot, &mut sandbox, ending).await?;
                this.storage.compaction.after_stop(&sandbox);
                snapshot
            } else {
                this.records.current_snapshot(&sandbox).await?
            };
            let session = this.session_of(&sandbox).await?;
            let new = snapshot.as_ref().filter(|snapshot| before.as_ref() != Some(&snapshot.id));
            let findings = new.map(|snapshot| snapshot.findings.clone()).unwrap_or_default();
            let snapshot = snapshot.map(|snapshot| this.references.sized(snapshot));
            Ok(Stopped { sandbox, session, snapshot, findings })
        })
        .await
    }

    /// The record of a session of the sandbox, if it is over. In its turn no other can be under way.
    async fn ended_session(&self, sandbox: &Sandbox, id: &SessionId) -> Result<Option<Session>> {
        if self.turns.live(&sandbox.id).is_some_and(|live| live.session().id == *id) {
            return Ok(None);
        }
        let found = self.db.session(id).await?.filter(|session| session.sandbox == sandbox.id);
        let found = found.ok_or_else(|| Error::NoSession(id.clone()))?;
        // What broke off and is not sealed yet is ended now.
        let broken = found.ended_at.is_none() && sandbox.session.as_ref() == Some(id);
        Ok(Some(found).filter(|_| !broken))
    }

    pub(in crate::engine) async fn update(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        id: &SandboxId,
        name: &Name,
        mut patch: Patch,
    ) -> Result<Sandbox> {
        let mut sandbox = self.reread(slot, id, name).await?;
        if patch.image.as_ref().is_some_and(|image| *image != sandbox.config.image) {
            return Err(Error::invalid(
                "image",
                "a sandbox stays on the image it was created from; create another one",
            ));
        }
        self.check_machine(slot, &sandbox, &patch).await?;
        let timeout_changed = patch.session_timeout.is_some() && !patch.next_session;
        let mounts_changed = patch.mounts.is_some();
        let (policy_changed, at_once) = (patch.network.is_some(), !patch.next_session);
        self.network.seal_patch(&sandbox.project, &mut patch)?;
        let services = sandbox.config.services.clone();
        let ports = sandbox.config.ports.clone();
        let secrets_changed = patch.secrets.is_some() || patch.tags.is_some();
        let disk_changed = patch.disk.is_some();
        let rules = |config: &Config| (config.guard.clone(), config.resources.disk);
        let before = rules(&sandbox.config);
        sandbox.config = patch.apply(sandbox.config)?.with_defaults_for(&sandbox.project);
        sandbox.rules_as_made &= rules(&sandbox.config) == before;
        self.check_driver(&sandbox.config, None)?;
        if mounts_changed {
            self.storage.drives.check_drives(&sandbox.project, &sandbox.config.mounts).await?;
        }
        if secrets_changed {
            self.secrets.check_secret_uses(&sandbox.project, &sandbox.config)?;
        }
        // Invalid requests are refused before anything has changed.
        let rules_changed = policy_changed || secrets_changed;
        if rules_changed {
            self.network.rules(&sandbox)?;
        }
        self.records.record(&mut sandbox, Durability::Synced).await?;
        self.context.events.updated(&ports, &sandbox);
        if let Some(live) = slot.live() {
            live.set_sandbox(sandbox.clone());
            if disk_changed {
                self.integrity.limits.limits_changed(&live).await;
            }
            if secrets_changed {
                self.secrets.give_brokered(&live).await?;
            }
            if policy_changed && at_once {
                self.network.policy_changed(&live, sandbox.config.network.clone()).await;
            } else if secrets_changed {
                self.network.rules_changed(&live).await;
            }
            if timeout_changed {
                let timeout = sandbox.config.session_timeout;
                let session = live.change_session(|session| {
                    session.deadline = timeout.and_then(|span| after(session.started_at, span));
                });
                self.records.keep_session(&session).await?;
            }
            if sandbox.config.services != services {
                self.sessions.reconcile_services(&live);
            }
        }
        self.storage.snapshots.retain(&sandbox).await?;
        Ok(sandbox)
    }

    /// Refuses changes that the stored memory of a sandbox does not allow.
    async fn check_machine(&self, slot: &Slot, sandbox: &Sandbox, patch: &Patch) -> Result<()> {
        let config = &sandbox.config;
        let other_driver = patch.driver.as_ref().is_some_and(|driver| *driver != config.driver);
        if other_driver && (slot.live().is_some() || sandbox.open_layer().is_some()) {
            return Err(Error::DriverInUse(sandbox.name.clone()));
        }
        let current = self.records.current_snapshot(sandbox).await?;
        let kept = slot.live().is_none() && current.is_some_and(|current| current.has_memory());
        if !kept {
            return Ok(());
        }
        let sizes = config.resources;
        let other_size = patch.memory.is_some_and(|memory| memory != sizes.memory)
            || patch.millicpus.is_some_and(|millicpus| millicpus != sizes.millicpus)
            || patch.disk.is_some_and(|disk| disk != sizes.disk);
        let drives = patch.mounts.as_ref().is_some_and(|mounts| !mounts.is_empty());
        let what = match (other_driver, other_size, drives) {
            (true, ..) => "only its current driver can use",
            (_, true, _) => "only a machine of the current size can use",
            (.., true) => "cannot be combined with drives",
            _ => return Ok(()),
        };
        Err(Error::HoldsMemory { name: sandbox.name.clone(), what: what.to_owned() })
    }
}

pub(in crate::engine) fn expect_generation(sandbox: &Sandbox, expected: Option<u64>) -> Result<()> {
    match expected {
        Some(expected) if expected != sandbox.generation => Err(Error::Generation {
            name: sandbox.name.clone(),
            expected,
            found: sandbox.generation,
        }),
        _ => Ok(()),
    }
}
