"""Given tensors that Inductor copies with their channels last: planned, as they are in the compiled step."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.turning import is_turned
from traces import lifted

BATCH, FIRST, LAST = (4, 3, 32, 32), (72, 3, 3, 3), (40, 72, 3, 3)


class Images(nn.Module):
    """Convolutions of 3x3 and of 1x1."""

    def __init__(self, *, frozen=False, channels=40):
        super().__init__()
        self.first = nn.Conv2d(3, 72, 3, bias=False).requires_grad_(not frozen)
        self.narrow = nn.Conv2d(72, 72, 1, bias=False)
        self.last = nn.Conv2d(72, channels, 3, bias=False)

    def forward(self, x):
        return self.last(self.narrow(self.first(x)).relu()).square().mean()


def copied(model, x, **options):
    """The shapes of what is copied; the copies are made once, and kept for the backward."""
    found, _ = lifted(model, x, executor="inductor", **options)
    ops = [op for op in found.graph.ops if is_turned(found.node_of[op.name])]
    for op in ops:
        readers = {other.phase for other in found.graph.ops if op.writes[0] in other.reads}
        assert (op.phase, op.kind, readers) == ("forward", "pinned", {"forward", "backward"})
    return {tuple(found.node_of[op.name].meta["val"].shape) for op in ops}


def test_the_batch_and_weights_that_are_larger_than_one_pixel_are_copied():
    assert copied(Images(), torch.rand(BATCH)) == {BATCH, FIRST, LAST}


def test_what_has_its_channels_last_is_not_copied():
    turned = torch.channels_last
    assert copied(Images().to(memory_format=turned), torch.rand(BATCH).to(memory_format=turned)) == set()


def test_what_only_the_forward_reads_is_not_kept():
    assert copied(Images(frozen=True), torch.rand(BATCH)) == {LAST}


def test_a_step_that_is_not_compiled_copies_nothing():
    found, _ = lifted(Images(), torch.rand(BATCH))
    assert not any(is_turned(node) for node in found.node_of.values())


@pytest.mark.parametrize(("channels", "shapes"), [(40, {BATCH, FIRST, LAST}), (36, set())])
def test_another_device_turns_what_it_likes(channels, shapes):
    """On a GPU, Inductor turns nothing where a convolution makes few channels of many."""
    assert copied(Images(channels=channels), torch.rand(BATCH), device="H200") == shapes


def test_a_compiled_step_has_the_copies_that_were_planned():
    model, x = Images(), torch.rand(BATCH)
    weights = list(model.parameters())
    expected = torch.autograd.grad(model(x), weights)
    lowtide.cap(model, "8GiB", executor="inductor")
    for mine, plain in zip(torch.autograd.grad(model(x), weights), expected, strict=True):
        torch.testing.assert_close(mine, plain)
    plan = lowtide.plan_of(model)
    assert plan.compiled == plan.timeline.peak
