"""Uses that once went wrong: each shows what must hold, on the smallest model that showed it."""

import functools
import gc
import logging
import os
import re
import sys
import time
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide
from lowtide.capture import untouched
from lowtide.console import log as say
from lowtide.console import progress
from lowtide.pipeline import way_down
from small_models import TwoHeads

pytestmark = pytest.mark.slow


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.randn(64, 64))
        self.one, self.other = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.linear = nn.Linear(8, 8)


class ExpandedGradient(Weights):
    def forward(self, x):
        return self.linear(x).mean() + self.wide.sum()


class SharedGradient(Weights):
    def forward(self, x):
        return (x @ (self.one + self.other)).sum()


class Solve(Weights):
    def forward(self, x):
        return torch.linalg.solve(self.one + 8 * torch.eye(8), x.t()).sum()


class Constants(Weights):
    def forward(self, x):
        for scale in range(3):
            x = torch.relu(self.linear(x)) * torch.tensor([1.0 + scale] * 8)
        return x.sum()


class OtherStrides(Weights):
    """softplus's gradient comes with other strides than tracing foretells."""

    def forward(self, x):
        y = functional.softplus(self.linear(x[:, None].expand(-1, 6, -1)))
        return (y.transpose(1, 2)[..., None] * self.one[:, None, :4]).sum()


@pytest.mark.parametrize("kind", [ExpandedGradient, SharedGradient, Solve, Constants, OtherStrides])
def test_what_autograd_copies_and_torch_wraps_is_in_the_plan(kind):
    for budget in ("100%", "min"):
        found = lowtide.verify(kind(), torch.randn(4, 8), budget=budget)
        assert found.ok, found
        assert found.measured == found.predicted, found


def test_gradient_shared_with_a_parameter_that_has_one_already():
    model = SharedGradient()
    model.one.grad = torch.ones(8, 8)
    lowtide.cap(model, "1MiB")
    model(torch.ones(4, 8)).backward()
    assert torch.equal(model.other.grad, torch.full((8, 8), 4.0))
    assert torch.equal(model.one.grad, torch.full((8, 8), 5.0))


def test_inputs_of_other_layouts_that_need_gradients():
    x, y = torch.randn(8, 4).t().requires_grad_(), torch.randn(4, 8, requires_grad=True)
    linear = nn.Linear(8, 8)
    found = lowtide.verify(lambda a, b: linear(a + b).sum(), x, y, budget="100%")
    assert found.ok, found
    assert found.measured == found.predicted, found


def test_inputs_and_buffers_that_are_parts_count_with_their_whole_storage():
    linear, data = nn.Linear(8, 16), torch.randn(100, 8)
    linear.register_buffer("window", torch.hann_window(16))  # 16 of 17 numbers
    parts = data[:32].detach(), data[32:64].detach()  # no views to autograd
    step = lowtide.cap(lambda x, y: (linear(x) * linear(y) * linear.window).sum(), "1MiB")
    step(*parts).backward()
    linear.zero_grad()
    measured = lowtide.measure(lambda: step(*parts).backward(), device="cpu").peak
    assert lowtide.plan_of(step).peak == measured
    assert measured > data.nbytes


@pytest.mark.parametrize("budget", ["100%", "min"])
def test_dropout_in_half_precision_is_eagers(budget):
    if "ONEDNN_MAX_CPU_ISA" not in os.environ:
        pytest.skip("bf16 products can kill the process unless ONEDNN_MAX_CPU_ISA is set before torch loads")
    layers = (nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.GELU()) for _ in range(8))
    model = nn.Sequential(*layers).bfloat16()
    found = lowtide.verify(model, torch.randn(64, 32).bfloat16(), budget=budget)
    assert found.ok, found
    assert found.measured == found.predicted, found


def test_hooks_added_and_removed_after_the_first_step_are_seen():
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU()), torch.randn(4, 16)
    lowtide.cap(model, "100%")
    plain = model(x)
    for part in (model[1], model):
        handle = part.register_forward_hook(lambda module, args, output: output * 3)
        assert torch.equal(model(x), plain * 3)
        handle.remove()
        assert torch.equal(model(x), plain)
    handle = nn.modules.module.register_module_forward_pre_hook(lambda module, args: (args[0] * 0,))
    assert not torch.equal(model(x), plain)
    handle.remove()
    assert torch.equal(model(x), plain)


def test_uncapped_model_can_be_freed():
    model = nn.Sequential(nn.Linear(8, 8))
    lowtide.cap(model, "100%", optimizer=torch.optim.SGD(model.parameters()))
    model(torch.randn(2, 8)).sum().backward()
    lowtide.uncap(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_verify_of_a_function_finds_its_modules_and_leaves_them_alone():
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    mean = model[1].running_mean.clone()
    found = lowtide.verify(lambda x: model(x).pow(2).mean(), torch.randn(8, 16), budget="min")
    assert found.ok
    assert found.compared["gradients"] == 4
    assert found.compared["buffers"] == 3
    assert model[0].weight.grad is None
    assert torch.equal(model[1].running_mean, mean)


def test_tensor_returned_twice_gets_one_gradient_of_the_made_up_loss():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 256)

        def forward(self, x):
            y = self.linear(x)
            return y, [y]

    found = lowtide.verify(Twice(), torch.randn(64, 8), budget="min")
    assert found.ok
    assert found.measured == found.predicted


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)
        self.norm.running_mean.uniform_()


class ReadsStatisticsBeforeTheyChange(Normed):
    def forward(self, x):
        h = (self.into(x) - self.norm.running_mean).sin().sin().sin()
        return self.out(self.out(self.norm(self.out(h))).tanh()).tanh().square().mean()


class NormsForTheStatisticsAlone(Normed):
    def forward(self, x):
        h = self.into(x).sin()
        self.norm(h)
        return self.out(h).square().mean()


@pytest.mark.parametrize("kind", [ReadsStatisticsBeforeTheyChange, NormsForTheStatisticsAlone])
@pytest.mark.parametrize("budget", ["100%", "min"])
def test_running_statistics_are_read_and_updated_as_in_eager(kind, budget):
    found = lowtide.verify(kind(), torch.randn(256, 16), budget=budget)
    assert found.ok, found
    assert found.measured == found.predicted


class Teacher(nn.Module):
    """As MoCo has it: the step moves the weights of a teacher, which become other tensors."""

    def __init__(self, replaces):
        super().__init__()
        self.replaces = replaces
        self.into, self.out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.teachers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)).requires_grad_(False)

    def forward(self, x):
        goal = x
        with torch.no_grad():
            for layer in self.teachers:
                moved = (layer.weight.data + self.into.weight.data) / 2
                if self.replaces:
                    layer.weight.data = moved
                else:
                    layer.weight.copy_(moved)
                goal = layer(goal).tanh()
        return (self.out(self.into(x).tanh()).tanh() * goal.exp()).square().mean()


@pytest.mark.parametrize("replaces", [True, False])
def test_weights_that_the_step_moves_are_read_as_in_eager_and_put_back_by_verify(replaces):
    model = Teacher(replaces)
    before = [parameter.clone() for parameter in model.parameters()]
    found = lowtide.verify(model, torch.randn(128, 16), budget="min")
    assert found.ok, found
    assert found.plan.extra > 0
    assert not found.unstable
    assert found.compared["parameters"] == 3
    assert all(map(torch.equal, model.parameters(), before))


@torch.library.custom_op("lowtide_tests::jitter", mutates_args=())
def jitter(x: torch.Tensor) -> torch.Tensor:
    """Draws random numbers, and does not say so."""
    return x + torch.randn_like(x)


jitter.register_fake(torch.empty_like)
jitter.register_autograd(lambda ctx, gradient: gradient)


class Jitter(nn.Linear):
    def forward(self, x):
        return jitter(super().forward(x)).tanh()


def test_operators_that_others_registered_draw_the_same_again():
    model = nn.Sequential(*(Jitter(32, 32) for _ in range(6)))
    found = lowtide.verify(model, torch.randn(256, 32), budget="min")
    assert found.ok, found
    runs = [step.op for step in found.plan.schedule.steps if isinstance(step, lowtide.Run)]
    again = {op for op in runs if runs.count(op) > 1}
    assert any("jitter" in found.plan.graph.op[op].target for op in again)


class LossAndLogits(nn.Module):
    """As models of transformers do: their callers differentiate the loss, and drop or keep the logits."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)

    def forward(self, words):
        logits = self.head(torch.tanh(self.embed(words)))
        return functional.cross_entropy(logits.view(-1, 50), words.view(-1)), logits


@pytest.mark.parametrize("frees", [True, False])
def test_an_output_that_is_not_differentiated_takes_no_gradient(frees, monkeypatch):
    """Neither its own, which older torch would hold to the end, nor a copy of the other one's."""
    for module in (untouched, way_down):
        monkeypatch.setattr(module, "frees_tangents", lambda: frees)
    model, words = LossAndLogits(), torch.arange(40).view(4, 10)
    plan = lowtide.plan(model, words)
    of_logits = [v for v in plan.graph.values if v.bytes == 40 * 50 * 4 and v.kind == "activation"]
    assert len(of_logits) == 3  # the log-softmax, and the gradients of that and of the logits
    assert {v.bytes: v.held for v in plan.graph.values if v.kind == "tangent"} == {0: False, 4: True}
    assert "returns 7.82 KiB beside its loss" in plan.notes[0]
    assert lowtide.plan(lambda words: model(words)[0], words).notes == ()
    for budget in ("100%", "min"):
        found = lowtide.verify(model, words, budget=budget)
        assert found.exact
        assert found.measured == found.predicted


@functools.lru_cache
def _once(log, *args):
    log.warning(*args)


def test_a_step_that_writes_to_a_log_is_captured(monkeypatch):
    """Models of transformers do, by a function that the library has added to loggers."""
    monkeypatch.setattr(logging.Logger, "warning_once", _once, raising=False)
    log = logging.getLogger("of a model")

    class Logging(nn.Linear):
        def forward(self, x):
            log.info("a batch of %s", x.shape)
            log.warning_once("no kind of loss was given")
            return super().forward(x).sum()

    found = lowtide.verify(Logging(8, 8), torch.ones(2, 8), budget="100%")
    assert found.exact


def test_changing_python_value_does_not_stop_training():
    class Annealed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(8, 8), 1.0

        def forward(self, x):
            return self.linear(x).mean() * self.scale

    model = Annealed()
    lowtide.cap(model, "1MiB", prices="roofline")
    for step in range(12):
        model.scale = 1.0 + step
        model.zero_grad()
        model(torch.ones(4, 8)).backward()
        assert torch.equal(model.linear.bias.grad, torch.full((8,), model.scale / 8))


def failing(error):
    class Fails(nn.Module):
        def forward(self, x):
            raise error

    return Fails()


class SumsOverNoDim(nn.Module):
    def forward(self, x):
        return x.sum(dim=7)


@pytest.mark.parametrize(
    ("model", "x", "kind", "word"),
    [
        (nn.Linear(16, 16), torch.randn(8, 15), RuntimeError, "cannot be multiplied"),
        (failing(ValueError("my error")), torch.randn(8, 15), ValueError, "my error"),
        (SumsOverNoDim(), torch.randn(8, 15), IndexError, r"but got 7\)$"),
    ],
)
def test_users_own_errors_come_through(model, x, kind, word):
    lowtide.cap(model, "1MiB")
    with pytest.raises(kind, match=word):
        model(x)


def test_missing_argument_says_so():
    model = nn.Linear(4, 4)
    lowtide.cap(model, "1MiB")
    with pytest.raises(TypeError, match="input"):
        model()


def test_sizes_that_depend_on_data_name_the_line():
    linear = nn.Linear(8, 8)
    with pytest.raises(lowtide.GraphBreak, match=r"test_uses\.py:\d+ depends on the data"):
        lowtide.plan(lambda x: (y := linear(x))[y > 0].sum(), torch.randn(4, 8))


def test_sparse_gradients_are_refused():
    model = nn.Embedding(10, 4, sparse=True)
    lowtide.cap(model, "1MiB")
    with pytest.raises(lowtide.CaptureError, match="sparse=False"):
        model(torch.tensor([1, 2]))


def test_plan_of_a_model_in_eval_mode_says_so():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout())
    training, idle = lowtide.plan(model, torch.ones(4, 8)), lowtide.plan(model.eval(), torch.ones(4, 8))
    assert len(idle.graph.ops) < len(training.graph.ops)
    assert [note for note in idle.notes if note not in training.notes] == [
        "the model is in eval mode: dropout and BatchNorm are planned as they run there; model.train() "
        "first, for the step that trains"
    ]


def test_verify_of_a_model_that_computes_otherwise_when_it_is_captured(capfd):
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x) * (1 / 3) if torch.compiler.is_compiling() else layer(x) / 3
            return x.pow(2).sum()

    found = lowtide.verify(Other(), torch.randn(16, 8), budget="min")
    assert not found.equal
    assert found.exact
    assert "a branch of the model for torch.compile" in str(found)
    assert f"differs: {len(found.different) - 10} others" in str(found)
    assert "nothing to do" not in capfd.readouterr().err


@pytest.fixture
def drawn_at_once(monkeypatch):
    """Lines of progress that are drawn, however late their thread gets its turn."""
    clear = progress.Clock.clear

    def clear_what_was_drawn(clock):
        while clock.thread.is_alive() and clock.drawn is None:
            time.sleep(0.001)
        clear(clock)

    monkeypatch.setattr(progress.Clock, "clear", clear_what_was_drawn)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "watched", lambda stream: True)


@pytest.mark.usefixtures("drawn_at_once")
def test_planning_gives_a_sign_of_life_on_a_terminal(capfd):
    model = nn.Linear(4, 4)

    def signs(call):
        call()
        return re.search(r"lowtide: capturing this step \.\.\. \d+ s", capfd.readouterr().err)

    assert signs(lambda: lowtide.plan(model, torch.ones(2, 4)))
    lowtide.cap(model, "1MiB")
    assert signs(lambda: model(torch.ones(2, 4)))
    assert not signs(lambda: model(torch.ones(2, 4)))
    with say.silence():
        assert not signs(lambda: model(torch.ones(3, 4)))


@pytest.mark.usefixtures("drawn_at_once")
def test_only_one_line_is_drawn_at_a_time(capfd):
    with progress.waiting("outer", stream=sys.stderr), progress.waiting("inner", stream=sys.stderr):
        lowtide.plan(nn.Linear(4, 4), torch.ones(2, 4))
    said = capfd.readouterr().err
    assert "outer" in said
    assert "inner" not in said
    assert "capturing" not in said


def test_the_number_that_a_loss_outside_of_the_model_is_counts():
    model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.GELU())))
    found = lowtide.verify(model, torch.randn(256, 64), budget="min", loss=torch.mean)
    assert found.ok, found


@pytest.mark.parametrize("budget", ["100%", "min"])
def test_losses_in_turn_on_two_heads_accumulate(budget):
    """The gradients of one head do not come while those of the last steps are there."""

    def accumulated(budget):
        torch.manual_seed(0)
        model = TwoHeads()
        if budget is not None:
            lowtide.cap(model, budget)
        for turn in range(4):
            model(torch.ones(5, 8))[turn % 2].sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    assert all(map(torch.equal, accumulated(budget), accumulated(None)))


def test_a_capped_model_and_its_optimizer_are_let_go():
    """What torch keeps of a capture holds neither."""

    def trained():
        model = TwoHeads()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        lowtide.cap(model, "100%", optimizer=optimizer)
        model(torch.ones(5, 8))[0].sum().backward()
        return weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.body.weight)

    held = trained()
    gc.collect()
    assert [ref() for ref in held] == [None, None, None]


def test_what_plans_of_several_shapes_note_is_said_once(caplog_lowtide):
    capped = lowtide.cap(nn.Linear(4, 4), "100%").__lowtide__
    for number in ("1.50 MiB, +4.5%", "820 KiB, -12%"):
        capped.say(f"just below a cliff: {number} more", whatever_numbers=True)
        capped.say(f"of its own: {number}")
    first, own = "just below a cliff", "of its own"
    assert [line.split(":")[0] for line in caplog_lowtide] == [first, own, own]


@pytest.mark.usefixtures("drawn_at_once")
def test_a_terminal_is_told_what_is_under_way_and_the_line_goes(monkeypatch):
    labels = []
    monkeypatch.setattr(say, "waiting", lambda label, **_: nullcontext(labels.append(label) or labels.append))
    lowtide.cap(model := nn.Linear(4, 4), "1MiB")
    model(torch.ones(2, 4))
    doing = [label.removeprefix("lowtide: ") for label in labels]
    assert doing[:3] == ["capturing this step", "pricing this step", "planning this step"]
    assert doing[3:] == ["running this step for the first time"]
    model(torch.ones(2, 4))
    say.under_way("nothing, after it")
    assert len(labels) == 4


def test_without_a_terminal_no_line_is_drawn(capfd, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    lowtide.cap(model := nn.Linear(4, 4), "1MiB")
    model(torch.ones(2, 4))
    assert "\r" not in capfd.readouterr().err
