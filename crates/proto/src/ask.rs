//! What `keep ask` inside a sandbox and the agent say to each other: a line of JSON each way.
//!
//! The agent listens at [`SOCKET`], a name in the abstract namespace, which belongs to the sandbox's network
//! namespace: no file is made, and nothing outside can reach it.

use serde::{Deserialize, Serialize};

/// The name of the socket, without the zero byte that such names begin with.
pub const SOCKET: &str = "sandkeep-ask";
/// Where the program is, inside.
pub const PROGRAM: &str = "/run/sandkeep/bin/keep";
/// The directory that commands find it in.
pub const PROGRAM_DIR: &str = "/run/sandkeep/bin";
/// How long a line may be.
pub const LINE: usize = 20 << 10;
/// How long a question may be, and what there is to know about it.
pub const QUESTION: usize = 1000;
/// How long the context of a question may be.
pub const CONTEXT: usize = 8 << 10;

/// A question from inside.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AskLine {
    /// The question, on one line.
    pub question: String,
    /// What there is to know before answering.
    #[serde(default)]
    pub context: String,
    /// The answer that counts if none comes in time: whether it is yes.
    #[serde(default)]
    pub default: Option<bool>,
    /// How long to wait for an answer, in milliseconds; as the sandbox's policy says if absent.
    #[serde(default)]
    pub timeout_ms: Option<u64>,
}

/// The answer to a question from inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum InsideAnswer {
    /// Yes.
    Approved,
    /// No.
    Denied,
    /// There was no answer in time, and there is no default.
    Expired,
}

impl InsideAnswer {
    /// The exit code of `keep ask`.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Approved => 0,
            Self::Denied => 1,
            Self::Expired => 2,
        }
    }
}

/// The agent's answer to the program that asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AskReply {
    /// The answer.
    Answer {
        /// The answer.
        answer: InsideAnswer,
        /// The comment of the decision.
        comment: String,
    },
    /// The question was not asked.
    Problem {
        /// Why.
        problem: String,
    },
}
