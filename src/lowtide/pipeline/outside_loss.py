"""Bytes that are set aside for a loss outside of the captured step, of which nothing is known but its input.

Counted on is cross-entropy: beside the outputs there is their log-softmax while its backward makes two
gradients of it, the last of which is the one that the step is given. Under autocast it runs in single
precision, whatever the outputs are in: each of these is as large as a copy of the outputs in that, and one
such copy counts until the backward ends. Fabric holds one, and the number that `mse_loss` or `huber_loss`
returns lies in a storage of that size.

| beside outputs of c bytes, and f in single precision | c = f, or no autocast | c < f, under autocast |
|---|---|---|
| between forward and backward | 2c | 2f |
| until the backward ends | nothing | f |

`tests/pipeline/test_outside_loss.py` measures what losses of torch take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ..capture.trace import Trace
from ..devices.allocator import rounded
from ..plans.graph import Graph
from ..stages import Asked

__all__ = ["OutsideLoss", "outside_loss"]

_NUMBER = 4
"""Bytes of a number in single precision."""


@dataclass(frozen=True)
class OutsideLoss:
    """What the caller holds for a loss: between forward and backward, and until the backward ends."""

    boundary: int = 0
    all_along: int = 0


def outside_loss(asked: Asked, trace: Trace, value_of: Mapping[fx.Node, str], graph: Graph) -> OutsideLoss:
    """As asked, or what cross-entropy over the outputs needs; nothing where the loss is inside."""
    options = asked.options
    if not isinstance(options.outside, str):
        return OutsideLoss(options.outside + _twice_there(trace, value_of, graph))
    outputs = [] if options.allow_breaks else list(_differentiated(trace, graph))
    if not outputs:
        return OutsideLoss()
    number = 2 * rounded(_NUMBER, trace.device)  # the loss and its gradient
    copies = sum(size * _times_larger(tensor) for tensor, size in outputs if _is_cast(tensor, asked))
    as_they_are = sum(size for tensor, size in outputs if not _is_cast(tensor, asked))
    return OutsideLoss(2 * (copies + as_they_are), number + copies)


def _twice_there(trace: Trace, value_of: Mapping[fx.Node, str], graph: Graph) -> int:
    """Gradients from outside that are there beside those that the backward is given, before it begins.

    AOTAutograd copies those for which the step foretold other strides; outside, they are taken to be
    contiguous. Before that, autograd adds up the gradients of outputs that look at one tensor.
    """
    device = trace.device
    found = [node.meta["val"] for node in trace.expected if isinstance(node.meta["val"], torch.Tensor)]
    strided = [value for value in found if not value.is_contiguous()]
    come = sum(rounded(value.nbytes, device) for value in strided)
    copies = sum(rounded(value.untyped_storage().nbytes(), device) for value in strided)
    outputs = Counter(value_of.get(node) for node in trace.outputs if isinstance(node, fx.Node))
    size = {value.name: value.bytes for value in graph.values if value.kind == "output"}
    added = sum(size.get(name or "", 0) * n for name, n in outputs.items() if n > 1)
    if len(trace.tangents) >= outputs.total():
        return come
    return max(come, added + come - copies)


def _differentiated(trace: Trace, graph: Graph) -> Iterator[tuple[torch.Tensor, int]]:
    """The gradients of outputs that the plan counts on, other than numbers, and their bytes."""
    for node in trace.expected:
        tensor, value = node.meta["val"], graph.value.get(node.name)
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 1 and value is not None:
            yield tensor, value.bytes


def _is_cast(tensor: torch.Tensor, asked: Asked) -> bool:
    """Whether autocast makes a copy of an output in single precision where it goes into a loss."""
    return _times_larger(tensor) > 1 and any(kind == tensor.device.type for kind, _ in asked.called_in)


def _times_larger(tensor: torch.Tensor) -> int:
    return max(1, _NUMBER // tensor.element_size())
