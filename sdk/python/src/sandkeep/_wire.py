"""What goes over the wire, without I/O: lines, server-sent events, WebSocket frames."""

from __future__ import annotations

import base64
import codecs
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from . import types
from ._errors import ProtocolError


class LineSplitter:
    """Whole lines of a stream of bytes. What comes after the last line end is kept back."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Lines that are whole by now, without their ends."""
        self._rest += data
        if b"\n" not in data:
            return
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        yield from lines


@dataclass
class ServerSentEvent:
    """One message."""

    id: str
    data: str


class EventSplitter:
    """Messages of a stream of server-sent events."""

    def __init__(self) -> None:
        self._lines = LineSplitter()
        self._id = ""
        self._data: list[str] = []

    def feed(self, data: bytes) -> Iterator[ServerSentEvent]:
        """Messages that are whole by now."""
        for raw in self._lines.feed(data):
            line = raw.rstrip(b"\r").decode(errors="replace")
            if not line:
                if self._data:
                    yield ServerSentEvent(self._id, "\n".join(self._data))
                self._data = []
                continue
            name, _, value = line.partition(":")
            value = value[1:] if value.startswith(" ") else value
            if name == "data":
                self._data.append(value)
            elif name == "id":
                self._id = value


def output_bytes(event: types.ExecEventStdout | types.ExecEventStderr) -> bytes:
    """The bytes of a line of output."""
    if event.encoding == "base64":
        try:
            return base64.b64decode(event.data, validate=True)
        except ValueError as error:
            raise ProtocolError("the output of the command is not valid base64") from error
    return event.data.encode()


@dataclass(frozen=True)
class Output:
    """Something a command printed."""

    stream: Literal["stdout", "stderr", "gap"]
    """Where it printed it. `gap` stands for bytes that the server did not keep."""
    data: bytes
    """The bytes."""
    text: str
    """The same as text. A character that comes in two pieces is in the second; what is not UTF-8 is replaced."""
    missing: int = 0
    """How many bytes are missing, for a `gap`."""


class OutputDecoder:
    """Makes `Output` of bytes, with characters that come in pieces put together."""

    def __init__(self) -> None:
        make = codecs.getincrementaldecoder("utf-8")
        self._decoders = {"stdout": make("replace"), "stderr": make("replace")}

    def output(self, stream: Literal["stdout", "stderr"], data: bytes) -> Output:
        """What was printed to `stream`."""
        return Output(stream, data, self._decoders[stream].decode(data))


# WebSockets, as RFC 6455 has them: a client's frames are masked, a server's are not.

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
LARGEST = 64 << 20


def websocket_key() -> str:
    """A random key for the upgrade."""
    return base64.b64encode(os.urandom(16)).decode()


def frame(kind: int, payload: bytes) -> bytes:
    """A whole message, as a client sends it."""
    length = len(payload)
    if length < 126:
        head = struct.pack("!BB", 0x80 | kind, 0x80 | length)
    elif length < 1 << 16:
        head = struct.pack("!BBH", 0x80 | kind, 0x80 | 126, length)
    else:
        head = struct.pack("!BBQ", 0x80 | kind, 0x80 | 127, length)
    mask = os.urandom(4)
    repeated = (mask * (length // 4 + 1))[:length]
    masked = (int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")).to_bytes(length, "big")
    return head + mask + masked


class FrameReader:
    """Messages of a server."""

    def __init__(self) -> None:
        self._rest = b""
        self._kind = 0
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Messages that are whole by now: their kinds and payloads."""
        self._rest += data
        while (found := self._frame()) is not None:
            final, kind, payload = found
            if kind >= CLOSE:
                yield kind, payload
                continue
            if kind:
                self._kind, self._parts = kind, []
            self._parts.append(payload)
            if sum(map(len, self._parts)) > LARGEST:
                raise ProtocolError("a WebSocket message is too large")
            if final:
                yield self._kind, b"".join(self._parts)
                self._parts = []

    def _frame(self) -> tuple[bool, int, bytes] | None:
        rest = self._rest
        if len(rest) < 2:
            return None
        length, at = rest[1] & 0x7F, 2
        if length == 126:
            if len(rest) < 4:
                return None
            (length,), at = struct.unpack("!H", rest[2:4]), 4
        elif length == 127:
            if len(rest) < 10:
                return None
            (length,), at = struct.unpack("!Q", rest[2:10]), 10
        if length > LARGEST:
            raise ProtocolError("a WebSocket frame is too large")
        if len(rest) < at + length:
            return None
        self._rest = rest[at + length :]
        return bool(rest[0] & 0x80), rest[0] & 0x0F, rest[at : at + length]
