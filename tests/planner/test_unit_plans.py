"""The plans of a unit: fewer bytes saved, smaller peaks or less time, each judged on the graph as it is."""

import pytest

from lowtide.planner.unit_plans import choice_of, saved_by, unit_plans
from lowtide.plans.graph import Graph, Op, Value
from lowtide.plans.simulator import simulate


@pytest.fixture
def graph():
    """Three layers whose backward needs what each of them read."""
    values = [Value("x", 8, "input"), *(Value(f"h{n}", 8) for n in (1, 2)), Value("y", 8, "output")]
    values += [Value("ty", 8, "tangent"), Value("g2", 8), Value("g1", 8), Value("gx", 8, "gradient")]
    forward = [
        Op(f"f{n}", (a,), (b,), seconds=1.0) for n, a, b in ((1, "x", "h1"), (2, "h1", "h2"), (3, "h2", "y"))
    ]
    backward = [
        Op(f"b{n}", (t, h), (g,), seconds=1.0, phase="backward")
        for n, t, h, g in ((3, "ty", "h2", "g2"), (2, "g2", "h1", "g1"), (1, "g1", "x", "gx"))
    ]
    return Graph((*forward, *backward), tuple(values), boundary=7, fixed={"other": 5})


def test_the_first_keeps_everything_and_outputs_do_not_count_as_saved(graph):
    first = unit_plans(graph)[0]
    assert first.extra == 0
    assert saved_by(first) == 16


def test_some_plan_saves_nothing(graph):
    assert min(map(saved_by, unit_plans(graph))) == 0


def test_plans_are_judged_without_what_is_beside_them(graph):
    for plan in unit_plans(graph):
        assert plan.graph.fixed == {}
        assert plan.timeline == simulate(plan.graph, plan.schedule)


def test_none_beats_another(graph):
    found = [choice_of(plan) for plan in unit_plans(graph)[1:]]
    for one in found:
        assert not any(o != one and all(a <= b for a, b in zip(o, one, strict=True)) for o in found)
