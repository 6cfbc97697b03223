import time
from datetime import timedelta

import vercel.sandbox
from vercel.sandbox import (
    DriveMount,
    NetworkPolicy,
    NetworkPolicyRequestMatcher,
    NetworkPolicyResponse,
    NetworkPolicyRule,
    NetworkPolicyTransform,
    SandboxApiError,
    SandboxQueryByCreatedAt,
    SandboxQueryByName,
    SandboxResources,
    SandboxStatus,
    SnapshotRetention,
    SnapshotSource,
    TagFilter,
)
from surface import SURFACE, Case, wrap

DAY = timedelta(days=1)


class Sandboxes(Case):
    def test_a_scope_leaves_nothing(self):
        name = self.fresh()
        with self.client.create_sandbox(name=name) as box:
            self.assertEqual(box.status, SandboxStatus.RUNNING)
            self.assertEqual(self.sh(box, "echo hi"), "hi")
        self.refused(404, "not_found", self.client.get_sandbox, name=name)

    def test_functions_of_the_module_find_the_server(self):
        name = self.fresh()
        if SURFACE == "sync":
            made = self.api.create_sandbox(name=name)
        else:

            async def create():
                return await self.api.create_sandbox(name=name)

            made = wrap(self.loop, self.loop.run(create))
        self.addCleanup(self.removed, name)
        self.assertEqual(self.sh(made, "echo hi"), "hi")

    def test_everything_given_is_told_back(self):
        box = self.sandbox(
            resources=SandboxResources(vcpus=4, memory=8192),
            execution_time_limit=timedelta(minutes=2),
            env={"A": "b"},
            tags={"t": "v"},
            ports=[3000],
            snapshot_expiration=3 * DAY,
            snapshot_retention=SnapshotRetention(count=2, expiration=5 * DAY),
        )
        self.assertEqual((box.vcpus, box.memory), (4, 8192))
        self.assertEqual(box.execution_time_limit, timedelta(minutes=2))
        self.assertEqual(box.tags, {"t": "v"})
        self.assertEqual([route.port for route in box.routes], [3000])
        self.assertEqual(box.snapshot_expiration, 3 * DAY)
        self.assertEqual(box.snapshot_retention.count, 2)
        self.assertTrue(box.persistent)
        self.assertIsNone(box.current_snapshot_id)
        self.assertEqual(box.current_session.sandbox_name, box.name)
        self.assertIsNotNone(box.project_id)

    def test_what_is_wrong_is_refused(self):
        def create(**options):
            self.awaited(self.client.create_sandbox(name=self.fresh(), **options))

        self.refused(400, "bad_request", create, ports=[80])
        self.refused(400, "bad_request", create, resources=SandboxResources(vcpus=3))
        self.refused(400, "bad_request", create, tags={str(n): "v" for n in range(6)})
        self.refused(404, "not_found", create, source=SnapshotSource(snapshot_id="snap_" + "0" * 28))
        box = self.sandbox()
        self.refused(400, "bad_request", lambda: self.awaited(self.client.create_sandbox(name=box.name)))
        self.refused(404, "not_found", self.client.get_sandbox, name=self.fresh("nobody"))

    def test_get_or_create_says_which_it_was(self):
        name = self.fresh()
        self.addCleanup(self.removed, name)
        first, created = self.client.get_or_create_sandbox(name=name)
        self.assertTrue(created)
        second, created = self.client.get_or_create_sandbox(name=name)
        self.assertFalse(created)
        self.assertEqual(second.current_session_id, first.current_session_id)

    def test_get_or_create_makes_anew_what_cannot_be_resumed(self):
        box = self.sandbox(persistent=False)
        box.stop()
        again, created = self.client.get_or_create_sandbox(name=box.name)
        self.assertTrue(created)
        self.assertEqual(self.sh(again, "echo up"), "up")

    def test_stopped_and_resumed_without_being_asked(self):
        box = self.sandbox(env={"KEPT": "env"})
        box.fs.write_text("file", "kept")
        first = box.current_session_id
        box.stop()
        self.assertEqual(box.status, SandboxStatus.STOPPED)
        self.assertIsNotNone(box.current_snapshot_id)
        self.assertEqual(box.fs.read_text("file"), "kept")
        self.assertNotEqual(box.current_session_id, first)
        self.assertEqual(self.sh(box, "echo $KEPT"), "env")
        sessions = box.list_sessions()
        self.assertEqual([session.id for session in sessions], [box.current_session_id, first])
        self.assertEqual(sessions[1].status, SandboxStatus.STOPPED)

    def test_a_session_that_is_over_stays_over(self):
        box = self.sandbox()
        session = box.current_session
        box.stop()
        self.refused(410, "sandbox_stopped", session.run_process, "true")
        self.assertEqual(session.refresh().status, SandboxStatus.STOPPED)

    def test_resume_by_name(self):
        box = self.sandbox()
        box.stop()
        with self.client.resume_sandbox(name=box.name) as again:
            self.assertEqual(again.status, SandboxStatus.RUNNING)
        self.assertEqual(self.client.get_sandbox(name=box.name).status, SandboxStatus.STOPPED)

    def test_time_runs_out_and_can_be_added(self):
        box = self.sandbox(execution_time_limit=60)
        session = box.extend_execution_time_limit(30)
        self.assertEqual(session.execution_time_limit, timedelta(seconds=90))
        self.refused(400, "sandbox_timeout_invalid", box.extend_execution_time_limit, timedelta(days=400))
        short = self.sandbox(execution_time_limit=3)
        deadline = time.monotonic() + 30
        while self.client.get_sandbox(name=short.name).status != SandboxStatus.STOPPED:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.2)
        self.assertEqual(self.sh(short, "echo again"), "again")

    def test_update(self):
        box = self.sandbox(execution_time_limit=60, tags={"a": "b"})
        box.update(execution_time_limit=120, tags={"c": "d"}, ports=[3000, 4000], env={"LATER": "yes"})
        self.assertEqual(box.tags, {"c": "d"})
        self.assertEqual(sorted(route.port for route in box.routes), [3000, 4000])
        self.assertEqual(box.current_session.execution_time_limit, timedelta(seconds=120))
        box.update(snapshot_retention=SnapshotRetention(count=1))
        self.assertEqual(box.snapshot_retention.count, 1)
        box.update(snapshot_retention=None)
        self.assertIsNone(box.snapshot_retention)
        box.stop()
        self.assertEqual(self.sh(box, "echo $LATER"), "yes")

    def test_snapshots(self):
        box = self.sandbox()
        box.fs.write_text("file", "one")
        first = box.snapshot()
        self.assertTrue(first.id.startswith("snap_"))
        self.assertEqual((first.status, first.creation_method, first.parent_id), ("created", "manual", None))
        box.fs.write_text("file", "two")
        second = box.snapshot(expiration=2 * DAY)
        self.assertEqual(second.parent_id, first.id)
        self.assertAlmostEqual(second.expires_at - second.created_at, 2 * DAY / timedelta(milliseconds=1), delta=60_000)
        self.assertEqual([each.id for each in box.list_snapshots()], [second.id, first.id])
        made = self.sandbox(source=SnapshotSource(snapshot_id=first.id))
        self.assertEqual(made.fs.read_text("file"), "one")
        self.assertEqual(self.client.get_snapshot(snapshot_id=first.id).id, first.id)
        box.update(current_snapshot_id=first.id)
        self.assertEqual(box.fs.read_text("file"), "one")
        self.assertEqual(second.delete().status, "deleted")
        listed = [each.id for each in self.client.query_snapshots(name=box.name, page_size=1, sort_order="asc")]
        self.assertEqual(listed[:2], [first.id, second.id])

    def test_retention(self):
        box = self.sandbox(snapshot_retention=SnapshotRetention(count=1))
        for n in range(3):
            box.fs.write_text("file", str(n))
            box.stop()
        alive = [each.id for each in box.list_snapshots() if each.status == "created"]
        self.assertEqual(alive, [box.current_snapshot_id])

    def test_fork(self):
        source = self.sandbox(env={"FROM": "source"}, tags={"team": "red"}, ports=[3000])
        source.fs.write_text("file", "forked")
        source.stop()
        made = self.awaited(self.client.fork_sandbox(source_sandbox=source.name, name=self.fresh()))
        self.addCleanup(self.removed, made.name)
        self.assertEqual(made.fs.read_text("file"), "forked")
        self.assertEqual(self.sh(made, "echo $FROM"), "source")
        self.assertEqual(made.tags, {"team": "red"})
        other = self.awaited(self.client.fork_sandbox(source_sandbox=source.name, name=self.fresh(), tags={"x": "y"}))
        self.addCleanup(self.removed, other.name)
        self.assertEqual(other.tags, {"x": "y"})

    def test_destroy_takes_orphans_along_when_told(self):
        kept = self.sandbox()
        snapshot = kept.snapshot()
        kept.destroy()
        self.assertEqual(self.client.get_snapshot(snapshot_id=snapshot.id).status, "created")
        snapshot.delete()
        taken = self.sandbox()
        snapshot = taken.snapshot()
        taken.destroy(delete_orphan_snapshots=True)
        try:
            self.assertEqual(self.client.get_snapshot(snapshot_id=snapshot.id).status, "deleted")
        except SandboxApiError as error:
            self.assertEqual(error.status_code, 404)

    def test_queries(self):
        prefix = self.fresh("query")
        names = [f"{prefix}-{letter}" for letter in "bca"]
        for name in names:
            self.sandbox(name=name, tags={"query": prefix})
        query = SandboxQueryByCreatedAt(sort_order="asc", tag=TagFilter(key="query", value=prefix))
        found = [box.name for box in self.client.query_sandboxes(query=query, page_size=2)]
        self.assertEqual(found, names)
        query = SandboxQueryByName(sort_order="asc", name_prefix=prefix)
        found = [box.name for box in self.client.query_sandboxes(query=query, page_size=1)]
        self.assertEqual(found, sorted(names))
        sessions = list(self.client.query_sessions(name=names[0]))
        self.assertEqual(len(sessions), 1)

    def test_network_policies(self):
        box = self.sandbox(network_policy=NetworkPolicy.deny_all())
        self.assertEqual(box.network_policy.mode, "deny-all")
        box.update(network_policy=NetworkPolicy.allow_all())
        self.assertEqual(box.network_policy.mode, "allow-all")
        rule = NetworkPolicyRule(
            transform=(NetworkPolicyTransform(headers={"x": "y"}),),
            match=NetworkPolicyRequestMatcher(method=("POST",)),
        )
        answer = NetworkPolicyRule(response=NetworkPolicyResponse(status_code=403))
        away = NetworkPolicyRule(forward_url="https://proxy.example.com")
        rules = {"example.com": [rule, answer], "other.com": [away]}
        box.update(network_policy=NetworkPolicy.custom(rules))
        policy = box.network_policy
        self.assertEqual(policy.mode, "custom")
        self.assertEqual(sorted(policy.allowed_domains), ["example.com", "other.com"])
        injected = policy.injection_rules[0]
        self.assertEqual((injected.domain, injected.header_names), ("example.com", ("x",)))
        self.assertEqual(injected.match_dimensions, ("method",))
        self.assertEqual(policy.forward_rules[0].forward_url, "https://proxy.example.com")
        self.assertEqual(policy.response_rules[0].status_code, 403)
        wrong = NetworkPolicyRule(transform=(NetworkPolicyTransform(headers={"a b": "y"}),))
        with self.assertRaises(SandboxApiError) as caught:
            box.update(network_policy=NetworkPolicy.custom({"example.com": [wrong]}))
        self.assertIn(caught.exception.status_code, range(400, 500))
        self.assertIn("networkPolicy", str(caught.exception))

    def test_a_server_inside_is_reached_at_its_route(self):
        import urllib.request

        box = self.sandbox(ports=[3000])
        script = (
            'use IO::Socket::INET; $| = 1; my $l = IO::Socket::INET->new(LocalPort => 3000, Listen => 4, ReuseAddr => 1);'
            'print "up\\n"; while (my $c = $l->accept) { while (<$c>) { last if /^\\r?\\n$/ }'
            'print $c "HTTP/1.1 200 OK\\r\\nContent-Length: 5\\r\\nConnection: close\\r\\n\\r\\nhello"; close $c }'
        )
        server = box.create_process("perl", ["-e", script])
        self.assertEqual(server.stdout.readline(), "up\n")
        with urllib.request.urlopen(box.routes[0].url, timeout=30) as answer:
            self.assertEqual(answer.read(), b"hello")


class Drives(Case):
    def drive(self, **options):
        made, created = self.client.get_or_create_drive(name=self.fresh("drive"), **options)
        self.assertTrue(created)
        self.addCleanup(self.dropped, made.name)
        return made

    def dropped(self, name):
        try:
            self.client.delete_drive(name=name)
        except SandboxApiError as error:
            if error.status_code != 404:
                raise

    def test_made_once_found_by_name_and_id(self):
        drive = self.drive(max_size_bytes=1 << 30)
        again, created = self.client.get_or_create_drive(name=drive.name)
        self.assertFalse(created)
        self.assertEqual(again.id, drive.id)
        self.assertEqual(self.client.get_drive(name_or_id=drive.name).id, drive.id)
        self.assertEqual(self.client.get_drive(name_or_id=drive.id).name, drive.name)
        self.refused(409, "conflict", self.client.get_or_create_drive, name=drive.name, max_size_bytes=2 << 30)
        self.refused(404, None, self.client.get_drive, name_or_id=self.fresh("nobody"))
        self.assertIn(drive.name, [each.name for each in self.client.query_drives(page_size=1)])

    def test_kept_forked_and_mounted(self):
        drive = self.drive()
        self.refused(409, "drive_not_initialized", drive.fork, name=self.fresh("fork"))
        writer = self.sandbox(mounts={"/data": drive.name})
        self.assertEqual(writer.mounts["/data"].drive, drive.name)
        writer.fs.write_text("/data/file", "kept")
        writer.stop()
        fork = drive.fork(name=self.fresh("fork"))
        self.addCleanup(self.dropped, fork.name)
        self.assertEqual(fork.parent_drive_id, drive.id)
        mounts = {"/fork": fork.name, "/still": DriveMount(drive=drive.name, mode="snapshot")}
        reader = self.sandbox(mounts=mounts)
        self.assertEqual(self.sh(reader, "cat /fork/file /still/file; echo new > /fork/file"), "keptkept")
        self.refused(409, None, fork.delete)
        self.removed(reader.name)
        self.assertEqual(writer.fs.read_text("/data/file"), "kept")
        self.removed(writer.name)
