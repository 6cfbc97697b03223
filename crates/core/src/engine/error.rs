//! Why the engine could not do what it was asked.
//!
//! An error has a message (here), a kind (`kind`: what the caller can do, from which fronts choose their status), a code for
//! programs (`code`) and often a hint for people (`hint`). The compiler asks for a kind and a code of each new variant.

mod code;
mod hint;
mod kind;

use std::time::Duration;

use crate::engine::records::lost_names::Lost;
use crate::engine::snapshots::trash::InTrash;
pub(in crate::engine) use sandkeep_types::error_chain;

pub use self::kind::ErrorKind;

use crate::catalog::CatalogError;
use crate::db::DbError;
use crate::dockerfile::DockerfileError;
use crate::driver::DriverError;
use crate::guest::GuestError;
use crate::model::run::status_word;
use crate::model::{
    ApprovalId, ApprovalStatus, BadConfig, CommandId, Finding, FindingKind, KeyId, MergeConflict,
    Name, NotAllowed, Revision, RunId, RunStatus, SandboxId, SessionId, SnapshotId, WebhookId,
};
use crate::net::BadAuthority;
use crate::secret::{BadKey, SealError};
use crate::store::StoreError;
use crate::store::image::ImageError;

/// What the engine answers.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A missing sandbox, and whether it can be restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoSuch {
    /// What it was asked for as.
    pub name: Name,
    /// The one of that name that is in the trash.
    pub trashed: Option<InTrash>,
}

impl From<CatalogError> for Error {
    fn from(error: CatalogError) -> Self {
        match error {
            CatalogError::Conflict { sandbox, expected, found } => {
                Self::RecordChanged { sandbox, expected, found }
            }
            CatalogError::NotFound { kind, key } => Self::Store(StoreError::NotFound { kind, key }),
            CatalogError::Store(error) => Self::Store(error),
            CatalogError::Index(error) => Self::Db(error),
        }
    }
}

impl From<Name> for NoSuch {
    fn from(name: Name) -> Self {
        Self { name, trashed: None }
    }
}

impl NoSuch {
    fn explained(&self) -> String {
        match &self.trashed {
            None => String::new(),
            Some(InTrash { at, expired }) => {
                let why = if *expired { "expired" } else { "was deleted" };
                format!(": it {why} at {at:.0} and is in the trash")
            }
        }
    }
}

/// Why the engine could not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // the messages say it
pub enum Error {
    #[error(transparent)]
    Config(#[from] BadConfig),
    #[error("{what}: {reason}")]
    Invalid { what: &'static str, reason: String },
    #[error(transparent)]
    NotAllowed(#[from] NotAllowed),
    #[error("this key is not known here, or has expired")]
    BadKey,
    #[error("there is no sandbox `{}`{}", .0.name, .0.explained())]
    NoSandbox(NoSuch),
    #[error("the manifest of sandbox `{}` ({}) is missing or cannot be read, so the sandbox cannot be used", .0.name, .0.id)]
    Lost(Lost),
    #[error("there is no sandbox `{0}` in the trash")]
    NotInTrash(String),
    #[error("there is no snapshot `{0}`")]
    NoSnapshot(SnapshotId),
    #[error("the server already has {0} exports in progress")]
    TooManyExports(usize),
    #[error("there is no session `{0}`")]
    NoSession(SessionId),
    #[error("sandbox `{sandbox}` has no command `{command}`")]
    NoCommand { sandbox: Name, command: CommandId },
    #[error("command `{0}` has ended")]
    CommandEnded(CommandId),
    #[error("command `{0}` was started without standard input")]
    NoStdin(CommandId),
    #[error("command `{0}` does not read its standard input any more")]
    StdinClosed(CommandId),
    #[error("command `{command}` has {taken} bytes of input, so none can follow at {offset}")]
    StdinGap { command: CommandId, taken: u64, offset: u64 },
    #[error("sandbox `{sandbox}` publishes no port {port}")]
    NoPort { sandbox: SandboxId, port: u16 },
    #[error("sandbox `{sandbox}` has no service `{service}`")]
    NoService { sandbox: Name, service: Name },
    #[error("sandbox `{name}` did not start within {} s", .waited.as_secs_f32())]
    StartSlow { name: Name, waited: Duration },
    #[error("nothing listened on port {port} within {} s", .waited.as_secs_f32())]
    PortSlow { port: u16, waited: Duration },
    #[error("there is no project `{0}`")]
    NoProject(Name),
    #[error(
        "project `{project}` is locked: {reason}. Bring its manifest back from a backup and start the \
         server again; or give its keys and network rules up with `keep fsck --reset-project {project}`"
    )]
    ProjectLocked { project: Name, reason: String },
    #[error(
        "sandbox `{name}` does not start: {reason}. Its image is damaged: pull or import it again and make the sandbox \
         again; `keep fsck --accept-layer` takes a changed layer as it is"
    )]
    ImageDamaged { name: Name, reason: String },
    #[error("there is no key `{0}`")]
    NoKey(KeyId),
    #[error("there is no drive `{0}`")]
    NoDrive(String),
    #[error("there is a drive `{0}` already")]
    DriveTaken(Name),
    #[error("there is a drive `{drive}` already, and {what}")]
    DriveDiffers { drive: Name, what: String },
    #[error("drive `{drive}` is attached to sandbox `{sandbox}`")]
    DriveAttached { drive: Name, sandbox: Name },
    #[error("{}", not_initialised(.drive, .writer.as_ref()))]
    DriveNotInitialised { drive: Name, writer: Option<Name> },
    #[error("sandbox `{name}` was not deleted: what it wrote to {} could not be recovered from its disks: {reason}", drives_named(.drives))]
    DrivesUnsaved { name: Name, drives: Vec<Name>, reason: String },
    #[error("drive `{drive}` cannot be mounted: {reason}")]
    DriveBroken { drive: Name, reason: String },
    #[error("there is a sandbox `{0}` already")]
    NameTaken(Name),
    #[error("there is a project `{0}` already")]
    ProjectTaken(Name),
    #[error("project `{project}` still has {sandboxes} sandboxes and {drives} drives")]
    ProjectInUse { project: Name, sandboxes: usize, drives: usize },
    #[error("project `{project}` still has {runs} runs that are queued, under way or being ended")]
    ProjectRuns { project: Name, runs: usize },
    #[error("sandbox `{0}` is not running")]
    NotRunning(Name),
    #[error("sandbox `{0}` was deleted")]
    Gone(Name),
    #[error("sandbox `{0}` kept nothing of its last session")]
    NothingKept(Name),
    #[error("snapshot `{0}` was deleted, or has expired")]
    SnapshotDeleted(SnapshotId),
    #[error("snapshot `{snapshot}`, which sandbox `{name}` stands on, was deleted")]
    SnapshotGone { name: Name, snapshot: SnapshotId },
    #[error(
        "the record of {sandbox} was changed by another writer: it is at revision {found}, not {expected}"
    )]
    RecordChanged { sandbox: SandboxId, expected: Revision, found: Revision },
    #[error("sandbox `{name}` is at generation {found}, not {expected}")]
    Generation { name: Name, expected: u64, found: u64 },
    #[error("sandbox `{name}` has no snapshot with the label `{label}`")]
    NoLabel { name: Name, label: String },
    #[error("the files of `{point}` cannot be read: {why}")]
    FilesNotReadable { point: String, why: &'static str },
    #[error("sandbox `{fork}` is not a fork")]
    NoOrigin { fork: Name },
    #[error("sandbox `{origin}`, from which `{fork}` was forked, was deleted")]
    OriginDeleted { fork: Name, origin: Name },
    #[error("sandbox `{origin}` has changed since `{fork}` was forked from it: {why}")]
    OriginMovedOn { origin: Name, fork: Name, why: String },
    #[error("sandboxes `{from}` and `{into}` have no common ancestor")]
    Unrelated { from: Name, into: Name },
    #[error("snapshot `{snapshot}`, the common ancestor, was deleted")]
    AncestorDeleted { snapshot: SnapshotId },
    #[error("`{from}` cannot be merged into `{into}`: {count} conflicts: {named}")]
    MergeConflicts {
        from: Name,
        into: Name,
        count: u64,
        named: String,
        conflicts: Vec<MergeConflict>,
    },
    #[error("files of `{from}` cannot be put into drive `{drive}`, conflicts ({count}): {named}")]
    DriveConflicts {
        from: Name,
        drive: Name,
        count: u64,
        named: String,
        conflicts: Vec<MergeConflict>,
    },
    #[error("drive `{drive}` is at generation {found}, not {expected}")]
    DriveGeneration { drive: Name, expected: u64, found: u64 },
    #[error("{}; drive `{drive}` was not changed", found_message(from, *files, findings))]
    DriveGuarded { from: Name, drive: Name, files: usize, findings: Vec<Finding> },
    #[error(transparent)]
    Dockerfile(#[from] DockerfileError),
    #[error("line {line}: `{text}` failed: {how}")]
    BuildStepFailed { line: usize, text: String, how: String },
    #[error("line {line}: {error}")]
    BuildStep { line: usize, error: Box<Error> },
    #[error(
        "project `{project}` has {running} image builds under way, which is the most it may have"
    )]
    TooManyBuilds { project: Name, running: usize },
    #[error("the build was canceled: its caller left")]
    BuildCanceled,
    #[error("there is no run `{0}`")]
    NoRun(RunId),
    #[error("run `{run}` is {}: {what}", status_word(*.status))]
    RunStatus { run: RunId, status: RunStatus, what: &'static str },
    #[error("run `{0}` is being changed by somebody else at this moment")]
    RunBusy(RunId),
    #[error(
        "sandbox `{sandbox}` has changed since the result of run `{run}` was pinned for review"
    )]
    RunChanged { run: RunId, sandbox: Name },
    #[error("project `{project}` has {queued} queued runs, which is the most it may have")]
    TooManyRuns { project: Name, queued: usize },
    #[error("there is no approval `{0}`")]
    NoApproval(ApprovalId),
    #[error("approval `{approval}` was {} already", answered_word(*.status))]
    ApprovalAnswered { approval: ApprovalId, status: ApprovalStatus },
    #[error("{of} has {pending} approvals that wait for an answer, which is the most it may have")]
    TooManyApprovals { of: String, pending: usize },
    #[error("`{question}` was not approved: {why} (approval `{approval}`)")]
    NotApproved { approval: ApprovalId, question: String, why: String },
    #[error("sandbox `{0}` was renamed or replaced while its command was held")]
    SandboxReplaced(Name),
    #[error("the project wants another key to decide than the one that asked")]
    SeparateApprover,
    #[error("`allow_private` needs a key of scope `admin`")]
    PrivateWebhook,
    #[error("`answers` needs a key that may approve")]
    WebhookAnswers,
    #[error("the link for this answer is not valid: {0}")]
    AnswerLink(&'static str),
    #[error("other deliveries of project `{0}` are under way")]
    TooManyDeliveries(Name),
    #[error("snapshot `{snapshot}` is in use by {}", .holders.join(", "))]
    SnapshotInUse { snapshot: SnapshotId, holders: Vec<String> },
    #[error("snapshot `{snapshot}` of sandbox `{name}` cannot be resumed: {reason}")]
    Unresumable { name: Name, snapshot: SnapshotId, reason: String, offers: Vec<SnapshotId> },
    #[error("{}", guarded_message(.name, *.files, .findings, *.goes_on))]
    Guarded { name: Name, files: usize, findings: Vec<Finding>, goes_on: bool },
    #[error("there are no quarantined files with the id `{0}`")]
    NoQuarantine(SnapshotId),
    #[error("idempotency key `{0}` was used for another request")]
    KeyReused(String),
    #[error("there is no driver `{asked}` here; there is {}", .have.join(", "))]
    NoDriver { asked: String, have: Vec<&'static str> },
    #[error("the driver `{asked}` cannot be used on this host: {reason}")]
    AbsentDriver { asked: String, reason: String, fix: Option<String> },
    #[error("sandbox `{name}` did not start: {reason}")]
    StartFailed { name: Name, reason: String },
    #[error("sandbox `{name}` has the driver `{driver}`, which keeps no memory")]
    NoMemory { name: Name, driver: String },
    #[error("sandbox `{0}` is in use, or was used meanwhile")]
    UsedMeanwhile(Name),
    #[error("{}; sandbox `{into}` was not changed", found_message(from, *files, findings))]
    TakenGuarded { from: Name, into: Name, files: usize, findings: Vec<Finding> },
    #[error("sandbox `{0}` cannot change its driver while it runs")]
    DriverInUse(Name),
    #[error("sandbox `{0}` has drives, which cannot be part of a memory image")]
    HasDrives(Name),
    #[error("sandbox `{0}` has too many captures since its last pause or stop")]
    MemoryTooDeep(Name),
    #[error("sandbox `{name}` has stored memory, which {what}")]
    HoldsMemory { name: Name, what: String },
    #[error("all uid ranges of this host are taken")]
    NoUids,
    #[error("the session has just ended")]
    SessionOver,
    #[error("session `{session}` has ended")]
    SessionEnded { session: SessionId },
    #[error(
        "the sandbox is still being recovered after a restart of the server; try again in a moment"
    )]
    Recovering,
    #[error("the daemon is shutting down")]
    ShuttingDown,
    #[error("the secret that tokens are signed with cannot be read")]
    Secret(#[source] std::io::Error),
    #[error("there is no secret `{0}`")]
    NoSecret(String),
    #[error("there is no webhook `{0}`")]
    NoWebhook(WebhookId),
    #[error("secret `{secret}` is only for sandboxes with the tags {}", .tags.join(", "))]
    SecretTags { secret: String, tags: Vec<String> },
    #[error(transparent)]
    SecretsKey(#[from] BadKey),
    #[error("{what} cannot be read: {reason}")]
    Sealed { what: String, reason: SealError },
    #[error("the network's settings cannot be used")]
    Outside(#[source] std::io::Error),
    #[error("the event journal cannot be read")]
    EventJournal(#[source] std::io::Error),
    #[error("the audit log cannot be read")]
    AuditLog(#[source] std::io::Error),
    #[error("the machine's network device cannot be used")]
    NetworkDevice(#[source] std::io::Error),
    #[error(transparent)]
    Authority(#[from] BadAuthority),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Guest(#[from] GuestError),
    #[error(transparent)]
    Db(#[from] DbError),
}

impl Error {
    pub(crate) fn invalid(what: &'static str, reason: impl Into<String>) -> Self {
        Self::Invalid { what, reason: reason.into() }
    }

    /// Whether the disk under the data directory is at fault, so that the cause helps the server's
    /// operator.
    #[must_use]
    pub fn is_of_the_disk(&self) -> bool {
        matches!(self, Self::Store(StoreError::Io { .. }) | Self::Db(DbError::Query { .. }))
    }
}

fn answered_word(status: ApprovalStatus) -> &'static str {
    match status {
        ApprovalStatus::Pending => "asked",
        ApprovalStatus::Approved => "approved",
        ApprovalStatus::Denied => "denied",
        ApprovalStatus::Expired => "closed",
    }
}

fn drives_named(drives: &[Name]) -> String {
    let named: Vec<String> = drives.iter().map(|drive| format!("drive `{drive}`")).collect();
    if named.is_empty() { "drives".to_owned() } else { named.join(", ") }
}

/// What was found, in a line: what it is, the first files, and what becomes of the session.
fn guarded_message(name: &Name, files: usize, findings: &[Finding], goes_on: bool) -> String {
    let found = found_message(name, files, findings);
    let then = if goes_on { "its session goes on" } else { "it is down, and nothing is sealed" };
    format!("{found}; {then}")
}

/// What was found in what a sandbox wrote, and the first files.
fn found_message(name: &Name, files: usize, findings: &[Finding]) -> String {
    let what = if findings.iter().any(|found| found.kind == FindingKind::Secret) {
        "values of secrets are in what sandbox"
    } else {
        "large files or junk are in what sandbox"
    };
    let mut paths: Vec<String> = Vec::new();
    for found in findings {
        let secret = found.secret.as_ref().map(|secret| format!(" ({secret})")).unwrap_or_default();
        let path = format!("{}{secret}", found.path);
        if !paths.contains(&path) {
            paths.push(path);
        }
    }
    let more = if paths.len() > 3 || files > findings.len() { ", ..." } else { "" };
    paths.truncate(3);
    format!("{what} `{name}` wrote: {}{more}", paths.join(", "))
}

fn not_initialised(drive: &Name, writer: Option<&Name>) -> String {
    match writer {
        Some(writer) => format!(
            "drive `{drive}` has no snapshot yet: sandbox `{writer}` is the first to write to it, and what it writes is kept when its session ends"
        ),
        None => format!("nothing was ever written to drive `{drive}`"),
    }
}
