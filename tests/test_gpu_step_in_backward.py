"""On a GPU, optimizers that step inside of the backward: bits of the plain loop, bytes of the plan."""

import copy
import gc
import os

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # asked for by deterministic algorithms
import torch
from torch import nn

import lowtide
from lowtide.errors import UnsupportedBackward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device; run on a machine with one"
    ),
]

WIDTH = 1024


def block():
    wide, narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
    return nn.Sequential(nn.LayerNorm(WIDTH), wide, nn.GELU(), narrow)


class Net(nn.Module):
    """More parameters than activations; the first and the last layer share their weight."""

    def __init__(self, depth=8):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return (x @ self.first.weight).float().square().mean()


def trained(model, optimizer, x, steps=3):
    for _ in range(steps):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()


def states(model, optimizer):
    return [item for parameter in model.parameters() for item in optimizer.state[parameter].values()]


@pytest.mark.parametrize("form", ["fused", "foreach", None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bits_and_the_bytes(form, dtype):
    gc.collect()  # what earlier tests left counts as there, and may go before the measured step
    torch.manual_seed(0)
    plain = Net().to("cuda", dtype)
    model = copy.deepcopy(plain)
    x = torch.randn(64, WIDTH, device="cuda", dtype=dtype)
    options = {form: True} if form else {"foreach": False}
    first, second = (torch.optim.AdamW(each.parameters(), **options) for each in (plain, model))
    lowtide.cap(model, "min", optimizer=second, step_in_backward=True)
    for each, optimizer in ((plain, first), (model, second)):
        trained(each, optimizer, x)
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    assert all(map(torch.equal, states(plain, first), states(model, second)))
    plan = lowtide.plan_of(model)
    taken = lowtide.measure(lambda: model(x).backward(), device="cuda").peak
    assert taken <= plan.allocated
    assert taken >= 0.99 * plan.allocated
    assert plan.gradient_bytes == 0


def test_gradients_are_not_there_at_once():
    peaks = []
    for inside in (False, True):
        model = Net().to("cuda", torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        lowtide.cap(model, "min", optimizer=optimizer, step_in_backward=inside)
        x = torch.randn(64, WIDTH, device="cuda", dtype=torch.bfloat16)
        trained(model, optimizer, x)
        peaks.append(lowtide.measure(lambda model=model, x=x: model(x).backward(), device="cuda").peak)
        gradients = sum(p.nbytes for p in model.parameters())
        del model, optimizer
    assert peaks[0] - peaks[1] > 0.6 * gradients


def test_a_scaler_is_refused():
    model = Net(1).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    lowtide.cap(model, "100%", optimizer=optimizer, step_in_backward=True)
    with pytest.raises(UnsupportedBackward, match="GradScaler"):
        torch.amp.GradScaler("cuda").scale(model(torch.randn(8, WIDTH, device="cuda"))).backward()
