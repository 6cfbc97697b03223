//! Upgraded connections (WebSockets and others) to hosts whose answers are masked.
//!
//! *WebSocket* messages are read frame by frame, since a value may be spread over the frames of one message, and are put into
//! frames of our own: a message is forwarded as it comes, in pieces of any size. A message is to a
//! WebSocket what a body is to a request: a value that is spread over several is not found. In
//! texts values become placeholders, in other messages they are covered. Extensions were not
//! offered to the server (they compress), so a frame that uses one ends the connection.
//!
//! In *other protocols* values are covered in the stream of bytes.

use std::io;
use std::pin::pin;

use bytes::{Buf as _, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, copy_bidirectional};
use tokio::time::timeout;

use super::body::HELD_BACK;
use super::replace::{Replacements, StreamReplacer};

const BUFFER: usize = 32 << 10;

/// Carries both directions to their ends.
pub(super) async fn carry<G, S>(
    mut guest: G,
    mut server: S,
    masks: &Replacements,
    is_websocket: bool,
) -> io::Result<()>
where
    G: AsyncRead + AsyncWrite + Unpin,
    S: AsyncRead + AsyncWrite + Unpin,
{
    if masks.is_empty() {
        copy_bidirectional(&mut guest, &mut server).await.map(|_| ())
    } else if is_websocket {
        relay(guest, server, WebSocketMasker::new(masks)).await
    } else {
        relay(guest, server, RawMasker::new(masks)).await
    }
}

/// Takes values out of what comes in.
trait TunnelMasker {
    /// Takes bytes that came, and returns those that may be forwarded.
    fn push(&mut self, bytes: Bytes) -> io::Result<Bytes>;

    /// Whether something is held back that somebody may wait for.
    fn may_release(&self) -> bool;

    /// Returns the part of it that may be forwarded.
    fn release(&mut self) -> Bytes;

    /// Nothing follows.
    fn finish(&mut self) -> Bytes;
}

/// The same, where what comes from outside goes through `masker`.
async fn relay<G, S>(guest: G, server: S, mut masker: impl TunnelMasker) -> io::Result<()>
where
    G: AsyncRead + AsyncWrite,
    S: AsyncRead + AsyncWrite,
{
    let (mut from_guest, mut to_guest) = tokio::io::split(guest);
    let (mut from_server, mut to_server) = tokio::io::split(server);
    let out = async {
        tokio::io::copy(&mut from_guest, &mut to_server).await?;
        to_server.shutdown().await
    };
    let back = async {
        let mut buffer = BytesMut::new();
        loop {
            buffer.reserve(BUFFER);
            let piece = {
                let mut read = pin!(from_server.read_buf(&mut buffer));
                match masker.may_release() {
                    true => match timeout(HELD_BACK, read.as_mut()).await {
                        Ok(length) => Some(length?),
                        Err(_) => None,
                    },
                    false => Some(read.await?),
                }
            };
            let (piece, ended) = match piece {
                Some(0) => (masker.finish(), true),
                Some(_) => (masker.push(buffer.split().freeze())?, false),
                None => (masker.release(), false),
            };
            to_guest.write_all(&piece).await?;
            to_guest.flush().await?;
            if ended {
                return to_guest.shutdown().await;
            }
        }
    };
    tokio::try_join!(out, back).map(|_| ())
}

/// Bytes in no form that is known.
struct RawMasker(StreamReplacer);

impl RawMasker {
    fn new(masks: &Replacements) -> Self {
        Self(masks.covered().stream())
    }
}

impl TunnelMasker for RawMasker {
    fn push(&mut self, bytes: Bytes) -> io::Result<Bytes> {
        Ok(self.0.push(bytes))
    }

    fn may_release(&self) -> bool {
        self.0.may_release()
    }

    fn release(&mut self) -> Bytes {
        self.0.release()
    }

    fn finish(&mut self) -> Bytes {
        self.0.finish()
    }
}

const CONTINUES: u8 = 0;
const TEXT: u8 = 1;
const BINARY: u8 = 2;
const FIRST_CONTROL: u8 = 8;
/// How large a control frame may be.
const LARGEST_CONTROL: u64 = 125;

/// Frames of WebSocket, from a server.
struct WebSocketMasker {
    texts: Replacements,
    others: Replacements,
    /// What came and is not a whole head, or not a whole control frame.
    unread: BytesMut,
    /// The data frame that is being read.
    frame: Option<DataFrame>,
    message: Option<WebSocketMessage>,
}

struct DataFrame {
    left: u64,
    is_last: bool,
}

struct WebSocketMessage {
    /// What its next frame is called.
    opcode: u8,
    stream: StreamReplacer,
}

/// The head of a frame.
struct FrameHead {
    is_last: bool,
    opcode: u8,
    length: u64,
    /// How long the head itself is.
    bytes: usize,
}

impl WebSocketMasker {
    fn new(masks: &Replacements) -> Self {
        Self {
            texts: masks.clone(),
            others: masks.covered(),
            unread: BytesMut::new(),
            frame: None,
            message: None,
        }
    }

    fn begin(&mut self, head: &FrameHead) -> io::Result<()> {
        match (head.opcode, &self.message) {
            (TEXT | BINARY, None) => {
                let masks = if head.opcode == TEXT { &self.texts } else { &self.others };
                self.message =
                    Some(WebSocketMessage { opcode: head.opcode, stream: masks.stream() });
            }
            (CONTINUES, Some(_)) => {}
            _ => return Err(broken()),
        }
        self.frame = Some(DataFrame { left: head.length, is_last: head.is_last });
        Ok(())
    }

    /// Reads what there is of a data frame.
    fn data(&mut self, held: &mut Vec<u8>, out: &mut BytesMut) {
        let (Some(frame), Some(message)) = (&mut self.frame, &mut self.message) else { return };
        let length = self.unread.len().min(usize::try_from(frame.left).unwrap_or(usize::MAX));
        frame.left -= length as u64;
        held.extend_from_slice(&message.stream.push(self.unread.split_to(length).freeze()));
        if frame.left > 0 {
            return;
        }
        if frame.is_last {
            held.extend_from_slice(&message.stream.finish());
            write_frame(out, true, message.opcode, held);
            held.clear();
            self.message = None;
        }
        self.frame = None;
    }

    /// Sends a part of a message, if there is one.
    fn part(&mut self, bytes: &[u8], out: &mut BytesMut) {
        if let Some(message) = self.message.as_mut().filter(|_| !bytes.is_empty()) {
            write_frame(out, false, message.opcode, bytes);
            message.opcode = CONTINUES;
        }
    }
}

impl TunnelMasker for WebSocketMasker {
    fn push(&mut self, bytes: Bytes) -> io::Result<Bytes> {
        self.unread.extend_from_slice(&bytes);
        let (mut out, mut held) = (BytesMut::new(), Vec::new());
        loop {
            if self.frame.is_some() {
                self.data(&mut held, &mut out);
                if self.frame.is_some() {
                    break;
                }
            }
            let Some(head) = FrameHead::read(&self.unread)? else { break };
            if head.opcode < FIRST_CONTROL {
                self.unread.advance(head.bytes);
                self.begin(&head)?;
                continue;
            }
            if head.length > LARGEST_CONTROL || !head.is_last {
                return Err(broken());
            }
            let length = usize::try_from(head.length).map_err(|_| broken())?;
            if self.unread.len() < head.bytes + length {
                break;
            }
            self.unread.advance(head.bytes);
            let payload = self.unread.split_to(length);
            // It may come between two frames of a message, and is forwarded before what is left of
            // that.
            self.part(&std::mem::take(&mut held), &mut out);
            let masked = self.others.whole(&payload);
            write_frame(&mut out, true, head.opcode, masked.as_ref().map_or(&payload[..], |m| m));
        }
        self.part(&held, &mut out);
        Ok(out.freeze())
    }

    fn may_release(&self) -> bool {
        self.message.as_ref().is_some_and(|message| message.stream.may_release())
    }

    fn release(&mut self) -> Bytes {
        let mut out = BytesMut::new();
        if let Some(message) = &mut self.message {
            let bytes = message.stream.release();
            self.part(&bytes, &mut out);
        }
        out.freeze()
    }

    fn finish(&mut self) -> Bytes {
        // A message that has no end is none.
        Bytes::new()
    }
}

impl FrameHead {
    /// Reads one, if it is complete.
    fn read(bytes: &[u8]) -> io::Result<Option<Self>> {
        let [first, second, rest @ ..] = bytes else { return Ok(None) };
        // Reserved bits are for extensions, and what a server sends is not masked.
        if first & 0x70 != 0 || second & 0x80 != 0 {
            return Err(broken());
        }
        let (length, bytes) = match second & 0x7f {
            126 => match rest.first_chunk() {
                Some(length) => (u64::from(u16::from_be_bytes(*length)), 4),
                None => return Ok(None),
            },
            127 => match rest.first_chunk() {
                Some(length) => (u64::from_be_bytes(*length), 10),
                None => return Ok(None),
            },
            length => (u64::from(length), 2),
        };
        Ok(Some(Self { is_last: first & 0x80 != 0, opcode: first & 0x0f, length, bytes }))
    }
}

fn write_frame(out: &mut BytesMut, is_last: bool, opcode: u8, payload: &[u8]) {
    let first = if is_last { 0x80 | opcode } else { opcode };
    match payload.len() {
        length @ 0..=125 => out.extend_from_slice(&[first, length as u8]),
        length @ 126..=0xffff => {
            out.extend_from_slice(&[first, 126]);
            out.extend_from_slice(&(length as u16).to_be_bytes());
        }
        length => {
            out.extend_from_slice(&[first, 127]);
            out.extend_from_slice(&(length as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(payload);
}

fn broken() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "what the server sent is no WebSocket")
}

#[cfg(test)]
mod tests {
    use bytes::{Bytes, BytesMut};

    use super::super::replace::{Pair, Replacements};
    use super::{CONTINUES, FrameHead, TEXT, TunnelMasker, WebSocketMasker, write_frame};

    const VALUE: &str = "the-real-value";

    fn masker() -> WebSocketMasker {
        let masks: Replacements = Pair::new(VALUE.as_bytes(), b"placeholder").into_iter().collect();
        WebSocketMasker::new(&masks)
    }

    fn frame(is_last: bool, opcode: u8, payload: &[u8]) -> BytesMut {
        let mut out = BytesMut::new();
        write_frame(&mut out, is_last, opcode, payload);
        out
    }

    /// Messages and control frames, as a client reads them.
    fn read(mut bytes: &[u8]) -> Vec<(u8, String)> {
        let (mut all, mut open): (_, Option<(u8, Vec<u8>)>) = (Vec::new(), None);
        while let Some(head) = FrameHead::read(bytes).unwrap() {
            let (payload, rest) = bytes[head.bytes..].split_at(head.length as usize);
            bytes = rest;
            let text = String::from_utf8(payload.to_vec()).unwrap();
            if head.opcode >= 8 {
                all.push((head.opcode, text));
                continue;
            }
            let message = open.get_or_insert((head.opcode, Vec::new()));
            assert!(head.opcode == CONTINUES || message.1.is_empty(), "a message in a message");
            message.1.extend_from_slice(payload);
            if head.is_last {
                let (opcode, bytes) = open.take().unwrap();
                all.push((opcode, String::from_utf8(bytes).unwrap()));
            }
        }
        assert!(bytes.is_empty() && open.is_none());
        all
    }

    #[test]
    fn values_in_messages_are_found_however_they_come() {
        let mut sent = frame(true, TEXT, format!("is {VALUE}!").as_bytes());
        sent.extend_from_slice(&frame(false, 2, b"\x01the-re"));
        sent.extend_from_slice(&frame(true, 9, format!("ping {VALUE}").as_bytes()));
        sent.extend_from_slice(&frame(false, CONTINUES, b"al-va"));
        sent.extend_from_slice(&frame(true, CONTINUES, b"lue\x02"));
        let long = "x".repeat(70_000);
        sent.extend_from_slice(&frame(true, TEXT, format!("{long}{VALUE}").as_bytes()));
        sent.extend_from_slice(&frame(true, TEXT, b""));
        sent.extend_from_slice(&frame(true, 8, b"\x03\x04bye"));
        let stars = "*".repeat(VALUE.len());
        let wanted = [
            (TEXT, "is placeholder!".to_owned()),
            (9, format!("ping {stars}")),
            (2, format!("\x01{stars}\x02")),
            (TEXT, format!("{long}placeholder")),
            (TEXT, String::new()),
            (8, "\x03\x04bye".to_owned()),
        ];
        for size in [1, 2, 3, 7, 1000, usize::MAX] {
            let (mut masker, mut out) = (masker(), Vec::new());
            for piece in sent.chunks(size.min(sent.len())) {
                out.extend_from_slice(&masker.push(Bytes::copy_from_slice(piece)).unwrap());
            }
            assert_eq!(read(&out), wanted, "{size}");
        }
    }

    #[test]
    fn a_message_does_not_wait_for_the_next_one() {
        let mut masker = masker();
        let sent = frame(true, TEXT, b"this is the-rea").freeze();
        assert_eq!(read(&masker.push(sent).unwrap()), [(TEXT, "this is the-rea".to_owned())]);
        // In the middle of one a few bytes are released, and the rest of a value is covered.
        let mut out = masker.push(frame(false, TEXT, b"a th").freeze()).unwrap().to_vec();
        assert!(masker.may_release());
        out.extend_from_slice(&masker.release());
        out.extend_from_slice(&masker.push(frame(false, CONTINUES, b"e-real").freeze()).unwrap());
        assert!(!masker.may_release());
        out.extend_from_slice(&masker.push(frame(true, CONTINUES, b"-value").freeze()).unwrap());
        assert_eq!(read(&out), [(TEXT, format!("a th{}", "*".repeat(12)))]);
    }

    #[test]
    fn what_is_no_websocket_ends() {
        for bytes in [
            // An extension, a mask, a continuation of nothing, a control frame in parts.
            &[0xc1, 0][..],
            &[0x81, 0x80],
            &[0x80, 0],
            &[0x09, 0],
        ] {
            assert!(masker().push(Bytes::copy_from_slice(bytes)).is_err(), "{bytes:?}");
        }
    }
}
