"""What a loop makes the allocator reserve: cases by hand, and the simulator's peak beside it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import random_graph
from lowtide.devices.allocator_settings import AllocatorSettings, read_settings
from lowtide.devices.caching_allocator import NoRoomError, Segment
from lowtide.devices.reserved import Loop
from lowtide.plans.events import events
from lowtide.plans.graph import Graph, Op, Value
from lowtide.plans.keep_all import keep_all
from lowtide.plans.schedule import Drop, Run, Schedule
from lowtide.plans.simulator import simulate

MIB = 2**20


def layer(*, workspace=0, fixed=None, boundary=0, tangent=2):
    """One op forward and one backward over a parameter of 30 MiB and an input of 2."""
    sizes = {"w": 30, "x": 2, "h": 60, "y": 2, "t": tangent, "g": 30}
    kinds = {"w": "parameter", "x": "input", "y": "output", "t": "tangent", "g": "gradient"}
    values = tuple(Value(name, size * MIB, kinds.get(name, "activation")) for name, size in sizes.items())
    ops = (
        Op("up", ("x", "w"), ("h",), workspace=workspace * MIB),
        Op("down", ("h",), ("y",)),
        Op("back", ("h", "t"), ("g",), phase="backward"),
    )
    fixed = {name: size * MIB for name, size in (fixed or {}).items()}
    return Graph(ops, values, fixed=fixed, boundary=boundary * MIB)


KEPT = Schedule((Run("up"), Run("down")), (Run("back"), Drop("h"), Drop("t")))


def peaks(graph, **more):
    found = Loop(graph, events(graph, KEPT), **more).peaks()
    return tuple(
        size / MIB for size in (found.first_allocated, found.first_reserved, found.allocated, found.reserved)
    )


def test_a_step_from_nothing():
    """30 and 20 (for x, y, t) and 60 and 30; nothing new in later steps, where g lies where it was."""
    assert peaks(layer()) == (126, 140, 126, 140)


def test_workspaces_and_what_the_caller_holds_at_the_boundary_are_there_for_a_while():
    assert peaks(layer(workspace=25))[:2] == (126, 166)  # too small for g, which comes later
    assert peaks(layer(workspace=40))[:2] == (132, 150)
    assert peaks(layer(boundary=50))[:2] == (146, 160)


def test_state_of_an_optimizer_comes_after_the_first_step_and_has_its_room_from_the_start():
    """Two blocks of the size of g, and the rest."""
    assert peaks(layer(fixed={"optimizer": 60})) == (186, 200, 186, 200)
    assert peaks(layer(fixed={"optimizer": 61, "other": 12})) == (199, 202, 199, 202)


def test_state_for_parameters_of_other_steps_is_one_block():
    """And not a thousand of the size of this step's gradient."""
    assert peaks(layer(fixed={"optimizer": 30_000}))[3] == 140 + 30_000


def test_state_does_not_take_the_blocks_of_the_step():
    """Without room aside it would take that of h, which then had to be asked for again."""
    sizes = {"h": 30, "g": 30}
    kinds = {"h": "activation", "g": "gradient"}
    values = tuple(Value(name, size * MIB, kinds[name]) for name, size in sizes.items())
    ops = Op("up", (), ("h",)), Op("back", ("h",), ("g",), phase="backward")
    graph = Graph(ops, values, fixed={"optimizer": 30 * MIB})
    schedule = Schedule((Run("up"),), (Run("back"), Drop("h")))
    found = Loop(graph, events(graph, schedule)).peaks()
    assert (found.first_reserved, found.reserved) == (90 * MIB, 90 * MIB)


@pytest.mark.parametrize("state", [60, 600])
def test_an_optimizer_that_steps_inside_makes_its_state_while_the_step_runs(state):
    """In holes of the step, and in segments of its own where it has none that large."""
    sizes = {"w": 30, "x": 2, "h": 60, "y": 2, "t": 2, "g": 30}
    kinds = {"w": "parameter", "x": "input", "y": "output", "t": "tangent"}
    values = tuple(Value(name, size * MIB, kinds.get(name, "activation")) for name, size in sizes.items())
    step = Op("step", ("g",), (), phase="backward", kind="pinned", updates=("w",))
    graph = layer().replace(ops=(*layer().ops, step), values=values, fixed={"optimizer": state * MIB})
    backward = (Run("back"), Drop("h"), Drop("t"), Run("step"), Drop("g"))
    found = Loop(graph, events(graph, Schedule(KEPT.forward, backward))).peaks()
    assert (found.first_allocated, found.allocated) == (max(126, 64 + state) * MIB, (126 + state) * MIB)
    assert found.reserved >= found.allocated


def test_what_is_there_already_is_not_asked_for_again():
    held = Segment(0, ((30 * MIB, False),)), Segment(1 << 40, ((2 * MIB, False), (18 * MIB, True)))
    assert peaks(layer(), segments=held) == (126, 140, 126, 140)
    free = Segment(1 << 41, ((200 * MIB, True),))
    assert peaks(layer(), segments=[*held, free]) == (126, 140, 126, 140)  # given back before the first step
    assert peaks(layer(fixed={"optimizer": 60}), segments=held)[2:] == (186, 200)


def test_a_limit_is_kept_or_refused():
    loop = Loop(layer(), events(layer(), KEPT))
    assert loop.peaks(limit=140 * MIB).reserved == 140 * MIB
    with pytest.raises(NoRoomError):
        loop.peaks(limit=139 * MIB)
    assert loop.peaks_below(139 * MIB) is None


def test_an_arena_is_there_before_the_first_step():
    """In 96 MiB h, y, t, g fit, beside 30 for w and 20 for x."""
    loop = Loop(layer(), events(layer(), KEPT))
    assert loop.before == 50 * MIB
    assert loop.peaks(arena=96 * MIB).reserved == 146 * MIB
    assert loop.peaks(arena=80 * MIB).reserved == (130 + 30) * MIB


def test_a_loop_that_brings_a_new_batch_holds_two_for_a_moment():
    """The second batch takes the hole that h had; so h has to be asked for again."""
    sizes, kinds = {"x": 30, "h": 30, "g": 2}, {"x": "input", "h": "activation", "g": "gradient"}
    values = tuple(Value(name, size * MIB, kinds[name]) for name, size in sizes.items())
    ops = Op("up", ("x",), ("h",)), Op("back", ("h",), ("g",), phase="backward")
    graph = Graph(ops, values)
    loop = Loop(graph, events(graph, Schedule((Run("up"),), (Run("back"), Drop("h")))))
    assert loop.peaks().reserved == (30 + 30 + 20) * MIB  # the batch that goes leaves its block to h
    present = Segment(0, ((30 * MIB, False),)), Segment(1 << 40, ((8 * MIB, False), (24 * MIB, True)))
    held = Loop(graph, loop.story, segments=present)
    assert held.before == 62 * MIB
    assert held.peaks().reserved == (62 + 30 + 0) * MIB


seeds, sizes = st.integers(0, 10_000), st.sampled_from([512, 2**18, 3 * 2**20])


@settings(max_examples=60)
@given(seeds, st.integers(1, 9), sizes, st.booleans(), st.booleans())
def test_no_less_is_allocated_than_the_simulator_counts(seed, n, unit, takes, expandable):
    """Where nothing is rounded up, it is the same; more than is allocated is reserved in any case."""
    graph = random_graph(seed, n, takes=takes)
    values = tuple(Value(v.name, v.bytes * unit, v.kind, v.held) for v in graph.values)
    ops = tuple(Op(o.name, o.reads, o.writes, phase=o.phase, kind=o.kind, takes=o.takes) for o in graph.ops)
    graph = Graph(ops, values)
    found = Loop(
        graph, events(graph, keep_all(graph)), settings=AllocatorSettings(expandable=expandable)
    ).peaks()
    peak = simulate(graph, keep_all(graph)).peak
    assert peak <= found.first_allocated <= found.allocated <= found.reserved
    if expandable or unit == 512:
        assert found.first_allocated == peak


def test_settings_are_followed():
    wide = Loop(layer(), events(layer(), KEPT), settings=read_settings("roundup_power2_divisions:2")).peaks()
    assert wide.allocated == (32 + 2 + 64 + 2 + 2 + 32) * MIB
