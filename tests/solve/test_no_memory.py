"""Where the compiled search has no memory it says so: no crash, no leak, and the plan is made in Python."""

import ctypes
import gc
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from graphs import cnn, random_graph, transformer
from lowtide.plans.keep_all import keep_all
from lowtide.plans.order import first_order
from lowtide.plans.simulator import simulate
from lowtide.solve import auto
from lowtide.solve.quick import quick, smallest
from lowtide.solve.search import build, native, search
from lowtide.solve.search.native import NativeTape, NoMemory, judge
from lowtide.solve.search.tape import Facts
from lowtide.solve.waste import _flow, without_waste

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")
HEADER = Path(__file__).with_name("failing_memory.h")


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    """The compiled search with allocations that fail when they are told to."""
    made = tmp_path_factory.mktemp("failing") / "failing.so"
    command = ["cc", *build.FLAGS, "-include", HEADER, "-o", made, build.SOURCES / "descent.c", "-lm"]
    subprocess.run(command, check=True)
    return build._bind(ctypes.CDLL(str(made)))


@pytest.fixture
def memory(failing, monkeypatch):
    for module in (native, search, sys.modules["lowtide.solve.waste"]):
        monkeypatch.setattr(module, "library", lambda: failing)
    monkeypatch.setattr(sys.modules["lowtide.solve.auto"], "_remembered", {})
    search._say_no_memory.cache_clear()
    yield failing
    failing.fail_after(-1)


def work(graph, facts, order):
    """All that C does for a search, small."""
    tape = NativeTape(facts, order)
    budget = tape.peak() * 2 // 3
    tape.descend(budget)
    copied = tape.copy()
    copied.ruin(0.1, 0.9, share=0.5, seed=1)
    copied.descend(budget, noise=0.5, seed=1)
    copied.anneal(budget, steps=300, price=1e-3, heat=(1.0, 0.1), seed=1)
    copied.prune(budget)
    return tape.order(), copied.order(), judge(facts, copied.order())


@pytest.mark.parametrize(
    "graph",
    [pytest.param(random_graph(5, 12), marks=pytest.mark.slow), random_graph(7, 12, takes=True), cnn(1)],
)
def test_each_allocation_may_fail(memory, graph):
    facts = Facts(graph)
    order = facts.order(*first_order(graph))
    found, before = work(graph, facts, order), memory.live_blocks()
    for allocation in count():
        memory.fail_after(allocation)
        try:
            assert work(graph, facts, order) == found
            break
        except NoMemory:
            pass
    gc.collect()
    assert memory.live_blocks() == before == 0
    assert allocation > 40


def test_runs_in_vain_are_found_without_memory(memory):
    graph = transformer(1)
    forward, backward = first_order(graph)
    twice = [*forward, *forward]
    _flow(graph)
    found = without_waste(graph, twice, backward)
    for allocation in range(3):
        memory.fail_after(allocation)
        assert without_waste(graph, twice, backward) == found


@pytest.mark.parametrize(
    "allocation", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in (100, 3000))]
)
def test_a_plan_is_made_in_python_then(memory, caplog_lowtide, allocation):
    graph = cnn(2)
    budget = simulate(graph, keep_all(graph)).peak * 4 // 5
    memory.fail_after(allocation)
    assert simulate(graph, auto(graph, budget)).peak <= budget
    assert quick(graph, budget).peak <= budget
    assert smallest(graph).peak <= budget
    assert len([message for message in caplog_lowtide if "no memory" in message]) == 1
