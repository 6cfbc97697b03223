//! Turns: one operation at a time per sandbox.
//!
//! A [`Slot`] exists for every sandbox that is alive or being worked on. [`Turns::turn`] runs a piece
//! of work when all that was asked for before it has ended, in a task of its own: a caller that
//! hangs up while a sandbox is being sealed takes nothing with it.
//!
//! After a restart of the daemon the first turn of every sandbox is its recovery's ([`Recovering`]), taken
//! before any other caller can. Callers that need the sandbox meanwhile wait for that, with a
//! deadline.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;

use futures_util::future::join_all;
use parking_lot::{Mutex, MutexGuard, RwLock};
use tokio::sync::{OwnedMutexGuard, watch};

use crate::engine::context::Context;
use crate::engine::running::live::RunningSandbox;
use crate::engine::{Error, Result};
use crate::model::SandboxId;

#[derive(Debug, Default)]
pub(in crate::engine) struct Slot {
    turn: Arc<tokio::sync::Mutex<()>>,
    live: RwLock<Option<Arc<RunningSandbox>>>,
    recovering: watch::Sender<bool>,
}

/// A sandbox's turn while it is being recovered. Dropping it ends both, also when recovery panicked.
#[derive(Debug)]
pub(in crate::engine) struct Recovering {
    pub(in crate::engine) slot: Arc<Slot>,
    turn: Option<OwnedMutexGuard<()>>,
}

impl Recovering {
    /// Keeps the turn for work that continues. Recovery is over for those who wait for it.
    pub(in crate::engine) fn into_turn(mut self) -> Option<OwnedMutexGuard<()>> {
        self.turn.take()
    }
}

impl Drop for Recovering {
    fn drop(&mut self) {
        self.slot.recovering.send_replace(false);
    }
}

impl Slot {
    /// Takes the first turn after a restart. No other caller can have it yet.
    pub(in crate::engine) async fn recover(self: &Arc<Self>) -> Recovering {
        let turn = Arc::clone(&self.turn).lock_owned().await;
        self.recovering.send_replace(true);
        Recovering { slot: Arc::clone(self), turn: Some(turn) }
    }

    /// The turn, if nothing is under way.
    pub(in crate::engine) fn try_turn(&self) -> Option<OwnedMutexGuard<()>> {
        Arc::clone(&self.turn).try_lock_owned().ok()
    }

    /// Whether some work is under way.
    pub(in crate::engine) fn is_busy(&self) -> bool {
        self.turn.try_lock().is_err()
    }

    /// The running machine, if there is one.
    pub(in crate::engine) fn live(&self) -> Option<Arc<RunningSandbox>> {
        self.live.read().clone()
    }

    pub(in crate::engine) fn set_live(&self, live: Option<Arc<RunningSandbox>>) {
        *self.live.write() = live;
    }

    /// Waits until no work is under way.
    pub(in crate::engine) async fn idle(&self) {
        drop(self.turn.lock().await);
    }
}

/// The turns of all sandboxes, and those that run.
pub(in crate::engine) struct Turns {
    context: Arc<Context>,
    slots: Mutex<HashMap<SandboxId, Arc<Slot>>>,
}

impl Turns {
    pub(in crate::engine) fn new(context: &Arc<Context>) -> Arc<Self> {
        Arc::new(Self { context: Arc::clone(context), slots: Mutex::default() })
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<SandboxId, Arc<Slot>>> {
        self.slots.lock()
    }

    pub(in crate::engine) fn slot(&self, id: &SandboxId) -> Arc<Slot> {
        self.slots().entry(id.clone()).or_default().clone()
    }

    pub(in crate::engine) fn live(&self, id: &SandboxId) -> Option<Arc<RunningSandbox>> {
        let slot = self.slots().get(id).cloned()?;
        slot.live()
    }

    pub(in crate::engine) fn all_live(&self) -> Vec<Arc<RunningSandbox>> {
        self.slots().values().filter_map(|slot| slot.live()).collect()
    }

    /// Waits until no operation is under way.
    pub(in crate::engine) async fn all_idle(&self) {
        let slots: Vec<_> = self.slots().values().cloned().collect();
        join_all(slots.iter().map(|slot| slot.idle())).await;
    }

    /// Drops unused slots.
    pub(in crate::engine) fn tidy_slots(&self) {
        self.slots().retain(|_, slot| Arc::strong_count(slot) > 1 || slot.live().is_some());
    }

    /// Waits until a sandbox is recovered after a restart; at once for all others.
    pub(in crate::engine) async fn recovered(&self, id: &SandboxId) -> Result<()> {
        let slot = self.slots().get(id).cloned();
        match slot {
            Some(slot) => self.recovered_slot(&slot).await,
            None => Ok(()),
        }
    }

    async fn recovered_slot(&self, slot: &Slot) -> Result<()> {
        let mut recovering = slot.recovering.subscribe();
        let done = recovering.wait_for(|recovering| !*recovering);
        match tokio::time::timeout(self.context.settings.recovery, done).await {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::Recovering),
        }
    }

    /// Runs `work` when the sandbox has its turn, and to its end whatever becomes of the caller.
    pub(in crate::engine) async fn turn<T, F, W>(&self, id: SandboxId, work: W) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
        W: FnOnce(Arc<Slot>) -> F + Send + 'static,
    {
        if self.context.tasks.is_shutdown() {
            return Err(Error::ShuttingDown);
        }
        let slot = self.slot(&id);
        let shutdown = self.context.tasks.shutdown();
        self.recovered_slot(&slot).await?;
        let task = self.context.tasks.spawn(async move {
            let _turn = Arc::clone(&slot.turn).lock_owned().await;
            if shutdown.is_cancelled() {
                // It waited, and the daemon does not begin anything any more.
                return Err(Error::ShuttingDown);
            }
            work(Arc::clone(&slot)).await
        });
        match task.await {
            Ok(outcome) => outcome,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => Err(Error::ShuttingDown),
        }
    }
}
