"""Products that sum over zeros: which read what was padded instead, and which keep the padding."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from lowtide.padding import unpad_products

aten = torch.ops.aten
WORDS = 1031


def pads(function, *shapes):
    """How many operands are padded, before and after; the values must stay the same."""
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    module = make_fx(function, tracing_mode="fake")(*inputs)
    before = function(*inputs)
    found = []
    for change in (lambda _: None, unpad_products):
        change(module.graph)
        module.graph.eliminate_dead_code()
        module.recompile()
        found.append(len(module.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)))
    torch.testing.assert_close(module(*inputs), before)
    return found


def padded(left, right, *, summed=1, rows=0, value=0.0):
    left = aten.constant_pad_nd(left, [0, summed, 0, rows], value)
    return aten.mm(left, aten.constant_pad_nd(right, [0, 0, 0, summed], value))


@pytest.mark.parametrize("seen", [lambda x: x, lambda x: x.view(4, 8, WORDS).cos().view(32, WORDS)])
def test_rows_that_a_loop_writes_are_not_padded(seen):
    assert pads(lambda x, w: padded(seen(x.sin()), w), (32, WORDS), (WORDS, 16)) == [2, 0]


def test_columns_that_lie_in_memory_as_rows():
    assert pads(lambda x, w: padded(x.sin(), w.sin().t()), (32, WORDS), (16, WORDS)) == [2, 0]


@pytest.mark.parametrize(
    ("step", "shapes"),
    [
        pytest.param(lambda x, w: padded(x, w), [(32, WORDS), (WORDS, 16)], id="an input"),
        pytest.param(lambda x, w: padded(x @ x, w), [(WORDS, WORDS), (WORDS, 16)], id="a product"),
        pytest.param(lambda x, w: padded(x.sin(), w.t()), [(32, WORDS), (16, WORDS)], id="the other one"),
        pytest.param(lambda x, w: padded(x.sin(), w), [(32, 31), (31, 16)], id="short rows"),
        pytest.param(lambda x, w: padded(x.sin(), w, rows=2), [(32, WORDS), (WORDS, 16)], id="more rows"),
        pytest.param(lambda x, w: padded(x.sin(), w, value=1.0), [(32, WORDS), (WORDS, 16)], id="with ones"),
        pytest.param(
            lambda x, w: padded(x.sin().view(11, 3 * WORDS), w),
            [(33, WORDS), (3 * WORDS, 16)],
            id="other rows",
        ),
    ],
)
def test_others_stay(step, shapes):
    assert pads(step, *shapes) == [2, 2]
