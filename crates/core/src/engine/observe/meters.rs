//! What operations took, in histograms, and what sandboxes sent and received: for `/metrics`.
//!
//! Everything is counted in memory, since the start of the daemon, without locks. The label sets are fixed: operations,
//! drivers and outcomes are known here, so nothing that a caller does makes another series.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::net::Traffic;

/// The upper bounds of the buckets, in milliseconds; one more bucket has all the rest.
const BOUNDS: [u64; 16] =
    [1, 2, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 300_000];
const DRIVERS: [&str; 3] = ["container", "microvm", "other"];
const OUTCOMES: [&str; 2] = ["ok", "error"];

/// What is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum Operation {
    /// A sandbox is made, and started if that was asked for.
    Create,
    /// A session begins: from its turn until commands are taken.
    Start,
    /// A session ends: from its turn until its snapshot is on stable storage.
    Stop,
    /// A session ends with its memory kept.
    Pause,
    /// A command is begun in a sandbox, which is woken first if need be.
    Exec,
    /// Sandboxes are made from another one.
    Fork,
    /// A snapshot is taken without ending the session.
    Checkpoint,
}

const OPERATIONS: [(Operation, &str); 7] = [
    (Operation::Create, "create"),
    (Operation::Start, "start"),
    (Operation::Stop, "stop"),
    (Operation::Pause, "pause"),
    (Operation::Exec, "exec"),
    (Operation::Fork, "fork"),
    (Operation::Checkpoint, "checkpoint"),
];

/// The figures.
#[derive(Debug, Default)]
pub(in crate::engine) struct Meters {
    latencies: [[[Histogram; OUTCOMES.len()]; DRIVERS.len()]; OPERATIONS.len()],
    received: AtomicU64,
    sent: AtomicU64,
}

#[derive(Debug, Default)]
struct Histogram {
    /// How many came into each bucket, and into no earlier one.
    buckets: [AtomicU64; BOUNDS.len() + 1],
    sum_us: AtomicU64,
}

/// One histogram.
#[derive(Debug, Clone, PartialEq)]
pub struct Latency {
    /// What was timed: `create`, `start`, `stop`, `pause`, `exec`, `fork`, `checkpoint`.
    pub operation: &'static str,
    /// The driver of the sandbox: `container`, `microvm`, or `other`, also where it was not known.
    pub driver: &'static str,
    /// `ok` or `error`.
    pub outcome: &'static str,
    /// For each upper bound, in seconds, how many took no longer.
    pub buckets: Vec<(f64, u64)>,
    /// How many there were.
    pub count: u64,
    /// How long all took together, in seconds.
    pub sum: f64,
}

impl Meters {
    /// Begins to time an operation. Dropped without [`Timing::ok`], it failed.
    pub(in crate::engine) fn time(&self, operation: Operation, driver: &str) -> Timing<'_> {
        Timing { meters: self, operation, driver: place(driver), begun: Instant::now(), ok: false }
    }

    /// Adds what a session that is over sent and received.
    pub(in crate::engine) fn count(&self, traffic: Traffic) {
        self.received.fetch_add(traffic.received, Ordering::Relaxed);
        self.sent.fetch_add(traffic.sent, Ordering::Relaxed);
    }

    /// What sessions that are over sent and received.
    pub(in crate::engine) fn traffic(&self) -> Traffic {
        Traffic {
            received: self.received.load(Ordering::Relaxed),
            sent: self.sent.load(Ordering::Relaxed),
        }
    }

    /// All histograms that have something.
    pub(in crate::engine) fn latencies(&self) -> Vec<Latency> {
        let mut found = Vec::new();
        for (index, (_, operation)) in OPERATIONS.iter().enumerate() {
            for (driver, name) in DRIVERS.iter().enumerate() {
                for (outcome, word) in OUTCOMES.iter().enumerate() {
                    let histogram = &self.latencies[index][driver][outcome];
                    found.extend(histogram.read(operation, name, word));
                }
            }
        }
        found
    }
}

impl Histogram {
    fn add(&self, took: Duration) {
        let us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let bucket = BOUNDS.iter().position(|bound| us <= bound.saturating_mul(1000));
        self.buckets[bucket.unwrap_or(BOUNDS.len())].fetch_add(1, Ordering::Relaxed);
        self.sum_us.fetch_add(us, Ordering::Relaxed);
    }

    fn read(
        &self,
        operation: &'static str,
        driver: &'static str,
        outcome: &'static str,
    ) -> Option<Latency> {
        let mut count = 0;
        let mut all = self.buckets.iter().map(|bucket| {
            count += bucket.load(Ordering::Relaxed);
            count
        });
        #[allow(clippy::cast_precision_loss)]
        let seconds = |whole: u64, parts: f64| whole as f64 / parts;
        let mut buckets = Vec::with_capacity(BOUNDS.len());
        for bound in BOUNDS {
            buckets.push((seconds(bound, 1e3), all.next()?));
        }
        all.next();
        let sum = seconds(self.sum_us.load(Ordering::Relaxed), 1e6);
        (count > 0).then_some(Latency { operation, driver, outcome, buckets, count, sum })
    }
}

/// An operation under way.
#[derive(Debug)]
pub(in crate::engine) struct Timing<'a> {
    meters: &'a Meters,
    operation: Operation,
    driver: usize,
    begun: Instant,
    ok: bool,
}

impl Timing<'_> {
    /// The driver became known.
    pub(in crate::engine) fn of(&mut self, driver: &str) {
        self.driver = place(driver);
    }

    /// It succeeded.
    pub(in crate::engine) fn ok(mut self) {
        self.ok = true;
    }
}

impl Drop for Timing<'_> {
    fn drop(&mut self) {
        let index = OPERATIONS.iter().position(|(operation, _)| *operation == self.operation);
        let outcome = usize::from(!self.ok);
        if let Some(index) = index {
            self.meters.latencies[index][self.driver][outcome].add(self.begun.elapsed());
        }
    }
}

fn place(driver: &str) -> usize {
    DRIVERS.iter().position(|name| *name == driver).unwrap_or(DRIVERS.len() - 1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{BOUNDS, Meters, Operation};

    #[test]
    fn each_time_is_in_all_buckets_from_its_own_on() {
        let meters = Meters::default();
        for ms in [0, 3, 3, 700, 4_000_000] {
            meters.latencies[0][0][0].add(Duration::from_millis(ms));
        }
        let all = meters.latencies();
        assert_eq!(all.len(), 1, "others have nothing: {all:?}");
        let one = &all[0];
        assert_eq!((one.operation, one.driver, one.outcome), ("create", "container", "ok"));
        let at = |bound: f64| one.buckets.iter().find(|(it, _)| *it == bound).map(|(_, n)| *n);
        assert_eq!(
            (at(0.001), at(0.002), at(0.005), at(0.5)),
            (Some(1), Some(1), Some(3), Some(3))
        );
        assert_eq!((at(1.0), at(300.0), one.count), (Some(4), Some(4), 5));
        assert!((one.sum - 4000.706).abs() < 1e-9, "{}", one.sum);
        assert_eq!(one.buckets.len(), BOUNDS.len());
    }

    #[test]
    fn what_is_dropped_has_failed() {
        let meters = Meters::default();
        drop(meters.time(Operation::Stop, "microvm"));
        let mut timing = meters.time(Operation::Fork, "somebody's");
        timing.of("container");
        timing.ok();
        let told: Vec<_> =
            meters.latencies().iter().map(|one| (one.operation, one.driver, one.outcome)).collect();
        assert_eq!(told, [("stop", "microvm", "error"), ("fork", "container", "ok")]);
    }
}
