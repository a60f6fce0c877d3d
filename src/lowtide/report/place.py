"""Where a value comes from, in the words of the model: the module, what makes it, the user's line.

A value that an op writes is at that op; one that is given, at the first op that reads it. A hand-written
graph has no modules: there the value's own name is its place, and numbers in it count as layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..plans.graph import Graph, Op
from .stays import VALUE, Stay
from .wording import short

__all__ = ["Place", "Places"]


NO_MODULE = "(no module)"


@dataclass(frozen=True, slots=True)
class Place:
    """A module path (or a name), what is made there, and the source line."""

    path: str
    what: str
    source: str = ""


class Places:
    """The places of a graph's values, and of what else stays on the device."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.home: dict[str, Op] = {}
        for op in reversed(graph.ops):
            self.home.update(dict.fromkeys(op.reads, op))
        self.home.update(graph.writer)
        self.known: dict[str, Place] = {}

    def of_value(self, name: str) -> Place:
        """The place of a value."""
        if name not in self.known:
            self.known[name] = self._find(name)
        return self.known[name]

    def _find(self, name: str) -> Place:
        op, kind = self.home.get(name), self.graph.value[name].kind
        if op is None:
            return Place(name, kind)
        made = name in self.graph.writer and kind != "gradient"
        return Place(_path(op, name), _made_by(op) if made else kind, op.source)

    def of_stay(self, stay: Stay) -> Place:
        """The place of a stay: of a value, a fixed band, a workspace, a copy or a saved random state."""
        if stay.what == VALUE:
            return self.of_value(stay.name)
        if stay.what == "copy":
            place = self.of_value(stay.name)
            return Place(place.path, f"{place.what}, recomputed beside itself", place.source)
        op = self.graph.op.get(stay.name)
        if op is None or stay.what in ("fixed", "caller"):
            return Place(stay.name, "there all along" if stay.what == "fixed" else "held by the caller")
        return Place(_path(op, op.name), f"{stay.what} of {_made_by(op)}", op.source)


def _made_by(op: Op) -> str:
    name = _operator(op.target) if op.target else "activation"
    return f"{name} (backward)" if op.phase == "backward" and "backward" not in name else name


def _path(op: Op, name: str) -> str:
    """The op's module; what was captured outside of any is told by its operator and line, not by its name."""
    return op.module or (NO_MODULE if op.target else name)


@lru_cache(maxsize=4096)
def _operator(target: str) -> str:
    """The operator's own name: `addmm` of `aten.addmm.default`."""
    parts = target.split(".")
    return short(parts[1] if len(parts) == 3 else target, 50)
