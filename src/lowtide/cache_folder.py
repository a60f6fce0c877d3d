"""Where Lowtide keeps what it measured and built: prices of ops, the compiled search."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """$LOWTIDE_CACHE, else lowtide/ in the user's cache folder."""
    if folder := os.environ.get("LOWTIDE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lowtide"
