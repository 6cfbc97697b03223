//! Errors by what the caller can do about them.

use super::Error;
use crate::db::DbError;
use crate::driver::DriverError;
use crate::guest::GuestError;
use crate::store::StoreError;
use crate::store::image::ImageError;
use sandkeep_proto::link::Failure;

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
    /// Another caller may do it.
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
    /// Sorts the error for the fronts.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::BuildStep { error, .. } => error.kind(),
            Self::Config(_)
            | Self::Invalid { .. }
            | Self::Dockerfile(_)
            | Self::BuildStepFailed { .. }
            | Self::NoDriver { .. }
            | Self::AbsentDriver { .. }
            | Self::NoStdin(_)
            | Self::StdinGap { .. } => ErrorKind::Invalid,
            Self::BadKey | Self::AnswerLink(_) => ErrorKind::Unauthorized,
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
            Self::NotApproved { .. }
            | Self::SeparateApprover
            | Self::PrivateWebhook
            | Self::WebhookAnswers => ErrorKind::Forbidden,
            Self::TooManyRuns { .. }
            | Self::TooManyApprovals { .. }
            | Self::TooManyBuilds { .. }
            | Self::TooManyDeliveries(_) => ErrorKind::TooMany,
            Self::NameTaken(_)
            | Self::Lost(_)
            | Self::ProjectTaken(_)
            | Self::ProjectInUse { .. }
            | Self::ProjectRuns { .. }
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
            | Self::DriveConflicts { .. }
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
            | Self::BuildCanceled
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

fn store_kind(error: &StoreError) -> ErrorKind {
    match error {
        _ if error.is_no_room() => ErrorKind::Exhausted,
        StoreError::NotFound { .. } => ErrorKind::NotFound,
        StoreError::BadGlob { .. } => ErrorKind::Invalid,
        StoreError::OverLimit { .. } => ErrorKind::OverLimit,
        StoreError::DiffTooLarge { .. } | StoreError::ExportTooLarge { .. } => ErrorKind::TooLarge,
        StoreError::BadExport { .. }
        | StoreError::ExportLost { .. }
        | StoreError::InDoubt { .. } => ErrorKind::Conflict,
        StoreError::ShuttingDown
        | StoreError::Slow { .. }
        | StoreError::Busy { .. }
        | StoreError::NotTaken { .. } => ErrorKind::Unavailable,
        _ if error.is_read_only() => ErrorKind::Unavailable,
        _ => ErrorKind::Fault,
    }
}

fn image_kind(error: &ImageError) -> ErrorKind {
    match error {
        ImageError::NotFound { .. } | ImageError::Unknown { .. } => ErrorKind::NotFound,
        ImageError::BadName { .. }
        | ImageError::BadCustomization { .. }
        | ImageError::BadCopy { .. }
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
        error if error.is_no_room() => ErrorKind::Exhausted,
        ImageError::Store { source } => store_kind(source),
        _ => ErrorKind::Fault,
    }
}
