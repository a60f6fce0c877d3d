"""The language-model benchmark: its rows on tiny models, and the tables that are made of them."""

import pytest
import torch

import language_models
import language_models_table
from language_models_steps import SUBJECTS, with_adapters
from short_search import short_search, steady_prices

ROW = {"subject": "llama-3b", "setup_seconds": 1.0, "reserved": 120 << 20}


def row(setting: str, allocated: int, seconds: float, **more: object) -> dict[str, object]:
    return {**ROW, "setting": setting, "allocated": allocated << 20, "seconds": seconds, **more}


def test_a_point_of_another_tool_is_met_by_less_memory_and_time():
    others = [row("eager", 100, 1.0), row("checkpoint", 50, 1.5)]
    ours = [row("lowtide:130GiB", 101, 1.01), row("lowtide:min", 40, 1.6)]
    assert language_models_table.unmet(others + ours) == others[1:]
    assert "| 1 of 2 | 50 MiB, 1,500 ms | 40 MiB, 1,600 ms |" in language_models_table.verdict(others + ours)


def test_more_reserved_memory_is_no_point_that_is_met():
    rows = [row("eager", 100, 1.0), row("lowtide:60GiB", 90, 1.0, reserved=200 << 20)]
    assert language_models_table.unmet(rows) == rows[:1]


def test_the_newest_row_of_a_setting_counts_and_refusals_are_shown():
    refused = {**ROW, "setting": "lowtide:min:split", "error": "budget too small", "smallest": 7 << 20}
    rows = [row("eager", 100, 1.0), row("eager", 90, 2.0), refused]
    shown = language_models_table.table(rows)
    assert "| plain PyTorch |  |  | 90 | 120 | 2,000 ms | 1.00 x | 1 s |" in shown
    assert "| Lowtide, `split=True` | min | budget too small (smallest 7) | | | | | |" in shown
    assert "100" not in shown


def test_only_adapters_are_trained():
    model = with_adapters(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["0.down", "0.up"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBJECTS)
def test_every_subject_trains_alike_with_and_without_a_cap(name):
    with short_search(), steady_prices():
        plain, capped = (
            language_models.bench(SUBJECTS[name], setting, "cpu", steps=1, tiny=True)
            for setting in ("eager", "lowtide:95%")
        )
    assert capped["loss"] == plain["loss"]
    assert capped["allocated"] <= capped["predicted"] <= capped["budget"]
