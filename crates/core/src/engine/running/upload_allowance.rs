//! What may still be uploaded into a running sandbox.

use std::time::{Duration, Instant};

/// What may be sent between two counts although less of it is known to fit.
const STEP: u64 = 1 << 20;
/// The same for files and directories.
const FEW: u64 = 64;
/// In an archive, what a file takes of it on the average, as far as is known before it is unpacked. Four times the least: as
/// only a fourth of what is left is let through before it is counted again, that is never more than all of it.
const PER_ENTRY: u64 = 2048;
/// How long the agent may take to write what it was sent: at most a window of the link, on a busy host.
const WRITTEN_AFTER: Duration = Duration::from_secs(3);

/// What may still be uploaded into a sandbox.
///
/// What is sent is counted as bytes of a stream, and takes more than that on the disk: an archive of tiny files four times as much. So only a
/// part of what is left is let through before it is counted again.
#[derive(Debug, Default)]
pub(in crate::engine) struct UploadAllowance {
    /// What may be sent until it is counted again; nothing is known before the first count.
    until_count: Option<Sent>,
    /// What was sent since.
    sent: Sent,
    /// What was sent in all.
    total: u64,
    /// When something was last sent.
    last_sent: Option<Instant>,
}

/// What is sent into a sandbox's files.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::engine) struct Sent {
    /// Bytes.
    pub(in crate::engine) bytes: u64,
    /// Files and directories that are made.
    pub(in crate::engine) inodes: u64,
    /// Whether their number is a guess.
    guessed: bool,
}

impl Sent {
    /// `bytes` bytes, and `inodes` files and directories.
    pub(in crate::engine) const fn new(bytes: u64, inodes: u64) -> Self {
        Self { bytes, inodes, guessed: false }
    }

    /// A part of an archive.
    pub(in crate::engine) const fn archive(bytes: u64) -> Self {
        Self { bytes, inodes: bytes.div_ceil(PER_ENTRY), guessed: true }
    }

    /// How many files and directories are made for certain; of an archive it is known later.
    pub(in crate::engine) const fn made(&self) -> u64 {
        if self.guessed { 1 } else { self.inodes }
    }

    fn plus(self, more: Self) -> Self {
        let bytes = self.bytes.saturating_add(more.bytes);
        Self::new(bytes, self.inodes.saturating_add(more.inodes))
    }
}

impl UploadAllowance {
    /// Takes note of what is left.
    pub(in crate::engine) fn counted(&mut self, left: Sent) {
        let bytes = (left.bytes / 4).max(STEP).min(left.bytes);
        self.until_count = Some(Sent::new(bytes, (left.inodes / 4).max(FEW).min(left.inodes)));
        self.sent = Sent::default();
    }

    /// What was sent in all.
    pub(in crate::engine) const fn total(&self) -> u64 {
        self.total
    }

    /// Whether the agent may still be writing what it was sent.
    pub(in crate::engine) fn is_being_written(&self) -> bool {
        self.last_sent.is_some_and(|at| at.elapsed() < WRITTEN_AFTER)
    }

    /// Lets something through, if it is known to fit.
    pub(in crate::engine) fn admit(&mut self, more: Sent) -> bool {
        let sent = self.sent.plus(more);
        let left = self.until_count;
        let fits = left.is_some_and(|left| sent.bytes <= left.bytes && sent.inodes <= left.inodes);
        if fits {
            self.admit_counted(more);
        }
        fits
    }

    /// Lets something through that was just found to fit.
    pub(in crate::engine) fn admit_counted(&mut self, more: Sent) {
        self.sent = self.sent.plus(more);
        // What is made shows in the sum too: who makes directories writes.
        self.total = self.total.saturating_add(more.bytes).saturating_add(more.inodes);
        self.last_sent = Some(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(bytes: u64) -> Sent {
        Sent::new(bytes, 1 << 20)
    }

    #[test]
    fn what_was_just_sent_may_not_be_written_yet() {
        let mut room = UploadAllowance::default();
        room.counted(left(100));
        assert!(!room.is_being_written());
        assert!(!room.admit(Sent::new(101, 0)) && !room.is_being_written(), "nothing was sent");
        assert!(room.admit(Sent::new(10, 0)) && room.is_being_written());
        room.last_sent = Instant::now().checked_sub(WRITTEN_AFTER);
        assert!(!room.is_being_written());
    }

    #[test]
    fn a_part_of_what_is_left_is_let_through_between_counts() {
        let mut room = UploadAllowance::default();
        assert!(!room.admit(Sent::new(1, 0)), "nothing is known yet");
        room.counted(left(100 << 20));
        assert!(room.admit(Sent::new(25 << 20, 0)));
        assert!(!room.admit(Sent::new(1, 0)));
        room.counted(left(75 << 20));
        assert_eq!(room.total(), 25 << 20);
        // Near the end it goes in steps, and never beyond the end.
        room.counted(left(STEP + 5));
        assert!(room.admit(Sent::new(STEP, 0)));
        room.counted(left(5));
        assert!(!room.admit(Sent::new(6, 0)));
        assert!(room.admit(Sent::new(5, 0)));
    }

    #[test]
    fn files_without_bytes_are_counted_too() {
        let mut room = UploadAllowance::default();
        let one = Sent::new(0, 1);
        room.counted(Sent::new(1 << 40, 4000));
        assert!((0..1000).all(|_| room.admit(one)) && !room.admit(one));
        room.counted(Sent::new(1 << 40, 3));
        assert!((0..3).all(|_| room.admit(one)) && !room.admit(one));
        // However small the files of an archive are, no more are let through than there may be.
        room.counted(Sent::new(1 << 40, 100_000));
        let mut sent = 0;
        while room.admit(Sent::archive(64 << 10)) {
            sent += 64 << 10;
        }
        assert!((10 << 20..=100_000 * 512).contains(&sent), "{sent}");
    }
}
