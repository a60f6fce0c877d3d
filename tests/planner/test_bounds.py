"""What a file may hold and how long a plan may take is bounded, by options that the errors name."""

import sys
import time

import pytest

import lowtide
from graphs import chain, transformer
from lowtide.cli.main import main
from lowtide.errors import FormatError, LowtideError, OutOfTime
from lowtide.options import Options
from lowtide.planner.compare import compare
from lowtide.planner.frontiers import Frontier, frontier
from lowtide.planner.under_budget import plan_graph
from lowtide.plans import patience
from lowtide.plans.graph import Graph
from lowtide.plans.patience import check_seconds, planning_for, until
from lowtide.plans.planned_step import Plan
from lowtide.solve import METHODS
from lowtide.solve.exact import method as exact_method
from lowtide.solve.search import search


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(sys.modules["lowtide.solve.auto"], "_remembered", {})
    search._say_cut.cache_clear()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "graph.json"
    path.write_text(chain(3).to_json())
    return path


def test_more_ops_than_may_be_read_are_not_looked_at():
    text = chain(3).to_json()
    with pytest.raises(FormatError, match=r"most_ops=5, and it has 6; take more \(--most-ops"):
        Graph.from_json(text, most_ops=5)
    assert len(Graph.from_json(text, most_ops=6).ops) == 6


@pytest.mark.parametrize("kind", [Plan, Frontier])
def test_a_file_of_more_bytes_than_may_be_read_is_not_read(tmp_path, kind):
    plan = plan_graph(chain(3), None)
    made = plan if kind is Plan else frontier(plan)
    size = made.save(tmp_path / "file.json").stat().st_size
    with pytest.raises(FormatError, match=f"most_bytes={size - 1}, and it has more; take more .--most-bytes"):
        kind.load(tmp_path / "file.json", most_bytes=size - 1)
    with pytest.raises(FormatError, match="most_ops=2"):
        kind.load(tmp_path / "file.json", most_ops=2)
    assert kind.load(tmp_path / "file.json", most_bytes=size) == made


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        ("--most-ops=2", "--most-ops"),
        ("--most-bytes=100B", "--most-bytes"),
        ("--planning-seconds=0", "above 0"),
    ],
)
@pytest.mark.parametrize("verb", ["plan", "report"])
def test_the_command_line_has_the_same_bounds(file, capsys, verb, bound, said, tmp_path):
    more = ["-o", str(tmp_path / "page.html")] if verb == "report" else []
    assert main([verb, str(file), "--budget", "min", bound, *more]) == 2
    assert said in capsys.readouterr().err
    assert main([verb, str(file), "--budget", "min", *more, "--most-ops=6", "--most-bytes=1MiB"]) == 0


def test_a_search_that_is_out_of_time_ends_with_what_it_has(caplog_lowtide, monkeypatch):
    graph, clock = transformer(4), [0.0]

    def late():
        clock[0] += 1.0
        return clock[0]

    monkeypatch.setattr(search, "time", late)
    monkeypatch.setattr(patience, "time", lambda: clock[0])
    plan = plan_graph(graph, "min", planning_seconds=12.0)
    assert plan.peak <= plan.uncapped.peak
    assert clock[0] < 60  # the whole search asks some hundred times
    assert len([line for line in caplog_lowtide if "planning_seconds" in line]) == 1
    assert frontier(graph, planning_seconds=5.0).plans


def test_no_plan_in_time_is_an_error_that_names_the_option(monkeypatch):
    graph = transformer(2)
    monkeypatch.setattr(search, "time", lambda: time.time() + 1e6)
    with pytest.raises(OutOfTime, match=r"planning_seconds=100 s; take more \(--planning-seconds") as caught:
        plan_graph(graph, "40%", planning_seconds=100)
    assert isinstance(caught.value, LowtideError)


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"auto", "exact", "keep_all"}))
def test_the_other_methods_are_bounded_too(method):
    with pytest.raises(OutOfTime, match="planning_seconds"):
        plan_graph(transformer(2), "30%", method=method, planning_seconds=1e-9)
    (row,) = compare(transformer(2), [method], ["30%"], planning_seconds=1e-9).rows
    assert "planning_seconds" in row.error


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(set(METHODS) - {"auto", "exact", "keep_all"}))
def test_the_other_methods_look_at_the_clock_within_a_candidate(method, monkeypatch):
    looks = []
    monkeypatch.setattr(patience, "time", lambda: looks.append(1) or 0.0)
    graph = chain(150)
    plan_graph(graph, "min", method=method, planning_seconds=1.0)
    assert len(looks) > len(graph.ops) * {"rotor": 1.0, "lower_sets": 1.0}.get(method, 0.0)


@pytest.mark.slow
def test_an_exact_search_has_no_more_time_than_is_left(monkeypatch):
    pytest.importorskip("highspy")
    given = []
    own = exact_method._options
    monkeypatch.setattr(exact_method, "_options", lambda seconds: given.append(seconds) or own(seconds))
    plan_graph(transformer(1), "min", method="exact", planning_seconds=50.0)
    assert given
    assert max(given) <= 50.0


def test_a_whole_number_of_hundreds_of_digits_is_no_bound():
    assert check_seconds(10**400) == float("inf")


def test_a_longer_search_begins_anew():
    graph = transformer(1)
    cut = plan_graph(graph, "min", planning_seconds=1e-9)
    assert plan_graph(graph, "min").peak < cut.peak


def test_a_bound_inside_of_another_does_not_move_it():
    with planning_for(100.0):
        end = until()
        with planning_for(1000.0):
            assert until() == end
    assert until() == float("inf")


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), "10", True, None])
def test_seconds_that_are_none_are_refused(seconds):
    with pytest.raises(LowtideError, match="planning_seconds"):
        Options.make("50%", planning_seconds=seconds)
    with pytest.raises(LowtideError, match="planning_seconds"):
        lowtide.frontier(chain(2), planning_seconds=seconds)
