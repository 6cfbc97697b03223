// Three attempts at one task, each in a fork of its own. The tests decide, and the best one is promoted.
//
// Where an attempt writes a file, an agent would ask a model for an edit and apply it.

import { Sandbox } from "sandkeep";

const tests = `
. ./add.sh
[ "$(add 1 2)" = 3 ] && [ "$(add -1 1)" = 0 ] && [ "$(add 20 22)" = 42 ] && echo ok
`;

const attempts = {
  echo: 'add() { echo "$1 + $2"; }\n',
  concat: 'add() { echo "$1$2"; }\n',
  arithmetic: "add() { echo $(($1 + $2)); }\n",
};

const box = await Sandbox.getOrCreate("agent-loop-ts");
await box.files.write("/work/tests.sh", tests, { parents: true });

const codes = Object.entries(attempts);
const forks = await box.forkMany(codes.length, "agent-loop-ts-try", { expires: "1d" });
const results = await Promise.all(
  forks.map(async (fork, at) => {
    const [name, code] = codes[at]!;
    await fork.files.write("/work/add.sh", code);
    const result = await fork.run("sh tests.sh", { cwd: "/work", timeout: "1m" });
    return { name, fork, passed: result.stdout === "ok\n" };
  }),
);

for (const { name, fork, passed } of results) {
  const { changes } = await box.diff(fork, { paths: ["/work"] });
  console.log(`${name}: ${passed ? "passed" : "failed"}; changed ${changes.map((one) => one.path).join(", ")}`);
}

const best = results.find((result) => result.passed);
if (!best) throw new Error("no attempt passed");
await best.fork.promote({ delete_group: true });
console.log("promoted:", (await box.run("cat /work/add.sh")).stdout.trim());
