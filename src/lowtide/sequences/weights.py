"""The weights of a stock recurrent module, by name, and in one piece of memory where cuDNN asks for it.

They are looked up at every call, so that weights which were replaced, moved or parametrized are the ones
that are used. cuDNN runs best on weights that lie in one piece, in its own order: those of a whole module
do (`flatten_parameters`), a single layer's or direction's do not, and are copied into such a piece once per
call.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Several
from typing import Any

import torch
from torch import nn

__all__ = ["in_one_piece", "named_weights", "names_of"]


def names_of(module: nn.RNNBase, layer: int, *, reverse: bool = False) -> list[str]:
    """The names of the weights of a layer, in the order of the fused functions."""
    kinds = ["weight_ih", "weight_hh"]
    kinds += ["bias_ih", "bias_hh"] if module.bias else []
    kinds += ["weight_hr"] if module.proj_size else []
    return [f"{kind}_l{layer}{'_reverse' if reverse else ''}" for kind in kinds]


def named_weights(
    owner: nn.Module, module: nn.RNNBase, layers: Iterable[int], *, reverse: bool = False
) -> list[torch.Tensor]:
    """The weights of some layers as they are now."""
    return [getattr(owner, name) for layer in layers for name in names_of(module, layer, reverse=reverse)]


def in_one_piece(module: nn.RNNBase, weights: Several[torch.Tensor]) -> list[torch.Tensor]:
    """The weights of some layers of one direction as a fused call wants them; copies where they must be."""
    each = len(names_of(module, 0))
    whole = len(weights) == each * module.num_layers and not module.bidirectional
    if not torch.backends.cudnn.is_acceptable(weights[0]) or (whole and _lie_together(weights)):
        return list(weights)
    return list(_Together.apply(module, len(weights) // each, *weights))  # type: ignore[no-untyped-call]


def _lie_together(weights: Several[torch.Tensor]) -> bool:
    """Whether weights are in one storage, as `flatten_parameters` leaves all those of a module."""
    storages = {weight.untyped_storage().data_ptr() for weight in weights}
    return len(storages) == 1 and weights[0].storage_offset() == 0


class _Together(torch.autograd.Function):
    """Copies of weights, laid out by a module of the same form; gradients go through as they are."""

    @staticmethod
    def forward(
        ctx: Any, module: nn.RNNBase, layers: int, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        like = _skeleton(module, weights[0], layers)
        copies = tuple(parameter.detach() for parameter in like.parameters())
        for copy, weight in zip(copies, weights, strict=True):
            copy.copy_(weight)
        return copies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        return None, None, *gradients


def _skeleton(module: nn.RNNBase, first: torch.Tensor, layers: int) -> nn.RNNBase:
    """A module of n layers in one direction; no random numbers are drawn for its weights."""
    options: dict[str, Any] = {"num_layers": layers, "bias": module.bias}
    kind: Any = nn.RNN
    if module.mode == "LSTM":
        kind, options["proj_size"] = nn.LSTM, module.proj_size
    elif module.mode == "GRU":
        kind = nn.GRU
    else:
        options["nonlinearity"] = module.mode.removeprefix("RNN_").lower()
    made: nn.RNNBase = kind(first.shape[1], module.hidden_size, **options, device="meta", dtype=first.dtype)
    return made.to_empty(device=first.device)
