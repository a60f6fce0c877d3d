"""Where rows are in a tensor, after views, permutations and broadcasting."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.splitting.spans import aligned, chunk_size, merged_size, permuted, reshaped
from lowtide.splitting.unroll import chunks_of


def test_a_view_keeps_rows_together_or_not():
    assert reshaped([2, 8, 50], (0, 2), [16, 50]) == (0, 1)
    assert reshaped([16, 50], (0, 1), [2, 8, 5, 10]) == (0, 2)
    assert reshaped([16], (0, 1), [16, 1]) == (0, 1)
    assert reshaped([1, 16, 4], (1, 2), [16, 4]) == (0, 1)
    assert reshaped([50, 16], (1, 2), [50, 2, 8]) == (1, 3)
    assert reshaped([16, 50], (0, 1), [32, 25]) is None


def test_a_permutation_keeps_rows_in_their_order_or_not():
    assert permuted((0, 1), [1, 0]) == (1, 2)
    assert permuted((0, 2), [2, 0, 1]) == (1, 3)
    assert permuted((0, 2), [1, 0, 2]) is None
    assert permuted((0, 2), [0, 2, 1]) is None


def test_what_is_broadcast_has_all_rows_none_or_a_part():
    like = torch.empty(2, 8, 50)
    assert aligned(torch.empty(2, 8, 1), like, (0, 2)) == (0, 2)
    assert aligned(torch.empty(50), like, (0, 2)) is False
    assert aligned(torch.empty(()), like, (0, 2)) is False
    assert aligned(torch.empty(8, 1), like, (0, 2)) is None  # the positions, for both sequences


@given(st.integers(1, 5000), st.integers(1, 64))
def test_chunks_are_all_rows_in_order(rows, number):
    chunks = chunks_of(rows, number)
    assert [row for start, stop in chunks for row in (start, stop)][1:-1:2] == [c[0] for c in chunks[1:]]
    assert chunks[0][0] == 0
    assert chunks[-1][1] == rows
    assert len(chunks) <= number
    assert all(start < stop for start, stop in chunks)


def test_the_size_of_a_chunk_broadcasts_as_the_whole():
    assert chunk_size([2, 8, 50], (0, 2), 5) == [1, 5, 50]
    assert merged_size([2, 8, 50], (0, 2)) == [16, 50]
