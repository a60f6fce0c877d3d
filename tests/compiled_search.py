"""The search in C, compiled once for a run of the tests, whose processes have cache folders of their own.

Each worker and each rank would start a compiler of its own for it.
"""

import fcntl
import shutil
from contextlib import suppress
from pathlib import Path

from lowtide.solve.search import build


def share(run, own):
    """Compile it into the folder of the run, where no other worker has, and copy it to one's own."""
    with Path(run, "compiling").open("w") as lock, suppress(OSError):  # without a compiler there is none
        fcntl.flock(lock, fcntl.LOCK_EX)
        if build.wanted() and not copy(run, own):
            build._build(Path(run))
            copy(run, own)


def copy(source, target):
    """Copy what is compiled already; its name tells what is in it, and it is checked where it is used."""
    Path(target).mkdir(mode=0o700, exist_ok=True)
    found = list(Path(source).glob(build._name("*")))
    for path in found:
        shutil.copy2(path, target)
    return bool(found)
