"""The folder of everything that is made once and kept for later runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`lightning_aigc` in `$XDG_CACHE_HOME`, by default in `~/.cache`.

    Raises: RuntimeError if there is no home folder.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))  # a relative one is invalid, by the XDG specification
    return (given if given.is_absolute() else Path.home() / ".cache") / "lightning_aigc"
