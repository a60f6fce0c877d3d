"""Sketches as operators of their own, as they run on a GPU: the same numbers, in every way to run a step.

On a CPU the operators stand for the plain ones; `test_gpu.py` has their kernels.
"""

import pytest
import torch

import lowtide
from lowtide.sketching import choose, rounded, strided
from sketched import WIDTH, Block, WithLoss, same, step

KINDS = {"strided": 0.25, "int8": None, "int4": None}


@pytest.fixture
def at_once(monkeypatch):
    """Let every sketch be an operator of its own."""

    def switch():
        for module in (strided, rounded):
            monkeypatch.setattr(module, "have_kernels", lambda x: True)

    return switch


def sketched(kind, *, always=True):
    torch.manual_seed(0)
    return lowtide.sketch(WithLoss(Block(dropout=0.0)), KINDS[kind], kind=kind, always=always)


def captured(model, x, executor, budget):
    """The gradients of a step under a cap, and its plan."""
    lowtide.cap(model, budget, executor=executor, prices="roofline")
    found = step(model, x)
    plan = lowtide.plan_of(model)
    lowtide.uncap(model)
    return found, plan


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_cap_they_change_nothing(kind, at_once):
    model, x = sketched(kind), torch.randn(4, 10, WIDTH)
    expected = step(model, x)
    at_once()
    assert same(step(model, x), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_under_a_cap_they_change_nothing_and_are_one_op_each(kind, at_once):
    model, x = sketched(kind), torch.randn(16, 40, WIDTH)
    expected = step(model, x)
    _, plain = captured(model, x, "eager", "80%")
    at_once()
    found, plan = captured(model, x, "eager", "80%")
    assert same(found, expected)
    assert len(plan.graph.ops) < len(plain.graph.ops)
    assert any("deal" in op.name or "widen" in op.name for op in plan.graph.ops)


@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_a_planner_puts_them_in_the_place_of_marks(executor, at_once, monkeypatch):
    monkeypatch.setattr(choose, "decide", lambda able, draft: [draft(able)])
    at_once()
    model, x = sketched("strided", always=False), torch.randn(16, 40, WIDTH)
    found = lowtide.verify(model, x, budget="80%", executor=executor, prices="roofline")
    assert found.exact, found
    assert "net.attention.out" in found.plan.sketched
    assert any("deal" in op.name for op in found.plan.graph.ops)


def test_a_mask_of_rows(at_once):
    torch.manual_seed(0)
    model = lowtide.sketch(WithLoss(Block()), 0.25, rows="mask")
    x, mask = torch.randn(4, 10, WIDTH), (torch.rand(4, 10) < 0.7).float()
    expected = step(model, x, mask)
    at_once()
    assert same(step(model, x, mask), expected)
