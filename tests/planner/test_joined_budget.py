"""Pieces of a step under one budget: the choice against trying everything, on the simulator."""

from itertools import product

import pytest

from lowtide import BudgetTooSmall, Graph, Op, Value
from lowtide.devices.memory import DeviceMemory
from lowtide.planner.joined_budget import Ladders, plan_together
from lowtide.planner.joined_graph import Between, BrokenStep, Turn, join, turn_of
from lowtide.planner.unit_plans import saved_by, unit_plans
from lowtide.units import parse_budget

DEVICE = DeviceMemory()


def piece(depth: int, size: int, *, first: bool = False) -> Graph:
    """A chain of layers, each with a weight; the gradient of its input is handed back, but by the first."""
    values = [Value("x", size, "input"), Value("t", size, "tangent")]
    values += [Value(f"w{i}", 3, "parameter") for i in range(depth)]
    values += [Value(f"a{i}", size, "output" if i == depth - 1 else "activation") for i in range(depth)]
    ops, gradients, before, after = [], [], "x", "t"
    for i in range(depth):
        ops.append(Op(f"f{i}", (before, f"w{i}"), (f"a{i}",), seconds=1.0 + i / 8))
        before = f"a{i}"
    for i in reversed(range(depth)):
        last = i == 0
        writes = [f"dw{i}"] if last and first else [f"dw{i}", f"g{i}"]
        kinds = ["gradient", "gradient" if last else "activation"]
        values += [Value(n, s, k) for n, s, k in zip(writes, (3, size), kinds, strict=False)]
        reads = (after, f"a{i - 1}" if i else "x", f"w{i}")
        gradients.append(Op(f"b{i}", reads, tuple(writes), seconds=2.0, phase="backward"))
        after = f"g{i}"
    return Graph((*ops, *gradients), tuple(values))


def broken(*pieces: Graph, first: int = 0) -> BrokenStep:
    """Pieces one after the other: what one returns the next one reads; something runs between them."""
    turns = []
    for place, graph in enumerate(pieces):
        last = next(v.name for v in graph.values if v.kind == "output")
        turns.append(
            Turn(
                graph,
                inputs={"x": first + place},
                outputs={last: first + place + 1},
                tangents={"t": 1000 + place + 1},
                gradients={} if place == 0 else {"g0": 1000 + place},
                gradient_of={"g0": "x"},
                needs=frozenset({first + place}),
            )
        )
    before = [Between(writes={500 + place: 2}, workspace=5 * place) for place in range(len(pieces))]
    held = frozenset({500})  # what ran before the first piece is held until the backward of the last begins
    return BrokenStep(
        tuple(turns),
        tuple(reversed(range(len(pieces)))),
        (*before, Between(held)),
        (Between(held, workspace=4), *(Between() for _ in pieces)),
        outside=3,
    )


def ladders(step: BrokenStep) -> Ladders:
    return Ladders(step, tuple(unit_plans(turn.graph) for turn in step.turns), {"optimizer": 7})


def every(known: Ladders):
    for plans in product(*known.plans):
        yield join(known.step, plans, fixed=known.fixed), plans


def chosen_for(steps, budget):
    return plan_together(steps, parse_budget(budget), DEVICE, lambda *_: ())


@pytest.mark.parametrize("shapes", [((4, 10), (3, 20)), ((3, 30), (4, 10), (3, 10)), ((5, 12),)])
def test_the_choice_is_the_fastest_that_fits(shapes):
    step = broken(*(piece(*shape, first=not place) for place, shape in enumerate(shapes)))
    known = ladders(step)
    key = tuple(range(len(shapes)))
    tried = [(plan.peak, plan.seconds) for plan, _ in every(known)]
    least, most = min(tried)[0], max(tried)[0]
    for budget in range(least, most + 8, 8):
        plan = chosen_for({key: known}, budget)[key].plan
        assert plan.peak <= budget
        assert plan.seconds == pytest.approx(min(s for p, s in tried if p <= budget))
    assert chosen_for({key: known}, "min")[key].plan.peak == least
    with pytest.raises(BudgetTooSmall, match="for the pieces of this step together") as caught:
        chosen_for({key: known}, least - 1)
    assert caught.value.smallest == least


def test_what_an_earlier_piece_saves_lies_beneath_the_later_ones():
    step = broken(piece(4, 10, first=True), piece(3, 10))
    known = ladders(step)
    kept, lean = (min(known.plans[0], key=lambda plan, sign=sign: sign * saved_by(plan)) for sign in (-1, 1))
    second = known.plans[1][0]
    peaks = [join(step, [plan, second], fixed={}) for plan in (kept, lean)]
    inside = [
        max(r for s, r in zip(p.schedule.steps, p.timeline.resident, strict=True)
            if turn_of(getattr(s, "op", "")) == 1)
        for p in peaks
    ]  # fmt: skip
    assert inside[0] - inside[1] == saved_by(kept) - saved_by(lean)


def test_steps_that_begin_alike_share_the_plans_of_what_they_have_in_common():
    first, short, long = piece(4, 10, first=True), piece(2, 10), piece(6, 14)
    steps = {("a", "b"): ladders(broken(first, short)), ("a", "c"): ladders(broken(first, long))}
    fits = {}
    for key, known in steps.items():
        for plan, plans in every(known):
            fits.setdefault(id(plans[0]), {}).setdefault(key, []).append(plan.peak)
    least = min(max(min(peaks) for peaks in found.values()) for found in fits.values())
    for budget in (least, least + 20, least + 60):
        chosen = chosen_for(steps, budget)
        assert chosen["a", "b"].turns[0] is chosen["a", "c"].turns[0]
        assert all(one.plan.peak <= budget for one in chosen.values())
    with pytest.raises(BudgetTooSmall):
        chosen_for(steps, least - 1)


def test_a_turn_whose_backward_never_comes_keeps_what_it_saves():
    step = broken(piece(3, 10, first=True), piece(3, 10))
    alone = BrokenStep(step.turns, (1,), step.before, (Between(), Between()))
    plans = [unit_plans(turn.graph)[0] for turn in step.turns]
    plan = join(alone, plans, fixed={})
    saved = saved_by(plans[0])
    assert plan.timeline.resident[-1] >= saved
    assert not any(step.op.startswith("1.b") for step in plan.schedule.backward if hasattr(step, "op"))
