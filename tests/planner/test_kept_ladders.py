"""What a search found is kept on disk, so that a second process does not search."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from graphs import chain
from lowtide.files import kept_data
from lowtide.planner import kept_ladders, other_shapes
from lowtide.planner.other_shapes import OtherShapes
from lowtide.planner.under_budget import plan_graph
from lowtide.plans.graph import Graph
from lowtide.plans.planned_step import Plan
from lowtide.solve.search.build import library
from lowtide.solve.search.ladder import Ladder, Rung

auto = sys.modules["lowtide.solve.auto"]  # the name leads to the function

GRAPH = chain(8)
BUDGET = plan_graph(GRAPH, None).peak * 3 // 4


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ladders are kept, which is empty at first."""
    library()  # built once, in the folder of all tests
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / kept_ladders.FOLDER


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """Plans in a process that has searched nothing yet; `searched` counts its searches."""

    def plan(graph: Graph = GRAPH, budget: int | str = BUDGET) -> Plan:
        with monkeypatch.context() as new:
            new.setattr(auto, "_remembered", {})
            new.setattr(auto, "_recalled", {})
            found = plan_graph(graph, budget, search=OtherShapes())
            searches.append(bool(auto._remembered))
            return found

    searches: list[bool] = []
    plan.searched = searches  # type: ignore[attr-defined]
    return plan


@pytest.mark.parametrize("budget", [BUDGET, "min"])
def test_a_second_process_has_the_plan_of_the_first_without_a_search(folder, process, budget):
    plan = process(budget=budget)
    again = process(budget=budget)
    assert process.searched == [True, False]
    assert (again, again.notes) == (plan, plan.notes)  # those on cliffs, too
    assert len(list(folder.iterdir())) == 1


def test_another_budget_or_price_is_searched(folder, process):
    process()
    process(budget=BUDGET - 1)
    first, *others = GRAPH.ops
    process(GRAPH.replace(ops=(replace(first, seconds=2 * first.seconds), *others)))
    assert process.searched == [True, True, True]
    assert len(list(folder.iterdir())) == 3


def torn(data: bytes) -> bytes:
    return data[:-7]


def changed(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def rewritten(change: Callable[[list[list[object]]], object]) -> Callable[[bytes], bytes]:
    """A file whose digest is right, and what it says is not."""

    def write(data: bytes) -> bytes:
        line, _, orders = data[32:].partition(b"\n")
        rungs = json.loads(line)
        change(rungs)
        body = json.dumps(rungs).encode() + b"\n" + orders
        return hashlib.sha256(body).digest() + body

    return write


def of_no_op(data: bytes) -> bytes:
    line, _, orders = data[32:].partition(b"\n")
    runs = np.frombuffer(zlib.decompress(orders), dtype="<i4").copy()
    runs[0] = 10**6
    body = line + b"\n" + zlib.compress(runs.tobytes())
    return hashlib.sha256(body).digest() + body


def smaller(rungs: list[list[object]]) -> None:
    for rung in rungs:
        rung[0] = int(rung[0]) // 2


FALSE = {
    "empty": lambda _: b"",
    "torn": torn,
    "changed": changed,
    "runs of no op": of_no_op,
    "no plans": rewritten(lambda rungs: rungs.clear()),
    "not by peaks": rewritten(lambda rungs: rungs.reverse()),
    "longer orders": rewritten(lambda rungs: rungs[0].__setitem__(2, 2**40)),
    "no numbers": rewritten(lambda rungs: rungs[0].__setitem__(1, "fast")),
    "other peaks": rewritten(smaller),
}


def test_a_file_that_cannot_be_believed_or_that_others_may_write_is_as_if_it_were_not_there(folder, process):
    plan = process()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    for name, false in FALSE.items():
        path.write_bytes(false(whole))
        assert process().schedule == plan.schedule, name
        assert path.read_bytes() == whole, name
    path.chmod(0o666)
    process()
    assert process.searched == [True] * (2 + len(FALSE))


def test_without_a_folder_it_is_searched_each_time(folder, process, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", "no/absolute/path")
    assert process() == process()
    assert process.searched == [True, True]


def test_what_was_found_in_too_little_time_is_not_kept(folder):
    ladder = Ladder([Rung(1, 1.0, np.zeros(1, dtype=np.int32))])
    ladder.cut = 1.0
    kept_ladders.write_ladder(GRAPH, 1, ladder)
    assert not folder.exists()
    ladder.cut = 0.0
    kept_ladders.write_ladder(GRAPH, 1, ladder)
    assert [*kept_ladders.read_ladder(GRAPH, 1)] == [*ladder]


def test_the_files_that_were_used_last_stay(folder, monkeypatch):
    monkeypatch.setattr(kept_data, "MOST_FILES", 2)
    ladder = Ladder([Rung(1, 1.0, np.zeros(1, dtype=np.int32))])
    for budget in (1, 2):
        kept_ladders.write_ladder(GRAPH, budget, ladder)
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    assert kept_ladders.read_ladder(GRAPH, 1)
    kept_ladders.write_ladder(GRAPH, 3, ladder)
    assert [bool(kept_ladders.read_ladder(GRAPH, budget)) for budget in (1, 2, 3)] == [True, False, True]


def test_it_is_what_capped_steps_ask():
    assert other_shapes.read_ladder is kept_ladders.read_ladder
