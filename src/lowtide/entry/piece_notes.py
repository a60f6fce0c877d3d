"""What is said of a step in pieces: what each of them saves, and what lies between them, not captured."""

from __future__ import annotations

from collections.abc import Iterator

from ..console.log import log
from ..planner.joined_budget import Chosen
from ..planner.joined_graph import Between, BrokenStep
from ..planner.unit_plans import saved_by
from ..plans.planned_step import Plan
from ..units import format_bytes

__all__ = ["notes_on_pieces", "say_pieces"]

LISTED = 6
"""The most pieces, and places between pieces, that are spoken of one by one; chosen."""


def say_pieces(chosen: Chosen) -> None:
    """One line about a new plan of several pieces."""
    plan = chosen.plan
    log.info(
        "planned together, %d pieces: peak %s of %s uncapped, budget %s, %+.1f%% time",
        len(chosen.turns),
        format_bytes(plan.peak),
        format_bytes(plan.uncapped.peak),
        plan.budget_in_words,
        100 * plan.extra,
    )


def notes_on_pieces(step: BrokenStep, turns: tuple[Plan, ...]) -> Iterator[str]:
    """The notes of their plan: the pieces that save most, and where most is taken beside them."""
    yield f"one budget over {len(turns)} pieces, in the order in which they run: {_saving(turns)}"
    taking = [place for place, between in enumerate(step.before) if between.bytes]
    taking.sort(key=lambda place: -step.before[place].bytes)
    for place in sorted(taking[:LISTED]):
        yield _on_place(place, step.before[place], last=place == len(turns))
    if others := taking[LISTED:]:
        yield (
            f"at {len(others)} other places the model runs as it is, too: it was seen to take "
            f"{format_bytes(step.before[others[0]].bytes)} there at most"
        )


def _saving(turns: tuple[Plan, ...]) -> str:
    places = sorted(range(len(turns)), key=lambda place: -saved_by(turns[place]))
    each = ", ".join(
        f"{place + 1} saves {format_bytes(saved_by(turns[place]))} at {turns[place].extra:+.1%} time"
        for place in sorted(places[:LISTED])
    )
    rest = sum(saved_by(turns[place]) for place in places[LISTED:])
    return f"piece {each}" + (f", the others {format_bytes(rest)}" if len(turns) > LISTED else "")


def _on_place(place: int, between: Between, *, last: bool) -> str:
    names = f"between pieces {place} and {place + 1}" if place else "before piece 1"
    where = f" ({between.where})" if between.where else ""
    held = format_bytes(sum(between.writes.values()))
    return (
        f"{f'after piece {place}' if last else names}{where} the model runs as it is: it was seen to take "
        f"{format_bytes(between.bytes)} there and to keep {held} of it, and nothing of that is recomputed"
    )
