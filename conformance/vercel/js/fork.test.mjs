import assert from "node:assert/strict";
import { test } from "node:test";

import { fresh, remove } from "../support.mjs";
import { Sandbox, refused, sandbox, sh } from "./sdk.mjs";

async function fork(t, source, params = {}) {
  const made = await Sandbox.fork({ sourceSandbox: source.name, name: fresh("fork"), ...params });
  t.after(() => remove(made.name));
  return made;
}

test("a fork starts from the source's snapshot and copies what it is told to be", async (t) => {
  const source = await sandbox(t, {
    env: { FROM: "source", SECRET: "s" },
    tags: { team: "red" },
    ports: [3000],
    timeout: 123_000,
    resources: { vcpus: 4 },
    snapshotExpiration: 48 * 3600 * 1000,
    keepLastSnapshots: { count: 3 },
  });
  await sh(source, "echo files > file");
  await source.stop();
  const made = await fork(t, source);
  assert.equal(made.sourceSnapshotId, source.currentSnapshotId);
  assert.equal(await sh(made, "cat file; echo $FROM $SECRET"), "files\nsource s");
  assert.deepEqual(made.tags, { team: "red" });
  assert.equal(made.timeout, 123_000);
  assert.equal(made.vcpus, 4);
  assert.equal(made.memory, 8192);
  assert.equal(made.persistent, true);
  assert.equal(made.snapshotExpiration, 48 * 3600 * 1000);
  assert.deepEqual(made.keepLastSnapshots, { count: 3, deleteEvicted: true });
  assert.deepEqual(made.routes.map((route) => route.port), [3000]);
  assert.notEqual(made.domain(3000), `https://${source.routes[0].subdomain}.vercel.run`, "addresses are its own");
});

test("what a fork is given replaces what it would have copied, and is not mixed with it", async (t) => {
  const source = await sandbox(t, { env: { A: "1", B: "1" }, tags: { a: "1", b: "1" }, ports: [3000] });
  await source.stop();
  const made = await fork(t, source, { env: { A: "2" }, tags: { c: "3" }, ports: [4000, 5000], timeout: 60_000, persistent: false });
  assert.equal(await sh(made, 'echo "$A|$B"'), "2|");
  assert.deepEqual(made.tags, { c: "3" });
  assert.deepEqual(made.routes.map((route) => route.port).sort(), [4000, 5000]);
  assert.equal(made.timeout, 60_000);
  assert.equal(made.persistent, false);
});

test("source and fork do not see each other's changes", async (t) => {
  const source = await sandbox(t);
  await sh(source, "echo common > file");
  await source.stop();
  const [one, two] = await Promise.all([fork(t, source), fork(t, source)]);
  await Promise.all([sh(one, "echo one > file"), sh(two, "echo two > file")]);
  assert.equal(await sh(one, "cat file"), "one");
  assert.equal(await sh(two, "cat file"), "two");
  assert.equal(await sh(source, "cat file"), "common");
});

test("a fork of a running sandbox has its last snapshot, not what came after", async (t) => {
  const source = await sandbox(t);
  await sh(source, "echo old > file");
  await source.stop();
  await sh(source, "echo new > file");
  const made = await fork(t, source);
  assert.equal(made.sourceSnapshotId, (await Sandbox.get({ name: source.name })).currentSnapshotId);
  assert.equal(await sh(made, "cat file"), "old");
  assert.equal(await sh(source, "cat file"), "new");
});

test("a fork of a sandbox without a snapshot starts from its image", async (t) => {
  const source = await sandbox(t, { env: { FROM: "source" } });
  await sh(source, "echo unsaved > file");
  const made = await fork(t, source);
  assert.equal(made.sourceSnapshotId, undefined);
  assert.equal(await sh(made, "test -e file || echo none; echo $FROM"), "none\nsource");
});

test("a fork has sessions and snapshots of its own and outlives its source", async (t) => {
  const source = await sandbox(t);
  await sh(source, "echo kept > file");
  await source.stop();
  const made = await fork(t, source);
  await made.stop();
  await remove(source.name);
  assert.equal(await sh(made, "cat file"), "kept");
  assert.equal((await made.listSessions()).sessions.length, 2);
  assert.equal((await made.listSnapshots()).snapshots.length, 1);
});

test("a fork gets a name when it is given none", async (t) => {
  const source = await sandbox(t);
  const made = await Sandbox.fork({ sourceSandbox: source.name });
  t.after(() => remove(made.name));
  assert.notEqual(made.name, source.name);
  assert.match(made.name, /./);
});

test("a fork of nobody is not found, and one onto a taken name is refused", async (t) => {
  await refused(Sandbox.fork({ sourceSandbox: fresh("nobody") }), 404, "not_found");
  const source = await sandbox(t);
  const other = await sandbox(t);
  await refused(Sandbox.fork({ sourceSandbox: source.name, name: other.name }), 400, "bad_request");
});
