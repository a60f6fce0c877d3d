"""Draw the pictures of docs/methods: what each method does on one small step at half of its natural peak.

python benchmarks/pictures.py            # writes docs/methods/NAME.svg, and docs/sketch.svg
python benchmarks/pictures.py --check    # exit status 1 where a picture is not up to date

A picture is resident bytes over the steps of the schedule, split as in the report, with a tick below each run
again. That of `bound` is extra time against the budget, that of `sketch` noise against what is kept. The step
is small enough for `exact`. The same code gives the same bytes; what needs the compiled search or HiGHS is
left as it is where they are missing.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from html import escape
from importlib import util
from pathlib import Path

from drawing import document, legend_lines
from lowtide.planner.frontiers import frontier
from lowtide.plans.graph import Graph
from lowtide.plans.keep_all import keep_all
from lowtide.plans.planned_step import Plan, make_plan
from lowtide.plans.schedule import Run
from lowtide.plans.simulator import simulate
from lowtide.report.bands import aligned, bands, buckets
from lowtide.report.residency import Residency, keeping_everything
from lowtide.report.svg import HEIGHT, LEFT, RIGHT, WIDTH, Frame, chart, shades
from lowtide.solve import METHODS
from lowtide.solve.bound.method import bound_by_moments
from lowtide.solve.search.build import library
from lowtide.units import format_bytes
from sketch_picture import draw as sketch
from synthetic import MIB, Tape

DOCS = Path(__file__).parent.parent / "docs"
BLOCKS = 5
SHARE = 0.5
STEPS = 400
"""Buckets of a picture: as many as there are steps, for a step as small as this one."""

BUDGETS, LEAST = 100, 0.22
"""Of the picture of the bound: how many budgets, and the smallest as a share of keeping everything."""

SAME = ("lower_sets_approximate",)
"""Methods without a picture: on this step it would be that of `lower_sets`."""


@cache
def small_step() -> Graph:
    """A residual network of equal blocks: normalisation, two linear layers around a GELU, the skip."""
    tape, size, weight = Tape(), 4 * MIB, MIB // 2
    x = tape.linear("embed", tape.value("tokens", MIB // 4, "input"), size, weight, 1.0)
    for b in range(BLOCKS):
        norm = tape.op(f"{b}.norm", [x], [size], 0.5, [x])
        up = tape.linear(f"{b}.up", norm, 2 * size, weight, 3.0)
        gelu = tape.op(f"{b}.gelu", [up], [2 * size], 0.7, [up])
        down = tape.linear(f"{b}.down", gelu, size, weight, 3.0)
        x = tape.op(f"{b}.add", [x, down], [size], 0.4, [])
    return tape.graph(tape.linear("head", x, 512, weight, 1.0))


def timeline(method: str) -> str:
    """The picture of a method's schedule."""
    graph = small_step()
    budget = int(SHARE * simulate(graph, keep_all(graph)).peak)
    patience = {"seconds_limit": 3600.0} if method == "exact" else {}  # a busy machine draws the same
    plan = make_plan(graph, METHODS[method](graph, budget, **patience), method=method, budget=budget)
    layers, drawn = bands(Residency(plan)), buckets(plan.timeline.resident, STEPS)
    uncapped = aligned(plan, keeping_everything(plan).plan)
    inside = chart(plan, layers, drawn, uncapped).partition(">")[2].removesuffix("</svg>")
    names = [(band.name, shade) for band, shade in zip(layers, shades(layers), strict=True)]
    return document(caption(plan), [inside, *ticks(plan), *legend(names)])


def caption(plan: Plan) -> str:
    again = recomputations(plan)
    fits = "" if plan.budget is None or plan.peak <= plan.budget else ", over the budget"
    return (
        f"{plan.method}: peak {format_bytes(plan.peak)}, {plan.peak / plan.uncapped.peak:.1%} of keeping "
        f"everything{fits}; {len(again)} recomputations, extra time {plan.extra:+.1%}"
    )


def recomputations(plan: Plan) -> list[int]:
    """The steps that run an op which ran before."""
    seen: set[str] = set()
    again = []
    for index, step in enumerate(plan.schedule.steps):
        if isinstance(step, Run):
            if step.op in seen:
                again.append(index)
            seen.add(step.op)
    return again


def ticks(plan: Plan) -> Iterable[str]:
    frame = Frame(len(plan.timeline.resident), 1)
    marks = "".join(f"M{frame.x(step + 0.5):.1f},{HEIGHT - 6}v14" for step in recomputations(plan))
    yield f'<text x="{LEFT - 8}" y="{HEIGHT + 5}" text-anchor="end">recomputed</text>'
    yield f'<path class="again" d="{marks}"/>' if marks else ""


def legend(names: Sequence[tuple[str, str]]) -> Iterable[str]:
    x = float(LEFT)
    for name, shade in names:
        yield f'<rect class="{shade}" x="{x:.0f}" y="{HEIGHT + 22}" width="12" height="12"/>'
        yield f'<text x="{x + 17:.0f}" y="{HEIGHT + 32}">{escape(name)}</text>'
        x += 34 + 7 * len(name)
    yield f'<path class="uncapped" d="M{x:.0f},{HEIGHT + 28}h16"/>'
    yield f'<text x="{x + 21:.0f}" y="{HEIGHT + 32}">keeping everything</text>'


def bound() -> str:
    """The picture of the bound: extra time against the budget, proven and found."""
    graph = small_step()
    plans = frontier(graph)
    top, low = plans.vanilla, int(LEAST * plans.vanilla)
    budgets = range(top, low, (low - top) // BUDGETS)
    proven = [(budget, extra_at_least(graph, budget)) for budget in budgets]
    found = [(plan.peak, plan.extra) for plan in plans]
    axes = Axes(low, top, 1.05 * plans[-1].extra)
    upper, lower = axes.stairs([(top, 0.0), *found]), axes.stairs(proven, ahead=True)
    corner = f"{axes.x(low):.1f},{axes.y(0):.1f}"
    parts = [
        *axes.grid(),
        f'<path class="open" d="M{upper}L{axes.x(low):.1f},{axes.y(axes.most):.1f}L{corner}Z"/>',
        f'<path class="never" d="M{lower}L{axes.x(low):.1f},{axes.y(axes.most):.1f}L{corner}Z"/>',
        f'<path class="proven" d="M{lower}"/>',
        f'<path class="found" d="M{upper}"/>',
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT + 5}" text-anchor="end">budget, of keeping everything</text>',
        *legend_lines(("found", "auto"), ("proven", "lower bound: no plan is below it")),
    ]
    best, least = plans.best(f"{SHARE:.0%}").extra, extra_at_least(graph, int(SHARE * top))
    return document(f"bound: at {SHARE:.0%} auto takes {best:+.1%}, no plan less than {least:+.1%}", parts)


def extra_at_least(graph: Graph, budget: int) -> float:
    return bound_by_moments(graph, budget) / graph.seconds - 1


class Axes:
    """Where budgets and extra times lie in the picture of the bound."""

    def __init__(self, low: int, top: int, most: float) -> None:
        self.low, self.top, self.most = low, top, most

    def x(self, size: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (size - self.low) / (self.top - self.low)

    def y(self, extra: float) -> float:
        return Frame(1, 1).y(min(extra / self.most, 1))

    def stairs(self, points: Sequence[tuple[int, float]], *, ahead: bool = False) -> str:
        """A line by falling size that says too much nowhere.

        A plan is the answer from its own peak up to the next larger one. A bound (`ahead`) is valid for
        smaller budgets too, down to the next one that was looked at.
        """
        corners = [points[0]]
        for size, extra in points[1:]:
            corners += [(size, corners[-1][1]) if ahead else (corners[-1][0], extra), (size, extra)]
        corners.append((corners[-1][0], math.inf))
        drawn = [f"{self.x(size):.1f},{self.y(extra):.1f}" for size, extra in corners]
        return "L".join(dict.fromkeys(drawn))

    def grid(self) -> Iterable[str]:
        for step in range(0, int(self.most * 100) + 1, 10):
            y = f"{self.y(step / 100):.1f}"
            yield f'<path class="grid" d="M{LEFT},{y}H{WIDTH - RIGHT}"/>'
            yield f'<text x="{LEFT - 8}" y="{y}" dy="0.35em" text-anchor="end">+{step}%</text>'
        for step in range(30, 101, 10):
            x, anchor = f"{self.x(step / 100 * self.top):.1f}", "end" if step == 100 else "middle"
            yield f'<text x="{x}" y="{HEIGHT - 18}" text-anchor="{anchor}">{step}%</text>'


def pictures() -> dict[str, Callable[[], str]]:
    """What draws each picture, by its name."""
    methods = [name for name in METHODS if name not in SAME]
    drawn = {**{name: partial(timeline, name) for name in methods}, "bound": bound}
    return {**{f"methods/{name}": draw for name, draw in drawn.items()}, "sketch": sketch}


def missing(name: str) -> str:
    """What this machine lacks to draw a picture, if anything."""
    if name in ("methods/auto", "methods/bound", "methods/exact") and library() is None:
        return "the compiled search"
    return "highspy" if name == "methods/exact" and util.find_spec("highspy") is None else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a picture is stale")
    check = parser.parse_args().check
    stale = []
    for name, draw in pictures().items():
        path = DOCS / f"{name}.svg"
        if lacks := missing(name):
            print(f"{name}: left as it is, {lacks} is not available here")
            continue
        new = draw()
        if not path.exists() or path.read_text(encoding="utf-8") != new:
            stale.append(name)
            if not check:
                path.write_text(new, encoding="utf-8")
    if stale:
        print(f"{'not up to date' if check else 'written'}: {', '.join(stale)}")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
