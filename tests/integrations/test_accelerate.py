"""Loops with accelerate: capped before or after `prepare`, with the optimizer as it was or as prepared."""

import pytest
import torch
from torch.utils.data import DataLoader

import lowtide
from small_models import WithLoss, mlp
from small_trainings import Texts, gpt2, same_weights
from tried import tried

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed (the extra tools)")
pytest.importorskip("transformers", reason="transformers is not installed (the extra tools)")

from accelerate.state import AcceleratorState, GradientState  # noqa: E402

pytestmark = pytest.mark.slow


def forget_state():
    """As before each test: the state of accelerate is one for the process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def layers():
    torch.manual_seed(0)
    return WithLoss(mlp()), DataLoader(torch.randn(4, 256, 32), batch_size=None)


def language():
    return gpt2(), DataLoader(Texts(8), batch_size=4)


def loop(make, cap, precision="bf16"):
    """The loop of a user, who caps the model where he likes to."""
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model, loader = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = cap(accelerator, model, optimizer, loader)
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss if isinstance(batch, dict) else model(batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model)


BUDGET = "80%"


def uncapped(accelerator, model, optimizer, loader):
    return accelerator.prepare(model, optimizer, loader)


def before_with_the_raw(accelerator, model, optimizer, loader):
    lowtide.cap(model, BUDGET, optimizer=optimizer, prices="roofline")
    return accelerator.prepare(model, optimizer, loader)


def before_with_the_prepared(accelerator, model, optimizer, loader):
    optimizer = accelerator.prepare(optimizer)
    lowtide.cap(model, BUDGET, optimizer=optimizer, prices="roofline")
    return accelerator.prepare(model), optimizer, accelerator.prepare(loader)


def after_with_the_raw(accelerator, model, optimizer, loader):
    model, prepared, loader = accelerator.prepare(model, optimizer, loader)
    return lowtide.cap(model, BUDGET, optimizer=optimizer, prices="roofline"), prepared, loader


def after_with_the_prepared(accelerator, model, optimizer, loader):
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return lowtide.cap(model, BUDGET, optimizer=optimizer, prices="roofline"), optimizer, loader


ORDERS = [before_with_the_raw, before_with_the_prepared, after_with_the_raw, after_with_the_prepared]


@tried("accelerate", "`cap` before and after `prepare`, raw and prepared optimizer, bf16, `accumulate`")
@pytest.mark.parametrize("cap", ORDERS)
def test_every_order(cap):
    compared(layers, cap)


@tried("accelerate", "single precision")
def test_single_precision():
    compared(layers, after_with_the_raw, "no")


@tried("accelerate", "GPT-2 in bf16, `accumulate`, `clip_grad_norm_`")
def test_a_language_model():
    compared(language, after_with_the_prepared)


def compared(make, cap, precision="bf16"):
    plain = loop(make, uncapped, precision)
    forget_state()
    capped = loop(make, cap, precision)
    assert same_weights(capped, plain)
    plan = lowtide.plan_of(capped)
    assert plan.method != "keep_all"
    assert plan.peak <= plan.budget
    assert plan.graph.fixed["optimizer"] >= 2 * sum(4 * p.numel() for p in plain.parameters())
