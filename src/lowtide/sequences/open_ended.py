"""`lowtide.while_scan`: a loop of unknown length, differentiated in a bounded number of bytes.

Problem: some loops run until a condition stops them: a solver with a tolerance, a roll-out up to an event.
Their backward needs what every step leaves, and how many steps there are is known only at the end.

Method: online checkpointing (`solve.sequence.online`). While the loop runs, a bounded number of carries is
kept, chosen so that few steps are recomputed wherever it stops. From there on all is as in a scan.

Memory: of s slots one is the start's, which is there anyway, the others hold kept carries; the carry that a
step starts from may be one more. So the peak is at most s carries and the working set of a step, or of
the condition.

Limits: no step is kept recorded, so each runs twice at least, also where the budget would hold everything.
Sizes are those of the first step. Stacked outputs are there twice for a moment when the loop stops.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .._torch import outside_dynamo, private
from ..errors import BudgetError, BudgetTooSmall, LowtideError
from ..solve.sequence import Pop, Push
from ..solve.sequence.online import Online, finish
from ..units import Budget, format_bytes, parse_budget
from .first import FirstRun, run_first
from .fold import folded
from .function import apply
from .loop import First, Loop
from .outputs import Outputs, Stacked, check_alike, make_outputs
from .planned_scan import check_not_both, check_reads
from .record import is_whole, versions
from .scanning import Reduce
from .sequence import CellSequence, Place, detached, flat, say_leaf
from .sizes import Sizes, Weighing
from .surroundings import devices_of

__all__ = ["while_scan"]


@outside_dynamo
def while_scan(
    cell: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    cond: Callable[[Any], bool | torch.Tensor],
    *,
    budget: int | str | Budget | None = None,
    slots: int | None = None,
    max_steps: int | None = None,
    reduce: Reduce = None,
    parameters: Iterable[torch.Tensor] = (),
    random: bool = False,
) -> tuple[Any, Any]:
    """Run `carry, y = cell(carry, None)` while `cond(carry)` holds; returns the last carry and the outputs.

    Carry and outputs are as in `scan`: outputs come stacked over the steps, or `reduce` folds them ("sum",
    "mean", "last", or a pair (function, start)). Where `cond` does not hold for `init`, no step is taken: the
    carry is `init`, and the outputs are None, or the start of the fold.

    `cond` gets the carry, detached, and gives a bool or a tensor of one element. It is asked once for every
    carry while the loop runs, and not again in the backward. A loop that goes on past `max_steps` steps
    raises a `LowtideError`.

    `slots` bounds the carries that are kept, the start included: as long as the loop takes fewer than
    (slots + 1) * (slots + 2) / 2 steps, none of them is recomputed more than twice. `budget` gives bytes
    instead, as in "2GiB", or "min"; not counted are, as in `scan`, init, parameters, outputs and the
    gradients of all these. A share such as "5%" is not supported, as nobody knows of what. With neither,
    everything is kept and autograd sees a plain loop. `parameters` and `random` are those of `scan`.

    >>> import lowtide, torch
    >>> a = torch.tensor(2.0, requires_grad=True)
    >>> def newton(x, _):
    ...     return (x + a / x) / 2, None
    >>> start = torch.tensor(1.0)
    >>> root, _ = lowtide.while_scan(newton, start, lambda x: (x * x - a).abs() > 1e-6, slots=3)
    >>> root.backward()
    >>> round(a.grad.item(), 4)
    0.3536
    """
    asked = _Asked(cell, init, cond, reduce, max_steps)
    parameters = check_reads(parameters, random)
    byte_limit = _read_limit(budget, slots)
    keeps_all = byte_limit is None or not torch.is_grad_enabled()
    weighs = isinstance(byte_limit, Budget) and not keeps_all
    condition = Weighing(torch.device(devices_of(asked.carry)[-1])) if weighs else None
    if not asked.starts(condition):
        return asked.results(asked.carry, None)
    if byte_limit is None or keeps_all:
        return asked.results(*_run_plainly(asked))
    run = run_first(
        asked.sequence, asked.carry, [], owner=cell, parameters=parameters, random=random, weigh=weighs
    )
    if not run.trains:
        return asked.results(*_run_plainly(asked, run.first))
    loop = _WhileLoop(asked, run, _slots(byte_limit, run, condition))
    del run  # and with it what the first step recorded
    return asked.results(*apply(loop, asked.carry, []))


class _Asked:
    """The arguments of a loop, checked and flat."""

    def __init__(self, cell: Any, init: Any, cond: Any, reduce: Any, max_steps: int | None) -> None:
        for thing, name, form in ((cell, "cell", "cell(carry, None)"), (cond, "cond", "cond(carry)")):
            if not callable(thing):
                raise LowtideError(f"{name} is {say_leaf(thing)}; it must be callable, as {form}")
        if max_steps is not None and (type(max_steps) is not int or max_steps < 1):
            raise LowtideError(f"max_steps={max_steps!r} must be a whole number of at least 1, or None")
        self.cond, self.max_steps = cond, max_steps
        self.folds = isinstance(reduce, tuple)
        kind = "a fold" if self.folds else str(reduce)
        if isinstance(reduce, tuple):
            cell, init, reduce = folded(cell, init, reduce)
        self.reduce = reduce
        self.carry, carry_form = private("tree_flatten")(init)
        self.sequence = CellSequence(
            cell, carry_form, flat(None)[1], 0, length=sys.maxsize, signature=("while", kind)
        )
        self.outputs = _Grown(0) if reduce is None else make_outputs(reduce, 1, reverse=False)

    def starts(self, condition: Weighing | None) -> bool:
        """Whether there is a first step; what asking takes is weighed."""
        if condition is None:
            return self.goes_on(self.carry, 0)
        with condition.counting():
            return self.goes_on(self.carry, 0)

    def goes_on(self, carry: list[Any], steps: int) -> bool:
        """Whether the condition holds for a carry that n steps led to."""
        before = versions(carry)
        given = [detached(leaf) for leaf in carry]
        tree = private("tree_unflatten")(given, self.sequence.carry_form)
        with torch.no_grad():
            answer = _truth(self.cond(tree[0] if self.folds else tree))
        if versions(carry) != before:
            raise LowtideError("cond changes the carry in place; it may only look at it")
        if answer and steps == self.max_steps:
            raise LowtideError(
                f"cond still holds after max_steps={steps} steps; does the loop come to an end? "
                "Raise max_steps if it needs more steps"
            )
        return answer

    def settled(self, steps: int) -> Outputs:
        """The outputs, now that it is known how many they are."""
        outputs = make_outputs(self.reduce, steps, reverse=False)
        outputs.values, self.outputs.values = self.outputs.finish(), []
        return outputs

    def results(self, carry: list[Any], outputs: list[Any] | None) -> tuple[Any, Any]:
        last = private("tree_unflatten")(carry, self.sequence.carry_form)
        if self.folds:
            return last  # type: ignore[no-any-return]  # the carry and the state of the fold
        form = self.sequence.ys_form
        return last, None if outputs is None or form is None else form.build(outputs)


class _Grown(Stacked):
    """All outputs in a list, to be stacked when the loop has come to its end."""

    def begin(self, leaf: Any) -> list[torch.Tensor]:
        super().begin(leaf)  # refuses what cannot be stacked
        return []

    def add(self, value: list[torch.Tensor], leaf: Any, place: Place) -> list[torch.Tensor]:
        check_alike(value[0] if value else leaf, leaf)
        # A view would keep the whole tensor that it looks at.
        value.append(leaf if leaf.requires_grad or is_whole(leaf) else leaf.clone())
        return value

    def finish(self) -> list[torch.Tensor]:
        return [torch.stack(self.values.pop(0)) for _ in range(len(self.values))]


class _WhileLoop(Loop):
    """A loop on its way forward, until its condition stops it, and back."""

    def __init__(self, asked: _Asked, run: FirstRun, slots: int) -> None:
        super().__init__(
            asked.sequence,
            (),
            xs=[],
            closed=run.closed,
            outputs=asked.outputs,
            surroundings=run.surroundings,
            start=run.start,
            random=run.random,
            first=run.first,
        )
        self.asked, self.slots = asked, slots

    def run_all(self) -> None:
        online, state = Online(self.slots), 0
        while state == 0 or self.goes_on(state):  # for the start it was asked before
            choice = online.leave(state)
            if choice.free is not None:
                self.perform(Pop(choice.free))
            # State 0 is the start, which is held in any case.
            if choice.keep and state:
                self.perform(Push(state))
            self.run(state, keep=False)
            state += 1
        self.outputs = self.asked.settled(state)
        self.look_ahead(finish(online.kept, state, self.slots))

    def goes_on(self, state: int) -> bool:
        random = self.surroundings.look()
        answer = self.asked.goes_on(self.carry, state)
        if self.surroundings.differs(random):
            raise LowtideError(
                "cond draws random numbers, so that recomputed steps would not find theirs; draw them in "
                "the cell and hand them on in the carry"
            )
        return answer


def _run_plainly(asked: _Asked, first: First | None = None) -> tuple[list[Any], list[Any]]:
    """The last carry and the outputs, as autograd sees a plain loop; `first` is the first step, if it ran."""
    carry, steps = asked.carry, 0
    while steps == 0 or asked.goes_on(carry, steps):
        if first is not None and steps == 0:
            carry, pieces = first.carry, first.pieces
        else:
            carry, pieces = asked.sequence.run(steps, carry, [])
        for piece in pieces:
            asked.outputs.write(piece)
        steps += 1
    return carry, asked.settled(steps).finish()


def _read_limit(budget: int | str | Budget | None, slots: int | None) -> Budget | int | None:
    """What was asked for: a budget, a number of slots, or everything."""
    check_not_both(budget, slots)
    if budget is None:
        return None if slots is None else Online(slots).slots
    asked = parse_budget(budget)
    if asked.is_share_of_peak:
        raise BudgetError(
            f"budget {asked} is a share of what keeping every step would take, and how many steps a loop "
            'takes is not known beforehand; write bytes, "2GiB" or "min", or give a number of slots'
        )
    if asked.bytes is None and asked.word != "min":
        raise BudgetError(f'budget {asked} is not known to a loop; write bytes, "2GiB" or "min"')
    return asked


def _slots(byte_limit: Budget | int, run: FirstRun, condition: Weighing | None) -> int:
    if isinstance(byte_limit, int):
        return byte_limit
    assert run.sizes is not None
    assert condition is not None
    try:
        return _fitting(byte_limit, run.sizes, condition.tracker.made_peak)
    except BudgetTooSmall:
        run.surroundings.go_on_from(run.start)  # the first step might as well not have run
        raise


def _fitting(budget: Budget, sizes: Sizes, condition: int) -> int:
    """The slots that fit, each with a carry: that of the start is for the carry that a step starts from."""
    work = max(sizes.work, sizes.start + condition)
    least = work + sizes.state
    size = least if budget.bytes is None else budget.bytes
    if size < least:
        raise BudgetTooSmall(
            f"budget {budget} ({size} bytes) is below the smallest that this loop can run in, {least} bytes "
            f"({format_bytes(least)}: the working set of a step takes {format_bytes(work)}, the carry that "
            f'it starts from {format_bytes(sizes.state)}). Try budget={least} or "min", or a smaller batch',
            budget=size,
            smallest=least,
            parts={"one step": work, "a carry": sizes.state},
        )
    return max(1, (size - work) // max(1, sizes.state))


def _truth(answer: Any) -> bool:
    if isinstance(answer, bool):
        return answer
    if isinstance(answer, torch.Tensor) and answer.numel() == 1:
        return bool(answer)
    raise LowtideError(
        f"cond returned {say_leaf(answer)}; it must return a bool or a tensor of one element, as in "
        "(error > tolerance).any()"
    )
