import io
import subprocess
import time

from vercel.sandbox import SandboxApiError, SandboxStdinError
from surface import SURFACE, Case


class Processes(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        self = cls()
        cls.box = self.awaited(cls.client.create_sandbox(name=self.fresh(), env={"FROM": "sandbox"}))
        cls.addClassCleanup(self.removed, cls.box.name)

    def runTest(self):
        pass  # so that setUpClass can make one to borrow its helpers

    def test_output_and_exit_code(self):
        done = self.box.run_process("sh", ["-c", "echo out; echo err >&2; exit 3"], capture_output=True)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (3, "out\n", "err\n"))
        self.assertEqual(done.args, ("sh", "-c", "echo out; echo err >&2; exit 3"))
        self.assertEqual(done.cwd, self.box.cwd)
        self.assertEqual(done.session_id, self.box.current_session_id)

    def test_check_raises_as_subprocess_does(self):
        with self.assertRaises(subprocess.CalledProcessError) as caught:
            self.box.run_process("sh", ["-c", "echo why >&2; exit 9"], capture_output=True, check=True)
        self.assertEqual(caught.exception.returncode, 9)
        self.assertEqual(caught.exception.stderr, "why\n")

    def test_output_goes_to_streams_and_can_be_merged(self):
        out = io.StringIO()
        self.box.run_process("sh", ["-c", "echo one; sleep 0.2; echo two >&2"], stdout=out, stderr=subprocess.STDOUT)
        self.assertEqual(out.getvalue(), "one\ntwo\n")

    def test_environment_directory_and_sudo(self):
        self.assertEqual(self.sh(self.box, "echo $FROM $OWN", env={"OWN": "a b"}), "sandbox a b")
        self.assertEqual(self.sh(self.box, "pwd", cwd="/tmp"), "/tmp")
        self.assertEqual(self.sh(self.box, "id -u", sudo=True), "0")
        self.assertNotEqual(self.sh(self.box, "id -u"), "0")

    def test_letters_of_many_bytes(self):
        text = "äöü€🦀日本" * 3000
        done = self.box.run_process("cat", input=text, capture_output=True)
        self.assertEqual(done.stdout, text)

    def test_big_output(self):
        done = self.box.run_process("seq", ["400000"], capture_output=True)
        self.assertEqual(done.stdout.count("\n"), 400000)
        self.assertTrue(done.stdout.endswith("400000\n"))

    def test_a_process_that_takes_too_long_is_killed(self):
        done = self.box.run_process("sh", ["-c", "echo said; sleep 60"], kill_after=0.5, capture_output=True)
        self.assertEqual((done.returncode, done.stdout), (137, "said\n"))

    def test_a_program_nobody_has_is_refused_by_its_code(self):
        for call in (self.box.run_process, self.box.create_process):
            error = self.refused(400, "executable_not_found", call, "no-such-program")
            self.assertIn("no-such-program", str(error))

    def test_on_start_is_called_with_the_running_process(self):
        seen = []
        done = self.box.run_process("echo", ["x"], capture_output=True, on_start=lambda process: seen.append(process.id))
        self.assertEqual(seen, [done.id])

    def test_a_process_runs_by_itself(self):
        process = self.box.create_process("sh", ["-c", "echo one; sleep 1; echo two; echo bad >&2; exit 4"])
        self.assertIsNone(process.returncode)
        self.assertEqual(process.stdout.readline(), "one\n")
        self.assertEqual(process.wait(), 4)
        self.assertEqual(process.stdout.read(), "two\n")
        self.assertEqual(process.stderr.read(), "bad\n")
        self.assertEqual(process.refresh().returncode, 4)

    def test_streams_can_be_merged_or_dropped(self):
        script = ["-c", "echo one; sleep 0.2; echo two >&2"]
        merged = self.box.create_process("sh", script, stderr=subprocess.STDOUT)
        self.assertEqual(merged.communicate(), ("one\ntwo\n", None))
        dropped = self.box.create_process("sh", script, stdout=subprocess.DEVNULL)
        self.assertEqual(dropped.communicate(), (None, "two\n"))

    def test_signals(self):
        for name, code in (("terminate", 143), ("kill", 137)):
            process = self.box.create_process("sleep", ["60"])
            getattr(process, name)()
            self.assertEqual(process.wait(), code)
        process = self.box.create_process("sleep", ["60"])
        process.send_signal("INT")
        self.assertEqual(process.wait(), 130)

    def test_processes_are_found_again(self):
        process = self.box.create_process("sh", ["-c", "echo found; exit 2"])
        process.wait()
        again = self.box.get_process(process.id)
        self.assertEqual((again.id, again.name, again.returncode), (process.id, "sh", 2))
        self.assertEqual(again.stdout.read(), "found\n")
        self.assertEqual(self.box.query_processes()[0].id, process.id, "the newest comes first")
        self.refused(404, None, self.box.get_process, "cmd_nobody")

    def test_input_is_read_to_its_end(self):
        done = self.box.run_process("cat", input=b"bytes\x00\n", capture_output=True)
        self.assertEqual(done.stdout, "bytes\x00\n")
        done = self.box.run_process("cat", capture_output=True)
        self.assertEqual((done.returncode, done.stdout), (0, ""))

    def test_a_conversation_through_stdin(self):
        script = 'while read line; do echo "heard $line"; done; echo over'
        process = self.box.create_process("bash", ["-c", script], stdin=subprocess.PIPE)
        for word in ("one", "two", "drei ß"):
            self.write(process.stdin, f"{word}\n".encode())
            self.assertEqual(process.stdout.readline(), f"heard {word}\n")
        self.close(process.stdin)
        self.assertEqual(process.stdout.read(), "over\n")
        self.assertEqual(process.wait(), 0)

    def test_megabytes_through_stdin_arrive_whole(self):
        data = bytes(range(256)) * 12000  # three megabytes
        process = self.box.create_process("sha256sum", stdin=subprocess.PIPE)
        out, _ = process.communicate(data)
        import hashlib

        self.assertEqual(out.split()[0], hashlib.sha256(data).hexdigest())

    def test_another_handle_goes_on_where_the_first_stopped(self):
        process = self.box.create_process("cat", stdin=subprocess.PIPE)
        self.write(process.stdin, b"first ")
        again = self.box.get_process(process.id)
        self.write(again.stdin, b"second")
        self.close(again.stdin)
        self.assertEqual(process.wait(), 0)
        self.assertEqual(process.stdout.read(), "first second")

    def test_a_process_without_stdin_says_so(self):
        process = self.box.create_process("sleep", ["60"])
        again = self.box.get_process(process.id)
        with self.assertRaises(SandboxStdinError) as caught:
            self.write(again.stdin, b"x")
        self.assertIsInstance(caught.exception.cause, SandboxApiError)
        self.assertEqual(caught.exception.cause.code, "command_stdin_unavailable")
        process.kill()

    def test_writing_to_a_process_that_is_over_is_a_broken_pipe(self):
        import anyio

        process = self.box.create_process("true", stdin=subprocess.PIPE)
        process.wait()
        with self.assertRaises(BrokenPipeError if SURFACE == "sync" else anyio.BrokenResourceError):
            self.write(process.stdin, b"x")

    def test_a_process_that_does_not_read_is_not_drowned(self):
        done = self.box.run_process("true", input=b"x" * 2_000_000, capture_output=True)
        self.assertEqual(done.returncode, 0)

    def test_a_terminal(self):
        with self.box.open_interactive("sh", cols=100, rows=30, env={"MARK": "here"}) as terminal:
            shown = b""

            def expect(text):
                nonlocal shown
                deadline = time.monotonic() + 30
                while text.encode() not in shown:
                    self.assertLess(time.monotonic(), deadline, shown)
                    shown += self.receive(terminal.stream)

            send = terminal.stream.write if SURFACE == "sync" else terminal.stream.send
            send(b"stty size; echo $MARK$MARK; tty; pwd\n")
            expect("30 100")
            expect("herehere")
            expect("/dev/pts/")
            terminal.resize(120, 40)
            send(b"sleep 0.3; stty size\n")
            expect("40 120")
            send(b"exit 5\n")
            self.assertEqual(terminal.wait(), 5)
            self.assertEqual(terminal.returncode, 5)

    def test_a_terminal_with_sudo(self):
        with self.box.open_interactive("id", ["-un"], sudo=True) as terminal:
            shown = b""
            while b"root" not in shown:
                shown += self.receive(terminal.stream)
            self.assertEqual(terminal.wait(), 0)
