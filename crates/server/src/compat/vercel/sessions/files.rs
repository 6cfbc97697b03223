//! Files of a session: written as archives, read one by one.
//!
//! Everything happens inside the sandbox, as its own user: names that lead elsewhere lead to nothing
//! that user could not reach anyway. Nothing is held in memory whole, in neither direction.

use std::io::{self, Write as _};
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, BodyDataStream, Bytes};
use axum::extract::{Path, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use flate2::write::MultiGzDecoder;
use futures_util::StreamExt as _;
use sandkeep_core::engine::{Caller, Files, Upload};
use sandkeep_core::guest::GuestError;
use sandkeep_proto::frame::CHUNK;
use sandkeep_proto::link::Failure;
use serde_json::{Value, json};

use crate::api::{App, download};
use crate::compat::vercel::protocol::auth::{Acts, Looks};
use crate::compat::vercel::protocol::error::VercelError;
use crate::compat::vercel::protocol::input::Fields;
use crate::compat::vercel::sessions::within::Within;

/// How much of an archive is unpacked at one time: a thousandfold of it may come out.
const PIECE: usize = 4 << 10;
/// How long a client may keep sending what is refused already, so that it gets the reason.
const DRAIN: Duration = Duration::from_secs(10);

pub(crate) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v2/sandboxes/sessions/{id}/fs/write", post(write))
        .route("/v2/sandboxes/sessions/{id}/fs/read", post(read))
        .route("/v2/sandboxes/sessions/{id}/fs/mkdir", post(make_dir))
}

async fn open(app: &App, within: &Within) -> Result<Files, VercelError> {
    match app.engine.files(within.project(), within.name(), within.only()).await {
        Ok(files) => Ok(files),
        Err(error) => Err(within.explain(app, error).await),
    }
}

async fn write(
    Acts(caller): Acts,
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Value>, VercelError> {
    let mut pieces = body.into_data_stream();
    let received = receive(&app, &caller, &id, &headers, &mut pieces).await;
    if received.is_err() {
        // A client that is cut off while it sends does not read the answer, and it must: if the
        // answer is that the session is over, it resumes the sandbox and sends again.
        let _ =
            tokio::time::timeout(DRAIN, async { while let Some(Ok(_)) = pieces.next().await {} })
                .await;
    }
    received.map(|()| Json(json!({})))
}

async fn receive(
    app: &App,
    caller: &Caller,
    id: &str,
    headers: &HeaderMap,
    pieces: &mut BodyDataStream,
) -> Result<(), VercelError> {
    let within = Within::find(app, caller, id).await?;
    check_type(headers)?;
    let cwd = match headers.get("x-cwd").map(|cwd| std::str::from_utf8(cwd.as_bytes())) {
        None => within.path(None, ""),
        Some(Ok(cwd)) => within.path(Some(cwd), ""),
        Some(Err(_)) => return Err(VercelError::bad("the header `x-cwd` is not UTF-8.")),
    };
    let files = open(app, &within).await?;
    match files.tar_through(&cwd).await {
        Ok(out) => unpack(app, pieces, out).await,
        Err(error) => Err(refused(&cwd, error)),
    }
}

fn check_type(headers: &HeaderMap) -> Result<(), VercelError> {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if matches!(kind.as_str(), "application/gzip" | "application/x-gzip") {
        return Ok(());
    }
    let message = "The body must be a gzip-compressed tar archive, as `application/gzip`.";
    Err(VercelError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message))
}

/// Sends an archive into the sandbox while it arrives. If it breaks off, so does the unpacking.
async fn unpack(
    app: &App,
    pieces: &mut BodyDataStream,
    mut out: Upload,
) -> Result<(), VercelError> {
    let mut archive = MultiGzDecoder::new(Vec::new());
    let damaged = |error: io::Error| {
        VercelError::bad(format!("the body is not a gzip-compressed archive: {error}."))
    };
    let mut came = false;
    loop {
        let piece = match tokio::time::timeout(app.limits.upload_pause, pieces.next()).await {
            Ok(Some(Ok(piece))) => piece,
            Ok(Some(Err(_))) => {
                return Err(VercelError::bad("the connection closed before the end of the body."));
            }
            Ok(None) => break,
            Err(_) => {
                let message = "The upload paused for too long.";
                return Err(VercelError::new(StatusCode::REQUEST_TIMEOUT, "timeout", message));
            }
        };
        for part in piece.chunks(PIECE) {
            came = true;
            archive.write_all(part).map_err(damaged)?;
            // In large pieces: for the agent each one costs a message, a thread that wakes up and a credit.
            if archive.get_ref().len() >= CHUNK {
                send(&mut out, archive.get_mut()).await?;
            }
        }
    }
    if !came {
        return Err(VercelError::bad("the body is empty."));
    }
    archive.try_finish().map_err(damaged)?;
    send(&mut out, archive.get_mut()).await?;
    out.finish().await.map(drop).map_err(|error| refused("the archive", error))
}

async fn send(out: &mut Upload, unpacked: &mut Vec<u8>) -> Result<(), VercelError> {
    if unpacked.is_empty() {
        return Ok(());
    }
    let bytes = Bytes::from(std::mem::take(unpacked));
    out.send(bytes).await.map_err(|error| refused("the archive", error))
}

async fn read(
    Looks(caller): Looks,
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    mut fields: Fields,
) -> Result<Response, VercelError> {
    let within = Within::find(&app, &caller, &id).await?;
    let path = path_in(&within, &mut fields)?;
    fields.end()?;
    let files = open(&app, &within).await?;
    match files.read(&path, 0, None).await {
        Ok((_, incoming)) => {
            let headers = [(CONTENT_TYPE, "application/octet-stream")];
            Ok((headers, download(files, incoming)).into_response())
        }
        Err(GuestError::Refused { kind: Failure::NotFound, .. }) => {
            let message = format!("File not found: {path}: No such file or directory.");
            Err(VercelError::new(StatusCode::NOT_FOUND, "not_found", message))
        }
        Err(error) => Err(refused(&path, error)),
    }
}

async fn make_dir(
    Acts(caller): Acts,
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    mut fields: Fields,
) -> Result<Json<Value>, VercelError> {
    let within = Within::find(&app, &caller, &id).await?;
    let path = path_in(&within, &mut fields)?;
    let recursive = fields.flag("recursive")?.unwrap_or(true);
    fields.end()?;
    let files = open(&app, &within).await?;
    match files.make_dir(&path, None, recursive).await {
        Ok(()) => Ok(Json(json!({}))),
        // The directory above it is missing, which clients distinguish from other failures by the
        // code.
        Err(GuestError::Refused { kind: Failure::NotFound, .. }) => {
            let message = format!("{path}: No such file or directory");
            Err(VercelError::new(StatusCode::BAD_REQUEST, "path_not_found", message))
        }
        Err(error) => Err(refused(&path, error)),
    }
}

fn path_in(within: &Within, fields: &mut Fields) -> Result<String, VercelError> {
    let path = fields.needed("path")?;
    let cwd = fields.text("cwd")?;
    if path.is_empty() {
        return Err(VercelError::bad("`path` should NOT be empty."));
    }
    if path.contains('\0') || cwd.as_ref().is_some_and(|cwd| cwd.contains('\0')) {
        return Err(VercelError::bad("`path` should NOT hold a NUL byte."));
    }
    Ok(within.path(cwd.as_deref(), &path))
}

/// Why the sandbox did not do it, with the system's own words, which their clients look for.
fn refused(path: &str, error: GuestError) -> VercelError {
    let GuestError::Refused { kind, message } = &error else {
        return match error {
            GuestError::Lost | GuestError::Timeout => VercelError::new(
                StatusCode::GONE,
                "sandbox_stream_closed",
                "Sandbox stream was closed and is not accepting commands.",
            ),
            GuestError::DiskLimit { .. } => VercelError::new(
                StatusCode::BAD_REQUEST,
                "file_error",
                format!("{path}: No space left on device"),
            ),
            error => sandkeep_core::engine::Error::from(error).into(),
        };
    };
    let words = match kind {
        Failure::NotFound => "No such file or directory",
        Failure::Exists => "File exists",
        Failure::Denied => "Permission denied",
        Failure::NoSpace => "No space left on device",
        _ if message.ends_with("is a directory") => "Is a directory",
        _ if message.ends_with("not a directory") => "Not a directory",
        _ => message,
    };
    let message = format!("{path}: {words}");
    VercelError::new(StatusCode::BAD_REQUEST, "file_error", message)
}
