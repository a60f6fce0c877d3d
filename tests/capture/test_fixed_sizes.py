"""A graph with symbols for sizes, written out for a size: the graph that is captured at that size."""

import pytest
import torch
from torch import fx, nn

from lowtide._torch import sizes_marked
from lowtide.capture.branches import following_branches
from lowtide.capture.fixed_sizes import OpenGraph
from lowtide.pipeline.compiled_calls import captured


def graph_of(step, *tensors, open_at=()):
    """What torch's front end hands over for a call, and what it hands over with it."""
    found = []

    def backend(module, inputs):
        found.append((module, inputs))
        return module.forward

    with sizes_marked([(tensor, set(open_at)) for tensor in tensors]), following_branches():
        captured(step, backend)(*tensors)
    ((module, inputs),) = found
    return module, inputs


def inputs_for(graph, *tensors):
    """The inputs of a graph with symbols for a call: tensors, by their dimensions, and the length."""
    by_dimensions = {tensor.dim(): tensor for tensor in tensors}
    values = [node.meta["example_value"] for node in graph.module.graph.find_nodes(op="placeholder")]
    return [
        by_dimensions[value.dim()] if isinstance(value, torch.Tensor) else tensors[0].shape[1]
        for value in values
    ]


def shown(graph):
    """The calls of a graph by their places; what takes no tensor and gives none is left out."""
    tensors = [node for node in graph.nodes if node.op != "placeholder" and node.target is not torch.Size]
    inputs = sorted(graph.find_nodes(op="placeholder"), key=lambda node: node.name)
    places = {node: f"input {place}" for place, node in enumerate(inputs)}
    places |= {node: f"call {place}" for place, node in enumerate(tensors)}
    return [(node.op, str(node.target), fx.map_arg((node.args, node.kwargs), places.get)) for node in tensors]


def rows_by_length(x, mask):
    batch, length = x.shape[:2]
    scale = 1.0 / (length**0.5) + length / 3
    half = x[:, : (length + 1) // 2].reshape(batch, -1)
    where = torch.arange(length).expand(batch, -1) < mask.sum(1, keepdim=True)
    padded = nn.functional.pad(x, (0, 0, 0, 2 * length % 5))
    if mask[:, : length // 2].all():
        padded = padded * 2
    return (padded.sum(1) * scale).sum() + (x * where.unsqueeze(2)).sum() + half.mean() + x.numel()


def batch_of(length):
    return torch.randn(3, length, 4), torch.ones(3, length, dtype=torch.long)


@pytest.mark.parametrize("length", [7, pytest.param(12, marks=pytest.mark.slow), 2])
def test_numbers_stand_where_a_capture_of_that_size_has_them(length):
    graph = OpenGraph(graph_of(rows_by_length, *batch_of(9), open_at={1})[0])
    batch = batch_of(length)
    args = inputs_for(graph, *batch)
    fixed = graph.fixed(args)
    expected, inputs = graph_of(rows_by_length, *batch)
    assert graph.symbols
    assert shown(fixed.module.graph) == shown(expected.graph)
    (made,) = fixed.results(fixed.module(*(args[place] for place in fixed.places)))
    assert torch.equal(made, expected(*inputs)[0])
