"""The fusion-aware graph: what is in memory once loops are fused."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.fusion import fusing, steers


def graph_of(function, *batch, **options):
    return lowtide.plan(function, *batch, executor="inductor", **options).graph


def activations(graph, least=0):
    return {v.name for v in graph.values if v.kind == "activation" and v.bytes > least}


def leaf(*shape):
    return torch.rand(*shape).requires_grad_()


def test_a_chain_of_loops_keeps_nothing_but_its_input():
    x = leaf(64, 64)
    graph = graph_of(lambda x: x.sin().exp().tanh().sum(), x)
    assert not activations(graph, least=1000)


def test_what_a_product_reads_and_writes_is_in_memory():
    x, w = leaf(64, 32), leaf(32, 48)
    graph = graph_of(lambda x: (x.sin() @ w).exp().sum(), x)
    sizes = sorted(graph.value[name].bytes for name in activations(graph, least=100))
    # sin(x), the product, the gradient of the product and of sin(x)
    assert sizes == sorted([64 * 32 * 4, 64 * 48 * 4, 64 * 48 * 4, 64 * 32 * 4])


def test_a_normalised_value_is_computed_from_what_it_normalises():
    net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    x = torch.rand(128, 64)
    graph = graph_of(lambda x: net(x).square().sum(), x)
    rows = 128 * 64 * 4
    forward = [op for op in graph.ops if op.phase == "forward" and graph.value[op.writes[0]].bytes == rows]
    assert [op.target.split(".")[1] for op in forward] == [
        "addmm",
        "add",
        "addmm",
    ]  # not the LayerNorm's inside


def test_a_cast_is_never_kept_in_the_wider_type():
    norm = nn.LayerNorm(64, dtype=torch.bfloat16)
    first, second = (nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(2))
    x = torch.rand(128, 64, dtype=torch.bfloat16)
    graph = graph_of(lambda x: second(norm(first(x) + x)).float().sum(), x)
    wide = [v for v in graph.values if v.kind == "activation" and v.bytes >= 128 * 64 * 4]
    assert not [v for v in wide if graph.writer[v.name].phase == "forward"]


def test_relu_is_judged_anew_from_what_batch_norm_read():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    graph = graph_of(lambda x: net(x).square().sum(), torch.rand(8, 3, 64, 64))
    (relu,) = [op for op in graph.ops if op.target == "aten.relu.default"]
    readers = {op.target for op in graph.ops if relu.writes[0] in op.reads}
    assert readers == {"aten.convolution.default", "aten.convolution_backward.default"}


def test_a_dropout_mask_is_kept_or_drawn_again_but_not_inside_every_loop():
    net = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64))
    graph = graph_of(lambda x: net(x).sum(), torch.rand(128, 64))
    (mask,) = [op for op in graph.ops if op.target == "aten.gt.Scalar"]
    assert graph.value[mask.writes[0]].bytes == 128 * 64
    assert {op.phase for op in graph.ops if mask.writes[0] in op.reads} == {"forward", "backward"}
    (seed,) = [op for op in graph.ops if "seed" in op.target]
    assert seed.kind == "pinned"


@pytest.mark.parametrize(
    "choose",
    [
        lambda x: x.gather(1, x.argmax(1, keepdim=True)),
        lambda x: x.topk(3, dim=1).values,
        lambda x: x.sort(dim=1).values[:, :3],
        lambda x: x[:, (x.sum(0) > 0).long()],
        lambda x: x.amax(1),
    ],
)
def test_what_chooses_runs_once(choose):
    graph = graph_of(lambda x: choose(x * 2).sum(), leaf(8, 16))
    assert [op for op in graph.ops if op.kind == "pinned"]


def test_a_mask_that_only_weighs_may_be_made_again():
    found = {}

    def look(module, inputs):
        found["steers"] = {str(node.target) for node in steers(module.graph)}
        return module.forward

    torch.compile(lambda x: torch.where(x > 0, x, 2 * x), backend=look)(torch.rand(4))
    assert not found["steers"]


def test_a_loop_may_write_in_the_place_of_what_it_reads_last():
    w, v = leaf(64, 64), leaf(64, 64)
    graph = graph_of(lambda x: ((x @ w).sin() @ v).sum(), torch.rand(64, 64))
    (sin,) = [op for op in graph.ops if op.target == "aten.sin.default"]
    assert sin.takes == sin.reads


def test_an_op_that_is_not_known_runs_apart():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    assert fusing(graph.call_function(torch.ops.aten.mm.default, (x, x))) == "apart"
    assert fusing(graph.call_function(torch.ops.aten.exp.default, (x,))) == "loop"
    assert fusing(graph.call_function(torch.ops.aten.sum.default, (x,))) == "reduction"
    assert fusing(graph.call_function(nn.functional.relu, (x,))) == "apart"
