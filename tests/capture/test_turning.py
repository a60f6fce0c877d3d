"""Given tensors that Inductor copies with their channels last: planned, as they are in the compiled step."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture.rewrites.channels_last_inputs import is_channels_last_copy
from traces import lifted

BATCH, FIRST, LAST = (4, 3, 32, 32), (72, 3, 3, 3), (40, 72, 3, 3)


class Images(nn.Module):
    """Convolutions of 3x3 and of 1x1."""

    def __init__(self, *, channels=40):
        super().__init__()
        self.first = nn.Conv2d(3, 72, 3, bias=False)
        self.narrow = nn.Conv2d(72, 72, 1, bias=False)
        self.last = nn.Conv2d(72, channels, 3, bias=False)

    def forward(self, x):
        return self.last(self.narrow(self.first(x)).relu()).square().mean()


def copied(model, x, **options):
    """The shapes of what is copied; copies are made once."""
    found, _ = lifted(model, x, executor="inductor", **options)
    ops = [op for op in found.graph.ops if is_channels_last_copy(found.node_of[op.name])]
    assert all((op.phase, op.kind) == ("forward", "pinned") for op in ops)
    return {tuple(found.node_of[op.name].meta["val"].shape) for op in ops}


@pytest.mark.slow
def test_the_batch_and_weights_that_are_larger_than_one_pixel_are_copied():
    assert copied(Images(), torch.rand(BATCH)) == {BATCH, FIRST, LAST}


@pytest.mark.slow
def test_what_has_its_channels_last_is_not_copied():
    turned = torch.channels_last
    assert copied(Images().to(memory_format=turned), torch.rand(BATCH).to(memory_format=turned)) == set()


def test_a_step_that_is_not_compiled_copies_nothing():
    found, _ = lifted(Images(), torch.rand(BATCH))
    assert not any(is_channels_last_copy(node) for node in found.node_of.values())


@pytest.mark.parametrize(("channels", "shapes"), [(40, {BATCH, FIRST, LAST}), (36, set())])
def test_another_device_turns_what_it_likes(channels, shapes):
    """On a GPU, Inductor turns nothing where a convolution makes few channels of many."""
    assert copied(Images(channels=channels), torch.rand(BATCH), device="H200") == shapes


@pytest.mark.inductor
def test_a_compiled_step_has_the_copies_that_were_planned():
    model, x = Images(), torch.rand(BATCH)
    weights = list(model.parameters())
    expected = torch.autograd.grad(model(x), weights)
    lowtide.cap(model, "8GiB", executor="inductor")
    for mine, plain in zip(torch.autograd.grad(model(x), weights), expected, strict=True):
        torch.testing.assert_close(mine, plain)
    plan = lowtide.plan_of(model)
    assert plan.compiled == plan.timeline.peak


def test_what_is_converted_first_is_copied_as_given():
    """A conversion that runs again in the backward needs what it converts, and Inductor turns that."""

    class Halves(Images):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    assert copied(Halves(), torch.rand(BATCH)) == {BATCH, FIRST, LAST}
