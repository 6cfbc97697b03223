/** What every error of this package has in common. */

import type { Finding, MergeConflict } from "./types.js";

/** Any failure of this package. */
export class SandkeepError extends Error {
  constructor(message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** What an answer says about a failure. */
export interface ApiErrorDetails {
  hint?: string | null | undefined;
  findings?: Finding[] | undefined;
  conflicts?: MergeConflict[] | undefined;
  retryAfter?: number | undefined;
  requestId?: string | null | undefined;
}

/** The server refused the call or failed. There is a class for each `code`, below one for each kind of status. */
export class ApiError extends SandkeepError {
  /** What to do about it, if the server knows. */
  readonly hint: string | undefined;
  /** What the guard found, if that is why. */
  readonly findings: Finding[];
  /** Paths that cannot be merged, if that is why. */
  readonly conflicts: MergeConflict[];
  /** How many seconds to wait before a retry, if the server said so. */
  readonly retryAfter: number | undefined;
  /** The id of the request, as in the server's log. */
  readonly requestId: string | undefined;

  constructor(
    /** The HTTP status; 200 if it happened in the middle of a stream. */
    readonly status: number,
    /** The stable code, for programs. docs/API.md lists them. */
    readonly code: string,
    message: string,
    details: ApiErrorDetails = {},
  ) {
    super(details.hint ? `${message} (${details.hint})` : message);
    this.hint = details.hint ?? undefined;
    this.findings = details.findings ?? [];
    this.conflicts = details.conflicts ?? [];
    this.retryAfter = details.retryAfter;
    this.requestId = details.requestId ?? undefined;
  }
}
