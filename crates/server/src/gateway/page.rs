//! The answer to requests that do not get to a port: a page for browsers, JSON for programs, a
//! status for gRPC.
//!
//! A port that is private, one that is not published and a sandbox that does not exist get the same
//! answer, to the byte: callers cannot find out what exists.

use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, RETRY_AFTER, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use sandkeep_client::types::error_chain;
use sandkeep_core::engine::{Error, ErrorKind};
use sandkeep_core::guest::GuestError;
use sandkeep_proto::link::Failure;
use serde_json::json;

/// Why a request did not get to its port.
#[derive(Debug, Clone, Copy)]
pub(super) struct Refusal {
    status: StatusCode,
    code: &'static str,
    title: &'static str,
    message: &'static str,
    /// What the reader can do, if anything.
    advice: &'static str,
    /// Seconds after which it is worth to ask again.
    retry: Option<u8>,
}

/// The format of the answer that a client wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PageFormat {
    Browser,
    Program,
    Grpc,
}

impl PageFormat {
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        match (text("content-type"), text("accept")) {
            (Some(kind), _) if super::exchange::is_grpc(kind) => Self::Grpc,
            (_, Some(accept)) if accept.contains("text/html") => Self::Browser,
            _ => Self::Program,
        }
    }
}

impl Refusal {
    pub(super) const UNKNOWN: Self = Self {
        status: StatusCode::NOT_FOUND,
        code: "NOT_FOUND",
        title: "Nothing here for you",
        message: "No port is published under this address, or it is private and this request carried no token that opens it.",
        advice: "Check the address, or ask whoever sent it for a fresh link (keep open NAME PORT).",
        retry: None,
    };
    pub(super) const ENDED: Self = Self {
        status: StatusCode::UNAUTHORIZED,
        code: "TOKEN_EXPIRED",
        title: "This link has ended",
        message: "The token that came with this request opened this port once. It has expired, or the key it was made with is gone.",
        advice: "Ask for a fresh link: keep open NAME PORT.",
        retry: None,
    };
    const STOPPED: Self = Self {
        status: StatusCode::GONE,
        code: "SANDBOX_STOPPED",
        title: "The sandbox is stopped",
        message: "The sandbox behind this address does not run, and requests do not wake it.",
        advice: "Resume the sandbox and start its server again.",
        retry: None,
    };
    const ASLEEP: Self = Self {
        status: StatusCode::SERVICE_UNAVAILABLE,
        code: "SANDBOX_ASLEEP",
        title: "The sandbox is asleep",
        message: "Its owner decided that requests do not wake it.",
        advice: "Ask its owner to wake it: keep start NAME.",
        retry: None,
    };
    const BUSY: Self = Self {
        status: StatusCode::SERVICE_UNAVAILABLE,
        code: "SANDBOX_BUSY",
        title: "Just a moment",
        message: "The sandbox is going to sleep or waking up.",
        advice: "Try again in a moment.",
        retry: Some(1),
    };
    const START_SLOW: Self = Self {
        status: StatusCode::GATEWAY_TIMEOUT,
        code: "SANDBOX_START_TIMEOUT",
        title: "Still waking up",
        message: "The sandbox was asleep and is taking longer than usual to start. It goes on starting.",
        advice: "Try again in a moment.",
        retry: Some(5),
    };
    const PORT_SLOW: Self = Self {
        status: StatusCode::GATEWAY_TIMEOUT,
        code: "SANDBOX_PORT_TIMEOUT",
        title: "The server is not up yet",
        message: "The sandbox runs, but nothing has begun to listen on this port so far.",
        advice: "Try again in a moment. If it stays so, its owner can look with keep service ls NAME and keep ps NAME.",
        retry: Some(5),
    };
    const NOT_LISTENING: Self = Self {
        status: StatusCode::BAD_GATEWAY,
        code: "SANDBOX_NOT_LISTENING",
        title: "Nothing listens on this port",
        message: "The sandbox runs, and no process in it listens on this port.",
        advice: "Start the server inside, or declare it as a service so that it is there after every resume: keep service set.",
        retry: None,
    };
    pub(super) const SILENT: Self = Self {
        status: StatusCode::BAD_GATEWAY,
        code: "SANDBOX_NO_RESPONSE",
        title: "No answer",
        message: "The process that listens on this port did not answer in HTTP.",
        advice: "Its owner finds what it printed with keep logs NAME. For other protocols there is keep forward.",
        retry: None,
    };
    const FAILED: Self = Self {
        status: StatusCode::SERVICE_UNAVAILABLE,
        code: "SANDBOX_FAILED",
        title: "The sandbox did not start",
        message: "It could not be woken for this request. Its files are safe.",
        advice: "Its owner learns why with keep show NAME, and can go back to a snapshot with keep rollback.",
        retry: None,
    };
    const FULL: Self = Self {
        status: StatusCode::SERVICE_UNAVAILABLE,
        code: "NO_CAPACITY",
        title: "The server is full",
        message: "This server has no disk space or other capacity to wake another sandbox right now.",
        advice: "Try again later, or ask its operator.",
        retry: Some(30),
    };
    const CLOSING: Self = Self {
        status: StatusCode::SERVICE_UNAVAILABLE,
        code: "SHUTTING_DOWN",
        title: "The server is restarting",
        message: "Sandboxes go on running and are reachable again when it is back.",
        advice: "Try again in a moment.",
        retry: Some(5),
    };
    pub(super) const BROKEN: Self = Self {
        status: StatusCode::INTERNAL_SERVER_ERROR,
        code: "INTERNAL",
        title: "Something went wrong",
        message: "This server could not handle the request; its log says why.",
        advice: "Tell its operator.",
        retry: None,
    };

    /// The page for an error on the way to a port. `by_id`: under the name that other vendors'
    /// clients know, which says that a sandbox has stopped in their word for it.
    pub(super) fn of(error: &Error, by_id: bool) -> Self {
        match error {
            Error::NoSandbox(_) | Error::NoPort { .. } | Error::Gone(_) => Self::UNKNOWN,
            Error::NotRunning(_) | Error::SessionOver | Error::SessionEnded { .. } if by_id => {
                Self::STOPPED
            }
            Error::Guest(GuestError::Lost) if by_id => Self::STOPPED,
            Error::NotRunning(_) => Self::ASLEEP,
            Error::SessionOver | Error::SessionEnded { .. } => Self::BUSY,
            Error::Guest(GuestError::Lost | GuestError::Timeout) | Error::Recovering => Self::BUSY,
            Error::StartSlow { .. } => Self::START_SLOW,
            Error::PortSlow { .. } => Self::PORT_SLOW,
            Error::Guest(GuestError::Refused { kind: Failure::Refused, .. }) => Self::NOT_LISTENING,
            Error::ShuttingDown => Self::CLOSING,
            error if error.kind() == ErrorKind::Exhausted => Self::FULL,
            // Whatever keeps it from starting is logged where it is found, and its owner's to know.
            Error::StartFailed { .. }
            | Error::Unresumable { .. }
            | Error::SnapshotGone { .. }
            | Error::NothingKept(_)
            | Error::NoDriver { .. }
            | Error::AbsentDriver { .. } => Self::FAILED,
            error if error.kind() != ErrorKind::Fault => Self::FAILED,
            error => {
                tracing::error!(error = error_chain(error), "a published port failed");
                Self::BROKEN
            }
        }
    }

    pub(super) fn page(self, reader: PageFormat) -> Response {
        let Self { status, code, title, message, advice, retry } = self;
        let mut response = match reader {
            PageFormat::Grpc => self.grpc(),
            PageFormat::Browser => (status, self.html()).into_response(),
            PageFormat::Program => {
                let message = format!("{title}. {message}");
                let mut error = json!({ "code": code, "message": message, "hint": advice });
                if code == Self::FULL.code {
                    // Its former name.
                    error["aliases"] = json!(["NO_ROOM"]);
                }
                (status, json!({ "error": error }).to_string()).into_response()
            }
        };
        let headers = response.headers_mut();
        let kind = match reader {
            PageFormat::Grpc => "application/grpc",
            PageFormat::Browser => "text/html; charset=utf-8",
            PageFormat::Program => "application/json",
        };
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        if reader == PageFormat::Browser {
            let policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'self'";
            headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy));
        }
        if let Some(seconds) = retry {
            headers.insert(RETRY_AFTER, HeaderValue::from(u16::from(seconds)));
        }
        response
    }

    fn grpc(self) -> Response {
        let status = match self.status {
            StatusCode::NOT_FOUND => 5,
            StatusCode::UNAUTHORIZED => 16,
            StatusCode::GATEWAY_TIMEOUT => 4,
            StatusCode::INTERNAL_SERVER_ERROR => 13,
            _ => 14,
        };
        let headers = [("grpc-status", status.to_string()), ("grpc-message", self.title.into())];
        (StatusCode::OK, headers).into_response()
    }

    fn html(self) -> String {
        let Self { status, code, title, message, advice, retry } = self;
        let number = status.as_u16();
        let refresh = retry.map_or(String::new(), |seconds| {
            format!("<meta http-equiv=\"refresh\" content=\"{seconds}\">")
        });
        let again = retry.map_or("", |_| "<p class=\"again\">This page tries again by itself.</p>");
        format!(
            "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">{refresh}\
             <title>{title}</title><style>{STYLE}</style></head><body><main>\
             <p class=\"code\"><b>{number}</b> {code}</p><h1>{title}</h1><p>{message}</p>\
             <p class=\"advice\">{advice}</p>{again}</main><footer>Sandkeep</footer></body></html>"
        )
    }
}

const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1c1b19;--soft:#6b6860;--ground:#faf8f4;--card:#fff;--line:#e6e1d8;--mark:#b4532a}\
@media(prefers-color-scheme:dark){:root{--ink:#ece9e3;--soft:#9d988e;--ground:#171614;--card:#1f1e1b;--line:#34322d;--mark:#e08a5f}}\
*{box-sizing:border-box}body{margin:0;min-height:100vh;display:flex;flex-direction:column;align-items:center;justify-content:center;\
gap:1.5rem;padding:1.5rem;background:var(--ground);color:var(--ink);font:16px/1.55 system-ui,-apple-system,'Segoe UI',sans-serif}\
main{width:100%;max-width:34rem;padding:2.25rem 2.5rem;background:var(--card);border:1px solid var(--line);border-top:4px solid var(--mark);border-radius:10px}\
h1{margin:.1rem 0 .9rem;font-size:1.7rem;line-height:1.2;letter-spacing:-.015em}p{margin:0 0 .9rem}\
.code{font:13px/1.4 ui-monospace,Menlo,Consolas,monospace;color:var(--soft);letter-spacing:.02em}.code b{color:var(--mark)}\
.advice{margin:1.3rem 0 0;padding-top:1.1rem;border-top:1px solid var(--line);color:var(--soft)}\
.again{margin:.6rem 0 0;font-size:.9rem;color:var(--soft)}footer{font-size:.85rem;color:var(--soft)}";

#[cfg(test)]
mod tests {
    use axum::http::{HeaderMap, HeaderValue};

    use super::{PageFormat, Refusal};

    #[test]
    fn everybody_is_told_in_their_own_words() {
        for (headers, reader, kind) in [
            (vec![("accept", "text/html,*/*")], PageFormat::Browser, "text/html; charset=utf-8"),
            (vec![("accept", "*/*")], PageFormat::Program, "application/json"),
            (vec![], PageFormat::Program, "application/json"),
            (
                vec![("content-type", "application/grpc+proto")],
                PageFormat::Grpc,
                "application/grpc",
            ),
            (
                vec![("content-type", "application/grpc-web")],
                PageFormat::Program,
                "application/json",
            ),
        ] {
            let headers: HeaderMap = headers
                .into_iter()
                .map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)))
                .collect();
            assert_eq!(PageFormat::of(&headers), reader, "{headers:?}");
            let page = Refusal::BUSY.page(reader);
            assert_eq!(page.headers()["content-type"], kind);
            assert_eq!(page.headers()["retry-after"], "1");
            assert_eq!(page.headers()["cache-control"], "no-store");
            let status = if reader == PageFormat::Grpc { 200 } else { 503 };
            assert_eq!(page.status().as_u16(), status);
        }
    }
}
