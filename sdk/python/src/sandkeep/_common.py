"""What the synchronous and the asynchronous client share."""

from __future__ import annotations

import io
import os
import random
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Union
from urllib.parse import quote

from typing_extensions import TypeAlias, TypedDict

from . import inputs, types
from ._errors import CommandFailed, ProtocolError, SandkeepError
from ._operations import OPERATIONS

Argv: TypeAlias = Union[str, Sequence[str]]
"""A command: a line for `/bin/sh`, or a program and its arguments."""

Duration: TypeAlias = Union[float, str]
"""A duration: seconds, or text like `15m`."""

# How long the text a command is given may be in the request itself; more goes by another way.
SMALL_INPUT = 256 << 10


class SandboxSettings(TypedDict, total=False):
    """Settings of a sandbox. docs/CLI.md (`keep create`) explains them; what is absent has its default."""

    image: str | None
    driver: str | None
    class_: inputs.Class | None
    persistent: bool | None
    owner: str | None
    purpose: str | None
    expires: inputs.Span | None
    tags: Mapping[str, str] | None
    env: Mapping[str, str] | None
    cwd: str | None
    user: str | None
    vcpus: float | None
    memory: inputs.Size | None
    pids: int | None
    disk: inputs.Size | None
    session_timeout: inputs.Span | None
    idle_timeout: inputs.Span | None
    on_idle: inputs.OnIdle | None
    hooks: inputs.Hooks | None
    snapshot_expires: inputs.Span | None
    keep_last: int | None
    exclude: Sequence[str] | None
    mounts: Mapping[str, inputs.Mount] | None
    network: inputs.Network | None
    secrets: Sequence[inputs.SecretUse] | None
    ports: Sequence[inputs.Port] | None
    wake_on_request: bool | None
    services: Sequence[inputs.Service] | None
    guard: inputs.SetGuard | None
    approvals: inputs.ApprovalPolicy | None


def settings_body(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as the server wants them: what has a Python keyword for a name ends in an underscore here."""
    return {name.rstrip("_"): value for name, value in settings.items()}


def given(**values: Any) -> dict[str, Any]:
    """The values that are not None."""
    return {name.rstrip("_"): value for name, value in values.items() if value is not None}


def argv_of(command: Argv) -> list[str]:
    """The program and arguments of a command."""
    return ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)


def span(duration: Duration | None) -> int | str | None:
    """A duration as the server wants it: milliseconds, or text."""
    if duration is None or isinstance(duration, str):
        return duration
    return max(1, round(duration * 1000))


def target(operation: str, path: Mapping[str, object]) -> str:
    """The path of an operation."""
    text = OPERATIONS[operation].path
    for name, value in path.items():
        text = text.replace("{" + name + "}", quote(str(value), safe=""))
    return text


def query_pairs(query: Mapping[str, Any]) -> list[tuple[str, str | int | float | bool | None]]:
    """A query's parameters; None is left out, lists are repeated."""
    pairs: list[tuple[str, str | int | float | bool | None]] = []
    for name, value in query.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        for one in values:
            if one is True or one is False:
                pairs.append((name, "true" if one else "false"))
            elif one is not None:
                pairs.append((name, str(one)))
    return pairs


def tag_pairs(tags: Mapping[str, str] | None) -> list[str]:
    """Tags as a query has them."""
    return [f"{name}={value}" for name, value in (tags or {}).items()]


def pause(attempt: int, error: SandkeepError | None = None) -> float:
    """How long to wait before the next attempt."""
    told = getattr(error, "retry_after", None)
    backoff = min(2.0, 0.05 * float(2**attempt)) * (0.75 + random.random() / 2)
    return max(float(told), backoff) if told else backoff


@dataclass(frozen=True)
class Result:
    """A command that has ended, and what it printed."""

    command: types.Command
    """The command's record."""
    stdout_bytes: bytes
    """Standard output, or that of the terminal."""
    stderr_bytes: bytes
    """Standard error."""
    missing_bytes: int = 0
    """Bytes that it printed and that the server did not keep, because its log is bounded."""
    resumed: bool = False
    """Whether this call woke the sandbox."""

    @property
    def stdout(self) -> str:
        """Standard output as text; what is not UTF-8 is replaced."""
        return self.stdout_bytes.decode(errors="replace")

    @property
    def stderr(self) -> str:
        """Standard error as text; what is not UTF-8 is replaced."""
        return self.stderr_bytes.decode(errors="replace")

    @property
    def exit_code(self) -> int | None:
        """The exit code; 128 + signal when a signal ended it, None if its session ended under it."""
        return self.command.exit_code

    @property
    def end(self) -> types.CommandEnd | None:
        """Why it ended."""
        return self.command.end

    @property
    def ok(self) -> bool:
        """Whether it exited with 0."""
        return self.exit_code == 0

    def check(self) -> Result:
        """Returns itself, and raises `CommandFailed` if the command did not succeed."""
        if self.ok:
            return self
        line = " ".join(self.command.argv)
        last = (self.stderr or self.stdout).strip().splitlines()[-1:]
        how = f"exit code {self.exit_code}" if self.end == "exited" else f"{self.end}"
        raise CommandFailed(self, f"`{line:.100}`: {how}" + (f": {last[0]:.200}" if last else ""))


def packed(directory: str | os.PathLike[str]) -> IO[bytes]:
    """A directory's contents as a tar, in a temporary file."""
    root = Path(directory)
    if not root.is_dir():
        raise NotADirectoryError(f"`{root}` is not a directory")

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        # Who owns a file here means nothing inside; sockets and devices stay here.
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry if entry.isfile() or entry.isdir() or entry.issym() or entry.islnk() else None

    spool = tempfile.SpooledTemporaryFile(max_size=8 << 20)  # noqa: SIM115 (the caller closes it)
    with tarfile.open(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in sorted(root.iterdir()):
            tar.add(entry, arcname=entry.name, filter=plain)
    spool.seek(0)
    return spool


def unpack(archive: IO[bytes], directory: str | os.PathLike[str]) -> None:
    """Unpacks a tar of one directory, without its name. Nothing is written outside of `directory`."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    root = Path(directory).resolve()

    def below(name: str) -> str:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise ProtocolError(f"the archive has the path `{name}`")
        return "/".join(parts[1:])

    def place(inner: str) -> Path:
        """The place of a path, whose parents are directories and no links."""
        at = root / inner
        at.parent.mkdir(parents=True, exist_ok=True)
        if at.parent.resolve() != at.parent:
            raise ProtocolError(f"`{inner}` leads through a symlink")
        return at

    # Python's own filters for this are not in all versions that are in use.
    with tarfile.open(fileobj=archive, mode="r|") as tar:
        for entry in tar:
            inner = below(entry.name)
            if inner:
                _unpack_entry(tar, entry, root, place(inner), place, below)


def _unpack_entry(
    tar: tarfile.TarFile,
    entry: tarfile.TarInfo,
    root: Path,
    at: Path,
    place: Callable[[str], Path],
    below: Callable[[str], str],
) -> None:
    if entry.isdir():
        if at.is_symlink() or not at.is_dir():
            at.unlink(missing_ok=True)
            at.mkdir()
        at.chmod((entry.mode & 0o777) | 0o700)
        return
    if at.is_dir() and not at.is_symlink():
        shutil.rmtree(at)
    at.unlink(missing_ok=True)
    if entry.issym():
        target = os.path.normpath(at.parent / entry.linkname)
        if os.path.isabs(entry.linkname) or not Path(target).is_relative_to(root):
            raise ProtocolError(f"the symlink `{entry.name}` leads outside: `{entry.linkname}`")
        at.symlink_to(entry.linkname)
    elif entry.islnk():
        target_at = place(below(entry.linkname))
        if target_at.is_symlink():
            raise ProtocolError(f"`{entry.name}` links to a symlink")
        os.link(target_at, at)
    elif (source := tar.extractfile(entry)) is not None:
        # Setuid bits mean nothing here; devices and pipes have no content and are left out.
        with open(os.open(at, os.O_WRONLY | os.O_CREAT | os.O_EXCL, entry.mode & 0o777), "wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
        os.utime(at, (entry.mtime, entry.mtime))


def content_of(data: str | bytes | IO[bytes]) -> bytes | IO[bytes]:
    """Bytes, or a file of them."""
    return data.encode() if isinstance(data, str) else data


def file_like(data: bytes | IO[bytes]) -> IO[bytes]:
    """A file of bytes."""
    return io.BytesIO(data) if isinstance(data, bytes) else data
