//! Carries out the pending effects of a run, one after the other.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{RunKey, Runs, give_up, place, refused};
use crate::engine::error::error_chain;
use crate::engine::lifecycle::stop::SnapshotOptions;
use crate::engine::{
    Create, Delete, Error, ErrorKind, Fork, IfExists, Result, SnapshotOnStop, Stop, WakeMode,
};
use crate::failpoint;
use crate::model::{
    Class, Expiry, Method, Name, Patch, Phase, Run, RunChange, RunEffect, RunId, RunPlace, Sandbox,
    Snapshot, SnapshotKind, Span, Usage,
};

/// How often an effect is tried that could not be carried out at the moment, and how long between.
const TRIES: u32 = 10;
const BETWEEN: Duration = Duration::from_secs(1);
/// How long a run is left as it is of which nothing could be written; twice as long every time.
const AFTER_STALL: Duration = Duration::from_secs(2);
const LONGEST_STALL: Duration = Duration::from_secs(60);

impl Runs {
    /// Has a task carry out what is pending of a run, unless one does.
    pub(super) fn drive_soon(self: &Arc<Self>, project: &Name, id: &RunId) {
        if !self.driven.lock().insert(id.clone()) {
            return;
        }
        let (this, project, id) = (Arc::clone(self), project.clone(), id.clone());
        self.context.tasks.spawn(async move { this.drive(&project, &id).await });
    }

    async fn drive(self: &Arc<Self>, project: &Name, id: &RunId) {
        let mut tries = 0;
        loop {
            let pending =
                self.get(project, id).ok().and_then(|run| run.pending.map(|it| (run, it)));
            let Some((run, effect)) = pending else {
                let mut driven = self.driven.lock();
                // Something may have become pending since that look.
                if self.get(project, id).is_ok_and(|run| run.pending.is_some()) {
                    continue;
                }
                driven.remove(id);
                self.stalled.lock().remove(&(project.clone(), id.clone()));
                return;
            };
            let outcome = match effect {
                RunEffect::Prepare => self.prepare(&run).await,
                RunEffect::Work => self.work(&run).await,
                RunEffect::Finish => self.conclude(&run).await,
                RunEffect::Stop => self.stop(&run).await,
                RunEffect::Accept => self.complete_acceptance(&run).await.map(drop),
                RunEffect::Discard => self.discard(&run).await,
            };
            match outcome {
                Ok(()) => tries = 0,
                Err(_) if self.context.tasks.is_shutdown() => return,
                Err(error) if error.kind() == ErrorKind::Unavailable && tries < TRIES => {
                    tries += 1;
                    if !self.context.tasks.sleep(BETWEEN).await {
                        return;
                    }
                }
                Err(error) => {
                    tries = 0;
                    if let Err(error) = self.broke(&run, effect, &error).await {
                        tracing::error!(run = %id, error = error_chain(&error), "a run is left as it is for now");
                        self.stalls(project, id);
                        self.driven.lock().remove(id);
                        return;
                    }
                }
            }
        }
    }

    /// The outcome of an effect could not be written: it is driven again later.
    fn stalls(&self, project: &Name, id: &RunId) {
        let mut stalled = self.stalled.lock();
        let (at, pause) = stalled
            .entry((project.clone(), id.clone()))
            .or_insert((Instant::now(), Duration::ZERO));
        *pause = (*pause * 2).clamp(AFTER_STALL, LONGEST_STALL);
        *at = Instant::now() + *pause;
    }

    /// Drives what was left as it was, once it has waited.
    pub(super) fn drive_stalled(self: &Arc<Self>) {
        let now = Instant::now();
        let stalled = self.stalled.lock();
        let due: Vec<RunKey> =
            stalled.iter().filter(|(_, (at, _))| *at <= now).map(|(key, _)| key.clone()).collect();
        drop(stalled);
        for (project, id) in due {
            self.drive_soon(&project, &id);
        }
    }

    /// An effect could not be carried out.
    async fn broke(&self, run: &Run, effect: RunEffect, error: &Error) -> Result<()> {
        let why = error_chain(error);
        tracing::warn!(run = %run.id, ?effect, error = why, "an effect of a run failed");
        self.change(&run.project, &run.id, |run, at| {
            if run.pending != Some(effect) {
                return Ok(());
            }
            match effect {
                RunEffect::Prepare | RunEffect::Work | RunEffect::Finish => {
                    give_up(run, RunChange::Fail, why, at)?;
                }
                // What cannot be stopped or deleted is left to its sandbox's own timeouts.
                RunEffect::Stop | RunEffect::Discard => {
                    let note = format!("its sandbox was left as it is: {why}");
                    run.why = Some(match run.why.take() {
                        Some(before) => format!("{before}; {note}"),
                        None => note,
                    });
                    run.pending = None;
                }
                RunEffect::Accept => {
                    run.pending = None;
                    run.decision = None;
                }
            }
            Ok(())
        })
        .await
    }

    /// Gives up on a run whose work cannot be done.
    pub(super) async fn fail(&self, run: &Run, why: String) -> Result<()> {
        self.change(&run.project, &run.id, |run, at| {
            if run.pending != Some(RunEffect::Work) {
                return Ok(());
            }
            give_up(run, RunChange::Fail, why, at)
        })
        .await
    }

    /// Makes the sandbox of a run, or keeps the state of the one it works in.
    async fn prepare(self: &Arc<Self>, run: &Run) -> Result<()> {
        let key = Some(format!("run/{}", run.id));
        let project = &run.project;
        let (sandbox, own) = match &run.spec.place {
            RunPlace::Existing { sandbox } => match self.free(run, sandbox).await? {
                Some(sandbox) => (sandbox, false),
                None => return Ok(()),
            },
            RunPlace::Fork { sandbox, name } => {
                let source = self.lifecycle.find(project, sandbox).await?;
                let name = name.clone().or_else(|| made_name(sandbox, run));
                let patch = patch_of(run, source.config.expires);
                let fork = Fork { name, patch, ..Fork::default() };
                (self.lifecycle.fork(project, sandbox, fork, key).await?.sandbox, true)
            }
            RunPlace::Fresh { image, name } => {
                let patch = Patch {
                    image: image.clone(),
                    driver: Some(self.context.settings.default_driver.clone()),
                    ..patch_of(run, Class::Resumable.default_expiry())
                };
                let name = name.clone();
                let create = Create { name, patch, if_exists: IfExists::Fail, ..Create::default() };
                (self.lifecycle.create(project, create, key).await?.sandbox, true)
            }
        };
        failpoint::pass("run.sandbox");
        let first = match own {
            true => sandbox.forked_from.as_ref().and_then(|from| from.snapshot.clone()),
            false => Some(self.pin(run, &sandbox).await?.id),
        };
        let before = if own { Usage::default() } else { self.used(&sandbox).await };
        self.change(project, &run.id, |run, _| {
            run.sandbox = Some(place(&sandbox));
            (run.own, run.first, run.usage_before) = (own, first, before);
            if run.status().is_active() {
                run.pending = Some(RunEffect::Work);
            }
            Ok(())
        })
        .await
    }

    /// A sandbox that was there before, once no other run works in it. `None`: the run is not to be prepared any more.
    async fn free(&self, run: &Run, name: &Name) -> Result<Option<Sandbox>> {
        loop {
            if self.context.tasks.is_shutdown() {
                return Err(Error::ShuttingDown);
            }
            if self.get(&run.project, &run.id)?.pending != Some(RunEffect::Prepare) {
                return Ok(None);
            }
            let sandbox = self.lifecycle.find(&run.project, name).await?;
            // It may have got another name since the run was started.
            match self.active_in(&sandbox.id) {
                Some(other) if other.id != run.id => self.a_moment().await,
                _ => return Ok(Some(sandbox)),
            }
        }
    }

    /// A snapshot of a sandbox as it is, kept for as long as the run's result is.
    pub(in crate::engine) async fn pin(
        self: &Arc<Self>,
        run: &Run,
        sandbox: &Sandbox,
    ) -> Result<Snapshot> {
        let wanted = SnapshotOptions {
            label: Some(run.id.to_string()),
            method: Method::Manual,
            expiry: Expiry::After(run.spec.keep),
            findings: Vec::new(),
        };
        let (id, name) = (sandbox.id.clone(), sandbox.name.clone());
        let work = self.lifecycle.turn(id.clone(), move |this, slot| async move {
            let mut sandbox = this.reread(&slot, &id, &name).await?;
            let kind = SnapshotKind::Checkpoint;
            match this.snapshot_now(&slot, &mut sandbox, kind, wanted.clone()).await? {
                Some(snapshot) => Ok(snapshot),
                None => this.snapshot_image(&mut sandbox, kind, wanted).await,
            }
        });
        work.await
    }

    /// Pins the result of a run: its own sandbox is stopped, any other continues.
    pub(super) async fn pinned(self: &Arc<Self>, run: &Run) -> Result<(Sandbox, Option<Snapshot>)> {
        let sandbox = self.sandbox_of(run).await?;
        if !run.own {
            let snapshot = self.pin(run, &sandbox).await?;
            return Ok((self.sandbox_of(run).await?, Some(snapshot)));
        }
        let stop = Stop {
            snapshot: SnapshotOnStop::Always,
            method: Method::Manual,
            expires: Some(Some(run.spec.keep)),
            ..Stop::default()
        };
        let stopped = self.lifecycle.stop(&run.project, &sandbox.name, stop).await?;
        Ok((stopped.sandbox, stopped.snapshot.map(|sized| sized.item)))
    }

    /// The work is done: its result is pinned for the review.
    async fn conclude(self: &Arc<Self>, run: &Run) -> Result<()> {
        self.close_approvals(run).await;
        let (sandbox, snapshot) = self.pinned(run).await?;
        failpoint::pass("run.pinned");
        let used = minus(self.used(&sandbox).await, run.usage_before);
        self.change(&run.project, &run.id, |run, at| {
            run.last = snapshot.map(|snapshot| snapshot.id);
            run.usage = Some(used);
            run.apply(RunChange::Finish, at).map_err(refused(run))?;
            run.pending = None;
            Ok(())
        })
        .await
    }

    async fn close_approvals(&self, run: &Run) {
        for approval in self.approvals.of_run(&run.project, &run.id) {
            if approval.is_pending() {
                self.approvals.close(&approval, "its run has ended").await;
            }
        }
    }

    /// Ends what a run started, and keeps the state of its sandbox.
    async fn stop(self: &Arc<Self>, run: &Run) -> Result<()> {
        self.close_approvals(run).await;
        let mut used = None;
        if let Ok(mut sandbox) = self.sandbox_of(run).await {
            let alive = run.attempts.iter().any(|attempt| attempt.ended_at.is_none());
            if alive && !run.own && sandbox.phase() == Phase::Paused {
                // Paused commands in it are to end, too.
                self.lifecycle.awake(&run.project, &sandbox.name, &WakeMode::Wake).await?;
            }
            for attempt in run.attempts.iter().filter(|attempt| attempt.ended_at.is_none()) {
                self.end_command(&sandbox.id, &attempt.command).await;
            }
            if run.own {
                let stop = Stop::default();
                let stopped = self.lifecycle.stop(&run.project, &sandbox.name, stop).await?;
                sandbox = stopped.sandbox;
            }
            let total = self.used(&sandbox).await;
            used = Some((minus(total, run.usage_before), sandbox.current.clone()));
        }
        self.change(&run.project, &run.id, |run, at| {
            if let Some((used, current)) = used {
                run.usage = Some(used);
                run.last = current.filter(|_| run.own);
            }
            for attempt in run.attempts.iter_mut().filter(|attempt| attempt.ended_at.is_none()) {
                attempt.ended_at = Some(at);
                attempt.problem = Some("the run was ended".to_owned());
            }
            run.pending = None;
            Ok(())
        })
        .await
    }

    /// Deletes the sandbox that was made for a run.
    async fn discard(self: &Arc<Self>, run: &Run) -> Result<()> {
        if run.own
            && let Some(there) = &run.sandbox
        {
            let id = there.id.clone();
            let deleted = self.lifecycle.turn(id.clone(), move |lifecycle, slot| async move {
                match lifecycle.db.sandbox_by_id(&id).await? {
                    Some(sandbox) => {
                        lifecycle.delete_sandbox(&slot, sandbox, Delete::default()).await.map(drop)
                    }
                    None => Ok(()),
                }
            });
            deleted.await?;
            self.lifecycle.storage.collector.collect_soon();
        }
        self.change(&run.project, &run.id, |run, _| {
            run.pending = None;
            Ok(())
        })
        .await
    }
}

/// The settings of a sandbox that is made for a run. It outlives the time for a review.
fn patch_of(run: &Run, usual: Span) -> Patch {
    let spec = &run.spec;
    let given = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
    let expires = Span(spec.keep.0.saturating_add(Span::days(1).0).max(usual.0));
    Patch {
        owner: given(&spec.owner),
        purpose: given(&spec.purpose),
        expires: Some(expires),
        ..Patch::default()
    }
}

/// `my-app-run-x4k2m9`; a generated name if that is too long.
pub(super) fn made_name(source: &Name, run: &Run) -> Option<Name> {
    let id = run.id.as_str();
    let tail = id.get(id.len().saturating_sub(6)..).unwrap_or(id);
    format!("{source}-run-{tail}").parse().ok()
}

pub(super) fn minus(all: Usage, before: Usage) -> Usage {
    Usage {
        active_cpu_ms: all.active_cpu_ms.saturating_sub(before.active_cpu_ms),
        wall_ms: all.wall_ms.saturating_sub(before.wall_ms),
        memory_peak: all.memory_peak,
        network_in: all.network_in.saturating_sub(before.network_in),
        network_out: all.network_out.saturating_sub(before.network_out),
        oom_kills: all.oom_kills.saturating_sub(before.oom_kills),
    }
}
