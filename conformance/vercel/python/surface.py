"""One suite for the package's two surfaces.

The asynchronous one has the methods of the synchronous one, to be awaited. Cases are written once, as
plain calls; with ``CONFORMANCE_SURFACE=async`` they go through a bridge that awaits each call in one
task of an event loop in a thread of its own. One task, because the package's scopes must be left where
they were entered.
"""

import asyncio
import inspect
import os
import queue
import threading
import unittest
import uuid

import vercel.sandbox
import vercel.sandbox.sync

SURFACE = os.environ.get("CONFORMANCE_SURFACE", "sync")
PATIENCE = 120


class Loop:
    """An event loop in a thread, with one task that does what it is told."""

    def __init__(self):
        self.orders = queue.SimpleQueue()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.work()), daemon=True)
        self.thread.start()

    async def work(self):
        loop = asyncio.get_running_loop()
        while True:
            order = await loop.run_in_executor(None, self.orders.get)
            if order is None:
                return
            coroutine, answer = order
            try:
                answer.put((await coroutine(), None))
            except BaseException as error:  # handed to the caller, whatever it is
                # Without its frames: unittest clears those, and this very coroutine is one of them.
                answer.put((None, error.with_traceback(None)))

    def run(self, coroutine):
        answer = queue.SimpleQueue()
        self.orders.put((coroutine, answer))
        value, error = answer.get(timeout=PATIENCE)
        if error is not None:
            raise error
        return value

    def end(self):
        self.orders.put(None)
        self.thread.join(PATIENCE)


class Bridged:
    """An asynchronous object, with calls that wait."""

    def __init__(self, loop, inner):
        self._loop, self._inner = loop, inner

    def __getattr__(self, name):
        return wrap(self._loop, getattr(self._inner, name))

    def __enter__(self):
        async def enter():
            return await self._inner.__aenter__()

        return wrap(self._loop, self._loop.run(enter))

    def __exit__(self, *problem):
        async def leave():
            return await self._inner.__aexit__(*problem)

        return self._loop.run(leave)

    def __iter__(self):
        steps = self._inner.__aiter__()

        async def step():
            return await steps.__anext__()

        while True:
            try:
                yield wrap(self._loop, self._loop.run(step))
            except StopAsyncIteration:
                return


def wrap(loop, value):
    if inspect.ismethod(value) or inspect.isfunction(value):

        def call(*args, **kwargs):
            plain = {name: unwrap(each) for name, each in kwargs.items()}

            async def ask():
                answer = value(*map(unwrap, args), **plain)
                # An operation can be awaited or entered: `Surface.awaited` decides.
                return await answer if inspect.iscoroutine(answer) else answer

            return wrap(loop, loop.run(ask))

        return call
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(wrap(loop, each) for each in value)
    kind = type(value)
    awaits = any(inspect.iscoroutinefunction(getattr(kind, name, None)) for name in dir(kind))
    ours = kind.__module__.startswith("vercel.sandbox") and awaits
    return Bridged(loop, value) if ours or hasattr(value, "__aiter__") else value


def unwrap(value):
    if isinstance(value, Bridged):
        return value._inner
    if isinstance(value, dict):
        return {name: unwrap(each) for name, each in value.items()}
    return value


class Case(unittest.TestCase):
    """A test with a client, and sandboxes that go with it."""

    @classmethod
    def setUpClass(cls):
        if SURFACE == "async":
            cls.loop = Loop()
            cls.addClassCleanup(cls.loop.end)
            cls.api = vercel.sandbox
            cls.client = Bridged(cls.loop, vercel.sandbox.SandboxClient.create())
            cls.addClassCleanup(cls.client.aclose)
        else:
            cls.api = vercel.sandbox.sync
            cls.client = vercel.sandbox.sync.SyncSandboxClient.create()
            cls.addClassCleanup(cls.client.close)

    def awaited(self, operation):
        """What an operation gives, without entering its scope."""
        if SURFACE == "sync":
            return operation

        async def wait():
            return await operation._inner

        return wrap(self.loop, self.loop.run(wait))

    def fresh(self, purpose="py"):
        return f"{purpose}-{uuid.uuid4().hex[:8]}"

    def sandbox(self, **options):
        """A sandbox for one test."""
        options.setdefault("name", self.fresh())
        made = self.awaited(self.client.create_sandbox(**options))
        self.addCleanup(self.removed, made.name)
        return made

    def removed(self, name):
        try:
            self.client.get_sandbox(name=name).destroy(delete_orphan_snapshots=True)
        except vercel.sandbox.SandboxApiError as error:
            if error.status_code != 404:
                raise

    def sh(self, box, script, **options):
        """Runs a script, which must succeed, and returns what it printed."""
        done = box.run_process("bash", ["-c", script], capture_output=True, **options)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.rstrip("\n")

    def refused(self, status, code, call, *args, **kwargs):
        with self.assertRaises(vercel.sandbox.SandboxApiError) as caught:
            call(*args, **kwargs)
        self.assertEqual(caught.exception.status_code, status, caught.exception.data)
        if code is not None:
            self.assertEqual(caught.exception.code, code, caught.exception.data)
        return caught.exception

    # Where the surfaces differ in their words.

    def write(self, stdin, data):
        stdin.write(data) if SURFACE == "sync" else stdin.send(data)

    def close(self, stream):
        stream.close() if SURFACE == "sync" else stream.aclose()

    def receive(self, stream):
        return stream.read(65536) if SURFACE == "sync" else stream.receive(65536)
