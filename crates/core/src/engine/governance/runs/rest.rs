//! Suspends a sandbox whose processes do nothing while somebody considers one of its questions: a
//! container is frozen, a machine that keeps memory is paused. An answer, an expiry, or any call
//! that needs the sandbox resumes it.
//!
//! Nothing of this is on disk. A daemon that dies leaves a frozen container to the next, which thaws what it adopts, and a paused
//! machine, which the next wakes when it finds an answer that is newer.
//!
//! A connection that is held ends with its session. So a machine in which one is held, or any is open, is not paused: it
//! continues idle, and only at a spending limit is it held where it is.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::Result;
use crate::engine::error::error_chain;
use crate::engine::governance::runs::Runs;
use crate::engine::lifecycle::sandbox::WakeFrom;
use crate::engine::running::freeze_guard::FrozenProcesses;
use crate::engine::running::live::RunningSandbox;
use crate::failpoint;
use crate::model::lifecycle::Phase;
use crate::model::{
    ApprovalId, ApprovalSubject, AuditRecord, Name, OnIdle, RunSandbox, SandboxId, SessionEnd,
    Timestamp,
};
use crate::net::Traffic;

/// How often it is looked at what a sandbox does that waits, and how many quiet looks are enough.
const LOOK: Duration = Duration::from_secs(1);
const QUIET_LOOKS: u32 = 2;
/// How much CPU time between two looks is nothing. A kernel of its own has always something to do.
const IDLE_PROCESSES: Duration = Duration::from_millis(20);
const IDLE_MACHINE: Duration = Duration::from_millis(200);
/// How often the task checks whether somebody types something into a suspended command.
const INPUT_LOOK: Duration = Duration::from_millis(200);
/// How long a sandbox that could not be frozen or paused is left alone.
const AGAIN: Duration = Duration::from_secs(60);
/// How often it is tried to wake one, and how long between; twice as long every time.
const WAKE_TRIES: u32 = 8;
const WAKE_AGAIN: Duration = Duration::from_secs(1);
/// How much older than a pause an answer may be that was not noticed by it.
const WHILE_PAUSING: jiff::SignedDuration = jiff::SignedDuration::from_secs(60);

/// What is seen of a sandbox at one look.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Activity {
    calls: u64,
    /// How often the standard input of its commands was used.
    input: u64,
    cpu: Duration,
    traffic: Option<Traffic>,
}

impl Activity {
    /// Whether nothing happened since another look. With `stop`, what its processes do is not asked.
    fn is_quiet_since(&self, before: &Self, idle: Duration, stop: bool) -> bool {
        let unused = self.calls == before.calls && self.input == before.input;
        let idle = self.cpu.saturating_sub(before.cpu) <= idle && self.traffic == before.traffic;
        unused && (idle || stop)
    }
}

/// Reports that a sandbox resumes, however that happens.
struct Resting<'a>(&'a RunningSandbox);

impl Drop for Resting<'_> {
    fn drop(&mut self) {
        self.0.rest.end();
    }
}

impl Runs {
    /// Looks after all sandboxes that wait for an answer.
    pub(super) fn rest_where_waiting(self: &Arc<Self>) {
        let waiting = self.approvals.waiting_sandboxes();
        if waiting.is_empty() {
            return;
        }
        for live in self.lifecycle.turns.all_live() {
            let session = live.session().id;
            if live.is_closed()
                || !waiting.contains(&live.sandbox().id)
                || !self.resting.lock().insert(session.clone())
            {
                continue;
            }
            let this = Arc::clone(self);
            self.context.tasks.spawn(async move {
                this.stand_by(&live).await;
                this.resting.lock().remove(&session);
            });
        }
    }

    async fn stand_by(self: &Arc<Self>, live: &Arc<RunningSandbox>) {
        let (mut closing, shutdown) = (live.closing(), self.context.tasks.shutdown());
        let id = live.sandbox().id.clone();
        let idle = match live.driver.relayer() {
            Some(_) => IDLE_PROCESSES,
            None => IDLE_MACHINE,
        };
        let (mut before, mut quiet) = (None, 0);
        while !live.is_closed() && !shutdown.is_cancelled() {
            let asked = self.questions_of(&id);
            if asked.is_empty() {
                return;
            }
            let stop = asked.iter().any(|(_, subject)| *subject == ApprovalSubject::Spending);
            let now = self.look(live, stop).await;
            let is_quiet = match (&before, &now) {
                (Some(before), Some(now)) => Activity::is_quiet_since(now, before, idle, stop),
                _ => false,
            };
            quiet = if is_quiet { quiet + 1 } else { 0 };
            before = now;
            let enough = if stop { 1 } else { QUIET_LOOKS };
            if let Some(now) = now.filter(|_| quiet >= enough) {
                quiet = 0;
                let asked = asked.into_iter().map(|(id, _)| id).collect();
                if let Err(error) = self.stand_still(live, now, asked, stop).await {
                    tracing::info!(sandbox = %live.sandbox().name, error = error_chain(&error), "a sandbox that waits for an approval goes on running");
                    if !self.context.tasks.sleep(AGAIN).await {
                        return;
                    }
                }
                before = None;
                continue;
            }
            tokio::select! {
                () = tokio::time::sleep(LOOK) => {}
                _ = closing.changed() => {}
                () = shutdown.cancelled() => {}
            }
        }
    }

    fn questions_of(&self, sandbox: &SandboxId) -> Vec<(ApprovalId, ApprovalSubject)> {
        self.approvals.pending_of(sandbox)
    }

    /// What a sandbox does. `None` while it is used by more than its commands, or has none. If it
    /// is to `stop`, connections to its ports do not count: a client with an open one could keep it
    /// running beyond its limit.
    async fn look(&self, live: &RunningSandbox, stop: bool) -> Option<Activity> {
        let id = live.sandbox().id.clone();
        if live.is_closed() || self.lifecycle.turns.slot(&id).is_busy() {
            return None;
        }
        let (mut alive, mut held) = (0, 0);
        for tracked in live.commands.lock().values() {
            if tracked.outcome().is_some() {
                continue;
            }
            alive += 1;
            held += usize::from(tracked.record().service.is_none());
        }
        let ports = if stop { live.port_holders() } else { 0 };
        if alive == 0 || live.holders().saturating_sub(ports) > held {
            return None;
        }
        let cpu = live.driver.usage(&live.key).await.ok()?.cpu;
        Some(Activity {
            calls: live.rest.calls(),
            input: input_of(live),
            cpu,
            traffic: live.traffic(),
        })
    }

    async fn stand_still(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        look: Activity,
        asked: HashSet<ApprovalId>,
        stop: bool,
    ) -> Result<()> {
        let may_pause = self.lifecycle.on_idle(&live.sandbox()) == OnIdle::Pause;
        let connected =
            live.held_flows() > 0 || !live.connections().is_empty() || live.port_holders() > 0;
        if live.driver.memory().is_some() && may_pause && !connected && !is_attended(live) {
            return self.pause(live, look, asked).await;
        }
        // Connections of a machine that is held end after a while. It does nothing, so it may as
        // well stay idle.
        if live.driver.relayer().is_some() || stop {
            self.freeze(live, look, &asked).await?;
        }
        Ok(())
    }

    /// Freezes the processes of a sandbox, or its machine, until one of these questions is over, or
    /// something needs it to resume.
    async fn freeze(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        look: Activity,
        asked: &HashSet<ApprovalId>,
    ) -> Result<()> {
        let (mut closing, shutdown) = (live.closing(), self.context.tasks.shutdown());
        let mut changed = self.approvals.subscribe();
        if !live.rest.begin(look.calls) {
            return Ok(());
        }
        let resting = Resting(live);
        if input_of(live) != look.input {
            return Ok(());
        }
        let frozen = FrozenProcesses::freeze(&self.context, live).await?;
        failpoint::pass("approval.frozen");
        tracing::debug!(sandbox = %live.sandbox().name, "frozen while an approval waits");
        let id = &live.sandbox().id;
        while self.all_wait(id, asked) && !live.is_closed() {
            tokio::select! {
                () = live.rest.wanted() => break,
                _ = changed.changed() => {}
                _ = closing.changed() => {}
                () = tokio::time::sleep(INPUT_LOOK) => {}
                () = shutdown.cancelled() => break,
            }
            if input_of(live) != look.input {
                break;
            }
        }
        frozen.thaw().await?;
        drop(resting);
        Ok(())
    }

    fn all_wait(&self, sandbox: &SandboxId, asked: &HashSet<ApprovalId>) -> bool {
        let pending = self.questions_of(sandbox);
        asked.iter().all(|id| pending.iter().any(|(pending, _)| pending == id))
    }

    /// Pauses a machine. When one of these questions is over meanwhile, it is woken at once.
    async fn pause(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        look: Activity,
        asked: HashSet<ApprovalId>,
    ) -> Result<()> {
        let sandbox = live.sandbox();
        let (id, this, asked_for) = (sandbox.id.clone(), Arc::clone(self), Arc::clone(live));
        let questions = asked.clone();
        let paused = self.lifecycle.turn(id.clone(), move |lifecycle, slot| async move {
            let live = asked_for;
            let same = slot.live().is_some_and(|now| Arc::ptr_eq(&now, &live));
            let id = live.sandbox().id.clone();
            // Asked again in its turn: somebody may have come, or answered.
            let used = live.rest.calls() != look.calls || live.held_flows() > 0;
            if !same || used || !this.all_wait(&id, &questions) {
                return Ok(false);
            }
            let mut sandbox = (*live.sandbox()).clone();
            lifecycle.pause_session(&slot, &mut sandbox, SessionEnd::Paused).await?;
            let target = Some(format!("sandbox/{}", sandbox.name));
            let record = AuditRecord::by_system(Some(&sandbox.project), "sandbox.pause", target);
            lifecycle.context.audit.note(record.with("reason", "approval"));
            Ok(true)
        });
        if paused.await? {
            failpoint::pass("approval.paused");
            self.lifecycle.storage.collector.collect_soon();
            if !self.all_wait(&id, &asked) {
                self.wake_soon(&sandbox.project, &id);
            }
        }
        Ok(())
    }

    /// Wakes sandboxes that were paused while an approval waited that is over.
    pub(super) async fn wake_answered(self: &Arc<Self>) {
        for (project, RunSandbox { id, name }, at) in self.approvals.take_ended() {
            let sandbox = match self.db.sandbox_by_id(&id).await {
                Ok(Some(sandbox)) => sandbox,
                Ok(None) => continue,
                Err(_) => {
                    // The next round asks again.
                    self.approvals.not_taken((project, RunSandbox { id, name }, at));
                    continue;
                }
            };
            let paused = sandbox.phase() == Phase::Paused;
            if paused && is_newer(at, sandbox.used_at) {
                self.wake_soon(&project, &id);
            }
        }
    }

    fn wake_soon(self: &Arc<Self>, project: &Name, id: &SandboxId) {
        let (this, project, id) = (Arc::clone(self), project.clone(), id.clone());
        self.context.tasks.spawn(async move {
            let mut pause = WAKE_AGAIN;
            for _ in 0..WAKE_TRIES {
                let Ok(Some(sandbox)) = this.db.sandbox_by_id(&id).await else { return };
                if sandbox.phase() != Phase::Paused {
                    return;
                }
                let woken = this.lifecycle.wake(&id, &sandbox.name, None, WakeFrom::Any).await;
                let Err(error) = woken else { return };
                tracing::warn!(%project, sandbox = %sandbox.name, error = error_chain(&error), "a sandbox was not woken by the answer to its approval; it is tried again");
                if !this.context.tasks.sleep(pause).await {
                    return;
                }
                pause *= 2;
            }
        });
    }
}

/// How often the standard input of commands was used.
fn input_of(live: &RunningSandbox) -> u64 {
    live.commands.lock().values().map(|tracked| tracked.stdin.uses()).sum()
}

/// Whether somebody follows a command and may type into it: no call would wake a paused machine for
/// that.
fn is_attended(live: &RunningSandbox) -> bool {
    live.commands.lock().values().any(|tracked| {
        let record = tracked.record();
        tracked.outcome().is_none() && record.service.is_none() && (!record.detached || record.tty)
    })
}

/// Whether an answer came after a pause, or while it was under way.
fn is_newer(answer: Timestamp, paused: Timestamp) -> bool {
    answer.checked_add(WHILE_PAUSING).is_ok_and(|answer| answer >= paused)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Activity, IDLE_PROCESSES, is_newer};
    use crate::model::Timestamp;
    use crate::net::Traffic;

    #[test]
    fn only_what_nobody_uses_and_does_nothing_is_quiet() {
        let before = Activity {
            calls: 3,
            input: 7,
            cpu: Duration::from_secs(9),
            traffic: Some(Traffic { received: 5, sent: 5 }),
        };
        let quiet = |now: Activity, stop| now.is_quiet_since(&before, IDLE_PROCESSES, stop);
        assert!(quiet(before, false));
        assert!(quiet(Activity { cpu: before.cpu + Duration::from_millis(5), ..before }, false));
        let busy = Activity { cpu: before.cpu + Duration::from_millis(500), ..before };
        assert!(!quiet(busy, false) && quiet(busy, true), "a limit stops work, too");
        let sent = Activity { traffic: Some(Traffic { received: 5, sent: 6 }), ..before };
        assert!(!quiet(sent, false));
        assert!(!quiet(Activity { calls: 4, ..before }, true), "somebody wants something of it");
        assert!(!quiet(Activity { input: 8, ..before }, true), "somebody types");
    }

    #[test]
    fn an_answer_from_before_the_pause_wakes_nobody() {
        let at = |seconds| Timestamp::from_second(seconds).unwrap();
        assert!(is_newer(at(1000), at(1000)) && is_newer(at(990), at(1000)));
        assert!(!is_newer(at(900), at(1000)));
    }
}
