"""Random valid graphs: every method plans them or says why not, and C and Python agree with the simulator.

What comes out may be an error of Lowtide's that a user can read, and nothing else: no other exception, no
`ScheduleError` (a method made what the simulator refuses), no plan above the budget.
"""

from __future__ import annotations

from random import Random

from fuzz.random_graphs import random_valid_graph
from graphs import random_graph
from lowtide.errors import LowtideError, ScheduleError
from lowtide.planner.frontiers import frontier
from lowtide.planner.under_budget import plan_graph
from lowtide.plans.graph import Graph
from lowtide.plans.keep_all import keep_all
from lowtide.plans.order import first_order
from lowtide.plans.planned_step import Plan
from lowtide.plans.simulator import simulate
from lowtide.report.page import page
from lowtide.report.text import text
from lowtide.solve import METHODS
from lowtide.solve.search.build import library
from lowtide.solve.search.greedy import PlainTape
from lowtide.solve.search.native import NativeTape, judge
from lowtide.solve.search.tape import Facts
from short_search import short_search

BUDGETS = ("min", "20%", "50%", "80%", "100%")
SLOW = {"exact"}
"""Methods that take minutes for some graphs."""


def case(seed: int) -> None:
    """One graph through everything, another one through both twins of the search."""
    with short_search():
        _plans(seed)
    _twins(seed)


def _plans(seed: int) -> None:
    graph = random_valid_graph(seed)
    assert Graph.from_json(graph.to_json()) == graph
    chance = Random(seed)
    for method in sorted(METHODS.keys() - SLOW):
        plan = _planned(graph, chance.choice(BUDGETS), method)
        if plan is not None and method == "auto":
            _shown(plan.with_bound())
    if seed % 8 == 0:
        str(frontier(graph))


def _planned(graph: Graph, budget: str, method: str) -> Plan | None:
    try:
        plan = plan_graph(graph, budget, method=method)
    except ScheduleError:
        raise
    except LowtideError:
        return None
    assert plan.budget is None or plan.peak <= plan.budget
    assert simulate(graph.replace(fixed=plan.graph.fixed), plan.schedule) == plan.timeline
    return plan


def _shown(plan: Plan) -> None:
    assert text(plan)
    assert str(plan)
    assert page(plan)
    assert Plan.from_json(plan.to_json()) == plan


def _twins(seed: int) -> None:
    chance = Random(seed)
    graph = random_graph(seed, chance.randint(1, 25), takes=chance.random() < 0.5)
    facts = Facts(graph)
    base = facts.order(*first_order(graph))
    tapes: list[PlainTape | NativeTape] = [PlainTape(facts, base)]
    if library() is not None:
        tapes.append(NativeTape(facts, base))
    budget = int(simulate(graph, keep_all(graph)).peak * chance.uniform(0.2, 1.0))
    assert len({tape.peak() for tape in tapes}) == 1
    for tape in tapes:
        tape.descend(budget)
        tape.prune(max(budget, tape.peak()))
        done = simulate(graph, facts.schedule(tape.order()))
        assert tape.peak() == done.peak
        assert abs(tape.seconds - done.seconds) <= 1e-9 * max(done.seconds, 1.0)
        if library() is not None:
            assert judge(facts, tape.order())[0] == done.peak
