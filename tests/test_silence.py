"""Nothing in silence: a cap holds, is refused, or says once what it does not cover."""

import pytest
import torch

import lowtide
from test_api import WithLoss, clear, mlp


@pytest.fixture
def model():
    return WithLoss(mlp())


@pytest.fixture
def x():
    return torch.randn(256, 32)


def compiled_with_backend(model, **options):
    return torch.compile(model, backend="lowtide", options={"prices": "roofline", **options})


@pytest.mark.parametrize("executor", ["eager", "inductor"])
@pytest.mark.parametrize(
    ("use", "budget"), [("cap", "10KiB"), ("backend", "40%"), ("plan", "10KiB"), ("verify", "40%")]
)
def test_a_given_plan_must_keep_to_the_budget(model, x, executor, use, budget):
    plan = lowtide.plan(model, x, budget="60%", executor=executor)
    options = {"budget": budget, "plan": plan, "executor": executor}
    calls = {
        "cap": lambda: lowtide.cap(model, prices="roofline", **options)(x),
        "backend": lambda: compiled_with_backend(model, **options)(x),
        "plan": lambda: lowtide.plan(model, x, **options),
        "verify": lambda: lowtide.verify(model, x, prices="roofline", **options),
    }
    said = rf"the plan to follow takes .* parameters .* more than the budget {budget} .*Leave plan= out"
    try:
        with pytest.raises(lowtide.BudgetTooSmall, match=said) as caught:
            calls[use]()
    except torch._dynamo.exc.BackendCompilerFailed as error:  # torch hands errors of a backend on like this
        assert use == "backend"
        assert isinstance(error.inner_exception, lowtide.BudgetTooSmall)
        return
    assert caught.value.smallest > caught.value.budget
    assert sum(caught.value.parts.values()) == caught.value.smallest


@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_a_given_plan_must_keep_to_its_own_budget(model, x, executor):
    plan = lowtide.plan(model, x, budget="60%", executor=executor)
    optimizer = torch.optim.Adam(model.parameters())
    lowtide.cap(model, plan=plan, prices="roofline", executor=executor, optimizer=optimizer)
    with pytest.raises(lowtide.BudgetTooSmall, match="optimizer .* more than its own budget") as caught:
        model(x)
    assert caught.value.budget == plan.budget
    enough = caught.value.smallest
    options = {"plan": plan, "prices": "roofline", "executor": executor, "optimizer": optimizer}
    lowtide.cap(model, enough, **options)(x).backward()
    found = lowtide.plan_of(model)
    assert (found.schedule, found.peak, found.budget) == (plan.schedule, enough, enough)


@pytest.mark.parametrize("budget", ["60%", "100%", "free", "1GiB"])
def test_a_budget_that_a_given_plan_keeps_to_is_that_of_the_plan(model, x, budget):
    plan = lowtide.plan(model, x, budget="60%")
    lowtide.cap(model, budget, plan=plan, prices="roofline")(x).backward()
    found = lowtide.plan_of(model)
    assert found.schedule == plan.schedule
    assert found.peak == plan.peak <= found.budget


def test_the_smallest_budget_and_a_given_plan_exclude_each_other(model, x):
    plan = lowtide.plan(model, x, budget="60%")
    for call in (lowtide.cap, lowtide.verify):
        with pytest.raises(lowtide.LowtideError, match='"min" asks for the smallest plan, plan= for the one'):
            call(model, *([x] if call is lowtide.verify else []), budget="min", plan=plan)


def test_the_backend_follows_a_plan_without_another_budget(model, x):
    plan = lowtide.plan(model, x, budget="60%")
    step = compiled_with_backend(model, plan=plan)
    assert lowtide.measure(lambda: step(x).backward()).peak == plan.peak
