"""Files that were good once: each is read, or refused with an error of Lowtide's; prices are left aside.

Bytes are changed, cut and repeated; fields get values of other kinds, sizes that are none, names that a
terminal obeys. What was read all the same can be shown and planned.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import torch

from fuzz.random_graphs import random_valid_graph
from graphs import random_graph
from lowtide.errors import LowtideError
from lowtide.files.plain_text import plain
from lowtide.planner.frontiers import Frontier
from lowtide.planner.under_budget import plan_graph
from lowtide.plans.graph import Graph
from lowtide.plans.keep_all import keep_all
from lowtide.plans.planned_step import Plan, make_plan
from lowtide.plans.schedule import Schedule
from lowtide.plans.simulator import Timeline
from lowtide.prices import price_cache
from lowtide.prices.price_cache import PriceList
from lowtide.report.page import page
from lowtide.report.text import text

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**59, 2**63, 10**400, 0.5, 5e-324, 1e-301, 1e17, 1e308, -0.0),
    *(float("nan"), float("inf"), "", "x", "\x1b[2J", "\u202e", "\n", "\ud800", "层", "a" * 10_000),
    *([], {}, [[]], [None], {"": 0}, ["run", "x"], ["drop"], "graph", "pinned", "return"),
)
KINDS = (Graph, Plan, Schedule, Timeline, Frontier)
PRICES = {
    "lowtide": "prices",
    "version": 2,
    "prices": {"op": [1e-3, 8, [[64, [4, 1], 0, None, ""], None]], "other": [None, 0, None]},
}


def case(seed: int) -> None:
    """One file of each kind, spoilt."""
    chance = Random(seed)
    graph = random_graph(seed, chance.randint(0, 6)) if chance.random() < 0.5 else random_valid_graph(seed)
    kept = make_plan(graph, keep_all(graph), method="keep_all", budget=2**50, notes=("as it is",))
    made = (graph, kept, kept.schedule, kept.timeline, Frontier((kept,)))
    for kind, good in zip(KINDS, made, strict=True):
        _read(kind, _spoilt(chance, json.loads(good.to_json())))
    _read_prices(_spoilt(chance, json.loads(json.dumps(PRICES))))


def _spoilt(chance: Random, data: Any) -> bytes:
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        _change(chance, data)
    written = json.dumps(data).encode()
    return _cut(chance, written) if chance.random() < 0.3 else written


def _change(chance: Random, data: Any) -> None:
    """Put something odd somewhere, take something away, or have it twice."""
    places = list(_places(data))
    if not places:
        return
    holder, key = chance.choice(places)
    way = chance.random()
    if way < 0.6:
        holder[key] = deepcopy(chance.choice(ODD))
    elif way < 0.75:
        del holder[key]
    elif way < 0.9:
        other, name = chance.choice(places)
        if name in other if isinstance(other, dict) else name < len(other):
            holder[key] = deepcopy(other[name])  # it may be what it is put into
    elif isinstance(holder, list):
        holder.insert(key, deepcopy(holder[key]))
    else:
        holder[chance.choice(("", "name", "\x1b", "bytes"))] = deepcopy(chance.choice(ODD))


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    for key in keys:
        yield data, key
        yield from _places(data[key])


def _cut(chance: Random, written: bytes) -> bytes:
    start, end = sorted(chance.randrange(len(written) + 1) for _ in range(2))
    new = chance.choice(
        (b"", b"[" * 10_000, b"\xff\xfe", b"1e999", bytes([chance.randrange(256)]), b'"', b"{")
    )
    return written[:start] + new + written[chance.choice((start, end)) :]


def _read(kind: Any, data: bytes) -> None:
    try:
        with _file(data) as path:
            load = getattr(kind, "load", None)
            found = load(path) if load else kind.from_json(data.decode("utf-8", "surrogateescape"))
    except LowtideError as error:
        _told(str(error))
        return
    if kind in (Graph, Plan):
        _used(found)


def _told(error: str) -> None:
    assert plain(error) == error, "an error has what a terminal obeys"


def _used(found: Graph | Plan) -> None:
    try:
        plan = found if isinstance(found, Plan) else plan_graph(found, "min", method="sqrt_segments")
        for said in (str(plan), text(plan), page(plan), *plan.notes):
            assert plain(said, keep="\n") == said
        assert type(plan).from_json(plan.to_json()) == plan
    except LowtideError:
        pass


@contextmanager
def _file(data: bytes) -> Iterator[Path]:
    handle, name = tempfile.mkstemp()
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        yield Path(name)
    finally:
        os.unlink(name)


def _read_prices(data: bytes) -> None:
    """Nothing is raised, and what is read are prices."""
    known = PriceList.load(torch.device("cpu"))
    price_cache._say_not_believed.cache_clear()
    assert known.path is not None
    known.path.write_bytes(data)
    known.path.chmod(0o600)
    try:
        for price in PriceList.load(torch.device("cpu")).prices.values():
            assert price.seconds is None or 0 <= price.seconds <= price_cache.MOST_SECONDS
            assert 0 <= price.workspace <= price_cache.MOST_BYTES
    finally:
        known.path.unlink()
