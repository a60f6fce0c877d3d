"""Joint graphs to test solvers on: a small builder that derives the backward, and shapes made with it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from lowtide.plans.graph import Graph, Op, Value

MIB = 1 << 20


@dataclass
class Step:
    """A training step under construction: forward ops are added, the backward is derived from them."""

    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    size: dict[str, int] = field(default_factory=dict)

    def value(self, name: str, size: int, kind: Any = "activation", held: bool = False) -> str:
        self.values.append(Value(name, size, kind, held))
        self.size[name] = size
        return name

    def op(
        self, name: str, reads: list[str], sizes: list[int], seconds: float = 1.0, **more: Any
    ) -> list[str]:
        """Add a forward op and return what it writes: `name`, `name.1`, ..."""
        writes = [name if i == 0 else f"{name}.{i}" for i in range(len(sizes))]
        for write, size in zip(writes, sizes, strict=True):
            self.value(write, size)
        self.ops.append(Op(name, tuple(reads), tuple(writes), seconds, **more))
        return writes

    def graph(self, output: str, *, needs: dict[str, list[str]] | None = None, factor: float = 2.0) -> Graph:
        """The joint graph; `needs[op]` is what an op's backward reads besides gradients."""
        self._set_kind(output, "output")
        tangent = self.value("tangent", self.size[output], "tangent")
        parts: dict[str, list[str]] = {output: [tangent]}
        kinds = {value.name: value.kind for value in self.values}
        for op in reversed(list(self.ops)):
            grads = [self._sum(write, parts.pop(write)) for write in op.writes if write in parts]
            if grads:
                self._backward(op, grads, (needs or {}).get(op.name, list(op.reads)), parts, kinds, factor)
        for name in [name for name, kind in kinds.items() if kind == "parameter" and name in parts]:
            self._set_kind(self._sum(name, parts[name]), "gradient")
        return Graph(tuple(self.ops), tuple(self.values))

    def _backward(
        self,
        op: Op,
        grads: list[str],
        needs: list[str],
        parts: dict[str, list[str]],
        kinds: dict[str, str],
        factor: float,
    ) -> None:
        wanted = [name for name in op.reads if kinds[name] not in ("input", "buffer")]
        if not wanted:
            return
        writes = [self.value(f"{op.name}.d.{name}", self.size[name]) for name in wanted]
        reads = tuple(dict.fromkeys([*grads, *needs]))
        self.ops.append(
            Op(f"{op.name}.bw", reads, tuple(writes), op.seconds * factor, op.workspace, "backward")
        )
        for name, write in zip(wanted, writes, strict=True):
            parts.setdefault(name, []).append(write)

    def _sum(self, name: str, parts: list[str]) -> str:
        total = parts[0]
        for part in parts[1:]:
            new = self.value(f"{total}+", self.size[name])
            self.ops.append(Op(new, (total, part), (new,), 0.1, phase="backward"))
            total = new
        return total

    def _set_kind(self, name: str, kind: Any) -> None:
        for index, value in enumerate(self.values):
            if value.name == name:
                self.values[index] = Value(name, value.bytes, kind, value.held)


def chain(n: int, size: int = 1, seconds: float = 1.0) -> Graph:
    """Equal steps; the backward of each reads its input and the gradient of its output."""
    step = Step()
    last = step.value("x", size, "input")
    for i in range(n):
        (last,) = step.op(f"f{i}", [last], [size], seconds)
    # The first step has nothing to differentiate; a parameter gives it a gradient of no bytes.
    step.values.append(Value("w", 0, "parameter"))
    step.size["w"] = 0
    first = step.ops[0]
    step.ops[0] = Op(first.name, ("x", "w"), first.writes, first.seconds)
    return step.graph(last, factor=1.0)


def cnn(blocks: int, size: int = 8 * MIB, weight: int = MIB, shrink: int = 4) -> Graph:
    """Residual blocks of convolution, normalisation and ReLU; sizes halve every `shrink` blocks."""
    step = Step()
    needs: dict[str, list[str]] = {}
    last = step.value("x", size, "input")
    now = size
    for b in range(blocks):
        if b and b % shrink == 0:
            now = max(now // 2, MIB // 4)
        skip = last
        if step.size[skip] != now or b == 0:
            w = step.value(f"w{b}.skip", weight, "parameter")
            (skip,) = step.op(f"skip{b}", [last, w], [now], 4.0, workspace=MIB // 2)
        for i in range(2):
            w = step.value(f"w{b}.{i}", weight, "parameter")
            g = step.value(f"g{b}.{i}", 512, "parameter")
            (conv,) = step.op(f"conv{b}.{i}", [last, w], [now], 8.0, workspace=MIB // 2)
            norm, *stats = step.op(f"bn{b}.{i}", [conv, g], [now, 512, 512], 1.0)
            needs[f"bn{b}.{i}"] = [conv, g, *stats]
            if i == 0:
                (last,) = step.op(f"relu{b}.{i}", [norm], [now], 0.6)
                needs[f"relu{b}.{i}"] = [last]
        (total,) = step.op(f"add{b}", [norm, skip], [now], 0.9)
        needs[f"add{b}"] = []
        (last,) = step.op(f"relu{b}", [total], [now], 0.6)
        needs[f"relu{b}"] = [last]
    w = step.value("w.head", weight, "parameter")
    (last,) = step.op("head", [last, w], [1024], 1.0)
    return step.graph(last, needs=needs)


def transformer(blocks: int, size: int = 4 * MIB, weight: int = 2 * MIB, dropout: bool = True) -> Graph:
    """Pre-norm blocks: attention with its several outputs, a four times wider MLP, dropout with state."""
    step = Step()
    needs: dict[str, list[str]] = {}
    last = step.value("x", size, "input")
    w = step.value("w.embed", weight, "parameter")
    (last,) = step.op("embed", [last, w], [size], 1.0)

    def op(
        name: str, reads: list[str], sizes: list[int], seconds: float, need: list[str], **more: Any
    ) -> str:
        writes = step.op(name, reads, sizes, seconds, **more)
        needs[name] = [*need, *writes[1:]]
        return writes[0]

    for b in range(blocks):
        w = [step.value(f"w{b}.{i}", weight * (4 if i > 1 else 1), "parameter") for i in range(4)]
        norm = op(f"ln{b}.0", [last], [size, 4096, 4096], 0.5, [last])
        qkv = op(f"qkv{b}", [norm, w[0]], [3 * size], 3.0, [norm, w[0]])
        att = op(f"att{b}", [qkv], [size, size // 16], 4.0, [qkv, f"att{b}"])
        proj = op(f"proj{b}", [att, w[1]], [size], 1.0, [att, w[1]])
        if dropout:
            proj = op(f"drop{b}", [proj], [size, size // 4], 0.5, [], kind="random", state=512)
        mid = op(f"add{b}.0", [last, proj], [size], 0.4, [])
        norm = op(f"ln{b}.1", [mid], [size, 4096, 4096], 0.5, [mid])
        up = op(f"up{b}", [norm, w[2]], [4 * size], 4.0, [norm, w[2]])
        act = op(f"gelu{b}", [up], [4 * size], 1.2, [up])
        down = op(f"down{b}", [act, w[3]], [size], 4.0, [act, w[3]])
        last = op(f"add{b}.1", [mid, down], [size], 0.4, [])
    w = step.value("w.head", weight, "parameter")
    (last,) = step.op("head", [last, w], [1024], 1.0)
    return step.graph(last, needs=needs)


def with_takes(graph: Graph, seed: int, share: float = 0.7) -> Graph:
    """The graph with ops that may write in place: what they write gets the size of something they read."""
    rng = Random(seed)
    size = {value.name: value.bytes for value in graph.values}
    ops = []
    for op in graph.ops:
        may = [name for name in op.reads if graph.value[name].droppable]
        takes: tuple[str, ...] = ()
        if len(op.writes) == 1 and may and rng.random() < share:
            size[op.writes[0]] = size[rng.choice(may)]
            takes = tuple(name for name in may if size[name] == size[op.writes[0]])
            takes = tuple(rng.sample(takes, rng.randint(1, len(takes))))
        ops.append(replace(op, takes=takes))
    values = tuple(replace(value, bytes=size[value.name]) for value in graph.values)
    return graph.replace(ops=tuple(ops), values=values)


def with_updates(graph: Graph, seed: int = 0, share: float = 1.0) -> Graph:
    """The graph with gradients that go into an update of their parameter, as soon as nothing reads that.

    A gradient of the builder is a sum, or what the backward of a parameter's only reader writes.
    """
    rng = Random(seed)
    gone: dict[str, tuple[str, ...]] = {}
    for value in graph.values:
        parameter = value.name.partition(".d.")[2].rstrip("+")
        if value.kind == "gradient" and parameter in graph.value and rng.random() < share:
            gone[value.name] = (parameter,)
    last = {
        name: max(
            index
            for index, op in enumerate(graph.ops)
            if name in op.writes or name in op.reads or set(updated) & set(op.reads)
        )
        for name, updated in gone.items()
    }
    ops = []
    for index, op in enumerate(graph.ops):
        ops.append(op)
        for name in (name for name, at in last.items() if at == index):
            more = {"workspace": rng.randint(0, 3), "phase": "backward", "kind": "pinned"}
            ops.append(Op(f"update.{name}", (name,), (), updates=gone[name], **more))
    values = (replace(value, kind="activation") if value.name in gone else value for value in graph.values)
    return graph.replace(ops=tuple(ops), values=tuple(values))


def random_graph(seed: int, n: int, *, special: bool = True, takes: bool = False) -> Graph:
    """A random forward with skips, fans and (if special) pinned, random and several-output ops.

    With `takes`, some ops may write in place.
    """
    rng = Random(seed)
    step = Step()
    needs: dict[str, list[str]] = {}
    pool = [step.value("x", rng.randint(1, 9), "input")]
    for i in range(n):
        reads = [pool[-1], *rng.sample(pool[-6:], rng.randint(0, min(2, len(pool[-6:]))))]
        if i == 0 or rng.random() < 0.4:
            reads.append(step.value(f"w{i}", rng.randint(0, 3), "parameter"))
        reads = list(dict.fromkeys(reads))
        sizes = [rng.randint(0, 9) for _ in range(rng.choice([1, 1, 1, 2, 3]) if special else 1)]
        more: dict[str, Any] = {"workspace": rng.choice([0, 0, rng.randint(0, 6)])}
        kind = rng.choice(["pure"] * 6 + ["random", "pinned"]) if special else "pure"
        if kind == "random":
            more["state"] = rng.randint(0, 3)
        writes = step.op(f"f{i}", reads, sizes, rng.choice([0.0, 1.0, 2.0, 5.0]), kind=kind, **more)
        if special and rng.random() < 0.05:
            step.values[-1] = Value(writes[-1], sizes[-1], "activation", held=True)
        needs[f"f{i}"] = [name for name in [*reads, *writes] if rng.random() < 0.5]
        pool.extend(writes)
    # Read the loose ends, so that the whole forward matters.
    read = {name for op in step.ops for name in op.reads}
    ends = [name for name in pool if name not in read]
    (last,) = step.op("loss", ends, [1], 1.0)
    graph = step.graph(last, needs=needs)
    graph = graph.replace(fixed={"other": rng.randint(0, 5)}, boundary=rng.randint(0, 5))
    return with_takes(graph, seed) if takes else graph
