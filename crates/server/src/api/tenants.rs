//! Projects, keys, and what a key can learn about itself and the server.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use sandkeep_client::types;
use sandkeep_core::model::{KeyId, Name, Scope, Span};

use super::input::{Body, Params, PathParam, parsed};
use super::{ApiResult, App, finish, wire};
use crate::audit;
use crate::auth::{Admin, Reader};
use crate::compat::vercel::protocol::auth as vercel;
use crate::error::ApiError;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Shows the project and scope of the calling key.
#[utoipa::path(get, path = "/v1/whoami", tag = "server", operation_id = "who_am_i",
    responses((status = 200, description = "The key's project and scope.", body = types::WhoAmI)))]
pub(crate) async fn who_am_i(Reader(caller): Reader) -> Json<types::WhoAmI> {
    Json(types::WhoAmI {
        project: caller.project.into(),
        scope: wire::scope(caller.scope),
        key: caller.key.into(),
        server_version: VERSION.to_owned(),
    })
}

/// How long a token works by default.
const TOKEN_SPAN: Span = Span(90 * 24 * 3600 * 1000);

/// Creates a token from the calling key, in the form that another vendor's clients expect.
#[utoipa::path(post, path = "/v1/tokens", tag = "projects", operation_id = "issue_token",
    request_body = types::IssueToken,
    responses((status = 200, description = "The token. It is revoked together with the key.", body = types::Token)))]
pub(crate) async fn issue_token(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    params: Params,
    Body(request): Body<types::IssueToken>,
) -> ApiResult<types::Token> {
    params.end()?;
    let types::Audience::Vercel = request.audience;
    let expires = request.expires;
    let scope = request.scope.map_or(Scope::Write, wire::scope_in);
    let token = app.engine.issue_token(
        &caller,
        scope,
        expires.unwrap_or(TOKEN_SPAN),
        vercel::claims(&caller.project),
    )?;
    let project = vercel::project_id(&caller.project);
    Ok(Json(types::Token { token, project, team: vercel::TEAM.to_owned() }))
}

/// Reports disk usage: of the key's project, or with an admin key and no chosen project, of all.
#[utoipa::path(get, path = "/v1/usage", tag = "server", operation_id = "usage",
    responses((status = 200, description = "Disk usage in bytes.", body = types::SpaceUsage),
        (status = 429, description = "The key has too many such requests in flight: `too_many_concurrent_requests`.",
            body = types::ErrorAnswer)))]
pub(crate) async fn usage(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    headers: axum::http::HeaderMap,
    params: Params,
) -> ApiResult<types::SpaceUsage> {
    params.end()?;
    let _turn = app.measuring.enter(&caller.key, app.limits.measurements_per_key)?;
    let all = caller.scope == Scope::Admin && !headers.contains_key("sandkeep-project");
    let project = (!all).then_some(&caller.project);
    let space = app.engine.usage(project).await?;
    Ok(Json(types::SpaceUsage {
        project: project.map(ToString::to_string),
        total_bytes: space.host.map(|host| host.total),
        free_bytes: space.host.map(|host| host.free),
        snapshots_bytes: space.snapshots,
        drives_bytes: space.drives,
        images_bytes: space.host.map(|host| host.images),
        quarantine_bytes: space.quarantine,
        open_bytes: space.open,
        commands_bytes: space.commands,
        trash_bytes: space.trash,
    }))
}

/// Lists all known damage of stored data.
#[utoipa::path(get, path = "/v1/damage", tag = "server", operation_id = "damage",
    responses((status = 200, description = "All of it on one page: at most 1,000 entries.",
        body = types::Paged<types::Damage>)))]
pub(crate) async fn damage(
    _: Admin,
    State(app): State<Arc<App>>,
    params: Params,
) -> ApiResult<types::Paged<types::Damage>> {
    params.end()?;
    let items = app.engine.damage().into_iter().map(wire::damage).collect();
    Ok(Json(types::Paged { items, next: None }))
}

/// Checks the data directory while the server runs. One check at a time; others wait for their turn.
#[utoipa::path(post, path = "/v1/fsck", tag = "server", operation_id = "fsck",
    request_body = types::FsckRequest,
    responses((status = 200, description = "What was found.", body = types::Fsck)))]
pub(crate) async fn fsck(
    _: Admin,
    State(app): State<Arc<App>>,
    params: Params,
    Body(request): Body<types::FsckRequest>,
) -> ApiResult<types::Fsck> {
    params.end()?;
    let report = app.engine.fsck().await?;
    let mut broken = report.is_broken();
    let mut problems: Vec<types::FsckProblem> = report.problems.iter().map(wire::problem).collect();
    if request.verify {
        for (layer, differences) in app.engine.scrub_now().await? {
            broken = true;
            problems.extend(differences.iter().map(|difference| types::FsckProblem {
                leftover: false,
                text: format!("layer {layer}: {difference}"),
            }));
        }
    }
    Ok(Json(types::Fsck { broken, problems }))
}

/// Lists all projects, with their keys.
#[utoipa::path(get, path = "/v1/projects", tag = "projects", operation_id = "list_projects",
    responses((status = 200, description = "All of them on one page.", body = types::Paged<types::Project>)))]
pub(crate) async fn projects(
    _: Admin,
    State(app): State<Arc<App>>,
    params: Params,
) -> ApiResult<types::Paged<types::Project>> {
    params.end()?;
    let projects = app.engine.projects();
    let items = projects.into_iter().map(wire::project).collect();
    Ok(Json(types::Paged { items, next: None }))
}

/// Creates a project.
#[utoipa::path(post, path = "/v1/projects", tag = "projects", operation_id = "create_project",
    request_body = types::CreateProject,
    responses((status = 201, description = "The project.", body = types::Project)))]
pub(crate) async fn create_project(
    _: Admin,
    State(app): State<Arc<App>>,
    params: Params,
    Body(request): Body<types::CreateProject>,
) -> Result<(StatusCode, Json<types::Project>), ApiError> {
    params.end()?;
    let name: Name = parsed("name", &request.name)?;
    audit::target("project", &name);
    let engine = app.engine.clone();
    let made = finish(&app, async move { engine.create_project(name).await }).await?;
    Ok((StatusCode::CREATED, Json(wire::project(made))))
}

/// Deletes a project that has no sandboxes and no drives.
#[utoipa::path(delete, path = "/v1/projects/{project}", tag = "projects", operation_id = "delete_project",
    params(("project" = String, Path, description = "Its name.")),
    responses((status = 204, description = "It was deleted.")))]
pub(crate) async fn delete_project(
    _: Admin,
    State(app): State<Arc<App>>,
    PathParam(project): PathParam<Name>,
    params: Params,
) -> Result<StatusCode, ApiError> {
    params.end()?;
    let engine = app.engine.clone();
    finish(&app, async move { engine.delete_project(&project).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lists a project's keys.
#[utoipa::path(get, path = "/v1/projects/{project}/keys", tag = "projects", operation_id = "list_keys",
    params(("project" = String, Path, description = "The project's name.")),
    responses((status = 200, description = "All of them on one page.", body = types::Paged<types::Key>)))]
pub(crate) async fn keys(
    _: Admin,
    State(app): State<Arc<App>>,
    PathParam(project): PathParam<Name>,
    params: Params,
) -> ApiResult<types::Paged<types::Key>> {
    params.end()?;
    let found = app.engine.projects().into_iter().find(|found| found.name == project);
    let Some(found) = found else {
        let message = format!("there is no project `{project}`");
        return Err(ApiError::new(StatusCode::NOT_FOUND, "project_not_found", message));
    };
    Ok(Json(types::Paged { items: found.keys.into_iter().map(wire::key).collect(), next: None }))
}

/// Creates a key. Its secret is shown this once.
#[utoipa::path(post, path = "/v1/projects/{project}/keys", tag = "projects", operation_id = "create_key",
    params(("project" = String, Path, description = "The project's name.")),
    request_body = types::CreateKey,
    responses((status = 201, description = "The key, with its secret.", body = types::NewKey)))]
pub(crate) async fn create_key(
    _: Admin,
    State(app): State<Arc<App>>,
    PathParam(project): PathParam<Name>,
    params: Params,
    Body(request): Body<types::CreateKey>,
) -> Result<(StatusCode, Json<types::NewKey>), ApiError> {
    params.end()?;
    let scope = wire::scope_in(request.scope);
    let types::CreateKey { label, approve, expires, .. } = request;
    audit::detail("project", &project);
    let engine = app.engine.clone();
    let work = async move {
        match approve {
            true => engine.create_approver_key(&project, label, scope, expires).await,
            false => engine.create_key(&project, label, scope, expires).await,
        }
    };
    let (key, secret) = finish(&app, work).await?;
    audit::target("key", &key.id);
    audit::detail("label", &key.label);
    audit::detail("scope", format!("{:?}", key.scope).to_lowercase());
    Ok((StatusCode::CREATED, Json(types::NewKey { key: wire::key(key), secret })))
}

/// Revokes a key immediately.
#[utoipa::path(delete, path = "/v1/projects/{project}/keys/{key}", tag = "projects", operation_id = "revoke_key",
    params(
        ("project" = String, Path, description = "The project's name."),
        ("key" = String, Path, description = "The key's id."),
    ),
    responses((status = 204, description = "The key is revoked.")))]
pub(crate) async fn revoke_key(
    _: Admin,
    State(app): State<Arc<App>>,
    PathParam((project, key)): PathParam<(Name, KeyId)>,
    params: Params,
) -> Result<StatusCode, ApiError> {
    params.end()?;
    let engine = app.engine.clone();
    audit::detail("project", &project);
    finish(&app, async move { engine.revoke_key(&project, &key).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}
