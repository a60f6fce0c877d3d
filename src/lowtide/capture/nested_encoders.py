"""`nn.TransformerEncoder` in eval mode with padding: plain PyTorch runs it on nested tensors.

A frozen encoder inside of a step that trains (a teacher, features) takes that road where its padding is at
the ends of the rows: padded places come out as zeros. While torch traces, the encoder asks whether it is
traced and computes them like any other place. What reads them gets other numbers then, not other roundings,
so the step is refused with the two switches that make both alike. Pieces of a broken step run it plainly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .._torch import outside_dynamo
from ..process_wide import attributes

__all__ = ["NESTED", "encoders_as_plain"]

NESTED = (
    "nn.TransformerEncoder in eval mode with padding runs on nested tensors, which cannot be captured; "
    "TransformerEncoder(..., enable_nested_tensor=False), or torch.backends.mha.set_fastpath_enabled(False), "
    "has it run as it is captured"
)
"""What torch is given as the reason not to trace such a call."""

_forward = nn.TransformerEncoder.forward
_plainly = outside_dynamo(_forward, NESTED)


def encoders_as_plain() -> attributes:
    """Let no encoder be traced that plain PyTorch runs on nested tensors."""
    return attributes(nn.TransformerEncoder, forward=_as_plain)


def _as_plain(
    self: Any,
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,
) -> Any:
    nested = mask is None and src_key_padding_mask is not None and _may_nest(self, src)
    run = _plainly if nested and _at_the_ends(src_key_padding_mask) else _forward
    return run(self, src, mask, src_key_padding_mask, is_causal)


def _may_nest(encoder: Any, src: torch.Tensor) -> bool:
    """Whether nothing but the padding keeps an encoder from nested tensors, as its own code asks it."""
    may = torch.backends.mha.get_fastpath_enabled() and getattr(encoder, "use_nested_tensor", False)
    if not may or encoder.layers[0].training or src.dim() != 3 or torch.is_autocast_enabled():
        return False
    trained = src.requires_grad or any(each.requires_grad for each in encoder.layers[0].parameters())
    return not (torch.is_grad_enabled() and trained)


def _at_the_ends(padding: Any) -> bool:
    """Whether all padded places come after the others: a question to the batch."""
    padded = padding if padding.dtype == torch.bool else padding != 0
    return not bool((padded[:, :-1] & ~padded[:, 1:]).any())
