import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import http from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

import { fresh, outside_port, remove, without_outside } from "../support.mjs";
import { Sandbox, refused, sandbox, sh, since } from "./sdk.mjs";

for (const mode of ["allow-all", "deny-all"]) {
  test(`the policy ${mode} is taken and told back`, async (t) => {
    const box = await sandbox(t, { networkPolicy: mode });
    assert.equal(box.networkPolicy, mode);
    assert.equal((await Sandbox.get({ name: box.name })).networkPolicy, mode);
    assert.equal(box.currentSession().networkPolicy, mode);
  });
}

test("a policy is changed, for the session under way too", async (t) => {
  const box = await sandbox(t);
  await box.update({ networkPolicy: "deny-all" });
  assert.equal(box.networkPolicy, "deny-all");
  assert.equal(box.currentSession().networkPolicy, "deny-all");
  await box.updateNetworkPolicy("allow-all");
  assert.equal(box.currentSession().networkPolicy, "allow-all");
  // In the order and the case it was given.
  const headers = { "X-Key": "v", Authorization: "w" };
  await box.updateNetworkPolicy({ allow: { "Z.Example.com": [{ transform: [{ headers }] }], "a.example.com": [] } });
  const { allow } = (await Sandbox.get({ name: box.name })).networkPolicy;
  assert.deepEqual(Object.keys(allow), ["Z.Example.com", "a.example.com"]);
  assert.deepEqual(Object.keys(allow["Z.Example.com"][0].transform[0].headers), Object.keys(headers));
});

test("deny-all leaves the machine's own network alone", async (t) => {
  const box = await sandbox(t, { networkPolicy: "deny-all" });
  assert.equal(await sh(box, "(exec 3<>/dev/tcp/127.0.0.1/9) 2>&1 | grep -o refused | head -1"), "refused");
});

test("what all went to and fro is told when a session ends", async (t) => {
  const box = await sandbox(t);
  await box.stop();
  const session = (await Sandbox.get({ name: box.name })).currentSession();
  assert.deepEqual(session.networkTransfer, { ingress: 0, egress: 0 });
});

for (const [what, networkPolicy, told] of [
  ["domains", { allow: ["example.com", "*.example.org"] }],
  ["subnets", { allow: [], subnets: { allow: ["10.0.0.0/8"], deny: ["10.1.0.0/16"] } }],
  [
    "headers to be set",
    { allow: { "example.com": [{ match: { method: ["POST"], path: { startsWith: "/v1/" } }, transform: [{ headers: { authorization: "s3cret" } }] }], "*": [] } },
    { allow: { "example.com": [{ match: { method: ["POST"], path: { startsWith: "/v1/" } }, transform: [{ headers: { authorization: "<redacted>" } }] }], "*": [] } },
  ],
  ["requests to be forwarded", { allow: { "example.com": [{ forwardURL: "https://proxy.example.com/in" }] } }],
]) {
  test(`a policy with ${what} is taken and told back`, async (t) => {
    const box = await sandbox(t, { networkPolicy });
    assert.deepEqual(box.networkPolicy, told ?? networkPolicy);
    assert.deepEqual((await Sandbox.get({ name: box.name })).networkPolicy, told ?? networkPolicy);
    const other = await sandbox(t, { networkPolicy: "deny-all" });
    await other.updateNetworkPolicy(networkPolicy);
    assert.deepEqual(other.currentSession().networkPolicy, told ?? networkPolicy);
  });
}

for (const [what, networkPolicy] of [
  ["no domain", { allow: ["https://example.com"] }],
  ["no subnet", { subnets: { allow: ["10.0.0.0/80"] } }],
  ["no header", { allow: { "example.com": [{ transform: [{ headers: { "a b": "c" } }] }] } }],
  ["no expression", { allow: { "example.com": [{ match: { path: { regex: "(" } }, transform: [{ headers: { a: "b" } }] }] } }],
]) {
  test(`a policy with what is ${what} is refused and changes nothing`, async (t) => {
    const made = Sandbox.create({ name: fresh("js"), networkPolicy });
    made.then((box) => remove(box.name), () => {});
    const error = await refused(made, 400);
    assert.match(error.json.error.message, /networkPolicy/);
    const box = await sandbox(t, { networkPolicy: "deny-all" });
    await refused(box.updateNetworkPolicy(networkPolicy), 400);
    assert.equal((await Sandbox.get({ name: box.name })).networkPolicy, "deny-all");
  });
}

/** A server outside, which sandboxes reach as `host.sandkeep.internal`; it tells what it was asked. */
async function outside(t, answer) {
  const asked = [];
  const server = http.createServer((request, response) => {
    asked.push({ url: request.url, ...request.headers });
    response.end(answer ?? "outside");
  });
  await new Promise((resolve) => server.listen(outside_port, "127.0.0.1", resolve));
  t.after(() => server.close());
  return asked;
}
const origin = `http://host.sandkeep.internal:${outside_port}`;
const get = (path) => `curl -s -m 5 ${origin}${path} || echo unreachable`;

test("a policy holds at once", { skip: without_outside }, async (t) => {
  await outside(t);
  const box = await sandbox(t, { networkPolicy: { allow: ["host.sandkeep.internal"] } });
  assert.equal(await sh(box, get("/")), "outside");
  await box.updateNetworkPolicy({ allow: ["example.com"] });
  assert.equal(await sh(box, get("/")), "unreachable");
  await box.updateNetworkPolicy("allow-all");
  assert.equal(await sh(box, get("/")), "outside");
  await box.updateNetworkPolicy("deny-all");
  assert.equal(await sh(box, get("/")), "unreachable");
  await box.stop();
  const { ingress, egress } = (await Sandbox.get({ name: box.name })).currentSession().networkTransfer;
  assert.ok(ingress > 0 && egress > 0, `${ingress} ${egress}`);
});

test("headers are set on the way and requests forwarded", { skip: without_outside }, async (t) => {
  const asked = await outside(t);
  const rules = [
    { match: { path: { startsWith: "/away" } }, forwardURL: `${origin}/proxy` },
    { match: { method: ["GET"], queryString: [{ key: { exact: "k" } }] }, transform: [{ headers: { "x-key": "s3cret" } }] },
  ];
  const box = await sandbox(t, { networkPolicy: { allow: { "host.sandkeep.internal": rules } } });
  assert.equal(await sh(box, `${get("/plain")}; ${get("/with?k=v")}; ${get("/away/a?b=c")}`), "outsideoutsideoutside");
  assert.deepEqual(asked.map((one) => one.url), ["/plain", "/with?k=v", "/proxy/away/a?b=c"]);
  assert.deepEqual(asked.map((one) => one["x-key"]), [undefined, "s3cret", undefined]);
  const told = Object.fromEntries(Object.entries(asked[2]).filter(([name]) => name.startsWith("vercel-forwarded-")));
  assert.deepEqual(told, {
    "vercel-forwarded-host": "host.sandkeep.internal",
    "vercel-forwarded-scheme": "http",
    "vercel-forwarded-port": String(outside_port),
    "vercel-forwarded-path": "/away/a?b=c",
  });
});

test("requests are answered on the way", { skip: without_outside || since(3, "`response`") }, async (t) => {
  const asked = await outside(t);
  const response = { statusCode: 403, body: "not that", contentType: "text/plain" };
  const rules = [{ match: { path: { exact: "/fine" } }, transform: [] }, { response }];
  const box = await sandbox(t, { networkPolicy: { allow: { "host.sandkeep.internal": rules } } });
  assert.equal(await sh(box, `${get("/fine")}; ${get("/other")}`), "outsidenot that");
  assert.equal(asked.length, 1);
});

test("a sandbox begins with an archive", { skip: without_outside }, async (t) => {
  const archive = execFileSync("tar", ["-cz", "--transform=s/.*/from-outside/", fileURLToPath(import.meta.url)]);
  await outside(t, archive);
  const box = await sandbox(t, { source: { type: "tarball", url: `${origin}/a.tgz` } });
  assert.equal(await sh(box, "ls"), "from-outside");
});

test("a sandbox begins with a repository", { skip: without_outside }, async (t) => {
  const root = mkdtempSync(join(tmpdir(), "repository-"));
  t.after(() => rmSync(root, { recursive: true }));
  const git = (...args) => execFileSync("git", ["-C", root, "-c", "user.name=n", "-c", "user.email=e@example.com", ...args]);
  git("init", "-q", "-b", "trunk", "work");
  writeFileSync(join(root, "work/README"), "from a repository");
  git("-C", "work", "add", "README");
  git("-C", "work", "commit", "-q", "-m", "first");
  git("clone", "-q", "--bare", "work", "thing.git");
  git("-C", "thing.git", "update-server-info");
  const server = http.createServer((request, response) => {
    try {
      response.end(readFileSync(join(root, new URL(request.url, origin).pathname)));
    } catch {
      response.writeHead(404).end();
    }
  });
  await new Promise((resolve) => server.listen(outside_port, "127.0.0.1", resolve));
  t.after(() => server.close());
  const source = { type: "git", url: `${origin}/thing.git` };
  const box = await sandbox(t, { source });
  // 2.x asks the second version of the endpoint, which takes the working directory itself.
  const second = Boolean(since(3, "the third version of create"));
  const place = second ? "." : "thing";
  assert.equal(await sh(box, `cat ${place}/README; git -C ${place} branch --show-current`), "from a repositorytrunk");
  const pinned = await sandbox(t, { source: { ...source, revision: "trunk" } });
  assert.equal(await sh(pinned, `cat ${place}/README`), "from a repository");
});

test("a source that cannot be fetched leaves no sandbox", async () => {
  const name = fresh("js");
  const source = { type: "git", url: "http://192.0.2.1/nothing.git" };
  const error = await refused(Sandbox.create({ name, source, networkPolicy: "deny-all" }), 400);
  assert.match(error.json.error.message, /nothing\.git/);
  await refused(Sandbox.get({ name }), 404);
});
