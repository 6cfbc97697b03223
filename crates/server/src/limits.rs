//! Limits on what a caller may send: how much, how fast and how long.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use parking_lot::Mutex;
use sandkeep_core::model::KeyId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;

/// What callers may do to the server. The defaults stop accidents, not work.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Requests a second that one key may make for long.
    pub requests_per_second: f64,
    /// How many it may make at once before that counts.
    pub burst: f64,
    /// The largest JSON body, in bytes.
    pub json_bytes: usize,
    /// How long a request may take that is not a stream.
    pub request_timeout: Duration,
    /// How long an upload may pause between two pieces.
    pub upload_pause: Duration,
    /// How long a stream may be silent before something is sent to keep it.
    pub keep_alive: Duration,
    /// How long a process may take to read the input of one request before the caller is asked to
    /// send the rest again.
    pub input_patience: Duration,
    /// How long requests under way may take to finish when the server goes down.
    pub drain: Duration,
    /// How many TCP connections there may be; never more than half of the process's descriptors.
    pub connections: usize,
    /// How many of them from one address, or one /64 network of IPv6.
    pub connections_per_address: usize,
    /// How many connections may use one key.
    pub connections_per_key: usize,
    /// How long a new connection may take to send its first request's headers.
    pub first_request: Duration,
    /// How many requests of one key may measure disk space at once.
    pub measurements_per_key: usize,
    /// How many exports of snapshots one key may have in progress.
    pub exports_per_key: usize,
    /// How many comparisons and merges of one project may be in progress: one runs, the others wait.
    pub comparisons_per_project: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            requests_per_second: 2000.0,
            burst: 4000.0,
            json_bytes: 1 << 20,
            request_timeout: Duration::from_secs(900),
            upload_pause: Duration::from_secs(120),
            keep_alive: Duration::from_secs(15),
            input_patience: Duration::from_secs(10),
            drain: Duration::from_secs(10),
            connections: 8192,
            connections_per_address: 2048,
            connections_per_key: 2048,
            first_request: Duration::from_secs(10),
            measurements_per_key: 4,
            exports_per_key: 2,
            comparisons_per_project: 8,
        }
    }
}

/// Buckets of tokens, one for each key. A request takes one; they fill up again with time.
#[derive(Debug)]
pub(crate) struct RateLimiter {
    per_second: f64,
    burst: f64,
    buckets: Mutex<HashMap<KeyId, Bucket>>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    tokens: f64,
    filled: Instant,
}

/// Beyond this many keys, those with a full bucket are forgotten.
const MANY_KEYS: usize = 10_000;

impl RateLimiter {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self {
            per_second: limits.requests_per_second.max(0.001),
            burst: limits.burst.max(1.0),
            buckets: Mutex::default(),
        }
    }

    /// Takes a token, or says how many seconds it takes until there is one.
    pub(crate) fn take(&self, key: &KeyId, now: Instant) -> Result<(), u64> {
        let mut buckets = self.buckets.lock();
        if buckets.len() > MANY_KEYS {
            buckets.retain(|_, bucket| self.level(*bucket, now) < self.burst);
        }
        if let Some(bucket) = buckets.get_mut(key) {
            let tokens = self.level(*bucket, now);
            if tokens < 1.0 {
                return Err(((1.0 - tokens) / self.per_second).ceil().max(1.0) as u64);
            }
            *bucket = Bucket { tokens: tokens - 1.0, filled: now };
        } else {
            buckets.insert(key.clone(), Bucket { tokens: self.burst - 1.0, filled: now });
        }
        Ok(())
    }

    fn level(&self, bucket: Bucket, now: Instant) -> f64 {
        let waited = now.saturating_duration_since(bucket.filled).as_secs_f64();
        (bucket.tokens + waited * self.per_second).min(self.burst)
    }
}

/// Requests of one sort that are under way, by key or by project.
#[derive(Debug, Clone)]
pub(crate) struct RequestsPer<K: Eq + Hash>(Arc<Mutex<HashMap<K, Requests>>>);

impl<K: Eq + Hash> Default for RequestsPer<K> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

#[derive(Debug)]
struct Requests {
    count: usize,
    /// Where those wait that go one by one.
    turn: Arc<Semaphore>,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(crate) struct RequestPermit<K: Eq + Hash> {
    turn: Option<OwnedSemaphorePermit>,
    all: RequestsPer<K>,
    key: K,
}

impl<K: Eq + Hash + Clone> RequestsPer<K> {
    /// Begins one, unless as many as `most` are under way.
    pub(crate) fn enter(&self, key: &K, most: usize) -> Result<RequestPermit<K>, ApiError> {
        Ok(self.begin(key, most)?.0)
    }

    /// The same, where one runs at a time and the others wait, but not for longer than `patience`.
    pub(crate) async fn enter_in_turn(
        &self,
        key: &K,
        most: usize,
        patience: Duration,
    ) -> Result<RequestPermit<K>, ApiError> {
        let (mut permit, turn) = self.begin(key, most)?;
        match tokio::time::timeout(patience, turn.acquire_owned()).await {
            Ok(turn) => permit.turn = turn.ok(),
            Err(_) => return Err(too_many("others like it are still in progress")),
        }
        Ok(permit)
    }

    fn begin(&self, key: &K, most: usize) -> Result<(RequestPermit<K>, Arc<Semaphore>), ApiError> {
        let mut all = self.0.lock();
        let requests = all.entry(key.clone()).or_insert_with(Requests::new);
        if requests.count >= most {
            return Err(too_many(format!("{most} such requests are in progress already")));
        }
        requests.count += 1;
        let permit = RequestPermit { turn: None, all: Self(Arc::clone(&self.0)), key: key.clone() };
        Ok((permit, Arc::clone(&requests.turn)))
    }
}

fn too_many(message: impl Into<String>) -> ApiError {
    ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too_many_concurrent_requests", message)
        .hint("wait for their responses")
        .retry_after(1)
}

impl Requests {
    fn new() -> Self {
        Self { count: 0, turn: Arc::new(Semaphore::new(1)) }
    }
}

impl<K: Eq + Hash> Drop for RequestPermit<K> {
    fn drop(&mut self) {
        // The next one has its turn before this one is forgotten: a caller that comes then finds
        // it.
        drop(self.turn.take());
        let mut all = self.all.0.lock();
        if let Some(requests) = all.get_mut(&self.key) {
            requests.count -= 1;
            if requests.count == 0 {
                all.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use sandkeep_core::model::KeyId;

    use super::{Limits, RateLimiter, RequestsPer};

    #[test]
    fn a_key_has_so_many_under_way() {
        let (all, key, other) = (RequestsPer::<KeyId>::default(), KeyId::fresh(), KeyId::fresh());
        let first = all.enter(&key, 2).expect("room");
        let _second = all.enter(&key, 2).expect("room");
        assert_eq!(all.enter(&key, 2).expect_err("too many").status(), 429);
        let _other = all.enter(&other, 2).expect("one key does not hold up another");
        drop(first);
        all.enter(&key, 2).expect("room again");
    }

    #[tokio::test]
    async fn of_those_that_go_one_by_one_the_others_wait() {
        let (all, key, other) = (RequestsPer::<KeyId>::default(), KeyId::fresh(), KeyId::fresh());
        let (soon, later) = (Duration::from_millis(20), Duration::from_secs(20));
        let first = all.enter_in_turn(&key, 3, later).await.expect("its turn");
        let _other = all.enter_in_turn(&other, 3, soon).await.expect("one key waits for no other");
        let late = all.enter_in_turn(&key, 3, soon).await.expect_err("not its turn");
        assert_eq!((late.status().as_u16(), late.retry_seconds()), (429, Some(1)));
        let waits = tokio::spawn({
            let (all, key) = (all.clone(), key.clone());
            async move { all.enter_in_turn(&key, 3, later).await }
        });
        while all.0.lock()[&key].count < 2 {
            tokio::task::yield_now().await;
        }
        let _third = all.begin(&key, 3).expect("room to wait");
        let fourth = all.enter_in_turn(&key, 3, later).await.expect_err("too many");
        assert_eq!(fourth.status(), 429);
        drop(first);
        waits.await.expect("no panic").expect("its turn now");
    }

    #[test]
    fn a_burst_then_a_pace() {
        let limits = Limits { requests_per_second: 2.0, burst: 3.0, ..Limits::default() };
        let limiter = RateLimiter::new(&limits);
        let (key, other, start) = (KeyId::fresh(), KeyId::fresh(), Instant::now());
        for _ in 0..3 {
            assert_eq!(limiter.take(&key, start), Ok(()));
        }
        assert_eq!(limiter.take(&key, start), Err(1));
        assert_eq!(limiter.take(&other, start), Ok(()), "one key does not slow another");
        assert_eq!(limiter.take(&key, start + Duration::from_millis(500)), Ok(()));
        assert_eq!(limiter.take(&key, start + Duration::from_millis(500)), Err(1));
        let rested = start + Duration::from_secs(60);
        for _ in 0..3 {
            assert_eq!(limiter.take(&key, rested), Ok(()));
        }
        assert_eq!(limiter.take(&key, rested), Err(1), "rest fills a bucket no further than full");
    }
}
