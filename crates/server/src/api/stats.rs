//! Routes about what sandboxes use at this moment.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use sandkeep_client::types;
use sandkeep_core::engine::Stats;
use sandkeep_core::model::Name;

use super::input::{Params, PathParam};
use super::{ApiResult, App, wire};
use crate::auth::Reader;

/// Shows what a sandbox uses at this moment. Never wakes it.
#[utoipa::path(get, path = "/v1/sandboxes/{name}/stats", tag = "sandboxes", operation_id = "get_stats",
    params(("name" = String, Path, description = "The sandbox's name.")),
    responses((status = 200, description = "What it uses; without `usage` if no session is under way.", body = types::SandboxStats)))]
pub(crate) async fn get(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    PathParam(name): PathParam<Name>,
    params: Params,
) -> ApiResult<types::SandboxStats> {
    params.end()?;
    Ok(Json(stats(app.engine.stats(&caller.project, &name).await?)))
}

/// Shows what the running sandboxes of the project use at this moment, by name.
#[utoipa::path(get, path = "/v1/stats", tag = "sandboxes", operation_id = "list_stats",
    responses((status = 200, description = "All running sandboxes, on one page.", body = types::Paged<types::SandboxStats>)))]
pub(crate) async fn list(
    Reader(caller): Reader,
    State(app): State<Arc<App>>,
    params: Params,
) -> ApiResult<types::Paged<types::SandboxStats>> {
    params.end()?;
    let all = app.engine.all_stats(&caller.project).await;
    Ok(Json(types::Paged { items: all.into_iter().map(stats).collect(), next: None }))
}

fn stats(stats: Stats) -> types::SandboxStats {
    let Stats { sandbox, at, live } = stats;
    let limits = &sandbox.config.resources;
    let (session, usage) = live
        .map(|live| {
            let used = live.session.usage;
            let usage = types::LiveUsage {
                cpu_ms: used.active_cpu_ms,
                cpu_limit_millis: limits.millicpus,
                memory_bytes: live.load.memory.0,
                memory_peak_bytes: used.memory_peak.0,
                memory_limit_bytes: limits.memory.0,
                processes: live.load.processes,
                processes_limit: limits.pids,
                network_in_bytes: used.network_in,
                network_out_bytes: used.network_out,
                disk_bytes: live.written,
                disk_limit_bytes: limits.disk.0,
                commands: live.commands as u64,
                wall_ms: used.wall_ms,
            };
            (live.session.id.to_string(), usage)
        })
        .unzip();
    types::SandboxStats {
        name: sandbox.name.to_string(),
        state: wire::state(sandbox.phase()),
        at_ms: at.as_millisecond().unsigned_abs(),
        session,
        usage,
    }
}
