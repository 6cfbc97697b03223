//! Runs: start, follow, review, decide.

use crate::db::{Page, Paged};
use crate::engine::error::error_chain;
use crate::engine::governance::runs;
use crate::engine::governance::runs::{Acceptance, RunFilter};
use crate::engine::{
    Caller, ConnectionFilter, DestinationTraffic, DiffRequest, Difference, Engine, Promoted, Result,
};
use crate::model::{
    Approval, Command, Finding, Name, Point, ProjectRuns, Run, RunId, RunSpec, SnapshotId,
};
use crate::store::Scan;

/// How many paths, commands and places a review lists.
const MOST_PATHS: usize = 1000;
const MOST_COMMANDS: usize = 100;
const MOST_PLACES: usize = 100;
/// How many commands are looked at for those that changed something.
const COMMANDS_SEARCHED: u32 = 1000;

/// What there is to know about the result of a run.
#[derive(Debug)]
pub struct Review {
    /// The run.
    pub run: Run,
    /// What it began with, as a point.
    pub from: String,
    /// What is reviewed.
    pub to: String,
    /// What differs, or why that cannot be determined.
    pub difference: Result<Difference, String>,
    /// Whether the sandbox is still what was pinned.
    pub current: bool,
    /// Commands that changed something.
    pub commands: Vec<Command>,
    /// What it was in contact with.
    pub network: Vec<DestinationTraffic>,
    /// What the guard found.
    pub findings: Vec<Finding>,
    /// Its approvals.
    pub approvals: Vec<Approval>,
}

impl Engine {
    /// Reads runs and approvals: before any sandbox is taken online, because they say what it may reach.
    pub(in crate::engine) async fn load_runs(&self) -> Result<()> {
        let store = &self.parts.context.store;
        let (runs, approvals): (Scan<Run>, _) = (store.scan().await?, store.scan().await?);
        for damaged in [&runs.damaged, &approvals.damaged] {
            self.parts.lifecycle.report_unreadable(damaged);
        }
        self.parts.runs.approvals.load(approvals.good);
        self.parts.runs.load(runs.good);
        Ok(())
    }

    /// Continues with pending effects.
    pub(in crate::engine) fn recover_runs(&self) {
        self.parts.runs.recover();
        runs::tend(&self.parts.runs);
    }

    /// Adds a run to the queue of its project.
    ///
    /// # Errors
    ///
    /// Returns [`Error::TooManyRuns`](crate::engine::Error::TooManyRuns) when the queue is full.
    pub async fn start_run(&self, caller: &Caller, spec: RunSpec) -> Result<Run> {
        self.parts.runs.submit(caller, spec).await
    }

    /// Finds a run.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoRun`](crate::engine::Error::NoRun) when the project has none of that id.
    pub fn run(&self, project: &Name, id: &RunId) -> Result<Run> {
        self.parts.runs.get(project, id)
    }

    /// The approvals of a run, oldest first.
    #[must_use]
    pub fn approvals_of_run(&self, run: &Run) -> Vec<Approval> {
        self.parts.runs.approvals.of_run(&run.project, &run.id)
    }

    /// Runs with all their texts: of those that are over, lists and [`run`](Self::run) have only short ones.
    pub async fn whole_runs(&self, all: Vec<Run>) -> Vec<Run> {
        let mut whole = Vec::with_capacity(all.len());
        for run in all {
            // One that cannot be read is shown as far as it is known.
            let found = self.parts.runs.whole(&run.project, &run.id).await;
            whole.push(found.unwrap_or(run));
        }
        whole
    }

    /// Lists runs, newest first.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Invalid`](crate::engine::Error::Invalid) for a cursor that is none.
    pub fn runs(&self, project: &Name, filter: &RunFilter, page: &Page) -> Result<Paged<Run>> {
        self.parts.runs.list(project, filter, page)
    }

    /// Waits until a run is not in this status any more, or nothing changes it.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    pub async fn run_settled(&self, project: &Name, id: &RunId) -> Result<Run> {
        let mut changed = self.parts.runs.subscribe();
        let shutdown = self.parts.context.tasks.shutdown();
        loop {
            let run = self.parts.runs.get(project, id)?;
            let settled = run.status() == crate::model::RunStatus::ReadyForReview
                || run.status() == crate::model::RunStatus::WaitingForApproval
                || run.status().is_final();
            if settled && run.pending.is_none_or(|_| !run.status().is_final()) {
                return Ok(run);
            }
            tokio::select! {
                _ = changed.changed() => {}
                () = shutdown.cancelled() => return Err(crate::engine::Error::ShuttingDown),
            }
        }
    }

    /// Ends a run that is queued or under way. What it did so far is kept.
    ///
    /// # Errors
    ///
    /// Returns [`Error::RunStatus`](crate::engine::Error::RunStatus) for one whose work is over.
    pub async fn cancel_run(&self, project: &Name, id: &RunId, comment: String) -> Result<Run> {
        self.parts.runs.cancel(project, id, comment).await
    }

    /// Notes a sign of life of the harness that drives a run.
    ///
    /// # Errors
    ///
    /// Returns [`Error::RunStatus`](crate::engine::Error::RunStatus) for one that the server drives.
    pub async fn run_heartbeat(
        &self,
        project: &Name,
        id: &RunId,
        cost: Option<f64>,
    ) -> Result<Run> {
        self.parts.runs.heartbeat(project, id, cost).await
    }

    /// The harness that drives a run says that its work is done, or why it failed.
    ///
    /// # Errors
    ///
    /// Returns [`Error::RunStatus`](crate::engine::Error::RunStatus) for one that is not under way.
    pub async fn finish_run(
        &self,
        project: &Name,
        id: &RunId,
        failure: Option<String>,
        cost: Option<f64>,
    ) -> Result<Run> {
        self.parts.runs.finish(project, id, failure, cost).await
    }

    /// Pins the state of a run's sandbox anew, because it has changed since.
    ///
    /// # Errors
    ///
    /// Returns [`Error::RunStatus`](crate::engine::Error::RunStatus) for one that is not ready for review.
    pub async fn pin_run_again(&self, caller: &Caller, id: &RunId) -> Result<Run> {
        self.parts.runs.pin_again(caller, id).await
    }

    /// Accepts the result of a run. The caller must be one that may approve.
    ///
    /// # Errors
    ///
    /// Returns [`Error::OriginMovedOn`](crate::engine::Error::OriginMovedOn) when the origin has changed since the fork: the
    /// run waits for another decision.
    pub async fn accept_run(
        &self,
        caller: &Caller,
        id: &RunId,
        acceptance: Acceptance,
    ) -> Result<(Run, Option<Promoted>)> {
        self.parts.runs.accept(caller, id, acceptance).await
    }

    /// Rejects the result of a run. A sandbox that was made for it is deleted.
    ///
    /// # Errors
    ///
    /// Returns [`Error::RunStatus`](crate::engine::Error::RunStatus) for one that is not ready for review.
    pub async fn reject_run(&self, caller: &Caller, id: &RunId, comment: String) -> Result<Run> {
        self.parts.runs.reject(caller, id, comment).await
    }

    /// The points between which the result of a run is.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`](crate::engine::Error::NoSandbox) when its sandbox is gone.
    pub async fn run_points(&self, run: &Run) -> Result<(Point, Point)> {
        let sandbox = self.parts.runs.sandbox_of(run).await?;
        let base = || Point::Base(sandbox.name.clone());
        let of = |id: &SnapshotId| Point::Snapshot(id.clone());
        let to = run.last.as_ref().map_or_else(|| Point::Now(sandbox.name.clone()), of);
        Ok((run.first.as_ref().map_or_else(base, of), to))
    }

    /// Returns what there is to know about the result of a run. Nothing is started for it.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`](crate::engine::Error::NoSandbox) when its sandbox is gone.
    pub async fn review_run(&self, project: &Name, id: &RunId) -> Result<Review> {
        let run = self.parts.runs.whole(project, id).await?;
        let sandbox = self.parts.runs.sandbox_of(&run).await?;
        let (from, to) = self.run_points(&run).await?;
        let request = DiffRequest {
            from: from.clone(),
            to: to.clone(),
            paths: Vec::new(),
            limit: MOST_PATHS,
        };
        let difference = self.diff(project, request).await.map_err(|error| error_chain(&error));
        let since = run.started_at.unwrap_or(run.queued_at);
        let filter = ConnectionFilter { since: Some(since), ..ConnectionFilter::default() };
        let mut network = self.destinations(project, &sandbox.name, &filter).await?;
        network.truncate(MOST_PLACES);
        let findings = match &run.last {
            Some(last) => {
                let snapshot = self.parts.context.db.snapshot_record(last).await?;
                snapshot.map(|snapshot| snapshot.findings).unwrap_or_default()
            }
            None => Vec::new(),
        };
        let findings = findings.into_iter().chain(sandbox.guarded().iter().cloned()).collect();
        Ok(Review {
            commands: self.commands_of(&run, &sandbox.name).await?,
            current: self.parts.runs.is_as_pinned(&run, &sandbox) || !run.own,
            from: from.to_string(),
            to: to.to_string(),
            difference,
            network,
            findings,
            approvals: self.whole_approvals(self.approvals_of_run(&run)).await,
            run,
        })
    }

    /// Commands of a run that changed something, or of which that is not known; newest first.
    async fn commands_of(&self, run: &Run, name: &Name) -> Result<Vec<Command>> {
        let page = Page { limit: COMMANDS_SEARCHED, ..Page::default() };
        let all = self.commands(&run.project, name, &page).await?.items;
        let since = run.started_at.unwrap_or(run.queued_at);
        let until = run.finished_at;
        let changed = |command: &Command| {
            let changes = command.changes.as_ref();
            changes.is_none_or(|it| it.created + it.modified + it.deleted > 0)
        };
        let of_run = all.into_iter().filter(|command| {
            command.started_at >= since && until.is_none_or(|until| command.started_at <= until)
        });
        Ok(of_run.filter(changed).take(MOST_COMMANDS).collect())
    }

    /// What a project allows its runs.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoProject`](crate::engine::Error::NoProject) when there is no such project.
    pub fn project_runs(&self, project: &Name) -> Result<ProjectRuns> {
        self.parts.tenancy.project_runs(project)
    }

    /// Sets what a project allows its runs.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Invalid`](crate::engine::Error::Invalid) for limits that are too high.
    pub async fn set_project_runs(&self, project: &Name, runs: ProjectRuns) -> Result<ProjectRuns> {
        if !(1..=1000).contains(&runs.running) || !(1..=10_000).contains(&runs.queued) {
            let reason = "between 1 and 1000 running, and between 1 and 10000 queued";
            return Err(crate::engine::Error::invalid("runs", reason));
        }
        self.parts.tenancy.change_project(project, |project| project.runs = runs).await?;
        Ok(runs)
    }
}
