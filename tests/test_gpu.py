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


def to_cuda(tree):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), tree)


@pytest.mark.parametrize("budget", ["70%", "min"])
@pytest.mark.parametrize("name", NAMES)
def test_step_is_exact_and_peak_as_predicted(name, budget):
    model, args, kwargs = ZOO[name].make()
    model, args, kwargs = model.cuda(), to_cuda(args), to_cuda(kwargs)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if budget != "min":
        lowtide.cap(model, "100%")
        model(*args, **kwargs)
        peak = lowtide.plan_of(model).uncapped.peak
        lowtide.uncap(model)
        budget = max(int(peak * 0.7), 1)
    try:
        found = lowtide.verify(model, *args, kwargs=kwargs, budget=budget)
    except lowtide.BudgetTooSmall as error:
        found = lowtide.verify(model, *args, kwargs=kwargs, budget=error.smallest)
    finally:
        torch.use_deterministic_algorithms(False)
    print(name, budget, found)
    assert found.exact, found
    assert abs(found.measured - found.predicted) <= 0.01 * found.predicted, found
