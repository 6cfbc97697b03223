//! Outcomes that could not be written down yet.
//!
//! Whatever a sandbox was asked for comes to an end that users see, also when the disk has no room for the record of it: a
//! failed start is `failed`, not `starting` for ever. Space that was set aside for this is given up first
//! (`store/ballast.rs`). If that is not enough, the outcome is kept in memory, and written down as soon as that is possible. A
//! daemon that dies before finds the older record and comes to the same end by itself (`recover`).

use std::sync::Arc;

use super::boot::chain_of;
use super::slot::lock;
use super::{ErrorKind, Inner};
use crate::model::Sandbox;
use crate::store::Durability;

/// What is to be done when there is room.
#[derive(Debug)]
pub(super) struct Unrecorded {
    /// What the sandbox is; absent when something later is on record.
    pub(super) sandbox: Option<Sandbox>,
    /// What it held, which is taken away when no record names it.
    held: Option<Sandbox>,
}

impl Inner {
    /// Puts on record how something ended, at once if possible. `held` is what may be taken away then.
    pub(super) async fn record_outcome(
        self: &Arc<Self>,
        sandbox: &mut Sandbox,
        held: Option<Sandbox>,
    ) {
        let mut recorded = self.record(sandbox, Durability::Soon).await;
        let full = |error: &super::Error| error.kind() == ErrorKind::Exhausted;
        if recorded.as_ref().is_err_and(full) && self.store.release_ballast().await {
            recorded = self.record(sandbox, Durability::Soon).await;
        }
        let Err(error) = recorded else {
            if let Some(held) = held {
                self.clear_away(&held).await;
            }
            return;
        };
        tracing::error!(sandbox = %sandbox.name, error = chain_of(&error), "how it ended is not on record yet");
        if let Err(error) = self.db.put_sandbox(sandbox).await {
            tracing::error!(sandbox = %sandbox.name, error = chain_of(&error), "nor is it in the index");
        }
        let outcome = Unrecorded { sandbox: Some(sandbox.clone()), held };
        lock(&self.unrecorded).insert(sandbox.id.clone(), outcome);
    }

    /// A sandbox as the index has it, or what became of it that could not be written down.
    pub(super) fn as_known(&self, sandbox: Sandbox) -> Sandbox {
        let known = lock(&self.unrecorded).get(&sandbox.id).and_then(|it| it.sandbox.clone());
        known.unwrap_or(sandbox)
    }

    /// Tries again what could not be written down.
    pub(super) async fn record_what_is_left(self: &Arc<Self>) {
        let ids: Vec<_> = lock(&self.unrecorded).keys().cloned().collect();
        for id in ids {
            // While something else is under way it waits for the next round, and the others do not wait for it.
            let Some(_turn) = self.slot(&id).try_turn() else { continue };
            let Some(outcome) = lock(&self.unrecorded).remove(&id) else { continue };
            if let Some(mut sandbox) = outcome.sandbox
                && let Err(error) = self.record(&mut sandbox, Durability::Soon).await
            {
                tracing::debug!(error = chain_of(&error), "an outcome is still not on record");
                let outcome = Unrecorded { sandbox: Some(sandbox), held: outcome.held };
                lock(&self.unrecorded).insert(id, outcome);
                continue;
            }
            if let Some(held) = outcome.held {
                self.clear_away(&held).await;
            }
        }
        self.store.restore_ballast();
    }
}
