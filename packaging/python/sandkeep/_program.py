"""Finds the program `keep` that came with this package."""

from __future__ import annotations

import os
import sysconfig


def find() -> str:
    """The path of `keep`.

    Raises:
        FileNotFoundError: it is not where installers put scripts. The package was installed from sources, which have none.
    """
    schemes = [sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user")]
    # `pip install --target` puts scripts beside the package.
    beside = os.path.join(os.path.dirname(os.path.dirname(__file__)), "bin")
    places = [sysconfig.get_path("scripts", scheme) for scheme in schemes] + [beside]
    for place in places:
        path = os.path.join(place, "keep")
        if os.access(path, os.X_OK):
            return path
    raise FileNotFoundError(f"there is no `keep` in {', '.join(places)}; install the wheel of sandkeep for this platform")
