import assert from "node:assert/strict";
import { test } from "node:test";

import { ask, eventually, fresh, project, remove } from "../support.mjs";
import { Drive, Sandbox, refused, sandbox, sh, since } from "./sdk.mjs";

const skip = since(3, "drives");

async function drive(t, params = {}) {
  const made = await Drive.getOrCreate({ name: fresh("drive"), ...params });
  t.after(async () => {
    // What was asked for first is cleared away first: whoever has the drive may still be there.
    const target = [`/api/v2/sandboxes/drives/${made.name}`, { query: { projectId: project } }];
    const { json } = await ask("GET", ...target);
    if (json.drive?.currentSandboxName) await remove(json.drive.currentSandboxName);
    await eventually(
      async () => [200, 404].includes((await ask("DELETE", ...target)).status),
      `drive ${made.name} goes`,
    );
  });
  return made;
}

test("a drive is made once", { skip }, async (t) => {
  const one = await drive(t, { maxSize: 1 << 30 });
  assert.equal(one.maxSize, 1 << 30);
  assert.equal(one.currentSandboxName, undefined);
  assert.equal(one.currentSessionId, undefined);
  assert.equal(typeof one.region, "string");
  const two = await Drive.getOrCreate({ name: one.name });
  assert.equal(two.driveId, one.driveId);
  assert.equal(two.maxSize, 1 << 30);
});

test("a drive that is there with another size is a conflict", { skip }, async (t) => {
  const one = await drive(t, { maxSize: 1 << 30 });
  await refused(Drive.getOrCreate({ name: one.name, maxSize: 2 ** 31 }), 409, "conflict");
});

test("a drive with a name that is none is refused", { skip }, async () => {
  await refused(Drive.getOrCreate({ name: "no spaces" }), 400, "bad_request");
  await refused(Drive.getOrCreate({ name: "n".repeat(65) }), 400, "bad_request");
});

test("a drive keeps what is written to it, beyond the sandbox", { skip }, async (t) => {
  const data = await drive(t);
  const first = await sandbox(t, { mounts: { "/data": data } });
  assert.deepEqual(first.mounts, { "/data": { drive: data.name, mode: "read-write" } });
  await sh(first, "echo written > /data/file && mkdir -p /data/deep && echo x > /data/deep/x");
  const attached = (await Drive.list({ namePrefix: data.name, sortBy: "name" })).drives[0];
  assert.equal(attached.currentSandboxName, first.name);
  assert.equal(attached.currentSessionId, first.currentSession().sessionId);
  await remove(first.name);
  const second = await sandbox(t, { mounts: { "/elsewhere": data } });
  assert.equal(await sh(second, "cat /elsewhere/file; ls /elsewhere"), "written\ndeep\nfile");
});

test("a drive is not part of a snapshot", { skip }, async (t) => {
  const data = await drive(t);
  const box = await sandbox(t, { mounts: { "/data": data } });
  await sh(box, "echo one > /data/file; echo here > here");
  const { snapshot } = await box.stop();
  const other = await sandbox(t, { source: { type: "snapshot", snapshotId: snapshot.id } });
  assert.equal(await sh(other, "cat here; ls /data 2>/dev/null | wc -l"), "here\n0");
  assert.equal(await sh(box, "cat /data/file"), "one", "a resume mounts it again");
});

test("a drive can be written by one session at a time", { skip }, async (t) => {
  const data = await drive(t);
  const box = await sandbox(t, { mounts: { "/data": data } });
  const second = Sandbox.create({ name: fresh("js"), mounts: { "/data": data } });
  second.then((made) => remove(made.name), () => {});
  await refused(second, 409, "drive_attached");
  await refused(data.delete(), 409);
  await box.stop();
  const now = await sandbox(t, { mounts: { "/data": data } });
  assert.equal(await sh(now, "echo mine > /data/mine; cat /data/mine"), "mine");
});

test("a drive as a snapshot can be read by many, and not written", { skip }, async (t) => {
  const data = await drive(t);
  const writer = await sandbox(t, { mounts: { "/data": data } });
  await sh(writer, "echo one > /data/file");
  await writer.stop();
  const [a, b] = await Promise.all([1, 2].map(() => sandbox(t, { mounts: { "/ro": data.snapshot() } })));
  assert.deepEqual(a.mounts, { "/ro": { drive: data.name, mode: "snapshot" } });
  assert.equal(await sh(a, "cat /ro/file"), "one");
  assert.equal(await sh(b, "cat /ro/file"), "one");
  const tried = await a.runCommand({ cmd: "touch", args: ["/ro/new"], sudo: true });
  assert.notEqual(tried.exitCode, 0);
});

test("update of mounts is for the next session", { skip }, async (t) => {
  const data = await drive(t);
  const box = await sandbox(t);
  await box.update({ mounts: { "/late": data } });
  await box.stop();
  assert.equal(await sh(box, "echo x > /late/x; ls /late"), "x");
  await box.update({ mounts: {} });
  await box.stop();
  assert.equal(await sh(box, "ls /late 2>/dev/null | wc -l"), "0");
});

for (const [what, mounts] of [
  ["a relative path", (d) => ({ data: { drive: d, mode: "read-write" } })],
  ["paths inside each other", (d) => ({ "/a": { drive: d, mode: "read-write" }, "/a/b": { drive: d, mode: "snapshot" } })],
  ["a mode nobody knows", (d) => ({ "/a": { drive: d, mode: "append" } })],
  ["the root", (d) => ({ "/": { drive: d, mode: "read-write" } })],
]) {
  test(`mounting at ${what} is refused`, { skip }, async (t) => {
    const data = await drive(t);
    const made = Sandbox.create({ name: fresh("js"), mounts: mounts(data.name) });
    made.then((box) => remove(box.name), () => {});
    await refused(made, 400, "bad_request");
  });
}

test("mounting a drive nobody has is not found", { skip }, async () => {
  const mounts = { "/data": { drive: fresh("nobody"), mode: "read-write" } };
  await refused(Sandbox.create({ name: fresh("js"), mounts }), 404);
});

test("drives are listed by name and by age, a page at a time", { skip }, async (t) => {
  const prefix = fresh("list");
  const names = ["b", "c", "a"].map((letter) => `${prefix}-${letter}`);
  for (const name of names) await drive(t, { name });
  const list = async (params) => (await (await Drive.list({ limit: 2, ...params })).toArray()).map((d) => d.name);
  const ours = (all) => all.filter((name) => name.startsWith(prefix));
  assert.deepEqual(await list({ namePrefix: prefix, sortBy: "name", sortOrder: "asc" }), [...names].sort());
  assert.deepEqual(ours(await list({ sortBy: "createdAt", sortOrder: "asc" })), names);
  assert.deepEqual(ours(await list({})), [...names].reverse());
});

test("a deleted drive is gone", { skip }, async (t) => {
  const data = await drive(t);
  await data.delete();
  const { drives } = await Drive.list({ namePrefix: data.name, sortBy: "name" });
  assert.deepEqual(drives, []);
  await refused(data.delete(), 404);
});
