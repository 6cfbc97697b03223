//! What is searched for: values, and their common encodings.
//!
//! A value has several *forms*: as it is, as a JSON string, percent-encoded, in hexadecimal, and in
//! base64, where it looks different for each of the three places it may have in a group. Encoders
//! break lines, indent and escape, so a form is not looked for whole: the automaton looks for one or
//! two *pieces* of it that fit on a line, and where it finds one, the rest of the form is compared to
//! both sides, white space aside. Most of the form must be there for a hit, so that two values that
//! begin alike are distinguished.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;

use aho_corasick::{AhoCorasick, AhoCorasickKind};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use zeroize::Zeroizing;

use crate::model::Encoding;

/// What is shorter would be found everywhere, and is not looked for.
const SHORTEST: usize = 4;
/// What is shorter is looked for only as it is.
const SHORTEST_ENCODED: usize = 6;
/// A piece is no longer, so that it fits on the lines of all common encoders.
const LONGEST_PIECE: usize = 60;
/// A piece of less could be there by chance.
const SHORTEST_PIECE: usize = 10;
/// How much white space may lie between two characters.
const LONGEST_GAP: usize = 64;

/// Named values, ready to be searched for.
pub struct Needles {
    names: Vec<String>,
    forms: Vec<NeedleForm>,
    pieces: Vec<NeedlePiece>,
    automaton: Option<AhoCorasick>,
    longest_piece: usize,
    reach: usize,
}

struct NeedleForm {
    secret: usize,
    encoding: Encoding,
    text: Zeroizing<Vec<u8>>,
    /// How many of its characters are not white space.
    weight: usize,
}

struct NeedlePiece {
    form: usize,
    at: Range<usize>,
}

/// A value that was found.
#[derive(Debug, Clone)]
pub(super) struct Hit {
    pub(super) secret: usize,
    pub(super) encoding: Encoding,
    /// The places that hold it, in order: all of them but for white space in between.
    pub(super) runs: Vec<Range<usize>>,
}

impl fmt::Debug for Needles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Needles").field("names", &self.names).finish_non_exhaustive()
    }
}

impl Needles {
    /// Prepares to look for `secrets`, each a name and a value.
    #[must_use]
    pub fn new(secrets: &[(String, Zeroizing<String>)]) -> Self {
        let mut needles = Self {
            names: secrets.iter().map(|(name, _)| name.clone()).collect(),
            forms: Vec::new(),
            pieces: Vec::new(),
            automaton: None,
            longest_piece: 0,
            reach: 0,
        };
        for (secret, (_, value)) in secrets.iter().enumerate() {
            needles.add(secret, value.trim().as_bytes());
        }
        let pieces = needles.pieces.iter().map(|piece| needles.text_of(piece));
        // A table of states: memory for speed. It grows with the values, which are few and short.
        let built = AhoCorasick::builder().kind(Some(AhoCorasickKind::DFA)).build(pieces);
        needles.automaton = built.ok().filter(|_| !needles.pieces.is_empty());
        needles
    }

    /// Whether there is nothing to look for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.automaton.is_none()
    }

    /// The name of a secret that was found.
    pub(super) fn name(&self, secret: usize) -> &str {
        &self.names[secret]
    }

    /// How many secrets there are.
    pub(super) fn count(&self) -> usize {
        self.names.len()
    }

    /// How far a form may stretch to either side of a piece of it.
    pub(super) fn reach(&self) -> usize {
        self.reach
    }

    /// Calls `each` with what is in `hay` and begins, or rather has the piece it was found by, in
    /// `within`.
    pub(super) fn find(&self, hay: &[u8], within: Range<usize>, mut each: impl FnMut(Hit)) {
        let Some(automaton) = &self.automaton else { return };
        let end = hay.len().min(within.end + self.longest_piece);
        for found in automaton.find_overlapping_iter(&hay[within.start..end]) {
            let at = within.start + found.start();
            if at >= within.end {
                continue;
            }
            let piece = &self.pieces[found.pattern().as_usize()];
            let form = &self.forms[piece.form];
            let (matched, runs) = extent(&form.text, &piece.at, hay, at);
            if matched * 4 >= form.weight * 3 {
                each(Hit { secret: form.secret, encoding: form.encoding, runs });
            }
        }
    }

    /// Bytes with every value in them overwritten.
    #[must_use]
    pub fn mask(&self, bytes: &[u8]) -> Vec<u8> {
        let mut masked = bytes.to_vec();
        self.find(bytes, 0..bytes.len(), |hit| {
            for run in hit.runs {
                masked[run].fill(b'*');
            }
        });
        masked
    }

    fn text_of(&self, piece: &NeedlePiece) -> &[u8] {
        &self.forms[piece.form].text[piece.at.clone()]
    }

    fn add(&mut self, secret: usize, value: &[u8]) {
        if value.len() < SHORTEST {
            return;
        }
        let mut seen = HashSet::new();
        for (encoding, text) in forms_of(value) {
            if seen.insert(text.to_vec()) {
                self.add_form(secret, encoding, text);
            }
        }
    }

    fn add_form(&mut self, secret: usize, encoding: Encoding, text: Zeroizing<Vec<u8>>) {
        let wraps = matches!(encoding, Encoding::Base64 | Encoding::Hex);
        let form = self.forms.len();
        for at in pieces_of(&text, wraps) {
            self.longest_piece = self.longest_piece.max(at.len());
            self.pieces.push(NeedlePiece { form, at });
        }
        // Lines of sixty, each indented, is as thin as a form is drawn.
        self.reach = self.reach.max(text.len() * 2 + LONGEST_GAP);
        let weight = text.iter().filter(|byte| !byte.is_ascii_whitespace()).count();
        self.forms.push(NeedleForm { secret, encoding, text, weight });
    }
}

/// The ways to write a value.
fn forms_of(value: &[u8]) -> Vec<(Encoding, Zeroizing<Vec<u8>>)> {
    let mut forms = vec![(Encoding::Plain, Zeroizing::new(value.to_vec()))];
    if let Ok(text) = std::str::from_utf8(value)
        && let Ok(quoted) = serde_json::to_vec(text)
    {
        let inner = quoted[1..quoted.len() - 1].to_vec();
        forms.push((Encoding::Json, Zeroizing::new(inner)));
    }
    for keep in [&b"-_.~"[..], b"-_.~!'()*", b"-_.~!'()*;,/?:@&=+$#"] {
        for lower in [false, true] {
            for plus in [false, true] {
                forms.push((Encoding::Url, percent(value, keep, lower, plus)));
            }
        }
    }
    if value.len() < SHORTEST_ENCODED {
        return forms;
    }
    let lower: Vec<u8> = value.iter().flat_map(|byte| hex_of(*byte, true)).collect();
    forms.push((Encoding::Hex, Zeroizing::new(lower.to_ascii_uppercase())));
    forms.push((Encoding::Hex, Zeroizing::new(lower)));
    for before in 0..3 {
        let mut padded = Zeroizing::new(vec![0u8; before]);
        padded.extend_from_slice(value);
        // Characters that also depend on what is before and after are not part of the form.
        let known = (before * 8).div_ceil(6)..padded.len() * 8 / 6;
        for text in [STANDARD_NO_PAD.encode(&*padded), URL_SAFE_NO_PAD.encode(&*padded)] {
            let text = Zeroizing::new(text);
            forms.push((Encoding::Base64, Zeroizing::new(text.as_bytes()[known.clone()].to_vec())));
        }
    }
    forms
}

fn percent(value: &[u8], keep: &[u8], lower: bool, plus: bool) -> Zeroizing<Vec<u8>> {
    let mut text = Zeroizing::new(Vec::with_capacity(value.len() * 3));
    for byte in value {
        match byte {
            b' ' if plus => text.push(b'+'),
            byte if byte.is_ascii_alphanumeric() || keep.contains(byte) => text.push(*byte),
            byte => {
                text.push(b'%');
                text.extend(hex_of(*byte, lower));
            }
        }
    }
    text
}

fn hex_of(byte: u8, lower: bool) -> [u8; 2] {
    let digits = if lower { b"0123456789abcdef" } else { b"0123456789ABCDEF" };
    [digits[usize::from(byte >> 4)], digits[usize::from(byte & 15)]]
}

/// What of a form the automaton looks for.
fn pieces_of(text: &[u8], wraps: bool) -> Vec<Range<usize>> {
    if !wraps {
        return vec![middle(text, &line_to_look_for(text))];
    }
    let window = middle(text, &(0..text.len()));
    if window.len() < 2 * SHORTEST_PIECE {
        return vec![window];
    }
    // At most one line ends in the window, so one of its halves is whole.
    let half = window.start + window.len() / 2;
    vec![window.start..half, half..window.end]
}

/// At most [`LONGEST_PIECE`] in the middle of a range: the ends of keys are alike, headers and padding.
fn middle(text: &[u8], range: &Range<usize>) -> Range<usize> {
    debug_assert!(range.end <= text.len());
    let spare = range.len().saturating_sub(LONGEST_PIECE);
    let start = range.start + spare / 2;
    start..start + range.len() - spare
}

/// The whole of a value of one line; of several, the longest line, and of those the one nearest to the
/// middle.
fn line_to_look_for(text: &[u8]) -> Range<usize> {
    let mut best = 0..0;
    let mut start = 0;
    for line in text.split(|byte| matches!(byte, b'\n' | b'\r')) {
        let range = start..start + line.len();
        let off = |range: &Range<usize>| (range.start + range.end).abs_diff(text.len());
        if (range.len(), off(&best)) > (best.len(), off(&range)) {
            best = range.clone();
        }
        start = range.end + 1;
    }
    best
}

/// Compares `form` with `hay` to both sides of the piece that is at `at` in the hay: how much of it is
/// there, and where.
fn extent(form: &[u8], piece: &Range<usize>, hay: &[u8], at: usize) -> (usize, Vec<Range<usize>>) {
    let mut places: Vec<usize> = Vec::with_capacity(form.len());
    let (mut here, mut there) = (piece.start, at);
    let mut gap = 0;
    while here > 0 && there > 0 && gap <= LONGEST_GAP {
        if form[here - 1].is_ascii_whitespace() {
            here -= 1;
        } else if hay[there - 1] == form[here - 1] {
            (here, there, gap) = (here - 1, there - 1, 0);
            places.push(there);
        } else {
            let space = space_before(&hay[..there]);
            if space == 0 {
                break;
            }
            (there, gap) = (there - space, gap + space);
        }
    }
    places.reverse();
    let filled = |range: Range<usize>| range.map(|n| at + n - piece.start);
    places.extend(filled(piece.clone()).filter(|n| !hay[*n].is_ascii_whitespace()));
    let (mut here, mut there) = (piece.end, at + piece.len());
    gap = 0;
    while here < form.len() && there < hay.len() && gap <= LONGEST_GAP {
        if form[here].is_ascii_whitespace() {
            here += 1;
        } else if hay[there] == form[here] {
            places.push(there);
            (here, there, gap) = (here + 1, there + 1, 0);
        } else {
            let space = space_after(&hay[there..]);
            if space == 0 {
                break;
            }
            (there, gap) = (there + space, gap + space);
        }
    }
    (places.len(), runs(&places))
}

/// White space, or the way JSON and shells write a line's end.
fn space_before(text: &[u8]) -> usize {
    match text {
        [.., byte] if byte.is_ascii_whitespace() => 1,
        [.., b'\\', b'n' | b'r' | b't'] => 2,
        _ => 0,
    }
}

fn space_after(text: &[u8]) -> usize {
    match text {
        [byte, ..] if byte.is_ascii_whitespace() => 1,
        [b'\\', b'n' | b'r' | b't', ..] => 2,
        _ => 0,
    }
}

fn runs(places: &[usize]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for place in places {
        match runs.last_mut() {
            Some(last) if last.end == *place => last.end += 1,
            _ => runs.push(*place..place + 1),
        }
    }
    runs
}
