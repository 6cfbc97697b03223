//! Routes about the trash, `/v1/trash`: list deleted sandboxes, restore one, delete all for good.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use sandkeep_client::types;
use sandkeep_core::engine::TrashItem;

use super::input::{MaybeBody, Params, PathParam, parsed};
use super::{ApiResult, App, finish, wire};
use crate::auth::{Reader, Writer};

/// Lists the sandboxes in the trash, the latest first.
#[utoipa::path(get, path = "/v1/trash", tag = "trash", operation_id = "list_trash",
    responses((status = 200, description = "All of them on one page.", body = types::Paged<types::TrashItem>)))]
pub(crate) async fn list(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    params: Params,
) -> ApiResult<types::Paged<types::TrashItem>> {
    params.end()?;
    let items = app.engine.trash(Some(&caller.project)).into_iter().map(out).collect();
    Ok(Json(types::Paged { items, next: None }))
}

/// Restores a sandbox from the trash, with its snapshots. It is stopped or paused then.
#[utoipa::path(post, path = "/v1/trash/{sandbox}/restore", tag = "trash", operation_id = "restore_sandbox",
    params(("sandbox" = String, Path, description = "Its id or name; if several have the name, the one deleted last.")),
    request_body = Option<types::Restore>,
    responses((status = 200, description = "The sandbox.", body = types::Sandbox)))]
pub(crate) async fn restore(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(which): PathParam<String>,
    params: Params,
    MaybeBody(request): MaybeBody<types::Restore>,
) -> ApiResult<types::Sandbox> {
    params.end()?;
    let name = request.name.map(|name| parsed("name", &name)).transpose()?;
    let engine = app.engine.clone();
    let work = async move { engine.restore(&caller.project, &which, name).await };
    Ok(Json(wire::sandbox(finish(&app, work).await?)))
}

/// Permanently deletes the project's trash. The space becomes free a little later.
#[utoipa::path(delete, path = "/v1/trash", tag = "trash", operation_id = "empty_trash",
    responses((status = 200, description = "The number of deleted sandboxes.", body = types::TrashEmptied)))]
pub(crate) async fn empty(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    params: Params,
) -> ApiResult<types::TrashEmptied> {
    params.end()?;
    let engine = app.engine.clone();
    let work = async move { engine.empty_trash(Some(&caller.project)).await };
    let sandboxes = u64::try_from(finish(&app, work).await?).unwrap_or(u64::MAX);
    Ok(Json(types::TrashEmptied { sandboxes }))
}

fn out(item: TrashItem) -> types::TrashItem {
    types::TrashItem {
        id: item.id.into(),
        name: item.name.into(),
        deleted_at: item.deleted_at.to_string(),
        expired: item.expired,
        snapshots: u64::try_from(item.snapshots).unwrap_or(u64::MAX),
        freed_if_deleted_bytes: item.bytes,
        stays_for_ms: u64::try_from(item.stays_for.as_millis()).unwrap_or(u64::MAX),
    }
}
