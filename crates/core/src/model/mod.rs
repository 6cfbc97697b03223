//! The types of the domain: ids, names, quantities, requests, records.
//!
//! `sandbox` is a sandbox with its state, `lifecycle` what may happen to it, `spec` its settings; `record` has the other records
//! of its life: sessions, commands, layers, images, projects. `storage`, `network`, `secret`, `governance` and `activity` have
//! the nouns of those subjects.
//!
//! Everything here is plain data. Text is parsed into these types at the edge (HTTP, command line,
//! disk) and trusted inside: a [`Name`] is a valid name, a [`LayerId`] is safe in a path.

mod activity;
mod end;
mod governance;
mod id;
pub mod lifecycle;
mod name;
mod network;
mod point;
mod record;
mod reserve;
mod revision;
mod sandbox;
mod secret;
mod service;
mod spec;
mod storage;

pub use activity::audit::{
    AuditActor, AuditChain, AuditEntry, AuditFilter, AuditFront, AuditOutcome, AuditRecord,
};
pub use activity::event::{
    BadEventId, Event, EventApproval, EventData, EventFilter, EventFinding, EventId, EventRun,
    EventSandbox, EventUsage,
};
pub use end::CommandEnd;
pub use governance::approval::{Answerer, Approval};
pub use governance::run::{
    Run, RunAttempt, RunChange, RunDecision, RunEffect, RunPlace, RunRefused, RunSandbox, RunSpec,
};
pub use governance::{approval, run};
pub use id::{
    ApprovalId, BadId, CommandId, DriveId, GroupId, KeyId, LayerId, MemoryId, RunId, SandboxId,
    SessionId, SnapshotId, WebhookId,
};
pub use lifecycle::Phase;
pub use name::{BadName, Name, Tags, check_env_name, check_tag};
pub use network::device::{Device, MTU};
pub(crate) use network::policy::regex;
pub use network::port::{Access, Port};
pub use network::{
    Action, AddressRule, Answer, BadPolicy, Connection, Credential, DomainPattern, DomainRule,
    KeptAuthority, Mode, PairMatch, Policy, ProjectNetwork, Protocol, RequestMatch, RequestRule,
    TextMatch, Verdict,
};
pub use point::{BadPoint, Point};
pub use record::{
    BuildStep, Carried, Command, CommandState, Customized, Ending, FORMAT, ForkOutcome, HookRun,
    Image, ImageConfig, Key, Layer, LayerKind, Lineage, MergePoint, MergeSource, OnDelete, Project,
    Scope, Session, SessionEnd, Usage, Validation,
};
pub use reserve::Reserve;
pub use revision::{Ownership, Revision};
pub use sandbox::{
    Breakdown, Change, Deletion, Ended, LastSession, NotAllowed, OpenSession, Sandbox, SandboxState,
};
pub use secret::forms::secret_forms;
pub use secret::guard::{
    Aside, Because, Decision, Encoding, Finding, FindingKind, Guard, Place, Quarantine, Suspect,
};
pub use secret::{
    Inject, InjectInto, LONGEST_SECRET, SHORTEST_SECRET, Secret, SecretGiven, SecretHow,
    SecretName, SecretPlace, SecretUse, SecretVersion,
};
pub use service::Service;
pub use spec::{BadConfig, Config, Patch, Resources, Retention};
pub use storage::drive::{
    Attachment, DRIVE_SIZE, Drive, Mount, MountMode, Mounted, Mounts, check_drive_name,
    check_mounts,
};
pub use storage::memory::{Fingerprint, MemoryLayer, Template};
pub use storage::pages::{PAGE, PageIndex, PageRun};
pub use storage::root::{Limits, MachineKey, RootFs, UidRange};
pub use storage::snapshot::{Expiry, Method, Snapshot, SnapshotKind};

pub use activity::webhook::{
    Webhook, WebhookAnswers, WebhookCursor, WebhookDelivery, WebhookDisabled, WebhookSecret,
    webhook_kinds,
};

pub use jiff::Timestamp;
pub use sandkeep_types::{
    AcceptRule, ApprovalAnswer, ApprovalPolicy, ApprovalSource, ApprovalStatus, ApprovalSubject,
    BadQuantity, BroughtBack, ChangedPath, Class, CommandChanges, DiffAspect, DiffCounts,
    DiffEntry, DiffKind, DiffSide, EntryKind, ForkFate, Hook, Hooks, MergeConflict, MergeCounts,
    MoreChanges, OnAccept, OnIdle, OnJunk, OnSecret, PathChange, ProjectRuns, Restart, RunCommand,
    RunStatus, SessionChanges, SetGuard as GuardPatch, Size, Span, SpendingKind, SpendingLimit,
};

/// The present, to the millisecond: what is stored reads back equal.
#[must_use]
pub fn now() -> Timestamp {
    let millis = Timestamp::now().as_millisecond();
    Timestamp::from_millisecond(millis).unwrap_or_else(|_| Timestamp::now())
}
