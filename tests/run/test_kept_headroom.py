"""A second process begins with the headroom that the first one's rounds came to."""

import dataclasses
import itertools

import pytest
import torch

import lowtide
from lowtide.files.kept_data import write_kept
from lowtide.options import Options
from lowtide.run.inductor import attempt, kept_headroom
from lowtide.run.inductor.kept_headroom import may_recall, read_headroom, write_headroom
from lowtide.solve.search.build import library
from lowtide.stages import Asked

pytestmark = [pytest.mark.inductor, pytest.mark.usefixtures("idle_kernels")]


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).sin()
        return x.square().mean()


@pytest.fixture
def first_plan(monkeypatch, tmp_path):
    """Caps a step whose first draft needs so much more, as a new process would; gives rounds and plan."""
    library()  # built once, in the folder of all tests
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "cache"))
    rounds, peak = [], attempt.step_peak
    monkeypatch.setattr(attempt, "under_way", rounds.append)

    def plan(over=0):
        more = itertools.chain([over], itertools.repeat(min(over, 0)))
        monkeypatch.setattr(attempt, "step_peak", lambda *args, **facts: peak(*args, **facts) + next(more))
        rounds.clear()
        lowtide.cap(model := Layers(), "80%", executor="inductor", prices="roofline")
        model(torch.rand(256, 32))
        return {line.rpartition(" ")[2] for line in rounds}, lowtide.plan_of(model)

    return plan


def test_the_next_process_begins_with_the_last_round(first_plan):
    rounds, plan = first_plan(over=2**14)
    assert rounds == {"1", "2"}
    again, other = first_plan()
    assert again == {"1"}
    assert (other.schedule, other.peak) == (plan.schedule, plan.peak)


def test_what_fits_at_once_leaves_nothing(first_plan, monkeypatch):
    written = []
    monkeypatch.setattr("lowtide.run.inductor.step.write_headroom", lambda *args: written.append(args))
    assert first_plan(over=-(2**20))[0] == {"1"}
    assert not written


def test_a_headroom_that_leaves_no_plan_is_forgotten(first_plan, monkeypatch):
    plan = first_plan(over=-(2**20))[1]
    monkeypatch.setattr(attempt, "read_headroom", lambda key: 10**9)
    again, other = first_plan(over=-(2**20))
    assert again == {"2"}
    assert other.schedule == plan.schedule


def test_a_file_that_has_no_number_says_nothing(first_plan):
    write_headroom("a step", 5)
    assert read_headroom("a step") == 5
    assert read_headroom("another") == 0
    for data in (b"", b"-5", b"5 bytes", b"\xb2", b"9" * 40):
        write_kept(kept_headroom.FOLDER, "a step", data)
        assert read_headroom("a step") == 0, data


def test_what_is_chosen_from_round_to_round_is_chosen_anew():
    asked = Asked(Options.make("80%", executor="inductor"))
    assert may_recall(asked)
    assert not may_recall(dataclasses.replace(asked, headroom=1))
    assert not may_recall(dataclasses.replace(asked, only_plan=True))
    split = dataclasses.replace(asked.options, split=True)
    assert not may_recall(dataclasses.replace(asked, options=split))
