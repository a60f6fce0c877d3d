"""Autocast around the forward and the backward outside of it, as training loops are written: eager's bits."""

import copy
import os

import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide
from one_capture import one_capture
from small_models import autocast_gradients as gradients
from small_models import same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "ONEDNN_MAX_CPU_ISA" not in os.environ,
        reason="bf16 products can kill the process unless ONEDNN_MAX_CPU_ISA is set before torch loads",
    ),
]

WIDTH = 16


class Squared(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).float().pow(2).mean()


class Attention(nn.Module):
    def __init__(self, *, dropout=0.0, bias=False):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.dropout = dropout
        self.bias = nn.Parameter(torch.randn(5, 5)) if bias else None

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias, dropout_p=self.dropout)


class Twice(nn.Module):
    """One layer read three times: eager casts its weight once, and adds up its gradients in bfloat16."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(self.layer(self.layer(x).relu()).relu())


class Mixed(Twice):
    """Casts of the user's own, a part without autocast, and the weight itself among the readers."""

    def forward(self, x):
        y = self.layer(x)
        y = y + x.bfloat16() @ self.layer.weight.bfloat16()
        with torch.autocast("cpu", enabled=False):
            y = self.layer(y.float())
        return self.layer(y) * self.layer.weight.sum() + x.bfloat16() @ self.layer.weight.bfloat16()


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.lstm = nn.GRUCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x):
        h = c = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            h, c = self.lstm(self.gru(x[:, t], h).float(), (h, c))
            h, c = h.float(), c.float()
        return h


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(x, x)


class Einsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, WIDTH))

    def forward(self, x):
        return torch.einsum("btd,def,bte->btf", x, self.weight, x)


class Distances(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        gram = (self.layer(x).transpose(1, 2) @ self.layer(x)).float()
        return torch.cdist(self.layer(x), x.flip(0)).sum() + torch.linalg.cholesky(gram + torch.eye(WIDTH))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        flat = x.flatten(0, -2).t().to(gradient.dtype) @ gradient.flatten(0, -2)
        return gradient @ weight.t().to(gradient.dtype), flat.to(weight.dtype)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return Product.apply(x, self.weight)


class OwnAutocast(Twice):
    """Two autocast regions of the model's own, and a weight that is cast in each."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.layer(self.layer(x))
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(y) + self.layer(x)


MODELS = {
    "attention": lambda: Attention(),
    "attention with dropout": lambda: Attention(dropout=0.2),
    "attention with a bias that trains": lambda: Attention(bias=True),
    "encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.1, batch_first=True),
    "bilinear": Bilinear,
    "einsum": Einsum,
    "distances": Distances,
    "cells": Cells,
    "custom function": Custom,
    "one layer read three times": Twice,
    "a layer with readers of every kind": Mixed,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_backward_outside_of_autocast_is_eagers(name):
    model, x = Squared(MODELS[name]()), torch.randn(3, 5, WIDTH)
    expected = gradients(copy.deepcopy(model), x, dtype=torch.bfloat16, inside=False)
    with one_capture():
        for budget in ("100%", "min"):
            lowtide.cap(model, budget)
            assert same(gradients(model, x, dtype=torch.bfloat16, inside=False), expected), budget
            lowtide.uncap(model)


@pytest.mark.parametrize("name", ["attention with dropout", "cells", "bilinear"])
def test_in_half_precision(name):
    model, x = Squared(MODELS[name]()), torch.randn(3, 5, WIDTH)
    expected = gradients(copy.deepcopy(model), x, dtype=torch.float16, inside=False)
    lowtide.cap(model, "min")
    assert same(gradients(model, x, dtype=torch.float16, inside=False), expected)


def test_regions_of_the_models_own_cast_a_weight_once_each():
    model, x = Squared(OwnAutocast()), torch.randn(3, 5, WIDTH)
    twin = lowtide.cap(copy.deepcopy(model), "min")
    for one in (model, twin):
        one(x).backward()
    assert same([p.grad for p in twin.parameters()], [p.grad for p in model.parameters()])


def test_without_the_cache_of_autocast_each_reader_casts():
    model, x = Squared(Twice()), torch.randn(3, 5, WIDTH)
    twin = lowtide.cap(copy.deepcopy(model), "min")
    for one in (model, twin):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = one(x)
        loss.backward()
    assert same([p.grad for p in twin.parameters()], [p.grad for p in model.parameters()])


def test_a_backward_inside_of_autocast_is_eagers_from_the_second_step_on(caplog_lowtide):
    model, x = Squared(MODELS["attention with dropout"]()), torch.randn(3, 5, WIDTH)
    expected = gradients(copy.deepcopy(model), x, dtype=torch.bfloat16, inside=True)
    outside = gradients(copy.deepcopy(model), x, dtype=torch.bfloat16, inside=False)
    assert not same(expected, outside)
    lowtide.cap(model, "min")
    assert same(gradients(model, x, dtype=torch.bfloat16, inside=True), outside)
    said = [text for text in caplog_lowtide if "inside autocast" in text]
    assert same(gradients(model, x, dtype=torch.bfloat16, inside=True, steps=2), expected)
    assert len(said) == len([text for text in caplog_lowtide if "inside autocast" in text]) == 1
    gradients(model, x, dtype=torch.bfloat16, inside=False)  # and back again
    assert same(gradients(model, x, dtype=torch.bfloat16, inside=False), outside)


def test_a_backward_inside_of_autocast_through_the_backend():
    model, x = Squared(MODELS["attention with dropout"]()), torch.randn(3, 5, WIDTH)
    expected = [
        gradients(copy.deepcopy(model), x, dtype=torch.bfloat16, inside=inside) for inside in (False, True)
    ]
    compiled = torch.compile(model, backend="lowtide", options={"budget": "min"})
    assert same(gradients(compiled, x, dtype=torch.bfloat16, inside=False), expected[0])
    assert same(gradients(compiled, x, dtype=torch.bfloat16, inside=True, steps=2), expected[1])


@pytest.mark.inductor
def test_the_inductor_executor_traces_the_backward_outside_too():
    model, x = Squared(MODELS["attention with a bias that trains"]()), torch.randn(3, 5, WIDTH)
    twin = copy.deepcopy(model)
    for one, inside in ((model, False), (twin, True)):
        lowtide.cap(one, "min", executor="inductor")
        gradients(one, x, dtype=torch.bfloat16, inside=inside, steps=2)
    products = [
        [op.target for op in lowtide.plan_of(one).graph.ops if "bmm" in op.target or "mm" in op.target]
        for one in (model, twin)
    ]
    assert products[0]
    assert not same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


def test_a_scaler_of_gradients_in_the_loop_as_the_manual_writes_it():
    model, x = Squared(MODELS["attention with dropout"]()), torch.randn(3, 5, WIDTH)
    twin = lowtide.cap(copy.deepcopy(model), "min")
    ends = []
    for one in (model, twin):
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(one.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = one(x)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        ends.append([p.detach().clone() for p in one.parameters()])
    assert same(*ends)


@pytest.mark.parametrize("name", ["attention with dropout", "one layer read three times"])
def test_verify_calls_the_backward_as_loops_do(name, monkeypatch):
    model, x = Squared(MODELS[name]()), torch.randn(3, 5, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        found = lowtide.verify(model, x, budget="min")
        assert found.verdict == "yes"
        # with the faults put back, it finds them
        monkeypatch.setattr("lowtide.capture.joint_graph.as_torch_reads_it", lambda state: "same_as_forward")
        monkeypatch.setattr("lowtide.capture.trace.cast_once", lambda *_: None)
        torch._dynamo.reset()
        assert lowtide.verify(model, x, budget="min").different


def test_scans_go_back_outside_of_autocast_too():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Attention(bias=True)

        def forward(self, h, x):
            y = self.inner(h + x).float().transpose(1, 2).flatten(2)
            return y, y.pow(2).mean()

    cell, h, xs = Cell(), torch.randn(2, 5, WIDTH), torch.randn(1, 2, 5, WIDTH)
    twin = copy.deepcopy(cell)
    for inside in (False, True):
        for one in (cell, twin):
            one.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = one(h, xs[0])[1] if one is twin else lowtide.scan(one, h, xs, slots=1, reduce="sum")[1]
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
        assert same([p.grad for p in cell.parameters()], [p.grad for p in twin.parameters()])
