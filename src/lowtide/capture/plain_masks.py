"""The attention masks and the experts of `transformers` as in plain PyTorch.

`transformers` leaves a mask out where it can, for the faster kernels that take `is_causal`: it looks whether
the `attention_mask` of a batch is all ones, and whether `position_ids` count one sequence or several. While
torch traces it does not look, and makes the mask in any case: other kernels than plain PyTorch's, which take
more memory and round otherwise. So while Lowtide captures, the functions that ask "is this traced?" say no
to the code that makes masks, and its branches are answered by the batch itself (`branches`). Each of these
branches asks whether the mask can be left out: what cannot be answered is answered no, as in a trace.

So it is with the kernel of a mixture of experts: traced, `transformers` would leave `grouped_mm` for a loop
whose backward cannot be captured (`grouped_products`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from ..process_wide import Shared, UndoneBy, here

__all__ = ["makes_masks", "masks_as_plain", "masks_as_traced"]

MODULES = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")
"""Where masks are made (seen in transformers 5.17 to 5.22)."""

EXPERTS = "transformers.integrations.moe"
"""Where the kernel of a mixture of experts is chosen (seen in transformers 5.22)."""


class _Here(threading.local):
    on = False


_here = _Here()
_own: dict[str, Callable[..., bool]] = {}


def makes_masks(module: str) -> bool:
    """Whether a module of this name makes attention masks, and asks whether they can be left out."""
    return module in MODULES


def masks_as_traced() -> here:
    """Let this thread make masks as in any trace, inside of `masks_as_plain`."""
    return here(_here, on=False)


@contextmanager
def masks_as_plain() -> Iterator[None]:
    """Let this thread trace the making of masks as if it were not traced; other threads are told the truth.

    Only modules that are loaded already are touched, and only for as long as a capped step is called.
    """
    with here(_here, on=True), _away() if any(name in sys.modules for name in MODULES) else nullcontext():
        yield


def _stand_in(undone_by: UndoneBy) -> None:
    """Put the stand-ins in the place of the functions of `transformers`."""
    for module, asked in _ASKED.items():
        names = vars(sys.modules[module]) if module in sys.modules else {}
        for name in asked & names.keys():
            if names[name] is not _STAND_INS[name]:
                undone_by(partial(names.__setitem__, name, names[name]))
                _own[name], names[name] = names[name], _STAND_INS[name]


_away = Shared(_stand_in)
"""They are away for as long as a call of any thread needs that: the guards of such calls look at them."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _elsewhere() -> bool:
    return not _here.on


def _is_tracing(tensor: Any = None) -> bool:
    return _elsewhere() and _own["is_tracing"](tensor)


def _is_exporting() -> bool:
    return _elsewhere() and _own["is_torchdynamo_exporting"]()


def _is_compiling() -> bool:
    return _elsewhere() and _own["is_torchdynamo_compiling"]()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _torch_is_older(version: str, accept_dev: bool = False) -> bool:
    """Called, not traced: torch warns of caches of functions that it traces past."""
    return _own["is_torch_less_or_equal"](version, accept_dev=accept_dev)


_STAND_INS: dict[str, Callable[..., bool]] = {
    "is_tracing": _is_tracing,
    "is_torchdynamo_exporting": _is_exporting,
    "is_torchdynamo_compiling": _is_compiling,
    "is_torch_less_or_equal": _torch_is_older,
}
_ASKED = {
    **{module: {"is_tracing", "is_torchdynamo_exporting"} for module in MODULES},
    EXPERTS: {"is_torchdynamo_compiling", "is_torch_less_or_equal"},
}
