import assert from "node:assert/strict";
import { test } from "node:test";

import { fresh, remove } from "../support.mjs";
import { Sandbox, Snapshot, refused, sandbox, sh } from "./sdk.mjs";

const DAY = 24 * 3600 * 1000;

async function from(t, snapshotId, params = {}) {
  return sandbox(t, { source: { type: "snapshot", snapshotId }, ...params });
}

test("snapshot keeps the files and ends the session", async (t) => {
  const box = await sandbox(t);
  await sh(box, "echo one > file");
  const session = box.currentSession();
  const snapshot = await box.snapshot();
  assert.match(snapshot.snapshotId, /^snap_[A-Za-z0-9]+$/);
  assert.ok(snapshot.snapshotId.length >= 32);
  assert.equal(snapshot.status, "created");
  assert.equal(snapshot.sourceSessionId, session.sessionId);
  assert.ok(snapshot.sizeBytes > 0);
  assert.equal(session.status, "stopped");
  const got = await Sandbox.get({ name: box.name, resume: false });
  assert.equal(got.currentSnapshotId, snapshot.snapshotId);
  assert.equal(got.status, "stopped");
});

test("a sandbox made from a snapshot has its files and says where it came from", async (t) => {
  const box = await sandbox(t);
  await sh(box, "echo one > file");
  const { snapshotId } = await box.snapshot();
  const made = await from(t, snapshotId);
  assert.equal(made.sourceSnapshotId, snapshotId);
  assert.equal(await sh(made, "cat file; echo two > file; cat file"), "one\ntwo");
  assert.equal(await sh(box, "cat file"), "one", "the source does not see it");
});

test("a snapshot outlives its sandbox", async (t) => {
  const name = fresh("js");
  const box = await Sandbox.create({ name });
  t.after(() => remove(name));
  await sh(box, "echo survived > file");
  const { snapshotId } = await box.snapshot();
  await box.delete();
  const found = await Snapshot.get({ snapshotId });
  assert.equal(found.status, "created");
  const made = await from(t, snapshotId);
  assert.equal(await sh(made, "cat file"), "survived");
  await made.stop();
  await found.delete();
});

test("get and delete of a snapshot", async (t) => {
  const box = await sandbox(t);
  const { snapshotId } = await box.snapshot();
  await sh(box, "echo more > more");
  await box.snapshot();
  const found = await Snapshot.get({ snapshotId });
  assert.equal(found.snapshotId, snapshotId);
  assert.ok(found.createdAt.getTime() <= Date.now());
  await found.delete();
  assert.equal(found.status, "deleted");
  const gone = Sandbox.create({ name: fresh("js"), source: { type: "snapshot", snapshotId } });
  gone.then((box) => remove(box.name), () => {});
  await refused(gone, 410, "snapshot_not_found");
  assert.equal(await sh(box, "cat more"), "more", "the sandbox stands on a later one");
});

test("a snapshot nobody has is not found", async () => {
  await refused(Snapshot.get({ snapshotId: `snap_${"0".repeat(28)}` }), 404, "not_found");
  await refused(Snapshot.get({ snapshotId: "nonsense" }), 404);
});

test("a sandbox whose snapshot was deleted is told so when it is resumed, and getOrCreate starts anew", async (t) => {
  const box = await sandbox(t);
  const snapshot = await box.snapshot();
  await snapshot.delete();
  await refused(Sandbox.get({ name: box.name, resume: true }), 410, "snapshot_not_found");
  let created = 0;
  const again = await Sandbox.getOrCreate({ name: box.name, resume: true, onCreate: () => void created++ });
  assert.equal(created, 1);
  assert.equal(await sh(again, "echo alive"), "alive");
});

test("snapshots expire when asked to, or never", async (t) => {
  const box = await sandbox(t);
  const short = await box.snapshot({ expiration: 2 * DAY });
  const left = short.expiresAt.getTime() - short.createdAt.getTime();
  assert.ok(Math.abs(left - 2 * DAY) < 60_000, `${left}`);
  await sh(box, "true");
  const forever = await box.snapshot({ expiration: 0 });
  assert.equal(forever.expiresAt, undefined);
  await sh(box, "true");
  const ordinary = await box.snapshot();
  assert.ok(Math.abs(ordinary.expiresAt.getTime() - ordinary.createdAt.getTime() - 30 * DAY) < 60_000);
});

test("a sandbox's own expiration is used for its snapshots", async (t) => {
  const box = await sandbox(t, { snapshotExpiration: 5 * DAY });
  assert.equal(box.snapshotExpiration, 5 * DAY);
  const { snapshot } = await box.stop();
  assert.ok(Math.abs(snapshot.expiresAt - snapshot.createdAt - 5 * DAY) < 60_000);
  await box.update({ snapshotExpiration: 0 });
  await sh(box, "echo x > x");
  const never = await box.stop();
  assert.equal(never.snapshot.expiresAt, undefined);
});

test("snapshots of a sandbox are listed newest first, a page at a time", async (t) => {
  const box = await sandbox(t);
  const ids = [];
  for (let i = 0; i < 5; i++) {
    await sh(box, `echo ${i} > file`);
    ids.push((await box.snapshot()).snapshotId);
  }
  const { snapshots, pagination } = await box.listSnapshots();
  assert.deepEqual(snapshots.map((s) => s.id), [...ids].reverse());
  assert.deepEqual({ ...pagination }, { count: 5, next: null });
  const pages = [];
  for await (const page of (await box.listSnapshots({ limit: 2, sortOrder: "asc" })).pages()) {
    pages.push(page.snapshots.map((s) => s.id));
  }
  assert.deepEqual(pages, [ids.slice(0, 2), ids.slice(2, 4), ids.slice(4)]);
  const named = await Snapshot.list({ name: box.name, limit: 50 });
  assert.deepEqual(named.snapshots.map((s) => s.id), [...ids].reverse());
  for (const [i, id] of ids.entries()) {
    const { parentId, creationMethod } = snapshots.find((s) => s.id === id);
    assert.equal(parentId, ids[i - 1]);
    assert.equal(creationMethod, "manual");
  }
});

test("deleted snapshots stay in the list, marked", async (t) => {
  const box = await sandbox(t);
  const first = await box.snapshot();
  await sh(box, "echo x > x");
  const second = await box.snapshot();
  await first.delete();
  const { snapshots } = await box.listSnapshots();
  const status = Object.fromEntries(snapshots.map((s) => [s.id, s.status]));
  assert.equal(status[second.snapshotId], "created");
  assert.equal(status[first.snapshotId], "deleted");
});

test("snapshots by stop are automatic", async (t) => {
  const box = await sandbox(t);
  const { snapshot } = await box.stop();
  assert.equal(snapshot.creationMethod, "automatic");
});

test("the tree shows ancestors, descendants and siblings", async (t) => {
  const box = await sandbox(t);
  const ids = [];
  for (let i = 0; i < 4; i++) {
    await sh(box, `echo ${i} > file`);
    ids.push((await box.snapshot()).snapshotId);
  }
  const branch = await from(t, ids[1]);
  await sh(branch, "echo branch > file");
  const side = (await branch.snapshot()).snapshotId;

  const up = await Snapshot.tree({ snapshotId: ids[3], sortOrder: "desc" });
  const ancestors = up.snapshots.map((node) => node.snapshot.id).filter((id) => id !== ids[3]);
  assert.deepEqual(ancestors, [ids[2], ids[1], ids[0]]);
  const two = up.snapshots.find((node) => node.snapshot.id === ids[2]);
  assert.deepEqual(two.siblings.map((s) => s.id), [side]);
  assert.equal(two.count, "2");
  assert.equal(up.pagination.next, null);

  const down = await Snapshot.tree({ snapshotId: ids[0], sortOrder: "asc" });
  const descendants = down.snapshots.map((node) => node.snapshot.id).filter((id) => id !== ids[0]);
  assert.equal(descendants[0], ids[1]);
  assert.ok([ids[2], side].includes(descendants[1]), descendants);

  const paged = await Snapshot.tree({ snapshotId: ids[3], sortOrder: "desc", limit: 1 });
  assert.equal(typeof paged.pagination.next, "string");
  const all = (await paged.toArray()).map((node) => node.snapshot.id).filter((id) => id !== ids[3]);
  assert.deepEqual(all, [ids[2], ids[1], ids[0]]);
});

test("the tree of a snapshot nobody has is not found", async () => {
  await refused(Snapshot.tree({ snapshotId: `snap_${"0".repeat(28)}` }), 404);
});

test("keepLastSnapshots keeps the last ones and deletes the others", async (t) => {
  const box = await sandbox(t, { keepLastSnapshots: { count: 2 } });
  assert.deepEqual(box.keepLastSnapshots, { count: 2, deleteEvicted: true });
  const ids = [];
  for (let i = 0; i < 4; i++) {
    await sh(box, `echo ${i} > file`);
    ids.push((await box.stop()).snapshot.id);
  }
  const { snapshots } = await box.listSnapshots();
  const alive = snapshots.filter((s) => s.status === "created").map((s) => s.id);
  assert.deepEqual(alive, [ids[3], ids[2]]);
  assert.equal(await sh(box, "cat file"), "3");
});

test("keepLastSnapshots can be set, changed and taken away", async (t) => {
  const box = await sandbox(t);
  assert.equal(box.keepLastSnapshots, undefined);
  await box.update({ keepLastSnapshots: { count: 3, expiration: 7 * DAY, deleteEvicted: false } });
  assert.deepEqual(box.keepLastSnapshots, { count: 3, expiration: 7 * DAY, deleteEvicted: false });
  const { snapshot } = await box.stop();
  assert.ok(Math.abs(snapshot.expiresAt - snapshot.createdAt - 7 * DAY) < 60_000);
  await box.update({ keepLastSnapshots: null });
  assert.equal(box.keepLastSnapshots, undefined);
  assert.equal((await Sandbox.get({ name: box.name, resume: false })).keepLastSnapshots, undefined);
});

test("update of currentSnapshotId goes back, for the next session", async (t) => {
  const box = await sandbox(t);
  await sh(box, "echo old > file");
  const old = await box.snapshot();
  await sh(box, "echo new > file");
  await box.snapshot();
  await box.update({ currentSnapshotId: old.snapshotId });
  assert.equal(box.currentSnapshotId, old.snapshotId);
  assert.equal(await sh(box, "cat file"), "old");
  assert.equal(box.sourceSnapshotId, old.snapshotId);
});

test("a deleted sandbox can take its orphans along", async (t) => {
  const box = await sandbox(t);
  await sh(box, "echo x > x");
  const { snapshotId } = await box.snapshot();
  await remove(box.name); // asks for it with deleteOrphanSnapshots
  const found = await Snapshot.get({ snapshotId }).then((s) => s.status, (error) => error.response.status);
  assert.ok(found === "deleted" || found === 404, found);
});
