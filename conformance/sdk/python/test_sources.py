"""What can be said of the SDKs without a server: they are as generated, and know every operation and every error code.

Needs nothing but Python.
"""

import json
import re
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / "sdk/python/src/sandkeep"
TYPESCRIPT = ROOT / "sdk/typescript/src"
API = json.loads((ROOT / "openapi/v1.json").read_text())
OPERATIONS = {
    operation["operationId"]
    for item in API["paths"].values()
    for method, operation in item.items()
    if method != "parameters"
}


def text_of(folder, pattern, without=()):
    return "\n".join(path.read_text() for path in sorted(folder.glob(pattern)) if path.name not in without)


class Sources(unittest.TestCase):
    def test_generated_files_are_current(self):
        done = subprocess.run(
            [sys.executable, str(ROOT / "sdk/generate.py"), "--check"], capture_output=True, text=True
        )
        self.assertEqual(done.returncode, 0, f"{done.stderr}run sdk/generate.py")

    def test_python_calls_every_operation(self):
        source = text_of(PYTHON / "_async", "*.py")
        called = set(re.findall(r'"(\w+)"', source)) & OPERATIONS
        self.assertEqual(OPERATIONS - called, set())

    def test_typescript_calls_every_operation(self):
        source = text_of(TYPESCRIPT, "*.ts", without=("operations.ts", "types.ts", "codes.ts"))
        called = set(re.findall(r'"(\w+)"', source)) & OPERATIONS
        self.assertEqual(OPERATIONS - called, set())

    def test_python_reads_answers_as_the_types_they_are(self):
        table = re.findall(
            r'"(\w+)": Operation\("\w+", "[^"]+", \w+, "([^"]+)"\)', (PYTHON / "_operations.py").read_text()
        )
        answers = dict(table)
        self.assertEqual(set(answers), OPERATIONS)
        source = text_of(PYTHON / "_async", "*.py")
        calls = re.findall(r'(call|pages|_pages)\(\s*(?:self\.\w+(?:\.\w+)?,\s*|transport,\s*)?"(\w+)",\s*(list\[)?types\.(\w+)', source)
        self.assertGreater(len(calls), 80)
        for how, operation, many, kind in calls:
            expected = answers[operation]
            if how != "call":
                kind = f"Page[{kind}]"
            if many:
                kind = f"list[{kind}]"
            allowed = {"Forked": {"Opened", "Forks"}, "lines": {"Command"}}.get(expected, {expected})
            self.assertIn(kind, allowed, operation)

    def test_every_error_code_has_a_class(self):
        part = (ROOT / "docs/API.md").read_text().split("\n## Errors\n")[1]
        rows = re.findall(r"^\| \d{3}[^|]*\| ((?:`\w+`(?:, )?)+) \|", part, re.M)
        documented = {code for row in rows for code in re.findall(r"`(\w+)`", row)}
        self.assertGreater(len(documented), 90)
        sys.path.insert(0, str(PYTHON.parent))
        python = (PYTHON / "_codes.py").read_text().split("BY_CODE", 1)[1]
        typescript = (TYPESCRIPT / "codes.ts").read_text().split("BY_CODE", 1)[1]
        for name, text in (("python", python), ("typescript", typescript)):
            known = set(re.findall(r'^ +"?(\w+)"?: \w+Error,$', text, re.M)) - {"0"}
            known = {code for code in known if not code.isdigit()}
            self.assertEqual(known, documented, name)

    def test_versions_are_the_same(self):
        cargo = re.search(r'^version = "([^"]+)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]
        project = re.search(r'^version = "([^"]+)"', (ROOT / "sdk/python/pyproject.toml").read_text(), re.M)[1]
        module = re.search(r'__version__ = "([^"]+)"', (PYTHON / "__init__.py").read_text())[1]
        package = json.loads((ROOT / "sdk/typescript/package.json").read_text())["version"]
        self.assertEqual({project, module, package}, {cargo})


if __name__ == "__main__":
    unittest.main()
