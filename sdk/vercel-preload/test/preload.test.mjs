import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import http from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

const run = promisify(execFile);
const preload = fileURLToPath(new URL("../index.mjs", import.meta.url));

// Node has WebSocket by itself from 22 on, and 20 behind a flag.
const websocket = "--experimental-websocket";
const flags = process.allowedNodeEnvironmentFlags.has(websocket) ? [websocket] : [];

/** Runs a script with the preload in a Node of its own. */
async function node(script, { url, args = [], more = {} }) {
  const env = { ...process.env, SANDKEEP_URL: url, ...more };
  delete env.NODE_OPTIONS;
  if (url === undefined) delete env.SANDKEEP_URL;
  const done = await run(
    process.execPath,
    [...flags, `--import=${preload}`, ...args, "--input-type=module", "-e", script],
    { env },
  );
  return done.stdout.trim();
}

/** A server that answers with what it was asked. */
const echo = http.createServer(async (request, response) => {
  const chunks = [];
  for await (const chunk of request) chunks.push(chunk);
  const { method, url, headers } = request;
  response.end(JSON.stringify({ method, url, headers, body: Buffer.concat(chunks).toString() }));
});
let url;
before(async () => {
  await new Promise((listening) => echo.listen(0, "127.0.0.1", listening));
  url = `http://127.0.0.1:${echo.address().port}`;
});
after(() => {
  echo.close();
  echo.closeAllConnections();
});

test("the token is set where clients look for it, unless something is set there", async () => {
  const claims = Buffer.from(JSON.stringify({ owner_id: "team_x", project_id: "prj_y" })).toString("base64url");
  const token = `h.${claims}.s`;
  const script = `
    const names = ["OIDC_TOKEN", "AUTH_TOKEN", "TOKEN", "TEAM_ID", "PROJECT_ID"];
    console.log(JSON.stringify(names.map((name) => process.env["VERCEL_" + name])));`;
  const more = { SANDKEEP_VERCEL_TOKEN: token, VERCEL_AUTH_TOKEN: "mine", VERCEL_TOKEN: "" };
  const seen = JSON.parse(await node(script, { url, more }));
  assert.deepEqual(seen, [token, "mine", "", "team_x", "prj_y"]);
});

test("children do not get the token, in whatever way they are started", async () => {
  const claims = Buffer.from(JSON.stringify({ owner_id: "team_x", project_id: "prj_y" })).toString("base64url");
  const token = `h.${claims}.s`;
  const script = `
    import { execFileSync, execSync, spawn, spawnSync } from "node:child_process";
    import { env as named } from "node:process";
    import { Worker } from "node:worker_threads";
    const theirs = (text) => text.split("\\n").filter((line) => line.startsWith("VERCEL_")).sort();
    const env = (more) => theirs(spawnSync("env", { encoding: "utf8", ...more }).stdout);
    const all = async (child) => {
      let text = "";
      for await (const piece of child.stdout) text += piece;
      return theirs(text);
    };
    const list = "console.log(Object.keys(process.env).join(String.fromCharCode(10)))";
    const copy = {};
    for (const name in process.env) copy[name] = process.env[name];
    const children = [
      env({}),
      env({ env: process.env }),
      env({ env: { ...process.env } }),
      env({ env: Object.assign({}, process.env) }),
      env({ env: copy }),
      env({ env: JSON.parse(JSON.stringify(process.env)) }),
      env({ shell: true }),
      theirs(execSync("env").toString()),
      theirs(execFileSync("env").toString()),
      await all(spawn("env")),
      theirs(execFileSync(process.execPath, ["-e", list]).toString()),
    ];
    const threads = await new Promise((done) => {
      const worker = new Worker("import { parentPort } from 'node:worker_threads'; parentPort.postMessage(Object.keys(process.env))", { eval: true });
      worker.on("message", (names) => done(theirs(names.join("\\n"))));
    });
    process.env.VERCEL_TEAM_ID = "changed";
    process.env.VERCEL_NUMBER = 5;
    delete process.env.VERCEL_PROJECT_ID;
    const read = [named.VERCEL_TOKEN, "VERCEL_TOKEN" in process.env, process.env.VERCEL_TEAM_ID, process.env.VERCEL_PROJECT_ID];
    console.log(JSON.stringify({ children, threads, read, set: env({}) }));`;
  const seen = JSON.parse(await node(script, { url, more: { SANDKEEP_VERCEL_TOKEN: token, VERCEL_KEPT: "1" } }));
  for (const [index, names] of seen.children.entries()) {
    assert.deepEqual(names.map((line) => line.split("=")[0]), ["VERCEL_KEPT"], `child ${index}`);
  }
  assert.deepEqual(seen.threads, ["VERCEL_KEPT"]);
  assert.deepEqual(seen.read, [token, true, "changed", null]);
  assert.deepEqual(seen.set, ["VERCEL_KEPT=1", "VERCEL_NUMBER=5", "VERCEL_TEAM_ID=changed"]);
});

test("a Node child with the preload has the token again", async () => {
  const claims = Buffer.from(JSON.stringify({ owner_id: "team_x", project_id: "prj_y" })).toString("base64url");
  const token = `h.${claims}.s`;
  const script = `
    import { execFileSync } from "node:child_process";
    const options = { env: { ...process.env, NODE_OPTIONS: ${JSON.stringify(`--import=${preload}`)} } };
    process.stdout.write(execFileSync(process.execPath, ["-p", "process.env.VERCEL_OIDC_TOKEN"], options));`;
  assert.equal(await node(script, { url, more: { SANDKEEP_VERCEL_TOKEN: token } }), token);
});

test("domain() gives the address that the server gave, unless that is a path", async (t) => {
  const root = mkdtempSync(join(tmpdir(), "preload-"));
  t.after(() => rmSync(root, { recursive: true }));
  const dist = join(root, "node_modules/@vercel/sandbox/dist");
  mkdirSync(dist, { recursive: true });
  // As the package has it.
  const code = `class Session {
    constructor(routes) { this.routes = routes; }
    domain(p) {
      const route = this.routes.find(({ port }) => port == p);
      if (route) return \`https://\${route.subdomain}.vercel.run\`;
      else throw new Error(\`No route for port \${p}\`);
    }
  }\n`;
  writeFileSync(join(dist, "session.js"), `${code}export { Session };`);
  writeFileSync(join(dist, "session.cjs"), `${code}exports.Session = Session;`);
  writeFileSync(join(dist, "../package.json"), JSON.stringify({ name: "@vercel/sandbox", type: "module" }));
  const script = `
    import { createRequire } from "node:module";
    const files = ["session.js", "session.cjs"].map((name) => ${JSON.stringify(dist)} + "/" + name);
    const modules = [await import(files[0]), createRequire(files[1])(files[1]), await import(files[1])];
    const routes = [
      { port: 1, subdomain: "sb-1", url: "https://sb-1.ports.example" },
      { port: 2, subdomain: "sb-2", url: "http://127.0.0.1:7777/_route/sb-2" },
    ];
    const said = modules.map(({ Session }) => [1, 2].map((port) => new Session(routes).domain(port)));
    console.log(JSON.stringify(said));`;
  const said = JSON.parse(await node(script, { url }));
  const expected = ["https://sb-1.ports.example", "https://sb-2.vercel.run"];
  assert.deepEqual(said, [expected, expected, expected]);
});

test("addresses are redirected by host and path, everything else is left alone", async () => {
  const script = `
    const { redirect } = await import(${JSON.stringify(preload)});
    console.log(JSON.stringify(${JSON.stringify([
      "https://vercel.com/api/v2/sandboxes?teamId=t&x=a%20b",
      "https://api.vercel.com/v4/sandboxes",
      "https://sb-1.vercel.run/a/b?c=d",
      "https://sb-1.vercel.run",
      "wss://sb-1.vercel.run/chat",
      "https://box.example/health",
      "https://box.example/health/more",
      "https://box.example:7777/health",
      "https://vercel.com/apis",
      "https://vercel.com/api",
      "https://vercel.com/api/v2/sandboxesque",
      "https://api.vercel.com/v13/deployments",
      "https://vercel.com/.well-known/openid-configuration",
      "https://www.vercel.com/api/v2",
      "http://vercel.com/api/v2",
      "https://a.b.vercel.run/",
      "https://vercel.run/",
      "https://vercel.com.example/api/",
      "wss://vercel.com/api/",
      "/relative",
      "not an address",
    ])}.map((address) => redirect(address))));`;
  const none = null;
  assert.deepEqual(JSON.parse(await node(script, { url: "http://box.example:7777" })), [
    "http://box.example:7777/api/v2/sandboxes?teamId=t&x=a%20b",
    "http://box.example:7777/api/v4/sandboxes",
    "http://box.example:7777/_route/sb-1/a/b?c=d",
    "http://box.example:7777/_route/sb-1/",
    "ws://box.example:7777/_route/sb-1/chat",
    "http://box.example:7777/health",
    ...Array(15).fill(none),
  ]);
});

test("what else their API has comes here with our tokens only", async () => {
  const claims = (aud) => Buffer.from(JSON.stringify({ aud })).toString("base64url");
  const script = `
    const { redirect } = await import(${JSON.stringify(preload)});
    const ask = (token) => redirect("https://vercel.com/api/v2/user", token);
    console.log(JSON.stringify(${JSON.stringify([
      "Bearer skp_abc",
      `bearer h.${claims("sandkeep")}.s`,
      `Bearer h.${claims("https://vercel.com/x")}.s`,
      "Bearer theirs",
      "Bearer a.b.c",
      "Basic skp_abc",
      null,
    ])}.map(ask)));`;
  const here = "http://box.example/api/v2/user";
  assert.deepEqual(JSON.parse(await node(script, { url: "http://box.example" })), [
    here,
    here,
    ...Array(5).fill(null),
  ]);
});

test("a server below a path and behind https keeps both", async () => {
  const script = `
    const { redirect } = await import(${JSON.stringify(preload)});
    console.log(redirect("https://vercel.com/api/v2/sandboxes"), redirect("wss://s.vercel.run/"));`;
  assert.equal(
    await node(script, { url: "https://box.example/keep/" }),
    "https://box.example/keep/api/v2/sandboxes wss://box.example/keep/_route/s/",
  );
});

test("a string, a URL and a Request arrive with method, headers and body", async () => {
  const script = `
    const address = "https://vercel.com/api/v2/sandboxes/x?y=1";
    const init = { method: "POST", headers: { "x-mine": "1" }, body: "hello" };
    for (const ask of [
      () => fetch(address, init),
      () => fetch(new URL(address), init),
      () => fetch(new Request(address, init)),
      () => fetch(new Request(address), init),
    ]) {
      const { method, url, headers, body } = await (await ask()).json();
      console.log(method, url, headers["x-mine"], body);
    }`;
  assert.deepEqual(
    (await node(script, { url })).split("\n"),
    Array(4).fill("POST /api/v2/sandboxes/x?y=1 1 hello"),
  );
});

test("bodies that are still being written arrive, given as init or inside a Request", async () => {
  const script = `
    const body = () => new ReadableStream({
      async start(controller) {
        for (const part of ["one ", "two ", "three"]) {
          controller.enqueue(new TextEncoder().encode(part));
          await new Promise((later) => setTimeout(later, 5));
        }
        controller.close();
      },
    });
    const init = () => ({ method: "POST", duplex: "half", body: body() });
    const address = "https://sub.vercel.run/upload";
    console.log((await (await fetch(address, init())).json()).body);
    console.log((await (await fetch(new Request(address, init()))).json()).body);`;
  assert.equal(await node(script, { url }), "one two three\none two three");
});

test("signals and dispatchers are passed on", async () => {
  const script = `
    const failed = (ask) => ask.then(() => "answered", (error) => (error.cause ?? error).message);
    const signal = AbortSignal.abort(new Error("mine was heard"));
    console.log(await failed(fetch("https://vercel.com/api/v2/sandboxes/x", { signal })));
    console.log(await failed(fetch(new Request("https://s.vercel.run/", { signal }))));
    const dispatcher = { dispatch() { throw new Error("mine was used"); } };
    console.log(await failed(fetch("https://vercel.com/api/v2/sandboxes/x", { dispatcher })));`;
  assert.deepEqual((await node(script, { url })).split("\n"), [
    "mine was heard",
    "mine was heard",
    "mine was used",
  ]);
});

test("a request that is under way ends with its signal", async () => {
  const script = `
    const answer = fetch("https://vercel.com/api/v2/sandboxes", { signal: AbortSignal.timeout(50) });
    console.log(await answer.then(() => "answered", (error) => error.name));`;
  const never = http.createServer(() => {});
  await new Promise((listening) => never.listen(0, "127.0.0.1", listening));
  try {
    const url = `http://127.0.0.1:${never.address().port}`;
    assert.equal(await node(script, { url }), "TimeoutError");
  } finally {
    never.close();
    never.closeAllConnections();
  }
});

test("requests to other places go where they were sent", async () => {
  const script = `console.log((await (await fetch("${url}/elsewhere")).json()).url);`;
  assert.equal(await node(script, { url: "http://127.0.0.1:9" }), "/elsewhere");
});

test("loading it twice wraps once", async () => {
  const script = `
    const first = globalThis.fetch;
    await import(${JSON.stringify(`${preload}?again`)});
    console.log(globalThis.fetch === first);
    console.log((await (await fetch("https://vercel.com/api/v2/sandboxes")).json()).url);`;
  assert.equal(
    await node(script, { url, args: [`--import=${preload}?second`] }),
    "true\n/api/v2/sandboxes",
  );
});

test("sockets to ports of a sandbox are redirected, and stay sockets", async (t) => {
  if (flags.length === 0 && !globalThis.WebSocket) return t.skip("this Node has no WebSocket");
  const script = `
    const socket = new WebSocket("wss://sub.vercel.run/chat?room=1");
    console.log(socket.url, socket instanceof WebSocket, WebSocket.OPEN);
    const other = new WebSocket("ws://127.0.0.1:9/");
    console.log(other.url);
    for (const each of [socket, other]) each.onerror = () => {};
    setTimeout(() => process.exit(0), 20);`;
  assert.deepEqual((await node(script, { url: "http://127.0.0.1:9" })).split("\n"), [
    "ws://127.0.0.1:9/_route/sub/chat?room=1 true 1",
    "ws://127.0.0.1:9/",
  ]);
});

for (const [name, wrong, words] of [
  ["none", undefined, /SANDKEEP_URL is not set/],
  ["an empty one", "", /SANDKEEP_URL is not set/],
  ["no address", "box:with:colons", /SANDKEEP_URL is `box:with:colons`/],
  ["a socket file", "unix:///run/keep.sock", /can only speak http and https/],
]) {
  test(`with ${name} for SANDKEEP_URL it refuses to load and says why`, async () => {
    const refused = await node("console.log('ran')", { url: wrong }).catch((error) => error);
    assert.equal(refused.code, 1);
    assert.match(refused.stderr, words);
    assert.match(refused.stderr, /keep env vercel/);
    assert.doesNotMatch(refused.stdout, /ran/);
  });
}
