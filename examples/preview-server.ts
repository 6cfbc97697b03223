// A preview of a web page: a server in a sandbox with an address of its own. It sleeps when nobody looks; a request wakes it.

import { Sandbox } from "sandkeep";

const box = await Sandbox.getOrCreate("preview");
await box.files.write("/work/site/index.html", "<h1>Version 1</h1>\n", { parents: true });

// A service is started with every session of the sandbox, so also after it was woken by a request.
await box.services.set("web", {
  argv: ["python3", "-m", "http.server", "8000", "--directory", "/work/site"],
  port: 8000,
  restart: "on-failure",
});
await box.services.start("web");
await box.ports.publish(8000, { access: "private", wake: true });

// Anybody with this address may look, for an hour.
const { url } = await box.ports.token(8000, { expires: "1h" });
console.log(await page(url));

await box.files.write("/work/site/index.html", "<h1>Version 2</h1>\n");
await box.stop();
console.log(await page(url));
console.log((await box.why()).state);

/** What a browser gets: the token is exchanged for a cookie on the first visit. */
async function page(address: string): Promise<string> {
  const first = await fetch(address, { redirect: "manual" });
  const cookie = first.headers.get("set-cookie")?.split(";")[0];
  const next = first.headers.get("location");
  if (!cookie || !next) return (await first.text()).trim();
  return (await (await fetch(new URL(next, address), { headers: { cookie } })).text()).trim();
}
