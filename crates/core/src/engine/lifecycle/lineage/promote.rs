//! Promote: an origin becomes what its fork is.
//!
//! No file is copied: the origin gets the fork's snapshot. The check that the origin has not moved on and the
//! change itself are one turn of the origin, so of two who promote two forks of one origin one wins.
//! What the origin had stays as a snapshot.

use std::sync::Arc;

use crate::engine::lifecycle::Lifecycle;
use crate::engine::lifecycle::stop::SnapshotOptions;
use crate::engine::running::turns::Slot;
use crate::engine::{Error, Promote, Promoted, Result};
use crate::failpoint;
use crate::model::{
    BroughtBack, ForkOutcome, Lineage, Name, Sandbox, SandboxId, Snapshot, SnapshotKind, now,
};
use crate::store::{DiffOptions, Durability};

impl Lifecycle {
    pub(in crate::engine) async fn promote(
        self: &Arc<Self>,
        project: &Name,
        name: &Name,
        request: Promote,
    ) -> Result<Promoted> {
        let fork = self.find(project, name).await?;
        let Some(from) = fork.forked_from.clone() else {
            return Err(Error::NoOrigin { fork: name.clone() });
        };
        let origin = self.origin_of(&fork, &from).await?;
        let expected = request.expect_generation.unwrap_or(from.generation);
        // Most refusals are known before anything is captured.
        require_generation(&origin, &fork.name, expected)?;
        let (id, fork_name) = (fork.id.clone(), name.clone());
        let capture = self.turn(fork.id.clone(), move |this, slot| async move {
            let mut fork = this.reread(&slot, &id, &fork_name).await?;
            let wanted = SnapshotOptions::default();
            let kind = SnapshotKind::Checkpoint;
            match this.snapshot_now(&slot, &mut fork, kind, wanted.clone()).await? {
                Some(snapshot) => Ok(snapshot),
                None => this.snapshot_image(&mut fork, kind, wanted).await,
            }
        });
        let snapshot = capture.await?;
        failpoint::pass("promote.captured");
        let (id, fork_name, target) = (origin.id.clone(), fork.name.clone(), snapshot.clone());
        let change = self.turn(origin.id.clone(), move |this, slot| async move {
            this.promote_into(&slot, &id, &origin.name, &fork_name, &target, expected).await
        });
        let (origin, before) = change.await?;
        failpoint::pass("promote.done");
        let lineage = Lineage {
            sandbox: origin.id.clone(),
            name: origin.name.clone(),
            snapshot: Some(snapshot.id.clone()),
            generation: origin.generation,
            group: from.group,
        };
        let outcome = ForkOutcome {
            how: BroughtBack::Promoted,
            into: origin.name.clone(),
            generation: origin.generation,
            at: now(),
        };
        // From here on the fork is one of what the origin is now.
        self.note_brought_back(&fork, outcome, |fork| {
            fork.forked_from = Some(lineage);
            fork.merged.clear();
        })
        .await?;
        Ok(Promoted { sandbox: origin, snapshot, before })
    }

    /// The sandbox a fork was forked from.
    pub(in crate::engine) async fn origin_of(
        &self,
        fork: &Sandbox,
        from: &Lineage,
    ) -> Result<Sandbox> {
        let found = self.db.sandbox_by_id(&from.sandbox).await?;
        let found = found.map(|origin| self.records.as_known(origin));
        found.filter(|origin| origin.deletion().is_none()).ok_or_else(|| Error::OriginDeleted {
            fork: fork.name.clone(),
            origin: from.name.clone(),
        })
    }

    async fn promote_into(
        self: &Arc<Self>,
        slot: &Arc<Slot>,
        id: &SandboxId,
        name: &Name,
        fork: &Name,
        target: &Snapshot,
        expected: u64,
    ) -> Result<(Sandbox, Option<Snapshot>)> {
        let origin = self.reread(slot, id, name).await?;
        require_generation(&origin, fork, expected)?;
        if origin.current.as_ref() == Some(&target.id) && origin.open_session().is_none() {
            // It was promoted before.
            return Ok((origin, None));
        }
        if slot.live().is_some() {
            self.require_unchanged(slot, &origin, fork).await?;
        }
        let before = self.records.current_snapshot(&origin).await?;
        // A process may have written something since. What the session left when it ended is looked at again.
        let rolled_back = self.rollback_at(slot, id, name, target, Some((expected, fork))).await?;
        self.context.events.promoted(&rolled_back.sandbox, &target.id, fork);
        Ok((rolled_back.sandbox, rolled_back.before.or(before)))
    }

    /// Refuses an origin that runs and has changed files since its last snapshot.
    async fn require_unchanged(&self, slot: &Slot, origin: &Sandbox, fork: &Name) -> Result<()> {
        let moved_on = |why: &str| Error::OriginMovedOn {
            origin: origin.name.clone(),
            fork: fork.clone(),
            why: why.to_owned(),
        };
        let Some(live) = slot.live() else { return Ok(()) };
        if live.driver.disk().is_some() {
            return Err(moved_on("it runs in a virtual machine, whose changes only a stop shows"));
        }
        let running = live.sandbox();
        let Some(open) = running.open_layer() else { return Ok(()) };
        if self.store.is_untouched(open).await? {
            return Ok(());
        }
        let saved = self.resolve_saved(origin).await?;
        let chain = running.open_chain().iter().cloned();
        let now: Vec<_> = std::iter::once(open.clone()).chain(chain).collect();
        let options = DiffOptions { only: None, limit: 1, renames: false };
        let diff = self.store.diff(&saved.layers, &now, options).await?;
        match diff.is_empty() {
            true => Ok(()),
            false => Err(moved_on("it runs and has changed files")),
        }
    }

    /// Whether a snapshot has the same files as what a sandbox stood on before.
    pub(in crate::engine) async fn is_same_as_saved(
        &self,
        before: &Sandbox,
        snapshot: &Snapshot,
    ) -> Result<bool> {
        let (saved, now) =
            (self.resolve_saved(before).await?, self.resolve_snapshot(&snapshot.id, None).await?);
        let options = DiffOptions { only: None, limit: 1, renames: false };
        Ok(self.store.diff(&saved.layers, &now.layers, options).await?.is_empty())
    }

    /// Notes in a fork's record that its work was brought back. If that fails, what was brought back stays.
    pub(in crate::engine) async fn note_brought_back(
        self: &Arc<Self>,
        fork: &Sandbox,
        outcome: ForkOutcome,
        change: impl FnOnce(&mut Sandbox) + Send + 'static,
    ) -> Result<()> {
        let (id, name) = (fork.id.clone(), fork.name.clone());
        self.turn(id.clone(), move |this, slot| async move {
            let Ok(mut fork) = this.reread(&slot, &id, &name).await else {
                // It was deleted meanwhile.
                return Ok(());
            };
            change(&mut fork);
            fork.outcome = Some(outcome);
            this.records.record(&mut fork, Durability::Synced).await?;
            if let Some(live) = slot.live() {
                live.set_sandbox(fork);
            }
            Ok(())
        })
        .await
    }
}

pub(in crate::engine) fn require_generation(
    origin: &Sandbox,
    fork: &Name,
    expected: u64,
) -> Result<()> {
    if origin.generation == expected {
        return Ok(());
    }
    Err(Error::OriginMovedOn {
        origin: origin.name.clone(),
        fork: fork.clone(),
        why: format!("it is at generation {}, not {expected}", origin.generation),
    })
}
