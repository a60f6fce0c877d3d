"""The backward of a captured step as autograd calls it: in one form per set of gradients that come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .._torch import boxed, private
from ..capture.rewrites.common import prune_tangents, remove_dead
from ..errors import UnsupportedBackward
from ..plans.planned_step import Plan
from .eager import Overwrites, compile_graph
from .first_run import Misfits, checked
from .handing import present_departures
from .out_of_memory import explain, explained

__all__ = ["Backward", "CompiledBackward", "only_once"]


class Backward:
    """The backward's function, in one form per set of gradients that come.

    Where it hands gradients over on the way, they and all others reach autograd by the call's `Departures`.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        expected: tuple[bool, ...],
        misfits: Misfits,
        *,
        pauses: bool,
        plan: Plan,
    ) -> None:
        self.plan = plan
        self.module = module
        self.expected = expected
        self.pauses = pauses
        self.misfits = misfits
        self.whole = checked(module, "backward", misfits)
        self.forms: dict[tuple[tuple[int, ...], Overwrites], Callable[[list[Any]], Any]] = {}

    def boxed(self) -> Callable[[list[Any]], Any]:
        def backward(args: list[Any]) -> Any:
            refuse_second_backward()
            form = self.form(missing_tangents(args, self.expected))
            if self.pauses:
                return self.depart(explained(form(args), self.plan))
            try:
                with private("without_autocast")():  # the trace has its casts
                    return form(args)
            except RuntimeError as error:
                explain(error, self.plan, "backward")
                raise

        return boxed(backward)

    def depart(self, paused: Any) -> list[None]:
        """Leave a backward that pauses to the gates of its call; nothing is returned but in their way."""
        departures = present_departures()
        assert departures is not None
        (output,) = self.module.graph.find_nodes(op="output")
        departures.begin(paused)
        return [None] * len(output.args[0])

    def form(self, missing: tuple[int, ...]) -> Callable[[list[Any]], Any]:
        if not missing:
            return self.whole
        key = missing, self.misfits.overwrites
        if key not in self.forms:
            graph = fx.Graph()
            # A copy: pruning rewrites the graph in place, and other sets of gradients may come later.
            graph.output(graph.graph_copy(self.module.graph, {}))
            module = fx.GraphModule(self.module, graph)
            tangents = graph.find_nodes(op="placeholder")[-len(self.expected) :]
            prune_tangents(graph, [tangents[index] for index in missing], tangents)
            remove_dead(graph)
            self.forms[key] = compile_graph(module, "backward", overwrites=self.misfits.overwrites)
        return self.forms[key]


class CompiledBackward:
    """A compiled backward: of the gradients that do not come it is given zeros, as torch.compile does.

    For those that are not expected, and that it does not read, it is given tensors without bytes: before
    torch 2.13 the generated code looks at the sizes of all its arguments.
    """

    def __init__(
        self,
        run: Callable[[list[Any]], Any],
        expected: tuple[bool, ...],
        tangents: list[torch.Tensor],
        plan: Plan,
    ) -> None:
        self.run = run
        self.plan = plan
        self.expected = expected
        self.tangents = [(t.shape, t.stride(), t.dtype, t.device) for t in tangents]
        self.hollow = {index: self.made_hollow(index) for index, wanted in enumerate(expected) if not wanted}

    def boxed(self, *, after: Callable[[], None]) -> Callable[[list[Any]], Any]:
        """The function of the backward; `after` is called when it has run."""

        def backward(args: list[Any]) -> Any:
            refuse_second_backward()
            first = len(args) - len(self.expected)
            for index in missing_tangents(args, self.expected):
                # Made here and not kept: zeros that waited between steps would count against the cap.
                args[first + index] = self.made(index).zero_()
            for index, nothing in self.hollow.items():
                args[first + index] = nothing
            try:
                with private("without_autocast")():  # the trace has its casts
                    results = self.run(args)
            except RuntimeError as error:
                explain(error, self.plan, "backward")
                raise
            after()
            return results

        return boxed(backward)

    def made(self, index: int) -> torch.Tensor:
        shape, stride, dtype, device = self.tangents[index]
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    def made_hollow(self, index: int) -> torch.Tensor:
        with private("without_modes")():
            tensor = self.made(index)
            # Shape and strides stay, the bytes go: nothing reads it but an assertion on sizes.
            tensor.untyped_storage().resize_(0)
        return tensor


def refuse_second_backward() -> None:
    """Values that are kept for a second backward would break the budget."""
    if private("keeps_graph")():
        raise UnsupportedBackward(
            "backward was called with retain_graph=True or create_graph=True, which would keep every saved "
            "value alive and break the budget. Call backward once per forward, on the sum of the losses, or "
            "lowtide.uncap the model."
        )


def only_once(name: str) -> Callable[..., None]:
    """What autograd calls before each backward of one call: a second one is refused.

    torch would refuse some in words of its own compiler, and only when other hooks have looked at the call.
    """
    begun = False

    def before_backward(*_: Any) -> None:
        nonlocal begun
        refuse_second_backward()
        if begun:
            raise UnsupportedBackward(
                f"a second backward through one call of {name}: what the call saved is gone with the first. "
                "Call backward once per forward, on the sum of the losses, or call the model again before it"
            )
        begun = True

    return before_backward


def missing_tangents(args: list[Any], expected: tuple[bool, ...]) -> tuple[int, ...]:
    """Which expected gradients did not come; one that came unexpectedly is refused."""
    missing = []
    tangents = args[len(args) - len(expected) :]
    for index, (tangent, wanted) in enumerate(zip(tangents, expected, strict=True)):
        if tangent is None and wanted:
            missing.append(index)
        elif tangent is not None and not wanted:
            raise UnsupportedBackward(
                f"output {index} of the step received a gradient, but the plan was made without it: for the "
                "gradient of its scalar outputs alone, or for those that came in its first call. Pass "
                'differentiate="all" to plan for every output.'
            )
    return tuple(missing)
