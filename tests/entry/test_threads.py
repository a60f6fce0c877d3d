"""Capped steps in threads, in forked children, and interrupted: no setting of the process is theirs."""

import gc
import logging
import os
import signal
import sys
import threading

import pytest
import torch
from torch import nn

import lowtide
from lowtide import _torch
from lowtide._torch.kernels import replaced_in_traces
from lowtide.capture.joint_graph import capturing
from lowtide.pipeline import way_down

SEEN = []


@torch.library.custom_op("lowtide_tests::look_around", mutates_args=())
def look_around(x: torch.Tensor) -> torch.Tensor:
    SEEN.append(settings())
    return x.clone()


look_around.register_fake(torch.empty_like)
look_around.register_autograd(lambda ctx, gradient: gradient)


def settings():
    """What is process-wide and plays a part in captures, by name."""
    configs = [_torch.private(name) for name in ("dynamo_config", "functorch_config", "inductor_config")]
    found = {(config.__name__, name): value for config in configs for name, value in plain(config)}
    tracers = [_torch.private("AnyTracer")]
    for tracer in tracers:
        tracers += tracer.__subclasses__()
        found[tracer] = list(map(id, tracer.dispatch_table))
    kernels = [len(op.py_kernels) for op in replaced_in_traces()]
    others = (gc.isenabled(), _torch.stance(), logging.getLogger("lowtide").level)
    return {**found, "kernels": kernels, "texts": torch.fx.GraphModule.print_readable, "others": others}


def changed_since(before, now=None):
    """The names of settings that are not what they were."""
    now = settings() if now is None else now
    return [name for name in before if now[name] != before[name]]


def plain(config):
    copied = config.get_config_copy()
    return ((name, value) for name, value in copied.items() if isinstance(value, bool | int | str | None))


def small(width=8):
    return nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width), nn.Tanh())


class Broken(nn.Module):
    """A step in pieces, which are traced once more when they are planned together."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = small(width), small(width)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


class LooksAround(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = small()

    def forward(self, x):
        return look_around(self.body(x)).square().mean()


def gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


class AsksTheTrace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = small(), small()

    def forward(self, x):
        x = asked_in_traces(self.first(x))
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


TRACED = []


@torch.library.custom_op("lowtide_tests::asked_in_traces", mutates_args=())
def asked_in_traces(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@asked_in_traces.register_fake
def _(x):
    TRACED.append(torch.fx._symbolic_trace.is_fx_symbolic_tracing())
    return torch.empty_like(x)


asked_in_traces.register_autograd(lambda ctx, gradient: gradient)


@pytest.mark.slow
def test_what_is_traced_at_later_calls_looks_like_a_capture_to_other_threads():
    """Torch refuses compiled calls while somebody traces with FX, in any thread."""
    model = lowtide.cap(AsksTheTrace(), "min", prices="roofline", allow_breaks=True)
    for _ in range(2):
        count = len(TRACED)
        model(torch.ones(3, 8)).backward()
        assert len(TRACED) > count
    assert not any(TRACED)


def test_planned_steps_write_no_settings():
    SEEN.clear()
    model, x = LooksAround(), torch.randn(4, 8)
    lowtide.cap(model, "100%", prices="roofline")
    before = settings()
    for _ in range(3):
        model(x).backward()
        model.zero_grad()
    assert len(SEEN) == 3
    assert [changed_since(before, seen) for seen in (*SEEN[1:], settings())] == [[], [], []]


def test_one_lock_for_torchs_captures_and_ours():
    """Two would be taken in one order by a first call, and in the other by torch.compile."""
    taken = []

    def backend(module, inputs):
        thread = threading.Thread(target=lambda: taken.append(capturing.acquire(blocking=False)))
        thread.start()
        thread.join()
        return module.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert taken == [False]


def trained(model, data, before_each=lambda: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        before_each()
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("make", [small, pytest.param(Broken, marks=pytest.mark.slow)])
def test_two_threads_train_as_one(make):
    """They meet before each step, so that first calls and later ones overlap as far as they can."""
    torch.manual_seed(0)
    models = [make(8), make(12)]
    data = [torch.randn(6, 8), torch.randn(5, 12)]
    start = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
    alone = [trained(model, each) for model, each in zip(models, data, strict=True)]
    for model, state in zip(models, start, strict=True):
        model.load_state_dict(state)
        lowtide.cap(model, "100%", prices="roofline", allow_breaks=make is Broken)
    before, found, meeting = settings(), [None, None], threading.Barrier(2, timeout=300)

    def run(number):
        found[number] = trained(models[number], data[number], meeting.wait)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for left, right in zip(alone, found, strict=True):
        assert right is not None
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
    assert changed_since(before) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_while_another_thread_plans(monkeypatch):
    plans, may_plan = threading.Event(), threading.Event()
    planned = way_down.plan_step
    parent = threading.get_ident()

    def plan(priced):
        if threading.get_ident() != parent:
            plans.set()
            may_plan.wait()
        return planned(priced)

    monkeypatch.setattr(way_down, "plan_step", plan)
    x, model, other = torch.randn(4, 8), small(), small()
    model(x).sum().backward()
    plain = gradients(model)
    model.zero_grad()
    before = settings()
    for each in (model, other):
        lowtide.cap(each, "100%", prices="roofline")
    thread = threading.Thread(target=lambda: other(x).sum().backward())
    thread.start()
    plans.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(600)  # a deadlock ends the child, and is seen
        try:
            as_it_was = not changed_since(before)
            model(x).sum().backward()
            other(x).sum().backward()
            same = all(torch.equal(a, b) for a, b in zip(gradients(model), plain, strict=True))
            os._exit(0 if as_it_was and same else 1)
        finally:
            os._exit(1)  # an error, with which the child would go on as a run of the tests
    may_plan.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert other[0].weight.grad is not None
    assert changed_since(before) == []


def at_event(number, call):
    """Call with an interrupt at one of Lowtide's own calls and returns; how many there were."""
    seen = 0
    home = os.path.dirname(lowtide.__file__)

    def profile(frame, event, _):
        nonlocal seen
        if event in ("call", "return") and frame.f_code.co_filename.startswith(home):
            seen += 1
            if seen == number:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.slow
# an interrupt that falls into a generator which is just given up is passed over by Python itself
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_leave_settings_and_the_next_step_as_they_were():
    """At places spread over planning, capture and the step; not a sample: the same ones each time."""
    x = torch.randn(4, 8)
    model = small()
    model(x).sum().backward()
    plain, before = gradients(model), settings()

    def step():
        model(x).sum().backward()

    lowtide.cap(model, "100%", prices="roofline")
    total = at_event(-1, step)
    for part in range(1, 12):
        lowtide.cap(model, "100%", prices="roofline")  # its plans are gone
        model.zero_grad()
        at_event(total * part // 12, step)
        assert changed_since(before) == [], part
        model.zero_grad()
        step()
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), plain, strict=True))
