"""Runs the commands of the documents, and compares what they print with what the documents show.

    pages.py check                    every page follows the rules below, and nothing is listed in vain
    pages.py run SCRATCH PAGE ...     runs pages against the server that `keep` on the PATH finds; a group of pages is
                                      `guides`, `operations` or `reference`

`crates/cli/tests/e2e/docs.rs` starts the server, and what `outside.py` has.

The rules for a page:

- Blocks of `sh` are run in order, by one bash with `set -eo pipefail`, in an empty directory with links to `docs`,
  `examples` and `sdk`.
- A block of `text` directly below a block of `sh` is what that block prints. Ids, times, sizes, durations and
  addresses may differ. `…` stands for any text in a line, and a line of `…` for any lines.
- A block of `sh no-test` is not run. `NOT_RUN` in `rules.py` has the reason for each.
- What a reader replaces by hand, and what has to be prepared or is different in a test, is in `CHANGES` and `PREPARED`
  there, with the reasons. Blocks in `MACHINES` are run where the server can start microVMs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rules import CHANGES, GENERATED, MACHINES, NOT_RUN, PREPARED

ROOT = Path(__file__).resolve().parents[2]
# Far longer than any page takes.
PATIENCE = 300

# `endless` is for commands that go on until they are interrupted.
HELPERS = """
set -eo pipefail
endless() {
    local code=0; timeout --signal=INT --kill-after=5 2 "$@" || code=$?
    [ $code -eq 124 ] || { echo "this should not have ended ($code): $*"; return 1; }
}
"""

# What differs from run to run, and what stands for it when lines are compared.
MASKS = [
    (r"\x1b\[[0-9;?]*[a-zA-Z]|\r", ""),
    (r"\b(snp|sbx|run|ses|cmd|key|apr|req|whk)-([0-9a-z]{26}\b|…)", r"\1-ID"),
    (r"\b\d+ entries, \d+ to \d+, last \d+:\w+", "ENTRIES"),
    (r"\b[0-9a-f]{40,64}\b", "HASH"),
    (r"\b\d{16}\b", "NUMBER"),
    (r"\bskp_[\w-]{43}|\bskp[0-9A-Za-z]{29}\b", "SECRET"),
    (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?Z?", "TIME"),
    (r"\b\d+[smhd] ago\b|\b\d+(\.\d+)? ?(ms|µs|s)\b", "SPAN"),
    (r"\bin \d+[smhd]\b", "in SPAN"),
    (r"\b\d+(\.\d+)? (B|KiB|MiB|GiB)(?!\w)", "SIZE"),
    (r"\b\d{1,3}(\.\d{1,3}){3}(:\d+)?\b", "ADDRESS"),
]


@dataclass
class Block:
    page: str
    line: int
    text: str
    run: bool
    shown: str | None = None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples/README.md"]
    return [str(path.relative_to(ROOT)) for path in found if str(path.relative_to(ROOT)) not in GENERATED]


def group(name: str) -> list[str]:
    operations = ["docs/OPERATIONS.md"]
    guides = [page for page in pages() if page.startswith("docs/guides/") or page == "docs/TUTORIAL.md"]
    reference = [page for page in pages() if page not in operations + guides]
    return {"operations": operations, "guides": guides, "reference": reference}.get(name, [name])


def blocks(page: str) -> list[Block]:
    lines = (ROOT / page).read_text().splitlines()
    found: list[Block] = []
    directly = False
    at = 0
    while at < len(lines):
        fence = re.match(r"( *)```(.*)", lines[at])
        if fence is None:
            directly = directly and not lines[at].strip()
            at += 1
            continue
        begin, language = at + 1, fence[2].strip()
        at = begin
        while lines[at].strip() != "```":
            at += 1
        text = "\n".join(line.removeprefix(fence[1]) for line in lines[begin:at]) + "\n"
        if language.split(" ")[0] in ("sh", "bash", "shell", "console"):
            found.append(Block(page, begin, text, run=language == "sh"))
            if language not in ("sh", "sh no-test"):
                raise SystemExit(f"{page}:{begin}: a block of commands is `sh` or `sh no-test`, not `{language}`")
        elif language == "text" and directly:
            found[-1].shown = text
        directly = language == "sh"
        at += 1
    return found


def check() -> list[str]:
    problems = []
    everything = {page: blocks(page) for page in pages()}
    for page, found in everything.items():
        reasons = NOT_RUN.get(page, {})
        for block in found:
            first = block.text.splitlines()[0]
            if not block.run and first not in reasons:
                problems.append(f"{block.where}: not tested, and NOT_RUN has no reason: {first}")
            if block.run and first in reasons:
                problems.append(f"{block.where}: listed in NOT_RUN, but the block is not marked `sh no-test`")
    for shown, printed, same in EXAMPLES:
        if agree(lines_of(shown), lines_of(printed)) != same:
            problems.append(f"the comparison is wrong about {shown!r} and {printed!r}")
    for page, reasons in NOT_RUN.items():
        firsts = {block.text.splitlines()[0] for block in everything.get(page, []) if not block.run}
        problems += [f"NOT_RUN: {page} has no such block: {first}" for first in reasons if first not in firsts]
    for change in CHANGES:
        if not any(change.text in block.text for block in everything.get(change.page, []) if block.run):
            problems.append(f"CHANGES: {change.page} has no such text: {change.text}")
    for page, text in MACHINES:
        if not any(text in block.text for block in everything.get(page, []) if block.run):
            problems.append(f"MACHINES: {page} has no such block: {text}")
    for page in PREPARED:
        if not any(block.run for block in everything.get(page, [])):
            problems.append(f"PREPARED: {page} has nothing to run")
    return problems


def in_a_test(block: Block) -> str:
    text = block.text
    for change in CHANGES:
        if change.page == block.page:
            text = text.replace(change.text, change.instead)
    return text


def masked(line: str) -> str:
    for pattern, mask in MASKS:
        line = re.sub(pattern, mask, line)
    return re.sub(r"\s+", " ", line).strip()


def lines_of(text: str) -> list[str]:
    return [line for line in (masked(line) for line in text.splitlines()) if line]


def agree(shown: list[str], printed: list[str]) -> bool:
    if not shown:
        return not printed
    if shown[0] == "…":
        return any(agree(shown[1:], printed[at:]) for at in range(len(printed) + 1))
    if not printed:
        return False
    pattern = ".*".join(re.escape(part) for part in shown[0].split("…"))
    return re.fullmatch(pattern, printed[0]) is not None and agree(shown[1:], printed[1:])


# What a page shows, what was printed, and whether that is the same.
EXAMPLES = [
    ("hello\n", "hello\n", True),
    ("hello\n", "hallo\n", False),
    ("42\n", "43\n", False),
    ("hello\n", "", False),
    ("hello\n", "hello\nand more\n", False),
    ("hello\n…\n", "hello\nand more\n", True),
    ("…\nhello\n", "and more\n", False),
    ("a … c\n", "a b c\n", True),
    ("a … c\n", "a b d\n", False),
    ("snp-01m7v5tvn5r4nbtv6692z1ke9y  16.0 KiB\n", "snp-01m7v5tw2at45ngv34d4rfzhab    1.1 MiB\n", True),
    ("snp-…  stopped, generation 1\n", "snp-01m7v5tw2at45ngv34d4rfzhab  stopped, generation 2\n", False),
    ("sbx-…\n", "snp-01m7v5tw2at45ngv34d4rfzhab\n", False),
    ("0s ago  in 30d\n", "3m ago  in 29d\n", True),
]


def script_of(page: str, found: list[Block], out: Path) -> str:
    parts = [HELPERS, "{\n" + PREPARED.get(page, ":") + f"\n}} >{out}/prepared 2>&1 </dev/null\n"]
    for number, block in enumerate(found):
        parts.append(f"echo {number} >{out}/at\n{{\n{in_a_test(block)}}} >{out}/{number} 2>&1 </dev/null\n")
    return "".join(parts)


def possible(block: Block) -> bool:
    if "TEST_MACHINES" in os.environ or not any(block.page == page and text in block.text for page, text in MACHINES):
        return True
    print(f"SKIPPED {block.where}: this host has nothing to start microVMs with")
    return False


def run(page: str, scratch: Path) -> list[str]:
    found = [block for block in blocks(page) if block.run and possible(block)]
    if not found:
        return []
    here = scratch / page.replace("/", "-").removesuffix(".md")
    out = here / ".out"
    out.mkdir(parents=True)
    for name in ("docs", "examples", "sdk"):
        (here / name).symlink_to(ROOT / name)
    (out / "script").write_text(script_of(page, found, out))
    # It ends the script and all that the script started.
    command = ["timeout", "--kill-after=5", str(PATIENCE), "bash", str(out / "script")]
    code = subprocess.run(command, cwd=here, stdin=subprocess.DEVNULL).returncode
    problems = []
    if code != 0:
        at = (out / "at").read_text().strip() if (out / "at").exists() else "prepared"
        where = found[int(at)].where if at.isdigit() else f"{page}, what is prepared"
        why = "takes too long" if code in (124, 137) else f"ends with {code}"
        problems.append(f"{where}: {why}\n{(out / at).read_text()}")
    for number, block in enumerate(found):
        if block.shown is None or not (out / str(number)).exists():
            continue
        printed = (out / str(number)).read_text()
        if not agree(lines_of(block.shown), lines_of(printed)):
            problems.append(
                f"{block.where}: prints something else than the page shows\n"
                f"--- the page\n{block.shown}--- printed\n{printed}---"
            )
    tidy()
    return problems


def keep(*args: str) -> list[str]:
    done = subprocess.run(["keep", *args], capture_output=True, text=True)
    return done.stdout.splitlines()


def tidy() -> None:
    """Every page begins with a server without sandboxes, drives, secrets and webhooks, and with the usual network."""
    for line in keep("project", "ls")[1:]:
        project = line.split()[0]
        here = ("--project", project)
        for names, remove in ((keep(*here, "ls", "-q"), ("rm",)), *((first(*here, what, "ls"), (what, "rm")) for what in
                              ("drive", "secret", "webhook"))):
            if names:
                keep(*here, *remove, *names)
        keep(*here, "trash", "empty")
        if project != "default":
            keep("project", "rm", project)
    keep("project", "network", "default", "--default", "allow-all", "--no-bound", "--no-max-connections")


def first(*args: str) -> list[str]:
    return [line.split()[0] for line in keep(*args)[1:] if line.split()]


def main() -> int:
    what, rest = sys.argv[1], sys.argv[2:]
    problems = check()
    if what == "run" and not problems:
        scratch = Path(rest[0])
        for page in (page for name in rest[1:] for page in group(name)):
            shutil.rmtree(scratch / page.replace("/", "-").removesuffix(".md"), ignore_errors=True)
            failures = run(page, scratch)
            problems += failures
            print(f"{page}: {'failed' if failures else 'ok'}", flush=True)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    os.environ["NO_COLOR"] = "1"
    # Readers have told git who they are; a machine of tests has not.
    os.environ["GIT_CONFIG_COUNT"] = "2"
    for at, (key, value) in enumerate([("user.name", "A Reader"), ("user.email", "reader@example.org")]):
        os.environ[f"GIT_CONFIG_KEY_{at}"] = key
        os.environ[f"GIT_CONFIG_VALUE_{at}"] = value
    sys.exit(main())
