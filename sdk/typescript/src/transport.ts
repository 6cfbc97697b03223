/** Calls of the server: addresses, retries, timeouts. */

import type { SandkeepError } from "./api-error.js";
import { ApiError } from "./api-error.js";
import { find } from "./config.js";
import type { Target } from "./config.js";
import { ConnectionFailed, ProtocolError, RequestTimedOut, errorFromAnswer, mayRetry } from "./errors.js";
import { OPERATIONS } from "./operations.js";
import type { Answers, Operation } from "./operations.js";
import type { Page } from "./types.js";

/** How a server is reached. */
export interface ClientOptions {
  /** Its address; else `SANDKEEP_URL`, else the server of this machine. */
  url?: string;
  /** The key; else `SANDKEEP_KEY`, else the one that the server of this machine wrote for its owner. */
  key?: string;
  /** The project, for an admin key. */
  project?: string;
  /** How long an answer may take, in milliseconds. */
  timeout?: number;
  /** For how long, in milliseconds, calls that may be repeated are made again, and streams gone on with, while the server is away. */
  retryFor?: number;
  /** Another `fetch`. */
  fetch?: typeof fetch;
  /** Another `WebSocket`: one that takes `{ headers }` as its second argument. */
  WebSocket?: typeof WebSocket;
}

/** A body: bytes or text, or a function that begins to read it. */
export type Body = string | Uint8Array<ArrayBuffer> | Blob | (() => ReadableStream<Uint8Array> | Promise<ReadableStream<Uint8Array>>);

export type Query = Record<string, string | number | boolean | readonly string[] | null | undefined>;
export type Path = Record<string, string | number>;

export interface Call {
  path?: Path;
  query?: Query;
  json?: unknown;
  body?: Body;
  headers?: Record<string, string>;
  /** The idempotency key; otherwise one is made, where the operation takes one. */
  key?: string;
  /** Whether it may be made again when the connection broke. */
  repeatable?: boolean;
  /** How long an answer may take, in milliseconds; 0 for any time. */
  timeout?: number;
  /** Whether the body is read, within the timeout. Otherwise only its head is. */
  whole?: boolean;
  retry?: boolean;
  signal?: AbortSignal | undefined;
}

/** A success. `content` has its body, if it was read. */
export interface Answer {
  response: Response;
  content: Uint8Array;
  /** Ends the exchange. */
  abort: () => void;
}

export const sleep = (milliseconds: number, signal?: AbortSignal): Promise<void> =>
  new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    const timer = setTimeout(done, milliseconds);
    function done() {
      signal?.removeEventListener("abort", aborted);
      resolve();
    }
    function aborted() {
      clearTimeout(timer);
      reject(signal?.reason as Error);
    }
    signal?.addEventListener("abort", aborted, { once: true });
  });

/** How long to wait before the next attempt, in milliseconds. */
export function pause(attempt: number, error?: unknown): number {
  const backoff = Math.min(2000, 50 * 2 ** attempt) * (0.75 + Math.random() / 2);
  const told = error instanceof ApiError && error.retryAfter ? error.retryAfter * 1000 : 0;
  return Math.max(told, backoff);
}

/** The values that are neither undefined nor null. */
export function given<T extends Record<string, unknown>>(values: T): Partial<T> {
  return Object.fromEntries(
    Object.entries(values).filter(([, value]) => value !== undefined && value !== null),
  ) as Partial<T>;
}

export class Transport {
  readonly timeout: number;
  readonly retryFor: number;
  #options: ClientOptions;
  #target: Promise<Target> | undefined;

  constructor(options: ClientOptions) {
    this.#options = options;
    this.timeout = options.timeout ?? 120_000;
    this.retryFor = options.retryFor ?? 30_000;
  }

  target(): Promise<Target> {
    this.#target ??= find(this.#options.url, this.#options.key);
    return this.#target;
  }

  get WebSocket(): typeof WebSocket | undefined {
    return this.#options.WebSocket ?? globalThis.WebSocket;
  }

  /** The headers that every request has. */
  async headers(): Promise<Record<string, string>> {
    const { key } = await this.target();
    const headers: Record<string, string> = {};
    if (key) headers["Authorization"] = `Bearer ${key}`;
    if (this.#options.project) headers["Sandkeep-Project"] = this.#options.project;
    return headers;
  }

  /** The address of an operation. */
  async address(operation: Operation, path: Path = {}, query: Query = {}): Promise<string> {
    let text: string = OPERATIONS[operation][1];
    for (const [name, value] of Object.entries(path)) {
      text = text.replace(`{${name}}`, encodeURIComponent(value));
    }
    const pairs = new URLSearchParams();
    for (const [name, value] of Object.entries(query)) {
      for (const one of Array.isArray(value) ? value : [value]) {
        if (one !== undefined && one !== null) pairs.append(name, String(one));
      }
    }
    const { url } = await this.target();
    return `${url}${text}${pairs.size > 0 ? `?${pairs}` : ""}`;
  }

  /** Calls an operation that answers with a JSON document. */
  async call<O extends Operation>(operation: O, call: Call = {}): Promise<Answers[O]> {
    return (await this.json(operation, call)) as Answers[O];
  }

  async json(operation: Operation, call: Call = {}): Promise<unknown> {
    const { content } = await this.send(operation, { ...call, whole: true });
    try {
      return JSON.parse(new TextDecoder().decode(content)) as unknown;
    } catch (error) {
      throw new ProtocolError("the server's answer is not JSON", undefined, { cause: error });
    }
  }

  /** Calls an operation that answers with nothing. */
  async done(operation: Operation, call: Call = {}): Promise<void> {
    await this.send(operation, { ...call, whole: true });
  }

  /** Calls an operation that answers with bytes, and reads them all. */
  async read(operation: Operation, call: Call = {}): Promise<Uint8Array> {
    return (await this.send(operation, { ...call, whole: true })).content;
  }

  /** All items of a list, page by page. */
  async *pages<T>(operation: Operation, call: Call = {}): AsyncGenerator<T, void> {
    let cursor: string | null | undefined;
    do {
      const query = cursor ? { ...call.query, cursor } : call.query ?? {};
      const page = (await this.json(operation, { ...call, query })) as Page<T>;
      yield* page.items;
      cursor = page.next;
    } while (cursor);
  }

  async all<T>(operation: Operation, call: Call = {}): Promise<T[]> {
    const found: T[] = [];
    for await (const one of this.pages<T>(operation, call)) found.push(one);
    return found;
  }

  /**
   * Calls an operation, again if need be. The answer is a success.
   *
   * A call is made again if the server says that nothing was done, and, if it is `repeatable`, also when the connection
   * broke. Calls that take an idempotency key are repeatable: all attempts have the same key.
   */
  async send(operation: Operation, call: Call = {}): Promise<Answer> {
    const [method, , keyed] = OPERATIONS[operation];
    const headers = { ...(await this.headers()), ...call.headers };
    if (keyed) headers["Idempotency-Key"] = call.key ?? crypto.randomUUID();
    const repeatable = call.repeatable ?? (keyed || method !== "POST");
    let body: Body | undefined = call.body;
    if (call.json !== undefined) {
      headers["Content-Type"] = "application/json";
      body = JSON.stringify(call.json);
    } else if (body !== undefined) {
      headers["Content-Type"] ??= "application/octet-stream";
    }
    const address = await this.address(operation, call.path, call.query);
    const giveUp = Date.now() + this.retryFor;
    let broke = false;
    for (let attempt = 0; ; attempt += 1) {
      call.signal?.throwIfAborted();
      let failed: SandkeepError;
      let again: boolean;
      try {
        const answer = await this.#attempt(method, address, headers, body, call);
        const { response, content } = answer;
        if (response.ok || response.status === 101) return answer;
        // The attempt that broke has done it.
        if (broke && response.status === 404 && method === "DELETE" && call.whole && call.json === undefined) {
          if (operation.startsWith("remove") || operation.startsWith("revoke")) return answer;
        }
        const text = new TextDecoder().decode(content);
        failed = errorFromAnswer(response.status, text, response.headers.get("retry-after"));
        again = mayRetry(failed, repeatable);
      } catch (error) {
        if (call.signal?.aborted) throw call.signal.reason;
        if (error instanceof RequestTimedOut) throw error;
        // `fetch` does not say whether the request was sent, except when nobody listens.
        const unsent = refused(error);
        broke ||= !unsent;
        again = unsent || repeatable;
        const { url } = await this.target();
        const message = unsent ? `cannot reach the server at ${url}` : `the connection to ${url} broke`;
        failed = new ConnectionFailed(`${message}: ${reason(error)}`, { cause: error });
      }
      if (!again || call.retry === false || Date.now() >= giveUp) throw failed;
      await sleep(pause(attempt, failed), call.signal);
    }
  }

  async #attempt(
    method: string,
    address: string,
    headers: Record<string, string>,
    body: Body | undefined,
    call: Call,
  ): Promise<Answer> {
    const ending = new AbortController();
    const limit = call.timeout ?? this.timeout;
    const late = new RequestTimedOut(`the server did not answer in ${limit} ms`);
    const timer = limit > 0 ? setTimeout(() => ending.abort(late), limit) : undefined;
    const leave = () => ending.abort(call.signal?.reason);
    call.signal?.addEventListener("abort", leave, { once: true });
    try {
      const content = typeof body === "function" ? await body() : body;
      const streamed = content instanceof ReadableStream;
      const init: RequestInit & { duplex?: "half" } = {
        method,
        headers,
        signal: ending.signal,
        redirect: "error",
        ...(content === undefined ? {} : { body: content as BodyInit }),
        ...(streamed ? { duplex: "half" } : {}),
      };
      const response = await (this.#options.fetch ?? fetch)(address, init);
      const read = call.whole || !response.ok;
      const bytes = read ? new Uint8Array(await response.arrayBuffer()) : new Uint8Array();
      return { response, content: bytes, abort: () => ending.abort() };
    } catch (error) {
      throw ending.signal.aborted && ending.signal.reason === late ? late : error;
    } finally {
      clearTimeout(timer);
      if (call.whole) call.signal?.removeEventListener("abort", leave);
    }
  }
}

/** The innermost reason that a runtime gives. */
export function reason(error: unknown): string {
  let found: unknown = error;
  while (found instanceof Error && found.cause instanceof Error) found = found.cause;
  if (found instanceof AggregateError && found.errors.length > 0) found = found.errors[0];
  const code = (found as { code?: unknown } | null)?.code;
  return found instanceof Error ? found.message || String(code ?? found.name) : String(found);
}

/** Whether nobody listens at the address, so that nothing was sent. */
function refused(error: unknown): boolean {
  for (let found: unknown = error; found instanceof Error; found = found.cause) {
    const all = found instanceof AggregateError ? found.errors : [found];
    for (const one of all) {
      const { code, name, message } = one as { code?: string; name?: string; message?: string };
      if (["ECONNREFUSED", "ENOTFOUND", "EHOSTUNREACH", "ConnectionRefused", "UND_ERR_CONNECT_TIMEOUT"].includes(code ?? "")) {
        return true;
      }
      // Deno and Bun.
      if (name === "ConnectionRefused" || /connection refused|unable to connect/i.test(message ?? "")) return true;
    }
  }
  return false;
}
