//! Whether so much of the host's disk was taken or freed that it must be looked at who took it.

/// What must have changed since the last look for the next: of bytes, and of inodes.
const FILLED: u64 = 32 << 20;
const FILLED_INODES: u64 = 8192;

/// Adds up how the free space and the free inodes change.
///
/// What is freed counts as what is taken does: while one sandbox frees space, another may take it, and of the two only the
/// difference is seen.
#[derive(Debug, Default)]
pub(super) struct FillMeter {
    last: Option<(u64, u64)>,
    moved: u64,
    moved_inodes: u64,
}

impl FillMeter {
    /// Takes note of what is free now.
    pub(super) fn note(&mut self, free: u64, inodes: u64) {
        let (free_then, inodes_then) = self.last.replace((free, inodes)).unwrap_or((free, inodes));
        self.moved = self.moved.saturating_add(free.abs_diff(free_then));
        self.moved_inodes = self.moved_inodes.saturating_add(inodes.abs_diff(inodes_then));
    }

    /// Whether it is time for a look.
    pub(super) fn is_due(&self) -> bool {
        self.moved > FILLED || self.moved_inodes > FILLED_INODES
    }

    /// A look begins.
    pub(super) fn looked(&mut self) {
        (self.moved, self.moved_inodes) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::{FILLED, FILLED_INODES, FillMeter};

    const FREE: u64 = 3 << 30;
    const INODES: u64 = 1 << 20;

    #[test]
    fn it_is_looked_when_the_disk_fills_and_not_otherwise() {
        let mut meter = FillMeter::default();
        meter.note(FREE, INODES);
        assert!(!meter.is_due());
        meter.note(FREE - FILLED, INODES - FILLED_INODES);
        assert!(!meter.is_due());
        meter.note(FREE - FILLED - 1, INODES - FILLED_INODES);
        assert!(meter.is_due());
        meter.looked();
        assert!(!meter.is_due());
        meter.note(FREE - FILLED - 1, INODES - 2 * FILLED_INODES - 1);
        assert!(meter.is_due());
    }

    /// Somebody frees 2 GiB; what others write from then on is seen as soon as ever.
    #[test]
    fn space_that_was_freed_hides_nothing() {
        let mut meter = FillMeter::default();
        let mut free = FREE;
        meter.note(free, INODES);
        free += 2 << 30;
        meter.note(free, INODES);
        assert!(meter.is_due(), "something may have been written in the same moment");
        meter.looked();
        for _ in 0..9 {
            free -= FILLED / 8;
            meter.note(free, INODES);
        }
        assert!(meter.is_due());
    }

    /// One sandbox frees what another takes, by turns.
    #[test]
    fn taking_and_freeing_do_not_cancel_out() {
        let mut meter = FillMeter::default();
        for turn in 0..12 {
            meter.note(FREE - (turn % 2) * (FILLED / 8), INODES);
        }
        assert!(meter.is_due());
    }
}
