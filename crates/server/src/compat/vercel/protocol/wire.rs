//! Our objects in their format.
//!
//! Two rules hold for every object here. What is not there is *left out*: their clients refuse a
//! whole answer for one `null`. And `session.runtime` is always there: clients of 2.x insist.

use std::collections::BTreeMap;

use sandkeep_core::engine::{Opened, Sized};
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_core::model::{
    Access, FORMAT, Method, Port, Sandbox, SandboxId, Session, SessionEnd, SessionId, Snapshot,
    Timestamp, Usage,
};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::api::App;
use crate::compat::vercel::protocol::auth::project_id;
use crate::compat::vercel::protocol::ids::Foreign as _;
use crate::compat::vercel::sandboxes::settings::{
    EXPIRATION, FAILOVER, FOREVER, IMAGE, INTERACTIVE_PORT, KEPT_EXPIRATION, REGION, RUNTIME,
};
use crate::compat::vercel::{drives, network};
use crate::gateway;

/// The region of objects that were made without one: the one their clients take for granted. It is
/// a label.
pub(crate) const HERE: &str = "iad1";

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SessionOut {
    id: String,
    project_id: String,
    source_sandbox_name: String,
    memory: u64,
    vcpus: u32,
    region: String,
    runtime: String,
    timeout: i64,
    status: &'static str,
    requested_at: i64,
    started_at: i64,
    created_at: i64,
    updated_at: i64,
    cwd: String,
    interactive_port: u16,
    network_policy: Value,
    #[serde(flatten)]
    ended: Map<String, Value>,
}

/// A session as their clients see it, with the configuration of its sandbox.
pub(crate) fn session(app: &App, sandbox: &Sandbox, session: &Session) -> SessionOut {
    let started = session.started_at.as_millisecond();
    let current = sandbox.session.as_ref() == Some(&session.id);
    let timeout = match (session.deadline, sandbox.config.session_timeout) {
        (Some(deadline), _) => deadline.as_millisecond() - started,
        (None, Some(span)) => i64::try_from(span.0).unwrap_or(i64::MAX),
        // Without a limit: as far as they can count days.
        (None, None) => 365 * 24 * 3600 * 1000,
    };
    SessionOut {
        id: session.id.out(),
        project_id: project_id(&sandbox.project),
        source_sandbox_name: sandbox.name.to_string(),
        memory: sandbox.config.resources.memory.0 >> 20,
        vcpus: sandbox.config.resources.millicpus.div_ceil(1000),
        region: region(sandbox),
        runtime: runtime(sandbox),
        timeout,
        status: session_status(sandbox, current, session),
        requested_at: started,
        started_at: started,
        created_at: started,
        updated_at: session.ended_at.map_or(started, Timestamp::as_millisecond),
        cwd: cwd(sandbox),
        interactive_port: INTERACTIVE_PORT,
        network_policy: network::of(app, sandbox),
        ended: how_it_ended(session),
    }
}

fn how_it_ended(session: &Session) -> Map<String, Value> {
    let mut map = Map::new();
    if let Some(from) = &session.from {
        map.insert("sourceSnapshotId".into(), json!(from.out()));
    }
    if let Some(asked) = session.requested_stop_at.or(session.ended_at) {
        map.insert("requestedStopAt".into(), json!(asked.as_millisecond()));
    }
    let Some(ended) = session.ended_at else { return map };
    let ended = ended.as_millisecond();
    let aborted = session.end.is_some_and(broke_off);
    map.insert(if aborted { "abortedAt" } else { "stoppedAt" }.into(), json!(ended));
    if session.snapshot.is_some() {
        map.insert("snapshottedAt".into(), json!(ended));
    }
    let Usage { active_cpu_ms, wall_ms, network_in, network_out, .. } = session.usage;
    map.insert("duration".into(), json!(wall_ms));
    map.insert("activeCpuDurationMs".into(), json!(active_cpu_ms));
    map.insert("networkTransfer".into(), json!({ "ingress": network_in, "egress": network_out }));
    map
}

/// Whether it is being stopped for the sake of a snapshot that somebody asked for.
pub(crate) fn is_snapshotting(sandbox: &Sandbox) -> bool {
    sandbox.ending().is_some_and(|ending| ending.method == Method::Manual)
}

/// Whether a session ended because something went wrong with its machine.
fn broke_off(end: SessionEnd) -> bool {
    matches!(end, SessionEnd::Interrupted | SessionEnd::OutOfMemory | SessionEnd::OutOfDisk)
}

fn session_status(sandbox: &Sandbox, current: bool, session: &Session) -> &'static str {
    match session.end {
        Some(SessionEnd::StartFailed) => "failed",
        Some(end) if broke_off(end) => "aborted",
        Some(_) => "stopped",
        None if session.ended_at.is_some() || !current => "stopped",
        None => match sandbox.phase() {
            Phase::Starting => "pending",
            Phase::Running => "running",
            Phase::Stopping if is_snapshotting(sandbox) => "snapshotting",
            Phase::Stopping => "stopping",
            Phase::Failed => "failed",
            Phase::Stopped | Phase::Paused | Phase::Deleted => "stopped",
        },
    }
}

/// A session for a sandbox that never had one, which their model does not know.
pub(crate) fn never_started(sandbox: &Sandbox) -> Session {
    Session {
        format: FORMAT,
        id: session_before_all(&sandbox.id),
        sandbox: sandbox.id.clone(),
        from: None,
        generation: sandbox.generation,
        started_at: sandbox.created_at,
        requested_stop_at: None,
        ended_at: Some(sandbox.created_at),
        end: Some(SessionEnd::Stopped),
        snapshot: None,
        usage: Usage::default(),
        deadline: None,
        hooks: Vec::new(),
        valid: None,
        services: Default::default(),
        secrets: Vec::new(),
        fallback: None,
        changes: None,
    }
}

fn session_before_all(sandbox: &SandboxId) -> SessionId {
    let tail = sandbox.as_str().rsplit('-').next().unwrap_or_default();
    format!("ses-{tail}").parse().unwrap_or_else(|_| SessionId::fresh())
}

fn region(sandbox: &Sandbox) -> String {
    sandbox.config.notes.get(REGION).cloned().unwrap_or_else(|| HERE.to_owned())
}

fn runtime(sandbox: &Sandbox) -> String {
    let noted = sandbox.config.notes.get(RUNTIME);
    noted.unwrap_or(&sandbox.config.image).clone()
}

/// The working directory of commands that name none.
pub(crate) fn cwd(sandbox: &Sandbox) -> String {
    let cwd = sandbox.config.cwd.clone().or_else(|| sandbox.image_config.cwd.clone());
    cwd.unwrap_or_else(|| "/".to_owned())
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SandboxOut {
    name: String,
    persistent: bool,
    region: String,
    vcpus: u32,
    memory: u64,
    runtime: String,
    network_policy: Value,
    total_egress_bytes: u64,
    total_ingress_bytes: u64,
    total_active_cpu_duration_ms: u64,
    total_duration_ms: u64,
    created_at: i64,
    updated_at: i64,
    status_updated_at: i64,
    current_session_id: String,
    status: &'static str,
    cwd: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    timeout: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    image: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    current_snapshot_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<i64>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    tags: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mounts: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    failover_regions: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot_expiration: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    keep_last_snapshots: Option<Value>,
}

/// A sandbox as their clients see it.
pub(crate) fn sandbox(app: &App, sandbox: &Sandbox, session: Option<&Session>) -> SandboxOut {
    let (config, notes) = (&sandbox.config, &sandbox.config.notes);
    let number = |name: &str| notes.get(name).and_then(|text| text.parse::<u64>().ok());
    let running = sandbox.phase() == Phase::Running;
    let deadline = session.filter(|_| running).and_then(|session| session.deadline);
    let current = sandbox.session.as_ref().map(SessionId::out);
    let Usage { active_cpu_ms, wall_ms, network_in, network_out, .. } = sandbox.totals;
    SandboxOut {
        name: sandbox.name.to_string(),
        persistent: config.persistent,
        region: region(sandbox),
        vcpus: config.resources.millicpus.div_ceil(1000),
        memory: config.resources.memory.0 >> 20,
        runtime: runtime(sandbox),
        network_policy: network::of(app, sandbox),
        total_egress_bytes: network_out,
        total_ingress_bytes: network_in,
        total_active_cpu_duration_ms: active_cpu_ms,
        total_duration_ms: wall_ms,
        created_at: sandbox.created_at.as_millisecond(),
        updated_at: sandbox.updated_at.as_millisecond(),
        status_updated_at: sandbox.phase_at.as_millisecond(),
        current_session_id: current.unwrap_or_else(|| session_before_all(&sandbox.id).out()),
        status: match sandbox.phase() {
            Phase::Starting => "pending",
            Phase::Running => "running",
            Phase::Stopping => "stopping",
            Phase::Stopped | Phase::Paused | Phase::Failed | Phase::Deleted => "stopped",
        },
        cwd: cwd(sandbox),
        timeout: config.session_timeout.map(|span| span.0),
        image: notes.get(IMAGE).cloned(),
        current_snapshot_id: sandbox.current.as_ref().map(|id| id.out()),
        expires_at: deadline.map(Timestamp::as_millisecond),
        tags: config.tags.clone(),
        mounts: drives::mounts_out(&config.mounts),
        failover_regions: notes
            .get(FAILOVER)
            .map(|regions| regions.split(',').map(ToOwned::to_owned).collect()),
        snapshot_expiration: number(EXPIRATION),
        keep_last_snapshots: config.retention.keep_last.map(|count| {
            let mut kept = json!({
                "count": count,
                "deleteEvicted": config.retention.delete_evicted,
            });
            if let Some(expiration) = number(KEPT_EXPIRATION) {
                kept["expiration"] = json!(expiration);
            }
            kept
        }),
    }
}

/// A sandbox that has just been deleted.
pub(crate) fn deleted(app: &App, gone: &Sandbox) -> SandboxOut {
    SandboxOut { status: "stopped", ..sandbox(app, gone, None) }
}

/// The ways from outside to a sandbox's ports.
pub(crate) fn routes(app: &App, host: Option<&str>, sandbox: &Sandbox) -> Vec<Value> {
    let route = |port: &Port| {
        let subdomain = gateway::subdomain(&sandbox.id, port.number);
        let url = gateway::route_url(app, host, &subdomain);
        json!({ "url": url, "subdomain": subdomain, "port": port.number })
    };
    // Their clients know of no other.
    let public = |port: &&Port| port.access == Access::Public;
    sandbox.config.ports.iter().filter(public).map(route).collect()
}

/// A sandbox with its session and its routes, as create, get and fork answer.
pub(crate) fn opened(app: &App, host: Option<&str>, opened: &Opened) -> Value {
    let it = &opened.sandbox;
    let never;
    let current = match &opened.session {
        Some(session) => session,
        None => {
            never = never_started(it);
            &never
        }
    };
    json!({
        "sandbox": sandbox(app, it, Some(current)),
        "session": session(app, it, current),
        "routes": routes(app, host, it),
        "resumed": opened.resumed,
    })
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SnapshotOut {
    id: String,
    source_session_id: String,
    region: &'static str,
    regions: [&'static str; 1],
    status: &'static str,
    size_bytes: u64,
    created_at: i64,
    updated_at: i64,
    last_used_at: i64,
    creation_method: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent_id: Option<String>,
}

/// A snapshot as their clients see it. Its size is what it takes to have it: its own and what it
/// stands on.
pub(crate) fn snapshot(sized: &Sized<Snapshot>) -> SnapshotOut {
    let snapshot = &sized.item;
    let created = snapshot.created_at.as_millisecond();
    let used = snapshot.used_at.map_or(created, Timestamp::as_millisecond);
    let deleted = snapshot.deleted_at.map(Timestamp::as_millisecond);
    SnapshotOut {
        id: snapshot.id.out(),
        source_session_id: snapshot.session.out(),
        region: HERE,
        regions: [HERE],
        status: if deleted.is_some() { "deleted" } else { "created" },
        size_bytes: sized.own + sized.shared,
        created_at: created,
        updated_at: deleted.unwrap_or(used).max(created),
        last_used_at: used,
        creation_method: match snapshot.method {
            Method::Automatic => "automatic",
            Method::Manual => "manual",
        },
        expires_at: snapshot
            .expires_at()
            .map(Timestamp::as_millisecond)
            .filter(|at| u64::try_from(at - used).is_ok_and(|span| span < FOREVER.0)),
        parent_id: snapshot.parent.as_ref().map(|parent| parent.out()),
    }
}
