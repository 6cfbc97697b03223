//! Throttles long work, so that it does not delay other work.
//!
//! Copying a tree ahead of a checkpoint, merging layers, hashing, searching and deleting take long in large
//! sandboxes and compete for CPUs and for the filesystem's journal: every sync waits for all changes before it.
//! So such work runs on threads of its own ([`background`]). After its first [`UNPACED`] names a thread gets the
//! lowest priority, and after every [`AT_ONCE`] names it rests [`REST`] times as long as they took. Small work
//! is done before that begins.
//!
//! Names are counted where trees are read and changed ([`step`]), so a walk does not have to know whether it is
//! in the background. In the background a walk has no helper threads ([`walk::visit`](super::walk::visit)).
//! Work that was given a stop flag ([`background_until`]) ends with an error at the next name once it is set.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::{Result, StoreError, blocking};

/// How many names a thread handles before it is slowed down.
const UNPACED: u32 = 2_000;
/// How many names it handles between two rests.
const AT_ONCE: u32 = 4;
/// How much longer it rests than it worked.
const REST: u32 = 2;
/// The shortest and the longest rest.
const BOUNDS: (Duration, Duration) = (Duration::from_micros(500), Duration::from_millis(250));

thread_local! {
    static PACE: RefCell<Option<Pacer>> = const { RefCell::new(None) };
}

struct Pacer {
    /// How many names are left until something is to happen.
    left: u32,
    slowed: bool,
    since: Instant,
    /// Set to end the work.
    stop: Option<Arc<AtomicBool>>,
}

impl Pacer {
    fn step(&mut self) {
        self.left = self.left.saturating_sub(1);
        if self.left > 0 {
            return;
        }
        if self.slowed {
            let rest = self.since.elapsed().saturating_mul(REST);
            thread::sleep(rest.clamp(BOUNDS.0, BOUNDS.1));
        } else {
            // Without this right the rests alone have to do.
            let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), 19);
            self.slowed = true;
        }
        (self.left, self.since) = (AT_ONCE, Instant::now());
    }
}

/// Makes this thread one that works in the background, until it ends.
pub(super) fn enter() {
    enter_after(UNPACED, None);
}

/// The same for work that is slowed down after `unpaced` names.
fn enter_after(unpaced: u32, stop: Option<Arc<AtomicBool>>) {
    PACE.set(Some(Pacer { left: unpaced, slowed: false, since: Instant::now(), stop }));
}

/// Whether this thread works in the background.
pub(super) fn is_entered() -> bool {
    PACE.with_borrow(Option::is_some)
}

/// Counts a name that was handled. Rests, if it is time and this thread works in the background.
pub(super) fn step() {
    PACE.with_borrow_mut(|pace| pace.iter_mut().for_each(Pacer::step));
}

/// Fails if this thread works in the background and its work is to end.
pub(super) fn check() -> Result<()> {
    let stopped = PACE.with_borrow(|pace| {
        let stop = pace.as_ref().and_then(|pace| pace.stop.as_ref());
        stop.is_some_and(|stop| stop.load(Ordering::Relaxed))
    });
    if stopped { Err(StoreError::ShuttingDown) } else { Ok(()) }
}

/// Runs `work` in the background, on a thread of its own.
pub(super) async fn background<T, F>(work: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    run_on_thread(UNPACED, None, work).await
}

/// The same for work that ends with [`StoreError::ShuttingDown`] once `stop` is set.
pub(super) async fn background_until<T, F>(stop: Arc<AtomicBool>, work: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    run_on_thread(UNPACED, Some(stop), work).await
}

/// The same, slowed down after `unpaced` names.
pub(super) async fn background_after<T, F>(
    unpaced: u32,
    stop: Arc<AtomicBool>,
    work: F,
) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    run_on_thread(unpaced, Some(stop), work).await
}

async fn run_on_thread<T, F>(unpaced: u32, stop: Option<Arc<AtomicBool>>, work: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    // The runtime waits for the thread that waits, and so for the work, before it ends.
    blocking(move || {
        thread::scope(|scope| {
            let worker = thread::Builder::new().name("keep-background".to_owned());
            let worker = worker.spawn_scoped(scope, || {
                enter_after(unpaced, stop);
                work()
            });
            let worker = worker.map_err(|source| StoreError::Io {
                action: "start a thread for",
                path: std::path::PathBuf::from("background work"),
                source,
            })?;
            worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    })
    .await
}

/// How much of the machine work may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// All there is: somebody waits for it.
    Foreground,
    /// Work that yields to all other work.
    Background,
}

/// Runs `work` with that effort.
pub(super) async fn with_effort<T, F>(effort: Effort, work: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    match effort {
        Effort::Background => background(work).await,
        Effort::Foreground => blocking(work).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_long_work_in_the_background_rests() {
        let steps = |count: u32| {
            let began = Instant::now();
            (0..count).for_each(|_| step());
            began.elapsed()
        };
        assert!(!is_entered());
        let here = steps(UNPACED + 320 * AT_ONCE);
        let worker = thread::spawn(move || {
            enter();
            (steps(UNPACED), steps(320 * AT_ONCE))
        });
        let (short, long) = worker.join().expect("it ends");
        assert!(long >= 320 * BOUNDS.0, "{long:?}");
        assert!(short < long && here < long, "{short:?} and {here:?}");
    }
}
