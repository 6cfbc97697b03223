"""Points ``vercel.sandbox`` at a Sandkeep server: ``import sandkeep_vercel``, and nothing else changes.

The package has a proper option for one client or session,
``SandboxServiceOptions(base_url=f"{SANDKEEP_URL}/api")``, but no variable for a whole program. Importing
this module changes the default of that option to ``$SANDKEEP_URL``, for the synchronous and the
asynchronous surface. An explicit ``base_url`` still wins.

Credentials are found as always: ``VERCEL_OIDC_TOKEN``, or ``VERCEL_TOKEN`` with ``VERCEL_TEAM_ID`` and
``VERCEL_PROJECT_ID``. ``keep env vercel`` prints all of them.
"""

import os
from urllib.parse import urlsplit

__all__ = ["base_url", "point_at"]


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
    return options.DEFAULT_SANDBOX_API_BASE_URL


point_at()
