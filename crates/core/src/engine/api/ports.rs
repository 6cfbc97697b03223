//! Connections to ports inside a sandbox.

use std::sync::Arc;
use std::time::Duration;

use sandkeep_proto::link::Failure;
use tokio::time::{Instant, timeout_at};

use crate::engine::session::ports::{
    Connected, FIRST_PAUSE, LONGEST_PAUSE, Whose, may_open, try_port,
};
use crate::engine::{Engine, Error, Result, WakeMode};
use crate::guest::GuestError;
use crate::model::lifecycle::Phase;
use crate::model::{Name, Port, Sandbox};

impl Engine {
    /// Connects to a port inside a sandbox, waking it if need be.
    ///
    /// # Errors
    ///
    /// Returns [`crate::engine::Error`] when the sandbox cannot be woken or nothing listens.
    pub async fn connect_port(
        &self,
        project: &Name,
        name: &Name,
        port: u16,
        wake: WakeMode,
    ) -> Result<Connected> {
        let (live, (hold, _)) = self.parts.lifecycle.enter(project, name, &wake).await?;
        let (outgoing, incoming) = live.guest().await?.connect_port(port).await?;
        Ok((outgoing, incoming, hold.for_port()))
    }

    /// Finds a sandbox and how it publishes a port; nothing when there is no such sandbox or it does not.
    ///
    /// # Errors
    ///
    /// Returns [`Error`] when the index cannot be read.
    pub async fn published(&self, whose: &Whose, port: u16) -> Result<Option<(Sandbox, Port)>> {
        let found = match whose {
            Whose::Id(id) => self.parts.context.db.sandbox_by_id(id).await?,
            Whose::Name { project, sandbox } => {
                self.parts.context.db.sandbox(project, sandbox).await?
            }
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
        let recovered = timeout_at(until, self.parts.turns.recovered(&sandbox.id)).await;
        recovered.map_err(|_| slow())??;
        loop {
            let mut live = self.parts.turns.live(&sandbox.id);
            if live.is_none() {
                if !wake {
                    return Err(Error::NotRunning(sandbox.name.clone()).into());
                }
                let woken = timeout_at(until, self.parts.lifecycle.wake_together(sandbox)).await;
                woken.map_err(|_| slow())??;
                live = self.parts.turns.live(&sandbox.id);
            }
            // Held also while nothing listens: somebody waits.
            let (error, _hold) = match &live {
                // It is asleep again already.
                None => (Error::SessionOver, None),
                Some(live) => match try_port(live, port, until).await {
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
