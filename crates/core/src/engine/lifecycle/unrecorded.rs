//! Outcomes that are not on disk yet, because it was full: retries to write them.
//!
//! Every operation on a sandbox has an outcome that users see, also when the disk has no room for
//! its record: a failed start is `failed`, and does not stay `starting`. Space that was set aside
//! for this is given up first (`store/space/reserve_file.rs`). If that is not enough, the outcome
//! is kept in memory, and written down as soon as that is possible. A daemon that dies before finds
//! the older record and comes to the same end by itself (`recover`).

use std::sync::Arc;

use crate::engine::error::error_chain;
use crate::engine::lifecycle::Lifecycle;
use crate::engine::records::Unrecorded;
use crate::engine::{Error, ErrorKind};
use crate::model::Sandbox;
use crate::store::Durability;

impl Lifecycle {
    /// Records the outcome of an operation, at once if possible. `held` is what may be removed
    /// then.
    pub(in crate::engine) async fn record_outcome(
        self: &Arc<Self>,
        sandbox: &mut Sandbox,
        held: Option<Sandbox>,
    ) {
        let mut recorded = self.records.record(sandbox, Durability::Soon).await;
        let full = |error: &Error| error.kind() == ErrorKind::Exhausted;
        if recorded.as_ref().is_err_and(full) && self.store.release_reserve_file().await {
            recorded = self.records.record(sandbox, Durability::Soon).await;
        }
        let Err(error) = recorded else {
            if let Some(held) = held {
                self.release_start(&held).await;
            }
            return;
        };
        tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "the new state of a sandbox is not written to disk yet");
        if matches!(error, Error::RecordChanged { .. }) {
            // Another writer has saved the record, and what that one saved counts.
            return;
        }
        if let Err(error) = self.context.catalog.show(sandbox).await {
            tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "the new state of a sandbox is not in the index either");
        }
        let outcome = Unrecorded { sandbox: Some(sandbox.clone()), held };
        self.records.unrecorded.lock().insert(sandbox.id.clone(), outcome);
    }

    /// Tries again what could not be written down.
    pub(in crate::engine) async fn record_pending_outcomes(self: &Arc<Self>) {
        let ids: Vec<_> = self.records.unrecorded.lock().keys().cloned().collect();
        for id in ids {
            // While something else is under way it waits for the next round, and the others do not wait for it.
            let Some(_turn) = self.turns.slot(&id).try_turn() else { continue };
            let Some(outcome) = self.records.unrecorded.lock().remove(&id) else { continue };
            if let Some(mut sandbox) = outcome.sandbox
                && let Err(error) = self.records.record(&mut sandbox, Durability::Soon).await
            {
                if matches!(error, Error::RecordChanged { .. }) {
                    tracing::error!(sandbox = %sandbox.name, error = error_chain(&error), "the new state of a sandbox is dropped: another writer has saved its record since");
                    continue;
                }
                tracing::debug!(
                    error = error_chain(&error),
                    "an outcome is still not written to disk"
                );
                let outcome = Unrecorded { sandbox: Some(sandbox), held: outcome.held };
                self.records.unrecorded.lock().insert(id, outcome);
                continue;
            }
            if let Some(held) = outcome.held {
                self.release_start(&held).await;
            }
        }
        self.store.restore_reserve_file();
    }
}
