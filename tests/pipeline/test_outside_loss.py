"""What `outside="auto"` sets aside for a loss outside of the step, against what losses of torch take."""

import pytest
import torch
from torch.nn import functional

import lowtide

ROWS, WIDTH, CLASSES = 64, 16, 32
TARGETS = {"cross_entropy": torch.arange(ROWS) % CLASSES}
LOSSES = {
    "cross_entropy": functional.cross_entropy,
    "mse_loss": functional.mse_loss,
    "binary_cross_entropy_with_logits": functional.binary_cross_entropy_with_logits,
}


def head():
    """Its peak is where the loss is made."""
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, CLASSES)
    )


def deep():
    """Its peak is later, in the backward."""
    layers = [torch.nn.Linear(WIDTH, CLASSES)]
    for _ in range(3):
        layers += [torch.nn.GELU(), torch.nn.Linear(CLASSES, CLASSES)]
    return torch.nn.Sequential(*layers)


def under_autocast(model, x, loss):
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
        found = loss(out)
    found.backward()


def with_outputs_cast_back(model, x, loss):
    """As Fabric does: the loss is outside of autocast, over a copy."""
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x).float()
    found = loss(out)
    found.backward()


def plainly(model, x, loss):
    out = model(x)
    found = loss(out)
    found.backward()


def peaks(loop, model, dtype=torch.float32):
    """What was predicted and measured with each of the losses."""
    model = model.to(dtype)
    x = torch.rand(ROWS, WIDTH, dtype=dtype)
    lowtide.cap(model, "1GiB", prices="roofline")
    found = {}
    for name, loss in LOSSES.items():
        target = TARGETS.get(name, torch.rand(ROWS, CLASSES, dtype=dtype))

        def step(loss=loss, target=target):
            model.zero_grad()
            loop(model, x, lambda out: loss(out, target))

        step()
        measured = lowtide.measure(step, device="cpu").peak
        found[name] = lowtide.plan_of(model).peak + target.numel() * target.element_size(), measured
    return found


@pytest.mark.parametrize("model", [head, deep])
@pytest.mark.parametrize("loop", [under_autocast, with_outputs_cast_back])
def test_a_loss_under_autocast_is_covered(loop, model):
    for predicted, measured in peaks(loop, model()).values():
        assert measured <= predicted


def test_what_fabric_does_takes_what_is_set_aside():
    predicted, measured = peaks(with_outputs_cast_back, head())["cross_entropy"]
    assert measured == predicted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_without_autocast_takes_what_is_set_aside(dtype):
    predicted, measured = peaks(plainly, head(), dtype)["cross_entropy"]
    # the loss and its gradient are in the precision of the outputs
    assert predicted - measured == 4 * (dtype == torch.bfloat16)


def test_a_plan_alone_knows_of_autocast_around_it():
    x, model = torch.rand(ROWS, WIDTH), head()
    with torch.autocast("cpu", torch.bfloat16):
        inside = lowtide.plan(model, x)
    assert inside.graph.boundary == 2 * ROWS * CLASSES * 4 == lowtide.plan(model, x).graph.boundary
    assert inside.graph.fixed["loss"] == ROWS * CLASSES * 4 + 8
