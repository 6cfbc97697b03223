//! The caller of a request, and its project.
//!
//! Their clients send a bearer token, a team with every request, and a project in one of three places:
//! the body, `?projectId=`, `?project=`, or nowhere. Here the *token* decides: a key of Sandkeep, or a
//! token made from one (`keep env vercel`), belongs to a project, and what the request names must fit.
//! An admin's key may name any project there is.
//!
//! There is one team, [`TEAM`]; another one is refused with 403.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::StatusCode;
use axum::http::request::Parts;
use sandkeep_core::engine::{Caller, Engine};
use sandkeep_core::model::{Name, Scope};
use serde_json::{Map, json};

use crate::api::App;
use crate::auth::authorize;
use crate::compat::vercel::protocol::error::VercelError;
use crate::compat::vercel::protocol::input::QueryParams;

/// The one team of this server.
pub(crate) const TEAM: &str = "team_sandkeep";
/// Its name for people.
pub(crate) const TEAM_SLUG: &str = "sandkeep";
/// The project that the CLI requests when it has none configured: the token's own.
const DEFAULT_PROJECT: &str = "vercel-sandbox-default-project";

/// A caller that may look.
#[derive(Debug)]
pub(crate) struct Looks(pub(crate) Caller);

/// A caller that may change things.
#[derive(Debug)]
pub(crate) struct Acts(pub(crate) Caller);

macro_rules! needs {
    ($name:ident, $scope:ident) => {
        impl FromRequestParts<Arc<App>> for $name {
            type Rejection = VercelError;
            async fn from_request_parts(
                parts: &mut Parts,
                app: &Arc<App>,
            ) -> Result<Self, VercelError> {
                let caller = authorize(parts, app, Scope::$scope).map_err(denied)?;
                let asked = QueryParams::from_request_parts(parts, app).await?;
                check_team(&asked)?;
                let project = asked.text("projectId").or_else(|| asked.text("project"));
                choose(&app.engine, caller, project).map(Self)
            }
        }
    };
}

needs!(Looks, Read);
needs!(Acts, Write);

fn denied(error: crate::error::ApiError) -> VercelError {
    let status = error.status();
    let denied = VercelError::from(error);
    match status {
        StatusCode::UNAUTHORIZED => VercelError::new(
            status,
            "unauthorized",
            "Not authorized: the token is not known here, or has expired. `keep env vercel` makes one.",
        ),
        _ => denied,
    }
}

fn check_team(asked: &QueryParams) -> Result<(), VercelError> {
    let team = asked.text("teamId").filter(|team| *team != TEAM && *team != TEAM_SLUG);
    let slug = asked.text("slug").filter(|slug| *slug != TEAM_SLUG);
    match team.or(slug) {
        None => Ok(()),
        Some(other) => {
            let other: String = other.chars().take(80).collect();
            let message = format!(
                "Not authorized: team `{other}` is not here; this server's team is `{TEAM}`."
            );
            Err(VercelError::forbidden(message))
        }
    }
}

/// The caller, acting for the project a request names.
pub(crate) fn choose(
    engine: &Engine,
    mut caller: Caller,
    asked: Option<&str>,
) -> Result<Caller, VercelError> {
    let Some(asked) = asked.filter(|asked| *asked != DEFAULT_PROJECT) else { return Ok(caller) };
    let asked = asked.strip_prefix("prj_").unwrap_or(asked);
    let project: Name = asked.parse().map_err(|_| VercelError::not_found("Project"))?;
    if project == caller.project {
        return Ok(caller);
    }
    if caller.scope != Scope::Admin {
        let own = project_id(&caller.project);
        let message = format!("Not authorized: this token is for project `{own}`.");
        return Err(VercelError::forbidden(message));
    }
    if !engine.projects().iter().any(|there| there.name == project) {
        return Err(VercelError::not_found("Project"));
    }
    caller.project = project;
    crate::audit::project(&caller.project);
    Ok(caller)
}

/// A project's id in their form.
pub(crate) fn project_id(project: &Name) -> String {
    format!("prj_{project}")
}

/// The claims their clients read out of a token.
pub(crate) fn claims(project: &Name) -> Map<String, serde_json::Value> {
    let claims = json!({
        "iss": "sandkeep",
        "owner": TEAM_SLUG,
        "owner_id": TEAM,
        "project": project.as_str(),
        "project_id": project_id(project),
        "environment": "development",
    });
    claims.as_object().cloned().unwrap_or_default()
}
