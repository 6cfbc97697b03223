//! The tasks that the engine started, and the signal that ends them.

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument as _;

/// Background tasks of the engine.
#[derive(Debug, Default)]
pub(in crate::engine) struct Tasks {
    shutdown: CancellationToken,
    running: TaskTracker,
}

impl Tasks {
    /// Starts a task that [`join`](Self::join) waits for. It logs with the id of the request that started it.
    pub(in crate::engine) fn spawn<F>(&self, work: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        self.running.spawn(work.in_current_span())
    }

    /// Starts work that waits for the disk, on a thread of its own. [`join`](Self::join) waits for it.
    pub(in crate::engine) fn spawn_blocking<F, T>(&self, work: F) -> JoinHandle<T>
    where
        F: FnOnce() -> T + Send + 'static,
        T: Send + 'static,
    {
        self.running.spawn_blocking(work)
    }

    /// Starts a task that is dropped, wherever it waits, when the engine shuts down.
    pub(in crate::engine) fn spawn_until_shutdown<F>(&self, work: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let shutdown = self.shutdown.clone();
        self.running.spawn(async move {
            let _ = shutdown.run_until_cancelled(work).await;
        });
    }

    /// Waits, unless the engine shuts down meanwhile: then the answer is false.
    pub(in crate::engine) async fn sleep(&self, time: Duration) -> bool {
        self.shutdown.run_until_cancelled(tokio::time::sleep(time)).await.is_some()
    }

    /// The signal that the engine shuts down.
    pub(in crate::engine) fn shutdown(&self) -> CancellationToken {
        self.shutdown.clone()
    }

    pub(in crate::engine) fn is_shutdown(&self) -> bool {
        self.shutdown.is_cancelled()
    }

    /// Signals all tasks to end.
    pub(in crate::engine) fn begin_shutdown(&self) {
        self.shutdown.cancel();
    }

    /// Waits until all tasks have ended, but not for longer than `within`. Answers with the number of those that have not.
    pub(in crate::engine) async fn join(&self, within: Duration) -> usize {
        self.running.close();
        let _ = tokio::time::timeout(within, self.running.wait()).await;
        self.running.len()
    }
}
