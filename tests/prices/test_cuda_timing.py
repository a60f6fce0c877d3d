"""How often a kernel runs on a GPU for its price: a long one need not be repeated."""

import pytest
import torch

from lowtide.prices import measured


@pytest.mark.parametrize(
    ("seconds", "runs"),
    [(0.05, [1]), (0.015, [1, 1]), (0.005, [1, 1, 1]), (1e-5, [1, 4, 4, 4])],
)
def test_a_long_kernel_is_timed_fewer_times(monkeypatch, seconds, runs):
    asked = []

    def run(call, device, calls):
        asked.append(calls)
        return seconds

    monkeypatch.setattr(measured, "_run_on_cuda", run)
    found = measured._seconds_on_cuda(lambda: None, torch.device("cuda"))
    assert found == seconds
    assert asked == runs


def test_one_disturbed_run_of_a_short_kernel_does_not_count(monkeypatch):
    times = iter([1.5e-3, 1e-5, 9e-4, 1e-5])
    monkeypatch.setattr(measured, "_run_on_cuda", lambda call, device, calls: next(times))
    assert measured._seconds_on_cuda(lambda: None, torch.device("cuda")) == 1e-5
