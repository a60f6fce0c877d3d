"""The comparison of planners: its rows are the simulator's word, it can be continued, its tables right."""

import json
import math
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch
from torch import nn

import corpus
import plan_methods
import plan_tables
import plan_times
import plans
from graphs import chain
from lowtide.errors import LowtideError
from lowtide.plans.keep_all import keep_all
from lowtide.plans.simulator import simulate
from lowtide.solve.bound import lower_bound
from lowtide.solve.quick import smallest
from lowtide.solve.sqrt_segments import sqrt_segments
from networks import Network
from plan_results import BETWEEN, SHARES, Loss, Row, gap, losses, read, write
from plan_text import summary_text, table_text
from torch_budget import torch_budget_schedules

GRAPH = chain(24)
VANILLA = simulate(GRAPH, keep_all(GRAPH))


@pytest.fixture(autouse=True)
def small_graph(monkeypatch):
    """Every graph of the corpus is a chain."""
    monkeypatch.setattr(plan_methods, "load", lambda name: GRAPH)


def solver(monkeypatch, method, function):
    monkeypatch.setitem(plan_methods.METHODS, method, function)


def best(schedules, budget):
    """The least extra of the schedules under a budget, by the simulator alone."""
    timelines = [simulate(GRAPH, schedule) for schedule in schedules]
    return min((found.again / VANILLA.seconds for found in timelines if found.peak <= budget), default=None)


def test_a_row_is_what_the_simulator_says_of_a_methods_schedules():
    row = list(plan_methods.rows("unet", "sqrt_segments"))[-1]
    budgets = {share: VANILLA.peak * share // 100 for share in (*SHARES, *BETWEEN, 0)}
    schedules = [sqrt_segments(GRAPH, budget) for budget in budgets.values()]
    assert row.vanilla == VANILLA.peak
    assert row.ops == len(GRAPH.ops)
    for share in (*SHARES, *BETWEEN):
        wanted = best(schedules, budgets[share])
        assert row.extra[str(share)] == (None if wanted is None else pytest.approx(wanted))
    assert row.floor == min(simulate(GRAPH, schedule).peak for schedule in schedules)
    assert row.seconds >= 0


def test_a_plan_for_a_smaller_budget_counts_for_a_larger_one(monkeypatch):
    tight = sqrt_segments(GRAPH, 0)
    floor = simulate(GRAPH, tight)
    solver(monkeypatch, "chain", lambda graph, budget: keep_all(graph) if budget else tight)
    row = list(plan_methods.rows("unet", "chain"))[-1]
    fits = {share: floor.peak <= VANILLA.peak * share // 100 for share in (*SHARES, *BETWEEN)}
    assert any(fits.values())
    assert row.extra == {str(share): floor.extra if fits[share] else None for share in fits}


def test_only_budgets_that_were_asked_for_are_answered():
    found = list(plan_methods.rows("unet", "sqrt_segments"))
    assert [len(row.extra) + (row.floor is not None) for row in found] == list(
        range(len(SHARES) + len(BETWEEN) + 2)
    )


def test_auto_is_asked_for_the_papers_share_too(monkeypatch):
    solver(monkeypatch, "auto", sqrt_segments)
    paper = str(100 - corpus.PAPER["googlenet"].best_saved)
    assert paper in list(plan_methods.rows("googlenet", "auto"))[-1].extra
    assert paper not in list(plan_methods.rows("googlenet", "chain"))[-1].extra


@pytest.mark.slow
def test_the_bound_is_a_share_or_says_that_nothing_fits(tmp_path):
    row = list(plan_methods.rows("unet", "bound"))[-1]
    for share in SHARES:
        least = lower_bound(GRAPH, VANILLA.peak * share // 100)
        wanted = "inf" if least == math.inf else pytest.approx(least / VANILLA.seconds - 1)
        assert row.extra[str(share)] == wanted
    write([replace(row, extra={"50": "inf"})], tmp_path / "rows.jsonl")
    assert read(tmp_path / "rows.jsonl")["unet", "bound"].extra == {"50": "inf"}


def test_blocks_and_their_absence():
    assert list(plan_methods.rows("unet", "per_block"))[-1].reason == "no blocks"


def tiny():
    net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    return net, (torch.ones(512, 8, device="meta"),)


@pytest.mark.slow
def test_torchs_partitions_are_judged_on_the_graph_of_the_corpus(monkeypatch):
    monkeypatch.setitem(plan_methods.CORPUS, "unet", Network("512 x 8", tiny))
    assert "traced differently" in list(plan_methods.rows("unet", "torch_budget"))[-1].reason
    with torch.device("meta"):
        graph, schedules = torch_budget_schedules(*tiny())
    torch._dynamo.reset()
    monkeypatch.setattr(plan_methods, "load", lambda name: graph)
    row = list(plan_methods.rows("unet", "torch_budget"))[-1]
    assert row.floor == min(simulate(graph, schedule).peak for schedule in schedules.values())
    assert set(row.extra) == {str(share) for share in (*SHARES, *BETWEEN)}
    assert row.seconds > 0


def run(tmp_path, *arguments):
    path = tmp_path / "plans.jsonl"
    plans.main(["--only", "unet", "--out", str(path), *arguments])
    return read(path)


@pytest.mark.slow
def test_a_method_over_its_limit_keeps_what_it_answered_before(monkeypatch, tmp_path, capsys):
    def slow(graph, budget):
        while budget == 0:
            pass
        return keep_all(graph)

    solver(monkeypatch, "chain", slow)
    row = run(tmp_path, "--methods", "chain", "--limit", "1")["unet", "chain"]
    assert row.over == 1
    assert row.extra == {"50": None}
    assert row.floor is None
    assert "over 1 s" in capsys.readouterr().out


def test_a_method_that_fails_leaves_the_others_alone(monkeypatch, tmp_path, capfd):
    def refuse(graph, budget):
        raise LowtideError("not this graph")

    def fail(graph, budget):
        raise ZeroDivisionError

    solver(monkeypatch, "chain", refuse)
    solver(monkeypatch, "rotor", fail)
    found = run(tmp_path, "--methods", "chain", "rotor", "sqrt_segments")
    assert found["unet", "chain"].reason == "not this graph"
    assert found["unet", "rotor"].reason == "failed with exit status 1"
    assert found["unet", "sqrt_segments"].floor < VANILLA.peak
    assert "ZeroDivisionError" in capfd.readouterr().err


@pytest.mark.slow
def test_lines_are_reused_until_their_sources_change_or_again_is_asked(monkeypatch, tmp_path):
    methods = ("--methods", "chain", "sqrt_segments")
    first = run(tmp_path, *methods)
    solver(monkeypatch, "chain", lambda graph, budget: keep_all(graph))
    assert run(tmp_path, *methods) == first
    changed = run(tmp_path, *methods, "--again")
    assert changed["unet", "chain"].floor == VANILLA.peak
    solver(monkeypatch, "chain", lambda graph, budget: sqrt_segments(graph, budget))
    monkeypatch.setattr(plans, "fingerprint", lambda name, method: f"new {method}")
    assert run(tmp_path, *methods)["unet", "chain"].floor < VANILLA.peak


@pytest.mark.slow
def test_lines_that_are_not_asked_for_stay(tmp_path):
    run(tmp_path, "--methods", "sqrt_segments")
    path = tmp_path / "plans.jsonl"
    write([*read(path).values(), Row("vgg19", "auto", solver="of old")], path)
    found = run(tmp_path, "--methods", "bound", "--again")
    assert set(found) == {("unet", "sqrt_segments"), ("unet", "bound"), ("vgg19", "auto")}
    assert found["unet", "sqrt_segments"].bound == found["unet", "bound"].extra
    assert found["vgg19", "auto"] == Row("vgg19", "auto", solver="of old")


def test_a_line_over_a_smaller_limit_is_not_reused():
    row = Row("unet", "chain", over=60, solver=plans.fingerprint("unet", "chain"))
    assert plans.is_current(row, 60)
    assert not plans.is_current(row, 120)
    assert not plans.is_current(replace(row, over=None, solver=""), 60)
    assert not plans.is_current(None, 60)
    row = Row("unet", "torch_budget", over=60, solver=plans.fingerprint("unet", "torch_budget"))
    assert not plans.is_current(row, 60)
    assert plans.is_current(replace(row, over=180), 60)


def test_fingerprints_follow_the_sources_of_a_method(monkeypatch, tmp_path):
    for room in ("plans", "solve"):
        shutil.copytree(plans.SOURCE / room, tmp_path / room)
    monkeypatch.setattr(plans, "SOURCE", tmp_path)

    def changed_by(name):
        before = {method: plans.fingerprint("unet", method) for method in plan_methods.ROWS}
        (tmp_path / name).write_text("new")
        return {method for method, old in before.items() if plans.fingerprint("unet", method) != old}

    assert changed_by("solve/rotor/method.py") == {"auto", "quick", "rotor"}
    assert changed_by("solve/search/c/descent.c") == {"auto", "quick"}
    assert changed_by("solve/auto.py") == {"auto", "quick"}
    assert changed_by("plans/simulator.py") == set(plan_methods.ROWS)


def made_up(method, extra, floor, **more):
    return Row("unet", method, 112, 1000, floor, 0.4, extra, **more)


BOUND = {"70": 0.0, "50": 0.1, "35": 0.25, "25": "inf"}
ROWS = [
    made_up("auto", {"70": 0.05, "50": 0.155, "35": None, "25": None}, 400, bound=BOUND, seconds=1.5),
    made_up("chain", {"70": 0.05 - 1e-12, "50": 0.2, "35": 0.5, "25": None}, 300, bound=BOUND, seconds=12.4),
    made_up("rotor", {"50": 0.15}, None, bound=BOUND, seconds=0.25, over=120),
    Row("unet", "per_block", 112, 1000, reason="no blocks", bound=BOUND),
    Row("unet", "bound", 112, 1000, extra=BOUND, bound=BOUND, seconds=0.5),
]


def test_losses_are_slower_plans_plans_that_do_not_fit_and_larger_floors():
    assert list(losses(ROWS)) == [
        Loss("unet", "floor", "chain", 0.4, 0.3),
        Loss("unet", "35", "chain", None, 0.5),
        Loss("unet", "50", "rotor", 0.155, 0.15),
    ]
    better = replace(ROWS[0], extra={"70": 0.05, "50": 0.15, "35": 0.5, "25": None}, floor=300)
    assert list(losses([better, *ROWS[1:]])) == []
    assert "auto loses 3 of 5 comparisons" in summary_text(ROWS)
    assert "unet, 35 %: auto -, chain 50.000%" in summary_text(ROWS)


def test_the_gap_is_to_the_bounds_whole_time():
    assert gap(ROWS[0], 50) == pytest.approx(1.155 / 1.1 - 1)
    assert gap(ROWS[0], 35) is None
    assert gap(ROWS[0], 25) is None
    assert "gap of auto at 50 %: median 5.00%, most 5.00%, 1 graphs" in summary_text(ROWS)


def test_the_table_of_a_graph():
    lines = table_text(ROWS).splitlines()
    assert lines[0] == "unet: 112 ops, vanilla peak 0.00 GB"
    assert " ".join(lines[2].split()) == "auto 0.00 40.0% +40.0% +5.0% +15.5% - - 1.50"
    assert " ".join(lines[4].split()) == "rotor over +15.0% over over 0.25 over 120 s"
    assert " ".join(lines[5].split()) == "per_block - - - - no blocks"
    assert " ".join(lines[6].split()) == "bound +0.0% +10.0% +25.0% inf 0.50"
    assert " ".join(lines[7].split()) == "gap of auto 5.0% 5.0% - -"


def test_the_tables_of_the_documents():
    text = plan_tables.plan_tables({(row.graph, row.method): row for row in ROWS})
    assert "`auto` is behind in 3 of 5 comparisons; its median gap to the bound at 50 % is 5.0%." in text
    assert "| graph | auto | chain | rotor | per block |\n" in text
    assert "| U-Net | 40% (+40%) | 30% (+40%) | over 120 s | - |" in text
    assert "| U-Net | +15.5% | +20.0% | +15.0% | - | +10.0% | 5.0% |" in text
    assert "| U-Net | - | - | over 120 s | - | inf |  |" in text
    assert "| U-Net | 1.5 | 12 | 0.2 | - |" in text


def test_the_table_of_budgets_that_are_not_round():
    auto = replace(ROWS[0], extra={"73": 0.04, "58": 0.1, "47": None, "33": None, "27": None})
    quick = replace(ROWS[1], method="quick", extra={"73": 0.05, "58": None, "47": 0.3})
    text = plan_tables.between_grid({(row.graph, row.method): row for row in (auto, quick)})
    assert text.splitlines()[2] == "| U-Net | +4.0% / +5.0% | +10.0% / - | - / +30.0% | - / - | - / - |"
    assert len(plan_tables.between_grid({("unet", "auto"): ROWS[0]}).splitlines()) == 2


def test_a_quick_look_is_judged_as_a_method():
    row = list(plan_methods.rows("unet", "quick"))[-1]
    assert row.floor <= smallest(GRAPH).peak
    assert row.extra["70"] is not None


def test_the_table_against_the_paper():
    row = replace(ROWS[0], vanilla=6_600_000_000, floor=2_500_000_000, extra={"50": 0.125, "52": None})
    text = plan_tables.paper_table({("unet", "auto"): row}, corpus.PAPER).splitlines()
    assert len(text) == 3
    figures = "U-Net, 8 | 9.1 GB | 7.4 GB (82%) | 4.7 GB (52%) | 6.6 GB | 2.5 GB (38%)"
    assert text[2] == f"| {figures} | +40.0% | - at 52% | +12.5% |"


def test_every_network_and_method_has_a_name_in_the_documents():
    assert list(plan_tables.NETWORKS) == corpus.names()
    assert {*plan_tables.METHODS, "bound"} == set(plan_methods.ROWS)


def test_the_times_of_planning_and_their_plot(monkeypatch, tmp_path):
    solver(monkeypatch, "auto", sqrt_segments)
    out, picture = tmp_path / "times.jsonl", tmp_path / "times.svg"
    sizes = ["--sizes", "30", "60", "--recurrent", "40"]
    plan_times.main([*sizes, "--out", str(out), "--picture", str(picture)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(line["ops"] >= size for line, size in zip(lines, (30, 60, 40), strict=True))
    assert all(line["peak"] <= line["vanilla"] // 2 or line["extra"] is None for line in lines)
    assert [line["kind"] for line in lines] == ["transformer", "transformer", "LSTM"]
    assert len(plan_tables.plan_times_table(lines).splitlines()) == 5
    drawing = ElementTree.fromstring(picture.read_text())
    name = "{http://www.w3.org/2000/svg}"
    assert len(drawing.findall(f"{name}circle")) == 2


def test_the_plot_is_logarithmic_and_lies_within_its_frame():
    lines = [{"ops": ops, "seconds": ops / 100} for ops in (100, 1000, 10000)]
    drawing = ElementTree.fromstring(plan_times.picture(lines))
    dots = drawing.findall("{http://www.w3.org/2000/svg}circle")
    x, y = ([float(dot.attrib[name]) for dot in dots] for name in ("cx", "cy"))
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)
    assert y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.2)
    assert (x[0], x[2]) == (plan_times.LEFT, plan_times.WIDTH - plan_times.RIGHT)
    assert (y[2], y[0]) == (plan_times.TOP, plan_times.HEIGHT - plan_times.BOTTOM)
