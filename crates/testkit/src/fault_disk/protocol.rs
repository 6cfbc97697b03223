//! What a test and the process that serves its disk say to each other: one JSON value per line.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::medium::Cut;

/// The filesystem on a fault disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Filesystem {
    /// ext4 with its defaults, which flush a file that is renamed over another.
    Ext4,
    /// ext4 that does not: a rename without `fsync` may leave an empty file.
    Ext4NoAutoDaAlloc,
    /// XFS. Disks of less than 300 MiB are refused.
    Xfs,
    /// Btrfs.
    Btrfs,
}

impl Filesystem {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Ext4, Self::Ext4NoAutoDaAlloc, Self::Xfs, Self::Btrfs];

    /// Its name in reports and arguments.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Ext4NoAutoDaAlloc => "ext4-noauto_da_alloc",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
        }
    }

    /// The one with this name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// Requests that a fault is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum DiskRequest {
    Read,
    Write,
    Flush,
}

/// What happens to a request that a fault is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Outcome {
    /// `EIO`; nothing is written.
    Fail,
    /// No answer until the fault is healed; then the request is carried out.
    Hang,
}

/// Something that is wrong with the disk. Requests must match all of it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Fault {
    pub(super) operations: Vec<DiskRequest>,
    pub(super) outcome: Outcome,
    pub(super) region: Option<(u64, u64)>,
    pub(super) content: Option<Vec<u8>>,
    pub(super) times: Option<u64>,
    pub(super) lasts: Option<Duration>,
}

impl Fault {
    fn of(operations: &[DiskRequest]) -> Self {
        let operations = operations.to_vec();
        let outcome = Outcome::Fail;
        Self { operations, outcome, region: None, content: None, times: None, lasts: None }
    }

    /// Writes fail. Flushes are answered as if all was well, as disks do that lost a write.
    #[must_use]
    pub fn writes() -> Self {
        Self::of(&[DiskRequest::Write])
    }

    /// Reads fail.
    #[must_use]
    pub fn reads() -> Self {
        Self::of(&[DiskRequest::Read])
    }

    /// Flushes fail; what was written before them stays in the volatile cache.
    #[must_use]
    pub fn flushes() -> Self {
        Self::of(&[DiskRequest::Flush])
    }

    /// Writes and flushes fail.
    #[must_use]
    pub fn writes_and_flushes() -> Self {
        Self::of(&[DiskRequest::Write, DiskRequest::Flush])
    }

    /// Everything fails.
    #[must_use]
    pub fn everything() -> Self {
        Self::of(&[DiskRequest::Read, DiskRequest::Write, DiskRequest::Flush])
    }

    /// The requests do not fail but hang until the fault is healed.
    #[must_use]
    pub const fn hang(mut self) -> Self {
        self.outcome = Outcome::Hang;
        self
    }

    /// Only requests that touch the bytes from `start` to before `end` of the disk. Flushes have no
    /// place, and match.
    #[must_use]
    pub const fn in_region(mut self, start: u64, end: u64) -> Self {
        self.region = Some((start, end));
        self
    }

    /// Only writes whose data contains these bytes.
    #[must_use]
    pub fn containing(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.content = Some(bytes.into());
        self
    }

    /// Only this many requests; then the fault is over.
    #[must_use]
    pub const fn times(mut self, count: u64) -> Self {
        self.times = Some(count);
        self
    }

    /// Only for this long; then the fault is over.
    #[must_use]
    pub const fn lasting(mut self, time: Duration) -> Self {
        self.lasts = Some(time);
        self
    }
}

/// Names an injected fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultId(pub(super) u64);

/// What the disk has seen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Reads, with those that failed.
    pub reads: u64,
    /// Writes, with those that failed.
    pub writes: u64,
    /// Flushes, with those that failed.
    pub flushes: u64,
    /// Requests that a fault made fail.
    pub failed: u64,
    /// Requests that hang now.
    pub hanging: u64,
    /// Writes that a power cut could take away.
    pub unflushed: u64,
}

/// What a test asks for.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// Makes the disk and its filesystem below `place`, and mounts it.
    Create {
        place: PathBuf,
        filesystem: Filesystem,
        size: u64,
    },
    /// Freezes the disk as it is after a power cut. It answers nothing but `EIO` from then on.
    Cut {
        seed: u64,
    },
    /// Mounts the disk again after a cut.
    PowerOn,
    /// Unmounts the filesystem in good order and mounts it again.
    Remount,
    Inject(Fault),
    Heal(FaultId),
    HealAll,
    Stats,
    /// Takes everything down.
    Close,
}

/// What it gets.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    Done,
    Cut(Cut),
    Injected(FaultId),
    Stats(Stats),
    /// What could not be taken down.
    Closed(Vec<String>),
    /// Why it was not done.
    Failed(String),
}
