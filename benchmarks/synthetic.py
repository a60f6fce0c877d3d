"""Training steps of any number of ops, for timing planners: blocks of a transformer, made without tracing.

A step is written forward; the backward follows from it as a tape does it, one op for each forward op
and a sum where a value was read twice. Linear in the number of ops.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from lowtide.errors import LowtideError
from lowtide.plans.graph import Graph, Op, Value, ValueKind

__all__ = ["branched_step", "encoder_decoder", "random_step", "scaled", "unrolled"]

MIB = 1 << 20
TICK = 1e-5
"""Seconds of the unit in which the prices below are written."""


@dataclass
class Tape:
    """A training step under construction."""

    ops: list[Op] = field(default_factory=list)
    size: dict[str, int] = field(default_factory=dict)
    kind: dict[str, ValueKind] = field(default_factory=dict)
    needs: dict[str, list[str]] = field(default_factory=dict)

    def value(self, name: str, size: int, kind: ValueKind = "activation") -> str:
        self.size[name], self.kind[name] = size, kind
        return name

    def op(
        self, name: str, reads: list[str], sizes: list[int], ticks: float, needs: list[str], **more: Any
    ) -> str:
        """Add a forward op; its backward reads `needs` and what it writes besides its first output."""
        writes = [self.value(name if not i else f"{name}.{i}", size) for i, size in enumerate(sizes)]
        self.ops.append(Op(name, tuple(reads), tuple(writes), ticks * TICK, **more))
        self.needs[name] = [*needs, *writes[1:]]
        return writes[0]

    def linear(self, name: str, x: str, outputs: int, weight: int, ticks: float) -> str:
        w = self.value(f"{name}.weight", weight, "parameter")
        return self.op(name, [x, w], [outputs], ticks, [x, w])

    def graph(self, loss: str) -> Graph:
        """The joint graph of the step that ends in this value."""
        self.kind[loss] = "output"
        parts = {loss: [self.value("tangent", self.size[loss], "tangent")]}
        for op in list(reversed(self.ops)):
            self.backward(op, self.sum_of(op.writes[0], parts.pop(op.writes[0])), parts)
        for name, found in parts.items():
            self.kind[self.sum_of(name, found)] = "gradient"
        values = (Value(name, size, self.kind[name]) for name, size in self.size.items())
        return Graph(tuple(self.ops), tuple(values), device="H200", prices="made up")

    def backward(self, op: Op, gradient: str, parts: dict[str, list[str]]) -> None:
        wanted = [name for name in op.reads if self.kind[name] != "input"]
        writes = [self.value(f"{op.name}.d.{name}", self.size[name]) for name in wanted]
        reads = tuple(dict.fromkeys([gradient, *self.needs[op.name]]))
        self.ops.append(Op(f"{op.name}.bw", reads, tuple(writes), 2 * op.seconds, 0, "backward"))
        for name, write in zip(wanted, writes, strict=True):
            parts.setdefault(name, []).append(write)

    def sum_of(self, name: str, parts: list[str]) -> str:
        total = parts[0]
        for part in parts[1:]:
            new = self.value(f"{total}+", self.size[name])
            self.ops.append(Op(new, (total, part), (new,), 0.4 * TICK, phase="backward"))
            total = new
        return total


def add_block(tape: Tape, b: int, x: str, size: int) -> str:
    """A pre-norm block with dropout after its attention; `size` is that of its input."""
    weight = 2 * MIB
    norm = tape.op(f"{b}.norm1", [x], [size, 4096, 4096], 0.5, [x])
    qkv = tape.linear(f"{b}.qkv", norm, 3 * size, 3 * weight, 3.0)
    attend = tape.op(f"{b}.attend", [qkv], [size, size // 16], 4.0, [qkv, f"{b}.attend"])
    proj = tape.linear(f"{b}.proj", attend, size, weight, 1.0)
    drop = tape.op(f"{b}.drop", [proj], [size, size // 4], 0.5, [], kind="random", state=512)
    middle = tape.op(f"{b}.add1", [x, drop], [size], 0.4, [])
    norm = tape.op(f"{b}.norm2", [middle], [size, 4096, 4096], 0.5, [middle])
    up = tape.linear(f"{b}.up", norm, 4 * size, 4 * weight, 4.0)
    gelu = tape.op(f"{b}.gelu", [up], [4 * size], 1.2, [up])
    down = tape.linear(f"{b}.down", gelu, size, 4 * weight, 4.0)
    return tape.op(f"{b}.add2", [middle, down], [size], 0.4, [])


def transformer(blocks: int, *, alike: bool) -> Graph:
    """A transformer of n blocks; its sizes go up and down along the blocks unless they are alike."""
    tape = Tape()
    size = 4 * MIB
    x = tape.linear("embed", tape.value("tokens", MIB // 64, "input"), size, 8 * MIB, 1.0)
    for b in range(blocks):
        if not alike:
            size = 4 * MIB + b * 37 % 64 * (MIB // 16)
            x = tape.linear(f"{b}.fit", x, size, 2 * MIB, 1.0)
        x = add_block(tape, b, x, size)
    return tape.graph(tape.linear("head", x, 512, 8 * MIB, 4.0))


def scaled(ops: int, *, alike: bool = True) -> Graph:
    """A step of at least n ops, and less than one block more; `alike` says whether blocks are equal."""
    if ops < 1:
        raise LowtideError(f"a step has at least one op, {ops} were asked for")
    one, two = (len(transformer(blocks, alike=alike).ops) for blocks in (1, 2))
    more = -(-max(ops - one, 0) // (two - one))
    return transformer(1 + more, alike=alike)


def add_step(tape: Tape, t: str, h: str, c: str) -> tuple[str, str]:
    """A step of an LSTM, op by op: the next hidden and cell states."""
    size = tape.size[h]
    x = tape.value(f"{t}.x", size // 4, "input")
    inner = tape.op(f"{t}.xw", [x, "w"], [4 * size], 4.0, [x, "w"])
    outer = tape.op(f"{t}.hu", [h, "u"], [4 * size], 4.0, [h, "u"])
    gates = tape.op(f"{t}.gates", [inner, outer], [4 * size], 1.0, [])
    i, f, o, g = (tape.op(f"{t}.{gate}", [gates], [size], 0.4, [f"{t}.{gate}"]) for gate in "ifog")
    forget = tape.op(f"{t}.forget", [f, c], [size], 0.4, [f, c])
    fresh = tape.op(f"{t}.fresh", [i, g], [size], 0.4, [i, g])
    cell = tape.op(f"{t}.c", [forget, fresh], [size], 0.4, [])
    tanh = tape.op(f"{t}.tanh", [cell], [size], 0.4, [f"{t}.tanh"])
    return tape.op(f"{t}.h", [o, tanh], [size], 0.4, [o, tanh]), cell


def lstm(steps: int) -> Graph:
    """An LSTM of n steps, unrolled, with a readout of every step."""
    tape = Tape()
    h, c = (tape.value(name, MIB, "input") for name in "hc")
    for name in "wu":
        tape.value(name, 4 * MIB, "parameter")
    outputs = []
    for t in range(steps):
        h, c = add_step(tape, str(t), h, c)
        outputs.append(tape.op(f"{t}.y", [h, "u"], [MIB // 4], 1.0, [h, "u"]))
    stack = tape.op("stack", outputs, [steps * MIB // 4], 1.0, [])
    return tape.graph(tape.op("loss", [stack], [512], 1.0, [stack]))


def unrolled(ops: int) -> Graph:
    """An unrolled LSTM of at least n ops, and less than one step more."""
    one, two = (len(lstm(steps).ops) for steps in (1, 2))
    return lstm(1 + -(-max(ops - one, 0) // (two - one)))


def encoder_decoder(levels: int = 2) -> Graph:
    """Convolutions at sizes that shrink by four at each pooling and grow again, indices and skips across."""
    tape = Tape()
    x, size = tape.value("image", 3 * MIB, "input"), 64 * MIB
    across = []

    def convolutions(name: str, x: str, size: int) -> str:
        for i in range(2):
            x = tape.linear(f"{name}.conv{i}", x, size, MIB // 16, size / MIB / 4)
            x = tape.op(f"{name}.relu{i}", [x], [size], size / MIB / 20, [f"{name}.relu{i}"])
        return x

    for level in range(levels):
        x = convolutions(f"down{level}", x, size)
        across.append((x, size))
        size //= 4
        x = tape.op(f"pool{level}", [x], [size, 2 * size], size / MIB / 5, [])
    for level, (skip, size) in reversed([*enumerate(across)]):
        indices = f"pool{level}.1"
        x = tape.op(f"unpool{level}", [x, indices], [size], size / MIB / 20, [indices])
        x = tape.op(f"join{level}", [x, skip], [size], size / MIB / 20, [])
        x = convolutions(f"up{level}", x, size)
    weight = tape.value("head", 1024, "parameter")
    return tape.graph(tape.op("loss", [x, weight], [512], 1.0, [x, weight]))


def random_step(seed: int, ops: int) -> Graph:
    """A step of random sizes, prices, skips and needs; all of its forward matters to the loss."""
    chance = Random(seed)
    tape = Tape()
    pool = [tape.value("x", chance.randint(1, 9), "input")]
    for i in range(ops):
        near = pool[-6:]
        reads = [pool[-1], *chance.sample(near, chance.randint(0, min(2, len(near))))]
        if i == 0 or chance.random() < 0.4:
            reads.append(tape.value(f"w{i}", chance.randint(0, 3), "parameter"))
        reads = list(dict.fromkeys(reads))
        needs = [name for name in reads if chance.random() < 0.5]
        ticks, workspace = chance.choice([0.0, 1.0, 2.0, 5.0]), chance.choice([0, 0, chance.randint(0, 6)])
        out = tape.op(f"f{i}", reads, [chance.randint(0, 9)], ticks, needs, workspace=workspace)
        if chance.random() < 0.5:
            tape.needs[f"f{i}"].append(out)
        pool.append(out)
    read = {name for op in tape.ops for name in op.reads}
    ends = [name for name in pool if name not in read]
    return tape.graph(tape.op("loss", ends, [1], 1.0, []))


def branched_step(seed: int, ops: int) -> Graph:
    """A step of branches that start and meet anywhere: many orders of its first runs are legal."""
    chance = Random(seed)
    tape = Tape()
    pool = [tape.value("x", chance.randint(1, 9), "input")]
    for i in range(ops):
        reads = list(dict.fromkeys(chance.choices(pool[-8:], k=chance.choice((1, 1, 2)))))
        if i == 0 or chance.random() < 0.3:
            reads.append(tape.value(f"w{i}", chance.randint(0, 3), "parameter"))
        needs = [name for name in reads if chance.random() < 0.4]
        out = tape.op(f"f{i}", reads, [chance.randint(1, 12)], chance.choice([1.0, 2.0, 5.0]), needs)
        pool.append(out)
    read = {name for op in tape.ops for name in op.reads}
    ends = [name for name in pool if name not in read]
    return tape.graph(tape.op("loss", ends, [1], 1.0, []))
