"""python3 -m unittest, with vercel-sandbox installed."""

import base64
import os
import subprocess
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))


TOKEN = ".".join(("h", base64.urlsafe_b64encode(b'{"owner_id":"team_x","project_id":"prj_y"}').decode().rstrip("="), "s"))


def python(
    script: str, url: str | None, *args: str, path: str = HERE, **more: str
) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SANDKEEP_", "VERCEL_"))}
    env.update({"PYTHONPATH": path, **more})
    if url is not None:
        env["SANDKEEP_URL"] = url
    return subprocess.run([sys.executable, *args, "-c", script], env=env, capture_output=True, text=True)


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

    def test_a_program_that_knows_nothing_about_it_comes_here_with_the_token(self):
        script = (
            "import asyncio, os\n"
            "assert 'VERCEL_TOKEN' not in os.environ\n"
            "from vercel.sandbox import SandboxServiceOptions\n"
            "from vercel.sandbox.sync import SandboxServiceOptions as Sync\n"
            "print(SandboxServiceOptions().base_url, Sync().base_url)\n"
            "print(*(os.environ[f'VERCEL_{name}'] for name in ('OIDC_TOKEN', 'TEAM_ID', 'PROJECT_ID')))\n"
        )
        done = python(script, "http://127.0.0.1:7777", SANDKEEP_VERCEL_TOKEN=TOKEN)
        self.assertEqual(done.stderr, "")
        server = "http://127.0.0.1:7777/api"
        self.assertEqual(done.stdout, f"{server} {server}\n{TOKEN} team_x prj_y\n")

    def test_what_is_not_redirected_has_no_token(self):
        script = (
            "import os\n"
            "from vercel.sandbox import SandboxServiceOptions\n"
            "print(SandboxServiceOptions().base_url, [name for name in os.environ if name.startswith('VERCEL_')])\n"
        )
        for flag in ("-I", "-E"):
            with self.subTest(flag=flag):
                done = python(script, "http://127.0.0.1:7777", flag, SANDKEEP_VERCEL_TOKEN=TOKEN)
                self.assertEqual(done.stderr, "")
                self.assertEqual(done.stdout, "https://vercel.com/api []\n")

    def test_children_do_not_get_the_token(self):
        script = (
            "import os, subprocess, sys, vercel.sandbox\n"
            "list = [sys.executable, '-I', '-c', 'import os; print([n for n in os.environ if n.startswith(\"VERCEL_\")])']\n"
            "for env in (None, os.environ, os.environ.copy(), {**os.environ}, dict(os.environ.items())):\n"
            "    print(subprocess.run(list, env=env, capture_output=True, text=True).stdout, end='')\n"
            "os.posix_spawn(list[0], list, os.environ) and os.wait()\n"
            "assert 'VERCEL_TOKEN' in os.environ and os.getenv('VERCEL_TEAM_ID') == 'team_x'\n"
            "del os.environ['VERCEL_TEAM_ID']\n"
            "os.environ['VERCEL_PROJECT_ID'] = 'changed'\n"
            "print(os.getenv('VERCEL_TEAM_ID'), os.getenv('VERCEL_PROJECT_ID'))\n"
            "os.system('env | grep ^VERCEL_ | sort')\n"
        )
        done = python(script, "http://127.0.0.1:7777", "-u", SANDKEEP_VERCEL_TOKEN=TOKEN, VERCEL_KEPT="1")
        self.assertEqual(done.stderr, "")
        kept = "['VERCEL_KEPT']\n" * 6
        self.assertEqual(done.stdout, f"{kept}None changed\nVERCEL_KEPT=1\nVERCEL_PROJECT_ID=changed\n")

    def test_without_a_server_the_package_does_not_load(self):
        done = python("import vercel.sandbox", None, SANDKEEP_VERCEL_TOKEN=TOKEN)
        self.assertEqual(done.returncode, 1)
        self.assertIn("SANDKEEP_URL is not set", done.stderr)
        done = python("print('fine')", None, SANDKEEP_VERCEL_TOKEN=TOKEN)
        self.assertEqual(done.stdout, "fine\n", done.stderr)

    def test_another_sitecustomize_is_still_loaded_and_credentials_that_are_set_stay(self):
        with tempfile.TemporaryDirectory() as theirs:
            with open(os.path.join(theirs, "sitecustomize.py"), "w") as file:
                file.write("import builtins; builtins.theirs = True\n")
            script = (
                "import os, vercel.sandbox, sitecustomize\n"
                "print(theirs, os.environ['VERCEL_TOKEN'], os.environ['VERCEL_TEAM_ID'], sitecustomize.__file__)\n"
            )
            path = f"{HERE}:{theirs}"
            done = python(
                script, "http://127.0.0.1:7777", path=path, SANDKEEP_VERCEL_TOKEN=TOKEN, VERCEL_TOKEN="mine"
            )
            self.assertEqual(done.stderr, "")
            self.assertEqual(done.stdout, f"True mine team_x {theirs}/sitecustomize.py\n")

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
