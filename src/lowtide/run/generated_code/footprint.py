"""What a graph compiled by Inductor holds in memory at each of its calls, read from its text.

Inductor writes a Python function for each graph it compiles: which buffers are allocated, what is launched,
what is deleted. That text fixes the graph's memory before it has run once. Reading it is running it on
tensors without data: every line is taken from its syntax tree, an allocation becomes a tensor on the "meta"
device, an alias or a view becomes one of that tensor, and `del` deletes; a kernel is only noted, and
an operator that returns new tensors is run on the "meta" tensors for the sizes of its results. When a storage
is freed is then Python's own answer, the one that the compiled graph gets.

Limits: memory that an operator takes and gives back while it runs is not in the text, nor is an output whose
size only its library knows (the reserve of cuDNN's recurrent layers). Where sizes are symbols, the footprint
is that of the sizes the graph was compiled with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..._torch import private
from ...capture.fx_nodes import storage_of
from .ledger import Entry, Handed, Ledger
from .moment import Moment
from .reader import Reader

__all__ = ["Footprint", "footprint"]


@dataclass(frozen=True)
class Footprint:
    """The requests and calls of a compiled graph in order, and the bytes it has alive over time.

    `peak` is the most at any time, `left` what is alive when the graph has returned: its outputs less the
    inputs that are gone by then. `outputs` has None for what is not a tensor.
    """

    entries: tuple[Entry, ...]
    peak: int
    left: int
    outputs: tuple[Handed | None, ...]

    @property
    def moments(self) -> tuple[Moment, ...]:
        """Its calls."""
        return tuple(entry for entry in self.entries if isinstance(entry, Moment))


def footprint(
    source: str,
    *,
    inputs: Sequence[int | Handed] | None = None,
    rounded: Callable[[int], int] = lambda size: size,
    device: str | None = None,
) -> Footprint:
    """The footprint of a compiled graph on a kind of device ("cuda", "cpu"), or on all together.

    `inputs` says, in the order of the graph's arguments, how many bytes are freed with the last use of each:
    0 for one that somebody else holds, such as a parameter. Without it no input is ever freed. Inputs of one
    storage are told by `Handed`: what the forward handed out is what its backward is given. `rounded` is what
    the allocator makes of a request.
    """
    ledger = Ledger(rounded)
    with private("without_modes")(), torch.no_grad():
        reader = Reader(source, ledger, device)
        outputs = reader.read(inputs)
        handed = (
            ledger.known[storage_of(item)] if isinstance(item, torch.Tensor) else None for item in outputs
        )
        return Footprint(tuple(ledger.entries), ledger.peak, ledger.live, tuple(handed))
