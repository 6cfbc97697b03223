//! A warm pool: items that take long to make are made before they are needed.
//!
//! ```text
//! restock ──> wanted ──> being made ──> ready ──take──> the caller's
//!                                         └── too old, of a kind out of use, or the pool is closed ──> discarded
//! ```
//!
//! There are three: begun cages (`driver/container`), hypervisors without a machine (`driver/microvm`) and restored machines without
//! a sandbox (`engine/machine/warm_machines.rs`). An item is of a *kind*, and only a caller that asks for the same kind gets it.
//!
//! - *Who makes them.* The [`Maker`], who owns the pool. One task per pool calls it, for one item at a time. The task lives as long as
//!   items are needed or ready, and does not keep the maker alive while it waits.
//! - *When.* While no start is under way ([`WarmPool::starting`]), and [`PoolLimits::quiet`] after
//!   the last one: its current users come first.
//! - *What if that fails.* An item that cannot be made, or whose maker panics, is given up. The next [`WarmPool::restock`] tries again.
//! - *How it ends.* After [`WarmPool::close`] nothing is made, and nothing is left.

use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::task::AbortOnDropHandle;

/// How often somebody looks who cannot be woken.
const LOOK: Duration = Duration::from_millis(5);

/// What a pool may hold, and when.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolLimits {
    /// How many items of one kind.
    pub(crate) per_kind: usize,
    /// Of how many kinds: those that were made last.
    pub(crate) kinds: usize,
    /// How long after a start the next item is made.
    pub(crate) quiet: Duration,
    /// How long an item waits to be taken.
    pub(crate) idle: Duration,
}

/// Makes the items of a pool, and ends them.
#[async_trait]
pub(crate) trait Maker<K, T>: Send + Sync + 'static {
    /// Makes an item, or logs why not.
    async fn make(self: Arc<Self>, kind: K) -> Option<T>;

    /// Ends an unused item.
    async fn discard(self: Arc<Self>, item: T);
}

/// Items that wait to be taken.
#[derive(Debug)]
pub(crate) struct WarmPool<K, T> {
    limits: PoolLimits,
    stock: Mutex<Stock<K, T>>,
    /// How many starts are under way.
    starting: AtomicUsize,
    last_start: Mutex<Option<Instant>>,
    /// Held while items are made or discarded.
    working: tokio::sync::Mutex<()>,
    /// Wakes the task.
    wake: Arc<Notify>,
    /// The task. It holds the pool while it makes or discards something, so it is only ever aborted while it waits.
    task: Mutex<Option<AbortOnDropHandle<()>>>,
}

#[derive(Debug)]
struct Stock<K, T> {
    /// The oldest first.
    ready: Vec<Ready<K, T>>,
    wanted: Vec<K>,
    making: Option<K>,
    /// Whether the task runs.
    tended: bool,
    closed: bool,
}

#[derive(Debug)]
struct Ready<K, T> {
    kind: K,
    item: T,
    made: Instant,
}

/// What there is to do.
enum PoolStep<K, T> {
    Make(K),
    Discard(Vec<T>),
    Wait(Duration),
    /// The pool is empty, and no item is needed.
    Done,
}

impl<K, T> WarmPool<K, T>
where
    K: Clone + PartialEq + Send + 'static,
    T: Send + 'static,
{
    pub(crate) fn new(limits: PoolLimits) -> Arc<Self> {
        let stock = Stock {
            ready: Vec::new(),
            wanted: Vec::new(),
            making: None,
            tended: false,
            closed: false,
        };
        Arc::new(Self {
            limits,
            stock: Mutex::new(stock),
            starting: AtomicUsize::default(),
            last_start: Mutex::default(),
            working: tokio::sync::Mutex::default(),
            wake: Arc::default(),
            task: Mutex::default(),
        })
    }

    /// To be held during a start.
    pub(crate) fn starting(&self) -> impl Drop + use<'_, K, T> {
        self.starting.fetch_add(1, Ordering::SeqCst);
        Starting(self)
    }

    /// The oldest item of a kind.
    pub(crate) fn take(&self, kind: &K) -> Option<T> {
        let mut stock = self.stock.lock();
        let place = stock.ready.iter().position(|ready| ready.kind == *kind)?;
        Some(stock.ready.remove(place).item)
    }

    /// How many items are ready.
    pub(crate) fn waiting(&self) -> usize {
        self.stock.lock().ready.len()
    }

    /// Has as many items of a kind made as there may be, soon.
    pub(crate) fn restock<M: Maker<K, T>>(self: &Arc<Self>, maker: &Arc<M>, kind: &K) {
        let mut stock = self.stock.lock();
        let missing = self.limits.per_kind.saturating_sub(stock.count(kind));
        if missing == 0 || stock.closed {
            return;
        }
        stock.wanted.extend(std::iter::repeat_n(kind.clone(), missing));
        // On a host that is never quiet, the kinds that were needed first are given up.
        let most = self.limits.per_kind.saturating_mul(self.limits.kinds);
        let surplus = stock.wanted.len().saturating_sub(most);
        stock.wanted.drain(..surplus);
        let tended = std::mem::replace(&mut stock.tended, true);
        drop(stock);
        if tended {
            self.wake.notify_one();
        } else {
            let (pool, maker) = (Arc::downgrade(self), Arc::downgrade(maker));
            let wake = Arc::clone(&self.wake);
            let task = AbortOnDropHandle::new(tokio::spawn(tend(pool, maker, wake)));
            *self.task.lock() = Some(task);
        }
    }

    /// Closes the pool for good, and answers with what is left in it, to be discarded. Waits for an item that is being made: it would
    /// be left behind.
    pub(crate) async fn close(&self) -> Vec<T> {
        self.shut();
        let _nobody_works = self.working.lock().await;
        self.drain()
    }

    /// The same where nothing can be awaited; waits no longer than `patience`.
    pub(crate) fn close_within(&self, patience: Duration) -> Vec<T> {
        self.shut();
        let begun = Instant::now();
        while self.working.try_lock().is_err() && begun.elapsed() < patience {
            std::thread::sleep(LOOK);
        }
        self.drain()
    }

    fn shut(&self) {
        let mut stock = self.stock.lock();
        stock.closed = true;
        stock.wanted.clear();
        drop(stock);
        self.wake.notify_one();
    }

    fn drain(&self) -> Vec<T> {
        self.stock.lock().ready.drain(..).map(|ready| ready.item).collect()
    }

    /// Does what there is to do. Answers with how long there is nothing, unless that is for good.
    async fn work<M: Maker<K, T>>(&self, maker: &Arc<M>) -> Option<Duration> {
        loop {
            let _nobody_else = self.working.lock().await;
            match self.step() {
                PoolStep::Make(kind) => {
                    let made = no_panic("make", Arc::clone(maker).make(kind.clone())).await;
                    let made = made.flatten();
                    let ready = made.map(|item| Ready { kind, item, made: Instant::now() });
                    let mut stock = self.stock.lock();
                    stock.making = None;
                    stock.ready.extend(ready);
                }
                PoolStep::Discard(items) => {
                    for item in items {
                        no_panic("discard", Arc::clone(maker).discard(item)).await;
                    }
                }
                PoolStep::Wait(wait) => return Some(wait),
                PoolStep::Done => return None,
            }
        }
    }

    fn step(&self) -> PoolStep<K, T> {
        let mut stock = self.stock.lock();
        let surplus = stock.surplus(&self.limits);
        if !surplus.is_empty() {
            return PoolStep::Discard(surplus);
        }
        if !stock.wanted.is_empty() {
            let busy = self.busy_for();
            if !busy.is_zero() {
                return PoolStep::Wait(busy);
            }
            let kind = stock.wanted.remove(0);
            stock.making = Some(kind.clone());
            return PoolStep::Make(kind);
        }
        match stock.ready.first() {
            Some(oldest) => PoolStep::Wait(self.limits.idle.saturating_sub(oldest.made.elapsed())),
            None => {
                // Under the lock: a later caller finds that no task tends the pool.
                stock.tended = false;
                PoolStep::Done
            }
        }
    }

    /// How long it is until the host is quiet; while a start is under way, until the task is woken.
    fn busy_for(&self) -> Duration {
        if self.starting.load(Ordering::SeqCst) > 0 {
            return Duration::MAX;
        }
        let last = *self.last_start.lock();
        last.map_or(Duration::ZERO, |last| self.limits.quiet.saturating_sub(last.elapsed()))
    }
}

impl<K: Clone + PartialEq, T> Stock<K, T> {
    /// How many items of a kind there are, or will be.
    fn count(&self, kind: &K) -> usize {
        let ready = self.ready.iter().map(|ready| &ready.kind);
        ready.chain(&self.wanted).chain(&self.making).filter(|one| *one == kind).count()
    }

    /// Takes out what is not to be kept.
    fn surplus(&mut self, limits: &PoolLimits) -> Vec<T> {
        let mut kept: Vec<K> = Vec::new();
        for Ready { kind, .. } in self.ready.iter().rev().filter(|_| !self.closed) {
            if kept.len() < limits.kinds && !kept.contains(kind) {
                kept.push(kind.clone());
            }
        }
        let surplus = |ready: &mut Ready<K, T>| {
            ready.made.elapsed() >= limits.idle || !kept.contains(&ready.kind)
        };
        self.ready.extract_if(.., surplus).map(|ready| ready.item).collect()
    }
}

/// Makes and discards the items of a pool, until it is empty and none is needed.
async fn tend<M, K, T>(pool: Weak<WarmPool<K, T>>, maker: Weak<M>, wake: Arc<Notify>)
where
    M: Maker<K, T>,
    K: Clone + PartialEq + Send + 'static,
    T: Send + 'static,
{
    loop {
        let wait = {
            let Some((maker, pool)) = maker.upgrade().zip(pool.upgrade()) else { return };
            pool.work(&maker).await
        };
        let Some(wait) = wait else { return };
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = wake.notified() => {}
        }
    }
}

/// Runs a maker's future. If it panics, that is logged and the result is `None`: the pool's task
/// continues.
async fn no_panic<R>(what: &str, future: impl Future<Output = R>) -> Option<R> {
    let done = AssertUnwindSafe(future).catch_unwind().await;
    done.map_err(|_| tracing::error!("a warm pool failed to {what} an item: its maker panicked"))
        .ok()
}

struct Starting<'a, K, T>(&'a WarmPool<K, T>);

impl<K, T> Drop for Starting<'_, K, T> {
    fn drop(&mut self) {
        *self.0.last_start.lock() = Some(Instant::now());
        if self.0.starting.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.wake.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    use async_trait::async_trait;
    use parking_lot::Mutex;
    use tokio::sync::Semaphore;

    use super::{Maker, PoolLimits, WarmPool};

    const LIMITS: PoolLimits = PoolLimits {
        per_kind: 2,
        kinds: 2,
        quiet: Duration::from_millis(1),
        idle: Duration::from_mins(10),
    };

    /// Makes items that have the name of their kind and a number.
    #[derive(Default)]
    struct Fake {
        made: AtomicUsize,
        most_at_once: AtomicUsize,
        at_once: AtomicUsize,
        fails: AtomicBool,
        panics: AtomicBool,
        /// If there is one, each item takes a permit.
        slow: Option<Semaphore>,
        discarded: Mutex<Vec<String>>,
    }

    impl Fake {
        fn discarded(&self) -> Vec<String> {
            self.discarded.lock().clone()
        }
    }

    #[async_trait]
    impl Maker<&'static str, String> for Fake {
        async fn make(self: Arc<Self>, kind: &'static str) -> Option<String> {
            let at_once = self.at_once.fetch_add(1, Ordering::SeqCst) + 1;
            self.most_at_once.fetch_max(at_once, Ordering::SeqCst);
            let number = self.made.fetch_add(1, Ordering::SeqCst) + 1;
            if let Some(slow) = &self.slow {
                slow.acquire().await.unwrap().forget();
            }
            tokio::task::yield_now().await;
            assert!(!self.panics.load(Ordering::SeqCst), "it was told to panic");
            self.at_once.fetch_sub(1, Ordering::SeqCst);
            (!self.fails.load(Ordering::SeqCst)).then(|| format!("{kind}{number}"))
        }

        async fn discard(self: Arc<Self>, item: String) {
            self.discarded.lock().push(item);
        }
    }

    type Pool = Arc<WarmPool<&'static str, String>>;

    fn pool(limits: PoolLimits) -> (Pool, Arc<Fake>) {
        (WarmPool::new(limits), Arc::default())
    }

    async fn until(what: &str, condition: impl Fn() -> bool) {
        let begun = Instant::now();
        while !condition() {
            assert!(begun.elapsed() < Duration::from_secs(20), "{what}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Long enough for a mistake to show.
    async fn a_while() {
        tokio::time::sleep(Duration::from_millis(30)).await;
    }

    fn is_tended(pool: &Pool) -> bool {
        pool.stock.lock().tended
    }

    #[tokio::test]
    async fn it_holds_as_many_as_it_may_and_gives_out_the_oldest() {
        let (pool, fake) = pool(LIMITS);
        assert_eq!(pool.take(&"a"), None);
        for _ in 0..5 {
            pool.restock(&fake, &"a");
        }
        until("two are ready", || pool.waiting() == 2).await;
        a_while().await;
        assert_eq!((pool.waiting(), fake.made.load(Ordering::SeqCst)), (2, 2));
        assert_eq!(pool.take(&"b"), None, "of another kind");
        assert_eq!(pool.take(&"a").unwrap(), "a1");
        pool.restock(&fake, &"a");
        until("another is ready", || pool.waiting() == 2).await;
        assert_eq!([pool.take(&"a").unwrap(), pool.take(&"a").unwrap()], ["a2", "a3"]);
        assert_eq!(pool.take(&"a"), None);
        assert_eq!(fake.discarded(), [""; 0]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn one_is_made_at_a_time() {
        let (pool, fake) = pool(PoolLimits { per_kind: 8, ..LIMITS });
        for kind in ["a", "b"] {
            pool.restock(&fake, &kind);
        }
        until("all are ready", || pool.waiting() == 16).await;
        assert_eq!(fake.most_at_once.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn none_is_made_during_a_start_or_right_after() {
        let (pool, fake) = pool(PoolLimits { quiet: Duration::from_millis(200), ..LIMITS });
        let (first, second) = (pool.starting(), pool.starting());
        pool.restock(&fake, &"a");
        a_while().await;
        drop(first);
        a_while().await;
        assert_eq!(fake.made.load(Ordering::SeqCst), 0, "one start is left");
        let over = Instant::now();
        drop(second);
        until("they are made", || pool.waiting() == 2).await;
        assert!(over.elapsed() >= Duration::from_millis(200), "{:?}", over.elapsed());
    }

    #[tokio::test]
    async fn kinds_that_were_not_made_lately_make_room() {
        let (pool, fake) = pool(LIMITS);
        for kind in ["a", "b", "c"] {
            pool.restock(&fake, &kind);
            until("it is made", || pool.stock.lock().count(&kind) == 2 && pool.waiting() >= 2)
                .await;
            until("nothing is wanted", || {
                let stock = pool.stock.lock();
                stock.wanted.is_empty() && stock.making.is_none()
            })
            .await;
        }
        until("there is room", || pool.waiting() == 4).await;
        until("they are ended", || fake.discarded() == ["a1", "a2"]).await;
        assert_eq!(pool.take(&"a"), None);
        assert_eq!([pool.take(&"b").unwrap(), pool.take(&"c").unwrap()], ["b3", "c5"]);
    }

    #[tokio::test]
    async fn a_host_that_is_never_quiet_does_not_pile_up_wishes() {
        let (pool, fake) = pool(LIMITS);
        let _start = pool.starting();
        for kind in ["a", "b", "c", "d"] {
            pool.restock(&fake, &kind);
        }
        assert_eq!(pool.stock.lock().wanted, ["c", "c", "d", "d"]);
    }

    #[tokio::test]
    async fn what_nobody_takes_is_ended_and_then_nothing_runs() {
        let (pool, fake) = pool(PoolLimits { idle: Duration::from_millis(50), ..LIMITS });
        pool.restock(&fake, &"a");
        until("they are ended", || fake.discarded() == ["a1", "a2"]).await;
        until("nobody tends it", || !is_tended(&pool)).await;
        assert_eq!(pool.waiting(), 0);
        pool.restock(&fake, &"a");
        until("others are made", || fake.made.load(Ordering::SeqCst) == 4).await;
    }

    #[tokio::test]
    async fn what_cannot_be_made_is_tried_again_only_when_it_is_wanted_again() {
        let (pool, fake) = pool(LIMITS);
        fake.fails.store(true, Ordering::SeqCst);
        pool.restock(&fake, &"a");
        until("nobody tends it", || !is_tended(&pool)).await;
        a_while().await;
        assert_eq!((pool.waiting(), fake.made.load(Ordering::SeqCst)), (0, 2));
        fake.fails.store(false, Ordering::SeqCst);
        pool.restock(&fake, &"a");
        until("two are ready", || pool.waiting() == 2).await;
    }

    #[tokio::test]
    async fn a_maker_that_panics_is_called_again_when_an_item_is_wanted_again() {
        let (pool, fake) = pool(LIMITS);
        fake.panics.store(true, Ordering::SeqCst);
        pool.restock(&fake, &"a");
        until("nobody tends it", || !is_tended(&pool)).await;
        assert_eq!((pool.waiting(), fake.made.load(Ordering::SeqCst)), (0, 2));
        fake.panics.store(false, Ordering::SeqCst);
        pool.restock(&fake, &"a");
        until("two are ready", || pool.waiting() == 2).await;
        assert_eq!(pool.close().await.len(), 2, "and it can be closed");
    }

    #[tokio::test]
    async fn closing_leaves_nothing_not_even_what_is_being_made() {
        let pool: Pool = WarmPool::new(LIMITS);
        let fake = Arc::new(Fake { slow: Some(Semaphore::new(1)), ..Fake::default() });
        pool.restock(&fake, &"a");
        until("the second is being made", || fake.made.load(Ordering::SeqCst) == 2).await;
        assert_eq!(pool.close_within(Duration::from_millis(20)), ["a1"], "no longer than that");
        let closing = tokio::spawn({
            let pool = Arc::clone(&pool);
            async move { pool.close().await }
        });
        a_while().await;
        assert!(!closing.is_finished(), "it is waited for");
        fake.slow.as_ref().unwrap().add_permits(10);
        let mut left = closing.await.unwrap();
        until("nobody tends it", || !is_tended(&pool)).await;
        left.extend(fake.discarded());
        assert_eq!(left, ["a2"]);
        pool.restock(&fake, &"a");
        a_while().await;
        assert_eq!((pool.waiting(), fake.made.load(Ordering::SeqCst)), (0, 2));
    }

    #[tokio::test]
    async fn a_pool_does_not_keep_its_maker_alive() {
        let (pool, fake) = pool(LIMITS);
        pool.restock(&fake, &"a");
        until("two are ready", || pool.waiting() == 2).await;
        until("nobody works", || Arc::strong_count(&fake) == 1).await;
        let (wake, weak) = (Arc::clone(&pool.wake), Arc::downgrade(&fake));
        drop((pool, fake));
        assert!(weak.upgrade().is_none());
        until("the task has ended", || Arc::strong_count(&wake) == 1).await;
    }
}
