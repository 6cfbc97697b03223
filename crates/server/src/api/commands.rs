//! Commands that were started, and their output.

use std::sync::Arc;

use axum::Json;
use axum::body::Body as RawBody;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use futures_util::StreamExt;
use sandkeep_client::types::{self, ExecEvent};
use sandkeep_core::model::{CommandId, CommandState, Name};
use sandkeep_proto::link::TermSize;

use super::events::time;
use super::input::{Body, Params, PathParam};
use super::stream::{LineStyle, StreamReader};
use super::{ApiResult, App, stream, wire};
use crate::auth::{Reader, Writer};
use crate::error::ApiError;
use crate::openapi::Raw;
use sandkeep_core::engine::LogStart;

/// How many lines at the end of a log can be asked for: where each begins is kept in memory.
const MOST_LINES: u32 = 100_000;

/// Lists a sandbox's commands, newest first. Never wakes it.
#[utoipa::path(get, path = "/v1/sandboxes/{name}/commands", tag = "commands", operation_id = "list_commands",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("limit" = Option<u32>, Query, description = "Maximum number of items: 1 to 1000, 100 if absent."),
        ("cursor" = Option<String>, Query, description = "`next` of the previous page."),
        ("running" = Option<bool>, Query, description = "Only commands that run. A page may then have fewer items than `limit`, or none, and a `next`."),
    ),
    responses((status = 200, description = "A page of the list.", body = types::Paged<types::Command>)))]
pub(crate) async fn list(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    mut params: Params,
) -> ApiResult<types::Paged<types::Command>> {
    let page = params.page()?;
    let running = params.flag("running")?;
    params.end()?;
    let mut found = app.engine.commands(&caller.project, &name, &page).await?;
    found.items.retain(|command| !running || command.state == CommandState::Running);
    Ok(Json(wire::paged(found, wire::command)))
}

/// Shows a command, immediately or when it has ended.
#[utoipa::path(get, path = "/v1/sandboxes/{name}/commands/{id}", tag = "commands", operation_id = "get_command",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("id" = String, Path, description = "The command's id."),
        ("wait" = Option<bool>, Query, description = "Respond when the command has ended."),
    ),
    responses((status = 200, description = "The command.", body = types::Command)))]
pub(crate) async fn get(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam((name, id)): PathParam<(Name, CommandId)>,
    mut params: Params,
) -> ApiResult<types::Command> {
    let wait = params.flag("wait")?;
    params.end()?;
    if !wait {
        return Ok(Json(wire::command(app.engine.command(&caller.project, &name, &id).await?)));
    }
    let closing = app.closing.clone();
    tokio::select! {
        ended = app.engine.wait(&caller.project, &name, &id) => Ok(Json(wire::command(ended?))),
        () = closing.cancelled() => Err(ApiError::shutting_down()),
    }
}

/// Lists the paths a command changed; for a running command, so far. Never wakes the sandbox.
#[utoipa::path(get, path = "/v1/sandboxes/{name}/commands/{id}/changes", tag = "commands", operation_id = "get_command_changes",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("id" = String, Path, description = "The command's id."),
    ),
    responses((status = 200, description = "What it changed.", body = types::CommandChangeList)))]
pub(crate) async fn changes(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam((name, id)): PathParam<(Name, CommandId)>,
    params: Params,
) -> ApiResult<types::CommandChangeList> {
    params.end()?;
    let (command, list) = app.engine.command_changes(&caller.project, &name, &id).await?;
    Ok(Json(types::CommandChangeList {
        command: command.id.into(),
        changes: command.changes,
        paths: list.paths,
        more: list.more,
    }))
}

/// Streams the output of a command, past and new. Never wakes the sandbox.
#[utoipa::path(get, path = "/v1/sandboxes/{name}/commands/{id}/logs", tag = "commands", operation_id = "get_logs",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("id" = String, Path, description = "The command's id."),
        ("follow" = Option<bool>, Query, description = "Keep the stream open until the command ends."),
        ("offset" = Option<u64>, Query, description = "Leave out this many bytes, counted over both streams and gaps, to go on after a stream that was cut off."),
        ("tail" = Option<u32>, Query, description = "Only this many lines at the end, at most 100,000, counted over both streams."),
        ("since" = Option<String>, Query, description = "Only what was printed since a time (RFC 3339), or since how long ago (`10m`)."),
        ("times" = Option<bool>, Query, description = "Say of output when it was printed, in `at`."),
        ("keep_alive" = Option<bool>, Query, description = "Send an empty line whenever the stream was quiet for 15 seconds."),
    ),
    responses((status = 200, description = "NDJSON: one event per line.", body = ExecEvent, content_type = "application/x-ndjson")))]
pub(crate) async fn logs(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam((name, id)): PathParam<(Name, CommandId)>,
    mut params: Params,
) -> Result<Response, ApiError> {
    let follow = params.flag("follow")?;
    let wanted = LogStart {
        offset: params.number("offset")?.unwrap_or(0),
        tail: params.number("tail")?.map(tail).transpose()?,
        since: params.text("since")?.map(|text| time("since", &text)).transpose()?,
    };
    let style = LineStyle { times: params.flag("times")?, keep_alive: params.flag("keep_alive")? };
    params.end()?;
    let events = app.engine.logs_from(&caller.project, &name, &id, follow, &wanted).await?;
    let reader = StreamReader::Log(follow.then(|| app.followers.add(id)));
    Ok(stream::lines(&app, None, events, ExecEvent::More, reader, style))
}

fn tail(lines: u64) -> Result<u32, ApiError> {
    let most = u32::try_from(lines).ok().filter(|lines| *lines <= MOST_LINES);
    most.ok_or_else(|| ApiError::invalid(format!("`tail`: between 0 and {MOST_LINES} lines")))
}

/// Sends a signal to a command's process group.
#[utoipa::path(post, path = "/v1/sandboxes/{name}/commands/{id}/signal", tag = "commands", operation_id = "signal_command",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("id" = String, Path, description = "The command's id."),
    ),
    request_body = types::SignalRequest,
    responses((status = 204, description = "The signal was sent.")))]
pub(crate) async fn signal(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam((name, id)): PathParam<(Name, CommandId)>,
    params: Params,
    Body(request): Body<types::SignalRequest>,
) -> Result<StatusCode, ApiError> {
    params.end()?;
    let signal = signal_number(&request.signal)?;
    app.engine.signal(&caller.project, &name, &id, signal).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Resizes the terminal of a command.
#[utoipa::path(post, path = "/v1/sandboxes/{name}/commands/{id}/resize", tag = "commands", operation_id = "resize_command",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("id" = String, Path, description = "The command's id."),
    ),
    request_body = types::TermSize,
    responses((status = 204, description = "The new size was set.")))]
pub(crate) async fn resize(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam((name, id)): PathParam<(Name, CommandId)>,
    params: Params,
    Body(size): Body<types::TermSize>,
) -> Result<StatusCode, ApiError> {
    params.end()?;
    let size = TermSize { cols: size.cols, rows: size.rows };
    app.engine.resize(&caller.project, &name, &id, size).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Sends the body to a command's standard input, as fast as it is read.
#[utoipa::path(post, path = "/v1/sandboxes/{name}/commands/{id}/stdin", tag = "commands", operation_id = "send_stdin",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("id" = String, Path, description = "The command's id."),
        ("close" = Option<bool>, Query, description = "Close standard input after this body."),
        ("offset" = Option<u64>, Query, description = "How many bytes of input came before these. Those of them that have arrived already are left out, so that a call can be made again; 400 `stdin_gap` if bytes before them are missing."),
    ),
    request_body(content = Raw, content_type = "application/octet-stream"),
    responses((status = 204, description = "The input was accepted.")))]
pub(crate) async fn stdin(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam((name, id)): PathParam<(Name, CommandId)>,
    mut params: Params,
    body: RawBody,
) -> Result<StatusCode, ApiError> {
    let close = params.flag("close")?;
    let mut offset = params.number("offset")?;
    params.end()?;
    let stdin = app.engine.stdin(&caller.project, &name, &id).await?;
    let mut pieces = body.into_data_stream();
    while let Some(piece) = pieces.next().await {
        let piece = piece
            .map_err(|_| ApiError::invalid("the connection closed before the end of the body"))?;
        match &mut offset {
            None => stdin.send(piece).await?,
            Some(offset) => {
                stdin.send_from(*offset, &piece).await?;
                *offset = offset.saturating_add(piece.len() as u64);
            }
        }
    }
    if close {
        stdin.close().await?;
    }
    Ok(StatusCode::NO_CONTENT)
}

/// Reads a signal by name or number.
pub(super) fn signal_number(signal: &types::Signal) -> Result<i32, ApiError> {
    const NAMES: [(&str, i32); 23] = [
        ("HUP", 1),
        ("INT", 2),
        ("QUIT", 3),
        ("ILL", 4),
        ("TRAP", 5),
        ("ABRT", 6),
        ("BUS", 7),
        ("FPE", 8),
        ("KILL", 9),
        ("USR1", 10),
        ("SEGV", 11),
        ("USR2", 12),
        ("PIPE", 13),
        ("ALRM", 14),
        ("TERM", 15),
        ("CHLD", 17),
        ("CONT", 18),
        ("STOP", 19),
        ("TSTP", 20),
        ("TTIN", 21),
        ("TTOU", 22),
        ("URG", 23),
        ("WINCH", 28),
    ];
    let refuse = |text: String| {
        ApiError::invalid(format!("signal: `{text}` is not a signal"))
            .hint("use a number from 1 to 64 or a name like `TERM`")
    };
    match signal {
        types::Signal::Number(number) if (1..=64).contains(number) => Ok(*number),
        types::Signal::Number(number) => Err(refuse(number.to_string())),
        types::Signal::Name(name) => {
            let upper = name.to_ascii_uppercase();
            let bare = upper.strip_prefix("SIG").unwrap_or(&upper);
            let known = NAMES.iter().find(|(name, _)| *name == bare);
            known.map(|(_, number)| *number).ok_or_else(|| refuse(name.chars().take(20).collect()))
        }
    }
}

#[cfg(test)]
mod tests {
    use sandkeep_client::types::Signal;

    use super::signal_number;

    #[test]
    fn signals_by_name_and_number() {
        for said in ["TERM", "SIGTERM", "sigterm", "term"] {
            assert_eq!(signal_number(&Signal::Name(said.to_owned())).unwrap(), 15);
        }
        assert_eq!(signal_number(&Signal::Number(9)).unwrap(), 9);
        for bad in [Signal::Number(0), Signal::Number(65), Signal::Name("SIGSIG".to_owned())] {
            assert!(signal_number(&bad).is_err(), "{bad:?}");
        }
    }
}
