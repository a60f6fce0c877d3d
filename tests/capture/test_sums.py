"""Sums of slices: one sum for many, and the same numbers."""

import torch
from torch import fx

from lowtide.capture.rewrites.slice_sums import join_sums
from traces import joint


def layers(weights, read):
    """Layers that each read the features that it is told to of those before."""

    def step(x):
        features = [x]
        for weight in weights:
            features = [*read(features), (torch.cat(read(features), 1) @ weight).sin()]
        return torch.cat(features, 1).square().sum()

    return step


def sums(graph):
    nodes = graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    return sorted(tuple(node.meta["val"].shape) for node in nodes)


def results(module, inputs):
    found = fx.Interpreter(module).run(*inputs, enable_io_processing=False)
    return [result for result in found if result is not None]


def test_a_gradient_of_many_parts_is_summed_at_once():
    weights = [torch.rand(4 + 2 * layer, 2, requires_grad=True) for layer in range(5)]
    module, primals, tangents = joint(layers(weights, lambda features: features), torch.rand(3, 4))
    inputs = [torch.rand(node.meta["val"].shape) for node in (*primals, *tangents)]
    expected = results(module, inputs)
    assert sums(module.graph) == [(3, 2)] * (4 + 3 + 2 + 1)
    join_sums(module.graph)
    module.graph.lint()
    # the sums of several; of a feature that nothing before reads, the last sum is what its layer is given
    assert sums(module.graph) == [(3, 2)] * (4 + 1) + [(3, 4), (3, 6)]
    for mine, plain in zip(results(module, inputs), expected, strict=True):
        assert torch.equal(mine, plain)


def test_slices_that_are_no_neighbours_are_summed_by_themselves():
    """Each layer reads what the first was given and what the last has made, and nothing between."""
    weights = [torch.rand(4 + 2 * min(layer, 1), 2, requires_grad=True) for layer in range(5)]
    x = torch.rand(3, 4, requires_grad=True)
    module, _, _ = joint(layers(weights, lambda features: [features[0], *features[1:][-1:]]), x)
    before = sums(module.graph)
    join_sums(module.graph)
    assert before == sums(module.graph)
    assert len(before) > 3
