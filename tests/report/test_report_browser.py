"""The report in a browser: it draws, answers to pointer and keyboard, and asks nobody for anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_report import NASTY, keeping, rerun_small, with_reruns

from browsers import PATIENCE, chromium
from graphs import chain, cnn, random_graph
from lowtide.evidence.watched_step import Watched
from lowtide.planner.frontiers import Frontier, frontier
from lowtide.plans.graph import Graph, Op, Value
from lowtide.plans.keep_all import keep_all
from lowtide.plans.planned_step import Plan, make_plan
from lowtide.plans.schedule import Run
from lowtide.report.page import page
from lowtide.solve import METHODS
from lowtide.units import format_bytes
from synthetic import scaled

pytestmark = pytest.mark.browser

Open = Callable[..., Any]
AXES = (("x", "width"), ("y", "height"))
HEADS = ("Where", "What", "Count", "Bytes", "There for", "On average", "Decided", "Source")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a page from a file; whatever it asks for or complains of fails the test."""
    asked: list[str] = []
    complaints: list[str] = []
    contexts: list[Any] = []

    def show_text(html: str, **options: Any) -> Any:
        path = tmp_path / f"{len(contexts)}.html"
        path.write_text(html, encoding="utf-8")
        contexts.append(browser.new_context(viewport={"width": 1160, "height": 800}, **options))
        opened = contexts[-1].new_page()
        opened.set_default_timeout(PATIENCE)
        opened.on("request", lambda request: asked.append(request.url))
        opened.on("console", lambda message: complaints.append(message.text))
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.on("dialog", lambda dialog: complaints.append(dialog.message))
        opened.goto(path.as_uri())
        if options.get("java_script_enabled", True) and "srcdoc" not in html:
            opened.wait_for_selector("html[data-ready]", state="attached")
        return opened

    yield show_text
    for context in contexts:
        context.close()
    assert complaints == []
    assert all(url.startswith(tmp_path.as_uri()) and url.endswith(".html") for url in asked), asked
    assert len(asked) == len(contexts)


@pytest.fixture(scope="module")
def plans() -> Frontier:
    return frontier(cnn(4))


@pytest.fixture(scope="module")
def capped(plans: Frontier) -> Plan:
    return plans.best("60%")


@pytest.fixture(scope="module")
def html(plans: Frontier, capped: Plan) -> str:
    other = make_plan(capped.graph, METHODS["sqrt_segments"](capped.graph, 0), method="sqrt_segments")
    points = dict(enumerate(capped.timeline.resident))
    found = Watched(capped.peak, capped.seconds, points)
    return page(capped, frontier=plans, others=[other], measured=found)


def random_plan() -> Plan:
    graph = random_graph(5, 12, takes=True)
    return make_plan(graph, with_reruns(graph, 2, 9), method="random")


def column(opened: Any, name: str) -> list[str]:
    place = HEADS.index(name) + 1
    return list(opened.locator(f"#spent tbody tr td:nth-child({place})").all_inner_texts())


def size(text: str) -> float:
    number, unit = text.split()
    return float(number) * 1024 ** ("B", "KiB", "MiB", "GiB").index(unit)


def test_it_draws_in_light_and_dark(show: Open, html: str, capped: Plan) -> None:
    grounds = set()
    for scheme in ("light", "dark"):
        opened = show(html, color_scheme=scheme)
        assert format_bytes(capped.peak) in opened.title()
        for name in ("Over the step", "What a cap costs", "At the peak", "Where it goes"):
            assert opened.get_by_role("heading", name=name).is_visible()
        box = opened.locator("#timeline").bounding_box()
        assert box["width"] > 900
        grounds.add(opened.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2


def test_it_is_not_wider_than_a_phone(show: Open, html: str) -> None:
    opened = show(html)
    opened.set_viewport_size({"width": 390, "height": 800})
    assert opened.evaluate("document.documentElement.scrollWidth") <= 390


def test_hovering_names_what_is_there(show: Open) -> None:
    plan = rerun_small()
    opened = show(page(plan))
    box = opened.locator("#timeline").bounding_box()
    # The first of twelve steps, just right of the axis.
    opened.mouse.move(box["x"] + box["width"] * 0.1, box["y"] + box["height"] / 2)
    said = opened.locator("#readout").inner_text()
    for part in (
        "at step 0 (forward)",
        "runs linear",
        "net.linear",
        "net.py:3",
        "workspace of linear",
        "40 B",
    ):
        assert part in said
    assert "optimizer state" not in said


@pytest.mark.parametrize("plan", [rerun_small(), random_plan()], ids=["by hand", "random"])
def test_every_step_is_told_as_it_is(show: Open, plan: Plan) -> None:
    opened = show(page(plan))
    opened.locator("#timeline").focus()
    opened.keyboard.press("Home")
    seen: set[str] = set()
    for index, (step, resident) in enumerate(zip(plan.schedule.steps, plan.timeline.resident, strict=True)):
        said = opened.locator("#readout").inner_text()
        assert f"{format_bytes(resident)} at step {index} (" in said
        if isinstance(step, Run):
            assert f"{'recomputes' if step.op in seen else 'runs'} {step.op}\n" in said
            seen.add(step.op)
        else:
            assert f"drops {step.value}" in said
        opened.keyboard.press("ArrowRight")


def test_the_timeline_is_reached_and_read_with_the_keyboard(show: Open, capped: Plan, html: str) -> None:
    opened = show(html)
    focused = "document.activeElement.id"
    for _ in range(8):
        opened.keyboard.press("Tab")
        if opened.evaluate(focused) == "timeline":
            break
    assert opened.evaluate(focused) == "timeline"
    last, peak = len(capped.schedule.steps) - 1, capped.timeline.peak_step
    for key, step in (("End", last), ("ArrowRight", last), ("Home", 0), ("ArrowLeft", 0), ("p", peak)):
        opened.keyboard.press(key)
        assert opened.get_attribute("#timeline", "aria-valuenow") == str(step)
        assert f"at step {step} " in opened.get_attribute("#timeline", "aria-valuetext")


def test_zooming_keeps_the_step_and_comes_back(show: Open, capped: Plan, html: str) -> None:
    opened = show(html)
    whole = opened.locator("#timeline path").first.get_attribute("d")
    before = opened.locator("#timeline .band-kept").get_attribute("d")
    opened.locator("#timeline").focus()
    opened.keyboard.press("p")
    for _ in range(2):
        opened.keyboard.press("+")
    assert opened.locator("#timeline .band-kept").get_attribute("d") != before
    assert f"at step {capped.timeline.peak_step} " in opened.locator("#readout").inner_text()
    opened.keyboard.press("End")
    assert f"at step {len(capped.schedule.steps) - 1} " in opened.locator("#readout").inner_text()
    opened.get_by_role("button", name="Whole step").click()
    assert opened.locator("#timeline path").first.get_attribute("d") == whole


def test_what_was_measured_lies_on_what_was_predicted(show: Open, html: str) -> None:
    opened = show(html)
    seen = "#timeline .seen"
    whole = opened.locator(seen).get_attribute("d")
    opened.get_by_role("button", name="Zoom in").click()
    assert opened.locator(seen).get_attribute("d") != whole
    opened.get_by_role("button", name="Whole step").click()
    assert opened.locator(seen).get_attribute("d") == whole
    opened.get_by_label("keeping everything", exact=True).first.check()
    assert opened.locator(seen).count() == 0


def test_dragging_zooms(show: Open, html: str) -> None:
    opened = show(html)
    box = opened.locator("#timeline").bounding_box()
    before = opened.locator("#timeline text").all_inner_texts()
    opened.mouse.move(box["x"] + 300, box["y"] + 150)
    opened.mouse.down()
    opened.mouse.move(box["x"] + 500, box["y"] + 150)
    opened.mouse.up()
    assert opened.locator("#timeline text").all_inner_texts() != before


def test_keeping_everything_can_be_looked_at(show: Open, capped: Plan, html: str) -> None:
    opened = show(html)
    opened.get_by_label("keeping everything", exact=True).first.check()
    assert f"{format_bytes(capped.uncapped.peak)} at step" in opened.locator("#readout").inner_text()
    assert opened.locator("#timeline .band-recomputed").count() == 0
    opened.get_by_label("this plan", exact=True).check()
    assert f"{format_bytes(capped.timeline.peak)} at step" in opened.locator("#readout").inner_text()


def test_the_table_is_sorted_by_any_column(show: Open, html: str) -> None:
    opened = show(html)
    averages = [size(text) for text in column(opened, "On average")]
    assert averages == sorted(averages, reverse=True)
    head = opened.locator("#spent th", has_text="Bytes")
    head.get_by_role("button").click()
    found = [size(text) for text in column(opened, "Bytes")]
    assert found == sorted(found, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"
    opened.keyboard.press("Enter")
    found = [size(text) for text in column(opened, "Bytes")]
    assert found == sorted(found)
    assert head.get_attribute("aria-sort") == "ascending"
    opened.get_by_role("button", name="Decided").click()
    decided = column(opened, "Decided")
    assert decided == sorted(decided)
    assert len(set(decided)) > 1


def test_the_table_is_filtered(show: Open, html: str) -> None:
    opened = show(html)
    every = len(column(opened, "Where"))
    opened.get_by_label("Decided").select_option("recomputed")
    decided = column(opened, "Decided")
    assert 0 < len(decided) < every
    assert all("recomputed" in text for text in decided)
    opened.get_by_label("Decided").select_option("all decisions")
    opened.get_by_label("Filter").fill("ReLU  kept")
    found = zip(column(opened, "Where"), column(opened, "Decided"), strict=True)
    assert all("relu" in where and "kept" in how for where, how in found)
    opened.get_by_label("Filter").fill("nowhere")
    assert column(opened, "Where") == []
    assert opened.locator("#matches").inner_text().startswith("0 of ")


def test_a_folded_row_opens_and_closes(show: Open) -> None:
    opened = show(page(keeping(chain(6))))
    opened.get_by_label("Decided").select_option("kept")
    assert column(opened, "Where") == ["f0-4"]
    assert column(opened, "Count") == ["\N{MULTIPLICATION SIGN}5"]
    opened.get_by_role("button", name="f0-4").click()
    assert sorted(column(opened, "Where")[1:]) == [f"f{index}" for index in range(5)]
    opened.keyboard.press("Enter")
    assert column(opened, "Where") == ["f0-4"]


def test_choosing_a_plan_shows_what_it_changes(show: Open, html: str) -> None:
    opened = show(html)
    assert not opened.locator("#changes").is_visible()
    opened.locator("#choices").get_by_label("frontier").last.check()
    assert "would change" in opened.locator("#changes h3").inner_text()
    assert opened.locator("#changes tbody tr").count() > 0
    assert opened.locator("#timeline .chosen").count() == 1
    assert opened.locator("#tradeoff .picked").count() == 1
    opened.locator("#tradeoff .point-other").click()
    assert "sqrt_segments" in opened.locator("#changes").inner_text()
    opened.locator("#tradeoff .point-this").click()
    assert not opened.locator("#changes").is_visible()
    assert opened.locator("#timeline .chosen").count() == 0


@pytest.mark.parametrize("place", [1, -1])
def test_names_of_points_do_not_cover_the_budget(show: Open, plans: Frontier, place: int) -> None:
    chosen = plans.plans[place]
    opened = show(page(replace(chosen, budget=chosen.peak)))
    label = opened.locator("#tradeoff .budget-label").bounding_box()
    for index in range((names := opened.locator("#tradeoff .name")).count()):
        box = names.nth(index).bounding_box()
        apart = [
            abs(label[a] + label[b] / 2 - box[a] - box[b] / 2) - (label[b] + box[b]) / 2 for a, b in AXES
        ]
        assert max(apart) >= -2, names.nth(index).text_content()


def test_paper_has_everything_and_no_buttons(show: Open, html: str) -> None:
    opened = show(html)
    opened.emulate_media(media="print")
    assert not opened.get_by_role("button", name="Zoom in").is_visible()
    rows = opened.locator("#peak tbody tr")
    assert all(row.is_visible() for row in rows.all())
    assert opened.locator("#timeline").is_visible()


def test_it_can_be_read_without_script(show: Open, html: str, capped: Plan) -> None:
    opened = show(html, java_script_enabled=False)
    assert opened.locator("#timeline .band-kept").count() == 1
    assert opened.locator("#spent tbody tr").count() > 5
    assert f"The peak of {format_bytes(capped.peak)}" in opened.locator("#readout").inner_text()
    assert not opened.get_by_role("button", name="Zoom in").is_visible()


def test_names_are_shown_as_they_are(show: Open) -> None:
    values = (Value(NASTY + "w", 9, "parameter"), Value(NASTY, 8), Value(NASTY + "y", 1, "output"))
    ops = (
        Op(NASTY, (NASTY + "w",), (NASTY,), workspace=3, module=NASTY, source=NASTY, target=NASTY),
        Op("last", (NASTY,), (NASTY + "y",), module=NASTY),
    )
    graph = Graph(ops, values, device=NASTY, prices=NASTY, fixed={NASTY: 5})
    opened = show(page(keeping(graph)))
    opened.locator("#timeline").focus()
    opened.keyboard.press("Home")
    assert "</script><script>alert(1)</script><b>&\"'" in opened.locator("#readout").inner_text()
    assert opened.locator("#spent b, #readout dl b, #peak b").count() == 0


def test_it_stands_in_a_notebook(show: Open, capped: Plan) -> None:
    opened = show(f"<!doctype html><title>notebook</title><body>{capped._repr_html_()}</body>")
    frame = opened.frame_locator("iframe")
    frame.locator("html[data-ready]").wait_for(state="attached")
    assert format_bytes(capped.peak) in frame.locator("#readout").inner_text()


ONE = Graph(
    (Op("mul", ("x", "w"), ("y",), 1.0),),
    (Value("x", 4, "input"), Value("w", 4, "parameter"), Value("y", 4, "output")),
)
NONE = Graph((), (Value("w", 8, "parameter"),))


@pytest.mark.parametrize("ops", [0, 1, 50_000])
def test_any_size_opens_and_answers_with_as_few_elements(show: Open, ops: int) -> None:
    """What a browser draws decides how long it takes: 781 elements for 50 000 ops, as for 5 000."""
    graph = scaled(ops) if ops > 1 else ONE if ops else NONE
    opened = show(page(make_plan(graph, keep_all(graph), method="keep_all", budget=1 << 40)))
    opened.locator("#timeline").focus()
    opened.keyboard.press("End")
    opened.keyboard.press("+")
    opened.get_by_label("Filter").fill("w")
    assert opened.locator("*").count() < 1000
    assert len(column(opened, "Where")) > 0
    if ops:
        assert f"at step {len(keep_all(graph).steps) - 1} " in opened.locator("#readout").inner_text()


def test_a_browser_does_not_run_what_the_page_did_not_come_with(browser: Any, tmp_path: Path) -> None:
    """As if a name had become markup: the policy stops it, in an attribute and in a script."""
    html = page(keeping(chain(4)))
    planted = '<img src="x:" onerror="window.planted = 1"><script>window.planted = 2</script>'
    (tmp_path / "page.html").write_text(html.replace("<main>", f"<main>{planted}", 1), encoding="utf-8")
    opened = browser.new_context().new_page()
    opened.set_default_timeout(PATIENCE)
    opened.goto((tmp_path / "page.html").as_uri())
    opened.wait_for_selector("html[data-ready]", state="attached")
    assert opened.evaluate("window.planted") is None
