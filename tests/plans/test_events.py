"""The one stream of events, and what is folded from it against replays of their own."""

from collections import Counter
from dataclasses import astuple, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import cnn, random_graph, transformer
from lowtide.devices.allocator import allocator_overhead
from lowtide.errors import ScheduleError
from lowtide.plans.events import (
    COPY,
    FIXED,
    GIVEN,
    STATE,
    VALUE,
    Allocate,
    Boundary,
    Event,
    Free,
    Ran,
    events,
)
from lowtide.plans.graph import Graph, Op, Value
from lowtide.plans.keep_all import keep_all
from lowtide.plans.order import first_order, with_drops
from lowtide.plans.schedule import Drop, Run, Schedule
from lowtide.plans.simulator import saved_bytes, simulate
from lowtide.report.stays import stays
from lowtide.solve import METHODS
from replays import excess_of_two_steps, lifetimes

MIB = 1 << 20
seeds = st.integers(0, 10_000)
units = st.sampled_from([1, MIB * 3 // 4, MIB + 512, 5 * MIB // 2])


def in_units(graph: Graph, unit: int) -> Graph:
    """The graph with all bytes that an allocator sees so many times larger."""
    values = tuple(replace(value, bytes=value.bytes * unit) for value in graph.values)
    ops = tuple(replace(op, workspace=op.workspace * unit) for op in graph.ops)
    return graph.replace(values=values, ops=ops)


def with_runs_again(graph: Graph, chance: Random) -> Schedule:
    """Keeping everything, with some ops run again anywhere in the backward, beside what is there, too."""
    forward, backward = first_order(graph)
    again = [name for name in forward if graph.op[name].kind != "pinned"]
    for name in chance.sample(again, min(len(again), chance.randint(0, 6))):
        backward.insert(chance.randint(0, len(backward)), name)
    return with_drops(graph, forward, backward)


def compare(graph: Graph, schedule: Schedule, chance: Random) -> None:
    """Lifetimes and booked bytes as the replays of their own have them; timelines have their own test."""
    assert sorted(map(astuple, stays(graph, schedule))) == sorted(map(astuple, lifetimes(graph, schedule)))
    for free in ([], [chance.randint(2, 60) * MIB // 2 for _ in range(5)]):
        assert allocator_overhead(graph, schedule, free) == excess_of_two_steps(graph, schedule, free)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(seeds, st.integers(1, 9), units, st.booleans())
def test_what_is_folded_from_the_stream_is_what_replays_of_their_own_say(seed, n, unit, takes):
    graph, chance = in_units(random_graph(seed, n, takes=takes), unit), Random(seed)
    compare(graph, with_runs_again(graph, chance), chance)


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(METHODS))
@settings(max_examples=8, derandomize=True, deadline=None)
@given(seed=seeds, n=st.integers(1, 8), share=st.floats(0.3, 1.0), takes=st.booleans())
def test_so_it_is_for_the_schedules_of_every_solver(method, seed, n, share, takes):
    n = min(n, 3) if method == "exact" else n  # it is slow
    graph = in_units(random_graph(seed, n, takes=takes), MIB + 512)
    top = simulate(graph, keep_all(graph)).peak
    compare(graph, METHODS[method](graph, int(top * share)), Random(seed))


@pytest.mark.parametrize("graph", [cnn(4), transformer(2)], ids=["cnn", "transformer"])
def test_so_it_is_for_blocks_of_real_sizes(graph):
    top = simulate(graph, keep_all(graph)).peak
    compare(graph, METHODS["sqrt_segments"](graph, int(0.6 * top)), Random(0))


@settings(max_examples=50, derandomize=True, deadline=None)
@given(seeds, st.integers(1, 12), st.booleans())
def test_bytes_add_up_to_what_is_left(seed, n, takes):
    """What is there at the end is what nobody dropped, and what is saved is what the lifetimes say."""
    graph = random_graph(seed, n, takes=takes)
    schedule = with_runs_again(graph, Random(seed))
    story = list(events(graph, schedule))
    left = sum(event.bytes for event in story if isinstance(event, Allocate))
    left -= sum(event.bytes for event in story if isinstance(event, Free))
    found = [stay for stay in stays(graph, schedule) if stay.what not in ("workspace", "copy")]
    assert left == sum(stay.bytes for stay in found if stay.end == len(schedule.steps))
    crossing = sum(stay.bytes for stay in found if stay.crosses and stay.what != "fixed")
    given_bytes = sum(value.bytes for value in graph.values if value.kind == "tangent") + graph.given_bytes
    assert saved_bytes(graph, schedule) == crossing - given_bytes


@settings(max_examples=50, derandomize=True, deadline=None)
@given(seeds, st.integers(1, 12), st.booleans())
def test_steps_come_in_order_and_each_is_told_once(seed, n, takes):
    graph = random_graph(seed, n, takes=takes)
    schedule = with_runs_again(graph, Random(seed))
    story = list(events(graph, schedule))
    assert [event.step for event in story] == sorted(event.step for event in story)
    told = Counter(event.step for event in story if ends_step(event))
    assert told == Counter(range(len(schedule.steps)))
    assert sum(isinstance(event, Boundary) for event in story) == 1


def ends_step(event: Event) -> bool:
    """Whether it is a run or a drop, and not what belongs to one."""
    return isinstance(event, Ran) or (isinstance(event, Free) and event.what == VALUE)


def small_graph() -> Graph:
    """`relu` may write in the place of `a`, and `noise` draws random numbers."""
    ops = (
        Op("make", ("x",), ("a",)),
        Op("relu", ("a",), ("b",), workspace=1, takes=("a",)),
        Op("noise", ("b",), ("y",), kind="random", state=5),
        Op("noise.bw", ("t", "y"), ("g",), phase="backward"),
    )
    sizes = {"x": 2, "a": 8, "b": 8, "y": 3, "t": 3, "g": 2}
    kinds = {"x": "input", "y": "output", "t": "tangent", "g": "gradient"}
    values = tuple(Value(name, size, kinds.get(name, "activation")) for name, size in sizes.items())
    return Graph(ops, values, fixed={"other": 7}, boundary=4)


def test_a_stream_by_hand():
    forward = (Run("make"), Run("relu"), Drop("a"), Run("noise"))
    backward = (Run("noise"), Drop("b"), Run("noise.bw"), Drop("t"))
    assert list(events(small_graph(), Schedule(forward, backward))) == [
        Allocate("other", 7, 0, FIXED),
        Allocate("x", 2, 0, GIVEN),
        Allocate("a", 8, 0),
        Ran("make", 0, 0),
        Allocate("b", 0, 1, in_place_of="a"),
        Ran("relu", 1, 1),
        Free("a", 0, 2),
        Allocate("noise", 5, 3, STATE),
        Allocate("y", 3, 3),
        Ran("noise", 0, 3),
        Allocate("t", 3, 4, GIVEN),
        Boundary(4, 4),
        Allocate("y", 3, 4, COPY),
        Ran("noise", 0, 4),
        Free("y", 3, 4, COPY),
        Free("noise", 5, 4, STATE),
        Free("b", 8, 5),
        Allocate("g", 2, 6),
        Ran("noise.bw", 0, 6),
        Free("t", 3, 7),
    ]


def test_a_copy_in_the_place_of_a_value_gives_its_bytes_back_when_the_run_ends():
    schedule = Schedule((Run("make"), Run("relu"), Run("relu"), Drop("a"), Run("noise")), (Run("noise.bw"),))
    story = [event for event in events(small_graph(), schedule) if event.step in (2, 3)]
    assert story == [
        Allocate("b", 0, 2, COPY, in_place_of="a"),
        Ran("relu", 1, 2),
        Free("b", 8, 2, COPY),
        Free("a", 0, 3),
    ]


def test_events_before_a_bad_step_come_and_then_the_error():
    seen = []
    with pytest.raises(ScheduleError, match="reads 'b', but that is not there"):
        seen.extend(events(small_graph(), Schedule((Run("make"), Run("noise")), ())))
    assert seen[-1] == Ran("make", 0, 0)
