"""The greedy descent at native speed: `c/descent.c`, called through ctypes.

Problem: a descent makes some 10^5 small edits of a tape, each a few array operations. In Python the
interpreter takes nearly all of the time: 10 to 25 μs per edit, against 1 μs in C.

Method: the arrays of a graph are handed over as they are. Without the library (`build` says when) the Python
twins (`tape`, `moves`, `greedy`) take the same moves in the same order, and the search does less. Where C has
no memory for a tape, `NoMemory` is raised: the tape may only be forgotten, and the search begins again with
the twins.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from .build import library
from .tape import Facts

__all__ = ["NativeTape", "NoMemory", "judge", "library"]

NO_MEMORY = -1
"""As in `c/pool.h`."""


class NoMemory(MemoryError):  # noqa: N818  # named for what is the matter, as the public errors are
    """The compiled search could not go on for lack of memory."""


def done(code: int) -> int:
    """What a call gave, unless it could not end."""
    if code == NO_MEMORY:
        raise NoMemory("there is no memory for the compiled search of a plan")
    return code


_LISTS = ("read_at", "reads", "write_at", "writes", "take_at", "takes", "until_at", "untils")
_ORDERS = ("before_at", "befores", "after_at", "afters")


class _Facts(ctypes.Structure):
    _fields_ = (
        ("ops", ctypes.c_int32),
        ("values", ctypes.c_int32),
        ("returning", ctypes.c_int32),
        ("fixed", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in (*_LISTS, *_ORDERS)),
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
            ("before", facts.before),
            ("after", facts.after),
        ):
            starts = np.concatenate(([0], np.cumsum([len(values) for values in many])))
            self.arrays[f"{one}_at"] = starts.astype(np.int32)
            self.arrays[f"{one}s"] = np.array([v for values in many for v in values], dtype=np.int32)
        pointers = {name: array.ctypes.data for name, array in self.arrays.items()}
        self.struct = _Facts(len(facts.own), len(facts.size), facts.returning, facts.fixed, **pointers)


def judge(facts: Facts, order: Sequence[int] | npt.NDArray[np.int32]) -> tuple[int, float]:
    """The peak and the seconds of an order of runs, as its tape would have them."""
    found = library()
    assert found is not None, "there is no compiled search"
    runs, seconds = np.array(order, dtype=np.int32), ctypes.c_double()
    pointer = ctypes.byref(facts.native.struct)
    peak = found.lowtide_judge(pointer, runs.ctypes.data, len(runs), ctypes.byref(seconds))
    return int(done(peak)), seconds.value


class NativeTape:
    """A tape in C; see `tape.Tape`. Descents and clean-ups give up at the moment `until`."""

    def __init__(
        self,
        facts: Facts,
        order: Sequence[int] | npt.NDArray[np.int32] | None,
        *,
        handle: int | None = None,
        until: float = inf,
    ) -> None:
        found = library()
        assert found is not None, "there is no compiled search"
        self.facts, self.library = facts, found
        self.handle = handle
        if handle is None:
            assert order is not None
            runs = np.array(order, dtype=np.int32)
            made = found.lowtide_tape(ctypes.byref(facts.native.struct), runs.ctypes.data, len(runs))
            self.handle = _there(made)
            found.lowtide_until(self.handle, until)

    def __del__(self) -> None:
        if (handle := getattr(self, "handle", None)) is not None:
            self.library.lowtide_free(handle)

    def copy(self) -> NativeTape:
        """The same tape once more."""
        return NativeTape(self.facts, None, handle=_there(self.library.lowtide_copy(self.handle)))

    def peak(self) -> int:
        """The largest resident bytes of any run."""
        return int(self.library.lowtide_peak(self.handle))

    @property
    def seconds(self) -> float:
        """The seconds of all runs."""
        return float(self.library.lowtide_seconds(self.handle))

    def in_order(self) -> npt.NDArray[np.int32]:
        """The runs in order, as an array."""
        runs = np.empty(self.library.lowtide_order(self.handle, None), dtype=np.int32)
        self.library.lowtide_order(self.handle, runs.ctypes.data)
        return runs

    def order(self) -> list[int]:
        """The runs in order."""
        order: list[int] = self.in_order().tolist()
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
        found = self.library.lowtide_descend(self.handle, budget, exponent, tolerance, most, noise, seed)
        return bool(done(found))

    def ruin(self, start: float, end: float, *, share: float, seed: int) -> None:
        """Take a share of the repeated runs between two places of the order (0 to 1) away."""
        done(self.library.lowtide_ruin(self.handle, start, end, share, seed))

    def anneal(
        self,
        budget: int,
        *,
        steps: int,
        price: float,
        heat: tuple[float, float],
        shifts: float = 0.0,
        seed: int,
    ) -> None:
        """Put single runs in and out at random, cooling down; the best plan under the budget stays.

        A share `shifts` of the steps moves runs to other places, first ones included.
        """
        done(self.library.lowtide_anneal(self.handle, budget, steps, price, *heat, shifts, seed))

    def prune(self, budget: int, *, limit: int | None = None) -> None:
        """See `greedy.prune`."""
        done(self.library.lowtide_prune(self.handle, budget, -1 if limit is None else limit))


def _there(handle: int | None) -> int:
    """A tape, unless there was no memory for it."""
    return done(NO_MEMORY if handle is None else handle)
