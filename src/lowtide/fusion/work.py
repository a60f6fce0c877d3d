"""What a fused loop computes: the instructions that its elements take.

Most loops wait for memory, so that what they compute costs nothing. But memory brings an element of two bytes
in the time of a dozen instructions, and an error function takes two dozens, a random number
eighty: a loop with one of these is as slow as its arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from ..capture.fx_nodes import tensors_of
from ..capture.op_classes import type_of

__all__ = ["INSTRUCTIONS", "PER_BYTE", "as_traffic", "instructions"]

PER_BYTE = 6.5
"""Instructions that a device starts in the time that memory takes for a byte; 5 to 10 on common ones. The
counts below are fitted with it to an H200 (benchmarks/loops.py, results/loops-h200.jsonl)."""

INSTRUCTIONS = {
    "prims.inductor_random": 80,
    "prims.inductor_randint": 80,
    "aten.pow": 66,
    "aten.sin": 22,
    "aten.cos": 23,
    "aten.erf": 22,
    "aten.tanh": 9,
    "aten.sigmoid": 11,
    "aten.log": 21,
    "aten.log1p": 19,
    "aten.expm1": 23,
    "aten.exp": 9,
    "aten.div": 7,
    "aten.reciprocal": 7,
    "aten.sqrt": 8,
    "aten.rsqrt": 6,
}
"""Per element, where there are more than one or two; measured by benchmarks/loops.py."""


def as_traffic(nodes: Iterable[fx.Node]) -> int:
    """The bytes that memory moves in the time in which these nodes are computed."""
    return int(sum(map(instructions, nodes)) / PER_BYTE)


def instructions(node: fx.Node) -> int:
    """What a node takes, for all its elements."""
    elements = max((tensor.numel() for tensor in tensors_of(node)), default=0)
    return elements * INSTRUCTIONS.get(type_of(node), 1)
