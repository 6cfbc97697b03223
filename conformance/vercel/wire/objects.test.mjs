import assert from "node:assert/strict";
import { test } from "node:test";

import { ask, fresh, project, remove, team, token, url } from "../support.mjs";
import { answered, no_nulls, query, refused, sandbox } from "./wire.mjs";

const kinds = (object) => Object.fromEntries(Object.entries(object).map(([key, value]) => [key, typeof value]));

const SESSION = {
  id: "string",
  memory: "number",
  vcpus: "number",
  region: "string",
  runtime: "string",
  timeout: "number",
  status: "string",
  requestedAt: "number",
  startedAt: "number",
  createdAt: "number",
  cwd: "string",
  updatedAt: "number",
  interactivePort: "number",
  projectId: "string",
  sourceSandboxName: "string",
};

const SANDBOX = {
  name: "string",
  persistent: "boolean",
  region: "string",
  vcpus: "number",
  memory: "number",
  timeout: "number",
  createdAt: "number",
  updatedAt: "number",
  currentSessionId: "string",
  status: "string",
  statusUpdatedAt: "number",
  cwd: "string",
};

const SNAPSHOT = {
  id: "string",
  sourceSessionId: "string",
  region: "string",
  status: "string",
  sizeBytes: "number",
  createdAt: "number",
  updatedAt: "number",
  lastUsedAt: "number",
  creationMethod: "string",
};

function has(object, fields) {
  const found = kinds(object);
  for (const [name, kind] of Object.entries(fields)) assert.equal(found[name], kind, `${name} in ${JSON.stringify(object)}`);
}

test("a created sandbox has every field its readers need, none of them null", async (t) => {
  const { sandbox: made, session, routes } = await sandbox(t, { ports: [3000], tags: { a: "b" }, env: { SECRET: "s" } });
  has(made, { ...SANDBOX, expiresAt: "number" });
  has(session, SESSION);
  assert.equal(made.currentSessionId, session.id);
  assert.equal(made.status, "running");
  assert.equal(session.status, "running");
  assert.equal(session.sourceSandboxName, made.name);
  assert.equal(session.projectId, project);
  assert.ok(session.interactivePort > 0);
  assert.equal(session.requestedStopAt, undefined);
  assert.equal(session.stoppedAt, undefined);
  assert.equal(session.duration, undefined);
  assert.equal(session.activeCpuDurationMs, undefined, "usage is told when the session is over");
  assert.equal(session.networkTransfer, undefined);
  assert.ok(Math.abs(session.startedAt - session.createdAt) < 10_000, "the command line counts from createdAt");
  assert.equal(made.expiresAt, session.startedAt + session.timeout);
  assert.ok(!JSON.stringify({ made, session }).includes("SECRET"), "an environment is never told");
  assert.deepEqual(routes.map(kinds), [{ url: "string", subdomain: "string", port: "number" }]);
});

test("a stopped one has its usage, its snapshot and its totals", async (t) => {
  const { session_path, name } = await sandbox(t);
  const { json } = await answered(200, "POST", `${session_path}/stop`, { query });
  no_nulls(json);
  has(json.session, { ...SESSION, stoppedAt: "number", duration: "number", activeCpuDurationMs: "number", networkTransfer: "object" });
  assert.deepEqual(kinds(json.session.networkTransfer), { ingress: "number", egress: "number" });
  assert.equal(json.session.status, "stopped");
  has(json.snapshot, SNAPSHOT);
  assert.match(json.snapshot.id, /^snap_[A-Za-z0-9]+$/);
  assert.ok(json.snapshot.id.length >= 32, "the tree wants ids of 32 characters or more");
  has(json.sandbox, { ...SANDBOX, totalDurationMs: "number", totalActiveCpuDurationMs: "number", totalIngressBytes: "number", totalEgressBytes: "number" });
  assert.equal(json.sandbox.currentSnapshotId, json.snapshot.id);
  assert.equal(json.sandbox.expiresAt, undefined, "only while it runs");
  const got = (await answered(200, "GET", `/api/v2/sandboxes/${name}`, { query })).json;
  no_nulls(got);
  assert.equal(got.resumed, false);
  assert.equal(got.session.id, json.session.id);
  assert.equal(got.sandbox.status, "stopped");
});

test("times are whole milliseconds of our days", async (t) => {
  const { sandbox: made, session } = await sandbox(t);
  for (const time of [made.createdAt, made.updatedAt, made.statusUpdatedAt, made.expiresAt, session.createdAt, session.startedAt, session.requestedAt, session.updatedAt]) {
    assert.ok(Number.isInteger(time) && Math.abs(time - Date.now()) < 3_600_000, `${time}`);
  }
});

test("resume is told, and only for the call that resumed", async (t) => {
  const { session_path, name, session } = await sandbox(t);
  await answered(200, "POST", `${session_path}/stop`, { query });
  const first = (await answered(200, "GET", `/api/v2/sandboxes/${name}`, { query: { ...query, resume: "true" } })).json;
  assert.equal(first.resumed, true);
  assert.notEqual(first.session.id, session.id);
  const second = (await answered(200, "GET", `/api/v2/sandboxes/${name}`, { query: { ...query, resume: "true" } })).json;
  assert.equal(second.resumed, false);
  assert.equal(second.session.id, first.session.id);
});

test("system routes are shown to who asks for them", async (t) => {
  const { name, session, session_path } = await sandbox(t, { ports: [3000] });
  for (const path of [`/api/v2/sandboxes/${name}`, session_path]) {
    const plain = (await answered(200, "GET", path, { query })).json;
    assert.deepEqual(plain.routes.map((route) => route.port), [3000]);
    const asked = (await answered(200, "GET", path, { query: { ...query, __includeSystemRoutes: "true" } })).json;
    const system = asked.routes.filter((route) => route.system === true).map((route) => route.port);
    assert.ok(system.length === 0 || system.includes(session.interactivePort), JSON.stringify(asked.routes));
  }
});

test("the same is served with and without /api, and v4 creates like v3", async (t) => {
  const { name, session } = await sandbox(t);
  for (const prefix of ["/api/v2", "/v2"]) {
    const { json } = await answered(200, "GET", `${prefix}/sandboxes/${name}`, { query });
    assert.equal(json.sandbox.name, name);
    await answered(200, "GET", `${prefix}/sandboxes/sessions/${session.id}`, { query });
    await answered(200, "GET", `${prefix}/sandboxes`, { query: { teamId: team, project, limit: 1 } });
  }
  for (const path of ["/api/v2/sandboxes", "/v3/sandboxes", "/api/v4/sandboxes", "/v4/sandboxes"]) {
    const own = fresh("wire");
    t.after(() => remove(own));
    const { json } = await answered(200, "POST", path, { query, body: { projectId: project, name: own } });
    assert.equal(json.sandbox.name, own);
  }
  await refused(400, "bad_request", "POST", "/api/v4/sandboxes", { query, body: { projectId: project, runtime: "node24" } });
});

test("v4 keeps one snapshot for a week unless told otherwise", async (t) => {
  const name = fresh("wire");
  t.after(() => remove(name));
  const { json } = await answered(200, "POST", "/api/v4/sandboxes", { query, body: { projectId: project, name } });
  assert.equal(json.sandbox.snapshotExpiration, 7 * 24 * 3600 * 1000);
  assert.equal(json.sandbox.keepLastSnapshots.count, 1);
});

test("an unknown property is refused by name, a private one is let through", async (t) => {
  const body = { projectId: project, name: fresh("wire"), colour: "red" };
  const error = await refused(400, "bad_request", "POST", "/api/v3/sandboxes", { query, body });
  assert.match(error.message, /colour/);
  await sandbox(t, { __interactive: true, __anything: { at: "all" } });
});

for (const [what, body] of [
  ["no JSON", "{"],
  ["a list", "[]"],
  ["a number for a name", { name: 7 }],
  ["a name with a slash", { name: "a/b" }],
  ["a port that is text", { ports: ["3000"] }],
  ["a port that is none", { ports: [70000] }],
  ["a port below the user's", { ports: [1023] }],
  ["half a processor", { resources: { vcpus: 1.5 } }],
  ["a negative timeout", { timeout: -1 }],
  ["a timeout beyond the longest", { timeout: 400 * 24 * 3600 * 1000 }],
  ["an environment of numbers", { env: { A: 1 } }],
  ["a name of a variable that is none", { env: { "A=B": "1" } }],
  ["tags that are a list", { tags: ["a"] }],
  ["a source nobody knows", { source: { type: "floppy" } }],
  ["a source without its snapshot", { source: { type: "snapshot" } }],
  ["runtime and image together", { runtime: "node24", image: "x" }],
  ["an unknown property inside", { resources: { vcpus: 2, gpus: 1 } }],
]) {
  test(`create with ${what} is a bad request and leaves nothing`, async () => {
    const name = fresh("wire");
    const sent = typeof body === "string" ? body : { projectId: project, name, ...body };
    await refused(400, "bad_request", "POST", "/api/v3/sandboxes", { query, body: sent });
    await refused(404, "not_found", "GET", `/api/v2/sandboxes/${name}`, { query });
  });
}

test("a duplicate name is a bad request that says what to do", async (t) => {
  const { name } = await sandbox(t);
  const error = await refused(400, "bad_request", "POST", "/api/v3/sandboxes", { query, body: { projectId: project, name } });
  assert.match(error.message, /exists/);
});

test("who sends no token, or a wrong one, is not let in; another team is forbidden", async () => {
  const path = "/api/v2/sandboxes";
  await refused(401, undefined, "GET", path, { query: { project }, bearer: null });
  await refused(401, undefined, "GET", path, { query: { project }, bearer: "nonsense" });
  const [head, , tail] = token.split(".");
  const forged = Buffer.from(JSON.stringify({ owner_id: team, project_id: project, exp: 9e9 })).toString("base64url");
  await refused(401, undefined, "GET", path, { query: { project }, bearer: `${head}.${forged}.${tail}` });
  const unsigned = `${Buffer.from('{"alg":"none"}').toString("base64url")}.${forged}.`;
  await refused(401, undefined, "GET", path, { query: { project }, bearer: unsigned });
  await refused(403, "forbidden", "GET", path, { query: { project, teamId: "team_other" } });
});

test("a project that is not the token's is forbidden or unknown", async () => {
  const { status, json } = await ask("GET", "/api/v2/sandboxes", { query: { teamId: team, project: "prj_other" } });
  assert.ok([403, 404].includes(status), `${status}`);
  assert.equal(typeof json.error.code, "string");
});

test("a path nobody knows is not found, in the same form", async () => {
  await refused(404, "not_found", "GET", "/api/v2/nonsense", { query });
  await refused(404, "not_found", "GET", `/api/v2/sandboxes/${fresh("nobody")}`, { query });
  await refused(404, "not_found", "GET", "/api/v2/sandboxes/sessions/sbx_nobody", { query });
  await refused(404, "not_found", "GET", "/api/v2/sandboxes/snapshots/snap_nobody", { query });
  await refused(404, "not_found", "GET", "/api/v2/sandboxes/drives/nobody", { query });
  await refused(404, "not_found", "DELETE", `/api/v2/sandboxes/${fresh("nobody")}`, { query });
  await refused(404, "not_found", "PATCH", `/api/v2/sandboxes/${fresh("nobody")}`, { query, body: {} });
  await refused(404, undefined, "POST", "/api/v2/sandboxes/sessions/sbx_nobody/cmd", { query, body: { command: "true" } });
});

test("a method nobody offers is refused in the same form", async () => {
  const { status, json } = await ask("PUT", "/api/v2/sandboxes", { query });
  assert.ok([404, 405].includes(status), `${status}`);
  assert.equal(typeof json.error.message, "string");
});

test("what the command line asks an account is answered", async () => {
  const { user } = (await answered(200, "GET", "/api/v2/user")).json;
  assert.equal(typeof user.username, "string");
  assert.ok(user.defaultTeamId === null || typeof user.defaultTeamId === "string");
  const { teams, pagination } = (await answered(200, "GET", "/api/v2/teams", { query: { limit: 20 } })).json;
  assert.deepEqual(teams.map((one) => one.id), [team]);
  assert.equal(typeof teams[0].slug, "string");
  assert.equal(typeof teams[0].membership.role, "string");
  assert.equal(typeof teams[0].billing.plan, "string");
  assert.equal(pagination.next, null);
  assert.equal((await answered(200, "GET", `/api/v2/teams/${team}`)).json.slug, teams[0].slug);
  await answered(200, "GET", "/api/v2/projects/vercel-sandbox-default-project", { query: { teamId: team } });
  await answered(200, "GET", "/v2/user");
});

test("the health of the server is for everyone", async () => {
  const response = await fetch(`${url}/health`);
  assert.equal(response.status, 200);
});

test("a list of everything has its pages, and every object in it is whole", async (t) => {
  await sandbox(t);
  for (const [path, key] of [
    ["/api/v2/sandboxes", "sandboxes"],
    ["/api/v2/sandboxes/sessions", "sessions"],
    ["/api/v2/sandboxes/snapshots", "snapshots"],
    ["/api/v2/sandboxes/drives", "drives"],
  ]) {
    const { json } = await answered(200, "GET", path, { query: { ...query, project, limit: 50 } });
    assert.ok(Array.isArray(json[key]), path);
    assert.equal(json.pagination.count, json[key].length);
    assert.ok(json.pagination.next === null || typeof json.pagination.next === "string");
    no_nulls(json);
    await refused(400, "bad_request", "GET", path, { query: { ...query, project, limit: 0 } });
    await refused(400, "bad_request", "GET", path, { query: { ...query, project, limit: 51 } });
    await refused(400, "bad_request", "GET", path, { query: { ...query, project, cursor: "nonsense" } });
  }
});

test("several tags in one filter must all fit", async (t) => {
  const mark = fresh("mark");
  const { name } = await sandbox(t, { tags: { mark, colour: "red" } });
  await sandbox(t, { tags: { mark, colour: "blue" } });
  const listed = async (tags) => {
    const { json } = await answered(200, "GET", "/api/v2/sandboxes", { query: { teamId: team, project, tags } });
    return json.sandboxes.map((box) => box.name);
  };
  assert.equal((await listed([`mark:${mark}`])).length, 2);
  assert.deepEqual(await listed([`mark:${mark}`, "colour:red"]), [name]);
});

test("lists can be narrowed to a state", async (t) => {
  const mark = fresh("mark");
  const running = await sandbox(t, { tags: { mark } });
  const stopped = await sandbox(t, { tags: { mark } });
  await answered(200, "POST", `${stopped.session_path}/stop`, { query });
  for (const [status, name] of [["running", running.name], ["stopped", stopped.name]]) {
    const { json } = await answered(200, "GET", "/api/v2/sandboxes", { query: { teamId: team, project, status, tags: `mark:${mark}` } });
    assert.deepEqual(json.sandboxes.map((box) => box.name), [name]);
  }
  await refused(400, "bad_request", "GET", "/api/v2/sandboxes", { query: { teamId: team, project, status: "asleep" } });
});

test("update answers with the sandbox, and with routes when ports changed", async (t) => {
  const { name } = await sandbox(t);
  const path = `/api/v2/sandboxes/${name}`;
  const plain = (await answered(200, "PATCH", path, { query, body: { tags: { a: "b" } } })).json;
  assert.deepEqual(plain.sandbox.tags, { a: "b" });
  const ports = (await answered(200, "PATCH", path, { query, body: { ports: [3000] } })).json;
  assert.deepEqual(ports.routes.map((route) => route.port), [3000]);
  await answered(200, "PATCH", path, { query, body: {} });
  await refused(400, "bad_request", "PATCH", path, { query, body: { colour: "red" } });
  await refused(400, "bad_request", "PATCH", path, { query, body: { name: "other" } });
  const env = (await answered(200, "PATCH", path, { query, body: { env: { A: "b" } } })).json;
  no_nulls(env);
});

test("delete answers with what was deleted", async (t) => {
  const { name } = await sandbox(t);
  const { json } = await answered(200, "DELETE", `/api/v2/sandboxes/${name}`, { query });
  assert.equal(json.sandbox.name, name);
  no_nulls(json);
});

test("a snapshot need not stop the session, if asked that way", async (t) => {
  const { session, session_path } = await sandbox(t);
  for (const asked of [
    { query, headers: { "x-sandkeep-keep-running": "true" } },
    { query: { ...query, keepRunning: "true" } },
  ]) {
    const { json } = await answered(201, "POST", `${session_path}/snapshot`, asked);
    no_nulls(json);
    assert.equal(json.session.id, session.id);
    assert.equal(json.session.status, "running");
    assert.equal(json.snapshot.status, "created");
  }
  assert.equal((await answered(200, "GET", session_path, { query })).json.session.status, "running");
  const { json } = await answered(201, "POST", `${session_path}/snapshot`, { query });
  assert.equal(json.session.status, "stopped", "by itself it stops, as their clients expect");
});

test("policies are asked in one form and told in another, without values", async (t) => {
  const networkPolicy = {
    allow: { "a.com": [{ match: { path: { regex: "^/x" } }, transform: [{ headers: { Authorization: "s3cret" } }] }, { response: { statusCode: 404 } }] },
    subnets: { allow: ["10.0.0.0/8"] },
  };
  const { sandbox: made, session, session_path } = await sandbox(t, { networkPolicy });
  const told = {
    mode: "custom",
    allowedDomains: ["a.com"],
    allowedCIDRs: ["10.0.0.0/8"],
    injectionRules: [{ domain: "a.com", headerNames: ["Authorization"], match: { path: { regex: "^/x" } }, matchDimensions: ["path"] }],
    responseRules: [{ domain: "a.com", statusCode: 404 }],
  };
  assert.deepEqual(made.networkPolicy, told);
  assert.deepEqual(session.networkPolicy, told);
  const legacy = { mode: "default-deny", allowedDomains: ["b.com"] };
  const { json } = await answered(200, "POST", `${session_path}/network-policy`, { query, body: legacy });
  assert.deepEqual(json.session.networkPolicy, { mode: "custom", allowedDomains: ["b.com"] });
  const wrong = { allow: { "a.com": [{ forwardURL: "https://b.com", transform: [] }] } };
  await refused(400, "bad_request", "POST", `${session_path}/network-policy`, { query, body: wrong });
});
