"""The server is killed under its clients' feet. Runs alone: it takes the server away from everyone."""

import os
import socket
import unittest

from surface import Case

CONTROL = os.environ.get("CONFORMANCE_CONTROL")


def tell_server(word):
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(CONTROL)
        line.sendall(f"{word}\n".encode())
        heard = b""
        while data := line.recv(4096):
            heard += data
    assert heard.strip() == b"ok", heard


@unittest.skipUnless(CONTROL, "CONFORMANCE_CONTROL is not set")
class Crash(Case):
    def crash(self):
        tell_server("kill")
        tell_server("launch")

    def test_a_process_and_its_output_live_through_it(self):
        box = self.sandbox()
        process = box.create_process("bash", ["-c", "for i in 1 2 3 4 5; do echo $i; sleep 0.4; done; exit 5"])
        self.crash()
        self.assertEqual(process.wait(), 5)
        self.assertEqual(process.stdout.read(), "1\n2\n3\n4\n5\n")

    def test_output_that_is_being_read_goes_on_without_gap(self):
        box = self.sandbox()
        process = box.create_process("bash", ["-c", "for i in $(seq 1 8); do echo $i; sleep 0.4; done"])
        self.assertEqual(process.stdout.readline(), "1\n")
        self.crash()
        self.assertEqual(process.stdout.read(), "".join(f"{i}\n" for i in range(2, 9)))

    def test_what_was_acknowledged_is_there(self):
        box = self.sandbox(env={"KEPT": "env"})
        box.fs.write_text("file", "kept")
        box.stop()
        self.crash()
        self.assertEqual(self.sh(box, "cat file; echo $KEPT"), "keptenv")
