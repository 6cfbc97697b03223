"""Points ``vercel.sandbox`` at a Sandkeep server.

In a shell prepared by ``keep env vercel`` this happens by itself (``sitecustomize.py``, beside this file). Elsewhere:
``import sandkeep_vercel``, and nothing else changes.

The package has a proper option for one client or session,
``SandboxServiceOptions(base_url=f"{SANDKEEP_URL}/api")``, but no variable for a whole program. Importing
this module changes the default of that option to ``$SANDKEEP_URL``, for the synchronous and the
asynchronous surface. An explicit ``base_url`` still wins.

The package finds its credentials in ``VERCEL_OIDC_TOKEN``, or in ``VERCEL_TOKEN`` with ``VERCEL_TEAM_ID`` and
``VERCEL_PROJECT_ID``. ``keep env vercel`` exports none of these: a program that is not redirected would send the
token to the other service. It exports ``SANDKEEP_VERCEL_TOKEN``. Once the address is changed, ``os.environ`` gives
it to those who read these variables, unless they are set. It is not *in* the environment: neither child processes
nor copies of ``os.environ`` have it.
"""

import base64
import json
import os
from urllib.parse import urlsplit

__all__ = ["base_url", "hand_over", "point_at"]


def base_url(url: str | None = None) -> str:
    """The address of the API on a server, by default on ``$SANDKEEP_URL``."""
    hint = "set it to your server, like SANDKEEP_URL=http://127.0.0.1:7777 (`keep env vercel` prints it)"
    url = os.environ.get("SANDKEEP_URL") if url is None else url
    if not url:
        raise RuntimeError(f"SANDKEEP_URL is not set; {hint}")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RuntimeError(f"SANDKEEP_URL is {url!r}, which is no http address; {hint}")
    return url.rstrip("/") + "/api"


def point_at(url: str | None = None) -> str:
    """Makes a server, by default ``$SANDKEEP_URL``, the default of ``vercel.sandbox``."""
    from vercel.sandbox._internal import options

    if not hasattr(options, "DEFAULT_SANDBOX_API_BASE_URL"):
        raise RuntimeError(
            "this version of vercel-sandbox keeps its address elsewhere; "
            "pass SandboxServiceOptions(base_url=sandkeep_vercel.base_url()) instead"
        )
    options.DEFAULT_SANDBOX_API_BASE_URL = base_url(url)
    hand_over(os.environ.get("SANDKEEP_VERCEL_TOKEN"))
    return options.DEFAULT_SANDBOX_API_BASE_URL


_lent: dict[str, str] = {}


class _Lending(type(os.environ)):
    """An environment that answers reads of what is lent. Whoever lists it gets what is set and nothing else."""

    def __getitem__(self, name):
        try:
            return super().__getitem__(name)
        except KeyError:
            if name not in _lent:
                raise
            return _lent[name]

    def __delitem__(self, name):
        lent = _lent.pop(name, None)
        try:
            super().__delitem__(name)
        except KeyError:
            if lent is None:
                raise


def hand_over(token: str | None) -> None:
    """Answers reads of the package's variables from a token, those that are not set."""
    if not token:
        return
    payload = token.split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    for name, value in (
        ("VERCEL_OIDC_TOKEN", token),
        ("VERCEL_AUTH_TOKEN", token),
        ("VERCEL_TOKEN", token),
        ("VERCEL_TEAM_ID", claims["owner_id"]),
        ("VERCEL_PROJECT_ID", claims["project_id"]),
    ):
        _lent[name] = value
    os.environ.__class__ = _Lending


point_at()
