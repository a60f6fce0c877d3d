"""From a trace to a graph: fx nodes become ops, storages become values, views disappear.

Two nodes alias when their fake tensors share a storage. A node that makes no new storage is a view and
belongs to the value it looks at; every other node is an op that writes one value per new storage. Outputs
of an op that nothing reads live only while it runs, so they count as its workspace.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import torch
from torch import fx

from .._torch import private
from ..console.user_frames import is_internal
from ..devices.allocator import rounded
from ..devices.table import Device
from ..errors import GraphBreak
from ..plans.graph import Graph, Op, OpKind, Value, ValueKind
from ..torch_state.random_state import state_size
from .fx_nodes import feeding, has_effect, is_item, storage_of, tensors_of
from .in_place import InPlace
from .rewrites.accumulate import is_accumulation
from .rewrites.batchnorm import UPDATES_STATISTICS
from .rewrites.by_parts import WRITES
from .rewrites.channels_last_inputs import is_channels_last_copy
from .rewrites.collectives import moves_only, operator_of, waited
from .rewrites.random_draws import draws, is_idle_draw
from .rewrites.stepping import is_update
from .trace import Trace

__all__ = ["Lifted", "lift"]


@dataclass(frozen=True)
class Lifted:
    """A graph and the way back: the fx node of each op and the node that first stands for each value.

    Where ops are fused, `inside` are further nodes that an op computes on the way, `traffic` is what a loop
    moves in bytes, and `kept` are the loops whose result must be in memory for the plan to hold. Where they
    run one by one, `in_place` is how an op overwrites each of the values that it takes. `written` are the
    values that are written a part at a time, each with what stands for its last part.
    """

    graph: Graph
    node_of: dict[str, fx.Node]
    root_of: dict[str, fx.Node]
    value_of: dict[fx.Node, str]
    inside: dict[str, tuple[fx.Node, ...]] = field(default_factory=dict)
    traffic: dict[str, int] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    in_place: dict[str, dict[str, InPlace]] = field(default_factory=dict)
    written: dict[str, str] = field(default_factory=dict)


def lift(trace: Trace, target: Device | None = None) -> Lifted:
    """The graph of a trace, with no prices yet; `target` is a device that is not here, to plan for."""
    return _Lifting(trace, target).lifted()


class _Lifting:
    def __init__(self, trace: Trace, target: Device | None) -> None:
        self.trace = trace
        self.allocator = torch.device(target.type) if target else trace.device
        self.label = target.name if target else str(trace.device)
        self.backward = trace.backward_nodes()
        self.feeding_outputs = feeding(trace.graph, trace.outputs)
        self.value_of: dict[fx.Node, str] = {}
        self.storage_value: dict[int, str] = {}
        self.root_of: dict[str, fx.Node] = {}
        self.bytes_of: dict[str, int] = {}
        self.node_of: dict[str, fx.Node] = {}
        self.viewed: dict[fx.Node, list[str]] = {}
        self.written: dict[str, str] = {}
        self.ops: list[Op] = []
        self.inputs: dict[str, ValueKind] = {}

    def lifted(self) -> Lifted:
        for node in self.trace.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.give(node)
            elif node.op == "call_function" and not is_item(node):
                self.add_node(node)
        for primal in self.trace.accumulating:  # also where autograd adds, after the step or in it
            self.add_present_gradient(primal)
        graph = Graph(
            ops=tuple(_updates_last(self.ops)), values=tuple(self.values()), device=self.label, prices="none"
        )
        return Lifted(graph, self.node_of, self.root_of, self.value_of, written=self.written)

    def give(self, node: fx.Node) -> None:
        """A placeholder or constant: a value that is there before it is read."""
        for tensor in tensors_of(node):
            name = self.new_value(node, tensor)
            self.inputs.setdefault(name, self.input_kind(node))

    def input_kind(self, node: fx.Node) -> ValueKind:
        if node in self.trace.tangents:
            return "tangent"
        if node.op == "get_attr":
            return "buffer"
        role = self.trace.roles[self.trace.primals.index(node)]
        return role  # type: ignore[return-value]  # roles are kinds of input values

    def add_node(self, node: fx.Node) -> None:
        """A call: an op when it makes a storage or has an effect, a view otherwise."""
        self.refuse_unknown_sizes(node)
        reads = self.reads(node)
        items: dict[Any, fx.Node] = {user.args[1]: user for user in node.users if is_item(user)}
        tensors = node.meta.get("val")
        several = isinstance(tensors, list | tuple)
        writes: list[str] = []
        unread = 0
        for index, tensor in enumerate(tensors if several else [tensors]):  # type: ignore[arg-type]
            if not isinstance(tensor, torch.Tensor):
                continue
            # An output without a getitem is one that nobody reads.
            holder = items.get(index) if several else None if is_idle_draw(node) else node
            # A fake tensor's storage is its identity: who shares it is a view.
            if storage_of(tensor) in self.storage_value:
                if holder is not None:
                    self.value_of[holder] = self.storage_value[storage_of(tensor)]
            elif holder is None:
                unread += self.size(tensor)
            else:
                writes.append(self.new_value(holder, tensor))
        if writes or has_effect(node) or is_idle_draw(node):
            self.add_op(node, reads, writes, unread)
            if node.target in WRITES:  # what reads it from here on reads what was written into it
                self.written[self.value_of[node.args[0]]] = node.name  # type: ignore[index]
        # A tuple of views (split, unbind): its items belong to what it looks at.
        elif several and reads:
            self.value_of[node] = reads[0]
        elif reads and not tensors_of(node):  # a number, as `.item()` gives: taken like a view
            self.value_of[node] = reads[0]
            self.viewed[node] = reads

    def refuse_unknown_sizes(self, node: fx.Node) -> None:
        if any(isinstance(size, torch.SymInt) for tensor in tensors_of(node) for size in tensor.shape):
            where = source_line(node) or module_path(node)
            raise GraphBreak(
                f"the size of what {target_name(node)} makes at {where} depends on the data (a boolean mask, "
                "say), so its bytes cannot be planned. Use an op with a fixed size (torch.where, a padded "
                "gather), or move that line out of the captured call."
            )

    def add_op(self, node: fx.Node, reads: list[str], writes: list[str], unread: int) -> None:
        kind = self.kind(node)
        if is_accumulation(node):
            reads = [*reads, self.add_present_gradient(node.args[0])]  # type: ignore[arg-type]
        self.node_of[node.name] = node
        self.ops.append(
            Op(
                name=node.name,
                reads=tuple(dict.fromkeys(reads)),
                writes=tuple(dict.fromkeys(writes)),
                workspace=unread,
                phase="backward" if node in self.backward or is_update(node) else "forward",
                kind=kind,
                state=self.state_bytes() if kind == "random" else 0,
                updates=self.updated(node),
                module=module_path(node),
                source=source_line(node),
                target=target_name(node),
            )
        )

    def updated(self, node: fx.Node) -> tuple[str, ...]:
        """The parameters that an optimizer's update changes."""
        places: Any = node.args[0] if is_update(node) else ()
        return tuple(self.value_of[self.trace.primals[place]] for place in places)

    def add_present_gradient(self, parameter: fx.Node) -> str:
        """The gradient of earlier backward calls: as large as the parameter, there from the start."""
        name = f"{parameter.name}.grad"
        tensor = parameter.meta["val"]
        self.bytes_of[name] = rounded(tensor.numel() * tensor.element_size(), self.allocator)
        self.inputs[name] = "accumulated"
        return name

    def reads(self, node: fx.Node) -> list[str]:
        found = [name for parent in node.all_input_nodes for name in self.values_read_through(parent)]
        return found + [self.written[name] for name in found if name in self.written]

    def values_read_through(self, node: fx.Node) -> list[str]:
        """The values that a node stands for, or is computed from where it is a number."""
        return self.viewed.get(node) or ([self.value_of[node]] if node in self.value_of else [])

    def kind(self, node: fx.Node) -> OpKind:
        """Reductions between ranks, writes into inputs and readers of an overwritten input run once."""
        # A second run could read it after the write.
        if any(self.touches_mutated(parent) for parent in node.all_input_nodes):
            return "pinned"
        if draws(node):
            return "pinned" if is_idle_draw(node) else "random"
        if node.target in UPDATES_STATISTICS and node in self.feeding_outputs:
            return "pure"  # its first run, in the forward, is the one that updates them
        if node.target is waited and moves_only(node):
            return "pure"
        if is_channels_last_copy(node) or has_effect(node):
            return "pinned"
        # On the safe side: replaying from a saved state costs little, another mask would be a wrong gradient.
        return "random" if is_foreign(node) else "pure"

    def touches_mutated(self, node: fx.Node) -> bool:
        if node not in self.value_of:
            return False
        root = self.root_of[self.value_of[node]]
        return root in self.trace.mutated

    def new_value(self, node: fx.Node, tensor: torch.Tensor) -> str:
        name = self.storage_value.setdefault(storage_of(tensor), node.name)
        self.value_of[node] = name
        if name == node.name:
            self.root_of[name] = node
            self.bytes_of[name] = self.size(tensor)
        return name

    def values(self) -> list[Value]:
        outputs = self.names(self.trace.outputs)
        gradients = self.names(self.trace.gradients)

        def kind(name: str) -> ValueKind:
            if name in self.inputs:
                return self.inputs[name]
            return "output" if name in outputs else "gradient" if name in gradients else "activation"

        # A piece of a step may hand back a gradient that it was given, as a view: it stays till the end.
        handed_back = {name for name in gradients if self.inputs.get(name) == "tangent"}
        return [
            Value(name, size, kind(name), held=name in handed_back) for name, size in self.bytes_of.items()
        ]

    def names(self, nodes: list[Any]) -> set[str]:
        return {
            name for node in nodes if isinstance(node, fx.Node) for name in self.values_read_through(node)
        }

    def size(self, tensor: torch.Tensor) -> int:
        """Bytes on the planned device: what lies elsewhere costs nothing there."""
        if tensor.device.type != self.trace.device.type:
            return 0
        return rounded(tensor.untyped_storage().nbytes(), self.allocator)

    def state_bytes(self) -> int:
        """The CPU's generator state is a storage of the step; a GPU's is kept on the host."""
        return state_size("cpu") if self.allocator.type == "cpu" else 0


def _updates_last(ops: list[Op]) -> list[Op]:
    """The ops, with each update after all that read what it changes, in program order otherwise."""
    changed = {name: op.name for op in ops for name in op.updates}
    last = {changed[name]: index for index, op in enumerate(ops) for name in op.reads if name in changed}
    place = {op.name: (max(index, last.get(op.name, -1)), bool(op.updates)) for index, op in enumerate(ops)}
    return sorted(ops, key=lambda op: place[op.name])


def is_foreign(node: fx.Node) -> bool:
    """Whether torch cannot know what an op draws: one that somebody else registered, or one with a body."""
    if isinstance(node.target, private("OpOverload")):
        return node.target.namespace not in ("aten", "prims", "lowtide")
    return isinstance(node.target, private("Operator"))


_PART = re.compile(r"\.(\w+)|\[['\"]?([^'\"\]]+)['\"]?\]")


def module_path(node: fx.Node) -> str:
    """The path of the module that a node belongs to, as in `named_modules`."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    path = path.rpartition("cell_contents")[2]  # the model as the function that calls it holds it
    _, _, rest = path.partition("]") if path.startswith(("L[", "G[")) else ("", "", path)
    parts = [name or key for name, key in _PART.findall(rest if rest.startswith((".", "[")) else "." + rest)]
    return ".".join(part for part in parts if part not in ("_modules", "modules", "__dict__"))


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def source_line(node: fx.Node) -> str:
    """The user's line, as file:line: the innermost frame that is neither torch's nor Lowtide's."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [(path, line) for path, line in frames if not is_internal(path)]
    return f"{PurePath(own[-1][0]).name}:{own[-1][1]}" if own else ""


def target_name(node: fx.Node) -> str:
    """The operator's name, as in `aten.mm.default`."""
    target = operator_of(node)
    return (
        str(target) if isinstance(target, private("Operator")) else getattr(target, "__name__", str(target))
    )
