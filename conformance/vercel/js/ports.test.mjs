import assert from "node:assert/strict";
import { before, test } from "node:test";

import { WEB_SERVER, eventually } from "../support.mjs";
import { Sandbox, sandbox, sh, shared } from "./sdk.mjs";

let box;
before(async () => {
  box = await shared({ ports: [3000, 4000, 5000] });
  await serve(box, 3000);
  await serve(box, 4000);
});

async function serve(box, port) {
  await box.writeFiles([{ path: "/tmp/server.pl", content: WEB_SERVER }]);
  const server = await box.runCommand({ cmd: "perl", args: ["/tmp/server.pl", String(port)], detached: true });
  for await (const { stream, data } of server.logs()) {
    assert.equal(stream, "stdout", data);
    if (data.includes("listening")) return server;
  }
  assert.fail("the server in the sandbox ended");
}

test("the address of a port leads to the server behind it", async () => {
  for (const port of [3000, 4000]) {
    const response = await fetch(`${box.domain(port)}/path?with=query`);
    assert.equal(response.status, 200);
    assert.equal(response.headers.get("content-type"), "text/plain");
    assert.equal(await response.text(), `hello from ${port}: GET /path?with=query `);
  }
});

test("methods, bodies and statuses go through", async () => {
  const response = await fetch(`${box.domain(3000)}/teapot`, { method: "POST", body: "tea" });
  assert.equal(response.status, 418);
  assert.equal(await response.text(), "hello from 3000: POST /teapot tea");
});

test("many at once", async () => {
  const all = await Promise.all(
    Array.from({ length: 20 }, async (_, i) => (await fetch(`${box.domain(3000)}/${i}`)).text()),
  );
  assert.deepEqual(all, Array.from({ length: 20 }, (_, i) => `hello from 3000: GET /${i} `));
});

test("the url of a route works without any redirection", async () => {
  const route = box.routes.find(({ port }) => port === 4000);
  assert.match(route.url, /^https?:\/\//);
  assert.match(route.subdomain, /^[a-z0-9-]+$/);
  const response = await fetch(`${route.url.replace(/\/$/, "")}/direct`);
  assert.equal(await response.text(), "hello from 4000: GET /direct ");
});

test("a port nobody listens on is a bad gateway that says so", async () => {
  const response = await fetch(box.domain(5000));
  assert.equal(response.status, 502);
  assert.match(await response.text(), /SANDBOX_NOT_LISTENING/);
});

test("an address nobody was given is not found", async () => {
  assert.equal((await fetch("https://nobody-has-this.vercel.run/")).status, 404);
});

test("a stopped sandbox is gone, and its address works again after a resume", async (t) => {
  const other = await sandbox(t, { ports: [3000] });
  await serve(other, 3000);
  const address = other.domain(3000);
  assert.equal((await fetch(address)).status, 200);
  await other.stop();
  const gone = await fetch(address);
  assert.equal(gone.status, 410);
  assert.match(await gone.text(), /SANDBOX_STOPPED/);
  await serve(other, 3000);
  assert.equal(other.domain(3000), address);
  assert.equal((await fetch(address)).status, 200);
});

test("a port that is taken away no longer leads inside", async (t) => {
  const other = await sandbox(t, { ports: [3000] });
  await serve(other, 3000);
  const address = other.domain(3000);
  assert.equal((await fetch(address)).status, 200);
  await other.update({ ports: [] });
  assert.equal((await fetch(address)).status, 404);
  await other.update({ ports: [4000] });
  await serve(other, 4000);
  assert.equal((await fetch(other.domain(4000))).status, 200);
});

test("a socket goes through both ways", async (t) => {
  if (!globalThis.WebSocket) return t.skip("this Node has no WebSocket");
  const other = await sandbox(t, { ports: [3000] });
  // The least a WebSocket server can be: the handshake, then every frame's payload back. With programs
  // every Debian has, so without a module for digests.
  const script = String.raw`
use strict; use IO::Socket::INET;
my $l = IO::Socket::INET->new(LocalPort => 3000, Listen => 4, ReuseAddr => 1) or die; $| = 1; print "listening\n";
while (my $c = $l->accept) {
  my $key = ""; while (my $line = <$c>) { $key = $1 if $line =~ /^sec-websocket-key:\s*(\S+)/i; last if $line =~ /^\r?\n$/; }
  $key .= "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
  open my $p, "|-", "base64 -w0 > /tmp/accept" or die; print $p pack("H40", qx(printf %s "$key" | sha1sum)); close $p;
  my $accept = qx(cat /tmp/accept);
  print $c "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: $accept\r\n\r\n"; $c->flush;
  while (read($c, my $head, 2) == 2) {
    my ($op, $len) = unpack "CC", $head; $len &= 127; last if ($op & 15) == 8;
    read($c, my $mask, 4); read($c, my $data, $len); my $text = $data ^ substr($mask x ($len / 4 + 1), 0, $len);
    print $c pack("CC", 0x81, $len) . $text; $c->flush;
  }
  close $c;
}`;
  await other.writeFiles([{ path: "/tmp/ws.pl", content: script }]);
  const server = await other.runCommand({ cmd: "perl", args: ["/tmp/ws.pl"], detached: true });
  await eventually(async () => {
    for await (const { stream, data } of server.logs()) {
      assert.equal(stream, "stdout", data);
      return data.includes("listening");
    }
  }, "it listens");
  const socket = new WebSocket(`${other.domain(3000).replace("https:", "wss:")}/chat`);
  const heard = await new Promise((resolve, reject) => {
    socket.onopen = () => socket.send("echo this");
    socket.onmessage = ({ data }) => resolve(data);
    socket.onerror = ({ message }) => reject(new Error(message));
  });
  socket.close();
  assert.equal(heard, "echo this");
});

test("a fork's port is another machine's", async (t) => {
  const source = await sandbox(t, { ports: [3000] });
  await serve(source, 3000);
  const made = await Sandbox.fork({ sourceSandbox: source.name, name: `${source.name}-f` });
  t.after(() => made.delete());
  assert.equal((await fetch(made.domain(3000))).status, 502);
  assert.equal((await fetch(source.domain(3000))).status, 200);
  assert.equal(await sh(made, "echo up"), "up");
});
