//! How bytes on the agent link are cut into frames.
//!
//! ```text
//! offset  size
//! 0       4     payload length, little endian, at most MAX_PAYLOAD
//! 4       4     stream, little endian; 0 is the link itself
//! 8       1     kind
//! 9       3     zero
//! 12      n     payload
//! ```
//!
//! The link is a bundle of *streams*. The host opens one per request, with a number it has not used
//! on this connection; the agent never opens any. Everything of that request travels on its stream:
//!
//! ```text
//! host  -> agent   Open     JSON link::Request
//! agent -> host    Reply    JSON link::Reply, exactly once and first; an error ends the stream
//! both  ways       Data     bytes (standard output, standard input, file contents, a TCP stream)
//! agent -> host    DataErr  bytes of standard error
//! both  ways       End      this side sends no more Data
//! both  ways       Credit   u32, little endian: so many more Data bytes may be sent
//! agent -> host    Done     JSON link::Done, once, after the last Data; ends the stream
//! host  -> agent   Cancel   the host no longer cares; the agent drops the stream, kills nothing
//! agent -> host    Cancel   what the host still sends as Data goes nowhere: the process reads no more
//! ```
//!
//! [`crate::link::Request`] says which of these a request uses.
//!
//! *Flow control.* Each side may send [`WINDOW`] bytes of Data (and DataErr, counted together) on a
//! stream before it needs Credit. Credit for command output says more than "there is room": it says
//! *kept*. The agent holds what was not credited and sends it again after a reconnect. On a stream
//! that was attached to, input that an earlier connection sent may still wait inside: there the host
//! starts with no room at all, and the agent's first Credit says how much there is.
//!
//! *Breaking the rules* (bytes that are no frame, Data beyond the window, frames out of turn) ends
//! the connection and nothing else: commands live on, and the next connection takes them up. Frames
//! on a stream that has ended are ignored: the other side did not know yet.

/// The largest payload of one frame.
pub const MAX_PAYLOAD: usize = 1 << 20;
/// How many Data bytes may be under way on a stream before Credit is needed.
pub const WINDOW: usize = 256 << 10;
/// How much Data one frame should carry at most, so that streams take turns.
pub const CHUNK: usize = 64 << 10;
/// The length of a frame's header.
pub const HEADER: usize = 12;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// A request, which opens its stream.
    Open = 1,
    /// The answer to it.
    Reply = 2,
    /// Bytes.
    Data = 3,
    /// Bytes of standard error.
    DataErr = 4,
    /// No more Data from this side.
    End = 5,
    /// Room for more Data; for command output also: kept so far.
    Credit = 6,
    /// The outcome, which ends the stream.
    Done = 7,
    /// From the host: it dropped the stream. From the agent: it takes no more Data.
    Cancel = 8,
}

impl FrameKind {
    /// Reads the kind byte.
    #[must_use]
    pub fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            1 => Self::Open,
            2 => Self::Reply,
            3 => Self::Data,
            4 => Self::DataErr,
            5 => Self::End,
            6 => Self::Credit,
            7 => Self::Done,
            8 => Self::Cancel,
            _ => return None,
        })
    }
}

/// A frame's header, parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// How many bytes of payload follow.
    pub length: usize,
    /// The stream it belongs to.
    pub stream: u32,
    /// What it is.
    pub kind: FrameKind,
}

/// Why bytes are not a frame. The connection is of no use after this.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadFrame {
    /// The payload would be longer than [`MAX_PAYLOAD`].
    TooLong(usize),
    /// No such kind.
    UnknownKind(u8),
    /// The reserved bytes are not zero.
    Reserved,
}

impl std::fmt::Display for BadFrame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::TooLong(length) => write!(f, "a frame of {length} bytes is over the limit"),
            Self::UnknownKind(byte) => write!(f, "there is no frame kind {byte}"),
            Self::Reserved => write!(f, "the reserved bytes of a frame are not zero"),
        }
    }
}

impl std::error::Error for BadFrame {}

impl Header {
    /// Lays the header out for the wire.
    #[must_use]
    pub fn encode(self) -> [u8; HEADER] {
        let length = u32::try_from(self.length).unwrap_or(u32::MAX).to_le_bytes();
        let stream = self.stream.to_le_bytes();
        let mut out = [0; HEADER];
        out[..4].copy_from_slice(&length);
        out[4..8].copy_from_slice(&stream);
        out[8] = self.kind as u8;
        out
    }

    /// Reads a header.
    ///
    /// # Errors
    ///
    /// Returns [`BadFrame`] when the bytes cannot begin a frame.
    pub fn decode(bytes: &[u8; HEADER]) -> Result<Self, BadFrame> {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let length = word(0) as usize;
        if length > MAX_PAYLOAD {
            return Err(BadFrame::TooLong(length));
        }
        let kind = FrameKind::from_byte(bytes[8]).ok_or(BadFrame::UnknownKind(bytes[8]))?;
        if bytes[9..] != [0; 3] {
            return Err(BadFrame::Reserved);
        }
        Ok(Self { length, stream: word(4), kind })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{ProptestConfig, any, proptest};

    use super::{BadFrame, FrameKind, HEADER, Header, MAX_PAYLOAD};

    #[test]
    fn a_header_survives_the_wire() {
        for kind in 1..=8 {
            let kind = FrameKind::from_byte(kind).expect("eight kinds");
            let header = Header { length: 77, stream: 9, kind };
            assert_eq!(Header::decode(&header.encode()), Ok(header));
        }
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        let mut bytes = Header { length: 1, stream: 1, kind: FrameKind::Data }.encode();
        bytes[8] = 99;
        assert_eq!(Header::decode(&bytes), Err(BadFrame::UnknownKind(99)));
        bytes[8] = 3;
        bytes[11] = 1;
        assert_eq!(Header::decode(&bytes), Err(BadFrame::Reserved));
        let long = Header { length: MAX_PAYLOAD + 1, stream: 1, kind: FrameKind::Data }.encode();
        assert_eq!(Header::decode(&long), Err(BadFrame::TooLong(MAX_PAYLOAD + 1)));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn any_bytes_are_a_header_or_an_error(bytes in any::<[u8; HEADER]>()) {
            if let Ok(header) = Header::decode(&bytes) {
                assert_eq!(header.encode(), bytes);
            }
        }
    }
}
