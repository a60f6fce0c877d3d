"""Calls whose backward is still to come: what they hold is counted, or the next call is refused."""

import copy

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import UnsupportedBackward
from small_models import EXECUTORS


class Loss(nn.Module):
    def __init__(self, layers=6):
        super().__init__()
        parts = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(layers)]
        self.layers = nn.Sequential(*parts)

    def forward(self, x):
        return self.layers(x).pow(2).mean()


@pytest.fixture
def batches():
    return torch.randn(256, 32), torch.randn(256, 32)


def uncapped(model, x):
    return lowtide.plan(model, x).peak


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_second_call_that_does_not_fit_is_refused_and_the_first_goes_on(executor, batches):
    model = Loss()
    twin = copy.deepcopy(model)
    lowtide.cap(model, int(0.8 * uncapped(model, batches[0])), executor=executor)
    first = model(batches[0])
    with pytest.raises(UnsupportedBackward, match="one function that returns the sum"):
        model(batches[1])
    first.backward()
    twin(batches[0]).backward()
    for mine, plain in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad)
    model.zero_grad()
    model(batches[1]).backward()  # alone it fits


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.usefixtures("idle_kernels")
def test_calls_that_fit_together_stay_under_the_budget(executor, together, batches):
    model = Loss()
    budget = int(2.4 * uncapped(model, batches[0]))
    lowtide.cap(model, budget, executor=executor)

    def step():
        losses = [model(batch) for batch in batches]
        for loss in [sum(losses)] if together else losses:
            loss.backward()

    for _ in range(2):
        model.zero_grad()
        taken = lowtide.measure(step)
        assert taken.peak <= budget
        assert lowtide.plan_of(model).peak >= taken.peak
        assert lowtide.plan_of(model).graph.fixed["calls in flight"] > 0


@pytest.mark.slow
def test_the_second_call_is_planned_beside_the_first(batches):
    """At this budget keeping everything twice does not fit, and recomputing in the second call does."""
    small, large = batches[0][:16], batches[1]
    model = Loss()
    saved = lowtide.plan(model, small).saved
    budget = uncapped(model, large) + saved // 2
    lowtide.cap(model, budget)

    def step():
        (model(small) + model(large)).backward()

    step()
    model.zero_grad()
    assert lowtide.measure(step).peak <= budget
    assert lowtide.plan_of(model).method == "auto"


@pytest.mark.slow
def test_the_one_function_way_of_the_error_fits(batches):
    model = Loss()
    budget = int(0.8 * uncapped(model, batches[0]))
    step = lowtide.cap(lambda a, b: model(a) + model(b), budget)
    step(*batches).backward()
    model.zero_grad()
    assert lowtide.measure(lambda: step(*batches).backward()).peak <= budget


@pytest.mark.slow
def test_a_result_that_was_let_go_is_not_in_flight(batches):
    model = Loss()
    lowtide.cap(model, int(0.8 * uncapped(model, batches[0])))
    for _ in range(3):
        model(batches[0])
    with torch.no_grad():
        model(batches[0])
    model(batches[1]).backward()
    assert "calls in flight" not in lowtide.plan_of(model).graph.fixed


@pytest.mark.slow
def test_a_result_that_only_a_cycle_holds_is_not_in_flight(batches):
    model = Loss()
    lowtide.cap(model, int(0.8 * uncapped(model, batches[0])))
    cycle = [model(batches[0])]
    cycle.append(cycle)
    del cycle
    model(batches[1]).backward()


@pytest.mark.slow
def test_calls_of_another_model_count_too(batches):
    """A generator waits for its backward while a discriminator trains."""
    maker, judge = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)), Loss()
    alone = uncapped(judge, batches[0].requires_grad_())
    lowtide.cap(maker, "1MiB")
    lowtide.cap(judge, alone + 40_000)
    made = maker(batches[0].detach())
    judge(made.detach()).backward()
    plan = lowtide.plan_of(judge)
    assert plan.graph.fixed["calls in flight"] >= made.numel() * 4
    assert plan.peak <= plan.budget
    judge.zero_grad()
    judge(made).backward()
    assert all(p.grad is not None for p in maker.parameters())


@pytest.mark.slow
def test_through_the_backend_a_second_call_that_does_not_fit_is_refused(batches):
    model = Loss()
    options = {"budget": int(0.8 * uncapped(model, batches[0]))}
    compiled = torch.compile(model, backend="lowtide", options=options)
    first = compiled(batches[0])
    with pytest.raises(UnsupportedBackward, match="still to come"):
        compiled(batches[1])
    first.backward()


@pytest.mark.slow
def test_pieces_of_one_call_are_not_calls_in_flight(batches):
    def step(x):
        y = layer(x).tanh()
        torch._dynamo.graph_break()
        return layer(y).pow(2).mean()

    layer = nn.Linear(32, 32)
    capped = lowtide.cap(step, "100%", allow_breaks=True)
    capped(batches[0]).backward()
    assert layer.weight.grad is not None
