"""Mixtures of experts by grouped products: no size depends on the routing, in single precision either."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide

ROWS, WIDTH, EXPERTS = 12, 8, 4


class Experts(nn.Module):
    """Each row goes through the matrix of its expert, and is weighed."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH))

    def forward(self, x):
        weight, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        ends = functional.one_hot(expert, EXPERTS).sum(0).cumsum(0).to(torch.int32)
        hidden = functional.gelu(functional.grouped_mm(x[order], self.up, offs=ends))
        made = functional.grouped_mm(hidden, self.down, offs=ends) * weight[order, None]
        return torch.empty_like(made).index_copy(0, order, made)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
def test_grouped_products_of_any_dtype_are_captured(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(Experts(), Experts()).to(dtype)
    found = lowtide.verify(model, torch.randn(ROWS, WIDTH, dtype=dtype), budget="min")
    assert found, str(found)
    assert found.predicted == found.measured


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_mixtures_of_transformers_take_the_kernels_of_the_plain_step(kind):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra tools)")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        head_dim=8,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).train()
    ids = torch.randint(32, (2, 8))
    found = lowtide.verify(model, kwargs={"input_ids": ids, "labels": ids, "use_cache": False}, budget="95%")
    assert found, str(found)
    assert found.predicted == found.measured
