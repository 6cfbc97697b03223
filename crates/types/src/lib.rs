//! The data types of the `/v1` API, shared by the engine, the server and the client.
//!
//! No I/O, no HTTP, no rules that need the host: only data, its JSON and its OpenAPI schema. Values that
//! mean the same in a request and in the engine ([`Class`], [`Hooks`], [`Span`], ...) are defined here once,
//! and `sandkeep-core` uses them for its records too. So renaming a field or a variant here changes the API,
//! and for such types also what is on disk.
//!
//! Rules for all types:
//!
//! - Requests reject unknown fields. Responses may get new fields; readers skip unknown ones.
//! - In requests a span of time is `"30d"` or milliseconds, a size is `"2G"` or bytes. Responses have
//!   numbers, in fields that end in `_ms` and `_bytes`.
//! - Timestamps are RFC 3339 text in UTC.
//! - In a change, an absent field stays as it is, `null` clears the value, anything else sets it.

#![forbid(unsafe_code)]

mod approvals;
mod audit;
mod command;
mod diff;
mod drive;
mod error;
mod event;
mod file;
mod guard;
mod image;
mod network;
mod outcome;
mod port;
mod quantity;
mod runs;
mod sandbox;
mod secret;
mod service;
mod session;
mod snapshot;
mod stats;
mod tenant;
mod trash;
mod webhooks;

pub use approvals::{
    AnswerApproval, Approval, ApprovalAnswer, ApprovalPolicy, ApprovalSource, ApprovalStatus,
    ApprovalSubject, AskApproval,
};
pub use audit::{AuditEntry, AuditVerification};
pub use command::{
    BadData, ChangedPath, Channel, ClientMessage, Command, CommandChangeList, CommandChanges,
    CommandEnd, CommandState, Encoding, ExecAnswer, ExecEvent, ExecRequest, ExecResult,
    MoreChanges, PathChange, Signal, SignalRequest, TermSize,
};
pub use diff::{
    BroughtBack, Diff, DiffAspect, DiffCounts, DiffEntry, DiffKind, DiffPoint, DiffSide, ForkFate,
    ForkOutcome, Merge, MergeConflict, MergeCounts, Merged, OnAccept, OnConflict, Promote,
    PromoteIntoDrive, Promoted, PromotedIntoDrive, Rename, TakeArtifacts, TreeFork,
};
pub use drive::{Attached, CreateDrive, Drive, ForkDrive, Mount, MountMode};
pub use error::{ErrorAnswer, ErrorBody, RENAMED_CODES, error_chain, former_codes, present_code};
pub use event::{Event, EventSandbox};
pub use file::{Entry, EntryKind, Listing, MakeDir, Move, Moved};
pub use guard::{
    Because, Finding, FindingKind, FindingPlace, Guard, OnJunk, OnSecret, Quarantine,
    QuarantinedFile, SetGuard, Stop, Suspect, ValueEncoding,
};
pub use image::{
    AddDirectory, BuildProgress, CustomizeRequest, Image, ImageProgress, ImportRequest,
    PrunedBuilds, PullRequest,
};
pub use network::{
    Connection, Destination, DirectAnswer, Forward, Network, NetworkMode, NetworkSummary,
    PairMatch, ProjectNetwork, Protocol, RequestAction, RequestMatch, RequestRule, SandboxNetwork,
    SetNetwork, TextMatch, Verdict,
};
pub use outcome::{
    Delete, Deleted, ForkFailed, Forked, Forks, Opened, Paused, RolledBack, Stopped, Tree, Why,
};
pub use port::{Access, IssuePortToken, Port, PortStatus, PortToken, PublishPort};
pub use quantity::{BadQuantity, Size, Span};
pub use runs::{
    AcceptRule, AcceptRun, CancelRun, FinishRun, ProjectRuns, RejectRun, Run, RunAccepted,
    RunAttempt, RunCommand, RunContact, RunDecision, RunHeartbeat, RunPlace, RunReview,
    RunSpending, RunStatus, SpendingKind, SpendingLimit, StartRun,
};
pub use sandbox::{
    Checkpoint, Class, CommandsKept, CreateSandbox, Extend, Fork, Hook, Hooks, IfExists, Lineage,
    OnIdle, Pause, Resources, Rollback, Sandbox, Start, State, Unsaved, UpdateSandbox,
};
pub use secret::{
    Inject, Secret, SecretGiven, SecretHow, SecretPlace, SecretUse, SecretVersion, SetSecret,
};
pub use service::{Restart, Service, ServiceState, ServiceStatus, SetService};
pub use session::{HookRun, Session, SessionChanges, SessionEnd, Usage};
pub use snapshot::{Snapshot, SnapshotDeleted, SnapshotKind, SnapshotMemory, SnapshotSize};
pub use stats::{LiveUsage, SandboxStats};
pub use tenant::{
    Audience, CheckState, CreateKey, CreateProject, Damage, Fsck, FsckProblem, FsckRequest, Health,
    IssueToken, Key, NewKey, Project, Readiness, ReadinessCheck, Scope, SpaceUsage, Token, WhoAmI,
};
pub use trash::{Restore, TrashEmptied, TrashItem};
pub use webhooks::{
    CreateWebhook, NewWebhook, RotateWebhookSecret, UpdateWebhook, Webhook, WebhookDelivery,
};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One page of a list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Paged<T> {
    /// What is on it.
    pub items: Vec<T>,
    /// Pass this as `cursor` for the next page; null on the last.
    pub next: Option<String>,
}
