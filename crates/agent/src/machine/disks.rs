//! The disks that are written to, and freezing them for a capture.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::{locked, sys};

/// How long disks stay frozen, as this machine counts it: the time in which it is not there does not pass.
const AT_MOST: Duration = Duration::from_secs(10);

/// Descriptors of the disks' topmost directories.
#[derive(Debug)]
pub(super) struct Disks {
    disks: Vec<OwnedFd>,
    frozen_at: Mutex<Option<Instant>>,
}

impl Disks {
    pub(super) fn new(disks: Vec<OwnedFd>) -> Self {
        Self { disks, frozen_at: Mutex::default() }
    }

    fn frozen_at(&self) -> MutexGuard<'_, Option<Instant>> {
        locked(&self.frozen_at)
    }

    /// All or none. Disks that are frozen already stay so for as long again.
    pub(super) fn freeze(&self) -> io::Result<()> {
        if self.frozen_at().is_none() {
            // Outside the lock: the most of it, and it takes its time.
            rustix::fs::sync();
        }
        let mut frozen_at = self.frozen_at();
        if frozen_at.is_none() {
            for (number, disk) in self.disks.iter().enumerate() {
                if let Err(error) = sys::freeze(disk) {
                    for disk in self.disks.iter().take(number) {
                        let _ = sys::thaw(disk);
                    }
                    return Err(error);
                }
            }
        }
        *frozen_at = Some(Instant::now());
        Ok(())
    }

    /// Thaws all disks.
    pub(super) fn thaw(&self) -> io::Result<()> {
        if self.frozen_at().take().is_none() {
            return Ok(());
        }
        let outcomes: Vec<io::Result<()>> = self.disks.iter().map(sys::thaw).collect();
        outcomes.into_iter().collect()
    }

    /// How much longer disks may stay frozen, if they are.
    pub(super) fn frozen_for(&self) -> Option<Duration> {
        self.frozen_at().map(|at| AT_MOST.saturating_sub(at.elapsed()))
    }
}
