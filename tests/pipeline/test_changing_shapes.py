"""Batches of many lengths under one cap: each keeps its bits, its budget and its prediction."""

import pytest

from changing_shapes import CASES, compared
from lowtide.planner import other_shapes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gpt2", (97, 41, 96)),
        ("llama", (64, 63, 25)),
        ("bert", (30, 118, 77)),
        ("cnn", (33, 32, 5)),
        ("lstm", (7, 3, 7)),
    ],
)
def test_every_size_has_the_bits_of_no_cap_and_the_bytes_that_were_foretold(name, sizes, monkeypatch):
    searched = []
    ladder_at = other_shapes.ladder_at
    monkeypatch.setattr(other_shapes, "ladder_at", lambda *asked: searched.append(1) or ladder_at(*asked))
    for found in compared(CASES[name], list(sizes)):
        assert found.same_bits
        assert found.measured == found.predicted <= found.budget
        assert found.extra > 0
    if name != "lstm":  # a loop over more tokens has more ops
        assert len(searched) < len(sizes)
