"""BatchNorm as eager runs it: one fused kernel, statistics updated in place, once.

The traced graph holds a functional BatchNorm that returns new running statistics, which are copied into the
buffers at the end; on a GPU it does not use cuDNN and was seen to cost ResNet-50 19 % of its step. Here it
becomes the operator that eager would pick. When the op is recomputed, it runs without statistics: they are
updated exactly once per step, and its other outputs do not depend on them. Where they are averages of all
batches (`averaged_norms.py`), the number of batches stands in the place of the momentum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..averaged_norms import AVERAGED, newest

__all__ = ["RECOMPUTED_BY", "UPDATES_STATISTICS", "fuse", "recomputed_args"]

aten = torch.ops.aten


Momentum = float | torch.Tensor
"""How much this batch weighs in the statistics, or the number of batches that weigh alike."""


def _weight(momentum: Momentum) -> float:
    return newest(momentum) if isinstance(momentum, torch.Tensor) else momentum


def batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: Momentum, eps: float) -> Any:
    """Train-mode BatchNorm by the native kernel; updates the running statistics."""
    if mean is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps)
    return aten._native_batch_norm_legit.default(x, weight, bias, mean, var, True, _weight(momentum), eps)


def batch_norm_recomputed(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> Any:
    """The same outputs, bit for bit, without touching the statistics."""
    return aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps)


def cudnn_batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: Momentum, eps: float
) -> Any:
    """Train-mode BatchNorm by cuDNN; updates the running statistics."""
    return aten.cudnn_batch_norm.default(x, weight, bias, mean, var, True, _weight(momentum), eps)


def cudnn_batch_norm_recomputed(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> Any:
    """The same outputs without touching the statistics."""
    return aten.cudnn_batch_norm.default(x, weight, bias, None, None, True, momentum, eps)


def cudnn_batch_norm_backward(
    grad: Any, x: Any, weight: Any, mean: Any, invstd: Any, reserve: Any, eps: float
) -> Any:
    """CuDNN's backward, with the argument order of the native one."""
    return aten.cudnn_batch_norm_backward.default(
        x, grad.contiguous(), weight, None, None, mean, invstd, eps, reserve
    )


RECOMPUTED_BY: dict[Callable[..., Any], Callable[..., Any]] = {
    batch_norm: batch_norm_recomputed,
    cudnn_batch_norm: cudnn_batch_norm_recomputed,
}
"""What runs when an op is recomputed, for the ops where that is not the op itself."""

UPDATES_STATISTICS = frozenset(RECOMPUTED_BY)


def recomputed_args(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of an op that is recomputed: without statistics, which another call may have updated."""
    if node.target not in RECOMPUTED_BY:
        return node.args
    x, weight, bias, _, _, momentum, eps = node.args
    return x, weight, bias, None, None, 0.0 if isinstance(momentum, fx.Node) else momentum, eps


_FUNCTIONAL = aten._native_batch_norm_legit_functional.default
_NO_STATS = aten._native_batch_norm_legit.no_stats
_BACKWARD = aten.native_batch_norm_backward.default


def fuse(graph: fx.Graph) -> None:
    """Replace every train-mode functional BatchNorm, its backward and its statistics' copies."""
    for node in graph.find_nodes(op="call_function", target=_FUNCTIONAL):
        if node.args[5] is True and _copies(node) is not None:
            _fuse_one(graph, node)
    for node in graph.find_nodes(op="call_function", target=AVERAGED):
        if _copies(node) is not None:
            _fuse_one(graph, node)


def _items(node: fx.Node) -> dict[int, fx.Node]:
    return {int(user.args[1]): user for user in node.users}  # type: ignore[arg-type]


def _copies(node: fx.Node) -> list[fx.Node] | None:
    """The copies of the new statistics into the buffers, or None where old or new ones are used otherwise."""
    items = _items(node)
    copies = []
    for index, buffer in ((3, node.args[3]), (4, node.args[4])):
        if not isinstance(buffer, fx.Node) or not all(
            user is node or (user.target is aten.copy_.default and user.args[0] is buffer)
            for user in buffer.users
        ):
            return None
        # New statistics that the step also returns or computes with are real values: then nothing is fused.
        for user in items[index].users if index in items else ():
            if user.target is aten.copy_.default and user.args == (buffer, items[index]):
                copies.append(user)
            elif user.target is not _BACKWARD:
                return None
    return copies if len(copies) == 2 else None


def _fuse_one(graph: fx.Graph, node: fx.Node) -> None:
    x, weight, bias, mean, var, *_, momentum, eps = node.args
    for copy in _copies(node) or ():
        graph.erase_node(copy)
    items = _items(node)
    backwards = [user for item in items.values() for user in item.users if user.target is _BACKWARD]
    cudnn = _eager_uses_cudnn(node)
    with graph.inserting_before(node):
        fused = graph.call_function(
            cudnn_batch_norm if cudnn else batch_norm, (x, weight, bias, mean, var, momentum, eps)
        )
    fused.meta = dict(node.meta)
    values = list(node.meta["val"][:3])
    fused.meta["val"] = tuple([*values, _reserve(x)] if cudnn else values)
    for backward in dict.fromkeys(backwards):
        _fuse_backward(graph, backward, fused if cudnn else None)
    for index in (0, 1, 2):
        if index in items:
            items[index].replace_input_with(node, fused)
    for index in (3, 4):
        if index in items and not items[index].users:
            graph.erase_node(items[index])
    if not node.users:
        graph.erase_node(node)


def _fuse_backward(graph: fx.Graph, node: fx.Node, cudnn: fx.Node | None) -> None:
    """The backward never reads the running statistics in training; cuDNN's wants its reserve."""
    grad, x, weight, _, _, mean, invstd, train, eps, mask = node.args
    if cudnn is None or mask != [True, True, True]:
        node.args = (grad, x, weight, None, None, mean, invstd, train, eps, mask)
        return
    with graph.inserting_before(node):
        reserve = graph.call_function(operator.getitem, (cudnn, 3))
        fused = graph.call_function(cudnn_batch_norm_backward, (grad, x, weight, mean, invstd, reserve, eps))
    reserve.meta = {**cudnn.meta, "val": cudnn.meta["val"][3]}
    fused.meta = dict(node.meta)
    node.replace_all_uses_with(fused)
    graph.erase_node(node)


def _reserve(x: Any) -> torch.Tensor:
    """CuDNN's reserve space; its true size is seen when the op is priced on the device."""
    return x.meta["val"].new_empty(0, dtype=torch.uint8)  # type: ignore[no-any-return]


def _eager_uses_cudnn(node: fx.Node) -> bool:
    """Whether eager's batch_norm would pick cuDNN here (ATen/native/Normalization.cpp, 2.11-2.13)."""
    x, weight, bias = (arg.meta["val"] if isinstance(arg, fx.Node) else None for arg in node.args[:3])
    eps: Any = node.args[-1]
    if x is None or weight is None or bias is None or x.device.type != "cuda":
        return False
    enabled = torch.backends.cudnn.enabled and torch.backends.cudnn.is_available()
    dtypes = x.dtype != torch.bfloat16 and (x.dtype, weight.dtype) in _CUDNN_DTYPES
    small = x.shape[0] <= 880801 and x.numel() < 2**31
    return bool(enabled and dtypes and small and x.dim() >= 3 and eps >= 1e-5)


_CUDNN_DTYPES = {
    (torch.float32, torch.float32),
    (torch.float16, torch.float32),
    (torch.float64, torch.float64),
}
