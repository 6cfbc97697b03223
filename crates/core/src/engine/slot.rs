//! One piece of work at a time per sandbox.
//!
//! A [`Slot`] exists for every sandbox that is alive or being worked on. [`Inner::turn`] runs a piece
//! of work when all that was asked for before it has ended, in a task of its own: a caller that
//! hangs up while a sandbox is being sealed takes nothing with it.
//!
//! After a restart of the daemon the first turn of every sandbox is its recovery's ([`Recovering`]), taken
//! before anybody else can. Whoever wants the sandbox meanwhile waits for that, with a deadline.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use tokio::sync::{OwnedMutexGuard, watch};

use super::live::Live;
use super::{Error, Inner, Result};
use crate::model::SandboxId;

#[derive(Debug, Default)]
pub(super) struct Slot {
    turn: Arc<tokio::sync::Mutex<()>>,
    live: RwLock<Option<Arc<Live>>>,
    recovering: watch::Sender<bool>,
}

/// A sandbox's turn while it is being recovered. Dropping it ends both, also when recovery panicked.
#[derive(Debug)]
pub(super) struct Recovering {
    pub(super) slot: Arc<Slot>,
    turn: Option<OwnedMutexGuard<()>>,
}

impl Recovering {
    /// Keeps the turn for work that goes on. Recovery is over for those who wait for it.
    pub(super) fn into_turn(mut self) -> Option<OwnedMutexGuard<()>> {
        self.turn.take()
    }
}

impl Drop for Recovering {
    fn drop(&mut self) {
        self.slot.recovering.send_replace(false);
    }
}

impl Slot {
    /// Takes the first turn after a restart. Nobody else can have it yet.
    pub(super) async fn recover(self: &Arc<Self>) -> Recovering {
        let turn = Arc::clone(&self.turn).lock_owned().await;
        self.recovering.send_replace(true);
        Recovering { slot: Arc::clone(self), turn: Some(turn) }
    }

    /// The turn, if nothing is under way.
    pub(super) fn try_turn(&self) -> Option<OwnedMutexGuard<()>> {
        Arc::clone(&self.turn).try_lock_owned().ok()
    }

    /// Whether some work is under way.
    pub(super) fn is_busy(&self) -> bool {
        self.turn.try_lock().is_err()
    }

    /// The running machine, if there is one.
    pub(super) fn live(&self) -> Option<Arc<Live>> {
        self.live.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_live(&self, live: Option<Arc<Live>>) {
        *self.live.write().unwrap_or_else(PoisonError::into_inner) = live;
    }

    /// Waits until no work is under way.
    pub(super) async fn idle(&self) {
        drop(self.turn.lock().await);
    }
}

impl Inner {
    pub(super) fn slots(&self) -> MutexGuard<'_, std::collections::HashMap<SandboxId, Arc<Slot>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn slot(&self, id: &SandboxId) -> Arc<Slot> {
        self.slots().entry(id.clone()).or_default().clone()
    }

    pub(super) fn live(&self, id: &SandboxId) -> Option<Arc<Live>> {
        let slot = self.slots().get(id).cloned()?;
        slot.live()
    }

    pub(super) fn all_live(&self) -> Vec<Arc<Live>> {
        self.slots().values().filter_map(|slot| slot.live()).collect()
    }

    /// Drops the slots that nobody needs.
    pub(super) fn tidy_slots(&self) {
        self.slots().retain(|_, slot| Arc::strong_count(slot) > 1 || slot.live().is_some());
    }

    /// Waits until a sandbox is recovered after a restart; at once for all others.
    pub(super) async fn recovered(&self, id: &SandboxId) -> Result<()> {
        let slot = self.slots().get(id).cloned();
        match slot {
            Some(slot) => self.recovered_slot(&slot).await,
            None => Ok(()),
        }
    }

    async fn recovered_slot(&self, slot: &Slot) -> Result<()> {
        let mut recovering = slot.recovering.subscribe();
        let done = recovering.wait_for(|recovering| !*recovering);
        match tokio::time::timeout(self.settings.recovery, done).await {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::Recovering),
        }
    }

    /// Runs `work` when the sandbox has its turn, and to its end whatever becomes of the caller.
    pub(super) async fn turn<T, F, W>(self: &Arc<Self>, id: SandboxId, work: W) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
        W: FnOnce(Arc<Inner>, Arc<Slot>) -> F + Send + 'static,
    {
        if *self.shutdown.borrow() {
            return Err(Error::ShuttingDown);
        }
        let (inner, slot) = (Arc::clone(self), self.slot(&id));
        self.recovered_slot(&slot).await?;
        let task = tokio::spawn(async move {
            let _turn = Arc::clone(&slot.turn).lock_owned().await;
            if *inner.shutdown.borrow() {
                // It waited, and the daemon does not begin anything any more.
                return Err(Error::ShuttingDown);
            }
            work(inner, Arc::clone(&slot)).await
        });
        match task.await {
            Ok(outcome) => outcome,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => Err(Error::ShuttingDown),
        }
    }
}

/// A lock that a panic elsewhere does not take away from everybody.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
