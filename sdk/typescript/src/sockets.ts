/** Connections that carry bytes both ways: terminals, and ports of a sandbox. */

import { ConfigurationError, ConnectionFailed, ProtocolError, errorFromAnswer, errorFromBody } from "./errors.js";
import type { Operation } from "./operations.js";
import type { Output } from "./streams.js";
import { reason } from "./transport.js";
import type { Path, Query, Transport } from "./transport.js";
import type { Command, ExecEvent } from "./types.js";

/** A WebSocket of the server, message by message. */
export class Socket implements AsyncDisposable {
  readonly #socket: WebSocket;
  readonly #messages: (string | Uint8Array)[] = [];
  #wake: (() => void) | undefined;
  #closed = false;
  #failed: Error | undefined;

  private constructor(socket: WebSocket) {
    this.#socket = socket;
    socket.binaryType = "arraybuffer";
    socket.onmessage = ({ data }) => {
      this.#messages.push(typeof data === "string" ? data : new Uint8Array(data as ArrayBuffer));
      this.#wake?.();
    };
    socket.onclose = () => {
      this.#closed = true;
      this.#wake?.();
    };
    socket.onerror = () => {
      this.#failed ??= new ConnectionFailed("the WebSocket broke, or the server refused it");
      this.#wake?.();
    };
  }

  /** Opens one. It needs a runtime whose `WebSocket` takes headers: Node 22, Deno 2, Bun; Node 20 with `--experimental-websocket`. */
  static async open(transport: Transport, operation: Operation, path: Path, query: Query): Promise<Socket> {
    const Kind = transport.WebSocket;
    if (!Kind) {
      throw new ConfigurationError("there is no WebSocket here: use Node 22 or later, or give the client one");
    }
    const address = (await transport.address(operation, path, query)).replace(/^http/, "ws");
    const headers = await transport.headers();
    let socket: WebSocket;
    try {
      socket = new Kind(address, { headers } as unknown as string[]);
    } catch (error) {
      throw new ConfigurationError(`this WebSocket takes no headers, so it can send no key: ${reason(error)}`);
    }
    const found = new Socket(socket);
    await new Promise<void>((resolve, reject) => {
      socket.onopen = () => resolve();
      found.#wake = () => reject(found.#failed ?? new ConnectionFailed("the server closed the WebSocket"));
    });
    found.#wake = undefined;
    return found;
  }

  /** Sends a message. */
  send(message: string | Uint8Array): void {
    if (this.#closed) throw new ConnectionFailed("the WebSocket is closed");
    this.#socket.send(message as Uint8Array<ArrayBuffer>);
  }

  /** Receives a message; undefined when the other side has closed. */
  async receive(): Promise<string | Uint8Array | undefined> {
    for (;;) {
      const message = this.#messages.shift();
      if (message !== undefined) return message;
      if (this.#closed) return undefined;
      if (this.#failed) throw this.#failed;
      await new Promise<void>((resolve) => (this.#wake = resolve));
    }
  }

  /** Closes it. */
  close(): void {
    this.#socket.close();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.close();
  }
}

/** A command on a WebSocket: output, input, signals and window sizes. Leaving it ends the command. */
export class Terminal implements AsyncIterableIterator<Output>, AsyncDisposable {
  /** The command: as it was started, and at the end, as it ended. */
  command: Command | undefined;
  readonly #socket: Socket;
  readonly #decoders = { stdout: new TextDecoder(), stderr: new TextDecoder() };

  private constructor(socket: Socket) {
    this.#socket = socket;
  }

  /** Starts a command. */
  static async open(transport: Transport, sandbox: string, request: object, query: Query): Promise<Terminal> {
    const socket = await Socket.open(transport, "exec_web_socket", { name: sandbox }, query);
    socket.send(JSON.stringify(request));
    return new Terminal(socket);
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  async next(): Promise<IteratorResult<Output, undefined>> {
    for (;;) {
      const message = await this.#socket.receive();
      if (message === undefined) throw new ConnectionFailed("the server hung up before the command ended");
      if (typeof message !== "string") {
        const stream = message[0] === 1 ? "stdout" : "stderr";
        if (message[0] !== 1 && message[0] !== 2) throw new ProtocolError("bytes on an unknown channel");
        const data = message.subarray(1);
        const text = this.#decoders[stream].decode(data, { stream: true });
        return { done: false, value: { stream, data, text, missing: 0 } };
      }
      const told = JSON.parse(message) as ExecEvent;
      switch (told.type) {
        case "started":
          this.command = told.command;
          break;
        case "gap":
          return { done: false, value: { stream: "gap", data: new Uint8Array(), text: "", missing: told.bytes } };
        case "exited":
          this.command = told.command;
          return { done: true, value: undefined };
        case "error":
          throw errorFromBody(200, told.error);
        default:
          break;
      }
    }
  }

  async return(): Promise<IteratorResult<Output, undefined>> {
    this.close();
    return { done: true, value: undefined };
  }

  /** Sends input. */
  write(data: string | Uint8Array): void {
    const bytes = typeof data === "string" ? new TextEncoder().encode(data) : data;
    const message = new Uint8Array(bytes.length + 1);
    message.set(bytes, 1);
    this.#socket.send(message);
  }

  /** Says that there is no more input. */
  closeStdin(): void {
    this.#socket.send('{"type":"stdin_close"}');
  }

  /** Gives the terminal another size. */
  resize(cols: number, rows: number): void {
    this.#socket.send(JSON.stringify({ type: "resize", cols, rows }));
  }

  /** Sends a signal. */
  signal(signal: string | number): void {
    this.#socket.send(JSON.stringify({ type: "signal", signal }));
  }

  /** Leaves the command, which ends it if it runs. */
  close(): void {
    this.#socket.close();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.close();
  }
}

/**
 * Opens a raw connection to a port inside a sandbox, as a stream of Node (`node:net`): Node, Deno and Bun have it, browsers do not.
 */
export async function connectRaw(
  transport: Transport,
  sandbox: string,
  port: number,
  query: Query,
): Promise<import("node:stream").Duplex> {
  const address = new URL(await transport.address("connect_port_raw", { name: sandbox, port }, query));
  const { request } = await (address.protocol === "https:" ? import("node:https") : import("node:http"));
  const headers = { ...(await transport.headers()), Connection: "Upgrade", Upgrade: "tcp" };
  return new Promise((resolve, reject) => {
    const asked = request(address, { headers, timeout: transport.timeout });
    asked.on("upgrade", (_response, socket, head) => {
      socket.setTimeout(0);
      if (head.length > 0) socket.unshift(head);
      resolve(socket);
    });
    asked.on("response", (response) => {
      let text = "";
      response.setEncoding("utf8");
      response.on("data", (piece: string) => (text += piece));
      response.on("end", () => reject(errorFromAnswer(response.statusCode ?? 0, text, null)));
    });
    asked.on("timeout", () => asked.destroy(new Error("no answer in time")));
    asked.on("error", (error) => reject(new ConnectionFailed(`cannot connect: ${error.message}`, { cause: error })));
    asked.end();
  });
}
