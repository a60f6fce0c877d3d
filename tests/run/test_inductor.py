"""The Inductor executor: fused kernels under a byte cap, on the CPU."""

import copy
import itertools
from contextlib import suppress
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import lowtide
from lowtide._torch import private
from lowtide.capture import untouched
from lowtide.capture.realize import in_memory
from lowtide.errors import BudgetTooSmall, NothingToTrain, UnsupportedBackward
from lowtide.options import Options
from lowtide.pipeline import way_down
from lowtide.run.inductor.images import hand_over_channels_last
from lowtide.stages import Asked, Runner

pytestmark = pytest.mark.inductor  # which is imported by the tests: that takes seconds, of each worker

HUGE = 8 * 2**30


class Blocks(nn.Module):
    """LayerNorm, GELU, dropout and residual sums, with the loss inside."""

    def __init__(self, layers=2, width=32, p=0.1):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.drop = nn.Dropout(p)

    def forward(self, x):
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + self.drop(down(nn.functional.gelu(up(norm(x)))))
        return x.square().mean()


class Convolutions(nn.Module):
    """Convolutions with BatchNorm, max-pooling and a classifier's loss."""

    def __init__(self):
        super().__init__()
        parts = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
        parts += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
        self.net = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))

    def forward(self, x, target):
        return nn.functional.cross_entropy(self.net(x), target)


class Residual(nn.Module):
    """The end of a ResNet: a sum after the last convolution, its mean, a classifier."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(16), nn.Linear(16, 4)

    def forward(self, x):
        x = self.first(x).relu()
        return self.head((self.norm(self.last(x)) + x).relu().mean((2, 3)))


class Dense(nn.Module):
    """Layers that each read the features of all before, up to six in one concatenation."""

    def __init__(self, layers=6, width=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width * layer, width) for layer in range(1, layers))

    def forward(self, x):
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1).sin()))
        return torch.cat(features, 1).square().mean()


def step(model, batch, seed=1):
    """Gradients, buffers and the random state after a step."""
    model.zero_grad()
    torch.manual_seed(seed)
    model(*batch).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    return {**found, "random state": torch.get_rng_state()}


def capped(model, batch, budget, **options):
    """A fresh copy under a cap, what its second step gives, its plan and its measured peak."""
    model = copy.deepcopy(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    lowtide.cap(model, budget, executor="inductor", **options)
    step(model, batch)
    model.zero_grad()
    peak = lowtide.measure(lambda: model(*batch).backward(), device="cpu").peak
    for name, buffer in model.named_buffers():
        buffer.data.copy_(before[name])
    return model, step(model, batch), peak


MODELS = {
    "blocks": lambda: (Blocks(), (torch.rand(256, 32),)),
    "convolutions": lambda: (Convolutions(), (torch.rand(4, 3, 32, 32), torch.tensor([0, 1, 2, 3]))),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_cap_holds_and_changes_nothing_but_rounding(name):
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    whole, right, most = capped(model, batch, HUGE)
    assert lowtide.plan_of(whole).peak == most
    budget, peak = "min", 0
    for _ in range(2):
        small, found, peak = capped(model, batch, budget)
        assert lowtide.plan_of(small).peak == peak < most
        assert budget == "min" or peak <= budget
        assert found.keys() == right.keys()
        for key, value in right.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6)
        budget = (peak + most) // 2


def test_features_that_many_layers_read_get_the_sum_of_their_gradients():
    model, x = Dense(), torch.rand(64, 8)
    wanted = list(model.parameters())
    expected = torch.autograd.grad(model(x), wanted)
    lowtide.cap(model, HUGE, executor="inductor")
    for mine, plain in zip(torch.autograd.grad(model(x), wanted), expected, strict=True):
        torch.testing.assert_close(mine, plain)


def test_recomputed_dropout_has_the_mask_of_the_forward():
    torch.manual_seed(0)
    weight = torch.ones(64, 64, requires_grad=True)

    def step(x):
        """Each output is the mask itself, so that the gradient shows which mask the backward saw."""
        for _ in range(3):
            x = nn.functional.dropout(x * weight, 0.5)
        return x.sum()

    small = lowtide.cap(step, "min", executor="inductor")
    x = torch.ones(64, 64, requires_grad=True)
    loss = small(x)
    loss.backward()
    kept = x.grad > 0  # 8 where all three masks let through, which is what the sum counts
    assert loss.item() == 8 * kept.sum().item()
    assert set(x.grad.unique().tolist()) == {0.0, 8.0}


def test_batch_norm_statistics_are_updated_once():
    model, batch = MODELS["convolutions"]()
    plain = copy.deepcopy(model)
    lowtide.cap(model, "min", executor="inductor")
    for one in (plain, model):
        one(*batch).backward()
    for (name, right), (_, found) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
        torch.testing.assert_close(found, right, msg=name)


@pytest.mark.usefixtures("idle_kernels")
def test_what_chooses_runs_once_in_the_plan():
    net = nn.Linear(16, 16)

    def route(x):
        scores = net(x).softmax(-1)
        weight, place = scores.topk(2, dim=-1)
        return (weight * x.gather(1, place)).sum()

    x = torch.rand(32, 16)
    small = lowtide.cap(route, "min", executor="inductor")
    small(x).backward()
    plan = lowtide.plan_of(small)
    assert [op for op in plan.graph.ops if "topk" in op.target and op.kind == "pinned"]


@pytest.mark.usefixtures("idle_kernels")
def test_each_shape_has_a_plan_of_its_own():
    model = Blocks(layers=1)
    lowtide.cap(model, "90%", executor="inductor")
    peaks = []
    for rows in (128, 256):
        model(torch.rand(rows, 32)).backward()
        model.zero_grad()
        peaks.append(lowtide.plan_of(model).peak)
    assert peaks[0] < peaks[1]


def test_a_budget_below_the_smallest_peak_is_refused_and_nothing_is_lost():
    model, batch = Blocks(layers=1), (torch.rand(256, 32),)
    before = copy.deepcopy(model.state_dict())
    lowtide.cap(model, "64KiB", executor="inductor")
    with pytest.raises(BudgetTooSmall, match="smallest feasible peak"):
        model(*batch)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())


@pytest.fixture
def over(monkeypatch):
    """Lets the texts of compiled steps need more bytes, a number for each, and counts what is loaded."""
    from torch._inductor.codecache import PyCodeCache

    from lowtide.run.inductor import attempt as inductor

    more, loaded = [], []
    peak, load = inductor.step_peak, PyCodeCache.load_by_key_path
    monkeypatch.setattr(inductor, "step_peak", lambda *args, **facts: peak(*args, **facts) + next(more[0]))
    monkeypatch.setattr(
        PyCodeCache, "load_by_key_path", lambda *args, **facts: loaded.append(1) or load(*args, **facts)
    )
    return more, loaded


def rounds(monkeypatch, more):
    """What is asked for, round by round: no plan has less than 400, and a compiled step needs more."""
    from lowtide.run.inductor import step as inductor

    asked = []

    class Attempt:
        stopped, result, key = True, None, ""

        def __init__(self, wanted, *_):
            self.wanted = self.asked = wanted
            self.stage = mock.Mock(runner=lambda run, plan: Runner(run, plan, None))
            self.first_step = mock.Mock()

        def compile(self, *_):
            asked.append(1000 - self.wanted.headroom)
            if asked[-1] < 400:
                raise BudgetTooSmall("", budget=1000, smallest=400)
            peaks = {"peak": asked[-1] + more(asked[-1]), "timeline": SimpleNamespace(peak=asked[-1])}
            self.result = SimpleNamespace(budget=1000, graph=SimpleNamespace(device="cpu"), **peaks)

    monkeypatch.setattr(inductor, "Attempt", Attempt)
    monkeypatch.setattr(inductor, "too_small", lambda *_: BudgetTooSmall("", budget=1000, smallest=0))
    with suppress(BudgetTooSmall):
        inductor.compiled_runner(Asked(Options.make(1000)), None, (), None)
    return asked


def test_a_step_far_over_its_budget_does_not_get_the_smallest_plan_at_once(monkeypatch):
    assert rounds(monkeypatch, lambda size: 800 if size > 900 else 100) == [1000, 0, 700]
    assert rounds(monkeypatch, lambda size: 800 if size > 500 else 100) == [1000, 0, 700, 75, 400]
    assert rounds(monkeypatch, lambda _: 800)[-1] == 400


@pytest.mark.usefixtures("idle_kernels")
def test_a_step_over_its_budget_is_planned_again_before_anything_is_compiled(
    over, caplog_lowtide, monkeypatch
):
    from lowtide.run.inductor import attempt as inductor

    (more, loaded), told = over, []
    monkeypatch.setattr(inductor, "under_way", told.append)
    model, (x,) = Blocks(layers=1), (torch.rand(256, 32),)
    uncapped = lowtide.plan(model, x, executor="inductor")
    budget = uncapped.peak + 2**16
    more.append(itertools.chain([2**17], itertools.repeat(0)))
    lowtide.cap(model, budget, executor="inductor")
    model(x).backward()
    assert [message for message in caplog_lowtide if "more than its budget: planning again" in message]
    assert lowtide.plan_of(model).peak <= budget - 2**16
    assert len(loaded) == 2, "both graphs of the second attempt, and none of the first"
    halves = ("forward", "backward")
    drafts = [f"looking for the buffers of the {half}, round" for half in halves]
    compiled = [f"compiling the {half}, round 2" for half in halves]
    assert told == [f"{draft} {number}" for number in (1, 2) for draft in drafts] + compiled


@pytest.mark.usefixtures("idle_kernels")
def test_a_budget_that_no_compiled_step_meets_is_refused_with_the_smallest(over):
    more, loaded = over
    model, (x,) = Blocks(layers=1), (torch.rand(256, 32),)
    more.append(itertools.repeat(2**30))
    lowtide.cap(model, "90%", executor="inductor")
    with pytest.raises(BudgetTooSmall) as refused:
        model(x)
    assert refused.value.smallest > 2**30
    assert not loaded, "drafts were enough"
    assert all(p.grad is None for p in model.parameters())
    lowtide.uncap(model)
    model(x).backward()


@pytest.fixture
def peaks(monkeypatch):
    """The peaks that were read from texts: of drafts and of what is compiled."""
    from lowtide.run.inductor import attempt

    found, peak = [], attempt.step_peak
    monkeypatch.setattr(
        attempt, "step_peak", lambda *args, **facts: found.append(peak(*args, **facts)) or found[-1]
    )
    return found


DRAFTED = {
    "blocks": (0.8, lambda: (Blocks(layers=2), (torch.rand(64, 32),))),
    "convolutions": (0.8, lambda: (Convolutions(), (torch.rand(8, 3, 16, 16), torch.arange(8) % 4))),
    "attention": (1.3, lambda: (Attention(), (torch.rand(4, 24, 32),))),
}


class Attention(nn.Module):
    """Softmax, broadcasts and reductions over two dimensions: what outer loops are fused of."""

    def __init__(self):
        super().__init__()
        self.norm, self.parts, self.back = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        query, key, value = self.parts(self.norm(x)).chunk(3, -1)
        scores = (query @ key.mT).softmax(-1)
        return (x + self.back(scores @ value)).square().mean()


@pytest.mark.usefixtures("idle_kernels")
@pytest.mark.parametrize("name", DRAFTED)
def test_a_draft_has_the_peak_of_what_is_compiled(name, peaks):
    share, make = DRAFTED[name]
    model, args = make()
    lowtide.cap(model, int(share * lowtide.plan(model, *args, executor="inductor").peak), executor="inductor")
    model(*args)
    drafted, compiled = peaks[-2:]
    assert drafted == compiled
    assert lowtide.plan_of(model).peak == compiled


@pytest.mark.usefixtures("idle_kernels")
def test_a_plan_far_below_its_budget_is_not_drafted(peaks, over):
    _, loaded = over
    over[0].append(itertools.repeat(0))
    model, x = Blocks(layers=1), torch.rand(64, 32)
    lowtide.cap(model, HUGE, executor="inductor")
    model(x)
    assert len(loaded) == 2
    assert len(peaks) <= 1


@pytest.mark.usefixtures("idle_kernels")
def test_where_there_is_no_draft_it_is_compiled_as_before(monkeypatch, peaks):
    from lowtide._torch import drafts

    def broken(*_):
        raise RuntimeError("another version of Inductor")

    monkeypatch.setattr(drafts, "_declare", broken)
    model, x = Blocks(layers=1), torch.rand(64, 32)
    lowtide.cap(model, "90%", executor="inductor")
    model(x).backward()
    assert lowtide.plan_of(model).peak == peaks[-1]


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(NothingToTrain):
        lowtide.cap(lambda x: x.exp().sum(), "1MiB", executor="inductor")(torch.rand(4))


@pytest.mark.usefixtures("idle_kernels")
def test_a_gradient_that_was_not_planned_for_is_refused():
    net = nn.Linear(8, 8)
    small = lowtide.cap(lambda x: (net(x).sum(), net(x)), "1MiB", executor="inductor")
    loss, logits = small(torch.rand(4, 8))
    with pytest.raises(UnsupportedBackward, match="differentiate"):
        (loss + logits.sum()).backward()


@pytest.mark.usefixtures("idle_kernels")
def test_gradients_that_are_there_already_count():
    model, batch = Blocks(layers=1), (torch.rand(256, 32),)
    lowtide.cap(model, HUGE, executor="inductor")
    model(*batch).backward()
    once = lowtide.plan_of(model).peak
    peak = lowtide.measure(lambda: model(*batch).backward(), device="cpu").peak
    assert lowtide.plan_of(model).peak == peak > once


@pytest.mark.usefixtures("idle_kernels")
def test_the_backend_takes_the_executor_too():
    model, batch = Blocks(layers=1), (torch.rand(256, 32),)
    options = {"budget": HUGE, "executor": "inductor"}
    loss = torch.compile(model, backend="lowtide", options=options)(*batch)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_verify_compares_with_the_same_executor():
    found = lowtide.verify(Blocks(layers=1), torch.rand(64, 32), budget=HUGE, executor="inductor")
    assert found
    assert "same executor" in str(found)


def test_a_plan_that_nothing_is_compiled_for_keeps_to_its_budget_or_is_refused():
    model, batch = MODELS["blocks"]()
    smallest = lowtide.plan(model, *batch, executor="inductor", budget="min").peak
    assert lowtide.plan(model, *batch, executor="inductor", budget=smallest).peak == smallest
    with pytest.raises(BudgetTooSmall) as error:
        lowtide.plan(model, *batch, executor="inductor", budget=smallest - 1)
    assert error.value.smallest == smallest


def test_a_plan_without_running_says_what_fuses():
    model, batch = MODELS["blocks"]()
    fused, single = (lowtide.plan(model, *batch, executor=name) for name in ("inductor", "eager"))
    wide = 256 * 128 * 4

    def written(plan, target):
        ops = [op for op in plan.graph.ops if target in op.target and op.phase == "backward"]
        return [op for op in ops if plan.graph.value[op.writes[0]].bytes == wide]

    assert len(written(single, "gelu_backward")) == 2
    assert all(op.takes for op in written(fused, "mul"))  # one loop each, in the place of what it reads
    assert len(written(fused, "mul")) == 2


def test_a_tangent_that_the_engine_holds_is_not_written_over(monkeypatch):
    """Before torch 2.13 autograd holds the incoming gradients of a node while it runs."""
    for module in (untouched, way_down):
        monkeypatch.setattr(module, "frees_tangents", lambda: False)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU())
    found = lowtide.plan(model, torch.rand(512, 32), executor="inductor")
    tangents = {value.name for value in found.graph.values if value.kind == "tangent"}
    assert tangents
    assert any(tangents & {*op.reads} and op.phase == "backward" for op in found.graph.ops)
    assert not any(tangents & {*op.takes} for op in found.graph.ops)


@pytest.mark.usefixtures("idle_kernels")
def test_seeds_are_drawn_before_the_loops_around_them(monkeypatch):
    """What stands before the first dropout is computed in one kernel with what stands after it."""
    texts = []
    monkeypatch.setattr("torch._inductor.graph.GraphLowering.save_output_code", texts.append)
    norm, last = nn.LayerNorm(256), nn.Linear(256, 256)
    places = torch.rand(512, 256, requires_grad=True)

    def step(x):
        return last(nn.functional.dropout(norm(x + places))).sum()

    lowtide.cap(step, HUGE, executor="inductor")(torch.rand(512, 256)).backward()
    calls = [line.split("(")[0].strip() for line in texts[0].splitlines()]
    kinds = ("cpp_fused", "extern_kernels.", "aten.randint")
    launched = [call for call in calls if call.startswith(kinds) and "=" not in call]
    assert [call.partition("_")[0] for call in launched[:3]] == ["aten.randint.low", "cpp", "extern"]


def images(monkeypatch, turns=True):
    """What a compiled forward hands over after its last convolution, with the operator that writes it."""
    handed = []

    def look(forward, outputs):
        hand_over_channels_last(forward, outputs)
        (output,) = forward.graph.find_nodes(op="output")
        handed.extend(str(node.target) for node in output.args[0] if "in_memory" in str(node.target))

    decide = "torch._inductor.graph.GraphLowering.decide_layout_opt"
    monkeypatch.setattr(decide, lambda *_, **__: turns)
    private.cache_clear()
    monkeypatch.setattr(way_down, "hand_over_channels_last", look)
    model, x = Residual(), torch.rand(4, 3, 16, 16)
    wanted = list(model.parameters())
    expected = torch.autograd.grad(model(x).square().sum(), wanted)
    lowtide.cap(model, HUGE, executor="inductor")
    for mine, plain in zip(torch.autograd.grad(model(x).square().sum(), wanted), expected, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-4)
    private.cache_clear()
    return handed


def test_images_are_handed_over_with_their_channels_last_where_inductor_turns_layouts(monkeypatch):
    assert set(images(monkeypatch)) == {"lowtide.image_in_memory.default"}


def test_images_stay_as_they_are_where_it_does_not(monkeypatch):
    assert "lowtide.image_in_memory.default" not in images(monkeypatch, turns=False)


class Highest(nn.Module):
    """BatchNorm and SiLU before a maximum: expressions of five values, with an exponential, read twice."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x):
        return nn.functional.silu(self.norm(self.convolution(x))).amax((2, 3)).mean()


@pytest.mark.usefixtures("idle_kernels")
def test_what_is_read_twice_inside_of_a_loop_is_not_written_down():
    model = Highest()
    lowtide.cap(model, HUGE, executor="inductor")(torch.rand(3, 3, 37, 37))
    plan = lowtide.plan_of(model)
    assert plan.timeline.peak <= plan.peak < 1.01 * plan.timeline.peak


def test_rows_that_are_written_down_may_be_padded():
    """As Inductor pads those of other values: only what has the same rows can be written in its place."""

    def step(x, w):
        kept = operator(x.sin())
        return kept @ w, kept.sum(0)

    operator = in_memory()
    with FakeTensorMode(), private("inductor_config").patch(disable_padding_cpu=False, fx_graph_cache=False):
        inputs = torch.empty(64, 1025), torch.empty(1025, 8)
        module = make_fx(step)(*inputs)
        text = private("compile_fx_inner")(module, inputs).source_code
    assert "empty_strided_cpu((64, 1025), (1056, 1), torch.float32)" in text
