// The TypeScript SDK against a server, also one that is killed.

import assert from "node:assert/strict";
import { randomBytes, randomUUID } from "node:crypto";
import fs from "node:fs/promises";
import net from "node:net";
import os from "node:os";
import path from "node:path";
import { after, before, test } from "node:test";
import { pathToFileURL } from "node:url";

const dist = pathToFileURL(`${process.env.SANDKEEP_SDK_DIST}/`);
const sandkeep = await import(new URL("index.js", dist));
const { OPERATIONS } = await import(new URL("operations.js", dist));
const { Transport } = await import(new URL("transport.js", dist));
const { Sandkeep, CommandFailed } = sandkeep;

const image = process.env.SANDKEEP_SDK_IMAGE;
const fresh = (prefix) => `${prefix}-${randomUUID().slice(0, 8)}`;
const called = new Set();
for (const name of ["send", "address"]) {
  const original = Transport.prototype[name];
  Transport.prototype[name] = function (operation, ...rest) {
    called.add(operation);
    return original.call(this, operation, ...rest);
  };
}

const collect = async (source) => {
  const found = [];
  for await (const one of source) found.push(one);
  return found;
};

/** A tar archive of small files. */
function tar(files) {
  const blocks = [];
  for (const [name, text] of Object.entries(files)) {
    const content = Buffer.from(text);
    const header = Buffer.alloc(512);
    header.write(name, 0);
    header.write("0000644\0", 100);
    header.write("0000000\0", 108);
    header.write("0000000\0", 116);
    header.write(`${content.length.toString(8).padStart(11, "0")}\0`, 124);
    header.write("00000000000\0", 136);
    header.write("        ", 148);
    header.write("0", 156);
    const sum = header.reduce((sum, byte) => sum + byte, 0);
    header.write(`${sum.toString(8).padStart(6, "0")}\0 `, 148);
    blocks.push(header, content, Buffer.alloc((512 - (content.length % 512)) % 512));
  }
  return new Uint8Array(Buffer.concat([...blocks, Buffer.alloc(1024)]));
}

async function control(word) {
  const line = net.connect(process.env.SANDKEEP_SDK_CONTROL);
  line.write(`${word}\n`);
  let answer = "";
  for await (const piece of line) answer += piece;
  assert.equal(answer, "ok\n");
}

async function restart(delay = 0) {
  await new Promise((resolve) => setTimeout(resolve, delay));
  await control("kill");
  await new Promise((resolve) => setTimeout(resolve, 300));
  await control("launch");
}

const client = new Sandkeep();
let box;

before(async () => {
  box = await client.getOrCreate(fresh("js"), { image, tags: { suite: "js" } });
});
after(async () => {
  await box.delete();
});

test("commands", async () => {
  const result = await box.run("echo out; echo err >&2; exit 3");
  assert.deepEqual([result.stdout, result.stderr, result.exitCode, result.end], ["out\n", "err\n", 3, "exited"]);
  await assert.rejects(box.run("echo no >&2; exit 3", { check: true }), (error) => error instanceof CommandFailed && /exit code 3: no/.test(error.message));
  assert.equal((await box.run(["printf", "%s", "a b; c"])).stdout, "a b; c");
  const said = await box.run("echo $X $(pwd) $(id -un); cat", { env: { X: "1" }, cwd: "/tmp", user: "user", input: "in" });
  assert.equal(said.stdout, "1 /tmp user\nin");
  assert.deepEqual([...(await box.run(["cat"], { input: Uint8Array.of(255, 0) })).stdoutBytes], [255, 0]);
  assert.equal((await box.run("sleep 60", { timeout: 300 })).end, "timed_out");
  const heard = [];
  await box.run("printf ä; printf b >&2", { onStdout: (text) => heard.push(text), onStderr: (text) => heard.push(text) });
  assert.deepEqual(heard.sort(), ["b", "ä"]);
  const large = randomBytes(3 << 20);
  assert.ok(large.equals(Buffer.from((await box.run(["cat"], { input: new Uint8Array(large) })).stdoutBytes)));
  const leaving = new AbortController();
  setTimeout(() => leaving.abort(), 300);
  await assert.rejects(box.run("sleep 600", { signal: leaving.signal }));
});

test("streams and processes", async () => {
  let id;
  const stream = box.stream("echo now; exec sleep 600");
  for await (const output of stream) {
    assert.equal(output.text, "now\n");
    id = stream.command.id;
    break;
  }
  assert.equal((await box.command(id).wait()).exit_code, 129);
  const command = await box.start("cat; echo done >&2", { stdin: true });
  await command.write("one\n");
  await command.write(new TextEncoder().encode("two\n"), { close: true });
  const result = await command.result();
  assert.deepEqual([result.stdout, result.stderr], ["one\ntwo\n", "done\n"]);
  assert.equal((await collect(command.logs({ offset: 4 }))).map((one) => one.text).join(""), "two\ndone\n");
  const sleeper = await box.start(["sleep", "600"]);
  assert.deepEqual(await collect(sleeper.logs({ follow: false })), []);
  await sleeper.signal("TERM");
  assert.equal((await sleeper.wait()).exit_code, 143);
  const closed = await box.start(["cat"], { stdin: true });
  await closed.closeStdin();
  assert.equal((await closed.wait()).exit_code, 0);
  assert.equal((await closed.refresh()).state, "exited");
  assert.ok((await closed.changes()).paths.length >= 0);
  assert.ok((await collect(box.commands({ limit: 3 }))).length >= 3);
  const tty = await box.start("sleep 600", { tty: { cols: 80, rows: 24 } });
  await tty.resize(100, 30);
  await tty.kill();
});

test("a terminal", async () => {
  const terminal = await box.terminal("stty size; read line; echo got $line", { cols: 100, rows: 30 });
  let said = "";
  for await (const output of terminal) {
    said += output.text;
    if (said.includes("30 100") && !said.includes("word")) terminal.write("word\n");
    if (said.includes("got word")) break;
  }
  assert.match(said, /got word/);
  const killed = await box.terminal("read line");
  killed.resize(90, 20);
  killed.signal("KILL");
  await collect(killed);
  assert.equal(killed.command.exit_code, 137);
});

test("files", async () => {
  const { files } = box;
  assert.equal((await files.write("/work/f/a.txt", "one", { parents: true })).bytes, 3);
  await files.write("/work/f/a.txt", new TextEncoder().encode(" two"), { append: true });
  assert.equal(await files.readText("/work/f/a.txt"), "one two");
  assert.equal(new TextDecoder().decode(await files.read("/work/f/a.txt", { offset: 4, limit: 2 })), "tw");
  const big = () => new Blob([new Uint8Array(3_000_000)]).stream();
  assert.equal((await files.write("/work/f/big", big)).bytes, 3_000_000);
  assert.equal((await collect(files.readStream("/work/f/big"))).reduce((sum, piece) => sum + piece.length, 0), 3_000_000);
  await files.makeDirectory("/work/f/dir/below");
  await files.move("/work/f/a.txt", "/work/f/dir/b.txt");
  assert.deepEqual((await files.list("/work/f")).map((one) => one.name), ["big", "dir"]);
  await files.remove("/work/f/big");
  assert.equal(await files.exists("/work/f/big"), false);
  const place = await fs.mkdtemp(path.join(os.tmpdir(), "keep-e2e-js-"));
  try {
    const here = path.join(place, "in");
    const long = `${"n".repeat(120)}.txt`;
    await fs.mkdir(path.join(here, "sub"), { recursive: true });
    await fs.writeFile(path.join(here, "sub", long), "long");
    await fs.writeFile(path.join(here, "ü.txt"), "umlaut");
    await fs.writeFile(path.join(here, "run.sh"), "#!/bin/sh\necho ran\n", { mode: 0o755 });
    await fs.symlink("run.sh", path.join(here, "link"));
    await files.uploadDirectory(here, "/work/up");
    assert.equal((await box.run(["/work/up/link"])).stdout, "ran\n");
    await box.run("truncate -s 5M /work/up/holes; printf x >> /work/up/holes; ln /work/up/run.sh /work/up/hard", { check: true });
    const back = path.join(place, "back");
    await files.downloadDirectory("/work/up", back);
    assert.equal(await fs.readFile(path.join(back, "sub", long), "utf8"), "long");
    assert.equal(await fs.readFile(path.join(back, "ü.txt"), "utf8"), "umlaut");
    assert.equal(await fs.readFile(path.join(back, "hard"), "utf8"), "#!/bin/sh\necho ran\n");
    assert.equal(await fs.readlink(path.join(back, "link")), "run.sh");
    assert.equal((await fs.stat(path.join(back, "run.sh"))).mode & 0o777, 0o755);
    const holes = await fs.readFile(path.join(back, "holes"));
    assert.deepEqual([holes.length, holes[0], holes.at(-1)], [(5 << 20) + 1, 0, 120]);
    await box.run("ln -s ../../../../../../etc /work/up/out", { check: true });
    await assert.rejects(files.downloadDirectory("/work/up", path.join(place, "never")), /leads outside/);
  } finally {
    await fs.rm(place, { recursive: true });
  }
  await assert.rejects(files.read("/no/such/file"), sandkeep.PathNotFoundError);
});

test("state and forks", async () => {
  const name = fresh("state");
  let one = await client.create(name, { image });
  await assert.rejects(client.create(name, { image }), (error) => {
    assert.ok(error instanceof sandkeep.NameTakenError && error instanceof sandkeep.ConflictError);
    assert.match(error.requestId, /^req-/);
    return true;
  });
  await one.files.write("/work/file", "one\n");
  const point = await one.checkpoint("good");
  await one.files.write("/work/file", "two\n");
  assert.ok((await one.stats()).usage.memory_limit_bytes > 0);
  assert.ok((await client.stats()).some((found) => found.name === name));
  const stopped = await one.stop();
  assert.equal((await one.stats()).usage ?? null, null);
  assert.ok((await one.refresh()).session_changes.created >= 1);
  await assert.rejects(one.run("true", { ifRunning: true }), sandkeep.NotRunningError);
  await one.rollback("good");
  assert.equal(await one.files.readText("/work/file"), "one\n");
  assert.ok((await collect(one.snapshots())).some((snapshot) => snapshot.id === point.id));
  assert.equal((await client.snapshots.get(point.id)).label, "good");
  assert.ok((await collect(client.snapshots.list({ sandbox: name }))).length > 0);
  assert.ok((await collect(client.snapshots.export(point.id))).length > 0);
  await one.ensureRunning();
  await one.extend("10m");
  await assert.rejects(one.pause(), sandkeep.ConflictError);
  assert.equal((await one.why()).state, "running");
  assert.ok((await collect(one.sessions())).at(-1).changes.created >= 1);
  await one.update({ purpose: "another", tags: { a: "b" } });
  assert.equal((await client.get(name)).info.purpose, "another");
  assert.ok((await collect(client.sandboxes({ tags: { a: "b" } }))).some((found) => found.name === name));
  one = await one.rename(`${name}-new`);
  const forks = await one.forkMany(3, `${name}-try`, { start: false });
  assert.equal((await client.group(forks[0].info.forked_from.group)).length, 3);
  assert.equal((await collect(one.forks())).length, 3);
  await forks[0].files.write("/work/new", "new\n");
  assert.ok((await one.diff(forks[0])).changes.some((entry) => entry.path === "/work/new"));
  assert.match(new TextDecoder().decode(await client.patch(one.name, forks[0].name, { paths: ["/work"] })), /\+new/);
  await forks[0].merge();
  await assert.rejects(forks[1].promote(), sandkeep.OriginMovedOnError);
  const last = await one.fork();
  assert.ok((await collect(last.artifacts(["/work"]))).length > 0);
  await last.promote({ delete_fork: true });
  assert.ok((await one.tree()).sandboxes.length > 0);
  await client.snapshots.delete(stopped.snapshot.id);
  for (const fork of [...forks, one]) await fork.delete();
  const item = (await client.trash.list()).find((found) => found.name === one.name);
  const restored = await client.trash.restore(item.id, { name });
  await restored.delete();
  await client.trash.empty();
  await assert.rejects(client.get(name), sandkeep.SandboxNotFoundError);
});

test("ports and services", async () => {
  // The image has Perl without its modules.
  const server =
    "socket(S, 2, 1, 6); setsockopt(S, 1, 2, pack('l', 1)); bind(S, pack('Sna4x8', 2, 7000, '')) or die; listen(S, 5); " +
    'while (accept(C, S)) { my $line = <C>; syswrite(C, "got $line"); close(C) }';
  await box.services.set("echo", { argv: ["perl", "-e", server], port: 7000 });
  await box.services.start("echo");
  const connection = await box.ports.connect(7000);
  connection.write("hello\n");
  assert.equal(Buffer.concat(await collect(connection)).toString(), "got hello\n");
  const socket = await box.ports.connectWebSocket(7000);
  socket.send(Buffer.from("web\n"));
  assert.equal(new TextDecoder().decode(await socket.receive()), "got web\n");
  socket.close();
  assert.equal((await box.ports.publish(7000)).access, "private");
  assert.deepEqual((await box.ports.list()).map((one) => one.port), [7000]);
  assert.match((await box.ports.token(7000, { expires: "1h" })).url, /^http/);
  await box.ports.unpublish(7000);
  assert.equal((await box.services.list())[0].service.name, "echo");
  await box.services.stop("echo");
  await box.services.remove("echo");
});

test("what a project has", async () => {
  const secret = fresh("s").replace("-", "_").toUpperCase();
  await client.secrets.set(secret, "value-of-it", { hosts: ["api.example.com"] });
  assert.ok((await client.secrets.list()).some((one) => one.name === secret));
  assert.deepEqual((await client.secrets.get(secret)).hosts, ["api.example.com"]);
  assert.equal((await box.run("echo ${#T} $T", { inject: [{ secret, env: "T" }] })).stdout, "11 ***********\n");
  await client.secrets.delete(secret);
  await box.setNetwork({ mode: "deny-all" });
  assert.equal((await box.network()).network.mode, "deny-all");
  await collect(box.connections());
  await box.connectionsSummary();
  await box.setNetwork(null);
  const drive = await client.drives.create(fresh("drive"), { max_size: "64M" });
  assert.ok((await collect(client.drives.list({ name_prefix: drive.name }))).length === 1);
  await client.drives.get(drive.name);
  await assert.rejects(client.drives.fork(drive.name, `${drive.name}-fork`), sandkeep.ApiError);
  await box.files.write("/work/made-here", "made\n");
  const promoted = await client.drives.promote(drive.name, box.name, ["/work/made-here"], { path: "/in" });
  assert.ok(promoted.changes.some((change) => change.path === "/in/work/made-here"));
  assert.equal(promoted.drive.generation, 1);
  await client.drives.delete(drive.name);
  const archive = Buffer.concat(await collect(box.files.readTar("/etc")));
  const made = await (await client.images.importArchive(new Uint8Array(archive), fresh("image"))).done();
  assert.ok((await client.images.list()).some((one) => one.name === made.name));
  assert.equal((await client.images.get(made.name)).digest, made.digest);
  await client.images.remove(made.name);
  await assert.rejects(client.images.importPath("/no/such.tar", "never").then((work) => work.done()), sandkeep.SandkeepError);
  const building = await client.images.build(tar({ Dockerfile: "FROM scratch\nARG V\nCOPY f /$V\n", f: "content" }), fresh("built"), {
    args: { V: "there" },
    secrets: { id: "not used" },
  });
  const steps = await collect(building);
  assert.deepEqual(steps.map((told) => told.line), [1, 2, 3]);
  assert.equal((await client.images.get(building.image.name)).layers, 1);
  await client.images.remove(building.image.name);
  assert.ok((await client.images.prune()).steps >= 1);
  await assert.rejects(
    client.images.build(tar({ Dockerfile: "FOO" }), "never").then((work) => work.done()),
    (error) => error.code === "bad_dockerfile" && error.message.startsWith("line 1"),
  );
  let run = await client.runs.start({
    place: { how: "fork", sandbox: box.name },
    command: { argv: ["sh", "-c", "echo made > /work/made"] },
  });
  run = await client.runs.wait(run.id);
  assert.equal(run.status, "ready_for_review", run.why);
  assert.ok((await client.runs.review(run.id)).changes.some((one) => one.path === "/work/made"));
  await client.runs.pinAgain(run.id);
  assert.equal((await client.runs.accept(run.id, { how: "keep" })).run.status, "accepted");
  const harness = await client.runs.start({ place: { how: "existing", sandbox: box.name }, heartbeat: "1m" });
  while ((await client.runs.get(harness.id)).status === "queued");
  await client.runs.heartbeat(harness.id, { cost: 1 });
  await client.runs.finish(harness.id);
  await client.runs.wait(harness.id);
  assert.equal((await client.runs.reject(harness.id)).status, "rejected");
  const never = await client.runs.start({
    place: { how: "existing", sandbox: box.name },
    heartbeat: "1m",
    approve_hosts: true,
    spending: [{ what: "cost", limit: 5 }],
  });
  assert.deepEqual([never.approve_hosts, never.spending], [true, [{ what: "cost", allowed: 5, step: 5 }]]);
  assert.equal((await client.runs.cancel(never.id)).status, "cancelled");
  assert.ok((await collect(client.runs.list())).length >= 3);
  const asked = await box.ask("Deploy?", { default: "deny", expires: "5m" });
  assert.ok((await collect(client.approvals.list({ status: "pending" }))).some((one) => one.id === asked.id));
  await client.approvals.get(asked.id);
  await client.approvals.answer(asked.id, "approve");
  assert.equal((await client.approvals.wait(asked.id)).status, "approved");
});

test("the server", async () => {
  assert.equal((await client.health()).status, "ok");
  assert.ok((await client.ready()).checks.some((check) => check.name === "disk"));
  assert.equal((await client.whoAmI()).scope, "admin");
  assert.ok((await client.usage()).total_bytes > 0);
  assert.match(await client.metrics(), /sandkeep_/);
  assert.deepEqual(await client.damage(), []);
  assert.equal((await client.fsck()).broken, false);
  assert.ok((await client.issueToken({ for: "vercel" })).token);
  assert.deepEqual(await client.quarantine(), []);
  await assert.rejects(client.deleteQuarantine("snp-00000000000000000000000000"), sandkeep.NotFoundError);
  assert.equal((await client.audit.verify()).intact, true);
  assert.ok((await collect(client.audit.list({ since: "1h", limit: 5 }))).length > 0);
  for await (const entry of client.audit.follow({ since: "1h" })) {
    assert.ok(entry.seq > 0);
    break;
  }
  const { name } = await client.projects.create(fresh("project"));
  const key = await client.projects.createKey(name, { scope: "write", label: "ci" });
  const other = new Sandkeep({ key: key.secret });
  assert.equal((await other.whoAmI()).project, name);
  await assert.rejects(other.projects.list(), sandkeep.ForbiddenError);
  assert.equal((await client.projects.keys(name)).length, 1);
  await client.projects.setNetwork(name, { default: { mode: "deny-all" }, max_connections: 100 });
  const network = await client.projects.network(name);
  assert.deepEqual([network.default.mode, network.max_connections], ["deny-all", 100]);
  await client.projects.setGovernance(name, { running: 1, queued: 2 });
  assert.equal((await client.projects.governance(name)).queued, 2);
  await client.projects.revokeKey(name, key.key.id);
  assert.ok((await client.projects.list()).some((one) => one.name === name));
  await client.projects.delete(name);
  await assert.rejects(other.whoAmI(), sandkeep.UnauthorizedError);
  const hook = (await client.webhooks.create({ url: "http://127.0.0.1:9/", events: ["run.*"], allow_private: true })).webhook;
  await client.webhooks.update(hook.id, { enabled: true });
  assert.ok((await client.webhooks.rotateSecret(hook.id)).secret);
  assert.equal((await client.webhooks.test(hook.id)).delivered, false);
  assert.equal((await client.webhooks.get(hook.id)).url, hook.url);
  assert.equal((await client.webhooks.list()).length, 1);
  await client.webhooks.delete(hook.id);
  const closed = net.createServer();
  await new Promise((resolve) => closed.listen(0, "127.0.0.1", resolve));
  const { port } = closed.address();
  await new Promise((resolve) => closed.close(resolve));
  const nobody = new Sandkeep({ url: `http://127.0.0.1:${port}`, key: "skp_x", retryFor: 100 });
  await assert.rejects(nobody.health(), /cannot reach the server/);
  await assert.rejects(new Sandkeep({ url: "ftp://x" }).health(), sandkeep.ConfigurationError);
});

test("every operation was called", () => {
  const elsewhere = ["pull_image", "customize_image", "events"];
  const lacking = Object.keys(OPERATIONS).filter((one) => !called.has(one) && !elsewhere.includes(one));
  assert.deepEqual(lacking, []);
});

const COUNT =
  "i=0; while [ $i -lt 400 ]; do echo line $i; [ $((i % 10)) = 0 ] && echo err $i >&2; i=$((i+1)); sleep 0.005; done";

test("output and events over a killed server", async () => {
  const seen = [];
  const events = await box.events({ kinds: ["command"] }).open();
  const follow = (async () => {
    for await (const event of events) {
      seen.push(event.kind);
      if (seen.length === 4) return;
    }
  })();
  const killed = restart(700);
  const result = await box.run(COUNT);
  await killed;
  assert.equal(result.stdout, Array.from({ length: 400 }, (_, at) => `line ${at}\n`).join(""));
  assert.equal(result.stderr, Array.from({ length: 40 }, (_, at) => `err ${at * 10}\n`).join(""));
  assert.equal(result.exitCode, 0);
  await box.run("echo after");
  await follow;
  assert.deepEqual(seen.sort(), ["command.ended", "command.ended", "command.started", "command.started"]);
});

test("waiting and calls over a killed server", async () => {
  const command = await box.start("sleep 1; echo end");
  const killed = restart(200);
  assert.equal((await command.wait()).exit_code, 0);
  await killed;
  const again = restart();
  const fork = await box.fork(`${box.name}-fork`);
  await again;
  assert.equal((await fork.run("echo works")).stdout, "works\n");
  await fork.delete();
});
