//! Routes about sandboxes as a whole: create, list, start, stop, fork, checkpoint, roll back, delete.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use sandkeep_client::types;
use sandkeep_core::model::{Name, Policy, Tags};

use super::guard;
use super::input::{Body, IdempotencyKey, MaybeBody, Params, PathParam, parsed};
use super::{ApiResult, App, finish, wire};
use crate::auth::{Reader, Writer, may_approve};
use crate::error::ApiError;
use sandkeep_core::db::Filter;
use sandkeep_core::engine::{
    Caller, Checkpoint, Create, Delete, Fork, ForkFrom, IfExists, Method, OnDelete, Stop,
};

/// How many forks may be asked for at once.
const MOST_FORKS: u32 = 100;

/// Creates a sandbox, or returns the one with its name.
#[utoipa::path(post, path = "/v1/sandboxes", tag = "sandboxes", operation_id = "create_sandbox",
    params(("Idempotency-Key" = Option<String>, Header, description = "A retry with the same key returns the first response.")),
    request_body = types::CreateSandbox,
    responses(
        (status = 201, description = "The sandbox was created.", body = types::Opened),
        (status = 200, description = "The sandbox existed.", body = types::Opened),
    ))]
pub(crate) async fn create(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    params: Params,
    IdempotencyKey(key): IdempotencyKey,
    MaybeBody(mut request): MaybeBody<types::CreateSandbox>,
) -> Result<(StatusCode, Json<types::Opened>), ApiError> {
    params.end()?;
    let create = Create {
        patch: wire::patch(request.take_settings(), None)?,
        name: request.name.map(|name| parsed("name", &name)).transpose()?,
        if_exists: match request.if_exists {
            types::IfExists::Fail => IfExists::Fail,
            types::IfExists::Get => IfExists::Get,
        },
        start: request.start.unwrap_or(true),
        from: request.from.map(|id| parsed("from", &id)).transpose()?,
    };
    let engine = app.engine.clone();
    let opened =
        finish(&app, async move { engine.create(&caller.project, create, key).await }).await?;
    crate::audit::target("sandbox", &opened.sandbox.name);
    let status = if opened.created { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Json(wire::opened(opened))))
}

/// Lists sandboxes, newest first.
#[utoipa::path(get, path = "/v1/sandboxes", tag = "sandboxes", operation_id = "list_sandboxes",
    params(
        ("tag" = Option<Vec<String>>, Query, description = "`key=value`; repeat it, and all must match."),
        ("state" = Option<types::State>, Query, description = "Only sandboxes in this state."),
        ("name_prefix" = Option<String>, Query, description = "Only names with this prefix."),
        ("class" = Option<types::Class>, Query, description = "Only sandboxes of this class."),
        ("limit" = Option<u32>, Query, description = "Maximum number of items: 1 to 1000, 100 if absent."),
        ("cursor" = Option<String>, Query, description = "`next` of the previous page."),
    ),
    responses((status = 200, description = "A page of the list.", body = types::Paged<types::Sandbox>)))]
pub(crate) async fn list(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    mut params: Params,
) -> ApiResult<types::Paged<types::Sandbox>> {
    let mut tags = Tags::new();
    for tag in params.all("tag") {
        let Some((key, value)) = tag.split_once('=') else {
            return Err(ApiError::invalid(format!("`tag`: `{tag}` is not `key=value`")));
        };
        if tags.insert(key.to_owned(), value.to_owned()).is_some_and(|before| before != value) {
            return Err(ApiError::invalid(format!("`tag`: no sandbox has two values for `{key}`")));
        }
    }
    let filter = Filter {
        tags,
        tag_texts: Vec::new(),
        phases: params.word("state")?.map(wire::state_in).into_iter().collect(),
        name_prefix: params.text("name_prefix")?,
        class: params.word("class")?,
    };
    let page = params.page()?;
    params.end()?;
    let found = app.engine.list(&caller.project, &filter, &page).await?;
    let mut items = Vec::with_capacity(found.items.len());
    for sandbox in found.items {
        let commands = app.engine.commands_kept_known(&sandbox.id).map(wire::commands_kept);
        let saved = app.engine.saved(&sandbox).await?;
        items.push(wire::saved(saved, types::Sandbox { commands, ..wire::sandbox(sandbox) }));
    }
    Ok(Json(types::Paged { items, next: found.next }))
}

/// Shows a sandbox. Never wakes it.
#[utoipa::path(get, path = "/v1/sandboxes/{name}", tag = "sandboxes", operation_id = "get_sandbox",
    params(("name" = String, Path, description = "Its name.")),
    responses((status = 200, description = "The sandbox.", body = types::Sandbox)))]
pub(crate) async fn get(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
) -> ApiResult<types::Sandbox> {
    params.end()?;
    app.engine.look(&caller.project, &name).await?;
    let found = app.engine.get(&caller.project, &name).await?;
    let (fallback, valid, session_changes) = match found.session {
        Some(session) => (session.fallback, session.valid, session.changes),
        None => (None, None, None),
    };
    let commands = app.engine.commands_kept(&found.sandbox.id).await?;
    let commands = Some(wire::commands_kept(commands));
    let saved = app.engine.saved(&found.sandbox).await?;
    let sandbox = types::Sandbox {
        fallback,
        valid,
        commands,
        session_changes,
        ..wire::sandbox(found.sandbox)
    };
    Ok(Json(wire::saved(saved, sandbox)))
}

/// Changes a sandbox's settings.
#[utoipa::path(patch, path = "/v1/sandboxes/{name}", tag = "sandboxes", operation_id = "update_sandbox",
    params(("name" = String, Path, description = "Its name.")),
    request_body = types::UpdateSandbox,
    responses((status = 200, description = "The changed sandbox.", body = types::Sandbox)))]
pub(crate) async fn update(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
    Body(change): Body<types::UpdateSandbox>,
) -> ApiResult<types::Sandbox> {
    params.end()?;
    check_approvals(&app, &caller, &name, change.approvals.as_ref()).await?;
    let before = policy_of(&app, &caller, &name, change.network.is_some()).await?;
    let patch = wire::patch(change, before.as_ref())?;
    let engine = app.engine.clone();
    let work = async move { engine.update(&caller.project, &name, patch).await };
    Ok(Json(wire::sandbox(finish(&app, work).await?)))
}

/// Refuses to loosen what somebody has to approve, also in a fork, for a key that may not approve.
async fn check_approvals(
    app: &App,
    caller: &Caller,
    name: &Name,
    change: Option<&Option<types::ApprovalPolicy>>,
) -> Result<(), ApiError> {
    let Some(change) = change else { return Ok(()) };
    let before = app.engine.get(&caller.project, name).await?.sandbox.config.approvals;
    match before.is_none() || before == *change {
        true => Ok(()),
        false => may_approve(caller),
    }
}

/// What a sandbox may reach by its own policy, if the caller needs it.
async fn policy_of(
    app: &App,
    caller: &Caller,
    name: &Name,
    needed: bool,
) -> Result<Option<Policy>, ApiError> {
    if !needed {
        return Ok(None);
    }
    Ok(app.engine.get(&caller.project, name).await?.sandbox.config.network)
}

/// Deletes a sandbox, whatever its state.
#[utoipa::path(delete, path = "/v1/sandboxes/{name}", tag = "sandboxes", operation_id = "delete_sandbox",
    params(
        ("name" = String, Path, description = "Its name."),
        ("keep_snapshots" = Option<bool>, Query, description = "Whether to keep its snapshots until they are deleted or expire."),
        ("force" = Option<bool>, Query, description = "Delete even if writes to drives cannot be recovered from its disks and are lost. Otherwise this is refused (409 `drives_unsaved`)."),
        ("unused_since" = Option<String>, Query, description = "Refuse (412 `used_meanwhile`) if it runs or was used after this time, like the `used_at` of a list."),
        ("Idempotency-Key" = Option<String>, Header, description = "A retry with the same key returns the first response."),
    ),
    responses((status = 200, description = "It was deleted.", body = types::Deleted)))]
pub(crate) async fn remove(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    mut params: Params,
    IdempotencyKey(key): IdempotencyKey,
) -> ApiResult<types::Deleted> {
    let keep = params.flag("keep_snapshots")?;
    let force = params.flag("force")?;
    let unused_since = params.text("unused_since")?;
    let unused_since = unused_since.map(|time| parsed("unused_since", &time)).transpose()?;
    params.end()?;
    let engine = app.engine.clone();
    let snapshots = if keep { OnDelete::Keep } else { OnDelete::Drop };
    let delete = Delete { snapshots, force, unused_since, ..Delete::default() };
    let work = async move { engine.delete(&caller.project, &name, delete, key).await };
    let gone = finish(&app, work).await?;
    let snapshots_kept = gone.snapshots_kept.into_iter().map(Into::into).collect();
    let drives_lost = gone.drives_lost.into_iter().map(Into::into).collect();
    Ok(Json(types::Deleted { snapshots_kept, drives_lost }))
}

/// Starts a sandbox, or does nothing if it runs.
#[utoipa::path(post, path = "/v1/sandboxes/{name}/start", tag = "sandboxes", operation_id = "start_sandbox",
    params(("name" = String, Path, description = "Its name.")),
    request_body = Option<types::Start>,
    responses((status = 200, description = "The running sandbox.", body = types::Opened)))]
pub(crate) async fn start(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
    MaybeBody(request): MaybeBody<types::Start>,
) -> ApiResult<types::Opened> {
    params.end()?;
    let engine = app.engine.clone();
    let work = async move { engine.start(&caller.project, &name, request.expect_generation).await };
    Ok(Json(wire::opened(finish(&app, work).await?)))
}

/// Stops a sandbox and keeps its files. Answers when they are on stable storage.
#[utoipa::path(post, path = "/v1/sandboxes/{name}/stop", tag = "sandboxes", operation_id = "stop_sandbox",
    params(
        ("name" = String, Path, description = "Its name."),
        ("Idempotency-Key" = Option<String>, Header, description = "A retry with the same key returns the first response."),
    ),
    request_body = Option<types::Stop>,
    responses((status = 200, description = "What was kept and used.", body = types::Stopped)))]
pub(crate) async fn stop(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
    IdempotencyKey(key): IdempotencyKey,
    MaybeBody(request): MaybeBody<types::Stop>,
) -> ApiResult<types::Stopped> {
    params.end()?;
    let engine = app.engine.clone();
    let stop = Stop { decision: guard::decision(request), ..Stop::default() };
    let work = async move { engine.stop(&caller.project, &name, stop, key).await };
    Ok(Json(wire::stopped(finish(&app, work).await?)))
}

/// Forks a sandbox: creates one that starts from its current state.
#[utoipa::path(post, path = "/v1/sandboxes/{name}/fork", tag = "sandboxes", operation_id = "fork_sandbox",
    params(
        ("name" = String, Path, description = "The source's name."),
        ("Idempotency-Key" = Option<String>, Header, description = "A retry with the same key returns the first response."),
    ),
    request_body = Option<types::Fork>,
    responses((status = 201, description = "The new sandbox, or with `count` a list of them.", body = types::Forked)))]
pub(crate) async fn fork(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
    IdempotencyKey(key): IdempotencyKey,
    MaybeBody(mut request): MaybeBody<types::Fork>,
) -> Result<(StatusCode, Json<types::Forked>), ApiError> {
    params.end()?;
    if request.count.is_some_and(|count| !(1..=MOST_FORKS).contains(&count)) {
        return Err(ApiError::invalid(format!("count: between 1 and {MOST_FORKS}")));
    }
    let settings = request.take_settings();
    check_approvals(&app, &caller, &name, settings.approvals.as_ref()).await?;
    let before = policy_of(&app, &caller, &name, settings.network.is_some()).await?;
    let fork = Fork {
        patch: wire::patch(settings, before.as_ref())?,
        name: request.name.map(|name| parsed("name", &name)).transpose()?,
        from: match request.from {
            Some(id) => ForkFrom::Snapshot(parsed("from", &id)?),
            None => ForkFrom::Now,
        },
        expect_generation: request.expect_generation,
        start: request.start,
        count: request.count,
        on_accept: request.on_accept,
    };
    let engine = app.engine.clone();
    let forked = if fork.count.is_some() {
        let work = async move { engine.fork_many(&caller.project, &name, fork, key).await };
        let forks = finish(&app, work).await?;
        crate::audit::detail("forks", forks.made.len());
        types::Forked::Many(wire::forks(forks))
    } else {
        let work = async move { engine.fork(&caller.project, &name, fork, key).await };
        let opened = finish(&app, work).await?;
        crate::audit::detail("fork", &opened.sandbox.name);
        types::Forked::One(Box::new(wire::opened(opened)))
    };
    Ok((StatusCode::CREATED, Json(forked)))
}

/// Pauses a sandbox: keeps its memory, processes and files. Answers when they are on stable storage.
#[utoipa::path(post, path = "/v1/sandboxes/{name}/pause", tag = "sandboxes", operation_id = "pause_sandbox",
    params(("name" = String, Path, description = "Its name.")),
    request_body = Option<types::Pause>,
    responses((status = 200, description = "What was kept.", body = types::Paused)))]
pub(crate) async fn pause(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
    MaybeBody(request): MaybeBody<types::Pause>,
) -> ApiResult<types::Paused> {
    params.end()?;
    let engine = app.engine.clone();
    let work = async move { engine.pause(&caller.project, &name, request.expect_generation).await };
    Ok(Json(wire::paused(finish(&app, work).await?)))
}

/// Explains why a sandbox is in its state, and what would change that. Never wakes it.
#[utoipa::path(get, path = "/v1/sandboxes/{name}/why", tag = "sandboxes", operation_id = "why_sandbox",
    params(("name" = String, Path, description = "Its name.")),
    responses((status = 200, description = "The state and the reasons for it.", body = types::Why)))]
pub(crate) async fn why(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
) -> ApiResult<types::Why> {
    params.end()?;
    Ok(Json(wire::why(app.engine.why(&caller.project, &name).await?)))
}

/// Takes a snapshot without ending the session.
#[utoipa::path(post, path = "/v1/sandboxes/{name}/checkpoint", tag = "sandboxes", operation_id = "checkpoint_sandbox",
    params(("name" = String, Path, description = "Its name.")),
    request_body = Option<types::Checkpoint>,
    responses((status = 200, description = "The snapshot.", body = types::Snapshot)))]
pub(crate) async fn checkpoint(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
    MaybeBody(request): MaybeBody<types::Checkpoint>,
) -> ApiResult<types::Snapshot> {
    params.end()?;
    let engine = app.engine.clone();
    let checkpoint =
        Checkpoint { label: request.label, method: Method::Manual, ..Checkpoint::default() };
    let work = async move { engine.checkpoint(&caller.project, &name, checkpoint).await };
    Ok(Json(wire::sized_snapshot(finish(&app, work).await?)))
}

/// Returns a sandbox to a snapshot, after taking one of the current state.
#[utoipa::path(post, path = "/v1/sandboxes/{name}/rollback", tag = "sandboxes", operation_id = "rollback_sandbox",
    params(("name" = String, Path, description = "Its name.")),
    request_body = types::Rollback,
    responses((status = 200, description = "The sandbox, and the snapshot to undo the rollback with.", body = types::RolledBack)))]
pub(crate) async fn rollback(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
    Body(request): Body<types::Rollback>,
) -> ApiResult<types::RolledBack> {
    params.end()?;
    let to = parsed("to", &request.to)?;
    let engine = app.engine.clone();
    let work = async move {
        engine.rollback(&caller.project, &name, &to, request.expect_generation).await
    };
    let done = finish(&app, work).await?;
    Ok(Json(types::RolledBack {
        sandbox: wire::sandbox(done.sandbox),
        before: done.before.map(wire::snapshot),
    }))
}

/// Extends the current session.
#[utoipa::path(post, path = "/v1/sandboxes/{name}/extend", tag = "sandboxes", operation_id = "extend_session",
    params(("name" = String, Path, description = "The sandbox's name.")),
    request_body = types::Extend,
    responses((status = 200, description = "The session, with its new deadline.", body = types::Session)))]
pub(crate) async fn extend(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
    Body(request): Body<types::Extend>,
) -> ApiResult<types::Session> {
    params.end()?;
    Ok(Json(wire::session(app.engine.extend(&caller.project, &name, request.by, None).await?)))
}

/// Lists a sandbox's sessions, newest first.
#[utoipa::path(get, path = "/v1/sandboxes/{name}/sessions", tag = "sandboxes", operation_id = "list_sessions",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("limit" = Option<u32>, Query, description = "Maximum number of items: 1 to 1000, 100 if absent."),
        ("cursor" = Option<String>, Query, description = "`next` of the previous page."),
    ),
    responses((status = 200, description = "A page of the list.", body = types::Paged<types::Session>)))]
pub(crate) async fn sessions(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    mut params: Params,
) -> ApiResult<types::Paged<types::Session>> {
    let page = params.page()?;
    params.end()?;
    let found = app.engine.sessions(&caller.project, &name, &page).await?;
    Ok(Json(wire::paged(found, wire::session)))
}

/// Shows everything connected with a sandbox by forks and snapshots.
#[utoipa::path(get, path = "/v1/sandboxes/{name}/tree", tag = "sandboxes", operation_id = "get_tree",
    params(("name" = String, Path, description = "The sandbox's name.")),
    responses((status = 200, description = "The lineage.", body = types::Tree)))]
pub(crate) async fn tree(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
) -> ApiResult<types::Tree> {
    params.end()?;
    let tree = app.engine.lineage(&caller.project, &name).await?;
    Ok(Json(types::Tree {
        sandboxes: tree.sandboxes.into_iter().map(wire::sandbox).collect(),
        snapshots: tree.snapshots.into_iter().map(wire::snapshot).collect(),
        forks: tree.forks.into_iter().map(wire::fork_in_tree).collect(),
    }))
}
