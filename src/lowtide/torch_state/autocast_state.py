"""The state of autocast: what it is in this thread, and how to be in another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

__all__ = ["State", "as_torch_reads_it", "in_state", "present_state", "switched_to", "under_autocast"]

State = tuple[tuple[str, torch.dtype], ...]
"""The kinds of device on which autocast is on, each with the dtype that it casts to; () where it is off."""


_KINDS = ("cpu", "cuda")


def present_state() -> State:
    """The state of autocast in this thread."""
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in _KINDS if torch.is_autocast_enabled(kind))


@contextmanager
def in_state(state: State) -> Iterator[None]:
    """Autocast in that state and no other, with casts of its own, as where a loop enters and leaves it."""
    torch.clear_autocast_cache()
    try:
        with switched_to(state):
            yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def switched_to(state: State) -> Iterator[None]:
    """Autocast in that state and no other; within an autocast, the weights it has cast stay cast."""
    with ExitStack() as stack:
        for kind in _KINDS if state != present_state() else ():
            dtype = dict(state).get(kind, torch.get_autocast_dtype(kind))
            stack.enter_context(torch.autocast(kind, dtype, enabled=kind in dict(state)))
        yield


def as_torch_reads_it(state: State) -> str | list[dict[str, Any]]:
    """The state as the setting of AOTAutograd for the backward (`backward_pass_autocast`)."""
    return [{"device_type": kind, "dtype": dtype} for kind, dtype in state] or "off"


def under_autocast(state: State, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call an operator with autocast on."""
    with ExitStack() as stack:
        for kind, dtype in state:
            stack.enter_context(torch.autocast(kind, dtype))
        return operator(*args, **kwargs)
