//! The routes of `/v1`.
//!
//! Routes come in two kinds. *Short* ones answer with one JSON document, and get a timeout. *Streams*
//! last as long as a command or a transfer does; they end when the caller leaves, when the work is
//! done, or with a last line when the server goes down.
//!
//! Every answer is JSON, failures included: extractors are our own (`input`), so that none of the
//! framework's plain-text refusals can come out, and a panic is caught here and becomes a 500.

pub(crate) mod approvals;
pub(crate) mod audit;
pub(crate) mod builds;
pub(crate) mod commands;
pub(crate) mod drives;
pub(crate) mod events;
pub(crate) mod exec;
mod exec_result;
pub(crate) mod files;
mod followers;
pub(crate) mod forks;
pub(crate) mod guard;
pub(crate) mod health;
pub(crate) mod images;
pub(crate) mod input;
pub(crate) mod metrics;
pub(crate) mod network;
pub(crate) mod policy;
pub(crate) mod ports;
pub(crate) mod runs;
pub(crate) mod sandboxes;
pub(crate) mod secrets;
pub(crate) mod services;
pub(crate) mod snapshots;
pub(crate) mod stats;
mod stream;
pub(crate) mod tenants;
pub(crate) mod trash;
pub(crate) mod webhooks;
mod wire;

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use axum::{Json, Router};
use futures_util::FutureExt;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::connections::Connections;
use crate::error::ApiError;
use crate::limits::{Limits, RateLimiter, RequestsPer};
use crate::meters::HttpMeters;
use sandkeep_core::engine::{self, Engine};
use sandkeep_core::model::{KeyId, Name};

pub(crate) use stream::download;

/// The result of a handler.
pub(crate) type ApiResult<T> = Result<Json<T>, ApiError>;

/// The state that all handlers share.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) engine: Engine,
    pub(crate) limits: Limits,
    pub(crate) rate: RateLimiter,
    pub(crate) scratch: PathBuf,
    pub(crate) gateway: crate::gateway::GatewaySettings,
    /// The first address this server listens on.
    pub(crate) local: Option<std::net::SocketAddr>,
    pub(crate) vercel: crate::compat::vercel::VercelSettings,
    /// Host names and origins of web pages that may use the API.
    pub(crate) web: crate::WebSettings,
    pub(crate) vercel_races: crate::compat::vercel::sandboxes::races::Races,
    /// Cancelled when the server shuts down.
    pub(crate) closing: CancellationToken,
    /// Connections, streams and work that a shutdown waits for.
    pub(crate) tasks: TaskTracker,
    pub(crate) connections: Arc<Connections>,
    /// Who follows which command.
    pub(crate) followers: followers::Followers,
    /// What is counted of requests.
    pub(crate) http: HttpMeters,
    /// TLS of the TCP listeners.
    pub(crate) tls: Option<Arc<crate::tls::Tls>>,
    /// Requests that measure disk space, per key.
    pub(crate) measuring: RequestsPer<KeyId>,
    /// Exports of snapshots, per key.
    pub(crate) exporting: RequestsPer<KeyId>,
    /// Comparisons and merges, per project: the engine has room for a few at a time.
    pub(crate) comparing: RequestsPer<Name>,
}

impl App {
    pub(crate) fn new(
        engine: Engine,
        limits: Limits,
        scratch: PathBuf,
        gateway: crate::gateway::GatewaySettings,
        vercel: crate::compat::vercel::VercelSettings,
    ) -> Self {
        let rate = RateLimiter::new(&limits);
        let connections = Connections::new(&limits);
        Self {
            engine,
            limits,
            rate,
            scratch,
            gateway,
            local: None,
            vercel,
            web: crate::WebSettings::default(),
            vercel_races: Default::default(),
            closing: CancellationToken::new(),
            tasks: TaskTracker::new(),
            connections,
            followers: Default::default(),
            http: HttpMeters::default(),
            tls: None,
            measuring: RequestsPer::default(),
            exporting: RequestsPer::default(),
            comparing: RequestsPer::default(),
        }
    }

    /// Runs work without a waiting caller, until it ends or the server shuts down.
    pub(crate) fn spawn_until_shutdown(&self, work: impl Future<Output = ()> + Send + 'static) {
        let closing = self.closing.clone();
        let work = crate::request_id::follow(work);
        self.tasks.spawn(async move { closing.run_until_cancelled(work).await });
    }
}

pub(crate) fn router(app: Arc<App>) -> Router {
    let short = short_routes().route_layer(from_fn_with_state(Arc::clone(&app), in_time));
    short
        .merge(stream_routes())
        .merge(crate::compat::vercel::router())
        .fallback(async || {
            ApiError::new(StatusCode::NOT_FOUND, "route_not_found", "no such route")
                .hint("GET /v1/openapi.json lists all routes")
        })
        .method_not_allowed_fallback(async || {
            ApiError::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "method_not_allowed",
                "this route does not support the method",
            )
            .hint("GET /v1/openapi.json lists all routes")
        })
        .layer(from_fn_with_state(Arc::clone(&app), while_the_disk_responds))
        .layer(from_fn_with_state(Arc::clone(&app), crate::origin::own_origin))
        .layer(from_fn_with_state(Arc::clone(&app), crate::gateway::serve))
        .layer(from_fn_with_state(Arc::clone(&app), crate::origin::known_host))
        .layer(from_fn(no_panic))
        .layer(from_fn_with_state(Arc::clone(&app), crate::audit::record))
        .layer(from_fn_with_state(Arc::clone(&app), crate::meters::count))
        .layer(from_fn(crate::request_id::assign))
        .with_state(app)
}

fn short_routes() -> Router<Arc<App>> {
    Router::new()
        .route("/healthz", get(health::health))
        .route("/readyz", get(health::ready))
        .route("/metrics", get(metrics::metrics))
        .route("/v1/openapi.json", get(crate::openapi::document))
        .route("/v1/whoami", get(tenants::who_am_i))
        .route("/v1/usage", get(tenants::usage))
        .route("/v1/damage", get(tenants::damage))
        .route("/v1/trash", get(trash::list).delete(trash::empty))
        .route("/v1/trash/{sandbox}/restore", post(trash::restore))
        .route("/v1/audit/verify", get(audit::verify))
        .route("/v1/fsck", post(tenants::fsck))
        .route("/v1/tokens", post(tenants::issue_token))
        .route("/v1/projects", get(tenants::projects).post(tenants::create_project))
        .route("/v1/projects/{project}", delete(tenants::delete_project))
        .route("/v1/projects/{project}/keys", get(tenants::keys).post(tenants::create_key))
        .route("/v1/projects/{project}/keys/{key}", delete(tenants::revoke_key))
        .route(
            "/v1/projects/{project}/network",
            get(network::of_project).put(network::set_for_project),
        )
        .route(
            "/v1/projects/{project}/governance",
            get(runs::of_project).put(runs::set_for_project),
        )
        .route("/v1/runs", get(runs::list).post(runs::start))
        .route("/v1/runs/{id}", get(runs::get))
        .route("/v1/runs/{id}/cancel", post(runs::cancel))
        .route("/v1/runs/{id}/heartbeat", post(runs::heartbeat))
        .route("/v1/runs/{id}/finish", post(runs::finish_run))
        .route("/v1/runs/{id}/review", get(runs::review).post(runs::pin_again))
        .route("/v1/runs/{id}/accept", post(runs::accept))
        .route("/v1/runs/{id}/reject", post(runs::reject))
        .route("/v1/approvals", get(approvals::list))
        .route("/v1/approvals/{id}", get(approvals::get))
        .route("/v1/approvals/{id}/answer", post(approvals::answer))
        .route("/v1/sandboxes/{name}/approvals", post(approvals::ask))
        .route("/v1/images", get(images::list))
        .route("/v1/images/prune", post(builds::prune))
        .route("/v1/images/{*name}", get(images::get).delete(images::remove))
        .route("/v1/snapshots", get(snapshots::list))
        .route("/v1/snapshots/{id}", get(snapshots::get).delete(snapshots::remove))
        .route("/v1/secrets", get(secrets::list))
        .route("/v1/secrets/{name}", get(secrets::get).put(secrets::set).delete(secrets::remove))
        .route("/v1/webhooks", get(webhooks::list).post(webhooks::create))
        .route(
            "/v1/webhooks/{id}",
            get(webhooks::get).patch(webhooks::update).delete(webhooks::remove),
        )
        .route("/v1/webhooks/{id}/rotate", post(webhooks::rotate))
        .route("/v1/webhooks/{id}/test", post(webhooks::test))
        .route("/v1/quarantine", get(guard::list))
        .route("/v1/quarantine/{id}", delete(guard::remove))
        .route("/v1/drives", get(drives::list).post(drives::create))
        .route("/v1/drives/{name}", get(drives::get).delete(drives::remove))
        .route("/v1/drives/{name}/fork", post(drives::fork))
        .route("/v1/drives/{name}/promote", post(forks::promote_into_drive))
        .route("/v1/sandboxes", get(sandboxes::list).post(sandboxes::create))
        .route(
            "/v1/sandboxes/{name}",
            get(sandboxes::get).patch(sandboxes::update).delete(sandboxes::remove),
        )
        .route("/v1/sandboxes/{name}/start", post(sandboxes::start))
        .route("/v1/sandboxes/{name}/stop", post(sandboxes::stop))
        .route("/v1/sandboxes/{name}/pause", post(sandboxes::pause))
        .route("/v1/sandboxes/{name}/why", get(sandboxes::why))
        .route("/v1/sandboxes/{name}/stats", get(stats::get))
        .route("/v1/stats", get(stats::list))
        .route("/v1/sandboxes/{name}/fork", post(sandboxes::fork))
        .route("/v1/sandboxes/{name}/checkpoint", post(sandboxes::checkpoint))
        .route("/v1/sandboxes/{name}/rollback", post(sandboxes::rollback))
        .route("/v1/sandboxes/{name}/promote", post(forks::promote))
        .route("/v1/sandboxes/{name}/merge", post(forks::merge))
        .route("/v1/sandboxes/{name}/rename", post(forks::rename))
        .route("/v1/forks", get(forks::list))
        .route("/v1/sandboxes/{name}/extend", post(sandboxes::extend))
        .route("/v1/sandboxes/{name}/sessions", get(sandboxes::sessions))
        .route("/v1/sandboxes/{name}/snapshots", get(snapshots::of_sandbox))
        .route("/v1/sandboxes/{name}/tree", get(sandboxes::tree))
        .route("/v1/sandboxes/{name}/network", get(network::get).put(network::set))
        .route("/v1/sandboxes/{name}/connections", get(network::connections))
        .route("/v1/sandboxes/{name}/connections/summary", get(network::summary))
        .route("/v1/sandboxes/{name}/ports", get(ports::list))
        .route("/v1/sandboxes/{name}/ports/{port}", put(ports::publish))
        .route("/v1/sandboxes/{name}/ports/{port}/token", post(ports::issue_token))
        .route("/v1/sandboxes/{name}/services", get(services::list))
        .route(
            "/v1/sandboxes/{name}/services/{service}",
            put(services::set).delete(services::remove),
        )
        .route("/v1/sandboxes/{name}/services/{service}/start", post(services::start))
        .route("/v1/sandboxes/{name}/services/{service}/stop", post(services::stop))
        .route("/v1/sandboxes/{name}/commands", get(commands::list))
        .route("/v1/sandboxes/{name}/commands/{id}/changes", get(commands::changes))
        .route("/v1/sandboxes/{name}/commands/{id}/signal", post(commands::signal))
        .route("/v1/sandboxes/{name}/commands/{id}/resize", post(commands::resize))
        .route("/v1/sandboxes/{name}/files/stat", get(files::stat))
        .route("/v1/sandboxes/{name}/files/list", get(files::list))
        .route("/v1/sandboxes/{name}/files/mkdir", post(files::make_dir))
        .route("/v1/sandboxes/{name}/files/move", post(files::rename))
}

fn stream_routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/events", get(events::stream))
        .route("/v1/audit", get(audit::entries))
        .route("/v1/images/pull", post(images::pull))
        .route("/v1/images/import", post(images::import))
        .route("/v1/images/build", post(builds::build))
        .route("/v1/images/customize", post(images::customize))
        // Its former name.
        .route("/v1/images/dress", post(images::customize))
        .route("/v1/diff", get(forks::diff))
        .route("/v1/diff/patch", get(forks::patch))
        .route("/v1/snapshots/{id}/export", get(snapshots::export))
        .route("/v1/sandboxes/{name}/artifacts", post(forks::artifacts))
        .route("/v1/sandboxes/{name}/exec", post(exec::exec))
        .route("/v1/sandboxes/{name}/exec/ws", get(exec::web_socket))
        .route("/v1/sandboxes/{name}/commands/{id}", get(commands::get))
        .route("/v1/sandboxes/{name}/commands/{id}/logs", get(commands::logs))
        .route("/v1/sandboxes/{name}/commands/{id}/stdin", post(commands::stdin))
        .route(
            "/v1/sandboxes/{name}/files",
            get(files::read).put(files::write).delete(files::remove),
        )
        .route("/v1/sandboxes/{name}/ports/{port}/ws", get(ports::web_socket))
        .route("/v1/sandboxes/{name}/ports/{port}/connect", get(ports::connect))
        .route("/v1/sandboxes/{name}/files/tar", get(files::tar_out).put(files::tar_in))
}

/// Gives up on a request that takes too long. What it began continues: see [`finish`].
async fn in_time(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    match tokio::time::timeout(app.limits.request_timeout, next.run(request)).await {
        Ok(response) => response,
        Err(_) => {
            ApiError::new(StatusCode::GATEWAY_TIMEOUT, "timeout", "the request took too long")
                .hint("the operation continues; check the sandbox before retrying")
                .into_response()
        }
    }
}

/// How long a request may wait for a data directory whose disk does not respond.
const STORAGE_PATIENCE: Duration = Duration::from_secs(20);
/// How often it is asked whether the disk responds.
const STORAGE_ASKED: Duration = Duration::from_secs(1);

/// Gives up on a request whose answer has not begun while the disk does not respond. What it began
/// continues, as far as it can: see [`finish`].
async fn while_the_disk_responds(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Response {
    let mut answer = std::pin::pin!(next.run(request));
    // Most requests are over before a timer is needed.
    if let Ok(answer) = tokio::time::timeout(STORAGE_PATIENCE, answer.as_mut()).await {
        return answer;
    }
    loop {
        if let Err(unwell) = app.engine.health()
            && unwell.code == "storage_not_responding"
        {
            return ApiError::new(StatusCode::SERVICE_UNAVAILABLE, unwell.code, unwell.reason)
                .hint("the operation goes on when the disk responds; check the sandbox before retrying")
                .into_response();
        }
        if let Ok(answer) = tokio::time::timeout(STORAGE_ASKED, answer.as_mut()).await {
            return answer;
        }
    }
}

async fn no_panic(request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    match AssertUnwindSafe(next.run(request)).catch_unwind().await {
        Ok(response) => response,
        Err(_) => {
            tracing::error!(path, "a request handler panicked");
            ApiError::internal().into_response()
        }
    }
}

/// Runs a change to its end even if the caller disconnects. A shutdown waits for it.
pub(crate) async fn finish<T: Send + 'static>(
    app: &App,
    work: impl Future<Output = Result<T, engine::Error>> + Send + 'static,
) -> Result<T, ApiError> {
    match app.tasks.spawn(crate::request_id::follow(work)).await {
        Ok(done) => Ok(done?),
        Err(error) => {
            tracing::error!(%error, "the work of a request panicked");
            Err(ApiError::internal())
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::middleware::from_fn;
    use axum::routing::get;
    use http_body_util::{BodyExt, Empty};
    use hyper_util::rt::TokioIo;
    use sandkeep_client::types::ErrorAnswer;
    use tokio::net::{TcpListener, TcpStream};

    use super::no_panic;

    #[tokio::test]
    async fn a_panic_is_a_500_in_json_and_the_server_goes_on() {
        let router = Router::new()
            .route("/", get(async || -> &'static str { panic!("as a test") }))
            .route("/fine", get(async || "fine"))
            .layer(from_fn(no_panic));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(async move { axum::serve(listener, router).await });
        let stream = TokioIo::new(TcpStream::connect(address).await.unwrap());
        let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        for (path, status) in [("/", 500), ("/fine", 200)] {
            sender.ready().await.unwrap();
            let request = hyper::Request::get(path).header("host", "x");
            let request = request.body(Empty::<bytes::Bytes>::new()).unwrap();
            let response = sender.send_request(request).await.unwrap();
            assert_eq!(response.status(), status, "{path}");
            let body = response.into_body().collect().await.unwrap().to_bytes();
            if status == 500 {
                let answer: ErrorAnswer = serde_json::from_slice(&body).unwrap();
                assert_eq!(answer.error.code, "internal");
            }
        }
        server.abort();
    }
}
