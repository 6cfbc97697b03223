//! A recorded run of the benchmark, and the comparison of another run with it.
//!
//! Machines differ, and one machine is not always equally fast. So a row of times is compared by its ratio to a *yardstick* that was
//! measured in the same run: a regression is a ratio that has grown by more than [`TOLERANCE`]. A row without a yardstick (memory) is
//! compared by its value. The median is what counts; tails depend on what else the machine does.

use std::fmt;

use serde::{Deserialize, Serialize};

/// By how much a ratio may grow.
pub const TOLERANCE: f64 = 0.25;

/// A run of the benchmark.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// When and where it was made, for people.
    #[serde(default)]
    pub about: String,
    /// What was measured, in the order of the table.
    pub rows: Vec<Row>,
}

/// What was measured about one operation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What was done. Yardsticks are in brackets.
    pub operation: String,
    /// `ms` or `MB`.
    pub unit: String,
    /// How often.
    pub n: usize,
    /// The median.
    pub p50: f64,
    /// What 95 of a hundred did not exceed.
    pub p95: f64,
    /// What 99 of a hundred did not exceed.
    pub p99: f64,
    /// The row that this one is compared with, of the same run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub yardstick: Option<String>,
    /// The yardstick's median between the rounds of this very row, where it was measured there: a
    /// machine is not equally fast all through a run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside: Option<f64>,
}

/// How a row compares with the recorded one.
#[derive(Debug, Clone, PartialEq)]
pub struct Compared {
    /// What was done.
    pub operation: String,
    /// The ratio to the yardstick that is on record; a value where there is none.
    pub before: f64,
    /// That of this run. `None`: it was not measured.
    pub now: Option<f64>,
}

impl Compared {
    /// How much more it is than what is on record: 0.1 is ten per cent more.
    #[must_use]
    pub fn growth(&self) -> Option<f64> {
        self.now.map(|now| now / self.before - 1.0)
    }

    /// Whether it is too much more, or cannot be judged.
    #[must_use]
    pub fn is_regression(&self) -> bool {
        self.growth().is_none_or(|growth| !growth.is_finite() || growth > TOLERANCE)
    }
}

impl fmt::Display for Compared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operation, before, now } = self;
        let verdict = if self.is_regression() { "REGRESSION" } else { "" };
        match (now, self.growth()) {
            (Some(now), Some(growth)) => {
                let percent = growth * 100.0;
                write!(f, "| {operation} | {before:.2} | {now:.2} | {percent:+.0} % | {verdict} |")
            }
            _ => write!(f, "| {operation} | {before:.2} | not measured | | {verdict} |"),
        }
    }
}

impl Run {
    fn row(&self, operation: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.operation == operation)
    }

    /// A row's ratio to its yardstick, or its value if it has none. `None` when the yardstick was not measured.
    #[must_use]
    pub fn measure(&self, row: &Row) -> Option<f64> {
        match (&row.yardstick, row.beside) {
            (Some(_), Some(beside)) => Some(row.p50 / beside),
            (Some(yardstick), None) => Some(row.p50 / self.row(yardstick)?.p50),
            (None, _) => Some(row.p50),
        }
    }

    /// Compares all rows on record, yardsticks apart, with those of this run.
    #[must_use]
    pub fn compare(&self, recorded: &Self) -> Vec<Compared> {
        let ours = recorded.rows.iter().filter(|row| !row.operation.starts_with('('));
        let compared = ours.filter_map(|row| {
            let now = self.row(&row.operation).and_then(|now| {
                // What it is compared with is part of what is on record.
                self.measure(&Row { yardstick: row.yardstick.clone(), ..now.clone() })
            });
            Some(Compared { operation: row.operation.clone(), before: recorded.measure(row)?, now })
        });
        compared.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::{Compared, Row, Run};

    fn row(operation: &str, p50: f64, yardstick: Option<&str>) -> Row {
        let yardstick = yardstick.map(str::to_owned);
        let (operation, unit) = (operation.to_owned(), "ms".to_owned());
        Row { operation, unit, n: 5, p50, p95: p50 * 2.0, p99: p50 * 9.0, yardstick, beside: None }
    }

    fn run(bare: f64, create: f64, upload: f64, memory: f64) -> Run {
        Run {
            about: String::new(),
            rows: vec![
                row("(bare)", bare, None),
                row("(tar)", 100.0, None),
                row("create", create, Some("(bare)")),
                row("upload", upload, Some("(tar)")),
                row("memory", memory, None),
            ],
        }
    }

    fn regressions(now: &Run, before: &Run) -> Vec<String> {
        let compared = now.compare(before);
        compared.into_iter().filter(Compared::is_regression).map(|one| one.operation).collect()
    }

    #[test]
    fn a_machine_that_is_slower_as_a_whole_is_no_regression() {
        let before = run(2.0, 8.0, 150.0, 50.0);
        assert!(regressions(&before, &before).is_empty());
        assert!(regressions(&run(6.0, 24.0, 150.0, 50.0), &before).is_empty());
    }

    #[test]
    fn a_ratio_that_grew_by_more_than_a_quarter_is_one() {
        let before = run(2.0, 8.0, 150.0, 50.0);
        assert!(regressions(&run(2.0, 9.9, 150.0, 50.0), &before).is_empty());
        assert_eq!(regressions(&run(2.0, 10.1, 150.0, 50.0), &before), ["create"]);
        // As fast as before on a machine that is twice as fast.
        assert_eq!(regressions(&run(1.0, 8.0, 150.0, 50.0), &before), ["create"]);
        // Against a yardstick of its own.
        assert_eq!(regressions(&run(2.0, 8.0, 200.0, 50.0), &before), ["upload"]);
        assert_eq!(regressions(&run(9.0, 8.0, 150.0, 70.0), &before), ["memory"]);
    }

    #[test]
    fn what_was_not_measured_is_told_and_no_yardstick_is_judged() {
        let before = run(2.0, 8.0, 150.0, 50.0);
        let mut now = before.clone();
        now.rows.retain(|row| row.operation != "create" && row.operation != "(tar)");
        assert_eq!(regressions(&now, &before), ["create", "upload"]);
        let told: Vec<_> = now.compare(&before).iter().map(ToString::to_string).collect();
        assert_eq!(told[0], "| create | 4.00 | not measured | | REGRESSION |");
        assert_eq!(told[2], "| memory | 50.00 | 50.00 | +0 % |  |");
        assert_eq!(told.len(), 3);
        // A row that is new has nothing to be compared with.
        now.rows.push(row("new", 1.0, None));
        assert_eq!(now.compare(&before).len(), 3);
    }

    #[test]
    fn a_record_reads_as_it_was_written() {
        let run = run(2.0, 8.0, 150.0, 50.0);
        let text = serde_json::to_string_pretty(&run).expect("JSON");
        assert_eq!(serde_json::from_str::<Run>(&text).expect("a run"), run);
    }

    /// The record that `./dev bench --compare` goes by.
    #[test]
    fn the_record_in_the_tree_can_be_compared_with() {
        let text = include_str!("../../../docs/benchmarks.json");
        let run: Run = serde_json::from_str(text).expect("a run");
        let compared = run.compare(&run);
        assert!(compared.len() > 10, "{compared:?}");
        assert!(compared.iter().all(|one| !one.is_regression()), "{compared:?}");
    }
}
