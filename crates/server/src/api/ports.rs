//! Ports inside a sandbox: how they are published, tokens for them, and connections to them, as a
//! WebSocket or as a plain stream of bytes.

use std::sync::Arc;

use axum::Json;
use axum::extract::ws::{CloseFrame, Message, WebSocket, close_code};
use axum::extract::{FromRequestParts, Request, State};
use axum::http::StatusCode;
use axum::http::header::{CONNECTION, HOST, UPGRADE};
use axum::http::request::Parts;
use axum::response::{IntoResponse as _, Response};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use hyper_util::rt::TokioIo;
use sandkeep_client::types::{self, error_chain};
use sandkeep_core::engine::{Error, WakeMode};
use sandkeep_core::guest::{Incoming, Outgoing};
use sandkeep_core::model::{Access, Name, Patch, Port, Sandbox, Span};

use super::input::{Body, MaybeBody, Params, PathParam, Upgrade};
use super::{ApiResult, App, finish};
use crate::auth::{Reader, Writer};
use crate::error::ApiError;
use crate::gateway;
use crate::listen::Peer;

/// How long a token for a port works by default.
const TOKEN_SPAN: Span = Span(12 * 3600 * 1000);
/// What a plain stream of bytes is called where a connection is upgraded to one.
const PROTOCOL: &str = "tcp";

/// The address under which the caller reaches this server, as far as it is known.
#[derive(Debug)]
pub(crate) struct Base(String);

impl FromRequestParts<Arc<App>> for Base {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, app: &Arc<App>) -> Result<Self, ApiError> {
        let outside = parts.extensions.get::<Peer>().is_some_and(|peer| peer.0.is_some());
        let said = parts.headers.get(HOST).and_then(|host| host.to_str().ok());
        // A client of the socket file sends no useful host name.
        let host = match said {
            Some(host) if outside => Some(host.to_owned()),
            _ => app.local.map(|at| match at.ip().is_unspecified() {
                true => format!("localhost:{}", at.port()),
                false => at.to_string(),
            }),
        };
        let public_url = app.gateway.public_url.as_deref();
        Ok(Self(gateway::base_url(public_url, host.as_deref(), app.gateway.tls)))
    }
}

fn access(access: Access) -> types::Access {
    match access {
        Access::Public => types::Access::Public,
        Access::Private => types::Access::Private,
    }
}

/// Who may reach a port; `None` for nobody.
fn access_in(access: types::Access) -> Option<Access> {
    match access {
        types::Access::Public => Some(Access::Public),
        types::Access::Private => Some(Access::Private),
        types::Access::Off => None,
    }
}

pub(super) fn port_out(port: Port) -> types::Port {
    types::Port { port: port.number, access: access(port.access), wake: port.wake }
}

/// Those that are off are as good as not there, but their numbers are checked all the same.
pub(super) fn ports_in(ports: Vec<types::Port>) -> Result<Vec<Port>, ApiError> {
    if ports.iter().any(|port| port.port == 0) {
        return Err(ApiError::invalid("ports: between 1 and 65535"));
    }
    let port = |port: types::Port| {
        let access = access_in(port.access)?;
        Some(Port { number: port.port, access, wake: port.wake })
    };
    Ok(ports.into_iter().filter_map(port).collect())
}

fn status(
    app: &App,
    base: &str,
    sandbox: &Sandbox,
    port: Option<Port>,
    number: u16,
) -> types::PortStatus {
    let (url, path_url) = gateway::addresses(&app.gateway, base, sandbox, number);
    let service = sandbox.config.services.iter().find(|service| service.port == Some(number));
    types::PortStatus {
        port: number,
        access: port.map_or(types::Access::Off, |port| access(port.access)),
        wake: port.is_some_and(|port| port.wake),
        url,
        path_url,
        service: service.map(|service| service.name.to_string()),
    }
}

/// Lists the ports that a sandbox publishes, and where they are reached. Never wakes it.
#[utoipa::path(get, path = "/v1/sandboxes/{name}/ports", tag = "ports", operation_id = "list_ports",
    params(("name" = String, Path, description = "The sandbox's name.")),
    responses((status = 200, description = "All of them on one page.", body = types::Paged<types::PortStatus>)))]
pub(crate) async fn list(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    Base(base): Base,
    params: Params,
) -> ApiResult<types::Paged<types::PortStatus>> {
    params.end()?;
    let sandbox = app.engine.get(&caller.project, &name).await?.sandbox;
    let tell = |port: &Port| status(&app, &base, &sandbox, Some(*port), port.number);
    let items = sandbox.config.ports.iter().map(tell).collect();
    Ok(Json(types::Paged { items, next: None }))
}

/// Publishes a port, changes its access, or stops publishing it.
#[utoipa::path(put, path = "/v1/sandboxes/{name}/ports/{port}", tag = "ports", operation_id = "publish_port",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("port" = u16, Path, description = "The port."),
    ),
    request_body = types::PublishPort,
    responses((status = 200, description = "The port, and where it is reached.", body = types::PortStatus)))]
pub(crate) async fn publish(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam((name, number)): PathParam<(Name, u16)>,
    Base(base): Base,
    params: Params,
    Body(request): Body<types::PublishPort>,
) -> ApiResult<types::PortStatus> {
    params.end()?;
    let types::PublishPort { access, wake } = request;
    let port = access_in(access).map(|access| Port { number, access, wake });
    let patch = Patch {
        publish: port.into_iter().collect(),
        unpublish: if port.is_none() { vec![number] } else { Vec::new() },
        ..Patch::default()
    };
    let engine = app.engine.clone();
    let work = async move { engine.update(&caller.project, &name, patch).await };
    let sandbox = finish(&app, work).await?;
    Ok(Json(status(&app, &base, &sandbox, port, number)))
}

/// Creates a token for a private port.
#[utoipa::path(post, path = "/v1/sandboxes/{name}/ports/{port}/token", tag = "ports", operation_id = "issue_port_token",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("port" = u16, Path, description = "The port."),
    ),
    request_body = Option<types::IssuePortToken>,
    responses((status = 200, description = "The token. It is revoked together with the key.", body = types::PortToken)))]
pub(crate) async fn issue_token(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam((name, number)): PathParam<(Name, u16)>,
    Base(base): Base,
    params: Params,
    MaybeBody(request): MaybeBody<types::IssuePortToken>,
) -> ApiResult<types::PortToken> {
    params.end()?;
    let sandbox = app.engine.get(&caller.project, &name).await?.sandbox;
    let port = sandbox.config.ports.iter().find(|port| port.number == number);
    match port.map(|port| port.access) {
        Some(Access::Private) => {}
        Some(Access::Public) => {
            let message = format!("port {number} is public: it needs no token");
            return Err(ApiError::new(StatusCode::CONFLICT, "port_public", message));
        }
        None => {
            return Err(Error::NoPort { sandbox: sandbox.id.clone(), port: number }.into());
        }
    }
    let expires = request.expires;
    let expires = expires.unwrap_or(TOKEN_SPAN);
    if expires.0 < 1000 {
        return Err(ApiError::invalid("expires: at least 1s"));
    }
    let (token, until) = app.engine.issue_port_token(&caller, &sandbox.id, number, expires)?;
    let (url, _) = gateway::addresses(&app.gateway, &base, &sandbox, number);
    let url = format!("{url}?keep_token={token}");
    Ok(Json(types::PortToken { token, url, expires_at: until.to_string() }))
}

/// Connects to a port on the sandbox's loopback, published or not: the connection is upgraded to a
/// stream of bytes, `Upgrade: tcp`, and either side may close its own direction.
#[utoipa::path(get, path = "/v1/sandboxes/{name}/ports/{port}/connect", tag = "ports", operation_id = "connect_port_raw",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("port" = u16, Path, description = "The port."),
        ("if_running" = Option<bool>, Query, description = "Fail with 409 `not_running` instead of waking the sandbox."),
    ),
    responses((status = 101, description = "The stream.")))]
pub(crate) async fn connect(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam((name, port)): PathParam<(Name, u16)>,
    params: Params,
    mut request: Request,
) -> Result<Response, ApiError> {
    let wake = params.wake(&caller)?;
    params.end()?;
    let asked = request.headers().get(UPGRADE).and_then(|value| value.to_str().ok());
    if !asked.is_some_and(|asked| asked.eq_ignore_ascii_case(PROTOCOL)) {
        let message = "this route turns its connection into a stream of bytes";
        return Err(ApiError::new(StatusCode::UPGRADE_REQUIRED, "upgrade_required", message)
            .hint("send `Connection: Upgrade` and `Upgrade: tcp`, over HTTP/1.1"));
    }
    let sandbox = app.engine.get(&caller.project, &name).await?.sandbox;
    let wait = app.gateway.wait;
    let wakes = wake == WakeMode::Wake;
    let connected = app.engine.reach(&sandbox, port, wakes, wait).await?;
    let upgrade = hyper::upgrade::on(&mut request);
    let closing = app.closing.clone();
    app.tasks.spawn(async move {
        if let Ok(stream) = upgrade.await {
            let left = async { closing.cancelled().await };
            gateway::relay(TokioIo::new(stream), connected, left).await;
        }
    });
    let headers = [(CONNECTION, "upgrade"), (UPGRADE, PROTOCOL)];
    Ok((StatusCode::SWITCHING_PROTOCOLS, headers).into_response())
}

/// Connects to a port on the sandbox's loopback: binary messages are the bytes of the stream, both
/// ways. Text `end` says that the client sends no more.
#[utoipa::path(get, path = "/v1/sandboxes/{name}/ports/{port}/ws", tag = "ports", operation_id = "connect_port",
    params(
        ("name" = String, Path, description = "The sandbox's name."),
        ("port" = u16, Path, description = "The port."),
        ("if_running" = Option<bool>, Query, description = "Fail with 409 `not_running` instead of waking the sandbox."),
    ),
    responses((status = 101, description = "The WebSocket.")))]
pub(crate) async fn web_socket(
    Writer(caller): Writer,
    State(app): State<Arc<App>>,
    PathParam((name, port)): PathParam<(Name, u16)>,
    params: Params,
    Upgrade(upgrade): Upgrade,
) -> Result<Response, ApiError> {
    let wake = params.wake(&caller)?;
    params.end()?;
    // Before the upgrade, so that a refusal has a status.
    let (out, incoming, hold) = app.engine.connect_port(&caller.project, &name, port, wake).await?;
    let alive = app.tasks.token();
    Ok(upgrade.on_upgrade(async move |socket| {
        // The sandbox stays awake as long as the connection lasts.
        let _awake = (alive, hold);
        relay(socket, &app, out, incoming).await;
    }))
}

async fn relay(socket: WebSocket, app: &App, out: Outgoing, mut incoming: Incoming) {
    let (mut sink, mut source) = socket.split();
    let closing = app.closing.clone();
    let code = tokio::select! {
        code = outwards(&mut sink, &mut incoming) => code,
        () = inwards(&mut source, out) => return,
        () = closing.cancelled() => close_code::AWAY,
    };
    let _ = sink.send(Message::Close(Some(CloseFrame { code, reason: "".into() }))).await;
}

/// What comes from the port, until it ends.
async fn outwards(sink: &mut SplitSink<WebSocket, Message>, incoming: &mut Incoming) -> u16 {
    loop {
        match incoming.next().await {
            Ok(Some(bytes)) => {
                if sink.send(Message::Binary(bytes)).await.is_err() {
                    return close_code::ABNORMAL;
                }
            }
            Ok(None) => return close_code::NORMAL,
            Err(error) => {
                tracing::debug!(error = error_chain(&error), "a port's connection broke");
                return close_code::ERROR;
            }
        }
    }
}

/// What the client sends, until it leaves. After its end of input it may still listen.
async fn inwards(source: &mut SplitStream<WebSocket>, out: Outgoing) {
    let mut out = Some(out);
    while let Some(Ok(message)) = source.next().await {
        match message {
            Message::Binary(bytes) => {
                if let Some(open) = &mut out
                    && open.send(bytes).await.is_err()
                {
                    out = None;
                }
            }
            Message::Text(text) if text.as_str() == "end" => {
                if let Some(open) = out.take() {
                    open.end();
                }
            }
            Message::Text(_) | Message::Ping(_) | Message::Pong(_) => {}
            Message::Close(_) => return,
        }
    }
}
