"""Random numbers drawn as eager draws them: as many of them, and in the same order of memory.

A random op changes the random state also where nobody reads its result, so it is kept, and what it makes is
freed at once. Tracing changes some draws otherwise, in ways that show in their layout alone:

- an in-place `bernoulli_`, which dropout in place and alpha dropout draw with, is traced as a functional one,
  whose result is always contiguous, while eager draws along the strides of the tensor that it fills;
- `dropout` with a rate of one draws nothing in eager, and is traced as an op that draws;
- `rrelu` returns a contiguous result in eager, and is traced as one with the strides of its input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from ..._torch import private_of
from ...torch_state.random_state import OwnGenerator, recompute
from ..fx_nodes import storage_of, tensors_of, traced_in_backward
from .dropout import RANDOM
from .own_generators import generator_of_node

__all__ = [
    "draws",
    "draws_numbers",
    "in_order_of_memory",
    "is_drawn_in_backward",
    "is_idle_draw",
    "lay_out_calls",
]

aten = torch.ops.aten


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers: attention with no dropout does not."""
    return node.target in RANDOM or draws_numbers(node.target, node.args, node.kwargs)


def draws_numbers(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator draws random numbers."""
    return _is_seeded(operator) and _rate(operator, args, kwargs) != 0.0


@lru_cache(4096)
def _is_seeded(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def _rate(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The probability that an op drops elements with, or None where it has none."""
    schema = private_of(operator, "schema", None)
    for index, argument in enumerate(schema.arguments if schema else ()):
        if argument.name == "dropout_p":
            return args[index] if index < len(args) else kwargs.get("dropout_p", 0.0)
    return None


def is_idle_draw(node: fx.Node) -> bool:
    """Whether a node draws numbers that nobody reads.

    The seed of a sketch that is not made is none: without sketches the step is the plain one.
    """
    if node.op != "call_function" or node.users or not draws(node):
        return False
    return getattr(node.target, "namespace", "") != "lowtide"


def is_drawn_in_backward(node: fx.Node) -> bool:
    """Whether autograd draws these numbers while it runs, as the backward of a custom function may."""
    return node.op == "call_function" and traced_in_backward(node) and draws(node)


def bernoulli(x: torch.Tensor, p: float, *, generator: Any = None) -> torch.Tensor:
    """Zeros and ones drawn along the strides of a tensor."""
    made = aten.empty_like.default(x)
    return aten.bernoulli_.float(made, p, generator=generator)  # type: ignore[no-any-return]


def bernoulli_recomputed(state: torch.Tensor, device: str, x: Any, p: float, *, generator: Any = None) -> Any:
    """The same zeros and ones, from the saved random state."""
    return recompute(state, device, bernoulli, x, p, generator=generator)


def bernoulli_from(source: OwnGenerator, x: Any, p: float) -> Any:
    """The same from a generator of its own."""
    return bernoulli(x, p, generator=source.generator)


def bernoulli_from_again(state: torch.Tensor, source: OwnGenerator, x: Any, p: float) -> Any:
    """The same zeros and ones, from that generator's saved state."""
    return recompute(state, source, bernoulli_from, source, x, p)


RANDOM[bernoulli] = bernoulli_recomputed
RANDOM[bernoulli_from] = bernoulli_from_again


def dropped(x: torch.Tensor, p: float, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout with a rate of one as eager has it: times zero, with nothing drawn."""
    return aten.mul.Scalar(x, 0), torch.zeros_like(x, dtype=torch.bool)


def in_order_of_memory(graph: fx.Graph) -> None:
    """Let what tracing draws in another order, or draws for nothing, be as eager has it."""
    changed: set[fx.Node] = set()
    for node in graph.nodes:
        # The functional op draws in the order of the result, which is contiguous; eager's draws along the
        # strides.
        source = generator_of_node(node)
        if source is not None and node.args[1] is aten.bernoulli.p:
            if not node.args[2].meta["val"].is_contiguous():
                node.target, node.args = bernoulli_from, (source, *node.args[2:])
                changed.add(node)
        elif node.target is aten.bernoulli.p and not node.args[0].meta["val"].is_contiguous():
            node.target = bernoulli
            changed.add(node)
        elif node.target is aten.native_dropout.default and node.args[1] == 1 and node.args[2]:
            node.target = dropped
        elif node.op == "call_function" and not changed.isdisjoint(node.all_input_nodes):
            changed.add(node)
        if node in changed:
            _derive(node)


def _derive(node: fx.Node) -> None:
    """Make a node's fake tensors anew, after the strides of what it reads have changed."""
    given = (tensor for parent in node.all_input_nodes for tensor in tensors_of(parent))
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda parent: parent.meta["val"])
    with next(given).fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def lay_out_calls(module: fx.GraphModule) -> None:
    """Let calls give results of the layout that they have in eager, which later draws follow.

    What torch.compile captured still tells `torch.bernoulli(x, p)` from `x.bernoulli_(p)`, and
    `x.addmm_(a, b)`, which keeps the strides of x, from `x.addmm(a, b)`; the joint graph does not.
    """
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in list(part.graph.nodes):
                if _returns_contiguous(node):
                    _read_contiguous(node)
                elif _loses_strides(node):
                    _write_back(node)


def _returns_contiguous(node: fx.Node) -> bool:
    if _called(node) in (torch.bernoulli, "bernoulli"):
        return len(node.args) > 1 or "p" in node.kwargs
    if node.target not in (torch.rrelu, torch.nn.functional.rrelu):
        return False
    training, inplace = (_argument(node, name, index) for name, index in (("training", 3), ("inplace", 4)))
    return bool(training) and not inplace


def _called(node: fx.Node) -> Any:
    """What a node calls, also where a generator is held in its place."""
    return getattr(node.target, "instead_of", node.target)


def _argument(node: fx.Node, name: str, index: int) -> Any:
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, False)


def _read_contiguous(node: fx.Node) -> None:
    source = node.args[0] if node.args else None
    if isinstance(source, fx.Node):
        with node.graph.inserting_before(node):
            copy = node.graph.call_method("contiguous", (source,))
        node.args = (copy, *node.args[1:])


def _loses_strides(node: fx.Node) -> bool:
    """Whether a method in place is traced as a functional one whose result has other strides."""
    name = str(node.target)
    own = _example(node.args[0]) if node.op == "call_method" and node.args else None
    if own is None or own.is_contiguous() or name in ("bernoulli_", "copy_") or not _functional(name):
        return False
    args, kwargs = fx.map_arg((node.args, node.kwargs), _example)
    try:
        with own.fake_mode, torch.no_grad():
            kept = own.clone()
            made = getattr(kept, _functional(name))(*args[1:], **kwargs)
    except Exception:  # whatever it needs to run, the capture itself comes next and says what is wrong
        return False
    looks_at_it = storage_of(made) == storage_of(kept)  # as a transpose in place, which is none of a value
    return not looks_at_it and made.shape == own.shape and made.stride() != kept.stride()


def _functional(name: str) -> str:
    """The method that does the same not in place, or nothing."""
    inplace = name.endswith("_") and not name.endswith("__")
    return name[:-1] if inplace and hasattr(torch.Tensor, name[:-1]) else ""


def _example(node: Any) -> Any:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) and hasattr(value, "fake_mode") else None


def _write_back(node: fx.Node) -> None:
    """`x.copy_(x.addmm(a, b))` in the place of `x.addmm_(a, b)`."""
    with node.graph.inserting_before(node):
        made = node.graph.call_method(_functional(str(node.target)), node.args, node.kwargs)
    node.target, node.args, node.kwargs = "copy_", (node.args[0], made), {}
