//! Routes about files inside a sandbox: read, write, list, rename, delete, and whole directories as tar.

use std::sync::Arc;

use axum::Json;
use axum::body::Body as RawBody;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use sandkeep_client::types;
use sandkeep_core::model::Name;
use sandkeep_proto::link::Entry;

use super::input::{Body, Params, PathParam};
use super::{ApiResult, App, stream, wire};
use crate::auth::{Reader, Writer};
use crate::error::ApiError;
use crate::openapi::Raw;
use sandkeep_core::engine::{Caller, Files};

/// Opens a sandbox's files for a request: as whom, and waking it or not, the query says.
async fn open(
    app: &App,
    caller: &Caller,
    name: &Name,
    params: &mut Params,
) -> Result<Files, ApiError> {
    let user = params.text("user")?;
    let wake = params.wake(caller)?;
    params.end()?;
    Ok(app.engine.files(&caller.project, name, wake).await?.as_user(user))
}

/// What a download is of, where a body cannot say it.
fn described(entry: Entry, kind: &'static str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    let text = serde_json::to_string(&wire::entry(entry)).unwrap_or_default();
    if let Ok(value) = HeaderValue::from_str(&ascii(&text)) {
        headers.insert(HeaderName::from_static("sandkeep-entry"), value);
    }
    headers
}

/// JSON with everything outside ASCII escaped, as headers need it.
fn ascii(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    let mut units = [0; 2];
    for letter in json.chars() {
        if letter.is_ascii() && letter != '\u{7f}' {
            out.push(letter);
        } else {
            for unit in letter.encode_utf16(&mut units) {
                out.push_str(&format!("\\u{unit:04x}"));
            }
        }
    }
    out
}

/// Reads a file.
#[utoipa::path(get, path = "/v1/sandboxes/{name}/files", tag = "files", operation_id = "read_file",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("path" = String, Query, description = "The path; relative paths start at the sandbox's working directory."),
        ("offset" = Option<u64>, Query, description = "First byte to read."),
        ("limit" = Option<u64>, Query, description = "Maximum number of bytes."),
        ("user" = Option<String>, Query, description = "The user; the sandbox's user if absent."),
        ("if_running" = Option<bool>, Query, description = "Fail with 409 `not_running` instead of waking the sandbox."),
    ),
    responses((status = 200, description = "The bytes of the file; the header `Sandkeep-Entry` describes it as JSON.", body = Raw, content_type = "application/octet-stream")))]
pub(crate) async fn read(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    mut params: Params,
) -> Result<Response, ApiError> {
    let path = params.needed("path")?;
    let offset = params.number("offset")?.unwrap_or(0);
    let limit = params.number("limit")?;
    let files = open(&app, &caller, &name, &mut params).await?;
    let (entry, incoming) = files.read(&path, offset, limit).await?;
    let headers = described(entry, "application/octet-stream");
    Ok((headers, stream::download(files, incoming)).into_response())
}

/// Writes a file from the body. It is complete and in place when the response arrives.
#[utoipa::path(put, path = "/v1/sandboxes/{name}/files", tag = "files", operation_id = "write_file",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("path" = String, Query, description = "The path; relative paths start at the sandbox's working directory."),
        ("mode" = Option<String>, Query, description = "Permission bits in octal; an existing file keeps its own if absent."),
        ("parents" = Option<bool>, Query, description = "Create missing directories."),
        ("append" = Option<bool>, Query, description = "Append instead of replacing."),
        ("user" = Option<String>, Query, description = "The user; the sandbox's user if absent."),
        ("if_running" = Option<bool>, Query, description = "Fail with 409 `not_running` instead of waking the sandbox."),
    ),
    request_body(content = Raw, content_type = "application/octet-stream"),
    responses((status = 200, description = "What was written.", body = types::Moved)))]
pub(crate) async fn write(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    mut params: Params,
    body: RawBody,
) -> ApiResult<types::Moved> {
    let path = params.needed("path")?;
    let mode = params.mode()?;
    let (parents, append) = (params.flag("parents")?, params.flag("append")?);
    let files = open(&app, &caller, &name, &mut params).await?;
    let out = files.write(&path, mode, parents, append).await?;
    Ok(Json(stream::upload(&app, body, out).await?))
}

/// Removes a file or directory.
#[utoipa::path(delete, path = "/v1/sandboxes/{name}/files", tag = "files", operation_id = "remove_file",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("path" = String, Query, description = "The path."),
        ("recursive" = Option<bool>, Query, description = "Remove directories with their contents."),
        ("missing_ok" = Option<bool>, Query, description = "Succeed if nothing is there."),
        ("user" = Option<String>, Query, description = "The user; the sandbox's user if absent."),
        ("if_running" = Option<bool>, Query, description = "Fail with 409 `not_running` instead of waking the sandbox."),
    ),
    responses((status = 204, description = "It was deleted.")))]
pub(crate) async fn remove(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    mut params: Params,
) -> Result<StatusCode, ApiError> {
    let path = params.needed("path")?;
    let (recursive, missing_ok) = (params.flag("recursive")?, params.flag("missing_ok")?);
    let files = open(&app, &caller, &name, &mut params).await?;
    files.remove(&path, recursive, missing_ok).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Describes one path, without following a final symlink.
#[utoipa::path(get, path = "/v1/sandboxes/{name}/files/stat", tag = "files", operation_id = "stat_file",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("path" = String, Query, description = "The path."),
        ("user" = Option<String>, Query, description = "The user; the sandbox's user if absent."),
        ("if_running" = Option<bool>, Query, description = "Fail with 409 `not_running` instead of waking the sandbox."),
    ),
    responses((status = 200, description = "What is there.", body = types::Entry)))]
pub(crate) async fn stat(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    mut params: Params,
) -> ApiResult<types::Entry> {
    let path = params.needed("path")?;
    let files = open(&app, &caller, &name, &mut params).await?;
    Ok(Json(wire::entry(files.stat(&path).await?)))
}

/// Lists a directory, sorted by name, up to 10,000 entries at a time.
#[utoipa::path(get, path = "/v1/sandboxes/{name}/files/list", tag = "files", operation_id = "list_files",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("path" = String, Query, description = "The path."),
        ("cursor" = Option<String>, Query, description = "`next` of the previous page."),
        ("user" = Option<String>, Query, description = "The user; the sandbox's user if absent."),
        ("if_running" = Option<bool>, Query, description = "Fail with 409 `not_running` instead of waking the sandbox."),
    ),
    responses((status = 200, description = "A page of the list.", body = types::Listing)))]
pub(crate) async fn list(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    mut params: Params,
) -> ApiResult<types::Listing> {
    let path = params.needed("path")?;
    let after = params.text("cursor")?;
    let files = open(&app, &caller, &name, &mut params).await?;
    let (entries, more) = files.list(&path, after).await?;
    let next = entries.last().filter(|_| more).map(|entry| entry.name.clone());
    Ok(Json(types::Listing { items: entries.into_iter().map(wire::entry).collect(), next }))
}

/// Creates a directory.
#[utoipa::path(post, path = "/v1/sandboxes/{name}/files/mkdir", tag = "files", operation_id = "make_directory",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("if_running" = Option<bool>, Query, description = "Fail with 409 `not_running` instead of waking the sandbox."),
    ),
    request_body = types::MakeDir,
    responses((status = 204, description = "The directory exists.")))]
pub(crate) async fn make_dir(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    mut params: Params,
    Body(request): Body<types::MakeDir>,
) -> Result<StatusCode, ApiError> {
    let files = open(&app, &caller, &name, &mut params).await?.as_user(request.user);
    files.make_dir(&request.path, request.mode, request.parents).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Moves a file or directory.
#[utoipa::path(post, path = "/v1/sandboxes/{name}/files/move", tag = "files", operation_id = "move_file",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("if_running" = Option<bool>, Query, description = "Fail with 409 `not_running` instead of waking the sandbox."),
    ),
    request_body = types::Move,
    responses((status = 204, description = "The file was moved.")))]
pub(crate) async fn rename(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    mut params: Params,
    Body(request): Body<types::Move>,
) -> Result<StatusCode, ApiError> {
    let files = open(&app, &caller, &name, &mut params).await?.as_user(request.user);
    files.rename(&request.from, &request.to).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Packs a file or directory as a tar stream, names relative to its parent.
#[utoipa::path(get, path = "/v1/sandboxes/{name}/files/tar", tag = "files", operation_id = "read_tar",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("path" = String, Query, description = "What to pack."),
        ("user" = Option<String>, Query, description = "The user; the sandbox's user if absent."),
        ("if_running" = Option<bool>, Query, description = "Fail with 409 `not_running` instead of waking the sandbox."),
    ),
    responses((status = 200, description = "The tar stream; the header `Sandkeep-Entry` describes the packed entry as JSON.", body = Raw, content_type = "application/x-tar")))]
pub(crate) async fn tar_out(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    mut params: Params,
) -> Result<Response, ApiError> {
    let path = params.needed("path")?;
    let files = open(&app, &caller, &name, &mut params).await?;
    let (entry, incoming) = files.tar_out(&path).await?;
    let headers = described(entry, "application/x-tar");
    Ok((headers, stream::download(files, incoming)).into_response())
}

/// Unpacks the body, a tar stream, below a directory, which is made if absent.
#[utoipa::path(put, path = "/v1/sandboxes/{name}/files/tar", tag = "files", operation_id = "write_tar",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("path" = String, Query, description = "The directory."),
        ("user" = Option<String>, Query, description = "The user; the sandbox's user if absent."),
        ("if_running" = Option<bool>, Query, description = "Fail with 409 `not_running` instead of waking the sandbox."),
    ),
    request_body(content = Raw, content_type = "application/x-tar"),
    responses((status = 200, description = "What was unpacked.", body = types::Moved)))]
pub(crate) async fn tar_in(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    mut params: Params,
    body: RawBody,
) -> ApiResult<types::Moved> {
    let path = params.needed("path")?;
    let files = open(&app, &caller, &name, &mut params).await?;
    let out = files.tar_in(&path).await?;
    Ok(Json(stream::upload(&app, body, out).await?))
}

#[cfg(test)]
mod tests {
    use super::ascii;

    #[test]
    fn headers_stay_ascii_and_mean_the_same() {
        let name = "é 😀\u{7f}";
        let json = ascii(&serde_json::to_string(name).unwrap());
        assert!(json.is_ascii() && !json.contains('\u{7f}'));
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), name);
    }
}
