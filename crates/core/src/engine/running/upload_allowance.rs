//! What may still be uploaded into a running sandbox.

use std::time::{Duration, Instant};

/// What may be sent between two counts although less of it is known to fit.
const STEP: u64 = 1 << 20;
/// How long the agent may take to write what it was sent: at most a window of the link, on a busy host.
const WRITTEN_AFTER: Duration = Duration::from_secs(3);

/// What may still be uploaded into a sandbox.
///
/// What is sent is counted as bytes of a stream, and takes more than that on the disk: an archive of tiny files four times as much. So only a
/// part of what is left is let through before it is counted again.
#[derive(Debug, Default)]
pub(in crate::engine) struct UploadAllowance {
    /// What may be sent until it is counted again; nothing is known before the first count.
    until_count: Option<u64>,
    /// What was sent since.
    sent: u64,
    /// What was sent in all.
    total: u64,
    /// When something was last sent.
    last_sent: Option<Instant>,
}

impl UploadAllowance {
    /// Takes note of what is left.
    pub(in crate::engine) fn counted(&mut self, left: u64) {
        self.until_count = Some((left / 4).max(STEP).min(left));
        self.sent = 0;
    }

    /// What was sent in all.
    pub(in crate::engine) const fn total(&self) -> u64 {
        self.total
    }

    /// Whether the agent may still be writing what it was sent.
    pub(in crate::engine) fn is_being_written(&self) -> bool {
        self.last_sent.is_some_and(|at| at.elapsed() < WRITTEN_AFTER)
    }

    /// Lets so many bytes through, if they are known to fit.
    pub(in crate::engine) fn admit(&mut self, bytes: u64) -> bool {
        let sent = self.sent.saturating_add(bytes);
        let fits = self.until_count.is_some_and(|left| sent <= left);
        if fits {
            self.admit_counted(bytes);
        }
        fits
    }

    /// Lets so many bytes through that were just found to fit.
    pub(in crate::engine) fn admit_counted(&mut self, bytes: u64) {
        self.sent = self.sent.saturating_add(bytes);
        self.total = self.total.saturating_add(bytes);
        self.last_sent = Some(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_just_sent_may_not_be_written_yet() {
        let mut room = UploadAllowance::default();
        room.counted(100);
        assert!(!room.is_being_written());
        assert!(!room.admit(101) && !room.is_being_written(), "nothing was sent");
        assert!(room.admit(10) && room.is_being_written());
        room.last_sent = Instant::now().checked_sub(WRITTEN_AFTER);
        assert!(!room.is_being_written());
    }

    #[test]
    fn a_part_of_what_is_left_is_let_through_between_counts() {
        let mut room = UploadAllowance::default();
        assert!(!room.admit(1), "nothing is known yet");
        room.counted(100 << 20);
        assert!(room.admit(25 << 20));
        assert!(!room.admit(1));
        room.counted(75 << 20);
        assert_eq!(room.total(), 25 << 20);
        // Near the end it goes in steps, and never beyond the end.
        room.counted(STEP + 5);
        assert!(room.admit(STEP));
        room.counted(5);
        assert!(!room.admit(6));
        assert!(room.admit(5));
    }
}
