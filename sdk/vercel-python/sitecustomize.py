"""Points ``vercel.sandbox`` at a Sandkeep server in programs that know nothing about it.

Python imports this module at start-up when its directory is on ``PYTHONPATH``, where ``keep env vercel`` puts
it. It loads nothing by itself: it waits for the package's options and changes their default address right
after they are loaded. A program that does not use the package pays for one entry in ``sys.meta_path``.

The token is in ``SANDKEEP_VERCEL_TOKEN``, which the package does not read. ``sandkeep_vercel`` hands it over
after the address was changed. So where this module is not loaded (``python -I``, ``-E`` and ``-S``) or does not
know the package's version, the package finds no token of ours and sends none to the other service.
"""

import importlib.machinery
import importlib.util
import os
import sys

_OPTIONS = "vercel.sandbox._internal.options"


class _Redirecting:
    """A loader that points the package at the server as soon as its options are there."""

    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        # Raises when there is no server to point at: better no import than the other service.
        import sandkeep_vercel  # noqa: F401

    def __getattr__(self, name):
        return getattr(self._loader, name)


class _Finder:
    """Finds the package's options where they are, and wraps their loader."""

    def find_spec(self, name, path=None, target=None):
        if name != _OPTIONS:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None and spec.loader is not None:
                spec.loader = _Redirecting(spec.loader)
                return spec
        return None


def _also_load_the_next():
    """Loads the ``sitecustomize`` that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [place for place in sys.path if os.path.abspath(place or os.curdir) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("SANDKEEP_VERCEL_TOKEN"):
    sys.meta_path.insert(0, _Finder())
_also_load_the_next()
