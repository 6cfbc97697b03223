"""Lays out the npm package of the SDK and the program: `npm install` gives the module `sandkeep` and the command `keep`, and
`npx sandkeep` runs it."""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

HERE = pathlib.Path(__file__).parent
ABOUT = {
    "name": "sandkeep",
    "description": "Persistent sandboxes for AI agents: the program `keep`",
    "license": "Apache-2.0",
    "type": "module",
    "engines": {"node": ">=18"},
}


def build(sdk, copy):
    """Builds what the SDK's package has in a copy of its directory."""
    shutil.copytree(sdk, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("dist"))
    if not (copy / "node_modules").exists():
        quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
        install = "ci" if (copy / "package-lock.json").exists() else "install"
        subprocess.run(["npm", install, *quiet], cwd=copy, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["npm", "run", "build", "--silent"], cwd=copy, check=True)


def collect(sdk, about, out):
    """Copies the files that the SDK's package has."""
    for name in about.get("files", []):
        for path in sorted(sdk.glob(name)):
            to = out / path.relative_to(sdk)
            to.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if path.is_dir() else shutil.copyfile
            copy(path, to)
    if (sdk / "README.md").exists():
        shutil.copyfile(sdk / "README.md", out / "README.md")


def main():
    parser = argparse.ArgumentParser()
    for option in ("program", "sdk", "version", "out", "licenses"):
        parser.add_argument(f"--{option}", required=True)
    args = parser.parse_args()
    sdk, out = pathlib.Path(args.sdk), pathlib.Path(args.out)
    (out / "bin").mkdir(parents=True)
    about = dict(ABOUT)
    if (sdk / "package.json").exists():
        about = json.loads((sdk / "package.json").read_text())
        if about["name"] != "sandkeep":
            raise SystemExit(f"{sdk}/package.json: the package is `{about['name']}`, not `sandkeep`")
        with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
            if "build" in about.get("scripts", {}):
                build(sdk, pathlib.Path(scratch))
                sdk = pathlib.Path(scratch)
            collect(sdk, about, out)
        # For those who work on it.
        for name in ("scripts", "devDependencies", "private"):
            about.pop(name, None)
    else:
        (out / "README.md").write_text("# Sandkeep\n\nThe program `keep`: `npx sandkeep --help`.\n")
    about["version"] = args.version
    about["bin"] = {"keep": "bin/keep.mjs", "sandkeep": "bin/keep.mjs"}
    if "files" in about:
        about["files"] = sorted({*about["files"], "bin", "third-party-licenses"})
    (out / "package.json").write_text(json.dumps(about, indent=2) + "\n")
    shutil.copyfile(HERE / "npm" / "keep.mjs", out / "bin" / "keep.mjs")
    shutil.copyfile(args.program, out / "bin" / "keep-linux-x64")
    shutil.copyfile(args.licenses, out / "third-party-licenses")
    shutil.copyfile(HERE.parent / "LICENSE", out / "LICENSE")
    for path in [out, *out.rglob("*")]:
        program = path.name in ("keep.mjs", "keep-linux-x64")
        os.chmod(path, 0o755 if path.is_dir() or program else 0o644)


main()
