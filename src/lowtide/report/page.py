"""The plan as one HTML document: the figures, the timeline, the peak, where it all goes, what else there is.

The document is whole in itself: style, script and data are inside and nothing is fetched. It can be read and
printed without the script, which adds what needs a reader's hand: hovering, zooming, sorting, filtering,
choosing. All text of the plan is escaped, names are cut to a bounded length and pictures are drawn in a
bounded number of buckets, so the page stays small whatever the graph is. Its Content-Security-Policy names
script and style by their hashes: were a name to become markup after all, the browser would not obey it.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ..planner.frontiers import Frontier
from ..plans import ports
from ..plans.planned_step import Plan
from ..units import format_bytes
from .axes import byte_ticks
from .bands import Band, aligned, bands, buckets
from .choices import PlanChoice, choices
from .header import header
from .markup import say
from .measured import Measured
from .payload import FRAME, Texts, pack, table_of, told_choices, view_of
from .place import Places
from .residency import Residency, keeping_everything
from .sections import choice_section, peak_section, spent_section, timeline_section
from .spent import Group, folded, spent
from .svg import Mark, chart, top_of
from .tradeoff import tradeoff

__all__ = ["page"]

BUCKETS = 500
SCRIPTS = ("format.js", "view.js", "timeline.js", "values.js", "choices.js", "page.js")


def page(
    plan: Plan, *, frontier: Frontier | None = None, others: Iterable[Plan] = (), measured: Any = None
) -> str:
    """The report of a plan, as the text of an HTML file.

    `frontier` and `others` are plans of the same graph to compare with, `measured` what `lowtide.verify`,
    `lowtide.watch` or `lowtide.measure` returned for the step.
    """
    known = _known(plan, frontier, others, measured)
    sections = [
        header(plan, known.measured),
        timeline_section(known.shown, known.layers, known.picture, known.legend, both=known.capped),
        choice_section(plan, known.found, tradeoff(plan, known.found, known.measured)),
        peak_section(known.shown, known.places, known.found),
        spent_section(known.groups),
    ]
    script = '\n"use strict";\n(() => {\n' + "\n".join(map(_asset, SCRIPTS)) + "})();\n"
    style = f"\n{_asset('page.css')}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(script, style)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Lowtide plan: {format_bytes(plan.peak)} on {say(plan.graph.device)}</title>\n"
        f"<style>{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(sections)
        + f'\n</main>\n<script id="data" type="text/plain">{pack(_data(known))}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _policy(script: str, style: str) -> str:
    """What a browser lets the page do: run this script and this style, and nothing else, from nowhere."""
    allowed = (f"'sha256-{_digest(text)}'" for text in (script, style))
    sources = zip(("script-src", "style-src"), allowed, strict=True)
    rules = [
        "default-src 'none'",
        *(" ".join(pair) for pair in sources),
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "; ".join(rules)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@dataclass(frozen=True)
class _Known:
    """All that the sections and the script tell, worked out once."""

    shown: Residency
    uncapped: Residency | None
    line: Sequence[int]
    places: Places
    layers: list[Band]
    groups: list[Group]
    found: list[PlanChoice]
    measured: Measured
    marks: list[Mark]

    @property
    def legend(self) -> list[tuple[str, str]]:
        """What the marks of measurements mean: a sign and words."""
        says = self.measured.told(self.shown.plan)
        return [("•", says)] * bool(says) + [("\N{MULTIPLICATION SIGN}", mark.says) for mark in self.marks]

    @property
    def capped(self) -> bool:
        return self.uncapped is not None

    @property
    def picture(self) -> str:
        plan = self.shown.plan
        drawn = buckets(plan.timeline.resident, BUCKETS)
        return chart(plan, self.layers, drawn, self.line, self.marks, self.measured.points)


def _known(plan: Plan, frontier: Frontier | None, others: Iterable[Plan], measured: Any) -> _Known:
    shown, whole, places = Residency(plan), keeping_everything(plan), Places(plan.graph)
    line = aligned(plan, whole.plan)
    told = Measured.of(plan, measured)
    return _Known(
        shown=shown,
        uncapped=None if whole.plan.schedule == plan.schedule else whole,
        line=line,
        places=places,
        layers=bands(shown),
        groups=folded(spent(shown, places)),
        found=choices(plan, whole.plan, frontier, others),
        measured=told,
        marks=_marks(plan, line, told),
    )


def _marks(plan: Plan, line: Sequence[int], measured: Measured) -> list[Mark]:
    peak = plan.timeline.peak_step
    highest = max(range(len(line)), key=line.__getitem__, default=0)
    found = [
        (peak, measured.peak, "measured peak"),
        (highest, measured.uncapped_peak, "measured uncapped peak"),
        (peak, measured.compiled, "peak of the compiled buffers"),
    ]
    marks = ((step, size, f"{name}: {format_bytes(size)}") for step, size, name in found if size is not None)
    return [Mark(step, size, says) for step, size, says in marks]


def _data(known: _Known) -> dict[str, Any]:
    texts = Texts()
    shown = known.shown
    top = top_of(shown.plan, known.marks)
    views = [view_of(shown, known.layers, texts)]
    if known.uncapped is not None:
        views.append(view_of(known.uncapped, bands(known.uncapped), texts))
    data = {
        "frame": {**FRAME, "bytes": top, "ticks": byte_ticks(top)},
        "budget": shown.plan.budget,
        "reserved": _between(shown.plan),
        "marks": [[mark.step, mark.bytes, mark.says] for mark in known.marks],
        "points": known.measured.points,
        "uncapped": _changes(known.line) if known.uncapped is not None else [],
        "views": views,
        "choices": told_choices(shown, known.found, known.places, texts),
        **table_of(shown, known.places, known.groups, texts),
    }
    return {**data, "texts": texts.all}


def _between(plan: Plan) -> list[int]:
    """What is allocated at the peak and what is reserved for it, where that is told."""
    return [] if plan.reserved is None else [plan.allocated, plan.reserved]


def _changes(line: Sequence[int]) -> list[tuple[int, int]]:
    """The steps at which a line changes, with what it changes to."""
    return [(at, size) for at, size in enumerate(line) if not at or size != line[at - 1]]


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


ports.fill("page", page)
