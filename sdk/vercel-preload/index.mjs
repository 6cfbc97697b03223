// Points unmodified Vercel Sandbox clients at a Sandkeep server.
//
// The clients have the address of their service built in and hand each request a dispatcher of their
// own, so neither a setting nor a proxy can turn them. They do take `globalThis.fetch` as they find it:
// loaded before them, this file wraps it, and only addresses change.
//
//   https://vercel.com/api/v2/sandboxes/... -> $SANDKEEP_URL/api/v2/sandboxes/...   (api.vercel.com too)
//   the same with other paths      -> there too, if the token is one of Sandkeep's: accounts, projects
//   https://<sub>.vercel.run/...   -> $SANDKEEP_URL/_route/<sub>/...   (WebSocket: wss -> ws or wss)
//   https://<host of $SANDKEEP_URL>/health -> $SANDKEEP_URL/health
//
// Everything else of theirs stays theirs: a program that also deploys does not hand its token to us. The
// last one is the command line's probe before it opens a terminal: it drops the port and insists
// on https. One file without dependencies, so that `keep env vercel` can hand it out by itself.
//
// The token is in SANDKEEP_VERCEL_TOKEN, which the clients do not read: a program without this file must not
// send it to the other service. Here `process.env` gives it to those who read the clients' variables, unless
// something is set there. It is not *in* the environment: neither child processes nor copies of it have it, and
// a child that is Node takes it from this file again.
//
// `sandbox.domain(port)` builds `https://<sub>.vercel.run` from a template of its own. For `fetch` that is fine, for a
// person it leads to the other service. Where the server has a domain for ports (`[gateway] domain`), its answer has
// the port's real address, and `domain()` gives that.

import { readFileSync } from "node:fs";
import module from "node:module";

const LOADED = Symbol.for("sandkeep.vercel-preload");

const base = server(process.env.SANDKEEP_URL);

if (!globalThis[LOADED]) {
  globalThis[LOADED] = true;
  globalThis.fetch = redirecting(globalThis.fetch);
  handOver(process.env.SANDKEEP_VERCEL_TOKEN);
  givePortsTheirAddress();
  if (globalThis.WebSocket) globalThis.WebSocket = redirectingSocket(globalThis.WebSocket);
}

/** Where a request to `address` goes instead, or `null` when it is none of ours. */
export function redirect(address, authorization = null) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null; // fetch has its own words for that
  }
  const socket = url.protocol === "wss:";
  if ((url.protocol !== "https:" && !socket) || url.port !== "") return null;
  const path = ourPath(url, socket, authorization);
  if (path === null) return null;
  const target = new URL(base);
  if (socket) target.protocol = base.protocol === "https:" ? "wss:" : "ws:";
  target.pathname = base.pathname.replace(/\/+$/, "") + path;
  target.search = url.search;
  return target.href;
}

function ourPath({ hostname, pathname }, socket, authorization) {
  const sub = /^([a-z0-9-]+)\.vercel\.run$/.exec(hostname)?.[1];
  if (sub !== undefined) return `/_route/${sub}${pathname}`;
  if (socket) return null;
  const api = apiPath(hostname, pathname);
  if (api !== null) {
    return /^\/v\d+\/sandboxes(\/|$)/.test(api) || isOurs(authorization) ? `/api${api}` : null;
  }
  if (hostname === base.hostname && pathname === "/health") return "/health";
  return null;
}

/** The path of their API that an address names. */
function apiPath(hostname, pathname) {
  if (hostname === "api.vercel.com") return pathname;
  return hostname === "vercel.com" && pathname.startsWith("/api/") ? pathname.slice(4) : null;
}

/** Whether a token was made by a Sandkeep server: a key, or a token that says so. */
function isOurs(authorization) {
  const token = /^Bearer\s+(\S+)$/i.exec(authorization ?? "")?.[1] ?? "";
  if (token.startsWith("skp_")) return true;
  try {
    return JSON.parse(Buffer.from(token.split(".")[1], "base64url").toString()).aud === "sandkeep";
  } catch {
    return false;
  }
}

function redirecting(fetch) {
  return function redirectedFetch(input, init) {
    const request = typeof input === "object" && input !== null && "url" in input;
    const headers = new Headers(init?.headers ?? (request ? input.headers : undefined));
    const target = redirect(request ? input.url : String(input), headers.get("authorization"));
    if (target === null) return fetch(input, init);
    // A Request keeps its method, headers, signal and body, also one that is still being written.
    return fetch(request ? new Request(target, input) : target, init);
  };
}

function redirectingSocket(WebSocket) {
  return new Proxy(WebSocket, {
    construct(target, [address, ...rest], newTarget) {
      return Reflect.construct(target, [redirect(String(address)) ?? address, ...rest], newTarget);
    },
  });
}

/** Answers reads of the clients' variables from a token, those that are not set. */
function handOver(token) {
  if (!token) return;
  const claims = JSON.parse(Buffer.from(token.split(".")[1], "base64url").toString());
  const variables = {
    VERCEL_OIDC_TOKEN: token,
    VERCEL_AUTH_TOKEN: token,
    VERCEL_TOKEN: token,
    VERCEL_TEAM_ID: claims.owner_id,
    VERCEL_PROJECT_ID: claims.project_id,
  };
  const lent = new Map(Object.entries(variables).filter(([name]) => process.env[name] === undefined));
  // Whoever lists it, as a child's environment is made, gets what is set and nothing else.
  process.env = new Proxy(process.env, {
    get: (env, name) => env[name] ?? lent.get(name),
    has: (env, name) => name in env || lent.has(name),
    set: (env, name, value) => ((env[name] = value), true),
    deleteProperty: (env, name) => (lent.delete(name), delete env[name]),
  });
  module.syncBuiltinESMExports(); // import { env } from "node:process"
}

/** Has `domain()` of the package give the address that the server gave, unless it is a path on the server. */
function givePortsTheirAddress() {
  const file = /\/@vercel\/sandbox\/dist\/session\.c?js$/;
  const template = "`https://${route.subdomain}.vercel.run`";
  const changed = (source) => {
    const text = typeof source === "string" ? source : Buffer.from(source).toString();
    return text.replaceAll(template, `(route.url.includes("/_route/") ? ${template} : route.url)`);
  };
  if (module.registerHooks) {
    module.registerHooks({
      load(url, context, next) {
        const loaded = next(url, context);
        if (!file.test(url) || loaded.source == null) return loaded;
        return { ...loaded, source: changed(loaded.source) };
      },
    });
    return;
  }
  // Node before 22.15: one way for `import`, another for `require`.
  const hooks = `
    const file = ${file}, template = ${JSON.stringify(template)}, changed = ${changed};
    export async function load(url, context, next) {
      const loaded = await next(url, context);
      if (!file.test(url) || loaded.source == null) return loaded;
      return { ...loaded, source: changed(loaded.source) };
    }`;
  module.register(`data:text/javascript,${encodeURIComponent(hooks)}`);
  const load = module._extensions[".js"];
  module._extensions[".js"] = (loading, name) => {
    if (!file.test(name)) return load(loading, name);
    loading._compile(changed(readFileSync(name, "utf8")), name);
  };
}

function server(text) {
  const hint = "Set it to your server, like SANDKEEP_URL=http://127.0.0.1:7777 (`keep env vercel` prints it).";
  if (!text) refuse(`SANDKEEP_URL is not set. ${hint}`);
  let url;
  try {
    url = new URL(text);
  } catch {
    refuse(`SANDKEEP_URL is \`${text}\`, which is no address. ${hint}`);
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") {
    refuse(`SANDKEEP_URL is \`${text}\`; these clients can only speak http and https. ${hint}`);
  }
  return url;
}

function refuse(message) {
  const error = new Error(`@sandkeep/vercel-preload: ${message}`);
  error.stack = error.message; // whoever forgot a variable needs no trace of our insides
  throw error;
}
