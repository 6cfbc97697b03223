//! Events: what happened to sandboxes, in the order it happened.
//!
//! `docs/formats/events.md` describes the journal they are kept in and `docs/API.md` the stream
//! `GET /v1/events`. An event is a notification, not a record: the manifests are the truth, and an
//! event only prompts a reader to look. It holds no file contents, no environment and no secret
//! values.

mod filter;
mod id;

use serde::{Deserialize, Serialize};

pub use self::filter::EventFilter;
pub use self::id::{BadEventId, EventId};
use crate::model::{
    Access, ApprovalId, ApprovalStatus, ApprovalSubject, CommandEnd, CommandId, FindingKind,
    Lineage, Name, RunId, RunStatus, SandboxId, SessionEnd, SessionId, SnapshotId, SnapshotKind,
    Tags, Timestamp, Usage, WebhookId,
};

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Its position in the feed.
    pub id: EventId,
    /// When it happened.
    pub at: Timestamp,
    /// The project it happened in; absent for what concerns the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub project: Option<Name>,
    /// The sandbox it happened to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<EventSandbox>,
    /// What happened.
    #[serde(flatten)]
    pub change: EventData,
}

/// A sandbox as it was at the time of an event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventSandbox {
    /// Its id.
    pub id: SandboxId,
    /// Its name.
    pub name: Name,
    /// Its tags.
    #[serde(default, skip_serializing_if = "Tags::is_empty")]
    pub tags: Tags,
}

/// What happened: the kind of an event, and its data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "data")]
pub enum EventData {
    /// A sandbox was created or forked.
    #[serde(rename = "sandbox.created")]
    SandboxCreated {
        /// Where it was forked from.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        forked_from: Option<Lineage>,
    },
    /// A session begins.
    #[serde(rename = "sandbox.starting")]
    SandboxStarting {
        /// The session.
        session: Option<SessionId>,
        /// The generation it starts from.
        generation: u64,
    },
    /// A session takes commands.
    #[serde(rename = "sandbox.running")]
    SandboxRunning {
        /// The session.
        session: Option<SessionId>,
        /// The generation it started from.
        generation: u64,
    },
    /// A session is being ended.
    #[serde(rename = "sandbox.stopping")]
    SandboxStopping {
        /// The session.
        session: Option<SessionId>,
    },
    /// A sandbox is stopped; its files are kept.
    #[serde(rename = "sandbox.stopped")]
    SandboxStopped {
        /// Its generation.
        generation: u64,
        /// The snapshot that the next session starts from.
        snapshot: Option<SnapshotId>,
    },
    /// A sandbox is paused; its memory and files are kept.
    #[serde(rename = "sandbox.paused")]
    SandboxPaused {
        /// Its generation.
        generation: u64,
        /// The snapshot that the next session starts from.
        snapshot: Option<SnapshotId>,
    },
    /// A start, a stop or a delete failed.
    #[serde(rename = "sandbox.failed")]
    SandboxFailed {
        /// Why.
        reason: String,
    },
    /// A sandbox was deleted.
    #[serde(rename = "sandbox.deleted")]
    SandboxDeleted {
        /// Whether it expired; otherwise a request deleted it.
        expired: bool,
    },
    /// A sandbox was restored from the trash.
    #[serde(rename = "sandbox.restored")]
    SandboxRestored {},
    /// The configuration of a sandbox changed.
    #[serde(rename = "sandbox.updated")]
    SandboxUpdated {},
    /// A sandbox was rolled back to a snapshot.
    #[serde(rename = "sandbox.rolled_back")]
    SandboxRolledBack {
        /// Its new generation.
        generation: u64,
        /// The snapshot.
        snapshot: SnapshotId,
    },
    /// A sandbox became what a fork of it is.
    #[serde(rename = "sandbox.promoted")]
    SandboxPromoted {
        /// Its new generation.
        generation: u64,
        /// The snapshot.
        snapshot: SnapshotId,
        /// The fork.
        from: Name,
    },
    /// The changes of another sandbox were merged into a sandbox.
    #[serde(rename = "sandbox.merged")]
    SandboxMerged {
        /// Its new generation.
        generation: u64,
        /// The other sandbox.
        from: Name,
    },
    /// A sandbox has another name.
    #[serde(rename = "sandbox.renamed")]
    SandboxRenamed {
        /// Its former name.
        from: Name,
    },
    /// What a sandbox writes to its disk is held back, because the host's disk is short of space.
    #[serde(rename = "sandbox.writes_held")]
    SandboxWritesHeld {},
    /// A sandbox may write again.
    #[serde(rename = "sandbox.writes_released")]
    SandboxWritesReleased {},
    /// A session ended.
    #[serde(rename = "session.ended")]
    SessionEnded {
        /// The session.
        session: SessionId,
        /// Why.
        end: Option<SessionEnd>,
        /// The snapshot made at its end.
        snapshot: Option<SnapshotId>,
        /// What it used.
        usage: EventUsage,
    },
    /// A command was started.
    #[serde(rename = "command.started")]
    CommandStarted {
        /// The command.
        command: CommandId,
        /// Its session.
        session: SessionId,
        /// The beginning of its command line.
        line: String,
        /// The service it belongs to.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        service: Option<Name>,
    },
    /// A command ended.
    #[serde(rename = "command.ended")]
    CommandEnded {
        /// The command.
        command: CommandId,
        /// Its session.
        session: SessionId,
        /// Its exit code.
        exit_code: Option<i32>,
        /// Why it ended.
        end: Option<CommandEnd>,
        /// How much it printed.
        output_bytes: u64,
    },
    /// A snapshot was made.
    #[serde(rename = "snapshot.created")]
    SnapshotCreated {
        /// The snapshot.
        snapshot: SnapshotId,
        /// Its generation.
        generation: u64,
        /// How it came about.
        cause: SnapshotKind,
        /// Its label.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        label: Option<String>,
    },
    /// A snapshot was deleted or expired.
    #[serde(rename = "snapshot.deleted")]
    SnapshotDeleted {
        /// The snapshot.
        snapshot: SnapshotId,
        /// Its generation.
        generation: u64,
    },
    /// A port was published.
    #[serde(rename = "port.published")]
    PortPublished {
        /// The port inside the sandbox.
        port: u16,
        /// Who may reach it.
        access: Access,
    },
    /// A port is no longer published.
    #[serde(rename = "port.unpublished")]
    PortUnpublished {
        /// The port inside the sandbox.
        port: u16,
    },
    /// The guard found something in what a session wrote.
    #[serde(rename = "guard.found")]
    GuardFound {
        /// Whether nothing is sealed until somebody decides.
        blocked: bool,
        /// The first findings.
        findings: Vec<EventFinding>,
        /// How many there are.
        count: u64,
    },
    /// A sandbox that was resumed is not as it was at its last stop.
    #[serde(rename = "sandbox.validation_failed")]
    SandboxValidationFailed {
        /// The session.
        session: SessionId,
        /// What differs.
        problem: String,
    },
    /// A run was asked for.
    #[serde(rename = "run.queued")]
    RunQueued(EventRun),
    /// A run left the queue.
    #[serde(rename = "run.started")]
    RunStarted(EventRun),
    /// A run waits for an approval.
    #[serde(rename = "run.waiting")]
    RunWaiting(EventRun),
    /// A run continues after an approval.
    #[serde(rename = "run.resumed")]
    RunResumed(EventRun),
    /// A run is ready for review.
    #[serde(rename = "run.ready")]
    RunReady(EventRun),
    /// The result of a run was accepted.
    #[serde(rename = "run.accepted")]
    RunAccepted(EventRun),
    /// The result of a run was rejected.
    #[serde(rename = "run.rejected")]
    RunRejected(EventRun),
    /// A run failed.
    #[serde(rename = "run.failed")]
    RunFailed(EventRun),
    /// A run was cancelled.
    #[serde(rename = "run.cancelled")]
    RunCancelled(EventRun),
    /// A run will expire soon unless it is reviewed.
    #[serde(rename = "run.expiring")]
    RunExpiring(EventRun),
    /// A run was not reviewed in time.
    #[serde(rename = "run.expired")]
    RunExpired(EventRun),
    /// Somebody or something asks for an approval.
    #[serde(rename = "approval.asked")]
    ApprovalAsked(EventApproval),
    /// An approval was answered, or closed without an answer.
    #[serde(rename = "approval.answered")]
    ApprovalAnswered(EventApproval),
    /// Damage to stored data was found.
    #[serde(rename = "damage.found")]
    DamageFound {
        /// What is wrong: a kind of `GET /v1/damage`.
        damage: String,
        /// A path below the data directory, or an id.
        subject: String,
        /// What was found.
        detail: String,
        /// What it means, and what to do.
        consequence: String,
    },
    /// Damage is gone.
    #[serde(rename = "damage.cleared")]
    DamageCleared {
        /// What was wrong.
        damage: String,
        /// A path below the data directory, or an id.
        subject: String,
    },
    /// A webhook sends nothing any more.
    #[serde(rename = "webhook.disabled")]
    WebhookDisabled {
        /// The webhook.
        webhook: WebhookId,
        /// Why.
        reason: String,
    },
    /// Events were lost before they could be written.
    #[serde(rename = "events.lost")]
    EventsLost {
        /// How many.
        count: u64,
    },
}

impl From<Event> for sandkeep_types::Event {
    fn from(event: Event) -> Self {
        let kind = event.change.kind().to_owned();
        let data = match serde_json::to_value(event.change) {
            Ok(serde_json::Value::Object(mut change)) => match change.remove("data") {
                Some(serde_json::Value::Object(data)) => data,
                _ => Default::default(),
            },
            _ => Default::default(),
        };
        let sandbox = event.sandbox.map(|sandbox| sandkeep_types::EventSandbox {
            id: sandbox.id.into(),
            name: sandbox.name.into(),
            tags: sandbox.tags,
        });
        Self {
            id: event.id.to_string(),
            at: event.at.to_string(),
            kind,
            project: event.project.map(Into::into),
            sandbox,
            data,
        }
    }
}

/// A run, in an event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventRun {
    /// Its id.
    pub run: RunId,
    /// Its status.
    pub status: RunStatus,
    /// What it is for.
    pub purpose: String,
    /// Who answers for it.
    pub owner: String,
    /// Why it failed, was cancelled or expired.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// Until when it has to be reviewed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub review_by: Option<Timestamp>,
}

/// An approval, in an event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventApproval {
    /// Its id.
    pub approval: ApprovalId,
    /// The run it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<RunId>,
    /// What is held.
    pub subject: ApprovalSubject,
    /// The question.
    pub question: String,
    /// Its status.
    pub status: ApprovalStatus,
    /// When it expires.
    pub expires_at: Timestamp,
}

/// What a session used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventUsage {
    /// CPU time.
    pub active_cpu_ms: u64,
    /// Wall time.
    pub wall_ms: u64,
    /// The most memory at one time.
    pub memory_peak_bytes: u64,
    /// Bytes received from outside.
    pub network_in_bytes: u64,
    /// Bytes sent outside.
    pub network_out_bytes: u64,
}

impl From<Usage> for EventUsage {
    fn from(usage: Usage) -> Self {
        Self {
            active_cpu_ms: usage.active_cpu_ms,
            wall_ms: usage.wall_ms,
            memory_peak_bytes: usage.memory_peak.0,
            network_in_bytes: usage.network_in,
            network_out_bytes: usage.network_out,
        }
    }
}

/// Something the guard found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventFinding {
    /// What it is.
    pub what: FindingKind,
    /// The file, as the sandbox sees it.
    pub path: String,
    /// The name of the secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
}

impl EventData {
    /// All kinds of events, in the order of the documentation.
    pub const KINDS: [&'static str; 42] = [
        "sandbox.created",
        "sandbox.starting",
        "sandbox.running",
        "sandbox.stopping",
        "sandbox.stopped",
        "sandbox.paused",
        "sandbox.failed",
        "sandbox.deleted",
        "sandbox.restored",
        "sandbox.updated",
        "sandbox.rolled_back",
        "sandbox.promoted",
        "sandbox.merged",
        "sandbox.renamed",
        "sandbox.writes_held",
        "sandbox.writes_released",
        "session.ended",
        "command.started",
        "command.ended",
        "snapshot.created",
        "snapshot.deleted",
        "port.published",
        "port.unpublished",
        "guard.found",
        "sandbox.validation_failed",
        "run.queued",
        "run.started",
        "run.waiting",
        "run.resumed",
        "run.ready",
        "run.accepted",
        "run.rejected",
        "run.failed",
        "run.cancelled",
        "run.expiring",
        "run.expired",
        "approval.asked",
        "approval.answered",
        "damage.found",
        "damage.cleared",
        "webhook.disabled",
        "events.lost",
    ];

    /// The kind of event, as it is on the wire.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::SandboxCreated { .. } => "sandbox.created",
            Self::SandboxStarting { .. } => "sandbox.starting",
            Self::SandboxRunning { .. } => "sandbox.running",
            Self::SandboxStopping { .. } => "sandbox.stopping",
            Self::SandboxStopped { .. } => "sandbox.stopped",
            Self::SandboxPaused { .. } => "sandbox.paused",
            Self::SandboxFailed { .. } => "sandbox.failed",
            Self::SandboxDeleted { .. } => "sandbox.deleted",
            Self::SandboxRestored {} => "sandbox.restored",
            Self::SandboxUpdated {} => "sandbox.updated",
            Self::SandboxRolledBack { .. } => "sandbox.rolled_back",
            Self::SandboxPromoted { .. } => "sandbox.promoted",
            Self::SandboxMerged { .. } => "sandbox.merged",
            Self::SandboxRenamed { .. } => "sandbox.renamed",
            Self::SandboxWritesHeld { .. } => "sandbox.writes_held",
            Self::SandboxWritesReleased { .. } => "sandbox.writes_released",
            Self::SessionEnded { .. } => "session.ended",
            Self::CommandStarted { .. } => "command.started",
            Self::CommandEnded { .. } => "command.ended",
            Self::SnapshotCreated { .. } => "snapshot.created",
            Self::SnapshotDeleted { .. } => "snapshot.deleted",
            Self::PortPublished { .. } => "port.published",
            Self::PortUnpublished { .. } => "port.unpublished",
            Self::GuardFound { .. } => "guard.found",
            Self::SandboxValidationFailed { .. } => "sandbox.validation_failed",
            Self::RunQueued(_) => "run.queued",
            Self::RunStarted(_) => "run.started",
            Self::RunWaiting(_) => "run.waiting",
            Self::RunResumed(_) => "run.resumed",
            Self::RunReady(_) => "run.ready",
            Self::RunAccepted(_) => "run.accepted",
            Self::RunRejected(_) => "run.rejected",
            Self::RunFailed(_) => "run.failed",
            Self::RunCancelled(_) => "run.cancelled",
            Self::RunExpiring(_) => "run.expiring",
            Self::RunExpired(_) => "run.expired",
            Self::ApprovalAsked(_) => "approval.asked",
            Self::ApprovalAnswered(_) => "approval.answered",
            Self::DamageFound { .. } => "damage.found",
            Self::DamageCleared { .. } => "damage.cleared",
            Self::WebhookDisabled { .. } => "webhook.disabled",
            Self::EventsLost { .. } => "events.lost",
        }
    }
}

#[cfg(test)]
mod tests;
