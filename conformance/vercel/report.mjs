// A reporter for Node's test runner: one line of JSON about a whole run, for the table in
// docs/compat/vercel.md. CONFORMANCE_PACKAGE says what was tested, as `name version`.

export default async function* report(events) {
  const [name, version] = (process.env.CONFORMANCE_PACKAGE ?? "").split(" ");
  const told = { package: name, version, passed: 0, failed: 0, skipped: [] };
  for await (const { type, data } of events) {
    // Files are tests of their own in older versions of Node.
    if (data?.details?.type === "suite" || (data?.nesting === 0 && data?.name === data?.file)) continue;
    if (type === "test:fail") told.failed += 1;
    else if (type === "test:pass" && data.skip !== undefined) told.skipped.push(`${data.name}: ${data.skip}`);
    else if (type === "test:pass") told.passed += 1;
  }
  yield `${JSON.stringify(told)}\n`;
}
