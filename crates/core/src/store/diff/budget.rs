//! The cost limits of one comparison, and how many run at a time.

use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, SemaphorePermit};

use crate::store::{Result, StoreError};

/// How long a comparison takes at most.
pub(super) const LONGEST: Duration = Duration::from_secs(60);
/// How long a merge takes at most to decide, and to build its result.
pub(super) const LONGEST_MERGE: Duration = Duration::from_secs(120);
pub(super) const LONGEST_BUILD: Duration = Duration::from_secs(600);
/// How many names are visited at most.
const MOST_NAMES: u64 = 2_000_000;
/// How much memory paths take at most.
const MOST_BYTES: usize = 256 << 20;

/// How many comparisons run at the same time, how many pieces of patches are written, and how many results of merges are
/// built. Others wait.
static COMPARISONS: Semaphore = Semaphore::const_new(2);
static PIECES: Semaphore = Semaphore::const_new(2);
static BUILDS: Semaphore = Semaphore::const_new(2);
/// How long they wait.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until another comparison may run.
pub(super) async fn comparison() -> Result<SemaphorePermit<'static>> {
    one_of(&COMPARISONS).await
}

/// Waits until another piece of a patch may be written.
pub(super) async fn piece() -> Result<SemaphorePermit<'static>> {
    one_of(&PIECES).await
}

/// Waits until another result of a merge may be built.
pub(super) async fn build() -> Result<SemaphorePermit<'static>> {
    one_of(&BUILDS).await
}

async fn one_of(few: &'static Semaphore) -> Result<SemaphorePermit<'static>> {
    match tokio::time::timeout(PATIENCE, few.acquire()).await {
        Ok(turn) => turn.map_err(|_| StoreError::ShuttingDown),
        Err(_) => {
            let why = format!("it was not begun within {} s", PATIENCE.as_secs());
            Err(StoreError::Busy { why })
        }
    }
}

/// Bounds the work of one comparison.
#[derive(Debug)]
pub(super) struct Budget {
    longest: Duration,
    deadline: Instant,
    names: u64,
    bytes: usize,
}

impl Budget {
    pub(super) fn new(longest: Duration) -> Self {
        Self { longest, deadline: Instant::now() + longest, names: 0, bytes: 0 }
    }

    /// Another comparison begins as part of the same work: its names are counted from 0.
    pub(super) fn next(&mut self) {
        self.names = 0;
    }

    pub(super) fn names(&mut self, count: usize) -> Result<()> {
        self.names += count as u64;
        if self.names > MOST_NAMES {
            return Err(StoreError::DiffTooLarge {
                why: format!("more than {MOST_NAMES} names would be compared"),
            });
        }
        self.time()
    }

    /// So much memory is held from now on.
    pub(super) fn hold(&mut self, bytes: usize) -> Result<()> {
        self.bytes = self.bytes.saturating_add(bytes);
        match self.bytes > MOST_BYTES {
            true => Err(StoreError::DiffTooLarge {
                why: format!(
                    "the paths and texts that differ take more than {} MiB",
                    MOST_BYTES >> 20
                ),
            }),
            false => Ok(()),
        }
    }

    /// So much is held no more.
    pub(super) fn release(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    pub(super) fn time(&self) -> Result<()> {
        match Instant::now() > self.deadline {
            true => Err(StoreError::DiffTooLarge {
                why: format!("it takes longer than {} s", self.longest.as_secs()),
            }),
            false => Ok(()),
        }
    }
}
