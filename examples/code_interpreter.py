"""Runs code that a model has written: without network, within limits, with files that stay until the next turn."""

from sandkeep import Sandbox


class Interpreter:
    """One conversation's sandbox."""

    def __init__(self, conversation: str) -> None:
        self.box = Sandbox.get_or_create(
            f"interpreter-{conversation}",
            network={"mode": "deny-all"},
            memory="512M",
            pids=64,
            idle_timeout="5m",
            expires="7d",
        )

    def run(self, code: str) -> str:
        """What a model gets to see of a run: its output, and how it ended if not well."""
        result = self.box.run(["python3", "-"], input=code, cwd="/work", timeout="30s")
        said = result.stdout + result.stderr
        if result.ok:
            return said
        return f"{said[-4000:]}\n[{result.end}, exit code {result.exit_code}]"


def main() -> None:
    interpreter = Interpreter("42")
    interpreter.box.files.make_directory("/work")
    print(interpreter.run("squares = [n * n for n in range(5)]\nopen('squares', 'w').write(str(squares))"))
    interpreter.box.stop()  # The next turn may come in a second or in a day: files are kept.
    print(interpreter.run("print(sum(eval(open('squares').read())))"))
    print(interpreter.run("1 / 0"))
    print(interpreter.run("import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=2)").splitlines()[-2])
    interpreter.box.delete()


if __name__ == "__main__":
    main()
