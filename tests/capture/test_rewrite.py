"""Each pass over the joint graph: its effect, and that the graph still computes the same."""

import pytest
import torch
from torch import fx, nn

import lowtide
from lowtide.capture.rewrites import batchnorm
from lowtide.capture.rewrites.common import (
    drop_copies,
    drop_idle_views,
    keep_mutated_inputs,
    prune_tangents,
    remove_dead,
    separate_tangents,
    stack_selected,
)
from traces import joint, lifted

aten = torch.ops.aten


def targets(module):
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def results(module):
    """What the graph gives on made-up inputs, and what it leaves in them."""
    torch.manual_seed(1)
    inputs = [made_up(node.meta["val"]) for node in module.graph.find_nodes(op="placeholder")]
    return [*run(module, inputs), *inputs]


def run(module, inputs):
    module.graph.lint()
    return fx.Interpreter(module).run(*inputs, enable_io_processing=False)


def made_up(fake):
    if not fake.dtype.is_floating_point:
        return torch.zeros(fake.shape, dtype=fake.dtype)
    return torch.rand(fake.shape, dtype=fake.dtype)


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        assert a is b is None or torch.equal(a, b)


@pytest.fixture
def w():
    return nn.Parameter(torch.randn(6, 4))


def test_batch_norm_is_fused():
    module, _, _ = joint(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(6, 4))
    before = results(module)
    batchnorm.fuse(module.graph)
    assert_same(results(module), before)
    assert aten._native_batch_norm_legit_functional.default not in targets(module)
    assert targets(module).count(batchnorm.batch_norm) == 1
    assert targets(module).count(aten.copy_.default) == 1, "only num_batches_tracked is copied"


def test_fused_batch_norm_runs_again_without_its_statistics():
    x, weight, bias = torch.randn(6, 4), torch.rand(4), torch.rand(4)
    mean, var = torch.zeros(4), torch.ones(4)
    first = batchnorm.batch_norm(x, weight, bias, mean, var, 0.1, 1e-5)
    assert not torch.equal(mean, torch.zeros(4))
    kept = mean.clone(), var.clone()
    again = batchnorm.RECOMPUTED_BY[batchnorm.batch_norm](x, weight, bias, mean, var, 0.1, 1e-5)
    assert_same(first, again)
    assert_same((mean, var), kept)


def test_batch_norm_without_statistics_or_in_eval_is_left_alone():
    for norm in (nn.BatchNorm1d(4, track_running_stats=False), nn.BatchNorm1d(4).eval()):
        module, _, _ = joint(norm, torch.randn(6, 4))
        before = targets(module)
        batchnorm.fuse(module.graph)
        assert targets(module) == before


def test_fused_backward_reads_no_statistics():
    module, _, _ = joint(nn.BatchNorm1d(4), torch.randn(6, 4))
    batchnorm.fuse(module.graph)
    (backward,) = module.graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default)
    assert backward.args[3:5] == (None, None)


class Remembers(nn.Module):
    """Reads a buffer, then overwrites it."""

    def __init__(self, *shape):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 4))
        self.register_buffer("last", torch.zeros(shape))

    def forward(self, x):
        y = (self.w * x + self.last).exp()
        self.last.copy_(x.sum())
        return y.sum()


def clones_of_buffer(*shape):
    module, primals, tangents = joint(Remembers(*shape), torch.randn(6, 4))
    before = results(module)
    keep_mutated_inputs(module.graph, primals, tangents)
    assert_same(results(module), before)
    clones = module.graph.find_nodes(op="call_function", target=aten.clone.default)
    (copy,) = module.graph.find_nodes(op="call_function", target=aten.copy_.default)
    assert set(copy.args[0].users) == {copy, *(clones or set(copy.args[0].users))}
    return len(clones)


def test_overwritten_input_is_cloned_for_readers_that_make_much_more():
    assert clones_of_buffer(1) == 1
    assert clones_of_buffer(6, 4) == 0


def test_overwritten_input_is_cloned_for_the_backward():
    module, primals, tangents = joint(Remembers(6, 4), torch.randn(6, 4))
    (copy,) = module.graph.find_nodes(op="call_function", target=aten.copy_.default)
    (exp_backward,) = tangents[0].users
    with module.graph.inserting_after(exp_backward):
        reader = module.graph.call_function(aten.mul.Tensor, (exp_backward, copy.args[0]))
    keep_mutated_inputs(module.graph, primals, tangents)
    assert reader.args[1].target is aten.clone.default
    assert reader.args[1].args == copy.args[:1]


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 4))
        self.register_buffer("seen", torch.zeros(6, 4))

    def forward(self, x):
        self.seen.add_(x)
        return (self.w * x).sum()


def test_overwritten_input_that_nothing_else_reads_is_not_cloned():
    module, primals, tangents = joint(Counts(), torch.randn(6, 4))
    keep_mutated_inputs(module.graph, primals, tangents)
    assert aten.clone.default not in targets(module)


def test_idle_views_are_dropped(w):
    module, _, _ = joint(lambda x: (x.detach() @ w.t()).tanh().sum(), torch.randn(5, 4))
    assert aten.detach.default in targets(module)
    before = results(module)
    drop_idle_views(module.graph)
    assert_same(results(module), before)
    assert aten.detach.default not in targets(module)


def test_transpose_of_a_transpose_is_dropped(w):
    module, _, _ = joint(lambda x: x @ w.t().tanh().t().t(), torch.randn(5, 4))
    before, count = results(module), targets(module).count(aten.t.default)
    drop_idle_views(module.graph)
    assert_same(results(module), before)
    assert targets(module).count(aten.t.default) < count


def scattered(module):
    """What is written into parts of tensors."""
    nodes = module.graph.find_nodes(op="call_function", target=aten.slice_scatter.default)
    return [node.args[1].target for node in nodes]


def write_half(w):
    def step(x):
        y = x * w
        y[:, :2] = x[:, :2] * 3
        return y.exp().sum()

    return step


def test_write_into_a_part_reads_its_source_directly(w):
    module, _, _ = joint(write_half(w), torch.randn(6, 4))
    assert scattered(module)[0] is aten.copy.default
    before = results(module)
    drop_copies(module.graph)
    assert_same(results(module), before)
    assert scattered(module)[0] is aten.mul.Tensor


def test_write_of_one_row_into_many_is_expanded(w):
    def step(x):
        y = x * w
        y[:, :2] = x[0, :2]
        return y.exp().sum()

    module, _, _ = joint(step, torch.randn(6, 4))
    before = results(module)
    drop_copies(module.graph)
    assert_same(results(module), before)
    assert scattered(module)[0] is aten.expand.default


def test_write_of_another_dtype_keeps_its_copy(w):
    def step(x):
        y = x * w
        y[:, :2] = x[:, :2].double()
        return y.exp().sum()

    module, _, _ = joint(step, torch.randn(6, 4))
    before = results(module)
    drop_copies(module.graph)
    assert_same(results(module), before)
    assert scattered(module)[0] is aten.copy.default


def unpack(w, used):
    def step(x):
        parts = (x * w).view(6, 2, 2).permute(1, 0, 2) if used == 2 else (x * w).t()[:3]
        first, second, *_ = parts
        return (first * second.exp()).sum()

    return step


def test_unpacked_tensor_is_stacked(w):
    module, _, _ = joint(unpack(w, used=2), torch.randn(6, 4))
    assert targets(module).count(aten.select_backward.default) == 2
    before = results(module)
    stack_selected(module.graph)
    remove_dead(module.graph)
    assert_same(results(module), before)
    assert targets(module).count(aten.stack.default) == 1
    assert aten.select_backward.default not in targets(module)


def test_tensor_that_is_used_in_part_is_not_stacked(w):
    module, _, _ = joint(unpack(w, used=3), torch.randn(6, 4))
    before = targets(module)
    stack_selected(module.graph)
    remove_dead(module.graph)
    assert targets(module) == before


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        y = self.body(x).tanh()
        return self.left(y), self.right(y)


def gradients(module):
    """By the module's outputs: two of the forward, then one gradient per primal."""
    (output,) = module.graph.find_nodes(op="output")
    return list(output.args[0])[2:]


def test_missing_tangent_is_taken_out():
    module, _, tangents = joint(TwoHeads(), torch.randn(6, 4))
    assert gradients(module).count(None) == 1
    plain = results(module)
    prune_tangents(module.graph, tangents[1:], tangents)
    remove_dead(module.graph)
    assert gradients(module).count(None) == 3, "the batch, and weight and bias of the right head"
    assert not tangents[1].users
    left_only = results(module)
    assert_same(left_only[:2], plain[:2])


def test_sum_with_a_missing_gradient_is_the_other_one():
    module, _, tangents = joint(TwoHeads(), torch.randn(6, 4))
    remove_dead(module.graph)
    count = len(targets(module))
    prune_tangents(module.graph, tangents[:1], tangents)
    remove_dead(module.graph)
    assert len(targets(module)) < count - 3
    assert aten.full.default not in targets(module)


def test_sum_with_other_strides_than_the_gradient_that_comes_is_a_copy_that_goes_on(w):
    def step(x):
        y = (x * w).tanh()
        return y.exp(), y.sum(), y.mean(1)  # whose gradients are added up from the last to the first

    module, _, tangents = joint(step, torch.randn(6, 4))
    given = {
        node.name: torch.ones(node.meta["val"].shape) for node in module.graph.find_nodes(op="placeholder")
    }
    missing = [tangents[0], tangents[2]]
    for tangent in missing:
        given[tangent.name].zero_()
    expected = run(module, given.values())
    prune_tangents(module.graph, missing, tangents)
    remove_dead(module.graph)
    assert_same(run(module, given.values()), expected)
    assert torch.count_nonzero(expected[-1])


def test_tangents_have_storages_of_their_own_size(w):
    _, _, tangents = joint(lambda x: (x * w).split([2, 1, 1], dim=1), torch.randn(6, 4))
    separate_tangents(tangents)
    sizes = [node.meta["val"].untyped_storage().nbytes() for node in tangents]
    assert sizes == [4 * (5 * node.meta["val"].stride(0) + node.meta["val"].shape[1]) for node in tangents]


def test_missing_gradient_that_meets_another_is_zero(w):
    def step(x):
        y = x * w
        return torch.split(y.exp(), 3)[0], y.tanh()[:3].clone(), torch.cat([y, y]).sin()

    module, _, tangents = joint(step, torch.randn(6, 4))
    given = {
        node.name: torch.ones(node.meta["val"].shape) for node in module.graph.find_nodes(op="placeholder")
    }
    given[tangents[2].name].zero_()
    expected = run(module, given.values())
    prune_tangents(module.graph, tangents[2:], tangents)
    remove_dead(module.graph)
    assert_same(run(module, given.values()), expected)


def test_nothing_is_pruned_when_all_come():
    module, _, tangents = joint(TwoHeads(), torch.randn(6, 4))
    before = targets(module)
    prune_tangents(module.graph, [], tangents)
    assert targets(module) == before


def test_dead_nodes_go_and_writes_into_inputs_stay():
    module, _, _ = joint(Counts(), torch.randn(6, 4))
    (output,) = module.graph.find_nodes(op="output")
    with module.graph.inserting_before(output):
        dead = module.graph.call_function(aten.exp.default, (output.args[0][0],))
        module.graph.call_function(aten.sin.default, (dead,))
    remove_dead(module.graph)
    assert not {aten.exp.default, aten.sin.default} & set(targets(module))
    assert aten.copy_.default in targets(module)


class Logits(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, x):
        y = self.net(x)
        return y.square().mean(), y


def test_step_with_a_loss_is_pruned_to_its_loss():
    _, trace = lifted(Logits(), torch.randn(6, 4))
    loss, logits = trace.tangents
    assert trace.expected == [loss]
    assert not logits.users
    _, trace = lifted(Logits(), torch.randn(6, 4), differentiate="all")
    assert trace.expected == trace.tangents
    assert all(tangent.users for tangent in trace.tangents)


def test_views_of_one_output_have_tangents_of_their_own():
    net = torch.nn.Linear(8, 16)
    graph = lowtide.plan(lambda x: net(x).chunk(2, 1), torch.ones(4, 8)).graph
    tangents = [value for value in graph.values if value.kind == "tangent"]
    last_number, contiguous = 4 * (3 * 16 + 8), 4 * 4 * 8  # torch 2.11 makes tangents contiguous
    assert [tangent.bytes for tangent in tangents] in ([last_number] * 2, [contiguous] * 2)
