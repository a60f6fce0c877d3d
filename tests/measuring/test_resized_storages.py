"""Storages that are resized where they are, past every operator."""

import torch

import lowtide


def test_memory_that_is_freed_in_place_is_not_counted():
    first, second = torch.ones(1000), torch.ones(1000)

    def step():
        first.untyped_storage().resize_(0)
        return torch.empty(1000), second + 1

    assert lowtide.measure(step, device="cpu").peak == 3 * 4000


def test_memory_that_is_taken_in_place_is_counted():
    empty = torch.ones(1000)
    empty.untyped_storage().resize_(0)

    def step():
        empty.untyped_storage().resize_(4000)
        empty.fill_(1.0)
        empty.untyped_storage().resize_(0)
        return torch.empty(500)

    assert lowtide.measure(step, device="cpu").peak == 4000


def test_resizing_is_torchs_own_afterwards():
    before = torch.UntypedStorage.resize_
    lowtide.measure(lambda: lowtide.measure(lambda: torch.ones(1), device="cpu"), device="cpu")
    assert torch.UntypedStorage.resize_ == before
    assert "resize_" not in vars(torch.UntypedStorage)
