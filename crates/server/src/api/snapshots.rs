//! Routes about snapshots, `/v1/snapshots`: list, get, delete, export as an OCI archive.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use sandkeep_client::types;
use sandkeep_core::engine::SnapshotFilter;
use sandkeep_core::model::{Name, SnapshotId};
use tokio::sync::mpsc;

use super::input::{Params, PathParam, parsed};
use super::{ApiResult, App, finish, stream, wire};
use crate::auth::{Reader, Writer};
use crate::error::ApiError;
use crate::openapi::Raw;

/// Lists the snapshots of a project, newest first.
#[utoipa::path(get, path = "/v1/snapshots", tag = "snapshots", operation_id = "list_snapshots",
    params(
        ("sandbox" = Option<String>, Query, description = "Only snapshots of this sandbox."),
        ("limit" = Option<u32>, Query, description = "Maximum number of items: 1 to 1000, 100 if absent."),
        ("cursor" = Option<String>, Query, description = "`next` of the previous page."),
    ),
    responses((status = 200, description = "A page of the list.", body = types::Paged<types::Snapshot>)))]
pub(crate) async fn list(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    mut params: Params,
) -> ApiResult<types::Paged<types::Snapshot>> {
    let sandbox: Option<Name> =
        params.text("sandbox")?.map(|name| parsed("sandbox", &name)).transpose()?;
    let page = params.page()?;
    params.end()?;
    let filter = SnapshotFilter { sandbox: sandbox.clone(), deleted: false };
    let found = app.engine.snapshots(&caller.project, filter, &page).await?;
    if let Some(name) = sandbox.filter(|_| found.items.is_empty()) {
        app.engine.get(&caller.project, &name).await?;
    }
    Ok(Json(wire::paged(found, wire::sized_snapshot)))
}

/// Lists a sandbox's snapshots, newest first.
#[utoipa::path(get, path = "/v1/sandboxes/{name}/snapshots", tag = "snapshots", operation_id = "list_sandbox_snapshots",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("limit" = Option<u32>, Query, description = "Maximum number of items: 1 to 1000, 100 if absent."),
        ("cursor" = Option<String>, Query, description = "`next` of the previous page."),
    ),
    responses((status = 200, description = "A page of the list.", body = types::Paged<types::Snapshot>)))]
pub(crate) async fn of_sandbox(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    mut params: Params,
) -> ApiResult<types::Paged<types::Snapshot>> {
    let page = params.page()?;
    params.end()?;
    app.engine.get(&caller.project, &name).await?;
    let filter = SnapshotFilter { sandbox: Some(name), deleted: false };
    let found = app.engine.snapshots(&caller.project, filter, &page).await?;
    Ok(Json(wire::paged(found, wire::sized_snapshot)))
}

/// Shows a snapshot.
#[utoipa::path(get, path = "/v1/snapshots/{id}", tag = "snapshots", operation_id = "get_snapshot",
    params(("id" = String, Path, description = "Its id.")),
    responses((status = 200, description = "The snapshot.", body = types::Snapshot)))]
pub(crate) async fn get(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(id): PathParam<SnapshotId>,
    params: Params,
) -> ApiResult<types::Snapshot> {
    params.end()?;
    Ok(Json(wire::sized_snapshot(app.engine.snapshot(&caller.project, &id).await?)))
}

/// Deletes a snapshot that no sandbox uses, or any by force.
#[utoipa::path(delete, path = "/v1/snapshots/{id}", tag = "snapshots", operation_id = "delete_snapshot",
    params(
        ("id" = String, Path, description = "Its id."),
        ("force" = Option<bool>, Query, description = "Delete even if sandboxes use it. They do not start again until they are rolled back to another snapshot; running ones continue, and make a new snapshot when they stop."),
    ),
    responses((status = 200, description = "The freed space.", body = types::SnapshotDeleted)))]
pub(crate) async fn remove(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(id): PathParam<SnapshotId>,
    mut params: Params,
) -> ApiResult<types::SnapshotDeleted> {
    let force = params.flag("force")?;
    params.end()?;
    let engine = app.engine.clone();
    let work = async move { engine.delete_snapshot(&caller.project, &id, force).await };
    Ok(Json(types::SnapshotDeleted { freed_bytes: finish(&app, work).await? }))
}

/// Exports a snapshot as an OCI image layout, in a tar stream.
///
/// The snapshot is read once before the response begins, so that its length is known. Holes of sparse files are zeros in the stream.
#[utoipa::path(get, path = "/v1/snapshots/{id}/export", tag = "snapshots", operation_id = "export_snapshot",
    params(("id" = String, Path, description = "Its id.")),
    responses((status = 200, description = "The tar stream. `Content-Length` is its exact length; `Sandkeep-Left-Out` is how many files it cannot hold: sockets, and names that begin with `.wh.`.", body = Raw, content_type = "application/x-tar"),
        (status = 422, description = "A layer takes more than 1 TiB, or has too many files with several names: `export_too_large`.", body = types::ErrorAnswer),
        (status = 429, description = "The key has too many exports in progress: `too_many_concurrent_requests`.", body = types::ErrorAnswer),
        (status = 503, description = "The server has too many exports in progress: `too_many_exports`.", body = types::ErrorAnswer)))]
pub(crate) async fn export(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(id): PathParam<SnapshotId>,
    params: Params,
) -> Result<Response, ApiError> {
    params.end()?;
    let permit = app.exporting.enter(&caller.key, app.limits.exports_per_key)?;
    let export = app.engine.prepare_export(&caller.project, &id).await?;
    let (bytes, left_out) = (export.bytes(), export.left_out().count);
    // Room for a few pieces: the exporter waits when the caller is slow.
    let (into, mut pieces) = mpsc::channel(4);
    let work = app.tasks.spawn(async move {
        let _permit = permit;
        export.send(into).await
    });
    let Some(first) = pieces.recv().await else {
        let done = work.await.map_err(|_| ApiError::internal())?;
        done?;
        return Err(ApiError::internal());
    };
    let body = stream::export(first, pieces, work);
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static("application/x-tar")),
        (CONTENT_LENGTH, HeaderValue::from(bytes)),
        (HeaderName::from_static("sandkeep-left-out"), HeaderValue::from(left_out)),
    ];
    Ok((headers, body).into_response())
}
