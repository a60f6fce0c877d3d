"""A capped training call is planned, refused, or said to run without a cap: never that without a word."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowtide
from lowtide.entry import whole_steps as whole
from lowtide.pipeline.compiled_calls import captured
from lowtide.process_wide import attributes
from small_models import EXECUTORS, WithLoss, gradients, mlp, plain_gradients, same

pytestmark = pytest.mark.slow

CONFIG = torch._dynamo.config


@pytest.fixture
def x():
    return torch.randn(256, 32)


def wide():
    torch.manual_seed(0)
    parts = (part for _ in range(6) for part in (nn.Linear(256, 256), nn.Tanh()))
    return WithLoss(nn.Sequential(*parts, nn.Linear(256, 1)))


def in_ddp(model, **options):
    return DistributedDataParallel(model, bucket_cap_mb=0.3, **options)


KINDS = [{}, {"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}]


@pytest.mark.filterwarnings("ignore:.*find_unused_parameters")
@pytest.mark.parametrize("options", KINDS, ids=lambda options: next(iter(options), "plain"))
@pytest.mark.parametrize("wrapped_first", [False, True])
def test_ddp_with_several_buckets(process_group, options, wrapped_first):
    x = torch.randn(512, 256)
    expected = plain_gradients(wide(), x)
    model = wide()
    if wrapped_first:
        outer = in_ddp(model, **options)
        lowtide.cap(model, "85%")
    else:
        outer = in_ddp(lowtide.cap(model, "85%"), **options)
    for _ in range(2):
        taken = lowtide.measure(lambda: outer(x).backward())
        plan = lowtide.plan_of(model)
        assert same(gradients(model), expected)
        assert plan.extra > 0
        assert taken.peak <= plan.peak <= plan.budget
        outer.zero_grad()
    assert plan.graph.fixed["DDP buckets"] == sum(p.numel() * 4 + 8 for p in model.parameters())


@pytest.mark.inductor
@pytest.mark.usefixtures("idle_kernels")
def test_ddp_with_several_buckets_compiled(process_group):
    x = torch.randn(512, 256)
    outer = in_ddp(lowtide.cap(wide(), "90%", executor="inductor"))
    taken = lowtide.measure(lambda: outer(x).backward())
    plan = lowtide.plan_of(outer.module)
    assert taken.peak <= plan.peak <= plan.budget


def test_wrapping_a_planned_model_in_ddp_plans_anew(process_group):
    x = torch.randn(512, 256)
    model = lowtide.cap(wide(), "90%")
    model(x).backward()
    assert "DDP buckets" not in lowtide.plan_of(model).graph.fixed
    model.zero_grad()
    outer = in_ddp(model)
    taken = lowtide.measure(lambda: outer(x).backward())
    assert "DDP buckets" in lowtide.plan_of(model).graph.fixed
    assert taken.peak <= lowtide.plan_of(model).budget


def test_gradients_that_ddp_does_not_exchange(process_group):
    x = torch.randn(512, 256)
    plain, model = wide(), wide()
    for outer in (in_ddp(plain), in_ddp(lowtide.cap(model, "100%"))):
        with outer.no_sync():
            outer(x).backward()
        outer(x).backward()
    assert same(gradients(model), gradients(plain))


def test_of_ddp_the_module_inside_is_capped(process_group):
    outer = in_ddp(wide())
    assert lowtide.cap(outer, "90%") is outer
    outer(torch.randn(512, 256)).backward()
    plan = lowtide.plan_of(outer)
    assert plan is lowtide.plan_of(outer.module)
    assert plan.peak <= plan.budget < plan.uncapped.peak
    lowtide.uncap(outer)
    with pytest.raises(lowtide.LowtideError, match="not capped"):
        lowtide.plan_of(outer.module)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_backend_refuses_the_buckets_of_ddp(process_group, executor):
    model = WithLoss(nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))))
    outer = DistributedDataParallel(model, bucket_cap_mb=1.2)
    options = {"budget": "90%", "executor": executor}
    step = torch.compile(outer, backend="lowtide", options=options, dynamic=False)
    with pytest.raises(Exception, match=r"buckets of DistributedDataParallel.*optimize_ddp"):
        step(torch.randn(64, 512))


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = mlp(), mlp()

    def forward(self, x):
        y = x + self.first(x)
        if y.sum().item() > 1e30:
            y = y + 1
        return self.second(y).pow(2).mean()


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.usefixtures("idle_kernels")
def test_backend_refuses_pieces_unless_they_are_allowed(x, executor):
    model = Breaks()
    options = {"budget": "2MiB", "executor": executor}
    with pytest.raises(Exception, match=r"breaks its graph at .*test_never_uncapped\.py:\d+.*allow_breaks"):
        torch.compile(model, backend="lowtide", options=options)(x)
    torch._dynamo.reset()
    expected = plain_gradients(model, x)
    torch.compile(model, backend="lowtide", options={**options, "allow_breaks": True})(x).backward()
    if executor == "eager":
        assert same(gradients(model), expected)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.usefixtures("idle_kernels")
def test_a_second_graph_of_one_call_is_refused(monkeypatch, x, executor):
    """Whoever splits a step: here without the settings that keep it whole, and without torch's word."""
    monkeypatch.setattr("lowtide.entry.entries.refuse_part", lambda module: None)
    model = lowtide.cap(Breaks(), "2MiB", executor=executor)
    monkeypatch.setattr(
        "lowtide.entry.capped.captured",
        lambda f, backend, **told: captured(f, backend, **{**told, "fullgraph": False}),
    )
    with pytest.raises(lowtide.GraphBreak, match="a second one for the same call"):
        model(x)
    monkeypatch.undo()
    assert lowtide.plan_of(model) is None


def test_recompiling_in_later_calls_is_not_a_second_graph(x):
    class Scaled(WithLoss):
        scale = 1

        def forward(self, x):
            return super().forward(x) * self.scale

    model = lowtide.cap(Scaled(mlp()), "60%")
    for model.scale in range(1, 4):
        model(x).backward()
        assert lowtide.plan_of(model).extra > 0


@pytest.mark.parametrize("allow_breaks", [False, True])
def test_switched_off_compiler_is_refused(monkeypatch, x, allow_breaks):
    model = lowtide.cap(WithLoss(mlp()), "60%", allow_breaks=allow_breaks)
    for by_setting in (True, False):
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0" if by_setting else "1")
        with attributes(CONFIG, disable=by_setting):
            with pytest.raises(lowtide.CaptureError, match=r"switched off .*lowtide\.uncap"):
                model(x)
            with pytest.raises(lowtide.CaptureError, match="switched off"):
                lowtide.plan(WithLoss(mlp()), x)
            with torch.no_grad():
                model(x)
    monkeypatch.undo()
    model(x).backward()
    assert lowtide.plan_of(model).extra > 0


SETTINGS = {
    "suppress_errors": True,
    "error_on_recompile": True,
    "fail_on_recompile_limit_hit": False,
    "recompile_limit": 1,
    "optimize_ddp": True,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_users_settings_of_torch_do_not_lift_the_cap(name):
    model = lowtide.cap(WithLoss(mlp()), "60%")
    with attributes(CONFIG, **{name: SETTINGS[name]}):
        for size in (256, 300):
            model(torch.randn(size, 32)).backward()
            assert lowtide.plan_of(model).extra > 0
            model.zero_grad()
        assert getattr(CONFIG, name) == SETTINGS[name]


@pytest.mark.parametrize("allow_breaks", [False, True])
def test_refusals_are_not_suppressed(x, allow_breaks):
    with attributes(CONFIG, suppress_errors=True), pytest.raises(lowtide.BudgetTooSmall):
        lowtide.cap(WithLoss(mlp()), "1KiB", allow_breaks=allow_breaks)(x)


@pytest.mark.parametrize("allow_breaks", [False, True])
def test_step_that_is_captured_again_too_often_is_told_and_refused(
    monkeypatch, x, allow_breaks, caplog_lowtide
):
    monkeypatch.setattr("lowtide._torch.settings.RECAPTURES", 2)
    monkeypatch.setattr("lowtide.entry.capped.MANY_CAPTURES", 2)

    class Scaled(WithLoss):
        scale = 1.5

        def forward(self, x):
            return super().forward(x) * self.scale

    model = lowtide.cap(Scaled(mlp()), "60%", allow_breaks=allow_breaks)

    def steps():
        for model.scale in (1.5, 2.5, 3.5, 4.5, 5.5):
            model(x)

    with pytest.raises(lowtide.CaptureError, match="too often"):
        steps()
    assert sum("was captured 2 times" in line for line in caplog_lowtide) == 1


def test_backend_says_that_torch_suppresses_refusals(x, caplog_lowtide):
    with attributes(CONFIG, suppress_errors=True):
        torch.compile(WithLoss(mlp()), backend="lowtide", options={"budget": "1KiB"})(x)
    assert [line for line in caplog_lowtide if "suppress_errors" in line]


@pytest.mark.parametrize("stance", ["eager_then_compile", "aot_eager_then_compile", "eager_on_recompile"])
def test_stances_that_put_a_capture_off_do_not_put_off_the_cap(x, stance):
    model = WithLoss(mlp())
    expected = plain_gradients(model, x)
    lowtide.cap(model, "60%")
    with torch.compiler.set_stance(stance):
        model(x).backward()
        assert torch._dynamo.eval_frame._stance.stance == stance
    assert lowtide.plan_of(model).extra > 0
    assert same(gradients(model), expected)


def test_stance_with_a_backend_of_its_own_does_not_replace_the_cap(x):
    model = lowtide.cap(WithLoss(mlp()), "60%")
    with torch.compiler.set_stance("default", force_backend="eager"):
        model(x).backward()
    assert lowtide.plan_of(model).extra > 0


def test_forced_eager_says_so_once(x, caplog_lowtide):
    model = lowtide.cap(WithLoss(mlp()), "60%")
    with torch.compiler.set_stance("force_eager"):
        model(x).backward()
        model(x).backward()
    assert [line for line in caplog_lowtide if "force_eager" in line and "uncapped" in line] == caplog_lowtide
    assert len(caplog_lowtide) == 1
    model(x).backward()
    assert lowtide.plan_of(model).extra > 0


class Disabled(WithLoss):
    @torch.compiler.disable
    def forward(self, x):
        return super().forward(x)


def test_forward_that_torch_may_not_compile_is_refused_or_said(x, caplog_lowtide):
    with pytest.raises(lowtide.GraphBreak, match=r"torch\.compiler\.disable"):
        lowtide.cap(Disabled(mlp()), "60%")(x)
    lowtide.cap(Disabled(mlp()), "60%", allow_breaks=True)(x).backward()
    assert any("without a cap" in line for line in caplog_lowtide)


def test_inside_a_function_that_torch_may_not_compile(x):
    model = lowtide.cap(WithLoss(mlp()), "60%")
    torch.compiler.disable(lambda: model(x).backward())()
    assert lowtide.plan_of(model).extra > 0


def transformed(transform):
    return lambda model, x: transform(model)(x)


OTHERS = {
    "vmap": transformed(torch.func.vmap),
    "grad": transformed(torch.func.grad),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "jit.trace": lambda model, x: torch.jit.trace(model, x),
    "make_fx": lambda model, x: torch.fx.experimental.proxy_tensor.make_fx(model)(x),
    "export": lambda model, x: torch.export.export(model, (x,)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_other_tracers_and_transforms_are_refused(x, name, caplog_lowtide):
    model = lowtide.cap(WithLoss(mlp()), "60%")
    with pytest.raises((lowtide.CaptureError, RuntimeError, NotImplementedError)) as caught:
        OTHERS[name](model, x)
    assert not isinstance(caught.value, AssertionError)
    assert not caplog_lowtide
    if name in ("vmap", "grad", "jvp"):
        assert "torch.func" in str(caught.value)
    model(x).backward()
    assert lowtide.plan_of(model).extra > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_models_of_torch_jit_are_refused(x):
    """A traced one would take the cap, and lose it."""
    for model in (torch.jit.trace(mlp(), x), torch.jit.script(mlp())):
        with pytest.raises(lowtide.LowtideError, match=r"torch\.jit"):
            lowtide.cap(model, "1MiB")


def test_other_parameters_by_functional_call(x):
    model = WithLoss(mlp())
    expected = plain_gradients(model, x)
    given = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    lowtide.cap(model, "60%")
    torch.func.functional_call(model, given, (x,)).backward()
    assert lowtide.plan_of(model).extra > 0
    assert same([p.grad for p in given.values()], expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_a_capped_model(x, reentrant):
    """It is called twice: once for its output, once more in the backward."""
    model = WithLoss(nn.Sequential(mlp(), nn.BatchNorm1d(1)))
    plain = copy.deepcopy(model)
    lowtide.cap(model, "60%")
    found = []
    for each in (plain, model):
        loss = torch.utils.checkpoint.checkpoint(each, x.clone().requires_grad_(), use_reentrant=reentrant)
        loss.backward()
        found.append([*gradients(each), *each.buffers()])
    assert same(*found)
    assert lowtide.plan_of(model).extra > 0


def test_threads_and_forks():
    """In a process of its own: a fork takes along whatever other tests' threads hold."""
    folder = Path(__file__).parents[1]
    paths = os.pathsep.join([str(folder), str(folder.parent / "src")])
    command = [sys.executable, str(folder / "threads_and_forks.py")]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=True)


def test_what_is_asked_at_every_call_is_little():
    """Some dozens of calls inside, as many as take some microseconds."""
    calls = []
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    try:
        whole.refuse_what_is_not_captured()
        whole.forced_eager()
    finally:
        sys.setprofile(None)
    assert sum(event in ("call", "c_call") for event in calls) < 60
