//! The agent's errors: which kind of failure a system call's error is on the link, and what its message says.

use std::io;
use std::path::Path;

use rustix::io::Errno;
use sandkeep_proto::link::{Done, Failure, Reply};

/// A failure, in the words of the link.
#[derive(Debug, Clone)]
pub(crate) struct RequestError {
    pub(super) kind: Failure,
    pub(super) message: String,
}

impl RequestError {
    pub(crate) fn new(kind: Failure, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// A system call failed while doing `action` (a verb phrase) to `path`.
    pub(super) fn io(action: &str, path: &Path, error: &io::Error) -> Self {
        Self::new(
            kind_of(error),
            format!("could not {action} `{}`: {}", path.display(), say(error)),
        )
    }

    pub(super) fn reply(self) -> Reply {
        Reply::Error { kind: self.kind, message: self.message }
    }

    pub(super) fn done(self) -> Done {
        Done::Failed { kind: self.kind, message: self.message }
    }
}

/// Sorts the system's error.
pub(super) fn kind_of(error: &io::Error) -> Failure {
    let Some(errno) = Errno::from_io_error(error) else {
        return match error.kind() {
            io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => Failure::Invalid,
            io::ErrorKind::UnexpectedEof => Failure::Invalid,
            _ => Failure::Fault,
        };
    };
    match errno {
        Errno::NOENT => Failure::NotFound,
        Errno::EXIST | Errno::NOTEMPTY => Failure::Exists,
        Errno::NOTDIR
        | Errno::ISDIR
        | Errno::LOOP
        | Errno::NAMETOOLONG
        | Errno::INVAL
        | Errno::XDEV
        | Errno::BUSY
        | Errno::TXTBSY
        | Errno::TOOBIG
        | Errno::NXIO
        | Errno::OPNOTSUPP => Failure::Invalid,
        Errno::ACCESS | Errno::PERM | Errno::ROFS => Failure::Denied,
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG => Failure::NoSpace,
        Errno::NOMEM | Errno::AGAIN | Errno::MFILE | Errno::NFILE | Errno::MLINK => {
            Failure::Exhausted
        }
        Errno::CONNREFUSED => Failure::Refused,
        _ => Failure::Fault,
    }
}

/// The system's words, without the number.
pub(super) fn say(error: &io::Error) -> String {
    let text = error.to_string();
    match text.rfind(" (os error ") {
        Some(end) => text[..end].to_lowercase(),
        None => text,
    }
}
