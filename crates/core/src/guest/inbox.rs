//! Bytes that arrived on a stream and were not yet taken.
//!
//! Held as one buffer with run lengths beside it, so that an agent that sends its window in frames
//! of one byte costs a small multiple of the window and not an allocation for each.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};
use sandkeep_proto::frame::CHUNK;

/// Where bytes of a command come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// Data.
    Out,
    /// DataErr.
    Err,
}

/// A queue of bytes, each from one of two sources.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    data: BytesMut,
    runs: VecDeque<(Source, usize)>,
}

impl Inbox {
    /// Adds bytes at the end.
    pub(super) fn push(&mut self, source: Source, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.data.extend_from_slice(bytes);
        match self.runs.back_mut() {
            Some((last, length)) if *last == source => *length += bytes.len(),
            _ => self.runs.push_back((source, bytes.len())),
        }
    }

    /// Takes bytes of one source from the front, at most [`CHUNK`] of them.
    pub(super) fn pop(&mut self) -> Option<(Source, Bytes)> {
        let (source, length) = self.runs.front_mut()?;
        let source = *source;
        let take = (*length).min(CHUNK);
        *length -= take;
        if *length == 0 {
            self.runs.pop_front();
        }
        Some((source, self.data.split_to(take).freeze()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{ProptestConfig, any, prop, proptest};

    use super::{Inbox, Source};

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn bytes_come_out_as_they_went_in(
            pieces in prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 0..9)), 0..40)
        ) {
            let mut inbox = Inbox::default();
            let mut put = Vec::new();
            for (err, bytes) in &pieces {
                let source = if *err { Source::Err } else { Source::Out };
                inbox.push(source, bytes);
                put.extend(bytes.iter().map(|b| (source, *b)));
            }
            let mut got = Vec::new();
            while let Some((source, bytes)) = inbox.pop() {
                assert!(!bytes.is_empty());
                got.extend(bytes.iter().map(|b| (source, *b)));
            }
            assert_eq!(put, got);
        }
    }
}
