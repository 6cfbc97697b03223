import assert from "node:assert/strict";
import { before, test } from "node:test";

import { fresh, remove, remove_at_end } from "../support.mjs";
import { Sandbox, refused } from "./sdk.mjs";

// Six sandboxes made one after the other, with names in another order than their ages.
const prefix = fresh("list");
const names = ["d", "b", "f", "a", "e", "c"].map((letter) => `${prefix}-${letter}`);
const tag = { group: prefix };

before(async () => {
  for (const name of names) {
    const parity = names.indexOf(name) % 2 ? "odd" : "even";
    const box = await Sandbox.create({ name, tags: { ...tag, parity } });
    remove_at_end(name);
    if (parity === "odd") await box.stop();
  }
});

const listed = async (params) => (await (await Sandbox.list(params)).toArray()).map((box) => box.name);

test("the newest come first", async () => {
  assert.deepEqual(await listed({ tags: tag }), [...names].reverse());
  assert.deepEqual(await listed({ tags: tag, sortBy: "createdAt", sortOrder: "asc" }), names);
});

test("a new sandbox is the first of all", async () => {
  const box = await Sandbox.create({ name: fresh("newest") });
  try {
    const { sandboxes } = await Sandbox.list({ limit: 50 });
    assert.ok(sandboxes.some(({ name }) => name === box.name));
  } finally {
    await remove(box.name);
  }
});

test("sorted by name, with a prefix", async () => {
  const sorted = [...names].sort();
  assert.deepEqual(await listed({ namePrefix: prefix, sortBy: "name", sortOrder: "asc" }), sorted);
  assert.deepEqual(await listed({ namePrefix: prefix, sortBy: "name", sortOrder: "desc" }), sorted.reverse());
  assert.deepEqual(await listed({ namePrefix: `${prefix}-b`, sortBy: "name" }), [`${prefix}-b`]);
  assert.deepEqual(await listed({ namePrefix: `${prefix}-zzz`, sortBy: "name" }), []);
});

test("a prefix without sorting by name is refused", async () => {
  await refused(Sandbox.list({ namePrefix: prefix, sortBy: "createdAt" }), 400, "bad_request");
});

test("sorted by when they last changed their state", async () => {
  const { sandboxes } = await Sandbox.list({ sortBy: "statusUpdatedAt", sortOrder: "desc", limit: 50 });
  const times = sandboxes.map((box) => box.statusUpdatedAt);
  assert.deepEqual(times, [...times].sort((a, b) => b - a));
});

test("pages follow each other without gap or double", async () => {
  for (const params of [
    { sortBy: "createdAt", sortOrder: "desc", tags: tag },
    { sortBy: "createdAt", sortOrder: "asc", tags: tag },
    { sortBy: "name", sortOrder: "asc", namePrefix: prefix },
  ]) {
    for (const limit of [1, 2, 4, 6, 50]) {
      const pages = [];
      for await (const page of (await Sandbox.list({ ...params, limit })).pages()) {
        pages.push(page.sandboxes.length);
        assert.equal(page.pagination.count, page.sandboxes.length);
      }
      assert.ok(pages.slice(0, -1).every((length) => length === limit), `${pages}`);
      assert.deepEqual((await listed({ ...params, limit })).sort(), [...names].sort());
    }
  }
});

test("a page that holds everything has no next one", async () => {
  const { pagination } = await Sandbox.list({ tags: tag, limit: 50 });
  assert.equal(pagination.next, null);
  assert.equal(pagination.count, 6);
});

test("what is deleted between two pages is not seen, and nothing else is missed", async () => {
  const extra = fresh("vanish");
  const group = { vanish: extra };
  for (const letter of ["a", "b", "c", "d"]) await Sandbox.create({ name: `${extra}-${letter}`, tags: group });
  const page = await Sandbox.list({ tags: group, limit: 2, sortOrder: "asc" });
  assert.deepEqual(page.sandboxes.map((box) => box.name), [`${extra}-a`, `${extra}-b`]);
  await remove(`${extra}-b`);
  const next = await Sandbox.list({ tags: group, limit: 2, sortOrder: "asc", cursor: page.pagination.next });
  assert.deepEqual(next.sandboxes.map((box) => box.name), [`${extra}-c`, `${extra}-d`]);
  for (const letter of ["a", "c", "d"]) await remove(`${extra}-${letter}`);
});

test("tags filter by key and value", async () => {
  assert.deepEqual(await listed({ tags: { group: "nobody" } }), []);
  assert.deepEqual(await listed({ tags: { nobody: prefix } }), []);
  const { sandboxes } = await Sandbox.list({ tags: tag, limit: 1 });
  assert.equal(sandboxes[0].tags.group, prefix);
});

test("a list tells the state and the snapshot of each", async () => {
  const { sandboxes } = await Sandbox.list({ tags: tag, limit: 50 });
  for (const box of sandboxes) {
    const odd = box.tags.parity === "odd";
    assert.equal(box.status, odd ? "stopped" : "running", box.name);
    assert.equal(typeof box.currentSnapshotId, odd ? "string" : "undefined", box.name);
    assert.equal("expiresAt" in box, !odd, box.name);
    assert.equal(typeof box.currentSessionId, "string");
    assert.equal(box.env, undefined, "an environment is never told");
  }
});

for (const [what, params] of [
  ["a limit of nothing", { limit: 0 }],
  ["a limit beyond the page", { limit: 51 }],
  ["an order nobody knows", { sortOrder: "sideways" }],
  ["a field nobody sorts by", { sortBy: "mood" }],
  ["a cursor nobody gave out", { cursor: "not-a-cursor" }],
]) {
  test(`a list with ${what} is refused`, async () => {
    await refused(Sandbox.list(params), 400, "bad_request");
  });
}
