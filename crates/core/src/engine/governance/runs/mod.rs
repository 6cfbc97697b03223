//! Runs: queued, driven, reviewed.
//!
//! ```text
//! queue.rs   starts what is next, follows approvals, expires what nobody reviewed
//! drive.rs   one task per run with a pending effect: carries effects out, in order
//! work.rs    the effect `work`: the attempts of a command, or the heartbeats of a harness
//! decide.rs  accept and reject
//! held.rs    commands that somebody has to approve
//! kept.rs    what of runs is in memory, and which snapshots they need
//! rest.rs    sandboxes that stand still while they wait
//! spending.rs  what a run may use
//! ```
//!
//! [`Runs::change`] is the only writer of a run: it writes the next version, and then shows it. So what a driver finds
//! pending is on disk, and a server that starts continues from there.

mod decide;
mod drive;
mod held;
mod kept;
mod queue;
mod rest;
mod spending;
mod work;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;

use crate::db::{Db, Page, Paged};
use crate::engine::context::Context;
use crate::engine::governance::approvals::inside::Watched;
use crate::engine::governance::approvals::{Approvals, Gates, check_comment};
use crate::engine::governance::runs::kept::{Kept, is_unfinished, text_of};
use crate::engine::lifecycle::Lifecycle;
use crate::engine::session::Sessions;
use crate::engine::tenancy::Tenancy;
use crate::engine::tenancy::projects::Caller;
use crate::engine::{Error, Result};
use crate::keyed_lock::KeyedLock;
use crate::model::approval::{check_hosts, check_patterns, check_secrets};
use crate::model::run::status_word;
use crate::model::{
    AcceptRule, AuditRecord, EventData, EventRun, EventSandbox, Name, Run, RunChange, RunEffect,
    RunId, RunPlace, RunRefused, RunSandbox, RunSpec, RunStatus, Sandbox, SandboxId, SessionId,
    Span, Tags, Timestamp,
};
use crate::store::{Durability, Store};

pub use decide::Acceptance;
pub(in crate::engine) use queue::tend;

/// How many ended runs of a project are kept, and how much their documents may take.
const KEPT: usize = 10_000;
const KEPT_BYTES: u64 = 64 << 20;
/// How much text the unfinished runs of a project may have, and the command of each.
const MOST_TEXT: u64 = 32 << 20;
const MOST_COMMAND: u64 = 64 << 10;
/// How many runs of a project may wait for a review.
const MOST_UNREVIEWED: usize = 10_000;

/// Selects runs. All given conditions must match.
#[derive(Debug, Clone, Default)]
pub struct RunFilter {
    /// With one of these; any if there are none.
    pub statuses: Vec<RunStatus>,
    /// In the sandbox of this name.
    pub sandbox: Option<Name>,
    /// Of this owner.
    pub owner: Option<String>,
    /// On this repository.
    pub repository: Option<String>,
}

impl RunFilter {
    fn takes(&self, run: &Run) -> bool {
        let named = |name: &Name| run.sandbox.as_ref().is_some_and(|there| there.name == *name);
        (self.statuses.is_empty() || self.statuses.contains(&run.status()))
            && self.sandbox.as_ref().is_none_or(named)
            && self.owner.as_ref().is_none_or(|owner| run.spec.owner == *owner)
            && self.repository.as_ref().is_none_or(|it| run.spec.repository == *it)
    }
}

type RunKey = (Name, RunId);

/// All runs.
pub(in crate::engine) struct Runs {
    store: Store,
    db: Arc<dyn Db>,
    pub(in crate::engine) context: Arc<Context>,
    tenancy: Arc<Tenancy>,
    sessions: Arc<Sessions>,
    pub(in crate::engine) lifecycle: Arc<Lifecycle>,
    pub(in crate::engine) approvals: Arc<Approvals>,
    table: RwLock<BTreeMap<RunKey, Run>>,
    /// Those that are queued, work, or have something pending.
    unfinished: Mutex<BTreeSet<RunKey>>,
    /// Those that wait for a review.
    unreviewed: Mutex<BTreeSet<RunKey>>,
    /// Those that work, by their sandbox.
    active: Mutex<HashMap<SandboxId, RunKey>>,
    locks: KeyedLock<RunId>,
    /// Serialises additions to the queue of a project.
    submitting: KeyedLock<Name>,
    changed: watch::Sender<u64>,
    /// Those that a task drives.
    driven: Mutex<HashSet<RunId>>,
    /// Those of which nothing could be written, until when they are left as they are, and for how long that is.
    stalled: Mutex<HashMap<RunKey, (Instant, Duration)>>,
    /// The last heartbeat of each harness.
    heartbeats: Mutex<HashMap<RunId, Instant>>,
    pub(in crate::engine) watched: Watched,
    pub(in crate::engine) gates: Gates,
    kept: Kept,
    /// Sessions that a task suspends while they wait for an answer.
    resting: Mutex<HashSet<SessionId>>,
}

impl Runs {
    pub(in crate::engine) fn new(
        lifecycle: &Arc<Lifecycle>,
        approvals: &Arc<Approvals>,
    ) -> Arc<Self> {
        let context = &lifecycle.context;
        Arc::new(Self {
            store: context.store.clone(),
            db: Arc::clone(&context.db),
            context: Arc::clone(context),
            tenancy: Arc::clone(&lifecycle.tenancy),
            sessions: Arc::clone(&lifecycle.sessions),
            lifecycle: Arc::clone(lifecycle),
            approvals: Arc::clone(approvals),
            table: RwLock::default(),
            unfinished: Mutex::default(),
            unreviewed: Mutex::default(),
            active: Mutex::default(),
            locks: KeyedLock::default(),
            submitting: KeyedLock::default(),
            changed: watch::Sender::new(0),
            driven: Mutex::default(),
            stalled: Mutex::default(),
            heartbeats: Mutex::default(),
            watched: Watched::default(),
            gates: Gates::default(),
            kept: Kept::default(),
            resting: Mutex::default(),
        })
    }

    fn now(&self) -> Timestamp {
        self.context.settings.clock.wall()
    }

    /// Turns when any run changed.
    pub(in crate::engine) fn subscribe(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    pub(in crate::engine) fn get(&self, project: &Name, id: &RunId) -> Result<Run> {
        let found = self.table.read().get(&(project.clone(), id.clone())).cloned();
        found.ok_or_else(|| Error::NoRun(id.clone()))
    }

    /// Lists those of a project, newest first.
    pub(in crate::engine) fn list(
        &self,
        project: &Name,
        filter: &RunFilter,
        page: &Page,
    ) -> Result<Paged<Run>> {
        let before: Option<RunId> =
            match &page.cursor {
                Some(cursor) => Some(cursor.parse().map_err(|_| {
                    Error::invalid("cursor", "this is not `next` of a page of runs")
                })?),
                None => None,
            };
        let table = self.table.read();
        let limit = page.limit as usize;
        let mut items: Vec<Run> = table
            .range(ends_of(project))
            .rev()
            .filter(|((_, id), _)| before.as_ref().is_none_or(|before| id < before))
            .map(|(_, run)| run)
            .filter(|run| filter.takes(run))
            .take(limit + 1)
            .cloned()
            .collect();
        let more = items.len() > limit;
        items.truncate(limit);
        let next = items.last().filter(|_| more).map(|last| last.id.to_string());
        Ok(Paged { items, next })
    }

    /// The run that works in a sandbox.
    pub(in crate::engine) fn active_in(&self, sandbox: &SandboxId) -> Option<Run> {
        let key = self.active.lock().get(sandbox).cloned()?;
        self.table.read().get(&key).cloned()
    }

    /// Looks at the run that works in a sandbox, or that is being stopped there.
    pub(in crate::engine) fn with_active(&self, sandbox: &SandboxId, look: impl FnOnce(&Run)) {
        let Some(key) = self.active.lock().get(sandbox).cloned() else { return };
        if let Some(run) = self.table.read().get(&key) {
            look(run);
        }
    }

    /// Adds a run to the queue.
    pub(in crate::engine) async fn submit(&self, caller: &Caller, spec: RunSpec) -> Result<Run> {
        let project = &caller.project;
        check(&spec)?;
        if let RunPlace::Existing { sandbox } | RunPlace::Fork { sandbox, .. } = &spec.place {
            self.lifecycle.find(project, sandbox).await?;
        }
        let _one = self.submitting.lock(project).await;
        let limits = self.tenancy.project_runs(project)?;
        let mut unfinished = self.all_unfinished();
        unfinished.retain(|run| run.project == *project);
        let queued = unfinished.iter().filter(|run| run.status() == RunStatus::Queued).count();
        let text: u64 = unfinished.iter().map(|run| text_of(&run.spec)).sum();
        let unreviewed = self.unreviewed.lock().iter().filter(|(of, _)| of == project).count();
        if queued >= limits.queued as usize
            || unreviewed >= MOST_UNREVIEWED
            || text + text_of(&spec) > MOST_TEXT
        {
            return Err(Error::TooManyRuns { project: project.clone(), queued });
        }
        let mut run = Run::new(project.clone(), spec, caller.key.clone());
        run.queued_at = self.now();
        self.keep(None, run.clone()).await?;
        Ok(run)
    }

    fn all_unfinished(&self) -> Vec<Run> {
        let keys: Vec<RunKey> = self.unfinished.lock().iter().cloned().collect();
        let table = self.table.read();
        keys.iter().filter_map(|key| table.get(key)).cloned().collect()
    }

    /// Changes a run: the next version is on disk when this returns.
    async fn change<T>(
        &self,
        project: &Name,
        id: &RunId,
        change: impl FnOnce(&mut Run, Timestamp) -> Result<T>,
    ) -> Result<T> {
        let _one = self.locks.lock(id).await;
        let before = self.whole(project, id).await?;
        let mut run = before.clone();
        let done = change(&mut run, self.now())?;
        if run != before {
            self.keep(Some(&before), run).await?;
        }
        Ok(done)
    }

    async fn keep(&self, before: Option<&Run>, run: Run) -> Result<()> {
        self.store.write(&run, Durability::Synced).await?;
        let status = before.map(Run::status);
        if status != Some(run.status()) {
            self.tell(&run, status);
        }
        self.show(run);
        Ok(())
    }

    /// Enters a version that is on disk.
    fn show(&self, run: Run) {
        let key = (run.project.clone(), run.id.clone());
        {
            let (mut unfinished, mut unreviewed) = (self.unfinished.lock(), self.unreviewed.lock());
            unfinished.remove(&key);
            unreviewed.remove(&key);
            if run.status() == RunStatus::ReadyForReview {
                unreviewed.insert(key.clone());
            }
            if is_unfinished(&run) {
                unfinished.insert(key.clone());
            }
        }
        if let Some(sandbox) = &run.sandbox {
            let mut active = self.active.lock();
            // What it started lives until it is stopped: so long its rules hold.
            if run.status().is_active() || run.pending == Some(RunEffect::Stop) {
                active.insert(sandbox.id.clone(), key.clone());
            } else if active.get(&sandbox.id) == Some(&key) {
                active.remove(&sandbox.id);
            }
        }
        if run.status().is_final() {
            self.heartbeats.lock().remove(&run.id);
        }
        let run = self.kept.enter(run);
        self.table.write().insert(key, run);
        self.changed.send_modify(|count| *count += 1);
    }

    fn tell(&self, run: &Run, before: Option<RunStatus>) {
        let kind = match (run.status(), before) {
            (RunStatus::Queued, _) => EventData::RunQueued,
            (RunStatus::Running, Some(RunStatus::WaitingForApproval)) => EventData::RunResumed,
            (RunStatus::Running, _) => EventData::RunStarted,
            (RunStatus::WaitingForApproval, _) => EventData::RunWaiting,
            (RunStatus::ReadyForReview, _) => EventData::RunReady,
            (RunStatus::Accepted, _) => EventData::RunAccepted,
            (RunStatus::Rejected, _) => EventData::RunRejected,
            (RunStatus::Failed, _) => EventData::RunFailed,
            (RunStatus::Cancelled, _) => EventData::RunCancelled,
            (RunStatus::Expired, _) => EventData::RunExpired,
        };
        self.emit(run, kind);
        let target = Some(format!("run/{}", run.id));
        let mut record = AuditRecord::by_system(Some(&run.project), "run.status", target)
            .with("status", status_word(run.status()));
        if let Some(sandbox) = &run.sandbox {
            record = record.with("sandbox", sandbox.name.as_str());
        }
        self.context.audit.note(record);
    }

    fn emit(&self, run: &Run, kind: impl FnOnce(EventRun) -> EventData) {
        let sandbox = run.sandbox.as_ref().map(|sandbox| EventSandbox {
            id: sandbox.id.clone(),
            name: sandbox.name.clone(),
            tags: Tags::new(),
        });
        let data = EventRun {
            run: run.id.clone(),
            status: run.status(),
            purpose: run.spec.purpose.clone(),
            owner: run.spec.owner.clone(),
            why: run.why.clone(),
            review_by: run.review_by(),
        };
        self.context.events.emit(Some(&run.project), sandbox, kind(data));
    }

    /// The sandbox of a run, as it is now.
    pub(in crate::engine) async fn sandbox_of(&self, run: &Run) -> Result<Sandbox> {
        let Some(there) = &run.sandbox else {
            let what = "it has no sandbox";
            return Err(Error::RunStatus { run: run.id.clone(), status: run.status(), what });
        };
        let found = self.db.sandbox_by_id(&there.id).await?;
        let found = found.filter(|sandbox| sandbox.deletion().is_none());
        found.ok_or_else(|| Error::NoSandbox(there.name.clone().into()))
    }

    /// Notes a sign of life of a harness. The answer is the run as it is now.
    pub(in crate::engine) async fn heartbeat(
        &self,
        project: &Name,
        id: &RunId,
        cost: Option<f64>,
    ) -> Result<Run> {
        let run = self.get(project, id)?;
        harness_only(&run)?;
        check_cost(cost)?;
        if run.status().is_active() {
            self.heartbeats.lock().insert(id.clone(), Instant::now());
        }
        if cost.is_some() && cost != run.cost && !run.status().is_final() {
            self.change(project, id, |run, _| {
                run.cost = cost;
                Ok(())
            })
            .await?;
        }
        self.get(project, id)
    }

    /// A harness says that its work is done, or that it failed.
    pub(in crate::engine) async fn finish(
        self: &Arc<Self>,
        project: &Name,
        id: &RunId,
        failure: Option<String>,
        cost: Option<f64>,
    ) -> Result<Run> {
        harness_only(&self.get(project, id)?)?;
        check_cost(cost)?;
        failure.as_deref().map_or(Ok(()), check_comment)?;
        self.change(project, id, |run, at| {
            let refused = |what| status_error(run, what);
            match (run.status().is_active(), run.pending) {
                (true, Some(RunEffect::Work)) => {}
                (true, _) => return Err(Error::RunBusy(run.id.clone())),
                (false, _) => return Err(refused("only a run under way can be finished")),
            }
            run.cost = cost.or(run.cost);
            match failure {
                None => run.pending = Some(RunEffect::Finish),
                Some(why) => give_up(run, RunChange::Fail, why, at)?,
            }
            Ok(())
        })
        .await?;
        self.drive_soon(project, id);
        self.get(project, id)
    }

    /// Cancels a run.
    pub(in crate::engine) async fn cancel(
        self: &Arc<Self>,
        project: &Name,
        id: &RunId,
        comment: String,
    ) -> Result<Run> {
        check_comment(&comment)?;
        self.change(project, id, |run, at| {
            if run.pending == Some(RunEffect::Finish) {
                return Err(Error::RunBusy(run.id.clone()));
            }
            give_up(run, RunChange::Cancel, comment, at)
        })
        .await?;
        self.drive_soon(project, id);
        self.get(project, id)
    }

    /// Deletes a project with `delete`, unless runs of it are not over. No run is added meanwhile.
    pub(in crate::engine) async fn delete_project(
        &self,
        project: &Name,
        delete: impl Future<Output = Result<()>>,
    ) -> Result<()> {
        let _one = self.submitting.lock(project).await;
        let runs = self.all_unfinished().iter().filter(|run| run.project == *project).count();
        if runs > 0 {
            return Err(Error::ProjectRuns { project: project.clone(), runs });
        }
        delete.await?;
        self.forget_project(project).await
    }

    /// Forgets all of a project that is deleted.
    async fn forget_project(&self, project: &Name) -> Result<()> {
        let keys: Vec<RunKey> =
            self.table.read().keys().filter(|(of, _)| of == project).cloned().collect();
        for key in keys {
            // A concurrent change must not write it again.
            let _one = self.locks.lock(&key.1).await;
            self.store.remove::<Run>(&key).await?;
            self.table.write().remove(&key);
            self.unfinished.lock().remove(&key);
            self.unreviewed.lock().remove(&key);
            self.kept.forget(&key.1);
        }
        self.approvals.forget_project(project).await
    }
}

/// All keys of a project.
fn ends_of(project: &Name) -> std::ops::RangeInclusive<RunKey> {
    let end = |digit: &str| -> RunKey {
        let id = format!("run-{}", digit.repeat(26)).parse();
        (project.clone(), id.expect("an id of the first or the last moment"))
    };
    end("0")..=end("z")
}

/// Ends a run before its work is done. Its sandbox is to be stopped.
fn give_up(run: &mut Run, change: RunChange, why: String, at: Timestamp) -> Result<()> {
    let was_queued = run.status() == RunStatus::Queued;
    let what = "it is not queued or under way any more";
    run.apply(change, at).map_err(|_| status_error(run, what))?;
    run.why = Some(why).filter(|why| !why.is_empty());
    run.pending = (!was_queued).then_some(RunEffect::Stop);
    Ok(())
}

fn status_error(run: &Run, what: &'static str) -> Error {
    Error::RunStatus { run: run.id.clone(), status: run.status(), what }
}

fn refused(run: &Run) -> impl Fn(RunRefused) -> Error {
    let (run, status) = (run.id.clone(), run.status());
    move |_| Error::RunStatus { run: run.clone(), status, what: "its status does not allow that" }
}

fn harness_only(run: &Run) -> Result<()> {
    match run.spec.command {
        None => Ok(()),
        Some(_) => Err(status_error(run, "the server drives it, not a harness")),
    }
}

pub(in crate::engine) fn place(sandbox: &Sandbox) -> RunSandbox {
    RunSandbox { id: sandbox.id.clone(), name: sandbox.name.clone() }
}

fn check_cost(cost: Option<f64>) -> Result<()> {
    match cost {
        Some(cost) if !cost.is_finite() || cost < 0.0 => {
            Err(Error::invalid("cost", "a number of 0 or more"))
        }
        _ => Ok(()),
    }
}

fn check(spec: &RunSpec) -> Result<()> {
    let texts = [
        ("repository", &spec.repository),
        ("owner", &spec.owner),
        ("purpose", &spec.purpose),
        ("class", &spec.class),
    ];
    for (field, text) in texts {
        if text.chars().count() > 512 || text.chars().any(char::is_control) {
            return Err(Error::invalid(field, "at most 512 characters, on one line"));
        }
    }
    check_patterns("approve", &spec.approve)?;
    check_hosts("known_hosts", &spec.known_hosts)?;
    check_secrets("approve_secrets", &spec.approve_secrets)?;
    spending::check(&spec.spending)?;
    if kept::text_of_command(spec) > MOST_COMMAND {
        let most = MOST_COMMAND >> 10;
        return Err(Error::invalid("command", format!("at most {most} KiB in a run; use a file")));
    }
    if !(-100..=100).contains(&spec.priority) {
        return Err(Error::invalid("priority", "between -100 and 100"));
    }
    if spec.retries > 10 {
        return Err(Error::invalid("retries", "at most 10"));
    }
    let year = Span::days(366);
    if !(Span::seconds(60)..=year).contains(&spec.keep) {
        return Err(Error::invalid("keep", "between 60s and 366d"));
    }
    if spec.timeout.is_some_and(|span| !(Span::seconds(1)..=year).contains(&span)) {
        return Err(Error::invalid("timeout", "between 1s and 366d"));
    }
    if !(Span::seconds(1)..=Span::days(1)).contains(&spec.heartbeat) {
        return Err(Error::invalid("heartbeat", "between 1s and 1d"));
    }
    check_how(spec.on_accept, &spec.place)?;
    match &spec.command {
        Some(command) => crate::engine::session::command::check(&work::exec_of(command)),
        None if spec.retries > 0 => {
            Err(Error::invalid("retries", "a run without a command is driven by a harness"))
        }
        None => Ok(()),
    }
}

/// Whether acceptance can do that.
fn check_how(how: AcceptRule, place: &RunPlace) -> Result<()> {
    let needs_fork = matches!(how, AcceptRule::Promote | AcceptRule::Merge);
    if needs_fork && !matches!(place, RunPlace::Fork { .. }) {
        return Err(Error::invalid(
            "on_accept",
            "only a fork can be promoted or merged; use `keep` or `patch`",
        ));
    }
    Ok(())
}
