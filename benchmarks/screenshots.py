"""Take the screenshots of docs/report.md: the reports of GPT-2 medium and U-Net, planned without a GPU.

    PYTHONPATH=src python benchmarks/screenshots.py             # writes docs/report/NAME.png
    PYTHONPATH=src python benchmarks/screenshots.py --keep DIR  # and leaves the reports there

Graphs come from the corpus, at an H200's roofline prices. It needs Chromium and Playwright (the extra dev).
Pixels differ a little between versions of the browser and its fonts, so nothing compares them.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from corpus import load
from lowtide.planner.frontiers import frontier
from lowtide.plans.planned_step import make_plan
from lowtide.solve import find_method

FOLDER = Path(__file__).parent.parent / "docs" / "report"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
POINTS = 24
MOST_BYTES = 150_000
OTHERS = ("sqrt_segments", "lower_sets_approximate")


@dataclass(frozen=True)
class Shot:
    """A picture of a part of a report: what a reader does before it is taken, and how much of it is shown."""

    name: str
    network: str
    part: str
    scheme: str
    act: Callable[[Page], Any] = lambda page: None
    height: int = 860


def point_at_recomputation(page: Page) -> None:
    """Some steps into the backward, where layers are recomputed."""
    box = page.locator("#timeline").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.62 * box["width"], box["y"] + 200)


def choose_a_smaller_plan(page: Page) -> None:
    radios = page.locator("input[name=choice]")
    radios.nth(radios.count() - 4).check()


def zoom_in_on_the_peak(page: Page) -> None:
    page.locator("#timeline").focus()
    for key in "p+++":
        page.keyboard.press(key)
    page.locator("#timeline").blur()


SHOTS = (
    Shot("gpt2-medium-timeline", "gpt2_medium", "Over the step", "light", point_at_recomputation),
    Shot("gpt2-medium-choices", "gpt2_medium", "What a cap costs", "light", choose_a_smaller_plan),
    Shot("gpt2-medium-values", "gpt2_medium", "Where it goes", "light", height=640),
    Shot("unet-timeline", "unet", "Over the step", "dark", point_at_recomputation),
    Shot("unet-zoomed", "unet", "Over the step", "light", zoom_in_on_the_peak),
    Shot("unet-peak", "unet", "At the peak", "dark", height=620),
)


def write_report(network: str, budget: str, path: Path) -> Path:
    """The report of a network's plan under a budget, with the frontier and other methods' plans."""
    graph = load(network)
    plans = frontier(graph, points=POINTS)
    plan = plans.best(budget).with_bound()
    assert plan.budget is not None
    others = [make_plan(graph, find_method(name)(graph, plan.budget), method=name) for name in OTHERS]
    return plan.report(path, frontier=plans, others=others)


def take(page: Page, shot: Shot, path: Path) -> None:
    shot.act(page)
    part = page.locator("section", has=page.get_by_role("heading", name=shot.part, exact=True))
    part.scroll_into_view_if_needed()
    box = part.bounding_box()
    assert box is not None
    scrolled = page.evaluate("window.scrollY")
    clip = {
        "x": box["x"] - 20,
        "y": box["y"] + scrolled - 12,
        "width": box["width"] + 40,
        "height": min(box["height"] + 24, shot.height),
    }
    page.screenshot(path=path, clip=clip, full_page=True)
    size = path.stat().st_size
    assert size < MOST_BYTES, f"{path.name} has {size} bytes"
    print(f"{path.name}: {size} bytes")


def take_all(folder: Path) -> None:
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    reports = {
        "gpt2_medium": write_report("gpt2_medium", "50%", folder / "gpt2_medium.html"),
        "unet": write_report("unet", "55%", folder / "unet.html"),
    }
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for shot in SHOTS:
            page = browser.new_page(viewport={"width": 1120, "height": 900}, color_scheme=shot.scheme)
            page.goto(reports[shot.network].as_uri())
            page.wait_for_selector("html[data-ready]", state="attached")
            take(page, shot, FOLDER / f"{shot.name}.png")
            page.close()
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the reports in this folder")
    keep = parser.parse_args().keep
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        take_all(keep.resolve())
        return
    with tempfile.TemporaryDirectory() as folder:
        take_all(Path(folder))


if __name__ == "__main__":
    main()
