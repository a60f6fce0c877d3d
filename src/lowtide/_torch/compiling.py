"""`torch.compile` with a block around each capture, whatever stance is set."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ..process_wide import Shared, UndoneBy
from .names import private

Around = Callable[[], AbstractContextManager[Any]]


def compiled(
    function: Callable[..., Any], backend: Callable[..., Any], *, fullgraph: bool, around: Around
) -> Callable[..., Any]:
    """What `torch.compile` makes of a function; a block is around each capture, and around no other call.

    By the callback of torch's front end, which calls it with a frame that is new to it (`callback` and
    `_torchdynamo_orig_backend`, by which it finds the backend, seen in 2.11-2.13). Without `dynamic=False`,
    which writes settings at every call: they belong into the block.
    """
    context = private("optimize")(backend=backend, nopython=fullgraph)
    context.callback = _Around(context.callback, around)
    return context(function)  # type: ignore[no-any-return]


class _Around:
    """The front end's callback within a block; one thread at a time, as the front end has it."""

    def __init__(self, callback: Callable[..., Any], around: Around) -> None:
        self._torchdynamo_orig_backend = callback
        self.around = around

    def __call__(self, *frame: Any) -> Any:
        with private("compile_lock"), self.around():
            return self._torchdynamo_orig_backend(*frame)


def stance() -> str:
    """What `torch.compiler.set_stance` says, "default" unless it was called (`_stance` seen in 2.11-2.13)."""
    return private("eval_frame")._stance.stance  # type: ignore[no-any-return]


def _set_usual_stance(undone_by: UndoneBy) -> None:
    module = private("eval_frame")
    asked = module._stance
    if asked.stance in ("default", "fail_on_recompile") and asked.backend is None:
        return
    undone_by(functools.partial(setattr, module, "_stance", asked))
    module._stance = module.DynamoStance()


usual_stance = Shared(_set_usual_stance)
"""A block in which torch.compile captures at once, whatever stance compiled functions of others wait in.

Of those that it sets aside "eager_then_compile" would run a first step without a plan. Not so
"fail_on_recompile", which raises (`_stance` and `DynamoStance` seen in 2.11-2.13).
"""
