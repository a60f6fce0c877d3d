"""The plain Python loop that a scan is compared with, and cells to run."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from lowtide.sequences import scan


def plain(cell, init, xs=None, *, length=None, reduce=None, reverse=False):
    """What `scan` gives with the same arguments: autograd through an ordinary loop."""
    steps = length if xs is None else tree_leaves(xs)[0].shape[0]
    carry, ys, folded = init, [], reduce[1] if isinstance(reduce, tuple) else None
    for time in reversed(range(steps)) if reverse else range(steps):
        carry, y = cell(carry, tree_map(lambda leaf, time=time: None if leaf is None else leaf[time], xs))
        if isinstance(reduce, tuple):
            folded = reduce[0](folded, y)
        else:
            ys.append(y)
    if isinstance(reduce, tuple):
        return carry, folded
    return carry, _reduced(ys, reduce, reverse)


def _reduced(ys, reduce, reverse):
    if reduce == "last":
        return ys[-1]
    if reduce is None:
        ordered = ys[::-1] if reverse else ys
        return tree_map(lambda *leaves: None if leaves[0] is None else torch.stack(leaves), *ordered)
    total = ys[0]
    for y in ys[1:]:
        total = tree_map(torch.add, total, y)
    return total if reduce == "sum" else tree_map(lambda leaf: leaf * (1 / len(ys)), total)


def differentiable(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def weighed(result):
    """A loss that reads all of a result, each number with a weight of its own."""
    leaves = differentiable(result)
    return sum(
        (leaf * torch.linspace(0.5, 1.5, leaf.numel()).view(leaf.shape).to(leaf)).sum() for leaf in leaves
    )


def gradients(run, wanted, loss=weighed):
    """The results of a run and the gradients of what is wanted, from the same random state each time."""
    torch.manual_seed(3)
    result = run()
    found = torch.autograd.grad(loss(result), wanted, allow_unused=True)
    return result, found, torch.get_rng_state()


def same(one, other, tolerance=0.0):
    """Whether two trees of tensors are the same: bitwise, or nearly."""
    ones, others = tree_leaves(one), tree_leaves(other)
    if len(ones) != len(others):
        return False
    return all(_same(a, b, tolerance) for a, b in zip(ones, others, strict=True))


def _same(a, b, tolerance):
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a == b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not tolerance:
        return torch.equal(a, b)
    return bool((a - b).abs().max() <= tolerance * (1 + b.abs().max()))


class Lstm(nn.Module):
    """A recurrent cell with a head, in float64 unless told; counts its calls."""

    def __init__(self, inputs=3, hidden=4, outputs=2, dtype=torch.float64, dropout=0.0):
        super().__init__()
        self.cell = nn.LSTMCell(inputs, hidden, dtype=dtype)
        self.head = nn.Linear(hidden, outputs, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.calls = 0

    def forward(self, carry, x):
        self.calls += 1
        carry = self.cell(self.dropout(x), carry)
        return carry, self.head(carry[0])

    def init(self, rows=2):
        like = self.head.weight
        return tuple(torch.linspace(-1, 1, rows * like.shape[1]).view(rows, -1).to(like) for _ in range(2))


def step(weight):
    def cell(h, x):
        return torch.tanh(h @ weight + x), h.sum()

    return cell


def check(make_cell, start, xs, wanted, *, tolerance=1e-12, scanned=None, **asked):
    """Compare a scan with the plain loop; the cell is made anew for each."""
    expected = gradients(lambda: plain(make_cell(), start, xs, **asked), wanted)
    got = gradients(lambda: scan(make_cell(), start, xs, **(scanned or {"slots": 3}), **asked), wanted)
    assert same(got[0], expected[0], tolerance)
    assert same(got[1], expected[1], tolerance)
    assert torch.equal(got[2], expected[2])


class Squash(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, h, x):
        h = torch.tanh(self.linear(h) + x)
        return h, h.sum()


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight):
        ctx.save_for_backward(h, weight)
        return h @ weight

    @staticmethod
    def backward(ctx, gradient):
        h, weight = ctx.saved_tensors
        return gradient @ weight.T, h.T @ gradient
