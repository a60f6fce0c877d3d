"""Kernels return other strides than tracing foretells: the plan has the real ones."""

import logging
from functools import partial
from unittest import mock

import pytest
import torch
from torch import fx, nn

import lowtide
from lowtide.capture import known_kernels
from lowtide.capture.kernel_outputs import Output, outputs_of, same
from lowtide.capture.known_kernels import KnownKernels
from lowtide.capture.rewrites.real_strides import settle
from lowtide.capture.rewrites.stride_rules import _RULES, by_rule
from lowtide.prices import measured as cost
from lowtide.prices.measured import Kernels
from lowtide.prices.price_cache import PriceList
from lowtide.units import format_bytes
from one_capture import one_capture
from small_models import EXECUTORS
from traces import lifted

pytestmark = pytest.mark.slow

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def nothing_learnt(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))
    monkeypatch.setattr(known_kernels, "_LEARNT", {})


@pytest.fixture
def no_rules(monkeypatch):
    monkeypatch.setattr(known_kernels, "by_rule", lambda node: None)


class Transposed(nn.Module):
    """PatchTST's: BatchNorm1d over a transposed (batch, time, channels) tensor, then a Linear."""

    def __init__(self, norm=nn.BatchNorm1d, layers=3, width=16):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(norm(width) for _ in range(layers))

    def forward(self, x):
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = linear(norm(x.transpose(1, 2)).transpose(1, 2)).relu()
        return x.square().mean()


class Flattened(nn.Module):
    """A reshape that tracing takes for a copy, and eager does as a view."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16 * 12, 4)

    def forward(self, x):
        return self.last(self.norm(self.first(x).transpose(1, 2)).flatten(1)).square().mean()


def copies_of(graph):
    return [op for op in graph.ops if op.target == "aten.clone.default"]


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def batch():
    torch.manual_seed(0)
    return torch.randn(8, 12, 16)


@pytest.mark.parametrize("prices", ["measured", "roofline"])
@pytest.mark.parametrize("make", [Transposed, Flattened])
def test_peak_of_batch_norm_over_a_transposed_input(make, prices):
    model = make()
    with one_capture():
        for budget in ("100%", "70%", "min"):
            try:
                found = lowtide.verify(model, batch(), budget=budget, prices=prices)
            except lowtide.BudgetTooSmall:
                assert budget == "70%"
                continue
            assert found.ok, found
            assert found.measured == found.predicted


def test_plan_without_running_knows_batch_norm():
    """By rule: nothing runs, and the peak is that of the measured plan."""
    model, x = Transposed(), batch()
    assert lowtide.plan(model, x).peak == lowtide.plan(model, x, prices="measured").peak


def test_copy_is_a_value_that_the_plan_can_drop():
    graph = lowtide.plan(Transposed(), batch(), prices="measured").graph
    copies = [op for op in copies_of(graph) if op.phase == "forward"]
    assert len(copies) == 3
    assert all(graph.value[op.writes[0]].bytes == 8 * 12 * 16 * 4 for op in copies)
    assert all(op.module.startswith("linears.") for op in copies)


def test_copy_that_eager_does_not_make_is_a_view():
    graph = lowtide.plan(Flattened(), batch(), prices="measured").graph
    assert [op.phase for op in copies_of(graph)] == ["backward"]  # of a gradient, as in eager


def test_a_step_that_nobody_measured_is_planned_again(no_rules):
    model, plain, x = Transposed(), Transposed(), batch()
    plain.load_state_dict(model.state_dict())
    lowtide.cap(model, "min", prices="roofline")
    planned, taken = [], []
    with mock.patch.object(logging.getLogger("lowtide"), "warning") as said:
        for _ in range(3):
            model.zero_grad()
            taken.append(lowtide.measure(lambda: model(x).backward(), device="cpu").peak)
            planned.append(lowtide.plan_of(model).peak)
            plain.zero_grad()
            plain(x).backward()
            assert all(map(torch.equal, gradients(model), gradients(plain)))
    ((message,), _) = said.call_args_list[0]
    assert said.call_count == 1
    assert "batch_norm in norms.0 at test_real_strides.py" in message
    assert f"took {format_bytes(taken[0] - planned[0])} more" in message
    assert "planned again" in message
    assert taken[0] > planned[0]
    assert taken[1:] == planned[1:]
    assert planned[1] == planned[2]


def test_second_plan_that_does_not_fit_is_refused(no_rules):
    """The first step cannot know; the next one does not run above the budget."""
    model, x = Transposed(), batch()
    guessed = lowtide.plan(model, x, budget="min", prices="roofline").peak
    lowtide.cap(model, guessed, prices="roofline")
    model(x).backward()
    with pytest.raises(lowtide.BudgetTooSmall):
        model(x)


def test_plan_that_was_given_is_followed_as_it_is(no_rules):
    model, x = Transposed(), batch()
    given = lowtide.plan(model, x, budget="min", prices="roofline")
    lowtide.cap(model, plan=given, prices="roofline")
    with mock.patch.object(logging.getLogger("lowtide"), "warning") as said:
        for _ in range(3):
            model.zero_grad()
            model(x).backward()
    ((message,), _) = said.call_args_list[-1]
    assert 'Plan with prices="measured"' in message
    assert lowtide.plan_of(model).schedule == given.schedule


def test_plan_made_without_measuring_may_be_of_another_step(no_rules):
    model, x = Transposed(), batch()
    lowtide.cap(model, plan=lowtide.plan(model, x, budget="min"))
    with pytest.raises(lowtide.PlanMismatch, match='prices="measured"'):
        model(x)
    lowtide.uncap(model)
    lowtide.cap(model, plan=lowtide.plan(model, x, budget="min", prices="measured"))
    model(x).backward()


def test_plan_for_an_absent_gpu_knows_nothing_of_the_kernels_here():
    graph = lowtide.plan(Transposed(), batch(), device="H200").graph
    assert not [op for op in copies_of(graph) if op.phase == "forward"]


def test_op_that_would_not_run_alone_is_learnt_for_the_next_process(no_rules, monkeypatch):
    tried = cost._try_op

    def refuse(node, *args, **kwargs):
        name = getattr(node.target, "__name__", "")
        return cost.Price(None, 0, None) if name == "batch_norm" else tried(node, *args, **kwargs)

    monkeypatch.setattr(cost, "_try_op", refuse)
    model, x = Transposed(), batch()
    lowtide.cap(model, "min")
    model(x).backward()
    first = lowtide.plan_of(model)
    model.zero_grad()
    model(x).backward()
    second = lowtide.plan_of(model)
    assert len(copies_of(first.graph)) < len(copies_of(second.graph))
    monkeypatch.setattr(known_kernels, "_LEARNT", {})
    assert lowtide.plan(Transposed(), x, budget="min", prices="measured").graph == second.graph


def test_first_run_costs_nothing_later():
    model, x = lowtide.cap(Transposed(), "free"), batch()
    with mock.patch("lowtide.run.first_run._Looks.__call__", autospec=True) as looked:
        model(x).backward()
        assert looked.call_count > 20
        looked.reset_mock()
        model(x).backward()
        assert not looked.called


def test_backend_plans_again_as_well(no_rules):
    model, x = Transposed(), batch()
    options = {"budget": "1GiB", "prices": "roofline", "method": "keep_all"}
    step = torch.compile(model, backend="lowtide", options=options)
    step(x).backward()
    model.zero_grad()
    assert not known_kernels._LEARNT
    step(x).backward()
    assert known_kernels._LEARNT
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


@pytest.mark.inductor
def test_compiled_step_of_the_same_model():
    found = lowtide.verify(Transposed(), batch(), budget="min", executor="inductor")
    assert found.ok, found
    assert found.measured == found.predicted


# What an op returns, and what was foretold of it.


def call(target, *args, **kwargs):
    """A graph that calls an operator on real tensors, which are shown to it as fake ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    graph, mode, real = fx.Graph(), FakeTensorMode(), {}

    def place(item):
        if not isinstance(item, torch.Tensor):
            return item
        node = graph.placeholder(f"x{len(real)}")
        node.meta["val"] = mode.from_tensor(item)
        real[node] = item
        return node

    args, kwargs = torch.utils._pytree.tree_map(place, (args, kwargs))
    node = graph.call_function(target, args, kwargs)
    fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    with mode:
        node.meta["val"] = target(*fake_args, **fake_kwargs)
    return (
        graph,
        node,
        list(real.values()),
        target(*fx.map_arg(args, real.get), **fx.map_arg(kwargs, real.get)),
    )


def transposed(*shape):
    return (
        torch.rand(shape[0], *shape[:0:-1]).transpose(1, -1)
        if len(shape) > 2
        else torch.rand(shape[::-1]).t()
    )


def layouts(*shape):
    yield torch.rand(shape)
    yield transposed(*shape)
    if len(shape) == 4:
        yield torch.rand(shape).contiguous(memory_format=torch.channels_last)
    yield torch.rand(*shape[:-1], 2 * shape[-1])[..., : shape[-1]]
    yield torch.rand(1, *shape[1:]).expand(shape)


def inputs_of(target):
    name = str(target)
    if "batch_norm_backward" in name:
        for shape in ((4, 3), (4, 3, 5), (4, 3, 5, 6)):
            for x in layouts(*shape):
                for grad in layouts(*shape):
                    for mask in ([True, True, True], [False, True, True]):
                        yield (
                            grad,
                            x,
                            torch.ones(3),
                            None,
                            None,
                            torch.zeros(3),
                            torch.ones(3),
                            True,
                            1e-5,
                            mask,
                        )
    elif "batch_norm" in name:
        for shape in ((4, 3), (4, 3, 5), (4, 3, 5, 6), (4, 3, 2, 5, 6)):
            for x in layouts(*shape):
                weight = [torch.ones(3), torch.zeros(3)]
                running = [torch.zeros(3), torch.ones(3)]
                if "no_stats" in name:
                    yield (x, *weight, True, 0.1, 1e-5)
                elif "no_training" in name or target.__class__ is type(lambda: 0):
                    yield (x, *weight, *running, 0.1, 1e-5)
                else:
                    for train in (True, False):
                        yield (x, *weight, *running, train, 0.1, 1e-5)
    elif "log_sigmoid" in name:
        yield from ((x,) for x in layouts(4, 5))
    elif "backward" in name:
        for x in layouts(4, 5):
            for reduction in (0, 1):
                grad = torch.rand(4, 5) if reduction == 0 else torch.rand(())
                last = () if "mse" in name else (1.0,)
                yield (grad, x, torch.rand(4, 5), reduction, *last)
    else:
        for x in layouts(4, 5):
            for reduction in (0, 1, 2):
                last = {"smooth": (reduction, 1.0), "binary": (None, reduction)}
                rest = next((value for key, value in last.items() if key in name), (reduction,))
                yield (x, torch.rand(4, 5), *rest)


@pytest.mark.parametrize("target", _RULES, ids=lambda target: getattr(target, "__name__", str(target)))
def test_rule_is_what_the_kernel_does(target):
    for args in inputs_of(target):
        _, node, reads, result = call(target, *args)
        real = outputs_of(result, reads)
        value = node.meta["val"]
        items = value if isinstance(value, tuple) else [value]
        for rule, output, item in zip(by_rule(node) or real, real, items, strict=True):
            assert same(output, rule, item.shape), (args[0].shape, args[0].stride(), rule, output)


def test_output_that_is_an_input_costs_nothing():
    x = torch.zeros(5)
    (found,) = outputs_of(x.copy_(torch.ones(5)), [x])
    assert found == Output(20, (1,), 0, 0)
    assert found.new == 0


def test_outputs_that_share_a_storage_count_once():
    whole = torch.zeros(4, 2)
    left, right = outputs_of(whole.unbind(1), [])
    assert (left.new, right.new, right.shares) == (32, 0, -1)


def test_strides_of_single_elements_mean_nothing():
    assert same(Output(8, (2, 7)), Output(8, (2, 1)), (1, 1))
    assert not same(Output(8, (2, 1)), Output(8, (1, 2)), (2, 2))
    assert not same(Output(8, (1,)), Output(8, (1,), 0, 0), (2,))


def test_settling_gives_an_alias_its_source():
    graph, node, _, _ = call(aten.relu.default, torch.rand(3))
    graph.output(node)
    settle(graph, lambda n: (Output(12, (1,), 0, 0),) if n is node else None)
    (x,) = graph.find_nodes(op="placeholder")
    assert outputs_of(node.meta["val"], [x.meta["val"]])[0].shares == 0


def test_file_of_prices_keeps_layouts(tmp_path):
    known = PriceList.load(torch.device("cpu"))
    known["op"] = cost.Price(1.0, 4, (Output(8, (2, 1), 1, -2, "~"), None))
    known.save()
    assert PriceList.load(torch.device("cpu"))["op"] == known["op"]


def test_file_of_an_older_version_is_measured_anew():
    known = PriceList.load(torch.device("cpu"))
    known["op"] = cost.Price(1.0, 4, None)
    known.save()
    known.path.write_text(known.path.read_text().replace('"version": 2', '"version": 1'))
    assert "op" not in PriceList.load(torch.device("cpu"))


def test_views_are_not_measured():
    _, node, _, _ = call(aten.t.default, torch.rand(3, 4))
    with mock.patch.object(Kernels, "__call__") as ran:
        assert KnownKernels(partial(Kernels, torch.device("cpu")))(node) is None
    assert not ran.called


# Values that nobody counted, or that were counted and cost nothing.


class Complex(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.linear, self.number = nn.Linear(8, 8), number

    def forward(self, x):
        x = self.linear(x)
        return (torch.complex(x, x.sin()) * self.number).abs().sum()


@pytest.mark.parametrize("prices", ["measured", "roofline"])
@pytest.mark.parametrize("number", [1 + 2j, 2j])
def test_complex_python_number(number, prices):
    for budget in ("100%", "min"):
        found = lowtide.verify(Complex(number), torch.rand(4, 8), budget=budget, prices=prices)
        assert found.ok, found
        assert found.measured == found.predicted


@pytest.mark.parametrize("budget", ["100%", "min"])
def test_zeros_of_forward_mode_derivatives(budget):
    """A Hessian: its backward multiplies by a tensor of zeros that torch makes inside of the operator."""
    linear = nn.Linear(8, 8)

    def step(x):
        return torch.func.hessian(lambda row: linear(row).tanh().sum())(x).square().mean()

    found = lowtide.verify(step, torch.randn(8), budget=budget)
    assert found.ok, found
    assert found.measured == found.predicted


class Queue(nn.Module):
    """MoCo's: the keys of a batch replace the oldest of a queue that is a buffer."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(32, 32)
        self.register_buffer("queue", torch.randn(32, 256))

    def forward(self, x):
        keys = self.encoder(x)
        loss = (keys @ self.queue.clone().detach()).logsumexp(1).mean()
        with torch.no_grad():
            self.queue[:, : len(x)] = keys.detach().t()
        return loss


@pytest.mark.parametrize("budget", ["100%", "min"])
def test_buffer_that_is_written_in_place(budget):
    found = lowtide.verify(Queue(), torch.randn(16, 32), budget=budget)
    assert found.ok, found
    assert found.measured == found.predicted


def test_write_into_a_buffer_has_no_workspace():
    graph = lowtide.plan(Queue(), torch.randn(16, 32), prices="measured").graph
    (write,) = [op for op in graph.ops if op.target == "aten.copy_.default"]
    assert write.workspace == 0


class TwoHeads(nn.Module):
    """The second head is computed, and is not in the loss."""

    def __init__(self):
        super().__init__()
        self.body, self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 64)

    def forward(self, x, mask):
        x = self.body(x).relu()
        self.unused(x)
        return self.used(x).square().mean()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_inputs_that_the_step_does_not_touch(executor):
    found = lowtide.verify(TwoHeads(), torch.randn(4, 8), torch.zeros(1000), budget="min", executor=executor)
    assert found.ok, found
    assert found.measured == found.predicted


def test_untouched_inputs_count_on_a_gpu():
    """Its allocator holds them."""
    here, there = (
        lowtide.plan(TwoHeads(), torch.randn(4, 8), torch.zeros(1000), device=device).graph.given_bytes
        for device in (None, "H200")
    )
    assert there > here


def test_mask_that_a_causal_hint_makes_needless():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(64)

    def step(x, mask):
        return layer(x, src_mask=mask, is_causal=True).square().mean()

    found = lowtide.verify(step, torch.randn(2, 64, 16), mask, budget="min")
    assert found.ok, found
    assert found.measured == found.predicted


def test_gradient_of_a_parameter_with_other_strides_is_copied_inside():
    """The layout of a gradient is compared with the real strides, not with those foretold."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(12, 8).t())

        def forward(self, x):
            return nn.functional.mse_loss(self.weight * 1.0, x) + nn.functional.mse_loss(self.weight, x)

    found = lowtide.verify(Scaled(), torch.randn(8, 12), budget="min")
    assert found.ok, found
    assert found.measured == found.predicted


def test_trace_is_as_the_kernels_run_it():
    """Every fake tensor of the corrected trace lies as the real one."""
    _, trace = lifted(Transposed(), batch(), prices="measured")
    norms = [node for node in trace.graph.nodes if getattr(node.target, "__name__", "") == "batch_norm"]
    assert len(norms) == 3
    assert all(node.meta["val"][0].is_contiguous() for node in norms)


@pytest.mark.parametrize("prices", ["measured", "roofline"])
def test_a_kernel_that_returns_an_empty_input_itself(prices):
    """`native_dropout` does: an expert that gets no tokens, say."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 2))
    model = lowtide.cap(net, "min", prices=prices)
    for _ in range(2):  # the second is planned with what the first has met
        model(torch.randn(0, 4)).sum().backward()
    assert lowtide.plan_of(model) is not None
