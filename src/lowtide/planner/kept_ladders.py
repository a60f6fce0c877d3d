"""Ladders on disk: a second process plans a step that an earlier one has searched in milliseconds.

Problem: the search is the longest stage of a small step's first plan, and a training script that is started
again asks for the same plan. What it found depends on the graph, its prices, the budget and the search alone.

Method: a file per graph and budget in the user's cache folder, named by a hash of these and of the sources of
the search, so that another version finds none. A file holds the plans' peaks and seconds and their orders of
runs, with a digest. One that is not whole, or says what cannot be, is left aside as if it were not there; a
plan that is taken from it goes through the simulator like any other.

Cost: some 100 kB for 200 ops, and a few milliseconds.

Limits: prices that are measured anew, and other bytes beside the step, make another graph. Only capped steps
ask here, as `OtherShapes` does for them: `lowtide.plan` searches anew in each process.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from contextlib import suppress
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..files.kept_data import is_kept, read_kept, write_kept
from ..plans.graph import Graph
from ..solve.search.ladder import Ladder, Rung

__all__ = ["read_ladder", "write_ladder"]

FOLDER = "ladders"
MOST_BYTES, MOST_RUNS = 1 << 24, 1 << 25
"""Of a file, and of the runs of all its plans: more than those of a step of 10^4 ops."""


def read_ladder(graph: Graph, budget: int) -> Ladder | None:
    """The plans that were found for a graph after descents to a budget; None where none are kept."""
    data = read_kept(FOLDER, _key(graph, budget), MOST_BYTES)
    with suppress(ValueError, KeyError, TypeError, zlib.error):
        return None if data is None else _read(data, runs_of=len(graph.ops))
    return None


def write_ladder(graph: Graph, budget: int, ladder: Ladder, *, anew: bool = True) -> None:
    """Keep them, in place of others if `anew`."""
    key = _key(graph, budget)
    if ladder.cut or (not anew and is_kept(FOLDER, key)):
        return
    data = _written(ladder)
    if len(data) <= MOST_BYTES:
        write_kept(FOLDER, key, data)


def _key(graph: Graph, budget: int) -> str:
    return f"{_version()}|{budget}|{graph.to_json()}"


@cache
def _version() -> str:
    """A hash of the sources that decide what a search finds."""
    digest = hashlib.sha256(np.__version__.encode())
    room = Path(__file__).parents[1] / "solve"
    for path in sorted(path for path in room.rglob("*") if path.suffix in (".py", ".c", ".h")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _written(ladder: Ladder) -> bytes:
    """A line of numbers, and the orders of runs."""
    rungs = [(rung.peak, rung.seconds.hex(), len(rung.order)) for rung in ladder]
    orders = np.concatenate([rung.order for rung in ladder]).astype("<i4").tobytes()
    return json.dumps(rungs).encode() + b"\n" + zlib.compress(orders, 1)


def _read(body: bytes, *, runs_of: int) -> Ladder:
    """The ladder of a file; raises ValueError where it is none."""
    line, _, packed = body.partition(b"\n")
    rungs = [(_count(peak), float.fromhex(seconds), _count(runs)) for peak, seconds, runs in json.loads(line)]
    ends = [0, *accumulate(runs for _, _, runs in rungs)]
    if not rungs or ends[-1] > MOST_RUNS:
        raise ValueError("it has no plans, or too long ones")
    unpacked = zlib.decompressobj().decompress(packed, 4 * ends[-1] + 1)
    if len(unpacked) != 4 * ends[-1]:
        raise ValueError("it has other orders than it says")
    orders = np.frombuffer(unpacked, dtype="<i4").astype(np.int32)
    if orders.size and not 0 <= orders.min() <= orders.max() <= runs_of:
        raise ValueError("it has runs of ops that there are not")
    for (peak, seconds, _), (more, less, _) in pairwise(rungs):
        if not (peak < more and seconds > less >= 0):
            raise ValueError("its plans are not by rising peaks and falling seconds")
    cuts = pairwise(ends)
    return Ladder(
        Rung(peak, seconds, orders[a:b]) for (peak, seconds, _), (a, b) in zip(rungs, cuts, strict=True)
    )


def _count(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no count")
    return number
