# Made by sdk/generate.py. Do not edit. Its source is _async/streams.py.
"""Streams that go on where they were when the connection broke: output of commands, events, progress."""

from __future__ import annotations

import time
import json
import time as clock
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

import httpx

from .. import types
from .._common import Result, pause
from .._decode import decode
from .._errors import ConnectionFailed, ProtocolError, SandkeepError, error_from_body
from .._wire import EventSplitter, LineSplitter, Output, OutputDecoder, output_bytes
from .transport import Transport, broken

T = TypeVar("T")


class OutputStream:
    """What a command prints, as it prints it.

    If the connection breaks or the server restarts, it goes on at the byte where it was, for as long as the client's
    `retry_for`. Leaving it before its end (`with`) ends a command that it started.
    """

    def __init__(
        self,
        transport: Transport,
        sandbox: str,
        *,
        request: Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
        command: types.Command | str | None = None,
        follow: bool = True,
        offset: int = 0,
    ) -> None:
        self._transport = transport
        self._sandbox = sandbox
        self._request = request
        self._query = dict(query or {})
        self._follow = follow
        # All attempts to start the command have it, so the command is started once.
        self._key = uuid.uuid4().hex
        self._answer: httpx.Response | None = None
        self._lines: Iterator[bytes] | None = None
        self._decoder = OutputDecoder()
        self._over = False
        self._id = command.id if isinstance(command, types.Command) else command
        self.command: types.Command | None = command if isinstance(command, types.Command) else None
        """The command: as it was started, and once the stream is at its end, as it ended."""
        self.session: types.Session | None = None
        """The session it was started in."""
        self.resumed = False
        """Whether this call woke the sandbox."""
        self.offset = offset
        """How many bytes of output came before this point."""
        self.missing_bytes = 0
        """How many of them the server did not keep."""

    def __enter__(self) -> OutputStream:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> OutputStream:
        return self

    def start(self) -> OutputStream:
        """Starts the command, if that was not done yet."""
        while self._request is not None and self.command is None and not self._over:
            self._event()
        return self

    def __next__(self) -> Output:
        while not self._over:
            event = self._event()
            if isinstance(event, (types.ExecEventStdout, types.ExecEventStderr)):
                data = output_bytes(event)
                self.offset += len(data)
                return self._decoder.output(event.type, data)
            if isinstance(event, types.ExecEventGap):
                self.offset += event.bytes
                self.missing_bytes += event.bytes
                return Output("gap", b"", "", event.bytes)
        raise StopIteration

    def result(self) -> Result:
        """Reads to the end, and returns what was printed from here on."""
        stdout, stderr = bytearray(), bytearray()
        for output in self:
            (stdout if output.stream == "stdout" else stderr).extend(output.data)
        if self.command is None:
            raise ProtocolError("the output ended before the command did")
        return Result(self.command, bytes(stdout), bytes(stderr), self.missing_bytes, self.resumed)

    def close(self) -> None:
        """Leaves the stream. A command that it started and that runs gets SIGHUP, as from a terminal that is closed."""
        over, self._over = self._over, True
        if not over and self._request is not None and self._id is not None:
            # The server would wait for somebody who comes back. It still ends the command if this does not arrive.
            try:
                path = {"name": self._sandbox, "id": self._id}
                self._transport.done("signal_command", path, json={"signal": "HUP"})
            except SandkeepError:
                pass
        self._drop()

    def _drop(self) -> None:
        answer, self._answer, self._lines = self._answer, None, None
        if answer is not None:
            answer.close()

    def _open(self) -> None:
        path = {"name": self._sandbox}
        if self._id is None:
            self._answer = self._transport.send(
                "exec",
                path,
                query={**self._query, "keep_alive": True},
                json=self._request,
                key=self._key,
                timeout=0,
                retry=False,
            )
        else:
            query = {"follow": self._follow, "offset": self.offset, "keep_alive": True}
            self._answer = self._transport.send(
                "get_logs", {**path, "id": self._id}, query=query, timeout=45.0, retry=False
            )
        self._lines = _lines(self._answer)

    def _event(self) -> types.ExecEvent:
        """The next line. A connection that breaks is replaced."""
        give_up = clock.monotonic() + self._transport.retry_for
        attempt = 0
        while True:
            try:
                if self._lines is None:
                    self._open()
                return self._taken(self._line())
            except (SandkeepError, httpx.TransportError) as error:
                self._drop()
                if not broken(error) or clock.monotonic() >= give_up:
                    self._over = True
                    if isinstance(error, SandkeepError):
                        raise
                    raise ConnectionFailed(f"the connection to {self._transport.url} broke: {error}") from error
            except BaseException:
                self._drop()
                raise
            time.sleep(pause(attempt))
            attempt += 1

    def _line(self) -> bytes:
        assert self._lines is not None
        for line in self._lines:
            if line:
                return line
        raise ConnectionFailed("the stream was cut off")

    def _taken(self, line: bytes) -> types.ExecEvent:
        try:
            told = json.loads(line)
        except ValueError as error:
            raise ProtocolError("a line of the stream is not JSON") from error
        event: types.ExecEvent = decode(cast("type[types.ExecEvent]", types.ExecEvent), told)
        if isinstance(event, types.ExecEventStarted):
            self.command, self.session = event.command, event.session
            self._id, self.resumed = event.command.id, event.resumed
        elif isinstance(event, types.ExecEventExited):
            self.command = event.command
            self._over = True
        elif isinstance(event, types.ExecEventMore):
            self._over = True
        elif isinstance(event, types.ExecEventError):
            raise error_from_body(200, told["error"])
        return event


def _lines(answer: httpx.Response) -> Iterator[bytes]:
    splitter = LineSplitter()
    for data in answer.iter_bytes():
        for line in splitter.feed(data):
            yield line


class EventStream(Generic[T]):
    """Messages of a stream of events. If the connection breaks, it goes on after the last message that came."""

    def __init__(
        self, transport: Transport, operation: str, kind: type[T], query: Mapping[str, Any], follow: bool
    ) -> None:
        self._transport = transport
        self._operation = operation
        self._kind = kind
        self._query = dict(query)
        self._follow = follow
        self._messages: Iterator[T] | None = None
        self._answer: httpx.Response | None = None
        self._over = False
        self._opened = False
        self.cursor: str | None = None
        """The id of the last message. A later stream with this `cursor` goes on after it."""

    def __enter__(self) -> EventStream[T]:
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> EventStream[T]:
        return self

    def __next__(self) -> T:
        give_up = clock.monotonic() + self._transport.retry_for
        attempt = 0
        while not self._over:
            try:
                if self._messages is None:
                    self._open()
                    give_up = clock.monotonic() + self._transport.retry_for
                assert self._messages is not None
                for message in self._messages:
                    return message
                self._drop()
                if not self._follow:
                    self._over = True
                    break
            except (SandkeepError, httpx.TransportError) as error:
                self._drop()
                if not broken(error) or clock.monotonic() >= give_up:
                    self._over = True
                    if isinstance(error, SandkeepError):
                        raise
                    raise ConnectionFailed(f"the connection to {self._transport.url} broke: {error}") from error
            time.sleep(pause(attempt))
            attempt += 1
        raise StopIteration

    def close(self) -> None:
        """Ends the stream."""
        self._over = True
        self._drop()

    def _drop(self) -> None:
        answer, self._answer, self._messages = self._answer, None, None
        if answer is not None:
            answer.close()

    def _open(self) -> None:
        query = dict(self._query)
        headers = {"Accept": "text/event-stream"}
        if self.cursor is not None:
            headers["Last-Event-ID"] = self.cursor
            query.pop("since", None)
            query.pop("cursor", None)
        # A quiet stream says every fifteen seconds that it is alive.
        self._answer = self._transport.send(
            self._operation, query=query, headers=headers, timeout=45.0
        )
        self._messages = self._read(self._answer)

    def _read(self, answer: httpx.Response) -> Iterator[T]:
        splitter = EventSplitter()
        for data in answer.iter_bytes():
            for message in splitter.feed(data):
                value = json.loads(message.data)
                kind = value.get("kind", "")
                if kind == "stream.closing":
                    continue
                if message.id:
                    self.cursor = message.id
                if kind == "stream.opened":
                    continue
                yield decode(self._kind, value)


class ProgressStream:
    """Progress of work on an image; its end is the image."""

    def __init__(self, answer: httpx.Response) -> None:
        self._answer = answer
        self.image: types.Image | None = None
        """The image, once the work is done."""

    def __iter__(self) -> Iterator[types.ImageProgressProgress]:
        try:
            for line in _lines(self._answer):
                told = json.loads(line)
                if told.get("type") == "progress":
                    yield decode(types.ImageProgressProgress, told)
                elif told.get("type") == "done":
                    self.image = decode(types.Image, told["image"])
                elif told.get("type") == "error":
                    raise error_from_body(200, told["error"])
        except httpx.TransportError as error:
            raise ConnectionFailed(f"the connection broke; the server ends the work: {error}") from error
        finally:
            self._answer.close()

    def done(self) -> types.Image:
        """Waits for the end of the work."""
        for _ in self:
            pass
        if self.image is None:
            raise ConnectionFailed("the stream was cut off before the image was done")
        return self.image


class BuildStream:
    """Steps of a build, their output and progress; its end is the image. Closing it ends the build."""

    _KINDS = {
        "step": types.BuildProgressStep,
        "output": types.BuildProgressOutput,
        "progress": types.BuildProgressProgress,
        "warning": types.BuildProgressWarning,
    }

    def __init__(self, answer: httpx.Response) -> None:
        self._answer = answer
        self.image: types.Image | None = None
        """The image, once the work is done."""

    def __iter__(
        self,
    ) -> Iterator[
        types.BuildProgressStep
        | types.BuildProgressOutput
        | types.BuildProgressProgress
        | types.BuildProgressWarning
    ]:
        try:
            for line in _lines(self._answer):
                told = json.loads(line)
                if kind := self._KINDS.get(told.get("type")):
                    yield decode(kind, told)
                elif told.get("type") == "done":
                    self.image = decode(types.Image, told["image"])
                elif told.get("type") == "error":
                    raise error_from_body(200, told["error"])
        except httpx.TransportError as error:
            raise ConnectionFailed(f"the connection broke; build again to go on: {error}") from error
        finally:
            self._answer.close()

    def done(self) -> types.Image:
        """Waits for the end of the build."""
        for _ in self:
            pass
        if self.image is None:
            raise ConnectionFailed("the stream was cut off before the image was done")
        return self.image


def pages(
    transport: Transport,
    operation: str,
    kind: type[T],
    path: Mapping[str, object] | None = None,
    query: Mapping[str, Any] | None = None,
) -> Iterator[T]:
    """All items of a list, page by page."""
    query = dict(query or {})
    while True:
        page = transport.call(operation, types.Page[kind], path, query=query)  # type: ignore[valid-type]
        for item in page.items:
            yield item
        if not page.next:
            return
        query["cursor"] = page.next
