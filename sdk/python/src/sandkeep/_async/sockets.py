"""Connections that carry bytes both ways: terminals, and ports of a sandbox."""

from __future__ import annotations

import json
from typing import Any

import httpx

from .. import types
from .._decode import decode
from .._errors import ConnectionFailed, ProtocolError, error_from_body
from .._wire import BINARY, CLOSE, PING, PONG, TEXT, FrameReader, Output, OutputDecoder, frame, websocket_key
from .transport import AsyncTransport

PIECE = 64 << 10


class AsyncConnection:
    """A raw connection to a port inside a sandbox."""

    def __init__(self, answer: httpx.Response) -> None:
        self._answer = answer
        self._stream: Any = answer.extensions["network_stream"]

    @classmethod
    async def open(cls, transport: AsyncTransport, sandbox: str, port: int, if_running: bool) -> AsyncConnection:
        """Connects to a port."""
        path = {"name": sandbox, "port": port}
        query = {"if_running": if_running or None}
        return cls(await transport.upgrade("connect_port_raw", path, query, {"Upgrade": "tcp"}))

    async def __aenter__(self) -> AsyncConnection:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def read(self, timeout: float | None = None) -> bytes:
        """Reads what is there, at least a byte; empty at the end."""
        try:
            return bytes(await self._stream.read(PIECE, timeout=timeout))
        except OSError as error:
            raise ConnectionFailed(f"the connection to the port broke: {error}") from error
        except Exception as error:
            raise _told(error) from error

    async def write(self, data: bytes, timeout: float | None = 120.0) -> None:
        """Writes all of `data`."""
        try:
            await self._stream.write(data, timeout=timeout)
        except Exception as error:
            raise _told(error) from error

    async def aclose(self) -> None:
        """Closes the connection."""
        await self._stream.aclose()
        await self._answer.aclose()


class AsyncWebSocket:
    """A WebSocket of the server. Messages are text or bytes."""

    def __init__(self, answer: httpx.Response) -> None:
        self._answer = answer
        self._stream: Any = answer.extensions["network_stream"]
        self._reader = FrameReader()
        self._messages: list[tuple[int, bytes]] = []

    @classmethod
    async def open(
        cls, transport: AsyncTransport, operation: str, path: dict[str, object], if_running: bool
    ) -> AsyncWebSocket:
        """Opens one."""
        headers = {
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": websocket_key(),
        }
        return cls(await transport.upgrade(operation, path, {"if_running": if_running or None}, headers))

    async def send(self, message: str | bytes) -> None:
        """Sends a message."""
        kind, data = (TEXT, message.encode()) if isinstance(message, str) else (BINARY, message)
        await self._send(kind, data)

    async def receive(self, timeout: float | None = None) -> str | bytes | None:
        """Receives a message; None when the other side has closed."""
        while True:
            while self._messages:
                kind, data = self._messages.pop(0)
                if kind == TEXT:
                    return data.decode(errors="replace")
                if kind == BINARY:
                    return data
                if kind == PING:
                    await self._send(PONG, data)
                if kind == CLOSE:
                    await self._send(CLOSE, data[:2])
                    return None
            try:
                data = await self._stream.read(PIECE, timeout=timeout)
            except Exception as error:
                raise _told(error) from error
            if not data:
                raise ConnectionFailed("the connection was cut off")
            self._messages.extend(self._reader.feed(data))

    async def aclose(self) -> None:
        """Closes it."""
        try:
            await self._send(CLOSE, b"\x03\xe8")
        except ConnectionFailed:
            pass
        await self._stream.aclose()
        await self._answer.aclose()

    async def _send(self, kind: int, data: bytes) -> None:
        try:
            await self._stream.write(frame(kind, data), timeout=120.0)
        except Exception as error:
            raise _told(error) from error


class AsyncTerminal:
    """A command on a WebSocket: output, input, signals and window sizes. Leaving it ends the command."""

    def __init__(self, socket: AsyncWebSocket) -> None:
        self._socket = socket
        self._decoder = OutputDecoder()
        self.command: types.Command | None = None
        """The command: as it was started, and at the end, as it ended."""

    @classmethod
    async def open(
        cls, transport: AsyncTransport, sandbox: str, request: dict[str, Any], if_running: bool
    ) -> AsyncTerminal:
        """Starts a command."""
        socket = await AsyncWebSocket.open(transport, "exec_web_socket", {"name": sandbox}, if_running)
        await socket.send(json.dumps(request))
        return cls(socket)

    async def __aenter__(self) -> AsyncTerminal:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncTerminal:
        return self

    async def __anext__(self) -> Output:
        output = await self.receive()
        if output is None:
            raise StopAsyncIteration
        return output

    async def receive(self, timeout: float | None = None) -> Output | None:
        """What it prints next; None when it has ended, and `command` tells how."""
        while True:
            message = await self._socket.receive(timeout)
            if message is None:
                raise ConnectionFailed("the server hung up before the command ended")
            if isinstance(message, bytes):
                if message[:1] not in (b"\x01", b"\x02"):
                    raise ProtocolError("bytes on an unknown channel")
                return self._decoder.output("stdout" if message[0] == 1 else "stderr", message[1:])
            told = json.loads(message)
            if told["type"] == "started":
                self.command = decode(types.Command, told["command"])
            elif told["type"] == "gap":
                return Output("gap", b"", "", told["bytes"])
            elif told["type"] == "exited":
                self.command = decode(types.Command, told["command"])
                return None
            elif told["type"] == "error":
                raise error_from_body(200, told["error"])

    async def write(self, data: str | bytes) -> None:
        """Sends input."""
        await self._socket.send(b"\0" + (data.encode() if isinstance(data, str) else data))

    async def close_stdin(self) -> None:
        """Says that there is no more input."""
        await self._socket.send('{"type":"stdin_close"}')

    async def resize(self, cols: int, rows: int) -> None:
        """Gives the terminal another size."""
        await self._socket.send(json.dumps({"type": "resize", "cols": cols, "rows": rows}))

    async def signal(self, signal: str | int) -> None:
        """Sends a signal."""
        await self._socket.send(json.dumps({"type": "signal", "signal": signal}))

    async def aclose(self) -> None:
        """Leaves the command, which ends it if it runs."""
        await self._socket.aclose()


def _told(error: Exception) -> Exception:
    kind = type(error).__name__
    if kind in ("ReadTimeout", "WriteTimeout"):
        return TimeoutError("nothing came in time")
    return ConnectionFailed(f"the connection broke: {error or kind}")
