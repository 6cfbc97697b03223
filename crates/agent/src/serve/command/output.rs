//! A command's output: numbered, and held until the daemon says it is kept.

use std::collections::VecDeque;

use sandkeep_proto::frame::{CHUNK, FrameKind, WINDOW};

/// Output bytes `base..end`, each from standard output or standard error.
///
/// One buffer with run lengths beside it: a process that writes single bytes to both in turn costs
/// a small multiple of the window at the worst.
#[derive(Debug, Default)]
pub(crate) struct OutputBacklog {
    base: u64,
    data: VecDeque<u8>,
    runs: VecDeque<(FrameKind, usize)>,
}

impl OutputBacklog {
    /// The number of the first byte that is held.
    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    /// The number the next byte of output will have.
    pub(crate) fn end(&self) -> u64 {
        self.base + self.data.len() as u64
    }

    /// How much more can be held.
    pub(crate) fn room(&self) -> usize {
        WINDOW.saturating_sub(self.data.len())
    }

    pub(crate) fn push(&mut self, kind: FrameKind, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.data.extend(bytes);
        match self.runs.back_mut() {
            Some((last, length)) if *last == kind => *length += bytes.len(),
            _ => self.runs.push_back((kind, bytes.len())),
        }
    }

    /// Lets go of everything before byte `to`.
    pub(crate) fn keep_to(&mut self, to: u64) {
        let Some(kept) = to.checked_sub(self.base) else { return };
        let mut left = usize::try_from(kept).unwrap_or(usize::MAX).min(self.data.len());
        self.base += left as u64;
        self.data.drain(..left);
        while let Some((_, length)) = self.runs.front_mut() {
            if *length > left {
                *length -= left;
                break;
            }
            left -= *length;
            self.runs.pop_front();
        }
        // A quiet command holds no memory.
        if self.data.is_empty() {
            self.data = VecDeque::new();
        }
    }

    /// The bytes of one kind from byte `from` on, at most [`CHUNK`]; nothing if there are none.
    pub(crate) fn from(&self, from: u64) -> Option<(FrameKind, Vec<u8>)> {
        let mut skip = usize::try_from(from.checked_sub(self.base)?).ok()?;
        let start = skip;
        for (kind, length) in &self.runs {
            if skip < *length {
                let take = (*length - skip).min(CHUNK);
                let bytes = self.data.range(start..start + take).copied().collect();
                return Some((*kind, bytes));
            }
            skip -= *length;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{ProptestConfig, any, prop, proptest};
    use sandkeep_proto::frame::FrameKind;

    use super::OutputBacklog;

    fn all(backlog: &OutputBacklog, mut from: u64) -> Vec<(FrameKind, u8)> {
        let mut got = Vec::new();
        while let Some((kind, bytes)) = backlog.from(from) {
            from += bytes.len() as u64;
            got.extend(bytes.into_iter().map(|byte| (kind, byte)));
        }
        assert_eq!(from, backlog.end());
        got
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn what_is_not_kept_can_be_had_again_from_any_byte(
            steps in prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 0..9), 0..12_u64), 0..30)
        ) {
            let mut backlog = OutputBacklog::default();
            let mut told: Vec<(FrameKind, u8)> = Vec::new();
            for (err, bytes, keep) in steps {
                let kind = if err { FrameKind::DataErr } else { FrameKind::Data };
                backlog.push(kind, &bytes);
                told.extend(bytes.iter().map(|byte| (kind, *byte)));
                backlog.keep_to((backlog.base() + keep).min(backlog.end()));
                for from in backlog.base()..=backlog.end() {
                    let at = usize::try_from(from).expect("a small number");
                    assert_eq!(all(&backlog, from), told[at..]);
                }
            }
        }
    }

    #[test]
    fn bytes_that_are_gone_or_to_come_are_not_had() {
        let mut backlog = OutputBacklog::default();
        backlog.push(FrameKind::Data, b"abcdef");
        backlog.keep_to(3);
        assert_eq!(backlog.from(2), None);
        assert_eq!(backlog.from(6), None);
        assert_eq!(backlog.from(7), None);
        assert_eq!(backlog.from(4), Some((FrameKind::Data, b"ef".to_vec())));
    }
}
