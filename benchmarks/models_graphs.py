"""Graph nets of `torch_geometric` on one small graph, whose edges are an input of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["entries"]

NODES, EDGES, WIDTH, CLASSES = 20, 60, 8, 3
NETS = ("GCN", "GAT", "GraphSAGE", "GIN", "EdgeCNN")
CONVOLUTIONS = ("TransformerConv", "GATv2Conv", "SGConv", "TAGConv", "ChebConv")


class Labelled(nn.Module):
    """A net with the loss of the labels of all nodes."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x, edges), labels)


def _batch() -> dict[str, Any]:
    edges = torch.randint(NODES, (2, EDGES))
    return {"x": torch.randn(NODES, WIDTH), "edges": edges, "labels": torch.randint(CLASSES, (NODES,))}


def _net(name: str) -> tuple[nn.Module, dict[str, Any]]:
    from torch_geometric.nn import models

    made = getattr(models, name)(WIDTH, 16, num_layers=2, out_channels=CLASSES, dropout=0.1)
    return Labelled(made), _batch()


def _convolution(name: str) -> tuple[nn.Module, dict[str, Any]]:
    from torch_geometric import nn as layers

    order = {"K": 2} if name in ("SGConv", "TAGConv", "ChebConv") else {}
    return Labelled(getattr(layers, name)(WIDTH, CLASSES, **order)), _batch()


def entries() -> Iterator[tuple[str, Callable[[], Any]]]:
    for name in NETS:
        yield name, lambda name=name: _net(name)
    for name in CONVOLUTIONS:
        yield name, lambda name=name: _convolution(name)
