"""The largest size that fits, where a look at a size is dear and its peak is close to a line in the size.

Method: the line through the largest size that is known to fit and the smallest that is known not to names the
next size to look at (the secant rule, or regula falsi), within that bracket. Two looks in a row on the
same side make the next step twice as long, so that the bracket closes from both; after a few guesses it is
halved. On a line, two sizes, the answer and its neighbour are looked at.

Limits: a peak that shrinks with the size may hide a larger answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import LowtideError
from ..units import format_bytes

__all__ = ["EXACT", "SizeSearch"]

EXACT = 1 << 62
"""A grain that tells sizes apart by one."""
PATIENCE = 8
"""Guesses by a line before the bracket is halved."""


@dataclass
class SizeSearch:
    """The largest size that fits, from peaks that are close to a line in the size.

    The answer is exact up to `1 / grain`, the share by which a size that does not fit may be larger.
    """

    budget: int
    most: int
    grain: int
    seen: dict[int, int] = field(default_factory=dict)
    fits: int = 0

    def run(self, look: Callable[[int], tuple[bool, int]], *, first: int) -> int:
        """The largest size that fits, 0 for none; `look` says whether a size does, and gives a peak."""
        over = self.most + 1
        sides: list[bool] = []
        while over - self.fits > (near := max(1, self.fits // self.grain)):
            low = self.fits + near
            # Inside the bracket, whatever the line says.
            size = min(max(self.guess(first, over, sides), low), max(over - near, low))
            does, self.seen[size] = look(size)
            sides.append(does)
            self.fits, over = (size, over) if does else (self.fits, size)
        return self.fits

    def guess(self, first: int, over: int, sides: list[bool]) -> int:
        """The size that a line through what was seen names, or the middle of the bracket."""
        if not sides:
            return first
        if len(self.seen) < 2:
            return 2 * first
        # Peaks jump (kernels change with the size); halving always ends.
        if len(sides) > PATIENCE and over <= self.most:
            return (self.fits + over) // 2
        named = self.named(over)
        if len(sides) < 4 or len(set(sides[-2:])) > 1:
            return named
        # Twice on the same side: the line is off, and a step too far bounds the answer from the other one.
        *_, before, last = self.seen
        step = 2 * max(abs(last - before), abs(named - last))
        return last + step if sides[-1] else last - step

    def named(self, over: int) -> int:
        """The size that reaches the budget by the line through the ends of the bracket.

        Where all sizes are on one side of the budget, by the line through the smallest and the largest.
        """
        low, high = self.fits, over
        if low not in self.seen or high not in self.seen or self.seen[low] >= self.seen[high]:
            self.check_growth()
            low, high = min(self.seen), max(self.seen)
        slope = (self.seen[high] - self.seen[low]) / (high - low)
        return int(low + (self.budget - self.seen[low]) / slope)

    def check_growth(self) -> None:
        low, high = min(self.seen), max(self.seen)
        if self.seen[high] <= self.seen[low]:
            raise LowtideError(
                f"the peak is {format_bytes(self.seen[low])} at a batch of {low} and "
                f"{format_bytes(self.seen[high])} at {high}: the function does not seem to use its batch size"
            )

    def start(self) -> dict[int, int]:
        """The peak of no samples at all, by the line: what parameters and gradients take."""
        if len(self.seen) < 2:
            return {}
        low, high = min(self.seen), max(self.seen)
        slope = (self.seen[high] - self.seen[low]) / (high - low)
        return {0: int(self.seen[low] - slope * low)}
