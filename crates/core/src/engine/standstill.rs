//! Machines that stand still for a moment go on, whatever happens.
//!
//! A checkpoint freezes the processes of a sandbox, a pause holds its machine. Between that and the end of it there is disk
//! work, which can fail, panic or be cancelled. So both are guards: dropping one lets the sandbox go on, in a task of
//! its own. A daemon that dies leaves it to the next, which lets everything go on that it adopts.

use std::sync::Arc;
use std::time::Duration;

use super::boot::chain_of;
use super::live::Live;
use super::{Inner, Result};

/// How long after a failure a sandbox is told again to go on.
const AGAIN: [Duration; 4] =
    [Duration::ZERO, Duration::from_millis(100), Duration::from_secs(1), Duration::from_secs(10)];

/// The processes of a sandbox, frozen while this lives.
#[derive(Debug)]
pub(super) struct Frozen {
    /// Absent once they go on.
    live: Option<Arc<Live>>,
}

impl Frozen {
    pub(super) async fn freeze(live: &Arc<Live>) -> Result<Self> {
        // Made first: a freeze that is given up half way counts.
        let frozen = Self { live: Some(Arc::clone(live)) };
        if let Some(relayer) = live.driver.relayer() {
            relayer.freeze(&live.key).await?;
        }
        Ok(frozen)
    }

    /// Lets them go on. After an error it is tried again in the background.
    pub(super) async fn thaw(mut self) -> Result<()> {
        if let Some(live) = &self.live {
            thaw(live).await?;
        }
        self.live = None;
        Ok(())
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        let Some(live) = self.live.take() else { return };
        in_background(async move {
            for pause in AGAIN {
                tokio::time::sleep(pause).await;
                match thaw(&live).await {
                    Ok(()) => return,
                    Err(error) => {
                        tracing::error!(machine = %live.key, error = chain_of(&error), "is frozen and was not thawed");
                    }
                }
            }
        });
    }
}

async fn thaw(live: &Live) -> Result<()> {
    match live.driver.relayer() {
        Some(relayer) => Ok(relayer.thaw(&live.key).await?),
        None => Ok(()),
    }
}

/// A machine that is held, or about to be, until its memory is on record.
pub(super) struct Held {
    inner: Arc<Inner>,
    /// Absent once it goes on, or is not to.
    live: Option<Arc<Live>>,
}

impl Held {
    pub(super) fn new(inner: &Arc<Inner>, live: &Arc<Live>) -> Self {
        Self { inner: Arc::clone(inner), live: Some(Arc::clone(live)) }
    }

    /// Its memory is on record: it is not to go on.
    pub(super) fn keep(mut self) {
        self.live = None;
    }

    /// Lets it go on.
    pub(super) async fn release(mut self) {
        if let Some(live) = self.live.take() {
            self.inner.let_go_on(&live).await;
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some(live) = self.live.take() else { return };
        let inner = Arc::clone(&self.inner);
        in_background(async move { inner.let_go_on(&live).await });
    }
}

/// Runs `work`, unless the daemon is about to end: then the next one does it.
fn in_background(work: impl Future<Output = ()> + Send + 'static) {
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        runtime.spawn(work);
    }
}
