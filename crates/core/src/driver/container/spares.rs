//! Cages that are begun before it is known whose they will be.
//!
//! A builder that was started ahead has its namespaces, network device and filter, and waits for what to build
//! (`crates/agent/src/cage/ahead.rs`). The next start takes it, so that it is spared about half of the work. Such a builder is nobody's: it
//! has no directory, no control group, no user ids and no file, and runs nothing.
//!
//! *What they cost.* Two processes each, about 1 MB together, that sleep. There are at most [`Spares::most`], made one after the other when
//! no machine is being started, a moment after the last start. When nothing was started for [`AT_MOST`] they are ended. They end with the
//! daemon, however that ends: their standard input is closed then. So the next daemon finds none.
//!
//! A start that finds none, or one that fails, builds as if there had been none.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::driver::host::{Builder, Host, on_thread};

/// How long after the last start they are made: whoever started a machine wants to use it first.
const AFTER: Duration = Duration::from_millis(5);
/// How long they wait for a machine.
const AT_MOST: Duration = Duration::from_mins(5);

/// Those of a driver.
#[derive(Debug)]
pub(super) struct Spares {
    most: usize,
    ready: Mutex<Vec<Builder>>,
    /// How many machines are being started.
    starting: AtomicUsize,
    last_start: Mutex<Instant>,
    /// Some are being made, or about to be.
    making: AtomicBool,
    /// Somebody sees to it that they end.
    watched: AtomicBool,
    closed: AtomicBool,
}

impl Spares {
    pub(super) fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            ready: Mutex::default(),
            starting: AtomicUsize::default(),
            last_start: Mutex::new(Instant::now()),
            making: AtomicBool::default(),
            watched: AtomicBool::default(),
            closed: AtomicBool::default(),
        })
    }

    /// To be held while a machine is started.
    pub(super) fn starting(&self) -> impl Drop + use<'_> {
        self.starting.fetch_add(1, Ordering::SeqCst);
        UnderWay(self)
    }

    /// One that waits, if there is any.
    pub(super) fn take(&self) -> Option<Builder> {
        loop {
            let mut spare = locked(&self.ready).pop()?;
            if spare.is_waiting() {
                return Some(spare);
            }
        }
    }

    /// How many wait.
    pub(super) fn waiting(&self) -> usize {
        locked(&self.ready).len()
    }

    /// Ends them all, for good.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        locked(&self.ready).clear();
    }

    fn wants_more(&self) -> bool {
        self.waiting() < self.most
            && !self.closed.load(Ordering::SeqCst)
            && self.starting.load(Ordering::SeqCst) == 0
    }

    /// Sees to it that the next start finds one.
    pub(super) fn restock(self: &Arc<Self>, host: &Arc<Host>) {
        if !self.wants_more() || self.making.swap(true, Ordering::SeqCst) {
            return;
        }
        let (spares, host) = (Arc::downgrade(self), Arc::downgrade(host));
        tokio::spawn(async move {
            tokio::time::sleep(AFTER).await;
            let Some((spares, host)) = spares.upgrade().zip(host.upgrade()) else { return };
            let run_dir = host.run_dir().to_owned();
            let made = Arc::clone(&spares);
            let work = move |host: &Host| {
                made.make(host);
                Ok(())
            };
            let _ = on_thread(&host, &run_dir, work).await;
            spares.making.store(false, Ordering::SeqCst);
            // A start that came in between found them being made.
            spares.watch();
        });
    }

    fn make(&self, host: &Host) {
        // Where processes are born in their group, only the builder is started.
        let mode: &[&str] = if host.groups.are_born_in() { &["cage"] } else { &["cage", "ahead"] };
        while self.wants_more() {
            match host.builder(mode) {
                Ok(spare) => locked(&self.ready).push(spare),
                Err(error) => {
                    tracing::warn!(%error, "no cage can be begun ahead of the next start");
                    return;
                }
            }
        }
        if self.closed.load(Ordering::SeqCst) {
            locked(&self.ready).clear();
        }
    }

    /// Ends them when nothing was started for a while. One task at a time, which sleeps until then.
    fn watch(self: &Arc<Self>) {
        if self.waiting() == 0 || self.watched.swap(true, Ordering::SeqCst) {
            return;
        }
        let spares = Arc::downgrade(self);
        tokio::spawn(async move {
            while let Some(left) = left(&spares) {
                tokio::time::sleep(left).await;
            }
        });
    }

    /// How long it is until they are ended. `None`: they are, or there are none.
    fn left(&self) -> Option<Duration> {
        let mut ready = locked(&self.ready);
        let left = AT_MOST.saturating_sub(locked(&self.last_start).elapsed());
        if !left.is_zero() && !ready.is_empty() {
            return Some(left);
        }
        ready.clear();
        // Under the lock: whoever makes one later finds that nobody watches.
        self.watched.store(false, Ordering::SeqCst);
        None
    }
}

fn left(spares: &Weak<Spares>) -> Option<Duration> {
    spares.upgrade()?.left()
}

struct UnderWay<'a>(&'a Spares);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        *locked(&self.0.last_start) = Instant::now();
        self.0.starting.fetch_sub(1, Ordering::SeqCst);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
