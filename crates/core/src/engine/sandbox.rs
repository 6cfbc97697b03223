//! What callers ask of a sandbox as a whole: create, get, list, start, stop, update, delete, fork,
//! checkpoint, roll back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::lifecycle::{self, Command as Wish, Phase};
use super::live::Live;
use super::slot::Slot;
use super::space::Sized;
use super::{
    Create, Deleted, Engine, Error, Fork, IfExists, Inner, Opened, Result, RolledBack, Stopped,
    Tree, WakeMode,
};
use crate::db::{Filter, Page, Paged};
use crate::failpoint;
use crate::model::{
    Config, FORMAT, Image, ImageConfig, LayerId, Lineage, Name, Patch, Sandbox, SandboxId, Session,
    SessionEnd, Snapshot, SnapshotId, SnapshotKind, Span, now,
};
use crate::store::Durability;
use crate::store::image::{HOST, Reporter};

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
        let session = self.inner.session_of(&sandbox).await?;
        Ok(Opened { sandbox, session, created: false, resumed: false })
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
        found.items.retain(|sandbox| sandbox.phase != Phase::Deleted);
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
        let (live, resumed) = self.inner.wake(&sandbox.id, name, expect_generation).await?;
        let sandbox = (*live.sandbox()).clone();
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
        idempotency: Option<String>,
    ) -> Result<Stopped> {
        let work = self.inner.stop(project, name);
        self.inner.once(project, idempotency, format!("stop {name}"), work).await
    }

    /// Changes a sandbox's configuration. Limits, environment and hooks take effect with the next
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
                inner.update(&slot, &id, &name, patch).await
            })
            .await
    }

    /// Deletes a sandbox, from whatever state it is in.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`] when there is none of that name.
    pub async fn delete(
        &self,
        project: &Name,
        name: &Name,
        idempotency: Option<String>,
    ) -> Result<Deleted> {
        let work = async {
            let id = self.inner.find(project, name).await?.id;
            let gone = name.clone();
            let deleted = self.inner.turn(id.clone(), move |inner, slot| async move {
                let sandbox = inner.db.sandbox_by_id(&id).await?.ok_or(Error::NoSandbox(gone))?;
                inner.erase(&slot, sandbox).await
            });
            let deleted = deleted.await?;
            self.inner.collect_soon();
            Ok(deleted)
        };
        self.inner.once(project, idempotency, format!("delete {name}"), work).await
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

    /// Takes a snapshot without ending the session. Of a stopped sandbox: its current one.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when there is no room.
    pub async fn checkpoint(
        &self,
        project: &Name,
        name: &Name,
        label: Option<String>,
    ) -> Result<Sized<Snapshot>> {
        if label
            .as_ref()
            .is_some_and(|label| label.chars().count() > 256 || label.chars().any(char::is_control))
        {
            return Err(Error::invalid("label", "at most 256 characters, on one line"));
        }
        let id = self.inner.find(project, name).await?.id;
        let name = name.clone();
        let work = self.inner.turn(id.clone(), move |inner, slot| async move {
            let mut sandbox = inner.reread(&id, &name).await?;
            let snapshot =
                inner.snapshot_now(&slot, &mut sandbox, SnapshotKind::Checkpoint, label).await?;
            if slot.live().is_some() {
                inner.retain(&sandbox).await?;
            }
            snapshot.ok_or_else(|| {
                Error::invalid("sandbox", "it has never run: there is nothing to keep yet")
            })
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

    /// Lets the session under way last longer.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NotRunning`] when there is none.
    pub async fn extend(&self, project: &Name, name: &Name, by: Span) -> Result<Session> {
        let sandbox = self.inner.find(project, name).await?;
        let live = self.inner.live(&sandbox.id).ok_or_else(|| Error::NotRunning(name.clone()))?;
        if by.0 == 0 {
            return Err(Error::invalid("extend", "by more than 0"));
        }
        let more = jiff::SignedDuration::from_millis(i64::try_from(by.0).unwrap_or(i64::MAX));
        let session = live.change_session(|session| {
            let from = session.deadline.unwrap_or_else(now);
            session.deadline = from.checked_add(more).ok();
        });
        self.inner.keep_session(&session).await?;
        Ok(session)
    }

    /// Lists a sandbox's sessions, newest first.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`] when there is none of that name.
    pub async fn sessions(
        &self,
        project: &Name,
        name: &Name,
        page: &Page,
    ) -> Result<Paged<Session>> {
        let sandbox = self.inner.find(project, name).await?;
        let mut found = self.inner.db.sessions(&sandbox.id, page).await?;
        if let Some(live) = self.inner.live(&sandbox.id) {
            let now = live.session();
            found
                .items
                .iter_mut()
                .filter(|session| session.id == now.id)
                .for_each(|session| *session = now.clone());
        }
        Ok(found)
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
            for snapshot in
                self.inner.db.snapshots(Some(project), Some(id), &Page::all()).await?.items
            {
                snapshots.insert(snapshot.id.clone(), snapshot);
            }
        }
        let mut snapshots: Vec<Snapshot> = snapshots.into_values().collect();
        snapshots.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
        Ok(Tree { sandboxes, snapshots })
    }
}

/// What a new sandbox stands on.
struct Ground {
    config: Config,
    layers: Vec<LayerId>,
    image_config: ImageConfig,
    current: Option<SnapshotId>,
    forked_from: Option<Lineage>,
}

impl Inner {
    pub(super) async fn find(&self, project: &Name, name: &Name) -> Result<Sandbox> {
        let found = self.db.sandbox(project, name).await?;
        found
            .filter(|sandbox| sandbox.phase != Phase::Deleted)
            .ok_or_else(|| Error::NoSandbox(name.clone()))
    }

    /// The sandbox as it is now, in its turn.
    async fn reread(&self, id: &SandboxId, name: &Name) -> Result<Sandbox> {
        let found = self.db.sandbox_by_id(id).await?;
        found
            .filter(|sandbox| sandbox.phase != Phase::Deleted)
            .ok_or_else(|| Error::NoSandbox(name.clone()))
    }

    async fn session_of(&self, sandbox: &Sandbox) -> Result<Option<Session>> {
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
        wake: WakeMode,
    ) -> Result<(Arc<Live>, bool)> {
        let sandbox = self.find(project, name).await?;
        if let Some(live) = self.live(&sandbox.id) {
            return Ok((live, false));
        }
        match wake {
            WakeMode::Wake => self.wake(&sandbox.id, name, None).await,
            WakeMode::IfRunning => Err(Error::NotRunning(name.clone())),
        }
    }

    /// Starts a sandbox in its turn; the second answer tells whether this call did it.
    async fn wake(
        self: &Arc<Self>,
        id: &SandboxId,
        name: &Name,
        expect: Option<u64>,
    ) -> Result<(Arc<Live>, bool)> {
        let (id, name) = (id.clone(), name.clone());
        self.turn(id.clone(), move |inner, slot| async move {
            let sandbox = inner.reread(&id, &name).await?;
            expect_generation(&sandbox, expect)?;
            if let Some(live) = slot.live() {
                return Ok((live, false));
            }
            Ok((inner.boot(&slot, sandbox, false).await?, true))
        })
        .await
    }

    async fn create(
        self: &Arc<Self>,
        project: &Name,
        request: Create,
        key: Option<String>,
    ) -> Result<Opened> {
        if let (Some(name), IfExists::Get) = (&request.name, request.if_exists)
            && let Some(found) = self.open_existing(project, name, request.start).await?
        {
            return Ok(found);
        }
        if let (Some(name), Some(key)) = (&request.name, &key)
            && let Ok(sandbox) = self.find(project, name).await
            && sandbox.created_with.as_ref() == Some(key)
        {
            // Made by a call that never got to answer.
            return self.open_again(sandbox, request.start).await;
        }
        let config = request.patch.apply(Config::default())?.with_defaults_for(project);
        let ground = match &request.from {
            Some(id) => {
                let snapshot = self.find_snapshot(project, id).await?;
                let source = self.db.sandbox_by_id(&snapshot.sandbox).await?;
                self.ground_of(config, source.as_ref(), snapshot)
            }
            None => {
                let image = self.image(&config.image).await?;
                Ground {
                    config,
                    layers: image.layers,
                    image_config: image.config,
                    current: None,
                    forked_from: None,
                }
            }
        };
        self.driver(&ground.config.driver)?;
        self.store.check_room(0).await?;
        match self.found(project, request.name.clone(), ground, key, request.start).await {
            Err(Error::NameTaken(name)) if request.if_exists == IfExists::Get => {
                // Somebody else was quicker: theirs is handed out.
                self.open_existing(project, &name, request.start)
                    .await?
                    .ok_or(Error::NameTaken(name))
            }
            other => other,
        }
    }

    /// The image of that name; the one of this host is made when it is first asked for.
    async fn image(&self, name: &str) -> Result<Image> {
        let image = if name == HOST {
            self.images.host(false, &Reporter::silent()).await?
        } else {
            self.images.get(name).await?
        };
        self.learn(&image.layers).await?;
        Ok(image)
    }

    async fn open_existing(
        self: &Arc<Self>,
        project: &Name,
        name: &Name,
        start: bool,
    ) -> Result<Option<Opened>> {
        match self.find(project, name).await {
            Ok(sandbox) => Ok(Some(self.open_again(sandbox, start).await?)),
            Err(Error::NoSandbox(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn open_again(self: &Arc<Self>, sandbox: Sandbox, start: bool) -> Result<Opened> {
        if !start {
            let session = self.session_of(&sandbox).await?;
            return Ok(Opened { sandbox, session, created: false, resumed: false });
        }
        let (live, resumed) = self.wake(&sandbox.id, &sandbox.name, None).await?;
        Ok(Opened {
            sandbox: (*live.sandbox()).clone(),
            session: Some(live.session()),
            created: false,
            resumed,
        })
    }

    fn ground_of(&self, config: Config, source: Option<&Sandbox>, snapshot: Snapshot) -> Ground {
        let forked_from = Lineage {
            sandbox: snapshot.sandbox.clone(),
            name: snapshot.sandbox_name.clone(),
            snapshot: Some(snapshot.id.clone()),
            generation: snapshot.generation,
        };
        let layers =
            source.map_or_else(|| snapshot.layers.clone(), |source| source.image_layers.clone());
        Ground {
            config,
            layers,
            image_config: snapshot.image_config,
            current: Some(snapshot.id),
            forked_from: Some(forked_from),
        }
    }

    /// Brings a new sandbox into being. The index decides who gets the name.
    async fn found(
        self: &Arc<Self>,
        project: &Name,
        name: Option<Name>,
        ground: Ground,
        created_with: Option<String>,
        start: bool,
    ) -> Result<Opened> {
        let Ground { config, layers, image_config, current, forked_from } = ground;
        let made_up = name.is_none();
        let mut sandbox = Sandbox {
            format: FORMAT,
            id: SandboxId::fresh(),
            project: project.clone(),
            name: name.unwrap_or_else(Name::generate),
            config,
            phase: Phase::Stopped,
            debt: None,
            generation: 0,
            current,
            image_layers: layers,
            image_config,
            forked_from,
            session: None,
            open_layer: None,
            open_chain: Vec::new(),
            unsealed: None,
            uids: None,
            created_with,
            created_at: now(),
            updated_at: now(),
            used_at: now(),
            failure: None,
            validated: None,
        };
        self.turn(sandbox.id.clone(), move |inner, slot| async move {
            while !inner.db.claim(&sandbox).await? {
                if !made_up {
                    return Err(Error::NameTaken(sandbox.name));
                }
                sandbox.name = Name::generate();
            }
            failpoint::pass("create.claimed");
            if let Some(current) = &sandbox.current
                && inner.db.snapshot(current).await?.is_none()
            {
                // Dropped by its own sandbox's retention between the choice and the claim.
                inner.db.remove_sandbox(&sandbox.id).await?;
                return Err(Error::NoSnapshot(current.clone()));
            }
            let durability = if start { Durability::Soon } else { Durability::Synced };
            if let Err(error) = inner.record(&mut sandbox, durability).await {
                inner.db.remove_sandbox(&sandbox.id).await?;
                return Err(error);
            }
            failpoint::pass("create.recorded");
            if !start {
                return Ok(Opened { sandbox, session: None, created: true, resumed: false });
            }
            let started = inner.boot(&slot, sandbox.clone(), true).await;
            match started {
                Ok(live) => Ok(Opened {
                    sandbox: (*live.sandbox()).clone(),
                    session: Some(live.session()),
                    created: true,
                    resumed: false,
                }),
                Err(error) => {
                    // A create that fails leaves no sandbox behind: the name is free again.
                    if let Err(error) = inner.erase(&slot, sandbox).await {
                        tracing::error!(
                            error = super::boot::chain_of(&error),
                            "a sandbox that was never made is left"
                        );
                    }
                    Err(error)
                }
            }
        })
        .await
    }

    async fn stop(self: &Arc<Self>, project: &Name, name: &Name) -> Result<Stopped> {
        let id = self.find(project, name).await?.id;
        let name = name.clone();
        self.turn(id.clone(), move |inner, slot| async move {
            let mut sandbox = inner.reread(&id, &name).await?;
            let wish = lifecycle::command(sandbox.phase, Wish::Stop)
                .map_err(|_| Error::Gone(name.clone()))?;
            let snapshot = if wish.1.is_some() {
                let broken = sandbox.phase == Phase::Failed;
                let (kind, end) = if broken {
                    (SnapshotKind::Recovered, SessionEnd::Interrupted)
                } else {
                    (SnapshotKind::Stop, SessionEnd::Stopped)
                };
                let snapshot = inner.settle(&slot, &mut sandbox, kind, end).await?;
                inner.after_stop(&sandbox);
                snapshot
            } else {
                inner.current_snapshot(&sandbox).await?
            };
            let session = inner.session_of(&sandbox).await?;
            let snapshot = match snapshot {
                Some(snapshot) => Some(inner.sized(snapshot)),
                None => None,
            };
            Ok(Stopped { sandbox, session, snapshot })
        })
        .await
    }

    async fn update(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        id: &SandboxId,
        name: &Name,
        patch: Patch,
    ) -> Result<Sandbox> {
        let mut sandbox = self.reread(id, name).await?;
        if patch.image.as_ref().is_some_and(|image| *image != sandbox.config.image) {
            return Err(Error::invalid(
                "image",
                "a sandbox stays on the image it was created from; create another one",
            ));
        }
        if patch.driver.is_some() {
            let driver = patch.driver.as_deref().unwrap_or_default();
            self.driver(driver)?;
            if slot.live().is_some() && driver != sandbox.config.driver {
                return Err(Error::invalid("driver", "stop the sandbox first"));
            }
        }
        let timeout_changed = patch.session_timeout.is_some();
        sandbox.config = patch.apply(sandbox.config)?.with_defaults_for(&sandbox.project);
        self.record(&mut sandbox, Durability::Synced).await?;
        if let Some(live) = slot.live() {
            live.set_sandbox(sandbox.clone());
            if timeout_changed {
                let timeout = sandbox.config.session_timeout;
                let session = live.change_session(|session| {
                    let ends = |span: Span| {
                        let span = jiff::SignedDuration::from_millis(i64::try_from(span.0).ok()?);
                        session.started_at.checked_add(span).ok()
                    };
                    session.deadline = timeout.and_then(ends);
                });
                self.keep_session(&session).await?;
            }
        }
        self.retain(&sandbox).await?;
        Ok(sandbox)
    }

    /// What the sandbox is at this moment, as a snapshot, in its turn. `None`: it is its image.
    async fn snapshot_now(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        sandbox: &mut Sandbox,
        kind: SnapshotKind,
        label: Option<String>,
    ) -> Result<Option<Snapshot>> {
        if let Some(live) = slot.live() {
            *sandbox = (*live.sandbox()).clone();
            return self.snap(&live, sandbox, kind, label).await.map(Some);
        }
        if sandbox.open_layer.is_some() {
            self.settle(slot, sandbox, SnapshotKind::Recovered, SessionEnd::Interrupted).await?;
        }
        let Some(mut current) = self.current_snapshot(sandbox).await? else { return Ok(None) };
        if label.is_some() && current.label != label {
            current.label = label;
            self.store.write(&current, Durability::Synced).await?;
            self.db.put_snapshot(&current).await?;
        }
        Ok(Some(current))
    }

    async fn fork(
        self: &Arc<Self>,
        project: &Name,
        name: &Name,
        request: Fork,
        key: Option<String>,
    ) -> Result<Opened> {
        if let (Some(new), Some(key)) = (&request.name, &key)
            && let Ok(sandbox) = self.find(project, new).await
            && sandbox.created_with.as_ref() == Some(key)
        {
            return self.open_again(sandbox, request.start).await;
        }
        if let Some(new) = &request.name
            && self.find(project, new).await.is_ok()
        {
            return Err(Error::NameTaken(new.clone()));
        }
        let id = self.find(project, name).await?.id;
        let (source_name, from, expect) =
            (name.clone(), request.from.clone(), request.expect_generation);
        let chosen = match &from {
            Some(from) => Some(self.find_snapshot(project, from).await?),
            None => None,
        };
        // Held until the new sandbox's manifest is written: what it stands on must not go meanwhile.
        let work = self.turn(id.clone(), move |inner, slot| async move {
            let mut source = inner.reread(&id, &source_name).await?;
            expect_generation(&source, expect)?;
            let snapshot = match chosen {
                Some(snapshot) => Some(snapshot),
                None => inner.snapshot_now(&slot, &mut source, SnapshotKind::Fork, None).await?,
            };
            failpoint::pass("fork.snapshot");
            Ok((source, snapshot))
        });
        let (source, snapshot) = work.await?;
        let config = request.patch.apply(source.config.clone())?;
        self.driver(&config.driver)?;
        let ground = match snapshot {
            Some(snapshot) => self.ground_of(config, Some(&source), snapshot),
            None => Ground {
                config,
                layers: source.image_layers.clone(),
                image_config: source.image_config.clone(),
                current: None,
                forked_from: Some(Lineage {
                    sandbox: source.id.clone(),
                    name: source.name.clone(),
                    snapshot: None,
                    generation: source.generation,
                }),
            },
        };
        self.found(project, request.name, ground, key, request.start).await
    }

    async fn rollback(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        id: &SandboxId,
        name: &Name,
        target: &Snapshot,
        expect: Option<u64>,
    ) -> Result<RolledBack> {
        let mut sandbox = self.reread(id, name).await?;
        expect_generation(&sandbox, expect)?;
        let mut before = None;
        if slot.live().is_some() || sandbox.open_layer.is_some() {
            before = self
                .settle(slot, &mut sandbox, SnapshotKind::BeforeRollback, SessionEnd::RolledBack)
                .await?;
        }
        failpoint::pass("rollback.kept");
        sandbox.current = Some(target.id.clone());
        sandbox.image_config = target.image_config.clone();
        sandbox.generation += 1;
        sandbox.validated = None;
        sandbox.phase = Phase::Stopped;
        sandbox.failure = None;
        self.record(&mut sandbox, Durability::Synced).await?;
        failpoint::pass("rollback.done");
        Ok(RolledBack { sandbox, before })
    }
}

fn expect_generation(sandbox: &Sandbox, expected: Option<u64>) -> Result<()> {
    match expected {
        Some(expected) if expected != sandbox.generation => Err(Error::Generation {
            name: sandbox.name.clone(),
            expected,
            found: sandbox.generation,
        }),
        _ => Ok(()),
    }
}
