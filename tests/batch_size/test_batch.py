"""The largest batch: it fits, one sample more does not, and a handful of looks find it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import lowtide
from lowtide.batch_size.batches import CLOSE, Batch
from lowtide.batch_size.size_search import EXACT, SizeSearch
from lowtide.cli.main import main
from lowtide.devices.table import total_memory


def make(size: int) -> tuple[nn.Module, torch.Tensor]:
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(*layers, nn.Flatten(0), nn.Softmax(0)), torch.ones(size, 64)


def uncapped(make: Any, budget: str, **options: Any) -> Batch:
    """The largest batch that fits as it is; no other plan is looked for."""
    found = lowtide.largest_batch(make, budget, method="keep_all", **options)
    assert found.uncapped is not None
    assert found.largest is found.uncapped
    return found.uncapped


def looks(
    peak: Callable[[int], int], budget: int, *, most: int = 1 << 16, first: int = 4, grain: int = EXACT
) -> tuple[int, int]:
    """The size that a search finds, and how many sizes it looked at."""
    seen: list[int] = []

    def look(size: int) -> tuple[bool, int]:
        assert size not in seen
        seen.append(size)
        return peak(size) <= budget, peak(size)

    return SizeSearch(budget, most, grain).run(look, first=first), len(seen)


@given(st.integers(0, 10**6), st.integers(1, 10**5), st.integers(0, 10**8), st.integers(1, 1 << 12))
def test_a_line_takes_a_handful_of_looks(fixed: int, slope: int, budget: int, most: int) -> None:
    found, count = looks(lambda size: fixed + slope * size, budget, most=most)
    assert found == min(max((budget - fixed) // slope, 0), most)
    assert count <= 5


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=200), st.integers(0, 60000))
def test_any_growing_peak_is_searched_to_the_end(steps: list[int], budget: int) -> None:
    peaks = [sum(steps[: size + 1]) + size for size in range(len(steps))]
    found, count = looks(lambda size: peaks[size - 1], budget, most=len(peaks))
    assert found == sum(peak <= budget for peak in peaks)
    assert count <= 10 + 2 * math.ceil(math.log2(len(peaks) + 1))


@pytest.fixture(scope="module")
def found() -> lowtide.LargestBatch:
    return lowtide.largest_batch(make, "256KiB")


@example(fixed=1373, noise=[{4: 1.021484375, 8: 1.002, 55: 0.984375}.get(size, 1.0) for size in range(64)])
@given(st.integers(0, 10**5), st.lists(st.floats(0.97, 1.03), min_size=64, max_size=64))
def test_a_line_with_noise_takes_a_few_more(fixed: int, noise: list[float]) -> None:
    """As the smallest peaks of a search are: a look is dear, and one in a hundred samples is near enough."""

    def peak(size: int) -> int:
        return int(fixed + 1000 * size * noise[size % 64])

    found, count = looks(peak, 1_000_000, grain=CLOSE)
    assert peak(found) <= 1_000_000
    assert abs(found / ((1_000_000 - fixed) / 1000) - 1) <= 0.05
    assert count <= 14


@pytest.mark.slow
def test_the_answer_fits_and_one_more_does_not(found: lowtide.LargestBatch) -> None:
    assert found.uncapped is not None
    size, largest = found.uncapped.size, found.largest
    assert found.uncapped.plan.peak == lowtide.plan(*make(size)).peak <= 2**18
    assert lowtide.plan(*make(size + 1)).peak > 2**18
    assert largest.size > size
    assert largest.plan.peak <= 2**18
    with pytest.raises(lowtide.BudgetTooSmall):
        lowtide.plan(*make(largest.size + max(1, largest.size // CLOSE)), budget="256KiB")


@pytest.mark.slow
def test_the_largest_capped_batch_really_runs(found: lowtide.LargestBatch) -> None:
    held = lowtide.verify(*make(found.largest.size), budget="256KiB")
    assert held
    assert held.measured <= 2**18


@pytest.mark.slow
def test_the_batch_may_be_made_where_meta_tensors_do_not_do(found: lowtide.LargestBatch) -> None:
    def made(size: int) -> tuple[nn.Module, torch.Tensor]:
        assert torch.ones(3).sum().item() == 3
        return make(size)

    before = torch.get_rng_state()
    assert uncapped(made, "256KiB") == found.uncapped
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.slow
def test_the_state_of_an_optimizer_is_counted(found: lowtide.LargestBatch) -> None:
    assert found.uncapped is not None
    counted = uncapped(make, "320KiB", optimizer=torch.optim.AdamW)
    assert counted.size < found.uncapped.size
    parameters = sum(parameter.nbytes for parameter in make(1)[0].parameters())
    assert counted.plan.graph.fixed["optimizer"] > 2 * parameters


@pytest.mark.slow
def test_what_lies_between_is_told_too(found: lowtide.LargestBatch) -> None:
    sizes = [batch.size for batch in found.capped]
    assert sizes == sorted(sizes)
    assert all(larger <= 2 * size for size, larger in pairwise(sizes))
    lines = [line.split() for line in str(found).splitlines()[2:] if not line.startswith("note:")]
    assert lines[0][:2] == ["uncapped", str(found.uncapped and found.uncapped.size)]
    assert lines[-1][1] == str(found.largest.size)
    assert all(float(line[-1].strip("+%")) > 0 for line in lines[1:])


@pytest.mark.slow
def test_no_batch_is_looked_at_above_the_most() -> None:
    found = lowtide.largest_batch(make, "1GiB", most=32)
    assert (found.largest.size, found.capped) == (32, ())
    assert "batches above 32 were not looked at" in str(found)


@pytest.mark.slow
def test_where_only_a_cap_fits() -> None:
    def deep(size: int) -> tuple[nn.Module, torch.Tensor]:
        return nn.Sequential(*(nn.Tanh() for _ in range(30))), torch.ones(size, 4096, requires_grad=True)

    found = lowtide.largest_batch(deep, "230KiB", method="sqrt_segments")
    assert found.uncapped is None
    assert [batch.size for batch in found.capped] == [1]
    assert str(found).splitlines()[2] == "uncapped     none"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("1KiB", "not even one sample fits: budget 1KiB"),
        ("min", '"min" fits no batch'),
        ("knee", '"knee" moves with the batch'),
        ("200% of device", "more than"),
        ("90%", 'which grows with the batch.*"90% of device"'),
    ],
)
def test_budgets_that_fit_nothing(budget: str, said: str) -> None:
    with pytest.raises(lowtide.BudgetError, match=said):
        lowtide.largest_batch(make, budget, method="keep_all")


@pytest.mark.slow
def test_a_share_is_of_the_memory_of_the_host_where_the_cpu_is_named() -> None:
    found = lowtide.largest_batch(make, "50% of device", device="cpu", most=4)
    assert found.budget == total_memory(torch.device("cpu")) // 2


STEP = """
import torch
from torch import nn

def make_step(batch_size=8):
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.ones(batch_size, 64)

def fixed():
    return make_step()

def ignores(batch_size):
    return make_step()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step.py").write_text(STEP, encoding="utf-8")
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("script")
def test_the_verb_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["batch", "step.py:make_step", "--budget", "30MiB", "--device", "T4"]
    words += ["--method", "sqrt_segments"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("largest batch under 30.00 MiB on T4, without optimizer state (roofline of T4)\n")
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    rows = [line.split()[:2] for line in out.splitlines()[2:] if "capped" in line]
    assert rows[0] == ["uncapped", str(data["uncapped"]["size"])]
    assert rows[1:] == [["capped", str(item["size"])] for item in data["capped"]]
    assert all(item["peak"] <= data["budget"] == 30 * 2**20 for item in data["capped"])


@pytest.mark.slow
@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("step.py:fixed", "--budget", "1MiB"), 2, "fixed() takes no batch size. Let it take one"),
        (("step.py:ignores", "--budget", "1MiB"), 2, "does not seem to use its batch size"),
        (("step.py:make_step", "--budget", "9KiB"), 1, "not even one sample fits"),
        (("step.py:make_step", "--budget", "100GiB", "--device", "A100"), 2, "more than the device A100 has"),
    ],
)
def test_the_verb_refuses(
    words: tuple[str, ...], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["batch", *words]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
