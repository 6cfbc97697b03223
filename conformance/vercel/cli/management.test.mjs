import assert from "node:assert/strict";
import { test } from "node:test";

import { fresh, remove } from "../support.mjs";
import { cli, created, made, ok, table } from "./cli.mjs";

const snapshot_id = (text) => /snap_\w+/.exec(text)?.[0];

test("config changes every setting and lists them", async (t) => {
  const name = await made(t);
  await ok("config", "vcpus", name, "4");
  await ok("config", "timeout", name, "10m");
  await ok("config", "persistent", name, "false");
  await ok("config", "persistent", name, "true");
  await ok("config", "snapshot-expiration", name, "7d");
  await ok("config", "keep-last-snapshots", name, "3");
  await ok("config", "keep-last-snapshots-for", name, "14d");
  await ok("config", "delete-evicted-snapshots", name, "false");
  await ok("config", "tags", name, "--tag", "a=b", "--tag", "c=d");
  await ok("config", "ports", name, "-p", "3000", "-p", "4000");
  const listed = (await ok("config", "list", name)).all;
  for (const words of [/vCPUs +4/i, /10 minutes/, /7 days/, /count=3/, /14 days/, /a[:=]b/]) assert.match(listed, words);
  await ok("config", "keep-last-snapshots", name, "0");
  await ok("config", "tags", name);
  await ok("config", "ports", name);
  assert.doesNotMatch((await ok("config", "list", name)).all, /a[:=]b/);
});

test("config refuses what the server refuses", async (t) => {
  const name = await made(t);
  const done = await cli("config", "current-snapshot", name, `snap_${"0".repeat(28)}`);
  assert.notEqual(done.code, 0);
  assert.match(done.all, /not found/);
  assert.notEqual((await cli("config", "keep-last-snapshots-for", name, "7d")).code, 0);
});

test("config current-snapshot goes back", async (t) => {
  const name = await made(t);
  await ok("exec", name, "sh", "-c", "echo old > file");
  const old = snapshot_id((await ok("stop", name)).all);
  await ok("exec", name, "sh", "-c", "echo new > file");
  await ok("stop", name);
  await ok("config", "current-snapshot", name, old);
  assert.equal((await ok("exec", name, "cat", "file")).stdout, "old\n");
});

test("sessions ls shows the running one, or all", async (t) => {
  const name = await made(t);
  await ok("stop", name);
  await ok("exec", name, "true");
  assert.equal(table((await ok("sessions", "ls", name)).stdout).length, 1);
  const all = table((await ok("sessions", "ls", "--all", name)).stdout);
  assert.deepEqual(all.map((row) => row.STATUS), ["running", "stopped"]);
  const oldest = table((await ok("sessions", "ls", "--all", "--sort-order", "asc", name)).stdout);
  assert.deepEqual(oldest.map((row) => row.ID), all.map((row) => row.ID).reverse());
});

test("snapshot asks for --stop, takes a snapshot and prints it", async (t) => {
  const name = await made(t);
  assert.equal((await cli("snapshot", name)).code, 1);
  const id = snapshot_id((await ok("snapshot", "--stop", "--expiration", "2d", name)).all);
  assert.ok(id);
  assert.equal((await cli("snapshot", "--stop", name)).code, 1, "it does not run");
  const got = table((await ok("snapshots", "get", id)).stdout)[0];
  assert.equal(got.ID, id);
  assert.equal(got.STATUS, "created");
});

test("snapshots ls, tree and rm", async (t) => {
  const name = await made(t);
  const ids = [];
  for (const word of ["one", "two", "three"]) {
    await ok("exec", name, "sh", "-c", `echo ${word} > file`);
    ids.push(snapshot_id((await ok("stop", name)).all));
  }
  const listed = table((await ok("snapshots", "ls", "--name", name)).stdout).map((row) => row.ID);
  assert.deepEqual(listed, [...ids].reverse());
  const tree = (await ok("snapshots", "tree", name)).stdout;
  const order = [...tree.matchAll(/snap_\w+/g)].map((match) => match[0]);
  assert.deepEqual(order, [...ids].reverse());
  assert.match(tree, new RegExp(`${ids[2]}.*current`));
  assert.match(tree, /\(root\)/);
  const short = (await ok("snapshots", "tree", name, "--limit", "1")).stdout;
  assert.match(short, /More ancestors: .*--cursor \S+/);
  const cursor = /--cursor (\S+)/.exec(short)[1];
  assert.match((await ok("snapshots", "tree", name, "--cursor", cursor, "--limit", "1")).stdout, /snap_/);
  await ok("snapshots", "rm", ids[0]);
  assert.notEqual((await cli("snapshots", "rm", ids[0])).code, 0);
  const after = table((await ok("snapshots", "ls", "--name", name)).stdout);
  assert.equal(after.find((row) => row.ID === ids[0]).STATUS, "deleted");
  assert.equal((await ok("exec", name, "cat", "file")).stdout, "three\n");
});

test("a sandbox without snapshots has no tree", async (t) => {
  const name = await made(t);
  assert.match((await ok("snapshots", "tree", name)).stdout, /No snapshots/);
});

test("create --snapshot starts from one", async (t) => {
  const name = await made(t);
  await ok("exec", name, "sh", "-c", "echo from > file");
  const id = snapshot_id((await ok("stop", name)).all);
  const copy = await created(t, "--snapshot", id);
  assert.equal((await ok("exec", copy, "cat", "file")).stdout, "from\n");
});

test("fork copies files and settings, and takes its own", async (t) => {
  const source = await created(t, "--env", "FROM=source", "--tag", "team=red", "--vcpus", "4");
  await ok("exec", source, "sh", "-c", "echo files > file");
  await ok("stop", source);
  const name = fresh("cli");
  t.after(() => remove(name));
  const done = await ok("fork", source, "--name", name, "--tag", "team=blue");
  assert.equal(done.stdout, name);
  assert.match(done.stderr, /forked from/);
  assert.equal((await ok("exec", name, "sh", "-c", "cat file; echo $FROM")).stdout, "files\nsource\n");
  const row = table((await ok("ls", "--name-prefix", name)).stdout)[0];
  assert.equal(row.VCPUS, "4");
  assert.equal(row.TAGS, "team:blue");
});

test("drives are made, mounted, listed and removed", async (t) => {
  const drive = fresh("cli-drive");
  const ready = await ok("drives", "get-or-create", drive, "--max-size", String(1 << 30));
  assert.match(ready.all, /ready/);
  await ok("drives", "get-or-create", drive);
  const one = await created(t, "--mount", `${drive}:/data`);
  await ok("exec", one, "sh", "-c", "echo kept > /data/file");
  const row = table((await ok("drives", "ls", "--name-prefix", drive)).stdout)[0];
  assert.equal(row.NAME, drive);
  assert.equal(row["ATTACHED SANDBOX"], one);
  assert.notEqual((await cli("drives", "rm", drive)).code, 0, "it is attached");
  await ok("rm", one);
  const two = await created(t, "--mount", `${drive}:/ro:snapshot`);
  assert.equal((await ok("exec", two, "cat", "/ro/file")).stdout, "kept\n");
  await ok("rm", two);
  await ok("drives", "rm", drive);
  assert.doesNotMatch((await ok("drives", "ls", "--name-prefix", drive)).stdout, new RegExp(drive));
});

test("config mounts are for the next session", async (t) => {
  const drive = fresh("cli-drive");
  await ok("drives", "get-or-create", drive);
  const name = await made(t);
  await ok("config", "mounts", name, "--mount", `${drive}:/late`);
  await ok("stop", name);
  assert.equal((await ok("exec", name, "sh", "-c", "echo x > /late/x; ls /late")).stdout, "x\n");
  await ok("rm", name);
  await ok("drives", "rm", drive);
});
