"""Sequences: counts against brute force and another package, actions replayed, graphs judged."""

import heapq
from functools import cache
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import chain, cnn, random_graph, transformer
from lowtide.errors import LowtideError, ScheduleError
from lowtide.plans.keep_all import keep_all
from lowtide.plans.order import first_order, with_drops
from lowtide.plans.simulator import simulate
from lowtide.solve.sequence import (
    Backward,
    Forward,
    Load,
    Pop,
    Push,
    actions,
    forward_count,
    replay,
    schedule,
    sequence,
    sequence_orders,
)
from oracle import best_seconds

INFINITE = float("inf")
KEEPS = ("hidden", "internal", "mixed")
SIZES = [(alpha, beta) for alpha in (1, 2, 3, 5) for beta in range(1, alpha + 1)]

# Forward runs of 1000 steps, from the paper's recurrences.
TABLE = {
    2: (29820, 28864),
    5: (7284, 6292),
    10: (4636, 3640),
    20: (3747, 2750),
    50: (2948, 1950),
    100: (2898, 1900),
    500: (2498, 1500),
}


@cache
def hidden(t, m):
    if t <= 1 or m == 1:
        return t * (t + 1) // 2
    return min(y + hidden(t - y, m - 1) + hidden(y, m) for y in range(1, t))


@cache
def internal(t, m):
    if t == 0:
        return 0
    if m == 0:
        return INFINITE
    return min(y + internal(y - 1, m) + internal(t - y, m - 1) for y in range(1, t + 1))


@cache
def mixed(t, m, alpha, beta):
    if t == 0 and m >= 0:
        return 0
    if m < 1:
        return INFINITE
    if t == 1 or m == 1:
        return t * (t + 1) // 2
    found = [y + mixed(y, m, alpha, beta) + mixed(t - y, m - 1, alpha, beta) for y in range(1, t)]
    for y in range(1, t + 1):
        rest = mixed(t - y, m - (beta if y == 1 else alpha), alpha, beta)
        found.append(y + mixed(y - 1, m, alpha, beta) + rest)
    return min(found)


def least_runs(t, m, keep):
    """The least forward runs by Dijkstra over what is stored, where the workspace is and what it ran last."""
    # A stored state is its number; internal states are stored as the state that they lead to.
    start = (t, frozenset({0} if keep == "hidden" else ()), 0, False)
    heap, done = [(0, 0, start)], set()
    while heap:
        cost, _, state = heapq.heappop(heap)
        if state in done:
            continue
        done.add(state)
        left, stored, at, ran = state
        if left == 0:
            return cost
        moves = [(0, (left, stored - {one}, at, ran)) for one in stored]
        moves += [(0, (left, stored, one, False)) for one in stored | ({0} if keep == "internal" else set())]
        if at < left:
            moves.append((1, (left, stored, at + 1, True)))
        if len(stored | {at}) <= m and (keep == "hidden" or ran):
            moves.append((0, (left, stored | {at}, at, ran)))
        if left in stored if keep == "internal" else (ran and at == left):
            moves.append((0, (left - 1, stored, at, ran)))
        for more, after in moves:
            heapq.heappush(heap, (cost + more, len(done) + len(heap), after))
    return None


def least_mixed_runs(t, m, alpha, beta):
    """The same for stored states of both kinds, freed last in, first out: (kind, number, slots) of each."""
    start = (t, (("hidden", 0, 1),), 0, False)
    heap, done = [(0, 0, start)], set()
    while heap:
        cost, _, state = heapq.heappop(heap)
        if state in done:
            continue
        done.add(state)
        left, stored, at, ran = state
        if left == 0:
            return cost
        named = {(kind, number) for kind, number, _ in stored}
        states = {number + (kind == "internal") for kind, number in named}
        moves = [(0, (left, stored, one, False)) for one in states]
        if len(stored) > 1:
            moves.append((0, (left, stored[:-1], at, ran)))
        if at < left:
            moves.append((1, (left, stored, at + 1, True)))
        new = [("hidden", at, 1)]
        if ran:
            new.append(("internal", at - 1, beta if at - 1 in states else alpha))
        for one in new:
            if one[:2] not in named and sum(size for *_, size in (*stored, one)) <= m:
                moves.append((0, (left, (*stored, one), at, ran)))
        if (ran and at == left) or ("internal", left - 1) in named:
            moves.append((0, (left - 1, stored, at, ran)))
        for more, after in moves:
            heapq.heappush(heap, (cost + more, len(done) + len(heap), after))
    return None


@pytest.mark.parametrize("slots", TABLE)
def test_the_papers_table_for_a_thousand_steps(slots):
    found = (forward_count(1000, slots), forward_count(1000, slots, keep="internal"))
    assert found == TABLE[slots]


@pytest.mark.slow
def test_mixed_at_five_and_at_two_percent_of_the_memory():
    assert forward_count(1000, 250, keep="mixed", internal=5) == 1950
    assert forward_count(1000, 100, keep="mixed", internal=5) == 1995
    assert forward_count(1000, 100, keep="mixed", internal=5, held=4) == 1988


def test_hidden_and_internal_are_the_recurrences():
    for t in range(41):
        for m in range(1, 14):
            assert forward_count(t, m) == hidden(t, m)
            assert forward_count(t, m, keep="internal") == internal(t, m)


@pytest.mark.parametrize(("alpha", "beta"), SIZES)
def test_mixed_is_the_recurrence(alpha, beta):
    for t in range(22):
        for m in range(1, 14):
            found = forward_count(t, m, keep="mixed", internal=alpha, held=beta)
            assert found == mixed(t, m, alpha, beta)


@pytest.mark.parametrize("keep", ["hidden", "internal"])
def test_no_actions_at_all_take_fewer_runs(keep):
    for t in range(7):
        for m in range(1, 4):
            assert forward_count(t, m, keep=keep) == least_runs(t, m, keep)


@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (2, 1), (3, 2)])
def test_no_actions_at_all_take_fewer_runs_with_states_of_both_kinds(alpha, beta):
    for t in range(6):
        for m in range(1, 6):
            found = forward_count(t, m, keep="mixed", internal=alpha, held=beta)
            assert found == least_mixed_runs(t, m, alpha, beta)


def test_mixed_lies_between_the_other_two():
    for t in (1, 7, 30):
        for m in (1, 4, 9):
            assert forward_count(t, m, keep="mixed") == forward_count(t, m, keep="internal")
            assert forward_count(t, m, keep="mixed", internal=m + 1) == forward_count(t, m)


def test_a_million_steps_are_exact():
    assert forward_count(10**6, 1) == 10**6 * (10**6 + 1) // 2
    assert forward_count(10**6, 10**6) == 2 * 10**6 - 1
    assert forward_count(10**6, 10**6, keep="internal") == 10**6
    # binom(50 + r, 50) reaches 10^6 at r = 5: p = 5 · 10^6 - binom(55, 51), and one run of each step.
    assert forward_count(10**6, 50) == 6 * 10**6 - 341055


STRATEGIES = [{"keep": keep} for keep in ("hidden", "internal")]
STRATEGIES += [{"keep": "mixed", "internal": alpha, "held": beta} for alpha, beta in SIZES]


@pytest.mark.parametrize("more", STRATEGIES, ids=lambda more: "-".join(map(str, more.values())))
def test_replayed_actions_take_as_many_runs_as_counted(more):
    for t in range(18):
        for m in range(1, 10):
            assert replay(schedule(t, m, **more), t, m, **more) == forward_count(t, m, **more)


@pytest.mark.parametrize("keep", KEEPS)
def test_a_longer_sequence_is_replayed(keep):
    found = replay(actions(300, 25, keep=keep, internal=4, held=3), 300, 25, keep=keep, internal=4, held=3)
    assert found == forward_count(300, 25, keep=keep, internal=4, held=3)


def test_actions_of_a_million_steps_come_one_by_one():
    first = list(islice(actions(10**6, 20), 3))
    assert first[0].start == 0
    assert first[1] == Push(first[0].stop)
    assert first[2].start == first[0].stop


def test_actions_compare_and_print():
    assert schedule(2, 2) == [
        Forward(0, 1),
        Push(1),
        Forward(1, 2),
        Backward(1),
        Pop(1),
        Load(0),
        Forward(0, 1),
        Backward(0),
    ]
    assert str(Push(3, "internal")) == "Push(at=3, what='internal')"


BAD = [
    ([Forward(1, 2)], "action 0: runs step 1, but the workspace is at state 0"),
    ([Forward(0, 3)], "runs steps 0 to 2 of 2"),
    ([Forward(0, 0)], "runs steps 0 to -1 of 2"),
    ([Forward(0, 1), Backward(0)], "action 1: runs the backward of step 0, but that of 1 is next"),
    ([Backward(1)], "whose internal state is not there"),
    ([Forward(0, 2), Load(0), Backward(1)], "whose internal state is not there"),
    ([Forward(0, 2), Backward(1), Backward(0)], "whose internal state is not there"),
    ([Forward(0, 2), Load(1)], "loads state 1, which is not stored"),
    ([Forward(0, 1), Push(1), Forward(1, 2), Push(2)], "uses 3 slots of 2"),
    ([Forward(0, 2), Push(1)], "stores the hidden state 1, which is not in the workspace"),
    ([Forward(0, 1), Push(1), Push(1)], "may not be stored here"),
    ([Forward(0, 1), Push(0, "internal")], "may not be stored here"),
    ([Forward(0, 1), Pop(1)], "frees the hidden state 1, which is not what was stored last"),
    ([Forward(0, 1), Push(1), Pop(1), Load(0), Load(1)], "loads state 1, which is not stored"),
    ([Forward(0, 2), Backward(1)], "the actions end, but steps 0 to 0 did not go backward"),
]


@pytest.mark.parametrize(("stream", "message"), BAD)
def test_a_replay_refuses(stream, message):
    with pytest.raises(ScheduleError, match=message):
        replay(stream, 2, 2)


def test_a_replay_of_internal_states_wants_them_in_slots():
    with pytest.raises(ScheduleError, match="action 1: runs the backward of step 0"):
        replay([Forward(0, 1), Backward(0)], 1, 1, keep="internal")
    assert replay([Forward(0, 1), Push(0, "internal"), Backward(0)], 1, 1, keep="internal") == 1


def test_a_replay_counts_the_sizes_of_mixed_states():
    stream = [Forward(0, 1), Push(0, "internal"), Forward(1, 3), Push(2, "internal")]
    stream += [Backward(2), Pop(2, "internal"), Load(1), Forward(1, 2), Backward(1), Backward(0)]
    # The start state takes a slot. Step 0 starts from it: 3. Step 2 does not start from a stored one: 4.
    assert replay(stream, 3, 8, keep="mixed", internal=4, held=3) == 4
    with pytest.raises(ScheduleError, match="uses 8 slots of 7"):
        replay(stream, 3, 7, keep="mixed", internal=4, held=3)


def test_a_replay_of_mixed_states_counts_the_slot_of_the_start_state():
    assert forward_count(3, 1, keep="mixed") == 6
    with pytest.raises(ScheduleError, match="uses 2 slots of 1"):
        replay(schedule(3, 2), 3, 1, keep="mixed")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": -1}, "steps=-1 must be a whole number of at least 0"),
        ({"slots": 0}, "slots=0 must be a whole number of at least 1"),
        ({"steps": 2.0}, r"steps=2\.0 is not a whole number"),
        ({"slots": "3"}, "slots='3' is not a whole number"),
        ({"slots": True}, "slots=True must be"),
        ({"internal": 0}, "internal=0 must be a whole number of at least 1"),
        ({"internal": 2, "held": 3}, "held=3 is above internal=2"),
        ({"keep": "all"}, "keep='all' is not known; choose one of hidden, internal, mixed"),
        ({"keep": "mixed", "steps": 10**6}, "table of 1000000 steps by 50 slots"),
    ],
)
@pytest.mark.parametrize("function", [forward_count, schedule])
def test_bad_arguments_are_named(function, change, message):
    with pytest.raises(LowtideError, match=message):
        function(**{"steps": 10, "slots": 50, **change})


def test_an_unknown_strategy_on_a_graph_is_named():
    with pytest.raises(LowtideError, match="choose one of hidden, internal, mixed"):
        sequence(chain(3), 0, keep="all")


# The package counts as we do: its units hold the start state too, and the step that goes backward runs once
# more before it.


@pytest.mark.parametrize("name", ["MultistageCheckpointSchedule", "Revolve"])
def test_hidden_runs_as_many_steps_as_the_schedules_of_checkpoint_schedules(name):
    package = pytest.importorskip("checkpoint_schedules")
    for steps in (2, 3, 5, 8, 13, 21, 34, 60):
        for slots in (1, 2, 3, 5, 8, 12):
            more = (0,) if name == "MultistageCheckpointSchedule" else ()
            total = 0
            for action in getattr(package, name)(steps, slots, *more):
                if isinstance(action, package.Forward):
                    total += min(action.n1, steps) - action.n0
                if isinstance(action, package.EndReverse):
                    break
            assert forward_count(steps, slots) == total


def test_hidden_is_the_count_of_checkpoint_schedules():
    package = pytest.importorskip("checkpoint_schedules")
    for steps in range(1, 70):
        for slots in range(1, 20):
            assert forward_count(steps, slots) == package.optimal_steps_binomial(steps, slots)


# Graphs.


@cache
def reversal(steps: int, slots: int) -> int:
    """Forward runs to reverse a chain with its input and n more values kept."""
    if steps <= 1:
        return 0
    if slots == 0:
        return steps * (steps - 1) // 2
    return min(part + reversal(steps - part, slots - 1) + reversal(part, slots) for part in range(1, steps))


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_a_short_chain_gets_the_optimum_of_all_schedules(n):
    graph = chain(n)
    for slots in range(1, n):
        # The input, the output and three values of the running step; the rest is for checkpoints.
        timeline = simulate(graph, sequence(graph, 4 + slots))
        assert timeline.peak <= 4 + slots
        assert timeline.seconds == best_seconds(graph, 4 + slots)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "slots"), [(24, 1), (24, 3), (64, 2), (64, 9), (100, 31), (256, 3), (256, 8), (256, 100)]
)
def test_a_chain_takes_the_optimal_number_of_runs(n, slots):
    graph = chain(n)
    timeline = simulate(graph, sequence(graph, 4 + slots))
    assert timeline.peak <= 4 + slots
    # The first sweep runs the last step too, which a reversal does not count.
    assert timeline.again == forward_count(n, slots) - 2 * n + 1
    if n <= 100:
        assert timeline.again == reversal(n, slots - 1) - (n - 1)


@pytest.mark.slow
def test_the_orders_for_no_budget_have_the_optimum_of_a_chain_for_every_number_of_slots():
    graph = chain(256)
    orders = list(sequence_orders(graph))
    assert orders[0] == first_order(graph)
    for slots in (1, 2, 3, 5, 8, 16, 50, 128, 255):
        timeline = simulate(graph, with_drops(graph, *orders[slots]))
        assert timeline.peak == 4 + slots
        assert timeline.again == forward_count(256, slots) - 2 * 256 + 1


@pytest.mark.slow
@pytest.mark.parametrize("keep", KEEPS)
@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 25), share=st.floats(0.2, 1.1))
def test_any_graph_gets_a_schedule_that_is_accepted(keep, seed, n, share):
    graph = random_graph(seed, n)
    top = simulate(graph, keep_all(graph))
    budget = int(top.peak * share)
    timeline = simulate(graph, sequence(graph, budget, keep=keep))
    least = simulate(graph, sequence(graph, 0, keep=keep)).peak
    assert least <= timeline.peak <= max(budget, least)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.integers(0, 10_000), st.integers(1, 25))
def test_all_orders_for_no_budget_are_accepted(seed, n):
    graph = random_graph(seed, n)
    orders = sequence_orders(graph)
    assert next(orders) == first_order(graph)
    for order in islice(orders, 0, None, 7):
        simulate(graph, with_drops(graph, *order))


@pytest.mark.parametrize("keep", KEEPS)
def test_a_budget_above_the_natural_peak_keeps_everything(keep):
    graph = transformer(2)
    assert sequence(graph, simulate(graph, keep_all(graph)).peak, keep=keep) == keep_all(graph)


@pytest.mark.slow
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("graph", [cnn(8), transformer(6)], ids=["cnn", "transformer"])
def test_blocks_fit_into_three_fifths_of_the_memory_for_less_than_one_more_forward(graph, keep):
    top = simulate(graph, keep_all(graph))
    timeline = simulate(graph, sequence(graph, top.peak * 3 // 5, keep=keep))
    assert timeline.peak <= top.peak * 3 // 5
    assert 0 < timeline.extra < 1 / 3


def test_graphs_without_ops_without_a_backward_and_without_seconds():
    empty = chain(1).replace(ops=(), values=())
    assert simulate(empty, sequence(empty, 0)).peak == 0
    assert list(sequence_orders(empty)) == [([], [])]
    graph = chain(6)
    kept = [op for op in graph.ops if op.phase == "forward"]
    names = {name for op in kept for name in (*op.reads, *op.writes)}
    forward = graph.replace(ops=tuple(kept), values=tuple(v for v in graph.values if v.name in names))
    assert simulate(forward, sequence(forward, 0)).again == 0
    free = chain(12, seconds=0.0)
    assert simulate(free, sequence(free, 0)).peak == 5


@pytest.mark.slow
def test_the_same_graph_gets_the_same_schedule():
    budget = simulate(cnn(6), keep_all(cnn(6))).peak * 2 // 5
    assert sequence(cnn(6), budget) == sequence(cnn(6), budget)
