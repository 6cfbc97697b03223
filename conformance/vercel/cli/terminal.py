"""Runs a program in a terminal and plays a scene with it.

    terminal.py '[["expect", "$ "], ["send", "ls\\r"], ["resize", 100, 40]]' program arguments...

Prints what the terminal showed and how the program ended, as JSON.
"""

import fcntl
import json
import os
import pty
import select
import signal
import struct
import sys
import termios
import time

PATIENCE = 45


def main() -> None:
    scene, argv = json.loads(sys.argv[1]), sys.argv[2:]
    child, terminal = pty.fork()
    if child == 0:
        os.execvp(argv[0], argv)
    resize(terminal, 80, 24)
    shown, missed = b"", None
    for step, *values in scene:
        if step == "expect":
            wanted, seen = values[0].encode(), len(shown)
            shown, found = read_until(terminal, shown, wanted, main.looked)
            if not found:
                missed = values[0]
                break
            main.looked = shown.index(wanted, main.looked) + len(wanted)
        elif step == "send":
            os.write(terminal, values[0].encode())
        elif step == "resize":
            resize(terminal, *values)
            os.kill(child, signal.SIGWINCH)
    if missed is not None:
        os.kill(child, signal.SIGKILL)
    shown, _ = read_until(terminal, shown, None, 0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    print(json.dumps({"shown": shown.decode(errors="replace"), "code": code, "missed": missed}))


main.looked = 0


def resize(terminal: int, columns: int, rows: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def read_until(terminal: int, shown: bytes, wanted: bytes | None, start: int) -> tuple[bytes, bool]:
    """Reads until `wanted` was shown after `start`, or to the end."""
    deadline = time.monotonic() + PATIENCE
    while wanted is None or wanted not in shown[start:]:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([terminal], [], [], left)[0]:
            return shown, False
        try:
            data = os.read(terminal, 65536)
        except OSError:  # what Linux says when the other end is closed
            data = b""
        if not data:
            return shown, False
        shown += data
    return shown, True


main()
