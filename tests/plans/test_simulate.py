"""The simulator against a naive one, on valid and on broken schedules."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import chain, random_graph
from lowtide.errors import ScheduleError
from lowtide.plans.graph import Graph, Op, Value
from lowtide.plans.keep_all import keep_all
from lowtide.plans.order import first_order, with_drops
from lowtide.plans.schedule import Drop, Run, Schedule
from lowtide.plans.simulator import simulate
from naive import judge

seeds = st.integers(0, 10_000)


def random_schedule(graph: Graph, rng: Random) -> Schedule:
    """Keeping everything, with some ops run again in the backward where what they need was there before."""
    forward, backward = first_order(graph)
    runs = list(backward)
    for name in rng.sample(forward, min(len(forward), rng.randint(0, 4))):
        if graph.op[name].kind != "pinned":
            runs.insert(rng.randint(0, len(runs)), name)
    return with_drops(graph, forward, runs)


def broken(graph: Graph, schedule: Schedule, rng: Random) -> Schedule:
    """The schedule with a few random edits: most of them make it invalid."""
    parts = [list(schedule.forward), list(schedule.backward)]
    names = [op.name for op in graph.ops] + ["nobody"]
    values = [value.name for value in graph.values] + ["nothing"]
    for _ in range(rng.randint(1, 3)):
        part = rng.choice(parts)
        at = rng.randint(0, len(part))
        edit = rng.choice(["cut", "run", "drop", "swap"])
        if edit == "run":
            part.insert(at, Run(rng.choice(names)))
        elif edit == "drop":
            part.insert(at, Drop(rng.choice(values)))
        elif part and edit == "cut":
            del part[at % len(part)]
        elif part:
            other = rng.randrange(len(part))
            part[at % len(part)], part[other] = part[other], part[at % len(part)]
    return Schedule(tuple(parts[0]), tuple(parts[1]))


def compare(graph: Graph, schedule: Schedule) -> None:
    expected = judge(graph, schedule)
    if expected.bad_step is not None:
        with pytest.raises(ScheduleError) as caught:
            simulate(graph, schedule)
        assert caught.value.step == expected.bad_step
        return
    timeline = simulate(graph, schedule)
    assert timeline.resident == expected.resident
    assert timeline.peak == expected.peak
    assert timeline.seconds == pytest.approx(expected.seconds)
    assert timeline.again == pytest.approx(expected.again)


@settings(max_examples=100)
@given(seeds, st.integers(1, 9), st.booleans())
def test_valid_schedules_get_the_naive_timeline(seed, n, takes):
    graph = random_graph(seed, n, takes=takes)
    compare(graph, random_schedule(graph, Random(seed)))


@pytest.mark.slow
@settings(max_examples=200)
@given(seeds, st.integers(1, 6), st.booleans())
def test_broken_schedules_get_the_naive_verdict(seed, n, takes):
    graph = random_graph(seed, n, takes=takes)
    rng = Random(seed)
    compare(graph, broken(graph, random_schedule(graph, rng), rng))


def test_the_boundary_counts_what_the_caller_holds():
    graph = chain(3)
    schedule = keep_all(graph)
    peak = simulate(graph, schedule).peak
    assert simulate(graph.replace(boundary=100), schedule).peak == 100 + peak - 1


def test_dropping_a_value_before_its_last_use_is_refused_where_it_is_read():
    graph = chain(3)
    schedule = keep_all(graph)
    steps = (Run("f0"), Run("f1"), Drop("f0"), Run("f2"), *schedule.forward[3:])
    with pytest.raises(ScheduleError, match="reads 'f0', but that is not there"):
        simulate(graph, Schedule(steps, schedule.backward))


def relu_graph() -> Graph:
    """An op that may write in the place of what it reads, of 8 bytes, with a workspace of 1."""
    ops = (
        Op("make", ("x",), ("a",)),
        Op("relu", ("a",), ("b",), workspace=1, takes=("a",)),
        Op("loss", ("b",), ("y",)),
    )
    sizes = {"x": 2, "a": 8, "b": 8, "y": 3}
    kinds = {"x": "input", "y": "output"}
    return Graph(ops, tuple(Value(name, size, kinds.get(name, "activation")) for name, size in sizes.items()))


def resident(*steps: Run | Drop, backward: tuple[Run | Drop, ...] = ()) -> list[int]:
    return list(simulate(relu_graph(), Schedule(steps, backward)).resident)


def test_a_write_in_place_takes_no_bytes_of_its_own():
    make, relu, loss = Run("make"), Run("relu"), Run("loss")
    assert resident(make, relu, Drop("a"), loss, Drop("b")) == [10, 11, 10, 13, 5]
    assert resident(make, relu, loss, Drop("a"), Drop("b")) == [10, 19, 21, 13, 5]


def test_a_write_in_place_beside_a_live_copy_takes_no_bytes_either():
    make, relu, loss = Run("make"), Run("relu"), Run("loss")
    assert resident(make, relu, relu, Drop("a"), loss) == [10, 19, 19, 10, 13]


def test_drops_before_that_of_the_taken_value_find_it_gone():
    make, relu, loss = Run("make"), Run("relu"), Run("loss")
    # Without the taken value counted once, the first drop would be above the run itself.
    assert resident(make, relu, Drop("b"), Drop("a"), make, relu, Drop("a"), loss)[1:4] == [11, 2, 2]


def test_a_drop_at_the_start_of_the_backward_is_not_right_after_the_forward():
    make, relu, loss = Run("make"), Run("relu"), Run("loss")
    assert resident(make, relu, loss, relu, backward=(Drop("a"),)) == [10, 19, 21, 30, 13]
    assert resident(make, relu, loss, relu, Drop("a"), backward=()) == [10, 19, 21, 22, 13]


def test_seconds_do_not_depend_on_the_order_of_runs():
    ops = [Op(f"f{i}", ("x",), (f"y{i}",), seconds=seconds) for i, seconds in enumerate((0.1, 0.2, 0.3))]
    values = (Value("x", 1, "input"), *(Value(f"y{i}", 1, "output") for i in range(3)))
    graph = Graph(tuple(ops), values)
    orders = [Schedule(tuple(Run(f"f{i}") for i in order), ()) for order in ((0, 1, 2), (2, 1, 0))]
    assert len({simulate(graph, order).seconds for order in orders}) == 1


@given(seed=seeds, n=st.integers(1, 12))
def test_keeping_everything_in_no_values_place_is_as_if_no_op_could(seed, n):
    graph = random_graph(seed, n, takes=True).replace(plain_in_place=False)
    plain = graph.replace(ops=tuple(replace(op, takes=()) for op in graph.ops))
    assert simulate(graph, keep_all(graph)) == simulate(plain, keep_all(plain))
    in_place = replace(keep_all(graph), in_place=True)
    assert simulate(graph, in_place).peak <= simulate(graph, keep_all(graph)).peak
    assert graph.fingerprint == plain.fingerprint
