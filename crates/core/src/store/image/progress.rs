//! Progress reports of long operations.

use std::fmt;
use std::sync::Arc;

/// One report of a long operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// What is being done, for people; it also distinguishes several bars.
    pub what: String,
    /// How much is done: bytes, or files where `total` is absent.
    pub done: u64,
    /// How much there is, where that is known.
    pub total: Option<u64>,
}

/// Receives progress reports. Called from several threads, and must not block.
#[derive(Clone)]
pub struct Reporter(Arc<dyn Fn(Progress) + Send + Sync>);

impl Reporter {
    /// Reports to the function `hear`.
    pub fn new(hear: impl Fn(Progress) + Send + Sync + 'static) -> Self {
        Self(Arc::new(hear))
    }

    /// Discards all reports.
    #[must_use]
    pub fn silent() -> Self {
        Self::new(|_| {})
    }

    pub(super) fn say(&self, what: &str, done: u64, total: Option<u64>) {
        (self.0)(Progress { what: what.to_owned(), done, total });
    }
}

impl fmt::Debug for Reporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reporter")
    }
}
