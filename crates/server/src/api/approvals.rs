//! Approvals: ask, list, answer.

use std::sync::Arc;

use axum::Json;
use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use sandkeep_client::types;
use sandkeep_core::engine::{ApprovalFilter, AskRequest, Caller};
use sandkeep_core::model::{self, ApprovalId, Name};

use super::input::{Body, Params, PathParam, parsed};
use super::runs::wait_of;
use super::{ApiResult, App, finish, wire};
use crate::audit;
use crate::auth::{Approver, Reader, Writer};
use crate::error::ApiError;

/// Asks for an approval about a sandbox. A run under way in it waits for the answer. Never wakes the sandbox.
#[utoipa::path(post, path = "/v1/sandboxes/{name}/approvals", tag = "approvals", operation_id = "ask_approval",
    params(("name" = String, Path, description = "The sandbox's name.")),
    request_body = types::AskApproval,
    responses((status = 201, description = "The approval.", body = types::Approval)))]
pub(crate) async fn ask(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
    Body(request): Body<types::AskApproval>,
) -> Result<(StatusCode, Json<types::Approval>), ApiError> {
    params.end()?;
    let types::AskApproval { question, context, expires, default } = request;
    let request = AskRequest { question, context, expires, default };
    let engine = app.engine.clone();
    let work = async move { engine.ask_approval(&caller, &name, request).await };
    let asked = finish(&app, work).await?;
    Ok((StatusCode::CREATED, Json(approval_out(asked))))
}

/// Lists approvals, newest first.
#[utoipa::path(get, path = "/v1/approvals", tag = "approvals", operation_id = "list_approvals",
    params(
        ("status" = Option<String>, Query, description = "Only with this status, like `pending`."),
        ("sandbox" = Option<String>, Query, description = "Only about the sandbox of this name."),
        ("run" = Option<String>, Query, description = "Only of this run."),
        ("limit" = Option<u32>, Query, description = "Between 1 and 1000; 100 if absent."),
        ("cursor" = Option<String>, Query, description = "`next` of the page before."),
    ),
    responses((status = 200, description = "One page.", body = types::Paged<types::Approval>)))]
pub(crate) async fn list(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    mut params: Params,
) -> ApiResult<types::Paged<types::Approval>> {
    let filter = ApprovalFilter {
        status: params.word("status")?,
        sandbox: params.text("sandbox")?.map(|it| parsed("sandbox", &it)).transpose()?,
        run: params.text("run")?.map(|it| parsed("run", &it)).transpose()?,
    };
    let page = params.page()?;
    params.end()?;
    let mut found = app.engine.approvals(&caller.project, &filter, &page)?;
    found.items = app.engine.whole_approvals(found.items).await;
    Ok(Json(wire::paged(found, approval_out)))
}

/// Shows an approval. With `wait`, once it is answered, or after that time.
#[utoipa::path(get, path = "/v1/approvals/{id}", tag = "approvals", operation_id = "get_approval",
    params(
        ("id" = String, Path, description = "The approval's id."),
        ("wait" = Option<u64>, Query, description = "Seconds, at most 60."),
    ),
    responses((status = 200, description = "The approval.", body = types::Approval)))]
pub(crate) async fn get(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(id): PathParam<ApprovalId>,
    mut params: Params,
) -> ApiResult<types::Approval> {
    let wait = wait_of(&mut params)?;
    params.end()?;
    if let Some(wait) = wait {
        let answered = app.engine.approval_answered(&caller.project, &id);
        // Its state after that time is returned below.
        if let Ok(Err(error)) = tokio::time::timeout(wait, answered).await {
            return Err(error.into());
        }
    }
    let found = app.engine.approval(&caller.project, &id)?;
    let whole = app.engine.whole_approvals(vec![found.clone()]).await.pop();
    Ok(Json(approval_out(whole.unwrap_or(found))))
}

/// Answers an approval. Needs a key that may approve, or the token of a link that a webhook got.
#[utoipa::path(post, path = "/v1/approvals/{id}/answer", tag = "approvals", operation_id = "answer_approval",
    params(
        ("id" = String, Path, description = "The approval's id."),
        ("token" = Option<String>, Query, description = "The token of `answer_url` in the delivery of a webhook; no key is needed with it, and none is looked at."),
    ),
    request_body = types::AnswerApproval,
    responses((status = 200, description = "The approval. If it was answered before, the answer is 409 `already_answered`.",
        body = types::Approval)))]
pub(crate) async fn answer(
    approver: LinkOrApprover,
    State(app): State<Arc<App>>,
    PathParam(id): PathParam<ApprovalId>,
    mut params: Params,
    Body(request): Body<types::AnswerApproval>,
) -> ApiResult<types::Approval> {
    params.all("token");
    params.end()?;
    let types::AnswerApproval { answer, comment } = request;
    audit::detail("answer", format!("{answer:?}").to_lowercase());
    let engine = app.engine.clone();
    let work = async move {
        match approver {
            LinkOrApprover::Approver(caller) => {
                engine.answer_approval(&caller, &id, answer, comment).await
            }
            LinkOrApprover::Link(token) => {
                engine.answer_by_link(&token, &id, answer, comment).await
            }
        }
    };
    Ok(Json(approval_out(finish(&app, work).await?)))
}

/// Who answers an approval. As with keys, nothing else of a request is looked at before a link was.
pub(crate) enum LinkOrApprover {
    /// Somebody with the token of a link, which is good.
    Link(String),
    /// A caller that may approve.
    Approver(Caller),
}

impl FromRequestParts<Arc<App>> for LinkOrApprover {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        let mut params = Params::from_request_parts(parts, app).await?;
        let Some(token) = params.text("token")? else {
            let Approver(caller) = Approver::from_request_parts(parts, app).await?;
            return Ok(Self::Approver(caller));
        };
        let PathParam(id) = PathParam::<ApprovalId>::from_request_parts(parts, app).await?;
        let link = app.engine.answer_link(&token, &id)?;
        audit::webhook(&link);
        Ok(Self::Link(token))
    }
}

pub(super) fn approval_out(approval: model::Approval) -> types::Approval {
    types::Approval {
        id: approval.id.into(),
        project: approval.project.into(),
        sandbox: approval.sandbox.name.into(),
        run: approval.run.map(Into::into),
        source: approval.source,
        subject: approval.subject,
        target: approval.target,
        question: approval.question,
        context: approval.context,
        status: approval.status,
        default: approval.default,
        asked_by: approval.asked_by.map(Into::into),
        asked_at: approval.asked_at.to_string(),
        expires_at: approval.expires_at.to_string(),
        answered_by: approval.answered_by.map(Into::into),
        answered_at: approval.answered_at.map(|at| at.to_string()),
        comment: approval.comment,
    }
}
