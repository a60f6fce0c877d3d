from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import chain, cnn, random_graph, transformer
from lowtide.errors import BudgetError, BudgetTooSmall, FormatError, LowtideError
from lowtide.planner.frontiers import Frontier, frontier, spread
from lowtide.plans.graph import Graph, Op, Value
from lowtide.plans.keep_all import keep_all
from lowtide.plans.planned_step import Plan, make_plan
from lowtide.plans.simulator import simulate
from lowtide.solve.auto import auto

GRAPHS = {"chain": chain(16, 8), "cnn": cnn(2), "transformer": transformer(1), "random": random_graph(1, 14)}
EMPTY = Graph((), ())


@cache
def whole_frontier(name: str) -> Frontier:
    return frontier(GRAPHS[name])


@pytest.fixture
def of_chain() -> Frontier:
    """What several tests read of; it is made once."""
    return whole_frontier("chain")


def dominates(one: Plan, other: Plan) -> bool:
    better = one.peak < other.peak or one.seconds < other.seconds
    return one.peak <= other.peak and one.seconds <= other.seconds and better


def check(found: Frontier, graph: Graph) -> None:
    vanilla, smallest = simulate(graph, keep_all(graph)), simulate(graph, auto(graph, 0))
    assert not any(dominates(one, other) for one in found for other in found)
    assert [plan.peak for plan in found] == sorted({plan.peak for plan in found}, reverse=True)
    assert found[0].peak <= vanilla.peak
    assert found[0].seconds == pytest.approx(vanilla.seconds)
    assert found[-1].peak <= smallest.peak
    for plan in found:
        assert plan.graph is graph
        assert plan.timeline == simulate(graph, plan.schedule)


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_plans_are_judged_undominated_and_go_from_end_to_end(name: str) -> None:
    found = whole_frontier(name)
    check(found, GRAPHS[name])
    assert len(found) >= 5


@pytest.mark.slow
@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 7))
def test_any_graph_has_a_frontier_that_comes_back_from_its_file(seed: int, size: int) -> None:
    graph = random_graph(seed, size)
    found = frontier(graph)
    check(found, graph)
    assert Frontier.from_json(found.to_json()) == found


def test_a_graph_of_nothing_has_one_plan() -> None:
    (plan,) = frontier(EMPTY)
    assert (plan.peak, plan.seconds) == (0, 0.0)
    assert "Frontier of 1 plan for" in str(frontier(EMPTY))


def test_a_plan_that_costs_no_time_replaces_keeping_everything() -> None:
    values = [Value("x", 9, "input"), Value("a", 50), Value("b", 50), Value("c", 50), Value("y", 1, "output")]
    values += [Value("t", 1, "tangent"), Value("g", 1, "gradient"), Value("w", 1, "parameter")]
    ops = [
        Op("a", ("x", "w"), ("a",), 0.0),
        Op("b", ("a",), ("b",), 1.0),
        Op("c", ("b",), ("c",), 1.0),
        Op("y", ("c",), ("y",), 1.0),
        Op("back", ("a", "t"), ("g",), 1.0, phase="backward"),
    ]
    graph = Graph(tuple(ops), tuple(values))
    found = frontier(graph)
    assert found[0].peak < simulate(graph, keep_all(graph)).peak == found.vanilla
    assert found.best("100%").peak == found[0].peak


@pytest.mark.slow
@pytest.mark.parametrize("points", range(2, 9))
@pytest.mark.parametrize("name", GRAPHS)
def test_points_thin_it_and_keep_both_ends(name: str, points: int) -> None:
    # Both now: budgets that other tests ask for in between leave more plans on the ladder that is remembered.
    whole, thin = frontier(GRAPHS[name]), frontier(GRAPHS[name], points=points)
    assert len(thin) == min(points, len(whole))
    assert (thin[0], thin[-1]) == (whole[0], whole[-1])
    assert {plan.peak for plan in thin} <= {plan.peak for plan in whole}


def test_points_are_spread_by_peak_not_by_index() -> None:
    plans = [make_plan(EMPTY.replace(boundary=size), keep_all(EMPTY), method="keep_all") for size in PEAKS]
    assert [plan.peak for plan in spread(plans, 3)] == [100, 49, 0]
    assert [plan.peak for plan in spread(plans, 6)] == [100, 98, 49, 2, 1, 0]
    assert spread(plans, 100) == tuple(plans)


PEAKS = (100, 99, 98, 49, 2, 1, 0)


@pytest.mark.parametrize("points", [1, 0, -3, 2.5, "4", True])
def test_a_frontier_of_less_than_two_points_is_refused(points: Any) -> None:
    with pytest.raises(LowtideError, match=r"points=.*>= 2"):
        frontier(GRAPHS["chain"], points=points)


def test_what_is_no_graph_is_refused() -> None:
    with pytest.raises(LowtideError, match="not a str"):
        frontier("g.json")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_plan_hands_on_its_graph_and_its_notes(of_chain: Frontier) -> None:
    plan = make_plan(GRAPHS["chain"], keep_all(GRAPHS["chain"]), method="keep_all", notes=("on paper",))
    found = frontier(plan)
    assert [point.schedule for point in found] == [point.schedule for point in of_chain]
    assert all(point.notes == ("on paper",) for point in found)
    assert str(found).endswith("note: on paper")
    assert Frontier.from_json(found.to_json()) == found


def test_progress_reaches_the_end() -> None:
    seen: list[float] = []
    frontier(transformer(1, size=4096), progress=seen.append)
    assert seen
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert all(0.0 <= share <= 1.0 for share in seen)


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_best_is_the_fastest_that_fits(name: str) -> None:
    found = whole_frontier(name)
    floor = found[-1].peak
    for budget in [*range(floor, found.vanilla + 2, max((found.vanilla - floor) // 40, 1)), found.vanilla]:
        best = found.best(budget)
        assert best.budget == budget
        assert best.seconds == min(plan.seconds for plan in found if plan.peak <= budget)
        assert best.peak <= budget


def test_budgets_are_read_as_people_write_them(of_chain: Frontier) -> None:
    assert of_chain.best("50%").budget == of_chain.vanilla // 2
    assert of_chain.best("50%").peak <= of_chain.vanilla / 2
    assert of_chain.best("1GiB").schedule == keep_all(of_chain.graph)
    assert of_chain.best("min") == of_chain[-1]
    for bad in ("half", 1.5, -1, "0%"):
        with pytest.raises(BudgetError):
            of_chain.best(bad)  # type: ignore[arg-type]
    with pytest.raises(BudgetError, match=r"free.*50%"):
        of_chain.best("free")


def test_a_budget_below_the_floor_says_what_is_possible(of_chain: Frontier) -> None:
    floor = of_chain[-1].peak
    assert of_chain.best(floor).peak == floor
    with pytest.raises(BudgetTooSmall, match=f"smallest feasible peak.*{floor} bytes.*activations") as caught:
        of_chain.best(floor - 1)
    assert (caught.value.budget, caught.value.smallest) == (floor - 1, floor)


def test_the_table_shows_the_ends_and_not_too_much_between() -> None:
    found = whole_frontier("transformer")
    head, columns, *rows = str(found).splitlines()
    assert f"Frontier of {len(found)} plans" in head
    assert columns.split() == ["peak", "of", "vanilla", "extra", "time"]
    assert rows[0].split()[-2:] == ["100.0%", "+0.0%"]
    assert rows[-1].split()[-1] == f"{found[-1].extra:+.1%}"
    assert len(rows) == min(len(found), 20)
    assert ("of them shown" in head) == (len(found) > 20)


def test_the_file_holds_the_graph_once(tmp_path: Path, of_chain: Frontier) -> None:
    path = of_chain.save(tmp_path / "f.json")
    assert Frontier.load(path) == of_chain
    assert [entry.name for entry in tmp_path.iterdir()] == ["f.json"]
    assert path.read_text().count('"graph"') == 2  # the field, and the header inside it
    loaded = Frontier.load(path)
    assert all(plan.graph is loaded.graph for plan in loaded)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda data: data.update(lowtide="plan"), '"lowtide"'),
        (lambda data: data.update(version=2), '"version"'),
        (lambda data: data.update(points=[]), '"points": unknown'),
        (lambda data: data.pop("graph"), "graph"),
        (lambda data: data.update(notes="none"), '"notes"'),
        (lambda data: data.pop("plans"), '"plans"'),
        (lambda data: data.update(plans=[]), "at least one plan"),
        (lambda data: data["plans"].reverse(), r"plans\[1\].*trade"),
        (lambda data: data["plans"].append(data["plans"][-1]), "trade"),
        (lambda data: data["plans"][1].pop("peak"), r"plans\[1\].*fields.*peak"),
        (lambda data: data["plans"][1].update(bytes=1), r"plans\[1\].*fields"),
        (lambda data: data["plans"][1].update(peak=3), r"plans\[1\]\.peak.*3 claimed"),
        (lambda data: data["plans"][1].update(seconds="1"), r"plans\[1\]\.seconds"),
        (lambda data: data["plans"][1].update(extra=None), r"plans\[1\]\.extra"),
        (lambda data: data["plans"][1].update(method=3), r'plans\[1\].*"method"'),
        (lambda data: data["plans"][1].update(schedule=None), r"plans\[1\].*schedule"),
        (lambda data: data["plans"][1]["schedule"].update(forward=[]), r"plans\[1\]: step 0"),
        (lambda data: data.update(plans=[3]), r"plans\[0\]: expected an object"),
    ],
)
def test_a_malformed_file_is_refused_by_the_field(spoil: Any, said: str, of_chain: Frontier) -> None:
    data = json.loads(of_chain.to_json())
    spoil(data)
    with pytest.raises(FormatError, match=said):
        Frontier.from_json(json.dumps(data))
