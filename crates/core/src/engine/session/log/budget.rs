//! The disk space that the logs of a sandbox's running commands share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What the logs of a sandbox's running commands may take together. Ended ones are `retention`'s.
#[derive(Debug)]
pub(in crate::engine) struct LogBudget {
    most: u64,
    used: AtomicU64,
    /// Whether the host has only its reserve left: then no log grows.
    short: Arc<AtomicBool>,
}

impl LogBudget {
    /// Room for at least four logs of full length.
    pub(in crate::engine) fn new(limit: u64, short: &Arc<AtomicBool>) -> Arc<Self> {
        let most = RUNNING.max(limit.saturating_mul(4));
        Arc::new(Self { most, used: AtomicU64::new(0), short: Arc::clone(short) })
    }

    #[cfg(test)]
    pub(in crate::engine) fn of(most: u64) -> Arc<Self> {
        Arc::new(Self { most, used: AtomicU64::new(0), short: Arc::default() })
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
        let LogBudget { most, used, short } = &*self.budget;
        let others = used.load(Ordering::Relaxed).saturating_sub(self.own);
        let most = match short.load(Ordering::Relaxed) {
            true => self.own,
            false => most.saturating_sub(others) / 4,
        };
        most.clamp(SHORTEST.min(limit), limit)
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::{BudgetShare, LogBudget, SHORTEST};

    #[test]
    fn no_log_grows_while_the_host_has_only_its_reserve() {
        let short = Arc::new(AtomicBool::new(false));
        let budget = LogBudget::new(64 << 20, &short);
        let (mut long, fresh) = (BudgetShare::new(&budget), BudgetShare::new(&budget));
        long.set(1 << 20);
        assert!(long.limit(64 << 20) > 32 << 20);
        short.store(true, Ordering::Relaxed);
        assert_eq!((long.limit(64 << 20), fresh.limit(64 << 20)), (1 << 20, SHORTEST));
        short.store(false, Ordering::Relaxed);
        assert!(fresh.limit(64 << 20) > 32 << 20);
    }
}
