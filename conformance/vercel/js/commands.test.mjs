import assert from "node:assert/strict";
import { PassThrough } from "node:stream";
import { before, test } from "node:test";

import { eventually, sleep } from "../support.mjs";
import { Command, CommandFinished, refused, sh, shared } from "./sdk.mjs";

let box;
before(async () => {
  box = await shared({ env: { FROM_SANDBOX: "yes", BOTH: "sandbox" } });
});

test("a command with arguments gives its output and exit code", async () => {
  const done = await box.runCommand("echo", ["-n", "one two", "three"]);
  assert.ok(done instanceof CommandFinished);
  assert.equal(done.exitCode, 0);
  assert.equal(await done.stdout(), "one two three");
  assert.equal(await done.stderr(), "");
  assert.equal(typeof done.durationMs, "number");
  assert.ok(Math.abs(done.startedAt - Date.now()) < 60_000);
  assert.match(done.cmdId, /./);
});

test("arguments arrive as they were given", async () => {
  const odd = ["", " ", "a b", "$HOME", "`id`", "\"'\\", "new\nline", "ünïcödé 🦀", "-x"];
  const done = await box.runCommand("bash", ["-c", 'for a in "$@"; do printf "<%s>" "$a"; done', "x", ...odd]);
  assert.equal(await done.stdout(), odd.map((a) => `<${a}>`).join(""));
});

for (const code of [0, 1, 7, 126, 127, 255]) {
  test(`exit code ${code} is passed on`, async () => {
    const done = await box.runCommand("sh", ["-c", `exit ${code}`]);
    assert.equal(done.exitCode, code);
  });
}

test("streams are told apart and together keep their order", async () => {
  const script = "echo out1; sleep 0.2; echo err1 >&2; sleep 0.2; echo out2";
  const done = await box.runCommand({ cmd: "sh", args: ["-c", script], detached: true });
  assert.equal(await done.stdout(), "out1\nout2\n");
  assert.equal(await done.stderr(), "err1\n");
  assert.equal(await done.output("both"), "out1\nerr1\nout2\n");
});

test("output is piped to writable streams while it comes", async () => {
  const stdout = new PassThrough().setEncoding("utf8");
  const stderr = new PassThrough().setEncoding("utf8");
  const script = "echo early; sleep 1; echo late; echo bad >&2";
  const started = Date.now();
  let early;
  stdout.once("data", () => (early = Date.now() - started));
  const done = await box.runCommand({ cmd: "sh", args: ["-c", script], stdout, stderr });
  assert.ok(Date.now() - started - early >= 500, "the first line came before the command was over");
  assert.equal(await done.stdout(), "early\nlate\n");
  assert.equal(stderr.read(), "bad\n");
});

test("the sandbox's environment is there, and a command's own wins", async () => {
  const env = { BOTH: "command", OWN: "a=b c" };
  const done = await box.runCommand({ cmd: "sh", args: ["-c", 'echo "$FROM_SANDBOX|$BOTH|$OWN"'], env });
  assert.equal(await done.stdout(), "yes|command|a=b c\n");
});

test("a command's environment is gone with it", async () => {
  await box.runCommand({ cmd: "true", env: { ONCE: "1" } });
  assert.equal(await sh(box, 'echo "[$ONCE]"'), "[]");
});

test("the working directory is the sandbox's, or the one given", async () => {
  assert.equal(await sh(box, "pwd"), box.cwd);
  assert.equal(await sh(box, "pwd", { cwd: "/tmp" }), "/tmp");
  await box.mkDir("deep/er");
  assert.equal(await sh(box, "pwd", { cwd: `${box.cwd}/deep/er` }), `${box.cwd}/deep/er`);
});

test("a working directory that does not exist is refused", async () => {
  const gone = box.runCommand({ cmd: "true", cwd: "/no/such/place" });
  const error = await gone.then((done) => assert.fail(`exit code ${done.exitCode}`), (error) => error);
  assert.equal(error.response.status, 400, error.text);
  assert.match(error.json.error.message, /\/no\/such\/place/);
});

test("commands run as a user without rights, and with sudo as root", async () => {
  const name = await sh(box, "id -un");
  assert.notEqual(name, "root");
  assert.notEqual(await sh(box, "id -u"), "0");
  const root = "echo $(id -u) $HOME $USER $SUDO_USER";
  assert.equal(await sh(box, root, { sudo: true }), `0 /root root ${name}`);
  const env = { MINE: "kept" };
  assert.equal(await sh(box, "echo $MINE", { sudo: true, env }), "kept");
  assert.equal(await sh(box, "sudo id -un"), "root");
  const denied = await box.runCommand("touch", ["/etc/not-mine"]);
  assert.notEqual(denied.exitCode, 0);
  assert.equal(await sh(box, "touch /etc/mine && echo done", { sudo: true }), "done");
});

test("a program that does not exist is refused by name", async () => {
  const error = await refused(box.runCommand("no-such-program"), 400, "executable_not_found");
  assert.match(error.json.error.message, /no-such-program/);
  const detached = box.runCommand({ cmd: "no-such-program", detached: true });
  await refused(detached, 400, "executable_not_found");
});

test("a line for a shell is no program", async () => {
  await refused(box.runCommand("echo hello && ls"), 400, "executable_not_found");
});

test("standard input is empty, not missing", async () => {
  const done = await box.runCommand({ cmd: "cat", timeoutMs: 10_000 });
  assert.equal(done.exitCode, 0);
  assert.equal(await done.stdout(), "");
});

test("letters of many bytes stay whole, however the output is cut", async () => {
  const script = `for i in $(seq 400); do printf 'äöü€🦀日本 %s\\n' $i; printf '\\360\\237'; printf '\\246\\200\\n'; done`;
  const expected = Array.from({ length: 400 }, (_, i) => `äöü€🦀日本 ${i + 1}\n🦀\n`).join("");
  const done = await box.runCommand("bash", ["-c", script]);
  assert.equal(await done.stdout(), expected);
});

test("a letter written in two halves is one letter", async () => {
  const done = await box.runCommand("bash", ["-c", "printf '\\342\\202'; sleep 0.5; printf '\\254'"]);
  assert.equal(await done.stdout(), "€");
});

test("bytes that are no text become replacement characters and break nothing", async () => {
  const done = await box.runCommand("bash", ["-c", "printf 'a\\377b\\200c'"]);
  assert.equal(await done.stdout(), "a\uFFFDb\uFFFDc");
});

test("control characters and quotes survive", async () => {
  const done = await box.runCommand("printf", ['\\033[1m"bold"\\033[0m\\t\\\\ \\r\\n']);
  assert.equal(await done.stdout(), '\u001b[1m"bold"\u001b[0m\t\\ \r\n');
});

test("eight megabytes of output arrive whole", async () => {
  const done = await box.runCommand("bash", ["-c", "seq 1100000; echo end >&2"]);
  const text = await done.stdout();
  const lines = text.split("\n");
  assert.equal(lines.length, 1_100_001);
  assert.equal(lines[1_099_999], "1100000");
  assert.equal(await done.stderr(), "end\n");
});

test("a detached command runs on, and can be waited for", async () => {
  const started = await box.runCommand({ cmd: "sh", args: ["-c", "sleep 1; echo over; exit 3"], detached: true });
  assert.ok(started instanceof Command && !(started instanceof CommandFinished));
  assert.equal(started.exitCode, null);
  const done = await started.wait();
  assert.equal(done.exitCode, 3);
  assert.equal(await done.stdout(), "over\n");
});

test("getCommand finds a command while it runs and when it is over", async () => {
  const started = await box.runCommand({ cmd: "sleep", args: ["60"], detached: true });
  const found = await box.getCommand(started.cmdId);
  assert.equal(found.cmdId, started.cmdId);
  assert.equal(found.exitCode, null);
  await found.kill("SIGKILL");
  assert.equal((await found.wait()).exitCode, 137);
  assert.equal((await box.getCommand(started.cmdId)).exitCode, 137);
});

test("getCommand of a command nobody ran is not found", async () => {
  await refused(box.getCommand("cmd_nobodyrun"), 404);
});

test("logs are replayed from the start to everyone who asks", async () => {
  const started = await box.runCommand({
    cmd: "sh",
    args: ["-c", "echo first; sleep 1; echo last"],
    detached: true,
  });
  const read = async () => {
    let text = "";
    for await (const { stream, data } of started.logs()) text += `${stream}:${data}`;
    return text;
  };
  const live = [read(), read()];
  await started.wait();
  const all = [...(await Promise.all(live)), await read()];
  assert.deepEqual(all, Array(3).fill("stdout:first\nstdout:last\n"));
});

test("a log can be closed while the command runs on", async () => {
  const started = await box.runCommand({ cmd: "sh", args: ["-c", "echo one; sleep 60"], detached: true });
  const logs = started.logs();
  for await (const { data } of logs) {
    assert.equal(data, "one\n");
    break;
  }
  assert.equal((await box.getCommand(started.cmdId)).exitCode, null);
  await started.kill();
});

for (const [signal, code] of [
  ["SIGTERM", 143],
  ["SIGKILL", 137],
  ["SIGINT", 130],
  ["SIGHUP", 129],
  [12, 140],
]) {
  test(`${signal} ends a command with ${code}`, async () => {
    const started = await box.runCommand({ cmd: "sleep", args: ["60"], detached: true });
    await started.kill(signal);
    assert.equal((await started.wait()).exitCode, code);
  });
}

test("a command that catches a signal decides itself", async () => {
  const script = "trap 'echo caught; exit 5' TERM; echo ready; while :; do sleep 0.1; done";
  const started = await box.runCommand({ cmd: "bash", args: ["-c", script], detached: true });
  for await (const { data } of started.logs()) if (data.includes("ready")) break;
  await started.kill();
  const done = await started.wait();
  assert.equal(done.exitCode, 5);
  assert.equal(await done.stdout(), "ready\ncaught\n");
});

test("a signal to a command that is over is not found", async () => {
  const done = await box.runCommand("true");
  await refused(done.kill(), 404);
});

test("a command that takes too long is killed, with what it said kept", async () => {
  const started = Date.now();
  const done = await box.runCommand({ cmd: "sh", args: ["-c", "echo said; sleep 60"], timeoutMs: 500 });
  assert.equal(done.exitCode, 137);
  assert.equal(await done.stdout(), "said\n");
  assert.ok(Date.now() - started < 30_000);
});

test("the short form takes a timeout too", async () => {
  assert.equal((await box.runCommand("sleep", ["60"], { timeoutMs: 300 })).exitCode, 137);
});

test("a timeout reaches the children of a command", async () => {
  const script = "sleep 4321 & sleep 4321";
  const done = await box.runCommand({ cmd: "sh", args: ["-c", script], timeoutMs: 300 });
  assert.equal(done.exitCode, 137);
  const count = () => sh(box, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c 'sleep 432[1]' || true");
  await eventually(async () => (await count()) === "0", "no child is left");
});

test("a timeout too short to mean anything is refused", async () => {
  await refused(box.runCommand("true", [], { timeoutMs: 1 }), 400);
});

test("giving up on a command does not end it", async () => {
  const giving_up = AbortSignal.timeout(300);
  const marker = `/tmp/abandoned-${Date.now()}`;
  const run = box.runCommand({ cmd: "sh", args: ["-c", `sleep 1; touch ${marker}`], signal: giving_up });
  await assert.rejects(run);
  await eventually(async () => (await box.runCommand("test", ["-e", marker])).exitCode === 0, "it went on");
});

test("many commands at once each get their own output", async () => {
  const numbers = Array.from({ length: 24 }, (_, i) => i);
  const done = await Promise.all(numbers.map((n) => box.runCommand("sh", ["-c", `sleep 0.2; echo ${n}; exit ${n}`])));
  for (const n of numbers) {
    assert.equal(done[n].exitCode, n);
    assert.equal(await done[n].stdout(), `${n}\n`);
  }
});

test("what a command leaves running keeps running and holds nothing up", async () => {
  const done = await box.runCommand("bash", ["-c", "(sleep 2; touch /tmp/later) >/dev/null 2>&1 & echo started"]);
  assert.equal(await done.stdout(), "started\n");
  await sleep(100);
  await eventually(async () => (await box.runCommand("test", ["-e", "/tmp/later"])).exitCode === 0, "it ran on");
});
