"""A capped step watched while it runs: the bytes after each run are those that the plan says."""

import pytest
import torch
from torch import nn

from lowtide import cap, plan_of, watch
from lowtide.plans.schedule import Run


class Loss(nn.Module):
    def forward(self, x):
        return x.square().mean()


def dense() -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6))
    return nn.Sequential(*blocks, Loss())


def convolutional() -> nn.Module:
    blocks = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4))
    return nn.Sequential(*blocks, Loss())


def capped(make, shape, budget):
    """A capped step, its plan, and a call of it from where nothing has a gradient."""
    model, x = cap(make(), budget), torch.randn(shape)
    model(x).backward()
    model.zero_grad()
    return lambda: model(x).backward(), plan_of(model)


def runs_of(plan):
    steps = enumerate(plan.schedule.steps)
    return {index: plan.graph.op[step.op] for index, step in steps if isinstance(step, Run)}


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["min", "1GiB"])
def test_bytes_after_every_run_are_as_predicted(budget):
    step, plan = capped(dense, (32, 64), budget)
    found = watch(step, plan)
    assert list(found.points) == list(runs_of(plan))
    for index, op in runs_of(plan).items():
        assert found.points[index] == plan.timeline.resident[index] - op.workspace, op.name
    assert found.peak == plan.peak


@pytest.mark.slow
def test_runs_that_another_kernel_serves_are_passed_over():
    step, plan = capped(convolutional, (4, 8, 8, 8), "min")
    found, runs = watch(step, plan), runs_of(plan)
    missed = [op for index, op in runs.items() if index not in found.points]
    assert {op.target for op in missed} == {"batch_norm"}
    assert len(missed) <= len(runs) // 4
    for index, size in found.points.items():
        assert size == plan.timeline.resident[index] - runs[index].workspace, runs[index].name


def test_a_step_that_is_not_the_plan_s_has_few_points():
    _, plan = capped(dense, (32, 64), "1GiB")
    assert len(watch(lambda: nn.functional.gelu(torch.ones(3)), plan).points) == 1
