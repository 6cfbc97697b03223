//! Commands of a session: run, watched, fed, ended.
//!
//! A command continues when the client that watched it leaves, and is known, with its output, when
//! its session is over.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::stream;
use sandkeep_core::db::Page;
use sandkeep_core::engine::{Error, Exec, Started, StdinHandle, StdinProgress};
use sandkeep_core::guest::GuestError;
use sandkeep_core::model::{Command, CommandState};
use sandkeep_proto::link::Failure;
use serde_json::{Value, json};

use crate::api::App;
use crate::compat::vercel::protocol::auth::{Acts, Looks};
use crate::compat::vercel::protocol::error::VercelError;
use crate::compat::vercel::protocol::ids::Foreign as _;
use crate::compat::vercel::protocol::input::{Fields, QueryParams};
use crate::compat::vercel::protocol::ndjson::{self, LogStream};
use crate::compat::vercel::sessions::within::Within;

/// How much input one request may bring.
const INPUT: usize = 512 << 10;

pub(crate) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v2/sandboxes/sessions/{id}/cmd", post(run).get(list))
        .route("/v2/sandboxes/sessions/{id}/cmd/{cmd}", get(look))
        .route("/v2/sandboxes/sessions/{id}/cmd/{cmd}/logs", get(logs))
        .route("/v2/sandboxes/sessions/{id}/cmd/{cmd}/kill", post(kill))
        .route("/v2/sandboxes/sessions/{id}/cmd/{cmd}/stdin", post(stdin))
}

/// A command in their format.
pub(crate) fn command(command: &Command) -> Value {
    let (name, args) =
        command.argv.split_first().map_or(("", &[][..]), |(name, args)| (name, args));
    let mut said = json!({
        "id": command.id.out(),
        "name": name,
        "args": args,
        "cwd": command.cwd.as_deref().unwrap_or("/"),
        "sessionId": command.session.out(),
        "exitCode": exit_code(command),
        "startedAt": command.started_at.as_millisecond(),
    });
    if let Some(ended) = command.ended_at {
        let took = ended.as_millisecond() - command.started_at.as_millisecond();
        said["durationMs"] = json!(took.max(0));
    }
    said
}

/// One whose machine ended under it was killed with it.
fn exit_code(command: &Command) -> Option<i32> {
    match command.state {
        CommandState::Lost => Some(137),
        CommandState::Running | CommandState::Exited => command.exit_code,
    }
}

fn answer(of: &Command) -> Value {
    json!({ "command": command(of) })
}

/// A command as it was when it began: if it is over by now, the last line or a later request shows
/// that.
fn begun(command: Command) -> Value {
    let state = CommandState::Running;
    answer(&Command { state, exit_code: None, ended_at: None, ..command })
}

async fn run(
    Acts(caller): Acts,
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    asked: QueryParams,
    mut fields: Fields,
) -> Result<Response, VercelError> {
    let within = Within::find(&app, &caller, &id).await?;
    let wait = fields.flag("wait")?.unwrap_or(asked.flag("wait")?);
    let logs = fields.flag("logs")?.unwrap_or(asked.flag("logs")?);
    if asked.text("cmdId").is_some() {
        return Err(VercelError::refused("`cmdId`: commands get their ids here."));
    }
    let mut exec = wanted(&within, &mut fields)?;
    // A command whose output is waited for is held back by a slow client, like by a pipe's reader.
    // Not one that is fed: clients send all of its input before they read, so it would stop both
    // ways.
    exec.detach = !(wait && logs) || exec.stdin;
    crate::audit::program(&exec.argv);
    fields.end()?;
    let started = match app.engine.exec(within.project(), within.name(), exec).await {
        Ok(started) => started,
        Err(error) => return Err(cannot_run(&app, &within, error).await),
    };
    let Started { command, events, .. } = started;
    crate::audit::detail("command", &command.id);
    let begun = begun(command);
    if !wait {
        return Ok(Json(begun).into_response());
    }
    let first = Some(begun);
    Ok(ndjson::told(&app, events, LogStream { first, logs, last: Some(answer) }))
}

fn wanted(within: &Within, fields: &mut Fields) -> Result<Exec, VercelError> {
    let mut argv = vec![fields.needed("command")?];
    argv.extend(fields.texts("args")?.unwrap_or_default());
    let cwd = fields.text("cwd")?;
    Ok(Exec {
        argv,
        cwd: Some(within.path(cwd.as_deref(), "")),
        env: fields.words("env")?.unwrap_or_default(),
        sudo: fields.flag("sudo")?.unwrap_or(false),
        stdin: fields.flag("attachStdin")?.unwrap_or(false),
        timeout: fields.span("timeout", 100..=u64::from(u32::MAX) * 1000)?,
        wake: within.only(),
        by: Some(within.key.to_string()),
        ..Exec::default()
    })
}

/// Why a command did not start, in their format.
pub(crate) async fn cannot_run(app: &App, within: &Within, error: Error) -> VercelError {
    let Error::Guest(GuestError::Refused { kind, message }) = &error else {
        return within.explain(app, error).await;
    };
    let code = match kind {
        Failure::NoExecutable => "executable_not_found",
        Failure::Exhausted | Failure::NoSpace | Failure::Fault => {
            return within.explain(app, error).await;
        }
        _ => "bad_request",
    };
    let about = match kind {
        Failure::NoDirectory => "`cwd`: ",
        Failure::NoExecutable | Failure::NotExecutable => "`command`: ",
        _ => "",
    };
    let message = format!("Invalid request: {about}{message}.");
    VercelError::new(StatusCode::BAD_REQUEST, code, message)
}

async fn list(
    Looks(caller): Looks,
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, VercelError> {
    let within = Within::find(&app, &caller, &id).await?;
    let found =
        app.engine.session_commands(within.project(), &within.session.id, &Page::all()).await?;
    let commands: Vec<Value> = found.items.iter().map(command).collect();
    Ok(Json(json!({ "commands": commands })))
}

async fn look(
    Looks(caller): Looks,
    State(app): State<Arc<App>>,
    Path((id, cmd)): Path<(String, String)>,
    asked: QueryParams,
) -> Result<Response, VercelError> {
    let within = Within::find(&app, &caller, &id).await?;
    let found = within.command(&app, &cmd).await?;
    if !asked.flag("wait")? || found.ended_at.is_some() {
        return Ok(Json(answer(&found)).into_response());
    }
    let engine = app.engine.clone();
    let mut ended = Box::pin(async move {
        engine.wait(within.project(), within.name(), &found.id).await.map(|ended| answer(&ended))
    });
    let keep_alive = app.limits.keep_alive;
    if let Ok(ended) = tokio::time::timeout(keep_alive, ended.as_mut()).await {
        return Ok(Json(ended?).into_response());
    }
    // Their client waits five minutes for the head of an answer, and for the rest of it without a
    // limit. Space before a document is allowed, and keeps the connection.
    let state = Some((ended, app.closing.clone()));
    let stream = stream::unfold(state, move |state| async move {
        let (mut ended, closing) = state?;
        tokio::select! {
            ended = ended.as_mut() => {
                let said = ended.map(|said| Bytes::from(said.to_string())).map_err(io::Error::other);
                Some((said, None))
            }
            () = closing.cancelled() => Some((Err(io::Error::other("going down")), None)),
            () = tokio::time::sleep(keep_alive) => {
                Some((Ok(Bytes::from_static(b"\n")), Some((ended, closing))))
            }
        }
    });
    let head = stream::once(async { Ok::<_, io::Error>(Bytes::from_static(b"\n")) });
    let body = Body::from_stream(futures_util::StreamExt::chain(head, stream));
    let headers = [(CONTENT_TYPE, "application/json"), (CACHE_CONTROL, "no-store")];
    Ok((headers, body).into_response())
}

async fn logs(
    Looks(caller): Looks,
    State(app): State<Arc<App>>,
    Path((id, cmd)): Path<(String, String)>,
) -> Result<Response, VercelError> {
    let within = Within::find(&app, &caller, &id).await?;
    let command = within.command(&app, &cmd).await?;
    let events = app.engine.logs(within.project(), within.name(), &command.id, true).await?;
    Ok(ndjson::told(&app, events, LogStream { first: None, logs: true, last: None }))
}

async fn kill(
    Acts(caller): Acts,
    State(app): State<Arc<App>>,
    Path((id, cmd)): Path<(String, String)>,
    mut fields: Fields,
) -> Result<Json<Value>, VercelError> {
    let within = Within::find(&app, &caller, &id).await?;
    let command = within.command(&app, &cmd).await?;
    let signal = fields
        .number("signal", 1..=64)?
        .and_then(|signal| i32::try_from(signal).ok())
        .ok_or_else(|| VercelError::bad("missing required property `signal`."))?;
    fields.end()?;
    match app.engine.signal(within.project(), within.name(), &command.id, signal).await {
        Ok(command) => Ok(Json(answer(&command))),
        // It has just ended.
        Err(Error::Guest(GuestError::Refused { kind: Failure::NotFound, .. })) => {
            Err(Error::CommandEnded(command.id).into())
        }
        Err(error) => Err(within.explain(&app, error).await),
    }
}

async fn stdin(
    Acts(caller): Acts,
    State(app): State<Arc<App>>,
    Path((id, cmd)): Path<(String, String)>,
    mut fields: Fields,
) -> Result<Json<Value>, VercelError> {
    let within = Within::find(&app, &caller, &id).await?;
    let command = within.command(&app, &cmd).await?;
    let data = match fields.text("data")? {
        Some(text) => {
            STANDARD.decode(text).map_err(|_| VercelError::bad("`data` is not base64."))?
        }
        None => Vec::new(),
    };
    if data.len() > INPUT {
        return Err(VercelError::bad(format!("`data` should NOT have more than {INPUT} bytes.")));
    }
    let offset = fields.number("offset", 0..=1 << 52)?;
    let close = fields.flag("close")?.unwrap_or(false);
    fields.end()?;
    let handle = app.engine.stdin(within.project(), within.name(), &command.id).await?;
    let patience = app.limits.input_patience;
    let bytes_written = feed(&handle, offset, Bytes::from(data), close, patience).await?;
    let record = app.engine.command(within.project(), within.name(), &command.id).await?;
    let mut said = answer(&record);
    said["bytesWritten"] = json!(bytes_written);
    Ok(Json(said))
}

async fn feed(
    stdin: &StdinHandle,
    offset: Option<u64>,
    data: Bytes,
    close: bool,
    patience: Duration,
) -> Result<u64, VercelError> {
    let mut written = None;
    if !data.is_empty() {
        let sent = stdin.send_at(offset, data, patience).await?;
        let StdinProgress { written: so_far, complete } = sent;
        if !complete {
            let message = "The process does not read its input fast enough; send it again.";
            let slow =
                VercelError::new(StatusCode::GATEWAY_TIMEOUT, "command_stdin_timeout", message);
            return Err(slow.with("bytesWritten", so_far));
        }
        written = Some(so_far);
    }
    if close {
        // Known before: a process that reads the end may be gone a moment later.
        let before = match written {
            Some(written) => written,
            None => stdin.written().await?,
        };
        stdin.close().await?;
        return Ok(before);
    }
    match written {
        Some(written) => Ok(written),
        None => Ok(stdin.written().await?),
    }
}
