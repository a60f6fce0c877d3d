"""The marks of sketches in a captured step, and the step with each of them replaced.

A mark is one input of sketched layers: `lowtide::compress` in the forward of the joint graph, and one
`lowtide::weight_gradient` in the backward for each layer that reads it. A mark that is sketched becomes the
plain operators of both; any other becomes the product of the gradient with the input itself, which is what
`nn.Linear` computes, and its seed is not drawn. So the step is, bit for bit, that of the model in which only
the layers of the chosen marks are sketched.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from .._torch import private
from ..lift import module_path
from ..nodes import depends_on, is_item, storage_of, tensors_of
from ..rewrite import drop_idle_views, look_anew
from .kinds import KINDS
from .marker import COMPRESS, PLAIN, WEIGHT_GRADIENT

__all__ = ["Mark", "Marks"]

aten = torch.ops.aten

_ROUNDING_NOISE = {"int8": 0.0005, "int4": 0.03}
"""In variances of SGD, as measured on activations of real encoders."""


@dataclass(frozen=True)
class Mark:
    """One input that may be sketched: its two kinds of nodes by name, and the layers that read it.

    `saved` are the bytes by which a sketch is smaller than the input, 0 where something else in the backward
    reads the input anyway; `place` is equal for marks at the same place of repeated layers.
    """

    compress: str
    gradients: tuple[str, ...]
    layers: tuple[str, ...]
    place: tuple[Any, ...]
    saved: int
    noise: float


class Marks:
    """The marks of one joint graph."""

    def __init__(self, joint: fx.GraphModule, *, compiled: bool) -> None:
        self.joint = joint
        self.compiled = compiled
        self.traced: dict[Any, fx.GraphModule] = {}
        self.found = _find(joint.graph)

    def __len__(self) -> int:
        return len(self.found)

    @property
    def layers(self) -> list[str]:
        """The names of all layers that have a mark."""
        return [layer for mark in self.found for layer in mark.layers]

    def of(self, layers: Collection[str]) -> list[Mark]:
        """The marks of some layers by their names."""
        return [mark for mark in self.found if any(layer in layers for layer in mark.layers)]

    def ranked(self) -> list[Mark]:
        """The marks of which a sketch saves something, those first that save least for their noise.

        Marks at the same place of repeated layers stay together, the last layers first: what those keep
        is used up soonest in the backward.
        """
        places: dict[Any, list[Mark]] = {}
        for mark in reversed(self.found):
            if mark.saved > 0:
                places.setdefault(mark.place, []).append(mark)
        by_worth = sorted(places.values(), key=lambda marks: marks[0].saved / max(marks[0].noise, 1e-9))
        return [mark for marks in by_worth for mark in marks]

    def replaced(self, sketched: Collection[str]) -> fx.GraphModule:
        """The step in which the marks of the named layers are sketched and the others exact."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.joint.graph, {}))
        node = {node.name: node for node in graph.nodes}
        chosen = self.of(sketched)
        for mark in self.found:
            compress = node[mark.compress]
            gradients = [node[name] for name in mark.gradients]
            if mark in chosen:
                self.put_sketch(graph, compress, gradients)
            else:
                self.put_product(graph, compress, gradients)
        graph.lint()
        if self.compiled:
            graph = private("fx_graph_cse")(graph)
        return fx.GraphModule(self.joint, graph)

    def put_sketch(self, graph: fx.Graph, compress: fx.Node, gradients: list[fx.Node]) -> None:
        kept = self.insert(graph, compress, PLAIN[COMPRESS], compress.args)
        for item in [user for user in compress.users if is_item(user)]:
            _replace(graph, item, kept[item.args[1]])
        graph.erase_node(compress)
        for node in gradients:
            _replace(graph, node, self.insert(graph, node, PLAIN[WEIGHT_GRADIENT], node.args))

    def put_product(self, graph: fx.Graph, compress: fx.Node, gradients: list[fx.Node]) -> None:
        x = _shared(graph, compress.args[0])
        for node in gradients:
            g = _shared(graph, node.args[0])
            _replace(graph, node, self.insert(graph, node, _product, (g, x)))
        for item in [*compress.users, compress]:
            graph.erase_node(item)

    def insert(self, graph: fx.Graph, node: fx.Node, function: Callable[..., Any], args: Any) -> Any:
        """The plain operators of a call, before a node; gives what stands for its results."""
        given: list[fx.Node] = []
        fx.map_arg(args, given.append)
        body = self.body(function, args, given)
        here = dict(zip(body.graph.find_nodes(op="placeholder"), given, strict=True))
        meta = {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}
        with graph.inserting_before(node):
            for inner in body.graph.nodes:
                if inner.op == "call_function":
                    here[inner] = copied = graph.node_copy(inner, here.__getitem__)
                    copied.meta = dict(meta)
                    _derive(copied)
        (results,) = body.graph.find_nodes(op="output")
        return fx.map_arg(results.args[0], here.__getitem__)

    def body(self, function: Callable[..., Any], args: Any, given: list[fx.Node]) -> fx.GraphModule:
        """A call in plain operators, traced once for all calls like it."""
        fakes = [parent.meta["val"] for parent in given]
        key = (function, str(fx.map_arg(args, lambda parent: _like(parent.meta["val"]))))
        if key not in self.traced:
            self.traced[key] = _traced(function, args, fakes, compiled=self.compiled)
        return self.traced[key]


def _product(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return g.t() @ x


def _like(tensor: torch.Tensor) -> Any:
    """What a trace depends on; a string, since fx would take a tuple apart."""
    return repr((tensor.shape, tensor.stride(), tensor.dtype, tensor.device))


def _traced(
    function: Callable[..., Any], args: Any, fakes: list[torch.Tensor], *, compiled: bool
) -> fx.GraphModule:
    def call(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        return function(*fx.map_arg(args, lambda _: next(given)))

    table = private("inductor_decompositions")() if compiled else {}
    with private("without_modes")(), torch.no_grad(), private("without_autocast")(), fakes[0].fake_mode:  # type: ignore[attr-defined]
        body = make_fx(torch.func.functionalize(call), decomposition_table=table)(*fakes)
    body.graph.eliminate_dead_code()
    return body


def _derive(node: fx.Node) -> None:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda parent: parent.meta["val"])
    mode = next(tensor.fake_mode for parent in _relatives(node) for tensor in tensors_of(parent))  # type: ignore[attr-defined]
    with private("without_modes")(), torch.no_grad(), mode:
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def _relatives(node: fx.Node) -> list[fx.Node]:
    """What a node reads, or where it makes something from nothing, the inputs of the step."""
    return node.all_input_nodes or node.graph.find_nodes(op="placeholder")


def _replace(graph: fx.Graph, node: fx.Node, by: fx.Node) -> None:
    """Put one node in the place of another; what looks at it is derived again."""
    for user in list(node.users):
        user.replace_input_with(node, by)
        look_anew(user, node.meta["val"])
    graph.erase_node(node)


_FLATTENS = (aten.clone.default, aten._unsafe_view.default, aten.view.default, aten.detach.default)


def _shared(graph: fx.Graph, node: Any) -> fx.Node:
    """The first of the nodes that do the same: a sketched layer flattens what is flat already."""
    if node.target not in _FLATTENS:
        return node  # type: ignore[no-any-return]
    source = _shared(graph, node.args[0])
    twins = [user for user in source.users if _same_call(user, node)]
    first = min(twins)
    for twin in twins:
        if twin is not first:
            _replace(graph, twin, first)
    return first


def _same_call(left: fx.Node, right: fx.Node) -> bool:
    return (left.target, left.args, left.kwargs) == (right.target, right.args, right.kwargs)


def _find(graph: fx.Graph) -> list[Mark]:
    compressed = graph.find_nodes(op="call_function", target=COMPRESS)
    if not compressed:
        return []
    drop_idle_views(graph)
    backward = depends_on(graph, [n for n in graph.find_nodes(op="placeholder") if "tangents" in n.name])
    stay = {storage_of(t) for node in graph.nodes if node.op == "placeholder" for t in tensors_of(node)}
    stay |= {
        storage_of(t) for node in backward for parent in node.all_input_nodes for t in tensors_of(parent)
    }
    seen: Counter[str] = Counter()
    return [_mark(node, stay, seen) for node in compressed]


def _mark(compress: fx.Node, stay: set[int], seen: Counter[str]) -> Mark:
    x, _, kind, k, _ = compress.args
    gradients = dict.fromkeys(
        user for item in compress.users for user in item.users if user.target is WEIGHT_GRADIENT
    )
    # a layer that is called again is known to torch.compile as what its `forward` holds
    names = [module_path(node).removesuffix(".forward.args.0") for node in gradients]
    value = x.meta["val"]  # type: ignore[union-attr]
    kept = sum(t.numel() * t.element_size() for t in tensors_of(compress))
    shape, rows = tuple(value.shape), value.shape[0]
    noise = rows / k - 1 if KINDS[kind].has_rate else _ROUNDING_NOISE[kind]  # type: ignore[index,operator]
    places = tuple(sorted(re.sub(r"\d+", "*", name) for name in names))
    return Mark(
        compress=compress.name,
        gradients=tuple(node.name for node in gradients),
        layers=tuple(_numbered(name, seen) for name in names),
        place=(kind, k, shape, value.dtype, places),
        saved=0 if storage_of(value) in stay else value.untyped_storage().nbytes() - kept,
        noise=noise * len(gradients),
    )


def _numbered(name: str, seen: Counter[str]) -> str:
    """The name of a layer, with a number where it is called again."""
    seen[name] += 1
    shown = name or "(the model)"
    return shown if seen[name] == 1 else f"{shown} ({seen[name]})"
