import assert from "node:assert/strict";
import { test } from "node:test";

import { fresh, remove } from "../support.mjs";
import { APIError, Sandbox, refused, sandbox, sh, since } from "./sdk.mjs";

test("create without anything gives a running sandbox that is usable at once", async (t) => {
  const before = Date.now();
  const made = await Sandbox.create();
  t.after(() => remove(made.name));
  assert.match(made.name, /^[a-zA-Z0-9_-]{1,128}$/);
  assert.equal(made.status, "running");
  assert.equal(made.persistent, true);
  assert.equal(made.timeout, 300_000);
  assert.equal(made.vcpus, 2);
  assert.equal(made.memory, 4096);
  assert.equal(made.currentSnapshotId, undefined);
  assert.equal(made.sourceSnapshotId, undefined);
  assert.deepEqual(made.routes, []);
  assert.ok(made.cwd.startsWith("/"), made.cwd);
  assert.ok(Math.abs(made.createdAt.getTime() - before) < 60_000);
  const session = made.currentSession();
  assert.equal(session.status, "running");
  assert.equal(session.timeout, 300_000);
  assert.ok(session.startedAt.getTime() >= session.requestedAt.getTime());
  const left = made.expiresAt.getTime() - session.startedAt.getTime();
  assert.equal(left, 300_000);
  assert.equal(await sh(made, "echo hello"), "hello");
});

test("create takes resources, timeout, env, tags and ports", async (t) => {
  const made = await sandbox(t, {
    resources: { vcpus: 4 },
    timeout: 120_000,
    env: { GREETING: "hello world" },
    tags: { purpose: "test", size: "xl" },
    ports: [3000, 8080],
  });
  assert.equal(made.vcpus, 4);
  assert.equal(made.memory, 8192);
  assert.equal(made.timeout, 120_000);
  assert.equal(made.currentSession().timeout, 120_000);
  assert.deepEqual(made.tags, { purpose: "test", size: "xl" });
  assert.deepEqual(made.routes.map((route) => route.port).sort(), [3000, 8080]);
  assert.notEqual(made.domain(3000), made.domain(8080));
  assert.equal(await sh(made, "echo $GREETING"), "hello world");
});

test("a second create with the same name is a bad request that names the sandbox", async (t) => {
  const made = await sandbox(t);
  const error = await refused(Sandbox.create({ name: made.name }), 400, "bad_request");
  assert.match(error.json.error.message, new RegExp(made.name));
  assert.equal(await sh(made, "echo unharmed"), "unharmed");
});

for (const [what, params] of [
  ["a name with a space", { name: "no spaces" }],
  ["a name that is too long", { name: "n".repeat(129) }],
  ["too many ports", { ports: Array.from({ length: 16 }, (_, i) => 3000 + i) }],
  ["a privileged port", { ports: [80] }],
  ["a port twice", { ports: [3000, 3000] }],
  ["no processor", { resources: { vcpus: 0 } }],
  ["an odd number of processors", { resources: { vcpus: 3 } }],
  ["a timeout of nothing", { timeout: 0 }],
  ["six tags", { tags: Object.fromEntries([1, 2, 3, 4, 5, 6].map((n) => [`t${n}`, "v"])) }],
  ["a tag that is too long", { tags: { t: "v".repeat(257) } }],
  ["a snapshot that expires in a minute", { snapshotExpiration: 60_000 }],
  ["keeping no snapshot", { keepLastSnapshots: { count: 0 } }],
  ["keeping too many snapshots", { keepLastSnapshots: { count: 11 } }],
  ["a runtime nobody has", { runtime: "cobol60" }],
]) {
  test(`create refuses ${what}`, async () => {
    const name = params.name ?? fresh("bad");
    const made = Sandbox.create({ name, ...params });
    made.then((sandbox) => remove(sandbox.name), () => {});
    const error = await refused(made, 400, "bad_request");
    assert.notEqual(error.json.error.message, "");
    await refused(Sandbox.get({ name: encodeURIComponent(name) === name ? name : "x" + fresh("y") }), 404);
  });
}

test("create from a snapshot that does not exist is not found", async () => {
  const source = { type: "snapshot", snapshotId: `snap_${"0".repeat(28)}` };
  await refused(Sandbox.create({ name: fresh("js"), source }), 404, "not_found");
});

test("create from an image that does not exist is not found and says what there is", async () => {
  const made = Sandbox.create({ name: fresh("js"), image: "nobody/has/this:image" });
  const error = await made.then(() => assert.fail("it was created"), (error) => error);
  assert.ok(error instanceof APIError, error.stack);
  assert.ok([400, 404].includes(error.response.status), error.text);
  assert.match(error.json.error.message, /nobody\/has\/this/);
});

test("get finds a running sandbox and does not resume it", async (t) => {
  const made = await sandbox(t);
  let resumed = 0;
  const got = await Sandbox.get({ name: made.name, onResume: () => void resumed++ });
  assert.equal(got.name, made.name);
  assert.equal(got.currentSession().sessionId, made.currentSession().sessionId);
  const again = await Sandbox.get({ name: made.name, resume: true, onResume: () => void resumed++ });
  assert.equal(again.currentSession().sessionId, made.currentSession().sessionId);
  assert.equal(resumed, 0);
});

test("get of a name nobody has is not found", async () => {
  const error = await refused(Sandbox.get({ name: fresh("nobody") }), 404, "not_found");
  assert.equal(error.sessionId, undefined);
});

test("get with resume wakes a stopped sandbox once, with onResume", async (t) => {
  const made = await sandbox(t);
  await sh(made, "echo kept > kept.txt");
  await made.stop();
  const asleep = await Sandbox.get({ name: made.name, resume: false });
  assert.equal(asleep.status, "stopped");
  assert.equal(asleep.currentSession().sessionId, made.currentSession().sessionId);
  const seen = [];
  const onResume = async (box) => void seen.push(await sh(box, "cat kept.txt"));
  const awake = await Sandbox.get({ name: made.name, resume: true, onResume });
  assert.deepEqual(seen, ["kept"]);
  assert.equal(awake.status, "running");
  assert.notEqual(awake.currentSession().sessionId, made.currentSession().sessionId);
  assert.equal(awake.sourceSnapshotId, asleep.currentSnapshotId);
});

test("getOrCreate creates once and calls onCreate once", async (t) => {
  const name = fresh("js");
  t.after(() => remove(name));
  const calls = [];
  const params = {
    name,
    onCreate: async (box) => {
      calls.push("create");
      await box.writeFiles([{ path: "made.txt", content: Buffer.from("by onCreate") }]);
    },
    onResume: () => void calls.push("resume"),
  };
  const first = await Sandbox.getOrCreate(params);
  const second = await Sandbox.getOrCreate(params);
  assert.deepEqual(calls, ["create"]);
  assert.equal(second.currentSession().sessionId, first.currentSession().sessionId);
  assert.equal((await second.readFileToBuffer({ path: "made.txt" })).toString(), "by onCreate");
  await first.stop();
  const third = await Sandbox.getOrCreate(params);
  assert.equal((await third.readFileToBuffer({ path: "made.txt" })).toString(), "by onCreate");
  assert.deepEqual(calls, ["create", "resume"]);
});

test("getOrCreate without a name always creates", async (t) => {
  let created = 0;
  const one = await Sandbox.getOrCreate({ onCreate: () => void created++ });
  t.after(() => remove(one.name));
  const two = await Sandbox.getOrCreate({ onCreate: () => void created++ });
  t.after(() => remove(two.name));
  assert.notEqual(one.name, two.name);
  assert.equal(created, 2);
});

test("many getOrCreate at once end up with one sandbox, and one session", async (t) => {
  const name = fresh("race");
  t.after(() => remove(name));
  let created = 0;
  const onCreate = () => void created++;
  const boxes = await Promise.all(Array.from({ length: 8 }, () => Sandbox.getOrCreate({ name, onCreate })));
  assert.equal(created, 1, "only the creator runs onCreate");
  // Who got it before it was up is sent on by its first call, as after any resume.
  await Promise.all(boxes.map((box) => sh(box, "echo up")));
  assert.equal(new Set(boxes.map((box) => box.currentSession().sessionId)).size, 1);
  assert.equal((await boxes[0].listSessions()).sessions.length, 1);
});

test("many resumes at once start one session", async (t) => {
  const made = await sandbox(t);
  await made.stop();
  let resumed = 0;
  const onResume = () => void resumed++;
  const all = await Promise.all(
    Array.from({ length: 8 }, () => Sandbox.get({ name: made.name, resume: true, onResume })),
  );
  assert.equal(new Set(all.map((box) => box.currentSession().sessionId)).size, 1);
  assert.equal(resumed, 1);
  const { sessions } = await made.listSessions();
  assert.equal(sessions.length, 2);
});

test("a sandbox named like a part of an address is found", async (t) => {
  for (const name of ["sessions", "snapshots", "drives"].map((word) => `${word}-${fresh("x")}`)) {
    const made = await Sandbox.create({ name });
    t.after(() => remove(name));
    assert.equal((await Sandbox.get({ name })).name, made.name);
  }
});

test("update changes what the next session gets", async (t) => {
  const made = await sandbox(t, { timeout: 60_000 });
  await made.stop();
  await made.update({ resources: { vcpus: 4 }, timeout: 30_000, persistent: false, tags: { a: "b" } });
  assert.equal(made.vcpus, 4);
  const got = await Sandbox.get({ name: made.name, resume: false });
  assert.equal(got.vcpus, 4);
  assert.equal(got.memory, 8192);
  assert.equal(got.timeout, 30_000);
  assert.equal(got.persistent, false);
  assert.deepEqual(got.tags, { a: "b" });
  await got.update({ tags: {}, persistent: true });
  assert.ok(got.tags === undefined || Object.keys(got.tags).length === 0, JSON.stringify(got.tags));
  assert.equal(await sh(got, "nproc >/dev/null; echo up"), "up");
  assert.equal(got.currentSession().timeout, 30_000);
  assert.equal(got.currentSession().vcpus, 4);
});

test("a longer timeout reaches the session that runs, a shorter one does not", async (t) => {
  const made = await sandbox(t, { timeout: 60_000 });
  const session = made.currentSession();
  await made.update({ timeout: 90_000 });
  assert.equal(session.timeout, 90_000);
  await made.update({ timeout: 45_000 });
  assert.equal(session.timeout, 90_000);
  assert.equal(made.timeout, 45_000);
});

test("update of ports replaces them all, while the session runs", async (t) => {
  const made = await sandbox(t, { ports: [3000] });
  const before = made.domain(3000);
  await made.update({ ports: [3000, 4000] });
  assert.equal(made.domain(3000), before, "an address that was given out stays");
  assert.ok(made.domain(4000));
  await made.update({ ports: [] });
  assert.deepEqual(made.routes, []);
  assert.throws(() => made.domain(3000), /No route for port 3000/);
});

for (const [what, params] of [
  ["an odd number of processors", { resources: { vcpus: 3 } }],
  ["a privileged port", { ports: [22] }],
  ["too many tags", { tags: { a: "1", b: "1", c: "1", d: "1", e: "1", f: "1" } }],
]) {
  test(`update refuses ${what} and changes nothing`, async (t) => {
    const made = await sandbox(t, { tags: { kept: "yes" } });
    await refused(made.update({ ...params, timeout: 77_000 }), 400, "bad_request");
    const got = await Sandbox.get({ name: made.name });
    assert.equal(got.timeout, 300_000);
    assert.deepEqual(got.tags, { kept: "yes" });
  });
}

test("update to a snapshot nobody has is not found", async (t) => {
  const made = await sandbox(t);
  await refused(made.update({ currentSnapshotId: `snap_${"0".repeat(28)}` }), 404);
});

test("delete ends the session, and the name is free again", async (t) => {
  const made = await sandbox(t);
  await made.delete();
  await refused(Sandbox.get({ name: made.name }), 404, "not_found");
  await refused(made.delete(), 404, "not_found");
  await refused(made.currentSession().runCommand("true"), 404);
  const again = await Sandbox.create({ name: made.name });
  assert.notEqual(again.currentSession().sessionId, made.currentSession().sessionId);
});

test("a block that ends stops its sandbox", async (t) => {
  const made = await sandbox(t);
  await made[Symbol.asyncDispose]();
  assert.equal((await Sandbox.get({ name: made.name, resume: false })).status, "stopped");
});

test("a fetch of one's own is used for everything", async (t) => {
  const seen = [];
  const mine = (input, init) => (seen.push(`${init.method} ${new URL(input).pathname}`), fetch(input, init));
  const name = fresh("js");
  const made = await Sandbox.create({ name, fetch: mine });
  t.after(() => remove(name));
  await made.runCommand("true");
  assert.equal(seen.length, 2);
  assert.match(seen[0], /^POST \/api\/v[23]\/sandboxes$/);
  assert.match(seen[1], /^POST \/api\/v2\/sandboxes\/sessions\/[^/]+\/cmd$/);
});

test("explicit credentials are taken, and wrong ones are refused", async () => {
  const { project, team, token } = await import("../support.mjs");
  const list = await Sandbox.list({ token, teamId: team, projectId: project, limit: 1 });
  assert.ok(Array.isArray(list.sandboxes));
  const wrong = Sandbox.list({ token: "no-such-key", teamId: team, projectId: project });
  const error = await wrong.then(() => assert.fail("it was let in"), (error) => error);
  assert.ok([401, 403].includes(error.response.status), error.text);
});

test("regions are labels that are told back", { skip: since(3, "regions") }, async (t) => {
  const plain = await sandbox(t);
  assert.equal(plain.currentSession().region, plain.region);
  const made = await sandbox(t, { region: "fra1", failoverRegions: ["sfo1"] });
  assert.equal(made.region, "fra1");
  assert.deepEqual(made.failoverRegions, ["sfo1"]);
  await made.update({ failoverRegions: [] });
  assert.deepEqual(made.failoverRegions, []);
});

test("a private network is refused, not ignored", { skip: since(3, "private networks") }, async () => {
  const made = Sandbox.create({ name: fresh("js"), networkId: "net_1" });
  made.then((box) => remove(box.name), () => {});
  const error = await refused(made, 400);
  assert.match(error.json.error.message, /networkId/);
});

for (const source of [
  { type: "git", url: "https://nobody.invalid/repo.git" },
  { type: "tarball", url: "https://nobody.invalid/files.tgz" },
]) {
  test(`a ${source.type} source that cannot be had makes no sandbox, and the error names it`, async () => {
    const made = Sandbox.create({ name: fresh("js"), source });
    made.then((box) => remove(box.name), () => {});
    const error = await refused(made, 400);
    assert.ok(error.json.error.message.includes(source.url), error.json.error.message);
  });
}
