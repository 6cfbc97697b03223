//! What can go wrong between a caller and a server.

use std::io;

use crate::types::{ErrorAnswer, ErrorBody, Finding};

/// Why a call failed, sorted by what a caller can do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server understood and said no.
    #[error("{message}")]
    Api {
        /// The HTTP status; 200 when it went wrong after the answer had begun.
        status: u16,
        /// A fixed word for programs: `not_found`, `conflict` ...
        code: String,
        /// What is wrong, for people.
        message: String,
        /// What to do about it, if the server knows.
        hint: Option<String>,
        /// What the guard found, when that is why.
        findings: Vec<Finding>,
    },
    /// Nobody answers at the address.
    #[error("cannot reach the server at {url}")]
    Connect {
        /// The address.
        url: String,
        /// What to do about it.
        hint: String,
        /// What the system said.
        source: io::Error,
    },
    /// The connection broke in the middle.
    #[error("the connection to the server broke while {doing}")]
    Broken {
        /// What was being done, as a verb in -ing.
        doing: &'static str,
        /// What the transport said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// What answers is no Sandkeep server, or one of another version.
    #[error("the server's answer makes no sense: {reason}")]
    Protocol {
        /// What was expected, and what came.
        reason: String,
    },
    /// An address that cannot be one.
    #[error("`{text}` is not a server address; write `http://host:port` or `unix:///path`")]
    BadUrl {
        /// What was given.
        text: String,
    },
    /// What was to be sent could not be read, or what came could not be written.
    #[error("could not {action}")]
    Local {
        /// What was being done, as a verb phrase.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

impl Error {
    /// The server's word for the error, if it was the server's.
    #[must_use]
    pub fn code(&self) -> Option<&str> {
        match self {
            Self::Api { code, .. } => Some(code),
            Self::Connect { .. }
            | Self::Broken { .. }
            | Self::Protocol { .. }
            | Self::BadUrl { .. }
            | Self::Local { .. } => None,
        }
    }

    /// What to do about it, if anybody knows.
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::Api { hint, .. } => hint.as_deref(),
            Self::Connect { hint, .. } => Some(hint),
            Self::Broken { .. }
            | Self::Protocol { .. }
            | Self::BadUrl { .. }
            | Self::Local { .. } => None,
        }
    }

    /// What the guard found, if that is why.
    #[must_use]
    pub fn findings(&self) -> &[Finding] {
        match self {
            Self::Api { findings, .. } => findings,
            Self::Connect { .. }
            | Self::Broken { .. }
            | Self::Protocol { .. }
            | Self::BadUrl { .. }
            | Self::Local { .. } => &[],
        }
    }

    /// Whether the same call may work in a moment: the server is away, busy or restarting.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Api { status, .. } => matches!(status, 429 | 502 | 503 | 504),
            Self::Connect { .. } | Self::Broken { .. } => true,
            Self::Protocol { .. } | Self::BadUrl { .. } | Self::Local { .. } => false,
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

    pub(crate) fn told(status: u16, error: ErrorBody) -> Self {
        let ErrorBody { code, message, hint, findings } = error;
        Self::Api { status, code, message, hint, findings }
    }

    /// Reads an error answer; a body that is none of ours (a proxy's page) is quoted in short.
    pub(crate) fn from_answer(status: u16, body: &[u8]) -> Self {
        if let Ok(ErrorAnswer { error }) = serde_json::from_slice(body) {
            return Self::told(status, error);
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
    fn a_proxys_page_is_quoted_and_not_believed() {
        let error = Error::from_answer(502, b"<html>Bad gateway</html>");
        assert_eq!(error.code(), None);
        assert!(error.to_string().contains("502"), "{error}");
    }
}
