//! Replaces texts in a stream of bytes that arrives in chunks.
//!
//! Placeholders become values on the way out, values become placeholders again on the way in. A text may be split anywhere between two
//! pieces; what could be its beginning is held back until the next piece decides it. What is held
//! back is always a beginning of the text itself, so that a count is all there is to keep.
//!
//! The receiver may wait for what is held back when nothing follows it: a call whose last byte
//! happens to begin a value. So a few bytes may be released ([`StreamReplacer::release`]); they are
//! remembered, and if the rest follows it is covered. Whatever the pauses, no more than these few
//! first bytes of a value get through.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use hyper::HeaderMap;
use hyper::header::HeaderValue;
use zeroize::Zeroizing;

/// What a text is covered with.
const COVER: u8 = b'*';

/// A text and its replacement. Neither is ever shown: one of them is a secret.
#[derive(Clone)]
pub(super) struct Pair {
    from: Arc<Zeroizing<Vec<u8>>>,
    to: Arc<Zeroizing<Vec<u8>>>,
}

impl Pair {
    /// An empty text cannot be replaced.
    pub(super) fn new(from: &[u8], to: &[u8]) -> Option<Self> {
        let keep = |text: &[u8]| Arc::new(Zeroizing::new(text.to_vec()));
        (!from.is_empty()).then(|| Self { from: keep(from), to: keep(to) })
    }

    fn keeps_length(&self) -> bool {
        self.from.len() == self.to.len()
    }
}

impl fmt::Debug for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pair(..)")
    }
}

/// Several texts with their replacements.
#[derive(Debug, Clone, Default)]
pub(super) struct Replacements(Vec<Pair>);

impl Replacements {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a text is always as long afterwards as it was before.
    pub(super) fn keeps_length(&self) -> bool {
        self.0.iter().all(Pair::keeps_length)
    }

    /// Adds a pair, unless there is one for the same text. Longer texts go first: one may be a part of another.
    pub(super) fn add(&mut self, pair: Pair) {
        if self.0.iter().all(|known| known.from != pair.from) {
            let index = self.0.partition_point(|known| known.from.len() >= pair.from.len());
            self.0.insert(index, pair);
        }
    }

    /// The same texts, each replaced by as many asterisks: lengths do not change.
    pub(super) fn covered(&self) -> Self {
        let cover = |pair: &Pair| Pair::new(&pair.from, &vec![COVER; pair.from.len()]);
        self.0.iter().filter_map(cover).collect()
    }

    pub(super) fn extend(&mut self, other: &Self) {
        other.0.iter().for_each(|pair| self.add(pair.clone()));
    }

    /// A whole text, if anything in it was replaced.
    pub(super) fn whole(&self, text: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
        let mut stream = self.stream();
        let mut out = Zeroizing::new(stream.push(Bytes::copy_from_slice(text)).to_vec());
        out.extend_from_slice(&stream.finish());
        (stream.hits() > 0).then_some(out)
    }

    /// Replaces in the values of headers, or of trailers.
    pub(super) fn headers(&self, headers: &mut HeaderMap) {
        if self.is_empty() {
            return;
        }
        for value in headers.values_mut() {
            if let Some(swapped) = self.whole(value.as_bytes())
                && let Ok(swapped) = HeaderValue::from_bytes(&swapped)
            {
                *value = swapped;
            }
        }
    }

    /// Begins a text that comes in pieces.
    pub(super) fn stream(&self) -> StreamReplacer {
        StreamReplacer(self.0.iter().map(Replacer::new).collect())
    }
}

impl FromIterator<Pair> for Replacements {
    fn from_iter<T: IntoIterator<Item = Pair>>(pairs: T) -> Self {
        let mut swap = Self::default();
        pairs.into_iter().for_each(|pair| swap.add(pair));
        swap
    }
}

/// A text that comes in pieces.
#[derive(Debug)]
pub(super) struct StreamReplacer(Vec<Replacer>);

impl StreamReplacer {
    /// Takes the next piece, and returns what can be decided already. May be empty.
    pub(super) fn push(&mut self, piece: Bytes) -> Bytes {
        self.0.iter_mut().fold(piece, |piece, replacer| replacer.push(piece))
    }

    /// The text ends here: what was held back.
    pub(super) fn finish(&mut self) -> Bytes {
        let mut rest = Bytes::new();
        for replacer in &mut self.0 {
            let mut out = replacer.push(rest).to_vec();
            out.extend_from_slice(&replacer.pair.from[replacer.released..replacer.matched]);
            (replacer.matched, replacer.released) = (0, 0);
            rest = out.into();
        }
        rest
    }

    /// Whether something is held back.
    pub(super) fn holds(&self) -> bool {
        self.0.iter().any(|replacer| replacer.released < replacer.matched)
    }

    /// Whether something is held back that [`release`](Self::release) lets go.
    pub(super) fn may_release(&self) -> bool {
        self.0.iter().any(|replacer| replacer.released < replacer.matched && replacer.is_short())
    }

    /// Releases held beginnings that are so short that they reveal next to nothing.
    pub(super) fn release(&mut self) -> Bytes {
        let mut rest = Bytes::new();
        for replacer in &mut self.0 {
            let mut out = replacer.push(rest).to_vec();
            if replacer.is_short() {
                let from = std::mem::replace(&mut replacer.released, replacer.matched);
                out.extend_from_slice(&replacer.pair.from[from..replacer.matched]);
            }
            rest = out.into();
        }
        rest
    }

    /// How often something was replaced.
    pub(super) fn hits(&self) -> u64 {
        self.0.iter().map(|replacer| replacer.hits).sum()
    }
}

/// Replaces one text: Knuth, Morris and Pratt's search, whose state is the number of bytes held back.
#[derive(Debug)]
struct Replacer {
    pair: Pair,
    /// For each beginning of the text, how long a shorter beginning it ends with.
    shorter: Vec<usize>,
    matched: usize,
    /// How many of the matched bytes were released already.
    released: usize,
    hits: u64,
}

/// How many first bytes of a text may be released, and of short texts only a part.
const MOST_RELEASED: usize = 3;
const PART_RELEASED: usize = 4;

impl Replacer {
    fn new(pair: &Pair) -> Self {
        let text = &pair.from;
        let mut shorter = vec![0; text.len()];
        let mut length = 0;
        for index in 1..text.len() {
            while length > 0 && text[index] != text[length] {
                length = shorter[length - 1];
            }
            length += usize::from(text[index] == text[length]);
            shorter[index] = length;
        }
        Self { pair: pair.clone(), shorter, matched: 0, released: 0, hits: 0 }
    }

    fn is_short(&self) -> bool {
        self.matched <= MOST_RELEASED.min(self.pair.from.len() / PART_RELEASED)
    }

    fn push(&mut self, piece: Bytes) -> Bytes {
        let (text, first) = (&self.pair.from, self.pair.from[0]);
        if self.matched == 0 && !piece.contains(&first) {
            return piece;
        }
        let mut out = Vec::with_capacity(piece.len() + self.matched);
        let mut rest = &piece[..];
        while let Some((&byte, after)) = rest.split_first() {
            if self.matched == 0 {
                let skip = rest.iter().position(|byte| *byte == first).unwrap_or(rest.len());
                out.extend_from_slice(&rest[..skip]);
                rest = &rest[skip..];
                if !rest.is_empty() {
                    rest = &rest[1..];
                    self.matched = 1;
                }
            } else if byte == text[self.matched] {
                rest = after;
                self.matched += 1;
            } else {
                let shorter = self.shorter[self.matched - 1];
                let passed = self.matched - shorter;
                out.extend_from_slice(&text[self.released.min(passed)..passed]);
                self.released = self.released.saturating_sub(passed);
                self.matched = shorter;
            }
            if self.matched == text.len() {
                match self.released {
                    0 => out.extend_from_slice(&self.pair.to),
                    // It can no longer be replaced as a whole.
                    released => out.resize(out.len() + text.len() - released, COVER),
                }
                (self.matched, self.released) = (0, 0);
                self.hits += 1;
            }
        }
        out.into()
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::{Pair, Replacements};

    fn swap(pairs: &[(&str, &str)]) -> Replacements {
        pairs.iter().filter_map(|(a, b)| Pair::new(a.as_bytes(), b.as_bytes())).collect()
    }

    fn in_pieces(swap: &Replacements, text: &str, size: usize) -> String {
        let mut stream = swap.stream();
        let mut out = Vec::new();
        for piece in text.as_bytes().chunks(size) {
            out.extend_from_slice(&stream.push(Bytes::copy_from_slice(piece)));
        }
        out.extend_from_slice(&stream.finish());
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_text_is_found_wherever_it_is_split() {
        let swap = swap(&[("placeholder", "value"), ("aab", "X")]);
        for (text, wanted) in [
            ("", ""),
            ("placeholder", "value"),
            ("a placeholder and a placeholder", "a value and a value"),
            ("placeplaceholder", "placevalue"),
            ("placeholde", "placeholde"),
            ("aaab", "aX"),
            ("aaaabaab", "aaXX"),
            ("aaplaceholderb", "aavalueb"),
            ("plaaabceholder", "plaXceholder"),
        ] {
            for size in 1..=text.len().max(1) {
                assert_eq!(in_pieces(&swap, text, size), wanted, "{text} in {size}");
            }
        }
    }

    #[test]
    fn a_longer_text_goes_before_its_part() {
        assert_eq!(in_pieces(&swap(&[("key", "1"), ("keychain", "2")]), "key keychain", 3), "1 2");
    }

    #[test]
    fn nothing_is_held_back_that_cannot_be_the_text() {
        let mut stream = swap(&[("placeholder", "value")]).stream();
        assert_eq!(stream.push(Bytes::from_static(b"data: x\n\n")), "data: x\n\n");
        assert_eq!(stream.push(Bytes::from_static(b"a pla")), "a ");
        assert_eq!(stream.push(Bytes::from_static(b"te")), "plate");
        assert_eq!(stream.hits(), 0);
    }

    #[test]
    fn a_text_does_not_come_through_in_two_halves() {
        let swap = swap(&[("the-real-value", "placeholder"), ("realvalue", "X")]);
        for cut in 1..14 {
            let (head, tail) = "the-real-value".split_at(cut);
            let mut stream = swap.stream();
            let mut out = stream.push(Bytes::copy_from_slice(head.as_bytes())).to_vec();
            for _ in 0..3 {
                out.extend_from_slice(&stream.release());
                assert!(!stream.may_release());
            }
            assert!(out.len() <= 3, "{cut}: {out:?}");
            out.extend_from_slice(&stream.push(Bytes::copy_from_slice(tail.as_bytes())));
            out.extend_from_slice(&stream.finish());
            let wanted = match cut {
                1..=3 => format!("{head}{}", "*".repeat(14 - cut)),
                _ => "placeholder".to_owned(),
            };
            assert_eq!(String::from_utf8(out).unwrap(), wanted, "{cut}");
        }
    }

    #[test]
    fn what_was_let_go_is_not_told_twice() {
        let swap = swap(&[("aabaabaac", "X"), ("short", "Y")]);
        for (text, wanted) in [
            ("aabaabaad", "aabaabaad"),
            ("aabaabaabaac", "aabX"),
            ("aabaabaac", "aa*******"),
            ("sho", "sho"),
            ("short", "s****"),
        ] {
            let mut stream = swap.stream();
            let mut out = Vec::new();
            for byte in text.bytes() {
                out.extend_from_slice(&stream.push(Bytes::copy_from_slice(&[byte])));
                out.extend_from_slice(&stream.release());
            }
            out.extend_from_slice(&stream.finish());
            assert_eq!(String::from_utf8(out).unwrap(), wanted);
        }
    }

    #[test]
    fn nobody_is_shown_the_texts() {
        assert!(!format!("{:?}", swap(&[("hunter2", "swordfish")])).contains("hunter2"));
        let stream = swap(&[("hunter2", "swordfish")]).stream();
        assert!(!format!("{stream:?}").contains("swordfish"));
    }

    proptest! {
        /// However a text is cut, and wherever it pauses: as many bytes come out as went in, nothing but the texts changes, and
        /// of these no more than the first bytes are seen.
        #[test]
        fn pauses_do_not_matter(
            text in "[abc]{0,80}", from in "[ab]{8,12}", cuts in prop::collection::vec((1usize..9, any::<bool>()), 0..40),
        ) {
            let swap = swap(&[(&from, "")]).covered();
            let (mut stream, mut rest, mut out) = (swap.stream(), text.as_bytes(), Vec::new());
            for (cut, pause) in cuts {
                let (piece, after) = rest.split_at(cut.min(rest.len()));
                out.extend_from_slice(&stream.push(Bytes::copy_from_slice(piece)));
                if pause {
                    out.extend_from_slice(&stream.release());
                }
                rest = after;
            }
            out.extend_from_slice(&stream.push(Bytes::copy_from_slice(rest)));
            out.extend_from_slice(&stream.finish());
            prop_assert_eq!(out.len(), text.len());
            let mut at = 0;
            while at < text.len() {
                if text[at..].starts_with(&from) {
                    let seen = &out[at + 3..at + from.len()];
                    prop_assert!(seen.iter().all(|byte| *byte == b'*'), "{} {:?}", text, out);
                    at += from.len();
                } else {
                    prop_assert_eq!(out[at], text.as_bytes()[at]);
                    at += 1;
                }
            }
        }

        #[test]
        fn it_does_what_replacing_at_once_does(
            text in "[ab]{0,60}", from in "[ab]{1,5}", to in "[abc]{0,6}", size in 1usize..9,
        ) {
            let wanted = text.replace(&from, &to);
            prop_assert_eq!(in_pieces(&swap(&[(&from, &to)]), &text, size), wanted);
        }
    }
}
