//! The words of `/v1`, as both sides write and read them.
//!
//! The server depends on this crate for them, so a word cannot mean one thing here and another
//! there. Rules that hold for all of them:
//!
//! - Requests refuse fields they do not know; answers may grow fields, and readers skip those.
//! - In requests a span of time is `"30d"` or milliseconds, a size is `"2G"` or bytes. Answers say
//!   numbers, in fields that end in `_ms` and `_bytes`.
//! - Timestamps are RFC 3339 text in UTC.
//! - In a change, an absent field stays as it is, `null` takes the value away, anything else sets it.

mod command;
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
mod sandbox;
mod secret;
mod service;
mod session;
mod snapshot;
mod tenant;
mod trash;

pub use command::{
    BadData, Channel, ClientMessage, Command, CommandEnd, CommandState, Encoding, ExecEvent,
    ExecRequest, Signal, SignalRequest, TermSize,
};
pub use drive::{Attached, CreateDrive, Drive, ForkDrive, Mount, MountMode};
pub use error::{ErrorAnswer, ErrorBody};
pub use event::{Event, EventSandbox};
pub use file::{Entry, EntryKind, Listing, MakeDir, Move, Moved};
pub use guard::{
    Because, Finding, FindingKind, FindingPlace, Guard, OnJunk, OnSecret, Quarantine,
    QuarantinedFile, SetGuard, Stop, Suspect, ValueEncoding,
};
pub use image::{AddDirectory, DressRequest, Image, ImageProgress, ImportRequest, PullRequest};
pub use network::{
    Connection, Destination, DirectAnswer, Forward, Network, NetworkMode, NetworkSummary,
    PairMatch, ProjectNetwork, Protocol, RequestAction, RequestMatch, RequestRule, SandboxNetwork,
    SetNetwork, TextMatch, Verdict,
};
pub use outcome::{
    Delete, Deleted, ForkFailed, Forked, Forks, Opened, Paused, RolledBack, Stopped, Tree, Why,
};
pub use port::{Access, IssuePortToken, Port, PortStatus, PortToken, PublishPort};
pub use quantity::{Size, Span};
pub use sandbox::{
    Checkpoint, Class, CommandsKept, CreateSandbox, Extend, Fork, Hook, Hooks, IfExists, Lineage,
    OnIdle, Pause, Resources, Rollback, Sandbox, Start, State, UpdateSandbox,
};
pub use secret::{
    Inject, Secret, SecretGiven, SecretHow, SecretPlace, SecretUse, SecretVersion, SetSecret,
};
pub use service::{Restart, Service, ServiceState, ServiceStatus, SetService};
pub use session::{HookRun, Session, SessionEnd, Usage};
pub use snapshot::{Snapshot, SnapshotDeleted, SnapshotKind, SnapshotMemory, SnapshotSize};
pub use tenant::{
    Audience, CreateKey, CreateProject, Damage, Fsck, FsckProblem, FsckRequest, Health, IssueToken,
    Key, NewKey, Project, Scope, SpaceUsage, Token, WhoAmI,
};
pub use trash::{Restore, TrashEmptied, TrashItem};

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
