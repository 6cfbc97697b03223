/** Errors: what the server answered, or why it could not be reached or understood. */

import { ApiError, SandkeepError } from "./api-error.js";
import { BY_CODE, BY_STATUS, FORMER } from "./codes.js";
import type { ErrorBody } from "./types.js";

/** No server answers, or the connection to it broke and did not come back in time. */
export class ConnectionFailed extends SandkeepError {}

/** The server did not answer within the timeout. What was begun goes on. */
export class RequestTimedOut extends SandkeepError {}

/** The answer is not one of a Sandkeep server, or of an incompatible one. */
export class ProtocolError extends SandkeepError {
  constructor(
    message: string,
    /** The HTTP status, if that is what is odd. */
    readonly status?: number,
    options?: ErrorOptions,
  ) {
    super(message, options);
  }
}

/** There is no server to talk to, or an address or a key is malformed. */
export class ConfigurationError extends SandkeepError {}

/** The error that the `error` of an answer describes. */
export function errorFromBody(status: number, body: ErrorBody, retryAfter?: number): ApiError {
  const code = FORMER[body.code] ?? body.code;
  const kind = BY_CODE[code] ?? BY_STATUS[status] ?? ApiError;
  const { hint, findings, conflicts, request_id: requestId } = body;
  return new kind(status, code, body.message, { hint, findings, conflicts, retryAfter, requestId });
}

/** The error of an answer. One in another format (a proxy's page) is quoted, and not believed. */
export function errorFromAnswer(status: number, text: string, retryAfter: string | null): SandkeepError {
  const seconds = retryAfter && /^\d+$/.test(retryAfter) ? Number(retryAfter) : undefined;
  try {
    const answer: unknown = JSON.parse(text);
    const body = (answer as { error?: ErrorBody } | null)?.error;
    if (typeof body?.code === "string") return errorFromBody(status, body, seconds);
  } catch {
    // Not JSON: it is quoted below.
  }
  return new ProtocolError(`the server answered ${status} and \`${text.trim().slice(0, 200)}\``, status);
}

/** Answers that say that nothing was done: any call may be repeated. */
const UNDONE = new Set([
  "rate_limited",
  "too_many_connections",
  "too_many_concurrent_requests",
  "too_many_exports",
  "busy",
  "recovering",
  "index_rebuilding",
  "record_changed",
  "run_busy",
]);

const PASSING = [502, 503, 504];

/** Whether the same call may succeed soon, and may be made again. */
export function mayRetry(error: SandkeepError, repeatable: boolean): boolean {
  if (error instanceof ApiError) {
    return UNDONE.has(error.code) || (repeatable && PASSING.includes(error.status));
  }
  return error instanceof ProtocolError && repeatable && PASSING.includes(error.status ?? 0);
}

/** Whether a stream that failed so may be gone on with on another connection. */
export function isBroken(error: unknown): boolean {
  if (error instanceof ApiError) {
    return PASSING.includes(error.status) || ["shutting_down", "recovering", "rate_limited"].includes(error.code);
  }
  return error instanceof ConnectionFailed;
}
