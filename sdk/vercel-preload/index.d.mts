/** Where a request to `address` goes instead, or `null` when it is left alone. */
export function redirect(address: string | URL): string | null;
