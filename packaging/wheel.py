"""Makes a Python wheel of the SDK and the program: `pip install` gives the package `sandkeep` and the command `keep`.

The program is installed as a script, as it is: starting it costs nothing more. The package finds it with
`sandkeep._program.find()`, and `python -m sandkeep` runs it.
"""

import argparse
import base64
import hashlib
import os
import pathlib
import stat
import time
import tomllib
import zipfile

HERE = pathlib.Path(__file__).parent
ABOUT = {
    "description": "Persistent sandboxes for AI agents: the program `keep`",
    "requires-python": ">=3.9",
}


def project(sdk):
    """What the SDK says about itself, if it is there."""
    path = sdk / "pyproject.toml"
    if not (sdk / "src" / "sandkeep").is_dir():
        return ABOUT
    about = tomllib.loads(path.read_text())["project"]
    if about["name"] != "sandkeep":
        raise SystemExit(f"{path}: the project is `{about['name']}`, not `sandkeep`")
    return about


def metadata(about, sdk, version):
    lines = ["Metadata-Version: 2.1", "Name: sandkeep", f"Version: {version}"]
    lines.append(f"Summary: {about['description']}")
    lines.append("License: Apache-2.0")
    lines.append(f"Requires-Python: {about.get('requires-python', ABOUT['requires-python'])}")
    lines += [f"Classifier: {one}" for one in about.get("classifiers", [])]
    lines += [f"Requires-Dist: {one}" for one in about.get("dependencies", [])]
    for extra, requirements in sorted(about.get("optional-dependencies", {}).items()):
        lines.append(f"Provides-Extra: {extra}")
        for one in requirements:
            what, _, when = one.partition(";")
            condition = f"({when.strip()}) and extra == '{extra}'" if when else f"extra == '{extra}'"
            lines.append(f"Requires-Dist: {what.strip()}; {condition}")
    readme = sdk / "README.md"
    if readme.exists():
        lines += ["Description-Content-Type: text/markdown", "", readme.read_text()]
    return "\n".join(lines) + "\n"


def sources(sdk):
    """The files of the package, by their path in the wheel."""
    found = {}
    for base in (HERE / "python" / "sandkeep", sdk / "src" / "sandkeep"):
        # What the SDK has of the same name is used.
        for path in sorted(base.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc":
                found[f"sandkeep/{path.relative_to(base)}"] = path.read_bytes()
    return found


def main():
    parser = argparse.ArgumentParser()
    for option in ("program", "sdk", "version", "glibc", "out", "licenses"):
        parser.add_argument(f"--{option}", required=True)
    parser.add_argument("--fast", action="store_true")
    args = parser.parse_args()
    sdk = pathlib.Path(args.sdk)
    # Another form of a version would be another file to pip.
    version = args.version.replace("-", "+", 1)
    tag = f"py3-none-manylinux_{args.glibc.replace('.', '_')}_x86_64"
    info = f"sandkeep-{version}.dist-info"
    script = f"sandkeep-{version}.data/scripts/keep"
    about = project(sdk)
    files = sources(sdk)
    files[script] = pathlib.Path(args.program).read_bytes()
    files[f"{info}/METADATA"] = metadata(about, sdk, version).encode()
    wheel = f"Wheel-Version: 1.0\nGenerator: sandkeep\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files[f"{info}/WHEEL"] = wheel.encode()
    files[f"{info}/licenses/LICENSE"] = (HERE.parent / "LICENSE").read_bytes()
    files[f"{info}/licenses/third-party"] = pathlib.Path(args.licenses).read_bytes()
    record = []
    for name, content in sorted(files.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(content)}")
    record.append(f"{info}/RECORD,,")
    files[f"{info}/RECORD"] = ("\n".join(record) + "\n").encode()
    # An archive of this kind cannot say a time before 1980.
    moment = time.gmtime(max(int(os.environ["SOURCE_DATE_EPOCH"]), 315532800))[:6]
    path = pathlib.Path(args.out) / f"sandkeep-{version}-{tag}.whl"
    level = 1 if args.fast else 9
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=level) as archive:
        for name, content in sorted(files.items()):
            entry = zipfile.ZipInfo(name, moment)
            entry.external_attr = (stat.S_IFREG | (0o755 if name == script else 0o644)) << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED, level)
    print(path)


main()
