"""The least cost of a programme in whole numbers, proven without trust in a solver: branch and cut.

Problem: columns are 0 or 1; what do they cost at least under the rows?

Method: HiGHS solves the programme with parts of columns, and says a price of each row. Whatever these prices
are, as whole numbers m ≥ 0 they give a bound that is worked out in whole numbers, for all x that keep to the
rows (Neumaier and Shcherbina 2004):

    cost x ≥ cost x + Σ m (row x - most) ≥ Σ over columns of the least of (cost + Σ m factor) x - Σ m most

Roundings of the rows of bytes (see `rounding`) are added as long as parts of columns violate them. Then the
programme is split at a column that is a part, the half with the least bound first. The least bound of all
that was not split is that of the whole, whenever it ends. What HiGHS calls impossible is left out only where
its prices prove that: where they ask for more than nothing although all columns are free.

Complexity: the work that is given, in columns times steps of the simplex method; a million takes some
thousandths of a second to a hundredth.

Limits: needs `highspy`. What it comes to may differ between versions of HiGHS; it is proven with each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np

from .moments import UNITS
from .programme import Bounds, Programme, Row
from .rounding import PART, violated

__all__ = ["BranchAndCut", "proven"]

ROUNDS = 30
"""Of cuts. Chosen: hardly any raises the bound later."""

UNIT = UNITS // 1000
"""What is 1 in HiGHS's costs: running everything once is 1000, far above its tolerances."""

TRIES = 200
"""What a column of a row counts for when its roundings are looked through. Measured: it takes as long."""

LARGEST = 1e30
"""A price that is no number or as large as this is an accident of floats."""

OVERHEAD = 20
"""Steps of the simplex method that beginning it counts for."""


def proven(rows: Sequence[Row], prices: Sequence[int], cost: Sequence[int], low: Bounds, high: Bounds) -> int:
    """What columns within bounds that keep to the rows cost at least, by prices of the rows."""
    reduced, bound = list(cost), 0
    for row, price in zip(rows, prices, strict=True):
        if price > 0:
            bound -= price * row.most
            for j, a in row.factors.items():
                reduced[j] += price * a
    return bound + sum(r * (lo if r > 0 else hi) for r, lo, hi in zip(reduced, low, high, strict=True))


class BranchAndCut:
    """A programme whose bound rises by `cut` and by `split`; it is None where nothing keeps to the rows."""

    def __init__(self, programme: Programme, work: int) -> None:
        self.programme, self.work = programme, work
        self.rows = programme.rows.copy()
        self.size = [0] * len(programme.cost)
        for number in programme.budgets:
            for j, a in programme.rows[number].factors.items():
                self.size[j] = max(self.size[j], a)
        self.relaxed = Relaxation(programme)
        self.low, self.high = bytearray(programme.low), bytearray(programme.high)
        self.bound = self.solve(self.low, self.high)

    def solve(self, low: bytearray, high: bytearray) -> int | None:
        """A bound within bounds of the columns, or None where it is proven that nothing is there."""
        steps = max(self.work // max(len(self.size), 1), 1)
        impossible, prices = self.relaxed.solve(low, high, steps)
        self.work -= len(self.size) * (self.relaxed.steps + OVERHEAD)
        if impossible and proven(self.rows, prices, [0] * len(self.size), low, high) > 0:
            return None
        # Free columns may go down to zero; costs are not below that.
        return max(proven(self.rows, prices, self.programme.cost, low, high), 0)

    def cut(self) -> None:
        """Add roundings of the rows of bytes."""
        for _ in range(ROUNDS):
            point = self.relaxed.point
            bytes_rows = [self.programme.rows[number] for number in self.programme.budgets]
            self.work -= TRIES * sum(len(row.factors) for row in bytes_rows)
            cuts = [cut for row in bytes_rows if (cut := violated(row, point)) is not None]
            if not cuts or self.bound is None or self.work <= 0:
                return
            self.rows += cuts
            for cut in cuts:
                self.relaxed.add(cut)
            found = self.solve(self.low, self.high)
            self.bound = None if found is None else max(self.bound, found)

    def split(self) -> None:
        """Split what has the least bound as long as there is work."""
        if self.bound is None:
            return
        leaves = [(self.bound, 0, self.low, self.high, self.part())]
        count = 0
        while leaves and self.work > 0:
            bound, _, low, high, column = leaves[0]
            if column is None:
                break
            heappop(leaves)
            for side in (0, 1):
                count += 1
                fewer, more = low.copy(), high.copy()
                fewer[column] = more[column] = side
                found = self.solve(fewer, more) if self.programme.settle(fewer, more) else None
                if found is not None:
                    heappush(leaves, (max(found, bound), count, fewer, more, self.part()))
        self.bound = leaves[0][0] if leaves else None

    def part(self) -> int | None:
        """The column to split at: a part of many bytes."""
        point = self.relaxed.point
        parts = [j for j, x in enumerate(point) if PART < x < 1 - PART]
        return max(parts, key=lambda j: (self.size[j] * min(point[j], 1 - point[j]), -j), default=None)


class Relaxation:
    """The programme with parts of columns, in HiGHS's floats: a hint where to look, and no proof."""

    def __init__(self, programme: Programme) -> None:
        import highspy

        self.known = highspy.HighsModelStatus
        self.solver: Any = highspy.Highs()
        self.solver.setOptionValue("output_flag", False)
        self.solver.setOptionValue("threads", 1)
        self.columns = np.arange(len(programme.cost), dtype=np.int32)
        for _ in programme.cost:
            self.solver.addVar(0, 1)
        costs = np.array([cost / UNIT for cost in programme.cost])
        self.solver.changeColsCost(len(costs), self.columns, costs)
        self.scales: list[int] = []
        for row in programme.rows:
            self.add(row)
        self.point: list[float] = []
        self.steps = 0

    def add(self, row: Row) -> None:
        """Add a row, scaled to factors of at most one."""
        scale = max(map(abs, row.factors.values()), default=1)
        self.scales.append(scale)
        columns = np.array([*row.factors], dtype=np.int32)
        factors = np.array([a / scale for a in row.factors.values()])
        self.solver.addRow(-math.inf, row.most / scale, len(columns), columns, factors)

    def solve(self, low: Bounds, high: Bounds, steps: int) -> tuple[bool, list[int]]:
        """Whether HiGHS finds nothing within bounds, and what it says of the prices."""
        self.solver.setOptionValue("simplex_iteration_limit", steps)
        self.solver.changeColsBounds(
            len(self.columns), self.columns, np.array([*low], float), np.array([*high], float)
        )
        self.solver.run()
        # The next time it begins where it ends now.
        self.solver.setOptionValue("presolve", "off")
        self.steps = max(self.solver.getInfo().simplex_iteration_count, 0)
        found = self.solver.getSolution()
        self.point = list(found.col_value)
        if self.solver.getModelStatus() == self.known.kInfeasible:
            return True, self.prices(self.ray())
        return False, self.prices(found.row_dual)

    def ray(self) -> list[float]:
        """Prices at which the rows ask for more than there can be."""
        _, known, ray = self.solver.getDualRay()
        return [*ray] if known else []

    def prices(self, duals: Sequence[float]) -> list[int]:
        """As whole numbers, of the rows as they are in the programme; zero where there is none."""
        if len(duals) != len(self.scales) or not all(abs(y) < LARGEST for y in duals):
            return [0] * len(self.scales)
        return [round(max(-y, 0.0) * UNIT / scale) for y, scale in zip(duals, self.scales, strict=True)]
