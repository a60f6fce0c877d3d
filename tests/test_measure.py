"""The tracker of live storages against counts by hand."""

import pytest
import torch
from torch import nn

from lowtide import measure

N = 1000
BYTES = 4 * N


@pytest.fixture
def x():
    return torch.ones(N)


def peak(step, **options):
    return measure(step, device="cpu", **options).peak


def test_what_was_there_and_what_is_made(x):
    assert peak(lambda: x + 1) == 2 * BYTES
    assert peak(lambda: (x + 1, x + 2)) == 3 * BYTES


def test_nothing_at_all():
    assert peak(lambda: None) == 0


def test_untouched_tensors_do_not_count(x):
    torch.ones(N)
    assert peak(lambda: torch.zeros(N)) == BYTES


def test_views_are_free(x):
    assert peak(lambda: (x.view(10, 100), x[5:], x.view(10, 100).t(), x.expand(7, N))) == BYTES


def test_view_counts_its_whole_storage(x):
    assert peak(lambda: x[:1] + 1) == BYTES + 4


def test_view_keeps_its_storage_alive(x):
    def step():
        part = (x + 1)[:1]
        other = x + 2
        return part, other

    assert peak(step) == 3 * BYTES


def test_in_place_is_free(x):
    assert peak(lambda: x.add_(1).mul_(2)) == BYTES
    assert peak(lambda: torch.add(x, 1, out=x)) == BYTES


def test_freed_storages_leave(x):
    def step():
        y = x
        for _ in range(5):
            y = y + 1

    assert peak(step) == 3 * BYTES


def test_freed_before_the_next_is_made(x):
    def step():
        y = x + 1
        del y
        z = x + 2
        del z

    assert peak(step) == 2 * BYTES


def test_what_was_there_counts_after_it_is_freed():
    held = [torch.ones(N)]

    def step():
        y = held[0] + 1
        held.clear()
        z = y + 1
        return y + z

    assert peak(step) == 4 * BYTES


def test_resident_tensors_count_once(x):
    state = torch.zeros(N, dtype=torch.float64)
    assert peak(lambda: x + 1, resident=[state]) == 2 * BYTES + 8 * N
    assert peak(lambda: x + 1, resident=[x, x[1:], x]) == 2 * BYTES


def test_temporaries_inside_an_op_do_not_count():
    x = torch.randn(10, 100)
    assert peak(lambda: torch.logsumexp(x, 1)) == BYTES + 40


def test_other_devices_and_empty_storages_do_not_count(x):
    assert peak(lambda: (torch.empty(N, device="meta"), torch.empty(0), x * 1)) == 2 * BYTES


def test_nested_measures_see_the_same(x):
    found = []

    def outer():
        y = x + 1
        found.append(peak(lambda: (y + 1, y + 2)))
        return y + 3

    assert peak(outer) == 4 * BYTES
    assert found == [3 * BYTES]


def test_one_measure_after_the_other(x):
    assert [peak(lambda: x + 1) for _ in range(3)] == [2 * BYTES] * 3


def test_training_step_by_hand():
    """At the peak: weight, bias and batch; the output's gradient, the loss and its own."""
    linear, x = nn.Linear(100, 10), torch.ones(20, 100)
    given = 4 * (1000 + 10 + 2000)
    tangents = 4 * (1 + 1)
    gradients = 4 * (1000 + 10)
    assert peak(lambda: linear(x).sum().backward()) == given + tangents + gradients


def test_failing_step_leaves_no_mode_behind(x):
    with pytest.raises(ZeroDivisionError):
        measure(lambda: 1 / 0, device="cpu")
    assert peak(lambda: x + 1) == 2 * BYTES


def test_seconds_are_positive(x):
    assert measure(lambda: x + 1, device="cpu").seconds > 0
