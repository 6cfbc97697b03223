"""Prints the licences of the libraries that are part of the program, each text once."""

import collections
import json
import pathlib
import subprocess
import sys

PREFIXES = ("LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE")


def packages():
    """The packages that the program is linked with, without those of this workspace."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked"]
    command += ["--filter-platform", "x86_64-unknown-linux-gnu"]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    by_id = {package["id"]: package for package in found["packages"]}
    nodes = {node["id"]: node for node in found["resolve"]["nodes"]}
    own = set(found["workspace_members"])
    names = {"sandkeep", "sandkeep-agent", "sandkeep-ram"}
    todo = [member for member in own if by_id[member]["name"] in names]
    seen = set(todo)
    while todo:
        for dependency in nodes[todo.pop()]["deps"]:
            # Of dependencies for tests and for building, nothing is in the program.
            linked = any(kind["kind"] is None for kind in dependency["dep_kinds"])
            if linked and dependency["pkg"] not in seen:
                seen.add(dependency["pkg"])
                todo.append(dependency["pkg"])
    return sorted((by_id[one] for one in seen - own), key=lambda one: (one["name"], one["version"]))


def main():
    texts = collections.OrderedDict()
    lines = ["Libraries that are part of the program, and their licences.", ""]
    for package in packages():
        title = f"{package['name']} {package['version']}"
        lines.append(f"{title}  {package['license'] or 'see its text below'}")
        directory = pathlib.Path(package["manifest_path"]).parent
        for path in sorted(directory.iterdir()):
            if path.is_file() and path.name.upper().startswith(PREFIXES):
                text = path.read_text(errors="replace").strip()
                texts.setdefault(text, []).append(title)
    for text, titles in texts.items():
        lines += ["", "-" * 100, ", ".join(titles), "-" * 100, "", text]
    sys.stdout.write("\n".join(lines) + "\n")


main()
