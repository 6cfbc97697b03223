//! Answers that the proxy gives itself.

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::{HeaderMap, Response, StatusCode};

use super::head;
use super::upstream_connection::Body;
use crate::model::Answer;

pub(super) fn answered(answer: &Answer) -> Response<Body> {
    let mut response = Response::new(full(Bytes::from(answer.body.clone())));
    *response.status_mut() = StatusCode::from_u16(answer.status).unwrap_or(StatusCode::OK);
    for (name, value) in &answer.headers {
        if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), HeaderValue::from_str(value)) {
            response.headers_mut().append(name, value);
        }
    }
    head::strip_answer(response.headers_mut());
    response.headers_mut().remove(CONTENT_LENGTH);
    response
}

pub(super) fn reply(status: StatusCode, text: impl Into<String>, json: bool) -> Response<Body> {
    let text = text.into();
    let (kind, body) = if json {
        let code = status.canonical_reason().unwrap_or("error").to_ascii_lowercase();
        let error = serde_json::json!({"error": {"code": code.replace(' ', "_"), "message": text}});
        ("application/json", error.to_string())
    } else {
        ("text/plain; charset=utf-8", text + "\n")
    };
    let mut response = Response::new(full(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert("x-sandkeep", HeaderValue::from_static("network"));
    response
}

pub(super) fn wants_json(headers: &HeaderMap) -> bool {
    let accepts = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    accepts.into_iter().any(|value| value.contains("json"))
}

pub(super) fn full(bytes: Bytes) -> Body {
    Full::new(bytes).map_err(|never| match never {}).boxed_unsync()
}
