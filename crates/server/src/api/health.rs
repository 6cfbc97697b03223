//! Whether the server is alive, and whether it takes work.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use sandkeep_client::types::{self, CheckState, ReadinessCheck};

use super::{ApiResult, App};
use crate::auth::Reader;
use crate::error::ApiError;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Reports that the server is alive. Needs no key, and asks neither the disk nor anything else: whoever restarts servers that
/// do not answer can go by it.
#[utoipa::path(get, path = "/healthz", tag = "server", operation_id = "health", security(()),
    responses((status = 200, description = "The server answers requests.", body = types::Health)))]
pub(crate) async fn health(State(app): State<Arc<App>>) -> Json<types::Health> {
    let recovering = app.engine.recovering() as u64;
    Json(types::Health { status: "ok".to_owned(), version: VERSION.to_owned(), recovering })
}

/// Reports whether the server takes work: every sandbox is recovered, the data directory accepts writes, the default driver
/// is there, and it is not shutting down. Needs no key; without one it says only codes and states, with one also details. Whoever
/// distributes requests can go by it.
#[utoipa::path(get, path = "/readyz", tag = "server", operation_id = "ready", security(()),
    responses(
        (status = 200, description = "The server takes work. A check that is `warning` needs attention all the same.",
            body = types::Readiness),
        (status = 503, description = "It does not: `shutting_down`, `recovering`, `driver_not_available`, or, if the data directory accepts no \
            writes, `storage_not_responding`, `read_only_filesystem`, `insufficient_storage` or `storage_failed`.",
            body = types::ErrorAnswer)))]
pub(crate) async fn ready(
    State(app): State<Arc<App>>,
    reader: Result<Reader, ApiError>,
) -> ApiResult<types::Readiness> {
    // What went wrong on this host is nobody's business who has no key.
    let is_known = reader.is_ok();
    let not_ready = |code: &str, message: String, hint: &str| {
        let (message, hint) = match is_known {
            true => (message, hint),
            false => ("the server takes no work now".to_owned(), "with an API key, this says why"),
        };
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, code, message).hint(hint).retry_after(1)
    };
    if app.closing.is_cancelled() {
        return Err(ApiError::shutting_down());
    }
    if let Err(unwell) = app.engine.health() {
        let hint = "see the disk under the data directory and the kernel's log (`dmesg`)";
        return Err(not_ready(unwell.code, unwell.reason, hint));
    }
    let recovering = app.engine.recovering();
    if recovering > 0 {
        let message = format!("{recovering} sandboxes still have to be recovered");
        let hint = "wait: only requests for those sandboxes wait, all others are served already";
        return Err(not_ready("recovering", message, hint));
    }
    if !app.engine.has_default_driver() {
        let hint = "`keep doctor` on the server's host shows what is missing";
        let message = "the driver of new sandboxes is not available".to_owned();
        return Err(not_ready("driver_not_available", message, hint));
    }
    let (here, absent) = app.engine.driver_states();
    let mut drivers = here.join(", ");
    for (name, reason) in absent {
        drivers.push_str(&format!("; {name} is absent: {reason}"));
    }
    let fine = |name: &str, detail: &str| ReadinessCheck {
        name: name.to_owned(),
        state: CheckState::Ok,
        detail: detail.to_owned(),
    };
    let mut checks = vec![
        fine("recovery", "every sandbox is recovered"),
        fine("disk", "the data directory accepts writes"),
        fine("drivers", &drivers),
    ];
    if let Some(tls) = &app.tls {
        checks.push(match tls.problem() {
            None => fine("tls", &format!("the certificate is good until {}", tls.ends())),
            Some(detail) => {
                ReadinessCheck { name: "tls".to_owned(), state: CheckState::Warning, detail }
            }
        });
    }
    if !is_known {
        checks.iter_mut().for_each(|check| check.detail.clear());
    }
    Ok(Json(types::Readiness { version: VERSION.to_owned(), checks }))
}
