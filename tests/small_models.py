"""A small model with its loss, for the tests on `cap`, and what its steps leave behind."""

import copy

import pytest
import torch
from torch import nn

EXECUTORS = ["eager", pytest.param("inductor", marks=pytest.mark.inductor)]


def mlp(width=32, depth=6):
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(width, 1))


class WithLoss(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, scale=1.0):
        return self.net(x).pow(2).mean() * scale


def gradients(model):
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(left, right):
    pairs = zip(left, right, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def clear(model):
    for parameter in model.parameters():
        parameter.grad = None


def plain_gradients(model, *args, **kwargs):
    twin = copy.deepcopy(model)
    twin(*args, **kwargs).backward()
    return gradients(twin)


class TwoHeads(nn.Module):
    """Two outputs of which a loss may read one."""

    def __init__(self):
        super().__init__()
        self.body, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        y = torch.tanh(self.body(x))
        return self.left(y), self.right(y)


def autocast_gradients(model, x, dtype, *, inside=False, steps=1):
    """Loss and gradients of the last of some steps under autocast, the backward inside of it or not."""
    for _ in range(steps):
        torch.manual_seed(3)
        model.zero_grad()
        with torch.autocast(x.device.type, dtype):
            loss = model(x)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]
