"""A chain of stages under a budget, with several ways to keep each stage: a dynamic programme.

Problem: stages 0 to n-1 run forward and then backward. Stage i turns a(i) into a(i+1), which takes `output`
bytes; its backward turns the gradient d(i+1) into d(i) and needs a(i) and what one of the stage's options
saved. The least seconds under a memory, where any stage may run forward any number of times?

Method: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains:
how to train deep neural networks with limited memory" (2019), known as rotor, with the several options per
stage of Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont, "Rockmate" (2023). C(s, t, m) is the least time
from a(s) and d(t+1) to d(s) when everything but a(s) takes at most m bytes. Either stage s keeps what an
option saves until its backward, or the stages from s to k-1 run and keep nothing but a(k):

    C(s, t, m) = min( min over options o of s:  forward_o + C(s + 1, t, m - saved_o) + backward_o,
                      min over s < k <= t:  forwards of s..k-1 + C(k, t, m - output of k-1) + C(s, k - 1, m) )

each only where m is enough for its own runs: d(t+1) and what the stages write, with their temporaries, on
the way forward; d(s+1), what is saved and the backward's temporaries on the way back. Three extensions leave
the recurrence as it is: an option may span several stages and treat them as one; bytes that a(i) and a(j)
have in common (a skip across stages) count once; a backward may leave bytes for good (gradients of
parameters), for which m is counted from the bottom so that the left part needs no shift.
Equal stages recover Gruslys et al. (2016).

Complexity: O(n³ · units), in numpy, which is about a second for 100 stages and 500 units, and twice
8 · n² · units bytes. One table answers every memory up to its own: a whole frontier costs one programme.

Limits: bytes are rounded up to memory / units, so a memory that only just suffices may be refused. What has
been kept stays until its backward (the paper's persistent schedules), and a left part waits for its right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...plans.patience import check_time
from .chain import UNITS, Action, ChainPlan, Option, Stage, check_chain
from .sizes import ChainSizes
from .too_small import too_small

__all__ = ["Action", "ChainPlan", "ChainTable", "Option", "Stage", "chain_frontier", "plan_chain"]

Floats = npt.NDArray[np.float64]


def plan_chain(
    stages: Sequence[Stage],
    memory: int,
    *,
    units: int = UNITS,
    shared: Sequence[Sequence[int]] | None = None,
) -> ChainPlan:
    """The fastest plan of a chain under a memory, which does not count the chain's own input.

    >>> plan_chain([Stage(1, (Option(1),))] * 3, 3).seconds
    8.0
    """
    plan = ChainTable(stages, memory, units=units, shared=shared).plan(memory)
    if plan is None:
        raise too_small(ChainSizes(stages, shared), memory, units)
    return plan


def chain_frontier(
    stages: Sequence[Stage],
    memory: int | None = None,
    *,
    units: int = UNITS,
    shared: Sequence[Sequence[int]] | None = None,
) -> list[tuple[int, float]]:
    """The undominated (memory, seconds) of a chain, smallest memory first, from one table.

    Without a memory the frontier ends where every stage is kept in full.
    """
    top = _ample(stages, units) if memory is None else memory
    return ChainTable(stages, top, units=units, shared=shared).frontier()


def _ample(stages: Sequence[Stage], units: int) -> int:
    """A memory that suffices for everything, however it is rounded."""
    options = [option for stage in stages for option in stage.options]
    sizes = [stage.output + (stage.gradient or stage.output) + stage.leaves for stage in stages]
    sizes += [max(stage.temp or 0, 0) for stage in stages]
    sizes += [abs(o.saved) + max(o.forward_temp, o.backward_temp, 0) for o in options]
    return sum(sizes) * units // max(units - 2 * len(stages), 1) + units


class ChainTable:
    """The least seconds of every part of a chain for every memory up to one.

    `seconds[s, t, m]` is C(s, t, m) with m in units of `unit` bytes, infinite where there is no plan.
    `shared[i][j]` is the number of bytes that a(i) and a(j), i < j, have in common.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        memory: int,
        *,
        units: int = UNITS,
        shared: Sequence[Sequence[int]] | None = None,
    ) -> None:
        check_chain(stages, memory, units)
        self.stages = tuple(stages)
        # Rounded up, so that `units` rows reach the whole memory; never below a byte.
        self.unit = max(-(-memory // units), 1)
        self.rows = memory // self.unit + 1
        self.sizes = ChainSizes(self.stages, shared)
        count = len(self.stages)
        self.seconds = np.full((count + 1, count, self.rows), np.inf)
        self._known: dict[tuple[int, int], _Choices] = {}
        for last in range(count):
            self.seconds[last + 1, last] = 0.0
        self._fill()

    def plan(self, memory: int) -> ChainPlan | None:
        """The fastest plan under a memory up to the table's, or None."""
        row = min(memory // self.unit, self.rows - 1)
        if not self.stages:
            return ChainPlan(0.0, ())
        if row < 0 or self.seconds[0, -1, row] == np.inf:
            return None
        return ChainPlan(float(self.seconds[0, -1, row]), tuple(self._actions(row)))

    def frontier(self) -> list[tuple[int, float]]:
        """The undominated (memory, seconds), smallest memory first."""
        points: list[tuple[int, float]] = []
        for row, seconds in enumerate(self.seconds[0, -1].tolist() if self.stages else [0.0]):
            if seconds < (points[-1][1] if points else np.inf):
                points.append((row * self.unit, seconds))
        return points

    def _fill(self) -> None:
        count = len(self.stages)
        skips = np.full((count, count, self.rows), np.inf)
        # From the end, since a part is made of parts that begin later or end earlier.
        for first in range(count - 1, -1, -1):
            check_time()
            kept = self._kept(first)
            self._skipped(first, skips)
            for last in range(first, count):
                best = kept[last - first]
                if last > first:
                    split = skips[first + 1 : last + 1, last] + self.seconds[first, first:last]
                    for row, need in zip(split, self.sizes.needs(first, last), strict=True):
                        # Rows with too little memory for the way to the cut: closed, whatever the parts would
                        # cost.
                        row[: self._up(need)] = np.inf
                    best = np.minimum(best, split.min(axis=0))
                self.seconds[first, last] = best

    def _kept(self, first: int) -> Floats:
        """The least seconds when the first stage is kept by one of its options, per last stage and memory."""
        count = len(self.stages)
        best = np.full((count - first, self.rows), np.inf)
        for option in self.stages[first].options:
            end = first + option.stages - 1
            if end >= count:
                continue
            # Without its output written, nothing after the block could run: it has to be the last of its
            # part.
            until = end + 1 if option.closes else count
            time = _shifted(self.seconds[end + 1, end:until], self._up(option.saved))
            time += option.forward + option.backward
            for last, row in enumerate(time, start=end):
                row[: self._up(self.sizes.option_need(option, end, last))] = np.inf
            part = best[end - first : until - first]
            np.minimum(part, time, out=part)
        return best

    def _skipped(self, first: int, skips: Floats) -> None:
        """skips[k, t] = seconds of going from the first stage to k, then C(k, t), with a(k) set aside."""
        way = 0.0
        for k in range(first + 1, len(self.stages)):
            way += self.sizes.forward[k - 1]
            skips[k, k:] = _shifted(self.seconds[k, k:], self._up(self.sizes.fresh[first][k]))
            skips[k, k:] += way

    def _actions(self, row: int) -> list[Action]:
        """The actions of the best plan, by following the choices of the recurrence."""
        actions: list[Action] = []
        todo: list[Action | tuple[int, int, int]] = [(0, len(self.stages) - 1, row)]
        while todo:
            item = todo.pop()
            if isinstance(item, Action):
                actions.append(item)
            elif item[0] <= item[1]:
                todo += reversed(self._choice(*item))
        return actions

    def _choice(self, first: int, last: int, row: int) -> list[Action | tuple[int, int, int]]:
        """What the recurrence does with a part of the chain; keeping goes before splitting at equal time."""
        choices = self._choices(first, last)
        left = row - choices.takes
        seconds = choices.seconds + self.seconds[choices.goes_on, last, np.maximum(left, 0)]
        seconds[len(choices.options) :] += self.seconds[first, first:last, row]
        seconds[(left < 0) | (row < choices.needs)] = np.inf
        # The first of equal ones, and options come before splits: keeping wins a tie.
        best = int(seconds.argmin())
        rest = int(choices.goes_on[best]), last, int(left[best])
        if best < len(choices.options):
            option = choices.options[best]
            return [Action("save", first, option), rest, Action("backward", first, option)]
        forward = [Action("forward", stage) for stage in range(first, rest[0])]
        return [*forward, rest, (first, rest[0] - 1, row)]

    def _choices(self, first: int, last: int) -> _Choices:
        """What there is to choose from in a part of the chain: it is asked for many memories."""
        if (first, last) not in self._known:
            self._known[first, last] = self._find_choices(first, last)
        return self._known[first, last]

    def _find_choices(self, first: int, last: int) -> _Choices:
        rows: list[tuple[int, int, int, float]] = []
        options: list[int] = []
        for index, option in enumerate(self.stages[first].options):
            end = first + option.stages - 1
            if end == last if option.closes else end <= last:
                need, seconds = self.sizes.option_need(option, end, last), option.forward + option.backward
                rows.append((end + 1, self._up(option.saved), self._up(need), seconds))
                options.append(index)
        way = 0.0
        for k, need in enumerate(self.sizes.needs(first, last), start=first + 1):
            way += self.sizes.forward[k - 1]
            rows.append((k, self._up(self.sizes.fresh[first][k]), self._up(need), way))
        goes_on, takes, needs, times = map(np.array, zip(*rows, strict=True))
        return _Choices(options, goes_on, takes, needs, times)

    def _up(self, size: int) -> int:
        """Bytes in units, rounded up; nothing below zero."""
        return max(-(-size // self.unit), 0)


@dataclass(frozen=True, slots=True)
class _Choices:
    """What the recurrence may do with a part of the chain: keep by one of the `options`, then split.

    Of each: the stage that `goes_on`, the units that it `takes` from there on and `needs` for its own runs,
    and its seconds.
    """

    options: list[int]
    goes_on: npt.NDArray[np.int64]
    takes: npt.NDArray[np.int64]
    needs: npt.NDArray[np.int64]
    seconds: Floats


def _shifted(rows: Floats, by: int) -> Floats:
    """The same times with n units less to spend."""
    moved = np.full_like(rows, np.inf)
    if by < rows.shape[1]:
        moved[:, by:] = rows[:, : rows.shape[1] - by]
    return moved
