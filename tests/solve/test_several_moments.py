"""The bound from several moments in whole numbers: against all orders, all columns, prices of any kind."""

from __future__ import annotations

import sys
from itertools import product
from math import inf
from random import Random

import pytest

from any_order_oracle import tiny_cases
from graphs import cnn, random_graph, transformer
from lowtide.plans.graph import Graph
from lowtide.plans.keep_all import keep_all
from lowtide.plans.simulator import simulate
from lowtide.solve import auto
from lowtide.solve.bound import lower_bound
from lowtide.solve.bound.method import bound_by_moments
from lowtide.solve.bound.moments import RequiredOps
from lowtide.solve.bound.programme import Programme, Row, of_moments
from lowtide.solve.bound.rounding import rounded
from lowtide.solve.bound.several_moments import bound_by_programmes, least_of
from lowtide.solve.bound.whole_numbers import BranchAndCut, proven
from short_search import short_search

ROUNDING = 1 + 1e-9
NO_LIMIT = 10**9


def random_programme(seed: int, columns: int = 8) -> Programme:
    """Rows that say "one of these", "this needs that", and one of bytes."""
    rng = Random(seed)
    programme = Programme()
    for _ in range(columns):
        programme.column(cost=rng.randrange(1 << 50, 1 << 56))
    for _ in range(columns):
        some = rng.sample(range(columns), 3)
        programme.add({j: rng.choice([-1, -1, 1]) for j in some}, rng.choice([-1, 0, 0]))
    sizes = [rng.choice([3, 4, 7, 70, 1000]) for _ in range(columns)]
    programme.budgets.append(len(programme.rows))
    programme.add(dict(enumerate(sizes)), sum(sizes) * rng.randrange(20, 60) // 100)
    return programme


def keeps(rows: list[Row], point: tuple[int, ...]) -> bool:
    return all(sum(a * point[j] for j, a in row.factors.items()) <= row.most for row in rows)


def all_points(programme: Programme) -> list[tuple[int, ...]]:
    points = product((0, 1), repeat=len(programme.cost))
    return [point for point in points if keeps(programme.rows, point)]


def cost_of(programme: Programme, point: tuple[int, ...]) -> int:
    return sum(c * x for c, x in zip(programme.cost, point, strict=True))


def comparable(step: RequiredOps, count: int) -> list[int]:
    """Backward ops of which each needs the one before."""
    found: list[int] = []
    for index, op in enumerate(step.ops):
        if op.phase == "backward" and (not found or step.depending_on(found[-1])[index]):
            found.append(index)
    return found[:count]


def test_a_rounding_keeps_every_whole_point():
    said = 0
    for seed in range(30):
        rng = Random(seed)
        row = Row({j: rng.randrange(-9, 30) or 1 for j in range(6)}, rng.randrange(5, 60))
        points = [point for point in product((0, 1), repeat=6) if keeps([row], point)]
        for divisor in (2, 3, 7, 11, 29):
            cut = rounded(row, divisor, {j for j in range(6) if rng.random() < 0.5})
            said += cut is not None
            assert cut is None or all(keeps([cut], point) for point in points)
    assert said > 50


def test_prices_of_any_kind_prove_nothing_that_is_wrong():
    for seed in range(20):
        programme, rng = random_programme(seed), Random(seed)
        low, high = [0] * 8, [1] * 8
        least = min((cost_of(programme, point) for point in all_points(programme)), default=inf)
        for size in (0, 1, 1 << 30, 1 << 53, 1 << 60):
            prices = [rng.randrange(size + 1) for _ in programme.rows]
            assert proven(programme.rows, prices, programme.cost, low, high) <= least
            if least < inf:
                assert proven(programme.rows, prices, [0] * 8, low, high) <= 0


def test_what_is_settled_keeps_every_point():
    fixed = impossible = 0
    for seed in range(40):
        programme = random_programme(seed)
        points, settled = all_points(programme), programme.settled()
        if settled is None:
            impossible += 1
            assert not points
            continue
        less, paid = settled
        fixed += len(less.cost) < 8
        costs = sorted(cost_of(programme, point) for point in points)
        # A column that no row speaks of is free in both.
        assert sorted(paid + cost_of(less, point) for point in all_points(less)) == costs
    assert fixed > 5
    assert impossible > 2


def test_branch_and_cut_ends_at_the_least_cost():
    pytest.importorskip("highspy")
    nothing = split = 0
    for seed in range(60):
        programme = random_programme(seed)
        least = min((cost_of(programme, point) for point in all_points(programme)), default=None)
        search = BranchAndCut(programme, NO_LIMIT)
        root = search.bound
        assert least is None or root <= least
        search.cut()
        assert least is None or root <= search.bound <= least
        search.split()
        nothing += least is None
        assert (search.bound is None) == (least is None)
        if least is not None:
            assert search.bound <= least <= search.bound + (1 << 40)  # of 1 << 59
            split += search.bound > root + (1 << 41)
    assert nothing > 5
    assert split > 8


def test_stopped_at_any_time_it_is_a_bound():
    pytest.importorskip("highspy")
    for seed in range(12):
        programme = random_programme(seed, columns=10)
        least = min((cost_of(programme, point) for point in all_points(programme)), default=inf)
        for work in (0, 1, 300, 1_000, 3_000, 10_000):
            search = BranchAndCut(programme, work)
            search.cut()
            search.split()
            assert search.bound is None or search.bound <= least
            assert search.bound is not None or least == inf


@pytest.mark.parametrize("lie", [[-1e29], [-1e308], [float("nan")], [-1e12], [], [-3.0, 7.0]])
def test_prices_that_are_wrong_leave_a_valid_bound(lie, monkeypatch):
    pytest.importorskip("highspy")
    from lowtide.solve.bound.whole_numbers import Relaxation

    honest = Relaxation.prices
    monkeypatch.setattr(
        Relaxation, "prices", lambda self, duals: honest(self, (lie * len(duals))[: len(duals)])
    )
    for seed in range(6):
        programme = random_programme(seed)
        least = min((cost_of(programme, point) for point in all_points(programme)), default=inf)
        search = BranchAndCut(programme, 20_000)
        search.cut()
        search.split()
        assert (search.bound is None and least == inf) or search.bound <= least


def check(graph: Graph, budget: int, best: float | None) -> bool:
    """Whether several moments say more than one; never more than is true."""
    step = RequiredOps(graph)
    once = sum(step.units)
    choices = [comparable(step, count) for count in (1, 2, 3)]
    found = least_of(step, budget, choices, NO_LIMIT)
    if found is None:
        assert best is None
        return False
    seconds = step.once * (1 + max(found - once, 0) / (1 << 59))
    assert best is None or seconds <= best * ROUNDING
    return best is not None and seconds > bound_by_moments(graph, budget) * ROUNDING


@pytest.mark.slow
def test_never_above_the_optimum_over_all_orders():
    pytest.importorskip("highspy")
    tried = closer = 0
    for _, graph, budget, best in tiny_cases(50):
        tried += best is not None
        closer += check(graph, budget, best)
        assert bound_by_programmes(graph, budget) <= (inf if best is None else best * ROUNDING)
    assert tried > 40
    assert closer > 2


@pytest.mark.slow
def test_never_above_a_schedule_at_its_own_peak():
    pytest.importorskip("highspy")
    graphs = [random_graph(seed, 5 + seed, takes=seed % 3 == 0) for seed in range(5)]
    for graph in (*graphs, cnn(3), transformer(1)):
        top = simulate(graph, keep_all(graph)).peak
        for share in (30, 60):
            with short_search():  # any schedule will do
                found = simulate(graph, auto(graph, top * share // 100))
            check(graph, found.peak, found.seconds)
            assert bound_by_moments(graph, found.peak) <= lower_bound(graph, found.peak) * ROUNDING
            assert lower_bound(graph, found.peak) <= found.seconds * ROUNDING


def test_what_stays_of_a_first_run_is_there_when_it_begins():
    step = RequiredOps(transformer(2))
    start = next(
        i for i, op in enumerate(step.ops) if op.phase == "backward" and op.reads and step.held_bytes(op)
    )
    programme = of_moments(step, 1 << 40, [start])
    moment = programme.rows[programme.budgets[1]]
    assert moment.most <= (1 << 40) - step.held_bytes(step.ops[start])


def test_without_highspy_or_in_large_graphs_one_moment_is_the_bound(monkeypatch):
    graph = cnn(2)
    budget = simulate(graph, keep_all(graph)).peak * 6 // 10
    monkeypatch.setattr("lowtide.solve.bound.tightest.bound_by_orders", lambda graph, budget: 0.0)
    with monkeypatch.context() as absent:
        absent.setitem(sys.modules, "highspy", None)
        assert lower_bound(graph, budget) == bound_by_moments(graph, budget)
    monkeypatch.setattr("lowtide.solve.bound.several_moments.MOST_OPS", len(graph.ops) - 1)
    assert lower_bound(graph, budget) == bound_by_moments(graph, budget)
