import assert from "node:assert/strict";
import { test } from "node:test";

import { ask, eventually } from "../support.mjs";
import { Sandbox, refused, sandbox, sh } from "./sdk.mjs";

test("stop takes a snapshot and tells what the session used", async (t) => {
  const box = await sandbox(t);
  await sh(box, "echo kept > kept; for i in $(seq 200000); do :; done");
  const id = box.currentSession().sessionId;
  const stopped = await box.stop();
  assert.equal(stopped.id, id);
  assert.equal(stopped.status, "stopped");
  assert.ok(stopped.stoppedAt >= stopped.startedAt);
  assert.ok(stopped.duration > 0);
  assert.ok(stopped.activeCpuDurationMs > 0);
  assert.equal(typeof stopped.networkTransfer.ingress, "number");
  assert.equal(typeof stopped.networkTransfer.egress, "number");
  assert.match(stopped.snapshot.id, /^snap_/);
  assert.equal(stopped.snapshot.status, "created");
  assert.equal(stopped.snapshot.sourceSessionId, id);
  assert.ok(stopped.snapshot.sizeBytes > 0);
  assert.equal(box.currentSnapshotId, stopped.snapshot.id);
  assert.equal(box.status, "stopped");
  assert.ok(box.totalDurationMs > 0);
  assert.ok(box.totalActiveCpuDurationMs > 0);
});

test("stopping what is stopped changes nothing", async (t) => {
  const box = await sandbox(t);
  const first = await box.stop();
  const second = await box.stop();
  assert.equal(second.status, "stopped");
  assert.equal(second.id, first.id);
  const { snapshots } = await box.listSnapshots();
  assert.equal(snapshots.length, 1);
});

test("every call that needs a session resumes a stopped one", async (t) => {
  const box = await sandbox(t);
  await box.writeFiles([{ path: "kept", content: "content" }]);
  const ways = {
    runCommand: async () => assert.equal(await sh(box, "cat kept"), "content"),
    readFile: async () => assert.equal((await box.readFileToBuffer({ path: "kept" })).toString(), "content"),
    writeFiles: () => box.writeFiles([{ path: "new", content: "x" }]),
    mkDir: () => box.mkDir("new-dir"),
    extendTimeout: () => box.extendTimeout(60_000),
    snapshot: () => box.snapshot(),
  };
  const seen = new Set([box.currentSession().sessionId]);
  for (const [name, call] of Object.entries(ways)) {
    await box.stop();
    await call();
    const now = box.currentSession().sessionId;
    assert.ok(!seen.has(now), `${name} got a session of its own`);
    seen.add(now);
  }
  const { sessions } = await box.listSessions({ limit: 50 });
  assert.deepEqual(new Set(sessions.map((session) => session.id)), seen);
});

test("a call on a session that is over is answered with 410, which is what clients act on", async (t) => {
  const box = await sandbox(t);
  const session = box.currentSession();
  await box.stop();
  await refused(session.runCommand("true"), 410, "sandbox_stopped");
  await refused(session.writeFiles([{ path: "x", content: "x" }]), 410, "sandbox_stopped");
  await refused(session.mkDir("x"), 410, "sandbox_stopped");
  await refused(session.extendTimeout(60_000), 410, "sandbox_stopped");
  await refused(session.snapshot(), 410, "sandbox_stopped");
});

test("a session that was left behind by another resume is over", async (t) => {
  const box = await sandbox(t);
  const old = box.currentSession();
  await box.stop();
  await Sandbox.get({ name: box.name, resume: true });
  await refused(old.runCommand("true"), 410, "sandbox_stopped");
});

test("resumed again and again, everything written is there", async (t) => {
  const box = await sandbox(t);
  for (let round = 1; round <= 4; round++) {
    await sh(box, `echo ${round} >> rounds`);
    await box.stop();
  }
  assert.equal(await sh(box, "cat rounds"), "1\n2\n3\n4");
});

test("env, ports and tags are there again after a resume, and addresses stay", async (t) => {
  const box = await sandbox(t, { env: { KEPT: "env" }, ports: [3000], tags: { kept: "tag" } });
  const address = box.domain(3000);
  await box.stop();
  const again = await Sandbox.get({ name: box.name, resume: true });
  assert.equal(await sh(again, "echo $KEPT"), "env");
  assert.equal(again.domain(3000), address);
  assert.deepEqual(again.tags, { kept: "tag" });
});

test("a resume while a stop is under way waits and gets everything", async (t) => {
  const box = await sandbox(t);
  await sh(box, "seq 20000 | split -l 10 - part-; echo last > last");
  const stopping = box.stop();
  const other = await Sandbox.get({ name: box.name, resume: true });
  await stopping;
  assert.equal(await sh(other, "cat last"), "last");
});

test("commands and their logs can be read after the session is over", async (t) => {
  const box = await sandbox(t);
  const done = await box.runCommand({ cmd: "sh", args: ["-c", "echo out; echo err >&2; exit 4"], detached: true });
  await done.wait();
  const session = box.currentSession();
  await box.stop();
  const found = await session.getCommand(done.cmdId);
  assert.equal(found.exitCode, 4);
  assert.equal(await found.stdout(), "out\n");
  assert.equal(await found.stderr(), "err\n");
  assert.equal((await Sandbox.get({ name: box.name, resume: false })).status, "stopped", "reading wakes nothing");
});

test("a command that was running ends with its session, and its log says so", async (t) => {
  const box = await sandbox(t);
  const running = await box.runCommand({ cmd: "sh", args: ["-c", "echo begun; sleep 600"], detached: true });
  for await (const { data } of running.logs()) if (data === "begun\n") break;
  const waiting = running.wait();
  await box.stop();
  assert.notEqual((await waiting).exitCode, 0);
});

test("a waiting command is answered when its sandbox is stopped", async (t) => {
  const box = await sandbox(t);
  const run = box.currentSession().runCommand("sleep", ["600"]);
  const outcome = run.then((done) => done.exitCode, (error) => error.name);
  await eventually(async () => (await sh(box, "cat /proc/[0-9]*/comm | grep -c '^sleep$' || true")) !== "0", "it runs");
  await box.stop();
  assert.notEqual(await outcome, 0);
});

test("a sandbox that keeps nothing has no snapshot and cannot be resumed", async (t) => {
  const box = await sandbox(t, { persistent: false });
  await sh(box, "echo lost > lost");
  const stopped = await box.stop();
  assert.equal(stopped.snapshot, undefined);
  const got = await Sandbox.get({ name: box.name, resume: false });
  assert.equal(got.persistent, false);
  assert.equal(got.currentSnapshotId, undefined);
  await refused(Sandbox.get({ name: box.name, resume: true }), 410, "snapshot_not_found");
});

test("getOrCreate makes a sandbox anew that cannot be resumed", async (t) => {
  const box = await sandbox(t, { persistent: false });
  await box.stop();
  let created = 0;
  const again = await Sandbox.getOrCreate({ name: box.name, resume: true, onCreate: () => void created++ });
  assert.equal(created, 1);
  assert.equal(await sh(again, "echo alive"), "alive");
});

test("a snapshot by hand lets a sandbox that keeps nothing go on", async (t) => {
  const box = await sandbox(t, { persistent: false });
  await sh(box, "echo one > file");
  const first = await box.snapshot();
  await sh(box, "cat file; echo two > file");
  const second = await box.snapshot();
  assert.notEqual(second.snapshotId, first.snapshotId);
  assert.equal(await sh(box, "cat file"), "two");
});

test("sessions are listed newest first, or oldest first, a page at a time", async (t) => {
  const box = await sandbox(t);
  const ids = [box.currentSession().sessionId];
  for (let i = 0; i < 4; i++) {
    await box.stop();
    await sh(box, "true");
    ids.push(box.currentSession().sessionId);
  }
  const { sessions, pagination } = await box.listSessions();
  assert.deepEqual(sessions.map((s) => s.id), [...ids].reverse());
  assert.equal(pagination.next, null);
  assert.equal(pagination.count, 5);
  const page = await box.listSessions({ limit: 2, sortOrder: "asc" });
  assert.deepEqual(page.sessions.map((s) => s.id), ids.slice(0, 2));
  assert.equal(page.pagination.count, 2);
  assert.equal(typeof page.pagination.next, "string");
  const all = await page.toArray();
  assert.deepEqual(all.map((s) => s.id), ids);
  const stopped = all.slice(0, 4);
  for (const session of stopped) {
    assert.equal(session.status, "stopped");
    assert.ok(session.duration > 0);
  }
  assert.equal(all[4].status, "running");
});

test("a session ends when its time is over, and what was written is kept", async (t) => {
  const box = await sandbox(t, { timeout: 3_000 });
  const first = box.currentSession().sessionId;
  await sh(box, "echo in time > kept");
  const ended = await eventually(async () => {
    const got = await Sandbox.get({ name: box.name, resume: false });
    return got.status === "stopped" && got;
  }, "it stopped");
  assert.match(ended.currentSnapshotId, /^snap_/);
  const left = (await box.listSessions()).sessions[0];
  assert.equal(left.id, first);
  assert.ok(left.duration >= 2_000 && left.duration < 60_000, `${left.duration}`);
  assert.equal(await sh(box, "cat kept"), "in time");
});

test("extendTimeout adds exactly what was asked for", async (t) => {
  const box = await sandbox(t, { timeout: 60_000 });
  const session = box.currentSession();
  const before = box.expiresAt.getTime();
  await box.extendTimeout(90_000);
  assert.equal(session.timeout, 150_000);
  assert.equal(box.expiresAt.getTime(), before + 90_000);
  await box.extendTimeout(1_000);
  assert.equal(session.timeout, 151_000);
  const got = await Sandbox.get({ name: box.name });
  assert.equal(got.currentSession().timeout, 151_000);
  assert.equal(got.timeout, 60_000, "the next session gets what the sandbox has");
});

test("an extension saves a session that would have ended", async (t) => {
  const box = await sandbox(t, { timeout: 3_000 });
  const { sessionId } = box.currentSession();
  await box.extendTimeout(60_000);
  await new Promise((later) => setTimeout(later, 4_500));
  assert.equal(await sh(box, "echo still"), "still");
  assert.equal(box.currentSession().sessionId, sessionId);
});

test("an extension beyond the longest session is refused by its code", async (t) => {
  const box = await sandbox(t);
  await refused(box.extendTimeout(400 * 24 * 3600 * 1000), 400, "sandbox_timeout_invalid");
  await refused(box.extendTimeout(10), 400);
  assert.equal(box.currentSession().timeout, 300_000);
});

test("the session of a sandbox can be asked for by itself", async (t) => {
  const box = await sandbox(t, { ports: [3000] });
  const { sessionId } = box.currentSession();
  const { status, json } = await ask("GET", `/api/v2/sandboxes/sessions/${sessionId}`);
  assert.equal(status, 200);
  assert.equal(json.session.id, sessionId);
  assert.equal(json.session.sourceSandboxName, box.name);
  assert.equal(json.routes[0].port, 3000);
});
