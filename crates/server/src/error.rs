//! Turns errors into an HTTP status and a JSON body.

use axum::Json;
use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use sandkeep_client::types::{ErrorAnswer, ErrorBody, error_chain, former_codes};
use sandkeep_core::guest::GuestError;

use crate::audit::AnsweredCode;

use sandkeep_core::engine::{self, ErrorKind};

/// A response that is not a success.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    body: Box<ErrorBody>,
    retry_after: Option<u64>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, code: &str, message: impl Into<String>) -> Self {
        let body = Box::new(ErrorBody {
            code: code.to_owned(),
            aliases: former_codes(code),
            message: message.into(),
            hint: None,
            findings: Vec::new(),
            conflicts: Vec::new(),
        });
        Self { status, body, retry_after: None }
    }

    /// Something in the request is wrong.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid", message)
    }

    /// The key lacks the permission.
    pub(crate) fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "forbidden", message)
    }

    /// A fault of the server, which was logged where it occurred.
    pub(crate) fn internal() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "internal error")
            .hint("see the server's log")
    }

    /// The server is shutting down.
    pub(crate) fn shutting_down() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", "the server is shutting down")
            .hint("sandboxes keep running; retry when the server is back")
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.body.hint = Some(hint.into());
        self
    }

    pub(crate) fn retry_after(mut self, seconds: u64) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.status
    }

    pub(crate) fn retry_seconds(&self) -> Option<u64> {
        self.retry_after
    }

    /// The body alone, for errors in the middle of a stream, after the status was sent.
    pub(crate) fn into_body(self) -> ErrorBody {
        *self.body
    }
}

impl From<engine::Error> for ApiError {
    fn from(error: engine::Error) -> Self {
        Self::from(&error)
    }
}

impl From<std::sync::Arc<engine::Error>> for ApiError {
    fn from(error: std::sync::Arc<engine::Error>) -> Self {
        Self::from(&*error)
    }
}

impl From<&engine::Error> for ApiError {
    fn from(error: &engine::Error) -> Self {
        let status = match error.kind() {
            ErrorKind::Invalid => StatusCode::BAD_REQUEST,
            ErrorKind::Unauthorized => StatusCode::UNAUTHORIZED,
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::Conflict => StatusCode::CONFLICT,
            ErrorKind::Gone => StatusCode::GONE,
            ErrorKind::Stale => StatusCode::PRECONDITION_FAILED,
            ErrorKind::Forbidden => StatusCode::FORBIDDEN,
            ErrorKind::TooMany => StatusCode::TOO_MANY_REQUESTS,
            ErrorKind::OverLimit => StatusCode::PAYLOAD_TOO_LARGE,
            ErrorKind::TooLarge => StatusCode::UNPROCESSABLE_ENTITY,
            ErrorKind::Exhausted => StatusCode::INSUFFICIENT_STORAGE,
            ErrorKind::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            ErrorKind::Fault => StatusCode::INTERNAL_SERVER_ERROR,
        };
        // The causes of internal faults are logged, not sent: they may reveal too much.
        let fault = error.kind() == ErrorKind::Fault;
        if fault {
            tracing::error!(error = error_chain(error), "a request failed");
        }
        let message =
            if fault && !error.is_of_the_disk() { error.to_string() } else { error_chain(error) };
        let mut answer = Self::new(status, error.code(), message);
        answer.body.hint = error.hint();
        if let engine::Error::Guarded { findings, .. }
        | engine::Error::TakenGuarded { findings, .. }
        | engine::Error::DriveGuarded { findings, .. } = error
        {
            answer.body.findings = crate::api::guard::findings(findings.clone());
        }
        if let engine::Error::MergeConflicts { conflicts, .. }
        | engine::Error::DriveConflicts { conflicts, .. } = error
        {
            answer.body.conflicts = conflicts.clone();
        }
        if matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::TooMany) {
            answer.retry_after = Some(1);
        }
        answer
    }
}

impl From<GuestError> for ApiError {
    fn from(error: GuestError) -> Self {
        engine::Error::from(error).into()
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let code = AnsweredCode(self.body.code.as_str().into());
        let answer = Json(ErrorAnswer { error: *self.body });
        let mut response = (self.status, answer).into_response();
        response.extensions_mut().insert(code);
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}
