// The published package this run is about: CONFORMANCE_SDK names the folder it is installed in.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

import { fresh, packages, remove, remove_at_end } from "../support.mjs";

const home = join(packages, process.env.CONFORMANCE_SDK ?? "sdk-3", "node_modules", "@vercel", "sandbox");
const manifest = JSON.parse(readFileSync(join(home, "package.json"), "utf8"));

export const version = manifest.version;
const major = Number(version.split(".")[0]);

/** For `skip`: why a case cannot be asked of this version, or `false`. */
export const since = (needed, what) => (major < needed ? `${what} came with ${needed}.0` : false);

export const { Sandbox, Session, Snapshot, Drive, APIError, StreamError, CommandFinished, Command, SandboxUser } =
  await import(pathToFileURL(join(home, manifest.exports["."].import)).href);

/** A sandbox for one test; it goes with the test. */
export async function sandbox(t, params = {}) {
  const made = await Sandbox.create({ name: fresh("js"), ...params });
  t.after(() => remove(made.name));
  return made;
}

/** A sandbox for all tests of a file. */
export async function shared(params = {}) {
  const made = await Sandbox.create({ name: fresh("js"), ...params });
  remove_at_end(made.name);
  return made;
}

/** Runs a shell script, which must succeed, and returns what it printed. */
export async function sh(box, script, params = {}) {
  const done = await box.runCommand({ cmd: "bash", args: ["-c", script], ...params });
  assert.equal(done.exitCode, 0, `${script}: ${await done.stderr()}`);
  return (await done.stdout()).trimEnd();
}

/** Expects the server to refuse, and returns the error. */
export async function refused(promise, status, code) {
  const error = await promise.then(
    () => assert.fail(`it should have been refused with ${status}`),
    (error) => error,
  );
  assert.ok(error instanceof APIError, `not the server's answer: ${error.stack}`);
  assert.equal(error.response.status, status, error.text);
  assert.equal(typeof error.json.error.message, "string", error.text);
  if (code !== undefined) assert.equal(error.json.error.code, code, error.text);
  return error;
}
