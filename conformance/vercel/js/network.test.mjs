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

for (const [what, networkPolicy] of [
  ["a domain", { allow: ["example.com"] }],
  ["a header to be added", { allow: { "example.com": [{ transform: [{ headers: { a: "b" } }] }] } }],
  ["a subnet", { subnets: { allow: ["10.0.0.0/8"] } }],
]) {
  test(`a policy with ${what} is refused while it cannot be kept`, async (t) => {
    const made = Sandbox.create({ name: fresh("js"), networkPolicy });
    made.then((box) => remove(box.name), () => {});
    const error = await refused(made, 400);
    assert.match(error.json.error.message, /networkPolicy/);
    const box = await sandbox(t, { networkPolicy: "deny-all" });
    await refused(box.updateNetworkPolicy(networkPolicy), 400);
    assert.equal((await Sandbox.get({ name: box.name })).networkPolicy, "deny-all");
  });
}
