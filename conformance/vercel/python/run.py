"""Runs the suite of one surface and writes what came of it.

    CONFORMANCE_SURFACE=sync run.py test_files test_processes ...
"""

import json
import os
import sys
import unittest
from importlib.metadata import version

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))


class Result(unittest.TextTestResult):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.passed = 0

    def addSuccess(self, test):
        super().addSuccess(test)
        self.passed += 1


def main() -> int:
    suite = unittest.defaultTestLoader.loadTestsFromNames(sys.argv[1:])
    runner = unittest.TextTestRunner(stream=sys.stdout, verbosity=2, resultclass=Result)
    result = runner.run(suite)
    where = os.environ.get("CONFORMANCE_RESULTS")
    if where:
        with open(where, "a", encoding="utf-8") as file:
            skipped = [f"{test.id()}: {why}" for test, why in result.skipped]
            told = {
                "package": "vercel-sandbox",
                "version": version("vercel-sandbox"),
                "passed": result.passed,
                "failed": len(result.failures) + len(result.errors),
                "skipped": skipped,
            }
            file.write(json.dumps(told) + "\n")
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(main())
