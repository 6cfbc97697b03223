"""What the tests of the Python SDK share: the server they talk to, and ways to disturb it."""

import os
import socket
import threading
import time

IMAGE = os.environ["SANDKEEP_SDK_IMAGE"]


def control(word: str) -> None:
    """Tells the test's server to die or to come back."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(os.environ["SANDKEEP_SDK_CONTROL"])
        line.sendall(f"{word}\n".encode())
        answer = line.makefile().readline()
    assert answer == "ok\n", answer


def restart() -> None:
    """Kills the server as a crash would, and starts it again."""
    control("kill")
    time.sleep(0.3)
    control("launch")


def restart_later(delay: float) -> threading.Thread:
    """Does so in the background."""

    def work() -> None:
        time.sleep(delay)
        restart()

    thread = threading.Thread(target=work)
    thread.start()
    return thread


class Cutting:
    """A way to the server on which connections are cut: a byte limit for the answers of each of the first ones."""

    def __init__(self, limits: list[int]) -> None:
        host, port = os.environ["SANDKEEP_URL"].removeprefix("http://").split(":")
        self._target = (host, int(port))
        self._limits = limits
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cut = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            limit = self._limits.pop(0) if self._limits else None
            far = socket.create_connection(self._target)
            threading.Thread(target=self._pass, args=(near, far, None), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, near, limit), daemon=True).start()

    def _pass(self, source: socket.socket, to: socket.socket, limit: int | None) -> None:
        left = limit
        try:
            while data := source.recv(65536):
                if left is not None and len(data) > left:
                    to.sendall(data[:left])
                    self.cut += 1
                    break
                left = None if left is None else left - len(data)
                to.sendall(data)
        except OSError:
            pass
        for one in (source, to):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            one.close() if limit is not None else None
