"""Ranks that are not there: what one of them holds, and that the model comes back as it was."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from lowtide.cli.main import main
from lowtide.devices.table import find_device
from lowtide.planner.per_block import find_blocks

WIDTH, BATCH = 64, 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    """Some blocks, a buffer, a parameter that two modules share, and one without dimensions."""

    def __init__(self, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.first, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (self.last(x) * self.scale + self.shift).pow(2).mean()


def make_step(batch_size=BATCH):
    return Model(), torch.ones(batch_size, WIDTH)


def parameter_bytes(plan):
    return plan.graph.bytes_by_kind()["parameter"]


def gathers(plan):
    return [op for op in plan.graph.ops if "all_gather_into_tensor" in op.target]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 8, 48])
def test_a_rank_holds_its_part_of_parameters_gradients_and_optimizer_state(ranks):
    model, x = make_step()
    optimizer = torch.optim.AdamW(model.parameters())
    plan = lowtide.plan(model, x, ranks=ranks, optimizer=optimizer)
    rows = [(-(-p.shape[0] // ranks) if p.dim() else 1, p) for p in model.parameters()]
    shards = sum(4 * count * (p.numel() // max(p.shape[0], 1) if p.dim() else 1) for count, p in rows)
    assert parameter_bytes(plan) == shards
    counts = 4 * len(rows)  # a number of steps for each parameter
    assert plan.graph.fixed["optimizer"] == 2 * shards + counts
    assert sum(v.bytes for v in plan.graph.values if v.kind == "gradient") == shards
    assert [p.shape for group in optimizer.param_groups for p in group["params"]] == [
        p.shape for _, p in rows
    ]


@pytest.mark.slow
def test_the_model_and_the_process_are_as_they_were():
    model, x = make_step()
    kinds = [type(module) for module in model.modules()]
    before = {name: (id(p), p.clone()) for name, p in model.state_dict(keep_vars=True).items()}
    lowtide.plan(model, x, ranks=4, budget="min")
    assert not dist.is_initialized()
    assert [type(module) for module in model.modules()] == kinds
    after = model.state_dict(keep_vars=True)
    assert {name: id(p) for name, p in after.items()} == {
        name: number for name, (number, _) in before.items()
    }
    assert all(torch.equal(after[name], kept) for name, (_, kept) in before.items())
    assert model.last.weight is model.first.weight


@pytest.mark.slow
def test_a_gather_is_a_choice_and_a_reduction_is_none():
    with torch.device("meta"):
        model, x = make_step()
    plan = lowtide.plan(model, x, ranks=8, budget="min", device="H100")
    runs = [step.op for step in plan.schedule.steps if isinstance(step, lowtide.Run)]
    assert {op.kind for op in gathers(plan)} == {"pure"}
    assert any(runs.count(op.name) > 1 for op in gathers(plan))
    scatters = [op for op in plan.graph.ops if "reduce_scatter" in op.target]
    assert scatters
    assert {op.kind for op in scatters} == {"pinned"}
    assert all(runs.count(op.name) == 1 for op in scatters)


@pytest.mark.slow
def test_links_are_what_a_gather_costs():
    model, x = make_step()
    inside, between = (lowtide.plan(model, x, ranks=ranks, device="A100") for ranks in (8, 64))
    device, whole = find_device("A100"), 4 * 4 * WIDTH * WIDTH
    costs = [
        next(op for op in gathers(plan) if op.module == "blocks.0.up").seconds for plan in (inside, between)
    ]
    slowest = [whole * 7 / 8 / device.link, whole * 7 / 8 / (8 * device.network)]
    assert costs == pytest.approx([seconds + device.launch for seconds in slowest])


@pytest.mark.slow
def test_the_notes_say_what_is_assumed_and_what_checkpoints_by_hand_come_to():
    model, x = make_step()
    plan = lowtide.plan(model, x, ranks=8, device="H100")
    assert list(find_blocks(plan.graph)) == ["blocks.0", "blocks.1", "blocks.2"]
    told = "\n".join(plan.notes)
    assert "one of 8 ranks" in told
    assert "360 GB/s between the 8 devices of a node" in told
    assert "checkpointing every block, parameters gathered again: peak" in told


@pytest.mark.parametrize("ranks", [0, 1, True, 2.5, "8"])
def test_less_than_two_ranks_are_refused(ranks):
    with pytest.raises(lowtide.LowtideError, match="whole number >= 2"):
        lowtide.plan(*make_step(8), ranks=ranks)


def test_a_function_is_refused():
    with pytest.raises(lowtide.LowtideError, match="hand in the module itself"):
        lowtide.plan(lambda x: x.sum(), torch.ones(2, requires_grad=True), ranks=2)


def test_a_process_group_that_is_there_is_refused():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(lowtide.LowtideError, match="this process is in one"):
            lowtide.plan(*make_step(8), ranks=2)
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_the_command_line_plans_for_ranks(capsys, tmp_path):
    assert main(["plan", f"{__file__}:make_step", "--ranks", "4", "--budget", "60%", "--json"]) == 0
    plan = lowtide.Plan.from_json(capsys.readouterr().out)
    assert plan.peak <= plan.budget
    assert parameter_bytes(plan) < sum(4 * p.numel() for p in Model().parameters()) / 3
    assert main(["frontier", f"{__file__}:make_step", "--ranks", "4", "--points", "3"]) == 0
    assert "one of 4 ranks" in capsys.readouterr().out


def test_a_graph_file_has_its_ranks_already(tmp_path, capsys):
    graph = lowtide.Graph((), (lowtide.Value("x", 4, "input"),))
    path = tmp_path / "g.json"
    path.write_text(json.dumps(graph.to_dict()))
    assert main(["plan", str(path), "--ranks", "4", "--budget", "1KiB"]) == 2
    assert "--ranks is for a step" in capsys.readouterr().err
