//! The id of a request: in the answer's `X-Request-Id`, in every log line of the request, and in errors.
//!
//! A caller may send its own in `X-Request-Id`; anything but a short plain text is replaced. Ports inside sandboxes get it,
//! too, and may answer with one of their own. Work that continues after the answer logs with the id
//! of the request that began it.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{MatchedPath, Request};
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use tracing::{Instrument as _, Span};

const HEADER: HeaderName = HeaderName::from_static("x-request-id");
/// The longest id that is taken from a caller.
const LONGEST: usize = 128;

tokio::task_local! {
    static CURRENT: Arc<str>;
}

/// The id of the request that this task answers.
pub(crate) fn current() -> Option<String> {
    CURRENT.try_with(|id| id.to_string()).ok()
}

/// The request that a task answers, for work that continues in another task.
#[derive(Debug)]
pub(crate) struct RequestScope {
    id: Option<Arc<str>>,
    span: Span,
}

impl RequestScope {
    /// That of this task.
    pub(crate) fn current() -> Self {
        Self { id: CURRENT.try_with(Arc::clone).ok(), span: Span::current() }
    }

    /// Does the work as part of the request.
    pub(crate) async fn run<F: Future>(self, work: F) -> F::Output {
        let work = work.instrument(self.span);
        match self.id {
            Some(id) => CURRENT.scope(id, work).await,
            None => work.await,
        }
    }
}

/// Work for another task, as part of the request that this task answers.
pub(crate) fn follow<F: Future>(work: F) -> impl Future<Output = F::Output> {
    RequestScope::current().run(work)
}

/// Answers a request under its id.
pub(crate) async fn assign(mut request: Request, next: Next) -> Response {
    let given = request.headers().get(&HEADER).and_then(|value| value.to_str().ok());
    let id: Arc<str> = match given.filter(|text| is_fit(text)) {
        Some(text) => text.into(),
        None => made().into(),
    };
    let Ok(value) = HeaderValue::from_str(&id) else { return next.run(request).await };
    request.headers_mut().insert(HEADER, value.clone());
    let method = request.method().clone();
    // The pattern, not the path: what callers put there is their own.
    let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    // As an error, so that no filter leaves it out of lines that are shown.
    let span = tracing::error_span!("request", request_id = &*id);
    let begun = Instant::now();
    let answer = async {
        let response = next.run(request).await;
        tracing::debug!(
            %method,
            route = route.as_deref().unwrap_or("-"),
            status = response.status().as_u16(),
            ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX),
            "answered a request"
        );
        response
    };
    let mut response = CURRENT.scope(Arc::clone(&id), answer.instrument(span)).await;
    response.headers_mut().entry(HEADER).or_insert(value);
    response
}

fn is_fit(text: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.:/+=@".contains(&b);
    !text.is_empty() && text.len() <= LONGEST && text.bytes().all(plain)
}

fn made() -> String {
    let mut bytes = [0; 16];
    // Without randomness the id is the same for all, and nothing else suffers.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("req-{digits}")
}

#[cfg(test)]
mod tests {
    use super::{is_fit, made};

    #[test]
    fn only_short_plain_ids_are_taken() {
        assert!(is_fit(&made()) && made() != made());
        for good in ["a", "7b1c-42", "trace:1/2+3=@x_y.z", &"a".repeat(128)] {
            assert!(is_fit(good), "{good}");
        }
        for bad in ["", "a b", "a\nb", "a\"b", "\u{e4}", &"a".repeat(129)] {
            assert!(!is_fit(bad), "{bad}");
        }
    }
}
