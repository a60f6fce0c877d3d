"""The scans that a stock recurrent module takes.

A stack of layers in one direction is one scan, whose unit runs all layers on a block. A bidirectional stack
is one scan for each layer and direction, as a layer needs the whole output of the one before.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

__all__ = ["Way", "ways_of"]


@dataclass(frozen=True)
class Way:
    """One scan: some layers in one direction, where they stand in the carry, and the width of their input."""

    layers: range
    reverse: bool
    place: int
    features: int


def ways_of(module: nn.RNNBase) -> list[Way]:
    """The scans of a module, in the order in which they run."""
    if not module.bidirectional:
        return [Way(range(module.num_layers), False, 0, module.input_size)]
    hidden = 2 * (module.proj_size or module.hidden_size)
    return [
        Way(range(layer, layer + 1), reverse, 2 * layer + reverse, hidden if layer else module.input_size)
        for layer in range(module.num_layers)
        for reverse in (False, True)
    ]
