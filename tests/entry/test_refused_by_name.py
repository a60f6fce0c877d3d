"""What torch cannot capture is refused with a name that its author knows, and never skipped."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint_sequential

import lowtide
from small_models import gradients, same

SEEN = []


class Step(nn.Module):
    """Layers, and a way to use them."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        self.way, self.layers = way, nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.recurrent = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        return self.way(self, x).square().sum()


def hook_that_keeps(model, x):
    y = model.layers(x)
    y.register_hook(lambda grad: SEEN.append(grad))
    return y


def kept_gradient(model, x):
    y = model.layers(x)
    y.retain_grad()
    return y * 2


def packed(model, x):
    out, _ = model.recurrent(rnn.pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True))
    return out.data


def a_function_that_is_skipped(model, x):
    return checkpoint_sequential(model.layers, 2, x, use_reentrant=False)


def generator(model, x):
    return model.layers(x) * torch.rand(x.shape, generator=torch.Generator())


WAYS = {
    hook_that_keeps: "such as a hook of a tensor, changes something outside",
    kept_gradient: r"retain_grad\(\) on a tensor that the step makes",
    packed: "packed sequences: .* mask what comes out",
    a_function_that_is_skipped: "checkpoint_sequential is a function that torch does not look into",
    generator: "a random generator that the step makes",
}


@pytest.mark.parametrize(("way", "said"), WAYS.items(), ids=[way.__name__ for way in WAYS])
def test_the_cause_has_a_name(way, said):
    with pytest.raises(lowtide.GraphBreak, match=said):
        lowtide.plan(Step(way), torch.ones(2, 3, 4))


def test_sequences_that_are_packed_before_are_named_too():
    model = nn.LSTM(4, 4)
    with pytest.raises(lowtide.GraphBreak, match="packed sequences"):
        lowtide.plan(lambda sequences: model(sequences)[0].data.sum(), rnn.pack_sequence([torch.ones(3, 4)]))


def put(layer, kind):
    """Hang a hook on a layer that doubles gradients, and notes that it did."""
    if kind == "pre":
        layer.register_full_backward_pre_hook(lambda _, outgoing: SEEN.append(1) or (outgoing[0] * 2,))
    else:
        layer.register_full_backward_hook(lambda _, incoming, outgoing: SEEN.append(1) or (incoming[0] * 2,))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pre", "full"])
def test_backward_hooks_of_modules_are_captured_when_they_come_and_run_in_pieces(kind):
    plain, x = Step(lambda model, x: model.layers(x)), torch.ones(2, 4)
    model = lowtide.cap(copy.deepcopy(plain), "1MiB", prices="roofline")
    model(x).backward()
    put(model.layers[2], kind)
    model.zero_grad()
    pieces = lowtide.cap(copy.deepcopy(plain), "1MiB", prices="roofline", allow_breaks=True)
    SEEN.clear()
    for each in (plain, pieces):
        put(each.layers[2], kind)
    for each in (plain, pieces, model):
        each(x).backward()
    assert len(SEEN) == 3
    assert same(gradients(plain), gradients(pieces))
    assert same(gradients(plain), gradients(model))
