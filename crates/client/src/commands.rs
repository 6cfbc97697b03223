//! Commands: one way ([`Running`], NDJSON over plain HTTP) and both ways ([`Attached`], a WebSocket
//! with standard input, signals and window sizes).

use std::fmt;

use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt as _, StreamExt as _};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;

use crate::body::{Lines, Upload};
use crate::paging::Pages;
use crate::sandboxes::sandbox;
use crate::transport::Call;
use crate::types::{
    Channel, ClientMessage, Command, CommandChangeList, ExecEvent, ExecRequest, ExecResult,
    Session, Signal, SignalRequest, TermSize,
};
use crate::wire::Wire;
use crate::{Client, Error};

/// What a command says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    /// It runs. Always the first, but not there in logs.
    Started(Box<Started>),
    /// Bytes of standard output, or of the terminal.
    Stdout(Bytes),
    /// Bytes of standard error.
    Stderr(Bytes),
    /// This many bytes were printed here that are not kept.
    Gap(u64),
    /// It ended. Always the last.
    Exited(Box<Terminated>),
    /// That is all of the log there is, and the command still runs. The last, without `follow`.
    More,
}

/// A command that has begun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Started {
    /// The command.
    pub command: Command,
    /// The session, with what its hooks did.
    pub session: Session,
    /// Whether this call woke the sandbox.
    pub resumed: bool,
}

/// A command that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Terminated {
    /// Its exit code; absent if its session ended under it.
    pub exit_code: Option<i32>,
    /// The command.
    pub command: Command,
}

/// A command whose output comes as NDJSON.
#[derive(Debug)]
pub struct Running {
    lines: Lines<ExecEvent>,
}

impl Running {
    /// Returns what it says next, or nothing after the last.
    ///
    /// # Errors
    ///
    /// [`Error::Api`] if something went wrong on the server's side while it ran, or
    /// [`Error::Broken`] if the connection did not last.
    pub async fn next(&mut self) -> Result<Option<Output>, Error> {
        match self.lines.next().await? {
            Some(event) => output(event).map(Some),
            None => Ok(None),
        }
    }

    /// Waits for its end and collects what it prints.
    ///
    /// # Errors
    ///
    /// As [`next`](Self::next).
    pub async fn collect(mut self) -> Result<(Terminated, Vec<u8>, Vec<u8>), Error> {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        while let Some(output) = self.next().await? {
            match output {
                Output::Stdout(bytes) => stdout.extend_from_slice(&bytes),
                Output::Stderr(bytes) => stderr.extend_from_slice(&bytes),
                Output::Exited(end) => return Ok((*end, stdout, stderr)),
                // Of what is missing the command says that it is `truncated`.
                Output::Started(_) | Output::Gap(_) | Output::More => {}
            }
        }
        Err(Error::protocol("the answer ended before the command did"))
    }
}

/// A command on a WebSocket. Dropping it (and its [`Input`]) ends the command, unless detached.
pub struct Attached {
    receiver: SplitStream<WebSocketStream<Wire>>,
    ended: bool,
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
        while !self.ended {
            let Some(message) = self.receiver.next().await else {
                self.ended = true;
                return Err(Error::protocol("the server hung up before the command ended"));
            };
            match message.map_err(|error| Error::broken("listening to the command", error))? {
                Message::Binary(bytes) => return bytes_of(bytes).map(Some),
                Message::Text(text) => {
                    let event = serde_json::from_str(text.as_str())
                        .map_err(|error| Error::protocol(format!("an event: {error}")))?;
                    let said = output(event)?;
                    self.ended = matches!(said, Output::Exited(_));
                    return Ok(Some(said));
                }
                Message::Ping(_) | Message::Pong(_) | Message::Frame(_) => {}
                Message::Close(_) => {
                    self.ended = true;
                    return Err(Error::protocol("the server hung up before the command ended"));
                }
            }
        }
        Ok(None)
    }
}

/// The way to a command on a WebSocket.
pub struct Input {
    sender: SplitSink<WebSocketStream<Wire>, Message>,
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
    /// Sends bytes of standard input.
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let mut message = BytesMut::with_capacity(bytes.len() + 1);
        message.put_u8(Channel::Stdin as u8);
        message.extend_from_slice(bytes);
        self.send(Message::Binary(message.freeze())).await
    }

    /// Says that there is no more standard input.
    pub async fn close(&mut self) -> Result<(), Error> {
        self.say(&ClientMessage::StdinClose).await
    }

    /// Says that the terminal has a new size.
    pub async fn resize(&mut self, size: TermSize) -> Result<(), Error> {
        self.say(&ClientMessage::Resize { cols: size.cols, rows: size.rows }).await
    }

    /// Sends a signal.
    pub async fn signal(&mut self, signal: i32) -> Result<(), Error> {
        self.say(&ClientMessage::Signal { signal: Signal::Number(signal) }).await
    }

    async fn say(&mut self, message: &ClientMessage) -> Result<(), Error> {
        let text =
            serde_json::to_string(message).map_err(|error| Error::protocol(error.to_string()))?;
        self.send(Message::text(text)).await
    }

    async fn send(&mut self, message: Message) -> Result<(), Error> {
        let sent = self.sender.send(message).await;
        sent.map_err(|error| Error::broken("talking to the command", error))
    }
}

// Every call fails with what the server says (`Error::Api`) or with what the way there says.
#[allow(clippy::missing_errors_doc)]
impl Client {
    /// Runs a command and returns when it has begun; its output streams.
    pub async fn exec(&self, name: &str, request: &ExecRequest) -> Result<Running, Error> {
        let request = ExecRequest { detach: false, ..request.clone() };
        let call = Call::post(sandbox(name, &["exec"])).json(&request)?;
        Ok(Running { lines: Lines::of(self.transport.send(call).await?)? })
    }

    /// Runs a command and returns when it has ended, with the beginning of what it printed: a megabyte of each stream.
    pub async fn exec_and_wait(
        &self,
        name: &str,
        request: &ExecRequest,
    ) -> Result<ExecResult, Error> {
        let request = ExecRequest { detach: false, ..request.clone() };
        let target = sandbox(name, &["exec"]).flag("wait", true);
        self.transport.json(Call::post(target).json(&request)?).await
    }

    /// Starts a command that continues without its caller.
    pub async fn exec_detached(&self, name: &str, request: &ExecRequest) -> Result<Command, Error> {
        let request = ExecRequest { detach: true, ..request.clone() };
        self.transport.json(Call::post(sandbox(name, &["exec"])).json(&request)?).await
    }

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
        let sent = sender.send(Message::text(text)).await;
        sent.map_err(|error| Error::broken("talking to the command", error))?;
        Ok((Input { sender }, Attached { receiver, ended: false }))
    }

    /// Gets a command.
    pub async fn command(&self, name: &str, id: &str) -> Result<Command, Error> {
        self.transport.json(Call::get(sandbox(name, &["commands", id]))).await
    }

    /// Waits until a command has ended.
    pub async fn wait(&self, name: &str, id: &str) -> Result<Command, Error> {
        let target = sandbox(name, &["commands", id]).flag("wait", true);
        self.transport.json(Call::get(target)).await
    }

    /// Lists commands, the newest first. Never wakes the sandbox.
    #[must_use]
    pub fn commands(&self, name: &str, limit: Option<u32>) -> Pages<Command> {
        let name = name.to_owned();
        Pages::new(self, move || {
            sandbox(&name, &["commands"]).maybe("limit", limit.map(|limit| limit.to_string()))
        })
    }

    /// Reads what a command changed, path by path. Never wakes the sandbox.
    pub async fn command_changes(&self, name: &str, id: &str) -> Result<CommandChangeList, Error> {
        self.transport.json(Call::get(sandbox(name, &["commands", id, "changes"]))).await
    }

    /// Reads what a command has printed, from the start. Never wakes the sandbox.
    pub async fn logs(&self, name: &str, id: &str, follow: bool) -> Result<Running, Error> {
        let target = sandbox(name, &["commands", id, "logs"]).flag("follow", follow);
        Ok(Running { lines: Lines::of(self.transport.send(Call::get(target)).await?)? })
    }

    /// Sends a signal to a command.
    pub async fn signal(&self, name: &str, id: &str, signal: Signal) -> Result<(), Error> {
        let target = sandbox(name, &["commands", id, "signal"]);
        self.transport.done(Call::post(target).json(&SignalRequest { signal })?).await
    }

    /// Says that a command's terminal has a new size.
    pub async fn resize(&self, name: &str, id: &str, size: TermSize) -> Result<(), Error> {
        let target = sandbox(name, &["commands", id, "resize"]);
        self.transport.done(Call::post(target).json(&size)?).await
    }

    /// Sends standard input to a command; `last` closes it.
    pub async fn stdin(
        &self,
        name: &str,
        id: &str,
        bytes: Upload,
        last: bool,
    ) -> Result<(), Error> {
        let target = sandbox(name, &["commands", id, "stdin"]).flag("close", last);
        self.transport.done(Call::post(target).stream(bytes)).await
    }
}

fn output(event: ExecEvent) -> Result<Output, Error> {
    let bytes = |encoding: crate::types::Encoding, data: String| match encoding.decode(&data) {
        Ok(bytes) => Ok(Bytes::from(bytes.into_owned())),
        Err(error) => Err(Error::protocol(error.to_string())),
    };
    match event {
        ExecEvent::Started { command, session, resumed } => {
            Ok(Output::Started(Box::new(Started { command, session, resumed })))
        }
        ExecEvent::Stdout { encoding, data } => bytes(encoding, data).map(Output::Stdout),
        ExecEvent::Stderr { encoding, data } => bytes(encoding, data).map(Output::Stderr),
        ExecEvent::Exited { exit_code, command } => {
            Ok(Output::Exited(Box::new(Terminated { exit_code, command })))
        }
        ExecEvent::Gap { bytes } => Ok(Output::Gap(bytes)),
        ExecEvent::More => Ok(Output::More),
        ExecEvent::Error { error } => Err(Error::from_body(200, error)),
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

    use super::{Output, bytes_of, output};
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
}
