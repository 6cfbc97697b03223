//! The part of the data directory's filesystem that new work may not use.

/// Free space that is kept for what must be written: records, and what sessions under way leave when they end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reserve {
    /// Bytes; 1 % of the filesystem, but at least 256 MiB, if absent.
    pub bytes: Option<u64>,
}

impl Reserve {
    /// Of a filesystem of this size.
    #[must_use]
    pub fn of(self, total: u64) -> u64 {
        self.bytes.unwrap_or((256 << 20).max(total / 100))
    }
}
