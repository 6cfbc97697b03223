"""A server: its sandboxes, and everything beside them."""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import IO, Any

from typing_extensions import Unpack

from .. import inputs, types
from .._common import Duration, SandboxSettings, file_like, given, settings_body, span, tag_pairs
from .._errors import ConnectionFailed
from .sandbox import PIECE, AsyncSandbox, save
from .streams import AsyncBuildStream, AsyncEventStream, AsyncProgressStream, pages
from .transport import AsyncTransport


class AsyncSandkeep:
    """A server.

    Without arguments it is the one that `SANDKEEP_URL` and `SANDKEEP_KEY` name, or the one on this machine. `timeout` is
    how long an answer may take, in seconds. For `retry_for` seconds a call that may be repeated is made again, and a
    stream that broke is gone on with, while the server is away.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        project: str | None = None,
        timeout: float = 120.0,
        retry_for: float = 30.0,
    ) -> None:
        self.transport = AsyncTransport(url, key, project, timeout, retry_for)
        """Calls the server."""
        self.snapshots = AsyncSnapshots(self.transport)
        """Snapshots of all sandboxes."""
        self.runs = AsyncRuns(self.transport)
        """Agents' work: queued, reviewed, accepted or rejected."""
        self.approvals = AsyncApprovals(self.transport)
        """Questions that somebody answers before work goes on."""
        self.secrets = AsyncSecrets(self.transport)
        """Secrets of the project."""
        self.drives = AsyncDrives(self.transport)
        """Volumes that outlive sandboxes."""
        self.images = AsyncImages(self.transport)
        """Images that sandboxes start from."""
        self.webhooks = AsyncWebhooks(self.transport)
        """Events, sent to an address of yours."""
        self.projects = AsyncProjects(self.transport)
        """Projects, their keys and policies."""
        self.trash = AsyncTrash(self)
        """Deleted sandboxes."""
        self.audit = AsyncAudit(self.transport)
        """The log of who did what."""

    async def __aenter__(self) -> AsyncSandkeep:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes all connections."""
        await self.transport.aclose()

    # Sandboxes

    def sandbox(self, name: str) -> AsyncSandbox:
        """The sandbox of that name, without asking whether there is one."""
        return AsyncSandbox(self, name)

    async def get_or_create(self, name: str, **settings: Unpack[SandboxSettings]) -> AsyncSandbox:
        """The sandbox of that name, started. It is created, with these settings, if there is none."""
        body = {"name": name, "if_exists": "get", **settings_body(settings)}
        opened = await self.transport.call("create_sandbox", types.Opened, json=body)
        return AsyncSandbox(self, opened.sandbox.name, opened.sandbox)

    async def create(
        self,
        name: str | None = None,
        *,
        from_snapshot: str | None = None,
        start: bool | None = None,
        **settings: Unpack[SandboxSettings],
    ) -> AsyncSandbox:
        """A new sandbox. Without a name it gets one. It is started, unless `start` is False."""
        body = {**given(name=name, from_=from_snapshot, start=start), **settings_body(settings)}
        opened = await self.transport.call("create_sandbox", types.Opened, json=body)
        return AsyncSandbox(self, opened.sandbox.name, opened.sandbox)

    async def get(self, name: str) -> AsyncSandbox:
        """The sandbox of that name. Never wakes it."""
        sandbox = AsyncSandbox(self, name)
        await sandbox.refresh()
        return sandbox

    async def sandboxes(
        self,
        *,
        tags: Mapping[str, str] | None = None,
        state: types.State | None = None,
        name_prefix: str | None = None,
        class_: inputs.Class | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[AsyncSandbox]:
        """Sandboxes, newest first."""
        query = given(tag=tag_pairs(tags), state=state, name_prefix=name_prefix, class_=class_, limit=limit)
        async for one in pages(self.transport, "list_sandboxes", types.Sandbox, query=query):
            yield AsyncSandbox(self, one.name, one)

    async def group(self, group: str) -> list[AsyncSandbox]:
        """The forks that one `fork_many` made."""
        query = {"group": group}
        found = pages(self.transport, "list_forks", types.Sandbox, query=query)
        return [AsyncSandbox(self, one.name, one) async for one in found]

    async def diff(
        self, from_point: str, to: str, *, paths: Sequence[str] = (), limit: int | None = None
    ) -> types.Diff:
        """What differs between two points: sandboxes, snapshots, labels."""
        query = given(from_=from_point, to=to, path=list(paths), limit=limit)
        return await self.transport.call("diff", types.Diff, query=query)

    async def patch(
        self,
        from_point: str,
        to: str,
        *,
        paths: Sequence[str] = (),
        relative: str | None = None,
        binary: bool = False,
    ) -> bytes:
        """The same as a patch in git's format."""
        query = given(from_=from_point, to=to, path=list(paths), relative=relative, binary=binary or None)
        return await self.transport.read("diff_patch", query=query)

    # The server

    def events(
        self,
        *,
        sandbox: str | None = None,
        tags: Mapping[str, str] | None = None,
        kinds: Sequence[str] = (),
        cursor: str | None = None,
        since: str | None = None,
        follow: bool = True,
        all_projects: bool = False,
    ) -> AsyncEventStream[types.Event]:
        """What happens, without gaps: after a break it goes on after the last event that came."""
        query = given(
            sandbox=sandbox,
            tag=tag_pairs(tags),
            kind=list(kinds),
            cursor=cursor,
            since=since,
            follow=None if follow else False,
            all_projects=all_projects or None,
        )
        return AsyncEventStream(self.transport, "events", types.Event, query, follow)

    async def health(self) -> types.Health:
        """Whether the server works, and how many sandboxes it still recovers."""
        return await self.transport.call("health", types.Health)

    async def ready(self) -> types.Readiness:
        """Whether the server takes work. Raises at once, with the reason, if it does not."""
        return await self.transport.call("ready", types.Readiness, retry=False)

    async def who_am_i(self) -> types.WhoAmI:
        """Whose key this is."""
        return await self.transport.call("who_am_i", types.WhoAmI)

    async def usage(self) -> types.SpaceUsage:
        """Disk space."""
        return await self.transport.call("usage", types.SpaceUsage)

    async def stats(self) -> list[types.SandboxStats]:
        """What the running sandboxes use at this moment."""
        return [one async for one in pages(self.transport, "list_stats", types.SandboxStats)]

    async def metrics(self) -> str:
        """Figures for Prometheus."""
        return (await self.transport.read("metrics")).decode()

    async def damage(self) -> list[types.Damage]:
        """Stored data that is damaged."""
        return [one async for one in pages(self.transport, "damage", types.Damage)]

    async def fsck(self, *, verify: bool = False) -> types.Fsck:
        """Checks the data directory."""
        return await self.transport.call("fsck", types.Fsck, json={"verify": verify}, repeatable=True, timeout=0)

    async def issue_token(
        self, audience: inputs.Audience, *, scope: inputs.Scope | None = None, expires: Duration | None = None
    ) -> types.Token:
        """A token for another service's client."""
        body = given(for_=audience, scope=scope, expires=span(expires))
        return await self.transport.call("issue_token", types.Token, json=body)

    async def quarantine(self) -> list[types.Quarantine]:
        """Files that the guard moved aside."""
        return [one async for one in pages(self.transport, "list_quarantine", types.Quarantine)]

    async def delete_quarantine(self, id: str) -> types.Quarantine:
        """Deletes files that the guard moved aside."""
        return await self.transport.call("delete_quarantine", types.Quarantine, {"id": id})


class AsyncSnapshots:
    """Snapshots of all sandboxes."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    def list(self, *, sandbox: str | None = None, limit: int | None = None) -> AsyncIterator[types.Snapshot]:
        """Snapshots, newest first."""
        query = {"sandbox": sandbox, "limit": limit}
        return pages(self._transport, "list_snapshots", types.Snapshot, query=query)

    async def get(self, id: str) -> types.Snapshot:
        """A snapshot."""
        return await self._transport.call("get_snapshot", types.Snapshot, {"id": id})

    async def delete(self, id: str, *, force: bool = False) -> types.SnapshotDeleted:
        """Deletes a snapshot."""
        query = {"force": force or None}
        return await self._transport.call("delete_snapshot", types.SnapshotDeleted, {"id": id}, query=query)

    async def export(self, id: str, to: str | os.PathLike[str]) -> None:
        """Writes all files of a snapshot to a tar on this machine. It is in place when it is complete."""
        await save(await self._transport.send("export_snapshot", {"id": id}), to)


class AsyncRuns:
    """Agents' work: queued, reviewed, accepted or rejected. docs/RUNS.md has the rules."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def start(self, **run: Unpack[inputs.StartRun]) -> types.Run:
        """Queues a run."""
        return await self._transport.call("start_run", types.Run, json=dict(run))

    def list(
        self,
        *,
        status: types.RunStatus | None = None,
        sandbox: str | None = None,
        owner: str | None = None,
        repository: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[types.Run]:
        """Runs, newest first."""
        query = given(status=status, sandbox=sandbox, owner=owner, repository=repository, limit=limit)
        return pages(self._transport, "list_runs", types.Run, query=query)

    async def get(self, id: str) -> types.Run:
        """A run."""
        return await self._transport.call("get_run", types.Run, {"id": id})

    async def wait(self, id: str, *, seconds: int = 60) -> types.Run:
        """Waits until it waits for somebody or is over, at most so long."""
        query = {"wait": seconds}
        return await self._transport.call("get_run", types.Run, {"id": id}, query=query, timeout=seconds + 30.0)

    async def cancel(self, id: str, *, comment: str | None = None) -> types.Run:
        """Ends it. Its sandbox is kept."""
        return await self._transport.call("cancel_run", types.Run, {"id": id}, json=given(comment=comment))

    async def heartbeat(self, id: str, *, cost: float | None = None) -> types.Run:
        """Says that the harness is alive."""
        body = given(cost=cost)
        return await self._transport.call("run_heartbeat", types.Run, {"id": id}, json=body, repeatable=True)

    async def finish(self, id: str, *, failure: str | None = None, cost: float | None = None) -> types.Run:
        """Says that the work of a harness is done, or failed."""
        body = given(failure=failure, cost=cost)
        return await self._transport.call("finish_run", types.Run, {"id": id}, json=body)

    async def review(self, id: str) -> types.RunReview:
        """What it changed, did and was in contact with."""
        return await self._transport.call("review_run", types.RunReview, {"id": id})

    async def pin_again(self, id: str) -> types.RunReview:
        """Reviews the present state instead of the one at its end."""
        return await self._transport.call("pin_run_again", types.RunReview, {"id": id})

    async def accept(self, id: str, **how: Unpack[inputs.AcceptRun]) -> types.RunAccepted:
        """Accepts its result. Needs a key that may approve."""
        return await self._transport.call("accept_run", types.RunAccepted, {"id": id}, json=dict(how))

    async def reject(self, id: str, *, comment: str | None = None) -> types.Run:
        """Rejects its result. Needs a key that may approve."""
        return await self._transport.call("reject_run", types.Run, {"id": id}, json=given(comment=comment))


class AsyncApprovals:
    """Questions that somebody answers before work goes on."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    def list(
        self,
        *,
        status: types.ApprovalStatus | None = None,
        sandbox: str | None = None,
        run: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[types.Approval]:
        """Approvals, newest first."""
        query = given(status=status, sandbox=sandbox, run=run, limit=limit)
        return pages(self._transport, "list_approvals", types.Approval, query=query)

    async def get(self, id: str) -> types.Approval:
        """An approval."""
        return await self._transport.call("get_approval", types.Approval, {"id": id})

    async def wait(self, id: str, *, seconds: int = 60) -> types.Approval:
        """Waits for the answer, at most so long."""
        query = {"wait": seconds}
        return await self._transport.call(
            "get_approval", types.Approval, {"id": id}, query=query, timeout=seconds + 30.0
        )

    async def answer(
        self, id: str, answer: inputs.ApprovalAnswer, *, comment: str | None = None
    ) -> types.Approval:
        """Approves or denies. Needs a key that may approve."""
        body = given(answer=answer, comment=comment)
        return await self._transport.call("answer_approval", types.Approval, {"id": id}, json=body)


class AsyncSecrets:
    """Secrets of the project. Values are sent and never returned."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self) -> list[types.Secret]:
        """All secrets."""
        return await self._transport.call("list_secrets", list[types.Secret])

    async def get(self, name: str) -> types.Secret:
        """A secret."""
        return await self._transport.call("get_secret", types.Secret, {"name": name})

    async def set(
        self,
        name: str,
        value: str,
        *,
        hosts: Sequence[str] | None = None,
        places: Sequence[inputs.SecretPlace] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> types.Secret:
        """Sets a secret."""
        body = given(value=value, hosts=hosts, places=places, tags=tags)
        return await self._transport.call("set_secret", types.Secret, {"name": name}, json=body)

    async def delete(self, name: str) -> types.Secret:
        """Deletes a secret."""
        return await self._transport.call("delete_secret", types.Secret, {"name": name})


class AsyncDrives:
    """Volumes that outlive sandboxes."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    def list(self, *, name_prefix: str | None = None) -> AsyncIterator[types.Drive]:
        """All drives."""
        return pages(self._transport, "list_drives", types.Drive, query={"name_prefix": name_prefix})

    async def get(self, name: str) -> types.Drive:
        """A drive."""
        return await self._transport.call("get_drive", types.Drive, {"name": name})

    async def create(
        self, name: str, *, max_size: inputs.Size | None = None, if_exists: inputs.IfExists | None = None
    ) -> types.Drive:
        """Creates a drive."""
        body = given(name=name, max_size=max_size, if_exists=if_exists)
        return await self._transport.call("create_drive", types.Drive, json=body)

    async def fork(self, name: str, to: str) -> types.Drive:
        """A new drive with this one's content."""
        return await self._transport.call("fork_drive", types.Drive, {"name": name}, json={"name": to})

    async def promote(
        self,
        name: str,
        sandbox: str,
        only: Sequence[str],
        *,
        path: str | None = None,
        expect_generation: int | None = None,
        dry_run: bool = False,
    ) -> types.PromotedIntoDrive:
        """Puts files that a sandbox made or changed, those that the globs name, into a drive: all or nothing."""
        body = given(
            from_=sandbox,
            only=list(only),
            path=path,
            expect_generation=expect_generation,
            dry_run=dry_run or None,
        )
        return await self._transport.call(
            "promote_into_drive", types.PromotedIntoDrive, {"name": name}, json=body, repeatable=True
        )

    async def delete(self, name: str) -> types.Drive:
        """Deletes a drive."""
        return await self._transport.call("delete_drive", types.Drive, {"name": name})


class AsyncImages:
    """Images that sandboxes start from."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self) -> list[types.Image]:
        """All images."""
        return [one async for one in pages(self._transport, "list_images", types.Image)]

    async def get(self, name: str) -> types.Image:
        """An image."""
        return await self._transport.call("get_image", types.Image, {"name": name})

    async def remove(self, name: str) -> None:
        """Removes an image."""
        await self._transport.done("remove_image", {"name": name})

    async def pull(self, reference: str) -> AsyncProgressStream:
        """Pulls an image from a registry. Iterate over its progress, or call `done`."""
        return await self._work("pull_image", json={"reference": reference})

    async def import_path(self, path: str, name: str) -> AsyncProgressStream:
        """Imports an archive or a directory that is on the server."""
        return await self._work("import_image", json={"path": path, "name": name})

    async def import_archive(self, archive: bytes | IO[bytes], name: str) -> AsyncProgressStream:
        """Imports an archive from here."""
        source = file_like(archive)

        async def pieces() -> AsyncIterator[bytes]:
            while piece := source.read(PIECE):
                yield piece

        headers = {"Content-Type": "application/x-tar"}
        return await self._work("import_image", query={"name": name}, content=pieces, headers=headers)

    async def build(
        self,
        context: bytes | IO[bytes],
        name: str,
        *,
        dockerfile: str = "Dockerfile",
        args: Mapping[str, str] | None = None,
        target: str | None = None,
        secrets: Mapping[str, str] | None = None,
        no_cache: bool = False,
    ) -> AsyncBuildStream:
        """Builds an image from a Dockerfile. `context` is a tar archive with the Dockerfile and all files it may copy.

        The build ends when its stream is closed. Secrets are for `RUN --mount=type=secret`, 8 KiB together.
        """
        source = file_like(context)

        async def pieces() -> AsyncIterator[bytes]:
            while piece := source.read(PIECE):
                yield piece

        query = given(
            name=name,
            dockerfile=dockerfile,
            arg=[f"{key}={value}" for key, value in (args or {}).items()] or None,
            target=target,
            no_cache=no_cache or None,
        )
        headers = {"Content-Type": "application/x-tar"}
        if secrets:
            packed = [f"{key}={base64.b64encode(value.encode()).decode()}" for key, value in secrets.items()]
            headers["Sandkeep-Build-Secret"] = ",".join(packed)
        answer = await self._transport.send(
            "build_image", query=query, content=pieces, headers=headers, timeout=0
        )
        return AsyncBuildStream(answer)

    async def prune(self) -> types.PrunedBuilds:
        """Deletes what builds of the project have kept for the next one. Images stay."""
        return await self._transport.call("prune_builds", types.PrunedBuilds)

    async def customize(self, request: inputs.CustomizeRequest) -> AsyncProgressStream:
        """Makes an image of another one and directories of the server."""
        return await self._work("customize_image", json=dict(request))

    async def _work(self, operation: str, **how: Any) -> AsyncProgressStream:
        return AsyncProgressStream(await self._transport.send(operation, timeout=0, **how))


class AsyncWebhooks:
    """Events of the project, sent to an address of yours."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def list(self) -> list[types.Webhook]:
        """All webhooks."""
        return [one async for one in pages(self._transport, "list_webhooks", types.Webhook)]

    async def get(self, id: str) -> types.Webhook:
        """A webhook, with its last deliveries."""
        return await self._transport.call("get_webhook", types.Webhook, {"id": id})

    async def create(
        self,
        url: str,
        events: Sequence[str],
        *,
        secret: str | None = None,
        allow_private: bool = False,
        answers: bool = False,
    ) -> types.NewWebhook:
        """Creates a webhook. The answer has its secret, this once. With `answers` its receiver may answer approvals."""
        body = given(
            url=url, events=list(events), secret=secret, allow_private=allow_private or None, answers=answers or None
        )
        return await self._transport.call("create_webhook", types.NewWebhook, json=body)

    async def update(self, id: str, **change: Unpack[inputs.UpdateWebhook]) -> types.Webhook:
        """Changes a webhook."""
        return await self._transport.call("update_webhook", types.Webhook, {"id": id}, json=dict(change))

    async def rotate_secret(self, id: str, *, secret: str | None = None, only: bool = False) -> types.NewWebhook:
        """Another secret. The former one signs too, unless `only`."""
        body = given(secret=secret, only=only)
        return await self._transport.call("rotate_webhook_secret", types.NewWebhook, {"id": id}, json=body)

    async def test(self, id: str) -> types.WebhookDelivery:
        """Sends a test event."""
        return await self._transport.call("test_webhook", types.WebhookDelivery, {"id": id})

    async def delete(self, id: str) -> None:
        """Deletes a webhook."""
        await self._transport.done("delete_webhook", {"id": id})


class AsyncProjects:
    """Projects, their keys and policies. Needs an admin key."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(self, name: str) -> types.Project:
        """Creates a project."""
        return await self._transport.call("create_project", types.Project, json={"name": name})

    async def delete(self, name: str) -> None:
        """Deletes a project that has nothing in it."""
        await self._transport.done("delete_project", {"project": name})

    async def keys(self, project: str) -> list[types.Key]:
        """Keys of a project."""
        path = {"project": project}
        return [one async for one in pages(self._transport, "list_keys", types.Key, path)]

    async def create_key(
        self,
        project: str,
        scope: inputs.Scope,
        *,
        label: str | None = None,
        approve: bool = False,
        expires: Duration | None = None,
    ) -> types.NewKey:
        """Creates a key. The answer has it, this once."""
        body = given(scope=scope, label=label, approve=approve or None, expires=span(expires))
        return await self._transport.call("create_key", types.NewKey, {"project": project}, json=body)

    async def revoke_key(self, project: str, key: str) -> None:
        """Revokes a key."""
        await self._transport.done("revoke_key", {"project": project, "key": key})

    async def network(self, project: str) -> types.ProjectNetwork:
        """What its sandboxes may reach."""
        return await self._transport.call("get_project_network", types.ProjectNetwork, {"project": project})

    async def set_network(
        self,
        project: str,
        default: inputs.Network,
        *,
        bound: inputs.Network | None = None,
        max_connections: int | None = None,
    ) -> types.ProjectNetwork:
        """Changes what its sandboxes may reach, and how many connections they may have open together."""
        path = {"project": project}
        body = {"default": default, "bound": bound, "max_connections": max_connections}
        return await self._transport.call("set_project_network", types.ProjectNetwork, path, json=body)

    async def governance(self, project: str) -> types.ProjectRuns:
        """How many runs it may have, and who answers."""
        return await self._transport.call("get_project_runs", types.ProjectRuns, {"project": project})

    async def set_governance(
        self, project: str, *, running: int, queued: int, separate_approver: bool = False
    ) -> types.ProjectRuns:
        """Changes how many runs it may have, and who answers."""
        path = {"project": project}
        body = {"running": running, "queued": queued, "separate_approver": separate_approver}
        return await self._transport.call("set_project_runs", types.ProjectRuns, path, json=body)

    async def list(self) -> list[types.Project]:
        """All projects."""
        return [one async for one in pages(self._transport, "list_projects", types.Project)]


class AsyncTrash:
    """Deleted sandboxes."""

    def __init__(self, client: AsyncSandkeep) -> None:
        self._client = client

    async def list(self) -> list[types.TrashItem]:
        """What is in the trash."""
        return [one async for one in pages(self._client.transport, "list_trash", types.TrashItem)]

    async def restore(self, sandbox: str, *, name: str | None = None) -> AsyncSandbox:
        """Restores a sandbox, by its name or id."""
        path, body = {"sandbox": sandbox}, given(name=name)
        restored = await self._client.transport.call("restore_sandbox", types.Sandbox, path, json=body)
        return AsyncSandbox(self._client, restored.name, restored)

    async def empty(self) -> types.TrashEmptied:
        """Empties the trash."""
        return await self._client.transport.call("empty_trash", types.TrashEmptied)


class AsyncAudit:
    """The log of who did what."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    def list(
        self,
        *,
        since: str | None = None,
        until: str | None = None,
        actor: str | None = None,
        target: str | None = None,
        action: str | None = None,
        host: bool = False,
        limit: int | None = None,
    ) -> AsyncIterator[types.AuditEntry]:
        """Entries, oldest first."""
        query = given(
            since=since, until=until, actor=actor, target=target, action=action, host=host or None, limit=limit
        )
        return pages(self._transport, "audit", types.AuditEntry, query=query)

    def follow(
        self,
        *,
        since: str | None = None,
        actor: str | None = None,
        target: str | None = None,
        action: str | None = None,
        host: bool = False,
    ) -> AsyncEventStream[types.AuditEntry]:
        """Entries, and new ones as they come."""
        query = given(since=since, actor=actor, target=target, action=action, host=host or None, follow=True)
        return AsyncEventStream(self._transport, "audit", types.AuditEntry, query, True)

    async def verify(self, *, host: bool = False, expect: str | None = None) -> types.AuditVerification:
        """Whether entries were removed, changed or reordered."""
        query = given(host=host or None, expect=expect)
        return await self._transport.call("verify_audit", types.AuditVerification, query=query, timeout=0)


_default: AsyncSandkeep | None = None


def default_client() -> AsyncSandkeep:
    """The client that `AsyncSandbox` uses if it is given none."""
    global _default
    if _default is None:
        _default = AsyncSandkeep()
    return _default
