"""From a trace to a graph: what becomes a value, what an op, and by which names the user finds them."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from lowtide.capture.lift import lift
from lowtide.devices.table import find_device
from lowtide.torch_state.random_state import state_size
from traces import lifted

HERE = Path(__file__).name


def graph_of(function, *batch, **options):
    return lifted(function, *batch, **options)[0].graph


def ops_of(graph, target):
    return [op for op in graph.ops if op.target == target]


def bytes_of(graph, kind):
    return [value.bytes for value in graph.values if value.kind == kind]


@pytest.fixture
def w():
    return nn.Parameter(torch.randn(10, 20))


def test_views_are_no_ops_and_no_values(w):
    def step(x):
        return (w.tanh().t().reshape(4, 50)[1:].unsqueeze(0).exp() * x).sum()

    graph = graph_of(step, torch.ones(1))
    assert [op.target for op in graph.ops if op.phase == "forward"] == [
        "aten.tanh.default",
        "aten.clone.default",
        "aten.exp.default",
        "aten.mul.Tensor",
        "aten.sum.default",
    ]
    (clone,) = ops_of(graph, "aten.clone.default")
    (exp,) = ops_of(graph, "aten.exp.default")
    assert exp.reads == clone.writes


def test_view_of_a_view_belongs_to_the_storage(w):
    found, trace = lifted(lambda x: (w.tanh().view(200)[10:].view(19, 10) * x).sum(), torch.ones(1))
    views = [node for node in trace.graph.nodes if node.target is torch.ops.aten.view.default]
    (tanh,) = ops_of(found.graph, "aten.tanh.default")
    assert {found.value_of[node] for node in views} >= set(tanh.writes)
    assert found.graph.value[tanh.writes[0]].bytes == 800


def test_each_output_of_an_op_is_a_value():
    norm = nn.LayerNorm(20)
    graph = graph_of(lambda x: norm(x).sum(), torch.randn(10, 20))
    (op,) = ops_of(graph, "aten.native_layer_norm.default")
    assert [graph.value[name].bytes for name in op.writes] == [800, 40, 40]
    assert op.workspace == 0


def test_unread_outputs_are_workspace():
    w = nn.Parameter(torch.randn(10))
    graph = graph_of(lambda x: (w * x.max(1).values).sum(), torch.randn(10, 20))
    (op,) = ops_of(graph, "aten.max.dim")
    assert [graph.value[name].bytes for name in op.writes] == [40]
    assert op.workspace == 80


def test_phases(w):
    graph = graph_of(lambda x: (w * x).exp().sum(), torch.randn(10, 20))
    last_forward = max(index for index, op in enumerate(graph.ops) if op.phase == "forward")
    assert all(op.phase == "backward" for op in graph.ops[last_forward + 1 :])
    (exp,) = ops_of(graph, "aten.exp.default")
    assert exp.phase == "forward"
    assert {graph.writer[value.name].phase for value in graph.values if value.kind == "gradient"} == {
        "backward"
    }


def test_kinds_of_values(w):
    graph = graph_of(lambda x: (w * x).exp().sum(), torch.randn(10, 20))
    assert bytes_of(graph, "parameter") == [800]
    assert bytes_of(graph, "input") == [800]
    assert bytes_of(graph, "output") == [4]
    assert bytes_of(graph, "tangent") == [4]
    assert bytes_of(graph, "gradient") == [800]


def test_random_ops_may_run_again_from_their_state(w):
    graph = graph_of(lambda x: functional.dropout(w * x, 0.5).sum(), torch.randn(10, 20))
    (op,) = [op for op in graph.ops if op.kind == "random"]
    assert "dropout" in op.target
    assert op.state == state_size("cpu")
    assert {op.kind for op in graph.ops} == {"pure", "random"}


def test_random_state_takes_no_bytes_of_a_gpu(w):
    graph = graph_of(lambda x: functional.dropout(w * x, 0.5).sum(), torch.randn(10, 20), device="A100")
    assert [op.state for op in graph.ops if op.kind == "random"] == [0]


@pytest.mark.parametrize(("dropout", "kinds"), [(0.0, {"pure"}), (0.3, {"pure", "random"})])
def test_attention_is_random_only_with_dropout(dropout, kinds):
    q = nn.Parameter(torch.randn(1, 2, 8, 4))

    def step(x):
        return functional.scaled_dot_product_attention(q, x, x, dropout_p=dropout).sum()

    assert {op.kind for op in graph_of(step, torch.randn(1, 2, 8, 4)).ops} == kinds


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(20, 20)
        self.register_buffer("seen", torch.zeros(20))

    def forward(self, x):
        self.seen.add_(x.sum(0))
        return self.linear(x).exp().sum()


def test_writes_into_buffers_are_pinned():
    graph = graph_of(Counts(), torch.randn(10, 20))
    pinned = [op.target for op in graph.ops if op.kind == "pinned"]
    assert pinned == ["aten.add.Tensor", "aten.copy_.default"]
    assert bytes_of(graph, "buffer") == [80]


def test_batch_norm_may_run_again():
    norm = nn.BatchNorm1d(20)
    (op,) = ops_of(graph_of(norm, torch.randn(10, 20)), "batch_norm")
    assert op.kind == "pure"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(20, 40), nn.Linear(40, 20)

    def forward(self, x):
        y = self.up(x)
        return x + self.down(y.relu())


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.sum()


def line_of(method, text):
    lines, first = inspect.getsourcelines(method)
    return first + next(index for index, line in enumerate(lines) if text in line)


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_module_path_and_source_line(phase):
    graph = graph_of(Tower(), torch.randn(10, 20))
    up, relu = line_of(Block.forward, "self.up"), line_of(Block.forward, "relu")
    places = {(op.module, op.source) for op in graph.ops if op.phase == phase}
    assert ("blocks.3.up", f"{HERE}:{up}") in places
    assert ("blocks.3.down", f"{HERE}:{relu}") in places
    assert ("blocks.3", f"{HERE}:{relu}") in places


def test_where_names_both():
    graph = graph_of(Tower(), torch.randn(10, 20))
    assert f"blocks.0.up, {HERE}:{line_of(Block.forward, 'self.up')}" in {op.where for op in graph.ops}


def test_path_in_a_sequential():
    model = nn.Sequential(nn.Linear(20, 20), nn.Sequential(nn.Tanh(), nn.Linear(20, 1)))
    modules = {op.module for op in graph_of(model, torch.randn(10, 20)).ops}
    assert modules == {"0", "1.0", "1.1"}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 20), nn.Linear(20, 30, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x)).exp().sum()


def test_tied_weights_are_one_value():
    graph = graph_of(Tied(), torch.zeros(10, dtype=torch.long))
    assert bytes_of(graph, "parameter") == [2400]
    assert bytes_of(graph, "gradient") == [2400]


def test_inputs_that_share_a_storage_are_one_value(w):
    base = torch.randn(20, 20)
    graph = graph_of(lambda a, b: (w * a * b).sum(), base[:10], base[10:])
    assert bytes_of(graph, "input") == [1600]


def test_same_input_twice_is_one_value(w):
    x = torch.randn(10, 20)
    graph = graph_of(lambda a, b: (w * a * b).sum(), x, x)
    assert bytes_of(graph, "input") == [800]


def test_constants_are_there_from_the_start(w):
    graph = graph_of(lambda x: (w * x * torch.tensor([2.0, 3.0]).sum()).sum(), torch.randn(10, 20))
    assert bytes_of(graph, "buffer") == [8]


def test_present_gradients_are_added_to(w):
    w.grad = torch.zeros_like(w)
    graph = graph_of(lambda x: (w * x).sum(), torch.randn(10, 20))
    assert bytes_of(graph, "accumulated") == [800]
    (op,) = ops_of(graph, "accumulate")
    assert op.kind == "pinned"


def test_sizes_are_those_of_the_planned_device(w):
    _, trace = lifted(lambda x: (w[:9, :19] * x).sum(), torch.randn(9, 19))
    here, there = lift(trace).graph, lift(trace, find_device("A100")).graph
    assert (here.device, there.device) == ("cpu", "A100")
    for left, right in zip(here.values, there.values, strict=True):
        assert right.bytes == -(-left.bytes // 512) * 512
