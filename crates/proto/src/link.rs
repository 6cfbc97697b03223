//! What daemon and agent say on the link.
//!
//! The host opens a stream with a [`Request`]; the agent answers with one [`Reply`]. Requests that
//! move bytes continue with Data and close with a [`Done`] (see [`crate::frame`]).
//!
//! *Commands outlive connections.* A command is known by the id the daemon chose. Its output is
//! numbered: byte `n` of a command is the same byte on every connection. The agent keeps output
//! until the daemon credits it, stops reading the process's pipes when a window's worth is unkept,
//! and keeps the exit status until [`Request::Forget`]. So a daemon that dies and comes back asks
//! [`Request::Commands`], attaches to each from the byte it has, and no output is lost or doubled.
//!
//! *When a command is over.* [`Done::Exited`] comes when the process has exited and all it printed
//! was sent. What it left running in the background may hold its output open; then silence of 200 ms
//! ends the wait, or two seconds of its chatter. Such leftovers live on, and what they print later is
//! dropped; on a terminal they are hung up.

mod machine;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

pub use self::machine::{Assemble, AssembleMount, Identity, Moment, Renew};
use crate::ask::{AskLine, InsideAnswer};

/// The version both sides must speak. Raised when an old peer would misunderstand.
pub const VERSION: u32 = 1;

/// What the daemon asks of the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// First on every connection. Replies [`Reply::Hello`]. An agent that was greeted on a newer
    /// connection drops the older one: there is one daemon.
    Hello {
        /// The daemon's [`VERSION`].
        version: u32,
    },
    /// Starts a process. Replies [`Reply::Spawned`]; output as Data and DataErr, standard input as
    /// Data from the host (End closes it); Done is [`Done::Exited`]. The agent's Credit says how much
    /// of the input is in the process's pipe or terminal, and is given with every write to it: what
    /// was sent and not credited waits in the agent.
    Spawn(Spawn),
    /// Attaches to a command of an earlier connection, from output byte `from`. Replies
    /// [`Reply::Spawned`], then like [`Request::Spawn`].
    Attach {
        /// The command.
        command: String,
        /// How many bytes of output the daemon has kept already.
        from: u64,
        /// How many bytes of standard input the daemon knows were taken. The reply has the number
        /// that were taken; if that is fewer, the two do not mean the same command, and the agent
        /// refuses.
        stdin_from: u64,
    },
    /// Lists the commands the agent still knows. Replies [`Reply::Commands`].
    Commands,
    /// Drops a command that has exited. Replies [`Reply::Ok`], also when it is unknown; refuses when
    /// it runs.
    Forget {
        /// The command.
        command: String,
    },
    /// Sends a signal to a command's process group. Replies [`Reply::Ok`]; refuses when it has exited.
    Signal {
        /// The command.
        command: String,
        /// The signal's number.
        signal: i32,
    },
    /// Changes a terminal's size. Replies [`Reply::Ok`].
    Resize {
        /// The command.
        command: String,
        /// The new size.
        size: TermSize,
    },
    /// Kills every process but the agent, after `grace_ms` of politeness (SIGTERM). Replies
    /// [`Reply::Ok`] when none is left. The agent itself stays.
    Quiesce {
        /// How long processes may take to end by themselves.
        grace_ms: u64,
    },
    /// Reads a file. Replies [`Reply::Stat`], then Data; Done is [`Done::Moved`].
    ReadFile {
        /// Where.
        at: At,
        /// Where to begin.
        offset: u64,
        /// The largest number of bytes; to the end if absent.
        limit: Option<u64>,
    },
    /// Writes a file from the host's Data until End: to a temporary name beside it, then renamed. A
    /// symlink is written through; an existing file keeps its owner. Replies [`Reply::Ok`] when
    /// ready for Data; Done is [`Done::Moved`].
    WriteFile {
        /// Where.
        at: At,
        /// Permission bits of a new file; an existing file keeps its own if absent.
        mode: Option<u32>,
        /// Whether missing directories are made.
        parents: bool,
        /// Adds to the end of the file instead of replacing it.
        append: bool,
    },
    /// Makes a directory. Replies [`Reply::Ok`].
    MakeDir {
        /// Where.
        at: At,
        /// Permission bits.
        mode: Option<u32>,
        /// Whether missing parents are made, and an existing directory is fine.
        parents: bool,
    },
    /// Lists a directory. Replies [`Reply::Entries`], sorted by name, at most 10,000 at a time and no
    /// more than fit a frame.
    ListDir {
        /// Where.
        at: At,
        /// Continue after this name.
        after: Option<String>,
    },
    /// Returns the metadata of one path, without following a final symlink. Replies
    /// [`Reply::Stat`].
    Stat {
        /// Where.
        at: At,
    },
    /// Renames, by copying where the kernel cannot. Replies [`Reply::Ok`].
    Move {
        /// From where.
        at: At,
        /// To where, resolved like `at`.
        to: String,
    },
    /// Removes. Replies [`Reply::Ok`].
    Remove {
        /// Where.
        at: At,
        /// Whether a directory goes with all it holds.
        recursive: bool,
        /// Whether it is no error that nothing exists there.
        missing_ok: bool,
    },
    /// Unpacks the host's Data, a tar stream, below a directory, which is made if absent. Entries
    /// that would leave it (`..`, absolute names, through links) or are devices are refused before
    /// anything of them is written. Replies [`Reply::Ok`] when ready; Done is [`Done::Moved`].
    TarIn {
        /// The directory.
        at: At,
        /// Whether a directory on the way to an entry may be a symlink, wherever it leads. For
        /// archives that stand for files written one by one.
        #[serde(default, skip_serializing_if = "is_false")]
        through_links: bool,
    },
    /// Packs a file or directory as a tar stream, names relative to its parent. Replies
    /// [`Reply::Stat`], then Data; Done is [`Done::Moved`].
    TarOut {
        /// What to pack.
        at: At,
    },
    /// Makes this machine the sandbox's: mounts its root and enters it. Of a machine of its own, once, before anything else
    /// but `Hello`. Replies [`Reply::Ok`].
    Assemble(Assemble),
    /// Notifies a machine that was restored from memory of what changed meanwhile. Replies
    /// [`Reply::Hello`], with the new run's generation.
    Renew(Renew),
    /// Writes everything to the machine's disks and lets nothing more be written until [`Request::Thaw`], or for ten
    /// seconds. Replies [`Reply::Ok`].
    Freeze,
    /// Ends that. Of one that is not frozen: does nothing. Replies [`Reply::Ok`].
    Thaw,
    /// Looks at what changed in the root since the last look. Of a machine of its own: in a container the daemon looks itself.
    /// Replies [`Reply::Looked`].
    Look {
        /// Whether everything that exists now is in a snapshot.
        #[serde(default, skip_serializing_if = "is_false")]
        saved: bool,
    },
    /// Packs what was written to a disk: see `docs/MICROVM.md`. Replies [`Reply::Ok`], then Data; Done is [`Done::Moved`].
    Export {
        /// 0 is the root; others are [`Assemble::mounts`], counted from 1.
        part: u32,
    },
    /// Lists questions of programs inside that wait for an answer. The first such request has the agent listen for
    /// them. Replies [`Reply::Questions`] when something has changed since the version that is named, or when the
    /// time is over.
    Questions {
        /// The version that the daemon has; 0 if none.
        known: u64,
        /// How long to wait for another one, in milliseconds; at most 25,000.
        wait_ms: u64,
    },
    /// Answers a question. Replies [`Reply::Ok`], also when it is unknown: its requester may be
    /// gone.
    AnswerQuestion {
        /// The question.
        question: String,
        /// The answer.
        answer: InsideAnswer,
        /// The comment of the decision.
        comment: String,
    },
    /// Connects to a TCP port on the sandbox's loopback. Replies [`Reply::Ok`], then Data both
    /// ways; Done is [`Done::Moved`].
    Connect {
        /// The port.
        port: u16,
    },
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// A path inside the sandbox and as whom it is touched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct At {
    /// The path; relative ones start at `cwd`.
    pub path: String,
    /// What a relative path is relative to; the user's home if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// The user, by name or number, optionally `user:group`; root if absent. The kernel checks its
    /// permissions, and what is made belongs to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// A process to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spawn {
    /// The daemon's id for it.
    pub command: String,
    /// Program and arguments. The program is looked up on the command's own PATH.
    pub argv: Vec<String>,
    /// The whole environment, but for HOME, USER, LOGNAME, SHELL and PATH, which the agent fills in
    /// for the user when absent.
    pub env: BTreeMap<String, String>,
    /// The working directory; the user's home if absent, `/` if that is not there.
    pub cwd: Option<String>,
    /// The user, by name or number, optionally `user:group`; root if absent.
    pub user: Option<String>,
    /// A terminal of this size instead of pipes.
    pub tty: Option<TermSize>,
    /// Whether the host will send standard input; otherwise it is empty.
    pub stdin: bool,
    /// Run on behalf of this user, as `sudo` would: the agent sets SUDO_USER, SUDO_UID, SUDO_GID and
    /// SUDO_COMMAND, and HOME, USER and LOGNAME of `user` whatever `env` says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sudo_from: Option<String>,
    /// More of the environment, which the agent forgets as soon as the process has it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub secret_env: BTreeMap<String, Hidden>,
    /// Files in memory that only the command's user can read. They exist when the process starts
    /// and are removed when it has exited.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secret_files: Vec<SecretFile>,
}

/// A file that exists for one command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SecretFile {
    /// Where: below `/run` or `/dev/shm`. Nothing may be there; missing directories are made.
    pub path: String,
    /// What it holds.
    pub value: Hidden,
}

/// A text that is not shown, and wiped from memory when it is dropped.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Hidden(Zeroizing<String>);

impl Hidden {
    /// Hides a text.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(Zeroizing::new(text.to_owned()))
    }

    /// The text.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(hidden)")
    }
}

/// The size of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TermSize {
    /// Columns.
    pub cols: u16,
    /// Rows.
    pub rows: u16,
}

/// The agent's answer to a [`Request`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// Done, or ready.
    Ok,
    /// The agent's answer to a greeting.
    Hello {
        /// The agent's [`VERSION`].
        version: u32,
        /// Different every time a machine starts, is restored or forked.
        generation: String,
    },
    /// The process runs.
    Spawned {
        /// Its number inside the sandbox.
        pid: u32,
        /// How many bytes of standard input the agent has taken so far.
        stdin_taken: u64,
        /// How many of those the process's pipe or terminal has.
        #[serde(default)]
        stdin_written: u64,
    },
    /// The commands the agent knows.
    Commands {
        /// In the order they were started.
        commands: Vec<Known>,
    },
    /// About one path.
    Stat {
        /// The entry.
        entry: Entry,
    },
    /// What a directory holds.
    Entries {
        /// Sorted by name.
        entries: Vec<Entry>,
        /// Whether there are more after the last.
        more: bool,
    },
    /// What changed.
    Looked(Box<Looked>),
    /// What programs inside ask.
    Questions {
        /// Grows with every change.
        version: u64,
        /// All that wait for an answer, in the order they were asked.
        questions: Vec<InsideQuestion>,
    },
    /// It did not work.
    Error {
        /// What kind of failure, for programs.
        kind: Failure,
        /// What happened, for people: names the path or program and says why.
        message: String,
    },
}

/// A question of a program inside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InsideQuestion {
    /// The agent's name for it: 32 hex digits, never used twice.
    pub id: String,
    /// The number of the user that asks, inside the sandbox.
    pub user: u32,
    /// What is asked.
    #[serde(flatten)]
    pub asked: AskLine,
}

/// What changed in a machine's root since the last look.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Looked {
    /// Whether the last look is known. Otherwise this is the first, and says nothing about changes.
    pub known: bool,
    /// Whether everything was visited.
    pub complete: bool,
    /// Whether no process but the agent is alive.
    pub alone: bool,
    /// How many paths were created, modified and deleted.
    pub counts: [u64; 3],
    /// What the created and modified ones take on the disk.
    pub bytes: u64,
    /// Files that are new, other or gone since the last snapshot, and what the new and other ones take; absent if not known.
    pub unsaved: Option<(u64, u64)>,
    /// Paths that changed, sorted: at most 1,000, and no more than fit a frame.
    pub paths: Vec<LookedPath>,
    /// Directories with more changes than are listed, each with how many paths were created, modified and deleted.
    pub more: Vec<(String, [u64; 3])>,
}

/// A path that changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookedPath {
    /// The path from the root, without a leading slash. Bytes that are not printable UTF-8, and `%`, are written `%XX`.
    pub path: String,
    /// 0 if it was created, 1 if it was modified, 2 if it was deleted.
    pub change: u8,
    /// Whether it is a directory.
    #[serde(default, skip_serializing_if = "is_false")]
    pub dir: bool,
    /// What it takes on the disk.
    #[serde(default)]
    pub bytes: u64,
}

/// What kind of failure it was. A kind exists where the daemon's callers act differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Failure {
    /// No such file, directory or command.
    NotFound,
    /// The program to run is not there.
    NoExecutable,
    /// The program to run exists, and cannot be executed.
    NotExecutable,
    /// The working directory of a process is not there or cannot be entered.
    NoDirectory,
    /// There is no such user or group.
    NoUser,
    /// It exists already, or the directory is not empty.
    Exists,
    /// Not a directory, is a directory, too many links, a bad name.
    Invalid,
    /// The user may not do this.
    Denied,
    /// The disk is full or over its limit.
    NoSpace,
    /// Too many processes, or no memory.
    Exhausted,
    /// Nothing listens on the port.
    Refused,
    /// Any other error of the system.
    Fault,
}

/// A command the agent knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    /// The daemon's id for it.
    pub command: String,
    /// Its number inside the sandbox.
    pub pid: u32,
    /// How it ended, if it did.
    pub exit: Option<Exit>,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// The exit code; 128 + signal when a signal ended it.
    pub code: i32,
    /// The signal, if one did.
    pub signal: Option<i32>,
    /// Whether the machine's kernel killed a process for want of memory while it ran, and it looks like one of them. Only an
    /// agent with a kernel of its own knows.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub oom: bool,
}

impl Exit {
    /// It ended with this code.
    #[must_use]
    pub fn with_code(code: i32) -> Self {
        Self { code, signal: None, oom: false }
    }

    /// This signal ended it.
    #[must_use]
    pub fn by_signal(signal: i32) -> Self {
        Self { code: 128 + signal, signal: Some(signal), oom: false }
    }

    /// Whether it, or what it waited for last, was killed by force: a shell ends with 137 when its program was.
    #[must_use]
    pub fn is_kill(&self) -> bool {
        self.code == 137
    }
}

/// How a stream that moved bytes ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "done", rename_all = "snake_case")]
pub enum Done {
    /// The process ended, and all its output was sent.
    Exited(Exit),
    /// Everything was moved.
    Moved {
        /// How many bytes.
        bytes: u64,
        /// How many files, for tar streams; 1 for a file.
        files: u64,
    },
    /// It broke off.
    Failed {
        /// What kind of failure.
        kind: Failure,
        /// What happened, for people.
        message: String,
    },
}

/// What is at a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// The name (of a listing) or the path that was asked about. Bytes that are not UTF-8 are shown
    /// as U+FFFD here and exactly in `raw_name`.
    pub name: String,
    /// The exact name, base64, where `name` could not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub raw_name: Option<String>,
    /// What it is.
    pub kind: EntryKind,
    /// Size in bytes.
    pub size: u64,
    /// Permission bits, set-user-id and its like included.
    pub mode: u32,
    /// Owner, as a number inside the sandbox.
    pub uid: u32,
    /// Group, as a number inside the sandbox.
    pub gid: u32,
    /// Last modification, in milliseconds since 1970.
    pub modified_ms: i64,
    /// Where a symlink points.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
}

/// What an [`Entry`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A pipe, socket or device.
    Other,
}

#[cfg(test)]
mod tests;
