//! Measures the open layer of an idle sandbox ahead of its seal.
//!
//! A seal has to know the size of a layer, what in it may not be meant to be, and a summary of every name. All of that takes a visit
//! to every name, which costs more than a microsecond each in the kernel alone: with 30,000 new files it is most of a stop. But a
//! session is usually idle for a while before it is stopped, and nothing can change its files then. So they are visited ahead: by the
//! look after a command or an upload (`session/changes.rs`), which comes to every name anyway, and where that was not enough, once the
//! sandbox is idle:
//!
//! ```text
//! idle (50 ms, a second if it is small) ─> only the agent is alive? ─> visit every name, at the lowest priority ─> still only the agent? ─> keep the result
//!                                                                                                                         │
//! stop, checkpoint: nobody asked the agent for anything since? ── yes ──> the seal takes the result ──────────────────────┘
//!                                                               └─ no ──> the seal visits every name itself
//! stop, checkpoint during the visit: the visit ends, so that it does not slow down the seal's
//! ```
//!
//! *Why that is safe.* Files change through processes of the sandbox or through the agent. Only the agent starts processes, and it
//! does what the daemon asks it for. [`RunningSandbox::uses`] counts whatever may lead to that,
//! before it happens. Where its end was not reported, because the caller left or the agent did not
//! answer in time, nothing is known for the rest of the session
//! ([`Asked`](crate::engine::running::measured::Asked)). The control group shows whether a process
//! is left. System calls that continue after their process ended (`io_uring`) are refused by the
//! filter of system calls. In debug builds, and so in all tests, the seal visits every name all the
//! same and compares.
//!
//! *What it costs.* One layer at a time is visited, by one thread of the lowest priority, and a layer again only after
//! [`REST`] times as long as its last visit took.

use std::sync::Arc;
use std::time::Instant;

use crate::engine::Result;
use crate::engine::error::error_chain;
use crate::engine::running::live::RunningSandbox;
use crate::engine::running::measured::{IDLE, junk_warned_of};
use crate::engine::snapshots::StorageUsage;

/// A layer is visited again after this many times the duration of its last visit, at the earliest.
const REST: u32 = 20;

impl StorageUsage {
    /// Measures the open layers of idle sandboxes, one after the other.
    pub(in crate::engine) async fn measure_idle(&self) {
        for live in self.turns.all_live() {
            if self.context.tasks.shutdown().is_cancelled() {
                return;
            }
            if let Err(error) = self.measure_ahead(&live).await {
                // The session may just be ending: its seal visits every name itself.
                tracing::debug!(
                    error = error_chain(&error),
                    "an open layer was not measured ahead"
                );
            }
        }
    }

    async fn measure_ahead(&self, live: &Arc<RunningSandbox>) -> Result<()> {
        let sandbox = live.sandbox();
        let (Some(relayer), Some(layer)) = (live.driver.relayer(), sandbox.open_layer()) else {
            return Ok(());
        };
        if !live.is_to_be_measured(&sandbox) {
            return Ok(());
        }
        let begun = Instant::now();
        if let Some(uses) = live.measurable(&sandbox, relayer).await?
            && let Some(measured) =
                self.store.measure_open(layer, junk_warned_of(&sandbox)?, live.seal.flag()).await?
        {
            live.keep_measurement(&sandbox, relayer, uses, measured).await?;
        }
        let rest = begun.elapsed().saturating_mul(REST).max(IDLE / 10);
        live.measured.lock().not_before = Some(Instant::now() + rest);
        Ok(())
    }
}
