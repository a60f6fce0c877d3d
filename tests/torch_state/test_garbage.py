"""While a step is planned there are no automatic collections; afterwards all is as it was."""

import gc

import pytest
import torch

import lowtide
from lowtide.pipeline import way_down
from lowtide.torch_state.garbage import uncollected


def test_blocks_may_lie_inside_of_each_other():
    assert gc.isenabled()
    with uncollected():
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_who_has_turned_it_off_finds_it_off():
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_it_is_on_again_after_a_failure():
    with pytest.raises(ValueError, match="no"), uncollected():
        raise ValueError("no")
    assert gc.isenabled()


def test_it_is_off_while_a_step_is_planned(monkeypatch):
    seen = []
    plan_step = way_down.plan_step

    def plan(priced):
        seen.append(gc.isenabled())
        return plan_step(priced)

    monkeypatch.setattr(way_down, "plan_step", plan)
    model = lowtide.cap(torch.nn.Linear(4, 4), "100%")
    model(torch.ones(2, 4)).sum().backward()
    assert seen == [False]
    assert gc.isenabled()
