//! A front for Vercel Sandbox clients: their SDKs for JavaScript and Python and their CLI, unmodified.
//!
//! ```text
//! /api/v2/sandboxes/...        what their clients ask for (also without /api)
//!   {name}                     a sandbox: our sandbox
//!   sessions/{id}              one boot of it: our session
//!   sessions/{id}/cmd, fs, ... what happens in it
//!   snapshots, drives          what outlives it
//! /ws/interactive              a terminal
//! ```
//!
//! - `protocol`: how requests are read and answers written, in their format. What a client sends
//!   that the engine has no use for (a region, say) is kept in the sandbox's `notes` and sent back.
//! - `sandboxes`, `sessions`, `snapshots`, `drives`, `account`: the endpoints; `network`: their policies as ours.
//!
//! Their model differs from ours in these: every stop of a persistent sandbox answers with a snapshot,
//! also when nothing was written; snapshots outlive their sandbox; a sandbox has a time limit and no
//! idle limit; a sandbox that never had a snapshot cannot be resumed. `docs/compat/vercel.md` is the
//! page for users, with what is refused and what is better here.

mod account;
mod drives;
pub(crate) mod network;
pub(crate) mod protocol;
pub(crate) mod sandboxes;
mod sessions;
mod snapshots;

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Router;
use axum::routing::get;
use sandkeep_core::engine;
use sandkeep_core::model::Span;
use tokio_util::task::TaskTracker;

use crate::api::App;
use protocol::error::VercelError;

/// What most handlers answer with.
type Answer = Result<axum::Json<serde_json::Value>, VercelError>;

/// Runs a change to its end even if the caller disconnects: a client that retries must find it done or not
/// done. A shutdown waits for it.
async fn done<T: Send + 'static>(
    tasks: &TaskTracker,
    work: impl Future<Output = Result<T, engine::Error>> + Send + 'static,
) -> Result<T, VercelError> {
    match tasks.spawn(crate::request_id::follow(work)).await {
        Ok(done) => Ok(done?),
        Err(error) => {
            tracing::error!(%error, "the work of a request panicked");
            Err(crate::error::ApiError::internal().into())
        }
    }
}

/// How this front behaves on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VercelSettings {
    /// The image of a sandbox that names neither a runtime nor an image; the customized `host` if absent.
    pub default_image: Option<String>,
    /// What runtimes stand for.
    pub runtimes: BTreeMap<String, String>,
    /// What images stand for.
    pub images: BTreeMap<String, String>,
    /// The longest a session may last, extensions included.
    pub max_timeout: Span,
    /// Where clients reach this server from outside, such as `https://keep.example.com`; as they
    /// reached it if absent.
    pub public_url: Option<String>,
    /// The domain whose subdomains lead to ports inside sandboxes.
    pub domain: Option<String>,
}

impl Default for VercelSettings {
    fn default() -> Self {
        Self {
            default_image: None,
            runtimes: BTreeMap::new(),
            images: BTreeMap::new(),
            max_timeout: Span::seconds(24 * 3600),
            public_url: None,
            domain: None,
        }
    }
}

pub(crate) fn router() -> Router<Arc<App>> {
    let api = api_routes();
    Router::new()
        .route("/health", get(async || "ok"))
        .nest("/api", api.clone().fallback(async || VercelError::not_found("Route")))
        .merge(api)
        .merge(sessions::interactive::socket())
}

fn api_routes() -> Router<Arc<App>> {
    // `sessions`, `snapshots` and `drives` are words, not names of sandboxes: the router prefers them.
    Router::new()
        .merge(account::routes())
        .merge(sandboxes::routes())
        .merge(sessions::routes())
        .merge(snapshots::routes())
        .merge(sessions::commands::routes())
        .merge(sessions::files::routes())
        .merge(sessions::interactive::routes())
        .merge(drives::routes())
}
