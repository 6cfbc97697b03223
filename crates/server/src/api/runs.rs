//! Runs: start, follow, review, accept, reject.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use sandkeep_client::types;
use sandkeep_core::engine::{Acceptance, DestinationTraffic, Review, RunFilter};
use sandkeep_core::model::{self, Name, RunId, RunSpec, Span};

use super::approvals::approval_out;
use super::input::{Body, MaybeBody, Params, PathParam, parsed};
use super::{ApiResult, App, finish, guard, wire};
use crate::audit;
use crate::auth::{Admin, Approver, Reader, Writer};
use crate::error::ApiError;

/// How long a call may wait for a run or an approval.
pub(super) const LONGEST_WAIT: u64 = 60;
/// How long a result waits for a review by default.
const KEEP: Span = Span::days(14);
/// How long a harness may be silent by default.
const HEARTBEAT: Span = Span::seconds(60);

/// Starts a run, or puts it into the queue of its project.
#[utoipa::path(post, path = "/v1/runs", tag = "runs", operation_id = "start_run",
    request_body = types::StartRun,
    responses((status = 201, description = "The run. Without room for another one the answer is 429 `too_many_runs`.",
        body = types::Run)))]
pub(crate) async fn start(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    params: Params,
    Body(request): Body<types::StartRun>,
) -> Result<(StatusCode, Json<types::Run>), ApiError> {
    params.end()?;
    let spec = spec_in(request, &caller.project)?;
    let engine = app.engine.clone();
    let run = finish(&app, async move { engine.start_run(&caller, spec).await }).await?;
    audit::target("run", &run.id);
    Ok((StatusCode::CREATED, Json(run_whole(&app, run).await)))
}

/// Lists runs, newest first.
#[utoipa::path(get, path = "/v1/runs", tag = "runs", operation_id = "list_runs",
    params(
        ("status" = Option<Vec<String>>, Query, description = "Only with this status; repeat it for more."),
        ("sandbox" = Option<String>, Query, description = "Only in the sandbox of this name."),
        ("owner" = Option<String>, Query, description = "Only of this owner."),
        ("repository" = Option<String>, Query, description = "Only on this repository."),
        ("limit" = Option<u32>, Query, description = "Between 1 and 1000; 100 if absent."),
        ("cursor" = Option<String>, Query, description = "`next` of the page before."),
    ),
    responses((status = 200, description = "One page.", body = types::Paged<types::Run>)))]
pub(crate) async fn list(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    mut params: Params,
) -> ApiResult<types::Paged<types::Run>> {
    let mut statuses = Vec::new();
    for text in params.all("status") {
        let word = serde_json::Value::String(text);
        let status = serde_json::from_value(word);
        statuses.push(status.map_err(|error| ApiError::invalid(format!("`status`: {error}")))?);
    }
    let filter = RunFilter {
        statuses,
        sandbox: params.text("sandbox")?.map(|it| parsed("sandbox", &it)).transpose()?,
        owner: params.text("owner")?,
        repository: params.text("repository")?,
    };
    let page = params.page()?;
    params.end()?;
    let mut found = app.engine.runs(&caller.project, &filter, &page)?;
    found.items = app.engine.whole_runs(found.items).await;
    Ok(Json(wire::paged(found, |run| run_out(&app, run))))
}

/// Shows a run. With `wait`, once it waits for somebody or is over, or after that time.
#[utoipa::path(get, path = "/v1/runs/{id}", tag = "runs", operation_id = "get_run",
    params(
        ("id" = String, Path, description = "The run's id."),
        ("wait" = Option<u64>, Query, description = "Seconds, at most 60."),
    ),
    responses((status = 200, description = "The run.", body = types::Run)))]
pub(crate) async fn get(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(id): PathParam<RunId>,
    mut params: Params,
) -> ApiResult<types::Run> {
    let wait = wait_of(&mut params)?;
    params.end()?;
    if let Some(wait) = wait {
        let settled = app.engine.run_settled(&caller.project, &id);
        // Its state after that time is returned below.
        if let Ok(Err(error)) = tokio::time::timeout(wait, settled).await {
            return Err(error.into());
        }
    }
    let run = app.engine.run(&caller.project, &id)?;
    Ok(Json(run_whole(&app, run).await))
}

/// How long a call is to wait.
pub(super) fn wait_of(params: &mut Params) -> Result<Option<Duration>, ApiError> {
    match params.number("wait")? {
        None => Ok(None),
        Some(seconds) if seconds <= LONGEST_WAIT => Ok(Some(Duration::from_secs(seconds))),
        Some(_) => Err(ApiError::invalid(format!("`wait`: at most {LONGEST_WAIT} seconds"))),
    }
}

/// Ends a run that is queued or under way. What it did so far is kept.
#[utoipa::path(post, path = "/v1/runs/{id}/cancel", tag = "runs", operation_id = "cancel_run",
    params(("id" = String, Path, description = "The run's id.")),
    request_body = Option<types::CancelRun>,
    responses((status = 200, description = "The run.", body = types::Run)))]
pub(crate) async fn cancel(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(id): PathParam<RunId>,
    params: Params,
    MaybeBody(request): MaybeBody<types::CancelRun>,
) -> ApiResult<types::Run> {
    params.end()?;
    let engine = app.engine.clone();
    let work = async move { engine.cancel_run(&caller.project, &id, request.comment).await };
    let run = finish(&app, work).await?;
    Ok(Json(run_whole(&app, run).await))
}

/// Tells that the harness of a run is alive. The answer says whether the run is still wanted.
#[utoipa::path(post, path = "/v1/runs/{id}/heartbeat", tag = "runs", operation_id = "run_heartbeat",
    params(("id" = String, Path, description = "The run's id.")),
    request_body = Option<types::RunHeartbeat>,
    responses((status = 200, description = "The run.", body = types::Run)))]
pub(crate) async fn heartbeat(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(id): PathParam<RunId>,
    params: Params,
    MaybeBody(request): MaybeBody<types::RunHeartbeat>,
) -> ApiResult<types::Run> {
    params.end()?;
    let run = app.engine.run_heartbeat(&caller.project, &id, request.cost).await?;
    Ok(Json(run_whole(&app, run).await))
}

/// Tells that the work of a harness is done, or why it failed.
#[utoipa::path(post, path = "/v1/runs/{id}/finish", tag = "runs", operation_id = "finish_run",
    params(("id" = String, Path, description = "The run's id.")),
    request_body = Option<types::FinishRun>,
    responses((status = 200, description = "The run.", body = types::Run)))]
pub(crate) async fn finish_run(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(id): PathParam<RunId>,
    params: Params,
    MaybeBody(request): MaybeBody<types::FinishRun>,
) -> ApiResult<types::Run> {
    params.end()?;
    let types::FinishRun { failure, cost } = request;
    let engine = app.engine.clone();
    let work = async move { engine.finish_run(&caller.project, &id, failure, cost).await };
    let run = finish(&app, work).await?;
    Ok(Json(run_whole(&app, run).await))
}

/// Tells what there is to know about the result of a run. Never wakes a sandbox.
#[utoipa::path(get, path = "/v1/runs/{id}/review", tag = "runs", operation_id = "review_run",
    params(("id" = String, Path, description = "The run's id.")),
    responses((status = 200, description = "The review.", body = types::RunReview)))]
pub(crate) async fn review(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(id): PathParam<RunId>,
    params: Params,
) -> ApiResult<types::RunReview> {
    params.end()?;
    let _turn = app.measuring.enter(&caller.key, app.limits.measurements_per_key)?;
    let review = app.engine.review_run(&caller.project, &id).await?;
    Ok(Json(review_out(&app, review)))
}

/// Pins the state of a run's sandbox anew, because it has changed since, and tells what there is to know about it.
#[utoipa::path(post, path = "/v1/runs/{id}/review", tag = "runs", operation_id = "pin_run_again",
    params(("id" = String, Path, description = "The run's id.")),
    responses((status = 200, description = "The review.", body = types::RunReview)))]
pub(crate) async fn pin_again(
    Approver(caller): Approver,
    State(app): State<Arc<App>>,
    PathParam(id): PathParam<RunId>,
    params: Params,
) -> ApiResult<types::RunReview> {
    params.end()?;
    let engine = app.engine.clone();
    let work = async move {
        engine.pin_run_again(&caller, &id).await?;
        engine.review_run(&caller.project, &id).await
    };
    let review = finish(&app, work).await?;
    Ok(Json(review_out(&app, review)))
}

/// Accepts the result of a run: promotes it, merges it, or leaves it as it is. Needs a key that may approve.
#[utoipa::path(post, path = "/v1/runs/{id}/accept", tag = "runs", operation_id = "accept_run",
    params(("id" = String, Path, description = "The run's id.")),
    request_body = Option<types::AcceptRun>,
    responses((status = 200, description = "What was done. If the origin has changed since the fork, the answer is 409 \
            `origin_moved_on`, and the run waits for another decision.", body = types::RunAccepted)))]
pub(crate) async fn accept(
    Approver(caller): Approver,
    State(app): State<Arc<App>>,
    PathParam(id): PathParam<RunId>,
    params: Params,
    MaybeBody(request): MaybeBody<types::AcceptRun>,
) -> ApiResult<types::RunAccepted> {
    params.end()?;
    let types::AcceptRun { how, comment, delete_sandbox } = request;
    let acceptance = Acceptance { how, comment, discard: delete_sandbox };
    let engine = app.engine.clone();
    let work = async move {
        let points = engine.run_points(&engine.run(&caller.project, &id)?).await?;
        let (run, promoted) = engine.accept_run(&caller, &id, acceptance).await?;
        Ok((run, promoted, points))
    };
    let (run, promoted, (from, to)) = finish(&app, work).await?;
    Ok(Json(types::RunAccepted {
        run: run_whole(&app, run).await,
        promoted: promoted.map(|promoted| types::Promoted {
            sandbox: wire::sandbox(promoted.sandbox),
            snapshot: promoted.snapshot.id.to_string(),
            before: promoted.before.map(|before| before.id.to_string()),
            deleted: Vec::new(),
            failed: Vec::new(),
        }),
        from: from.to_string(),
        to: to.to_string(),
    }))
}

/// Rejects the result of a run. A sandbox that was made for it is deleted. Needs a key that may approve.
#[utoipa::path(post, path = "/v1/runs/{id}/reject", tag = "runs", operation_id = "reject_run",
    params(("id" = String, Path, description = "The run's id.")),
    request_body = Option<types::RejectRun>,
    responses((status = 200, description = "The run.", body = types::Run)))]
pub(crate) async fn reject(
    Approver(caller): Approver,
    State(app): State<Arc<App>>,
    PathParam(id): PathParam<RunId>,
    params: Params,
    MaybeBody(request): MaybeBody<types::RejectRun>,
) -> ApiResult<types::Run> {
    params.end()?;
    let engine = app.engine.clone();
    let work = async move { engine.reject_run(&caller, &id, request.comment).await };
    let run = finish(&app, work).await?;
    Ok(Json(run_whole(&app, run).await))
}

/// Shows what a project allows its runs.
#[utoipa::path(get, path = "/v1/projects/{project}/governance", tag = "projects", operation_id = "get_project_runs",
    params(("project" = String, Path, description = "The project's name.")),
    responses((status = 200, description = "The limits.", body = types::ProjectRuns)))]
pub(crate) async fn of_project(
    _: Admin,
    State(app): State<Arc<App>>,
    PathParam(project): PathParam<Name>,
    params: Params,
) -> ApiResult<types::ProjectRuns> {
    params.end()?;
    Ok(Json(app.engine.project_runs(&project)?))
}

/// Sets what a project allows its runs.
#[utoipa::path(put, path = "/v1/projects/{project}/governance", tag = "projects", operation_id = "set_project_runs",
    params(("project" = String, Path, description = "The project's name.")),
    request_body = types::ProjectRuns,
    responses((status = 200, description = "The limits.", body = types::ProjectRuns)))]
pub(crate) async fn set_for_project(
    _: Admin,
    State(app): State<Arc<App>>,
    PathParam(project): PathParam<Name>,
    params: Params,
    Body(runs): Body<types::ProjectRuns>,
) -> ApiResult<types::ProjectRuns> {
    params.end()?;
    let engine = app.engine.clone();
    let work = async move { engine.set_project_runs(&project, runs).await };
    Ok(Json(finish(&app, work).await?))
}

fn spec_in(request: types::StartRun, project: &Name) -> Result<RunSpec, ApiError> {
    let name = |text: Option<String>| text.map(|text| parsed("name", &text)).transpose();
    let place = match request.place {
        types::RunPlace::Existing { sandbox } => {
            model::RunPlace::Existing { sandbox: parsed("sandbox", &sandbox)? }
        }
        types::RunPlace::Fork { sandbox, name: fork } => {
            model::RunPlace::Fork { sandbox: parsed("sandbox", &sandbox)?, name: name(fork)? }
        }
        types::RunPlace::Fresh { image, name: fresh } => {
            model::RunPlace::Fresh { image, name: name(fresh)? }
        }
    };
    if request.command.is_some() && request.heartbeat.is_some() {
        return Err(ApiError::invalid("heartbeat: a run with a command has no harness"));
    }
    let owner = match request.owner.is_empty() {
        true => project.to_string(),
        false => request.owner,
    };
    Ok(RunSpec {
        on_accept: request.on_accept.unwrap_or_else(|| place.on_accept()),
        place,
        command: request.command,
        repository: request.repository,
        owner,
        purpose: request.purpose,
        class: request.class,
        priority: request.priority,
        approve: request.approve,
        approve_hosts: request.approve_hosts,
        known_hosts: request.known_hosts,
        approve_secrets: request.approve_secrets,
        spending: request.spending,
        keep: request.keep.unwrap_or(KEEP),
        timeout: request.timeout,
        retries: request.retries,
        heartbeat: request.heartbeat.unwrap_or(HEARTBEAT),
    })
}

fn place_out(place: model::RunPlace) -> types::RunPlace {
    let text = |name: Option<Name>| name.map(Into::into);
    match place {
        model::RunPlace::Existing { sandbox } => {
            types::RunPlace::Existing { sandbox: sandbox.into() }
        }
        model::RunPlace::Fork { sandbox, name } => {
            types::RunPlace::Fork { sandbox: sandbox.into(), name: text(name) }
        }
        model::RunPlace::Fresh { image, name } => {
            types::RunPlace::Fresh { image, name: text(name) }
        }
    }
}

fn attempt_out(attempt: model::RunAttempt) -> types::RunAttempt {
    types::RunAttempt {
        command: attempt.command.into(),
        started_at: attempt.started_at.to_string(),
        ended_at: attempt.ended_at.map(|at| at.to_string()),
        exit_code: attempt.exit_code,
        problem: attempt.problem,
    }
}

fn run_out(app: &App, run: model::Run) -> types::Run {
    let pending = match run.status().is_active() {
        true => app.engine.approvals_of_run(&run),
        false => Vec::new(),
    };
    let pending = pending.into_iter().filter(model::Approval::is_pending);
    let text = |at: Option<model::Timestamp>| at.map(|at| at.to_string());
    types::Run {
        id: run.id.to_string(),
        project: run.project.to_string(),
        status: run.status(),
        why: run.why.clone(),
        sandbox: run.sandbox.as_ref().map(|sandbox| sandbox.name.to_string()),
        own_sandbox: run.own,
        on_accept: run.spec.on_accept,
        keep_ms: run.spec.keep.0,
        timeout_ms: run.spec.timeout.map(|span| span.0),
        retries: run.spec.retries,
        heartbeat_ms: run.spec.command.is_none().then_some(run.spec.heartbeat.0),
        first_snapshot: run.first.as_ref().map(ToString::to_string),
        last_snapshot: run.last.as_ref().map(ToString::to_string),
        pending_approvals: pending.map(|approval| approval.id.into()).collect(),
        cost: run.cost,
        usage: run.usage.map(wire::usage),
        decision: run.decision.clone().map(|decision| types::RunDecision {
            accepted: decision.how.is_some(),
            how: decision.how,
            by: decision.by.into(),
            at: decision.at.to_string(),
            comment: decision.comment,
        }),
        by: run.by.to_string(),
        queued_at: run.queued_at.to_string(),
        started_at: text(run.started_at),
        finished_at: text(run.finished_at),
        ended_at: text(run.ended_at),
        review_by: text(run.review_by()),
        spending: run.spec.spending.iter().map(|limit| spending_out(&run, limit)).collect(),
        attempts: run.attempts.into_iter().map(attempt_out).collect(),
        place: place_out(run.spec.place),
        command: run.spec.command,
        repository: run.spec.repository,
        owner: run.spec.owner,
        purpose: run.spec.purpose,
        class: run.spec.class,
        priority: run.spec.priority,
        approve: run.spec.approve,
        approve_hosts: run.spec.approve_hosts,
        known_hosts: run.spec.known_hosts,
        approve_secrets: run.spec.approve_secrets,
    }
}

/// A run with all its texts.
async fn run_whole(app: &App, run: model::Run) -> types::Run {
    let mut whole = app.engine.whole_runs(vec![run.clone()]).await;
    run_out(app, whole.pop().unwrap_or(run))
}

fn spending_out(run: &model::Run, limit: &types::SpendingLimit) -> types::RunSpending {
    let step = limit.step.unwrap_or(limit.limit);
    types::RunSpending { what: limit.what, allowed: run.allowed(limit), step }
}

fn contact_out(place: DestinationTraffic) -> types::RunContact {
    types::RunContact {
        host: place.host,
        connections: place.connections,
        denied: place.denied,
        bytes_in: place.bytes_in,
        bytes_out: place.bytes_out,
    }
}

fn review_out(app: &App, review: Review) -> types::RunReview {
    let (counts, changes, truncated, problem) = match review.difference {
        Ok(difference) => {
            let tree = difference.tree;
            (Some(tree.counts), tree.entries(), tree.truncated, None)
        }
        Err(problem) => (None, Vec::new(), false, Some(problem)),
    };
    types::RunReview {
        run: run_out(app, review.run),
        from: review.from,
        to: review.to,
        counts,
        changes,
        truncated,
        problem,
        current: review.current,
        commands: review.commands.into_iter().map(wire::command).collect(),
        network: review.network.into_iter().map(contact_out).collect(),
        findings: guard::findings(review.findings),
        approvals: review.approvals.into_iter().map(approval_out).collect(),
    }
}
