/** Where a request to `address`, with that header, goes instead, or `null` when it is left alone. */
export function redirect(address: string | URL, authorization?: string | null): string | null;
