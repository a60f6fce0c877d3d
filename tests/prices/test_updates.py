"""What updates of parameters take: measured on small copies, and the same as at the whole size."""

import pytest
import torch
from torch import nn

from lowtide.prices import updates
from lowtide.prices.updates import Owned, Tried

optim = torch.optim
HERE = Tried(torch.device("cpu"), "cpu")


class Squares(optim.SGD):
    """Takes a matrix of rows times rows, so that no small copy tells."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.add_((p @ p.T) @ p.grad, alpha=0.0)


def shapes(*sizes, dtype=torch.float32):
    return [updates._Shape(size, dtype) for size in sizes]


def owned(make):
    optimizer = make([nn.Parameter(torch.zeros(2, 2))])
    return Owned(optimizer, optimizer.param_groups[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: optim.AdamW(p),
        lambda p: optim.AdamW(p, foreach=True, amsgrad=True),
        lambda p: optim.AdamW(p, fused=True),
        lambda p: optim.Adafactor(p),
        lambda p: Squares(p),
    ],
    ids=["SGD", "AdamW", "foreach", "fused", "Adafactor", "Squares"],
)
def test_extrapolated_is_measured(make):
    large = shapes((512, 160), (320, 256))
    found = updates._extrapolated(owned(make), large, HERE)
    assert found == updates._tried(owned(make), large, HERE)


def test_fused_takes_nothing_and_lists_take_several_times_the_tensors():
    sizes = shapes((64, 64), (64,))
    whole = 4 * (64 * 64 + 64)
    assert updates._extrapolated(owned(lambda p: optim.AdamW(p, fused=True)), sizes, HERE) == 0
    lists = owned(lambda p: optim.AdamW(p, foreach=True))
    assert updates._extrapolated(lists, sizes, HERE) >= whole
    on_gpu = Tried(torch.device("cpu"), "cuda")
    assert updates._tried(owned(optim.AdamW), sizes, on_gpu) == updates._tried(lists, sizes, HERE)
