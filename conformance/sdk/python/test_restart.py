"""Streams over a server that is killed, and over connections that are cut: not a byte is lost or repeated."""

import asyncio
import os
import threading
import unittest
import uuid

from sandkeep import AsyncSandkeep, Sandkeep
from support import IMAGE, Cutting, restart, restart_later

# Two seconds of output, in lines that tell their numbers; some go to standard error.
COUNT = "i=0; while [ $i -lt 400 ]; do echo line $i; [ $((i % 10)) = 0 ] && echo err $i >&2; i=$((i+1)); sleep 0.005; done"
STDOUT = "".join(f"line {at}\n" for at in range(400))
STDERR = "".join(f"err {at}\n" for at in range(0, 400, 10))


def fresh(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex[:8]}"


class Restarts(unittest.TestCase):
    def setUp(self) -> None:
        self.client = Sandkeep()
        self.box = self.client.get_or_create(fresh("restart"), image=IMAGE)
        self.box.run("true")

    def tearDown(self) -> None:
        self.box.delete()
        self.client.close()

    def test_output_events_and_logs_over_a_killed_server(self) -> None:
        seen: list[str] = []
        events = self.client.events(sandbox=self.box.name, kinds=["command"])
        events.__enter__()

        def follow() -> None:
            for event in events:
                seen.append(f"{event.kind} {event.data['line']}" if "line" in event.data else event.kind)
                if len(seen) == 6:
                    return

        follower = threading.Thread(target=follow)
        follower.start()
        detached = self.box.start(COUNT)
        log: list[bytes] = []
        reader = threading.Thread(
            target=lambda: log.extend(one.data for one in detached.logs() if one.stream == "stdout")
        )
        reader.start()
        killer = restart_later(0.7)
        result = self.box.run(COUNT)
        killer.join()
        self.assertEqual(result.stdout, STDOUT)
        self.assertEqual(result.stderr, STDERR)
        self.assertEqual((result.exit_code, result.missing_bytes), (0, 0))
        reader.join()
        self.assertEqual(b"".join(log).decode(), STDOUT)
        self.box.run("echo after")
        follower.join(30)
        events.close()
        self.assertEqual(len(seen), 6, seen)
        kinds = [one.split()[0] for one in seen]
        self.assertEqual(kinds.count("command.started"), 3, "each once")
        self.assertEqual(kinds.count("command.ended"), 3, "each once")

    def test_waiting_and_calls_over_a_killed_server(self) -> None:
        command = self.box.start("sleep 1; echo end")
        killer = restart_later(0.2)
        self.assertEqual(command.wait().exit_code, 0)
        killer.join()
        self.assertEqual(command.result().stdout, "end\n")
        killer = restart_later(0)
        fork = self.box.fork(self.box.name + "-fork")
        killer.join()
        self.assertEqual(fork.run("echo works").stdout, "works\n")
        fork.delete()

    def test_asyncio_over_a_killed_server(self) -> None:
        async def work() -> str:
            async with AsyncSandkeep() as client:
                box = client.sandbox(self.box.name)
                killer = asyncio.get_running_loop().run_in_executor(None, lambda: restart_later(0.7).join())
                result = await box.run(COUNT)
                await killer
                return result.stdout

        self.assertEqual(asyncio.run(work()), STDOUT)

    def test_a_stream_that_is_left_after_a_restart_ends_its_command(self) -> None:
        with self.box.stream("echo one; sleep 1; echo two; exec sleep 600") as stream:
            self.assertEqual(next(stream).text, "one\n")
            restart()
            self.assertEqual(next(stream).text, "two\n")
            id = stream.command.id
        self.assertEqual(self.box.command(id).wait().exit_code, 129)


class CutConnections(unittest.TestCase):
    def test_a_command_is_started_once_and_its_output_is_whole(self) -> None:
        with Sandkeep() as direct:
            box = direct.get_or_create(fresh("cut"), image=IMAGE)
            box.run("true")
            # The first answer is cut before anything of it arrives, later ones in the middle of lines.
            way = Cutting([0, 900, 1500, 4000, 100, 2500])
            with Sandkeep(way.url) as client:
                result = client.sandbox(box.name).run("echo x >> /work/started; " + COUNT)
            way.close()
            self.assertEqual(way.cut, 6, "all of them were used")
            self.assertEqual((result.stdout, result.stderr), (STDOUT, STDERR))
            self.assertEqual(result.exit_code, 0, result.end)
            self.assertEqual(box.files.read_text("/work/started"), "x\n")
            # So are calls that make something.
            way = Cutting([0])
            with Sandkeep(way.url) as client:
                fork = client.sandbox(box.name).fork()
            way.close()
            self.assertEqual([one.name for one in box.forks()], [fork.name])
            direct.sandbox(fork.name).delete()
            box.delete()

    def test_who_does_not_come_back_ends_the_command(self) -> None:
        with Sandkeep() as direct:
            box = direct.get_or_create(fresh("gone"), image=IMAGE)
            way = Cutting([3000])
            with Sandkeep(way.url, retry_for=0) as client:
                stream = client.sandbox(box.name).stream("yes")
                try:
                    for _ in stream:
                        pass
                except Exception:
                    pass
            way.close()
            ended = box.command(stream.command.id).wait()
            self.assertEqual(ended.end, "killed")
            box.delete()


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    unittest.main()
