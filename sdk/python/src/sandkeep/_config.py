"""Where the server is, and the key to it: the same places where `keep` looks."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from ._errors import ConfigurationError


@dataclass(frozen=True)
class Target:
    """A server and a key to it."""

    url: str
    key: str | None


def _data_places() -> list[Path]:
    if told := os.environ.get("SANDKEEP_DATA"):
        return [Path(told)]
    places = []
    home = os.environ.get("XDG_DATA_HOME") or (os.environ.get("HOME", "") and f"{os.environ['HOME']}/.local/share")
    if home:
        places.append(Path(home) / "sandkeep")
    return [*places, Path("/var/lib/sandkeep")]


def _local() -> dict[str, str | None] | None:
    """What a server on this machine has written for its owner's programs."""
    for place in _data_places():
        try:
            found = json.loads((place / "client.json").read_text())
            stat = place.stat()
        except (OSError, ValueError):
            continue
        directory = found.get("directory")
        # One that was copied along with the directory is about the original's server.
        if directory and directory != {"device": stat.st_dev, "inode": stat.st_ino}:
            continue
        return {name: found.get(name) for name in ("url", "unix_socket", "key")}
    return None


def find(url: str | None, key: str | None) -> Target:
    """What is given, else SANDKEEP_URL and SANDKEEP_KEY, else the server of this machine."""
    url = url or os.environ.get("SANDKEEP_URL") or None
    key = key or os.environ.get("SANDKEEP_KEY") or None
    local = _local() if key is None or url is None else None
    if url is None:
        if local is None:
            raise ConfigurationError(
                "no server was found on this machine: start one with `keep serve`, or set SANDKEEP_URL and SANDKEEP_KEY"
            )
        socket = local["unix_socket"]
        url = f"unix://{socket}" if socket and os.path.exists(socket) else local["url"]
        if not url:
            raise ConfigurationError("the server of this machine listens nowhere: start it with `keep serve --listen`")
    # A key found on this machine is for this machine's server, and goes to no other.
    if key is None and local is not None and url.rstrip("/") in (local["url"], f"unix://{local['unix_socket']}"):
        key = local["key"]
    if not url.startswith(("http://", "https://", "unix:///")):
        raise ConfigurationError(f"`{url}` is not a server's address: write `http://host:port` or `unix:///path`")
    if key is not None and (not key.isascii() or not key.isprintable()):
        raise ConfigurationError("the key is not one of Sandkeep: it looks like `skp_…`")
    return Target(url.rstrip("/"), key)
