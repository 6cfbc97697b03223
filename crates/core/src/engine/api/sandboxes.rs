//! Sandboxes as a whole: create, get, list, start, stop, pause, update, delete, fork, checkpoint, roll back.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::db::{DbError, Filter, Owner, Page, Paged, Tombstones};
use crate::engine::api::forks::with_current_names;
use crate::engine::lifecycle::sandbox::{WakeFrom, expect_generation};
use crate::engine::lifecycle::stop::SnapshotOptions;
use crate::engine::lifecycle::why::{Why, holding, notices, reason, waking};
use crate::engine::machine::capabilities::{no_memory, pausing};
use crate::engine::observe::meters::Operation;
use crate::engine::references::Sized;
use crate::engine::session::sessions::require_session;
use crate::engine::snapshots::snapshot_records::checked_expiry;
use crate::engine::{
    Checkpoint, Create, Delete, Deleted, Engine, Error, Fork, Forks, Opened, Paused, Result,
    RolledBack, Stop, Stopped, Tree,
};
use crate::model::lifecycle::{LifecycleCommand, Phase};
use crate::model::{
    Name, Patch, Sandbox, SandboxId, SessionEnd, Snapshot, SnapshotId, SnapshotKind, lifecycle,
};

impl Engine {
    /// Explains where a sandbox is. Never wakes it.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`](crate::engine::Error::NoSandbox) when there is none of that name.
    pub async fn why(&self, project: &Name, name: &Name) -> Result<Why> {
        let sandbox = self.parts.lifecycle.find(project, name).await?;
        let session = self.parts.lifecycle.session_of(&sandbox).await?;
        let snapshot = self.parts.lifecycle.records.current_snapshot(&sandbox).await?;
        let live = self.parts.turns.live(&sandbox.id);
        let (waking, holding) = match &live {
            Some(live) => (self.parts.lifecycle.sleeping(live, &sandbox), holding(live)),
            None => (waking(&sandbox), Vec::new()),
        };
        Ok(Why {
            phase: sandbox.phase(),
            since: sandbox.phase_at,
            reason: reason(&sandbox, session.as_ref(), snapshot.as_ref()),
            waking,
            holding,
            notices: notices(&sandbox, session.as_ref(), live.as_deref()),
        })
    }

    /// Keeps a sandbox's memory, processes and files, and takes it off the host. The next call that needs it wakes it where it
    /// was. For a paused one: returns what it wakes from.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoMemory`] for one whose driver keeps none, [`Error::NotRunning`] for one that has none, and
    /// [`Error::Guarded`] when a secret is in it. It runs on then, as it does after any other error.
    pub async fn pause(&self, project: &Name, name: &Name, expect: Option<u64>) -> Result<Paused> {
        let id = self.parts.lifecycle.find(project, name).await?.id;
        let name = name.clone();
        let work = self.parts.lifecycle.turn(id.clone(), move |lifecycle, slot| async move {
            let mut sandbox = lifecycle.reread(&slot, &id, &name).await?;
            expect_generation(&sandbox, expect)?;
            if pausing(&*lifecycle.context.driver(&sandbox.config.driver)?).is_none() {
                return Err(no_memory(&sandbox));
            }
            let refused = |refused| match refused {
                lifecycle::Refused::Gone => Error::Gone(name.clone()),
                _ => Error::NotRunning(name.clone()),
            };
            let (_, effect) =
                lifecycle::command(sandbox.phase(), LifecycleCommand::Pause).map_err(refused)?;
            let snapshot = match effect {
                Some(_) => {
                    let snapshot =
                        lifecycle.pause_session(&slot, &mut sandbox, SessionEnd::Paused).await?;
                    lifecycle.storage.collector.collect_soon();
                    Some(snapshot)
                }
                None => lifecycle.records.current_snapshot(&sandbox).await?,
            };
            let session = lifecycle.session_of(&sandbox).await?;
            let snapshot = snapshot.map(|snapshot| lifecycle.references.sized(snapshot));
            Ok(Paused { sandbox, session, snapshot })
        });
        work.await
    }

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
        self.parts.tenancy.require_project(project)?;
        let mut timing = self.parts.context.meters.time(Operation::Create, "");
        let asked = format!("create {request:?}");
        let key = idempotency.clone();
        let opened = self
            .parts
            .tenancy
            .idempotent(
                project,
                idempotency,
                asked,
                self.parts.lifecycle.create(project, request, key),
            )
            .await?;
        timing.of(&opened.sandbox.config.driver);
        timing.ok();
        Ok(self.with_usage(opened).await)
    }

    /// Finds a sandbox. Never wakes it.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`] when there is none of that name.
    pub async fn get(&self, project: &Name, name: &Name) -> Result<Opened> {
        let sandbox = self.parts.lifecycle.find(project, name).await?;
        // While the disk hangs, a session that has just begun is not in memory. No caller waits for
        // it.
        let session =
            tokio::time::timeout(Duration::from_secs(1), self.parts.lifecycle.session_of(&sandbox));
        let session = match session.await {
            Ok(Err(Error::Db(DbError::Slow { .. }))) | Err(_) => None,
            Ok(found) => found?,
        };
        let sandbox = self.parts.lifecycle.last_used(sandbox);
        Ok(Opened { sandbox, session, created: false, resumed: false })
    }

    /// Finds a sandbox when nothing is being done to it. Never wakes it.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`] when there is none of that name, or no more.
    pub async fn get_settled(&self, project: &Name, name: &Name) -> Result<Opened> {
        let id = self.parts.lifecycle.find(project, name).await?.id;
        self.parts.lifecycle.turn(id, |_, _| async { Ok(()) }).await?;
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
        let mut found = self.parts.context.db.sandboxes(Some(project), filter, page).await?;
        let now = |one| self.parts.lifecycle.last_used(self.parts.lifecycle.records.as_known(one));
        found.items = found.items.into_iter().map(now).collect();
        found.items.retain(|sandbox| sandbox.phase() != Phase::Deleted && !sandbox.internal);
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
        let sandbox = self.parts.lifecycle.find(project, name).await?;
        let (live, resumed) =
            self.parts.lifecycle.wake(&sandbox.id, name, expect_generation, WakeFrom::Any).await?;
        let sandbox = self.parts.lifecycle.last_used((*live.sandbox()).clone());
        let session = Some(live.session());
        Ok(self.with_usage(Opened { sandbox, session, created: false, resumed }).await)
    }

    /// Starts a sandbox where it was, and nowhere else: one that kept nothing of its last session is
    /// refused, where [`start`](Self::start) begins again from the image.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NothingKept`] for such a one.
    pub async fn resume(&self, project: &Name, name: &Name) -> Result<Opened> {
        let id = self.parts.lifecycle.find(project, name).await?.id;
        let (live, resumed) = self.parts.lifecycle.wake(&id, name, None, WakeFrom::Kept).await?;
        let sandbox = self.parts.lifecycle.last_used((*live.sandbox()).clone());
        let session = Some(live.session());
        Ok(self.with_usage(Opened { sandbox, session, created: false, resumed }).await)
    }

    /// Ends a sandbox's session and keeps what it wrote. For a stopped one: returns what it stands
    /// on.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when there is no room to seal, and the session continues.
    pub async fn stop(
        &self,
        project: &Name,
        name: &Name,
        request: Stop,
        idempotency: Option<String>,
    ) -> Result<Stopped> {
        let asked = format!("stop {name} {request:?}");
        let work = self.parts.lifecycle.stop(project, name, request);
        self.parts.tenancy.idempotent(project, idempotency, asked, work).await
    }

    /// Changes a sandbox's configuration. Limits, environment, hooks and drives take effect with the next
    /// session; timeouts, tags and the rest at once.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Config`] and changes nothing when a field is wrong.
    pub async fn update(&self, project: &Name, name: &Name, patch: Patch) -> Result<Sandbox> {
        let id = self.parts.lifecycle.find(project, name).await?.id;
        let name = name.clone();
        self.parts
            .lifecycle
            .turn(id.clone(), move |lifecycle, slot| async move {
                let sandbox = lifecycle.update(&slot, &id, &name, patch).await?;
                Ok(lifecycle.last_used(sandbox))
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
            let found = self.parts.context.db.sandbox(project, name).await?;
            let found = found.filter(|sandbox| !sandbox.internal);
            let id = found.ok_or_else(|| self.parts.lifecycle.no_such(project, name))?.id;
            if request.only.as_ref().is_some_and(|only| *only != id) {
                return Err(Error::UsedMeanwhile(name.clone()));
            }
            let gone = name.clone();
            let deleted =
                self.parts.lifecycle.turn(id.clone(), move |lifecycle, slot| async move {
                    let sandbox = lifecycle
                        .db
                        .sandbox_by_id(&id)
                        .await?
                        .ok_or_else(|| Error::NoSandbox(gone.into()))?;
                    if let Some(since) = request.unused_since {
                        let is_at_rest = matches!(
                            sandbox.phase(),
                            Phase::Stopped | Phase::Failed | Phase::Deleted
                        );
                        if slot.live().is_some() || !is_at_rest || sandbox.used_at > since {
                            return Err(Error::UsedMeanwhile(sandbox.name));
                        }
                    }
                    if let Some(snapshot) = &request.only_at
                        && !lifecycle.has_only(&slot, &sandbox, snapshot).await?
                    {
                        return Err(Error::UsedMeanwhile(sandbox.name));
                    }
                    lifecycle.delete_sandbox(&slot, sandbox, request).await
                });
            let deleted = deleted.await?;
            self.parts.storage.collector.collect_soon();
            Ok(deleted)
        };
        self.parts.tenancy.idempotent(project, idempotency, asked, work).await
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
        let mut timing = self.parts.context.meters.time(Operation::Fork, "");
        let asked = format!("fork {name} {request:?}");
        let key = idempotency.clone();
        let opened = self
            .parts
            .tenancy
            .idempotent(
                project,
                idempotency,
                asked,
                self.parts.lifecycle.fork(project, name, request, key),
            )
            .await?;
        timing.of(&opened.sandbox.config.driver);
        timing.ok();
        Ok(self.with_usage(opened).await)
    }

    /// Makes [`Fork::count`] sandboxes that all start where another one is, from one capture of it.
    /// Those that could not be made are reported by name; the others exist.
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
        let mut timing = self.parts.context.meters.time(Operation::Fork, "");
        let asked = format!("fork {name} {request:?}");
        let key = idempotency.clone();
        let mut forks = self
            .parts
            .tenancy
            .idempotent(
                project,
                idempotency,
                asked,
                self.parts.lifecycle.fork_many(project, name, request, key),
            )
            .await?;
        if let Some(first) = forks.made.first() {
            timing.of(&first.sandbox.config.driver);
            timing.ok();
        }
        for one in &mut forks.made {
            *one = self.with_usage(one.clone()).await;
        }
        Ok(forks)
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
        let wanted = SnapshotOptions { label, method, expiry, findings: Vec::new() };
        let found = self.parts.lifecycle.find(project, name).await?;
        let timing = self.parts.context.meters.time(Operation::Checkpoint, &found.config.driver);
        let (id, name) = (found.id, name.clone());
        let work = self.parts.lifecycle.turn(id.clone(), move |lifecycle, slot| async move {
            let mut sandbox = lifecycle.reread(&slot, &id, &name).await?;
            if let Some(meant) = session {
                match slot.live() {
                    Some(live) => require_session(&live.session(), Some(&meant))?,
                    None => return Err(Error::SessionEnded { session: meant }),
                }
            }
            let kind = SnapshotKind::Checkpoint;
            let now = lifecycle.snapshot_now(&slot, &mut sandbox, kind, wanted.clone()).await?;
            let snapshot = match now {
                Some(snapshot) => snapshot,
                None => lifecycle.snapshot_image(&mut sandbox, kind, wanted).await?,
            };
            lifecycle.storage.snapshots.try_to_retain(&sandbox).await;
            Ok(snapshot)
        });
        let snapshot = work.await?;
        timing.ok();
        Ok(self.parts.references.sized(snapshot))
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
        let target = self.parts.storage.snapshots.find_snapshot(project, to).await?;
        let id = self.parts.lifecycle.find(project, name).await?.id;
        let name = name.clone();
        let work = self.parts.lifecycle.turn(id.clone(), move |lifecycle, slot| async move {
            lifecycle.rollback(&slot, &id, &name, &target, expect_generation).await
        });
        work.await
    }

    /// The sandboxes and snapshots that a sandbox comes from, and those that come from it.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`] when there is none of that name.
    pub async fn lineage(&self, project: &Name, name: &Name) -> Result<Tree> {
        let start = self.parts.lifecycle.find(project, name).await?;
        let everything = self
            .parts
            .context
            .db
            .sandboxes(Some(project), &Filter::default(), &Page::all())
            .await?
            .items;
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
        let everything = with_current_names(everything);
        let mut sandboxes: Vec<Sandbox> =
            everything.iter().filter(|s| related.contains(&s.id)).cloned().collect();
        sandboxes.sort_by(|a, b| a.id.cmp(&b.id));
        let mut snapshots: BTreeMap<SnapshotId, Snapshot> = BTreeMap::new();
        for id in &related {
            let owner = Owner::Sandbox(id);
            let found =
                self.parts.context.db.snapshots(owner, Tombstones::Without, &Page::all()).await?;
            for snapshot in found.items {
                snapshots.insert(snapshot.id.clone(), snapshot);
            }
        }
        let mut snapshots: Vec<Snapshot> = snapshots.into_values().collect();
        snapshots.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
        let forks = self.forks_in_tree(project, &related, &everything, &snapshots);
        Ok(Tree { sandboxes, snapshots, forks })
    }
}
