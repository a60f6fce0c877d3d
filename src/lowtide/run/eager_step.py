"""A step of the eager executor: planned again where its first run met other strides than were foretold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .._torch import private
from ..capture.lift import module_path, source_line, target_name
from ..console.log import log, say_plan
from ..plans.planned_step import Plan
from ..prices.known_kernels import learn
from ..units import format_bytes
from .first_run import Misfits

if TYPE_CHECKING:
    from ..pipeline.pipeline import Piece

__all__ = ["EagerStep"]


class EagerStep:
    """The function of a piece; what its first run saw is in `misfits`."""

    def __init__(self, piece: Piece, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        self.piece = piece
        self.module = module
        self.misfits = piece.misfits
        self.run: Callable[..., Any] = piece.compile_eagerly(module, inputs)

    def __call__(self, *args: Any) -> Any:
        if self.misfits.first is not None:
            self.plan_again(args)
        return self.run(*args)

    def plan_again(self, args: Sequence[Any]) -> None:
        """Plan with what was seen; only what is new can change a plan."""
        found, plan = self.misfits, self.piece.plan
        assert plan is not None
        device = torch.device(plan.graph.device)
        self.misfits = self.piece.misfits = Misfits.on(device)
        new = learn(found.facts, device, measured=self.piece.measured)
        again = new and self.piece.options.plan is None  # one that was given is followed as it is
        over = found.tracker.peak + plan.graph.fixed_bytes - plan.peak
        if over > 0:
            _say(found, plan, over, again=again)
        if again:
            with private("without_modes")():
                self.run = self.piece.compile_eagerly(self.module, args)
            say_plan(self.piece.plan or plan)


def _say(found: Misfits, plan: Plan, over: int, *, again: bool) -> None:
    """Tell where memory was taken that no plan stood for."""
    assert found.first is not None
    where = " at ".join(filter(None, (module_path(found.first), source_line(found.first)))) or "the step"
    then = "It is planned again with the real ones" if again else 'Plan with prices="measured", or for less'
    log.warning(
        f"{target_name(found.first)} in {where} returned a tensor with other strides than torch foretold, so "
        f"the last step took {format_bytes(over)} more than the {format_bytes(plan.peak)} that were planned. "
        f"{then}."
    )
