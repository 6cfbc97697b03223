//! Forks and rollbacks.
//!
//! A fork is a new sandbox on the same layers. A running source is checkpointed first, so that a fork
//! never starts from something older than what was asked for; who asks for what was last kept
//! ([`ForkFrom::Kept`]) leaves the session alone. A rollback keeps what it leaves as a
//! snapshot, so that it can be undone; rolling back to a snapshot of a fork promotes what the fork
//! did.

use std::sync::Arc;

use crate::engine::error::error_chain;
use crate::engine::lifecycle::Lifecycle;
use crate::engine::lifecycle::create::StartingPoint;
use crate::engine::lifecycle::lineage::promote::require_generation;
use crate::engine::lifecycle::sandbox::expect_generation;
use crate::engine::lifecycle::stop::SnapshotOptions;
use crate::engine::machine::capabilities::pausing;
use crate::engine::running::turns::Slot;
use crate::engine::{Error, Fork, ForkFailed, ForkFrom, Forks, Opened, Result, RolledBack};
use crate::failpoint;
use crate::model::lifecycle::Phase;
use crate::model::{
    Change, CommandEnd, Config, Ending, Expiry, GroupId, LayerId, Lineage, Name, OnAccept, OnIdle,
    Patch, Sandbox, SandboxId, SessionEnd, Snapshot, SnapshotId, SnapshotKind,
};
use crate::store::Durability;

/// How many forks one capture makes at most.
const MOST_FORKS: u32 = 100;
/// How many of them start at the same time.
const FORKS_AT_ONCE: usize = 8;

impl Lifecycle {
    /// What the sandbox is at this moment, as a snapshot, in its turn. `None`: it is its image.
    pub(in crate::engine) async fn snapshot_now(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        sandbox: &mut Sandbox,
        kind: SnapshotKind,
        wanted: SnapshotOptions,
    ) -> Result<Option<Snapshot>> {
        if let Some(live) = slot.live() {
            *sandbox = (*live.sandbox()).clone();
            let taken = self.take_checkpoint(&live, sandbox, kind, wanted.clone()).await;
            if let (Err(error), Some(_)) = (&taken, sandbox.unsealed()) {
                // It broke off in the middle of exchanging the root. Only the agent was alive, so the
                // session is ended and all of it kept; the next call wakes it.
                tracing::error!(sandbox = %sandbox.name, error = error_chain(error), "a checkpoint failed while the root was being exchanged; the session is ended");
                let SnapshotOptions { method, expiry, .. } = wanted;
                let by_itself = Ending::by_itself(kind, SessionEnd::Interrupted);
                // A snapshot was asked for, so one is taken, also of a sandbox that keeps nothing by itself.
                let ending = Ending { method, expiry, always: true, ..by_itself };
                return self.end_session(slot, sandbox, ending).await;
            }
            return taken.map(Some);
        }
        if sandbox.open_layer().is_some() {
            let ending = sandbox.ending().unwrap_or_else(Ending::broken);
            self.end_session(slot, sandbox, ending).await?;
        }
        self.storage.snapshots.require_snapshot(sandbox).await?;
        // Its layers may be made one meanwhile, and the old ones go.
        let (_hold, current) = self.references.hold_current(sandbox).await?;
        let Some(current) = current else { return Ok(None) };
        if wanted.fits(&current) {
            return Ok(Some(current));
        }
        if current.sandbox == sandbox.id && wanted.expiry == Expiry::Retention {
            let label = wanted.label;
            let named = self.storage.snapshots.change_snapshot(
                &current.id,
                Durability::Synced,
                |snapshot| {
                    snapshot.label = label;
                },
            );
            return named.await;
        }
        // A fork that never ran stands on its source's snapshot, which is not its to name or to keep.
        let id = SnapshotId::of_layer(&LayerId::fresh());
        let mut own = self.new_snapshot(sandbox, id, current.layers, kind, wanted);
        own.memory = current.memory;
        own.commands = current.commands;
        own.image = current.image;
        own.secrets = current.secrets;
        own.identity_of = Some(current.identity_of.unwrap_or(current.sandbox));
        self.commit(sandbox, &own).await?;
        Ok(Some(own))
    }

    /// A snapshot of a sandbox that kept nothing so far, in its turn: it is its image.
    pub(in crate::engine) async fn snapshot_image(
        &self,
        sandbox: &mut Sandbox,
        kind: SnapshotKind,
        wanted: SnapshotOptions,
    ) -> Result<Snapshot> {
        let id = SnapshotId::of_layer(&LayerId::fresh());
        let layers = sandbox.image_layers.clone();
        let snapshot = self.new_snapshot(sandbox, id, layers, kind, wanted);
        self.commit(sandbox, &snapshot).await?;
        Ok(snapshot)
    }

    pub(in crate::engine) async fn fork(
        self: &Arc<Self>,
        project: &Name,
        name: &Name,
        request: Fork,
        key: Option<String>,
    ) -> Result<Opened> {
        if request.count.is_some_and(|count| count != 1) {
            return Err(Error::invalid("count", "one fork at a time is made here"));
        }
        if let Some(made) = self.made_under(project, key.as_deref()).await? {
            return self.open_again(made, request.start).await;
        }
        if let Some(new) = &request.name
            && self.find(project, new).await.is_ok()
        {
            return Err(Error::NameTaken(new.clone()));
        }
        self.store.check_room(1).await?;
        let (name_of_it, start) = (request.name.clone(), request.start);
        let start_point = self.fork_starting_point(project, name, request).await?;
        self.register(project, name_of_it, start_point, key, start).await
    }

    /// Makes several forks from one capture, a few at a time.
    pub(in crate::engine) async fn fork_many(
        self: &Arc<Self>,
        project: &Name,
        name: &Name,
        request: Fork,
        key: Option<String>,
    ) -> Result<Forks> {
        let count = request.count.unwrap_or(1);
        if !(1..=MOST_FORKS).contains(&count) {
            return Err(Error::invalid("count", format!("between 1 and {MOST_FORKS}")));
        }
        let stem = request.name.clone().unwrap_or_else(Name::generate);
        let names = (1..=count)
            .map(|n| format!("{stem}-{n}").parse::<Name>())
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| Error::invalid("name", error.to_string()))?;
        let keys: Vec<_> =
            (1..=count).map(|n| key.as_ref().map(|key| format!("{key}/{n}"))).collect();
        // A retry finds what the first attempt made, and captures nothing again for those.
        let mut made = Vec::new();
        let mut wanted = Vec::new();
        let mut group_id = None;
        for (place, (new, key)) in names.into_iter().zip(keys).enumerate() {
            match self.made_under(project, key.as_deref()).await? {
                Some(there) => {
                    let id = there.forked_from.as_ref().and_then(|from| from.group_id.clone());
                    group_id = group_id.or(id);
                    made.push((place, self.open_again(there, request.start).await));
                }
                None if self.find(project, &new).await.is_ok() => {
                    return Err(Error::NameTaken(new));
                }
                None => wanted.push((place, new, key)),
            }
        }
        let start = request.start;
        if !wanted.is_empty() {
            self.store.check_room(1).await?;
            let mut start_point = self.fork_starting_point(project, name, request).await?;
            if let Some(from) = &mut start_point.forked_from {
                from.group = Some(stem);
                from.group_id = Some(group_id.unwrap_or_else(GroupId::fresh));
            }
            let gate = Arc::new(tokio::sync::Semaphore::new(FORKS_AT_ONCE));
            let mut under_way = tokio::task::JoinSet::new();
            for (place, new, key) in wanted {
                let (this, gate, start_point) =
                    (Arc::clone(self), Arc::clone(&gate), start_point.clone());
                let project = project.clone();
                under_way.spawn(async move {
                    let _pass = gate.acquire_owned().await;
                    let opened =
                        this.register(&project, Some(new.clone()), start_point, key, start).await;
                    (place, new, opened)
                });
            }
            let mut failed = Vec::new();
            while let Some(done) = under_way.join_next().await {
                match done {
                    Ok((place, _, Ok(opened))) => made.push((place, Ok(opened))),
                    Ok((place, new, Err(error))) => failed.push((place, new, error)),
                    Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                    Err(_) => return Err(Error::ShuttingDown),
                }
            }
            failed.sort_by_key(|(place, ..)| *place);
            let failed = failed.into_iter().map(|(_, name, error)| ForkFailed {
                name,
                code: error.code().to_owned(),
                reason: error_chain(&error),
            });
            return in_order(made, failed.collect());
        }
        in_order(made, Vec::new())
    }

    /// What a fork stands on: the source as it is now, or as it was asked for.
    async fn fork_starting_point(
        self: &Arc<Self>,
        project: &Name,
        name: &Name,
        request: Fork,
    ) -> Result<StartingPoint> {
        let id = self.find(project, name).await?.id;
        let on_accept = request.on_accept;
        let (source_name, from, expect) =
            (name.clone(), request.from.clone(), request.expect_generation);
        let chosen = match &from {
            ForkFrom::Snapshot(from) => {
                Some(self.storage.snapshots.find_snapshot(project, from).await?)
            }
            ForkFrom::Now | ForkFrom::Kept => None,
        };
        let chosen_by_id = chosen.is_some();
        let work = self.turn(id.clone(), move |this, slot| async move {
            let mut source = this.reread(&slot, &id, &source_name).await?;
            expect_generation(&source, expect)?;
            let snapshot = match chosen {
                Some(snapshot) => Some(snapshot),
                None if from == ForkFrom::Kept && slot.live().is_some() => {
                    this.storage.snapshots.require_snapshot(&source).await?;
                    this.records.current_snapshot(&source).await?
                }
                None => {
                    let wanted = SnapshotOptions::default();
                    this.snapshot_now(&slot, &mut source, SnapshotKind::Fork, wanted).await?
                }
            };
            failpoint::pass("fork.snapshot");
            Ok((source, snapshot))
        });
        let (source, snapshot) = work.await?;
        // A fork has the drives it is given: two sandboxes could not write to the source's.
        let mounts = Some(request.patch.mounts.unwrap_or_default());
        let mut patch = Patch { mounts, ..request.patch };
        self.network.seal_patch(project, &mut patch)?;
        let config = patch.apply(source.config.clone())?;
        if let Some(policy) = &config.network {
            self.network.check_policy(project, &config.tags, policy)?;
        }
        self.storage.drives.check_drives(project, &config.mounts).await?;
        self.secrets.check_secret_uses(project, &config)?;
        self.check_driver(&config, snapshot.as_ref())?;
        let start_point = match snapshot {
            Some(snapshot) => self.starting_point_of(config, Some(&source), snapshot),
            None => StartingPoint {
                config,
                hold: None,
                layers: source.image_layers.clone(),
                image_config: source.image_config.clone(),
                current: None,
                memory: false,
                forked_from: Some(Lineage {
                    sandbox: source.id.clone(),
                    name: source.name.clone(),
                    snapshot: None,
                    generation: source.generation,
                    group: None,
                    group_id: None,
                    on_accept: OnAccept::Keep,
                }),
                internal: false,
            },
        };
        let forked_from = start_point.forked_from.map(|from| match chosen_by_id {
            true => Lineage { on_accept, ..from },
            // It may stand on a snapshot of its own origin. It is what was forked all the same.
            false => Lineage {
                sandbox: source.id.clone(),
                name: source.name.clone(),
                generation: source.generation,
                on_accept,
                ..from
            },
        });
        Ok(StartingPoint { forked_from, ..start_point })
    }

    /// Refuses a driver that is not here, one that cannot use the memory a snapshot has, and a wish to be paused of one that
    /// keeps no memory.
    pub(in crate::engine) fn check_driver(
        &self,
        config: &Config,
        snapshot: Option<&Snapshot>,
    ) -> Result<()> {
        let driver = self.context.driver(&config.driver)?;
        if config.on_idle == Some(OnIdle::Pause) && pausing(&*driver).is_none() {
            return Err(Error::invalid(
                "on_idle",
                format!("the driver `{}` keeps no memory; use `stop` or `run`", config.driver),
            ));
        }
        match snapshot.filter(|snapshot| snapshot.has_memory()) {
            Some(snapshot) if pausing(&*driver).is_none() => Err(Error::HoldsMemory {
                name: snapshot.sandbox_name.clone(),
                what: format!("the driver `{}` cannot use", config.driver),
            }),
            _ => Ok(()),
        }
    }

    pub(in crate::engine) async fn rollback(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        id: &SandboxId,
        name: &Name,
        target: &Snapshot,
        expect: Option<u64>,
    ) -> Result<RolledBack> {
        let sandbox = self.reread(slot, id, name).await?;
        expect_generation(&sandbox, expect)?;
        self.rollback_at(slot, id, name, target, None).await
    }

    /// The same. For a promotion of a fork it is refused if the session that ends for it has changed files after all.
    pub(in crate::engine) async fn rollback_at(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        id: &SandboxId,
        name: &Name,
        target: &Snapshot,
        promotes: Option<(u64, &Name)>,
    ) -> Result<RolledBack> {
        let mut sandbox = self.reread(slot, id, name).await?;
        self.check_driver(&sandbox.config, Some(target))?;
        let (mut before, began) = (None, sandbox.clone());
        if slot.live().is_some() || sandbox.open_layer().is_some() {
            let ending = Ending::by_itself(SnapshotKind::BeforeRollback, SessionEnd::RolledBack);
            before = match self.end_session(slot, &mut sandbox, ending).await {
                Err(Error::Store(error)) if error.is_not_found() => {
                    // Its files are lost, and this is the way out: by name, never by itself.
                    tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "a sandbox was rolled back without what its last session wrote: those files are lost");
                    self.machines.release_uids(sandbox.uids());
                    // It may be at rest already, and only its session's record be missing.
                    if sandbox.open_session().is_some() {
                        if sandbox.phase() != Phase::Failed {
                            sandbox.transition(Change::Lost)?;
                        }
                        sandbox.transition(Change::GiveUp)?;
                    }
                    None
                }
                settled => settled?,
            };
        }
        if let Some((expected, fork)) = promotes {
            let has_same_files = match &before {
                Some(before) if sandbox.generation == expected + 1 => {
                    self.is_same_as_saved(&began, before).await?
                }
                _ => false,
            };
            if !has_same_files {
                require_generation(&sandbox, fork, expected)?;
            }
        }
        failpoint::pass("rollback.kept");
        let stood_on = sandbox.clone();
        sandbox.current = Some(target.id.clone());
        sandbox.missing = None;
        sandbox.image_config = target.image_config.clone();
        sandbox.generation += 1;
        sandbox.rolled_back_at = Some(sandbox.generation);
        // Another sandbox may have sealed it under another guard. A promotion has looked at that.
        sandbox.rules_as_made &= promotes.is_some() || target.sandbox == sandbox.id;
        sandbox.validated = None;
        sandbox.transition(Change::RolledBack { memory: target.has_memory() })?;
        self.records.record(&mut sandbox, Durability::Synced).await?;
        if self.db.snapshot(&target.id).await?.is_none() {
            // Deleted since it was looked up; from the record above on it would have been refused.
            sandbox.revert_to(stood_on);
            self.records.record(&mut sandbox, Durability::Synced).await?;
            return Err(Error::SnapshotDeleted(target.id.clone()));
        }
        if promotes.is_none() {
            self.context.events.rolled_back(&sandbox, target);
        }
        failpoint::pass("rollback.done");
        // What slept with the memory it leaves does not wake in the other; what is alive there is carried over.
        self.sessions.commands_lost(&sandbox.id, CommandEnd::SessionEnded).await?;
        self.storage.snapshots.note_use(Some(&target.id)).await;
        self.storage.snapshots.try_to_retain(&sandbox).await;
        Ok(RolledBack { sandbox, before })
    }
}

/// The answer of a call that made several, in the order they were asked for.
fn in_order(mut made: Vec<(usize, Result<Opened>)>, failed: Vec<ForkFailed>) -> Result<Forks> {
    made.sort_by_key(|(place, _)| *place);
    let made = made.into_iter().map(|(_, opened)| opened).collect::<Result<Vec<_>>>()?;
    Ok(Forks { made, failed })
}
