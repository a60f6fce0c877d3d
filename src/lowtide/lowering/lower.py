"""From a schedule back to fx: a forward and a backward graph in which a node may appear several times.

Each run of an op becomes a copy of its node, in the schedule's order; views are made anew where they are
needed, so that a value is exactly as long alive as the schedule says when every node is freed after its
last use. A run that takes a value is marked with how it overwrites it (`IN_PLACE`), for an executor to do so;
its target stays the one that makes a new tensor. What is alive between the two lists is handed over as saved
tensors: the value itself where the step made it, the parameter or input where it was given. A random op that
is recomputed is preceded by a node that takes the random state, and its later runs restore it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from .._torch import module_of
from ..capture.fx_nodes import is_item, tensors_of
from ..capture.in_place import IN_PLACE, InPlace
from ..capture.lift import Lifted
from ..capture.rewrites.batchnorm import RECOMPUTED_BY, recomputed_args
from ..capture.rewrites.dropout import RANDOM
from ..capture.rewrites.handing import hand_over, is_handing
from ..capture.rewrites.own_generators import generator_of_node
from ..capture.rewrites.stepping import is_update
from ..capture.trace import Trace
from ..plans.events import taken_by
from ..plans.graph import Graph
from ..plans.schedule import Drop, Run, Schedule, Step
from ..torch_state import random_state
from .hand_over import Groups, Handing

__all__ = ["Pair", "lower"]


@dataclass(frozen=True)
class Pair:
    """The forward and the backward of a step, as AOTAutograd wants them from a partitioner.

    `groups` are the places of inputs whose gradients the backward hands over on its way, in that order.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    groups: Groups = ()


def lower(trace: Trace, lifted: Lifted, schedule: Schedule) -> Pair:
    """The fx pair that does what a schedule says."""
    return _Lowering(trace, lifted, schedule).pair()


@dataclass
class _Side:
    """One of the two graphs while it is written, and what is alive in it."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    node: dict[fx.Node, fx.Node] = field(default_factory=dict)
    of_value: dict[str, list[fx.Node]] = field(default_factory=dict)
    state: dict[str, fx.Node] = field(default_factory=dict)
    inside: dict[str, dict[fx.Node, fx.Node]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def call(self, origin: fx.Node, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
        """A call in the place of a node, with its name if that is free.

        Before 2.13, torch tries one number after the other for a name whose own number is taken.
        """
        name = f"{origin.name}_copy" if origin.name in self.names else origin.name
        self.names.add(name)
        return self.graph.call_function(target, args, kwargs, name=name)


class _Lowering:
    def __init__(self, trace: Trace, lifted: Lifted, schedule: Schedule) -> None:
        self.trace = trace
        self.lifted = lifted
        self.schedule = schedule
        self.side = _Side()
        self.runs: Counter[str] = Counter()
        self.total = Counter(step.op for step in schedule.steps if isinstance(step, Run))
        self.outputs: list[Any] | None = None

    @property
    def graph(self) -> Graph:
        return self.lifted.graph

    def pair(self) -> Pair:
        for primal in self.trace.primals:
            self.place(primal)
        self.write(self.schedule.forward)
        forward = self.side
        outputs = self.outputs or self.returned()
        saved, states = self.saved()
        opaque = self.opaque()
        kept = [self.find(node) for node in saved] + [forward.state[op] for op in states]
        kept += [self.find(node) for node in opaque]  # torch wants them after the tensors
        forward.graph.output(tuple(outputs + kept))
        self.side = _Side()
        for node in saved:
            self.place(node)
        for op in states:
            self.side.state[op] = self.place_state(forward.state[op])
        for node in opaque:
            self.place(node)
        for tangent in self.trace.tangents:
            self.place(tangent)
        handing = Handing(self.trace, self.lifted, self.schedule.backward)
        self.write(self.schedule.backward, after=partial(self.hand_over, handing))
        kept_gradients = [None if is_update(node) else node for node in self.trace.gradients]
        left = [self.result(node) for node in handing.left(kept_gradients)]
        self.side.graph.output(tuple(left))
        return Pair(self.module(forward.graph), self.module(self.side.graph), tuple(handing.groups))

    def module(self, graph: fx.Graph) -> fx.GraphModule:
        return module_of(self.trace.module, graph)

    def write(self, steps: tuple[Step, ...], *, after: Callable[[int], None] | None = None) -> None:
        for index, step in enumerate(steps):
            if isinstance(step, Drop):
                self.forget(step.value)
            elif self.graph.op[step.op].returns:
                self.outputs = self.returned()
            elif not is_handing(self.lifted.node_of[step.op]):
                self.run(step.op, self.in_place(steps, index))
            if after is not None:
                after(index)

    def returned(self) -> list[Any]:
        """What the forward returns to its caller; it may be dropped right after."""
        return [self.result(node) for node in self.trace.outputs]

    def hand_over(self, handing: Handing, index: int) -> None:
        """Hand over the gradients for which the time has come after a step of the backward."""
        for places, gradients in handing.due(index):
            found = [self.find(gradient) for gradient in gradients]
            self.side.graph.call_function(hand_over, (places, found))

    def in_place(self, steps: tuple[Step, ...], index: int) -> InPlace | None:
        """How a run overwrites the value that it takes, if it takes one."""
        op = self.graph.op[steps[index].op]  # type: ignore[union-attr]  # a run
        if op.name not in self.lifted.in_place or not self.schedule.in_place:
            return None
        taken = taken_by(op, steps, index)
        return None if taken is None else self.lifted.in_place[op.name][taken]

    def run(self, op: str, in_place: InPlace | None) -> None:
        """A copy of the op's node; copies of values that are alive already are not taken up."""
        origin = self.lifted.node_of[op]
        self.runs[op] += 1
        self.compute_inside(op)
        node = self.call(op, origin)
        # The next op computes its own copies: shared ones would stay alive between the two.
        self.side.inside.clear()
        node.meta = dict(origin.meta) if in_place is None else {**origin.meta, IN_PLACE: in_place}
        items = [user for user in origin.users if is_item(user)]
        # A value that is still there was not dropped; the first copy stays the one that readers see.
        if not items and origin not in self.side.node:
            self.put(origin, self.in_memory(node) if op in self.lifted.kept else node)
        for item in items:
            if item in self.lifted.value_of and not self.is_there(self.lifted.value_of[item]):
                copy = self.side.call(item, operator.getitem, (node, item.args[1]))
                copy.meta = dict(item.meta)
                self.put(item, copy)

    def in_memory(self, node: fx.Node) -> fx.Node:
        """The node followed by one that makes a compiler realize it."""
        from ..capture.realize import in_memory

        kept = self.side.graph.call_function(in_memory(), (node,))
        kept.meta = dict(node.meta)
        return kept

    def compute_inside(self, op: str) -> None:
        """Copies of the nodes that a fused op computes on the way; only this op sees them."""
        for inner in self.lifted.inside.get(op, ()):
            self.side.inside[self.lifted.value_of[inner]] = {inner: self.copied(inner)}

    def call(self, op: str, origin: fx.Node) -> fx.Node:
        first = self.runs[op] == 1
        args = fx.map_arg(origin.args if first else recomputed_args(origin), self.find)
        kwargs = fx.map_arg(origin.kwargs, self.find)
        target: Any = origin.target
        if self.graph.op[op].kind == "random" and self.total[op] > 1:
            if first:
                self.side.state[op] = self.take_state(op)
            else:
                again = (RANDOM[target],) if target in RANDOM else (random_state.recompute, target)
                given = (*again[1:], *args)
                if generator_of_node(origin) is None:
                    given = (str(self.trace.device), *given)
                return self.side.call(origin, again[0], (self.side.state[op], *given), kwargs)
        return self.side.call(origin, target if first else RECOMPUTED_BY.get(target, target), args, kwargs)

    def take_state(self, op: str) -> fx.Node:
        source: Any = generator_of_node(self.lifted.node_of[op]) or str(self.trace.device)
        node = self.side.graph.call_function(random_state.take_state, (source,), name=f"{op}_state")
        size = random_state.state_size(source)
        with self.trace.primals[0].meta["val"].fake_mode:  # AOTAutograd looks at what is saved
            node.meta["val"] = torch.empty(size, dtype=torch.uint8)
        return node

    def find(self, node: fx.Node) -> fx.Node:
        """The node that stands for this one now; a view is made anew from its value."""
        inside = self.side.inside.get(self.lifted.value_of.get(node, ""))
        if inside is not None:
            if node not in inside:
                inside[node] = self.view(node)
            return inside[node]
        if node not in self.side.node:
            if node.op == "get_attr":
                copy = self.side.graph.get_attr(node.target)  # type: ignore[arg-type]
                copy.meta = dict(node.meta)
                self.put(node, copy)
            else:
                self.put(node, self.view(node))
        return self.side.node[node]

    def put(self, node: fx.Node, copy: fx.Node) -> None:
        self.side.node[node] = copy
        self.side.of_value.setdefault(self.lifted.value_of.get(node, ""), []).append(node)

    def view(self, node: fx.Node) -> fx.Node:
        root = self.lifted.root_of.get(self.lifted.value_of.get(node, ""))
        if root is node or root is None:
            raise AssertionError(f"{node} is not there: the simulator should have refused this schedule")
        made = node.args[0] if is_item(node) else None
        if isinstance(made, fx.Node) and made.name in self.graph.op:
            return self.laid_on(root, node)
        return self.copied(node)

    def laid_on(self, root: fx.Node, item: fx.Node) -> fx.Node:
        """An output of a kernel that lies where another tensor does: oneDNN's LSTM returns one twice."""
        like = item.meta["val"]
        place = (list(like.shape), list(like.stride()), like.storage_offset())
        copy = self.side.call(item, torch.ops.aten.as_strided.default, (self.find(root), *place), {})
        copy.meta = dict(item.meta)
        return copy

    def copied(self, node: fx.Node) -> fx.Node:
        """The same call on what stands for its arguments now."""
        args = fx.map_arg(node.args, self.find)
        kwargs = fx.map_arg(node.kwargs, self.find)
        copy = self.side.call(node, node.target, args, kwargs)
        copy.meta = dict(node.meta)
        return copy

    def is_there(self, value: str) -> bool:
        return self.lifted.root_of[value] in self.side.node

    def forget(self, value: str) -> None:
        for node in self.side.of_value.pop(value, ()):
            del self.side.node[node]

    def saved(self) -> tuple[list[fx.Node], list[str]]:
        """What the backward reads of the forward: roots of values, and random states."""
        written: set[str] = set()
        needed: dict[str, None] = {}
        states: dict[str, None] = {}
        for step in self.schedule.backward:
            if isinstance(step, Drop):
                continue
            op = self.graph.op[step.op]
            # Only a first run in the backward reads all that the op does.
            unread = self.unread_when_recomputed(op.name) if self.runs[op.name] else ()
            needed.update((name, None) for name in op.reads if name not in written and name not in unread)
            written.update(op.writes)
            if op.name in self.side.state:
                states[op.name] = None
        needed.update((name, None) for name in self.names(self.trace.gradients) if name not in written)
        return [node for name in needed for node in self.holders(name)], list(states)

    def opaque(self) -> list[fx.Node]:
        """The inputs without bytes, such as the mesh of a DTensor, that gradients or any op refer to."""
        ops = (self.lifted.node_of[step.op] for step in self.schedule.backward if isinstance(step, Run))
        named = [node for node in self.trace.gradients if isinstance(node, fx.Node)]
        named += [parent for op in ops for parent in op.all_input_nodes]
        return [node for node in dict.fromkeys(named) if node in self.trace.primals and not tensors_of(node)]

    def unread_when_recomputed(self, op: str) -> set[str]:
        """What an op reads in its first run only: it may have changed by the next, and need not be saved."""
        origin = self.lifted.node_of[op]
        return set(self.names([arg for arg in origin.args if arg not in recomputed_args(origin)]))

    def holders(self, value: str) -> list[fx.Node]:
        """The nodes to save for a value: its root, or every input that looks at a given one."""
        root = self.lifted.root_of.get(value)
        if root is None or root.op == "get_attr" or root in self.trace.tangents:
            return []
        if root.op != "placeholder":
            return [root]
        return [primal for primal in self.trace.primals if self.lifted.value_of.get(primal) == value]

    def names(self, nodes: list[Any]) -> list[str]:
        return [self.lifted.value_of[node] for node in nodes if node in self.lifted.value_of]

    def place(self, node: fx.Node) -> None:
        placed = self.side.graph.placeholder(node.name)
        placed.meta = dict(node.meta)
        self.put(node, placed)

    def place_state(self, state: fx.Node) -> fx.Node:
        placed = self.side.graph.placeholder(state.name)
        placed.meta = dict(state.meta)
        return placed

    def result(self, node: Any) -> Any:
        return self.find(node) if isinstance(node, fx.Node) else node
