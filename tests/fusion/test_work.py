"""What loops compute: it counts where it takes longer than what they move."""

from collections import Counter

import pytest
import torch
from torch import nn

import lowtide
from lowtide.fusion.work import PER_BYTE, as_traffic, instructions
from lowtide.plans.schedule import Run
from traces import lifted

ROWS, WIDTH = 512, 256
WHOLE = ROWS * WIDTH * 2


def traffic_of(function):
    """What the loop between two products moves, bfloat16 in and out."""
    first, last = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(2))
    x = torch.rand(ROWS, WIDTH, dtype=torch.bfloat16)
    found, _ = lifted(lambda x: last(function(first(x))).sum(), x, executor="inductor")
    loops = [op for op in found.graph.ops if op.phase == "forward" and op.name in found.traffic]
    (loop,) = [op for op in loops if sum(found.graph.value[name].bytes for name in op.writes) == WHOLE]
    nodes = [*found.inside[loop.name], found.node_of[loop.name]]
    return found.traffic[loop.name], sum(map(instructions, nodes)) / (ROWS * WIDTH)


def test_a_sum_costs_what_it_moves():
    moved, each = traffic_of(lambda x: x + 1)
    assert moved == 2 * WHOLE
    assert each <= 4


@pytest.mark.parametrize("function", [nn.functional.gelu, lambda x: x.sin().cos()], ids=["gelu", "sin"])
def test_what_computes_for_long_costs_more_than_it_moves(function):
    moved, each = traffic_of(function)
    assert each > 4 * PER_BYTE  # an element is read and written, two bytes each
    assert moved > 2 * WHOLE
    assert moved == pytest.approx(each * ROWS * WIDTH / PER_BYTE, rel=0.01)


@pytest.mark.slow
def test_a_mask_is_kept_before_numbers_are_drawn_again():
    """It takes half of the bytes that others do, and many times less to read than to draw."""
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
    model = nn.Sequential(*layers).to(torch.bfloat16)
    x = torch.empty(16384, 256, dtype=torch.bfloat16, device="meta")
    how = {"executor": "inductor", "device": "H200"}
    whole = lowtide.plan(model.to("meta"), x, **how).peak
    plan = lowtide.plan(model, x, **how, budget=int(0.65 * whole))
    runs = Counter(step.op for step in plan.schedule.steps if isinstance(step, Run))
    masks = [op.name for op in plan.graph.ops if plan.graph.value[op.writes[0]].bytes == 16384 * 256]
    assert len(masks) == len(layers)
    assert max(runs.values()) > 1
    assert all(runs[name] == 1 for name in masks)


def test_nothing_is_computed_by_nothing():
    assert as_traffic([]) == 0
