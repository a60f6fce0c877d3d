"""The rows of a results file, a JSON line each: written as they are made, so that a run can be stopped.

A run that is started again with the file goes on where it stopped: what was measured of this commit with this
torch is left out (`there`). No torch here.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["Row", "append", "read", "there"]

Row = dict[str, Any]


def read(path: Path | None) -> list[Row]:
    """Every line of the file, in the order in which they were written."""
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def append(row: Row, path: Path | None) -> None:
    """Write one line, if there is a file; other processes may be writing too."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(row) + "\n")


def there(path: Path | None, names: Sequence[str], facts: Row) -> set[tuple[Any, ...]]:
    """What the rows of the file are known by, of those that were made under the same facts."""
    same = [row for row in read(path) if facts.items() <= row.items()]
    return {tuple(row.get(name) for name in names) for row in same}
