"""The baselines of the benchmarks: torch's own memory budget, and a checkpoint around every block."""

import functools
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lowtide
from graphs import Step, cnn
from lowtide.planner.per_block import find_blocks, per_block_schedule
from lowtide.plans.graph import Value
from lowtide.plans.keep_all import keep_all
from lowtide.plans.order import first_order
from lowtide.plans.schedule import Run
from lowtide.plans.simulator import simulate
from torch_budget import partitioners, torch_budget_schedules

pytestmark = pytest.mark.slow


class Decoder(nn.Module):
    """A pre-norm block with causal attention."""

    def __init__(self, width=32, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Residual(nn.Module):
    """Two convolutions and a shortcut, the last ReLU after the sum."""

    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        changed = inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changed else nn.Identity()

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.shortcut(x))


class Loss(nn.Module):
    """A network and its cross-entropy over the last dimension."""

    def __init__(self, *layers):
        super().__init__()
        self.net = nn.Sequential(*layers)

    def forward(self, x, target):
        return functional.cross_entropy(self.net(x).flatten(0, -2), target.flatten())


def gpt():
    blocks = [Decoder() for _ in range(3)]
    model = Loss(nn.Embedding(64, 32), *blocks, nn.LayerNorm(32), nn.Linear(32, 64, bias=False))
    return model, (torch.randint(64, (4, 16)), torch.randint(64, (4, 16)))


def resnet():
    blocks = [Residual(8, 8), Residual(8, 8), Residual(8, 16, 2), Residual(16, 16)]
    stem = [nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    model = Loss(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return model, (torch.randn(4, 3, 32, 32), torch.randint(10, (4,)))


class Dropping(nn.Module):
    """Residual blocks with dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + functional.dropout(functional.gelu(layer(x)), 0.1)
        return x.square().mean()


class Counting(nn.Module):
    """A buffer is read, and overwritten: its reader may not run again."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("shift", torch.ones(64, 8))

    def forward(self, x):
        y = self.inner(x) + self.shift
        self.shift.mul_(0.9)
        return self.outer(y.tanh()).square().mean()


STEPS = {
    "gpt": gpt,
    "resnet": resnet,
    "dropout": lambda: (Dropping(), (torch.randn(16, 32),)),
    "written buffer": lambda: (Counting(), (torch.randn(64, 8),)),
}
COSTLY = ("convolution", "addmm", "attention")


@functools.cache
def partitions(name, budgets=(1.0, 0.5, 0.0)):
    model, batch = STEPS[name]()
    return torch_budget_schedules(model, batch, budgets=budgets)


def runs_again(schedule):
    seen = Counter(step.op for step in schedule.steps if isinstance(step, Run))
    return {name for name, count in seen.items() if count > 1}


def kept(graph, schedule):
    """What waits for the backward, besides what the caller holds."""
    there = set()
    for step in schedule.forward:
        there.update(graph.op[step.op].writes) if isinstance(step, Run) else there.remove(step.value)
    return {name for name in there if graph.value[name].droppable}


@pytest.mark.parametrize("name", STEPS)
def test_torch_gives_a_schedule_for_every_budget(name):
    graph, found = partitions(name)
    assert (found.reason, found.unmapped, list(found)) == ("", 0, [1.0, 0.5, 0.0])
    once = set().union(*first_order(graph))
    for schedule in found.values():
        simulate(graph, schedule)
        assert {step.op for step in schedule.steps if isinstance(step, Run)} == once


@pytest.mark.parametrize("name", STEPS)
def test_graph_is_the_one_that_plan_makes(name):
    graph, _ = partitions(name)
    model, batch = STEPS[name]()
    assert graph.fingerprint == lowtide.plan(model, *batch, device="H200").graph.fingerprint


def test_model_on_the_meta_device_gives_the_same():
    graph, found = partitions("resnet")
    model, batch = resnet()
    fakes = [tensor.to("meta") for tensor in batch]
    same, again = torch_budget_schedules(model.to("meta"), fakes, budgets=(0.5,))
    assert same.fingerprint == graph.fingerprint
    assert again[0.5] == found[0.5]


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_more_budget_saves_more_and_runs_less_again(name):
    graph, found = partitions(name)
    saved = [sum(graph.value[v].bytes for v in kept(graph, found[b])) for b in (0.0, 0.5, 1.0)]
    extra = [simulate(graph, found[b]).extra for b in (0.0, 0.5, 1.0)]
    assert saved[0] < saved[1] < saved[2]
    assert extra[0] > extra[1] > extra[2]


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_whole_budget_runs_no_costly_op_again(name):
    graph, found = partitions(name)
    again = [graph.op[op].target for op in runs_again(found[1.0])]
    assert not [target for target in again if any(word in target for word in COSTLY)]
    assert simulate(graph, found[1.0]).peak <= simulate(graph, keep_all(graph)).peak


@pytest.mark.parametrize("name", ["gpt", "resnet", "dropout"])
def test_no_budget_saves_the_inputs_alone(name):
    graph, found = partitions(name)
    assert kept(graph, found[0.0]) == set()
    needed = {v for op in graph.ops if op.phase == "backward" for v in op.reads}
    forward = [graph.op[op] for op in first_order(graph)[0] if graph.op[op].kind != "pinned"]
    assert {op.name for op in forward if needed.intersection(op.writes)} <= runs_again(found[0.0])


def test_dropout_runs_again_with_its_op():
    graph, found = partitions("dropout")
    random = {op.name for op in graph.ops if op.kind == "random"}
    assert len(random) == 4
    assert random <= runs_again(found[0.0])
    assert not random & runs_again(found[1.0])


def test_attention_is_as_costly_as_on_a_gpu():
    graph, found = partitions("gpt", (0.6,))
    attention = {op.name for op in graph.ops if "attention" in op.target and op.phase == "forward"}
    assert len(attention) == 3
    assert not attention & runs_again(found[0.6])


def test_op_that_may_run_only_once_is_reported():
    graph, found = partitions("written buffer")
    assert found.pinned > 0
    assert not runs_again(found[0.0]) & {op.name for op in graph.ops if op.kind == "pinned"}


def test_failure_of_torch_is_told_in_words():
    model, batch = STEPS["dropout"]()
    with patch.object(partitioners, "solve_min_cut", side_effect=RuntimeError("no cut\nat all")):
        _, found = torch_budget_schedules(model, batch, budgets=(0.0, 0.5))
    assert (found, found.reason) == ({}, "RuntimeError: no cut")


def test_halves_that_lack_ops_are_refused():
    partition = partitioners.min_cut_rematerialization_partition
    model, batch = STEPS["dropout"]()

    def forward_twice(*args, **kwargs):
        return (partition(*args, **kwargs)[0],) * 2

    with patch.object(partitioners, "min_cut_rematerialization_partition", forward_twice):
        _, found = torch_budget_schedules(model, batch, budgets=(0.5,))
    assert found == {}
    assert "lack" in found.reason


def test_budget_beyond_one_is_refused():
    with pytest.raises(lowtide.LowtideError, match=r"from 0 to 1, not 1\.5"):
        torch_budget_schedules(nn.Linear(2, 2), (torch.ones(2, 2),), budgets=(1.0, 1.5))


def small_step(pinned=False):
    """A stem, two blocks and a head; the backward of linear reads its inputs, that of tanh its output."""
    step = Step()
    last = step.value("x", 4, "input")
    needs = {}
    weight = step.value("w", 1, "parameter")
    (last,) = step.op("stem", [last, weight], [4], module="net.0")
    for block in (1, 2):
        for part in ("linear", "tanh", "sum"):
            name = f"{part}{block}"
            kind = "pinned" if pinned and name == "linear1" else "pure"
            reads = [last, weight] if part == "linear" else [last]
            (last,) = step.op(name, reads, [4], module=f"net.{block}.{part}", kind=kind)
            needs[name] = [last] if part == "tanh" else reads if part == "linear" else []
    (last,) = step.op("head", [last, weight], [1], module="net.3")
    return step.graph(last, needs={**needs, "head": ["w"]})


def backward_runs(schedule):
    return [step.op for step in schedule.backward if isinstance(step, Run)]


def test_each_block_runs_again_before_its_backward():
    graph = small_step()
    schedule = per_block_schedule(graph)
    simulate(graph, schedule)
    runs = backward_runs(schedule)
    forward = [name for name in runs if graph.op[name].phase == "forward"]
    assert forward == ["linear2", "tanh2", "linear1", "tanh1"]  # the sums come after what is needed
    assert runs.index("tanh2.bw") == runs.index("tanh2") + 1
    assert runs.index("tanh1.bw") == runs.index("tanh1") + 1
    assert kept(graph, schedule) == {"stem", "sum1"}  # what enters the blocks


def test_op_that_may_run_only_once_waits():
    graph = small_step(pinned=True)
    schedule = per_block_schedule(graph)
    simulate(graph, schedule)
    assert runs_again(schedule) == {"linear2", "tanh2", "tanh1"}
    assert kept(graph, schedule) == {"linear1", "stem", "sum1"}


def test_blocks_are_members_of_the_outermost_lists():
    step = Step()
    last = step.value("x", 4, "input")
    step.value("w", 1, "parameter")
    for path in (
        "stem",
        "enc.0",
        "enc.1",
        "enc.1.parts.0",
        "enc.1.parts.1",
        "act.0",
        "act.1",
        "dec.0",
        "dec.1",
    ):
        for index in range(1 if "act" in path else 2):
            (last,) = step.op(f"{path}/{index}", [last, "w"], [4], module=path)
    graph = step.graph(last)
    assert list(find_blocks(graph)) == ["enc.0", "enc.1", "dec.0", "dec.1"]
    assert len(find_blocks(graph)["enc.1"]) == 6
    assert list(find_blocks(graph, pattern=r"enc\.\d")) == ["enc.0", "enc.1"]
    assert list(find_blocks(graph, pattern="nothing")) == []
    with pytest.raises(lowtide.LowtideError, match="no regular expression"):
        find_blocks(graph, pattern="(")


def test_graph_without_blocks_has_no_schedule():
    assert per_block_schedule(cnn(4)) is None
    assert per_block_schedule(lowtide.Graph((), (Value("x", 1, "input"),))) is None
    plain = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(8, 8), nn.ReLU())))
    assert per_block_schedule(lowtide.plan(plain, torch.ones(4, 8)).graph) is None


KINDS = ("convolution", "batch_norm", "relu", "addmm", "layer_norm", "gelu", "attention", "add.Tensor")


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the forward ops that torch runs, by kind."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count.update(kinds(str(function)))
        return function(*args, **(kwargs or {}))


def kinds(target):
    return [kind for kind in KINDS if kind in target and "backward" not in target]


def counted_backward(model, batch):
    loss = model(*batch)
    with Seen() as seen:
        loss.backward()
    return seen.count


@pytest.mark.parametrize("build", [gpt, resnet])
def test_block_runs_the_ops_that_torch_checkpoint_runs(build):
    model, batch = build()
    graph = lowtide.plan(model, *batch).graph
    schedule = per_block_schedule(graph)
    ours = Counter(kind for op in runs_again(schedule) for kind in kinds(graph.op[op].target))
    plain = counted_backward(model, batch)
    for block in model.modules():
        if isinstance(block, Decoder | Residual):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    assert ours == counted_backward(model, batch) - plain
    assert simulate(graph, schedule).peak < simulate(graph, keep_all(graph)).peak
