//! The index of a memory layer: which pages it has, and where. `docs/formats/memory.md` is the format.

use std::io;

/// Bytes of a page.
pub const PAGE: u64 = 4096;

const MAGIC: &[u8; 8] = b"SKPAGES1";
const HEADER: usize = 32;
const RUN: usize = 24;
const ZERO: u64 = u64::MAX;

/// The most RAM that an index is believed to speak of: what an x86 machine could address.
const MOST_PAGES: u64 = 1 << 36;

/// Which pages a memory layer has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageIndex {
    /// Whether nothing below it counts.
    pub whole: bool,
    /// Pages of the machine's RAM.
    pub ram: u64,
    /// In ascending order; they do not overlap.
    pub runs: Vec<PageRun>,
}

/// Pages that follow each other, in RAM and in the file of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRun {
    /// The first.
    pub first: u64,
    /// How many.
    pub count: u64,
    /// Where they begin in `pages`, in bytes; none: they are zero.
    pub at: Option<u64>,
}

impl PageRun {
    /// The page behind the last.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.first + self.count
    }
}

impl PageIndex {
    /// Reads an index, and refuses whatever [`encode`](Self::encode) would not have written.
    ///
    /// # Errors
    ///
    /// Returns [`io::ErrorKind::InvalidData`], with what is wrong.
    pub fn parse(bytes: &[u8]) -> io::Result<Self> {
        let word = |at: usize| {
            let word: [u8; 8] = bytes[at..at + 8].try_into().unwrap_or_default();
            u64::from_le_bytes(word)
        };
        if bytes.len() < HEADER || &bytes[..8] != MAGIC {
            return Err(wrong("it does not begin like an index of pages"));
        }
        let (size, flags) = (word(8) & 0xffff_ffff, word(8) >> 32);
        if size != PAGE || flags > 1 {
            return Err(wrong("its pages are of another kind"));
        }
        let (ram, count) = (word(16), word(24));
        let body = (bytes.len() - HEADER) as u64;
        if ram > MOST_PAGES || count.checked_mul(RUN as u64) != Some(body) {
            return Err(wrong("its length is not what it says"));
        }
        let mut runs = Vec::with_capacity(body as usize / RUN);
        let mut last = 0;
        for at in (HEADER..bytes.len()).step_by(RUN) {
            let (first, count, offset) = (word(at), word(at + 8), word(at + 16));
            let end = first.checked_add(count).filter(|end| *end <= ram);
            let Some(end) = end.filter(|_| count > 0 && first >= last) else {
                return Err(wrong("its runs overlap, are empty, or are not in RAM"));
            };
            let fits = offset.checked_add(count * PAGE).is_some() && offset.is_multiple_of(PAGE);
            if offset != ZERO && !fits {
                return Err(wrong("a run is at no page of its file"));
            }
            last = end;
            runs.push(PageRun { first, count, at: (offset != ZERO).then_some(offset) });
        }
        Ok(Self { whole: flags == 1, ram, runs })
    }

    /// The index as bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + RUN * self.runs.len());
        bytes.extend_from_slice(MAGIC);
        let kind = PAGE | u64::from(self.whole) << 32;
        for word in [kind, self.ram, self.runs.len() as u64] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        for PageRun { first, count, at } in &self.runs {
            for word in [*first, *count, at.unwrap_or(ZERO)] {
                bytes.extend_from_slice(&word.to_le_bytes());
            }
        }
        bytes
    }

    /// How long the file of pages must be.
    #[must_use]
    pub fn file_len(&self) -> u64 {
        let ends = self.runs.iter().filter_map(|run| Some(run.at? + run.count * PAGE));
        ends.max().unwrap_or(0)
    }
}

fn wrong(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason.to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{HEADER, PAGE, PageIndex, PageRun};

    fn index(runs: &[(u64, u64, Option<u64>)]) -> PageIndex {
        let runs = runs.iter().map(|&(first, count, at)| PageRun { first, count, at }).collect();
        PageIndex { whole: false, ram: 1000, runs }
    }

    #[test]
    fn what_is_no_index_is_refused() {
        let good = index(&[(0, 2, Some(0)), (5, 1, None), (6, 994, Some(2 * PAGE))]);
        assert_eq!(PageIndex::parse(&good.encode()).expect("a good one"), good);
        assert_eq!(good.file_len(), 996 * PAGE);
        for bad in [
            index(&[(5, 1, None), (0, 1, None)]),
            index(&[(0, 6, Some(0)), (5, 1, None)]),
            index(&[(0, 0, Some(0))]),
            index(&[(999, 2, None)]),
            index(&[(u64::MAX, 2, None)]),
            index(&[(0, 1, Some(1))]),
            index(&[(0, 2, Some(u64::MAX - PAGE + 1))]),
        ] {
            assert!(PageIndex::parse(&bad.encode()).is_err(), "{bad:?}");
        }
        let bytes = good.encode();
        for (at, byte) in [(0, b'x'), (8, 1), (12, 2), (23, 1), (24, 2), (24, 4), (31, 255)] {
            let mut bad = bytes.clone();
            bad[at] = byte;
            assert!(PageIndex::parse(&bad).is_err(), "byte {at}");
        }
        for short in 0..bytes.len() {
            assert!(PageIndex::parse(&bytes[..short]).is_err(), "{short}");
        }
    }

    proptest! {
        /// Whatever is read is what would be written, and nothing panics.
        #[test]
        fn garbage_is_refused_or_sound(
            mut bytes in prop::collection::vec(any::<u8>(), 0..200),
            small in prop::collection::vec(0u64..40, 0..24),
            honest in any::<bool>(),
        ) {
            if honest {
                bytes = index(&[]).encode();
                bytes[24] = (small.len() / 3) as u8;
                for run in small.chunks_exact(3) {
                    for word in [run[0], run[1], run[2] * PAGE / 2] {
                        bytes.extend_from_slice(&word.to_le_bytes());
                    }
                }
            }
            if let Ok(read) = PageIndex::parse(&bytes) {
                prop_assert_eq!(read.encode(), &*bytes);
                prop_assert!(bytes.len() >= HEADER);
                let mut last = 0;
                for run in &read.runs {
                    prop_assert!(run.first >= last && run.count > 0 && run.end() <= read.ram);
                    last = run.end();
                }
            }
        }
    }
}
