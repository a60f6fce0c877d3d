from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from random import Random

import pytest

from graphs import chain, cnn, random_graph
from lowtide.errors import LowtideError
from lowtide.evidence.watched_step import Watched
from lowtide.measuring.measurement import Measurement
from lowtide.planner.frontiers import frontier
from lowtide.plans.graph import Graph, Op, Value
from lowtide.plans.keep_all import keep_all
from lowtide.plans.order import first_order, with_drops
from lowtide.plans.planned_step import Plan, make_plan
from lowtide.plans.schedule import Drop, Run, Schedule
from lowtide.report.advice import advice
from lowtide.report.bands import aligned, bands, buckets
from lowtide.report.choices import changes, choices
from lowtide.report.decision import SORTS, decisions
from lowtide.report.fold import fold, ranges
from lowtide.report.page import page
from lowtide.report.peak import alive_at_peak, at_peak, crowds, least_peak, near_peak, peak_is_between
from lowtide.report.place import Places
from lowtide.report.residency import Residency, keeping_everything
from lowtide.report.spent import Spent, folded, spent
from lowtide.report.text import sparkline, text
from lowtide.report.wording import short
from lowtide.units import format_bytes
from synthetic import scaled

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
    found = [band.resident for band in bands(Residency(plan))]
    assert all(min(line) >= 0 for line in found)
    assert tuple(map(sum, zip(*found, strict=True))) == plan.timeline.resident


@pytest.mark.parametrize("plan", PLANS)
def test_what_is_there_at_the_peak_adds_up_to_it(plan: Plan) -> None:
    shown = Residency(plan)
    assert sum(stay.bytes for stay in at_peak(shown)) == plan.peak
    rows = alive(plan)
    assert sum(row.bytes for row in rows) == plan.peak
    assert sum(crowd.bytes for crowd in crowds(rows)) == plan.peak


@pytest.mark.parametrize("plan", PLANS)
def test_the_uncapped_line_reaches_its_maximum(plan: Plan) -> None:
    line = uncapped_line(plan)
    assert len(line) == len(plan.timeline.resident)
    assert max(line, default=0) == max(plan.uncapped.resident, default=0)


@pytest.mark.parametrize("plan", PLANS)
def test_no_schedule_goes_below_the_least_peak(plan: Plan) -> None:
    assert least_peak(plan.graph)[0] <= plan.timeline.peak


@pytest.mark.parametrize("plan", PLANS)
def test_decisions_are_those_of_the_stays(plan: Plan) -> None:
    found = decisions(plan.graph, plan.schedule)
    values = [stay for stay in Residency(plan).stays if stay.what == "value"]
    for name, decision in found.items():
        of = [stay for stay in values if stay.name == name]
        assert decision.again == sum(stay.again for stay in of)
        if plan.graph.value[name].kind != "tangent":
            assert decision.kept == any(stay.crosses for stay in of)
        assert decision.sort in SORTS


def alive(plan: Plan):
    return alive_at_peak(Residency(plan), Places(plan.graph))


def uncapped_line(plan: Plan) -> tuple[int, ...]:
    return aligned(plan, keeping_everything(plan).plan)


def rows_of(plan: Plan) -> dict[str, Spent]:
    return {row.name: row for row in spent(Residency(plan), Places(plan.graph))}


def test_keeping_everything_is_its_own_uncapped_line_at_every_run() -> None:
    plan = keeping(cnn(3))
    line = uncapped_line(plan)
    for index, step in enumerate(plan.schedule.steps[:-1]):
        if isinstance(step, Run):
            assert line[index] >= plan.timeline.resident[index]


def test_bands_by_hand() -> None:
    plan = rerun_small()
    found = {band.name: band.resident for band in bands(Residency(plan))}
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
    assert alive(plan)[0].bytes == 1000
    assert "between the forward and the backward" in page(plan)
    assert "between the forward and the backward" in text(plan)


def test_decisions_in_words() -> None:
    said = {name: str(row.decided) for name, row in rows_of(rerun_small()).items()}
    assert said == {
        "a": "dropped, recomputed once",
        "mask": "dropped, recomputed once",
        "g": "dropped after use",
        "t": "given to the backward",
        "new": "a result: there to the end",
        "y": "a result: there to the end",
        **dict.fromkeys(("x", "w", "mean", "old", "optimizer state", "teacher"), "there all along"),
    }
    assert str(rows_of(keeping(small()))["a"].decided) == "kept"


def test_lifetime_is_a_share_of_the_time() -> None:
    share = {name: row.share for name, row in rows_of(keeping(small())).items()}
    assert share["a"] == 1.0
    assert share["g"] == pytest.approx(0.5)
    assert share["teacher"] == 1.0


def test_why_things_are_there_at_the_peak() -> None:
    plan = rerun_small()
    assert plan.schedule.steps[plan.timeline.peak_step] == Run("linear.bw")
    why = {item.stay.name: item.why for item in alive(plan)}
    assert why["w"] == why["optimizer state"] == why["y"] == "held"
    assert why["a"] == why["g"] == why["new"] == "in use"
    assert "waiting" not in why.values()
    assert "Nothing waits" in advice(Residency(plan), alive(plan))[0]


def test_what_waits_at_the_peak_is_told_with_its_price() -> None:
    plan = keeping(chain(6))
    waiting = [item for item in alive(plan) if item.why == "waiting"]
    assert waiting
    for item in waiting:
        assert item.seconds == 1.0
        assert item.until is not None
        step = plan.schedule.steps[item.until]
        assert isinstance(step, Run)
        assert item.stay.name in plan.graph.op[step.op].reads
        assert item.until > plan.timeline.peak_step
    said = " ".join(advice(Residency(plan), alive(plan)))
    assert f"{len(waiting)} values wait" in said
    assert "and recompute it before step" in said
    assert f"No schedule goes below {least_peak(plan.graph)[0]} B" in said


def test_a_value_that_may_not_be_recomputed_is_told_so() -> None:
    graph = chain(4)
    pinned = [replace(op, kind="pinned") if op.name == "f1" else op for op in graph.ops]
    plan = keeping(graph.replace(ops=tuple(pinned)))
    assert any("may not be recomputed" in line for line in advice(Residency(plan), alive(plan)))
    assert "may run only once" in page(plan)


def test_steps_near_the_peak_are_counted() -> None:
    plan = rerun_small()
    peak = plan.timeline.peak
    runs = [
        size
        for step, size in zip(plan.schedule.steps, plan.timeline.resident, strict=True)
        if isinstance(step, Run)
    ]
    assert near_peak(Residency(plan)) == sum(size >= 0.99 * peak for size in runs) - 1


def test_ranges() -> None:
    assert ranges([]) == ""
    assert ranges([3]) == "3"
    assert ranges([4, 0, 1, 2, 9, 2]) == "0-2,4,9"
    assert ranges(range(0, 100, 2)) == "0,2,4,6,8,…,98"


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["h.0.mlp", "h.1.mlp", "h.3.mlp"], ["h.0-1,3.mlp"]),
        (["0.norm", "1.norm"], ["0-1.norm"]),
        (["layer1.0.conv1", "layer2.0.conv1"], ["layer1.0.conv1", "layer2.0.conv1"]),
        (["layer1.0.conv1", "layer1.0.conv2"], ["layer1.0.conv1", "layer1.0.conv2"]),
        (["f0", "f1", "f2"], ["f0-2"]),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1"], ["a.0-1.b.0-1"]),
        (["a.0.b.0", "a.1.b.1"], ["a.*.b.*"]),
        (["a.0.b.7", "a.1.b.7"], ["a.0-1.b.7"]),
        (["run20261116123456", "run20261116123457"], ["run20261116123456", "run20261116123457"]),
        (["", ""], [""]),
        (["\0.1.\n", "\0.2.\n"], ["\0.1-2.\n"]),
        (["٣.a", "٤.a"], ["٣.a", "٤.a"]),
    ],
)
def test_folding(paths: list[str], expected: list[str]) -> None:
    found = fold(paths, path=lambda path: path, alike=lambda path: None)
    assert [item.where for item in found] == expected
    assert [path for item in found for path in item.members] == paths


def test_things_that_are_not_alike_are_not_folded() -> None:
    found = fold([("h.0", 1), ("h.1", 2), ("h.2", 1)], path=lambda item: item[0], alike=lambda item: item[1])
    assert [item.where for item in found] == ["h.0,2", "h.1"]


def test_identical_layers_are_one_row() -> None:
    rows = spent(Residency(keeping(chain(6))), Places(chain(6)))
    groups = {group.where: group for group in folded(rows) if group.members[0].decided.sort == "kept"}
    assert list(groups) == ["f0-4"]
    assert groups["f0-4"].bytes == 5
    assert groups["f0-4"].average == pytest.approx(sum(row.average for row in groups["f0-4"].members))


def test_every_row_is_in_one_group() -> None:
    for plan in PLANS:
        rows = spent(Residency(plan), Places(plan.graph))
        members = [row.name for group in folded(rows) for row in group.members]
        assert sorted(members) == sorted(row.name for row in rows)


@pytest.mark.slow
def test_choices_are_sorted_and_say_what_changes() -> None:
    graph = cnn(3)
    plans = frontier(graph)
    plan = plans.best("70%")
    whole = keeping_everything(plan).plan
    other = make_plan(graph, with_reruns(graph, 3, 9), method="by hand")
    found = choices(plan, whole, plans, [other])
    assert [choice.sort for choice in found].count("this") == 1
    assert {"this", "frontier", "other"} <= {choice.sort for choice in found}
    peaks = [choice.plan.peak for choice in found]
    assert peaks == sorted(peaks, reverse=True)
    (knee,) = [choice for choice in found if choice.is_knee]
    assert (knee.plan.peak, knee.label) == (plans.knee.peak, "frontier, the knee")
    picture = page(plan, frontier=plans, others=[other])
    assert picture.count('<circle class="knee"') == 1
    assert ">knee</text>" in picture
    assert not any(choice.is_knee for choice in choices(plan, whole, None, [other]))
    rows = changes(Residency(plan), whole, Places(graph))
    assert rows
    assert all(row.before != row.after for row in rows)
    assert any("recomputed" in row.before and row.after == "kept" for row in rows)
    assert changes(Residency(plan), plan, Places(graph)) == []


def test_plans_of_another_graph_are_refused() -> None:
    with pytest.raises(LowtideError, match="another graph"):
        page(keeping(cnn(3)), others=[keeping(cnn(2))])
    with pytest.raises(LowtideError, match="another graph"):
        page(keeping(cnn(3)), frontier=frontier(chain(3)))


def test_what_was_measured_is_shown() -> None:
    plan = rerun_small()
    html = page(plan, measured=Measurement(plan.peak, 2.0))
    assert "as predicted, to the byte" in html
    assert f"measured peak: {plan.peak} B" in html
    more = page(plan, measured=Measurement(plan.peak + 1, 2.0))
    assert f"{1 / plan.peak:+.2%} of the prediction" in more


def test_points_that_were_measured_are_drawn_and_compared() -> None:
    plan = rerun_small()
    # Workspaces are gone when an op has returned: that of linear is 7 bytes.
    points = {0: plan.timeline.resident[0] - 7, 1: plan.timeline.resident[1], 9: 1}
    html = page(plan, measured=Watched(plan.peak, 1.0, points))
    assert "measured after 3 runs, 2 of them as predicted to the byte" in html
    (path,) = re.findall(r'<path class="seen" d="([^"]+)"', html)
    assert path.count("M") == 3


def test_what_is_no_measurement_is_refused() -> None:
    plan = rerun_small()
    for wrong in (3, "8GiB", plan):
        with pytest.raises(LowtideError, match="measured= takes"):
            page(plan, measured=wrong)


def test_the_peak_of_compiled_buffers_is_marked() -> None:
    plan = replace(rerun_small(), compiled=290)
    html = page(plan)
    assert "peak of the compiled buffers: 290 B" in html
    assert f"The peak of {plan.timeline.peak} B is reached" in html


def test_what_is_reserved_above_the_peak_is_a_band_of_the_picture() -> None:
    plan = keeping(small())
    assert 'class="reserved"' not in page(plan)
    told = page(replace(plan, reserved=2 * plan.allocated))
    band = re.search(r'<path class="reserved" d="M[\d.]+,([\d.]+)H[\d.]+V([\d.]+)H', told)
    assert band
    top, low = map(float, band.groups())
    floor = 380 - 34  # where no byte is
    assert (floor - top) / (floor - low) == pytest.approx(2, abs=0.01)
    assert f"reserved {format_bytes(2 * plan.allocated)}, above the peak" in told


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
        if tag not in ("meta", "input"):
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
def test_the_policy_of_the_page_allows_its_own_script_and_style_alone(plan: Plan) -> None:
    html = page(plan)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    # A policy of hashes does not allow what stands in an attribute.
    assert not re.search(r"<[^>]*\s(style|on\w+)=", html.partition("<main>")[2].partition("<script")[0])


@pytest.mark.parametrize("plan", PLANS)
def test_page_is_well_formed_and_self_contained(plan: Plan) -> None:
    html = page(plan)
    checker = read(html)
    assert html.count("http") == html.count('<meta http-equiv="Content-Security-Policy"') == 1
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


@pytest.mark.slow
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
    assert short("\ud800") == r"\ud800"


@pytest.mark.slow
def test_a_step_of_5000_ops_is_under_a_megabyte() -> None:
    graph = scaled(5000)
    plan = make_plan(graph, with_reruns(graph, 0, 2000), method="random", budget=1 << 33)
    assert plan.timeline.again > 0
    assert len(page(plan).encode()) < 1_000_000


@pytest.mark.slow
def test_a_frame_s_text_is_escaped_once() -> None:
    capped = frontier(cnn(4)).best("60%")
    assert escape(page(capped)) in capped._repr_html_()
