//! Webhooks.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use sandkeep_client::types;
use sandkeep_core::engine::{Caller, CreateWebhook, Error, UpdateWebhook, WebhookStatus};
use sandkeep_core::model::{Scope, WebhookDelivery, WebhookId};

use super::input::{Body, MaybeBody, Params, PathParam};
use super::{ApiResult, App, finish};
use crate::audit;
use crate::auth::{Reader, Writer};
use crate::error::ApiError;

/// Lists the webhooks of the project.
#[utoipa::path(get, path = "/v1/webhooks", tag = "webhooks", operation_id = "list_webhooks",
    responses((status = 200, description = "All of them on one page.", body = types::Paged<types::Webhook>)))]
pub(crate) async fn list(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    params: Params,
) -> ApiResult<types::Paged<types::Webhook>> {
    params.end()?;
    let items = app.engine.webhooks(&caller.project).into_iter().map(out).collect();
    Ok(Json(types::Paged { items, next: None }))
}

/// Creates a webhook. It gets events from now on. Its secret is shown this once.
#[utoipa::path(post, path = "/v1/webhooks", tag = "webhooks", operation_id = "create_webhook",
    request_body = types::CreateWebhook,
    responses((status = 201, description = "The webhook, with its secret.", body = types::NewWebhook)))]
pub(crate) async fn create(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    params: Params,
    Body(request): Body<types::CreateWebhook>,
) -> Result<(StatusCode, Json<types::NewWebhook>), ApiError> {
    params.end()?;
    may_allow(&caller, request.allow_private)?;
    let types::CreateWebhook { url, events, secret, allow_private, answers } = request;
    if answers && !caller.approve {
        return Err(Error::WebhookAnswers.into());
    }
    let by = Some(caller.key.clone());
    let answers = answers.then(|| caller.key.clone());
    let create = CreateWebhook { url, events, secret, allow_private, answers, by };
    let engine = app.engine.clone();
    let work = async move { engine.create_webhook(&caller.project, create).await };
    let (made, secret) = finish(&app, work).await?;
    audit::target("webhook", &made.webhook.id);
    audit::detail("host", host_of(&made.webhook.url));
    audit::detail("answers", made.webhook.answers.is_some());
    let answer = types::NewWebhook { webhook: out(made), secret: secret.to_string() };
    Ok((StatusCode::CREATED, Json(answer)))
}

/// Shows a webhook with its last deliveries.
#[utoipa::path(get, path = "/v1/webhooks/{id}", tag = "webhooks", operation_id = "get_webhook",
    params(("id" = String, Path, description = "Its id.")),
    responses((status = 200, description = "The webhook.", body = types::Webhook)))]
pub(crate) async fn get(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(id): PathParam<WebhookId>,
    params: Params,
) -> ApiResult<types::Webhook> {
    params.end()?;
    Ok(Json(out(app.engine.webhook(&caller.project, &id)?)))
}

/// Changes, disables or enables a webhook. One that is enabled again continues where it was.
#[utoipa::path(patch, path = "/v1/webhooks/{id}", tag = "webhooks", operation_id = "update_webhook",
    params(("id" = String, Path, description = "Its id.")),
    request_body = types::UpdateWebhook,
    responses((status = 200, description = "The webhook.", body = types::Webhook)))]
pub(crate) async fn update(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(id): PathParam<WebhookId>,
    params: Params,
    Body(request): Body<types::UpdateWebhook>,
) -> ApiResult<types::Webhook> {
    params.end()?;
    let may_allow_private = caller.scope == Scope::Admin;
    let approver = caller.approve.then(|| caller.key.clone());
    let types::UpdateWebhook { url, events, allow_private, answers, enabled } = request;
    let change =
        UpdateWebhook { url, events, allow_private, enabled, answers, may_allow_private, approver };
    let engine = app.engine.clone();
    let work = async move { engine.update_webhook(&caller.project, &id, change).await };
    let changed = finish(&app, work).await?;
    audit::detail("host", host_of(&changed.webhook.url));
    audit::detail("answers", changed.webhook.answers.is_some());
    Ok(Json(out(changed)))
}

/// Gives a webhook another secret, which is shown this once. Deliveries are signed with the one before, too.
#[utoipa::path(post, path = "/v1/webhooks/{id}/rotate", tag = "webhooks", operation_id = "rotate_webhook_secret",
    params(("id" = String, Path, description = "Its id.")),
    request_body = Option<types::RotateWebhookSecret>,
    responses((status = 200, description = "The webhook, with its secret.", body = types::NewWebhook)))]
pub(crate) async fn rotate(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(id): PathParam<WebhookId>,
    params: Params,
    MaybeBody(request): MaybeBody<types::RotateWebhookSecret>,
) -> ApiResult<types::NewWebhook> {
    params.end()?;
    let types::RotateWebhookSecret { secret, only } = request;
    let engine = app.engine.clone();
    let work = async move { engine.rotate_webhook(&caller.project, &id, secret, only).await };
    let (webhook, secret) = finish(&app, work).await?;
    Ok(Json(types::NewWebhook { webhook: out(webhook), secret: secret.to_string() }))
}

/// Sends an event of kind `webhook.test`, once, and tells what came of it.
#[utoipa::path(post, path = "/v1/webhooks/{id}/test", tag = "webhooks", operation_id = "test_webhook",
    params(("id" = String, Path, description = "Its id.")),
    responses((status = 200, description = "What came of it.", body = types::WebhookDelivery)))]
pub(crate) async fn test(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(id): PathParam<WebhookId>,
    params: Params,
) -> ApiResult<types::WebhookDelivery> {
    params.end()?;
    Ok(Json(delivery(app.engine.test_webhook(&caller.project, &id).await?)))
}

/// Deletes a webhook.
#[utoipa::path(delete, path = "/v1/webhooks/{id}", tag = "webhooks", operation_id = "delete_webhook",
    params(("id" = String, Path, description = "Its id.")),
    responses((status = 204, description = "It was deleted.")))]
pub(crate) async fn remove(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(id): PathParam<WebhookId>,
    params: Params,
) -> Result<StatusCode, ApiError> {
    params.end()?;
    let engine = app.engine.clone();
    finish(&app, async move { engine.delete_webhook(&caller.project, &id).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn may_allow(caller: &Caller, asked: bool) -> Result<(), ApiError> {
    if asked && caller.scope < Scope::Admin {
        return Err(Error::PrivateWebhook.into());
    }
    Ok(())
}

/// The host of an address: its path may hold a token.
fn host_of(url: &str) -> String {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    rest.split(['/', '?']).next().unwrap_or_default().to_owned()
}

fn out(status: WebhookStatus) -> types::Webhook {
    let WebhookStatus { webhook, failing_since, deliveries } = status;
    types::Webhook {
        id: webhook.id.into(),
        url: webhook.url,
        events: webhook.events,
        allow_private: webhook.allow_private,
        answers: webhook.answers.is_some(),
        answers_allowed_by: webhook.answers.map(|answers| answers.allowed_by.into()),
        secrets: u32::try_from(webhook.secrets.len()).unwrap_or(u32::MAX),
        created_at: webhook.created_at.to_string(),
        enabled: webhook.disabled.is_none(),
        disabled_at: webhook.disabled.as_ref().map(|disabled| disabled.at.to_string()),
        disabled_reason: webhook.disabled.map(|disabled| disabled.reason),
        failing_since: failing_since.map(|since| since.to_string()),
        deliveries: deliveries.into_iter().rev().map(delivery).collect(),
    }
}

fn delivery(one: WebhookDelivery) -> types::WebhookDelivery {
    types::WebhookDelivery {
        event: one.event.to_string(),
        kind: one.kind,
        at: one.at.to_string(),
        attempt: one.attempt,
        delivered: one.error.is_none(),
        status: one.status,
        error: one.error,
        duration_ms: one.duration_ms,
    }
}
