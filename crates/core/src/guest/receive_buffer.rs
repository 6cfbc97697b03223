//! Bytes that arrived on a stream and were not yet taken.
//!
//! Held as one buffer with run lengths beside it, so that an agent that sends its window in frames
//! of one byte costs a small multiple of the window and not an allocation for each.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};
use sandkeep_proto::frame::CHUNK;

/// Where bytes of a command come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OutputSource {
    /// Data.
    Out,
    /// DataErr.
    Err,
}

/// A queue of bytes, each from one of two sources.
#[derive(Debug, Default)]
pub(super) struct ReceiveBuffer {
    data: BytesMut,
    runs: VecDeque<(OutputSource, usize)>,
}

impl ReceiveBuffer {
    /// Adds bytes at the end.
    pub(super) fn push(&mut self, source: OutputSource, bytes: &[u8]) {
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
    pub(super) fn pop(&mut self) -> Option<(OutputSource, Bytes)> {
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

    use super::{OutputSource, ReceiveBuffer};

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn bytes_come_out_as_they_went_in(
            pieces in prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 0..9)), 0..40)
        ) {
            let mut received = ReceiveBuffer::default();
            let mut put = Vec::new();
            for (err, bytes) in &pieces {
                let source = if *err { OutputSource::Err } else { OutputSource::Out };
                received.push(source, bytes);
                put.extend(bytes.iter().map(|b| (source, *b)));
            }
            let mut got = Vec::new();
            while let Some((source, bytes)) = received.pop() {
                assert!(!bytes.is_empty());
                got.extend(bytes.iter().map(|b| (source, *b)));
            }
            assert_eq!(put, got);
        }
    }
}
