//! Programs of the host that work on what sandboxes wrote, and how they are confined.
//!
//! `keep-agent confine` reads one [`Helper`] on standard input, confines a child, which becomes the program, and waits for it. The program's
//! standard output and error are the launcher's. When everything is over the launcher adds one line to standard error: [`MARK`] and an [`End`]
//! as JSON. It is the last line, because nothing of the program is left that could write another.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The version both sides must speak.
pub const VERSION: u32 = 1;
/// What the last line of standard error begins with.
pub const MARK: &str = "keep-agent: ";
/// Where the program finds what it reads.
pub const INPUT: &str = "/in";
/// Where the program finds the file it writes.
pub const OUTPUT: &str = "/out";
/// How many user ids, from 0 on, are shifted to the helper's own. Greater ones, which a machine with a kernel of its own can write, stay what
/// they are, but for those that the helper's own would be.
pub const SHIFTED: u32 = 65_536;

/// A program to be run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Helper {
    /// [`VERSION`].
    pub version: u32,
    /// The program: below `/usr`, or [`INPUT`].
    pub program: PathBuf,
    /// Its arguments, its name first.
    pub argv: Vec<String>,
    /// Its whole environment.
    pub env: BTreeMap<String, String>,
    /// What it reads.
    pub input: Input,
    /// The existing file that it writes to.
    pub output: Option<PathBuf>,
    /// Its user id on the host, and the first of [`SHIFTED`].
    pub uid: u32,
    /// What it may use.
    pub limits: Limits,
}

/// What a program is shown at [`INPUT`], to be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Input {
    /// Nothing.
    Nothing,
    /// A file that everybody may read.
    File(PathBuf),
    /// Layers: one as it is, several stacked. Each file can be read, whatever its owner.
    Layers {
        /// The directory all of `lower` are in.
        directory: PathBuf,
        /// Relative to `directory`; the first is the topmost.
        lower: Vec<PathBuf>,
    },
}

/// What a program may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Bytes of address space.
    pub memory: u64,
    /// Bytes of stack.
    pub stack: u64,
    /// Seconds of processor time.
    pub cpu: u64,
    /// The largest file, in bytes.
    pub file_size: u64,
    /// Seconds until it is ended.
    pub deadline: u64,
}

/// How it ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// With this status.
    Exited(i32),
    /// By this signal.
    Signalled(i32),
    /// It took too long.
    TimedOut,
    /// It was never run.
    Failed {
        /// What was being done, as a verb phrase.
        step: String,
        /// The system's error.
        reason: String,
    },
}
