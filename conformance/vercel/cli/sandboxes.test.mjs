import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";

import { ask, fresh, project, remove, team, url } from "../support.mjs";
import { cli, cli_with, created, home, made, ok, table } from "./cli.mjs";

test("create prints the name to scripts and a summary to people", async (t) => {
  const name = fresh("cli");
  t.after(() => remove(name));
  const done = await ok("create", "--name", name, "--publish-port", "3000", "--tag", "a=b", "--env", "X=y");
  assert.equal(done.stdout, name);
  assert.match(done.stderr, /Sandbox .*created/s);
  assert.match(done.stderr, new RegExp(`3000 -> ${url.replace(/^https?:\/\/|:.*$/g, "") ? "http" : ""}`));
  assert.match(done.stderr, new RegExp(`sandbox ssh ${name}`));
  assert.equal((await ok("exec", name, "sh", "-c", "echo $X")).stdout, "y\n");
});

test("create without a name invents one", async (t) => {
  const name = (await ok("create")).stdout.trim();
  t.after(() => remove(name));
  assert.match(name, /^[a-zA-Z0-9_-]+$/);
});

test("create --non-persistent keeps nothing", async (t) => {
  const name = await created(t, "--non-persistent", "--timeout", "2m", "--vcpus", "4");
  const config = (await ok("config", "list", name)).all;
  assert.match(config, /persistent\W+false/i);
  await ok("stop", name);
  const again = await cli("exec", name, "true");
  assert.notEqual(again.code, 0, "there is nothing to resume");
  assert.match(again.all, /snapshot/i);
});

test("create with a name that is taken fails and says so", async (t) => {
  const name = await made(t);
  const done = await cli("create", "--name", name);
  assert.notEqual(done.code, 0);
  assert.match(done.all, /exists/);
});

test("ls shows what runs, ls --all what there is", async (t) => {
  const running = await created(t, "--tag", "group=ls");
  const stopped = await created(t, "--tag", "group=ls");
  await ok("stop", stopped);
  const names = async (...args) => table((await ok("ls", "--tag", "group=ls", ...args)).stdout).map((row) => row.NAME);
  assert.deepEqual(await names(), [running]);
  assert.deepEqual(await names("--all"), [stopped, running]);
  assert.deepEqual(await names("--all", "--sort-order", "asc"), [running, stopped]);
  const rows = table((await ok("ls", "--all", "--name-prefix", stopped)).stdout);
  assert.equal(rows.length, 1);
  assert.equal(rows[0].STATUS, "stopped");
  assert.match(rows[0].SNAPSHOT, /^snap_/);
});

test("ls goes on where a page ended", async (t) => {
  const tag = fresh("page");
  const both = [await created(t, "--tag", `p=${tag}`), await created(t, "--tag", `p=${tag}`)];
  const first = (await ok("ls", "--tag", `p=${tag}`, "--limit", "1")).stdout;
  const cursor = /--cursor[= ](\S+)/.exec(first)?.[1];
  assert.ok(cursor, first);
  const second = (await ok("ls", "--tag", `p=${tag}`, "--limit", "1", "--cursor", cursor)).stdout;
  assert.ok(first.includes(both[1]) && second.includes(both[0]));
});

test("exec passes output, errors and exit codes on", async (t) => {
  const name = await made(t);
  const done = await cli("exec", name, "sh", "-c", "echo out; echo err >&2; exit 42");
  assert.equal(done.code, 42);
  assert.equal(done.stdout, "out\n");
  assert.match(done.stderr, /err\n/);
  assert.equal((await ok("exec", name, "echo", "grüße 🦀")).stdout, "grüße 🦀\n");
  assert.equal((await ok("exec", name, "--", "echo", "-n", "dash")).stdout, "dash");
});

test("exec takes environment, working directory, sudo and a timeout", async (t) => {
  const name = await made(t);
  const done = await ok("exec", "-e", "A=1", "--env", "B=two words", "-w", "/tmp", name, "sh", "-c", "echo $A $B $PWD");
  assert.equal(done.stdout, "1 two words /tmp\n");
  assert.equal((await ok("exec", "--sudo", name, "id", "-un")).stdout, "root\n");
  assert.notEqual((await ok("exec", name, "id", "-un")).stdout, "root\n");
  const late = await cli("exec", "--timeout", "1s", name, "sleep", "60");
  assert.equal(late.code, 137);
  assert.match(late.stderr, /killed/i);
});

test("exec wakes a sandbox that sleeps", async (t) => {
  const name = await made(t);
  await ok("exec", name, "sh", "-c", "echo kept > file");
  await ok("stop", name);
  assert.equal((await ok("exec", name, "cat", "file")).stdout, "kept\n");
});

test("exec of a program or a sandbox nobody has fails with its name", async (t) => {
  const name = await made(t);
  const program = await cli("exec", name, "no-such-program");
  assert.notEqual(program.code, 0);
  assert.match(program.all, /no-such-program/);
  const nobody = await cli("exec", fresh("nobody"), "true");
  assert.notEqual(nobody.code, 0);
  assert.match(nobody.all, /not.found|404/i);
});

test("exec --interactive outside a terminal is refused by the client", async (t) => {
  const name = await made(t);
  const done = await cli("exec", "-i", name, "sh");
  assert.notEqual(done.code, 0);
  assert.match(done.all, /terminal/);
});

test("run --rm runs and leaves nothing", async () => {
  const name = fresh("cli");
  const done = await cli("run", "--rm", "--name", name, "--", "sh", "-c", "echo ran; exit 3");
  assert.equal(done.code, 3, done.all);
  assert.match(done.stdout, /ran\n$/);
  assert.doesNotMatch((await ok("ls", "--all", "--name-prefix", name)).stdout, new RegExp(name));
});

test("run with a name goes on with what is there, --stop stops it", async (t) => {
  const name = fresh("cli");
  t.after(() => remove(name));
  await ok("run", "--name", name, "--stop", "--", "sh", "-c", "echo one > file");
  assert.equal(table((await ok("ls", "--all", "--name-prefix", name)).stdout)[0].STATUS, "stopped");
  assert.equal((await ok("run", "--name", name, "--", "cat", "file")).stdout, "one\n");
});

test("cp copies files both ways", async (t) => {
  const name = await made(t);
  const bytes = Buffer.from(Array.from({ length: 100_000 }, (_, i) => i % 256));
  writeFileSync(join(home, "up.bin"), bytes);
  await ok("cp", "up.bin", `${name}:/tmp/up.bin`);
  assert.equal((await ok("exec", name, "stat", "-c", "%s", "/tmp/up.bin")).stdout, "100000\n");
  await ok("cp", `${name}:/tmp/up.bin`, "down.bin");
  assert.ok(bytes.equals(readFileSync(join(home, "down.bin"))));
  await ok("cp", "up.bin", `${name}:relative.bin`);
  assert.equal((await ok("exec", name, "stat", "-c", "%s", "relative.bin")).stdout, "100000\n");
});

test("cp of a file that is not there says so", async (t) => {
  const name = await made(t);
  assert.match((await cli("cp", `${name}:/nope`, "x")).all, /not found/i);
  assert.match((await cli("cp", "nope", `${name}:/tmp/x`)).all, /not found/i);
});

test("stop tells what was used and kept, of several at once", async (t) => {
  const one = await made(t);
  const two = await made(t);
  const done = await ok("stop", one, two);
  assert.match(done.all, new RegExp(one));
  assert.match(done.all, new RegExp(two));
  assert.match(done.all, /snap_/);
  assert.match(done.all, /active cpu/);
});

test("rm removes several, and fails for one that is not there", async (t) => {
  const one = await made(t);
  const two = await made(t);
  await ok("rm", one, two);
  const done = await cli("rm", one);
  assert.notEqual(done.code, 0);
});

test("rm --delete-orphan-snapshots takes the snapshots along", async (t) => {
  const name = await made(t);
  const id = /snap_\w+/.exec((await ok("stop", name)).all)[0];
  await ok("rm", "--delete-orphan-snapshots", name);
  const got = await cli("snapshots", "get", id);
  assert.ok(got.code !== 0 || /deleted/.test(got.stdout), got.all);
});

test("rm without that flag leaves the snapshots", async (t) => {
  const name = await made(t);
  const id = /snap_\w+/.exec((await ok("stop", name)).all)[0];
  await ok("rm", name);
  assert.match((await ok("snapshots", "get", id)).stdout, /created/);
  const again = fresh("cli");
  t.after(() => remove(again));
  await ok("create", "--name", again, "--snapshot", id);
  await ok("snapshots", "rm", id).catch(() => {});
});

test("only a key is enough: the account is asked for team and project", async (t) => {
  const key = process.env.SANDKEEP_KEY;
  if (!key) return t.skip("SANDKEEP_KEY is not set");
  const env = { VERCEL_OIDC_TOKEN: "", VERCEL_AUTH_TOKEN: key, VERCEL_TEAM_ID: "", VERCEL_PROJECT_ID: "" };
  const done = await cli_with(env, "ls");
  assert.equal(done.code, 0, done.all);
  assert.match(done.stdout, /NAME/);
});

test("a token nobody gave out is refused", async () => {
  const done = await cli_with({ VERCEL_OIDC_TOKEN: "", VERCEL_AUTH_TOKEN: "nonsense" }, "ls");
  assert.notEqual(done.code, 0);
});

test("policies are given and changed", async (t) => {
  const name = await created(t, "--allowed-domain", "*.example.com", "--denied-cidr", "10.0.0.0/8");
  const policy = async () => {
    const { text } = await ask("GET", `/api/v2/sandboxes/${name}`, { query: { teamId: team, projectId: project } });
    return JSON.parse(text).sandbox.networkPolicy;
  };
  assert.deepEqual(await policy(), { mode: "custom", allowedDomains: ["*.example.com"], deniedCIDRs: ["10.0.0.0/8"] });
  await ok("config", "network-policy", name, "--network-policy", "deny-all");
  assert.deepEqual(await policy(), { mode: "deny-all" });
  const bad = await cli("config", "network-policy", name, "--allowed-cidr", "10.0.0.0/99");
  assert.notEqual(bad.code, 0);
  assert.match(bad.all, /networkPolicy\.subnets\.allow\[0\]/);
});
