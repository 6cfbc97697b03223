//! Work that is done once, a while later, unless its owner has gone by then.

use std::time::Duration;

use parking_lot::Mutex;
use tokio_util::task::AbortOnDropHandle;

/// At most one piece of work that waits for its time.
#[derive(Debug, Default)]
pub(super) struct Timer(Mutex<Option<AbortOnDropHandle<()>>>);

impl Timer {
    /// Does `work` after `wait`, in the place of what was to be done before. Outside of a runtime nothing is done.
    pub(super) fn set(&self, wait: Duration, work: impl FnOnce() + Send + 'static) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let task = AbortOnDropHandle::new(runtime.spawn(async move {
            tokio::time::sleep(wait).await;
            work();
        }));
        *self.0.lock() = Some(task);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use parking_lot::Mutex;

    use super::Timer;

    #[tokio::test]
    async fn only_the_last_of_a_living_owner_is_done() {
        let done = Arc::new(Mutex::new(Vec::new()));
        let note = |what: &'static str| {
            let done = Arc::clone(&done);
            move || done.lock().push(what)
        };
        let (kept, dropped) = (Timer::default(), Timer::default());
        let soon = Duration::from_millis(20);
        kept.set(soon, note("replaced"));
        kept.set(soon * 2, note("kept"));
        dropped.set(soon, note("dropped"));
        drop(dropped);
        let begun = Instant::now();
        while done.lock().is_empty() && begun.elapsed() < Duration::from_secs(30) {
            tokio::time::sleep(soon).await;
        }
        assert_eq!(*done.lock(), ["kept"]);
    }
}
