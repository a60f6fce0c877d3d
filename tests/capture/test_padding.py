"""What torch pads for a product: written so once and read so by all, or left as it was."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import lowtide
from lowtide.capture.rewrites.padding import pad_once

aten = torch.ops.aten


def rewritten(function, *shapes):
    """The graph of a function, rewritten; its results must stay what they are."""
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    module = make_fx(function, tracing_mode="fake")(*inputs)
    expected = function(*inputs)
    pad_once(module.graph)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(module(*inputs), expected)
    return module.graph


def sources(graph):
    """What pads read, and who else reads that."""
    pads = graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    return [user.target for pad in pads for user in pad.args[0].users if user is not pad]


def head(x, weight, *, amounts=(0, 3), value=0.0, seen=torch.sin):
    """The gradient of logits, what it gives for the input, and for weight and bias."""
    logits = seen(x)
    padded = aten.constant_pad_nd(logits, list(amounts), value)
    right = aten.constant_pad_nd(weight, [0, 0, 0, padded.shape[1] - weight.shape[0]])
    left = aten.mm(padded, right)[: x.shape[0]]
    return left, aten.mm(aten.permute(logits, [1, 0]), left), logits.sum(0), aten.t(logits) @ left


@pytest.mark.parametrize("amounts", [(0, 3), (0, 3, 0, 0)])
def test_everything_reads_the_padded_matrix(amounts):
    graph = rewritten(lambda x, w: head(x, w, amounts=amounts), (8, 13), (13, 4))
    assert sources(graph) == []
    products = graph.find_nodes(op="call_function", target=aten.mm.default)
    assert [tuple(node.meta["val"].shape) for node in products] == [(8, 4), (16, 4), (16, 4)]


@pytest.mark.parametrize(
    ("how", "shapes"),
    [
        pytest.param({"seen": lambda x: x}, [(8, 13), (13, 4)], id="an input"),
        pytest.param({"seen": lambda x: aten.mm(x, x)}, [(13, 13), (13, 4)], id="a product"),
        pytest.param({"amounts": (3, 0)}, [(8, 13), (13, 4)], id="zeros in front"),
        pytest.param({"amounts": (0, 3, 0, 2)}, [(8, 13), (13, 4)], id="more rows"),
        pytest.param({"value": 1.0}, [(8, 13), (13, 4)], id="with ones"),
    ],
)
def test_others_stay(how, shapes):
    graph = rewritten(lambda x, w: head(x, w, **how), *shapes)
    assert aten.permute.default in sources(graph)


def test_a_result_of_the_step_stays():
    def step(x, w):
        logits = x.sin()
        return logits, aten.mm(aten.constant_pad_nd(logits, [0, 3]), w)

    assert sources(rewritten(step, (8, 13), (16, 4))) == ["output"]


def test_what_else_reads_a_padded_matrix_keeps_it_apart():
    def step(x, w):
        logits = x.sin()
        padded = aten.constant_pad_nd(logits, [0, 3])
        return aten.mm(padded, w), padded.cos(), logits.sum()

    assert sources(rewritten(step, (8, 13), (16, 4))) == [aten.sum.default]


class Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = torch.nn.Embedding(253, 16), torch.nn.Linear(16, 253)
        self.out.weight = self.words.weight

    def forward(self, ids, targets):
        logits = self.out(torch.tanh(self.words(ids)))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.inductor
def test_a_head_that_torch_pads(monkeypatch):
    """torch pads on a GPU alone; here it is told to, as it does there: an odd sum, an odd width."""

    def should_pad(match, left, right, *_, **__):
        return bool(left.shape[-1] % 4 or right.shape[-1] % 4)

    monkeypatch.setattr("torch._inductor.fx_passes.pad_mm.should_pad", should_pad)
    torch.manual_seed(0)
    model, ids = Head(), torch.randint(253, (2, 4, 9))
    wanted = list(model.parameters())
    expected = torch.autograd.grad(model(*ids), wanted)
    capped = lowtide.cap(model, "1GiB", executor="inductor")
    for mine, plain in zip(torch.autograd.grad(capped(*ids), wanted), expected, strict=True):
        torch.testing.assert_close(mine, plain)
    graph = lowtide.plan_of(capped).graph
    pads = [op for op in graph.ops if op.target == "aten.constant_pad_nd.default"]
    (gradient,) = [op for op in pads if graph.value[op.writes[0]].bytes == ids[0].numel() * 256 * 4]
    assert gradient.takes, "the gradient of the logits takes their place, padding and all"
    assert all(value.bytes != ids[0].numel() * 253 * 4 for value in graph.values)
