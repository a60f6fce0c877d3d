"""A piece of a step that torch could not capture as one graph: its graph, its plans, what it is called with.

The first call of such a step is looked at: which tensors go from one piece to the next, what is made between
them, in which order their backward comes. No piece knows of those after it then, so each runs by the plan
that saves least. From the second call on there is a plan for all of them (`planner/joined_budget.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from .._torch import boxed, untraced
from ..devices.memory import DeviceMemory
from ..options import Options
from ..planner.budgets import resolve
from ..planner.too_small import too_small
from ..planner.under_budget import uncapped_peak, with_allocator_overhead
from ..planner.unit_plans import choice_of, saved_by, unit_plans
from ..plans.graph import Graph
from ..plans.patience import planning_for
from ..plans.planned_step import Plan, make_plan
from ..process_wide import here
from ..stages import Lowered

__all__ = [
    "LooksAtTurn",
    "Piece",
    "begin_backward",
    "call_under_way",
    "is_tensor",
    "note_saved",
    "turn_under_way",
]

FIRST_CALL = (
    "the step comes in pieces: in its first call each of them saves as little as it can for its backward, "
    "and no peak of the whole step is promised; later they are planned together, under one budget"
)

Boxed = Callable[[list[Any]], Any]


class LooksAtTurn(Protocol):
    """Is shown the tensors of one run of a piece."""

    def forward(self, given: Sequence[Any], results: Sequence[Any] | None) -> None:
        """Shown what goes in, before it runs, and then what came out."""

    def backward(self, tangents: Sequence[Any], gradients: Sequence[Any] | None) -> None:
        """The same of its backward."""


class _UnderWay(threading.local):
    turn: LooksAtTurn | None = None
    saved: int = 0


_here = _UnderWay()


def turn_under_way(turn: LooksAtTurn) -> here:
    """Show the tensors of a piece that runs in this block."""
    return here(_here, turn=turn)


def call_under_way() -> here:
    """A call of a step in pieces: what they save is added up in this block."""
    return here(_here, saved=0)


def note_saved(plan: Plan) -> None:
    """A piece has run, and holds what it saves."""
    _here.saved += saved_by(plan)


def begin_backward(turn: LooksAtTurn) -> None:
    """Show the tensors of the next backward of a piece in this thread."""
    _here.turn = turn


@dataclass(eq=False)
class Piece:
    """What is known of a captured piece: its graph without bands, and the values that it is called with.

    `primals` and `outputs`, `tangents` and `gradients` are names of values by their places among what the
    functions of its forward and its backward take and give; None is no tensor. `absent` are the places of
    results whose gradients were seen not to come: its backward is planned without them, once that is
    `settled`; `stale` says that it is to be captured anew for that.
    """

    module: fx.GraphModule
    where: str = ""
    graph: Graph | None = None
    blocks: tuple[int, ...] | None = None
    primals: tuple[str | None, ...] = ()
    outputs: tuple[str | None, ...] = ()
    tangents: tuple[str | None, ...] = ()
    gradients: tuple[str | None, ...] = ()
    made: frozenset[str] = frozenset()
    absent: frozenset[int] = frozenset()
    settled: bool = False
    stale: bool = False

    def plans(self, seconds: float) -> tuple[Plan, ...]:
        """The plans that it may follow, the one that keeps everything first."""
        assert self.graph is not None
        with planning_for(seconds):
            return unit_plans(self.graph, self.blocks)

    def first_plan(self, graph: Graph, options: Options, device: DeviceMemory) -> Plan:
        """The plan of a first call, when nothing is known of the pieces that come after this one."""
        budget = options.budget
        assert budget is not None
        self.graph, self.blocks = graph.replace(fixed={}, boundary=0), device.blocks
        plans = self.plans(options.planning_seconds)
        size = None if budget.is_knee else resolve(budget, uncapped_peak(graph, device), device)
        room = 0 if size is None else size - graph.fixed_bytes - _here.saved
        fitting = [plan for plan in plans if plan.peak <= room]
        least = min(fitting, key=choice_of) if fitting else min(plans, key=lambda plan: plan.peak)
        made = make_plan(graph, least.schedule, method=least.method, budget=size, notes=(FIRST_CALL,))
        made = with_allocator_overhead(made, device.blocks)
        if size is not None and made.peak > size and not budget.is_share_of_peak:
            raise too_small(made, budget, size)
        return made

    def see(self, stage: Lowered) -> None:
        """Note what the values are called of which its functions take and give the tensors."""
        trace, lifted = stage.captured.trace, stage.planned.priced.lifted
        ends = (trace.primals, trace.outputs, trace.tangents, trace.gradients)
        self.primals, self.outputs, self.tangents, self.gradients = (
            tuple(lifted.value_of.get(node) if isinstance(node, fx.Node) else None for node in nodes)
            for nodes in ends
        )
        self.made = frozenset(lifted.graph.writer)

    def showing_forward(self, run: Boxed) -> Boxed:
        """The forward's function, which shows its tensors where somebody looks."""

        def call(args: list[Any]) -> Any:
            turn, _here.turn = _here.turn, None
            if turn is None:
                return run(args)
            turn.forward(args, None)
            results = run(args)
            turn.forward((), results[: len(self.outputs)])
            return results

        return boxed(call)

    def showing_backward(self, run: Boxed) -> Boxed:
        """The backward's function, likewise."""

        def call(args: list[Any]) -> Any:
            turn, _here.turn = _here.turn, None
            if turn is None:
                return run(args)
            turn.backward(args[len(args) - len(self.tangents) :], None)
            results = run(args)
            turn.backward((), results)
            return results

        return boxed(untraced(call))  # a backward may run inside of the call that torch captures


def is_tensor(item: Any) -> bool:
    """Whether something is a tensor with a storage that can be told from others."""
    return isinstance(item, torch.Tensor) and item.layout == torch.strided and type(item) in _PLAIN


_PLAIN = (torch.Tensor, torch.nn.Parameter)
