//! Connects to ports inside a sandbox.
//!
//! A connection to a port of a sleeping sandbox wakes it, if that is allowed, and waits until
//! something listens. Many connections at once wake it once: they share one attempt, and one
//! failure, which is remembered for a moment so that a sandbox that cannot start is not tried again
//! by each of them.
//!
//! Waiting is for a port that may be about to open: of a session that is young, of a service that is
//! meant to listen there, or when some command was started a moment ago. Else a closed port is closed.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use crate::engine::running::live::{Hold, RunningSandbox};
use crate::engine::{Error, Result};
use crate::guest::{Incoming, Outgoing};
use crate::model::{Name, SandboxId, Timestamp, now};

/// How soon a port is tried again; twice as long every time.
pub(in crate::engine) const FIRST_PAUSE: Duration = Duration::from_millis(5);
pub(in crate::engine) const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// How a request for a port names its sandbox.
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

/// Connects to a port of a running sandbox.
pub(in crate::engine) async fn try_port(
    live: &Arc<RunningSandbox>,
    port: u16,
    until: Instant,
) -> Result<Connected, (Error, Option<Hold>)> {
    // Another operation may use the root for long; without patience it is tried once all the same.
    let until = until.max(Instant::now() + Duration::from_secs(1));
    let entered = timeout_at(until, live.enter()).await.unwrap_or(Err(Error::SessionOver));
    let hold = match entered {
        Ok((hold, _)) => hold.for_port(),
        Err(error) => return Err((error, None)),
    };
    let connected = async { Ok(live.guest().await?.connect_port(port).await?) };
    match connected.await {
        Ok((outgoing, incoming)) => Ok((outgoing, incoming, hold)),
        Err(error) => Err((error, Some(hold))),
    }
}

/// Whether there is reason to believe that something will listen.
pub(in crate::engine) fn may_open(live: &RunningSandbox, port: u16, wait: Duration) -> bool {
    let young = |since: Timestamp| {
        let age = now().as_millisecond() - since.as_millisecond();
        u64::try_from(age).is_ok_and(|age| Duration::from_millis(age) < wait)
    };
    young(live.session().started_at)
        || live.services.expects(port)
        || live.commands.lock().values().any(|command| young(command.record().started_at))
}
