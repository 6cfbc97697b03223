//! What is known of the open layer of a running sandbox, ahead of its seal: see `snapshots/measure_ahead.rs`.

use std::time::{Duration, Instant};

use crate::engine::running::live::RunningSandbox;
use crate::model::{Decision, Guard, LayerId, OnJunk, Sandbox};
use crate::store::MeasuredLayer;

/// How long a sandbox must have been idle before its layer is measured.
pub(in crate::engine) const IDLE: Duration = Duration::from_secs(1);
/// The same if the layer has so many names that its seal would take long.
const IDLE_LARGE: Duration = Duration::from_millis(50);
const LARGE: u64 = 1_000;

/// The last measurement of the open layer.
#[derive(Debug, Default)]
pub(in crate::engine) struct MeasuredAhead {
    pub(in crate::engine) result: Option<Measurement>,
    pub(in crate::engine) not_before: Option<Instant>,
}

/// What was measured, and when that counts.
#[derive(Debug)]
pub(in crate::engine) struct Measurement {
    pub(in crate::engine) layer: LayerId,
    /// [`RunningSandbox::uses`] at the time.
    pub(in crate::engine) uses: u64,
    /// What was looked for on the way.
    pub(in crate::engine) guard: Guard,
    pub(in crate::engine) measured: MeasuredLayer,
}

impl RunningSandbox {
    /// What the open layer measures, if that is known and nothing can have changed it since.
    pub(in crate::engine) fn measured_ahead(&self, sandbox: &Sandbox) -> Option<MeasuredLayer> {
        if !can_be_known(sandbox) || *sandbox.decision() != Decision::default() {
            return None;
        }
        let measured = self.measured.lock();
        let last = measured.result.as_ref()?;
        let same = last.uses == self.uses()
            && Some(&last.layer) == sandbox.open_layer()
            && last.guard == sandbox.config.guard;
        same.then(|| last.measured.clone())
    }

    /// Whether it is time to measure the open layer.
    pub(in crate::engine) fn is_to_be_measured(&self, sandbox: &Sandbox) -> bool {
        let wanted = if self.changes.names() >= LARGE { IDLE_LARGE } else { IDLE };
        let idle = self.quiet_for().is_some_and(|quiet| quiet >= wanted);
        if !idle || self.is_closed() || !can_be_known(sandbox) {
            return false;
        }
        let measured = self.measured.lock();
        let known = measured.result.as_ref().is_some_and(|last| {
            last.uses == self.uses() && Some(&last.layer) == sandbox.open_layer()
        });
        !known && measured.not_before.is_none_or(|not_before| not_before <= Instant::now())
    }
}

/// Whether a seal would leave the files of the layer as they are.
fn can_be_known(sandbox: &Sandbox) -> bool {
    sandbox.config.exclude.is_empty() && sandbox.config.guard.junk != OnJunk::PromoteOrDrop
}
