//! Routes about drives, `/v1/drives`: list, create, get, fork, delete.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use sandkeep_client::types;
use sandkeep_core::engine::{CreateDrive, Error};
use sandkeep_core::model::{Drive, Name};

use super::input::{Body, Params, PathParam, parsed};
use super::{ApiResult, App, finish};
use crate::auth::{Reader, Writer};
use crate::error::ApiError;

pub(super) fn out(app: &App, drive: Drive) -> types::Drive {
    types::Drive {
        max_size_bytes: drive.max_size.0,
        size_bytes: app.engine.drive_size(&drive),
        initialized: drive.is_initialised(),
        generation: drive.generation,
        name: drive.name.into(),
        id: drive.id.into(),
        project: drive.project.into(),
        attached: drive.attached.map(|attached| types::Attached {
            sandbox: attached.name.into(),
            session: attached.session.into(),
        }),
        parent: drive.parent.map(Into::into),
        created_at: drive.created_at.to_string(),
        updated_at: drive.updated_at.to_string(),
    }
}

/// Lists the drives of a project, newest first.
#[utoipa::path(get, path = "/v1/drives", tag = "drives", operation_id = "list_drives",
    params(
        ("name_prefix" = Option<String>, Query, description = "Only names with this prefix."),
        ("limit" = Option<u32>, Query, description = "Maximum number of items: 1 to 1000, 100 if absent."),
        ("cursor" = Option<String>, Query, description = "`next` of the previous page."),
    ),
    responses((status = 200, description = "A page of the list.", body = types::Paged<types::Drive>)))]
pub(crate) async fn list(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    mut params: Params,
) -> ApiResult<types::Paged<types::Drive>> {
    let prefix = params.text("name_prefix")?;
    let page = params.page()?;
    params.end()?;
    let found = app.engine.drives(&caller.project, prefix.as_deref(), &page).await?;
    Ok(Json(super::wire::paged(found, |drive| out(&app, drive))))
}

/// Creates a drive, or returns the one with its name.
#[utoipa::path(post, path = "/v1/drives", tag = "drives", operation_id = "create_drive",
    request_body = types::CreateDrive,
    responses(
        (status = 201, description = "The drive was created.", body = types::Drive),
        (status = 200, description = "The drive existed.", body = types::Drive),
    ))]
pub(crate) async fn create(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    params: Params,
    Body(request): Body<types::CreateDrive>,
) -> Result<(StatusCode, Json<types::Drive>), ApiError> {
    params.end()?;
    let name: Name = parsed("name", &request.name)?;
    crate::audit::target("drive", &name);
    let max_size = request.max_size;
    let wish = CreateDrive { name: name.clone(), max_size, notes: BTreeMap::new() };
    let engine = app.engine.clone();
    let work = async move { engine.create_drive(&caller.project, wish).await };
    match (finish(&app, work).await?, request.if_exists) {
        ((drive, true), _) => Ok((StatusCode::CREATED, Json(out(&app, drive)))),
        ((drive, false), types::IfExists::Get) => Ok((StatusCode::OK, Json(out(&app, drive)))),
        ((_, false), types::IfExists::Fail) => Err(Error::DriveTaken(name).into()),
    }
}

/// Shows a drive.
#[utoipa::path(get, path = "/v1/drives/{name}", tag = "drives", operation_id = "get_drive",
    params(("name" = String, Path, description = "Its name.")),
    responses((status = 200, description = "The drive.", body = types::Drive)))]
pub(crate) async fn get(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
) -> ApiResult<types::Drive> {
    params.end()?;
    Ok(Json(out(&app, app.engine.drive(&caller.project, &name).await?)))
}

/// Copies a drive, as of when it was last detached.
#[utoipa::path(post, path = "/v1/drives/{name}/fork", tag = "drives", operation_id = "fork_drive",
    params(("name" = String, Path, description = "The source's name.")),
    request_body = types::ForkDrive,
    responses((status = 201, description = "The fork.", body = types::Drive)))]
pub(crate) async fn fork(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(source): PathParam<Name>,
    params: Params,
    Body(request): Body<types::ForkDrive>,
) -> Result<(StatusCode, Json<types::Drive>), ApiError> {
    params.end()?;
    let name = parsed("name", &request.name)?;
    let engine = app.engine.clone();
    let work = async move { engine.fork_drive(&caller.project, &source, name).await };
    Ok((StatusCode::CREATED, Json(out(&app, finish(&app, work).await?))))
}

/// Deletes a drive that no session writes to, with its contents.
#[utoipa::path(delete, path = "/v1/drives/{name}", tag = "drives", operation_id = "delete_drive",
    params(("name" = String, Path, description = "Its name.")),
    responses((status = 200, description = "The deleted drive.", body = types::Drive)))]
pub(crate) async fn remove(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
) -> ApiResult<types::Drive> {
    params.end()?;
    let engine = app.engine.clone();
    let gone =
        finish(&app, async move { engine.delete_drive(&caller.project, &name).await }).await?;
    Ok(Json(out(&app, gone)))
}
