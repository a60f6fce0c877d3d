"""A step that torch captured in pieces as one graph and one schedule, for the simulator to judge.

Each piece has a graph of its own, in which its inputs and outputs are there all along. In the step they are
not: what one piece returns and another one reads is made by an op and goes after its last use, the gradient
of it is made by the later piece's backward and used up by the earlier one's, and a parameter that two pieces
read is there once. So values of pieces that are one storage become one value. What runs between two pieces
is not captured; it becomes an op that may run once, with what it was seen to make, to hold and to take.
Pieces follow each other in the forward, and in the order in which autograd called them in the backward.

Only the order of runs is taken from the plans of the pieces: every value goes after its last use in the whole
step (`plans/order.py`), as the executor frees it. O(ops + reads + writes); no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..plans.graph import GIVEN_KINDS, Graph, Op, Value
from ..plans.order import with_drops
from ..plans.planned_step import Plan, make_plan
from ..plans.schedule import Drop, Run, Schedule

__all__ = ["BETWEEN", "Between", "BrokenStep", "Turn", "join", "turn_of"]

BETWEEN = "not captured"
"""The target of the ops that stand for what runs between pieces."""


@dataclass(frozen=True)
class Turn:
    """One run of a piece in a step: its graph, and by value the storages of what goes in and comes out.

    `tangents` and `gradients` are those that its backward was given and gave; `gradient_of` is the input that
    each gradient is of. `needs` are the storages among inputs and outputs that its backward reads.
    """

    graph: Graph
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    tangents: Mapping[str, int] = field(default_factory=dict)
    gradients: Mapping[str, int] = field(default_factory=dict)
    gradient_of: Mapping[str, str] = field(default_factory=dict)
    needs: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Between:
    """What runs between two pieces: the storages that are alive then, what it makes, and its peak above.

    `reads` are alive for somebody else than the pieces, `writes` are bytes by storage.
    """

    reads: frozenset[int] = frozenset()
    writes: Mapping[int, int] = field(default_factory=dict)
    workspace: int = 0
    where: str = ""

    @property
    def bytes(self) -> int:
        """The most that it takes."""
        return sum(self.writes.values()) + self.workspace


@dataclass(frozen=True)
class BrokenStep:
    """A step in pieces, as it was seen: what runs before each turn and after the last, forward and backward.

    `backward` are the turns in the order of their backward, `returned` the storages that the caller was
    given, `outside` the bytes of a loss that the caller computes, `beside` those of tensors that were there
    before and that only what is not captured reads.
    """

    turns: tuple[Turn, ...]
    backward: tuple[int, ...]
    before: tuple[Between, ...]
    before_backward: tuple[Between, ...]
    returned: frozenset[int] = frozenset()
    outside: int = 0
    beside: int = 0

    def alone(self, place: int) -> BrokenStep:
        """One turn of it, with what it is given by others and what others hold of it as it is in the step."""
        turn = self.turns[place]
        earlier = [set(other.outputs.values()) for other in self.turns[:place]]
        made = set().union(*earlier, *(between.writes for between in self.before[: place + 1]))
        sizes = {turn.inputs[name]: turn.graph.value[name].bytes for name in turn.inputs}
        given = Between(writes={number: size for number, size in sizes.items() if number in made})
        here = self.backward.index(place) if place in self.backward else len(self.backward)
        held = _reads(self.before_backward[: here + 1])
        later = _reads(self.before_backward[here + 1 :]).union(
            *(self.turns[other].needs for other in self.backward[here + 1 :])
        )
        after = Between(_reads(self.before[place + 1 :]) | held | later)
        backward = (
            (Between(held | later), Between(later)) if place in self.backward else (Between(held | later),)
        )
        return BrokenStep(
            (turn,), (0,) if place in self.backward else (), (given, after), backward, self.returned
        )


def _reads(between: Sequence[Between]) -> frozenset[int]:
    return frozenset().union(*(each.reads for each in between))


def join(
    step: BrokenStep, plans: Sequence[Plan], *, fixed: Mapping[str, int], notes: tuple[str, ...] = ()
) -> Plan:
    """The plan of the whole step where each turn follows one of the plans of its graph."""
    joined = _Joined(step, plans)
    graph = joined.graph(dict(fixed))
    forward, backward = joined.orders()
    kept = all(plan.method == "keep_all" for plan in plans)
    schedule = with_drops(graph, forward, backward)
    return make_plan(graph, schedule, method="keep_all" if kept else "auto", notes=notes)


def turn_of(op: str) -> int | None:
    """The turn that an op of a joined graph belongs to; None for what runs between them."""
    place, _, name = op.partition(".")
    return int(place) - 1 if name and place.isdigit() else None


class _Joined:
    """The names and kinds of values in the whole step, and its ops."""

    def __init__(self, step: BrokenStep, plans: Sequence[Plan]) -> None:
        self.step, self.plans = step, plans
        self.values: dict[str, Value] = {}
        self.of_storage: dict[int, str] = {}
        self.names: list[dict[str, str]] = [{} for _ in step.turns]
        self.first_of: dict[str, int] = {}
        self.summed: list[str] = []
        self.ops: list[Op] = []
        self.write_in()

    def graph(self, fixed: dict[str, int]) -> Graph:
        first = self.step.turns[0].graph
        used = {name for op in self.ops for name in (*op.reads, *op.writes)}
        values = [v for v in self.values.values() if v.kind in GIVEN_KINDS or v.name in used]
        return Graph(
            tuple(self.ops),
            tuple(values),
            device=first.device,
            prices=first.prices,
            fixed=fixed,
            boundary=self.step.outside,
            plain_in_place=all(turn.graph.plain_in_place for turn in self.step.turns),
        )

    def write_in(self) -> None:
        """All ops in their order, with the values that they write."""
        step, backward = self.step, set(self.step.backward)
        for place, turn in enumerate(step.turns):
            self.between(f"before piece {place + 1}", step.before[place], "forward")
            self.give(place, turn)
            self.add_ops(place, turn, "forward", whole=place in backward)
        self.between("end of the forward", step.before[-1], "forward")
        for index, place in enumerate(step.backward):
            self.between(f"before the backward of piece {place + 1}", step.before_backward[index], "backward")
            self.give_tangents(place, step.turns[place], first=index == 0)
            self.add_ops(place, step.turns[place], "backward")
        self.between("end of the backward", step.before_backward[-1], "backward", more=self.left_over())

    def between(self, name: str, seen: Between, phase: str, *, more: Sequence[str] = ()) -> None:
        there = [self.of_storage[each] for each in sorted(seen.reads) if each in self.of_storage]
        reads = [each for each in there if self.values[each].kind not in GIVEN_KINDS]
        reads += self.summed  # autograd adds them to the first ones, and they are gone
        self.summed = []
        writes = [self.new(f"{name}: {each}", size, each) for each, size in seen.writes.items()]
        module = f"{name}, not captured"
        op = Op(
            name,
            tuple(dict.fromkeys([*reads, *more])),
            tuple(writes),
            workspace=seen.workspace,
            kind="pinned",
        )
        self.ops.append(replace(op, phase=phase, module=module, source=seen.where, target=BETWEEN))  # type: ignore[arg-type]

    def new(self, name: str, size: int, storage: int | None, kind: str = "activation", **more: bool) -> str:
        """A value of the step; one storage is one value, whatever pieces call it."""
        if storage is not None:
            if storage in self.of_storage:
                return self.of_storage[storage]
            self.of_storage[storage] = name
            if kind == "activation" and storage in self.step.returned:
                kind = "output"
        self.values[name] = Value(name, size, kind, **more)  # type: ignore[arg-type]
        return name

    def give(self, place: int, turn: Turn) -> None:
        """What a turn is given: what nobody in the step has made was there before it."""
        for value in turn.graph.values:
            if value.kind in GIVEN_KINDS:
                storage = turn.inputs.get(value.name)
                name = self.new(
                    f"{place + 1}.{value.name}", value.bytes, storage, value.kind, held=value.held
                )
                self.names[place][value.name] = name

    def give_tangents(self, place: int, turn: Turn, *, first: bool) -> None:
        """The gradients of a turn's outputs: from a later turn, from what runs between, or from outside."""
        for value in turn.graph.values:
            if value.kind == "tangent":
                storage = turn.tangents.get(value.name)
                comes = storage is not None or first
                size = value.bytes if comes else 0
                name = self.new(
                    f"{place + 1}.{value.name}", size, storage, "tangent", held=value.held and comes
                )
                self.names[place][value.name] = name

    def add_ops(self, place: int, turn: Turn, phase: str, *, whole: bool = True) -> None:
        """The ops of a phase; of a turn that has no backward in this step, those that its forward runs."""
        schedule = self.plans[place].schedule
        runs = {step.op for step in schedule.forward if isinstance(step, Run)}
        for op in turn.graph.ops:
            if op.phase == phase and (whole or op.name in runs):
                self.add_op(place, turn, op, in_place=schedule.in_place)

    def add_op(self, place: int, turn: Turn, op: Op, *, in_place: bool) -> None:
        names = self.names[place]
        for written in op.writes:
            if written not in names:
                names[written] = self.written(place, turn, written)
        reads, writes, takes = ([names[name] for name in each] for each in (op.reads, op.writes, op.takes))
        self.ops.append(
            replace(
                op,
                name=f"{place + 1}.{op.name}",
                reads=tuple(dict.fromkeys(reads)),
                writes=tuple(writes),
                takes=tuple(takes) if in_place else (),
            )
        )

    def written(self, place: int, turn: Turn, name: str) -> str:
        """What an op of a turn writes: an output is a value like others, and so is what it hands back.

        The gradient of what another turn has read, too, is added to the first one of it.
        """
        value = turn.graph.value[name]
        storage = turn.outputs.get(name, turn.gradients.get(name))
        kind = value.kind
        of = self.names[place].get(turn.gradient_of.get(name, ""))
        added = kind == "gradient" and of is not None and self.first_of.setdefault(of, place) != place
        handed_back = of is not None and self.values[of].kind not in GIVEN_KINDS
        if kind == "output" or (kind == "gradient" and (handed_back or added)):
            kind = "activation"
        made = self.new(f"{place + 1}.{name}", value.bytes, storage, kind, held=value.held)
        self.summed += [made] if added and not handed_back else []
        return made

    def left_over(self) -> list[str]:
        """What turns save whose backward never comes: it is there until the step is over."""
        missing = set(range(len(self.step.turns))) - set(self.step.backward)
        found = []
        for place in sorted(missing):
            turn, schedule = self.step.turns[place], self.plans[place].schedule
            names = self.names[place]
            written = {
                name for s in schedule.forward if isinstance(s, Run) for name in turn.graph.op[s.op].writes
            }
            gone = {step.value for step in schedule.forward if isinstance(step, Drop)}
            kept = written - gone - set(turn.outputs)  # of its results it was seen how long they are there
            found += [names[name] for name in sorted(kept) if name in names]
        return found

    # The order of runs

    def orders(self) -> tuple[list[str], list[str]]:
        """The runs of the forward and of the backward."""
        return list(self.forward()), list(self.backward())

    def forward(self) -> Iterator[str]:
        for place, plan in enumerate(self.plans):
            yield f"before piece {place + 1}"
            yield from _runs(place, plan.schedule, "forward")
        yield "end of the forward"

    def backward(self) -> Iterator[str]:
        for place in self.step.backward:
            yield f"before the backward of piece {place + 1}"
            yield from _runs(place, self.plans[place].schedule, "backward")
        yield "end of the backward"


def _runs(place: int, schedule: Schedule, phase: str) -> Iterator[str]:
    steps = schedule.forward if phase == "forward" else schedule.backward
    return (f"{place + 1}.{step.op}" for step in steps if isinstance(step, Run))
