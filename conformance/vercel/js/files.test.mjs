import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import { mkdtemp, readFile, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { before, test } from "node:test";

import { refused, sh, shared } from "./sdk.mjs";

let box;
before(async () => {
  box = await shared();
});

const read = async (path) => (await box.readFileToBuffer({ path }))?.toString() ?? null;

async function drained(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return Buffer.concat(chunks);
}

test("files are written below the working directory and read back", async () => {
  await box.writeFiles([
    { path: "one.txt", content: Buffer.from("first") },
    { path: "a/b/two.txt", content: "second" },
    { path: "/tmp/three.txt", content: new Uint8Array([51]) },
  ]);
  assert.equal(await read("one.txt"), "first");
  assert.equal(await read(`${box.cwd}/a/b/two.txt`), "second");
  assert.equal(await read("/tmp/three.txt"), "3");
  assert.equal((await drained(await box.readFile({ path: "one.txt" }))).toString(), "first");
  const below = await box.readFileToBuffer({ path: "b/two.txt", cwd: `${box.cwd}/a` });
  assert.equal(below.toString(), "second");
});

test("a file that is not there is null, in every way to read it", async () => {
  assert.equal(await box.readFile({ path: "nope" }), null);
  assert.equal(await box.readFileToBuffer({ path: "/nope/nope" }), null);
  assert.equal(await box.downloadFile({ path: "nope" }, { path: "/dev/null" }), null);
});

test("written files belong to the default user and can be changed by it", async () => {
  await box.writeFiles([{ path: "own/er.txt", content: "x" }]);
  const [user, group] = (await sh(box, "id -un; id -gn")).split("\n");
  assert.equal(await sh(box, "stat -c '%U:%G %a' own own/er.txt"), `${user}:${group} 755\n${user}:${group} 644`);
  await sh(box, "echo more >> own/er.txt && rm own/er.txt && rmdir own");
});

test("modes are kept, and a script can be run", async () => {
  await box.writeFiles([
    { path: "run.sh", content: "#!/bin/bash\necho ran $1", mode: 0o755 },
    { path: "secret", content: "s", mode: 0o600 },
  ]);
  assert.equal(await sh(box, "stat -c %a run.sh secret"), "755\n600");
  const done = await box.runCommand("./run.sh", ["well"]);
  assert.equal(await done.stdout(), "ran well\n");
});

test("writing again replaces, also a shorter text over a longer", async () => {
  await box.writeFiles([{ path: "twice", content: "long content" }]);
  await box.writeFiles([{ path: "twice", content: "short" }]);
  assert.equal(await read("twice"), "short");
});

test("names may hold anything a name can hold", async () => {
  const names = ["with space", "ünï/cödé-🦀", "quo'te\"s", "-dash", "new\nline", `${"long".repeat(50)}/${"deep/".repeat(20)}end`];
  await box.writeFiles(names.map((path) => ({ path, content: path })));
  for (const path of names) assert.equal(await read(path), path);
});

test("an empty file is a file", async () => {
  await box.writeFiles([{ path: "empty", content: "" }]);
  assert.equal((await box.readFileToBuffer({ path: "empty" })).length, 0);
});

test("ten megabytes of noise come back as they went", async () => {
  const noise = randomBytes(10 << 20);
  await box.writeFiles([{ path: "noise", content: noise }]);
  assert.ok(noise.equals(await box.readFileToBuffer({ path: "noise" })));
});

test("a thousand files in one call", async () => {
  const files = Array.from({ length: 1000 }, (_, i) => ({ path: `many/${i % 10}/${i}`, content: `${i}` }));
  await box.writeFiles(files);
  assert.equal(await sh(box, "find many -type f | wc -l"), "1000");
  assert.equal(await read("many/7/997"), "997");
});

test("nothing to write is nothing to do", async () => {
  await box.writeFiles([]);
});

test("a directory with something in it cannot be written over", async () => {
  await box.writeFiles([{ path: "standing/inside", content: "x" }]);
  const error = await box.writeFiles([{ path: "standing", content: "x" }]).then(
    () => assert.fail("it was written"),
    (error) => error,
  );
  assert.ok(error.response.status >= 400 && error.response.status < 500, error.text);
  assert.equal(await sh(box, "cat standing/inside"), "x");
});

test("a place that is not the user's cannot be written to", async () => {
  const error = await box.writeFiles([{ path: "/etc/mine", content: "x" }]).then(
    () => assert.fail("it was written"),
    (error) => error,
  );
  assert.ok(error.response.status >= 400 && error.response.status < 500, error.text);
  assert.equal((await box.runCommand("test", ["-e", "/etc/mine"])).exitCode, 1);
});

test("a directory cannot be read as a file", async () => {
  const error = await box.readFile({ path: "/tmp" }).then(
    (got) => (got === null ? { response: { status: 404 } } : assert.fail("it was read")),
    (error) => error,
  );
  assert.ok(error.response.status >= 400 && error.response.status < 500, error.text);
});

test("a file of the machine that has no size can be read", async () => {
  assert.match(await read("/proc/self/status"), /^Name:/);
});

test("files are downloaded, into directories that are made", async () => {
  const here = await mkdtemp(join(tmpdir(), "keep-conformance-"));
  try {
    await box.writeFiles([{ path: "down.txt", content: "loaded" }]);
    const plain = await box.downloadFile({ path: "down.txt" }, { path: "got.txt", cwd: here });
    assert.equal(plain, join(here, "got.txt"));
    assert.equal(await readFile(plain, "utf8"), "loaded");
    const deep = join(here, "a", "b", "got.txt");
    await box.downloadFile({ path: "down.txt" }, { path: deep }, { mkdirRecursive: true });
    assert.equal(await readFile(deep, "utf8"), "loaded");
  } finally {
    await rm(here, { recursive: true });
  }
});

test("mkDir makes a directory, with its parents, for the default user", async () => {
  await box.mkDir("made/with/parents");
  await box.mkDir("/tmp/absolute");
  assert.equal(await sh(box, "stat -c %F made/with/parents /tmp/absolute"), "directory\ndirectory");
  await sh(box, "touch made/with/parents/file");
});

test("mkDir over a file is refused", async () => {
  await box.writeFiles([{ path: "in-the-way", content: "x" }]);
  const error = await box.mkDir("in-the-way").then(() => assert.fail("it was made"), (error) => error);
  assert.equal(error.response.status, 400, error.text);
});

test("fs: text, bytes, appending", async () => {
  await box.fs.writeFile("fs.txt", "grüße");
  assert.equal(await box.fs.readFile("fs.txt", "utf8"), "grüße");
  assert.ok(Buffer.isBuffer(await box.fs.readFile("fs.txt")));
  await box.fs.appendFile("fs.txt", " zurück");
  await box.fs.appendFile("fs-new.txt", "new");
  assert.equal(await box.fs.readFile("fs.txt", { encoding: "utf8" }), "grüße zurück");
  assert.equal(await box.fs.readFile("fs-new.txt", "utf8"), "new");
  await assert.rejects(box.fs.readFile("gone"), { code: "ENOENT" });
});

test("fs: directories and what is in them", async () => {
  await box.fs.mkdir("dir/sub", { recursive: true });
  await box.fs.writeFile("dir/file", "x");
  await box.fs.symlink("file", "dir/link");
  assert.deepEqual(await box.fs.readdir("dir"), ["file", "link", "sub"]);
  const entries = await box.fs.readdir("dir", { withFileTypes: true });
  const kinds = Object.fromEntries(
    entries.map((e) => [e.name, e.isFile() ? "file" : e.isDirectory() ? "dir" : e.isSymbolicLink() ? "link" : "?"]),
  );
  assert.deepEqual(kinds, { file: "file", link: "link", sub: "dir" });
  await assert.rejects(box.fs.readdir("none"), { code: "ENOENT" });
  await assert.rejects(box.fs.rmdir("dir"), { code: "ENOTEMPTY" });
  await box.fs.rm("dir", { recursive: true });
  assert.equal(await box.fs.exists("dir"), false);
  await assert.rejects(box.fs.access("dir"), { code: "ENOENT" });
});

test("fs: stat, modes, links, sizes", async () => {
  await box.fs.writeFile("stat.txt", "12345");
  const stat = await box.fs.stat("stat.txt");
  assert.equal(stat.size, 5);
  assert.ok(stat.isFile() && !stat.isDirectory());
  assert.ok(Math.abs(stat.mtimeMs - Date.now()) < 60_000);
  await box.fs.chmod("stat.txt", 0o640);
  assert.equal((await box.fs.stat("stat.txt")).mode & 0o777, 0o640);
  await box.fs.symlink("stat.txt", "stat-link");
  assert.ok((await box.fs.lstat("stat-link")).isSymbolicLink());
  assert.ok((await box.fs.stat("stat-link")).isFile());
  assert.equal(await box.fs.readlink("stat-link"), "stat.txt");
  assert.equal(await box.fs.realpath("stat-link"), `${box.cwd}/stat.txt`);
  await assert.rejects(box.fs.symlink("x", "stat-link"), { code: "EEXIST" });
  await box.fs.truncate("stat.txt", 2);
  assert.equal(await box.fs.readFile("stat.txt", "utf8"), "12");
  await assert.rejects(box.fs.stat("none"), { code: "ENOENT" });
});

test("fs: copying, moving, removing, temporary places", async () => {
  await box.fs.writeFile("src", "x");
  await box.fs.copyFile("src", "copy");
  await box.fs.rename("copy", "moved");
  assert.equal(await box.fs.readFile("moved", "utf8"), "x");
  await box.fs.unlink("moved");
  await assert.rejects(box.fs.unlink("moved"), { code: "ENOENT" });
  await assert.rejects(box.fs.rename("none", "x"), { code: "ENOENT" });
  await assert.rejects(box.fs.copyFile("none", "x"), { code: "ENOENT" });
  const place = await box.fs.mkdtemp("/tmp/mine-");
  assert.match(place, /^\/tmp\/mine-.{6}$/);
  assert.ok((await box.fs.stat(place)).isDirectory());
});

test("reading with a path that is no path is refused", async () => {
  await refused(box.readFile({ path: "with\0nul" }), 400);
});
