from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from graphs import cnn, random_graph, transformer
from lowtide.errors import FormatError
from lowtide.planner.frontiers import Frontier
from lowtide.plans.graph import Graph
from lowtide.plans.keep_all import keep_all
from lowtide.plans.planned_step import Plan, make_plan
from lowtide.plans.schedule import Schedule
from lowtide.plans.simulator import Timeline

GRAPHS = [random_graph(seed, 8) for seed in range(5)] + [cnn(2), transformer(1)]
GRAPHS += [random_graph(seed, 8, takes=True) for seed in range(3)]


def planned(graph: Graph) -> Plan:
    return make_plan(graph, keep_all(graph), method="keep_all", budget=10**9, notes=("as measured",))


PLAN = planned(random_graph(3, 4))
PARTS: list[Graph | Schedule | Timeline | Plan] = [PLAN.graph, PLAN.schedule, PLAN.timeline, PLAN]

NO_FILES = {
    "empty": "",
    "null": "null",
    "list": "[]",
    "number": "3",
    "word": '"graph"',
    "object": "{}",
    "python": "{'lowtide': 'graph'}",
    "deep": "[" * 10**5,
    "long number": "1" * 5000,
}


def graph_data() -> dict[str, Any]:
    """A small graph file as plain data, to be spoilt."""
    return {
        "lowtide": "graph",
        "version": 1,
        "values": [
            {"name": "x", "bytes": 4, "kind": "input"},
            {"name": "w", "bytes": 8, "kind": "parameter"},
            {"name": "a", "bytes": 4},
            {"name": "y", "bytes": 4, "kind": "output"},
            {"name": "t", "bytes": 4, "kind": "tangent"},
            {"name": "g", "bytes": 8, "kind": "gradient"},
        ],
        "ops": [
            {"name": "mul", "reads": ["x", "w"], "writes": ["a"], "seconds": 1},
            {"name": "exp", "reads": ["a"], "writes": ["y"]},
            {"name": "back", "reads": ["t", "a"], "writes": ["g"], "phase": "backward"},
        ],
    }


def spoil(data: Any, path: str, new: Any) -> Any:
    """The data with the field at `path` ("ops.0.reads") set, or removed where `new` is ..."""
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    at = data
    for part in way:
        at = at[part]
    if new is ...:
        del at[last]
    else:
        at[last] = new
    return data


@pytest.mark.parametrize("graph", GRAPHS)
def test_round_trips(graph: Graph) -> None:
    plan = planned(graph)
    assert Graph.from_json(graph.to_json()) == graph
    assert Graph.from_json(graph.to_json()).fingerprint == graph.fingerprint
    assert Schedule.from_json(plan.schedule.to_json()) == plan.schedule
    assert Timeline.from_json(plan.timeline.to_json()) == plan.timeline
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()


def test_no_budget_and_a_bound_round_trip() -> None:
    graph = GRAPHS[0]
    plan = Plan(graph, keep_all(graph), planned(graph).timeline, "exact", None, bound=1.25)
    assert Plan.from_json(plan.to_json()) == plan


def test_names_of_any_script_round_trip_through_a_file(tmp_path: Path) -> None:
    data = spoil(graph_data(), "ops.0.module", 'köln.层[0]."quoted"\n')
    plan = planned(Graph.from_dict(data))
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "weights.pt"
    place.write_bytes(b"PK\x03\x04\xff\xfe")
    for kind in (Plan, Frontier):
        with pytest.raises(FormatError, match="not UTF-8"):
            kind.load(place)


def test_a_link_and_a_pipe_stay_what_they_are(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(tmp_path / "plan.json")
    assert PLAN.save(link) == link
    assert link.is_symlink()
    assert Plan.load(tmp_path / "plan.json") == PLAN
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(pipe.read_text)
        PLAN.save(pipe)
    assert pipe.is_fifo()
    assert Plan.from_json(read.result()) == PLAN


def test_defaults_are_not_written() -> None:
    written = Graph.from_dict(graph_data()).to_dict()
    assert written["values"][2] == {"name": "a", "bytes": 4}
    assert written["ops"][1] == {"name": "exp", "reads": ("a",), "writes": ("y",)}


def test_takes_are_part_of_the_file_and_of_the_fingerprint_only_where_there_are_some() -> None:
    plain = Graph.from_dict(graph_data())
    taking = Graph.from_dict(spoil(graph_data(), "ops.1.takes", ["a"]))
    assert taking.op["exp"].takes == ("a",)
    assert taking.to_dict()["ops"][1]["takes"] == ("a",)
    assert Graph.from_json(taking.to_json()) == taking
    assert taking.fingerprint != plain.fingerprint
    assert taking.replace(plain_in_place=False).fingerprint == plain.fingerprint
    assert Graph.from_dict(spoil(graph_data(), "ops.1.takes", [])).to_json() == plain.to_json()
    # As it was before there were takes: plans that were saved then still belong to their graphs.
    assert plain.fingerprint.startswith("72d75c2508ee49df")


def test_whether_keeping_everything_writes_in_place_is_written_only_where_it_does_not() -> None:
    eager = Graph.from_dict(spoil(spoil(graph_data(), "ops.1.takes", ["a"]), "plain_in_place", False))
    compiled = eager.replace(plain_in_place=True)
    assert not keep_all(eager).in_place
    assert keep_all(compiled).in_place
    for graph in (eager, compiled):
        plan = planned(graph)
        assert Plan.from_json(plan.to_json()) == plan
    assert "plain_in_place" not in compiled.to_dict()
    assert "in_place" not in keep_all(compiled).to_dict()
    assert keep_all(eager).to_dict()["in_place"] is False
    for path, data in (("plain_in_place", graph_data()), ("in_place", keep_all(eager).to_dict())):
        kind = Graph if path == "plain_in_place" else Schedule
        with pytest.raises(FormatError, match=f'"{path}": expected true or false, found 1'):
            kind.from_dict(spoil(data, path, 1))


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_a_file_cut_short_anywhere_is_refused(part: Any) -> None:
    text = part.to_json().rstrip()
    cuts = {*range(0, len(text), max(len(text) // 150, 1)), *range(len(text) - 40, len(text))}
    for cut in sorted(cuts):
        with pytest.raises(FormatError, match="cut short"):
            type(part).from_json(text[:cut])


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
@pytest.mark.parametrize("text", NO_FILES.values(), ids=NO_FILES.keys())
def test_what_is_no_such_file_is_refused(part: Any, text: str) -> None:
    with pytest.raises(FormatError):
        type(part).from_json(text)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_header_and_fields_are_checked(part: Any) -> None:
    read, data = type(part).from_dict, json.loads(part.to_json())
    for wrong in (0, 2, -1, "1", 1.0, True, None):
        with pytest.raises(FormatError, match='"version"'):
            read({**data, "version": wrong})
    for wrong in ("plans", None, 1):
        with pytest.raises(FormatError, match='"lowtide"'):
            read({**data, "lowtide": wrong})
    with pytest.raises(FormatError, match='"budgett": unknown'):
        read({**data, "budgett": 1})


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_a_file_of_another_noun_is_refused(part: Any) -> None:
    for other in PARTS:
        if other is not part:
            with pytest.raises(FormatError, match='"lowtide"'):
                type(part).from_json(other.to_json())


BAD_GRAPHS = [
    ("values", ..., '"values"'),
    ("values", {}, '"values"'),
    ("ops", ..., '"ops"'),
    ("ops", "mul", '"ops"'),
    ("device", 3, '"device"'),
    ("prices", None, '"prices"'),
    ("fixed", [], '"fixed"'),
    ("fixed", {"adam": -1}, '"adam"'),
    ("fixed", {"adam": 1.5}, '"adam"'),
    ("boundary", -1, '"boundary"'),
    ("boundary", True, '"boundary"'),
    ("values.0", "x", r"values\[0\]"),
    ("values.2.name", ..., r"values\[2\]\.name: missing"),
    ("values.2.name", 5, r"values\[2\]\.name"),
    ("values.2.name", "x", r"values\[2\] \(x\): the name is used twice"),
    ("values.2.bytes", ..., r"values\[2\]\.bytes: missing"),
    ("values.2.bytes", "4", r"values\[2\]\.bytes"),
    ("values.2.bytes", 4.0, r"values\[2\]\.bytes"),
    ("values.2.bytes", True, r"values\[2\]\.bytes"),
    ("values.2.bytes", -4, r"values\[2\] \(a\)\.bytes"),
    ("values.2.bytes", 2**60, r"bytes add up to 2\^60 or more, which no device has"),
    ("ops.1.workspace", 10**400, r"bytes add up to 2\^60 or more"),
    ("values.2.kind", "weight", r"values\[2\] \(a\)\.kind"),
    ("values.2.kind", 1, r"values\[2\]\.kind"),
    ("values.2.kind", "input", r"ops\[0\] \(mul\)\.writes: 'a' is given"),
    ("values.5.kind", "output", "value g: an output must be written in the forward"),
    ("values.2.held", "yes", r"values\[2\]\.held"),
    ("values.2.held", 1, r"values\[2\]\.held"),
    ("values.2.size", 4, r"values\[2\]\.size: unknown field"),
    ("ops.1", ["exp"], r"ops\[1\]"),
    ("ops.1.name", ..., r"ops\[1\]\.name: missing"),
    ("ops.1.name", "mul", r"ops\[1\] \(mul\): the name is used twice"),
    ("ops.1.reads", ..., r"ops\[1\]\.reads: missing"),
    ("ops.1.reads", "a", r"ops\[1\]\.reads"),
    ("ops.1.reads", [3], r"ops\[1\]\.reads\[0\]"),
    ("ops.1.reads", ["b"], r"ops\[1\] \(exp\)\.reads: there is no value 'b'"),
    ("ops.1.reads", ["a", "a"], r"ops\[1\] \(exp\)\.reads: a value is named twice"),
    ("ops.1.reads", ["t"], r"ops\[1\] \(exp\)\.phase: reads tangent 't'"),
    ("ops.0.reads", ["y"], r"ops\[0\] \(mul\)\.reads: 'y' is not written by an earlier op"),
    ("ops.1.writes", ..., r"ops\[1\]\.writes: missing"),
    ("ops.1.writes", ["y", "a"], r"ops\[1\] \(exp\)\.writes: 'a' is written by two ops"),
    ("ops.1.writes", [], r"values\[3\] \(y\): no op writes this output"),
    ("ops.1.seconds", -1, r"ops\[1\] \(exp\)\.seconds"),
    ("ops.1.seconds", float("nan"), r"ops\[1\]\.seconds"),
    ("ops.1.seconds", float("inf"), r"ops\[1\]\.seconds"),
    ("ops.1.seconds", 10**400, r"ops\[1\]\.seconds"),
    ("ops.1.seconds", "1", r"ops\[1\]\.seconds"),
    ("ops.1.seconds", True, r"ops\[1\]\.seconds"),
    ("ops.1.workspace", -1, r"ops\[1\] \(exp\)\.workspace"),
    ("ops.1.workspace", 1.5, r"ops\[1\]\.workspace"),
    ("ops.1.state", -1, r"ops\[1\] \(exp\)\.state"),
    ("ops.1.takes", "a", r"ops\[1\]\.takes: expected a list of names"),
    ("ops.1.takes", ["b"], r"ops\[1\] \(exp\)\.takes: there is no value 'b'"),
    ("ops.1.takes", ["a", "a"], r"ops\[1\] \(exp\)\.takes: a value is named twice"),
    ("ops.1.takes", ["x"], r"ops\[1\] \(exp\)\.takes: 'x' is not among the reads"),
    ("ops.0.takes", ["x"], r"ops\[0\] \(mul\)\.takes: 'x' may not be dropped"),
    ("ops.2.takes", ["a"], r"ops\[2\] \(back\)\.takes: 'a' has 4 bytes, but 'g' has 8"),
    ("ops.1", {"name": "exp", "reads": ["a"], "writes": [], "takes": ["a"]}, "writes one value, not 0"),
    ("ops.1.phase", "middle", r"ops\[1\] \(exp\)\.phase"),
    ("ops.2.phase", "forward", r"ops\[2\] \(back\)\.phase: reads tangent"),
    ("ops.1.kind", "lazy", r"ops\[1\] \(exp\)\.kind"),
    ("ops.1.module", 4, r"ops\[1\]\.module"),
    ("ops.1.time", 4, r"ops\[1\]\.time: unknown field"),
]


@pytest.mark.parametrize(("path", "new", "said"), BAD_GRAPHS)
def test_a_malformed_graph_is_refused_by_the_field(path: str, new: Any, said: str) -> None:
    assert Graph.from_dict(graph_data())
    with pytest.raises(FormatError, match=said):
        Graph.from_json(json.dumps(spoil(graph_data(), path, new)))


@pytest.mark.parametrize(
    ("path", "new", "said"),
    [
        ("forward", ..., '"forward"'),
        ("backward", None, '"backward"'),
        ("forward.0", "mul", r"forward\[0\]"),
        ("forward.0", ["run"], r"forward\[0\]"),
        ("forward.0", ["run", 3], r"forward\[0\]"),
        ("forward.0", ["walk", "mul"], r"forward\[0\]"),
        ("backward.0", ["drop", "a", "b"], r"backward\[0\]"),
    ],
)
def test_a_malformed_schedule_is_refused_by_the_field(path: str, new: Any, said: str) -> None:
    data = keep_all(Graph.from_dict(graph_data())).to_dict()
    with pytest.raises(FormatError, match=said):
        Schedule.from_dict(spoil(data, path, new))


@pytest.mark.parametrize("field", ["boundary", "peak", "peak_step", "seconds", "again", "resident"])
@pytest.mark.parametrize("new", [..., None, "4", True, {}, [None]])
def test_a_malformed_timeline_is_refused_by_the_field(field: str, new: Any) -> None:
    with pytest.raises(FormatError, match=field):
        Timeline.from_dict(spoil(PLAN.timeline.to_dict(), field, new))


@pytest.mark.parametrize(
    ("path", "new", "said"),
    [
        ("graph", ..., "graph"),
        ("graph.ops.0.reads", ["nobody"], r"ops\[0\]"),
        ("schedule", None, "schedule"),
        ("schedule.forward", [], '"schedule"'),
        ("schedule.backward.0", ["drop", "nobody"], '"schedule".*nobody'),
        ("timeline", [], "timeline"),
        ("timeline.peak", 1, '"timeline".*peak 1 claimed'),
        ("timeline.seconds", 0.5, '"timeline"'),
        ("timeline.resident", [], '"timeline"'),
        ("budget", "8GiB", '"budget"'),
        ("budget", -8, '"budget"'),
        ("bound", "none", '"bound"'),
        ("bound", float("nan"), '"bound"'),
        ("method", 3, '"method"'),
        ("notes", "a note", '"notes"'),
    ],
)
def test_a_malformed_plan_is_refused_by_the_field(path: str, new: Any, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        Plan.from_json(json.dumps(spoil(json.loads(PLAN.to_json()), path, new)))
