"""Prices of ops on a device that need not be here: its roofline.

An op takes the longer of its arithmetic at the device's rate and its traffic at the device's bandwidth, plus
a launch (Williams et al. 2009).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from ..capture.fx_nodes import tensors_of
from ..capture.lift import Lifted
from ..devices.table import Device, describe, find_device
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
    tensors = [tensor for parent in node.all_input_nodes for tensor in tensors_of(parent)]
    outputs = tensors_of(node)
    traffic = sum(tensor.numel() * tensor.element_size() for tensor in tensors + outputs)
    dtype = outputs[0].dtype if outputs else torch.float32
    return max(operations(node) / device.rate(dtype), traffic / device.bandwidth) + device.launch


def operations(node: fx.Node) -> float:
    """Floating-point operations of matrix products, convolutions and attention; 0 for all else."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in flop_registry:
        return 0.0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda parent: parent.meta["val"])
    try:
        return float(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]))
    except (TypeError, ValueError, AssertionError, IndexError):
        return 0.0
