//! Percentiles, and the table they are printed in.

use std::io::Write as _;
use std::time::Duration;

use sandkeep_testkit::bench::{Row, Run};

/// What times are compared with that have no yardstick of their own.
pub(crate) const BARE: &str = "(bare) clone + overlay + pivot_root + exec";

#[derive(Default)]
pub(crate) struct Table {
    run: Run,
    notes: Vec<String>,
}

impl Table {
    /// Adds a row of times. What is in brackets is a yardstick, all else is compared with [`BARE`].
    pub(crate) fn add(&mut self, what: &str, times: &[Duration]) {
        let yardstick = (!what.starts_with('(')).then(|| BARE.to_owned());
        self.add_beside(what, times, yardstick);
    }

    /// Adds a row of times with what the bare yardstick took between its rounds.
    pub(crate) fn add_with(&mut self, what: &str, times: &[Duration], bare: &[Duration]) {
        self.add(what, times);
        if let Some(row) = self.run.rows.last_mut().filter(|_| !bare.is_empty()) {
            row.beside = Some(rounded(percentile(bare, 0.50)));
        }
    }

    /// Adds a row of times with a yardstick of its own.
    pub(crate) fn add_beside(&mut self, what: &str, times: &[Duration], yardstick: Option<String>) {
        let at = |share: f64| rounded(percentile(times, share));
        let [p50, p95, p99] = [0.50, 0.95, 0.99].map(at);
        let (operation, unit) = (what.to_owned(), "ms".to_owned());
        self.run.rows.push(Row {
            operation,
            unit,
            n: times.len(),
            p50,
            p95,
            p99,
            yardstick,
            beside: None,
        });
        let _ = writeln!(std::io::stderr(), "{what}: p50 {p50:.2} ms");
    }

    /// Adds a row of times before all others.
    pub(crate) fn add_first(&mut self, what: &str, times: &[Duration]) {
        self.add(what, times);
        self.run.rows.rotate_right(1);
    }

    /// Adds a row of memory, which is compared with nothing else.
    pub(crate) fn add_memory(&mut self, what: &str, megabytes: f64) {
        let (operation, unit) = (what.to_owned(), "MB".to_owned());
        let [p50, p95, p99] = [rounded(megabytes); 3];
        self.run.rows.push(Row {
            operation,
            unit,
            n: 1,
            p50,
            p95,
            p99,
            yardstick: None,
            beside: None,
        });
    }

    pub(crate) fn note(&mut self, text: &str) {
        self.notes.push(text.to_owned());
    }

    /// The median of a row.
    pub(crate) fn median(&self, what: &str) -> Option<f64> {
        self.run.rows.iter().find(|row| row.operation == what).map(|row| row.p50)
    }

    pub(crate) fn run(&self) -> &Run {
        &self.run
    }

    pub(crate) fn print(&self) {
        let mut out = std::io::stdout().lock();
        let _ = writeln!(
            out,
            "| operation | n | p50 ms | p95 ms | p99 ms | yardstick ms | × yardstick |\n|---|---|---|---|---|---|---|"
        );
        for row in self.run.rows.iter().filter(|row| row.unit == "ms") {
            let Row { operation, n, p50, p95, p99, yardstick, .. } = row;
            let ratio = yardstick.as_ref().and_then(|_| self.run.measure(row));
            let ratio = ratio.map_or_else(
                || "| ".to_owned(),
                |ratio| format!("{:.2} | {ratio:.1} ", p50 / ratio),
            );
            let _ =
                writeln!(out, "| {operation} | {n} | {p50:.2} | {p95:.2} | {p99:.2} | {ratio}|");
        }
        let _ = writeln!(out);
        for note in &self.notes {
            let _ = writeln!(out, "- {note}");
        }
    }
}

/// The time that this share of all does not exceed, in milliseconds.
pub(crate) fn percentile(times: &[Duration], share: f64) -> f64 {
    let mut millis: Vec<f64> = times.iter().copied().map(millis).collect();
    millis.sort_by(f64::total_cmp);
    let place = (millis.len() as f64 * share).ceil() as usize;
    millis.get(place.clamp(1, millis.len().max(1)) - 1).copied().unwrap_or(f64::NAN)
}

pub(crate) fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// As it is printed, so that the record says no more than the table.
fn rounded(number: f64) -> f64 {
    (number * 100.0).round() / 100.0
}
