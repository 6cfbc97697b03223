//! The nouns: ids, names, quantities, what was asked for, what is on record.
//!
//! Everything here is plain data. Text is parsed into these types at the edge (HTTP, command line,
//! disk) and trusted inside: a [`Name`] is a valid name, a [`LayerId`] is safe in a path.

pub mod approval;
mod audit;
mod device;
mod drive;
mod end;
mod event;
mod guard;
mod id;
pub mod lifecycle;
mod memory;
mod name;
mod network;
mod pages;
mod point;
mod policy;
mod port;
mod record;
mod revision;
mod root;
pub mod run;
mod sandbox;
mod secret;
mod secret_forms;
mod service;
mod snapshot;
mod spec;
mod webhook;

pub use approval::Approval;
pub use audit::{
    AuditActor, AuditChain, AuditEntry, AuditFilter, AuditFront, AuditOutcome, AuditRecord,
};
pub use device::{Device, MTU};
pub use drive::{
    Attachment, DRIVE_SIZE, Drive, Mount, MountMode, Mounted, Mounts, check_drive_name,
    check_mounts,
};
pub use end::CommandEnd;
pub use event::{
    BadEventId, Event, EventApproval, EventData, EventFilter, EventFinding, EventId, EventRun,
    EventSandbox, EventUsage,
};
pub use guard::{
    Aside, Because, Decision, Encoding, Finding, FindingKind, Guard, Place, Quarantine, Suspect,
};
pub use id::{
    ApprovalId, BadId, CommandId, DriveId, GroupId, KeyId, LayerId, MemoryId, RunId, SandboxId,
    SessionId, SnapshotId, WebhookId,
};
pub use lifecycle::Phase;
pub use memory::{Fingerprint, MemoryLayer, Template};
pub use name::{BadName, Name, Tags, check_env_name, check_tag};
pub use network::{
    Action, AddressRule, Answer, BadPolicy, Connection, Credential, DomainPattern, DomainRule,
    KeptAuthority, Mode, PairMatch, Policy, ProjectNetwork, Protocol, RequestMatch, RequestRule,
    TextMatch, Verdict,
};
pub use pages::{PAGE, PageIndex, PageRun};
pub use point::{BadPoint, Point};
pub(crate) use policy::regex;
pub use port::{Access, Port};
pub use record::{
    Carried, Command, CommandState, Customized, Ending, FORMAT, ForkOutcome, HookRun, Image,
    ImageConfig, Key, Layer, LayerKind, Lineage, MergePoint, MergeSource, OnDelete, Project, Scope,
    Session, SessionEnd, Usage, Validation,
};
pub use revision::{Ownership, Revision};
pub use root::{Limits, MachineKey, RootFs, UidRange};
pub use run::{
    Run, RunAttempt, RunChange, RunDecision, RunEffect, RunPlace, RunRefused, RunSandbox, RunSpec,
};
pub use sandbox::{
    Breakdown, Change, Deletion, Ended, LastSession, NotAllowed, OpenSession, Sandbox, SandboxState,
};
pub use secret::{
    Inject, InjectInto, LONGEST_SECRET, SHORTEST_SECRET, Secret, SecretGiven, SecretHow,
    SecretName, SecretPlace, SecretUse, SecretVersion,
};
pub use secret_forms::secret_forms;
pub use service::Service;
pub use snapshot::{Expiry, Method, Snapshot, SnapshotKind};
pub use spec::{BadConfig, Config, Patch, Resources, Retention};

pub use webhook::{
    Webhook, WebhookCursor, WebhookDelivery, WebhookDisabled, WebhookSecret, webhook_kinds,
};

pub use jiff::Timestamp;
pub use sandkeep_types::{
    AcceptRule, ApprovalAnswer, ApprovalPolicy, ApprovalSource, ApprovalStatus, ApprovalSubject,
    BadQuantity, BroughtBack, ChangedPath, Class, CommandChanges, DiffAspect, DiffCounts,
    DiffEntry, DiffKind, DiffSide, EntryKind, ForkFate, Hook, Hooks, MergeConflict, MergeCounts,
    MoreChanges, OnAccept, OnIdle, OnJunk, OnSecret, PathChange, ProjectRuns, Restart, RunCommand,
    RunStatus, SessionChanges, SetGuard as GuardPatch, Size, Span,
};

/// The present, to the millisecond: what is stored reads back equal.
#[must_use]
pub fn now() -> Timestamp {
    let millis = Timestamp::now().as_millisecond();
    Timestamp::from_millisecond(millis).unwrap_or_else(|_| Timestamp::now())
}
