"""The eager executor: a graph as straight-line Python that frees every value after its last use.

The function takes its arguments as one list and empties it, so that nothing outside holds on to a value
that the schedule drops. One line per node; no interpreter, no lookups. Where gradients are handed over on the
way, it is a generator: it yields each group as a list, for its caller to empty, and returns the rest. Where
an optimizer uses them up, it gets such a list (`updates.py`).

An op that overwrites an argument does so where all that it reads lies in memory as tracing foretold; else it
makes a new tensor, as plain PyTorch does, whose strides are those that PyTorch would have chosen.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import fx

from .._torch import boxed, private, private_of
from ..capture.fx_nodes import tensors_of
from ..capture.rewrites.handing import is_handing
from ..capture.rewrites.stepping import is_update
from .changes import CHANGES, FILE, Change, change_of
from .in_place import overwriting
from .updates import update_now

__all__ = ["Overwrites", "compile_graph", "source_of"]


Overwrites: TypeAlias = Literal["all", "what it made", "nothing"]
"""What a function may overwrite of what is marked: also values that came in, or its own alone."""


class Look(Protocol):
    """Is shown what nodes return, and the tensors that they read."""

    def wanted(self, node: fx.Node) -> bool:
        """Whether a node is to be shown."""

    def trusts(self) -> bool:
        """Whether an argument may be overwritten: nothing shares storage that was not foretold to."""

    def __call__(self, node: fx.Node, result: Any, read: tuple[Any, ...]) -> None: ...


# What `repr` writes as it is; all else becomes a global of the generated function.
_PLAIN = (int, float, bool, str, type(None))


def compile_graph(
    module: fx.GraphModule, name: str, *, look: Look | None = None, overwrites: Overwrites = "all"
) -> Callable[[list[Any]], Any]:
    """The boxed function of a graph; `look` is shown what nodes return."""
    source, names = source_of(module, name, look=look, overwrites=overwrites)
    exec(compile(source, f"{FILE}{name}>", "exec"), names)
    return boxed(names[name])


def source_of(
    module: fx.GraphModule, name: str, *, look: Look | None = None, overwrites: Overwrites = "all"
) -> tuple[str, dict[str, Any]]:
    """The source of a graph's function, and the names it uses."""
    writer = _Writer(module, name, look, overwrites)
    return writer.source(), writer.names


class _Writer:
    def __init__(self, module: fx.GraphModule, name: str, look: Look | None, overwrites: Overwrites) -> None:
        self.module = module
        self.look = look
        self.name = name
        self.names: dict[str, Any] = {}
        self.known: dict[int, str] = {}
        self.dying = _last_uses(module.graph)
        self.in_place = (
            overwriting(module.graph, saved=overwrites == "all") if overwrites != "nothing" else {}
        )

    def source(self) -> str:
        arguments = [node.name for node in self.module.graph.find_nodes(op="placeholder")]
        lines = [f"def {self.name}(args):"]
        if arguments:
            # The list is the caller's: emptied, so that a `del` below frees the tensor and not just a name
            # for it.
            lines += [f"    {', '.join(arguments)}, = args", "    args.clear()"]
        unused = [node.name for node in self.dying.get(None, ())]
        if unused:
            lines.append(f"    del {', '.join(unused)}")
        changes: list[Change] = []
        for node in self.module.graph.nodes:
            if change := change_of(node, len(lines) + 1):
                changes.append(change)
            lines += self.lines(node)
        self.names[CHANGES] = changes
        return "\n".join(lines) + "\n"

    def lines(self, node: fx.Node) -> list[str]:
        if node.op == "placeholder":
            return []
        if node.op == "output":
            return [f"    return [{', '.join(self.text(item) for item in node.args[0])}]"]  # type: ignore[union-attr]
        unnamed = is_handing(node) or is_update(node)
        dead = [gone.name for gone in self.dying.get(node, ()) if gone is not node or not unnamed]
        freed = [f"    del {', '.join(dead)}"] if dead else []
        if unnamed:
            goes = "yield handed"
            if is_update(node):
                goes = f"{self.constant(update_now, 'op')}({self.text(node.args[0])}, handed)"
            return [f"    handed = {self.text(node.args[1])}", *freed, f"    {goes}"]
        lines = [f"    {node.name} = {self.call(node) if node not in self.in_place else self.either(node)}"]
        if self.look is not None and self.look.wanted(node):
            reads = "".join(f"{parent.name}, " for parent in node.all_input_nodes)
            shown = f"{self.constant(node, 'node')}, {node.name}, ({reads})"
            lines.append(f"    {self.constant(self.look, 'look')}({shown})")
        return lines + freed

    def call(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            return self.constant(_attribute(self.module, str(node.target)), "constant")
        # Plain syntax is faster than a call of operator.getitem, and there is one for every output of every
        # op.
        if node.target is _GETITEM:
            return f"{self.text(node.args[0])}[{self.text(node.args[1])}]"
        arguments = [self.text(arg) for arg in node.args]
        arguments += [f"{key}={self.text(value)}" for key, value in node.kwargs.items()]
        return f"{self.constant(_direct(node.target), 'op')}({', '.join(arguments)})"

    def either(self, node: fx.Node) -> str:
        """A call that overwrites an argument if all lies as foretold, and else makes a new tensor."""
        how = self.in_place[node]
        tensors = [(parent.name, tensor) for parent in node.all_input_nodes for tensor in tensors_of(parent)]
        checks = [self.lies_as_foretold(*found, wholly=how.handed_out) for found in tensors]
        if self.look is not None:
            checks.insert(0, f"{self.constant(self.look, 'look')}.trusts()")
        arguments = [self.text(arg) for arg in node.args]
        arguments += [f"{key}={self.text(value)}" for key, value in node.kwargs.items()]
        if how.keyword is None:
            arguments[0] += ".detach()" * how.handed_out
        else:
            arguments.append(f"{how.keyword}={arguments[how.place]}{'.detach()' * how.handed_out}")
        call = f"{self.constant(_direct(how.target), 'op')}({', '.join(arguments)})"
        return f"{call} if {' and '.join(filter(None, checks)) or True} else {self.call(node)}"

    def lies_as_foretold(self, name: str, tensor: torch.Tensor, *, wholly: bool) -> str:
        """A comparison of strides; kernels give those of dimensions of one element as they like."""
        places = [place for place, size in enumerate(tensor.shape) if size != 1]
        if wholly or len(places) == tensor.dim():
            return f"{name}.stride() == {self.text(tuple(tensor.stride()))}"
        return " and ".join(f"{name}.stride({place}) == {tensor.stride(place)}" for place in places)

    def text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, _PLAIN) and not _is_special(value):
            return repr(value)
        if isinstance(value, list | tuple):
            items = "".join(f"{self.text(item)}, " for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        return self.constant(value, "constant")

    def constant(self, value: Any, kind: str) -> str:
        # By identity: equal constants of different types (1 and True) must not be mixed up.
        if id(value) not in self.known:
            self.known[id(value)] = f"{kind}_{len(self.names)}"
            self.names[self.known[id(value)]] = value
        return self.known[id(value)]


_GETITEM = operator.getitem


_VIEW = torch.ops.aten.view.default
_view, _reshape = private_of(_VIEW, "kernel"), private_of(torch.ops.aten.reshape.default, "kernel")


def view(x: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """A view, or a copy where a kernel returned other strides than tracing foretold."""
    try:
        return _view(x, shape)  # type: ignore[no-any-return]
    except RuntimeError:
        return _reshape(x, shape)  # type: ignore[no-any-return]


def _direct(target: Any) -> Any:
    """The operator behind its Python wrapper, which costs a fifth of a small op's time (2.11-2.13)."""
    if target is _VIEW:
        return view
    return private_of(target, "kernel") if isinstance(target, private("OpOverload")) else target


def _is_special(value: Any) -> bool:
    return isinstance(value, float) and (value != value or value in (float("inf"), float("-inf")))


def _last_uses(graph: fx.Graph) -> dict[fx.Node | None, list[fx.Node]]:
    """For each node, the nodes to free after it; under None, the arguments that nothing reads."""
    dying: dict[fx.Node | None, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for user in reversed(list(graph.nodes)):
        for node in user.all_input_nodes:
            if node not in seen:
                seen.add(node)
                # What is returned must live on.
                if user.op != "output":
                    dying.setdefault(user, []).append(node)
        if user not in seen and user.op != "output":
            dying.setdefault(None if user.op == "placeholder" else user, []).append(user)
    return dying


def _attribute(module: torch.nn.Module, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return found
