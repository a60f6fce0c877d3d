"""Where Lowtide keeps what it measured and built: prices of ops, the compiled search.

What is built is loaded into the process, so nobody else may write there: folders are made for this user alone
whatever the umask is, and one that belongs to another user, or that others may write to, is not used. Where
there is no folder to use, one line says why; everything works, and is measured and searched anew each time.
"""

from __future__ import annotations

import logging
import os
import stat
from functools import cache
from pathlib import Path

from .whole_files import others_may_write, tidy

__all__ = ["NoCache", "cache_folder", "private_folder"]


class NoCache(OSError):  # noqa: N818  # named for what is the matter, as the public errors are
    """There is no folder to keep things in; the message says why."""


def cache_folder() -> Path:
    """$LOWTIDE_CACHE, else lowtide/ in the user's cache folder; raises `NoCache` where neither is one."""
    if named := os.environ.get("LOWTIDE_CACHE"):
        return _absolute("LOWTIDE_CACHE", named)
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return _absolute("XDG_CACHE_HOME", caches) / "lowtide"
    return _absolute("HOME", "~") / ".cache" / "lowtide"


def _absolute(variable: str, named: str) -> Path:
    """A relative path would be another folder in each working folder: some stranger's, some day."""
    try:
        path = Path(named).expanduser()
    except RuntimeError:
        raise NoCache(
            "this user has no home folder: neither HOME nor an entry in the password file"
        ) from None
    if not path.is_absolute():
        raise NoCache(f"{variable}={str(path)!r} is not an absolute path")
    return path


def private_folder(*names: str) -> Path:
    """A folder of the cache, made where it is not there; says once why there is none and raises `NoCache`."""
    try:
        folder = cache_folder()
        for place in (folder, *(folder.joinpath(*names[:count]) for count in range(1, len(names) + 1))):
            _make(place)
            _check(place)
    except NoCache as error:
        _say(str(error))
        raise
    except OSError as error:
        _say(f"{error.filename or folder}: {error.strerror}")
        raise NoCache(str(error)) from None
    _tidy_once(folder.joinpath(*names))
    return folder.joinpath(*names)


def _make(folder: Path) -> None:
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    for place in reversed(missing):
        try:
            place.mkdir(mode=0o700)
        except FileExistsError:  # another process was faster
            continue
        place.chmod(0o700)  # a umask may have taken from the owner, too


def _check(folder: Path) -> None:
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NoCache(f"{folder} is not a folder")
    if reason := others_may_write(found):
        raise NoCache(f"{folder} is not used: {reason}")


@cache
def _tidy_once(folder: Path) -> None:
    tidy(folder)


@cache
def _say(reason: str) -> None:
    logging.getLogger("lowtide").warning(
        "no cache: %s. Prices are measured anew in each process and plans are searched without the compiled "
        "search; set LOWTIDE_CACHE to a folder of your own",
        reason,
    )
