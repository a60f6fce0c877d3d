"""Files that are written whole or not at all, and read without waiting.

A file is written aside and renamed: other processes may read it at that moment, and a crash leaves no half
of it. The name aside is drawn at random and made anew (O_EXCL, O_NOFOLLOW): in a folder that others may write
to, nobody can have put a link there that leads to another file. What a killed process has left aside is taken
away by the next one that writes to that folder.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

__all__ = ["read_private", "scratch_folder", "tidy", "write_whole"]

_DAY = 24 * 3600.0
"""Seconds after which what another machine has left is taken for given up: it cannot be asked."""

_mine: set[str] = set()
"""What this process has aside now: after a restart in a container another one had the same number."""

_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_ASIDE = re.compile(r"\.lowtide-([0-9a-f]{8})-([0-9]+)-\w+\.part")


def write_whole(path: Path, data: bytes, *, mode: int | None = None) -> None:
    """Write a file; without a mode it has that of the file in its place, or the usual one of a new file."""
    tidy(path.parent)
    if mode is None:
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    half = path.with_name(f"{_prefix()}{secrets.token_hex(8)}.part")
    _mine.add(half.name)
    try:
        handle = os.open(
            half, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, 0o666 if mode is None else 0o600
        )
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            half.chmod(mode)
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)
        _mine.discard(half.name)
    _sync(path.parent)


@contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """A folder of this process alone inside another one, gone afterwards."""
    tidy(folder)
    made = Path(tempfile.mkdtemp(dir=folder, prefix=_prefix(), suffix=".part"))
    _mine.add(made.name)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        _mine.discard(made.name)


def read_private(path: Path, most: int) -> bytes:
    """The bytes of a file that only this user (or root) can have written; raises OSError for any other.

    A pipe would never end and a link may lead anywhere: neither is opened.
    """
    handle = os.open(path, os.O_RDONLY | _NO_FOLLOW | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is not a file")
        if reason := others_may_write(found):
            raise OSError(reason)
        if found.st_size > most:
            raise OSError(f"it has {found.st_size} bytes, more than {most}")
        return file.read(most + 1)


def others_may_write(found: os.stat_result) -> str:
    """Why somebody else may have written there; nothing where nobody can have."""
    if not hasattr(os, "geteuid"):
        return ""
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
    return "other users may write to it (chmod go-w mends that)" if found.st_mode & 0o022 else ""


def tidy(folder: Path) -> None:
    """Take away what processes that are no more have left aside in a folder."""
    with suppress(OSError), os.scandir(folder) as entries:
        for name in [entry.name for entry in entries if _is_left(entry)]:
            place = folder / name
            with suppress(OSError):
                shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()


def _is_left(entry: os.DirEntry[str]) -> bool:
    match = _ASIDE.fullmatch(entry.name)
    if match is None or entry.name in _mine:
        return False
    if match[1] != _machine():
        return time.time() - entry.stat(follow_symlinks=False).st_mtime > _DAY
    return int(match[2]) == os.getpid() or not _runs(int(match[2]))


def _runs(process: int) -> bool:
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def _prefix() -> str:
    return f".lowtide-{_machine()}-{os.getpid()}-"


@cache
def _machine() -> str:
    """A short name of this machine: a home folder may serve several."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _sync(folder: Path) -> None:
    """See to it that a rename outlives a power cut, where the file system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
