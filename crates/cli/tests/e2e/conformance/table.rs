//! The table of tested versions in `docs/compat/vercel.md`: every suite holds its own row to it.

use std::fs;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use serde_json::Value;

/// The result of a suite.
#[derive(Debug)]
pub(super) struct Row {
    /// What was tested, as its first cell has it.
    what: String,
    version: String,
    passed: u64,
    /// Cases that this version cannot run, and why.
    skipped: Vec<String>,
}

impl Row {
    /// Adds up what the runs of a suite reported, a line each.
    pub(super) fn of(what: String, results: &str) -> Self {
        let mut row = Self { what, version: String::new(), passed: 0, skipped: Vec::new() };
        for line in results.lines() {
            let told: Value = serde_json::from_str(line).unwrap();
            row.version = told["version"].as_str().unwrap_or_default().to_owned();
            row.passed += told["passed"].as_u64().unwrap();
            let skipped = told["skipped"].as_array().unwrap();
            row.skipped.extend(skipped.iter().map(|name| name.as_str().unwrap().to_owned()));
        }
        assert_ne!(row.passed, 0, "nothing was tested: {results}");
        row
    }

    /// Compares the row with the page, or writes it there.
    pub(super) fn check(&self) {
        let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/compat/vercel.md");
        // Suites run side by side, in processes of their own under some runners.
        let lock = fs::File::open(&page).unwrap();
        flock(&lock, FlockOperation::LockExclusive).unwrap();
        let text = fs::read_to_string(&page).unwrap();
        let wanted = self.line();
        let found = text.lines().find(|line| self.is_about(line));
        if found == Some(wanted.as_str()) {
            return;
        }
        let said = found.unwrap_or("nothing");
        assert!(
            std::env::var_os("UPDATE_VERCEL_TABLE").is_some(),
            "{} says\n  {said}\nand this run\n  {wanted}\nwith these not asked:\n  {}\n\
             UPDATE_VERCEL_TABLE=1 writes it anew",
            page.display(),
            self.skipped.join("\n  "),
        );
        let rows = text.lines().map(|line| if self.is_about(line) { &wanted } else { line });
        fs::write(&page, rows.flat_map(|row| [row, "\n"]).collect::<String>()).unwrap();
    }

    fn line(&self) -> String {
        let Self { what, version, passed, skipped } = self;
        format!("| {what} | {version} | {passed} | {} |", skipped.len())
    }

    /// Whether a line of the page is this row, whatever it says.
    fn is_about(&self, line: &str) -> bool {
        line.split(" | ").next() == Some(&format!("| {}", self.what))
    }
}
