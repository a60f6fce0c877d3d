"""The joint graph of one training step: ops in program order, and the values they read and write.

Plain frozen data, no torch. A `Value` is one storage: a view is not a value but an alias of one, and each
output of an op with several outputs is a value of its own. Sizes are bytes as the device's allocator
rounds them. What each kind of value means to a schedule:

| kind | there from | until |
|---|---|---|
| `parameter`, `buffer`, `input` | the start of the step | its end: the caller holds it |
| `accumulated` | the start of the step | its end: a gradient of earlier backward calls, added to |
| `tangent` | the start of the backward | a step that drops it |
| `activation` | an op that writes it | a step that drops it |
| `output` | an op that writes it, in the forward | the end of the step: the caller holds it |
| `gradient` | an op that writes it | the end of the step: it is what the step is for |

A value with `held` set is held by somebody else as well and may never be dropped, whatever its kind. An
output that the caller lets go of before the backward is an `activation` that a pinned op with the target
`return` reads, after which nothing of the forward runs (`returning.py`).
`docs/graph-format.md` documents the JSON form, which can be written by hand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from math import fsum
from operator import or_
from typing import Any, Literal

from ..errors import FormatError
from ..units import format_bytes, format_seconds
from . import json_format

__all__ = ["Graph", "Op", "Value"]

RETURN = "return"
"""The target of the op after which the step returns to its caller: `Op.returns`."""

FORMAT_VERSION = 1
MOST_BITS = 60

MOST_SECONDS = 1e18
"""Of a step: longer than the universe is old, and far from where sums of runs are no finite numbers."""

FIELDS = ("device", "prices", "fixed", "boundary", "plain_in_place", "values", "ops")

ValueKind = Literal[
    "parameter", "buffer", "input", "accumulated", "tangent", "activation", "output", "gradient"
]
OpKind = Literal["pure", "random", "pinned"]
Phase = Literal["forward", "backward"]

GIVEN_KINDS = frozenset({"parameter", "buffer", "input", "accumulated"})
"""Kinds of values that are there before the first step."""

HELD_KINDS = GIVEN_KINDS | {"output", "gradient"}
"""Kinds of values that a schedule may never drop."""

VALUE_KINDS = HELD_KINDS | {"activation", "tangent"}
OP_KINDS = frozenset({"pure", "random", "pinned"})
PHASES = frozenset({"forward", "backward"})


@dataclass(frozen=True, slots=True)
class Value:
    """One storage: its name, its bytes as the allocator rounds them, and what it is.

    >>> from lowtide import Value
    >>> Value("h", 4096, "activation").droppable
    True
    """

    name: str
    bytes: int
    kind: ValueKind = "activation"
    held: bool = False

    @property
    def droppable(self) -> bool:
        """Whether a schedule may drop it."""
        return not self.held and self.kind not in HELD_KINDS


@dataclass(frozen=True, slots=True)
class Op:
    """One operation: what it reads and writes, what it costs, and whether it may be recomputed.

    `kind` is `pure`, `random` (recomputed from its saved random state, which takes `state` bytes from
    its first run to its last when it runs more than once) or `pinned` (runs exactly once). `phase` is
    `backward` when the op depends on a tangent: such an op cannot run in the forward. `takes` are reads in
    whose place the op may put what it writes: when one of them is dropped right after a run, the written
    value takes no bytes of its own while the op runs. `updates` are given values that the op changes for good
    (an optimizer's step on parameters does): nothing that reads one of them may run afterwards, and the op
    is pinned.
    `module`, `source` and `target` are for people: the module path, the user's line, the operator's name.

    >>> from lowtide import Op
    >>> op = Op("mm_3", ("x", "w"), ("y",), seconds=1e-3, module="blocks.3.up", source="model.py:88")
    >>> op.where
    'blocks.3.up, model.py:88'
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    seconds: float = 0.0
    workspace: int = 0
    phase: Phase = "forward"
    kind: OpKind = "pure"
    state: int = 0
    takes: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    module: str = ""
    source: str = ""
    target: str = ""

    @property
    def where(self) -> str:
        """The op by the names its user knows: module path and source line, else its own name."""
        return ", ".join(part for part in (self.module, self.source) if part) or self.name

    @property
    def returns(self) -> bool:
        """Whether the step returns to its caller after this op: the last of the forward."""
        return self.target == RETURN and self.kind == "pinned" and self.phase == "forward"


@dataclass(frozen=True)
class Graph:
    """The joint graph of a training step.

    `fixed` maps names of bands to bytes that are on the device during the whole step and that no value
    stands for (optimizer state, other models). `boundary` is what the caller is known to hold in addition
    between the forward and the backward (a loss computed outside of the captured step). `plain_in_place` says
    whether keeping everything writes in the place of values, too: a compiler does so unasked, while plain
    PyTorch never does, and there `Op.takes` is for capped plans alone.

    >>> from lowtide import Graph, Op, Value
    >>> values = Value("x", 4, "input"), Value("w", 4, "parameter"), Value("y", 4, "output")
    >>> graph = Graph((Op("mul", ("x", "w"), ("y",), seconds=1.0),), values)
    >>> Graph.from_json(graph.to_json()) == graph
    True
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    device: str = "cpu"
    prices: str = "as given"
    fixed: dict[str, int] = field(default_factory=dict)
    boundary: int = 0
    plain_in_place: bool = True

    def __post_init__(self) -> None:
        _check(self)

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __str__(self) -> str:
        count = {phase: sum(op.phase == phase for op in self.ops) for phase in ("forward", "backward")}
        total = format_seconds(self.seconds)
        parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in self.bytes_by_kind().items())
        return (
            f"Graph on {self.device}: {len(self.ops)} ops ({count['forward']} forward, "
            f"{count['backward']} backward), {len(self.values)} values; {parts}; {total} ({self.prices})"
        )

    @cached_property
    def value(self) -> dict[str, Value]:
        """Values by name."""
        return {value.name: value for value in self.values}

    @cached_property
    def op(self) -> dict[str, Op]:
        """Ops by name."""
        return {op.name: op for op in self.ops}

    @cached_property
    def bits(self) -> dict[str, tuple[int, int]]:
        """What each op reads and what it writes, as whole numbers with a bit for each value."""
        bit = {value.name: 1 << index for index, value in enumerate(self.values)}
        return {
            op.name: (_union(bit[name] for name in op.reads), _union(bit[name] for name in op.writes))
            for op in self.ops
        }

    @cached_property
    def writer(self) -> dict[str, Op]:
        """The op that writes each value; given values and tangents have none."""
        return {name: op for op in self.ops for name in op.writes}

    @cached_property
    def returning(self) -> Op | None:
        """The op after which the step returns to its caller, where it has one."""
        return next((op for op in self.ops if op.returns), None)

    @cached_property
    def updaters(self) -> dict[str, tuple[str, ...]]:
        """For each op that reads a value which some op updates: those ops, before which it has to run."""
        changed = {name: op.name for op in self.ops for name in op.updates}
        found = {
            op.name: tuple(dict.fromkeys(changed[name] for name in op.reads if name in changed))
            for op in (self.ops if changed else ())
        }
        return {op: others for op, by in found.items() if (others := tuple(one for one in by if one != op))}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the structure and the sizes: equal for the same step whatever the prices are.

        What ops may overwrite counts where a compiler does so unasked. Elsewhere a schedule says whether it
        makes use of it, and plans that were saved before any op could still belong to their step.
        """
        digest = hashlib.sha256(self.device.partition(":")[0].encode())
        for value in self.values:
            digest.update(f"{value.name}|{value.bytes}|{value.kind}|{value.held}\n".encode())
        for op in self.ops:
            takes = f"|{op.takes}" if op.takes and self.plain_in_place else ""
            more = takes + (f"|updates {op.updates}" if op.updates else "")
            digest.update(f"{op.name}|{op.reads}|{op.writes}|{op.phase}|{op.kind}{more}\n".encode())
        return digest.hexdigest()

    @cached_property
    def structure(self) -> str:
        """A hash of what a schedule must fit, without the sizes: equal for one step at different shapes.

        Values and ops count by their places, so that names make no difference.
        """
        place = {value.name: index for index, value in enumerate(self.values)}
        digest = hashlib.sha256()
        for value in self.values:
            digest.update(f"{value.kind}|{value.held}\n".encode())
        for op in self.ops:
            names = [[place[name] for name in names] for names in (op.reads, op.writes, op.updates)]
            digest.update(f"{names}|{op.phase}|{op.kind}|{op.returns}\n".encode())
        return digest.hexdigest()

    @property
    def fixed_bytes(self) -> int:
        """Bytes that are there during the whole step and that no value stands for."""
        return sum(self.fixed.values())

    @property
    def all_bytes(self) -> int:
        """Bytes of all that there is in the step, as if all of it were there at once."""
        total = self.fixed_bytes + self.boundary + sum(value.bytes for value in self.values)
        return total + sum(op.workspace + op.state for op in self.ops)

    @property
    def given_bytes(self) -> int:
        """Bytes of the values that are there before the step: parameters, buffers, inputs."""
        return sum(value.bytes for value in self.values if value.kind in GIVEN_KINDS)

    @property
    def seconds(self) -> float:
        """Seconds of running every op once."""
        return fsum(op.seconds for op in self.ops)

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of all values of each kind, largest first."""
        sizes: dict[str, int] = {}
        for value in self.values:
            sizes[value.kind] = sizes.get(value.kind, 0) + value.bytes
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))

    def replace(self, **changes: Any) -> Graph:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The plain form that JSON is written from."""
        return {
            "lowtide": "graph",
            "version": FORMAT_VERSION,
            "device": self.device,
            "prices": self.prices,
            "fixed": dict(self.fixed),
            "boundary": self.boundary,
            **({} if self.plain_in_place else {"plain_in_place": False}),
            "values": [json_format.compact(value) for value in self.values],
            "ops": [json_format.compact(op) for op in self.ops],
        }

    @classmethod
    def from_dict(cls, data: Any, *, most_ops: int = json_format.MOST_OPS) -> Graph:
        """The graph of a plain form; raises `FormatError` naming the field that is wrong."""
        json_format.check_header(data, "graph", FORMAT_VERSION, FIELDS)
        json_format.check_ops(data, most_ops)
        return cls(
            ops=tuple(json_format.read_list(Op, data, "ops", needed=("name", "reads", "writes"))),
            values=tuple(json_format.read_list(Value, data, "values", needed=("name", "bytes"))),
            device=json_format.read_text(data, "device", "cpu"),
            prices=json_format.read_text(data, "prices", "as given"),
            fixed=json_format.read_sizes(data, "fixed"),
            boundary=json_format.read_count(data, "boundary", 0),
            plain_in_place=json_format.read_flag(data, "plain_in_place", True),
        )

    def to_json(self) -> str:
        """The graph as JSON text."""
        return json_format.dump(self.to_dict())

    @classmethod
    def from_json(cls, text: str, *, most_ops: int = json_format.MOST_OPS) -> Graph:
        """The graph of a JSON text; nothing in it is executed."""
        return cls.from_dict(json_format.parse(text, "graph"), most_ops=most_ops)


def _union(sets: Iterable[int]) -> int:
    return reduce(or_, sets, 0)


def _check(graph: Graph) -> None:
    """Refuse a graph that no step could have: the message names the op or value and the field."""
    for name, size in graph.fixed.items():
        _check_count(size, f"fixed[{name!r}]")
    _check_count(graph.boundary, "boundary")
    names = _check_values(graph)
    written: set[str] = set()
    seen_ops: set[str] = set()
    for index, op in enumerate(graph.ops):
        where = f"ops[{index}] ({op.name})"
        if op.name in seen_ops:
            raise FormatError(f"{where}: the name is used twice")
        seen_ops.add(op.name)
        _check_op(op, where, names)
        for name in op.reads:
            if names[name].kind not in GIVEN_KINDS | {"tangent"} and name not in written:
                raise FormatError(f"{where}.reads: {name!r} is not written by an earlier op")
            if names[name].kind == "tangent" and op.phase != "backward":
                raise FormatError(f"{where}.phase: reads tangent {name!r}, so it must be 'backward'")
        for name in op.writes:
            if name in written:
                raise FormatError(f"{where}.writes: {name!r} is written by two ops")
            if names[name].kind in GIVEN_KINDS | {"tangent"}:
                raise FormatError(f"{where}.writes: {name!r} is given, not written")
            written.add(name)
    _check_phases(graph)
    _check_returned(graph)
    _check_updates(graph)
    _check_total(graph)
    for index, value in enumerate(graph.values):
        if value.kind in ("activation", "output", "gradient") and value.name not in written:
            raise FormatError(f"values[{index}] ({value.name}): no op writes this {value.kind}")


def _check_values(graph: Graph) -> dict[str, Value]:
    names: dict[str, Value] = {}
    for index, value in enumerate(graph.values):
        where = f"values[{index}] ({value.name})"
        if value.name in names:
            raise FormatError(f"{where}: the name is used twice")
        _check_count(value.bytes, f"{where}.bytes")
        if value.kind not in VALUE_KINDS:
            raise FormatError(f"{where}.kind: {value.kind!r} is not one of {sorted(VALUE_KINDS)}")
        names[value.name] = value
    return names


def _check_op(op: Op, where: str, values: dict[str, Value]) -> None:
    if op.kind not in OP_KINDS:
        raise FormatError(f"{where}.kind: {op.kind!r} is not one of {sorted(OP_KINDS)}")
    if op.phase not in PHASES:
        raise FormatError(f"{where}.phase: {op.phase!r} is not one of {sorted(PHASES)}")
    if not op.seconds >= 0 or op.seconds == float("inf"):
        raise FormatError(f"{where}.seconds: {op.seconds!r} is not a finite number >= 0")
    _check_count(op.workspace, f"{where}.workspace")
    _check_count(op.state, f"{where}.state")
    for field_name in ("reads", "writes", "takes", "updates"):
        names = getattr(op, field_name)
        if len(set(names)) != len(names):
            raise FormatError(f"{where}.{field_name}: a value is named twice")
        for name in names:
            if name not in values:
                raise FormatError(f"{where}.{field_name}: there is no value {name!r}")
    _check_takes(op, where, values)


def _check_takes(op: Op, where: str, values: dict[str, Value]) -> None:
    if op.takes and len(op.writes) != 1:
        raise FormatError(f"{where}.takes: an op that writes in place writes one value, not {len(op.writes)}")
    for name in op.takes:
        taken, written = values[name], values[op.writes[0]]
        if name not in op.reads:
            raise FormatError(f"{where}.takes: {name!r} is not among the reads")
        if not taken.droppable:
            raise FormatError(f"{where}.takes: {name!r} may not be dropped, so nothing can take its place")
        if taken.bytes != written.bytes:
            raise FormatError(
                f"{where}.takes: {name!r} has {taken.bytes} bytes, but {written.name!r} has {written.bytes}"
            )


def _check_returned(graph: Graph) -> None:
    """Refuse to write in the place of what was returned: the caller may hold it against all expectation.

    Nothing of the forward may come after the return either.
    """
    returning = graph.returning
    returned, late = (set(returning.reads), set(returning.writes)) if returning else (set(), set())
    for index, op in enumerate(graph.ops):
        if op.phase == "forward" and (read := late.intersection(op.reads)):
            raise FormatError(
                f"ops[{index}] ({op.name}).reads: {min(read)!r} is written when the step returns"
            )
        if op.returns and returning is not op:
            raise FormatError(f"ops[{index}] ({op.name}).target: the step returns after another op already")
        if taken := returned.intersection(op.takes):
            raise FormatError(f"ops[{index}] ({op.name}).takes: {min(taken)!r} is returned to the caller")


def _check_updates(graph: Graph) -> None:
    """Refuse a given value that is read, or changed once more, after the op that updates it."""
    changed: dict[str, str] = {}
    for index, op in enumerate(graph.ops):
        where = f"ops[{index}] ({op.name})"
        for field_name, names in (("reads", op.reads), ("updates", op.updates)):
            for name in changed.keys() & set(names):
                raise FormatError(f"{where}.{field_name}: {name!r} was updated by {changed[name]!r} before")
        for name in op.updates:
            if graph.value[name].kind not in GIVEN_KINDS:
                raise FormatError(f"{where}.updates: {name!r} is not given, so no op can update it")
        if op.updates and op.kind != "pinned":
            raise FormatError(f"{where}.kind: an op that updates a value must be 'pinned'")
        if op.updates and graph.updaters.get(op.name):
            raise FormatError(f"{where}.reads: an op that updates a value reads what another one updates")
        changed.update(dict.fromkeys(op.updates, op.name))


def _check_total(graph: Graph) -> None:
    """Refuse bytes that do not add up in 64 bits, which solvers count in, and seconds without an end."""
    if graph.all_bytes.bit_length() > MOST_BITS:
        raise FormatError(f"values and ops: their bytes add up to 2^{MOST_BITS} or more, which no device has")
    seconds = sum(op.seconds for op in graph.ops)
    if seconds > MOST_SECONDS:
        raise FormatError(f"ops: their seconds add up to {seconds:.3g}, and no step takes {MOST_SECONDS:g}")


def _check_phases(graph: Graph) -> None:
    backward = {value.name for value in graph.values if value.kind == "tangent"}
    for index, op in enumerate(graph.ops):
        if op.phase == "backward":
            backward.update(op.writes)
            continue
        needs = [name for name in op.reads if name in backward]
        if needs:
            raise FormatError(
                f"ops[{index}] ({op.name}).phase: a forward op reads {needs[0]!r}, "
                "which only exists in the backward"
            )
    for value in graph.values:
        if value.kind == "output" and value.name in backward:
            raise FormatError(f"value {value.name}: an output must be written in the forward")


def _check_count(number: Any, where: str) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise FormatError(f"{where}: {number!r} is not a whole number >= 0")
