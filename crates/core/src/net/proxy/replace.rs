//! Replaces texts in a stream of bytes that arrives in chunks.
//!
//! Placeholders become values on the way out, values become placeholders again on the way in. A text may be split anywhere between two
//! pieces; what could be its beginning is held back until the next piece tells. What is held back is always a beginning of
//! the text itself, so that a count is all there is to keep.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use hyper::HeaderMap;
use hyper::header::HeaderValue;
use zeroize::Zeroizing;

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
        let cover = |pair: &Pair| Pair::new(&pair.from, &vec![b'*'; pair.from.len()]);
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
    /// The next piece, and what of it can already be told. May be empty.
    pub(super) fn push(&mut self, piece: Bytes) -> Bytes {
        self.0.iter_mut().fold(piece, |piece, replacer| replacer.push(piece))
    }

    /// The text ends here: what was held back.
    pub(super) fn finish(&mut self) -> Bytes {
        let mut rest = Bytes::new();
        for replacer in &mut self.0 {
            let mut out = replacer.push(rest).to_vec();
            out.extend_from_slice(&replacer.pair.from[..replacer.matched]);
            replacer.matched = 0;
            rest = out.into();
        }
        rest
    }

    /// Whether something is held back that may be the beginning of a text.
    pub(super) fn holds(&self) -> bool {
        self.0.iter().any(|replacer| replacer.matched > 0)
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
    hits: u64,
}

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
        Self { pair: pair.clone(), shorter, matched: 0, hits: 0 }
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
                out.extend_from_slice(&text[..self.matched - shorter]);
                self.matched = shorter;
            }
            if self.matched == text.len() {
                out.extend_from_slice(&self.pair.to);
                self.matched = 0;
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
    fn nobody_is_shown_the_texts() {
        assert!(!format!("{:?}", swap(&[("hunter2", "swordfish")])).contains("hunter2"));
        let stream = swap(&[("hunter2", "swordfish")]).stream();
        assert!(!format!("{stream:?}").contains("swordfish"));
    }

    proptest! {
        #[test]
        fn it_does_what_replacing_at_once_does(
            text in "[ab]{0,60}", from in "[ab]{1,5}", to in "[abc]{0,6}", size in 1usize..9,
        ) {
            let wanted = text.replace(&from, &to);
            prop_assert_eq!(in_pieces(&swap(&[(&from, &to)]), &text, size), wanted);
        }
    }
}
