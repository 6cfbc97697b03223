//! Why the agent did not do what it was asked.

use std::io;
use std::path::PathBuf;

use sandkeep_proto::link::Failure;

/// Why a call over the agent link failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuestError {
    /// The agent refused the request. `message` is written for people.
    #[error("{message}")]
    Refused {
        /// What kind of failure, for programs.
        kind: Failure,
        /// What happened; names the path or program.
        message: String,
    },
    /// What was to be written does not fit into the sandbox's disk limit, or a drive's. Found
    /// before the agent was asked, or reported by the agent.
    #[error("the disk limit is reached: {message}")]
    DiskLimit {
        /// Which limit, and what it is.
        message: String,
    },
    /// The other end of the stream takes no more bytes: the process has ended or closed its
    /// standard input, the peer has closed its connection.
    #[error("the other end takes no more input")]
    Gone,
    /// The connection is gone. What was asked may or may not have happened; commands live on.
    #[error("the connection to the sandbox's agent is lost")]
    Lost,
    /// The agent is of another version.
    #[error("the agent speaks version {theirs} of the link, this daemon speaks {ours}")]
    Version {
        /// What this daemon speaks.
        ours: u32,
        /// What the agent speaks.
        theirs: u32,
    },
    /// The agent broke the rules of the link; the connection was closed.
    #[error("the agent broke the rules of the link: {reason}")]
    Protocol {
        /// Which rule, and how.
        reason: String,
    },
    /// The agent could not be dialled.
    #[error("could not reach the agent at `{path}`", path = path.display())]
    Io {
        /// Its socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The agent did not answer in time.
    #[error("the agent did not answer in time")]
    Timeout,
}

impl GuestError {
    /// The agent's own word for the failure, where it gave one.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        match self {
            Self::Refused { kind, .. } => Some(*kind),
            _ => None,
        }
    }
}
