"""What the server is sent, as dictionaries. Made by sdk/generate.py. Do not edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union

from typing_extensions import Required, TypeAlias, TypedDict

AcceptRule: TypeAlias = Literal["promote", "merge", "patch", "keep"]
"""What acceptance does with the result of a run."""


class AcceptRun(TypedDict, total=False):
    """An acceptance. The body may be empty."""

    how: AcceptRule | None
    comment: str
    """What there is to say about it."""
    delete_sandbox: bool
    """Whether the sandbox that was made for the run is deleted afterwards."""

Access: TypeAlias = Literal["public", "private", "off"]
"""Who may reach a port from outside."""

AddDirectory = TypedDict(
    "AddDirectory",
    {
        "from": 'Required[str]',
        "to": 'Required[str]',
    },
    total=False,
)
"""A directory of the server to be added to an image."""


class AnswerApproval(TypedDict, total=False):
    """An answer to be given."""

    answer: Required[ApprovalAnswer]
    """The answer."""
    comment: str
    """What there is to say about it."""

ApprovalAnswer: TypeAlias = Literal["approve", "deny"]
"""An answer."""


class ApprovalPolicy(TypedDict, total=False):
    """What somebody has to approve in a sandbox. While a sandbox has this setting, programs inside can also ask with `keep ask`. Only a key that may approve can change or remove it."""

    commands: Sequence[str]
    """Commands that are held: patterns with `*` and `?` for the whole command line. They apply to commands started through the API, not to what those start."""
    hosts: bool
    """Whether the first contact with each host is held. An approved host stays approved for the sandbox."""
    known_hosts: Sequence[str]
    """Hosts that need no approval: names, `*.example.com`, or addresses."""
    secrets: Sequence[str]
    """Secrets whose use is held: the first request that has it to each host, and each command that is given it."""
    expires: Span | None
    default: ApprovalAnswer | None


class AskApproval(TypedDict, total=False):
    """A question to be asked."""

    question: Required[str]
    """The question, on one line."""
    context: str
    """What there is to know before answering."""
    expires: Span | None
    default: ApprovalAnswer | None

Audience: TypeAlias = Literal["vercel"]
"""Whose clients a token is for."""


class CancelRun(TypedDict, total=False):
    """A cancellation. The body may be empty."""

    comment: str
    """Why, for people."""


class Checkpoint(TypedDict, total=False):
    """A checkpoint. The body may be empty."""

    label: str | None
    """A label, for people."""

Class: TypeAlias = Literal["ephemeral", "resumable", "workspace"]
"""The lifetime class of a sandbox."""


class CreateDrive(TypedDict, total=False):
    """A drive to create, or to get."""

    name: Required[str]
    """Its name: 1 to 64 letters, digits, `-` and `_`."""
    max_size: Size | None
    if_exists: IfExists
    """The action if the name is taken. A drive of another size is never returned."""


class CreateKey(TypedDict, total=False):
    """A key to create."""

    label: str
    """A label, for people."""
    scope: Required[Scope]
    """What it may do."""
    approve: bool
    """Whether it may approve, and accept runs; an admin key may anyway."""
    expires: Span | None


class CreateProject(TypedDict, total=False):
    """A project to create."""

    name: Required[str]
    """Its name."""

CreateSandbox = TypedDict(
    "CreateSandbox",
    {
        "name": 'str | None',
        "if_exists": 'IfExists',
        "start": 'bool | None',
        "from": 'str | None',
        "image": 'str | None',
        "driver": 'str | None',
        "class": 'Class | None',
        "persistent": 'bool | None',
        "owner": 'str | None',
        "purpose": 'str | None',
        "expires": 'Span | None',
        "tags": 'Mapping[str, str] | None',
        "env": 'Mapping[str, str] | None',
        "cwd": 'str | None',
        "user": 'str | None',
        "vcpus": 'float | None',
        "memory": 'Size | None',
        "pids": 'int | None',
        "disk": 'Size | None',
        "session_timeout": 'Span | None',
        "idle_timeout": 'Span | None',
        "on_idle": 'OnIdle | None',
        "hooks": 'Hooks | None',
        "snapshot_expires": 'Span | None',
        "keep_last": 'int | None',
        "exclude": 'Sequence[str] | None',
        "mounts": 'Mapping[str, Mount] | None',
        "network": 'Network | None',
        "secrets": 'Sequence[SecretUse] | None',
        "ports": 'Sequence[Port] | None',
        "wake_on_request": 'bool | None',
        "services": 'Sequence[Service] | None',
        "guard": 'SetGuard | None',
        "approvals": 'ApprovalPolicy | None',
    },
    total=False,
)
"""A sandbox to create, or to get."""


class CreateWebhook(TypedDict, total=False):
    """A webhook to create."""

    url: Required[str]
    """Where events are sent: `https://…`, or `http://…`."""
    events: Required[Sequence[str]]
    """Which events: kinds (`sandbox.stopped`), groups (`sandbox.*`), or `*` for all."""
    secret: str | None
    """What deliveries are signed with, 16 to 256 bytes; made up if absent."""
    allow_private: bool
    """Whether private, loopback and link-local addresses may be dialled; needs an admin key."""
    answers: bool
    """Whether the receiver may answer approvals: `approval.asked` then has a link, `answer_url`, that answers once without a key. Needs a key that may approve, and an address with `https://`, unless private addresses are allowed."""

CustomizeRequest = TypedDict(
    "CustomizeRequest",
    {
        "name": 'Required[str]',
        "from": 'str | None',
        "add": 'Sequence[AddDirectory]',
        "env": 'Mapping[str, str]',
        "path": 'Sequence[str]',
    },
    total=False,
)
"""An image to customize: a default user, a home and `sudo` are added."""


class DirectAnswer(TypedDict, total=False):
    """An answer to a request that is never sent."""

    status: Required[int]
    """200 to 599."""
    headers: Mapping[str, str]
    """Headers."""
    body: str
    """The body."""


class ExecRequest(TypedDict, total=False):
    """A command to run."""

    argv: Required[Sequence[str]]
    """Program and arguments."""
    env: Mapping[str, str]
    """Variables on top of the sandbox's."""
    cwd: str | None
    """Working directory; the sandbox's if absent."""
    user: str | None
    """User; the sandbox's if absent."""
    tty: TermSize | None
    stdin: bool
    """Whether standard input will be sent: over the WebSocket, or by `POST …/commands/{id}/stdin`. Otherwise it is empty, or what `input` says."""
    input: str | None
    """Standard input, whole, as text."""
    input_base64: str | None
    """Standard input, whole, as base64."""
    detach: bool
    """Answer at once with the `Command` and let it go on by itself."""
    timeout: Span | None
    if_running: bool
    """Refuse with 409 `not_running` instead of waking the sandbox."""
    inject: Sequence[Inject]
    """Secrets it is given."""


class Extend(TypedDict, total=False):
    """An extension of the current session."""

    by: Required[Span]
    """How much more."""


class FinishRun(TypedDict, total=False):
    """The end of the work of a harness."""

    failure: str | None
    """Why the work failed; absent if it is ready for review."""
    cost: float | None
    """What the run has cost, in the harness's own unit."""

Fork = TypedDict(
    "Fork",
    {
        "name": 'str | None',
        "count": 'int | None',
        "from": 'str | None',
        "expect_generation": 'int | None',
        "start": 'bool',
        "on_accept": 'OnAccept',
        "image": 'str | None',
        "driver": 'str | None',
        "class": 'Class | None',
        "persistent": 'bool | None',
        "owner": 'str | None',
        "purpose": 'str | None',
        "expires": 'Span | None',
        "tags": 'Mapping[str, str] | None',
        "env": 'Mapping[str, str] | None',
        "cwd": 'str | None',
        "user": 'str | None',
        "vcpus": 'float | None',
        "memory": 'Size | None',
        "pids": 'int | None',
        "disk": 'Size | None',
        "session_timeout": 'Span | None',
        "idle_timeout": 'Span | None',
        "on_idle": 'OnIdle | None',
        "hooks": 'Hooks | None',
        "snapshot_expires": 'Span | None',
        "keep_last": 'int | None',
        "exclude": 'Sequence[str] | None',
        "mounts": 'Mapping[str, Mount] | None',
        "network": 'Network | None',
        "secrets": 'Sequence[SecretUse] | None',
        "ports": 'Sequence[Port] | None',
        "wake_on_request": 'bool | None',
        "services": 'Sequence[Service] | None',
        "guard": 'SetGuard | None',
        "approvals": 'ApprovalPolicy | None',
    },
    total=False,
)
"""A fork: a new sandbox on the same files, and of a machine that keeps memory and is awake or paused, with the same memory and processes. Absent settings are the source's."""


class ForkDrive(TypedDict, total=False):
    """A fork: a new drive that holds what another one held when it was last detached."""

    name: Required[str]
    """The new drive's name."""


class Forward(TypedDict, total=False):
    """Another place for a request."""

    url: Required[str]
    """An `http` or `https` URL."""
    prefix: str | None
    """How the headers begin that tell where it was meant to go; `x-forwarded-` if absent."""


class FsckRequest(TypedDict, total=False):
    """A check of the data directory."""

    verify: bool
    """Whether to read every file of every layer, too."""


class Hook(TypedDict, total=False):
    """A command that the server runs when a sandbox is created, resumed or stopped."""

    argv: Required[Sequence[str]]
    """Program and arguments."""
    timeout: Span | None


class Hooks(TypedDict, total=False):
    """The hooks of a sandbox."""

    on_create: Sequence[Hook]
    """Run in order once, after creation. The first failure ends the list."""
    on_resume: Sequence[Hook]
    """Run in order at every resume. Failures are reported; the resume continues."""
    validate: Hook | None
    validate_git: str | None
    """The absolute path of a Git repository. Its commit and its changed files are compared in the same way. Needs `git` and `sh` inside."""

IfExists: TypeAlias = Literal["fail", "get"]
"""The action if the name is taken."""


class ImportRequest(TypedDict, total=False):
    """An archive on the server's own disk to import: a root tarball, an OCI layout or a docker archive."""

    path: Required[str]
    """Its path on the server."""
    name: Required[str]
    """What to call the image."""


class Inject(TypedDict, total=False):
    """A secret that one command is given: in a variable, or in a file."""

    secret: Required[str]
    """The secret."""
    env: str | None
    """The variable; named like the secret if there is no `file` either."""
    file: str | None
    """A file below `/run` or `/dev/shm`, which are in memory. It is gone when the command ends."""


class IssuePortToken(TypedDict, total=False):
    """A token to make for a private port."""

    expires: Span | None

IssueToken = TypedDict(
    "IssueToken",
    {
        "for": 'Required[Audience]',
        "scope": 'Scope | None',
        "expires": 'Span | None',
    },
    total=False,
)
"""A token to be made from the key that asks. It ends with the key, or sooner."""


class MakeDir(TypedDict, total=False):
    """A directory to make."""

    path: Required[str]
    """Where."""
    mode: int | None
    """Permission bits."""
    parents: bool
    """Whether missing parents are made, and an existing directory is fine."""
    user: str | None
    """As whom; the sandbox's user if absent."""


class Merge(TypedDict, total=False):
    """Brings the changes of a sandbox into another one."""

    into: str | None
    """The sandbox that gets the changes; the origin if absent."""
    dry_run: bool
    """Says what would be done, and does nothing."""
    conflicts: OnConflict
    """What to do with conflicts."""
    only: Sequence[str]
    """Globs of the paths to take; all if empty."""
    expect_generation: int | None
    """The generation the target must have."""


class Mount(TypedDict, total=False):
    """A drive that a sandbox mounts."""

    drive: Required[str]
    """The drive's name."""
    mode: MountMode
    """How; `read-write` if absent."""

MountMode: TypeAlias = Literal["read-write", "snapshot"]
"""How a drive is mounted."""

Move = TypedDict(
    "Move",
    {
        "from": 'Required[str]',
        "to": 'Required[str]',
        "user": 'str | None',
    },
    total=False,
)
"""Something to rename."""


class Network(TypedDict, total=False):
    """What a sandbox may reach. `docs/NETWORK.md` tells what each part means."""

    mode: Required[NetworkMode]
    """What holds where nothing else is said."""
    domains: Sequence[str]
    """Names that may be reached, under `custom`: `example.com`, `*.example.com`, `www.*.com:443,8443`."""
    allow: Sequence[str]
    """Addresses that may be reached, under `custom`: `10.0.0.0/8`, `192.0.2.7:5432`."""
    deny: Sequence[str]
    """Addresses that may not be reached, whatever allows them."""
    requests: Sequence[RequestRule]
    """What happens to HTTP requests; the first that matches decides."""

NetworkMode: TypeAlias = Literal["allow-all", "deny-all", "custom"]
"""What holds where nothing else is said."""

OnAccept: TypeAlias = Literal["keep", "delete"]
"""What becomes of a fork once it is accepted: promoted, or all of it merged."""

OnConflict: TypeAlias = Literal["refuse", "keep"]
"""What to do with paths that changed on both sides."""

OnIdle: TypeAlias = Literal["run", "pause", "stop"]
"""The action after the idle timeout."""

OnJunk: TypeAlias = Literal["off", "warn", "promote-or-drop"]
"""What a large file or junk means when a session ends."""

OnSecret: TypeAlias = Literal["block", "quarantine", "warn"]
"""What a secret's value in a file means when a session ends."""


class PairMatch(TypedDict, total=False):
    """Conditions on a key and its value."""

    key: TextMatch | None
    value: TextMatch | None


class Pause(TypedDict, total=False):
    """A pause. The body may be empty."""

    expect_generation: int | None
    """Fail with 412 unless the sandbox is at this generation."""


class Port(TypedDict, total=False):
    """A published port."""

    port: Required[int]
    """Its number."""
    access: Access
    """Who may reach it."""
    wake: bool
    """Whether a request wakes the sandbox and waits for the port to open."""


class ProjectNetwork(TypedDict, total=False):
    """The network policies of a project."""

    default: Required[Network]
    """The policy of sandboxes without their own."""
    bound: Network | None
    max_connections: int | None
    """How many outbound connections and flows the project's sandboxes may have open together. Half of what the server allows all sandboxes, if absent or null."""


class ProjectRuns(TypedDict, total=False):
    """What a project allows its runs."""

    running: Required[int]
    """How many may run or wait for an approval at the same time."""
    queued: Required[int]
    """How many may be queued."""
    separate_approver: bool
    """Whether nobody may approve or accept what the same key asked for."""


class Promote(TypedDict, total=False):
    """Gives the origin of a fork the fork's state."""

    expect_generation: int | None
    """The generation the origin must have; that of the fork's beginning if absent."""
    delete_fork: bool
    """Deletes the fork afterwards. It goes to the trash."""
    delete_group: bool
    """Deletes the other forks of its group too: those that were made together with it."""

PromoteIntoDrive = TypedDict(
    "PromoteIntoDrive",
    {
        "from": 'Required[str]',
        "only": 'Required[Sequence[str]]',
        "path": 'str',
        "expect_generation": 'int | None',
        "dry_run": 'bool',
    },
    total=False,
)
"""Puts chosen files that a sandbox made, changed or deleted since it was forked into a drive that no session writes to."""


class PublishPort(TypedDict, total=False):
    """How a port is to be published."""

    access: Required[Access]
    """Who may reach it; `off` to publish it no more."""
    wake: bool
    """Whether a request wakes the sandbox and waits for the port to open."""


class PullRequest(TypedDict, total=False):
    """An image to fetch from a registry."""

    reference: Required[str]
    """By tag or digest: `debian:12`, `ghcr.io/owner/name@sha256:…`; `host` is made again from the server's own machine."""


class RejectRun(TypedDict, total=False):
    """A rejection. The body may be empty. A sandbox that was made for the run is deleted."""

    comment: str
    """What there is to say about it."""


class Rename(TypedDict, total=False):
    """Gives a sandbox another name."""

    name: Required[str]
    """The new name."""


class RequestActionAnswer(TypedDict, total=False):
    """Answer without sending the request."""

    answer: Required[DirectAnswer]
    """Answer without sending the request."""


class RequestActionForward(TypedDict, total=False):
    """Send the request to another URL; its path and query are appended."""

    forward: Required[Forward]
    """Send the request to another URL; its path and query are appended."""


class RequestActionHeaders(TypedDict, total=False):
    """It goes on with these headers set. A value is never told back: answers say `null`. In a change, `null` leaves the value that a rule for the same domain has."""

    headers: Required[Mapping[str, str | None]]
    """It goes on with these headers set. A value is never told back: answers say `null`. In a change, `null` leaves the value that a rule for the same domain has."""


class RequestMatch(TypedDict, total=False):
    """Conditions on a request. All must hold."""

    methods: Sequence[str]
    """One of these methods."""
    path: TextMatch | None
    query: Sequence[PairMatch]
    """For each of these, some parameter of the query."""
    headers: Sequence[PairMatch]
    """For each of these, some header."""


class RequestRule(TypedDict, total=False):
    """What happens to some HTTP requests."""

    domain: Required[str]
    """Requests to these names."""
    match: RequestMatch
    """Of those, the ones that look like this; all if absent."""
    action: Required[RequestAction]
    """What is done."""

Restart: TypeAlias = Literal["never", "on-failure", "always"]
"""Whether a service that has ended is restarted."""


class Restore(TypedDict, total=False):
    """A restore from the trash."""

    name: str | None
    """Its name; the one it had if absent."""


class Rollback(TypedDict, total=False):
    """A rollback."""

    to: Required[str]
    """The snapshot to return to."""
    expect_generation: int | None
    """Fail with 412 unless the sandbox is at this generation."""


class RotateWebhookSecret(TypedDict, total=False):
    """Another secret for a webhook."""

    secret: str | None
    """The secret; made up if absent."""
    only: bool
    """Whether the secret before is forgotten at once. Otherwise deliveries are signed with both."""


class RunCommand(TypedDict, total=False):
    """The command of a run."""

    argv: Required[Sequence[str]]
    """Program and arguments."""
    env: Mapping[str, str]
    """Environment on top of the sandbox's."""
    cwd: str | None
    """Working directory; the sandbox's if absent."""
    user: str | None
    """User; the sandbox's if absent."""


class RunHeartbeat(TypedDict, total=False):
    """A sign of life of a harness."""

    cost: float | None
    """What the run has cost so far, in the harness's own unit."""


class RunPlaceExisting(TypedDict, total=False):
    """It works in a sandbox that is there."""

    sandbox: Required[str]
    """The name of the sandbox."""
    how: Required[Literal["existing"]]


class RunPlaceFork(TypedDict, total=False):
    """It works in a fork that is made for it."""

    sandbox: Required[str]
    """The sandbox that is forked."""
    name: str | None
    """The name of the fork; generated if absent."""
    how: Required[Literal["fork"]]


class RunPlaceFresh(TypedDict, total=False):
    """It works in a sandbox that is made for it."""

    image: str | None
    """The image; the server's default if absent."""
    name: str | None
    """The name of the sandbox; generated if absent."""
    how: Required[Literal["fresh"]]

Scope: TypeAlias = Literal["read", "write", "admin"]
"""What a key may do."""

SecretPlace: TypeAlias = Literal["header", "query", "body"]
"""A part of a request."""


class SecretUse(TypedDict, total=False):
    """A secret that a sandbox's commands have a placeholder of, which the network puts in its place."""

    secret: Required[str]
    """The secret."""
    env: str | None
    """The variable that holds the placeholder; named like the secret if absent."""


class Service(TypedDict, total=False):
    """A command that belongs to a sandbox."""

    name: Required[str]
    """Its name, unique in the sandbox."""
    argv: Required[Sequence[str]]
    """Program and arguments."""
    env: Mapping[str, str]
    """Environment on top of the sandbox's."""
    cwd: str | None
    """Working directory; the sandbox's if absent."""
    user: str | None
    """User; the sandbox's if absent."""
    port: int | None
    """The port it listens on: requests for it wait until it does."""
    restart: Restart
    """Whether it is restarted when it has ended."""
    start: bool
    """Whether it is started with every session."""


class SetGuard(TypedDict, total=False):
    """A change to a sandbox's guard. Absent fields stay as they are."""

    secrets: OnSecret | None
    junk: OnJunk | None
    large: Size | None
    globs: Sequence[str] | None
    """What is junk, as globs: `.cache`, `**/*.iso`; replaces all there were."""


class SetNetwork(TypedDict, total=False):
    """A change of what a sandbox may reach, at once."""

    network: Network | None


class SetSecret(TypedDict, total=False):
    """A value to be set."""

    value: Required[str]
    """The value: text of 6 bytes to 64 KiB, without NUL."""
    hosts: Sequence[str] | None
    """The hosts that may have it when it is brokered, like `api.example.com` and `*.example.com`; as before if absent."""
    places: Sequence[SecretPlace] | None
    """Where in a request its placeholder is replaced when it is brokered, besides headers; as before if absent, and nowhere else at first. What is in a body can be read back wherever the host shows what it was sent."""
    tags: Mapping[str, str] | None
    """Only sandboxes that have all of these tags may use it; as before if absent."""


class SetService(TypedDict, total=False):
    """A service to be declared, under the name in the path."""

    argv: Required[Sequence[str]]
    """Program and arguments."""
    env: Mapping[str, str]
    """Environment on top of the sandbox's."""
    cwd: str | None
    """Working directory; the sandbox's if absent."""
    user: str | None
    """User; the sandbox's if absent."""
    port: int | None
    """The port it listens on: requests for it wait until it does."""
    restart: Restart
    """Whether it is restarted when it has ended."""
    start: bool
    """Whether it is started with every session, and now if the sandbox runs."""

Signal: TypeAlias = Union[int, str]
"""A signal: its number, or its name with or without `SIG`."""


class SignalRequest(TypedDict, total=False):
    """A signal to send."""

    signal: Required[Signal]
    """Which."""

Size: TypeAlias = Union[int, str]
"""A size: bytes, or text like `512M`, `2G`. K, M, G and T are powers of 1024."""

Span: TypeAlias = Union[int, str]
"""A span of time: milliseconds, or text like `90s`, `15m`, `30d`."""

SpendingKind: TypeAlias = Literal["cpu", "time", "network", "cost"]
"""What a spending limit counts."""


class SpendingLimit(TypedDict, total=False):
    """What a run may use before somebody has to approve more. Meanwhile the run waits, and its sandbox stands still where its driver can do that."""

    what: Required[SpendingKind]
    """What is counted."""
    limit: Required[float]
    """How much of it, over 0."""
    step: float | None
    """How much more each approval allows; as much as `limit` if absent."""


class Start(TypedDict, total=False):
    """A start. The body may be empty."""

    expect_generation: int | None
    """Fail with 412 unless the sandbox is at this generation."""

StartRun = TypedDict(
    "StartRun",
    {
        "place": 'Required[RunPlace]',
        "command": 'RunCommand | None',
        "repository": 'str',
        "owner": 'str',
        "purpose": 'str',
        "class": 'str',
        "priority": 'int',
        "approve": 'Sequence[str]',
        "approve_hosts": 'bool',
        "known_hosts": 'Sequence[str]',
        "approve_secrets": 'Sequence[str]',
        "spending": 'Sequence[SpendingLimit]',
        "on_accept": 'AcceptRule | None',
        "keep": 'Span | None',
        "timeout": 'Span | None',
        "retries": 'int',
        "heartbeat": 'Span | None',
    },
    total=False,
)
"""A run to be started."""


class Stop(TypedDict, total=False):
    """A stop, with what was decided about what the guard finds. An empty body will do."""

    redact: bool
    """Mask the values of secrets in the files that hold them."""
    discard: bool
    """Give up all that the session wrote. Goes with none of the others."""
    promote: Sequence[str]
    """Large files and junk that are wanted, as globs."""
    drop: Sequence[str]
    """Files that do not enter the snapshot, as globs."""
    accept_doubtful: bool
    """Keep files that a failing disk put in doubt (`sync_failed`) as they can be read now."""


class TakeArtifacts(TypedDict, total=False):
    """Takes chosen files that a sandbox made or changed since it was forked."""

    only: Required[Sequence[str]]
    """Globs of the paths; `/` is everything."""


class TermSize(TypedDict, total=False):
    """The size of a terminal."""

    cols: Required[int]
    """Columns."""
    rows: Required[int]
    """Rows."""


class TextMatchExact(TypedDict, total=False):
    """Equal to this text."""

    exact: Required[str]
    """Equal to this text."""


class TextMatchPrefix(TypedDict, total=False):
    """With this prefix."""

    prefix: Required[str]
    """With this prefix."""


class TextMatchRegex(TypedDict, total=False):
    """Matching this regular expression."""

    regex: Required[str]
    """Matching this regular expression."""

UpdateSandbox = TypedDict(
    "UpdateSandbox",
    {
        "image": 'str | None',
        "driver": 'str | None',
        "class": 'Class | None',
        "persistent": 'bool | None',
        "owner": 'str | None',
        "purpose": 'str | None',
        "expires": 'Span | None',
        "tags": 'Mapping[str, str] | None',
        "env": 'Mapping[str, str] | None',
        "cwd": 'str | None',
        "user": 'str | None',
        "vcpus": 'float | None',
        "memory": 'Size | None',
        "pids": 'int | None',
        "disk": 'Size | None',
        "session_timeout": 'Span | None',
        "idle_timeout": 'Span | None',
        "on_idle": 'OnIdle | None',
        "hooks": 'Hooks | None',
        "snapshot_expires": 'Span | None',
        "keep_last": 'int | None',
        "exclude": 'Sequence[str] | None',
        "mounts": 'Mapping[str, Mount] | None',
        "network": 'Network | None',
        "secrets": 'Sequence[SecretUse] | None',
        "ports": 'Sequence[Port] | None',
        "wake_on_request": 'bool | None',
        "services": 'Sequence[Service] | None',
        "guard": 'SetGuard | None',
        "approvals": 'ApprovalPolicy | None',
    },
    total=False,
)
"""A change to a sandbox's settings. Absent fields stay as they are."""


class UpdateWebhook(TypedDict, total=False):
    """Changes of a webhook. What is absent stays as it is."""

    url: str | None
    """Where events are sent."""
    events: Sequence[str] | None
    """Which events."""
    allow_private: bool | None
    """Whether private addresses may be dialled; needs an admin key."""
    answers: bool | None
    """Whether the receiver may answer approvals. `true`, and another address of a webhook that may, need a key that may approve, and end all links that were sent before."""
    enabled: bool | None
    """Whether anything is sent. One that is enabled again continues where it was."""


RequestAction: TypeAlias = Union[Literal["allow"], Literal["deny"], RequestActionAnswer, RequestActionForward, RequestActionHeaders]
"""What is done with a request."""

RunPlace: TypeAlias = Union[RunPlaceExisting, RunPlaceFork, RunPlaceFresh]
"""The sandbox of a run: an existing one, a fork, or a fresh one."""

TextMatch: TypeAlias = Union[TextMatchExact, TextMatchPrefix, TextMatchRegex]
"""A condition on a text."""

