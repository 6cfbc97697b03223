//! Errors of commands: message, hint and exit code.
//!
//! All errors become a [`Failure`] here, once, so that the codes promised by `keep --help` are
//! decided in one place.

use std::error::Error as StdError;
use std::io;
use std::io::Write as _;

use sandkeep_client::Error as ClientError;
use sandkeep_client::types::error_chain;

use crate::command::conflicts_text;
use crate::command::guard::findings_text;
use crate::screen::Paint;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The server rejected the request, or could not be reached.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A local error.
    #[error("{message}")]
    Here {
        /// What is wrong.
        message: String,
        /// What to do about it.
        hint: Option<String>,
        /// The system's error.
        source: Option<Box<dyn StdError + Send + Sync>>,
    },
    /// Something that was named is not there.
    #[error("{message}")]
    NotFound {
        /// What is not there.
        message: String,
        /// Where to look.
        hint: String,
    },
    /// No server was named, and none was found.
    #[error("no server found: no address given, and no local server in {looked}")]
    NoServer {
        /// Where its file was looked for.
        looked: String,
    },
    /// Some of several things failed; each was reported when it happened.
    #[error("{failed} of {all} failed")]
    Some {
        /// How many.
        failed: usize,
        /// Of how many.
        all: usize,
        /// The exit code of the first.
        code: u8,
    },
    /// The reader of the output has closed it. Not reported.
    #[error("the reader of the output is gone")]
    OutputClosed,
    /// `doctor --strict` found something.
    #[error("this host does not meet the requirements")]
    HostRequirements,
    /// `fsck` found damage.
    #[error("the data directory is damaged")]
    DataDamaged,
    /// `backup verify` found something.
    #[error("the backup is damaged")]
    BackupDamaged,
    /// `audit verify` found something.
    #[error("the audit log was changed")]
    AuditChanged,
}

impl Failure {
    pub(crate) fn here(message: impl Into<String>) -> Self {
        Self::Here { message: message.into(), hint: None, source: None }
    }

    pub(crate) fn not_found(message: impl Into<String>, advice: impl Into<String>) -> Self {
        Self::NotFound { message: message.into(), hint: advice.into() }
    }

    pub(crate) fn caused(
        message: impl Into<String>,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        Self::Here { message: message.into(), hint: None, source: Some(source.into()) }
    }

    pub(crate) fn with_hint(self, advice: impl Into<String>) -> Self {
        match self {
            Self::Here { message, source, .. } => {
                Self::Here { message, source, hint: Some(advice.into()) }
            }
            other => other,
        }
    }

    /// The same failure of the server with other advice.
    pub(crate) fn with_client_hint(self, advice: String) -> Self {
        match self {
            Self::Client(error) => Self::Client(error.with_hint(advice)),
            other => other,
        }
    }

    /// The exit code of commands that run nothing remote.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Client(error) => client_code(error),
            Self::Here { .. }
            | Self::HostRequirements
            | Self::DataDamaged
            | Self::BackupDamaged
            | Self::AuditChanged => 1,
            Self::NotFound { .. } => 4,
            Self::NoServer { .. } => 3,
            Self::Some { code, .. } => *code,
            Self::OutputClosed => 141,
        }
    }

    /// The exit code of commands that exit with a remote command's code, as docker has them.
    pub(crate) fn remote_exit_code(&self) -> u8 {
        match self {
            Self::Client(ClientError::Api { code, .. }) => match code.as_str() {
                "executable_not_found" => 127,
                "not_executable" | "permission_denied" => 126,
                _ => 125,
            },
            Self::OutputClosed => 141,
            Self::Client(_)
            | Self::Here { .. }
            | Self::NotFound { .. }
            | Self::NoServer { .. }
            | Self::Some { .. }
            | Self::HostRequirements
            | Self::DataDamaged
            | Self::BackupDamaged
            | Self::AuditChanged => 125,
        }
    }

    pub(crate) fn hint(&self) -> Option<&str> {
        match self {
            Self::NoServer { .. } => {
                Some("start one with `keep serve`, or set SANDKEEP_URL and SANDKEEP_KEY")
            }
            Self::Client(ClientError::Api { code, hint: None, .. }) if code == "invalid" => {
                Some("correct that argument; `--help` of the command explains all of them")
            }
            Self::Client(error) => error.hint(),
            Self::Here { hint, .. } => hint.as_deref(),
            Self::NotFound { hint, .. } => Some(hint),
            Self::DataDamaged => Some(
                "undamaged snapshots can still be resumed; `keep serve` does not touch damaged files",
            ),
            Self::BackupDamaged => Some(
                "an earlier backup may be whole: `keep backup verify --all`; the next `keep backup create` does not \
                 repair what is there, so make one in a new directory",
            ),
            Self::AuditChanged => Some(
                "docs/AUDIT.md says what each finding means; new entries are recorded after a gap",
            ),
            Self::Some { .. } | Self::OutputClosed | Self::HostRequirements => None,
        }
    }

    /// Prints the error and the hint on standard error: as text, or as one line of JSON.
    pub(crate) fn tell(&self, json: bool, exit_code: u8) {
        if matches!(self, Self::OutputClosed) {
            return;
        }
        let text = match json {
            true => self.as_json(exit_code),
            false => self.told(Paint::for_errors()),
        };
        // Nothing can be done if standard error is gone as well.
        let _ = io::stderr().write_all(text.as_bytes());
    }

    /// A stable code for programs: the server's, if the server sent one.
    fn code(&self) -> &str {
        match self {
            Self::Client(ClientError::Api { code, .. }) => code,
            Self::Client(ClientError::Connect { .. }) | Self::NoServer { .. } => "no_server",
            Self::Client(ClientError::Broken { .. }) => "connection_broken",
            Self::Client(ClientError::BadUrl { .. }) => "invalid",
            Self::Client(_) | Self::Here { .. } => "failed",
            Self::NotFound { .. } => "not_found",
            Self::Some { .. } => "some_failed",
            Self::OutputClosed => "output_closed",
            Self::HostRequirements => "host_unfit",
            Self::DataDamaged => "data_damaged",
            Self::BackupDamaged => "backup_damaged",
            Self::AuditChanged => "audit_changed",
        }
    }

    fn as_json(&self, exit_code: u8) -> String {
        let mut error = serde_json::json!({
            "code": self.code(),
            "message": self.message(),
            "exit_code": exit_code,
        });
        if let Some(hint) = self.hint() {
            error["hint"] = hint.into();
        }
        if let Self::Client(ClientError::Api { status, findings, conflicts, request_id, .. }) = self
        {
            error["status"] = (*status).into();
            if let Some(id) = request_id {
                error["request_id"] = (**id).into();
            }
            if !findings.is_empty() {
                error["findings"] = serde_json::to_value(findings).unwrap_or_default();
            }
            if !conflicts.is_empty() {
                error["conflicts"] = serde_json::to_value(conflicts).unwrap_or_default();
            }
        }
        json_line(&error)
    }

    /// What went wrong, with its causes.
    fn message(&self) -> String {
        error_chain(self)
    }

    fn told(&self, paint: Paint) -> String {
        let mut text = format!("{} {}\n", paint.red("error:"), self.message());
        if let Self::Client(error) = self {
            text.push_str(&findings_text(error.findings()));
            text.push_str(&conflicts_text(error.conflicts()));
        }
        if let Some(hint) = self.hint() {
            text.push_str(&format!("{} {hint}\n", paint.cyan("hint:")));
        }
        // Who runs the server finds these lines in its log.
        if let Self::Client(ClientError::Api { status: 500, request_id: Some(id), .. }) = self {
            text.push_str(&format!("{} {id}\n", paint.cyan("request:")));
        }
        text
    }
}

/// An error as one line, in the form of the API's error answers.
pub(crate) fn json_line(error: &serde_json::Value) -> String {
    format!("{}\n", serde_json::json!({ "error": error }))
}

fn client_code(error: &ClientError) -> u8 {
    match error {
        ClientError::Api { status: 404 | 410, .. } => 4,
        ClientError::Api { status: 409 | 412, .. } => 5,
        ClientError::Connect { .. } => 3,
        _ => 1,
    }
}

/// Turns errors of writing to standard output into failures. A closed pipe is not reported.
pub(crate) fn output_error(error: io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::BrokenPipe => Failure::OutputClosed,
        _ => Failure::caused("cannot write to standard output", error),
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use sandkeep_client::Error as ClientError;

    use super::Failure;
    use crate::screen::Paint;

    fn api(status: u16, code: &str) -> Failure {
        let (code, message) = (code.to_owned(), "no".to_owned());
        Failure::Client(ClientError::Api {
            status,
            code,
            message,
            hint: Some("do".into()),
            findings: Box::default(),
            conflicts: Box::default(),
            request_id: None,
        })
    }

    fn unreachable_server() -> Failure {
        let source = io::Error::from(io::ErrorKind::ConnectionRefused);
        let (url, hint) = ("http://127.0.0.1:1".to_owned(), "start it".to_owned());
        Failure::Client(ClientError::Connect { url, hint, source })
    }

    #[test]
    fn exit_codes_are_the_promised_ones() {
        for (failure, own, remote) in [
            (api(400, "invalid"), 1, 125),
            (api(404, "sandbox_not_found"), 4, 125),
            (api(409, "name_taken"), 5, 125),
            (api(412, "generation_mismatch"), 5, 125),
            (api(400, "executable_not_found"), 1, 127),
            (api(400, "not_executable"), 1, 126),
            (api(400, "permission_denied"), 1, 126),
            (unreachable_server(), 3, 125),
            (Failure::here("x"), 1, 125),
        ] {
            assert_eq!(failure.exit_code(), own, "{failure:?}");
            assert_eq!(failure.remote_exit_code(), remote, "{failure:?}");
        }
    }

    #[test]
    fn as_json_an_error_is_one_line_with_code_message_and_hint() {
        let read = |failure: Failure| -> serde_json::Value {
            let line = failure.as_json(failure.exit_code());
            assert_eq!(line.matches('\n').count(), 1, "{line}");
            serde_json::from_str(&line).unwrap()
        };
        let told = read(api(404, "sandbox_not_found"));
        assert_eq!(
            told,
            serde_json::json!({"error": {"code": "sandbox_not_found", "message": "no", "hint": "do",
                "status": 404, "exit_code": 4}})
        );
        let told = read(unreachable_server());
        assert_eq!(told["error"]["code"], "no_server");
        assert!(told["error"]["message"].as_str().unwrap().ends_with("connection refused"));
        assert_eq!(told["error"]["exit_code"], 3);
    }

    #[test]
    fn errors_are_told_with_cause_and_hint() {
        assert_eq!(api(404, "not_found").told(Paint::plain()), "error: no\nhint: do\n");
        assert_eq!(
            unreachable_server().told(Paint::plain()),
            "error: cannot reach the server at http://127.0.0.1:1: connection refused\nhint: start it\n"
        );
        let local = Failure::caused("cannot read `x`", io::Error::from(io::ErrorKind::NotFound));
        assert_eq!(
            local.with_hint("look").told(Paint::plain()),
            "error: cannot read `x`: entity not found\nhint: look\n"
        );
    }
}
