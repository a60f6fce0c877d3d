"""A step with regions in chunks comes to what the step as it is comes to."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_steps import results, trace_of
from torch.nn import functional

from lowtide.capture.rewrites.by_parts import add_product, put_rows
from lowtide.splitting.regions import find_regions, late_nodes, region_of
from lowtide.splitting.unroll import copied, unroll

WIDE, NARROW = 24, 6


def in_chunks(trace, regions, number, *, compiled):
    chunked = copied(trace)
    late = late_nodes(chunked)
    for region in regions:
        unroll(chunked, region_of(chunked, region.name, late), number, late=late, compiled=compiled)
    chunked.graph.lint()
    return chunked


def both(function, args, number, *, compiled=False, least_rows=4):
    """What a step comes to as it is and in chunks, and the regions that were split."""
    trace = trace_of(function, *args)
    whole = results(trace, *args)
    regions = find_regions(trace, least_rows=least_rows)
    chunked = in_chunks(trace, regions, number, compiled=compiled)
    return whole, results(chunked, *args), regions, chunked


def inputs(batch=3, length=7, dtype=torch.float64, seed=0):
    make = torch.Generator().manual_seed(seed)

    def real(*size):
        return torch.randn(size, generator=make, dtype=torch.float64).to(dtype)

    target = torch.randint(WIDE, (batch * length,), generator=make)
    target[: batch * length // 2] = -100  # whole chunks without a loss
    return real(batch, length, NARROW), real(WIDE, NARROW), real(WIDE), target


LOSSES = {
    "mean": lambda z, t: functional.cross_entropy(z, t),
    "sum": lambda z, t: functional.cross_entropy(z, t, reduction="sum"),
    "each": lambda z, t: functional.cross_entropy(z, t, reduction="none").square().sum(),
    "smoothed": lambda z, t: functional.cross_entropy(z, t, label_smoothing=0.1),
    "weighted": lambda z, t: functional.cross_entropy(z, t, weight=torch.linspace(1, 2, WIDE, dtype=z.dtype)),
    "with a z-loss": lambda z, t: functional.cross_entropy(z, t) + z.logsumexp(-1).square().mean(),
    "capped": lambda z, t: functional.cross_entropy(5 * torch.tanh(z / 5), t),
    "squares": lambda z, t: z.square().mean(),
    "by hand": lambda z, t: -torch.log_softmax(z, -1).gather(1, t.clamp(0)[:, None]).mean(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["in place", "functional"]
)
def test_a_head_and_its_loss(loss, compiled):
    def step(x, weight, bias, target):
        return LOSSES[loss](functional.linear(x, weight, bias).view(-1, WIDE), target)

    whole, chunked, regions, _ = both(step, inputs(), 4, compiled=compiled)
    assert len(regions) == 1
    for left, right in zip(whole, chunked, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_logits_that_are_returned_are_there():
    def step(x, weight, bias, target):
        logits = functional.linear(x, weight, bias)
        return functional.cross_entropy(logits.view(-1, WIDE), target), logits

    whole, chunked, (region,), trace = both(step, inputs(), 3)
    # a product of fewer rows may round differently
    torch.testing.assert_close(whole[1], chunked[1], rtol=1e-12, atol=1e-12)
    assert any(node.target is put_rows for node in trace.graph.nodes)
    assert region.rows == 21


def test_without_a_loss_on_any_row_it_is_what_it_was():
    def step(x, weight, bias, target):
        return functional.cross_entropy(functional.linear(x, weight, bias).view(-1, WIDE), target)

    *rest, target = inputs()
    whole, chunked, _, _ = both(step, (*rest, torch.full_like(target, -100)), 3)
    assert whole[0].isnan()
    assert chunked[0].isnan()


def test_an_mlp_of_two_branches():
    def step(x, up, down, target):
        hidden = functional.silu(functional.linear(x, up)) * functional.linear(x, 2 * up)
        return (x + functional.linear(hidden, up.t()) + down.sum()).square().sum()

    whole, chunked, (region,), _ = both(step, inputs(), 3)
    assert region.bytes > 0
    for left, right in zip(whole, chunked, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_halves_of_one_product():
    def step(x, weight, bias, target):
        gate, up = functional.linear(x, weight, bias).chunk(2, dim=-1)
        return functional.linear(functional.gelu(gate) * up, weight[: WIDE // 2].t()).square().sum()

    whole, chunked, regions, _ = both(step, inputs(), 3)
    assert regions
    for left, right in zip(whole, chunked, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def test_dropout_inside_draws_the_same_numbers():
    def step(x, weight, bias, target):
        hidden, _ = torch.native_dropout(functional.relu(functional.linear(x, weight, bias)), 0.5, True)
        return functional.linear(hidden, weight.t()).square().sum()

    trace = trace_of(step, *inputs())
    chunked = in_chunks(trace, find_regions(trace, least_rows=4), 3, compiled=False)
    found = []
    for each in (trace, chunked):
        torch.manual_seed(1)
        found.append(results(each, *inputs()))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_rows_that_see_each_other_are_not_split():
    def step(x, weight, bias, target):
        return functional.linear(x, weight, bias).cumsum(1).softmax(0).square().sum()

    assert not find_regions(trace_of(step, *inputs()), least_rows=4)


def test_a_mask_for_each_position_is_a_part_of_the_rows():
    def step(x, weight, bias, target):
        logits = functional.linear(x, weight, bias) * torch.arange(7, dtype=x.dtype)[:, None]
        return functional.cross_entropy(logits.view(-1, WIDE), target)

    assert not find_regions(trace_of(step, *inputs()), least_rows=4)
    whole, chunked, regions, _ = both(step, inputs(batch=1), 3)  # one sequence: positions are rows
    assert regions
    torch.testing.assert_close(whole, chunked, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_sums_are_rounded_once():
    def step(x, weight, bias, target):
        logits = functional.linear(x, weight, bias).view(-1, WIDE)
        return functional.cross_entropy(logits.double(), target.clamp(0))

    args = inputs(batch=64, length=8, dtype=torch.bfloat16)
    double = [arg.double() if arg.is_floating_point() else arg for arg in args]
    exact = results(trace_of(step, *double), *double)
    whole, chunked, _, _ = both(step, args, 32)

    def error(found):
        return ((found[2].double() - exact[2]).norm() / exact[2].norm()).item()

    assert error(chunked) <= 1.5 * error(whole)


def test_products_are_added_without_a_tensor_of_their_own():
    def step(x, weight, target):
        return functional.cross_entropy(functional.linear(x, weight).view(-1, 2000), target)

    args = torch.randn(2, 8, 16), torch.randn(2000, 16), torch.randint(2000, (16,))
    _, _, _, trace = both(step, args, 2)
    assert sum(node.target is add_product for node in trace.graph.nodes) == 2


BETWEEN = {
    "tanh": torch.tanh,
    "scaled": lambda z: 3 * z,
    "cast": lambda z: z.to(torch.float64),
    "flat": lambda z: z.reshape(-1, z.shape[-1]),
    "normal": lambda z: functional.layer_norm(z, z.shape[-1:]),
    "softmax": lambda z: z.softmax(-1),
    "centred": lambda z: z - z.mean(-1, keepdim=True),
    "turned": lambda z: z.flip(-1),
    "largest": lambda z: z / z.abs().amax(-1, keepdim=True),
    "masked": lambda z: z.masked_fill(z > 1, 0.0),
    "folded": lambda z: z.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2),
    "halves": lambda z: torch.cat(z.chunk(2, -1)[::-1], -1),
    "part": lambda z: functional.pad(z[..., 2:], (1, 1)),
}


@pytest.mark.slow
@settings(max_examples=25)
@given(
    st.lists(st.sampled_from(sorted(BETWEEN)), max_size=5),
    st.sampled_from([(1, 9), (2, 8), (5, 5), (3, 7)]),
    st.integers(2, 6),
    st.booleans(),
)
def test_any_region_of_rows(chain, shape, number, compiled):
    def step(x, weight, bias, target):
        z = functional.linear(x, weight, bias)
        for name in chain:
            z = BETWEEN[name](z)
        return functional.linear(z, weight.t()).square().sum() + z.square().mean()

    whole, chunked, regions, _ = both(step, inputs(*shape), number, compiled=compiled)
    assert regions, chain
    for left, right in zip(whole, chunked, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11)
