"""Splitting over rows on a GPU: predicted and measured peak, gradients against double precision."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:\\s*Online softmax is disabled"),  # torch.compile's own
]

VOCABULARY, WIDTH = 32_000, 512


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x):
        h = self.embed(x)
        h = h + self.down(functional.gelu(self.up(h)))
        logits = self.head(h)
        loss = functional.cross_entropy(logits.view(-1, VOCABULARY).float(), x.roll(-1, 1).view(-1))
        return loss, logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("executor", ["eager", "inductor"])
def test_a_head_in_chunks(dtype, executor):
    torch.manual_seed(0)
    model = Head().to("cuda", dtype)
    x = torch.randint(VOCABULARY, (4, 1024), device="cuda")
    found = lowtide.verify(model, x, budget="min", split=True, executor=executor)
    assert found.plan.split
    assert found.fits, str(found)
    assert found.verdict == "to rounding", str(found)
    assert found.rounding.capped <= 1.5 * found.rounding.plain


def test_products_are_added_in_single_precision():
    """The kernel for factors in half precision is there, and takes no tensor for the product."""
    from lowtide.capture.rewrites.by_parts import add_product

    left, right = (
        torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in ((4096, 512), (512, 1024))
    )
    whole = torch.zeros(4096, 1024, device="cuda")
    add_product(whole, left, right)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    add_product(whole, left, right)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    torch.testing.assert_close(whole, 2 * (left.float() @ right.float()), rtol=1e-2, atol=1e-2)
    assert taken < whole.numel()
