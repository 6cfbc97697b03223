"""What is particular about the pages when a test runs them: see `pages.py`."""

from __future__ import annotations

from typing import NamedTuple

# Pages that other tests write.
GENERATED = ["docs/CLI.md"]


class Change(NamedTuple):
    page: str
    text: str
    instead: str
    why: str


# Why a block is not run.
INTERNET = "needs the internet, which tests have not"
PACKAGES = "installs a package in a Debian; `crates/cli/tests/e2e/packages.rs` does"
BUILD = "builds the server, or runs all tests: this is one of them"
LONG = "takes from minutes to hours"

# Blocks of `sh no-test`, by their first line, and why they are not run.
NOT_RUN: dict[str, dict[str, str]] = {
    "README.md": {
        "./dev serve": BUILD,
        "./dev test": BUILD,
        "apt-get install -y --no-install-recommends qemu-system-x86 erofs-utils": INTERNET,
        "mkfs.xfs DEVICE && mount -o pquota DEVICE DIR                                  # new xfs": "formats a disk",
    },
    "docs/BENCHMARKS.md": {
        "./dev bench                  # the results and the network below, about three minutes": LONG,
    },
    "docs/CRASH-MATRIX.md": {
        "./dev chaos --minutes 30              # one filesystem after the other; writes the table below": LONG,
    },
    "docs/MICROVM.md": {"apt-get install -y --no-install-recommends qemu-system-x86 erofs-utils": INTERNET},
    "docs/OPERATIONS.md": {
        "apt-get install ./sandkeep_0.1.0_amd64.deb": PACKAGES,
        "keep config check               # refuses unknown settings and bad values": PACKAGES,
        "tar xzf sandkeep-0.1.0-linux-x86_64.tar.gz": PACKAGES,
        "pip install ./sandkeep-0.1.0-py3-none-manylinux_2_34_x86_64.whl   # then: keep": PACKAGES,
        "apt-get install ./sandkeep_0.2.0_amd64.deb     # or ./install.sh of the new tarball": PACKAGES,
        "echo 'sandkeep sandkeep/delete-data boolean true' | debconf-set-selections": PACKAGES,
    },
    "docs/SDK.md": {
        "pip install ./sdk/python                              # Python 3.10 or later; needs httpx": INTERNET,
    },
    "docs/compat/vercel.md": {
        "./dev serve                                   # builds, and listens on http://127.0.0.1:7777": BUILD,
        'export PATH="$PWD/target/release:$PATH"': "needs the internet; `vercel_conformance.rs` runs these clients",
    },
    "docs/compat/vercel-machine.md": {
        "npm install --prefix /opt/node24 node@24 npm": INTERNET,
        "keep image pull node:24": INTERNET,
    },
    "docs/WEBHOOKS.md": {
        'curl "$answer_url" --json \'{"answer": "approve", "comment": "looked at by Ada"}\'    # or "deny"': "a link comes with a delivery; `server/tests/api/webhooks.rs` answers by one",
    },
    "docs/guides/coding-agents.md": {
        "keep exec agent-base -- npm install -g @anthropic-ai/claude-code": INTERNET,
    },
    "docs/guides/images.md": {"keep image pull debian:12": INTERNET},
    "examples/README.md": {
        "pip install ./sdk/python": "needs the internet; `crates/cli/tests/e2e/sdk.rs` runs all examples",
    },
}

FOLLOWS = "it goes on until it is interrupted"
BY_HAND = "a reader puts in their own"
ELSEWHERE = "a test writes to its scratch directory only"
ADDRESS = "the server of a test has another address"

# What is different in a test.
CHANGES: list[Change] = [
    Change("README.md", "--driver microvm", "--driver microvm --image small", "a smaller VM"),
    Change("docs/API.md", "KEY=skp_...", "KEY=$(keep key create other 2>/dev/null)", BY_HAND),
    Change("docs/API.md", "http://127.0.0.1:7777", "$TEST_URL", ADDRESS),
    Change("docs/API.md", "api -N ", "endless curl -sS -H \"Authorization: Bearer $KEY\" -N ", FOLLOWS),
    Change(
        "docs/AUDIT.md",
        "5120:9a41c2de",
        "$(keep audit verify | sed -n 's/.* last \\([0-9]*:[0-9a-f]\\{8\\}\\).*/\\1/p')",
        BY_HAND,
    ),
    Change("docs/MICROVM.md", "--driver microvm", "--driver microvm --image small", "a smaller VM"),
    Change("docs/MICROVM.md", "./server", "sleep 1000", BY_HAND),
    Change("docs/MICROVM.md", "--count 10", "--count 2", "a test has not the memory for ten"),
    Change(
        "docs/MICROVM.md",
        "keep rollback vm SNAPSHOT",
        "keep rollback vm $(keep snapshot ls vm | awk '/checkpoint/ {print $1; exit}')",
        BY_HAND,
    ),
    Change("docs/NETWORK.md", "keep net my-app --follow", "endless keep net my-app --follow", FOLLOWS),
    Change("docs/OPERATIONS.md", "keep top ", "endless script -qec 'keep top' /dev/null ", FOLLOWS),
    Change("docs/OPERATIONS.md", "keep stats --follow", "endless keep stats --follow", FOLLOWS),
    Change("docs/OPERATIONS.md", "http://127.0.0.1:7777", "$TEST_URL", ADDRESS),
    Change("docs/OPERATIONS.md", "SANDKEEP_KEY=…", "SANDKEEP_KEY=$(keep key create other 2>/dev/null)", BY_HAND),
    Change("docs/OPERATIONS.md", "/mnt/backups", "backups", ELSEWHERE),
    Change("docs/OPERATIONS.md", "--data /var/lib/sandkeep", "--data restored", ELSEWHERE),
    Change("docs/PORTS.md", "npm run dev", "python3 -m http.server 3000", "nothing is installed for a test"),
    Change("docs/PORTS.md", "keep forward", "endless keep forward", FOLLOWS),
    Change("docs/PORTS.md", "keep service logs", "endless keep service logs", FOLLOWS),
    Change("docs/RUNS.md", "accept run-…", "accept $(of_run)", BY_HAND),
    Change("docs/RUNS.md", "review run-…", "review $(of_run)", BY_HAND),
    Change("docs/RUNS.md", "reject run-…", "reject $(another_run)", BY_HAND),
    Change(
        "docs/RUNS.md",
        'if keep ask "deploy to prod?" --context "12 files changed"; then ./deploy.sh; fi',
        "keep exec held -- sh -c 'if keep ask --timeout 1 --default approve \"deploy?\"; then echo yes; fi' | grep yes",
        "it is a command for the inside; there is no one to answer",
    ),
    Change("docs/SECRETS.md", "./migrate", "true", BY_HAND),
    Change("docs/SECRETS.md", "keep secret set DB", "echo a-password | keep secret set DB", "it is typed"),
    Change(
        "docs/guides/attempts.md",
        "add.sh && sh test.sh'\nkeep runs start --sandbox my-app --fork --name try-2",
        "add.sh && sh test.sh' || true\nkeep runs start --sandbox my-app --fork --name try-2",
        "this attempt fails, as the page says",
    ),
    Change("docs/guides/attempts.md", "RUN-2", "$(run_in try-2)", BY_HAND),
    Change("docs/guides/attempts.md", "RUN-3", "$(run_in try-3)", BY_HAND),
    Change(
        "docs/guides/coding-agents.md",
        """claude -p "add.sh is wrong: fix it, test.sh must pass" \\
    --permission-mode acceptEdits --allowedTools Bash
""",
        """sh -c 'curl -sSf -H "x-api-key: $ANTHROPIC_API_KEY" -d fix https://api.anthropic.com/v1/messages &&
    sed -i s/-/+/ add.sh'
""",
        "the agent and its model need the internet: this makes a request with the key, and the edit",
    ),
]

# Blocks that need microVMs, by a text in them.
MACHINES = [
    ("README.md", "keep create vm --driver microvm"),
    ("docs/MICROVM.md", "keep create vm --driver microvm"),
]

PROGRAM = """
program() { keep exec -i "$1" -- sh -c "mkdir -p $(dirname $2); cat > $2; chmod +x $2"; }
"""

# What a page takes for granted.
PREPARED: dict[str, str] = {
    "docs/API.md": "keep create my-app --tag team=a",
    "docs/FORKS.md": PROGRAM
    + """
keep create my-app
printf '#!/bin/sh\\necho built > a.whl\\n' | program my-app /root/upgrade.sh
echo text | program my-app /work/repo/file
keep drive create wheels
""",
    "docs/MICROVM.md": "keep image import small $SMALL_ROOT",
    "docs/NETWORK.md": """
keep project create team-a
echo '{"mode": "custom", "domains": ["example.org"]}' > bound.json
""",
    "docs/OPERATIONS.md": "keep image import small $SMALL_ROOT; keep create my-app --image small; mkdir backups",
    "docs/RUNS.md": PROGRAM
    + """
of_run() { keep runs wait $(keep runs ls -q -n 1) >/dev/null; keep runs ls -q -n 1; }
another_run() { keep runs start --sandbox my-app --fork --wait -- true >/dev/null; keep runs ls -q -n 1; }
keep create my-app
printf '#!/bin/sh\\necho done > /srv/out\\n' | program my-app /root/agent.sh
echo a-deploy-key | keep secret set DEPLOY_KEY --host example.org
""",
    "docs/SECRETS.md": "echo a-secret-key > key.txt",
    "docs/guides/images.md": "cp $SMALL_ROOT root.tar",
    "docs/guides/dockerfiles.md": "keep image import tools $SMALL_ROOT",
    "docs/guides/coding-agents.md": "echo sk-ant-the-key > key.txt",
    "docs/guides/attempts.md": """
run_in() { keep runs ls -n 3 | awk -v name=$1 '$3 == name {print $1}'; }
keep image import small $SMALL_ROOT
""",
    "README.md": "keep image import small $SMALL_ROOT",
}
