"""How often a kernel runs on a GPU for its price: a long one need not be repeated."""

import pytest
import torch

from lowtide.prices import measured


@pytest.mark.parametrize(
    ("seconds", "runs"),
    [(0.05, [1, 1]), (0.015, [1, 1]), (0.005, [1, 1, 1]), (1e-5, [1, 4, 4, 4])],
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


def test_one_disturbed_run_of_a_long_kernel_does_not_count(monkeypatch):
    times = iter([0.101, 0.03])
    monkeypatch.setattr(measured, "_run_on_cuda", lambda call, device, calls: next(times))
    assert measured._seconds_on_cuda(lambda: None, torch.device("cuda")) == 0.03


@pytest.mark.parametrize(
    ("usual", "takes", "price", "runs"),
    [
        (4e-4, [3e-4, 3e-4, 3e-4], 3e-4, 3),
        (4e-4, [0.101, 3e-4, 3e-4], 3e-4, 2),  # another process had the core
        (0.11, [0.1], 0.1, 1),  # it is as long as that
        (0.1, [0.1, 9.0], 0.1, 1),
        (4e-4, [0.1] * 9, 0.1, 5),
    ],
)
def test_a_run_on_a_cpu_that_was_disturbed_does_not_count(monkeypatch, usual, takes, price, runs):
    now, left = 0.0, list(takes)

    def call():
        nonlocal now
        now += left.pop(0)

    monkeypatch.setattr(measured.time, "perf_counter", lambda: now)
    assert measured._seconds_on_cpu(call, usual) == pytest.approx(price)
    assert len(takes) - len(left) == runs
