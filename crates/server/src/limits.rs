//! How much a caller may send, how fast and how long.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use parking_lot::Mutex;
use sandkeep_core::model::KeyId;

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
    /// How long a stream may be silent before something is said to keep it.
    pub keep_alive: Duration,
    /// How long a process may take to read the input of one request before the caller is told to send
    /// the rest again.
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

/// Past so many keys, those with a full bucket are forgotten.
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

/// Requests of one sort that are under way, by key.
#[derive(Debug, Default)]
pub(crate) struct PerKey(Mutex<HashMap<KeyId, usize>>);

/// One of them, until it is dropped.
#[derive(Debug)]
pub(crate) struct PerKeyPermit<'a> {
    all: &'a PerKey,
    key: KeyId,
}

impl PerKey {
    /// Begins one, unless the key has `most` under way.
    pub(crate) fn enter(&self, key: &KeyId, most: usize) -> Result<PerKeyPermit<'_>, ApiError> {
        let mut all = self.0.lock();
        let count = all.entry(key.clone()).or_default();
        if *count >= most {
            return Err(ApiError::new(
                StatusCode::TOO_MANY_REQUESTS,
                "too_many_concurrent_requests",
                format!("this key has {most} such requests in progress"),
            )
            .hint("wait for their responses")
            .retry_after(1));
        }
        *count += 1;
        Ok(PerKeyPermit { all: self, key: key.clone() })
    }
}

impl Drop for PerKeyPermit<'_> {
    fn drop(&mut self) {
        let mut all = self.all.0.lock();
        if let Some(count) = all.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use sandkeep_core::model::KeyId;

    use super::{Limits, PerKey, RateLimiter};

    #[test]
    fn a_key_has_so_many_under_way() {
        let (all, key, other) = (PerKey::default(), KeyId::fresh(), KeyId::fresh());
        let first = all.enter(&key, 2).expect("room");
        let _second = all.enter(&key, 2).expect("room");
        assert_eq!(all.enter(&key, 2).expect_err("too many").status(), 429);
        let _other = all.enter(&other, 2).expect("one key does not hold up another");
        drop(first);
        all.enter(&key, 2).expect("room again");
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
