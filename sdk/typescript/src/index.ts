/**
 * Sandkeep: named, durable, isolated machines for agents.
 *
 * ```ts
 * import { Sandbox } from "sandkeep";
 * const box = await Sandbox.getOrCreate("my-app");
 * console.log((await box.run("pytest")).stdout);
 * ```
 *
 * `Sandkeep` is a server, `Sandbox` one of its sandboxes. docs/SDK.md tells how to do what.
 */

export { ApiError, SandkeepError } from "./api-error.js";
export * from "./client.js";
export * from "./codes.js";
export { ConfigurationError, ConnectionFailed, ProtocolError, RequestTimedOut } from "./errors.js";
export * from "./sandbox.js";
export { Socket, Terminal } from "./sockets.js";
export { BuildStream, EventStream, OutputStream, ProgressStream, Result } from "./streams.js";
export type { Output } from "./streams.js";
export type { Body, ClientOptions } from "./transport.js";
export type * as types from "./types.js";
