"""The head of the page: the plan's figures at a glance."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..plans.planned_step import BY_REPLAY, Plan
from ..units import format_bytes, format_seconds
from .markup import say
from .measured import Measured

__all__ = ["header"]


def header(plan: Plan, measured: Measured) -> str:
    """The title, a line on what was planned, the figures, and the plan's notes."""
    cards = "".join(
        f"<div><dt>{name}</dt><dd>{value}<small>{escape(more)}</small></dd></div>"
        for name, value, more in _figures(plan, measured)
    )
    notes = "".join(f"<li>{say(note, 1000)}</li>" for note in plan.notes)
    bound = "" if plan.bound is None else f" No schedule takes less than {format_seconds(plan.bound)}."
    return (
        "<h1>What this step will do</h1>\n"
        f"<p>Method {say(plan.method)}, device {say(plan.graph.device)}, prices: "
        f"{say(plan.graph.prices)}. {_count(plan.graph.ops, 'op')}, {_count(plan.graph.values, 'value')}."
        f'{bound}</p>\n<dl class="figures">{cards}</dl>'
        + (f'\n<ul class="notes">{notes}</ul>' if notes else "")
    )


def _figures(plan: Plan, measured: Measured) -> list[tuple[str, str, str]]:
    share = plan.allocated / max(plan.uncapped.peak, 1)
    once = format_seconds(plan.seconds - plan.timeline.again)
    again = format_seconds(plan.timeline.again)
    figures = [
        ("Uncapped peak", format_bytes(plan.uncapped.peak), f"{once} a step"),
        ("Budget", plan.budget_in_words, _fit(plan)),
        ("Predicted peak", format_bytes(plan.allocated), f"{share:.1%} of uncapped"),
        ("Extra time", f"+{plan.extra:.1%}", f"{again} of recomputation"),
    ]
    if plan.reserved is not None:
        figures.insert(3, ("Reserved", format_bytes(plan.reserved), BY_REPLAY))
    if measured.peak is not None:
        gap = (measured.peak - plan.allocated) / max(plan.allocated, 1)
        as_said = f"{gap:+.2%} of the prediction" if gap else "as predicted, to the byte"
        figures.insert(3, ("Measured peak", format_bytes(measured.peak), as_said))
    if measured.extra is not None and measured.seconds is not None:
        took = f"{format_seconds(measured.seconds)}, one step"
        figures.append(("Measured extra time", f"{measured.extra:+.1%}", took))
    return figures


def _count(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def _fit(plan: Plan) -> str:
    if plan.budget is None:
        return "nothing to stay under"
    headroom = plan.budget - plan.peak
    return f"{format_bytes(abs(headroom))} {'of headroom' if headroom >= 0 else 'short'}"
