import assert from "node:assert/strict";
import { before, test } from "node:test";

import { SandboxUser, sh, shared } from "./sdk.mjs";

let box, alice, bob, default_group;
before(async () => {
  box = await shared({ persistent: false });
  default_group = await sh(box, "id -gn");
  alice = await box.createUser("alice");
  bob = await box.createUser("bob");
});

const as_root = (script) => sh(box, script, { sudo: true });
const out = async (run) => (await (await run).stdout()).trimEnd();

test("a user has a home that others cannot enter but the files API can", async () => {
  assert.ok(alice instanceof SandboxUser);
  assert.equal(await as_root("stat -c '%U:%G %a' /home/alice"), `alice:${default_group} 770`);
});

test("a user that exists is told apart from other failures", async () => {
  const error = await box.createUser("alice").catch((error) => error);
  assert.equal(error.name, "SandboxUserAlreadyExistsError");
  assert.equal(error.username, "alice");
});

test("commands run as the user, at home, with the environment given", async () => {
  assert.equal(await out(alice.runCommand("whoami")), "alice");
  assert.match(await out(alice.runCommand("id")), /uid=\d+\(alice\) gid=\d+\(alice\)/);
  assert.equal(await out(alice.runCommand("pwd")), "/home/alice");
  assert.equal(await out(alice.runCommand({ cmd: "pwd", cwd: "/tmp" })), "/tmp");
  const env = await out(alice.runCommand({ cmd: "env", env: { MINE: "a b", OTHER: "x" } }));
  assert.match(env, /^MINE=a b$/m);
  assert.match(env, /^OTHER=x$/m);
});

test("exit codes and errors of a user's command are passed on", async () => {
  assert.equal((await alice.runCommand("sh", ["-c", "exit 9"])).exitCode, 9);
  const failed = await alice.runCommand("cat", ["/nope"]);
  assert.notEqual(failed.exitCode, 0);
  assert.match(await failed.stderr(), /No such file or directory/);
});

test("sudo is for the sandbox's own user, not for those it made", async () => {
  assert.equal(await out(alice.runCommand({ cmd: "whoami", sudo: true })), "root");
  const tried = await alice.runCommand("sudo", ["-n", "true"]);
  assert.notEqual(tried.exitCode, 0);
});

test("detached commands of a user can be ended", async () => {
  const started = await alice.runCommand({ cmd: "sleep", args: ["100"], detached: true });
  await started.kill("SIGTERM");
  assert.notEqual((await started.wait()).exitCode, 0);
});

test("files are written as the user's own and read back as the user", async () => {
  await alice.writeFiles([
    { path: "hello.txt", content: Buffer.from("hello") },
    { path: "sub/dir/deep.txt", content: Buffer.from("deep") },
    { path: "/tmp/of-alice.txt", content: Buffer.from("abs") },
    { path: "private.txt", content: Buffer.from("secret"), mode: 0o600 },
  ]);
  assert.equal(await as_root("stat -c %U:%G /home/alice/hello.txt /tmp/of-alice.txt"), "alice:alice\nalice:alice");
  for (const [path, content] of [
    ["hello.txt", "hello"],
    ["sub/dir/deep.txt", "deep"],
    ["/tmp/of-alice.txt", "abs"],
    ["private.txt", "secret"],
  ]) {
    assert.equal((await alice.readFileToBuffer({ path })).toString(), content);
  }
  let streamed = "";
  for await (const chunk of await alice.readFile({ path: "hello.txt" })) streamed += chunk;
  assert.equal(streamed, "hello");
  assert.equal(await alice.readFileToBuffer({ path: "nope.txt" }), null);
});

test("bytes that are no text are read back as a user", async () => {
  const bytes = Buffer.from(Array.from({ length: 256 }, (_, i) => i));
  await alice.writeFiles([{ path: "bytes", content: bytes }]);
  assert.ok(bytes.equals(await alice.readFileToBuffer({ path: "bytes" })));
});

test("a user's directory is the user's, and can be written into", async () => {
  await alice.mkDir("projects");
  assert.equal(await as_root("stat -c '%U:%G %a' /home/alice/projects"), `alice:${default_group} 770`);
  await alice.writeFiles([{ path: "projects/app.js", content: Buffer.from("ok") }]);
  assert.equal((await alice.readFileToBuffer({ path: "projects/app.js" })).toString(), "ok");
});

test("users cannot read, list, write or run each other's files", async () => {
  await alice.writeFiles([
    { path: "secret.txt", content: Buffer.from("x") },
    { path: "run.sh", content: Buffer.from("#!/bin/sh\necho pwned"), mode: 0o755 },
  ]);
  for (const [cmd, ...args] of [
    ["cat", "/home/alice/secret.txt"],
    ["ls", "/home/alice"],
    ["touch", "/home/alice/mine"],
  ]) {
    const tried = await bob.runCommand(cmd, args);
    assert.notEqual(tried.exitCode, 0);
    assert.match(await tried.stderr(), /Permission denied/);
  }
  assert.notEqual((await bob.runCommand("/home/alice/run.sh")).exitCode, 0);
  await assert.rejects(bob.readFileToBuffer({ path: "/home/alice/secret.txt" }), /Permission denied/);
});

test("a group has a directory its members share, and others do not", async () => {
  const { sharedDir } = await box.createGroup("devs");
  assert.equal(sharedDir, "/shared/devs");
  assert.match(await as_root("stat -c '%G %a' /shared/devs"), /^devs 2770$/);
  await alice.addToGroup("devs");
  const wrote = await alice.runCommand("sh", ["-c", "echo shared > /shared/devs/file"]);
  assert.equal(wrote.exitCode, 0, await wrote.stderr());
  assert.equal(await as_root("stat -c %G /shared/devs/file"), "devs");
  assert.notEqual((await bob.runCommand("cat", ["/shared/devs/file"])).exitCode, 0);
  await box.addUserToGroup("bob", "devs");
  assert.equal(await out(bob.runCommand("cat", ["/shared/devs/file"])), "shared");
  await bob.removeFromGroup("devs");
  assert.notEqual((await bob.runCommand("cat", ["/shared/devs/file"])).exitCode, 0);
  await assert.rejects(box.createGroup("devs"), /already exists/);
});

test("asUser takes a user that is there, root too", async () => {
  assert.equal(await out(box.asUser("root").runCommand("whoami")), "root");
  assert.equal(await out(box.asUser("root").runCommand("pwd")), "/root");
  assert.equal(await out(box.asUser("alice").runCommand("whoami")), "alice");
});
