//! How requests are read: path, query, headers, JSON. Every error is JSON, and names the field.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;

use super::App;
use crate::auth::may_wake;
use crate::error::ApiError;
use sandkeep_core::db::Page;
use sandkeep_core::engine::{Caller, WakeMode};

/// What the path says.
#[derive(Debug)]
pub(crate) struct PathParam<T>(pub(super) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for PathParam<T> {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let read = Path::<T>::from_request_parts(parts, state).await;
        read.map(|Path(value)| Self(value)).map_err(|error| {
            let text = error.body_text();
            ApiError::invalid(text.strip_prefix("Invalid URL: ").unwrap_or(&text).to_owned())
        })
    }
}

/// The `Idempotency-Key` header.
#[derive(Debug)]
pub(crate) struct IdempotencyKey(pub(super) Option<String>);

impl<S: Send + Sync> FromRequestParts<S> for IdempotencyKey {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let Some(value) = parts.headers.get("idempotency-key") else {
            return Ok(Self(None));
        };
        match value.to_str() {
            Ok(text) if (1..=200).contains(&text.len()) => Ok(Self(Some(text.to_owned()))),
            _ => Err(ApiError::invalid("Idempotency-Key: use 1 to 200 printable ASCII characters")),
        }
    }
}

/// What the query says, and the wish not to wake. Parameters are taken one by one; [`Params::end`]
/// refuses what is left, so that a misspelt one is not silently without effect.
#[derive(Debug)]
pub(crate) struct Params {
    pairs: Vec<(String, String)>,
    if_running: bool,
}

impl<S: Send + Sync> FromRequestParts<S> for Params {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let read = Query::<Vec<(String, String)>>::from_request_parts(parts, state).await;
        let Query(pairs) = read.map_err(|error| ApiError::invalid(error.body_text()))?;
        let mut params = Self { pairs, if_running: header_flag(&parts.headers)? };
        params.if_running |= params.flag("if_running")?;
        Ok(params)
    }
}

fn header_flag(headers: &HeaderMap) -> Result<bool, ApiError> {
    match headers.get("if-running").map(|value| value.as_bytes()) {
        None | Some(b"false") => Ok(false),
        Some(b"true") => Ok(true),
        Some(_) => Err(ApiError::invalid("If-Running: use `true` or `false`")),
    }
}

impl Params {
    /// A parameter that may be given once.
    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        let mut values = self.all(name);
        if values.len() > 1 {
            return Err(ApiError::invalid(format!("`{name}` is given more than once")));
        }
        Ok(values.pop())
    }

    /// A parameter that must be given.
    pub(crate) fn needed(&mut self, name: &str) -> Result<String, ApiError> {
        match self.text(name)? {
            Some(text) if !text.is_empty() => Ok(text),
            _ => Err(ApiError::invalid(format!("the query parameter `{name}` is missing"))),
        }
    }

    /// A parameter that may be repeated.
    pub(crate) fn all(&mut self, name: &str) -> Vec<String> {
        self.pairs.extract_if(.., |(key, _)| key == name).map(|(_, value)| value).collect()
    }

    /// `true`, `false` or absent; the bare name means true.
    pub(crate) fn flag(&mut self, name: &str) -> Result<bool, ApiError> {
        match self.text(name)?.as_deref() {
            None | Some("false" | "0") => Ok(false),
            Some("true" | "1" | "") => Ok(true),
            Some(other) => {
                Err(ApiError::invalid(format!("`{name}`: `{other}` is not `true` or `false`")))
            }
        }
    }

    pub(crate) fn number(&mut self, name: &str) -> Result<Option<u64>, ApiError> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        let number = text.parse();
        number.map(Some).map_err(|_| {
            ApiError::invalid(format!("`{name}`: `{text}` is not a number of 0 or more"))
        })
    }

    /// Permission bits, in octal as people write them.
    pub(crate) fn mode(&mut self) -> Result<Option<u32>, ApiError> {
        let Some(text) = self.text("mode")? else { return Ok(None) };
        match u32::from_str_radix(text.trim_start_matches("0o"), 8) {
            Ok(mode) if mode <= 0o7777 => Ok(Some(mode)),
            _ => Err(ApiError::invalid(format!(
                "`mode`: `{text}` is not a mode in octal, like `644` or `0755`"
            ))),
        }
    }

    /// A word of a fixed list.
    pub(crate) fn word<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        let Some(text) = self.text(name)? else { return Ok(None) };
        let word = serde_json::from_value(serde_json::Value::String(text));
        word.map(Some).map_err(|error| ApiError::invalid(format!("`{name}`: {error}")))
    }

    pub(crate) fn page(&mut self) -> Result<Page, ApiError> {
        let limit = match self.number("limit")? {
            None => 100,
            Some(limit @ 1..=1000) => u32::try_from(limit).unwrap_or(1000),
            Some(_) => return Err(ApiError::invalid("`limit`: between 1 and 1000")),
        };
        Ok(Page { limit, cursor: self.text("cursor")?, ..Page::default() })
    }

    /// Whether the call may wake the sandbox.
    pub(crate) fn wake(&self, caller: &Caller) -> Result<WakeMode, ApiError> {
        let wake = if self.if_running { WakeMode::IfRunning } else { WakeMode::Wake };
        may_wake(caller, &wake)?;
        Ok(wake)
    }

    /// Refuses unknown parameters.
    pub(crate) fn end(&self) -> Result<(), ApiError> {
        match self.pairs.first() {
            None => Ok(()),
            Some((name, _)) => {
                let name: String = name.chars().take(80).collect();
                Err(ApiError::invalid(format!("unknown query parameter `{name}`")))
            }
        }
    }
}

/// An upgrade to a WebSocket, or a JSON refusal.
#[derive(Debug)]
pub(crate) struct Upgrade(pub(crate) WebSocketUpgrade);

impl<S: Send + Sync> FromRequestParts<S> for Upgrade {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let upgrade = WebSocketUpgrade::from_request_parts(parts, state).await;
        upgrade.map(Self).map_err(|error: WebSocketUpgradeRejection| {
            ApiError::new(StatusCode::UPGRADE_REQUIRED, "upgrade_required", error.body_text())
                .hint("this route needs a WebSocket")
        })
    }
}

/// A JSON body.
#[derive(Debug)]
pub(crate) struct Body<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequest<Arc<App>> for Body<T> {
    type Rejection = ApiError;
    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let (headers, bytes) = read(request, app.limits.json_bytes).await?;
        parse(&headers, &bytes).map(Self)
    }
}

/// A JSON body that may be left out.
#[derive(Debug)]
pub(crate) struct MaybeBody<T>(pub(super) T);

impl<T: DeserializeOwned + Default> FromRequest<Arc<App>> for MaybeBody<T> {
    type Rejection = ApiError;
    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let (headers, bytes) = read(request, app.limits.json_bytes).await?;
        if bytes.is_empty() {
            return Ok(Self(T::default()));
        }
        parse(&headers, &bytes).map(Self)
    }
}

async fn read(request: Request, limit: usize) -> Result<(HeaderMap, Bytes), ApiError> {
    let too_large = || {
        ApiError::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "too_large",
            format!("the JSON body is over {limit} bytes"),
        )
        .hint("send large data as files")
    };
    let (parts, body) = request.into_parts();
    let announced = parts.headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok());
    if announced.and_then(|text| text.parse::<usize>().ok()).is_some_and(|bytes| bytes > limit) {
        return Err(too_large());
    }
    match Limited::new(body, limit).collect().await {
        Ok(body) => Ok((parts.headers, body.to_bytes())),
        Err(error) if error.is::<LengthLimitError>() => Err(too_large()),
        Err(_) => Err(ApiError::invalid("the connection closed before the end of the body")),
    }
}

/// Whether the body says it is JSON.
pub(crate) fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    let kind = kind.split(';').next().unwrap_or("").trim().to_ascii_lowercase();
    kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json"))
}

fn parse<T: DeserializeOwned>(headers: &HeaderMap, bytes: &[u8]) -> Result<T, ApiError> {
    if !is_json(headers) {
        return Err(ApiError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "unsupported_media_type",
            "the body must be JSON",
        )
        .hint("send `Content-Type: application/json`"));
    }
    parse_json(bytes)
}

/// What is wrong with JSON that is well-formed.
fn unfit(error: serde_path_to_error::Error<serde_json::Error>) -> ApiError {
    let path = error.path().to_string();
    let problem = error.into_inner();
    match path.as_str() {
        "." => ApiError::invalid(problem.to_string()),
        path => ApiError::invalid(format!("{path}: {problem}")),
    }
}

/// Reads JSON; an error names the field.
pub(crate) fn parse_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    // A list would be taken for the fields in their order, which is never meant.
    let first = bytes.iter().find(|byte| !byte.is_ascii_whitespace());
    if first.is_some_and(|byte| *byte != b'{') {
        return Err(ApiError::invalid("the body must be a JSON object"));
    }
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        if error.inner().is_data() {
            return unfit(error);
        }
        // Where a word of a fixed list is expected and something else is found, the parser takes
        // that for a mistake in the syntax.
        let fits = serde_json::from_slice::<serde_json::Value>(bytes)
            .map(serde_path_to_error::deserialize::<_, T>);
        match fits {
            Ok(Err(error)) => unfit(error),
            _ => ApiError::invalid(format!("the body is not valid JSON: {}", error.into_inner())),
        }
    })?;
    reader
        .end()
        .map_err(|error| ApiError::invalid(format!("the body is not valid JSON: {error}")))?;
    Ok(value)
}

/// Reads a name or an id of a request.
pub(crate) fn parsed<T>(field: &str, text: &str) -> Result<T, ApiError>
where
    T: std::str::FromStr<Err: std::fmt::Display>,
{
    text.parse().map_err(|error: T::Err| ApiError::invalid(format!("{field}: {error}")))
}
