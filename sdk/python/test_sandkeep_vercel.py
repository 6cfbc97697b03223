"""python3 -m unittest, with vercel-sandbox installed."""

import os
import subprocess
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))


def python(script: str, url: str | None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": HERE}
    env.pop("SANDKEEP_URL", None)
    if url is not None:
        env["SANDKEEP_URL"] = url
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)


class Helper(unittest.TestCase):
    def test_both_surfaces_take_the_server_as_their_default(self):
        script = (
            "import sandkeep_vercel\n"
            "from vercel.sandbox import SandboxServiceOptions\n"
            "from vercel.sandbox.sync import SandboxServiceOptions as Sync\n"
            "print(SandboxServiceOptions().base_url, Sync().base_url)\n"
            "print(Sync(base_url='https://mine/api').base_url)\n"
        )
        done = python(script, "http://127.0.0.1:7777/")
        self.assertEqual(done.stderr, "")
        server = "http://127.0.0.1:7777/api"
        self.assertEqual(done.stdout, f"{server} {server}\nhttps://mine/api\n")

    def test_it_refuses_to_load_without_a_server(self):
        for url, words in (
            (None, "SANDKEEP_URL is not set"),
            ("", "SANDKEEP_URL is not set"),
            ("unix:///run/keep.sock", "no http address"),
            ("http://", "no http address"),
        ):
            with self.subTest(url=url):
                done = python("import sandkeep_vercel", url)
                self.assertEqual(done.returncode, 1)
                self.assertIn(words, done.stderr)
                self.assertIn("keep env vercel", done.stderr)


if __name__ == "__main__":
    unittest.main()
