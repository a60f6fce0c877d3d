"""What a fused loop moves: the bytes that it reads and writes in memory, or what its arithmetic takes.

Loops that stand together, with no kernel of its own between them, are compiled into few kernels, in which a
value that one of them has read or written is at hand for the others. Only a reduction over many elements
ends a kernel: whatever needs its result has to read everything once more.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from ..capture.fx_nodes import tensors_of
from ..capture.lift import Lifted
from ..capture.op_classes import Fusing, type_of
from ..plans.graph import Op
from .work import as_traffic

__all__ = ["elements_read", "is_long", "parts", "traffic"]

_LONG = 16384
"""Elements per result: a reduction over more of them does not keep them at hand. Chosen, well above the 1024
up to which Inductor's kernels hold a row in registers; no plan of the zoo moves with half of it
(benchmarks/constants.py)."""
_GATHERS = ("aten.embedding", "aten.index", "aten.gather", "aten.index_select", "aten._unsafe_index")


def traffic(lifted: Lifted, how: dict[str, Fusing]) -> dict[str, int]:
    """The bytes that each loop and reduction moves, in program order.

    Where it computes for longer than that, the bytes that memory would move meanwhile.
    """
    moved: dict[str, int] = {}
    at_hand: set[str] = set()
    computed: set[fx.Node] = set()
    ends: set[str] = set()
    size = {value.name: value.bytes for value in lifted.graph.values}
    for op in lifted.graph.ops:
        # A kernel of its own: registers and cache do not outlive it.
        if parts(op, how):
            at_hand, ends, computed = set(), set(), set()
        if how[op.name] == "apart":
            continue
        # The result of a long reduction is ready only when everything was read, so this begins a new kernel.
        if not ends.isdisjoint(op.reads):
            at_hand, ends, computed = set(), set(), set()
        nodes = [*lifted.inside[op.name], lifted.node_of[op.name]]
        reads = {name: part for name, part in _read(lifted, nodes).items() if name not in at_hand}
        moved[op.name] = sum(min(part, size[name]) for name, part in reads.items() if name in size)
        moved[op.name] += sum(size[name] for name in op.writes)
        # Memory and arithmetic go on at the same time: the slower of the two counts.
        moved[op.name] = max(moved[op.name], as_traffic(node for node in nodes if node not in computed))
        computed.update(nodes)
        at_hand.update(op.reads, op.writes)
        if how[op.name] == "reduction" and is_long(lifted.node_of[op.name]):
            ends.update(op.writes)
    return moved


def _read(lifted: Lifted, nodes: list[fx.Node]) -> dict[str, int]:
    """The bytes that nodes read of each value: all of it, or the part that a view or a gather looks at."""
    inside = {lifted.value_of[node] for node in nodes if node in lifted.value_of}
    found: dict[str, int] = {}
    for node in nodes:
        for parent in node.all_input_nodes:
            name = lifted.value_of.get(parent)
            if name is not None and name not in inside:
                gathered = type_of(node) in _GATHERS and parent is node.args[0]
                found[name] = max(found.get(name, 0), _bytes(node if gathered else parent))
    return found


def _bytes(node: fx.Node) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(node))


def parts(op: Op, how: Mapping[str, Fusing]) -> bool:
    """Whether an op keeps loops before and after it apart; one that reads nothing may run before them."""
    return how[op.name] == "apart" and bool(op.reads)


def is_long(node: fx.Node) -> bool:
    """Whether a reduction ends its kernel, since it runs over too many elements to keep them at hand."""
    made = max((t.numel() for t in tensors_of(node)), default=1)
    return elements_read(node) > _LONG * made


def elements_read(node: fx.Node) -> int:
    """The elements of the largest tensor that a node reads."""
    return max((t.numel() for parent in node.all_input_nodes for t in tensors_of(parent)), default=0)
