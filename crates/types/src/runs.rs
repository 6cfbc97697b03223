//! Runs: pieces of work with a sandbox, a status, approvals and a review.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Command, DiffCounts, DiffEntry, Finding, Promoted, Span, Usage};

/// The status of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RunStatus {
    /// It waits for its turn.
    Queued,
    /// It works.
    Running,
    /// Somebody has to answer a question first.
    WaitingForApproval,
    /// Its work is done; somebody has to accept or reject it.
    ReadyForReview,
    /// Its result was accepted.
    Accepted,
    /// Its result was rejected.
    Rejected,
    /// It failed. The state of its sandbox is kept.
    Failed,
    /// Somebody cancelled it.
    Cancelled,
    /// Nobody reviewed it in time.
    Expired,
}

impl RunStatus {
    /// All of them, in the order of a run's life.
    pub const ALL: [Self; 9] = [
        Self::Queued,
        Self::Running,
        Self::WaitingForApproval,
        Self::ReadyForReview,
        Self::Accepted,
        Self::Rejected,
        Self::Failed,
        Self::Cancelled,
        Self::Expired,
    ];

    /// Whether it works or waits for an answer.
    #[must_use]
    pub fn is_active(self) -> bool {
        matches!(self, Self::Running | Self::WaitingForApproval)
    }

    /// Whether nothing changes it any more.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(
            self,
            Self::Accepted | Self::Rejected | Self::Failed | Self::Cancelled | Self::Expired
        )
    }
}

/// What acceptance does with the result of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum AcceptRule {
    /// The origin of the fork gets the fork's state.
    Promote,
    /// The changes are merged into the origin of the fork.
    Merge,
    /// Nothing is changed: `GET /v1/diff/patch` has the patch between the points of the answer.
    Patch,
    /// Nothing is changed: the sandbox stays as it is.
    Keep,
}

/// The sandbox of a run: an existing one, a fork, or a fresh one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "how", rename_all = "lowercase", deny_unknown_fields)]
pub enum RunPlace {
    /// It works in a sandbox that is there.
    Existing {
        /// The name of the sandbox.
        sandbox: String,
    },
    /// It works in a fork that is made for it.
    Fork {
        /// The sandbox that is forked.
        sandbox: String,
        /// The name of the fork; generated if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
    },
    /// It works in a sandbox that is made for it.
    Fresh {
        /// The image; the server's default if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        image: Option<String>,
        /// The name of the sandbox; generated if absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
    },
}

/// The command of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RunCommand {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Environment on top of the sandbox's.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Working directory; the sandbox's if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User; the sandbox's if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// A run to be started.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StartRun {
    /// Where it works.
    pub place: RunPlace,
    /// The command that the server starts. Without one, a harness outside drives the run: it runs commands in the
    /// sandbox, sends heartbeats, and says when the work is done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<RunCommand>,
    /// The repository it works on, for people.
    #[serde(default)]
    pub repository: String,
    /// Who answers for it; the key's project if empty.
    #[serde(default)]
    pub owner: String,
    /// What it is for.
    #[serde(default)]
    pub purpose: String,
    /// A kind of work, for people and filters.
    #[serde(default)]
    pub class: String,
    /// Runs with a higher number start first, between -100 and 100.
    #[serde(default)]
    pub priority: i32,
    /// Commands that are held until somebody approves: patterns with `*` and `?` for the whole command line. They apply
    /// to commands started through the API in the sandbox of the run, not to what those start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub approve: Vec<String>,
    /// Whether the first contact of the run with each host is held until somebody approves.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub approve_hosts: bool,
    /// Hosts that need no approval: names, `*.example.com`, or addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub known_hosts: Vec<String>,
    /// Secrets whose use is held: the first request that has it to each host, and each command that is given it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub approve_secrets: Vec<String>,
    /// What the run may use before somebody has to approve more, at most one limit for each kind.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spending: Vec<SpendingLimit>,
    /// What acceptance does; `promote` for a fork, otherwise `keep`, if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_accept: Option<AcceptRule>,
    /// How long the result waits for a review, and its snapshots are kept; 14 days if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<Span>,
    /// How long one attempt may work, time spent waiting for approvals not counted; no limit if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Span>,
    /// How often the command is started again if it does not end with 0; at most 10.
    #[serde(default)]
    pub retries: u32,
    /// How long a harness may be silent; 60 seconds if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heartbeat: Option<Span>,
}

/// What a spending limit counts.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum SpendingKind {
    /// CPU time of the run's sandbox, in seconds.
    Cpu,
    /// Time since the run left the queue, in seconds. Time spent waiting for approvals does not count.
    Time,
    /// Bytes received from outside and sent there.
    Network,
    /// What the harness says that the run cost, in its own unit.
    Cost,
}

/// What a run may use before somebody has to approve more. Meanwhile the run waits, and its sandbox stands still
/// where its driver can do that.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SpendingLimit {
    /// What is counted.
    pub what: SpendingKind,
    /// How much of it, over 0.
    pub limit: f64,
    /// How much more each approval allows; as much as `limit` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<f64>,
}

/// A spending limit of a run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RunSpending {
    /// What is counted.
    pub what: SpendingKind,
    /// How much the run may use now.
    pub allowed: f64,
    /// How much more each approval allows.
    pub step: f64,
}

/// One attempt of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RunAttempt {
    /// Its command, in the run's sandbox.
    pub command: String,
    /// When it was started.
    #[schema(format = DateTime)]
    pub started_at: String,
    /// When it ended.
    #[schema(format = DateTime)]
    pub ended_at: Option<String>,
    /// The exit code of the command.
    pub exit_code: Option<i32>,
    /// Why it counts as failed.
    pub problem: Option<String>,
}

/// What was decided about the result of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RunDecision {
    /// Whether it was accepted.
    pub accepted: bool,
    /// What acceptance did.
    pub how: Option<AcceptRule>,
    /// The id of the key that decided.
    pub by: String,
    /// When.
    #[schema(format = DateTime)]
    pub at: String,
    /// What was said about it.
    pub comment: String,
}

/// A run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Run {
    /// Its id.
    pub id: String,
    /// The project it belongs to.
    pub project: String,
    /// Its status.
    pub status: RunStatus,
    /// Why it failed, was cancelled or expired.
    pub why: Option<String>,
    /// What was asked for.
    pub place: RunPlace,
    /// The command that the server starts; absent if a harness drives the run.
    pub command: Option<RunCommand>,
    /// The sandbox it works in, once it is known.
    pub sandbox: Option<String>,
    /// Whether that sandbox was made for the run.
    pub own_sandbox: bool,
    /// The repository, for people.
    pub repository: String,
    /// Who answers for it.
    pub owner: String,
    /// What it is for.
    pub purpose: String,
    /// A kind of work.
    pub class: String,
    /// Runs with a higher number start first.
    pub priority: i32,
    /// Commands that are held until somebody approves.
    pub approve: Vec<String>,
    /// Whether the first contact with each host is held.
    pub approve_hosts: bool,
    /// Hosts that need no approval.
    pub known_hosts: Vec<String>,
    /// Secrets whose use is held.
    pub approve_secrets: Vec<String>,
    /// What the run may use, as it was raised since.
    pub spending: Vec<RunSpending>,
    /// What acceptance does.
    pub on_accept: AcceptRule,
    /// How long the result waits for a review.
    pub keep_ms: u64,
    /// How long one attempt may work.
    pub timeout_ms: Option<u64>,
    /// How often the command is started again.
    pub retries: u32,
    /// How long a harness may be silent; absent if the server starts the command.
    pub heartbeat_ms: Option<u64>,
    /// The snapshot it began with; if absent, what its sandbox was made from.
    pub first_snapshot: Option<String>,
    /// The snapshot that is to be reviewed.
    pub last_snapshot: Option<String>,
    /// The attempts of the server to run the command.
    pub attempts: Vec<RunAttempt>,
    /// Approvals that wait for an answer.
    pub pending_approvals: Vec<String>,
    /// What the harness says it cost, in its own unit.
    pub cost: Option<f64>,
    /// What its sessions used, once its work is done.
    pub usage: Option<Usage>,
    /// What was decided about it.
    pub decision: Option<RunDecision>,
    /// The id of the key that started it.
    pub by: String,
    /// When it was asked for.
    #[schema(format = DateTime)]
    pub queued_at: String,
    /// When it left the queue.
    #[schema(format = DateTime)]
    pub started_at: Option<String>,
    /// When its work was done, or given up.
    #[schema(format = DateTime)]
    pub finished_at: Option<String>,
    /// When it got its last status.
    #[schema(format = DateTime)]
    pub ended_at: Option<String>,
    /// Until when it has to be reviewed.
    #[schema(format = DateTime)]
    pub review_by: Option<String>,
}

/// A sign of life of a harness.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RunHeartbeat {
    /// What the run has cost so far, in the harness's own unit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
}

/// The end of the work of a harness.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FinishRun {
    /// Why the work failed; absent if it is ready for review.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// What the run has cost, in the harness's own unit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
}

/// A cancellation. The body may be empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CancelRun {
    /// Why, for people.
    #[serde(default)]
    pub comment: String,
}

/// An acceptance. The body may be empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AcceptRun {
    /// What it does, if not what the run says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub how: Option<AcceptRule>,
    /// What there is to say about it.
    #[serde(default)]
    pub comment: String,
    /// Whether the sandbox that was made for the run is deleted afterwards.
    #[serde(default)]
    pub delete_sandbox: bool,
}

/// A rejection. The body may be empty. A sandbox that was made for the run is deleted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RejectRun {
    /// What there is to say about it.
    #[serde(default)]
    pub comment: String,
}

/// A run that was accepted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RunAccepted {
    /// The run.
    pub run: Run,
    /// The origin, if it was promoted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promoted: Option<Promoted>,
    /// The first point of the patch: see `GET /v1/diff/patch`.
    pub from: String,
    /// The second point of the patch.
    pub to: String,
}

/// A place outside that a run was in contact with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RunContact {
    /// The name, or the address where none was told.
    pub host: String,
    /// How many connections, refused ones included.
    pub connections: u64,
    /// How many were refused.
    pub denied: u64,
    /// Bytes received.
    pub bytes_in: u64,
    /// Bytes sent.
    pub bytes_out: u64,
}

/// What there is to know about the result of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RunReview {
    /// The run.
    pub run: Run,
    /// The first point of the comparison: what the run began with.
    pub from: String,
    /// The second: the snapshot that is reviewed.
    pub to: String,
    /// How much differs; absent if the files cannot be compared.
    pub counts: Option<DiffCounts>,
    /// The paths that differ, at most 1,000.
    pub changes: Vec<DiffEntry>,
    /// Whether there are more.
    pub truncated: bool,
    /// Why files could not be compared.
    pub problem: Option<String>,
    /// Whether the sandbox is still what was pinned for the review. If not, it has to be pinned again.
    pub current: bool,
    /// Commands of the run that changed something, or of which that is not known; newest first, at most 100.
    pub commands: Vec<Command>,
    /// What it was in contact with, the most bytes first, at most 100.
    pub network: Vec<RunContact>,
    /// What the guard found in the snapshot.
    pub findings: Vec<Finding>,
    /// Approvals of the run.
    pub approvals: Vec<super::Approval>,
}

/// What a project allows its runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ProjectRuns {
    /// How many may run or wait for an approval at the same time.
    pub running: u32,
    /// How many may be queued.
    pub queued: u32,
    /// Whether nobody may approve or accept what the same key asked for.
    #[serde(default)]
    pub separate_approver: bool,
}

impl Default for ProjectRuns {
    fn default() -> Self {
        Self { running: 16, queued: 1000, separate_approver: false }
    }
}
