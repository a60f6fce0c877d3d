"""The captured step with each mark of a sketch replaced, by the sketch or by the exact product.

A mark that is sketched becomes the plain operators of its two kinds of nodes; any other becomes the product
of the gradient with the input itself, which is what `nn.Linear` computes, and its seed is not drawn. So the
step is, bit for bit, that of the model in which only the layers of the chosen marks are sketched. Where some
rows of the input are kept in place of a sketch, the product is of these rows alone: the same up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from .._torch import private
from ..capture.fx_nodes import is_item, tensors_of
from ..capture.rewrites.common import drop_idle_views, look_anew
from .gradient_rows import Part
from .marker import COMPRESS, PLAIN, WEIGHT_GRADIENT
from .marks import Mark, find_marks

__all__ = ["MarkedStep"]

aten = torch.ops.aten

_OF_ONE_CALL = ("val", "tensor_meta", "eager_input_vals")
"""What the meta of a node says about its own arguments and results."""


class MarkedStep:
    """A joint graph with marks; `replaced` gives the step with some of them sketched."""

    def __init__(self, joint: fx.GraphModule, *, compiled: bool) -> None:
        drop_idle_views(joint.graph)
        self.joint, self.compiled = joint, compiled
        self.marks = find_marks(joint.graph)
        self.traced: dict[Any, fx.GraphModule] = {}

    def replaced(self, sketched: Collection[Mark]) -> fx.GraphModule:
        """The step in which some of the marks are sketched and the others exact."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.joint.graph, {}))
        node = {node.name: node for node in graph.nodes}
        for mark in self.marks:
            compress, gradients = node[mark.compress], [node[name] for name in mark.gradients]
            if mark not in sketched:
                self.put_product(graph, compress, gradients)
            elif mark.part is not None:
                self.put_product(graph, compress, gradients, mark.part)
            else:
                self.put_sketch(graph, compress, gradients)
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

    def put_product(
        self, graph: fx.Graph, compress: fx.Node, gradients: list[fx.Node], part: Part | None = None
    ) -> None:
        x = _shared(graph, compress.args[0])
        if part is not None:
            x = self.insert(graph, compress, _kept_rows, (x, *part))
        for node in gradients:
            g = _shared(graph, node.args[0])
            product, args = (_product, (g, x)) if part is None else (_product_of_rows, (g, x, *part))
            _replace(graph, node, self.insert(graph, node, product, args))
        for item in [*compress.users, compress]:
            graph.erase_node(item)

    def insert(self, graph: fx.Graph, node: fx.Node, function: Callable[..., Any], args: Any) -> Any:
        """The plain operators of a call, before a node; gives what stands for its results."""
        given: list[fx.Node] = []
        fx.map_arg(args, given.append)
        body = self.body(function, args, given)
        here = dict(zip(body.graph.find_nodes(op="placeholder"), given, strict=True))
        meta = {key: value for key, value in node.meta.items() if key not in _OF_ONE_CALL}
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


def _kept_rows(x: torch.Tensor, *part: int) -> torch.Tensor:
    return Part(*part).of(x).clone()


def _product_of_rows(g: torch.Tensor, x: torch.Tensor, *part: int) -> torch.Tensor:
    return Part(*part).of(g).t() @ x


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
    """Put one node in the place of another; what looks at it is derived anew."""
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
