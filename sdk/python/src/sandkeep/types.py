"""What the server answers. Made by sdk/generate.py. Do not edit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, Union

from typing_extensions import TypeAlias

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Page(Generic[T]):
    """A page of a list."""

    items: list[T]
    """What is on it."""
    next: str | None = None
    """The `cursor` of the next page; absent on the last."""

AcceptRule: TypeAlias = Literal["promote", "merge", "patch", "keep"]
"""What acceptance does with the result of a run."""

Access: TypeAlias = Literal["public", "private", "off"]
"""Who may reach a port from outside."""


@dataclass(frozen=True, kw_only=True)
class Approval:
    """An approval."""

    id: str
    """Its id."""
    project: str
    """The project it belongs to."""
    sandbox: str
    """The sandbox it is about."""
    run: str | None = None
    """The run it belongs to."""
    source: ApprovalSource
    """Who asks."""
    subject: ApprovalSubject
    """What is held."""
    target: str | None = None
    """What the answer decides, if it is more than one request: the host, the secret and the host, or the limit."""
    question: str
    """The question."""
    context: str
    """What there is to know before answering."""
    status: ApprovalStatus
    """Its status."""
    default: ApprovalAnswer | None = None
    asked_by: str | None = None
    """The id of the key that asked, if one did."""
    asked_at: str
    """When it was asked."""
    expires_at: str
    """When it expires."""
    answered_by: str | None = None
    """Who answered: the id of a key, or `webhook:` and the id of the webhook whose receiver did."""
    answered_at: str | None = None
    """When it was answered, or expired."""
    comment: str
    """What was said about it."""

ApprovalAnswer: TypeAlias = Literal["approve", "deny"]
"""An answer."""


@dataclass(frozen=True, kw_only=True)
class ApprovalPolicy:
    """What somebody has to approve in a sandbox. While a sandbox has this setting, programs inside can also ask with `keep ask`. Only a key that may approve can change or remove it."""

    commands: list[str] = field(default_factory=list)
    """Commands that are held: patterns with `*` and `?` for the whole command line. They apply to commands started through the API, not to what those start."""
    hosts: bool = False
    """Whether the first contact with each host is held. An approved host stays approved for the sandbox."""
    known_hosts: list[str] = field(default_factory=list)
    """Hosts that need no approval: names, `*.example.com`, or addresses."""
    secrets: list[str] = field(default_factory=list)
    """Secrets whose use is held: the first request that has it to each host, and each command that is given it."""
    expires: Span | None = None
    default: ApprovalAnswer | None = None

ApprovalSource: TypeAlias = Literal["harness", "agent", "policy"]
"""Who asks."""

ApprovalStatus: TypeAlias = Literal["pending", "approved", "denied", "expired"]
"""The status of an approval."""

ApprovalSubject: TypeAlias = Literal["question", "command", "host", "secret", "spending", "validation"]
"""What is held until there is an answer."""


@dataclass(frozen=True, kw_only=True)
class Attached:
    """A session that writes to a drive."""

    sandbox: str
    """The sandbox's name."""
    session: str
    """The session's id."""


@dataclass(frozen=True, kw_only=True)
class AuditEntry:
    """An entry of the audit log. Its hash covers the entry as it is in the file (`docs/formats/audit.md`)."""

    seq: int
    """Its number in its chain."""
    at: str
    """When it happened."""
    action: str
    """What was done: `sandbox.create`. `docs/AUDIT.md` has the table."""
    actor: str
    """Who did it: `key`, `system`, `agent` (a process in a sandbox) or `anonymous` (a caller without a valid key)."""
    key: str | None = None
    """The id of the key."""
    label: str | None = None
    """The key's label."""
    front: str
    """By which way: `api`, `vercel`, `gateway`, `socket` or `engine`."""
    address: str | None = None
    """The caller's address."""
    project: str | None = None
    """The project it was done in."""
    target: str | None = None
    """What it was done to: `sandbox/my-app`."""
    outcome: str
    """How it ended: `done`, `denied` or `failed`."""
    status: int | None = None
    """The HTTP status of the response."""
    code: str | None = None
    """The error code of the response."""
    detail: dict[str, str] = field(default_factory=dict)
    """Further facts."""
    prev: str
    """The hash of the entry before it."""
    hash: str
    """Its own hash."""


@dataclass(frozen=True, kw_only=True)
class AuditVerification:
    """What verification found in a chain of the audit log."""

    chain: str
    """The chain: `host`, or `project/` and a name."""
    intact: bool
    """Whether nothing is missing and nothing was changed."""
    entries: int
    """How many entries there are."""
    first: int
    """The number of the first one: those before were removed because the log reached its limit."""
    last: int
    """The number of the last one."""
    last_hash: str
    """The hash of the last one. Keep number and hash elsewhere, and give them as `expect` later."""
    signed: int
    """The number of the last entry that the head was signed for."""
    findings: list[str]
    """What is wrong; the first 100."""
    found: int
    """How much is wrong."""

Because: TypeAlias = Literal["given", "running", "given_and_running"]
"""Why a command is named."""

BroughtBack: TypeAlias = Literal["promoted", "merged"]
"""How a fork's work was brought back."""


@dataclass(frozen=True, kw_only=True)
class BuildProgressStep:
    """A step begins, or was found in the cache."""

    number: int
    """Which, counted from 1."""
    total: int
    """How many there are."""
    line: int
    """Its line in the Dockerfile."""
    text: str
    """The instruction."""
    cached: bool
    """Whether its result was in the cache."""
    type: Literal["step"] = "step"


@dataclass(frozen=True, kw_only=True)
class BuildProgressOutput:
    """A step printed something."""

    text: str
    """What: text, or the replacement character for what is none."""
    type: Literal["output"] = "output"


@dataclass(frozen=True, kw_only=True)
class BuildProgressProgress:
    """How far a pull has come."""

    what: str
    """What is being done, for people; also what tells several bars apart."""
    done: int
    """How much is done: bytes, or files where `total` is absent."""
    total: int | None = None
    """How much there is, where that is known."""
    type: Literal["progress"] = "progress"


@dataclass(frozen=True, kw_only=True)
class BuildProgressWarning:
    """Something that may not be as it was meant."""

    text: str
    """What."""
    type: Literal["warning"] = "warning"


@dataclass(frozen=True, kw_only=True)
class BuildProgressDone:
    """The image is there. The last line."""

    image: Image
    """The image."""
    type: Literal["done"] = "done"


@dataclass(frozen=True, kw_only=True)
class BuildProgressError:
    """It did not work. The last line."""

    error: ErrorBody
    """Why."""
    type: Literal["error"] = "error"


@dataclass(frozen=True, kw_only=True)
class ChangedPath:
    """A path that changed."""

    path: str
    """The path, from the root of the sandbox."""
    change: PathChange
    """What happened to it."""
    dir: bool = False
    """Whether it is a directory."""
    bytes: int = 0
    """What it takes on the disk; 0 if it was deleted."""

CheckState: TypeAlias = Literal["ok", "warning"]
"""How a check came out."""

Class: TypeAlias = Literal["ephemeral", "resumable", "workspace"]
"""The lifetime class of a sandbox."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One process started in a session."""

    id: str
    """Its id."""
    sandbox_id: str
    """The sandbox's id."""
    session: str
    """The session it ran in."""
    argv: list[str]
    """Program and arguments."""
    cwd: str | None = None
    """Its working directory."""
    user: str | None = None
    """The user it ran as."""
    env_names: list[str]
    """Names of the variables it was given; values are not kept."""
    tty: bool
    """Whether it has a terminal."""
    detached: bool
    """Whether it goes on when the caller leaves."""
    state: CommandState
    """Its state."""
    exit_code: int | None = None
    """Its exit code; 128 + signal when a signal ended it."""
    end: CommandEnd | None = None
    limit: int | None = None
    """The limit that ended it: bytes with `out_of_memory` and `out_of_disk`, milliseconds with `timed_out`."""
    peak: int | None = None
    """The most that was used of that limit, if known: bytes."""
    started_at: str
    """When it began."""
    ended_at: str | None = None
    """When it ended."""
    output_bytes: int
    """How much it printed."""
    truncated: bool
    """Whether the log has less than it printed."""
    service: str | None = None
    """The service it is of."""
    by: str | None = None
    """Who started it: the id of an API key, or `service`, `hook`."""
    changes: CommandChanges | None = None


@dataclass(frozen=True, kw_only=True)
class CommandChangeList:
    """What a command changed, path by path."""

    command: str
    """The command's id."""
    changes: CommandChanges | None = None
    paths: list[ChangedPath]
    """Paths, sorted; at most 1,000. Bytes that are not printable UTF-8, and `%`, are written `%XX`."""
    more: list[MoreChanges]
    """Directories in which more paths changed than are listed."""


@dataclass(frozen=True, kw_only=True)
class CommandChanges:
    """What a command changed in the root filesystem of its sandbox. Drives, and what is mounted in memory, do not count."""

    created: int
    """How many paths it created."""
    modified: int
    """How many paths it modified: content, mode, owner or times."""
    deleted: int
    """How many paths it deleted."""
    bytes: int
    """What the created and modified files take on the disk."""
    exact: bool
    """Whether it was this command alone. Otherwise something else ran at the same time, and these are the changes of all together."""
    complete: bool
    """Whether all changes were seen. Not if there are very many files, or if the server was restarted meanwhile."""
    with_: list[str] = field(default_factory=list)
    """Commands that ran at the same time: their ids, the first 16."""

CommandEnd: TypeAlias = Literal["exited", "signalled", "timed_out", "out_of_memory", "out_of_disk", "host_disk_full", "killed", "session_ended", "lost"]
"""Why a command ended."""

CommandState: TypeAlias = Literal["running", "exited", "lost"]
"""The state of a command."""


@dataclass(frozen=True, kw_only=True)
class CommandsKept:
    """The disk usage of a sandbox's command records and logs."""

    count: int
    """How many are on record."""
    bytes: int
    """The disk space that records and logs take."""


@dataclass(frozen=True, kw_only=True)
class Connection:
    """A network connection of a sandbox, allowed or refused."""

    session: str
    """The session it was in."""
    id: int
    """A number that grows within the session."""
    at: str
    """When it began."""
    ended_at: str | None = None
    """When it ended; null while it is open."""
    duration_ms: int
    """How long it lasted, or has lasted."""
    protocol: Protocol
    """What it was."""
    to: str | None = None
    """The address and port the sandbox asked for; null for a lookup."""
    name: str | None = None
    """The host name, if known."""
    verdict: Verdict
    """What was decided, or how it went."""
    rule: str
    """The rule it follows from."""
    bytes_in: int
    """Bytes received from outside."""
    bytes_out: int
    """Bytes sent outside."""
    detail: str | None = None
    """More details: a request and its status, or why the destination was not reached."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One thing that is wrong with stored data."""

    kind: str
    """What is wrong: `unreadable_manifest`, `missing`, `sync_failed`, `layer_in_doubt`, `layer_changed`, `collection_stopped`, `clock_jumped`, `index_rebuilt` or `security_config`."""
    subject: str
    """What it is wrong with: a path below the data directory, or an id."""
    detail: str
    """What was found."""
    consequence: str
    """What it means, and what to do."""
    since: str
    """When it was first found."""


@dataclass(frozen=True, kw_only=True)
class Deleted:
    """The answer to a delete."""

    snapshots_kept: list[str]
    """Snapshots that stay because others stand on them."""
    drives_lost: list[str] = field(default_factory=list)
    """Drives of which what its last session wrote is lost, because the delete was forced."""


@dataclass(frozen=True, kw_only=True)
class Destination:
    """All that went to one place."""

    host: str
    """The host name, or the address if no name is known."""
    connections: int
    """How many connections, those that were refused included."""
    denied: int
    """How many of them were refused."""
    bytes_in: int
    """Bytes received from there."""
    bytes_out: int
    """Bytes sent there."""
    last_at: str
    """When something last began."""


@dataclass(frozen=True, kw_only=True)
class Diff:
    """The differences between two points."""

    from_: DiffPoint
    """The first point."""
    to: DiffPoint
    """The second point."""
    counts: DiffCounts
    """How many paths differ, listed or not."""
    changes: list[DiffEntry]
    """The paths, sorted."""
    truncated: bool
    """Whether there are more than are listed."""

DiffAspect: TypeAlias = Literal["content", "mode", "owner", "xattrs", "type"]
"""What of a path differs."""


@dataclass(frozen=True, kw_only=True)
class DiffCounts:
    """How many paths differ."""

    added: int
    """Paths that only the second point has."""
    removed: int
    """Paths that only the first point has."""
    modified: int
    """Paths that both have and that differ."""
    renamed: int
    """Files that have another path."""
    bytes: int
    """Sizes of added and modified files at the second point."""


@dataclass(frozen=True, kw_only=True)
class DiffEntry:
    """One path that differs."""

    path: str
    """The path. Bytes that are not printable UTF-8, and `%`, are written `%XX`."""
    change: DiffKind
    """How it differs."""
    old_path: str | None = None
    """Of a renamed file: its path at the first point."""
    what: list[DiffAspect] = field(default_factory=list)
    """Of a modified or renamed path: what differs."""
    from_: DiffSide | None = None
    to: DiffSide | None = None

DiffKind: TypeAlias = Literal["added", "removed", "modified", "renamed"]
"""How a path differs."""


@dataclass(frozen=True, kw_only=True)
class DiffPoint:
    """A point as it was found."""

    point: str
    """As it was asked for."""
    snapshot: str | None = None
    """The snapshot; absent for an image, and for a running sandbox, whose files are read as they are."""
    live: bool = False
    """Whether it runs, so that files may change during the comparison."""


@dataclass(frozen=True, kw_only=True)
class DiffSide:
    """What a point has at a path."""

    kind: EntryKind
    """What it is."""
    mode: int
    """Permission bits, set-user-id and its like included."""
    uid: int
    """Owner, as a number inside the sandbox."""
    gid: int
    """Group, as a number inside the sandbox."""
    size_bytes: int
    """Size in bytes; of a directory 0."""


@dataclass(frozen=True, kw_only=True)
class DirectAnswer:
    """An answer to a request that is never sent."""

    status: int
    """200 to 599."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers."""
    body: str = ""
    """The body."""


@dataclass(frozen=True, kw_only=True)
class Drive:
    """A volume that outlives sandboxes and is mounted into them."""

    name: str
    """Its name, unique in the project."""
    id: str
    """Its id."""
    project: str
    """The project it belongs to."""
    max_size_bytes: int
    """Its maximum size."""
    size_bytes: int
    """What it takes on the disk, what it shares with its forks included. What a session under way writes is counted when that ends."""
    initialized: bool
    """Whether something was ever written to it, so that it can be mounted as a snapshot, or forked."""
    generation: int = 0
    """How often what it holds was changed: by a session that wrote to it, or by a promotion."""
    attached: Attached | None = None
    parent: str | None = None
    """The id of the drive it was forked from."""
    created_at: str
    """When it was made."""
    updated_at: str
    """When it was last changed, attached or detached."""

Encoding: TypeAlias = Literal["utf8", "base64"]
"""The encoding of `data`."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is at a path."""

    name: str
    """The name (in a listing) or the path that was asked about. Bytes that are not UTF-8 are shown as U+FFFD here and exactly in `raw_name`."""
    raw_name: str | None = None
    """The exact name, base64, where `name` could not say it."""
    kind: EntryKind
    """What it is."""
    size_bytes: int
    """Size in bytes."""
    mode: int
    """Permission bits, set-user-id and its like included."""
    uid: int
    """Owner, as a number inside the sandbox."""
    gid: int
    """Group, as a number inside the sandbox."""
    modified_at: str
    """Last modification."""
    target: str | None = None
    """Where a symlink points."""

EntryKind: TypeAlias = Literal["file", "directory", "symlink", "other"]
"""What an `Entry` is."""


@dataclass(frozen=True, kw_only=True)
class ErrorAnswer:
    """The body of every response that is not a success."""

    error: ErrorBody
    """What went wrong."""


@dataclass(frozen=True, kw_only=True)
class ErrorBody:
    """What went wrong."""

    code: str
    """What kind it is, for programs: `not_found`, `name_taken`, `invalid`. `docs/API.md` lists them."""
    aliases: list[str] = field(default_factory=list)
    """Former names of the code. They are removed one release after the code was renamed."""
    message: str
    """What happened, for people."""
    hint: str | None = None
    """What to do about it."""
    findings: list[Finding] = field(default_factory=list)
    """What the guard found, when that is why (`secret_found`, `decision_needed`)."""
    conflicts: list[MergeConflict] = field(default_factory=list)
    """Paths that cannot be merged, when that is why (`merge_conflicts`); at most 1,000."""
    request_id: str | None = None
    """The id of the request, as in `X-Request-Id` and in the server's log."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened. `docs/API.md` has the table of kinds and what their `data` holds."""

    id: str
    """Its position in the feed: give it as `cursor` or `Last-Event-ID` to continue after it."""
    at: str
    """When it happened."""
    kind: str
    """What happened: `sandbox.running`, `command.ended`, ...; `stream.*` is about the stream itself."""
    project: str | None = None
    """The project it happened in; absent for what concerns the host or the stream."""
    sandbox: EventSandbox | None = None
    data: dict[str, Any] = field(default_factory=dict)
    """Details, by kind."""


@dataclass(frozen=True, kw_only=True)
class EventSandbox:
    """A sandbox as it was at the time of an event."""

    id: str
    """Its id."""
    name: str
    """Its name."""
    tags: dict[str, str] = field(default_factory=dict)
    """Its tags."""


@dataclass(frozen=True, kw_only=True)
class ExecEventStarted:
    """The command was started. Always the first line."""

    command: Command
    """The command."""
    session: Session
    """The session, with what its hooks did if this call woke the sandbox."""
    resumed: bool
    """Whether this call woke the sandbox."""
    type: Literal["started"] = "started"


@dataclass(frozen=True, kw_only=True)
class ExecEventStdout:
    """Bytes of standard output, or of the terminal."""

    encoding: Encoding
    """The encoding of `data`."""
    data: str
    """The bytes."""
    at: str | None = None
    """When it was printed; only in logs, with `times`."""
    type: Literal["stdout"] = "stdout"


@dataclass(frozen=True, kw_only=True)
class ExecEventStderr:
    """Bytes of standard error."""

    encoding: Encoding
    """The encoding of `data`."""
    data: str
    """The bytes."""
    at: str | None = None
    """When it was printed; only in logs, with `times`."""
    type: Literal["stderr"] = "stderr"


@dataclass(frozen=True, kw_only=True)
class ExecEventGap:
    """It printed bytes here that are not kept; what comes next was printed after them."""

    bytes: int
    """How many."""
    type: Literal["gap"] = "gap"


@dataclass(frozen=True, kw_only=True)
class ExecEventExited:
    """The command ended. Always the last line, unless something went wrong."""

    exit_code: int | None = None
    """Its exit code; absent if its session ended under it."""
    command: Command
    """The command."""
    type: Literal["exited"] = "exited"


@dataclass(frozen=True, kw_only=True)
class ExecEventMore:
    """That is all of the log there is; the command still runs. Only without `follow`."""

    type: Literal["more"] = "more"


@dataclass(frozen=True, kw_only=True)
class ExecEventError:
    """Something went wrong, or the server is going down. The last line."""

    error: ErrorBody
    """What."""
    type: Literal["error"] = "error"


@dataclass(frozen=True, kw_only=True)
class ExecResult:
    """A command that has ended and what it printed, as one document: the answer to `POST …/exec?wait=true`."""

    command: Command
    """The command."""
    resumed: bool
    """Whether this call woke the sandbox."""
    exit_code: int | None = None
    """Its exit code; 128 + signal when a signal ended it. Absent if its session ended under it."""
    end: CommandEnd | None = None
    stdout: str
    """Standard output, or that of the terminal, as text. Bytes that are not UTF-8 are replaced by `\\u{fffd}`."""
    stdout_base64: str | None = None
    """The same bytes as base64, if they are not UTF-8."""
    stdout_bytes: int
    """How much it printed to standard output, as far as that was kept."""
    stdout_truncated: bool
    """Whether `stdout` is only the beginning. Its log has more."""
    stderr: str
    """Standard error as text. Bytes that are not UTF-8 are replaced by `\\u{fffd}`."""
    stderr_base64: str | None = None
    """The same bytes as base64, if they are not UTF-8."""
    stderr_bytes: int
    """How much it printed to standard error, as far as that was kept."""
    stderr_truncated: bool
    """Whether `stderr` is only the beginning. Its log has more."""
    missing_bytes: int
    """Bytes that it printed to either and that were not kept, because the log is bounded."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something the guard found. Never holds a secret's value."""

    kind: FindingKind
    """What it is."""
    path: str
    """The file, as the sandbox sees it; a value in a name is masked."""
    size_bytes: int
    """How large it is; of a directory, all that is in it."""
    secret: str | None = None
    """The secret's name."""
    place: FindingPlace | None = None
    encoding: ValueEncoding | None = None
    offset: int | None = None
    """How far into the contents, or into the archive's member."""
    detail: str | None = None
    """The archive's member, the attribute, or why it was not searched."""
    commands: list[Suspect] = field(default_factory=list)
    """Commands that may have done it, the likeliest first."""

FindingKind: TypeAlias = Literal["secret", "large", "junk", "core_dump", "unsearched", "doubtful"]
"""What a finding is."""

FindingPlace: TypeAlias = Literal["contents", "name", "link", "attribute", "member"]
"""Where in a file a value is."""


@dataclass(frozen=True, kw_only=True)
class ForkFailed:
    """A fork that was not made."""

    name: str
    """What it was to be called."""
    code: str
    """What kind of failure, as in errors."""
    aliases: list[str] = field(default_factory=list)
    """Former names of the code, as in errors."""
    reason: str
    """Why not, for people."""

ForkFate: TypeAlias = Literal["alive", "promoted", "merged", "rejected", "expired"]
"""What has become of a fork."""


@dataclass(frozen=True, kw_only=True)
class ForkOutcome:
    """What became of a fork's work."""

    how: BroughtBack
    """How it was brought back."""
    into: str
    """The sandbox it was brought back into."""
    generation: int
    """That sandbox's generation with it."""
    at: str
    """When."""


@dataclass(frozen=True, kw_only=True)
class Forks:
    """Forks from one snapshot."""

    made: list[Opened]
    """Those that are there, in the order of their numbers."""
    failed: list[ForkFailed]
    """Those that are not, and why."""


@dataclass(frozen=True, kw_only=True)
class Forward:
    """Another place for a request."""

    url: str
    """An `http` or `https` URL."""
    prefix: str | None = None
    """How the headers begin that tell where it was meant to go; `x-forwarded-` if absent."""


@dataclass(frozen=True, kw_only=True)
class Fsck:
    """What a check of the data directory found."""

    broken: bool
    """Whether something that was acknowledged is damaged."""
    problems: list[FsckProblem]
    """What was found."""


@dataclass(frozen=True, kw_only=True)
class FsckProblem:
    """One thing that a check found."""

    leftover: bool
    """Whether it is merely in the way, and nothing that was acknowledged is damaged."""
    text: str
    """What it is, as a sentence."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """A sandbox's guard."""

    secrets: OnSecret
    """When a file holds a secret the session was given."""
    junk: OnJunk
    """When a file is large or junk."""
    large_bytes: int
    """From what size on a file is large."""
    globs: list[str]
    """What is junk."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """The server is up."""

    status: str
    """`ok`."""
    version: str
    """The server's version."""
    recovering: int = 0
    """How many sandboxes it still has to recover after a restart. Requests for those wait; all others are served."""


@dataclass(frozen=True, kw_only=True)
class Hook:
    """A command that the server runs when a sandbox is created, resumed or stopped."""

    argv: list[str]
    """Program and arguments."""
    timeout: Span | None = None


@dataclass(frozen=True, kw_only=True)
class HookRun:
    """What a hook did."""

    hook: str
    """`on_create`, `on_resume` or `validate`."""
    argv: list[str]
    """What was run."""
    command: str | None = None
    """The command, whose log can be read; absent if it could not be started."""
    exit_code: int | None = None
    """Its exit code; absent if it could not be started."""
    problem: str | None = None
    """What went wrong, for people."""


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """The hooks of a sandbox."""

    on_create: list[Hook] = field(default_factory=list)
    """Run in order once, after creation. The first failure ends the list."""
    on_resume: list[Hook] = field(default_factory=list)
    """Run in order at every resume. Failures are reported; the resume continues."""
    validate: Hook | None = None
    validate_git: str | None = None
    """The absolute path of a Git repository. Its commit and its changed files are compared in the same way. Needs `git` and `sh` inside."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """What a sandbox can start from."""

    name: str
    """What it is called: `host`, `debian:12`, a name given at import."""
    digest: str
    """SHA-256 of its manifest or archive, as `sha256:…`."""
    layers: int
    """How many layers it has."""
    size_bytes: int
    """Disk space they take."""
    host_bytes: int = 0
    """Disk space of files that they share with the host by hard links; not part of `size_bytes`."""
    user: str | None = None
    """The user of commands."""
    cwd: str | None = None
    """The working directory of commands."""
    env: dict[str, str]
    """The environment of commands."""
    entrypoint: list[str] = field(default_factory=list)
    """The program, for those who ask: sandboxes run what their callers say."""
    cmd: list[str] = field(default_factory=list)
    """Its arguments, or the whole command."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels."""
    exposed_ports: list[str] = field(default_factory=list)
    """Ports that its programs listen on, like `80/tcp`."""
    source: str
    """Where it came from: `host`, a path, a registry reference, the image it was customized from."""
    customized: bool = False
    """Whether it was made by customizing another image."""
    dressed: bool = False
    """The former name of `customized`. It goes with the next release."""
    created_at: str
    """When it was made here."""


@dataclass(frozen=True, kw_only=True)
class ImageProgressProgress:
    """How far a part of the work has come."""

    what: str
    """What is being done, for people; also what tells several bars apart."""
    done: int
    """How much is done: bytes, or files where `total` is absent."""
    total: int | None = None
    """How much there is, where that is known."""
    type: Literal["progress"] = "progress"


@dataclass(frozen=True, kw_only=True)
class ImageProgressDone:
    """The image is there. The last line."""

    image: Image
    """The image."""
    type: Literal["done"] = "done"


@dataclass(frozen=True, kw_only=True)
class ImageProgressError:
    """It did not work. The last line."""

    error: ErrorBody
    """Why."""
    type: Literal["error"] = "error"


@dataclass(frozen=True, kw_only=True)
class Key:
    """An API key, without its secret."""

    id: str
    """Its id, which is no secret."""
    label: str
    """A label, for people."""
    scope: Scope
    """What it may do."""
    approve: bool = False
    """Whether it may approve, and accept runs; an admin key may anyway."""
    created_at: str
    """When it was made."""
    expires_at: str | None = None
    """When it stops working."""


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """Where a fork came from."""

    sandbox_id: str
    """The source's id."""
    name: str
    """The source's name at the time."""
    snapshot: str | None = None
    """The snapshot; absent when the source had none and both stand on the image."""
    generation: int
    """The source's generation."""
    group: str | None = None
    """The forks that were made together with it, by the name they begin with."""
    on_accept: OnAccept | None = None
    """What becomes of the fork once it is accepted."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What a directory holds, sorted by name."""

    items: list[Entry]
    """What is in it."""
    next: str | None = None
    """Pass this as `cursor` for the rest; null if this is all."""


@dataclass(frozen=True, kw_only=True)
class LiveUsage:
    """What a session uses at this moment, and its limits."""

    cpu_ms: int
    """CPU time used since the session began. Two readings tell the load."""
    cpu_limit_millis: int
    """How many CPUs it may use, in thousandths."""
    memory_bytes: int
    """Memory in use now, page cache included; for a microVM what its hypervisor takes on the host."""
    memory_peak_bytes: int
    """The most memory at one time."""
    memory_limit_bytes: int
    """How much it may use."""
    processes: int | None = None
    """Processes and threads; absent for a microVM, where only its own kernel knows."""
    processes_limit: int
    """How many it may have."""
    network_in_bytes: int
    """Bytes received from outside since the session began."""
    network_out_bytes: int
    """Bytes sent outside since the session began."""
    disk_bytes: int | None = None
    """Disk space that the session has written so far; absent if that takes too long to find out."""
    disk_limit_bytes: int
    """How much it may write."""
    commands: int
    """Commands that run now."""
    wall_ms: int
    """How long the session lasts so far."""


@dataclass(frozen=True, kw_only=True)
class MergeConflict:
    """A path that cannot be merged."""

    path: str
    """The path."""
    reason: str
    """Why, as a sentence."""


@dataclass(frozen=True, kw_only=True)
class MergeCounts:
    """How many paths a merge changes."""

    added: int
    """Added."""
    removed: int
    """Removed."""
    modified: int
    """Replaced by the other side's."""
    merged: int
    """Merged by lines."""
    conflicts: int
    """In conflict."""


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What a merge did, or would do."""

    sandbox: str
    """The sandbox that got the changes."""
    generation: int
    """Its generation now."""
    snapshot: str | None = None
    """The snapshot with the result; absent if nothing was changed."""
    counts: MergeCounts
    """How many paths were taken over, and how many of them were merged by lines."""
    conflicts: list[MergeConflict] = field(default_factory=list)
    """Paths that changed on both sides; at most 1,000 are listed."""
    changes: list[DiffEntry]
    """Paths that are, or would be, changed; at most 1,000 are listed."""
    truncated: bool
    """Whether there are more changes or conflicts than are listed."""
    deleted: list[str] = field(default_factory=list)
    """The fork, if it was to be deleted once it was accepted and is."""
    failed: list[ForkFailed] = field(default_factory=list)
    """The fork, if it was to be deleted and is still there."""


@dataclass(frozen=True, kw_only=True)
class MoreChanges:
    """How many more paths changed below a directory."""

    under: str
    """The directory, with a slash at its end."""
    created: int
    """How many are new."""
    modified: int
    """How many were modified."""
    deleted: int
    """How many are gone."""


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A drive that a sandbox mounts."""

    drive: str
    """The drive's name."""
    mode: MountMode | None = None
    """How; `read-write` if absent."""

MountMode: TypeAlias = Literal["read-write", "snapshot"]
"""How a drive is mounted."""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """The answer to an upload."""

    bytes: int
    """How many bytes were written."""
    files: int
    """How many files."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """What a sandbox may reach. `docs/NETWORK.md` tells what each part means."""

    mode: NetworkMode
    """What holds where nothing else is said."""
    domains: list[str] = field(default_factory=list)
    """Names that may be reached, under `custom`: `example.com`, `*.example.com`, `www.*.com:443,8443`."""
    allow: list[str] = field(default_factory=list)
    """Addresses that may be reached, under `custom`: `10.0.0.0/8`, `192.0.2.7:5432`."""
    deny: list[str] = field(default_factory=list)
    """Addresses that may not be reached, whatever allows them."""
    requests: list[RequestRule] = field(default_factory=list)
    """What happens to HTTP requests; the first that matches decides."""

NetworkMode: TypeAlias = Literal["allow-all", "deny-all", "custom"]
"""What holds where nothing else is said."""


@dataclass(frozen=True, kw_only=True)
class NetworkSummary:
    """What went over a sandbox's network, by destination."""

    destinations: list[Destination]
    """Where to, the most bytes first."""
    connections: int
    """How many connections, those that were refused included."""
    denied: int
    """How many of them were refused."""
    bytes_in: int
    """Bytes received from outside."""
    bytes_out: int
    """Bytes sent outside."""


@dataclass(frozen=True, kw_only=True)
class NewKey:
    """A key that was just made. The secret is shown this once."""

    key: Key
    """The key."""
    secret: str
    """What to send as `Authorization: Bearer …`."""


@dataclass(frozen=True, kw_only=True)
class NewWebhook:
    """A webhook that has a new secret, which is shown this once."""

    webhook: Webhook
    """The webhook."""
    secret: str
    """What deliveries are signed with."""

OnAccept: TypeAlias = Literal["keep", "delete"]
"""What becomes of a fork once it is accepted: promoted, or all of it merged."""

OnIdle: TypeAlias = Literal["run", "pause", "stop"]
"""The action after the idle timeout."""

OnJunk: TypeAlias = Literal["off", "warn", "promote-or-drop"]
"""What a large file or junk means when a session ends."""

OnSecret: TypeAlias = Literal["block", "quarantine", "warn"]
"""What a secret's value in a file means when a session ends."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The answer to create, start and fork."""

    sandbox: Sandbox
    """The sandbox."""
    session: Session | None = None
    created: bool
    """Whether this call created the sandbox."""
    resumed: bool
    """Whether this call woke it."""


@dataclass(frozen=True, kw_only=True)
class PairMatch:
    """Conditions on a key and its value."""

    key: TextMatch | None = None
    value: TextMatch | None = None

PathChange: TypeAlias = Literal["created", "modified", "deleted"]
"""What happened to a path."""


@dataclass(frozen=True, kw_only=True)
class Paused:
    """The answer to a pause."""

    sandbox: Sandbox
    """The sandbox."""
    session: Session | None = None
    snapshot: Snapshot | None = None


@dataclass(frozen=True, kw_only=True)
class Port:
    """A published port."""

    port: int
    """Its number."""
    access: Access | None = None
    """Who may reach it."""
    wake: bool = False
    """Whether a request wakes the sandbox and waits for the port to open."""


@dataclass(frozen=True, kw_only=True)
class PortStatus:
    """A port and where it is reached."""

    port: int
    """Its number."""
    access: Access
    """Who may reach it."""
    wake: bool
    """Whether a request wakes the sandbox."""
    url: str
    """Where it is reached: by name where the server has a domain and the names fit, else by path."""
    path_url: str
    """Where it is reached by path, on the server's own address."""
    service: str | None = None
    """The service that is meant to listen there."""


@dataclass(frozen=True, kw_only=True)
class PortToken:
    """A token for one port of one sandbox."""

    token: str
    """The token: for `Authorization: Bearer`, `X-Sandkeep-Token` or `?keep_token=`."""
    url: str
    """The port's address with the token in it."""
    expires_at: str
    """When it stops working. It also ends with the key it was made with."""


@dataclass(frozen=True, kw_only=True)
class Project:
    """A tenant."""

    name: str
    """Its name, which is its identity."""
    created_at: str
    """When it was made."""
    keys: list[Key]
    """Who may act for it."""


@dataclass(frozen=True, kw_only=True)
class ProjectNetwork:
    """The network policies of a project."""

    default: Network
    """The policy of sandboxes without their own."""
    bound: Network | None = None
    max_connections: int | None = None
    """How many outbound connections and flows the project's sandboxes may have open together. Half of what the server allows all sandboxes, if absent or null."""


@dataclass(frozen=True, kw_only=True)
class ProjectRuns:
    """What a project allows its runs."""

    running: int
    """How many may run or wait for an approval at the same time."""
    queued: int
    """How many may be queued."""
    separate_approver: bool = False
    """Whether nobody may approve or accept what the same key asked for."""


@dataclass(frozen=True, kw_only=True)
class Promoted:
    """A fork that was promoted."""

    sandbox: Sandbox
    """The origin, which is now what the fork is."""
    snapshot: str
    """The snapshot it has now."""
    before: str | None = None
    """The snapshot it had before, for a rollback; absent if it was its image."""
    deleted: list[str] = field(default_factory=list)
    """Forks that were deleted afterwards."""
    failed: list[ForkFailed] = field(default_factory=list)
    """Forks that were to be deleted and are still there."""


@dataclass(frozen=True, kw_only=True)
class PromotedIntoDrive:
    """What was put into a drive, or would be."""

    drive: Drive
    """The drive."""
    snapshot: str | None = None
    """The snapshot of the sandbox that the files are from; absent for its image, and for a running one that was looked at only."""
    counts: MergeCounts
    """How many paths were added, replaced and removed. All 0 if the drive had them already."""
    conflicts: list[MergeConflict] = field(default_factory=list)
    """Paths where a file and a directory are in each other's place; with `dry_run` only. At most 1,000 are listed."""
    changes: list[DiffEntry]
    """Paths in the drive that are, or would be, changed; at most 1,000 are listed."""
    truncated: bool
    """Whether there are more changes or conflicts than are listed."""

Protocol: TypeAlias = Literal["tcp", "udp", "icmp", "dns", "http"]
"""What kind of traffic it was."""


@dataclass(frozen=True, kw_only=True)
class PrunedBuilds:
    """What was removed from the cache of builds."""

    steps: int
    """How many steps."""


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """Files that were taken out of a snapshot, and are kept aside for an operator."""

    id: str
    """The snapshot they are not in."""
    project: str
    """The project."""
    sandbox: str
    """The name of the sandbox whose session wrote them."""
    drive_id: str | None = None
    """The drive they were written to; the sandbox's own root if null."""
    at: str
    """When."""
    files: list[QuarantinedFile]
    """The files."""
    findings: list[Finding]
    """Why."""


@dataclass(frozen=True, kw_only=True)
class QuarantinedFile:
    """A quarantined file."""

    path: str
    """Where it was, as the sandbox saw it; a value in a name is masked."""
    kept_at: str
    """Where it is, in the server's data directory."""
    size_bytes: int
    """How large it is."""


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """The server takes work."""

    version: str
    """The server's version."""
    checks: list[ReadinessCheck]
    """What was looked at: `recovery`, `disk`, `drivers`, and `tls` if this server speaks it."""


@dataclass(frozen=True, kw_only=True)
class ReadinessCheck:
    """One thing that was looked at."""

    name: str
    """What."""
    state: CheckState
    """How it is."""
    detail: str
    """What was found; empty for a caller without a key."""


@dataclass(frozen=True, kw_only=True)
class RequestActionAnswer:
    """Answer without sending the request."""

    answer: DirectAnswer
    """Answer without sending the request."""


@dataclass(frozen=True, kw_only=True)
class RequestActionForward:
    """Send the request to another URL; its path and query are appended."""

    forward: Forward
    """Send the request to another URL; its path and query are appended."""


@dataclass(frozen=True, kw_only=True)
class RequestActionHeaders:
    """It goes on with these headers set. A value is never told back: answers say `null`. In a change, `null` leaves the value that a rule for the same domain has."""

    headers: dict[str, str | None]
    """It goes on with these headers set. A value is never told back: answers say `null`. In a change, `null` leaves the value that a rule for the same domain has."""


@dataclass(frozen=True, kw_only=True)
class RequestMatch:
    """Conditions on a request. All must hold."""

    methods: list[str] = field(default_factory=list)
    """One of these methods."""
    path: TextMatch | None = None
    query: list[PairMatch] = field(default_factory=list)
    """For each of these, some parameter of the query."""
    headers: list[PairMatch] = field(default_factory=list)
    """For each of these, some header."""


@dataclass(frozen=True, kw_only=True)
class RequestRule:
    """What happens to some HTTP requests."""

    domain: str
    """Requests to these names."""
    match: RequestMatch | None = None
    """Of those, the ones that look like this; all if absent."""
    action: RequestAction
    """What is done."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a sandbox may use."""

    vcpus: float
    """CPUs."""
    memory_bytes: int
    """Memory, swap included."""
    pids: int
    """Processes and threads."""
    disk_bytes: int
    """Disk space that a session may write."""

Restart: TypeAlias = Literal["never", "on-failure", "always"]
"""Whether a service that has ended is restarted."""


@dataclass(frozen=True, kw_only=True)
class RolledBack:
    """The answer to a rollback."""

    sandbox: Sandbox
    """The sandbox."""
    before: Snapshot | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run."""

    id: str
    """Its id."""
    project: str
    """The project it belongs to."""
    status: RunStatus
    """Its status."""
    why: str | None = None
    """Why it failed, was cancelled or expired."""
    place: RunPlace
    """What was asked for."""
    command: RunCommand | None = None
    sandbox: str | None = None
    """The sandbox it works in, once it is known."""
    own_sandbox: bool
    """Whether that sandbox was made for the run."""
    repository: str
    """The repository, for people."""
    owner: str
    """Who answers for it."""
    purpose: str
    """What it is for."""
    class_: str
    """A kind of work."""
    priority: int
    """Runs with a higher number start first."""
    approve: list[str]
    """Commands that are held until somebody approves."""
    approve_hosts: bool
    """Whether the first contact with each host is held."""
    known_hosts: list[str]
    """Hosts that need no approval."""
    approve_secrets: list[str]
    """Secrets whose use is held."""
    spending: list[RunSpending]
    """What the run may use, as it was raised since."""
    on_accept: AcceptRule
    """What acceptance does."""
    keep_ms: int
    """How long the result waits for a review."""
    timeout_ms: int | None = None
    """How long one attempt may work."""
    retries: int
    """How often the command is started again."""
    heartbeat_ms: int | None = None
    """How long a harness may be silent; absent if the server starts the command."""
    first_snapshot: str | None = None
    """The snapshot it began with; if absent, what its sandbox was made from."""
    last_snapshot: str | None = None
    """The snapshot that is to be reviewed."""
    attempts: list[RunAttempt]
    """The attempts of the server to run the command."""
    pending_approvals: list[str]
    """Approvals that wait for an answer."""
    cost: float | None = None
    """What the harness says it cost, in its own unit."""
    usage: Usage | None = None
    decision: RunDecision | None = None
    by: str
    """The id of the key that started it."""
    queued_at: str
    """When it was asked for."""
    started_at: str | None = None
    """When it left the queue."""
    finished_at: str | None = None
    """When its work was done, or given up."""
    ended_at: str | None = None
    """When it got its last status."""
    review_by: str | None = None
    """Until when it has to be reviewed."""


@dataclass(frozen=True, kw_only=True)
class RunAccepted:
    """A run that was accepted."""

    run: Run
    """The run."""
    promoted: Promoted | None = None
    from_: str
    """The first point of the patch: see `GET /v1/diff/patch`."""
    to: str
    """The second point of the patch."""


@dataclass(frozen=True, kw_only=True)
class RunAttempt:
    """One attempt of a run."""

    command: str
    """Its command, in the run's sandbox."""
    started_at: str
    """When it was started."""
    ended_at: str | None = None
    """When it ended."""
    exit_code: int | None = None
    """The exit code of the command."""
    problem: str | None = None
    """Why it counts as failed."""


@dataclass(frozen=True, kw_only=True)
class RunCommand:
    """The command of a run."""

    argv: list[str]
    """Program and arguments."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment on top of the sandbox's."""
    cwd: str | None = None
    """Working directory; the sandbox's if absent."""
    user: str | None = None
    """User; the sandbox's if absent."""


@dataclass(frozen=True, kw_only=True)
class RunContact:
    """A place outside that a run was in contact with."""

    host: str
    """The name, or the address where none was told."""
    connections: int
    """How many connections, refused ones included."""
    denied: int
    """How many were refused."""
    bytes_in: int
    """Bytes received."""
    bytes_out: int
    """Bytes sent."""


@dataclass(frozen=True, kw_only=True)
class RunDecision:
    """What was decided about the result of a run."""

    accepted: bool
    """Whether it was accepted."""
    how: AcceptRule | None = None
    by: str
    """The id of the key that decided."""
    at: str
    """When."""
    comment: str
    """What was said about it."""


@dataclass(frozen=True, kw_only=True)
class RunPlaceExisting:
    """It works in a sandbox that is there."""

    sandbox: str
    """The name of the sandbox."""
    how: Literal["existing"] = "existing"


@dataclass(frozen=True, kw_only=True)
class RunPlaceFork:
    """It works in a fork that is made for it."""

    sandbox: str
    """The sandbox that is forked."""
    name: str | None = None
    """The name of the fork; generated if absent."""
    how: Literal["fork"] = "fork"


@dataclass(frozen=True, kw_only=True)
class RunPlaceFresh:
    """It works in a sandbox that is made for it."""

    image: str | None = None
    """The image; the server's default if absent."""
    name: str | None = None
    """The name of the sandbox; generated if absent."""
    how: Literal["fresh"] = "fresh"


@dataclass(frozen=True, kw_only=True)
class RunReview:
    """What there is to know about the result of a run."""

    run: Run
    """The run."""
    from_: str
    """The first point of the comparison: what the run began with."""
    to: str
    """The second: the snapshot that is reviewed."""
    counts: DiffCounts | None = None
    changes: list[DiffEntry]
    """The paths that differ, at most 1,000."""
    truncated: bool
    """Whether there are more."""
    problem: str | None = None
    """Why files could not be compared."""
    current: bool
    """Whether the sandbox is still what was pinned for the review. If not, it has to be pinned again."""
    commands: list[Command]
    """Commands of the run that changed something, or of which that is not known; newest first, at most 100."""
    network: list[RunContact]
    """What it was in contact with, the most bytes first, at most 100."""
    findings: list[Finding]
    """What the guard found in the snapshot."""
    approvals: list[Approval]
    """Approvals of the run."""


@dataclass(frozen=True, kw_only=True)
class RunSpending:
    """A spending limit of a run."""

    what: SpendingKind
    """What is counted."""
    allowed: float
    """How much the run may use now."""
    step: float
    """How much more each approval allows."""

RunStatus: TypeAlias = Literal["queued", "running", "waiting_for_approval", "ready_for_review", "accepted", "rejected", "failed", "cancelled", "expired"]
"""The status of a run."""


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """A named, durable machine."""

    name: str
    """Its name, unique in the project."""
    id: str
    """Its id."""
    project: str
    """The project it belongs to."""
    state: State
    """Where it is."""
    failure: str | None = None
    """Why it is in the state `failed`."""
    fallback: str | None = None
    """Why its last session started from files although there was memory. Not in lists."""
    valid: bool | None = None
    """Whether its last session found it as it was at the stop before; absent without a `validate` hook. Not in lists."""
    commands: CommandsKept | None = None
    generation: int
    """How many snapshots were acknowledged."""
    current_snapshot: str | None = None
    """What the next session starts from; the image if absent."""
    saved_at: str | None = None
    """When that snapshot was taken. In `GET` of one sandbox and in lists."""
    unsaved: Unsaved | None = None
    session_changes: SessionChanges | None = None
    forked_from: Lineage | None = None
    outcome: ForkOutcome | None = None
    session: str | None = None
    """The current session, or the last one."""
    image: str
    """The image it was created from."""
    driver: str
    """The isolation backend."""
    class_: Class
    """The lifetime class."""
    persistent: bool
    """Whether a stop makes a snapshot."""
    owner: str
    """The owner, for people."""
    purpose: str
    """The purpose, for people."""
    tags: dict[str, str]
    """Tags to filter by."""
    env: dict[str, str]
    """Environment of every command."""
    cwd: str | None = None
    """Working directory of every command; the image's if absent."""
    user: str | None = None
    """User of every command; the image's if absent."""
    resources: Resources
    """What it may use."""
    session_timeout_ms: int | None = None
    """How long one session may last."""
    idle_timeout_ms: int | None = None
    """How long a session lasts with no command alive and no connection open."""
    on_idle: OnIdle | None = None
    hooks: Hooks
    """Hooks."""
    snapshot_expires_ms: int | None = None
    """How long after its last use a snapshot is deleted."""
    keep_last: int | None = None
    """How many snapshots are kept."""
    exclude: list[str]
    """Paths to leave out of snapshots."""
    mounts: dict[str, Mount] = field(default_factory=dict)
    """Drives by the path they are mounted at."""
    network: Network | None = None
    secrets: list[SecretUse] = field(default_factory=list)
    """Secrets that its commands have a placeholder of."""
    ports: list[Port] = field(default_factory=list)
    """Published ports."""
    wake_on_request: bool = False
    """Whether requests to published ports wake the sandbox, unless the port disables it."""
    services: list[Service] = field(default_factory=list)
    """Services: commands that run in every session."""
    guard: Guard
    """The guard: what to do about secrets and junk in snapshots."""
    approvals: ApprovalPolicy | None = None
    findings: list[Finding] = field(default_factory=list)
    """What the guard found in what the last session wrote, when nothing of it is sealed until somebody decides."""
    expires_ms: int
    """How long after its last use it is deleted."""
    expires_at: str
    """When that is, as things stand."""
    created_at: str
    """When it was created."""
    updated_at: str
    """When its settings or state changed."""
    used_at: str
    """When a session last began or ended."""


@dataclass(frozen=True, kw_only=True)
class SandboxNetwork:
    """What a sandbox may reach, and where that comes from."""

    network: Network
    """What it may reach."""
    own: bool
    """Whether that is its own; it is the project's default otherwise."""
    bound: Network | None = None


@dataclass(frozen=True, kw_only=True)
class SandboxStats:
    """What a sandbox uses at this moment. Asking never wakes it."""

    name: str
    """The sandbox."""
    state: State
    """Its state."""
    at_ms: int
    """When this was read, in milliseconds since 1970."""
    session: str | None = None
    """The session; absent if none is under way. What follows is about it."""
    usage: LiveUsage | None = None

Scope: TypeAlias = Literal["read", "write", "admin"]
"""What a key may do."""


@dataclass(frozen=True, kw_only=True)
class Secret:
    """A named value of a project."""

    name: str
    """Its name, unique in the project."""
    project: str
    """The project it belongs to."""
    version: int
    """The number of the value in use."""
    versions: list[SecretVersion]
    """The values that are kept, oldest first."""
    hosts: list[str]
    """The hosts that may have it when it is brokered."""
    places: list[SecretPlace] = field(default_factory=list)
    """Parts of a request in which its placeholder is replaced when it is brokered."""
    tags: dict[str, str]
    """Only sandboxes that have all of these tags may use it."""
    created_at: str
    """When it was first set."""
    updated_at: str
    """When it was last set."""


@dataclass(frozen=True, kw_only=True)
class SecretGiven:
    """A secret that a session was given."""

    name: str
    """The secret."""
    version: int
    """Which value of it."""
    how: SecretHow
    """How."""

SecretHow: TypeAlias = Literal["brokered", "env", "file"]
"""How a session was given a secret."""

SecretPlace: TypeAlias = Literal["header", "query", "body"]
"""A part of a request."""


@dataclass(frozen=True, kw_only=True)
class SecretUse:
    """A secret that a sandbox's commands have a placeholder of, which the network puts in its place."""

    secret: str
    """The secret."""
    env: str | None = None
    """The variable that holds the placeholder; named like the secret if absent."""


@dataclass(frozen=True, kw_only=True)
class SecretVersion:
    """One value of a secret."""

    version: int
    """Its number."""
    created_at: str
    """When it was set."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """A command that belongs to a sandbox."""

    name: str
    """Its name, unique in the sandbox."""
    argv: list[str]
    """Program and arguments."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment on top of the sandbox's."""
    cwd: str | None = None
    """Working directory; the sandbox's if absent."""
    user: str | None = None
    """User; the sandbox's if absent."""
    port: int | None = None
    """The port it listens on: requests for it wait until it does."""
    restart: Restart | None = None
    """Whether it is restarted when it has ended."""
    start: bool = False
    """Whether it is started with every session."""

ServiceState: TypeAlias = Literal["stopped", "starting", "running", "restarting", "exited", "failed"]
"""The state of a service."""


@dataclass(frozen=True, kw_only=True)
class ServiceStatus:
    """A service and its state."""

    service: Service
    """What it is meant to be."""
    state: ServiceState
    """Its state."""
    since: str | None = None
    """Since when it runs."""
    restarts_at: str | None = None
    """When it is started again."""
    exit_code: int | None = None
    """Its exit code, once it has exited."""
    problem: str | None = None
    """Why it does not run."""
    failures: int
    """How often it has failed in a row."""
    command: str | None = None
    """Its command that runs, or the last one; its log is the service's."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """One waking period of a sandbox."""

    id: str
    """Its id."""
    sandbox_id: str
    """Whose it is."""
    from_: str | None = None
    """The snapshot it started from; the image if absent."""
    generation: int
    """The generation it started from."""
    started_at: str
    """When it began."""
    ended_at: str | None = None
    """When it ended."""
    end: SessionEnd | None = None
    snapshot: str | None = None
    """The snapshot made at its end."""
    usage: Usage
    """What it used."""
    changes: SessionChanges | None = None
    deadline: str | None = None
    """When it will be ended, unless extended."""
    hooks: list[HookRun]
    """What the hooks did."""
    valid: bool | None = None
    """Whether `validate` found things as they were; absent without such a hook."""
    secrets: list[SecretGiven] = field(default_factory=list)
    """The secrets it was given."""
    fallback: str | None = None
    """Why it started from files although memory was kept: files are as of the same generation, processes are gone."""


@dataclass(frozen=True, kw_only=True)
class SessionChanges:
    """What was changed in the root filesystem of a sandbox during a session: by commands, services and uploads. What every look at its files found is added up, so a file that is created and deleted later counts as both."""

    created: int
    """How many paths were created."""
    modified: int
    """How many paths were modified: content, mode, owner or times."""
    deleted: int
    """How many paths were deleted."""
    bytes: int
    """What the created and modified files took on the disk."""
    complete: bool
    """Whether all changes were seen. Otherwise there were at least so many."""

SessionEnd: TypeAlias = Literal["stopped", "paused", "idle", "timeout", "rolled_back", "deleted", "interrupted", "out_of_memory", "out_of_disk", "start_failed"]
"""Why a session ended."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A point a sandbox can be resumed or forked from."""

    id: str
    """Its id."""
    sandbox: str
    """The name of the sandbox it was made of. It may be gone by now."""
    sandbox_id: str
    """That sandbox's id."""
    session: str
    """The session it was made in."""
    generation: int
    """That sandbox's generation with this snapshot."""
    parent: str | None = None
    """The snapshot before it."""
    kind: SnapshotKind
    """How it came about."""
    label: str | None = None
    """A label, for people."""
    layers: int
    """How many layers it stands on, the image's included."""
    size: SnapshotSize | None = None
    memory: SnapshotMemory | None = None
    findings: list[Finding] = field(default_factory=list)
    """What the guard found in it and let pass, or took out of it."""
    created_at: str
    """When it was made."""
    expires_at: str | None = None
    """When it goes away, unless it is some sandbox's current one."""


@dataclass(frozen=True, kw_only=True)
class SnapshotDeleted:
    """The answer to deleting a snapshot."""

    freed_bytes: int
    """What it freed."""

SnapshotKind: TypeAlias = Literal["stop", "checkpoint", "fork", "before_rollback", "recovered", "pause", "merge"]
"""How a snapshot came about."""


@dataclass(frozen=True, kw_only=True)
class SnapshotMemory:
    """Memory of a machine, as part of a snapshot."""

    layers: int
    """How many captures it stands on, its own included."""
    bytes: int | None = None
    """What of its size is memory: pages, devices and disks, those of captures it stands on included."""


@dataclass(frozen=True, kw_only=True)
class SnapshotSize:
    """What a snapshot takes on the disk."""

    own_bytes: int
    """What was written since its parent."""
    shared_bytes: int
    """What it has in common with others."""
    freed_if_deleted_bytes: int
    """What deleting it would free."""
    export_bytes: int = 0
    """About how much an export writes: the disk space of all its layers, those of its image included. Holes of sparse files are not counted here and are zeros in an export, whose `Content-Length` is exact."""


@dataclass(frozen=True, kw_only=True)
class SpaceUsage:
    """Disk usage: of the key's project, or with an admin key of all."""

    project: str | None = None
    """The project that the sums are of; absent if they are of all."""
    total_bytes: int | None = None
    """The size of the filesystem; for admin keys."""
    free_bytes: int | None = None
    """What is free on it; for admin keys."""
    snapshots_bytes: int
    """What snapshots take."""
    drives_bytes: int = 0
    """What drives take."""
    images_bytes: int | None = None
    """What images take, which all projects share; for admin keys."""
    quarantine_bytes: int = 0
    """Disk space of quarantined files."""
    open_bytes: int
    """What sessions under way have written."""
    commands_bytes: int = 0
    """What records and logs of commands take."""
    trash_bytes: int = 0
    """Disk space of the trash, which becomes free when its grace period is over or space is needed. Not part of any other sum."""

Span: TypeAlias = Union[int, str]
"""A span of time: milliseconds, or text like `90s`, `15m`, `30d`."""

SpendingKind: TypeAlias = Literal["cpu", "time", "network", "cost"]
"""What a spending limit counts."""

State: TypeAlias = Literal["stopped", "starting", "running", "paused", "stopping", "failed", "deleted"]
"""The state of a sandbox."""


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """The answer to a stop."""

    sandbox: Sandbox
    """The sandbox."""
    session: Session | None = None
    snapshot: Snapshot | None = None
    usage: Usage | None = None
    findings: list[Finding] = field(default_factory=list)
    """What the guard found and let pass, or kept aside."""


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A command that may have written what was found."""

    command: str
    """The command's id."""
    argv: list[str]
    """What was run."""
    because: Because
    """Why it is named."""


@dataclass(frozen=True, kw_only=True)
class TextMatchExact:
    """Equal to this text."""

    exact: str
    """Equal to this text."""


@dataclass(frozen=True, kw_only=True)
class TextMatchPrefix:
    """With this prefix."""

    prefix: str
    """With this prefix."""


@dataclass(frozen=True, kw_only=True)
class TextMatchRegex:
    """Matching this regular expression."""

    regex: str
    """Matching this regular expression."""


@dataclass(frozen=True, kw_only=True)
class Token:
    """A token that was just made."""

    token: str
    """What to send as `Authorization: Bearer …`."""
    project: str
    """The project it acts for, as those clients write it."""
    team: str
    """The team it belongs to, as those clients write it."""


@dataclass(frozen=True, kw_only=True)
class TrashEmptied:
    """The deleted sandboxes."""

    sandboxes: int
    """How many sandboxes."""


@dataclass(frozen=True, kw_only=True)
class TrashItem:
    """A sandbox in the trash."""

    id: str
    """Its id."""
    name: str
    """What it was called. The name is free."""
    deleted_at: str
    """When it was deleted."""
    expired: bool
    """Whether it expired, and nobody asked for it."""
    snapshots: int
    """How many snapshots went with it."""
    freed_if_deleted_bytes: int
    """What deleting it for good frees."""
    stays_for_ms: int
    """How long it stays at least, unless space is needed."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Everything connected with a sandbox by forks and snapshots."""

    sandboxes: list[Sandbox]
    """Sandboxes."""
    snapshots: list[Snapshot]
    """Snapshots."""
    forks: list[TreeFork] = field(default_factory=list)
    """What has become of each fork. Those that were deleted are listed while they are in the trash."""


@dataclass(frozen=True, kw_only=True)
class TreeFork:
    """A fork in a lineage."""

    id: str
    """Its id."""
    name: str
    """Its name."""
    origin: str
    """The name of its origin."""
    fate: ForkFate
    """What has become of it."""
    freed_if_deleted_bytes: int
    """What deleting it for good would free."""
    in_trash: bool = False
    """Whether it is in the trash."""


@dataclass(frozen=True, kw_only=True)
class Unsaved:
    """What a running sandbox would lose if its host went down now."""

    files: int
    """Files that were created, modified or deleted."""
    bytes: int
    """Disk space of the created and modified ones."""
    as_of: str
    """When that was looked at: after the last command that ended, or later."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a session used."""

    active_cpu_ms: int
    """CPU time really used."""
    wall_ms: int
    """Wall time."""
    memory_peak_bytes: int
    """The most memory at one time."""
    network_in_bytes: int
    """Bytes received from outside."""
    network_out_bytes: int
    """Bytes sent outside."""
    oom_kills: int = 0
    """Processes that the kernel killed because the sandbox was out of memory. Known of containers; those inside a microVM show in the `end` of their commands."""

ValueEncoding: TypeAlias = Literal["plain", "json", "url", "base64", "hex"]
"""How a value is written."""

Verdict: TypeAlias = Literal["allowed", "denied", "cut", "failed"]
"""The outcome."""


@dataclass(frozen=True, kw_only=True)
class Webhook:
    """A webhook, without its secrets."""

    id: str
    """Its id."""
    url: str
    """Where events are sent."""
    events: list[str]
    """Which events."""
    allow_private: bool
    """Whether private, loopback and link-local addresses may be dialled."""
    answers: bool = False
    """Whether the receiver may answer approvals."""
    answers_allowed_by: str | None = None
    """The id of the key that allowed that. Links work for as long as it may approve."""
    secrets: int
    """How many secrets deliveries are signed with: 1, or 2 during a rotation."""
    created_at: str
    """When it was made."""
    enabled: bool
    """Whether events are sent."""
    disabled_reason: str | None = None
    """Why nothing is sent."""
    disabled_at: str | None = None
    """Since when nothing is sent."""
    failing_since: str | None = None
    """Since when deliveries fail, if they do."""
    deliveries: list[WebhookDelivery]
    """The last attempts, the newest first."""


@dataclass(frozen=True, kw_only=True)
class WebhookDelivery:
    """An attempt to deliver an event."""

    event: str
    """The event's id."""
    kind: str
    """Its kind."""
    at: str
    """When."""
    attempt: int
    """Which attempt it was."""
    delivered: bool
    """Whether the receiver took it."""
    status: int | None = None
    """What the receiver answered."""
    error: str | None = None
    """Why it was not delivered."""
    duration_ms: int
    """How long it took."""


@dataclass(frozen=True, kw_only=True)
class WhoAmI:
    """The calling key."""

    project: str
    """The project the key acts for."""
    scope: Scope
    """What it may do."""
    key: str
    """Its id."""
    server_version: str
    """The server's version."""


@dataclass(frozen=True, kw_only=True)
class Why:
    """Why a sandbox is in its state."""

    state: State
    """Where it is."""
    since: str
    """Since when."""
    reason: str
    """How it came into this state, as text for people; the following fields, too."""
    waking: list[str]
    """What would wake it, or, while it runs, what would put it to sleep and when."""
    holding: list[str]
    """What keeps it awake now."""
    notices: list[str]
    """Other notices: memory that could not be used, a pause that was refused, a failure."""


BuildProgress: TypeAlias = Union[BuildProgressStep, BuildProgressOutput, BuildProgressProgress, BuildProgressWarning, BuildProgressDone, BuildProgressError]
"""One line of the answer to a build."""

ExecAnswer: TypeAlias = Union[ExecResult, Command]
"""What `POST …/exec` answers as one JSON document: with `?wait=true` the result, with `detach` the command."""

ExecEvent: TypeAlias = Union[ExecEventStarted, ExecEventStdout, ExecEventStderr, ExecEventGap, ExecEventExited, ExecEventMore, ExecEventError]
"""One line of the stream of a command."""

Forked: TypeAlias = Union[Forks, Opened]
"""The answer to a fork."""

ImageProgress: TypeAlias = Union[ImageProgressProgress, ImageProgressDone, ImageProgressError]
"""One line of the answer to a pull, an import or a customization."""

RequestAction: TypeAlias = Union[Literal["allow"], Literal["deny"], RequestActionAnswer, RequestActionForward, RequestActionHeaders]
"""What is done with a request."""

RunPlace: TypeAlias = Union[RunPlaceExisting, RunPlaceFork, RunPlaceFresh]
"""The sandbox of a run: an existing one, a fork, or a fresh one."""

TextMatch: TypeAlias = Union[TextMatchExact, TextMatchPrefix, TextMatchRegex]
"""A condition on a text."""

