"""Which ops fuse: what Inductor computes inside the kernel that reads it, and what runs by itself.

Inductor turns element-wise ops, gathers and reductions into loops and fuses them; matrix products,
convolutions, attention, sorting and scattering run as kernels of their own. So a value between two fused ops
need never be in memory, while whatever a kernel of its own reads or writes is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import fx

from .fx_nodes import is_item, tensors_of

__all__ = ["Fusing", "fusing", "is_realized", "steers", "type_of"]

Fusing = Literal["loop", "reduction", "apart"]
"""How an op runs: as part of a loop, as a reduction that loops fuse with, or as a kernel of its own."""

_LOOPS = frozenset(
    """
    aten._adaptive_avg_pool2d aten._to_copy aten._unsafe_index aten._unsafe_masked_index aten.arange
    aten.avg_pool2d aten.avg_pool2d_backward aten.cat aten.clone aten.constant_pad_nd aten.copy aten.copy_
    aten.diagonal_scatter aten.embedding aten.empty aten.empty_like aten.expand aten.fill aten.flip aten.full
    aten.full_like aten.gather aten.hardtanh_backward aten.index aten.index_select aten.leaky_relu_backward
    aten.lift_fresh_copy aten.max_pool2d_with_indices_backward aten.native_dropout_backward aten.new_zeros
    aten.ones aten.ones_like aten.permute aten.reflection_pad2d aten.repeat aten.scalar_tensor
    aten.select_scatter aten.slice_scatter aten.tril aten.triu aten.upsample_bilinear2d
    aten.upsample_nearest2d aten.where aten.zeros aten.zeros_like lowtide.image_in_memory
    prims._inductor_bucketize prims._low_memory_max_pool_offsets_to_indices prims.broadcast_in_dim
    prims.convert_element_type prims.device_put prims.fma prims.frexp prims.inductor_lookup_seed
    prims.inductor_randint prims.inductor_random prims.iota
    """.split()  # noqa: SIM905
)
_REDUCTIONS = frozenset(
    """
    aten._log_softmax aten._softmax aten.all aten.amax aten.amin aten.any aten.argmax aten.argmin
    aten.logsumexp aten.max aten.max_pool2d_with_indices aten.mean aten.min aten.prod aten.std aten.sum
    aten.var aten.var_mean prims._low_memory_max_pool_with_offsets prims.prepare_softmax_online prims.sum
    prims.var prims.xor_sum
    """.split()  # noqa: SIM905
)
_COMPARISONS = ("aten.eq", "aten.ge", "aten.gt", "aten.le", "aten.lt", "aten.ne")
_ROUNDINGS = ("aten.ceil", "aten.floor", "aten.round", "aten.trunc")
_MOST_JOINED = 4
"""Parts of a concatenation: more are realized where two nodes read them (Inductor's
`realize_reads_threshold`), and more than 8 in any case (its `max_pointwise_cat_inputs`; both in
2.11-2.13)."""


def type_of(node: fx.Node) -> str:
    """The operator without its overload, as in `aten.add`."""
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet) if packet is not None else getattr(node.target, "__name__", str(node.target))


def fusing(node: fx.Node) -> Fusing:
    """How Inductor runs a node; one that it is not known to fuse runs apart."""
    name = type_of(node)
    if name in _REDUCTIONS:
        return "reduction"
    if name in _LOOPS or torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return "loop"
    return "apart"


def is_realized(node: fx.Node) -> bool:
    """Whether Inductor puts a loop's result in memory whatever reads it: a concatenation of many parts."""
    return type_of(node) == "aten.cat" and len(node.args[0]) > _MOST_JOINED  # type: ignore[arg-type]


def steers(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose result is a choice: whole numbers, masks that become some, or a comparison, of reals.

    A kernel that is fused differently may round its input differently, and then choose differently; so these
    are never recomputed.
    """
    choices = {node for node in graph.nodes if _is_choice(node)}
    masks = {node for node in graph.nodes if _is_mask(node)}
    steering: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if _has_only(node, (torch.bool,)) and any(_turns_whole(user, steering) for user in node.users):
            steering.add(node)
    return choices | (steering & masks)


def _turns_whole(user: fx.Node, steering: set[fx.Node]) -> bool:
    """Whether a node makes whole numbers, or an index, of a mask."""
    return user in steering or _is_whole(user) or type_of(user) in ("aten.index", "aten.index_put")


def _is_choice(node: fx.Node) -> bool:
    if type_of(node) in _COMPARISONS and len(_reals(node)) > 1:
        return True  # which elements are the maximum, or below the k-th? An equal one must stay equal
    if type_of(node) in _ROUNDINGS:
        return _reads_reals(node)
    seeds = any(
        word in type_of(node) for word in ("attention", "batch_norm")
    )  # their integers choose nothing
    return not seeds and _reads_reals(node) and any(map(_whole, tensors_of(node)))


def _is_mask(node: fx.Node) -> bool:
    return _reads_reals(node) and _has_only(node, (torch.bool,))


def _is_whole(node: fx.Node) -> bool:
    tensors = tensors_of(node)
    return bool(tensors) and all(map(_whole, tensors))


def _has_only(node: fx.Node, dtypes: Iterable[torch.dtype]) -> bool:
    tensors = tensors_of(node)
    return bool(tensors) and all(tensor.dtype in dtypes for tensor in tensors)


def _whole(tensor: torch.Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool)


def _reads_reals(node: fx.Node) -> bool:
    return bool(_reals(node))


def _reals(node: fx.Node) -> list[torch.Tensor]:
    if node.op != "call_function" or is_item(node):
        return []
    read = [tensor for parent in node.all_input_nodes for tensor in tensors_of(parent)]
    return [tensor for tensor in read if tensor.dtype.is_floating_point]
