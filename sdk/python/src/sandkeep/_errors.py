"""Errors: what the server answered, or why it could not be reached or understood."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import types


class SandkeepError(Exception):
    """Any failure of this package."""


class ApiError(SandkeepError):
    """The server refused the call or failed. There is a class for each `code`, below one for each kind of status."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        hint: str | None = None,
        *,
        findings: Sequence[types.Finding] = (),
        conflicts: Sequence[types.MergeConflict] = (),
        retry_after: float | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.status = status
        """The HTTP status; 200 if it happened in the middle of a stream."""
        self.code = code
        """The stable code, for programs. docs/API.md lists them."""
        self.message = message
        """What is wrong, for people."""
        self.hint = hint
        """What to do about it, if the server knows."""
        self.findings = list(findings)
        """What the guard found, if that is why."""
        self.conflicts = list(conflicts)
        """Paths that cannot be merged, if that is why."""
        self.retry_after = retry_after
        """How many seconds to wait before a retry, if the server said so."""
        self.request_id = request_id
        """The id of the request, as in the server's log."""


class ConnectionFailed(SandkeepError):
    """No server answers, or the connection to it broke and did not come back in time."""


class RequestTimedOut(SandkeepError):
    """The server did not answer within the client's timeout. What was begun goes on."""


class ProtocolError(SandkeepError):
    """The answer is not one of a Sandkeep server, or of an incompatible one."""


class ConfigurationError(SandkeepError):
    """There is no server to talk to, or an address or a key is malformed."""


class CommandFailed(SandkeepError):
    """A command that was run with `check=True` did not succeed. `result` has what it printed."""

    def __init__(self, result: object, message: str) -> None:
        super().__init__(message)
        self.result = result


def error_from_body(status: int, body: object, retry_after: float | None = None) -> SandkeepError:
    """The error that the `error` of an answer describes."""
    from . import types
    from ._codes import BY_CODE, BY_STATUS, FORMER
    from ._decode import decode

    if not isinstance(body, dict) or not isinstance(body.get("code"), str):
        return ProtocolError(f"the server answered {status} without an error of Sandkeep")
    told = decode(types.ErrorBody, body)
    code = FORMER.get(told.code, told.code)
    kind = BY_CODE.get(code) or BY_STATUS.get(status, ApiError)
    return kind(
        status,
        code,
        told.message,
        told.hint,
        findings=told.findings,
        conflicts=told.conflicts,
        retry_after=retry_after,
        request_id=told.request_id,
    )


def error_from_answer(status: int, content: bytes, retry_after: str | None = None) -> SandkeepError:
    """The error of an answer. One in another format (a proxy's page) is quoted, and not believed."""
    seconds = float(retry_after) if retry_after and retry_after.isdigit() else None
    try:
        answer = json.loads(content)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
        return error_from_body(status, answer["error"], seconds)
    text = content.decode(errors="replace").strip()[:200]
    return ProtocolError(f"the server answered {status} and `{text}`")


# Answers that say that nothing was done: any call may be repeated.
UNDONE = frozenset(
    {
        "rate_limited",
        "too_many_connections",
        "too_many_concurrent_requests",
        "too_many_exports",
        "busy",
        "recovering",
        "index_rebuilding",
        "record_changed",
        "run_busy",
    }
)


def may_retry(error: SandkeepError, repeatable: bool) -> bool:
    """Whether the same call may succeed soon, and may be made again."""
    if isinstance(error, ApiError):
        return error.code in UNDONE or (repeatable and error.status in (502, 503, 504))
    if isinstance(error, ProtocolError):
        return repeatable and any(f"answered {status}" in str(error) for status in (502, 503, 504))
    return False
