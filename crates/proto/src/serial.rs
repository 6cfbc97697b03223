//! How connections of the agent link go through a serial port.
//!
//! A port is one pair of byte streams for as long as the machine lives, and longer: a machine that is restored from memory
//! resumes in the middle of a byte stream whose other end is gone. So both sides mark where a
//! connection begins.
//!
//! ```text
//! A5 00           the byte A5
//! A5 01 nonce     a connection begins; 16 bytes, none of them A5, not all zero
//! A5 01 zeros     no connection: what was is over
//! ```
//!
//! The host sends `A5 01 nonce` when it has connected. The agent then drops the connection it had,
//! starts another and sends the same, with the same nonce, before anything else; the host drops all
//! bytes before that. A host that gets no answer sends it again. All other bytes are those of the
//! link as on a socket.
//!
//! A5 always begins such a mark, wherever it stands: either side may have been cut off in the middle of anything. What is
//! no mark, and all that follows it, is dropped until the next connection begins.

/// The byte that begins a mark.
pub const ESCAPE: u8 = 0xa5;
const LITERAL: u8 = 0;
const BEGIN: u8 = 1;

/// What a connection is known by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nonce([u8; Nonce::LENGTH]);

impl Nonce {
    const LENGTH: usize = 16;

    /// Says that there is no connection.
    pub const NONE: Self = Self([0; Self::LENGTH]);

    /// Makes a nonce of random bytes.
    #[must_use]
    pub fn new(random: [u8; 16]) -> Self {
        let mut bytes = random.map(|byte| if byte == ESCAPE { !ESCAPE } else { byte });
        if bytes == [0; Self::LENGTH] {
            bytes[0] = 1;
        }
        Self(bytes)
    }

    /// The mark with which this connection begins.
    #[must_use]
    pub fn mark(&self) -> [u8; 18] {
        let mut mark = [0; 18];
        mark[0] = ESCAPE;
        mark[1] = BEGIN;
        mark[2..].copy_from_slice(&self.0);
        mark
    }
}

/// Cuts bytes of the link into pieces that, one after the other, are what goes through the port.
pub fn escaped(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes
        .split_inclusive(|byte| *byte == ESCAPE)
        .flat_map(|piece| [piece, if piece.ends_with(&[ESCAPE]) { &[LITERAL][..] } else { &[] }])
        .filter(|piece| !piece.is_empty())
}

/// What came out of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Heard<'a> {
    /// Bytes of the connection that began last.
    Bytes(&'a [u8]),
    /// Another begins, or, with [`Nonce::NONE`], the one that was is over.
    Begin(Nonce),
}

/// Reads what comes out of a port, however it is cut.
#[derive(Debug, Clone)]
pub struct Decoder {
    state: State,
    /// Whether a connection has begun and nothing was broken since.
    whole: bool,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Plain,
    Escape,
    Nonce { bytes: [u8; Nonce::LENGTH], known: usize },
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new()
    }
}

impl Decoder {
    /// Starts before any connection: bytes are dropped until one begins.
    #[must_use]
    pub fn new() -> Self {
        Self { state: State::Plain, whole: false }
    }

    /// Takes bytes off the front of `input` until there is something to say; nothing when all were taken.
    pub fn next<'a>(&mut self, input: &mut &'a [u8]) -> Option<Heard<'a>> {
        while let Some((&byte, rest)) = input.split_first() {
            match self.state {
                State::Plain => {
                    let length = input.iter().position(|byte| *byte == ESCAPE);
                    let (bytes, rest) = input.split_at(length.unwrap_or(input.len()));
                    if let Some((_, rest)) = rest.split_first() {
                        self.state = State::Escape;
                        *input = rest;
                    } else {
                        *input = rest;
                    }
                    if self.whole && !bytes.is_empty() {
                        return Some(Heard::Bytes(bytes));
                    }
                }
                State::Escape => {
                    *input = rest;
                    if byte == LITERAL {
                        self.state = State::Plain;
                        if self.whole {
                            return Some(Heard::Bytes(&[ESCAPE]));
                        }
                    } else {
                        self.marked(byte);
                    }
                }
                State::Nonce { mut bytes, known } => {
                    *input = rest;
                    if byte == ESCAPE {
                        self.state = State::Escape;
                        continue;
                    }
                    bytes[known] = byte;
                    if known + 1 < bytes.len() {
                        self.state = State::Nonce { bytes, known: known + 1 };
                        continue;
                    }
                    let nonce = Nonce(bytes);
                    self.state = State::Plain;
                    self.whole = nonce != Nonce::NONE;
                    return Some(Heard::Begin(nonce));
                }
            }
        }
        None
    }

    /// What follows an escape and is no literal one ends the connection.
    fn marked(&mut self, byte: u8) {
        self.whole = false;
        self.state = match byte {
            BEGIN => State::Nonce { bytes: [0; Nonce::LENGTH], known: 0 },
            ESCAPE => State::Escape,
            _ => State::Plain,
        };
    }

    /// Drops what comes until the next connection begins.
    pub fn give_up(&mut self) {
        self.whole = false;
    }

    /// Whether there is no connection, nor the beginning of the mark of one.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        !self.whole && !matches!(self.state, State::Nonce { .. })
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{Just, ProptestConfig, Strategy, any, prop_oneof, proptest};

    use super::{Decoder, ESCAPE, Heard, Nonce, escaped};

    /// What a decoder says to bytes that come in pieces: the connections that began, each with its bytes.
    fn hear<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Vec<(Nonce, Vec<u8>)> {
        let mut decoder = Decoder::new();
        let mut heard: Vec<(Nonce, Vec<u8>)> = Vec::new();
        for mut piece in pieces {
            while let Some(news) = decoder.next(&mut piece) {
                match news {
                    Heard::Begin(nonce) => heard.push((nonce, Vec::new())),
                    Heard::Bytes(bytes) => {
                        assert!(!bytes.is_empty());
                        heard.last_mut().expect("a connection").1.extend_from_slice(bytes);
                    }
                }
            }
            assert!(piece.is_empty());
        }
        heard
    }

    fn sent(nonce: Nonce, bytes: &[u8]) -> Vec<u8> {
        let mut out = nonce.mark().to_vec();
        escaped(bytes).for_each(|piece| out.extend_from_slice(piece));
        out
    }

    #[test]
    fn the_page_says_what_is_sent() {
        let nonce = Nonce::new(*b"0123456789abcdef");
        let line = sent(nonce, &[1, ESCAPE, 2]);
        assert_eq!(line, b"\xa5\x010123456789abcdef\x01\xa5\x00\x02");
        assert_eq!(hear([line.as_slice()].into_iter()), [(nonce, vec![1, ESCAPE, 2])]);
        let page = include_str!("../../../docs/formats/agent-link.md");
        assert!(
            page.contains("a5 01  30 31 32 33 34 35 36 37 38 39 61 62 63 64 65 66  01  a5 00  02")
        );
    }

    #[test]
    fn a_nonce_has_no_escape_and_is_not_none() {
        assert_eq!(Nonce::new([ESCAPE; 16]).mark()[2..], [!ESCAPE; 16]);
        assert_ne!(Nonce::new([0; 16]), Nonce::NONE);
    }

    #[test]
    fn what_is_no_mark_ends_the_connection() {
        let (one, two) = (Nonce::new([1; 16]), Nonce::new([2; 16]));
        let mut line = sent(one, b"whole");
        line.extend_from_slice(&[ESCAPE, 7]);
        line.extend_from_slice(b"dropped");
        line.extend_from_slice(&[ESCAPE, 0, ESCAPE]);
        line.extend(sent(two, b"again"));
        let mut decoder = Decoder::new();
        let mut cut = &line[..line.len() - 7];
        while decoder.next(&mut cut).is_some() {}
        // Two bytes of the nonce are missing.
        assert!(!decoder.is_lost());
        let expected = [(one, b"whole".to_vec()), (two, b"again".to_vec())];
        assert_eq!(hear([line.as_slice()].into_iter()), expected);
    }

    #[test]
    fn none_ends_a_connection() {
        let one = Nonce::new([1; 16]);
        let mut line = sent(one, b"whole");
        line.extend_from_slice(&Nonce::NONE.mark());
        line.extend_from_slice(b"dropped");
        let expected = [(one, b"whole".to_vec()), (Nonce::NONE, Vec::new())];
        assert_eq!(hear([line.as_slice()].into_iter()), expected);
    }

    /// Bytes in which escapes and what may follow them are frequent.
    fn mean() -> impl Strategy<Value = Vec<u8>> {
        vec(prop_oneof![any::<u8>(), Just(ESCAPE), Just(0), Just(1)], 0..200)
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn any_bytes_in_any_pieces_arrive(bytes in mean(), random in any::<[u8; 16]>(), size in 1_usize..40) {
            let nonce = Nonce::new(random);
            let line = sent(nonce, &bytes);
            assert_eq!(hear(line.chunks(size)), [(nonce, bytes)]);
        }

        #[test]
        fn a_connection_begins_after_anything(garbage in mean(), bytes in mean(), size in 1_usize..40) {
            // All of it: a mark may have been cut off anywhere.
            let nonce = Nonce::new(*b"another and last");
            let line = [garbage, sent(nonce, &bytes)].concat();
            assert_eq!(hear(line.chunks(size)).pop(), Some((nonce, bytes)));
        }

        #[test]
        fn a_connection_cut_off_anywhere_is_followed_by_another(
            first in mean(), second in mean(), cut in any::<proptest::sample::Index>(),
        ) {
            let (one, two) = (Nonce::new([1; 16]), Nonce::new([2; 16]));
            let whole = sent(one, &first);
            let line = [&whole[..cut.index(whole.len() + 1)], &sent(two, &second)].concat();
            let heard = hear([line.as_slice()].into_iter());
            assert_eq!(heard.last(), Some(&(two, second)));
            if let [(nonce, bytes), _] = heard.as_slice() {
                assert_eq!(*nonce, one);
                assert!(first.starts_with(bytes));
            }
        }
    }
}
