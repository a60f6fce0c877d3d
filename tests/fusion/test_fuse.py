"""The fusion-aware graph: what is in memory once loops are fused."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture.op_classes import fusing, steers
from lowtide.fusion.traffic import parts
from traces import lifted


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


def gelu_then_norm():
    """In bf16, where both compute in float32: the LayerNorm's backward reads what GELU made, widened."""
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64)).bfloat16()
    return graph_of(lambda x: net(x).float().square().sum(), torch.rand(128, 64).bfloat16())


def test_a_narrow_value_is_not_kept_beside_a_product_that_it_is_made_of():
    graph = gelu_then_norm()
    rows = 128 * 64 * 2
    forward = [op for op in graph.ops if op.phase == "forward" and graph.value[op.writes[0]].bytes >= rows]
    assert [op.target.split(".")[1] for op in forward] == [
        "addmm",
        "convert_element_type",  # the LayerNorm's result
        "addmm",
    ]


def test_a_long_expression_is_cut_where_its_value_is_narrow():
    graph = gelu_then_norm()
    wide = [v.name for v in graph.values if v.kind == "activation" and v.bytes >= 128 * 64 * 4]
    assert not wide


def test_a_product_is_formed_at_once_where_it_reads_much():
    table = nn.Embedding(32, 8)

    def step(places):
        return (table(places).sin() @ table.weight.T).exp().sum()

    found, _ = lifted(step, torch.randint(32, (4096,)), executor="inductor")
    products = [op for op in found.graph.ops if op.target == "aten.mm.default" and op.phase == "backward"]
    (small,) = [op.name for op in products if found.graph.value[op.writes[0]].bytes == 32 * 8 * 4]
    assert small in found.kept  # it is added to the gradient of the embedding, which comes last


def test_the_gradients_of_two_factors_are_made_in_one_loop():
    gate, up, down = (leaf(64, 64) for _ in range(3))

    def step(x):
        return ((nn.functional.silu(x @ gate) * (x @ up)) @ down).sum()

    graph = graph_of(step, torch.rand(128, 64))
    backward = [op for op in graph.ops if op.phase == "backward"]
    loops = [
        op for op in backward if op.writes[0] in activations(graph, least=1000) and "mm" not in op.target
    ]
    first, second = map(backward.index, loops)
    assert second == first + 1  # not begun there and ended after the products of the first


def test_how_much_is_much_is_judged_by_what_is_in_memory():
    x, w = leaf(64, 64), leaf(64, 64)

    def step(x, y):
        return (x.sin() @ w).sum() + (y[:, None] * y).sin().sum()  # the products of y are in no memory

    found, _ = lifted(step, x, leaf(2048), executor="inductor")
    assert "sin" in found.kept


def test_random_numbers_are_kept_in_the_narrower_type():
    w = leaf(64, 64)

    def step(x):
        return (x.float() * torch.rand_like(x).float() @ w).sum()

    graph = graph_of(step, leaf(128, 64).bfloat16())
    (seeds,) = [op.writes[0] for op in graph.ops if "seed" in op.target]
    drawn = [graph.value[op.writes[0]].bytes for op in graph.ops if seeds in op.reads]
    assert drawn == [128 * 64 * 2]


def test_drawing_seeds_parts_no_loops():
    w = leaf(64, 64)

    def step(x, y):
        both = x + y
        mean = both.mean(1, keepdim=True)
        return ((nn.functional.dropout(x) + both * mean) @ w).sum()

    found, _ = lifted(step, torch.rand(128, 64), torch.rand(128, 64), executor="inductor")
    how = {op.name: fusing(found.node_of[op.name]) for op in found.graph.ops}
    apart = {op.target: parts(op, how) for op in found.graph.ops if how[op.name] == "apart"}
    assert apart == {"prims.inductor_seeds.default": False, "aten.mm.default": True}
    assert not [op for op in found.graph.ops if op.name == "add"]  # the sum is computed inside its readers


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


@pytest.mark.parametrize(
    ("choose", "target"),
    [
        (lambda x: x.masked_fill(x < x.topk(3, dim=1).values[:, 2:], 0), "aten.lt.Tensor"),
        (lambda x: (x - x.floor()) * x, "aten.floor.default"),
    ],
)
def test_what_tells_close_values_apart_runs_once(choose, target):
    """An element that is the third largest itself must not be below it when it is computed again."""
    graph = graph_of(lambda x: choose(x.tanh()).sum(), leaf(8, 16))
    assert [op.kind for op in graph.ops if op.target == target] == ["pinned"]


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


@pytest.mark.parametrize(("parts", "written"), [(4, 0), (5, 1)])
def test_a_concatenation_of_many_parts_is_in_memory(parts, written):
    """Inductor realizes a cat of this many where two nodes read them; fewer it reads where they are."""
    xs = [leaf(64, 16) for _ in range(parts)]
    w = leaf(16 * parts, 8)
    found, _ = lifted(lambda *xs: (torch.cat(xs, 1).sin() @ w).sum(), *xs, executor="inductor")
    forward = [op for op in found.graph.ops if op.phase == "forward"]
    assert [op.target for op in forward].count("aten.cat.default") == written
    inside = [str(node.target) for op in forward for node in found.inside[op.name]]
    assert inside.count("aten.cat.default") == 1 - written
