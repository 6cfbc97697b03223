//! Counters of requests, for `/metrics`.
//!
//! Counted in memory since the start. Labels are bounded: fronts and classes of statuses are listed here, error codes are
//! those of the sources, and never more than [`CODES`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::Response;
use parking_lot::Mutex;

use crate::api::App;
use crate::audit::{AnsweredCode, is_vercel};

/// How many error codes are counted apart.
const CODES: usize = 300;
/// Upper bounds of how long requests take until their answer begins, in milliseconds.
pub(crate) const BOUNDS: [u64; 10] = [1, 5, 25, 100, 250, 1_000, 5_000, 30_000, 60_000, 300_000];
pub(crate) const FRONTS: [&str; 3] = ["api", "vercel", "gateway"];
pub(crate) const CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

/// In the extensions of an answer: it came from a port of a sandbox, or says why none could be reached.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ViaGateway;

/// The counters.
#[derive(Debug, Default)]
pub(crate) struct HttpMeters {
    /// By front and class.
    requests: [[AtomicU64; CLASSES.len()]; FRONTS.len()],
    under_way: AtomicU64,
    /// By front: counts for each bound and beyond, and the sum in microseconds.
    took: [([AtomicU64; BOUNDS.len() + 1], AtomicU64); FRONTS.len()],
    errors: Mutex<BTreeMap<Arc<str>, u64>>,
    pub(crate) handshakes_failed: AtomicU64,
}

impl HttpMeters {
    fn count(&self, front: usize, status: u16, took: Duration, code: Option<Arc<str>>) {
        let class = usize::from(status / 100).clamp(1, CLASSES.len()) - 1;
        self.requests[front][class].fetch_add(1, Ordering::Relaxed);
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let (buckets, sum) = &self.took[front];
        let bucket = BOUNDS.iter().position(|bound| us <= bound.saturating_mul(1000));
        buckets[bucket.unwrap_or(BOUNDS.len())].fetch_add(1, Ordering::Relaxed);
        sum.fetch_add(us, Ordering::Relaxed);
        let Some(code) = code else { return };
        let mut errors = self.errors.lock();
        let known = errors.len() < CODES || errors.contains_key(&code);
        *errors.entry(if known { code } else { "other".into() }).or_default() += 1;
    }

    pub(crate) fn requests(&self, front: usize, class: usize) -> u64 {
        self.requests[front][class].load(Ordering::Relaxed)
    }

    pub(crate) fn under_way(&self) -> u64 {
        self.under_way.load(Ordering::Relaxed)
    }

    /// Cumulative counts for [`BOUNDS`], the number of all, and their sum in microseconds.
    pub(crate) fn took(&self, front: usize) -> (Vec<u64>, u64, u64) {
        let (buckets, sum) = &self.took[front];
        let mut count = 0;
        let mut all: Vec<u64> = Vec::with_capacity(BOUNDS.len());
        for bucket in &buckets[..BOUNDS.len()] {
            count += bucket.load(Ordering::Relaxed);
            all.push(count);
        }
        count += buckets[BOUNDS.len()].load(Ordering::Relaxed);
        (all, count, sum.load(Ordering::Relaxed))
    }

    pub(crate) fn errors(&self) -> BTreeMap<Arc<str>, u64> {
        self.errors.lock().clone()
    }
}

/// Counts down when a request is answered, or its caller has left.
struct UnderWay<'a>(&'a AtomicU64);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Answers a request, and counts it.
pub(crate) async fn count(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let begun = Instant::now();
    let vercel = request
        .extensions()
        .get::<MatchedPath>()
        .is_some_and(|pattern| is_vercel(pattern.as_str()));
    app.http.under_way.fetch_add(1, Ordering::Relaxed);
    let under_way = UnderWay(&app.http.under_way);
    let response = next.run(request).await;
    drop(under_way);
    let front = match response.extensions().get::<ViaGateway>() {
        Some(ViaGateway) => 2,
        None => usize::from(vercel),
    };
    let code = response.extensions().get::<AnsweredCode>().map(|code| Arc::clone(&code.0));
    app.http.count(front, response.status().as_u16(), begun.elapsed(), code);
    response
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{CODES, HttpMeters};

    #[test]
    fn codes_are_bounded() {
        let meters = HttpMeters::default();
        for number in 0..CODES + 50 {
            meters.count(0, 400, Duration::ZERO, Some(format!("code_{number}").into()));
        }
        let errors = meters.errors();
        assert_eq!(errors.len(), CODES + 1);
        assert_eq!(errors.get("other"), Some(&50));
        assert_eq!(meters.requests(0, 3), 350);
    }

    #[test]
    fn odd_statuses_have_a_class() {
        let meters = HttpMeters::default();
        meters.count(1, 999, Duration::from_millis(3), None);
        assert_eq!(meters.requests(1, 4), 1);
        let (buckets, count, sum) = meters.took(1);
        assert_eq!((buckets[0], buckets[1], count, sum), (0, 1, 1, 3000));
    }
}
