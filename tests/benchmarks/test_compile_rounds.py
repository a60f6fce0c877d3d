"""The lines and the counts of the script that compiles models in rounds."""

from types import SimpleNamespace

import torch

import compile_rounds


def test_a_row_prints_as_a_line():
    facts = {"rounds": 2, "generated": 2, "above_prediction": [1.2, 1.0]}
    row = {"model": "vit", "budget": "60%", "by": "lowtide", "cold": {"seconds": 12.5, **facts}}
    assert compile_rounds.line(row).split() == [
        *("vit", "lowtide", "60%", "cold", "12.5", "s", "2", "rounds,", "2", "graphs", "generated,"),
        *("[1.2,", "1.0]"),
    ]


def test_of_a_round_the_last_look_counts():
    counted = compile_rounds.Counted.__new__(compile_rounds.Counted)
    counted.passes, counted.drafts = 6, 4
    peaks = ((1, 110), (2, 100), (2, 101))
    counted.rounds = [{"turn": turn, "predicted": 100, "peak": peak} for turn, peak in peaks]
    assert counted.facts == {"rounds": 2, "generated": 2, "above_prediction": [1.1, 1.01]}


def test_the_small_densenet_has_a_loss():
    torch.manual_seed(0)
    model, batch = compile_rounds.densenet()
    small = SimpleNamespace(**{name: value[:2] for name, value in batch.items()})
    assert model(small.pixel_values, small.labels).loss.shape == ()
