"""Plans ruined at random and mended: what a greedy descent got wrong early, another one may get right.

Problem: a descent never takes a move back, so an early one may stand in the way of better ones.

Method (ruin and recreate, Schrimpf et al. 2000; large neighbourhood search, Shaw 1998): take some repeated
runs of a plan away at random, within a random part of the step, and descend anew with some noise in the
scores; keep what is better. Most plans that are ruined are the best ones at a target, the others are a little
larger and faster than that, and come down to it another way. A target at which that was in vain waits the
longer for its next turn: far from the floor descents are hardly ever improved on, near it they often are.

Complexity: `Effort.edits` edits of tapes for all targets and one budget that is asked for.

Limits: without the compiled search it does not take place.
"""

from __future__ import annotations

import heapq
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ladder import Rung
    from .search import Search

__all__ = ["improve", "improve_at"]

CALL = 200
"""What one turn costs besides its edits, in edits: about the time of making a tape. Chosen: no plan moves
with 100, one in twelve by 2 % with 400."""

SHARE = 1 / 4
"""Of the effort, for one budget; the targets get the rest. Chosen: with an eighth, networks near their
smallest peaks are up to 0.2 % slower; with none, up to 3 %."""

LARGER, NEIGHBOURS = 0.25, 4
"""How often a larger plan is ruined, and how many there are to choose from. Chosen: with none, networks at a
quarter of their peak are up to 2 % slower; twice as often makes no difference."""


def improve(search: Search) -> None:
    """Improve the plans at all targets until the effort is used up."""
    edits = int((1 - SHARE) * search.effort.edits) - search.spent
    # By when it is a target's turn, in edits, and how often its turns were in vain.
    turns = [(0, place, 0) for place in range(len(search.targets))]
    spent = count = 0
    while spent < edits:
        due, place, vain = heapq.heappop(turns)
        taken, better = _mend(search, search.targets[place], Random(count))
        vain = 0 if better else vain + 1
        heapq.heappush(turns, (due + taken * (1 + vain), place, vain))
        spent, count = spent + taken, count + 1
        search.tell(0.6 + 0.3 * min(spent / edits, 1))


def improve_at(search: Search, budget: int) -> None:
    """Improve the plan at one budget."""
    left, count = int(SHARE * search.effort.edits), 0
    while left > 0:
        left -= _mend(search, budget, Random(count))[0]
        count += 1


def _mend(search: Search, target: int, chance: Random) -> tuple[int, bool]:
    """Ruin a plan and descend to the target: the edits that took, and whether it improves on the ladder."""
    best = search.ladder.best(target)
    # Nothing to improve at this target: look for a smaller peak instead.
    if best is None or not search.short(best.order):
        best = search.least()
        way = max(best.peak - search.floor, 0)
        target = best.peak - 1 - int(way * chance.choice((0.0, 0.02, 0.1)))
    elif chance.random() < LARGER:
        best = chance.choice(_larger(search, target) or [best])
    tape = search.native_tape(best.order)
    width, seed = chance.choice((1.0, 0.5, 0.25, 0.1)), chance.getrandbits(32)
    start = chance.random() * (1 - width)
    tape.ruin(start, start + width, share=chance.choice((0.1, 0.3, 0.6, 1.0)), seed=seed)
    tape.descend(
        target,
        exponent=chance.choice(search.exponents),
        tolerance=search.effort.tolerance,
        limit=search.limit,
        noise=chance.choice((0.0, 0.3, 1.0)),
        seed=seed,
    )
    tape.prune(max(target, tape.peak()))
    better = search.ladder.improves(tape.peak(), tape.seconds)
    search.note(tape)
    # Making a tape costs about an edit per op, and every turn some fixed time: counted, so that small moves
    # do not make the search long.
    return tape.edits + len(search.graph.ops) + CALL, better


def _larger(search: Search, target: int) -> list[Rung]:
    """The plans right above a target that are short enough to work on."""
    return [rung for rung in search.ladder.above(target)[:NEIGHBOURS] if search.short(rung.order)]
