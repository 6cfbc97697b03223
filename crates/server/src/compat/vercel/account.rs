//! What the CLI asks about accounts when it was given no more than a token.
//!
//! There is one team, and as many projects as Sandkeep has. A project is looked up by its name, by its
//! id (`prj_` and the name), or as the default project, which is the token's own.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::routing::{get, post};
use axum::{Json, Router};
use sandkeep_core::engine::Caller;
use serde_json::{Value, json};

use super::protocol::auth::{Acts, Looks, TEAM, TEAM_SLUG, choose, project_id};
use super::protocol::error::VercelError;
use super::protocol::input::Fields;
use crate::api::App;

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v2/user", get(user))
        .route("/v2/teams", get(teams))
        .route("/v2/teams/{id}", get(team))
        .route("/v2/projects/{name}", get(project))
        .route("/v9/projects/{name}", get(project))
        .route("/v11/projects", post(create_project))
}

async fn user(Looks(caller): Looks) -> Json<Value> {
    let user = json!({
        "id": caller.key.as_str(),
        "username": caller.project.as_str(),
        "defaultTeamId": TEAM,
    });
    Json(json!({ "user": user }))
}

fn team_object() -> Value {
    json!({
        "id": TEAM,
        "slug": TEAM_SLUG,
        "name": "Sandkeep",
        "membership": { "role": "OWNER" },
        "billing": { "plan": "enterprise" },
    })
}

async fn teams(_: Looks) -> Json<Value> {
    Json(json!({ "teams": [team_object()], "pagination": { "count": 1, "next": null } }))
}

async fn team(_: Looks, Path(id): Path<String>) -> Result<Json<Value>, VercelError> {
    if id == TEAM || id == TEAM_SLUG {
        Ok(Json(team_object()))
    } else {
        Err(VercelError::not_found("Team"))
    }
}

async fn project(
    Looks(caller): Looks,
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, VercelError> {
    let caller = choose(&app.engine, caller, Some(&name))?;
    Ok(Json(project_object(&caller)))
}

fn project_object(caller: &Caller) -> Value {
    json!({
        "id": project_id(&caller.project),
        "name": caller.project.as_str(),
        "accountId": TEAM,
    })
}

/// Projects are made by operators (`keep project create`); an existing one is returned.
async fn create_project(
    Acts(caller): Acts,
    State(app): State<Arc<App>>,
    mut fields: Fields,
) -> Result<Json<Value>, VercelError> {
    let name = fields.needed("name")?;
    let caller = choose(&app.engine, caller, Some(&name)).map_err(|_| {
        VercelError::forbidden(format!(
            "Not authorized: there is no project `{}` for this token; `keep project create` makes one.",
            name.chars().take(80).collect::<String>()
        ))
    })?;
    Ok(Json(project_object(&caller)))
}
