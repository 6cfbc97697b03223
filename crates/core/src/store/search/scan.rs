//! Searches a stream of any length with a bounded buffer.
//!
//! A form may stretch over the end of what was read, so the buffer keeps as much behind and ahead of
//! the place it has got to as the longest form can reach: what is found does not depend on how the
//! bytes were cut.

use std::io::{self, Read};
use std::ops::Range;

use super::needles::{Hit, Needles};

const CHUNK: usize = 256 << 10;

/// A search under way.
pub(super) struct NeedleScan<'n> {
    needles: &'n Needles,
    buffer: Vec<u8>,
    /// How much of the buffer is filled.
    filled: usize,
    /// Up to where the buffer was searched.
    done: usize,
    /// The place of the buffer's first byte in the stream.
    base: u64,
}

/// Something found in a stream.
#[derive(Debug, Clone)]
pub(super) struct ScanMatch {
    pub(super) hit: Hit,
    /// The place in the stream that `hit`'s runs count from.
    pub(super) base: u64,
}

impl ScanMatch {
    pub(super) fn offset(&self) -> u64 {
        self.base + self.hit.runs.first().map_or(0, |run| run.start as u64)
    }

    /// The places in the stream.
    pub(super) fn runs(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let at = |place: usize| self.base + place as u64;
        self.hit.runs.iter().map(move |run| at(run.start)..at(run.end))
    }
}

impl<'n> NeedleScan<'n> {
    pub(super) fn new(needles: &'n Needles) -> Self {
        Self { needles, buffer: Vec::new(), filled: 0, done: 0, base: 0 }
    }

    /// Begins anew, at some place of a stream.
    pub(super) fn restart(&mut self, base: u64) {
        (self.filled, self.done, self.base) = (0, 0, base);
    }

    /// Reads once, with `read`, and searches. Answers with how much was read.
    pub(super) fn fill(
        &mut self,
        read: impl FnOnce(&mut [u8]) -> io::Result<usize>,
        found: &mut dyn FnMut(ScanMatch),
    ) -> io::Result<usize> {
        let room = CHUNK + 2 * self.needles.reach();
        if self.buffer.len() < room {
            self.buffer.resize(room, 0);
        }
        let got = read(&mut self.buffer[self.filled..])?;
        self.filled += got;
        let sure = self.filled.saturating_sub(self.needles.reach());
        // A few bytes at a time are not worth a search each.
        if sure > self.done && self.buffer.len() - self.filled < CHUNK / 2 {
            self.search(sure, found);
            let kept = self.done.saturating_sub(self.needles.reach());
            self.buffer.copy_within(kept..self.filled, 0);
            self.base += kept as u64;
            self.filled -= kept;
            self.done -= kept;
        }
        Ok(got)
    }

    /// Searches `bytes` as what comes next in the stream.
    pub(super) fn feed(&mut self, bytes: &[u8], found: &mut dyn FnMut(ScanMatch)) {
        let mut rest = bytes;
        while !rest.is_empty() {
            // A slice is always read.
            let _ = self.fill(|room| rest.read(room), found);
        }
    }

    /// Searches what is left; nothing follows.
    pub(super) fn finish(&mut self, found: &mut dyn FnMut(ScanMatch)) {
        self.search(self.filled, found);
    }

    fn search(&mut self, upto: usize, found: &mut dyn FnMut(ScanMatch)) {
        let base = self.base;
        self.needles.find(&self.buffer[..self.filled], self.done..upto, |hit| {
            found(ScanMatch { hit, base });
        });
        self.done = upto;
    }
}
