"""Random ops with a `generator=` of their own: drawn from it once, and replayed from its saved state.

A trace has the generator among its constants. Here an op names it itself, so that the state which is saved
for a recomputation is that generator's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from ..._torch import private_of
from ...errors import CaptureError
from ...torch_state.random_state import OwnGenerator, recompute
from .dropout import RANDOM

__all__ = ["draw_from", "generator_of_node", "name_generators", "with_others"]


def draw_from(source: OwnGenerator, operator: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run an operator that draws from a generator."""
    return operator(*args, generator=source.generator, **kwargs)


def draw_again(
    state: torch.Tensor, source: OwnGenerator, operator: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """The same numbers, from the generator's saved state."""
    return recompute(state, source, partial(draw_from, source, operator, *args, **kwargs))


RANDOM[draw_from] = draw_again


def name_generators(module: fx.GraphModule, *, compiled: bool) -> None:
    """Let each op that draws from a generator of its own name it."""
    for constant in module.graph.find_nodes(op="get_attr"):
        generator = getattr(module, str(constant.target), None)
        if not isinstance(generator, torch.Generator):
            continue
        if compiled:
            raise CaptureError(
                "a random generator as an argument (generator=) cannot be drawn from by compiled code; the "
                'default executor, executor="eager", does, or draw from torch\'s default one'
            )
        for node in list(constant.users):
            _without(node, constant)
            node.args = (OwnGenerator(generator), node.target, *node.args)
            node.target = draw_from


def _without(node: fx.Node, generator: fx.Node) -> None:
    """Take the generator out of a call; what comes after it is given by name."""
    named = {key: value for key, value in node.kwargs.items() if value is not generator}
    if generator in node.args:
        place = node.args.index(generator)
        names = [argument.name for argument in private_of(node.target, "schema").arguments]
        named |= dict(zip(names[place + 1 :], node.args[place + 1 :], strict=False))
        node.args = node.args[:place]
    node.kwargs = named


def with_others(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call with other generators, to try it with: a trial moves none of the user's."""
    return tuple(each.stand_in() if isinstance(each, OwnGenerator) else each for each in args)


def generator_of_node(node: fx.Node) -> OwnGenerator | None:
    """The generator that an op draws from, where it has one of its own."""
    first = node.args[0] if node.args else None
    return first if isinstance(first, OwnGenerator) else None
