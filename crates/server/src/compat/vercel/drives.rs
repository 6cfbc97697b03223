//! Drives: get or create, look, list, fork, delete; and where sandboxes mount them.
//!
//! A drive has a region here only to be returned to the client. One that was made without has ours.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use sandkeep_core::db::{By, Direction};
use sandkeep_core::engine::{Caller, CreateDrive, Error};
use sandkeep_core::model::{Drive, DriveId, Mount, Mounts, Name, Size, check_mounts};
use serde::Serialize;
use serde_json::{Value, json};

use super::protocol::auth::{Acts, Looks, choose, project_id};
use super::protocol::error::VercelError;
use super::protocol::ids::Foreign as _;
use super::protocol::input::{Fields, QueryParams};
use super::protocol::wire::HERE;
use super::sandboxes::settings::{REGION, short};
use super::sandboxes::{page, pagination};
use super::{Answer, done};
use crate::api::App;

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v2/sandboxes/drives", get(list))
        .route("/v2/sandboxes/drives/{name}", get(look).post(get_or_create).delete(remove))
        .route("/v2/sandboxes/drives/{name}/fork", post(fork))
}

/// Reads `mounts` of a request: drives by path.
pub(super) fn mounts_in(value: &Value) -> Result<Mounts, VercelError> {
    let Value::Object(map) = value else {
        return Err(VercelError::bad("`mounts` should be object."));
    };
    if map.len() > 4 {
        return Err(VercelError::bad("`mounts` should NOT have more than 4 properties."));
    }
    let mount = |(path, value): (&String, &Value)| {
        let mount: Mount = serde_json::from_value(value.clone())
            .map_err(|error| VercelError::bad(format!("`mounts.{path}`: {error}.")))?;
        Ok((path.clone(), mount))
    };
    let mounts = map.iter().map(mount).collect::<Result<Mounts, VercelError>>()?;
    check_mounts(mounts).map_err(VercelError::bad)
}

/// `mounts` of an answer, if there are any.
pub(super) fn mounts_out(mounts: &Mounts) -> Option<Value> {
    (!mounts.is_empty()).then(|| serde_json::to_value(mounts).ok()).flatten()
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct DriveOut {
    id: String,
    name: String,
    project_id: String,
    region: String,
    max_size_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    current_session_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    current_sandbox_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent_drive_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    root_drive_id: Option<String>,
    created_at: i64,
    updated_at: i64,
}

fn out(drive: &Drive) -> DriveOut {
    let attached = drive.attached.as_ref();
    DriveOut {
        id: drive.id.out(),
        name: drive.name.to_string(),
        project_id: project_id(&drive.project),
        region: region(drive).to_owned(),
        max_size_bytes: drive.max_size.0,
        current_session_id: attached.map(|attached| attached.session.out()),
        current_sandbox_name: attached.map(|attached| attached.name.to_string()),
        parent_drive_id: drive.parent.as_ref().map(DriveId::out),
        root_drive_id: drive.root.as_ref().map(DriveId::out),
        created_at: drive.created_at.as_millisecond(),
        updated_at: drive.updated_at.as_millisecond(),
    }
}

fn region(drive: &Drive) -> &str {
    drive.notes.get(REGION).map_or(HERE, String::as_str)
}

fn answer(drive: &Drive) -> Json<Value> {
    Json(json!({ "drive": out(drive) }))
}

async fn list(Looks(caller): Looks, State(app): State<Arc<App>>, asked: QueryParams) -> Answer {
    let words = [("createdAt", By::Created), ("updatedAt", By::Updated), ("name", By::Name)];
    let by = asked.word("sortBy", &words)?.unwrap_or(By::Created);
    let page = page(&asked, by, Direction::Descending)?;
    let found = app.engine.drives(&caller.project, asked.text("namePrefix"), &page).await?;
    let drives: Vec<DriveOut> = found.items.iter().map(out).collect();
    let pagination = pagination(drives.len(), found.next);
    Ok(Json(json!({ "drives": drives, "pagination": pagination })))
}

/// Finds a drive by name, or else by id.
async fn find(app: &App, caller: &Caller, text: &str) -> Result<Drive, VercelError> {
    if let Ok(name) = text.parse::<Name>() {
        match app.engine.drive(&caller.project, &name).await {
            Err(Error::NoDrive(_)) => {}
            found => return Ok(found?),
        }
    }
    let id = DriveId::read(text).ok_or_else(|| VercelError::not_found("Drive"))?;
    Ok(app.engine.drive_by_id(&caller.project, &id).await?)
}

async fn look(
    Looks(caller): Looks,
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Answer {
    Ok(answer(&find(&app, &caller, &name).await?))
}

async fn get_or_create(
    Acts(caller): Acts,
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    mut fields: Fields,
) -> Result<(StatusCode, Json<Value>), VercelError> {
    let caller = choose(&app.engine, caller, fields.text("projectId")?.as_deref())?;
    let name = drive_name("name", &name)?;
    let asked = fields.text("region")?.map(|text| short("region", text)).transpose()?;
    let max_size = fields.number("maxSizeBytes", 1..=1 << 50)?.map(Size);
    fields.end()?;
    // A request without a region means the one it has.
    let wanted = match (&asked, app.engine.drive(&caller.project, &name).await) {
        (Some(asked), Ok(found)) if asked != region(&found) => {
            let message = format!("Drive `{name}` already exists in region `{}`.", region(&found));
            return Err(VercelError::conflict(message));
        }
        (_, Ok(found)) => found.notes.get(REGION).cloned(),
        (_, Err(Error::NoDrive(_))) => Some(asked.unwrap_or_else(|| HERE.to_owned())),
        (_, Err(error)) => return Err(error.into()),
    };
    let notes: BTreeMap<String, String> =
        wanted.into_iter().map(|region| (REGION.to_owned(), region)).collect();
    let engine = app.engine.clone();
    let work = async move {
        engine.create_drive(&caller.project, CreateDrive { name, max_size, notes }).await
    };
    let (drive, made) = done(&app.tasks, work).await?;
    let status = if made { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, answer(&drive)))
}

async fn fork(
    Acts(caller): Acts,
    State(app): State<Arc<App>>,
    Path(source): Path<String>,
    mut fields: Fields,
) -> Answer {
    let caller = choose(&app.engine, caller, fields.text("projectId")?.as_deref())?;
    let name = drive_name("name", &fields.needed("name")?)?;
    fields.end()?;
    let source = source.parse().map_err(|_| VercelError::not_found("Drive"))?;
    let engine = app.engine.clone();
    let work = async move { engine.fork_drive(&caller.project, &source, name).await };
    Ok(answer(&done(&app.tasks, work).await?))
}

async fn remove(
    Acts(caller): Acts,
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Answer {
    let name = name.parse().map_err(|_| VercelError::not_found("Drive"))?;
    let engine = app.engine.clone();
    let work = async move { engine.delete_drive(&caller.project, &name).await };
    Ok(answer(&done(&app.tasks, work).await?))
}

fn drive_name(field: &str, text: &str) -> Result<Name, VercelError> {
    let good = text.parse::<Name>().ok().filter(|name| name.as_str().len() <= 64);
    good.ok_or_else(|| {
        let pattern = "should match pattern \"^[a-zA-Z0-9_-]+$\" and have at most 64 characters";
        VercelError::bad(format!("`{field}` {pattern}."))
    })
}
