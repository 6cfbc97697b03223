//! Snapshots that lead elsewhere: forks and rollbacks.
//!
//! A fork is a new sandbox on the same layers. A running source is checkpointed first, so that a fork
//! never starts from something older than what was asked for; who asks for what was last kept
//! ([`ForkFrom::Kept`]) leaves the session alone. A rollback keeps what it leaves as a
//! snapshot, so that it can be undone; rolling back to a snapshot of a fork promotes what the fork
//! did.

use std::sync::Arc;

use super::boot::chain_of;
use super::create::Ground;
use super::lifecycle::Phase;
use super::sandbox::expect_generation;
use super::seal::Wanted;
use super::slot::Slot;
use super::{Error, Fork, ForkFrom, Inner, Opened, Result, RolledBack};
use crate::failpoint;
use crate::model::{
    Ending, Expiry, LayerId, Lineage, Name, Patch, Sandbox, SandboxId, SessionEnd, Snapshot,
    SnapshotId, SnapshotKind,
};
use crate::store::Durability;

impl Inner {
    /// What the sandbox is at this moment, as a snapshot, in its turn. `None`: it is its image.
    pub(super) async fn snapshot_now(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        sandbox: &mut Sandbox,
        kind: SnapshotKind,
        wanted: Wanted,
    ) -> Result<Option<Snapshot>> {
        if let Some(live) = slot.live() {
            *sandbox = (*live.sandbox()).clone();
            let taken = self.snap(&live, sandbox, kind, wanted.clone()).await;
            if let (Err(error), Some(_)) = (&taken, &sandbox.unsealed) {
                // It broke off in the middle of exchanging the root. Only the agent was alive, so the
                // session is ended and all of it kept; the next call wakes it.
                tracing::error!(sandbox = %sandbox.name, error = chain_of(error), "a checkpoint broke off");
                let Wanted { method, expiry, .. } = wanted;
                let by_itself = Ending::by_itself(kind, SessionEnd::Interrupted);
                // A snapshot was asked for, so one is taken, also of a sandbox that keeps nothing by itself.
                let ending = Ending { method, expiry, always: true, ..by_itself };
                return self.settle(slot, sandbox, ending).await;
            }
            return taken.map(Some);
        }
        if sandbox.open_layer.is_some() {
            let ending = sandbox.ending.unwrap_or_else(Ending::broken);
            self.settle(slot, sandbox, ending).await?;
        }
        self.require_ground(sandbox).await?;
        // Held from before its layers are read: they may be made one meanwhile, and the old ones go.
        let _space = self.space.read().await;
        let Some(current) = self.current_snapshot(sandbox).await? else { return Ok(None) };
        if wanted.fits(&current) {
            return Ok(Some(current));
        }
        if current.sandbox == sandbox.id && wanted.expiry == Expiry::Retention {
            let label = wanted.label;
            let named = self.change_snapshot(&current.id, Durability::Synced, |snapshot| {
                snapshot.label = label;
            });
            return named.await;
        }
        // A fork that never ran stands on its source's snapshot, which is not its to name or to keep.
        let id = SnapshotId::of_layer(&LayerId::fresh());
        let own = self.new_snapshot(sandbox, id, current.layers, kind, wanted);
        self.commit(sandbox, &own).await?;
        Ok(Some(own))
    }

    pub(super) async fn fork(
        self: &Arc<Self>,
        project: &Name,
        name: &Name,
        request: Fork,
        key: Option<String>,
    ) -> Result<Opened> {
        if let Some(made) = self.made_under(project, key.as_deref()).await? {
            return self.open_again(made, request.start).await;
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
            ForkFrom::Snapshot(from) => Some(self.find_snapshot(project, from).await?),
            ForkFrom::Now | ForkFrom::Kept => None,
        };
        let work = self.turn(id.clone(), move |inner, slot| async move {
            let mut source = inner.reread(&slot, &id, &source_name).await?;
            expect_generation(&source, expect)?;
            let snapshot = match chosen {
                Some(snapshot) => Some(snapshot),
                None if from == ForkFrom::Kept && slot.live().is_some() => {
                    inner.require_ground(&source).await?;
                    inner.current_snapshot(&source).await?
                }
                None => {
                    let wanted = Wanted::default();
                    inner.snapshot_now(&slot, &mut source, SnapshotKind::Fork, wanted).await?
                }
            };
            failpoint::pass("fork.snapshot");
            Ok((source, snapshot))
        });
        let (source, snapshot) = work.await?;
        // A fork has the drives it is given: two sandboxes could not write to the source's.
        let mounts = Some(request.patch.mounts.unwrap_or_default());
        let mut patch = Patch { mounts, ..request.patch };
        self.seal_patch(project, &mut patch)?;
        let config = patch.apply(source.config.clone())?;
        if let Some(policy) = &config.network {
            self.check_policy(project, &config.tags, policy)?;
        }
        self.check_drives(project, &config.mounts).await?;
        self.check_secret_uses(project, &config)?;
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

    pub(super) async fn rollback(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        id: &SandboxId,
        name: &Name,
        target: &Snapshot,
        expect: Option<u64>,
    ) -> Result<RolledBack> {
        let mut sandbox = self.reread(slot, id, name).await?;
        expect_generation(&sandbox, expect)?;
        let mut before = None;
        if slot.live().is_some() || sandbox.open_layer.is_some() {
            let ending = Ending::by_itself(SnapshotKind::BeforeRollback, SessionEnd::RolledBack);
            before = match self.settle(slot, &mut sandbox, ending).await {
                Err(Error::Store(error)) if error.is_not_found() => {
                    // Its files are lost, and this is the way out: by name, never by itself.
                    tracing::error!(sandbox = %sandbox.name, error = chain_of(&error), "rolled back without what its last session wrote");
                    self.give_uids(sandbox.uids.take());
                    sandbox.open_layer = None;
                    sandbox.unsealed = None;
                    sandbox.open_chain.clear();
                    sandbox.mounted.clear();
                    None
                }
                settled => settled?,
            };
        }
        failpoint::pass("rollback.kept");
        let stood_on = sandbox.clone();
        sandbox.current = Some(target.id.clone());
        sandbox.missing = None;
        sandbox.image_config = target.image_config.clone();
        sandbox.generation += 1;
        sandbox.validated = None;
        sandbox.enter(Phase::Stopped);
        sandbox.failure = None;
        self.record(&mut sandbox, Durability::Synced).await?;
        if self.db.snapshot(&target.id).await?.is_none() {
            // Deleted since it was looked up; from the record above on it would have been refused.
            sandbox = stood_on;
            self.record(&mut sandbox, Durability::Synced).await?;
            return Err(Error::SnapshotDeleted(target.id.clone()));
        }
        failpoint::pass("rollback.done");
        self.note_use(Some(&target.id)).await;
        self.try_to_retain(&sandbox).await;
        Ok(RolledBack { sandbox, before })
    }
}
