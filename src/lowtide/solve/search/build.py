"""The compiled search as a library: built once on each machine, checked before each use.

Problem: what is loaded runs as the user, and a file that was cut short or zeroed, as a full disk or a crash
leaves it, ends the process where it is mapped.

Method: on first use the C files are compiled with the machine's C compiler into the user's cache folder,
where nobody else may write (`cache_folder`). A library's name has a hash of the sources and of the kind of
machine, and one of the file itself: a file that is not what was written is taken away and built anew. Without
a compiler or a cache folder `library()` is None, and one line says why (`LOWTIDE_NATIVE=0` asks for it).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

from ...files.cache_folder import NoCache, cache_folder, private_folder
from ...files.whole_files import read_private, scratch_folder, write_whole

__all__ = ["build_ahead", "library", "wanted"]

SOURCES = Path(__file__).parent / "c"
FLAGS = ["-O2", "-std=c11", "-ffp-contract=off", "-fPIC", "-shared"]

PATIENCE = 20.0
"""Seconds for a compiler, which needs one or two; one that hangs is ended, with all that it has started."""

MOST_BYTES = 1 << 24
"""Of a library: that of all the sources has some 10^5."""

_builders: list[threading.Thread] = []


def wanted() -> bool:
    """Whether the compiled search may be used."""
    return os.environ.get("LOWTIDE_NATIVE", "1") != "0"


def build_ahead() -> None:
    """Begin to compile the search, where that was not done before: a second that a capture can hide."""
    if _builders or not wanted():
        return
    with suppress(NoCache):  # `library` meets the same, and says so
        if any(cache_folder().glob(_name("*"))):
            return
    builder = threading.Thread(target=_try_to_build, daemon=True)
    with suppress(RuntimeError):  # there is no memory for a thread
        builder.start()
        _builders.append(builder)


def _try_to_build() -> None:
    with suppress(OSError, subprocess.SubprocessError):  # `library` meets the same and does without
        _build(private_folder())


@cache
def library() -> ctypes.CDLL | None:
    """The compiled search, or None where it cannot be had, which is said once."""
    if not wanted():
        return None
    for builder in _builders:
        builder.join()
    try:
        folder = private_folder()
        return _load(folder) or _open(_build(folder))
    except NoCache:  # that was said
        return None
    except (OSError, AttributeError, MemoryError, subprocess.SubprocessError) as error:
        _log.warning("plans are searched in Python, which finds less in the same time: %s", _told(error))
        return None


_log = logging.getLogger("lowtide")


def _told(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"the C compiler did not end in {PATIENCE:g} s (CC names another one)"
    return " ".join(str(error).split())


def _load(folder: Path) -> ctypes.CDLL | None:
    """The library that was built before; what cannot be one is taken away."""
    for path in sorted(folder.glob(_name("*"))):
        try:
            if path.name == _name(_digest(read_private(path, MOST_BYTES))):
                return _open(path)
        except (OSError, AttributeError):
            pass
        with suppress(OSError):
            path.unlink()
    return None


def _open(path: Path) -> ctypes.CDLL:
    return _bind(ctypes.CDLL(str(path)))


def _build(folder: Path) -> Path:
    """Compile the sources; the library is put in place whole, under a name that tells what is in it."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None:
        raise OSError("there is no C compiler (install gcc or clang; LOWTIDE_NATIVE=0 asks for Python)")
    with scratch_folder(folder) as scratch:
        made = scratch / "descent.so"
        _compile([compiler, *FLAGS, "-o", str(made), str(SOURCES / "descent.c"), "-lm"], scratch)
        data = made.read_bytes()
    built = folder / _name(_digest(data))
    write_whole(built, data, mode=0o600)
    return built


def _compile(command: list[str], scratch: Path) -> None:
    """Run a compiler in a process group of its own: its children end with it, if it has to be ended."""
    said = scratch / "said"  # not a pipe, whose other end a child could keep open
    with said.open("wb") as out:
        compiler = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        try:
            failed = compiler.wait(PATIENCE)
        except BaseException:
            _end(compiler)
            raise
    if failed:
        lines = said.read_text(errors="replace").split("\n")
        raise OSError(f"{command[0]} failed: {lines[0][:200].strip() or f'exit status {failed}'}")


def _end(compiler: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):
            os.killpg(compiler.pid, signal.SIGKILL)
    compiler.kill()
    compiler.wait()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _name(digest: str) -> str:
    """A name for a library of these sources on this kind of machine: a home folder may serve several."""
    texts = [path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.suffix in (".c", ".h")]
    machine = f"{sys.platform} {platform.machine()} {' '.join(platform.libc_ver())}"
    return f"descent-{_digest(b''.join([*texts, machine.encode()]))[:16]}-{digest}.so"


def _bind(loaded: ctypes.CDLL) -> ctypes.CDLL:
    tape, count, size, number = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
    pointer = ctypes.c_void_p
    for name, gives, *takes in (
        ("tape", tape, ctypes.c_void_p, ctypes.c_void_p, count),
        ("copy", tape, tape),
        ("free", None, tape),
        ("until", None, tape, number),
        ("peak", size, tape),
        ("seconds", number, tape),
        ("order", count, tape, ctypes.c_void_p),
        ("edits", size, tape),
        ("descend", ctypes.c_int, tape, size, number, number, size, number, ctypes.c_uint64),
        ("ruin", ctypes.c_int, tape, number, number, number, ctypes.c_uint64),
        ("anneal", ctypes.c_int, tape, size, size, *[number] * 4, ctypes.c_uint64),
        ("prune", ctypes.c_int, tape, size, size),
        ("judge", size, ctypes.c_void_p, ctypes.c_void_p, count, ctypes.c_void_p),
        ("any_order", count, *[pointer] * 2, size, number, count, size, pointer, count, *[pointer] * 2),
        ("needed", count, count, count, *[ctypes.c_void_p] * 5, count, ctypes.c_void_p),
    ):
        function = getattr(loaded, f"lowtide_{name}")
        function.restype, function.argtypes = gives, takes
    return loaded
