//! Commands: one way ([`Running`], NDJSON over plain HTTP); `attach` has the way with standard input, signals and window
//! sizes.

use std::time::Duration;

use bytes::Bytes;

use crate::body::{Lines, Upload};
use crate::paging::Pages;
use crate::sandboxes::sandbox;
use crate::transport::Call;
use crate::types::{
    Command, CommandChangeList, ExecEvent, ExecRequest, ExecResult, Session, Signal, SignalRequest,
    TermSize,
};
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
    printed_at: Option<String>,
}

/// Which part of a log to read, and how.
#[derive(Debug, Clone, Default)]
pub struct LogQuery {
    /// Go on until the command ends.
    pub follow: bool,
    /// Leave out this many bytes, counted over both streams and gaps.
    pub offset: u64,
    /// Only this many lines at the end.
    pub tail: Option<u32>,
    /// Only what was printed since a time (RFC 3339), or since how long ago (`10m`).
    pub since: Option<String>,
    /// Say when output was printed: [`Running::printed_at`].
    pub times: bool,
}

/// The longest silence of a log that is followed; the server shows every 15 seconds that it is there.
const SILENCE: Duration = Duration::from_secs(45);

impl Running {
    /// Returns what it says next, or nothing after the last.
    ///
    /// # Errors
    ///
    /// [`Error::Api`] if something went wrong on the server's side while it ran, or
    /// [`Error::Broken`] if the connection did not last.
    pub async fn next(&mut self) -> Result<Option<Output>, Error> {
        let Some(event) = self.lines.next().await? else { return Ok(None) };
        if let ExecEvent::Stdout { at, .. } | ExecEvent::Stderr { at, .. } = &event {
            self.printed_at.clone_from(at);
        }
        output(event).map(Some)
    }

    /// When the output was printed that came last, if the query asked for times.
    #[must_use]
    pub fn printed_at(&self) -> Option<&str> {
        self.printed_at.as_deref()
    }

    fn of(lines: Lines<ExecEvent>) -> Self {
        Self { lines, printed_at: None }
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

// Every call fails with what the server says (`Error::Api`) or with what the way there says.
#[allow(clippy::missing_errors_doc)]
impl Client {
    /// Runs a command and returns when it has begun; its output streams.
    pub async fn exec(&self, name: &str, request: &ExecRequest) -> Result<Running, Error> {
        let request = ExecRequest { detach: false, ..request.clone() };
        let call = Call::post(sandbox(name, &["exec"])).json(&request)?;
        Lines::of(self.transport.send(call).await?).map(Running::of)
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

    /// Lists the commands that run, the newest first. Never wakes the sandbox.
    #[must_use]
    pub fn running_commands(&self, name: &str) -> Pages<Command> {
        let name = name.to_owned();
        Pages::new(self, move || {
            sandbox(&name, &["commands"]).with("limit", "1000").flag("running", true)
        })
    }

    /// Reads what a command has printed, from the start. Never wakes the sandbox.
    pub async fn logs(&self, name: &str, id: &str, follow: bool) -> Result<Running, Error> {
        self.log(name, id, &LogQuery { follow, ..LogQuery::default() }).await
    }

    /// Reads a part of what a command has printed. Never wakes the sandbox.
    pub async fn log(&self, name: &str, id: &str, query: &LogQuery) -> Result<Running, Error> {
        let LogQuery { follow, offset, tail, since, times } = query;
        let target = sandbox(name, &["commands", id, "logs"])
            .flag("follow", *follow)
            .maybe("offset", (*offset > 0).then(|| offset.to_string()))
            .maybe("tail", tail.map(|lines| lines.to_string()))
            .maybe("since", since.as_ref())
            .flag("times", *times)
            .flag("keep_alive", *follow);
        let lines = Lines::of(self.transport.send(Call::get(target)).await?)?;
        Ok(Running::of(if *follow { lines.never_silent_for(SILENCE) } else { lines }))
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

    /// Sends standard input that begins at `offset`: bytes that have arrived already are left out, so this can be repeated.
    pub async fn stdin_at(
        &self,
        name: &str,
        id: &str,
        offset: u64,
        bytes: Bytes,
        last: bool,
    ) -> Result<(), Error> {
        let target = sandbox(name, &["commands", id, "stdin"])
            .with("offset", offset.to_string())
            .flag("close", last);
        self.transport.done(Call::post(target).stream(Upload::from(bytes))).await
    }
}

pub(crate) fn output(event: ExecEvent) -> Result<Output, Error> {
    let bytes = |encoding: crate::types::Encoding, data: String| match encoding.decode(&data) {
        Ok(bytes) => Ok(Bytes::from(bytes.into_owned())),
        Err(error) => Err(Error::protocol(error.to_string())),
    };
    match event {
        ExecEvent::Started { command, session, resumed } => {
            Ok(Output::Started(Box::new(Started { command, session, resumed })))
        }
        ExecEvent::Stdout { encoding, data, .. } => bytes(encoding, data).map(Output::Stdout),
        ExecEvent::Stderr { encoding, data, .. } => bytes(encoding, data).map(Output::Stderr),
        ExecEvent::Exited { exit_code, command } => {
            Ok(Output::Exited(Box::new(Terminated { exit_code, command })))
        }
        ExecEvent::Gap { bytes } => Ok(Output::Gap(bytes)),
        ExecEvent::More => Ok(Output::More),
        ExecEvent::Error { error } => Err(Error::from_body(200, error)),
    }
}
