//! The duties of PID 1: reaping every orphan, and ending everybody when asked.

use std::io;
use std::rc::Rc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Signal, WaitOptions, WaitStatus};
use sandkeep_proto::link::{Exit, Failure};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Instant, sleep};

use crate::serve::Agent;
use crate::serve::command::launch;
use crate::serve::error::RequestError;

/// How long processes may take to vanish after SIGKILL before the host gets an error that they will
/// not.
const STUBBORN: Duration = Duration::from_secs(10);

/// The signal that only checks whether a process exists.
const NONE: i32 = 0;

/// News of ended children.
pub(crate) struct Children {
    news: tokio::signal::unix::Signal,
}

impl Children {
    pub(crate) fn watch() -> io::Result<Self> {
        Ok(Self { news: signal(SignalKind::child())? })
    }

    /// Reaps whatever ends, for as long as the agent lives.
    pub(crate) async fn reap(mut self, agent: Rc<Agent>) {
        loop {
            collect(&agent);
            if self.news.recv().await.is_none() {
                return;
            }
        }
    }
}

/// Reaps all who have ended.
fn collect(agent: &Agent) {
    loop {
        match rustix::process::wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) => {
                let command = agent.running.borrow_mut().remove(&pid.as_raw_nonzero().get());
                if let (Some(command), Some(mut exit)) = (command, exit(status)) {
                    exit.oom = exit.is_kill() && agent.oom_kills() > command.oom_kills_before;
                    command.exited(exit);
                }
            }
            Err(Errno::INTR) => {}
            Ok(None) | Err(_) => return,
        }
    }
}

fn exit(status: WaitStatus) -> Option<Exit> {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => Some(Exit::with_code(code)),
        (None, Some(signal)) => Some(Exit::by_signal(signal)),
        (None, None) => None,
    }
}

/// Ends every process but the agent, politely for `grace`, then by force.
pub(crate) async fn quiesce(agent: &Agent, grace: Duration) -> Result<(), RequestError> {
    if !rustix::process::getpid().is_init() {
        let message = "only the first process of a machine may end all others";
        return Err(RequestError::new(Failure::Fault, message));
    }
    let start = Instant::now();
    // A day is longer than any caller waits, and adds up safely.
    let grace = grace.min(Duration::from_secs(86_400));
    if !grace.is_zero() {
        signal_all(Signal::TERM.as_raw());
        // Stopped processes do not see it until they resume.
        signal_all(Signal::CONT.as_raw());
    }
    let mut pause = Duration::from_millis(1);
    loop {
        collect(agent);
        let elapsed = start.elapsed();
        // Again each time: who forks faster than this is caught in the end.
        let signal = if elapsed >= grace { Signal::KILL.as_raw() } else { NONE };
        let nobody = signal_all(signal);
        if nobody || agent.machine.as_ref().is_some_and(|machine| machine.is_alone()) {
            return Ok(());
        }
        if elapsed >= grace + STUBBORN {
            let message = "some processes do not end even when killed";
            return Err(RequestError::new(Failure::Fault, message));
        }
        sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(10));
    }
}

/// Signals every process but ourselves; true if there was none.
fn signal_all(signal: i32) -> bool {
    launch::signal_all(signal).is_err_and(|error| Errno::from_io_error(&error) == Some(Errno::SRCH))
}
