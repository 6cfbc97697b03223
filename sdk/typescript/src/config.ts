/** Where the server is, and the key to it: the same places where `keep` looks. */

import { ConfigurationError } from "./errors.js";

/** A server and a key to it. */
export interface Target {
  url: string;
  key: string | undefined;
}

interface ClientFile {
  url?: string | null;
  key?: string | null;
  directory?: { device: number; inode: number } | null;
}

function variable(name: string): string | undefined {
  try {
    return globalThis.process?.env?.[name] || undefined;
  } catch {
    // Deno without permission to read the environment.
    return undefined;
  }
}

/** What a server on this machine has written for its owner's programs. */
async function local(): Promise<ClientFile | undefined> {
  const data = variable("SANDKEEP_DATA");
  const home = variable("XDG_DATA_HOME") ?? (variable("HOME") && `${variable("HOME")}/.local/share`);
  const places = data ? [data] : [...(home ? [`${home}/sandkeep`] : []), "/var/lib/sandkeep"];
  for (const place of places) {
    try {
      const { readFile, stat } = await import("node:fs/promises");
      const found = JSON.parse(await readFile(`${place}/client.json`, "utf8")) as ClientFile;
      const { dev, ino } = await stat(place);
      // One that was copied along with the directory is about the original's server.
      if (!found.directory || (found.directory.device === dev && found.directory.inode === ino)) return found;
    } catch {
      // None there, or no files at all, as in a browser.
    }
  }
  return undefined;
}

/** What is given, else SANDKEEP_URL and SANDKEEP_KEY, else the server of this machine. */
export async function find(givenUrl?: string, givenKey?: string): Promise<Target> {
  let url = givenUrl ?? variable("SANDKEEP_URL");
  let key = givenKey ?? variable("SANDKEEP_KEY");
  const here = url === undefined || key === undefined ? await local() : undefined;
  if (url === undefined) {
    url = here?.url ?? undefined;
    if (url === undefined) {
      throw new ConfigurationError(
        "no server was found on this machine: start one with `keep serve`, or set SANDKEEP_URL and SANDKEEP_KEY",
      );
    }
  }
  url = url.replace(/\/$/, "");
  if (!/^https?:\/\/[^/]/.test(url)) {
    throw new ConfigurationError(`\`${url}\` is not a server's address: write \`http://host:port\``);
  }
  // A key found on this machine is for this machine's server, and goes to no other.
  if (key === undefined && here?.url && here.url.replace(/\/$/, "") === url) key = here.key ?? undefined;
  if (key !== undefined && !/^[\x21-\x7e]+$/.test(key)) {
    throw new ConfigurationError("the key is not one of Sandkeep: it looks like `skp_…`");
  }
  return { url, key };
}
