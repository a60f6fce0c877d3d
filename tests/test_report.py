from __future__ import annotations

import re
from html.parser import HTMLParser
from random import Random

import pytest

from graphs import chain, cnn, random_graph
from lowtide.graph import Graph, Op, Value
from lowtide.plan import Plan, make_plan
from lowtide.report.bands import bands, buckets, uncapped_line
from lowtide.report.page import page
from lowtide.report.stays import at_peak, peak_is_between
from lowtide.report.tables import alive_at_peak, spent
from lowtide.report.text import sparkline, text
from lowtide.report.wording import short
from lowtide.schedule import Drop, Run, Schedule
from lowtide.solve.keep_all import keep_all
from lowtide.solve.order import first_order, with_drops

NASTY = "</script><script>alert(1)</script><b>&\"'\u2028\ud800"


def with_reruns(graph: Graph, seed: int, count: int) -> Schedule:
    """A valid schedule that runs random ops again at random places: drops follow from the order."""
    rng = Random(seed)
    forward, backward = (list(part) for part in first_order(graph))
    for _ in range(count):
        part = rng.choice([forward, backward])
        before = forward if part is forward else forward + backward
        place = rng.randint(0, len(part))
        seen = before[: place if part is forward else len(forward) + place]
        may = [name for name in seen if graph.op[name].kind != "pinned"]
        if may:
            part.insert(place, rng.choice(may))
    return with_drops(graph, forward, backward)


def keeping(graph: Graph, **more: object) -> Plan:
    return make_plan(graph, keep_all(graph), method="keep_all", **more)  # type: ignore[arg-type]


def small(**changes: object) -> Graph:
    """One layer with every kind of value, a random op, workspaces, fixed bytes and a boundary."""
    values = (
        Value("x", 10, "input"),
        Value("w", 20, "parameter"),
        Value("mean", 1, "buffer"),
        Value("old", 20, "accumulated"),
        Value("a", 40),
        Value("mask", 5),
        Value("y", 3, "output"),
        Value("t", 3, "tangent"),
        Value("g", 40),
        Value("new", 20, "gradient"),
    )
    ops = (
        Op("linear", ("x", "w", "mean"), ("a",), 1.0, workspace=7, module="net.linear", source="net.py:3"),
        Op("dropout", ("a",), ("y", "mask"), 1.0, kind="random", state=2, module="net.drop"),
        Op("dropout.bw", ("t", "mask"), ("g",), 1.0, phase="backward"),
        Op("linear.bw", ("g", "a", "old"), ("new",), 1.0, phase="backward"),
    )
    return Graph(ops, values, fixed={"optimizer state": 100, "teacher": 30}, boundary=4).replace(**changes)


def rerun_small() -> Plan:
    """Drops `a` and `mask` and runs both ops again; `y` is still there then, so a copy is made."""
    forward = (Run("linear"), Run("dropout"), Drop("a"), Drop("mask"))
    backward = (
        *(Run("linear"), Run("dropout"), Run("dropout.bw"), Drop("mask"), Drop("t")),
        *(Run("linear.bw"), Drop("g"), Drop("a")),
    )
    return make_plan(small(), Schedule(forward, backward), method="by hand", budget=300)


def plans() -> list[Plan]:
    graphs = [random_graph(seed, 6 + seed) for seed in range(12)] + [chain(5), cnn(3)]
    graphs += [random_graph(seed, 6 + seed, takes=True) for seed in range(12)]
    again = [
        make_plan(graph, with_reruns(graph, seed, 9), method="random") for seed, graph in enumerate(graphs)
    ]
    empty = Graph((), (Value("w", 8, "parameter"),), boundary=2)
    return [rerun_small(), keeping(small()), keeping(empty), *map(keeping, graphs), *again]


PLANS = plans()


@pytest.mark.parametrize("plan", PLANS)
def test_bands_add_up_to_resident(plan: Plan) -> None:
    found = [band.resident for band in bands(plan)]
    assert all(min(line) >= 0 for line in found)
    assert tuple(map(sum, zip(*found, strict=True))) == plan.timeline.resident


@pytest.mark.parametrize("plan", PLANS)
def test_what_is_there_at_the_peak_adds_up_to_it(plan: Plan) -> None:
    assert sum(stay.bytes for stay in at_peak(plan)) == plan.peak
    assert sum(row.bytes for row in alive_at_peak(plan)) == plan.peak


@pytest.mark.parametrize("plan", PLANS)
def test_the_uncapped_line_reaches_its_maximum(plan: Plan) -> None:
    line = uncapped_line(plan)
    assert len(line) == len(plan.timeline.resident)
    assert max(line, default=0) == max(plan.uncapped.resident, default=0)


def test_keeping_everything_is_its_own_uncapped_line_at_every_run() -> None:
    plan = keeping(cnn(3))
    line = uncapped_line(plan)
    for index, step in enumerate(plan.schedule.steps[:-1]):
        if isinstance(step, Run):
            assert line[index] >= plan.timeline.resident[index]


def test_bands_by_hand() -> None:
    plan = rerun_small()
    found = {band.name: band.resident for band in bands(plan)}
    assert found["optimizer state"] == (100,) * 12
    assert found["teacher"] == (30,) * 12
    assert found["parameters and buffers"] == (21,) * 12
    assert found["inputs"] == (10,) * 12
    assert found["gradients"] == (20,) * 9 + (40,) * 3
    assert found["kept"] == (0,) + (3,) * 11
    assert found["recomputed"] == (0, 0, 0, 0, 40, 45, 45, 40, 40, 40, 40, 0)
    # linear's workspace; a and the mask; the state of dropout; the tangent; the copy of y; g.
    assert found["transient"] == (47, 47, 7, 2, 12, 8, 43, 43, 40, 40, 0, 0)


def test_a_peak_between_forward_and_backward_counts_the_caller_s_bytes() -> None:
    plan = keeping(small(boundary=1000))
    assert peak_is_between(plan)
    assert alive_at_peak(plan)[0].bytes == 1000
    assert "between the forward and the backward" in page(plan)
    assert "between the forward and the backward" in text(plan)


def test_decisions() -> None:
    decided = {row.name: row.decided for row in spent(rerun_small())}
    assert decided == {
        "a": "dropped and recomputed 1 time",
        "mask": "dropped and recomputed 1 time",
        "g": "dropped after use",
        "t": "given",
    }
    assert {row.name: row.decided for row in spent(keeping(small()))}["a"] == "kept"


def test_lifetime_is_a_share_of_the_time() -> None:
    share = {row.name: row.share for row in spent(keeping(small()))}
    assert share["a"] == 1.0
    assert share["g"] == pytest.approx(0.5)


def test_buckets_keep_every_maximum() -> None:
    sizes = [Random(0).randint(0, 99) for _ in range(1234)]
    found = buckets(sizes, 100)
    assert len(found) == 100
    assert [b.start for b in found[1:]] == [b.end for b in found[:-1]]
    assert all(sizes[b.step] == max(sizes[b.start : b.end]) for b in found)
    assert buckets([], 100) == []
    assert len(buckets([1, 2], 100)) == 2


class Checker(HTMLParser):
    """Collects elements, attributes and text; every element that is opened must be closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.said: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said.append(data)


def read(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    return checker


@pytest.mark.parametrize("plan", PLANS)
def test_page_is_well_formed_and_self_contained(plan: Plan) -> None:
    html = page(plan)
    checker = read(html)
    assert "http" not in html
    assert not re.search(r"url\(|@import|\bsrc=|\bhref=", html)
    assert [tag for tag, _ in checker.seen].count("script") == 2
    assert html.encode("utf-8")


def test_page_states_the_figures() -> None:
    plan = make_plan(
        small(device="cuda", prices="roofline"),
        keep_all(small()),
        method="auto",
        budget=400,
        notes=("mind <this>",),
    )
    html = page(plan)
    for part in ("auto", "cuda", "roofline", "400 B", f"{plan.peak} B", "mind &lt;this&gt;", "At the peak"):
        assert part in html
    for kind in ("optimizer state", "teacher", "net.linear", "net.py:3", "forward", "backward", "kept"):
        assert kind in html


def test_page_escapes_everything_from_the_plan() -> None:
    values = (Value(NASTY + "w", 9, "parameter"), Value(NASTY, 8), Value(NASTY + "y", 1, "output"))
    ops = (
        Op(NASTY, (NASTY + "w",), (NASTY,), workspace=3, module=NASTY, source=NASTY, target=NASTY),
        Op("last", (NASTY,), (NASTY + "y",), module=NASTY),
    )
    graph = Graph(ops, values, device=NASTY, prices=NASTY, fixed={NASTY: 5})
    plan = make_plan(graph, keep_all(graph), method=NASTY, notes=(NASTY,))
    html = page(plan)
    assert "<b>" not in html
    assert "<script>alert" not in html
    assert html.count("</script>") == 2
    assert read(html)
    assert html.encode("utf-8")
    assert text(plan).encode("utf-8")


def test_page_of_a_large_graph_is_bounded() -> None:
    long = "module_with_a_very_long_name." * 40
    values = [Value("x", 1, "input")]
    ops = []
    for index in range(5000):
        values.append(Value(f"{long}{index}", 1 + index % 97, "output" if index == 4999 else "activation"))
        ops.append(Op(f"op{long}{index}", (values[-2].name,), (values[-1].name,), module=long, source=long))
    html = page(keeping(Graph(tuple(ops), tuple(values))))
    assert len(html.encode()) < 1_000_000


def test_a_budget_far_above_the_peak_does_not_flatten_the_picture() -> None:
    assert 'class="budget"' in page(keeping(small(), budget=300))
    assert 'class="budget"' not in page(keeping(small(), budget=10**9))


def test_text_has_the_figures_and_two_lines_of_bars() -> None:
    said = text(rerun_small())
    for part in ("uncapped peak", "300 B", "by hand", "extra time", "uncapped ", "planned ", "│backward"):
        assert part in said
    assert "█" in said
    assert all(len(line) <= 110 for line in said.splitlines())


def test_sparkline() -> None:
    assert sparkline([0, 1, 4, 8], top=8) == " ▁▄█"
    assert sparkline([], top=8) == ""
    assert sparkline([0], top=0) == " "
    assert len(sparkline(range(1000), top=999, width=50)) == 50


def test_short_text_is_bounded_and_can_be_written() -> None:
    assert short("a" * 90) == "a" * 90
    assert len(short("a" * 91)) == 90
    assert short("\ud800") == "?"
