"""What `fully_shard` has made of a model: its units, and the sizes of what it gathers and reduces.

A *unit* is a module that was sharded and has none inside: its forward is captured and planned. What else the
model does, in the root or between units, runs as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .._torch import private_of
from ..devices.allocator import rounded
from ..errors import LowtideError
from .fsdp_ledger import Group

__all__ = ["Sharded", "Unit", "holds_sharded", "is_sharded"]


def is_sharded(module: Any) -> bool:
    """Whether `fully_shard` was called on a module."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule  # half a second, and few models are sharded

    return isinstance(module, FSDPModule)


def holds_sharded(model: torch.nn.Module) -> bool:
    """Whether a module of a model was sharded."""
    return any(private_of(type(part), "fsdp_state", None) is not None for part in model.modules())


@dataclass(eq=False)
class Unit:
    """A sharded module, its own forward, and which group of parameters is its own.

    It is `whole` where no other sharded module is inside: those are planned by themselves.
    """

    name: str
    module: torch.nn.Module
    forward: Callable[..., Any] = field(repr=False)
    state: Any = field(repr=False)
    group: int = 0
    whole: bool = True


class Sharded:
    """A model that `fully_shard` was called on, with its units and groups; the root's group is the last."""

    def __init__(self, root: torch.nn.Module) -> None:
        self.root = root
        self.states: list[Any] = []
        self.units: list[Unit] = []
        names: dict[int, str] = {}
        for name, module in root.named_modules():
            if not is_sharded(module):
                continue
            state = private_of(module, "fsdp_state")()
            if not any(state is one for one in self.states):
                self.states.append(state)
            names.setdefault(id(state), name)
            if module is not root:
                whole = not any(map(is_sharded, list(module.modules())[1:]))
                self.units.append(Unit(name, module, module.forward, state, whole=whole))
        self.states.append(self.states.pop(0))  # the root comes first in a tree
        self.names = [names[id(state)] or "the root" for state in self.states]
        for unit in self.units:
            unit.group = next(place for place, state in enumerate(self.states) if state is unit.state)
        self.refuse_what_is_not_supported()

    def refuse_what_is_not_supported(self) -> None:
        """Refuse what is not counted."""
        for _, _, parameter in self.parameters():
            if parameter.offload_to_cpu:
                raise LowtideError(
                    "this model is sharded with a CPUOffloadPolicy, whose copies between host and device no "
                    "plan counts. Shard it without, and let the cap make the room by recomputing"
                )
            if hasattr(parameter.sharded_param.to_local(), "fsdp_pre_all_gather"):
                raise LowtideError(
                    "a parameter of this model gathers itself in its own way (fsdp_pre_all_gather), and what "
                    "that takes is not known. Shard plain parameters, or lowtide.cap the model without"
                )

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        for _, _, parameter in self.parameters():
            return torch.device(parameter.sharded_param.device)
        return torch.device("cpu")

    def parameters(self) -> Iterator[tuple[int, Any, Any]]:
        """Each sharded parameter, with the place of its state and its group."""
        for place, state in enumerate(self.states):
            for group in groups_of(state):
                yield from ((place, group, parameter) for parameter in group.fsdp_params)

    def other_parameters(self) -> Iterator[torch.Tensor]:
        """The parameters that are not sharded: those that the user had ignored."""
        own = {id(parameter.sharded_param) for _, _, parameter in self.parameters()}
        own |= {id(private_of(parameter, "fsdp_whole", None)) for _, _, parameter in self.parameters()}
        yield from (parameter for parameter in self.root.parameters() if id(parameter) not in own)

    def groups(self) -> list[Group]:
        """The sizes as they are now; what the user switches between steps is read anew."""
        place_of = {id(state): place for place, state in enumerate(self.states)}
        return [
            self.group(place, state, place_of, is_root=place == len(self.states) - 1)
            for place, state in enumerate(self.states)
        ]

    def group(self, place: int, state: Any, place_of: dict[int, int], *, is_root: bool) -> Group:
        sizes: dict[str, int] = dict.fromkeys(_SIZES, 0)
        flags = {"frees": True, "frees_after_backward": True, "reduces": True}
        present = {"has_gradients": False, "has_sums": False, "recast": False}
        for group in groups_of(state):
            for name, size in _sizes(group, self.device).items():
                sizes[name] += size
            # The root stays whole after its forward unless the user said otherwise; known at the first call.
            # Where a part of it stays on fewer ranks, it counts as if all did.
            stays = group.post_forward_mesh_info is not group.mesh_info
            as_root = is_root and private_of(state, "fsdp_frees_as_root", False)
            flags["frees"] &= not (stays or as_root)
            flags["frees_after_backward"] &= group.reshard_after_backward
            flags["reduces"] &= group.reduce_grads
            for parameter in group.fsdp_params:
                present["has_gradients"] |= parameter.sharded_param.grad is not None
                present["has_sums"] |= _summed(parameter) is not None
                present["recast"] |= _gathered_dtype(group, parameter) != _reduced_dtype(group, parameter)
        forward = private_of(state, "fsdp_ahead_in_forward")
        backward = private_of(state, "fsdp_ahead_in_backward")
        ahead = {
            "ahead_in_forward": tuple(place_of[id(other)] for other in forward),
            "ahead_in_backward": tuple(place_of[id(other)] for other in backward),
        }
        modules = len(private_of(state, "fsdp_modules"))
        return Group(self.names[place], modules=modules, **sizes, **flags, **present, **ahead)  # type: ignore[arg-type]

    def whole_gradients(self) -> int:
        """The bytes of gradients of whole parameters that wait to be synchronised."""
        found = [_summed(parameter) for _, _, parameter in self.parameters()]
        return sum(rounded(gradient.nbytes, self.device) for gradient in found if gradient is not None)

    def part_gradients(self) -> int:
        """The bytes of this rank's gradients that are there."""
        found = [parameter.sharded_param.grad for _, _, parameter in self.parameters()]
        return sum(rounded(g.to_local().nbytes, self.device) for g in found if g is not None)


_SIZES = (
    *("sharded", "whole", "gather", "cast", "recopied"),
    *("gradients", "scatter", "scratch", "reduced", "kept", "summed"),
)


def groups_of(state: Any) -> list[Any]:
    """The groups of parameters of a state: one, or none, or one per mesh."""
    found = private_of(state, "fsdp_groups", None)
    if found is not None:
        return list(found)
    one = private_of(state, "fsdp_group", None)
    return [] if one is None else [one]


def _ranks(group: Any) -> int:
    return int(getattr(group.mesh_info, "shard_mesh_size", 1))


def _gathered_dtype(group: Any, parameter: Any) -> torch.dtype:
    return group.mp_policy.param_dtype or parameter.sharded_param.dtype  # type: ignore[no-any-return]


def _reduced_dtype(group: Any, parameter: Any) -> torch.dtype:
    return group.mp_policy.reduce_dtype or _gathered_dtype(group, parameter)  # type: ignore[no-any-return]


def _summed(parameter: Any) -> Any:
    """The gradient of a whole parameter that waits to be synchronised."""
    if parameter.unsharded_accumulated_grad is not None:
        return parameter.unsharded_accumulated_grad
    return getattr(private_of(parameter, "fsdp_whole", None), "grad", None)


def _sizes(group: Any, device: torch.device) -> dict[str, int]:
    """The bytes of one group; buffers are one block each, parameters and gradients one each."""
    ranks, found, blocks = _ranks(group), dict.fromkeys(_SIZES, 0), dict.fromkeys(_SIZES, 0)
    for parameter in group.fsdp_params:
        part = math.prod(parameter.padded_sharded_param_size)
        real = math.prod(private_of(parameter, "fsdp_size"))
        own, moved = parameter.sharded_param.dtype, _gathered_dtype(group, parameter)
        reduced = _reduced_dtype(group, parameter)
        found["sharded"] += rounded(part * own.itemsize, device)
        found["whole"] += rounded(part * ranks * moved.itemsize, device)
        blocks["gather"] += part * ranks * moved.itemsize if ranks > 1 else 0
        blocks["cast"] += part * moved.itemsize if moved != own else 0
        if parameter.fsdp_placement.dim:
            found["recopied"] += rounded(part * ranks * moved.itemsize, device)
        if parameter.sharded_param.requires_grad:
            found["gradients"] += rounded(real * moved.itemsize, device)
            found["summed"] += rounded(real * reduced.itemsize, device)
            blocks["scatter"] += part * ranks * reduced.itemsize
            blocks["scratch"] += part * ranks * reduced.itemsize if device.type == "cpu" else 0
            blocks["reduced"] += part * reduced.itemsize if reduced != own else 0
            blocks["kept"] += part * own.itemsize
    return {name: found[name] + rounded(blocks[name], device) for name in _SIZES}
