"""Layers that are left out by a drawn number: bit for bit as in plain PyTorch, or refused."""

import copy

import pytest
import torch
from torch import nn

import lowtide
from lowtide.entry.in_place import capped_of
from small_models import gradients, same


class Skipping(nn.Module):
    """Layers with dropout, of which `skip` says whether one is left out."""

    def __init__(self, skip):
        super().__init__()
        self.skip, self.layers = skip, nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.heads = nn.MultiheadAttention(8, 2, dropout=0.1)

    def forward(self, x):
        for layer in self.layers:
            if self.training and self.skip():
                continue
            x = nn.functional.dropout(torch.tanh(layer(x)), 0.3)
        return x.square().sum()


DECIDED = {
    "never, of many models": lambda: torch.rand([]) < 0.0,
    "never, by a method": lambda: torch.rand(()).lt(0),
    "never, turned": lambda: 0.0 > torch.rand(1),  # noqa: SIM300  # turned on purpose
    "never, below zero": lambda: torch.rand(()) <= -0.5,
    "never, as all are below one": lambda: not torch.rand(()) < 1,
    "never, as none is one": lambda: torch.rand(()) >= 1.0,
}
OFTEN = ("never, of many models",)


@pytest.mark.parametrize(
    "skip",
    [pytest.param(skip, marks=[pytest.mark.slow] * (name not in OFTEN)) for name, skip in DECIDED.items()],
    ids=DECIDED,
)
def test_the_draw_stays_and_the_branch_is_known(skip):
    found = lowtide.verify(Skipping(skip), torch.randn(4, 8), budget="min", differentiate="all")
    assert found, str(found)
    assert found.predicted == found.measured
    assert found.compared["random"] == 1


UNDECIDED = {
    "written to": lambda: torch.rand(()).mul_(-1) < 0.0,
    "not uniform": lambda: torch.randn(()) < 0.0,
}


@pytest.mark.parametrize("skip", UNDECIDED.values(), ids=UNDECIDED)
def test_what_is_not_a_draw_below_a_rate_is_refused(skip):
    model, x, before = lowtide.cap(Skipping(skip), "1MiB"), torch.ones(4, 8), torch.get_rng_state()
    with pytest.raises(lowtide.GraphBreak, match="data-dependent branching"):
        model(x)
    assert torch.equal(torch.get_rng_state(), before)


class Attending(Skipping):
    """Draws of other kinds lie between those that are compared: attention's, noise and dropout's."""

    def forward(self, x):
        for layer in self.layers:
            if self.skip():
                continue
            q = torch.tanh(layer(x + torch.randn(8)))
            x = nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.2)
            x = nn.functional.dropout(x, 0.3) + self.heads(x, q, q)[0]
        return x.square().sum()


@pytest.mark.slow
def test_each_call_leaves_out_what_plain_pytorch_does(caplog_lowtide):
    torch.manual_seed(0)
    plain, x = Attending(lambda: torch.rand(()) < 0.4), torch.randn(2, 4, 8, requires_grad=True)
    model, met = lowtide.cap(copy.deepcopy(plain), "1MiB", method="keep_all", prices="roofline"), set()
    for seed in range(10):
        results = []
        for each in (plain, model):
            torch.manual_seed(seed)
            each.zero_grad()
            loss = each(x)
            loss.backward()
            results.append([loss.detach(), torch.get_rng_state(), *gradients(each)])
        assert same(*results)
        met.add(tuple(gradient is None for gradient in gradients(plain)))
    assert len(capped_of(model).entries) == len(met) > 3
    assert sum("drawn anew at each call" in said for said in caplog_lowtide) == 1


@pytest.mark.slow
def test_a_layer_that_is_left_out_is_recomputed_by_nobody():
    torch.manual_seed(3)
    model = Attending(lambda: torch.rand(()) < 0.4)
    found = lowtide.verify(model, torch.randn(2, 4, 8, requires_grad=True), budget="min")
    assert found, str(found)
    assert found.predicted == found.measured


@pytest.mark.slow
def test_a_plan_says_that_it_is_of_the_present_random_state():
    plan = lowtide.plan(Attending(lambda: torch.rand(()) < 0.1), torch.randn(2, 4, 8, requires_grad=True))
    assert any("random state" in note for note in plan.notes)


def noise_in_place(x):
    return x + torch.empty_like(x).exponential_()


def test_draws_of_an_unknown_kind_before_it_are_refused():
    model = Skipping(lambda: torch.rand(()) < 0.4)
    step = lowtide.cap(lambda x: model(noise_in_place(x)), "1MiB")
    with pytest.raises(lowtide.GraphBreak, match="data-dependent branching"):
        step(torch.ones(4, 8))


def test_what_is_drawn_otherwise_than_foretold_is_refused(monkeypatch):
    monkeypatch.setattr("lowtide.capture.redraws.draw_mask", lambda *shape: None)
    torch.manual_seed(1)
    model = lowtide.cap(Skipping(lambda: torch.rand(()) < 0.1), "1MiB", prices="roofline")
    with pytest.raises(lowtide.CaptureError, match=r"config\.layerdrop = 0"):
        model(torch.ones(4, 8))


@pytest.mark.inductor
def test_compiled_steps_do_not_follow_draws():
    model = lowtide.cap(Skipping(lambda: torch.rand(()) < 0.4), "1MiB", executor="inductor")
    with pytest.raises(lowtide.CaptureError, match="compiled code draws others"):
        model(torch.ones(4, 8))
