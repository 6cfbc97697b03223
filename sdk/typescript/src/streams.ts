/** Streams that go on where they were when the connection broke: output of commands, events, progress. */

import { ApiError } from "./api-error.js";
import { ConnectionFailed, ProtocolError, errorFromBody, isBroken } from "./errors.js";
import type { Operation } from "./operations.js";
import { pause, reason, sleep } from "./transport.js";
import type { Answer, Query, Transport } from "./transport.js";
import type { BuildProgress, Command, CommandEnd, Event, ExecEvent, Image, ImageProgress, Session } from "./types.js";

/** Something a command printed. */
export interface Output {
  /** Where it printed it. `gap` stands for bytes that the server did not keep. */
  stream: "stdout" | "stderr" | "gap";
  /** The bytes. */
  data: Uint8Array;
  /** The same as text. A character that comes in two pieces is in the second; what is not UTF-8 is replaced. */
  text: string;
  /** How many bytes are missing, for a `gap`. */
  missing: number;
}

/** A command that has ended, and what it printed. */
export class Result {
  constructor(
    /** The command's record. */
    readonly command: Command,
    /** Standard output, or that of the terminal. */
    readonly stdoutBytes: Uint8Array,
    /** Standard error. */
    readonly stderrBytes: Uint8Array,
    /** Bytes that it printed and that the server did not keep, because its log is bounded. */
    readonly missingBytes: number,
    /** Whether this call woke the sandbox. */
    readonly resumed: boolean,
  ) {}

  /** Standard output as text; what is not UTF-8 is replaced. */
  get stdout(): string {
    return new TextDecoder().decode(this.stdoutBytes);
  }

  /** Standard error as text; what is not UTF-8 is replaced. */
  get stderr(): string {
    return new TextDecoder().decode(this.stderrBytes);
  }

  /** The exit code; 128 + signal when a signal ended it, null if its session ended under it. */
  get exitCode(): number | null {
    return this.command.exit_code ?? null;
  }

  /** Why it ended. */
  get end(): CommandEnd | null {
    return this.command.end ?? null;
  }

  /** Whether it exited with 0. */
  get ok(): boolean {
    return this.exitCode === 0;
  }

  /** Returns itself, and throws `CommandFailed` if the command did not succeed. */
  check(): this {
    if (this.ok) return this;
    throw new CommandFailed(this);
  }
}

/** A command that was run with `check: true` did not succeed. `result` has what it printed. */
export class CommandFailed extends Error {
  override readonly name = "CommandFailed";

  constructor(readonly result: Result) {
    const last = (result.stderr || result.stdout).trim().split("\n").pop()?.slice(0, 200);
    const how = result.end === "exited" ? `exit code ${result.exitCode}` : String(result.end);
    super(`\`${result.command.argv.join(" ").slice(0, 100)}\`: ${how}${last ? `: ${last}` : ""}`);
  }
}

/** Whole lines of a body. What comes after the last line end is left out: it was cut off. */
export async function* lines(answer: Answer): AsyncGenerator<string, void> {
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for await (const data of chunks(answer)) {
      rest += decoder.decode(data, { stream: true });
      const found = rest.split("\n");
      rest = found.pop() ?? "";
      yield* found;
    }
  } finally {
    answer.abort();
  }
}

/** The bytes of a body as they come. */
export async function* chunks(answer: Answer): AsyncGenerator<Uint8Array, void> {
  const reader = answer.response.body?.getReader();
  if (!reader) return;
  for (;;) {
    let piece: ReadableStreamReadResult<Uint8Array>;
    try {
      piece = await reader.read();
    } catch (error) {
      throw new ConnectionFailed(`the connection broke: ${reason(error)}`, { cause: error });
    }
    if (piece.done) return;
    yield piece.value;
  }
}

/** The next of an iterator, if it comes within a time. */
async function within<T>(next: Promise<T>, milliseconds: number): Promise<T> {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new ConnectionFailed("the connection is silent")), milliseconds);
  });
  try {
    return await Promise.race([next, late]);
  } finally {
    clearTimeout(timer);
  }
}

/** A quiet stream says every fifteen seconds that it is alive. */
const SILENCE = 45_000;

function bytesOf(event: { encoding: string; data: string }): Uint8Array {
  if (event.encoding !== "base64") return new TextEncoder().encode(event.data);
  return Uint8Array.from(atob(event.data), (letter) => letter.charCodeAt(0));
}

export function joined(parts: readonly Uint8Array[]): Uint8Array {
  const all = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all;
}

export interface OutputOptions {
  /** The command to start; otherwise `command` is followed. */
  request?: object;
  query?: Query;
  command?: Command | string;
  follow?: boolean;
  offset?: number;
  signal?: AbortSignal | undefined;
}

/**
 * What a command prints, as it prints it: iterate with `for await`.
 *
 * If the connection breaks or the server restarts, it goes on at the byte where it was, for as long as the client's
 * `retryFor`. Leaving it before its end ends a command that it started.
 */
export class OutputStream implements AsyncIterableIterator<Output>, AsyncDisposable {
  /** The command: as it was started, and at the end, as it ended. */
  command: Command | undefined;
  /** The session it was started in. */
  session: Session | undefined;
  /** Whether this call woke the sandbox. */
  resumed = false;
  /** How many bytes of output came before this point. */
  offset: number;
  /** How many of them the server did not keep. */
  missingBytes = 0;
  readonly #transport: Transport;
  readonly #sandbox: string;
  readonly #options: OutputOptions;
  // All attempts to start the command have it, so the command is started once.
  readonly #key = crypto.randomUUID();
  readonly #decoders = { stdout: new TextDecoder(), stderr: new TextDecoder() };
  #id: string | undefined;
  #lines: AsyncGenerator<string, void> | undefined;
  #answer: Answer | undefined;
  #over = false;

  constructor(transport: Transport, sandbox: string, options: OutputOptions) {
    this.#transport = transport;
    this.#sandbox = sandbox;
    this.#options = options;
    this.offset = options.offset ?? 0;
    this.command = typeof options.command === "object" ? options.command : undefined;
    this.#id = typeof options.command === "object" ? options.command.id : options.command;
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  /** Starts the command, if that was not done yet. */
  async start(): Promise<this> {
    while (this.#options.request && !this.command && !this.#over) await this.#event();
    return this;
  }

  async next(): Promise<IteratorResult<Output, undefined>> {
    while (!this.#over) {
      const event = await this.#event();
      if (event.type === "stdout" || event.type === "stderr") {
        const data = bytesOf(event);
        this.offset += data.length;
        const text = this.#decoders[event.type].decode(data, { stream: true });
        return { done: false, value: { stream: event.type, data, text, missing: 0 } };
      }
      if (event.type === "gap") {
        this.offset += event.bytes;
        this.missingBytes += event.bytes;
        return { done: false, value: { stream: "gap", data: new Uint8Array(), text: "", missing: event.bytes } };
      }
    }
    return { done: true, value: undefined };
  }

  async return(): Promise<IteratorResult<Output, undefined>> {
    await this.close();
    return { done: true, value: undefined };
  }

  /** Reads to the end, and returns what was printed from here on. */
  async result(hear?: (output: Output) => void): Promise<Result> {
    const parts: Record<Output["stream"], Uint8Array[]> = { stdout: [], stderr: [], gap: [] };
    for await (const output of this) {
      parts[output.stream].push(output.data);
      hear?.(output);
    }
    if (!this.command) throw new ProtocolError("the output ended before the command did");
    return new Result(this.command, joined(parts.stdout), joined(parts.stderr), this.missingBytes, this.resumed);
  }

  /** Leaves the stream. A command that it started and that runs gets SIGHUP, as from a terminal that is closed. */
  async close(): Promise<void> {
    const over = this.#over;
    this.#over = true;
    if (!over && this.#options.request && this.#id) {
      // The server would wait for somebody who comes back. It still ends the command if this does not arrive.
      const path = { name: this.#sandbox, id: this.#id };
      await this.#transport.done("signal_command", { path, json: { signal: "HUP" } }).catch(() => undefined);
    }
    this.#drop();
  }

  #drop(): void {
    this.#answer?.abort();
    this.#answer = undefined;
    this.#lines = undefined;
  }

  async #open(): Promise<void> {
    const { request, query, follow, signal } = this.#options;
    const path = { name: this.#sandbox };
    if (this.#id === undefined) {
      const all = { ...query, keep_alive: true };
      this.#answer = await this.#transport.send("exec", {
        path, query: all, json: request, key: this.#key, timeout: 0, retry: false, signal,
      });
    } else {
      const all = { follow: follow ?? true, offset: this.offset, keep_alive: true };
      this.#answer = await this.#transport.send("get_logs", {
        path: { ...path, id: this.#id }, query: all, timeout: SILENCE, retry: false, signal,
      });
    }
    this.#lines = lines(this.#answer);
  }

  /** The next line. A connection that breaks is replaced. */
  async #event(): Promise<ExecEvent> {
    const giveUp = Date.now() + this.#transport.retryFor;
    for (let attempt = 0; ; attempt += 1) {
      try {
        if (!this.#lines) await this.#open();
        const found = await this.#line();
        return this.#taken(found);
      } catch (error) {
        this.#drop();
        if (this.#options.signal?.aborted || !isBroken(error) || Date.now() >= giveUp) {
          if (this.#options.signal?.aborted) await this.close();
          this.#over = true;
          throw error;
        }
      }
      await sleep(pause(attempt), this.#options.signal);
    }
  }

  async #line(): Promise<string> {
    for (;;) {
      const found = await within(this.#lines!.next(), SILENCE);
      if (found.done) throw new ConnectionFailed("the stream was cut off");
      if (found.value !== "") return found.value;
    }
  }

  #taken(line: string): ExecEvent {
    let event: ExecEvent;
    try {
      event = JSON.parse(line) as ExecEvent;
    } catch (error) {
      throw new ProtocolError("a line of the stream is not JSON", undefined, { cause: error });
    }
    switch (event.type) {
      case "started":
        this.command = event.command;
        this.session = event.session;
        this.resumed = event.resumed;
        this.#id = event.command.id;
        break;
      case "exited":
        this.command = event.command;
        this.#over = true;
        this.#drop();
        break;
      case "more":
        this.#over = true;
        this.#drop();
        break;
      case "error":
        throw errorFromBody(200, event.error);
      default:
        break;
    }
    return event;
  }
}

/** Messages of a stream of events. If the connection breaks, it goes on after the last message that came. */
export class EventStream<T> implements AsyncIterableIterator<T>, AsyncDisposable {
  /** The id of the last message. A later stream with this `cursor` goes on after it. */
  cursor: string | undefined;
  readonly #transport: Transport;
  readonly #operation: Operation;
  readonly #query: Query;
  readonly #follow: boolean;
  readonly #signal: AbortSignal | undefined;
  #answer: Answer | undefined;
  #messages: AsyncGenerator<T, void> | undefined;
  #over = false;

  constructor(transport: Transport, operation: Operation, query: Query, follow: boolean, signal?: AbortSignal) {
    this.#transport = transport;
    this.#operation = operation;
    this.#query = query;
    this.#follow = follow;
    this.#signal = signal;
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.close();
  }

  /** Begins to listen: what happens from here on is told. */
  async open(): Promise<this> {
    if (!this.#messages && !this.#over) await this.#open();
    return this;
  }

  async next(): Promise<IteratorResult<T, undefined>> {
    let giveUp = Date.now() + this.#transport.retryFor;
    for (let attempt = 0; !this.#over; attempt += 1) {
      try {
        if (!this.#messages) {
          await this.#open();
          giveUp = Date.now() + this.#transport.retryFor;
        }
        const found = await this.#messages!.next();
        if (!found.done) return { done: false, value: found.value };
        this.#drop();
        if (!this.#follow) break;
      } catch (error) {
        this.#drop();
        if (this.#over) break;
        if (this.#signal?.aborted || !isBroken(error) || Date.now() >= giveUp) {
          this.#over = true;
          throw error;
        }
      }
      await sleep(pause(attempt), this.#signal);
    }
    this.#over = true;
    return { done: true, value: undefined };
  }

  async return(): Promise<IteratorResult<T, undefined>> {
    this.close();
    return { done: true, value: undefined };
  }

  /** Ends the stream. */
  close(): void {
    this.#over = true;
    this.#drop();
  }

  #drop(): void {
    this.#answer?.abort();
    this.#answer = undefined;
    this.#messages = undefined;
  }

  async #open(): Promise<void> {
    const query = { ...this.#query };
    const headers: Record<string, string> = { Accept: "text/event-stream" };
    if (this.cursor !== undefined) {
      headers["Last-Event-ID"] = this.cursor;
      delete query["since"];
      delete query["cursor"];
    }
    const signal = this.#signal;
    this.#answer = await this.#transport.send(this.#operation, { query, headers, timeout: SILENCE, signal });
    this.#messages = this.#read(this.#answer);
  }

  async *#read(answer: Answer): AsyncGenerator<T, void> {
    const source = lines(answer);
    let id = "";
    let data: string[] = [];
    for (;;) {
      const found = await within(source.next(), SILENCE);
      if (found.done) return;
      const line = found.value.replace(/\r$/, "");
      if (line === "") {
        if (data.length > 0) {
          const message = JSON.parse(data.join("\n")) as T & { kind?: string };
          data = [];
          if (message.kind === "stream.closing") continue;
          if (id) this.cursor = id;
          if (message.kind !== "stream.opened") yield message as unknown as Awaited<T>;
        }
        continue;
      }
      const [, name, value] = /^([^:]*):? ?(.*)$/.exec(line) ?? [];
      if (name === "data") data.push(value ?? "");
      if (name === "id") id = value ?? "";
    }
  }
}

export type Events = EventStream<Event>;

/** Progress of work on an image; its end is the image. */
export class ProgressStream {
  /** The image, once the work is done. */
  image: Image | undefined;

  constructor(readonly answer: Answer) {}

  async *[Symbol.asyncIterator](): AsyncGenerator<Extract<ImageProgress, { type: "progress" }>, void> {
    for await (const line of lines(this.answer)) {
      if (!line) continue;
      const told = JSON.parse(line) as ImageProgress;
      if (told.type === "progress") yield told;
      else if (told.type === "done") this.image = told.image;
      else throw errorFromBody(200, told.error);
    }
  }

  /** Waits for the end of the work. */
  async done(): Promise<Image> {
    for await (const _ of this) {
      // Only the end counts.
    }
    if (!this.image) throw new ConnectionFailed("the stream was cut off before the image was done");
    return this.image;
  }
}

/** Steps of a build, their output and progress; its end is the image. Leaving the loop ends the build. */
export class BuildStream {
  /** The image, once the work is done. */
  image: Image | undefined;

  constructor(readonly answer: Answer) {}

  async *[Symbol.asyncIterator](): AsyncGenerator<Exclude<BuildProgress, { type: "done" | "error" }>, void> {
    for await (const line of lines(this.answer)) {
      if (!line) continue;
      const told = JSON.parse(line) as BuildProgress;
      if (told.type === "done") this.image = told.image;
      else if (told.type === "error") throw errorFromBody(200, told.error);
      else yield told;
    }
  }

  /** Waits for the end of the build. */
  async done(): Promise<Image> {
    for await (const _ of this) {
      // Only the end counts.
    }
    if (!this.image) throw new ConnectionFailed("the stream was cut off before the image was done");
    return this.image;
  }
}

export { ApiError };
