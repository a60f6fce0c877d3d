"""`cap` as a user meets it: in place, undone, per shape, in eval mode, with gradients that add up."""

import contextvars
import copy
import importlib
import logging
import pickle
import threading

import pytest
import torch
from torch import nn

import lowtide
from lowtide.console import log as say
from lowtide.devices.baseline import optimizer_bytes
from small_models import WithLoss, clear, gradients, mlp, plain_gradients, same


@pytest.fixture
def model():
    return WithLoss(mlp())


@pytest.fixture
def x():
    return torch.randn(256, 32)


def test_in_place_and_undone(model, x):
    keys, parameters, kind = list(model.state_dict()), list(model.named_parameters()), type(model)
    assert lowtide.cap(model, "60%") is model
    assert list(model.state_dict()) == keys
    assert [(n, id(p)) for n, p in model.named_parameters()] == [(n, id(p)) for n, p in parameters]
    assert type(model) is kind
    assert lowtide.plan_of(model) is None
    model(x).backward()
    assert lowtide.plan_of(model).peak <= 0.6 * lowtide.plan_of(model).uncapped.peak
    assert lowtide.uncap(model) is model
    assert model._compiled_call_impl is None
    with pytest.raises(lowtide.LowtideError, match="not capped"):
        lowtide.plan_of(model)


@pytest.mark.slow
def test_hooks_run(model, x):
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append("before"))
    model.net[0].register_forward_hook(lambda module, args, output: seen.append("inner"))
    lowtide.cap(model, "60%", allow_breaks=False)
    model(x).backward()
    assert seen == ["before", "inner"]


class WithStateOfItsOwn(torch.nn.Linear):
    def __getstate__(self):
        return vars(self)


@pytest.mark.parametrize("kind", [torch.nn.Linear, WithStateOfItsOwn])
@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_of_a_capped_model_are_not_capped_and_it_says_so_once(kind, again, caplog_lowtide):
    model = lowtide.cap(kind(4, 4), "1MiB")
    for _ in range(2):
        twin = again(model)
        with pytest.raises(lowtide.LowtideError, match="not capped"):
            lowtide.plan_of(twin)
    (said,) = caplog_lowtide
    assert "a copy of a capped model is not capped" in said
    assert torch.equal(twin(torch.ones(2, 4)), model(torch.ones(2, 4)))
    lowtide.cap(twin, "1MiB")(torch.ones(2, 4)).sum().backward()
    assert lowtide.plan_of(twin) is not None


def test_copies_of_a_model_that_is_capped_no_longer_say_nothing(caplog_lowtide):
    copy.deepcopy(lowtide.uncap(lowtide.cap(torch.nn.Linear(4, 4), "1MiB")))
    assert caplog_lowtide == []


@pytest.mark.slow
def test_function_is_wrapped(model, x):
    def step(x, *, scale):
        return model(x, scale=scale)

    capped = lowtide.cap(step, "60%")
    assert capped.__name__ == "step"
    expected = plain_gradients(model, x, scale=2.0)
    capped(x, scale=2.0).backward()
    assert same(gradients(model), expected)
    assert lowtide.plan_of(capped).extra > 0
    assert lowtide.uncap(capped) is step


@pytest.mark.slow
def test_plan_per_shape_is_reused(model):
    lowtide.cap(model, "60%")
    peaks = {}
    for batch in (512, 256, 512, 384, 256):
        x = torch.randn(batch, 32)
        clear(model)
        expected = plain_gradients(model, x)
        model(x).backward()
        assert same(gradients(model), expected)
        peaks.setdefault(batch, lowtide.plan_of(model).peak)
        assert peaks[batch] == lowtide.plan_of(model).peak
    assert len(model._compiled_call_impl.entries) == 3


@pytest.mark.slow
def test_eval_and_no_grad_run_plainly(model, x, caplog_lowtide):
    lowtide.cap(model, "60%")
    with torch.no_grad():
        quiet = model(x)
    model.eval()
    plain = model(x)
    assert lowtide.plan_of(model) is None
    assert torch.equal(quiet, plain)
    assert sum("eval mode" in line for line in caplog_lowtide) == 1
    model.train()
    model(x).backward()
    assert lowtide.plan_of(model) is not None


@pytest.mark.slow
def test_says_when_there_is_nothing_to_do(model, x, caplog_lowtide):
    lowtide.cap(model, "1GiB")
    for _ in range(2):
        model(x).backward()
    assert sum("nothing to do" in line for line in caplog_lowtide) == 1


@pytest.mark.parametrize(
    ("chosen", "level"), [(logging.ERROR, logging.ERROR), (logging.NOTSET, logging.INFO)]
)
def test_a_level_set_before_the_first_use_stays(monkeypatch, chosen, level):
    monkeypatch.setattr(say.log, "level", chosen)
    importlib.reload(say)
    assert say.log.level == level


@pytest.mark.slow
def test_two_capped_models(x):
    first, second = WithLoss(mlp()), WithLoss(mlp(depth=9))
    expected = plain_gradients(first, x), plain_gradients(second, x)
    lowtide.cap(first, "70%")
    lowtide.cap(second, "50%")
    (first(x) + second(x)).backward()
    assert same(gradients(first), expected[0])
    assert same(gradients(second), expected[1])
    assert lowtide.plan_of(first).peak != lowtide.plan_of(second).peak


@pytest.mark.slow
def test_same_model_twice_in_one_step(model):
    a, b = torch.randn(256, 32), torch.randn(256, 32)
    twin = copy.deepcopy(model)
    (twin(a) + twin(b)).backward()
    lowtide.cap(model, "60%")
    (model(a) + model(b)).backward()
    assert same(gradients(model), gradients(twin))


@pytest.mark.slow
def test_statistics_that_a_second_call_updates_are_not_needed_by_the_first(x):
    layers = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU())]
    plain = nn.Sequential(*layers, nn.Linear(32, 1))
    model = lowtide.cap(copy.deepcopy(plain), "min", prices="roofline")
    for each in (plain, model):
        (each(x).mean() + each(2 * x).square().mean()).backward()
    plan = lowtide.plan_of(model)
    again = [step.op for step in plan.schedule.backward if isinstance(step, lowtide.Run)]
    assert any(plan.graph.op[op].target.startswith("batch_norm") for op in again)
    assert same(gradients(model), gradients(plain))
    assert same(model.state_dict().values(), plain.state_dict().values())


@pytest.mark.slow
def test_under_data_loader_threads(model):
    lowtide.cap(model, "60%")
    batches = [torch.randn(256, 32) for _ in range(4)]
    stop = threading.Event()

    def load():
        while not stop.is_set():
            torch.randn(256, 32).sort()

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for x in batches:
            clear(model)
            expected = plain_gradients(model, x)
            model(x).backward()
            assert same(gradients(model), expected)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_steps_leave_no_context_variables_behind(model, x):
    lowtide.cap(model, "1GiB")
    model(x).backward()
    before = len(contextvars.copy_context())
    for _ in range(3):
        model(x).backward()
    assert len(contextvars.copy_context()) == before


@pytest.mark.slow
def test_training_from_two_threads(model):
    lowtide.cap(model, "60%")
    x = torch.randn(256, 32)
    expected = plain_gradients(model, x)
    model(x).backward()
    found = []

    def work():
        loss = model(x)
        found.append(torch.autograd.grad(loss, list(model.parameters())))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(list(grads), expected) for grads in found)
    assert len(found) == 2


@pytest.mark.slow
def test_gradient_accumulation_adds_inside_the_step(model, x):
    twin = copy.deepcopy(model)
    lowtide.cap(model, "75%")
    for index in range(3):
        twin(x).backward()
        model(x).backward()
        assert same(gradients(model), gradients(twin)), index

    def step():
        model(x).backward()

    step()
    taken = lowtide.measure(step)
    plan = lowtide.plan_of(model)
    assert taken.peak == plan.peak <= plan.budget


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.rate = nn.Linear(16, 16), 0.1

    def forward(self, x):
        return nn.functional.dropout(self.net(x), self.rate).sum()


@pytest.mark.slow
def test_the_backend_takes_floats_that_torch_hands_over_as_tensors():
    model, x = Dropped(), torch.ones(8, 16)
    compiled = torch.compile(model, backend="lowtide", options={"budget": "1GiB"}, dynamic=True)
    for model.rate in (0.1, 0.5):
        torch.manual_seed(0)
        found = compiled(x)
        found.backward()
        torch.manual_seed(0)
        assert torch.equal(found, model(x))


@pytest.mark.slow
def test_gradients_of_plain_tensors_count_as_those_of_parameters():
    weights = [torch.full((64, 64), 0.01, requires_grad=True) for _ in range(3)]
    x = torch.rand(16, 64, requires_grad=True)

    def step(x):
        for weight in weights:
            x = torch.tanh(x @ weight)
        return x.sum()

    capped = lowtide.cap(step, "8GiB")
    capped(x).backward()
    once = [tensor.grad.clone() for tensor in (*weights, x)]
    peak = lowtide.measure(lambda: capped(x).backward(), device="cpu").peak
    assert lowtide.plan_of(capped).peak == peak
    tight = lowtide.cap(step, peak - 1)
    assert lowtide.measure(lambda: tight(x).backward(), device="cpu").peak < peak
    for tensor, first in zip((*weights, x), once, strict=True):
        torch.testing.assert_close(tensor.grad, 3 * first)


@pytest.mark.slow
def test_accumulation_needs_no_second_set_of_gradients():
    model, x = WithLoss(mlp(width=128, depth=4)), torch.randn(8, 128)
    clear(model)
    model(x).backward()
    kept = sum(p.grad.numel() * 4 for p in model.parameters())
    least = lowtide.plan(model, x, budget="min").peak
    lowtide.cap(model, "min")
    assert lowtide.measure(lambda: model(x).backward()).peak == lowtide.plan_of(model).peak
    assert lowtide.plan_of(model).peak < least + kept


@pytest.mark.slow
def test_autograd_grad_leaves_gradients_alone(model, x):
    model(x).backward()
    before = gradients(model)
    expected = plain_gradients(_cleared(model), x)
    lowtide.cap(model, "75%")
    found = torch.autograd.grad(model(x), list(model.parameters()))
    assert same(list(found), expected)
    assert same(gradients(model), before)


def _cleared(model):
    twin = copy.deepcopy(model)
    clear(twin)
    return twin


@pytest.mark.slow
def test_parameter_hooks_see_gradients(model, x):
    seen = []
    lowtide.cap(model, "75%")
    model(x).backward()
    model.net[0].weight.register_hook(lambda grad: seen.append(grad.clone()))
    model(x).backward()
    assert len(seen) == 1
    assert torch.equal(seen[0] * 2, model.net[0].weight.grad)


@pytest.mark.slow
def test_zero_grad_between_forward_and_backward(model, x):
    expected = plain_gradients(model, x)
    lowtide.cap(model, "75%")
    for _ in range(3):
        loss = model(x)
        clear(model)
        loss.backward()
        assert same(gradients(model), expected)


@pytest.mark.slow
def test_optimizer_state_is_counted(model, x):
    plain = lowtide.plan(model, x)
    optimizer = torch.optim.Adam(model.parameters())
    announced = lowtide.plan(model, x, optimizer=optimizer)
    assert announced.graph.fixed["optimizer"] == announced.peak - plain.peak
    model(x).backward()
    optimizer.step()
    clear(model)
    there = lowtide.plan(model, x, optimizer=optimizer)
    assert there.peak == announced.peak


@pytest.mark.parametrize("kind", ["Adafactor", "Muon", "NAdam", "SGD"])
def test_announced_state_is_what_the_first_step_makes(kind):
    module = torch.nn.Linear(24, 40, bias=kind != "Muon")  # Muon takes matrices only
    momentum = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(module.parameters(), **momentum)
    held, coming = optimizer_bytes(optimizer, torch.device("cpu"))
    assert (held, bool(coming)) == (0, True)
    module(torch.ones(2, 24)).sum().backward()
    optimizer.step()
    assert optimizer_bytes(optimizer, torch.device("cpu")) == (coming, 0)


@pytest.mark.slow
def test_training_reaches_the_same_weights(x):
    torch.manual_seed(1)
    model = WithLoss(nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), mlp(64)))
    twin = copy.deepcopy(model)
    lowtide.cap(model, "60%")
    for one in (model, twin):
        torch.manual_seed(2)
        optimizer = torch.optim.AdamW(one.parameters())
        for _ in range(4):
            one(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert same(list(model.state_dict().values()), list(twin.state_dict().values()))


@pytest.mark.slow
def test_given_plan_is_followed(model, x):
    plan = lowtide.plan(model, x, budget="60%")
    again = lowtide.Plan.from_json(plan.to_json())
    assert again == plan
    lowtide.cap(model, plan=again, prices="roofline")
    assert lowtide.measure(lambda: model(x).backward()).peak == plan.peak
    assert lowtide.plan_of(model).schedule == plan.schedule
