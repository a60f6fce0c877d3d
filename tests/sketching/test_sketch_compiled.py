"""Sketches inside of captured steps: no graph break, shared as in eager, and together with a cap."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.sketching.kinds import KINDS
from one_capture import one_capture
from sketched import WIDTH, Block, WithLoss, close, gradients, same, step

pytestmark = pytest.mark.slow


def sketch(model, kind="strided", rate=0.25, **options):
    return lowtide.sketch(model, rate if KINDS[kind].has_rate else None, kind=kind, **options)


class Graphs:
    """A backend that keeps the graphs it is given."""

    def __init__(self):
        self.seen = []

    def __call__(self, module, inputs):
        self.seen.append(module)
        return module.forward

    def count(self, word):
        return sum(word in str(node.target) for module in self.seen for node in module.graph.nodes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_with_the_same_gradients(kind):
    net = Block() if kind == "strided" else Block().mlp  # one kind with an input that several layers read
    model, x = sketch(WithLoss(net), kind), torch.randn(4, 10, WIDTH)
    expected = step(model, x)
    compiled = torch.compile(lambda x: model(x), backend="aot_eager", fullgraph=True)
    model.zero_grad()
    torch.manual_seed(0)
    compiled(x).backward()
    close(gradients(model), expected)


@pytest.mark.inductor
@pytest.mark.parametrize("kind", ["strided", "rows", "gaussian", "int4"])
def test_compiled_sketches_are_right_on_average(kind):
    model, x = sketch(nn.Linear(WIDTH, 8), kind, 0.5), torch.randn(24, WIDTH)
    weight = torch.randn(24, 8)
    exact = weight.t() @ x
    compiled = torch.compile(lambda x: (model(x) * weight).sum(), fullgraph=True)
    found = []
    for _ in range(200):
        model.zero_grad()
        compiled(x).backward()
        found.append(model.weight.grad.clone())
    off = ((torch.stack(found) - exact) * exact).sum((1, 2))
    assert off.std() > 0
    assert abs(off.mean()) < 4 * off.std() / 200**0.5


@pytest.mark.inductor
def test_seeds_are_hashed_alike_by_inductor():
    from lowtide.sketching.draw import signs, uniforms

    index, seed = torch.arange(1000), torch.randint(2**31 - 1, (2, 4))
    for function in (
        lambda: signs(index, seed, torch.float32),
        lambda: uniforms(index, seed[1], torch.float64),
    ):
        assert torch.equal(torch.compile(function, fullgraph=True)(), function())


def test_a_traced_model_shares_its_sketches():
    model, x = sketch(WithLoss(Block())), torch.randn(4, 10, WIDTH)
    graphs = Graphs()
    torch.compile(lambda x: model(x), backend=graphs, fullgraph=True)(x)
    assert len(graphs.seen) == 1
    assert graphs.count("addcmul_") == graphs_of_one_layer(x) * 4  # of six layers
    (out,) = graphs.seen[0].graph.find_nodes(op="output")
    assert len(out.args[0]) == 1
    assert not model.net.mlp[0].forward.args[2].traced


def graphs_of_one_layer(x):
    graphs = Graphs()
    model = sketch(nn.Linear(WIDTH, 8))
    torch.compile(lambda x: model(x), backend=graphs, fullgraph=True)(x)
    return graphs.count("addcmul_")


class ChangesInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

    def forward(self, x):
        x = x * 1.0
        before = self.first(x)
        x += 1
        return (before * self.second(x)).square().mean()


def test_an_input_that_a_traced_step_changes_gets_another_sketch():
    model, x = sketch(ChangesInput()), torch.randn(40, WIDTH)
    expected = step(model, x)
    model.zero_grad()
    torch.manual_seed(0)
    torch.compile(lambda x: model(x), backend="aot_eager", fullgraph=True)(x).backward()
    close(gradients(model), expected)


def test_a_checkpoint_in_a_compiled_step():
    model = sketch(WithLoss(Checkpointed()))
    x = torch.randn(4, 10, WIDTH)
    compiled = torch.compile(lambda x: model(x), backend="aot_eager", fullgraph=True)
    compiled(x).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def test_the_steps_of_a_compiled_model_differ_and_it_is_compiled_once():
    model, x = sketch(WithLoss(Block(dropout=0))), torch.randn(4, 10, WIDTH)
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    found = []
    for _ in range(3):
        model.zero_grad()
        compiled(x).backward()
        found.append(gradients(model)["net.mlp.0.weight"])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    assert len([module for module in graphs.seen if "linear" in module.code]) == 1


def test_masked_rows_in_a_compiled_step():
    model, x, mask = WithLoss(Block(dropout=0)), torch.randn(4, 10, WIDTH), torch.ones(4, 10)
    mask[:, 6:] = 0
    lowtide.sketch(model, 0.3, rows="mask")
    expected = step(model, x, mask)
    compiled = torch.compile(lambda x, mask: model(x, mask), backend="aot_eager", fullgraph=True)
    model.zero_grad()
    torch.manual_seed(0)
    compiled(x, mask).backward()
    close(gradients(model), expected)


def test_a_compiled_block_inside_of_the_model():
    model, x, mask = WithLoss(Block(dropout=0)), torch.randn(4, 10, WIDTH), torch.ones(4, 10)
    mask[:, 6:] = 0
    lowtide.sketch(model, 0.3, rows="mask")
    torch.manual_seed(0)
    expected = step(model, x, mask)
    model.net.mlp.compile(backend="aot_eager", fullgraph=True)
    close(step(model, x, mask), expected)


@pytest.mark.parametrize("dynamic", [None, True])
def test_other_batch_sizes_of_a_compiled_model(dynamic):
    model = sketch(nn.Linear(WIDTH, 8), rate=0.3)
    compiled = torch.compile(model, backend="aot_eager", dynamic=dynamic, fullgraph=True)
    for rows in (40, 30, 17, 3, 1):
        x = torch.randn(rows, WIDTH)
        expected = step(model, x)
        model.zero_grad()
        torch.manual_seed(0)
        compiled(x).sum().backward()
        close(gradients(model), expected)


def test_autocast_in_a_compiled_step():
    model, x = sketch(WithLoss(Block(dropout=0))), torch.randn(4, 10, WIDTH)

    def cast_step(call):
        model.zero_grad()
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(x)
        loss.backward()
        return gradients(model)

    expected = cast_step(model)
    close(cast_step(torch.compile(model, backend="aot_eager", fullgraph=True)), expected, 0.02)


@pytest.mark.parametrize(
    ("kind", "budgets"), [("strided", ("90%", "80%", "min")), ("rows", ("min",)), ("int8", ("min",))]
)
def test_capped_gradients_are_bitwise_those_of_the_sketched_model(kind, budgets):
    model, x = sketch(WithLoss(Block()), kind, always=True), torch.randn(8, 16, WIDTH)
    with one_capture():
        for budget in budgets:
            found = lowtide.verify(model, x, budget=budget, prices="roofline")
            assert found.exact, (budget, str(found))
            assert found.equal, (budget, str(found))
            assert found.measured <= found.predicted


def test_capped_after_a_sketch_needs_less():
    model, x = WithLoss(Block()), torch.randn(16, 16, WIDTH)
    plain = lowtide.plan(model, x)
    sketched = lowtide.plan(lowtide.sketch(model, 0.1, always=True), x)
    assert sketched.peak < plain.peak
    made = {step.op for step in sketched.schedule.forward if isinstance(step, lowtide.Run)}
    assert {op.name for op in sketched.graph.ops if op.kind == "random"} <= made


@pytest.mark.inductor
def test_capped_as_fused_kernels():
    net = nn.Sequential(nn.Linear(WIDTH, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 64))
    model, x = sketch(WithLoss(net), always=True), torch.randn(16, 16, WIDTH)
    for budget in ("95%", "92%"):
        found = lowtide.verify(model, x, budget=budget, executor="inductor", prices="roofline")
        assert found.equal, (budget, str(found))
        assert found.measured <= found.plan.budget


def test_steps_of_a_capped_model_differ_and_equally_seeded_ones_do_not():
    model, x = sketch(WithLoss(Block()), always=True), torch.randn(8, 16, WIDTH)
    lowtide.cap(model, "80%", prices="roofline")
    first, again, other = step(model, x, seed=1), step(model, x, seed=1), step(model, x, seed=2)
    assert same(first, again)
    assert not same(first, other)
    lowtide.uncap(model)
    twin = copy.deepcopy(model)
    assert same(step(twin, x, seed=1), first)
