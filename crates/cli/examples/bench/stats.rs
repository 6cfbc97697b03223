//! Percentiles, and the table they are printed in.

use std::io::Write as _;
use std::time::Duration;

#[derive(Default)]
pub(crate) struct Table {
    rows: Vec<(String, usize, [f64; 3])>,
    notes: Vec<String>,
}

impl Table {
    pub(crate) fn add(&mut self, what: &str, times: &[Duration]) {
        let at = |share: f64| percentile(times, share);
        self.rows.push((what.to_owned(), times.len(), [at(0.50), at(0.95), at(0.99)]));
        let _ = writeln!(std::io::stderr(), "{what}: p50 {:.2} ms", at(0.50));
    }

    pub(crate) fn note(&mut self, text: &str) {
        self.notes.push(text.to_owned());
    }

    pub(crate) fn print(&self) {
        let mut out = std::io::stdout().lock();
        let _ =
            writeln!(out, "| operation | n | p50 ms | p95 ms | p99 ms |\n|---|---|---|---|---|");
        for (what, count, [p50, p95, p99]) in &self.rows {
            let _ = writeln!(out, "| {what} | {count} | {p50:.2} | {p95:.2} | {p99:.2} |");
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
