"""Ranks that are not there: a model whose parameters are sharded over them, to plan one of them.

While a plan is made, each parameter of the model is its shard, cut along its first dimension as `fully_shard`
does, and is gathered where the model reads it; its gradient is summed and scattered. That is the step of one
rank under ZeRO-3 (Rajbhandari et al. 2020), in one graph: the plan says which gathered parameters to keep and
which to gather again. The process group is a fake one, in which nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from .._torch import in_process_group, private, private_of
from ..devices.optimizers import each_optimizer, levels
from ..errors import LowtideError
from ..process_wide import attributes

__all__ = ["one_of_ranks"]


@contextmanager
def one_of_ranks(model: Any, inputs: Any, ranks: int, optimizer: Any = None) -> Iterator[Any]:
    """Let a model be that of one rank of many; gives its inputs, without memory as all else is then.

    The groups of an optimizer have the shards meanwhile.
    """
    _refuse(model, ranks)
    with ExitStack() as undone:
        undone.enter_context(_fake_group(ranks))
        shards = {id(p): _shard(p, ranks) for p in model.parameters()}
        for module in list(model.modules()):
            undone.enter_context(_gathering(module, shards))
        for group in _groups(optimizer):
            undone.enter_context(_put(group, {"params": [shards.get(id(p), p) for p in group["params"]]}))
        yield private("tree_map_only")(torch.Tensor, _without_memory, inputs)


_MOST_RANKS = 2**20
"""More than any cluster has; chosen."""


def _refuse(model: Any, ranks: Any) -> None:
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 2 <= ranks <= _MOST_RANKS:
        raise LowtideError(f"ranks={ranks!r} must be a whole number >= 2: the GPUs that share the parameters")
    if not isinstance(model, torch.nn.Module):
        raise LowtideError(
            f"ranks={ranks} shards the parameters of a module, not of a {type(model).__name__}: hand in the "
            "module itself, with the loss inside"
        )
    if in_process_group():
        raise LowtideError(
            f"ranks={ranks} plans for a process group that is not there, and this process is in one: plan "
            "before torch.distributed.init_process_group, or cap the sharded model itself"
        )
    strange = [name for name, p in model.named_parameters() if type(p) is not torch.nn.Parameter]
    if strange:
        raise LowtideError(
            f"ranks={ranks} shards plain parameters, and {strange[0]!r} is of another class: hand in the "
            "model as it is before it is distributed"
        )


@contextmanager
def _fake_group(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=private("FakeStore")(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _shard(parameter: torch.nn.Parameter, ranks: int) -> torch.nn.Parameter:
    """The first rank's part: equal parts of the rows, the last filled up; a number is there on every rank."""
    shape = list(parameter.shape)
    if shape:
        shape[0] = -(-shape[0] // ranks)
    shard = torch.empty(shape, dtype=parameter.dtype, device="meta")
    return torch.nn.Parameter(shard, requires_grad=parameter.requires_grad)


@contextmanager
def _gathering(module: torch.nn.Module, shards: dict[int, torch.nn.Parameter]) -> Iterator[None]:
    """Let a module hold shards, and give whole parameters where it is asked for them."""
    own = private_of(module, "parameters")
    whole = {name: parameter for name, parameter in own.items() if parameter is not None}
    buffers = private_of(module, "buffers")
    empty = {name: _without_memory(b) for name, b in buffers.items() if b is not None}
    gathered = {name: _gathered(name, p.shape) for name, p in whole.items() if p.dim()}
    with ExitStack() as undone:
        undone.enter_context(_put(own, {name: shards[id(p)] for name, p in whole.items()}))
        undone.enter_context(_put(buffers, empty))
        if gathered:
            kind = type(module)
            sharded = type(kind.__name__, (kind,), {**gathered, "__module__": kind.__module__})
            undone.enter_context(attributes(module, __class__=sharded))
        yield


def _gathered(name: str, shape: Sequence[int]) -> property:
    gather, rows = private("gather_from_ranks"), shape[0]

    def parameter(module: torch.nn.Module) -> Any:
        shard = private_of(module, "parameters")[name]
        whole = gather(shard, gather_dim=0, group=dist.group.WORLD)
        return whole if whole.shape[0] == rows else whole[:rows]

    return property(parameter)


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    found = [level for one in each_optimizer(optimizer) for level in levels(one)]
    return list({id(group): group for one in found for group in one.param_groups}.values())


@contextmanager
def _put(table: dict[str, Any], entries: dict[str, Any]) -> Iterator[None]:
    """Put entries in the place of others for a while."""
    before = {name: table[name] for name in entries}
    table.update(entries)
    try:
        yield
    finally:
        table.update(before)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return empty.requires_grad_(tensor.requires_grad)
