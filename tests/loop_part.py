"""The bytes that a stock recurrent module under a budget holds in its scans."""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import PackedSequence

from lowtide.measuring.measurement import measure


def leaves_of(tree):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tuple(tree)) if isinstance(leaf, torch.Tensor)]


def size(*tensors):
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def loop_part(wrapper, x):
    """The peak of a forward and backward, beside inputs, parameters, outputs, start and their gradients."""
    module = wrapper.wrapped
    output, hidden = module(x)
    data = x.data if isinstance(x, PackedSequence) else x
    gradient = torch.ones_like(output.data if isinstance(x, PackedSequence) else output)
    carry = size(*leaves_of([hidden]))
    del output, hidden
    module.zero_grad()
    data.grad = None

    def step():
        output = wrapper(x)[0]
        (output.data if isinstance(x, PackedSequence) else output).backward(gradient)

    both_halves = size(gradient) if module.bidirectional else 0
    beside = 2 * size(data, gradient, *module.parameters()) + carry + both_halves
    return measure(step).peak - beside
