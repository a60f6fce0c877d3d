"""At debug level there is a line for each stage of planning, with its own seconds alone."""

import logging
import re

import pytest
import torch

import lowtide
from lowtide.console import stage_seconds
from lowtide.console.stage_seconds import timed

LOG = logging.getLogger("lowtide")
STAGES = [
    "rewrites and lift",
    "prices",
    "search",
    "lowering",
    "code of the forward",
    "AOTAutograd",
    "first forward",
    "torch.compile's front end",
]


@pytest.fixture
def lines():
    """Debug lines as they come, each as a name and seconds."""
    found = []

    class Keeper(logging.Handler):
        def emit(self, record):
            if record.levelno == logging.DEBUG:
                found.append(re.fullmatch(r"(.*): (\d+\.\d\d) s", record.getMessage()).groups())

    keeper, before = Keeper(), LOG.level
    LOG.addHandler(keeper)
    LOG.setLevel(logging.DEBUG)
    yield found
    LOG.removeHandler(keeper)
    LOG.setLevel(before)


def test_a_stage_is_told_without_those_inside(lines, monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 10.0])
    monkeypatch.setattr(stage_seconds.time, "perf_counter", lambda: next(clock))
    with timed("outer"), timed("inner"):
        pass
    monkeypatch.undo()
    assert lines == [("inner", "2.00"), ("outer", "8.00")]


def test_a_stage_that_fails_is_told_too(lines):
    with pytest.raises(ValueError, match="no"), timed("a stage"):
        raise ValueError("no")
    assert [name for name, _ in lines] == ["a stage"]


def test_at_other_levels_nothing_is_told(lines):
    LOG.setLevel(logging.INFO)
    with timed("a stage"):
        pass
    assert not lines


def test_every_stage_of_a_step_has_a_line_and_later_steps_have_none(lines):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    lowtide.cap(model, "100%")
    model(torch.ones(2, 4)).sum().backward()
    names = [name for name, _ in lines if name != "code of the backward"]  # when it is made is torch's choice
    assert names == STAGES
    lines.clear()
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    assert not lines
