// Requests as they go over the wire: what the clients hide, and what a third party's test would look at.

import assert from "node:assert/strict";
import { gzipSync } from "node:zlib";

import { ask, fresh, project, remove, team } from "../support.mjs";

export const query = { teamId: team, projectId: project };

/** Asks, expects the status, and returns the answer. */
export async function answered(status, method, path, options = {}) {
  const answer = await ask(method, path, options);
  assert.equal(answer.status, status, `${method} ${path}: ${answer.text}`);
  return answer;
}

/** Expects a refusal in the form every client reads. */
export async function refused(status, code, method, path, options = {}) {
  const { json, text, type } = await answered(status, method, path, options);
  assert.match(type, /^application\/json/, text);
  assert.deepEqual(Object.keys(json), ["error"], text);
  assert.equal(typeof json.error.message, "string", text);
  assert.notEqual(json.error.message, "");
  if (code !== undefined) assert.equal(json.error.code, code, text);
  return json.error;
}

/** A sandbox for one test. */
export async function sandbox(t, body = {}) {
  const name = fresh("wire");
  t.after(() => remove(name));
  const { json } = await answered(200, "POST", "/api/v3/sandboxes", { query, body: { projectId: project, name, ...body } });
  no_nulls(json);
  return { ...json, name, session_path: `/api/v2/sandboxes/sessions/${json.session.id}` };
}

/** Starts a command and waits for it, as the clients do; the lines of the answer. */
export async function run(box, body) {
  const { text, type } = await answered(200, "POST", `${box.session_path}/cmd`, {
    query,
    body: { args: [], env: {}, sudo: false, wait: true, logs: true, ...body },
  });
  assert.equal(type, "application/x-ndjson");
  return text.split("\n").filter((line) => line.trim() !== "").map((line) => JSON.parse(line));
}

/** All that a command wrote to its output. */
export const said = (lines) => lines.filter((line) => line.stream === "stdout").map((line) => line.data).join("");

/** Absent, never null: their validators throw the whole answer away otherwise. */
export function no_nulls(value, at = "") {
  if (value === null) {
    assert.ok(/\.(exitCode|next)$/.test(at), `${at} is null`);
  } else if (typeof value === "object") {
    for (const [key, inner] of Object.entries(value)) no_nulls(inner, `${at}.${key}`);
  }
}

/** A tar archive, packed, of `[name, content, mode]`. */
export function tar(entries) {
  const blocks = [];
  for (const [name, content, mode = 0o644] of entries) {
    const data = Buffer.from(content);
    const header = Buffer.alloc(512);
    header.write(name, 0);
    header.write(`${mode.toString(8).padStart(7, "0")}\0`, 100);
    header.write("0000000\0", 108);
    header.write("0000000\0", 116);
    header.write(`${data.length.toString(8).padStart(11, "0")}\0`, 124);
    header.write("00000000000\0", 136);
    header.write("        0ustar\u000000", 148);
    const sum = header.reduce((a, b) => a + b, 0);
    header.write(`${sum.toString(8).padStart(6, "0")}\0 `, 148);
    blocks.push(header, data, Buffer.alloc((512 - (data.length % 512)) % 512));
  }
  return gzipSync(Buffer.concat([...blocks, Buffer.alloc(1024)]));
}
