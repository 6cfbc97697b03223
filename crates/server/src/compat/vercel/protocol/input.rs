//! How their requests are read. Every error is a 400 that names the field.
//!
//! Bodies are taken apart field by field: [`Fields::end`] refuses unknown fields, so that an
//! unknown setting is never silently ignored. Keys that begin with `__` are private between their
//! clients and their service and are let through.

use std::sync::Arc;

use axum::extract::{FromRequest, FromRequestParts, Query, Request};
use axum::http::request::Parts;
use http_body_util::{BodyExt, Limited};
use sandkeep_core::model::Span;
use serde_json::{Map, Value};

use crate::api::App;
use crate::compat::vercel::protocol::error::VercelError;
use crate::compat::vercel::protocol::ordered::Ordered;

/// A JSON object that is taken apart. No body is an empty one.
#[derive(Debug, Default)]
pub(crate) struct Fields {
    at: String,
    map: Map<String, Value>,
    /// The whole body as it was written; of a part of one, nothing.
    body: Option<Ordered>,
}

impl FromRequest<Arc<App>> for Fields {
    type Rejection = VercelError;
    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, VercelError> {
        let limit = app.limits.json_bytes;
        let body = Limited::new(request.into_body(), limit).collect().await.map_err(|error| {
            match error.downcast_ref::<http_body_util::LengthLimitError>() {
                Some(_) => VercelError::bad(format!("the body is over {limit} bytes")),
                None => VercelError::bad("the connection closed before the end of the body"),
            }
        })?;
        let bytes = body.to_bytes();
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return Ok(Self::default());
        }
        let body: Result<Ordered, _> = serde_json::from_slice(&bytes);
        match body.map(|body| (body.to_value(), body)) {
            Ok((Value::Object(map), body)) => Ok(Self { at: String::new(), map, body: Some(body) }),
            Ok(_) => Err(VercelError::bad("should be object.")),
            Err(error) => Err(VercelError::bad(format!("the body is not JSON: {error}."))),
        }
    }
}

impl Fields {
    pub(crate) fn of(at: &str, value: Value) -> Result<Self, VercelError> {
        match value {
            Value::Object(map) => Ok(Self { at: format!("{at}."), map, body: None }),
            _ => Err(VercelError::bad(format!("`{at}` should be object."))),
        }
    }

    fn wrong(&self, name: &str, should: &str) -> VercelError {
        VercelError::bad(format!("`{}{name}` should {should}.", self.at))
    }

    /// Whatever it is. `null` is a value here and absent elsewhere.
    pub(crate) fn any(&mut self, name: &str) -> Option<Value> {
        self.map.remove(name)
    }

    /// Whatever it is, in the order it was written in.
    pub(crate) fn written(&mut self, name: &str) -> Option<Ordered> {
        let value = self.map.remove(name)?;
        let written = self.body.as_ref().and_then(|body| body.get(name)).cloned();
        Some(written.unwrap_or_else(|| value.into()))
    }

    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, VercelError> {
        match self.map.remove(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.wrong(name, "be string")),
        }
    }

    pub(crate) fn needed(&mut self, name: &str) -> Result<String, VercelError> {
        match self.text(name)? {
            Some(text) => Ok(text),
            None => {
                Err(VercelError::bad(format!("missing required property `{}{name}`.", self.at)))
            }
        }
    }

    pub(crate) fn flag(&mut self, name: &str) -> Result<Option<bool>, VercelError> {
        match self.map.remove(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(_) => Err(self.wrong(name, "be boolean")),
        }
    }

    /// A whole number in a range.
    pub(crate) fn number(
        &mut self,
        name: &str,
        range: std::ops::RangeInclusive<u64>,
    ) -> Result<Option<u64>, VercelError> {
        let Some(value) = self.map.remove(name) else { return Ok(None) };
        // Their clients multiply, so a whole number may come as 2.0.
        let whole = value.as_u64().or_else(|| {
            let number = value.as_f64()?;
            (number.fract() == 0.0 && (0.0..9.0e15).contains(&number)).then_some(number as u64)
        });
        match whole {
            Some(number) if range.contains(&number) => Ok(Some(number)),
            Some(number) if number < *range.start() => {
                Err(self.wrong(name, &format!("be >= {}", range.start())))
            }
            Some(_) => Err(self.wrong(name, &format!("be <= {}", range.end()))),
            None if value.as_f64().is_some_and(|number| number < 0.0) => {
                Err(self.wrong(name, &format!("be >= {}", range.start())))
            }
            None => Err(self.wrong(name, "be integer")),
        }
    }

    /// Milliseconds in a range.
    pub(crate) fn span(
        &mut self,
        name: &str,
        range: std::ops::RangeInclusive<u64>,
    ) -> Result<Option<Span>, VercelError> {
        Ok(self.number(name, range)?.map(Span))
    }

    /// An object, to be taken apart in its turn.
    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Fields>, VercelError> {
        let at = format!("{}{name}", self.at);
        self.map.remove(name).map(|value| Self::of(&at, value)).transpose()
    }

    pub(crate) fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, VercelError> {
        match self.map.remove(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(_) => Err(self.wrong(name, "be array")),
        }
    }

    pub(crate) fn texts(&mut self, name: &str) -> Result<Option<Vec<String>>, VercelError> {
        let Some(list) = self.list(name)? else { return Ok(None) };
        let text = |value| match value {
            Value::String(text) => Ok(text),
            _ => Err(self.wrong(name, "be array of strings")),
        };
        list.into_iter().map(text).collect::<Result<_, _>>().map(Some)
    }

    /// A map of texts.
    pub(crate) fn words(
        &mut self,
        name: &str,
    ) -> Result<Option<std::collections::BTreeMap<String, String>>, VercelError> {
        let Some(fields) = self.object(name)? else { return Ok(None) };
        let word = |(key, value): (String, Value)| match value {
            Value::String(text) => Ok((key, text)),
            _ => Err(VercelError::bad(format!("`{}{key}` should be string.", fields.at))),
        };
        fields.map.clone().into_iter().map(word).collect::<Result<_, _>>().map(Some)
    }

    /// All of it, as it came.
    pub(crate) fn into_value(self) -> Value {
        Value::Object(self.map)
    }

    /// All of it, in the order it was written in.
    pub(crate) fn into_written(self) -> Ordered {
        self.body.unwrap_or_else(|| Value::Object(self.map).into())
    }

    /// Refuses unknown fields.
    pub(crate) fn end(&self) -> Result<(), VercelError> {
        match self.map.keys().find(|name| !name.starts_with("__")) {
            None => Ok(()),
            Some(name) => {
                let name: String = name.chars().take(80).collect();
                let problem = format!("should NOT have additional property `{}{name}`.", self.at);
                Err(VercelError::bad(problem))
            }
        }
    }
}

/// The host by which the client reached us, for addresses that lead back here.
#[derive(Debug)]
pub(crate) struct Reached(pub(crate) Option<String>);

impl<S: Send + Sync> FromRequestParts<S> for Reached {
    type Rejection = VercelError;
    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, VercelError> {
        let header = parts.headers.get(axum::http::header::HOST);
        let named = header.and_then(|value| value.to_str().ok()).map(ToOwned::to_owned);
        // HTTP/2 says it in the address.
        Ok(Self(named.or_else(|| parts.uri.authority().map(ToString::to_string))))
    }
}

/// The parameters of the query. Unknown ones are ignored: every client sends some.
#[derive(Debug)]
pub(crate) struct QueryParams(Vec<(String, String)>);

impl<S: Send + Sync> FromRequestParts<S> for QueryParams {
    type Rejection = VercelError;
    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, VercelError> {
        let read = Query::<Vec<(String, String)>>::from_request_parts(parts, state).await;
        read.map(|Query(pairs)| Self(pairs)).map_err(|error| VercelError::bad(error.body_text()))
    }
}

impl QueryParams {
    /// The first value of that name, if it says anything.
    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.all(name).first().copied()
    }

    pub(crate) fn all(&self, name: &str) -> Vec<&str> {
        let found = self.0.iter().filter(|(key, value)| key == name && !value.is_empty());
        found.map(|(_, value)| value.as_str()).collect()
    }

    pub(crate) fn flag(&self, name: &str) -> Result<bool, VercelError> {
        match self.text(name) {
            None | Some("false" | "0") => Ok(false),
            Some("true" | "1") => Ok(true),
            Some(_) => Err(VercelError::bad(format!("`{name}` should be boolean."))),
        }
    }

    pub(crate) fn number(
        &self,
        name: &str,
        range: std::ops::RangeInclusive<u32>,
    ) -> Result<Option<u32>, VercelError> {
        let Some(text) = self.text(name) else { return Ok(None) };
        let (low, high) = (range.start(), range.end());
        match text.parse::<i64>() {
            Ok(number) if number < i64::from(*low) => {
                Err(VercelError::bad(format!("`{name}` should be >= {low}.")))
            }
            Ok(number) if number > i64::from(*high) => {
                Err(VercelError::bad(format!("`{name}` should be <= {high}.")))
            }
            Ok(number) => Ok(u32::try_from(number).ok()),
            Err(_) => Err(VercelError::bad(format!("`{name}` should be integer."))),
        }
    }

    /// One word of a list.
    pub(crate) fn word<T: Copy>(
        &self,
        name: &str,
        words: &[(&str, T)],
    ) -> Result<Option<T>, VercelError> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match words.iter().find(|(word, _)| *word == text) {
            Some((_, meaning)) => Ok(Some(*meaning)),
            None => {
                let allowed: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
                let problem =
                    format!("`{name}` should be equal to one of the allowed values {allowed:?}.");
                Err(VercelError::bad(problem))
            }
        }
    }
}
