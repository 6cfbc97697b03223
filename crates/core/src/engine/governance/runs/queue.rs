//! The background work of runs: recovery, the queue, approvals, expiry.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::drive::made_name;
use super::{KEPT, KEPT_BYTES, RunKey, Runs};
use crate::engine::Result;
use crate::engine::error::error_chain;
use crate::engine::governance::approvals::beyond;
use crate::failpoint;
use crate::model::{
    EventData, Name, Phase, Run, RunChange, RunEffect, RunPlace, RunStatus, SandboxId, Timestamp,
};

/// How often is looked at what time alone changes.
const TICK: Duration = Duration::from_secs(1);

/// Starts the engine's own work on runs, which ends with the engine.
pub(in crate::engine) fn tend(this: &Arc<Runs>) {
    this.context.tasks.spawn(tend_all(Arc::downgrade(this)));
}

async fn tend_all(this: Weak<Runs>) {
    let Some((mut runs, mut approvals, shutdown)) = this
        .upgrade()
        .map(|this| (this.subscribe(), this.approvals.subscribe(), this.context.tasks.shutdown()))
    else {
        return;
    };
    if let Some(this) = this.upgrade() {
        this.approvals.close_orphans().await;
        // Runs do not wait until all sandboxes are recovered.
        this.context.tasks.spawn_until_shutdown(close_unheard(Arc::downgrade(&this)));
    }
    loop {
        {
            let Some(this) = this.upgrade() else { return };
            this.approvals.tend().await;
            this.follow_approvals().await;
            this.drive_stalled();
            this.start_next().await;
            this.expire().await;
            this.watch_questions();
            this.rest_where_waiting();
            this.wake_answered().await;
        }
        tokio::select! {
            _ = runs.changed() => {}
            _ = approvals.changed() => {}
            () = tokio::time::sleep(TICK) => {}
            () = shutdown.cancelled() => return,
        }
    }
}

/// Closes questions from inside sandboxes that do not run, once it is known which those are. One that is paused wakes with its
/// questions.
async fn close_unheard(this: Weak<Runs>) {
    let Some(mut left) = this.upgrade().map(|this| this.context.recovery.subscribe()) else {
        return;
    };
    if left.wait_for(|left| *left == 0).await.is_ok()
        && let Some(this) = this.upgrade()
    {
        this.close_unheard().await;
    }
}

impl Runs {
    /// Enters what is on disk.
    pub(in crate::engine) fn load(&self, all: Vec<Run>) {
        for run in all {
            self.show(run);
        }
    }

    /// Continues with pending effects.
    pub(in crate::engine) fn recover(self: &Arc<Self>) {
        for run in self.all_unfinished() {
            if run.pending.is_some() {
                self.drive_soon(&run.project, &run.id);
            }
        }
    }

    async fn close_unheard(&self) {
        let mut asleep = HashSet::new();
        for approval in self.approvals.asked_inside() {
            let found = self.db.sandbox_by_id(&approval.sandbox.id).await;
            let paused = matches!(&found, Ok(Some(sandbox)) if sandbox.phase() == Phase::Paused);
            if !paused && found.is_ok() && self.lifecycle.turns.live(&approval.sandbox.id).is_none()
            {
                asleep.insert(approval.id);
            }
        }
        self.approvals.close_unheard(|approval| !asleep.contains(&approval.id)).await;
    }

    /// Runs wait while one of their approvals does.
    async fn follow_approvals(&self) {
        let waiting = self.approvals.waiting_runs();
        let active = self.all_unfinished().into_iter().filter(|run| run.status().is_active());
        for run in active {
            let change = match (waiting.contains(&run.id), run.status()) {
                (true, RunStatus::Running) => RunChange::Ask,
                (false, RunStatus::WaitingForApproval) => RunChange::Answered,
                _ => continue,
            };
            let changed = self.change(&run.project, &run.id, |run, at| {
                // It may have come to its end in the meantime.
                let _ = run.apply(change, at);
                Ok(())
            });
            self.log_failure(&run, "follow its approvals", changed.await);
        }
    }

    /// Starts queued runs as far as their project allows.
    async fn start_next(self: &Arc<Self>) {
        let mut projects: BTreeMap<Name, (Vec<Run>, usize)> = BTreeMap::new();
        let mut busy = Busy::default();
        for run in self.all_unfinished() {
            let of = projects.entry(run.project.clone()).or_default();
            if run.status() == RunStatus::Queued {
                of.0.push(run);
                continue;
            }
            of.1 += usize::from(run.status().is_active());
            busy.add(&run);
        }
        for (project, (mut queued, mut running)) in projects {
            // A locked project starts nothing.
            let Ok(limits) = self.tenancy.project_runs(&project) else { continue };
            queued.sort_by_key(|run| (Reverse(run.spec.priority), run.id.clone()));
            for run in queued {
                if running >= limits.running as usize {
                    break;
                }
                // One run at a time works in a sandbox that was there before.
                if let Some(sandbox) = existing(&run)
                    && !self.claim(&mut busy, &project, sandbox).await
                {
                    continue;
                }
                let started = self.change(&project, &run.id, |run, at| {
                    run.apply(RunChange::Start, at).map_err(super::refused(run))?;
                    run.pending = Some(RunEffect::Prepare);
                    Ok(())
                });
                if self.log_failure(&run, "start", started.await) {
                    failpoint::pass("run.started");
                    running += 1;
                    self.drive_soon(&project, &run.id);
                }
            }
        }
    }

    /// Whether a run may start in a sandbox. No other may after that.
    async fn claim(&self, busy: &mut Busy, project: &Name, sandbox: &Name) -> bool {
        if !busy.names.insert((project.clone(), sandbox.clone())) {
            return false;
        }
        // A sandbox that another run made, or that was renamed since that run began in it. A
        // missing one is reported when the run is prepared.
        let found = self.lifecycle.find(project, sandbox).await;
        found.map_or(true, |found| busy.sandboxes.insert(found.id))
    }

    /// Announces the expiry of unreviewed runs, expires them, and removes the oldest that have
    /// ended.
    async fn expire(self: &Arc<Self>) {
        if let Some(time) = self.context.expiry_time() {
            for run in self.due(time) {
                if run.review_by().is_some_and(|until| until <= time) && run.pending.is_none() {
                    let expired = self.change(&run.project, &run.id, |run, at| {
                        if run.pending.is_some() {
                            return Ok(());
                        }
                        run.apply(RunChange::Expire, at).map_err(super::refused(run))?;
                        run.why = Some("nobody reviewed it in time".to_owned());
                        run.pending = run.own.then_some(RunEffect::Discard);
                        Ok(())
                    });
                    if self.log_failure(&run, "expire", expired.await) {
                        self.drive_soon(&run.project, &run.id);
                    }
                } else if !run.noticed && run.notice_at().is_some_and(|at| at <= time) {
                    let noticed = self.change(&run.project, &run.id, |run, _| {
                        run.noticed = true;
                        Ok(())
                    });
                    if self.log_failure(&run, "announce its expiry", noticed.await) {
                        self.emit(&run, EventData::RunExpiring);
                    }
                }
            }
        }
        for key in self.surplus() {
            match self.store.remove::<Run>(&key).await {
                Ok(()) => {
                    self.table.write().remove(&key);
                    self.kept.forget(&key.1);
                }
                Err(error) => {
                    tracing::warn!(run = %key.1, error = error_chain(&error), "an old run was not removed");
                }
            }
        }
    }

    /// Those whose expiry is to be announced, or has come.
    fn due(&self, time: Timestamp) -> Vec<Run> {
        let table = self.table.read();
        let unreviewed = self.unreviewed.lock();
        let all = unreviewed.iter().filter_map(|key| table.get(key));
        let is_due = |run: &&Run| {
            let at = if run.noticed { run.review_by() } else { run.notice_at() };
            at.is_some_and(|at| at <= time)
        };
        all.filter(is_due).cloned().collect()
    }

    fn surplus(&self) -> Vec<RunKey> {
        let table = self.table.read();
        if table.len() <= KEPT && self.kept.bytes() <= KEPT_BYTES {
            return Vec::new();
        }
        let (unfinished, unreviewed) = (self.unfinished.lock(), self.unreviewed.lock());
        let has_ended = |key: &&RunKey| !unfinished.contains(*key) && !unreviewed.contains(*key);
        let mut ended: BTreeMap<&Name, Vec<&RunKey>> = BTreeMap::new();
        for key in table.keys().filter(has_ended) {
            ended.entry(&key.0).or_default().push(key);
        }
        let surplus = |all: Vec<&RunKey>| {
            let sizes = all.iter().map(|(_, id)| self.kept.bytes_of(id));
            let count = beyond(sizes, KEPT, KEPT_BYTES);
            all.into_iter().take(count).cloned().collect::<Vec<_>>()
        };
        ended.into_values().flat_map(surplus).collect()
    }

    /// Says whether it went well.
    fn log_failure(&self, run: &Run, what: &str, done: Result<()>) -> bool {
        if let Err(error) = &done {
            tracing::error!(run = %run.id, error = error_chain(error), "a run could not {what}; it is tried again");
        }
        done.is_ok()
    }
}

/// The sandboxes in which no other run may start: by their names, which are unique in a project, and by their ids.
#[derive(Debug, Default)]
struct Busy {
    names: HashSet<(Name, Name)>,
    sandboxes: HashSet<SandboxId>,
}

impl Busy {
    /// Adds what a run has that was started and still has something to do.
    fn add(&mut self, run: &Run) {
        if let Some(there) = &run.sandbox {
            self.sandboxes.insert(there.id.clone());
        } else if run.status().is_active() {
            let name = match &run.spec.place {
                RunPlace::Existing { sandbox } => Some(sandbox.clone()),
                RunPlace::Fork { sandbox, name } => {
                    name.clone().or_else(|| made_name(sandbox, run))
                }
                RunPlace::Fresh { name, .. } => name.clone(),
            };
            self.names.extend(name.map(|name| (run.project.clone(), name)));
        }
    }
}

fn existing(run: &Run) -> Option<&Name> {
    match &run.spec.place {
        RunPlace::Existing { sandbox } => Some(sandbox),
        RunPlace::Fork { .. } | RunPlace::Fresh { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::Busy;
    use crate::model::{
        AcceptRule, KeyId, Name, Run, RunChange, RunPlace, RunSandbox, RunSpec, SandboxId, Span,
        now,
    };

    fn name(text: &str) -> Name {
        text.parse().expect("a name")
    }

    fn active(project: &str, place: RunPlace) -> Run {
        let spec = RunSpec {
            place,
            command: None,
            repository: String::new(),
            owner: String::new(),
            purpose: String::new(),
            class: String::new(),
            priority: 0,
            approve: Vec::new(),
            approve_hosts: false,
            known_hosts: Vec::new(),
            approve_secrets: Vec::new(),
            spending: Vec::new(),
            on_accept: AcceptRule::Keep,
            keep: Span::days(1),
            timeout: None,
            retries: 0,
            heartbeat: Span::seconds(60),
        };
        let mut run = Run::new(name(project), spec, KeyId::fresh());
        assert!(run.apply(RunChange::Start, now()).is_ok());
        run
    }

    #[test]
    fn a_name_is_busy_in_its_own_project_alone() {
        let mut busy = Busy::default();
        busy.add(&active("one", RunPlace::Existing { sandbox: name("app") }));
        assert!(busy.names.contains(&(name("one"), name("app"))));
        assert!(!busy.names.contains(&(name("two"), name("app"))));
        let fork = RunPlace::Fork { sandbox: name("app"), name: Some(name("fork")) };
        busy.add(&active("two", fork));
        assert!(busy.names.contains(&(name("two"), name("fork"))));
        assert!(!busy.names.contains(&(name("two"), name("app"))), "its origin is free");
    }

    #[test]
    fn what_a_run_made_is_busy_by_its_id() {
        let mut busy = Busy::default();
        let mut run = active("one", RunPlace::Fresh { image: None, name: None });
        let id = SandboxId::fresh();
        run.sandbox = Some(RunSandbox { id: id.clone(), name: name("made") });
        busy.add(&run);
        assert!(busy.sandboxes.contains(&id));
    }
}
