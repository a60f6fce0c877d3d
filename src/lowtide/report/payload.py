"""What the page's script knows: tables of ops, values and stays as plain columns, packed into the page.

Texts are written once and named by their place in `texts`; of the stays the start is told as the distance
from the stay before. The JSON is compressed, to about forty bytes an op, and no name of the plan stands
in the page as it is. The script unpacks it with the browser's own decompression.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Sequence
from typing import Any

from ..plans.schedule import Run
from .bands import Band, aligned, buckets, role_of
from .choices import PlanChoice, changes
from .place import Places
from .residency import Residency
from .spent import Group
from .stays import VALUE, Stay
from .svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, shades
from .wording import short

__all__ = ["Texts", "pack", "table_of", "told_choices", "view_of"]

LINE = 400
"""Numbers by which another plan's resident bytes are drawn."""

FRAME = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM}


def pack(data: object) -> str:
    """Any plain data as text that can stand in a page."""
    plain = json.dumps(data, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    return base64.b64encode(gzip.compress(plain, 6, mtime=0)).decode("ascii")


class Texts:
    """Texts by number, each of a bounded length and written once."""

    def __init__(self) -> None:
        self.number: dict[str, int] = {}
        self.known: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        found = self.known.get(text)
        if found is None:
            found = self.known[text] = self.number.setdefault(short(text), len(self.number))
        return found

    @property
    def all(self) -> list[str]:
        """The texts in order."""
        return list(self.number)


def table_of(shown: Residency, places: Places, groups: Sequence[Group], texts: Texts) -> dict[str, Any]:
    """The ops and the values of the graph, and the groups of values by bytes times lifetime."""
    graph = shown.graph
    place = {value.name: index for index, value in enumerate(graph.values)}
    found = [places.of_value(value.name) for value in graph.values]
    share = {member.name: member.share for group in groups for member in group.members}
    return {
        "ops": {
            "name": [texts(op.name) for op in graph.ops],
            "module": [texts(op.module) for op in graph.ops],
            "source": [texts(op.source) for op in graph.ops],
            "seconds": [float(f"{op.seconds:.3g}") for op in graph.ops],
        },
        "values": {
            "name": [texts(value.name) for value in graph.values],
            "path": [texts(item.path) for item in found],
            "what": [texts(item.what) for item in found],
            "bytes": [value.bytes for value in graph.values],
            "share": [round(share.get(value.name, 0.0), 4) for value in graph.values],
        },
        "groups": [_told_group(group, place, texts) for group in groups],
    }


def _told_group(group: Group, place: dict[str, int], texts: Texts) -> list[Any]:
    first = group.members[0]
    members = [place[member.name] for member in group.members if member.name in place]
    return [
        texts(group.where),
        texts(first.place.what),
        texts(str(first.decided)),
        texts(first.decided.sort),
        texts(first.place.source),
        group.bytes,
        round(sum(member.share for member in group.members) / len(group.members), 4),
        round(group.average),
        members if members else 1,
    ]


def view_of(shown: Residency, layers: Sequence[Band], texts: Texts) -> dict[str, Any]:
    """A schedule to look at: what each step does, and who is there from when to when."""
    ops = {op.name: index for index, op in enumerate(shown.graph.ops)}
    values = {value.name: index for index, value in enumerate(shown.graph.values)}
    return {
        "boundary": shown.timeline.boundary,
        "peak": shown.timeline.peak_step,
        "steps": [ops[step.op] if isinstance(step, Run) else -1 - values[step.value] for step in shown.steps],
        "again": list(_gaps(shown.again)),
        "bands": [[texts(band.name), shade] for band, shade in zip(layers, shades(layers), strict=True)],
        "stays": _told_stays(shown, layers, values, ops, texts),
    }


def _told_stays(
    shown: Residency,
    layers: Sequence[Band],
    values: dict[str, int],
    ops: dict[str, int],
    texts: Texts,
) -> dict[str, list[int]]:
    """Columns; `of` is a value, or -1 - an op for its workspace or random state, told by `what`."""
    band = {(layer.role, layer.name): index for index, layer in enumerate(layers)}
    found = sorted((stay for stay in shown.stays if stay.bytes and stay.end > stay.start), key=_start)
    bands = [_band(stay, shown, band) for stay in found]
    return {
        "start": list(_gaps([stay.start for stay in found])),
        "length": [stay.end - stay.start for stay in found],
        "bytes": [-1 if stay.what == VALUE else stay.bytes for stay in found],
        "band": bands,
        "of": [_of(stay, values, ops, texts) for stay in found],
        "what": [texts(stay.what) for stay in found],
    }


def _start(stay: Stay) -> int:
    return stay.start


def _band(stay: Stay, shown: Residency, band: dict[tuple[str, str], int]) -> int:
    role = role_of(stay, shown.graph)
    return band[role, stay.name if role == "fixed" else role]


def _of(stay: Stay, values: dict[str, int], ops: dict[str, int], texts: Texts) -> int:
    if stay.what in (VALUE, "copy"):
        return values[stay.name]
    return texts(stay.name) if stay.what == "fixed" else ops[stay.name]


def _gaps(numbers: Iterable[int]) -> Iterable[int]:
    before = 0
    for number in numbers:
        yield number - before
        before = number


def told_choices(
    shown: Residency, found: Sequence[PlanChoice], places: Places, texts: Texts
) -> list[dict[str, Any]]:
    """For each plan to choose: its line over the steps of this plan, and what it decides otherwise."""
    return [_told_choice(shown, choice, places, texts) for choice in found]


def _told_choice(shown: Residency, choice: PlanChoice, places: Places, texts: Texts) -> dict[str, Any]:
    if choice.sort == "this":
        return {"this": True}
    line = aligned(shown.plan, choice.plan)
    rows = changes(shown, choice.plan, places)
    return {
        "line": [line[bucket.step] for bucket in buckets(line, LINE)],
        "changes": [
            [texts(row.where), texts(row.what), row.count, row.bytes, texts(row.before), texts(row.after)]
            for row in rows
        ],
    }
