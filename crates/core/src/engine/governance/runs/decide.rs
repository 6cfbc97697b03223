//! Accepting and rejecting results.
//!
//! A decision is on record before it is carried out. Of two who accept two forks of one origin the promotion decides, in the
//! origin's turn: one wins, the other gets an error that the origin has moved on, and its run waits
//! for another decision.

use std::sync::Arc;

use super::{Runs, check_comment, check_how, refused, status_error};
use crate::engine::error::error_chain;
use crate::engine::lifecycle::lineage::merge::Reviewed;
use crate::engine::tenancy::projects::Caller;
use crate::engine::{Error, MergeRequest, Promote, Promoted, Result};
use crate::failpoint;
use crate::model::{
    AcceptRule, BroughtBack, Run, RunChange, RunDecision, RunEffect, RunId, RunStatus, Sandbox,
};

/// What somebody decided about a result.
#[derive(Debug, Clone, Default)]
pub struct Acceptance {
    /// What acceptance does; what the run says if absent.
    pub how: Option<AcceptRule>,
    /// The reviewer's comment.
    pub comment: String,
    /// Whether a sandbox of its own is deleted afterwards.
    pub discard: bool,
}

impl Runs {
    fn may_decide(&self, caller: &Caller, run: &Run) -> Result<()> {
        let separate = self.tenancy.project_runs(&caller.project)?.separate_approver;
        if separate && run.by == caller.key { Err(Error::SeparateApprover) } else { Ok(()) }
    }

    /// Accepts the result of a run, and brings it back as was decided. The second value describes a
    /// promotion.
    pub(in crate::engine) async fn accept(
        self: &Arc<Self>,
        caller: &Caller,
        id: &RunId,
        acceptance: Acceptance,
    ) -> Result<(Run, Option<Promoted>)> {
        check_comment(&acceptance.comment)?;
        let run = self.get(&caller.project, id)?;
        self.may_decide(caller, &run)?;
        let how = acceptance.how.unwrap_or(run.spec.on_accept);
        check_how(how, &run.spec.place)?;
        ready(&run)?;
        if how != AcceptRule::Keep {
            self.require_unchanged(&run).await?;
        }
        let decision = RunDecision {
            how: Some(how),
            by: caller.key.clone(),
            at: self.now(),
            comment: acceptance.comment,
            discard: acceptance.discard,
        };
        self.change(&caller.project, id, |run, _| {
            ready(run)?;
            run.pending = Some(RunEffect::Accept);
            run.decision = Some(decision);
            Ok(())
        })
        .await?;
        failpoint::pass("run.accepting");
        // A caller that leaves interrupts nothing.
        let (this, run) = (Arc::clone(self), self.get(&caller.project, id)?);
        let task = self.context.tasks.spawn(async move {
            let done = this.complete_acceptance(&run).await;
            if done.is_err()
                && !this.context.tasks.is_shutdown()
                && let Err(error) = this.take_back(&run).await
            {
                // The run's driver tries it again.
                tracing::error!(run = %run.id, error = error_chain(&error), "a decision was not taken back");
            }
            this.drive_soon(&run.project, &run.id);
            done
        });
        let promoted = task.await.map_err(|_| Error::ShuttingDown)??;
        Ok((self.get(&caller.project, id)?, promoted))
    }

    /// The result could not be brought back: somebody decides again.
    async fn take_back(&self, run: &Run) -> Result<()> {
        self.change(&run.project, &run.id, |run, _| {
            if run.pending == Some(RunEffect::Accept) {
                run.pending = None;
                run.decision = None;
            }
            Ok(())
        })
        .await
    }

    /// Refuses a sandbox that is not what was pinned for the review.
    async fn require_unchanged(&self, run: &Run) -> Result<()> {
        let sandbox = self.sandbox_of(run).await?;
        match self.is_as_pinned(run, &sandbox) {
            true => Ok(()),
            false => Err(Error::RunChanged { run: run.id.clone(), sandbox: sandbox.name }),
        }
    }

    /// Whether a sandbox is still what was pinned for the review.
    pub(in crate::engine) fn is_as_pinned(&self, run: &Run, sandbox: &Sandbox) -> bool {
        self.lifecycle.turns.live(&sandbox.id).is_none()
            && sandbox.open_layer().is_none()
            && sandbox.current == run.last
    }

    /// Pins the state of the sandbox anew, for a review.
    pub(in crate::engine) async fn pin_again(
        self: &Arc<Self>,
        caller: &Caller,
        id: &RunId,
    ) -> Result<Run> {
        let run = self.get(&caller.project, id)?;
        ready(&run)?;
        let (_, snapshot) = self.pinned(&run).await?;
        self.change(&caller.project, id, |run, _| {
            ready(run)?;
            run.last = snapshot.map(|snapshot| snapshot.id);
            Ok(())
        })
        .await?;
        self.get(&caller.project, id)
    }

    /// Brings the result back, unless that was done.
    pub(super) async fn complete_acceptance(
        self: &Arc<Self>,
        run: &Run,
    ) -> Result<Option<Promoted>> {
        let decision = run.decision.as_ref();
        let how = decision.and_then(|decision| decision.how).unwrap_or(AcceptRule::Keep);
        let mut promoted = None;
        if matches!(how, AcceptRule::Promote | AcceptRule::Merge) {
            let fork = self.sandbox_of(run).await?;
            if !self.was_brought_back(run, &fork, how).await? {
                let reviewed = Some(Reviewed {
                    run: run.id.clone(),
                    sandbox: fork.id.clone(),
                    snapshot: run.last.clone(),
                });
                match how {
                    AcceptRule::Promote => {
                        let request = Promote::default();
                        let done = self
                            .lifecycle
                            .promote_reviewed(&run.project, &fork.name, request, reviewed)
                            .await?;
                        promoted = Some(done);
                    }
                    _ => {
                        let request = MergeRequest::default();
                        self.lifecycle
                            .merge_reviewed(&run.project, &fork.name, request, reviewed)
                            .await?;
                    }
                }
            }
        }
        failpoint::pass("run.brought_back");
        self.change(&run.project, &run.id, |run, at| {
            if run.pending != Some(RunEffect::Accept) {
                return Ok(());
            }
            run.apply(RunChange::Accept, at).map_err(refused(run))?;
            let discard = run.decision.as_ref().is_some_and(|decision| decision.discard);
            run.pending = (discard && run.own).then_some(RunEffect::Discard);
            Ok(())
        })
        .await?;
        Ok(promoted)
    }

    /// Whether an earlier daemon did it, and died before it was recorded.
    async fn was_brought_back(&self, run: &Run, fork: &Sandbox, how: AcceptRule) -> Result<bool> {
        let Some(from) = &fork.forked_from else { return Ok(false) };
        let decided = run.decision.as_ref().map(|decision| decision.at);
        let noted =
            fork.outcome.as_ref().filter(|outcome| decided.is_some_and(|at| outcome.at >= at));
        match how {
            AcceptRule::Promote => {
                let origin = self.db.sandbox_by_id(&from.sandbox).await?;
                let has_it = run.last.is_some()
                    && origin.is_some_and(|origin| origin.current == run.last)
                    // A fork that never wrote anything stands on its origin's own snapshot.
                    && from.snapshot != run.last;
                Ok(has_it || noted.is_some_and(|it| it.how == BroughtBack::Promoted))
            }
            _ => {
                let remembered = fork.merged.iter().any(|merge| {
                    merge.into == from.sandbox && Some(&merge.snapshot) == run.last.as_ref()
                });
                Ok(remembered || noted.is_some_and(|it| it.how == BroughtBack::Merged))
            }
        }
    }

    /// Rejects the result of a run. A sandbox of its own is deleted.
    pub(in crate::engine) async fn reject(
        self: &Arc<Self>,
        caller: &Caller,
        id: &RunId,
        comment: String,
    ) -> Result<Run> {
        check_comment(&comment)?;
        let by = caller.key.clone();
        let found = self.get(&caller.project, id)?;
        self.may_decide(caller, &found)?;
        self.change(&caller.project, id, |run, at| {
            ready(run)?;
            run.apply(RunChange::Reject, at).map_err(refused(run))?;
            run.decision = Some(RunDecision { how: None, by, at, comment, discard: run.own });
            run.pending = run.own.then_some(RunEffect::Discard);
            Ok(())
        })
        .await?;
        self.drive_soon(&caller.project, id);
        self.get(&caller.project, id)
    }
}

/// Refuses a run that cannot be decided about at the moment.
fn ready(run: &Run) -> Result<()> {
    match (run.status(), run.pending) {
        (RunStatus::ReadyForReview, None) => Ok(()),
        (RunStatus::ReadyForReview, Some(_)) => Err(Error::RunBusy(run.id.clone())),
        _ => Err(status_error(run, "only a run that is ready for review can be decided about")),
    }
}
