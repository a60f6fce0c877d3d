"""Calls of a capped step that differ in sizes alone: captured once for all of them.

The first shape of a step is captured with its numbers. From the second on it is known which sizes change:
there the step is captured with symbols for them, and each later shape has its numbers written into a copy of
that graph (`capture/fixed_sizes.py`), which goes the way of any captured step. What a batch answers to the
branches of the step is asked before that, of each batch.

torch's front end guards what it took for granted of the symbols (that a length is even, or below 128): a size
for which that does not hold is captured anew. Where it had to take a size for a number, where numbers cannot
be written in, or where one capture would serve few shapes, each shape is captured by itself, and a line at
the level of information says why.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .._torch import specialised_at
from ..capture.conditions import Conditions, cut_conditions
from ..capture.fixed_sizes import Fixed, OpenGraph, Refused
from ..capture.known_sizes import has_known_sizes
from ..console.log import log
from ..errors import CaptureError
from ..pipeline.compiled_calls import key_but_for_sizes, tensors_of_call

__all__ = ["AnySize", "Kin", "OneSizeOnly", "OpenStep", "Shared"]

MOST_GRAPHS = 4
"""How many graphs of one step are tried before each shape is captured by itself. Chosen: one for most sizes
and a few for those that take another road, as a single row does."""


class OneSizeOnly(CaptureError):  # noqa: N818  # says what was found; it is not shown
    """Raised where a capture does not serve other sizes: each shape is captured by itself then."""


@dataclass(eq=False)
class OpenStep:
    """A captured graph that stands for many sizes, and what it asks of each batch."""

    graph: OpenGraph
    conditions: Conditions | None

    @classmethod
    def of(cls, module: fx.GraphModule) -> OpenStep:
        """What torch's front end handed over."""
        try:
            if has_known_sizes(module.graph):
                raise Refused("a mask of the batch decides a size")
            conditions = cut_conditions(module)
            if conditions is not None and conditions.draw is not None:
                raise Refused("a branch depends on a random number")
            return cls(OpenGraph(module), conditions)
        except Refused as refusal:
            raise OneSizeOnly(str(refusal)) from None

    def fixed(self, args: Sequence[Any]) -> Fixed:
        """The graph for the sizes of a call."""
        try:
            return self.graph.fixed(args)
        except Refused as refusal:
            raise OneSizeOnly(str(refusal)) from None

    def asked_of(self, fixed: Fixed) -> tuple[int, ...]:
        """The inputs of a graph for one size that are looked at before it runs."""
        places = () if self.conditions is None else self.conditions.places
        return tuple(fixed.places.index(place) for place in places if place in fixed.places)


class Kin:
    """Calls that are alike but for their sizes: which of them change, and what was captured for them.

    `open` are the dimensions that change of each tensor, those that were told and those that were seen.
    """

    def __init__(self, name: str, shapes: list[torch.Size], told: list[set[int]]) -> None:
        self.name = name
        self.first = shapes
        self.last = shapes
        self.open = told
        self.reason: str | None = None
        self.shared: dict[Any, Shared] = {}

    def meet(self, shapes: list[torch.Size], told: list[set[int]]) -> None:
        """Note which sizes are others than at the first call, or are said to change."""
        self.last = shapes
        for dimensions, first, now, more in zip(self.open, self.first, shapes, told, strict=True):
            dimensions |= {at for at in range(len(first)) if first[at] != now[at]} | more

    def of(self, answers: Any, make: Callable[[Shared], Callable[..., Any]]) -> Shared | None:
        """What is captured for all sizes and some answers to branches; None where each has a capture."""
        if self.reason is not None or not any(self.open):
            return None
        if answers not in self.shared:
            shared = self.shared[answers] = Shared(self)
            shared.call = make(shared)
        return self.shared[answers]

    def refuse(self, reason: str) -> None:
        """Let each shape be captured by itself from now on."""
        if self.reason is None:
            self.reason = reason
            log.info("%s: each shape is captured by itself: %s", self.name, reason)

    def marks(self, tensors: list[torch.Tensor]) -> list[tuple[torch.Tensor, set[int]]]:
        """The dimensions of a call's tensors that are symbols where it is captured."""
        return list(zip(tensors, map(set, self.open), strict=True))

    def is_usual(self) -> bool:
        """Whether the last call has sizes that symbols can stand for: 0 and 1 are always numbers."""
        pairs = zip(self.last, self.open, strict=True)
        return any(shape[at] > 1 for shape, dimensions in pairs for at in dimensions)


@dataclass(eq=False)
class Shared:
    """What torch's front end compiled for kin, and the graphs that it made; torch keeps none alive."""

    kin: Kin
    call: Callable[..., Any] | None = None
    steps: list[OpenStep] = field(default_factory=list)

    def add(self, module: fx.GraphModule, *, marked: bool) -> OpenStep:
        """A graph that was captured for one more size; most often it stands for all others, too.

        Unless sizes were marked, it was captured anew for something else, and stands for this size alone.
        """
        if len(self.steps) == MOST_GRAPHS:
            raise OneSizeOnly(f"{MOST_GRAPHS} captures did not serve all of its sizes")
        self.steps.append(OpenStep.of(module))
        if marked and not self.steps[-1].graph.symbols and self.kin.is_usual():
            self.kin.refuse(specialised_at())
        return self.steps[-1]


class AnySize:
    """The calls of one capped step, by what they are besides their sizes; the last used are kept."""

    def __init__(self, name: str, most: int) -> None:
        self.name = name
        self.most = most
        self.kin: OrderedDict[Any, Kin] = OrderedDict()

    def kin_of(self, args: tuple[Any, ...], kwargs: dict[str, Any], told: list[set[int]]) -> Kin:
        """The kin of a call, which notes its sizes; `told` are those that are said to change."""
        key = key_but_for_sizes(args, kwargs)
        shapes = [tensor.shape for tensor in tensors_of_call(args, kwargs)]
        if key in self.kin:
            self.kin[key].meet(shapes, told)
        else:
            self.kin[key] = Kin(self.name, shapes, told)
        self.kin.move_to_end(key)
        while len(self.kin) > self.most:
            self.kin.popitem(last=False)
        return self.kin[key]
