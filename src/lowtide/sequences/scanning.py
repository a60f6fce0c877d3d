"""`lowtide.scan`: a cell over a sequence, differentiated in a bounded number of bytes.

Problem: backpropagation through time keeps what every step leaves for its backward. Over thousands of steps
that is most of the memory.

Method: Gruslys et al. 2016, in bytes (`solve.sequence.tapered`): some carries are kept, the rest is
recomputed from them, as few steps as the budget allows. The first unit's run measures what a unit takes
(`first`), `plan` chooses, `loop` runs, `function` is what autograd sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from .._torch import outside_dynamo, private
from ..arguments import flag, whole
from ..errors import LowtideError
from ..units import Budget
from .first import FirstRun, run_first
from .fold import folded
from .function import apply
from .graphing import Graphing
from .lengths import masked
from .loop import Loop
from .outputs import Outputs, make_outputs
from .plain import run_plainly
from .planned_scan import ScanPlan, Strategy, check_chunk, check_graphs, check_reads, make_scan_plan
from .sequence import CellSequence, flat, say_leaf

__all__ = ["scan", "scan_plan"]

Reduce = Literal["sum", "mean", "last"] | tuple[Callable[[Any, Any], Any], Any] | None


@outside_dynamo
def scan(
    cell: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    *,
    length: int | None = None,
    budget: int | str | Budget | None = None,
    slots: int | None = None,
    strategy: Strategy = "auto",
    reduce: Reduce = None,
    reverse: bool = False,
    lengths: torch.Tensor | None = None,
    chunk: int | Literal["auto"] = "auto",
    graphs: bool | Literal["auto"] = "auto",
    parameters: Iterable[torch.Tensor] = (),
    random: bool = False,
) -> tuple[Any, Any]:
    """Run `carry, y = cell(carry, x)` over a sequence; returns the last carry and the outputs.

    Carry, inputs and outputs are tensors or trees of them; `xs` has time first, or is None with a `length`.
    Outputs come stacked over time, unless `reduce` folds them as they come: "sum", "mean", "last", or a pair
    (function, start) with state = function(state, y).

    `budget` bounds the bytes that the scan holds at its peak: kept carries, recorded steps and the working
    set of one step; not xs, parameters, stacked outputs and their gradients. It is in bytes, as in "2GiB", or
    a share of what keeping every step would take ("5%"), or "min". `slots` is a number of carries instead,
    the start included. With neither, everything is kept and autograd sees a plain loop.

    `reverse` goes from the last step to the first. `lengths` gives the steps of each row of the batch
    (dimension 0 of all carries and outputs): after its end a row keeps its carry and its outputs are zero.
    With a budget, a cell on a CUDA device runs in chunks that are captured as CUDA graphs, where it can be:
    `graphs=False` runs every step by itself, `graphs=True` refuses what cannot be captured.
    `parameters` names tensors that need gradients and that the cell reads, but not in its first step;
    `random=True` says that it draws random numbers, but none in its first step.

    >>> import lowtide, torch
    >>> decay = torch.tensor(0.5, requires_grad=True)
    >>> def cell(h, x):
    ...     return decay * h + x, h
    >>> carry, total = lowtide.scan(cell, torch.zeros(()), torch.ones(9), slots=2, reduce="sum")
    >>> total.backward()
    >>> round(decay.grad.item(), 3)
    20.172
    """
    asked = _Asked(cell, init, xs, length, reduce, reverse, lengths, chunk, graphs)
    parameters = check_reads(parameters, random)
    if (budget is None and slots is None) or not torch.is_grad_enabled():
        make_scan_plan(asked.length, slots=1, strategy=strategy)  # refuses what cannot be
        return asked.results(*run_plainly(asked.sequence, asked.carry, asked.xs, asked.outputs))
    run = asked.first_run(parameters, random, weigh=budget is not None or strategy == "mixed")
    if not run.trains:
        return asked.results(*run_plainly(asked.sequence, asked.carry, asked.xs, asked.outputs, run.first))
    try:
        plan = asked.plan(run, budget, slots, strategy)
    except LowtideError:
        run.surroundings.go_on_from(run.start)
        raise
    plan.say_if_slow()
    loop = asked.loop(run, plan)
    del run  # and with it what the first unit recorded
    return asked.results(*apply(loop, asked.carry, asked.xs))


def scan_plan(
    cell: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    *,
    length: int | None = None,
    budget: int | str | Budget | None = None,
    slots: int | None = None,
    strategy: Strategy = "auto",
    reduce: Reduce = None,
    reverse: bool = False,
    lengths: torch.Tensor | None = None,
    chunk: int | Literal["auto"] = "auto",
    graphs: bool | Literal["auto"] = "auto",
    parameters: Iterable[torch.Tensor] = (),
    random: bool = False,
) -> ScanPlan:
    """What `scan` would do with the same arguments: its peak, its runs, its slots; raises as it would.

    One unit runs forward and backward to measure its bytes; random state and gradients stay as they were.

    >>> import lowtide, torch
    >>> xs = torch.ones(100, 8, requires_grad=True)
    >>> plan = lowtide.scan_plan(lambda h, x: (torch.tanh(h + x), h), torch.zeros(8), xs, budget="20%")
    >>> plan.peak <= 0.2 * plan.keep_all
    True
    """
    asked = _Asked(cell, init, xs, length, reduce, reverse, lengths, chunk, graphs)
    parameters = check_reads(parameters, random)
    with torch.enable_grad():
        run = asked.first_run(parameters, random, weigh=True)
    run.surroundings.go_on_from(run.start)
    if run.sizes is None:
        raise LowtideError("nothing here needs a gradient, so there is nothing to keep and nothing to plan")
    return asked.plan(run, budget, slots, strategy)


class _Asked:
    """The arguments of a scan, checked and flat."""

    def __init__(
        self,
        cell: Any,
        init: Any,
        xs: Any,
        length: int | None,
        reduce: Reduce,
        reverse: bool,
        lengths: torch.Tensor | None,
        chunk: int | str,
        graphs: bool | str,
    ) -> None:
        if not callable(cell):
            raise LowtideError(f"the cell is {say_leaf(cell)}; it must be callable, as cell(carry, x)")
        check_graphs(graphs)
        flag("reverse", reverse)
        self.owner, self.folds = cell, isinstance(reduce, tuple)
        self.graphs, self.chunk = graphs, None if isinstance(chunk, str) else chunk
        fold = getattr(reduce[0], "__code__", reduce[0]) if isinstance(reduce, tuple) and reduce else None
        flatten = private("tree_flatten")
        self.length = _length(xs, length)
        if lengths is not None:
            cell, xs, reduce = masked(cell, xs, lengths, self.length, reduce, reverse=reverse)
        if isinstance(reduce, tuple):
            cell, init, reduce = folded(cell, init, reduce)
        self.carry, carry_form = flatten(init)
        self.xs, xs_form = flat(xs)
        self.sequence = CellSequence(
            cell,
            carry_form,
            xs_form,
            len(self.xs),
            self.length,
            _chunk(chunk, self.length),
            reverse,
            signature=(str(reduce), fold, lengths is not None, str(chunk)),
        )
        self.outputs: Outputs = make_outputs(reduce, self.length, reverse=reverse)

    def first_run(self, parameters: Iterable[torch.Tensor], random: bool, *, weigh: bool) -> FirstRun:
        return run_first(
            self.sequence,
            self.carry,
            self.xs,
            owner=self.owner,
            parameters=parameters,
            random=random,
            weigh=weigh,
        )

    def plan(
        self, run: FirstRun, budget: int | str | Budget | None, slots: int | None, strategy: Strategy
    ) -> ScanPlan:
        plan = make_scan_plan(
            self.length,
            chunk=self.sequence.chunk,
            sizes=run.sizes,
            budget=budget,
            slots=slots,
            strategy=strategy,
        )
        if self.graphs is False or not run.trains:
            return plan
        return self.graph_plan(run, budget if strategy == "auto" else None) or plan

    def graph_plan(self, run: FirstRun, budget: int | str | Budget | None) -> ScanPlan | None:
        """The plan for graphs; None where there is none and nobody insists."""
        graphing = self.graphing(run)
        hindrance = graphing.hindrance()
        if budget is None:
            hindrance = 'it has no budget, or a strategy other than "auto"'
        plan = None if hindrance or budget is None else graphing.plan(budget, self.chunk)
        if plan is None and self.graphs is True:
            hindrance = hindrance or f"no chunk of its steps fits the budget {budget}"
            raise LowtideError(f'the scan cannot run in CUDA graphs: {hindrance}. Write graphs="auto"')
        return plan

    def graphing(self, run: FirstRun) -> Graphing:
        return Graphing(self.sequence, self.carry, self.xs, self.outputs, run)

    def loop(self, run: FirstRun, plan: ScanPlan) -> Loop:
        """What takes the actions of a plan."""
        if not plan.graphs:
            return run.loop(self.sequence, plan.actions(), xs=self.xs, outputs=self.outputs)
        chunk = self.graphing(run).chunk(plan.chunk)
        run.surroundings.go_on_from(run.start)
        return run.graph_loop(chunk, plan.actions(), xs=self.xs, outputs=self.outputs)

    def results(self, carry: list[Any], outputs: list[Any]) -> tuple[Any, Any]:
        unflatten = private("tree_unflatten")
        last = unflatten(carry, self.sequence.carry_form)
        if self.folds:
            return last[0], last[1]
        assert self.sequence.ys_form is not None
        return last, self.sequence.ys_form.build(outputs)


def _length(xs: Any, length: int | None) -> int:
    if length is not None:
        whole("length", length)
    leaves, _ = flat(xs)
    strange = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0]
    if strange:
        raise LowtideError(f"xs holds {say_leaf(strange[0])}; all its leaves are tensors with time first")
    found = {leaf.shape[0] for leaf in leaves} | ({length} if length is not None else set())
    if not found:
        raise LowtideError("xs holds no tensor; say how many steps to take with length=")
    if len(found) > 1:
        raise LowtideError(
            f"xs and length do not agree on the number of steps: {sorted(found)}; time comes first"
        )
    steps = found.pop()
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise LowtideError(f"the sequence has {steps!r} steps; a scan takes at least one")
    return steps


def _chunk(chunk: int | str, length: int) -> int:
    check_chunk(chunk)
    return max(1, -(-length // 4096)) if isinstance(chunk, str) else min(chunk, length)
