//! Runs calls that wait for the disk on threads of their own, a limited number at a time.

use std::time::Duration;

use tokio::sync::Semaphore;

use super::{Result, StoreError};

/// How much may wait for the disk at a time. A disk that hangs must not take the threads that everything
/// else needs; tokio has 512.
static AT_ONCE: Semaphore = Semaphore::const_new(256);

/// How long to wait for one of those before the answer is that the disk does not respond.
const PATIENCE: Duration = Duration::from_secs(30);

/// Runs `work` on a thread that may block.
pub(super) async fn blocking<T, F>(work: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    let Ok(Ok(turn)) = tokio::time::timeout(PATIENCE, AT_ONCE.acquire()).await else {
        return Err(StoreError::Slow { waited: PATIENCE });
    };
    // Held by the work itself: it continues when its caller does not wait any more.
    let work = move || {
        let _turn = turn;
        work()
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(_) => Err(StoreError::ShuttingDown),
    }
}
