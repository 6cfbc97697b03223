"""Three attempts at one task, each in a fork of its own. The tests decide, and the best one is promoted.

Where `attempt` writes a file, an agent would ask a model for an edit and apply it.
"""

from concurrent.futures import ThreadPoolExecutor

from sandkeep import Sandbox

TESTS = """
. ./add.sh
[ "$(add 1 2)" = 3 ] && [ "$(add -1 1)" = 0 ] && [ "$(add 20 22)" = 42 ] && echo ok
"""

ATTEMPTS = {
    "echo": 'add() { echo "$1 + $2"; }\n',
    "concat": 'add() { echo "$1$2"; }\n',
    "arithmetic": 'add() { echo $(($1 + $2)); }\n',
}


def attempt(fork: Sandbox, code: str) -> tuple[Sandbox, bool]:
    fork.files.write("/work/add.sh", code)
    result = fork.run("sh tests.sh", cwd="/work", timeout="1m")
    return fork, result.stdout == "ok\n"


def main() -> None:
    box = Sandbox.get_or_create("agent-loop")
    box.files.write("/work/tests.sh", TESTS, parents=True)

    forks = box.fork_many(len(ATTEMPTS), "agent-loop-try", expires="1d")
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(attempt, forks, ATTEMPTS.values()))

    for name, (fork, passed) in zip(ATTEMPTS, results, strict=True):
        diff = box.diff(fork, paths=["/work"])
        changed = ", ".join(entry.path for entry in diff.changes)
        print(f"{name}: {'passed' if passed else 'failed'}; changed {changed}")

    best = next(fork for fork, passed in results if passed)
    best.promote(delete_group=True)
    print("promoted:", box.run("cat /work/add.sh").stdout.strip())


if __name__ == "__main__":
    main()
