/** Directories of this machine as tar archives, both ways. For Node, Deno and Bun. */

import { ProtocolError } from "./errors.js";

const BLOCK = 512;
const LARGEST_HEADER = 1 << 20;

type Kind = "file" | "directory" | "symlink" | "link";

interface Header {
  name: string;
  kind: Kind;
  size: number;
  mode: number;
  mtime: number;
  link: string;
  /** Where the data of a sparse file is; absent if it is whole. */
  pieces?: [number, number][];
  realSize?: number;
}

function octal(value: number, width: number): string {
  return value.toString(8).padStart(width - 1, "0") + "\0";
}

function block(name: string, type: string, header: Omit<Header, "kind" | "name">): Buffer {
  const bytes = Buffer.alloc(BLOCK);
  bytes.write(name, 0, 100);
  bytes.write(octal(header.mode, 8), 100);
  bytes.write(octal(0, 8), 108);
  bytes.write(octal(0, 8), 116);
  // More than eight gigabytes do not fit: the extended header has the size.
  bytes.write(octal(Math.min(header.size, 0o77777777777), 12), 124);
  bytes.write(octal(Math.max(0, Math.floor(header.mtime)), 12), 136);
  bytes.write("        ", 148);
  bytes.write(type, 156);
  bytes.write(header.link, 157, 100);
  bytes.write("ustar\x0000", 257);
  const sum = bytes.reduce((all, byte) => all + byte, 0);
  bytes.write(sum.toString(8).padStart(6, "0") + "\0 ", 148);
  return bytes;
}

function extended(fields: Record<string, string>): Buffer {
  const records = Object.entries(fields).map(([name, value]) => {
    const rest = ` ${name}=${value}\n`;
    let length = Buffer.byteLength(rest);
    while (String(length).length + Buffer.byteLength(rest) !== length) {
      length = String(length).length + Buffer.byteLength(rest);
    }
    return `${length}${rest}`;
  });
  const body = Buffer.from(records.join(""));
  const head = block("PaxHeaders/entry", "x", { size: body.length, mode: 0o644, mtime: 0, link: "" });
  return Buffer.concat([head, body, padding(body.length)]);
}

const padding = (size: number) => Buffer.alloc((BLOCK - (size % BLOCK)) % BLOCK);

function heads(entry: Header): Buffer {
  const fields: Record<string, string> = {};
  if (Buffer.byteLength(entry.name) > 100) fields["path"] = entry.name;
  if (Buffer.byteLength(entry.link) > 100) fields["linkpath"] = entry.link;
  if (entry.size > 0o77777777777) fields["size"] = String(entry.size);
  const type = { file: "0", directory: "5", symlink: "2", link: "1" }[entry.kind];
  const head = block(entry.name, type, entry);
  return Object.keys(fields).length > 0 ? Buffer.concat([extended(fields), head]) : head;
}

/** A directory's contents as a tar. Sockets and devices are left out. */
export async function* pack(directory: string): AsyncGenerator<Uint8Array, void> {
  const fs = await import("node:fs/promises");
  const { createReadStream } = await import("node:fs");
  async function* below(inner: string): AsyncGenerator<Uint8Array, void> {
    for (const name of (await fs.readdir(`${directory}/${inner}`)).sort()) {
      const path = inner + name;
      const found = await fs.lstat(`${directory}/${path}`);
      const entry = { name: path, size: 0, mode: found.mode & 0o7777, mtime: found.mtimeMs / 1000, link: "" };
      if (found.isDirectory()) {
        yield heads({ ...entry, name: `${path}/`, kind: "directory" });
        yield* below(`${path}/`);
      } else if (found.isSymbolicLink()) {
        yield heads({ ...entry, kind: "symlink", link: await fs.readlink(`${directory}/${path}`) });
      } else if (found.isFile()) {
        yield heads({ ...entry, kind: "file", size: found.size });
        let left = found.size;
        // A file that grows meanwhile is taken as long as it was.
        const end = found.size - 1;
        if (found.size > 0) {
          for await (const piece of createReadStream(`${directory}/${path}`, { end })) {
            left -= (piece as Buffer).length;
            yield piece as Buffer;
          }
        }
        if (left !== 0) throw new Error(`\`${directory}/${path}\` has changed while it was read`);
        yield padding(found.size);
      }
    }
  }
  yield* below("");
  yield Buffer.alloc(2 * BLOCK);
}

/** Reads a stream in pieces of wanted lengths. */
class Reader {
  #source: AsyncIterator<Uint8Array>;
  #rest: Buffer = Buffer.alloc(0);

  constructor(source: AsyncIterable<Uint8Array>) {
    this.#source = source[Symbol.asyncIterator]();
  }

  async #fill(length: number): Promise<void> {
    while (this.#rest.length < length) {
      const found = await this.#source.next();
      if (found.done) throw new ProtocolError("the archive was cut off");
      this.#rest = Buffer.concat([this.#rest, found.value]);
    }
  }

  async exact(length: number): Promise<Buffer> {
    await this.#fill(length);
    const found = this.#rest.subarray(0, length);
    this.#rest = this.#rest.subarray(length);
    return found;
  }

  async *pieces(length: number): AsyncGenerator<Buffer, void> {
    for (let left = length; left > 0; ) {
      await this.#fill(1);
      const piece = this.#rest.subarray(0, left);
      this.#rest = this.#rest.subarray(piece.length);
      left -= piece.length;
      yield piece;
    }
  }
}

const text = (bytes: Buffer) => bytes.toString("utf8").replace(/\0.*$/s, "");

function number(bytes: Buffer): number {
  if ((bytes[0] ?? 0) & 0x80) {
    return Number(BigInt(`0x${bytes.toString("hex")}`) & ((1n << BigInt(bytes.length * 8 - 1)) - 1n));
  }
  return parseInt(text(bytes).trim() || "0", 8);
}

function sparse(bytes: Buffer, from: number, count: number): [number, number][] {
  const found: [number, number][] = [];
  for (let at = from; at < from + count * 24; at += 24) {
    const length = number(bytes.subarray(at + 12, at + 24));
    if (bytes[at] !== 0) found.push([number(bytes.subarray(at, at + 12)), length]);
  }
  return found;
}

async function header(reader: Reader): Promise<Header | undefined> {
  let over: Record<string, string> = {};
  for (;;) {
    const bytes = await reader.exact(BLOCK);
    if (bytes.every((byte) => byte === 0)) return undefined;
    const size = over["size"] === undefined ? number(bytes.subarray(124, 136)) : Number(over["size"]);
    const type = String.fromCharCode(bytes[156] || 0x30);
    if (["x", "g", "L", "K"].includes(type)) {
      if (size > LARGEST_HEADER) throw new ProtocolError("a header of the archive is too large");
      const body = await reader.exact(size + padding(size).length);
      const found = body.subarray(0, size);
      if (type === "x") over = { ...over, ...records(found) };
      if (type === "L") over = { ...over, path: text(found) };
      if (type === "K") over = { ...over, linkpath: text(found) };
      continue;
    }
    const prefix = bytes.toString("latin1", 257, 263) === "ustar\0" ? text(bytes.subarray(345, 500)) : "";
    const short = text(bytes.subarray(0, 100));
    const entry: Omit<Header, "kind"> = {
      name: over["path"] ?? (prefix ? `${prefix}/${short}` : short),
      size,
      mode: number(bytes.subarray(100, 108)) & 0o777,
      mtime: over["mtime"] ? Number(over["mtime"]) : number(bytes.subarray(136, 148)),
      link: over["linkpath"] ?? text(bytes.subarray(157, 257)),
    };
    if (type === "S") {
      const pieces = sparse(bytes, 386, 4);
      const realSize = number(bytes.subarray(483, 495));
      for (let more = bytes[482]; more; ) {
        const next = await reader.exact(BLOCK);
        pieces.push(...sparse(next, 0, 21));
        more = next[504];
      }
      return { ...entry, kind: "file", pieces, realSize };
    }
    const kinds: Record<string, Kind> = { "0": "file", "7": "file", "5": "directory", "2": "symlink", "1": "link" };
    const kind = kinds[type];
    if (kind) return { ...entry, kind };
    // Devices and pipes mean nothing here.
    for await (const _ of reader.pieces(size + padding(size).length)) continue;
    over = {};
  }
}

function records(bytes: Buffer): Record<string, string> {
  const found: Record<string, string> = {};
  for (let at = 0; at < bytes.length; ) {
    const space = bytes.indexOf(0x20, at);
    const length = Number(bytes.toString("latin1", at, space));
    if (space < 0 || !(length > 0)) throw new ProtocolError("a header of the archive is damaged");
    const [name = "", ...value] = bytes.toString("utf8", space + 1, at + length - 1).split("=");
    found[name] = value.join("=");
    at += length;
  }
  return found;
}

/** Unpacks a tar of one directory, without its name. Nothing is written outside of `directory`. */
export async function unpack(archive: AsyncIterable<Uint8Array>, directory: string): Promise<void> {
  const fs = await import("node:fs/promises");
  const path = await import("node:path");
  await fs.mkdir(directory, { recursive: true });
  const root = await fs.realpath(directory);
  const reader = new Reader(archive);
  const below = (name: string) => {
    const parts = name.split("/").filter((part) => part !== "" && part !== ".");
    if (parts.includes("..") || name.includes("\0")) throw new ProtocolError(`the archive has the path \`${name}\``);
    return parts.slice(1).join("/");
  };
  /** The place of a path, whose parents are directories and no links. */
  const place = async (inner: string) => {
    const at = path.join(root, inner);
    await fs.mkdir(path.dirname(at), { recursive: true });
    if ((await fs.realpath(path.dirname(at))) !== path.dirname(at)) {
      throw new ProtocolError(`\`${inner}\` leads through a symlink`);
    }
    return at;
  };
  for (let entry = await header(reader); entry; entry = await header(reader)) {
    const inner = below(entry.name);
    const padded = padding(entry.size).length;
    if (inner === "") {
      for await (const _ of reader.pieces(entry.size + padded)) continue;
      continue;
    }
    const at = await place(inner);
    const there = await fs.lstat(at).catch(() => undefined);
    if (entry.kind === "directory") {
      if (there && !there.isDirectory()) await fs.rm(at);
      await fs.mkdir(at, { recursive: true });
      await fs.chmod(at, entry.mode | 0o700);
      continue;
    }
    if (there) await fs.rm(at, { recursive: true });
    if (entry.kind === "symlink") {
      const target = path.resolve(path.dirname(at), entry.link);
      if (path.isAbsolute(entry.link) || path.relative(root, target).startsWith("..")) {
        throw new ProtocolError(`the symlink \`${inner}\` leads outside: \`${entry.link}\``);
      }
      await fs.symlink(entry.link, at);
    } else if (entry.kind === "link") {
      const target = await place(below(entry.link));
      if ((await fs.lstat(target)).isSymbolicLink()) throw new ProtocolError(`\`${inner}\` links to a symlink`);
      await fs.link(target, at);
    } else {
      const file = await fs.open(at, "wx", entry.mode);
      try {
        let written = 0;
        const [first = [0, entry.size] as [number, number], ...others] = entry.pieces ?? [[0, entry.size]];
        let [from, left] = first;
        for await (let piece of reader.pieces(entry.size)) {
          while (piece.length > 0) {
            if (left === 0) [from, left] = others.shift() ?? [written, piece.length];
            const part = piece.subarray(0, left);
            await file.write(part, 0, part.length, from);
            written = from += part.length;
            left -= part.length;
            piece = piece.subarray(part.length);
          }
        }
        if (entry.realSize !== undefined) await file.truncate(entry.realSize);
        await file.utimes(entry.mtime, entry.mtime);
      } finally {
        await file.close();
      }
      await reader.exact(padded);
    }
  }
}
