"""Who holds what a step returned, on a GPU: its allocator's peak is the predicted one."""

import pytest
import torch
from torch import nn

import lowtide
from lowtide.plans.returning import let_go_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here"),
]

MIB = 1 << 20


class Head(nn.Module):
    """Layers, and a head whose logits are returned beside the loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8)))
        self.head = nn.Linear(512, 8192)

    def forward(self, x, y):
        logits = self.head(self.layers(x))
        return {"loss": nn.functional.cross_entropy(logits.float(), y), "logits": logits}


def letting_go(model, *batch):
    model(*batch)["loss"].backward()


def holding(model, *batch):
    out = model(*batch)
    out["loss"].backward()


@pytest.mark.parametrize("loop", [letting_go, holding])
@pytest.mark.parametrize("budget", ["60GiB", "min"])
def test_the_peak_is_the_predicted_one(loop, budget):
    model = Head().to("cuda", torch.bfloat16)
    batch = torch.rand(2048, 512, device="cuda", dtype=torch.bfloat16), torch.arange(2048, device="cuda")
    lowtide.cap(model, budget)
    for _ in range(3):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        loop(model, *batch)
        torch.cuda.synchronize()
    plan, taken = lowtide.plan_of(model), torch.cuda.max_memory_allocated()
    assert bool(let_go_of(plan.graph)) == (loop is letting_go)
    assert taken <= plan.allocated
    assert plan.allocated - taken < MIB


def test_a_caller_who_holds_after_all_is_planned_for(capsys):
    model = Head().to("cuda", torch.bfloat16)
    batch = torch.rand(2048, 512, device="cuda", dtype=torch.bfloat16), torch.arange(2048, device="cuda")
    lowtide.cap(model, "60GiB")
    for loop in (letting_go, letting_go, holding, holding, letting_go):
        model.zero_grad()
        loop(model, *batch)
    assert not let_go_of(lowtide.plan_of(model).graph)
    assert capsys.readouterr().err.count("still held when its backward begins") == 1
