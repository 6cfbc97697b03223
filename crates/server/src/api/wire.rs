//! The engine's words as the wire's, and back.

use std::collections::BTreeMap;

use sandkeep_client::types;
use sandkeep_core::db;
use sandkeep_core::engine::lifecycle::Phase;
use sandkeep_core::model;
use sandkeep_core::store::Problem;
use sandkeep_proto::link;

use super::guard;
use super::input::{parsed, size, span};
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

pub(super) fn class(class: model::Class) -> types::Class {
    match class {
        model::Class::Ephemeral => types::Class::Ephemeral,
        model::Class::Resumable => types::Class::Resumable,
        model::Class::Workspace => types::Class::Workspace,
    }
}

pub(super) fn class_in(class: types::Class) -> model::Class {
    match class {
        types::Class::Ephemeral => model::Class::Ephemeral,
        types::Class::Resumable => model::Class::Resumable,
        types::Class::Workspace => model::Class::Workspace,
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

fn on_idle(what: model::OnIdle) -> types::OnIdle {
    match what {
        model::OnIdle::Run => types::OnIdle::Run,
        model::OnIdle::Pause => types::OnIdle::Pause,
        model::OnIdle::Stop => types::OnIdle::Stop,
    }
}

fn on_idle_in(what: types::OnIdle) -> model::OnIdle {
    match what {
        types::OnIdle::Run => model::OnIdle::Run,
        types::OnIdle::Pause => model::OnIdle::Pause,
        types::OnIdle::Stop => model::OnIdle::Stop,
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

fn hook(hook: model::Hook) -> types::Hook {
    types::Hook { argv: hook.argv, timeout: hook.timeout.map(|span| types::Span::Number(span.0)) }
}

fn hooks(hooks: model::Hooks) -> types::Hooks {
    types::Hooks {
        on_create: hooks.on_create.into_iter().map(hook).collect(),
        on_resume: hooks.on_resume.into_iter().map(hook).collect(),
        validate: hooks.validate.map(hook),
    }
}

fn hook_in(hook: types::Hook) -> Result<model::Hook, ApiError> {
    let timeout = hook.timeout.map(|value| span("hooks.timeout", value)).transpose()?;
    Ok(model::Hook { argv: hook.argv, timeout })
}

fn hooks_in(hooks: types::Hooks) -> Result<model::Hooks, ApiError> {
    Ok(model::Hooks {
        on_create: hooks.on_create.into_iter().map(hook_in).collect::<Result<_, _>>()?,
        on_resume: hooks.on_resume.into_iter().map(hook_in).collect::<Result<_, _>>()?,
        validate: hooks.validate.map(hook_in).transpose()?,
    })
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

/// A settings' change as the model checks it. `before` is what the sandbox may reach until then.
pub(super) fn patch(
    change: types::UpdateSandbox,
    before: Option<&model::Policy>,
) -> Result<model::Patch, ApiError> {
    let policy = |network| policy_in("network", network, before);
    let maybe_span = |field: &'static str, value: Option<Option<types::Span>>| {
        value.map(|given| given.map(|value| span(field, value)).transpose()).transpose()
    };
    Ok(model::Patch {
        image: change.image,
        driver: change.driver,
        class: change.class.map(class_in),
        persistent: change.persistent,
        owner: change.owner,
        purpose: change.purpose,
        expires: change.expires.map(|value| span("expires", value)).transpose()?,
        tags: change.tags,
        env: change.env,
        cwd: change.cwd,
        user: change.user,
        millicpus: change.vcpus.map(millicpus).transpose()?,
        memory: change.memory.map(|value| size("memory", value)).transpose()?,
        pids: change.pids,
        disk: change.disk.map(|value| size("disk", value)).transpose()?,
        session_timeout: maybe_span("session_timeout", change.session_timeout)?,
        idle_timeout: maybe_span("idle_timeout", change.idle_timeout)?,
        on_idle: change.on_idle.map(|given| given.map(on_idle_in)),
        hooks: change.hooks.map(hooks_in).transpose()?,
        snapshot_expires: maybe_span("snapshot_expires", change.snapshot_expires)?,
        keep_last: change.keep_last,
        exclude: change.exclude,
        mounts: change.mounts.map(mounts_in).transpose()?,
        guard: change.guard.map(guard::patch).transpose()?.unwrap_or_default(),
        network: change.network.map(|given| given.map(policy).transpose()).transpose()?,
        secrets: change.secrets.map(uses_in).transpose()?,
        ports: change.ports.map(ports_in).transpose()?,
        wake_on_request: change.wake_on_request,
        services: change
            .services
            .map(|all| all.into_iter().map(service_in).collect())
            .transpose()?,
        ..model::Patch::default()
    })
}

pub(super) fn commands_kept(kept: engine::CommandsKept) -> types::CommandsKept {
    types::CommandsKept { count: kept.count, bytes: kept.bytes }
}

pub(super) fn sandbox(sandbox: model::Sandbox) -> types::Sandbox {
    let expires_at = sandbox.expires_at().to_string();
    let (phase, failure) = (sandbox.phase(), sandbox.failure().map(str::to_owned));
    let findings = guard::findings(sandbox.guarded().to_vec());
    let config = sandbox.config;
    types::Sandbox {
        name: sandbox.name.into(),
        id: sandbox.id.into(),
        project: sandbox.project.into(),
        state: state(phase),
        failure,
        fallback: None,
        commands: None,
        generation: sandbox.generation,
        current_snapshot: sandbox.current.map(Into::into),
        forked_from: sandbox.forked_from.map(|from| types::Lineage {
            sandbox_id: from.sandbox.into(),
            name: from.name.into(),
            snapshot: from.snapshot.map(Into::into),
            generation: from.generation,
        }),
        session: sandbox.session.map(Into::into),
        image: config.image,
        driver: config.driver,
        class: class(config.class),
        persistent: config.persistent,
        owner: config.owner,
        purpose: config.purpose,
        tags: config.tags,
        env: config.env,
        cwd: config.cwd,
        user: config.user,
        resources: types::Resources {
            vcpus: f64::from(config.resources.millicpus) / 1000.0,
            memory_bytes: config.resources.memory.0,
            pids: config.resources.pids,
            disk_bytes: config.resources.disk.0,
        },
        session_timeout_ms: config.session_timeout.map(|span| span.0),
        idle_timeout_ms: config.idle_timeout.map(|span| span.0),
        on_idle: config.on_idle.map(on_idle),
        hooks: hooks(config.hooks),
        snapshot_expires_ms: config.retention.expires.map(|span| span.0),
        keep_last: config.retention.keep_last,
        exclude: config.exclude,
        mounts: config.mounts.into_iter().map(|(path, mount)| (path, mount_out(mount))).collect(),
        network: config.network.map(policy_out),
        secrets: config.secrets.into_iter().map(use_out).collect(),
        ports: config.ports.into_iter().map(port_out).collect(),
        wake_on_request: config.wake_on_request,
        services: config.services.into_iter().map(service_out).collect(),
        guard: guard::guard(config.guard),
        findings,
        expires_ms: config.expires.0,
        expires_at,
        created_at: sandbox.created_at.to_string(),
        updated_at: sandbox.updated_at.to_string(),
        used_at: sandbox.used_at.to_string(),
    }
}

fn usage(usage: model::Usage) -> types::Usage {
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
    let failed = |failed: engine::ForkFailed| types::ForkFailed {
        name: failed.name.into(),
        code: failed.code,
        reason: failed.reason,
    };
    types::Forks {
        made: forks.made.into_iter().map(opened).collect(),
        failed: forks.failed.into_iter().map(failed).collect(),
    }
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
        model::CommandEnd::Killed => types::CommandEnd::Killed,
        model::CommandEnd::SessionEnded => types::CommandEnd::SessionEnded,
        model::CommandEnd::Lost => types::CommandEnd::Lost,
    }
}

pub(super) fn command(command: model::Command) -> types::Command {
    types::Command {
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
        source: image.source,
        dressed: image.dressed.is_some(),
        created_at: image.created_at.to_string(),
    }
}

pub(super) fn key(key: model::Key) -> types::Key {
    types::Key {
        id: key.id.into(),
        label: key.label,
        scope: scope(key.scope),
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
