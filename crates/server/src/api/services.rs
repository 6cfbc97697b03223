//! Services: commands that belong to a sandbox and are started again after every resume.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use sandkeep_client::types;
use sandkeep_core::engine::{ServiceState as Standing, ServiceStatus};
use sandkeep_core::model::{self, Name};

use super::input::{Body, Params, PathParam, parsed};
use super::{ApiResult, App, finish};
use crate::auth::{Reader, Writer};
use crate::error::ApiError;

/// Lists the services of a sandbox and their state. Never wakes it.
#[utoipa::path(get, path = "/v1/sandboxes/{name}/services", tag = "services", operation_id = "list_services",
    params(("name" = String, Path, description = "The sandbox's name.")),
    responses((status = 200, description = "All of them on one page.", body = types::Paged<types::ServiceStatus>)))]
pub(crate) async fn list(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
) -> ApiResult<types::Paged<types::ServiceStatus>> {
    params.end()?;
    let all = app.engine.services(&caller.project, &name).await?;
    let items = all.into_iter().map(service_status).collect();
    Ok(Json(types::Paged { items, next: None }))
}

/// Adds or changes a service. In a running sandbox this takes effect immediately.
#[utoipa::path(put, path = "/v1/sandboxes/{name}/services/{service}", tag = "services", operation_id = "set_service",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("service" = String, Path, description = "The service's name."),
    ),
    request_body = types::SetService,
    responses((status = 200, description = "The service and its state.", body = types::ServiceStatus)))]
pub(crate) async fn set(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam((name, service)): PathParam<(Name, Name)>,
    params: Params,
    Body(request): Body<types::SetService>,
) -> ApiResult<types::ServiceStatus> {
    params.end()?;
    let service = service_in(request.named(service.into()))?;
    let engine = app.engine.clone();
    let work = async move { engine.set_service(&caller.project, &name, service).await };
    Ok(Json(service_status(finish(&app, work).await?)))
}

/// Stops and removes a service.
#[utoipa::path(delete, path = "/v1/sandboxes/{name}/services/{service}", tag = "services", operation_id = "remove_service",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("service" = String, Path, description = "The service's name."),
    ),
    responses((status = 204, description = "It was deleted.")))]
pub(crate) async fn remove(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam((name, service)): PathParam<(Name, Name)>,
    params: Params,
) -> Result<StatusCode, ApiError> {
    params.end()?;
    let engine = app.engine.clone();
    let work = async move { engine.remove_service(&caller.project, &name, &service).await };
    finish(&app, work).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Starts a service, and its sandbox if needed. A running service is left alone.
#[utoipa::path(post, path = "/v1/sandboxes/{name}/services/{service}/start", tag = "services", operation_id = "start_service",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("service" = String, Path, description = "The service's name."),
    ),
    responses((status = 200, description = "The service and its state.", body = types::ServiceStatus)))]
pub(crate) async fn start(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam((name, service)): PathParam<(Name, Name)>,
    params: Params,
) -> ApiResult<types::ServiceStatus> {
    params.end()?;
    let engine = app.engine.clone();
    let work = async move { engine.start_service(&caller.project, &name, &service).await };
    Ok(Json(service_status(finish(&app, work).await?)))
}

/// Stops a service until the next session, or until it is started by hand. Never wakes.
#[utoipa::path(post, path = "/v1/sandboxes/{name}/services/{service}/stop", tag = "services", operation_id = "stop_service",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("service" = String, Path, description = "The service's name."),
    ),
    responses((status = 200, description = "The service and its state.", body = types::ServiceStatus)))]
pub(crate) async fn stop(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam((name, service)): PathParam<(Name, Name)>,
    params: Params,
) -> ApiResult<types::ServiceStatus> {
    params.end()?;
    let engine = app.engine.clone();
    let work = async move { engine.stop_service(&caller.project, &name, &service).await };
    Ok(Json(service_status(finish(&app, work).await?)))
}

pub(super) fn service_out(service: model::Service) -> types::Service {
    types::Service {
        name: service.name.into(),
        argv: service.argv,
        env: service.env,
        cwd: service.cwd,
        user: service.user,
        port: service.port,
        restart: service.restart,
        start: service.start,
    }
}

pub(super) fn service_in(service: types::Service) -> Result<model::Service, ApiError> {
    Ok(model::Service {
        name: parsed("services.name", &service.name)?,
        argv: service.argv,
        env: service.env,
        cwd: service.cwd,
        user: service.user,
        port: service.port,
        restart: service.restart,
        start: service.start,
    })
}

fn service_status(status: ServiceStatus) -> types::ServiceStatus {
    let mut told = types::ServiceStatus {
        service: service_out(status.service),
        state: types::ServiceState::Stopped,
        since: None,
        restarts_at: None,
        exit_code: None,
        problem: None,
        failures: status.failures,
        command: status.command.map(Into::into),
    };
    told.state = match status.state {
        Standing::Stopped => types::ServiceState::Stopped,
        Standing::Starting => types::ServiceState::Starting,
        Standing::Running { since } => {
            told.since = Some(since.to_string());
            types::ServiceState::Running
        }
        Standing::Restarting { at, problem } => {
            told.restarts_at = Some(at.to_string());
            told.problem = Some(problem);
            types::ServiceState::Restarting
        }
        Standing::Exited { code } => {
            told.exit_code = Some(code);
            types::ServiceState::Exited
        }
        Standing::Failed { problem } => {
            told.problem = Some(problem);
            types::ServiceState::Failed
        }
    };
    told
}
