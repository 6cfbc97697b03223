//! Whether the writes of a machine with its own disk are held back, because the host is short of space.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use crate::model::{Timestamp, now};

/// Of one running sandbox. Held back, changed and released by `integrity::shortage`.
#[derive(Debug, Default)]
pub(in crate::engine) struct WriteHold {
    held: Mutex<Option<HeldWrites>>,
    /// Held while the driver is called: its last call must be the last decision.
    pub(in crate::engine) changing: tokio::sync::Mutex<()>,
    /// How often in a row the driver did not do it.
    failures: AtomicU32,
}

/// Writes that are held back.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine) struct HeldWrites {
    /// Since when, for people.
    pub(in crate::engine) since: Timestamp,
    /// Since when, for waiting.
    pub(in crate::engine) begun: Instant,
    /// What the machine's disks took then; not known of one that an earlier daemon held.
    pub(in crate::engine) used: Option<u64>,
}

impl WriteHold {
    /// What is held back now.
    pub(in crate::engine) fn held(&self) -> Option<HeldWrites> {
        *self.held.lock()
    }

    /// Notes that writes are held back from now on; `false` if they are already.
    pub(in crate::engine) fn begin(&self, used: Option<u64>) -> bool {
        let mut held = self.held.lock();
        let begins = held.is_none();
        if begins {
            *held = Some(HeldWrites { since: now(), begun: Instant::now(), used });
        }
        begins
    }

    /// Notes what the disks took when this was looked at first.
    pub(in crate::engine) fn measured(&self, used: u64) -> u64 {
        let mut held = self.held.lock();
        held.as_mut().map_or(used, |held| *held.used.get_or_insert(used))
    }

    /// Notes that they are not held back any more.
    pub(in crate::engine) fn end(&self) {
        self.failures.store(0, Ordering::Relaxed);
        *self.held.lock() = None;
    }

    /// The driver did not do it: answers with how often in a row that was.
    pub(in crate::engine) fn failed(&self) -> u32 {
        *self.held.lock() = None;
        self.failures.fetch_add(1, Ordering::Relaxed) + 1
    }
}
