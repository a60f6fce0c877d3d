"""A capped step overwrites values that die, and nothing that anybody else can see."""

import copy

import pytest
import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks

import lowtide
from lowtide.capture.in_place import IN_PLACE, InPlace
from lowtide.plans.planned_step import Plan
from lowtide.run import first_run
from lowtide.run.eager import compile_graph, source_of
from lowtide.run.in_place import overwriting
from short_search import short_search
from small_models import gradients, same

aten = torch.ops.aten
ADD = InPlace(aten.add.out, "out", 0)


class Net(nn.Module):
    """Ops that may overwrite what they read, in both directions; the loss is in it, or its logits are."""

    def __init__(self, loss=True):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 64)
        self.loss = loss

    def forward(self, x, target=None):
        for _ in range(3):
            x = x + self.down(nn.functional.silu(self.up(x)) * 2)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits, target) if self.loss else logits


def batch():
    torch.manual_seed(0)
    return torch.randn(32, 16), torch.randint(0, 64, (32,))


@pytest.fixture(autouse=True)
def quick():
    with short_search():
        yield


def marked(monkeypatch):
    """The nodes that each function of a step overwrites something by, in the order of their making."""
    seen = []
    real = overwriting

    def look(graph, **options):
        found = real(graph, **options)
        seen.append([node.name for node in found])
        return found

    monkeypatch.setattr("lowtide.run.eager.overwriting", look)
    return seen


def test_nothing_is_overwritten_where_the_step_fits_anyway(monkeypatch):
    seen = marked(monkeypatch)
    model, args = Net(), batch()
    lowtide.cap(model, "100%")
    model(*args).backward()
    plan = lowtide.plan_of(model)
    assert not plan.schedule.in_place
    assert plan.peak == plan.uncapped.peak
    assert any(op.takes for op in plan.graph.ops)
    assert seen
    assert not any(seen)


@pytest.mark.slow
def test_a_little_less_is_had_for_no_time_at_all(monkeypatch):
    seen = marked(monkeypatch)
    found = lowtide.verify(Net(), *batch(), budget="99%")
    assert found.ok
    assert found.plan.extra == 0
    assert found.measured == found.predicted < found.plan.uncapped.peak
    assert all(seen)


@pytest.mark.parametrize("loss", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_step_is_exact_and_as_small_as_predicted(loss):
    model, args = Net(loss), batch()[: 1 + loss]
    plain = copy.deepcopy(model)
    lowtide.cap(model, "min")
    for _ in range(3):
        sizes = []
        for net in (model, plain):
            net.zero_grad()
            taken = lowtide.measure(lambda net=net: net(*args).sum().backward(), device="cpu")
            sizes.append(taken.peak)
        assert same(gradients(model), gradients(plain))
    assert sizes[0] <= lowtide.plan_of(model).peak < sizes[1]


def test_gradients_from_outside_and_outputs_stay_as_they_are():
    model, (x, _) = Net(loss=False), batch()
    plain = copy.deepcopy(model)
    lowtide.cap(model, "min")
    x.requires_grad_()
    gradient = torch.randn(32, 64)
    kept = gradient.clone()
    logits = model(x)
    before = logits.detach().clone()
    logits.backward(gradient)
    assert torch.equal(gradient, kept)
    assert torch.equal(logits, before)
    mine = x.grad
    x.grad = None
    plain(x).backward(gradient)
    assert torch.equal(mine, x.grad)
    assert same(gradients(model), gradients(plain))


def test_an_output_may_be_changed_as_before():
    class Ends(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            return nn.functional.silu(self.linear(x).view(-1, 16)).view(x.shape) * 3

    model, x = Ends(), torch.randn(4, 8, 16)
    plain = copy.deepcopy(model)
    lowtide.cap(model, "min")
    for net in (model, plain):
        result = net(x)
        assert not result._is_view()
        result.mul_(2).sum().backward()
    assert same(gradients(model), gradients(plain))


def test_what_hooks_have_seen_of_saved_values_stays_as_it_is():
    model, args = Net(), batch()
    plain = copy.deepcopy(model)
    plain(*args).backward()
    lowtide.cap(model, "70%")
    model(*args).backward()  # before there are hooks
    for hooked in (True, False):
        model.zero_grad()
        seen = []

        def pack(tensor, seen=seen):
            seen.append((tensor, tensor.clone()))
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(*args)
        loss.backward()
        assert len(seen) > 5
        assert all(torch.equal(tensor, copied) for tensor, copied in seen), hooked
        assert same(gradients(model), gradients(plain))


class TwoSums(nn.Module):
    """Gradients of two outputs meet in sums."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        left = right = x
        for layer in self.layers:
            left, right = layer(left).tanh() + right, layer(right).sigmoid() * left
        return left, right


@pytest.mark.parametrize("budget", [pytest.param("90%", marks=pytest.mark.slow), "min"])
def test_a_gradient_that_does_not_come_changes_what_may_be_overwritten(budget):
    model, x = TwoSums(), torch.randn(4, 8)
    plain = copy.deepcopy(model)
    lowtide.cap(model, budget, differentiate="all")
    for which in (slice(None), slice(0, 1), slice(1, 2), slice(None)):
        for net in (model, plain):
            net.zero_grad()
            sum(result.sum() for result in net(x)[which]).backward()
        assert same(gradients(model), gradients(plain))


@pytest.mark.slow
def test_plans_that_were_saved_before_ops_could_overwrite_are_followed(tmp_path):
    model, args = Net(), batch()
    plan = lowtide.plan(model, *args, budget="70%", prices="measured")
    graph = plan.graph.to_dict()
    del graph["plain_in_place"]
    for op in graph["ops"]:
        op.pop("takes", None)
    data = plan.to_dict()
    from lowtide import Graph, Schedule
    from lowtide.plans.planned_step import make_plan

    old = make_plan(Graph.from_dict(graph), Schedule.from_dict(data["schedule"]), method="auto")
    assert old.peak >= plan.peak
    old = Plan.load(old.save(tmp_path / "plan.json"))
    lowtide.cap(model, plan=old, prices="measured")
    model(*args).backward()
    assert lowtide.plan_of(model).peak == plan.peak


def chain_of_adds(*, read_again=False):
    """h = x + 1; y = h + 1, in the place of h; and a view of h, read after that where `read_again`."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    h = graph.call_function(aten.add.Tensor, (x, 1))
    view = graph.call_function(aten.view.default, (h, [6]))
    y = graph.call_function(aten.add.Tensor, (h, 1))
    late = graph.call_function(aten.neg.default, (view if read_again else y,))
    graph.output((y, late))
    with torch._subclasses.FakeTensorMode() as mode:
        values = {x: torch.empty(2, 3), h: torch.empty(2, 3), y: torch.empty(2, 3)}
        values[view] = values[h].view(6)
        values[late] = torch.empty(6 if read_again else (2, 3))
    for node, value in values.items():
        node.meta["val"] = value
    assert mode
    y.meta[IN_PLACE] = ADD
    return fx.GraphModule(nn.Module(), graph), x, y


def test_a_mark_does_not_hold_where_a_view_is_read_later():
    module, x, y = chain_of_adds()
    assert overwriting(module.graph) == {y: ADD}
    assert overwriting(module.graph, saved=False) == {y: ADD}
    module, x, y = chain_of_adds(read_again=True)
    assert overwriting(module.graph) == {}
    y.args = (x, 1)
    assert overwriting(module.graph) == {y: ADD}
    assert overwriting(module.graph, saved=False) == {}  # it came in


def test_what_does_not_lie_as_foretold_is_not_overwritten():
    module, _, y = chain_of_adds()
    y.args = (module.graph.find_nodes(op="placeholder")[0], 1)
    run = compile_graph(module, "forward")
    fits, otherwise = torch.ones(2, 3), torch.ones(3, 2).t()
    for given, stays in ((fits, False), (otherwise, True)):
        result, _ = run([given])
        assert torch.equal(result, torch.full((2, 3), 2.0))
        assert torch.equal(given, torch.ones(2, 3)) is stays
        assert result.stride() == given.stride()
    assert "out=" not in source_of(module, "forward", overwrites="nothing")[0]


def test_nothing_is_overwritten_once_something_shares_what_was_not_foretold_to():
    """A kernel that hands back what it was given, where tracing foretold a tensor of its own."""
    module, x, _ = chain_of_adds()
    h = x.next
    h.target = lambda x, _: x
    misfits = first_run.Misfits.on("cpu")
    run = first_run.checked(module, "forward", misfits)
    for _ in range(2):
        given = torch.ones(2, 3)
        result, _ = run([given])
        assert torch.equal(given, torch.ones(2, 3))
        assert torch.equal(result, torch.full((2, 3), 2.0))
        assert misfits.overwrites == "nothing"


class Gated(nn.Module):
    """Scores of a matrix product, looked at with a dimension of one element, and gated."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(16, 64), nn.Linear(16, 64)
        self.gate = nn.Parameter(torch.randn(32, 32, 4))

    def forward(self, x):
        left, right = (layer(x).view(2, 1, 32, 4, 16) for layer in (self.left, self.right))
        scores = torch.einsum("bclhs,bcmhs->bclmh", left, right)
        return (scores * self.gate.tanh()).exp().sum()


@pytest.mark.slow
def test_the_stride_of_one_element_makes_no_difference():
    found = lowtide.verify(Gated(), torch.randn(2, 32, 16), budget="min")
    assert found.equal
    assert found.measured == found.predicted
