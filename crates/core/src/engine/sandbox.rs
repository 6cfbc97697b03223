//! What callers ask of a sandbox as a whole: create, get, list, start, stop, update, delete, fork,
//! checkpoint, roll back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::error::NoSuch;
use super::lifecycle::{self, Command as Asked, Phase};
use super::live::{Hold, Live};
use super::seal::Wanted;
use super::session::require_session;
use super::slot::Slot;
use super::snapshots::checked_expiry;
use super::space::Sized;
use super::{
    Checkpoint, Create, Delete, Deleted, Engine, Error, Fork, Forks, Inner, Opened, Result,
    RolledBack, Stop, Stopped, Tree, WakeMode, Wish, after,
};
use tokio::sync::OwnedRwLockReadGuard;

use crate::db::{DbError, Filter, Owner, Page, Paged, Tombstones};
use crate::model::{
    Change, Ending, Name, Patch, Sandbox, SandboxId, Session, SessionEnd, SessionId, Snapshot,
    SnapshotId, SnapshotKind,
};
use crate::store::Durability;

/// What a sandbox that is woken may stand on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ground {
    /// What it kept, or its image if that is nothing.
    Any,
    /// What it kept.
    Kept,
}

impl Engine {
    /// Makes a sandbox, or hands out the one of that name if asked to.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NameTaken`] when there is one and it was not to be handed out.
    pub async fn create(
        &self,
        project: &Name,
        request: Create,
        idempotency: Option<String>,
    ) -> Result<Opened> {
        self.inner.require_project(project)?;
        let asked = format!("create {request:?}");
        let key = idempotency.clone();
        self.inner.once(project, idempotency, asked, self.inner.create(project, request, key)).await
    }

    /// Finds a sandbox. Never wakes it.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`] when there is none of that name.
    pub async fn get(&self, project: &Name, name: &Name) -> Result<Opened> {
        let sandbox = self.inner.find(project, name).await?;
        // While the disk hangs, a session that has just begun is in memory nowhere. Nobody waits for it.
        let session = tokio::time::timeout(Duration::from_secs(1), self.inner.session_of(&sandbox));
        let session = match session.await {
            Ok(Err(Error::Db(DbError::Slow { .. }))) | Err(_) => None,
            Ok(found) => found?,
        };
        let sandbox = self.inner.last_used(sandbox);
        Ok(Opened { sandbox, session, created: false, resumed: false })
    }

    /// Finds a sandbox when nothing is being done to it. Never wakes it.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`] when there is none of that name, or no more.
    pub async fn get_settled(&self, project: &Name, name: &Name) -> Result<Opened> {
        let id = self.inner.find(project, name).await?.id;
        self.inner.turn(id, |_, _| async { Ok(()) }).await?;
        self.get(project, name).await
    }

    /// Lists sandboxes, newest first.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when the index cannot be read.
    pub async fn list(
        &self,
        project: &Name,
        filter: &Filter,
        page: &Page,
    ) -> Result<Paged<Sandbox>> {
        let mut found = self.inner.db.sandboxes(Some(project), filter, page).await?;
        let now = |one| self.inner.last_used(self.inner.as_known(one));
        found.items = found.items.into_iter().map(now).collect();
        found.items.retain(|sandbox| sandbox.phase() != Phase::Deleted);
        Ok(found)
    }

    /// Starts a sandbox where it was. Of a running one: hands it out.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Generation`] when it is not at the generation that was expected.
    pub async fn start(
        &self,
        project: &Name,
        name: &Name,
        expect_generation: Option<u64>,
    ) -> Result<Opened> {
        let sandbox = self.inner.find(project, name).await?;
        let (live, resumed) =
            self.inner.wake(&sandbox.id, name, expect_generation, Ground::Any).await?;
        let sandbox = self.inner.last_used((*live.sandbox()).clone());
        Ok(Opened { sandbox, session: Some(live.session()), created: false, resumed })
    }

    /// Starts a sandbox where it was, and nowhere else: one that kept nothing of its last session is
    /// refused, where [`start`](Self::start) begins again from the image.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NothingKept`] for such a one.
    pub async fn resume(&self, project: &Name, name: &Name) -> Result<Opened> {
        let id = self.inner.find(project, name).await?.id;
        let (live, resumed) = self.inner.wake(&id, name, None, Ground::Kept).await?;
        let sandbox = self.inner.last_used((*live.sandbox()).clone());
        Ok(Opened { sandbox, session: Some(live.session()), created: false, resumed })
    }

    /// Ends a sandbox's session and keeps what it wrote. Of a stopped one: tells what it stands on.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when there is no room to seal, and the session goes on.
    pub async fn stop(
        &self,
        project: &Name,
        name: &Name,
        request: Stop,
        idempotency: Option<String>,
    ) -> Result<Stopped> {
        let asked = format!("stop {name} {request:?}");
        let work = self.inner.stop(project, name, request);
        self.inner.once(project, idempotency, asked, work).await
    }

    /// Changes a sandbox's configuration. Limits, environment, hooks and drives take effect with the next
    /// session; timeouts, tags and the rest at once.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Config`] and changes nothing when a field is wrong.
    pub async fn update(&self, project: &Name, name: &Name, patch: Patch) -> Result<Sandbox> {
        let id = self.inner.find(project, name).await?.id;
        let name = name.clone();
        self.inner
            .turn(id.clone(), move |inner, slot| async move {
                let sandbox = inner.update(&slot, &id, &name, patch).await?;
                Ok(inner.last_used(sandbox))
            })
            .await
    }

    /// Deletes a sandbox, from whatever state it is in.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`] when there is none of that name, and [`Error::DrivesUnsaved`] when it would take with it
    /// what it wrote to drives and was not forced: it is `failed` then, and has all it had.
    pub async fn delete(
        &self,
        project: &Name,
        name: &Name,
        request: Delete,
        idempotency: Option<String>,
    ) -> Result<Deleted> {
        let asked = format!("delete {name} {request:?}");
        let work = async {
            // A delete that broke off is found too, and finished.
            let found = self.inner.db.sandbox(project, name).await?;
            let id = found.ok_or_else(|| self.inner.no_such(project, name))?.id;
            let gone = name.clone();
            let deleted = self.inner.turn(id.clone(), move |inner, slot| async move {
                let sandbox = inner
                    .db
                    .sandbox_by_id(&id)
                    .await?
                    .ok_or_else(|| Error::NoSandbox(gone.into()))?;
                inner.erase(&slot, sandbox, request).await
            });
            let deleted = deleted.await?;
            self.inner.collect_soon();
            Ok(deleted)
        };
        self.inner.once(project, idempotency, asked, work).await
    }

    /// Makes a new sandbox that starts where another one is. A running source is checkpointed
    /// first: a fork never starts from something older than what was asked for.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NameTaken`] or [`Error::Generation`] and makes nothing.
    pub async fn fork(
        &self,
        project: &Name,
        name: &Name,
        request: Fork,
        idempotency: Option<String>,
    ) -> Result<Opened> {
        let asked = format!("fork {name} {request:?}");
        let key = idempotency.clone();
        self.inner
            .once(project, idempotency, asked, self.inner.fork(project, name, request, key))
            .await
    }

    /// Makes [`Fork::count`] sandboxes that all start where another one is, from one capture of it. What of them
    /// could not be made is told by name; the others are there.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when the source could not be captured, and makes nothing.
    pub async fn fork_many(
        &self,
        project: &Name,
        name: &Name,
        request: Fork,
        idempotency: Option<String>,
    ) -> Result<Forks> {
        let asked = format!("fork {name} {request:?}");
        let key = idempotency.clone();
        self.inner
            .once(project, idempotency, asked, self.inner.fork_many(project, name, request, key))
            .await
    }

    /// Takes a snapshot without ending the session. Of a stopped sandbox: its current one, or one of its image if it kept
    /// nothing so far.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when there is no room, [`Error::SessionEnded`] when another session is meant.
    pub async fn checkpoint(
        &self,
        project: &Name,
        name: &Name,
        request: Checkpoint,
    ) -> Result<Sized<Snapshot>> {
        let Checkpoint { label, method, expires, session } = request;
        if label
            .as_ref()
            .is_some_and(|label| label.chars().count() > 256 || label.chars().any(char::is_control))
        {
            return Err(Error::invalid("label", "at most 256 characters, on one line"));
        }
        let expiry = checked_expiry(expires)?;
        let wanted = Wanted { label, method, expiry, findings: Vec::new() };
        let id = self.inner.find(project, name).await?.id;
        let name = name.clone();
        let work = self.inner.turn(id.clone(), move |inner, slot| async move {
            let mut sandbox = inner.reread(&slot, &id, &name).await?;
            if let Some(meant) = session {
                match slot.live() {
                    Some(live) => require_session(&live.session(), Some(&meant))?,
                    None => return Err(Error::SessionEnded { session: meant }),
                }
            }
            let kind = SnapshotKind::Checkpoint;
            let now = inner.snapshot_now(&slot, &mut sandbox, kind, wanted.clone()).await?;
            let snapshot = match now {
                Some(snapshot) => snapshot,
                None => inner.snapshot_image(&mut sandbox, kind, wanted).await?,
            };
            inner.try_to_retain(&sandbox).await;
            Ok(snapshot)
        });
        let snapshot = work.await?;
        Ok(self.inner.sized(snapshot))
    }

    /// Puts a sandbox back to a snapshot. A running one is stopped, and what it wrote is kept as a
    /// snapshot of its own, so that this can be undone.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSnapshot`] or [`Error::Generation`] and changes nothing.
    pub async fn rollback(
        &self,
        project: &Name,
        name: &Name,
        to: &SnapshotId,
        expect_generation: Option<u64>,
    ) -> Result<RolledBack> {
        let target = self.inner.find_snapshot(project, to).await?;
        let id = self.inner.find(project, name).await?.id;
        let name = name.clone();
        let work = self.inner.turn(id.clone(), move |inner, slot| async move {
            inner.rollback(&slot, &id, &name, &target, expect_generation).await
        });
        work.await
    }

    /// The sandboxes and snapshots that a sandbox comes from, and those that come from it.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`] when there is none of that name.
    pub async fn lineage(&self, project: &Name, name: &Name) -> Result<Tree> {
        let start = self.inner.find(project, name).await?;
        let everything =
            self.inner.db.sandboxes(Some(project), &Filter::default(), &Page::all()).await?.items;
        let mut related: BTreeSet<SandboxId> = BTreeSet::from([start.id]);
        loop {
            let before = related.len();
            for sandbox in &everything {
                let Some(from) = &sandbox.forked_from else { continue };
                if related.contains(&sandbox.id) || related.contains(&from.sandbox) {
                    related.extend([sandbox.id.clone(), from.sandbox.clone()]);
                }
            }
            if related.len() == before {
                break;
            }
        }
        let mut sandboxes: Vec<Sandbox> =
            everything.into_iter().filter(|s| related.contains(&s.id)).collect();
        sandboxes.sort_by(|a, b| a.id.cmp(&b.id));
        let mut snapshots: BTreeMap<SnapshotId, Snapshot> = BTreeMap::new();
        for id in &related {
            let owner = Owner::Sandbox(id);
            let found = self.inner.db.snapshots(owner, Tombstones::Without, &Page::all()).await?;
            for snapshot in found.items {
                snapshots.insert(snapshot.id.clone(), snapshot);
            }
        }
        let mut snapshots: Vec<Snapshot> = snapshots.into_values().collect();
        snapshots.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
        Ok(Tree { sandboxes, snapshots })
    }
}

impl Inner {
    pub(super) async fn find(&self, project: &Name, name: &Name) -> Result<Sandbox> {
        let found = self.db.sandbox(project, name).await?;
        found
            .map(|sandbox| self.as_known(sandbox))
            .filter(|sandbox| sandbox.phase() != Phase::Deleted)
            .ok_or_else(|| self.no_such(project, name))
    }

    /// Why a sandbox is not there.
    fn no_such(&self, project: &Name, name: &Name) -> Error {
        if let Some(lost) = self.lost_names.get(project, name) {
            return Error::Lost(lost);
        }
        Error::NoSandbox(NoSuch { name: name.clone(), trashed: self.in_trash(project, name) })
    }

    /// The sandbox as it is now, in its turn.
    ///
    /// In a turn nothing else is under way, so a record that says so without a machine is what a
    /// failure left that could not even be written down: it is `failed`, and goes on from there.
    pub(super) async fn reread(&self, slot: &Slot, id: &SandboxId, name: &Name) -> Result<Sandbox> {
        let found = self.db.sandbox_by_id(id).await?;
        let mut sandbox = found
            .map(|sandbox| self.as_known(sandbox))
            .filter(|sandbox| sandbox.phase() != Phase::Deleted)
            .ok_or_else(|| Error::NoSandbox(name.clone().into()))?;
        let under_way = [Phase::Starting, Phase::Running, Phase::Stopping];
        if slot.live().is_none() && under_way.contains(&sandbox.phase()) {
            sandbox.transition(Change::Lost)?;
        }
        Ok(sandbox)
    }

    pub(super) async fn session_of(&self, sandbox: &Sandbox) -> Result<Option<Session>> {
        if let Some(live) = self.live(&sandbox.id) {
            return Ok(Some(live.session()));
        }
        match &sandbox.session {
            Some(id) => Ok(self.db.session(id).await?),
            None => Ok(None),
        }
    }

    /// A running sandbox, woken if need be and allowed.
    pub(super) async fn awake(
        self: &Arc<Self>,
        project: &Name,
        name: &Name,
        wake: &WakeMode,
    ) -> Result<(Arc<Live>, bool)> {
        let sandbox = self.find(project, name).await?;
        self.recovered(&sandbox.id).await?;
        match (self.live(&sandbox.id), wake) {
            (Some(live), WakeMode::Session(id)) if live.session().id != *id => {
                Err(Error::SessionEnded { session: id.clone() })
            }
            (Some(live), _) => Ok((live, false)),
            (None, WakeMode::Wake) => self.wake(&sandbox.id, name, None, Ground::Any).await,
            (None, WakeMode::IfRunning) => Err(Error::NotRunning(name.clone())),
            (None, WakeMode::Session(id)) => Err(Error::SessionEnded { session: id.clone() }),
        }
    }

    /// A sandbox with the time of its last use. Its record only knows when its session began.
    pub(super) fn last_used(&self, mut sandbox: Sandbox) -> Sandbox {
        if let Some(live) = self.live(&sandbox.id) {
            sandbox.used_at = sandbox.used_at.max(live.used_at());
        }
        sandbox
    }

    /// A running sandbox whose root stays still while the answer lives, woken if need be and allowed.
    pub(super) async fn enter(
        self: &Arc<Self>,
        project: &Name,
        name: &Name,
        wake: &WakeMode,
    ) -> Result<(Arc<Live>, (Hold, OwnedRwLockReadGuard<()>))> {
        for _ in 0..5 {
            let (live, _) = self.awake(project, name, wake).await?;
            match live.enter().await {
                Ok(inside) => return Ok((live, inside)),
                Err(error) => wake.may_try_again(error)?,
            }
        }
        Err(Error::SessionOver)
    }

    /// Starts a sandbox in its turn; the second answer tells whether this call did it.
    pub(super) async fn wake(
        self: &Arc<Self>,
        id: &SandboxId,
        name: &Name,
        expect: Option<u64>,
        ground: Ground,
    ) -> Result<(Arc<Live>, bool)> {
        let (id, name) = (id.clone(), name.clone());
        self.turn(id.clone(), move |inner, slot| async move {
            let sandbox = inner.reread(&slot, &id, &name).await?;
            expect_generation(&sandbox, expect)?;
            if let Some(live) = slot.live() {
                return Ok((live, false));
            }
            // Asked in its turn: a stop that was under way has kept, or not, by now.
            let nothing = !sandbox.config.persistent && sandbox.current.is_none();
            if ground == Ground::Kept
                && nothing
                && sandbox.missing.is_none()
                && sandbox.open_layer().is_none()
                && sandbox.session.is_some()
            {
                return Err(Error::NothingKept(name));
            }
            Ok((inner.boot(&slot, sandbox, false).await?, true))
        })
        .await
    }

    async fn stop(self: &Arc<Self>, project: &Name, name: &Name, request: Stop) -> Result<Stopped> {
        let expiry = checked_expiry(request.expires)?;
        request.decision.check()?;
        let id = self.find(project, name).await?.id;
        let name = name.clone();
        self.turn(id.clone(), move |inner, slot| async move {
            let mut sandbox = inner.reread(&slot, &id, &name).await?;
            if let Some(meant) = &request.session
                && let Some(over) = inner.ended_session(&sandbox, meant).await?
            {
                let snapshot = match &over.snapshot {
                    Some(id) => inner.db.snapshot_record(id).await?,
                    None => None,
                };
                let snapshot = snapshot.map(|snapshot| inner.sized(snapshot));
                return Ok(Stopped {
                    sandbox,
                    session: Some(over),
                    snapshot,
                    findings: Vec::new(),
                });
            }
            let wish = lifecycle::command(sandbox.phase(), Asked::Stop)
                .map_err(|_| Error::Gone(name.clone()))?;
            let before = sandbox.current.clone();
            if sandbox.phase() == Phase::Paused {
                // Its files are on a disk that only its own kernel reads, and its processes may want to end well.
                let live = inner.boot(&slot, sandbox, false).await?;
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
                let always = request.snapshot == Wish::Always;
                let ending = Ending { end, kind, always, method: request.method, expiry };
                let snapshot = inner.settle(&slot, &mut sandbox, ending).await?;
                inner.after_stop(&sandbox);
                snapshot
            } else {
                inner.current_snapshot(&sandbox).await?
            };
            let session = inner.session_of(&sandbox).await?;
            let new = snapshot.as_ref().filter(|snapshot| before.as_ref() != Some(&snapshot.id));
            let findings = new.map(|snapshot| snapshot.findings.clone()).unwrap_or_default();
            let snapshot = snapshot.map(|snapshot| inner.sized(snapshot));
            Ok(Stopped { sandbox, session, snapshot, findings })
        })
        .await
    }

    /// The record of a session of the sandbox, if it is over. In its turn no other can be under way.
    async fn ended_session(&self, sandbox: &Sandbox, id: &SessionId) -> Result<Option<Session>> {
        if self.live(&sandbox.id).is_some_and(|live| live.session().id == *id) {
            return Ok(None);
        }
        let found = self.db.session(id).await?.filter(|session| session.sandbox == sandbox.id);
        let found = found.ok_or_else(|| Error::NoSession(id.clone()))?;
        // What broke off and is not sealed yet is ended now.
        let broken = found.ended_at.is_none() && sandbox.session.as_ref() == Some(id);
        Ok(Some(found).filter(|_| !broken))
    }

    async fn update(
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
        self.seal_patch(&sandbox.project, &mut patch)?;
        let services = sandbox.config.services.clone();
        let ports = sandbox.config.ports.clone();
        let secrets_changed = patch.secrets.is_some() || patch.tags.is_some();
        let disk_changed = patch.disk.is_some();
        sandbox.config = patch.apply(sandbox.config)?.with_defaults_for(&sandbox.project);
        self.check_driver(&sandbox.config, None)?;
        if mounts_changed {
            self.check_drives(&sandbox.project, &sandbox.config.mounts).await?;
        }
        if secrets_changed {
            self.check_secret_uses(&sandbox.project, &sandbox.config)?;
        }
        // Whatever does not hold is told before anything has changed.
        let rules_changed = policy_changed || secrets_changed;
        if rules_changed {
            self.rules(&sandbox)?;
        }
        self.record(&mut sandbox, Durability::Synced).await?;
        self.events.updated(&ports, &sandbox);
        if let Some(live) = slot.live() {
            live.set_sandbox(sandbox.clone());
            if disk_changed {
                self.limits_changed(&live).await;
            }
            if secrets_changed {
                self.give_brokered(&live).await?;
            }
            if policy_changed && at_once {
                self.policy_changed(&live, sandbox.config.network.clone()).await;
            } else if secrets_changed {
                self.rules_changed(&live).await;
            }
            if timeout_changed {
                let timeout = sandbox.config.session_timeout;
                let session = live.change_session(|session| {
                    session.deadline = timeout.and_then(|span| after(session.started_at, span));
                });
                self.keep_session(&session).await?;
            }
            if sandbox.config.services != services {
                self.reconcile_services(&live);
            }
        }
        self.retain(&sandbox).await?;
        Ok(sandbox)
    }
}

impl Inner {
    /// Refuses changes that what a sandbox is kept as cannot follow.
    async fn check_machine(&self, slot: &Slot, sandbox: &Sandbox, patch: &Patch) -> Result<()> {
        let config = &sandbox.config;
        let other_driver = patch.driver.as_ref().is_some_and(|driver| *driver != config.driver);
        if other_driver && (slot.live().is_some() || sandbox.open_layer().is_some()) {
            return Err(Error::DriverInUse(sandbox.name.clone()));
        }
        let current = self.current_snapshot(sandbox).await?;
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
            (true, ..) => "is of use to its own driver alone",
            (_, true, _) => "is of a machine of this size",
            (.., true) => "has no place for drives",
            _ => return Ok(()),
        };
        Err(Error::HoldsMemory { name: sandbox.name.clone(), what: what.to_owned() })
    }
}

pub(super) fn expect_generation(sandbox: &Sandbox, expected: Option<u64>) -> Result<()> {
    match expected {
        Some(expected) if expected != sandbox.generation => Err(Error::Generation {
            name: sandbox.name.clone(),
            expected,
            found: sandbox.generation,
        }),
        _ => Ok(()),
    }
}
