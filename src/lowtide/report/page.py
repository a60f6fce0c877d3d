"""The plan as one HTML document: the figures, the timeline, what is there at the peak, where it all goes.

The document is whole in itself: style and script are inside and nothing is fetched. All text of the plan is
escaped, names are cut to a bounded length and the timeline is drawn in a bounded number of buckets, so the
page stays small whatever the graph is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from ..plan import Plan
from ..units import format_bytes, format_seconds
from .bands import Band, bands, buckets
from .hover import hover
from .svg import chart, shades
from .tables import alive_at_peak, spent
from .wording import peak_moment, short

__all__ = ["page"]

BUCKETS = 500
PEAK_ROWS = 30
SPENT_ROWS = 50


def page(plan: Plan) -> str:
    """The report of a plan, as the text of an HTML file."""
    layers = bands(plan)
    drawn = buckets(plan.timeline.resident, BUCKETS)
    sections = [_header(plan), _timeline(plan, layers, chart(plan, layers, drawn)), _peak(plan), _spent(plan)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Lowtide plan: {format_bytes(plan.peak)} on {_text(plan.graph.device)}</title>\n"
        f"<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(sections)
        + f'\n</main>\n<script id="data" type="application/json">{_data(hover(plan, drawn))}</script>\n'
        f"<script>\n{_asset('page.js')}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _text(text: str) -> str:
    return escape(short(text))


def _data(data: object) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _header(plan: Plan) -> str:
    share = plan.peak / max(plan.uncapped.peak, 1)
    once = format_seconds(plan.seconds - plan.timeline.again)
    figures = [
        ("Uncapped peak", format_bytes(plan.uncapped.peak), f"{once} a step"),
        ("Budget", "none" if plan.budget is None else format_bytes(plan.budget), _fit(plan)),
        ("Predicted peak", format_bytes(plan.peak), f"{share:.1%} of uncapped"),
        ("Extra time", f"+{plan.extra:.1%}", f"{format_seconds(plan.timeline.again)} spent again"),
    ]
    cards = "".join(
        f"<div><dt>{name}</dt><dd>{value}<small>{escape(more)}</small></dd></div>"
        for name, value, more in figures
    )
    notes = "".join(f"<li>{escape(short(note, 1000))}</li>" for note in plan.notes)
    bound = "" if plan.bound is None else f" No schedule takes less than {format_seconds(plan.bound)}."
    return (
        "<h1>What this step will do</h1>\n"
        f"<p>Method {_text(plan.method)}, device {_text(plan.graph.device)}, prices: "
        f"{_text(plan.graph.prices)}. {len(plan.graph.ops)} ops, {len(plan.graph.values)} values."
        f'{bound}</p>\n<dl class="figures">{cards}</dl>'
        + (f'\n<ul class="notes">{notes}</ul>' if notes else "")
    )


def _fit(plan: Plan) -> str:
    if plan.budget is None:
        return "nothing to stay under"
    room = plan.budget - plan.peak
    return f"{format_bytes(abs(room))} {'to spare' if room >= 0 else 'short'}"


def _timeline(plan: Plan, layers: Sequence[Band], picture: str) -> str:
    keys = [
        (shade, band.name, max(band.resident)) for band, shade in zip(layers, shades(layers), strict=True)
    ]
    items = [
        f'<li><i class="{shade}"></i>{_text(name)} <small>up to {format_bytes(size)}</small></li>'
        for shade, name, size in reversed(keys)
    ]
    items.append('<li><i class="key-uncapped"></i>keeping everything, at the same op</li>')
    if plan.budget is not None:
        items.append(f'<li><i class="key-budget"></i>budget {format_bytes(plan.budget)}</li>')
    return (
        "<h2>Over the step</h2>\n<p>Bytes on the device while each step runs. Point at the picture, or focus "
        "it and use the arrow keys (Home, End, Page Up, Page Down; p for the peak).</p>\n"
        f'<figure>{picture}<ul class="legend">{"".join(items)}</ul>'
        f'<div id="readout" role="status">{escape(peak_moment(plan))}</div></figure>'
    )


def _peak(plan: Plan) -> str:
    rows = alive_at_peak(plan)
    shown, rest = rows[:PEAK_ROWS], rows[PEAK_ROWS:]
    cells = [
        (_text(row.name), format_bytes(row.bytes), row.kind, _text(row.module), _text(row.source))
        for row in shown
    ]
    if rest:
        size = format_bytes(sum(row.bytes for row in rest))
        cells.append((f"<small>{len(rest)} smaller ones</small>", size, "", "", ""))
    total = ("all", format_bytes(plan.peak), "", "", "")
    head = ("Value", "Bytes", "Kind", "Module", "Source")
    return f"<h2>At the peak</h2>\n<p>{escape(peak_moment(plan))}</p>\n" + _table(head, cells, {1}, total)


def _spent(plan: Plan) -> str:
    cells = [
        (
            _text(row.name),
            format_bytes(row.bytes),
            f"{row.share:.1%}",
            format_bytes(row.average),
            row.decided,
            _text(row.module),
            _text(row.source),
        )
        for row in spent(plan)[:SPENT_ROWS]
    ]
    head = ("Value", "Bytes", "There for", "On average", "Decided", "Module", "Source")
    return (
        "<h2>Where it goes</h2>\n<p>Values that the schedule may drop, by bytes times lifetime. "
        f"The average is over the whole step; the first {SPENT_ROWS} are shown.</p>\n"
        + _table(head, cells, {1, 2, 3})
    )


def _table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: set[int],
    total: Sequence[str] | None = None,
) -> str:
    """A table of cells that are escaped already."""

    def line(cells: Sequence[str], tag: str = "td") -> str:
        marks = (' class="number"' if index in numbers else "" for index in range(len(cells)))
        found = zip(marks, cells, strict=True)
        return "<tr>" + "".join(f"<{tag}{mark}>{cell}</{tag}>" for mark, cell in found) + "</tr>\n"

    foot = f"<tfoot>{line(total)}</tfoot>" if total else ""
    body = "".join(map(line, rows))
    return (
        f'<div class="scroll"><table>\n<thead>{line(head, "th")}</thead>\n<tbody>{body}</tbody>{foot}'
        "</table></div>"
    )
