"""What a fused loop computes: the instructions that its elements take.

Most loops wait for memory, so that what they compute costs nothing. But memory brings an element of two bytes
in the time of a dozen instructions, and an error function takes several dozens, a random number about a
hundred: a loop with one of these is as slow as its arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from .fusion import type_of
from .nodes import tensors_of

__all__ = ["INSTRUCTIONS", "PER_BYTE", "as_traffic", "instructions"]

PER_BYTE = 6.5
"""Instructions that a device starts in the time that memory takes for a byte; 5 to 10 on common ones."""

INSTRUCTIONS = {
    "prims.inductor_random": 100,
    "prims.inductor_randint": 100,
    "aten.pow": 40,
    "aten.sin": 40,
    "aten.cos": 40,
    "aten.erf": 30,
    "aten.tanh": 25,
    "aten.sigmoid": 20,
    "aten.log": 20,
    "aten.log1p": 25,
    "aten.expm1": 25,
    "aten.exp": 10,
    "aten.div": 10,
    "aten.reciprocal": 10,
    "aten.sqrt": 10,
    "aten.rsqrt": 10,
}
"""Per element, where there are more than one or two."""


def as_traffic(nodes: Iterable[fx.Node]) -> int:
    """The bytes that memory moves in the time in which these nodes are computed."""
    return int(sum(map(instructions, nodes)) / PER_BYTE)


def instructions(node: fx.Node) -> int:
    """What a node takes, for all its elements."""
    elements = max((tensor.numel() for tensor in tensors_of(node)), default=0)
    return elements * INSTRUCTIONS.get(type_of(node), 1)
