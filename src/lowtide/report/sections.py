"""The sections of the page below its head, as they are before a reader touches anything."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import accumulate

from ..plans.planned_step import Plan
from ..units import format_bytes, format_seconds
from .advice import advice
from .bands import Band
from .choices import PlanChoice
from .decision import SORTS
from .markup import say, table
from .moment import peak_moment
from .peak import HELD, IN_USE, WAITING, Alive, Crowd, alive_at_peak, crowds
from .place import Places
from .residency import Residency
from .spent import Group
from .svg import shades

__all__ = ["choice_section", "peak_section", "spent_section", "timeline_section"]

PEAK_ROWS = 300
SPENT_ROWS = 40


def timeline_section(
    shown: Residency, layers: Sequence[Band], picture: str, signs: Sequence[tuple[str, str]], *, both: bool
) -> str:
    """The timeline with its legend, its buttons and the place where the script tells what is there."""
    whole = '<label><input type="radio" name="view" value="1">keeping everything</label>'
    other = whole if both else ""
    return (
        '<section>\n<h2>Over the step</h2>\n<p class="screen">Bytes on the device while each step runs. '
        "Point at the picture, or focus it and use the arrow keys (Home, End, Page Up, Page Down; p for the "
        "peak; + and - to zoom, 0 for the whole step). Drag to zoom.</p>\n"
        '<div class="tools screen" hidden id="tools">'
        f'<label><input type="radio" name="view" value="0" checked>this plan</label>{other}<span></span>'
        '<button id="in">Zoom in</button><button id="out">Zoom out</button>'
        '<button id="whole">Whole step</button></div>\n'
        f'<figure>{picture}<ul class="legend">{"".join(_legend(shown.plan, layers, signs, both=both))}</ul>'
        f'<div id="readout">{escape(peak_moment(shown.plan))}</div></figure>\n</section>'
    )


def _legend(plan: Plan, layers: Sequence[Band], signs: Sequence[tuple[str, str]], *, both: bool) -> list[str]:
    keys = [
        (shade, band.name, max(band.resident)) for band, shade in zip(layers, shades(layers), strict=True)
    ]
    items = [
        f'<li><i class="{shade}"></i>{say(name)} <small>up to {format_bytes(size)}</small></li>'
        for shade, name, size in reversed(keys)
    ]
    if both:
        items.append('<li><i class="key-uncapped"></i>keeping everything, at the same op</li>')
    if plan.reserved is not None:
        items.append(
            f'<li><i class="key-reserved"></i>reserved {format_bytes(plan.reserved)}, above the peak</li>'
        )
    if plan.budget is not None:
        items.append(f'<li><i class="key-budget"></i>budget {format_bytes(plan.budget)}</li>')
    items += [f'<li><i class="key-measured">{sign}</i>{say(says)}</li>' for sign, says in signs]
    items.append('<li id="chosen-key" hidden><i class="key-chosen"></i><span></span></li>')
    return items


def peak_section(shown: Residency, places: Places, found: Sequence[PlanChoice]) -> str:
    """What is there at the peak, why, and what would have to change."""
    alive = alive_at_peak(shown, places)
    rows = crowds(alive)
    cells = [_crowd_cells(crowd) for crowd in rows[:PEAK_ROWS]]
    if rest := rows[PEAK_ROWS:]:
        count = sum(len(crowd.members) for crowd in rest)
        size = format_bytes(sum(crowd.bytes for crowd in rest))
        cells.append((f"<small>{count} smaller ones</small>", "", "", size, "", "", ""))
    total = ("all", "", f"{len(alive)}", format_bytes(shown.timeline.peak), "", "", "")
    head = ("Where", "What", "Count", "Bytes", "Why it is there", "To recompute it", "Source")
    lines = advice(shown, alive, [choice.plan for choice in found if choice.sort == "frontier"])
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return (
        f"<section>\n<h2>At the peak</h2>\n<p>{escape(peak_moment(shown.plan))}</p>\n{_shares(alive)}"
        f'<h3>To go lower</h3>\n<ul class="advice">{items}</ul>\n'
        + table(head, cells, numbers=frozenset({2, 3}), name="peak", total=total)
        + '<p class="screen"><button id="all-alive" hidden>Show all</button></p>\n</section>'
    )


def _shares(alive: Sequence[Alive]) -> str:
    """A bar of what is held, in use and waiting."""
    sizes = {why: sum(item.bytes for item in alive if item.why == why) for why in (HELD, IN_USE, WAITING)}
    whole = max(sum(sizes.values()), 1)
    says = {
        HELD: "held: no schedule may drop it",
        IN_USE: "in use by the op that runs",
        WAITING: "waiting for a later step",
    }
    starts = accumulate(sizes.values(), initial=0)
    # Drawn by attributes: a style of its own is what the page's policy forbids.
    bars = "".join(
        f'<rect class="why-{why.split()[0]}" x="{start / whole:.4f}" width="{size / whole:.4f}" height="1"/>'
        for start, (why, size) in zip(starts, sizes.items(), strict=False)
        if size
    )
    keys = "".join(
        f'<li><i class="why-{why.split()[0]}"></i>{says[why]} <small>{format_bytes(size)}</small></li>'
        for why, size in sizes.items()
    )
    drawn = (
        f'<svg class="shares" viewBox="0 0 1 1" preserveAspectRatio="none" aria-hidden="true">{bars}</svg>'
    )
    return f'{drawn}<ul class="legend">{keys}</ul>\n'


def _crowd_cells(crowd: Crowd) -> tuple[str, ...]:
    first, steps = crowd.members[0], crowd.until
    why = first.why
    if steps:
        why = f"waits for step {steps[0]}" + (f" to {steps[1]}" if steps[1] != steps[0] else "")
    again = ""
    if first.why == WAITING and first.stay.what == "value":
        again = "may run only once" if crowd.seconds is None else format_seconds(crowd.seconds)
    return (
        say(crowd.where),
        say(first.place.what),
        _count(len(crowd.members)),
        format_bytes(crowd.bytes),
        escape(why),
        again,
        say(first.place.source, 48),
    )


def spent_section(groups: Sequence[Group]) -> str:
    """The values by bytes times lifetime; the script makes the table sortable and puts all rows into it."""
    cells = [_group_cells(group) for group in groups[:SPENT_ROWS]]
    head = ("Where", "What", "Count", "Bytes", "There for", "On average", "Decided", "Source")
    options = "".join(f"<option>{sort}</option>" for sort in ("all decisions", *SORTS))
    some = f"<noscript><p>The first {SPENT_ROWS} of {len(groups)} rows.</p></noscript>\n"
    return (
        "<section>\n<h2>Where it goes</h2>\n<p>Values by bytes times lifetime, as bytes averaged over the "
        "step; identical layers are one row.</p>\n"
        + (some if len(groups) > SPENT_ROWS else "")
        + '<div class="tools screen" hidden id="filters"><label>Filter '
        '<input type="search" id="filter" placeholder="module, op or source"></label>'
        f'<label>Decided <select id="sort-of">{options}</select></label>'
        '<span id="matches" role="status"></span></div>\n'
        + table(head, cells, numbers=frozenset({2, 3, 4, 5}), name="spent")
        + '<p class="screen"><button id="more" hidden>Show more</button></p>\n</section>'
    )


def _group_cells(group: Group) -> tuple[str, ...]:
    first, count = group.members[0], len(group.members)
    share = sum(member.share for member in group.members) / count
    return (
        say(group.where),
        say(first.place.what),
        _count(count),
        format_bytes(group.bytes),
        f"{share:.1%}",
        format_bytes(group.average),
        escape(str(first.decided)),
        say(first.place.source, 48),
    )


def _count(count: int) -> str:
    return f"&times;{count}" if count > 1 else ""


def choice_section(plan: Plan, found: Sequence[PlanChoice], picture: str) -> str:
    """Peak against time: the plans to choose from, as a picture and as a table."""
    head = ("Plan", "Peak", "Of uncapped", "Extra time", "Recomputations")
    cells = [_choice_cells(plan, index, choice) for index, choice in enumerate(found)]
    some = (
        "Choose a point to see what it would change."
        if any(choice.sort == "frontier" for choice in found)
        else "Only what the plan knows is here; lowtide.frontier finds the plans between and below, and "
        "plan.report(path, frontier=...) shows them."
    )
    return (
        f"<section>\n<h2>What a cap costs</h2>\n<p>Peak against predicted extra time. {some}</p>\n"
        + (f"<figure>{picture}</figure>\n" if len(found) > 1 else "")
        + '<div class="choices"><div>'
        + table(head, cells, numbers=frozenset({1, 2, 3, 4}), name="choices")
        + '</div><div id="changes" role="status" hidden></div></div>\n</section>'
    )


def _choice_cells(plan: Plan, index: int, choice: PlanChoice) -> tuple[str, ...]:
    made = choice.plan
    checked = " checked" if choice.sort == "this" else ""
    radio = f'<input type="radio" name="choice" value="{index}"{checked} class="screen">'
    return (
        f"<label>{radio}{say(choice.label, 40)}</label>",
        format_bytes(made.allocated),
        f"{made.allocated / max(plan.uncapped.peak, 1):.1%}",
        f"{made.extra:+.1%}",
        f"{choice.recomputations}",
    )
