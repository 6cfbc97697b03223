import assert from "node:assert/strict";
import { test } from "node:test";

import { in_terminal, made, ok } from "./cli.mjs";
import { fresh, remove } from "../support.mjs";

test("ssh is a shell in a terminal of the right size, and its exit code is passed on", async (t) => {
  const name = await made(t);
  const scene = [
    ["expect", "▲"],
    ["send", "tty; stty size; echo pwd=$(pwd)\r"],
    ["expect", "/dev/pts/"],
    ["expect", "24 80"],
    ["expect", "pwd=/"],
    ["send", "exit 7\r"],
  ];
  const { code, shown } = await in_terminal(scene, "ssh", name);
  assert.equal(code, 7, shown);
  assert.match(shown, /connection to .* closed/);
});

test("a window that changes its size is heard of inside", async (t) => {
  const name = await made(t);
  const scene = [
    ["expect", "▲"],
    ["send", "trap 'echo size: $(stty size)' WINCH; echo rea''dy\r"],
    ["expect", "ready"],
    ["resize", 132, 50],
    ["send", "sleep 1; stty size\r"],
    ["expect", "50 132"],
    ["send", "exit\r"],
  ];
  assert.equal((await in_terminal(scene, "ssh", name)).code, 0);
});

test("keys are passed on: interrupt, end of input, letters of many bytes", async (t) => {
  const name = await made(t);
  const scene = [
    ["expect", "▲"],
    ["send", "sleep 600\r"],
    ["send", "\u0003"],
    ["expect", "▲"],
    ["send", "echo code=$?\r"],
    ["expect", "code=130"],
    ["send", "echo gr''üße\r"],
    ["expect", "grüße"],
    ["send", "cat > typed\r"],
    ["send", "some text\r\u0004"],
    ["expect", "▲"],
    ["send", "cat typed; echo do''ne\r"],
    ["expect", "some text"],
    ["expect", "done"],
    ["send", "\u0004"],
  ];
  await in_terminal(scene, "ssh", name);
});

test("exec -i runs a program in a terminal, with environment, directory and sudo", async (t) => {
  const name = await made(t);
  const program = ["sh", "-c", "echo $X $TERM $(pwd) $(id -un); tty; exit 5"];
  const scene = [["expect", "y xterm-256color /tmp root"], ["expect", "/dev/pts/"]];
  const { code } = await in_terminal(scene, "exec", "--interactive", "--tty", "--sudo", "-e", "X=y", "-w", "/tmp", name, ...program);
  assert.equal(code, 5);
});

test("ssh wakes a sandbox that sleeps", async (t) => {
  const name = await made(t);
  await ok("exec", name, "sh", "-c", "echo kept > file");
  await ok("stop", name);
  const scene = [["expect", "▲"], ["send", "cat file\r"], ["expect", "kept"], ["send", "exit\r"]];
  assert.equal((await in_terminal(scene, "ssh", name)).code, 0);
});

test("two terminals of one sandbox do not disturb each other", async (t) => {
  const name = await made(t);
  const scene = (word) => [["expect", "▲"], ["send", `sleep 1; echo ${word}''${word}\r`], ["expect", word + word], ["send", "exit\r"]];
  const [one, two] = await Promise.all([in_terminal(scene("one"), "ssh", name), in_terminal(scene("two"), "ssh", name)]);
  assert.ok(!one.shown.includes("twotwo") && !two.shown.includes("oneone"));
});

test("much output arrives whole", async (t) => {
  const name = await made(t);
  const scene = [["expect", "▲"], ["send", "seq 1 20000; echo en''d\r"], ["expect", "end"], ["send", "exit\r"]];
  const { shown } = await in_terminal(scene, "ssh", name);
  const numbers = shown.split(/\r?\n/).filter((line) => /^\d+\r?$/.test(line));
  assert.equal(numbers.length, 20000);
});

test("sh makes a sandbox, opens it and removes it", async () => {
  const name = fresh("cli");
  const scene = [["expect", "▲"], ["send", "echo in''side\r"], ["expect", "inside"], ["send", "exit\r"]];
  try {
    await in_terminal(scene, "sh", "--rm", "--name", name);
    assert.doesNotMatch((await ok("ls", "--all", "--name-prefix", name)).stdout, new RegExp(name));
  } finally {
    await remove(name);
  }
});
