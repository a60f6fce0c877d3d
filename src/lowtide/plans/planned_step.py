"""A plan: a graph, the schedule chosen for it, and what the simulator says of it. What the user sees."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from ..errors import FormatError, LowtideError, ScheduleError
from ..files.plain_text import plain
from ..files.whole_files import write_whole
from ..units import format_bytes, format_seconds
from . import json_format, ports
from .graph import Graph
from .keep_all import keep_all
from .schedule import Schedule
from .simulator import Timeline, saved_bytes, simulate

__all__ = ["BY_REPLAY", "Plan", "make_plan"]

BY_REPLAY = "by replay of the allocator"

FORMAT_VERSION = 1
FIELDS = (
    "method",
    "budget",
    "smallest",
    "bound",
    "compiled",
    "reserved",
    "arena",
    "sketched",
    "trimmed",
    "split",
    "notes",
    "graph",
    "schedule",
    "timeline",
)


@dataclass(frozen=True)
class Plan:
    """What a capped step will do.

    `budget` is in bytes (None: no bytes were asked for), `smallest` says that the smallest peak was, by a
    budget of "min"; `method` is the solver that made the schedule, `bound` a proven lower bound on the step's
    seconds under this budget, or None where none is known; `notes` say what the user should know about how
    far the promise goes. `compiled` is the peak that the buffers of the compiled step come to, where it was
    compiled: the simulator knows what fuses only as far as `fuse` does.
    `reserved` is what a loop over the step makes CUDA's caching allocator reserve, by a replay of its rules;
    it is None on devices without such an allocator. `arena` are the bytes that are reserved at once before
    the first step, so that all of its requests share one segment; 0 where none are.
    `sketched` are the layers that keep a sketch of their input by this plan's choice; layers that always do
    are not among them. `trimmed` are those that could keep a sketch and keep only some rows of their input,
    since no other rows get a gradient: they are exact. `split` are the regions of the step that run in chunks
    of rows, by the name of their first matrix product in the graph, each with the number of chunks.

    >>> import lowtide, torch
    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    >>> plan = lowtide.plan(model, torch.empty(512, 64), budget="1MiB")
    >>> plan.uncapped.peak, plan.peak <= plan.budget, plan.method
    (1705992, True, 'auto')
    """

    graph: Graph
    schedule: Schedule
    timeline: Timeline
    method: str
    budget: int | None = None
    bound: float | None = None
    notes: tuple[str, ...] = ()
    compiled: int | None = None
    sketched: tuple[str, ...] = ()
    trimmed: tuple[str, ...] = ()
    split: tuple[tuple[str, int], ...] = ()
    reserved: int | None = None
    arena: int = 0
    smallest: bool = False

    @property
    def peak(self) -> int:
        """The predicted peak of the whole step in bytes, which the budget bounds.

        It is what is reserved, where that can be told, else what is allocated.
        """
        return self.allocated if self.reserved is None else self.reserved

    @property
    def allocated(self) -> int:
        """The bytes that are allocated at the peak, as the device's allocator would report them."""
        return self.timeline.peak if self.compiled is None else self.compiled

    @property
    def is_plain(self) -> bool:
        """Whether everything is kept and computed once."""
        return self.method == "keep_all" and not self.split

    @property
    def budget_in_words(self) -> str:
        """The budget as people read it."""
        if self.budget is not None:
            return format_bytes(self.budget)
        return "min" if self.smallest else "none"

    @property
    def seconds(self) -> float:
        """Predicted seconds of the step's ops, repeated ones included."""
        return self.timeline.seconds

    @property
    def extra(self) -> float:
        """Predicted extra time: seconds of recomputation as a share of running everything once."""
        return self.timeline.extra

    @property
    def gap(self) -> float | None:
        """How much longer the step takes than `bound` at most, as a share of it; None without a bound."""
        return None if not self.bound else self.seconds / self.bound - 1

    def with_bound(self) -> Plan:
        """The plan with the proven lower bound on the seconds of any schedule under its budget."""
        # An allocator's overhead for this schedule says nothing about others.
        fixed = {name: size for name, size in self.graph.fixed.items() if name != "allocator"}
        bound = self.graph.seconds
        if self.budget is not None:
            bound = ports.lower_bound(self.graph.replace(fixed=fixed), self.budget)
        return replace(self, bound=min(bound, self.seconds))

    @cached_property
    def saved(self) -> int:
        """The bytes that the step holds between forward and backward, besides what was there before it."""
        return saved_bytes(self.graph, self.schedule)

    @cached_property
    def input_bytes(self) -> int:
        """The bytes of the batch."""
        return sum(value.bytes for value in self.graph.values if value.kind == "input")

    @cached_property
    def gradient_bytes(self) -> int:
        """The bytes of the gradients that the step leaves behind."""
        return sum(value.bytes for value in self.graph.values if value.kind == "gradient")

    @cached_property
    def uncapped(self) -> Timeline:
        """The timeline of keeping everything."""
        return simulate(self.graph, self.kept_all)

    @cached_property
    def kept_all(self) -> Schedule:
        """The schedule of keeping everything."""
        return keep_all(self.graph)

    def __str__(self) -> str:
        lines = [
            f"Plan by {self.method} for {self.graph.device}, {len(self.graph.ops)} ops",
            f"  uncapped peak  {format_bytes(self.uncapped.peak)}",
            f"  budget         {self.budget_in_words}",
            f"  predicted peak {format_bytes(self.allocated)}"
            f" ({self.allocated / max(self.uncapped.peak, 1):.1%})",
            *(
                []
                if self.reserved is None
                else [f"  reserved       {format_bytes(self.reserved)} ({BY_REPLAY})"]
            ),
            f"  extra time     +{self.extra:.1%} of {format_seconds(self.seconds - self.timeline.again)}"
            f" ({self.graph.prices})",
        ]
        if self.gap is not None and self.bound is not None:
            least = self.bound / (self.seconds - self.timeline.again) - 1
            lines.append(f"  lower bound    +{max(least, 0):.1%}: at most {self.gap:.1%} above the optimum")
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])

    def _repr_html_(self) -> str:
        """The report in a frame of its own, so that its style stays out of the notebook's."""
        page = escape(ports.page(self))
        return f'<iframe srcdoc="{page}" width="100%" height="700" style="border:0"></iframe>'

    def report(
        self,
        path: str | Path,
        *,
        frontier: Any = None,
        others: Iterable[Plan] = (),
        measured: Any = None,
    ) -> Path:
        """Write the plan as one self-contained HTML file and return its path.

        `frontier` (of `lowtide.frontier`) and `others` are plans of the same graph to choose from; finding
        them takes longer than writing a report, so they are shown where they are given. `measured` is what
        `lowtide.verify`, `lowtide.watch` or `lowtide.measure` returned for the step.
        """
        return _write(
            _place("report", path), ports.page(self, frontier=frontier, others=others, measured=measured)
        )

    def to_dict(self) -> dict[str, Any]:
        """The plain form that JSON is written from."""
        return {
            "lowtide": "plan",
            "version": FORMAT_VERSION,
            "method": self.method,
            "budget": self.budget,
            **({"smallest": True} if self.smallest else {}),
            "bound": self.bound,
            **({} if self.compiled is None else {"compiled": self.compiled}),
            **({} if self.reserved is None else {"reserved": self.reserved}),
            **({"arena": self.arena} if self.arena else {}),
            **({"sketched": list(self.sketched)} if self.sketched else {}),
            **({"trimmed": list(self.trimmed)} if self.trimmed else {}),
            **({"split": [list(pair) for pair in self.split]} if self.split else {}),
            "notes": list(self.notes),
            "graph": self.graph.to_dict(),
            "schedule": self.schedule.to_dict(),
            "timeline": self.timeline.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Any, *, most_ops: int = json_format.MOST_OPS) -> Plan:
        """The plan of a plain form. The schedule is judged again: a file cannot claim another peak."""
        json_format.check_header(data, "plan", FORMAT_VERSION, FIELDS)
        graph = Graph.from_dict(data.get("graph"), most_ops=most_ops)
        schedule = Schedule.from_dict(data.get("schedule"))
        claimed = Timeline.from_dict(data.get("timeline"))
        try:
            timeline = simulate(graph, schedule)
        except ScheduleError as error:
            raise FormatError(f'field "schedule": {error}') from None
        if timeline != claimed:
            raise FormatError(
                'field "timeline": it is not what the schedule does '
                f"(peak {claimed.peak} claimed, {timeline.peak} simulated)"
            )
        return cls(
            graph=graph,
            schedule=schedule,
            timeline=timeline,
            method=json_format.read_text(data, "method", "unknown"),
            budget=_count(data, "budget"),
            smallest=_smallest(data),
            bound=_bound(data, timeline),
            notes=json_format.read_texts(data, "notes"),
            compiled=_compiled(data, graph),
            reserved=_count(data, "reserved"),
            arena=_count(data, "arena") or 0,
            sketched=_names(data, "sketched"),
            trimmed=_names(data, "trimmed"),
            split=_chunks(data),
        )

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json_format.dump(self.to_dict())

    @classmethod
    def from_json(cls, text: str, *, most_ops: int = json_format.MOST_OPS) -> Plan:
        """The plan of a JSON text; nothing in it is executed."""
        return cls.from_dict(json_format.parse(text, "plan"), most_ops=most_ops)

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON and return its path."""
        return _write(_place("save", path), self.to_json())

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        most_bytes: int = json_format.MOST_FILE_BYTES,
        most_ops: int = json_format.MOST_OPS,
    ) -> Plan:
        """Read a plan that `save` wrote, unless it is larger than it may be."""
        data = json_format.read_bytes(Path(path), "plan", most_bytes)
        return cls.from_json(json_format.decode(data, "plan"), most_ops=most_ops)


def make_plan(
    graph: Graph,
    schedule: Schedule,
    *,
    method: str,
    budget: int | None = None,
    notes: tuple[str, ...] = (),
) -> Plan:
    """The plan of a schedule, judged by the simulator."""
    return Plan(graph, schedule, simulate(graph, schedule), method, budget, notes=notes)


def _count(data: Any, field: str) -> int | None:
    return None if data.get(field) is None else json_format.read_count(data, field)


def _smallest(data: Any) -> bool:
    """Whether the smallest peak was asked for, which is no number of bytes."""
    found = data.get("smallest", False)
    if not isinstance(found, bool) or (found and data.get("budget") is not None):
        raise FormatError(
            f'field "smallest": expected true beside no budget, or false, found {json_format.say(found)}'
        )
    return found


def _bound(data: Any, timeline: Timeline) -> float | None:
    """A proven bound, which no schedule can be below: this one neither."""
    if data.get("bound") is None:
        return None
    bound = json_format.read_number(data, "bound")
    if not 0 <= bound <= timeline.seconds * (1 + 1e-9):
        raise FormatError(
            f'field "bound": {bound!r} s cannot be a lower bound: the schedule takes {timeline.seconds!r} s'
        )
    return bound


def _compiled(data: Any, graph: Graph) -> int | None:
    """The peak of a compiled step, which cannot be below what is there before it begins."""
    if data.get("compiled") is None:
        return None
    compiled = json_format.read_count(data, "compiled")
    least = max(graph.fixed_bytes + graph.given_bytes, 1)
    if compiled < least:
        raise FormatError(f'field "compiled": {compiled} bytes, but {least} are there before the step begins')
    return compiled


def _names(data: Any, field: str) -> tuple[str, ...]:
    return json_format.read_texts(data, field) if field in data else ()


def _chunks(data: Any) -> tuple[tuple[str, int], ...]:
    found = json_format.read_items(data, "split") if "split" in data else ()
    for pair in found:
        fits = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)
        if not fits or not isinstance(pair[1], int) or isinstance(pair[1], bool) or pair[1] < 1:
            raise FormatError(
                f'field "split": expected a name and a number of chunks, found {json_format.say(pair)}'
            )
    return tuple((plain(name), number) for name, number in found)


def _place(verb: str, path: str | Path) -> Path:
    """A path as somebody wrote it."""
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise LowtideError(f"{verb} takes a path to write to, not {path!r}")
    return Path(path)


def _write(path: Path, text: str) -> Path:
    """Write a whole file or none: an interrupt leaves no half-written one.

    A link goes on leading where it led. A device or a pipe is written to: nothing may take its place.
    """
    place = path.resolve()
    whole = place.is_file() or not place.exists()
    try:
        if whole:
            write_whole(place, text.encode())
        else:
            place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # the name that was asked for
    return path
