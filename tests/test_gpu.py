"""On a GPU: the allocator is the judge of the simulator, and recomputation changes no bit."""

import pytest
import torch

import lowtide
from zoo import ZOO

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device; run on a machine with one"
    ),
]

NAMES = ["gpt", "gpt_dropout", "llama", "vit", "resnet", "densenet", "unet_bilinear", "vgg", "mlp_dropout"]


BLOCK = 2 * 2**20
"""These models take a few MiB; the allocator books a rest of up to 1 MiB with a block."""


def to_cuda(tree):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), tree)


@pytest.fixture(autouse=True)
def repeatable_convolutions(monkeypatch):
    """Without this cuDNN picks kernels whose gradients differ from run to run, capped or not."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def cuda_case(name):
    model, args, kwargs = ZOO[name].make()
    return model.cuda(), to_cuda(args), to_cuda(kwargs)


def half_way(model, args, kwargs):
    """A budget half way between what is there before the step and its uncapped peak."""
    lowtide.cap(model, "100%")
    model(*args, **kwargs)
    plan = lowtide.plan_of(model)
    lowtide.uncap(model)
    fixed = plan.graph.fixed_bytes + sum(
        v.bytes for v in plan.graph.values if v.kind in ("parameter", "input")
    )
    return (plan.uncapped.peak + fixed) // 2


@pytest.mark.parametrize("name", NAMES)
def test_step_is_exact_and_peak_as_predicted(name):
    model, args, kwargs = cuda_case(name)
    for budget in (half_way(model, args, kwargs), "min"):
        try:
            found = lowtide.verify(model, *args, kwargs=kwargs, budget=budget)
        except lowtide.BudgetTooSmall as error:
            found = lowtide.verify(model, *args, kwargs=kwargs, budget=error.smallest + BLOCK)
        print(name, found)
        assert found.exact, found
        assert abs(found.measured - found.predicted) <= max(0.01 * found.predicted, BLOCK), found


def test_other_models_on_the_device_are_counted():
    model, args, kwargs = cuda_case("mlp")
    alone = _peak(model, args, kwargs)
    other = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    beside = _peak(model, args, kwargs)
    assert abs(beside - alone - other.numel()) <= BLOCK


def _peak(model, args, kwargs):
    lowtide.cap(model, "100%")
    model(*args, **kwargs).backward()
    peak = lowtide.plan_of(model).peak
    lowtide.uncap(model)
    model.zero_grad()
    return peak


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_grad_scaler(dtype):
    model, args, kwargs = cuda_case("gpt_dropout")

    class Cast(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, *args, **kwargs):
            with torch.autocast("cuda", dtype):
                return self.inner(*args, **kwargs) * 256.0

    assert lowtide.verify(Cast(), *args, kwargs=kwargs, budget="min").exact
