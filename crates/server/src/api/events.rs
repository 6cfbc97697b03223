//! What happened, as server-sent events.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use sandkeep_client::types::{self, error_chain};
use sandkeep_core::engine::{EventQuery, EventScope, EventStream};
use sandkeep_core::model::{self, EventFilter, EventId, Name, Scope, Span, Tags, Timestamp, now};
use tokio_util::sync::CancellationToken;

use super::App;
use super::input::{Params, parsed};
use crate::auth::Reader;
use crate::error::ApiError;

/// How often a quiet stream shows that it is alive.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Streams past and new events. Never wakes a sandbox.
#[utoipa::path(get, path = "/v1/events", tag = "events", operation_id = "events",
    params(
        ("sandbox" = Option<String>, Query, description = "Only of the sandbox of this name."),
        ("tag" = Option<Vec<String>>, Query, description = "Only of sandboxes with this tag, `key=value`; repeat it, and all must match."),
        ("kind" = Option<Vec<String>>, Query, description = "Only this kind (`command.ended`) or group of kinds (`command`); repeat it for more."),
        ("cursor" = Option<String>, Query, description = "Only events after the one with this id. The header `Last-Event-ID` does the same."),
        ("since" = Option<String>, Query, description = "Only events since a time (RFC 3339), or since how long ago (`10m`)."),
        ("follow" = Option<bool>, Query, description = "Whether the stream stays open for new events: true if absent. Without `cursor` and `since` it then begins now."),
        ("all_projects" = Option<bool>, Query, description = "Events of all projects and of the host; needs an admin key."),
    ),
    responses((status = 200, description = "Server-sent events; the `data` of each is an Event.", body = types::Event, content_type = "text/event-stream")))]
pub(crate) async fn stream(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    mut params: Params,
) -> Result<Response, ApiError> {
    let filter = EventFilter {
        sandbox: params
            .text("sandbox")?
            .map(|name| parsed::<Name>("sandbox", &name))
            .transpose()?,
        tags: tags(&mut params)?,
        kinds: kinds(&mut params)?,
    };
    let after = cursor(&mut params, &headers)?;
    let since = params.text("since")?.map(|text| time("since", &text)).transpose()?;
    let follow = match params.text("follow")?.as_deref() {
        None | Some("true" | "1" | "") => true,
        Some("false" | "0") => false,
        Some(other) => {
            return Err(ApiError::invalid(format!("`follow`: `{other}` is not `true` or `false`")));
        }
    };
    let all = params.flag("all_projects")?;
    params.end()?;
    let is_admin = caller.scope == Scope::Admin;
    let scope = match (all, is_admin) {
        (true, true) => EventScope::Everything,
        (true, false) => {
            return Err(ApiError::forbidden("`all_projects` needs a key of scope `admin`")
                .hint("without it the stream has the events of the key's own project"));
        }
        (false, true) => EventScope::ProjectAndHost(caller.project),
        (false, false) => EventScope::Project(caller.project),
    };
    let events = app.engine.events(EventQuery { scope, filter, after, since, follow })?;
    let opened = message(&about_the_stream("stream.opened", events.cursor()));
    let closing = app.closing.clone();
    let state = Messages { first: Some(opened), events: Some(events), closing };
    let body = stream::unfold(state, async |mut messages| {
        let bytes = messages.next().await?;
        Some((Ok::<_, io::Error>(bytes), messages))
    });
    let headers = [(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-store")];
    Ok((headers, Body::from_stream(body)).into_response())
}

fn tags(params: &mut Params) -> Result<Tags, ApiError> {
    let mut tags = Tags::new();
    for tag in params.all("tag") {
        let Some((key, value)) = tag.split_once('=') else {
            return Err(ApiError::invalid(format!("`tag`: `{tag}` is not `key=value`")));
        };
        tags.insert(key.to_owned(), value.to_owned());
    }
    Ok(tags)
}

fn kinds(params: &mut Params) -> Result<Vec<String>, ApiError> {
    let kinds = params.all("kind");
    match kinds.iter().find(|kind| !EventFilter::knows_kind(kind)) {
        None => Ok(kinds),
        Some(unknown) => {
            let unknown: String = unknown.chars().take(80).collect();
            let known = model::EventData::KINDS.join(", ");
            Err(ApiError::invalid(format!("`kind`: there is no kind `{unknown}`"))
                .hint(format!("use one of {known}, or the part before the dot")))
        }
    }
}

fn cursor(params: &mut Params, headers: &HeaderMap) -> Result<Option<EventId>, ApiError> {
    if let Some(text) = params.text("cursor")? {
        return parsed("cursor", &text).map(Some);
    }
    let Some(value) = headers.get("last-event-id") else { return Ok(None) };
    let text = value.to_str().unwrap_or("");
    parsed("Last-Event-ID", text).map(Some)
}

/// A time, or how long ago it was.
pub(super) fn time(field: &str, text: &str) -> Result<Timestamp, ApiError> {
    if let Ok(time) = text.parse::<Timestamp>() {
        return Ok(time);
    }
    let bad = || {
        ApiError::invalid(format!(
            "`{field}`: `{text}` is neither a time like `2026-01-31T12:00:00Z` nor a span like `10m`"
        ))
    };
    let Span(millis) = text.parse().map_err(|_| bad())?;
    let span = jiff::SignedDuration::from_millis(i64::try_from(millis).map_err(|_| bad())?);
    Ok(now().checked_sub(span).unwrap_or(Timestamp::UNIX_EPOCH))
}

struct Messages {
    first: Option<Bytes>,
    events: Option<EventStream>,
    closing: CancellationToken,
}

impl Messages {
    async fn next(&mut self) -> Option<Bytes> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        let events = self.events.as_mut()?;
        let cursor = events.cursor();
        let batch = tokio::select! {
            biased;
            batch = events.next() => batch,
            () = self.closing.cancelled() => {
                self.events = None;
                return Some(message(&about_the_stream("stream.closing", cursor)));
            }
            () = tokio::time::sleep(KEEP_ALIVE) => return Some(Bytes::from_static(b": alive\n\n")),
        };
        match batch {
            Ok(Some(batch)) => {
                let mut text = Vec::new();
                if batch.missed {
                    text.extend(message(&about_the_stream("stream.missed", cursor)));
                }
                for event in batch.events {
                    text.extend(message(&out(event)));
                }
                Some(text.into())
            }
            Ok(None) => {
                self.events = None;
                let over = self.closing.is_cancelled();
                over.then(|| message(&about_the_stream("stream.closing", cursor)))
            }
            Err(error) => {
                tracing::error!(error = error_chain(&error), "a stream of events ended early");
                self.events = None;
                Some(message(&about_the_stream("stream.closing", cursor)))
            }
        }
    }
}

fn message(event: &types::Event) -> Bytes {
    let data = serde_json::to_string(event).unwrap_or_default();
    format!("id: {}\nevent: {}\ndata: {data}\n\n", event.id, event.kind).into()
}

/// A message that is about the stream itself.
fn about_the_stream(kind: &str, cursor: EventId) -> types::Event {
    types::Event {
        id: cursor.to_string(),
        at: now().to_string(),
        kind: kind.to_owned(),
        project: None,
        sandbox: None,
        data: Default::default(),
    }
}

fn out(event: model::Event) -> types::Event {
    event.into()
}

#[cfg(test)]
mod tests {
    use sandkeep_core::model::{Event, EventData, EventId, Timestamp};

    use super::{message, out, time};

    #[test]
    fn an_event_is_one_message() {
        let at = Timestamp::UNIX_EPOCH;
        let change = EventData::SandboxFailed { reason: "line\nbreak".to_owned() };
        let event = Event { id: EventId(7), at, project: None, sandbox: None, change };
        let text = String::from_utf8(message(&out(event)).to_vec()).unwrap();
        assert_eq!(
            text,
            "id: 7\nevent: sandbox.failed\ndata: {\"id\":\"7\",\"at\":\"1970-01-01T00:00:00Z\",\
             \"kind\":\"sandbox.failed\",\"data\":{\"reason\":\"line\\nbreak\"}}\n\n"
        );
    }

    #[test]
    fn since_is_a_time_or_a_span() {
        let time_given = time("since", "2026-01-01T00:00:00Z").unwrap();
        assert_eq!(time_given.to_string(), "2026-01-01T00:00:00Z");
        let ago = Timestamp::now().as_second() - time("since", "10m").unwrap().as_second();
        assert!((599..=601).contains(&ago), "{ago}");
        assert!(time("since", "yesterday").is_err());
    }
}
