//! One piece of work at a time per sandbox.
//!
//! A [`Slot`] exists for every sandbox that is alive or being worked on. [`Inner::turn`] runs a piece
//! of work when all that was asked for before it has ended, in a task of its own: a caller that
//! hangs up while a sandbox is being sealed takes nothing with it.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use super::live::Live;
use super::{Error, Inner, Result};
use crate::model::SandboxId;

#[derive(Debug, Default)]
pub(super) struct Slot {
    turn: Arc<tokio::sync::Mutex<()>>,
    live: RwLock<Option<Arc<Live>>>,
}

impl Slot {
    /// The running machine, if there is one.
    pub(super) fn live(&self) -> Option<Arc<Live>> {
        self.live.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_live(&self, live: Option<Arc<Live>>) {
        *self.live.write().unwrap_or_else(PoisonError::into_inner) = live;
    }

    /// Takes the turn, for work that is done in another way than by [`Inner::turn`].
    pub(super) async fn take_turn(&self) -> tokio::sync::OwnedMutexGuard<()> {
        Arc::clone(&self.turn).lock_owned().await
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
        let task = tokio::spawn(async move {
            let _turn = Arc::clone(&slot.turn).lock_owned().await;
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
