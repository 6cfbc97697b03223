"""A small CI: the sources are brought in once, then every step runs in a fork of that state, side by side."""

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sandkeep import Result, Sandbox

STEPS = {
    "lint": "! grep -rn TODO src",
    "test": "sh src/test.sh",
    "build": "mkdir -p out && tar -cf out/app.tar src && sha256sum out/app.tar",
}


def step(base: Sandbox, name: str, command: str) -> tuple[str, Result]:
    fork = base.fork(f"{base.name}-{name}", tags={"step": name})
    try:
        # A line at a time, as it is printed.
        result = fork.run(
            command,
            cwd="/work",
            timeout="10m",
            on_stdout=lambda text: print(f"[{name}] {text}", end=""),
            on_stderr=lambda text: print(f"[{name}] {text}", end=""),
        )
        if result.ok and fork.files.exists("/work/out"):
            fork.files.download_directory("/work/out", Path(tempfile.gettempdir()) / "sandkeep-ci-out")
        return name, result
    finally:
        fork.delete()


def run(sources: Path, commit: str) -> bool:
    base = Sandbox.get_or_create(f"ci-{commit}", expires="1d", tags={"commit": commit})
    base.files.upload_directory(sources, "/work/src")
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda item: step(base, *item), STEPS.items()))
    for name, result in results:
        print(f"{name}: {'ok' if result.ok else f'failed ({result.end}, {result.exit_code})'}")
    base.delete()
    return all(result.ok for _, result in results)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as sources:
        (Path(sources) / "test.sh").write_text("echo 3 tests passed\n")
        sys.exit(0 if run(Path(sources), "4f2a") else 1)
