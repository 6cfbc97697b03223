// The server is killed under its clients' feet. Runs alone: it takes the server away from everyone.

import assert from "node:assert/strict";
import { test } from "node:test";

import { crash_server, fresh, tell_server, without_control } from "../support.mjs";
import { Drive, Sandbox, Snapshot, sandbox, sh, since } from "./sdk.mjs";

const skip = without_control;

test("a running sandbox and its command live through it", { skip }, async (t) => {
  const box = await sandbox(t);
  await sh(box, "echo kept > kept");
  const script = "for i in $(seq 1 6); do echo line $i; sleep 0.5; done; exit 6";
  const command = await box.runCommand({ cmd: "bash", args: ["-c", script], detached: true });
  await crash_server();
  const done = await command.wait();
  assert.equal(done.exitCode, 6);
  assert.equal(await done.stdout(), [1, 2, 3, 4, 5, 6].map((i) => `line ${i}\n`).join(""), "nothing lost, nothing twice");
  assert.equal(await sh(box, "cat kept"), "kept");
  assert.equal((await Sandbox.get({ name: box.name })).currentSession().sessionId, box.currentSession().sessionId);
});

test("a stopped sandbox resumes from what was acknowledged", { skip }, async (t) => {
  const box = await sandbox(t, { env: { KEPT: "env" }, tags: { kept: "tag" }, ports: [3000] });
  await sh(box, "echo acknowledged > file");
  const { snapshot } = await box.stop();
  const address = box.domain(3000);
  await crash_server();
  const got = await Sandbox.get({ name: box.name });
  assert.equal(got.status, "stopped");
  assert.equal(got.currentSnapshotId, snapshot.id);
  assert.deepEqual(got.tags, { kept: "tag" });
  assert.equal(await sh(got, "cat file; echo $KEPT"), "acknowledged\nenv");
  assert.equal(got.domain(3000), address);
});

test("a stop cut short by the crash is finished, and nothing is rolled back", { skip }, async (t) => {
  const box = await sandbox(t);
  await sh(box, "echo first > file; seq 50000 > big");
  const stopping = box.stop().catch(() => {});
  await tell_server("kill");
  await tell_server("launch");
  await stopping;
  assert.equal(await sh(box, "cat file; tail -1 big"), "first\n50000");
});

test("a client that calls while the server is away tries again", { skip }, async (t) => {
  const box = await sandbox(t);
  await tell_server("kill");
  const asked = sh(box, "echo back");
  await tell_server("launch");
  assert.equal(await asked, "back");
});

test("snapshots, their tree and drives are there afterwards", { skip }, async (t) => {
  const box = await sandbox(t);
  const first = await box.snapshot();
  await sh(box, "echo x > x");
  const second = await box.snapshot();
  const name = fresh("drive");
  if (!since(3, "drives")) await Drive.getOrCreate({ name });
  await crash_server();
  assert.equal((await Snapshot.get({ snapshotId: first.snapshotId })).status, "created");
  const tree = await Snapshot.tree({ snapshotId: second.snapshotId, sortOrder: "desc" });
  assert.ok(tree.snapshots.some((node) => node.snapshot.id === first.snapshotId));
  if (!since(3, "drives")) {
    const [drive] = (await Drive.list({ namePrefix: name, sortBy: "name" })).drives;
    assert.equal(drive.name, name);
    await drive.delete();
  }
});

test("crash after crash", { skip }, async (t) => {
  const box = await sandbox(t);
  for (let round = 1; round <= 3; round++) {
    await sh(box, `echo ${round} >> rounds`);
    await crash_server();
    if (round === 2) await box.stop();
  }
  assert.equal(await sh(box, "cat rounds"), "1\n2\n3");
});
