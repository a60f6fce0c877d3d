"""Whose gradients are awaited while the backward runs: by DistributedDataParallel, or by hooks.

DDP gathers gradients in buckets and starts an all-reduce for each one that is full. With
`gradient_as_bucket_view=True` a gradient is copied into its bucket, where `.grad` then looks, and is gone;
without it, the bucket is a second copy. A gradient that lies in a bucket takes no bytes of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .._torch import is_view, private, private_of

__all__ = ["NOBODY", "Awaited", "awaited", "has_hooks", "in_bucket", "synchronises"]


@dataclass(frozen=True)
class Awaited:
    """The places of leaves whose gradient is awaited; `gone` are those that nobody keeps afterwards."""

    places: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()


NOBODY = Awaited()


def awaited(leaves: Mapping[int, torch.Tensor]) -> Awaited:
    """Whose gradients are waited for, among the leaves of a step by their places."""
    exchanged = _exchanged()
    hooked = {place for place, leaf in leaves.items() if has_hooks(leaf)}
    waiting = {place for place, leaf in leaves.items() if id(leaf) in exchanged}
    # A hook may write to the parameter, so its gradient leaves only when nothing reads that any more. A
    # static graph exchanges the gradients of its first step when all of them are there.
    wrapper = private("active_ddp")()
    into_buckets = synchronises() and wrapper.gradient_as_bucket_view and not wrapper.static_graph
    gone = {place for place in waiting if into_buckets or leaves[place].grad is not None}
    return Awaited(frozenset(hooked | waiting), frozenset(gone - hooked))


def _exchanged() -> set[int]:
    """The parameters whose gradients the DDP around this call exchanges, now or with a later call."""
    wrapper = private("active_ddp")()
    if wrapper is None:
        return set()
    left_out = wrapper.parameters_to_ignore
    named = wrapper.module.named_parameters()
    return {id(p) for name, p in named if p.requires_grad and name not in left_out}


def synchronises() -> bool:
    """Whether a DDP around this call will exchange its gradients; not so under `no_sync`."""
    wrapper = private("active_ddp")()
    return wrapper is not None and bool(wrapper.require_backward_grad_sync)


def in_bucket(gradient: torch.Tensor) -> bool:
    """Whether a gradient lies in a bucket of the DDP around this call."""
    wrapper: Any = private("active_ddp")()
    return wrapper is not None and wrapper.gradient_as_bucket_view and is_view(gradient)


def has_hooks(leaf: torch.Tensor) -> bool:
    """Whether autograd calls hooks with the gradient of a leaf."""
    return bool(private_of(leaf, "backward_hooks") or private_of(leaf, "accumulated_hooks"))
