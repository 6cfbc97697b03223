"""Three public generators take openapi/v1.json, and what they make compiles.

    openapi.py SCRATCH NODE_MODULES
"""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "openapi/v1.json"


def run(*command: object, cwd: Path) -> None:
    done = subprocess.run([str(one) for one in command], cwd=cwd, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    said = done.stdout + done.stderr
    # A generator that leaves something out says so and succeeds.
    for word in ("Unable to", "skipping", "is not supported", "may be missing"):
        if word.lower() in said.lower():
            raise SystemExit(f"{Path(str(command[0])).name} has left something out:\n{said[-4000:]}")


def timed(name: str, work, *rest) -> None:
    start = time.monotonic()
    work(*rest)
    print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)


def openapi_typescript(scratch: Path, modules: Path) -> None:
    out = scratch / "openapi-typescript"
    out.mkdir()
    run(modules / ".bin/openapi-typescript", FILE, "-o", out / "v1.ts", cwd=out)
    run(modules / ".bin/tsc", "--noEmit", "--strict", "--target", "ES2022", out / "v1.ts", cwd=out)


def hey_api(scratch: Path, modules: Path) -> None:
    out = scratch / "hey-api"
    run(modules / ".bin/openapi-ts", "-i", FILE, "-o", out, "--no-log-file", cwd=scratch)
    options = ["--noEmit", "--strict", "--target", "ES2022", "--module", "ESNext", "--moduleResolution", "bundler"]
    run(modules / ".bin/tsc", *options, "--lib", "ES2022,DOM,DOM.Iterable", "--skipLibCheck", out / "index.ts", cwd=out)


def datamodel(scratch: Path, _: Path) -> None:
    out = scratch / "models.py"
    tool = Path(sys.executable).parent / "datamodel-codegen"
    kind = "pydantic_v2.BaseModel"
    run(tool, "--input", FILE, "--input-file-type", "openapi", "--output", out, "--output-model-type", kind, "--formatters", "builtin", cwd=scratch)
    run(sys.executable, "-c", f"import runpy; runpy.run_path({str(out)!r})", cwd=scratch)


def main() -> None:
    scratch, modules = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    tools = [openapi_typescript, hey_api, datamodel]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(timed, tool.__name__, tool, scratch, modules) for tool in tools]:
            done.result()


if __name__ == "__main__":
    main()
