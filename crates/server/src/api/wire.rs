//! Conversion between the engine's types and the API's.

use std::collections::BTreeMap;
use std::mem::take;

use sandkeep_client::types;
use sandkeep_core::db;
use sandkeep_core::model;
use sandkeep_core::model::lifecycle::Phase;
use sandkeep_core::store::Problem;
use sandkeep_proto::link;

use super::guard;
use super::input::parsed;
use super::policy::{policy_in, policy_out};
use super::ports::{port_out, ports_in};
use super::secrets::{given_out, use_out, uses_in};
use super::services::{service_in, service_out};
use crate::error::ApiError;
use sandkeep_core::engine;

/// A list whose items were turned into the wire's.
pub(super) fn paged<T, U>(page: db::Paged<T>, each: impl Fn(T) -> U) -> types::Paged<U> {
    types::Paged { items: page.items.into_iter().map(each).collect(), next: page.next }
}

pub(super) fn problem(problem: &Problem) -> types::FsckProblem {
    types::FsckProblem { leftover: problem.is_leftover(), text: problem.to_string() }
}

pub(super) fn damage(damage: engine::Damage) -> types::Damage {
    types::Damage {
        kind: damage.kind.name().to_owned(),
        subject: damage.subject,
        detail: damage.detail,
        consequence: damage.consequence,
        since: damage.since.to_string(),
    }
}

pub(super) fn state(phase: Phase) -> types::State {
    match phase {
        Phase::Stopped => types::State::Stopped,
        Phase::Starting => types::State::Starting,
        Phase::Running => types::State::Running,
        Phase::Paused => types::State::Paused,
        Phase::Stopping => types::State::Stopping,
        Phase::Failed => types::State::Failed,
        Phase::Deleted => types::State::Deleted,
    }
}

pub(super) fn state_in(state: types::State) -> Phase {
    match state {
        types::State::Stopped => Phase::Stopped,
        types::State::Starting => Phase::Starting,
        types::State::Running => Phase::Running,
        types::State::Paused => Phase::Paused,
        types::State::Stopping => Phase::Stopping,
        types::State::Failed => Phase::Failed,
        types::State::Deleted => Phase::Deleted,
    }
}

pub(super) fn scope(scope: model::Scope) -> types::Scope {
    match scope {
        model::Scope::Read => types::Scope::Read,
        model::Scope::Write => types::Scope::Write,
        model::Scope::Admin => types::Scope::Admin,
    }
}

pub(super) fn scope_in(scope: types::Scope) -> model::Scope {
    match scope {
        types::Scope::Read => model::Scope::Read,
        types::Scope::Write => model::Scope::Write,
        types::Scope::Admin => model::Scope::Admin,
    }
}

fn millicpus(vcpus: f64) -> Result<u32, ApiError> {
    let thousandths = (vcpus * 1000.0).round();
    if (1.0..=f64::from(u32::MAX)).contains(&thousandths) {
        // In range, and whole: nothing is lost.
        Ok(thousandths as u32)
    } else {
        Err(ApiError::invalid("vcpus: between 0.05 and 1024"))
    }
}

fn mounts_in(mounts: BTreeMap<String, types::Mount>) -> Result<model::Mounts, ApiError> {
    let mount = |(path, mount): (String, types::Mount)| {
        let mode = match mount.mode {
            types::MountMode::ReadWrite => model::MountMode::ReadWrite,
            types::MountMode::Snapshot => model::MountMode::Snapshot,
        };
        Ok((path, model::Mount { drive: parsed("mounts", &mount.drive)?, mode }))
    };
    mounts.into_iter().map(mount).collect()
}

fn mount_out(mount: model::Mount) -> types::Mount {
    let mode = match mount.mode {
        model::MountMode::ReadWrite => types::MountMode::ReadWrite,
        model::MountMode::Snapshot => types::MountMode::Snapshot,
    };
    types::Mount { drive: mount.drive.into(), mode }
}

/// The settings of a request as a patch. `before` is the sandbox's network policy until now.
pub(super) fn patch(
    mut change: types::UpdateSandbox,
    before: Option<&model::Policy>,
) -> Result<model::Patch, ApiError> {
    let policy = |network| policy_in("network", network, before);
    let network = change.network.take();
    let services = change.services.take();
    Ok(model::Patch {
        millicpus: change.vcpus.take().map(millicpus).transpose()?,
        mounts: change.mounts.take().map(mounts_in).transpose()?,
        network: network.map(|given| given.map(policy).transpose()).transpose()?,
        secrets: change.secrets.take().map(uses_in).transpose()?,
        ports: change.ports.take().map(ports_in).transpose()?,
        services: services.map(|all| all.into_iter().map(service_in).collect()).transpose()?,
        ..model::Patch::from_request(change)
    })
}

pub(super) fn commands_kept(kept: engine::CommandsKept) -> types::CommandsKept {
    types::CommandsKept { count: kept.count, bytes: kept.bytes }
}

pub(super) fn fork_in_tree(fork: engine::ForkInTree) -> types::TreeFork {
    types::TreeFork {
        id: fork.id.into(),
        name: fork.name.into(),
        origin: fork.origin.into(),
        fate: fork.fate,
        freed_if_deleted_bytes: fork.freed,
        in_trash: fork.in_trash,
    }
}

pub(super) fn sandbox(sandbox: model::Sandbox) -> types::Sandbox {
    let expires_at = sandbox.expires_at().to_string();
    let (phase, failure) = (sandbox.phase(), sandbox.failure().map(str::to_owned));
    let findings = guard::findings(sandbox.guarded().to_vec());
    let mut config = sandbox.config;
    let mounts = take(&mut config.mounts);
    let response = types::Sandbox {
        name: sandbox.name.into(),
        id: sandbox.id.into(),
        project: sandbox.project.into(),
        state: state(phase),
        failure,
        generation: sandbox.generation,
        current_snapshot: sandbox.current.map(Into::into),
        forked_from: sandbox.forked_from.map(|from| types::Lineage {
            sandbox_id: from.sandbox.into(),
            name: from.name.into(),
            snapshot: from.snapshot.map(Into::into),
            generation: from.generation,
            group: from.group.map(Into::into),
            on_accept: from.on_accept,
        }),
        outcome: sandbox.outcome.map(|outcome| types::ForkOutcome {
            how: outcome.how,
            into: outcome.into.into(),
            generation: outcome.generation,
            at: outcome.at.to_string(),
        }),
        session: sandbox.session.map(Into::into),
        mounts: mounts.into_iter().map(|(path, mount)| (path, mount_out(mount))).collect(),
        network: config.network.take().map(policy_out),
        secrets: take(&mut config.secrets).into_iter().map(use_out).collect(),
        ports: take(&mut config.ports).into_iter().map(port_out).collect(),
        services: take(&mut config.services).into_iter().map(service_out).collect(),
        guard: guard::guard(take(&mut config.guard)),
        findings,
        expires_at,
        created_at: sandbox.created_at.to_string(),
        updated_at: sandbox.updated_at.to_string(),
        used_at: sandbox.used_at.to_string(),
        ..types::Sandbox::default()
    };
    config.into_response(response)
}

/// Adds how much of a sandbox is in a snapshot.
pub(super) fn saved(
    (at, unsaved): (Option<model::Timestamp>, Option<engine::Unsaved>),
    sandbox: types::Sandbox,
) -> types::Sandbox {
    let unsaved = unsaved.map(|unsaved| types::Unsaved {
        files: unsaved.files,
        bytes: unsaved.bytes,
        as_of: unsaved.as_of.to_string(),
    });
    types::Sandbox { saved_at: at.map(|at| at.to_string()), unsaved, ..sandbox }
}

pub(super) fn usage(usage: model::Usage) -> types::Usage {
    types::Usage {
        active_cpu_ms: usage.active_cpu_ms,
        wall_ms: usage.wall_ms,
        memory_peak_bytes: usage.memory_peak.0,
        network_in_bytes: usage.network_in,
        network_out_bytes: usage.network_out,
        oom_kills: usage.oom_kills,
    }
}

fn session_end(end: model::SessionEnd) -> types::SessionEnd {
    match end {
        model::SessionEnd::Stopped => types::SessionEnd::Stopped,
        model::SessionEnd::Paused => types::SessionEnd::Paused,
        model::SessionEnd::Idle => types::SessionEnd::Idle,
        model::SessionEnd::Timeout => types::SessionEnd::Timeout,
        model::SessionEnd::RolledBack => types::SessionEnd::RolledBack,
        model::SessionEnd::Deleted => types::SessionEnd::Deleted,
        model::SessionEnd::Interrupted => types::SessionEnd::Interrupted,
        model::SessionEnd::OutOfMemory => types::SessionEnd::OutOfMemory,
        model::SessionEnd::OutOfDisk => types::SessionEnd::OutOfDisk,
        model::SessionEnd::StartFailed => types::SessionEnd::StartFailed,
    }
}

pub(super) fn session(session: model::Session) -> types::Session {
    let hook_run = |run: model::HookRun| types::HookRun {
        hook: run.hook,
        argv: run.argv,
        command: run.command.map(Into::into),
        exit_code: run.exit_code,
        problem: run.problem,
    };
    types::Session {
        id: session.id.into(),
        sandbox_id: session.sandbox.into(),
        from: session.from.map(Into::into),
        generation: session.generation,
        started_at: session.started_at.to_string(),
        ended_at: session.ended_at.map(|time| time.to_string()),
        end: session.end.map(session_end),
        snapshot: session.snapshot.map(Into::into),
        usage: usage(session.usage),
        changes: session.changes,
        deadline: session.deadline.map(|time| time.to_string()),
        hooks: session.hooks.into_iter().map(hook_run).collect(),
        valid: session.valid,
        secrets: session.secrets.into_iter().map(given_out).collect(),
        fallback: session.fallback,
    }
}

pub(super) fn opened(opened: engine::Opened) -> types::Opened {
    types::Opened {
        sandbox: sandbox(opened.sandbox),
        session: opened.session.map(session),
        created: opened.created,
        resumed: opened.resumed,
    }
}

pub(super) fn forks(forks: engine::Forks) -> types::Forks {
    types::Forks {
        made: forks.made.into_iter().map(opened).collect(),
        failed: failed_forks(forks.failed),
    }
}

pub(super) fn failed_forks(failed: Vec<engine::ForkFailed>) -> Vec<types::ForkFailed> {
    let failed = failed.into_iter().map(|failed| types::ForkFailed {
        name: failed.name.into(),
        aliases: types::former_codes(&failed.code),
        code: failed.code,
        reason: failed.reason,
    });
    failed.collect()
}

pub(super) fn paused(paused: engine::Paused) -> types::Paused {
    types::Paused {
        sandbox: sandbox(paused.sandbox),
        session: paused.session.map(session),
        snapshot: paused.snapshot.map(sized_snapshot),
    }
}

pub(super) fn why(why: engine::Why) -> types::Why {
    types::Why {
        state: state(why.phase),
        since: why.since.to_string(),
        reason: why.reason,
        waking: why.waking,
        holding: why.holding,
        notices: why.notices,
    }
}

pub(super) fn stopped(stopped: engine::Stopped) -> types::Stopped {
    let used = stopped.session.as_ref().map(|session| usage(session.usage));
    types::Stopped {
        sandbox: sandbox(stopped.sandbox),
        session: stopped.session.map(session),
        snapshot: stopped.snapshot.map(sized_snapshot),
        usage: used,
        findings: guard::findings(stopped.findings),
    }
}

fn snapshot_kind(kind: model::SnapshotKind) -> types::SnapshotKind {
    match kind {
        model::SnapshotKind::Stop => types::SnapshotKind::Stop,
        model::SnapshotKind::Checkpoint => types::SnapshotKind::Checkpoint,
        model::SnapshotKind::Fork => types::SnapshotKind::Fork,
        model::SnapshotKind::BeforeRollback => types::SnapshotKind::BeforeRollback,
        model::SnapshotKind::Recovered => types::SnapshotKind::Recovered,
        model::SnapshotKind::Pause => types::SnapshotKind::Pause,
        model::SnapshotKind::Merge => types::SnapshotKind::Merge,
    }
}

pub(super) fn snapshot(snapshot: model::Snapshot) -> types::Snapshot {
    let expires_at = snapshot.expires_at().map(|time| time.to_string());
    let memory = snapshot
        .has_memory()
        .then_some(types::SnapshotMemory { layers: snapshot.memory.len() as u64, bytes: None });
    types::Snapshot {
        id: snapshot.id.into(),
        sandbox: snapshot.sandbox_name.into(),
        sandbox_id: snapshot.sandbox.into(),
        session: snapshot.session.into(),
        generation: snapshot.generation,
        parent: snapshot.parent.map(Into::into),
        kind: snapshot_kind(snapshot.kind),
        label: snapshot.label,
        layers: snapshot.layers.len() as u64,
        size: None,
        memory,
        findings: guard::findings(snapshot.findings),
        created_at: snapshot.created_at.to_string(),
        expires_at,
    }
}

pub(super) fn sized_snapshot(sized: engine::Sized<model::Snapshot>) -> types::Snapshot {
    let size = types::SnapshotSize {
        own_bytes: sized.own,
        shared_bytes: sized.shared,
        freed_if_deleted_bytes: sized.freed_if_deleted,
        export_bytes: sized.export,
    };
    let plain = snapshot(sized.item);
    let memory =
        plain.memory.map(|memory| types::SnapshotMemory { bytes: Some(sized.memory), ..memory });
    types::Snapshot { size: Some(size), memory, ..plain }
}

fn command_end(end: model::CommandEnd) -> types::CommandEnd {
    match end {
        model::CommandEnd::Exited => types::CommandEnd::Exited,
        model::CommandEnd::Signalled => types::CommandEnd::Signalled,
        model::CommandEnd::TimedOut => types::CommandEnd::TimedOut,
        model::CommandEnd::OutOfMemory => types::CommandEnd::OutOfMemory,
        model::CommandEnd::OutOfDisk => types::CommandEnd::OutOfDisk,
        model::CommandEnd::HostDiskFull => types::CommandEnd::HostDiskFull,
        model::CommandEnd::Killed => types::CommandEnd::Killed,
        model::CommandEnd::SessionEnded => types::CommandEnd::SessionEnded,
        model::CommandEnd::Lost => types::CommandEnd::Lost,
    }
}

pub(super) fn command(command: model::Command) -> types::Command {
    types::Command {
        by: command.by.clone(),
        changes: command.changes.clone(),
        end: command.ended_by().map(command_end),
        limit: command.limit,
        peak: command.peak,
        id: command.id.into(),
        sandbox_id: command.sandbox.into(),
        session: command.session.into(),
        argv: command.argv,
        cwd: command.cwd,
        user: command.user,
        env_names: command.env_names,
        tty: command.tty,
        detached: command.detached,
        state: match command.state {
            model::CommandState::Running => types::CommandState::Running,
            model::CommandState::Exited => types::CommandState::Exited,
            model::CommandState::Lost => types::CommandState::Lost,
        },
        exit_code: command.exit_code,
        started_at: command.started_at.to_string(),
        ended_at: command.ended_at.map(|time| time.to_string()),
        output_bytes: command.output_bytes,
        truncated: command.truncated,
        service: command.service.map(Into::into),
    }
}

pub(super) fn entry(entry: link::Entry) -> types::Entry {
    types::Entry {
        name: entry.name,
        raw_name: entry.raw_name,
        kind: match entry.kind {
            link::EntryKind::File => types::EntryKind::File,
            link::EntryKind::Directory => types::EntryKind::Directory,
            link::EntryKind::Symlink => types::EntryKind::Symlink,
            link::EntryKind::Other => types::EntryKind::Other,
        },
        size_bytes: entry.size,
        mode: entry.mode,
        uid: entry.uid,
        gid: entry.gid,
        modified_at: model::Timestamp::from_millisecond(entry.modified_ms)
            .unwrap_or(model::Timestamp::UNIX_EPOCH)
            .to_string(),
        target: entry.target,
    }
}

/// `sizes`: what its layers take, and what they share with the host.
pub(super) fn image(image: model::Image, sizes: (u64, u64)) -> types::Image {
    let (size_bytes, host_bytes) = sizes;
    types::Image {
        name: image.name,
        digest: image.digest,
        layers: image.layers.len() as u64,
        size_bytes,
        host_bytes,
        user: image.config.user,
        cwd: image.config.cwd,
        env: image.config.env,
        entrypoint: image.config.entrypoint,
        cmd: image.config.cmd,
        labels: image.config.labels,
        exposed_ports: image.config.exposed_ports.into_iter().collect(),
        source: image.source,
        customized: image.customized.is_some(),
        dressed: image.customized.is_some(),
        created_at: image.created_at.to_string(),
    }
}

pub(super) fn key(key: model::Key) -> types::Key {
    types::Key {
        id: key.id.into(),
        label: key.label,
        scope: scope(key.scope),
        approve: key.approve || key.scope == model::Scope::Admin,
        created_at: key.created_at.to_string(),
        expires_at: key.expires_at.map(|time| time.to_string()),
    }
}

pub(super) fn project(project: model::Project) -> types::Project {
    types::Project {
        name: project.name.into(),
        created_at: project.created_at.to_string(),
        keys: project.keys.into_iter().map(key).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use sandkeep_client::types::UpdateSandbox;
    use sandkeep_core::model::{Config, Name, Sandbox};
    use serde_json::{Value, json};
    use utoipa::PartialSchema as _;

    use super::{patch, sandbox};

    /// Every setting with a value other than the default, and how a response shows it.
    fn settings() -> (Value, Value) {
        let request = json!({
            "image": "debian:12", "driver": "microvm", "class": "workspace", "persistent": false,
            "owner": "ops", "purpose": "test", "expires": "2d", "tags": {"a": "b"},
            "env": {"E": "f"}, "cwd": "/work", "user": "1000:1000", "vcpus": 0.5, "memory": "1G",
            "pids": 100, "disk": 1 << 30, "session_timeout": "1h", "idle_timeout": 5000,
            "on_idle": "stop", "hooks": {"validate": {"argv": ["true"], "timeout": "5s"}},
            "snapshot_expires": "3d", "keep_last": 3, "exclude": ["tmp/**"],
            "mounts": {"/data": {"drive": "d", "mode": "snapshot"}},
            "network": {"mode": "deny-all"}, "secrets": [{"secret": "KEY", "env": "TOKEN"}],
            "ports": [{"port": 3000, "access": "private", "wake": false}],
            "wake_on_request": false,
            "services": [{"name": "web", "argv": ["serve"], "restart": "always", "start": false}],
            "guard": {"secrets": "warn", "junk": "off", "large": "1M", "globs": ["*.iso"]},
            "approvals": {"commands": ["git push*"], "expires": "1h", "default": "deny"},
        });
        let response = json!({
            "image": "debian:12", "driver": "microvm", "class": "workspace", "persistent": false,
            "owner": "ops", "purpose": "test", "expires_ms": 172_800_000, "tags": {"a": "b"},
            "env": {"E": "f"}, "cwd": "/work", "user": "1000:1000",
            "resources": {"vcpus": 0.5, "memory_bytes": 1 << 30, "pids": 100, "disk_bytes": 1 << 30},
            "session_timeout_ms": 3_600_000, "idle_timeout_ms": 5000, "on_idle": "stop",
            "hooks": {"validate": {"argv": ["true"], "timeout": 5000}},
            "snapshot_expires_ms": 259_200_000, "keep_last": 3, "exclude": ["tmp/**"],
            "mounts": {"/data": {"drive": "d", "mode": "snapshot"}},
            "network": {"mode": "deny-all"}, "secrets": [{"secret": "KEY", "env": "TOKEN"}],
            "ports": [{"port": 3000, "access": "private", "wake": false}],
            "wake_on_request": false,
            "services": [{"name": "web", "argv": ["serve"], "restart": "always", "start": false}],
            "guard": {"secrets": "warn", "junk": "off", "large_bytes": 1 << 20, "globs": ["*.iso"]},
            "approvals": {"commands": ["git push*"], "expires": 3_600_000, "default": "deny"},
        });
        (request, response)
    }

    fn keys(value: &Value) -> BTreeSet<String> {
        value.as_object().unwrap().keys().cloned().collect()
    }

    #[test]
    fn every_setting_survives_the_way_to_the_engine_and_back() {
        let (request, expected) = settings();
        let schema = serde_json::to_value(UpdateSandbox::schema()).unwrap();
        assert_eq!(keys(&request), keys(&schema["properties"]), "give every setting a value above");

        let change: UpdateSandbox = serde_json::from_value(request).unwrap();
        let config = patch(change, None).unwrap().apply(Config::default()).unwrap();
        let name: Name = "box".parse().unwrap();
        let record = Sandbox::new(name.clone(), name, config, false);
        let response = serde_json::to_value(sandbox(record)).unwrap();
        for (key, value) in expected.as_object().unwrap() {
            assert_eq!(&response[key], value, "{key}");
        }
    }
}
