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
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["makes_masks", "masks_as_plain", "masks_as_traced"]

MODULES = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")
"""Where masks are made (seen in transformers 5.17 to 5.22)."""

EXPERTS = "transformers.integrations.moe"
"""Where the kernel of a mixture of experts is chosen (seen in transformers 5.22)."""

_here = threading.local()
_own: dict[str, Callable[..., bool]] = {}


def makes_masks(module: str) -> bool:
    """Whether a module of this name makes attention masks, and asks whether they can be left out."""
    return module in MODULES


@contextmanager
def masks_as_traced() -> Iterator[None]:
    """Let this thread make masks as in any trace, inside of `masks_as_plain`."""
    outer, _here.on = getattr(_here, "on", False), False
    try:
        yield
    finally:
        _here.on = outer


@contextmanager
def masks_as_plain() -> Iterator[None]:
    """Let this thread trace the making of masks as if it were not traced; other threads are told the truth.

    Only modules that are loaded already are touched, and only for as long as a capped step is called.
    """
    outer, _here.on = getattr(_here, "on", False), True
    try:
        with _away:
            yield
    finally:
        _here.on = outer


class _Away:
    """Functions of `transformers` that are stood in for as long as a call of any thread needs that.

    The guards of every such call look at what stands in for them.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls = 0
        self.replaced: list[tuple[dict[str, Any], str, Callable[..., bool]]] = []

    def __enter__(self) -> None:
        with self.lock:
            self.calls += 1
            for module, asked in _ASKED.items():
                names = vars(sys.modules[module]) if module in sys.modules else {}
                for name in asked & names.keys():
                    if names[name] is not _STAND_INS[name]:
                        self.replaced.append((names, name, names[name]))
                        _own[name], names[name] = names[name], _STAND_INS[name]

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.calls -= 1
            while self.replaced and not self.calls:
                names, name, function = self.replaced.pop()
                names[name] = function


_away = _Away()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _elsewhere() -> bool:
    return not getattr(_here, "on", False)


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
