//! The gateway: access from outside to ports inside sandboxes.
//!
//! ```text
//! request ──> address: which port of which sandbox      ── none of ours ──> the API
//!                │
//!             access: who may                            ── nobody, or no token ──> 404
//!                │
//!             Engine::reach: woken, and the port open    ── in time, or a page that says why
//!                │
//!             exchange: one connection to the port ── relay: its bytes, the sandbox held awake
//! ```
//!
//! - `address`: what ports are called, by host and by path.
//! - `access`: keys, tokens and cookies for private ports. None of them goes inside (`credentials`).
//! - `exchange`: HTTP/1.1, and HTTP/2 for gRPC; `rewrite` puts places and cookies right.
//! - `relay`: bytes between a connection and the agent.
//! - `page`: the answer to requests that do not get there.
//!
//! Only ports that a sandbox publishes are reachable. Names by id last as long as the sandbox does, and a
//! fork has others. When no client is left to read from a port, its connection is closed, whatever
//! the process inside does.
//!
//! What is served under a path shares its origin with this server and with all other sandboxes, so
//! the API never depends on cookies or on storage of that origin, and no answer may claim the origin
//! for a service worker or clear it. A page of one sandbox can read what another one serves there, with the
//! visitor's cookies: where that matters, give ports a domain.

mod access;
mod address;
mod credentials;
mod exchange;
mod page;
mod relay;
mod rewrite;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use sandkeep_core::engine::Whose;
use sandkeep_core::model::Name;

use crate::api::App;
use crate::meters::ViaGateway;
use access::PresentedCredentials;
use address::Target;
use page::{PageFormat, Refusal};

pub(crate) use address::{addresses, base_url, is_port_by_id, subdomain};
pub(crate) use relay::relay;

/// How ports are reached from outside.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewaySettings {
    /// The domain whose subdomains lead to ports, such as `keep.example.com`.
    pub domain: Option<String>,
    /// Where clients reach this server from outside, such as `https://keep.example.com`; as they
    /// reached it if absent.
    pub public_url: Option<String>,
    /// Whether this server speaks TLS itself; set by the server.
    pub tls: bool,
    /// How long a request waits for a sandbox to wake and a port to open.
    pub wait: Duration,
    /// The project whose sandboxes are called by their name alone.
    pub default_project: Name,
}

impl Default for GatewaySettings {
    fn default() -> Self {
        Self {
            domain: None,
            public_url: None,
            tls: false,
            wait: Duration::from_secs(30),
            default_project: "default".parse().expect("a name"),
        }
    }
}

impl GatewaySettings {
    /// Whether clients reach this server through TLS.
    fn is_secure(&self) -> bool {
        self.public_url.as_ref().map_or(self.tls, |url| url.starts_with("https:"))
    }
}

/// Where clients find a port of that name, in the words of another vendor.
pub(crate) fn route_url(app: &App, host: Option<&str>, sub: &str) -> String {
    let settings = &app.vercel;
    let base = base_url(settings.public_url.as_deref(), host, app.gateway.tls);
    address::address(&base, settings.domain.as_deref(), sub)
}

/// Takes requests for ports out of the way of everything else: the API does not handle their paths.
pub(crate) async fn serve(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let reader = PageFormat::of(request.headers());
    let answer = match address::target(&app.gateway, request.uri(), request.headers()) {
        None => return next.run(request).await,
        Some(None) => Err(Refusal::UNKNOWN),
        Some(Some(target)) => forward(&app, target, request).await,
    };
    let mut answer = answer.unwrap_or_else(|refusal| refusal.page(reader));
    answer.extensions_mut().insert(ViaGateway);
    answer
}

async fn forward(
    app: &Arc<App>,
    mut target: Target,
    mut request: Request,
) -> Result<Response, Refusal> {
    if request.method() == Method::CONNECT {
        return Err(Refusal::UNKNOWN);
    }
    let by_id = matches!(target.whose, Whose::Id(_));
    let method = request.method().clone();
    let carried = PresentedCredentials::take(app, &method, request.headers_mut(), &mut target);
    let found = app.engine.published(&target.whose, target.port).await;
    let found = found.map_err(|error| Refusal::of(&error, by_id))?;
    let (sandbox, port) = found.ok_or(Refusal::UNKNOWN)?;
    crate::audit::port(&sandbox, port.number);
    if let Some(elsewhere) = carried.admit(app, &sandbox, &port, &target)? {
        return Ok(elsewhere);
    }
    let wake = port.wake && sandbox.config.wake_on_request;
    // A port that does not wake its sandbox is taken as it is.
    let wait = if port.wake { app.gateway.wait } else { Duration::ZERO };
    let connected = app.engine.reach(&sandbox, target.port, wake, wait).await;
    let connected = connected.map_err(|error| Refusal::of(&error, by_id))?;
    exchange::exchange(app, &target, connected, request).await
}
