"""Layers of which only some rows get a gradient: those rows are kept in place of a sketch, and are exact."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import lowtide
from lowtide.sketching import choose as choosing
from lowtide.sketching.gradient_rows import gradient_rows, part_of
from sketched import WIDTH, gradients, same, step

pytestmark = pytest.mark.slow

aten = torch.ops.aten


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_a_part_is_found_from_its_rows(times, period, data):
    start = data.draw(st.integers(0, period - 1))
    stop = data.draw(st.integers(start + 1, period))
    mask = np.zeros((times, period), dtype=bool)
    mask[:, start:stop] = True
    rows = mask.ravel()
    part = part_of(rows)
    if rows.all():
        assert part is None
        return
    assert part is not None
    assert part.rows(len(rows)) == rows.sum()
    assert part.of(torch.arange(len(rows)).unsqueeze(1)).flatten().tolist() == np.flatnonzero(rows).tolist()


@pytest.mark.parametrize("rows", [[], [0, 3, 4], [1, 2, 5, 6], [0, 4, 8, 9]])
def test_rows_that_are_no_part(rows):
    mask = np.zeros(10, dtype=bool)
    mask[rows] = True
    assert part_of(mask) is None


def first(g):
    return aten.select_backward(g, [3, 4, 5], 1, 0)


PASSED_ON = {
    "select": first,
    "slice": lambda g: aten.slice_backward(g, [8, 5], 0, 1, 8, 3),
    "scatter one": lambda g: aten.select_scatter(torch.full([3, 4, 5], 0.0), g, 1, 2),
    "scatter to the end": lambda g: aten.slice_scatter(torch.full([6, 5], 0.0), g, 0, 3),
    "scatter some": lambda g: aten.slice_scatter(torch.full([9, 5], 0.0), g, 0, 1, 7, 2),
    "rows by themselves": lambda g: -aten.gelu_backward(first(g), torch.ones(3, 4, 5)) / 2,
    "a product": lambda g: first(g).view(12, 5) @ torch.ones(5, 7),
    "a sum of two": lambda g: first(g) - aten.select_backward(g, [3, 4, 5], 1, -1),
    "a factor of zeros": lambda g: first(g) * torch.ones(3, 4, 1) * (first(g) + first(g)),
    "turned": lambda g: first(g).transpose(0, 1).permute(1, 0, 2).transpose(-3, -2),
    "a norm": lambda g: aten.native_layer_norm_backward(
        first(g), torch.rand(3, 4, 5), [5], torch.rand(3, 4, 1), torch.ones(3, 4, 1), None, None, [1, 0, 0]
    )[0],
    "sums of rows": lambda g: first(g).sum([-1], True).double(),
}


@pytest.mark.parametrize("name", PASSED_ON)
def test_rows_that_are_zero_are_passed_on(name):
    g = torch.rand(3, 5) + 1
    graph = make_fx(PASSED_ON[name], tracing_mode="fake")(g).graph
    (output,) = graph.find_nodes(op="output")
    found = PASSED_ON[name](g)
    rows = gradient_rows(graph)[output.args[0]]
    assert rows.tolist() == found.ne(0).any(-1).tolist()


NOT_KNOWN = {
    "another sum": lambda g: first(g) + torch.rand(3, 4, 5),
    "a shift": lambda g: first(g) + 1,
    "parts of rows": lambda g: aten.select_backward(g, [3, 5, 4], 2, 0),
    "turned over": lambda g: first(g).transpose(1, 2),
    "other rows": lambda g: first(g).view(6, 10),
    "columns": lambda g: torch.rand(2, 12) @ first(g).view(12, 5),
    "a quotient": lambda g: first(g) / torch.rand(3, 4, 5),
}


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_what_no_rule_covers_may_be_anything(name):
    graph = make_fx(NOT_KNOWN[name], tracing_mode="fake")(torch.rand(3, 5)).graph
    (output,) = graph.find_nodes(op="output")
    assert output.args[0] not in gradient_rows(graph)


class Encoder(nn.Module):
    """A block with norms after, as in BERT, whose first tokens are classified."""

    def __init__(self, which=0):
        super().__init__()
        self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.which = which

    def forward(self, x):
        mixed = torch.softmax(x @ self.key(x).mT, -1) @ self.value(x)
        x = self.norm(x + self.dropout(self.out(mixed)))
        x = self.norm(x + self.dropout(self.down(nn.functional.gelu(self.up(x)))))
        return x[:, self.which].square().mean()


@pytest.fixture
def every_sketch(monkeypatch):
    """Let everything be sketched that may."""
    monkeypatch.setattr(choosing, "decide", lambda able, draft: [draft(able)])
    monkeypatch.setattr(choosing, "ranked", lambda marks, seconds: [mark.layers for mark in marks])


@pytest.mark.parametrize("which", [0, slice(2, 4)])
def test_rows_with_a_gradient_are_kept_and_exact(which, every_sketch):
    model, x = Encoder(which), torch.randn(8, 16, WIDTH)
    lowtide.sketch(model, 0.25, kind="rows")
    found = lowtide.verify(model, x, budget="1GiB", prices="roofline")
    assert found, str(found)
    assert found.measured == found.predicted
    assert found.plan.trimmed == ("out", "up", "down")
    assert found.plan.sketched == ("key", "value")
    assert "3 keep only the rows that get a gradient (out, up, down)" in found.plan.notes[-1]
    assert "weight gradients of 3 layers" in str(found)


def test_a_plan_brings_its_rows_along(every_sketch):
    model, x = lowtide.sketch(Encoder(), 0.25, kind="rows"), torch.randn(8, 16, WIDTH)
    lowtide.cap(model, "1GiB", prices="roofline")
    first, plan = step(model, x), lowtide.plan_of(model)
    lowtide.cap(lowtide.uncap(model), plan=lowtide.Plan.from_json(plan.to_json()), prices="roofline")
    assert same(step(model, x), first)
    assert lowtide.plan_of(model).trimmed == plan.trimmed == ("out", "up", "down")


def test_rows_are_seen_in_what_a_compiler_makes_of_the_step(every_sketch):
    model, x = lowtide.sketch(Encoder(), 0.25, kind="rows"), torch.randn(8, 16, WIDTH)
    assert lowtide.plan(model, x, executor="inductor").trimmed == ("out", "up", "down")


def test_more_rows_than_a_sketch_has_are_sketched(every_sketch):
    model, x = lowtide.sketch(Encoder(slice(8)), 0.25, kind="rows"), torch.randn(8, 16, WIDTH)
    assert lowtide.plan(model, x, budget="1GiB").trimmed == ()


class Twice(nn.Module):
    """A layer that is called where all rows have a gradient, and where few have."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.layer(torch.sin(x))
        return x.square().mean() + self.layer(torch.cos(x))[:, 0].square().mean()


def test_a_layer_that_needs_a_sketch_elsewhere_is_sketched(every_sketch):
    model, x = lowtide.sketch(Twice(), 0.25, kind="rows"), torch.randn(8, 16, WIDTH)
    found = lowtide.verify(model, x, budget="1GiB", prices="roofline")
    assert found, str(found)
    assert (found.plan.sketched, found.plan.trimmed) == (("layer",), ())
    assert gradients(model)["layer.weight"] is None
