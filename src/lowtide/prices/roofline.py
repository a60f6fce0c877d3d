"""Prices of ops on a device that need not be here: its roofline.

An op takes the longer of its arithmetic at the device's rate and its traffic at the device's bandwidth, plus
a launch (Williams et al. 2009). A collective takes as long as its bytes take over the links of a node, or
over the network between nodes where that is longer; that it may overlap with arithmetic is not counted.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from ..capture.fx_nodes import tensors_of
from ..capture.lift import Lifted
from ..capture.rewrites.by_parts import add_product
from ..capture.rewrites.collectives import group_size, is_all_reduce, is_collective
from ..devices.table import NODE, Device, describe, find_device
from ..errors import LowtideError
from ..plans.graph import Op

__all__ = ["describe_known", "roofline_prices", "roofline_seconds"]


def describe_known(device: torch.device) -> str:
    """A name that the table of devices knows, also where the device is not in it."""
    name = describe(device)
    try:
        return find_device(name).name
    except LowtideError:
        return "A100" if device.type == "cuda" else "cpu"


def roofline_prices(lifted: Lifted, device: Device) -> Lifted:
    """The same graph with the seconds of the roofline."""
    ops = tuple(replace(op, seconds=_seconds(lifted, op, device)) for op in lifted.graph.ops)
    graph = lifted.graph.replace(ops=ops, prices=f"roofline of {device.name}")
    return replace(lifted, graph=graph)


def _seconds(lifted: Lifted, op: Op, device: Device) -> float:
    if op.name in lifted.traffic:
        return lifted.traffic[op.name] / device.bandwidth
    return roofline_seconds(lifted.node_of[op.name], device)


def roofline_seconds(node: fx.Node, device: Device) -> float:
    """The longer of arithmetic and traffic, plus a launch."""
    if is_collective(node):
        return max(_seconds_between(node, device), _traffic(node) / device.bandwidth) + device.launch
    outputs = tensors_of(node)
    dtype = outputs[0].dtype if outputs else torch.float32
    return max(operations(node) / device.rate(dtype), _traffic(node) / device.bandwidth) + device.launch


def _traffic(node: fx.Node) -> int:
    read = [tensor for parent in node.all_input_nodes for tensor in tensors_of(parent)]
    return _bytes([*read, *tensors_of(node)])


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _seconds_between(node: fx.Node, device: Device) -> float:
    """What the bytes of a collective take on their way, where each rank has a part of the whole.

    All ranks get all but their own part: over the links of a node, and over all network cards of a node from
    the other nodes. A sum that all get is scattered and gathered.
    """
    ranks = group_size(node)
    read = [tensor for parent in node.all_input_nodes for tensor in tensors_of(parent)]
    whole = max(_bytes(read), _bytes(tensors_of(node))) * (2 if is_all_reduce(node) else 1)
    inside, nodes = min(ranks, NODE), -(-ranks // NODE)
    over_links = whole * (inside - 1) / inside / device.link
    over_network = whole * (nodes - 1) / nodes / (NODE * device.network)
    return max(over_links, over_network)


def operations(node: fx.Node) -> float:
    """Floating-point operations of matrix products, convolutions and attention; 0 for all else."""
    if node.target is add_product:
        _, left, right = (parent.meta["val"] for parent in node.args)  # type: ignore[union-attr]
        return float(2 * left.shape[0] * left.shape[1] * right.shape[1])
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in flop_registry:
        return 0.0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda parent: parent.meta["val"])
    try:
        return float(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]))
    except (TypeError, ValueError, AssertionError, IndexError):
        return 0.0
