//! The way to a port inside a sandbox.
//!
//! Whoever comes for a port of a sleeping sandbox wakes it, if that is allowed, and waits until something
//! listens. Many who come at once wake it once: they share one attempt, and one failure, which is
//! remembered for a moment so that a sandbox that cannot start is not tried again by each of them.
//!
//! Waiting is for a port that may be about to open: of a session that is young, of a service that is
//! meant to listen there, or when some command was started a moment ago. Else a closed port is closed.

use std::sync::Arc;
use std::time::Duration;

use sandkeep_proto::link::Failure;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::lifecycle::Phase;
use super::live::{Hold, Live};
use super::sandbox::Ground;
use super::slot::lock;
use super::{Engine, Error, Inner, Result, WakeMode};
use crate::guest::{GuestError, Incoming, Outgoing};
use crate::model::{Name, Port, Sandbox, SandboxId, Timestamp, now};

/// How long a failed attempt to wake a sandbox stands for those that come after it.
const MEMORY: Duration = Duration::from_secs(1);
/// How soon a port is tried again; twice as long every time.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// What became of an attempt to wake a sandbox that several wait for.
pub(super) type Attempt = watch::Receiver<Option<Result<(), Arc<Error>>>>;

/// How a sandbox is named by whoever wants one of its ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Whose {
    /// By its id.
    Id(SandboxId),
    /// By its name.
    Name {
        /// The project.
        project: Name,
        /// The sandbox.
        sandbox: Name,
    },
}

/// A connection to a port. The sandbox stays awake while the last of the three lives.
pub type Connected = (Outgoing, Incoming, Hold);

impl Engine {
    /// Connects to a port inside a sandbox, waking it if need be.
    ///
    /// # Errors
    ///
    /// Returns [`super::Error`] when the sandbox cannot be woken or nothing listens.
    pub async fn connect_port(
        &self,
        project: &Name,
        name: &Name,
        port: u16,
        wake: WakeMode,
    ) -> Result<Connected> {
        let (live, (hold, _)) = self.inner.enter(project, name, &wake).await?;
        let (outgoing, incoming) = live.guest().await?.connect_port(port).await?;
        Ok((outgoing, incoming, hold))
    }

    /// Finds a sandbox and how it publishes a port; nothing when there is no such sandbox or it does not.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when the index cannot be read.
    pub async fn published(&self, whose: &Whose, port: u16) -> Result<Option<(Sandbox, Port)>> {
        let found = match whose {
            Whose::Id(id) => self.inner.db.sandbox_by_id(id).await?,
            Whose::Name { project, sandbox } => self.inner.db.sandbox(project, sandbox).await?,
        };
        Ok(found.filter(|sandbox| sandbox.phase() != Phase::Deleted).and_then(|sandbox| {
            let port = sandbox.config.ports.iter().find(|there| there.number == port).copied();
            port.map(|port| (sandbox, port))
        }))
    }

    /// Connects to a port inside a sandbox within `wait`: until then it may wake, and the port may open.
    ///
    /// # Errors
    ///
    /// Returns [`Error::StartSlow`] or [`Error::PortSlow`] when that was not enough, and the engine's other
    /// errors as soon as they are known. Those who waited for one attempt share its error.
    pub async fn reach(
        &self,
        sandbox: &Sandbox,
        port: u16,
        wake: bool,
        wait: Duration,
    ) -> Result<Connected, Arc<Error>> {
        let until = Instant::now() + wait;
        let mut pause = FIRST_PAUSE;
        let slow = || Error::StartSlow { name: sandbox.name.clone(), waited: wait };
        let recovered = timeout_at(until, self.inner.recovered(&sandbox.id)).await;
        recovered.map_err(|_| slow())??;
        loop {
            let mut live = self.inner.live(&sandbox.id);
            if live.is_none() {
                if !wake {
                    return Err(Error::NotRunning(sandbox.name.clone()).into());
                }
                let woken = timeout_at(until, self.inner.wake_together(sandbox)).await;
                woken.map_err(|_| slow())??;
                live = self.inner.live(&sandbox.id);
            }
            // Held also while nothing listens: somebody waits.
            let (error, _hold) = match &live {
                // It is asleep again already.
                None => (Error::SessionOver, None),
                Some(live) => match self.inner.try_port(live, port, until).await {
                    Ok(connected) => return Ok(connected),
                    Err((error, hold)) => (error, hold),
                },
            };
            let worth_it = match &error {
                Error::SessionOver | Error::Guest(GuestError::Lost) => wake,
                Error::Guest(GuestError::Refused { kind: Failure::Refused, .. }) => {
                    live.as_ref().is_some_and(|live| may_open(live, port, wait))
                }
                _ => false,
            };
            if !worth_it || wait.is_zero() {
                return Err(error.into());
            }
            if Instant::now() + pause > until {
                return Err(Error::PortSlow { port, waited: wait }.into());
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

impl Inner {
    async fn try_port(
        &self,
        live: &Arc<Live>,
        port: u16,
        until: Instant,
    ) -> Result<Connected, (Error, Option<Hold>)> {
        // Somebody may be at the root for long; without patience it is tried once all the same.
        let until = until.max(Instant::now() + Duration::from_secs(1));
        let entered = timeout_at(until, live.enter()).await.unwrap_or(Err(Error::SessionOver));
        let hold = match entered {
            Ok((hold, _)) => hold,
            Err(error) => return Err((error, None)),
        };
        let connected = async { Ok(live.guest().await?.connect_port(port).await?) };
        match connected.await {
            Ok((outgoing, incoming)) => Ok((outgoing, incoming, hold)),
            Err(error) => Err((error, Some(hold))),
        }
    }

    /// Wakes a sandbox together with all who want that now.
    async fn wake_together(self: &Arc<Self>, sandbox: &Sandbox) -> Result<(), Arc<Error>> {
        let mut attempt = self.attempt(sandbox);
        let outcome = attempt.wait_for(Option::is_some).await;
        // One that broke off without a word ended with the engine.
        let outcome = outcome.ok().and_then(|outcome| outcome.clone());
        outcome.unwrap_or_else(|| Err(Error::ShuttingDown.into()))
    }

    fn attempt(self: &Arc<Self>, sandbox: &Sandbox) -> Attempt {
        let mut wakes = lock(&self.wakes);
        if let Some(under_way) = wakes.get(&sandbox.id) {
            return under_way.clone();
        }
        let (tell, heard) = watch::channel(None);
        wakes.insert(sandbox.id.clone(), heard.clone());
        let (inner, id, name) = (Arc::clone(self), sandbox.id.clone(), sandbox.name.clone());
        tokio::spawn(async move {
            let woken = inner.wake(&id, &name, None, Ground::Any).await;
            let failed = woken.is_err();
            tell.send_replace(Some(woken.map(drop).map_err(Arc::new)));
            let inner = Arc::downgrade(&inner);
            if failed {
                tokio::time::sleep(MEMORY).await;
            }
            if let Some(inner) = inner.upgrade() {
                lock(&inner.wakes).remove(&id);
            }
        });
        heard
    }
}

/// Whether there is reason to believe that something will listen.
fn may_open(live: &Live, port: u16, wait: Duration) -> bool {
    let young = |since: Timestamp| {
        let age = now().as_millisecond() - since.as_millisecond();
        u64::try_from(age).is_ok_and(|age| Duration::from_millis(age) < wait)
    };
    young(live.session().started_at)
        || live.services.expects(port)
        || lock(&live.commands).values().any(|command| young(command.record().started_at))
}
