//! Sessions: get, list, stop, snapshot, extend, network policy.
//!
//! A session is addressed by its id alone. A finished one can be read and stopped, and is 410 to
//! everything else: clients then wake the sandbox and continue in the session that gives them.

pub(crate) mod commands;
pub(crate) mod files;
pub(crate) mod interactive;
pub(crate) mod within;

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::routing::{get, post};
use axum::{Json, Router};
use sandkeep_core::db::{By, Direction};
use sandkeep_core::engine::{Caller, Checkpoint, Error, SnapshotOnStop, Stop};
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_core::model::{Method, Patch, Sandbox, Session, SessionId, Span};
use serde_json::{Value, json};

use super::protocol::auth::{Acts, Looks};
use super::protocol::error::VercelError;
use super::protocol::ids::Foreign as _;
use super::protocol::input::{Fields, QueryParams, Reached};
use super::protocol::wire;
use super::sandboxes::settings::{self, DAY, EXPIRATION};
use super::sandboxes::{existing, page, pagination};
use super::{Answer, done, network};
use crate::api::App;

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v2/sandboxes/sessions", get(list))
        .route("/v2/sandboxes/sessions/{id}", get(look))
        .route("/v2/sandboxes/sessions/{id}/stop", post(stop))
        .route("/v2/sandboxes/sessions/{id}/extend-timeout", post(extend))
        .route("/v2/sandboxes/sessions/{id}/network-policy", post(network_policy))
        .route("/v2/sandboxes/sessions/{id}/snapshot", post(snapshot_2))
        .route("/v3/sandboxes/sessions/{id}/snapshot", post(snapshot_3))
}

/// The session of that id, which may be over.
pub(super) async fn find(
    app: &App,
    caller: &Caller,
    id: &str,
) -> Result<(Sandbox, Session), VercelError> {
    let unknown = || VercelError::not_found("Vercel Sandbox");
    let id = SessionId::read(id).ok_or_else(unknown)?;
    match app.engine.session(&caller.project, &id).await {
        Err(Error::NoSession(_)) => Err(unknown()),
        other => Ok(other?),
    }
}

/// The session of that id, under way.
pub(super) async fn running(
    app: &App,
    caller: &Caller,
    id: &str,
) -> Result<(Sandbox, Session), VercelError> {
    let (sandbox, session) = find(app, caller, id).await?;
    under_way(&sandbox, &session)?;
    crate::audit::target("sandbox", &sandbox.name);
    Ok((sandbox, session))
}

/// Whether a session is under way, and what to say if it is not.
pub(super) fn under_way(sandbox: &Sandbox, session: &Session) -> Result<(), VercelError> {
    let current = sandbox.session.as_ref() == Some(&session.id) && session.ended_at.is_none();
    match sandbox.phase() {
        Phase::Running | Phase::Starting if current => Ok(()),
        Phase::Stopping if current => {
            let (code, message) = match wire::is_snapshotting(sandbox) {
                true => ("sandbox_snapshotting", "A snapshot of the sandbox is being taken."),
                false => ("sandbox_stopping", "The sandbox is stopping."),
            };
            Err(VercelError::new(StatusCode::UNPROCESSABLE_ENTITY, code, message))
        }
        _ => Err(VercelError::stopped()),
    }
}

async fn look(
    Looks(caller): Looks,
    State(app): State<Arc<App>>,
    Reached(host): Reached,
    Path(id): Path<String>,
) -> Answer {
    let (sandbox, session) = find(&app, &caller, &id).await?;
    let routes = wire::routes(&app, host.as_deref(), &sandbox);
    Ok(Json(json!({ "session": wire::session(&app, &sandbox, &session), "routes": routes })))
}

async fn list(Looks(caller): Looks, State(app): State<Arc<App>>, asked: QueryParams) -> Answer {
    let page = page(&asked, By::Created, Direction::Descending)?;
    let name = asked.text("name").map(existing).transpose()?;
    let found = app.engine.project_sessions(&caller.project, name.as_ref(), &page).await?;
    let mut sessions = Vec::with_capacity(found.items.len());
    for session in &found.items {
        match app.engine.session(&caller.project, &session.id).await {
            Ok((sandbox, session)) => sessions.push(wire::session(&app, &sandbox, &session)),
            // Deleted since the list was made.
            Err(Error::NoSession(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let pagination = pagination(sessions.len(), found.next);
    Ok(Json(json!({ "sessions": sessions, "pagination": pagination })))
}

async fn stop(
    Acts(caller): Acts,
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    _: Fields,
) -> Answer {
    let (sandbox, session) = find(&app, &caller, &id).await?;
    let ask = Stop { session: Some(session.id), ..Stop::default() };
    let (engine, project, name) = (app.engine.clone(), caller.project.clone(), sandbox.name);
    let stopped =
        done(&app.tasks, async move { engine.stop(&project, &name, ask, None).await }).await?;
    let session = stopped.session.as_ref();
    let mut answer = json!({ "sandbox": wire::sandbox(&app, &stopped.sandbox, session) });
    if let Some(session) = session {
        answer["session"] = json!(wire::session(&app, &stopped.sandbox, session));
    }
    if let Some(snapshot) = &stopped.snapshot {
        answer["snapshot"] = json!(wire::snapshot(snapshot));
    }
    Ok(Json(answer))
}

async fn extend(
    Acts(caller): Acts,
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    mut fields: Fields,
) -> Answer {
    let needed = || VercelError::bad("missing required property `duration`.");
    let by = fields.span("duration", 1000..=u64::MAX >> 12)?.ok_or_else(needed)?;
    fields.end()?;
    let (sandbox, session) = running(&app, &caller, &id).await?;
    let most = app.vercel.max_timeout.0;
    let now = session.deadline.map_or(0, |deadline| {
        u64::try_from(deadline.as_millisecond() - session.started_at.as_millisecond()).unwrap_or(0)
    });
    if now.saturating_add(by.0) > most {
        let message =
            format!("The timeout cannot be longer than {most} ms in all; it is {now} ms.");
        let status = StatusCode::BAD_REQUEST;
        return Err(VercelError::new(status, "sandbox_timeout_invalid", message));
    }
    let session = if session.deadline.is_some() {
        app.engine.extend(&caller.project, &sandbox.name, by, Some(session.id)).await?
    } else {
        // It has all the time there is.
        session
    };
    Ok(Json(json!({ "session": wire::session(&app, &sandbox, &session) })))
}

async fn network_policy(
    Acts(caller): Acts,
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    fields: Fields,
) -> Answer {
    let (policy, as_written) = network::read(&fields.into_written())?;
    let notes = [(network::AS_WRITTEN.to_owned(), as_written)].into();
    let patch = Patch { network: Some(Some(policy)), notes, ..Patch::default() };
    let (sandbox, session) = running(&app, &caller, &id).await?;
    let (engine, project, name) = (app.engine.clone(), caller.project.clone(), sandbox.name);
    let sandbox =
        done(&app.tasks, async move { engine.update(&project, &name, patch).await }).await?;
    Ok(Json(json!({ "session": wire::session(&app, &sandbox, &session) })))
}

async fn snapshot_2(
    who: Acts,
    app: State<Arc<App>>,
    id: Path<String>,
    asked: QueryParams,
    headers: HeaderMap,
    fields: Fields,
) -> Result<(StatusCode, Json<Value>), VercelError> {
    snapshot(who, app, id, keep_running(&asked, &headers)?, fields, None).await
}

async fn snapshot_3(
    who: Acts,
    app: State<Arc<App>>,
    id: Path<String>,
    asked: QueryParams,
    headers: HeaderMap,
    fields: Fields,
) -> Result<(StatusCode, Json<Value>), VercelError> {
    snapshot(who, app, id, keep_running(&asked, &headers)?, fields, Some(7 * DAY)).await
}

/// Whether the session is to continue, which theirs never does: `x-sandkeep-keep-running: true`, or
/// `?keepRunning=true`.
fn keep_running(asked: &QueryParams, headers: &HeaderMap) -> Result<bool, VercelError> {
    match headers.get("x-sandkeep-keep-running").map(|value| value.as_bytes()) {
        Some(b"true") => Ok(true),
        Some(b"false") | None => asked.flag("keepRunning"),
        Some(_) => Err(VercelError::bad("`x-sandkeep-keep-running` should be true or false.")),
    }
}

async fn snapshot(
    Acts(caller): Acts,
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    keep_running: bool,
    mut fields: Fields,
    default: Option<u64>,
) -> Result<(StatusCode, Json<Value>), VercelError> {
    let asked = settings::expiration(&mut fields, "expiration")?;
    fields.end()?;
    let (sandbox, session) = running(&app, &caller, &id).await?;
    let told = sandbox.config.notes.contains_key(EXPIRATION);
    let kept = sandbox.config.retention.kept_expires.is_some();
    let expires: Option<Option<Span>> =
        asked.or(default.filter(|_| !told && !kept)).map(settings::span_of);
    let (engine, project, name) = (app.engine.clone(), caller.project.clone(), sandbox.name);
    let (session, method) = (Some(session.id), Method::Manual);
    let answer = done(&app.tasks, async move {
        if keep_running {
            let ask = Checkpoint { label: None, method, expires, session };
            let taken = engine.checkpoint(&project, &name, ask).await?;
            let now = engine.get(&project, &name).await?;
            return Ok((now.sandbox, now.session, Some(taken)));
        }
        let decision = Default::default();
        let ask = Stop { session, snapshot: SnapshotOnStop::Always, method, expires, decision };
        let stopped = engine.stop(&project, &name, ask, None).await?;
        Ok((stopped.sandbox, stopped.session, stopped.snapshot))
    });
    let (sandbox, session, snapshot) = answer.await?;
    // The session ended otherwise just before: as if it had been over from the start.
    let (Some(session), Some(snapshot)) = (session, snapshot) else {
        return Err(VercelError::stopped());
    };
    let answer = json!({
        "snapshot": wire::snapshot(&snapshot),
        "session": wire::session(&app, &sandbox, &session),
    });
    Ok((StatusCode::CREATED, Json(answer)))
}
