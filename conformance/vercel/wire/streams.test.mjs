import assert from "node:assert/strict";
import { test } from "node:test";

import { ask, token, url } from "../support.mjs";
import { answered, no_nulls, query, refused, run, said, sandbox, tar } from "./wire.mjs";

test("a command that is waited for: its record, its output, its record with an exit code", async (t) => {
  const box = await sandbox(t);
  const lines = await run(box, { command: "sh", args: ["-c", "echo out; echo err >&2; exit 3"] });
  const first = lines[0].command;
  const last = lines.at(-1).command;
  no_nulls(lines);
  assert.equal(first.exitCode, null);
  assert.equal(first.durationMs, undefined);
  assert.equal(last.exitCode, 3);
  assert.ok(last.durationMs >= 0);
  assert.equal(first.id, last.id);
  assert.equal(first.sessionId, box.session.id);
  assert.equal(last.sessionId, box.session.id);
  assert.equal(first.name, "sh");
  assert.deepEqual(first.args, ["-c", "echo out; echo err >&2; exit 3"]);
  assert.equal(first.cwd, box.session.cwd);
  const between = lines.slice(1, -1);
  for (const line of between) assert.deepEqual(Object.keys(line).sort(), ["data", "stream"]);
  const text = (stream) => between.filter((line) => line.stream === stream).map((line) => line.data).join("");
  assert.equal(text("stdout"), "out\n");
  assert.equal(text("stderr"), "err\n");
});

test("without logs there are two lines", async (t) => {
  const box = await sandbox(t);
  const lines = await run(box, { command: "echo", args: ["unheard"], logs: undefined });
  assert.equal(lines.length, 2);
  assert.equal(lines[1].command.exitCode, 0);
});

test("wait and logs are taken from the query too", async (t) => {
  const box = await sandbox(t);
  const { text, type } = await answered(200, "POST", `${box.session_path}/cmd`, {
    query: { ...query, wait: "true", logs: "true" },
    body: { command: "echo", args: ["heard"], env: {}, sudo: false },
  });
  assert.equal(type, "application/x-ndjson");
  assert.match(text, /heard/);
});

test("text outside ASCII is escaped, so that no client can cut a letter in two", async (t) => {
  const box = await sandbox(t);
  const { text } = await answered(200, "POST", `${box.session_path}/cmd`, {
    query,
    body: { command: "echo", args: ["grüße 🦀"], env: {}, sudo: false, wait: true, logs: true },
  });
  assert.ok(/^[\x00-\x7f]*$/.test(text), text);
  const lines = text.trim().split("\n").map((line) => JSON.parse(line));
  assert.deepEqual(lines[0].command.args, ["grüße 🦀"]);
  assert.equal(lines.filter((line) => line.stream).map((line) => line.data).join(""), "grüße 🦀\n");
});

test("the first line comes when the command starts, not when it ends", async (t) => {
  const box = await sandbox(t);
  const target = new URL(`${url}${box.session_path}/cmd`);
  const started = Date.now();
  const response = await fetch(target, {
    method: "POST",
    headers: { authorization: `Bearer ${token}` },
    body: JSON.stringify({ command: "sleep", args: ["3"], env: {}, sudo: false, wait: true, logs: true }),
  });
  const reader = response.body.getReader();
  const { value } = await reader.read();
  const early = Date.now() - started;
  assert.equal(JSON.parse(Buffer.from(value).toString().split("\n")[0]).command.exitCode, null);
  while (!(await reader.read()).done);
  assert.ok(Date.now() - started - early > 1500, "and the rest later");
});

test("a detached command is answered at once, listed newest first, and waited for by id", async (t) => {
  const box = await sandbox(t);
  const body = (n) => ({ command: "sh", args: ["-c", `sleep 0.5; exit ${n}`], env: {}, sudo: false });
  const ids = [];
  for (const n of [1, 2, 3]) {
    const { json, type } = await answered(200, "POST", `${box.session_path}/cmd`, { query, body: body(n) });
    assert.match(type, /^application\/json/);
    assert.equal(json.command.exitCode, null);
    ids.push(json.command.id);
  }
  const { commands } = (await answered(200, "GET", `${box.session_path}/cmd`, { query })).json;
  assert.deepEqual(commands.map((command) => command.id), [...ids].reverse());
  no_nulls(commands.map((command) => ({ ...command, exitCode: 0 })));
  for (const [i, id] of ids.entries()) {
    const { text } = await answered(200, "GET", `${box.session_path}/cmd/${id}`, { query: { ...query, wait: "true" } });
    assert.equal(JSON.parse(text).command.exitCode, i + 1);
  }
});

test("logs are replayed in the same pieces of text to everyone", async (t) => {
  const box = await sandbox(t);
  const body = { command: "sh", args: ["-c", "for i in 1 2 3; do echo o$i; echo e$i >&2; done"], env: {}, sudo: false };
  const { command } = (await answered(200, "POST", `${box.session_path}/cmd`, { query, body })).json;
  await answered(200, "GET", `${box.session_path}/cmd/${command.id}`, { query: { ...query, wait: "true" } });
  const read = async () => {
    const { text, type } = await answered(200, "GET", `${box.session_path}/cmd/${command.id}/logs`, { query });
    assert.equal(type, "application/x-ndjson");
    const lines = text.split("\n").filter((line) => line !== "").map((line) => JSON.parse(line));
    return ["stdout", "stderr"].map((stream) => lines.filter((l) => l.stream === stream).map((l) => l.data).join(""));
  };
  const once = await read();
  assert.deepEqual(once, ["o1\no2\no3\n", "e1\ne2\ne3\n"]);
  assert.deepEqual(await read(), once);
});

for (const [what, body, code] of [
  ["no command", { args: [] }, "bad_request"],
  ["a program nobody has", { command: "no-such-program", args: [] }, "executable_not_found"],
  ["arguments that are no list", { command: "true", args: "x" }, "bad_request"],
  ["a timeout that is too short", { command: "true", args: [], timeout: 99 }, "bad_request"],
  ["an environment of numbers", { command: "true", args: [], env: { A: 1 } }, "bad_request"],
  ["an unknown property", { command: "true", args: [], colour: "red" }, "bad_request"],
]) {
  test(`a command with ${what} is refused, waited for or not`, async (t) => {
    const box = await sandbox(t);
    for (const wait of [undefined, true]) {
      await refused(400, code, "POST", `${box.session_path}/cmd`, { query, body: { ...body, wait } });
    }
  });
}

test("kill answers with the command, and only with a signal that is one", async (t) => {
  const box = await sandbox(t);
  const body = { command: "sleep", args: ["60"], env: {}, sudo: false };
  const { command } = (await answered(200, "POST", `${box.session_path}/cmd`, { query, body })).json;
  const path = `${box.session_path}/cmd/${command.id}`;
  await refused(400, "bad_request", "POST", `${path}/kill`, { query, body: { signal: 999 } });
  await refused(400, "bad_request", "POST", `${path}/kill`, { query, body: { signal: "SIGTERM" } });
  const { json } = await answered(200, "POST", `${path}/kill`, { query, body: { signal: 15 } });
  assert.equal(json.command.id, command.id);
  const done = (await answered(200, "GET", path, { query: { ...query, wait: "true" } })).json;
  assert.equal(done.command.exitCode, 143);
  await refused(404, undefined, "POST", `${path}/kill`, { query, body: { signal: 15 } });
});

test("standard input is taken by offset: once, in order, told how far", async (t) => {
  const box = await sandbox(t);
  const body = { command: "cat", args: [], env: {}, sudo: false, attachStdin: true };
  const { command } = (await answered(200, "POST", `${box.session_path}/cmd`, { query, body })).json;
  const path = `${box.session_path}/cmd/${command.id}`;
  const send = async (sent, status = 200) => (await answered(status, "POST", `${path}/stdin`, { query, body: sent })).json;
  const base64 = (text) => Buffer.from(text).toString("base64");
  assert.equal((await send({})).bytesWritten, 0);
  assert.equal((await send({ data: base64("hello "), offset: 0 })).bytesWritten, 6);
  assert.equal((await send({ data: base64("hello "), offset: 0 })).bytesWritten, 6, "sent again, it is not written again");
  assert.equal((await send({ data: base64("o world"), offset: 4 })).bytesWritten, 11, "what is new of it is");
  assert.equal((await send({ close: true })).bytesWritten, 11);
  const done = (await answered(200, "GET", path, { query: { ...query, wait: "true" } })).json;
  assert.equal(done.command.exitCode, 0);
  const { text } = await answered(200, "GET", `${path}/logs`, { query });
  assert.equal(text.trim().split("\n").map((line) => JSON.parse(line).data).join(""), "hello world");
  await refused(404, "command_not_found_or_exited", "POST", `${path}/stdin`, { query, body: { data: base64("x") } });
});

test("a command without standard input says so", async (t) => {
  const box = await sandbox(t);
  const body = { command: "sleep", args: ["60"], env: {}, sudo: false };
  const { command } = (await answered(200, "POST", `${box.session_path}/cmd`, { query, body })).json;
  const path = `${box.session_path}/cmd/${command.id}/stdin`;
  await refused(400, "command_stdin_unavailable", "POST", path, { query, body: { data: "aGk=" } });
});

test("files are read as bytes, and what is missing is 404 with a code", async (t) => {
  const box = await sandbox(t);
  await run(box, { command: "sh", args: ["-c", "printf 'a\\000b' > file"] });
  const path = `${box.session_path}/fs/read`;
  const { text, type } = await answered(200, "POST", path, { query, body: { path: "file" } });
  assert.equal(type, "application/octet-stream");
  assert.equal(text, "a\0b");
  await refused(404, undefined, "POST", path, { query, body: { path: "nope" } });
  await refused(400, "bad_request", "POST", path, { query, body: {} });
  const { text: relative } = await answered(200, "POST", path, { query, body: { path: "file", cwd: box.session.cwd } });
  assert.equal(relative, "a\0b");
});

test("archives are unpacked where x-cwd says, and never outside", async (t) => {
  const box = await sandbox(t);
  const path = `${box.session_path}/fs/write`;
  const headers = { "content-type": "application/gzip", "x-cwd": "/tmp/here" };
  const { json } = await answered(200, "POST", path, { query, headers, body: tar([["a/b.txt", "deep", 0o640]]) });
  assert.deepEqual(json, {});
  const seen = await run(box, { command: "sh", args: ["-c", "cat /tmp/here/a/b.txt; stat -c ' %a %u' /tmp/here/a/b.txt; id -u"] });
  const [content, mode, user, me] = said(seen).trim().split(/\s+/);
  assert.deepEqual([content, mode, user], ["deep", "640", me]);
  for (const evil of ["../outside", "a/../../outside", "/etc/outside"]) {
    const answer = await ask("POST", path, { query, headers, body: tar([[evil, "x"]]) });
    assert.ok(answer.status === 200 || (answer.status >= 400 && answer.status < 500), answer.text);
  }
  const outside = await run(box, { command: "sh", args: ["-c", "ls /tmp/outside /etc/outside /outside 2>/dev/null | wc -l"] });
  assert.equal(said(outside), "0\n");
});

test("what is no archive is refused", async (t) => {
  const box = await sandbox(t);
  const path = `${box.session_path}/fs/write`;
  const headers = { "content-type": "application/gzip", "x-cwd": "/" };
  const plain = await ask("POST", path, { query, headers, body: "no archive at all" });
  assert.ok(plain.status >= 400 && plain.status < 500, plain.text);
  const json = await ask("POST", path, { query, body: { path: "x" } });
  assert.equal(json.status, 415, json.text);
  const cut = tar([["cut.txt", "x".repeat(100_000)]]);
  const broken = await ask("POST", path, { query, headers, body: cut.subarray(0, cut.length - 20) });
  assert.ok(broken.status >= 400 && broken.status < 500, broken.text);
});

test("mkdir makes parents unless it is told not to", async (t) => {
  const box = await sandbox(t);
  const path = `${box.session_path}/fs/mkdir`;
  assert.deepEqual((await answered(200, "POST", path, { query, body: { path: "a/b/c" } })).json, {});
  await answered(200, "POST", path, { query, body: { path: "d", cwd: "/tmp" } });
  const alone = await ask("POST", path, { query, body: { path: "x/y/z", recursive: false } });
  assert.ok([400, 404].includes(alone.status), alone.text);
  await answered(200, "POST", path, { query, body: { path: "a/z", recursive: false } });
});

test("a terminal is given with an address and a token, and only with that token", async (t) => {
  const box = await sandbox(t);
  const { json } = await answered(200, "POST", `${box.session_path}/interactive`, { query, body: {} });
  assert.match(json.url, /^wss?:\/\//);
  assert.notEqual(json.token, "");
  if (!globalThis.WebSocket) return t.skip("this Node has no WebSocket to try it with");
  const outcome = (address) =>
    new Promise((resolve) => {
      const socket = new WebSocket(address);
      socket.onopen = () => (socket.close(), resolve("open"));
      socket.onerror = () => resolve("refused");
    });
  assert.equal(await outcome(`${json.url}?token=nonsense`), "refused");
  assert.equal(await outcome(json.url), "refused");
  assert.equal(await outcome(`${json.url}?token=${encodeURIComponent(json.token)}`), "open");
});

test("a stopped session is 410 to who would act in it, and answers who looks", async (t) => {
  const box = await sandbox(t);
  const { command } = (await run(box, { command: "echo", args: ["said"] })).at(-1);
  await answered(200, "POST", `${box.session_path}/stop`, { query });
  for (const [path, body] of [
    ["cmd", { command: "true", args: [], env: {}, sudo: false }],
    ["cmd", { command: "true", args: [], env: {}, sudo: false, wait: true }],
    ["fs/mkdir", { path: "x" }],
    ["extend-timeout", { duration: 60_000 }],
    ["snapshot", undefined],
    ["interactive", {}],
  ]) {
    await refused(410, "sandbox_stopped", "POST", `${box.session_path}/${path}`, { query, body });
  }
  await answered(200, "GET", box.session_path, { query });
  await answered(200, "POST", `${box.session_path}/stop`, { query });
  const found = (await answered(200, "GET", `${box.session_path}/cmd/${command.id}`, { query })).json;
  assert.equal(found.command.exitCode, 0);
  assert.match((await answered(200, "GET", `${box.session_path}/cmd/${command.id}/logs`, { query })).text, /said/);
});

test("extend-timeout names what is wrong", async (t) => {
  const box = await sandbox(t);
  const path = `${box.session_path}/extend-timeout`;
  await refused(400, undefined, "POST", path, { query, body: {} });
  await refused(400, undefined, "POST", path, { query, body: { duration: 999 } });
  await refused(400, "sandbox_timeout_invalid", "POST", path, { query, body: { duration: 400 * 24 * 3600 * 1000 } });
  const { json } = await answered(200, "POST", path, { query, body: { duration: 1000 } });
  assert.equal(json.session.timeout, box.session.timeout + 1000);
});

test("who sends an archive to a session that is over hears so, however much there is to send", async (t) => {
  const box = await sandbox(t);
  await answered(200, "POST", `${box.session_path}/stop`, { query });
  const headers = { "content-type": "application/gzip", "x-cwd": "/" };
  for (let round = 0; round < 5; round++) {
    let left = 64;
    const body = new ReadableStream({
      pull(controller) {
        if (left-- === 0) controller.close();
        else controller.enqueue(new Uint8Array(64 << 10));
      },
    });
    await refused(410, "sandbox_stopped", "POST", `${box.session_path}/fs/write`, { query, headers, body });
  }
});
