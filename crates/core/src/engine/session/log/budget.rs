//! The disk space that the logs of a sandbox's running commands share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What the logs of a sandbox's running commands may take together. Ended ones are `retention`'s.
#[derive(Debug)]
pub(in crate::engine) struct LogBudget {
    most: u64,
    used: AtomicU64,
}

impl LogBudget {
    /// Room for at least four logs of full length.
    pub(in crate::engine) fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { most: RUNNING.max(limit.saturating_mul(4)), used: AtomicU64::new(0) })
    }

    #[cfg(test)]
    pub(in crate::engine) fn of(most: u64) -> Arc<Self> {
        Arc::new(Self { most, used: AtomicU64::new(0) })
    }

    #[cfg(test)]
    pub(in crate::engine) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }
}

/// What one log takes of a budget, until it is dropped.
#[derive(Debug)]
pub(in crate::engine) struct BudgetShare {
    budget: Arc<LogBudget>,
    own: u64,
}

impl BudgetShare {
    pub(in crate::engine) fn new(budget: &Arc<LogBudget>) -> Self {
        Self { budget: Arc::clone(budget), own: 0 }
    }

    /// How long the log may be: a fourth of what the others leave. So however many commands print, each finds something left.
    pub(in crate::engine) fn limit(&self, limit: u64) -> u64 {
        let LogBudget { most, used } = &*self.budget;
        let others = used.load(Ordering::Relaxed).saturating_sub(self.own);
        (most.saturating_sub(others) / 4).clamp(SHORTEST.min(limit), limit)
    }

    /// Takes note of what the log takes now.
    pub(in crate::engine) fn set(&mut self, own: u64) {
        // One after the other: the sum is never less than what is taken.
        self.budget.used.fetch_add(own, Ordering::Relaxed);
        self.budget.used.fetch_sub(self.own, Ordering::Relaxed);
        self.own = own;
    }
}

impl Drop for BudgetShare {
    fn drop(&mut self) {
        self.set(0);
    }
}

/// What the logs of a sandbox's running commands may take.
const RUNNING: u64 = 256 << 20;
/// However little is left, a log may have this.
pub(in crate::engine) const SHORTEST: u64 = 16 << 10;
