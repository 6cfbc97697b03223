//! Commands that are attached to: output, standard input, signals and window sizes.
//!
//! It begins as a WebSocket. When that breaks after the command was started, because the server was restarted, the command
//! goes on in its sandbox, and so can its caller: [`Attached::resume`] reads its log from the byte that came last, and
//! [`Input::resume`] sends what may not have arrived, then everything else, by calls of their own. Input is counted, so the
//! command gets no byte twice and misses none.

use std::collections::VecDeque;
use std::fmt;
use std::io;

use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt as _, StreamExt as _};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;

use crate::commands::{LogQuery, Output, Running, output};
use crate::sandboxes::sandbox;
use crate::types::{Channel, ClientMessage, ExecRequest, Signal, TermSize};
use crate::wire::Wire;
use crate::{Client, Error};

/// How much input is kept that may not have arrived: more than all buffers on the way hold.
const RECENT: usize = 16 << 20;

/// What an attached command says. Dropping it (and its [`Input`]) ends the command, unless it was resumed.
pub struct Attached {
    source: AttachedSource,
    ended: bool,
    /// The command's id, once it was started.
    command: Option<String>,
    /// How much output came, with what was told to be missing.
    offset: u64,
}

enum AttachedSource {
    Socket(SplitStream<WebSocketStream<Wire>>),
    Log(Box<Running>),
}

impl fmt::Debug for Attached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attached").field("ended", &self.ended).finish_non_exhaustive()
    }
}

impl Attached {
    /// Returns what it says next, or nothing after the last.
    ///
    /// # Errors
    ///
    /// As [`Running::next`].
    pub async fn next(&mut self) -> Result<Option<Output>, Error> {
        if self.ended {
            return Ok(None);
        }
        let said = match &mut self.source {
            AttachedSource::Socket(socket) => heard(socket).await,
            AttachedSource::Log(log) => log.next().await.and_then(|said| said.ok_or_else(hung_up)),
        };
        match &said {
            Ok(Output::Started(started)) => self.command = Some(started.command.id.clone()),
            Ok(Output::Stdout(bytes) | Output::Stderr(bytes)) => self.offset += bytes.len() as u64,
            Ok(Output::Gap(bytes)) => self.offset += bytes,
            Ok(Output::Exited(_)) => self.ended = true,
            Ok(Output::More) | Err(_) => {}
        }
        said.map(Some)
    }

    /// The command's id, once it was started.
    #[must_use]
    pub fn command(&self) -> Option<&str> {
        self.command.as_deref()
    }

    /// Whether the command goes on without us after this error, so that [`resume`](Self::resume) may help.
    #[must_use]
    pub fn may_resume(&self, error: &Error) -> bool {
        self.command.is_some() && !self.ended && error.may_pass()
    }

    /// Goes on from the byte that came last.
    ///
    /// # Errors
    ///
    /// Whatever the server or the connection says; as long as [`Error::may_pass`], it can be tried again.
    pub async fn resume(&mut self, client: &Client, name: &str) -> Result<(), Error> {
        let id = self.command.as_deref().unwrap_or_default();
        let query = LogQuery { follow: true, offset: self.offset, ..LogQuery::default() };
        self.source = AttachedSource::Log(Box::new(client.log(name, id, &query).await?));
        Ok(())
    }
}

async fn heard(socket: &mut SplitStream<WebSocketStream<Wire>>) -> Result<Output, Error> {
    while let Some(message) = socket.next().await {
        match message.map_err(|error| Error::broken("listening to the command", error))? {
            Message::Binary(bytes) => return bytes_of(bytes),
            Message::Text(text) => {
                let event = serde_json::from_str(text.as_str())
                    .map_err(|error| Error::protocol(format!("an event: {error}")))?;
                return output(event);
            }
            Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
            Message::Close(_) => break,
        }
    }
    Err(hung_up())
}

fn hung_up() -> Error {
    let eof = io::Error::new(io::ErrorKind::UnexpectedEof, "the server hung up before its end");
    Error::broken("listening to the command", eof)
}

/// The way to an attached command.
pub struct Input {
    way: Way,
    recent: Recent,
    closed: bool,
}

enum Way {
    Socket(SplitSink<WebSocketStream<Wire>, Message>),
    Calls(Calls),
}

/// A command that is talked to by a call for each word.
struct Calls {
    client: Client,
    name: String,
    command: String,
}

impl fmt::Debug for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Input").finish_non_exhaustive()
    }
}

// Each fails with `Error::Broken` when the connection is gone; the command's own end is seen by
// `Attached`.
#[allow(clippy::missing_errors_doc)]
impl Input {
    /// Sends bytes of standard input. If this fails or is given up, [`resume`](Self::resume) sends them.
    pub async fn write(&mut self, bytes: Bytes) -> Result<(), Error> {
        self.recent.push(bytes.clone());
        match &mut self.way {
            Way::Socket(socket) => {
                let mut message = BytesMut::with_capacity(bytes.len() + 1);
                message.put_u8(Channel::Stdin as u8);
                message.extend_from_slice(&bytes);
                send(socket, Message::Binary(message.freeze())).await
            }
            Way::Calls(_) => self.flush().await,
        }
    }

    /// Says that there is no more standard input.
    pub async fn close(&mut self) -> Result<(), Error> {
        self.closed = true;
        match &mut self.way {
            Way::Socket(socket) => say(socket, &ClientMessage::StdinClose).await,
            Way::Calls(_) => self.flush().await,
        }
    }

    /// Says that the terminal has a new size.
    pub async fn resize(&mut self, size: TermSize) -> Result<(), Error> {
        match &mut self.way {
            Way::Socket(socket) => {
                say(socket, &ClientMessage::Resize { cols: size.cols, rows: size.rows }).await
            }
            Way::Calls(Calls { client, name, command }) => {
                heard_too_late(client.resize(name, command, size).await)
            }
        }
    }

    /// Sends a signal.
    pub async fn signal(&mut self, signal: i32) -> Result<(), Error> {
        let signal = Signal::Number(signal);
        match &mut self.way {
            Way::Socket(socket) => say(socket, &ClientMessage::Signal { signal }).await,
            Way::Calls(Calls { client, name, command }) => {
                heard_too_late(client.signal(name, command, signal).await)
            }
        }
    }

    /// Goes on by calls, and sends first what may not have arrived.
    pub async fn resume(
        &mut self,
        client: &Client,
        name: &str,
        command: &str,
    ) -> Result<(), Error> {
        let (name, command) = (name.to_owned(), command.to_owned());
        self.way = Way::Calls(Calls { client: client.clone(), name, command });
        match self.recent.pieces.is_empty() && !self.closed {
            true => Ok(()),
            false => self.flush().await,
        }
    }

    /// Sends all input that may not have arrived, and forgets it when it has.
    async fn flush(&mut self) -> Result<(), Error> {
        let Way::Calls(Calls { client, name, command }) = &self.way else { return Ok(()) };
        let (offset, bytes) = self.recent.all();
        let sent = client.stdin_at(name, command, offset, bytes, self.closed).await;
        heard_too_late(sent)?;
        self.recent.forget();
        Ok(())
    }
}

/// A command that has ended or closed its input takes no more, which is no error of whoever talks to it.
fn heard_too_late(outcome: Result<(), Error>) -> Result<(), Error> {
    match outcome {
        Err(error) if matches!(error.code(), Some("command_ended" | "stdin_closed")) => Ok(()),
        other => other,
    }
}

/// Input that was sent last.
#[derive(Debug, Default)]
struct Recent {
    pieces: VecDeque<Bytes>,
    length: usize,
    /// Where the first piece begins in all that was ever sent.
    start: u64,
}

impl Recent {
    fn push(&mut self, bytes: Bytes) {
        self.length += bytes.len();
        self.pieces.push_back(bytes);
        while self.length > RECENT
            && let Some(oldest) = self.pieces.pop_front()
        {
            self.length -= oldest.len();
            self.start += oldest.len() as u64;
        }
    }

    fn all(&self) -> (u64, Bytes) {
        let mut all = BytesMut::with_capacity(self.length);
        self.pieces.iter().for_each(|piece| all.extend_from_slice(piece));
        (self.start, all.freeze())
    }

    fn forget(&mut self) {
        self.start += self.length as u64;
        self.length = 0;
        self.pieces.clear();
    }
}

type Sink = SplitSink<WebSocketStream<Wire>, Message>;

async fn say(socket: &mut Sink, message: &ClientMessage) -> Result<(), Error> {
    let text =
        serde_json::to_string(message).map_err(|error| Error::protocol(error.to_string()))?;
    send(socket, Message::text(text)).await
}

async fn send(socket: &mut Sink, message: Message) -> Result<(), Error> {
    let sent = socket.send(message).await;
    sent.map_err(|error| Error::broken("talking to the command", error))
}

// Fails with what the server says (`Error::Api`) or with what the way there says.
#[allow(clippy::missing_errors_doc)]
impl Client {
    /// Runs a command with a way to talk to it while it runs.
    pub async fn attach(
        &self,
        name: &str,
        request: &ExecRequest,
    ) -> Result<(Input, Attached), Error> {
        let socket = self.transport.socket(sandbox(name, &["exec", "ws"]).as_str()).await?;
        let (mut sender, receiver) = socket.split();
        let text =
            serde_json::to_string(request).map_err(|error| Error::protocol(error.to_string()))?;
        send(&mut sender, Message::text(text)).await?;
        let input = Input { way: Way::Socket(sender), recent: Recent::default(), closed: false };
        let source = AttachedSource::Socket(receiver);
        Ok((input, Attached { source, ended: false, command: None, offset: 0 }))
    }
}

fn bytes_of(mut message: Bytes) -> Result<Output, Error> {
    let channel = message.first().copied().and_then(Channel::from_byte);
    match channel {
        Some(Channel::Stdout) => Ok(Output::Stdout(message.split_off(1))),
        Some(Channel::Stderr) => Ok(Output::Stderr(message.split_off(1))),
        Some(Channel::Stdin) | None => Err(Error::protocol("bytes on an unknown channel")),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::{RECENT, Recent, bytes_of};
    use crate::commands::{Output, output};
    use crate::types::ExecEvent;

    #[test]
    fn output_is_the_same_either_way() {
        let raw = bytes_of(Bytes::from_static(b"\x01a\xff")).unwrap();
        assert_eq!(raw, Output::Stdout(Bytes::from_static(b"a\xff")));
        assert_eq!(output(ExecEvent::stdout(b"a\xff")).unwrap(), raw);
        for bad in [&b""[..], b"\x00x", b"\x07x"] {
            assert!(bytes_of(Bytes::copy_from_slice(bad)).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn recent_input_is_kept_up_to_a_limit_with_its_place() {
        let mut recent = Recent::default();
        recent.push(Bytes::from_static(b"abc"));
        recent.push(Bytes::from_static(b"de"));
        assert_eq!(recent.all(), (0, Bytes::from_static(b"abcde")));
        recent.forget();
        recent.push(Bytes::from_static(b"f"));
        assert_eq!(recent.all(), (5, Bytes::from_static(b"f")));
        let large = Bytes::from(vec![7; RECENT]);
        recent.push(large.clone());
        assert_eq!(recent.all(), (6, large));
    }
}
