"""Layers that are skipped by a drawn number: with a rate of zero or one the branch does not depend on it."""

import pytest
import torch
from torch import nn

import lowtide


class Skipping(nn.Module):
    """Layers with dropout, of which `skip` says whether one is left out."""

    def __init__(self, skip):
        super().__init__()
        self.skip, self.layers = skip, nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            if self.training and self.skip():
                continue
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.3)
        return x.square().sum()


DECIDED = {
    "never, of many models": lambda: torch.rand([]) < 0.0,
    "never, by a method": lambda: torch.rand(()).lt(0),
    "never, turned": lambda: 0.0 > torch.rand(1),  # noqa: SIM300  # turned on purpose
    "never, below zero": lambda: torch.rand(()) <= -0.5,
    "never, as all are below one": lambda: not torch.rand(()) < 1,
    "never, as none is one": lambda: torch.rand(()) >= 1.0,
}


@pytest.mark.parametrize("skip", DECIDED.values(), ids=DECIDED)
def test_the_draw_stays_and_the_branch_is_known(skip):
    found = lowtide.verify(Skipping(skip), torch.randn(4, 8), budget="min", differentiate="all")
    assert found, str(found)
    assert found.predicted == found.measured
    assert found.compared["random"] == 1


UNDECIDED = {
    "sometimes": lambda: torch.rand(()) < 0.5,
    "zero is drawn sometimes": lambda: torch.rand(()) <= 0.0,
    "written to": lambda: torch.rand(()).mul_(-1) < 0.0,
    "not uniform": lambda: torch.randn(()) < 0.0,
}


@pytest.mark.parametrize("skip", UNDECIDED.values(), ids=UNDECIDED)
def test_what_depends_on_the_draw_is_refused(skip):
    model, x, before = lowtide.cap(Skipping(skip), "1MiB"), torch.ones(4, 8), torch.get_rng_state()
    with pytest.raises(lowtide.GraphBreak, match="data-dependent branching"):
        model(x)
    assert torch.equal(torch.get_rng_state(), before)
