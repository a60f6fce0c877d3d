"""The input of a stock recurrent module in one form, and its results in the form of the module.

Time first and a batch always, or packed rows; the carry as a list. Rows come sorted by their lengths, as
packing leaves them, and go back into the order of the user.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from ..errors import LowtideError
from .lengths import check_lengths
from .sequence import say_leaf

__all__ = ["Batch", "carry_shapes", "is_sound", "packed"]


class Batch:
    """One call's input: `data` is (steps, rows, features), or (packed rows, features) with `sizes`."""

    def __init__(self, module: nn.RNNBase, x: Any, hx: Any) -> None:
        self.module = module
        self.sizes = self.order = self.back = None
        self.single = False
        if isinstance(x, PackedSequence):
            self.data, self.sizes, self.order, self.back = x
        else:
            self.single = x.dim() == 2
            first = module.batch_first and not self.single
            self.data = x.transpose(0, 1) if first else x.unsqueeze(1) if self.single else x
        self.steps = self.data.shape[0] if self.sizes is None else len(self.sizes)
        self.rows = self.data.shape[1] if self.sizes is None else int(self.sizes[0])
        self.carry = (
            [self.start(shape) for shape in carry_shapes(module, self.rows)] if hx is None else self.given(hx)
        )

    def start(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.data.dtype, device=self.data.device)

    def given(self, hx: Any) -> list[torch.Tensor]:
        leaves = list(hx) if self.module.mode == "LSTM" else [hx]
        if self.single:
            return [leaf.unsqueeze(1) for leaf in leaves]
        return leaves if self.order is None else [leaf.index_select(1, self.order) for leaf in leaves]

    def results(self, output: torch.Tensor, carry: list[torch.Tensor]) -> tuple[Any, Any]:
        """The output and the last carry as the module gives them."""
        result: Any = output
        if self.sizes is not None:
            result = PackedSequence(output, self.sizes, self.order, self.back)
            carry = carry if self.back is None else [leaf.index_select(1, self.back) for leaf in carry]
        elif self.single:
            result, carry = output.squeeze(1), [leaf.squeeze(1) for leaf in carry]
        elif self.module.batch_first:
            result = output.transpose(0, 1)
        return result, tuple(carry) if self.module.mode == "LSTM" else carry[0]


def is_sound(module: nn.RNNBase, x: Any, hx: Any, dtype: torch.dtype) -> bool:
    """Whether an input is what the module takes; if not, the module itself says so best."""
    data = x.data if isinstance(x, PackedSequence) else x
    if not isinstance(data, torch.Tensor) or data.numel() == 0 or data.shape[-1] != module.input_size:
        return False
    if data.dtype != dtype and not torch.is_autocast_enabled(data.device.type):
        return False
    if isinstance(x, PackedSequence):
        return data.dim() == 2 and _fits(module, hx, int(x.batch_sizes[0]))
    if data.dim() == 2:
        return _fits(module, hx)
    return data.dim() == 3 and _fits(module, hx, data.shape[0 if module.batch_first else 1])


def _fits(module: nn.RNNBase, hx: Any, *rows: int) -> bool:
    if hx is None:
        return True
    shapes = carry_shapes(module, *rows)
    leaves = hx if module.mode == "LSTM" else (hx,)
    if not isinstance(leaves, tuple | list) or len(leaves) != len(shapes):
        return False
    return all(
        isinstance(leaf, torch.Tensor) and leaf.shape == shape
        for leaf, shape in zip(leaves, shapes, strict=True)
    )


def carry_shapes(module: nn.RNNBase, *rows: int) -> list[tuple[int, ...]]:
    """What the leaves of the carry look like, for a number of rows or, without one, for a single sequence."""
    count = module.num_layers * (2 if module.bidirectional else 1)
    widths = [module.proj_size or module.hidden_size]
    widths += [module.hidden_size] if module.mode == "LSTM" else []
    return [(count, *rows, width) for width in widths]


def packed(module: nn.RNNBase, x: Any, lengths: Any) -> PackedSequence:
    """A padded input as packed rows."""
    if not isinstance(x, torch.Tensor) or x.dim() != 3:
        shape = say_leaf(x)
        raise LowtideError(f"lengths= goes with a padded batch of three dimensions; the input is {shape}")
    rows, steps = x.shape[:2] if module.batch_first else (x.shape[1], x.shape[0])
    lengths = torch.as_tensor(lengths)
    check_lengths(lengths, steps)
    if len(lengths) != rows or (rows and int(lengths.min()) < 1):
        raise LowtideError(
            f"lengths={lengths.tolist()} does not go with a batch of {rows} rows: it takes one number for "
            "each row, of at least 1"
        )
    return pack_padded_sequence(x, lengths.cpu(), module.batch_first, enforce_sorted=False)
