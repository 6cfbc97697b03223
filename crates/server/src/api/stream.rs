//! Streamed bodies.
//!
//! Each is pulled by the connection: nothing is read from a sandbox before the caller has taken what
//! came before, so a slow caller slows the sandbox and never fills our memory.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use sandkeep_client::types::{ExecEvent, Moved, error_chain};
use sandkeep_core::guest::Incoming;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::exec::KillOnDisconnect;
use super::followers::Follower;
use super::{App, wire};
use crate::error::ApiError;
use sandkeep_core::engine::{self, CommandOutput, Files, OutputStream, Upload};

/// How often a quiet stream shows that it is alive, if the caller wants that.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// One line of NDJSON.
pub(super) fn line(value: &impl Serialize) -> Bytes {
    // The wire's types have no maps with odd keys and no failing serializers.
    let mut text = serde_json::to_vec(value).unwrap_or_default();
    text.push(b'\n');
    text.into()
}

pub(super) fn event(event: CommandOutput) -> ExecEvent {
    match event {
        CommandOutput::Stdout(bytes) => ExecEvent::stdout(&bytes),
        CommandOutput::Stderr(bytes) => ExecEvent::stderr(&bytes),
        CommandOutput::Gap(bytes) => ExecEvent::Gap { bytes },
        CommandOutput::Exited(command) => {
            ExecEvent::Exited { exit_code: command.exit_code, command: wire::command(command) }
        }
    }
}

/// Who reads the events of a command.
pub(super) enum StreamReader {
    /// The caller that started it: it is ended if that one leaves.
    Exec(KillOnDisconnect),
    /// A reader of its log, who follows it or takes what there is.
    Log(#[allow(dead_code)] Option<Follower>), // what counts is how long it is there
}

/// What a caller wants of the lines besides the events.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LineStyle {
    /// Say of output when it was printed. Only logs know.
    pub(super) times: bool,
    /// Show that a quiet stream is alive.
    pub(super) keep_alive: bool,
}

/// What is left to say of a command.
struct ExecLines {
    first: Option<Bytes>,
    events: Option<OutputStream>,
    /// The event that is sent when the events end without an exit.
    otherwise: ExecEvent,
    reading: StreamReader,
    style: LineStyle,
    closing: CancellationToken,
}

/// A command's events as NDJSON, `first` before them.
pub(super) fn lines(
    app: &Arc<App>,
    first: Option<&ExecEvent>,
    events: OutputStream,
    otherwise: ExecEvent,
    reading: StreamReader,
    style: LineStyle,
) -> Response {
    let lines = ExecLines {
        first: first.map(line),
        events: Some(events),
        otherwise,
        reading,
        style,
        closing: app.closing.clone(),
    };
    let stream = stream::unfold(lines, async |mut lines| {
        let bytes = lines.next().await?;
        Some((Ok::<_, io::Error>(bytes), lines))
    });
    ndjson(Body::from_stream(stream))
}

impl ExecLines {
    async fn next(&mut self) -> Option<Bytes> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        let events = self.events.as_mut()?;
        let heard = tokio::select! {
            biased;
            heard = events.next() => {
                let at = events.printed_at().filter(|_| self.style.times);
                heard.map_or_else(|| self.otherwise.clone(), event).printed_at(at.map(|at| at.to_string()))
            }
            () = self.closing.cancelled() => {
                ExecEvent::Error { error: ApiError::shutting_down().into_body() }
            }
            () = tokio::time::sleep(KEEP_ALIVE), if self.style.keep_alive => {
                return Some(Bytes::from_static(b"\n"));
            }
        };
        let goes_on = matches!(
            heard,
            ExecEvent::Stdout { .. } | ExecEvent::Stderr { .. } | ExecEvent::Gap { .. }
        );
        if !goes_on {
            self.events = None;
            if let StreamReader::Exec(leash) = &mut self.reading {
                leash.release();
            }
        }
        Some(line(&heard))
    }
}

/// An NDJSON answer that no proxy on the way should keep or gather.
pub(super) fn ndjson(body: Body) -> Response {
    let headers = [(CONTENT_TYPE, "application/x-ndjson"), (CACHE_CONTROL, "no-store")];
    (headers, body).into_response()
}

/// What a sandbox sends, while `files` keeps it awake. A transfer that breaks off breaks the
/// connection: the caller must not take half a file for a whole one.
pub(crate) fn download(files: Files, incoming: Incoming) -> Body {
    let stream = stream::unfold(Some((files, incoming)), async |state| {
        let (files, mut incoming) = state?;
        match incoming.next().await {
            Ok(Some(bytes)) => Some((Ok(bytes), Some((files, incoming)))),
            Ok(None) => None,
            Err(error) => {
                tracing::debug!(error = error_chain(&error), "a download broke off");
                Some((Err(io::Error::other(error)), None))
            }
        }
    });
    Body::from_stream(stream)
}

/// Sends a body into a sandbox. If the body breaks off, so does the transfer, and nothing is put in
/// place.
pub(super) async fn upload(app: &App, body: Body, mut out: Upload) -> Result<Moved, ApiError> {
    let mut pieces = body.into_data_stream();
    loop {
        let piece = tokio::time::timeout(app.limits.upload_pause, pieces.next()).await;
        match piece {
            Ok(Some(Ok(bytes))) => out.send(bytes).await?,
            Ok(Some(Err(_))) => return Err(ApiError::invalid("the upload broke off")),
            Ok(None) => break,
            Err(_) => {
                return Err(ApiError::new(
                    axum::http::StatusCode::REQUEST_TIMEOUT,
                    "timeout",
                    "the upload paused for too long",
                ));
            }
        }
    }
    let moved = out.finish().await?;
    Ok(Moved { bytes: moved.bytes, files: moved.files })
}

/// Pieces of an export, and how it ended.
pub(super) fn export(
    first: Bytes,
    pieces: mpsc::Receiver<Bytes>,
    work: JoinHandle<Result<(), engine::Error>>,
) -> Body {
    let state = (Some(first), pieces, Some(work));
    let stream = stream::unfold(state, async |(mut first, mut pieces, mut work)| {
        if let Some(bytes) = first.take() {
            return Some((Ok(bytes), (None, pieces, work)));
        }
        if let Some(bytes) = pieces.recv().await {
            return Some((Ok(bytes), (None, pieces, work)));
        }
        let broke = match work.take()?.await {
            Ok(Ok(())) => return None,
            Ok(Err(error)) => error_chain(&error),
            Err(error) => error.to_string(),
        };
        tracing::error!(error = broke, "the export of a snapshot ended early");
        Some((Err(io::Error::other(broke)), (None, pieces, None)))
    });
    Body::from_stream(stream)
}

#[cfg(test)]
mod tests {
    use sandkeep_core::engine::CommandOutput;

    use super::{event, line};

    #[test]
    fn a_gap_is_a_line_of_its_own() {
        assert_eq!(line(&event(CommandOutput::Gap(7))), "{\"type\":\"gap\",\"bytes\":7}\n");
    }
}
