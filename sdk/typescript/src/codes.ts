/** Errors of the server, by code. Made by sdk/generate.py. Do not edit. */

import { ApiError } from "./api-error.js";

/** The key may not do this. */
export class AccessError extends ApiError {}

/** The key is missing, unknown or expired. */
export class AuthenticationError extends ApiError {}

/** The request is wrong as it is. */
export class BadRequestError extends ApiError {}

/** It cannot be done in the present state. */
export class ConflictError extends ApiError {}

/** What it is about no longer exists. */
export class GoneError extends ApiError {}

/** It is larger than a limit. */
export class LimitError extends ApiError {}

/** There is nothing of that name or id. */
export class NotFoundError extends ApiError {}

/** The state is not what the call expects. */
export class PreconditionError extends ApiError {}

/** The host or the sandbox has run out of something. */
export class ResourceError extends ApiError {}

/** The server failed. */
export class ServerError extends ApiError {}

/** Too much at a time: later it works. */
export class TooManyError extends ApiError {}

/** It does not work at this moment. */
export class UnavailableError extends ApiError {}

/** `already_answered`, 409. */
export class AlreadyAnsweredError extends ConflictError {}

/** `ancestor_deleted`, 409. */
export class AncestorDeletedError extends ConflictError {}

/** `answer_link_not_valid`, 401. */
export class AnswerLinkNotValidError extends AuthenticationError {}

/** `approval_not_found`, 404. */
export class ApprovalNotFoundError extends NotFoundError {}

/** `bad_dockerfile`, 400. */
export class BadDockerfileError extends BadRequestError {}

/** `bad_image`, 400. */
export class BadImageError extends BadRequestError {}

/** `bad_mount_point`, 400. */
export class BadMountPointError extends BadRequestError {}

/** `bad_path`, 400. */
export class BadPathError extends BadRequestError {}

/** `build_canceled`, 503. */
export class BuildCanceledError extends UnavailableError {}

/** `build_failed`, 400. */
export class BuildFailedError extends BadRequestError {}

/** `busy`, 503. */
export class BusyError extends UnavailableError {}

/** `command_ended`, 409. */
export class CommandEndedError extends ConflictError {}

/** `command_not_found`, 404. */
export class CommandNotFoundError extends NotFoundError {}

/** `cross_origin`, 403. */
export class CrossOriginError extends AccessError {}

/** `cwd_not_found`, 400. */
export class CwdNotFoundError extends BadRequestError {}

/** `decision_needed`, 409. */
export class DecisionNeededError extends ConflictError {}

/** `decryption_failed`, 409. */
export class DecryptionFailedError extends ConflictError {}

/** `deleted`, 410. */
export class DeletedError extends GoneError {}

/** `diff_too_large`, 422. */
export class DiffTooLargeError extends LimitError {}

/** `digest_mismatch`, 400. */
export class DigestMismatchError extends BadRequestError {}

/** `disk_limit`, 413. */
export class DiskLimitError extends LimitError {}

/** `drive_attached`, 409. */
export class DriveAttachedError extends ConflictError {}

/** `drive_broken`, 409. */
export class DriveBrokenError extends ConflictError {}

/** `drive_mismatch`, 409. */
export class DriveMismatchError extends ConflictError {}

/** `drive_not_found`, 404. */
export class DriveNotFoundError extends NotFoundError {}

/** `drive_not_initialized`, 409. */
export class DriveNotInitializedError extends ConflictError {}

/** `drive_taken`, 409. */
export class DriveTakenError extends ConflictError {}

/** `driver_in_use`, 409. */
export class DriverInUseError extends ConflictError {}

/** `driver_not_available`, 400. */
export class DriverNotAvailableError extends BadRequestError {}

/** `drives_unsaved`, 409. */
export class DrivesUnsavedError extends ConflictError {}

/** `executable_not_found`, 400. */
export class ExecutableNotFoundError extends BadRequestError {}

/** `exhausted`, 507. */
export class ExhaustedError extends ResourceError {}

/** `export_refused`, 409. */
export class ExportRefusedError extends ConflictError {}

/** `export_too_large`, 422. */
export class ExportTooLargeError extends LimitError {}

/** `files_not_readable`, 409. */
export class FilesNotReadableError extends ConflictError {}

/** `forbidden`, 403. */
export class ForbiddenError extends AccessError {}

/** `generation_mismatch`, 412. */
export class GenerationMismatchError extends PreconditionError {}

/** `has_drives`, 409. */
export class HasDrivesError extends ConflictError {}

/** `has_memory`, 409. */
export class HasMemoryError extends ConflictError {}

/** `idempotency_key_reused`, 409. */
export class IdempotencyKeyReusedError extends ConflictError {}

/** `image_damaged`, 409. */
export class ImageDamagedError extends ConflictError {}

/** `image_not_found`, 404. */
export class ImageNotFoundError extends NotFoundError {}

/** `index_rebuilding`, 503. */
export class IndexRebuildingError extends UnavailableError {}

/** `insufficient_storage`, 507. */
export class InsufficientStorageError extends ResourceError {}

/** `internal`, 500. */
export class InternalError extends ServerError {}

/** `invalid`, 400. */
export class InvalidError extends BadRequestError {}

/** `key_not_found`, 404. */
export class KeyNotFoundError extends NotFoundError {}

/** `label_not_found`, 404. */
export class LabelNotFoundError extends NotFoundError {}

/** `memory_not_supported`, 409. */
export class MemoryNotSupportedError extends ConflictError {}

/** `merge_conflicts`, 409. */
export class MergeConflictsError extends ConflictError {}

/** `method_not_allowed`, 405. */
export class MethodNotAllowedError extends BadRequestError {}

/** `name_taken`, 409. */
export class NameTakenError extends ConflictError {}

/** `no_snapshot`, 410. */
export class NoSnapshotError extends GoneError {}

/** `no_stdin`, 400. */
export class NoStdinError extends BadRequestError {}

/** `no_uid_ranges`, 507. */
export class NoUidRangesError extends ResourceError {}

/** `not_a_fork`, 409. */
export class NotAForkError extends ConflictError {}

/** `not_approved`, 403. */
export class NotApprovedError extends AccessError {}

/** `not_executable`, 400. */
export class NotExecutableError extends BadRequestError {}

/** `not_in_trash`, 404. */
export class NotInTrashError extends NotFoundError {}

/** `not_running`, 409. */
export class NotRunningError extends ConflictError {}

/** `origin_deleted`, 409. */
export class OriginDeletedError extends ConflictError {}

/** `origin_moved_on`, 409. */
export class OriginMovedOnError extends ConflictError {}

/** `path_exists`, 409. */
export class PathExistsError extends ConflictError {}

/** `path_not_found`, 404. */
export class PathNotFoundError extends NotFoundError {}

/** `permission_denied`, 400. */
export class PermissionDeniedError extends BadRequestError {}

/** `port_closed`, 400. */
export class PortClosedError extends BadRequestError {}

/** `port_not_published`, 404. */
export class PortNotPublishedError extends NotFoundError {}

/** `port_public`, 409. */
export class PortPublicError extends ConflictError {}

/** `project_in_use`, 409. */
export class ProjectInUseError extends ConflictError {}

/** `project_locked`, 409. */
export class ProjectLockedError extends ConflictError {}

/** `project_not_found`, 404. */
export class ProjectNotFoundError extends NotFoundError {}

/** `project_taken`, 409. */
export class ProjectTakenError extends ConflictError {}

/** `quarantine_not_found`, 404. */
export class QuarantineNotFoundError extends NotFoundError {}

/** `rate_limited`, 429. */
export class RateLimitedError extends TooManyError {}

/** `read_only_filesystem`, 503. */
export class ReadOnlyFilesystemError extends UnavailableError {}

/** `record_changed`, 409. */
export class RecordChangedError extends ConflictError {}

/** `recovering`, 503. */
export class RecoveringError extends UnavailableError {}

/** `registry_denied`, 400. */
export class RegistryDeniedError extends BadRequestError {}

/** `registry_unreachable`, 400. */
export class RegistryUnreachableError extends BadRequestError {}

/** `route_not_found`, 404. */
export class RouteNotFoundError extends NotFoundError {}

/** `run_busy`, 409. */
export class RunBusyError extends ConflictError {}

/** `run_changed`, 409. */
export class RunChangedError extends ConflictError {}

/** `run_not_found`, 404. */
export class RunNotFoundError extends NotFoundError {}

/** `run_status`, 409. */
export class RunStatusError extends ConflictError {}

/** `sandbox_damaged`, 409. */
export class SandboxDamagedError extends ConflictError {}

/** `sandbox_not_found`, 404. */
export class SandboxNotFoundError extends NotFoundError {}

/** `sandbox_replaced`, 409. */
export class SandboxReplacedError extends ConflictError {}

/** `secret_found`, 409. */
export class SecretFoundError extends ConflictError {}

/** `secret_not_allowed`, 409. */
export class SecretNotAllowedError extends ConflictError {}

/** `secret_not_found`, 404. */
export class SecretNotFoundError extends NotFoundError {}

/** `separate_approver`, 403. */
export class SeparateApproverError extends AccessError {}

/** `service_not_found`, 404. */
export class ServiceNotFoundError extends NotFoundError {}

/** `session_ended`, 410, 503. */
export class SessionEndedError extends GoneError {}

/** `session_not_found`, 404. */
export class SessionNotFoundError extends NotFoundError {}

/** `shutting_down`, 503. */
export class ShuttingDownError extends UnavailableError {}

/** `snapshot_deleted`, 410. */
export class SnapshotDeletedError extends GoneError {}

/** `snapshot_gone`, 410. */
export class SnapshotGoneError extends GoneError {}

/** `snapshot_in_use`, 409. */
export class SnapshotInUseError extends ConflictError {}

/** `snapshot_not_found`, 404. */
export class SnapshotNotFoundError extends NotFoundError {}

/** `start_failed`, 500. */
export class StartFailedError extends ServerError {}

/** `stdin_closed`, 409. */
export class StdinClosedError extends ConflictError {}

/** `stdin_gap`, 400. */
export class StdinGapError extends BadRequestError {}

/** `storage_failed`, 500. */
export class StorageFailedError extends ServerError {}

/** `storage_not_responding`, 503. */
export class StorageNotRespondingError extends UnavailableError {}

/** `sync_failed`, 409. */
export class SyncFailedError extends ConflictError {}

/** `timeout`, 408, 504, 503. */
export class ServerTimeoutError extends UnavailableError {}

/** `tls_required`, 400. */
export class TlsRequiredError extends BadRequestError {}

/** `too_large`, 413. */
export class TooLargeError extends LimitError {}

/** `too_many_approvals`, 429. */
export class TooManyApprovalsError extends TooManyError {}

/** `too_many_builds`, 429. */
export class TooManyBuildsError extends TooManyError {}

/** `too_many_captures`, 409. */
export class TooManyCapturesError extends ConflictError {}

/** `too_many_concurrent_requests`, 429. */
export class TooManyConcurrentRequestsError extends TooManyError {}

/** `too_many_connections`, 429, 503. */
export class TooManyConnectionsError extends TooManyError {}

/** `too_many_deliveries`, 429. */
export class TooManyDeliveriesError extends TooManyError {}

/** `too_many_exports`, 503. */
export class TooManyExportsError extends UnavailableError {}

/** `too_many_runs`, 429. */
export class TooManyRunsError extends TooManyError {}

/** `unauthorized`, 401. */
export class UnauthorizedError extends AuthenticationError {}

/** `unknown_driver`, 400. */
export class UnknownDriverError extends BadRequestError {}

/** `unknown_host`, 421. */
export class UnknownHostError extends BadRequestError {}

/** `unrelated`, 409. */
export class UnrelatedError extends ConflictError {}

/** `unresumable`, 409. */
export class UnresumableError extends ConflictError {}

/** `unsupported_files`, 409. */
export class UnsupportedFilesError extends ConflictError {}

/** `unsupported_media_type`, 415. */
export class UnsupportedMediaTypeError extends BadRequestError {}

/** `upgrade_required`, 426. */
export class UpgradeRequiredError extends BadRequestError {}

/** `used_meanwhile`, 412. */
export class UsedMeanwhileError extends PreconditionError {}

/** `user_not_found`, 400. */
export class UserNotFoundError extends BadRequestError {}

/** `webhook_not_found`, 404. */
export class WebhookNotFoundError extends NotFoundError {}

/** `wrong_platform`, 400. */
export class WrongPlatformError extends BadRequestError {}

export const BY_CODE: Record<string, typeof ApiError> = {
  already_answered: AlreadyAnsweredError,
  ancestor_deleted: AncestorDeletedError,
  answer_link_not_valid: AnswerLinkNotValidError,
  approval_not_found: ApprovalNotFoundError,
  bad_dockerfile: BadDockerfileError,
  bad_image: BadImageError,
  bad_mount_point: BadMountPointError,
  bad_path: BadPathError,
  build_canceled: BuildCanceledError,
  build_failed: BuildFailedError,
  busy: BusyError,
  command_ended: CommandEndedError,
  command_not_found: CommandNotFoundError,
  cross_origin: CrossOriginError,
  cwd_not_found: CwdNotFoundError,
  decision_needed: DecisionNeededError,
  decryption_failed: DecryptionFailedError,
  deleted: DeletedError,
  diff_too_large: DiffTooLargeError,
  digest_mismatch: DigestMismatchError,
  disk_limit: DiskLimitError,
  drive_attached: DriveAttachedError,
  drive_broken: DriveBrokenError,
  drive_mismatch: DriveMismatchError,
  drive_not_found: DriveNotFoundError,
  drive_not_initialized: DriveNotInitializedError,
  drive_taken: DriveTakenError,
  driver_in_use: DriverInUseError,
  driver_not_available: DriverNotAvailableError,
  drives_unsaved: DrivesUnsavedError,
  executable_not_found: ExecutableNotFoundError,
  exhausted: ExhaustedError,
  export_refused: ExportRefusedError,
  export_too_large: ExportTooLargeError,
  files_not_readable: FilesNotReadableError,
  forbidden: ForbiddenError,
  generation_mismatch: GenerationMismatchError,
  has_drives: HasDrivesError,
  has_memory: HasMemoryError,
  idempotency_key_reused: IdempotencyKeyReusedError,
  image_damaged: ImageDamagedError,
  image_not_found: ImageNotFoundError,
  index_rebuilding: IndexRebuildingError,
  insufficient_storage: InsufficientStorageError,
  internal: InternalError,
  invalid: InvalidError,
  key_not_found: KeyNotFoundError,
  label_not_found: LabelNotFoundError,
  memory_not_supported: MemoryNotSupportedError,
  merge_conflicts: MergeConflictsError,
  method_not_allowed: MethodNotAllowedError,
  name_taken: NameTakenError,
  no_snapshot: NoSnapshotError,
  no_stdin: NoStdinError,
  no_uid_ranges: NoUidRangesError,
  not_a_fork: NotAForkError,
  not_approved: NotApprovedError,
  not_executable: NotExecutableError,
  not_in_trash: NotInTrashError,
  not_running: NotRunningError,
  origin_deleted: OriginDeletedError,
  origin_moved_on: OriginMovedOnError,
  path_exists: PathExistsError,
  path_not_found: PathNotFoundError,
  permission_denied: PermissionDeniedError,
  port_closed: PortClosedError,
  port_not_published: PortNotPublishedError,
  port_public: PortPublicError,
  project_in_use: ProjectInUseError,
  project_locked: ProjectLockedError,
  project_not_found: ProjectNotFoundError,
  project_taken: ProjectTakenError,
  quarantine_not_found: QuarantineNotFoundError,
  rate_limited: RateLimitedError,
  read_only_filesystem: ReadOnlyFilesystemError,
  record_changed: RecordChangedError,
  recovering: RecoveringError,
  registry_denied: RegistryDeniedError,
  registry_unreachable: RegistryUnreachableError,
  route_not_found: RouteNotFoundError,
  run_busy: RunBusyError,
  run_changed: RunChangedError,
  run_not_found: RunNotFoundError,
  run_status: RunStatusError,
  sandbox_damaged: SandboxDamagedError,
  sandbox_not_found: SandboxNotFoundError,
  sandbox_replaced: SandboxReplacedError,
  secret_found: SecretFoundError,
  secret_not_allowed: SecretNotAllowedError,
  secret_not_found: SecretNotFoundError,
  separate_approver: SeparateApproverError,
  service_not_found: ServiceNotFoundError,
  session_ended: SessionEndedError,
  session_not_found: SessionNotFoundError,
  shutting_down: ShuttingDownError,
  snapshot_deleted: SnapshotDeletedError,
  snapshot_gone: SnapshotGoneError,
  snapshot_in_use: SnapshotInUseError,
  snapshot_not_found: SnapshotNotFoundError,
  start_failed: StartFailedError,
  stdin_closed: StdinClosedError,
  stdin_gap: StdinGapError,
  storage_failed: StorageFailedError,
  storage_not_responding: StorageNotRespondingError,
  sync_failed: SyncFailedError,
  timeout: ServerTimeoutError,
  tls_required: TlsRequiredError,
  too_large: TooLargeError,
  too_many_approvals: TooManyApprovalsError,
  too_many_builds: TooManyBuildsError,
  too_many_captures: TooManyCapturesError,
  too_many_concurrent_requests: TooManyConcurrentRequestsError,
  too_many_connections: TooManyConnectionsError,
  too_many_deliveries: TooManyDeliveriesError,
  too_many_exports: TooManyExportsError,
  too_many_runs: TooManyRunsError,
  unauthorized: UnauthorizedError,
  unknown_driver: UnknownDriverError,
  unknown_host: UnknownHostError,
  unrelated: UnrelatedError,
  unresumable: UnresumableError,
  unsupported_files: UnsupportedFilesError,
  unsupported_media_type: UnsupportedMediaTypeError,
  upgrade_required: UpgradeRequiredError,
  used_meanwhile: UsedMeanwhileError,
  user_not_found: UserNotFoundError,
  webhook_not_found: WebhookNotFoundError,
  wrong_platform: WrongPlatformError,
};

export const BY_STATUS: Record<number, typeof ApiError> = {
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
};

export const FORMER: Record<string, string> = {
  no_room: "insufficient_storage",
  keeps_no_memory: "memory_not_supported",
  holds_memory: "has_memory",
  memory_too_deep: "too_many_captures",
  nothing_kept: "no_snapshot",
  drive_differs: "drive_mismatch",
  sealed: "decryption_failed",
  files_unpackable: "unsupported_files",
  no_such_route: "route_not_found",
  too_many_at_once: "too_many_concurrent_requests",
};
