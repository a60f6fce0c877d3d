"""The plan of a scan: how often its cell runs, what it keeps, and the peak of that in bytes.

A budget is for what the scan itself holds at its peak: kept carries, recorded units and the working set
of one unit. Inputs, parameters, stacked outputs and the gradients of all these are there anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

import torch

from ..arguments import all_of, flag
from ..console.log import say_once
from ..errors import BudgetTooSmall, LowtideError
from ..solve.sequence import forward_count
from ..solve.sequence.actions import Action, stream
from ..solve.sequence.table import Problem, read_problem
from ..solve.sequence.tapered import Tapered, leaf_sizes
from ..units import Budget, format_bytes, parse_budget, refuse_device_share
from .ledger import peak_of
from .sizes import Sizes

__all__ = [
    "ScanPlan",
    "Strategy",
    "check_chunk",
    "check_graphs",
    "check_not_both",
    "graph_runs",
    "make_graph_plan",
    "make_scan_plan",
]

Strategy: TypeAlias = Literal["auto", "hidden", "internal", "mixed"]

SLOW = 20
"""Runs per step that a user should hear of."""

LONG = 3_000_000
"""The peak of a plan with more runs is not followed action by action."""


@dataclass(frozen=True)
class ScanPlan:
    """What a scan will do.

    `steps` are done in units of `chunk`; the cell runs `forward_count` times in all, first runs included.
    `slots` is the most carries that are kept at once, beside the start. `peak` is the most bytes that the
    scan holds, `keep_all` what it would hold if every step were kept recorded; both are None where only slots
    were asked for and nothing was measured. With `graphs` each chunk is launched as one CUDA graph.

    >>> import lowtide, torch
    >>> xs = torch.ones(100, 8, requires_grad=True)
    >>> plan = lowtide.scan_plan(lambda h, x: (torch.tanh(h + x), h), torch.zeros(8), xs, slots=5)
    >>> plan.steps, plan.slots, plan.forward_count
    (100, 4, 416)
    """

    steps: int
    chunk: int
    strategy: str
    slots: int
    forward_count: int
    peak: int | None
    keep_all: int | None
    budget: int | None = None
    sizes: Sizes | None = None
    graphs: bool = False
    problem: Any = field(default=None, repr=False, compare=False)

    @property
    def runs_per_step(self) -> float:
        """How often a step runs forward, on average."""
        return self.forward_count / self.steps

    def say_if_slow(self) -> None:
        """Tell the user, once, of a budget so small that every step runs many times."""
        if self.runs_per_step > SLOW:
            say_once(
                f"a scan with little memory runs every step many times: {self}; a larger budget is faster"
            )

    def actions(self) -> Iterator[Action]:
        """What the scan does, unit by unit."""
        return stream(self.problem, [(0, self.problem.steps, self.problem.slots)], at=0)

    def __str__(self) -> str:
        held = "" if self.peak is None else f", peak {format_bytes(self.peak)}"
        whole = "" if self.keep_all is None else f" of {format_bytes(self.keep_all)} keeping all"
        return (
            f"{self.steps} steps in chunks of {self.chunk}: {self.forward_count} runs of the cell "
            f"({self.runs_per_step:.2f} per step), at most {self.slots} carries kept ({self.strategy})"
            f"{held}{whole}{', as CUDA graphs' if self.graphs else ''}"
        )


def make_scan_plan(
    steps: int,
    *,
    chunk: int = 1,
    sizes: Sizes | None = None,
    budget: int | str | Budget | None = None,
    slots: int | None = None,
    strategy: Strategy = "auto",
) -> ScanPlan:
    """The plan for a budget in bytes, or for a number of slots; with neither everything is kept."""
    if strategy not in get_args(Strategy):
        raise LowtideError(
            f"strategy={strategy!r} is not known; choose one of {', '.join(get_args(Strategy))}"
        )
    check_not_both(budget, slots)
    units = -(-steps // chunk)
    if slots is not None:
        return _finished(_by_slots(units, slots, strategy, sizes), steps, chunk, strategy, sizes, None)
    assert sizes is not None, "a budget in bytes needs sizes"
    whole = _finished(_all_kept(units), steps, chunk, "keep_all", sizes, None)
    if budget is None:
        return whole
    asked = parse_budget(budget)
    size = _bytes(asked, whole, _least(units, sizes))
    if whole.peak is not None and whole.peak <= size:
        return replace(whole, budget=size)
    problem = _by_bytes(units, size, strategy, sizes, asked)
    return _finished(problem, steps, chunk, strategy, sizes, size)


def make_graph_plan(
    steps: int, *, chunk: int, sizes: Sizes, budget: int, keep_all: int | None, recomputes_last: bool
) -> ScanPlan | None:
    """The plan for chunks that run as graphs; None where the budget is too small for one.

    A chunk is recorded only on its way back. `recomputes_last`: so is the last one, which has run by then.
    """
    slots = _graph_slots(sizes, budget)
    if slots < 1:
        return None
    plan = _finished(read_problem(-(-steps // chunk), slots), steps, chunk, "hidden", sizes, budget)
    count = plan.forward_count + (chunk if recomputes_last else 0)
    return replace(plan, forward_count=count, keep_all=keep_all, graphs=True)


def graph_runs(steps: int, *, chunk: int, sizes: Sizes, budget: int) -> int | None:
    """About how often the cell runs in such a plan, without making it."""
    slots = _graph_slots(sizes, budget)
    return forward_count(-(-steps // chunk), slots) * chunk if slots >= 1 else None


def _graph_slots(sizes: Sizes, budget: int) -> int:
    return (budget - sizes.work) // max(sizes.state, 1)


def check_not_both(budget: object, slots: object) -> None:
    """Refuse a budget together with a number of slots."""
    if budget is not None and slots is not None:
        raise LowtideError(f"budget={budget!r} and slots={slots!r} were both given; give one of them")


def check_chunk(chunk: object) -> None:
    """Refuse what is no number of steps."""
    if not (isinstance(chunk, str) and chunk == "auto") and (
        isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1
    ):
        raise LowtideError(f'chunk={chunk!r} must be a whole number of steps of at least 1, or "auto"')


def check_graphs(graphs: object) -> None:
    """Refuse what says neither whether to capture nor to choose."""
    if not isinstance(graphs, bool) and not (isinstance(graphs, str) and graphs == "auto"):
        raise LowtideError(f'graphs={graphs!r} must be True, False or "auto"')


def check_reads(parameters: Iterable[Any], random: object) -> tuple[Any, ...]:
    """The tensors that a cell reads; refuses what is none, and what says neither yes nor no."""
    flag("random", random)
    return all_of("parameters", parameters, torch.Tensor, "tensors, as in parameters=module.parameters()")


def _all_kept(units: int) -> Problem:
    return read_problem(units, max(units, 1), keep="internal")


def _by_slots(units: int, slots: int, strategy: Strategy, sizes: Sizes | None) -> Any:
    if strategy == "mixed":
        assert sizes is not None, "mixed slots need sizes"
        slots = read_problem(units, slots).slots
        return _tapered(units, slots * sizes.state, sizes)
    return read_problem(units, slots, keep="internal" if strategy == "internal" else "hidden")


def _by_bytes(units: int, size: int, strategy: Strategy, sizes: Sizes, asked: Budget) -> Any:
    for_states = size - sizes.work
    if strategy == "hidden":
        slots = (for_states // sizes.state if sizes.state else units) if for_states >= 0 else 0
        if slots >= 1 or (units == 1 and for_states >= 0):
            return read_problem(units, max(slots, 1))
    elif strategy == "internal":
        # One recorded step is the working set's own; each further slot holds a record and the carry it starts
        # from.
        slots = 1 + (for_states - sizes.state) // max(sizes.state + sizes.record, 1)
        if for_states >= sizes.state or (units == 1 and for_states >= 0):
            return read_problem(units, max(slots, 1), keep="internal")
    elif size >= _least(units, sizes):
        return _tapered(units, for_states, sizes)
    raise _too_small(asked, size, units, sizes)


def _tapered(units: int, for_states: int, sizes: Sizes) -> Tapered:
    return Tapered(units, leaf_sizes(units, room=for_states, state=sizes.state, record=sizes.record))


def _least(units: int, sizes: Sizes) -> int:
    """The smallest budget with which the sequence can be differentiated."""
    return sizes.work + (0 if units == 1 else min(sizes.state, (units - 1) * sizes.record))


def _bytes(asked: Budget, whole: ScanPlan, least: int) -> int:
    refuse_device_share(asked, "a scan")
    if asked.word == "min":
        return least
    if asked.word is not None:
        raise LowtideError(f'budget {asked} is not known to a scan; write bytes, "2GiB", "5%" or "min"')
    if asked.share is not None:
        return asked.part(whole.peak or 0)
    assert asked.bytes is not None
    return asked.bytes


def _too_small(asked: Budget, size: int, units: int, sizes: Sizes) -> BudgetTooSmall:
    least = _least(units, sizes)
    parts = {"one step": sizes.work, "a kept carry": least - sizes.work}
    return BudgetTooSmall(
        f"budget {asked} ({size} bytes) is below the smallest that this scan can run in, {least} bytes "
        f"({format_bytes(least)}: a step at work takes {format_bytes(parts['one step'])}, a kept "
        f'carry {format_bytes(parts["a kept carry"])}). Try budget={least}, "min", a smaller batch, chunk=1',
        budget=size,
        smallest=least,
        parts=parts,
    )


def _finished(
    problem: Any, steps: int, chunk: int, strategy: str, sizes: Sizes | None, budget: int | None
) -> ScanPlan:
    units = problem.steps
    if isinstance(problem, Tapered):
        count, slots, strategy = problem.forward_count, problem.slots - 1, "mixed"
    else:
        count = forward_count(units, problem.slots, keep=problem.keep)
        slots = min(problem.slots - 1, units - 1) if problem.keep == "hidden" else 0
        strategy = problem.keep if strategy == "auto" else strategy
    count = count * chunk - (units * chunk - steps)  # the last unit may be shorter, and runs once
    plan = ScanPlan(steps, chunk, strategy, slots, count, None, None, budget, sizes, problem=problem)
    if sizes is None:
        return plan
    keep_all = sizes.start + (units - 1) * sizes.record + max(sizes.run, sizes.backward)
    if strategy == "keep_all":
        return replace(plan, peak=keep_all, keep_all=keep_all)
    peak = budget if count > LONG else peak_of(plan.actions(), sizes)
    return replace(plan, peak=peak, keep_all=keep_all)
