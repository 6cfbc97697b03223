//! Promote: gives an origin the state of its fork.
//!
//! No file is copied: the origin gets the fork's snapshot. The check that the origin has not moved on and the
//! change itself are one turn of the origin, so of two who promote two forks of one origin one wins.
//! What the origin had stays as a snapshot.
//!
//! A daemon that dies before the fork's record says so leaves an origin that has the fork's
//! snapshot. A repeated request finds that, and the record is completed.

use std::sync::Arc;

use crate::engine::lifecycle::Lifecycle;
use crate::engine::lifecycle::lineage::merge::{Reviewed, require_reviewed};
use crate::engine::running::turns::Slot;
use crate::engine::{Error, Promote, Promoted, Result};
use crate::failpoint;
use crate::model::{
    BroughtBack, ForkOutcome, LayerId, Lineage, Name, Sandbox, SandboxId, Session, SessionId,
    Snapshot, SnapshotId, now,
};
use crate::store::{Durability, StoreError};

/// How many snapshots are passed to find sessions, and how many sessions are looked up.
const MOST_PARENTS: usize = 1_000;
const MOST_SESSIONS: usize = 100;

impl Lifecycle {
    pub(in crate::engine) async fn promote(
        self: &Arc<Self>,
        project: &Name,
        name: &Name,
        request: Promote,
    ) -> Result<Promoted> {
        self.promote_reviewed(project, name, request, None).await
    }

    /// The same with a fork that is still what was reviewed.
    pub(in crate::engine) async fn promote_reviewed(
        self: &Arc<Self>,
        project: &Name,
        name: &Name,
        request: Promote,
        reviewed: Option<Reviewed>,
    ) -> Result<Promoted> {
        let fork = self.find(project, name).await?;
        require_reviewed(reviewed.as_ref(), &fork)?;
        let Some(from) = fork.forked_from.clone() else {
            return Err(Error::NoOrigin { fork: name.clone() });
        };
        let origin = self.origin_of(&fork, &from).await?;
        let expected = request.expect_generation.unwrap_or(from.generation);
        let was_done = origin.current.is_some() && origin.current == fork.current;
        if !was_done {
            // Most refusals are known before anything is captured.
            require_generation(&origin, &fork.name, expected)?;
        }
        let snapshot = self.capture_fork(&fork, reviewed).await?;
        failpoint::pass("promote.captured");
        let (id, promoted, target) = (origin.id.clone(), fork.clone(), snapshot.clone());
        let change = self.turn(origin.id.clone(), move |this, slot| async move {
            this.promote_into(&slot, &id, &origin.name, &promoted, &target, expected).await
        });
        let (origin, before) = change.await?;
        failpoint::pass("promote.done");
        let lineage = Lineage {
            sandbox: origin.id.clone(),
            name: origin.name.clone(),
            snapshot: Some(snapshot.id.clone()),
            generation: origin.generation,
            // It is not one of those any more that were made from the same state.
            group: None,
            group_id: None,
            on_accept: from.on_accept,
        };
        let before_that = fork.outcome.as_ref().filter(|_| was_done);
        let outcome = ForkOutcome {
            how: BroughtBack::Promoted,
            into: origin.name.clone(),
            into_id: Some(origin.id.clone()),
            generation: origin.generation,
            at: now(),
            group_id: from.group_id.or_else(|| before_that.and_then(|one| one.group_id.clone())),
        };
        // From here on the fork is one of what the origin is now.
        let into = origin.id.clone();
        self.note_brought_back(&fork, outcome, false, move |fork| {
            fork.forked_from = Some(lineage);
            fork.merged.retain(|merge| merge.into != into);
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
        promoted: &Sandbox,
        target: &Snapshot,
        expected: u64,
    ) -> Result<(Sandbox, Option<Snapshot>)> {
        let fork = &promoted.name;
        let origin = self.reread(slot, id, name).await?;
        let is_there = origin.current.as_ref() == Some(&target.id);
        if is_there && (origin.open_session().is_none() || origin.generation != expected) {
            // It was promoted before.
            return Ok((origin, None));
        }
        require_generation(&origin, fork, expected)?;
        if slot.live().is_some() {
            self.require_unchanged(slot, &origin, fork).await?;
            if is_there {
                return Ok((origin, None));
            }
        }
        // Its rules may have changed since it was read, and before it was captured.
        let promoted = self.db.sandbox_by_id(&promoted.id).await?.unwrap_or(promoted.clone());
        self.require_allowed(&origin, &promoted, target).await?;
        let before = self.records.current_snapshot(&origin).await?;
        // A process may have written something since. What the session left when it ended is looked at again.
        let rolled_back = self.rollback_at(slot, id, name, target, Some((expected, fork))).await?;
        self.context.events.promoted(&rolled_back.sandbox, &target.id, fork);
        Ok((rolled_back.sandbox, rolled_back.before.or(before)))
    }

    /// Refuses a state that the origin could not have sealed itself. What was sealed under the same rules needs no second look.
    async fn require_allowed(
        &self,
        origin: &Sandbox,
        fork: &Sandbox,
        target: &Snapshot,
    ) -> Result<()> {
        let (limit, own_limit) = (origin.config.resources.disk.0, fork.config.resources.disk.0);
        // Not what the fork's rules are now counts, but what they were when its layers were sealed.
        let is_as_strict = fork.rules_as_made && fork.config.guard == origin.config.guard;
        let is_as_small = fork.rules_as_made && own_limit <= limit;
        if is_as_strict && is_as_small {
            return Ok(());
        }
        let known = self.resolve_saved(origin).await?;
        let new: Vec<LayerId> =
            target.layers.iter().filter(|layer| !known.layers.contains(layer)).cloned().collect();
        if !is_as_small {
            let size =
                |layer: &LayerId| self.references.counts().bytes_of(std::slice::from_ref(layer));
            if let Some(need) = new.iter().map(size).max().filter(|need| *need > limit) {
                return Err(StoreError::OverLimit { need, limit }.into());
            }
        }
        if is_as_strict {
            return Ok(());
        }
        let sessions = self.sessions_of(fork, Some(&target.id), Some(&origin.id)).await?;
        self.storage.guard.guard_taken(origin, &fork.name, &sessions, &new, None).await
    }

    /// The sessions that a snapshot of a sandbox comes from, the latest first; not those of the sandbox that is to get it. A
    /// sandbox that was rolled back to a snapshot of another one comes from the sessions of that one, too.
    pub(in crate::engine) async fn sessions_of(
        &self,
        sandbox: &Sandbox,
        snapshot: Option<&SnapshotId>,
        into: Option<&SandboxId>,
    ) -> Result<Vec<Session>> {
        let mut ids: Vec<SessionId> = sandbox.session.iter().cloned().collect();
        let mut next = snapshot.cloned();
        for _ in 0..MOST_PARENTS {
            let Some(id) = next else { break };
            let Some(record) = self.db.snapshot_record(&id).await? else { break };
            if into == Some(&record.sandbox) {
                break;
            }
            if !ids.contains(&record.session) {
                ids.push(record.session);
            }
            next = record.parent;
        }
        let mut sessions = Vec::new();
        for id in ids.iter().take(MOST_SESSIONS) {
            sessions.extend(self.db.session(id).await?);
        }
        Ok(sessions)
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
        let _turn = self.comparing.turn(&origin.project).await?;
        match self.store.differ(&saved.layers, &now).await? {
            true => Err(moved_on("it runs and has changed files")),
            false => Ok(()),
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
        // The session has ended for this: it does not wait for other comparisons of the project.
        Ok(!self.store.differ(&saved.layers, &now.layers).await?)
    }

    /// Notes in a fork's record that its work was brought back. If that fails, what was brought back stays. `keeps`: not if its
    /// record has such an outcome already.
    pub(in crate::engine) async fn note_brought_back(
        self: &Arc<Self>,
        fork: &Sandbox,
        outcome: ForkOutcome,
        keeps: bool,
        change: impl FnOnce(&mut Sandbox) + Send + 'static,
    ) -> Result<()> {
        let (id, name) = (fork.id.clone(), fork.name.clone());
        self.turn(id.clone(), move |this, slot| async move {
            let Ok(mut fork) = this.reread(&slot, &id, &name).await else {
                // It was deleted meanwhile.
                return Ok(());
            };
            change(&mut fork);
            if !keeps || fork.outcome.is_none() {
                fork.outcome = Some(outcome);
            }
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
