"""The lines of `results/plans.jsonl`, and what follows from them: gaps to the bound, losses of `auto`.

Extra times and bounds are shares of running every op once; budgets are percent of the vanilla peak. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "BETWEEN",
    "BOUND",
    "RESULTS",
    "SHARES",
    "Loss",
    "Pair",
    "Row",
    "Share",
    "comparisons",
    "gap",
    "losses",
    "read",
    "write",
]

RESULTS = Path(__file__).parent / "results" / "plans.jsonl"

SHARES = (70, 50, 35, 25)
"""Budgets in percent of the vanilla peak."""

BETWEEN = (73, 58, 47, 33, 27)
"""Budgets that are no round ones, as a number of bytes never is: compared as well, without a bound."""

BOUND = "bound"
"""The row of a graph that is no method's but says what no schedule can beat."""

ROUNDING = 1e-9
"""Extra times that differ by less are equal."""

Share = float | str | None
Pair = tuple[str, str]


@dataclass(frozen=True)
class Row:
    """What a method did on a graph.

    `extra[share]` is None where nothing fits, and missing where the time ran `over` before it was asked for.
    A bound of "inf" says that nothing can fit (JSON has no infinity). `reason` says why there is no plan.
    `solver` is a hash of what the row depends on.
    """

    graph: str
    method: str
    ops: int = 0
    vanilla: int = 0
    floor: int | None = None
    floor_extra: float | None = None
    extra: dict[str, Share] = field(default_factory=dict)
    bound: dict[str, Share] = field(default_factory=dict)
    seconds: float | None = None
    over: int | None = None
    reason: str = ""
    prices: str = ""
    torch: str = ""
    commit: str = ""
    solver: str = ""


def read(path: Path = RESULTS) -> dict[Pair, Row]:
    """The rows of a file by graph and method."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = (Row(**json.loads(line)) for line in lines)
    return {(row.graph, row.method): row for row in found}


def write(rows: Iterable[Row], path: Path = RESULTS) -> None:
    """Put the file in place whole: another process may be reading it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    lines = (json.dumps(asdict(row), allow_nan=False) for row in rows)
    draft.write_text("".join(f"{line}\n" for line in lines))
    draft.replace(path)


def gap(row: Row, share: int) -> float | None:
    """How much longer a step takes than its bound, as a share of the bound; None where one is not known."""
    extra, bound = row.extra.get(str(share)), row.bound.get(str(share))
    if isinstance(extra, float) and isinstance(bound, float):
        return (1 + extra) / (1 + bound) - 1
    return None


class Loss(NamedTuple):
    """Where `auto` is behind another method: at a budget in percent, or in the smallest peak."""

    graph: str
    at: str
    method: str
    auto: Share
    other: Share


def losses(rows: Iterable[Row]) -> Iterator[Loss]:
    """Every graph and budget at which another method is faster than `auto`, or fits where it does not."""
    rows = list(rows)
    autos = {row.graph: row for row in rows if row.method == "auto"}
    for row in rows:
        if row.graph in autos and row.method not in ("auto", BOUND):
            yield from losses_to(autos[row.graph], row)


def losses_to(auto: Row, other: Row) -> Iterator[Loss]:
    if auto.floor is not None and other.floor is not None and auto.floor > other.floor:
        shares = auto.floor / auto.vanilla, other.floor / other.vanilla
        yield Loss(auto.graph, "floor", other.method, *shares)
    for share, extra in other.extra.items():
        mine = auto.extra.get(share)
        if isinstance(extra, float) and not (isinstance(mine, float) and mine <= extra + ROUNDING):
            yield Loss(auto.graph, share, other.method, mine, extra)


def comparisons(rows: Iterable[Row]) -> int:
    """How many figures of other methods `auto` is measured against: their floors, and where they fit."""
    others = [row for row in rows if row.method not in ("auto", BOUND)]
    fitting = sum(isinstance(extra, float) for row in others for extra in row.extra.values())
    return fitting + sum(row.floor is not None for row in others)
