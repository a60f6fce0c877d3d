"""The greedy descent at native speed: `c/descent.c`, built once on each machine.

Problem: a descent makes some 10^5 small edits of a tape, each a few array operations. In Python the
interpreter takes nearly all of the time: 10 to 25 μs per edit, against 1 μs in C.

Method: the C files are compiled on first use with the machine's C compiler into the user's cache directory,
under a name that is a hash of their text and of the kind of machine, and are called through ctypes; the
arrays of a graph are handed over as they are. Without a compiler or a cache directory, or with
`LOWTIDE_NATIVE=0`, `library()` is None: the Python twins (`tape`, `moves`, `greedy`) take the same moves in
the same order, and the search does less.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...cache_folder import cache_folder
from .tape import Facts

__all__ = ["NativeTape", "build_ahead", "judge", "library"]

SOURCES = Path(__file__).parent / "c"


_LISTS = ("read_at", "reads", "write_at", "writes", "take_at", "takes", "until_at", "untils")


class _Facts(ctypes.Structure):
    _fields_ = (
        ("ops", ctypes.c_int32),
        ("values", ctypes.c_int32),
        ("fixed", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in _LISTS),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "writer",
                "size",
                "own",
                "held",
                "state",
                "saves",
                "seconds",
                "recomputable",
                "can_wait",
            )
        ),
    )


_builders: list[threading.Thread] = []


def build_ahead() -> None:
    """Begin to compile the search, where that was not done before: a second that a capture can hide."""
    if _builders or os.environ.get("LOWTIDE_NATIVE", "1") == "0" or (cache_folder() / _name()).exists():
        return
    _builders.append(threading.Thread(target=_try_to_build, daemon=True))
    _builders[0].start()


def _try_to_build() -> None:
    with suppress(OSError, subprocess.SubprocessError):  # `library` meets the same and does without
        _build()


@cache
def library() -> ctypes.CDLL | None:
    """The compiled search, or None where it cannot be had."""
    if os.environ.get("LOWTIDE_NATIVE", "1") == "0":
        return None
    for builder in _builders:
        builder.join()
    try:
        return _bind(ctypes.CDLL(str(_build())))
    except (OSError, subprocess.SubprocessError):
        return None


def _build() -> Path:
    """Compile the sources unless that was done before; the library is put in place whole."""
    name, folder = _name(), cache_folder()
    built = folder / name
    if built.exists():
        return built
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None:
        raise OSError("there is no C compiler")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        half = Path(scratch) / name
        flags = ["-O2", "-std=c11", "-ffp-contract=off", "-fPIC", "-shared"]
        command = [compiler, *flags, "-o", str(half), str(SOURCES / "descent.c"), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        half.replace(built)
    return built


def _name() -> str:
    """A name for these sources on this kind of machine: a home folder may serve several."""
    texts = [path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.suffix in (".c", ".h")]
    machine = f"{sys.platform} {platform.machine()} {' '.join(platform.libc_ver())}"
    return f"descent-{hashlib.sha256(b''.join([*texts, machine.encode()])).hexdigest()[:16]}.so"


def _bind(loaded: ctypes.CDLL) -> ctypes.CDLL:
    tape, count, size, number = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
    for name, gives, *takes in (
        ("tape", tape, ctypes.c_void_p, ctypes.c_void_p, count),
        ("copy", tape, tape),
        ("free", None, tape),
        ("peak", size, tape),
        ("seconds", number, tape),
        ("order", count, tape, ctypes.c_void_p),
        ("edits", size, tape),
        ("descend", ctypes.c_int, tape, size, number, number, size, number, ctypes.c_uint64),
        ("ruin", None, tape, number, number, number, ctypes.c_uint64),
        ("anneal", None, tape, size, size, number, number, number, ctypes.c_uint64),
        ("prune", None, tape, size, size),
        ("judge", size, ctypes.c_void_p, ctypes.c_void_p, count, ctypes.c_void_p),
        ("needed", count, count, count, *[ctypes.c_void_p] * 5, count, ctypes.c_void_p),
    ):
        function = getattr(loaded, f"lowtide_{name}")
        function.restype, function.argtypes = gives, takes
    return loaded


class NativeFacts:
    """The arrays of a graph, as C reads them."""

    def __init__(self, facts: Facts) -> None:
        self.arrays: dict[str, npt.NDArray[Any]] = {
            "writer": np.array(facts.writer, dtype=np.int32),
            "seconds": np.array(facts.seconds, dtype=np.float64),
            "recomputable": np.array(facts.recomputable, dtype=np.uint8),
            "can_wait": np.array(facts.can_wait, dtype=np.uint8),
            **{
                name: np.array(getattr(facts, name), dtype=np.int64)
                for name in ("size", "own", "held", "state", "saves")
            },
        }
        for one, many in (
            ("read", facts.reads),
            ("write", facts.writes),
            ("take", facts.takes),
            ("until", facts.until),
        ):
            starts = np.concatenate(([0], np.cumsum([len(values) for values in many])))
            self.arrays[f"{one}_at"] = starts.astype(np.int32)
            self.arrays[f"{one}s"] = np.array([v for values in many for v in values], dtype=np.int32)
        pointers = {name: array.ctypes.data for name, array in self.arrays.items()}
        self.struct = _Facts(len(facts.own), len(facts.size), facts.fixed, **pointers)


def judge(facts: Facts, order: Sequence[int] | npt.NDArray[np.int32]) -> tuple[int, float]:
    """The peak and the seconds of an order of runs, as its tape would have them."""
    found = library()
    assert found is not None, "there is no compiled search"
    runs, seconds = np.array(order, dtype=np.int32), ctypes.c_double()
    pointer = ctypes.byref(facts.native.struct)
    peak = found.lowtide_judge(pointer, runs.ctypes.data, len(runs), ctypes.byref(seconds))
    return int(peak), seconds.value


class NativeTape:
    """A tape in C; see `tape.Tape`."""

    def __init__(self, facts: Facts, order: Sequence[int] | None, *, handle: int | None = None) -> None:
        found = library()
        assert found is not None, "there is no compiled search"
        self.facts, self.library = facts, found
        if handle is None:
            assert order is not None
            runs = np.array(order, dtype=np.int32)
            handle = found.lowtide_tape(ctypes.byref(facts.native.struct), runs.ctypes.data, len(runs))
        self.handle = handle

    def __del__(self) -> None:
        self.library.lowtide_free(self.handle)

    def copy(self) -> NativeTape:
        """The same tape once more."""
        return NativeTape(self.facts, None, handle=self.library.lowtide_copy(self.handle))

    def peak(self) -> int:
        """The largest resident bytes of any run."""
        return int(self.library.lowtide_peak(self.handle))

    @property
    def seconds(self) -> float:
        """The seconds of all runs."""
        return float(self.library.lowtide_seconds(self.handle))

    def order(self) -> list[int]:
        """The runs in order."""
        runs = np.empty(self.library.lowtide_order(self.handle, None), dtype=np.int32)
        self.library.lowtide_order(self.handle, runs.ctypes.data)
        order: list[int] = runs.tolist()
        return order

    @property
    def edits(self) -> int:
        """How many edits there were so far, those of the tapes it was copied from included."""
        return int(self.library.lowtide_edits(self.handle))

    def descend(
        self,
        budget: int,
        *,
        exponent: float = 1.0,
        tolerance: float = 0.1,
        limit: int | None = None,
        noise: float = 0.0,
        seed: int = 0,
    ) -> bool:
        """See `greedy.descend`; with noise each value's seconds count for up to so much more."""
        most = -1 if limit is None else limit
        return bool(self.library.lowtide_descend(self.handle, budget, exponent, tolerance, most, noise, seed))

    def ruin(self, start: float, end: float, *, share: float, seed: int) -> None:
        """Take a share of the repeated runs between two places of the order (0 to 1) away."""
        self.library.lowtide_ruin(self.handle, start, end, share, seed)

    def anneal(self, budget: int, *, steps: int, price: float, heat: tuple[float, float], seed: int) -> None:
        """Put single runs in and out at random, cooling down; the best plan under the budget stays."""
        self.library.lowtide_anneal(self.handle, budget, steps, price, *heat, seed)

    def prune(self, budget: int, *, limit: int | None = None) -> None:
        """See `greedy.prune`."""
        self.library.lowtide_prune(self.handle, budget, -1 if limit is None else limit)
