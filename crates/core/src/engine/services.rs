//! Services: commands that belong to a sandbox and are there again after every resume.
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
//! keep its sandbox awake: whoever uses it does, through the gateway. While a session ends nothing is
//! started again.
//!
//! A daemon that comes back takes up the command it finds alive and supervises it; what ended
//! meanwhile is judged as if it had ended just now. What somebody started or stopped by hand is on
//! record with the session, so that it stays so. The next session begins as the configuration has it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::sync::watch;

use super::boot::chain_of;
use super::command::Exec;
use super::live::Live;
use super::slot::lock;
use super::track::Tracked;
use super::{Engine, Error, Inner, Result, WakeMode};
use crate::db::Page;
use crate::guest::GuestError;
use crate::model::{
    Command, CommandId, CommandState, Name, Patch, Restart, Sandbox, Service, Timestamp, now,
};

/// How long one that ended at once waits before it is started again; twice as long every time.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// One that ran so long is not failing: the count begins again.
const STABLE: Duration = Duration::from_secs(20);
/// How often in a row it is started again before that is given up.
const PATIENCE: u32 = 20;
/// How long one that is stopped may take to end by itself.
const GRACE: Duration = Duration::from_secs(5);

/// How a service stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServiceState {
    /// It was not started, or somebody stopped it, or its sandbox sleeps.
    Stopped,
    /// It is about to run.
    Starting,
    /// It runs.
    Running {
        /// Since when.
        since: Timestamp,
    },
    /// It ended and is about to be started again.
    Restarting {
        /// When.
        at: Timestamp,
        /// Why it ended.
        problem: String,
    },
    /// It ended and is left so.
    Exited {
        /// Its exit code.
        code: i32,
    },
    /// It ended too often, or could not be started, and is left so.
    Failed {
        /// What went wrong the last time.
        problem: String,
    },
}

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

#[derive(Debug, Clone)]
struct Standing {
    state: ServiceState,
    failures: u32,
    command: Option<CommandId>,
}

#[derive(Debug)]
struct Supervised {
    service: Service,
    standing: Mutex<Standing>,
    /// Turns true once, when it is to end.
    unwanted: watch::Sender<bool>,
    /// Turns true once, when its supervisor has gone.
    over: watch::Sender<bool>,
}

impl Supervised {
    fn new(service: Service) -> Arc<Self> {
        let standing = Standing { state: ServiceState::Starting, failures: 0, command: None };
        Arc::new(Self {
            service,
            standing: Mutex::new(standing),
            unwanted: watch::Sender::new(false),
            over: watch::Sender::new(false),
        })
    }

    fn set(&self, state: ServiceState) {
        lock(&self.standing).state = state;
    }

    fn is_over(&self) -> bool {
        *self.over.borrow()
    }

    async fn ended(&self) {
        let _ = self.over.subscribe().wait_for(|over| *over).await;
    }
}

/// The services of a running sandbox.
#[derive(Debug, Default)]
pub(super) struct Services(Mutex<BTreeMap<Name, Arc<Supervised>>>);

impl Services {
    /// Whether a service that runs, or is about to, is meant to listen on a port.
    pub(super) fn expects(&self, port: u16) -> bool {
        let hopeful = |one: &Arc<Supervised>| {
            let state = lock(&one.standing).state.clone();
            let lives = matches!(
                state,
                ServiceState::Starting
                    | ServiceState::Running { .. }
                    | ServiceState::Restarting { .. }
            );
            one.service.port == Some(port) && lives
        };
        lock(&self.0).values().any(hopeful)
    }

    fn get(&self, name: &Name) -> Option<Arc<Supervised>> {
        lock(&self.0).get(name).cloned()
    }
}

impl Engine {
    /// Lists a sandbox's services and how they stand. Never wakes.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoSandbox`] when there is none of that name.
    pub async fn services(&self, project: &Name, name: &Name) -> Result<Vec<ServiceStatus>> {
        let sandbox = self.inner.find(project, name).await?;
        self.inner.recovered(&sandbox.id).await?;
        self.inner.service_statuses(&sandbox).await
    }

    /// Declares a service, or declares it otherwise. In a running sandbox that takes effect at once.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Config`] when something about it is wrong.
    pub async fn set_service(
        &self,
        project: &Name,
        name: &Name,
        service: Service,
    ) -> Result<ServiceStatus> {
        let which = service.name.clone();
        let patch = Patch { set_services: vec![service], ..Patch::default() };
        let sandbox = self.update(project, name, patch).await?;
        self.inner.service_status(&sandbox, &which).await
    }

    /// Takes a service away. One that runs is ended.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoService`] when there is none of that name.
    pub async fn remove_service(&self, project: &Name, name: &Name, service: &Name) -> Result<()> {
        let sandbox = self.inner.find(project, name).await?;
        declared(&sandbox, service)?;
        self.inner.recovered(&sandbox.id).await?;
        let live = self.inner.live(&sandbox.id);
        let running = live.and_then(|live| live.services.get(service));
        let patch = Patch { drop_services: vec![service.clone()], ..Patch::default() };
        self.update(project, name, patch).await?;
        if let Some(running) = running {
            running.ended().await;
        }
        Ok(())
    }

    /// Starts a service, waking its sandbox if need be. One that runs is left alone.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoService`] when there is none of that name.
    pub async fn start_service(
        &self,
        project: &Name,
        name: &Name,
        service: &Name,
    ) -> Result<ServiceStatus> {
        let sandbox = self.inner.find(project, name).await?;
        declared(&sandbox, service)?;
        self.inner.awake(project, name, &WakeMode::Wake).await?;
        let noted = self.inner.note_wish(&sandbox, service, true).await?;
        let live = noted.ok_or(Error::SessionOver)?;
        let sandbox = live.sandbox();
        self.inner.run_service(&live, declared(&sandbox, service)?, None, false);
        self.inner.service_status(&sandbox, service).await
    }

    /// Stops a service, for this session. Never wakes.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NoService`] when there is none of that name.
    pub async fn stop_service(
        &self,
        project: &Name,
        name: &Name,
        service: &Name,
    ) -> Result<ServiceStatus> {
        let sandbox = self.inner.find(project, name).await?;
        declared(&sandbox, service)?;
        let live = self.inner.note_wish(&sandbox, service, false).await?;
        if let Some(running) = live.and_then(|live| live.services.get(service)) {
            running.unwanted.send_replace(true);
            running.ended().await;
            running.set(ServiceState::Stopped);
        }
        self.inner.service_status(&sandbox, service).await
    }
}

fn declared<'a>(sandbox: &'a Sandbox, name: &Name) -> Result<&'a Service> {
    let found = sandbox.config.services.iter().find(|service| service.name == *name);
    let none = || Error::NoService { sandbox: sandbox.name.clone(), service: name.clone() };
    found.ok_or_else(none)
}

impl Inner {
    /// Starts what is to run from the start of a session.
    pub(super) fn start_services(self: &Arc<Self>, live: &Arc<Live>) {
        for service in &live.sandbox().config.services {
            if service.start {
                self.run_service(live, service, None, false);
            }
        }
    }

    /// Takes up the services of a machine that an earlier daemon started.
    pub(super) fn adopt_services(self: &Arc<Self>, live: &Arc<Live>, commands: &[Command]) {
        let session = live.session();
        for service in &live.sandbox().config.services {
            let alive = lock(&live.commands)
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
                    lock(&ended.standing).command = last.map(|last| last.id.clone());
                    ended.over.send_replace(true);
                    lock(&live.services.0).insert(service.name.clone(), ended);
                }
                (None, None) if wished => self.run_service(live, service, None, false),
                (None, None) => {}
            }
        }
    }

    /// Brings what runs to what is declared, after that was changed.
    pub(super) fn reconcile_services(self: &Arc<Self>, live: &Arc<Live>) {
        let sandbox = live.sandbox();
        let there: Vec<Arc<Supervised>> = lock(&live.services.0).values().cloned().collect();
        for one in there {
            let name = &one.service.name;
            if !sandbox.config.services.iter().any(|service| service.name == *name) {
                one.unwanted.send_replace(true);
                lock(&live.services.0).remove(name);
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
    fn run_service(
        self: &Arc<Self>,
        live: &Arc<Live>,
        service: &Service,
        running: Option<Arc<Tracked>>,
        replace: bool,
    ) {
        let mut all = lock(&live.services.0);
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
            inner: Arc::downgrade(self),
            live: Arc::downgrade(live),
            one,
            closed: live.closing(),
            shutdown: self.shutdown.subscribe(),
        };
        tokio::spawn(async move {
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
    async fn note_wish(
        self: &Arc<Self>,
        sandbox: &Sandbox,
        service: &Name,
        wanted: bool,
    ) -> Result<Option<Arc<Live>>> {
        let service = service.clone();
        self.turn(sandbox.id.clone(), move |inner, slot| async move {
            let Some(live) = slot.live() else { return Ok(None) };
            let session = live.change_session(|session| {
                session.services.insert(service, wanted);
            });
            inner.keep_session(&session).await?;
            Ok(Some(live))
        })
        .await
    }

    async fn service_status(&self, sandbox: &Sandbox, name: &Name) -> Result<ServiceStatus> {
        declared(sandbox, name)?;
        let all = self.service_statuses(sandbox).await?;
        let none = || Error::NoService { sandbox: sandbox.name.clone(), service: name.clone() };
        all.into_iter().find(|one| one.service.name == *name).ok_or_else(none)
    }

    async fn service_statuses(&self, sandbox: &Sandbox) -> Result<Vec<ServiceStatus>> {
        let live = self.live(&sandbox.id);
        let mut all = Vec::new();
        let mut past: Option<Vec<Command>> = None;
        for service in &sandbox.config.services {
            let one = live.as_ref().and_then(|live| live.services.get(&service.name));
            let standing = one.map(|one| lock(&one.standing).clone());
            let mut standing = standing.unwrap_or(Standing {
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
            let Standing { state, failures, command } = standing;
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
    inner: Weak<Inner>,
    live: Weak<Live>,
    one: Arc<Supervised>,
    closed: watch::Receiver<bool>,
    shutdown: watch::Receiver<bool>,
}

/// How one run of a service came out.
enum Came {
    /// It ended.
    To { code: i32, lasted: Duration },
    /// It never began.
    ToNothing(String),
    /// It is not wanted any more, or its session is over.
    ToRest,
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
                Came::ToRest => return self.one.set(ServiceState::Stopped),
                Came::To { code, .. } if !again(&self.one.service, code) => {
                    lock(&self.one.standing).failures = 0;
                    return self.one.set(ServiceState::Exited { code });
                }
                Came::To { code, lasted } => {
                    if lasted >= STABLE {
                        lock(&self.one.standing).failures = 0;
                    }
                    format!("it ended with {code}")
                }
                Came::ToNothing(problem) => problem,
            };
            let failures = {
                let mut standing = lock(&self.one.standing);
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
    async fn once(&mut self) -> Came {
        let (Some(inner), Some(live)) = (self.inner.upgrade(), self.live.upgrade()) else {
            return Came::ToRest;
        };
        self.one.set(ServiceState::Starting);
        let Service { name, argv, env, cwd, user, .. } = self.one.service.clone();
        let exec = Exec { argv, env, cwd, user, detach: true, ..Exec::default() };
        let launched = inner.launch_service(&live, &exec, &name).await;
        drop((inner, live));
        match launched {
            Ok(tracked) => self.follow(tracked).await,
            Err(Error::SessionOver | Error::ShuttingDown | Error::Guest(GuestError::Lost)) => {
                Came::ToRest
            }
            Err(error) => {
                tracing::warn!(service = %name, error = chain_of(&error), "a service was not started");
                Came::ToNothing(chain_of(&error))
            }
        }
    }

    async fn follow(&mut self, tracked: Arc<Tracked>) -> Came {
        let since = tracked.record().started_at;
        {
            let mut standing = lock(&self.one.standing);
            standing.state = ServiceState::Running { since };
            standing.command = Some(tracked.id());
        }
        let mut unwanted = self.one.unwanted.subscribe();
        tokio::select! {
            () = tracked.ended() => {}
            _ = unwanted.wait_for(|unwanted| *unwanted) => {}
            // The session is over, and how its processes end is not a service's business; or they sleep, and go on.
            _ = self.closed.wait_for(|closed| *closed) => return Came::ToRest,
            // The next daemon takes it up.
            _ = self.shutdown.wait_for(|over| *over) => return Came::ToRest,
        }
        if tracked.outcome().is_none() {
            self.end(&tracked).await;
            return Came::ToRest;
        }
        let record = tracked.record();
        match record.exit_code {
            Some(code) if !self.resting() => {
                let ended = record.ended_at.unwrap_or_else(now).as_millisecond();
                let lasted = u64::try_from(ended - since.as_millisecond()).unwrap_or(0);
                Came::To { code, lasted: Duration::from_millis(lasted) }
            }
            None if !self.resting() => Came::ToNothing("the agent does not know it".to_owned()),
            _ => Came::ToRest,
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
        *self.one.unwanted.borrow() || *self.closed.borrow() || *self.shutdown.borrow()
    }

    async fn rest(&mut self) {
        let mut unwanted = self.one.unwanted.subscribe();
        tokio::select! {
            _ = unwanted.wait_for(|unwanted| *unwanted) => {}
            _ = self.closed.wait_for(|closed| *closed) => {}
            _ = self.shutdown.wait_for(|over| *over) => {}
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
