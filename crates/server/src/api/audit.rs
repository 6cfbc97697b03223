//! The audit log: entries as pages, as lines for an export, or as server-sent events; and its verification.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use sandkeep_client::types::{self, error_chain};
use sandkeep_core::engine::{AuditFollow, AuditQuery, Caller};
use sandkeep_core::model::{AuditChain, AuditEntry, AuditFilter, Scope};
use tokio_util::sync::CancellationToken;

use super::events::time;
use super::input::{Params, parsed};
use super::stream::ndjson;
use super::{ApiResult, App, finish};
use crate::auth::Writer;
use crate::error::ApiError;

/// How often a quiet stream shows that it is alive.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// How many entries an export or a stream sends at a time.
const PIECE: usize = 200;

/// Lists entries of the audit log, oldest first; exports or follows them. Needs a key of scope `write`.
#[utoipa::path(get, path = "/v1/audit", tag = "audit", operation_id = "audit",
    params(
        ("since" = Option<String>, Query, description = "Only entries since a time (RFC 3339), or since how long ago (`10m`)."),
        ("until" = Option<String>, Query, description = "Only entries before a time, or before how long ago."),
        ("actor" = Option<String>, Query, description = "Only what this key did, by id or label; or `key`, `system`, `agent`, `webhook`, `anonymous`."),
        ("target" = Option<String>, Query, description = "Only what was done to this, like `sandbox/my-app`, or to all of a kind, like `secret`."),
        ("action" = Option<String>, Query, description = "Only this action (`sandbox.create`) or group of actions (`sandbox`)."),
        ("host" = Option<bool>, Query, description = "The host's log instead of the project's; needs an admin key."),
        ("limit" = Option<u32>, Query, description = "Maximum number of items: 1 to 1000, 100 if absent."),
        ("cursor" = Option<String>, Query, description = "`next` of the previous page, or the `seq` of an entry: only entries after it."),
        ("follow" = Option<bool>, Query, description = "Server-sent events that go on with new entries. Without `since` and `cursor` they begin now."),
        ("format" = Option<String>, Query, description = "`jsonl`: all entries that fit, one per line, without pages."),
    ),
    responses((status = 200, description = "A page of the list; with `follow` or `format=jsonl`, a stream of entries.",
        content((types::Paged<types::AuditEntry> = "application/json"), (types::AuditEntry = "text/event-stream"), (types::AuditEntry = "application/x-ndjson")))))]
pub(crate) async fn entries(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    mut params: Params,
) -> Result<Response, ApiError> {
    let when = |text: Option<String>, name| text.map(|text| time(name, &text)).transpose();
    let filter = AuditFilter {
        since: when(params.text("since")?, "since")?,
        until: when(params.text("until")?, "until")?,
        actor: params.text("actor")?,
        target: params.text("target")?,
        action: params.text("action")?,
    };
    let chain = chain_of(&caller, params.flag("host")?)?;
    let follow = params.flag("follow")?;
    let lines = match params.text("format")?.as_deref() {
        None | Some("json") => false,
        Some("jsonl") => true,
        Some(other) => {
            return Err(ApiError::invalid(format!("`format`: `{other}` is not `json` or `jsonl`")));
        }
    };
    if follow && lines {
        return Err(ApiError::invalid("`follow` and `format=jsonl` cannot be combined"));
    }
    let page = params.page()?;
    params.end()?;
    let cursor = page.cursor.or_else(|| last_event_id(&headers));
    let cursor = cursor.map(|text| parsed::<u64>("cursor", &text)).transpose()?;
    let from_now = follow && cursor.is_none() && filter.since.is_none();
    let after = match from_now {
        true => app.engine.last_audit_entry(&chain).await?,
        false => cursor.unwrap_or(0),
    };
    let mut found = app.engine.audit(AuditQuery { chain, filter, after, follow });
    if follow || lines {
        let entries = Entries { found: Some(found), lines, closing: app.closing.clone() };
        return Ok(streamed(entries));
    }
    let limit = usize::try_from(page.limit).unwrap_or(1000);
    // One more than was requested shows whether there is a next page.
    let mut items = Vec::with_capacity(limit + 1);
    while items.len() <= limit
        && let Some(batch) = found.next(limit + 1 - items.len()).await?
    {
        items.extend(batch.entries);
    }
    let has_more = items.len() > limit;
    items.truncate(limit);
    let next = items.last().filter(|_| has_more).map(|entry| entry.seq.to_string());
    let items = items.into_iter().map(out).collect();
    Ok(Json(types::Paged { items, next }).into_response())
}

/// Verifies the project's log, or the host's: finds removed, changed and reordered entries, and a cut end.
#[utoipa::path(get, path = "/v1/audit/verify", tag = "audit", operation_id = "verify_audit",
    params(
        ("host" = Option<bool>, Query, description = "The host's log instead of the project's; needs an admin key."),
        ("expect" = Option<String>, Query, description = "An entry that was noted earlier, as `seq:hash`; the beginning of the hash is enough. It must still be there."),
    ),
    responses((status = 200, description = "What was found.", body = types::AuditVerification)))]
pub(crate) async fn verify(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    mut params: Params,
) -> ApiResult<types::AuditVerification> {
    let chain = chain_of(&caller, params.flag("host")?)?;
    let expect = params.text("expect")?.map(|text| noted(&text)).transpose()?;
    params.end()?;
    // It reads all of the log, also when the caller does not wait for it.
    let permit = app.measuring.enter(&caller.key, app.limits.measurements_per_key)?;
    let engine = app.engine.clone();
    let work = async move {
        let _permit = permit;
        engine.verify_audit(chain, expect).await
    };
    let report = finish(&app, work).await?;
    Ok(Json(types::AuditVerification {
        chain: report.chain,
        intact: report.found == 0,
        entries: report.entries,
        first: report.first,
        last: report.last,
        last_hash: report.last_hash,
        signed: report.signed,
        findings: report.findings.iter().map(ToString::to_string).collect(),
        found: report.found,
    }))
}

fn chain_of(caller: &Caller, host: bool) -> Result<AuditChain, ApiError> {
    match host {
        false => Ok(AuditChain::Project(caller.project.clone())),
        true if caller.scope == Scope::Admin => Ok(AuditChain::Host),
        true => Err(ApiError::forbidden("`host` needs a key of scope `admin`")
            .hint("without it the log of the key's own project is shown")),
    }
}

/// An entry that somebody noted.
fn noted(text: &str) -> Result<(u64, String), ApiError> {
    let bad = || {
        ApiError::invalid(
            "`expect`: not `seq:hash`, with at least the first 8 digits of the hash in hex",
        )
    };
    let (seq, hash) = text.split_once(':').ok_or_else(bad)?;
    let seq = seq.parse().map_err(|_| bad())?;
    let is_hash = (8..=64).contains(&hash.len()) && hash.bytes().all(|b| b.is_ascii_hexdigit());
    is_hash.then(|| (seq, hash.to_ascii_lowercase())).ok_or_else(bad)
}

fn last_event_id(headers: &HeaderMap) -> Option<String> {
    let value = headers.get("last-event-id")?;
    Some(String::from_utf8_lossy(value.as_bytes()).into_owned())
}

/// What is left to send.
struct Entries {
    found: Option<AuditFollow>,
    lines: bool,
    closing: CancellationToken,
}

fn streamed(entries: Entries) -> Response {
    let lines = entries.lines;
    let body = stream::unfold(entries, async |mut entries| {
        let bytes = entries.next().await?;
        Some((bytes, entries))
    });
    let body = Body::from_stream(body);
    if lines {
        return ndjson(body);
    }
    let headers = [(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-store")];
    (headers, body).into_response()
}

impl Entries {
    async fn next(&mut self) -> Option<io::Result<Bytes>> {
        let found = self.found.as_mut()?;
        let batch = tokio::select! {
            biased;
            batch = found.next(PIECE) => batch,
            () = self.closing.cancelled() => return None,
            () = tokio::time::sleep(KEEP_ALIVE), if !self.lines => {
                return Some(Ok(Bytes::from_static(b": alive\n\n")));
            }
        };
        match batch {
            Ok(Some(batch)) => {
                let mut text = Vec::new();
                for entry in batch.entries {
                    let seq = entry.seq;
                    let data = serde_json::to_string(&out(entry)).unwrap_or_default();
                    let message = match self.lines {
                        true => format!("{data}\n"),
                        false => format!("id: {seq}\ndata: {data}\n\n"),
                    };
                    text.extend(message.into_bytes());
                }
                Some(Ok(text.into()))
            }
            Ok(None) => None,
            Err(error) => {
                tracing::error!(
                    error = error_chain(&error),
                    "entries of the audit log could not be read"
                );
                self.found = None;
                // The caller must not take a part for the whole.
                Some(Err(io::Error::other("the audit log cannot be read")))
            }
        }
    }
}

fn out(entry: AuditEntry) -> types::AuditEntry {
    let AuditEntry { seq, prev, record, hash } = entry;
    let word = |value: serde_json::Result<serde_json::Value>| {
        let word = value.ok().and_then(|value| value.as_str().map(str::to_owned));
        word.unwrap_or_default()
    };
    types::AuditEntry {
        seq,
        at: record.at.to_string(),
        action: record.action,
        actor: word(serde_json::to_value(record.actor)),
        key: record.key.map(Into::into),
        label: record.label,
        front: word(serde_json::to_value(record.front)),
        address: record.address,
        project: record.project.map(Into::into),
        target: record.target,
        outcome: word(serde_json::to_value(record.outcome)),
        status: record.status,
        code: record.code,
        detail: record.detail,
        prev,
        hash,
    }
}

#[cfg(test)]
mod tests {
    use super::noted;

    #[test]
    fn a_noted_entry_is_a_number_and_the_beginning_of_a_hash() {
        assert_eq!(noted("12:00AAbbcc").unwrap(), (12, "00aabbcc".to_owned()));
        for bad in ["", "12", "12:", "12:aa", "x:00aabbcc", "12:00aabbcg", ":00aabbcc"] {
            assert!(noted(bad).is_err(), "{bad}");
        }
    }
}
