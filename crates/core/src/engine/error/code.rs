//! Error codes: words for programs. `docs/API.md` lists them all.

use super::{Error, ErrorKind};
use crate::db::DbError;
use crate::driver::DriverError;
use crate::guest::GuestError;
use crate::model::FindingKind;
use crate::store::StoreError;
use crate::store::image::ImageError;
use sandkeep_proto::link::Failure;

impl Error {
    /// A code for programs; it does not change once it is released.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Config(_) | Self::Invalid { .. } | Self::Db(DbError::Cursor | DbError::Order) => {
                "invalid"
            }
            Self::Dockerfile(_) => "bad_dockerfile",
            Self::BuildStepFailed { .. } => "build_failed",
            Self::BuildStep { error, .. } => error.code(),
            Self::TooManyBuilds { .. } => "too_many_builds",
            Self::BuildCanceled => "build_canceled",
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
            Self::ProjectInUse { .. } | Self::ProjectRuns { .. } => "project_in_use",
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
            Self::PrivateWebhook | Self::WebhookAnswers => "forbidden",
            Self::AnswerLink(_) => "answer_link_not_valid",
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
            Self::Store(StoreError::BadExport { .. } | StoreError::ExportLost { .. }) => {
                "export_refused"
            }
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

fn image_code(error: &ImageError) -> &'static str {
    match error {
        ImageError::NotFound { .. } | ImageError::Unknown { .. } => "image_not_found",
        ImageError::BadName { .. } | ImageError::BadCustomization { .. } => "invalid",
        ImageError::BadCopy { .. } => "bad_dockerfile",
        ImageError::NotAnImage { .. } | ImageError::Damaged { .. } | ImageError::Refused { .. } => {
            "bad_image"
        }
        ImageError::Digest { .. } => "digest_mismatch",
        ImageError::Platform { .. } => "wrong_platform",
        ImageError::Denied { .. } | ImageError::Credentials { .. } => "registry_denied",
        ImageError::Unreachable { .. } | ImageError::Registry { .. } => "registry_unreachable",
        ImageError::TooLarge { .. } => "insufficient_storage",
        error if error.is_no_room() => "insufficient_storage",
        _ => "internal",
    }
}
