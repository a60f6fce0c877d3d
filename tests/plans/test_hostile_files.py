"""Files of strangers: what is wrong in them is told by its field, and nothing in them is obeyed."""

import json

import pytest

from graphs import random_graph
from lowtide.errors import FormatError
from lowtide.files.plain_text import plain
from lowtide.planner.frontiers import Frontier
from lowtide.plans.graph import Graph, Op, Value
from lowtide.plans.keep_all import keep_all
from lowtide.plans.order import first_order, with_drops
from lowtide.plans.planned_step import Plan, make_plan
from lowtide.plans.schedule import Run, Schedule
from lowtide.plans.simulator import simulate
from lowtide.report.page import page
from lowtide.report.text import text
from lowtide.solve import METHODS
from lowtide.solve.bound.method import bound_by_moments

GRAPH = random_graph(3, 6)
PLAN = make_plan(GRAPH, keep_all(GRAPH), method="keep_all", budget=10**9)
OBEYED = ["\x1b[2J\x1b[1;1H", "\r", "\n", "\u202e", "\u2066", "\u2028", "\x9b31m", "\x00", "\x07", "\ud800"]


def plan_data(**changes):
    return json.dumps({**PLAN.to_dict(), **changes})


@pytest.mark.parametrize("obeyed", OBEYED)
def test_what_a_terminal_obeys_is_shown(obeyed):
    shown = plain(f"a{obeyed}b")
    assert shown.isprintable()
    assert shown.encode()
    assert plain(shown) == shown
    assert plain("blocks.3.层 é \xa0") == "blocks.3.层 é \xa0"


def named(obeyed):
    """A graph file in which each text has what a terminal obeys."""
    data = GRAPH.to_dict()
    names = {value["name"] for value in data["values"]} | {op["name"] for op in data["ops"]}

    def bad(thing):
        if isinstance(thing, str):
            return thing + obeyed if thing in names else thing
        if isinstance(thing, (list, tuple)):
            return [bad(item) for item in thing]
        words = ("kind", "phase")
        return (
            {key: item if key in words else bad(item) for key, item in thing.items()}
            if isinstance(thing, dict)
            else thing
        )

    data = bad(data) | {"device": f"cpu{obeyed}", "prices": f"given{obeyed}", "fixed": {f"other{obeyed}": 3}}
    for op in data["ops"]:
        op |= {name: f"{name}{obeyed}" for name in ("module", "source", "target")}
    return data


@pytest.mark.parametrize("obeyed", OBEYED)
def test_names_of_a_file_reach_nobody_as_they_are(obeyed):
    graph = Graph.from_json(json.dumps(named(obeyed)))
    made = make_plan(graph, keep_all(graph), method=f"mine{obeyed}", notes=(f"note{obeyed}",))
    plan = Plan.from_json(made.to_json())
    for said in (str(plan), text(plan), page(plan), str(plan.graph), *plan.notes):
        assert plain(said, keep="\n") == said
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("obeyed", OBEYED)
@pytest.mark.parametrize("wrong", ["op", "field", "kind", "step", "key", "version", "lowtide"])
def test_names_in_errors_are_shown(obeyed, wrong):
    graph, plan = named(obeyed), PLAN.to_dict()
    if wrong == "op":
        graph["ops"][0]["reads"] = [f"nobody{obeyed}"]
    elif wrong == "kind":
        graph["ops"][0]["kind"] = obeyed
    elif wrong in ("version", "lowtide", "key"):
        graph[obeyed if wrong == "key" else wrong] = obeyed
    elif wrong == "step":
        plan["schedule"]["forward"][0] = ["run", obeyed]
    else:
        graph["values"][0][obeyed] = 1
    plan["graph"] = plan["graph"] if wrong == "step" else graph
    with pytest.raises(FormatError) as caught:
        Plan.from_json(json.dumps(plan))
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compiled", 0),
        ("compiled", 1),
        ("compiled", 10**400),
        ("budget", 10**400),
        ("budget", 1 << 63),
        ("bound", -1.0),
        ("bound", 1e9),
        ("bound", 10**400),
        ("notes", [1]),
        ("notes", [["nested"]]),
        ("notes", "text"),
        ("sketched", [None]),
        ("trimmed", [{}]),
        ("method", 3),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_the_field(field, value):
    with pytest.raises(FormatError, match=field):
        Plan.from_json(plan_data(**{field: value}))


@pytest.mark.parametrize("kind", [Graph, Plan, Schedule, Frontier])
def test_a_name_that_is_there_twice_is_refused(kind):
    with pytest.raises(FormatError, match="'version' is used twice"):
        kind.from_json('{"lowtide": "graph", "version": 1, "version": 1}')
    with pytest.raises(FormatError, match="'bytes' is used twice"):
        Graph.from_json(
            '{"lowtide": "graph", "version": 1, "values": [{"name": "x", "bytes": 1, "bytes": 0}]}'
        )


def two_ops(seconds, size=4):
    ops = (
        Op("up", ("x", "w"), ("a",), seconds),
        Op("loss", ("a",), ("y",), seconds),
        Op("back", ("t", "a"), ("g",), seconds, phase="backward"),
    )
    sizes = {
        "x": "input",
        "w": "parameter",
        "a": "activation",
        "y": "output",
        "t": "tangent",
        "g": "gradient",
    }
    return Graph(ops, tuple(Value(name, size, kind) for name, kind in sizes.items()))


@pytest.mark.parametrize("seconds", [0.0, 5e-324, 1e-310, 1e-301, 1e-290, 1e17])
@pytest.mark.parametrize("size", [0, 4, 1 << 57])
def test_seconds_and_bytes_at_their_limits_are_planned(seconds, size):
    graph = two_ops(seconds, size)
    for name, method in METHODS.items():
        if name != "exact":
            simulate(graph, method(graph, 0))
            simulate(graph, method(graph, 4 * size + 1))
    made = make_plan(graph, keep_all(graph), method="keep_all", budget=5 * size + 1).with_bound()
    assert bound_by_moments(graph, 6 * size) == made.graph.seconds
    assert str(made)
    assert text(made)
    assert page(made)


@pytest.mark.parametrize("seconds", [1e18, 1e308])
def test_seconds_without_an_end_are_refused(seconds):
    with pytest.raises(FormatError, match="seconds add up to"):
        two_ops(seconds)


def test_the_return_is_the_last_of_the_forward_for_every_method():
    """A forward op that no `return` waits for may stand anywhere in a file."""
    graph = two_ops(1.0)
    ops = (*graph.ops[:1], Op("return", ("a",), (), kind="pinned", target="return"), *graph.ops[1:])
    graph = graph.replace(ops=ops)
    forward, backward = first_order(graph)
    assert with_drops(graph, forward, backward).forward[-1] == Run("return")
    for name, method in METHODS.items():
        if name != "exact":
            simulate(graph, method(graph, 0))


def test_nothing_comes_after_the_return():
    graph = two_ops(1.0)
    end = Op("return", ("a",), ("end",), kind="pinned", target="return")
    values = (*graph.values, Value("end", 0))
    late = Op("loss", ("a", "end"), ("y",), 1.0)
    with pytest.raises(FormatError, match="'end' is written when the step returns"):
        Graph((graph.ops[0], end, late, graph.ops[2]), values)
    again = Op("return again", (), (), kind="pinned", target="return")
    with pytest.raises(FormatError, match="returns after another op"):
        Graph((graph.ops[0], end, again, *graph.ops[1:]), values)
