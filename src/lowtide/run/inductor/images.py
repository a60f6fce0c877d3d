"""Images that a compiled forward hands to its backward: channels last, as its convolutions hold them.

Where Inductor makes convolutions channels-last, it does so up to the last of them. What comes after (the last
normalisation, an activation) it hands over with the channels first, unless the graph says
otherwise; the backward would begin with a transposed gradient, which the first convolution copies.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.backends import mkldnn

from ..._torch import private
from ...capture.op_classes import fusing, type_of
from ...capture.realize import image_in_memory, in_memory
from ...devices.table import Device
from ...process_wide import attributes

__all__ = ["hand_over_channels_last", "prefers_channels_last"]

aten = torch.ops.aten


def prefers_channels_last(module: fx.GraphModule, target: Device | None = None) -> bool:
    """Whether Inductor will hold images with their channels last, as convolutions like them.

    On a CPU its library always likes them so; that says nothing of another device to plan for.
    """
    here = target is None or target.type == "cpu"
    with attributes(mkldnn, enabled=mkldnn.enabled and here):
        return bool(private("decide_layout")(module, is_inference=False))


def hand_over_channels_last(forward: fx.GraphModule, outputs: int) -> None:
    """Say so of the images that are saved; the first `outputs` results are the user's own."""
    if not prefers_channels_last(forward):
        return
    (output,) = forward.graph.find_nodes(op="output")
    images = _after_convolutions(forward.graph)
    for node in output.args[0][outputs:]:  # type: ignore[index]
        if node in images and node.target is in_memory():
            node.target = image_in_memory()


def _after_convolutions(graph: fx.Graph) -> set[fx.Node]:
    """Convolutions, and what loops compute of them that is an image still."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() != 4:
            continue
        loop = fusing(node) != "apart" or type_of(node) == "lowtide.in_memory"
        if node.target is aten.convolution.default or (loop and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found
