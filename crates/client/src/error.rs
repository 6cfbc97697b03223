//! The errors of the client: what the server answered, or why it could not be reached or understood.

use std::io;
use std::path::PathBuf;

use crate::types::{ErrorAnswer, ErrorBody, Finding, MergeConflict, present_code};

/// Why a call failed, by what a caller can do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server rejected the request or failed.
    #[error("{message}")]
    Api {
        /// The HTTP status; 200 if the error occurred in the middle of a stream.
        status: u16,
        /// A stable code for programs: `not_found`, `name_taken` ... Former codes of older servers are
        /// replaced by the present ones.
        code: String,
        /// What is wrong, for people.
        message: String,
        /// What to do about it, if the server knows.
        hint: Option<Box<str>>,
        /// What the guard found, when that is why.
        findings: Box<[Finding]>,
        /// Paths that cannot be merged, when that is why.
        conflicts: Box<[MergeConflict]>,
        /// The id of the request, as in the server's log.
        request_id: Option<Box<str>>,
    },
    /// No server answers at the address.
    #[error("cannot reach the server at {url}")]
    Connect {
        /// The address.
        url: String,
        /// What to do about it.
        hint: String,
        /// The system's error.
        source: io::Error,
    },
    /// The connection broke in the middle.
    #[error("the connection to the server broke while {doing}")]
    Broken {
        /// What was being done, as a verb in -ing.
        doing: &'static str,
        /// The transport's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The response is not from a Sandkeep server, or from an incompatible version.
    #[error("invalid response from the server: {reason}")]
    Protocol {
        /// What was expected, and what came.
        reason: String,
    },
    /// The certificates to trust cannot be loaded.
    #[error("cannot use the CA certificates in `{path}`", path = path.display())]
    BadCa {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: io::Error,
    },
    /// An invalid address.
    #[error(
        "`{text}` is not a server address; write `http://host:port`, `https://host:port` or `unix:///path`"
    )]
    BadUrl {
        /// What was given.
        text: String,
    },
    /// Local data could not be read or written.
    #[error("could not {action}")]
    Local {
        /// What was being done, as a verb phrase.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

impl Error {
    /// The error code, if the server sent one.
    #[must_use]
    pub fn code(&self) -> Option<&str> {
        match self {
            Self::Api { code, .. } => Some(code),
            Self::Connect { .. }
            | Self::BadCa { .. }
            | Self::Broken { .. }
            | Self::Protocol { .. }
            | Self::BadUrl { .. }
            | Self::Local { .. } => None,
        }
    }

    /// What to do about it, if known.
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::Api { hint, .. } => hint.as_deref(),
            Self::Connect { hint, .. } => Some(hint),
            Self::BadCa { .. } => Some(
                "name a file with the CA's certificate in PEM form; `keep tls init` writes it as tls/ca.pem",
            ),
            Self::Broken { .. } => Some(
                "the server was restarted or the network broke: try again; `keep ls` shows how things stand",
            ),
            Self::Protocol { .. } => Some(
                "is there a Sandkeep server at this address, and of this version? `keep version` shows both",
            ),
            Self::BadUrl { .. } => Some("correct --url or SANDKEEP_URL"),
            Self::Local { .. } => None,
        }
    }

    /// The same error of the server with another hint.
    #[must_use]
    pub fn with_hint(mut self, advice: String) -> Self {
        if let Self::Api { hint, .. } = &mut self {
            *hint = Some(advice.into_boxed_str());
        }
        self
    }

    /// The findings of the guard, if they are the reason.
    #[must_use]
    pub fn findings(&self) -> &[Finding] {
        match self {
            Self::Api { findings, .. } => findings,
            Self::Connect { .. }
            | Self::BadCa { .. }
            | Self::Broken { .. }
            | Self::Protocol { .. }
            | Self::BadUrl { .. }
            | Self::Local { .. } => &[],
        }
    }

    /// The paths that cannot be merged, if they are the reason.
    #[must_use]
    pub fn conflicts(&self) -> &[MergeConflict] {
        match self {
            Self::Api { conflicts, .. } => conflicts,
            Self::Connect { .. }
            | Self::BadCa { .. }
            | Self::Broken { .. }
            | Self::Protocol { .. }
            | Self::BadUrl { .. }
            | Self::Local { .. } => &[],
        }
    }

    /// Whether the same call may succeed soon: the server is unreachable, busy or restarting.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            // In the middle of a stream there is no status.
            Self::Api { status, code, .. } => {
                matches!(status, 429 | 502 | 503 | 504) || code == "shutting_down"
            }
            Self::Connect { .. } | Self::Broken { .. } => true,
            Self::Protocol { .. }
            | Self::BadCa { .. }
            | Self::BadUrl { .. }
            | Self::Local { .. } => false,
        }
    }

    pub(crate) fn broken(
        doing: &'static str,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self::Broken { doing, source: source.into() }
    }

    pub(crate) fn protocol(reason: impl Into<String>) -> Self {
        Self::Protocol { reason: reason.into() }
    }

    pub(crate) fn from_body(status: u16, error: ErrorBody) -> Self {
        let ErrorBody { code, aliases: _, message, hint, findings, conflicts, request_id } = error;
        let code = present_code(&code).to_owned();
        let [hint, request_id] = [hint, request_id].map(|text| text.map(String::into_boxed_str));
        let (findings, conflicts) = (findings.into(), conflicts.into());
        Self::Api { status, code, message, hint, findings, conflicts, request_id }
    }

    /// Reads an error response. A body in another format (a proxy's page) is quoted, truncated.
    pub(crate) fn from_answer(status: u16, body: &[u8]) -> Self {
        if let Ok(ErrorAnswer { error }) = serde_json::from_slice(body) {
            return Self::from_body(status, error);
        }
        let text: String = String::from_utf8_lossy(body).chars().take(200).collect();
        Self::protocol(format!("HTTP status {status} and `{}`", text.trim()))
    }
}

#[cfg(test)]
mod tests {
    use super::Error;

    #[test]
    fn answers_become_errors_with_their_hints() {
        let body = br#"{"error":{"code":"not_found","message":"no sandbox `x`","hint":"keep ls"}}"#;
        let error = Error::from_answer(404, body);
        assert_eq!(error.code(), Some("not_found"));
        assert_eq!(error.hint(), Some("keep ls"));
        assert_eq!(error.to_string(), "no sandbox `x`");
    }

    #[test]
    fn former_codes_of_older_servers_become_the_present_ones() {
        let old = br#"{"error":{"code":"no_room","message":"full"}}"#;
        let new =
            br#"{"error":{"code":"insufficient_storage","aliases":["no_room"],"message":"full"}}"#;
        for body in [&old[..], new] {
            assert_eq!(Error::from_answer(507, body).code(), Some("insufficient_storage"));
        }
    }

    #[test]
    fn a_proxys_page_is_quoted_and_not_believed() {
        let error = Error::from_answer(502, b"<html>Bad gateway</html>");
        assert_eq!(error.code(), None);
        assert!(error.to_string().contains("502"), "{error}");
    }
}
