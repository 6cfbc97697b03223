// The published command line, as a person runs it.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after } from "node:test";
import { fileURLToPath } from "node:url";

import { ask, fresh, packages, project, remove, team } from "../support.mjs";

const program = join(packages, "cli", "node_modules", "sandbox", "bin", "sandbox.mjs");
const python = join(packages, "python", "bin", "python");
const terminal = fileURLToPath(new URL("terminal.py", import.meta.url));

/** A home without anybody's login, and a place for files. */
export const home = mkdtempSync(join(tmpdir(), "keep-conformance-"));
after(() => rmSync(home, { recursive: true }));

const environment = {
  ...process.env,
  HOME: home,
  XDG_CONFIG_HOME: join(home, ".config"),
  XDG_DATA_HOME: join(home, ".local"),
  NO_COLOR: "1",
  FORCE_COLOR: "0",
  TERM: "xterm",
};
delete environment.CI;

/** Runs `sandbox` with these arguments to its end. */
export function cli(...args) {
  return cli_with({}, ...args);
}

export function cli_with(env, ...args) {
  return new Promise((resolve) => {
    const options = { cwd: home, env: { ...environment, ...env }, maxBuffer: 1 << 28, timeout: 120_000 };
    execFile(process.execPath, [program, ...args], options, (error, stdout, stderr) => {
      resolve({ code: error ? (error.code ?? error.signal) : 0, stdout, stderr, all: stdout + stderr });
    });
  });
}

/** Runs it, expects success, and returns what it printed. */
export async function ok(...args) {
  const done = await cli(...args);
  assert.equal(done.code, 0, `sandbox ${args.join(" ")}: ${done.code}\n${done.all}`);
  return done;
}

/** Plays a scene with it in a terminal. */
export function in_terminal(scene, ...args) {
  return new Promise((resolve, reject) => {
    const argv = [terminal, JSON.stringify(scene), process.execPath, program, ...args];
    const options = { cwd: home, env: environment, timeout: 120_000 };
    execFile(python, argv, options, (error, stdout, stderr) => {
      if (error) return reject(new Error(`${error.message}\n${stderr}`));
      const played = JSON.parse(stdout);
      assert.equal(played.missed, null, `never shown: ${played.missed}\nshown: ${played.shown}`);
      resolve(played);
    });
  });
}

/** A sandbox made by the command line, for one test. */
export async function created(t, ...args) {
  const name = fresh("cli");
  const done = await ok("create", "--name", name, ...args);
  t.after(() => remove(name));
  assert.equal(done.stdout.trim(), name, "the name, and nothing else, is for scripts");
  return name;
}

/** A sandbox for one test that is about something else than making it. */
export async function made(t) {
  const name = fresh("cli");
  t.after(() => remove(name));
  const query = { teamId: team, projectId: project };
  const { status, text } = await ask("POST", "/api/v3/sandboxes", { query, body: { projectId: project, name } });
  assert.equal(status, 200, text);
  return name;
}

/** The rows of a table it printed, by their header. */
export function table(text) {
  const [header, ...rows] = text.split("\n").filter((line) => line.trim() !== "");
  const columns = [...header.matchAll(/(\S+(?: \S+)*)\s*/g)].map((match) => [match[1], match.index]);
  return rows.map((row) =>
    Object.fromEntries(columns.map(([name, at], i) => [name, row.slice(at, columns[i + 1]?.[1]).trim()])),
  );
}
