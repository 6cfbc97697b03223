//! Why the engine said no, sorted by what the caller can do about it.

use std::time::Duration;

use super::records::lost_names::Lost;
use super::snapshots::trash::InTrash;
use sandkeep_proto::link::Failure;
pub(in crate::engine) use sandkeep_types::error_chain;

use crate::catalog::CatalogError;
use crate::db::DbError;
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

/// A sandbox that is not there, and whether it can be had back.
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

/// What a caller can do about an error. Fronts choose their status from this alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// Ask differently.
    Invalid,
    /// Say who you are.
    Unauthorized,
    /// Ask for something that exists.
    NotFound,
    /// Change the state of the thing first.
    Conflict,
    /// It was there and is no more.
    Gone,
    /// Look again: it has moved on.
    Stale,
    /// Somebody else may do it.
    Forbidden,
    /// Ask for less at a time.
    TooMany,
    /// Ask for less, or for a higher limit.
    OverLimit,
    /// Ask for less: the work has a bound.
    TooLarge,
    /// Free some room, or wait, then ask again.
    Exhausted,
    /// Ask again in a moment.
    Unavailable,
    /// Nothing: tell the operator.
    Fault,
}

impl Error {
    pub(crate) fn invalid(what: &'static str, reason: impl Into<String>) -> Self {
        Self::Invalid { what, reason: reason.into() }
    }

    /// Sorts the error for the fronts.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Config(_)
            | Self::Invalid { .. }
            | Self::NoDriver { .. }
            | Self::AbsentDriver { .. }
            | Self::NoStdin(_)
            | Self::StdinGap { .. } => ErrorKind::Invalid,
            Self::BadKey => ErrorKind::Unauthorized,
            Self::NoSandbox(_)
            | Self::NotInTrash(_)
            | Self::NoSnapshot(_)
            | Self::NoSession(_)
            | Self::NoCommand { .. }
            | Self::NoPort { .. }
            | Self::NoService { .. }
            | Self::NoProject(_)
            | Self::NoDrive(_)
            | Self::NoSecret(_)
            | Self::NoWebhook(_)
            | Self::NoQuarantine(_)
            | Self::NoLabel { .. }
            | Self::NoRun(_)
            | Self::NoApproval(_)
            | Self::NoKey(_) => ErrorKind::NotFound,
            Self::NotApproved { .. } | Self::SeparateApprover | Self::PrivateWebhook => {
                ErrorKind::Forbidden
            }
            Self::TooManyRuns { .. }
            | Self::TooManyApprovals { .. }
            | Self::TooManyDeliveries(_) => ErrorKind::TooMany,
            Self::NameTaken(_)
            | Self::Lost(_)
            | Self::ProjectTaken(_)
            | Self::ProjectInUse { .. }
            | Self::DriveTaken(_)
            | Self::DriveDiffers { .. }
            | Self::DriveAttached { .. }
            | Self::DriveNotInitialised { .. }
            | Self::DriveBroken { .. }
            | Self::DrivesUnsaved { .. }
            | Self::NotRunning(_)
            | Self::CommandEnded(_)
            | Self::StdinClosed(_)
            | Self::SnapshotInUse { .. }
            | Self::Unresumable { .. }
            | Self::Sealed { .. }
            | Self::SecretTags { .. }
            | Self::Guarded { .. }
            | Self::TakenGuarded { .. }
            | Self::DriveGuarded { .. }
            | Self::NoMemory { .. }
            | Self::HoldsMemory { .. }
            | Self::HasDrives(_)
            | Self::MemoryTooDeep(_)
            | Self::DriverInUse(_)
            | Self::ProjectLocked { .. }
            | Self::ImageDamaged { .. }
            | Self::FilesNotReadable { .. }
            | Self::NoOrigin { .. }
            | Self::OriginDeleted { .. }
            | Self::OriginMovedOn { .. }
            | Self::Unrelated { .. }
            | Self::AncestorDeleted { .. }
            | Self::MergeConflicts { .. }
            | Self::DriveConflicts { .. }
            | Self::RunStatus { .. }
            | Self::RunBusy(_)
            | Self::RunChanged { .. }
            | Self::ApprovalAnswered { .. }
            | Self::SandboxReplaced(_)
            | Self::KeyReused(_) => ErrorKind::Conflict,
            Self::Gone(_)
            | Self::SessionEnded { .. }
            | Self::SnapshotDeleted(_)
            | Self::NothingKept(_)
            | Self::SnapshotGone { .. } => ErrorKind::Gone,
            Self::RecordChanged { .. } => ErrorKind::Conflict,
            Self::Generation { .. } | Self::DriveGeneration { .. } | Self::UsedMeanwhile(_) => {
                ErrorKind::Stale
            }
            Self::NoUids
            | Self::Driver(DriverError::NoRoom { .. })
            | Self::Db(DbError::Full { .. }) => ErrorKind::Exhausted,
            Self::SessionOver
            | Self::ShuttingDown
            | Self::Recovering
            | Self::TooManyExports(_)
            | Self::StartSlow { .. }
            | Self::PortSlow { .. } => ErrorKind::Unavailable,
            Self::Image(error) => image_kind(error),
            Self::Store(error) => store_kind(error),
            Self::Guest(error) => guest_kind(error),
            Self::Db(DbError::Cursor | DbError::Order) => ErrorKind::Invalid,
            Self::Db(DbError::Rebuilding | DbError::Closed | DbError::Slow { .. }) => {
                ErrorKind::Unavailable
            }
            Self::Driver(DriverError::MountPoint { .. }) => ErrorKind::Invalid,
            Self::Driver(DriverError::Unpackable { .. }) => ErrorKind::Conflict,
            Self::StartFailed { .. }
            | Self::NotAllowed(_)
            | Self::Driver(_)
            | Self::Db(_)
            | Self::Secret(_)
            | Self::Outside(_)
            | Self::EventJournal(_)
            | Self::AuditLog(_)
            | Self::NetworkDevice(_)
            | Self::Authority(_)
            | Self::SecretsKey(_) => ErrorKind::Fault,
        }
    }

    /// A word for programs; it does not change once it is out.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Config(_) | Self::Invalid { .. } | Self::Db(DbError::Cursor | DbError::Order) => {
                "invalid"
            }
            Self::NoDriver { .. } => "unknown_driver",
            Self::AbsentDriver { .. } => "driver_not_available",
            Self::NoStdin(_) => "no_stdin",
            Self::StdinClosed(_) => "stdin_closed",
            Self::StdinGap { .. } => "stdin_gap",
            Self::BadKey => "unauthorized",
            Self::NoSandbox(_) => "sandbox_not_found",
            Self::Lost(_) => "sandbox_damaged",
            Self::NotInTrash(_) => "not_in_trash",
            Self::NoSnapshot(_) => "snapshot_not_found",
            Self::NoSession(_) => "session_not_found",
            Self::NoCommand { .. } => "command_not_found",
            Self::NoPort { .. } => "port_not_published",
            Self::NoService { .. } => "service_not_found",
            Self::StartSlow { .. } | Self::PortSlow { .. } => "timeout",
            Self::NoProject(_) => "project_not_found",
            Self::ProjectLocked { .. } => "project_locked",
            Self::ImageDamaged { .. } => "image_damaged",
            Self::NoKey(_) => "key_not_found",
            Self::NoDrive(_) => "drive_not_found",
            Self::DriveTaken(_) => "drive_taken",
            Self::DriveDiffers { .. } => "drive_mismatch",
            Self::DriveAttached { .. } => "drive_attached",
            Self::DriveNotInitialised { .. } => "drive_not_initialized",
            Self::DriveBroken { .. } => "drive_broken",
            Self::DrivesUnsaved { .. } => "drives_unsaved",
            Self::Driver(DriverError::MountPoint { .. }) => "bad_mount_point",
            Self::Driver(DriverError::Unpackable { .. }) => "unsupported_files",
            Self::NameTaken(_) => "name_taken",
            Self::ProjectTaken(_) => "project_taken",
            Self::ProjectInUse { .. } => "project_in_use",
            Self::NotRunning(_) => "not_running",
            Self::CommandEnded(_) => "command_ended",
            Self::SnapshotInUse { .. } => "snapshot_in_use",
            Self::Unresumable { .. } => "unresumable",
            Self::Guarded { findings, .. }
            | Self::TakenGuarded { findings, .. }
            | Self::DriveGuarded { findings, .. } => {
                if findings.iter().any(|found| found.kind == FindingKind::Secret) {
                    "secret_found"
                } else {
                    "decision_needed"
                }
            }
            Self::NoQuarantine(_) => "quarantine_not_found",
            Self::KeyReused(_) => "idempotency_key_reused",
            Self::Gone(_) => "deleted",
            Self::NothingKept(_) => "no_snapshot",
            Self::SnapshotDeleted(_) => "snapshot_deleted",
            Self::SnapshotGone { .. } => "snapshot_gone",
            Self::RecordChanged { .. } => "record_changed",
            Self::Generation { .. } | Self::DriveGeneration { .. } => "generation_mismatch",
            Self::UsedMeanwhile(_) => "used_meanwhile",
            Self::NoLabel { .. } => "label_not_found",
            Self::FilesNotReadable { .. } => "files_not_readable",
            Self::NoOrigin { .. } => "not_a_fork",
            Self::OriginDeleted { .. } => "origin_deleted",
            Self::OriginMovedOn { .. } => "origin_moved_on",
            Self::Unrelated { .. } => "unrelated",
            Self::AncestorDeleted { .. } => "ancestor_deleted",
            Self::MergeConflicts { .. } | Self::DriveConflicts { .. } => "merge_conflicts",
            Self::NoRun(_) => "run_not_found",
            Self::RunStatus { .. } => "run_status",
            Self::RunBusy(_) => "run_busy",
            Self::RunChanged { .. } => "run_changed",
            Self::TooManyRuns { .. } => "too_many_runs",
            Self::NoApproval(_) => "approval_not_found",
            Self::ApprovalAnswered { .. } => "already_answered",
            Self::TooManyApprovals { .. } => "too_many_approvals",
            Self::NotApproved { .. } => "not_approved",
            Self::SandboxReplaced(_) => "sandbox_replaced",
            Self::SeparateApprover => "separate_approver",
            Self::PrivateWebhook => "forbidden",
            Self::TooManyDeliveries(_) => "too_many_deliveries",
            Self::Store(StoreError::DiffTooLarge { .. }) => "diff_too_large",
            Self::Store(StoreError::ExportTooLarge { .. }) => "export_too_large",
            Self::Store(StoreError::Busy { .. }) => "busy",
            Self::Store(StoreError::OverLimit { .. }) => "disk_limit",
            Self::Store(StoreError::NotTaken { .. }) => "timeout",
            Self::Store(StoreError::BadGlob { .. }) => "invalid",
            Self::NoMemory { .. } => "memory_not_supported",
            Self::HoldsMemory { .. } => "has_memory",
            Self::HasDrives(_) => "has_drives",
            Self::MemoryTooDeep(_) => "too_many_captures",
            Self::DriverInUse(_) => "driver_in_use",
            Self::NoUids => "no_uid_ranges",
            Self::SessionOver | Self::SessionEnded { .. } => "session_ended",
            Self::ShuttingDown | Self::Db(DbError::Closed) => "shutting_down",
            Self::Recovering => "recovering",
            Self::TooManyExports(_) => "too_many_exports",
            Self::Db(DbError::Rebuilding) => "index_rebuilding",
            Self::StartFailed { .. } => "start_failed",
            Self::Image(error) => image_code(error),
            Self::Guest(error) => guest_code(error),
            Self::Store(_) | Self::Driver(_) | Self::Db(_)
                if self.kind() == ErrorKind::Exhausted =>
            {
                "insufficient_storage"
            }
            Self::Store(StoreError::BadExport { .. }) => "export_refused",
            Self::Store(StoreError::InDoubt { .. }) => "sync_failed",
            Self::Store(StoreError::Slow { .. }) | Self::Db(DbError::Slow { .. }) => {
                "storage_not_responding"
            }
            Self::Store(error) if error.is_read_only() => "read_only_filesystem",
            Self::Store(StoreError::Io { .. }) => "storage_failed",
            Self::Sealed { .. } => "decryption_failed",
            Self::NoSecret(_) => "secret_not_found",
            Self::NoWebhook(_) => "webhook_not_found",
            Self::SecretTags { .. } => "secret_not_allowed",
            Self::Store(_)
            | Self::NotAllowed(_)
            | Self::Driver(_)
            | Self::Db(_)
            | Self::Secret(_)
            | Self::Outside(_)
            | Self::EventJournal(_)
            | Self::AuditLog(_)
            | Self::NetworkDevice(_)
            | Self::Authority(_)
            | Self::SecretsKey(_) => "internal",
        }
    }

    /// Whether the disk under the data directory is at fault, so that the cause helps whoever runs the server.
    #[must_use]
    pub fn is_of_the_disk(&self) -> bool {
        matches!(self, Self::Store(StoreError::Io { .. }) | Self::Db(DbError::Query { .. }))
    }

    /// What to do about it, for people.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::NameTaken(name) => {
                format!("choose another name, or ask to get `{name}` if it exists (`keep create {name} --get`)")
            }
            Self::AbsentDriver { fix, .. } => fix.clone()?,
            Self::NoSandbox(NoSuch { trashed: None, .. }) => "`keep ls` lists what there is".to_owned(),
            Self::NoSandbox(NoSuch { name, trashed: Some(_) }) => {
                format!("`keep trash restore {name}` brings it back")
            }
            Self::Lost(Lost { id, .. }) => format!(
                "`keep doctor` says what is wrong with it; put `sandboxes/{id}/sandbox.json` back, or fork one of its snapshots \
                 (`keep snapshot ls`). Its name is free again when its snapshots are deleted and the directory `sandboxes/{id}` \
                 is moved away"
            ),
            Self::NotInTrash(_) => "`keep trash ls` lists what there is".to_owned(),
            Self::NoService { sandbox, .. } => format!("`keep service ls {sandbox}` lists what there is"),
            Self::NoSnapshot(_) => "`keep snapshot ls` lists what there is".to_owned(),
            Self::TooManyExports(_) => "try again when one of them has ended".to_owned(),
            Self::NoCommand { sandbox, .. } => format!("`keep commands {sandbox}` lists what was run"),
            Self::NotRunning(name) => format!("start it with `keep start {name}`, or omit `if_running`"),
            Self::NoMemory { name, .. } => {
                format!("`keep stop {name}` keeps its files; stopped, it can change with `keep update {name} --driver microvm`")
            }
            Self::DriverInUse(name) => format!("`keep stop {name}` first"),
            Self::DrivesUnsaved { name, .. } => {
                format!("`keep rm {name}` tries again; `keep rm {name} --force` deletes it without recovering them")
            }
            Self::MemoryTooDeep(name) => format!("`keep pause {name}` or `keep stop {name}` once: either merges its captures"),
            Self::HasDrives(name) => {
                format!("`keep stop {name}` keeps its files, and those of its drives")
            }
            Self::HoldsMemory { name, .. } => {
                format!("`keep stop {name}` first: that keeps its files and discards its memory")
            }
            Self::NoLabel { name, .. } => format!("`keep snapshot ls {name}` lists labels"),
            Self::FilesNotReadable { .. } => {
                "stop the sandbox, or name `@saved` if its last snapshot was made by a stop".to_owned()
            }
            Self::NoOrigin { fork } => format!("`keep merge {fork} --into NAME` names the sandbox that gets the changes"),
            Self::OriginDeleted { fork, origin } => format!(
                "`keep trash restore {origin}` brings it back; or `keep rename {fork} {origin}` puts the fork in its place"
            ),
            Self::OriginMovedOn { origin, fork, .. } => format!(
                "`keep merge {fork}` brings in what the fork changed; `keep diff {fork}@base {origin}` shows what has changed there"
            ),
            Self::Unrelated { from, into } => format!(
                "exchange a patch instead: `keep diff {from}@base {from} --patch`, then `git apply` in `{into}`"
            ),
            Self::AncestorDeleted { .. } => "exchange a patch or a branch instead".to_owned(),
            Self::MergeConflicts { from, into, .. } => format!(
                "`keep merge {from} --into {into} --dry-run` lists all of them; `--conflicts keep` writes both versions, `--only GLOB` takes chosen paths"
            ),
            Self::DriveConflicts { drive, .. } => format!(
                "choose another directory with `--to drive:{drive}:/DIR`, or fewer paths with `--only`"
            ),
            Self::DriveGuarded { from, .. } => format!(
                "remove these files in `{from}`, or choose other paths; the guard of `{from}` decides what it lets pass"
            ),
            Self::NoRun(_) => "`keep runs ls` lists what there is".to_owned(),
            Self::RunStatus { run, .. } => format!("`keep runs show {run}` tells how it stands"),
            Self::RunBusy(_) => "look again in a moment".to_owned(),
            Self::RunChanged { run, .. } => format!(
                "`keep runs review {run} --again` pins what it is now; look at it before you accept it"
            ),
            Self::TooManyRuns { .. } => {
                "wait until some have started, or raise the limit with `keep project governance`".to_owned()
            }
            Self::NoApproval(_) => "`keep approvals ls --all` lists what there is".to_owned(),
            Self::SandboxReplaced(_) => {
                "what was approved was for the sandbox of that name at that time: start the command again".to_owned()
            }
            Self::ApprovalAnswered { approval, .. } => {
                format!("`keep approvals show {approval}` tells who answered")
            }
            Self::TooManyApprovals { .. } => "`keep approvals ls` lists those that wait".to_owned(),
            Self::NotApproved { approval, .. } => {
                format!("`keep approvals show {approval}` tells who answered, and why")
            }
            Self::SeparateApprover => "use the key of somebody else".to_owned(),
            Self::PrivateWebhook => "an admin can do it for the project, or give a public address".to_owned(),
            Self::TooManyDeliveries(_) => "try again in a moment; `keep webhook show` lists the last deliveries".to_owned(),
            Self::Store(StoreError::DiffTooLarge { .. }) => "compare fewer paths: name files or directories".to_owned(),
            Self::Store(StoreError::ExportTooLarge { .. }) => {
                "start a sandbox from the snapshot, remove what makes it so large, and export that; or copy files out with `keep cp`".to_owned()
            }
            Self::Store(StoreError::Busy { .. }) => "try again in a moment".to_owned(),
            Self::Store(StoreError::OverLimit { .. }) => {
                "`keep update NAME --disk SIZE` gives the target a higher limit; `keep merge --only GLOB` takes chosen paths".to_owned()
            }
            Self::RecordChanged { .. } => "try again: the next attempt begins with the changed record".to_owned(),
            Self::Generation { .. } | Self::DriveGeneration { .. } => "somebody changed it meanwhile: look again, then decide".to_owned(),
            Self::NoDrive(_) => "`keep drive ls` lists what there is; `keep drive create` makes one".to_owned(),
            Self::DriveAttached { sandbox, .. } => {
                format!("one session writes to a drive at a time: stop `{sandbox}`, mount a snapshot of the drive, or fork it")
            }
            Self::DriveNotInitialised { writer: Some(writer), .. } => format!("`keep stop {writer}` ends its session"),
            Self::DriveNotInitialised { .. } => "mount it read-write in a sandbox first, and stop that".to_owned(),
            Self::SnapshotInUse { .. } => "delete those first, or roll them back to another snapshot".to_owned(),
            Self::Unresumable { offers, name, .. } if !offers.is_empty() => {
                let offers: Vec<String> = offers.iter().take(5).map(ToString::to_string).collect();
                format!("these snapshots are complete: {}; `keep rollback {name} <snapshot>` returns to one", offers.join(", "))
            }
            Self::SnapshotGone { name, .. } => {
                format!("`keep rollback {name} <snapshot>` returns to another snapshot; the sandbox never falls back to its image")
            }
            Self::Sealed { reason: SealError::OtherKey { .. }, .. } => {
                "start the server with the key it was sealed with, or set it again".to_owned()
            }
            Self::NoWebhook(_) => "`keep webhook ls` lists what there is".to_owned(),
            Self::NoSecret(_) => "`keep secret ls` lists what there is; `keep secret set` makes one".to_owned(),
            Self::Sealed { .. } => "set it again".to_owned(),
            Self::Guarded { name, findings, .. } => guarded_hint(name, findings),
            Self::TakenGuarded { from, into, .. } => format!(
                "remove these files in `{from}`, or take other paths with `keep merge {from} --into {into} --only GLOB`; \
                 the guard of `{into}` decides what it lets pass"
            ),
            Self::KeyReused(_) => "use a new key for a new request".to_owned(),
            Self::StartFailed { .. } => "its last snapshot is safe; see the daemon's log and `keep doctor`".to_owned(),
            Self::BadKey => "set SANDKEEP_KEY; `keep key create` makes a new one".to_owned(),
            Self::Store(_) | Self::Driver(_) if self.kind() == ErrorKind::Exhausted => {
                "delete sandboxes or snapshots (`keep usage` tells what takes up room); nothing was lost".to_owned()
            }
            Self::Store(StoreError::InDoubt { .. }) => {
                "replace these files by new ones or remove them inside the sandbox, then ask again; \
                 `keep stop --accept-doubtful` keeps them as they can be read now, \
                 `keep stop --discard` gives up what the session wrote; `keep doctor` tells more"
                    .to_owned()
            }
            Self::Store(error) if error.is_read_only() => {
                "the kernel makes a filesystem read-only when its disk fails: see the kernel's log (`dmesg`) and the disk, \
                 then mount it writable again"
                    .to_owned()
            }
            Self::Store(StoreError::Slow { .. }) | Self::Db(DbError::Slow { .. }) => {
                "the disk under the data directory hangs: see the kernel's log (`dmesg`) and the disk; \
                 what is being done goes on when it answers"
                    .to_owned()
            }
            Self::Store(StoreError::Io { .. }) => {
                "see the kernel's log (`dmesg`) and the disk under the data directory".to_owned()
            }
            Self::Store(StoreError::BadExport { .. }) => {
                "its disk is kept: `keep stop` tries again, `keep stop --discard` gives up what the session wrote".to_owned()
            }
            Self::Image(ImageError::NotFound { .. }) => {
                "`keep image pull <reference>` or `keep image import <name> <file>` brings one here".to_owned()
            }
            Self::Image(ImageError::Denied { registry, .. } | ImageError::Credentials { registry, .. }) => {
                format!("`docker login {registry}` stores credentials where the daemon looks for them")
            }
            Self::Guest(GuestError::DiskLimit { .. }) => {
                "remove files inside, or `keep update NAME --disk SIZE` gives it a higher limit".to_owned()
            }
            Self::Guest(GuestError::Refused { kind: Failure::NoExecutable, .. }) => {
                "the first word must be a program inside the sandbox; for shell syntax use `sh -c '...'`".to_owned()
            }
            _ => return None,
        })
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

fn guarded_hint(name: &Name, findings: &[Finding]) -> String {
    if findings.iter().any(|found| found.kind == FindingKind::Secret) {
        format!(
            "`keep stop {name} --redact` masks them, `--drop GLOB` leaves files out (archives cannot be masked), \
             `--discard` gives up what the session wrote"
        )
    } else {
        format!("`keep stop {name} --promote GLOB` keeps them, `--drop GLOB` leaves them out")
    }
}

fn guest_kind(error: &GuestError) -> ErrorKind {
    match error {
        GuestError::Refused { kind, .. } => match kind {
            Failure::NotFound => ErrorKind::NotFound,
            Failure::NoExecutable
            | Failure::NotExecutable
            | Failure::NoDirectory
            | Failure::NoUser
            | Failure::Invalid
            | Failure::Denied
            | Failure::Refused => ErrorKind::Invalid,
            Failure::Exists => ErrorKind::Conflict,
            Failure::NoSpace | Failure::Exhausted => ErrorKind::Exhausted,
            Failure::Fault => ErrorKind::Fault,
        },
        GuestError::DiskLimit { .. } => ErrorKind::OverLimit,
        GuestError::Lost | GuestError::Timeout => ErrorKind::Unavailable,
        _ => ErrorKind::Fault,
    }
}

fn guest_code(error: &GuestError) -> &'static str {
    match error {
        GuestError::Refused { kind, .. } => match kind {
            Failure::NotFound => "path_not_found",
            Failure::NoExecutable => "executable_not_found",
            Failure::NotExecutable => "not_executable",
            Failure::NoDirectory => "cwd_not_found",
            Failure::NoUser => "user_not_found",
            Failure::Exists => "path_exists",
            Failure::Invalid => "bad_path",
            Failure::Denied => "permission_denied",
            Failure::NoSpace => "insufficient_storage",
            Failure::Exhausted => "exhausted",
            Failure::Refused => "port_closed",
            Failure::Fault => "internal",
        },
        GuestError::DiskLimit { .. } => "disk_limit",
        GuestError::Lost => "session_ended",
        GuestError::Timeout => "timeout",
        _ => "internal",
    }
}

fn store_kind(error: &StoreError) -> ErrorKind {
    match error {
        _ if error.is_no_room() => ErrorKind::Exhausted,
        StoreError::NotFound { .. } => ErrorKind::NotFound,
        StoreError::BadGlob { .. } => ErrorKind::Invalid,
        StoreError::OverLimit { .. } => ErrorKind::OverLimit,
        StoreError::DiffTooLarge { .. } | StoreError::ExportTooLarge { .. } => ErrorKind::TooLarge,
        StoreError::BadExport { .. } | StoreError::InDoubt { .. } => ErrorKind::Conflict,
        StoreError::ShuttingDown
        | StoreError::Slow { .. }
        | StoreError::Busy { .. }
        | StoreError::NotTaken { .. } => ErrorKind::Unavailable,
        _ if error.is_read_only() => ErrorKind::Unavailable,
        _ => ErrorKind::Fault,
    }
}

fn not_initialised(drive: &Name, writer: Option<&Name>) -> String {
    match writer {
        Some(writer) => format!(
            "drive `{drive}` has no snapshot yet: sandbox `{writer}` is the first to write to it, and what it writes is kept when its session ends"
        ),
        None => format!("nothing was ever written to drive `{drive}`"),
    }
}

fn image_kind(error: &ImageError) -> ErrorKind {
    match error {
        ImageError::NotFound { .. } | ImageError::Unknown { .. } => ErrorKind::NotFound,
        ImageError::BadName { .. }
        | ImageError::BadCustomization { .. }
        | ImageError::NotAnImage { .. }
        | ImageError::Damaged { .. }
        | ImageError::Refused { .. }
        | ImageError::Digest { .. }
        | ImageError::Denied { .. }
        | ImageError::Credentials { .. }
        | ImageError::Unreachable { .. }
        | ImageError::Registry { .. }
        | ImageError::Platform { .. } => ErrorKind::Invalid,
        ImageError::TooLarge { .. } => ErrorKind::Exhausted,
        ImageError::Store { source } => store_kind(source),
        _ => ErrorKind::Fault,
    }
}

fn image_code(error: &ImageError) -> &'static str {
    match error {
        ImageError::NotFound { .. } | ImageError::Unknown { .. } => "image_not_found",
        ImageError::BadName { .. } | ImageError::BadCustomization { .. } => "invalid",
        ImageError::NotAnImage { .. } | ImageError::Damaged { .. } | ImageError::Refused { .. } => {
            "bad_image"
        }
        ImageError::Digest { .. } => "digest_mismatch",
        ImageError::Platform { .. } => "wrong_platform",
        ImageError::Denied { .. } | ImageError::Credentials { .. } => "registry_denied",
        ImageError::Unreachable { .. } | ImageError::Registry { .. } => "registry_unreachable",
        ImageError::TooLarge { .. } => "insufficient_storage",
        _ => "internal",
    }
}
