//! Comparing forks and bringing them back: differences, promote, merge, rename.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::http::{HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use sandkeep_client::types;
use sandkeep_core::engine::{
    DiffRequest, MergeRequest, PatchOptions, Promote, PromoteIntoDrive, PromotedIntoDrive,
};
use sandkeep_core::model::{Name, Point};
use tokio::sync::mpsc;

use super::input::{Body as JsonBody, IdempotencyKey, MaybeBody, Params, PathParam, parsed};
use super::{ApiResult, App, finish, stream, wire};
use crate::auth::{Reader, Writer};
use crate::error::ApiError;
use crate::limits::RequestPermit;
use crate::openapi::Raw;

/// How many paths are listed by default, and at most.
const LISTED: usize = 10_000;
const MOST_LISTED: u64 = 100_000;

/// Compares two points. Starts no sandbox.
#[utoipa::path(get, path = "/v1/diff", tag = "forks", operation_id = "diff",
    params(
        ("from" = String, Query, description = "The first point: NAME, NAME@saved, NAME@base, NAME@LABEL, a snapshot's id, or image:NAME."),
        ("to" = String, Query, description = "The second point."),
        ("path" = Option<Vec<String>>, Query, description = "Only these paths or globs. Without a leading slash they are below the working directory."),
        ("limit" = Option<u32>, Query, description = "How many paths are listed: 1 to 100000, 10000 if absent. All are counted."),
    ),
    responses((status = 200, description = "What differs.", body = types::Diff),
        (status = 429, description = "The project has too many comparisons in progress: `too_many_concurrent_requests`.", body = types::ErrorAnswer)))]
pub(crate) async fn diff(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    mut params: Params,
) -> ApiResult<types::Diff> {
    let limit = match params.number("limit")? {
        None => LISTED,
        Some(limit @ 1..=MOST_LISTED) => usize::try_from(limit).unwrap_or(LISTED),
        Some(_) => {
            return Err(ApiError::invalid(format!("`limit`: between 1 and {MOST_LISTED}")));
        }
    };
    let request = diff_request(&mut params, limit)?;
    params.end()?;
    let points = (request.from.to_string(), request.to.to_string());
    let _turn = turn(&app, &caller.project).await?;
    let found = app.engine.diff(&caller.project, request).await?;
    let point = |point: String, (snapshot, live): (Option<_>, bool)| types::DiffPoint {
        point,
        snapshot: snapshot.map(|id: sandkeep_core::model::SnapshotId| id.to_string()),
        live,
    };
    Ok(Json(types::Diff {
        from: point(points.0, found.from),
        to: point(points.1, found.to),
        counts: found.tree.counts,
        truncated: found.tree.truncated,
        changes: found.tree.entries(),
    }))
}

/// Streams the differences of two points as a patch in git's format. Empty if nothing differs.
#[utoipa::path(get, path = "/v1/diff/patch", tag = "forks", operation_id = "diff_patch",
    params(
        ("from" = String, Query, description = "The first point."),
        ("to" = String, Query, description = "The second point."),
        ("path" = Option<Vec<String>>, Query, description = "Only these paths or globs."),
        ("relative" = Option<String>, Query, description = "Only what is below this directory, with paths relative to it."),
        ("binary" = Option<bool>, Query, description = "With the contents of binary files."),
        ("git_dir" = Option<bool>, Query, description = "With paths in `.git` directories, which `git apply` refuses."),
    ),
    responses((status = 200, description = "The patch.", body = Raw, content_type = "text/x-diff"),
        (status = 503, description = "Too many patches are being sent: `busy`.", body = types::ErrorAnswer)))]
pub(crate) async fn patch(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    mut params: Params,
) -> Result<Response, ApiError> {
    let request = diff_request(&mut params, LISTED)?;
    let relative = params.text("relative")?.unwrap_or_default();
    let relative = relative.trim_matches('/').as_bytes().to_vec();
    let (binary, git_dir) = (params.flag("binary")?, params.flag("git_dir")?);
    let how = PatchOptions { relative, binary, git_dir };
    params.end()?;
    // Room for a few pieces: who writes waits when the caller is slow.
    let (into, mut pieces) = mpsc::channel(4);
    let engine = app.engine.clone();
    // The engine has turns for patches: one whose reader is slow holds up nothing else of its project.
    let work = app
        .tasks
        .spawn(async move { engine.write_patch(&caller.project, request, how, into).await });
    let body = match pieces.recv().await {
        Some(first) => stream::export(first, pieces, work),
        None => {
            work.await.map_err(|_| ApiError::internal())??;
            Body::empty()
        }
    };
    Ok(([(CONTENT_TYPE, "text/x-diff")], body).into_response())
}

/// How long a comparison waits for others of its project.
const PATIENCE: Duration = Duration::from_secs(30);

/// Waits until no other comparison or merge of the project runs: the engine has room for a few at a time, of all projects.
async fn turn(app: &App, project: &Name) -> Result<RequestPermit<Name>, ApiError> {
    let most = app.limits.comparisons_per_project;
    app.comparing.enter_in_turn(project, most, PATIENCE).await
}

fn diff_request(params: &mut Params, limit: usize) -> Result<DiffRequest, ApiError> {
    let from: Point = parsed("from", &params.needed("from")?)?;
    let to: Point = parsed("to", &params.needed("to")?)?;
    Ok(DiffRequest { from, to, paths: params.all("path"), limit })
}

/// Lists forks: those of a sandbox, or those that were made together.
#[utoipa::path(get, path = "/v1/forks", tag = "forks", operation_id = "list_forks",
    params(
        ("of" = Option<String>, Query, description = "Only forks of this sandbox."),
        ("group" = Option<String>, Query, description = "Only forks that were made together under this name."),
    ),
    responses((status = 200, description = "All of them on one page.", body = types::Paged<types::Sandbox>)))]
pub(crate) async fn list(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    mut params: Params,
) -> ApiResult<types::Paged<types::Sandbox>> {
    let mut name = |field: &str| -> Result<Option<Name>, ApiError> {
        params.text(field)?.map(|name| parsed(field, &name)).transpose()
    };
    let (of, group) = (name("of")?, name("group")?);
    params.end()?;
    let forks = app.engine.forks(&caller.project, of.as_ref(), group.as_ref()).await?;
    let items = forks.into_iter().map(wire::sandbox).collect();
    Ok(Json(types::Paged { items, next: None }))
}

/// Gives the origin of a fork the fork's state. Its previous state stays as a snapshot.
#[utoipa::path(post, path = "/v1/sandboxes/{name}/promote", tag = "forks", operation_id = "promote_sandbox",
    params(
        ("name" = String, Path, description = "The fork's name."),
        ("Idempotency-Key" = Option<String>, Header, description = "A retry with the same key returns the first response."),
    ),
    request_body = Option<types::Promote>,
    responses((status = 200, description = "The origin as it is now.", body = types::Promoted)))]
pub(crate) async fn promote(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
    IdempotencyKey(key): IdempotencyKey,
    MaybeBody(request): MaybeBody<types::Promote>,
) -> ApiResult<types::Promoted> {
    params.end()?;
    let types::Promote { expect_generation, delete_fork, delete_group } = request;
    let more = format!("delete_fork={delete_fork} delete_group={delete_group}");
    let engine = app.engine.clone();
    let work = async move {
        let project = &caller.project;
        let wanted = Promote { expect_generation };
        let leave = match delete_group {
            true => engine.group_of(project, &name).await?,
            false => Vec::new(),
        };
        let promoted = engine.promote_as_asked(project, &name, wanted, key, &more).await?;
        let (mut deleted, mut failed) = engine.delete_forks(project, leave).await;
        let (cleared, stayed) = engine.clear_accepted(project, &name, delete_fork).await;
        deleted.extend(cleared);
        failed.extend(stayed);
        Ok((promoted, deleted, failed))
    };
    let (promoted, deleted, failed) = finish(&app, work).await?;
    Ok(Json(types::Promoted {
        sandbox: wire::sandbox(promoted.sandbox),
        snapshot: promoted.snapshot.id.to_string(),
        before: promoted.before.map(|before| before.id.to_string()),
        deleted: deleted.into_iter().map(Into::into).collect(),
        failed: wire::failed_forks(failed),
    }))
}

/// Sends chosen files that a sandbox made or changed since it was forked, as a tar stream: with links, modes, owners, times and
/// attributes. A running sandbox is checkpointed first; none is started.
#[utoipa::path(post, path = "/v1/sandboxes/{name}/artifacts", tag = "forks", operation_id = "take_artifacts",
    params(("name" = String, Path, description = "The sandbox's name.")),
    request_body = types::TakeArtifacts,
    responses((status = 200, description = "The tar stream. `Content-Length` is its exact length; `Sandkeep-Left-Out` is how many files it cannot hold: sockets, and names that begin with `.wh.`.", body = Raw, content_type = "application/x-tar"),
        (status = 429, description = "The key has too many exports in progress: `too_many_concurrent_requests`.", body = types::ErrorAnswer),
        (status = 503, description = "The server has too many exports in progress: `too_many_exports`.", body = types::ErrorAnswer)))]
pub(crate) async fn artifacts(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
    JsonBody(request): JsonBody<types::TakeArtifacts>,
) -> Result<Response, ApiError> {
    params.end()?;
    let permit = app.exporting.enter(&caller.key, app.limits.exports_per_key)?;
    let _turn = turn(&app, &caller.project).await?;
    let engine = app.engine.clone();
    let work = async move { engine.artifacts(&caller.project, &name, request.only).await };
    let artifacts = finish(&app, work).await?;
    let (bytes, left_out) = (artifacts.bytes(), artifacts.left_out().count);
    // Room for a few pieces: who sends waits when the caller is slow.
    let (into, mut pieces) = mpsc::channel(4);
    let work = app.tasks.spawn(async move {
        let _permit = permit;
        artifacts.send(into).await
    });
    let Some(first) = pieces.recv().await else {
        work.await.map_err(|_| ApiError::internal())??;
        return Err(ApiError::internal());
    };
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static("application/x-tar")),
        (CONTENT_LENGTH, HeaderValue::from(bytes)),
        (HeaderName::from_static("sandkeep-left-out"), HeaderValue::from(left_out)),
    ];
    Ok((headers, stream::export(first, pieces, work)).into_response())
}

/// Puts chosen files that a sandbox made, changed or deleted since it was forked into a drive. All or nothing; repeated, it changes
/// nothing.
#[utoipa::path(post, path = "/v1/drives/{name}/promote", tag = "drives", operation_id = "promote_into_drive",
    params(("name" = String, Path, description = "The drive's name.")),
    request_body = types::PromoteIntoDrive,
    responses((status = 200, description = "What was done, or would be done.", body = types::PromotedIntoDrive),
        (status = 429, description = "The project has too many comparisons in progress: `too_many_concurrent_requests`.", body = types::ErrorAnswer)))]
pub(crate) async fn promote_into_drive(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(drive): PathParam<Name>,
    params: Params,
    JsonBody(request): JsonBody<types::PromoteIntoDrive>,
) -> ApiResult<types::PromotedIntoDrive> {
    params.end()?;
    let from: Name = parsed("from", &request.from)?;
    crate::audit::detail("from", &from);
    let types::PromoteIntoDrive { from: _, only, path, expect_generation, dry_run } = request;
    let wanted = PromoteIntoDrive { drive, path, only, expect_generation, dry_run };
    let turn = turn(&app, &caller.project).await?;
    let engine = app.engine.clone();
    let work = async move {
        let _turn = turn;
        engine.promote_into_drive(&caller.project, &from, wanted).await
    };
    let PromotedIntoDrive { drive, outcome, snapshot } = finish(&app, work).await?;
    Ok(Json(types::PromotedIntoDrive {
        drive: super::drives::out(&app, drive),
        snapshot: snapshot.map(|id| id.to_string()),
        counts: outcome.counts,
        conflicts: outcome.conflicts,
        changes: outcome.changes,
        truncated: outcome.truncated,
    }))
}

/// Brings the changes of a sandbox into another one: a three-way merge, all or nothing.
#[utoipa::path(post, path = "/v1/sandboxes/{name}/merge", tag = "forks", operation_id = "merge_sandbox",
    params(("name" = String, Path, description = "The sandbox whose changes are taken.")),
    request_body = Option<types::Merge>,
    responses((status = 200, description = "What was done, or would be done.", body = types::Merged),
        (status = 429, description = "The project has too many comparisons in progress: `too_many_concurrent_requests`.", body = types::ErrorAnswer)))]
pub(crate) async fn merge(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
    MaybeBody(request): MaybeBody<types::Merge>,
) -> ApiResult<types::Merged> {
    params.end()?;
    let request = MergeRequest {
        into: request
            .into
            .map(|into| parsed("into", &into))
            .transpose()?
            .inspect(|into: &Name| crate::audit::detail("into", into)),
        only: request.only,
        keep_both: request.conflicts == types::OnConflict::Keep,
        dry_run: request.dry_run,
        expect_generation: request.expect_generation,
    };
    let turn = turn(&app, &caller.project).await?;
    let engine = app.engine.clone();
    let work = async move {
        let _turn = turn;
        let dry_run = request.dry_run;
        let merged = engine.merge(&caller.project, &name, request).await?;
        let (deleted, failed) = match merged.all && !dry_run {
            true => engine.clear_accepted(&caller.project, &name, false).await,
            false => (Vec::new(), Vec::new()),
        };
        Ok((merged, deleted, failed))
    };
    let (merged, deleted, failed) = finish(&app, work).await?;
    Ok(Json(types::Merged {
        sandbox: merged.sandbox.name.to_string(),
        generation: merged.sandbox.generation,
        snapshot: merged.snapshot.map(|snapshot| snapshot.id.to_string()),
        counts: merged.outcome.counts,
        conflicts: merged.outcome.conflicts,
        changes: merged.outcome.changes,
        truncated: merged.outcome.truncated,
        deleted: deleted.into_iter().map(Into::into).collect(),
        failed: wire::failed_forks(failed),
    }))
}

/// Gives a sandbox another name. Its id, snapshots and history stay; a running session goes on.
#[utoipa::path(post, path = "/v1/sandboxes/{name}/rename", tag = "forks", operation_id = "rename_sandbox",
    params(("name" = String, Path, description = "The name it has.")),
    request_body = types::Rename,
    responses((status = 200, description = "The sandbox under its new name.", body = types::Sandbox)))]
pub(crate) async fn rename(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
    JsonBody(request): JsonBody<types::Rename>,
) -> ApiResult<types::Sandbox> {
    params.end()?;
    let to: Name = parsed("name", &request.name)?;
    crate::audit::detail("to", &to);
    let engine = app.engine.clone();
    let work = async move { engine.rename(&caller.project, &name, to).await };
    Ok(Json(wire::sandbox(finish(&app, work).await?)))
}
