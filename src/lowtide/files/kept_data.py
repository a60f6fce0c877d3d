"""What one process has found and the next one may use: small files by a hash of what they are about.

A file is named by its key's hash and begins with a digest of the rest: one that is not whole is as if it were
not there. The files of a folder that were used last are kept. Whether what is said in one is right is for
the reader to see.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from .cache_folder import private_folder
from .whole_files import read_private, write_whole

__all__ = ["is_kept", "read_kept", "write_kept"]

MOST_FILES = 64
"""In a folder. Chosen: more steps than a user works on at a time."""

_DIGEST = 32


def is_kept(folder: str, key: str) -> bool:
    """Whether there is a file for a key."""
    with suppress(OSError):
        return _place(folder, key).exists()
    return False


def read_kept(folder: str, key: str, most: int) -> bytes | None:
    """What is kept for a key, of at most so many bytes; None where nothing whole is."""
    with suppress(OSError):
        path = _place(folder, key)
        data = read_private(path, most + _DIGEST)
        if hashlib.sha256(data[_DIGEST:]).digest() == data[:_DIGEST]:
            path.touch()  # what is used stays
            return data[_DIGEST:]
    return None


def write_kept(folder: str, key: str, data: bytes) -> None:
    """Keep something; a folder that cannot be written to only costs the next process what this one did."""
    with suppress(OSError):
        path = _place(folder, key)
        write_whole(path, hashlib.sha256(data).digest() + data, mode=0o600)
        _let_go(path.parent)


def _place(folder: str, key: str) -> Path:
    """The file of a key; raises `NoCache`, which was said, where there is no folder."""
    return private_folder(folder) / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.kept"


def _let_go(folder: Path) -> None:
    """Take away the files that were used longest ago."""
    found = sorted(folder.glob("*.kept"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in found[MOST_FILES:]:
        path.unlink(missing_ok=True)
