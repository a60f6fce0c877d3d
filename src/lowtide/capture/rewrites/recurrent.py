"""Recurrent layers as eager trains them: with what oneDNN keeps for the backward of an LSTM.

On the CPU `nn.LSTM` runs a layer at a time through oneDNN, which writes a workspace for the backward where
gradients are recorded. A captured step runs its operators with recording off, as it differentiates by a graph
of its own: the kernel would leave the workspace out, and its backward would have nothing to read. So it is
called as in eager. How large the workspace is only the kernel knows: it is measured, or seen in the first
run. `nn.GRU`, `nn.RNN` and LSTMs with projections are loops over ordinary operators there.

On a GPU all of them are cuDNN's, whose dropout draws from a state of its own, which nobody can put back for a
recomputation: these are not captured.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn

from ..._torch import private
from ...errors import CaptureError

__all__ = ["are_captured", "keep_workspaces", "refuse_libraries"]

aten = torch.ops.aten

_BY_LIBRARIES = (aten._cudnn_rnn.default, aten.miopen_rnn.default)


def are_captured(modules: Iterable[nn.Module]) -> bool:
    """Whether the recurrent layers among some modules can be captured as eager runs them."""
    layers = (part for module in modules for part in module.modules() if isinstance(part, nn.RNNBase))
    return all(weight.device.type in ("cpu", "meta") for layer in layers for weight in layer.parameters())


def lstm_layer(*args: Any) -> Any:
    """One layer in one direction, with its workspace; autograd itself records nothing."""
    with private("below_autograd")(), torch.enable_grad():
        return aten.mkldnn_rnn_layer.default(*args)


def refuse_libraries(graph: fx.Graph) -> None:
    """Refuse a layer that runs in a library of a GPU."""
    if any(graph.find_nodes(op="call_function", target=target) for target in _BY_LIBRARIES):
        raise CaptureError(
            "a recurrent layer on a GPU runs in cuDNN, which cannot be recomputed with the same dropout; "
            "lowtide.Recurrent caps such a layer by itself"
        )


def keep_workspaces(graph: fx.Graph) -> None:
    """Let each layer of an LSTM keep its workspace."""
    for node in graph.find_nodes(op="call_function", target=aten.mkldnn_rnn_layer.default):
        node.target = lstm_layer
