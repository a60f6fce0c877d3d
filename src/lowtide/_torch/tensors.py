"""What tensors are made of, and who holds them."""

from __future__ import annotations

from typing import Any

import torch

from .names import private


def storage_key(tensor: torch.Tensor) -> int:
    """What tells storages that are alive apart."""
    return int(tensor.untyped_storage()._cdata)


def inner_tensors(item: Any) -> dict[tuple[str, ...], torch.Tensor]:
    """The plain tensors of a tensor by the attributes that lead to them: of a DTensor, its local one.

    AOTAutograd takes apart by the same protocol what is made of others (`__tensor_flatten__`, 2.11-2.13).
    """
    if not isinstance(item, torch.Tensor):
        return {}
    if not is_made_of_others(item):
        return {(): item}
    return {
        (name, *rest): tensor
        for name in item.__tensor_flatten__()[0]  # type: ignore[attr-defined]
        for rest, tensor in inner_tensors(getattr(item, name)).items()
    }


def is_made_of_others(item: Any) -> bool:
    """Whether a tensor is of a subclass that wraps other tensors, as DTensor does."""
    plain = type(item) in (torch.Tensor, torch.nn.Parameter) or not isinstance(item, torch.Tensor)
    return not plain and hasattr(item, "__tensor_flatten__")


def holders(tensor: torch.Tensor) -> tuple[int, int]:
    """How many hold a tensor, and its storage: Python, autograd, threads of torch's own.

    By `Tensor._use_count`, seen in 2.13.
    """
    count = getattr(tensor, "_use_count", None)
    return 0 if count is None else count(), private("storage_holders")(storage_key(tensor))


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows a tensor as a view of another one (`_is_view`, seen in 2.11-2.13)."""
    return tensor._is_view()
