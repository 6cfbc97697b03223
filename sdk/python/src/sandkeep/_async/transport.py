"""Calls of the server: addresses, retries, connections that become sockets."""

from __future__ import annotations

import asyncio
import json as json_module
import socket
import time as clock
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar, Union

import httpx
from typing_extensions import TypeAlias

from .. import _config
from .._common import pause, query_pairs, target
from .._decode import decode
from .._errors import (
    ApiError,
    ConnectionFailed,
    ProtocolError,
    RequestTimedOut,
    SandkeepError,
    error_from_answer,
    may_retry,
)
from .._operations import OPERATIONS

T = TypeVar("T")
Content: TypeAlias = Union[bytes, Callable[[], AsyncIterator[bytes]]]
"""A body: bytes, or a function that begins to read it."""

# A connection on which nothing comes any more is noticed by the system, also where nothing needs to come for hours.
KEEP_ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
if hasattr(socket, "TCP_KEEPIDLE"):
    KEEP_ALIVE += [
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    ]


class AsyncTransport:
    """A server, and how it is called."""

    def __init__(
        self,
        url: str | None,
        key: str | None,
        project: str | None,
        timeout: float,
        retry_for: float,
    ) -> None:
        found = _config.find(url, key)
        self.url = found.url
        self.timeout = timeout
        self.retry_for = retry_for
        headers = {"User-Agent": "sandkeep-python"}
        if found.key:
            headers["Authorization"] = f"Bearer {found.key}"
        if project:
            headers["Sandkeep-Project"] = project
        uds = found.url.removeprefix("unix://") if found.url.startswith("unix://") else None
        transport = httpx.AsyncHTTPTransport(
            uds=uds,
            socket_options=None if uds else KEEP_ALIVE,
            limits=httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=10),
        )
        self._client = httpx.AsyncClient(
            base_url="http://localhost" if uds else found.url,
            headers=headers,
            transport=transport,
            trust_env=False,
            follow_redirects=False,
        )

    async def aclose(self) -> None:
        """Closes all connections."""
        await self._client.aclose()

    async def call(
        self,
        operation: str,
        kind: type[T],
        path: Mapping[str, object] | None = None,
        *,
        query: Mapping[str, Any] | None = None,
        json: Any = None,
        content: Content | None = None,
        repeatable: bool | None = None,
        timeout: float | None = None,
        retry: bool = True,
    ) -> T:
        """Calls an operation that answers with a JSON document."""
        answer = await self.send(
            operation,
            path,
            query=query,
            json=json,
            content=content,
            repeatable=repeatable,
            timeout=timeout,
            whole=True,
            retry=retry,
        )
        try:
            return decode(kind, answer.json())
        except ValueError as error:
            raise ProtocolError("the server's answer is not JSON") from error

    async def done(
        self,
        operation: str,
        path: Mapping[str, object] | None = None,
        *,
        query: Mapping[str, Any] | None = None,
        json: Any = None,
        content: Content | None = None,
        repeatable: bool | None = None,
    ) -> None:
        """Calls an operation that answers with nothing."""
        await self.send(
            operation, path, query=query, json=json, content=content, repeatable=repeatable, whole=True
        )

    async def read(
        self, operation: str, path: Mapping[str, object] | None = None, *, query: Mapping[str, Any] | None = None
    ) -> bytes:
        """Calls an operation that answers with bytes, and reads them all."""
        answer = await self.send(operation, path, query=query, whole=True)
        return answer.content

    async def send(
        self,
        operation: str,
        path: Mapping[str, object] | None = None,
        *,
        query: Mapping[str, Any] | None = None,
        json: Any = None,
        content: Content | None = None,
        headers: Mapping[str, str] | None = None,
        key: str | None = None,
        repeatable: bool | None = None,
        timeout: float | None = None,
        whole: bool = False,
        retry: bool = True,
    ) -> httpx.Response:
        """Calls an operation, again if need be. The answer is a success; with `whole` its body was read.

        A call is made again if the server says that nothing was done, and, if it is `repeatable`, also when the
        connection broke. Calls that take an idempotency key are repeatable: all attempts have the same key.
        """
        how = OPERATIONS[operation]
        sent = dict(headers or {})
        if how.keyed:
            sent["Idempotency-Key"] = key or uuid.uuid4().hex
        if repeatable is None:
            repeatable = how.keyed or how.method in ("GET", "PUT", "DELETE")
        if json is not None:
            sent["Content-Type"] = "application/json"
            content = json_module.dumps(json).encode()
        elif content is not None:
            sent.setdefault("Content-Type", "application/octet-stream")
        read = self.timeout if timeout is None else timeout
        limits = httpx.Timeout(read if read > 0 else None, connect=10.0, pool=60.0, write=120.0)
        give_up = clock.monotonic() + self.retry_for
        attempt, broke = 0, False
        while True:
            failed: SandkeepError
            again = False
            try:
                request = self._client.build_request(
                    how.method,
                    target(operation, path or {}),
                    params=query_pairs(query or {}),
                    headers=sent,
                    content=content() if callable(content) else content,
                    timeout=limits,
                )
                answer = await self._client.send(request, stream=True)
                try:
                    if whole or answer.status_code >= 400:
                        await answer.aread()
                except BaseException:
                    await answer.aclose()
                    raise
                if answer.status_code < 400:
                    return answer
                if broke and answer.status_code == 404 and how.method == "DELETE" and how.answer == "nothing":
                    # The attempt that broke has done it.
                    return answer
                failed = error_from_answer(
                    answer.status_code, answer.content, answer.headers.get("Retry-After")
                )
                again = may_retry(failed, repeatable)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failed, again = ConnectionFailed(f"cannot reach the server at {self.url}: {error}"), True
                failed.__cause__ = error
            except httpx.TimeoutException as error:
                failed = RequestTimedOut(f"the server at {self.url} did not answer in {read:g} s")
                failed.__cause__ = error
            except httpx.TransportError as error:
                failed = ConnectionFailed(f"the connection to {self.url} broke: {error or type(error).__name__}")
                failed.__cause__ = error
                again, broke = repeatable, True
            if not again or not retry or clock.monotonic() >= give_up:
                raise failed
            await asyncio.sleep(pause(attempt, failed))
            attempt += 1

    async def upgrade(
        self, operation: str, path: Mapping[str, object], query: Mapping[str, Any], headers: Mapping[str, str]
    ) -> httpx.Response:
        """Makes a connection a stream of bytes, which is in the answer's extensions."""
        answer = await self.send(
            operation, path, query=query, headers={"Connection": "Upgrade", **headers}, repeatable=False
        )
        if answer.status_code != 101 or "network_stream" not in answer.extensions:
            await answer.aclose()
            raise ProtocolError(f"the server answered {answer.status_code} where it should have switched protocols")
        return answer


def broken(error: Exception) -> bool:
    """Whether a stream that failed so may be gone on with on another connection."""
    if isinstance(error, ApiError):
        return error.status in (502, 503, 504) or error.code in ("shutting_down", "recovering", "rate_limited")
    return isinstance(error, (ConnectionFailed, httpx.TransportError))
