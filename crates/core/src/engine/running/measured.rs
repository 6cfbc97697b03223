//! What is known of the open layer of a running sandbox, ahead of its seal: see `snapshots/measure_ahead.rs`.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::driver::Relayer;
use crate::engine::Result;
use crate::engine::running::live::RunningSandbox;
use crate::guest::GuestError;
use crate::model::{Decision, Guard, LayerId, OnJunk, Sandbox};
use crate::store::{JunkRules, MeasuredLayer};

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

/// A request to the agent that changes files. If the agent does not report its end, the change may
/// take any time: the agent removes a tree completely even when the caller has left, and starts a
/// command when it gets to it.
#[derive(Debug)]
pub(in crate::engine) struct Asked {
    live: Arc<RunningSandbox>,
    heard: bool,
}

impl Asked {
    pub(in crate::engine) fn of(live: &Arc<RunningSandbox>) -> Self {
        Self { live: Arc::clone(live), heard: false }
    }

    /// Takes the agent's answer.
    pub(in crate::engine) fn heard<T>(
        mut self,
        answer: Result<T, GuestError>,
    ) -> Result<T, GuestError> {
        self.heard = matches!(&answer, Ok(_) | Err(GuestError::Refused { .. }));
        answer
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        if !self.heard {
            self.live.unheard.store(true, Ordering::SeqCst);
        }
    }
}

impl RunningSandbox {
    /// What the open layer measures, if that is known and nothing can have changed it since.
    pub(in crate::engine) fn measured_ahead(&self, sandbox: &Sandbox) -> Option<MeasuredLayer> {
        if !can_be_known(sandbox) || *sandbox.decision() != Decision::default() {
            return None;
        }
        if self.unheard.load(Ordering::SeqCst) {
            return None;
        }
        let measured = self.measured.lock();
        let last = measured.result.as_ref()?;
        let same = last.uses == self.uses()
            && Some(&last.layer) == sandbox.open_layer()
            && last.guard == sandbox.config.guard;
        same.then(|| last.measured.clone())
    }

    /// Whether nothing writes to the open layer now, so that a visit to every name may be worth something to a seal. The answer is
    /// the number of [`uses`](Self::uses) that the visit is for.
    pub(in crate::engine) async fn measurable(
        &self,
        sandbox: &Sandbox,
        relayer: &dyn Relayer,
    ) -> Result<Option<u64>> {
        let uses = self.uses();
        // Commands are started, and files transferred, with the gate held.
        let idle = self.gate.try_write().is_ok()
            && self.commands.lock().values().all(|one| one.over.load(Ordering::SeqCst));
        let heard = !self.unheard.load(Ordering::SeqCst);
        let still = idle && heard && can_be_known(sandbox) && relayer.alone(&self.key).await?;
        Ok(still.then_some(uses))
    }

    /// Every name of the open layer was visited, beginning at `uses`. Kept if nothing can have written meanwhile.
    pub(in crate::engine) async fn keep_measurement(
        &self,
        sandbox: &Sandbox,
        relayer: &dyn Relayer,
        uses: u64,
        measured: MeasuredLayer,
    ) -> Result<()> {
        let Some(layer) = sandbox.open_layer().cloned() else { return Ok(()) };
        if relayer.alone(&self.key).await? && self.uses() == uses {
            let guard = sandbox.config.guard.clone();
            self.measured.lock().result = Some(Measurement { layer, uses, guard, measured });
        }
        Ok(())
    }

    /// Whether it is time to measure the open layer.
    pub(in crate::engine) fn is_to_be_measured(&self, sandbox: &Sandbox) -> bool {
        let wanted = if self.changes.names() >= LARGE { IDLE_LARGE } else { IDLE };
        let idle = self.quiet_for().is_some_and(|quiet| quiet >= wanted);
        let heard = !self.unheard.load(Ordering::SeqCst);
        if !idle || !heard || self.is_closed() || !can_be_known(sandbox) {
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

/// What a seal looks for on its way. Where each file had to be decided about before, nothing is
/// left to report.
pub(in crate::engine) fn junk_warned_of(sandbox: &Sandbox) -> Result<Option<JunkRules>> {
    Ok(match sandbox.config.guard.junk {
        OnJunk::Warn => JunkRules::of(&sandbox.config.guard)?,
        OnJunk::Off | OnJunk::PromoteOrDrop => None,
    })
}
