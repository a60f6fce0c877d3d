"""What was found for one shape of a step is put on its others: it fits and is fast, with few searches."""

import sys
from dataclasses import replace

import pytest

from graphs import chain, cnn, random_graph, transformer, with_updates
from lowtide.planner import other_shapes
from lowtide.planner.other_shapes import OtherShapes
from lowtide.planner.under_budget import plan_graph
from lowtide.plans.keep_all import keep_all
from lowtide.plans.simulator import simulate
from lowtide.solve.auto import auto
from lowtide.solve.search import search


@pytest.fixture(autouse=True)
def _no_ladders_of_other_tests(monkeypatch):
    monkeypatch.setattr(sys.modules["lowtide.solve.auto"], "_remembered", {})


def resized(graph, share, *, suffix=""):
    """The step with activations of other sizes: what grows with a batch does, parameters do not."""
    kinds = ("activation", "input", "output", "tangent")

    def named(names):
        return tuple(name + suffix for name in names)

    return graph.replace(
        values=tuple(
            replace(
                value,
                name=value.name + suffix,
                bytes=int(value.bytes * share) if value.kind in kinds else value.bytes,
            )
            for value in graph.values
        ),
        ops=tuple(
            replace(
                op,
                name=op.name + suffix,
                reads=named(op.reads),
                writes=named(op.writes),
                takes=named(op.takes),
                updates=named(op.updates),
                seconds=op.seconds * (0.1 + 0.9 * share),
            )
            for op in graph.ops
        ),
    )


def peak(graph):
    return simulate(graph, keep_all(graph)).peak


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param(cnn(4), marks=pytest.mark.slow),
        transformer(2),
        pytest.param(random_graph(5, 14, takes=True), marks=pytest.mark.slow),
        pytest.param(with_updates(transformer(1)), marks=pytest.mark.slow),
    ],
    ids=["cnn", "transformer", "overwriting", "updating"],
)
def test_one_search_serves_other_sizes_at_hardly_more_time(graph):
    found = OtherShapes()
    least = simulate(graph, auto(graph, 0)).peak
    share = (peak(graph) + least) / 2 / peak(graph)
    found(graph, int(share * peak(graph)))
    for size in (1.2, 0.95, 0.9):
        other = resized(graph, size)
        budget = int(share * peak(other))
        timeline = simulate(other, found(other, budget))
        assert timeline.peak <= budget
        assert timeline.seconds <= 1.03 * simulate(other, auto(other, budget)).seconds
    assert found.searches == 1


def test_a_shape_gets_no_slower_plan_than_it_needs():
    """What the smaller step does not have to recompute is not recomputed, down to nothing."""
    graph, found = transformer(2), OtherShapes()
    budget = int(0.7 * peak(graph))
    extra = [simulate(graph, found(graph, budget)).again]
    for size in (0.9, 0.8, 0.7, 0.6, 0.4):
        other = resized(graph, size)
        extra.append(simulate(other, found(other, budget)).again)
    assert extra == sorted(extra, reverse=True)
    assert extra[-1] == 0
    assert found.searches == 1


def test_a_shape_that_fits_is_not_searched(monkeypatch):
    monkeypatch.setattr(search.Search, "run", None)
    graph, found = transformer(1), OtherShapes()
    assert found(graph, peak(graph)) == keep_all(graph)
    assert found.searches == 0


def test_it_is_searched_where_nothing_fits_and_where_much_is_recomputed_far_from_what_is_known():
    graph, found = transformer(2), OtherShapes()
    found(graph, int(0.7 * peak(graph)))
    assert found.searches == 1
    half = resized(graph, 0.5)
    least = simulate(half, auto(half, 0))
    assert least.extra > 0.15
    assert simulate(half, found(half, least.peak)).peak <= least.peak
    assert found.searches == 2
    near = resized(graph, 0.49)
    timeline = simulate(near, found(near, least.peak))
    assert timeline.peak <= least.peak
    assert timeline.extra > 0.15
    assert found.searches == 2
    assert simulate(near, found(near, 0)).peak == simulate(near, auto(near, 0)).peak
    assert found.searches == 3


def test_names_make_no_difference_and_structure_does():
    graph, found = cnn(4), OtherShapes()
    found(graph, int(0.7 * peak(graph)))
    renamed = resized(graph, 0.9, suffix="_1")
    assert renamed.structure == graph.structure
    budget = int(0.7 * peak(renamed))
    assert simulate(renamed, found(renamed, budget)).peak <= budget
    assert found.searches == 1
    pinned = graph.replace(ops=tuple(replace(op, kind="pinned") for op in graph.ops))
    assert len({g.structure for g in (graph, pinned, cnn(5), with_updates(graph))}) == 4


def test_the_plan_of_a_capped_step_is_judged_and_named_as_any():
    graph, found = cnn(4), OtherShapes()
    plan_graph(graph, "70%", search=found)
    other = resized(graph, 0.8)
    plan = plan_graph(other, "70%", search=found)
    assert plan.method == "auto"
    assert plan.peak <= plan.budget == int(0.7 * peak(other))
    assert plan.timeline == simulate(other, plan.schedule)
    assert found.searches == 1
    plan_graph(other, "70%", method="chain", search=found)
    assert found.searches == 1


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(other_shapes, "STEPS", 3)
    monkeypatch.setattr(other_shapes, "SHAPES", 2)
    found = OtherShapes()
    for length in range(2, 7):
        found(chain(length), 0)
    assert len(found.known) == 3
    for size in range(2, 6):
        found(chain(3, size=size), 0)
    assert len(found.known[chain(3).structure]) == 2
