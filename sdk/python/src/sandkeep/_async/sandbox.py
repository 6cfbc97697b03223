"""A sandbox, and what it has: files, commands, ports, services."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, TypeVar

import httpx
from typing_extensions import Unpack

from .. import inputs, types
from .._common import (
    SMALL_INPUT,
    Argv,
    Duration,
    Result,
    SandboxSettings,
    argv_of,
    content_of,
    file_like,
    given,
    packed,
    settings_body,
    span,
    unpack,
)
from .._errors import ApiError, ConnectionFailed, SandkeepError
from .._wire import Output
from .sockets import AsyncConnection, AsyncTerminal, AsyncWebSocket
from .streams import AsyncEventStream, AsyncOutputStream, pages
from .transport import AsyncTransport

if TYPE_CHECKING:
    from .client import AsyncSandkeep

T = TypeVar("T")
PIECE = 1 << 20


async def save(answer: httpx.Response, to: str | os.PathLike[str]) -> None:
    """Writes a download to a file, which is in place when it is complete."""
    whole = os.fspath(to)
    partial = f"{whole}.partial"
    try:
        with open(partial, "wb") as file:
            async for piece in answer.aiter_bytes(PIECE):
                file.write(piece)
        os.replace(partial, whole)
    except httpx.TransportError as error:
        raise ConnectionFailed(f"the download broke off: {error}") from error
    finally:
        if os.path.exists(partial):
            os.unlink(partial)
        await answer.aclose()


class AsyncSandbox:
    """A sandbox. It is a name: making this object calls nothing, and the sandbox wakes when a call needs it."""

    def __init__(self, client: AsyncSandkeep, name: str, info: types.Sandbox | None = None) -> None:
        self.client = client
        """The client that calls for it."""
        self.name = name
        """Its name."""
        self.info = info
        """The sandbox as the server described it last. `refresh` asks again."""
        self.files = AsyncFiles(client.transport, name)
        """Its files."""
        self.ports = AsyncPorts(client.transport, name)
        """Its ports."""
        self.services = AsyncServices(client.transport, name)
        """Its services."""

    def __repr__(self) -> str:
        return f"AsyncSandbox({self.name!r})"

    @classmethod
    async def get_or_create(
        cls, name: str, *, client: AsyncSandkeep | None = None, **settings: Unpack[SandboxSettings]
    ) -> AsyncSandbox:
        """The sandbox of that name. It is created, with these settings, if there is none."""
        from .client import default_client

        return await (client or default_client()).get_or_create(name, **settings)

    @classmethod
    async def create(
        cls, name: str | None = None, *, client: AsyncSandkeep | None = None, **settings: Unpack[SandboxSettings]
    ) -> AsyncSandbox:
        """A new sandbox. Without a name it gets one."""
        from .client import default_client

        return await (client or default_client()).create(name, **settings)

    @classmethod
    async def get(cls, name: str, *, client: AsyncSandkeep | None = None) -> AsyncSandbox:
        """The sandbox of that name. Never wakes it."""
        from .client import default_client

        return await (client or default_client()).get(name)

    # Commands

    async def run(
        self,
        command: Argv,
        *,
        input: str | bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout: Duration | None = None,
        inject: Sequence[inputs.Inject] = (),
        if_running: bool = False,
        check: bool = False,
        on_stdout: Callable[[str], object] | None = None,
        on_stderr: Callable[[str], object] | None = None,
    ) -> Result:
        """Runs a command to its end. A text is a line for `/bin/sh`; a list is a program and its arguments.

        After `timeout` the server ends it. `on_stdout` and `on_stderr` get the text as it comes. With `check` a command
        that fails raises `CommandFailed`.
        """
        request = self._request(command, env, cwd, user, timeout, inject, None)
        data = input.encode() if isinstance(input, str) else input
        if data is not None and len(data) > SMALL_INPUT:
            result = await self._run_with_large_input(request, data, if_running, on_stdout, on_stderr)
        else:
            if data is not None:
                request.update(_input(data))
            async with self._stream(request, if_running) as stream:
                result = await _heard(stream, on_stdout, on_stderr)
        return result.check() if check else result

    def stream(
        self,
        command: Argv,
        *,
        input: str | bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout: Duration | None = None,
        tty: tuple[int, int] | None = None,
        inject: Sequence[inputs.Inject] = (),
        if_running: bool = False,
    ) -> AsyncOutputStream:
        """Runs a command and gives its output as it comes: use it with `async with`, and iterate."""
        request = self._request(command, env, cwd, user, timeout, inject, tty)
        if input is not None:
            request.update(_input(input.encode() if isinstance(input, str) else input))
        return self._stream(request, if_running)

    async def start(
        self,
        command: Argv,
        *,
        stdin: bool = False,
        input: str | bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout: Duration | None = None,
        tty: tuple[int, int] | None = None,
        inject: Sequence[inputs.Inject] = (),
        if_running: bool = False,
    ) -> AsyncCommand:
        """Starts a command that goes on by itself, also when this program ends."""
        request = self._request(command, env, cwd, user, timeout, inject, tty)
        request["detach"] = True
        if stdin:
            request["stdin"] = True
        if input is not None:
            request.update(_input(input.encode() if isinstance(input, str) else input))
        query = {"if_running": if_running or None}
        transport = self.client.transport
        started = await transport.call("exec", types.Command, {"name": self.name}, query=query, json=request)
        return AsyncCommand(transport, self.name, started)

    async def terminal(
        self,
        command: Argv,
        *,
        cols: int = 80,
        rows: int = 24,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        timeout: Duration | None = None,
        if_running: bool = False,
    ) -> AsyncTerminal:
        """Runs a command in a terminal, to read from and write to while it runs."""
        request = self._request(command, env, cwd, user, timeout, (), (cols, rows))
        request["stdin"] = True
        return await AsyncTerminal.open(self.client.transport, self.name, request, if_running)

    def command(self, id: str) -> AsyncCommand:
        """A command that was started before."""
        return AsyncCommand(self.client.transport, self.name, id)

    def commands(self, *, running: bool = False, limit: int | None = None) -> AsyncIterator[types.Command]:
        """Its commands, newest first, or only those that run. Never wakes it."""
        query = {"limit": limit, "running": running or None}
        return self._pages("list_commands", types.Command, query)

    def _request(
        self,
        command: Argv,
        env: Mapping[str, str] | None,
        cwd: str | None,
        user: str | None,
        timeout: Duration | None,
        inject: Sequence[inputs.Inject],
        tty: tuple[int, int] | None,
    ) -> dict[str, Any]:
        return given(
            argv=argv_of(command),
            env=dict(env) if env else None,
            cwd=cwd,
            user=user,
            timeout=span(timeout),
            inject=list(inject) or None,
            tty={"cols": tty[0], "rows": tty[1]} if tty else None,
        )

    def _stream(self, request: dict[str, Any], if_running: bool) -> AsyncOutputStream:
        query = {"if_running": if_running or None}
        return AsyncOutputStream(self.client.transport, self.name, request=request, query=query)

    async def _run_with_large_input(
        self,
        request: dict[str, Any],
        data: bytes,
        if_running: bool,
        on_stdout: Callable[[str], object] | None,
        on_stderr: Callable[[str], object] | None,
    ) -> Result:
        # Started on its own, so that what it prints goes to its log meanwhile: nobody waits for the other.
        transport, path = self.client.transport, {"name": self.name}
        request = {**request, "detach": True, "stdin": True}
        query = {"if_running": if_running or None}
        started = await transport.call("exec", types.Command, path, query=query, json=request)
        command = AsyncCommand(transport, self.name, started)
        try:
            try:
                await command.write(data, close=True)
            except ApiError as error:
                if error.code not in ("command_ended", "stdin_closed"):
                    raise
            async with command.logs() as stream:
                return await _heard(stream, on_stdout, on_stderr)
        except BaseException:
            try:
                await command.signal("KILL")
            except SandkeepError:
                pass
            raise

    # State

    async def refresh(self) -> types.Sandbox:
        """Asks the server for its description. Never wakes it."""
        self.info = await self._call("get_sandbox", types.Sandbox)
        return self.info

    async def update(self, **settings: Unpack[SandboxSettings]) -> types.Sandbox:
        """Changes settings: what is absent stays, None removes a value."""
        self.info = await self._call("update_sandbox", types.Sandbox, json=settings_body(settings))
        return self.info

    async def ensure_running(self, *, expect_generation: int | None = None) -> types.Opened:
        """Starts or resumes it, unless it runs."""
        body = given(expect_generation=expect_generation)
        opened = await self._call("start_sandbox", types.Opened, json=body, repeatable=True)
        self.info = opened.sandbox
        return opened

    async def stop(self, **decision: Unpack[inputs.Stop]) -> types.Stopped:
        """Stops it and keeps its files. `decision` is for what the guard found."""
        stopped = await self._call("stop_sandbox", types.Stopped, json=dict(decision))
        self.info = stopped.sandbox
        return stopped

    async def pause(self, *, expect_generation: int | None = None) -> types.Paused:
        """Keeps its files, memory and processes, and takes it off the CPU. For drivers that keep memory."""
        body = given(expect_generation=expect_generation)
        paused = await self._call("pause_sandbox", types.Paused, json=body)
        self.info = paused.sandbox
        return paused

    async def delete(
        self, *, keep_snapshots: bool = False, force: bool = False, unused_since: str | None = None
    ) -> types.Deleted:
        """Deletes it. It stays in the trash for a while."""
        query = {"keep_snapshots": keep_snapshots or None, "force": force or None, "unused_since": unused_since}
        return await self._call("delete_sandbox", types.Deleted, query=query)

    async def rename(self, name: str) -> types.Sandbox:
        """Gives it another name."""
        info = await self._call("rename_sandbox", types.Sandbox, json={"name": name})
        self.__init__(self.client, info.name, info)  # type: ignore[misc]
        return info

    async def extend(self, by: Duration) -> types.Session:
        """Moves the end of its session."""
        return await self._call("extend_session", types.Session, json={"by": span(by)})

    async def why(self) -> types.Why:
        """Why it runs, sleeps or failed."""
        return await self._call("why_sandbox", types.Why)

    async def stats(self) -> types.SandboxStats:
        """What it uses at this moment. Never wakes it: asleep, it has no `usage`."""
        return await self._call("get_stats", types.SandboxStats)

    async def tree(self) -> types.Tree:
        """Where it comes from and what became of it: sandboxes, snapshots, forks."""
        return await self._call("get_tree", types.Tree)

    def sessions(self, *, limit: int | None = None) -> AsyncIterator[types.Session]:
        """Its sessions, newest first."""
        return self._pages("list_sessions", types.Session, {"limit": limit})

    def events(
        self,
        *,
        kinds: Sequence[str] = (),
        cursor: str | None = None,
        since: str | None = None,
        follow: bool = True,
    ) -> AsyncEventStream[types.Event]:
        """What happens to it. Never wakes it."""
        return self.client.events(sandbox=self.name, kinds=kinds, cursor=cursor, since=since, follow=follow)

    # Snapshots and forks

    async def checkpoint(self, label: str | None = None) -> types.Snapshot:
        """Takes a snapshot without stopping it."""
        return await self._call("checkpoint_sandbox", types.Snapshot, json=given(label=label))

    async def rollback(self, to: str, *, expect_generation: int | None = None) -> types.RolledBack:
        """Goes back to a snapshot: an id, or the label of one. What was before is kept as a snapshot."""
        if not to.startswith("snp-"):
            # The newest one of that label. If there is none, the server says what an id looks like.
            async for one in self.snapshots():
                if one.label == to:
                    to = one.id
                    break
        body = given(to=to, expect_generation=expect_generation)
        back = await self._call("rollback_sandbox", types.RolledBack, json=body)
        self.info = back.sandbox
        return back

    def snapshots(self, *, limit: int | None = None) -> AsyncIterator[types.Snapshot]:
        """Its snapshots, newest first."""
        return self._pages("list_sandbox_snapshots", types.Snapshot, {"limit": limit})

    async def fork(
        self,
        name: str | None = None,
        *,
        from_snapshot: str | None = None,
        expect_generation: int | None = None,
        start: bool | None = None,
        on_accept: inputs.OnAccept | None = None,
        **settings: Unpack[SandboxSettings],
    ) -> AsyncSandbox:
        """A new sandbox that begins with this one's state."""
        body = given(
            name=name,
            from_=from_snapshot,
            expect_generation=expect_generation,
            start=start,
            on_accept=on_accept,
        )
        opened = await self._call("fork_sandbox", types.Opened, json={**body, **settings_body(settings)})
        return AsyncSandbox(self.client, opened.sandbox.name, opened.sandbox)

    async def fork_many(
        self,
        count: int,
        name: str | None = None,
        *,
        from_snapshot: str | None = None,
        expect_generation: int | None = None,
        start: bool | None = None,
        on_accept: inputs.OnAccept | None = None,
        **settings: Unpack[SandboxSettings],
    ) -> list[AsyncSandbox]:
        """Several forks of one state: `name-1`, `name-2`, and so on. Raises if one of them could not be made."""
        body = given(
            name=name,
            count=count,
            from_=from_snapshot,
            expect_generation=expect_generation,
            start=start,
            on_accept=on_accept,
        )
        forks = await self._call("fork_sandbox", types.Forks, json={**body, **settings_body(settings)})
        if forks.failed:
            first = forks.failed[0]
            made = ", ".join(one.sandbox.name for one in forks.made) or "none"
            hint = f"made were: {made}"
            raise ApiError(200, first.code, f"{len(forks.failed)} of {count} forks failed: {first.reason}", hint)
        return [AsyncSandbox(self.client, one.sandbox.name, one.sandbox) for one in forks.made]

    def forks(self) -> AsyncIterator[types.Sandbox]:
        """Its forks."""
        return pages(self.client.transport, "list_forks", types.Sandbox, query={"of": self.name})

    async def diff(
        self, to: str | AsyncSandbox, *, paths: Sequence[str] = (), limit: int | None = None
    ) -> types.Diff:
        """What another sandbox, snapshot or label has that this one has not, and the other way round."""
        other = to.name if isinstance(to, AsyncSandbox) else to
        return await self.client.diff(self.name, other, paths=paths, limit=limit)

    async def promote(
        self,
        *,
        expect_generation: int | None = None,
        delete_fork: bool = False,
        delete_group: bool = False,
    ) -> types.Promoted:
        """Gives the origin of this fork its state."""
        body = given(
            expect_generation=expect_generation,
            delete_fork=delete_fork or None,
            delete_group=delete_group or None,
        )
        return await self._call("promote_sandbox", types.Promoted, json=body)

    async def artifacts(self, only: Sequence[str], to: str | os.PathLike[str]) -> None:
        """Writes chosen files that it made or changed since it was forked to a tar on this machine, with links, owners and modes.
        The tar is in place when it is complete."""
        answer = await self.client.transport.send("take_artifacts", {"name": self.name}, json={"only": list(only)})
        await save(answer, to)

    async def merge(
        self,
        into: str | None = None,
        *,
        dry_run: bool = False,
        conflicts: inputs.OnConflict | None = None,
        only: Sequence[str] = (),
        expect_generation: int | None = None,
    ) -> types.Merged:
        """Brings its changes into its origin, or into another sandbox."""
        body = given(
            into=into,
            dry_run=dry_run or None,
            conflicts=conflicts,
            only=list(only) or None,
            expect_generation=expect_generation,
        )
        return await self._call("merge_sandbox", types.Merged, json=body)

    # Network and approvals

    async def network(self) -> types.SandboxNetwork:
        """What it may reach."""
        return await self._call("get_network", types.SandboxNetwork)

    async def set_network(self, network: inputs.Network | None) -> types.SandboxNetwork:
        """Changes what it may reach, at once. None means the project's default."""
        return await self._call("set_network", types.SandboxNetwork, json={"network": network})

    def connections(
        self,
        *,
        verdict: str | None = None,
        session: str | None = None,
        host: str | None = None,
        since: str | None = None,
        open: bool | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[types.Connection]:
        """Connections it made or tried to make, newest first."""
        query = given(verdict=verdict, session=session, host=host, since=since, open=open, limit=limit)
        return self._pages("list_connections", types.Connection, query)

    async def connections_summary(
        self,
        *,
        verdict: str | None = None,
        session: str | None = None,
        host: str | None = None,
        since: str | None = None,
        open: bool | None = None,
    ) -> types.NetworkSummary:
        """The same, summed by destination."""
        query = given(verdict=verdict, session=session, host=host, since=since, open=open)
        return await self._call("summarize_connections", types.NetworkSummary, query=query)

    async def ask(
        self,
        question: str,
        *,
        context: str | None = None,
        expires: Duration | None = None,
        default: inputs.ApprovalAnswer | None = None,
    ) -> types.Approval:
        """Asks somebody who may approve. `client.approvals.wait` waits for the answer."""
        body = given(question=question, context=context, expires=span(expires), default=default)
        return await self._call("ask_approval", types.Approval, json=body)

    async def _call(self, operation: str, kind: type[T], **how: Any) -> T:
        return await self.client.transport.call(operation, kind, {"name": self.name}, **how)

    def _pages(self, operation: str, kind: type[T], query: Mapping[str, Any]) -> AsyncIterator[T]:
        return pages(self.client.transport, operation, kind, {"name": self.name}, query)


class AsyncCommand:
    """A command of a sandbox."""

    def __init__(self, transport: AsyncTransport, sandbox: str, command: types.Command | str) -> None:
        self._transport = transport
        self._sandbox = sandbox
        self.id = command if isinstance(command, str) else command.id
        """Its id."""
        self.info = command if isinstance(command, types.Command) else None
        """The command as the server described it last."""

    @property
    def _path(self) -> dict[str, object]:
        return {"name": self._sandbox, "id": self.id}

    async def refresh(self) -> types.Command:
        """Asks the server for its record."""
        self.info = await self._transport.call("get_command", types.Command, self._path)
        return self.info

    async def wait(self) -> types.Command:
        """Waits for its end, over restarts of the server."""
        query = {"wait": True}
        self.info = await self._transport.call("get_command", types.Command, self._path, query=query, timeout=0)
        return self.info

    def logs(self, *, follow: bool = True, offset: int = 0) -> AsyncOutputStream:
        """What it printed, and with `follow` what it prints until it ends."""
        command = self.info or self.id
        return AsyncOutputStream(self._transport, self._sandbox, command=command, follow=follow, offset=offset)

    async def result(self) -> Result:
        """Waits for its end, and returns all it printed."""
        async with self.logs() as stream:
            return await stream.result()

    async def write(self, data: str | bytes, *, close: bool = False) -> None:
        """Sends input, as fast as it reads. It must have been started with `stdin`.

        Input is never sent twice: if the connection breaks, this fails, and how much has arrived is not known.
        """
        content = data.encode() if isinstance(data, str) else data
        await self._transport.done("send_stdin", self._path, query={"close": close or None}, content=content)

    async def close_stdin(self) -> None:
        """Says that there is no more input."""
        await self._transport.done("send_stdin", self._path, query={"close": True}, content=b"", repeatable=True)

    async def signal(self, signal: str | int) -> None:
        """Sends a signal to its process group."""
        await self._transport.done("signal_command", self._path, json={"signal": signal})

    async def kill(self) -> None:
        """Kills it."""
        await self.signal("KILL")

    async def resize(self, cols: int, rows: int) -> None:
        """Gives its terminal another size."""
        await self._transport.done("resize_command", self._path, json={"cols": cols, "rows": rows}, repeatable=True)

    async def changes(self) -> types.CommandChangeList:
        """Which paths it changed."""
        return await self._transport.call("get_command_changes", types.CommandChangeList, self._path)


class AsyncFiles:
    """Files of a sandbox. Relative paths begin at its working directory."""

    def __init__(self, transport: AsyncTransport, sandbox: str) -> None:
        self._transport = transport
        self._path = {"name": sandbox}

    async def read(
        self,
        path: str,
        *,
        offset: int | None = None,
        limit: int | None = None,
        user: str | None = None,
        if_running: bool = False,
    ) -> bytes:
        """The bytes of a file."""
        query = given(path=path, offset=offset, limit=limit, user=user, if_running=if_running or None)
        return await self._transport.read("read_file", self._path, query=query)

    async def read_text(self, path: str, *, encoding: str = "utf-8", user: str | None = None) -> str:
        """The text of a file."""
        return (await self.read(path, user=user)).decode(encoding)

    async def download(self, path: str, to: str | os.PathLike[str], *, user: str | None = None) -> None:
        """Copies a file to this machine. It is in place when it is complete."""
        whole = os.fspath(to)
        partial = f"{whole}.partial"
        try:
            with open(partial, "wb") as file:
                await self._into(file, "read_file", given(path=path, user=user))
            os.replace(partial, whole)
        except BaseException:
            if os.path.exists(partial):
                os.unlink(partial)
            raise

    async def write(
        self,
        path: str,
        data: str | bytes | IO[bytes],
        *,
        mode: str | None = None,
        parents: bool = False,
        append: bool = False,
        user: str | None = None,
        if_running: bool = False,
    ) -> types.Moved:
        """Writes a file: text, bytes, or a file that is open for reading. It is in place when it is complete."""
        query = given(
            path=path,
            mode=mode,
            parents=parents or None,
            append=append or None,
            user=user,
            if_running=if_running or None,
        )
        content = content_of(data)
        if isinstance(content, bytes):
            return await self._transport.call(
                "write_file", types.Moved, self._path, query=query, content=content, repeatable=not append
            )
        return await self._send("write_file", query, content, repeatable=not append and content.seekable())

    async def upload(
        self,
        source: str | os.PathLike[str],
        to: str,
        *,
        parents: bool = True,
        mode: str | None = None,
        user: str | None = None,
    ) -> types.Moved:
        """Copies a file of this machine into the sandbox."""
        with open(source, "rb") as file:
            return await self.write(to, file, parents=parents, mode=mode, user=user)

    async def list(
        self, path: str = ".", *, user: str | None = None, if_running: bool = False
    ) -> list[types.Entry]:
        """What a directory has."""
        found: list[types.Entry] = []
        query = given(path=path, user=user, if_running=if_running or None)
        while True:
            page = await self._transport.call("list_files", types.Listing, self._path, query=query)
            found += page.items
            if not page.next:
                return found
            query["cursor"] = page.next

    async def stat(self, path: str, *, user: str | None = None, if_running: bool = False) -> types.Entry:
        """Describes a path, without following a final symlink."""
        query = given(path=path, user=user, if_running=if_running or None)
        return await self._transport.call("stat_file", types.Entry, self._path, query=query)

    async def exists(self, path: str, *, user: str | None = None) -> bool:
        """Whether there is something at a path."""
        try:
            await self.stat(path, user=user)
        except ApiError as error:
            if error.code == "path_not_found":
                return False
            raise
        return True

    async def make_directory(
        self, path: str, *, mode: int | None = None, parents: bool = True, user: str | None = None
    ) -> None:
        """Makes a directory."""
        body = given(path=path, mode=mode, parents=parents, user=user)
        await self._transport.done("make_directory", self._path, json=body, repeatable=parents)

    async def move(self, source: str, to: str, *, user: str | None = None) -> None:
        """Renames or moves a file or directory."""
        await self._transport.done("move_file", self._path, json=given(from_=source, to=to, user=user))

    async def remove(
        self, path: str, *, recursive: bool = False, missing_ok: bool = False, user: str | None = None
    ) -> None:
        """Removes a file or directory."""
        query = given(path=path, recursive=recursive or None, missing_ok=missing_ok or None, user=user)
        await self._transport.done("remove_file", self._path, query=query)

    async def upload_directory(
        self, source: str | os.PathLike[str], to: str, *, user: str | None = None
    ) -> types.Moved:
        """Copies what a directory of this machine has into one of the sandbox, which is made if absent."""
        with packed(source) as archive:
            return await self.write_tar(to, archive, user=user)

    async def download_directory(
        self, path: str, to: str | os.PathLike[str], *, user: str | None = None
    ) -> None:
        """Copies what a directory of the sandbox has into one of this machine, and writes nothing outside of it."""
        with tempfile.SpooledTemporaryFile(max_size=8 << 20) as archive:
            await self._into(archive, "read_tar", given(path=path, user=user))
            archive.seek(0)
            unpack(archive, to)

    async def read_tar(self, path: str, to: IO[bytes], *, user: str | None = None) -> None:
        """Writes a tar of a file or directory to an open file."""
        await self._into(to, "read_tar", given(path=path, user=user))

    async def write_tar(self, path: str, archive: bytes | IO[bytes], *, user: str | None = None) -> types.Moved:
        """Unpacks a tar below a directory."""
        source = file_like(archive)
        return await self._send("write_tar", given(path=path, user=user), source, repeatable=source.seekable())

    async def _send(self, operation: str, query: dict[str, Any], source: IO[bytes], repeatable: bool) -> types.Moved:
        start = source.tell() if repeatable else 0

        async def pieces() -> AsyncIterator[bytes]:
            if repeatable:
                source.seek(start)
            while piece := source.read(PIECE):
                yield piece

        return await self._transport.call(
            operation, types.Moved, self._path, query=query, content=pieces, repeatable=repeatable
        )

    async def _into(self, file: IO[bytes], operation: str, query: dict[str, Any]) -> None:
        answer = await self._transport.send(operation, self._path, query=query)
        try:
            async for piece in answer.aiter_bytes(PIECE):
                file.write(piece)
        except OSError:
            raise
        except Exception as error:
            raise ConnectionFailed(f"the download broke off: {error or type(error).__name__}") from error
        finally:
            await answer.aclose()


class AsyncPorts:
    """Ports of a sandbox."""

    def __init__(self, transport: AsyncTransport, sandbox: str) -> None:
        self._transport = transport
        self._sandbox = sandbox

    async def list(self) -> list[types.PortStatus]:
        """Its published ports."""
        path = {"name": self._sandbox}
        return [one async for one in pages(self._transport, "list_ports", types.PortStatus, path)]

    async def publish(
        self, port: int, *, access: inputs.Access = "private", wake: bool = True
    ) -> types.PortStatus:
        """Publishes a port. The answer has its address."""
        path = {"name": self._sandbox, "port": port}
        body = {"access": access, "wake": wake}
        return await self._transport.call("publish_port", types.PortStatus, path, json=body)

    async def unpublish(self, port: int) -> types.PortStatus:
        """Publishes a port no more."""
        return await self.publish(port, access="off")

    async def token(self, port: int, *, expires: Duration | None = None) -> types.PortToken:
        """A token for a private port, and an address that has it."""
        path = {"name": self._sandbox, "port": port}
        body = given(expires=span(expires))
        return await self._transport.call("issue_port_token", types.PortToken, path, json=body, repeatable=True)

    async def connect(self, port: int, *, if_running: bool = False) -> AsyncConnection:
        """Connects to any port inside, published or not: bytes both ways."""
        return await AsyncConnection.open(self._transport, self._sandbox, port, if_running)

    async def connect_websocket(self, port: int, *, if_running: bool = False) -> AsyncWebSocket:
        """The same over a WebSocket: binary messages carry bytes."""
        path: dict[str, object] = {"name": self._sandbox, "port": port}
        return await AsyncWebSocket.open(self._transport, "connect_port", path, if_running)


class AsyncServices:
    """Services of a sandbox: programs that are started with each of its sessions."""

    def __init__(self, transport: AsyncTransport, sandbox: str) -> None:
        self._transport = transport
        self._sandbox = sandbox

    async def list(self) -> list[types.ServiceStatus]:
        """Its services."""
        path = {"name": self._sandbox}
        return [one async for one in pages(self._transport, "list_services", types.ServiceStatus, path)]

    async def set(self, service: str, **settings: Unpack[inputs.SetService]) -> types.ServiceStatus:
        """Adds or changes a service."""
        return await self._call("set_service", types.ServiceStatus, service, json=dict(settings))

    async def remove(self, service: str) -> None:
        """Removes a service."""
        path = {"name": self._sandbox, "service": service}
        await self._transport.done("remove_service", path)

    async def start(self, service: str) -> types.ServiceStatus:
        """Starts a service, and wakes the sandbox for it."""
        return await self._call("start_service", types.ServiceStatus, service, repeatable=True)

    async def stop(self, service: str) -> types.ServiceStatus:
        """Stops a service."""
        return await self._call("stop_service", types.ServiceStatus, service, repeatable=True)

    async def _call(self, operation: str, kind: type[T], service: str, **how: Any) -> T:
        path = {"name": self._sandbox, "service": service}
        return await self._transport.call(operation, kind, path, **how)


def _input(data: bytes) -> dict[str, str]:
    import base64

    try:
        return {"input": data.decode()}
    except UnicodeDecodeError:
        return {"input_base64": base64.b64encode(data).decode()}


async def _heard(
    stream: AsyncOutputStream,
    on_stdout: Callable[[str], object] | None,
    on_stderr: Callable[[str], object] | None,
) -> Result:
    """Reads a command's output to its end, and passes it on as it comes."""
    if on_stdout is None and on_stderr is None:
        return await stream.result()
    kept: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray(), "gap": bytearray()}
    hear = {"stdout": on_stdout, "stderr": on_stderr, "gap": None}
    output: Output
    async for output in stream:
        kept[output.stream].extend(output.data)
        told = hear[output.stream]
        if told is not None and output.text:
            told(output.text)
    command = stream.command
    assert command is not None
    return Result(command, bytes(kept["stdout"]), bytes(kept["stderr"]), stream.missing_bytes, stream.resumed)
