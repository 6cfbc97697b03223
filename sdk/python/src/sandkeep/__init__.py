"""Sandkeep: named, durable, isolated machines for agents.

>>> from sandkeep import Sandbox
>>> Sandbox.get_or_create("my-app").run("pytest").stdout

`Sandkeep` is a server, `Sandbox` one of its sandboxes; `AsyncSandkeep` and `AsyncSandbox` are the same for asyncio.
docs/SDK.md tells how to do what.
"""

from . import _codes, inputs, types
from ._async.client import AsyncSandkeep
from ._async.sandbox import AsyncCommand, AsyncFiles, AsyncSandbox
from ._async.sockets import AsyncConnection, AsyncTerminal, AsyncWebSocket
from ._async.streams import AsyncBuildStream, AsyncEventStream, AsyncOutputStream, AsyncProgressStream
from ._codes import *  # noqa: F403
from ._common import Argv, Duration, Result, SandboxSettings
from ._errors import (
    ApiError,
    CommandFailed,
    ConfigurationError,
    ConnectionFailed,
    ProtocolError,
    RequestTimedOut,
    SandkeepError,
)
from ._sync.client import Sandkeep
from ._sync.sandbox import Command, Files, Sandbox
from ._sync.sockets import Connection, Terminal, WebSocket
from ._sync.streams import BuildStream, EventStream, OutputStream, ProgressStream
from ._wire import Output

__version__ = "0.1.0"

__all__ = [
    "ApiError",
    "Argv",
    "AsyncBuildStream",
    "AsyncCommand",
    "AsyncConnection",
    "AsyncEventStream",
    "AsyncFiles",
    "AsyncOutputStream",
    "AsyncProgressStream",
    "AsyncSandbox",
    "AsyncSandkeep",
    "AsyncTerminal",
    "AsyncWebSocket",
    "BuildStream",
    "Command",
    "CommandFailed",
    "ConfigurationError",
    "Connection",
    "ConnectionFailed",
    "Duration",
    "EventStream",
    "Files",
    "Output",
    "OutputStream",
    "ProgressStream",
    "ProtocolError",
    "RequestTimedOut",
    "Result",
    "Sandbox",
    "SandboxSettings",
    "Sandkeep",
    "SandkeepError",
    "Terminal",
    "WebSocket",
    "inputs",
    "types",
]
__all__ += _codes.__all__
