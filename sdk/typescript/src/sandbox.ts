/** A sandbox, and what it has: files, commands, ports, services. */

import type { Sandkeep } from "./client.js";
import { defaultClient } from "./client.js";
import { ApiError } from "./api-error.js";
import { ConnectionFailed } from "./errors.js";
import type { Operation } from "./operations.js";
import { Socket, Terminal, connectRaw } from "./sockets.js";
import { CommandFailed, OutputStream, Result, chunks } from "./streams.js";
import type { EventStream, Output } from "./streams.js";
import { given } from "./transport.js";
import type { Answer, Body, Call, Query, Transport } from "./transport.js";
import type * as types from "./types.js";

/** A command: a line for `/bin/sh`, or a program and its arguments. */
export type Argv = string | readonly string[];

/** Settings of a sandbox. docs/CLI.md (`keep create`) explains them; what is absent has its default. */
export type SandboxSettings = Omit<types.CreateSandbox, "name" | "if_exists" | "start" | "from">;

/** How a command is run. */
export interface RunOptions {
  /** All of its standard input. */
  input?: string | Uint8Array;
  env?: Record<string, string>;
  cwd?: string;
  user?: string;
  /** When the server ends it: milliseconds, or text like `15m`. */
  timeout?: types.Span;
  /** Secrets it is given. */
  inject?: types.Inject[];
  /** Refuse instead of waking the sandbox. */
  ifRunning?: boolean;
  /** Leaves it. */
  signal?: AbortSignal;
}

/** A terminal's size. */
export type TerminalSize = types.TermSize;

const SMALL_INPUT = 256 << 10;

function argvOf(command: Argv): string[] {
  return typeof command === "string" ? ["/bin/sh", "-c", command] : [...command];
}

function base64(bytes: Uint8Array): string {
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text);
}

function request(command: Argv, options: RunOptions, more: object = {}): Record<string, unknown> {
  const { input, env, cwd, user, timeout, inject } = options;
  return given({
    argv: argvOf(command),
    env, cwd, user, timeout, inject,
    input: typeof input === "string" ? input : undefined,
    input_base64: input instanceof Uint8Array ? base64(input) : undefined,
    ...more,
  });
}

/** A sandbox. It is a name: making this object calls nothing, and the sandbox wakes when a call needs it. */
export class Sandbox {
  /** Its files. */
  readonly files: Files;
  /** Its ports. */
  readonly ports: Ports;
  /** Its services. */
  readonly services: Services;
  readonly #transport: Transport;

  constructor(
    /** The client that calls for it. */
    readonly client: Sandkeep,
    /** Its name. */
    readonly name: string,
    /** The sandbox as the server described it last. `refresh` asks again. */
    public info?: types.Sandbox,
  ) {
    this.#transport = client.transport;
    this.files = new Files(this.#transport, name);
    this.ports = new Ports(this.#transport, name);
    this.services = new Services(this.#transport, name);
  }

  /** The sandbox of that name. It is created, with these settings, if there is none. */
  static getOrCreate(name: string, settings: SandboxSettings = {}, client: Sandkeep = defaultClient()): Promise<Sandbox> {
    return client.getOrCreate(name, settings);
  }

  /** A new sandbox. Without a name it gets one. */
  static create(name?: string, settings: SandboxSettings = {}, client: Sandkeep = defaultClient()): Promise<Sandbox> {
    return client.create(name, settings);
  }

  /** The sandbox of that name. Never wakes it. */
  static get(name: string, client: Sandkeep = defaultClient()): Promise<Sandbox> {
    return client.get(name);
  }

  // Commands

  /**
   * Runs a command to its end. A text is a line for `/bin/sh`; a list is a program and its arguments.
   *
   * `onStdout` and `onStderr` get the text as it comes. With `check` a command that fails throws `CommandFailed`.
   */
  async run(
    command: Argv,
    options: RunOptions & {
      check?: boolean;
      onStdout?: (text: string) => void;
      onStderr?: (text: string) => void;
    } = {},
  ): Promise<Result> {
    const hear = ({ stream, text }: Output) => {
      if (text && stream === "stdout") options.onStdout?.(text);
      if (text && stream === "stderr") options.onStderr?.(text);
    };
    const input = typeof options.input === "string" ? new TextEncoder().encode(options.input) : options.input;
    const result =
      input && input.length > SMALL_INPUT
        ? await this.#runWithLargeInput(command, input as Uint8Array<ArrayBuffer>, options, hear)
        : await this.stream(command, options).result(hear);
    return options.check ? result.check() : result;
  }

  /** Runs a command and gives its output as it comes: iterate over it. */
  stream(command: Argv, options: RunOptions & { tty?: TerminalSize } = {}): OutputStream {
    const query = { if_running: options.ifRunning || undefined };
    const body = request(command, options, { tty: options.tty });
    return new OutputStream(this.#transport, this.name, { request: body, query, signal: options.signal });
  }

  /** Starts a command that goes on by itself, also when this program ends. */
  async start(
    command: Argv,
    options: RunOptions & { tty?: TerminalSize; stdin?: boolean } = {},
  ): Promise<RunningCommand> {
    const body = request(command, options, { tty: options.tty, stdin: options.stdin, detach: true });
    const query = { if_running: options.ifRunning || undefined };
    const how = { path: { name: this.name }, query, json: body, signal: options.signal };
    const started = (await this.#transport.json("exec", how)) as types.Command;
    return new RunningCommand(this.#transport, this.name, started);
  }

  /** Runs a command in a terminal, to read from and write to while it runs. */
  terminal(command: Argv, options: RunOptions & Partial<TerminalSize> = {}): Promise<Terminal> {
    const tty = { cols: options.cols ?? 80, rows: options.rows ?? 24 };
    const query = { if_running: options.ifRunning || undefined };
    return Terminal.open(this.#transport, this.name, request(command, options, { tty, stdin: true }), query);
  }

  /** A command that was started before. */
  command(id: string): RunningCommand {
    return new RunningCommand(this.#transport, this.name, id);
  }

  /** Its commands, newest first, or only those that run. Never wakes it. */
  commands(options: { limit?: number; running?: boolean } = {}): AsyncGenerator<types.Command, void> {
    return this.#pages("list_commands", options);
  }

  async #runWithLargeInput(
    command: Argv,
    input: Uint8Array<ArrayBuffer>,
    options: RunOptions,
    hear: (output: Output) => void,
  ): Promise<Result> {
    // Started on its own, so that what it prints goes to its log meanwhile: nobody waits for the other.
    const { input: _, ...rest } = options;
    const started = await this.start(command, { ...rest, stdin: true });
    try {
      try {
        await started.write(input, { close: true });
      } catch (error) {
        if (!(error instanceof ApiError && ["command_ended", "stdin_closed"].includes(error.code))) throw error;
      }
      return await started.logs({ signal: options.signal }).result(hear);
    } catch (error) {
      await started.kill().catch(() => undefined);
      throw error;
    }
  }

  // State

  /** Asks the server for its description. Never wakes it. */
  async refresh(): Promise<types.Sandbox> {
    return (this.info = await this.#call("get_sandbox"));
  }

  /** Changes settings: what is absent stays, null removes a value. */
  async update(settings: types.UpdateSandbox): Promise<types.Sandbox> {
    return (this.info = await this.#call("update_sandbox", { json: settings }));
  }

  /** Starts or resumes it, unless it runs. */
  async ensureRunning(options: types.Start = {}): Promise<types.Opened> {
    const opened = await this.#call("start_sandbox", { json: options, repeatable: true });
    this.info = opened.sandbox;
    return opened;
  }

  /** Stops it and keeps its files. `decision` is for what the guard found. */
  async stop(decision: types.Stop = {}): Promise<types.Stopped> {
    const stopped = await this.#call("stop_sandbox", { json: decision });
    this.info = stopped.sandbox;
    return stopped;
  }

  /** Keeps its files, memory and processes, and takes it off the CPU. For drivers that keep memory. */
  async pause(options: types.Pause = {}): Promise<types.Paused> {
    const paused = await this.#call("pause_sandbox", { json: options });
    this.info = paused.sandbox;
    return paused;
  }

  /** Deletes it. It stays in the trash for a while. */
  delete(options: { keep_snapshots?: boolean; force?: boolean; unused_since?: string } = {}): Promise<types.Deleted> {
    return this.#call("delete_sandbox", { query: options });
  }

  /** Gives it another name. This object keeps the former one; the answer is the sandbox under its new name. */
  async rename(name: string): Promise<Sandbox> {
    const info = await this.#call("rename_sandbox", { json: { name } });
    return new Sandbox(this.client, info.name, info);
  }

  /** Moves the end of its session. */
  extend(by: types.Span): Promise<types.Session> {
    return this.#call("extend_session", { json: { by } });
  }

  /** Why it runs, sleeps or failed. */
  why(): Promise<types.Why> {
    return this.#call("why_sandbox");
  }

  /** What it uses at this moment. Never wakes it: asleep, it has no `usage`. */
  stats(): Promise<types.SandboxStats> {
    return this.#call("get_stats");
  }

  /** Where it comes from and what became of it: sandboxes, snapshots, forks. */
  tree(): Promise<types.Tree> {
    return this.#call("get_tree");
  }

  /** Its sessions, newest first. */
  sessions(options: { limit?: number } = {}): AsyncGenerator<types.Session, void> {
    return this.#pages("list_sessions", options);
  }

  /** What happens to it. Never wakes it. */
  events(
    options: { kinds?: string[]; cursor?: string; since?: string; follow?: boolean; signal?: AbortSignal } = {},
  ): EventStream<types.Event> {
    return this.client.events({ ...options, sandbox: this.name });
  }

  // Snapshots and forks

  /** Takes a snapshot without stopping it. */
  checkpoint(label?: string): Promise<types.Snapshot> {
    return this.#call("checkpoint_sandbox", { json: given({ label }) });
  }

  /** Goes back to a snapshot: an id, or the label of one. What was before is kept as a snapshot. */
  async rollback(to: string, options: { expect_generation?: number } = {}): Promise<types.RolledBack> {
    if (!to.startsWith("snp-")) {
      // The newest one of that label. If there is none, the server says what an id looks like.
      for await (const one of this.snapshots()) {
        if (one.label !== to) continue;
        to = one.id;
        break;
      }
    }
    const back = await this.#call("rollback_sandbox", { json: { to, ...options } });
    this.info = back.sandbox;
    return back;
  }

  /** Its snapshots, newest first. */
  snapshots(options: { limit?: number } = {}): AsyncGenerator<types.Snapshot, void> {
    return this.#pages("list_sandbox_snapshots", options);
  }

  /** A new sandbox that begins with this one's state. */
  async fork(name?: string, options: Omit<types.Fork, "name" | "count"> = {}): Promise<Sandbox> {
    const json = given({ name, ...options });
    const opened = (await this.#call("fork_sandbox", { json })) as types.Opened;
    return new Sandbox(this.client, opened.sandbox.name, opened.sandbox);
  }

  /** Several forks of one state: `name-1`, `name-2`, and so on. Throws if one of them could not be made. */
  async forkMany(count: number, name?: string, options: Omit<types.Fork, "name" | "count"> = {}): Promise<Sandbox[]> {
    const json = given({ name, count, ...options });
    const forks = (await this.#call("fork_sandbox", { json })) as types.Forks;
    const [first] = forks.failed;
    if (first) {
      const made = forks.made.map((one) => one.sandbox.name).join(", ") || "none";
      const message = `${forks.failed.length} of ${count} forks failed: ${first.reason}`;
      throw new ApiError(200, first.code, message, { hint: `made were: ${made}` });
    }
    return forks.made.map((one) => new Sandbox(this.client, one.sandbox.name, one.sandbox));
  }

  /** Its forks. */
  forks(): AsyncGenerator<types.Sandbox, void> {
    return this.#transport.pages("list_forks", { query: { of: this.name } });
  }

  /** What another sandbox, snapshot or label has that this one has not, and the other way round. */
  diff(to: string | Sandbox, options: { paths?: string[]; limit?: number } = {}): Promise<types.Diff> {
    return this.client.diff(this.name, typeof to === "string" ? to : to.name, options);
  }

  /** Gives the origin of this fork its state. */
  promote(options: types.Promote = {}): Promise<types.Promoted> {
    return this.#call("promote_sandbox", { json: options });
  }

  /** Chosen files that it made or changed since it was forked, as a tar: with links, owners and modes. */
  async *artifacts(only: string[]): AsyncGenerator<Uint8Array, void> {
    yield* download(await this.#transport.send("take_artifacts", { path: { name: this.name }, json: { only } }));
  }

  /** Brings its changes into its origin, or into another sandbox. */
  merge(options: types.Merge = {}): Promise<types.Merged> {
    return this.#call("merge_sandbox", { json: options });
  }

  // Network and approvals

  /** What it may reach. */
  network(): Promise<types.SandboxNetwork> {
    return this.#call("get_network");
  }

  /** Changes what it may reach, at once. null means the project's default. */
  setNetwork(network: types.Network | null): Promise<types.SandboxNetwork> {
    return this.#call("set_network", { json: { network } });
  }

  /** Connections it made or tried to make, newest first. */
  connections(
    options: { verdict?: types.Verdict; session?: string; host?: string; since?: string; open?: boolean; limit?: number } = {},
  ): AsyncGenerator<types.Connection, void> {
    return this.#pages("list_connections", options);
  }

  /** The same, summed by destination. */
  connectionsSummary(
    options: { verdict?: types.Verdict; session?: string; host?: string; since?: string; open?: boolean } = {},
  ): Promise<types.NetworkSummary> {
    return this.#call("summarize_connections", { query: options });
  }

  /** Asks somebody who may approve. `client.approvals.wait` waits for the answer. */
  ask(question: string, options: Omit<types.AskApproval, "question"> = {}): Promise<types.Approval> {
    return this.#call("ask_approval", { json: { question, ...options } });
  }

  #call<O extends Operation>(operation: O, call: Call = {}) {
    return this.#transport.call(operation, { ...call, path: { name: this.name } });
  }

  #pages<T>(operation: Operation, query: Query): AsyncGenerator<T, void> {
    return this.#transport.pages<T>(operation, { path: { name: this.name }, query });
  }
}

/** A command of a sandbox. */
export class RunningCommand {
  /** Its id. */
  readonly id: string;
  /** The command as the server described it last. */
  info: types.Command | undefined;
  readonly #transport: Transport;
  readonly #sandbox: string;

  constructor(transport: Transport, sandbox: string, command: types.Command | string) {
    this.#transport = transport;
    this.#sandbox = sandbox;
    this.id = typeof command === "string" ? command : command.id;
    this.info = typeof command === "string" ? undefined : command;
  }

  get #path() {
    return { name: this.#sandbox, id: this.id };
  }

  /** Asks the server for its record. */
  async refresh(): Promise<types.Command> {
    return (this.info = await this.#transport.call("get_command", { path: this.#path }));
  }

  /** Waits for its end, over restarts of the server. */
  async wait(options: { signal?: AbortSignal } = {}): Promise<types.Command> {
    for (;;) {
      try {
        const how = { path: this.#path, query: { wait: true }, timeout: 0, signal: options.signal };
        return (this.info = await this.#transport.call("get_command", how));
      } catch (error) {
        // Runtimes give up after minutes without an answer; the command goes on.
        const silent = error instanceof ConnectionFailed && /timeout/i.test(error.message);
        if (!silent || options.signal?.aborted) throw error;
      }
    }
  }

  /** What it printed, and with `follow` (which is so if absent) what it prints until it ends. */
  logs(options: { follow?: boolean; offset?: number; signal?: AbortSignal | undefined } = {}): OutputStream {
    return new OutputStream(this.#transport, this.#sandbox, { ...options, command: this.info ?? this.id });
  }

  /** Waits for its end, and returns all it printed. */
  result(): Promise<Result> {
    return this.logs().result();
  }

  /**
   * Sends input, as fast as it reads. It must have been started with `stdin`.
   *
   * Input is never sent twice: if the connection breaks, this fails, and how much has arrived is not known.
   */
  write(data: string | Uint8Array, options: { close?: boolean } = {}): Promise<void> {
    const body = typeof data === "string" ? data : (data as Uint8Array<ArrayBuffer>);
    return this.#transport.done("send_stdin", { path: this.#path, query: { close: options.close }, body });
  }

  /** Says that there is no more input. */
  closeStdin(): Promise<void> {
    return this.#transport.done("send_stdin", { path: this.#path, query: { close: true }, body: "", repeatable: true });
  }

  /** Sends a signal to its process group. */
  signal(signal: types.Signal): Promise<void> {
    return this.#transport.done("signal_command", { path: this.#path, json: { signal } });
  }

  /** Kills it. */
  kill(): Promise<void> {
    return this.signal("KILL");
  }

  /** Gives its terminal another size. */
  resize(cols: number, rows: number): Promise<void> {
    return this.#transport.done("resize_command", { path: this.#path, json: { cols, rows }, repeatable: true });
  }

  /** Which paths it changed. */
  changes(): Promise<types.CommandChangeList> {
    return this.#transport.call("get_command_changes", { path: this.#path });
  }
}

/** As whom, and whether a sleeping sandbox may be woken for it. */
export interface FileOptions {
  user?: string;
  ifRunning?: boolean;
}

function fileQuery(path: string, { user, ifRunning }: FileOptions, more: Query = {}): Query {
  return { path, user, if_running: ifRunning || undefined, ...more };
}

/** Files of a sandbox. Relative paths begin at its working directory. */
export class Files {
  readonly #transport: Transport;
  readonly #path: { name: string };

  constructor(transport: Transport, sandbox: string) {
    this.#transport = transport;
    this.#path = { name: sandbox };
  }

  /** The bytes of a file. */
  read(path: string, options: FileOptions & { offset?: number; limit?: number } = {}): Promise<Uint8Array> {
    const { offset, limit } = options;
    return this.#transport.read("read_file", { path: this.#path, query: fileQuery(path, options, { offset, limit }) });
  }

  /** The text of a file. */
  async readText(path: string, options: FileOptions = {}): Promise<string> {
    return new TextDecoder().decode(await this.read(path, options));
  }

  /** The bytes of a file as they come. */
  async *readStream(path: string, options: FileOptions = {}): AsyncGenerator<Uint8Array, void> {
    yield* download(await this.#transport.send("read_file", { path: this.#path, query: fileQuery(path, options) }));
  }

  /** Writes a file: text, bytes, or a function that begins to read them. It is in place when it is complete. */
  write(
    path: string,
    data: Body,
    options: FileOptions & { mode?: string; parents?: boolean; append?: boolean } = {},
  ): Promise<types.Moved> {
    const { mode, parents, append } = options;
    const query = fileQuery(path, options, { mode, parents, append });
    return this.#transport.call("write_file", { path: this.#path, query, body: data, repeatable: !append });
  }

  /** What a directory has. */
  async list(path = ".", options: FileOptions = {}): Promise<types.Entry[]> {
    const found: types.Entry[] = [];
    let cursor: string | null | undefined;
    do {
      const query = fileQuery(path, options, { cursor });
      const page = await this.#transport.call("list_files", { path: this.#path, query });
      found.push(...page.items);
      cursor = page.next;
    } while (cursor);
    return found;
  }

  /** Describes a path, without following a final symlink. */
  stat(path: string, options: FileOptions = {}): Promise<types.Entry> {
    return this.#transport.call("stat_file", { path: this.#path, query: fileQuery(path, options) });
  }

  /** Whether there is something at a path. */
  async exists(path: string, options: FileOptions = {}): Promise<boolean> {
    try {
      await this.stat(path, options);
      return true;
    } catch (error) {
      if (error instanceof ApiError && error.code === "path_not_found") return false;
      throw error;
    }
  }

  /** Makes a directory, and with `parents` (which is so if absent) those above it. */
  makeDirectory(path: string, options: { mode?: number; parents?: boolean; user?: string } = {}): Promise<void> {
    const parents = options.parents ?? true;
    const json = { path, ...options, parents };
    return this.#transport.done("make_directory", { path: this.#path, json, repeatable: parents });
  }

  /** Renames or moves a file or directory. */
  move(from: string, to: string, options: { user?: string } = {}): Promise<void> {
    return this.#transport.done("move_file", { path: this.#path, json: { from, to, ...options } });
  }

  /** Removes a file or directory. */
  remove(
    path: string,
    options: { recursive?: boolean; missing_ok?: boolean; user?: string } = {},
  ): Promise<void> {
    return this.#transport.done("remove_file", { path: this.#path, query: { path, ...options } });
  }

  /** Copies what a directory of this machine has into one of the sandbox, which is made if absent. Not in browsers. */
  async uploadDirectory(from: string, to: string, options: FileOptions = {}): Promise<types.Moved> {
    const { pack } = await import("./tar.js");
    return this.writeTar(to, () => streamOf(pack(from)), options);
  }

  /** Copies what a directory of the sandbox has into one of this machine, and writes nothing outside of it. Not in browsers. */
  async downloadDirectory(path: string, to: string, options: FileOptions = {}): Promise<void> {
    const { unpack } = await import("./tar.js");
    await unpack(this.readTar(path, options), to);
  }

  /** A tar of a file or directory. */
  async *readTar(path: string, options: FileOptions = {}): AsyncGenerator<Uint8Array, void> {
    yield* download(await this.#transport.send("read_tar", { path: this.#path, query: fileQuery(path, options) }));
  }

  /** Unpacks a tar below a directory. */
  writeTar(path: string, archive: Body, options: FileOptions = {}): Promise<types.Moved> {
    const headers = { "Content-Type": "application/x-tar" };
    return this.#transport.call("write_tar", {
      path: this.#path, query: fileQuery(path, options), body: archive, headers,
    });
  }
}

/** The bytes of a download. One that breaks off throws. */
export async function* download(answer: Answer): AsyncGenerator<Uint8Array, void> {
  try {
    yield* chunks(answer);
  } finally {
    answer.abort();
  }
}

function streamOf(pieces: AsyncGenerator<Uint8Array, void>): ReadableStream<Uint8Array> {
  return new ReadableStream<Uint8Array>({
    async pull(controller) {
      const found = await pieces.next();
      if (found.done) controller.close();
      else controller.enqueue(found.value);
    },
    async cancel() {
      await pieces.return();
    },
  });
}

/** Ports of a sandbox. */
export class Ports {
  readonly #transport: Transport;
  readonly #sandbox: string;

  constructor(transport: Transport, sandbox: string) {
    this.#transport = transport;
    this.#sandbox = sandbox;
  }

  /** Its published ports. */
  list(): Promise<types.PortStatus[]> {
    return this.#transport.all("list_ports", { path: { name: this.#sandbox } });
  }

  /** Publishes a port. The answer has its address. */
  publish(port: number, options: { access?: types.Access; wake?: boolean } = {}): Promise<types.PortStatus> {
    const json = { access: options.access ?? "private", wake: options.wake ?? true };
    return this.#transport.call("publish_port", { path: { name: this.#sandbox, port }, json });
  }

  /** Publishes a port no more. */
  unpublish(port: number): Promise<types.PortStatus> {
    return this.publish(port, { access: "off" });
  }

  /** A token for a private port, and an address that has it. */
  token(port: number, options: types.IssuePortToken = {}): Promise<types.PortToken> {
    const path = { name: this.#sandbox, port };
    return this.#transport.call("issue_port_token", { path, json: options, repeatable: true });
  }

  /** Connects to any port inside, published or not: a stream of Node. Not in browsers. */
  connect(port: number, options: { ifRunning?: boolean } = {}): Promise<import("node:stream").Duplex> {
    return connectRaw(this.#transport, this.#sandbox, port, { if_running: options.ifRunning || undefined });
  }

  /** The same over a WebSocket: binary messages carry bytes. */
  connectWebSocket(port: number, options: { ifRunning?: boolean } = {}): Promise<Socket> {
    const path = { name: this.#sandbox, port };
    return Socket.open(this.#transport, "connect_port", path, { if_running: options.ifRunning || undefined });
  }
}

/** Services of a sandbox: programs that are started with each of its sessions. */
export class Services {
  readonly #transport: Transport;
  readonly #sandbox: string;

  constructor(transport: Transport, sandbox: string) {
    this.#transport = transport;
    this.#sandbox = sandbox;
  }

  /** Its services. */
  list(): Promise<types.ServiceStatus[]> {
    return this.#transport.all("list_services", { path: { name: this.#sandbox } });
  }

  /** Adds or changes a service. */
  set(service: string, settings: types.SetService): Promise<types.ServiceStatus> {
    return this.#transport.call("set_service", { path: { name: this.#sandbox, service }, json: settings });
  }

  /** Removes a service. */
  remove(service: string): Promise<void> {
    return this.#transport.done("remove_service", { path: { name: this.#sandbox, service } });
  }

  /** Starts a service, and wakes the sandbox for it. */
  start(service: string): Promise<types.ServiceStatus> {
    return this.#transport.call("start_service", { path: { name: this.#sandbox, service }, repeatable: true });
  }

  /** Stops a service. */
  stop(service: string): Promise<types.ServiceStatus> {
    return this.#transport.call("stop_service", { path: { name: this.#sandbox, service }, repeatable: true });
  }
}

export { CommandFailed };
