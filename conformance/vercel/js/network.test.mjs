import assert from "node:assert/strict";
import { test } from "node:test";

import { fresh, remove } from "../support.mjs";
import { Sandbox, refused, sandbox, sh } from "./sdk.mjs";

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
});

test("deny-all leaves the machine's own network alone", async (t) => {
  const box = await sandbox(t, { networkPolicy: "deny-all" });
  assert.equal(await sh(box, "(exec 3<>/dev/tcp/127.0.0.1/9) 2>&1 | grep -o refused | head -1"), "refused");
});

test("what all went to and fro is told when a session ends", async (t) => {
  const box = await sandbox(t);
  await box.stop();
  const { session } = await Sandbox.get({ name: box.name }).then((got) => ({ session: got.currentSession() }));
  assert.equal(session.networkTransfer?.ingress, 0);
  assert.equal(session.networkTransfer?.egress, 0);
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

test("a policy holds at once", async (t) => {
  const box = await sandbox(t, { networkPolicy: "allow-all" });
  const lookup = "getent hosts example.invalid >/dev/null; grep -c nameserver /etc/resolv.conf";
  assert.equal(await sh(box, lookup), "1");
  await box.updateNetworkPolicy({ allow: ["example.com"] });
  const refusedNow = "(exec 3<>/dev/tcp/192.0.2.1/443) 2>/dev/null && echo open || echo closed";
  await box.updateNetworkPolicy("deny-all");
  assert.equal(await sh(box, refusedNow), "closed");
});

test("a source that cannot be fetched leaves no sandbox", async () => {
  const name = fresh("js");
  const source = { type: "git", url: "http://192.0.2.1/nothing.git" };
  const error = await refused(Sandbox.create({ name, source, networkPolicy: "deny-all" }), 400);
  assert.match(error.json.error.message, /nothing\.git/);
  await refused(Sandbox.get({ name }), 404);
});
