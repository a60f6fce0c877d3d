"""What ranks tell each other while they plan, with a store and no process group."""

import json
from types import SimpleNamespace

import pytest
import torch

from graphs import chain
from lowtide.planner.under_budget import plan_graph
from lowtide.ranks import meeting
from lowtide.ranks.agreement import Agreement


@pytest.fixture
def store(monkeypatch):
    found = torch.distributed.HashStore()
    monkeypatch.setattr(meeting, "_store", lambda: found)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    return found


def test_ranks_that_failed_may_run_together_what_none_runs_alone(store):
    for rank in range(2):
        store.set(meeting._failure("a", rank), "RuntimeError: no data")
    assert meeting.all_failed("a")


def test_a_rank_that_came_and_heard_of_the_other_runs_nothing(store):
    """It fails, too, but it will not run the step: who waited for it there would wait for ever."""
    store.set(meeting._arrival("a", 0), "")
    for rank in range(2):
        store.set(meeting._failure("a", rank), "RanksDiffer: rank 1 failed")
    assert not meeting.all_failed("a")


def test_every_rank_has_the_plan_of_the_first():
    plan = plan_graph(chain(8), "min", notes=("a note",))
    said = []

    def rank(*, leads):
        def from_first(found):
            said.append(json.dumps(found))
            return json.loads(said[0])

        talk = SimpleNamespace(leads=leads, from_first=from_first)
        priced = SimpleNamespace(lifted=SimpleNamespace(graph=plan.graph))
        return Agreement(talk, priced, apart=False, total=None, free=None)

    assert rank(leads=True).plan(lambda: plan) == plan
    assert rank(leads=False).plan(lambda: None) == plan
    assert plan.budget_in_words == "min"
