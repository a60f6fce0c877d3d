"""Calls that differ in sizes: one capture for many, each with the bits and bytes of its own."""

import copy
import gc
import re
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import lowtide
from lowtide import LowtideError
from lowtide.entry.in_place import capped_of
from small_models import EXECUTORS, clear, gradients, same

QUICKLY = {"prices": "roofline", "outputs": "free"}


class Rows(nn.Module):
    """A step whose road is chosen by a function, over rows of a length that changes."""

    def __init__(self, road):
        super().__init__()
        self.road = road
        self.inner, self.outer = nn.Linear(8, 32), nn.Linear(32, 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, mask=None):
        y = self.drop(self.outer(torch.tanh(self.inner(x))))
        return self.road(y, mask).pow(2).mean()


def straight(y, mask):
    return y * y.shape[1] ** 0.5 + torch.arange(y.shape[1]).unsqueeze(1)


def by_padding(y, mask):
    if mask[:, : y.shape[1] // 2].all() and mask[:, : y.flatten(0, 1).shape[0] // 3].any():
        return y * 2
    return y * mask.unsqueeze(2)


def two_roads(y, mask):
    return y * 2 if y.shape[1] < 20 else y * 3


def one_of_four(y, mask):
    return y * (1 + y.shape[1] % 2) if y.shape[1] % 4 == 0 else y.flip(1)


def in_a_loop(y, mask):
    state = torch.zeros(y.shape[0], 8)
    for row in y.unbind(1):
        state = torch.sigmoid(row + state)
    return state


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, y):
        return y * 2

    @staticmethod
    def backward(context, gradient):
        return gradient * 2


def by_a_table(y, mask):
    return (y if y.shape[1] % 2 else -y) * ([1.0, 2.0] * 8)[y.shape[1]]


def with_a_graph_inside(y, mask):
    return Doubled.apply(y)


def of_what_is_masked(y, mask):
    return y[mask.bool()]


def batches(lengths, padded=()):
    for length in lengths:
        mask = torch.ones(3, length, dtype=torch.long)
        if length in padded:
            mask[1:, 1:] = 0
        yield torch.randn(3, length, 8), mask


def train(model, batch):
    """A step that begins as all others."""
    clear(model)
    torch.manual_seed(3)
    loss = model(*batch)
    loss.backward()
    return loss.detach()


def stepped(model, batch):
    """Loss, gradients and random state of a step."""
    return [train(model, batch), *gradients(model), torch.get_rng_state()]


def graphs(model):
    """How many graphs were captured for many sizes."""
    kin = capped_of(model).any_size.kin.values()
    return sum(len(shared.steps) for each in kin for shared in each.shared.values())


def follow(road, lengths, padded=(), **options):
    """A capped step over these lengths, each with the bits of no cap and the bytes that were foretold."""
    plain = Rows(road)
    model = lowtide.cap(copy.deepcopy(plain), "85%", **QUICKLY, **options)
    for batch in batches(lengths, padded):
        assert same(stepped(model, batch), stepped(plain, batch))
        measured = lowtide.measure(partial(train, model, batch), device="cpu").peak
        assert measured == lowtide.plan_of(model).peak
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("road", "lengths", "captured"),
    [
        (straight, (9, 12, 31, 2, 9, 47), 1),
        (two_roads, (9, 12, 31, 18, 44), 2),
        (one_of_four, (8, 12, 13, 16, 7), 2),
        (straight, (9, 1, 12, 5), 2),
    ],
)
def test_a_capture_serves_the_sizes_that_go_its_road(road, lengths, captured):
    assert graphs(follow(road, lengths)) == captured


@pytest.mark.slow
def test_each_batch_is_asked_with_its_own_sizes():
    model = follow(by_padding, (9, 12, 30, 13, 31), padded=(12, 13))
    assert graphs(model) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("road", "reason"),
    [
        (in_a_loop, "unbind takes a size for a number at test_any_size.py:LINE: for row in y.unbind(1)"),
        (by_a_table, "a size is taken for a number at test_any_size.py:LINE: return (y if"),
        (with_a_graph_inside, "autograd_function_apply at test_any_size.py:LINE has a graph inside"),
        (of_what_is_masked, "a mask of the batch decides a size"),
    ],
)
def test_where_one_capture_cannot_serve_a_line_says_why(road, reason, caplog_lowtide):
    follow(road, (9, 12, 5), padded=(12,))
    (line,) = [line for line in caplog_lowtide if "each shape is captured by itself" in line]
    assert reason in re.sub(r"py:\d+", "py:LINE", line)


def with_strides_of_its_own(y, mask):
    columns = (y * 2).transpose(1, 2)
    columns.addmm_(columns[0], torch.ones(y.shape[1], y.shape[1])) if columns.dim() == 2 else None
    return columns.mul_(y.shape[1]).bernoulli_(0.5) * y.transpose(1, 2)


@pytest.mark.slow
def test_calls_in_place_draw_along_the_strides_of_each_size():
    assert graphs(follow(with_strides_of_its_own, (9, 12, 5))) == 1


class SaysItsSize(Rows):
    def forward(self, x, mask=None):
        return super().forward(x, mask), x.shape[1], self.inner(x)


def test_results_that_are_sizes_are_those_of_the_batch():
    model = lowtide.cap(SaysItsSize(straight), "1MiB", **QUICKLY)
    for batch in batches((9, 12, 31)):
        loss, length, inner = model(*batch)
        assert (length, inner.shape) == (batch[0].shape[1], (3, batch[0].shape[1], 32))
        loss.backward()
    assert graphs(model) == 1


@pytest.mark.slow
def test_each_plan_is_given_back_though_the_capture_stays():
    model = lowtide.cap(Rows(straight), "1MiB", max_plans=2, **QUICKLY)
    kept = []
    for batch in batches((9, 12, 31, 44)):
        train(model, batch)
        (part,) = next(reversed(capped_of(model).entries.values())).parts
        kept.append([weakref.ref(each) for each in (part, part.plan, part.runner.run)])
        del part
    gc.collect()
    assert [[ref() is not None for ref in refs] for refs in kept] == [[False] * 3] * 2 + [[True] * 3] * 2
    assert graphs(model) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("vector_kernels")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_budgets_and_gradients_in_flight_need_no_other_capture(executor):
    plain = Rows(straight)
    plain.drop.p = 0.0  # compiled code draws other numbers
    model = lowtide.cap(copy.deepcopy(plain), "1MiB", prices="roofline", executor=executor)
    for batch in batches((9, 12, 31, 12)):
        for _ in range(2):  # the second adds to the gradients of the first
            for each in (plain, model):
                torch.manual_seed(3)
                each(*batch).backward()
        pairs = zip(gradients(plain), gradients(model), strict=True)
        assert all(torch.allclose(*pair) for pair in pairs)
    assert graphs(model) == 1


def marked(batch):
    torch._dynamo.mark_dynamic(batch[0], 1)
    return batch


@pytest.mark.parametrize(
    ("dynamic", "mark"),
    [
        ({"x": 1}, None),
        pytest.param({0: [-2]}, None, marks=pytest.mark.slow),
        (None, marked),
        pytest.param({"x": (0, 1), "mask": [0, 1]}, marked, marks=pytest.mark.slow),
    ],
)
def test_sizes_that_are_told_are_symbols_from_the_first_call_on(dynamic, mark):
    model = lowtide.cap(Rows(straight), "1MiB", dynamic=dynamic, **QUICKLY)
    plain = copy.deepcopy(model)
    plain.load_state_dict(model.state_dict())
    for number, batch in enumerate(batches((9, 12, 31))):
        assert same(stepped(model, mark(batch) if mark else batch), stepped(plain, batch))
        assert graphs(model) == 1, number
        if mark:
            assert vars(batch[0])["_dynamo_dynamic_indices"] == {1}


def test_marks_are_no_matter_where_each_shape_is_captured_by_itself():
    model = lowtide.cap(Rows(straight), "1MiB", dynamic=False, **QUICKLY)
    (batch,) = map(marked, batches((9,)))
    for _ in range(3):
        train(model, batch)
    assert graphs(model) == 0
    (entry,) = capped_of(model).entries.values()
    assert len(entry.parts) == 1
    assert lowtide.plan(Rows(straight), *batch).peak == lowtide.plan(Rows(straight), *batch).peak


class OfADict(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = Rows(straight)

    def forward(self, batch):
        return self.rows(batch["x"])


def test_a_key_of_a_dict_can_be_told():
    model = lowtide.cap(OfADict(), "1MiB", dynamic={"x": 1}, **QUICKLY)
    for x, _ in batches((9, 12)):
        train(model, ({"x": x},))
    assert graphs(model) == 1


@pytest.mark.parametrize(
    ("dynamic", "said"),
    [
        ({"y": 1}, r"no argument 'y'; it has 0, 1, 'x', 'mask'"),
        ({"x": 3}, r"'x' has the shape \(3, 9, 8\), and no dimension 3"),
        ({1: -3}, r"1 has the shape \(3, 9\), and no dimension -3"),
        ({2: 0}, r"no argument 2"),
    ],
)
def test_what_is_told_wrongly_is_refused_at_the_first_call(dynamic, said):
    model = lowtide.cap(Rows(straight), "1MiB", dynamic=dynamic, **QUICKLY)
    (batch,) = batches((9,))
    with pytest.raises(LowtideError, match=said):
        model(*batch)


@pytest.mark.parametrize("dynamic", [True, 1, {}, {"x": True}, {"x": []}, {"x": "1"}, {1.5: 0}, ["x"]])
def test_what_is_no_dict_of_dimensions_is_refused(dynamic):
    with pytest.raises(LowtideError, match="must be a dict of arguments and dimensions"):
        lowtide.cap(Rows(straight), "1MiB", dynamic=dynamic)


def test_where_it_would_do_nothing_it_is_refused():
    (batch,) = batches((9,))
    with pytest.raises(LowtideError, match="an option of"):
        lowtide.plan(Rows(straight), *batch, dynamic={"x": 1})
    with pytest.raises(LowtideError, match="allow_breaks"):
        lowtide.cap(Rows(straight), "1MiB", dynamic={"x": 1}, allow_breaks=True)
    options = {"budget": "1MiB", "dynamic": {"x": 1}}
    with pytest.raises(Exception, match="has its own"):
        torch.compile(Rows(straight), backend="lowtide", options=options)(*batch)


class CountsItsCalls(Rows):
    calls = 0

    def forward(self, x, mask=None):
        self.calls += 1
        return super().forward(x, mask) * self.calls


@pytest.mark.slow
def test_a_step_that_is_captured_anew_at_each_call_goes_on_shape_by_shape(caplog_lowtide):
    plain = CountsItsCalls(straight)
    model = lowtide.cap(copy.deepcopy(plain), "1MiB", **QUICKLY)
    for batch in batches((9, 12, 12, 12, 12, 12, 12, 9)):
        assert same(stepped(model, batch), stepped(plain, batch))
    assert model.calls == plain.calls == 8
    (line,) = [line for line in caplog_lowtide if "each shape is captured by itself" in line]
    assert "4 captures did not serve" in line
