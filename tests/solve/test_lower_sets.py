"""Lower sets: the pure search against brute force over all sequences, and the schedules made from it."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graphs import chain, cnn, random_graph, transformer
from lowtide.errors import LowtideError
from lowtide.plans.graph import Graph, Op, Value
from lowtide.plans.keep_all import keep_all
from lowtide.plans.order import first_order, with_drops
from lowtide.plans.schedule import Run
from lowtide.plans.simulator import simulate
from lowtide.solve.lower_sets import lower_set_orders, lower_sets
from lowtide.solve.lower_sets import tables as tables_module
from lowtide.solve.lower_sets.bounds import ends, least_cached
from lowtide.solve.lower_sets.contraction import contract
from lowtide.solve.lower_sets.family import (
    ForwardDag,
    TooManyLowerSets,
    all_lower_sets,
    ancestor_closures,
    boundary,
    members,
    sequence_bytes,
    sequence_overhead,
)
from lowtide.solve.lower_sets.pareto import pareto, unbeaten
from lowtide.solve.lower_sets.search import best_sequence, measure, smallest_budget
from lowtide.solve.lower_sets.tables import tables

seeds = st.integers(0, 10_000)


def random_dag(seed: int, n: int, density: float = 0.4) -> ForwardDag:
    rng = Random(seed)
    before = tuple(tuple(u for u in range(v) if rng.random() < density) for v in range(n))
    sizes = tuple(rng.choice([0, 1, 2, 3, 7, 20]) for _ in range(n))
    return ForwardDag(before, sizes, tuple(float(rng.choice([0, 1, 1, 10])) for _ in range(n)))


def every_dag(n: int) -> list[ForwardDag]:
    """All graphs of n nodes in a fixed order, with bytes and seconds that tell the nodes apart."""
    pairs = list(combinations(range(n), 2))
    dags = []
    for bits in range(1 << len(pairs)):
        edges = {pair for at, pair in enumerate(pairs) if bits >> at & 1}
        before = tuple(tuple(u for u in range(v) if (u, v) in edges) for v in range(n))
        rng = Random(bits)
        sizes = tuple(rng.randint(0, 6) for _ in range(n))
        dags.append(ForwardDag(before, sizes, tuple(float(rng.randint(0, 9)) for _ in range(n))))
    return dags


# The definitions once more, with plain sets of nodes.


def lower_sets_by_definition(dag: ForwardDag) -> list[frozenset[int]]:
    nodes = range(len(dag.before))
    subsets = (frozenset(s) for size in range(len(nodes) + 1) for s in combinations(nodes, size))
    return [s for s in subsets if all(u in s for v in s for u in dag.before[v])]


def edge_of(dag: ForwardDag, lower: frozenset[int]) -> set[int]:
    return {u for v in range(len(dag.before)) if v not in lower for u in dag.before[v] if u in lower}


def all_costs(dag: ForwardDag, family: list[frozenset[int]]) -> list[tuple[int, float, float]]:
    """Peak, overhead and cached seconds of every increasing sequence from the empty set to all nodes."""
    whole = frozenset(range(len(dag.before)))
    edges = {lower: edge_of(dag, lower) for lower in family}
    costs = []

    def grow(last: frozenset[int], cached: set[int], peak: int, again: float) -> None:
        for lower in family:
            if last < lower:
                front = {v for v in whole - lower if set(dag.before[v]) & lower}
                beside = {u for v in front for u in dag.before[v]} - lower
                parts = (cached, lower - last, lower - last, front, beside)
                high = max(peak, sum(dag.bytes[v] for part in parts for v in part))
                if lower == whole:
                    costs.append((high, again, sum(dag.seconds[v] for v in cached)))
                else:
                    lost = sum(dag.seconds[v] for v in lower - last - edges[lower])
                    grow(lower, cached | edges[lower], high, again + lost)

    grow(frozenset(), set(), 0, 0.0)
    return costs


def as_bits(nodes: frozenset[int]) -> int:
    return sum(1 << node for node in nodes)


def check_search(dag: ForwardDag, family: list[frozenset[int]]) -> None:
    """The search finds what brute force finds, at every budget that makes a difference."""
    costs = all_costs(dag, family)
    table = tables(dag, [as_bits(nodes) for nodes in family])
    least = min(peak for peak, _, _ in costs)
    found = smallest_budget(table)
    assert found.bytes == least
    assert best_sequence(table, least - 1) is None
    for budget in sorted({peak for peak, _, _ in costs}):
        fitting = [cost for cost in costs if cost[0] <= budget]
        fast = best_sequence(table, budget)
        coarse = best_sequence(table, budget, centric="memory")
        for one in (fast, coarse):
            assert one.complete
            assert one.bytes == sequence_bytes(dag, one.sequence) <= budget
            assert one.overhead == sequence_overhead(dag, one.sequence)
            assert one == measure(table, one.sequence)
        assert fast.overhead == min(again for _, again, _ in fitting)
        cached = 0
        for lower in coarse.sequence:
            cached |= boundary(dag, lower)
        assert dag.total_seconds(cached) == min(kept for _, _, kept in fitting)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_all_small_graphs_are_solved_as_by_brute_force(n):
    for dag in every_dag(n):
        check_search(dag, lower_sets_by_definition(dag))


@pytest.mark.parametrize("part", range(4))
def test_all_graphs_of_four_nodes_are_solved_as_by_brute_force(part):
    for dag in every_dag(4)[part::4]:
        check_search(dag, lower_sets_by_definition(dag))


@pytest.mark.slow
@settings(max_examples=40)
@given(seeds, st.integers(5, 7))
def test_random_graphs_are_solved_as_by_brute_force(seed, n):
    dag = random_dag(seed, n, density=0.6)
    check_search(dag, lower_sets_by_definition(dag))


@pytest.mark.slow
@settings(max_examples=40)
@given(seeds, st.integers(4, 8), st.floats(0.1, 0.8))
@example(541, 6, 0.15625)  # the only feasible sequence is tight: a price of bytes without end
def test_the_approximate_family_is_searched_as_by_brute_force(seed, n, density):
    dag = random_dag(seed, n, density)
    family = [frozenset(members(nodes)) for nodes in ancestor_closures(dag)]
    assert set(family) <= set(lower_sets_by_definition(dag))
    check_search(dag, family)


@settings(max_examples=60)
@given(seeds, st.integers(0, 9), st.floats(0, 0.9))
def test_all_lower_sets_are_listed_once_smaller_ones_first(seed, n, density):
    dag = random_dag(seed, n, density)
    found = all_lower_sets(dag)
    assert sorted(found) == sorted(map(as_bits, lower_sets_by_definition(dag)))
    assert [nodes.bit_count() for nodes in found] == sorted(nodes.bit_count() for nodes in found)
    for nodes in found:
        assert set(members(boundary(dag, nodes))) == edge_of(dag, frozenset(members(nodes)))


def blocks(count: int, lengths: tuple[int, ...], seed: int = 0) -> ForwardDag:
    """Blocks of parallel branches between a fork and a join, as in GoogLeNet."""
    rng = Random(seed)
    before: list[tuple[int, ...]] = [()]
    for _ in range(count):
        fork, ends_ = len(before) - 1, []
        for length in lengths:
            last = fork
            for _ in range(length):
                before.append((last,))
                last = len(before) - 1
            ends_.append(last)
        before.append(tuple(ends_))
    sizes = tuple(rng.randint(1, 30) for _ in before)
    return ForwardDag(tuple(before), sizes, tuple(rng.random() for _ in before))


def plain_search(dag: ForwardDag, sets: list[int], budget: int, centric: str) -> float | None:
    """The recurrence of the paper word for word, on dictionaries of labels."""
    tail = {lower: sequence_bytes(dag, (lower,)) - 2 * dag.total_bytes(lower) for lower in sets}
    labels: dict[int, dict[float, int]] = {lower: {} for lower in sets}
    labels[0] = {0.0: 0}
    for place, target in enumerate(sets):
        edge = boundary(dag, target)
        found: dict[float, int] = {}
        for source in sets[:place]:
            if source & ~target or source == target:
                continue
            own = 2 * dag.total_bytes(target & ~source) + tail[target]
            new_bytes, new_seconds = dag.total_bytes(edge & ~source), dag.total_seconds(edge & ~source)
            if target == sets[-1] and centric == "time":
                new_seconds = dag.total_seconds(target & ~source)
            for kept, cached in labels[source].items():
                if cached + own <= budget:
                    key = round(kept + new_seconds, 9)
                    found[key] = min(found.get(key, cached + new_bytes), cached + new_bytes)
        labels[target] = found or labels[target]
    final = labels[sets[-1]]
    if not final:
        return None
    return dag.total_seconds(dag.everything) - max(final) if centric == "time" else min(final)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("centric", ["time", "memory"])
def test_parallel_branches_are_solved_as_by_the_plain_recurrence(seed, centric):
    dag = blocks(3, (1, 2, 2), seed)
    sets = all_lower_sets(dag)
    table = tables(dag, sets)
    assert 0 < sum(len(near.sources) for near in table.near) < len(sets) ** 2 // 4
    least = smallest_budget(table).bytes
    for budget in (least - 1, least, int(1.15 * least), int(1.5 * least)):
        wanted = plain_search(dag, sets, budget, centric)
        found = best_sequence(table, budget, centric=centric)
        assert (found is None) == (wanted is None)
        if found is not None:
            assert (found.overhead if centric == "time" else found.kept) == pytest.approx(wanted, abs=1e-6)


@settings(max_examples=30)
@given(seeds, st.integers(4, 8), st.sampled_from(["time", "memory"]), st.floats(0, 3))
def test_the_bounds_hold_for_the_best_sequence(seed, n, centric, price):
    dag = random_dag(seed, n)
    table = tables(dag, all_lower_sets(dag))
    budget = int(1.2 * smallest_budget(table).bytes)
    least = least_cached(table, budget)
    bounds = ends(table, budget, least, coarse=centric == "memory", price=price)
    best = best_sequence(table, budget, centric=centric)
    cost = best.overhead if centric == "time" else best.kept
    assert bounds.whole(budget) <= cost + 1e-9
    cached = 0
    for lower in best.sequence[:-1]:
        cached |= boundary(dag, lower)
        place = table.position[lower]
        assert least.cached[place] <= dag.total_bytes(cached) <= bounds.most[place]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)), max_size=700))
def test_labels_that_leave_a_pool_are_beaten_by_one_that_stays(labels):
    value, size, third = np.array(labels, dtype=np.int64).reshape(-1, 3).T
    kept = {labels[at] for at in unbeaten(value.astype(float), size, third)}
    for label in labels:
        assert any(v >= label[0] and s <= label[1] and t <= label[2] for v, s, t in kept)
    steps = [labels[at] for at in pareto(value.astype(float), size)]
    unbeaten_pairs = {
        (v, s)
        for v, s, _ in labels
        if not any((w >= v and r <= s) and (w, r) != (v, s) for w, r, _ in labels)
    }
    assert {(v, s) for v, s, _ in steps} == unbeaten_pairs


def test_tens_of_thousands_of_lower_sets_are_listed_and_a_limit_is_kept():
    dag = blocks(9, (4, 8, 8, 6))
    assert len(all_lower_sets(dag)) == 9 * 5 * 9 * 9 * 7 + 2
    with pytest.raises(TooManyLowerSets, match="more than 1000 lower sets"):
        all_lower_sets(dag, limit=1000)


def test_a_malformed_forward_graph_is_refused_by_its_node():
    with pytest.raises(LowtideError, match=r"node 0 is computed from \[1\]"):
        ForwardDag(((1,), ()), (1, 1), (1.0, 1.0))
    with pytest.raises(LowtideError, match="node 1 has negative"):
        ForwardDag(((), ()), (1, -1), (1.0, 1.0))
    with pytest.raises(LowtideError, match="1 and 2 for 2 nodes"):
        ForwardDag(((), ()), (1,), (1.0, 1.0))


class Interrupt:
    """A progress callback that presses ctrl-C after some calls."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, share: float) -> None:
        assert 0 <= share <= 1
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [0, 1, 3, 6])
def test_an_interrupted_search_closes_what_it_has(after):
    dag = blocks(4, (2, 3, 3))
    table = tables(dag, all_lower_sets(dag))
    budget = int(1.3 * smallest_budget(table).bytes)
    best = best_sequence(table, budget)
    found = best_sequence(table, budget, progress=Interrupt(after))
    assert not found.complete
    assert found.bytes == sequence_bytes(dag, found.sequence) <= budget
    assert found.sequence[-1] == dag.everything
    assert found.overhead == pytest.approx(sequence_overhead(dag, found.sequence))
    assert found.overhead >= best.overhead
    partly = smallest_budget(table, progress=Interrupt(after))
    assert not partly.complete
    assert partly.bytes >= smallest_budget(table).bytes


# On captured graphs.


@pytest.mark.slow
@settings(max_examples=25)
@given(
    seed=seeds,
    n=st.integers(1, 20),
    share=st.floats(0, 1.1),
    family=st.sampled_from(["exact", "approximate"]),
)
def test_every_schedule_is_accepted_and_runs_nothing_three_times(seed, n, share, family):
    graph = random_graph(seed, n)
    top = simulate(graph, keep_all(graph))
    budget = int(top.peak * share)
    schedule = lower_sets(graph, budget, family=family)
    timeline = simulate(graph, schedule)
    assert timeline.peak <= top.peak
    if budget >= top.peak:
        assert schedule == keep_all(graph)
    runs = Counter(step.op for step in schedule.steps if isinstance(step, Run))
    assert all(count <= (1 if graph.op[name].kind == "pinned" else 2) for name, count in runs.items())


def test_a_graph_without_ops_and_one_without_backward_are_kept():
    empty = chain(1).replace(ops=(), values=())
    assert lower_sets(empty, 0) == keep_all(empty)
    values = (Value("x", 4, "input"), Value("a", 4), Value("y", 4, "output"))
    alone = Graph((Op("a", ("x",), ("a",)), Op("y", ("a",), ("y",))), values)
    assert lower_sets(alone, 0) == keep_all(alone)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["exact", "approximate"])
def test_a_chain_takes_about_twice_the_root_for_at_most_one_more_forward(family):
    graph = chain(64)
    timeline = simulate(graph, lower_sets(graph, 0, family=family))
    assert timeline.peak <= 2 * 8 + 6
    assert timeline.again <= 64


@pytest.mark.slow
@pytest.mark.parametrize("make", [cnn, transformer])
def test_the_fastest_that_fits_is_taken(make):
    graph = make(5)
    top = simulate(graph, keep_all(graph))
    floor = simulate(graph, lower_sets(graph, 0))
    assert floor.peak < 0.75 * top.peak
    last = floor.seconds
    for share in (0.2, 0.5, 0.8):
        budget = int(floor.peak + share * (top.peak - floor.peak))
        some = simulate(graph, lower_sets(graph, budget))
        assert some.peak <= budget
        assert some.seconds <= last + 1e-9
        last = some.seconds
    assert top.seconds < floor.seconds


@pytest.mark.slow
def test_orders_go_from_keeping_everything_down_to_the_floor():
    graph = cnn(5)
    orders = list(lower_set_orders(graph))
    assert orders[0] == first_order(graph)
    assert 10 <= len(orders) <= 60
    peaks = [simulate(graph, with_drops(graph, *order)).peak for order in orders]
    assert min(peaks) <= 1.02 * simulate(graph, lower_sets(graph, 0)).peak
    assert max(peaks) == peaks[0]


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 2, 10, 40])
def test_an_interrupt_keeps_the_best_schedule_so_far(after):
    graph = transformer(6)
    top = simulate(graph, keep_all(graph)).peak
    done = simulate(graph, lower_sets(graph, 0)).peak
    assert done <= simulate(graph, lower_sets(graph, 0, progress=Interrupt(after))).peak <= top
    if after == 40:
        assert simulate(graph, lower_sets(graph, 0, progress=Interrupt(after))).peak < top


@pytest.mark.slow
def test_a_low_limit_falls_back_and_still_plans():
    graph = cnn(5)
    top = simulate(graph, keep_all(graph)).peak
    for limit in (1, 12, 1000):
        assert simulate(graph, lower_sets(graph, 0, limit=limit)).peak < 0.75 * top


def test_unknown_choices_are_named_with_the_known_ones():
    graph = chain(4)
    with pytest.raises(LowtideError, match="family 'all' is not known; choose one of exact, approximate"):
        lower_sets(graph, 0, family="all")
    with pytest.raises(LowtideError, match="'both ways' is not known; choose one of time, memory, both"):
        lower_sets(graph, 0, centric="both ways")


@settings(max_examples=40)
@given(seeds, st.integers(1, 20), st.booleans())
def test_a_contraction_holds_each_op_at_most_once_and_keeps_the_order(seed, n, runs):
    graph = random_graph(seed, n)
    forward, backward = first_order(graph)
    parts = contract(graph, forward, backward, runs=runs)
    node = {name: number for number, names in enumerate(parts.ops) for name in names}
    assert len(node) == sum(map(len, parts.ops)) <= len(forward)
    for name, number in node.items():
        for value in graph.op[name].reads:
            source = graph.writer.get(value)
            if source is not None and node.get(source.name, number) != number:
                assert node[source.name] in parts.dag.before[number]


def test_a_contraction_joins_what_the_backward_does_not_read_with_its_reader():
    graph = cnn(2)
    parts = contract(graph, *first_order(graph))
    assert ("bn0.0", "relu0.0") in parts.ops
    assert ("conv0.0",) in parts.ops
    relu = parts.ops.index(("bn0.0", "relu0.0"))
    sizes = [graph.value[name].bytes for name in ("relu0.0", "bn0.0.1", "bn0.0.2")]
    assert parts.dag.bytes[relu] == sum(sizes)


def test_a_chain_of_many_small_ops_is_not_left_out_whole():
    graph = chain(2100)
    assert len(contract(graph, *first_order(graph)).dag.before) > 1000


def test_tables_that_would_fill_the_memory_are_refused(monkeypatch):
    monkeypatch.setattr(tables_module, "FLAG_LIMIT", 1000)
    with pytest.raises(TooManyLowerSets, match=r"take too much memory; choose another method"):
        lower_sets(chain(50), 0)
