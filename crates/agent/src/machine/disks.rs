//! The disks that are written to, and standing still for a capture.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::sys;

/// How long disks stay frozen.
pub(super) const AT_MOST: Duration = Duration::from_secs(10);

/// Descriptors of the disks' topmost directories.
#[derive(Debug)]
pub(super) struct Disks {
    disks: Vec<OwnedFd>,
    frozen: Mutex<Frozen>,
}

#[derive(Debug, Default)]
struct Frozen {
    now: bool,
    /// How often disks were frozen.
    count: u64,
}

impl Disks {
    pub(super) fn new(disks: Vec<OwnedFd>) -> Self {
        Self { disks, frozen: Mutex::default() }
    }

    fn frozen(&self) -> MutexGuard<'_, Frozen> {
        self.frozen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All or none. Answers which freeze this is.
    pub(super) fn freeze(&self) -> io::Result<u64> {
        // Outside the lock: the most of it, and it takes its time.
        rustix::fs::sync();
        let mut frozen = self.frozen();
        frozen.count += 1;
        if frozen.now {
            return Ok(frozen.count);
        }
        for (number, disk) in self.disks.iter().enumerate() {
            if let Err(error) = sys::freeze(disk) {
                for disk in self.disks.iter().take(number) {
                    let _ = sys::thaw(disk);
                }
                return Err(error);
            }
        }
        frozen.now = true;
        Ok(frozen.count)
    }

    /// Thaws all disks, or only if the freeze that holds is this one.
    pub(super) fn thaw(&self, only: Option<u64>) -> io::Result<()> {
        let mut frozen = self.frozen();
        if !frozen.now || only.is_some_and(|only| only != frozen.count) {
            return Ok(());
        }
        frozen.now = false;
        let outcomes: Vec<io::Result<()>> = self.disks.iter().map(sys::thaw).collect();
        outcomes.into_iter().collect()
    }
}
