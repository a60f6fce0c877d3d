"""Nothing in silence: a cap holds, is refused, or says once what it does not cover."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed, Unsupported

import lowtide
from lowtide.devices.baseline import optimizer_bytes
from small_models import EXECUTORS, WithLoss, clear, gradients, mlp, plain_gradients, same

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture
def model():
    return WithLoss(mlp())


@pytest.fixture
def x():
    return torch.randn(256, 32)


def compiled_with_backend(model, **options):
    return torch.compile(model, backend="lowtide", options={"prices": "roofline", **options})


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("use", "budget"), [("cap", "10KiB"), ("backend", "40%"), ("plan", "10KiB"), ("verify", "40%")]
)
@pytest.mark.usefixtures("idle_kernels")
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
    wrapped = BackendCompilerFailed if use == "backend" else lowtide.BudgetTooSmall  # as torch hands it on
    with pytest.raises(wrapped, match=said) as caught:
        calls[use]()
    error = getattr(caught.value, "inner_exception", caught.value)
    assert error.smallest > error.budget
    assert sum(error.parts.values()) == error.smallest


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.usefixtures("idle_kernels")
def test_a_given_plan_must_keep_to_its_own_budget(model, x, executor):
    plan = lowtide.plan(model, x, budget="60%", executor=executor)
    optimizer = torch.optim.Adam(model.parameters())
    lowtide.cap(model, plan=plan, prices="roofline", executor=executor, optimizer=optimizer)
    with pytest.raises(lowtide.BudgetTooSmall, match=r"optimizer .* more than its own budget") as caught:
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


class Adam(torch.optim.Adam):
    """Of a user: the state of Adam, under another name."""


def train(model, x, optimizer, steps=3):
    """Peaks of some steps, with all state that is there, and the bytes of that state."""
    peaks = []
    for _ in range(steps):
        optimizer.zero_grad()
        state = [t for each in optimizer.state.values() for t in each.values()]
        peaks.append(lowtide.measure(lambda: model(x).backward(), resident=state).peak)
        optimizer.step()
    return peaks


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.usefixtures("idle_kernels")
def test_state_that_appears_later_is_planned_for(model, x, caplog_lowtide, executor, wrapped):
    keep_all = lowtide.plan(model, x, executor=executor).peak
    target = lowtide.cap(lambda x: model(x), int(0.8 * keep_all), executor=executor) if wrapped else model
    if not wrapped:
        lowtide.cap(model, int(0.8 * keep_all), executor=executor)
    optimizer = Adam(model.parameters())
    peaks = train(target, x, optimizer)
    plan = lowtide.plan_of(target)
    assert max(peaks) <= plan.budget == int(0.8 * keep_all)
    assert plan.graph.fixed["optimizer"] == sum(8 * p.numel() + 4 for p in model.parameters())
    assert peaks[-1] == plan.peak
    (said,) = [line for line in caplog_lowtide if "optimizer state" in line]
    assert "optimizer=optimizer" in said


def test_state_that_fits_is_counted_in_the_plan_in_force(model, x, caplog_lowtide):
    lowtide.cap(model, "1GiB")
    optimizer = torch.optim.Adam(model.parameters())
    peaks = train(model, x, optimizer)
    assert len(model._compiled_call_impl.entries) == 1
    assert peaks[0] < peaks[1] == peaks[2] == lowtide.plan_of(model).peak
    assert not any("optimizer state" in line for line in caplog_lowtide)


def test_state_that_does_not_fit_is_refused(model, x):
    least = lowtide.plan(model, x, budget="min").peak
    lowtide.cap(model, least + 1024)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(lowtide.BudgetTooSmall, match=r"optimizer 49\.81 KiB"):
        train(model, x, optimizer)
    lowtide.uncap(model)
    assert train(model, x, optimizer)[0] > least + 1024


def test_announced_state_is_not_counted_twice(model, x, caplog_lowtide):
    optimizer = torch.optim.Adam(model.parameters())
    announced = lowtide.plan(model, x, budget="min", optimizer=optimizer)
    lowtide.cap(model, announced.peak + 1024, optimizer=optimizer)
    peaks = train(model, x, optimizer)
    plan = lowtide.plan_of(model)
    assert plan.graph.fixed["optimizer"] == announced.graph.fixed["optimizer"]
    assert peaks[1] == plan.peak
    assert len(model._compiled_call_impl.entries) == 1
    assert not any("optimizer state" in line for line in caplog_lowtide)


def test_two_optimizers_of_which_one_is_announced(model, x):
    parts = model.net[:6], model.net[6:]
    first, second = (torch.optim.Adam(part.parameters()) for part in parts)
    lowtide.cap(model, "1GiB", optimizer=first)
    state = [sum(8 * p.numel() + 4 for p in part.parameters()) for part in parts]
    for counted in (state[0], sum(state)):
        model(x).backward()
        assert lowtide.plan_of(model).graph.fixed["optimizer"] == counted
        second.step()  # the other has not stepped: what it will make is no room for this one
        clear(model)


def test_state_that_grows_later_and_state_that_is_loaded(model, x):
    lowtide.cap(model, "1GiB")
    momentum = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = sum(4 * p.numel() for p in model.parameters())
    found = []
    for rate in (0.0, 0.9, 0.9):
        momentum.param_groups[0]["momentum"] = rate
        model(x).backward()
        momentum.step()
        found.append(lowtide.plan_of(model).graph.fixed.get("optimizer", 0))
        clear(model)
    assert found == [0, 0, whole]
    adam = torch.optim.Adam(model.parameters())
    model(x).backward()
    adam.step()
    clear(model)
    saved = adam.state_dict()
    del adam
    model(x).backward()
    assert lowtide.plan_of(model).graph.fixed["optimizer"] == whole
    again = torch.optim.Adam(model.parameters())
    again.load_state_dict(saved)
    again.step()
    clear(model)
    model(x)
    assert lowtide.plan_of(model).graph.fixed["optimizer"] == 3 * whole + 4 * len(list(model.parameters()))


def test_a_history_that_grows_is_counted(model, x):
    lowtide.cap(model, "1GiB")
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=2, history_size=100)

    def closure():
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        return loss

    for _ in range(7):
        optimizer.step(closure)
        clear(model)
        model(x)
        assert lowtide.plan_of(model).graph.fixed["optimizer"] == optimizer_bytes(optimizer, CPU)[0]
    announced = lowtide.plan(model, x, optimizer=optimizer)
    assert announced.graph.fixed == lowtide.plan_of(model).graph.fixed


def test_an_optimizer_for_each_parameter_that_steps_in_the_backward(model, x, caplog_lowtide):
    lowtide.cap(model, "1GiB")
    optimizers = {p: torch.optim.Adam([p]) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        model(x).backward()
    whole = sum(8 * p.numel() + 4 for p in model.parameters())
    assert lowtide.plan_of(model).graph.fixed["optimizer"] == whole
    assert said_of(caplog_lowtide) == []


def test_verify_counts_the_state_that_is_there(model, x):
    optimizer = torch.optim.Adam(model.parameters())
    lowtide.cap(model, "1GiB")
    train(model, x, optimizer, steps=1)
    lowtide.uncap(model)
    for options in ({}, {"optimizer": optimizer}):
        found = lowtide.verify(model, x, budget="80%", **options)
        assert found.predicted == found.measured
        assert found.plan.graph.fixed["optimizer"] == sum(8 * p.numel() + 4 for p in model.parameters())


def test_state_of_another_model_is_not_counted_on_the_cpu(model, x):
    other = WithLoss(mlp())
    lowtide.cap(model, "1GiB")
    optimizer = torch.optim.Adam(other.parameters())
    other(x).backward()
    optimizer.step()
    model(x).backward()
    assert "optimizer" not in lowtide.plan_of(model).graph.fixed


def test_the_backend_plans_again_for_state_that_appears(model, x):
    budget = int(0.8 * lowtide.plan(model, x).peak)
    step = compiled_with_backend(model, budget=budget)
    peaks = train(step, x, torch.optim.Adam(model.parameters()))
    assert max(peaks) <= budget


def said_of(caplog, word="but it was"):
    return [line for line in caplog if word in line]


class WithTrainingStep(WithLoss):
    """As a LightningModule: what trains is a method."""

    def training_step(self, x):
        return self.net(x).pow(2).mean()


PAST = {
    "a method": lambda model, x: model.training_step(x),
    "forward": lambda model, x: model.forward(x),
    "a part": lambda model, x: model.net(x).mean(),
    "compiled forward": lambda model, x: torch.compile(model.forward, backend="eager")(x),
    "eval mode": lambda model, x: model.eval()(x),
}


@pytest.mark.parametrize("way", PAST)
def test_training_past_the_cap_is_said_once(x, caplog_lowtide, way):
    model = lowtide.cap(WithTrainingStep(mlp()), "60%")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        PAST[way](model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    (said,) = said_of(caplog_lowtide)
    assert "WithTrainingStep is capped" in said
    assert "never called under its plan" in said
    assert ("model.train()" if way == "eval mode" else "Cap what the training step calls") in said


def test_training_that_leaves_the_plan_later_is_said(model, x, caplog_lowtide):
    lowtide.cap(model, "60%")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        (model(x) if step < 3 else model.forward(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    (said,) = said_of(caplog_lowtide)
    assert "not since the step before" in said


def test_a_capped_function_that_is_not_called_is_said(model, x, caplog_lowtide):
    def step(x):
        return model(x)

    capped = lowtide.cap(step, "60%")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(x).backward()
    optimizer.step()
    (said,) = said_of(caplog_lowtide)
    assert "step is capped" in said
    assert lowtide.plan_of(capped) is None


def test_training_under_the_plan_says_nothing(model, x, caplog_lowtide):
    """Two optimizers, accumulation, a step twice, a cap after a backward, another model, two capped steps."""
    other = WithLoss(mlp())
    first = lowtide.cap(lambda x: model(x), "1GiB")
    second = lowtide.cap(lambda x: other(model(x).detach() * x), "1GiB")
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.net[:8], model.net[8:])]
    last = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(4):
        first(x).backward()
        first(x).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        second(x).backward()
        last.step()
        last.zero_grad()
    third = WithLoss(mlp())
    optimizer = torch.optim.SGD(third.parameters(), lr=0.1)
    third(x).backward()
    lowtide.cap(third, "1GiB")
    optimizer.step()
    assert said_of(caplog_lowtide) == []


def test_steps_are_seen_no_longer_than_what_is_capped(model, x, caplog_lowtide):
    lowtide.uncap(lowtide.cap(model, "60%"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).backward()
    optimizer.step()
    assert said_of(caplog_lowtide) == []


def test_a_compiled_optimizer_step_is_traced_through(model, x):
    lowtide.cap(model, "60%")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    model(x).backward()
    weights = [p.clone() for p in model.parameters()]
    step()
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), weights, strict=True))


@pytest.mark.parametrize("around", ["function", "module", "parent"])
def test_an_outer_compile_leaves_the_cap_in_force(model, x, around):
    expected = plain_gradients(model, x)
    lowtide.cap(model, "60%")
    outer = {
        "function": lambda x: model(x + 0),
        "module": model,
        "parent": nn.Sequential(nn.Identity(), model),
    }
    torch.compile(outer[around], backend="eager")(x).backward()
    plan = lowtide.plan_of(model)
    assert plan is not None
    assert plan.peak <= plan.budget
    assert same(gradients(model), expected)
    torch._dynamo.reset()
    whole = torch.compile(outer[around], backend="eager", fullgraph=True)
    with pytest.raises(Unsupported, match=r"capped already cannot be captured again; lowtide\.uncap"):
        whole(x)


def test_compiling_in_place_after_the_cap_is_refused(model, x):
    lowtide.cap(model, "60%")
    with pytest.raises(lowtide.LowtideError, match=r'this model is capped.*executor="inductor"'):
        model.compile()
    model(x).backward()
    assert lowtide.plan_of(model) is not None
    nn.Module.compile(model, backend="eager")
    for call in (lowtide.plan_of, lambda model: lowtide.cap(model, "60%")):
        with pytest.raises(lowtide.LowtideError, match=r"took the place of the cap.*lowtide\.uncap"):
            call(model)
    assert lowtide.uncap(model)._compiled_call_impl is None
    assert {"compile", "__call__", "__lowtide__"}.isdisjoint(vars(model))
    lowtide.cap(model, "60%")(x).backward()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_can_be_compiled(model, x, again):
    lowtide.cap(model, "60%")
    twin = again(model)
    twin.compile(backend="eager")
    assert torch.equal(twin(x), lowtide.uncap(model)(x))
    assert torch.equal(torch.compile(again(model), backend="eager")(x), model(x))


@pytest.mark.parametrize("breaks", [False, True])
def test_a_capped_model_inside_of_a_capped_function(model, x, breaks):
    lowtide.cap(model, "60%")
    step = lowtide.cap(lambda x: model(x) * 2, "60%", allow_breaks=breaks)
    with pytest.raises(lowtide.CaptureError, match=r"capped already cannot be captured again.*uncap one"):
        step(x)
    lowtide.uncap(model)
    step(x).backward()


def test_part_of_a_capped_model(model):
    lowtide.cap(model, "60%")
    with pytest.raises(lowtide.LowtideError, match="part of a WithLoss, which is capped already"):
        lowtide.cap(model.net, "60%")
    lowtide.uncap(model)
    lowtide.cap(model.net, "60%")


def test_a_part_of_what_is_gone_may_be_capped(model):
    parent = nn.Sequential(model)
    lowtide.cap(parent, "60%")
    del parent
    lowtide.cap(model, "60%")


def test_a_second_cap_takes_the_place_of_the_first(model, x):
    lowtide.cap(lowtide.cap(model, "60%"), "1GiB")(x).backward()
    assert lowtide.plan_of(model).extra == 0


def test_capped_calls_in_two_threads_are_not_inside_of_each_other(x):
    models = [lowtide.cap(WithLoss(mlp()), "1GiB") for _ in range(2)]
    threads = [threading.Thread(target=lambda model=model: model(x).backward()) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(lowtide.plan_of(model) is not None for model in models)


@pytest.mark.parametrize(
    ("order", "said"), [("zero after the forward", 1), ("zero before", 0), ("accumulate", 0)]
)
def test_gradients_that_lie_beside_a_forward_are_told(model, x, order, said, caplog_lowtide):
    """Those of a step that was taken; those that are accumulated are there on purpose."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = lowtide.cap(lambda x: model(x), "60%", optimizer=optimizer, prices="roofline")
    for index in range(4):
        if order == "zero before":
            optimizer.zero_grad()
        loss = step(x)
        if order == "zero after the forward":
            optimizer.zero_grad()
        loss.backward()
        if order != "accumulate" or index % 2:
            optimizer.step()
        if order == "accumulate" and index % 2:
            optimizer.zero_grad()
    told = [message for message in caplog_lowtide if "gradients of the step before" in message]
    assert len(told) == said
