//! A sandbox that is suspended while somebody considers a question of it: its processes are frozen,
//! its agent too.
//!
//! A caller that needs the agent resumes it first. A call is counted before it checks whether the
//! sandbox is suspended, and the code that suspends it checks the count after saying so: one of the
//! two notices the other.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, watch};

use crate::engine::running::live::RunningSandbox;

/// How long a call waits for a sandbox that was frozen. Then it waits for the agent, with a deadline of its own.
const ROUSED_WITHIN: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(in crate::engine) struct Rest {
    resting: watch::Sender<bool>,
    calls: AtomicU64,
    wanted: Notify,
}

impl Default for Rest {
    fn default() -> Self {
        Self { resting: watch::Sender::new(false), calls: AtomicU64::new(0), wanted: Notify::new() }
    }
}

impl Rest {
    /// How many calls needed the agent.
    pub(in crate::engine) fn calls(&self) -> u64 {
        self.calls.load(Ordering::SeqCst)
    }

    /// Announces that the sandbox is about to be suspended, unless it was called since there were
    /// `calls` calls.
    pub(in crate::engine) fn begin(&self, calls: u64) -> bool {
        self.resting.send_replace(true);
        let quiet = self.calls() == calls;
        if !quiet {
            self.end();
        }
        quiet
    }

    /// It resumes.
    pub(in crate::engine) fn end(&self) {
        self.resting.send_replace(false);
    }

    /// Waits until something needs it to resume.
    pub(in crate::engine) async fn wanted(&self) {
        self.wanted.notified().await;
    }

    /// Changes when it is suspended, and when it resumes.
    pub(in crate::engine) fn changes(&self) -> watch::Receiver<bool> {
        self.resting.subscribe()
    }
}

impl RunningSandbox {
    /// Counts a call, and resumes a suspended sandbox.
    pub(in crate::engine) async fn rouse(&self) {
        self.rest.calls.fetch_add(1, Ordering::SeqCst);
        if !*self.rest.resting.borrow() {
            return;
        }
        let mut resting = self.rest.changes();
        self.rest.wanted.notify_one();
        let goes_on = resting.wait_for(|resting| !resting);
        if tokio::time::timeout(ROUSED_WITHIN, goes_on).await.is_err() {
            tracing::warn!(machine = %self.key, "a sandbox that waits for an approval was not thawed in time");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Rest;

    #[test]
    fn a_call_that_comes_in_between_is_noticed() {
        let rest = Rest::default();
        let calls = rest.calls();
        assert!(rest.begin(calls) && *rest.changes().borrow());
        rest.end();
        rest.calls.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        assert!(!rest.begin(calls), "somebody called");
        assert!(!*rest.changes().borrow());
    }
}
