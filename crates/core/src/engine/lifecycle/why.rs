//! Why a sandbox is in its phase, and what would change that.

use serde::{Deserialize, Serialize};

use crate::engine::after;
use crate::engine::lifecycle::Lifecycle;
use crate::engine::running::live::RunningSandbox;
use crate::model::lifecycle::Phase;
use crate::model::{OnIdle, Sandbox, Session, SessionEnd, Snapshot, Timestamp};

/// Where a sandbox is and why, in sentences for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Why {
    /// Where it is.
    pub phase: Phase,
    /// Since when.
    pub since: Timestamp,
    /// How it came there.
    pub reason: String,
    /// What would wake it, or, while it runs, what would stop or pause it and when.
    pub waking: Vec<String>,
    /// What keeps it awake now.
    pub holding: Vec<String>,
    /// What somebody should know: memory that could not be used, a pause that was refused, a failure.
    pub notices: Vec<String>,
}

impl Lifecycle {
    /// What would stop or pause a running sandbox.
    pub(in crate::engine) fn sleeping(
        &self,
        live: &RunningSandbox,
        sandbox: &Sandbox,
    ) -> Vec<String> {
        let mut all = Vec::new();
        let becomes = match self.on_idle(sandbox) {
            OnIdle::Run => None,
            OnIdle::Pause => Some("paused, with its memory"),
            OnIdle::Stop => Some("stopped, with its files"),
        };
        match (sandbox.config.idle_timeout, becomes) {
            (Some(span), Some(becomes)) => {
                all.push(format!("it is {becomes}, when nobody has used it for {span}"));
            }
            (_, None) => all.push("it runs on when nobody uses it: `on_idle` is `run`".to_owned()),
            (None, Some(_)) => {
                all.push("it runs on when nobody uses it: it has no idle timeout".to_owned());
            }
        }
        if let Some(deadline) = live.session().deadline {
            all.push(format!("its session ends at {deadline}, and it is stopped then"));
        }
        all
    }
}

pub(in crate::engine) fn reason(
    sandbox: &Sandbox,
    session: Option<&Session>,
    snapshot: Option<&Snapshot>,
) -> String {
    let ended = session.and_then(|session| session.end);
    match sandbox.phase() {
        Phase::Starting => "somebody asked for it".to_owned(),
        Phase::Running => match session {
            Some(Session { from: Some(from), fallback: Some(_), .. }) => {
                format!(
                    "it was booted on the files of snapshot {from}: its memory could not be used"
                )
            }
            Some(Session { from: Some(from), .. }) => format!("it was woken from snapshot {from}"),
            _ => "it was started from its image".to_owned(),
        },
        Phase::Stopping => "its session is being ended and its files kept".to_owned(),
        Phase::Failed => sandbox.failure().unwrap_or("something broke").to_owned(),
        Phase::Deleted => "somebody deleted it".to_owned(),
        Phase::Paused | Phase::Stopped => {
            let kept = if sandbox.phase() == Phase::Paused { "paused" } else { "stopped" };
            match (ended, sandbox.config.idle_timeout) {
                (None, _) if snapshot.is_some_and(|snapshot| snapshot.sandbox != sandbox.id) => {
                    "it was forked and has not been started yet".to_owned()
                }
                // The sandbox's record is written first, and the session's right after.
                (None, _) if session.is_some() => "its session has just ended".to_owned(),
                (None, _) => "it has not been started yet".to_owned(),
                (Some(SessionEnd::Stopped), _) => "somebody stopped it".to_owned(),
                (Some(SessionEnd::Paused), _) => "somebody paused it".to_owned(),
                (Some(SessionEnd::Idle), Some(span)) => {
                    format!("it was {kept} because nobody had used it for {span}")
                }
                (Some(SessionEnd::Idle), None) => {
                    format!("it was {kept} because nobody used it")
                }
                (Some(SessionEnd::Timeout), _) => "its session's time was up".to_owned(),
                (Some(SessionEnd::RolledBack), _) => "it was rolled back to a snapshot".to_owned(),
                (Some(SessionEnd::Interrupted), _) => {
                    "its machine died, or the host went down; what it had written was kept"
                        .to_owned()
                }
                (Some(SessionEnd::OutOfMemory), _) => {
                    "its machine used up its memory and was killed; what it had written was kept"
                        .to_owned()
                }
                (Some(SessionEnd::OutOfDisk), _) => {
                    "it was over its disk limit, or was filling the disk of the host, and its commands did not end; what it had written was kept"
                        .to_owned()
                }
                (Some(SessionEnd::StartFailed), _) => "it did not start".to_owned(),
                (Some(SessionEnd::Deleted), _) => "it was deleted".to_owned(),
            }
        }
    }
}

/// What would wake a stopped or paused sandbox.
pub(in crate::engine) fn waking(sandbox: &Sandbox) -> Vec<String> {
    if !matches!(sandbox.phase(), Phase::Stopped | Phase::Paused | Phase::Failed) {
        return Vec::new();
    }
    let mut all = vec!["a command, a file, a connection, or `start`".to_owned()];
    let ports: Vec<String> =
        sandbox.config.ports.iter().map(|port| port.number.to_string()).collect();
    if !ports.is_empty() && sandbox.config.wake_on_request {
        all.push(format!("a request for port {}", ports.join(", ")));
    } else if !ports.is_empty() {
        all.push("not a request for a port: `wake_on_request` is off".to_owned());
    }
    all.push(match sandbox.phase() {
        Phase::Paused => "it wakes where it was: memory, processes, files".to_owned(),
        _ => "it starts with its files; processes of before are gone".to_owned(),
    });
    if let Some(expires) = after(sandbox.used_at, sandbox.config.expires) {
        all.push(format!("if nothing does, it is deleted at {expires}"));
    }
    all
}

/// What keeps a running sandbox awake.
pub(in crate::engine) fn holding(live: &RunningSandbox) -> Vec<String> {
    let mut all = Vec::new();
    let mut commands = 0;
    for tracked in live.commands.lock().values().filter(|one| one.outcome().is_none()) {
        let record = tracked.record();
        let words = record.argv.join(" ");
        let shown: String = words.chars().take(60).collect();
        match &record.service {
            Some(service) => {
                all.push(format!("service `{service}` runs, which keeps nothing awake by itself"));
            }
            None => {
                commands += 1;
                all.push(format!("command {} runs: {shown}", record.id));
            }
        }
    }
    let others = live.holders().saturating_sub(commands);
    if others > 0 {
        all.push(format!("{others} connections or transfers are open"));
    }
    if let Some(quiet) = live.quiet_for() {
        all.push(format!("nobody has used it for {} s", quiet.as_secs()));
    }
    all
}

pub(in crate::engine) fn notices(
    sandbox: &Sandbox,
    session: Option<&Session>,
    live: Option<&RunningSandbox>,
) -> Vec<String> {
    let mut all = Vec::new();
    if let Some(reason) = session.and_then(|session| session.fallback.as_ref()) {
        all.push(format!("its memory could not be used: {reason}; its files are of the same generation, processes were lost"));
    }
    if let Some(refused) = live.and_then(|live| live.refused.lock().clone()) {
        all.push(format!(
            "it was to be paused at {} and was not: {}; tried {} times, again later",
            refused.at, refused.reason, refused.times
        ));
    }
    if let Some(held) = live.and_then(|live| live.writes.held()) {
        all.push(format!(
            "what it writes to its disk is held back since {}: the host's disk has only its reserve left. Nothing of it is lost, and it \
             goes on by itself when there is room",
            held.since
        ));
    }
    let asked = sandbox.config.resources.millicpus.div_ceil(1000);
    if let Ok(here) = std::thread::available_parallelism()
        && u64::from(asked) > here.get() as u64
    {
        all.push(format!("it is set to {asked} CPUs, and this host has {here}"));
    }
    if let Some(missing) = &sandbox.missing {
        all.push(format!("snapshot {missing}, which it stood on, was deleted"));
    }
    if sandbox.phase() != Phase::Failed {
        all.extend(sandbox.failure().map(str::to_owned));
    }
    all
}
