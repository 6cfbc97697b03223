//! Errors, in the form that their clients act on.
//!
//! The clients look at statuses first: any 410 from a session, and 422 with two codes, make them wake
//! the sandbox and ask once more; 404 from a get makes `getOrCreate` create; 429 and 5xx are asked
//! again by themselves, for *every* method. So nothing that may have had an effect is a 5xx.

use axum::Json;
use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use sandkeep_core::engine::{self, ErrorKind};
use sandkeep_core::model::SnapshotId;
use serde_json::{Map, Value, json};

use crate::audit::AnsweredCode;
use crate::compat::vercel::protocol::ids::Foreign as _;
use crate::error::ApiError;

/// An answer that is not a success.
#[derive(Debug)]
pub(crate) struct VercelError {
    status: StatusCode,
    code: String,
    message: String,
    more: Map<String, Value>,
    retry_after: Option<u64>,
}

impl VercelError {
    pub(crate) fn new(status: StatusCode, code: &str, message: impl Into<String>) -> Self {
        let (code, message) = (code.to_owned(), message.into());
        Self { status, code, message, more: Map::new(), retry_after: None }
    }

    /// Something in the request is wrong; `problem` names the field.
    pub(crate) fn bad(problem: impl std::fmt::Display) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad_request", format!("Invalid request: {problem}"))
    }

    /// What Sandkeep does not do, or not yet.
    pub(crate) fn refused(what: impl std::fmt::Display) -> Self {
        let message = format!("{what} Sandkeep refuses it rather than ignore it.");
        Self::new(StatusCode::BAD_REQUEST, "bad_request", message)
    }

    pub(crate) fn not_found(what: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", format!("{what} not found."))
    }

    pub(crate) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "forbidden", message)
    }

    pub(crate) fn conflict(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, "conflict", message)
    }

    /// The session is over; clients wake the sandbox and ask again.
    pub(crate) fn stopped() -> Self {
        let message = "The sandbox session has ended. Resume the sandbox to go on.";
        Self::new(StatusCode::GONE, "sandbox_stopped", message)
    }

    /// There is nothing to resume from.
    pub(crate) fn no_snapshot() -> Self {
        let message = "Cannot resume sandbox: no snapshot available.";
        Self::new(StatusCode::GONE, "snapshot_not_found", message)
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// The snapshot was there once.
    pub(crate) fn snapshot_deleted(id: &SnapshotId) -> Self {
        let message = format!("Snapshot not found: {}", id.out());
        Self::new(StatusCode::GONE, "snapshot_not_found", message)
    }

    /// Adds a field to the error object.
    pub(crate) fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.more.insert(name.to_owned(), value.into());
        self
    }

    /// The error object, for streams that have had their status.
    pub(crate) fn object(&self) -> Value {
        let mut object = self.more.clone();
        object.insert("code".to_owned(), json!(self.code));
        object.insert("message".to_owned(), json!(self.message));
        Value::Object(object)
    }
}

impl IntoResponse for VercelError {
    fn into_response(self) -> Response {
        let body = Json(json!({ "error": self.object() }));
        let mut response = (self.status, body).into_response();
        response.extensions_mut().insert(AnsweredCode(self.code.as_str().into()));
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

impl From<ApiError> for VercelError {
    fn from(error: ApiError) -> Self {
        let (status, retry_after) = (error.status(), error.retry_seconds());
        let body = error.into_body();
        let code = match status {
            StatusCode::BAD_REQUEST => "bad_request".to_owned(),
            StatusCode::NOT_FOUND => "not_found".to_owned(),
            _ => body.code,
        };
        let message = match body.hint {
            Some(hint) => format!("{} ({hint})", body.message),
            None => body.message,
        };
        let mut more = Map::new();
        if !body.findings.is_empty() {
            more.insert("findings".to_owned(), json!(body.findings));
        }
        Self { status, code, message, more, retry_after }
    }
}

impl From<engine::Error> for VercelError {
    fn from(error: engine::Error) -> Self {
        use engine::Error;
        match &error {
            Error::NoSandbox(_) | Error::Gone(_) => Self::not_found("Sandbox"),
            Error::NoSnapshot(_) => Self::not_found("Snapshot"),
            Error::NoDrive(name) => Self::not_found(&format!("Drive `{name}`")),
            Error::DriveTaken(_) | Error::DriveDiffers { .. } => Self::conflict(error.to_string()),
            Error::NameTaken(name) => Self::bad(format!(
                "a sandbox named `{name}` already exists in this project. Use GET with resume=true to resume it."
            )),
            Error::SessionOver | Error::SessionEnded { .. } | Error::NotRunning(_) => {
                Self::stopped()
            }
            Error::SnapshotGone { .. } | Error::NothingKept(_) => Self::no_snapshot(),
            Error::SnapshotDeleted(id) => Self::snapshot_deleted(id),
            Error::CommandEnded(_) | Error::NoCommand { .. } => Self::new(
                StatusCode::NOT_FOUND,
                "command_not_found_or_exited",
                "The command does not exist or has exited.",
            ),
            Error::NoStdin(_) | Error::StdinClosed(_) => Self::new(
                StatusCode::BAD_REQUEST,
                "command_stdin_unavailable",
                "The command was started without attachStdin, or reads no more.",
            ),
            Error::NoUids => Self::new(
                StatusCode::TOO_MANY_REQUESTS,
                "rate_limited",
                "As many sandboxes run as this host has uid ranges for.",
            ),
            _ => Self::by_kind(error),
        }
    }
}

impl VercelError {
    fn by_kind(error: engine::Error) -> Self {
        match error.kind() {
            // A disk that is full is what a spent quota is to them, and asking again does not help.
            ErrorKind::Exhausted => {
                let message = ApiError::from(error).into_body().message;
                Self::new(StatusCode::PAYMENT_REQUIRED, "payment_required", message)
            }
            ErrorKind::Invalid => Self::bad(ApiError::from(error).into_body().message),
            _ => ApiError::from(error).into(),
        }
    }
}
