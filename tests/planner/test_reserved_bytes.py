"""What a plan says that it makes the allocator reserve: where it is said, from what, and where it is not."""

from dataclasses import replace

import pytest
import torch

import lowtide
from graphs import chain
from lowtide.devices.allocator_settings import read_settings
from lowtide.devices.caching_allocator import Segment
from lowtide.devices.memory import DeviceMemory, memory_by_name, segments_of
from lowtide.devices.reserved import Loop
from lowtide.planner.follow import follow
from lowtide.planner.under_budget import plan_graph
from lowtide.plans.events import events
from lowtide.report.page import page
from lowtide.report.text import text

MIB = 2**20
GRAPH = chain(12, size=3 * MIB)
CUDA = DeviceMemory("cuda", blocks=())
SAID = "by replay of the allocator"


@pytest.mark.parametrize("budget", [None, pytest.param("70%", marks=pytest.mark.slow), "min"])
def test_plans_for_cuda_have_what_the_replay_reserves(budget):
    plan = plan_graph(GRAPH, budget, device=CUDA)
    loop = Loop(plan.graph, events(plan.graph, plan.schedule))
    assert plan.peak == plan.reserved >= plan.allocated
    assert plan.reserved - 4 * MIB <= loop.peaks(arena=plan.arena).reserved <= plan.reserved
    assert follow(plan, GRAPH, None, device=CUDA, whole=None).reserved <= plan.reserved


@pytest.mark.parametrize(
    "device",
    [None, DeviceMemory("cpu", 2**40), replace(CUDA, settings=read_settings("backend:cudaMallocAsync"))],
)
def test_where_the_rules_are_not_known_nothing_is_said(device):
    plan = plan_graph(GRAPH, "70%", device=device)
    assert plan.reserved is None
    assert "reserved" not in plan.to_dict()
    assert SAID not in str(plan) + text(plan) + page(plan)


def test_it_stands_beside_the_peak_in_everything_that_shows_a_plan(tmp_path):
    plan = plan_graph(GRAPH, "70%", device=CUDA)
    assert all(SAID in shown for shown in (str(plan), text(plan), page(plan)))
    assert lowtide.Plan.load(plan.save(tmp_path / "plan.json")) == plan
    with pytest.raises(lowtide.FormatError, match="reserved"):
        lowtide.Plan.from_dict({**plan.to_dict(), "reserved": -1})


def test_the_state_of_the_allocator_and_its_settings_count():
    held = DeviceMemory("cuda", blocks=(), segments=(Segment(0, ((512 * MIB, False),)),))
    assert plan_graph(GRAPH, None, device=held).reserved >= 512 * MIB
    odd, settings = chain(12, size=5 * MIB), read_settings("roundup_power2_divisions:2")
    plan = plan_graph(odd, None, device=replace(CUDA, settings=settings))
    assert plan.reserved == Loop(odd, events(odd, plan.schedule), settings=settings).peaks().reserved
    assert plan.reserved > plan_graph(odd, None, device=CUDA).reserved


def test_an_absent_device_has_the_settings_of_the_environment(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert memory_by_name("H200").settings.most_split == 64 * MIB
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert memory_by_name("cuda:0").settings == read_settings("expandable_segments:True")


def test_a_snapshot_is_read_as_torch_writes_it():
    """Of the device and the stream alone; other streams' memory is there, and serves nobody here."""

    def segment(*blocks, **more):
        parts = [{"size": size, "state": state} for size, state in blocks]
        usual = {"device": 0, "address": 7, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0)}
        return {**usual, "is_expandable": False, "blocks": parts, **more}

    free = 4, "inactive"
    snapshot = [
        segment((8, "active_allocated"), free, (2, "active_pending_free")),
        segment(free, segment_type="small", is_expandable=True),
        segment(free, stream=3),
        segment(free, segment_pool_id=(0, 1)),
        segment(free, device=1),
    ]
    assert segments_of(snapshot, 0, 0) == (
        Segment(7, ((8, False), (4, True), (2, False))),
        Segment(7, ((4, True),), small=True, expandable=True),
        Segment(7, ((4, False),)),
        Segment(7, ((4, False),)),
    )


def test_a_compiled_step_has_none_and_an_eager_one_has():
    """Generated code makes other requests than the ops of the graph."""
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()), torch.empty(512, 64)
    plans = [lowtide.plan(model, x, device="H200", executor=executor) for executor in ("eager", "inductor")]
    assert [plan.reserved is None for plan in plans] == [False, True]
    assert lowtide.plan(model, x).reserved is None
