//! Locks by key: work on one key is done by one caller at a time, work on different keys in parallel.
//!
//! The usual use is *single flight*: something expensive is made once, however many callers want it at the same time. Take the lock of its
//! key, check whether it exists by now, and make it if not.
//!
//! A key takes memory only while somebody holds its lock or waits for it; a caller that gives up
//! waiting leaves nothing.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;

type Locks<K> = Mutex<HashMap<K, Arc<tokio::sync::Mutex<()>>>>;

/// A lock for each key. Clones share the locks.
#[derive(Debug)]
pub(crate) struct KeyedLock<K: Eq + Hash> {
    locks: Arc<Locks<K>>,
}

/// The lock of one key, until this is dropped.
#[derive(Debug)]
#[must_use = "the lock is released when the guard is dropped"]
pub(crate) struct KeyGuard<K: Eq + Hash> {
    // Declared first, and so released before the key is forgotten.
    _guard: OwnedMutexGuard<()>,
    _claim: Claim<K>,
}

/// The interest of one caller in a key, whether it holds the lock or waits for it.
#[derive(Debug)]
struct Claim<K: Eq + Hash> {
    locks: Arc<Locks<K>>,
    key: K,
    lock: Option<Arc<tokio::sync::Mutex<()>>>,
}

impl<K: Eq + Hash + Clone> KeyedLock<K> {
    /// Waits for the lock of a key. Callers get it in the order in which they asked.
    pub(crate) async fn lock(&self, key: &K) -> KeyGuard<K> {
        let (claim, lock) = self.claim(key);
        KeyGuard { _guard: lock.lock_owned().await, _claim: claim }
    }

    /// The same on a thread that may block.
    pub(crate) fn blocking_lock(&self, key: &K) -> KeyGuard<K> {
        let (claim, lock) = self.claim(key);
        KeyGuard { _guard: lock.blocking_lock_owned(), _claim: claim }
    }

    /// The lock of a key, if it is free.
    pub(crate) fn try_lock(&self, key: &K) -> Option<KeyGuard<K>> {
        let (claim, lock) = self.claim(key);
        Some(KeyGuard { _guard: lock.try_lock_owned().ok()?, _claim: claim })
    }

    fn claim(&self, key: &K) -> (Claim<K>, Arc<tokio::sync::Mutex<()>>) {
        let lock = Arc::clone(self.locks.lock().entry(key.clone()).or_default());
        let locks = Arc::clone(&self.locks);
        (Claim { locks, key: key.clone(), lock: Some(Arc::clone(&lock)) }, lock)
    }
}

impl<K: Eq + Hash> Default for KeyedLock<K> {
    fn default() -> Self {
        Self { locks: Arc::default() }
    }
}

impl<K: Eq + Hash> Clone for KeyedLock<K> {
    fn clone(&self) -> Self {
        Self { locks: Arc::clone(&self.locks) }
    }
}

impl<K: Eq + Hash> Drop for Claim<K> {
    fn drop(&mut self) {
        let mut locks = self.locks.lock();
        drop(self.lock.take());
        // New claims are made under the same lock of the map: one reference means that no other
        // caller has one.
        if locks.get(&self.key).is_some_and(|lock| Arc::strong_count(lock) == 1) {
            locks.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::KeyedLock;

    fn keys(locks: &KeyedLock<&'static str>) -> usize {
        locks.locks.lock().len()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn one_caller_at_a_time_has_a_key() {
        let locks = KeyedLock::<&str>::default();
        let (inside, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let callers: Vec<_> = (0..20)
            .map(|number| {
                let (locks, inside, most) = (locks.clone(), Arc::clone(&inside), Arc::clone(&most));
                tokio::spawn(async move {
                    let _guard = match number % 2 {
                        0 => locks.lock(&"a").await,
                        _ => {
                            let locks = locks.clone();
                            let lock = move || locks.blocking_lock(&"a");
                            tokio::task::spawn_blocking(lock).await.unwrap()
                        }
                    };
                    most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                })
            })
            .collect();
        for caller in callers {
            caller.await.unwrap();
        }
        assert_eq!(most.load(Ordering::SeqCst), 1);
        assert_eq!(keys(&locks), 0, "no key is kept");
    }

    #[tokio::test]
    async fn keys_do_not_wait_for_each_other() {
        let locks = KeyedLock::default();
        let first = locks.lock(&"a").await;
        let second = locks.lock(&"b").await;
        assert_eq!(keys(&locks), 2);
        assert!(locks.try_lock(&"a").is_none() && locks.try_lock(&"c").is_some());
        assert_eq!(keys(&locks), 2, "an attempt leaves nothing");
        drop((first, second));
        assert_eq!(keys(&locks), 0);
    }

    #[tokio::test]
    async fn who_gives_up_waiting_leaves_nothing() {
        let locks = KeyedLock::default();
        let held = locks.lock(&"a").await;
        let waiting = tokio::time::timeout(Duration::from_millis(10), locks.lock(&"a")).await;
        assert!(waiting.is_err(), "it is held");
        assert_eq!(keys(&locks), 1);
        drop(held);
        assert_eq!(keys(&locks), 0);
        drop(locks.lock(&"a").await);
        // The other way round: the holder goes first, then the one who waited no longer.
        let held = locks.lock(&"a").await;
        let waiting = locks.lock(&"a");
        let mut waiting = Box::pin(waiting);
        assert!(futures_util::poll!(&mut waiting).is_pending());
        drop(held);
        drop(waiting);
        assert_eq!(keys(&locks), 0);
    }
}
