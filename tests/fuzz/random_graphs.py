"""Random graphs that are valid, and mostly unlike those of any real step.

`graphs.random_graph` derives a backward, as autograd does; here any op may be there that the format allows:
ops that nothing reads or that read nothing, values of no bytes or of nearly 2^60, seconds from none to 10^16,
names of any script, phases without the other one.
"""

from __future__ import annotations

from random import Random

from lowtide.errors import FormatError
from lowtide.plans.graph import RETURN, Graph, Op, Value

SIZES = (0, 1, 2, 3, 8, 100, 512, 4096, 10**6, 2**31, 2**32 + 1, 2**40)
NEARLY_ALL = (2**52, 2**55, 2**57)
SECONDS = (0.0, 5e-324, 1e-310, 1e-300, 1e-30, 1e-9, 1.0, 2.5, 1e12, 1e16)
NAMES = ("{}", "op {}", "层{}", "a.{}.b", '"{}"', "{}'", "<b>{}</b>", "${{{}}}", "é{}")


def random_valid_graph(seed: int) -> Graph:
    """A graph that the format allows; the same one for a seed."""
    chance = Random(seed)
    while True:
        try:
            return _graph(chance)
        except FormatError as error:
            if "add up" not in str(error):
                raise


def _graph(chance: Random) -> Graph:
    sizes = NEARLY_ALL if chance.random() < 0.1 else SIZES[: chance.randint(1, len(SIZES))]
    made = _Making(chance, sizes, chance.choice(NAMES))
    forward, backward = chance.randint(0, 14), chance.randint(0, 14)
    given = [
        made.value(chance.choice(("input", "parameter", "buffer", "accumulated")))
        for _ in range(chance.randint(0, 5))
    ]
    forward_values = made.phase("forward", given, forward)
    tangents = [made.value("tangent") for _ in range(chance.randint(0, 2))] if backward else []
    made.phase("backward", [*given, *forward_values, *tangents], backward)
    if chance.random() < 0.2:
        made.returning(forward_values, forward)
    updates = made.updates(given) if chance.random() < 0.3 else []
    return Graph(
        (*made.ops, *updates),
        tuple(made.values),
        device=chance.choice(("cpu", "NVIDIA H200", "cuda:1", "nobody's")),
        fixed={"other": chance.choice(sizes)} if chance.random() < 0.5 else {},
        boundary=chance.choice((0, 0, *sizes)),
        plain_in_place=chance.random() < 0.5,
    )


class _Making:
    def __init__(self, chance: Random, sizes: tuple[int, ...], name: str) -> None:
        self.chance, self.sizes, self.name = chance, sizes, name
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.size: dict[str, int] = {}
        self.free: set[str] = set()

    def value(self, kind: str, size: int | None = None) -> str:
        held = kind in ("activation", "tangent") and self.chance.random() < 0.05
        size = self.chance.choice(self.sizes) if size is None else size
        value = Value(self.name.format(f"v{len(self.values)}"), size, kind, held)
        self.values.append(value)
        self.size[value.name] = size
        if value.droppable:
            self.free.add(value.name)
        return value.name

    def phase(self, phase: str, there: list[str], count: int) -> list[str]:
        """Ops of a phase, and what they write."""
        last = "output" if phase == "forward" else "gradient"
        written: list[str] = []
        for _ in range(count):
            pool = [*there, *written]
            reads = self.chance.sample(pool, min(len(pool), self.chance.choice((0, 1, 1, 2, 2, 3, 5))))
            written += self.op(phase, reads, last)
        return written

    def op(self, phase: str, reads: list[str], last: str) -> list[str]:
        chance = self.chance
        takes = [name for name in reads if name in self.free and chance.random() < 0.2][:1]
        number = 1 if takes else chance.choice((0, 1, 1, 1, 1, 2, 3))
        size = self.size[takes[0]] if takes else None
        kinds = ("activation", "activation", "activation", last)
        writes = [self.value(chance.choice(kinds), size) for _ in range(number)]
        kind = chance.choice(("pure",) * 6 + ("random", "pinned"))
        made = Op(
            self.name.format(f"o{len(self.ops)}"),
            tuple(reads),
            tuple(writes),
            seconds=chance.choice(SECONDS),
            workspace=chance.choice((0, 0, *self.sizes)),
            phase=phase,
            kind=kind,
            state=chance.choice(self.sizes) if kind == "random" else 0,
            takes=tuple(takes),
            module=self.name.format(f"layers.{chance.randint(0, 9)}"),
        )
        self.ops.append(made)
        return writes

    def returning(self, values: list[str], forward: int) -> None:
        """The op after which the step returns to its caller: the last of the forward."""
        taken = {name for op in self.ops for name in op.takes}
        reads = [name for name in values if name in self.free and name not in taken][:3]
        self.ops.insert(forward, Op("return", tuple(reads), (), kind="pinned", target=RETURN))

    def updates(self, given: list[str]) -> list[Op]:
        """Updates of given values, after all that reads them."""
        chosen = [name for name in given if self.chance.random() < 0.5]
        return [
            Op(f"update {name}", (), (), phase="backward", kind="pinned", updates=(name,)) for name in chosen
        ]
