"""Errors of the server, by code. Made by sdk/generate.py. Do not edit."""

from __future__ import annotations

from ._errors import ApiError

__all__ = [
    "AccessError",
    "AuthenticationError",
    "BadRequestError",
    "ConflictError",
    "GoneError",
    "LimitError",
    "NotFoundError",
    "PreconditionError",
    "ResourceError",
    "ServerError",
    "TooManyError",
    "UnavailableError",
    "AlreadyAnsweredError",
    "AncestorDeletedError",
    "AnswerLinkNotValidError",
    "ApprovalNotFoundError",
    "BadDockerfileError",
    "BadImageError",
    "BadMountPointError",
    "BadPathError",
    "BuildCanceledError",
    "BuildFailedError",
    "BusyError",
    "CommandEndedError",
    "CommandNotFoundError",
    "CrossOriginError",
    "CwdNotFoundError",
    "DecisionNeededError",
    "DecryptionFailedError",
    "DeletedError",
    "DiffTooLargeError",
    "DigestMismatchError",
    "DiskLimitError",
    "DriveAttachedError",
    "DriveBrokenError",
    "DriveMismatchError",
    "DriveNotFoundError",
    "DriveNotInitializedError",
    "DriveTakenError",
    "DriverInUseError",
    "DriverNotAvailableError",
    "DrivesUnsavedError",
    "ExecutableNotFoundError",
    "ExhaustedError",
    "ExportRefusedError",
    "ExportTooLargeError",
    "FilesNotReadableError",
    "ForbiddenError",
    "GenerationMismatchError",
    "HasDrivesError",
    "HasMemoryError",
    "IdempotencyKeyReusedError",
    "ImageDamagedError",
    "ImageNotFoundError",
    "IndexRebuildingError",
    "InsufficientStorageError",
    "InternalError",
    "InvalidError",
    "KeyNotFoundError",
    "LabelNotFoundError",
    "MemoryNotSupportedError",
    "MergeConflictsError",
    "MethodNotAllowedError",
    "NameTakenError",
    "NoSnapshotError",
    "NoStdinError",
    "NoUidRangesError",
    "NotAForkError",
    "NotApprovedError",
    "NotExecutableError",
    "NotInTrashError",
    "NotRunningError",
    "OriginDeletedError",
    "OriginMovedOnError",
    "PathExistsError",
    "PathNotFoundError",
    "PermissionDeniedError",
    "PortClosedError",
    "PortNotPublishedError",
    "PortPublicError",
    "ProjectInUseError",
    "ProjectLockedError",
    "ProjectNotFoundError",
    "ProjectTakenError",
    "QuarantineNotFoundError",
    "RateLimitedError",
    "ReadOnlyFilesystemError",
    "RecordChangedError",
    "RecoveringError",
    "RegistryDeniedError",
    "RegistryUnreachableError",
    "RouteNotFoundError",
    "RunBusyError",
    "RunChangedError",
    "RunNotFoundError",
    "RunStatusError",
    "SandboxDamagedError",
    "SandboxNotFoundError",
    "SandboxReplacedError",
    "SecretFoundError",
    "SecretNotAllowedError",
    "SecretNotFoundError",
    "SeparateApproverError",
    "ServiceNotFoundError",
    "SessionEndedError",
    "SessionNotFoundError",
    "ShuttingDownError",
    "SnapshotDeletedError",
    "SnapshotGoneError",
    "SnapshotInUseError",
    "SnapshotNotFoundError",
    "StartFailedError",
    "StdinClosedError",
    "StdinGapError",
    "StorageFailedError",
    "StorageNotRespondingError",
    "SyncFailedError",
    "ServerTimeoutError",
    "TlsRequiredError",
    "TooLargeError",
    "TooManyApprovalsError",
    "TooManyBuildsError",
    "TooManyCapturesError",
    "TooManyConcurrentRequestsError",
    "TooManyConnectionsError",
    "TooManyDeliveriesError",
    "TooManyExportsError",
    "TooManyRunsError",
    "UnauthorizedError",
    "UnknownDriverError",
    "UnknownHostError",
    "UnrelatedError",
    "UnresumableError",
    "UnsupportedFilesError",
    "UnsupportedMediaTypeError",
    "UpgradeRequiredError",
    "UsedMeanwhileError",
    "UserNotFoundError",
    "WebhookNotFoundError",
    "WrongPlatformError",
]


class AccessError(ApiError):
    """The key may not do this."""


class AuthenticationError(ApiError):
    """The key is missing, unknown or expired."""


class BadRequestError(ApiError):
    """The request is wrong as it is."""


class ConflictError(ApiError):
    """It cannot be done in the present state."""


class GoneError(ApiError):
    """What it is about no longer exists."""


class LimitError(ApiError):
    """It is larger than a limit."""


class NotFoundError(ApiError):
    """There is nothing of that name or id."""


class PreconditionError(ApiError):
    """The state is not what the call expects."""


class ResourceError(ApiError):
    """The host or the sandbox has run out of something."""


class ServerError(ApiError):
    """The server failed."""


class TooManyError(ApiError):
    """Too much at a time: later it works."""


class UnavailableError(ApiError):
    """It does not work at this moment."""


class AlreadyAnsweredError(ConflictError):
    """`already_answered`, 409."""


class AncestorDeletedError(ConflictError):
    """`ancestor_deleted`, 409."""


class AnswerLinkNotValidError(AuthenticationError):
    """`answer_link_not_valid`, 401."""


class ApprovalNotFoundError(NotFoundError):
    """`approval_not_found`, 404."""


class BadDockerfileError(BadRequestError):
    """`bad_dockerfile`, 400."""


class BadImageError(BadRequestError):
    """`bad_image`, 400."""


class BadMountPointError(BadRequestError):
    """`bad_mount_point`, 400."""


class BadPathError(BadRequestError):
    """`bad_path`, 400."""


class BuildCanceledError(UnavailableError):
    """`build_canceled`, 503."""


class BuildFailedError(BadRequestError):
    """`build_failed`, 400."""


class BusyError(UnavailableError):
    """`busy`, 503."""


class CommandEndedError(ConflictError):
    """`command_ended`, 409."""


class CommandNotFoundError(NotFoundError):
    """`command_not_found`, 404."""


class CrossOriginError(AccessError):
    """`cross_origin`, 403."""


class CwdNotFoundError(BadRequestError):
    """`cwd_not_found`, 400."""


class DecisionNeededError(ConflictError):
    """`decision_needed`, 409."""


class DecryptionFailedError(ConflictError):
    """`decryption_failed`, 409."""


class DeletedError(GoneError):
    """`deleted`, 410."""


class DiffTooLargeError(LimitError):
    """`diff_too_large`, 422."""


class DigestMismatchError(BadRequestError):
    """`digest_mismatch`, 400."""


class DiskLimitError(LimitError):
    """`disk_limit`, 413."""


class DriveAttachedError(ConflictError):
    """`drive_attached`, 409."""


class DriveBrokenError(ConflictError):
    """`drive_broken`, 409."""


class DriveMismatchError(ConflictError):
    """`drive_mismatch`, 409."""


class DriveNotFoundError(NotFoundError):
    """`drive_not_found`, 404."""


class DriveNotInitializedError(ConflictError):
    """`drive_not_initialized`, 409."""


class DriveTakenError(ConflictError):
    """`drive_taken`, 409."""


class DriverInUseError(ConflictError):
    """`driver_in_use`, 409."""


class DriverNotAvailableError(BadRequestError):
    """`driver_not_available`, 400."""


class DrivesUnsavedError(ConflictError):
    """`drives_unsaved`, 409."""


class ExecutableNotFoundError(BadRequestError):
    """`executable_not_found`, 400."""


class ExhaustedError(ResourceError):
    """`exhausted`, 507."""


class ExportRefusedError(ConflictError):
    """`export_refused`, 409."""


class ExportTooLargeError(LimitError):
    """`export_too_large`, 422."""


class FilesNotReadableError(ConflictError):
    """`files_not_readable`, 409."""


class ForbiddenError(AccessError):
    """`forbidden`, 403."""


class GenerationMismatchError(PreconditionError):
    """`generation_mismatch`, 412."""


class HasDrivesError(ConflictError):
    """`has_drives`, 409."""


class HasMemoryError(ConflictError):
    """`has_memory`, 409."""


class IdempotencyKeyReusedError(ConflictError):
    """`idempotency_key_reused`, 409."""


class ImageDamagedError(ConflictError):
    """`image_damaged`, 409."""


class ImageNotFoundError(NotFoundError):
    """`image_not_found`, 404."""


class IndexRebuildingError(UnavailableError):
    """`index_rebuilding`, 503."""


class InsufficientStorageError(ResourceError):
    """`insufficient_storage`, 507."""


class InternalError(ServerError):
    """`internal`, 500."""


class InvalidError(BadRequestError):
    """`invalid`, 400."""


class KeyNotFoundError(NotFoundError):
    """`key_not_found`, 404."""


class LabelNotFoundError(NotFoundError):
    """`label_not_found`, 404."""


class MemoryNotSupportedError(ConflictError):
    """`memory_not_supported`, 409."""


class MergeConflictsError(ConflictError):
    """`merge_conflicts`, 409."""


class MethodNotAllowedError(BadRequestError):
    """`method_not_allowed`, 405."""


class NameTakenError(ConflictError):
    """`name_taken`, 409."""


class NoSnapshotError(GoneError):
    """`no_snapshot`, 410."""


class NoStdinError(BadRequestError):
    """`no_stdin`, 400."""


class NoUidRangesError(ResourceError):
    """`no_uid_ranges`, 507."""


class NotAForkError(ConflictError):
    """`not_a_fork`, 409."""


class NotApprovedError(AccessError):
    """`not_approved`, 403."""


class NotExecutableError(BadRequestError):
    """`not_executable`, 400."""


class NotInTrashError(NotFoundError):
    """`not_in_trash`, 404."""


class NotRunningError(ConflictError):
    """`not_running`, 409."""


class OriginDeletedError(ConflictError):
    """`origin_deleted`, 409."""


class OriginMovedOnError(ConflictError):
    """`origin_moved_on`, 409."""


class PathExistsError(ConflictError):
    """`path_exists`, 409."""


class PathNotFoundError(NotFoundError):
    """`path_not_found`, 404."""


class PermissionDeniedError(BadRequestError):
    """`permission_denied`, 400."""


class PortClosedError(BadRequestError):
    """`port_closed`, 400."""


class PortNotPublishedError(NotFoundError):
    """`port_not_published`, 404."""


class PortPublicError(ConflictError):
    """`port_public`, 409."""


class ProjectInUseError(ConflictError):
    """`project_in_use`, 409."""


class ProjectLockedError(ConflictError):
    """`project_locked`, 409."""


class ProjectNotFoundError(NotFoundError):
    """`project_not_found`, 404."""


class ProjectTakenError(ConflictError):
    """`project_taken`, 409."""


class QuarantineNotFoundError(NotFoundError):
    """`quarantine_not_found`, 404."""


class RateLimitedError(TooManyError):
    """`rate_limited`, 429."""


class ReadOnlyFilesystemError(UnavailableError):
    """`read_only_filesystem`, 503."""


class RecordChangedError(ConflictError):
    """`record_changed`, 409."""


class RecoveringError(UnavailableError):
    """`recovering`, 503."""


class RegistryDeniedError(BadRequestError):
    """`registry_denied`, 400."""


class RegistryUnreachableError(BadRequestError):
    """`registry_unreachable`, 400."""


class RouteNotFoundError(NotFoundError):
    """`route_not_found`, 404."""


class RunBusyError(ConflictError):
    """`run_busy`, 409."""


class RunChangedError(ConflictError):
    """`run_changed`, 409."""


class RunNotFoundError(NotFoundError):
    """`run_not_found`, 404."""


class RunStatusError(ConflictError):
    """`run_status`, 409."""


class SandboxDamagedError(ConflictError):
    """`sandbox_damaged`, 409."""


class SandboxNotFoundError(NotFoundError):
    """`sandbox_not_found`, 404."""


class SandboxReplacedError(ConflictError):
    """`sandbox_replaced`, 409."""


class SecretFoundError(ConflictError):
    """`secret_found`, 409."""


class SecretNotAllowedError(ConflictError):
    """`secret_not_allowed`, 409."""


class SecretNotFoundError(NotFoundError):
    """`secret_not_found`, 404."""


class SeparateApproverError(AccessError):
    """`separate_approver`, 403."""


class ServiceNotFoundError(NotFoundError):
    """`service_not_found`, 404."""


class SessionEndedError(GoneError):
    """`session_ended`, 410, 503."""


class SessionNotFoundError(NotFoundError):
    """`session_not_found`, 404."""


class ShuttingDownError(UnavailableError):
    """`shutting_down`, 503."""


class SnapshotDeletedError(GoneError):
    """`snapshot_deleted`, 410."""


class SnapshotGoneError(GoneError):
    """`snapshot_gone`, 410."""


class SnapshotInUseError(ConflictError):
    """`snapshot_in_use`, 409."""


class SnapshotNotFoundError(NotFoundError):
    """`snapshot_not_found`, 404."""


class StartFailedError(ServerError):
    """`start_failed`, 500."""


class StdinClosedError(ConflictError):
    """`stdin_closed`, 409."""


class StdinGapError(BadRequestError):
    """`stdin_gap`, 400."""


class StorageFailedError(ServerError):
    """`storage_failed`, 500."""


class StorageNotRespondingError(UnavailableError):
    """`storage_not_responding`, 503."""


class SyncFailedError(ConflictError):
    """`sync_failed`, 409."""


class ServerTimeoutError(UnavailableError):
    """`timeout`, 408, 504, 503."""


class TlsRequiredError(BadRequestError):
    """`tls_required`, 400."""


class TooLargeError(LimitError):
    """`too_large`, 413."""


class TooManyApprovalsError(TooManyError):
    """`too_many_approvals`, 429."""


class TooManyBuildsError(TooManyError):
    """`too_many_builds`, 429."""


class TooManyCapturesError(ConflictError):
    """`too_many_captures`, 409."""


class TooManyConcurrentRequestsError(TooManyError):
    """`too_many_concurrent_requests`, 429."""


class TooManyConnectionsError(TooManyError):
    """`too_many_connections`, 429, 503."""


class TooManyDeliveriesError(TooManyError):
    """`too_many_deliveries`, 429."""


class TooManyExportsError(UnavailableError):
    """`too_many_exports`, 503."""


class TooManyRunsError(TooManyError):
    """`too_many_runs`, 429."""


class UnauthorizedError(AuthenticationError):
    """`unauthorized`, 401."""


class UnknownDriverError(BadRequestError):
    """`unknown_driver`, 400."""


class UnknownHostError(BadRequestError):
    """`unknown_host`, 421."""


class UnrelatedError(ConflictError):
    """`unrelated`, 409."""


class UnresumableError(ConflictError):
    """`unresumable`, 409."""


class UnsupportedFilesError(ConflictError):
    """`unsupported_files`, 409."""


class UnsupportedMediaTypeError(BadRequestError):
    """`unsupported_media_type`, 415."""


class UpgradeRequiredError(BadRequestError):
    """`upgrade_required`, 426."""


class UsedMeanwhileError(PreconditionError):
    """`used_meanwhile`, 412."""


class UserNotFoundError(BadRequestError):
    """`user_not_found`, 400."""


class WebhookNotFoundError(NotFoundError):
    """`webhook_not_found`, 404."""


class WrongPlatformError(BadRequestError):
    """`wrong_platform`, 400."""


BY_CODE: dict[str, type[ApiError]] = {
    "already_answered": AlreadyAnsweredError,
    "ancestor_deleted": AncestorDeletedError,
    "answer_link_not_valid": AnswerLinkNotValidError,
    "approval_not_found": ApprovalNotFoundError,
    "bad_dockerfile": BadDockerfileError,
    "bad_image": BadImageError,
    "bad_mount_point": BadMountPointError,
    "bad_path": BadPathError,
    "build_canceled": BuildCanceledError,
    "build_failed": BuildFailedError,
    "busy": BusyError,
    "command_ended": CommandEndedError,
    "command_not_found": CommandNotFoundError,
    "cross_origin": CrossOriginError,
    "cwd_not_found": CwdNotFoundError,
    "decision_needed": DecisionNeededError,
    "decryption_failed": DecryptionFailedError,
    "deleted": DeletedError,
    "diff_too_large": DiffTooLargeError,
    "digest_mismatch": DigestMismatchError,
    "disk_limit": DiskLimitError,
    "drive_attached": DriveAttachedError,
    "drive_broken": DriveBrokenError,
    "drive_mismatch": DriveMismatchError,
    "drive_not_found": DriveNotFoundError,
    "drive_not_initialized": DriveNotInitializedError,
    "drive_taken": DriveTakenError,
    "driver_in_use": DriverInUseError,
    "driver_not_available": DriverNotAvailableError,
    "drives_unsaved": DrivesUnsavedError,
    "executable_not_found": ExecutableNotFoundError,
    "exhausted": ExhaustedError,
    "export_refused": ExportRefusedError,
    "export_too_large": ExportTooLargeError,
    "files_not_readable": FilesNotReadableError,
    "forbidden": ForbiddenError,
    "generation_mismatch": GenerationMismatchError,
    "has_drives": HasDrivesError,
    "has_memory": HasMemoryError,
    "idempotency_key_reused": IdempotencyKeyReusedError,
    "image_damaged": ImageDamagedError,
    "image_not_found": ImageNotFoundError,
    "index_rebuilding": IndexRebuildingError,
    "insufficient_storage": InsufficientStorageError,
    "internal": InternalError,
    "invalid": InvalidError,
    "key_not_found": KeyNotFoundError,
    "label_not_found": LabelNotFoundError,
    "memory_not_supported": MemoryNotSupportedError,
    "merge_conflicts": MergeConflictsError,
    "method_not_allowed": MethodNotAllowedError,
    "name_taken": NameTakenError,
    "no_snapshot": NoSnapshotError,
    "no_stdin": NoStdinError,
    "no_uid_ranges": NoUidRangesError,
    "not_a_fork": NotAForkError,
    "not_approved": NotApprovedError,
    "not_executable": NotExecutableError,
    "not_in_trash": NotInTrashError,
    "not_running": NotRunningError,
    "origin_deleted": OriginDeletedError,
    "origin_moved_on": OriginMovedOnError,
    "path_exists": PathExistsError,
    "path_not_found": PathNotFoundError,
    "permission_denied": PermissionDeniedError,
    "port_closed": PortClosedError,
    "port_not_published": PortNotPublishedError,
    "port_public": PortPublicError,
    "project_in_use": ProjectInUseError,
    "project_locked": ProjectLockedError,
    "project_not_found": ProjectNotFoundError,
    "project_taken": ProjectTakenError,
    "quarantine_not_found": QuarantineNotFoundError,
    "rate_limited": RateLimitedError,
    "read_only_filesystem": ReadOnlyFilesystemError,
    "record_changed": RecordChangedError,
    "recovering": RecoveringError,
    "registry_denied": RegistryDeniedError,
    "registry_unreachable": RegistryUnreachableError,
    "route_not_found": RouteNotFoundError,
    "run_busy": RunBusyError,
    "run_changed": RunChangedError,
    "run_not_found": RunNotFoundError,
    "run_status": RunStatusError,
    "sandbox_damaged": SandboxDamagedError,
    "sandbox_not_found": SandboxNotFoundError,
    "sandbox_replaced": SandboxReplacedError,
    "secret_found": SecretFoundError,
    "secret_not_allowed": SecretNotAllowedError,
    "secret_not_found": SecretNotFoundError,
    "separate_approver": SeparateApproverError,
    "service_not_found": ServiceNotFoundError,
    "session_ended": SessionEndedError,
    "session_not_found": SessionNotFoundError,
    "shutting_down": ShuttingDownError,
    "snapshot_deleted": SnapshotDeletedError,
    "snapshot_gone": SnapshotGoneError,
    "snapshot_in_use": SnapshotInUseError,
    "snapshot_not_found": SnapshotNotFoundError,
    "start_failed": StartFailedError,
    "stdin_closed": StdinClosedError,
    "stdin_gap": StdinGapError,
    "storage_failed": StorageFailedError,
    "storage_not_responding": StorageNotRespondingError,
    "sync_failed": SyncFailedError,
    "timeout": ServerTimeoutError,
    "tls_required": TlsRequiredError,
    "too_large": TooLargeError,
    "too_many_approvals": TooManyApprovalsError,
    "too_many_builds": TooManyBuildsError,
    "too_many_captures": TooManyCapturesError,
    "too_many_concurrent_requests": TooManyConcurrentRequestsError,
    "too_many_connections": TooManyConnectionsError,
    "too_many_deliveries": TooManyDeliveriesError,
    "too_many_exports": TooManyExportsError,
    "too_many_runs": TooManyRunsError,
    "unauthorized": UnauthorizedError,
    "unknown_driver": UnknownDriverError,
    "unknown_host": UnknownHostError,
    "unrelated": UnrelatedError,
    "unresumable": UnresumableError,
    "unsupported_files": UnsupportedFilesError,
    "unsupported_media_type": UnsupportedMediaTypeError,
    "upgrade_required": UpgradeRequiredError,
    "used_meanwhile": UsedMeanwhileError,
    "user_not_found": UserNotFoundError,
    "webhook_not_found": WebhookNotFoundError,
    "wrong_platform": WrongPlatformError,
}

BY_STATUS: dict[int, type[ApiError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    403: AccessError,
    404: NotFoundError,
    405: BadRequestError,
    408: UnavailableError,
    409: ConflictError,
    410: GoneError,
    412: PreconditionError,
    413: LimitError,
    415: BadRequestError,
    421: BadRequestError,
    422: LimitError,
    426: BadRequestError,
    429: TooManyError,
    500: ServerError,
    503: UnavailableError,
    507: ResourceError,
}

FORMER: dict[str, str] = {
    "no_room": "insufficient_storage",
    "keeps_no_memory": "memory_not_supported",
    "holds_memory": "has_memory",
    "memory_too_deep": "too_many_captures",
    "nothing_kept": "no_snapshot",
    "drive_differs": "drive_mismatch",
    "sealed": "decryption_failed",
    "files_unpackable": "unsupported_files",
    "no_such_route": "route_not_found",
    "too_many_at_once": "too_many_concurrent_requests",
}
