//! Services: commands that belong to a sandbox and are started again after every resume.
//!
//! ```text
//! Starting ──> Running ──ended──> Restarting ──(0.5 s, doubling to 30 s)──> Starting
//!                 │                   └── after too many in a row ──> Failed
//!                 ├──ended, and not to be started again──> Exited
//!                 └──stopped by hand, or the session ends──> Stopped
//! ```
//!
//! A service is a command like any other, with a record, a log and the service's name on it. It is
//! started when the start hooks have run, by a task of its own, its *supervisor*. A service does not
//! keep its sandbox awake: its users do, through the gateway. While a session ends nothing is
//! started again.
//!
//! A restarted daemon adopts the command it finds alive and supervises it; what ended meanwhile is
//! judged as if it had ended just now. What somebody started or stopped by hand is on record with
//! the session, so that it stays so. The next session begins as the configuration has it.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::db::Page;
use crate::engine::error::error_chain;
use crate::engine::running::live::RunningSandbox;
use crate::engine::running::services::{ServiceStanding, ServiceState, Supervised};
use crate::engine::running::tracked::Tracked;
use crate::engine::session::Sessions;
use crate::engine::session::command::Exec;
use crate::engine::{Error, Result};
use crate::guest::GuestError;
use crate::model::{Command, CommandId, CommandState, Name, Restart, Sandbox, Service, now};

/// How long one that ended at once waits before it is started again; twice as long every time.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// One that ran so long is not failing: the count begins again.
const STABLE: Duration = Duration::from_secs(20);
/// How often in a row it is started again before that is given up.
const PATIENCE: u32 = 20;
/// How long one that is stopped may take to end by itself.
const GRACE: Duration = Duration::from_secs(5);

/// A service and how it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceStatus {
    /// What it is meant to be.
    pub service: Service,
    /// How it stands.
    pub state: ServiceState,
    /// How often it has failed in a row.
    pub failures: u32,
    /// Its command that runs, or the last one.
    pub command: Option<CommandId>,
}

pub(in crate::engine) fn declared<'a>(sandbox: &'a Sandbox, name: &Name) -> Result<&'a Service> {
    let found = sandbox.config.services.iter().find(|service| service.name == *name);
    let none = || Error::NoService { sandbox: sandbox.name.clone(), service: name.clone() };
    found.ok_or_else(none)
}

impl Sessions {
    /// Starts what is to run from the start of a session.
    pub(in crate::engine) fn start_services(self: &Arc<Self>, live: &Arc<RunningSandbox>) {
        for service in &live.sandbox().config.services {
            if service.start {
                self.run_service(live, service, None, false);
            }
        }
    }

    /// Adopts the services of a machine that an earlier daemon started.
    pub(in crate::engine) fn adopt_services(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        commands: &[Command],
    ) {
        let session = live.session();
        for service in &live.sandbox().config.services {
            let alive = live
                .commands
                .lock()
                .values()
                .find(|tracked| tracked.record().service.as_ref() == Some(&service.name))
                .cloned();
            // Newest first, as the index lists them.
            let last = commands.iter().find(|command| {
                command.session == session.id && command.service.as_ref() == Some(&service.name)
            });
            let wished = session.services.get(&service.name).copied().unwrap_or(service.start);
            let over = last.filter(|last| last.state == CommandState::Exited);
            let left = over.and_then(|last| last.exit_code).filter(|code| !again(service, *code));
            match (alive, left) {
                (Some(tracked), _) => self.run_service(live, service, Some(tracked), false),
                (None, Some(code)) => {
                    let ended = Supervised::new(service.clone());
                    ended.set(ServiceState::Exited { code });
                    ended.standing.lock().command = last.map(|last| last.id.clone());
                    ended.over.send_replace(true);
                    live.services.0.lock().insert(service.name.clone(), ended);
                }
                (None, None) if wished => self.run_service(live, service, None, false),
                (None, None) => {}
            }
        }
    }

    /// Brings what runs to what is declared, after that was changed.
    pub(in crate::engine) fn reconcile_services(self: &Arc<Self>, live: &Arc<RunningSandbox>) {
        let sandbox = live.sandbox();
        let there: Vec<Arc<Supervised>> = live.services.0.lock().values().cloned().collect();
        for one in there {
            let name = &one.service.name;
            if !sandbox.config.services.iter().any(|service| service.name == *name) {
                one.unwanted.send_replace(true);
                live.services.0.lock().remove(name);
            }
        }
        let wishes = live.session().services;
        for service in &sandbox.config.services {
            let same = live.services.get(&service.name).is_some_and(|one| one.service == *service);
            let wished = wishes.get(&service.name).copied().unwrap_or(service.start);
            if !same && wished {
                self.run_service(live, service, None, true);
            }
        }
    }

    /// Has a service supervised. One that is already is left alone, or replaced.
    pub(in crate::engine) fn run_service(
        self: &Arc<Self>,
        live: &Arc<RunningSandbox>,
        service: &Service,
        running: Option<Arc<Tracked>>,
        replace: bool,
    ) {
        let mut all = live.services.0.lock();
        let before = all.get(&service.name).filter(|before| !before.is_over()).cloned();
        match &before {
            Some(before) if !replace && !*before.unwanted.borrow() => return,
            Some(before) => {
                before.unwanted.send_replace(true);
            }
            None => {}
        }
        let one = Supervised::new(service.clone());
        all.insert(service.name.clone(), Arc::clone(&one));
        drop(all);
        let supervisor = Supervisor {
            sessions: Arc::downgrade(self),
            live: Arc::downgrade(live),
            one,
            closed: live.closing(),
            shutdown: self.context.tasks.shutdown(),
        };
        self.context.tasks.spawn(async move {
            if let Some(before) = before {
                before.ended().await;
            }
            let one = Arc::clone(&supervisor.one);
            supervisor.run(running).await;
            one.over.send_replace(true);
        });
    }

    /// Remembers what somebody wants of a service for as long as the session lasts, in its turn: a
    /// session that has ended stays as it ended.
    pub(in crate::engine) async fn note_requested_state(
        self: &Arc<Self>,
        sandbox: &Sandbox,
        service: &Name,
        wanted: bool,
    ) -> Result<Option<Arc<RunningSandbox>>> {
        let service = service.clone();
        let records = Arc::clone(&self.records);
        self.turns
            .turn(sandbox.id.clone(), move |slot| async move {
                let Some(live) = slot.live() else { return Ok(None) };
                let session = live.change_session(|session| {
                    session.services.insert(service, wanted);
                });
                records.keep_session(&session).await?;
                Ok(Some(live))
            })
            .await
    }

    pub(in crate::engine) async fn service_status(
        &self,
        sandbox: &Sandbox,
        name: &Name,
    ) -> Result<ServiceStatus> {
        declared(sandbox, name)?;
        let all = self.service_statuses(sandbox).await?;
        let none = || Error::NoService { sandbox: sandbox.name.clone(), service: name.clone() };
        all.into_iter().find(|one| one.service.name == *name).ok_or_else(none)
    }

    pub(in crate::engine) async fn service_statuses(
        &self,
        sandbox: &Sandbox,
    ) -> Result<Vec<ServiceStatus>> {
        let live = self.turns.live(&sandbox.id);
        let mut all = Vec::new();
        let mut past: Option<Vec<Command>> = None;
        for service in &sandbox.config.services {
            let one = live.as_ref().and_then(|live| live.services.get(&service.name));
            let standing = one.map(|one| one.standing.lock().clone());
            let mut standing = standing.unwrap_or(ServiceStanding {
                state: ServiceState::Stopped,
                failures: 0,
                command: None,
            });
            if standing.command.is_none() {
                if past.is_none() {
                    past = Some(self.db.commands(&sandbox.id, &Page::all()).await?.items);
                }
                let of = |command: &&Command| command.service.as_ref() == Some(&service.name);
                let last = past.iter().flatten().find(of);
                standing.command = last.map(|command| command.id.clone());
            }
            let ServiceStanding { state, failures, command } = standing;
            all.push(ServiceStatus { service: service.clone(), state, failures, command });
        }
        Ok(all)
    }
}

/// Whether a service that ended so is started again.
fn again(service: &Service, code: i32) -> bool {
    match service.restart {
        Restart::Never => false,
        Restart::OnFailure => code != 0,
        Restart::Always => true,
    }
}

fn pause_after(failures: u32) -> Duration {
    let doubled = 2u32.saturating_pow(failures.saturating_sub(1));
    FIRST_PAUSE.saturating_mul(doubled).min(LONGEST_PAUSE)
}

/// Runs one service. Holds neither the engine nor the machine while it waits.
struct Supervisor {
    sessions: Weak<Sessions>,
    live: Weak<RunningSandbox>,
    one: Arc<Supervised>,
    closed: watch::Receiver<bool>,
    shutdown: CancellationToken,
}

/// How one run of a service came out.
enum RunOutcome {
    /// It ended.
    Ended { code: i32, lasted: Duration },
    /// It never began.
    NotStarted(String),
    /// It is not needed any more, or its session is over.
    Stopped,
}

impl Supervisor {
    async fn run(mut self, mut running: Option<Arc<Tracked>>) {
        loop {
            if self.resting() {
                return self.one.set(ServiceState::Stopped);
            }
            let came = match running.take() {
                Some(tracked) => self.follow(tracked).await,
                None => self.once().await,
            };
            let restart = self.one.service.restart;
            let problem = match came {
                RunOutcome::Stopped => return self.one.set(ServiceState::Stopped),
                RunOutcome::Ended { code, .. } if !again(&self.one.service, code) => {
                    self.one.standing.lock().failures = 0;
                    return self.one.set(ServiceState::Exited { code });
                }
                RunOutcome::Ended { code, lasted } => {
                    if lasted >= STABLE {
                        self.one.standing.lock().failures = 0;
                    }
                    format!("it ended with {code}")
                }
                RunOutcome::NotStarted(problem) => problem,
            };
            let failures = {
                let mut standing = self.one.standing.lock();
                standing.failures += 1;
                standing.failures
            };
            if restart == Restart::Never || failures >= PATIENCE {
                return self.one.set(ServiceState::Failed { problem });
            }
            let pause = pause_after(failures);
            let at = now().checked_add(pause).unwrap_or_else(|_| now());
            self.one.set(ServiceState::Restarting { at, problem });
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.rest() => {}
            }
        }
    }

    /// Starts it and waits for its end.
    async fn once(&mut self) -> RunOutcome {
        let (Some(sessions), Some(live)) = (self.sessions.upgrade(), self.live.upgrade()) else {
            return RunOutcome::Stopped;
        };
        self.one.set(ServiceState::Starting);
        let Service { name, argv, env, cwd, user, .. } = self.one.service.clone();
        let by = Some("service".to_owned());
        let exec = Exec { argv, env, cwd, user, detach: true, by, ..Exec::default() };
        let launched = sessions.launch_service(&live, &exec, &name).await;
        drop((sessions, live));
        match launched {
            Ok(tracked) => self.follow(tracked).await,
            Err(Error::SessionOver | Error::ShuttingDown | Error::Guest(GuestError::Lost)) => {
                RunOutcome::Stopped
            }
            Err(error) => {
                tracing::warn!(service = %name, error = error_chain(&error), "a service was not started");
                RunOutcome::NotStarted(error_chain(&error))
            }
        }
    }

    async fn follow(&mut self, tracked: Arc<Tracked>) -> RunOutcome {
        let since = tracked.record().started_at;
        {
            let mut standing = self.one.standing.lock();
            standing.state = ServiceState::Running { since };
            standing.command = Some(tracked.id());
        }
        let mut unwanted = self.one.unwanted.subscribe();
        tokio::select! {
            () = tracked.ended() => {}
            _ = unwanted.wait_for(|unwanted| *unwanted) => {}
            // The session is over, and how its processes end is not a service's business; or they
            // are suspended, and resume.
            _ = self.closed.wait_for(|closed| *closed) => return RunOutcome::Stopped,
            // The next daemon takes it up.
            () = self.shutdown.cancelled() => return RunOutcome::Stopped,
        }
        if tracked.outcome().is_none() {
            self.end(&tracked).await;
            return RunOutcome::Stopped;
        }
        let record = tracked.record();
        match record.exit_code {
            Some(code) if !self.resting() => {
                let ended = record.ended_at.unwrap_or_else(now).as_millisecond();
                let lasted = u64::try_from(ended - since.as_millisecond()).unwrap_or(0);
                RunOutcome::Ended { code, lasted: Duration::from_millis(lasted) }
            }
            None if !self.resting() => {
                RunOutcome::NotStarted("the agent does not know it".to_owned())
            }
            _ => RunOutcome::Stopped,
        }
    }

    /// Ends it: politely, then not.
    async fn end(&self, tracked: &Tracked) {
        for signal in [15, 9] {
            let Some(live) = self.live.upgrade() else { return };
            if let Ok(guest) = live.guest().await {
                tracked.causes().signalled(signal);
                let _ = guest.signal(tracked.record().inside(), signal).await;
            }
            if tokio::time::timeout(GRACE, tracked.ended()).await.is_ok() {
                return;
            }
        }
    }

    fn resting(&self) -> bool {
        *self.one.unwanted.borrow() || *self.closed.borrow() || self.shutdown.is_cancelled()
    }

    async fn rest(&mut self) {
        let mut unwanted = self.one.unwanted.subscribe();
        tokio::select! {
            _ = unwanted.wait_for(|unwanted| *unwanted) => {}
            _ = self.closed.wait_for(|closed| *closed) => {}
            () = self.shutdown.cancelled() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::pause_after;

    #[test]
    fn pauses_grow_and_have_an_end() {
        let pauses: Vec<u128> = (1..=8).map(|n| pause_after(n).as_millis()).collect();
        assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 16000, 30000, 30000]);
        assert_eq!(pause_after(u32::MAX), Duration::from_secs(30));
    }
}
