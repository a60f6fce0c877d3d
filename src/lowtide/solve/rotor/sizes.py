"""What the parts of a chain take, in bytes: what `table` asks for at every memory, and the least memory.

The least memory of a part follows from the recurrence of `table` with bytes in place of seconds: of each way
to do it, the most of what its own runs need and what its parts need beside what is kept; of all ways, the
least. O(n³) numbers, no table over memories.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .chain import Option, Stage

__all__ = ["ChainSizes"]

Whole = npt.NDArray[np.int64]


class ChainSizes:
    """Sizes and sums over a chain; `shared[i][j]` is the number of bytes that a(i) and a(j) have in common.

    `after[t]` is what is there when stage t goes backward: the gradient of its output, and what the stages
    after it left for good. `fresh[i][j]` are the bytes of a(j) that a(i) has not. `work[i]` is what running
    stage i from a(i) writes, its temporaries included.
    """

    def __init__(self, stages: Sequence[Stage], shared: Sequence[Sequence[int]] | None = None) -> None:
        self.stages, count = tuple(stages), len(stages)
        self.forward = [s.options[0].forward if s.forward is None else s.forward for s in stages]
        gradient = [s.output if s.gradient is None else s.gradient for s in stages]
        later: list[int] = np.cumsum([0, *(s.leaves for s in reversed(stages))])[::-1].tolist()
        self.after = [later[i + 1] + gradient[i] for i in range(count)]
        output = [0, *(s.output for s in stages)]
        self.fresh = [
            [output[j] - (shared[i][j] if shared is not None and j > i else 0) for j in range(count + 1)]
            for i in range(count)
        ]
        temps = [s.options[0].forward_temp if s.temp is None else s.temp for s in stages]
        self.work = [self.fresh[i][i + 1] + temps[i] for i in range(count)]

    def option_need(self, option: Option, end: int, last: int) -> int:
        """The bytes that the own runs of an option take, forward beside d(last+1) and backward."""
        forward = self.after[last] + option.forward_temp
        return option.saved + max(forward, self.after[end] + option.backward_temp)

    def needs(self, first: int, last: int) -> list[int]:
        """The bytes that running from the first stage to each k takes, k = first + 1 to last."""
        return [self.after[last] + most for most in self._way(first, last)]

    def least_memory(self, unit: int = 1) -> int:
        """The least number of units in which there is a plan, when every size is rounded up to units."""
        count = len(self.stages)
        fresh = _up(np.array(self.fresh, dtype=np.int64).reshape(count, count + 1), unit)
        least = np.zeros((count + 1, count), dtype=np.int64)
        for first in range(count - 1, -1, -1):
            way = np.array(self._way(first, count - 1), dtype=np.int64)
            for last in range(first, count):
                found = self._kept(first, last, least, unit)
                if last > first:
                    right = fresh[first, first + 1 : last + 1] + least[first + 1 : last + 1, last]
                    needs = _up(self.after[last] + way[: last - first], unit)
                    left = least[first, first:last]
                    found.append(int(np.maximum(np.maximum(needs, right), left).min()))
                least[first, last] = min(found)
        return int(least[0, -1]) if count else 0

    def _way(self, first: int, last: int) -> list[int]:
        """The most that the runs from the first stage to each k write and hold."""
        most, found = 0, []
        for stage in range(first, last):
            held = self.fresh[first][stage] if stage > first else 0
            most = max(most, held + self.work[stage])
            found.append(most)
        return found

    def _kept(self, first: int, last: int, least: Whole, unit: int) -> list[int]:
        """What a part takes when its first stage is kept, by each option; an open one would not do."""
        found = []
        for option in self.stages[first].options:
            end = first + option.stages - 1
            if end == last if option.closes else end <= last:
                rest = -(-max(option.saved, 0) // unit) + int(least[end + 1, last])
                found.append(max(rest, -(-max(self.option_need(option, end, last), 0) // unit)))
        return found


def _up(sizes: Whole, unit: int) -> Whole:
    """Bytes in units, rounded up; nothing below zero."""
    return np.maximum(-(-sizes // unit), 0)
