"""The Python SDK against a server: every operation, synchronous and asynchronous."""

import asyncio
import io
import os
import tarfile
import tempfile
import threading
import time
import unittest
import uuid
from pathlib import Path

import sandkeep
from sandkeep import AsyncSandkeep, Sandbox, Sandkeep
from sandkeep._operations import OPERATIONS
from sandkeep._sync.transport import Transport
from support import IMAGE

CALLED: set[str] = set()
_send = Transport.send


def _noted(self, operation, *args, **how):
    CALLED.add(operation)
    return _send(self, operation, *args, **how)


Transport.send = _noted

# These need a registry or files in the server's own file system.
ELSEWHERE = {"pull_image", "customize_image"}


def fresh(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex[:8]}"


class Live(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.client = Sandkeep()
        cls.box = cls.client.get_or_create(fresh("live"), image=IMAGE, tags={"suite": "python"})

    @classmethod
    def tearDownClass(cls) -> None:
        cls.box.delete()
        cls.client.close()

    def test_commands(self) -> None:
        box = self.box
        result = box.run("echo out; echo err >&2; exit 3")
        self.assertEqual((result.stdout, result.stderr, result.exit_code, result.end), ("out\n", "err\n", 3, "exited"))
        self.assertFalse(result.ok)
        with self.assertRaises(sandkeep.CommandFailed) as failed:
            box.run("echo no >&2; exit 3", check=True)
        self.assertIn("exit code 3: no", str(failed.exception))
        self.assertEqual(box.run(["printf", "%s", "a b; c"]).stdout, "a b; c")
        said = box.run("echo $X $(pwd) $(id -un); cat", env={"X": "1"}, cwd="/tmp", user="user", input="in")
        self.assertEqual(said.stdout, "1 /tmp user\nin")
        self.assertEqual(box.run(["cat"], input=b"\xff\0").stdout_bytes, b"\xff\0")
        self.assertEqual(box.run("sleep 60", timeout=0.3).end, "timed_out")
        heard: list[str] = []
        box.run("printf a; printf b >&2", on_stdout=heard.append, on_stderr=heard.append)
        self.assertEqual(sorted(heard), ["a", "b"])
        # More than any buffer on the way, in both directions at once.
        large = os.urandom(3 << 20)
        self.assertEqual(box.run(["cat"], input=large).stdout_bytes, large)
        self.assertEqual(box.run(["true"], input=large).exit_code, 0)

    def test_streams_and_processes(self) -> None:
        box = self.box
        with box.stream("echo now; exec sleep 600") as stream:
            self.assertEqual(next(stream).text, "now\n")
            id = stream.command.id
        self.assertEqual(box.command(id).wait().exit_code, 129, "SIGHUP, as it was left")
        command = box.start("cat; echo done >&2", stdin=True)
        command.write("one\n")
        command.write(b"two\n", close=True)
        result = command.result()
        self.assertEqual((result.stdout, result.stderr), ("one\ntwo\n", "done\n"))
        self.assertEqual([one.data for one in command.logs(offset=4) if one.stream == "stdout"], [b"two\n"])
        self.assertEqual(list(command.logs(follow=False))[-1].stream, "stderr")
        sleeper = box.start(["sleep", "600"])
        sleeper.signal("TERM")
        self.assertEqual(sleeper.wait().exit_code, 143)
        self.assertIn(sleeper.id, [one.id for one in box.commands(limit=2)])
        closed = box.start(["cat"], stdin=True)
        closed.close_stdin()
        self.assertEqual(closed.wait().exit_code, 0)
        wrote = box.start("mkdir -p /work/c && echo hi > /work/c/file")
        wrote.wait()
        self.assertIn("/work/c/file", [one.path for one in wrote.changes().paths])
        self.assertEqual(wrote.refresh().state, "exited")

    def test_terminal(self) -> None:
        with self.box.terminal("stty size; read line; echo got $line", cols=100, rows=30) as terminal:
            said = ""
            while "30 100" not in said:
                said += next(terminal).text
            terminal.write("word\n")
            said += "".join(one.text for one in terminal)
            self.assertIn("got word", said)
            self.assertEqual(terminal.command.exit_code, 0)
        with self.box.terminal("read line") as terminal:
            terminal.resize(90, 20)
            terminal.signal("KILL")
            self.assertIsNone(terminal.receive())
            self.assertEqual(terminal.command.exit_code, 137)
        tty = self.box.start("stty size; sleep 600", tty=(80, 24))
        tty.resize(120, 50)
        tty.kill()

    def test_files(self) -> None:
        files = self.box.files
        self.assertEqual(files.write("/work/f/a.txt", "one", parents=True).bytes, 3)
        files.write("/work/f/a.txt", b" two", append=True)
        self.assertEqual(files.read_text("/work/f/a.txt"), "one two")
        self.assertEqual(files.read("/work/f/a.txt", offset=4, limit=2), b"tw")
        self.assertEqual(files.write("/work/f/big", io.BytesIO(b"x" * 3_000_000)).bytes, 3_000_000)
        files.make_directory("/work/f/dir/below")
        files.move("/work/f/a.txt", "/work/f/dir/b.txt")
        self.assertEqual([one.name for one in files.list("/work/f")], ["big", "dir"])
        self.assertEqual(files.stat("/work/f/big").size_bytes, 3_000_000)
        self.assertTrue(files.exists("/work/f/big"))
        files.remove("/work/f/big")
        files.remove("/work/f/big", missing_ok=True)
        self.assertFalse(files.exists("/work/f/big"))
        with tempfile.TemporaryDirectory() as place:
            here = Path(place) / "in"
            (here / "sub").mkdir(parents=True)
            (here / "sub" / ("n" * 120 + ".txt")).write_text("long")
            (here / "run.sh").write_text("#!/bin/sh\necho ran\n")
            (here / "run.sh").chmod(0o755)
            (here / "link").symlink_to("run.sh")
            files.upload_directory(here, "/work/up")
            self.assertEqual(self.box.run(["/work/up/link"]).stdout, "ran\n")
            self.box.run("truncate -s 5M /work/up/holes; ln /work/up/run.sh /work/up/hard", check=True)
            back = Path(place) / "back"
            files.download_directory("/work/up", back)
            self.assertEqual((back / "sub" / ("n" * 120 + ".txt")).read_text(), "long")
            self.assertEqual(os.readlink(back / "link"), "run.sh")
            self.assertEqual((back / "run.sh").stat().st_mode & 0o777, 0o755)
            self.assertEqual((back / "holes").stat().st_size, 5 << 20)
            self.assertEqual((back / "hard").read_text(), "#!/bin/sh\necho ran\n")
            self.box.run("ln -s ../../../../../../etc/passwd /work/up/out", check=True)
            with self.assertRaisesRegex(sandkeep.ProtocolError, "leads outside"):
                files.download_directory("/work/up", Path(place) / "never")
            files.upload(here / "run.sh", "/work/up/again.sh")
            files.download("/work/up/again.sh", Path(place) / "one")
            self.assertIn("echo ran", (Path(place) / "one").read_text())
        with self.assertRaises(sandkeep.PathNotFoundError):
            files.read("/no/such/file")

    def test_state(self) -> None:
        name = fresh("state")
        box = self.client.create(name, image=IMAGE, purpose="a test")
        with self.assertRaises(sandkeep.NameTakenError) as taken:
            self.client.create(name, image=IMAGE)
        self.assertRegex(taken.exception.request_id, "^req-")
        self.assertEqual(Sandbox.get(name, client=self.client).info.purpose, "a test")
        box.run("echo one > /work/file", check=True)
        point = box.checkpoint("good")
        box.run("echo two > /work/file", check=True)
        usage = box.stats().usage
        self.assertGreater(usage.memory_limit_bytes, usage.memory_bytes)
        self.assertIn(name, [one.name for one in self.client.stats()])
        stopped = box.stop()
        self.assertEqual(stopped.sandbox.state, "stopped")
        self.assertEqual((box.stats().state, box.stats().usage), ("stopped", None))
        self.assertNotIn(name, [one.name for one in self.client.stats()])
        self.assertGreaterEqual(box.refresh().session_changes.created, 1)
        self.assertGreaterEqual(next(box.sessions()).changes.created, 1)
        with self.assertRaises(sandkeep.NotRunningError):
            box.run("true", if_running=True)
        self.assertEqual(box.run("cat /work/file").stdout, "two\n", "it wakes")
        before = box.rollback("good").before
        self.assertEqual(box.run("cat /work/file").stdout, "one\n")
        self.assertIn(point.id, [one.id for one in box.snapshots()])
        self.assertEqual(self.client.snapshots.get(point.id).label, "good")
        self.assertIn(point.id, [one.id for one in self.client.snapshots.list(sandbox=name)])
        with tempfile.TemporaryDirectory() as place:
            self.client.snapshots.export(point.id, Path(place) / "all.tar")
            self.assertGreater((Path(place) / "all.tar").stat().st_size, 10_000)
        box.ensure_running()
        box.extend("10m")
        self.assertEqual(box.why().state, "running")
        with self.assertRaises(sandkeep.ConflictError):
            box.pause()
        self.assertTrue([one.id for one in box.sessions()])
        box.update(purpose="another", tags={"a": "b"})
        self.assertEqual(box.refresh().purpose, "another")
        self.assertIn(name, [one.name for one in self.client.sandboxes(tags={"a": "b"})])
        box.rename(name + "-new")
        self.assertEqual(box.name, name + "-new")
        self.assertEqual(box.run("cat /work/file").stdout, "one\n")
        self.assertEqual(self.client.snapshots.delete(before.id).freed_bytes >= 0, True)
        box.delete()
        item = next(one for one in self.client.trash.list() if one.name == box.name)
        restored = self.client.trash.restore(item.id, name=name)
        self.assertEqual(restored.run("cat /work/file").stdout, "one\n")
        restored.delete()
        self.client.trash.empty()
        with self.assertRaises(sandkeep.SandboxNotFoundError) as missing:
            self.client.get(name)
        self.assertIsInstance(missing.exception, sandkeep.NotFoundError)

    def test_forks(self) -> None:
        box = self.client.create(fresh("fork"), image=IMAGE)
        box.files.write("/work/base", "base\n")
        one = box.fork(box.name + "-one")
        one.files.write("/work/new", "new\n")
        diff = box.diff(one)
        self.assertIn("/work/new", [entry.path for entry in diff.changes])
        self.assertIn(b"+new", self.client.patch(box.name, one.name, paths=["/work"]))
        forks = box.fork_many(3, box.name + "-try", start=False)
        self.assertEqual([fork.name for fork in forks], [f"{box.name}-try-{at}" for at in (1, 2, 3)])
        self.assertEqual(len(self.client.group(forks[0].info.forked_from.group)), 3)
        self.assertEqual(len(list(box.forks())), 4)
        self.assertEqual(one.merge(dry_run=True).counts.added, 1)
        one.merge()
        self.assertEqual(box.files.read_text("/work/new"), "new\n")
        with self.assertRaises(sandkeep.OriginMovedOnError):
            forks[0].promote()
        last = box.fork()
        last.run("echo promoted > /work/base", check=True)
        with tempfile.TemporaryDirectory() as place:
            archive = Path(place) / "made.tar"
            last.artifacts(["/work/base"], archive)
            with tarfile.open(archive) as made:
                self.assertEqual(made.extractfile("work/base").read(), b"promoted\n")
        promoted = last.promote(delete_fork=True)
        self.assertEqual(promoted.sandbox.name, box.name)
        self.assertEqual(box.files.read_text("/work/base"), "promoted\n")
        self.assertEqual(len(box.tree().sandboxes) >= 1, True)
        for fork in [one, *forks, box]:
            fork.delete()

    def test_ports_and_services(self) -> None:
        box = self.box
        # The image has Perl without its modules.
        server = (
            "socket(S, 2, 1, 6); setsockopt(S, 1, 2, pack('l', 1)); bind(S, pack('Sna4x8', 2, 7000, '')) or die; listen(S, 5);"
            " while (accept(C, S)) { my $line = <C>; syswrite(C, \"got $line\"); close(C) }"
        )
        box.services.set("echo", argv=["perl", "-e", server], port=7000)
        self.assertEqual([one.service.name for one in box.services.list()], ["echo"])
        box.services.start("echo")
        with box.ports.connect(7000) as connection:
            connection.write(b"hello\n")
            self.assertEqual(connection.read(timeout=10), b"got hello\n")
            self.assertEqual(connection.read(timeout=10), b"")
        socket = box.ports.connect_websocket(7000)
        socket.send(b"web\n")
        self.assertEqual(socket.receive(timeout=10), b"got web\n")
        socket.close()
        self.assertEqual(box.ports.publish(7000).access, "private")
        self.assertEqual([one.port for one in box.ports.list()], [7000])
        self.assertIn("http", box.ports.token(7000, expires="1h").url)
        box.ports.unpublish(7000)
        box.services.stop("echo")
        box.services.remove("echo")

    def test_network_and_secrets(self) -> None:
        box, client = self.box, self.client
        name = fresh("S").replace("-", "_").upper()
        client.secrets.set(name, "value-of-it", hosts=["api.example.com"])
        self.assertEqual(client.secrets.get(name).hosts, ["api.example.com"])
        self.assertIn(name, [one.name for one in client.secrets.list()])
        held = {"hosts": True, "known_hosts": ["github.com"], "secrets": [name], "expires": "5m", "default": "deny"}
        policy = box.update(approvals=held).approvals
        self.assertEqual((policy.hosts, policy.known_hosts, policy.secrets), (True, ["github.com"], [name]))
        self.assertIsNone(box.update(approvals=None).approvals)
        said = box.run("echo ${#TOKEN} $TOKEN", inject=[{"secret": name, "env": "TOKEN"}])
        self.assertEqual(said.stdout, "11 ***********\n")
        client.secrets.delete(name)
        box.set_network({"mode": "custom", "domains": ["*.example.com"]})
        self.assertEqual(box.network().network.domains, ["*.example.com"])
        list(box.connections(verdict="denied"))
        self.assertEqual(box.connections_summary().denied >= 0, True)
        box.set_network(None)
        self.assertEqual(client.quarantine(), [])
        with self.assertRaises(sandkeep.NotFoundError):
            client.delete_quarantine("snp-00000000000000000000000000")

    def test_drives_and_images(self) -> None:
        client, name = self.client, fresh("drive")
        drive = client.drives.create(name, max_size="64M")
        self.assertEqual(drive.max_size_bytes, 64 << 20)
        box = client.create(fresh("drive"), image=IMAGE, mounts={"/data": {"drive": name}})
        box.run("echo kept > /data/file; echo made > /work/made", check=True)
        box.stop()
        before = client.drives.get(name).generation
        would = client.drives.promote(name, box.name, ["/work/made"], path="/in", dry_run=True)
        self.assertEqual((would.drive.generation, would.truncated), (before, False))
        promoted = client.drives.promote(name, box.name, ["/work/made"], path="/in", expect_generation=before)
        self.assertIn("/in/work/made", [one.path for one in promoted.changes])
        self.assertEqual(promoted.drive.generation, before + 1)
        with self.assertRaises(sandkeep.GenerationMismatchError):
            client.drives.promote(name, box.name, ["/work"], expect_generation=before)
        self.assertEqual(box.run("cat /data/file /data/in/work/made").stdout, "kept\nmade\n")
        box.delete()
        fork = client.drives.fork(name, name + "-fork")
        self.assertTrue(client.drives.get(fork.name).initialized)
        self.assertEqual([one.name for one in client.drives.list(name_prefix=name)][::-1].count(name), 1)
        client.drives.delete(fork.name)
        client.drives.delete(name)
        archive = io.BytesIO()
        self.box.files.read_tar("/etc", archive)
        archive.seek(0)
        image = client.images.import_archive(archive, fresh("image")).done()
        self.assertIn(image.name, [one.name for one in client.images.list()])
        self.assertEqual(client.images.get(image.name).digest, image.digest)
        client.images.remove(image.name)
        with self.assertRaises(sandkeep.SandkeepError):
            client.images.import_path("/no/such/archive.tar", "never").done()
        context = io.BytesIO()
        with tarfile.open(fileobj=context, mode="w") as packed:
            text = b"FROM scratch\nARG V\nCOPY file /$V\nCMD [\"x\"]\n"
            for name, content in (("Dockerfile", text), ("file", b"content")):
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                packed.addfile(entry, io.BytesIO(content))
        building = client.images.build(
            context.getvalue(), fresh("built"), args={"V": "there"}, secrets={"id": "not used"}
        )
        lines = [told.line for told in building if isinstance(told, sandkeep.types.BuildProgressStep)]
        self.assertEqual(lines, [1, 2, 3, 4])
        built = building.image
        self.assertIsNotNone(built)
        self.assertEqual(client.images.get(built.name).cmd, ["x"])
        client.images.remove(built.name)
        self.assertGreaterEqual(client.images.prune().steps, 1)
        with self.assertRaises(sandkeep.ApiError) as raised:
            client.images.build(context.getvalue(), "never", target="nope").done()
        self.assertEqual(raised.exception.code, "bad_dockerfile")

    def test_runs_and_approvals(self) -> None:
        client, box = self.client, self.box
        run = client.runs.start(
            place={"how": "fork", "sandbox": box.name},
            command={"argv": ["sh", "-c", "echo made > /work/made"]},
            purpose="test",
            on_accept="promote",
        )
        done = client.runs.wait(run.id)
        self.assertEqual(done.status, "ready_for_review", done.why)
        self.assertIn("/work/made", [one.path for one in client.runs.review(run.id).changes])
        client.runs.pin_again(run.id)
        self.assertEqual(client.runs.accept(run.id, how="keep").run.status, "accepted")
        run = client.runs.start(place={"how": "existing", "sandbox": box.name}, purpose="never", heartbeat="1m")
        self.assertEqual(client.runs.cancel(run.id).status, "cancelled")
        run = client.runs.start(place={"how": "existing", "sandbox": box.name}, purpose="harness", heartbeat="1m")
        while client.runs.get(run.id).status == "queued":
            time.sleep(0.01)
        client.runs.heartbeat(run.id, cost=0.5)
        client.runs.finish(run.id, cost=1.0)
        self.assertEqual(client.runs.wait(run.id).status, "ready_for_review")
        self.assertEqual(client.runs.reject(run.id, comment="no").status, "rejected")
        self.assertIn(run.id, [one.id for one in client.runs.list()])
        run = client.runs.start(
            place={"how": "existing", "sandbox": box.name},
            heartbeat="1m",
            approve_hosts=True,
            known_hosts=["github.com"],
            spending=[{"what": "cost", "limit": 1, "step": 5}],
        )
        self.assertEqual((run.approve_hosts, run.known_hosts), (True, ["github.com"]))
        self.assertEqual([(one.what, one.allowed, one.step) for one in run.spending], [("cost", 1.0, 5.0)])
        while client.runs.get(run.id).status == "queued":
            time.sleep(0.01)
        client.runs.heartbeat(run.id, cost=2.0)
        while not (asked := list(client.approvals.list(status="pending", run=run.id))):
            time.sleep(0.05)
        self.assertEqual((asked[0].subject, asked[0].target), ("spending", "cost/0"))
        client.approvals.answer(asked[0].id, "approve")
        while client.runs.get(run.id).spending[0].allowed < 6:
            time.sleep(0.05)
        client.runs.cancel(run.id)
        question = box.ask("Deploy?", context="all green", expires="5m", default="deny")
        self.assertIn(question.id, [one.id for one in client.approvals.list(status="pending")])
        self.assertEqual(client.approvals.get(question.id).question, "Deploy?")
        client.approvals.answer(question.id, "approve", comment="go")
        self.assertEqual(client.approvals.wait(question.id).status, "approved")

    def test_the_server(self) -> None:
        client = self.client
        self.assertEqual(client.health().status, "ok")
        self.assertEqual([one.name for one in client.ready().checks], ["recovery", "disk", "drivers"])
        self.assertEqual(client.who_am_i().scope, "admin")
        self.assertGreater(client.usage().total_bytes, 0)
        self.assertIn("sandkeep_", client.metrics())
        self.assertEqual(client.damage(), [])
        self.assertFalse(client.fsck().broken)
        self.assertTrue(client.issue_token("vercel", expires="1h").token)
        self.assertTrue(client.audit.verify().intact)
        self.assertTrue(any(one.action == "sandbox.create" for one in client.audit.list(since="1h")))
        with client.audit.follow(since="1h") as entries:
            self.assertGreater(next(entries).seq, 0)
        project = client.projects.create(fresh("project")).name
        key = client.projects.create_key(project, "write", label="ci", expires="1h")
        self.assertIn(key.key.id, [one.id for one in client.projects.keys(project)])
        with Sandkeep(key=key.secret) as other:
            self.assertEqual(other.who_am_i().project, project)
            with self.assertRaises(sandkeep.ForbiddenError):
                other.projects.list()
        client.projects.set_network(project, {"mode": "deny-all"}, max_connections=100)
        network = client.projects.network(project)
        self.assertEqual((network.default.mode, network.max_connections), ("deny-all", 100))
        client.projects.set_governance(project, running=1, queued=2)
        self.assertEqual(client.projects.governance(project).queued, 2)
        client.projects.revoke_key(project, key.key.id)
        self.assertIn(project, [one.name for one in client.projects.list()])
        client.projects.delete(project)
        with self.assertRaises(sandkeep.UnauthorizedError):
            Sandkeep(key=key.secret).who_am_i()
        hook = client.webhooks.create("http://127.0.0.1:9/", ["run.*"], allow_private=True).webhook
        client.webhooks.update(hook.id, enabled=True)
        self.assertTrue(client.webhooks.rotate_secret(hook.id).secret)
        self.assertFalse(client.webhooks.test(hook.id).delivered)
        self.assertEqual(client.webhooks.get(hook.id).url, hook.url)
        self.assertEqual([one.id for one in client.webhooks.list()], [hook.id])
        client.webhooks.delete(hook.id)

    def test_events(self) -> None:
        with self.box.events(kinds=["command"]) as events:
            id = self.box.start("true").id
            first = next(events)
            self.assertEqual((first.kind, first.data["command"]), ("command.started", id))
        past = list(self.client.events(since="10m", kinds=["sandbox.created"], follow=False))
        self.assertIn(self.box.name, [one.sandbox.name for one in past])

    def test_nobody_listens(self) -> None:
        with Sandkeep("http://127.0.0.1:9", key="skp_x", retry_for=0.2) as nobody:
            with self.assertRaises(sandkeep.ConnectionFailed):
                nobody.health()
        with self.assertRaises(sandkeep.ConfigurationError):
            Sandkeep("ftp://x")
        with Sandkeep(timeout=0.2) as hasty, self.assertRaises(sandkeep.RequestTimedOut):
            hasty.transport.call("exec", object, {"name": self.box.name}, query={"wait": True}, json={"argv": ["sleep", "5"]})

    def test_zz_every_operation_was_called(self) -> None:
        # Runs last, and only says something if the whole class ran.
        if len(CALLED) > 60:
            self.assertEqual(set(OPERATIONS) - CALLED, ELSEWHERE)


class LiveAsync(unittest.IsolatedAsyncioTestCase):
    async def test_the_same_in_asyncio(self) -> None:
        async with AsyncSandkeep() as client:
            box = await client.get_or_create(fresh("async"), image=IMAGE)
            try:
                results = await asyncio.gather(*(box.run(f"echo {at}", check=True) for at in range(8)))
                self.assertEqual([one.stdout for one in results], [f"{at}\n" for at in range(8)])
                async with box.stream("echo a; sleep 0.1; echo b") as stream:
                    self.assertEqual("".join([one.text async for one in stream]), "a\nb\n")
                await box.files.write("/work/x", b"\0\xff")
                self.assertEqual(await box.files.read("/work/x"), b"\0\xff")
                with tempfile.TemporaryDirectory() as place:
                    (Path(place) / "file").write_text("up")
                    await box.files.upload_directory(place, "/work/up")
                self.assertEqual(await box.files.read_text("/work/up/file"), "up")
                forks = await box.fork_many(2, box.name + "-try")
                self.assertEqual(len([one async for one in box.forks()]), 2)
                command = await box.start(["cat"], stdin=True)
                await command.write("in", close=True)
                self.assertEqual((await command.result()).stdout, "in")
                terminal = await box.terminal("echo hi")
                self.assertIn("hi", "".join([one.text async for one in terminal]))
                async with box.events(kinds=["command.ended"]) as events:
                    await box.run("true")
                    self.assertEqual((await anext(events)).kind, "command.ended")
                task = asyncio.create_task(box.run("sleep 600"))
                await asyncio.sleep(0.5)
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
                last = [one async for one in box.commands(limit=1)][0]
                self.assertEqual((await box.command(last.id).wait()).exit_code, 129)
                for fork in forks:
                    await fork.delete()
            finally:
                await box.delete()


class Threads(unittest.TestCase):
    def test_one_client_in_several_threads(self) -> None:
        with Sandkeep() as client:
            box = client.get_or_create(fresh("threads"), image=IMAGE)
            said: list[str] = []
            threads = [
                threading.Thread(target=lambda at=at: said.append(box.run(f"echo {at}").stdout)) for at in range(6)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            box.delete()
        self.assertEqual(sorted(said), [f"{at}\n" for at in range(6)])


if __name__ == "__main__":
    unittest.main()
