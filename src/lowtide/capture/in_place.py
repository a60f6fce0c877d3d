"""Ops that may write their result into the place of a value that they read, for the last time.

Plain PyTorch makes a new tensor for `silu_backward` although the gradient it reads is gone right after it.
Most such operators have a form that writes into a tensor that it is given (`out=`, or `relu_`), and it may be
the very one that it reads: then the op takes no bytes of its own. Which ops may, of a traced step:

- the operator works element by element: torch tags it `pointwise`, or it is in the list below. A softmax
  looks at a whole row before it writes there; a scatter writes to a copy of its first argument, and that may
  be the argument itself. `tests/capture/test_in_place.py` compares all of them, bit for bit;
- the form that writes in place is a kernel of the device. Some are not: torch generates `out=` for every
  operator, and what it generates computes a new tensor and copies it;
- what is overwritten lies in memory as the result does, in one layout alone, is all of its storage, and is
  read by the op in no other way; it is an activation: inputs, outputs and gradients are others' to read, and
  so are tangents, for which autograd may hand the same tensor to several functions;
- the op draws no numbers and has no effect, and no collective that goes on by itself may still be reading.

Not here: ops that cast (their result is of another size), and dropout's backward, of which torch has no such
form. What is done with it is the schedule's (`plans/events.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .._torch import private, private_of
from ..plans.graph import Op
from .module_hooks import calls_hooks
from .rewrites.collectives import is_collective, waited

if TYPE_CHECKING:
    from .lift import Lifted

__all__ = ["IN_PLACE", "InPlace", "form_of", "with_places"]

IN_PLACE = "lowtide_in_place"
"""The field of a lowered node's meta that says how it overwrites one of its arguments: an `InPlace`."""

aten = torch.ops.aten

_NOT_TAGGED = frozenset(
    {
        aten._log_softmax.default,
        aten._log_softmax_backward_data.default,
        aten._softmax.default,
        aten._softmax_backward_data.default,
        aten.elu_backward.default,
        aten.hardshrink_backward.default,
        aten.hardsigmoid_backward.default,
        aten.hardswish.default,
        aten.hardtanh_backward.default,
        aten.leaky_relu_backward.default,
        aten.masked_fill.Tensor,
        aten.softplus_backward.default,
        aten.softshrink_backward.default,
    }
)
_CHANGES_FIRST = frozenset({aten.scatter.src, aten.scatter.value, aten.scatter_add.default})
"""Operators that copy their first argument and change the copy."""

_MAKES_MORE = frozenset({aten.mvlgamma.default})
"""Operators whose form in place makes tensors of its own all the same, as tests on a GPU have shown."""


@dataclass(frozen=True)
class InPlace:
    """How an op writes into one of its arguments: the operator, its keyword for it, and which argument it is.

    Without a keyword the operator writes into its first argument. `handed_out` says that the result leaves
    the step: then it is a tensor of its own on that storage, and no view of another.
    """

    target: Any
    keyword: str | None
    place: int
    handed_out: bool = False


def with_places(lifted: Lifted, device: str) -> Lifted:
    """The graph with what each op may overwrite on a type of device, unless all is kept."""
    sent = _sent(lifted) | _shown(lifted)
    found = {
        op.name: {name: how for name, how in _places(lifted, op, device).items() if name not in sent}
        for op in lifted.graph.ops
    }
    ops = tuple(replace(op, takes=tuple(found[op.name])) for op in lifted.graph.ops)
    graph = lifted.graph.replace(ops=ops, plain_in_place=False)
    return replace(lifted, graph=graph, in_place={name: ways for name, ways in found.items() if ways})


def _sent(lifted: Lifted) -> set[str]:
    """The values that collectives read which do not wait for their end."""
    nodes = lifted.node_of
    return {
        name
        for op in lifted.graph.ops
        if is_collective(nodes[op.name]) and nodes[op.name].target is not waited
        for name in op.reads
    }


def _shown(lifted: Lifted) -> set[str]:
    """The values that hooks of the user's have seen or made, and may keep."""
    ops = [op for op in lifted.graph.ops if calls_hooks(lifted.node_of[op.name])]
    return {name for op in ops for name in (*op.reads, *op.writes)}


def _places(lifted: Lifted, op: Op, device: str) -> dict[str, InPlace]:
    """The values that an op may overwrite, and how."""
    node, value = lifted.node_of[op.name], lifted.graph.value
    form = form_of(node.target, device)
    if form is None or op.kind != "pure" or len(op.writes) != 1:
        return {}
    written = value[op.writes[0]]
    found: dict[str, InPlace] = {}
    first_alone = form.keyword is None or node.target in _CHANGES_FIRST
    for place, arg in enumerate(node.args[:1] if first_alone else node.args):
        if not isinstance(arg, fx.Node) or (name := lifted.value_of.get(arg)) is None or name in found:
            continue
        taken = value[name]
        if taken.kind != "activation" or taken.held or taken.bytes != written.bytes or not taken.bytes:
            continue
        if _lies_as(arg.meta["val"], node.meta["val"]) and _is_read_alike(lifted, node, arg, name):
            found[name] = replace(form, place=place, handed_out=not written.droppable)
    return found


def _lies_as(read: Any, result: Any) -> bool:
    """Whether a tensor is all of its storage, and lies there as a result does that has one of its own."""
    return (
        isinstance(read, torch.Tensor)
        and isinstance(result, torch.Tensor)
        and _geometry(read) == _geometry(result)
        and not _may_be_channels_last(result)
        and (read.storage_offset(), read.is_conj(), read.is_neg()) == (0, False, False)
        and (read.dtype, read.device) == (result.dtype, result.device)
        and read.untyped_storage().nbytes() == result.untyped_storage().nbytes() == read.nbytes
    )


def _may_be_channels_last(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in two layouts at once, as one of a single pixel does.

    By the strides of its dimensions of one element, which a new tensor may have otherwise than one that is
    overwritten, kernels choose between the two, and round differently.
    """
    if tensor.dim() not in (4, 5) or 1 not in tensor.shape:
        return False
    plain = tensor.is_contiguous() and tensor.shape[1] > 1 and tensor.shape[2:].numel() > 1
    return not plain


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _is_read_alike(lifted: Lifted, node: fx.Node, arg: fx.Node, name: str) -> bool:
    """Whether an op reads a value through tensors that lie alike: then no element is read too late."""
    others = [parent for parent in node.all_input_nodes if lifted.value_of.get(parent) == name]
    tensors = [parent.meta.get("val") for parent in others]
    return all(
        isinstance(tensor, torch.Tensor)
        and tensor.dtype == arg.meta["val"].dtype
        and _geometry(tensor) == _geometry(arg.meta["val"])
        for tensor in tensors
    )


@cache
def form_of(target: Any, device: str) -> InPlace | None:
    """The form of an operator that writes in place, by a kernel of its own on a type of device, if it may."""
    if not isinstance(target, private("OpOverload")) or target.namespace != "aten":
        return None
    if private_of(target, "schema").is_mutable:
        return None
    if target in _MAKES_MORE:
        return None
    tagged = torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags
    if not (tagged or target in _NOT_TAGGED or target in _CHANGES_FIRST):
        return None
    packet = target.overloadpacket
    for name in packet.overloads():
        form = getattr(packet, name)
        out = [arg.name for arg in _arguments(form) if arg.is_out]
        if len(out) == 1 and _asks_for_the_same(form, target) and _has_kernel(form, device):
            return InPlace(form, out[0], 0)
    overload = private_of(target, "schema").overload_name or "default"
    changing = getattr(getattr(aten, f"{packet.__name__}_", None), overload, None)
    if changing is None or not _asks_for_the_same(changing, target) or not _has_kernel(changing, device):
        return None
    return InPlace(changing, None, 0)


def _arguments(target: Any) -> list[Any]:
    return list(private_of(target, "schema").arguments)


def _asks_for_the_same(form: Any, target: Any) -> bool:
    """Whether two overloads have the same arguments, but for what one of them writes to."""
    one, other = (
        [(arg.name, str(arg.type), arg.default_value) for arg in _arguments(each) if not arg.is_out]
        for each in (form, target)
    )
    return one == other


def _has_kernel(form: Any, device: str) -> bool:
    key = "CUDA" if device == "cuda" and _knows("aten::mul.out", "CUDA") else "CPU"
    return _knows(form.name(), key)


def _knows(operator: str, key: str) -> bool:
    """Whether a kernel is registered; a torch without CUDA has none of its, and most are those of the CPU."""
    try:
        return bool(private("has_kernel")(operator, key))
    except RuntimeError:  # an overload for TorchScript alone
        return False
