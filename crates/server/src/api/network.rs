//! What sandboxes may reach, and what they reached.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use sandkeep_client::types;
use sandkeep_core::engine::{ConnectionFilter, ConnectionHost};
use sandkeep_core::model::{Connection, Name, Protocol, Sandbox, Span, Timestamp, Verdict, now};

use super::input::{Body, Params, PathParam, parsed};
use super::policy::{policy_in, policy_out, project_in, project_out};
use super::{ApiResult, App, finish};
use crate::auth::{Admin, Reader, Writer};
use crate::error::ApiError;

/// Shows the network policy of a sandbox, and whether it is its own. Header values are not shown.
#[utoipa::path(get, path = "/v1/sandboxes/{name}/network", tag = "network", operation_id = "get_network",
    params(("name" = String, Path, description = "The sandbox's name.")),
    responses((status = 200, description = "What it may reach.", body = types::SandboxNetwork)))]
pub(crate) async fn get(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
) -> ApiResult<types::SandboxNetwork> {
    params.end()?;
    let sandbox = app.engine.get(&caller.project, &name).await?.sandbox;
    Ok(Json(in_force(&app, sandbox)?))
}

fn in_force(app: &App, sandbox: Sandbox) -> Result<types::SandboxNetwork, ApiError> {
    let project = app.engine.project_network(&sandbox.project)?;
    let own = sandbox.config.network.is_some();
    Ok(types::SandboxNetwork {
        network: policy_out(sandbox.config.network.unwrap_or(project.default)),
        own,
        bound: project.bound.map(policy_out),
    })
}

/// Changes the network policy of a sandbox immediately. Connections that it forbids are cut.
#[utoipa::path(put, path = "/v1/sandboxes/{name}/network", tag = "network", operation_id = "set_network",
    params(("name" = String, Path, description = "The sandbox's name.")),
    request_body = types::SetNetwork,
    responses((status = 200, description = "What it may reach now.", body = types::SandboxNetwork)))]
pub(crate) async fn set(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
    Body(request): Body<types::SetNetwork>,
) -> ApiResult<types::SandboxNetwork> {
    params.end()?;
    let before = app.engine.get(&caller.project, &name).await?.sandbox.config.network;
    let read = |network| policy_in("network", network, before.as_ref());
    let policy = request.network.map(read).transpose()?;
    let engine = app.engine.clone();
    let work = async move { engine.set_network(&caller.project, &name, policy).await };
    let sandbox = finish(&app, work).await?;
    Ok(Json(in_force(&app, sandbox)?))
}

/// Lists the network connections of a sandbox, allowed and refused, newest first.
#[utoipa::path(get, path = "/v1/sandboxes/{name}/connections", tag = "network", operation_id = "list_connections",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("verdict" = Option<types::Verdict>, Query, description = "Only connections with this verdict."),
        ("session" = Option<String>, Query, description = "Only connections of this session."),
        ("host" = Option<String>, Query, description = "Only connections to this name, to names like `*.example.com`, or to this address."),
        ("since" = Option<String>, Query, description = "Only connections that had not ended before a time, or before a span ago, like `1h`."),
        ("open" = Option<bool>, Query, description = "Only open connections."),
        ("limit" = Option<u32>, Query, description = "Maximum number of items: 1 to 1000, 100 if absent."),
        ("cursor" = Option<String>, Query, description = "`next` of the previous page."),
    ),
    responses((status = 200, description = "A page of the list.", body = types::Paged<types::Connection>)))]
pub(crate) async fn connections(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    mut params: Params,
) -> ApiResult<types::Paged<types::Connection>> {
    let filter = filter(&mut params)?;
    let page = params.page()?;
    params.end()?;
    let (limit, cursor) = (page.limit as usize, page.cursor.as_deref());
    let found = app.engine.connections(&caller.project, &name, &filter, limit, cursor).await?;
    let now = now();
    let items = found.items.into_iter().map(|it| connection(it, now)).collect();
    Ok(Json(types::Paged { items, next: found.next }))
}

/// Sums up the recorded network connections of a sandbox by destination.
#[utoipa::path(get, path = "/v1/sandboxes/{name}/connections/summary", tag = "network", operation_id = "summarize_connections",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("verdict" = Option<types::Verdict>, Query, description = "Only connections with this verdict."),
        ("session" = Option<String>, Query, description = "Only connections of this session."),
        ("host" = Option<String>, Query, description = "Only connections to this name, to names like `*.example.com`, or to this address."),
        ("since" = Option<String>, Query, description = "Only connections that had not ended before a time, or before a span ago, like `1h`."),
        ("open" = Option<bool>, Query, description = "Only open connections."),
    ),
    responses((status = 200, description = "Sums by destination, most bytes first.", body = types::NetworkSummary)))]
pub(crate) async fn summary(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    mut params: Params,
) -> ApiResult<types::NetworkSummary> {
    let filter = filter(&mut params)?;
    params.end()?;
    let found = app.engine.destinations(&caller.project, &name, &filter).await?;
    let sum = |of: fn(&types::Destination) -> u64, all: &[types::Destination]| -> u64 {
        all.iter().map(of).sum()
    };
    let destinations: Vec<types::Destination> = found
        .into_iter()
        .map(|it| types::Destination {
            host: it.host,
            connections: it.connections,
            denied: it.denied,
            bytes_in: it.bytes_in,
            bytes_out: it.bytes_out,
            last_at: it.last_at.to_string(),
        })
        .collect();
    Ok(Json(types::NetworkSummary {
        connections: sum(|it| it.connections, &destinations),
        denied: sum(|it| it.denied, &destinations),
        bytes_in: sum(|it| it.bytes_in, &destinations),
        bytes_out: sum(|it| it.bytes_out, &destinations),
        destinations,
    }))
}

fn filter(params: &mut Params) -> Result<ConnectionFilter, ApiError> {
    let verdict = params.word::<types::Verdict>("verdict")?.map(|verdict| match verdict {
        types::Verdict::Allowed => Verdict::Allowed,
        types::Verdict::Denied => Verdict::Denied,
        types::Verdict::Cut => Verdict::Cut,
        types::Verdict::Failed => Verdict::Failed,
    });
    Ok(ConnectionFilter {
        verdict,
        session: params.text("session")?.map(|id| parsed("`session`", &id)).transpose()?,
        host: params.text("host")?.map(|text| host(&text)).transpose()?,
        since: params.text("since")?.map(|text| since(&text)).transpose()?,
        open: params.flag("open")?,
    })
}

fn host(text: &str) -> Result<ConnectionHost, ApiError> {
    match text.parse() {
        Ok(address) => Ok(ConnectionHost::Address(address)),
        Err(_) => parsed("`host`", text).map(ConnectionHost::Name),
    }
}

/// A time, or so long ago.
fn since(text: &str) -> Result<Timestamp, ApiError> {
    if let Ok(time) = text.parse() {
        return Ok(time);
    }
    let ago = text.parse::<Span>().ok().and_then(|span| i64::try_from(span.0).ok());
    let time = ago.and_then(|ms| Timestamp::from_millisecond(now().as_millisecond() - ms).ok());
    time.ok_or_else(|| {
        ApiError::invalid(format!(
            "`since`: `{text}` is neither a time like `2026-01-31T12:00:00Z` nor a span like `1h`"
        ))
    })
}

fn connection(it: Connection, now: Timestamp) -> types::Connection {
    let lasted = it.ended_at.unwrap_or(now).as_millisecond() - it.at.as_millisecond();
    types::Connection {
        session: it.session.into(),
        id: it.id,
        at: it.at.to_string(),
        ended_at: it.ended_at.map(|time| time.to_string()),
        duration_ms: u64::try_from(lasted).unwrap_or(0),
        protocol: match it.protocol {
            Protocol::Tcp => types::Protocol::Tcp,
            Protocol::Udp => types::Protocol::Udp,
            Protocol::Icmp => types::Protocol::Icmp,
            Protocol::Dns => types::Protocol::Dns,
            Protocol::Http => types::Protocol::Http,
        },
        to: it.to.map(|to| to.to_string()),
        name: it.name,
        verdict: match it.verdict {
            Verdict::Allowed => types::Verdict::Allowed,
            Verdict::Denied => types::Verdict::Denied,
            Verdict::Cut => types::Verdict::Cut,
            Verdict::Failed => types::Verdict::Failed,
        },
        rule: it.rule,
        bytes_in: it.bytes_in,
        bytes_out: it.bytes_out,
        detail: it.detail,
    }
}

/// Shows the default network policy of a project, and its bound.
#[utoipa::path(get, path = "/v1/projects/{project}/network", tag = "projects", operation_id = "get_project_network",
    params(("project" = String, Path, description = "The project's name.")),
    responses((status = 200, description = "Default and bound.", body = types::ProjectNetwork)))]
pub(crate) async fn of_project(
    _: Admin,
    State(app): State<Arc<App>>,
    PathParam(project): PathParam<Name>,
    params: Params,
) -> ApiResult<types::ProjectNetwork> {
    params.end()?;
    Ok(Json(project_out(app.engine.project_network(&project)?)))
}

/// Sets what a project says about the network of its sandboxes, at once: the default for those that have no
/// policy of their own, and the bound that none gets beyond.
#[utoipa::path(put, path = "/v1/projects/{project}/network", tag = "projects", operation_id = "set_project_network",
    params(("project" = String, Path, description = "The project's name.")),
    request_body = types::ProjectNetwork,
    responses((status = 200, description = "Default and bound.", body = types::ProjectNetwork)))]
pub(crate) async fn set_for_project(
    _: Admin,
    State(app): State<Arc<App>>,
    PathParam(project): PathParam<Name>,
    params: Params,
    Body(request): Body<types::ProjectNetwork>,
) -> ApiResult<types::ProjectNetwork> {
    params.end()?;
    let network = project_in(request, &app.engine.project_network(&project)?)?;
    let engine = app.engine.clone();
    let work = async move { engine.set_project_network(&project, network).await };
    Ok(Json(project_out(finish(&app, work).await?)))
}
