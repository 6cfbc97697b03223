//! Commands: how one is requested, and the events while it runs.
//!
//! Over plain HTTP the answer is NDJSON, one [`ExecEvent`] a line. Over a WebSocket the client first
//! sends an [`ExecRequest`] as text; after that binary messages carry bytes behind one leading
//! [`Channel`] byte, and text carries a [`ClientMessage`] one way and an [`ExecEvent`] (never `stdout`
//! or `stderr`) the other way.

use std::borrow::Cow;
use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{ErrorBody, Inject, Session, Span};

/// The size of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TermSize {
    /// Columns.
    pub cols: u16,
    /// Rows.
    pub rows: u16,
}

/// A command to run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecRequest {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Variables on top of the sandbox's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Working directory; the sandbox's if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User; the sandbox's if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// A terminal of this size instead of pipes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tty: Option<TermSize>,
    /// Whether standard input will be sent: over the WebSocket, or by `POST …/commands/{id}/stdin`.
    /// Otherwise it is empty, or what `input` says.
    #[serde(default)]
    pub stdin: bool,
    /// Standard input, whole, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input: Option<String>,
    /// Standard input, whole, as base64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_base64: Option<String>,
    /// Answer at once with the [`Command`] and let it go on by itself.
    #[serde(default)]
    pub detach: bool,
    /// End it after this long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Span>,
    /// Refuse with 409 `not_running` instead of waking the sandbox.
    #[serde(default)]
    pub if_running: bool,
    /// Secrets it is given.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inject: Vec<Inject>,
}

/// The state of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum CommandState {
    /// It runs.
    Running,
    /// It ended by itself or by a signal.
    Exited,
    /// Its session ended under it.
    Lost,
}

/// Why a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CommandEnd {
    /// It exited by itself.
    Exited,
    /// A signal ended it that came from inside the sandbox, or from its own fault.
    Signalled,
    /// It ran into its timeout and was killed.
    TimedOut,
    /// The kernel killed it, or a process of its sandbox that it waited for, because the sandbox had no memory left.
    OutOfMemory,
    /// The sandbox, or a drive in it, was over its disk limit and growing: its processes were killed.
    OutOfDisk,
    /// The disk of the host was about to use its reserve, and the sandbox was filling it: its processes were killed.
    HostDiskFull,
    /// A signal ended it that was sent through the API, or its caller hung up.
    Killed,
    /// Its session was ended while it ran.
    SessionEnded,
    /// Its machine died, the host went down, or nobody can say how it ended.
    Lost,
}

/// What a command changed in the root filesystem of its sandbox. Drives, and what is mounted in memory, do not count.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CommandChanges {
    /// How many paths it created.
    pub created: u64,
    /// How many paths it modified: content, mode, owner or times.
    pub modified: u64,
    /// How many paths it deleted.
    pub deleted: u64,
    /// What the created and modified files take on the disk.
    pub bytes: u64,
    /// Whether it was this command alone. Otherwise something else ran at the same time, and these are the changes of all together.
    pub exact: bool,
    /// Whether all changes were seen. Not if there are very many files, or if the server was restarted meanwhile.
    pub complete: bool,
    /// Commands that ran at the same time: their ids, the first 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub with: Vec<String>,
}

/// What a command changed, path by path.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CommandChangeList {
    /// The command's id.
    pub command: String,
    /// The counts; absent if they are not known.
    pub changes: Option<CommandChanges>,
    /// Paths, sorted; at most 1,000. Bytes that are not printable UTF-8, and `%`, are written `%XX`.
    pub paths: Vec<ChangedPath>,
    /// Directories in which more paths changed than are listed.
    pub more: Vec<MoreChanges>,
}

/// A path that changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ChangedPath {
    /// The path, from the root of the sandbox.
    pub path: String,
    /// What happened to it.
    pub change: PathChange,
    /// Whether it is a directory.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dir: bool,
    /// What it takes on the disk; 0 if it was deleted.
    #[serde(default)]
    pub bytes: u64,
}

/// What happened to a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PathChange {
    /// It is new.
    Created,
    /// Its content, mode, owner or times are others.
    Modified,
    /// It is gone.
    Deleted,
}

/// How many more paths changed below a directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MoreChanges {
    /// The directory, with a slash at its end.
    pub under: String,
    /// How many are new.
    pub created: u64,
    /// How many were modified.
    pub modified: u64,
    /// How many are gone.
    pub deleted: u64,
}

/// One process started in a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Command {
    /// Its id.
    pub id: String,
    /// The sandbox's id.
    pub sandbox_id: String,
    /// The session it ran in.
    pub session: String,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Its working directory.
    pub cwd: Option<String>,
    /// The user it ran as.
    pub user: Option<String>,
    /// Names of the variables it was given; values are not kept.
    pub env_names: Vec<String>,
    /// Whether it has a terminal.
    pub tty: bool,
    /// Whether it goes on when the caller leaves.
    pub detached: bool,
    /// Its state.
    pub state: CommandState,
    /// Its exit code; 128 + signal when a signal ended it.
    pub exit_code: Option<i32>,
    /// Why it ended; absent while it runs.
    #[serde(default)]
    pub end: Option<CommandEnd>,
    /// The limit that ended it: bytes with `out_of_memory` and `out_of_disk`, milliseconds with `timed_out`.
    #[serde(default)]
    pub limit: Option<u64>,
    /// The most that was used of that limit, if known: bytes.
    #[serde(default)]
    pub peak: Option<u64>,
    /// When it began.
    #[schema(format = DateTime)]
    pub started_at: String,
    /// When it ended.
    #[schema(format = DateTime)]
    pub ended_at: Option<String>,
    /// How much it printed.
    pub output_bytes: u64,
    /// Whether the log has less than it printed.
    pub truncated: bool,
    /// The service it is of.
    #[serde(default)]
    pub service: Option<String>,
    /// Who started it: the id of an API key, or `service`, `hook`.
    #[serde(default)]
    pub by: Option<String>,
    /// What it changed; absent while it runs, and until that is known.
    #[serde(default)]
    pub changes: Option<CommandChanges>,
}

/// A command that has ended and what it printed, as one document: the answer to `POST …/exec?wait=true`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecResult {
    /// The command.
    pub command: Command,
    /// Whether this call woke the sandbox.
    pub resumed: bool,
    /// Its exit code; 128 + signal when a signal ended it. Absent if its session ended under it.
    pub exit_code: Option<i32>,
    /// Why it ended.
    pub end: Option<CommandEnd>,
    /// Standard output, or that of the terminal, as text. Bytes that are not UTF-8 are replaced by `\u{fffd}`.
    pub stdout: String,
    /// The same bytes as base64, if they are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout_base64: Option<String>,
    /// How much it printed to standard output, as far as that was kept.
    pub stdout_bytes: u64,
    /// Whether `stdout` is only the beginning. Its log has more.
    pub stdout_truncated: bool,
    /// Standard error as text. Bytes that are not UTF-8 are replaced by `\u{fffd}`.
    pub stderr: String,
    /// The same bytes as base64, if they are not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr_base64: Option<String>,
    /// How much it printed to standard error, as far as that was kept.
    pub stderr_bytes: u64,
    /// Whether `stderr` is only the beginning. Its log has more.
    pub stderr_truncated: bool,
    /// Bytes that it printed to either and that were not kept, because the log is bounded.
    pub missing_bytes: u64,
}

/// What `POST …/exec` answers as one JSON document: with `?wait=true` the result, with `detach` the command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
#[allow(clippy::large_enum_variant)] // one at a time, on its way to or from JSON
pub enum ExecAnswer {
    /// The command has ended.
    Result(ExecResult),
    /// The command was started.
    Command(Command),
}

/// The encoding of `data`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Encoding {
    /// As they are: they are valid UTF-8.
    Utf8,
    /// As base64.
    Base64,
}

/// One line of the stream of a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[allow(clippy::large_enum_variant)] // one at a time, on its way to or from JSON
pub enum ExecEvent {
    /// The command was started. Always the first line.
    Started {
        /// The command.
        command: Command,
        /// The session, with what its hooks did if this call woke the sandbox.
        session: Session,
        /// Whether this call woke the sandbox.
        resumed: bool,
    },
    /// Bytes of standard output, or of the terminal.
    Stdout {
        /// The encoding of `data`.
        encoding: Encoding,
        /// The bytes.
        data: String,
        /// When it was printed; only in logs, with `times`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(format = DateTime)]
        at: Option<String>,
    },
    /// Bytes of standard error.
    Stderr {
        /// The encoding of `data`.
        encoding: Encoding,
        /// The bytes.
        data: String,
        /// When it was printed; only in logs, with `times`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(format = DateTime)]
        at: Option<String>,
    },
    /// It printed bytes here that are not kept; what comes next was printed after them.
    Gap {
        /// How many.
        bytes: u64,
    },
    /// The command ended. Always the last line, unless something went wrong.
    Exited {
        /// Its exit code; absent if its session ended under it.
        exit_code: Option<i32>,
        /// The command.
        command: Command,
    },
    /// That is all of the log there is; the command still runs. Only without `follow`.
    More,
    /// Something went wrong, or the server is going down. The last line.
    Error {
        /// What.
        error: ErrorBody,
    },
}

/// Why the `data` of an event is no bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the output of the command is not valid base64")]
pub struct BadData;

impl ExecEvent {
    /// Bytes of standard output, said in the shortest way.
    #[must_use]
    pub fn stdout(bytes: &[u8]) -> Self {
        let (encoding, data) = encode(bytes);
        Self::Stdout { encoding, data, at: None }
    }

    /// Bytes of standard error, said in the shortest way.
    #[must_use]
    pub fn stderr(bytes: &[u8]) -> Self {
        let (encoding, data) = encode(bytes);
        Self::Stderr { encoding, data, at: None }
    }

    /// The same with the time at which it was printed. Only output has one.
    #[must_use]
    pub fn printed_at(mut self, time: Option<String>) -> Self {
        if let Self::Stdout { at, .. } | Self::Stderr { at, .. } = &mut self {
            *at = time;
        }
        self
    }
}

impl Encoding {
    /// The bytes that `data` says.
    ///
    /// # Errors
    ///
    /// Returns [`BadData`] when it is not what the encoding promises.
    pub fn decode(self, data: &str) -> Result<Cow<'_, [u8]>, BadData> {
        match self {
            Self::Utf8 => Ok(Cow::Borrowed(data.as_bytes())),
            Self::Base64 => STANDARD.decode(data).map(Cow::Owned).map_err(|_| BadData),
        }
    }
}

fn encode(bytes: &[u8]) -> (Encoding, String) {
    // A control character takes six bytes in JSON; base64 makes four of three.
    let plain = |byte: u8| byte >= b' ' || matches!(byte, b'\n' | b'\r' | b'\t');
    let controls = bytes.iter().filter(|byte| !plain(**byte)).count();
    match std::str::from_utf8(bytes) {
        Ok(text) if controls * 15 <= bytes.len() => (Encoding::Utf8, text.to_owned()),
        _ => (Encoding::Base64, STANDARD.encode(bytes)),
    }
}

/// What the first byte of a binary WebSocket message says the rest is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Channel {
    /// Standard input, from the client.
    Stdin = 0,
    /// Standard output, or the terminal.
    Stdout = 1,
    /// Standard error.
    Stderr = 2,
}

impl Channel {
    /// Reads the byte.
    #[must_use]
    pub fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            0 => Some(Self::Stdin),
            1 => Some(Self::Stdout),
            2 => Some(Self::Stderr),
            _ => None,
        }
    }
}

/// A text message of a WebSocket client, after its [`ExecRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum ClientMessage {
    /// The terminal has a new size.
    Resize {
        /// Columns.
        cols: u16,
        /// Rows.
        rows: u16,
    },
    /// Send a signal to the command.
    Signal {
        /// Which.
        signal: Signal,
    },
    /// Close standard input.
    StdinClose,
}

/// A signal: its number, or its name with or without `SIG`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum Signal {
    /// By number.
    Number(i32),
    /// By name.
    Name(String),
}

/// A signal to send.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SignalRequest {
    /// Which.
    pub signal: Signal,
}

#[cfg(test)]
mod tests {
    use super::{Encoding, ExecEvent, ExecRequest};

    #[test]
    fn output_is_text_where_it_can_be() {
        let line = serde_json::to_string(&ExecEvent::stdout(b"hi\n")).unwrap();
        assert_eq!(line, r#"{"type":"stdout","encoding":"utf8","data":"hi\n"}"#);
        let ExecEvent::Stderr { encoding: Encoding::Base64, data, .. } =
            ExecEvent::stderr(&[0xff, 0])
        else {
            panic!("not UTF-8");
        };
        assert_eq!(*Encoding::Base64.decode(&data).unwrap(), [0xff, 0]);
    }

    #[test]
    fn control_characters_do_not_blow_output_up() {
        for (bytes, expected) in [
            (&[0; 300][..], Encoding::Base64),
            (b"\x1b[31mred, and a good deal of text after it\x1b[0m\n", Encoding::Utf8),
            (b"", Encoding::Utf8),
        ] {
            let ExecEvent::Stdout { encoding, data, .. } = ExecEvent::stdout(bytes) else {
                panic!("stdout");
            };
            assert_eq!((encoding, &*encoding.decode(&data).unwrap()), (expected, bytes));
        }
    }

    #[test]
    fn an_argv_is_all_it_takes() {
        let request: ExecRequest = serde_json::from_str(r#"{"argv":["true"]}"#).unwrap();
        assert_eq!(
            request,
            ExecRequest { argv: vec!["true".to_owned()], ..ExecRequest::default() }
        );
    }
}
