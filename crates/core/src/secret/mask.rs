//! Masks secret values in the output of commands, byte for byte, so that every offset stays true.
//!
//! A [`Mask`] is the set of what is to be masked, as one automaton (Aho and Corasick's). A [`Masker`] is
//! where one command's two streams stand in it. Output arrives in pieces of any size, so a value may be
//! cut anywhere:
//!
//! - A tail that begins a value is held back until it is clear what it becomes, from [`HELD`] bytes on. A
//!   shorter one is released; where the stream stands is kept, so what follows is masked all the
//!   same.
//! - Nothing overtakes. The order of both streams together is what output is numbered by; what comes after
//!   a tail that is held, on whichever stream, waits behind it.
//! - Readers do not wait for long. At the caller's request ([`Masker::decide`]) what is held is
//!   released: as it is when it is at most half of a value, masked when it is more.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use aho_corasick::automaton::{Automaton as _, StateID};
use aho_corasick::nfa::noncontiguous::NFA;
use aho_corasick::{Anchored, MatchKind};
use zeroize::Zeroizing;

use crate::model::secret_forms;

/// From how many bytes on a tail is held back.
const HELD: usize = 4;

/// What is to be masked.
pub struct Mask {
    automaton: NFA,
    start: StateID,
    /// For each state how much of which form has been seen.
    seen: Vec<MatchedPrefix>,
    forms: Vec<Zeroizing<Vec<u8>>>,
}

#[derive(Clone, Copy, Default)]
struct MatchedPrefix {
    /// How many bytes of a form.
    bytes: usize,
    /// The shortest form that begins with them.
    form: usize,
}

impl fmt::Debug for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mask of {} forms", self.forms.len())
    }
}

impl Mask {
    /// A mask of these values in all their [forms](secret_forms); `None` when there is nothing to mask.
    #[must_use]
    pub fn new<'a>(values: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        let mut forms: Vec<_> = values.into_iter().flat_map(secret_forms).collect();
        forms.sort_by(|a, b| (a.len(), a.as_slice()).cmp(&(b.len(), b.as_slice())));
        forms.dedup();
        if forms.is_empty() {
            return None;
        }
        let mut builder = NFA::builder();
        builder.match_kind(MatchKind::Standard).prefilter(false);
        // It has room for billions of states, and values have a limit.
        let automaton = builder.build(forms.iter().map(|form| form.as_slice())).ok()?;
        let start = automaton.start_state(Anchored::No).ok()?;
        let mut seen = Vec::new();
        for (number, form) in forms.iter().enumerate() {
            let mut state = start;
            for (at, byte) in form.iter().enumerate() {
                state = automaton.next_state(Anchored::No, state, *byte);
                if seen.len() <= state.as_usize() {
                    seen.resize(state.as_usize() + 1, MatchedPrefix::default());
                }
                let place = &mut seen[state.as_usize()];
                // Shorter forms come first, and theirs stands.
                if place.bytes == 0 {
                    *place = MatchedPrefix { bytes: at + 1, form: number };
                }
            }
        }
        Some(Self { automaton, start, seen, forms })
    }

    fn seen(&self, state: StateID) -> MatchedPrefix {
        self.seen.get(state.as_usize()).copied().unwrap_or_default()
    }

    /// The longest form that ends here.
    fn ends(&self, state: StateID) -> Option<usize> {
        if !self.automaton.is_match(state) {
            return None;
        }
        (0..self.automaton.match_len(state))
            .map(|index| self.automaton.pattern_len(self.automaton.match_pattern(state, index)))
            .max()
    }
}
/// Which of its two streams a command prints to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // each is what it says
pub enum MaskedStream {
    Out,
    Err,
}

/// Where one command's output stands.
#[derive(Debug)]
pub struct Masker {
    mask: Arc<Mask>,
    places: [StreamPosition; 2],
    /// What was not released, in the order it came.
    waiting: VecDeque<HeldPiece>,
}

/// Where one stream stands. Positions are counted in bytes of the stream.
#[derive(Debug)]
struct StreamPosition {
    state: StateID,
    /// So much has come.
    at: u64,
    /// What is before this is not held any more, whatever it becomes.
    decided: u64,
    /// The last stretch without a gap that was masked.
    masked: (u64, u64),
}

#[derive(Debug)]
struct HeldPiece {
    side: MaskedStream,
    start: u64,
    bytes: Vec<u8>,
}

impl Masker {
    /// A masker of a command that has printed nothing yet.
    #[must_use]
    pub fn new(mask: Arc<Mask>) -> Self {
        let place = || StreamPosition { state: mask.start, at: 0, decided: 0, masked: (0, 0) };
        Self { places: [place(), place()], waiting: VecDeque::new(), mask }
    }

    /// Takes note of what was printed and released before.
    pub fn recall(&mut self, side: MaskedStream, bytes: &[u8]) {
        let place = &mut self.places[side as usize];
        for byte in bytes {
            place.state = self.mask.automaton.next_state(Anchored::No, place.state, *byte);
        }
        place.at += bytes.len() as u64;
        place.decided = place.at;
    }

    /// Continues with another mask.
    pub fn renew(&mut self, mask: &Arc<Mask>) {
        if Arc::ptr_eq(mask, &self.mask) {
            return;
        }
        for place in &mut self.places {
            // All that matters of what came before is that it is the beginning of this form.
            let MatchedPrefix { bytes, form } = self.mask.seen(place.state);
            place.state = mask.start;
            for byte in self.mask.forms.get(form).map_or(&[][..], |form| &form[..bytes]) {
                place.state = mask.automaton.next_state(Anchored::No, place.state, *byte);
            }
        }
        self.mask = Arc::clone(mask);
    }

    /// Takes what was printed.
    pub fn push(&mut self, side: MaskedStream, bytes: &[u8]) {
        let start = self.places[side as usize].at;
        self.waiting.push_back(HeldPiece { side, start, bytes: bytes.to_vec() });
        for byte in bytes {
            let place = &mut self.places[side as usize];
            place.state = self.mask.automaton.next_state(Anchored::No, place.state, *byte);
            place.at += 1;
            if let Some(length) = self.mask.ends(place.state) {
                let (from, to) = (place.at.saturating_sub(length as u64), place.at);
                self.cover(side, from, to);
            }
        }
    }

    /// The next piece that may go.
    pub fn pop(&mut self) -> Option<(MaskedStream, Vec<u8>)> {
        let front = self.waiting.front_mut()?;
        let free = self.places[front.side as usize].free(&self.mask).checked_sub(front.start)?;
        let free = usize::try_from(free).unwrap_or(usize::MAX);
        let side = front.side;
        if free >= front.bytes.len() {
            return self.waiting.pop_front().map(|piece| (side, piece.bytes));
        }
        if free == 0 {
            return None;
        }
        front.start += free as u64;
        Some((side, front.bytes.drain(..free).collect()))
    }

    /// Holds nothing any longer of what came so far.
    pub fn decide(&mut self) {
        for side in [MaskedStream::Out, MaskedStream::Err] {
            let place = &self.places[side as usize];
            let (from, to) = (place.free(&self.mask), place.at);
            let MatchedPrefix { bytes, form } = self.mask.seen(place.state);
            let whole = self.mask.forms.get(form).map_or(0, |form| form.len());
            if from < to && bytes * 2 > whole {
                self.cover(side, from, to);
            }
            self.places[side as usize].decided = to;
        }
    }

    /// How many bytes wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.iter().map(|piece| piece.bytes.len()).sum()
    }

    fn cover(&mut self, side: MaskedStream, from: u64, to: u64) {
        for piece in self.waiting.iter_mut().rev().filter(|piece| piece.side == side) {
            let end = piece.start + piece.bytes.len() as u64;
            if end <= from {
                break;
            }
            let within = |at: u64| usize::try_from(at.clamp(piece.start, end) - piece.start);
            if let (Ok(from), Ok(to)) = (within(from), within(to)) {
                piece.bytes[from..to].fill(b'*');
            }
        }
        let masked = &mut self.places[side as usize].masked;
        *masked = (if from <= masked.1 { masked.0.min(from) } else { from }, to);
    }
}

impl StreamPosition {
    /// What is before this may go: no value can begin there any more that would still have to be masked.
    fn free(&self, mask: &Mask) -> u64 {
        let seen = mask.seen(self.state).bytes;
        if seen < HELD {
            return self.at;
        }
        let tail = self.at.saturating_sub(seen as u64);
        let (from, to) = self.masked;
        let tail = if from <= tail && to > tail { to } else { tail };
        tail.max(self.decided)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::{Mask, MaskedStream, Masker};

    fn masker(values: &[&str]) -> Masker {
        Masker::new(Arc::new(Mask::new(values.iter().copied()).unwrap()))
    }

    /// What comes out now, both streams in one text.
    fn out(masker: &mut Masker) -> String {
        let mut text = Vec::new();
        while let Some((_, bytes)) = masker.pop() {
            text.extend(bytes);
        }
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn values_go_whole_or_in_pieces() {
        let mut m = masker(&["hunter2hunter2"]);
        m.push(MaskedStream::Out, b"it is hunter2hunter2!\n");
        assert_eq!(out(&mut m), "it is **************!\n");
        for cut in 1..14 {
            let (head, tail) = "hunter2hunter2".split_at(cut);
            m.push(MaskedStream::Out, head.as_bytes());
            let first = out(&mut m);
            assert_eq!(first, if cut < 4 { head } else { "" });
            m.push(MaskedStream::Out, tail.as_bytes());
            assert_eq!(out(&mut m), "*".repeat(14 - first.len()), "{cut}");
            // The second half of this value begins another: a line's end parts them.
            m.push(MaskedStream::Out, b"\n");
            assert_eq!(out(&mut m), "\n");
        }
        // A value at the very end waits for nothing.
        assert_eq!(m.waiting(), 0);
        m.push(MaskedStream::Out, b"aHVudGVyMmh1bnRlcjI=");
        assert_eq!(out(&mut m), "******************I=");
    }

    #[test]
    fn a_beginning_that_becomes_nothing_is_let_go() {
        let mut m = masker(&["hunter2hunter2"]);
        m.push(MaskedStream::Out, b"the hunter");
        assert_eq!((out(&mut m).as_str(), m.waiting()), ("the ", 6));
        m.push(MaskedStream::Out, b"s came");
        assert_eq!(out(&mut m), "hunters came");
    }

    #[test]
    fn streams_are_told_apart_and_keep_their_order() {
        let mut m = masker(&["hunter2hunter2"]);
        m.push(MaskedStream::Out, b"hunter2");
        m.push(MaskedStream::Err, b"hunter2hunter2 ");
        m.push(MaskedStream::Err, b"warning ");
        assert_eq!(out(&mut m), "", "nothing overtakes");
        m.push(MaskedStream::Out, b"hunter2");
        let mut pieces = Vec::new();
        while let Some(piece) = m.pop() {
            pieces.push(piece);
        }
        let stars = |n: usize| "*".repeat(n).into_bytes();
        assert_eq!(pieces[0], (MaskedStream::Out, stars(7)));
        assert_eq!(pieces[1], (MaskedStream::Err, [stars(14), b" ".to_vec()].concat()));
        assert_eq!(pieces[2], (MaskedStream::Err, b"warning ".to_vec()));
        assert_eq!(pieces[3], (MaskedStream::Out, stars(7)));
    }

    #[test]
    fn what_waits_too_long_goes_and_the_rest_is_still_masked() {
        let mut m = masker(&["hunter2hunter2"]);
        m.push(MaskedStream::Out, b"hunter");
        m.decide();
        assert_eq!(out(&mut m), "hunter", "less than half");
        m.push(MaskedStream::Out, b"2hunter2");
        assert_eq!(out(&mut m), "********");
        m.push(MaskedStream::Out, b"hunter2hunter");
        m.decide();
        assert_eq!(out(&mut m), "*************", "more than half");
        m.push(MaskedStream::Out, b"2");
        assert_eq!(out(&mut m), "*");
        m.push(MaskedStream::Out, b"\n");
        assert_eq!(out(&mut m), "\n");
        // One byte at a time, each waited for: no more than half is seen.
        let slowly: String = "hunter2hunter2"
            .bytes()
            .map(|byte| {
                m.push(MaskedStream::Out, &[byte]);
                m.decide();
                out(&mut m)
            })
            .collect();
        assert_eq!(slowly, "hunter2*******");
    }

    #[test]
    fn values_in_values() {
        let mut m = masker(&["secret", "my-secret-thing"]);
        m.push(MaskedStream::Out, b"my-secret-th");
        assert_eq!(out(&mut m), "", "the longer one may still come");
        m.push(MaskedStream::Out, b"ing");
        assert_eq!(out(&mut m), "***************");
        m.push(MaskedStream::Out, b"my-secret-thought");
        assert_eq!(out(&mut m), "my-******-thought");
    }

    #[test]
    fn another_mask_takes_over_in_the_middle_of_a_value() {
        let mut m = masker(&["hunter2hunter2"]);
        m.push(MaskedStream::Out, b"hu");
        assert_eq!(out(&mut m), "hu");
        m.renew(&Arc::new(Mask::new(["hunter2hunter2", "another value"]).unwrap()));
        m.push(MaskedStream::Out, b"nter2hunter2 another val");
        assert_eq!(out(&mut m), "************ ");
        m.push(MaskedStream::Out, b"ue");
        assert_eq!(out(&mut m), "*************");
        let mut later = masker(&["hunter2hunter2"]);
        later.recall(MaskedStream::Out, b"... hun");
        later.push(MaskedStream::Out, b"ter2hunter2");
        assert_eq!(out(&mut later), "***********");
    }

    proptest! {
        /// However output is cut, as many bytes come out as went in, what is no value is untouched, and of
        /// a value at most the first three bytes are seen.
        #[test]
        fn cuts_do_not_matter(
            values in prop::collection::vec("[ab]{6,9}", 1..4),
            text in "[abc]{0,200}",
            cuts in prop::collection::vec(1usize..9, 0..60),
        ) {
            let mask = Arc::new(Mask::new(values.iter().map(String::as_str)).unwrap());
            let mut masker = Masker::new(Arc::clone(&mask));
            let (mut rest, mut printed) = (text.as_bytes(), String::new());
            for cut in cuts.into_iter().chain([usize::MAX]) {
                let (piece, after) = rest.split_at(cut.min(rest.len()));
                masker.push(MaskedStream::Out, piece);
                printed.push_str(&out(&mut masker));
                rest = after;
            }
            // A byte that no form continues with, so that nothing is left to be decided.
            masker.push(MaskedStream::Out, b"\n");
            printed.push_str(&out(&mut masker));
            prop_assert_eq!(printed.len(), text.len() + 1);
            let mut within = vec![false; text.len()];
            for form in &mask.forms {
                for at in 0..text.len().saturating_sub(form.len() - 1) {
                    if text.as_bytes()[at..].starts_with(form) {
                        within[at..at + form.len()].fill(true);
                        let seen = &printed.as_bytes()[at + 3..at + form.len()];
                        prop_assert!(seen.iter().all(|byte| *byte == b'*'), "{} {}", text, printed);
                    }
                }
            }
            for (at, within) in within.iter().enumerate() {
                prop_assert!(*within || printed.as_bytes()[at] == text.as_bytes()[at]);
            }
        }
    }
}
