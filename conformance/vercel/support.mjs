// What the suites written for Node share. They talk to the server in SANDKEEP_URL with the credentials
// `keep env vercel` prints; everything they create has a name of its own and goes away with its test.

import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import net from "node:net";
import { after } from "node:test";

export const url = needed("SANDKEEP_URL").replace(/\/+$/, "");
export const token = needed("VERCEL_OIDC_TOKEN");

/** Where the published packages are installed. */
export const packages = needed("CONFORMANCE_PACKAGES");

const claims = JSON.parse(Buffer.from(token.split(".")[1], "base64url").toString());
export const project = claims.project_id;
export const team = claims.owner_id;

function needed(name) {
  const value = process.env[name];
  if (!value) throw new Error(`${name} is not set; conformance/vercel/README.md says how to run this`);
  return value;
}

/** A name nothing else has. */
export function fresh(purpose) {
  return `${purpose}-${randomBytes(4).toString("hex")}`;
}

/** Asks until `question` is answered with something true. */
export async function eventually(question, what) {
  const end = Date.now() + 30_000;
  for (;;) {
    const answer = await question();
    if (answer) return answer;
    if (Date.now() > end) assert.fail(`never: ${what}`);
    await sleep(50);
  }
}

export const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

/**
 * Whether the server can be killed and started again from here. Who runs a suite says how with a
 * socket that takes the words `kill` (as a crash would) and `launch`, one a line, and answers `ok`.
 */
export const control = process.env.CONFORMANCE_CONTROL;
export const without_control = control ? false : "CONFORMANCE_CONTROL is not set";

/** A port of this host's loopback that sandboxes may reach, for a server of the suite's own. */
export const outside_port = Number(process.env.CONFORMANCE_OUTSIDE ?? 0);
export const without_outside = outside_port ? false : "CONFORMANCE_OUTSIDE is not set";

export function tell_server(word) {
  return new Promise((resolve, reject) => {
    const socket = net.connect(control, () => socket.write(`${word}\n`));
    let heard = "";
    socket.on("data", (data) => (heard += data));
    socket.on("error", reject);
    socket.on("close", () => (heard.trim() === "ok" ? resolve() : reject(new Error(`${word}: ${heard}`))));
  });
}

/** Kills the server as a crash would, and starts it again. */
export async function crash_server() {
  await tell_server("kill");
  await tell_server("launch");
}

/** A request as it goes over the wire, for what no client shows. */
export async function ask(method, path, { body, headers = {}, query = {}, bearer = token } = {}) {
  const target = new URL(url + path);
  for (const [name, value] of Object.entries(query)) {
    for (const each of [value].flat()) target.searchParams.append(name, String(each));
  }
  const plain = typeof body === "string" || body instanceof Uint8Array || body instanceof ReadableStream;
  const response = await fetch(target, {
    method,
    headers: {
      ...(bearer === null ? {} : { authorization: `Bearer ${bearer}` }),
      "content-type": "application/json",
      ...headers,
    },
    body: body === undefined || plain ? body : JSON.stringify(body),
    ...(body instanceof ReadableStream ? { duplex: "half" } : {}),
  });
  const text = await response.text();
  let json;
  try {
    json = JSON.parse(text);
  } catch {
    json = undefined;
  }
  return { status: response.status, type: response.headers.get("content-type"), headers: response.headers, text, json };
}

/** Deletes a sandbox with everything it kept, if it is still there. */
export async function remove(name) {
  const query = { projectId: project, deleteOrphanSnapshots: "true" };
  const { status, text } = await ask("DELETE", `/api/v2/sandboxes/${name}`, { query });
  assert.ok(status === 200 || status === 404, `${name} could not be deleted: ${status} ${text}`);
}

const shared = [];
after(() => Promise.all(shared.map(remove)));

/** Deletes a sandbox when all tests of this file are over. */
export function remove_at_end(name) {
  shared.push(name);
}

/** A little web server inside a sandbox, in a language every Debian has. Answers with what it was asked. */
export const WEB_SERVER = `
use strict; use warnings; use IO::Socket::INET;
my $port = shift;
my $listener = IO::Socket::INET->new(LocalAddr => "0.0.0.0", LocalPort => $port, Listen => 16, ReuseAddr => 1) or die "$!";
$| = 1; print "listening\\n";
while (my $client = $listener->accept) {
  my $request = <$client> // next; my ($method, $path) = split / /, $request;
  my ($length, $host) = (0, "");
  while (my $line = <$client>) {
    $length = $1 if $line =~ /^content-length:\\s*(\\d+)/i;
    $host = $1 if $line =~ /^host:\\s*(\\S+)/i;
    last if $line =~ /^\\r?\\n$/;
  }
  my $body = ""; read($client, $body, $length) if $length;
  my $answer = "hello from $port: $method $path $body";
  my $status = $path =~ /teapot/ ? "418 I'm a teapot" : "200 OK";
  print $client "HTTP/1.1 $status\\r\\nContent-Type: text/plain\\r\\nX-Seen-Host: $host\\r\\nContent-Length: " . length($answer) . "\\r\\nConnection: close\\r\\n\\r\\n$answer";
  close $client;
}
`;
