"""The commit that a row of results was made with."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

__all__ = ["commit"]


@cache
def commit() -> str:
    """Its short name, with a sign that files were changed; "unknown" where there is no git."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
