"""Sketches as operators of their own, as they run on a GPU: the same numbers, in every way to run a step.

On a CPU the operators stand for the plain ones; `test_gpu.py` has their kernels.
"""

import pytest
import torch

import lowtide
from lowtide.sketching import choose, rounded, strided
from lowtide.sketching.draw import draw_seed
from sketched import WIDTH, Block, WithLoss, same, step
from small_models import EXECUTORS

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("executor", EXECUTORS)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [1, 24, 33])
def test_what_a_capture_sees_is_what_they_give(rows, dtype):
    x, seed = torch.randn(rows, 512).to(dtype), draw_seed(torch.empty(0))
    real = torch.rand(rows) < 0.7
    checks = ("test_schema", "test_faketensor")
    for mask in ((None, None), (real.logical_not().argsort(stable=True), real)):
        torch.library.opcheck(strided._deal_at_once, (x, seed, max(rows // 4, 1), *mask), test_utils=checks)
    for bits in (8, 4):
        given = x, seed, bits, 256
        torch.library.opcheck(rounded._round_off_at_once, given, test_utils=checks)
        kept = rounded._round_off(*given)
        torch.library.opcheck(rounded._widen_at_once, (*kept, bits, dtype), test_utils=checks)
