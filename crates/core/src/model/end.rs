//! Why a command ended.
//!
//! An exit code alone does not say it: 137 is what a timeout, an out-of-memory kill, the disk limit and `kill -9` have in
//! common. So a command's record has [`CommandEnd`], and for what has a limit, the limit and the peak. Records written
//! before there was such a field get what can be derived from them.

use serde::{Deserialize, Serialize};

use super::{Command, CommandState};

/// Why a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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
    /// Its machine died, the host went down, or the agent does not know it any more: its end is
    /// unknown.
    Lost,
}

impl Command {
    /// Why it ended; `None` while it runs. Derived where the record is older than the field.
    #[must_use]
    pub fn ended_by(&self) -> Option<CommandEnd> {
        if self.end.is_some() {
            return self.end;
        }
        match (self.state, self.exit_code) {
            (CommandState::Running, _) => None,
            (CommandState::Lost, _) | (CommandState::Exited, None) => Some(CommandEnd::Lost),
            (CommandState::Exited, Some(137)) if self.outlived_timeout() => {
                Some(CommandEnd::TimedOut)
            }
            (CommandState::Exited, Some(129..=192)) => Some(CommandEnd::Signalled),
            (CommandState::Exited, Some(_)) => Some(CommandEnd::Exited),
        }
    }

    fn outlived_timeout(&self) -> bool {
        let (Some(timeout), Some(ended)) = (self.timeout, self.ended_at) else { return false };
        let ran = ended.as_millisecond() - self.started_at.as_millisecond();
        u64::try_from(ran).unwrap_or(0).saturating_sub(self.slept_ms) >= timeout.0
    }
}

#[cfg(test)]
mod tests {
    use super::CommandEnd;
    use crate::model::Command;

    #[test]
    fn records_of_before_read_and_say_what_can_be_derived() {
        let read = |state: &str, code: Option<i32>, timeout: Option<u64>| -> Command {
            let text = serde_json::json!({
                "format": 1, "id": "cmd-01k00000000000000000000000",
                "sandbox": "sbx-01k00000000000000000000000",
                "session": "ses-01k00000000000000000000000",
                "argv": ["true"], "cwd": null, "user": null, "env_names": [], "tty": false,
                "detached": false, "timeout": timeout, "state": state, "exit_code": code,
                "started_at": "2026-01-01T00:00:00Z", "ended_at": "2026-01-01T00:00:02Z",
                "output_bytes": 0, "truncated": false
            });
            serde_json::from_value(text).expect("a record of before")
        };
        for (state, code, timeout, end) in [
            ("running", None, None, None),
            ("lost", None, None, Some(CommandEnd::Lost)),
            ("exited", Some(0), None, Some(CommandEnd::Exited)),
            ("exited", Some(3), Some(1000), Some(CommandEnd::Exited)),
            ("exited", Some(143), None, Some(CommandEnd::Signalled)),
            ("exited", Some(137), Some(9000), Some(CommandEnd::Signalled)),
            ("exited", Some(137), Some(1500), Some(CommandEnd::TimedOut)),
            ("exited", Some(255), None, Some(CommandEnd::Exited)),
        ] {
            let record = read(state, code, timeout);
            assert_eq!(record.ended_by(), end, "{state} {code:?} {timeout:?}");
            assert_eq!((record.end, record.limit, record.peak), (None, None, None));
        }
    }
}
